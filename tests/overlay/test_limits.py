"""Peers that misuse a router: silent ones, ones that take too much, ones that flood. Others are served meanwhile."""

from __future__ import annotations

import functools
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from overlay_router.peers.limits import MOST_STRANGERS, MOST_STRANGERS_OF_ONE, Allowance, Limits, TooMany
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay import packs
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import put
from stageout.overlay.fetch import get
from stageout.overlay.kept import kept
from stageout.overlay.key_file import read_key
from stageout.overlay.many import put_many
from stageout.overlay.operations import Session
from stageout.overlay.packs import SmallPut
from stageout.overlay.wire import messages
from stageout.overlay.wire.messages import BLOCK_BYTES, Low, NoSpace, Open, Opened, Status
from tests.harness.pool.waiting import wait_until
from tests.harness.router import RouterProcess

_TRANSFERS = 40
_CONNECTIONS = 6


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    settings = {
        "STAGEOUT_ROUTER_PEER_TRANSFERS": str(_TRANSFERS),
        "STAGEOUT_ROUTER_PEER_CONNECTIONS": str(_CONNECTIONS),
    }
    with RouterProcess(tmp_path_factory.mktemp("limits"), settings) as running:
        yield running


def peer(router: RouterProcess, name: str) -> Gateway:
    return Gateway("127.0.0.1", router.port, *read_key(router.key_file(name)), timeout_s=30)


def serves(router: RouterProcess, tmp_path: Path, name: str) -> None:
    """Somebody else is served."""
    source = tmp_path / name
    source.write_bytes(b"x" * 1000)
    put(peer(router, "small"), source, f"small/{name}", connections=1)
    assert (router.root / "small" / name).stat().st_size == 1000


def resident_bytes(router: RouterProcess) -> int:
    return int(Path(f"/proc/{router.pid}/statm").read_text().split()[1]) * 4096


def test_a_host_that_connects_and_says_nothing(router: RouterProcess, tmp_path: Path) -> None:
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", router.port), 30, ("127.0.0.66", 0)))
            for _ in range(MOST_STRANGERS_OF_ONE + 10)
        ]
        for sock in silent[MOST_STRANGERS_OF_ONE:]:
            sock.settimeout(30)
            assert sock.recv(1) == b"", "closed at once"
        serves(router, tmp_path, "beside-the-silent")
    assert "have not said who they are" in router.log


def test_connections_that_are_made_before_they_are_needed_take_no_strangers_place(
    router: RouterProcess, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        for _ in range(MOST_STRANGERS_OF_ONE):
            stack.enter_context(Channel(peer(router, "site")))
        serves(router, tmp_path, "beside-the-early")


def test_small_files_over_a_long_way_need_no_more_than_one_connection(
    router: RouterProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those beside it take all places, perhaps."""
    monkeypatch.setattr(packs, "_FAR_S", 0.0)
    (tmp_path / "f").write_bytes(b"x" * 30_000)
    ends: dict[int, packs.End] = {}
    with ExitStack() as stack:
        for _ in range(_CONNECTIONS - 2):
            stack.enter_context(Channel(peer(router, "small"))).send(Low("0" * 32, 0))
        packer = stack.enter_context(packs.Packer(peer(router, "small"), ends.__setitem__, most_connections=24))
        for number in range(100):
            packer.add(number, tmp_path / "f", f"small/many{number}")
        packer.finish()
    assert len(ends) == 100
    assert all(isinstance(end, packs.SmallPut) for end in ends.values())


def test_a_peer_that_opens_ten_thousand_transfers(router: RouterProcess, tmp_path: Path) -> None:
    before_bytes, soon = resident_bytes(router), int(time.time()) + 600
    answers: list[object] = []
    with Channel(peer(router, "site")) as channel:
        ask = [Open("0c" * 16, n, f"f{n}", BLOCK_BYTES, BLOCK_BYTES, soon) for n in range(1, 10_001)]
        sending = threading.Thread(target=lambda: [channel.send(one) for one in ask])
        sending.start()
        answers = [channel.receive() for _ in ask]
        sending.join()
    kinds = [type(answer) for answer in answers]
    assert (kinds.count(Opened), kinds.count(NoSpace)) == (_TRANSFERS, 10_000 - _TRANSFERS)
    assert resident_bytes(router) - before_bytes < 64 << 20
    serves(router, tmp_path, "beside-the-many")
    assert router.log.count(" byte-limit-reached ") < 100, "nor does it fill the log"


def test_a_peer_that_floods_and_does_not_read(router: RouterProcess, tmp_path: Path) -> None:
    before_bytes = resident_bytes(router)
    with Channel(peer(router, "site")) as channel:
        channel.send(Status("0d" * 16, 1))
        channel.receive()
        question = messages.encode(Status("0d" * 16, 1), channel._checksum) * 500
        raw = channel._socket
        raw.setblocking(False)
        asked, since_s, rest = 0, time.monotonic(), question
        while time.monotonic() - since_s < 1.5:
            try:
                sent = raw.send(rest)
                asked, rest = asked + sent, rest[sent:] or question  # whole frames, however they are cut
            except BlockingIOError:
                time.sleep(0.001)
        assert asked > len(question)
        serves(router, tmp_path, "beside-the-flood")
        assert resident_bytes(router) - before_bytes < 64 << 20


def test_connections_of_one_key_are_bounded_and_come_free_again(router: RouterProcess, tmp_path: Path) -> None:
    with ExitStack() as stack:
        for _ in range(_CONNECTIONS):
            channel = stack.enter_context(Channel(peer(router, "hop")))
            channel.send(Status("0e" * 16, 1))
            channel.receive()
        with Channel(peer(router, "hop")) as further:
            further.send(Status("0e" * 16, 1))
            with pytest.raises(TransferFailure, match="has 6 connections") as caught:
                further.receive()
        assert caught.value.kind is ErrorClass.SERVER_BUSY
        serves(router, tmp_path, "beside-the-connected")
    source = tmp_path / "source"
    source.write_bytes(b"x" * (5 * BLOCK_BYTES))
    for number in range(4):  # connections that workers had are counted back, too, and idle ones give way
        put(peer(router, "small"), source, f"small/back{number}", connections=5, priority=number)


def test_idle_connections_make_room_for_whatever_else_a_process_does(router: RouterProcess, tmp_path: Path) -> None:
    source, small, gateway = tmp_path / "source", tmp_path / "s", peer(router, "small")
    source.write_bytes(b"x" * (9 * BLOCK_BYTES))
    small.write_bytes(b"small")

    def fill(number: int) -> None:
        """All places of the key are taken by kept connections; now and then a file is there before all are made."""

        def is_full() -> bool:
            put(gateway, source, f"small/file{number}", connections=_CONNECTIONS - 1)
            return len(kept()) == _CONNECTIONS

        wait_until(is_full, what="a file that needs all connections", interval_s=0)

    fill(0)
    assert get(gateway, "small/file0", tmp_path / "back") == 9 * BLOCK_BYTES
    kept().close()
    fill(1)
    with Session(gateway) as session:
        assert session.stat("small/file1").kind == "file"
    fill(2)
    with Session(gateway) as session:
        session.delete("small/file1")
        session.push()
    fill(3)
    ended: list[object] = []
    put_many(gateway, [("s", small, "small/s")], lambda key, result: ended.append(result))
    assert [type(one) for one in ended] == [SmallPut]


def test_allowances_refill_with_time() -> None:
    allowance = Allowance(10, 3, now_s=100)
    assert [allowance.take(100) for _ in range(3)] == [0, 0, 0]
    assert allowance.take(100) == pytest.approx(0.1)
    assert allowance.take(100.2) == 0
    assert [allowance.take(1000) for _ in range(4)] == [0, 0, 0, pytest.approx(0.1)]


def test_peers_that_ask_for_nothing_are_bounded() -> None:
    limits = Limits(lambda key: 0, 5, 10)
    with ExitStack() as stack:
        for _ in range(MOST_STRANGERS_OF_ONE):
            stack.enter_context(limits.stranger("host"))("key")
        with pytest.raises(TooMany, match="ask for nothing"), limits.stranger("host") as proved:
            proved("key")
    with limits.stranger("host") as proved:
        proved("key")


def test_silent_connections_of_many_addresses_keep_no_other_out() -> None:
    limits, ended = Limits(lambda key: 0, 5, 10), list[int]()
    with ExitStack() as stack:
        for number in range(MOST_STRANGERS):
            end = functools.partial(ended.append, number)
            stack.enter_context(limits.stranger(f"192.0.2.{number % 8}", end))
        for _ in range(3):
            stack.enter_context(limits.stranger("198.51.100.1"))
    assert sorted(ended) == [0, 1, 2], "the oldest of those addresses that have most"


def test_a_network_of_ipv6_is_one_address() -> None:
    limits = Limits(lambda key: 0, 5, 10)
    with ExitStack() as stack:
        for number in range(MOST_STRANGERS_OF_ONE):
            stack.enter_context(limits.stranger(f"2001:db8::{number:x}%eth0"))
        with pytest.raises(TooMany, match="2001:db8::/64"), limits.stranger("2001:db8::ffff"):
            pass
        for other in ("2001:db8:0:1::1", "::ffff:192.0.2.1", "::ffff:192.0.2.2"):
            stack.enter_context(limits.stranger(other))


def test_what_was_ended_does_not_count() -> None:
    limits, ended = Limits(lambda key: 0, 1, 10), list[str]()
    with limits.peer("key", lambda: ended.append("one")):
        assert limits.keys() == {"key"}
        limits.end("key")
        assert (ended, limits.keys()) == (["one"], set())
        with limits.peer("key"):
            pass


def test_512_silent_connections_lock_nobody_out(router: RouterProcess, tmp_path: Path) -> None:
    """From eight addresses, as many as each may have."""
    with ExitStack() as stack:
        for number in range(MOST_STRANGERS):
            place = f"127.0.1.{1 + number % 8}", 0
            stack.enter_context(socket.create_connection(("127.0.0.1", router.port), 30, place))
        serves(router, tmp_path, "beside-512")
