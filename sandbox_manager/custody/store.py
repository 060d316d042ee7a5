"""The ledger together with its picture in memory: every change goes through here, so the two never differ."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sandbox_manager.custody import queries, updates
from sandbox_manager.custody.ledger import Ledger
from sandbox_manager.custody.registry import Deadline, Registry
from sandbox_manager.sandbox import Destination, Sandbox
from stageout.core.ending import outlast
from stageout.core.metrics import CUSTODY_BOUNDS, Histogram
from stageout.core.states import State

Change = Callable[[sqlite3.Connection], Iterable[int]]
Observer = Callable[[Sequence[Sandbox]], None]


@dataclass(frozen=True)
class _Fresh:
    sandboxes: dict[int, Sandbox | None]
    destinations: dict[int, Destination]


class SandboxStore:
    """Ledger and registry. :attr:`changed` is set with every change; who waits for it clears it.

    :param deadline: see :class:`sandbox_manager.custody.registry.Backlog`.
    :ivar custody: seconds from acceptance to delivery, of what was delivered since the start.
    :ivar lost_bytes: of what was lost since the start.
    """

    def __init__(self, ledger: Ledger, deadline: Deadline) -> None:
        self.ledger = ledger
        self.registry = Registry(deadline)
        self.changed = asyncio.Event()
        self.wake = asyncio.Event()
        self.acknowledged: dict[str, int] = {}
        self.custody = Histogram(CUSTODY_BOUNDS)
        self.lost_bytes = 0
        self._observers: list[Observer] = []

    def observe(self, observer: Observer) -> None:
        """Call ``observer`` after each change from now on, with the sandboxes that it touched, as they are now.

        It is called on the loop, after the commit, when :attr:`acknowledged` and :attr:`changed` are set.
        """
        self._observers.append(observer)

    async def load(self) -> None:
        """Read everything at start."""
        boxes, destinations, fences, self.acknowledged = await self.ledger.read(
            lambda db: (
                queries.all_sandboxes(db), queries.destinations(db), queries.fences(db), updates.acknowledged(db)
            )
        )  # fmt: skip
        self.registry.load(boxes, destinations, fences)

    async def write(self, change: Change, *labels: str, orders: Mapping[str, int] | None = None) -> list[Sandbox]:
        """Run a change that returns the ids of the sandboxes it touched. On return it is on the disk.

        When the caller is cancelled meanwhile, the memory follows the ledger all the same.

        :param orders: numbers of the last orders that it carries out, by agent.
        :returns: those that still exist, as they are now. :raises IllegalMove: and what else the change raises.
        """
        work = asyncio.ensure_future(self._write(change, labels, orders or {}))
        if await outlast(work):
            work.exception()  # looked at, so that nobody complains
            raise asyncio.CancelledError
        return work.result()

    async def _write(self, change: Change, labels: Sequence[str], orders: Mapping[str, int]) -> list[Sandbox]:
        known = frozenset(self.registry.destinations)
        fresh = await self.ledger.write(lambda db: _changed(db, change, known), *labels)
        self.registry.destinations.update(fresh.destinations)
        for sandbox_id, box in fresh.sandboxes.items():
            if box is None:
                self.registry.drop(sandbox_id)
            else:
                self._count_end(self.registry.by_id.get(sandbox_id), box)
                self.registry.put(box)
        self.acknowledged.update(orders)
        if fresh.sandboxes:
            self.wake.set()
        if fresh.sandboxes or orders:
            self.changed.set()
        boxes = [box for box in fresh.sandboxes.values() if box is not None]
        for observer in self._observers:
            observer(boxes)
        return boxes

    def _count_end(self, old: Sandbox | None, new: Sandbox) -> None:
        """Count output that has just been delivered or lost. :param old: as it was, None: it was not known."""
        if old is None or old.state is new.state:
            return
        if new.state is State.DELIVERED:
            self.custody.observe(max(0.0, float(new.ended_at - new.accepted_at)))
        elif new.state is State.LOST:
            self.lost_bytes += old.bytes_left

    async def drop_old_fences(self, before: int) -> None:
        """Forget the run numbers of jobs without output here that no message named since this wall clock."""
        await self.ledger.write(lambda db: updates.drop_old_fences(db, before))
        self.registry.keep_only(*await self.ledger.read(lambda db: (queries.destinations(db), queries.fences(db))))


def _changed(db: sqlite3.Connection, change: Change, known: frozenset[int]) -> _Fresh:
    boxes = {sandbox_id: queries.sandbox(db, sandbox_id) for sandbox_id in set(change(db))}
    places = {part.destination for box in boxes.values() if box for part in box.waiting}
    return _Fresh(boxes, queries.destinations(db) if places - known else {})
