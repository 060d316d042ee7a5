"""Connections whose key is a token: they end with it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

from overlay_router.peers.keys import Key
from overlay_router.peers.limits import End
from stageout.core import log

_LOOK_S = 1.0


class Terms:
    """The connections that end with a token.

    :param end_of: ends the connections of a key that workers have and whose tokens have ended by a time.
    """

    def __init__(self, end_of: Callable[[str, float], None]) -> None:
        self._end_of = end_of
        self._open: dict[tuple[str, float], list[End]] = {}

    @contextlib.contextmanager
    def of(self, key: Key, end: End) -> Iterator[None]:
        """While a connection is served here. Behind that a worker may have it. :param end: ends it here."""
        if not key.ends:
            yield
            return
        place = key.name, key.ends
        self._open.setdefault(place, []).append(end)
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # it was ended
                self._open.setdefault(place, []).remove(end)

    async def run(self) -> None:
        """End connections until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look(time.time())

    def look(self, now_s: float) -> None:
        """End the connections whose tokens have ended. :param now_s: Unix time."""
        for place in [place for place in self._open if place[1] <= now_s]:
            log.event("key-expired", key=place[0])
            for end in self._open.pop(place):
                end()
            self._end_of(*place)
