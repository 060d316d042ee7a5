"""A router in this process: what becomes of connections when something fails, with the failure made to order."""

from __future__ import annotations

import asyncio
import base64
import errno
import itertools
import json
import os
import socket
import sqlite3
import threading
import time
import zlib
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from overlay_router import incoming, line, relay
from overlay_router.copying import copyist
from overlay_router.copying.copier import Copier, _Try
from overlay_router.copying.warrants import refusal
from overlay_router.custodians import carrier, pack_carrier
from overlay_router.custodians.forwarder import Forwarding
from overlay_router.data.jobs import Report
from overlay_router.delivery.call import Kit
from overlay_router.ends import Ends
from overlay_router.line import Line
from overlay_router.local.replies import Attached, Reply
from overlay_router.local.store import Transfer
from overlay_router.pauses import Pause
from overlay_router.peers.circuits import Neighbours
from overlay_router.peers.cover import Cover
from overlay_router.peers.greeting import Peer
from overlay_router.peers.keys import Credential, Key, Keys, OwnCredential, Signed
from overlay_router.peers.rights import Rights
from overlay_router.relay import Router
from overlay_router.waiting import Packs
from stageout.core.errors import TransferFailure
from stageout.movers.mover import Equipment
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.tcp import notice_death
from stageout.overlay.wire import frames, messages, packs, warrant
from stageout.overlay.wire.fields import MAX_NUMBER
from stageout.overlay.wire.frames import Decoder
from stageout.overlay.wire.greeting import WrongKey, accept, offer
from stageout.overlay.wire.messages import (
    Answer,
    Attach,
    List,
    Low,
    Message,
    Open,
    Operation,
    Pack,
    Result,
    Status,
    Welcome,
)
from stageout.overlay.wire.warrant import Warrant
from stageout.wire.deposits import MOST_EXPIRES_AFTER_S
from tests.in_loop import in_loop
from tests.polling import until

SECRET = b"0123456789abcdef0123456789abcdef"
ORIGIN = "0a" * 16
ASK = Open(ORIGIN, 1, "f", 1, 1, 1)


class _Links:
    """Of a router that knows no others."""

    address = ""

    async def run(self) -> None:
        await asyncio.Event().wait()


class _End:
    """A destination that answers, or fails, as a test wants it. :param file: the last descriptor that it gave."""

    epoch = "e"

    def __init__(self) -> None:
        self.file, self.asked, self.to_follow, self.looked = -1, 0, 1, 0

    def status(self, ask: Status, peer: str) -> list[Any]:
        self.asked += 1
        raise sqlite3.OperationalError("disk I/O error")

    def attach(self, tid: int) -> Attached:
        self.file = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
        return Attached(Transfer(tid, f"another/{ORIGIN}", ASK), self.file)

    def expire(self) -> list[Any]:
        self.looked += 1
        return []

    def follow(self) -> bool:
        self.to_follow -= 1
        return self.to_follow > 0


@pytest.fixture
def end() -> _End:
    return _End()


def serving(end: _End, work: Callable[[Router, Gateway], Awaitable[None]]) -> None:
    async def run() -> None:
        ends = Ends(cast(Any, end))
        router = Router(
            "node", ends, Keys({"site": Key("site", SECRET, "")}), 1, Neighbours(), cast(Any, _Links()), Rights(), 4,
            1e6, Cover(),
        )  # fmt: skip
        with socket.create_server(("127.0.0.1", 0)) as listening:
            task = asyncio.ensure_future(router.serve(listening))
            port = listening.getsockname()[1]
            await asyncio.wait_for(work(router, Gateway("127.0.0.1", port, "site", SECRET, timeout_s=30)), 60)
            task.cancel()
            await asyncio.wait([task])

    asyncio.run(run())


def ask(gateway: Gateway, *messages: Message) -> object:
    """The first answer, or the failure."""
    with Channel(gateway) as channel:
        try:
            for message in messages:
                channel.send(message)
            return channel.receive()
        except TransferFailure as failure:
            return failure


def test_records_follow_their_files_as_soon_as_the_router_serves(end: _End) -> None:
    async def work(router: Router, gateway: Gateway) -> None:
        await until(lambda: end.to_follow == 0, "the last step")

    end.to_follow = 3
    serving(end, work)
    assert end.to_follow == 0, "one step more than there are"


def test_records_that_never_end_to_follow_do_not_keep_what_is_over(end: _End, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody renames a directory of many files all the time: nothing expired, and no lot was given back."""

    async def work(router: Router, gateway: Gateway) -> None:
        await until(lambda: end.looked >= 3, "what is over is looked for again")

    monkeypatch.setattr(relay, "_EXPIRE_INTERVAL_S", 0.01)
    end.to_follow = 1 << 62
    serving(end, work)


def test_a_connection_that_cannot_be_answered_leaves_nothing_behind(end: _End) -> None:
    """However much its peer has asked already."""

    async def work(router: Router, gateway: Gateway) -> None:
        assert isinstance(await asyncio.to_thread(ask, gateway, *[Status(ORIGIN, 1)] * 100), TransferFailure)
        await until(lambda: not router.limits._known)
        assert end.asked == 1
        assert not router._lines

    serving(end, work)


def test_who_asks_for_a_damaged_file_again_and_again_does_not_fill_the_log(
    end: _End, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("stageout.core.log.error", lambda name, **facts: said.append(f"{name} {facts['path']}"))

    async def work(router: Router, gateway: Gateway) -> None:
        for path in ("f", "g"):
            for _ in range(1000):
                router._on_report(Report(0, damaged=path, block=3))
        assert set(said) == {"published-file-damaged f", "published-file-damaged g"}
        assert len(said) < 100

    serving(end, work)


def test_who_sends_on_knows_of_a_block_before_whatever_comes_behind_its_record(end: _End) -> None:
    """A file may be in custody right after it: then nobody may believe that a block of it is missing."""
    told: list[int] = []

    async def work(router: Router, gateway: Gateway) -> None:
        cast(Any, end).staged, cast(Any, end).is_whole = lambda tid, blocks: [], lambda tid: False
        router._outgoing.staged = lambda tid, blocks, is_whole: told.append(tid)  # type: ignore[method-assign, assignment]
        recorded = asyncio.ensure_future(router._recording.recorded(Report(1, ((0, "00"),))))
        await asyncio.sleep(0)
        await router._on_disk(lambda: None)
        assert told == [1]
        await recorded

    serving(end, work)


def test_who_does_not_take_his_answers_is_let_go(end: _End, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overlay_router.questions._TAKEN_WITHIN_S", 0.1)
    end.entries = lambda ask: itertools.repeat(Answer(("n" * 4000,) * 16, more=True))  # type: ignore[attr-defined]

    async def work(router: Router, gateway: Gateway) -> None:
        def listed() -> Channel:
            channel = Channel(gateway)
            channel.send(List(""))
            return channel

        with await asyncio.to_thread(listed):
            await until(lambda: bool(router.limits._known))
            await until(lambda: not router.limits._known)

    serving(end, work)


def test_hosts_that_vanish_are_noticed(end: _End, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(router: Router, gateway: Gateway) -> None:
        noticing = []
        monkeypatch.setattr("overlay_router.relay.notice_death", lambda sock: noticing.append(sock.fileno()))
        for _ in range(2):  # the one that is being accepted, and the next
            await asyncio.to_thread(ask, gateway, Attach(7))
        assert noticing

    serving(end, work)
    with socket.socket() as sock:
        notice_death(sock)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


def test_data_for_the_transfer_of_another_leave_no_descriptor_open(end: _End) -> None:
    async def work(router: Router, gateway: Gateway) -> None:
        assert isinstance(await asyncio.to_thread(ask, gateway, Attach(7)), TransferFailure)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(end.file)

    serving(end, work)


def test_without_a_free_descriptor_a_router_waits_for_one(end: _End) -> None:
    async def work(router: Router, gateway: Gateway) -> None:
        loop = asyncio.get_running_loop()
        accept, failures = loop.sock_accept, [OSError(errno.EMFILE, "Too many open files")]

        async def full(sock: socket.socket) -> Any:
            if failures:
                raise failures.pop()
            return await accept(sock)

        loop.sock_accept = full  # type: ignore[method-assign]
        for _ in range(2):  # the one that is being accepted, and the next
            await asyncio.to_thread(ask, gateway, Attach(7))
        assert not failures

    serving(end, work)


def test_a_terminal_may_be_away_for_weeks() -> None:
    pause, asked_s = Pause(), []
    for _ in range(5000):
        pause.more(0.0, 0.0)
        asked_s.append(pause.until_s)
    assert asked_s[:3] == [1.0, 2.0, 4.0]
    assert asked_s == sorted(asked_s)
    assert asked_s[-1] == 120.0


def test_proofs_and_signatures_may_be_any_text() -> None:
    """They come from whoever connects: what is wrong is refused, and is no fault of this program."""
    written = warrant.write(Warrant("site", "hop", "e", ORIGIN, 1, "f", 1, 1, 0o644), SECRET).partition(".")[0]
    told = replace(ASK, warrant=f"{written}.\u00fc")
    assert "not signed" in refusal(
        told, Key("hop", SECRET, "-"), Keys({"site": Key("site", SECRET, "")}), Rights(), "e", 0
    )
    hello = offer("me", "site")
    with pytest.raises(WrongKey):
        accept(hello, Welcome("node", "0", "crc32", hello.digests[0], 0, "\u00fc"), SECRET)

    async def work(router: Router, gateway: Gateway) -> None:
        assert "is not the one known here" in str(await asyncio.to_thread(proving, gateway, "\u00fc"))

    serving(_End(), work)


def proving(gateway: Gateway, proof: str) -> object:
    """The router's answer to a proof."""
    with socket.create_connection((gateway.host, gateway.port), 30) as sock, sock.makefile("rb") as stream:
        sock.sendall(messages.encode(offer("me", "site"), zlib.crc32))
        decoder = Decoder(zlib.crc32)
        found: list[object] = []
        while len(found) < 2:
            decoder.feed(stream.read1())
            for frame in decoder.frames():
                found.append(messages.decode(frame))
                if isinstance(found[-1], Welcome):
                    sums = frames.checksums()[found[-1].checksum]
                    decoder = Decoder(sums)
                    sock.sendall(messages.encode(messages.Prove(proof), sums))
        return found[-1]


def test_a_copy_that_fails_in_an_unknown_way_waits_like_any_other() -> None:
    async def run() -> None:
        async def on_disk(work: Callable[[], Any]) -> Any:
            return work()

        async def no_ways(terminal: str) -> Any:
            raise KeyError(terminal)

        copies: Any = SimpleNamespace(cancelled=frozenset(), has=lambda one: True)
        copier = Copier(copies, cast(Any, None), on_disk, lambda replies: None, no_ways, OwnCredential(), 1)
        one = _Try()
        commanded: Any = SimpleNamespace(key=(ORIGIN, 1), reached=True, copy=SimpleNamespace(terminal="t:1"))
        copies.cancelled = {commanded.key}
        await copier._try(commanded, one)
        assert one.until_s > asyncio.get_running_loop().time()

    asyncio.run(run())


def test_packs_that_cannot_be_executed_do_not_stop_the_others(end: _End) -> None:
    batches: list[object] = []

    def pack(batch: object) -> list[Any]:
        batches.append(batch)
        raise ValueError("a fault of ours")

    end.pack = pack  # type: ignore[attr-defined]

    async def work(router: Router, gateway: Gateway) -> None:
        for number in (1, 2):
            line = cast(Any, SimpleNamespace(end=lambda problem: None))
            await router._packs.put(line, cast(Any, SimpleNamespace(pack=SimpleNamespace(terminal="", paths=("f",)))))
            await until(lambda wanted=number: len(batches) == wanted)  # type: ignore[misc]

    serving(end, work)


class _Receiving(incoming.Receiving):
    """:ivar begun: large frames that were let in, of all."""

    begun = 0

    async def begin(self, size_bytes: int) -> object:
        turn = await super().begin(size_bytes)
        self.begun += 1
        return turn


@pytest.mark.parametrize("slow_s", [1000.0, 0.05])
def test_large_frames_of_many_connections_take_their_turns(
    end: _End, monkeypatch: pytest.MonkeyPatch, slow_s: float
) -> None:
    """Headers alone take no memory. A connection that has gone makes room, and a silent one keeps nobody waiting."""
    monkeypatch.setattr(incoming, "_SLOW_S", slow_s)

    def begun(gateway: Gateway) -> Channel:
        channel = Channel(gateway)
        channel.send(Low(ORIGIN, 0))
        channel._socket.sendall(frames.pack_header(frames.Type.PACK, 2_000_000, 0, channel._checksum) + b"x")
        return channel

    async def work(router: Router, gateway: Gateway) -> None:
        receiving = router._receiving = _Receiving(4_000_000)
        router.limits.most = 10
        channels = [await asyncio.to_thread(begun, gateway) for _ in range(5)]
        if slow_s < 1:
            await until(lambda: receiving.begun == 5)
        else:
            await until(lambda: receiving._next.locked())
            assert (receiving.begun, sum(receiving._sizes_bytes.values())) == (2, 4_000_000)
            for wanted in (3, 4, 5):
                channels.pop(0).close()
                await until(lambda wanted=wanted: receiving.begun == wanted)  # type: ignore[misc]
        for channel in channels:
            channel.close()
        await until(lambda: not receiving._sizes_bytes)

    end.low = lambda ask: None  # type: ignore[attr-defined]
    serving(end, work)


def test_a_connection_has_one_pack_beside_those_that_wait_for_the_disk(end: _End) -> None:
    happened = list[str]()

    def pack(batch: object) -> list[Any]:
        time.sleep(0.1)  # the next one could come in that time
        happened.append("executed")
        return []

    def say(gateway: Gateway) -> None:
        with Channel(gateway) as channel:
            channel.send(Low(ORIGIN, 0))
            data = bytes(200_000)
            for number in range(6):
                head = Pack(ORIGIN, number + 1, int(time.time()) + 60, (f"f{number}",), (len(data),), (0,), "")
                channel.send_pack(head, [channel.digest(data)], [data])
            assert not channel.has_more(0.1)

    class Noted(incoming.Receiving):
        def end(self, turn: object) -> None:
            happened.append("begun")

    async def work(router: Router, gateway: Gateway) -> None:
        router._receiving, router._packs._most_bytes = Noted(), 1
        await asyncio.to_thread(say, gateway)
        await until(lambda: happened.count("executed") == 6)

    end.low, end.pack = lambda ask: None, pack  # type: ignore[attr-defined]
    serving(end, work)
    assert happened.pop() == "begun", "when the connection ends"
    ahead = [happened[:number].count("begun") - happened[:number].count("executed") for number in range(len(happened))]
    assert max(ahead) == 2, happened


def test_a_router_with_many_connections_asks_for_smaller_packs(end: _End, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "_GENEROUS", 2)

    async def work(router: Router, gateway: Gateway) -> None:
        def connected() -> Channel:
            channel = Channel(gateway)
            channel.send(Low(ORIGIN, 0))
            return channel

        channels, said = list[Channel](), list[int]()
        for number in (1, 2, 3):
            channels.append(await asyncio.to_thread(connected))
            said.append(channels[-1].packed_bytes)
            await until(lambda wanted=number: router._controls == wanted)  # type: ignore[misc]
        for channel in channels:
            channel.close()
        await until(lambda: not router._controls)
        assert said == [packs.MAX_TAKEN_BYTES] * 2 + [packs.MAX_PACK_BYTES]

    end.low = lambda ask: None  # type: ignore[attr-defined]
    serving(end, work)


def test_packs_of_ever_new_origins_end_their_connection(end: _End, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router remembers who hears of each."""
    monkeypatch.setattr("overlay_router.line.MOST_ORIGINS", 3)
    end.low = lambda ask: None  # type: ignore[attr-defined]
    end.pack = lambda batch: []  # type: ignore[attr-defined]

    def say(gateway: Gateway) -> None:
        with Channel(gateway) as channel:
            channel.send(Low("00" * 16, 0))
            for number in range(1, 4):
                channel.send_pack(Pack(f"{number:032x}", 1, 1, ("f",), (0,), (0,), ""), [channel.digest(b"")], [b""])
            assert channel.has_more(30) and not channel.is_open

    async def work(router: Router, gateway: Gateway) -> None:
        await asyncio.get_running_loop().run_in_executor(None, say, gateway)
        await until(lambda: not router._lines)

    serving(end, work)


@pytest.mark.parametrize("terminal", ["t:1", ""])
def test_a_cancel_is_remembered_where_its_pack_goes(terminal: str) -> None:
    """A custodian knows of it with the pack, so it waits for that; a tree hears it at once, before the pack."""
    pack = SimpleNamespace(origin=ORIGIN, seq=1, paths=("a", "b"), terminal=terminal)
    ends = Ends(cast(Any, None))

    async def work() -> None:
        packs, may_end = Packs(), asyncio.Event()

        async def execute(batch: object) -> None:
            await may_end.wait()

        running = asyncio.ensure_future(packs.run(execute, lambda batch: [batch]))
        await packs.put(cast(Any, None), cast(Any, SimpleNamespace(pack=pack)))
        for cancel, waits in ((messages.Cancel(ORIGIN, 2), bool(terminal)), (messages.Cancel(ORIGIN, 3), False)):
            passed = asyncio.ensure_future(packs.passed(partial(ends.is_elsewhere, cancel)))
            for _ in range(5):
                await asyncio.sleep(0)
            assert passed.done() is not waits
        may_end.set()
        await asyncio.wait_for(packs.passed(lambda arrived: True), 30)
        running.cancel()

    asyncio.run(work())


def test_a_peer_that_does_not_take_its_answers_is_counted_until_it_is_cut_off(
    end: _End, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was counted no more, and what it had not taken stayed in memory for as long as it liked."""

    async def work(router: Router, gateway: Gateway) -> None:
        monkeypatch.setattr(line, "_CLOSES_S", 0.2)
        end.status = lambda ask, peer: []  # type: ignore[method-assign, assignment]
        with await asyncio.to_thread(Channel, gateway) as channel:
            channel.send(Status(ORIGIN, 1))
            await until(lambda: bool(router._lines))
            ((one,),) = router._lines.values()
            transport, wait_closed = one.writer.transport, one.writer.wait_closed
            when_it_waits: list[tuple[bool, bool, int]] = []

            async def watched() -> None:
                is_left = bool(transport.get_write_buffer_size())
                when_it_waits.append((bool(router._lines), is_left, router.limits._known.count("site")))
                await wait_closed()

            monkeypatch.setattr(one.writer, "wait_closed", watched)
            one.writer.write(bytes(16 << 20))
            channel._socket.shutdown(socket.SHUT_WR)
            await until(lambda: when_it_waits)
            assert when_it_waits == [(False, True, 1)]
            await until(lambda: not router.limits._known.count("site"))
            await until(lambda: transport.get_extra_info("socket").fileno() == -1)

    serving(end, work)


@pytest.mark.parametrize("closes", [False, True])
def test_who_says_no_more_hears_the_answers_to_what_he_has_asked(closes: bool, end: _End) -> None:
    """The answers that were still to come when the client ended its side were lost. Nobody waits for one that has
    gone."""
    disk = threading.Event()

    def answer(ask: Status, peer: str) -> list[Any]:
        assert disk.wait(60)
        return [Reply(peer, Result(ask.origin, ask.seq, "done"))]

    async def work(router: Router, gateway: Gateway) -> None:
        end.status = answer  # type: ignore[method-assign, assignment]
        with await asyncio.to_thread(Channel, gateway) as channel:
            for number in range(1, 6):
                channel.send(Status(ORIGIN, number))
            await until(lambda: bool(router._lines))
            ((one,),) = router._lines.values()
            channel._socket.shutdown(socket.SHUT_RDWR if closes else socket.SHUT_WR)
            await until(lambda: cast(Any, one.writer)._protocol._reading is None)
            if closes:
                one.writer.transport.abort()
                await until(lambda: not router._lines)
            disk.set()
            for number in () if closes else range(1, 6):
                assert await asyncio.to_thread(channel.receive) == Result(ORIGIN, number, "done")
            await until(lambda: not router.limits._known)

    try:
        serving(end, work)
    finally:
        disk.set()


def test_answers_that_never_come_are_not_waited_for(end: _End, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "_ANSWERED_S", 0.1)

    async def work(router: Router, gateway: Gateway) -> None:
        monkeypatch.setattr(router, "_answer", lambda line, message: asyncio.Event().wait())
        with await asyncio.to_thread(Channel, gateway) as channel:
            channel.send(Status(ORIGIN, 1))
            channel._socket.shutdown(socket.SHUT_WR)
            await until(lambda: not router.limits._known)
            assert end.asked == 0

    serving(end, work)


def test_secrets_are_not_shown_with_what_has_them() -> None:
    text, own = SECRET.decode(), OwnCredential(Credential(("me", SECRET)))
    shown = [
        Key("k", SECRET, ""),
        Gateway("h", 1, "k", SECRET),
        Neighbours(own=own),
        Forwarding(own, 1, Path("r")),
        carrier.Order(1, "t:1", "k", text, "{}"),
        pack_carrier.Order(1, "t:1", "k", text, "{}", "f", "d"),
        copyist.Order(cast(Any, None), "f", "k", text),
        Equipment({"x.use": SECRET}),
        Kit(cast(Any, None), Path("w"), 1.0, {"x.use": SECRET}, None),
    ]
    assert [one for one in shown if text in repr(one)] == []


def test_a_low_that_waits_for_the_disk_holds_up_nothing_and_keeps_its_turn() -> None:
    """Packs that came behind one were not even read while a batch was executed."""
    disk, batch = ThreadPoolExecutor(1), threading.Event()
    closed, done = list[str](), list[str]()

    async def run() -> None:
        line = Line(cast(Any, SimpleNamespace(close=lambda: closed.append("line"))), cast(Any, None))
        disk.submit(batch.wait)
        await asyncio.wait_for(line.lower(disk, lambda: done.append("low"), lambda: done.append("settled")), 60)
        disk.submit(done.append, "behind it")
        assert (done, closed) == ([], [])
        batch.set()
        await line.lower(disk, lambda: 1 // 0, lambda: done.append("never"))
        assert line.lowering is not None
        await asyncio.wait([line.lowering])

    try:
        asyncio.run(run())
    finally:
        batch.set()
        disk.shutdown()
    assert ([one for one in done if one != "settled"], closed) == (["low", "behind it"], ["line"])
    assert done.count("settled") == 1


def test_nothing_is_taken_that_would_stay_for_ever(end: _End) -> None:
    """A connection that its sender never ends, ends by its time."""
    last = int(time.time()) + MOST_EXPIRES_AFTER_S
    peer = Peer("", Key("site", SECRET, ""), "crc32", "blake2b-128")

    async def work(router: Router, gateway: Gateway) -> None:
        for message in (
            ASK,
            Operation(ORIGIN, 1, "mkdir", "d", 1),
            Pack(ORIGIN, 1, 1, ("a",), (1,), (0,), ""),
            replace(ASK, terminal="t:1"),
            messages.Copy(ORIGIN, 1, "f", 1, "t:1", "f", 1, 0o644, 1, "w"),
        ):
            far = replace(message, expires=last + 3600)
            assert "more than 7 days" in router._refusal(peer, far)
            assert not router._refusal(peer, replace(message, expires=last))
        told = await asyncio.to_thread(ask, gateway, replace(ASK, block_bytes=messages.BLOCK_BYTES, expires=MAX_NUMBER))
        assert isinstance(told, Result)
        assert (told.outcome, "more than 7 days" in told.reason) == ("failed", True)

    serving(end, work)


def test_a_router_with_a_token_is_called_by_its_identity_in_warrants() -> None:
    """The other router knows no other name for it once it has proved the token."""
    said = [base64.urlsafe_b64encode(json.dumps(one).encode()).decode().rstrip("=") for one in (
        {"alg": "HS256", "kid": "overlay"}, {"sub": "r1@pool.example.org"},
    )]  # fmt: skip
    key = Signed("*", "overlay", SECRET, "-", True).named("r1@pool.example.org")
    own = OwnCredential(Credential((f"token:{'.'.join(said)}", SECRET)))
    copier = in_loop(lambda: Copier(*[cast(Any, None)] * 5, own, 1))
    assert copier.bearer == key.name == "token:overlay:r1@pool.example.org"


def test_late_blocks_whose_record_is_broken_off_are_recorded_before_the_file_gets_its_name(end: _End) -> None:
    """The connection that waits for the record is ended, so that its sender hears of the full disk."""
    late, seen = Report(1, ((0, "00"),), late=True), list[Report]()

    async def work(router: Router, gateway: Gateway) -> None:
        recording, reports = router._recording, [[late], []]

        async def no_more(tid: int) -> list[Report]:
            return reports.pop(0)

        async def fails(report: Report) -> None:
            raise OSError(errno.ENOSPC, "full")

        async def succeeds(report: Report) -> None:
            seen.append(report)

        router._pool.no_more, recording.recorded = no_more, fails  # type: ignore[method-assign]
        closing = asyncio.ensure_future(recording.close(1))
        await until(lambda: not reports[0])
        closing.cancel()
        await asyncio.wait([closing])
        recording.recorded = succeeds  # type: ignore[method-assign]
        await recording.close(1)
        assert seen == [late]
        recording.check(1)

    serving(end, work)
