"""The other end of a third-party copy: an HTTPS server that the router's settings name."""

from __future__ import annotations

import contextlib
import fnmatch
import http.client
import io
import ipaddress
import os
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from urllib.parse import urljoin, urlsplit

from stageout.overlay.http import digests
from stageout.overlay.http.heads import Head, Refused

_WAITS_S, _REDIRECTS, _PIECE_BYTES = 60.0, 5, 1 << 20
#: So long a server may think before it wants a body; and before it tells a digest, for which it may read a file.
_EXPECTS_S, _DIGEST_S = 5.0, 600.0
_REDIRECTED = frozenset({301, 302, 303, 307, 308})
#: Fields that a client may have sent to the other end, as ``TransferHeader`` and the name.
_PASSED = frozenset({"authorization", "want-digest", "want-repr-digest", "x-request-id", "x-number-of-streams"})


class Failed(Exception):
    """A copy failed; the text says why, and names nothing secret."""


class Remote:
    """A server, by addresses that were checked.

    :param hosts: patterns of servers that are allowed. One that is named without a pattern may have a private address.
    :param fields: sent with each request to it. :ivar stop: ends the connection, from any thread.
    """

    def __init__(self, url: str, hosts: Iterable[str], fields: Mapping[str, str]) -> None:
        self._url, self._hosts, self._fields = url, tuple(hosts), dict(fields)
        self._connection: http.client.HTTPConnection | None = None
        self._stopped = False
        self.check(url)

    def check(self, url: str) -> tuple[str, int, str]:
        """Return host, port and path of a URL. :raises Refused: 403: it is no server that is allowed."""
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").lower(), parts.port or 443
        except ValueError:
            raise Refused(400, "the URL of the other end is malformed") from None
        if not url.isascii() or any(one <= " " for one in url):
            raise Refused(400, "the URL of the other end is malformed")
        if parts.scheme not in ("https", "davs") or parts.username is not None:
            raise Refused(403, "the other end of a copy speaks HTTPS, and its URL has no password")
        if not any(fnmatch.fnmatchcase(host, one) for one in self._hosts):
            raise Refused(403, "this router copies from and to hosts in STAGEOUT_ROUTER_COPY_HOSTS only")
        return host, port, (parts.path or "/") + (f"?{parts.query}" if parts.query else "")

    def get(self) -> http.client.HTTPResponse:
        """Begin to read. :raises Failed: it cannot be read."""
        answer = self._answer("source", "GET", {})
        if answer.status != 200:
            raise Failed(f"the source answers {answer.status}")
        if answer.getheader("Content-Encoding", "identity") != "identity":
            raise Failed("the source sends a coding that was not asked for")
        return answer

    def put(self, file: int, size: int, overwrites: bool, moved: Callable[[int], None]) -> bytes:
        """Write a file there, and return its Adler-32. :raises Failed: it cannot be written."""
        condition = {} if overwrites else {"If-None-Match": "*"}
        hasher = digests.Adler()

        def pieces() -> Iterator[bytes]:
            offset = 0
            while offset < size:
                data = os.pread(file, min(_PIECE_BYTES, size - offset), offset)
                if not data:
                    raise Failed("the file became shorter")
                hasher.update(memoryview(data))
                yield data
                offset += len(data)
                moved(len(data))

        fields = {"Content-Length": str(size), "Expect": "100-continue", **condition}
        answer = self._answer("destination", "PUT", fields, pieces)
        if answer.status not in (200, 201, 204):
            raise Failed(f"the destination answers {answer.status}")
        return hasher.digest()

    def compare(self, digest: bytes) -> None:
        """Ask for the Adler-32 of the file there. :raises Failed: it is another one, or is not told."""
        answer = self._answer("other server", "HEAD", {"Want-Digest": "adler32"}, waits_s=_DIGEST_S)
        try:
            told = digests.promised(Head("HEAD", "/", {"digest": answer.getheader("Digest") or ""}))
        except Refused:
            told = {}
        if answer.status != 200 or "adler32" not in told:
            raise Failed(f"the other server does not tell the Adler-32 of the file: it answers {answer.status}")
        if told["adler32"] != digest:
            raise Failed("the file has another Adler-32 at the other server: it was changed on its way")

    def stop(self) -> None:
        """End the connection, now and from now on."""
        self._stopped = True
        sock = getattr(self._connection, "sock", None)
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the connection."""
        if self._connection is not None:
            self._connection.close()

    def _answer(
        self,
        what: str,
        method: str,
        fields: Mapping[str, str],
        pieces: Callable[[], Iterable[bytes]] | None = None,
        waits_s: float = _WAITS_S,
    ) -> http.client.HTTPResponse:
        """Ask, wherever a server sends us. :param pieces: of the body."""
        url = self._url
        for _ in range(_REDIRECTS):
            answer = self._asked(url, method, fields, pieces, waits_s)
            place = answer.getheader("Location")
            if answer.status not in _REDIRECTED or not place:
                return answer
            url = urljoin(url, place)
        raise Failed(f"the {what} redirects too often")

    def _asked(
        self,
        url: str,
        method: str,
        fields: Mapping[str, str],
        pieces: Callable[[], Iterable[bytes]] | None,
        waits_s: float,
    ) -> http.client.HTTPResponse:
        self.close()
        try:
            host, port, path = self.check(url)
            connection = http.client.HTTPSConnection(host, port, timeout=_WAITS_S)
            sock = connection.sock = self._connected(host, port)
            self._connection = connection
            connection.putrequest(method, path, skip_accept_encoding=True)
            for name, value in {**self._fields, **fields}.items():
                connection.putheader(name, value)
            connection.endheaders()
            if pieces:
                early = _early(sock)
                if early:
                    return early
                for data in pieces():
                    connection.send(data)
            sock.settimeout(waits_s)
            return connection.getresponse()
        except Refused as why:
            raise Failed(why.reason) from None
        except ssl.SSLCertVerificationError as problem:
            raise Failed(f"the certificate of {host} is not trusted: {problem.verify_message}") from None
        except (OSError, http.client.HTTPException, ValueError) as problem:
            raise Failed(f"the connection to {host} failed: {problem}") from None

    def _connected(self, host: str, port: int) -> ssl.SSLSocket:
        """Connect to an address that was resolved once, and checked."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for *_, place in found:
            address = ipaddress.ip_address(str(place[0]).partition("%")[0])
            if not address.is_global and host not in self._hosts:
                raise Failed(f"{host} has an address that is not public: name it itself in STAGEOUT_ROUTER_COPY_HOSTS")
        if self._stopped:
            raise Failed("the client has ended the copy")
        problem: OSError = OSError(f"{host} has no address")
        for family, kind, protocol, _, place in found:
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(_WAITS_S)
                sock.connect(place)
                return ssl.create_default_context().wrap_socket(sock, server_hostname=host)
            except OSError as failed:
                sock.close()
                problem = failed
        raise problem


class _Said:
    """An answer that has come, as ``http.client`` reads it from a socket."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        """Return its bytes."""
        return io.BytesIO(self._data)


def _early(sock: ssl.SSLSocket) -> http.client.HTTPResponse | None:
    """Return an answer that comes instead of "100 Continue"; None: the server wants the body, or says nothing.

    A server that redirects says so here, and reads no body.
    """
    data = b""
    sock.settimeout(_EXPECTS_S)
    try:
        while b"\r\n\r\n" not in data:
            part = sock.recv(65536)
            if not part or len(data) > 65536:
                raise ConnectionResetError("it ended instead of an answer")
            data += part
    except socket.timeout:
        if data:
            raise
    finally:
        sock.settimeout(_WAITS_S)
    if data.split(b" ", 2)[1:2] in ([], [b"100"]):
        return None
    answer = http.client.HTTPResponse(_Said(data))  # type: ignore[arg-type]
    answer.begin()
    return answer


def passed_on(fields: Mapping[str, str]) -> dict[str, str]:
    """Return the fields for the other end. :raises Refused: 400: one may not be sent."""
    found = {}
    for name, value in fields.items():
        if not name.startswith("transferheader"):
            continue
        inner = name[len("transferheader") :]
        if inner not in _PASSED:
            raise Refused(400, "a TransferHeader is not one of those that are passed on")
        found[inner.title()] = value
    return found
