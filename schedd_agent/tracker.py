"""The decision on one job: a pure function of the agent's knowledge. Reads no clock, does no I/O.

Nothing is remembered between two decisions but what :class:`~schedd_agent.model.Situation` carries, so a decision
after a crash is the same decision again. The rules are those of ``docs/SCHEDD.md``, "Decisions".
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from schedd_agent.model import (
    GOOD_ENDS,
    HOLD_SUBCODE_BASE,
    HOLDING,
    NOTHING_YET,
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
    Record,
    Remove,
    Request,
    Rerun,
    Seen,
    Send,
    Show,
    Shown,
    Situation,
    Status,
    Ticket,
    Told,
    name_of,
)
from stageout.core.errors import ErrorClass
from stageout.core.states import ENDS, FREED, State
from stageout.wire.custody import Action, SandboxReport
from stageout.wire.deposits import read_holdings
from stageout.wire.typed import MOST_NUMBER

_RERUN_ADVICE = "`condor_release` runs the job again"
_RETRY_ADVICE = f"`stageout retry` sends it again, {_RERUN_ADVICE}"
#: What must be done before a retry can help.
_BEFORE_A_RETRY = {
    ErrorClass.PERMISSION_DENIED: "when you may write there",
    ErrorClass.NO_SPACE_REMOTE: "when there is room",
    ErrorClass.QUOTA_EXCEEDED: "when there is room",
    ErrorClass.TLS_UNTRUSTED: "when that certificate is in order",
    ErrorClass.CREDENTIAL_REFUSED: "when the credential is a good one",
    ErrorClass.CREDENTIAL_EXPIRED: "when the credential is renewed (one in the URL itself cannot be)",
    ErrorClass.PLUGIN_BROKEN: "when the administrator of its node has mended that",
}
#: Nothing changes a URL of output that waits.
_WRONG_URL = frozenset(
    {ErrorClass.BAD_URL, ErrorClass.NAME_NOT_RESOLVED, ErrorClass.NOT_SUPPORTED, ErrorClass.CREDENTIAL_MISSING}
)
_URL_ADVICE = (
    "`stageout retry` sends it to the same URL again; for another one set OutputDestination with `condor_qedit`, "
    f"then {_RERUN_ADVICE}"
)
_GONE_ADVICE = f"its bytes are no longer on the node, so `stageout retry` cannot help; {_RERUN_ADVICE}"
_AT_WORK = (Status.RUNNING, Status.TRANSFERRING, Status.SUSPENDED)
_GOING_ON = (Status.IDLE, *_AT_WORK)
#: Of what routers have, so much stands in a job's ad.
_HOLDINGS_SHOWN, _HOLDING_CHARS = 8, 500
_HOLD_REASON_CHARS = 2000


def decide(s: Situation, limits: Limits) -> list[Effect]:
    """Effects for one job, in the order in which they must happen."""
    if s.job is None:
        return [*_gone(s)]
    is_dag_removed = s.dag is Dag.REMOVED and s.job.shown.state not in (State.DELIVERED, State.CANCELLED)
    if is_dag_removed and s.job.is_kept:
        return [*_cancel_with_its_dag(s, s.job)]
    record = _effective_record(s, s.job)
    own = _own(s, s.job, record)
    effects: list[Effect] = [*_fence(s, s.job, record, own, limits)]
    if not s.job.settling:
        return [*effects, *_tidy(s, s.job, limits)]
    if s.job.dag and is_dag_removed:
        # The schedd spares completed nodes when it removes a DAG's jobs; their removal cancels the stage-out.
        return [*effects, Remove("its DAG was removed")]
    effects += _keep(s, s.job, limits)
    if record is None:
        return [*effects, *_no_record(s, s.job, limits)]
    return [*effects, *_settle(s, s.job, record, own, limits)]


def _cancel_with_its_dag(s: Situation, job: Job) -> Iterator[Effect]:
    """Cancel the stage-out of a node that DAGMan removed because the owner removed the DAG, and let the node go."""
    for item in s.seen:
        if item.sandbox.state not in FREED:
            yield Send(item.manager, Action.CANCEL, item.sandbox.number)
    yield from _let_go(job, Shown(State.CANCELLED.value, job.run, "its DAG was removed"))


def _keep(s: Situation, job: Job, limits: Limits) -> Iterator[Effect]:
    """A job does not leave before the end of its output is known, however long that takes, while an agent watches."""
    until = max(job.kept_until, job.entered_at + limits.leave_s)
    if job.status == Status.COMPLETED and job.shown.state not in ENDS and until - s.wall_s < limits.leave_s / 2:
        yield Keep(int(s.wall_s + limits.leave_s))


# ---- which sandboxes belong to the run that counts --------------------------------------------------------------


def _effective_record(s: Situation, job: Job) -> Record | None:
    """The AP's record; where it writes none (or the owner insists), what the managers report, if the count agrees."""
    if not job.settling or (s.record is not None and s.record.tickets):
        return s.record
    found = [item for item in s.seen if item.sandbox.number == _reported_run(s, job)]
    if not found or sum(item.sandbox.files_total for item in found) != job.handed_off:
        return None
    if s.records_written and job.request != Request.RETRY and not _is_known(job, found):
        return None
    return Record(tuple(ticket for item in found for ticket in _reported_tickets(item)))


def _is_known(job: Job, found: Sequence[Seen]) -> bool:
    """True when this output was confirmed: by a record that has been rotated away since, or because its owner insisted.

    The job's ad has kept the keys of its managers, and their names.
    """
    named = job.shown.run == job.run and {item.manager_name for item in found} <= set(job.shown.manager.split(","))
    unknown = (State.ACCEPTED,) if named else (State.ACCEPTED, *FREED)
    begun = any(item.sandbox.state not in unknown for item in found)
    return begun and {item.key for item in found} <= set(job.shown.keys.split(","))


def _reported_run(s: Situation, job: Job) -> int:
    """Number under which managers know the last run: a reconnect after a restart of the AP raises only the AP's."""
    newest = max((item.sandbox.number for item in s.seen), default=job.run)
    return newest if job.reconnects else job.run


def _reported_tickets(item: Seen) -> Iterator[Ticket]:
    box = item.sandbox
    for at, name in enumerate(box.tickets):
        first = at == 0
        yield Ticket(
            name, item.manager_name, item.key, box.files_total if first else 0, box.bytes_total if first else 0
        )


def _own(s: Situation, job: Job, record: Record | None) -> tuple[Seen, ...]:
    if record is None:
        return ()
    names = {(ticket.manager, ticket.name) for ticket in record.tickets}
    return tuple(item for item in s.seen if any((item.manager, name) in names for name in item.sandbox.tickets))


# ---- sandboxes of other runs -------------------------------------------------------------------------------------


def _fence(s: Situation, job: Job, record: Record | None, own: Sequence[Seen], limits: Limits) -> Iterator[Effect]:
    """Orders about sandboxes that are not part of the run that counts."""
    if job.settling and record is not None:
        for elder, silent_s in _elders(s, own):
            if silent_s < limits.lease_s and not _has_stopped(s, elder):
                yield Send(elder.manager, Action.SUPERSEDE, elder.run)
    for item in s.seen:
        box = item.sandbox
        if job.status == Status.REMOVED:
            if box.state not in FREED:
                yield Send(item.manager, Action.CANCEL, box.number)
        elif job.settling and (item in own or _may_be_own(s, item, record, own)):
            continue
        elif box.state in FREED:
            if box.number < job.run or job.status == Status.IDLE or (job.ended and record is not None):
                yield Send(item.manager, Action.FORGET, box.number)
        elif _is_stale(s, job, record, item, limits):
            yield Send(item.manager, Action.SUPERSEDE, box.number)
        elif job.ended and not (job.settling and record is None) and not _confirmed(s, item.manager, box.number):
            # The run that counts did not report this hand-off: its plugin uploaded the files itself.
            yield Send(item.manager, Action.CONFIRM, box.number, (), 0, job.priority)


def _elders(s: Situation, own: Sequence[Seen]) -> Iterator[tuple[Elder, float]]:
    """Managers of earlier runs, without those that know the run that counts by such a number."""
    for elder, silent_s in s.elders.items():
        if not any(item.manager == elder.manager and item.sandbox.number <= elder.run for item in own):
            yield elder, silent_s


def _has_stopped(s: Situation, elder: Elder) -> bool:
    """True when a manager has said that nothing of an earlier run is sent any more."""
    boxes = [item.sandbox for item in s.seen if item.manager == elder.manager and item.sandbox.number <= elder.run]
    ended = bool(boxes) and all(box.state in FREED for box in boxes)
    return ended or (elder.manager, Action.SUPERSEDE, elder.run) in s.done


def _may_be_own(s: Situation, item: Seen, record: Record | None, own: Sequence[Seen]) -> bool:
    """True when tickets of the record may be in this sandbox although its manager has not reported them yet."""
    expected = record is not None and any(not _shows(own, ticket) for ticket in record.of(item.manager))
    ended = s.job or s.past
    if not expected or ended is None:
        return False
    return item.sandbox.number == (s.counts or ended.run) or ended.reconnects > 0


def _is_fenced(s: Situation, job: Job, record: Record, own: Sequence[Seen], limits: Limits) -> bool:
    """True when nobody can send output of an earlier run any more: it has ended there, or its manager's lease has."""
    for item in s.seen:
        if item not in own and item.sandbox.state not in FREED and not _may_be_own(s, item, record, own):
            return False
    return all(silent_s >= limits.lease_s or _has_stopped(s, elder) for elder, silent_s in _elders(s, own))


def _is_stale(s: Situation, job: Job, record: Record | None, item: Seen, limits: Limits) -> bool:
    """True when the run that made the sandbox certainly does not count."""
    older = item.sandbox.number < job.run
    if (
        job.status in _GOING_ON
        and item.sandbox.number >= job.run
        and item.sandbox.state not in (State.ACCEPTED, *FREED)
    ):
        # This run was seen to have ended, and numbers only rise: the queue is one from before, restored.
        return True
    if job.status == Status.IDLE or job.runs_anew_after_hold:
        return item.sandbox.number <= job.run and not job.has_ended
    if job.status in _AT_WORK:
        # A reconnect after a restart of the AP raises NumShadowStarts although the run goes on.
        calm = not job.reconnects and s.wall_s - job.shadow_since > limits.shadow_settle_s
        return older and (calm or item.sandbox.state != State.ACCEPTED)
    return older and job.ended and not (job.settling and record is None)


def _confirmed(s: Situation, manager: str, run: int) -> bool:
    return (manager, Action.CONFIRM, run) in s.done


def _tidy(s: Situation, job: Job, limits: Limits) -> Iterator[Effect]:
    """A job that computes again says nothing about the output of an older run, except that it was dropped."""
    if job.status in (Status.IDLE, Status.RUNNING):
        dropped = _dropped(s, job)
        if dropped and job.shown.reason != dropped:
            yield Show(Shown(run=job.run, reason=dropped))
        elif job.shown.state != NOTHING_YET and s.edited_s_ago >= limits.edit_interval_s:
            yield Show(Shown(run=job.run))
        if job.request:
            yield ClearRequest()


def _dropped(s: Situation, job: Job) -> str:
    """Return what to tell the owner of a job that HTCondor put back to Idle after a run that handed output off."""
    if job.status != Status.IDLE or not job.completions:
        return ""
    if not any(item.sandbox.state == State.ACCEPTED and item.sandbox.number == job.run for item in s.seen):
        return ""
    return f"run {job.run} ended, and its exit policy put the job back to Idle: the output of that run is deleted"


# ---- the run that counts -----------------------------------------------------------------------------------------


def _settle(s: Situation, job: Job, record: Record, own: Sequence[Seen], limits: Limits) -> Iterator[Effect]:
    if job.shown.run == job.run and not job.held_by_us and job.shown.state in (State.DELIVERED, State.CANCELLED):
        yield from _after_the_end(s, job, own, limits)
        return
    yield from _obey(s, job, own)
    if job.request != Request.CANCEL and _is_fenced(s, job, record, own, limits):
        yield from _confirm(s, job, record, own)
    lost = _lost(s, record, own, limits)
    states = {item.sandbox.state for item in own}
    if lost and job.request == Request.CANCEL:
        reason = f"given up by its owner; {lost}"
        yield from _let_go(job, replace(_sum(job, own), state=State.CANCELLED.value, reason=reason))
    elif lost:
        yield from _when_lost(s, job, replace(_sum(job, own), state=State.LOST.value, reason=lost), limits)
        if job.request:
            yield ClearRequest()  # there is nothing left to send or to give up; what is shown says so
    elif not _all_shown(record, own) or not states <= ENDS:
        yield from _progress(s, job, record, own, limits)
    elif State.FAILED in states:
        yield from _when_failed(s, job, own, limits)
    elif State.CANCELLED in states:
        yield from _let_go(job, replace(_sum(job, own), state=State.CANCELLED.value, reason="given up by its owner"))
    elif states <= set(GOOD_ENDS):
        yield from _deliver(s, job, own)


def _confirm(s: Situation, job: Job, record: Record, own: Sequence[Seen]) -> Iterator[Effect]:
    for manager in record.managers:
        boxes = [item.sandbox for item in own if item.manager == manager]
        if not boxes and not _confirmed(s, manager, job.run):
            yield _confirmation(manager, job.run, record.of(manager), job.priority)
        for box in boxes:
            if box.state == State.ACCEPTED and not _confirmed(s, manager, box.number):
                yield _confirmation(manager, box.number, _named_in(box, manager, record, own), job.priority)


def _named_in(box: SandboxReport, manager: str, record: Record, own: Sequence[Seen]) -> list[Ticket]:
    """Tickets of the record that are in this sandbox, with those that its manager has not reported yet."""
    others = {name for item in own if item.manager == manager and item.sandbox is not box
              for name in item.sandbox.tickets}  # fmt: skip
    return [ticket for ticket in record.of(manager) if ticket.name not in others]


def _confirmation(manager: str, run: int, tickets: Sequence[Ticket], priority: int) -> Send:
    names = tuple(ticket.name for ticket in tickets)
    files = min(MOST_NUMBER, sum(ticket.files for ticket in tickets))  # receipts are the word of jobs
    return Send(manager, Action.CONFIRM, run, names, files, priority)


def _obey(s: Situation, job: Job, own: Sequence[Seen]) -> Iterator[Effect]:
    """Turn the owner's request into orders; it is cleared when they have been acknowledged, so a crash repeats it."""
    if not job.request:
        return
    try:
        action = Action(Request(job.request).value)
    except ValueError:
        yield ClearRequest()
        return
    open_orders = [item for item in own if (item.manager, action, item.sandbox.number) not in s.done]
    for item in open_orders:
        yield Send(item.manager, action, item.sandbox.number, priority=job.priority)
    # An owner who insists is believed as long as the request stands; from then on the keys in the job's ad are.
    insists = action is Action.RETRY and s.records_written and not (s.record and s.record.tickets)
    if own and not open_orders and not (insists and not _is_known(job, own)):
        yield ClearRequest()


def _lost(s: Situation, record: Record, own: Sequence[Seen], limits: Limits) -> str:
    """Return the reason why output of the run is lost; "" when it is not."""
    for item in own:
        if item.sandbox.state == State.LOST:
            return f"output lost at {item.manager_name}: {item.sandbox.reason or 'no reason given'}"
        if item.sandbox.state == State.SUPERSEDED:
            return f"output deleted at {item.manager_name} for a newer run that did not come to count"
    for ticket in record.tickets:
        silent_s = s.absent_s.get(ticket.manager, 0.0)
        if not _shows(own, ticket) and silent_s >= limits.lease_s:
            return f"nothing was heard of the output at {ticket.manager_name} for {silent_s:.0f} s"
    return ""


def _shows(own: Sequence[Seen], ticket: Ticket) -> bool:
    return any(item.manager == ticket.manager and ticket.name in item.sandbox.tickets for item in own)


def _all_shown(record: Record, own: Sequence[Seen]) -> bool:
    return all(_shows(own, ticket) for ticket in record.tickets)


def _sum(job: Job, own: Sequence[Seen]) -> Shown:
    """Figures over all managers; state, reason and so on of the one that is most behind."""
    boxes = [item.sandbox for item in own]
    waits = [box.next_attempt_at for box in boxes if box.next_attempt_at]
    return Shown(
        state=job.shown.state,
        run=job.run,
        bytes_left=sum(box.bytes_left for box in boxes),
        files_left=sum(box.files_left for box in boxes),
        attempts=max((box.attempts for box in boxes), default=0),
        next_attempt_at=min(waits, default=0),
        manager=",".join(dict.fromkeys(item.manager_name for item in own)),
        keys=",".join(sorted({item.key for item in own} - {""})) or job.shown.keys,
        custody="; ".join(_holdings(boxes)),
    )


def _holdings(boxes: Iterable[SandboxReport]) -> list[str]:
    """Return the routers' holdings, filtered and bounded: a report may claim anything, and a job's ad is small."""
    said = (text for box in boxes if box.state not in ENDS for text in box.holdings)
    plain = (text for text in said if len(text) <= _HOLDING_CHARS and text.isascii() and text.isprintable())
    return [str(one) for one in islice(read_holdings(plain), _HOLDINGS_SHOWN)]


def _progress(s: Situation, job: Job, record: Record, own: Sequence[Seen], limits: Limits) -> Iterator[Effect]:
    shown = _sum(job, own)
    missing = [ticket.manager_name for ticket in record.tickets if not _shows(own, ticket)]
    if missing:
        state, reason = State.ACCEPTED.value, f"no report yet from {', '.join(dict.fromkeys(missing))}"
        keys = ",".join(sorted({ticket.key for ticket in record.tickets} - {""}))
        shown = replace(shown, manager=",".join(dict.fromkeys(map(name_of, record.managers))), keys=keys)
    else:
        behind = min((item.sandbox for item in own), key=lambda box: _URGENCY.get(State(box.state), 99))
        state, reason = behind.state, _words(job, shown, behind)
    yield from _show(s, job, replace(shown, state=state, reason=reason), limits)


def _words(job: Job, figures: Shown, box: SandboxReport) -> str:
    """Describe the progress for people. Figures alone do not change it: each change is an event in the job's log."""
    words = box.reason or _MEANING.get(State(box.state), box.state)
    if box.attempts > 1 or box.next_attempt_at:
        words += f"; attempt {box.attempts}" + (f" of {box.attempts_limit}" if box.attempts_limit else "")
    if box.next_attempt_at:
        words += f", next at {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(box.next_attempt_at))}"
    if job.shown.state == box.state and job.shown.reason.startswith(f"{words};"):
        return job.shown.reason
    return f"{words}; {figures.files_left} files, {figures.bytes_left} bytes left"


_MEANING = {
    State.ACCEPTED: "accepted, waits until its manager has read that the job completed",
    State.CONFIRMED: "waits for a data slot",
    State.LEASED: "has a data slot",
    State.MOVING: "being transferred",
    State.RETRY_WAIT: "waits for the next attempt",
    State.HANDED_OVER: "on its way through the overlay",
}

_URGENCY = {
    state: rank
    for rank, state in enumerate(
        (State.RETRY_WAIT, State.ACCEPTED, State.CONFIRMED, State.LEASED, State.MOVING, State.HANDED_OVER, State.FAILED)
    )
}


def _show(s: Situation, job: Job, shown: Shown, limits: Limits) -> Iterator[Effect]:
    # An end that no longer holds (a retry) is as urgent as a new one: whoever waits looks at it.
    at_once = shown.state != job.shown.state and (shown.state in ENDS or job.shown.state in ENDS)
    if shown != job.shown and (at_once or s.edited_s_ago >= limits.edit_interval_s):
        yield Show(shown)


def _when_failed(s: Situation, job: Job, own: Sequence[Seen], limits: Limits) -> Iterator[Effect]:
    failed = next(item.sandbox for item in own if item.sandbox.state == State.FAILED)
    words = failed.reason or "the manager gave no reason"
    advice = _GONE_ADVICE if failed.custody else _advice(ErrorClass.from_code(failed.error_code))
    shown = replace(_sum(job, own), state=State.FAILED.value, reason=f"{words}; {advice}")
    retrying = job.request == Request.RETRY
    if _may_hold(job) and (job.hold_untold or not retrying):
        yield from _hold(shown, failed.error_code)
    else:
        yield from _show(s, job, shown, limits)


def _may_hold(job: Job) -> bool:
    return not job.dag and (job.status == Status.COMPLETED or (job.held_by_us and job.hold_untold))


def _hold(shown: Shown, error_code: int) -> Iterator[Effect]:
    # Words of servers become an event in the job's log: a line of their own there could look like another event.
    reason = "".join(char if char.isprintable() else " " for char in f"Stage-out failed: {shown.reason}")
    subcode, reason = HOLD_SUBCODE_BASE + error_code, reason[:_HOLD_REASON_CHARS]
    yield Hold(shown, subcode, reason)
    yield Told(subcode, reason)


def _advice(kind: ErrorClass) -> str:
    """Return the advice for the owner of failed output."""
    if kind in _WRONG_URL:
        return _URL_ADVICE
    first = _BEFORE_A_RETRY.get(kind)
    return f"{first}, {_RETRY_ADVICE}" if first else _RETRY_ADVICE


def _when_lost(s: Situation, job: Job, shown: Shown, limits: Limits) -> Iterator[Effect]:
    if job.dag:
        yield from _lost_node(s, job, shown, limits)
    elif not _may_hold(job):
        yield from _show(s, job, replace(shown, reason=f"{shown.reason}; {_RERUN_ADVICE}"), limits)
    elif job.status == Status.COMPLETED and job.reruns < limits.max_reruns:
        yield Rerun(Shown(run=job.run, reason=f"runs again: {shown.reason}"))
    else:
        reason = f"{shown.reason}, again after {job.reruns} runs because of that (STAGEOUT_MAX_RERUNS); {_RERUN_ADVICE}"
        yield from _hold(replace(shown, reason=reason), ErrorClass.UNKNOWN.code)


def _lost_node(s: Situation, job: Job, shown: Shown, limits: Limits) -> Iterator[Effect]:
    """A node is never run again behind DAGMan's back: `stageout wait` in its POST script fails, RETRY submits anew."""
    yield from _show(s, job, shown, limits)
    if s.dag is not Dag.UNKNOWN and job.shown.state == State.LOST and s.edited_s_ago >= limits.edit_interval_s:
        yield LetGo()


def _let_go(job: Job, shown: Shown) -> Iterator[Effect]:
    if job.held_by_us:
        yield Complete("Stage-out was given up by the job's owner; the job is completed")
    yield Show(shown)
    yield LetGo()


def _deliver(s: Situation, job: Job, own: Sequence[Seen]) -> Iterator[Effect]:
    boxes = [item.sandbox for item in own]
    checks = sorted({file.verified for box in boxes for file in box.files if file.verified})
    verified = ", ".join(checks) or "nothing more than success"
    stats: dict[str, int | str] = {
        "Bytes": sum(box.bytes_total for box in boxes),
        "Files": sum(box.files_total for box in boxes),
        "Seconds": max(0, int(s.wall_s) - job.entered_at),
        "Attempts": max(box.attempts for box in boxes),
        "VerifiedBy": verified,
    }
    reason = f"{stats['Files']} files, {stats['Bytes']} bytes delivered, verified by {verified}"
    total = _sum(job, own)
    shown = replace(total, state=State.DELIVERED.value, reason=reason, bytes_left=0, files_left=0, next_attempt_at=0)
    if job.held_by_us:
        yield Complete("Stage-out has delivered the output; the job is completed")
    yield Deliver(shown, stats)


def _after_the_end(s: Situation, job: Job, own: Sequence[Seen], limits: Limits) -> Iterator[Effect]:
    """The end is in the job's ad: managers may drop their records."""
    for item in own:
        if item.sandbox.state in FREED:
            yield Send(item.manager, Action.FORGET, item.sandbox.number)
    if job.request:
        yield ClearRequest()
    if job.shown.state == State.CANCELLED and s.edited_s_ago >= limits.edit_interval_s:
        yield LetGo()


def _no_record(s: Situation, job: Job, limits: Limits) -> Iterator[Effect]:
    if job.shown.run == job.run and job.shown.state in (State.DELIVERED, State.CANCELLED):
        return
    kept = any(item.sandbox.number == _reported_run(s, job) and item.sandbox.state not in FREED for item in s.seen)
    if s.waited_s >= limits.lease_s and not (s.records_written and kept):
        shown = Shown(State.LOST.value, job.run, f"no manager reported its output within {s.waited_s:.0f} s")
        yield from _when_lost(s, job, shown, limits)
    elif s.waited_s >= limits.record_wait_s:
        reason = (
            f"{job.handed_off} files were handed off, but the access point has no record of where (JOB_EPOCH_HISTORY); "
            "`stageout retry` delivers what the managers report"
        )
        if not s.records_written:
            reason = f"{job.handed_off} files were handed off, no manager has reported them all yet"
        yield from _show(s, job, Shown(State.ACCEPTED.value, job.run, reason), limits)


# ---- jobs that left the queue ------------------------------------------------------------------------------------


def _gone(s: Situation) -> Iterator[Effect]:
    """Cancelled only if the history says removed, or given up by its owner; otherwise the delivery goes on."""
    own = _own_of_past(s)
    for item in s.seen:
        box = item.sandbox
        if box.state in HOLDING and _is_missed(s, item, own):
            yield Note(box.number, box.state, box.reason or "the manager gave no reason")
        if box.state == State.LOST and s.past is None:
            continue  # whether its owner must be told depends on how the job left
        if box.state in FREED:
            yield Send(item.manager, Action.FORGET, box.number)
        elif s.past is None:
            continue
        elif s.past.wants_nothing:
            yield Send(item.manager, Action.CANCEL, box.number)
        elif s.past.status == Status.COMPLETED and s.record is not None:
            yield from _of_completed(s, s.past.run, s.record, item, own)


def _is_missed(s: Situation, item: Seen, own: Sequence[Seen]) -> bool:
    """Did the owner of a job that left as completed expect this output, and does its ad not say that it failed?"""
    if s.past is None or s.past.status != Status.COMPLETED or s.past.given_up or s.past.failed:
        return False
    return item in own if s.record else item.sandbox.number == s.past.run


def _own_of_past(s: Situation) -> tuple[Seen, ...]:
    names = {(ticket.manager, ticket.name) for ticket in s.record.tickets} if s.record else set()
    return tuple(item for item in s.seen if any((item.manager, name) in names for name in item.sandbox.tickets))


def _of_completed(s: Situation, run: int, record: Record, item: Seen, own: Sequence[Seen]) -> Iterator[Effect]:
    box = item.sandbox
    is_own = item in own or _may_be_own(s, item, record, own)
    if not is_own and box.number < run:
        yield Send(item.manager, Action.SUPERSEDE, box.number)
    elif box.state == State.ACCEPTED and not _confirmed(s, item.manager, box.number):
        named = _named_in(box, item.manager, record, own) if is_own else ()
        yield _confirmation(item.manager, box.number, named, 0)
