"""Turns among packs that wait: for each way onward the most urgent first, and those that were put off later.

Each pack has one place at most: a new one replaces it. The cost of a call depends on the packs that begin or become
due, not on how many wait.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

from overlay_router.custodians.pack_records import HeldPack
from stageout.overlay.tuning.shares import standing

Rank = tuple[float, float, float]


class Lane(NamedTuple):
    """The key by which packs share places.

    :param hop: the next router. :param asks: it has the pack already, and is only asked.
    """

    hop: str
    asks: bool = False


class Turns:
    """Packs that wait to be delivered, or to be asked about. No I/O."""

    def __init__(self) -> None:
        self._ready: dict[Lane, list[tuple[Rank, int, HeldPack]]] = {}
        self._later: list[tuple[float, int, Lane, HeldPack]] = []
        self._places: dict[tuple[str, int], int] = {}
        self._numbers = itertools.count()

    def add(self, lane: Lane, held: HeldPack, wall_s: float) -> None:
        """It may begin. :param wall_s: Unix time."""
        heapq.heappush(self._ready.setdefault(lane, []), (_rank(held, wall_s), self._place(held), held))

    def later(self, lane: Lane, held: HeldPack, until_s: float) -> None:
        """It may begin at that monotonic time."""
        heapq.heappush(self._later, (until_s, self._place(held), lane, held))

    def hasten(self, hop: str) -> None:
        """Let those that were put off for a router begin now."""
        later, self._later = self._later, []
        for until_s, number, lane, held in later:
            heapq.heappush(self._later, (0.0 if lane.hop == hop else until_s, number, lane, held))

    def next(self, now_s: float, wall_s: float, room: Callable[[Lane], int]) -> list[tuple[Lane, HeldPack]]:
        """The pack that begins now; it has no place any more. :param room: how many may begin in a lane."""
        while self._later and self._later[0][0] <= now_s:
            _, number, lane, held = heapq.heappop(self._later)
            if self._places.get(held.key) == number:
                self.add(lane, held, wall_s)
        return [(lane, held) for lane in list(self._ready) for held in self._first(lane, wall_s, room(lane))]

    def _first(self, lane: Lane, wall_s: float, count: int) -> list[HeldPack]:
        ready, found = self._ready[lane], list[HeldPack]()
        while ready and len(found) < count:
            rank, number, held = heapq.heappop(ready)
            if self._places.get(held.key) != number:
                continue
            if rank < _rank(held, wall_s):  # its deadline has passed
                self.add(lane, held, wall_s)
                continue
            del self._places[held.key]
            found.append(held)
        if not ready:
            del self._ready[lane]
        return found

    def until_s(self) -> float:
        """Monotonic time at which the first of those that were put off may begin."""
        return self._later[0][0] if self._later else math.inf

    def _place(self, held: HeldPack) -> int:
        number = self._places[held.key] = next(self._numbers)
        return number


def _rank(held: HeldPack, wall_s: float) -> Rank:
    return standing(held.priority, held.deadline, held.taken_at, wall_s)
