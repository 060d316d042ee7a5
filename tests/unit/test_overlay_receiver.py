"""Blocks from a connection into a file, and disks that fail on the way."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import queue
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, cast
from unittest.mock import Mock

import pytest
import trustme

from overlay_router.data import pool as pool_module
from overlay_router.data import sending, splice, tunnels, worker
from overlay_router.data.jobs import Job, Report
from overlay_router.data.receiving import Gate, Gates, Receiver, Syncing
from overlay_router.data.ring import Lend, Piece, Rings, Shelf
from overlay_router.data.splice import Circuit
from overlay_router.data.worker import Reporter
from overlay_router.local.parts import Parts
from overlay_router.local.replies import Attached
from overlay_router.local.store import Transfer
from stageout.core.sockets import readable
from stageout.overlay import tcp
from stageout.overlay.book import Book
from stageout.overlay.links import Links
from stageout.overlay.tcp import wait_at_most
from stageout.overlay.wire import frames, messages
from stageout.overlay.wire.blocks import PART_BYTES
from stageout.overlay.wire.frames import BadFrame, Type
from stageout.overlay.wire.messages import BLOCK_BYTES, Open
from tests.harness.pool.waiting import wait_until
from tests.polling import until

BLOCK = 4096
COUNT = 40
CONTENT = os.urandom(COUNT * BLOCK - 5)
CHECKSUM, DIGEST = next(iter(frames.checksums())), next(iter(frames.digests()))


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        wait_at_most(other, 20)
        yield one, other


def _send(sock: socket.socket) -> None:
    checksum = frames.checksums()[CHECKSUM]
    try:
        for block in range(COUNT):
            data = CONTENT[block * BLOCK : (block + 1) * BLOCK]
            sock.sendall(frames.encode_header(Type.BLOCK, data, checksum, 7, block) + data)
        sock.shutdown(socket.SHUT_WR)
    except OSError:
        return


def _receive(ends: tuple[socket.socket, socket.socket], file: int, gate: Gate | None = None) -> list[Report]:
    reports: list[Report] = []
    job = Job("receive", 7, CHECKSUM, DIGEST, BLOCK, len(CONTENT))
    sender = threading.Thread(target=_send, args=ends[:1])
    sender.start()
    report: Any = reports.append
    try:
        Receiver(job, ends[1], file, report, gate or Gate()).run()
    finally:
        ends[1].close()
        sender.join(20)
    return reports


def test_all_blocks_are_written_synced_and_reported(ends: tuple[Any, Any], tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        reports = _receive(ends, file.fileno())
    assert (tmp_path / "file").read_bytes() == CONTENT
    said = dict(pair for report in reports for pair in report.blocks)
    digest = frames.digests()[DIGEST]
    assert said == {n: digest(CONTENT[n * BLOCK : (n + 1) * BLOCK]).hex() for n in range(COUNT)}


MIB = 1 << 20
LONG = os.urandom(2 * MIB + 3 * PART_BYTES + 77)


def _receive_parts(tmp_path: Path, parts: list[tuple[int, int]]) -> list[Report]:
    """:param parts: where each begins in the file, and ends."""
    one, other = socket.socketpair()
    reports: list[Report] = []
    checksum, report = frames.checksums()[CHECKSUM], cast(Any, reports.append)
    data = [(start, LONG[start:end]) for start, end in parts]
    sent = b"".join(frames.encode_header(Type.PART, part, checksum, 7, start) + part for start, part in data)

    def send() -> None:
        with contextlib.suppress(OSError):  # who does not like it closes the connection
            one.sendall(sent)
            one.shutdown(socket.SHUT_WR)

    with one, other, (tmp_path / "file").open("r+b" if (tmp_path / "file").exists() else "w+b") as file:
        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        Receiver(Job("receive", 7, CHECKSUM, DIGEST, MIB, len(LONG)), other, file.fileno(), report, Gate()).run()
        sender.join(60)
    return reports


def test_parts_by_any_connection_make_blocks(tmp_path: Path) -> None:
    edges = [*range(0, len(LONG), 2 * PART_BYTES), len(LONG)]
    parts = list(zip(edges, edges[1:]))
    random.Random(1).shuffle(parts)
    whole: dict[int, str] = {}
    kept = Parts()
    for some in (parts[::3], parts[1::3], parts[2::3]):
        for report in _receive_parts(tmp_path, some):
            for _ in range(2):  # the database was full the first time
                descriptor = os.open(tmp_path / "file", os.O_WRONLY)
                ask = Open("0" * 32, 1, "f", len(LONG), MIB, 99)
                found = kept.put_together(report, Attached(Transfer(7, "site", ask), descriptor))
                assert found.parts == report.parts and not report.blocks
                whole.update(found.blocks)
    digest = frames.digests()[DIGEST]
    assert (tmp_path / "file").read_bytes() == LONG
    assert whole == {n: digest(LONG[n * MIB : (n + 1) * MIB]).hex() for n in range(3)}


@pytest.mark.parametrize(
    ("start", "end"),
    [(5, PART_BYTES), (0, PART_BYTES - 1), (MIB - PART_BYTES, MIB + PART_BYTES), (0, 0), (3 * MIB, 3 * MIB + 1)],
)
def test_what_is_no_part_of_a_block_ends_the_connection(tmp_path: Path, start: int, end: int) -> None:
    with pytest.raises(BadFrame):
        _receive_parts(tmp_path, [(start, end)])
    assert (tmp_path / "file").read_bytes() == b""


def test_behind_a_closed_gate_nothing_is_written(ends: tuple[Any, Any], tmp_path: Path) -> None:
    gate = Gate()
    gate.closed = True
    with (tmp_path / "file").open("w+b") as file:
        assert _receive(ends, file.fileno(), gate) == []
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_what_was_written_and_not_reported_is_told_to_who_closes_the_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_on_disk: bool
) -> None:
    """A block that was written over just then would go by the digest that it had before."""
    begun, goes_on, gates, reports = threading.Event(), threading.Event(), Gates(), list[Report]()

    def fdatasync(file: int) -> None:
        begun.set()
        assert goes_on.wait(60)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    one, other = socket.socketpair()
    with one, other, (tmp_path / "file").open("w+b") as file:
        gate = gates.add(7, one)
        syncing = Syncing(7, DIGEST, file.fileno(), reports.append, gate, lambda: None)
        syncing.wrote((0, "aa"), 1, lambda: False)
        assert begun.wait(60)
        syncing.wrote((1, "bb"), 1, lambda: True)
        syncing.wrote((2 * PART_BYTES, PART_BYTES), 1, lambda: True)
        if is_on_disk:
            goes_on.set()
            syncing.finish()
        late = gates.close(7)
        goes_on.set()
        syncing.finish()
        gates.remove(7, gate)
    all_of_them = Report(7, ((0, "aa"), (1, "bb")), ((2 * PART_BYTES, PART_BYTES),), DIGEST, late=True)
    assert late == ([] if is_on_disk else [all_of_them])
    said = [*(pair for report in reports for pair in report.blocks)]
    assert said == ([(0, "aa"), (1, "bb")] if is_on_disk else [])


def test_a_disk_that_cannot_be_written_ends_it(ends: tuple[Any, Any], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    file = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        with pytest.raises(OSError):
            _receive(ends, file)
    finally:
        os.close(file)


def test_what_was_not_synced_is_not_reported(
    ends: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(file: int) -> NoReturn:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "fdatasync", fails)
    with (tmp_path / "file").open("w+b") as file, pytest.raises(OSError, match="input/output"):
        _receive(ends, file.fileno())


def test_what_came_is_reported_although_the_connection_stays_open(ends: tuple[Any, Any], tmp_path: Path) -> None:
    checksum = frames.checksums()[CHECKSUM]
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()
    job = Job("receive", 7, CHECKSUM, DIGEST, BLOCK, len(CONTENT))
    report: Any = said.put
    with (tmp_path / "file").open("w+b") as file:
        receiver = Receiver(job, ends[1], file.fileno(), report, Gate())
        receiving = threading.Thread(target=receiver.run)
        receiving.start()
        seen: set[int] = set()
        for block in range(3):
            data = CONTENT[block * BLOCK : (block + 1) * BLOCK]
            ends[0].sendall(frames.encode_header(Type.BLOCK, data, checksum, 7, block) + data)
        while len(seen) < 3:
            seen.update(block for block, _ in said.get(timeout=60).blocks)
        ends[0].shutdown(socket.SHUT_WR)
        receiving.join(60)


def test_what_is_gathered_arrives_to_its_last_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receive call that has copied some waits for as much again in the kernel, and so for ever at the end."""
    data = os.urandom(300_000)
    for first, silent_s in ((100_000, 60.0), (1, 0.0), (299_999, 60.0)):
        monkeypatch.setattr(tcp, "_GATHER_S", silent_s)  # 0: the slowest of connections
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
            far = server.accept()[0]
            near.sendall(data[:first])
            got = bytearray(len(data))
            reading = threading.Thread(target=tcp.fill, args=(far, memoryview(got), 128 * 1024), daemon=True)
            reading.start()
            while Path(f"/proc/self/task/{reading.native_id}/stat").read_text().rpartition(")")[2].split()[0] != "S":
                reading.join(0.001)
            near.sendall(data[first:] + b"next")
            reading.join(60)
            assert bytes(got) == data
            assert far.recv(10) == b"next", "what is behind it is not waited for"
            assert far.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
            near.close()
            assert not tcp.fill(far, memoryview(got), 128 * 1024)
            far.close()


def test_a_peer_that_falls_silent_is_not_waited_for_for_ever(ends: tuple[Any, Any]) -> None:
    wait_at_most(ends[1], 0.02)
    with pytest.raises(BlockingIOError):
        ends[1].recv(1)


def test_a_block_of_another_transfer_ends_it(ends: tuple[Any, Any], tmp_path: Path) -> None:
    job = Job("receive", 8, CHECKSUM, DIGEST, BLOCK, len(CONTENT))
    threading.Thread(target=_send, args=ends[:1], daemon=True).start()
    nobody: Any = pytest.fail
    with (tmp_path / "file").open("w+b") as file, pytest.raises(BadFrame):
        Receiver(job, ends[1], file.fileno(), nobody, Gate()).run()


def test_a_worker_that_may_open_no_more_goes_on(tmp_path: Path) -> None:
    mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.settimeout(60)
    command = [sys.executable, "-m", "overlay_router.data.worker", str(other.fileno())]
    with mine, subprocess.Popen(command, pass_fds=[other.fileno()]) as worker:
        other.close()
        try:
            mine.send(json.dumps(asdict(Job("close", 7))).encode())
            assert json.loads(mine.recv(65536))["closed"]
            used = {int(one.name) for one in Path(f"/proc/{worker.pid}/fd").iterdir()}
            least = next(number for number in range(1 << 16) if number not in used)
            resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, (least + 1, least + 1))
            connection, far = socket.socketpair()
            far.settimeout(60)
            with connection, far, (tmp_path / "f").open("wb") as file:
                words = json.dumps(asdict(Job("receive", 7, peer="site"))).encode()
                socket.send_fds(mine, [words], [connection.fileno(), file.fileno()])
                connection.close()
                assert json.loads(mine.recv(65536))["errno"] == errno.EMFILE
                assert json.loads(mine.recv(65536))["ended"] == "site"
                assert far.recv(1) == b""
        finally:
            worker.kill()


def test_a_worker_whose_daemon_was_killed_ends_without_ado() -> None:
    mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "overlay_router.data.worker", str(other.fileno())]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, pass_fds=[other.fileno()], stderr=pipe, text=True) as worker:
        other.close()
        try:
            mine.send(json.dumps(asdict(Job("close", 7))).encode())
            readable([mine.fileno()], 60)
            mine.close()  # with a report that nobody has read: that resets the connection
            _, said = worker.communicate(timeout=60)
        finally:
            worker.kill()
    assert "Traceback" not in said and "the daemon has ended" in said
    assert worker.returncode == 0


@pytest.mark.parametrize("counts", [(20_000, 0), (0, 40_000), (513, 20_000), (0, 0)])
def test_what_came_while_the_disk_was_slow_is_reported_in_messages_that_can_be_sent(counts: tuple[int, int]) -> None:
    """A socket refuses longer ones, which counted as a failure of the disk."""
    blocks = tuple((2**53 + number, "f" * 32) for number in range(counts[0]))
    parts = tuple((2**53 + number * PART_BYTES, PART_BYTES) for number in range(counts[1]))
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, ThreadPoolExecutor() as pool:
        told = pool.submit(lambda: list(iter(lambda: one.recv(pool_module._MESSAGE_BYTES), b"")))
        with other:
            Reporter(other)(Report(7, blocks, parts, DIGEST, late=True))
    found = [Report(**json.loads(message)) for message in told.result()]
    assert [tuple(block) for report in found for block in report.blocks] == list(blocks)
    assert [tuple(part) for report in found for part in report.parts] == list(parts)
    assert {(report.tid, report.digest, report.late) for report in found} == {(7, DIGEST, True)}
    assert max(len(json.dumps(asdict(report))) for report in found) < 64 * 1024


def test_a_report_that_nobody_reads_any_more_is_no_fault() -> None:
    mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with other:
        mine.close()
        Reporter(other)(Report(7))


def test_a_circuit_without_pipes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    (near, one), (far, two) = socket.socketpair(), socket.socketpair()

    def none_left() -> NoReturn:
        raise OSError(errno.EMFILE, "too many")

    with near, one, far, two:
        circuit = Circuit(one, two)
        monkeypatch.setattr(os, "pipe", none_left)
        circuit.run()
        near.settimeout(20)
        assert near.recv(1) == b""


def test_on_a_slow_uplink_the_pipes_of_a_circuit_stay_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes_bytes: list[int] = []
    monkeypatch.setattr(splice, "_widen", lambda pipe, size_bytes: sizes_bytes.append(size_bytes))
    (near, one), (far, two) = socket.socketpair(), socket.socketpair()
    with near, one, far, two:
        near.shutdown(socket.SHUT_WR)
        far.shutdown(socket.SHUT_WR)
        Circuit(one, two, turn=Mock(piece_bytes=8192)).run()
        assert not sizes_bytes, "with room for two packets they would go on one by one, as if these were messages"


class _Download:
    """A file of many blocks, or what a relay passes back, to one address; it is read a little at a time."""

    def __init__(self, kind: str, file: Path, priority: int) -> None:
        self._client, here = socket.socketpair()
        wait_at_most(self._client, 20)
        size_bytes = file.stat().st_size
        job = Job(
            kind, 0, CHECKSUM, DIGEST, 1 << 20, size_bytes, hop="far:1", peer="key", priority=priority, to="10.0.0.9"
        )
        descriptor = os.open(file, os.O_RDONLY)
        if kind == "relay":
            source, far = socket.socketpair()
            os.close(descriptor)
            descriptor = far.detach()
            self._begin(_endless, source)
        self._begin(worker.serve, job, here, descriptor, _to_nobody, Gate(), Shelf())
        self._begin(self._read)

    def _begin(self, what: Any, *arguments: Any) -> None:
        threading.Thread(target=what, args=arguments, daemon=True).start()

    def _read(self) -> None:
        try:
            while self._client.recv(64 * 1024):
                time.sleep(0.002)
        except OSError:
            pass

    def stop(self) -> None:
        self._client.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("many", [False, True])
def test_who_waits_for_another_file_holds_the_one_before_no_more_and_there_are_not_too_many(
    many: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The space of a file that was deleted meanwhile came free only when the last of them had gone."""
    (tmp_path / "file").write_bytes(b"data")
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    client, here = socket.socketpair()
    waits = threading.Event()

    def next_frame(job: Job, connection: socket.socket) -> bytes:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
        waits.set()
        return b"frame"

    monkeypatch.setattr(worker, "_next_frame", next_frame)
    monkeypatch.setattr(worker, "_waiting", threading.BoundedSemaphore(1))
    with client, here:
        if many:
            worker._waiting.acquire()
        job = Job("send", 0, CHECKSUM, DIGEST, 1 << 20, 4)
        again = worker.serve(job, here, descriptor, _to_nobody, Gate(), Shelf())  # type: ignore[arg-type]
    assert (again, waits.is_set()) == ((b"", False) if many else (b"frame", True))


def test_who_greets_late_hears_why_there_is_no_tls(tmp_path: Path) -> None:
    """On a busy machine the handshake had failed, and the plain end was closed, before the greeting was sent."""
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    connection, stranger = socket.socketpair()
    mine, plain = socket.socketpair()
    stranger.close()
    told: list[str] = []
    arguments = (connection, plain, str(tmp_path / "ca.pem"), "", "127.0.0.1", told.append)
    covering = threading.Thread(target=tunnels.cover, args=arguments)
    covering.start()
    with mine:
        wait_at_most(mine, 30)
        assert mine.recv(1, socket.MSG_PEEK)
        covering.join(0.2)
        mine.sendall(b"a greeting")
        (frame,) = _frames(mine)
        assert isinstance(refused := messages.decode(frame), messages.Refuse) and "TLS with it" in refused.message
    covering.join(30)
    assert told and not covering.is_alive()


def _frames(mine: socket.socket) -> list[frames.Frame]:
    decoder, found = frames.Decoder(), list[frames.Frame]()
    while data := mine.recv(65536):
        decoder.feed(data)
        found += decoder.frames()
    return found


def _to_nobody(report: Report) -> None:
    pass


def _endless(source: socket.socket) -> None:
    try:
        while True:
            source.sendall(b"x" * 65536)
    except OSError:
        source.close()


@pytest.mark.parametrize("kind", ["send", "relay"])
def test_a_download_makes_way_for_a_more_urgent_one(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = Links(Book())
    for module in (worker, sending):
        monkeypatch.setattr(module, "links", lambda: here)
    file = tmp_path / "file"
    with file.open("wb") as made:
        made.truncate(1 << 36)
    downloads = [_Download(kind, file, priority) for priority in (0, 9)]

    def wait_until(lanes: set[int], held: bool) -> None:
        until_s = time.monotonic() + 60
        while True:
            limits = {lane.claim.priority: lane.limit for lane in list(here._lanes.values())}
            if set(limits) == lanes and (limits.get(0) is not None) is held:
                return
            assert time.monotonic() < until_s, limits
            time.sleep(0.005)

    try:
        wait_until({0, 9}, held=True)
        downloads[1].stop()
        wait_until({0}, held=False)
    finally:
        downloads[0].stop()
    wait_until(set(), held=False)


def test_of_what_is_passed_only_that_is_written_which_was_not_sent_on(
    ends: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    shelf, rings, kept = Shelf(), Rings(), []
    control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening = threading.Thread(target=rings.listen, args=(other,))
    listening.start()
    mine, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    socket.send_fds(control, [b"\0"], [far.fileno()])
    far.close()
    shelf.connect(mine)
    ring = shelf.ring
    assert ring is not None

    class Follows:
        def shown(self, piece: Piece) -> bool:
            if piece.block in (0, 3):
                piece.free(True)
            if piece.block == 2:
                kept.append(piece)
            return piece.block != 1

        def asked(self, lend: Lend) -> None:
            """Nothing is lent."""

    rings.want(7, Follows(), passes=True)
    wait_until(lambda: 7 in ring._wanted, what="the ring to hear of it")
    data = [os.urandom(BLOCK_BYTES) for _ in range(4)]

    def send() -> None:
        for block, content in enumerate(data):
            header = frames.encode_header(Type.BLOCK, content, frames.checksums()[CHECKSUM], 7, block)
            ends[0].sendall(header + content)
        wait_until(lambda: len(kept) == 1 and len(ring._busy) == 1, what="two to be sent, and one to be declined")
        ends[0].shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    sender.start()
    reports: Any = []
    with (tmp_path / "file").open("w+b") as file, control, other:
        job = Job("receive", 7, CHECKSUM, DIGEST, BLOCK_BYTES, 4 * BLOCK_BYTES)
        Receiver(job, ends[1], file.fileno(), reports.append, Gate(), shelf).run()
        sender.join(20)
        control.close()
        listening.join(20)
    written = (tmp_path / "file").read_bytes()
    assert written == bytes(BLOCK_BYTES) + data[1] + data[2]
    assert sorted(block for report in reports for block, _ in report.blocks) == [1, 2]


def test_a_worker_that_stands_still_holds_up_no_file_that_others_receive(tmp_path: Path) -> None:
    async def run() -> None:
        pool = pool_module.Pool(2, lambda report: None, lambda again, sock: None)
        busy, still = pool._workers
        near, far = socket.socketpair()
        file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)

        async def give(tid: int) -> None:
            await until(lambda: not busy.is_behind, "what goes on to read what it was given")
            pool.give(Job("receive", tid, CHECKSUM, DIGEST, BLOCK, len(CONTENT), peer="key"), near, file)

        try:
            await until(lambda: not still.is_behind)
            os.kill(still.pid, signal.SIGSTOP)
            with near, far:
                await give(7)
                await give(8)
                assert (busy.jobs["key"], still.jobs["key"]) == (1, 1), "nothing is known of it before"
                for _ in range(3):
                    await give(7)
                assert (busy.jobs["key"], still.jobs["key"]) == (4, 1)
                assert await asyncio.wait_for(pool.no_more(7), 60) == []
                assert busy._receiving[7], "it was asked"
            await until(lambda: not busy._receiving and not busy.jobs)
        finally:
            os.close(file)
            pool.close()

    asyncio.run(run())
