"""Corrections of the ledger's times when somebody sets the wall clock.

Ages must outlive the manager and the machine, so the wall clock counts them. The monotonic clock shows the jumps of the
wall clock while the manager is up; for the time when it was down, the ledger has kept both clocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from sqlite3 import Connection, Error

from sandbox_manager.custody import recovery, updates
from sandbox_manager.custody.ledger import SandboxStore, get_meta, set_meta
from stageout.core import log
from stageout.core.clock import Clock

_META = "clock"
_KEEP_INTERVAL_S = 600.0


class ClockJumpGuard:
    """Ages of one ledger's rows. Call :meth:`load` before anything is judged by its age.

    :param boot: id of the kernel's boot. :param longest_s: no file waits much longer for its next attempt.
    """

    def __init__(self, store: SandboxStore, clock: Clock, boot: str, longest_s: Callable[[], float]) -> None:
        self._store, self._clock, self._longest_s = store, clock, longest_s
        self._watch = recovery.WallWatch(clock, boot)
        self._lock = asyncio.Lock()
        self._kept_s = float("-inf")

    async def load(self) -> None:
        """Mind what the clock was set by since an earlier start saw it. On return that is on the disk."""
        before = recovery.read_clock(await self._store.ledger.read(lambda db: get_meta(db, _META)))
        if before is not None:
            self._watch.since(before)
        await self.check()

    async def check(self) -> None:
        """A wall clock that was set makes nothing older. On return that is on the disk; else the next call does it."""
        async with self._lock:
            jump_s = self._watch.jump_s()
            if jump_s:
                words = "nothing is given up or deleted sooner for that; waits stay short"
                log.warn("clock-changed", by_s=jump_s, advice=words)
                await self._store.write(lambda db: self._set(db, jump_s), "record-retry")
                self._watch.handled(jump_s)
            if self._clock.monotonic_s() - self._kept_s >= _KEEP_INTERVAL_S:
                self._kept_s = self._clock.monotonic_s()
                await self._keep()

    async def _keep(self) -> None:
        """For the next start. An older one serves as well while the machine is not started anew."""
        try:
            await self._store.ledger.write(lambda db: set_meta(db, _META, str(self._watch.seen)))
        except (OSError, Error) as problem:
            log.warn("clock-write-failed", problem=problem)

    def _set(self, db: Connection, jump_s: int) -> Iterable[int]:
        now = int(self._clock.wall_s())
        set_meta(db, _META, str(self._watch.seen_after(jump_s)))  # together: a jump is handled once
        return updates.keep_ages(db, jump_s, now) | updates.shorten_waits(db, now, self._longest_s())
