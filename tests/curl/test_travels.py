"""A table of what travels where: tokens, passwords, X.509 proxies and proxies of the network, at each redirect."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.server
import os
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trustme

from tests.curl.hall import Hall

TOKEN = "eyJhbGciOi.secret.token"
DATA = b"the file" * 100
#: An address of the loopback network that no other test uses: its default ports are free.
HOST = f"127.29.{os.getpid() >> 8 & 255}.{(os.getpid() & 255) or 1}"


@dataclass
class Seen:
    """One request: what came with it."""

    method: str
    authorization: str
    certificate: bool


class Place:
    """A web server that has every file, and leads to another place where it is told so."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext | None) -> None:
        self.seen: list[Seen] = []
        self.location = ""
        place = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                peer = self.connection.getpeercert() if isinstance(self.connection, ssl.SSLSocket) else None
                place.seen.append(Seen(self.command, self.headers.get("Authorization") or "", bool(peer)))
                self.send_response(307 if place.location else 201 if self.command == "PUT" else 200)
                if place.location:
                    self.send_header("Location", place.location)
                body = b"" if place.location or self.command == "PUT" else DATA
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_PUT = do_HEAD = do_PROPFIND = answer

            def log_message(self, format: str, *args: object) -> None:
                del format, args

        self._server = http.server.ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        if context:
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        scheme, port = "https" if context else "http", self._server.server_port
        default = {"http": 80, "https": 443}[scheme]
        self.url = f"{scheme}://{host}{'' if port == default else f':{port}'}/file"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Places:
    """Web servers by name; those on default ports need the right to open them."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        self.identity = folder / "x509up"
        authority.issue_cert("job.example.org").private_key_and_cert_chain_pem.write_to_path(self.identity)
        self.bundle = folder / "ca.pem"
        authority.cert_pem.write_to_path(self.bundle)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_OPTIONAL
        context.load_verify_locations(self.bundle)
        authority.issue_cert(HOST, "127.0.0.1").configure_cert(context)
        self.by_name: dict[str, Place] = {}
        try:
            for name, host, port, tls in (
                ("https", HOST, 443, True),
                ("http", HOST, 80, False),
                ("https of another port", HOST, 0, True),
                ("http of another port", HOST, 0, False),
                ("https of another host", "127.0.0.1", 0, True),
                ("http of another host", "127.0.0.1", 0, False),
            ):
                self.by_name[name] = Place(host, port, context if tls else None)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for place in self.by_name.values():
            place.close()


@pytest.fixture(scope="module")
def all_places(tmp_path_factory) -> Iterator[Places]:
    try:
        places = Places(tmp_path_factory.mktemp("places"))
    except PermissionError:
        if os.environ.get("CI"):
            raise
        pytest.skip("only root may open the default ports of HTTP")
    yield places
    places.close()


@pytest.fixture
def places(all_places) -> Places:
    for place in all_places.by_name.values():
        place.seen.clear()
        place.location = ""
    return all_places


@pytest.fixture
def credentials(tmp_path):
    folder = tmp_path / "creds"
    folder.mkdir()
    (folder / "site.use").write_text(TOKEN)
    return folder


NAMES = (
    "https",
    "http",
    "https of another port",
    "http of another port",
    "https of another host",
    "http of another host",
)
_BASIC = "Basic " + base64.b64encode(b"alice:wonder-land").decode()


@pytest.mark.parametrize("upload", [False, True], ids=["get", "put"])
@pytest.mark.parametrize("target", NAMES)
@pytest.mark.parametrize("source", ["https", "http"])
@pytest.mark.parametrize("secret", ["token", "password", "X.509 proxy"])
def test_redirect(plugin, places, credentials, secret, source, target, upload):
    """A secret goes to the scheme, host and port of the job's URL, and nowhere else."""
    first, second = places.by_name[source], places.by_name[target]
    url = first.url
    env = {"SSL_CERT_FILE": str(places.bundle)}
    if secret == "token":
        url = f"site+{url}"
    elif secret == "password":
        url = url.replace("://", "://alice:wonder-land@")
    else:
        env["X509_USER_PROXY"] = str(places.identity)
    if first is not second:
        first.location = second.url
    more = {"credentials": credentials, "env": env}
    result = plugin.put(url, DATA, **more) if upload else plugin.get(url, **more)
    assert result.ok, result.run
    assert TOKEN not in result.everything
    assert "wonder-land" not in result.everything
    wanted = {"token": f"Bearer {TOKEN}", "password": _BASIC, "X.509 proxy": ""}[secret]
    assert {seen.authorization for seen in first.seen} == {wanted}
    assert {seen.certificate for seen in first.seen} == {secret == "X.509 proxy" and source == "https"}
    if first is not second:
        assert second.seen
        assert {seen.authorization for seen in second.seen} == {""}
        assert {seen.certificate for seen in second.seen} == {False}


# ---- proxies of the network ------------------------------------------------------------------------------------------


class Proxy:
    """A proxy for HTTP that also opens tunnels. ``lines``: first lines of requests; ``heads``: all of them, raw."""

    def __init__(self, hall: Hall) -> None:
        self.lines: list[str] = []
        self.heads: list[str] = []
        self.port = hall.listen(self._talk)

    def url(self, user: str = "") -> str:
        return f"http://{user}127.0.0.1:{self.port}"

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        line = head.split(b"\r\n")[0].decode()
        self.lines.append(line)
        self.heads.append(head.decode("latin-1"))
        method, target, _ = line.split(" ")
        if method == "CONNECT":
            host, _, port = target.rpartition(":")
            ours, theirs = await asyncio.open_connection(host, int(port))
            writer.write(b"HTTP/1.1 200 go on\r\n\r\n")
        else:
            place = urlsplit(target)
            ours, theirs = await asyncio.open_connection(place.hostname, place.port or 80)
            rest = head.partition(b"\r\n")[2]
            theirs.write(f"{method} {place.path} HTTP/1.1\r\nConnection: close\r\n".encode() + rest)
        await asyncio.gather(_pipe(reader, theirs), _pipe(ours, writer))


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
        writer.close()


@pytest.fixture
def proxies():
    with Hall() as hall:
        yield Proxy(hall), Proxy(hall)


def _methods(proxy: Proxy) -> set[str]:
    return {line.split(" ")[0] for line in proxy.lines}


@pytest.mark.parametrize("where", ["environment", "machine"])
@pytest.mark.parametrize("source", ["https", "http"])
def test_two_proxies(plugin, places, proxies, credentials, source, where):
    """One for each scheme: a request takes the one of its own scheme, and the token reaches no proxy of TLS."""
    plain, tunnel = proxies
    named = {"http_proxy": plain.url(), "https_proxy": tunnel.url()}
    env = {"SSL_CERT_FILE": str(places.bundle), **(named if where == "environment" else {})}
    machine = named if where == "machine" else {}
    url = f"site+{places.by_name[source].url}"
    assert plugin.get(url, credentials=credentials, env=env, machine=machine).ok
    used, idle = (tunnel, plain) if source == "https" else (plain, tunnel)
    assert idle.lines == []
    assert _methods(used) == {"CONNECT"} if source == "https" else _methods(used) <= {"GET", "HEAD"}
    assert used.lines
    assert any(TOKEN in head for head in used.heads) is (source == "http")


@pytest.mark.parametrize("source", ["https", "http"])
def test_redirect_between_two_proxies(plugin, places, proxies, credentials, source):
    """The next place has another scheme: its proxy is another one, and neither the token nor a password goes on."""
    plain, tunnel = proxies
    other = {"https": "http of another host", "http": "https of another host"}[source]
    first, second = places.by_name[source], places.by_name[other]
    first.location = second.url
    env = {
        "SSL_CERT_FILE": str(places.bundle),
        "http_proxy": plain.url("plain:first-pass@"),
        "https_proxy": tunnel.url("tunnel:second-pass@"),
    }
    result = plugin.get(f"site+{first.url}", credentials=credentials, env=env)
    assert result.ok, result.run
    assert plain.lines
    assert tunnel.lines
    passes = [base64.b64encode(text.encode()).decode() for text in ("plain:first-pass", "tunnel:second-pass")]
    for proxy, own, foreign in ((plain, *passes), (tunnel, *reversed(passes))):
        assert all(own in head for head in proxy.heads)
        assert not any(foreign in head for head in proxy.heads)
    assert {seen.authorization for seen in second.seen} == {""}
    assert "first-pass" not in result.everything
    assert "second-pass" not in result.everything


def test_hosts_without_a_proxy(plugin, places, proxies):
    """``no_proxy`` counts for the place that a redirect leads to."""
    plain, tunnel = proxies
    first, second = places.by_name["http"], places.by_name["http of another host"]
    first.location = second.url
    env = {"http_proxy": plain.url(), "https_proxy": tunnel.url(), "no_proxy": "127.0.0.1"}
    assert plugin.get(first.url, env=env).ok
    assert [line for line in plain.lines if "127.0.0.1" in line.split(" ")[1]] == []
    assert plain.lines
    assert second.seen


def test_environment_wins_over_the_machine(plugin, places, proxies):
    """Two proxies for one scheme: the starter's environment names the one that counts."""
    named, other = proxies
    env, machine = {"http_proxy": named.url()}, {"http_proxy": other.url()}
    assert plugin.get(places.by_name["http"].url, env=env, machine=machine).ok
    assert named.lines
    assert other.lines == []
