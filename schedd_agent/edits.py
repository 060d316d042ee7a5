"""The attributes that each effect changes in a job's ad, and their order. Pure.

The order was found by trial on unmodified HTCondor (``docs/developer/queue-edits.md``). Attributes that decide about a
job's life go into one transaction, which applies only while the job is in the state that was decided on. All others may
be written again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from schedd_agent.model import (
    ClearRequest,
    Complete,
    Effect,
    Hold,
    KeepInQueue,
    LeaveQueue,
    MarkDelivered,
    Rerun,
    RestoreHoldReason,
    UpdateAdState,
)
from stageout.core.classads import quote, unparse
from stageout.model.job import HOLD_CODE, HOLD_NAME, Job, JobAdState, Status

Pair = tuple[str, str]


class Change(NamedTuple):
    """An attribute with its literal. :param is_logged: event 033 in the job's log."""

    name: str
    value: str
    is_logged: bool = False


# LeaveJobInQueue and `stageout wait` read the last one. All other attributes are written before it.
_LOGGED = ("StageOutReason", "StageOutState")
_COMPLETED = int(Status.COMPLETED)
# The release writes event 013, clears the hold reason, and the job is never idle.
_COMPLETED_ON_RELEASE = (("TerminationPending", "true"), ("JobStatusOnRelease", str(_COMPLETED)))


@dataclass(frozen=True)
class ToolCommand:
    """A command of HTCondor that writes an event into the job's log.

    :param tool: name of the command. :param options: options beside the reason. :param condition: its constraint.
    """

    tool: str
    reason: str
    condition: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Edit:
    """Changes of one job's ad, in this order.

    :param label: durable step. :param plain: attributes and literals, written one by one.
    :param logged: written as well, with event 033 in the job's log.
    :param told: written with event 033, only if ``condition`` holds.
    :param atomic: attributes and literals in one transaction, only if ``condition`` holds.
    :param command: command to run after that. If it fails, only its event is missing.
    """

    label: str
    cluster: int
    proc: int
    plain: tuple[Pair, ...] = ()
    logged: tuple[Pair, ...] = ()
    told: tuple[Pair, ...] = ()
    atomic: tuple[Pair, ...] = ()
    condition: str = ""
    command: ToolCommand | None = None

    @property
    def job_id(self) -> str:
        """Return ``cluster.proc``."""
        return f"{self.cluster}.{self.proc}"

    @property
    def changes(self) -> list[Change]:
        """Return the attributes that are written one by one, in their order."""
        return [*(Change(*pair) for pair in self.plain), *(Change(*pair, is_logged=True) for pair in self.logged)]

    @property
    def is_groupable(self) -> bool:
        """Tell whether other jobs may share its transactions."""
        return not (self.told or self.atomic or self.command)


def edit_for(job: Job, effect: Effect, wall_s: float) -> Edit | None:
    """Return the edit of an effect; None for effects that change no ad.

    :param wall_s: wall clock, which becomes EnteredCurrentStatus as a literal.
    """
    if isinstance(effect, UpdateAdState):
        return _edit(job, "edit-progress", effect.ad_state)
    if isinstance(effect, MarkDelivered):
        shown = _without_new_facts(job.ad_state, effect.ad_state)
        return _edit(job, "edit-delivered", shown, more=(("StageOutStats", unparse(effect.stats)),))
    if isinstance(effect, Hold):
        return _edit(
            job, "edit-hold", effect.ad_state, atomic=_held_state(job, effect, wall_s), command=_hold_event(job, effect)
        )
    if isinstance(effect, RestoreHoldReason):
        edit = _edit(job, "edit-hold-told", atomic=_restored_hold(job, effect))
        # Event 012 says 1, the only code that condor_hold sets. Event 033 corrects it.
        return replace(edit, told=(("HoldReasonCode", str(HOLD_CODE)),), condition=_held_run(job))
    if isinstance(effect, Rerun):
        return _edit(job, "edit-rerun", effect.ad_state, atomic=_idle_state(job, wall_s))
    if isinstance(effect, Complete):
        release = ToolCommand(
            "condor_release", effect.reason, f"{_held_run(job)} && JobStatusOnRelease =?= {_COMPLETED}"
        )
        return _edit(job, "edit-complete", atomic=_COMPLETED_ON_RELEASE, command=release)
    if isinstance(effect, LeaveQueue):
        return _edit(job, "edit-let-go", more=(("LeaveJobInQueue", "(StageOutUserLeave ?: false)"),))
    if isinstance(effect, KeepInQueue):
        return _edit(job, "edit-keep", more=(("StageOutKeptUntil", str(effect.until)),))
    if isinstance(effect, ClearRequest):
        answer = (("StageOutRefused", quote(effect.refused)),) if effect.refused else ()
        return _edit(job, "edit-request", more=(*answer, ("StageOutRequest", "undefined")))
    return None


def _edit(
    job: Job,
    label: str,
    ad_state: JobAdState | None = None,
    more: tuple[Pair, ...] = (),
    atomic: tuple[Pair, ...] = (),
    command: ToolCommand | None = None,
) -> Edit:
    changed = tuple(_changes(job.ad_state, ad_state)) if ad_state else ()
    return Edit(
        label,
        job.cluster,
        job.proc,
        plain=(*more, *(pair for pair in changed if pair[0] not in _LOGGED)),
        logged=tuple(pair for name in _LOGGED for pair in changed if pair[0] == name),
        atomic=atomic,
        condition=_run_in(job, job.status),
        command=command,
    )


def _without_new_facts(old: JobAdState, new: JobAdState) -> JobAdState:
    """Return the state of delivered output without facts that the ad never had: they are about the time before.

    StageOutStats has the number of attempts. Each transaction costs the schedd a write to its disk.
    """
    return replace(
        new,
        attempts=new.attempts if old.attempts else 0,
        manager=new.manager if old.manager else "",
        keys=new.keys if old.keys else "",
    )


def _changes(old: JobAdState, new: JobAdState) -> Iterator[Pair]:
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


def _hold_facts(effect: Hold | RestoreHoldReason) -> tuple[Pair, ...]:
    return (
        ("HoldReason", quote(effect.reason)),
        ("HoldReasonCode", str(HOLD_CODE)),
        ("HoldReasonSubCode", str(effect.subcode)),
    )


def _held_state(job: Job, effect: Hold, wall_s: float) -> tuple[Pair, ...]:
    return (
        *_hold_facts(effect),
        ("StageOutUntold", str(job.run)),
        ("TerminationPending", "false"),
        ("EnteredCurrentStatus", str(int(wall_s))),
        ("JobStatus", str(int(Status.HELD))),
    )


def _hold_event(job: Job, effect: Hold) -> ToolCommand:
    """Return the command that holds the held job again: the schedd writes event 012 only for such a command."""
    escaped = quote(effect.reason)[1:-1]  # the schedd adds quotes and escapes nothing
    return ToolCommand("condor_hold", escaped, _held_run(job), ("-subcode", str(effect.subcode)))


def _restored_hold(job: Job, effect: RestoreHoldReason) -> tuple[Pair, ...]:
    """Restore the code, the reason and the number of holds that condor_hold has overwritten."""
    counts = {**job.hold_counts, HOLD_NAME: job.hold_counts.get(HOLD_NAME, 0) + (job.status != Status.HELD)}
    return (
        *_hold_facts(effect),
        ("NumHolds", str(sum(counts.values()))),
        ("NumHoldsByReason", unparse(counts)),
        ("StageOutUntold", "0"),
    )


def _idle_state(job: Job, wall_s: float) -> tuple[Pair, ...]:
    return (
        ("TerminationPending", "false"),
        ("CompletionDate", "0"),
        ("NumJobCompletions", str(max(0, job.completions - 1))),
        ("StageOutReruns", str(job.reruns + 1)),
        ("EnteredCurrentStatus", str(int(wall_s))),
        ("JobStatus", str(int(Status.IDLE))),
    )
