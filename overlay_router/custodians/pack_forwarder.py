"""Deliveries of packs out of a spool: which are next, how many at once, when one that failed is tried again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from overlay_router.custodians.carrier_process import CarrierProcess, attempt
from overlay_router.custodians.forwarder import AWAY, OnDisk
from overlay_router.custodians.pack_carrier import Answer, Order
from overlay_router.custodians.pack_custody import Key, PackCustody, lost
from overlay_router.custodians.pack_records import HeldPack
from overlay_router.custodians.pack_turns import Lane, Turns
from overlay_router.local.replies import Reply
from overlay_router.pauses import FIRST_S, FORGET_EVERY_S, Pause
from overlay_router.peers.keys import OwnCredential
from overlay_router.rules.states import Outcome, Result
from stageout.core import log
from stageout.core.clock import Clock
from stageout.core.errors import ErrorClass
from stageout.overlay.wire.route import next_hop

_IDLE_S = 5.0
_COALESCE_S = 0.002
#: Packs on their way to one router, without those that it has taken into custody; and as many that it is asked about.
_UNDER_WAY = 16
#: Failures before anything is sent.
_NOT_SENT = frozenset({ErrorClass.CONNECT_FAILED, ErrorClass.NAME_LOOKUP_FAILED, ErrorClass.NAME_NOT_RESOLVED})
_SETTLED = "its origin has settled it at the terminal already"


@dataclass
class _Given:
    """A pack that the process has. :param waits: it is in custody at the next router, and takes no place."""

    number: int
    held: HeldPack
    lane: Lane
    waits: bool = False


class PackForwarder:
    """Delivers the packs that a custodian holds. :meth:`run` beside everything.

    A pack that waits is in ``_turns``, one that the process has is in ``_given``; one that the next custodian has is in
    both, and in ``_asks``: its results come by themselves, or it is asked about.

    :param on_disk: runs a call in the thread that owns the custodian. :param tell: sends replies.
    :param own: what this router shows to the terminals.
    """

    def __init__(
        self,
        packs: PackCustody,
        on_disk: OnDisk,
        tell: Callable[[list[Reply]], None],
        own: OwnCredential,
        clock: Clock,
    ) -> None:
        self._packs, self._on_disk, self._tell, self._clock = packs, on_disk, tell, clock
        self._own = own
        self._numbers = itertools.count(1)
        self._turns = Turns()
        self._given: dict[Key, _Given] = {}
        self._keys: dict[int, Key] = {}
        #: Packs whose facts are looked up now, for an order.
        self._beginning: frozenset[Key] = frozenset()
        self._load: Counter[Lane] = Counter()
        #: Positions of files that were damaged here, of packs that the next custodian has.
        self._asks: dict[Key, list[int]] = {}
        self._answers: list[Answer] = []
        #: Of which whoever has them must hear that a file is not wanted any more.
        self._recalls: list[HeldPack] = []
        self._away: dict[str, Pause] = {}
        self._pauses: dict[Key, Pause] = {}
        self._problems: dict[str, str] = {}
        self._forget_s = 0.0
        self.wake = asyncio.Event()
        self._carrier = CarrierProcess("overlay_router.custodians.pack_carrier", self._heard, self.wake)

    @property
    def busy(self) -> frozenset[Key]:
        """The packs that are being delivered, here or at the next custodian, or about to be: they must not come to
        their end here."""
        return self._beginning.union(self._given)

    @property
    def problems(self) -> dict[str, str]:
        """Return why deliveries to a terminal fail now."""
        return dict(self._problems)

    def reached(self, hop: str) -> None:
        """Deliver at once to a router that is there again."""
        self._away.pop(hop, None)
        self._turns.hasten(hop)
        self.wake.set()

    async def run(self) -> None:
        """Deliver until cancelled; then what is under way is dropped, and begun again at the next start."""
        try:
            while True:
                self.wake.clear()
                await attempt(self._settle_and_begin())
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.wake.wait(), self._until_next_s())
                await asyncio.sleep(_COALESCE_S)
        finally:
            await self._carrier.end()

    async def _settle_and_begin(self) -> None:
        await self._settle()
        await self._begin()

    async def _begin(self) -> None:
        news = await self._on_disk(self._packs.news)
        for held in news.ready:
            self._line_up(held)
        self._recalls += news.cancelled
        await self._recall_all()
        while not await self._begin_some():
            pass
        await self._forget_hops()

    async def _begin_some(self) -> bool:
        """Begin those whose turn it is. False when one had ended already: its place is free, and nobody else asks."""
        begins = deque(self._turns.next(self._clock.monotonic_s(), self._clock.wall_s(), self._room))
        were_there = True
        try:
            while begins:
                were_there = await self._start(begins[0][1]) and were_there
                begins.popleft()
        finally:
            for _, held in begins:
                self._line_up(held)
        return were_there

    def _room(self, lane: Lane) -> int:
        """Return how many may begin; a router that is away is tried with one pack at a time."""
        away = self._away.get(lane.hop, Pause())
        if away.until_s > self._clock.monotonic_s():
            return 0
        return max(0, (1 if away.failures else _UNDER_WAY) - self._load[lane])

    def _line_up(self, held: HeldPack) -> None:
        self._turns.add(self._lane(held), held, self._clock.wall_s())

    def _lane(self, held: HeldPack) -> Lane:
        asks = held.key in self._asks or self._packs.is_asked_about(held)
        return Lane(next_hop(held.terminal)[0], asks)

    async def _start(self, held: HeldPack) -> bool:
        """Give it to the process; False when it is not in custody any more."""
        await self._keep_carrier()
        self._beginning = frozenset({held.key})
        try:
            facts = await self._on_disk(lambda: self._packs.order(held))
            return self._order(held, facts)
        except Exception as problem:
            self._put_off(held, problem)
            return True
        finally:
            self._beginning = frozenset()

    def _put_off(self, held: HeldPack, problem: Exception) -> None:
        """Its records cannot be read now: that holds up no other pack."""
        now_s, pause = self._clock.monotonic_s(), self._pauses.setdefault(held.key, Pause())
        pause.more(now_s, 0.0)
        self._turns.later(self._lane(held), held, pause.until_s)
        self._problems[next_hop(held.terminal)[0]] = repr(problem)
        log.error("custody-read-failed", origin=held.origin, seq=held.seq, path=held.path, problem=repr(problem),
                  again_s=round(pause.until_s - now_s), advice="look at the spool's disk and its database")  # fmt: skip

    def _order(self, held: HeldPack, facts: dict[str, Any] | None) -> bool:
        self._drop(held.key)
        if facts is None:  # it has expired meanwhile, perhaps
            self._forget(held.key)
            return False
        one = self._given[held.key] = _Given(next(self._numbers), held, self._lane(held))
        self._keys[one.number] = held.key
        self._load[one.lane] += 1
        if not one.lane.asks:
            log.event("delivery-started", origin=held.origin, seq=held.seq, path=held.path, files=held.files,
                      terminal=one.lane.hop)  # fmt: skip
        self._give(one, facts)
        return True

    async def _recall_all(self) -> None:
        """One whose records cannot be read now is tried again in the next round."""
        recalls, self._recalls = self._recalls, []
        for held in recalls:
            try:
                await self._recall(held)
            except Exception as problem:
                self._recalls.append(held)
                log.error("custody-read-failed", origin=held.origin, seq=held.seq, path=held.path,
                          problem=repr(problem), advice="look at the spool's disk and its database")  # fmt: skip

    async def _recall(self, held: HeldPack) -> None:
        """A file of a pack is not wanted any more: whoever has the pack hears it now."""
        one = self._given.get(held.key)
        if one is None:
            return  # it hears it with the pack
        if one.waits:
            self._line_up(held)
            return
        facts = await self._on_disk(lambda: self._packs.order(held))
        if facts is not None:
            self._give(one, facts, asks=True)

    def _drop(self, key: Key) -> _Given | None:
        """The process has it no more."""
        one = self._given.pop(key, None)
        if one is not None:
            del self._keys[one.number]
            if not one.waits:
                self._load[one.lane] -= 1
        return one

    def _forget(self, key: Key) -> None:
        self._asks.pop(key, None)
        self._pauses.pop(key, None)

    async def _forget_hops(self) -> None:
        """The records of routers that nothing goes to, once a minute."""
        now_s = self._clock.monotonic_s()
        if now_s < self._forget_s:
            return
        self._forget_s = now_s + FORGET_EVERY_S
        if self._problems or self._away:
            hops = {next_hop(held.terminal)[0] for held in await self._on_disk(self._packs.held)}
            self._problems = {hop: why for hop, why in self._problems.items() if hop in hops}
            self._away = {hop: pause for hop, pause in self._away.items() if hop in hops}

    async def _keep_carrier(self) -> None:
        """Have the process that delivers, or another when it has died: what it was doing begins anew."""
        if self._carrier.is_running:
            return
        if await self._carrier.has_died():
            await self._settle()
            log.error("delivery-process-died", packs=len(self._given))
            for one in [one for one in map(self._drop, list(self._given)) if one is not None]:
                self._packs.was_sent(one.held)
                if not one.waits:
                    self._line_up(one.held)
            await asyncio.sleep(FIRST_S)
        await self._carrier.start()

    async def _heard(self, said: dict[str, Any]) -> None:
        self._answers.append(Answer(**said))
        self.wake.set()

    def _give(self, one: _Given, facts: dict[str, Any], asks: bool = False) -> None:
        own = self._own.now
        name, secret = own.key
        hop, asks = one.lane.hop, asks or one.lane.asks
        self._carrier.write(asdict(Order(one.number, hop, name, secret.hex(), ca=own.ca, asks=asks, **facts)))

    async def _settle(self) -> None:
        """Record the answers that have come, all together; when that fails, they are asked for again.

        Between the end of an order and the record of its results nothing else is done on the disk: no pack expires
        whose files have arrived.
        """
        ended = _Ended()
        answers, self._answers = self._answers, []
        for answer in answers:
            one = self._given.get(self._keys.get(answer.number, ("", 0)))
            if one is not None:
                self._sort(one, answer, ended)
        try:
            if ended.settled:
                self._tell(await self._on_disk(lambda: self._packs.settle(ended.settled)))
            for held in ended.damaged:
                await self._trying(held, lambda held=held: self._packs.damaged(held))  # type: ignore[misc]
            for held, store in ended.met:
                hop = next_hop(held.terminal)[0]
                await self._trying(held, lambda hop=hop, store=store: self._packs.meet(hop, store))  # type: ignore[misc]
        except BaseException:
            for held in ended.packs():
                self._line_up(held)
            raise

    async def _trying(self, held: HeldPack, work: Callable[[], list[Reply]]) -> None:
        """Have something recorded without which a pack cannot go on. A pack that fails holds up no other."""
        try:
            self._tell(await self._on_disk(work))
            self._pauses.pop(held.key, None)
            self._line_up(held)
        except Exception as problem:
            self._put_off(held, problem)

    def _sort(self, one: _Given, answer: Answer, ended: _Ended) -> None:
        held = one.held
        if answer.waits:
            self._waits(one, answer)
            return
        self._drop(held.key)
        if answer.store:
            self._reached(one.lane.hop)
            self._packs.was_not_sent(held)
            ended.met.append((held, answer.store))
        elif answer.results:
            self._reached(one.lane.hop)
            ended.settled.append((held, _judged(answer, self._asks.get(held.key, []))))
            self._forget(held.key)
        elif answer.damaged:
            self._packs.was_not_sent(held)
            ended.damaged.append(held)
            self._asks.pop(held.key, None)
        elif answer.is_unknown and self._packs.is_asked_about(held):
            self._reached(one.lane.hop)
            ended.settled.append((held, self._packs.ends_unknown(held)))
            self._forget(held.key)
        else:
            self._failed(held, answer)

    def _waits(self, one: _Given, answer: Answer) -> None:
        """The next custodian has it: others may go, and it is asked ever more seldom what became of this one."""
        held = one.held
        self._reached(one.lane.hop)
        if not one.waits:
            one.waits = True
            self._load[one.lane] -= 1
        self._asks.setdefault(held.key, answer.damaged)
        now_s = self._clock.monotonic_s()
        pause = self._pauses.setdefault(held.key, Pause())
        pause.more(now_s, 0.0)
        self._turns.later(self._lane(held), held, pause.until_s)

    def _reached(self, hop: str) -> None:
        self._away.pop(hop, None)
        self._problems.pop(hop, None)

    def _failed(self, held: HeldPack, answer: Answer) -> None:
        hop, now_s = self._lane(held).hop, self._clock.monotonic_s()
        if ErrorClass.from_code(answer.code) in _NOT_SENT:
            self._packs.was_not_sent(held)
        else:
            self._packs.was_sent(held)
        if ErrorClass.from_code(answer.code) in AWAY:
            pause = self._away.setdefault(hop, Pause())
        else:
            self._asks.pop(held.key, None)  # the next custodian does not know it any more, perhaps
            pause = self._pauses.setdefault(held.key, Pause())
        if pause.until_s <= now_s:  # several packs are lost with one connection
            pause.more(now_s, answer.retry_after_s)
        self._turns.later(self._lane(held), held, pause.until_s)
        self._problems[hop] = answer.failure
        log.warn("delivery-failed", origin=held.origin, seq=held.seq, path=held.path, terminal=hop,
                 problem=answer.failure, again_s=round(pause.until_s - now_s))  # fmt: skip

    def _until_next_s(self) -> float:
        now_s = self._clock.monotonic_s()
        times_s = [self._turns.until_s(), *(pause.until_s for pause in self._away.values())]
        return min([_IDLE_S, *(until_s - now_s for until_s in times_s if until_s > now_s)])


@dataclass
class _Ended:
    """Packs whose results have come, and those that were damaged here.

    :param met: those that go on when it is recorded that their terminal has these records.
    """

    settled: list[tuple[HeldPack, list[Result]]] = field(default_factory=list)
    damaged: list[HeldPack] = field(default_factory=list)
    met: list[tuple[HeldPack, str]] = field(default_factory=list)

    def packs(self) -> Iterable[HeldPack]:
        """All of them."""
        return [*(held for held, _ in self.settled), *self.damaged, *(held for held, _ in self.met)]


def _judged(answer: Answer, damaged: Iterable[int]) -> list[Result]:
    """The terminal's answer about each file; one whose only copy here was damaged is LOST."""
    found = [
        Result(Outcome.FAILED, _SETTLED) if outcome == "stale" else Result(Outcome(outcome), reason, generation, code)
        for outcome, reason, generation, code in answer.results
    ]
    for position in {*answer.damaged, *damaged}:
        if found[position].outcome is Outcome.FAILED:
            found[position] = lost()
    return found
