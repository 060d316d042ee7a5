"""A file by several connections and routes from real routers: whatever dies on the way, it is what was published."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.core.threads import NoThread
from stageout.overlay import fetch, receiving, way_back
from stageout.overlay.cargo import Share
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import put
from stageout.overlay.fetch import get
from stageout.overlay.kept import kept
from stageout.overlay.key_file import read_key
from stageout.overlay.sockets import Sockets
from stageout.overlay.wire.blocks import PART_BYTES
from stageout.overlay.wire.messages import BLOCK_BYTES, Found, Get, Message
from stageout.overlay.writing import Writing
from tests.harness.router import RouterProcess, relay
from tests.overlay.between import Between

AtBlock = Callable[[int, Callable[[], object]], None]
_BLOCKS, _CONNECTIONS = 40, 6
#: So slow that there is time to do something in the middle.
_SLOW = {"STAGEOUT_ROUTER_UPLINK_MB_S": "25"}


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    with RouterProcess(tmp_path_factory.mktemp("terminal"), _SLOW) as running:
        yield running


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "source"
    path.write_bytes(os.urandom(_BLOCKS * BLOCK_BYTES - 7))
    return path


@pytest.fixture
def gateway(terminal: RouterProcess, source: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    """The file is there as ``f``, and all ways count as long ones."""
    _lengthen(monkeypatch)
    found = _gateway(terminal)
    if not (terminal.root / "f").exists():
        put(found, source, "f")
    yield found
    kept().close()


def _gateway(router: RouterProcess, port: int = 0) -> Gateway:
    return Gateway("127.0.0.1", port or router.port, *read_key(router.key_file("site")), timeout_s=20)


def _lengthen(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fetch, way_back):
        monkeypatch.setattr(module, "LONG_S", -1.0)


def _at(received_bytes: int, do: Callable[[], object]) -> Callable[[int], None]:
    """Do something once, when so much is here."""
    left = [do]

    def progress(told_bytes: int) -> None:
        if left and told_bytes >= received_bytes:
            left.pop()()

    return progress


@pytest.fixture
def at_block(monkeypatch: pytest.MonkeyPatch) -> AtBlock:
    """Do something once, when so many blocks came by several connections: before the next one, however long it takes.

    A question is for one block, so others are asked for behind it.
    """
    write, turn, count, due = Writing.write, threading.Lock(), itertools.count(1), dict[int, Callable[[], object]]()

    def in_turn(writing: Writing, data: memoryview, offset: int) -> None:
        with turn:
            write(writing, data, offset)
            due.pop(next(count), lambda: None)()

    def arrange(blocks: int, do: Callable[[], object]) -> None:
        nonlocal count
        count = itertools.count(1)
        due[blocks] = do

    monkeypatch.setattr(way_back, "_RANGE_S", 0.0)
    monkeypatch.setattr(Writing, "write", in_turn)
    return arrange


def test_several_connections_are_used_and_kept(gateway: Gateway, source: Path, tmp_path: Path) -> None:
    shares: list[Share] = []
    with Between(gateway.port) as between:
        near = Gateway(gateway.host, between.port, gateway.key_name, gateway.secret)
        assert get(near, "f", tmp_path / "back", connections=4, ended=shares.extend) == source.stat().st_size
        assert 1 < between.connections <= 4
        made = between.connections
        get(near, "f", tmp_path / "again", connections=4)
        # one on which something came for the second time when all was there has ended then
        assert between.connections < made + 4, "those of the first are used again"
    assert (tmp_path / "back").read_bytes() == (tmp_path / "again").read_bytes() == source.read_bytes()
    assert [share.sent_bytes for share in shares] == [source.stat().st_size]


def test_connections_that_are_cut_cost_what_was_on_its_way(gateway: Gateway, source: Path, tmp_path: Path) -> None:
    with Between(gateway.port) as between:
        near = Gateway(gateway.host, between.port, gateway.key_name, gateway.secret)
        get(near, "f", tmp_path / "back", connections=3, progress=_at(9 * BLOCK_BYTES, between.cut))
        assert between.connections > 3
    assert (tmp_path / "back").read_bytes() == source.read_bytes()


def test_a_router_that_is_started_again(
    terminal: RouterProcess, gateway: Gateway, source: Path, tmp_path: Path
) -> None:
    def again() -> None:
        terminal.kill()
        terminal.start()

    get(gateway, "f", tmp_path / "back", connections=3, progress=_at(9 * BLOCK_BYTES, again))
    assert (tmp_path / "back").read_bytes() == source.read_bytes()


def test_a_file_that_is_replaced_begins_anew(gateway: Gateway, source: Path, tmp_path: Path, at_block: AtBlock) -> None:
    new = tmp_path / "new"
    new.write_bytes(os.urandom(30 * BLOCK_BYTES))
    put(gateway, source, "replaced")
    at_block(9, lambda: put(gateway, new, "replaced"))
    get(gateway, "replaced", tmp_path / "back", connections=3)
    assert (tmp_path / "back").read_bytes() == new.read_bytes()


def test_a_file_that_others_have_put_there_and_replace(
    terminal: RouterProcess, gateway: Gateway, tmp_path: Path, at_block: AtBlock
) -> None:
    """It has no generation, and is one version nevertheless."""
    old, new = (os.urandom(BLOCK_BYTES) * 30 for _ in range(2))
    place = terminal.root / "foreign"
    place.write_bytes(old)

    def replace() -> None:
        (terminal.root / "next").write_bytes(new)
        (terminal.root / "next").rename(place)

    shares: list[Share] = []
    get(gateway, "foreign", tmp_path / "back", connections=3, ended=shares.extend)
    assert (tmp_path / "back").read_bytes() == old
    assert shares[0].connections == 3
    at_block(9, replace)
    get(gateway, "foreign", tmp_path / "back", connections=3)
    assert (tmp_path / "back").read_bytes() == new


def test_a_published_file_that_others_have_changed_and_replace_is_one_version_too(
    terminal: RouterProcess,
    gateway: Gateway,
    source: Path,
    tmp_path: Path,
    at_block: AtBlock,
) -> None:
    """The router's count for its name does not tell that."""
    put(gateway, source, "overwritten")

    def replace(data: bytes) -> None:
        (terminal.root / "next").write_bytes(data)
        (terminal.root / "next").rename(terminal.root / "overwritten")

    for data in (os.urandom(BLOCK_BYTES) * _BLOCKS for _ in range(2)):
        at_block(9, partial(replace, data))
        get(gateway, "overwritten", tmp_path / "back", connections=3)
        assert (tmp_path / "back").read_bytes() == data


def test_a_file_that_is_deleted_meanwhile_is_said_to_be(
    terminal: RouterProcess,
    gateway: Gateway,
    source: Path,
    tmp_path: Path,
    at_block: AtBlock,
) -> None:
    place = terminal.root / "deleted"
    place.write_bytes(source.read_bytes())
    at_block(1, place.unlink)
    with pytest.raises(TransferFailure, match="deleted was deleted while it was fetched") as failure:
        get(gateway, "deleted", tmp_path / "back", connections=3)
    assert failure.value.kind is ErrorClass.NOT_FOUND
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_one_of_two_routes_that_dies_or_falls_silent(
    terminal: RouterProcess, gateway: Gateway, source: Path, tmp_path: Path, number: signal.Signals
) -> None:
    with relay(tmp_path / "one", [terminal]) as one, relay(tmp_path / "two", [terminal]) as two:

        def end() -> None:
            for pid in [*one.workers(), one.pid]:
                os.kill(pid, number)

        shares: list[Share] = []
        try:
            get(
                gateway, "f", tmp_path / "back", routes=[(one.address,), (two.address,)], ended=shares.extend,
                progress=_at(9 * BLOCK_BYTES, end),
            )  # fmt: skip
        finally:
            if number == signal.SIGSTOP:
                for pid in [*one.workers(), one.pid]:
                    os.kill(pid, signal.SIGCONT)
        assert (tmp_path / "back").read_bytes() == source.read_bytes()
        assert {share.route for share in shares} == {(one.address,), (two.address,)}
        assert sum(share.sent_bytes for share in shares) == source.stat().st_size


def test_what_a_slow_connection_owes_at_the_end_comes_by_another(
    gateway: Gateway, source: Path, tmp_path: Path
) -> None:
    """It is never silent, so it would be waited for: a block takes three minutes on it."""
    with Between(gateway.port, slow=[1]) as between:
        near = Gateway(gateway.host, between.port, gateway.key_name, gateway.secret)
        began_s = time.monotonic()
        get(near, "f", tmp_path / "back", connections=3)
        assert between.connections == 3
        assert time.monotonic() - began_s < 100
    assert (tmp_path / "back").read_bytes() == source.read_bytes()


def test_a_file_comes_in_parts(gateway: Gateway, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compared with what was published."""
    came, receive = list[tuple[int, int]](), Channel.receive_part

    def received(channel: Channel, view: memoryview) -> tuple[int, int]:
        came.append(receive(channel, view))
        return came[-1]

    monkeypatch.setattr(Channel, "receive_part", received)
    monkeypatch.setattr(receiving.Receiving, "_part_bytes", lambda receiving, way, carrier: 5 * PART_BYTES)
    get(gateway, "f", tmp_path / "f", connections=4, most_connections=4)
    assert (tmp_path / "f").read_bytes() == source.read_bytes()
    units = {at for start, length in came for at in range(start, start + length, PART_BYTES)}
    assert units.issuperset(range(8 * BLOCK_BYTES, source.stat().st_size, PART_BYTES)), "all but the first blocks"


def test_a_range_is_one_answer_and_leaves_no_lane_for_others(
    gateway: Gateway, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, send = list[Get](), Channel.send

    def sent(channel: Channel, message: Message) -> None:
        asked.extend([message] if isinstance(message, Get) else [])
        send(channel, message)

    monkeypatch.setattr(Channel, "send", sent)
    content = source.read_bytes()
    assert b"".join(fetch.read(gateway, "f", 7, 2 * BLOCK_BYTES)) == content[7 : 2 * BLOCK_BYTES + 7]
    assert b"".join(fetch.read(gateway, "f", 38 * BLOCK_BYTES)) == content[38 * BLOCK_BYTES :]
    assert [bool(ask.flow) for ask in asked] == [False, True]


def test_a_part_is_asked_for_by_itself_and_others_behind_it(gateway: Gateway, source: Path) -> None:
    content, buffer = source.read_bytes()[2 * BLOCK_BYTES : 3 * BLOCK_BYTES], memoryview(bytearray(BLOCK_BYTES))
    parts = [(0, 1), (PART_BYTES, 3 * PART_BYTES), (15 * PART_BYTES, BLOCK_BYTES), (0, BLOCK_BYTES)]
    with Channel(gateway) as channel:
        assert channel.parts
        for start, end in parts:
            channel.send(Get("f", 2, 1, start=start, end=end))
        for start, end in parts:
            assert isinstance(channel.receive(), Found)
            assert channel.receive_part(buffer) == (2 * BLOCK_BYTES + start, end - start)
            assert buffer[: end - start] == content[start:end]


@pytest.mark.parametrize(
    ("blocks", "start", "end"),
    [(1, 1, 9), (0, 0, 9), (2, 0, 9), (1, PART_BYTES, PART_BYTES), (1, PART_BYTES, 0), (1, 0, BLOCK_BYTES + 1)],
)
def test_what_is_no_part_is_against_the_protocol(gateway: Gateway, blocks: int, start: int, end: int) -> None:
    with Channel(gateway) as channel:
        channel.send(Get("f", 2, blocks, start=start, end=end))
        with pytest.raises(TransferFailure) as caught:
            channel.receive()
    assert caught.value.kind is ErrorClass.CONNECTION_LOST


def test_a_connection_that_is_one_too_many_asks_for_nothing_more(
    gateway: Gateway, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(way_back, "_RANGE_S", 0.0)
    ways, counts = list[way_back.WayBack](), dict[int, int]()

    def way(*arguments: Any) -> way_back.WayBack:
        ways.append(way_back.WayBack(*arguments))
        return ways[-1]

    def progress(told_bytes: int) -> None:
        if told_bytes >= 9 * BLOCK_BYTES and ways[0].sockets.now > 1:
            ways[0].sockets = Sockets(1, 1)
        counts[told_bytes // BLOCK_BYTES] = len(ways[0].carriers)

    monkeypatch.setattr(receiving, "WayBack", way)
    get(gateway, "f", tmp_path / "back", connections=4, progress=progress)
    assert (tmp_path / "back").read_bytes() == source.read_bytes()
    late = [count for blocks, count in counts.items() if 30 <= blocks < _BLOCKS - 1]
    assert late
    assert set(late) == {1}


def test_a_process_that_may_have_no_thread_gets_it_by_one_connection(
    gateway: Gateway, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*arguments: object) -> threading.Thread:
        raise NoThread(errno.EAGAIN, "as many as it may")

    monkeypatch.setattr(way_back, "started", none)
    shares = list[Share]()
    assert get(gateway, "f", tmp_path / "back", connections=4, ended=shares.extend) == source.stat().st_size
    assert (tmp_path / "back").read_bytes() == source.read_bytes()
    assert [(share.sent_bytes, share.problem) for share in shares] == [(source.stat().st_size, "")]


@pytest.mark.parametrize("connections", [1, 3])
def test_a_file_that_finds_no_room_here_is_said_to(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connections: int
) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(TransferFailure, match="No space left") as caught:
        get(gateway, "f", tmp_path / "back", connections=connections)
    assert caught.value.kind is ErrorClass.NO_SPACE_LOCAL
    assert not list(tmp_path.iterdir())


def test_a_router_that_takes_fewer_connections(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _lengthen(monkeypatch)
    few = {"STAGEOUT_ROUTER_PEER_CONNECTIONS": "3"}
    with RouterProcess(tmp_path / "router", {**_SLOW, **few}) as router:
        (router.root / "f").write_bytes(source.read_bytes())
        get(_gateway(router), "f", tmp_path / "back", connections=_CONNECTIONS)
        kept().close()
    assert (tmp_path / "back").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("size_bytes", [0, 1, 8 * BLOCK_BYTES, 8 * BLOCK_BYTES + 1, 9 * BLOCK_BYTES])
def test_files_of_any_size(terminal: RouterProcess, gateway: Gateway, tmp_path: Path, size_bytes: int) -> None:
    (terminal.root / "some").write_bytes(os.urandom(size_bytes))
    assert get(gateway, "some", tmp_path / "back", connections=_CONNECTIONS) == size_bytes
    assert (tmp_path / "back").read_bytes() == (terminal.root / "some").read_bytes()


@pytest.mark.parametrize(("long_s", "connections"), [(60.0, 1), (-1.0, 2)])
def test_over_a_short_way_one_question_is_enough_for_32_mib(
    terminal: RouterProcess, gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long_s: float,
    connections: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(fetch, "LONG_S", long_s)
    (terminal.root / "some").write_bytes(os.urandom(12 * BLOCK_BYTES))
    shares: list[Share] = []
    get(gateway, "some", tmp_path / "back", connections=2, ended=shares.extend)
    assert (tmp_path / "back").read_bytes() == (terminal.root / "some").read_bytes()
    assert [share.connections for share in shares] == [connections]


def test_nothing_is_left_of_a_fetch_that_was_given_up(gateway: Gateway, tmp_path: Path) -> None:
    def enough() -> None:
        raise TransferFailure(ErrorClass.UNKNOWN, "given up")

    with pytest.raises(TransferFailure, match="given up"):
        get(gateway, "f", tmp_path / "back", connections=3, progress=_at(1, enough))
    assert not list(tmp_path.iterdir())
