"""After a restart, and when deadlines pass: what the ledger must say so that it stays true."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from sandbox_manager.custody import queries, redirects, updates
from sandbox_manager.custody.redirects import FallbackRules
from sandbox_manager.custody.spool import Spool
from sandbox_manager.rules import Rules
from stageout.core import log
from stageout.core.clock import Clock
from stageout.core.errors import UNREACHABLE, Advice, ErrorClass
from stageout.core.states import FREED, State
from stageout.model.sandbox import SENDABLE, Sandbox, SyncState
from stageout.movers.mover import end_leftovers

_SET_S = 60.0
#: Of the time for which a machine was off, so much counts as age at most.
_DOWN_COUNTS_S = 86_400
_NEEDS_BYTES = frozenset(State) - FREED - {State.OFFERED}


def end_movers(spool: Spool) -> None:
    """No plugin of an earlier manager may still send when this one starts."""
    ended = end_leftovers(spool.root / "movers")
    if ended:
        log.warn("orphan-movers-ended", processes=ended)


def settle_ledger(
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
    for box in updates.ids_in(db, (State.MOVING, State.LEASED)):
        updates.moving_back(db, box)
        updates.set_state(db, box, State.CONFIRMED, now)
        touched.add(box)
    unsynced = []
    for ticket, (box, synced, its_boot) in queries.kept_tickets(db).items():
        if not _is_needed(db, ticket, box):
            continue
        if ticket not in directories:
            _lose(db, box, now, "its directory in the spool is gone")
        elif synced is SyncState.DONE:
            continue
        elif its_boot != boot:
            _lose(db, box, now, "the machine went down before the output was safely on its disk")
        elif synced is SyncState.BEGUN:
            _lose(
                db, box, now, "the manager died while it wrote the output to the disk, and nobody knows how that ended"
            )
        else:
            unsynced.append(ticket)
            continue
        touched.add(box)
    return touched, unsynced


def lose_tickets(db: sqlite3.Connection, lost: Mapping[str, str], now: int) -> Iterable[int]:
    """The disk has lost the data of these tickets. :param lost: why, by ticket. :returns: sandboxes touched."""
    touched = []
    for ticket, reason in lost.items():
        box = queries.sandbox_of(db, ticket)
        if box is not None and _is_needed(db, ticket, box):
            _lose(db, box, now, reason)
            touched.append(box)
    return touched


def record_synced(db: sqlite3.Connection, on_disk: Iterable[str], lost: Mapping[str, str], now: int) -> Iterable[int]:
    """Record that the data of tickets is on the disk, and that the disk has lost the data of others.

    :param lost: why, by ticket. :returns: sandboxes touched.
    """
    updates.mark_synced(db, on_disk)
    return lose_tickets(db, lost, now)


def may_need(box: Sandbox) -> bool:
    """Tell whether bytes of this sandbox may be needed."""
    return box.state in _NEEDS_BYTES and not box.freed


def _is_needed(db: sqlite3.Connection, ticket: str, box: int) -> bool:
    """Tell whether this sandbox still needs the bytes of its ticket."""
    return updates.state_of(db, box) in _NEEDS_BYTES and updates.is_wanted(db, ticket)


def _lose(db: sqlite3.Connection, box: int, now: int, reason: str) -> None:
    log.error("sandbox-lost", sandbox=box, reason=reason)
    updates.end(db, box, State.LOST, now, reason)


def due(boxes: Iterable[Sandbox], busy: Collection[int], rules: Rules, now: int) -> list[int]:
    """Sandboxes whose deadline may have passed and whose files are in no mover."""
    return [box.id for box in boxes if box.id not in busy and may_be_due(box, rules, now)]


def may_be_due(box: Sandbox, rules: Rules, now: int) -> bool:
    """Tell whether this sandbox's deadlines in the ledger can have passed."""
    if box.ended_at:
        return not box.forgettable and now - box.ended_at > rules.retention_s
    waits_s = now - box.due_since
    if box.fallback and box.state in SENDABLE and 0 < rules.retry.fallback_after_s <= waits_s:
        return True
    if box.state in SENDABLE and not (box.attempts or box.paused):
        return False
    if box.state is State.ACCEPTED and not box.reason:
        return waits_s > min(rules.confirm_timeout_s, rules.retention_s)
    return waits_s > min(rules.retention_s, rules.retry.delivery_timeout_s)


def pass_deadlines(
    db: sqlite3.Connection, boxes: Iterable[int], rules: Rules, now: int, fallback: FallbackRules
) -> Iterable[int]:
    """Change those of these sandboxes that have waited long enough. Returns the ones touched."""
    touched = set()
    for box in boxes:
        state = updates.state_of(db, box)
        if state in _WAITING:
            is_changed = _waiting(db, box, rules, now, fallback)
        else:
            is_changed = _DEADLINES.get(state, _ended)(db, box, rules, now)
        if is_changed:
            touched.add(box)
    return touched


def _unconfirmed(db: sqlite3.Connection, box: int, rules: Rules, now: int) -> bool:
    times = updates.times(db, box)
    if now - times.accepted_at > rules.retention_s:
        _lose(db, box, now, f"never confirmed by the access point, deleted after {_days(rules)}")
        return True
    if now - times.accepted_at > rules.confirm_timeout_s and not times.reason:
        updates.set_reason(db, box, f"not confirmed by the access point within {rules.confirm_timeout_s:.0f} s")
        return True
    return False


def _waiting(db: sqlite3.Connection, box: int, rules: Rules, now: int, fallback: FallbackRules) -> bool:
    """Give up files that were tried, or paused, for too long. Files whose turn has not come go on waiting."""
    known = queries.sandbox(db, box)
    if known is not None and redirects.use_if_due(db, known, fallback, now):
        return True
    times = updates.times(db, box)
    limit_s = rules.retention_s if times.paused else rules.retry.delivery_timeout_s + rules.retry.max_delay_s
    if times.error_code and ErrorClass.from_code(times.error_code).advice is Advice.NEEDS_CREDENTIAL:
        limit_s = max(limit_s, rules.retry.credential_timeout_s + rules.retry.max_delay_s)
    if now - max(times.accepted_at, times.retried_at) <= limit_s:
        return False
    given_up = updates.fail_waiting(db, box) if times.paused else updates.fail_tried(db, box, UNREACHABLE)
    if not given_up:
        return False
    if updates.has_waiting(db, box):
        updates.touch(db, box)
        return True
    gave_up = f"(gave up after {limit_s / 3600:.3g} hours)"
    reason = f"{times.reason or 'paused'} {gave_up}"
    if known is not None and not times.paused:
        why = redirects.destination_failure(db, known, fallback.reason_away)
        if why and redirects.use(db, known, f"{why} {gave_up}", fallback.find_plugin, now):
            return True
        reason = redirects.failure_reason(queries.sandbox(db, box) or known, queries.first_error(db, box), reason)
    updates.end(db, box, State.FAILED, now, reason, times.error_code)
    return True


def _failed(db: sqlite3.Connection, box: int, rules: Rules, now: int) -> bool:
    times = updates.times(db, box)
    if now - times.ended_at <= rules.retention_s:
        return False
    _lose(db, box, now, f"{times.reason} (its bytes were deleted {_days(rules)} after it had failed)")
    return True


def _ended(db: sqlite3.Connection, box: int, rules: Rules, now: int) -> bool:
    """The record of an end goes when the access point has not asked for it any more for so long."""
    times = updates.times(db, box)
    if now - times.ended_at <= rules.retention_s or times.forgettable:
        return False
    updates.may_forget(db, box)
    return True


def _days(rules: Rules) -> str:
    return f"{rules.retention_s / 86400:.3g} days"


_WAITING = frozenset({State.CONFIRMED, State.LEASED, State.RETRY_WAIT})
_DEADLINES = {
    State.ACCEPTED: _unconfirmed,
    State.HANDED_OVER: lambda db, box, rules, now: False,
    State.MOVING: lambda db, box, rules, now: False,
    State.FAILED: _failed,
}


@dataclass(frozen=True)
class ClockSeen:
    """Both clocks of the machine at one moment, as the ledger keeps them for the next start.

    :param boot: id of the kernel's boot: within one the monotonic clock goes on. :param ahead_s: of the wall clock
        before that one. :param wall: wall clock, seconds.
    """

    boot: str
    ahead_s: int
    wall: int

    def __str__(self) -> str:
        return f"{self.boot or '-'} {self.ahead_s} {self.wall}"

    def jump_s(self, now: ClockSeen) -> int:
        """By how much the wall clock was set between this and ``now``; negative: back. 0 for a minute.

        Over a start of the machine nobody knows. Back is certain; of time that passed a day is believed: what is kept
        for its owner for a week was kept while somebody could have asked for it.
        """
        if self.boot == now.boot and self.boot not in ("", "-"):
            by_s = now.ahead_s - self.ahead_s
        else:
            passed_s = now.wall - self.wall
            by_s = min(passed_s, max(0, passed_s - _DOWN_COUNTS_S))
        return by_s if abs(by_s) > _SET_S else 0


def read_clock(text: str) -> ClockSeen | None:
    """Return the content that a ledger has kept; None when it has kept nothing."""
    words = text.split(" ")
    try:
        return ClockSeen(words[0], int(words[1]), int(words[2]))
    except (IndexError, ValueError):
        return None


class WallWatch:
    """Notices that the wall clock, by which waits and ages are kept over restarts, was set.

    :param boot: id of the kernel's boot.
    """

    def __init__(self, clock: Clock, boot: str = "") -> None:
        self._clock, self._boot = clock, boot
        self._offset_s = clock.wall_s() - clock.monotonic_s()

    @property
    def seen(self) -> ClockSeen:
        """For the next start: what ages are counted by."""
        return self.seen_after(0)

    def seen_after(self, jump_s: int) -> ClockSeen:
        """The same once that jump is :meth:`handled`."""
        return ClockSeen(self._boot, round(self._offset_s) + jump_s, int(self._clock.wall_s()))

    def since(self, before: ClockSeen) -> None:
        """Count from what an earlier start has seen: :meth:`jump_s` is then also what the clock was set by since."""
        self._offset_s = self._clock.wall_s() - self._clock.monotonic_s()
        self._offset_s -= before.jump_s(self.seen)

    def jump_s(self) -> int:
        """By so much since the last call, or the last jump that was :meth:`handled`; negative: back. 0 for a minute."""
        by_s = self._clock.wall_s() - self._clock.monotonic_s() - self._offset_s
        if abs(by_s) > _SET_S:
            return int(by_s)
        self._offset_s += by_s
        return 0

    def handled(self, jump_s: int) -> None:
        """Record that the kept times were changed for that jump, and are on the disk."""
        self._offset_s += jump_s
