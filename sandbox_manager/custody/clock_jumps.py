"""Corrections of the ledger's times when somebody sets the wall clock.

Ages must outlive the manager and the machine, so the wall clock counts them. The monotonic clock shows the jumps of the
wall clock while the manager is up; for the time when it was down, the ledger has kept both clocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from sqlite3 import Connection, Error

from sandbox_manager.custody import updates
from sandbox_manager.custody.ledger import SandboxStore, get_meta, set_meta
from stageout.core import log
from stageout.core.clock import Clock

_META = "clock"
_KEEP_INTERVAL_S = 600.0
#: A smaller difference between both clocks is no jump.
_SET_S = 60.0
#: The longest time of a machine that was off that counts as age.
_DOWN_COUNTS_S = 86_400


@dataclass(frozen=True)
class ClockReading:
    """Both clocks of the machine at one moment, as the ledger keeps them for the next start.

    :param boot: id of the kernel's boot: within one the monotonic clock goes on. :param ahead_s: of the wall clock
        before that one. :param wall: wall clock, seconds.
    """

    boot: str
    ahead_s: int
    wall: int

    def __str__(self) -> str:
        return f"{self.boot or '-'} {self.ahead_s} {self.wall}"

    def jump_s(self, now: ClockReading) -> int:
        """Return the wall clock's jump in seconds until ``now``. Negative means backwards. Less than a minute is 0.

        Over a boot of the machine a jump back is certain, and the time that passed is unknown. At most a day of it
        counts as age, because output that is kept for a week must be available to its owner for a week.
        """
        if self.boot == now.boot and self.boot not in ("", "-"):
            by_s = now.ahead_s - self.ahead_s
        else:
            passed_s = now.wall - self.wall
            by_s = min(passed_s, max(0, passed_s - _DOWN_COUNTS_S))
        return by_s if abs(by_s) > _SET_S else 0


def read_clock(text: str) -> ClockReading | None:
    """Return the clocks that a ledger has kept, None for none."""
    words = text.split(" ")
    try:
        return ClockReading(words[0], int(words[1]), int(words[2]))
    except (IndexError, ValueError):
        return None


class WallWatch:
    """Notices that the wall clock, by which waits and ages are kept over restarts, was set.

    :param boot: id of the kernel's boot.
    """

    def __init__(self, clock: Clock, boot: str = "") -> None:
        self._clock, self._boot = clock, boot
        self._offset_s = clock.wall_s() - clock.monotonic_s()

    @property
    def reading(self) -> ClockReading:
        """Return both clocks, by which the next start counts ages."""
        return self.reading_after(0)

    def reading_after(self, jump_s: int) -> ClockReading:
        """Return :attr:`reading` as it is once that jump is :meth:`handled`."""
        return ClockReading(self._boot, round(self._offset_s) + jump_s, int(self._clock.wall_s()))

    def since(self, before: ClockReading) -> None:
        """Count from the clocks of an earlier start: :meth:`jump_s` then includes jumps since that start."""
        self._offset_s = self._clock.wall_s() - self._clock.monotonic_s()
        self._offset_s -= before.jump_s(self.reading)

    def jump_s(self) -> int:
        """Return the clock's jump in seconds since the last call. Negative means backwards. Less than a minute is 0.

        A jump is returned again until it is :meth:`handled`.
        """
        by_s = self._clock.wall_s() - self._clock.monotonic_s() - self._offset_s
        if abs(by_s) > _SET_S:
            return int(by_s)
        self._offset_s += by_s
        return 0

    def handled(self, jump_s: int) -> None:
        """Record that the kept times were changed for that jump, and are on the disk."""
        self._offset_s += jump_s


class ClockJumpGuard:
    """Correction of the ages of one ledger's rows. Call :meth:`load` before any decision by age.

    :param boot: id of the kernel's boot. :param longest_s: no file waits much longer for its next attempt.
    """

    def __init__(self, store: SandboxStore, clock: Clock, boot: str, longest_s: Callable[[], float]) -> None:
        self._store, self._clock, self._longest_s = store, clock, longest_s
        self._watch = WallWatch(clock, boot)
        self._lock = asyncio.Lock()
        self._kept_s = float("-inf")

    async def load(self) -> None:
        """Correct ages for jumps of the clock since an earlier start. On return the correction is on the disk."""
        before = read_clock(await self._store.ledger.read(lambda db: get_meta(db, _META)))
        if before is not None:
            self._watch.since(before)
        await self.check()

    async def check(self) -> None:
        """Correct ages for a jump of the clock. On return that is on the disk, else the next call repeats it."""
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
        """Keep both clocks for the next start. Within one boot of the machine an older record is as good."""
        try:
            await self._store.ledger.write(lambda db: set_meta(db, _META, str(self._watch.reading)))
        except (OSError, Error) as problem:
            log.warn("clock-write-failed", problem=problem)

    def _set(self, db: Connection, jump_s: int) -> Iterable[int]:
        now = int(self._clock.wall_s())
        set_meta(db, _META, str(self._watch.reading_after(jump_s)))  # in the same transaction: a jump is handled once
        return updates.keep_ages(db, jump_s, now) | updates.shorten_waits(db, now, self._longest_s())
