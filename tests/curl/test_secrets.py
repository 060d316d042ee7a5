"""URLs as users write them: none of their secrets leaves the plugin, and what HTCondor's own plugin takes is taken."""

from __future__ import annotations

import base64
import os

import pytest

from stageout.core.errors import ErrorClass as K
from stageout.plugin.urls import may_split_password, safe_url
from stageout.testing.starter import Wanted
from tests.curl.interposer import Reply
from tests.curl.plugin import NO_RETRY

DATA = os.urandom(1000)
#: Passwords with characters that end a host or a path, and pieces of them that must not be seen.
PASSWORDS = [
    ("TOPsec#QxZ", ("TOP", "QxZ")),
    ("TOP/sec#QxZ", ("TOP", "sec", "QxZ")),
    ("TOPsec/QxZ", ("TOP", "QxZ")),
    ("TOPsec?QxZ", ("TOP", "QxZ")),
    ("TOP@sec/QxZ", ("TOP", "QxZ")),
    ("TOP:sec#QxZ", ("TOP", "sec", "QxZ")),
    ("TOP sec#QxZ", ("TOP", "sec", "QxZ")),
    ('TOP"sec#QxZ', ("TOP", "sec", "QxZ")),
    ("TOP<sec#QxZ", ("TOP", "sec", "QxZ")),
    ("TOP%sec#QxZ", ("TOP", "sec", "QxZ")),
    ("TOP[sec#QxZ", ("TOP", "sec", "QxZ")),
    ("TÖP\u202esec#QxZ", ("TÖP", "sec", "QxZ")),
    ("54321#QxZ", ("54321", "QxZ")),
    ("54321?QxZ", ("54321", "QxZ")),
    ("54321/QxZ", ("54321", "QxZ")),
    ("543210987#QxZ", ("54321", "QxZ")),
    ("#QxZ", ("QxZ",)),
]


@pytest.mark.parametrize("upload", [True, False])
def test_malformed_urls(plugin, upload):
    """Nothing of a password is in a message, a result ad or the log, whichever character in it was not encoded."""
    plugin.new_scratch()
    schemes = ("http", "https", "ftp", "dav", "site+https")
    pairs = [(scheme, *password) for scheme in schemes for password in PASSWORDS]
    wanted = [
        Wanted(f"{scheme}://user:{text}@host.invalid/dir/name", f"f{number}")
        for number, (scheme, text, _) in enumerate(pairs)
    ]
    for item in wanted if upload else ():
        (plugin.scratch / item.name).write_bytes(DATA)
    result = plugin.call(wanted, upload=upload, env=NO_RETRY)
    assert not result.ok
    for ad, (scheme, text, pieces) in zip(result.run.ads, pairs):
        for piece in pieces:
            assert piece not in str(ad), (scheme, text)
    for piece in {piece for _, _, pieces in pairs for piece in pieces}:
        assert piece not in result.run.printed


def test_malformed_url_says_what_to_do(plugin):
    """As HTCondor's own plugin it blames a parameter, not the file."""
    result = plugin.put("http://user:TOPsec#ret@host/f", DATA, env=NO_RETRY)
    assert result.failures == [K.BAD_REQUEST]
    error = result.ad["TransferErrorData"][0]
    assert (error["ErrorType"], error["PluginLaunched"]) == ("Parameter", True)
    assert "%23 for #" in result.ad["TransferError"]
    assert result.ad["TransferUrl"] == "http://***"


@pytest.mark.parametrize(
    "url",
    [
        "http://host:80/a@b",
        "http://host.org:8080/a@b?x=1@2",
        "http://127.0.0.1:80/a@b",
        "https://[::1]:8443/a@b",
        "file:///dir/a@b",
        "https://host/a@b",
        "https://host.org?mail=a@b",
        "https://host:80/a#b",
    ],
)
def test_usual_urls_are_shown(url):
    """A host without a dot and with a port is shown only where no ``@`` follows."""
    expected = "http://***" if url == "http://host:80/a@b" else url.partition("?")[0].partition("#")[0]
    assert safe_url(url) == expected
    assert may_split_password(url) is (expected == "http://***")


@pytest.mark.parametrize("password", ["a[b", "a]b", "a[b]c", "a%23b", "a%2Fb", "ü", "a:b"])
def test_odd_passwords(plugin, nginx, door, password):
    """Brackets are no reason to refuse a URL."""
    from urllib.parse import unquote

    result = plugin.put(door.url("odd-password").replace("//", f"//user:{password}@"), DATA)
    assert result.ok, result.everything
    sent = base64.b64decode(door.asked[0].headers["authorization"].partition(" ")[2])
    assert sent == f"user:{unquote(password)}".encode()


@pytest.mark.parametrize(
    "content", ['{"access_token": "abc.def\\n"}', '{"access_token": " abc.def\\r\\n"}', "abc.def\r\n"]
)
def test_token_with_a_line_end(plugin, nginx, door, tmp_path, content):
    credentials = tmp_path / "creds"
    credentials.mkdir()
    (credentials / "site.use").write_text(content)
    assert plugin.put(door.url("token-line").replace("http:", "site+http:"), DATA, credentials=credentials).ok
    assert door.asked[0].headers["authorization"] == "Bearer abc.def"


@pytest.mark.parametrize("location", [b"/f\xc3\xbcr", b"/f\xfcr"], ids=["UTF-8", "ISO 8859-1"])
def test_bytes_above_127_in_a_header(plugin, nginx, door, location):
    """They are used as they are, as curl does."""
    moved = os.fsencode(nginx.file("")) + location
    with open(moved, "wb") as file:
        file.write(DATA)

    def redirecting(asked, forward):
        return Reply(302, {"Location": location.decode("latin-1")}) if asked.path == "/to" else forward()

    door.always("GET", redirecting)
    assert plugin.get(door.url("to")).ok
    assert plugin.got() == DATA


def test_locations_that_are_no_urls(plugin, door):
    """A server cannot break the plugin with one."""
    for location in ("http://[x/", "http://host:many/", "//", "http://user:TOPsec#x@h/"):
        door.always("GET", lambda asked, forward, to=location: Reply(302, {"Location": to}))
        result = plugin.get(door.url("f"), env=NO_RETRY)
        assert result.failures == [K.BAD_URL], location
        assert "TOP" not in result.everything
