"""Random schedules keep the invariants, and each planted bug of a rule is found.

A bug is one change of a rule. The seed beside it is tried first; ``make rules-sim`` searches for all of them anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from rules_world import World

from stageout.overlay.rules import custody, limits, rights, sender, terminal
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
        terminal, "PUBLISH_STEPS", lambda right: _earlier(right, "answer", "done"), 2),
    "done is answered before the directories are synced": Bug(
        terminal, "PUBLISH_STEPS", lambda right: _earlier(_earlier(right, "done", "fsync"), "answer", "fsync"), 2),
    "a name changes before its INTENT": Bug(
        terminal, "PUBLISH_STEPS", lambda right: _earlier(right, "change", "intent"), 2),
    "a file is published before its bytes are synced": Bug(
        terminal, "PUBLISH_STEPS", lambda right: _earlier(right, "sync", "answer"), 7),
    "custody is answered before its row": Bug(
        custody, "CUSTODY_STEPS", lambda right: _earlier(right, "answer", "row"), 1),
    "custody is answered before its bytes are synced": Bug(
        custody, "CUSTODY_STEPS", lambda right: ("directory", "row", "answer", "sync"), 30),
    "custody without all bytes": Bug(
        custody, "is_whole", lambda right: lambda row: row.manifest is not None, 6),
    "expiry counts before a known result": Bug(terminal, "judge", _expired_first, 2),
    "a cancelled operation does not pass on its edges": Bug(
        terminal, "has_ended", lambda right: lambda known, seq: (
            seq < known.low or (seq in known.rows and known.rows[seq].state in RESULTS)), 1298),
    "an operation that never arrived counts as ended": Bug(
        terminal, "has_ended", lambda right: lambda known, seq: seq not in known.rows or right(known, seq), 14),
    "a failed dependency does not count": Bug(
        terminal, "dependency_failed", lambda right: lambda known, fields: False, 9),
    "order of an origin is not kept": Bug(
        terminal, "is_superseded", lambda right: lambda identity, hop, marks: right(
            identity._replace(seq=2**62), hop, marks), 63),
    "order of a custodian is not kept": Bug(
        terminal, "is_superseded", lambda right: lambda identity, hop, marks: right(
            identity, hop._replace(custodian=""), marks), 28),
    "marks are forgotten below low": Bug(
        terminal, "may_forget", lambda right: lambda row, low, now: (
            row.identity.seq < low or right(row, low, now)), 1164),
    "other fields are taken for the same operation": Bug(
        terminal, "differs", lambda right: lambda row, fields: None, 781),
    "no new epoch for a restored database": Bug(
        terminal, "needs_new_epoch", lambda right: lambda number, high: False, 7),
    "no ask-first": Bug(terminal, "is_older", lambda right: lambda fields, epoch: False, 7),
    "a cancel of an unseen operation is not recorded": Bug(
        terminal, "cancel", lambda right: lambda fields, known, now: (
            right(fields, known, now) if fields.seq in known.rows else Verdict(Step.ANSWER, State.CANCELLED)), 2),
    "a custodian cancels by itself": Bug(
        custody, "cancel", lambda right: lambda row: (
            row if row.state in RESULTS else replace(row, state=State.CANCELLED)), 76),
    "bytes of a failed file are dropped": Bug(
        custody, "may_drop_bytes", lambda right: lambda row, now: row.state in RESULTS, 21),
    "a settled operation drops its bytes": Bug(
        terminal, "SETTLED_BELOW", lambda right: right._replace(state=State.SUPERSEDED), 1176),
    "a refusal ends the operation": Bug(
        custody, "on_answer", lambda right: lambda row, state, reason, now: right(
            row, State.FAILED if state is State.REFUSED else state, reason, now), 260),
    "a custodian reports expired without an answer": Bug(
        custody, "give_up", lambda right: lambda row, now: (
            replace(row, state=State.EXPIRED) if now > row.fields.expires else row), 142),
    "a restored custodian keeps no row": Bug(
        custody, "rebuild", lambda right: lambda rows, now: (right(rows, now)[0], []), 1),
    "a restored custodian goes on with its epoch": Bug(
        custody, "rebuild", lambda right: lambda rows, now: (1_000_000, right(rows, now)[1]), 141),
    "prefixes are not compared": Bug(rights, "is_below", lambda right: lambda path, prefix: True, 539),
    "anybody cancels": Bug(rights, "check_action", lambda right: lambda asker, row, action: None, 45),
    "identity has no owner": Bug(rights, "owner_of", lambda right: lambda token, signer: "key:K1", 3),
    "shares have no limit": Bug(limits, "check_share", lambda right: lambda *_: None, 14),
    "recovery believes each INTENT": Bug(terminal, "recovered", lambda right: lambda row, found: State.DONE, 33),
    "recovery believes no INTENT": Bug(terminal, "recovered", lambda right: lambda row, found: State.COMPLETE, 7),
    "a sender frees its bytes at custody": Bug(
        sender, "may_free", lambda right: lambda release, *rest: right("custody", *rest), 39),
    "low passes operations that have not ended": Bug(
        sender, "low", lambda right: lambda rows: max(rows) + 1, 2),
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
