"""Bounds for the clients of a socket, of each user and of all: connections, memory, and lines in the log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Collection, Iterator

from stageout.core import log
from stageout.core.synchronous import NotTaken

_INTERVAL_S = 60.0
#: Lines about one user in an interval before only their number counts.
_LINES = 5


class Full(NotTaken):
    """A client has no room left; the message names the bound."""

    code = "Busy"


class Client:
    """One client. :meth:`use_memory` is called before the memory is used; it is given back when the client has gone."""

    def __init__(self, limits: ClientLimits, uid: int) -> None:
        self._client_limits, self._uid = limits, uid
        self.used_bytes = 0

    def use_memory(self, size_bytes: int) -> None:
        """Count memory that the client uses from now on. :raises Full: the user has too much, or all together."""
        self._client_limits.check_room(self._uid, size_bytes)
        self.used_bytes += size_bytes
        self._client_limits.bytes[self._uid] += size_bytes


class ClientLimits:
    """All clients of a socket.

    :param most, most_of_user: connections at once. :param most_bytes, most_bytes_of_user: of memory.
    :param reserved: users whose places nobody else can take.
    """

    def __init__(
        self,
        most: int,
        most_of_user: int,
        most_bytes: int = 0,
        most_bytes_of_user: int = 0,
        reserved: Collection[int] = (),
    ) -> None:
        self._most, self._most_of_user = most, most_of_user
        self._most_bytes, self._most_bytes_of_user = most_bytes, most_bytes_of_user
        self._reserved = frozenset(reserved)
        self._connections: Counter[int] = Counter()
        self.bytes: Counter[int] = Counter()

    @contextlib.contextmanager
    def admit(self, uid: int) -> Iterator[Client]:
        """Reserve a place for a client of this user until the block ends. :raises Full: there is none."""
        others = sum(count for user, count in self._connections.items() if user not in self._reserved)
        if self._connections[uid] >= self._most_of_user or (uid not in self._reserved and others >= self._most):
            raise Full("the sandbox manager is busy with too many connections")
        self._connections[uid] += 1
        client = Client(self, uid)
        try:
            yield client
        finally:
            self._connections[uid] -= 1
            self.bytes[uid] -= client.used_bytes
            self._connections, self.bytes = +self._connections, +self.bytes

    def check_room(self, uid: int, size_bytes: int) -> None:
        """Check that the user may send this amount more. :raises Full: it is too much for the user or for all."""
        if self.bytes[uid] + size_bytes > self._most_bytes_of_user:
            raise Full(f"the sandbox manager has too many files of uid {uid} on offer at once")
        if sum(self.bytes.values()) + size_bytes > self._most_bytes:
            raise Full("the sandbox manager has too many files on offer at once")


class ThrottledLog:
    """Log lines about clients: the first few of a user as they come, then one a minute with the number of the others.

    :param name: of the event; the one with the number is ``NAME-repeated``.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._counts: Counter[int] = Counter()

    def add(self, uid: int, pid: int | None = None, **facts: object) -> None:
        """Write or count an event that a user has caused. :param uid: -1 where the user is not known."""
        self._counts[uid] += 1
        if self._counts[uid] == 1:
            asyncio.get_running_loop().call_later(_INTERVAL_S, self._count, uid)
        if self._counts[uid] <= _LINES:
            log.event(self._name, logging.INFO, pid=pid, uid=uid, **facts)

    def _count(self, uid: int) -> None:
        more = self._counts.pop(uid) - _LINES
        if more > 0:
            log.event(f"{self._name}-repeated", logging.INFO, uid=uid, count=more, within_s=int(_INTERVAL_S))
