"""Third-party copies (HTTP-TPC): between two routers, and between a router and nginx."""

from __future__ import annotations

import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import trustme

from tests.harness.pool.waiting import wait_until
from tests.harness.ports import free_ports
from tests.overlay.http_site import Site, site

_CONTENT = os.urandom(5 * 1024 * 1024 + 3)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory, authority: trustme.CA) -> Iterator[tuple[Site, Site]]:
    """Two routers that trust one CA, and copy from and to ``localhost``, by name."""
    home = tmp_path_factory.mktemp("ca")
    authority.cert_pem.write_to_path(str(home / "ca.pem"))
    settings = {
        "SSL_CERT_FILE": str(home / "ca.pem"),
        "STAGEOUT_ROUTER_COPY_HOSTS": "localhost, *.example.org, 127.0.0.*",
    }
    with ExitStack() as stack:
        one, other = (
            stack.enter_context(site(tmp_path_factory.mktemp(name), settings, authority=authority))
            for name in ("one", "other")
        )
        yield one, other


def _copy(here: Site, path: str, *fields: str, token: str = "") -> tuple[int, str]:
    options = [word for field in fields for word in ("--header", field)]
    status, text = here.curl(path, "--request", "COPY", *options, token=token)
    return status, text.strip().rpartition("\n")[2]


def _bearer(there: Site) -> str:
    return f"TransferHeaderAuthorization: Bearer {there.token()}"


def test_pull_and_push(sites: tuple[Site, Site]) -> None:
    here, there = sites
    (there.root / "source").write_bytes(_CONTENT)
    told = _copy(here, "/pulled/new", f"Source: {there.url}/source", _bearer(there))
    assert told == (202, "success: Created")
    assert (here.root / "pulled/new").read_bytes() == _CONTENT
    assert _copy(here, "/pulled/new", f"Destination: {there.url}/pushed", _bearer(there)) == (202, "success: Created")
    assert (there.root / "pushed").read_bytes() == _CONTENT
    pushed = f"Destination: {there.url}/pushed", _bearer(there)
    assert _copy(here, "/pulled/new", *pushed, "Overwrite: F") == (202, "failure: the destination answers 412")
    pulled = f"Source: {there.url}/source", _bearer(there), "Overwrite: F"
    assert _copy(here, "/pulled/new", *pulled)[1].startswith("failure: there is another version")
    assert _copy(here, "/none", f"Destination: {there.url}/x", _bearer(there))[0] == 404


def test_a_digest_is_compared_if_the_client_wants_it(sites: tuple[Site, Site], authority: trustme.CA) -> None:
    here, there = sites
    (there.root / "checked").write_bytes(_CONTENT)
    wanted = _bearer(there), "RequireChecksumVerification: true"
    assert _copy(here, "/checked", f"Source: {there.url}/checked", *wanted)[1] == "success: Created"
    assert (here.root / "checked").read_bytes() == _CONTENT
    assert _copy(here, "/checked", f"Destination: {there.url}/checked", *wanted)[1] == "success: Created"
    body = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"
    with _server(authority, body, b"HTTP/1.1 200 OK\r\nDigest: adler32=024d0128\r\n\r\n") as url:
        told = _copy(here, "/differs", f"Source: {url}/x", "RequireChecksumVerification: true")
    assert told[1].startswith("failure: the file has another Adler-32") and not (here.root / "differs").exists()
    with _server(authority, b"HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n", body) as url:
        told = _copy(here, "/checked", f"Destination: {url}/x", "RequireChecksumVerification: true")
    assert told[1].startswith("failure: the other server does not tell")


def test_a_destination_answers_before_it_gets_the_body(sites: tuple[Site, Site], authority: trustme.CA) -> None:
    """Grids' servers send a writer on, and refuse, as soon as they see the head; they never read the body."""
    here, there = sites
    (here.root / "early").write_bytes(_CONTENT)
    sent_on = f"HTTP/1.1 307 Temporary Redirect\r\nLocation: {there.url}/early\r\n\r\n".encode()
    away = b"HTTP/1.1 302 Found\r\nLocation: https://evil.org/\r\n\r\n"
    for answer, last in (
        (sent_on, "success: Created"),
        (b"HTTP/1.1 507 Insufficient Storage\r\n\r\n", "failure: the destination answers 507"),
        (away, "failure: this router copies from and to hosts in STAGEOUT_ROUTER_COPY_HOSTS only"),
    ):
        with _server(authority, answer) as url:
            assert _copy(here, "/early", f"Destination: {url}/x", _bearer(there))[1] == last
    assert (there.root / "early").read_bytes() == _CONTENT


def test_nothing_of_a_killed_router_is_left(tmp_path: Path, authority: trustme.CA) -> None:
    """The client sees no last line, and asks again."""
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    settings = {"SSL_CERT_FILE": str(tmp_path / "ca.pem"), "STAGEOUT_ROUTER_COPY_HOSTS": "localhost"}
    slow = _Slow(authority, b"HTTP/1.1 200 OK\r\nContent-Length: 5000000\r\n\r\n")
    with site(tmp_path / "site", settings, authority=authority) as here:
        staging, told = here.root / ".stageout/staging", list[tuple[int, str]]()
        source = f"Source: https://localhost:{slow.port}/x"
        client = threading.Thread(target=lambda: told.append(_copy(here, "/f", source)))
        client.start()
        wait_until(lambda: list(staging.iterdir()), what="the beginning of the copy", timeout_s=30)
        here.router.kill()
        client.join(60)
        slow.close()
        assert slow.was_ended.is_set() and "success" not in str(told) and "failure" not in str(told)
        here.router.start()
        assert not list(staging.iterdir()) and not (here.root / "f").exists()
        with _server(authority, b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc") as url:
            assert _copy(here, "/f", f"Source: {url}/x")[1] == "success: Created"
        assert (here.root / "f").read_bytes() == b"abc"


def test_what_fails_leaves_nothing(sites: tuple[Site, Site]) -> None:
    here, there = sites
    assert _copy(here, "/n", f"Source: {there.url}/none", _bearer(there)) == (202, "failure: the source answers 404")
    assert _copy(here, "/n", f"Source: {there.url}/source") == (202, "failure: the source answers 401")
    port = there.router.port
    private = _copy(here, "/n", f"Source: https://127.0.0.1:{port}/source", _bearer(there))
    assert "an address that is not public" in private[1]
    for url, status in (
        ("https://evil.org/x", 403), (f"http://localhost:{port}/x", 403), ("file:///etc/passwd", 403),
        (f"https://a:b@localhost:{port}/source", 403), ("https://localhost:99999/x", 400), ("https://[::1/x", 400),
    ):  # fmt: skip
        assert _copy(here, "/n", f"Source: {url}")[0] == status, url
    good = f"Source: {there.url}/source"
    for field in ("TransferHeaderHost: x", "TransferHeaderContent-Length: 5", "Credential: gridsite"):
        assert _copy(here, "/n", good, field)[0] == 400, field
    assert _copy(here, "/outside", good, _bearer(there), token=here.token("bob"))[0] == 403
    assert _copy(here, "/n", good, f"Destination: {there.url}/n")[0] == 400
    assert not (here.root / "n").exists() and not (here.root / "outside").exists()
    assert not list((here.root / ".stageout/staging").iterdir())


@contextmanager
def _nginx(home: Path, authority: trustme.CA) -> Iterator[str]:
    """A storage server; its URL."""
    (port,) = free_ports(1)
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(home / "cert.pem"))
    (home / "files").mkdir()
    temporary = " ".join(
        f"{one}_temp_path {home}/temp;" for one in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (home / "nginx.conf").write_text(
        f"daemon off; user root; pid {home}/pid; error_log {home}/log; events {{}}\n"
        f"http {{ access_log off; {temporary} server {{ listen 127.0.0.1:{port} ssl; ssl_certificate {home}/cert.pem;"
        f" ssl_certificate_key {home}/cert.pem; root {home}/files; client_max_body_size 0; dav_methods PUT DELETE;"
        " create_full_put_path on; } }\n"
    )
    program = shutil.which("nginx") or "/usr/sbin/nginx"
    with subprocess.Popen([program, "-c", str(home / "nginx.conf"), "-e", str(home / "log")]) as process:
        try:
            wait_until(lambda: _listens(port), what="nginx", timeout_s=20)
            yield f"https://localhost:{port}"
        finally:
            process.terminate()


def _listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="nginx's workers would be another user")
def test_a_server_of_others(sites: tuple[Site, Site], authority: trustme.CA, tmp_path: Path) -> None:
    here, _ = sites
    with _nginx(tmp_path, authority) as url:
        (tmp_path / "files/source").write_bytes(_CONTENT)
        assert _copy(here, "/from-nginx", f"Source: {url}/source") == (202, "success: Created")
        assert (here.root / "from-nginx").read_bytes() == _CONTENT
        assert _copy(here, "/from-nginx", f"Destination: {url}/new/f") == (202, "success: Created")
        assert (tmp_path / "files/new/f").read_bytes() == _CONTENT
        for way in (f"Source: {url}/source", f"Destination: {url}/new/g"):
            asked = _copy(here, "/from-nginx", way, "RequireChecksumVerification: true")
            assert asked == (202, "failure: the other server does not tell the Adler-32 of the file: it answers 200")


@contextmanager
def _server(authority: trustme.CA, *answers: bytes) -> Iterator[str]:
    """An HTTPS server that gives each connection one of these answers when it has seen a head; its URL."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)

    def serve() -> None:
        for answer in answers:
            raw, _ = listening.accept()
            with context.wrap_socket(raw, server_side=True) as sock:
                head = b""
                while b"\r\n\r\n" not in head:
                    head += sock.recv(65536)
                if b"PUT" in head and b" 201 " in answer:
                    sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                    left = int(re.findall(rb"Content-Length: (\d+)", head)[0])
                    while left:
                        left -= len(sock.recv(65536))
                sock.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(30)
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"https://localhost:{listening.getsockname()[1]}"
        finally:
            thread.join(60)


class _Slow:
    """An HTTPS server that sends the beginning of a file, and then waits, or ends."""

    def __init__(self, authority: trustme.CA, head: bytes) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port, self._head = self._listening.getsockname()[1], head
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("localhost").configure_cert(self._context)
        self.go_on, self.was_ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        raw, _ = self._listening.accept()
        with self._context.wrap_socket(raw, server_side=True) as sock:
            sock.settimeout(30)
            sock.recv(65536)
            sock.sendall(self._head + bytes(1000))
            if b"chunked" not in self._head and b"Length" in self._head and not self.go_on.is_set():
                sock.recv(1)
                self.was_ended.set()

    def close(self) -> None:
        self._thread.join(30)
        self._listening.close()


def test_a_client_that_ends_the_connection_cancels_the_copy(sites: tuple[Site, Site], authority: trustme.CA) -> None:
    here, _ = sites
    slow = _Slow(authority, b"HTTP/1.1 200 OK\r\nContent-Length: 5000000\r\n\r\n")
    command = ["curl", "--silent", "--no-buffer", "--cacert", str(here.ca), "--request", "COPY"]
    headers = [f"Authorization: Bearer {here.token()}", f"Source: https://localhost:{slow.port}/x"]
    options = [word for header in headers for word in ("--header", header)]
    with subprocess.Popen([*command, *options, f"{here.url}/cancelled"], stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "Perf Marker\n"
        told = "".join(client.stdout.readline() for _ in range(5))
        client.kill()
    assert "Stripe Bytes Transferred: 1000\n" in told and told.endswith("End\n")
    assert slow.was_ended.wait(10)
    slow.close()
    wait_until(lambda: not list((here.root / ".stageout/staging").iterdir()), what="the end of the data", timeout_s=10)
    assert not (here.root / "cancelled").exists()


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5000\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\nDigest: adler32=00000001\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: https://evil.org/\r\nContent-Length: 1000\r\n\r\n",
        b"nonsense\r\n\r\n",
    ],
)
def test_a_source_that_is_cut_makes_no_file(sites: tuple[Site, Site], authority: trustme.CA, head: bytes) -> None:
    here, _ = sites
    slow = _Slow(authority, head)
    slow.go_on.set()
    status, last = _copy(here, "/cut", f"Source: https://localhost:{slow.port}/x")
    slow.close()
    assert status == 202 and last.startswith("failure: ") and not (here.root / "cut").exists()
