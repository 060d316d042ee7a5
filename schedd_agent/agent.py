"""One pass of the agent: query, decide, order, edit. Calls block; the daemon runs them in one thread.

The agent's memory may be lost: after a restart the queue, the records and the reports have all facts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from schedd_agent.collector import CollectorClient
from schedd_agent.custodians import CustodyTable
from schedd_agent.decisions import decide, failed_attempt, lost_bytes
from schedd_agent.edit_groups import apply_grouped
from schedd_agent.edits import Edit, edit_for
from schedd_agent.factories import FactoryLimits
from schedd_agent.file_records import FileRecorder
from schedd_agent.liveness import OWN_POOL, LivenessTracker
from schedd_agent.mail import MailKind, MailQueue
from schedd_agent.metrics import AgentCounts, put_pool, put_pool_matters
from schedd_agent.model import (
    ClearRequest,
    DagEnd,
    DecisionInput,
    DecisionLimits,
    Effect,
    FailedAttempt,
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
from schedd_agent.orders import OrderNumbers, OrderOutbox
from schedd_agent.output_watch import OutputWatch
from schedd_agent.queue import JobQueue, QueueError
from schedd_agent.receipts import Receipts, ids_of
from schedd_agent.reports import NewestReportNumbers, ReportTable, manager_of
from stageout import __version__
from stageout.condor.bindings import CondorError
from stageout.core import log
from stageout.core.clock import Clock
from stageout.core.durable import step
from stageout.core.failures import Failure, FailureLog
from stageout.core.metrics import Readings
from stageout.core.signing import SigningKey
from stageout.core.states import ENDS, FREED, State
from stageout.model.job import HOLD_STATES, HistoryRecord, Job, MailRecipient, Status
from stageout.model.run import RunRecord, name_of
from stageout.wire.custody import (
    Action,
    AgentNotice,
    BadPayload,
    JobKey,
    RefusedIdentity,
    SilentManager,
    notice_ad,
    orders_ad,
    silence_of_lost_s,
)
from stageout.wire.services import Letters

#: Seconds for the edits of one pass. Runs that end meanwhile wait for their orders.
_EDIT_BUDGET_S = 4.0
#: Least and most jobs whose edits are grouped. A batch that has begun is finished, so it must fit into the budget.
_LEAST_TOGETHER, _MOST_TOGETHER = 10, 50
_REFUSALS = 3
#: Most entries of a list in the notice.
_SHOWN = 10
#: Most jobs in the notice that have left the queue while a node has their output.
_LEFT_SHOWN = 200
#: Most owners of output on a silent node in the notice.
_OWNERS_SHOWN = 3
#: Numbers of jobs that the notice names of each owner with a refused identity.
_IDS_SHOWN = 5
#: Users whose jobs with another name are logged, and characters of such a name.
_REFUSED_USERS, _NAME_CHARS = 1000, 100
_AFTER_CONFIRMATION = frozenset(
    {State.LEASED, State.MOVING, State.RETRY_WAIT, State.DELIVERED, State.RELEASED, State.FAILED, State.LOST}
)
_PREVIOUS_RUNS = 20
_CLEAN_INTERVAL_S = 3600.0
#: Failures of output without a job that one pass records at most, because each has a record per file.
_FAILURES_AT_ONCE = 100
#: Files of records that one pass removes at most: orders must not wait for it.
_CLEANED_AT_ONCE = 20_000
#: States that stay true after the end of the pilot that reported them.
_FINAL_WITHOUT_PILOT = FREED | {State.HANDED_OVER}
_NO_LAST_REPORT = "its pilot ended and did not say what became of it"


@dataclass
class Agent:
    """State of the agent between two passes.

    :param name: name of the schedd, which is also the agent's. :param key: key for orders and notices.
    :param numbers: numbers of notices. :param newest_reports: numbers of managers' reports, over restarts.
    :param records_written: False without JOB_EPOCH_HISTORY_DIR. :param notice_interval_s: seconds between two notices.
    :param custody_table: output that pilots handed over, None to ask no custodians.
    :param failures: log of output that failed after its job had left the queue, None for no log.
    :param file_recorder: records of files whose delivery has ended, None for no records.
    :param mail_queue: mail to owners, None for no mail. :param factory_limits: None to raise no limits.
    :param output_watch: messages about whole clusters, None for no such messages.
    :param credential_port: URL of the credential server and SHA-256 of its certificate, empty texts without one.
    """

    name: str
    key: SigningKey
    queue: JobQueue
    collector_client: CollectorClient
    receipts: Receipts
    order_outbox: OrderOutbox
    liveness: LivenessTracker
    clock: Clock
    limits: DecisionLimits
    numbers: OrderNumbers
    newest_reports: NewestReportNumbers = field(default_factory=NewestReportNumbers)
    records_written: bool = True
    notice_interval_s: float = 60.0
    credential_port: tuple[str, str] = ("", "")
    custody_table: CustodyTable | None = None
    failures: FailureLog | None = None
    file_recorder: FileRecorder | None = None
    mail_queue: MailQueue | None = None
    factory_limits: FactoryLimits | None = None
    output_watch: OutputWatch | None = None
    report_table: ReportTable = field(init=False)
    counts: AgentCounts = field(init=False, default_factory=AgentCounts)
    has_edits_left: bool = field(init=False, default=False)
    _edited_at_s: dict[JobKey, float] = field(default_factory=dict)
    _due_since_s: dict[JobKey, float] = field(init=False, default_factory=dict)
    _together: int = field(init=False, default=_MOST_TOGETHER)
    _history: dict[JobKey, HistoryRecord] = field(default_factory=dict)
    _dag_ends: dict[int, DagEnd] = field(default_factory=dict)
    _asked_at_s: dict[object, float] = field(default_factory=dict)
    _refused: dict[JobKey, str] = field(default_factory=dict)
    _undecided: dict[JobKey, str] = field(default_factory=dict)
    _attempts: list[tuple[Job, FailedAttempt]] = field(init=False, default_factory=list)
    _notice_sent_s: float = float("-inf")
    _records_cleaned_s: float = field(init=False, default=0.0)
    _misnamed: list[RefusedIdentity] = field(init=False, default_factory=list)
    _misnamed_since: dict[str, int] = field(init=False, default_factory=dict)
    _refused_users: set[str] = field(init=False, default_factory=set)
    _foreign: list[RefusedIdentity] = field(init=False, default_factory=list)
    _letters: Letters = field(init=False, default_factory=Letters)
    _own_managers: frozenset[str] = field(init=False, default=frozenset())
    _left: dict[JobKey, list[str]] = field(init=False, default_factory=dict)
    _silent: dict[str, list[str]] = field(init=False, default_factory=dict)
    _lost_bytes: dict[JobKey, int] = field(init=False, default_factory=dict)
    _problem: str = ""

    def __post_init__(self) -> None:
        self.report_table = ReportTable(self.name, self.newest_reports)
        self._records_cleaned_s = self.clock.monotonic_s()  # at the start not all managers have reported yet

    def new_rules(self, key: SigningKey, limits: DecisionLimits, notice_interval_s: float) -> None:
        """Take over a changed configuration."""
        self.key, self.limits, self.notice_interval_s = key, limits, notice_interval_s
        self.order_outbox.set_lease(limits.managers_lease_s)
        self.liveness.set_lease(limits.lease_s)
        if self.output_watch:
            self.output_watch.set_query_interval(limits.history_s)

    def offer_credentials(self, url: str, certificate: str) -> None:
        """Tell managers where they get credentials. :param certificate: SHA-256 of the server's certificate."""
        self.credential_port = (url, certificate)

    def run_pass(self) -> bool:
        """Run one pass. Return False when the schedd or the collector did not answer."""
        start_s = self.clock.monotonic_s()
        is_done = self._try_pass()
        self.counts.end_pass(is_done, self.clock.monotonic_s() - start_s, self.clock.wall_s())
        return is_done

    def _try_pass(self) -> bool:
        try:
            self._query_collector()
            reported = self._reported_sandboxes()
            jobs = {job.key: job for job in self._identified(self.queue.jobs(reported.keys()))}
            self.counts.count_jobs(jobs.values())
            if self.factory_limits:
                self.factory_limits.follow(jobs.values())
            self.receipts.begin_pass()  # after the queue, so that each job that has ended has its record
            jobs = {key: self._with_recorded_files(job) for key, job in jobs.items()}
            if self.custody_table:
                self.custody_table.update_from_jobs(jobs, self._history, self._recorded_run)
            self._decide_all(jobs, reported)
            if self.output_watch:
                self.output_watch.post_ends(jobs.values())
            if self.mail_queue:
                self.mail_queue.send(self.clock.monotonic_s())
            self._publish_notice()
            self._forget_records(reported)
        except (CondorError, OSError) as problem:
            self._log_trouble(str(problem))
            return False
        self._log_trouble("")
        return True

    def _identified(self, found: Iterable[Job]) -> list[Job]:
        """Return the jobs whose GlobalJobId is their own. Log the first other one of each user.

        Owners can write the name of another job into theirs. Such a job takes part in nothing.
        """
        found = list(found)
        own = [job for job in found if job.has_own_name]
        refused = [job for job in found if not job.has_own_name]
        for job in refused:
            if job.user not in self._refused_users and len(self._refused_users) < _REFUSED_USERS:
                self._refused_users.add(job.user)
                log.warn(
                    "job-refused", job=f"{job.cluster}.{job.proc}", user=job.user, reason="Identity",
                    global_job_id=job.name[:_NAME_CHARS], advice="remove it; keep GlobalJobId in SECURE_JOB_ATTRS",
                )  # fmt: skip
        self._misnamed = self._refused_owners(refused)
        self.counts.count_refused(len(refused))
        return own

    def _refused_owners(self, refused: Sequence[Job]) -> list[RefusedIdentity]:
        """Return the owners of refused jobs, with the time since which each of them has some."""
        now = int(self.clock.wall_s())
        self._misnamed_since = {job.user: self._misnamed_since.get(job.user, now) for job in refused}
        ids = {user: [f"{job.cluster}.{job.proc}" for job in refused if job.user == user]
               for user in islice(self._misnamed_since, _SHOWN)}  # fmt: skip
        return [
            RefusedIdentity(
                owner=user,
                what="job",
                number=len(jobs),
                jobs=tuple(jobs[:_IDS_SHOWN]),
                since_at=self._misnamed_since[user],
            )
            for user, jobs in ids.items()
        ]

    def _reported_sandboxes(self) -> dict[JobKey, list[ReportedSandbox]]:
        """Return the reports of managers and custodians. Managers that ended as announced have lost the rest."""
        reported = self.report_table.by_job()
        if self.custody_table:
            reported = self.custody_table.with_answers(reported, self._is_gone)
        return {job: [self._as_ended(item) for item in items] for job, items in reported.items()}

    def _is_gone(self, manager: str) -> bool:
        return self.liveness.has_ended(manager) or self.liveness.silent_s(manager) >= self._patience_s(manager)

    def _patience_s(self, manager: str) -> float:
        """Return the seconds of silence after which a manager sends nothing more."""
        promised_s = self.report_table.promised_s.get(manager)
        return min(self.limits.lease_s, silence_of_lost_s(promised_s)) if promised_s else self.limits.lease_s

    def _as_ended(self, item: ReportedSandbox) -> ReportedSandbox:
        if item.sandbox.state in _FINAL_WITHOUT_PILOT or not self.liveness.has_ended(item.manager):
            return item
        return replace(item, sandbox=replace(item.sandbox, state=State.LOST.value, reason=_NO_LAST_REPORT))

    def has_new_receipts(self) -> bool:
        """Tell whether runs with receipts may have ended since the last call."""
        try:
            return self.records_written and self.receipts.has_news()
        except OSError as problem:
            log.error("records-read-failed", problem=problem, advice="let the agent's user read JOB_EPOCH_HISTORY")
            return False

    def _forget_records(self, reported: Iterable[JobKey]) -> None:
        """Remove records of jobs that left the queue, two leases after the last one, unless a manager reports them."""
        now_s = self.clock.monotonic_s()
        if not self.receipts.is_own or now_s - self._records_cleaned_s < _CLEAN_INTERVAL_S:
            return
        # A node that cannot be reached may come back with its report until its lease has ended.
        old = self.receipts.files_before(self.clock.wall_s() - max(_CLEAN_INTERVAL_S, 2 * self.limits.lease_s))
        clusters = [cluster for cluster, _ in old.values()]
        kept = self.queue.ids(min(clusters), max(clusters)) if old else set()
        kept |= {ids_of(job.name) for job in reported}
        unneeded = [path for path, ids in old.items() if ids not in kept]
        self.receipts.forget(unneeded[:_CLEANED_AT_ONCE])
        if len(unneeded) <= _CLEANED_AT_ONCE:
            self._records_cleaned_s = now_s

    def _query_collector(self) -> None:
        try:
            snapshot = self.collector_client.query_reports()
        except CondorError:
            self.liveness.record_failure()
            raise
        self._own_managers = frozenset(map(manager_of, snapshot.ads))
        if snapshot.letters is not None:
            self._letters = _letters_of(snapshot.letters)
        self.report_table.update([*snapshot.ads, *(ad for other in snapshot.others.values() for ad in other.ads)])
        now_s = self.clock.monotonic_s()
        self._update_liveness(OWN_POOL, snapshot.ads, now_s, snapshot.collector_age_s)
        for pool, other in snapshot.others.items():
            if other.is_answering:
                self._update_liveness(pool, other.ads, other.at_s, other.collector_age_s)
            else:
                self.liveness.record_failure(pool)
        self.liveness.restart_silence(self.report_table.disputed)
        for manager, (number, ends_in_s) in self.report_table.endings.items():
            self.liveness.record_announced_end(manager, number, ends_in_s)
        self.newest_reports.store(now_s)
        for manager, number in self.report_table.acknowledged(self.order_outbox.numbering).items():
            for key in self.order_outbox.acknowledged(manager, number):
                log.event(
                    "order-acknowledged",
                    manager=name_of(manager),
                    action=key.action.value,
                    job=key.job.name,
                    run=key.run,
                )

    def _update_liveness(
        self, pool: str, ads: Iterable[Mapping[str, Any]], at_s: float, collector_age_s: float | None
    ) -> None:
        names = {manager_of(ad) for ad in ads}
        reported_jobs = (pair for pair in self.report_table.reported_jobs() if name_of(pair[0]) in names)
        managers = (manager for manager in self.report_table.heard if name_of(manager) in names)
        self.liveness.record_snapshot(at_s, collector_age_s, shown=reported_jobs, managers=managers, pool=pool)

    def _decide_all(self, jobs: Mapping[JobKey, Job], reported: Mapping[JobKey, Sequence[ReportedSandbox]]) -> None:
        keys = jobs.keys() | reported.keys()
        self._attempts.clear()
        self._silent.clear()
        self._lost_bytes.clear()
        self._keep_only(keys)
        self._ask_history([key for key in reported if key not in jobs])
        self._foreign = self._foreign_output(jobs, reported)
        self._left = self._left_output(jobs, reported)
        self.counts.count_left(state for states in self._left.values() for state in states)
        self._ask_dags({job.dag for job in jobs.values() if job.dag and job.has_final_handoff})
        plans: list[tuple[Job, list[Effect]]] = []
        sends: list[tuple[JobKey, SendOrder]] = []
        late_failures: list[tuple[JobKey, RecordFailure]] = []
        for key in sorted(keys):
            job = jobs.get(key)
            effects = self._decide(key, job, reported.get(key, ()))
            if key.schedd != self.name:
                effects = self._under_another_name(key, job, effects)
            sends += [(key, effect) for effect in effects if isinstance(effect, SendOrder)]
            late_failures += [(key, effect) for effect in effects if isinstance(effect, RecordFailure)]
            if job:
                plans.append((job, [effect for effect in effects if not isinstance(effect, SendOrder)]))
        unrecorded = self._record_failures(late_failures, reported)
        waiting = self._record_files(sends, reported)
        if self._order([one for one in sends if one[0] not in unrecorded and one not in waiting]):
            self._publish_orders()
        self._watch_output(plans)
        self._edit_all(plans)

    def _foreign_output(
        self, jobs: Mapping[JobKey, Job], reported: Mapping[JobKey, Sequence[ReportedSandbox]]
    ) -> list[RefusedIdentity]:
        """Return owners of output under a name that no job of theirs has or had here, as far as the history goes."""
        users = {key.name: key.owner for key in jobs}
        found: dict[str, list[tuple[str, int]]] = {}
        for key, items in sorted(reported.items()):
            if key in jobs or key in self._history or (key.name not in users and key not in self._asked_at_s):
                continue
            held = (item.sandbox.accepted_at for item in items if item.sandbox.state not in FREED)
            found.setdefault(key.owner, []).extend((key.job_id, accepted_at) for accepted_at in held)
        return [
            RefusedIdentity(
                owner=owner,
                what="output",
                number=len(some),
                jobs=tuple(job for job, _ in some[:_IDS_SHOWN]),
                since_at=min(some_at),
            )
            for owner, some in found.items()
            if (some_at := [accepted_at for _, accepted_at in some])
        ]

    def _left_output(
        self, jobs: Mapping[JobKey, Job], reported: Mapping[JobKey, Sequence[ReportedSandbox]]
    ) -> dict[JobKey, list[str]]:
        """Return the states of output that managers hold for jobs that have left the queue."""
        found = {}
        for key, items in sorted(reported.items()):
            states = [item.sandbox.state for item in items if item.sandbox.state not in FREED]
            if states and key not in jobs:
                found[key] = states
        return found

    def _decide(self, key: JobKey, job: Job | None, reported: Sequence[ReportedSandbox]) -> list[Effect]:
        """Decide on one job. An error in that is logged once, and other jobs go on.

        :raises OSError: the records cannot be read.
        """
        given = self._decision_input(key, job, reported)
        try:
            effects = decide(given, self.limits)
        except Exception as problem:
            if self._undecided.get(key) != repr(problem):
                log.error("decision-failed", job=key.name, problem=repr(problem), advice="report this as a bug")
                self._undecided[key] = repr(problem)
            return []
        self._undecided.pop(key, None)
        self._note_silence(given)
        if job and any(_is_loss(job, effect) for effect in effects):
            self._lost_bytes[key] = lost_bytes(given)
        attempt = failed_attempt(given) if self.output_watch else None
        if job and attempt:
            self._attempts.append((job, attempt))
        return effects

    def _note_silence(self, given: DecisionInput) -> None:
        """Note the silent managers that hold output of a job in the queue, with the job's owner."""
        job = given.job
        if job is None or not job.has_final_handoff or job.ad_state.state in (*ENDS, State.HANDED_OVER):
            return
        for manager in given.absent_s:
            if self.liveness.silent_s(manager) > self.report_table.silent_after_s(manager):
                self._silent.setdefault(manager, []).append(job.user)

    def _silent_managers(self) -> list[SilentManager]:
        """Return the silent managers for the notice, those with the most output first."""
        most = sorted(self._silent.items(), key=lambda item: -len(item[1]))[:_SHOWN]
        return [
            SilentManager(
                name=name_of(manager),
                silent_s=int(silent_s := self.liveness.silent_s(manager)),
                outputs=len(users),
                lost_in_s=max(0, int(self._patience_s(manager) - silent_s)),
                owners=tuple(sorted(set(users))[:_OWNERS_SHOWN]),
            )
            for manager, users in most
        ]

    def _watch_output(self, plans: Iterable[tuple[Job, Sequence[Effect]]]) -> None:
        """Watch the clusters of jobs that this pass marks as delivered: after that they may leave the queue."""
        attempts, self._attempts = self._attempts, []
        if self.output_watch:
            delivered = (job for job, effects in plans if any(isinstance(one, MarkDelivered) for one in effects))
            self.output_watch.follow(delivered, attempts)

    def _record_files(
        self, sends: Iterable[tuple[JobKey, SendOrder]], reported: Mapping[JobKey, Sequence[ReportedSandbox]]
    ) -> set[tuple[JobKey, SendOrder]]:
        """Record the files of output that managers may now forget. Return the orders that must wait for that."""
        if self.file_recorder is None:
            return set()
        forgets = [one for one in sends if one[1].action is Action.FORGET and self.order_outbox.is_new(*one)]
        return self.file_recorder.record([one for one in forgets if not self._had_failed(*one)], reported)

    def _had_failed(self, job: JobKey, send: SendOrder) -> bool:
        """Tell whether the files were recorded when they failed, after their job had left the queue."""
        known = self.failures.get(*job, send.run) if self.failures else None
        return known is not None and known.state == State.FAILED

    def _record_failed_files(
        self, found: Iterable[Failure], reported: Mapping[JobKey, Sequence[ReportedSandbox]]
    ) -> bool:
        """Record the files of output whose failure is not recorded yet. Return False when that fails."""
        if self.file_recorder is None or self.failures is None:
            return True
        new = {
            one.key for one in found
            if one.state == State.FAILED and self.failures.get(*one.key) is None
        }  # fmt: skip
        return self.file_recorder.record_failed(
            item for name, owner, run in sorted(new) for item in reported.get(JobKey(name, owner), ())
            if (item.sandbox.number, item.sandbox.state) == (run, State.FAILED)
        )  # fmt: skip

    def _record_failures(
        self,
        late_failures: Sequence[tuple[JobKey, RecordFailure]],
        reported: Mapping[JobKey, Sequence[ReportedSandbox]],
    ) -> set[JobKey]:
        """Record and mail failures of output whose job has left the queue.

        :returns: jobs whose managers must keep their records, because the failure is not stored.
        """
        if not self.failures or not late_failures:
            return set()
        unknown = [key for key, one in late_failures if self.failures.get(*key, one.run) is None]
        later = set(unknown[_FAILURES_AT_ONCE:])
        late_failures = [one for one in late_failures if one[0] not in later]
        return later | self._record_some_failures(self.failures, late_failures, reported)

    def _record_some_failures(
        self,
        failures: FailureLog,
        late_failures: Sequence[tuple[JobKey, RecordFailure]],
        reported: Mapping[JobKey, Sequence[ReportedSandbox]],
    ) -> set[JobKey]:
        now_s = int(self.clock.wall_s())
        found = [
            Failure(
                job=key.name,
                owner=self._history[key].owner,
                run=one.run,
                state=one.state,
                reason=one.reason,
                at=now_s,
                user=key.owner,
            )
            for key, one in late_failures
        ]
        if not self._record_failed_files(found, reported):
            return {key for key, _ in late_failures}
        try:
            new = failures.add(found)
        except OSError as problem:
            log.error("failures-write-failed", failures=len(found), problem=problem, advice="make room in SPOOL")
            return {key for key, _ in late_failures}
        for one in new:
            log.warn("late-output-failed", job=one.job, run=one.run, state=one.state, reason=one.reason)
            key = JobKey(one.job, one.user)
            self._post(self._history[key].mail, f"Job {key.job_id}", MailKind.FAILED, one.reason)
        return set()

    def _post(self, to: MailRecipient, what: str, kind: MailKind, reason: str) -> None:
        if self.mail_queue:
            self.mail_queue.post(to, what, kind, reason)

    def _mail_owner(self, job: Job, effect: Effect) -> None:
        """Mail the owner the result of an edit."""
        name = f"Job {job.cluster}.{job.proc}"
        if isinstance(effect, RestoreHoldReason):
            self._post(job.mail, name, MailKind.HELD, effect.reason)
        elif isinstance(effect, MarkDelivered) and not job.dag and job.cluster_jobs != 1:
            # A node of a DAG, and a job that is alone in its cluster, have the message about the whole.
            self._post(job.mail, name, MailKind.DELIVERED, effect.ad_state.reason)
        elif (
            isinstance(effect, UpdateAdState)
            and effect.ad_state.state in HOLD_STATES
            and effect.ad_state.state != job.ad_state.state
        ):
            self._post(job.mail, name, MailKind.FAILED, effect.ad_state.reason)

    def _under_another_name(self, key: JobKey, job: Job | None, effects: Sequence[Effect]) -> list[Effect]:
        """Decide on a job from before the schedd was renamed. Its managers cannot get orders.

        Managers obey only the schedd named in the job's id, and would refuse the whole sheet.
        """
        if job is None:
            return []
        reason = f"its id names the schedd {key.schedd}, and managers obey only that: set SCHEDD_NAME back"
        reason += f" (from {self.name}) until this job has left the queue, or remove it"
        changed = [
            UpdateAdState(replace(one.ad_state, reason=reason)) if isinstance(one, UpdateAdState) else one
            for one in effects
        ]
        return [one for one in changed if not isinstance(one, SendOrder) and one != UpdateAdState(job.ad_state)]

    def _decision_input(self, key: JobKey, job: Job | None, reported: Sequence[ReportedSandbox]) -> DecisionInput:
        now_s = self.clock.monotonic_s()
        history = None if job else self._history.get(key)
        run = job.run if job else history.run if history else 0
        ended = job if job and job.has_final_handoff else history
        recorded_run = self.receipts.last_transfer(key, ended) if ended else run
        record = self.receipts.get(key, recorded_run)
        if job and job.has_final_handoff:
            self.liveness.start_waiting(key, run)
        record = with_report_keys(record, reported)
        managers = record.managers if record else ()
        previous_managers = self._previous_managers(key, recorded_run or run)
        has_flocked = job is None or job.has_flocked
        if job and record:
            self._refuse_unrecorded(key.name, record, reported)
        return DecisionInput(
            name=key.name,
            job=job,
            history=history,
            record=record,
            recorded_run=recorded_run,
            records_written=self.records_written,
            reported=tuple(reported),
            absent_s={manager: self.liveness.absent_s(manager, key, run, has_flocked) for manager in managers},
            waited_s=self.liveness.waited_s(key, run, has_flocked),
            previous_managers=previous_managers,
            patience_s={
                manager: self._patience_s(manager)
                for manager in {*managers, *(previous.manager for previous in previous_managers)}
            },
            edited_s_ago=now_s - self._edited_at_s.get(key, float("-inf")),
            dag=self._dag_ends.get(job.dag, DagEnd.UNKNOWN) if job else DagEnd.UNKNOWN,
            done=self.order_outbox.done(key),
            requests_done=self.order_outbox.requests_done(key),
            wall_s=self.clock.wall_s(),
        )

    def _with_recorded_files(self, job: Job) -> Job:
        """Return the job with the number of files that its record names, if a part of its transfer failed.

        A shadow may end at the failure, before it has counted the results of the plugins.
        """
        record = self.receipts.get(job.key, job.run) if job.has_failed_transfer else None
        return replace(job, handed_off=record.files) if record and record.tickets else job

    def _recorded_run(self, job: Job) -> int:
        """Return the number of a job's final run in the records, 0 while unknown."""
        if not (job.has_final_handoff and self.records_written):
            return job.run
        return self.receipts.last_transfer(job.key, job)

    def _refuse_unrecorded(self, name: str, record: RunRecord, reported: Sequence[ReportedSandbox]) -> None:
        """Log and ignore reports of managers that the run's record does not name."""
        for item in reported:
            tickets = {ticket.name for ticket in record.of(item.manager)}
            if item.sandbox.state in _AFTER_CONFIRMATION and not tickets & set(item.sandbox.tickets):
                named = ", ".join(f"{ticket.manager_name} {ticket.key}".strip() for ticket in record.tickets[:3])
                problem = f"{item.sandbox.state} of run {item.sandbox.number} of {name} is not believed: the run's "
                problem += f"record names {named or 'nobody'}"
                self.report_table.refuse(f"{item.manager_name} {item.key or '(unsigned)'}", problem)

    def _previous_managers(self, job: JobKey, run: int) -> dict[PreviousRunManager, float]:
        """Return the managers that accepted output of earlier runs, with their seconds of silence."""
        found = {}
        for number in range(max(1, run - _PREVIOUS_RUNS), run):
            record = self.receipts.get(job, number)
            for manager in record.managers if record else ():
                silent_s = self.limits.lease_s if self.liveness.has_ended(manager) else self.liveness.silent_s(manager)
                found[PreviousRunManager(manager, number)] = silent_s
        return found

    # ---- queries of the history and of DAGs -------- ---------------------------------------------------------------

    def _ask_history(self, gone: Iterable[JobKey]) -> None:
        """Read the history for reported jobs outside the queue, seldom, because reading it is expensive."""
        unknown = [key for key in gone if key not in self._history and self._may_ask(key)]
        if unknown:
            self._history.update(self.queue.history_records(unknown))

    def _ask_dags(self, clusters: Set[int]) -> None:
        unknown = [cluster for cluster in clusters if cluster not in self._dag_ends and self._may_ask(cluster)]
        if unknown:
            self._dag_ends.update(self.queue.dags(unknown))

    def _may_ask(self, what: object) -> bool:
        now_s = self.clock.monotonic_s()
        if now_s - self._asked_at_s.get(what, float("-inf")) < self.limits.history_s:
            return False
        self._asked_at_s[what] = now_s
        return True

    def _keep_only(self, jobs: Set[JobKey]) -> None:
        self.order_outbox.keep_only(jobs)
        self.liveness.keep_only(jobs)
        if self.failures:
            self.failures.keep_only(jobs)
        for memory in (self._edited_at_s, self._history, self._undecided):
            for job in memory.keys() - jobs:
                del memory[job]
        now_s = self.clock.monotonic_s()
        self._asked_at_s = {what: at for what, at in self._asked_at_s.items() if now_s - at < 2 * self.limits.history_s}

    # ---- orders --------------------------------------------------------------------------------------------------

    def _order(self, sends: Sequence[tuple[JobKey, SendOrder]]) -> bool:
        """Store new orders. Return False when that fails: then no manager gets a lease without them."""
        forgets = any(send.action is Action.FORGET for _, send in sends)
        try:
            # The end is in the job's ad before a manager may forget its record (docs/developer/durable-steps.md).
            with step("orders-forget") if forgets else nullcontext():
                new = self.order_outbox.add(sends)
        except OSError as problem:
            log.error("orders-write-failed", orders=len(sends), problem=problem, advice="make room in SPOOL")
            return False
        for job, send in new:
            log.event(
                "order-sent",
                action=send.action.value,
                manager=name_of(send.manager),
                job=job.name,
                run=send.run,
                files=send.files,
            )
        return True

    def _publish_orders(self) -> None:
        now_s = self.clock.monotonic_s()
        sheets = self.order_outbox.due(
            now_s,
            wall_s=self.clock.wall_s(),
            heard=self.report_table.numbers,
            busy=self.report_table.busy(),
            unleased=self.report_table.unleased(),
            promised_s=self.report_table.promised_s,
        )
        if not sheets:
            return
        with step("orders-advertise"):
            self.collector_client.publish([orders_ad(sheet, self.key) for sheet in sheets])
        for sheet in sheets:
            self.order_outbox.published(sheet, now_s)

    def _publish_notice(self) -> None:
        """Publish that the agent is alive: managers accept output only while they see this."""
        now_s = self.clock.monotonic_s()
        if len(self._refused) >= _REFUSALS or now_s - self._notice_sent_s < self.notice_interval_s:
            return
        sent_at = int(self.clock.wall_s())
        refused = [f"{what}: {problem}" for what, problem in self.report_table.refused[-_SHOWN:]]
        facts = {"version": __version__, "records": self.records_written, "refused": refused}
        facts["leave_limit_s"] = self.limits.leave_s
        facts["history_problem"] = self.file_recorder.problem if self.file_recorder else ""
        facts["left"] = dict(self.counts.left_output)
        facts["left_jobs"] = [[key.name, key.owner] for key in islice(self._left, _LEFT_SHOWN)]
        facts["silent"] = self._silent_managers()
        facts["identities"] = [*self._misnamed, *self._foreign[:_SHOWN]]
        (number,) = self.numbers.take(1)
        renewal_url, renewal_certificate = self.credential_port
        notice = AgentNotice(
            agent=self.name,
            schedd=self.name,
            key=self.key.public,
            number=number,
            sent_at=sent_at,
            renewal_url=renewal_url,
            renewal_certificate=renewal_certificate,
            extra=facts,
            vouches=self.key.vouches,
        )
        self.collector_client.publish([notice_ad(notice, self.key)])
        self._notice_sent_s = now_s

    # ---- edits ---------------------------------------------------------------------------------------------------

    def _edit_all(self, plans: Iterable[tuple[Job, Sequence[Effect]]]) -> None:
        """Make edits for a limited time: ends before progress, the oldest first. Later passes make the rest."""
        now_s = self.clock.monotonic_s()
        until_s = now_s + _EDIT_BUDGET_S
        wanted = [plan for plan in plans if plan[1]]
        self._due_since_s = {job.key: self._due_since_s.get(job.key, now_s) for job, _ in wanted}
        wanted.sort(key=self._edit_rank)
        self.has_edits_left = False
        for batch in _batches(wanted, self._together):
            if self.clock.monotonic_s() > until_s:
                self.has_edits_left = True
                break
            if self._edit_job(*batch[0]) if len(batch) == 1 else self._edit_batch(batch, until_s):
                self._refused.clear()

    def _edit_rank(self, plan: tuple[Job, Sequence[Effect]]) -> tuple[bool, float, int, int, int]:
        job, effects = plan
        return _is_progress(job, effects), self._due_since_s[job.key], job.entered_at, job.cluster, job.proc

    def _edit_batch(self, batch: Sequence[tuple[Job, Sequence[Effect]]], until_s: float) -> bool:
        """Apply effects of many jobs, those of one attribute and value together. Return False if all are refused."""
        stopped: set[JobKey] = set()
        start_s = self.clock.monotonic_s()
        for position in range(max(len(effects) for _, effects in batch)):
            found = [(job, effects[position]) for job, effects in batch if position < len(effects)]
            made = [(job, effect, edit_for(job, effect, self.clock.wall_s())) for job, effect in found]
            for label in dict.fromkeys(edit.label for _, _, edit in made if edit):
                some = [
                    (job, effect, edit) for job, effect, edit in made
                    if edit and edit.label == label and job.key not in stopped
                ]  # fmt: skip
                stopped |= self._apply_together(some, until_s)
        for job, _ in batch:
            if job.key not in stopped:
                self._due_since_s.pop(job.key, None)
        self._together = together_after(self._together, self.clock.monotonic_s() - start_s)
        return len(stopped) < len(batch)

    def _apply_together(self, some: Sequence[tuple[Job, Effect, Edit]], until_s: float) -> set[JobKey]:
        """Make edits with the same label. Return the jobs that were refused, or that are left to the next pass."""
        if not some:
            return set()
        self._edited_at_s.update((job.key, self.clock.monotonic_s()) for job, _, _ in some)
        done = apply_grouped(
            [edit for _, _, edit in some], self.queue.set_in, lambda: self.clock.monotonic_s() <= until_s
        )
        self.has_edits_left |= bool(done.left)
        for job, effect, edit in some:
            if edit.job_id in done.refused:
                self._refuse(job, type(effect).__name__, str(done.refused[edit.job_id]))
            elif edit.job_id in done.left:
                del self._edited_at_s[job.key]
            else:
                self._end_effect(job, effect)
        stopped = done.refused.keys() | done.left
        return {job.key for job, _, edit in some if edit.job_id in stopped}

    def _edit_job(self, job: Job, effects: Sequence[Effect]) -> bool:
        """Apply the effects of one job in order, up to the first that is refused because the job has changed."""
        self._edited_at_s[job.key] = self.clock.monotonic_s()
        for effect in effects:
            try:
                self._apply_effect(job, effect)
            except QueueError as problem:
                self._refuse(job, type(effect).__name__, str(problem))
                return False
            self._end_effect(job, effect)
        self._due_since_s.pop(job.key, None)
        return True

    def _end_effect(self, job: Job, effect: Effect) -> None:
        """Count, log and mail what was done, and allow orders that it allows."""
        ad_state = getattr(effect, "ad_state", None)
        state, reason = (ad_state.state, ad_state.reason) if ad_state else ("", "")
        kind = type(effect).__name__
        self._count_edit(job, effect)
        log.event("job-edited", job=job.name, run=job.run, effect=kind, state=state, reason=reason)
        self._mail_owner(job, effect)
        if isinstance(effect, ClearRequest):
            self.order_outbox.allow_again(job.key)

    def _count_edit(self, job: Job, effect: Effect) -> None:
        self.counts.edits[type(effect).__name__] += 1
        if _is_loss(job, effect):
            self.counts.lose(self._lost_bytes.pop(job.key, 0))
        if isinstance(effect, MarkDelivered) and job.status == Status.COMPLETED and job.entered_at:
            self.counts.delays.observe(max(0.0, self.clock.wall_s() - job.entered_at))

    def readings(self) -> Readings:
        """Return the metrics of this moment. Call it in the thread of the passes."""
        found = self.counts.readings()
        found.put("stageout_agent_orders_outstanding", len(self.order_outbox.open))
        reports = list(self.report_table.reports_by_collector_clock())
        put_pool(found, reports, self.clock.wall_s(), {name_of(manager) for manager in self._silent})
        own = (report for report in reports if report.manager in self._own_managers)
        put_pool_matters(found, own, self._letters, self.clock.wall_s() - self._letters.ahead_s(self.name))
        return found

    def _refuse(self, job: Job, effect: str, problem: str) -> None:
        """Log a refused edit. One refusal means that the job has changed, several that the agent lacks the right."""
        self.counts.fail_edit()
        if self._refused.get(job.key) != problem:
            log.warn("job-edit-refused", job=job.name, run=job.run, effect=effect, problem=problem)
        known = len(self._refused)
        self._refused[job.key] = problem
        if known < _REFUSALS <= len(self._refused):
            log.error("all-edits-refused", jobs=known + 1, advice="the agent's user must be in QUEUE_SUPER_USERS")

    def _apply_effect(self, job: Job, effect: Effect) -> None:
        if isinstance(effect, Remove):
            self.queue.remove(job, effect.reason)
            return
        edit = edit_for(job, effect, self.clock.wall_s())
        if edit:
            self.queue.apply(edit)

    def _log_trouble(self, problem: str) -> None:
        if problem != self._problem:
            if problem:
                log.warn("pass-failed", problem=problem)
            else:
                log.event("pass-recovered")
        self._problem = problem


def _letters_of(ads: Iterable[Mapping[str, Any]]) -> Letters:
    """Return what can be read of these ads. They are for people only, so a bad one is nobody's fault here."""
    found = Letters()
    for ad in ads:
        with suppress(BadPayload):
            found.take(ad)
    return found


def with_report_keys(record: RunRecord | None, reported: Sequence[ReportedSandbox]) -> RunRecord | None:
    """Return the record, with keys for receipts of managers that began to sign after the hand-off."""
    if record is None or all(ticket.key for ticket in record.tickets):
        return record
    keys = {(item.manager_name, name): item.key for item in reported for name in item.sandbox.tickets}
    return RunRecord(
        tuple(
            replace(ticket, key=ticket.key or keys.get((ticket.manager_name, ticket.name), ""))
            for ticket in record.tickets
        )
    )


def _is_progress(job: Job, effects: Sequence[Effect]) -> bool:
    """Tell whether a plan only shows output on its way. An end that no longer holds is as urgent as a new one."""
    last = effects[-1]
    return isinstance(last, UpdateAdState) and not {last.ad_state.state, job.ad_state.state} & ENDS


def _is_loss(job: Job, effect: Effect) -> bool:
    """Tell whether an effect says for the first time that the job's output is lost."""
    if isinstance(effect, Rerun):
        return True
    ad_state = getattr(effect, "ad_state", None)
    now, before = (ad_state.state, ad_state.run) if ad_state else ("", 0), (job.ad_state.state, job.ad_state.run)
    return now[0] == State.LOST and now != before


def together_after(count: int, took_s: float) -> int:
    """Return how many jobs to edit together after a batch that took so long: a slow schedd gets shorter batches."""
    if took_s > _EDIT_BUDGET_S:
        return max(_LEAST_TOGETHER, count // 2)
    return min(_MOST_TOGETHER, 2 * count) if took_s < _EDIT_BUDGET_S / 4 else count


def _batches(plans: Sequence[tuple[Job, Sequence[Effect]]], most: int) -> Iterator[list[tuple[Job, Sequence[Effect]]]]:
    """Yield plans whose edits share transactions, ends and progress apart, and each other plan alone."""
    batch: list[tuple[Job, Sequence[Effect]]] = []
    for job, effects in plans:
        if not all(_is_groupable(job, effect) for effect in effects):
            yield [(job, effects)]
            continue
        if len(batch) == most or (batch and _is_progress(*batch[0]) != _is_progress(job, effects)):
            yield batch
            batch = []
        batch.append((job, effects))
    if batch:
        yield batch


def _is_groupable(job: Job, effect: Effect) -> bool:
    edit = edit_for(job, effect, 0.0)
    return edit is not None and edit.is_groupable
