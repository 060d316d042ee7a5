"""Random schedules keep the invariants, and each planted bug of a rule is found.

A bug is one change of a rule. The seed beside it is tried first; ``make rules-sim`` searches for all of them anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from rules_world import World

from stageout.overlay.rules import custody, limits, operations, rights, sender, terminal
from stageout.overlay.rules.states import RESULTS, State
from stageout.overlay.rules.terminal import Step, Verdict

SCHEDULES = 2_000


class Bug(NamedTuple):
    """A name in a module, and what a bug puts in its place. :param seed: that found it last."""

    module: Any
    name: str
    wrong: Callable[[Any], Any]
    seed: int


def _earlier(steps: tuple[str, ...], step: str, before: str) -> tuple[str, ...]:
    rest = [one for one in steps if one != step]
    rest.insert(rest.index(before), step)
    return tuple(rest)


def _expired_first(right: Any) -> Any:
    def judge(identity: Any, fields: Any, hop: Any, known: Any, seen: Any, now: int) -> Verdict:
        if now > fields.expires:
            return Verdict(Step.ANSWER, State.EXPIRED)
        return right(identity, fields, hop, known, seen, now)

    return judge


BUGS = {
    "done is answered before it is durable": Bug(
        terminal, "PUBLISH_STEPS", lambda right: _earlier(right, "answer", "done"), 3),
    "done is answered before the directories are synced": Bug(
        terminal, "PUBLISH_STEPS", lambda right: _earlier(_earlier(right, "done", "fsync"), "answer", "fsync"), 3),
    "a name changes before its INTENT": Bug(
        terminal, "PUBLISH_STEPS", lambda right: _earlier(right, "change", "intent"), 3),
    "a file is published before its bytes are synced": Bug(
        terminal, "PUBLISH_STEPS", lambda right: _earlier(right, "sync", "answer"), 21),
    "custody is answered before its row": Bug(
        custody, "CUSTODY_STEPS", lambda right: _earlier(right, "answer", "row"), 1),
    "custody is answered before its bytes are synced": Bug(
        custody, "CUSTODY_STEPS", lambda right: ("directory", "row", "answer", "sync"), 67),
    "custody without all bytes": Bug(
        custody, "is_whole", lambda right: lambda row: row.manifest is not None, 5),
    "expiry counts before a known result": Bug(terminal, "judge", _expired_first, 3),
    "a cancelled operation does not pass on its edges": Bug(
        terminal, "passes_on", lambda right: lambda row: False, 1369),
    "an operation that never arrived counts as ended": Bug(
        terminal, "has_result", lambda right: lambda known, seq: seq not in known.rows or right(known, seq), 9),
    "a failed dependency does not count": Bug(
        terminal, "dependency_failed", lambda right: lambda known, fields: False, 3),
    "order of an origin is not kept": Bug(
        terminal, "is_superseded", lambda right: lambda identity, hop, marks: right(
            identity._replace(seq=2**62), hop, marks), 9),
    "order of a custodian is not kept": Bug(
        terminal, "is_superseded", lambda right: lambda identity, hop, marks: right(
            identity, hop._replace(custodian=""), marks), 51),
    "other fields are taken for the same operation": Bug(
        terminal, "differs", lambda right: lambda row, fields: None, 254),
    "no new epoch for a restored database": Bug(
        terminal, "needs_new_epoch", lambda right: lambda *_: False, 154),
    "no ask-first": Bug(terminal, "is_older", lambda right: lambda fields, epoch: False, 640),
    "a cancel of an unseen operation is not recorded": Bug(
        terminal, "cancel", lambda right: lambda fields, known, now: (
            right(fields, known, now) if fields.seq in known.rows else Verdict(Step.ANSWER, State.CANCELLED)), 2),
    "a custodian cancels by itself": Bug(
        custody, "cancel", lambda right: lambda row: (
            row if row.state in RESULTS else replace(row, state=State.CANCELLED)), 21),
    "bytes of a failed file are dropped": Bug(
        custody, "may_drop_bytes", lambda right: lambda row, now: row.state in RESULTS, 7),
    "a settled operation drops its bytes": Bug(
        terminal, "SETTLED_BELOW", lambda right: right._replace(state=State.SUPERSEDED), 3),
    "a refusal ends the operation": Bug(
        custody, "on_answer", lambda right: lambda row, state, reason, now: right(
            row, State.FAILED if state is State.REFUSED else state, reason, now), 242),
    "a custodian reports expired without an answer": Bug(
        custody, "give_up", lambda right: lambda row, now: (
            replace(row, state=State.EXPIRED) if now > row.fields.expires else row), 16),
    "a restored custodian keeps no row": Bug(
        custody, "rebuild", lambda right: lambda rows, now: (right(rows, now)[0], []), 12),
    "a restored custodian goes on with its epoch": Bug(
        custody, "rebuild", lambda right: lambda rows, now: (1_000_000, right(rows, now)[1]), 121),
    "prefixes are not compared": Bug(rights, "is_below", lambda right: lambda path, prefix: True, 16),
    "anybody cancels": Bug(rights, "check_action", lambda right: lambda asker, row, action: None, 885),
    "identity has no owner": Bug(rights, "owner_of", lambda right: lambda token, signer: "key:K1", 7),
    "shares have no limit": Bug(limits, "check_share", lambda right: lambda *_: None, 29),
    "recovery believes each INTENT": Bug(terminal, "recovered", lambda right: lambda row, found: State.DONE, 6),
    "recovery believes no INTENT": Bug(terminal, "recovered", lambda right: lambda row, found: State.COMPLETE, 24),
    "a sender frees its bytes at custody": Bug(
        sender, "may_free", lambda right: lambda release, *rest: right("custody", *rest), 8),
    "names below a directory do not count": Bug(
        operations, "touches", lambda right: lambda one, other: not set(one.names).isdisjoint(other.names), 9),
    "a put that a rename overtook counts as replaced": Bug(
        terminal, "is_overtaken", lambda right: lambda *_: False, 121),
    "a custodian delivers without order": Bug(custody, "is_blocked", lambda right: lambda row, rows: False, 19),
    "a batch may have gaps": Bug(operations, "check_batch", lambda right: lambda *_: None, 281),
    "a number that never came counts as reached": Bug(
        sender, "reached", lambda right: lambda rows, first, last, until="done": right(
            {n: rows.get(n, State.DONE) for n in range(first, last + 1)}, first, last, until), 2),
    "half a file counts as durable": Bug(
        sender, "reached", lambda right: lambda rows, first, last, until="done": right(
            {n: State.DONE if s is State.RECEIVING else s for n, s in rows.items()}, first, last, until), 9),
    "a lease does not end": Bug(limits, "lease_ended", lambda right: lambda last_data, now: False, 29),
    "a jump of the clock is believed": Bug(
        limits.Clock, "at", lambda right: lambda clock, wall, monotonic: limits.Clock(
            max(wall, clock.latest), monotonic), 12),
    "tokens do not end": Bug(rights, "check_times", lambda right: lambda token, now: None, 20),
    "anybody tells when an operation was taken": Bug(
        rights, "check_chain", lambda right: lambda *chain: right(
            *chain[:6], chain[6] or chain[5], "A", frozenset("A")), 20),
    "an operation ends with its token": Bug(
        rights, "check_chain", lambda right: lambda *chain: right(*chain[:6]), 1),
    "an unsigned operation needs no right": Bug(rights, "check_bearer", lambda right: lambda *_: None, 21),
    "a custodian needs no entry": Bug(rights, "check_custody", lambda right: lambda *_: None, 3),
    "blocks that were not synced count": Bug(
        custody, "after_power_failure", lambda right: lambda row, stored: row, 38),
    "an old copy of the database comes back twice": Bug(
        terminal, "needs_new_epoch", lambda right: lambda number, high, *_: number < high, 343),
    "low passes operations that have not ended": Bug(
        sender, "low", lambda right: lambda rows: max(rows) + 1, 1),
}  # fmt: skip


def find(bug: Bug, patch: pytest.MonkeyPatch, first: int, schedules: int) -> tuple[int, str]:
    """Return the first seed that finds a bug, and what broke."""
    patch.setattr(bug.module, bug.name, bug.wrong(getattr(bug.module, bug.name)))
    for seed in (bug.seed, *range(first, first + schedules)):
        if seed and (said := World(seed).run()):
            return seed, said
    return 0, ""


def test_no_schedule_breaks_an_invariant() -> None:
    assert {seed: said for seed in range(1, SCHEDULES + 1) if (said := World(seed).run())} == {}


@pytest.mark.parametrize("name", list(BUGS))
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seed, said = find(BUGS[name], monkeypatch, 1, SCHEDULES)
    assert said, "no schedule found it"
    monkeypatch.undo()
    assert World(seed).run() == ""


def main() -> int:
    """Search for each bug over all seeds, and print the first seed that finds it."""
    missed = 0
    for name, bug in BUGS.items():
        with pytest.MonkeyPatch.context() as patch:
            seed, said = find(bug._replace(seed=0), patch, 1, SCHEDULES)
        missed += not seed
        print(f"{seed or 'MISSED':>6}  {name}: {said}", flush=True)
    print(f"rules: {len(BUGS)} bugs, {missed} missed")
    return bool(missed)


if __name__ == "__main__":
    raise SystemExit(main())
