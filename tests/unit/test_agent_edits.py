"""Recipes of the schedd agent: what is written, in which order, and under which condition."""

from __future__ import annotations

from typing import Any

from schedd_agent.edits import Edit, ToolCommand, edit_for
from schedd_agent.model import (
    ClearRequest,
    Complete,
    Effect,
    Hold,
    LeaveQueue,
    MarkDelivered,
    Remove,
    Rerun,
    RestoreHoldReason,
    UpdateAdState,
)
from stageout.model.job import Job, JobAdState, Status

_OLD = JobAdState("Moving", 2, "moving", 10, 2, 1, 0, "m1")


def _job(status: int = Status.COMPLETED, **more: Any) -> Job:
    return Job("ap#7.3#17", 7, 3, status, 2, "alice@test", **{"ad_state": _OLD, "completions": 2, "reruns": 1, **more})


def _edit(effect: Effect, job: Job | None = None) -> Edit:
    edit = edit_for(job or _job(), effect, 1234.9)
    assert edit is not None
    return edit


def test_only_changes_are_written_and_the_state_comes_last() -> None:
    edit = _edit(UpdateAdState(JobAdState("RetryWait", 2, 'says "no"', 10, 2, 2, 99, "m1")))
    assert edit.plain == (("StageOutAttempts", "2"), ("StageOutNextAttempt", "99"))
    assert edit.logged == (("StageOutReason", '"says \\"no\\""'), ("StageOutState", '"RetryWait"'))
    assert edit.atomic == ()
    assert edit.job_id == "7.3"


def test_delivery_writes_the_figures_before_the_state_that_lets_the_job_go() -> None:
    edit = _edit(MarkDelivered(JobAdState("Delivered", 3, "done"), {"Bytes": 10, "VerifiedBy": "size"}))
    assert edit.plain[0] == ("StageOutStats", '[ Bytes = 10; VerifiedBy = "size" ]')
    assert ("StageOutRun", "3") in edit.plain
    assert edit.logged[-1] == ("StageOutState", '"Delivered"')
    assert edit.label == "edit-delivered"


def test_a_hold_changes_the_status_in_one_transaction_of_the_same_run() -> None:
    edit = _edit(Hold(JobAdState("Failed", 2, "why"), 20072, "Stage-out failed: no\nroom"))
    assert dict(edit.atomic) == {
        "HoldReason": '"Stage-out failed: no\\nroom"',
        "HoldReasonCode": "12",
        "HoldReasonSubCode": "20072",
        "StageOutUntold": "2",
        "TerminationPending": "false",
        "EnteredCurrentStatus": "1234",
        "JobStatus": "5",
    }
    assert edit.condition == "ClusterId == 7 && ProcId == 3 && JobStatus == 4 && NumShadowStarts == 2"


def test_the_schedd_is_asked_for_the_event_of_the_hold_when_the_job_is_held() -> None:
    edit = _edit(Hold(JobAdState("Failed", 2, "why"), 20072, 'dest says "no"'))
    held = "ClusterId == 7 && ProcId == 3 && JobStatus == 5 && NumShadowStarts == 2"
    assert edit.command == ToolCommand("condor_hold", 'dest says \\"no\\"', held, ("-subcode", "20072"))


def test_after_the_event_the_ad_says_what_it_said_before() -> None:
    edit = _edit(RestoreHoldReason(20072, "no room"), _job(hold_counts={"UserRequest": 2, "TransferOutputError": 1}))
    assert dict(edit.atomic) == {
        "HoldReason": '"no room"',
        "HoldReasonCode": "12",
        "HoldReasonSubCode": "20072",
        "NumHolds": "4",
        "NumHoldsByReason": "[ UserRequest = 2; TransferOutputError = 2 ]",
        "StageOutUntold": "0",
    }
    assert edit.told == (("HoldReasonCode", "12"),), "event 033 corrects the code of event 012"
    assert not edit.is_groupable
    assert edit.condition == "ClusterId == 7 && ProcId == 3 && JobStatus == 5 && NumShadowStarts == 2"


def test_a_rerun_takes_the_completion_back() -> None:
    edit = _edit(Rerun(JobAdState(run=2, reason="lost")))
    assert dict(edit.atomic) == {
        "TerminationPending": "false",
        "CompletionDate": "0",
        "NumJobCompletions": "1",
        "StageOutReruns": "2",
        "EnteredCurrentStatus": "1234",
        "JobStatus": "1",
    }
    assert edit.logged[-1] == ("StageOutState", '"None"')


def test_a_held_job_is_released_into_being_completed() -> None:
    edit = _edit(Complete("delivered"), _job(Status.HELD))
    assert dict(edit.atomic) == {"TerminationPending": "true", "JobStatusOnRelease": "4"}
    held = "ClusterId == 7 && ProcId == 3 && JobStatus == 5 && NumShadowStarts == 2"
    assert edit.condition == held
    assert edit.command == ToolCommand("condor_release", "delivered", f"{held} && JobStatusOnRelease =?= 4")


def test_what_is_left() -> None:
    assert _edit(LeaveQueue()).plain == (("LeaveJobInQueue", "(StageOutUserLeave ?: false)"),)
    assert _edit(ClearRequest()).plain == (("StageOutRequest", "undefined"),)
    refused = (("StageOutRefused", '"r1 no \\"x\\""'), ("StageOutRequest", "undefined"))
    assert _edit(ClearRequest('r1 no "x"')).plain == refused, "the answer is there when the request is gone"
    assert edit_for(_job(), Remove("its DAG was removed"), 0.0) is None


def test_values_are_literals() -> None:
    """An expression such as time() would be evaluated again and again."""
    effects: list[Effect] = [
        UpdateAdState(JobAdState("Lost", 1, "time()")),
        Hold(JobAdState(), 20001, "x"),
        Rerun(JobAdState()),
        RestoreHoldReason(20001, "x"),
        Complete("x"),
        MarkDelivered(JobAdState(), {}),
    ]
    for effect in effects:
        edit = _edit(effect)
        for _, value in (*edit.plain, *edit.logged, *edit.told, *edit.atomic):
            assert value.startswith(('"', "[")) or value in ("true", "false", "undefined") or value.isdigit()
