"""The meaning of a job's ad for a user who waits for its output. Pure."""

from __future__ import annotations

import enum
from typing import NamedTuple

from stageout.cli.exits import Exit
from stageout.cli.jobs import STATUS_WORDS, Job
from stageout.core.states import ENDS, State, plain_word
from stageout.model.job import Status


class Outcome(enum.Enum):
    """The progress of a job."""

    DELIVERED = "delivered"
    FAILED = "failed"
    WAITING = "waiting"


class Verdict(NamedTuple):
    """An outcome and one sentence about it."""

    outcome: Outcome
    text: str


#: The word for handed-off output before the first report about it.
UNREPORTED = "waiting for a report"
#: Final states.
GAVE_UP = frozenset({State.FAILED.value, State.LOST.value, State.CANCELLED.value})


def judge_queued(job: Job) -> Verdict:
    """Judge a job that is in the queue."""
    if job.status == Status.REMOVED:
        return Verdict(Outcome.FAILED, f"removed from the queue: {job.remove_reason or 'no reason given'}")
    if job.status == Status.HELD:
        return _judge_held(job)
    if job.status != Status.COMPLETED:
        return Verdict(Outcome.WAITING, f"the job is {STATUS_WORDS.get(job.status, 'in an unknown status')}")
    if not job.handed_off:
        return Verdict(Outcome.DELIVERED, "its output was transferred before the job ended")
    return _judge_stage_out(job)


def _judge_held(job: Job) -> Verdict:
    if not job.held_by_stage_out:
        handed_off = f"; its handed-off output: {plain_word(job.state)}" if job.held_after_handoff else ""
        return Verdict(Outcome.WAITING, f"the job is held: {job.hold_reason}{handed_off}")
    if job.state in GAVE_UP or job.state == "None":
        return Verdict(Outcome.FAILED, job.hold_reason or job.reason)
    return Verdict(Outcome.WAITING, f"its output is tried again ({plain_word(job.state)})")


def _judge_stage_out(job: Job) -> Verdict:
    if job.delivered:
        return Verdict(Outcome.DELIVERED, "its output is at its destination")
    if job.state == State.LOST and not job.in_dag:
        return Verdict(Outcome.WAITING, f"its output was lost; the job will run again: {job.reason}")
    if job.state in GAVE_UP:
        return Verdict(Outcome.FAILED, f"{plain_word(job.state)}: {job.reason or 'no reason given'}")
    return Verdict(Outcome.WAITING, f"its output was handed off: {_progress(job)}")


def _progress(job: Job) -> str:
    """Return the progress of the delivery. The ad may still show the end of an older run."""
    if job.state == "None" or job.state in ENDS:
        return UNREPORTED
    return plain_word(job.state) + (_detail(job.reason) if job.state == State.RETRY_WAIT else "")


def _detail(reason: str) -> str:
    return f": {reason}" if reason else ""


def judge_history(job: Job) -> Verdict:
    """Judge a job that has left the queue."""
    if job.status == Status.REMOVED:
        return Verdict(Outcome.FAILED, f"removed from the queue: {job.remove_reason or 'no reason given'}")
    if not job.handed_off:
        return Verdict(Outcome.DELIVERED, "its output was transferred before the job ended")
    if job.delivered:
        return Verdict(Outcome.DELIVERED, "its output is at its destination")
    if job.state in GAVE_UP:
        return Verdict(Outcome.FAILED, f"{plain_word(job.state)}: {job.reason or 'no reason given'}")
    return Verdict(
        Outcome.FAILED,
        f"it left the queue before its output was known to be delivered ({_last(job)})",
    )


def _last(job: Job) -> str:
    if job.state == "None":
        return f"last known: {UNREPORTED}"
    return f"last known: {plain_word(job.state)}{_detail(job.reason)}"


def wait_status(outcomes: list[Outcome], returned: int) -> int:
    """Choose the exit status of ``stageout wait`` for the outcomes at its end.

    :param returned: exit status of the job itself, as DAGMan's ``$RETURN`` gives it (0: succeeded).
    :returns: TIMED_OUT when nothing failed and a job still waits; the job's own status when the job failed.
    """
    if Outcome.FAILED in outcomes:
        return own_status(returned) or Exit.FAILED
    if Outcome.WAITING in outcomes:
        return Exit.TIMED_OUT
    return own_status(returned)


def own_status(returned: int) -> int:
    """Map a job's exit status to one of the command's: 1 for signals, DAGMan's own codes, and for 2 (timed out)."""
    if returned == 0:
        return Exit.OK
    return returned if 0 < returned < 256 and returned != Exit.TIMED_OUT else Exit.FAILED
