"""A file by several connections: whatever one of them does, the file is what it was, or there is none."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.core.threads import NoThread, started
from stageout.overlay import receiving, way_back
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.fetching import Ask
from stageout.overlay.kept import Kept
from stageout.overlay.proof import Proof
from stageout.overlay.receiving import Download, Receiving
from stageout.overlay.wire.blocks import PART_BYTES
from stageout.overlay.wire.messages import BLOCK_BYTES, Found, Get, Heartbeat, Message
from stageout.overlay.wire.route import Route
from stageout.overlay.writing import Writing

GATEWAY = Gateway("host", 1, "key", b"secret", timeout_s=2.0)
ONE, OTHER = ("one:1",), ("other:1",)
FEW = 8
Fault = Callable[["_Channel", int], None]


class _Router:
    """Has one file. :param faults: what a connection does before a block, by the order in which they were made.

    :ivar made: connections. :ivar refuses: what a connection that is made raises, by its number and route.
    """

    def __init__(self, blocks: int, faults: dict[int, Fault] | None = None) -> None:
        self.data = os.urandom(BLOCK_BYTES) * max(0, blocks - 1) + os.urandom(BLOCK_BYTES - 7) * (blocks > 0)
        self.faults = faults or {}
        self.made: list[_Channel] = []
        self.refuses: Callable[[int, Route], TransferFailure | None] = lambda number, route: None
        self.parts: Callable[[int], bool] = lambda number: False
        self.generation = 7
        self.lock = threading.Lock()

    def connect(self, route: Route) -> _Channel:
        with self.lock:
            number = len(self.made)
            failure = self.refuses(number, route)
            self.made.append(_Channel(self, number, route))
        if failure is not None:
            raise failure
        return self.made[number]


class _Channel:
    """A connection, as :class:`stageout.overlay.channel.Channel` behaves."""

    packs, flow, digest_name, gateway, is_open = True, "", "", GATEWAY, True

    def __init__(self, router: _Router, number: int, route: Route) -> None:
        self.router, self.number, self.route = router, number, route
        self.parts = router.parts(number)
        self.wanted = list[Ask]()
        self.received_bytes = 0
        self.ended = threading.Event()
        self.closed = False
        self.said: deque[Message | int | Ask] = deque()
        self.asked: list[tuple[int, int]] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.moved = 0

    @property
    def arrived_bytes(self) -> int:
        return self.received_bytes

    def send(self, message: Get) -> None:
        self._alive()
        self.asked.append((message.first_block, message.blocks))
        size_bytes, count = len(self.router.data), -(-len(self.router.data) // BLOCK_BYTES)
        self.said.append(Found(size_bytes, BLOCK_BYTES, self.router.generation, 0o644))
        if message.generation not in (-1, self.router.generation):
            self.said[-1] = Heartbeat(41)
        if message.end:
            self.said.append(Ask(message.first_block, 1, message.start, message.end))
            self.wanted.append(Ask(message.first_block, 1, message.start, message.end))
            return
        self.said.extend(range(message.first_block, min(count, message.first_block + message.blocks)))

    def receive(self) -> Message:
        self._alive()
        told = self.said.popleft()
        if isinstance(told, Heartbeat):
            raise TransferFailure(ErrorClass.CONFLICT, "replaced")
        assert not isinstance(told, (int, Ask))
        return told

    def receive_part(self, view: memoryview) -> tuple[int, int]:
        self._alive()
        ask = self.said.popleft()
        assert isinstance(ask, Ask)
        fault = self.router.faults.get(self.number)
        if fault is not None:
            fault(self, ask.first)
        if self.said and isinstance(self.said[0], str):
            return int(cast(Any, self.said.popleft())), ask.stop - ask.start
        first = ask.first * BLOCK_BYTES
        data = self.router.data[first + ask.start : first + ask.stop]
        view[: len(data)] = data
        self.received_bytes += len(data)
        self.moved += 1
        self._alive()
        return first + ask.start, len(data)

    def digest(self, data: memoryview) -> bytes:
        return len(data).to_bytes(16, "big")

    def receive_block(self, view: memoryview, proof: object = None) -> tuple[int, int]:
        self._alive()
        block = self.said.popleft()
        assert isinstance(block, int)
        fault = self.router.faults.get(self.number)
        if fault is not None:
            fault(self, block)
        if isinstance(self.said and self.said[0], str):
            block = int(cast(Any, self.said.popleft()))
        data = self.router.data[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        view[: len(data)] = data
        self.received_bytes += len(data)
        self.moved += 1
        self._alive()
        return block, len(data)

    def has_more(self, within_s: float) -> bool:
        return self.ended.is_set()

    def abort(self) -> None:
        self.ended.set()
        self.go_on.set()

    def close(self) -> None:
        self.ended.set()
        self.closed = True

    def travel(self, lane: object) -> None:
        """Nothing is sent."""

    def failure(self, kind: ErrorClass, message: str) -> TransferFailure:
        return TransferFailure(kind, message, "host:1")

    def _alive(self) -> None:
        if self.ended.is_set():
            raise TransferFailure(ErrorClass.CONNECTION_LOST, "the router closed the connection")


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    mine = Kept(idle_s=1000)
    monkeypatch.setattr(way_back, "kept", lambda: mine)
    yield mine
    mine.close()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here takes long: other connections are made at once, and pauses are short."""
    monkeypatch.setattr(way_back, "LONG_S", -1.0)
    monkeypatch.setattr(way_back, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(receiving, "_TICK_S", 0.01)


class _Fetched:
    """One fetch. :ivar written: what was written, by offset. :ivar told: bytes that were said to be here."""

    def __init__(
        self,
        router: _Router,
        place: Path,
        monkeypatch: pytest.MonkeyPatch,
        routes: tuple[Route, ...],
        connections: int,
        proof: Proof | None = None,
    ) -> None:
        self.router, self.told = router, list[int]()
        self.written, write = list[int](), Writing.write
        monkeypatch.setattr(Writing, "write", lambda to, data, at: (self.written.append(at), write(to, data, at)))
        monkeypatch.setattr(Download, "connect", lambda download, route: router.connect(route))
        download = Download(GATEWAY, "f", routes, connections, connections, proof=proof)
        self.path = place / "file"
        found = Found(len(router.data), BLOCK_BYTES, router.generation, 0o644)
        with self.path.open("w+b") as file:
            first = router.connect(routes[0])
            first.send(Get("f", 0, FEW))
            first.said.popleft()
            self.receiving = Receiving(download, found, file.fileno(), self.told.append)
            self.receiving.run(cast(Channel, first), Ask(0, FEW), 0.0, 0.0)

    def is_right(self) -> bool:
        """Whether the file is what it was, and each block of it was written once."""
        blocks = range(0, len(self.router.data), BLOCK_BYTES)
        return self.path.read_bytes() == self.router.data and sorted(self.written) == list(blocks)


@pytest.fixture
def fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: Kept) -> Callable[..., _Fetched]:
    def run(
        router: _Router, routes: tuple[Route, ...] = (ONE,), connections: int = 4, proof: Proof | None = None
    ) -> _Fetched:
        return _Fetched(router, tmp_path, monkeypatch, routes, connections, proof)

    return run


def _dies_at(blocks: int) -> Fault:
    def die(channel: _Channel, block: int) -> None:
        if channel.moved >= blocks:
            channel.ended.set()

    return die


def _waits_for(others: int, after: int = 0) -> Fault:
    """Brings nothing until so many blocks came by others: so these take part, however busy the machine is.

    :param after: blocks, that it brings before.
    """

    def wait(channel: _Channel, block: int) -> None:
        if channel.moved < after:
            return
        for _ in range(1000):
            if sum(one.moved for one in channel.router.made if one is not channel) >= others:
                return
            if channel.ended.wait(0.01):
                return

    return wait


def _says(block: int) -> Fault:
    def say(channel: _Channel, due: int) -> None:
        if channel.moved == 3:
            channel.said.appendleft(cast(Any, str(block)))

    return say


def test_all_connections_bring_a_part_and_are_left_to_the_next_file(fetch: Callable[..., _Fetched], kept: Kept) -> None:
    router = _Router(24, {0: _waits_for(3)})
    done = fetch(router)
    assert done.is_right()
    assert done.told[-1] == len(router.data)
    assert done.told == sorted(done.told)
    assert sum(bool(one.moved) for one in router.made) > 1
    assert len(kept) + sum(one.closed for one in router.made) == len(router.made), "none is forgotten"
    assert len(kept) >= 1


def test_a_connection_that_has_brought_the_last_block_is_not_ended(
    fetch: Callable[..., _Fetched], monkeypatch: pytest.MonkeyPatch, kept: Kept
) -> None:
    monkeypatch.setattr(way_back.Carrier, "measured", lambda *arguments: time.sleep(0.02))
    done = fetch(_Router(10), connections=1)
    assert not done.router.made[0].ended.is_set()
    assert len(kept) == 1


@pytest.mark.parametrize("blocks", [9, 10, 40])
@pytest.mark.parametrize("connections", [1, 2, 4])
def test_any_size_by_any_number(fetch: Callable[..., _Fetched], blocks: int, connections: int) -> None:
    done = fetch(_Router(blocks), connections=connections)
    assert done.is_right()
    assert len(done.router.made) <= connections


@pytest.mark.parametrize("number", [0, 1, 2])
def test_one_that_dies_costs_what_it_owed(fetch: Callable[..., _Fetched], number: int) -> None:
    done = fetch(_Router(24, {0: _waits_for(3), number: _dies_at(2)}))
    assert done.is_right()


def test_all_that_there_are_die(fetch: Callable[..., _Fetched]) -> None:
    assert fetch(_Router(24, {number: _dies_at(3) for number in range(8)})).is_right()


def test_connections_that_bring_nothing_end_it(fetch: Callable[..., _Fetched]) -> None:
    with pytest.raises(TransferFailure) as failure:
        fetch(_Router(24, {number: _dies_at(0) for number in range(1000)}))
    assert failure.value.kind is ErrorClass.CONNECTION_LOST


def test_a_router_with_enough_connections_is_used_with_those_that_there_are(fetch: Callable[..., _Fetched]) -> None:
    router = _Router(24)
    busy = TransferFailure(ErrorClass.SERVER_BUSY, "enough")
    router.refuses = lambda number, route: busy if number else None
    assert fetch(router).is_right()


def test_a_router_that_never_comes_back_is_waited_for_as_long_as_one_that_is_silent(
    fetch: Callable[..., _Fetched],
) -> None:
    router = _Router(24, {0: _dies_at(3)})
    gone = TransferFailure(ErrorClass.CONNECT_FAILED, "nobody is there")
    router.refuses = lambda number, route: gone if number else None
    with pytest.raises(TransferFailure, match="nobody is there") as failure:
        fetch(router, connections=1)
    assert failure.value.kind is ErrorClass.CONNECT_FAILED


def test_a_router_that_comes_back_goes_on(fetch: Callable[..., _Fetched]) -> None:
    router = _Router(24, {0: _dies_at(3)})
    gone = TransferFailure(ErrorClass.CONNECT_FAILED, "nobody is there")
    router.refuses = lambda number, route: gone if 0 < number < 5 else None
    assert fetch(router, connections=1).is_right()


def test_another_file_under_the_name_is_never_mixed_in(fetch: Callable[..., _Fetched]) -> None:
    def replaced(channel: _Channel, block: int) -> None:
        channel.router.generation = 8

    with pytest.raises(TransferFailure) as failure:
        fetch(_Router(24, {0: replaced}), connections=1)
    assert failure.value.kind is ErrorClass.CONFLICT


@pytest.mark.parametrize("block", [0, 1, 23])
def test_a_block_that_nobody_asked_for_is_not_taken(fetch: Callable[..., _Fetched], block: int) -> None:
    with pytest.raises(TransferFailure, match=f"block {block} of .* where 3 was due") as failure:
        fetch(_Router(24, {0: _says(block)}), connections=1)
    assert failure.value.kind is ErrorClass.CONTENT_MISMATCH


def test_what_is_damaged_there_is_known_before_all_else_was_fetched(fetch: Callable[..., _Fetched]) -> None:
    """A block that did not fit its checksum was asked for last: of a large file that was hours later."""

    def rots(channel: _Channel, block: int) -> None:
        if block == 5:
            kind = ErrorClass.CONTENT_MISMATCH if channel.number else ErrorClass.CONNECTION_LOST
            raise TransferFailure(kind, "block 5 is not what was published")

    router = _Router(24, dict.fromkeys(range(9), rots))
    with pytest.raises(TransferFailure, match="block 5 is not") as failure:
        fetch(router, connections=1)
    assert failure.value.kind is ErrorClass.CONTENT_MISMATCH
    assert sum(one.moved for one in router.made) == 5


@pytest.mark.parametrize("routes", [(ONE,), (ONE, OTHER)])
def test_what_is_damaged_by_every_route_is_not_fetched_to_its_end(routes: tuple[Route, ...]) -> None:
    one = Receiving(
        Download(GATEWAY, "f", routes, 4, 4), Found(1 << 40, BLOCK_BYTES, 7, 0), -1, lambda size_bytes: None
    )
    failure = TransferFailure(ErrorClass.CONTENT_MISMATCH, "block 5 is not what was published")
    for way in one.ways:
        one.lost(way, None, failure, False)
    assert not one.over
    one.lost(one.ways[0], None, failure, False)
    assert one.over


def test_of_two_routes_one_that_says_what_nobody_asked_for_is_left_alone(fetch: Callable[..., _Fetched]) -> None:
    assert fetch(_Router(24, {0: _says(1)}), (ONE, OTHER), 1).is_right()


def test_two_routes_carry_a_part_each(fetch: Callable[..., _Fetched]) -> None:
    # a block was written when the next one comes
    done = fetch(_Router(24, {0: _waits_for(3), 1: _waits_for(2, after=3)}), (ONE, OTHER), 1)
    assert done.is_right()
    shares = {share.route: share.sent_bytes for share in done.receiving.shares()}
    assert all(shares.values())
    assert sum(shares.values()) == len(done.router.data)


def test_one_of_two_routes_that_cannot_be_does_no_harm(fetch: Callable[..., _Fetched]) -> None:
    router = _Router(24)
    wrong = TransferFailure(ErrorClass.CREDENTIAL_REFUSED, "who are you")
    router.refuses = lambda number, route: wrong if route == OTHER else None
    done = fetch(router, (ONE, OTHER), 2)
    assert done.is_right()
    assert sum(one.route == OTHER for one in router.made) <= 1, "it is not tried again"


def test_what_ended_a_route_for_good_is_said_though_its_other_connections_bring_more() -> None:
    done = Receiving(Download(GATEWAY, "f"), Found(9, BLOCK_BYTES, 7, 0o644), -1, lambda received_bytes: None)
    (way,) = done.ways
    for kind, said in ((ErrorClass.STALLED, ""), (ErrorClass.CREDENTIAL_REFUSED, "who are you")):
        done.lost(way, None, TransferFailure(kind, "who are you"), was_kept=False)
        way.brought(1)
        assert way.share().problem == said


def test_what_ended_a_route_for_good_is_said_though_its_other_connections_are_lost_later() -> None:
    """Those bring damaged blocks, too, which nobody knows before they are asked for by themselves."""
    done = Receiving(Download(GATEWAY, "f"), Found(9, BLOCK_BYTES, 7, 0o644), -1, lambda received_bytes: None)
    (way,) = done.ways
    for kind in (ErrorClass.CONTENT_MISMATCH, ErrorClass.CONNECTION_LOST):
        done.lost(way, None, TransferFailure(kind, kind.name), was_kept=False)
    assert way.share().problem.endswith("CONTENT_MISMATCH")
    done._tick()
    assert isinstance(done._failure, TransferFailure)
    assert done._failure.kind is ErrorClass.CONTENT_MISMATCH


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_a_process_that_may_have_no_more_threads_goes_on_with_those_that_it_has(
    fetch: Callable[..., _Fetched], monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    left, router = [None] * threads, _Router(24)

    def begin(*arguments: Any) -> threading.Thread:
        if not left:
            raise NoThread(errno.EAGAIN, "as many as it may")
        left.pop()
        return started(*arguments)

    monkeypatch.setattr(way_back, "started", begin)
    if threads:
        assert fetch(router).is_right()
        assert len(router.made) == threads
    else:
        with pytest.raises(NoThread):
            fetch(router)
        assert router.made[0].closed


def test_what_a_silent_route_owes_comes_by_the_other_one(fetch: Callable[..., _Fetched]) -> None:
    def silent(channel: _Channel, block: int) -> None:
        if channel.moved >= 2:
            channel.ended.wait(60)

    done = fetch(_Router(24, {0: silent}), (ONE, OTHER), 1)
    assert done.is_right()
    assert done.router.made[0].ended.is_set()


def test_a_silent_one_of_several_connections_holds_nobody_up(fetch: Callable[..., _Fetched]) -> None:
    def silent(channel: _Channel, block: int) -> None:
        if channel.moved >= 2:
            channel.ended.wait(60)

    assert fetch(_Router(24, {0: silent}), connections=2).is_right()


def test_whoever_wants_no_more_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: Kept) -> None:
    router = _Router(24)

    def enough(received_bytes: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Download, "connect", lambda download, route: router.connect(route))
    with (tmp_path / "file").open("w+b") as file, pytest.raises(KeyboardInterrupt):
        first = router.connect(ONE)
        first.send(Get("f", 0, FEW))
        first.said.popleft()
        found = Found(len(router.data), BLOCK_BYTES, router.generation, 0o644)
        done = Receiving(Download(GATEWAY, "f", (ONE,), 4, 4), found, file.fileno(), enough)
        done.run(cast(Channel, first), Ask(0, FEW), 0.0, 0.0)
    assert not any(way.carriers for way in done.ways), "no thread writes any more"


def test_a_disk_that_is_full_is_said(fetch: Callable[..., _Fetched], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        fetch(_Router(24))


@pytest.fixture
def _slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connection takes two seconds for a block, as far as anybody knows."""
    pace = property(lambda carrier: BLOCK_BYTES / 2, lambda carrier, pace: None)
    monkeypatch.setattr(way_back.Carrier, "pace", pace, raising=False)


def _asked(router: _Router) -> list[Ask]:
    return [ask for one in router.made for ask in one.wanted]


@pytest.mark.usefixtures("_slow")
@pytest.mark.parametrize("blocks", [9, 12, 24])
@pytest.mark.parametrize("connections", [1, 2, 4])
def test_the_end_comes_in_parts(fetch: Callable[..., _Fetched], blocks: int, connections: int) -> None:
    """Where there are several, the first one owes its blocks until the others have more than what nobody owes."""
    router = _Router(blocks, {0: _waits_for(blocks - FEW + 1)} if connections > 1 else None)
    router.parts = lambda number: True
    done = fetch(router, connections=connections)
    assert done.is_right()
    assert _asked(router)
    assert all(ask.start % PART_BYTES == 0 and ask.start < ask.stop for ask in _asked(router))
    assert sum(share.sent_bytes for share in done.receiving.shares()) == len(router.data)


@pytest.mark.usefixtures("_slow")
def test_a_router_that_does_not_know_parts_is_asked_for_none(fetch: Callable[..., _Fetched]) -> None:
    router = _Router(24)
    assert fetch(router).is_right()
    assert not _asked(router)


@pytest.mark.usefixtures("_slow")
@pytest.mark.parametrize("knows", [0, 1])
def test_connections_that_know_parts_and_others_bring_a_file(fetch: Callable[..., _Fetched], knows: int) -> None:
    """The router is replaced by an earlier one meanwhile, or the other way round; and connections are lost."""
    router = _Router(24, {number: _dies_at(3) for number in range(8)})
    router.parts = lambda number: number % 2 == knows
    assert fetch(router).is_right()


@pytest.mark.usefixtures("_slow")
@pytest.mark.parametrize("number", [0, 1, 2])
def test_one_that_dies_within_the_parts_costs_these(fetch: Callable[..., _Fetched], number: int) -> None:
    router = _Router(12, {0: _waits_for(2), number: _dies_at(9)})
    router.parts = lambda number: True
    assert fetch(router).is_right()


@pytest.mark.usefixtures("_slow")
def test_a_part_that_nobody_asked_for_is_not_taken(fetch: Callable[..., _Fetched]) -> None:
    def says(channel: _Channel, due: int) -> None:
        if any(ask.first == due for ask in channel.wanted):
            channel.said.appendleft(cast(Any, "7"))

    router = _Router(12, dict.fromkeys(range(9), says))
    router.parts = lambda number: True
    with pytest.raises(TransferFailure, match=r"from 7 on where \d+ was due") as failure:
        fetch(router, connections=1)
    assert failure.value.kind is ErrorClass.CONTENT_MISMATCH


@pytest.mark.usefixtures("_slow")
def test_parts_of_a_silent_connection_come_by_others(fetch: Callable[..., _Fetched]) -> None:
    def silent(channel: _Channel, block: int) -> None:
        if channel.wanted:
            channel.ended.wait(60)

    router = _Router(12, {0: silent})
    router.parts = lambda number: True
    assert fetch(router, connections=2).is_right()


@pytest.mark.usefixtures("_slow")
def test_a_block_of_parts_is_looked_at_as_every_other(fetch: Callable[..., _Fetched]) -> None:
    seen = list[tuple[int, int]]()
    proof = SimpleNamespace(
        is_wanted=True,
        begin=lambda *arguments, **more: None,
        add=lambda block, size_bytes, digest: seen.append((block, size_bytes)),
    )
    router = _Router(12)
    router.parts = lambda number: True
    done = fetch(router, connections=1, proof=cast(Proof, proof))
    assert done.is_right()
    in_parts = {ask.first for ask in _asked(router)}
    assert dict(seen) == {block: min(BLOCK_BYTES, len(router.data) - block * BLOCK_BYTES) for block in in_parts}
