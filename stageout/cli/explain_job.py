"""The explanation of a job whose output is being sent or was handed off: its history and its state."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from stageout.cli import render
from stageout.cli.jobs import Job, JobId
from stageout.cli.outputs import Output
from stageout.cli.rows import Row
from stageout.cli.status import look
from stageout.cli.verdict import Outcome, judge_history, judge_queued
from stageout.core.units import count, size
from stageout.model.job import Status

if TYPE_CHECKING:
    from stageout.cli.condor import Pool, Queue


class Story(NamedTuple):
    """The past and the present of a job's output.

    :param delivery: "hand-off", "synchronous", "none" or "unknown", the code of the reason and a sentence.
    :param state: state of the output, in a word. :param failed: nothing more is sent unless a person acts.
    :param facts: names and texts, as ``stageout status JOB`` shows them. :param open: some output is not sent yet.
    """

    delivery: tuple[str, str, str]
    state: str
    failed: bool
    facts: Sequence[tuple[str, str]]
    open: bool


def story(job: Job, outputs: Sequence[Output], queue: Queue, pool: Pool) -> Story | None:
    """Return the history of a job's output; None if its transfer has not begun.

    :raises Unavailable: the schedd does not answer. :raises UnknownJob: the job has left the queue in the meantime.
    """
    has_ended = job.status in (Status.COMPLETED, Status.REMOVED) or job.held_by_stage_out or job.held_after_handoff
    if not has_ended and job.status != Status.TRANSFERRING:
        return None
    seen = look(queue, pool, [JobId(job.id.cluster, job.id.proc)], None, {})
    row, now = seen.rows[0], time.time()
    if not has_ended and not row.synchronous_code:
        return None
    verdict = judge_queued(job) if job.in_queue else judge_history(job)
    failed = has_ended and verdict.outcome is Outcome.FAILED
    facts = [(name, text) for name, text in render.facts(row, now) if text and name not in ("code", "output")]
    notes = [("note", note) for note in seen.notes]
    is_open = job.in_queue and (job.in_stage_out or not has_ended)
    return Story(_delivery(row, outputs, has_ended), render.state_word(row), failed, [*facts, *notes], is_open)


def _delivery(row: Row, outputs: Sequence[Output], has_ended: bool) -> tuple[str, str, str]:
    if row.files_total:
        amount = f"{count(row.files_total, 'file')}, {size(row.bytes_total)}"
        return "hand-off", "", f"{amount} were handed off when the job ended, and its slot was free"
    if not outputs:
        return "none", "", "no output goes to a URL: it returned to the access point when the job ended"
    if row.synchronous or row.synchronous_code:
        verb = "held" if has_ended else "holds"
        code = f" ({row.synchronous_code})" if row.synchronous_code else ""
        reason = f": {row.reason}" if row.reason else ""
        return "synchronous", row.synchronous_code, f"while the job {verb} its slot{code}{reason}"
    return "unknown", "", "nothing was handed off"
