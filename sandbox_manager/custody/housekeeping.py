"""The care for custody that no order and no batch asks for: recovery at the start, deadlines, records that are old."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping

from sandbox_manager.custody import queries, recovery
from sandbox_manager.custody.custody import Custody
from stageout.core import log
from stageout.core.clock import wall_now
from stageout.core.states import FREED
from stageout.core.units import count

_DELETED = "output was deleted in the spool"
_KEEP_AWAY = "its jobs run again. Find who deletes files there, or whether the disk fails, and keep cleaners away"


class Housekeeping:
    """The care for one spool and its ledger.

    :param busy: returns the sandboxes with files in a mover or about to be.
    """

    def __init__(self, custody: Custody, busy: Callable[[], Collection[int]]) -> None:
        self._custody, self._store, self._spool, self._busy = custody, custody.store, custody.spool, busy
        self._unsynced: list[str] = []
        self._spool_problem = ""

    def facts(self) -> Mapping[str, str]:
        """For the control socket."""
        return {"SpoolProblem": self._spool_problem}

    async def recover(self) -> None:
        """Bring ledger, spool and processes into agreement after whatever ended the last manager. No sync begins."""
        await self._custody.on_disk(lambda: recovery.end_movers(self._spool))
        await self._custody.orphans.take_back()
        self._unsynced = await self._settle_ledger()
        await self._store.load()
        await self._custody.clock_guard.load()
        await self._custody.renewal.mend()
        await self._store.ledger.read(lambda db: self._custody.space.fill(queries.held_files(db)))
        await self._custody.orphans.set_aside()
        await self._custody.state.load()
        boxes = self._store.registry.by_id
        self._store.observe(self._custody.releases.on_change)  # not before: only now it is known what the spool holds
        self._custody.releases.consider([box for box in boxes.values() if box.state in FREED])
        log.event("spool-recovered", sandboxes=len(boxes), unsynced=len(self._unsynced))

    def resume_syncs(self) -> None:
        """Sync the accepted output that :meth:`recover` has found unsynced.

        Output whose sync has begun is LOST if the manager ends before the sync does. So a start that fails begins none.
        """
        for ticket in self._unsynced:
            self._custody.syncs.add(ticket)
        self._unsynced = []

    async def _settle_ledger(self) -> list[str]:
        """Return the tickets whose data must be synced again. On return the ledger agrees with the spool."""
        directories = set(self._spool.directories())
        unsynced: list[str] = []

        def change(db: sqlite3.Connection) -> Iterable[int]:
            touched, again = recovery.settle_ledger(
                db,
                directories,
                self._custody.boot,
                wall_now(self._custody.clock),
                self._custody.rules().retry.max_delay_s,
            )
            unsynced[:] = again
            return touched

        await self._store.write(change, "record-recovered")
        return unsynced

    async def run_housekeeping(self) -> None:
        """Let deadlines pass that nothing else looks at: unconfirmed, given up, kept long enough."""
        try:
            await self._store.ledger.keep_reserve()
        except OSError as problem:
            log.warn("reserve-write-failed", problem=problem)
        try:
            await self._store.ledger.compact()
        except sqlite3.Error as problem:
            log.warn("ledger-compaction-failed", problem=problem)
        await self._custody.clock_guard.check()
        await self._find_deleted()
        rules, now = self._custody.rules(), wall_now(self._custody.clock)
        due = recovery.due(self._store.registry.by_id.values(), self._busy(), rules, now)
        if due:
            await self._store.write(
                lambda db: recovery.pass_deadlines(db, due, rules, now, self._custody.fallback_rules), "record-failed"
            )

    async def _find_deleted(self) -> None:
        """Mark output whose directory was deleted as LOST now. Its turn to be sent may be days away."""
        boxes = filter(recovery.may_need, self._store.registry.by_id.values())
        tickets = [ticket for box in boxes for ticket in box.tickets]
        try:
            gone = await self._custody.on_disk(lambda: self._spool.deleted(tickets))
        except OSError as problem:
            if self._spool_problem != str(problem):
                log.error("spool-check-failed", problem=problem, advice="nothing is lost: mount it again")
            self._spool_problem = str(problem)
            return
        if self._spool_problem and not self._spool_problem.startswith(_DELETED):
            self._spool_problem = ""
        if not gone:
            return
        lost = dict.fromkeys(gone, f"{_DELETED} while the manager ran")
        touched = await self._store.write(
            lambda db: recovery.lose_tickets(db, lost, wall_now(self._custody.clock)), "record-lost"
        )
        if touched:
            self._spool_problem = f"{_DELETED}, lately that of {count(len(touched), 'run')}"
            log.error("spool-deleted", tickets=len(gone), first=gone[0], directory=self._spool.root, advice=_KEEP_AWAY)

    async def forget_old_jobs(self) -> None:
        """Forget jobs without output here that no message named for the retention time, and collect orphans."""
        await self._custody.clock_guard.check()
        await self._custody.on_disk(self._spool.withdraw_again)
        await self._custody.orphans.collect()
        await self._custody.state.forget_unneeded()
        await self._store.drop_old_fences(int(self._custody.clock.wall_s() - self._custody.rules().retention_s))
