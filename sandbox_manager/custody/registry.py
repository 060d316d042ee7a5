"""The picture of the ledger in memory: all sandboxes, the sums that each hand-off asks for, and the queues of files.

A queue has the waiting files of one owner for one destination, and keeps its sandboxes in the order in which they are
sent. So the planner looks only at its head, and nothing here takes longer when more sandboxes wait.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from stageout.core.states import FREED, State
from stageout.model.sandbox import (
    ACTIVE,
    NAME_BYTES,
    OCCUPYING,
    SENDABLE,
    Destination,
    Occupant,
    Sandbox,
    SlotKey,
    Waiting,
    occupant_of,
)
from stageout.wire.custody import JobKey, Run


class QueueKey(NamedTuple):
    """Files with the same key may travel in one batch."""

    owner: str
    uid: int
    gid: int
    destination: int


Deadline = Callable[[Sandbox], float]
_Key = tuple[int, bool, int, int, int]
_T = TypeVar("_T", _Key, tuple[float, _Key], tuple[int, int])


def order(sandbox: Sandbox) -> _Key:
    """Order a queue by job priority, begun before not begun, small before large, and age."""
    return (-sandbox.priority, sandbox.state not in ACTIVE, sandbox.bytes_left, sandbox.accepted_at, sandbox.id)


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

    def put(self, sandbox: Sandbox, part: Waiting, deadline: float) -> None:
        """Add a sandbox's files. :param deadline: wall clock; infinite without one."""
        self._parts[sandbox.id] = (sandbox, part, deadline)
        self.files += part.files
        self.size_bytes += part.size_bytes
        bisect.insort(self._later, (part.ready_at, sandbox.id))

    def drop(self, sandbox_id: int) -> None:
        """Remove a sandbox's files."""
        sandbox, part, deadline = self._parts.pop(sandbox_id)
        self.files -= part.files
        self.size_bytes -= part.size_bytes
        if not _remove(self._later, (part.ready_at, sandbox_id)):
            _remove(self._ready, order(sandbox))
            _remove(self._deadlines, (deadline, order(sandbox)))

    def wake(self, now: float) -> None:
        """Make files ready that are due. :param now: wall clock."""
        due = bisect.bisect_right(self._later, (int(now), 1 << 62))
        woken = [self._parts[sandbox_id] for _, sandbox_id in self._later[:due]]
        del self._later[:due]
        if woken:  # Sorting is linear here: all but the new ones are in order.
            self._ready += sorted(order(sandbox) for sandbox, _, _ in woken)
            self._ready.sort()
            self._deadlines += sorted((deadline, order(sandbox)) for sandbox, _, deadline in woken)
            self._deadlines.sort()

    @property
    def first(self) -> _Key | None:
        """Return the order of the first sandbox that is due, None for none."""
        return self._ready[0] if self._ready else None

    def earliest_deadline(self) -> float:
        """Return the earliest deadline of sandboxes that are due (wall clock), infinity for none."""
        return self._deadlines[0][0] if self._deadlines else float("inf")

    def files_due(self, most: int) -> int:
        """Count files that are due. Stop counting at ``most``."""
        files = 0
        for key in self._ready:
            if files >= most:
                break
            files += self._parts[key[-1]][1].files
        return files

    def wakes_at(self) -> float:
        """Return the wall clock at which the next sandbox is due, infinity if none waits for a time."""
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

    def put(self, sandbox: Sandbox) -> None:
        """Add a sandbox, or replace its record."""
        self.drop(sandbox.id)
        if sandbox.state not in SENDABLE or sandbox.paused or not sandbox.waiting:
            return
        keys = tuple(QueueKey(sandbox.owner, sandbox.uid, sandbox.gid, part.destination) for part in sandbox.waiting)
        for key, part in zip(keys, sandbox.waiting):
            queue = self.queues.get(key)
            if queue is None:
                queue = self.queues[key] = BatchQueue(key)
            queue.put(sandbox, part, self._deadline(sandbox))
        self._of[sandbox.id] = keys

    def drop(self, sandbox_id: int) -> None:
        """Forget a sandbox."""
        for key in self._of.pop(sandbox_id, ()):
            queue = self.queues[key]
            queue.drop(sandbox_id)
            if not queue:
                del self.queues[key]

    def wakes_at(self) -> float:
        """Return the wall clock at which the next sandbox is due that waits for a time."""
        return min((queue.wakes_at() for queue in self.queues.values()), default=float("inf"))

    def waiting_for(self, destinations: frozenset[int]) -> list[int]:
        """Return the sandboxes with files that wait for any of the destinations."""
        return sorted(
            {sandbox for key, queue in self.queues.items() if key.destination in destinations for sandbox in queue}
        )


def _remove(ordered: list[_T], item: _T) -> bool:
    """Remove an item from a sorted list; False when it is not in it."""
    at = bisect.bisect_left(ordered, item)
    if at < len(ordered) and ordered[at] == item:
        del ordered[at]
        return True
    return False


#: Highest run number of each job.
Fences = Mapping[JobKey, int]


class Registry:
    """All sandboxes by id, run and job. Nothing here takes longer when more sandboxes wait.

    :ivar movable_bytes: of the quota, held by output that is sent as soon as its turn comes or its server answers.
    :ivar record_bytes: of the quota, held by records, by owner.
    :ivar holders: uid and owner of the output in the spool, with the number of sandboxes.
    :param deadline: see :class:`sandbox_manager.custody.registry.Backlog`.
    """

    def __init__(self, deadline: Deadline = lambda sandbox: float("inf")) -> None:
        self.by_id: dict[int, Sandbox] = {}
        self.destinations: dict[int, Destination] = {}
        self.fences: dict[JobKey, int] = {}
        self.backlog = Backlog(deadline)
        self.states: Counter[State] = Counter()
        self.bytes_at_risk = 0
        self.movable_bytes = 0
        self.record_bytes: Counter[str] = Counter()
        self.holders: Counter[tuple[int, str]] = Counter()
        self._by_run: dict[Run, int] = {}
        self._occupying: dict[tuple[str, int], Counter[Occupant]] = {}

    def load(self, sandboxes: Iterable[Sandbox], destinations: Mapping[int, Destination], fences: Fences) -> None:
        """Fill the registry with the content of the ledger (at start)."""
        self.destinations = dict(destinations)
        self.fences.update(fences)
        for sandbox in sandboxes:
            self.put(sandbox)

    def keep_only(self, destinations: Mapping[int, Destination], fences: Fences) -> None:
        """Forget all other destinations and runs."""
        self.destinations, self.fences = dict(destinations), dict(fences)

    def put(self, sandbox: Sandbox) -> None:
        """Add a sandbox, or replace its record."""
        self._unlist(sandbox.id)
        self.by_id[sandbox.id] = sandbox
        self._by_run[sandbox.run] = sandbox.id
        self.fence(sandbox.run)
        self._count(sandbox, 1)
        self.backlog.put(sandbox)

    def job_of(self, sandbox_id: int) -> str:
        """Return the GlobalJobId, "" if the sandbox is no longer here."""
        known = self.by_id.get(sandbox_id)
        return known.run.job if known else ""

    def due_since(self, sandbox_id: int) -> float:
        """Return the wall clock from which the time to give up counts, infinity if the sandbox is no longer here."""
        known = self.by_id.get(sandbox_id)
        return known.due_since if known else float("inf")

    def destinations_at(self, server: str) -> frozenset[int]:
        """Numbers of the destinations on a server."""
        return frozenset(number for number, destination in self.destinations.items() if destination.server == server)

    def files_waiting(self, may_send: Callable[[str], bool], most: int, now: int) -> Counter[str]:
        """Files that are due, by server, for servers to which something may be sent.

        :param most: files of one owner for one destination beyond this number are not counted.
        """
        files: Counter[str] = Counter()
        for key, queue in self.backlog.queues.items():
            queue.wake(now)
            server = self.destinations[key.destination].server
            if may_send(server):
                files[server] += queue.files_due(most)
        return files

    def drop(self, sandbox_id: int) -> None:
        """Forget a sandbox whose record is removed."""
        self._unlist(sandbox_id)
        known = self.by_id.pop(sandbox_id, None)
        if known is not None:
            self._by_run.pop(known.run, None)

    def _unlist(self, sandbox_id: int) -> None:
        old = self.by_id.get(sandbox_id)
        if old is not None:
            self._count(old, -1)
            self.backlog.drop(sandbox_id)

    def _count(self, sandbox: Sandbox, by: int) -> None:
        self.states[sandbox.state] += by
        if sandbox.state not in FREED:
            self.bytes_at_risk += by * sandbox.bytes_left
        self.record_bytes[sandbox.owner] += by * sandbox.record_bytes
        if not sandbox.freed:
            self.holders[sandbox.uid, sandbox.owner] += by
            if not self.holders[sandbox.uid, sandbox.owner]:
                del self.holders[sandbox.uid, sandbox.owner]
        if sandbox.state in SENDABLE and not sandbox.paused:
            self.movable_bytes += by * (sandbox.bytes_left + sandbox.files_left * NAME_BYTES)
        if sandbox.state in OCCUPYING:
            alike = self._occupying.setdefault(sandbox.slot.parent, Counter())
            one = occupant_of(sandbox)
            alike[one] += by
            if not alike[one]:
                del alike[one]

    def order_anew(self, deadline: Deadline) -> None:
        """Order all queues by another deadline from now on."""
        self.backlog = Backlog(deadline)
        for sandbox in self.by_id.values():
            self.backlog.put(sandbox)

    def occupying(self, slot: SlotKey | None = None) -> Iterable[tuple[Occupant, int]]:
        """Count the content of data slots: of all, or of one CPU slot and its siblings."""
        if slot is not None:
            return self._occupying.get(slot.parent, Counter()).items()
        return [item for alike in self._occupying.values() for item in alike.items()]

    def fence(self, run: Run) -> None:
        """Record that this run of its job exists."""
        self.fences[run.key] = max(run.number, self.fences.get(run.key, 0))

    def of_run(self, run: Run) -> Sandbox | None:
        """Return the sandbox of a run, None for none."""
        return self.by_id.get(self._by_run.get(run, -1))

    def newest_run(self, job: JobKey) -> int:
        """Return the highest known run number of this job, 0 for none."""
        return self.fences.get(job, 0)
