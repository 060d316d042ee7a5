"""Data slots: which sandboxes are sent next, and in which batches. Pure: no clock, no I/O.

Each CPU slot has a data slot: a number of active places and a depth of waiting ones. A sandbox takes an active place
when a batch with its files starts, and gives it back when it is delivered, has failed, or waits for a time or for a
server that cannot be reached: a dead destination blocks nobody's slot.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from sandbox_manager.retry import Gate
from sandbox_manager.sandbox import ACTIVE, OCCUPYING, Destination, Sandbox, SlotKey, Waiting
from stageout.core.states import State

_LOOKED_AT = 2000


@dataclass(frozen=True)
class Limits:
    """Bounds that the planner keeps.

    :param active: places of one data slot that send; :param depth: further ones that wait. :param cpus: of the node;
    the data slots of one partitionable slot together are never more. :param batch_bytes: after which a batch takes
    no further file.
    """

    active: int
    depth: int
    cpus: int
    movers: int
    movers_per_server: int
    batch_files: int
    batch_bytes: int


@dataclass(frozen=True)
class Part:
    """Share of one sandbox in a batch: up to so many of its due files for the batch's destination."""

    sandbox: int
    files: int


@dataclass(frozen=True)
class BatchPlan:
    """One call of a plugin to come."""

    owner: str
    uid: int
    gid: int
    destination: int
    probe: bool
    parts: tuple[Part, ...]


@dataclass
class Load:
    """What is going on now.

    :param movers: batches that run. :param by_server: of these, per server.
    :param running: (sandbox, destination) pairs with files in a running batch.
    """

    movers: int = 0
    by_server: Counter[str] = field(default_factory=Counter)
    running: set[tuple[int, int]] = field(default_factory=set)


Order = Callable[[Sandbox], tuple[float, ...]]


def usual_order(sandbox: Sandbox) -> tuple[float, ...]:
    """Deadline first, then (place of fair shares), job priority, small before large, age.

    A deadline (credential, end of a pilot) is not known to the ledger yet: all are equal there.
    """
    return (-sandbox.priority, sandbox.bytes_left, sandbox.accepted_at, sandbox.id)


class Places:
    """Active and waiting places of all data slots."""

    def __init__(self, sandboxes: Iterable[Sandbox], limits: Limits, is_stuck: Callable[[Sandbox], bool]) -> None:
        self._limits = limits
        self._active: Counter[SlotKey] = Counter()
        self._active_parents: Counter[tuple[str, int]] = Counter()
        self._taken: Counter[SlotKey] = Counter()
        self._taken_parents: Counter[tuple[str, int]] = Counter()
        for box in sandboxes:
            if box.state in ACTIVE:
                self.activate(box)
            if box.state in OCCUPYING and not is_stuck(box):
                self.take(box.slot)

    def activate(self, box: Sandbox) -> None:
        """An active place is taken."""
        self._active[box.slot] += 1
        self._active_parents[box.slot.parent] += 1

    def take(self, slot: SlotKey) -> None:
        """A place of any kind is taken."""
        self._taken[slot] += 1
        self._taken_parents[slot.parent] += 1

    def has_active(self, slot: SlotKey) -> bool:
        """Is an active place of this data slot free?"""
        most = self._limits.active
        whole = self._active_parents[slot.parent] < most * max(1, self._limits.cpus)
        return self._active[slot] < most and (whole or not slot.dslot_id)

    def free(self, slot: SlotKey) -> int:
        """Places left in this data slot."""
        each = self._limits.active + self._limits.depth
        own = each - self._taken[slot]
        if not slot.dslot_id:
            return max(0, own)
        return max(0, min(own, each * max(1, self._limits.cpus) - self._taken_parents[slot.parent]))


def plan(
    sandboxes: Iterable[Sandbox],
    destinations: Mapping[int, Destination],
    places: Places,
    limits: Limits,
    load: Load,
    gate: Callable[[str], Gate],
    now: float,
    order: Order = usual_order,
    batch_files: Callable[[Destination], int] = lambda place: 0,
) -> list[BatchPlan]:
    """Batches to start now, most urgent first. ``places`` and ``load`` are counted up for them.

    :param sandboxes: those that may be sent. :param now: wall clock.
    :param batch_files: what a destination's plugin would rather have than ``limits.batch_files`` when it is more.
    """
    if load.movers >= limits.movers:
        return []
    ready = [box for box in sandboxes if not box.paused and any(part.ready_at <= now for part in box.waiting)]
    first = heapq.nsmallest(_LOOKED_AT, ready, key=lambda box: (box.state not in ACTIVE, *order(box)))
    batches: dict[_Key, _Open] = {}
    started: set[int] = set()
    for box in first:
        for part in box.waiting:
            if part.ready_at <= now and (box.id, part.destination) not in load.running:
                _offer(box, part, batches, started, _Scene(destinations, places, limits, load, gate, batch_files))
    return [BatchPlan(*key, probe=batch.probe, parts=tuple(batch.parts)) for key, batch in batches.items()]


_Key = tuple[str, int, int, int]


@dataclass
class _Open:
    probe: bool
    files: int = 0
    size_bytes: int = 0
    parts: list[Part] = field(default_factory=list)


@dataclass(frozen=True)
class _Scene:
    destinations: Mapping[int, Destination]
    places: Places
    limits: Limits
    load: Load
    gate: Callable[[str], Gate]
    batch_files: Callable[[Destination], int]

    def most_files(self, destination: int) -> int:
        """Of one batch."""
        return max(self.limits.batch_files, self.batch_files(self.destinations[destination]))


def _offer(box: Sandbox, part: Waiting, batches: dict[_Key, _Open], started: set[int], scene: _Scene) -> None:
    key = (box.owner, box.uid, box.gid, part.destination)
    active = box.state in ACTIVE or box.id in started
    if not active and not scene.places.has_active(box.slot):
        return
    batch = batches.get(key)
    if batch is None:
        batch = _start(scene, part.destination)
        if batch is None:
            return
        batches[key] = batch
    room = (1 if batch.probe else scene.most_files(part.destination)) - batch.files
    if room <= 0 or (batch.files and batch.size_bytes + part.size_bytes > scene.limits.batch_bytes):
        return
    taken = min(room, part.files)
    batch.parts.append(Part(box.id, taken))
    batch.files += taken
    batch.size_bytes += part.size_bytes
    scene.load.running.add((box.id, part.destination))
    if not active:
        started.add(box.id)
        scene.places.activate(box)


def _start(scene: _Scene, destination: int) -> _Open | None:
    server = scene.destinations[destination].server
    gate = scene.gate(server)
    full = scene.load.movers >= scene.limits.movers or scene.load.by_server[server] >= scene.limits.movers_per_server
    if full or gate is Gate.SHUT or (gate is Gate.PROBE and scene.load.by_server[server]):
        return None
    scene.load.movers += 1
    scene.load.by_server[server] += 1
    return _Open(gate is Gate.PROBE)


def is_stuck(box: Sandbox, destinations: Mapping[int, Destination], gate: Callable[[str], Gate]) -> bool:
    """True for a sandbox that waits for its owner, or only for servers which cannot be reached: it holds no place."""
    if box.state is not State.CONFIRMED or not box.waiting:
        return False
    return box.paused or all(gate(destinations[part.destination].server) is Gate.SHUT for part in box.waiting)
