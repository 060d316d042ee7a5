"""Standard tools read and write at a router over HTTPS: files, ranges, conditions, digests, listings."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import socket
import ssl
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from stageout.overlay.channel import Gateway
from stageout.overlay.client import put
from stageout.overlay.fetch import get
from stageout.overlay.key_file import read_key
from tests.harness.pool.waiting import wait_until
from tests.overlay.http_site import Site, site

_CONTENT = os.urandom(3 * 1024 * 1024 + 17)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("site")) as found:
        yield found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(_CONTENT)
    return path


class _Tokens(requests.Session):
    """Requests with a token of a user."""

    def __init__(self, here: Site, user: str = "alice", **claims: object) -> None:
        super().__init__()
        self.trust_env, self.verify, self._url = False, str(here.ca), here.url
        self.headers["Authorization"] = f"Bearer {here.token(user, **claims)}"

    def request(self, method: str, url: str, *args: object, **options: object) -> requests.Response:  # type: ignore[override]
        return super().request(method, self._url + url, *args, timeout=30, **options)  # type: ignore[arg-type]


def _etag(session: _Tokens, path: str) -> str:
    return session.head(path).headers["ETag"]


def test_curl_puts_and_gets(here: Site, source: Path, tmp_path: Path) -> None:
    status, head = here.curl("/curl/new/f", "--upload-file", str(source))
    assert status == 201, head
    assert (here.root / "curl/new/f").read_bytes() == _CONTENT
    assert here.curl("/curl/new/f", "--upload-file", str(source))[0] == 204
    chunked = ("--upload-file", str(source), "--header", "Transfer-Encoding: chunked")
    assert here.curl("/curl/chunked", *chunked)[0] == 201
    assert (here.root / "curl/chunked").read_bytes() == _CONTENT
    back = tmp_path / "back"
    whole = ["curl", "--silent", "--fail", "--cacert", str(here.ca), "--user", f"any:{here.token()}"]
    subprocess.run([*whole, "--output", str(back), f"{here.url}/curl/new/f"], check=True)
    assert back.read_bytes() == _CONTENT
    back.write_bytes(_CONTENT[:1_000_000])
    subprocess.run([*whole, "--continue-at", "-", "--output", str(back), f"{here.url}/curl/new/f"], check=True)
    assert back.read_bytes() == _CONTENT


def test_an_upload_is_never_resumed_into_half_a_file(here: Site, source: Path) -> None:
    status, answer = here.curl("/resumed", "--upload-file", str(source), "--continue-at", "1000")
    assert status == 400 and "a part of a file cannot be put" in answer
    assert not (here.root / "resumed").exists()


def test_wget_continues(here: Site, tmp_path: Path) -> None:
    (here.root / "wget").write_bytes(_CONTENT)
    (tmp_path / "wget").write_bytes(_CONTENT[:2_000_000])
    command = ["wget", "--quiet", "--ca-certificate", str(here.ca), "--header", f"Authorization: Bearer {here.token()}"]
    subprocess.run([*command, "--continue", f"{here.url}/wget"], cwd=tmp_path, check=True)
    assert (tmp_path / "wget").read_bytes() == _CONTENT


def test_ranges(here: Site) -> None:
    (here.root / "ranges").write_bytes(_CONTENT)
    session = _Tokens(here)
    for said, start, end in (("0-9", 0, 10), ("100-", 100, None), ("-7", -7, None), ("5-999999999", 5, None)):
        answer = session.get("/ranges", headers={"Range": f"bytes={said}"})
        assert (answer.status_code, answer.content) == (206, _CONTENT[start:end])
    assert session.get("/ranges", headers={"Range": "bytes=99999999-"}).status_code == 416
    for nonsense in ("bytes=9-5", "bytes=-", "bytes=a-b", "lines=1-2", "bytes=1-2-3"):
        assert session.get("/ranges", headers={"Range": nonsense}).content == _CONTENT
    several = session.get("/ranges", headers={"Range": "bytes=0-3,-2"})
    assert several.status_code == 206 and several.headers["Content-Type"].startswith("multipart/byteranges")
    assert _CONTENT[:4] in several.content and _CONTENT[-2:] in several.content
    assert int(several.headers["Content-Length"]) == len(several.content)
    # as davix reads vectors
    many = session.get("/ranges", headers={"Range": "bytes=" + ",".join(f"{at}-{at}" for at in range(0, 8000, 10))})
    assert many.status_code == 206 and many.content.count(b"Content-Range: ") == 800


def test_conditions(here: Site, source: Path) -> None:
    session = _Tokens(here)
    assert session.put("/conditions", data=b"one", headers={"If-None-Match": "*"}).status_code == 201
    assert session.put("/conditions", data=b"two", headers={"If-None-Match": "*"}).status_code == 412
    first = _etag(session, "/conditions")
    assert session.put("/conditions", data=b"two", headers={"If-Match": first}).status_code == 204
    assert session.put("/conditions", data=b"three", headers={"If-Match": first}).status_code == 412
    assert session.put("/absent", data=b"x", headers={"If-Match": first}).status_code == 412
    second = _etag(session, "/conditions")
    assert first != second and (here.root / "conditions").read_bytes() == b"two"
    assert session.get("/conditions", headers={"If-None-Match": second}).status_code == 304
    assert session.get("/conditions", headers={"If-Match": first}).status_code == 412
    ranged = {"Range": "bytes=0-0"}
    assert session.get("/conditions", headers={**ranged, "If-Range": second}).content == b"t"
    assert session.get("/conditions", headers={**ranged, "If-Range": first}).content == b"two"


def test_a_name_that_was_made_again_has_another_tag(here: Site) -> None:
    session, seen = _Tokens(here), set()
    for _ in range(5):
        seen.add(session.put("/again", data=b"same").headers["ETag"])
        assert _etag(session, "/again") in seen
        (here.root / "again").unlink()
    assert len(seen) == 5


def test_digests(here: Site, source: Path) -> None:
    session, adler = _Tokens(here), f"{zlib.adler32(_CONTENT):08x}"
    sha256 = base64.b64encode(hashlib.sha256(_CONTENT).digest()).decode()
    wrong = base64.b64encode(bytes(32)).decode()
    assert session.put("/digest", data=_CONTENT, headers={"Repr-Digest": f"sha-256=:{wrong}:"}).status_code == 422
    assert session.put("/digest", data=_CONTENT, headers={"Digest": "adler32=1"}).status_code == 422
    assert session.put("/digest", data=_CONTENT, headers={"Repr-Digest": "sha-256=wrong"}).status_code == 400
    assert not (here.root / "digest").exists()
    right = {"Repr-Digest": f"sha-256=:{sha256}:", "Digest": f"adler32={adler}"}
    assert session.put("/digest", data=_CONTENT, headers=right).status_code == 201
    (here.root / "foreign").write_bytes(_CONTENT)
    for path in ("/digest", "/foreign", "/foreign"):
        found = session.head(path, headers={"Want-Digest": "adler32"}).headers
        assert found["Digest"] == f"adler32={adler}"
        found = session.get(path, headers={"Want-Repr-Digest": "unknown=10, sha-256=3, md5=1"}).headers
        assert found["Repr-Digest"] == f"sha-256=:{sha256}:"
    (here.root / "foreign").write_bytes(b"changed")
    found = session.head("/foreign", headers={"Want-Digest": "adler32"}).headers
    assert found["Digest"] == f"adler32={zlib.adler32(b'changed'):08x}"


def test_listings(here: Site) -> None:
    (here.root / "list/inner").mkdir(parents=True)
    (here.root / "list/f <1>%é").write_bytes(b"123")
    (here.root / "list/inner/deep").write_bytes(b"")
    (here.root / "list/link").symlink_to("/etc/passwd")
    session = _Tokens(here)
    lines = [json.loads(line) for line in session.get("/list/?list").text.splitlines()]
    assert {(one["name"], one["kind"], one["size"]) for one in lines} == {
        ("inner", "directory", None), ("f%20%3C1%3E%25%C3%A9", "file", 3), ("link", "link", None)
    }  # fmt: skip
    deep = session.get("/list/?list&depth=infinity").text.splitlines()
    assert "inner/deep" in {json.loads(line)["name"] for line in deep}
    page = session.get("/list")  # which is sent on to the name with a slash
    assert page.url.endswith("/list/") and "f &lt;1&gt;%é" in page.text and "./f%20%3C1%3E%25%C3%A9" in page.text
    assert "Content-Security-Policy" in page.headers
    assert ".stageout" not in session.get("/").text
    assert session.get("/list/link").status_code == 404
    assert session.get("/list/f%20%3C1%3E%25%C3%A9").content == b"123"


def test_names_stay_below_the_root(here: Site) -> None:
    (here.root.parent / "outside").write_bytes(b"secret")
    for path, status in (
        ("/../outside", 400), ("/%2e%2e/outside", 400), ("/a%2Fb", 400), ("/a%00", 400), ("/a//b", 400), ("/%zz", 400),
        ("/.stageout/staging", 403), ("/.STAGEOUT/x", 403), ("/" + "x" * 256, 400),
    ):  # fmt: skip
        for method in ("GET", "PUT"):
            assert here.curl(path, "--path-as-is", "--request", method)[0] == status, path
    assert [here.curl("/.via/x", "--request", method)[0] for method in ("GET", "PUT")] == [403, 405]


def test_what_comes_by_http_is_a_file_like_any_other(here: Site, source: Path, tmp_path: Path) -> None:
    """The overlay's own commands read it, with its digests, and write for HTTP."""
    gateway = Gateway("127.0.0.1", here.router.port, *read_key(here.router.key_file("site")), timeout_s=20)
    assert here.curl("/both", "--upload-file", str(source))[0] == 201
    get(gateway, "both", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == _CONTENT
    put(gateway, source, "other")
    assert _Tokens(here).get("/other").content == _CONTENT


def _connected(here: Site) -> ssl.SSLSocket:
    sock = socket.create_connection(("127.0.0.1", here.router.port), timeout=30)
    return ssl.create_default_context(cafile=str(here.ca)).wrap_socket(sock, server_hostname="localhost")


def _half(here: Site) -> bytes:
    """Half a PUT."""
    lines = "PUT /half HTTP/1.1", "Host: x", f"Authorization: Bearer {here.token()}", "Content-Length: 4000000", "\r\n"
    return "\r\n".join(lines).encode() + bytes(2_000_000)


def test_half_a_body_leaves_nothing(here: Site) -> None:
    head = (
        f"PUT /half HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {here.token()}\r\nContent-Length: 4000000\r\n"
    )
    with _connected(here) as sock:
        sock.sendall(head.encode() + b"\r\n" + bytes(2_000_000))
        staging = here.root / ".stageout/staging"
        wait_until(lambda: list(staging.iterdir()), what="data", timeout_s=30)
    wait_until(lambda: not list(staging.iterdir()), what="the end of these data", timeout_s=30)
    assert not (here.root / "half").exists()


def test_nothing_of_a_killed_router_is_left(tmp_path: Path) -> None:
    with site(tmp_path) as here:
        staging = here.root / ".stageout/staging"
        with _connected(here) as sock:
            sock.sendall(_half(here))
            wait_until(lambda: list(staging.iterdir()), what="data", timeout_s=30)
            here.router.kill()
        here.router.start()
        assert not list(staging.iterdir()) and not (here.root / "half").exists()
        assert here.curl("/half", "--request", "PUT", "--data", "whole")[0] == 201


def test_plain_http_needs_a_setting(here: Site, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{here.router.port}/"
    answer = requests.get(url, headers={"Authorization": f"Bearer {here.token()}"}, timeout=30)
    assert answer.status_code == 400 and "in TLS only" in answer.text
    with site(tmp_path, {"STAGEOUT_ROUTER_HTTP_PLAIN": "true", "STAGEOUT_ROUTER_CERT": ""}) as plain:
        url = f"http://127.0.0.1:{plain.router.port}/f"
        headers = {"Authorization": f"Bearer {plain.token()}"}
        assert requests.put(url, data=_CONTENT, headers=headers, timeout=30).status_code == 201
        assert requests.get(url, headers=headers, timeout=30).content == _CONTENT
        assert requests.get(url, headers={**headers, "Range": "bytes=9-"}, timeout=30).content == _CONTENT[9:]


def test_by_ipv6(tmp_path: Path) -> None:
    with site(tmp_path, {"STAGEOUT_ROUTER_HOST": "::1"}) as six:
        options = ("--insecure", "--connect-to", f"localhost:{six.router.port}:[::1]:{six.router.port}")
        assert six.curl("/f", "--request", "PUT", "--data", "x", *options)[0] == 201


def test_tls_is_of_version_1_3(here: Site) -> None:
    assert here.curl("/", "--tls-max", "1.2")[0] == 0
    with _connected(here) as sock:
        assert sock.version() == "TLSv1.3"


def test_errors_are_problems(here: Site) -> None:
    answer = _Tokens(here).get("/absent/name?x=1")
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.json() == {
        "type": "about:blank", "title": "Not Found", "status": 404, "detail": "there is no such name",
        "instance": "/absent/name",
    }  # fmt: skip
    assert _Tokens(here).request("BREW", "/").status_code == 405
    (here.root / "file").write_bytes(b"")
    assert _Tokens(here).put("/file/below", data=b"x").status_code == 409
    assert _Tokens(here).put("/", data=b"x").status_code == 409
    assert _Tokens(here).get("/", headers={"Origin": "https://evil.example.org"}).status_code == 403


def test_one_connection_brings_many_requests(here: Site) -> None:
    session = _Tokens(here)
    for number in range(20):
        assert session.put(f"/many/{number}", data=b"x" * number).status_code == 201
        assert session.get(f"/many/{number}").content == b"x" * number
        assert session.get("/many/none").status_code == 404
    assert len(list((here.root / "many").iterdir())) == 20


def test_a_refused_upload_is_answered_before_it_is_sent(here: Site, tmp_path: Path) -> None:
    """A client that asks first, and one that just sends: both see the answer."""
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(64 << 20)
    for header in ("Expect: 100-continue", "Expect:"):
        options = ("--upload-file", str(large), "--header", header)
        assert here.curl("/not-bobs", *options, token=here.token("bob"))[0] == 403
