"""Output that pilots handed over to routers of the overlay: what became of it, after the pilots are gone.

A pilot's last report says HandedOver and carries receipts. They are kept here, durably, until the job has its end. A
pilot that is about to hand over says so before, with the receipts: should it end without a last report, what it may
have handed over is asked for all the same, and withdrawn unless all of it arrives. The custodians are asked in a thread
of its own; what they say turns the report that the decisions see into Delivered, Failed or Lost. Nobody's silence
counts: only an answer, or the end of the time in which a custodian delivers.
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

from schedd_agent.model import Job, Past, Request, Seen, Status
from stageout.core import log
from stageout.core.clock import Clock
from stageout.core.durable import link, read_file, write_file
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.core.states import FREED, State
from stageout.wire.custody import SandboxReport, sandbox_of
from stageout.wire.deposits import MOST_EXPIRES_AFTER_S, BadReceipt, Receipt, is_seed_of, read_receipt

#: A custodian keeps results for an hour beyond the expiry; after that nobody can say anything any more.
_KEPT_S = 3600
_ASK_INTERVAL_S = 10.0
_OVER_KEPT = 10_000
_VERIFIED = "digests, by the overlay"
#: Sandboxes of which nobody sends anything any more but custodians.
_GIVEN_AWAY = FREED | {State.HANDED_OVER}
_UNDER_WAY = ("custody", "pending")
#: Sandboxes that a pilot hands over, or is about to.
_HANDING_OVER = frozenset({State.CONFIRMED, State.LEASED, State.MOVING, State.RETRY_WAIT})
_GIVEN_UP_THERE = frozenset({State.LOST, State.SUPERSEDED, State.CANCELLED})
_CUT_OFF = "its pilot ended while it handed it over"
_GIVEN_UP = (State.CANCELLED.value, State.LOST.value)
_ADVICE = (
    "nobody asks the custodians for that output: its jobs run again when STAGEOUT_LEASE is over; to have them asked,"
    " stop the agent, mend the file, start it again"
)
_LOST = ("lost", "expired", "unknown", "cancelled", "stale")
Ask = Callable[[str, Sequence[str], bool], Mapping[str, "tuple[str, str]"]]
"""(custodian, names of deposits, whether to cancel them) -> name -> (outcome, reason); "custody" while on its way."""


@dataclass
class Kept:
    """One sandbox that was handed over.

    :param given_up: its job does without it: the state that is told when nothing is on its way any more, "" if not.
    :param finals: name of a deposit -> outcome. :param heard: name -> custodian -> outcome, where several have it.
    :param others: names in its receipts that are another sandbox's. :ivar until_s: when it expires, by the monotonic
        clock: a wall clock that is set must not make output lost that routers still deliver.
    """

    seen: Seen
    receipts: tuple[Receipt, ...]
    given_up: str = ""
    finals: dict[str, tuple[str, str]] = field(default_factory=dict)
    heard: dict[str, dict[str, tuple[str, str]]] = field(default_factory=dict)
    problem: str = ""
    others: Set[str] = frozenset()
    until_s: float = 0.0

    @property
    def key(self) -> tuple[str, str, int]:
        """Custodian of the run, job and number."""
        return self.seen.manager, self.seen.sandbox.job, self.seen.sandbox.number

    @property
    def is_at_work(self) -> bool:
        """Tell whether its pilot has neither reported its end nor ended itself."""
        return self.seen.sandbox.state not in _GIVEN_AWAY

    @property
    def is_presumed(self) -> bool:
        """Tell whether its pilot ended before it heard that the custodians have it."""
        return self.seen.sandbox.state == State.HANDED_OVER and self.seen.sandbox.files_left > 0

    def cut_off(self) -> None:
        """Its pilot has ended: all that is left may be in custody, or some of it certainly is not."""
        box = self.seen.sandbox
        all_of_it = box.state in _HANDING_OVER and not box.files_only_here
        state = State.HANDED_OVER if all_of_it and not self.is_presumed else State.LOST
        self.seen = replace(self.seen, sandbox=replace(box, state=state.value, reason=_CUT_OFF))

    @property
    def open(self) -> list[tuple[str, str]]:
        """(custodian, name) of deposits of which the end is not known."""
        known = self.finals.keys() | self.others
        return [
            (place, name) for one in self.receipts for name in one.names() if name not in known for place in one.places
        ]

    @property
    def expires(self) -> int:
        """Wall clock after which nobody delivers any more."""
        return max((one.expires for one in self.receipts), default=0)

    @property
    def is_bad(self) -> bool:
        """Tell whether a part of it will not arrive: then the rest must not either."""
        if self.given_up or self.seen.sandbox.state != State.HANDED_OVER:
            return True
        return any(outcome != "done" for outcome, _ in self.finals.values())

    def learn(self, name: str, answer: tuple[str, str], custodian: str) -> None:
        """Record a custodian's answer about a deposit. Where several have it, one that delivered it is enough."""
        outcome, _ = answer
        others = self._others_of(name, custodian)
        if others:
            said = self.heard.setdefault(name, {})
            said.pop(custodian, None)
            if outcome not in _UNDER_WAY:
                said[custodian] = answer
            if outcome != "done":
                if not said.keys() >= {custodian, *others}:
                    return
                answer = next((one for one in said.values() if one[0] != "unknown"), answer)
                outcome, _ = answer
        if outcome == "unknown" and self.is_presumed and not self.is_bad:
            self.cut_off()  # it never got there: the rest is withdrawn
        elif outcome == "unknown" and not self.is_bad:
            # It said that it has it. If it is asked with another key, it may deliver yet.
            advice = "has STAGEOUT_CUSTODIAN_KEY the key that pilots deposit with?"
            self.problem = f"{custodian} knows nothing of it: {advice}"
        elif outcome not in _UNDER_WAY:
            self.finals[name] = answer

    def _others_of(self, name: str, custodian: str) -> set[str]:
        seed = name.partition("/")[0]
        return {place for one in self.receipts if one.seed == seed for place in one.places} - {custodian}


class Custodians:
    """All that was handed over for the jobs of one schedd.

    :param path: file in which it is kept. :param allowed: addresses of custodians that are asked. :param ask: one of
        them; blocking. :param clock: for expiries.
    """

    def __init__(self, path: Path, allowed: Collection[str], ask: Ask, clock: Clock) -> None:
        self._path, self.allowed, self._ask, self._clock = path, frozenset(allowed), ask, clock
        found, self._unread = _read(path)
        self._kept = {kept.key: self._timed(kept, None) for kept in found}
        self._is_stored = True
        self._over: dict[tuple[str, str, int], SandboxReport] = {}
        self._reported: set[tuple[str, str, int]] = set()
        self._tell_apart()
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="custodians")
        self._asking: Future[None] | None = None
        self._asked_s = float("-inf")

    def completed(
        self, seen: Mapping[str, Sequence[Seen]], is_gone: Callable[[str], bool] = lambda manager: False
    ) -> dict[str, list[Seen]]:
        """Reports as decisions shall see them: with what is kept, and with what custodians said. Begins to ask.

        On return all receipts are on the disk. :param is_gone: whether a manager gives nothing away any more.
        :raises OSError: they are not.
        """
        every = [item for items in seen.values() for item in items]
        self._reported = {(item.manager, item.sandbox.job, item.sandbox.number) for item in every}
        self._keep(every, is_gone)
        found = {job: [self._as_it_ended(item) for item in items] for job, items in seen.items()}
        with self._lock:
            for kept in self._kept.values():
                items = found.setdefault(kept.seen.sandbox.job, [])
                others = [item for item in items if (item.manager, item.sandbox.number) != (kept.key[0], kept.key[2])]
                items[:] = [*others, replace(kept.seen, sandbox=self._told(kept))]
        self._ask_again()
        return found

    def _as_it_ended(self, item: Seen) -> Seen:
        ended = self._over.get((item.manager, item.sandbox.job, item.sandbox.number))
        return replace(item, sandbox=ended) if ended and item.sandbox.state == State.HANDED_OVER else item

    def look_at(
        self, jobs: Mapping[str, Job], past: Mapping[str, Past], counts: Callable[[Job], int] = lambda job: job.run
    ) -> None:
        """Give up what no job wants any more, and forget what has its end in the job's ad (or has no job).

        :param past: how jobs left the queue that are not in it, as far as that is known. :param counts: number of the
        run that counts, 0 while it is not known.
        """
        now_s = self._clock.monotonic_s()
        with self._lock:
            for key, kept in list(self._kept.items()):
                name = kept.seen.sandbox.job
                given_up = kept.given_up or _given_up(kept.seen.sandbox.number, jobs.get(name), past.get(name), counts)
                is_over = key not in self._reported and _is_over(kept, jobs.get(name))
                self._is_stored &= given_up == kept.given_up and not is_over
                kept.given_up = given_up
                if is_over or now_s > kept.until_s + 2 * _KEPT_S:
                    del self._kept[key]
                    self._over[key] = self._told(kept)  # its pilot's report may come back
                    while len(self._over) > _OVER_KEPT:
                        del self._over[next(iter(self._over))]
                    self._is_stored = False
            if not self._is_stored:
                self._store()

    def close(self) -> None:
        """Ask no more."""
        self._worker.shutdown(wait=False)

    def _timed(self, kept: Kept, before: Kept | None) -> Kept:
        """The same with its end. :param before: what was known of it, whose end was found by the clock of then."""
        if before is not None:
            kept.until_s = before.until_s + kept.expires - before.expires
        else:
            left_s = kept.expires - self._clock.wall_s()
            kept.until_s = self._clock.monotonic_s() + min(left_s, MOST_EXPIRES_AFTER_S)
        return kept

    def _keep(self, items: Iterable[Seen], is_gone: Callable[[str], bool]) -> None:
        with self._lock:
            for item in items:
                self._keep_one(item)
            for kept in self._kept.values():
                if kept.is_at_work and is_gone(kept.seen.manager):
                    kept.cut_off()
                    self._is_stored = False
                    box = kept.seen.sandbox
                    log.warn("hand-over-cut-off", job=box.job, run=box.number, manager=kept.seen.manager_name,
                             custodians=",".join(_places(kept.receipts)), taken_for=box.state)  # fmt: skip
            if not self._is_stored:
                self._tell_apart()
                self._store()

    def _keep_one(self, item: Seen) -> None:
        box = item.sandbox
        known = self._kept.get((item.manager, box.job, box.number))
        if known is not None and known.seen.sandbox.change >= box.change:
            return
        if not box.custody and known is not None and known.is_at_work and box.state in _HANDING_OVER | _GIVEN_UP_THERE:
            # Its manager was started again and hands nothing over (yet): what it had begun may be on its way.
            only_here = known.seen.sandbox.files_only_here
            box = replace(box, custody=known.seen.sandbox.custody, files_only_here=only_here)
            item = replace(item, sandbox=box)
        if not box.custody:
            if known is not None and known.is_at_work:  # it has come to an end at its node
                del self._kept[known.key]
                self._is_stored = False
            return
        if (item.manager, box.job, box.number) in self._over:
            return
        try:
            receipts = _receipts(item)
        except BadReceipt as problem:
            log.warn("receipt-refused", manager=item.manager_name, job=box.job, problem=problem)
            return
        if known is None and box.state not in _GIVEN_AWAY and not self._may_ask(item, receipts):
            return  # all of it is said when it has come to its end
        kept = self._timed(Kept(item, receipts), known)
        if known is not None:
            kept.finals, kept.given_up = known.finals, known.given_up
        self._kept[kept.key] = kept
        self._is_stored = False
        if known is None or known.is_at_work != kept.is_at_work:
            name = "handing-over" if kept.is_at_work else "handed-over"
            log.event(name, job=box.job, run=box.number, custodians=",".join(_places(receipts)))

    def _may_ask(self, item: Seen, receipts: Iterable[Receipt]) -> bool:
        return item.sandbox.state in _HANDING_OVER and self.allowed.issuperset(_places(receipts))

    def _tell_apart(self) -> None:
        """Files of many sandboxes share a seed: what a lost one may have given is not what another one has given."""
        given: dict[str, set[str]] = {}
        for kept in self._kept.values():
            if kept.seen.sandbox.state != State.LOST:
                given.setdefault(kept.seen.manager, set()).update(name for one in kept.receipts for name in one.names())
        for kept in self._kept.values():
            if kept.seen.sandbox.state == State.LOST:
                kept.others = given.get(kept.seen.manager, frozenset())

    def _told(self, kept: Kept) -> SandboxReport:
        """The report, with the state that the custodians' answers give it."""
        box = kept.seen.sandbox
        if box.state not in _GIVEN_AWAY:
            return box
        bad = [(outcome, why) for outcome, why in kept.finals.values() if outcome != "done"]
        over = self._clock.monotonic_s() > kept.until_s + _KEPT_S
        if kept.open and not over:
            return replace(box, state=State.HANDED_OVER.value, reason=self._reason(kept))
        if box.state != State.HANDED_OVER:
            return box
        if not kept.open and not bad:
            files = tuple(replace(one, state=State.DELIVERED.value, verified=_VERIFIED) for one in box.files)
            return replace(box, state=State.DELIVERED.value, reason="", files=files)
        if kept.given_up == State.CANCELLED:
            return replace(box, state=kept.given_up, reason="given up by its owner")
        failed = next(((outcome, why) for outcome, why in bad if outcome not in _LOST), None)
        if failed and not kept.open:
            text = f"the overlay could not deliver it: {failed[1] or failed[0]}"
            return replace(box, state=State.FAILED.value, reason=text, error_code=ErrorClass.PERMISSION_DENIED.code)
        words = next((f"{outcome} {why}".strip() for outcome, why in bad), "nothing was heard of it until it expired")
        return replace(box, state=State.LOST.value, reason=f"{', '.join(_places(kept.receipts))}: {words}")

    def _reason(self, kept: Kept) -> str:
        strangers = [place for place in _places(kept.receipts) if place not in self.allowed]
        if strangers:
            return f"handed over to {', '.join(strangers)}, which STAGEOUT_CUSTODIANS does not name: nobody is asked"
        return kept.problem or f"in custody of {', '.join(_places(kept.receipts))}"

    def _ask_again(self) -> None:
        now_s = self._clock.monotonic_s()
        busy = self._asking is not None and not self._asking.done()
        if busy or now_s - self._asked_s < _ASK_INTERVAL_S or not self._kept:
            return
        self._asked_s = now_s
        self._asking = self._worker.submit(self._ask_all)

    def _ask_all(self) -> None:
        with self._lock:
            todo: dict[tuple[str, bool], list[tuple[Kept, str]]] = {}
            for kept in self._kept.values():
                for place, name in () if kept.is_at_work else kept.open:
                    if place in self.allowed:
                        todo.setdefault((place, kept.is_bad), []).append((kept, name))
        for (place, cancel), wanted in todo.items():
            answers, problem = self._answers(place, [name for _, name in wanted], cancel)
            with self._lock:
                for kept, _ in wanted:
                    kept.problem = problem
                for kept, name in wanted:
                    if name in answers:
                        kept.learn(name, answers[name], place)

    def _answers(self, place: str, names: Sequence[str], cancel: bool) -> tuple[Mapping[str, tuple[str, str]], str]:
        try:
            return self._ask(place, names, cancel), ""
        except TransferFailure as failure:
            return {}, f"{place} does not answer: {failure}"
        except Exception as problem:  # one that cannot be asked must not keep the others from being asked
            return {}, f"{place} cannot be asked: {problem!r}"

    def _store(self) -> None:
        """On return what is known is on the disk. :raises OSError: it is not; the next call tries it again."""
        rows: list[object] = [
            {
                "manager": one.seen.manager_name,
                "key": one.seen.key,
                "sandbox": asdict(one.seen.sandbox),
                "given_up": one.given_up,
            }
            for one in self._kept.values()
        ]
        write_file("custody-keep", self._path, json.dumps([*rows, *self._unread]).encode("utf-8", "surrogateescape"))
        self._is_stored = True


def _places(receipts: Iterable[Receipt]) -> list[str]:
    return list(dict.fromkeys(place for one in receipts for place in one.places))


def _receipts(item: Seen) -> tuple[Receipt, ...]:
    """:raises BadReceipt: they are none, or were made by somebody else than who signed the report."""
    found = tuple(read_receipt(text) for text in item.sandbox.custody)
    for one in found:
        if not is_seed_of(one.seed, item.key):
            raise BadReceipt(f"the seed {one.seed} is not of the key that has signed the report")
    return found


def _given_up(number: int, job: Job | None, past: Past | None, counts: Callable[[Job], int]) -> str:
    """Return the decision on a run that nobody waits for any more; "" while somebody does."""
    if job is None:
        return State.CANCELLED.value if past is not None and past.wants_nothing else ""
    newest = counts(job)
    if job.status == Status.REMOVED or (job.request == Request.CANCEL and job.ended and newest == number):
        return State.CANCELLED.value
    return State.LOST.value if newest > number and not job.reconnects else ""


def _is_over(kept: Kept, job: Job | None) -> bool:
    if kept.open:
        return False
    ended = job is not None and job.shown.state in (State.DELIVERED, State.CANCELLED)
    return job is None or (ended and job.shown.run >= kept.seen.sandbox.number)


def _read(path: Path) -> tuple[list[Kept], list[object]]:
    """Read the file; keep unknown rows as they are, for a release that knows them."""
    try:
        rows: Any = json.loads(read_file(path))
        if not isinstance(rows, list):
            raise ValueError("it is no list")
    except FileNotFoundError:
        return [], []
    except (OSError, ValueError) as problem:
        log.error("custody-unreadable", path=_kept_aside(path), problem=problem, advice=f"{_ADVICE} as {path}")
        return [], []
    found: list[Kept] = []
    unread: list[object] = []
    for row in rows:
        try:
            found.append(_kept(copy.deepcopy(row)))
        except (ValueError, KeyError, TypeError) as problem:
            unread.append(row)
            log.error("custody-row-unreadable", path=path, row=f"{row!r:.200}", problem=repr(problem), advice=_ADVICE)
    return found, unread


def _kept_aside(path: Path) -> Path:
    """Another name of the file, which the next hand-over replaces; its own where it can have no other."""
    try:
        aside = path.with_name(f"{path.name}.unreadable-{path.stat().st_ino}")
        with suppress(FileExistsError):  # at an earlier start
            link("custody-keep", path, aside)
    except OSError:
        return path
    return aside


def _kept(row: Any) -> Kept:
    """A row of the file; it is changed. :raises ValueError, KeyError, TypeError: it is none."""
    texts = row["manager"], row["key"], row["given_up"]
    if not all(isinstance(text, str) for text in texts) or row["given_up"] not in ("", *_GIVEN_UP):
        raise ValueError(f"manager, key and given_up are {texts!r:.100}")
    item = Seen(row["manager"], row["key"], sandbox_of(row["sandbox"]))
    return Kept(item, _receipts(item), row["given_up"])
