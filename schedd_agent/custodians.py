"""Output that pilots handed over to routers of the overlay, after the pilots ended.

A pilot's last report says HandedOver and carries receipts. The agent keeps the receipts on disk until the job has its
end. A pilot reports its intention and the receipts before it hands over. If it ends without a last report, the agent
asks for that output all the same, and withdraws it unless all of it arrives. A thread asks the custodians. Their
answers turn the report for the decisions into Delivered, Failed or Lost. Silence is no evidence: only an answer counts,
or the end of the time in which a custodian delivers.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from schedd_agent.model import ReportedSandbox
from stageout.core import log
from stageout.core.clock import Clock
from stageout.core.durable import link, read_file, write_file
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.core.states import FREED, State
from stageout.model.job import HistoryRecord, Job, Status
from stageout.wire.custody import JobKey, Run, SandboxReport, sandbox_of
from stageout.wire.deposits import MOST_EXPIRES_AFTER_S, BadReceipt, Receipt, is_seed_of, read_receipt
from stageout.wire.owner_requests import Verb

#: A custodian keeps results for an hour after the expiry. After that nobody knows the result.
_KEPT_S = 3600
_ASK_INTERVAL_S = 10.0
_ENDED_KEPT = 10_000
_VERIFIED = "digests, by the overlay"
#: Sandboxes of which only custodians still send anything.
_GIVEN_AWAY = FREED | {State.HANDED_OVER}
_UNDER_WAY = ("custody", "pending")
#: Sandboxes that a pilot hands over, or is about to hand over.
_HANDING_OVER = frozenset({State.CONFIRMED, State.LEASED, State.MOVING, State.RETRY_WAIT})
_GIVEN_UP_THERE = frozenset({State.LOST, State.SUPERSEDED, State.CANCELLED})
_CUT_OFF = "its pilot ended while it handed it over"
_GIVEN_UP_STATES = (State.CANCELLED.value, State.LOST.value)
_ADVICE = (
    "nobody asks the custodians for that output: its jobs run again when STAGEOUT_LEASE is over; to have them asked,"
    " stop the agent, mend the file, start it again"
)
_LOST = ("lost", "expired", "unknown", "cancelled", "stale")
CustodianQuery = Callable[[str, Sequence[str], bool], Mapping[str, "tuple[str, str]"]]
"""(custodian, names of deposits, whether to cancel them) -> name -> (outcome, reason); "custody" while on its way."""


HandedOverKey = tuple[str, Run]


@dataclass
class HandedOverSandbox:
    """One sandbox that was handed over.

    :param given_up: state to report when all parts have ended, if the job no longer wants the output; "" if it does.
    :param outcomes: final outcomes by name of a deposit.
    :param answers_by_custodian: name -> custodian -> outcome, for deposits that several custodians have.
    :param others: names in the receipts that belong to another sandbox.
    :ivar until_s: expiry by the monotonic clock, so that a change of the wall clock loses no output.
    """

    reported: ReportedSandbox
    receipts: tuple[Receipt, ...]
    given_up: str = ""
    outcomes: dict[str, tuple[str, str]] = field(default_factory=dict)
    answers_by_custodian: dict[str, dict[str, tuple[str, str]]] = field(default_factory=dict)
    problem: str = ""
    others: Set[str] = frozenset()
    until_s: float = 0.0

    @property
    def key(self) -> HandedOverKey:
        """Return the manager's identity and the run."""
        return self.reported.manager, self.reported.sandbox.run

    @property
    def is_pilot_active(self) -> bool:
        """Tell whether the pilot still runs and has not reported an end of this sandbox."""
        return self.reported.sandbox.state not in _GIVEN_AWAY

    @property
    def is_presumed(self) -> bool:
        """Tell whether the pilot ended before the custodians confirmed the hand-over."""
        return self.reported.sandbox.state == State.HANDED_OVER and self.reported.sandbox.files_left > 0

    def cut_off(self) -> None:
        """Record the end of the pilot. All remaining files may be in custody, or some certainly are not."""
        sandbox = self.reported.sandbox
        all_of_it = sandbox.state in _HANDING_OVER and not sandbox.files_only_here
        state = State.HANDED_OVER if all_of_it and not self.is_presumed else State.LOST
        self.reported = replace(self.reported, sandbox=replace(sandbox, state=state.value, reason=_CUT_OFF))

    @property
    def open(self) -> list[tuple[str, str]]:
        """Return custodian and name of each deposit without a final outcome."""
        known = self.outcomes.keys() | self.others
        return [
            (address, name)
            for one in self.receipts
            for name in one.names()
            if name not in known
            for address in one.places
        ]

    @property
    def expires(self) -> int:
        """Return the time (wall clock) after which no custodian delivers."""
        return max((one.expires for one in self.receipts), default=0)

    @property
    def is_bad(self) -> bool:
        """Tell whether a part of the output will not arrive. Then the rest must not arrive either."""
        if self.given_up or self.reported.sandbox.state != State.HANDED_OVER:
            return True
        return any(outcome != "done" for outcome, _ in self.outcomes.values())

    def record_answer(self, name: str, answer: tuple[str, str], custodian: str) -> None:
        """Record a custodian's answer about a deposit. If several have the deposit, one delivery is enough."""
        outcome, _ = answer
        others = self._others_of(name, custodian)
        if others:
            given = self.answers_by_custodian.setdefault(name, {})
            given.pop(custodian, None)
            if outcome not in _UNDER_WAY:
                given[custodian] = answer
            if outcome != "done":
                if not given.keys() >= {custodian, *others}:
                    return
                answer = next((one for one in given.values() if one[0] != "unknown"), answer)
                outcome, _ = answer
        if outcome == "unknown" and self.is_presumed and not self.is_bad:
            self.cut_off()  # the deposit never arrived there, so the rest is withdrawn
        elif outcome == "unknown" and not self.is_bad:
            # The custodian had confirmed the deposit. It may still deliver: the agent may have asked with another key.
            advice = "has STAGEOUT_CUSTODIAN_KEY the key that pilots deposit with?"
            self.problem = f"{custodian} knows nothing of it: {advice}"
        elif outcome not in _UNDER_WAY:
            self.outcomes[name] = answer

    def _others_of(self, name: str, custodian: str) -> set[str]:
        seed = name.partition("/")[0]
        return {address for one in self.receipts if one.seed == seed for address in one.places} - {custodian}


class CustodyTable:
    """All output that was handed over for the jobs of one schedd.

    :param path: file of the table. :param allowed: addresses of the custodians that are asked.
    :param ask: asks a custodian; it blocks. :param clock: clock for expiries.
    """

    def __init__(self, path: Path, allowed: Collection[str], ask: CustodianQuery, clock: Clock) -> None:
        self._path, self.allowed, self.ask, self._clock = path, frozenset(allowed), ask, clock
        found, self._unread = _read(path)
        self._handed_over = {held.key: self._timed(held, None) for held in found}
        self._is_stored = True
        self._ended: dict[HandedOverKey, SandboxReport] = {}
        self._reported: set[HandedOverKey] = set()
        self._separate_shared_names()
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="custodians")
        self._asking: Future[None] | None = None
        self._asked_s = float("-inf")

    def follow(self, allowed: Collection[str], ask: CustodianQuery) -> None:
        """Take new addresses and keys of custodians. The next query uses them."""
        self.allowed, self.ask = frozenset(allowed), ask

    def with_answers(
        self,
        reported: Mapping[JobKey, Sequence[ReportedSandbox]],
        is_gone: Callable[[str], bool] = lambda manager: False,
    ) -> dict[JobKey, list[ReportedSandbox]]:
        """Return the reports with the custodians' answers, and start the next query. On return receipts are on disk.

        :param is_gone: tells whether a manager has ended. :raises OSError: the receipts cannot be stored.
        """
        every = [item for items in reported.values() for item in items]
        self._reported = {(item.manager, item.sandbox.run) for item in every}
        self._store_reported(every, is_gone)
        found = {job: [self._with_end(item) for item in items] for job, items in reported.items()}
        with self._lock:
            for held in self._handed_over.values():
                items = found.setdefault(held.reported.sandbox.run.key, [])
                others = [item for item in items if (item.manager, item.sandbox.run) != held.key]
                items[:] = [*others, replace(held.reported, sandbox=self._report_of(held))]
        self._ask_again()
        return found

    def _with_end(self, item: ReportedSandbox) -> ReportedSandbox:
        ended = self._ended.get((item.manager, item.sandbox.run))
        return replace(item, sandbox=ended) if ended and item.sandbox.state == State.HANDED_OVER else item

    def update_from_jobs(
        self,
        jobs: Mapping[JobKey, Job],
        history: Mapping[JobKey, HistoryRecord],
        recorded_run: Callable[[Job], int] = lambda job: job.run,
    ) -> None:
        """Give up output that no job wants, and forget output whose end is in the job's ad (or without a job).

        :param history: records of jobs that left the queue, where known.
        :param recorded_run: number of a job's final run, 0 while unknown.
        """
        now_s = self._clock.monotonic_s()
        with self._lock:
            for key, held in list(self._handed_over.items()):
                job = held.reported.sandbox.run.key
                given_up = held.given_up or _given_up_state(
                    held.reported.sandbox.number, jobs.get(job), history.get(job), recorded_run
                )
                is_ended = key not in self._reported and _is_ended(held, jobs.get(job))
                self._is_stored &= given_up == held.given_up and not is_ended
                held.given_up = given_up
                if is_ended or now_s > held.until_s + 2 * _KEPT_S:
                    del self._handed_over[key]
                    self._ended[key] = self._report_of(held)  # its pilot's report may come back
                    while len(self._ended) > _ENDED_KEPT:
                        del self._ended[next(iter(self._ended))]
                    self._is_stored = False
            if not self._is_stored:
                self._store()

    def close(self) -> None:
        """Stop the queries."""
        self._worker.shutdown(wait=False)

    def _timed(self, held: HandedOverSandbox, before: HandedOverSandbox | None) -> HandedOverSandbox:
        """Set the expiry. :param before: earlier entry of the same sandbox, whose expiry the clock of then gave."""
        if before is not None:
            held.until_s = before.until_s + held.expires - before.expires
        else:
            left_s = held.expires - self._clock.wall_s()
            held.until_s = self._clock.monotonic_s() + min(left_s, MOST_EXPIRES_AFTER_S)
        return held

    def _store_reported(self, items: Iterable[ReportedSandbox], is_gone: Callable[[str], bool]) -> None:
        with self._lock:
            for item in items:
                self._take_report(item)
            for held in self._handed_over.values():
                if held.is_pilot_active and is_gone(held.reported.manager):
                    held.cut_off()
                    self._is_stored = False
                    sandbox = held.reported.sandbox
                    log.warn(
                        "handover-interrupted",
                        job=sandbox.job,
                        run=sandbox.number,
                        manager=held.reported.manager_name,
                        custodians=",".join(_places(held.receipts)),
                        taken_for=sandbox.state,
                    )
            if not self._is_stored:
                self._separate_shared_names()
                self._store()

    def _take_report(self, item: ReportedSandbox) -> None:
        sandbox = item.sandbox
        known = self._handed_over.get((item.manager, sandbox.run))
        if known is not None and known.reported.sandbox.change >= sandbox.change:
            return
        if (
            not sandbox.custody
            and known is not None
            and known.is_pilot_active
            and sandbox.state in _HANDING_OVER | _GIVEN_UP_THERE
        ):
            # Its manager was restarted and hands nothing over yet. Earlier deposits may be on their way.
            only_here = known.reported.sandbox.files_only_here
            sandbox = replace(sandbox, custody=known.reported.sandbox.custody, files_only_here=only_here)
            item = replace(item, sandbox=sandbox)
        if not sandbox.custody:
            if known is not None and known.is_pilot_active:  # it has ended on its node
                del self._handed_over[known.key]
                self._is_stored = False
            return
        if (item.manager, sandbox.run) in self._ended:
            return
        try:
            receipts = _receipts(item)
        except BadReceipt as problem:
            log.warn("receipt-refused", manager=item.manager_name, job=sandbox.job, problem=problem)
            return
        if known is None and sandbox.state not in _GIVEN_AWAY and not self._may_ask(item, receipts):
            return  # its last report says everything
        held = self._timed(HandedOverSandbox(item, receipts), known)
        if known is not None:
            held.outcomes, held.given_up = known.outcomes, known.given_up
        self._handed_over[held.key] = held
        self._is_stored = False
        if known is None or known.is_pilot_active != held.is_pilot_active:
            name = "handover-started" if held.is_pilot_active else "handover-finished"
            log.event(name, job=sandbox.job, run=sandbox.number, custodians=",".join(_places(receipts)))

    def _may_ask(self, item: ReportedSandbox, receipts: Iterable[Receipt]) -> bool:
        return item.sandbox.state in _HANDING_OVER and self.allowed.issuperset(_places(receipts))

    def _separate_shared_names(self) -> None:
        """Find names in a lost sandbox's receipts that belong to others: sandboxes of one manager share a seed."""
        given: dict[str, set[str]] = {}
        for held in self._handed_over.values():
            if held.reported.sandbox.state != State.LOST:
                given.setdefault(held.reported.manager, set()).update(
                    name for one in held.receipts for name in one.names()
                )
        for held in self._handed_over.values():
            if held.reported.sandbox.state == State.LOST:
                held.others = given.get(held.reported.manager, frozenset())

    def _report_of(self, held: HandedOverSandbox) -> SandboxReport:
        """Return the report, with the state that the custodians' answers give it."""
        sandbox = held.reported.sandbox
        if sandbox.state not in _GIVEN_AWAY:
            return sandbox
        bad = [(outcome, why) for outcome, why in held.outcomes.values() if outcome != "done"]
        over = self._clock.monotonic_s() > held.until_s + _KEPT_S
        if held.open and not over:
            return replace(sandbox, state=State.HANDED_OVER.value, reason=self._reason(held))
        if sandbox.state != State.HANDED_OVER:
            return sandbox
        if not held.open and not bad:
            files = tuple(replace(one, state=State.DELIVERED.value, verified=_VERIFIED) for one in sandbox.files)
            return replace(sandbox, state=State.DELIVERED.value, reason="", files=files)
        if held.given_up == State.CANCELLED:
            return replace(sandbox, state=held.given_up, reason="given up on request")
        failed = next(((outcome, why) for outcome, why in bad if outcome not in _LOST), None)
        if failed and not held.open:
            text = f"the overlay could not deliver it: {failed[1] or failed[0]}"
            return replace(sandbox, state=State.FAILED.value, reason=text, error_code=ErrorClass.PERMISSION_DENIED.code)
        words = next((f"{outcome} {why}".strip() for outcome, why in bad), "nothing was heard of it until it expired")
        return replace(sandbox, state=State.LOST.value, reason=f"{', '.join(_places(held.receipts))}: {words}")

    def _reason(self, held: HandedOverSandbox) -> str:
        strangers = [address for address in _places(held.receipts) if address not in self.allowed]
        if strangers:
            return f"handed over to {', '.join(strangers)}, which STAGEOUT_CUSTODIANS does not name: nobody is asked"
        return held.problem or f"in custody of {', '.join(_places(held.receipts))}"

    def _ask_again(self) -> None:
        now_s = self._clock.monotonic_s()
        busy = self._asking is not None and not self._asking.done()
        if busy or now_s - self._asked_s < _ASK_INTERVAL_S or not self._handed_over:
            return
        self._asked_s = now_s
        self._asking = self._worker.submit(self._ask_all)

    def _ask_all(self) -> None:
        with self._lock:
            todo: dict[tuple[str, bool], list[tuple[HandedOverSandbox, str]]] = {}
            for held in self._handed_over.values():
                for address, name in () if held.is_pilot_active else held.open:
                    if address in self.allowed:
                        todo.setdefault((address, held.is_bad), []).append((held, name))
        for (address, cancel), wanted in todo.items():
            answers, problem = self._answers(address, [name for _, name in wanted], cancel)
            with self._lock:
                for held, _ in wanted:
                    held.problem = problem
                for held, name in wanted:
                    if name in answers:
                        held.record_answer(name, answers[name], address)

    def _answers(self, address: str, names: Sequence[str], cancel: bool) -> tuple[Mapping[str, tuple[str, str]], str]:
        try:
            return self.ask(address, names, cancel), ""
        except TransferFailure as failure:
            return {}, f"{address} does not answer: {failure}"
        except Exception as problem:  # the other custodians must be asked all the same
            return {}, f"{address} cannot be asked: {problem!r}"

    def _store(self) -> None:
        """Write the table. On return it is on disk. :raises OSError: the disk refuses it. The next call tries again."""
        rows: list[object] = [
            {
                "manager": one.reported.manager_name,
                "key": one.reported.key,
                "sandbox": asdict(one.reported.sandbox),
                "given_up": one.given_up,
            }
            for one in self._handed_over.values()
        ]
        write_file("custody-keep", self._path, json.dumps([*rows, *self._unread]).encode("utf-8", "surrogateescape"))
        self._is_stored = True


def _places(receipts: Iterable[Receipt]) -> list[str]:
    return list(dict.fromkeys(address for one in receipts for address in one.places))


def _receipts(item: ReportedSandbox) -> tuple[Receipt, ...]:
    """Return a report's receipts. :raises BadReceipt: one cannot be read, or the report's key did not make it."""
    found = tuple(read_receipt(text) for text in item.sandbox.custody)
    for one in found:
        if not is_seed_of(one.seed, item.key):
            raise BadReceipt(f"the seed {one.seed} is not of the key that has signed the report")
    return found


def _given_up_state(
    number: int, job: Job | None, history: HistoryRecord | None, recorded_run: Callable[[Job], int]
) -> str:
    """Return the end of a run whose output nobody wants; "" while its job wants it."""
    if job is None:
        return State.CANCELLED.value if history is not None and history.wants_nothing else ""
    newest = recorded_run(job)
    if job.status == Status.REMOVED or (job.asks(Verb.CANCEL, newest) and job.ended and newest == number):
        return State.CANCELLED.value
    return State.LOST.value if newest > number and not job.reconnects else ""


def _is_ended(held: HandedOverSandbox, job: Job | None) -> bool:
    if held.open:
        return False
    ended = job is not None and job.ad_state.state in (State.DELIVERED, State.CANCELLED)
    return job is None or (ended and job.ad_state.run >= held.reported.sandbox.number)


def _read(path: Path) -> tuple[list[HandedOverSandbox], list[object]]:
    """Read the file. Keep unknown rows for a release that knows them."""
    try:
        rows: Any = json.loads(read_file(path))
        if not isinstance(rows, list):
            raise ValueError("it is no list")
    except FileNotFoundError:
        return [], []
    except (OSError, ValueError) as problem:
        log.error("custody-file-read-failed", path=_kept_aside(path), problem=problem, advice=f"{_ADVICE} as {path}")
        return [], []
    found: list[HandedOverSandbox] = []
    unread: list[object] = []
    for row in rows:
        try:
            found.append(_read_row(copy.deepcopy(row)))
        except (ValueError, KeyError, TypeError) as problem:
            unread.append(row)
            log.error("custody-row-read-failed", path=path, row=f"{row!r:.200}", problem=repr(problem), advice=_ADVICE)
    return found, unread


def _kept_aside(path: Path) -> Path:
    """Link the file to another name, because the next hand-over replaces it. Return the name that can be linked."""
    try:
        aside = path.with_name(f"{path.name}.unreadable-{path.stat().st_ino}")
        with suppress(FileExistsError):  # made at an earlier start
            link("custody-keep", path, aside)
    except OSError:
        return path
    return aside


def _read_row(row: Any) -> HandedOverSandbox:
    """Return the sandbox of a row, which is changed. :raises ValueError, KeyError, TypeError: the row is damaged."""
    texts = row["manager"], row["key"], row["given_up"]
    if not all(isinstance(text, str) for text in texts) or row["given_up"] not in ("", *_GIVEN_UP_STATES):
        raise ValueError(f"manager, key and given_up are {texts!r:.100}")
    item = ReportedSandbox(row["manager"], row["key"], sandbox_of(row["sandbox"]))
    return HandedOverSandbox(item, _receipts(item), row["given_up"])
