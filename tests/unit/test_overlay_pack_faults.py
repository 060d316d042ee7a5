"""One record or file that fails in a custodian holds up no other one, and keeps no space."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from overlay_router.custodians import pack_carrier, pack_custody
from overlay_router.custodians.carrier import Note
from overlay_router.custodians.forwarder import Forwarder, _Order
from overlay_router.custodians.pack_carrier import Answer, Order, Way, _Sent
from overlay_router.custodians.pack_records import HeldPack
from overlay_router.custodians.spool import Held
from overlay_router.delivery.outflow import Outflow
from overlay_router.peers.keys import OwnCredential
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.movers.results import Delivered
from stageout.overlay.channel import Gateway
from stageout.overlay.wire.messages import Cancel, Custody, Packed, Result
from tests.in_loop import in_loop
from tests.unit import test_overlay_places as places
from tests.unit.test_overlay_custodian import Spooling, _faulty
from tests.unit.test_overlay_destination import ORIGIN, PEER
from tests.unit.test_overlay_egress import Gate, _means, gate, home
from tests.unit.test_overlay_pack_custody import DONE, Delivering, pack, spooling

__all__ = ["gate", "home", "spooling"]


def _broken(*facts: object) -> Any:
    raise sqlite3.DatabaseError("database disk image is malformed")


def _unexpected(*facts: object) -> Any:
    raise OverflowError("malformed: a number too large")


@pytest.mark.parametrize("fault", [_broken, _unexpected])
def test_a_pack_whose_record_cannot_be_read_holds_up_no_other(
    spooling: Spooling, monkeypatch: pytest.MonkeyPatch, fault: Callable[[], Any]
) -> None:
    def order(held: HeldPack) -> Any:
        return fault() if held.seq == 1 else read(held)

    spooling.one.packs.take([pack(1), pack(11)])
    read, delivering = spooling.one.packs.order, Delivering(spooling)
    with monkeypatch.context() as patch:
        patch.setattr(spooling.one.packs, "order", order)
        assert delivering.step() == [(11, False)]
    assert delivering.step() == []
    spooling.clock.now_s += 1.1
    assert delivering.step() == [(1, False)]


def test_a_cancellation_that_cannot_be_passed_on_now_is_later(
    spooling: Spooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    spooling.one.packs.take([pack(1), pack(11)])
    delivering = Delivering(spooling)
    assert delivering.step() == [(1, False), (11, False)]
    for seq in (1, 11):
        spooling.one.cancel(Cancel(ORIGIN, seq), PEER)
    with monkeypatch.context() as patch:
        patch.setattr(spooling.one.packs, "order", _broken)
        assert delivering.step() == []
    assert delivering.step() == [(1, True), (11, True)]


@pytest.mark.parametrize("fault", [_broken, _unexpected])
def test_a_file_whose_record_cannot_be_read_holds_up_no_other(
    spooling: Spooling, monkeypatch: pytest.MonkeyPatch, fault: Callable[[], Any]
) -> None:
    async def on_disk(work: Callable[[], Any]) -> Any:
        return work()

    def blocks(held: Held) -> Any:
        return fault() if held.operation.seq == 1 else read(held)

    async def nothing() -> None:
        return

    for seq in (1, 2):
        spooling.take(seq)
    read, given = spooling.one.blocks, list[int]()
    monkeypatch.setattr(spooling.one, "blocks", blocks)
    forwarder = in_loop(
        lambda: Forwarder(spooling.one, on_disk, lambda replies: None, OwnCredential(), 3, spooling.clock)
    )
    monkeypatch.setattr(forwarder, "_keep_carrier", nothing)
    monkeypatch.setattr(forwarder, "_give", lambda order, *facts, **more: given.append(order.key[1]))
    asyncio.run(forwarder._begin())
    assert given == [2]
    assert "malformed" in str(forwarder.problems)


def test_what_was_passed_and_cannot_be_recorded_now_is_later_and_ends_no_other_delivery(
    spooling: Spooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk the process that delivers was killed each time, and what leaves is what makes room."""
    delivering, heard = places.Delivering(spooling), list[tuple[int, list[int]]]()
    delivering.one._orders = {number: _Order(("o", number), "f", "t:1", number, passes=True) for number in (1, 2)}

    def passed(tid: int, blocks: Mapping[int, bytes]) -> list[Any]:
        heard.append((tid, sorted(blocks)))
        return []

    async def story() -> None:
        monkeypatch.setattr(spooling.one, "passed", _broken)
        await delivering.one._noted(Note(1, [[0, "00"], [1, "01"]], []))
        await delivering.one._noted(Note(2, [[5, "05"]], []))
        monkeypatch.setattr(spooling.one, "gone", lambda tid, blocks: heard.append((-tid, list(blocks))) or [])
        await delivering.one._noted(Note(1, [], [1]))
        monkeypatch.setattr(spooling.one, "passed", passed)
        await delivering.one._begin()
        assert not delivering.one._unheard

    asyncio.run(story())
    assert heard == [(-1, [1]), (1, [0]), (2, [5])], "what is gone is not said to be there"


def test_a_file_of_a_call_that_fails_by_itself_holds_up_no_other(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def on_disk(work: Callable[[], Any]) -> Any:
        return work()

    def digests(held: Held) -> Any:
        return _broken() if held.operation.path == "out/unread" else read(held)

    def settle(key: Any, result: Any) -> Any:
        return _broken() if key[1] == 2 else end(key, result)

    for seq, name in enumerate(("unread", "unsettled", "good"), 1):
        gate.put(seq, f"out/{name}")
    read, end = gate.one.digests, gate.one.settle
    monkeypatch.setattr(gate.one, "digests", digests)
    monkeypatch.setattr(gate.one, "settle", settle)
    flow = in_loop(lambda: Outflow(gate.one, _means(tmp_path), on_disk, lambda replies: None, cast(Any, gate.clock)))
    target = gate.one.targets.find("out/good")
    assert target is not None
    held, _ = gate.one.ready(())
    files, bad = flow._files(held)
    assert ([file.held.key[1] for file in files], [one.key[1] for one, _ in bad]) == ([2, 3], [1])
    call = Mock(target=target, files=files, run=lambda: [Delivered("size")] * len(files))
    flow._calls[call] = cast(Any, None)
    asyncio.run(flow._carry_out(call))
    assert [one.key[1] for one in gate.one.held()] == [1, 2]
    assert [*flow._pauses] == [held[1].key], "the target does not wait"


def test_packs_that_cannot_be_looked_up_keep_no_space(spooling: Spooling, monkeypatch: pytest.MonkeyPatch) -> None:
    known = spooling.one.packs._known
    monkeypatch.setattr(
        spooling.one.packs, "_known", lambda one, others: known(one, others) if one.pack.seq == 1 else _broken()
    )
    with pytest.raises(sqlite3.DatabaseError):
        spooling.one.packs.take([pack(1), pack(11)])
    assert not spooling.spool.lots


def test_a_pack_that_was_recorded_although_that_failed_is_taken_when_it_comes_again(spooling: Spooling) -> None:
    with _faulty("custody-pack-take", OSError(errno.EIO, "planned"), True), pytest.raises(OSError, match="planned"):
        spooling.one.packs.take([pack()])
    (reply,) = spooling.one.packs.take([pack()])
    assert isinstance(reply.message, Custody)
    spooling.restart()
    assert [held.seq for held in spooling.one.packs.held()] == [1]


def test_a_file_that_cannot_be_removed_holds_up_no_end(spooling: Spooling, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*place: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    spooling.one.packs.take([pack(1), pack(11)])
    delivering = Delivering(spooling)
    delivering.step()
    said = [(one.outcome.value, "", 1, 0) for one in DONE]
    with monkeypatch.context() as patch:
        patch.setattr(pack_custody.durable, "unlink", read_only)
        delivering.step(*(Answer(delivering.number(seq), said) for seq in (1, 11)))
    assert [one.message for one in delivering.told] == [Packed(ORIGIN, seq, (1, 1, 1)) for seq in (1, 11)]
    assert not spooling.one.packs.held()
    assert not spooling.spool.lots
    spooling.restart()
    assert not list((spooling.home / ".stageout/packs").iterdir())


class _Listening(Way):
    """By a connection on which ``answers`` come, one a second, or nothing for as long as is waited.

    To send a pack takes ``leaves_s``. :ivar asked: numbers of packs that were asked about. :ivar said: answers.
    """

    leaves_s = 0.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.asked, self.said, self.answers = 1000.0, list[int](), list[Answer](), list[Any]()
        super().__init__(Gateway("t", 1, "k", b"", timeout_s=60.0), self.said.append)
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        monkeypatch.setattr(pack_carrier, "time", clock)
        monkeypatch.setattr(pack_carrier, "readable", self._readable)
        self._channel = channel = Mock()
        channel.failure, channel.send = TransferFailure, lambda message: self.asked.append(message.seq)
        channel.receive = lambda: self.answers.pop(0)
        self._heard_s = self.now_s

    def _run(self) -> None:
        pass

    def _readable(self, sources: list[Any], within_s: float) -> list[Any]:
        assert self._channel is not None
        self.now_s += 1.0 if self.answers else within_s
        return [self._channel.fileno()] if self.answers else []

    def _begin(self, order: Order) -> None:
        self._sent[ORIGIN, order.number] = _Sent(order.number, 3, heard_s=self._now_s())
        self.now_s += self.leaves_s

    def send(self, number: int) -> None:
        self._todo.put(cast("Order", SimpleNamespace(number=number)))


def test_while_a_pack_leaves_slowly_nobody_counts_as_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    way = _Listening(monkeypatch)
    way.leaves_s = 100.0
    way.send(1)
    for _ in range(6):
        way._step()
    assert way.asked == [1], "it is asked first"
    with pytest.raises(TransferFailure) as failed:
        way._step()
    assert failed.value.kind is ErrorClass.STALLED


def test_after_a_pause_nobody_counts_as_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    way = _Listening(monkeypatch)
    way.now_s += 55.0
    way.send(1)
    way._step()
    assert way.asked == [1]


def test_a_pack_without_a_word_fails_by_itself_while_others_have_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    way = _Listening(monkeypatch)
    way.send(1)
    for number in range(2, 200):
        way.answers.append(Packed(ORIGIN, number, (1, 1, 1)))
        way.send(number)
        way._step()
    (silent,) = [one for one in way.said if one.failure]
    assert (silent.number, ErrorClass.from_code(silent.code)) == (1, ErrorClass.TIMED_OUT)
    assert "answers others" in silent.failure
    assert way.asked == [1], "it is asked about first, and nobody else is"
    assert len(way.said) == 199


@pytest.mark.parametrize("word", [Result(ORIGIN, 1, "pending"), Custody(ORIGIN, 1, "next:1")])
def test_a_pack_that_waits_for_something_takes_no_place(monkeypatch: pytest.MonkeyPatch, word: Any) -> None:
    way = _Listening(monkeypatch)
    way.send(1)
    way.answers.append(word)
    way._step()
    assert [(one.number, one.waits) for one in way.said] == [(1, True)]
    way.answers.append(Packed(ORIGIN, 1, (1, 1, 1)))
    way._step()
    assert len(way.said[1].results) == 3, "its results come by themselves"
