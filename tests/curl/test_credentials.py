"""Tokens: read for each request, given to their own server only, and never told to anybody."""

from __future__ import annotations

import base64
import json
import time

import pytest

from stageout.core.errors import ErrorClass as K
from stageout.testing.starter import Wanted
from tests.curl.interposer import Interposer, Reply, status
from tests.curl.plugin import NO_RETRY
from tests.curl.servers import WebDav

SECRET = "eyJ0b2tlbiI6InZlcnktc2VjcmV0In0"


@pytest.fixture
def credentials(tmp_path):
    folder = tmp_path / "creds"
    folder.mkdir()
    (folder / "site.use").write_text(json.dumps({"access_token": SECRET, "expires_in": 1200}))
    (folder / "site_write.use").write_text(SECRET + "-write\n")
    return folder


def with_service(url, prefix):
    return f"{prefix}+{url}"


@pytest.mark.parametrize(("prefix", "token"), [("site", SECRET), ("site.write", SECRET + "-write")])
def test_token(plugin, door, nginx, credentials, prefix, token):
    nginx.file("tok").write_bytes(b"data")
    url = with_service(door.url("tok"), prefix)
    for result in (plugin.get(url, credentials=credentials), plugin.put(url, credentials=credentials)):
        assert result.ok
        assert SECRET not in result.everything
    assert {asked.headers["authorization"] for asked in door.asked} == {f"Bearer {token}"}


def test_no_credential(plugin, door):
    result = plugin.get(with_service(door.url("tok"), "site"))
    assert result.failures == [K.CREDENTIAL_MISSING]
    assert "use_oauth_services" in result.ad["TransferError"]
    assert door.asked == []


def test_renewed_between_attempts(plugin, door, nginx, credentials):
    """The starter renews tokens during a transfer: each request reads the file."""

    def renew(asked, forward):
        (credentials / "site.use").write_text(SECRET + "-new")
        return status(503)(asked, forward)

    door.next("PUT", renew)
    assert plugin.put(with_service(door.url("renewed"), "site"), credentials=credentials).ok
    seen = [asked.headers["authorization"] for asked in door.asked]
    assert seen == [f"Bearer {SECRET}", f"Bearer {SECRET}-new", f"Bearer {SECRET}-new"]


def test_expired(plugin, door, tmp_path):
    """A token whose own time is over is told apart from one that the server does not like."""
    claims = base64.urlsafe_b64encode(json.dumps({"exp": time.time() - 60}).encode()).decode().rstrip("=")
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "site.use").write_text(f"eyJhbGciOiJub25lIn0.{claims}.c2ln")
    door.always("PUT", status(401))
    result = plugin.put(with_service(door.url("old"), "site"), credentials=folder)
    assert result.failures == [K.CREDENTIAL_EXPIRED]
    assert claims not in result.everything


@pytest.mark.parametrize(
    "content",
    [
        f"# made by a tool\n{SECRET}\n",
        f"\n  # indented\n\n{SECRET}\nfurther line\n",
        f'# made by a tool\n{{"access_token": "{SECRET}"}}\n',
        f'{{"access_token":\n "{SECRET}"}}\n# end\n',
    ],
)
def test_comments_beside_the_token(plugin, door, nginx, tmp_path, content):
    """As HTCondor's plugin reads it: no line that begins with #, and of a plain token one line."""
    folder = tmp_path / "commented"
    folder.mkdir()
    (folder / "site.use").write_text(content)
    nginx.file("tok").write_bytes(b"data")
    result = plugin.get(with_service(door.url("tok"), "site"), credentials=folder)
    assert result.ok
    assert {asked.headers["authorization"] for asked in door.asked} == {f"Bearer {SECRET}"}


@pytest.mark.parametrize("content", ["# nothing\n", "tab\there", "ümlaut", ""])
def test_what_is_no_token(plugin, door, tmp_path, content):
    """A line break in a token would be a header of its own."""
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "site.use").write_text(content)
    result = plugin.get(with_service(door.url("x"), "site"), credentials=folder)
    assert result.kind in (K.CREDENTIAL_MISSING, K.CREDENTIAL_REFUSED)
    assert door.asked == []


# ---- redirects -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [301, 302, 307, 308])
@pytest.mark.parametrize("place", ["same", "other"])
def test_redirect(plugin, door, nginx, credentials, code, place):
    """To the same host with the token, to another one without; PUT stays PUT and carries its body."""
    nginx.file("there").write_bytes(b"data")
    other = Interposer(nginx.port)
    target = door if place == "same" else other
    door.next("GET", status(code, Location=target.url("there")))
    assert plugin.get(with_service(door.url("here"), "site"), credentials=credentials).ok
    assert plugin.got() == b"data"
    door.next("PUT", status(code, Location=target.url(f"there-{code}-{place}")))
    result = plugin.put(with_service(door.url(f"there-{code}-{place}"), "site"), b"sent", credentials=credentials)
    assert result.ok
    assert nginx.file(f"there-{code}-{place}").read_bytes() == b"sent"
    seen = {asked.headers.get("authorization") for asked in target.asked}
    assert seen == ({f"Bearer {SECRET}"} if place == "same" else {None})
    other.close()


def test_relative_redirect(plugin, door, nginx):
    nginx.file("there").write_bytes(b"data")
    door.next("GET", status(302, Location="/there"))
    assert plugin.get(door.url("deep/here")).ok


def test_redirect_of_a_large_upload(plugin, door, nginx):
    """Storage systems send the client on to a data server: the body is read again from its beginning."""
    data = bytes(range(256)) * 20_000
    other = Interposer(nginx.port)
    door.next("PUT", status(307, Location=other.url("big-there?token=one-time-secret")))
    result = plugin.put(door.url("big-there"), data)
    assert result.ok
    assert nginx.file("big-there").read_bytes() == data
    assert "one-time-secret" not in result.everything
    other.close()


@pytest.mark.parametrize("stored", [True, False])
def test_upload_answered_by_see_other(plugin, door, nginx, stored):
    """The place that 303 names shows whether the server took the file, as for HTCondor's own plugin."""

    def see_other(asked, forward):
        if stored:
            forward()
        return Reply(303, {"Location": f"/other{stored}"})

    door.next("PUT", see_other)
    result = plugin.put(door.url(f"other{stored}"), b"data")
    assert result.ok is stored
    assert result.ad["DeveloperData"]["TransferHTTPStatusCode"] == (200 if stored else 404)
    assert door.methods().count("PUT") == 1


@pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://127.0.0.1/x", "gopher://127.0.0.1/x", "http://", ""])
def test_redirect_to_what_is_no_web_server(plugin, door, location):
    door.always("GET", status(302, Location=location))
    result = plugin.get(door.url("here"), env=NO_RETRY)
    assert result.failures == [K.BAD_URL]
    assert plugin.leftovers() == []


def test_redirect_for_ever(plugin, door):
    door.always("GET", status(302, Location=door.url("here")))
    result = plugin.get(door.url("here"), env=NO_RETRY)
    assert result.failures == [K.BAD_URL]
    assert len(door.asked) == 31


@pytest.mark.parametrize(("most", "arrives"), [("", True), ("29", False), ("100", True), ("none", True)])
def test_thirty_redirects(plugin, door, nginx, most, arrives):
    """As many as HTCondor's plugin follows, or as many as its variable says."""
    nginx.file("there").write_bytes(b"data")
    door.next("GET", *[status(302, Location=door.url("there"))] * 30)
    result = plugin.get(door.url("here"), env={**NO_RETRY, "CURL_MAX_REDIRS": most})
    assert result.ok == arrives


# ---- secrets in URLs -------------------------------------------------------------------------------------------------


def test_user_and_password(plugin, tmp_path):
    root = tmp_path / "private"
    root.mkdir()
    server = WebDav(root, users={"alice": "wonder-land"})
    url = f"http://alice:wonder-land@127.0.0.1:{server.port}/data"
    try:
        result = plugin.put(url, b"data")
        assert result.ok
        refused = plugin.put(url.replace("wonder-land", "wrong-pass"), b"data", env=NO_RETRY)
        assert refused.failures == [K.CREDENTIAL_REFUSED]
        assert "wrong-pass" not in refused.everything
        assert "wonder-land" not in result.everything
    finally:
        server.close()


def test_nothing_is_told(plugin, door, credentials):
    """Query, token and password stand in no result ad and in nothing printed, whatever happens."""

    def echo(asked, forward):
        return status(403, f"you sent {asked.headers.get('authorization')} to {asked.path}")(asked, forward)

    for method in ("GET", "PUT"):
        door.always(method, echo)
    plugin.new_scratch()
    url = with_service(door.url("x?sig=query-secret&X-Amz-Signature=other-secret"), "site")
    (plugin.scratch / "a").write_text("data")
    for upload in (False, True):
        result = plugin.call([Wanted(url, "a")], upload=upload, credentials=credentials, env=NO_RETRY)
        assert not result.ok
        for secret in (SECRET, "query-secret", "other-secret"):
            assert secret not in result.everything
