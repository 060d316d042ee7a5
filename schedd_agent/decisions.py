"""The decision on one job: a pure function of :class:`schedd_agent.model.DecisionInput`. No clock, no I/O.

A decision depends on nothing else, so it is the same again after a crash. ``docs/developer/agent.md`` has the
rules.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from schedd_agent.model import (
    GOOD_ENDS,
    ClearRequest,
    Complete,
    DagEnd,
    DecisionInput,
    DecisionLimits,
    Effect,
    FailedAttempt,
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
from stageout.core.metrics import UNKNOWN, host_of
from stageout.core.reasons import FAILURES, HOLD_SUBCODE_BASE, RERUN_ADVICE
from stageout.core.states import ENDS, FREED, State
from stageout.core.units import count, size
from stageout.model.job import HOLD_STATES, NOTHING_YET, Job, JobAdState, Status
from stageout.model.run import RunRecord, Ticket, name_of
from stageout.wire.custody import Action, SandboxReport
from stageout.wire.deposits import read_holdings
from stageout.wire.owner_requests import OwnerRequest, Verb
from stageout.wire.typed import LATEST_AT, MOST_NUMBER

Sandboxes = Sequence[ReportedSandbox]
Effects = Iterator[Effect]

_GONE_ADVICE = f"its bytes are no longer on the node, so `stageout retry` cannot help; {RERUN_ADVICE}"
_STAYS_HELD = "the job stays held: `condor_release` runs it again and sends all files again"
_EXECUTING = (Status.RUNNING, Status.TRANSFERRING, Status.SUSPENDED)
_NOT_ENDED = (Status.IDLE, *_EXECUTING)
#: Most characters of an owner's request to redirect output.
_REDIRECT_CHARS = 8000
#: Characters of each part of the answer to a redirect.
_ANSWER_CHARS = 1000
#: Most holdings of routers in a job's ad, and most characters of each.
_HOLDINGS_SHOWN, _HOLDING_CHARS = 8, 500
_HOLD_REASON_CHARS = 2000
#: Before the number of runs in the reason of a loss.
_AGAIN = ", again after "
#: Most hosts in the figures of delivered output.
_HOSTS_SHOWN = 5
#: Seconds after which the time of an attempt is no longer shown as that of the next one.
_PAST_S = 60.0
#: Page of the documentation with a row for each sub-code, whose anchor is ``hold-SUBCODE``.
_HOLD_CODES_PAGE = "reference/hold-codes.html"


def decide(given: DecisionInput, limits: DecisionLimits) -> list[Effect]:
    """Return the effects for one job, in the order in which they must happen."""
    if given.job is None:
        return [*_decide_left_job(given)]
    if given.job.is_kept_copy:
        return []  # the schedd takes it out of the queue, and its history then decides
    if given.job.has_request_of_other_run(given.recorded_run):
        refused = [] if given.job.status == Status.REMOVED else [_refuse_other_run(given.job)]
        return [*refused, *decide(replace(given, job=replace(given.job, request="")), limits)]
    is_dag_removed = given.dag is DagEnd.REMOVED and given.job.ad_state.state not in (State.DELIVERED, State.CANCELLED)
    if is_dag_removed and given.job.is_kept:
        return [*_cancel_with_dag(given, given.job)]
    record = _effective_record(given, given.job)
    own = _own_sandboxes(given, given.job, record)
    effects: list[Effect] = [*_fence_other_runs(given, given.job, record, own, limits=limits)]
    if not given.job.has_final_handoff:
        return [*effects, *_show_unnamed_output(given, given.job, limits), *_reset_ad_state(given, given.job, limits)]
    if given.job.dag and is_dag_removed:
        # The schedd leaves completed nodes when it removes a DAG's jobs. Their removal cancels the stage-out.
        return [*effects, Remove("its DAG was removed")]
    effects += _keep_in_queue(given, given.job, limits)
    if record is None:
        return [*effects, *_decide_without_record(given, given.job, limits)]
    return [*effects, *_decide_final_run(given, given.job, record, own, limits=limits)]


def _refuse_other_run(job: Job) -> ClearRequest:
    asked = job.owner_request.run
    again = "the job runs again since: " if asked < job.run else ""
    return _clear(job, f"{again}this request was for run {asked}, the last run is {job.run}")


def _cancel_with_dag(given: DecisionInput, job: Job) -> Effects:
    """Cancel the stage-out of a node whose DAG the owner removed, and let the node leave the queue."""
    for item in given.reported:
        if item.sandbox.state not in FREED:
            yield SendOrder(item.manager, Action.CANCEL, item.sandbox.number)
    yield from _leave_queue(job, JobAdState(State.CANCELLED.value, job.run, "its DAG was removed"))


def _keep_in_queue(given: DecisionInput, job: Job, limits: DecisionLimits) -> Effects:
    """Keep the job in the queue until the end of its output is known, however long that takes."""
    until = max(job.kept_until, job.entered_at + limits.leave_s)
    if job.status == Status.COMPLETED and job.ad_state.state not in ENDS and until - given.wall_s < limits.leave_s / 2:
        yield KeepInQueue(int(given.wall_s + limits.leave_s))


def failed_attempt(given: DecisionInput) -> FailedAttempt | None:
    """Return a failed attempt to deliver the final run's output that its manager repeats, None without one."""
    if given.job is None or not given.job.has_final_handoff:
        return None
    if not any(item.sandbox.attempts and item.sandbox.state not in ENDS for item in given.reported):
        return None  # most jobs
    own = _own_sandboxes(given, given.job, _effective_record(given, given.job))
    found = (attempt for item in own for attempt in _repeated_attempts(item.sandbox))
    return next(found, None)


def lost_bytes(given: DecisionInput) -> int:
    """Return the bytes of the final run's output that were not delivered when it was lost.

    The receipts say how much there was of output that is not reported any more. The job's ad says it without them.
    """
    if given.job is None:
        return 0
    record = _effective_record(given, given.job)
    own = _own_sandboxes(given, given.job, record)
    known = sum(item.sandbox.bytes_left + item.sandbox.bytes_dropped for item in own)
    tickets = record.tickets if record else ()
    unknown = sum(max(0, ticket.size_bytes) for ticket in tickets if not _is_reported_in(own, ticket))
    if not known + unknown and given.job.ad_state.run == given.job.run:
        return max(0, given.job.ad_state.bytes_left)
    return min(MOST_NUMBER, known + unknown)  # a job could have forged its receipts


def _repeated_attempts(sandbox: SandboxReport) -> Iterator[FailedAttempt]:
    if sandbox.state in ENDS or sandbox.paused:
        return
    for file in sandbox.files:
        if file.attempts and file.error and file.state not in ENDS:
            yield FailedAttempt(
                file=file.name,
                host=host_of(file.url),
                error=file.error,
                attempts_limit=sandbox.attempts_limit,
                gives_up_at=min(sandbox.gives_up_at, LATEST_AT),
                of_node=bool(file.of_node),
            )


# ---- sandboxes of the final run ---------------------------------------------------------------------------------


def _effective_record(given: DecisionInput, job: Job) -> RunRecord | None:
    """Return the access point's record. Without one, or if the owner insists, use reports whose count agrees."""
    if not job.has_final_handoff or (given.record is not None and given.record.tickets):
        return given.record
    found = [item for item in given.reported if item.sandbox.number == _reported_run(given, job)]
    if not found or sum(item.sandbox.files_total for item in found) != job.handed_off:
        return None
    if given.records_written and not job.asks(Verb.RETRY, given.recorded_run) and not _is_known(job, found):
        return None
    return RunRecord(tuple(ticket for item in found for ticket in _reported_tickets(item)))


def _is_known(job: Job, found: Sandboxes) -> bool:
    """Tell whether this output was confirmed before, by a record that is rotated away or because the owner insisted.

    The job's ad has the keys and names of its managers.
    """
    named = job.ad_state.run == job.run and {item.manager_name for item in found} <= set(
        job.ad_state.manager.split(",")
    )
    unknown = (State.ACCEPTED,) if named else (State.ACCEPTED, *FREED)
    begun = any(item.sandbox.state not in unknown for item in found)
    return begun and {item.key for item in found} <= set(job.ad_state.keys.split(","))


def _reported_run(given: DecisionInput, job: Job) -> int:
    """Return the last run's number at the managers. A reconnect after a restart raises only the access point's."""
    newest = max((item.sandbox.number for item in given.reported), default=job.run)
    return newest if job.reconnects else job.run


def _reported_tickets(item: ReportedSandbox) -> Iterator[Ticket]:
    sandbox = item.sandbox
    for at, name in enumerate(sandbox.tickets):
        first = at == 0
        yield Ticket(
            name=name,
            manager_name=item.manager_name,
            key=item.key,
            files=sandbox.files_total if first else 0,
            size_bytes=sandbox.bytes_total if first else 0,
        )


def _own_sandboxes(given: DecisionInput, job: Job, record: RunRecord | None) -> tuple[ReportedSandbox, ...]:
    if record is None:
        return ()
    names = {(ticket.manager, ticket.name) for ticket in record.tickets}
    return tuple(item for item in given.reported if any((item.manager, name) in names for name in item.sandbox.tickets))


# ---- sandboxes of other runs -------------------------------------------------------------------------------------


def _fence_other_runs(
    given: DecisionInput, job: Job, record: RunRecord | None, own: Sandboxes, limits: DecisionLimits
) -> Effects:
    """Yield orders about sandboxes that do not belong to the final run."""
    if job.has_final_handoff and record is not None:
        for previous, silent_s in _previous_managers(given, own):
            if silent_s < _patience_s(given, previous.manager, limits) and not _has_stopped(given, previous):
                yield SendOrder(previous.manager, Action.SUPERSEDE, previous.run)
    for item in given.reported:
        sandbox = item.sandbox
        if job.status == Status.REMOVED:
            if sandbox.state not in FREED:
                yield SendOrder(item.manager, Action.CANCEL, sandbox.number)
        elif job.has_final_handoff and (item in own or _may_be_own(given, item, record, own)):
            continue
        elif sandbox.state in FREED:
            if sandbox.number < job.run or job.status == Status.IDLE or (job.ended and record is not None):
                yield SendOrder(item.manager, Action.FORGET, sandbox.number)
        elif _is_stale(given, job, record, item, limits=limits):
            yield SendOrder(item.manager, Action.SUPERSEDE, sandbox.number)
        elif job.ended and not _may_be_unnamed(job, record) and not _is_confirmed(given, item.manager, sandbox.number):
            # The final run did not report this hand-off: its plugin uploaded the files itself.
            yield SendOrder(
                manager=item.manager,
                action=Action.CONFIRM,
                run=sandbox.number,
                priority=job.priority,
            )


def _patience_s(given: DecisionInput, manager: str, limits: DecisionLimits) -> float:
    """Return the seconds without a report after which a manager sends nothing more."""
    return given.patience_s.get(manager, limits.lease_s)


def _previous_managers(given: DecisionInput, own: Sandboxes) -> Iterator[tuple[PreviousRunManager, float]]:
    """Yield managers of earlier runs, without those that report the final run under an earlier number."""
    for previous, silent_s in given.previous_managers.items():
        if not any(item.manager == previous.manager and item.sandbox.number <= previous.run for item in own):
            yield previous, silent_s


def _has_stopped(given: DecisionInput, previous: PreviousRunManager) -> bool:
    """Tell whether a manager has reported that it sends nothing of an earlier run any more."""
    sandboxes = [
        item.sandbox
        for item in given.reported
        if item.manager == previous.manager and item.sandbox.number <= previous.run
    ]
    ended = bool(sandboxes) and all(sandbox.state in FREED for sandbox in sandboxes)
    return ended or (previous.manager, Action.SUPERSEDE, previous.run) in given.done


def _may_be_own(given: DecisionInput, item: ReportedSandbox, record: RunRecord | None, own: Sandboxes) -> bool:
    """Tell whether this sandbox may hold tickets of the record that its manager has not reported yet."""
    expected = record is not None and any(not _is_reported_in(own, ticket) for ticket in record.of(item.manager))
    ended = given.job or given.history
    if not expected or ended is None:
        return False
    return item.sandbox.number == (given.recorded_run or ended.run) or ended.reconnects > 0


def _is_fenced(given: DecisionInput, job: Job, record: RunRecord, own: Sandboxes, limits: DecisionLimits) -> bool:
    """Tell whether no manager can send output of an earlier run: it has ended there, or the lease has.

    The last report of a manager may still be in the collector when its lease has ended.
    """
    silent = {
        previous.manager
        for previous, silent_s in given.previous_managers.items()
        if silent_s >= _patience_s(given, previous.manager, limits)
    }
    for item in given.reported:
        is_other = item not in own and not _may_be_own(given, item, record, own)
        if is_other and item.manager not in silent and item.sandbox.state not in FREED:
            return False
    return all(
        previous.manager in silent or _has_stopped(given, previous) for previous, _ in _previous_managers(given, own)
    )


def _is_stale(
    given: DecisionInput, job: Job, record: RunRecord | None, item: ReportedSandbox, limits: DecisionLimits
) -> bool:
    """Tell whether the sandbox certainly belongs to a run that is not the final one."""
    older = item.sandbox.number < job.run
    if (
        job.status in _NOT_ENDED
        and item.sandbox.number >= job.run
        and item.sandbox.state not in (State.ACCEPTED, *FREED)
    ):
        # This run has ended, and numbers only rise. So an older queue was restored.
        return True
    if job.status == Status.IDLE or job.runs_anew_after_hold:
        return item.sandbox.number <= job.run and not job.has_ended
    if job.status in _EXECUTING:
        # A reconnect after a restart of the access point raises NumShadowStarts although the run goes on.
        calm = not job.reconnects and given.wall_s - job.shadow_since > limits.shadow_settle_s
        return older and (calm or item.sandbox.state != State.ACCEPTED)
    return older and job.ended and not _may_be_unnamed(job, record)


def _may_be_unnamed(job: Job, record: RunRecord | None) -> bool:
    """Tell whether output of the final run may be at a manager that no record names.

    After a failed transfer, HTCondor before 24.x records only the results of the last plugin, and the number of handed
    off files may be missing.
    """
    if job.has_failed_transfer:
        return record is None or not record.tickets
    return job.has_final_handoff and record is None


def _is_confirmed(given: DecisionInput, manager: str, run: int) -> bool:
    return (manager, Action.CONFIRM, run) in given.done


def _reset_ad_state(given: DecisionInput, job: Job, limits: DecisionLimits) -> Effects:
    """Clear the state of an older run when the job runs again, unless that output was dropped."""
    if job.status in (Status.IDLE, Status.RUNNING):
        dropped = _dropped_output_reason(given, job)
        if dropped and job.ad_state.reason != dropped:
            yield UpdateAdState(JobAdState(run=job.run, reason=dropped))
        elif job.ad_state.state != NOTHING_YET and given.edited_s_ago >= limits.edit_interval_s:
            yield UpdateAdState(JobAdState(run=job.run))
        if job.request:
            yield _clear(job, "the job runs again")


def _dropped_output_reason(given: DecisionInput, job: Job) -> str:
    """Return the reason for the owner of a job that HTCondor put back to Idle after a hand-off; "" without one."""
    if job.status != Status.IDLE or not job.completions:
        return ""
    if not any(item.sandbox.state == State.ACCEPTED and item.sandbox.number == job.run for item in given.reported):
        return ""
    return f"run {job.run} ended, and its exit policy put the job back to Idle: the output of that run is deleted"


# ---- the final run -----------------------------------------------------------------------------------------------


def _decide_final_run(
    given: DecisionInput, job: Job, record: RunRecord, own: Sandboxes, limits: DecisionLimits
) -> Effects:
    if job.ad_state.run == job.run and not job.held_by_us and job.ad_state.state in (State.DELIVERED, State.CANCELLED):
        yield from _free_managers(given, job, own, limits)
        return
    yield from _apply_owner_request(given, job, own)
    if job.owner_request.verb is not Verb.CANCEL and _is_fenced(given, job, record, own, limits=limits):
        yield from _confirm(given, job, record, own)
    lost = _loss_reason(given, record, own, limits)
    states = {item.sandbox.state for item in own}
    if lost and job.owner_request.verb is Verb.CANCEL:
        reason = f"given up on request; {lost}"
        yield from _leave_queue(job, replace(_summarize(job, own), state=State.CANCELLED.value, reason=reason))
    elif lost:
        yield from _handle_loss(given, job, replace(_summarize(job, own), state=State.LOST.value, reason=lost), limits)
        if job.request:
            # Nothing is left to send or to cancel, as the job's ad says.
            yield _clear_redirect(job, "the output is lost")
    elif not _all_reported(record, own) or not states <= ENDS:
        yield from _progress(given, job, record, own, limits=limits)
    elif State.FAILED in states:
        yield from _handle_failure(given, job, own, limits)
    elif State.CANCELLED in states:
        yield from _leave_queue(
            job, replace(_summarize(job, own), state=State.CANCELLED.value, reason="given up on request")
        )
    elif states <= set(GOOD_ENDS):
        yield from _mark_delivered(given, job, own)


def _confirm(given: DecisionInput, job: Job, record: RunRecord, own: Sandboxes) -> Effects:
    for manager in record.managers:
        sandboxes = [item.sandbox for item in own if item.manager == manager]
        if not sandboxes and not _is_confirmed(given, manager, job.run):
            yield _confirmation(manager, job.run, record.of(manager), job.priority)
        for sandbox in sandboxes:
            if sandbox.state == State.ACCEPTED and not _is_confirmed(given, manager, sandbox.number):
                yield _confirmation(manager, sandbox.number, _tickets_in(sandbox, manager, record, own), job.priority)


def _tickets_in(sandbox: SandboxReport, manager: str, record: RunRecord, own: Sandboxes) -> list[Ticket]:
    """Return the record's tickets in this sandbox, with those that its manager has not reported yet."""
    others = {name for item in own if item.manager == manager and item.sandbox is not sandbox
              for name in item.sandbox.tickets}  # fmt: skip
    return [ticket for ticket in record.of(manager) if ticket.name not in others]


def _confirmation(manager: str, run: int, tickets: Sequence[Ticket], priority: int) -> SendOrder:
    names = tuple(ticket.name for ticket in tickets)
    files = min(MOST_NUMBER, sum(ticket.files for ticket in tickets))  # a job could have forged its receipts
    return SendOrder(manager=manager, action=Action.CONFIRM, run=run, tickets=names, files=files, priority=priority)


def _apply_owner_request(given: DecisionInput, job: Job, own: Sandboxes) -> Effects:
    """Turn the owner's request into orders. It is cleared after their acknowledgement, so a crash repeats it."""
    verb = job.owner_request.verb
    if verb is None:
        if job.request:
            yield ClearRequest()
        return
    if verb is Verb.REDIRECT:
        yield from _apply_redirect(given, job, own)
        return
    action = Action(verb.value)
    open_orders = [item for item in own if (item.manager, action, item.sandbox.number) not in given.done]
    for item in open_orders:
        yield SendOrder(item.manager, action, item.sandbox.number, priority=job.priority)
    # An owner's retry confirms unrecorded output while the request stands. Later the keys in the job's ad do.
    insists = action is Action.RETRY and given.records_written and not (given.record and given.record.tickets)
    if own and not open_orders and not (insists and not _is_known(job, own)):
        yield ClearRequest()


def _clear(job: Job, why: str) -> ClearRequest:
    """Clear the owner's request. :param why: reason why it was not carried out; "" when it was."""
    name = job.owner_request.name if why else ""
    return ClearRequest(f"{name[:_ANSWER_CHARS]} {why[:_ANSWER_CHARS]}" if name else "")


def _clear_redirect(job: Job, why: str) -> ClearRequest:
    """Clear the owner's request. Only a redirect has an answer: the job's ad shows the end that other requests met."""
    return _clear(job, why if job.owner_request.verb is Verb.REDIRECT else "")


def _apply_redirect(given: DecisionInput, job: Job, own: Sandboxes) -> Effects:
    """Turn a redirect into an order. A second id is a second order."""
    asked = job.owner_request
    refusal = _redirect_refusal(asked, own, given.record.managers if given.record else ())
    if refusal:
        yield _clear(job, refusal)
    elif own and own[0].sandbox.state != State.ACCEPTED:
        (item,), name = own, asked.redirect_id
        if (item.manager, item.sandbox.number, name) in given.requests_done:
            yield _clear(job, item.sandbox.refused)
        else:
            yield SendOrder(
                manager=item.manager,
                action=Action.REDIRECT,
                run=item.sandbox.number,
                priority=job.priority,
                request=name,
                new_url=asked.url,
                only_file=asked.file,
            )


def _redirect_refusal(asked: OwnerRequest, own: Sandboxes, managers: Sequence[str]) -> str:
    """Return the reason why no manager can be asked for a redirect; "" when one can."""
    if not asked.redirect_id or not asked.url or len(str(asked)) > _REDIRECT_CHARS:
        return "the request is not 'redirect run=RUN ID URL FILE'"
    if len(own) > 1 or len(managers) > 1:
        return "the output is in several sandboxes, and their files could get the same URL"
    return ""


def _loss_reason(given: DecisionInput, record: RunRecord, own: Sandboxes, limits: DecisionLimits) -> str:
    """Return the reason why output of the run is lost; "" when it is not."""
    for item in own:
        if item.sandbox.state == State.LOST:
            return f"output lost at {item.manager_name}: {item.sandbox.reason or 'no reason given'}"
        if item.sandbox.state == State.SUPERSEDED:
            return f"output deleted at {item.manager_name} for a newer run that did not come to count"
    for ticket in record.tickets:
        silent_s = given.absent_s.get(ticket.manager, 0.0)
        if silent_s >= _patience_s(given, ticket.manager, limits) and not _has_ended_in(own, ticket):
            return f"nothing was heard of the output at {ticket.manager_name} for {silent_s:.0f} s"
    return "" if _all_reported(record, own) else _known_loss(given.job)


def _known_loss(job: Job | None) -> str:
    """Return the reason of a loss that the job's ad has; "" without one.

    After a restart the agent does not know for how long a manager has been silent.
    """
    if job is None or (job.ad_state.state, job.ad_state.run) != (State.LOST, job.run):
        return ""
    return job.ad_state.reason.partition(f"; {RERUN_ADVICE}")[0].partition(_AGAIN)[0] or "lost"


def _has_ended_in(own: Sandboxes, ticket: Ticket) -> bool:
    """Tell whether the last report of a manager, which may be silent now, has the end of a hand-off."""
    ended = (item for item in own if item.sandbox.state in ENDS or item.sandbox.state == State.HANDED_OVER)
    return any(item.manager == ticket.manager and ticket.name in item.sandbox.tickets for item in ended)


def _is_reported_in(own: Sandboxes, ticket: Ticket) -> bool:
    return any(item.manager == ticket.manager and ticket.name in item.sandbox.tickets for item in own)


def _all_reported(record: RunRecord, own: Sandboxes) -> bool:
    return all(_is_reported_in(own, ticket) for ticket in record.tickets)


def _summarize(job: Job, own: Sandboxes) -> JobAdState:
    """Sum up the figures of all managers."""
    sandboxes = [item.sandbox for item in own]
    waits = [sandbox.next_attempt_at for sandbox in sandboxes if sandbox.next_attempt_at]
    return JobAdState(
        state=job.ad_state.state,
        run=job.run,
        bytes_left=sum(sandbox.bytes_left for sandbox in sandboxes),
        files_left=sum(sandbox.files_left for sandbox in sandboxes),
        attempts=max((sandbox.attempts for sandbox in sandboxes), default=0),
        next_attempt_at=min(waits, default=0),
        manager=",".join(dict.fromkeys(item.manager_name for item in own)),
        keys=",".join(sorted({item.key for item in own} - {""})) or job.ad_state.keys,
        custody="; ".join(_holdings(sandboxes)),
    )


def _holdings(sandboxes: Iterable[SandboxReport]) -> list[str]:
    """Return the routers' holdings, filtered and bounded, because reports may hold anything."""
    said = (text for sandbox in sandboxes if sandbox.state not in ENDS for text in sandbox.holdings)
    plain = (text for text in said if len(text) <= _HOLDING_CHARS and text.isascii() and text.isprintable())
    return [str(one) for one in islice(read_holdings(plain), _HOLDINGS_SHOWN)]


def _progress(given: DecisionInput, job: Job, record: RunRecord, own: Sandboxes, limits: DecisionLimits) -> Effects:
    ad_state = _summarize(job, own)
    missing = [ticket.manager_name for ticket in record.tickets if not _is_reported_in(own, ticket)]
    if missing:
        state, reason = State.ACCEPTED.value, f"no report yet from {', '.join(dict.fromkeys(missing))}{_held_text(job)}"
        keys = ",".join(sorted({ticket.key for ticket in record.tickets} - {""}))
        ad_state = replace(ad_state, manager=",".join(dict.fromkeys(map(name_of, record.managers))), keys=keys)
    else:
        behind = min((item.sandbox for item in own), key=lambda sandbox: _PROGRESS_ORDER.get(State(sandbox.state), 99))
        state, reason = behind.state, _progress_text(job, ad_state, behind, given.wall_s)
    yield from _update_ad_state(given, job, replace(ad_state, state=state, reason=reason), limits)


def _progress_text(job: Job, figures: JobAdState, sandbox: SandboxReport, wall_s: float) -> str:
    """Describe the progress. New figures alone do not change the text: each change is an event in the job's log."""
    words = sandbox.reason or _STATE_TEXTS.get(State(sandbox.state), sandbox.state)
    words += "".join(_attempt_texts(sandbox, wall_s))
    if job.ad_state.state == sandbox.state and job.ad_state.reason.startswith(f"{words};"):
        return job.ad_state.reason
    return f"{words}; {count(figures.files_left, 'file')}, {size(figures.bytes_left)} left{_held_text(job)}"


def _held_text(job: Job) -> str:
    return f"; {_STAYS_HELD}" if job.stays_held else ""


def _attempt_texts(sandbox: SandboxReport, wall_s: float) -> Iterator[str]:
    """Name the attempts that count against the limit, and the next one unless its time has passed."""
    counted = max(0, sandbox.attempts - sandbox.excused)
    if counted > 1 or (counted and sandbox.next_attempt_at):
        yield f"; attempt {counted}" + (f" of {sandbox.attempts_limit}" if sandbox.attempts_limit else "")
    if not sandbox.next_attempt_at:
        return
    if sandbox.next_attempt_at + _PAST_S > wall_s:
        yield f"; next at {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(min(sandbox.next_attempt_at, LATEST_AT)))}"
    else:
        yield "; the next attempt is due"


_STATE_TEXTS = {
    State.ACCEPTED: "accepted, waits until its manager has read that the job completed",
    State.CONFIRMED: "waits for a data slot",
    State.LEASED: "has a data slot",
    State.MOVING: "being transferred",
    State.RETRY_WAIT: "waits for the next attempt",
    State.HANDED_OVER: "on its way through the overlay",
}

_PROGRESS_ORDER = {
    state: rank
    for rank, state in enumerate(
        (State.RETRY_WAIT, State.ACCEPTED, State.CONFIRMED, State.LEASED, State.MOVING, State.HANDED_OVER, State.FAILED)
    )
}


def _update_ad_state(given: DecisionInput, job: Job, ad_state: JobAdState, limits: DecisionLimits) -> Effects:
    # An end that no longer holds (a retry) is as urgent as a new one, because `stageout wait` reads it.
    at_once = ad_state.state != job.ad_state.state and (ad_state.state in ENDS or job.ad_state.state in ENDS)
    is_due = given.edited_s_ago >= limits.edit_interval_s and not _may_end_soon(given, job, limits)
    if ad_state != job.ad_state and (at_once or is_due):
        yield UpdateAdState(ad_state)


def _may_end_soon(given: DecisionInput, job: Job, limits: DecisionLimits) -> bool:
    """Tell whether the job has just ended: small output arrives at once, and progress before would only be overwritten.

    A clock that was set back delays nothing.
    """
    return job.ad_state.state == NOTHING_YET and abs(given.wall_s - job.entered_at) < limits.edit_interval_s / 4


def _handle_failure(given: DecisionInput, job: Job, own: Sandboxes, limits: DecisionLimits) -> Effects:
    failed = next(item.sandbox for item in own if item.sandbox.state == State.FAILED)
    words = failed.reason or "the manager gave no reason"
    advice = _GONE_ADVICE if failed.custody else FAILURES[ErrorClass.from_code(failed.error_code)].advice
    ad_state = replace(_summarize(job, own), state=State.FAILED.value, reason=f"{words}; {advice}")
    retrying = job.owner_request.verb in (Verb.RETRY, Verb.REDIRECT)
    if _may_hold(job) and (job.is_hold_unlogged or not retrying):
        yield from _hold(ad_state, failed.error_code, limits)
    else:
        yield from _update_ad_state(given, job, ad_state, limits)


def _may_hold(job: Job) -> bool:
    return not job.dag and (job.status == Status.COMPLETED or (job.held_by_us and job.is_hold_unlogged))


def _hold(ad_state: JobAdState, error_code: int, limits: DecisionLimits) -> Effects:
    subcode = HOLD_SUBCODE_BASE + error_code
    row = f"; see {limits.docs_url}/{_HOLD_CODES_PAGE}#hold-{subcode}" if limits.docs_url else f"; sub-code {subcode}"
    reason = f"Stage-out failed: {ad_state.reason}"[: _HOLD_REASON_CHARS - len(row)] + row
    # A server's text with a line end could look like another event in the job's log.
    reason = "".join(char if char.isprintable() else " " for char in reason)
    yield Hold(ad_state, subcode, reason)
    yield RestoreHoldReason(subcode, reason)


def _handle_loss(given: DecisionInput, job: Job, ad_state: JobAdState, limits: DecisionLimits) -> Effects:
    if job.dag:
        yield from _handle_lost_dag_node(given, job, ad_state, limits)
    elif not _may_hold(job):
        yield from _show_loss(given, job, replace(ad_state, reason=f"{ad_state.reason}; {RERUN_ADVICE}"), limits)
    elif job.status == Status.COMPLETED and job.reruns < limits.max_reruns:
        yield Rerun(JobAdState(run=job.run, reason=f"runs again: {ad_state.reason}"))
    else:
        reason = f"{ad_state.reason}{_AGAIN}{job.reruns} runs because of that (STAGEOUT_MAX_RERUNS); {RERUN_ADVICE}"
        yield from _hold(replace(ad_state, reason=reason), ErrorClass.UNKNOWN.code, limits)


def _show_loss(given: DecisionInput, job: Job, ad_state: JobAdState, limits: DecisionLimits) -> Effects:
    """Write a loss once. Its reason has the seconds of silence, which grow as long as the job is in the queue."""
    if (job.ad_state.state, job.ad_state.run) != (ad_state.state, ad_state.run):
        yield from _update_ad_state(given, job, ad_state, limits)


def _handle_lost_dag_node(given: DecisionInput, job: Job, ad_state: JobAdState, limits: DecisionLimits) -> Effects:
    """Show the loss. The node does not run again: `stageout wait` in its POST script fails, and RETRY submits anew."""
    yield from _show_loss(given, job, ad_state, limits)
    if (
        given.dag is not DagEnd.UNKNOWN
        and not job.stays_held
        and job.ad_state.state == State.LOST
        and given.edited_s_ago >= limits.edit_interval_s
    ):
        yield LeaveQueue()


def _leave_queue(job: Job, ad_state: JobAdState) -> Effects:
    if job.held_by_us:
        yield Complete("Stage-out was given up by the job's owner; the job is completed")
    yield UpdateAdState(ad_state)
    if not job.stays_held:  # its next run would leave without the output
        yield LeaveQueue()


def _mark_delivered(given: DecisionInput, job: Job, own: Sandboxes) -> Effects:
    sandboxes = [item.sandbox for item in own]
    checks = sorted({file.verified for sandbox in sandboxes for file in sandbox.files if file.verified})
    verified = ", ".join(checks) or "nothing more than success"
    total, files = _summarize(job, own), sum(sandbox.files_total for sandbox in sandboxes)
    size_bytes = sum(sandbox.bytes_total for sandbox in sandboxes)
    stats: dict[str, int | str] = {
        "Bytes": size_bytes,
        "Files": files,
        "Seconds": max(0, int(given.wall_s) - job.entered_at),
        "Attempts": max(sandbox.attempts for sandbox in sandboxes),
        "VerifiedBy": verified,
        "Hosts": " ".join(_hosts(sandboxes)),
        "DeliveredAt": int(given.wall_s),
    }
    reason = f"{count(files, 'file')}, {size(size_bytes)} delivered, verified by {verified}"
    reason += "".join(f"; {one.reason}" for one in sandboxes if one.reason and one.state in GOOD_ENDS and one.fallback)
    reason += _held_text(job)
    ad_state = replace(total, state=State.DELIVERED.value, reason=reason, bytes_left=0, files_left=0, next_attempt_at=0)
    if job.held_by_us:
        yield Complete("Stage-out has delivered the output; the job is completed")
    yield MarkDelivered(ad_state, stats)


def _hosts(sandboxes: Iterable[SandboxReport]) -> list[str]:
    """Return the first hosts of the files in reports, without those whose names cannot be shown."""
    hosts = dict.fromkeys(host_of(file.url) for sandbox in sandboxes for file in sandbox.files)
    return [host for host in hosts if host != UNKNOWN][:_HOSTS_SHOWN]


def _free_managers(given: DecisionInput, job: Job, own: Sandboxes, limits: DecisionLimits) -> Effects:
    """Let managers delete their records, because the job's ad has the end."""
    for item in own:
        if item.sandbox.state in FREED:
            yield SendOrder(item.manager, Action.FORGET, item.sandbox.number)
    if job.request:
        yield _clear_redirect(job, "its output is delivered or given up already")
    if job.ad_state.state == State.CANCELLED and not job.stays_held and given.edited_s_ago >= limits.edit_interval_s:
        yield LeaveQueue()


def _decide_without_record(given: DecisionInput, job: Job, limits: DecisionLimits) -> Effects:
    if job.ad_state.run == job.run and job.ad_state.state in (State.DELIVERED, State.CANCELLED):
        return
    kept = any(
        item.sandbox.number == _reported_run(given, job) and item.sandbox.state not in FREED for item in given.reported
    )
    known = _known_loss(job)
    if (known or given.waited_s >= limits.lease_s) and not (given.records_written and kept):
        reason = known or f"no manager reported its output within {given.waited_s:.0f} s"
        ad_state = JobAdState(State.LOST.value, job.run, reason)
        yield from _handle_loss(given, job, ad_state, limits)
    elif given.waited_s >= limits.record_wait_s:
        reason = (
            f"{job.handed_off} files were handed off, but the access point has no record of where "
            "(JOB_EPOCH_HISTORY_DIR); "
            "`stageout retry` delivers what the managers report"
        )
        if not given.records_written:
            reason = f"{job.handed_off} files were handed off, no manager has reported them all yet"
        reason += _held_text(job)
        yield from _update_ad_state(given, job, JobAdState(State.ACCEPTED.value, job.run, reason), limits)


def _show_unnamed_output(given: DecisionInput, job: Job, limits: DecisionLimits) -> Effects:
    """Show output of a failed transfer that only a manager's report tells of. It is neither sent nor deleted."""
    if not job.has_failed_transfer or (given.record is not None and given.record.tickets):
        return
    number = _reported_run(given, job)
    kept = [item for item in given.reported if item.sandbox.number == number and item.sandbox.state not in FREED]
    if kept:
        names = ", ".join(dict.fromkeys(item.manager_name for item in kept))
        reason = f"the access point has no record of the output at {names}, so it is not sent{_held_text(job)}"
        ad_state = JobAdState(State.ACCEPTED.value, job.run, reason, manager=",".join(names.split(", ")))
        yield from _update_ad_state(given, job, ad_state, limits)
    if job.request:
        yield _clear(job, "the access point has no record of this output")


# ---- jobs that left the queue ------------------------------------------------------------------------------------


def _decide_left_job(given: DecisionInput) -> Effects:
    """Cancel only if the history says removed, or cancelled by the owner. Otherwise the delivery goes on."""
    own = _own_of_left_job(given)
    for item in given.reported:
        sandbox = item.sandbox
        if sandbox.state in HOLD_STATES and _is_unreported_failure(given, item, own):
            yield RecordFailure(sandbox.number, sandbox.state, sandbox.reason or "the manager gave no reason")
        if sandbox.state == State.LOST and given.history is None:
            continue  # the history decides whether to tell the owner
        if sandbox.state in FREED:
            yield SendOrder(item.manager, Action.FORGET, sandbox.number)
        elif given.history is None:
            continue
        elif given.history.wants_nothing:
            yield SendOrder(item.manager, Action.CANCEL, sandbox.number)
        elif given.history.status == Status.COMPLETED and given.record is not None:
            yield from _decide_completed_sandbox(given, given.history.run, given.record, item, own=own)


def _is_unreported_failure(given: DecisionInput, item: ReportedSandbox, own: Sandboxes) -> bool:
    """Tell whether a completed job's owner expected this output, and the job's ad does not show its failure."""
    if (
        given.history is None
        or given.history.status != Status.COMPLETED
        or given.history.given_up
        or given.history.failed
    ):
        return False
    return item in own if given.record else item.sandbox.number == given.history.run


def _own_of_left_job(given: DecisionInput) -> tuple[ReportedSandbox, ...]:
    names = {(ticket.manager, ticket.name) for ticket in given.record.tickets} if given.record else set()
    return tuple(item for item in given.reported if any((item.manager, name) in names for name in item.sandbox.tickets))


def _decide_completed_sandbox(
    given: DecisionInput, run: int, record: RunRecord, item: ReportedSandbox, own: Sandboxes
) -> Effects:
    sandbox = item.sandbox
    is_own = item in own or _may_be_own(given, item, record, own)
    if not is_own and sandbox.number < run:
        yield SendOrder(item.manager, Action.SUPERSEDE, sandbox.number)
    elif sandbox.state == State.ACCEPTED and not _is_confirmed(given, item.manager, sandbox.number):
        named = _tickets_in(sandbox, item.manager, record, own) if is_own else ()
        yield _confirmation(item.manager, sandbox.number, named, 0)
