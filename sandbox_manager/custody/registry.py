"""All sandboxes in memory, with the sums and lists that are asked for at every hand-off and every batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from sandbox_manager.custody.backlog import Backlog, Deadline
from sandbox_manager.sandbox import (
    NAME_BYTES,
    OCCUPYING,
    SENDABLE,
    Destination,
    Occupant,
    Sandbox,
    SlotKey,
    occupant_of,
)
from stageout.core.states import FREED, State
from stageout.wire.custody import ANY_OWNER, JobKey, Run

#: Highest known run number of each job.
Fences = Mapping[JobKey, int]


class Registry:
    """All sandboxes by id, run and job. Nothing here takes longer when more sandboxes wait.

    :ivar movable_bytes: of the quota, held by output that is sent as soon as its turn comes or its server answers.
    :ivar record_bytes: of the quota, held by records, by owner.
    :ivar holders: uid and owner of the output in the spool, with the number of sandboxes.
    :param deadline: see :class:`sandbox_manager.custody.backlog.Backlog`.
    """

    def __init__(self, deadline: Deadline = lambda box: float("inf")) -> None:
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

    def load(self, boxes: Iterable[Sandbox], destinations: Mapping[int, Destination], fences: Fences) -> None:
        """Take over what the ledger has (at start)."""
        self.destinations = dict(destinations)
        self.fences.update(fences)
        for box in boxes:
            self.put(box)

    def keep_only(self, destinations: Mapping[int, Destination], fences: Fences) -> None:
        """Forget all other destinations and runs."""
        self.destinations, self.fences = dict(destinations), dict(fences)

    def put(self, sandbox: Sandbox) -> None:
        """Replace what is known of a sandbox."""
        self._unlist(sandbox.id)
        self.by_id[sandbox.id] = sandbox
        self._by_run[sandbox.run] = sandbox.id
        self.fence(sandbox.run)
        self._count(sandbox, 1)
        self.backlog.put(sandbox)

    def job_of(self, sandbox_id: int) -> str:
        """GlobalJobId, "" when the sandbox is not known any more."""
        known = self.by_id.get(sandbox_id)
        return known.run.job if known else ""

    def due_since(self, sandbox_id: int) -> float:
        """Wall clock from which the time to give up counts; infinite when the sandbox is not known any more."""
        known = self.by_id.get(sandbox_id)
        return known.due_since if known else float("inf")

    def destinations_at(self, server: str) -> frozenset[int]:
        """Numbers of the destinations on a server."""
        return frozenset(number for number, place in self.destinations.items() if place.server == server)

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
        """Forget a sandbox whose record is gone."""
        self._unlist(sandbox_id)
        known = self.by_id.pop(sandbox_id, None)
        if known is not None:
            self._by_run.pop(known.run, None)

    def _unlist(self, sandbox_id: int) -> None:
        old = self.by_id.get(sandbox_id)
        if old is not None:
            self._count(old, -1)
            self.backlog.drop(sandbox_id)

    def _count(self, box: Sandbox, by: int) -> None:
        self.states[box.state] += by
        if box.state not in FREED:
            self.bytes_at_risk += by * box.bytes_left
        self.record_bytes[box.owner] += by * box.record_bytes
        if not box.freed:
            self.holders[box.uid, box.owner] += by
            if not self.holders[box.uid, box.owner]:
                del self.holders[box.uid, box.owner]
        if box.state in SENDABLE and not box.paused:
            self.movable_bytes += by * (box.bytes_left + box.files_left * NAME_BYTES)
        if box.state in OCCUPYING:
            alike = self._occupying.setdefault(box.slot.parent, Counter())
            one = occupant_of(box)
            alike[one] += by
            if not alike[one]:
                del alike[one]

    def order_anew(self, deadline: Deadline) -> None:
        """Deadlines are reckoned in another way from now on."""
        self.backlog = Backlog(deadline)
        for box in self.by_id.values():
            self.backlog.put(box)

    def occupying(self, slot: SlotKey | None = None) -> Iterable[tuple[Occupant, int]]:
        """Count the content of data slots: of all, or of one CPU slot and its siblings."""
        if slot is not None:
            return self._occupying.get(slot.parent, Counter()).items()
        return [item for alike in self._occupying.values() for item in alike.items()]

    def fence(self, run: Run) -> None:
        """Remember that this run of its job exists."""
        self.fences[run.key] = max(run.number, self.fences.get(run.key, 0))

    def of_run(self, run: Run) -> Sandbox | None:
        """The sandbox of a run."""
        return self.by_id.get(self._by_run.get(run, self._by_run.get(Run(run.job, run.number, ANY_OWNER), -1)))

    def newest_run(self, job: JobKey) -> int:
        """Return the highest known run number of this job, 0 for none."""
        return max(self.fences.get(job, 0), self.fences.get(JobKey(job.name, ANY_OWNER), 0))
