"""Recipes: which attributes of a job an effect changes, in which order. Pure.

Found by trial on unmodified HTCondor (``docs/SCHEDD.md``, "Edits"). All that decides about a job's life goes in one
transaction that happens only while the job still is what the decision was about; everything else may be repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from schedd_agent.model import (
    HOLD_CODE,
    HOLD_NAME,
    ClearRequest,
    Complete,
    Deliver,
    Effect,
    Hold,
    Job,
    Keep,
    LetGo,
    Rerun,
    Show,
    Shown,
    Status,
    Told,
)
from stageout.core.classads import quote, unparse

Pair = tuple[str, str]

# The last one is what the guard and `stageout wait` look at: everything else is there before it.
_LOGGED = ("StageOutReason", "StageOutState")
_COMPLETED = int(Status.COMPLETED)
# The release writes event 013, clears the reason of the hold and never lets the job be idle.
_COMPLETED_ON_RELEASE = (("TerminationPending", "true"), ("JobStatusOnRelease", str(_COMPLETED)))


@dataclass(frozen=True)
class Act:
    """A command of HTCondor that writes an event into the job's log.

    :param tool: its name. :param options: beside the reason. :param condition: jobs that it concerns.
    """

    tool: str
    reason: str
    condition: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Edit:
    """Changes of one job, in this order.

    :param label: durable step. :param plain: attribute and literal, one by one.
    :param logged: likewise, with an event 033 in the job's log.
    :param atomic: in one transaction, only if ``condition`` holds.
    :param act: after that; a refusal costs only the event.
    """

    label: str
    cluster: int
    proc: int
    plain: tuple[Pair, ...] = ()
    logged: tuple[Pair, ...] = ()
    atomic: tuple[Pair, ...] = ()
    condition: str = ""
    act: Act | None = None

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
        return _edit(job, "edit-hold", effect.shown, atomic=_held(job, effect, wall_s), act=_hold_event(job, effect))
    if isinstance(effect, Told):
        return replace(_edit(job, "edit-hold-told", atomic=_told(job, effect)), condition=_held_run(job))
    if isinstance(effect, Rerun):
        return _edit(job, "edit-rerun", effect.shown, atomic=_idle(job, wall_s))
    if isinstance(effect, Complete):
        release = Act("condor_release", effect.reason, f"{_held_run(job)} && JobStatusOnRelease =?= {_COMPLETED}")
        return _edit(job, "edit-complete", atomic=_COMPLETED_ON_RELEASE, act=release)
    if isinstance(effect, LetGo):
        return _edit(job, "edit-let-go", more=(("LeaveJobInQueue", "(StageOutUserLeave ?: false)"),))
    if isinstance(effect, Keep):
        return _edit(job, "edit-keep", more=(("StageOutKeptUntil", str(effect.until)),))
    if isinstance(effect, ClearRequest):
        return _edit(job, "edit-request", more=(("StageOutRequest", "undefined"),))
    return None


def _edit(
    job: Job,
    label: str,
    shown: Shown | None = None,
    more: tuple[Pair, ...] = (),
    atomic: tuple[Pair, ...] = (),
    act: Act | None = None,
) -> Edit:
    changed = tuple(_changes(job.shown, shown)) if shown else ()
    return Edit(
        label,
        job.cluster,
        job.proc,
        plain=(*more, *(pair for pair in changed if pair[0] not in _LOGGED)),
        logged=tuple(pair for name in _LOGGED for pair in changed if pair[0] == name),
        atomic=atomic,
        condition=_run_in(job, job.status),
        act=act,
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


def _run_in(job: Job, status: int) -> str:
    return (
        f"ClusterId == {job.cluster} && ProcId == {job.proc} && JobStatus == {int(status)} "
        f"&& NumShadowStarts == {job.run}"
    )


def _held_run(job: Job) -> str:
    return _run_in(job, Status.HELD)


def _hold_facts(effect: Hold | Told) -> tuple[Pair, ...]:
    return (
        ("HoldReason", quote(effect.reason)),
        ("HoldReasonCode", str(HOLD_CODE)),
        ("HoldReasonSubCode", str(effect.subcode)),
    )


def _held(job: Job, effect: Hold, wall_s: float) -> tuple[Pair, ...]:
    return (
        *_hold_facts(effect),
        ("StageOutUntold", str(job.run)),
        ("TerminationPending", "false"),
        ("EnteredCurrentStatus", str(int(wall_s))),
        ("JobStatus", str(int(Status.HELD))),
    )


def _hold_event(job: Job, effect: Hold) -> Act:
    """Hold the held job once more: the schedd allows that to a user's command, and writes event 012 for it."""
    escaped = quote(effect.reason)[1:-1]  # the schedd puts it between quotes as it is
    return Act("condor_hold", escaped, _held_run(job), ("-subcode", str(effect.subcode)))


def _told(job: Job, effect: Told) -> tuple[Pair, ...]:
    """Restore what condor_hold has overwritten: its code 1, its user's name, and the hold that it counted again."""
    counts = {**job.hold_counts, HOLD_NAME: job.hold_counts.get(HOLD_NAME, 0) + (job.status != Status.HELD)}
    return (
        *_hold_facts(effect),
        ("NumHolds", str(sum(counts.values()))),
        ("NumHoldsByReason", unparse(counts)),
        ("StageOutUntold", "0"),
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
