"""The other end of a third-party copy: an HTTPS server that the router's settings name."""

from __future__ import annotations

import contextlib
import fnmatch
import http.client
import ipaddress
import os
import socket
import ssl
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import urljoin, urlsplit

from stageout.overlay.http.heads import Refused

_WAITS_S, _REDIRECTS, _PIECE_BYTES = 60.0, 5, 1 << 20
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
        url = self._url
        for _ in range(_REDIRECTS):
            answer = self._asked(url, "GET", {})
            if answer.status in _REDIRECTED and answer.getheader("Location"):
                url = urljoin(url, answer.getheader("Location") or "")
                continue
            if answer.status != 200:
                raise Failed(f"the source answers {answer.status}")
            if answer.getheader("Content-Encoding", "identity") != "identity":
                raise Failed("the source sends a coding that was not asked for")
            return answer
        raise Failed("the source redirects too often")

    def put(self, file: int, size: int, overwrites: bool, moved: Callable[[int], None]) -> None:
        """Write a file there. :raises Failed: it cannot be written."""
        url = self._url
        for _ in range(_REDIRECTS):
            condition = {} if overwrites else {"If-None-Match": "*"}
            # a server that redirects gets the body a second time elsewhere
            answer = self._asked(url, "PUT", {"Content-Length": str(size), **condition}, file, size, moved)
            if answer.status in _REDIRECTED and answer.getheader("Location"):
                url = urljoin(url, answer.getheader("Location") or "")
                continue
            answer.read(65536)
            if answer.status not in (200, 201, 204):
                raise Failed(f"the destination answers {answer.status}")
            return
        raise Failed("the destination redirects too often")

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

    def _asked(
        self,
        url: str,
        method: str,
        fields: Mapping[str, str],
        file: int = -1,
        size: int = 0,
        moved: Callable[[int], None] = lambda count: None,
    ) -> http.client.HTTPResponse:
        self.close()
        try:
            host, port, path = self.check(url)
            connection = http.client.HTTPSConnection(host, port, timeout=_WAITS_S)
            connection.sock = self._connected(host, port)
            self._connection = connection
            connection.putrequest(method, path, skip_accept_encoding=True)
            for name, value in {**self._fields, **fields}.items():
                connection.putheader(name, value)
            connection.endheaders()
            offset = 0
            while offset < size:
                data = os.pread(file, min(_PIECE_BYTES, size - offset), offset)
                if not data:
                    raise Failed("the file became shorter")
                connection.send(data)
                offset += len(data)
                moved(len(data))
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
