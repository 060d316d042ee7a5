"""Decisions of the schedd agent: a table of situations, and what must hold in every one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from schedd_agent.decisions import decide
from schedd_agent.model import (
    ClearRequest,
    Complete,
    DagEnd,
    DecisionInput,
    DecisionLimits,
    Effect,
    Hold,
    KeepInQueue,
    LeaveQueue,
    MarkDelivered,
    PreviousRunManager,
    RecordFailure,
    Remove,
    ReportedSandbox,
    Rerun,
    RestoreHoldReason,
    SendOrder,
    UpdateAdState,
)
from stageout.core.errors import ErrorClass
from stageout.core.states import FREED, State
from stageout.model.job import HistoryRecord, Job, JobAdState, Status
from stageout.model.run import RunRecord, Ticket
from stageout.wire.custody import Action, FileReport, JobKey, SandboxReport

NAME, USER = "ap#7.0#1700000000", "alice@test"
JOB_KEY = JobKey(NAME, USER)
LIMITS = DecisionLimits()


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
    return SandboxReport(NAME, run, USER, state.value, 1, tickets=tickets, **{**facts, **more})


def seen(
    state: State, run: int = 1, tickets: tuple[str, ...] = ("t1",), manager: str = "m1", **more: Any
) -> ReportedSandbox:
    return ReportedSandbox(manager, "", box(state, run, tickets, **more))


def job(status: int = Status.COMPLETED, run: int = 1, **more: Any) -> Job:
    return Job(NAME, 7, 0, status, run, USER, **{"handed_off": 2, "completions": 1, **more})


def held(**more: Any) -> Job:
    return job(Status.HELD, **{"hold_code": 12, "hold_subcode": 20072, **more})


def broken(**more: Any) -> Job:
    """A job that HTCondor holds because another part of its output transfer failed."""
    return job(**{"status": Status.HELD, "hold_code": 12, "hold_subcode": 2, "completions": 0, **more})


def situation(of: Job | None, *found: ReportedSandbox, record: RunRecord | None = None, **more: Any) -> DecisionInput:
    if record is None and of is not None and "record_missing" not in more:
        record = RunRecord((ticket(),))
    more.pop("record_missing", None)
    return DecisionInput(NAME, of, record=record, reported=found, **{"wall_s": 1000.0, **more})


def confirm(run: int = 1, tickets: tuple[str, ...] = ("t1",), files: int = 2, manager: str = "m1") -> SendOrder:
    return SendOrder(manager, Action.CONFIRM, run, tickets, files)


def send(action: Action, run: int = 1) -> SendOrder:
    return SendOrder("m1", action, run)


def kinds(effects: list[Effect]) -> list[str]:
    return [effect.action.value if isinstance(effect, SendOrder) else type(effect).__name__ for effect in effects]


DONE = frozenset({("m1", Action.CONFIRM, 1)})
REDIRECT = "redirect r1 https://new/d/"

TABLE: list[tuple[str, DecisionInput, list[str]]] = [
    ("completed, manager not heard of", situation(job()), ["confirm", "UpdateAdState"]),
    ("completed, accepted", situation(job(), seen(State.ACCEPTED)), ["confirm", "UpdateAdState"]),
    ("completed, confirmed before", situation(job(), seen(State.ACCEPTED), done=DONE), ["UpdateAdState"]),
    ("moving", situation(job(), seen(State.MOVING)), ["UpdateAdState"]),
    ("moving, edited just now", situation(job(), seen(State.MOVING), edited_s_ago=1.0), []),
    ("moving, has just ended", situation(job(entered_at=996), seen(State.MOVING)), []),
    ("moving, ended a while ago", situation(job(entered_at=995), seen(State.MOVING)), ["UpdateAdState"]),
    ("moving, the clock was set back", situation(job(entered_at=5000), seen(State.MOVING)), ["UpdateAdState"]),
    ("lost in a DAG, has just ended", situation(job(entered_at=996, dag=3), seen(State.LOST)), ["UpdateAdState"]),
    (
        "moving again, has just ended, older progress shown",
        situation(job(run=2, entered_at=996, ad_state=JobAdState("Moving", 1)), seen(State.MOVING, 2)),
        ["UpdateAdState"],
    ),
    ("delivered, has just ended", situation(job(entered_at=1000), seen(State.DELIVERED)), ["MarkDelivered"]),
    ("delivered", situation(job(), seen(State.DELIVERED)), ["MarkDelivered"]),
    ("delivered, released", situation(job(), seen(State.RELEASED)), ["MarkDelivered"]),
    ("delivered and written", situation(job(ad_state=JobAdState("Delivered", 1)), seen(State.DELIVERED)), ["forget"]),
    ("delivered and forgotten", situation(job(ad_state=JobAdState("Delivered", 1))), []),
    (
        "an older run's delivery written",
        situation(job(run=2, ad_state=JobAdState("Delivered", 1))),
        ["confirm", "UpdateAdState"],
    ),
    ("failed", situation(job(), seen(State.FAILED)), ["Hold", "RestoreHoldReason"]),
    (
        "failed, held, not told",
        situation(held(ad_state=JobAdState("Failed", 1), unlogged_hold_run=1), seen(State.FAILED)),
        ["Hold", "RestoreHoldReason"],
    ),
    (
        "failed, held, a crash before condor_hold was undone",
        situation(held(ad_state=JobAdState("Failed", 1), unlogged_hold_run=1, hold_code=1), seen(State.FAILED)),
        ["Hold", "RestoreHoldReason"],
    ),
    *(
        (
            f"failed, held, not told, {verb} asked",
            situation(held(ad_state=JobAdState("Failed", 1), unlogged_hold_run=1, request=request), seen(State.FAILED)),
            [verb, "Hold", "RestoreHoldReason"],
        )
        for verb, request in (("retry", "retry"), ("redirect", "redirect r1 https://new/d/"))
    ),
    ("failed, retry asked", situation(job(request="retry"), seen(State.FAILED)), ["retry", "UpdateAdState"]),
    ("failed, held", situation(held(), seen(State.FAILED)), ["UpdateAdState"]),
    ("held, retry asked", situation(held(request="retry"), seen(State.FAILED)), ["retry", "UpdateAdState"]),
    (
        "held as failed, tried again, edited just now",
        situation(held(ad_state=JobAdState("Failed", 1)), seen(State.MOVING), edited_s_ago=1.0),
        ["UpdateAdState"],
    ),
    (
        "held, retry acknowledged",
        situation(held(request="retry"), seen(State.MOVING), done=frozenset({("m1", Action.RETRY, 1)})),
        ["ClearRequest", "UpdateAdState"],
    ),
    ("held, delivered", situation(held(), seen(State.DELIVERED)), ["Complete", "MarkDelivered"]),
    ("held, given up", situation(held(), seen(State.CANCELLED)), ["Complete", "UpdateAdState", "LeaveQueue"]),
    ("released, idle", situation(job(Status.IDLE), seen(State.FAILED)), ["supersede"]),
    (
        "released, shown",
        situation(job(Status.IDLE, ad_state=JobAdState("Failed", 1)), seen(State.FAILED)),
        ["supersede", "UpdateAdState"],
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
    (
        "AP restarted, run ended",
        situation(job(run=2, reconnects=1), seen(State.ACCEPTED)),
        ["confirm", "UpdateAdState"],
    ),
    ("lost", situation(job(), seen(State.LOST)), ["Rerun"]),
    *(
        (
            f"{state.value} at a node that is silent now, moving at another one",
            situation(
                job(),
                seen(state),
                seen(State.MOVING, tickets=("t2",), manager="m2"),
                record=RunRecord((ticket(), ticket("t2", "m2"))),
                absent_s={"m1": 9999.0},
            ),
            effects,
        )
        for state, effects in (
            (State.DELIVERED, ["UpdateAdState"]),
            (State.RELEASED, ["UpdateAdState"]),
            (State.HANDED_OVER, ["UpdateAdState"]),
            (State.MOVING, ["Rerun"]),
        )
    ),
    ("lost too often", situation(job(reruns=2), seen(State.LOST)), ["Hold", "RestoreHoldReason"]),
    (
        "lost while its owner waits for a retry",
        situation(
            job(Status.HELD, hold_code=12, hold_subcode=20001, request="retry"), absent_s={"m1": 7200.0}, done=DONE
        ),
        ["UpdateAdState", "ClearRequest"],
    ),
    ("silent for a while", situation(job(), absent_s={"m1": 7199.0}, done=DONE), ["UpdateAdState"]),
    ("silent for too long", situation(job(), absent_s={"m1": 7200.0}, done=DONE), ["Rerun"]),
    (
        "a node that never comes back, silent for a while",
        situation(job(), absent_s={"m1": 239.0}, patience_s={"m1": 240.0}, done=DONE),
        ["UpdateAdState"],
    ),
    (
        "a node that never comes back, silent for too long",
        situation(job(), absent_s={"m1": 240.0}, patience_s={"m1": 240.0}, done=DONE),
        ["Rerun"],
    ),
    (
        "given up, silent for a while",
        situation(job(request="cancel"), absent_s={"m1": 7199.0}, done=DONE),
        ["UpdateAdState"],
    ),
    (
        "given up, silent for too long",
        situation(job(request="cancel"), absent_s={"m1": 7200.0}, done=DONE),
        ["UpdateAdState", "LeaveQueue"],
    ),
    ("given up, lost", situation(job(request="cancel"), seen(State.LOST)), ["cancel", "UpdateAdState", "LeaveQueue"]),
    ("superseded by mistake", situation(job(), seen(State.SUPERSEDED)), ["Rerun"]),
    ("removed", situation(job(Status.REMOVED), seen(State.MOVING)), ["cancel"]),
    ("gone, unknown", situation(None, seen(State.MOVING)), []),
    ("gone, removed", situation(None, seen(State.MOVING), history=HistoryRecord(3, 1)), ["cancel"]),
    ("a copy that its JobRouter removed", situation(job(Status.REMOVED, is_kept_copy=True), seen(State.MOVING)), []),
    ("gone, removed, freed", situation(None, seen(State.CANCELLED), history=HistoryRecord(3, 1)), ["forget"]),
    (
        "gone, completed",
        situation(None, seen(State.ACCEPTED), history=HistoryRecord(4, 1), record=RunRecord((ticket(),))),
        ["confirm"],
    ),
    (
        "gone, given up while its manager was away",
        situation(None, seen(State.MOVING), history=HistoryRecord(4, 1, given_up=True), record=RunRecord((ticket(),))),
        ["cancel"],
    ),
    (
        "gone, completed, moving",
        situation(None, seen(State.MOVING), history=HistoryRecord(4, 1), record=RunRecord((ticket(),))),
        [],
    ),
    (
        "gone, completed with a newer run",
        situation(None, seen(State.ACCEPTED), history=HistoryRecord(4, 2), record=RunRecord((ticket("t2"),))),
        ["supersede"],
    ),
    (
        "gone, completed, AP restarted: its own output has a lower number",
        situation(None, seen(State.ACCEPTED), history=HistoryRecord(4, 2), record=RunRecord((ticket(),))),
        ["confirm"],
    ),
    (
        "gone, completed, output of a number that the history does not know yet",
        situation(None, seen(State.ACCEPTED, 3, ("t9",)), history=HistoryRecord(4, 2), record=RunRecord((ticket(),))),
        ["confirm"],
    ),
    ("gone, completed, no record", situation(None, seen(State.ACCEPTED), history=HistoryRecord(4, 1)), []),
    ("no record yet", situation(job(), seen(State.ACCEPTED), record_missing=True), []),
    (
        "no record for long",
        situation(job(), seen(State.ACCEPTED), record_missing=True, waited_s=61.0),
        ["UpdateAdState"],
    ),
    (
        "no record, owner insists",
        situation(job(request="retry"), seen(State.ACCEPTED), record_missing=True),
        ["retry", "confirm", "UpdateAdState"],
    ),
    (
        "no record, and nothing reported for a lease",
        situation(job(), seen(State.SUPERSEDED), record_missing=True, waited_s=7200.0),
        ["Rerun"],
    ),
    (
        "no record for a lease, but output is there",
        situation(job(), seen(State.ACCEPTED), record_missing=True, waited_s=7200.0),
        ["UpdateAdState"],
    ),
    (
        "no record yet, and an older run elsewhere: which of them counts is not known",
        situation(
            job(run=2), seen(State.ACCEPTED), record_missing=True, previous_managers={PreviousRunManager("m1", 1): 5.0}
        ),
        [],
    ),
    (
        "a manager knows the run that counts by the number that it had before its shadow reconnected",
        situation(job(run=4, reconnects=1), seen(State.ACCEPTED), previous_managers={PreviousRunManager("m1", 3): 5.0}),
        ["confirm", "UpdateAdState"],
    ),
    ("record rotated away", situation(job(), seen(State.DELIVERED), record_missing=True), []),
    (
        "no record, its owner insisted, delivered",
        situation(job(ad_state=JobAdState("Moving", 1, manager="m1")), seen(State.DELIVERED), record_missing=True),
        ["MarkDelivered"],
    ),
    (
        "no record, its owner insisted, delivered by another",
        situation(job(ad_state=JobAdState("Moving", 1, manager="m2")), seen(State.DELIVERED), record_missing=True),
        [],
    ),
    (
        "no record, its owner insists, its managers are not shown yet",
        situation(
            job(request="retry", ad_state=JobAdState(keys="k")),
            seen(State.CONFIRMED),
            record_missing=True,
            done=DONE | {("m1", Action.RETRY, 1)},
        ),
        ["UpdateAdState"],
    ),
    (
        "no record, its owner insisted, its managers are shown",
        situation(
            job(request="retry", ad_state=JobAdState("Confirmed", 1, manager="m1")),
            seen(State.CONFIRMED),
            record_missing=True,
            done=DONE | {("m1", Action.RETRY, 1)},
        ),
        ["ClearRequest", "UpdateAdState"],
    ),
    ("record rotated away while moving", situation(job(), seen(State.MOVING), record_missing=True), ["UpdateAdState"]),
    (
        "AP without records",
        situation(job(), seen(State.ACCEPTED), record_missing=True, records_written=False),
        ["confirm", "UpdateAdState"],
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
        ["confirm", "UpdateAdState"],
    ),
    (
        "an older run is still there",
        situation(job(run=2), seen(State.MOVING), record=RunRecord((ticket("t2"),))),
        ["supersede", "UpdateAdState"],
    ),
    (
        "an older run at a manager that is silent",
        situation(job(run=2), previous_managers={PreviousRunManager("m2", 1): 7199.0}),
        ["supersede", "UpdateAdState"],
    ),
    (
        "an older run, superseded",
        situation(
            job(run=2),
            previous_managers={PreviousRunManager("m2", 1): 5.0},
            done=frozenset({("m2", Action.SUPERSEDE, 1)}),
        ),
        ["confirm", "UpdateAdState"],
    ),
    (
        "an older run that its manager calls lost",
        situation(
            job(run=2),
            seen(State.LOST, tickets=("t0",), manager="m2"),
            previous_managers={PreviousRunManager("m2", 1): 5.0},
        ),
        ["forget", "confirm", "UpdateAdState"],
    ),
    (
        "an older run at a manager whose lease has ended",
        situation(job(run=2), previous_managers={PreviousRunManager("m2", 1): 7200.0}),
        ["confirm", "UpdateAdState"],
    ),
    (
        "an older run at a node that never comes back, which may still send",
        situation(job(run=2), previous_managers={PreviousRunManager("m2", 1): 239.0}, patience_s={"m2": 240.0}),
        ["supersede", "UpdateAdState"],
    ),
    (
        "an older run at a node that never comes back, whose short lease has ended",
        situation(job(run=2), previous_managers={PreviousRunManager("m2", 1): 240.0}, patience_s={"m2": 240.0}),
        ["confirm", "UpdateAdState"],
    ),
    (
        "an older run in the last report of a node whose short lease has ended",
        situation(
            job(run=2),
            seen(State.RETRY_WAIT, tickets=("t0",), manager="m2"),
            previous_managers={PreviousRunManager("m2", 1): 240.0},
            patience_s={"m2": 240.0},
        ),
        ["supersede", "confirm", "UpdateAdState"],
    ),
    (
        "an older run in the last report of a node that may still send",
        situation(
            job(run=2),
            seen(State.RETRY_WAIT, tickets=("t0",), manager="m2"),
            previous_managers={PreviousRunManager("m2", 1): 239.0},
            patience_s={"m2": 240.0},
        ),
        ["supersede", "supersede", "UpdateAdState"],
    ),
    (
        "nothing handed off in the end",
        situation(job(handed_off=0), seen(State.ACCEPTED), record=RunRecord()),
        ["confirm"],
    ),
    ("node, failed", situation(job(dag=5), seen(State.FAILED)), ["UpdateAdState"]),
    ("node, lost", situation(job(dag=5), seen(State.LOST)), ["UpdateAdState"]),
    (
        "node, lost, its DAG ended",
        situation(job(dag=5, ad_state=JobAdState("Lost", 1)), seen(State.LOST), dag=DagEnd.ENDED),
        ["LeaveQueue"],
    ),
    ("node, its DAG removed", situation(job(dag=5), seen(State.MOVING), dag=DagEnd.REMOVED), ["Remove"]),
    (
        "node that DAGMan removed with its DAG",
        situation(job(dag=5, is_kept=True), seen(State.MOVING), dag=DagEnd.REMOVED),
        ["cancel", "UpdateAdState", "LeaveQueue"],
    ),
    (
        "node that DAGMan removed, moving",
        situation(job(dag=5, is_kept=True), seen(State.MOVING), dag=DagEnd.ENDED),
        ["UpdateAdState"],
    ),
    (
        "node that DAGMan removed, failed",
        situation(job(dag=5, is_kept=True), seen(State.FAILED), dag=DagEnd.ENDED),
        ["UpdateAdState"],
    ),
    (
        "node, delivered, DAG removed",
        situation(job(dag=5, ad_state=JobAdState("Delivered", 1)), dag=DagEnd.REMOVED),
        [],
    ),
    ("given up", situation(job(), seen(State.CANCELLED)), ["UpdateAdState", "LeaveQueue"]),
    ("giving up", situation(job(request="cancel"), seen(State.ACCEPTED)), ["cancel", "UpdateAdState"]),
    (
        "redirects without a URL",
        situation(job(request="redirect"), seen(State.MOVING)),
        ["ClearRequest", "UpdateAdState"],
    ),
    ("redirects what failed", situation(held(request=REDIRECT), seen(State.FAILED)), ["redirect", "UpdateAdState"]),
    (
        "redirects, hold not written",
        situation(job(request=REDIRECT), seen(State.FAILED)),
        ["redirect", "UpdateAdState"],
    ),
    ("redirects too early", situation(job(request=REDIRECT), seen(State.ACCEPTED), done=DONE), ["UpdateAdState"]),
    ("redirects what is not heard of", situation(job(request=REDIRECT), done=DONE), ["UpdateAdState"]),
    (
        "redirected",
        situation(
            held(request=REDIRECT),
            seen(State.CONFIRMED),
            requests_done=frozenset({("m1", 1, "r1")}),
        ),
        ["ClearRequest", "UpdateAdState"],
    ),
    (
        "redirects once more",
        situation(
            held(request="redirect r2 https://other/d/"),
            seen(State.CONFIRMED),
            requests_done=frozenset({("m1", 1, "r1")}),
        ),
        ["redirect", "UpdateAdState"],
    ),
    ("asks for nonsense", situation(job(request="fly"), seen(State.MOVING)), ["ClearRequest", "UpdateAdState"]),
    ("asks while it runs", situation(job(Status.RUNNING, request="retry")), ["ClearRequest"]),
    (
        "held by its exit policy",
        situation(job(Status.HELD, held_at_exit=True), seen(State.ACCEPTED)),
        ["confirm", "UpdateAdState"],
    ),
    (
        "held by its exit policy, failed",
        situation(job(Status.HELD, held_at_exit=True), seen(State.FAILED)),
        ["UpdateAdState"],
    ),
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
    ("a part failed, accepted", situation(broken(), seen(State.ACCEPTED)), ["confirm", "UpdateAdState"]),
    ("a part failed, not reported", situation(broken()), ["confirm", "UpdateAdState"]),
    ("a part was too large", situation(broken(hold_code=33), seen(State.ACCEPTED)), ["confirm", "UpdateAdState"]),
    ("a part failed, moving", situation(broken(), seen(State.MOVING)), ["UpdateAdState"]),
    ("a part failed, the rest delivered", situation(broken(), seen(State.DELIVERED)), ["MarkDelivered"]),
    ("a part failed, the rest, too", situation(broken(), seen(State.FAILED)), ["UpdateAdState"]),
    (
        "a part failed, the rest is lost",
        situation(broken(), absent_s={"m1": 7200.0}),
        ["confirm", "UpdateAdState"],
    ),
    (
        "a part failed, the rest is lost and written, and the node stays silent",
        situation(broken(ad_state=JobAdState("Lost", 1, "for 7200 s")), absent_s={"m1": 7260.0}, done=DONE),
        [],
    ),
    (
        "a part failed, the rest is lost and written, and the node is back",
        situation(broken(ad_state=JobAdState("Lost", 1, "for 7200 s")), seen(State.MOVING), done=DONE),
        ["UpdateAdState"],
    ),
    (
        "node, lost and written, and its node stays silent",
        situation(job(dag=5, ad_state=JobAdState("Lost", 1, "for 7200 s")), absent_s={"m1": 7260.0}, done=DONE),
        [],
    ),
    (
        "node, an earlier run's loss written",
        situation(job(dag=5, run=2, ad_state=JobAdState("Lost", 1, "for 7200 s")), absent_s={"m1": 7260.0}),
        ["confirm", "UpdateAdState"],
    ),
    (
        "a part failed, delivered and written",
        situation(broken(ad_state=JobAdState("Delivered", 1)), seen(State.DELIVERED)),
        ["forget"],
    ),
    (
        "a part failed, cancel asked",
        situation(broken(request="cancel"), seen(State.MOVING)),
        ["cancel", "UpdateAdState"],
    ),
    ("a part failed, cancelled", situation(broken(), seen(State.CANCELLED)), ["UpdateAdState"]),
    (
        "a part failed, cancelled and written",
        situation(broken(ad_state=JobAdState("Cancelled", 1)), seen(State.CANCELLED)),
        ["forget"],
    ),
    (
        "a part failed, retry asked",
        situation(broken(request="retry"), seen(State.FAILED)),
        ["retry", "UpdateAdState"],
    ),
    (
        "a part failed, redirect asked",
        situation(broken(request=REDIRECT), seen(State.FAILED)),
        ["redirect", "UpdateAdState"],
    ),
    (
        "a part failed, held again by its owner",
        situation(broken(hold_code=1, hold_subcode=0, ad_state=JobAdState("Moving", 1)), seen(State.MOVING)),
        ["UpdateAdState"],
    ),
    (
        "failed, held by us and then by its owner",
        situation(held(hold_code=1, hold_subcode=0, ad_state=JobAdState("Failed", 1)), seen(State.FAILED)),
        ["UpdateAdState"],
    ),
    ("a part failed, its shadow is not gone", situation(broken(has_shadow=True), seen(State.ACCEPTED)), []),
    (
        "a part failed, an older run as well",
        situation(broken(run=2), seen(State.MOVING, 1, ("t0",)), seen(State.ACCEPTED, 2)),
        ["supersede", "UpdateAdState"],
    ),
    (
        "a part failed, an older run's manager is silent",
        situation(broken(run=2), seen(State.ACCEPTED, 2), previous_managers={PreviousRunManager("m0", 1): 5.0}),
        ["supersede", "UpdateAdState"],
    ),
    (
        "a part failed, no record of the rest, whose files are not counted",
        situation(broken(handed_off=0), seen(State.ACCEPTED), record_missing=True),
        ["UpdateAdState"],
    ),
    (
        "a part failed, the record names the last plugin only",
        situation(broken(handed_off=0), seen(State.ACCEPTED), record=RunRecord()),
        ["UpdateAdState"],
    ),
    (
        "a part failed, no record, retry asked",
        situation(broken(handed_off=0, request="retry"), seen(State.ACCEPTED), record=RunRecord()),
        ["UpdateAdState", "ClearRequest"],
    ),
    (
        "a part failed, no record of the rest, whose files are counted",
        situation(broken(), seen(State.ACCEPTED), record_missing=True, waited_s=61.0),
        ["UpdateAdState"],
    ),
    (
        "a part failed, no record of the rest, the owner insists",
        situation(broken(request="retry"), seen(State.ACCEPTED), record=RunRecord()),
        ["retry", "confirm", "UpdateAdState"],
    ),
    ("a part failed, nothing handed off", situation(broken(handed_off=0), record_missing=True), []),
    ("the input failed", situation(broken(hold_code=13, handed_off=0), seen(State.ACCEPTED)), ["supersede"]),
    (
        "a part failed, released",
        situation(broken(status=Status.IDLE, ad_state=JobAdState("Moving", 1)), seen(State.MOVING)),
        ["supersede", "UpdateAdState"],
    ),
    (
        "a part failed, released and running again",
        situation(job(Status.RUNNING, 2, ad_state=JobAdState("Moving", 1)), seen(State.MOVING)),
        ["supersede", "UpdateAdState"],
    ),
    ("a part failed, removed", situation(broken(status=Status.REMOVED), seen(State.MOVING)), ["cancel"]),
    (
        "lost in a DAG that has ended, held at its exit",
        situation(
            job(Status.HELD, held_at_exit=True, dag=5, ad_state=JobAdState("Lost", 1)),
            seen(State.LOST),
            dag=DagEnd.ENDED,
        ),
        [],
    ),
    (
        "AP restarted, held by its owner before the run is seen to go on",
        situation(job(Status.HELD, run=2, hold_code=1, has_shadow=True), seen(State.ACCEPTED)),
        [],
    ),
    (
        "put back to Idle by its exit policy",
        situation(job(Status.IDLE), seen(State.ACCEPTED)),
        ["supersede", "UpdateAdState"],
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
        ["supersede", "UpdateAdState"],
    ),
    (
        "the last shadow only said that the job is done, the last hand-off is not reported yet",
        situation(job(run=2), seen(State.ACCEPTED, tickets=("t0",)), recorded_run=1),
        ["confirm", "UpdateAdState"],
    ),
    (
        "the last shadow only said that the job is done, an older run is reported",
        situation(job(run=3), seen(State.ACCEPTED, tickets=("t0",)), recorded_run=2),
        ["supersede", "UpdateAdState"],
    ),
    (
        "gone, the last shadow only said that the job is done, the last hand-off is not reported yet",
        situation(
            None,
            seen(State.ACCEPTED, tickets=("t0",)),
            history=HistoryRecord(4, 2),
            record=RunRecord((ticket(),)),
            recorded_run=1,
        ),
        ["confirm"],
    ),
]


@pytest.mark.parametrize(("what", "s", "expected"), TABLE, ids=[row[0] for row in TABLE])
def test_table(what: str, s: DecisionInput, expected: list[str]) -> None:
    assert kinds(decide(s, LIMITS)) == expected


def test_a_confirmation_names_tickets_and_files_of_the_record() -> None:
    record = RunRecord((ticket("t1"), ticket("t2", files=3), ticket("t3", "m2", 1)))
    effects = decide(situation(job(priority=4), record=record), LIMITS)
    assert effects[:2] == [
        SendOrder("m1", Action.CONFIRM, 1, ("t1", "t2"), 5, 4),
        SendOrder("m2", Action.CONFIRM, 1, ("t3",), 1, 4),
    ]


@pytest.mark.parametrize("gone", [False, True])
def test_a_confirmation_names_hand_offs_that_are_not_reported_yet(gone: bool) -> None:
    """The manager drops what a confirmation does not name."""
    s = situation(None if gone else job(), seen(State.ACCEPTED), history=HistoryRecord(4, 1) if gone else None,
                  record=RunRecord((ticket(), ticket("t2"))))  # fmt: skip
    assert confirm(1, ("t1", "t2"), 4) in decide(s, LIMITS)


def test_a_run_that_went_on_over_a_restart_is_confirmed_under_the_managers_number() -> None:
    effects = decide(situation(job(run=3, reconnects=1), seen(State.ACCEPTED, 2)), LIMITS)
    assert effects[0] == confirm(run=2)


def test_a_hand_off_whose_receipt_got_lost_is_dropped() -> None:
    elsewhere = RunRecord((ticket("t1", "m2"),))
    effects = decide(situation(job(), seen(State.ACCEPTED, tickets=("t9",)), record=elsewhere), LIMITS)
    assert effects[0] == confirm(tickets=(), files=0)
    same = decide(situation(job(), seen(State.ACCEPTED, tickets=("t9",))), LIMITS)
    assert same[0] == confirm(), "its own sandbox, of which the manager has not reported everything yet"


def test_a_hold_speaks_in_the_plugins_words() -> None:
    effect, _ = decide(situation(job(), seen(State.FAILED, reason="quota exceeded", error_code=72)), LIMITS)
    assert isinstance(effect, Hold)
    ways = "`stageout retry` sends it again, `stageout redirect` to another URL; `condor_release` runs the job again"
    advice = f"when there is room, {ways}"
    assert (effect.subcode, effect.reason) == (20072, f"Stage-out failed: quota exceeded; {advice}; sub-code 20072")
    assert effect.ad_state.reason == f"quota exceeded; {advice}"
    assert effect.ad_state.state == "Failed"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (ErrorClass.NAME_NOT_RESOLVED, "`stageout redirect` sends it to another URL"),
        (ErrorClass.PERMISSION_DENIED, "when you may write there, `stageout retry`"),
        (ErrorClass.CREDENTIAL_EXPIRED, "when the credential is renewed"),
        (ErrorClass.UNKNOWN, "why; `stageout retry` sends it again"),
    ],
)
def test_a_hold_says_what_a_retry_needs(kind: ErrorClass, words: str) -> None:
    effect, _ = decide(situation(job(), seen(State.FAILED, error_code=kind.code)), LIMITS)
    assert isinstance(effect, Hold)
    end = f"`condor_release` runs the job again; sub-code {20000 + kind.code}"
    assert words in effect.reason and effect.reason.endswith(end)


def test_a_hold_links_to_the_row_of_its_code() -> None:
    limits = replace(LIMITS, docs_url="https://docs.example.org/stageout")
    effect, _ = decide(situation(job(), seen(State.FAILED, reason="x" * 3000, error_code=72)), limits)
    assert isinstance(effect, Hold)
    assert effect.reason.endswith("x; see https://docs.example.org/stageout/reference/hold-codes.html#hold-20072")
    assert len(effect.reason) == 2000
    assert "https://docs.example.org" not in effect.ad_state.reason


def test_the_reason_of_a_hold_is_one_line_of_bounded_length() -> None:
    """It becomes an event in the job's log, and an argument of a command."""
    words = "no\n...\n005 (007.000.000) Job terminated.\0" + "x" * 1_000_000
    hold, told = decide(situation(job(), seen(State.FAILED, reason=words)), LIMITS)
    assert isinstance(hold, Hold)
    assert isinstance(told, RestoreHoldReason)
    assert hold.reason == told.reason
    assert hold.reason.startswith("Stage-out failed: no ... 005 (007.000.000) Job terminated. xxx")
    assert len(hold.reason) == 2000


def test_a_completed_job_is_kept_while_its_output_is_on_its_way() -> None:
    limits = replace(LIMITS, leave_s=1000.0)

    def kept(state: State, age_s: float, **more: Any) -> list[int]:
        effects = decide(situation(job(entered_at=1000 - int(age_s), **more), seen(state)), limits)
        return [effect.until for effect in effects if isinstance(effect, KeepInQueue)]

    assert kept(State.MOVING, 400) == []
    assert kept(State.MOVING, 600) == [2000]
    assert kept(State.MOVING, 5000, kept_until=1600) == []
    assert kept(State.MOVING, 5000, kept_until=1400) == [2000]
    assert kept(State.FAILED, 5000, dag=5, ad_state=JobAdState("Failed", 1)) == []
    assert kept(State.MOVING, 5000, status=Status.HELD, hold_code=12, hold_subcode=20072) == []


@pytest.mark.parametrize(("status", "run"), [(Status.IDLE, 0), (Status.RUNNING, 1), (Status.TRANSFERRING, 1)])
def test_a_restored_queue_that_uses_a_number_again_wants_no_old_output(status: int, run: int) -> None:
    waiting = seen(State.RETRY_WAIT)
    effects = decide(situation(job(status, run=run), waiting), LIMITS)
    assert SendOrder("m1", Action.SUPERSEDE, 1) in effects
    only_accepted = decide(situation(job(status, run=run), seen(State.ACCEPTED)), LIMITS)
    assert not [one for one in only_accepted if isinstance(one, SendOrder)], "the queue was read before it ended"


def test_handed_over_output_that_failed_is_not_offered_for_a_retry() -> None:
    failed = seen(State.FAILED, reason="conflict", custody=("router.example.org:9621 0 1-2 5000",))
    effect, _ = decide(situation(job(), failed), LIMITS)
    assert isinstance(effect, Hold)
    assert "`condor_release` runs the job again" in effect.ad_state.reason
    assert effect.ad_state.state == "Failed"


def test_what_routers_have_stands_in_the_jobs_ad_until_its_end() -> None:
    held = {"custody": ("router:9621 0 1-2 5000",), "holdings": ("router:9621 2 10 900",)}
    (effect,) = decide(situation(job(), seen(State.HANDED_OVER, **held)), LIMITS)
    assert isinstance(effect, UpdateAdState)
    assert effect.ad_state.custody == "router:9621 2 10 900"
    hostile = ("x" * 10**6 + " 2 10 900", "router\0:1 2 10 900", "no holding", *(f"r{n}:1 1 1 1" for n in range(10**3)))
    (effect,) = decide(situation(job(), seen(State.HANDED_OVER, holdings=hostile)), LIMITS)
    assert isinstance(effect, UpdateAdState)
    assert effect.ad_state.custody == "; ".join(f"r{n}:1 1 1 1" for n in range(8))
    (effect,) = decide(situation(job(entered_at=900), seen(State.DELIVERED, **held)), LIMITS)
    assert isinstance(effect, MarkDelivered)
    assert effect.ad_state.custody == ""


def test_delivery_says_what_was_verified() -> None:
    (effect,) = decide(situation(job(entered_at=900), seen(State.DELIVERED)), LIMITS)
    assert isinstance(effect, MarkDelivered)
    assert effect.stats == {
        "Bytes": 10, "Files": 2, "Seconds": 100, "Attempts": 1, "VerifiedBy": "size", "Hosts": "y", "DeliveredAt": 1000,
    }  # fmt: skip
    assert (effect.ad_state.state, effect.ad_state.run, effect.ad_state.files_left) == ("Delivered", 1, 0)


def test_two_managers_are_delivered_only_together() -> None:
    record = RunRecord((ticket("t1"), ticket("t2", "m2")))
    half = [seen(State.DELIVERED), seen(State.MOVING, tickets=("t2",), manager="m2")]
    assert kinds(decide(situation(job(), *half, record=record), LIMITS)) == ["UpdateAdState"]
    both = [seen(State.DELIVERED), seen(State.DELIVERED, tickets=("t2",), manager="m2")]
    (effect,) = decide(situation(job(), *both, record=record), LIMITS)
    assert isinstance(effect, MarkDelivered)
    assert effect.stats["Files"] == 4


def test_progress_shows_the_figures() -> None:
    waiting = seen(State.RETRY_WAIT, reason="busy", attempts=3, next_attempt_at=1234)
    (effect,) = decide(situation(job(), waiting), LIMITS)
    reason = "busy; attempt 3; next at 1970-01-01T00:20:34Z; 2 files, 10 B left"
    assert effect == UpdateAdState(JobAdState("RetryWait", 1, reason, 10, 2, 3, 1234, "m1"))


def test_an_attempt_after_all_time_is_shown() -> None:
    (effect,) = decide(situation(job(), seen(State.RETRY_WAIT, reason="busy", next_attempt_at=2**62)), LIMITS)
    assert isinstance(effect, UpdateAdState)
    assert "; next at 6325-" in effect.ad_state.reason


@pytest.mark.parametrize(
    ("attempts", "excused", "next_at", "text"),
    [
        (1, 1, 1234, "; next at 1970-01-01T00:20:34Z"),
        (5, 2, 1234, "; attempt 3 of 20; next at 1970-01-01T00:20:34Z"),
        (5, 2, 900, "; attempt 3 of 20; the next attempt is due"),
        (3, 2, 0, ""),
    ],
)
def test_attempts_count_against_a_fixed_limit_and_none_is_promised_for_the_past(
    attempts: int, excused: int, next_at: int, text: str
) -> None:
    figures = {"attempts": attempts, "excused": excused, "attempts_limit": 20, "next_attempt_at": next_at}
    (effect,) = decide(situation(job(), seen(State.RETRY_WAIT, reason="busy", **figures)), LIMITS)
    assert isinstance(effect, UpdateAdState)
    assert effect.ad_state.reason == f"busy{text}; 2 files, 10 B left"


def test_figures_alone_do_not_change_the_reason() -> None:
    (first,) = decide(situation(job(), seen(State.MOVING, reason="")), LIMITS)
    assert isinstance(first, UpdateAdState)
    assert first.ad_state.reason == "being transferred; 2 files, 10 B left"
    less = seen(State.MOVING, reason="", files_left=1, bytes_left=4)
    (second,) = decide(situation(job(ad_state=first.ad_state), less), LIMITS)
    assert second == UpdateAdState(replace(first.ad_state, files_left=1, bytes_left=4))


# ---- properties ---------------------------------------------------------------------------------------------------

_SITUATIONS = 5000
_TICKETS = ("t1", "t2", "t3")
_MANAGERS = ("m1", "m2")
_PLACES = [(manager, run) for manager in _MANAGERS for run in (1, 2, 3)]
_ORDERS = [(manager, action, run) for manager, run in _PLACES for action in Action]
_STATES, _STATUSES = list(State), list(Status)
_REQUESTS = ("", "retry", "cancel", "pause", "resume", "?", "retry run=2", "cancel run=2")


def _some_job(random: Random) -> Job:
    choice = random.choice
    status, dag = choice(_STATUSES), choice((0, 5))
    return job(
        status, random.randint(1, 3), dag=dag, is_kept=bool(dag and status == Status.COMPLETED and choice((0, 1))),
        handed_off=choice((0, 2, 4)), hold_code=choice((1, 3, 12)), hold_subcode=choice((0, 20072)),
        held_at_exit=choice((False, True)), request=choice(_REQUESTS),
        has_ended=choice((False, True)), has_shadow=choice((False, True)), reruns=random.randint(0, 3),
        reconnects=choice((0, 1)), ad_state=JobAdState(choice(("None", *_STATES)), random.randint(0, 3)),
        shadow_since=choice((0, 990)), unlogged_hold_run=choice((0, 1)),
    )  # fmt: skip


def _some_report(random: Random, manager: str, run: int) -> ReportedSandbox:
    tickets = random.sample(_TICKETS, random.randint(1, 3))
    return seen(random.choice(_STATES), run, tuple(tickets), manager, error_code=random.randint(0, 99))


def _some_record(random: Random) -> RunRecord:
    names = random.sample(_TICKETS, random.randint(0, 3))
    return RunRecord(tuple(ticket(name, random.choice(_MANAGERS)) for name in names))


def _some_situation(random: Random) -> DecisionInput:
    choice = random.choice
    of = _some_job(random) if random.random() < 0.8 else None
    past = choice((None, HistoryRecord(choice((3, 4)), random.randint(1, 3), reconnects=choice((0, 1)))))
    ended = of or past
    counts = random.randint(0, ended.run) if ended else 0
    older = [place for place in _PLACES if ended and place[1] < (counts or ended.run)]
    return DecisionInput(
        name=NAME,
        job=of,
        history=past,
        record=_some_record(random) if random.random() < 0.7 else None,
        recorded_run=counts,
        records_written=choice((False, True)),
        reported=tuple(_some_report(random, *place) for place in random.sample(_PLACES, random.randint(0, 3))),
        absent_s={manager: choice((0.0, 7200.0)) for manager in _MANAGERS},
        waited_s=choice((0.0, 61.0, 7200.0)),
        previous_managers={
            PreviousRunManager(*place): choice((0.0, 7200.0)) for place in older if random.random() < 0.2
        },
        edited_s_ago=choice((0.0, 1e9)),
        dag=choice(list(DagEnd)),
        done=frozenset(random.sample(_ORDERS, random.randint(0, 3))),
        wall_s=1000.0,
    )


def _never_two_contradictory_effects(s: DecisionInput, decided: Sequence[Effect]) -> None:
    ends = [effect for effect in decided if isinstance(effect, (MarkDelivered, Hold, Rerun, Remove, LeaveQueue))]
    assert len(ends) <= 1
    orders: dict[tuple[str, int], set[Action]] = {}
    for effect in decided:
        if isinstance(effect, SendOrder):
            orders.setdefault((effect.manager, effect.run), set()).add(effect.action)
    finals = {Action.CONFIRM, Action.SUPERSEDE, Action.CANCEL, Action.FORGET}
    assert all(len(actions & finals) <= 1 for actions in orders.values()), decided


def _an_older_run_is_never_confirmed(s: DecisionInput, decided: Sequence[Effect]) -> None:
    named = {(item.manager, item.name) for item in s.record.tickets} if s.record and s.record.tickets else None
    run = s.job.run if s.job else s.history.run if s.history else 0
    for effect in decided:
        if not isinstance(effect, SendOrder) or effect.action is not Action.CONFIRM or not effect.tickets:
            continue
        assert s.job is None or s.job.ended
        if named is not None:
            assert {(effect.manager, name) for name in effect.tickets} <= named
        else:
            assert effect.run == run or (s.job and s.job.reconnects)


def _jobs_are_edited_only_when_they_may_be(s: DecisionInput, decided: Sequence[Effect]) -> None:
    for effect in decided:
        if isinstance(effect, SendOrder):
            continue
        if isinstance(effect, RecordFailure):
            assert s.history is not None
            assert s.history.status == Status.COMPLETED
            continue
        assert s.job is not None
        if isinstance(effect, (Hold, Rerun, LeaveQueue)):
            assert s.job.status == Status.COMPLETED or (
                (isinstance(effect, LeaveQueue) and s.job.held_by_us)
                or (isinstance(effect, Hold) and s.job.held_by_us and s.job.is_hold_unlogged)
            )
        if isinstance(effect, (Hold, RestoreHoldReason, Rerun)):
            assert not s.job.dag
        if isinstance(effect, Complete):
            assert s.job.held_by_us
        if not s.job.has_final_handoff and not (s.job.is_kept and s.dag is DagEnd.REMOVED):
            assert isinstance(effect, (UpdateAdState, ClearRequest))
            assert not isinstance(effect, UpdateAdState) or (
                effect.ad_state.state == ("Accepted" if s.job.has_failed_transfer else "None")
            )


def _cancelled_only_if_removed_or_asked(s: DecisionInput, decided: Sequence[Effect]) -> None:
    cancels = [e for e in decided if isinstance(e, SendOrder) and e.action is Action.CANCEL]
    removed = s.job.status == Status.REMOVED if s.job else s.history is not None and s.history.status == Status.REMOVED
    asked = s.job is not None and (
        s.job.request == "cancel"
        or (s.job.request == "cancel run=2" and (s.recorded_run or s.job.run) <= 2 <= s.job.run)
        or (s.job.is_kept and s.dag is DagEnd.REMOVED)
    )
    assert not cancels or removed or asked


def _delivered_only_if_all_of_the_record_is(s: DecisionInput, decided: Sequence[Effect]) -> None:
    if not any(isinstance(effect, MarkDelivered) for effect in decided):
        return
    wanted = {(item.manager, item.name) for item in s.record.tickets} if s.record else set()
    good = {
        (item.manager, name)
        for item in s.reported
        for name in item.sandbox.tickets
        if item.sandbox.state in (State.DELIVERED, State.RELEASED)
    }
    assert wanted <= good
    assert good


def _records_are_forgotten_only_when_nothing_is_left_to_say(s: DecisionInput, decided: Sequence[Effect]) -> None:
    freed = {(item.manager, item.sandbox.number) for item in s.reported if item.sandbox.state in FREED}
    for effect in decided:
        if isinstance(effect, SendOrder) and effect.action is Action.FORGET:
            assert (effect.manager, effect.run) in freed


def _a_decision_is_the_same_after_a_restart(s: DecisionInput, decided: Sequence[Effect]) -> None:
    """Without the memory of what was acknowledged there are more orders, never other ones.

    Older runs are an exception: their managers must acknowledge again before a newer run is confirmed.
    """
    s = replace(s, previous_managers={})
    fresh = decide(replace(s, done=frozenset()), LIMITS)
    assert all(effect in fresh for effect in decide(s, LIMITS) if isinstance(effect, SendOrder))


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


def test_a_redirect_has_the_owner_s_words() -> None:
    given = situation(job(request="redirect r1 https://new/d/x a file"), seen(State.RETRY_WAIT))
    (order,) = [effect for effect in decide(given, LIMITS) if isinstance(effect, SendOrder)]
    assert (order.action, order.request, order.new_url, order.only_file) == (
        Action.REDIRECT, "r1", "https://new/d/x", "a file",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        (situation(job(request="redirect r1"), seen(State.RETRY_WAIT)), "r1 the request is not"),
        (situation(job(request="redirect  https://x/"), seen(State.RETRY_WAIT)), ""),
        (situation(job(Status.RUNNING, run=2, request=REDIRECT), seen(State.FAILED)), "r1 the job runs again"),
        (situation(job(request=REDIRECT + "x" * 8000), seen(State.RETRY_WAIT)), "r1 the request is not"),
        (
            situation(
                job(request=REDIRECT), seen(State.FAILED), seen(State.FAILED, tickets=("t2",)),
                record=RunRecord((ticket(), ticket("t2"))),
            ),
            "r1 the output is in several sandboxes",
        ),
        (
            situation(
                job(request=REDIRECT), seen(State.RETRY_WAIT),
                record=RunRecord((ticket(), ticket("t2", "m2"))),
            ),
            "r1 the output is in several sandboxes",
        ),
        (
            situation(
                job(request=REDIRECT), seen(State.RETRY_WAIT, refused="a: being sent now"),
                requests_done=frozenset({("m1", 1, "r1")}),
            ),
            "r1 a: being sent now",
        ),
        (
            situation(job(request=REDIRECT, ad_state=JobAdState("Delivered", 1)), seen(State.RELEASED)),
            "r1 its output is delivered",
        ),
        (situation(job(request="retry", ad_state=JobAdState("Delivered", 1)), seen(State.RELEASED)), ""),
        (situation(job(Status.RUNNING, request="retry run=1"), seen(State.FAILED)), "retry run=1 the job runs again"),
        (situation(job(Status.RUNNING, request="retry"), seen(State.FAILED)), ""),
    ],
)  # fmt: skip
def test_a_redirect_that_is_refused_has_an_answer(given: DecisionInput, refused: str) -> None:
    (clear,) = [effect for effect in decide(given, LIMITS) if isinstance(effect, ClearRequest)]
    assert clear.refused.startswith(refused)
    assert bool(clear.refused) is bool(refused)


_AGAIN = "the job runs again since: this request was for run 1, the last run is 2"
_AHEAD = "this request was for run 3, the last run is 2"


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.HELD, Status.RUNNING, Status.IDLE])
@pytest.mark.parametrize(
    ("request_text", "refused"),
    [
        ("retry run=1", f"retry run=1 {_AGAIN}"),
        ("cancel run=1", f"cancel run=1 {_AGAIN}"),
        ("pause run=1", f"pause run=1 {_AGAIN}"),
        ("resume run=3", f"resume run=3 {_AHEAD}"),
        ("redirect run=1 r1 https://new/d/", f"r1 {_AGAIN}"),
    ],
)
def test_a_request_for_another_run_is_refused(request_text: str, refused: str, status: Status) -> None:
    of = replace(job(run=2), status=status, hold_code=12, hold_subcode=20072)
    given = situation(replace(of, request=request_text), seen(State.RETRY_WAIT, run=2), recorded_run=2)
    clear, *others = decide(given, LIMITS)
    assert clear == ClearRequest(refused)
    assert others == decide(replace(given, job=of), LIMITS), "the rest is as if nobody had asked"


@pytest.mark.parametrize(
    ("run", "recorded_run", "wanted"),
    [
        (2, 2, "retry run=2"),
        (2, 2, "retry"),
        (2, 0, "retry run=2"),
        (3, 2, "retry run=3"),
        (3, 2, "retry run=2"),  # the number has grown by a shadow that only confirmed the end
    ],
)
def test_a_request_for_the_last_run_is_carried_out(run: int, recorded_run: int, wanted: str) -> None:
    given = situation(job(run=run, request=wanted), seen(State.RETRY_WAIT, run=2), recorded_run=recorded_run)
    assert send(Action.RETRY, 2) in decide(given, LIMITS)


def test_an_old_request_does_not_confirm_output_without_a_record() -> None:
    for wanted, is_believed in (("retry run=1", False), ("retry run=2", True)):
        given = situation(job(run=2, request=wanted), seen(State.ACCEPTED, run=2), record_missing=True)
        assert (confirm(run=2) in decide(given, LIMITS)) is is_believed


def test_a_removed_job_is_left_alone() -> None:
    given = situation(job(Status.REMOVED, run=2, request="retry run=1"), seen(State.MOVING, run=2))
    assert kinds(decide(given, LIMITS)) == ["cancel"]
