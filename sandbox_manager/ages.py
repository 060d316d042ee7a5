"""Ages over a wall clock that is set: what the ledger keeps for a time is kept neither shorter nor longer for that.

Ages must outlive the manager and the machine, so they are counted by the wall clock. Its jumps are noticed by the
monotonic clock while the manager is up, and by what the ledger has kept of both when it was down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from sqlite3 import Connection, Error

from sandbox_manager import records, recovery
from sandbox_manager.book import Book
from sandbox_manager.ledger import get_meta, set_meta
from stageout.core import log
from stageout.core.clock import Clock

_META = "clock"
_KEEP_INTERVAL_S = 600.0


class Ages:
    """The ages of one ledger. Call :meth:`load` before anything is judged by its age.

    :param boot: id of the kernel's boot. :param longest_s: no file waits much longer for its next attempt.
    """

    def __init__(self, book: Book, clock: Clock, boot: str, longest_s: Callable[[], float]) -> None:
        self._book, self._clock, self._longest_s = book, clock, longest_s
        self._watch = recovery.WallWatch(clock, boot)
        self._lock = asyncio.Lock()
        self._kept_s = float("-inf")

    async def load(self) -> None:
        """Mind what the clock was set by since an earlier start saw it. On return that is on the disk."""
        before = recovery.read_clock(await self._book.ledger.read(lambda db: get_meta(db, _META)))
        if before is not None:
            self._watch.since(before)
        await self.mind()

    async def mind(self) -> None:
        """A wall clock that was set makes nothing older. On return that is on the disk; else the next call does it."""
        async with self._lock:
            jump_s = self._watch.jump_s()
            if jump_s:
                words = "nothing is given up or deleted sooner for that; waits stay short"
                log.warn("clock-set", by_s=jump_s, advice=words)
                await self._book.write(lambda db: self._set(db, jump_s), "record-retry")
                self._watch.minded(jump_s)
            if self._clock.monotonic_s() - self._kept_s >= _KEEP_INTERVAL_S:
                self._kept_s = self._clock.monotonic_s()
                await self._keep()

    async def _keep(self) -> None:
        """For the next start. An older one serves as well while the machine is not started anew."""
        try:
            await self._book.ledger.write(lambda db: set_meta(db, _META, str(self._watch.seen)))
        except (OSError, Error) as problem:
            log.warn("clock-keep", problem=problem)

    def _set(self, db: Connection, jump_s: int) -> Iterable[int]:
        now = int(self._clock.wall_s())
        set_meta(db, _META, str(self._watch.seen_after(jump_s)))  # together: a jump is minded once
        return records.keep_ages(db, jump_s, now) | records.shorten_waits(db, now, self._longest_s())
