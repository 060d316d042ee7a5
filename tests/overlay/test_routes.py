"""One file over several routes: whoever dies, the others go on; nothing is late for a slow one."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import Put, put
from stageout.overlay.fetch import get
from stageout.overlay.key_file import read_key
from stageout.overlay.wire.messages import BLOCK_BYTES, Attach, Open, Opened, Operation, Result, Staged
from stageout.overlay.wire.route import Route
from tests.harness.pool.waiting import wait_until
from tests.harness.router import RouterProcess, relay

NOWHERE = ("127.0.0.1:1",)


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    with RouterProcess(tmp_path_factory.mktemp("terminal")) as running:
        yield running


@pytest.fixture(scope="module")
def relays(tmp_path_factory: pytest.TempPathFactory, terminal: RouterProcess) -> Iterator[list[RouterProcess]]:
    make = tmp_path_factory.mktemp
    with relay(make("one"), [terminal]) as one, relay(make("two"), [terminal]) as two:
        yield [one, two]


@pytest.fixture
def routes(relays: list[RouterProcess]) -> list[Route]:
    for one in relays:
        if not one.pid:
            one.start()
    return [(one.address,) for one in relays]


@pytest.fixture
def gateway(terminal: RouterProcess) -> Gateway:
    return Gateway("127.0.0.1", terminal.port, *read_key(terminal.key_file("site")), timeout_s=20)


def make(path: Path, blocks: int) -> Path:
    path.write_bytes(os.urandom(blocks * BLOCK_BYTES - 7))
    return path


def same(one: Path, other: Path) -> bool:
    return hashlib.sha256(one.read_bytes()).digest() == hashlib.sha256(other.read_bytes()).digest()


def _unhurried(sent_bytes: int) -> None:
    """A sender that every route has time to join."""
    time.sleep(0.02)


def test_all_routes_carry_a_part(
    terminal: RouterProcess, routes: list[Route], gateway: Gateway, tmp_path: Path
) -> None:
    source = make(tmp_path / "source", 40)
    for _ in range(5):  # on a busy machine the others may have sent all before a route is ready
        done = put(gateway, source, "all", routes=[*routes, ()], progress=_unhurried)
        if all(share.sent_bytes for share in done.shares):
            break
    assert same(terminal.root / "all", source)
    assert [share.route for share in done.shares] == [*routes, ()]
    assert all(share.sent_bytes > 0 and not share.problem for share in done.shares), done.shares
    assert sum(share.sent_bytes for share in done.shares) == done.sent_bytes >= done.size_bytes
    for route in routes:
        assert get(gateway, "all", tmp_path / "back", routes=[route]) == done.size_bytes
        assert same(tmp_path / "back", source)


class _HeldUp:
    """A put whose connections stop after so many blocks in all, until they may go on."""

    def __init__(self, gateway: Gateway, source: Path, path: str, routes: list[Route], after: int) -> None:
        self._after_bytes, self._go, self._reached = after * BLOCK_BYTES, threading.Event(), threading.Event()
        self._outcome: list[Any] = []
        arguments = (gateway, source, path)
        self._thread = threading.Thread(target=self._run, args=arguments, kwargs={"routes": routes})
        self._thread.start()
        assert self._reached.wait(60)

    def _run(self, *arguments: Any, **further: Any) -> None:
        try:
            self._outcome.append(put(*arguments, progress=self._progress, **further))
        except TransferFailure as failure:
            self._outcome.append(failure)

    def _progress(self, sent_bytes: int) -> None:
        if sent_bytes >= self._after_bytes:
            self._reached.set()
            self._go.wait(60)

    def end(self) -> Put:
        self._go.set()
        self._thread.join(120)
        (outcome,) = self._outcome
        assert isinstance(outcome, Put), outcome
        return outcome


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["reset", "silence"])
def test_a_route_that_dies_costs_what_was_on_its_way(
    terminal: RouterProcess, relays: list[RouterProcess], routes: list[Route], gateway: Gateway, tmp_path: Path,
    how: signal.Signals,
) -> None:  # fmt: skip
    source = make(tmp_path / "source", 48)
    held = _HeldUp(gateway, source, "dies", routes, after=12)
    everybody = [relays[0].pid, *relays[0].workers()]
    try:
        for pid in everybody:
            os.kill(pid, how)
        done = held.end()
    finally:
        for pid in everybody:
            _again(pid)
        if how is signal.SIGKILL:
            relays[0].kill()
    assert same(terminal.root / "dies", source)
    # How much of that was on its way, and fills the buffers of a relay that is stopped, is the machine's affair.
    assert done.sent_bytes <= done.size_bytes + done.shares[0].sent_bytes, "only what went by it is sent again"
    assert done.shares[1].sent_bytes > 24 * BLOCK_BYTES


def _again(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return


def test_a_route_that_comes_back_is_used_again(
    terminal: RouterProcess, relays: list[RouterProcess], routes: list[Route], gateway: Gateway, tmp_path: Path
) -> None:
    source = make(tmp_path / "source", 24)
    held = _HeldUp(gateway, source, "back", routes[:1], after=8)
    relays[0].kill()
    relays[0].start()
    done = held.end()
    assert same(terminal.root / "back", source)
    assert done.shares[0].problem == ""


def test_one_route_that_cannot_be_does_no_harm(
    terminal: RouterProcess, routes: list[Route], gateway: Gateway, tmp_path: Path
) -> None:
    source = make(tmp_path / "source", 4)
    away = (routes[0][0], *NOWHERE)
    done = put(gateway, source, "harmless", routes=[NOWHERE, away, routes[1]])
    assert same(terminal.root / "harmless", source)
    assert get(gateway, "harmless", tmp_path / "back", routes=[NOWHERE, routes[1]]) == done.size_bytes
    assert same(tmp_path / "back", source)


def test_without_any_route_each_is_named_with_its_reason(routes: list[Route], gateway: Gateway, tmp_path: Path) -> None:
    source = make(tmp_path / "source", 1)
    stranger = (routes[0][0], *NOWHERE)
    with pytest.raises(TransferFailure) as caught:
        put(gateway, source, "f", routes=[NOWHERE, stranger])
    assert caught.value.kind is ErrorClass.CONNECT_FAILED, "one of them may come back"
    for words in ("by 127.0.0.1:1: ", "Connection refused", f"by {routes[0][0]},127.0.0.1:1: ", "NEIGHBOURS"):
        assert words in caught.value.message
    with pytest.raises(TransferFailure) as caught:
        put(gateway, source, "f", routes=[stranger])
    assert caught.value.kind is ErrorClass.PERMISSION_DENIED


def test_late_copies_do_not_reach_a_file_that_has_its_name(terminal: RouterProcess, gateway: Gateway) -> None:
    origin, expires = os.urandom(16).hex(), int(time.time()) + 60
    right, late = b"right" * 1000, b"wrong" * 1000
    with Channel(gateway) as control, Channel(gateway) as one, Channel(gateway) as other:
        control.send(Open(origin, 1, "named", len(right), BLOCK_BYTES, expires))
        opened = control.receive()
        assert isinstance(opened, Opened)
        for data in (one, other):
            data.send(Attach(opened.tid))
        one.send_block(opened.tid, 0, right)
        assert isinstance(control.receive(), Staged)
        manifest = hashlib.sha256(control.digest(right)).hexdigest()
        control.send(
            Operation(origin, 1, "publish", "named", expires, tid=opened.tid, size_bytes=5000, blocks=1,
                      manifest=manifest)
        )  # fmt: skip
        answer = control.receive()
        assert isinstance(answer, Result)
        assert answer.outcome == "done"
        other.send_block(opened.tid, 0, late)
        one.send_block(opened.tid, 0, late)
        one.finish()
        other.finish()
    with Channel(gateway) as channel:  # whoever still attaches to it may not write either
        channel.send(Attach(opened.tid))
        with pytest.raises(TransferFailure):
            channel.receive()
    _settled(lambda: (terminal.root / "named").read_bytes(), right)


def test_after_a_wrong_manifest_blocks_come_again_at_once(terminal: RouterProcess, gateway: Gateway) -> None:
    origin, expires = os.urandom(16).hex(), int(time.time()) + 60
    right, wrong = b"right" * 1000, b"wrong" * 1000
    with Channel(gateway) as control, Channel(gateway) as one:
        control.send(Open(origin, 1, "mended", len(right), BLOCK_BYTES, expires))
        opened = control.receive()
        assert isinstance(opened, Opened)
        one.send(Attach(opened.tid))
        one.send_block(opened.tid, 0, wrong)
        assert isinstance(control.receive(), Staged)
        order = Operation(origin, 1, "publish", "mended", expires, tid=opened.tid, size_bytes=5000, blocks=1,
                          manifest=hashlib.sha256(control.digest(right)).hexdigest())  # fmt: skip
        control.send(order)
        assert control.receive() == opened
        assert one.has_more(30), "what is sent by this connection is dropped: it must end long before it is idle"
        with pytest.raises(TransferFailure):
            one.receive()
        with Channel(gateway) as other:
            other.send(Attach(opened.tid))
            other.send_block(opened.tid, 0, right)
            assert isinstance(control.receive(), Staged)
            answer = control.receive()
        assert isinstance(answer, Result)
        assert answer.outcome == "done"
    assert (terminal.root / "mended").read_bytes() == right


def _settled(look: Callable[[], bytes], wanted: bytes) -> None:
    """It is, and stays so while late bytes would arrive."""
    end_s = time.monotonic() + 0.3
    while time.monotonic() < end_s:
        assert look() == wanted
        time.sleep(0.02)


def test_workers_stay(terminal: RouterProcess) -> None:
    wait_until(lambda: len(terminal.workers()) == 2, what="both workers to run")
    assert "task-failed" not in terminal.log
