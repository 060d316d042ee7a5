"""Deliveries out of a spool: which is next, how many at once, when one that failed is tried again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from overlay_router.custodians.carrier import Answer, Note, Order
from overlay_router.custodians.carrier_process import CarrierProcess, attempt
from overlay_router.custodians.custodian import Custodian
from overlay_router.custodians.facts import Facts, facts_of, hop_of, may_say, named, onward, opening_of
from overlay_router.custodians.passing import Coming
from overlay_router.custodians.spool import FIRST_TID, Held, Key
from overlay_router.local.replies import Reply
from overlay_router.pauses import FIRST_S, FORGET_EVERY_S, Pause
from overlay_router.peers.keys import OwnCredential
from overlay_router.peers.origins import as_handed_on
from overlay_router.rules.states import Outcome, Result
from stageout.core import log
from stageout.core.clock import Clock
from stageout.core.errors import ErrorClass
from stageout.overlay.wire.messages import Operation

_COALESCE_S = 0.02
_IDLE_S = 5.0
#: So many times the deliveries at once may wait for something at their next hop.
_MOST_WAITING = 4
#: Before something that comes in is sent on again whose terminal has its result already.
_REFUSED_S = 120.0
#: Failures that say something of the terminal, not of one file: everything for it waits.
AWAY = frozenset(
    {
        ErrorClass.CONNECT_FAILED,
        ErrorClass.NAME_LOOKUP_FAILED,
        ErrorClass.NAME_NOT_RESOLVED,
        ErrorClass.CREDENTIAL_REFUSED,
        ErrorClass.STALLED,
    }
)
_Block = tuple[int, str]
T = TypeVar("T")
ShareWith = Callable[[socket.socket], None]


class OnDisk(Protocol):
    """Runs a call in the thread that owns the disk."""

    def __call__(self, work: Callable[[], T]) -> Awaitable[T]: ...


@dataclass
class _Order:
    """The state of the carrier. :param tid: of the data, 0 without any.

    :param held: None while the data still come in, and for data that the terminal is told to drop (``drops``).
    :param passes: of some blocks the next hop may have the only copy but the sender's.
    :param waits: the next hop has all of it and waits for something: it takes no place. :param is_stopped: it ends.
    :param was_said: an earlier order may have said it onward.
    """

    key: Key
    path: str
    terminal: str
    tid: int
    held: Held | None = None
    drops: bool = False
    passes: bool = False
    waits: bool = False
    is_stopped: bool = False
    was_said: bool = False


@dataclass
class _Early:
    """A file that comes in and has no place yet. :param places: its operation and terminal, if they are known.

    :param is_read: it is being looked at. :param blocks: that came meanwhile. :param pause: after it could not be.
    """

    places: tuple[Key | str, ...] = ()
    is_read: bool = False
    blocks: dict[int, str] = field(default_factory=dict)
    pause: Pause = field(default_factory=Pause)


@dataclass(frozen=True)
class Forwarding:
    """How a custodian delivers. :param own: what this router shows to terminals.

    :param most: deliveries at once. :param report: file that says what is in custody.
    """

    own: OwnCredential
    most: int
    report: Path


class Forwarder:
    """Delivers what a custodian holds. :meth:`run` beside everything.

    :param on_disk: runs a call in the thread that owns the custodian. :param tell: sends replies.
    :param own: what this router shows to the terminals. :param most: deliveries at once.
    :param share_with: has whoever receives share blocks with the process that delivers, by that socket.
    """

    def __init__(
        self,
        custodian: Custodian,
        on_disk: OnDisk,
        tell: Callable[[list[Reply]], None],
        own: OwnCredential,
        most: int,
        clock: Clock,
        share_with: ShareWith = socket.socket.close,
    ) -> None:
        self._custodian, self._on_disk, self._tell, self._clock = custodian, on_disk, tell, clock
        self._own, self._most, self._share_with = own, most, share_with
        self._numbers = itertools.count(1)
        self._orders: dict[int, _Order] = {}
        #: Operations whose data are looked up now, for an order.
        self._beginning: frozenset[Key] = frozenset()
        self._early: dict[int, _Early] = {}
        #: Data that a dead carrier sent on: it is not said yet what of them must come again.
        self._untold: set[int] = set()
        #: Blocks that the next hop has on its disk, by the number of their data, and that could not be recorded here.
        self._unheard: dict[int, dict[int, bytes]] = {}
        #: The carrier's reports of passed blocks and of gone ones are heard in their order.
        self._hearing = asyncio.Lock()
        #: The records that next hops have, as they said last.
        self._stores: dict[str, str] = {}
        self._pauses: dict[Key | str, Pause] = {}
        self._problems: dict[str, str] = {}
        self._forget_s = 0.0
        self.wake = asyncio.Event()
        self._carrier = CarrierProcess("overlay_router.custodians.carrier", self._heard, self.wake)

    @property
    def busy(self) -> frozenset[Key]:
        """The operations that are being delivered, or about to be: they must not come to their end here."""
        return self._beginning.union(order.key for order in self._orders.values())

    @property
    def problems(self) -> dict[str, str]:
        """Return why deliveries to a terminal fail now."""
        return dict(self._problems)

    async def run(self) -> None:
        """Deliver until cancelled; then what is under way is dropped, and begun again at the next start."""
        try:
            while True:
                self.wake.clear()
                again_s = self._clock.monotonic_s() + _COALESCE_S
                await attempt(self._begin())
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.wake.wait(), self._until_next_s())
                await asyncio.sleep(max(0.0, again_s - self._clock.monotonic_s()))
        finally:
            await self._carrier.end()

    def reached(self, terminal: str) -> None:
        """Deliver at once to a router that is there again."""
        self._pauses.pop(terminal, None)
        self.wake.set()

    def cancelled(self, key: Key) -> None:
        """Somebody does not want it any more: what is sent of it is stopped, and the terminal told."""
        for number, order in self._orders.items():
            if order.key == key and not order.drops:
                self._carrier.write({"stop": number})
        self._pauses.pop(key, None)
        self.wake.set()

    def opened(self, tid: int) -> None:
        """The data of a file are about to come: of one that is not small, the terminal is told at once."""
        if tid > FIRST_TID and all(order.tid != tid for order in self._orders.values()):
            self._early.setdefault(tid, _Early())
            self.wake.set()

    def staged(self, tid: int, blocks: Iterable[_Block], is_whole: bool) -> None:
        """Blocks of a file are on the disk here: they are sent on at once, if there is a place.

        :param blocks: positions and digests in hexadecimal digits. :param is_whole: no more of them come.
        """
        if tid < FIRST_TID:
            return
        number = next((number for number, order in self._orders.items() if order.tid == tid), None)
        early = self._early.get(tid)
        if number is not None:
            self._carrier.write({"more": number, "blocks": list(blocks)})
        elif early is not None:
            early.blocks.update(blocks if early.is_read else ())
        elif not is_whole:
            self._early[tid] = _Early()
        self.wake.set()

    async def _keep_carrier(self) -> None:
        """Have the process that delivers, or another when it has died: what it was doing begins anew."""
        if self._carrier.is_running:
            return
        if await self._carrier.has_died():
            log.error("delivery-process-died", deliveries=len(self._orders))
            self._untold.update(order.tid for order in self._orders.values() if order.passes)
            self._orders = {}
            await self._ask_again()
            await asyncio.sleep(FIRST_S)
        await self._start()

    async def _ask_again(self) -> None:
        """Data that a dead carrier had sent from memory, and that are not known to have arrived, are nowhere: they must
        come again.

        One file for which that cannot be recorded holds up no other one; it is tried again.
        """
        for tid in list(self._untold):
            try:
                replies = await self._on_disk(lambda one=tid: self._custodian.gone(one, ()))  # type: ignore[misc]
            except Exception as problem:
                log.error(
                    "resend-request-failed", tid=tid, problem=repr(problem), advice="look at the disk of the spool"
                )
                continue
            self._untold.discard(tid)
            self._tell(replies)

    async def _pass_again(self, tids: Iterable[int]) -> bool:
        """Have heard what the next hop has. A result that cannot be recorded (on a full disk) is tried again: others go
        on.

        :param tids: of data of which it has some. :returns: whether more than STAGED is said of it: something is in
            custody, or must come again.
        """
        is_news = False
        for tid in tids:
            blocks = self._unheard[tid]
            try:
                replies = await self._on_disk(lambda one=tid, some=blocks: self._custodian.passed(one, some))  # type: ignore[misc]
            except Exception as problem:
                log.error(
                    "progress-write-failed", tid=tid, problem=repr(problem), advice="look at the disk of the spool"
                )
                continue
            del self._unheard[tid]
            self._tell(replies)
            is_news |= len(replies) > 1
        return is_news

    async def _start(self) -> None:
        mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other, contextlib.ExitStack() as unused:
            unused.callback(mine.close)
            await self._carrier.start(str(other.fileno()), files=(other.fileno(),))
            unused.pop_all()
        mine.setblocking(False)
        self._share_with(mine)

    async def _heard(self, said: dict[str, Any]) -> None:
        await (self._noted(Note(**said)) if "gone" in said else self._answered(Answer(**said)))

    async def _begin(self) -> None:
        await self._keep_carrier()
        await self._ask_again()
        async with self._hearing:
            await self._pass_again(list(self._unheard))
        due = await self._on_disk(self._custodian.due)
        await self._complete(due)
        for held in self._next(due):
            await self._deliver(held)
        await self._send_early()
        await self._clean()
        await self._forget()

    async def _deliver(self, held: Held) -> None:
        self._beginning = frozenset({held.key})
        try:
            found = await self._facts(held)
            if isinstance(found, Facts):
                self._order(held, found)
            else:
                self._tell(found)
        except Exception as problem:  # of this file: that holds up no other one
            order = _Order(held.key, held.operation.path, hop_of(held.operation), held.tid)
            self._failed(order, Answer(0, failure=f"its records cannot be read: {problem!r}"))
        finally:
            self._beginning = frozenset()

    async def _facts(self, held: Held) -> Facts | list[Reply]:
        known, now = self._stores.get(hop_of(held.operation)), self._clock.wall_s()
        return await self._on_disk(lambda: facts_of(self._custodian, held, known, now))

    def _order(self, held: Held, facts: Facts) -> None:
        order = _Order(held.key, held.operation.path, hop_of(held.operation), held.tid, held, passes=bool(facts.passed))
        order.was_said = facts.said_to is not None
        cancel = "late" if facts.is_late else "all" if held.key in self._custodian.cancelled else ""
        cancel = cancel or ("damaged" if self._custodian.said.is_only_asked(held) else "")
        known: dict[str, Any] = {"digests": b"".join(digest for _, digest in facts.blocks).hex()}
        if facts.passed:
            known = {"blocks": named(facts.blocks), "passed": named(facts.passed), "passes": True}
        self._give(
            order, onward(facts.operation, held.sender), file=facts.file, digest=held.digest,
            opening=opening_of(held.asked, held.sender), cancel=cancel, asks=held.stands_by(self._clock.wall_s()),
            said_to=facts.said_to, store=facts.store, copies=held.operation.copies, low=facts.low, **known,
        )  # fmt: skip

    async def _complete(self, due: Iterable[Held]) -> None:
        """Data that were sent on while they came in are in custody now: the carrier may publish them, when it is known
        where."""
        growing = {order.key: number for number, order in self._orders.items() if order.held is None}
        for held in due if growing else ():
            number = growing.get(held.key)
            order = self._orders.get(number or 0)
            if number is None or order is None or order.drops:
                continue
            if order.tid != held.tid or held.key in self._custodian.cancelled:
                self._carrier.write({"stop": number})
            elif order.terminal in self._stores:
                await self._publish(number, order, held)

    async def _publish(self, number: int, order: _Order, held: Held) -> None:
        try:
            found = await self._facts(held)
        except Exception as problem:  # of this file: that holds up no other one
            self._failed(order, Answer(number, failure=f"not recorded: {problem!r}"))
            self._carrier.write({"stop": number})
            return
        if not isinstance(found, Facts):
            self._tell(found)
        elif self._orders.get(number) is order:
            order.held, order.was_said = held, found.said_to is not None
            operation = json.dumps(asdict(onward(found.operation, held.sender)))
            self._carrier.write({"whole": number, "operation": operation, "store": found.store})

    async def _send_early(self) -> None:
        """Files that still come in have as many places as those that are whole, and take none from these."""
        for tid, early in list(self._early.items()):
            if sum(order.held is None for order in self._orders.values()) >= self._most:
                return
            if not self._is_open_for(early):
                continue
            early.is_read, early.blocks = True, {}
            try:
                coming = await self._on_disk(lambda one=tid: self._custodian.begin(one))  # type: ignore[misc]
            except Exception as problem:  # of this file: that holds up no other one
                self._put_off(tid, early, problem)
                continue
            finally:
                early.is_read = False
            if coming is None:
                self._early.pop(tid, None)
                continue
            early.places = (coming.key, hop_of(coming.asked))
            if self._is_open_for(early):
                self._give_early(coming, self._early.pop(tid).blocks)

    def _put_off(self, tid: int, early: _Early, problem: Exception) -> None:
        """It cannot be looked up, or recorded, now."""
        now_s = self._clock.monotonic_s()
        early.pause.more(now_s, 0.0)
        log.error("early-send-failed", tid=tid, problem=repr(problem), again_s=round(early.pause.until_s - now_s),
                  advice="look at the disk of the spool and its database")  # fmt: skip

    def _is_open_for(self, early: _Early) -> bool:
        """Tell whether data may be sent on before they are whole: nothing is known to be in the way."""
        now_s = self._clock.monotonic_s()
        pauses = (early.pause, *(self._pauses.get(place, Pause()) for place in early.places))
        return not self.busy.intersection(early.places) and all(pause.until_s <= now_s for pause in pauses)

    def _give_early(self, coming: Coming, more: Mapping[int, str]) -> None:
        ask = coming.asked
        blocks = {block: digest.hex() for block, digest in coming.blocks} | dict(more)
        said = as_handed_on(ask, coming.sender)
        operation = Operation(said.origin, ask.seq, "publish", ask.path, ask.expires, size_bytes=ask.size_bytes)
        self._give(
            _Order(coming.key, ask.path, hop_of(ask), coming.tid, passes=coming.passes), operation, file=coming.file,
            digest=coming.digest, opening=opening_of(ask, coming.sender), comes=coming.tid,
            blocks=[*map(list, blocks.items())],
            passed=named((block, digest) for block, digest in coming.passed if block not in blocks),
            passes=coming.passes, store=self._stores.get(hop_of(ask)),
        )  # fmt: skip

    async def _clean(self) -> None:
        """Stop sending what nobody goes on with, and have the terminals drop what they have of such files."""
        for number, order in list(self._orders.items()):
            tid = order.tid if order.held is None and not order.drops else 0
            is_over = order.held is not None and not self._custodian.has(order.held)
            if is_over or (tid and not await self._on_disk(lambda one=tid: self._custodian.is_coming(one))):  # type: ignore[misc]
                self._carrier.write({"stop": number})
        now_s = self._clock.monotonic_s()
        for stray in await self._on_disk(self._custodian.strays):
            places = (stray.key, hop_of(stray))
            paused = any(self._pauses.get(place, Pause()).until_s > now_s for place in places)
            if paused or stray.key in self.busy or len(self._orders) >= 2 * self._most:
                continue
            operation = Operation(stray.said, stray.key[1], "publish", stray.path, stray.expires)
            self._give(_Order(stray.key, stray.path, hop_of(stray), 0, drops=True), operation, cancel="data")

    async def _forget(self) -> None:
        """The records of operations that have ended, and of terminals that nothing goes to, once a minute."""
        now_s = self._clock.monotonic_s()
        if now_s < self._forget_s:
            return
        self._forget_s = now_s + FORGET_EVERY_S
        known: set[Key | str] = {*self._pauses, *self._problems}
        known -= {*self.busy, *(place for early in self._early.values() for place in early.places)}
        known -= {order.terminal for order in self._orders.values()}
        for what in known - await self._on_disk(lambda: self._waits(known)) if known else ():
            self._pauses.pop(what, None)
            self._problems.pop(str(what), None)
        tids = [tid for tid, early in self._early.items() if not early.is_read]
        for gone in await self._on_disk(lambda: [tid for tid in tids if not self._custodian.is_coming(tid)]):
            self._early.pop(gone, None)

    def _waits(self, those: set[Key | str]) -> set[Key | str]:
        """Of these, operations that have not ended, and terminals that something waits for."""
        keys = {one for one in those if isinstance(one, tuple) and self._custodian.is_live(one)}
        hops = {hop_of(held.operation) for held in self._custodian.held()}
        return {*keys, *hops, *map(hop_of, self._custodian.strays())}

    def _give(self, order: _Order, operation: Operation, **further: Any) -> None:
        number, own = next(self._numbers), self._own.now
        name, secret = own.key
        text = json.dumps(asdict(operation))
        self._orders[number] = order
        log.event("drop-requested" if order.drops else "delivery-started", origin=order.key[0], seq=order.key[1],
                  path=order.path, terminal=order.terminal, early=order.held is None and not order.drops)  # fmt: skip
        self._carrier.write(asdict(Order(number, order.terminal, name, secret.hex(), text, ca=own.ca, **further)))

    def _next(self, due: list[Held]) -> list[Held]:
        """The operations that begin now: no terminal takes all places, and one that is away is tried with one file at a
        time."""
        now_s, busy = self._clock.monotonic_s(), self.busy
        load = self._load()
        chosen: list[Held] = []
        for held in due:
            terminal = hop_of(held.operation)
            away = self._pauses.get(terminal, Pause())
            most = 1 if away.failures else self._most_to_one
            if sum(load.values()) >= self._most:
                break
            if held.key in busy or load[terminal] >= most or away.until_s > now_s:
                continue
            if self._pauses.get(held.key, Pause()).until_s <= now_s:
                load[terminal] += 1
                chosen.append(held)
        return chosen

    def _load(self) -> Counter[str]:
        """Places that are taken, by terminal: of what is whole, and does not wait for its next hop."""
        return Counter(one.terminal for one in self._orders.values() if one.held is not None and not one.waits)

    @property
    def _most_to_one(self) -> int:
        """Places that one terminal may have."""
        return max(1, self._most - 1)

    def _until_next_s(self) -> float:
        now_s = self._clock.monotonic_s()
        pauses = (*self._pauses.values(), *(early.pause for early in self._early.values()))
        waits = [pause.until_s - now_s for pause in pauses if pause.until_s > now_s]
        return min([_IDLE_S, *waits])

    async def _answered(self, answer: Answer) -> None:
        order = self._orders.get(answer.number)
        if order is None:
            return
        try:
            self._tell(await self._record(order, answer))
        except Exception as problem:  # not recorded, or no outcome: it is asked again
            self._failed(order, Answer(answer.number, failure=f"not recorded: {problem!r}"))
        self._orders.pop(answer.number, None)
        self.wake.set()

    async def _noted(self, note: Note) -> None:
        """Of blocks that are not on the disk here, the next hop has some, or they must come again."""
        order = self._orders.get(note.number)
        if order is None:
            return
        if note.waits:
            order.waits = True
            self._wait_with_few()
        if note.sends:
            self._take_place(note.number, order)
        if note.store is not None:
            await self._meet(note.number, order, note.store, note.says)
        passed = {int(block): bytes.fromhex(digest) for block, digest in note.passed}
        is_news = note.waits or note.sends or note.store is not None or bool(note.gone)
        if passed or note.gone:
            async with self._hearing:
                is_news |= await self._hear(order.tid, passed, note.gone)
        if note.gone and order.held is not None:  # it waits for them
            self._carrier.write({"stop": note.number})
        if is_news:
            self.wake.set()

    async def _hear(self, tid: int, passed: Mapping[int, bytes], gone: Sequence[int]) -> bool:
        """As of :meth:`_pass_again`."""
        is_news = False
        if passed:
            self._unheard.setdefault(tid, {}).update(passed)
            is_news = await self._pass_again([tid])
        if gone:
            left = self._unheard.get(tid, {})
            for block in gone:
                left.pop(block, None)
            self._tell(await self._on_disk(lambda: self._custodian.gone(tid, gone)))
        return is_news

    async def _meet(self, number: int, order: _Order, store: str, says: bool) -> None:
        """The next hop has these records. :param says: the operation is to be said to them, when that is recorded."""
        self._stores[order.terminal] = store
        held = order.held
        if not says or held is None:
            return
        try:
            is_here = await self._on_disk(lambda: may_say(self._custodian, held, store))
        except Exception as problem:
            self._failed(order, Answer(number, failure=f"not recorded: {problem!r}"))
            is_here = False
        self._carrier.write({"said": number, "store": store} if is_here else {"stop": number})

    def _wait_with_few(self) -> None:
        """Of what waits at next hops, the oldest is asked about again later: each takes a connection, or some."""
        waiting = [(number, order) for number, order in self._orders.items() if order.waits and not order.is_stopped]
        for number, order in waiting[: -_MOST_WAITING * self._most]:
            order.is_stopped = True
            self._pauses.setdefault(order.key, Pause()).more(self._clock.monotonic_s(), 0.0)
            self._carrier.write({"stop": number})

    def _take_place(self, number: int, order: _Order) -> None:
        """An operation that waited, and sends again, needs a place: without one it is stopped, and has its turn as
        others do."""
        order.waits = False
        load = self._load()
        if sum(load.values()) > self._most or load[order.terminal] > self._most_to_one:
            order.is_stopped = True
            self._carrier.write({"stop": number})

    async def _record(self, order: _Order, answer: Answer) -> list[Reply]:
        if answer.outcome:
            self._reached(order.key, order.terminal)
        held = order.held
        if held is None:
            return await self._record_early(order, answer)
        if answer.outcome:
            return await self._on_disk(lambda: self._custodian.settle(held.key, result_of(answer)))
        if not answer.said and not order.was_said:
            await self._on_disk(lambda: self._custodian.said.unsay(held.key))
        if answer.damaged or (answer.code == ErrorClass.SOURCE_CHANGED.code and not held.operation.blocks):
            return await self._on_disk(lambda: self._custodian.damaged(held.key, answer.damaged))
        if answer.waits:
            self._pauses.setdefault(order.key, Pause()).more(self._clock.monotonic_s(), 0.0)
        elif answer.code != ErrorClass.NOT_ATTEMPTED.code:
            self._failed(order, answer)
        return []

    async def _record_early(self, order: _Order, answer: Answer) -> list[Reply]:
        """Of what is not in custody nothing is final here."""
        if order.drops and answer.outcome:
            await self._on_disk(lambda: self._custodian.dropped(order.key))
        elif answer.damaged:
            return await self._on_disk(lambda: self._custodian.spoiled(order.tid, answer.damaged))
        elif answer.outcome:  # that ends it as soon as it is in custody
            self._early.setdefault(order.tid, _Early()).pause.more(self._clock.monotonic_s(), _REFUSED_S)
        elif answer.code != ErrorClass.NOT_ATTEMPTED.code:
            self._failed(order, answer)
        return []

    def _reached(self, key: Key, terminal: str) -> None:
        self._pauses.pop(terminal, None)
        self._pauses.pop(key, None)
        self._problems.pop(terminal, None)

    def _failed(self, order: _Order, answer: Answer) -> None:
        away = ErrorClass.from_code(answer.code) in AWAY
        pause = self._pauses.setdefault(order.terminal if away else order.key, Pause())
        pause.more(self._clock.monotonic_s(), answer.retry_after_s)
        self._problems[order.terminal] = answer.failure
        log.warn("delivery-failed", origin=order.key[0], seq=order.key[1], path=order.path, terminal=order.terminal,
                 problem=answer.failure, again_s=round(pause.until_s - self._clock.monotonic_s()))  # fmt: skip


def result_of(answer: Answer) -> Result:
    """The terminal's answer, as it is recorded. :raises ValueError: no outcome."""
    if answer.outcome == "stale":
        return Result(Outcome.STALE, "its origin has settled it at the terminal already")
    return Result(Outcome(answer.outcome), answer.reason, answer.generation, answer.code)
