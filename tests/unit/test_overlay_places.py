"""Deliveries that wait for something at the next hop hold up no others, and are not many."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sqlite3
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from overlay_router.custodians import carrier, spooled
from overlay_router.custodians.carrier import Answer, Note
from overlay_router.custodians.forwarder import _MOST_WAITING, Forwarder
from overlay_router.custodians.spooled import Growth, Spooled
from overlay_router.peers.keys import OwnCredential
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay import client
from stageout.overlay.channel import Gateway
from stageout.overlay.wire.frames import digests
from stageout.overlay.wire.messages import Operation
from tests.in_loop import in_loop
from tests.unit.test_overlay_custodian import EXPIRES, ORIGIN, PEER, TERMINAL, Spooling, coming
from tests.unit.test_overlay_pack_custody import spooling

__all__ = ["spooling"]


class Delivering:
    """A forwarder with one place, and what it tells the process that delivers."""

    def __init__(self, spooling: Spooling) -> None:
        self.orders: list[int] = []
        self.stopped: list[int] = []
        self.one = in_loop(
            lambda: Forwarder(spooling.one, self._on_disk, lambda replies: None, OwnCredential(), 1, spooling.clock)
        )
        self.one._carrier = cast(Any, SimpleNamespace(is_running=True, write=self._write))

    async def _on_disk(self, work: Callable[[], Any]) -> Any:
        return work()

    def _write(self, message: dict[str, Any]) -> None:
        if "stop" in message:
            self.stopped.append(message["stop"])
        else:
            self.orders.append(message["number"])

    def sends(self, number: int) -> None:
        asyncio.run(self.one._noted(Note(number, [], [], sends=True)))

    def begin(self) -> None:
        asyncio.run(self.one._begin())

    def waits(self, number: int) -> None:
        asyncio.run(self.one._noted(Note(number, [], [], waits=True)))


def test_what_waits_at_the_next_hop_takes_no_place(spooling: Spooling) -> None:
    delivering = Delivering(spooling)
    for seq in (1, 2):
        spooling.take(seq)
    delivering.begin()
    assert len(delivering.orders) == 1
    delivering.begin()
    assert len(delivering.orders) == 1, "there is one place"
    delivering.waits(delivering.orders[0])
    delivering.begin()
    assert len(delivering.orders) == 2
    assert not delivering.stopped


def test_of_many_that_wait_the_oldest_is_asked_about_again_later(spooling: Spooling) -> None:
    delivering = Delivering(spooling)
    for seq in range(1, _MOST_WAITING + 3):
        spooling.take(seq)
        delivering.begin()
        delivering.waits(delivering.orders[-1])
    first, second = delivering.orders[:2]
    assert delivering.stopped == [first, second]
    asyncio.run(delivering.one._answered(Answer(first, failure="stopped", code=ErrorClass.NOT_ATTEMPTED.code)))
    count = len(delivering.orders)
    delivering.begin()
    assert len(delivering.orders) == count, "not at once"
    spooling.clock.now_s += 5.0
    delivering.begin()
    assert len(delivering.orders) == count + 1


def test_what_waited_and_sends_again_takes_a_place(spooling: Spooling) -> None:
    delivering = Delivering(spooling)
    spooling.take(1)
    delivering.begin()
    (first,) = delivering.orders
    delivering.waits(first)
    delivering.sends(first)
    spooling.take(2)
    delivering.begin()
    assert delivering.orders == [first], "it has the only place again"
    delivering.waits(first)
    delivering.begin()
    assert len(delivering.orders) == 2
    assert not delivering.stopped
    delivering.sends(first)
    assert delivering.stopped == [first], "the other one has the place"
    asyncio.run(delivering.one._answered(Answer(first, failure="stopped", code=ErrorClass.NOT_ATTEMPTED.code)))
    delivering.begin()
    assert len(delivering.orders) == 2
    delivering.waits(delivering.orders[1])
    delivering.begin()
    assert len(delivering.orders) == 3, "it has its turn again"


def test_what_its_terminal_has_ended_early_is_settled_as_soon_as_it_is_in_custody(spooling: Spooling) -> None:
    """Another custodian has delivered it while it came in here: its sender waits for that word."""
    delivering = Delivering(spooling)
    tid = coming(spooling, 1)
    delivering.one.opened(tid)
    delivering.begin()
    (early,) = delivering.orders
    asyncio.run(delivering.one._answered(Answer(early, "done")))
    delivering.one.staged(tid, [(0, "64" * 16)], False)
    delivering.begin()
    assert delivering.orders == [early], "what comes in is not sent on again"
    spooling.one.staged(tid, [(1, b"d" * 16)])
    manifest = hashlib.sha256(b"d" * 32).hexdigest()
    whole = Operation(ORIGIN, 1, "publish", "f1", EXPIRES, size_bytes=2, blocks=2, manifest=manifest, terminal=TERMINAL)
    assert spooling.one.operate(whole, PEER, "blake2b-128")
    delivering.begin()
    assert len(delivering.orders) == 2, "at once"


def test_a_file_that_cannot_be_sent_early_holds_up_no_other(
    spooling: Spooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivering, begin = Delivering(spooling), spooling.one.begin
    broken, other = coming(spooling, 1), coming(spooling, 2)
    tried = list[int]()

    def fails(tid: int) -> Any:
        tried.append(tid)
        if tid == broken:
            raise sqlite3.DatabaseError("database disk image is malformed")
        return begin(tid)

    for tid in (broken, other):
        delivering.one.opened(tid)
    with monkeypatch.context() as patch:
        patch.setattr(spooling.one, "begin", fails)
        delivering.begin()
        assert len(delivering.orders) == 1
        assert tried == [broken, other]
        delivering.one._orders.clear()
        delivering.begin()
        assert tried == [broken, other], "not again at once"
    spooling.clock.now_s += 1.1
    delivering.begin()
    assert len(delivering.orders) == 2


def test_a_block_that_leaves_behind_the_publish_says_that_it_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers, said = list[Any](), list[bool]()

    class Timer:
        def __init__(self, after_s: float, call: Callable[[], None]) -> None:
            self.call, self.is_on, self.daemon = call, False, False
            timers.append(self)

        def start(self) -> None:
            self.is_on = True

        def cancel(self) -> None:
            self.is_on = False

    def pass_time() -> None:
        for timer in [timer for timer in timers if timer.is_on]:
            timer.is_on = False
            timer.call()

    spool = tmp_path / "spool"
    spool.write_bytes(b"data")
    order = Operation("0a" * 16, 5, "publish", "f", 2**40, size_bytes=4, blocks=1)
    digest = digests()["blake2b-128"]
    growth = Growth({0: digest(b"data")}, order, waits=said.append, said="")
    upload = Spooled(Gateway("host", 1, "key", b"secret"), spool, order, growth, "blake2b-128", None, 1)
    channel = cast(
        Any, SimpleNamespace(digest_name="blake2b-128", digest_of=lambda block, data: digest(data), store="")
    )  # fmt: skip
    monkeypatch.setattr(spooled.threading, "Timer", Timer)
    file = os.open(spool, os.O_RDONLY)
    try:
        upload.take(0, file, memoryview(bytearray()), channel)
        pass_time()
        assert not said
        upload.publish(7, channel)
        upload.take(0, file, memoryview(bytearray()), channel)
        assert [timer.is_on for timer in timers] == [False, True], "it waits from now on"
        pass_time()
        upload.take(0, file, memoryview(bytearray()), channel)
        assert said == [True, False]
        pass_time()
        assert said == [True, False, True]
    finally:
        upload.settle()
        os.close(file)


def test_what_is_not_wanted_while_it_waits_says_nothing_of_its_next_hop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all deliveries to that hop would pause, or it would be asked again and again until it expires."""
    order = Operation("0a" * 16, 5, "delete", "f", 2**40)
    growth = Growth({}, order, said="")

    def lost(*facts: object) -> NoReturn:
        growth.stop()
        raise TransferFailure(ErrorClass.CONNECTION_LOST, "ended from another thread")

    control = SimpleNamespace(store="", send=lost, abort=lambda: None)
    monkeypatch.setattr(carrier, "Channel", lambda *place: nullcontext(control))
    answer = carrier.deliver(carrier.Order(1, "t:1", "key", "00", json.dumps(asdict(order))), growth)
    assert ErrorClass.from_code(answer.code) is ErrorClass.NOT_ATTEMPTED


def test_what_the_next_custodian_has_is_not_waited_for_when_nobody_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*facts: object) -> NoReturn:
        raise TransferFailure(ErrorClass.CONNECTION_LOST, "ended from another thread")

    spool = tmp_path / "spool"
    spool.write_bytes(b"data")
    order = Operation("0a" * 16, 5, "publish", "f", 2**40, size_bytes=4, blocks=1, terminal="t:1")
    growth = Growth({}, order)
    growth.stop()
    monkeypatch.setattr(client, "Channel", lost)
    monkeypatch.setattr(client.time, "sleep", lambda pause_s: pytest.fail("it is asked again"))
    upload = Spooled(Gateway("host", 1, "key", b"secret"), spool, order, growth, "blake2b-128", None, 1)
    with pytest.raises(TransferFailure):
        upload._delivered(True)


def test_who_waits_is_woken_when_nobody_wants_it_any_more_whichever_comes_first() -> None:
    growth, woken = Growth({}, None), list[str]()
    growth.woken_by(lambda: woken.append("first"))
    assert not woken
    growth.stop()
    growth.woken_by(lambda: woken.append("late"))
    assert woken == ["first", "late"]
    assert growth.is_stopped
