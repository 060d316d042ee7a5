"""Requests that wait for operations of an origin: a task of the daemon each, no thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Callable, TypeVar

T = TypeVar("T")
#: Requests of one subject that wait; others are answered at once.
_MOST = 4096


class Waits:
    """Requests that wait, by origin."""

    def __init__(self) -> None:
        #: Of the requests; None before the first one waits.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._events: dict[str, list[asyncio.Event]] = {}
        self._of: dict[str, int] = {}

    def changed(self, origin: str) -> None:
        """Operations of an origin have changed; in any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake, origin)

    def _wake(self, origin: str) -> None:
        for event in self._events.get(origin, ()):
            event.set()

    async def until(
        self, share: str, origin: str, seconds: float, ask: Callable[[], Awaitable[T]], is_over: Callable[[T], bool]
    ) -> T:
        """Return what ``ask`` tells: when it is over, or as it is when the time is over."""
        loop = self._loop = asyncio.get_running_loop()
        deadline_s, event = loop.time() + seconds, asyncio.Event()
        if self._of.get(share, 0) >= _MOST or seconds <= 0:
            return await ask()
        self._of[share] = self._of.get(share, 0) + 1
        self._events.setdefault(origin, []).append(event)
        try:
            while True:
                event.clear()
                found = await ask()
                left_s = deadline_s - loop.time()
                if is_over(found) or left_s <= 0:
                    return found
                try:
                    await asyncio.wait_for(event.wait(), left_s)
                except asyncio.TimeoutError:
                    return await ask()
        finally:
            self._events[origin].remove(event)
            if not self._events[origin]:
                del self._events[origin]
            self._of[share] -= 1
            if not self._of[share]:
                del self._of[share]
