"""Files that wait to be sent, in queues: one queue for each owner and destination. Pure.

A queue keeps its sandboxes in the order in which they are sent, so the planner looks only at its head.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from sandbox_manager.sandbox import ACTIVE, SENDABLE, Sandbox, Waiting


class QueueKey(NamedTuple):
    """Files with the same key may travel in one batch."""

    owner: str
    uid: int
    gid: int
    destination: int


Deadline = Callable[[Sandbox], float]
_Key = tuple[int, bool, int, int, int]
_T = TypeVar("_T", _Key, tuple[float, _Key], tuple[int, int])


def order(box: Sandbox) -> _Key:
    """Order in a queue: job priority, what is begun before what is not, small before large, age."""
    return (-box.priority, box.state not in ACTIVE, box.bytes_left, box.accepted_at, box.id)


class BatchQueue:
    """Waiting files of one owner for one destination.

    :param key: what they have in common. :ivar files: all that wait, with ``size_bytes``.
    """

    __slots__ = ("_deadlines", "_later", "_parts", "_ready", "files", "key", "size_bytes")

    def __init__(self, key: QueueKey) -> None:
        self.key = key
        self.files = self.size_bytes = 0
        self._parts: dict[int, tuple[Sandbox, Waiting, float]] = {}
        self._ready: list[_Key] = []
        self._deadlines: list[tuple[float, _Key]] = []
        self._later: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[int]:
        return iter(self._parts)

    def put(self, box: Sandbox, part: Waiting, deadline: float) -> None:
        """Add a sandbox's files. :param deadline: wall clock; infinite without one."""
        self._parts[box.id] = (box, part, deadline)
        self.files += part.files
        self.size_bytes += part.size_bytes
        bisect.insort(self._later, (part.ready_at, box.id))

    def drop(self, sandbox: int) -> None:
        """Take a sandbox's files away."""
        box, part, deadline = self._parts.pop(sandbox)
        self.files -= part.files
        self.size_bytes -= part.size_bytes
        if not _take(self._later, (part.ready_at, sandbox)):
            _take(self._ready, order(box))
            _take(self._deadlines, (deadline, order(box)))

    def wake(self, now: float) -> None:
        """Let those take part whose time has come. :param now: wall clock."""
        due = bisect.bisect_right(self._later, (int(now), 1 << 62))
        woken = [self._parts[sandbox] for _, sandbox in self._later[:due]]
        del self._later[:due]
        if woken:  # Sorting is linear here: all but the new ones are in order.
            self._ready += sorted(order(box) for box, _, _ in woken)
            self._ready.sort()
            self._deadlines += sorted((deadline, order(box)) for box, _, deadline in woken)
            self._deadlines.sort()

    @property
    def first(self) -> _Key | None:
        """Place in the order of the best one that is due, None when none is."""
        return self._ready[0] if self._ready else None

    def earliest_deadline(self) -> float:
        """Wall clock of the earliest deadline of those that are due; infinite without one."""
        return self._deadlines[0][0] if self._deadlines else float("inf")

    def files_due(self, most: int) -> int:
        """Files that are due, counted no further than ``most``."""
        files = 0
        for key in self._ready:
            if files >= most:
                break
            files += self._parts[key[-1]][1].files
        return files

    def wakes_at(self) -> float:
        """Wall clock at which the next one is due; infinite when none waits for a time."""
        return self._later[0][0] if self._later else float("inf")

    def due(self, urgent_before: float) -> Iterator[tuple[Sandbox, Waiting]]:
        """Yield the sandboxes that are due: first those with a deadline before this wall clock, then in their order."""
        urgent = set()
        for deadline, key in self._deadlines:
            if deadline >= urgent_before:
                break
            urgent.add(key[-1])
            yield self._parts[key[-1]][:2]
        for key in self._ready:
            if key[-1] not in urgent:
                yield self._parts[key[-1]][:2]


class Backlog:
    """All queues, kept up to date sandbox by sandbox.

    :param deadline: wall clock until which a sandbox must have been sent; infinite without one.
    """

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._of: dict[int, tuple[QueueKey, ...]] = {}
        self.queues: dict[QueueKey, BatchQueue] = {}

    def put(self, box: Sandbox) -> None:
        """Replace what is known of a sandbox."""
        self.drop(box.id)
        if box.state not in SENDABLE or box.paused or not box.waiting:
            return
        keys = tuple(QueueKey(box.owner, box.uid, box.gid, part.destination) for part in box.waiting)
        for key, part in zip(keys, box.waiting):
            queue = self.queues.get(key)
            if queue is None:
                queue = self.queues[key] = BatchQueue(key)
            queue.put(box, part, self._deadline(box))
        self._of[box.id] = keys

    def drop(self, sandbox: int) -> None:
        """Forget a sandbox."""
        for key in self._of.pop(sandbox, ()):
            queue = self.queues[key]
            queue.drop(sandbox)
            if not queue:
                del self.queues[key]

    def wakes_at(self) -> float:
        """Wall clock at which something that waits for a time is due next."""
        return min((queue.wakes_at() for queue in self.queues.values()), default=float("inf"))

    def waiting_for(self, destinations: frozenset[int]) -> list[int]:
        """Sandboxes with files that wait for one of these destinations."""
        return sorted({box for key, queue in self.queues.items() if key.destination in destinations for box in queue})


def _take(ordered: list[_T], item: _T) -> bool:
    """Remove an item from a sorted list; False when it is not in it."""
    at = bisect.bisect_left(ordered, item)
    if at < len(ordered) and ordered[at] == item:
        del ordered[at]
        return True
    return False
