"""The choice of the next files and their batches. Pure: no clock, no I/O.

Deadline first, then the owner who had least lately, then job priority, small before large. ``custody/registry.py``
orders the sandboxes of a queue, and ``custody/updates.py`` the files of a sandbox. One owner never uses
all movers of the node or of a server, so another owner's first file never waits for the end of a batch. A server that
is slow or away uses up only its own movers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sandbox_manager.custody.registry import Backlog, BatchQueue
from sandbox_manager.rules import Limits
from sandbox_manager.scheduling.breaker import Flow
from sandbox_manager.scheduling.slots import SlotUsage, most_per_owner
from stageout.model.batch import Batch, Part
from stageout.model.sandbox import Destination, Sandbox

#: Cost of a file in bytes: a request, an answer and a check of the arrived file.
FILE_BYTES = 1024 * 1024
#: Seconds after which half of the use is forgotten.
HALF_LIFE_S = 600.0


def cost_bytes(files: int, size_bytes: int) -> int:
    """Return the cost of files with this total size, in bytes."""
    return size_bytes + files * FILE_BYTES


@dataclass
class Shares:
    """Bytes and files delivered by owner, fading with :data:`HALF_LIFE_S`. Times are monotonic; kept in memory only."""

    _given: dict[str, tuple[float, float]] = field(default_factory=dict)

    def give(self, owner: str, files: int, size_bytes: int, now_s: float) -> None:
        """Count files that were delivered for an owner."""
        self._given[owner] = (self.of(owner, now_s) + cost_bytes(files, size_bytes), now_s)

    def of(self, owner: str, now_s: float) -> float:
        """Return an owner's use, as far as it still counts, in bytes."""
        given, at_s = self._given.get(owner, (0.0, now_s))
        return float(given * 2.0 ** (-(now_s - at_s) / HALF_LIFE_S))

    def fade(self, now_s: float) -> None:
        """Forget the owners whose share is less than a file."""
        self._given = {
            owner: (self.of(owner, now_s), now_s) for owner in self._given if self.of(owner, now_s) >= FILE_BYTES
        }


_LOOKED_AT = 2000


@dataclass
class Load:
    """The batches that run now.

    :param movers: number of batches; by server, by owner, by both. :param cost_bytes: of all batches, by owner.
    :param running: (sandbox, destination) pairs with files in them.
    """

    movers: int = 0
    by_server: Counter[str] = field(default_factory=Counter)
    by_owner: Counter[str] = field(default_factory=Counter)
    by_both: Counter[tuple[str, str]] = field(default_factory=Counter)
    cost_bytes: Counter[str] = field(default_factory=Counter)
    running: set[tuple[int, int]] = field(default_factory=set)

    def start(self, batch: Batch) -> None:
        """Count a batch that runs from now on."""
        self._count(batch, 1)
        self.running |= {(part.sandbox, batch.destination) for part in batch.parts}

    def end(self, batch: Batch) -> None:
        """Stop counting a batch that has ended."""
        self._count(batch, -1)
        self.running -= {(part.sandbox, batch.destination) for part in batch.parts}

    def _count(self, batch: Batch, by: int) -> None:
        self.movers += by
        self.by_server[batch.server] += by
        self.by_owner[batch.owner] += by
        self.by_both[batch.owner, batch.server] += by
        self.cost_bytes[batch.owner] += by * cost_bytes(batch.planned_files, batch.size_bytes)


@dataclass(frozen=True)
class PlanInput:
    """The input of a plan beside the files.

    :param flow: what may be sent to a server. :param share: bytes that an owner was given lately.
    :param now: wall clock. :param batch_files: what a destination's plugin would rather have than the limit when it is
    more. :param room: files that a further batch of an owner may move at once to a destination; 0: none may start.
    :param may_send: False for a sandbox that must not be sent now, even if it is the first.
    """

    destinations: Mapping[int, Destination]
    slot_usage: SlotUsage
    limits: Limits
    load: Load
    flow: Callable[[str], Flow]
    share: Callable[[str], float]
    now: float
    batch_files: Callable[[Destination], int] = lambda destination: 0
    room: Callable[[Destination, str], int] = lambda destination, owner: 1
    may_send: Callable[[Sandbox], bool] = lambda sandbox: True


def plan(backlog: Backlog, inputs: PlanInput) -> list[Batch]:
    """Return the batches to start now, in their order; count their places and load into the plan's input."""
    batches: list[Batch] = []
    if inputs.load.movers >= inputs.limits.movers:
        return batches
    for queue in backlog.queues.values():
        queue.wake(inputs.now)
    queues = [queue for queue in backlog.queues.values() if queue.first]
    while queues and inputs.load.movers < inputs.limits.movers:
        queue = min(queues, key=lambda one: _rank(one, inputs))
        batch = _batch(queue, inputs) if _may_start(queue, inputs) else None
        if batch is None:
            queues.remove(queue)
            continue
        inputs.load.start(batch)
        batches.append(batch)
    return batches


def _rank(queue: BatchQueue, inputs: PlanInput) -> tuple[float, float, tuple[int, ...]]:
    deadline = queue.earliest_deadline()
    urgent = deadline if deadline < inputs.now + inputs.limits.urgent_window_s else float("inf")
    owner = queue.key.owner
    return (urgent, inputs.share(owner) + inputs.load.cost_bytes[owner], queue.first or ())


def _may_start(queue: BatchQueue, inputs: PlanInput) -> bool:
    load, limits, owner = inputs.load, inputs.limits, queue.key.owner
    destination = inputs.destinations[queue.key.destination]
    server, flow = destination.server, inputs.flow(destination.server)
    if flow is Flow.NONE or (flow is Flow.ONE and load.by_server[server]):
        return False
    return (
        load.by_server[server] < limits.movers_per_server
        and load.by_both[owner, server] < most_per_owner(limits.movers_per_server)
        and load.by_owner[owner] < min(limits.movers_per_owner, most_per_owner(limits.movers))
        and inputs.room(destination, owner) > 0
    )


def _batch(queue: BatchQueue, inputs: PlanInput) -> Batch | None:
    """Return the next batch of a queue, None if all of its sandboxes wait for a place in their data slots."""
    key, limits = queue.key, inputs.limits
    destination = inputs.destinations[key.destination]
    is_probe = inputs.flow(destination.server) is Flow.ONE
    most_files = 1 if is_probe else max(limits.batch_files, inputs.batch_files(destination))
    parts: list[Part] = []
    files = size_bytes = 0
    for looked_at, (sandbox, part) in enumerate(queue.due(inputs.now + limits.urgent_window_s)):
        if files >= most_files or looked_at >= _LOOKED_AT:
            break
        taken = min(most_files - files, part.files)
        taken_bytes = part.size_bytes * taken // part.files
        if (sandbox.id, key.destination) in inputs.load.running or not inputs.may_send(sandbox):
            continue
        if parts and size_bytes + taken_bytes > limits.batch_bytes:
            continue
        if destination.server not in {inputs.destinations[number].server for number in sandbox.sent_to}:
            if not inputs.slot_usage.has_active(sandbox.slot, sandbox.owner, destination.server):
                continue
            inputs.slot_usage.activate(sandbox.slot, sandbox.owner, destination.server)
        parts.append(Part(sandbox.id, taken))
        files += taken
        size_bytes += taken_bytes
    if not parts:
        return None
    return Batch(
        owner=key.owner,
        uid=key.uid,
        gid=key.gid,
        destination=key.destination,
        server=destination.server,
        probe=is_probe,
        parts=tuple(parts),
        size_bytes=min(size_bytes, limits.batch_bytes),
    )
