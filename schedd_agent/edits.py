"""Recipes: which attributes of a job an effect changes, in which order. Pure.

Found by trial on unmodified HTCondor (``docs/SCHEDD.md``, "Edits"). All that decides about a job's life goes in one
transaction that happens only while the job still is what the decision was about; everything else may be repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from schedd_agent.model import (
    HOLD_CODE,
    ClearRequest,
    Complete,
    Deliver,
    Effect,
    Hold,
    Job,
    LetGo,
    Rerun,
    Show,
    Shown,
    Status,
)
from stageout.core.classads import quote, unparse

Pair = tuple[str, str]

# The last one is what the guard and `stageout wait` look at: everything else is there before it.
_LOGGED = ("StageOutReason", "StageOutState")


@dataclass(frozen=True)
class Edit:
    """Changes of one job, in this order.

    :param label: durable step. :param plain: attribute and literal, one by one.
    :param logged: likewise, with an event 033 in the job's log.
    :param atomic: in one transaction, only if ``condition`` holds.
    """

    label: str
    cluster: int
    proc: int
    plain: tuple[Pair, ...] = ()
    logged: tuple[Pair, ...] = ()
    atomic: tuple[Pair, ...] = ()
    condition: str = ""

    @property
    def job_id(self) -> str:
        """``cluster.proc``."""
        return f"{self.cluster}.{self.proc}"


def edit_for(job: Job, effect: Effect, wall_s: float) -> Edit | None:
    """The edit that an effect asks for; None for effects that are no edit.

    :param wall_s: becomes EnteredCurrentStatus, always as a literal.
    """
    if isinstance(effect, Show):
        return _edit(job, "edit-progress", effect.shown)
    if isinstance(effect, Deliver):
        return _edit(job, "edit-delivered", effect.shown, more=(("StageOutStats", unparse(effect.stats)),))
    if isinstance(effect, Hold):
        return _edit(job, "edit-hold", effect.shown, more=tuple(_hold_facts(effect)), atomic=_held(wall_s))
    if isinstance(effect, Rerun):
        return _edit(job, "edit-rerun", effect.shown, atomic=_idle(job, wall_s))
    if isinstance(effect, Complete):
        return _edit(job, "edit-complete", atomic=_completed(wall_s))
    if isinstance(effect, LetGo):
        return _edit(job, "edit-let-go", more=(("LeaveJobInQueue", "(StageOutUserLeave ?: false)"),))
    if isinstance(effect, ClearRequest):
        return _edit(job, "edit-request", more=(("StageOutRequest", "undefined"),))
    return None


def _edit(
    job: Job, label: str, shown: Shown | None = None, more: tuple[Pair, ...] = (), atomic: tuple[Pair, ...] = ()
) -> Edit:
    changed = tuple(_changes(job.shown, shown)) if shown else ()
    return Edit(
        label,
        job.cluster,
        job.proc,
        plain=(*more, *(pair for pair in changed if pair[0] not in _LOGGED)),
        logged=tuple(pair for name in _LOGGED for pair in changed if pair[0] == name),
        atomic=atomic,
        condition=_same_run(job),
    )


def _changes(old: Shown, new: Shown) -> Iterator[Pair]:
    for name, before, after in (
        ("StageOutRun", old.run, new.run),
        ("StageOutBytesLeft", old.bytes_left, new.bytes_left),
        ("StageOutFilesLeft", old.files_left, new.files_left),
        ("StageOutAttempts", old.attempts, new.attempts),
        ("StageOutNextAttempt", old.next_attempt_at, new.next_attempt_at),
        ("StageOutManager", old.manager, new.manager),
        ("StageOutKeys", old.keys, new.keys),
        ("StageOutCustody", old.custody, new.custody),
        ("StageOutReason", old.reason, new.reason),
        ("StageOutState", old.state, new.state),
    ):
        if before != after:
            yield name, quote(after) if isinstance(after, str) else str(after)


def _same_run(job: Job) -> str:
    return (
        f"ClusterId == {job.cluster} && ProcId == {job.proc} && JobStatus == {int(job.status)} "
        f"&& NumShadowStarts == {job.run}"
    )


def _hold_facts(effect: Hold) -> Iterator[Pair]:
    # Without meaning while the job is Completed, so they need not be in the transaction, which is dear in a long queue.
    yield "HoldReason", quote(effect.reason)
    yield "HoldReasonCode", str(HOLD_CODE)
    yield "HoldReasonSubCode", str(effect.subcode)


def _held(wall_s: float) -> tuple[Pair, ...]:
    return (
        ("TerminationPending", "false"),
        ("EnteredCurrentStatus", str(int(wall_s))),
        ("JobStatus", str(int(Status.HELD))),
    )


def _idle(job: Job, wall_s: float) -> tuple[Pair, ...]:
    return (
        ("TerminationPending", "false"),
        ("CompletionDate", "0"),
        ("NumJobCompletions", str(max(0, job.completions - 1))),
        ("StageOutReruns", str(job.reruns + 1)),
        ("EnteredCurrentStatus", str(int(wall_s))),
        ("JobStatus", str(int(Status.IDLE))),
    )


def _completed(wall_s: float) -> tuple[Pair, ...]:
    return (
        ("TerminationPending", "true"),
        ("HoldReason", "undefined"),
        ("HoldReasonCode", "undefined"),
        ("HoldReasonSubCode", "undefined"),
        ("EnteredCurrentStatus", str(int(wall_s))),
        ("JobStatus", str(int(Status.COMPLETED))),
    )
