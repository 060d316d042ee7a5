"""Directories in the spool that no record needs.

A manager that died between the two steps of a hand-off leaves one, and nobody was promised anything. A ledger that is
older than its spool (it came out of a backup, or lost its journal) leaves one too, and that is output which was
accepted. The two look the same, so each is set aside in ``unknown/`` and kept for the retention time. When the newest
ledger is put back its output goes back to its place.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from typing import TypeVar

from sandbox_manager.custody import queries, updates
from sandbox_manager.custody.ledger import Ledger
from sandbox_manager.custody.spool import Spool
from stageout.core import log
from stageout.core.clock import Clock, wall_now

T = TypeVar("T")
_ADVICE = (
    "the ledger has no record of it, so its jobs run again. If an old ledger was put back, stop the manager and put "
    "the newest one in its place; else leave it: it is deleted after STAGEOUT_RETENTION"
)


class OrphanCollector:
    """Output without a record.

    :param disk: where directories are moved. :param retention_s: it is kept so long.
    """

    def __init__(
        self, ledger: Ledger, spool: Spool, disk: Executor, clock: Clock, retention_s: Callable[[], float]
    ) -> None:
        self._ledger, self._spool, self._disk = ledger, spool, disk
        self._clock, self._retention_s = clock, retention_s
        self._before: frozenset[str] = frozenset()
        self._unknown = 0

    async def take_back(self) -> None:
        """At the start: move output back that was set aside, and that the ledger knows."""
        kept = await self._ledger.read(queries.kept_tickets)
        try:
            await self._on_disk(self._spool.remove_parts)
            back = await self._on_disk(lambda: self._spool.take_back(kept))
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
                place = self._spool.root / "unknown"
                log.error("unknown-output-found", tickets=len(moved), first=moved[0], directory=place, advice=_ADVICE)
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
