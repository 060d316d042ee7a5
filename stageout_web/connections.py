"""Bound on the connections of the page, TLS handshakes included.

Above the bound, a new connection closes the one that was idle for the longest time. So nobody keeps others out with
connections that do nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from aiohttp import web

from stageout.core import log

_BACKLOG = 128
_WARN_EVERY_S = 60.0


@dataclass
class _Connection:
    """An accepted connection. :param is_kept: a long answer is being sent, so it is not idle."""

    socket: socket.socket
    is_kept: bool = False


class Connections:
    """The open connections, those that are idle for the longest time first.

    :param most: connections at the same time. :param clock_s: a monotonic clock.
    """

    def __init__(self, most: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock_s = clock_s
        self._warned_s = float("-inf")
        self._open: dict[int, _Connection] = {}

    def set_most(self, most: int) -> None:
        """Set how many connections there may be at the same time."""
        self._most = most

    def __len__(self) -> int:
        self._forget_closed()
        return len(self._open)

    def accepted(self, connection: socket.socket) -> None:
        """Count a new connection. Close the longest idle one, or this one, if there are too many."""
        self._forget_closed()
        self._open[connection.fileno()] = _Connection(connection)
        if len(self._open) > self._most:
            self._close_idle()

    def used(self, request: web.Request) -> None:
        """Note that a connection has a request now: it was idle for the shortest time."""
        found = self._of(request)
        if found is not None:
            number = found.socket.fileno()
            self._open[number] = self._open.pop(number)

    @contextlib.contextmanager
    def kept(self, request: web.Request) -> Iterator[None]:
        """Keep the connection of a request while the block sends a long answer."""
        found = self._of(request)
        if found is not None:
            found.is_kept = True
        try:
            yield
        finally:
            if found is not None:
                found.is_kept = False

    def _of(self, request: web.Request) -> _Connection | None:
        plain = request.get_extra_info("socket")
        return None if plain is None else self._open.get(plain.fileno())

    def _forget_closed(self) -> None:
        for number, one in list(self._open.items()):
            if one.socket.fileno() != number:
                del self._open[number]

    def _close_idle(self) -> None:
        number = next(number for number, one in self._open.items() if not one.is_kept)
        with contextlib.suppress(OSError):  # its reader has closed it
            self._open.pop(number).socket.shutdown(socket.SHUT_RDWR)
        now_s = self._clock_s()
        if now_s - self._warned_s >= _WARN_EVERY_S:
            self._warned_s = now_s
            log.warn("connections-limited", most=self._most, advice="idle connections are closed for new ones")


class _Listener(socket.socket):
    """A listening socket that counts what it accepts."""

    def __init__(self, counts: Connections, family: int, kind: int, protocol: int) -> None:
        super().__init__(family, kind, protocol)
        self._counts = counts

    def accept(self) -> tuple[socket.socket, object]:
        """Accept a connection."""
        connection, address = super().accept()
        self._counts.accepted(connection)
        return connection, address


async def listen(host: str, port: int, counts: Connections) -> list[socket.socket]:
    """Return listening sockets, one for each address of a host. :raises OSError: one of them cannot be listened on."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            sockets.append(_listening(family, kind, protocol, address, counts))
    except OSError as problem:
        for one in sockets:
            one.close()
        text = f"cannot listen on {host}:{port}: {problem.strerror or errno.errorcode.get(problem.errno or 0, '')}"
        raise OSError(problem.errno, text) from None
    return sockets


def _listening(family: int, kind: int, protocol: int, address: object, counts: Connections) -> socket.socket:
    listener = _Listener(counts, family, kind, protocol)
    try:
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)  # type: ignore[arg-type]
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
