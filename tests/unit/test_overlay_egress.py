"""The deliveries of plugins: rules, leases and the spool, with clocks of their own."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from overlay_router.custodians.spool import FIRST_EGRESS_TID, FIRST_TID, EgressStore
from overlay_router.delivery import guard
from overlay_router.delivery.call import Call, Damaged, File, Kit
from overlay_router.delivery.egress import Egress
from overlay_router.delivery.leases import KEPT_S, LEASE_S, Leases
from overlay_router.delivery.lessee import Lessee, NotLeased
from overlay_router.delivery.outflow import Means, Outflow
from overlay_router.ends import Ends
from overlay_router.local.replies import Reply
from overlay_router.local.store import StoreError
from overlay_router.local.tree import Tree
from overlay_router.peers.circuits import Neighbours
from overlay_router.peers.cover import Cover
from overlay_router.peers.keys import Keys
from overlay_router.peers.rights import Rights
from overlay_router.relay import Router
from overlay_router.rules.lots import Spool
from overlay_router.rules.states import Outcome, Result
from stageout.core import durable
from stageout.core.children import MOVER_MARK
from stageout.core.clock import SystemClock, boot_clock_s
from stageout.core.errors import ErrorClass
from stageout.movers.plugins_table import Plugin
from stageout.movers.results import Failure
from stageout.overlay import outcomes
from stageout.overlay.channel import Gateway
from stageout.overlay.wire import messages
from stageout.overlay.wire.egress import BadEgress, Target, read_targets
from stageout.overlay.wire.messages import BLOCK_BYTES, Leased, Open, Opened, Operation
from tests.in_loop import in_loop
from tests.unit.test_overlay_custodian import Clock
from tests.unit.test_overlay_destination import Crash, home
from tests.unit.test_overlay_packs import arrived

__all__ = ["home"]
ORIGIN, EXPIRES = "0a" * 16, 1000
PEER = f"site/{ORIGIN}"


class Gate:
    """An egress that can be restarted."""

    def __init__(self, home: Path) -> None:
        self.home, self.clock = home, Clock()
        self.open()

    def open(self) -> None:
        self.store, self.tree = EgressStore(self.home / "store"), Tree(self.home)
        targets = read_targets("/out=https://s.example/base/ /out/raw=root://r.example//x")
        self.one = Egress(self.store, self.tree, Spool(1 << 20), targets, self.clock)

    def close(self) -> None:
        self.store.close()
        self.tree.close()

    def restart(self) -> None:
        self.close()
        self.open()

    def put(self, seq: int, path: str, data: bytes = b"data", **more: Any) -> str:
        """Outcome of a PUBLISH whose data come with it, "" while it is delivered."""
        ask = Open(ORIGIN, seq, path, len(data), BLOCK_BYTES, EXPIRES)
        opened = self.one.open(ask, PEER).message
        digest = hashlib.blake2b(data, digest_size=16).digest()
        if isinstance(opened, Opened) and not opened.staged:
            self.tree.staging(opened.tid).write_bytes(data)
            self.one.staged(opened.tid, [(0, digest)])
        manifest = hashlib.sha256(digest).hexdigest()
        operation = Operation(ORIGIN, seq, "publish", path, EXPIRES, size_bytes=len(data), blocks=1, manifest=manifest)
        return outcome(self.one.operate(replace(operation, **more), PEER, "blake2b-128"))

    def pack(self, seq: int, files: dict[str, bytes], **more: Any) -> list[messages.Message]:
        """The answer to a pack."""
        one = arrived(seq, files)._replace(peer=PEER)
        return [reply.message for reply in self.one.pack([one._replace(pack=replace(one.pack, **more))])]

    def ready(self) -> list[str]:
        return [held.operation.path for held in self.one.ready(())[0]]

    def left(self) -> list[Path]:
        return list((self.home / ".stageout/staging").iterdir())


def outcome(replies: list[Reply]) -> str:
    found = [reply.message.outcome for reply in replies if isinstance(reply.message, messages.Result)]
    assert not any(isinstance(reply.message, messages.Custody) for reply in replies), "nobody may free his bytes"
    return found[-1] if found else ""


@pytest.fixture
def gate(home: Path) -> Iterator[Gate]:
    made = Gate(home)
    yield made
    made.close()


def test_the_longest_prefix_says_where_a_file_goes() -> None:
    targets = read_targets(" /out=https://u:secret@s.example/base/  /out/raw=root://r.example//x /=dav://d/")
    for path, url in (
        ("out/a b/c%", "https://u:secret@s.example/base/a%20b/c%25"),
        ("out/raw/f", "root://r.example//x/f"),
        ("other", "dav://d/other"),
    ):
        target = targets.find(path)
        assert target is not None
        assert target.url_of(path) == url
    assert targets.known[0].shown == "https://s.example/base/"
    only = read_targets("/out=file:///d")
    assert (only.find("out"), only.find("outer/f")) == (None, None)
    assert only.covers("out")
    for text in (
        "out=https://s/",
        "/out",
        "/out=nothing",
        "/a=http://s/?x=1",
        "/a/../b=http://s/",
        "/a=b://c /a=b://d",
    ):
        with pytest.raises(BadEgress, match=r"write|twice|no \?"):
            read_targets(text)


def test_a_file_is_answered_when_it_was_delivered_and_then_its_space_is_free(gate: Gate) -> None:
    for _ in range(2):
        assert gate.put(1, "out/f") == ""
        assert gate.ready() == ["out/f"]
        assert outcome(gate.one.status(messages.Status(ORIGIN, 1), PEER)) == "pending"
        gate.restart()
    (held,), _ = gate.one.ready(())
    assert FIRST_EGRESS_TID < held.tid < FIRST_TID
    assert gate.ready() == ["out/f"]
    assert gate.one.ready({held.key}) == ([], [])
    assert outcome(gate.one.settle(held.key, Result(Outcome.DONE))) == "done"
    assert (gate.left(), gate.ready()) == ([], [])
    gate.restart()
    assert gate.put(1, "out/f") == "done"


def test_a_restart_loses_no_records_and_says_so(gate: Gate) -> None:
    """Another epoch would have its sender look whether the file is there already."""
    gate.put(1, "out/a")
    ask = Open(ORIGIN, 1, "out/a", 4, BLOCK_BYTES, EXPIRES, release="delivered")
    before = gate.one.open(ask, PEER).message
    gate.restart()
    assert gate.one.open(ask, PEER).message == before


def test_a_gateway_does_not_start_on_another_spool_than_its_records_are_of(gate: Gate) -> None:
    gate.put(1, "out/a")
    inside, away = gate.home / ".stageout", gate.home / "away"
    inside.rename(away)
    with pytest.raises(StoreError, match=r"is not the spool .* of 1 files and packs .* mount it"):
        gate.restart()
    shutil.rmtree(inside)
    away.rename(inside)
    gate.restart()
    assert gate.ready() == ["out/a"]


def test_files_of_one_name_go_one_after_the_other(gate: Gate) -> None:
    gate.put(1, "out/f")
    gate.clock.now_s = 5
    gate.put(2, "out/f", priority=9)
    gate.put(3, "out/g", priority=3)
    assert gate.ready() == ["out/g", "out/f"]
    (_, first), _ = gate.one.ready(())
    assert first.key == (ORIGIN, 1)
    assert [held.operation.path for held in gate.one.ready({(ORIGIN, 1)})[0]] == ["out/g"]


def test_what_no_plugin_can_do_is_refused_and_remembered(gate: Gate) -> None:
    for seq, (kind, path, more) in enumerate(
        (("mkdir", "out/d", {}), ("rename", "x", {"target": "out/f"}), ("delete", "out/f", {}),
         ("publish", "out/f", {"absent": True}), ("publish", "out/f", {"generation": 3}), ("publish", "out", {})), 1
    ):  # fmt: skip
        asked = Operation(ORIGIN, seq, kind, path, EXPIRES, **more)  # type: ignore[arg-type]
        for _ in range(2):
            (reply,) = gate.one.operate(asked, PEER, "blake2b-128")
            assert isinstance(reply.message, messages.Result)
            failure = outcomes.failure(reply.message, path, "s")
            assert failure is not None
            assert failure.kind is ErrorClass.NOT_SUPPORTED, failure
            gate.restart()
    assert gate.ready() == []


def test_cancelled_and_expired_ones_are_answered_and_not_delivered(gate: Gate) -> None:
    gate.put(1, "out/f")
    gate.one.cancel(messages.Cancel(ORIGIN, 1), PEER)
    found, replies = gate.one.ready(())
    assert (found, outcome(replies)) == ([], "cancelled")
    gate.put(2, "out/g")
    gate.clock.now_s = EXPIRES + 1
    assert outcome(gate.one.expire({(ORIGIN, 2)})) == "", "a plugin has it just now"
    assert outcome(gate.one.expire(())) == "expired"
    assert gate.left() == []


def test_the_class_of_a_refusal_outlives_a_restart(gate: Gate) -> None:
    gate.put(1, "out/f")
    said = Result(Outcome.FAILED, "https://s.example/base/: no", code=ErrorClass.QUOTA_EXCEEDED.code)
    gate.one.settle((ORIGIN, 1), said)
    gate.restart()
    (reply,) = gate.one.status(messages.Status(ORIGIN, 1), PEER)
    assert isinstance(reply.message, messages.Result)
    failure = outcomes.failure(reply.message, "f", "s")
    assert failure is not None
    assert failure.kind is ErrorClass.QUOTA_EXCEEDED


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "label", ["overlay-grant", "overlay-stage", "custody-sync", "custody-take", "custody-settle", "overlay-discard"]
)
def test_death_at_every_step_repeats_and_never_says_done_too_early(
    home: Path, label: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, delivered = Gate(home), 0
    real, armed = durable.step, [True]

    @contextmanager
    def step(name: str) -> Iterator[None]:
        if armed and name == label:
            armed.pop()
            if when == "before":
                raise Crash
            with real(name):
                yield
            raise Crash
        with real(name):
            yield

    monkeypatch.setattr(durable, "step", step)
    for _ in range(4):
        try:
            if gate.put(1, "out/f") == "done":
                assert delivered, "done, and no plugin has said so"
                break
            for held in gate.one.ready(())[0]:
                assert Path(gate.one.file(held)).read_bytes() == b"data"
                delivered += 1
                gate.one.settle(held.key, Result(Outcome.DONE))
        except Crash:
            gate.restart()
    else:
        raise AssertionError("it never ended")
    assert not armed, f"nobody passes {label}"
    gate.restart()
    assert gate.left() == []
    gate.close()


def _means(home: Path) -> Means:
    return Means(home / "movers", home / "fetched", home / "report", (), 1, 10.0)


def test_space_of_uploads_that_nobody_goes_on_with_is_given_back(gate: Gate, tmp_path: Path) -> None:
    gate.one.open(Open(ORIGIN, 1, "out/f", 1 << 19, BLOCK_BYTES, EXPIRES), PEER)
    assert len(gate.left()) == 1
    gate.clock.now_s = LEASE_S

    async def expire() -> None:
        router = Router(
            "node", Ends(egress=gate.one), Keys({}), 1, Neighbours(), cast(Any, SimpleNamespace(address="")), Rights(),
            4, 100.0, Cover(), means=_means(tmp_path),
        )  # fmt: skip
        await router._expire_once()
        router._pool.close()

    asyncio.run(expire())
    assert gate.left() == []


def test_a_full_disk_does_not_end_all_deliveries(gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overlay_router.delivery.outflow.FIRST_S", 0.01)
    monkeypatch.setattr("overlay_router.delivery.outflow._IDLE_S", 0.01)
    asked: list[int] = []

    async def run() -> None:
        again = asyncio.Event()

        def ready(busy: object) -> tuple[list[Any], list[Any]]:
            asked.append(1)
            if len(asked) == 1:
                raise sqlite3.OperationalError("database or disk is full")
            again.set()
            return [], []

        async def on_disk(work: Callable[[], Any]) -> Any:
            return work()

        monkeypatch.setattr(gate.one, "ready", ready)
        outflow = Outflow(gate.one, _means(tmp_path), on_disk, lambda replies: None, SystemClock())
        task = asyncio.ensure_future(outflow.run())
        waiting = asyncio.ensure_future(again.wait())
        await asyncio.wait({task, waiting}, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        assert not task.done()
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(run())
    assert len(asked) == 2


def test_plugins_of_before_that_do_not_end_are_waited_for(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overlay_router.delivery.outflow.FIRST_S", 0.01)
    left = [OSError("processes of earlier movers do not end"), OSError("processes of earlier movers do not end")]

    def end_leftovers(home: Path) -> None:
        if left:
            raise left.pop()

    async def run() -> None:
        begun = asyncio.Event()

        def ready(busy: object) -> tuple[list[Any], list[Any]]:
            assert not left
            begun.set()
            return [], []

        async def on_disk(work: Callable[[], Any]) -> Any:
            return work()

        monkeypatch.setattr("overlay_router.delivery.outflow.end_leftovers", end_leftovers)
        monkeypatch.setattr(gate.one, "ready", ready)
        outflow = Outflow(gate.one, _means(tmp_path), on_disk, lambda replies: None, SystemClock())
        task = asyncio.ensure_future(outflow.run())
        waiting = asyncio.ensure_future(begun.wait())
        await asyncio.wait({task, waiting}, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        assert not task.done()
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(run())


def test_what_is_not_wanted_has_its_end_also_when_its_data_are_gone(gate: Gate) -> None:
    assert gate.put(1, "out/a") == ""
    assert gate.one.cancel(messages.Cancel(ORIGIN, 1), PEER) == []
    gate.one.damaged((ORIGIN, 1), [0])
    found, replies = gate.one.ready(())
    assert (found, outcome(replies)) == ([], "cancelled")


def test_a_block_that_the_disk_does_not_give_back_is_damaged(gate: Gate, tmp_path: Path) -> None:
    """Else everything for its target would wait behind it."""
    gate.put(1, "out/f")
    (held,), _ = gate.one.ready(())
    kit = Kit(Plugin(Path("/nothing"), ("https",), 4), tmp_path / "work", 10.0, {}, None)
    folder = File(held, tmp_path, tuple(gate.one.digests(held)))  # it can be opened, but not read
    assert Call(Target("out", "https://s/"), [folder], kit).run() == [Damaged((0,))]


def test_damage_in_the_spool_is_found_before_a_plugin_is_run(gate: Gate, tmp_path: Path) -> None:
    gate.put(1, "out/f")
    (held,), _ = gate.one.ready(())
    path = Path(gate.one.file(held))
    path.write_bytes(b"dada")
    kit = Kit(Plugin(Path("/nothing"), ("https",), 4), tmp_path / "work", 10.0, {}, None)
    file = File(held, path, tuple(gate.one.digests(held)))
    (end,) = Call(Target("out", "https://s/"), [file], kit).run()
    assert end == Damaged((0,))
    gate.one.damaged(held.key, end.blocks)
    assert gate.ready() == []
    assert gate.put(1, "out/f") == "", "the data came again"
    assert gate.ready() == ["out/f"]


def test_a_file_whose_digests_cannot_be_computed_any_more_fails_by_itself(gate: Gate, tmp_path: Path) -> None:
    """Else everything for its target would wait behind it."""
    gate.put(1, "out/f")
    (held,), _ = gate.one.ready(())
    kit = Kit(Plugin(Path("/nothing"), ("https",), 4), tmp_path / "work", 10.0, {}, None)
    file = File(replace(held, digest="xxh0"), Path(gate.one.file(held)), tuple(gate.one.digests(held)))
    (end,) = Call(Target("out", "https://s/"), [file], kit).run()
    assert isinstance(end, Failure)
    assert (end.kind, "install" in end.message) == (ErrorClass.PLUGIN_BROKEN, True)


# ---- leases ----------------------------------------------------------------------------------------------------------


def test_another_gateway_waits_until_the_first_has_certainly_ended(tmp_path: Path) -> None:
    leases = Leases(tmp_path / "lessor", 0.0)
    assert leases.take("a", ["x", "y"], 0.0, False) == (0, 1)
    assert leases.take("b", ["x", "z"], LEASE_S + 1, False) == (1,)
    assert leases.take("a", ["x"], LEASE_S + 2, True) == (0,), "renewed"
    assert leases.take("b", ["y"], LEASE_S + KEPT_S, False) == ()
    assert leases.take("b", ["y"], LEASE_S + KEPT_S + 1, False) == (0,)
    leases.give_back("b", ["x", "y"])
    assert leases.take("a", ["y"], LEASE_S + KEPT_S + 2, False) == (0,)
    assert leases.take("b", ["x"], LEASE_S + KEPT_S + 3, False) == (), "it was not b's to give back"


def test_a_lessor_that_was_restarted_gives_nothing_that_may_be_in_use(tmp_path: Path) -> None:
    Leases(tmp_path / "lessor", 0.0).take("a", ["x"], 0.0, False)
    leases = Leases(tmp_path / "lessor", 1000.0)
    assert leases.take("b", ["x"], 1001.0, False) == ()
    assert leases.take("a", ["x"], 1002.0, True) == (0,)
    assert leases.take("b", ["x"], 1000.0 + LEASE_S + KEPT_S, False) == ()
    assert leases.take("b", ["z"], 1000.0 + LEASE_S + KEPT_S, False) == (0,)


class _Lessor:
    """Answers as it is told to; after ``granting`` answers it does not answer any more."""

    def __init__(self, granting: int) -> None:
        self.left, self.asked = granting, 0

    def __call__(self, places: tuple[str, ...], held: bool) -> Leased:
        self.asked += 1
        self.left -= 1
        if self.left < 0:
            raise NotLeased("silent")
        return Leased(tuple(range(len(places))))


def _lessee(lessor: _Lessor, monkeypatch: pytest.MonkeyPatch) -> Lessee:
    lessee = Lessee(lambda: Gateway("127.0.0.1", 1, "k", b"", timeout_s=0.1), "me:1", lease_s=0.4, kept_s=0.1)
    monkeypatch.setattr(lessee, "ask", lessor)
    return lessee


def _nobody(until_s: float) -> None:
    """Told when a plugin must have ended."""


def test_a_gateway_that_was_stopped_begins_nothing_under_an_old_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []
    lessee = _lessee(_Lessor(1), monkeypatch)
    monkeypatch.setattr(lessee, "_lease_s", 4000.0)
    with lessee.alone(["u"], lambda: None, told.append) as holds:
        assert holds() and len(told) == 1
        _suspended(monkeypatch, 4000)
        assert not holds()


def test_a_machine_that_was_suspended_stops_what_it_delivers_under_an_old_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither the monotonic clock nor a wait of a thread counts that time."""
    lessee, stopped = _lessee(_Lessor(1), monkeypatch), threading.Event()
    monkeypatch.setattr(lessee, "_lease_s", 4000.0)
    with lessee.alone(["u"], stopped.set, _nobody):
        _suspended(monkeypatch, 4000)
        assert stopped.wait(30)


def test_a_guard_of_a_machine_that_was_suspended_kills_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    out, orders = os.pipe()
    killed = threading.Event()
    monkeypatch.setattr(guard, "kill_all", lambda directory: killed.set() or 1)
    watching = threading.Thread(target=guard.watch, args=(Path("/none"), out))
    try:
        os.write(orders, f"{boot_clock_s() + 3600}\n".encode())
        watching.start()
        _suspended(monkeypatch, 3600)
        assert killed.wait(30)
        os.write(orders, b"over\n")
        watching.join(30)
    finally:
        for descriptor in (out, orders):
            os.close(descriptor)


def _suspended(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """The view of a machine that goes on after so long: the boot clock alone has counted it."""
    real = time.clock_gettime
    monkeypatch.setattr(
        time, "clock_gettime", lambda which: real(which) + (seconds if which == time.CLOCK_BOOTTIME else 0)
    )


@pytest.mark.parametrize("why", ["the lease is over", "the gateway is gone", "it is renewed"])
def test_a_guard_ends_plugins_that_nobody_else_can(tmp_path: Path, why: str) -> None:
    """By themselves they would deliver although another gateway may have begun."""
    out, orders = os.pipe()
    environment = {**os.environ, MOVER_MARK: str(tmp_path / "1")}
    own = subprocess.Popen(["sleep", "600"], env=environment, start_new_session=True)
    other = subprocess.Popen(["sleep", "600"], env={**environment, MOVER_MARK: str(tmp_path / "12")})
    watching = threading.Thread(target=guard.watch, args=(tmp_path / "1", out))
    watching.start()
    try:
        os.write(orders, f"{boot_clock_s() + 3600}\n".encode())
        if why == "the lease is over":
            os.write(orders, f"{boot_clock_s()}\n".encode())
        elif why == "the gateway is gone":
            os.close(orders)
        if why == "it is renewed":
            os.write(orders, b"over\n")
            watching.join(30)
            assert own.poll() is None
        else:
            assert own.wait(30) == -signal.SIGKILL
        if why == "the lease is over":
            os.write(orders, b"over\n")
        watching.join(30)
        assert not watching.is_alive() and other.poll() is None
    finally:
        for end in (out,) if why == "the gateway is gone" else (out, orders):
            os.close(end)
        for process in (own, other):
            process.kill()
            process.wait()


def test_a_guard_says_once_what_it_cannot_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that waited for a disk wrote ten lines a second into the log, for as long as that took."""
    out, orders = os.pipe()
    calls, said = list[int](), list[str]()

    def kill_all(directory: Path) -> int:
        calls.append(1)
        if len(calls) == 5:
            os.write(orders, b"over\n")
        return 1

    monkeypatch.setattr(guard, "kill_all", kill_all)
    monkeypatch.setattr(guard, "_AGAIN_S", 0.001)
    monkeypatch.setattr(guard.log, "error", lambda event, **facts: said.append(event))
    try:
        os.write(orders, f"{boot_clock_s()}\n".encode())
        guard.watch(Path("/none"), out)
    finally:
        for descriptor in (out, orders):
            os.close(descriptor)
    assert (len(calls), said) == (5, ["egress-lease-expired"])


def test_a_guard_whose_gateway_is_gone_ends_what_is_begun_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = iter([1, 2, 0])
    monkeypatch.setattr(guard, "kill_all", lambda directory: next(killed))
    out, orders = os.pipe()
    os.close(orders)
    try:
        guard.watch(Path("/none"), out)
    finally:
        os.close(out)
    assert list(killed) == []


def test_no_two_routers_use_the_same_directory_for_a_call(tmp_path: Path) -> None:
    """A guard of the one before would kill what the next one runs."""
    egress: Any = SimpleNamespace(spool=Spool(1), clock=None)
    names = {
        next(in_loop(lambda: Outflow(egress, _means(tmp_path), *[cast(Any, None)] * 3))._numbers) for _ in range(2)
    }
    assert len(names) == 2


def test_what_delivers_is_stopped_when_the_lease_is_not_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = threading.Event()
    with _lessee(_Lessor(2), monkeypatch).alone(["u"], stopped.set, _nobody):
        assert stopped.wait(30)


def test_a_lease_that_is_renewed_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stood still for longer than a lease has lost it, and begins anew."""
    lessor, until_s = _Lessor(10**6), time.monotonic() + 60
    asked = 0
    while asked < 4 and time.monotonic() < until_s:
        stopped = threading.Event()
        before = lessor.asked
        with _lessee(lessor, monkeypatch).alone(["u"], stopped.set, _nobody):
            while lessor.asked < before + 4 and not stopped.wait(0.01) and time.monotonic() < until_s:
                pass
        asked = lessor.asked - before
    assert asked >= 4


def test_without_a_lease_nothing_is_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    for lessor in (_Lessor(0), lambda places, held: Leased(())):
        lessee = _lessee(lessor, monkeypatch)  # type: ignore[arg-type]
        with pytest.raises(NotLeased), lessee.alone(["u"], os.abort, _nobody):
            raise AssertionError
