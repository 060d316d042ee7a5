"""Job ids as they are typed, jobs as their ads describe them, and what both mean to somebody who waits."""

from __future__ import annotations

from typing import Any

import pytest

from stageout.cli.exits import UsageError
from stageout.cli.jobs import Job, JobId, constraint, makes_more_jobs, parse_job_id, parse_job_ids
from stageout.cli.verdict import Outcome, judge_history, judge_queued, own_status, wait_status
from stageout.core.classads import ClassAd
from stageout.core.states import State


def ad(**changes: Any) -> ClassAd:
    """A completed job whose output was handed off, as the schedd shows it; None takes an attribute away."""
    values: dict[str, Any] = {
        "ClusterId": 12,
        "ProcId": 0,
        "GlobalJobId": "ap#12.0#1795251831",
        "Owner": "alice",
        "User": "alice@x",
        "JobStatus": 4,
        "NumShadowStarts": 1,
        "StageOutGuard": True,
        "StageOutState": "None",
        "StageOutRun": 0,
        "TransferOutputStats": ClassAd({"STAGEOUTFilesCountLastRun": 3, "STAGEOUTSizeBytesLastRun": 3 * 10**6}),
        **changes,
    }
    return ClassAd({name: value for name, value in values.items() if value is not None})


def job(**changes: Any) -> Job:
    return Job.from_ad(ad(**changes))


def test_attempts_of_delivered_output_are_those_of_its_figures() -> None:
    """The agent writes nothing about the way into the ad of a job whose output is delivered already."""
    stats = ClassAd({"Attempts": 3})
    assert job(StageOutState="Delivered", StageOutStats=stats).attempts == 3
    assert job(StageOutState="Moving", StageOutStats=stats, StageOutAttempts=1).attempts == 1
    assert job(StageOutState="Delivered").attempts == 0


@pytest.mark.parametrize(("text", "id_"), [("12", JobId(12)), ("12.0", JobId(12, 0)), ("7.13", JobId(7, 13))])
def test_job_ids_are_read(text: str, id_: JobId) -> None:
    assert parse_job_id(text) == id_
    assert str(id_) == text


@pytest.mark.parametrize(
    "text", ["", "x", "0", "0.1", "1.", ".1", "1.2.3", "-1.-1", "1 ", "1.0\n", "１２", "99999999999", "1,2", "alice"]
)
def test_anything_else_is_refused_with_an_explanation(text: str) -> None:
    with pytest.raises(UsageError, match="is not a job: write a cluster"):
        parse_job_id(text)


def test_each_job_is_asked_for_once() -> None:
    assert parse_job_ids(["12", "12.0", "12"]) == [JobId(12), JobId(12, 0)]


def test_constraints() -> None:
    assert constraint([JobId(12), JobId(13, 2)]) == "(ClusterId == 12) || (ClusterId == 13 && (ProcId == 2))"
    assert constraint([]) == "false"
    with_clusters = constraint([JobId(13, 2)], with_clusters=True)
    assert with_clusters == "(ClusterId == 13 && (ProcId == 2 || ProcId is undefined || ProcId < 0))"


def test_what_is_absent_or_of_another_type_counts_as_not_set() -> None:
    seen = Job.from_ad(ClassAd({"ClusterId": 1, "ProcId": 2, "StageOutState": 5, "TransferOutputStats": "x"}))
    assert (seen.id, seen.state, seen.files_handed_off, seen.files_left) == (JobId(1, 2), "None", 0, None)


@pytest.mark.parametrize(
    ("more", "attributes"),
    [
        (False, {}),
        (True, {"JobMaterializeLimit": 5}),
        (True, {"JobMaterializeLimit": 5, "JobMaterializePaused": 1}),
        (False, {"JobMaterializeLimit": 5, "JobMaterializePaused": 2}),
        (False, {"JobMaterializeLimit": 5, "JobMaterializePaused": 3}),
    ],
)
def test_factories_that_make_more_jobs(more: bool, attributes: dict[str, int]) -> None:
    assert makes_more_jobs(ClassAd({"ClusterId": 1, **attributes})) is more


#: Held by HTCondor because another part of the output transfer failed.
PART_FAILED = {"JobStatus": 5, "HoldReasonCode": 12, "HoldReasonSubCode": 2, "StageOutRun": 1}


@pytest.mark.parametrize(
    ("is_sent", "changes"),
    [
        (True, {"StageOutState": "Accepted", "TransferOutputStats": None}),
        (True, {"StageOutState": "Moving"}),
        (True, {"StageOutState": "Failed"}),
        (True, {"StageOutState": "Lost"}),
        (False, {"StageOutState": "Delivered"}),
        (False, {"StageOutState": "Cancelled"}),
        (False, {"StageOutState": "None"}),
        (False, {"StageOutState": "Moving", "NumShadowStarts": 2}),
    ],
)
def test_requests_are_for_held_jobs_whose_other_output_is_sent(is_sent: bool, changes: dict[str, Any]) -> None:
    assert job(**{**PART_FAILED, **changes}).in_stage_out is is_sent


SYNCHRONOUS = ClassAd({"HttpsFilesCountLastRun": 3})
OUR_HOLD = {"JobStatus": 5, "HoldReasonCode": 12, "HoldReasonSubCode": 20072, "HoldReason": "Stage-out failed: quota"}


@pytest.mark.parametrize(
    ("outcome", "words", "changes"),
    [
        (Outcome.WAITING, "Idle", {"JobStatus": 1, "TransferOutputStats": None}),
        (Outcome.WAITING, "Running", {"JobStatus": 2}),
        (Outcome.WAITING, "TransferringOutput", {"JobStatus": 6}),
        (Outcome.WAITING, "Suspended", {"JobStatus": 7}),
        (Outcome.FAILED, "removed", {"JobStatus": 3, "RemoveReason": "via condor_rm"}),
        (Outcome.DELIVERED, "before the job ended", {"TransferOutputStats": None}),
        (Outcome.DELIVERED, "before the job ended", {"TransferOutputStats": SYNCHRONOUS}),
        # An older run was delivered, the last one was not handed off at all.
        (Outcome.DELIVERED, "before", {"TransferOutputStats": SYNCHRONOUS, "NumShadowStarts": 2, "StageOutRun": 1}),
        (Outcome.WAITING, "handed off: waiting for a report", {}),
        (Outcome.WAITING, "handed off: sending", {"StageOutState": "Moving"}),
        (Outcome.WAITING, "refused", {"StageOutState": "RetryWait", "StageOutReason": "connection refused"}),
        (Outcome.DELIVERED, "at its destination", {"StageOutState": "Delivered", "StageOutRun": 1}),
        # Delivered, but an older run: the last one is still on its way.
        (Outcome.WAITING, "for a report", {"StageOutState": "Delivered", "StageOutRun": 1, "NumShadowStarts": 2}),
        (Outcome.FAILED, "failed: full", {"StageOutState": "Failed", "StageOutReason": "full"}),
        (Outcome.FAILED, "cancelled", {"StageOutState": "Cancelled"}),
        (Outcome.WAITING, "run again", {"StageOutState": "Lost"}),
        (Outcome.FAILED, "lost: disk", {"StageOutState": "Lost", "DAGManJobId": 3, "StageOutReason": "disk"}),
        (Outcome.FAILED, "quota", {**OUR_HOLD, "StageOutState": "Failed"}),
        (Outcome.FAILED, "quota", {**OUR_HOLD, "StageOutState": "Lost"}),
        (Outcome.FAILED, "quota", OUR_HOLD),
        (Outcome.WAITING, "tried again (sending)", {**OUR_HOLD, "StageOutState": "Moving"}),
        (Outcome.WAITING, "is held: by alice", {"JobStatus": 5, "HoldReasonCode": 1, "HoldReason": "by alice"}),
        # A stock output failure has a sub-code below ours: it is the user's to release.
        (Outcome.WAITING, "is held", {"JobStatus": 5, "HoldReasonCode": 12, "HoldReasonSubCode": 256}),
        (Outcome.WAITING, "its handed-off output: delivered", {**PART_FAILED, "StageOutState": "Delivered"}),
    ],
)
def test_verdicts_on_jobs_in_the_queue(outcome: Outcome, words: str, changes: dict[str, Any]) -> None:
    verdict = judge_queued(job(**changes))
    assert verdict.outcome is outcome
    assert words in verdict.text


@pytest.mark.parametrize("state", list(State))
def test_no_state_leaves_a_waiter_without_a_verdict(state: State) -> None:
    moving_on = state in (State.OFFERED, State.ACCEPTED, State.CONFIRMED, State.LEASED, State.MOVING)
    verdict = judge_queued(job(StageOutState=state.value, StageOutRun=1))
    assert verdict.text
    if moving_on or state in (State.RETRY_WAIT, State.HANDED_OVER):
        assert verdict.outcome is Outcome.WAITING
    if state in (State.FAILED, State.CANCELLED):
        assert verdict.outcome is Outcome.FAILED


@pytest.mark.parametrize(
    ("outcome", "words", "changes"),
    [
        (Outcome.DELIVERED, "at its destination", {"StageOutState": "Delivered", "StageOutRun": 1}),
        (Outcome.DELIVERED, "before the job ended", {"TransferOutputStats": SYNCHRONOUS}),
        (Outcome.DELIVERED, "before the job ended", {"TransferOutputStats": None}),
        (Outcome.FAILED, "removed", {"JobStatus": 3, "StageOutState": "Delivered", "StageOutRun": 1}),
        (Outcome.FAILED, "removed", {"JobStatus": 3}),
        (Outcome.FAILED, "last known: sending", {"StageOutState": "Moving"}),
        (Outcome.FAILED, "cancelled: by its owner", {"StageOutState": "Cancelled", "StageOutReason": "by its owner"}),
        (Outcome.FAILED, "before", {"StageOutState": "Delivered", "StageOutRun": 1, "NumShadowStarts": 2}),
    ],
)
def test_verdicts_on_jobs_that_left(outcome: Outcome, words: str, changes: dict[str, Any]) -> None:
    verdict = judge_history(job(**changes))
    assert verdict.outcome is outcome
    assert words in verdict.text


D, F, W = Outcome.DELIVERED, Outcome.FAILED, Outcome.WAITING


@pytest.mark.parametrize(
    ("status", "outcomes", "returned"),
    [
        (0, [D, D], 0),
        (1, [D, F], 0),
        (1, [F, W], 0),
        (2, [D, W], 0),
        (2, [W], 7),
        (7, [D], 7),
        (7, [F], 7),
        (1, [D], 2),
        (1, [D], -9),
        (1, [D], -1002),
        (1, [D], 256),
    ],
)
def test_exit_status_of_wait(status: int, outcomes: list[Outcome], returned: int) -> None:
    assert wait_status(outcomes, returned) == status


def test_a_failed_job_never_looks_timed_out_or_fine() -> None:
    assert all(own_status(value) not in (0, 2) for value in range(-2000, 2000) if value)
