"""The order in which a custodian delivers. No file, socket or clock is used here.

Versions of one name of one owner leave in the order of acceptance. Between subjects the one that had least goes first;
within a subject priority and waiting count, then the deadline.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import NamedTuple

from stageout.overlay.rules.operations import Identity

#: So long a row waits until it has gained one step of priority (seconds).
STEP_S = 60
#: A row counts as at least so many bytes: each one costs requests.
LEAST_BYTES = 64 * 1024
_NEVER = 2**63


class Waiting(NamedTuple):
    """A row of the queue. :param order: epoch and number of its acceptance. :param hop: NAME of the next router."""

    identity: Identity
    names: tuple[str, ...]
    order: tuple[int, int]
    share: str
    hop: str
    received: int = 0
    priority: int = 0
    deadline: int = 0
    size: int = 0

    @property
    def rank(self) -> tuple[int, int, tuple[int, int], Identity]:
        """Place within a subject. All rows age alike, so the order of two never changes."""
        return self.received - STEP_S * self.priority, self.deadline or _NEVER, self.order, self.identity


class Queue:
    """Rows that wait for delivery. :param weight: of a share."""

    def __init__(self, weight: Callable[[str], float] = lambda share: 1.0) -> None:
        self._weight = weight
        self._rows: dict[Identity, Waiting] = {}
        self._heaps: dict[tuple[str, str], list[tuple[object, Waiting]]] = {}
        self._names: dict[tuple[str, str], list[tuple[tuple[int, int], Identity]]] = {}
        self._open: set[Identity] = set()  # neither ended nor refused: they keep their places at their names
        self._parked: dict[Identity, Waiting] = {}
        self._served: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, identity: Identity) -> bool:
        return identity in self._rows

    def put(self, row: Waiting) -> None:
        """Add a row, or put one back that was taken."""
        self._rows[row.identity] = row
        if row.identity not in self._open:
            self._open.add(row.identity)
            for place in _places(row):
                heapq.heappush(self._names.setdefault(place, []), (row.order, row.identity))
        self._push(row)

    def end(self, identity: Identity, names: Iterable[str]) -> None:
        """A row needs no delivery any more, or was refused: later versions of its names may go."""
        self._rows.pop(identity, None)
        self._parked.pop(identity, None)
        self._open.discard(identity)
        for name in names:
            first = self._first((identity.owner, name))
            row = self._parked.pop(first, None) if first is not None else None
            if row is not None:
                self._push(row)

    def take(self, is_away: Callable[[str], bool]) -> Waiting | None:
        """Take the next row; its names stay in order until :meth:`end`. None: nothing can go now."""
        while True:
            open_heaps = [place for place, heap in self._heaps.items() if heap and not is_away(place[1])]
            if not open_heaps:
                return None
            place = min(open_heaps, key=lambda one: (self._served.get(one[0], 0.0), self._heaps[one][0]))
            _, row = heapq.heappop(self._heaps[place])
            if not self._heaps[place]:
                del self._heaps[place]
            if self._rows.get(row.identity) is not row:
                continue
            if any(self._first(one) != row.identity for one in _places(row)):
                self._parked[row.identity] = row
                continue
            del self._rows[row.identity]
            cost = max(row.size, LEAST_BYTES) / self._weight(row.share)
            self._served[row.share] = self._served.get(row.share, 0.0) + cost
            return row

    def _first(self, place: tuple[str, str]) -> Identity | None:
        """Return the oldest open row of a name."""
        rows = self._names.get(place, [])
        while rows and rows[0][1] not in self._open:
            heapq.heappop(rows)
        if not rows:
            self._names.pop(place, None)
            return None
        return rows[0][1]

    def _push(self, row: Waiting) -> None:
        active = {share for share, _ in self._heaps}
        if active and row.share not in active:  # who was silent has saved nothing up
            least = min(self._served.get(share, 0.0) for share in active)
            self._served[row.share] = max(self._served.get(row.share, 0.0), least)
        heapq.heappush(self._heaps.setdefault((row.share, row.hop), []), (row.rank, row))


def _places(row: Waiting) -> set[tuple[str, str]]:
    return {(row.identity.owner, name) for name in row.names}
