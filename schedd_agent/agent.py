"""One pass of the agent: look, decide, order, edit. Blocking; the daemon runs it in one thread.

Nothing that matters is kept here: after a restart the queue, the records and the reports say everything again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from schedd_agent.custodians import Custodians
from schedd_agent.edits import edit_for
from schedd_agent.factories import Factories
from schedd_agent.leases import OWN_POOL, View
from schedd_agent.mail import News, Outbox
from schedd_agent.model import (
    HOLDING,
    ClearRequest,
    Dag,
    Deliver,
    Effect,
    Elder,
    Job,
    Limits,
    MailTo,
    Note,
    Past,
    Record,
    Remove,
    Seen,
    Send,
    Show,
    Situation,
    Told,
    name_of,
)
from schedd_agent.notices import CollectorError, Directory
from schedd_agent.orders import Book, Numbers
from schedd_agent.queue import Queue, QueueError
from schedd_agent.receipts import Receipts
from schedd_agent.reports import Board, Newest, manager_of
from schedd_agent.tracker import decide
from stageout import __version__
from stageout.core import log
from stageout.core.clock import Clock
from stageout.core.durable import step
from stageout.core.failures import Failure, FailureLog
from stageout.core.signing import SigningKey
from stageout.core.states import FREED, State
from stageout.wire.custody import Action, AgentNotice, Run, notice_ad, orders_ad

#: Edits of one pass may take so long (s): the next runs that end are waiting for their orders meanwhile.
_EDIT_BUDGET_S = 4.0
_REFUSALS = 3
_REFUSALS_SHOWN = 10
_AFTER_CONFIRMATION = frozenset(
    {State.LEASED, State.MOVING, State.RETRY_WAIT, State.DELIVERED, State.RELEASED, State.FAILED, State.LOST}
)
_ELDERS = 20
#: What is said of these stays true when the pilot that said it has ended.
_AFTER_THE_PILOT = FREED | {State.HANDED_OVER}
_NO_WORD = "its pilot ended and did not say what became of it"


@dataclass
class Agent:
    """State of the agent between two passes.

    :param name: of the schedd, and so of the agent.
    :param key: signs orders and notices. :param numbers: of notices. :param newest: reports seen, over restarts.
    :param records_written: the AP has JOB_EPOCH_HISTORY.
    :param notice_interval_s: seconds between two notices.
    :param custodians: of output that pilots handed over, None where nobody is asked.
    :param failures: of output whose job has left the queue, None where they are not recorded.
    :param outbox: mail to owners, None where nobody is mailed. :param factories: None where no limit is raised.
    :param credential_port: URL for renewed credentials and SHA-256 of its certificate, empty texts without one.
    """

    name: str
    key: SigningKey
    queue: Queue
    directory: Directory
    receipts: Receipts
    book: Book
    view: View
    clock: Clock
    limits: Limits
    numbers: Numbers
    newest: Newest = field(default_factory=Newest)
    records_written: bool = True
    notice_interval_s: float = 60.0
    credential_port: tuple[str, str] = ("", "")
    custodians: Custodians | None = None
    failures: FailureLog | None = None
    outbox: Outbox | None = None
    factories: Factories | None = None
    board: Board = field(init=False)
    has_edits_left: bool = field(init=False, default=False)
    _edited: dict[str, float] = field(default_factory=dict)
    _past: dict[str, Past] = field(default_factory=dict)
    _dags: dict[int, Dag] = field(default_factory=dict)
    _asked: dict[object, float] = field(default_factory=dict)
    _refused: dict[str, str] = field(default_factory=dict)
    _noticed_s: float = float("-inf")
    _trouble: str = ""

    def __post_init__(self) -> None:
        self.board = Board(self.name, self.newest)

    def run_pass(self) -> bool:
        """Do what there is to do now; False when schedd or collector did not answer."""
        try:
            self._look()
            seen = self._seen()
            jobs = {job.name: job for job in self.queue.jobs(seen.keys())}
            if self.factories:
                self.factories.follow(jobs.values())
            self.read_receipts()  # after the queue: the record of a job that is Completed there has been written
            if self.custodians:
                self.custodians.look_at(jobs, self._past, self._counts)
            self._work(jobs, seen)
            if self.outbox:
                self.outbox.send(self.clock.monotonic_s())
            self._notify()
        except (QueueError, CollectorError, OSError) as problem:
            self._say_trouble(str(problem))
            return False
        self._say_trouble("")
        return True

    def _seen(self) -> dict[str, list[Seen]]:
        """Return the reports of managers and custodians, adapted for managers that have ended as announced."""
        seen = self.board.by_job()
        if self.custodians:
            seen = self.custodians.completed(seen, self._is_gone)
        return {job: [self._as_of_its_end(item) for item in items] for job, items in seen.items()}

    def _is_gone(self, manager: str) -> bool:
        return self.view.has_ended(manager) or self.view.silent_s(manager) >= self.limits.lease_s

    def _as_of_its_end(self, item: Seen) -> Seen:
        if item.sandbox.state in _AFTER_THE_PILOT or not self.view.has_ended(item.manager):
            return item
        return replace(item, sandbox=replace(item.sandbox, state=State.LOST.value, reason=_NO_WORD))

    def read_receipts(self) -> int:
        """Follow the AP's records; returns how many new receipts came."""
        try:
            return self.receipts.read_new() if self.records_written else 0
        except OSError as problem:
            log.error("records-unreadable", problem=problem, advice="let the agent's user read JOB_EPOCH_HISTORY")
            return 0

    def _look(self) -> None:
        try:
            look = self.directory.look()
        except CollectorError:
            self.view.failed()
            raise
        self.board.update([*look.ads, *(ad for other in look.others.values() for ad in other.ads)])
        now_s = self.clock.monotonic_s()
        self._view_pool(OWN_POOL, look.ads, now_s, look.collector_age_s)
        for pool, other in look.others.items():
            if other.is_answering:
                self._view_pool(pool, other.ads, other.at_s, other.collector_age_s)
            else:
                self.view.failed(pool)
        self.view.disputed(self.board.disputed)
        for manager, (number, ends_in_s) in self.board.endings.items():
            self.view.ending(manager, number, ends_in_s)
        self.newest.store(now_s)
        for manager, number in self.board.acknowledged(self.book.numbering).items():
            for key in self.book.acknowledged(manager, number):
                log.event("order-done", manager=name_of(manager), action=key.action.value, job=key.job, run=key.run)

    def _view_pool(self, pool: str, ads: Iterable[Mapping[str, Any]], at_s: float, collector_age_s: float) -> None:
        names = {manager_of(ad) for ad in ads}
        shown = (pair for pair in self.board.shown() if name_of(pair[0]) in names)
        managers = (manager for manager in self.board.numbers if name_of(manager) in names)
        self.view.looked(at_s, collector_age_s, shown, managers, pool)

    def _work(self, jobs: Mapping[str, Job], seen: Mapping[str, Sequence[Seen]]) -> None:
        names = jobs.keys() | seen.keys()
        self._keep_only(names)
        self._ask_history([name for name in seen if name not in jobs])
        self._ask_dags({job.dag for job in jobs.values() if job.dag and job.settling})
        plans: list[tuple[Job, list[Effect]]] = []
        sends: list[tuple[str, Send]] = []
        notes: list[tuple[str, Note]] = []
        for name in sorted(names):
            job = jobs.get(name)
            effects = decide(self._situation(name, job, seen.get(name, ())), self.limits)
            if Run(name, 0).schedd != self.name:
                effects = self._under_another_name(name, job, effects)
            sends += [(name, effect) for effect in effects if isinstance(effect, Send)]
            notes += [(name, effect) for effect in effects if isinstance(effect, Note)]
            if job:
                plans.append((job, [effect for effect in effects if not isinstance(effect, Send)]))
        unrecorded = self._record_failures(notes)
        if self._order([(name, send) for name, send in sends if name not in unrecorded]):
            self._publish_orders()
        self._edit_all(plans)

    def _record_failures(self, notes: Sequence[tuple[str, Note]]) -> set[str]:
        """Record and mail what failed after its job had left.

        :returns: jobs of which nothing may be forgotten yet.
        """
        if not self.failures or not notes:
            return set()
        now_s = int(self.clock.wall_s())
        found = [Failure(name, self._past[name].owner, n.run, n.state, n.reason, now_s) for name, n in notes]
        try:
            new = self.failures.add(found)
        except OSError as problem:
            log.error("failures-not-stored", failures=len(found), problem=problem, advice="make room in SPOOL")
            return {failure.job for failure in found}
        for one in new:
            log.warn("output-failed-late", job=one.job, run=one.run, state=one.state, reason=one.reason)
            self._post(self._past[one.job].mail, Run(one.job, 0).job_id, News.FAILED, one.reason)
        return set()

    def _post(self, to: MailTo, job_id: str, news: News, reason: str) -> None:
        if self.outbox:
            self.outbox.post(to, job_id, news, reason)

    def _tell(self, job: Job, effect: Effect) -> None:
        """Mail the owner what an edit has just made true."""
        job_id = f"{job.cluster}.{job.proc}"
        if isinstance(effect, Told):
            self._post(job.mail, job_id, News.HELD, effect.reason)
        elif isinstance(effect, Deliver):
            self._post(job.mail, job_id, News.DELIVERED, effect.shown.reason)
        elif isinstance(effect, Show) and effect.shown.state in HOLDING and effect.shown.state != job.shown.state:
            self._post(job.mail, job_id, News.FAILED, effect.shown.reason)

    def _under_another_name(self, name: str, job: Job | None, effects: Sequence[Effect]) -> list[Effect]:
        """Decide on a job from before the schedd was renamed: its managers cannot be asked.

        They obey only the name in its id. One order about it, and they would refuse the whole sheet.
        """
        if job is None:
            return []
        reason = f"its id names the schedd {Run(name, 0).schedd}, and managers obey only that: set SCHEDD_NAME back"
        reason += f" (from {self.name}) until this job has left the queue, or remove it"
        shown = [Show(replace(one.shown, reason=reason)) if isinstance(one, Show) else one for one in effects]
        return [one for one in shown if not isinstance(one, Send) and one != Show(job.shown)]

    def _situation(self, name: str, job: Job | None, seen: Sequence[Seen]) -> Situation:
        now_s = self.clock.monotonic_s()
        past = None if job else self._past.get(name)
        run = job.run if job else past.run if past else 0
        ended = job if job and job.settling else past
        counts = self.receipts.last_transfer(name, ended) if ended else run
        record = self.receipts.get(name, counts, job.owner if job else "", ended.executing_since if ended else 0)
        if job and job.settling:
            self.view.waiting(name, run)
        record = adopted(record, seen)
        managers = record.managers if record else ()
        has_flocked = job is None or job.has_flocked
        if job and record:
            self._name_impostors(name, record, seen)
        return Situation(
            name=name,
            job=job,
            past=past,
            record=record,
            counts=counts,
            records_written=self.records_written,
            seen=tuple(seen),
            absent_s={manager: self.view.absent_s(manager, name, run, has_flocked) for manager in managers},
            waited_s=self.view.waited_s(name, run, has_flocked),
            elders=self._elders(name, counts or run),
            edited_s_ago=now_s - self._edited.get(name, float("-inf")),
            dag=self._dags.get(job.dag, Dag.UNKNOWN) if job else Dag.UNKNOWN,
            done=self.book.done(name),
            wall_s=self.clock.wall_s(),
        )

    def _counts(self, job: Job) -> int:
        """Number of the run that counts, 0 while it is not known."""
        if not (job.settling and self.records_written):
            return job.run
        return self.receipts.last_transfer(job.name, job)

    def _name_impostors(self, name: str, record: Record, seen: Sequence[Seen]) -> None:
        """Log reports on the run by managers that its record does not name; they are not believed."""
        for item in seen:
            tickets = {ticket.name for ticket in record.of(item.manager)}
            if item.sandbox.state in _AFTER_CONFIRMATION and not tickets & set(item.sandbox.tickets):
                named = ", ".join(f"{ticket.manager_name} {ticket.key}".strip() for ticket in record.tickets[:3])
                problem = f"{item.sandbox.state} of run {item.sandbox.number} of {name} is not believed: the run's "
                problem += f"record names {named or 'nobody'}"
                self.board.refuse(f"{item.manager_name} {item.key or '(unsigned)'}", problem)

    def _elders(self, name: str, run: int) -> dict[Elder, float]:
        """Managers that took over output of earlier runs, and for how long each has not been heard of."""
        found = {}
        for number in range(max(1, run - _ELDERS), run):
            record = self.receipts.get(name, number)
            for manager in record.managers if record else ():
                silent_s = self.limits.lease_s if self.view.has_ended(manager) else self.view.silent_s(manager)
                found[Elder(manager, number)] = silent_s
        return found

    # ---- what the schedd is asked beside the queue ---------------------------------------------------------------

    def _ask_history(self, gone: Iterable[str]) -> None:
        """Read how jobs left the queue that managers still report; seldom, because reading the history is dear."""
        unknown = [name for name in gone if name not in self._past and self._may_ask(name)]
        if unknown:
            self._past.update(self.queue.past(unknown))

    def _ask_dags(self, clusters: Set[int]) -> None:
        unknown = [cluster for cluster in clusters if cluster not in self._dags and self._may_ask(cluster)]
        if unknown:
            self._dags.update(self.queue.dags(unknown))

    def _may_ask(self, what: object) -> bool:
        now_s = self.clock.monotonic_s()
        if now_s - self._asked.get(what, float("-inf")) < self.limits.history_s:
            return False
        self._asked[what] = now_s
        return True

    def _keep_only(self, names: Set[str]) -> None:
        self.book.keep_only(set(names))
        self.view.keep_only(set(names))
        for memory in (self._edited, self._past):
            for name in memory.keys() - names:
                del memory[name]
        now_s = self.clock.monotonic_s()
        self._asked = {what: at for what, at in self._asked.items() if now_s - at < 2 * self.limits.history_s}

    # ---- orders --------------------------------------------------------------------------------------------------

    def _order(self, sends: Sequence[tuple[str, Send]]) -> bool:
        """Take orders up. False when they cannot be stored: then no manager gets a lease without them either."""
        forgets = any(send.action is Action.FORGET for _, send in sends)
        try:
            # An end is in the job's ad before its record may go: see docs/ORDERING.md.
            with step("orders-forget") if forgets else nullcontext():
                new = self.book.add(sends)
        except OSError as problem:
            log.error("orders-not-stored", orders=len(sends), problem=problem, advice="make room in SPOOL")
            return False
        for name, send in new:
            log.event(
                "order",
                action=send.action.value,
                manager=name_of(send.manager),
                job=name,
                run=send.run,
                files=send.files,
            )
        return True

    def _publish_orders(self) -> None:
        now_s = self.clock.monotonic_s()
        sheets = self.book.due(now_s, self.clock.wall_s(), self.board.numbers, self.board.busy(), self.board.unleased())
        if not sheets:
            return
        with step("orders-advertise"):
            self.directory.publish([orders_ad(sheet, self.key) for sheet in sheets])
        for sheet in sheets:
            self.book.published(sheet, now_s)

    def _notify(self) -> None:
        """Say that the agent is alive: managers take output over only while they hear that."""
        now_s = self.clock.monotonic_s()
        if len(self._refused) >= _REFUSALS or now_s - self._noticed_s < self.notice_interval_s:
            return
        sent_at = int(self.clock.wall_s())
        refused = [f"{what}: {problem}" for what, problem in self.board.refused[-_REFUSALS_SHOWN:]]
        facts = {"version": __version__, "records": self.records_written, "refused": refused}
        facts["leave_limit_s"] = self.limits.leave_s
        (number,) = self.numbers.take(1)
        notice = AgentNotice(
            self.name, self.name, self.key.public, number, sent_at, *self.credential_port, facts, self.key.vouches
        )
        self.directory.publish([notice_ad(notice, self.key)])
        self._noticed_s = now_s

    # ---- edits ---------------------------------------------------------------------------------------------------

    def _edit_all(self, plans: Iterable[tuple[Job, Sequence[Effect]]]) -> None:
        """Carry out edits for a limited time, ends before progress; what is left is decided again in the next pass."""
        until_s = self.clock.monotonic_s() + _EDIT_BUDGET_S
        wanted = sorted((plan for plan in plans if plan[1]), key=lambda plan: isinstance(plan[1][-1], Show))
        self.has_edits_left = False
        for job, effects in wanted:
            if self.clock.monotonic_s() > until_s:
                self.has_edits_left = True
                break
            if self._edit_job(job, effects):
                self._refused.clear()

    def _edit_job(self, job: Job, effects: Sequence[Effect]) -> bool:
        """Carry out the effects of one job in their order, up to the first that is refused (the job has moved on)."""
        self._edited[job.name] = self.clock.monotonic_s()
        for effect in effects:
            try:
                self._carry_out(job, effect)
            except QueueError as problem:
                self._refuse(job, type(effect).__name__, str(problem))
                return False
            shown = getattr(effect, "shown", None)
            state, reason = (shown.state, shown.reason) if shown else ("", "")
            kind = type(effect).__name__
            log.event("edit", job=job.name, run=job.run, effect=kind, state=state, reason=reason)
            self._tell(job, effect)
        return True

    def _refuse(self, job: Job, effect: str, problem: str) -> None:
        """One job that cannot be edited has moved on; several in a row and none that can: the agent has no right to."""
        if self._refused.get(job.name) != problem:
            log.warn("edit-refused", job=job.name, run=job.run, effect=effect, problem=problem)
        known = len(self._refused)
        self._refused[job.name] = problem
        if known < _REFUSALS <= len(self._refused):
            log.error("edits-refused", jobs=known + 1, advice="the agent's user must be in QUEUE_SUPER_USERS")

    def _carry_out(self, job: Job, effect: Effect) -> None:
        if isinstance(effect, Remove):
            self.queue.remove(job, effect.reason)
            return
        edit = edit_for(job, effect, self.clock.wall_s())
        if edit:
            self.queue.apply(edit)
        if isinstance(effect, ClearRequest):
            self.book.again(job.name)

    def _say_trouble(self, problem: str) -> None:
        if problem != self._trouble:
            if problem:
                log.warn("pass-failed", problem=problem)
            else:
                log.event("pass-well-again")
        self._trouble = problem


def adopted(record: Record | None, seen: Sequence[Seen]) -> Record | None:
    """The record, with keys for receipts of managers that did not sign when they gave them and sign now."""
    if record is None or all(ticket.key for ticket in record.tickets):
        return record
    keys = {(item.manager_name, name): item.key for item in seen for name in item.sandbox.tickets}
    return Record(
        tuple(
            replace(ticket, key=ticket.key or keys.get((ticket.manager_name, ticket.name), ""))
            for ticket in record.tickets
        )
    )
