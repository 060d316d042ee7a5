"""Upkeep of custody that no order and no batch causes: recovery at the start, deadlines, and old records."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping

from sandbox_manager.custody import queries, recovery, redirects, updates
from sandbox_manager.custody.custody import Custody
from sandbox_manager.custody.redirects import FallbackRules
from sandbox_manager.rules import Rules
from stageout.core import log
from stageout.core.clock import wall_now
from stageout.core.errors import UNREACHABLE, Advice, ErrorClass
from stageout.core.states import FREED, State
from stageout.core.units import count
from stageout.model.sandbox import SENDABLE, Sandbox

_DELETED = "output was deleted in the spool"
_KEEP_AWAY = "its jobs run again. Find who deletes files there, or whether the disk fails, and keep cleaners away"


class Housekeeping:
    """The upkeep of one spool and its ledger.

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
        """Bring ledger, spool and processes into agreement after the last manager ended, or crashed. No sync begins."""
        await self._custody.on_disk(lambda: recovery.end_movers(self._spool))
        await self._custody.orphans.move_back()
        self._unsynced = await self._reconcile_ledger()
        await self._store.load()
        await self._custody.clock_guard.load()
        await self._custody.renewal.mend()
        await self._store.ledger.read(lambda db: self._custody.space.fill(queries.held_files(db)))
        await self._custody.orphans.set_aside()
        await self._custody.state.load()
        sandboxes = self._store.registry.by_id
        self._store.observe(self._custody.releases.on_change)  # only now the manager knows what the spool holds
        self._custody.releases.consider([sandbox for sandbox in sandboxes.values() if sandbox.state in FREED])
        log.event("spool-recovered", sandboxes=len(sandboxes), unsynced=len(self._unsynced))

    def resume_syncs(self) -> None:
        """Sync the accepted output that :meth:`recover` has found unsynced.

        Output whose sync has begun is LOST if the manager ends before the sync does. So a start that fails begins none.
        """
        for ticket in self._unsynced:
            self._custody.syncs.add(ticket)
        self._unsynced = []

    async def _reconcile_ledger(self) -> list[str]:
        """Return the tickets whose data must be synced again. On return the ledger agrees with the spool."""
        directories = set(self._spool.directories())
        unsynced: list[str] = []

        def change(db: sqlite3.Connection) -> Iterable[int]:
            touched, again = recovery.reconcile_ledger(
                db,
                directories,
                self._custody.boot,
                now=wall_now(self._custody.clock),
                longest_s=self._custody.rules().retry.max_delay_s,
            )
            unsynced[:] = again
            return touched

        await self._store.write(change, "record-recovered")
        return unsynced

    async def run_housekeeping(self) -> None:
        """Carry out deadlines: output that stays unconfirmed, is given up, or was kept for the retention time."""
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
        ids = due(self._store.registry.by_id.values(), self._busy(), rules, now)
        if ids:
            await self._store.write(
                lambda db: pass_deadlines(
                    db, sandboxes=ids, rules=rules, now=now, fallback=self._custody.fallback_rules
                ),
                "record-failed",
            )

    async def _find_deleted(self) -> None:
        """Mark output whose directory was deleted as LOST now. Its turn to be sent may be days away."""
        sandboxes = filter(recovery.may_need, self._store.registry.by_id.values())
        tickets = [ticket for sandbox in sandboxes for ticket in sandbox.tickets]
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
            lambda db: recovery.mark_tickets_lost(db, lost, wall_now(self._custody.clock)), "record-lost"
        )
        if touched:
            self._spool_problem = f"{_DELETED}, lately that of {count(len(touched), 'run')}"
            log.error("spool-deleted", tickets=len(gone), first=gone[0], directory=self._spool.root, advice=_KEEP_AWAY)

    async def forget_old_jobs(self) -> None:
        """Forget jobs without output here and without a message for the retention time, and collect orphans."""
        await self._custody.clock_guard.check()
        await self._custody.on_disk(self._spool.withdraw_again)
        await self._custody.orphans.collect()
        await self._custody.state.forget_unneeded()
        await self._store.drop_old_fences(int(self._custody.clock.wall_s() - self._custody.rules().retention_s))


def due(sandboxes: Iterable[Sandbox], busy: Collection[int], rules: Rules, now: int) -> list[int]:
    """Sandboxes whose deadline may have passed and whose files are in no mover."""
    return [sandbox.id for sandbox in sandboxes if sandbox.id not in busy and may_be_due(sandbox, rules, now)]


def may_be_due(sandbox: Sandbox, rules: Rules, now: int) -> bool:
    """Tell whether this sandbox's deadlines in the ledger can have passed."""
    if sandbox.ended_at:
        return not sandbox.forgettable and now - sandbox.ended_at > rules.retention_s
    waits_s = now - sandbox.due_since
    if sandbox.fallback and sandbox.state in SENDABLE and 0 < rules.retry.fallback_after_s <= waits_s:
        return True
    if sandbox.state in SENDABLE and not (sandbox.attempts or sandbox.paused):
        return False
    if sandbox.state is State.ACCEPTED and not sandbox.reason:
        return waits_s > min(rules.confirm_timeout_s, rules.retention_s)
    return waits_s > min(rules.retention_s, rules.retry.delivery_timeout_s)


def pass_deadlines(
    db: sqlite3.Connection, sandboxes: Iterable[int], rules: Rules, now: int, fallback: FallbackRules
) -> Iterable[int]:
    """Change the sandboxes that have waited long enough. Return the sandboxes touched."""
    touched = set()
    for sandbox in sandboxes:
        state = updates.state_of(db, sandbox)
        if state in _WAITING:
            is_changed = _waiting(db, sandbox, rules, now, fallback=fallback)
        else:
            is_changed = _DEADLINES.get(state, _ended)(db, sandbox, rules, now)
        if is_changed:
            touched.add(sandbox)
    return touched


def _unconfirmed(db: sqlite3.Connection, sandbox: int, rules: Rules, now: int) -> bool:
    times = updates.times(db, sandbox)
    if now - times.accepted_at > rules.retention_s:
        recovery.mark_lost(db, sandbox, now, f"never confirmed by the access point, deleted after {_days(rules)}")
        return True
    if now - times.accepted_at > rules.confirm_timeout_s and not times.reason:
        updates.set_reason(db, sandbox, f"not confirmed by the access point within {rules.confirm_timeout_s:.0f} s")
        return True
    return False


def _waiting(db: sqlite3.Connection, sandbox: int, rules: Rules, now: int, fallback: FallbackRules) -> bool:
    """Give up files that were tried, or paused, for too long. Files that were never tried continue to wait."""
    known = queries.sandbox(db, sandbox)
    if known is not None and redirects.use_if_due(db, known, fallback, now):
        return True
    times = updates.times(db, sandbox)
    limit_s = rules.retention_s if times.paused else rules.retry.delivery_timeout_s + rules.retry.max_delay_s
    if times.error_code and ErrorClass.from_code(times.error_code).advice is Advice.NEEDS_CREDENTIAL:
        limit_s = max(limit_s, rules.retry.credential_timeout_s + rules.retry.max_delay_s)
    if now - max(times.accepted_at, times.retried_at) <= limit_s:
        return False
    given_up = updates.fail_waiting(db, sandbox) if times.paused else updates.fail_tried(db, sandbox, UNREACHABLE)
    if not given_up:
        return False
    if updates.has_waiting(db, sandbox):
        updates.touch(db, sandbox)
        return True
    gave_up = f"(gave up after {limit_s / 3600:.3g} hours)"
    reason = f"{times.reason or 'paused'} {gave_up}"
    if known is not None and not times.paused:
        why = redirects.destination_failure(db, known, fallback.reason_away)
        if why and redirects.use(db, sandbox=known, why=f"{why} {gave_up}", find_plugin=fallback.find_plugin, now=now):
            return True
        reason = redirects.failure_reason(
            queries.sandbox(db, sandbox) or known, queries.first_error(db, sandbox), reason
        )
    updates.end(db, sandbox, State.FAILED, now, reason=reason, error_code=times.error_code)
    return True


def _failed(db: sqlite3.Connection, sandbox: int, rules: Rules, now: int) -> bool:
    times = updates.times(db, sandbox)
    if now - times.ended_at <= rules.retention_s:
        return False
    recovery.mark_lost(db, sandbox, now, f"{times.reason} (its bytes were deleted {_days(rules)} after it had failed)")
    return True


def _ended(db: sqlite3.Connection, sandbox: int, rules: Rules, now: int) -> bool:
    """Let the record of an end go after the retention time without a request of the access point."""
    times = updates.times(db, sandbox)
    if now - times.ended_at <= rules.retention_s or times.forgettable:
        return False
    updates.may_forget(db, sandbox)
    return True


def _days(rules: Rules) -> str:
    return f"{rules.retention_s / 86400:.3g} days"


_WAITING = frozenset({State.CONFIRMED, State.LEASED, State.RETRY_WAIT})


_DEADLINES = {
    State.ACCEPTED: _unconfirmed,
    State.HANDED_OVER: lambda db, sandbox, rules, now: False,
    State.MOVING: lambda db, sandbox, rules, now: False,
    State.FAILED: _failed,
}
