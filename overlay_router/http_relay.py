"""The daemon's side of CONNECT: where to, each token once, and the connection."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Awaitable, Callable, Collection

from stageout.overlay.http.heads import Refused
from stageout.overlay.rules.rights import TOLERANCE_S

#: Tokens of one issuer that are remembered until they have ended.
_MOST_USED = 16384
_CHALLENGE = {"Proxy-Authenticate": 'Bearer realm="stageout", Basic realm="stageout"'}


class Relaying:
    """Connections for clients that go through this router.

    :param allowed: addresses to which it may connect. :param here: its own. :param clock: Unix time.
    """

    def __init__(
        self,
        allowed: Callable[[], Collection[str]],
        here: str,
        connect: Callable[[str], Awaitable[socket.socket]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._allowed, self._here, self._connect, self._clock = allowed, here, connect, clock
        self._started = clock()
        self._used: dict[str, dict[str, float]] = {}

    async def connected(self, to: str, once: bool, issuer: str, token: str, made: float, ends: float) -> socket.socket:
        """Return a connection. :param once: the token with this ID counts once. :raises Refused: there is none."""
        if to == self._here or to not in self._allowed():
            raise Refused(403, "this router passes on to the addresses of STAGEOUT_ROUTER_NEIGHBOURS only")
        if once:
            self._use(issuer, token, made, ends)
        try:
            return await self._connect(to)
        except asyncio.TimeoutError:
            raise Refused(504, f"{to} does not answer") from None
        except OSError as problem:
            silent = problem.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH)
            raise Refused(504 if silent else 502, f"{to} cannot be reached: {problem.strerror or problem}") from None

    def _use(self, issuer: str, token: str, made: float, ends: float) -> None:
        now = self._clock()
        if made < self._started:  # what was used before is not known any more
            raise Refused(407, "the token was made before this router started: make another", _CHALLENGE)
        used = self._used.setdefault(issuer, {})
        if token in used:
            raise Refused(407, "the token was used already: it counts once", _CHALLENGE)
        if len(used) >= _MOST_USED:
            self._used[issuer] = used = {one: end for one, end in used.items() if end > now}
        if len(used) >= _MOST_USED:
            raise Refused(429, "too many tokens in a minute", {"Retry-After": "60"})
        used[token] = ends + TOLERANCE_S
