"""Decisions of the schedd agent: a table of situations, and what must hold in every one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from schedd_agent.model import (
    ClearRequest,
    Complete,
    Dag,
    Deliver,
    Effect,
    Elder,
    Hold,
    Job,
    Keep,
    LetGo,
    Limits,
    Note,
    Past,
    Record,
    Remove,
    Rerun,
    Seen,
    Send,
    Show,
    Shown,
    Situation,
    Status,
    Ticket,
    Told,
)
from schedd_agent.tracker import decide
from stageout.core.errors import ErrorClass
from stageout.core.states import FREED, State
from stageout.wire.custody import Action, FileReport, SandboxReport

NAME = "ap#7.0#1700000000"
LIMITS = Limits()


def ticket(name: str = "t1", manager: str = "m1", files: int = 2) -> Ticket:
    return Ticket(name, manager, "", files, 10)


def box(state: State, run: int = 1, tickets: tuple[str, ...] = ("t1",), **more: Any) -> SandboxReport:
    done = state in (State.DELIVERED, State.RELEASED)
    rows = (FileReport("a", "x://y/a", 10, state.value, verified="size"),)
    facts: dict[str, Any] = {
        "reason": "why", "error_code": 0, "files_total": 2, "files_left": 0 if done else 2, "bytes_total": 10,
        "bytes_left": 0 if done else 10, "attempts": 1, "attempts_limit": 0, "next_attempt_at": 0, "accepted_at": 0,
        "files": rows,
    }  # fmt: skip
    return SandboxReport(NAME, run, "alice", state.value, 1, tickets=tickets, **{**facts, **more})


def seen(state: State, run: int = 1, tickets: tuple[str, ...] = ("t1",), manager: str = "m1", **more: Any) -> Seen:
    return Seen(manager, "", box(state, run, tickets, **more))


def job(status: int = Status.COMPLETED, run: int = 1, **more: Any) -> Job:
    return Job(NAME, 7, 0, status, run, **{"handed_off": 2, "completions": 1, **more})


def held(**more: Any) -> Job:
    return job(Status.HELD, **{"hold_code": 12, "hold_subcode": 20072, **more})


def situation(of: Job | None, *found: Seen, record: Record | None = None, **more: Any) -> Situation:
    if record is None and of is not None and "record_missing" not in more:
        record = Record((ticket(),))
    more.pop("record_missing", None)
    return Situation(NAME, of, record=record, seen=found, **{"wall_s": 1000.0, **more})


def confirm(run: int = 1, tickets: tuple[str, ...] = ("t1",), files: int = 2, manager: str = "m1") -> Send:
    return Send(manager, Action.CONFIRM, run, tickets, files)


def send(action: Action, run: int = 1) -> Send:
    return Send("m1", action, run)


def kinds(effects: list[Effect]) -> list[str]:
    return [effect.action.value if isinstance(effect, Send) else type(effect).__name__ for effect in effects]


DONE = frozenset({("m1", Action.CONFIRM, 1)})

TABLE: list[tuple[str, Situation, list[str]]] = [
    ("completed, manager not heard of", situation(job()), ["confirm", "Show"]),
    ("completed, accepted", situation(job(), seen(State.ACCEPTED)), ["confirm", "Show"]),
    ("completed, confirmed before", situation(job(), seen(State.ACCEPTED), done=DONE), ["Show"]),
    ("moving", situation(job(), seen(State.MOVING)), ["Show"]),
    ("moving, edited just now", situation(job(), seen(State.MOVING), edited_s_ago=1.0), []),
    ("delivered", situation(job(), seen(State.DELIVERED)), ["Deliver"]),
    ("delivered, released", situation(job(), seen(State.RELEASED)), ["Deliver"]),
    ("delivered and written", situation(job(shown=Shown("Delivered", 1)), seen(State.DELIVERED)), ["forget"]),
    ("delivered and forgotten", situation(job(shown=Shown("Delivered", 1))), []),
    ("an older run's delivery written", situation(job(run=2, shown=Shown("Delivered", 1))), ["confirm", "Show"]),
    ("failed", situation(job(), seen(State.FAILED)), ["Hold", "Told"]),
    (
        "failed, held, not told",
        situation(held(shown=Shown("Failed", 1), untold=1), seen(State.FAILED)),
        ["Hold", "Told"],
    ),
    (
        "failed, held, a crash before condor_hold was undone",
        situation(held(shown=Shown("Failed", 1), untold=1, hold_code=1), seen(State.FAILED)),
        ["Hold", "Told"],
    ),
    ("failed, retry asked", situation(job(request="retry"), seen(State.FAILED)), ["retry", "Show"]),
    ("failed, held", situation(held(), seen(State.FAILED)), ["Show"]),
    ("held, retry asked", situation(held(request="retry"), seen(State.FAILED)), ["retry", "Show"]),
    (
        "held as failed, tried again, edited just now",
        situation(held(shown=Shown("Failed", 1)), seen(State.MOVING), edited_s_ago=1.0),
        ["Show"],
    ),
    (
        "held, retry acknowledged",
        situation(held(request="retry"), seen(State.MOVING), done=frozenset({("m1", Action.RETRY, 1)})),
        ["ClearRequest", "Show"],
    ),
    ("held, delivered", situation(held(), seen(State.DELIVERED)), ["Complete", "Deliver"]),
    ("held, given up", situation(held(), seen(State.CANCELLED)), ["Complete", "Show", "LetGo"]),
    ("released, idle", situation(job(Status.IDLE), seen(State.FAILED)), ["supersede"]),
    (
        "released, shown",
        situation(job(Status.IDLE, shown=Shown("Failed", 1)), seen(State.FAILED)),
        ["supersede", "Show"],
    ),
    ("runs again", situation(job(Status.RUNNING, run=2), seen(State.FAILED)), ["supersede"]),
    ("runs, hands off", situation(job(Status.RUNNING), seen(State.ACCEPTED)), []),
    ("runs again long since", situation(job(Status.RUNNING, run=2), seen(State.ACCEPTED)), ["supersede"]),
    (
        "AP restarted, run perhaps goes on",
        situation(job(Status.RUNNING, run=2, shadow_since=990), seen(State.ACCEPTED)),
        [],
    ),
    (
        "AP restarted, run goes on",
        situation(job(Status.RUNNING, run=2, reconnects=1), seen(State.ACCEPTED)),
        [],
    ),
    ("AP restarted, run ended", situation(job(run=2, reconnects=1), seen(State.ACCEPTED)), ["confirm", "Show"]),
    ("lost", situation(job(), seen(State.LOST)), ["Rerun"]),
    ("lost too often", situation(job(reruns=2), seen(State.LOST)), ["Hold", "Told"]),
    (
        "lost while its owner waits for a retry",
        situation(
            job(Status.HELD, hold_code=12, hold_subcode=20001, request="retry"), absent_s={"m1": 7200.0}, done=DONE
        ),
        ["Show", "ClearRequest"],
    ),
    ("silent for a while", situation(job(), absent_s={"m1": 7199.0}, done=DONE), ["Show"]),
    ("silent for too long", situation(job(), absent_s={"m1": 7200.0}, done=DONE), ["Rerun"]),
    ("given up, silent for a while", situation(job(request="cancel"), absent_s={"m1": 7199.0}, done=DONE), ["Show"]),
    (
        "given up, silent for too long",
        situation(job(request="cancel"), absent_s={"m1": 7200.0}, done=DONE),
        ["Show", "LetGo"],
    ),
    ("given up, lost", situation(job(request="cancel"), seen(State.LOST)), ["cancel", "Show", "LetGo"]),
    ("superseded by mistake", situation(job(), seen(State.SUPERSEDED)), ["Rerun"]),
    ("removed", situation(job(Status.REMOVED), seen(State.MOVING)), ["cancel"]),
    ("gone, unknown", situation(None, seen(State.MOVING)), []),
    ("gone, removed", situation(None, seen(State.MOVING), past=Past(3, 1)), ["cancel"]),
    ("gone, removed, freed", situation(None, seen(State.CANCELLED), past=Past(3, 1)), ["forget"]),
    (
        "gone, completed",
        situation(None, seen(State.ACCEPTED), past=Past(4, 1), record=Record((ticket(),))),
        ["confirm"],
    ),
    (
        "gone, given up while its manager was away",
        situation(None, seen(State.MOVING), past=Past(4, 1, given_up=True), record=Record((ticket(),))),
        ["cancel"],
    ),
    ("gone, completed, moving", situation(None, seen(State.MOVING), past=Past(4, 1), record=Record((ticket(),))), []),
    (
        "gone, completed with a newer run",
        situation(None, seen(State.ACCEPTED), past=Past(4, 2), record=Record((ticket("t2"),))),
        ["supersede"],
    ),
    (
        "gone, completed, AP restarted: its own output has a lower number",
        situation(None, seen(State.ACCEPTED), past=Past(4, 2), record=Record((ticket(),))),
        ["confirm"],
    ),
    ("gone, completed, no record", situation(None, seen(State.ACCEPTED), past=Past(4, 1)), []),
    ("no record yet", situation(job(), seen(State.ACCEPTED), record_missing=True), []),
    ("no record for long", situation(job(), seen(State.ACCEPTED), record_missing=True, waited_s=61.0), ["Show"]),
    (
        "no record, owner insists",
        situation(job(request="retry"), seen(State.ACCEPTED), record_missing=True),
        ["retry", "confirm", "Show"],
    ),
    (
        "no record, and nothing reported for a lease",
        situation(job(), seen(State.SUPERSEDED), record_missing=True, waited_s=7200.0),
        ["Rerun"],
    ),
    (
        "no record for a lease, but output is there",
        situation(job(), seen(State.ACCEPTED), record_missing=True, waited_s=7200.0),
        ["Show"],
    ),
    (
        "no record yet, and an older run elsewhere: which of them counts is not known",
        situation(job(run=2), seen(State.ACCEPTED), record_missing=True, elders={Elder("m1", 1): 5.0}),
        [],
    ),
    (
        "a manager knows the run that counts by the number that it had before its shadow reconnected",
        situation(job(run=4, reconnects=1), seen(State.ACCEPTED), elders={Elder("m1", 3): 5.0}),
        ["confirm", "Show"],
    ),
    ("record rotated away", situation(job(), seen(State.DELIVERED), record_missing=True), []),
    (
        "no record, its owner insisted, delivered",
        situation(job(shown=Shown("Moving", 1, manager="m1")), seen(State.DELIVERED), record_missing=True),
        ["Deliver"],
    ),
    (
        "no record, its owner insisted, delivered by another",
        situation(job(shown=Shown("Moving", 1, manager="m2")), seen(State.DELIVERED), record_missing=True),
        [],
    ),
    (
        "no record, its owner insists, its managers are not shown yet",
        situation(
            job(request="retry", shown=Shown(keys="k")),
            seen(State.CONFIRMED),
            record_missing=True,
            done=DONE | {("m1", Action.RETRY, 1)},
        ),
        ["Show"],
    ),
    (
        "no record, its owner insisted, its managers are shown",
        situation(
            job(request="retry", shown=Shown("Confirmed", 1, manager="m1")),
            seen(State.CONFIRMED),
            record_missing=True,
            done=DONE | {("m1", Action.RETRY, 1)},
        ),
        ["ClearRequest", "Show"],
    ),
    ("record rotated away while moving", situation(job(), seen(State.MOVING), record_missing=True), ["Show"]),
    (
        "AP without records",
        situation(job(), seen(State.ACCEPTED), record_missing=True, records_written=False),
        ["confirm", "Show"],
    ),
    (
        "AP without records, not all reported",
        situation(job(handed_off=3), seen(State.ACCEPTED), record_missing=True, records_written=False),
        [],
    ),
    (
        "AP without records, nothing for too long",
        situation(job(), record_missing=True, records_written=False, waited_s=7200.0),
        ["Rerun"],
    ),
    (
        "a hand-off that no record names",
        situation(job(), seen(State.ACCEPTED, tickets=("t9",))),
        ["confirm", "Show"],
    ),
    (
        "an older run is still there",
        situation(job(run=2), seen(State.MOVING), record=Record((ticket("t2"),))),
        ["supersede", "Show"],
    ),
    (
        "an older run at a manager that is silent",
        situation(job(run=2), elders={Elder("m2", 1): 7199.0}),
        ["supersede", "Show"],
    ),
    (
        "an older run, superseded",
        situation(job(run=2), elders={Elder("m2", 1): 5.0}, done=frozenset({("m2", Action.SUPERSEDE, 1)})),
        ["confirm", "Show"],
    ),
    (
        "an older run that its manager calls lost",
        situation(job(run=2), seen(State.LOST, tickets=("t0",), manager="m2"), elders={Elder("m2", 1): 5.0}),
        ["forget", "confirm", "Show"],
    ),
    (
        "an older run at a manager whose lease has ended",
        situation(job(run=2), elders={Elder("m2", 1): 7200.0}),
        ["confirm", "Show"],
    ),
    ("nothing handed off in the end", situation(job(handed_off=0), seen(State.ACCEPTED), record=Record()), ["confirm"]),
    ("node, failed", situation(job(dag=5), seen(State.FAILED)), ["Show"]),
    ("node, lost", situation(job(dag=5), seen(State.LOST)), ["Show"]),
    (
        "node, lost, its DAG ended",
        situation(job(dag=5, shown=Shown("Lost", 1)), seen(State.LOST), dag=Dag.ENDED),
        ["Show", "LetGo"],
    ),
    ("node, its DAG removed", situation(job(dag=5), seen(State.MOVING), dag=Dag.REMOVED), ["Remove"]),
    (
        "node that DAGMan removed with its DAG",
        situation(job(dag=5, is_kept=True), seen(State.MOVING), dag=Dag.REMOVED),
        ["cancel", "Show", "LetGo"],
    ),
    (
        "node that DAGMan removed, moving",
        situation(job(dag=5, is_kept=True), seen(State.MOVING), dag=Dag.ENDED),
        ["Show"],
    ),
    (
        "node that DAGMan removed, failed",
        situation(job(dag=5, is_kept=True), seen(State.FAILED), dag=Dag.ENDED),
        ["Show"],
    ),
    ("node, delivered, DAG removed", situation(job(dag=5, shown=Shown("Delivered", 1)), dag=Dag.REMOVED), []),
    ("given up", situation(job(), seen(State.CANCELLED)), ["Show", "LetGo"]),
    ("giving up", situation(job(request="cancel"), seen(State.ACCEPTED)), ["cancel", "Show"]),
    ("asks for nonsense", situation(job(request="fly"), seen(State.MOVING)), ["ClearRequest", "Show"]),
    ("asks while it runs", situation(job(Status.RUNNING, request="retry")), ["ClearRequest"]),
    (
        "held by its exit policy",
        situation(job(Status.HELD, held_at_exit=True), seen(State.ACCEPTED)),
        ["confirm", "Show"],
    ),
    ("held by its exit policy, failed", situation(job(Status.HELD, held_at_exit=True), seen(State.FAILED)), ["Show"]),
    ("held by its owner", situation(job(Status.HELD, hold_code=1), seen(State.ACCEPTED)), ["supersede"]),
    (
        "held by its owner, the run is not over",
        situation(job(Status.HELD, hold_code=1, has_shadow=True), seen(State.ACCEPTED)),
        [],
    ),
    (
        "held by its owner just when its run had ended",
        situation(job(Status.HELD, hold_code=1, has_ended=True), seen(State.ACCEPTED)),
        [],
    ),
    ("held by its policy, perhaps at its exit", situation(job(Status.HELD, hold_code=3), seen(State.ACCEPTED)), []),
    (
        "held because HTCondor itself could not send the output",
        situation(job(Status.HELD, hold_code=12, hold_subcode=2), seen(State.ACCEPTED)),
        ["supersede"],
    ),
    (
        "AP restarted, held by its owner before the run is seen to go on",
        situation(job(Status.HELD, run=2, hold_code=1, has_shadow=True), seen(State.ACCEPTED)),
        [],
    ),
    (
        "put back to Idle by its exit policy",
        situation(job(Status.IDLE), seen(State.ACCEPTED)),
        ["supersede", "Show"],
    ),
    ("put back to Idle by a vacation", situation(job(Status.IDLE, completions=0), seen(State.ACCEPTED)), ["supersede"]),
    (
        "put back to Idle by a crash of the schedd after its end",
        situation(job(Status.IDLE, completions=0, has_ended=True), seen(State.ACCEPTED)),
        [],
    ),
    (
        "an older run beside",
        situation(job(run=2), seen(State.MOVING, 2), seen(State.MOVING, 1, ("t0",))),
        ["supersede", "Show"],
    ),
    (
        "the last shadow only said that the job is done, the last hand-off is not reported yet",
        situation(job(run=2), seen(State.ACCEPTED, tickets=("t0",)), counts=1),
        ["confirm", "Show"],
    ),
    (
        "the last shadow only said that the job is done, an older run is reported",
        situation(job(run=3), seen(State.ACCEPTED, tickets=("t0",)), counts=2),
        ["supersede", "Show"],
    ),
    (
        "gone, the last shadow only said that the job is done, the last hand-off is not reported yet",
        situation(None, seen(State.ACCEPTED, tickets=("t0",)), past=Past(4, 2), record=Record((ticket(),)), counts=1),
        ["confirm"],
    ),
]


@pytest.mark.parametrize(("what", "s", "expected"), TABLE, ids=[row[0] for row in TABLE])
def test_table(what: str, s: Situation, expected: list[str]) -> None:
    assert kinds(decide(s, LIMITS)) == expected


def test_a_confirmation_names_tickets_and_files_of_the_record() -> None:
    record = Record((ticket("t1"), ticket("t2", files=3), ticket("t3", "m2", 1)))
    effects = decide(situation(job(priority=4), record=record), LIMITS)
    assert effects[:2] == [
        Send("m1", Action.CONFIRM, 1, ("t1", "t2"), 5, 4),
        Send("m2", Action.CONFIRM, 1, ("t3",), 1, 4),
    ]


@pytest.mark.parametrize("gone", [False, True])
def test_a_confirmation_names_hand_offs_that_are_not_reported_yet(gone: bool) -> None:
    """The manager drops what a confirmation does not name."""
    s = situation(None if gone else job(), seen(State.ACCEPTED), past=Past(4, 1) if gone else None,
                  record=Record((ticket(), ticket("t2"))))  # fmt: skip
    assert confirm(1, ("t1", "t2"), 4) in decide(s, LIMITS)


def test_a_run_that_went_on_over_a_restart_is_confirmed_under_the_managers_number() -> None:
    effects = decide(situation(job(run=3, reconnects=1), seen(State.ACCEPTED, 2)), LIMITS)
    assert effects[0] == confirm(run=2)


def test_a_hand_off_whose_receipt_got_lost_is_dropped() -> None:
    elsewhere = Record((ticket("t1", "m2"),))
    effects = decide(situation(job(), seen(State.ACCEPTED, tickets=("t9",)), record=elsewhere), LIMITS)
    assert effects[0] == confirm(tickets=(), files=0)
    same = decide(situation(job(), seen(State.ACCEPTED, tickets=("t9",))), LIMITS)
    assert same[0] == confirm(), "its own sandbox, of which the manager has not reported everything yet"


def test_a_hold_speaks_in_the_plugins_words() -> None:
    effect, _ = decide(situation(job(), seen(State.FAILED, reason="quota exceeded", error_code=72)), LIMITS)
    assert isinstance(effect, Hold)
    advice = "when there is room, `stageout retry` sends it again, `condor_release` runs the job again"
    assert (effect.subcode, effect.reason) == (20072, f"Stage-out failed: quota exceeded; {advice}")
    assert effect.shown.reason == f"quota exceeded; {advice}"
    assert effect.shown.state == "Failed"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (ErrorClass.NAME_NOT_RESOLVED, "for another one set OutputDestination with `condor_qedit`"),
        (ErrorClass.PERMISSION_DENIED, "when you may write there, `stageout retry`"),
        (ErrorClass.CREDENTIAL_EXPIRED, "when the credential is renewed"),
        (ErrorClass.UNKNOWN, "why; `stageout retry` sends it again"),
    ],
)
def test_a_hold_says_what_a_retry_needs(kind: ErrorClass, words: str) -> None:
    effect, _ = decide(situation(job(), seen(State.FAILED, error_code=kind.code)), LIMITS)
    assert isinstance(effect, Hold)
    assert words in effect.reason and effect.reason.endswith("`condor_release` runs the job again")


def test_the_reason_of_a_hold_is_one_line_of_bounded_length() -> None:
    """It becomes an event in the job's log, and an argument of a command."""
    words = "no\n...\n005 (007.000.000) Job terminated.\0" + "x" * 1_000_000
    hold, told = decide(situation(job(), seen(State.FAILED, reason=words)), LIMITS)
    assert isinstance(hold, Hold)
    assert isinstance(told, Told)
    assert hold.reason == told.reason
    assert hold.reason.startswith("Stage-out failed: no ... 005 (007.000.000) Job terminated. xxx")
    assert len(hold.reason) == 2000


def test_a_completed_job_is_kept_while_its_output_is_on_its_way() -> None:
    limits = replace(LIMITS, leave_s=1000.0)

    def kept(state: State, age_s: float, **more: Any) -> list[int]:
        effects = decide(situation(job(entered_at=1000 - int(age_s), **more), seen(state)), limits)
        return [effect.until for effect in effects if isinstance(effect, Keep)]

    assert kept(State.MOVING, 400) == []
    assert kept(State.MOVING, 600) == [2000]
    assert kept(State.MOVING, 5000, kept_until=1600) == []
    assert kept(State.MOVING, 5000, kept_until=1400) == [2000]
    assert kept(State.FAILED, 5000, dag=5, shown=Shown("Failed", 1)) == []
    assert kept(State.MOVING, 5000, status=Status.HELD, hold_code=12, hold_subcode=20072) == []


@pytest.mark.parametrize(("status", "run"), [(Status.IDLE, 0), (Status.RUNNING, 1), (Status.TRANSFERRING, 1)])
def test_a_restored_queue_that_uses_a_number_again_wants_no_old_output(status: int, run: int) -> None:
    waiting = seen(State.RETRY_WAIT)
    effects = decide(situation(job(status, run=run), waiting), LIMITS)
    assert Send("m1", Action.SUPERSEDE, 1) in effects
    only_accepted = decide(situation(job(status, run=run), seen(State.ACCEPTED)), LIMITS)
    assert not [one for one in only_accepted if isinstance(one, Send)], "the queue was read before it ended"


def test_handed_over_output_that_failed_is_not_offered_for_a_retry() -> None:
    failed = seen(State.FAILED, reason="conflict", custody=("router.example.org:9621 0 1-2 5000",))
    effect, _ = decide(situation(job(), failed), LIMITS)
    assert isinstance(effect, Hold)
    assert "`condor_release` runs the job again" in effect.shown.reason
    assert effect.shown.state == "Failed"


def test_what_routers_have_stands_in_the_jobs_ad_until_its_end() -> None:
    held = {"custody": ("router:9621 0 1-2 5000",), "holdings": ("router:9621 2 10 900",)}
    (effect,) = decide(situation(job(), seen(State.HANDED_OVER, **held)), LIMITS)
    assert isinstance(effect, Show)
    assert effect.shown.custody == "router:9621 2 10 900"
    hostile = ("x" * 10**6 + " 2 10 900", "router\0:1 2 10 900", "no holding", *(f"r{n}:1 1 1 1" for n in range(10**3)))
    (effect,) = decide(situation(job(), seen(State.HANDED_OVER, holdings=hostile)), LIMITS)
    assert isinstance(effect, Show)
    assert effect.shown.custody == "; ".join(f"r{n}:1 1 1 1" for n in range(8))
    (effect,) = decide(situation(job(entered_at=900), seen(State.DELIVERED, **held)), LIMITS)
    assert isinstance(effect, Deliver)
    assert effect.shown.custody == ""


def test_delivery_says_what_was_verified() -> None:
    (effect,) = decide(situation(job(entered_at=900), seen(State.DELIVERED)), LIMITS)
    assert isinstance(effect, Deliver)
    assert effect.stats == {"Bytes": 10, "Files": 2, "Seconds": 100, "Attempts": 1, "VerifiedBy": "size"}
    assert (effect.shown.state, effect.shown.run, effect.shown.files_left) == ("Delivered", 1, 0)


def test_two_managers_are_delivered_only_together() -> None:
    record = Record((ticket("t1"), ticket("t2", "m2")))
    half = [seen(State.DELIVERED), seen(State.MOVING, tickets=("t2",), manager="m2")]
    assert kinds(decide(situation(job(), *half, record=record), LIMITS)) == ["Show"]
    both = [seen(State.DELIVERED), seen(State.DELIVERED, tickets=("t2",), manager="m2")]
    (effect,) = decide(situation(job(), *both, record=record), LIMITS)
    assert isinstance(effect, Deliver)
    assert effect.stats["Files"] == 4


def test_progress_shows_the_figures() -> None:
    waiting = seen(State.RETRY_WAIT, reason="busy", attempts=3, next_attempt_at=1234)
    (effect,) = decide(situation(job(), waiting), LIMITS)
    reason = "busy; attempt 3, next at 1970-01-01T00:20:34Z; 2 files, 10 bytes left"
    assert effect == Show(Shown("RetryWait", 1, reason, 10, 2, 3, 1234, "m1"))


def test_figures_alone_do_not_change_the_reason() -> None:
    (first,) = decide(situation(job(), seen(State.MOVING, reason="")), LIMITS)
    assert isinstance(first, Show)
    assert first.shown.reason == "being transferred; 2 files, 10 bytes left"
    less = seen(State.MOVING, reason="", files_left=1, bytes_left=4)
    (second,) = decide(situation(job(shown=first.shown), less), LIMITS)
    assert second == Show(replace(first.shown, files_left=1, bytes_left=4))


# ---- properties ---------------------------------------------------------------------------------------------------

_SITUATIONS = 5000
_TICKETS = ("t1", "t2", "t3")
_MANAGERS = ("m1", "m2")
_PLACES = [(manager, run) for manager in _MANAGERS for run in (1, 2, 3)]
_ORDERS = [(manager, action, run) for manager, run in _PLACES for action in Action]
_STATES, _STATUSES = list(State), list(Status)


def _some_job(random: Random) -> Job:
    choice = random.choice
    status, dag = choice(_STATUSES), choice((0, 5))
    return job(
        status, random.randint(1, 3), dag=dag, is_kept=bool(dag and status == Status.COMPLETED and choice((0, 1))),
        handed_off=choice((0, 2, 4)), hold_code=choice((1, 3, 12)), hold_subcode=choice((0, 20072)),
        held_at_exit=choice((False, True)), request=choice(("", "retry", "cancel", "pause", "resume", "?")),
        has_ended=choice((False, True)), has_shadow=choice((False, True)), reruns=random.randint(0, 3),
        reconnects=choice((0, 1)), shown=Shown(choice(("None", *_STATES)), random.randint(0, 3)),
        shadow_since=choice((0, 990)), untold=choice((0, 1)),
    )  # fmt: skip


def _some_report(random: Random, manager: str, run: int) -> Seen:
    tickets = random.sample(_TICKETS, random.randint(1, 3))
    return seen(random.choice(_STATES), run, tuple(tickets), manager, error_code=random.randint(0, 99))


def _some_record(random: Random) -> Record:
    names = random.sample(_TICKETS, random.randint(0, 3))
    return Record(tuple(ticket(name, random.choice(_MANAGERS)) for name in names))


def _some_situation(random: Random) -> Situation:
    choice = random.choice
    of = _some_job(random) if random.random() < 0.8 else None
    past = choice((None, Past(choice((3, 4)), random.randint(1, 3), reconnects=choice((0, 1)))))
    ended = of or past
    counts = random.randint(0, ended.run) if ended else 0
    older = [place for place in _PLACES if ended and place[1] < (counts or ended.run)]
    return Situation(
        name=NAME,
        job=of,
        past=past,
        record=_some_record(random) if random.random() < 0.7 else None,
        counts=counts,
        records_written=choice((False, True)),
        seen=tuple(_some_report(random, *place) for place in random.sample(_PLACES, random.randint(0, 3))),
        absent_s={manager: choice((0.0, 7200.0)) for manager in _MANAGERS},
        waited_s=choice((0.0, 61.0, 7200.0)),
        elders={Elder(*place): choice((0.0, 7200.0)) for place in older if random.random() < 0.2},
        edited_s_ago=choice((0.0, 1e9)),
        dag=choice(list(Dag)),
        done=frozenset(random.sample(_ORDERS, random.randint(0, 3))),
        wall_s=1000.0,
    )


def _never_two_contradictory_effects(s: Situation, decided: Sequence[Effect]) -> None:
    ends = [effect for effect in decided if isinstance(effect, (Deliver, Hold, Rerun, Remove, LetGo))]
    assert len(ends) <= 1
    orders: dict[tuple[str, int], set[Action]] = {}
    for effect in decided:
        if isinstance(effect, Send):
            orders.setdefault((effect.manager, effect.run), set()).add(effect.action)
    finals = {Action.CONFIRM, Action.SUPERSEDE, Action.CANCEL, Action.FORGET}
    assert all(len(actions & finals) <= 1 for actions in orders.values()), decided


def _an_older_run_is_never_confirmed(s: Situation, decided: Sequence[Effect]) -> None:
    named = {(item.manager, item.name) for item in s.record.tickets} if s.record and s.record.tickets else None
    run = s.job.run if s.job else s.past.run if s.past else 0
    for effect in decided:
        if not isinstance(effect, Send) or effect.action is not Action.CONFIRM or not effect.tickets:
            continue
        assert s.job is None or s.job.ended
        if named is not None:
            assert {(effect.manager, name) for name in effect.tickets} <= named
        else:
            assert effect.run == run or (s.job and s.job.reconnects)


def _jobs_are_edited_only_when_they_may_be(s: Situation, decided: Sequence[Effect]) -> None:
    for effect in decided:
        if isinstance(effect, Send):
            continue
        if isinstance(effect, Note):
            assert s.past is not None
            assert s.past.status == Status.COMPLETED
            continue
        assert s.job is not None
        if isinstance(effect, (Hold, Rerun, LetGo)):
            assert s.job.status == Status.COMPLETED or (
                (isinstance(effect, LetGo) and s.job.held_by_us | s.job.held_at_exit)
                or (isinstance(effect, Hold) and s.job.held_by_us and s.job.hold_untold)
            )
        if isinstance(effect, (Hold, Told, Rerun)):
            assert not s.job.dag
        if isinstance(effect, Complete):
            assert s.job.held_by_us
        if not s.job.settling and not (s.job.is_kept and s.dag is Dag.REMOVED):
            assert isinstance(effect, (Show, ClearRequest))
            assert not isinstance(effect, Show) or effect.shown.state == "None"


def _cancelled_only_if_removed_or_asked(s: Situation, decided: Sequence[Effect]) -> None:
    cancels = [e for e in decided if isinstance(e, Send) and e.action is Action.CANCEL]
    removed = s.job.status == Status.REMOVED if s.job else s.past is not None and s.past.status == Status.REMOVED
    asked = s.job is not None and (s.job.request == "cancel" or (s.job.is_kept and s.dag is Dag.REMOVED))
    assert not cancels or removed or asked


def _delivered_only_if_all_of_the_record_is(s: Situation, decided: Sequence[Effect]) -> None:
    if not any(isinstance(effect, Deliver) for effect in decided):
        return
    wanted = {(item.manager, item.name) for item in s.record.tickets} if s.record else set()
    good = {
        (item.manager, name)
        for item in s.seen
        for name in item.sandbox.tickets
        if item.sandbox.state in (State.DELIVERED, State.RELEASED)
    }
    assert wanted <= good
    assert good


def _records_are_forgotten_only_when_nothing_is_left_to_say(s: Situation, decided: Sequence[Effect]) -> None:
    freed = {(item.manager, item.sandbox.number) for item in s.seen if item.sandbox.state in FREED}
    for effect in decided:
        if isinstance(effect, Send) and effect.action is Action.FORGET:
            assert (effect.manager, effect.run) in freed


def _a_decision_is_the_same_after_a_restart(s: Situation, decided: Sequence[Effect]) -> None:
    """Without the memory of what was acknowledged there are more orders, never other ones.

    Older runs are an exception: their managers must acknowledge again before a newer run is confirmed.
    """
    s = replace(s, elders={})
    fresh = decide(replace(s, done=frozenset()), LIMITS)
    assert all(effect in fresh for effect in decide(s, LIMITS) if isinstance(effect, Send))


_PROMISES = (
    _never_two_contradictory_effects,
    _an_older_run_is_never_confirmed,
    _jobs_are_edited_only_when_they_may_be,
    _cancelled_only_if_removed_or_asked,
    _delivered_only_if_all_of_the_record_is,
    _records_are_forgotten_only_when_nothing_is_left_to_say,
    _a_decision_is_the_same_after_a_restart,
)


def test_every_decision_keeps_all_promises() -> None:
    """All is drawn from few values, so a plain generator does, in a twentieth of the time of Hypothesis."""
    random = Random(1)
    for _ in range(_SITUATIONS):
        s = _some_situation(random)
        decided = decide(s, LIMITS)
        for promise in _PROMISES:
            promise(s, decided)
