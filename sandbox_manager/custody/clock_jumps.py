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
class ClockSeen:
    """Both clocks of the machine at one moment, as the ledger keeps them for the next start.

    :param boot: id of the kernel's boot: within one the monotonic clock goes on. :param ahead_s: of the wall clock
        before that one. :param wall: wall clock, seconds.
    """

    boot: str
    ahead_s: int
    wall: int

    def __str__(self) -> str:
        return f"{self.boot or '-'} {self.ahead_s} {self.wall}"

    def jump_s(self, now: ClockSeen) -> int:
        """By how much the wall clock was set between this and ``now``; negative: back. 0 for a minute.

        Over a start of the machine nobody knows. Back is certain; of time that passed a day is believed: what is kept
        for its owner for a week was kept while somebody could have asked for it.
        """
        if self.boot == now.boot and self.boot not in ("", "-"):
            by_s = now.ahead_s - self.ahead_s
        else:
            passed_s = now.wall - self.wall
            by_s = min(passed_s, max(0, passed_s - _DOWN_COUNTS_S))
        return by_s if abs(by_s) > _SET_S else 0


def read_clock(text: str) -> ClockSeen | None:
    """Return the content that a ledger has kept; None when it has kept nothing."""
    words = text.split(" ")
    try:
        return ClockSeen(words[0], int(words[1]), int(words[2]))
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
    def seen(self) -> ClockSeen:
        """For the next start: what ages are counted by."""
        return self.seen_after(0)

    def seen_after(self, jump_s: int) -> ClockSeen:
        """The same once that jump is :meth:`handled`."""
        return ClockSeen(self._boot, round(self._offset_s) + jump_s, int(self._clock.wall_s()))

    def since(self, before: ClockSeen) -> None:
        """Count from what an earlier start has seen: :meth:`jump_s` is then also what the clock was set by since."""
        self._offset_s = self._clock.wall_s() - self._clock.monotonic_s()
        self._offset_s -= before.jump_s(self.seen)

    def jump_s(self) -> int:
        """By so much since the last call, or the last jump that was :meth:`handled`; negative: back. 0 for a minute."""
        by_s = self._clock.wall_s() - self._clock.monotonic_s() - self._offset_s
        if abs(by_s) > _SET_S:
            return int(by_s)
        self._offset_s += by_s
        return 0

    def handled(self, jump_s: int) -> None:
        """Record that the kept times were changed for that jump, and are on the disk."""
        self._offset_s += jump_s


class ClockJumpGuard:
    """Ages of one ledger's rows. Call :meth:`load` before anything is judged by its age.

    :param boot: id of the kernel's boot. :param longest_s: no file waits much longer for its next attempt.
    """

    def __init__(self, store: SandboxStore, clock: Clock, boot: str, longest_s: Callable[[], float]) -> None:
        self._store, self._clock, self._longest_s = store, clock, longest_s
        self._watch = WallWatch(clock, boot)
        self._lock = asyncio.Lock()
        self._kept_s = float("-inf")

    async def load(self) -> None:
        """Mind what the clock was set by since an earlier start saw it. On return that is on the disk."""
        before = read_clock(await self._store.ledger.read(lambda db: get_meta(db, _META)))
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
