"""The files that plugins fetch for clients of a gateway: whose bytes, how much room, and for how long."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from overlay_router.custodians import spool
from overlay_router.delivery import fetching
from overlay_router.delivery.call import Kit
from overlay_router.delivery.fetched import Fetched, FetchedFiles, manifest_of, version_of
from overlay_router.delivery.fetching import Fetching, awake
from overlay_router.local.replies import Published
from overlay_router.rules import lots
from overlay_router.rules.lots import Spool
from overlay_router.rules.states import Outcome, Result
from stageout.core.errors import ErrorClass
from stageout.movers.mover import PluginCall, Stopped
from stageout.movers.plugins_table import Plugin
from stageout.movers.results import Answer as Ended
from stageout.movers.results import Delivered, Failure
from stageout.overlay.wire import frames
from stageout.overlay.wire.egress import Target, read_targets
from stageout.overlay.wire.messages import BLOCK_BYTES, Answer, Get, Heartbeat, decode
from tests.polling import until
from tests.unit.test_overlay_custodian import Clock
from tests.unit.test_overlay_destination import home
from tests.unit.test_overlay_egress import ORIGIN, Gate, gate

__all__ = ["gate", "home"]
_KEEP_S = 60.0


class _Store:
    """The files at the destination, and plugins that fetch them. :ivar hold: they wait for that."""

    def __init__(self) -> None:
        self.content, self.calls, self.stopped = b"one", 0, 0
        self.hold = threading.Event()
        self.hold.set()

    def mover(self, batch: PluginCall) -> _Mover:
        return _Mover(self, batch)


class _Mover:
    def __init__(self, store: _Store, batch: PluginCall) -> None:
        self._store, self._batch, self._stop = store, batch, threading.Event()

    def stop(self) -> None:
        self._stop.set()

    def run(self) -> list[Ended]:
        self._store.calls += 1
        content, (cargo,) = self._store.content, self._batch.files
        self._batch.directory.mkdir()
        part = self._batch.directory / "part"
        part.write_bytes(content)
        while not self._store.hold.wait(0.005):
            if self._stop.is_set():
                self._store.stopped += 1
                raise Stopped
        if not content:
            return [Failure(ErrorClass.NOT_FOUND, "404")]
        part.rename(cargo.source)
        return [Delivered("size")]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> _Store:
    made = _Store()
    monkeypatch.setattr(fetching, "Mover", made.mover)
    monkeypatch.setattr(fetching, "_LOOK_S", 0.01)
    monkeypatch.setattr(fetching, "_COALESCE_S", 0.01)
    monkeypatch.setattr(fetching, "_GONE_S", 0.01)
    return made


def _run(home: Path, work: Callable[[Fetching], Any], room: Spool | None = None, most: int = 2) -> None:
    async def on_disk(call: Callable[[], Any]) -> Any:
        return call()

    async def equip(target: Target) -> Kit:
        return Kit(Plugin(Path("/none"), ("https",), 2), Path("/none"), 60.0, {}, None)

    async def all_of_it() -> None:
        egress: Any = SimpleNamespace(
            spool=room or Spool(1 << 30), clock=Clock(), targets=read_targets("/out=https://s.example/base"),
            delivered=lambda path: None,
        )  # fmt: skip
        one = Fetching(egress, home / "fetched", most, _KEEP_S, equip, on_disk)
        running = asyncio.create_task(one.run())
        try:
            await asyncio.wait_for(work(one), 60)
        finally:
            running.cancel()
            await asyncio.wait([running])

    asyncio.run(all_of_it())


async def _read(one: Fetching, generation: int = -1) -> tuple[bytes, int]:
    found = await one.file(Get("out/f", generation=generation), "key")
    assert isinstance(found, Published), found
    try:
        return os.pread(found.file, 100, 0), found.generation
    finally:
        os.close(found.file)


def test_nobody_gets_bytes_from_before_he_asked_but_by_their_number(store: _Store, tmp_path: Path) -> None:
    async def work(one: Fetching) -> None:
        store.hold.clear()
        early = asyncio.create_task(_read(one))
        await until(lambda: any((tmp_path / "fetched").glob("*/part")))
        store.content = b"two"
        late = [asyncio.create_task(_read(one)) for _ in range(5)]
        await asyncio.sleep(0)
        store.hold.set()
        data, version = await early
        assert data == b"one"
        assert {data for data, _ in await asyncio.gather(*late)} == {b"two"}
        assert store.calls == 2
        assert await _read(one, version) == (b"one", version)
        assert store.calls == 2, "it is kept"
        assert (await _read(one))[0] == b"two"
        assert store.calls == 3

    _run(tmp_path, work)


def test_a_key_whose_servers_are_slow_does_not_hold_up_another_one(store: _Store, tmp_path: Path) -> None:
    """It had all places but one, and whoever came behind its files waited for these."""
    store.hold.clear()

    async def work(one: Fetching) -> None:
        slow = [asyncio.create_task(one.file(Get(f"out/{number}"), "tarpit")) for number in range(5)]
        await until(lambda: store.calls == 1)
        await until(lambda: len(one._granted) == 5)
        waits = asyncio.create_task(one.file(Get("out/4"), "other"))
        await until(lambda: one._rounds["out/4"].begun)
        assert [one._rounds[f"out/{number}"].begun for number in range(5)] == [True, False, False, False, True]
        slow[1].cancel()
        await asyncio.wait([slow[1]])
        store.hold.set()
        assert {type(found) for found in await asyncio.gather(waits, slow[0], *slow[2:])} == {Published}

    _run(tmp_path, work, most=3)


def test_another_version_is_said_to_be_one(store: _Store, tmp_path: Path) -> None:
    async def work(one: Fetching) -> None:
        answer = await one.file(Get("out/f", generation=7), "key")
        assert isinstance(answer, Answer)
        assert answer.code == ErrorClass.CONFLICT.code

    _run(tmp_path, work)


@pytest.mark.parametrize("path", ["out", "out/../f"])
def test_what_is_no_file_there_is_refused(store: _Store, tmp_path: Path, path: str) -> None:
    async def work(one: Fetching) -> None:
        answer = await one.file(Get(path), "key")
        assert isinstance(answer, Answer)
        assert answer.code

    _run(tmp_path, work)
    assert not store.calls


def test_a_failure_is_told_in_the_plugins_words_and_leaves_no_lot(store: _Store, tmp_path: Path) -> None:
    spool, store.content = Spool(1 << 30), b""

    async def work(one: Fetching) -> None:
        answer = await one.file(Get("out/f"), "key")
        assert isinstance(answer, Answer)
        assert (answer.code, answer.message) == (ErrorClass.NOT_FOUND.code, "https://s.example/base: 404")
        assert not spool.lots

    _run(tmp_path, work, spool)


def test_a_file_that_finds_no_room_is_given_up(store: _Store, tmp_path: Path) -> None:
    spool, store.content = Spool(10_000), b"x" * 5000
    store.hold.clear()

    async def work(one: Fetching) -> None:
        answer = await one.file(Get("out/f"), "key")
        assert isinstance(answer, Answer)
        assert answer.code == ErrorClass.NO_SPACE_REMOTE.code
        assert "4750 bytes are for what comes back" in answer.message
        assert (store.stopped, spool.lots) == (1, {})

    _run(tmp_path, work, spool)


def test_a_plugin_for_which_nobody_waits_any_more_is_ended(store: _Store, tmp_path: Path) -> None:
    store.hold.clear()

    async def work(one: Fetching) -> None:
        mine, other = socket.socketpair()
        mine.setblocking(False)
        asking = asyncio.create_task(awake(mine, zlib.crc32, True, one.file(Get("out/f"), "key")))
        await until(lambda: store.calls == 1)
        other.close()
        with pytest.raises(ConnectionError):
            await asking
        await until(lambda: store.stopped == 1)
        mine.close()
        store.hold.set()
        assert (await _read(one))[0] == b"one"

    _run(tmp_path, work)


def test_a_router_that_stops_ends_the_plugin_that_runs_for_who_asked_before_others(
    store: _Store, tmp_path: Path
) -> None:
    store.hold.clear()
    asked: list[asyncio.Task[Any]] = []

    async def work(one: Fetching) -> None:
        asked.append(asyncio.create_task(one.file(Get("out/f"), "key")))
        await until(lambda: store.calls == 1)
        asked.append(asyncio.create_task(one.file(Get("out/f"), "key")))
        await until(lambda: not one._rounds["out/f"].begun)

    overdue = threading.Timer(30, store.hold.set)
    overdue.start()
    _run(tmp_path, work)
    overdue.cancel()
    assert store.stopped == 1


def test_who_asks_hears_it_when_the_spool_cannot_be_used(
    store: _Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "_READY_S", 0.05)

    async def work(one: Fetching) -> None:
        answer = await asyncio.wait_for(one.file(Get("out/f"), "key"), 20)
        assert isinstance(answer, Answer)
        assert answer.code == ErrorClass.SERVER_BUSY.code

    _run(tmp_path / "missing", work)


def test_a_large_file_for_which_nobody_waits_any_more_is_not_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(3 * BLOCK_BYTES))
    wanted = iter([True, False])
    with pytest.raises(OSError, match="nobody waits"):
        manifest_of(tmp_path / "f", is_wanted=lambda: next(wanted))


def test_who_waits_hears_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_GONE_S", 0.001)

    async def work() -> None:
        mine, other = socket.socketpair()
        with mine, other:
            mine.setblocking(False)
            done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            asking = asyncio.create_task(awake(mine, zlib.crc32, True, done))
            other.settimeout(0)
            data = b""
            while len(data) < frames.HEADER_BYTES + 2:
                await asyncio.sleep(0.001)
                try:
                    data += other.recv(100)
                except BlockingIOError:
                    continue
            decoder = frames.Decoder(zlib.crc32)
            decoder.feed(data)
            assert isinstance(decode(next(decoder.frames())), Heartbeat)
            done.set_result(Answer(code=1))
            assert await asking == Answer(code=1)

    asyncio.run(asyncio.wait_for(work(), 60))


@pytest.fixture
def files() -> Iterator[tuple[FetchedFiles, Spool, Clock]]:
    clock, spool = Clock(), Spool(10_000)
    yield FetchedFiles(spool, _KEEP_S, clock), spool, clock


def _kept(files: FetchedFiles, file: Path, size_bytes: int) -> Fetched:
    assert files.grow(file, size_bytes + 100)
    file.write_bytes(b"x" * size_bytes)
    made = Fetched(f"out/{file.name}", file, size_bytes, 5, 0o644)
    files.keep(made)
    return made


def test_a_copy_goes_when_nobody_reads_it_any_more(files: tuple[FetchedFiles, Spool, Clock], tmp_path: Path) -> None:
    all_of_them, spool, clock = files
    one = _kept(all_of_them, tmp_path / "f", 1000)
    assert lots.reserved_bytes(spool) == 1000
    reading = all_of_them.open(one).file
    clock.now_s += _KEEP_S + 1
    all_of_them.reap()
    assert all_of_them.find("out/f", 5) is one
    os.close(reading)
    all_of_them.reap()
    assert all_of_them.find("out/f", 5) is None
    assert (one.file.exists(), spool.lots) == (False, {})


def test_copies_leave_half_of_the_spool_and_make_room_for_others(
    files: tuple[FetchedFiles, Spool, Clock], tmp_path: Path
) -> None:
    all_of_them, spool, clock = files
    one, two = _kept(all_of_them, tmp_path / "one", 2000), _kept(all_of_them, tmp_path / "two", 2000)
    reading = all_of_them.open(two).file
    try:
        assert not all_of_them.grow(tmp_path / "three", 2500), "they were just told of"
        clock.now_s += 5
        assert all_of_them.grow(tmp_path / "three", 2500)
        assert (one.file.exists(), two.file.exists()) == (False, True)
        assert not all_of_them.grow(tmp_path / "four", 500)
        assert lots.reserve(spool, "upload", 5000, clock.now_s) is None
    finally:
        os.close(reading)


def test_a_copy_that_was_just_told_of_can_be_opened_though_none_is_kept(tmp_path: Path) -> None:
    clock = Clock()
    all_of_them = FetchedFiles(Spool(10_000), 0.0, clock)
    one = _kept(all_of_them, tmp_path / "f", 1000)
    clock.now_s += 1
    all_of_them.reap(at_once=True)
    os.close(all_of_them.open(one).file)
    clock.now_s += 3
    all_of_them.reap()
    assert not one.file.exists()


def test_a_copy_of_which_nobody_can_say_whether_it_is_read_keeps_its_room(
    files: tuple[FetchedFiles, Spool, Clock], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_of_them, spool, clock = files
    one = _kept(all_of_them, tmp_path / "f", 1000)
    clock.now_s += _KEEP_S + 1

    def none_free(*arguments: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", none_free)
        all_of_them.reap()
    assert one.file in spool.lots
    all_of_them.reap()
    assert one.file not in spool.lots


def test_what_was_delivered_is_remembered_the_newest_of_it(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "MOST_DELIVERED", 2)
    for seq, path in enumerate(("out/a", "out/b", "out/b", "out/c"), 1):
        gate.put(seq, path, b"x" * seq)
        outcome = Outcome.FAILED if seq == 2 else Outcome.DONE
        gate.one.settle((ORIGIN, seq), Result(outcome))
        if seq == 2:
            assert gate.one.entry("out/b").code == ErrorClass.NOT_SUPPORTED.code
    gate.restart()
    assert [gate.one.entry(path).sizes_bytes for path in ("out/a", "out/b", "out/c")] == [(), (3,), (4,)]
    known = gate.one.entry("out/c")
    assert "not looked up at https://s.example/base" in known.note
    (gate.home / "copy").write_bytes(b"xxxx")
    size_bytes, manifest = manifest_of(gate.home / "copy")
    assert (size_bytes, version_of(manifest)) == (4, known.generation)
