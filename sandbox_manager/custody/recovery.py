"""The start after a crash: the ledger and the spool are brought into agreement.

Files that were in a mover wait again. A sandbox whose data the disk has not, or perhaps not, is LOST. Output without a
record is kept apart: a manager that died between the two steps of a hand-off leaves a directory, and nobody was
promised anything. A ledger that is older than its spool (it came out of a backup, or lost its journal) leaves one too,
and that is output which was accepted. The two look the same. So each is moved to ``unknown/`` and kept for the
retention time. When the newest ledger is put back, its output returns to the spool.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Executor
from typing import TypeVar

from sandbox_manager.custody import queries, updates
from sandbox_manager.custody.ledger import Ledger
from sandbox_manager.custody.spool import Spool
from stageout.core import log
from stageout.core.clock import Clock, wall_now
from stageout.core.states import FREED, State
from stageout.model.sandbox import Sandbox, SyncState
from stageout.movers.mover import end_leftovers

_NEEDS_BYTES = frozenset(State) - FREED - {State.OFFERED}


def end_movers(spool: Spool) -> None:
    """End the plugins of an earlier manager: none may still send when this manager starts."""
    ended = end_leftovers(spool.root / "movers")
    if ended:
        log.warn("orphan-movers-ended", processes=ended)


def reconcile_ledger(
    db: sqlite3.Connection, directories: Collection[str], boot: str, now: int, longest_s: float
) -> tuple[set[int], list[str]]:
    """Bring the ledger into agreement with the spool after a start.

    Files that were in a mover wait again. A sandbox whose data had not reached the disk before the machine went down,
    whose sync had begun and has no recorded end, or whose directory is gone, is LOST.

    :param directories: tickets that have one. :param boot: id of the running kernel's boot.
    :param longest_s: no file waits longer for its next attempt, however the clock was set meanwhile.
    :returns: sandboxes touched, and tickets whose data must be synced again.
    """
    updates.count_anew(db, now)
    touched = updates.shorten_waits(db, now, longest_s)
    for sandbox in updates.ids_in(db, (State.MOVING, State.LEASED)):
        updates.moving_back(db, sandbox)
        updates.set_state(db, sandbox, State.CONFIRMED, now)
        touched.add(sandbox)
    unsynced = []
    for ticket, (sandbox, synced, its_boot) in queries.kept_tickets(db).items():
        if not _is_needed(db, ticket, sandbox):
            continue
        if ticket not in directories:
            mark_lost(db, sandbox, now, "its directory in the spool is gone")
        elif synced is SyncState.DONE:
            continue
        elif its_boot != boot:
            mark_lost(db, sandbox, now, "the machine went down before the output was safely on its disk")
        elif synced is SyncState.BEGUN:
            mark_lost(
                db,
                sandbox,
                now,
                "the manager died while it wrote the output to the disk, and nobody knows how that ended",
            )
        else:
            unsynced.append(ticket)
            continue
        touched.add(sandbox)
    return touched, unsynced


def mark_tickets_lost(db: sqlite3.Connection, lost: Mapping[str, str], now: int) -> Iterable[int]:
    """Mark sandboxes LOST whose data the disk has lost. :param lost: why, by ticket. :returns: sandboxes touched."""
    touched = []
    for ticket, reason in lost.items():
        sandbox = queries.sandbox_of(db, ticket)
        if sandbox is not None and _is_needed(db, ticket, sandbox):
            mark_lost(db, sandbox, now, reason)
            touched.append(sandbox)
    return touched


def record_synced(db: sqlite3.Connection, on_disk: Iterable[str], lost: Mapping[str, str], now: int) -> Iterable[int]:
    """Record that the data of tickets is on the disk, and that the disk has lost the data of others.

    :param lost: why, by ticket. :returns: sandboxes touched.
    """
    updates.mark_synced(db, on_disk)
    return mark_tickets_lost(db, lost, now)


def may_need(sandbox: Sandbox) -> bool:
    """Tell whether bytes of this sandbox may be needed."""
    return sandbox.state in _NEEDS_BYTES and not sandbox.freed


def _is_needed(db: sqlite3.Connection, ticket: str, sandbox: int) -> bool:
    """Tell whether this sandbox still needs the bytes of its ticket."""
    return updates.state_of(db, sandbox) in _NEEDS_BYTES and updates.is_wanted(db, ticket)


def mark_lost(db: sqlite3.Connection, sandbox: int, now: int, reason: str) -> None:
    log.error("sandbox-lost", sandbox=sandbox, reason=reason)
    updates.end(db, sandbox, State.LOST, now, reason=reason)


T = TypeVar("T")
_ADVICE = (
    "the ledger has no record of it, so its jobs run again. If an old ledger was put back, stop the manager and put "
    "the newest one in its place; else leave it: it is deleted after STAGEOUT_RETENTION"
)


class OrphanCollector:
    """Output without a record.

    :param disk: threads that move directories. :param retention_s: time for which the output is kept.
    """

    def __init__(
        self, ledger: Ledger, spool: Spool, disk: Executor, clock: Clock, retention_s: Callable[[], float]
    ) -> None:
        self._ledger, self._spool, self._disk = ledger, spool, disk
        self._clock, self._retention_s = clock, retention_s
        self._before: frozenset[str] = frozenset()
        self._unknown = 0

    async def move_back(self) -> None:
        """At the start: move output back that was set aside, and that the ledger knows."""
        kept = await self._ledger.read(queries.kept_tickets)
        try:
            await self._on_disk(self._spool.remove_parts)
            back = await self._on_disk(lambda: self._spool.move_back(kept))
        except OSError as problem:
            log.error(
                "unknown-output-restore-failed", problem=problem, advice="see whether the disk of the spool is sound"
            )
            return
        if back:
            log.event("unknown-output-recovered", tickets=len(back), first=back[0])

    async def set_aside(self) -> None:
        """At the start: set aside all output without a record. No hand-off is on its way."""
        await self._collect(await self._without_record())

    async def collect(self) -> None:
        """Set aside what had no record at the last call either: a hand-off may be on its way to its record."""
        found = await self._without_record()
        await self._collect(found & self._before)
        self._before = found

    async def _without_record(self) -> frozenset[str]:
        kept = await self._ledger.read(queries.kept_tickets)
        return frozenset(await self._on_disk(self._spool.directories)).difference(kept)

    async def _collect(self, tickets: Iterable[str]) -> None:
        try:
            moved = await self._on_disk(lambda: self._spool.set_aside(sorted(tickets)))
            if moved:
                directory = self._spool.root / "unknown"
                log.error(
                    "unknown-output-found", tickets=len(moved), first=moved[0], directory=directory, advice=_ADVICE
                )
            await self._keep()
        except (OSError, sqlite3.Error) as problem:
            log.error(
                "unknown-output-move-failed",
                problem=problem,
                advice="see whether the disk of the spool is sound, and has room",
            )

    async def _keep(self) -> None:
        """Record what is set aside, and remove what has been for long enough."""
        found = await self._on_disk(self._spool.unknown)
        self._unknown = len(found)
        if not found and not await self._ledger.read(lambda db: db.execute("SELECT 1 FROM unknown").fetchone()):
            return
        now, retention_s = wall_now(self._clock), self._retention_s()
        old = await self._ledger.write(lambda db: updates.keep_unknown(db, found, now, retention_s), "record-unknown")
        if old:
            await self._on_disk(lambda: self._spool.remove_unknown(old))
            self._unknown -= len(old)
            log.event("unknown-output-deleted", tickets=len(old), first=old[0])

    async def _on_disk(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)

    def facts(self) -> Mapping[str, int]:
        """For the control socket."""
        return {"UnknownOutput": self._unknown}
