"""Packs in custody on a real spool: no step that fails, or is the last, loses a file or keeps its space."""

from __future__ import annotations

import asyncio
import errno
import json
import queue
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from overlay_router.custodians import pack_turns
from overlay_router.custodians.carrier_process import CarrierProcess
from overlay_router.custodians.pack_carrier import Answer, Gone, Order, Way, _Sent, load
from overlay_router.custodians.pack_forwarder import PackForwarder, _Given
from overlay_router.custodians.pack_records import HeldPack, as_pack
from overlay_router.custodians.pack_turns import Lane, Turns
from overlay_router.custodians.said import ASKS_S
from overlay_router.local.replies import Reply
from overlay_router.local.small_files import Arrived
from overlay_router.peers.keys import OwnCredential
from overlay_router.report import Reporting, shown, summary
from overlay_router.rules import lots
from overlay_router.rules.states import Outcome, Result
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Gateway
from stageout.overlay.packs import Packer
from stageout.overlay.wire import messages
from stageout.overlay.wire.messages import Custody, NoSpace, Packed, Status
from tests.in_loop import in_loop
from tests.unit.test_overlay_custodian import TERMINAL, Spooling, _Death, _faulty
from tests.unit.test_overlay_destination import EXPIRES, ORIGIN, PEER
from tests.unit.test_overlay_packs import arrived, digest

LABELS = re.findall(
    r"^\| `(custody-pack-[a-z-]+)` \|",
    (Path(__file__).resolve().parents[2] / "docs/developer/durable-steps.md").read_text(),
    re.M,
)
FILES = {"a": b"first", "b/c": b"second", "empty": b""}
DONE = [Result(Outcome.DONE, generation=1)] * len(FILES)


@pytest.fixture
def spooling() -> Iterator[Spooling]:
    with tempfile.TemporaryDirectory() as place:
        made = Spooling(Path(place), 10_000)
        yield made
        made.close()


def pack(seq: int = 1, release: str = "delivered", **more: object) -> Arrived:
    one = arrived(seq, FILES if seq == 1 else {f"{seq}/{name}": data for name, data in FILES.items()})
    return one._replace(pack=replace(one.pack, **{"terminal": TERMINAL, "release": release, **more}))  # type: ignore[arg-type]


def spooled(spooling: Spooling) -> list[Path]:
    return sorted((spooling.home / ".stageout/packs").iterdir())


def order(spooling: Spooling) -> Order:
    (held,) = spooling.one.packs.held()
    return Order(1, TERMINAL, "k", "", **spooling.one.packs.order(held))  # type: ignore[arg-type]


def give(forwarder: PackForwarder, held: HeldPack, number: int = 1) -> None:
    """As if the process had it."""
    forwarder._given[held.key] = _Given(number, held, forwarder._lane(held))
    forwarder._keys[number] = held.key
    forwarder._load[forwarder._lane(held)] += 1


def _mended(spooling: Spooling) -> None:
    """Two packs are taken; one rots, comes again, and both are delivered."""
    packs = spooling.one.packs
    if not spooling.one.packed(Status(ORIGIN, 1, 3)):
        packs.take([pack(1), pack(11)])
        packs.meet(TERMINAL, "its records")
        rotten = next((held for held in packs.held() if held.seq == 11), None)
        if rotten is not None and not spooling.store.record(ORIGIN).results:
            packs.damaged(rotten)
            packs.take([pack(11)])
        for held in packs.held():
            packs.settle([(held, DONE)])
    if not spooling.one.packed(Status(ORIGIN, 11, 3)):
        packs.take([pack(11)])
        packs.settle([(held, DONE) for held in packs.held()])


@pytest.mark.parametrize("what", ["kill-before", "kill-after", "EIO"])
@pytest.mark.parametrize("label", LABELS)
def test_no_step_that_fails_or_is_the_last_loses_anything(spooling: Spooling, label: str, what: str) -> None:
    fault = OSError(errno.EIO, "planned") if what == "EIO" else _Death()
    with _faulty(label, fault, what == "kill-after") as passed:
        try:
            _mended(spooling)
        except OSError:
            _mended(spooling)
        except _Death:
            spooling.restart()
            _mended(spooling)
    assert label in passed, f"nobody passes {label}"
    spooling.restart()
    assert (spooled(spooling), lots.reserved_bytes(spooling.spool), spooling.one.packs.held()) == ([], 0, [])
    for seq in (1, 11):
        assert spooling.one.packed(Status(ORIGIN, seq, 3)) == Packed(ORIGIN, seq, (1, 1, 1))


def test_packs_that_wait_for_each_other_are_refused(spooling: Spooling) -> None:
    [reply] = spooling.one.packs.take([pack(1, after=(12,))])
    assert isinstance(reply.message, Packed)
    assert "later number" in reply.message.reasons[0]
    [reply] = spooling.one.packs.take([pack(11, after=(1,))])
    assert isinstance(reply.message, Custody)


def test_taken_once_kept_over_a_restart_and_sent_as_it_came(spooling: Spooling) -> None:
    one = pack(release="custody")
    assert spooling.one.packs.take([one, one]) == [Reply(PEER, Custody(ORIGIN, 1, "me:1"))]
    spooling.one.low(messages.Low(ORIGIN, 2))
    assert spooling.store.record(ORIGIN).low == 0, "what is in custody stays"
    assert spooling.one.cancel(messages.Cancel(ORIGIN, 2), PEER) == [Reply(PEER, Custody(ORIGIN, 2, "me:1"))]
    before = lots.reserved_bytes(spooling.spool)
    spooling.restart()
    assert lots.reserved_bytes(spooling.spool) == before > 0
    known = summary(spooling.one.held(), spooling.one.packs.held(), 0.0)
    assert (known.files, known.single, known.single_bytes) == (3, 3, known.size_bytes)
    loaded = load(order(spooling))
    assert (loaded.pack, loaded.data, loaded.damaged) == (one.pack, list(FILES.values()), [])
    assert order(spooling).cancelled == [2]
    assert spooling.one.packs.take([one]) == [Reply(PEER, Custody(ORIGIN, 1, "me:1"))]
    [reply] = spooling.one.packs.take([one._replace(peer="other/x")])
    assert isinstance(reply.message, Packed)
    assert set(reply.message.reasons) == {"it was deposited with another key"}


def test_what_is_damaged_is_known_file_by_file(spooling: Spooling) -> None:
    spooling.one.packs.take([pack(release="custody")])
    (path,) = spooled(spooling)
    content = path.read_bytes()
    path.write_bytes(content[:-6] + b"SECOND")
    assert load(order(spooling)).damaged == [1]
    path.write_bytes(b"?" + content[1:])
    with pytest.raises(Gone):
        load(order(spooling))
    path.write_bytes(content[:-1])
    with pytest.raises(Gone):
        load(order(spooling))


def test_a_lack_of_descriptors_is_no_damage(spooling: Spooling, monkeypatch: pytest.MonkeyPatch) -> None:
    spooling.one.packs.take([pack(release="custody")])
    one, answers = order(spooling), list[Answer]()

    def short_of(path: Path) -> bytes:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(Path, "read_bytes", short_of)
    Way(Gateway("localhost", 1, "k", b""), answers.append)._begin(one)
    (answer,) = answers
    assert (answer.damaged, answer.code) == ([], ErrorClass.UNKNOWN.code)
    assert ErrorClass.UNKNOWN.retryable


def test_a_full_spool_and_what_is_too_late_are_said(spooling: Spooling) -> None:
    spooling.spool.size_bytes = 100
    taken, full = (reply.message for reply in spooling.one.packs.take([pack(1), pack(11)]))
    assert isinstance(taken, NoSpace)
    assert isinstance(full, Custody)
    spooling.clock.now_s = EXPIRES + 1.0
    [reply] = spooling.one.packs.take([pack(21)])
    assert isinstance(reply.message, Packed)
    assert reply.message.outcomes == ("expired",) * 3
    [reply] = spooling.one.expire(())
    assert isinstance(reply.message, Packed)
    assert reply.message.outcomes == ("expired",) * 3
    assert (spooled(spooling), lots.reserved_bytes(spooling.spool)) == ([], 0)


def test_whatever_fails_while_a_pack_is_taken_no_space_stays_reserved(spooling: Spooling) -> None:
    one = pack()
    beyond = one._replace(pack=replace(one.pack, seq=2**63 - 2))
    with pytest.raises(OverflowError):
        spooling.one.packs.take([beyond])
    assert (spooled(spooling), lots.reserved_bytes(spooling.spool), spooling.one.packs.held()) == ([], 0, [])


def test_a_pack_that_has_ended_meanwhile_is_not_ordered(spooling: Spooling) -> None:
    spooling.one.packs.take([pack()])
    (held,) = spooling.one.packs.held()
    spooling.one.packs.settle([(held, DONE)])
    assert spooling.one.packs.order(held) is None


def test_an_order_that_cannot_be_read_is_answered(spooling: Spooling) -> None:
    spooling.one.packs.take([pack()])
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    way = Way(Gateway("localhost", 1, "k", b""), answers.put)
    way.take(replace(order(spooling), digest="of another installation"))
    answer = answers.get(timeout=20)
    assert (answer.number, answer.damaged, answer.code) == (1, [], ErrorClass.PLUGIN_BROKEN.code)
    assert "install" in answer.failure


class _Terse:
    """A connection to a router that answers for one file, whatever it was sent."""

    digest_name, gateway, cancels, store, ahead_s = "blake2b-128", Gateway("terse", 1, "k", b""), True, "", 0

    def __init__(self, origin: str) -> None:
        self.origin = origin

    digest = staticmethod(digest)

    def send(self, *message: object) -> None:
        pass

    send_pack = send

    def has_more(self, within_s: float) -> bool:
        return True

    def receive(self) -> Packed:
        return Packed(self.origin, 1, (1,))

    def failure(self, kind: ErrorClass, text: str) -> TransferFailure:
        return TransferFailure(kind, text)

    def close(self) -> None:
        pass


def test_who_answers_for_fewer_files_than_it_was_sent_has_failed(spooling: Spooling, tmp_path: Path) -> None:
    spooling.one.packs.take([pack()])
    answers: list[Answer] = []
    way = Way(_Terse.gateway, answers.append)
    loaded = load(order(spooling))
    way._sent[ORIGIN, 1] = _Sent(1, len(loaded.data))
    way._hear(Packed(ORIGIN, 1, (1,)))
    assert [(one.results, one.failure) for one in answers] == [([], "terse:1 has answered for 1 of 3 files")]
    ended: list[object] = []
    packer: Packer[str] = Packer(_Terse.gateway, lambda key, end: ended.append(key))
    packer._channel = _Terse(packer.origin)  # type: ignore[assignment]
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"x")
        packer.add(name, tmp_path / name, name)
    with pytest.raises(TransferFailure, match="1 of 2 files"):
        packer.finish()
    assert not ended


def test_what_was_freed_is_lost_at_its_end(spooling: Spooling) -> None:
    spooling.one.packs.take([pack(release="custody")])
    spooling.clock.now_s = EXPIRES + ASKS_S + 1.0
    [reply] = spooling.one.expire(())
    assert isinstance(reply.message, Packed)
    assert reply.message.outcomes == ("lost",) * 3


def test_one_damaged_file_is_lost_and_the_others_are_what_the_terminal_says(spooling: Spooling) -> None:
    told: list[Reply] = []

    async def run() -> None:
        async def on_disk(work):  # type: ignore[no-untyped-def]
            return work()

        forwarder = PackForwarder(spooling.one.packs, on_disk, told.extend, OwnCredential(), spooling.clock)
        spooling.one.packs.take([pack(release="custody")])
        (held,) = spooling.one.packs.held()
        give(forwarder, held)
        said = [("done", "", 1, 0), ("failed", "digest", 0, 0), ("stale", "", 0, 0)]
        forwarder._answers.append(Answer(1, said, damaged=[1]))
        await forwarder._settle()

    asyncio.run(run())
    [reply] = told
    assert isinstance(reply.message, Packed)
    assert (reply.message.generations, reply.message.outcomes) == ((1, 0, 0), ("lost", "failed"))


@pytest.mark.parametrize("why", ["nobody listens", f"{TERMINAL}: nobody listens"])
def test_a_pack_is_shown_with_why_it_is_not_there(spooling: Spooling, tmp_path: Path, why: str) -> None:
    async def run() -> str:
        async def on_disk(work):  # type: ignore[no-untyped-def]
            return work()

        forwarder = PackForwarder(spooling.one.packs, on_disk, lambda replies: None, OwnCredential(), spooling.clock)
        spooling.one.packs.take([pack(release="custody")])
        (held,) = spooling.one.packs.held()
        forwarder._failed(held, Answer(1, failure=why, code=ErrorClass.CONNECT_FAILED.code))
        reporting = Reporting(tmp_path / "custody.json", spooling.one, [forwarder], on_disk)
        reporting._write(reporting._facts())
        return shown(tmp_path / "custody.json", held.taken_at + 7)

    first, problem, row = asyncio.run(run()).splitlines()
    assert first.startswith("3 files,")
    assert problem == f"{TERMINAL}: nobody listens"
    assert row.split()[0] == "7"
    assert row.endswith(f"{TERMINAL} a and 2 more  (only copy)")


def test_a_process_that_is_not_understood_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["sh", "-c", 'echo "{}"; exec sleep 600']
    monkeypatch.setattr("overlay_router.custodians.carrier_process.module_command", lambda module: words)

    async def run() -> None:
        async def heard(said: dict[str, object]) -> None:
            raise TypeError("planned")

        carrier = CarrierProcess("", heard, wake := asyncio.Event())
        assert not await carrier.has_died()
        await carrier.start()
        await asyncio.wait_for(wake.wait(), 60)
        assert not carrier.is_running
        assert await carrier.has_died()

    asyncio.run(run())


class _Process:
    """Takes orders and does nothing."""

    is_running = True

    def __init__(self) -> None:
        self.orders: list[Order] = []

    def write(self, order: dict[str, Any]) -> None:
        self.orders.append(Order(**json.loads(json.dumps(order))))

    def given(self) -> list[tuple[int, bool]]:
        """Which packs, and whether only to ask; then they are forgotten."""
        orders, self.orders = self.orders, []
        return [(as_pack(one.pack).seq, one.asks) for one in orders]


class Delivering:
    """A forwarder whose process does nothing by itself."""

    def __init__(self, spooling: Spooling) -> None:
        async def on_disk(work):  # type: ignore[no-untyped-def]
            return work()

        self.told: list[Reply] = []
        self.process = _Process()
        self.one = in_loop(
            lambda: PackForwarder(spooling.one.packs, on_disk, self.told.extend, OwnCredential(), spooling.clock)
        )
        self.one._carrier = self.process  # type: ignore[assignment]

    def step(self, *answers: Answer) -> list[tuple[int, bool]]:
        """The result when these answers have come."""

        async def run() -> None:
            self.one._answers += answers
            await self.one._settle()
            await self.one._begin()

        asyncio.run(run())
        return self.process.given()

    def number(self, seq: int) -> int:
        return self.one._given[ORIGIN, seq].number


def _seqs(count: int) -> list[int]:
    return [1 + 10 * number for number in range(count)]


def test_what_the_next_custodian_has_takes_no_place_and_is_asked_about(spooling: Spooling) -> None:
    spooling.spool.size_bytes = 10**6
    seqs = _seqs(40)
    spooling.one.packs.take([pack(seq) for seq in seqs])
    delivering = Delivering(spooling)
    assert delivering.step() == [(seq, False) for seq in seqs[:16]]
    assert delivering.step() == []
    waits = [Answer(delivering.number(seq), waits=True) for seq in seqs[:16]]
    assert delivering.step(*waits) == [(seq, False) for seq in seqs[16:32]]
    assert len(delivering.one.busy) == 32, "what is at the next one may still arrive"
    spooling.clock.now_s += 1.1
    assert delivering.step() == [(seq, True) for seq in seqs[:16]]
    again = [Answer(delivering.number(seq), waits=True) for seq in seqs[:16]]
    assert delivering.step(*again) == []
    done = [("done", "", 1, 0)] * len(FILES)
    assert delivering.step(Answer(delivering.number(1), done)) == []
    (reply,) = delivering.told
    assert reply.message == Packed(ORIGIN, 1, (1, 1, 1))
    unknown = Answer(delivering.number(11), failure="does not have it", code=ErrorClass.CONNECTION_LOST.code)
    more = [Answer(delivering.number(seq), waits=True) for seq in seqs[16:32]]
    assert delivering.step(unknown, *more) == [(seq, False) for seq in seqs[32:]]
    spooling.clock.now_s += 30
    given = delivering.step()
    assert (11, False) in given, "it is sent again"
    assert sum(asks for _, asks in given) == 16


def test_the_damaged_file_of_a_pack_that_waited_at_the_next_custodian_is_lost(spooling: Spooling) -> None:
    spooling.one.packs.take([pack(release="custody")])
    delivering = Delivering(spooling)
    delivering.step()
    delivering.step(Answer(delivering.number(1), waits=True, damaged=[1]))
    spooling.clock.now_s += 1.1
    assert delivering.step() == [(1, True)]
    said = [("done", "", 1, 0), ("failed", "digest", 0, 0), ("done", "", 1, 0)]
    delivering.step(Answer(delivering.number(1), said))
    (reply,) = delivering.told
    assert isinstance(reply.message, Packed)
    assert (reply.message.failed, reply.message.outcomes) == ((1,), ("lost",))


def test_nothing_is_forgotten_when_a_step_of_the_disk_fails(spooling: Spooling) -> None:
    spooling.one.packs.take([pack(1), pack(11)])
    delivering = Delivering(spooling)
    with _faulty("custody-pack-settle", OSError(errno.EIO, "planned"), False):
        delivering.step()
        with pytest.raises(OSError, match="planned"):
            delivering.step(Answer(delivering.number(1), [("done", "", 1, 0)] * 3))
    assert delivering.step() == [(1, False)]


def test_what_waits_costs_nothing(spooling: Spooling, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr(
        pack_turns, "standing", lambda priority, deadline, since, now: looked.append(1) or (since, 0.0, since)
    )
    turns, lane = Turns(), Lane("t:1")
    for seq in range(2000):
        held = HeldPack(ORIGIN, seq, seq + 1, "f", "t:1", "delivered", EXPIRES, PEER, "d", 1, seq)
        turns.add(lane, held, 0.0) if seq < 1000 else turns.later(lane, held, 100.0)
    looked.clear()
    assert [held.seq for _, held in turns.next(1.0, 0.0, lambda lane: 3)] == [0, 1, 2]
    assert turns.next(1.0, 0.0, lambda lane: 0) == []
    assert len(looked) == 3
    assert turns.until_s() == 100.0


def test_the_most_urgent_goes_first_and_waiting_counts() -> None:
    def held(seq: int, priority: int = 0, deadline: int = 0, taken_at: int = 3600) -> HeldPack:
        return HeldPack(
            ORIGIN, seq, seq + 1, "f", "t:1", "custody", EXPIRES, PEER, "d", 1, taken_at, priority, deadline
        )  # fmt: skip

    turns, lane = Turns(), Lane("t:1")
    for one in (held(1), held(2, priority=3), held(3, deadline=4000), held(4, taken_at=0), held(5, priority=2)):
        turns.add(lane, one, 3600.0)
    turns.later(lane, held(5, priority=9), 10**9)  # a pack has one place
    assert [one.seq for _, one in turns.next(0.0, 4001.0, lambda lane: 9)] == [2, 4, 1, 3]


def test_the_way_says_that_the_next_custodian_has_it_and_hears_more(spooling: Spooling) -> None:
    answers: list[Answer] = []
    way = Way(_Terse.gateway, answers.append)
    way._sent[ORIGIN, 1] = _Sent(7, 3, [2])
    way._hear(Custody(ORIGIN, 1, "next:1"))
    way._hear(Custody(ORIGIN, 1, "next:1"))
    way._hear(Packed(ORIGIN, 1, (1, 1, 1)))
    assert [(one.number, one.waits, one.damaged, len(one.results)) for one in answers] == [
        (7, True, [2], 0), (7, False, [2], 3),
    ]  # fmt: skip
    assert not (way._sent or way._waits)


def test_who_asks_says_first_what_is_not_wanted(spooling: Spooling) -> None:
    spooling.one.packs.take([pack()])
    sent: list[object] = []
    way, terse = Way(_Terse.gateway, lambda answer: None), _Terse(ORIGIN)
    terse.send = sent.append  # type: ignore[method-assign,assignment]
    way._connected = lambda: terse  # type: ignore[method-assign,assignment,return-value]
    asking = replace(order(spooling), asks=True, cancelled=[2])
    way._begin(asking)
    assert sent == [messages.Low(ORIGIN, 0), messages.Cancel(ORIGIN, 2), Status(ORIGIN, 1, 3)]
    sent.clear()
    way._begin(asking)
    assert sent == [messages.Low(ORIGIN, 0)], "it has no answer yet, which will come"
    sent.clear()
    way._begin(replace(asking, cancelled=[1, 2]))
    assert sent == [messages.Low(ORIGIN, 0), messages.Cancel(ORIGIN, 1)], "each is said once behind a pack"


@pytest.mark.parametrize(
    ("cancels", "terminal", "said"),
    [(True, TERMINAL, "LP"), (False, TERMINAL, "LCCP"), (False, f"{TERMINAL},u:1", "LPCC")],
)
def test_routers_of_an_earlier_version_hear_of_each_file_that_is_not_wanted(
    spooling: Spooling, cancels: bool, terminal: str, said: str
) -> None:
    spooling.one.packs.take([pack(terminal=terminal)])
    sent: list[object] = []
    way, terse = Way(_Terse.gateway, lambda answer: None), _Terse(ORIGIN)
    terse.cancels = cancels
    terse.send, terse.send_pack = sent.append, lambda *facts: sent.append(facts[0])  # type: ignore[assignment,method-assign]
    way._connected = lambda: terse  # type: ignore[method-assign,assignment,return-value]
    way._begin(replace(order(spooling), cancelled=[1, 3]))
    assert "".join(type(one).__name__[0] for one in sent) == said


def test_a_cancelled_file_is_cancelled_wherever_its_pack_is(spooling: Spooling) -> None:
    unwanted = pack(1)
    spooling.one.packs.take([unwanted._replace(pack=replace(unwanted.pack, cancelled=(2, 99))), pack(11)])
    assert order_of(spooling, 1).cancelled == [2], "which came with it"
    spooling.restart()
    assert order_of(spooling, 1).cancelled == [2]
    delivering = Delivering(spooling)
    assert delivering.step() == [(1, False), (11, False)]
    for seq in (12, 13, 12):
        spooling.one.cancel(messages.Cancel(ORIGIN, seq), PEER)
    assert delivering.step() == [(11, True)], "it is on its way"
    delivering.step(Answer(delivering.number(1), waits=True))
    spooling.one.cancel(messages.Cancel(ORIGIN, 3), PEER)
    assert delivering.step() == [(1, True)], "the next custodian has it, who hears it at once"


def test_what_a_pack_that_is_said_again_says_is_cancelled_is_heard(spooling: Spooling) -> None:
    """Its sender lost the connection before CUSTODY, somebody cancelled a file, and it said so with the pack."""
    spooling.one.packs.take([pack(1)])
    delivering = Delivering(spooling)
    assert delivering.step() == [(1, False)]
    (reply,) = spooling.one.packs.take([pack(1, cancelled=(2, 99))])
    assert isinstance(reply.message, Custody)
    assert delivering.step() == [(1, True)]
    spooling.one.packs.take([pack(1, cancelled=(2,))])
    assert delivering.step() == [], "that is known"
    spooling.restart()
    assert order_of(spooling, 1).cancelled == [2]


def order_of(spooling: Spooling, seq: int) -> Order:
    (held,) = (one for one in spooling.one.packs.held() if one.seq == seq)
    return Order(1, TERMINAL, "k", "", **spooling.one.packs.order(held))  # type: ignore[arg-type]


def test_the_older_version_of_a_name_never_replaces_the_newer(spooling: Spooling) -> None:
    later = pack(11)
    later = later._replace(pack=replace(later.pack, after=(2,)))
    last = pack(21)
    last = last._replace(pack=replace(last.pack, after=(12, 5)))
    spooling.size_bytes = spooling.spool.size_bytes = 10**6
    spooling.take(5)
    spooling.one.packs.take([pack(1), later, last])
    spooling.restart()
    delivering = Delivering(spooling)
    assert delivering.step() == [(1, False)]
    done = [("done", "", 1, 0)] * len(FILES)
    assert delivering.step(Answer(delivering.number(1), done)) == [(11, False)]
    assert delivering.step(Answer(delivering.number(11), done)) == [], "a file in custody comes before it"
    spooling.one.settle((ORIGIN, 5), Result(Outcome.FAILED, "conflict"))
    assert delivering.step() == [(21, False)]


def test_who_frees_its_files_says_which_pack_has_the_earlier_version(tmp_path: Path) -> None:
    class Taking(_Terse):
        """Takes each pack into custody."""

        def send_pack(self, head: messages.Pack, *data: object) -> None:
            heads.append(head)

        def has_more(self, within_s: float) -> bool:
            return len(heads) > len(ends)

        def receive(self) -> Custody:  # type: ignore[override]
            ends.append(heads[len(ends)].seq)
            return Custody(self.origin, ends[-1], "c:1")

    heads: list[messages.Pack] = []
    ends: list[int] = []
    packer: Packer[str] = Packer(_Terse.gateway, lambda key, end: None, custody=True, terminal="t:1", priority=4)
    packer._channel = Taking(packer.origin)  # type: ignore[assignment]
    (tmp_path / "f").write_bytes(b"x")
    names = [f"n{number}" for number in range(10)]
    for name in names:
        packer.add(name, tmp_path / "f", name)
        packer.finish()
    for name in names:
        packer.add(name, tmp_path / "f", name)
    packer.add("new", tmp_path / "f", "new")
    packer.finish()
    assert [(one.seq, one.after) for one in heads[9:]] == [(10, ()), (11, tuple(range(1, 9))), (19, (9, 10))]
    assert {(one.priority, one.release, one.terminal) for one in heads} == {(4, "custody", "t:1")}


def test_results_that_nobody_settles_take_no_memory(spooling: Spooling) -> None:
    """A sender that frees its files raises no LOW: they stay on the disk until they expire."""
    ends = [*DONE[:2], Result(Outcome.FAILED, "no")]
    spooling.one.packs.take([pack(1), pack(11), pack(21)])
    spooling.one.packs.settle([(held, ends if held.seq == 11 else DONE) for held in spooling.one.packs.held()])
    told = Packed(ORIGIN, 11, (1, 1, 0), (2,), ("failed",), ("no",))
    for _ in range(2):
        assert [reply.message for reply in spooling.one.packs.take([pack(11)])] == [told]
        assert spooling.one.packed(Status(ORIGIN, 11, 3)) == told
        assert spooling.one.packed(Status(ORIGIN, 12, 2)) == Packed(ORIGIN, 12, (1, 0), (1,), ("failed",), ("no",))
        assert spooling.one.packed(Status(ORIGIN, 13, 2)) is None
        assert spooling.one.packed(Status(ORIGIN, 2, 3)) is None
        (one,) = spooling.one.status(Status(ORIGIN, 13), PEER)
        assert one.message == messages.Result(ORIGIN, 13, "failed", "no")
        assert not spooling.store.record(ORIGIN).results
        spooling.restart()
    spooling.one.low(messages.Low(ORIGIN, 12))
    assert spooling.one.packed(Status(ORIGIN, 12, 2)) == Packed(
        ORIGIN, 12, (0, 0), (0, 1), ("stale", "failed"), ("", "no")
    )
    assert spooling.one.packed(Status(ORIGIN, 21, 3)) == Packed(ORIGIN, 21, (1, 1, 1))
