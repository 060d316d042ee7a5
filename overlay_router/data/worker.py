"""The data plane: a process without an event loop that moves blocks between sockets and files.

It is given connections by the daemon over a Unix socket (descriptors with a JSON message each) and reports blocks that
are on the disk. A thread serves each connection, with one page-aligned buffer: whole blocks go to the disk past the
page cache where the filesystem allows it (rule 16), so the memory used is one block a connection. Another one syncs.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

from overlay_router.data.ring import Left, LeftOnes, Ring, Shelf, Slot, Sums
from overlay_router.data.splice import Circuit
from overlay_router.data.tunnels import cover
from stageout.core import log
from stageout.core.sockets import acked_bytes, fill, readable, send_from, wait_at_most
from stageout.overlay.links import Claim, Tap, links
from stageout.wire import frames
from stageout.wire.blocks import PART_BYTES
from stageout.wire.frames import BadFrame, Type
from stageout.wire.overlay import BLOCK_BYTES, Found, Refuse, encode

_PAGE_BYTES = 4096
_SYNC_BYTES = 64 * 1024 * 1024
_SYNC_S = 0.2
_REPORT_BLOCKS = 512
#: Nothing came for so long: what has come is synced. The first pause is not waited for after a rest.
_QUIET_S = 0.01
_REST_S = 0.1
#: While nothing comes, so often it is looked what was sent on of what was left to be.
_LOOK_S = 0.01
_IDLE_S = 60.0
#: Whoever has got a file may ask for another one within this time.
_KEPT_S = 15.0
#: So many of a process may wait for that, each with a thread and a descriptor; who is one more connects anew.
_MOST_WAITING = 256
_waiting = threading.BoundedSemaphore(_MOST_WAITING)
#: A file of so many bytes, at most, is gone before an order could matter. What may wait unsent; a part of a block.
_UNORDERED_BYTES = 64 * 1024
_UNSENT_BYTES = 256 * 1024
_PIECE_BYTES = 128 * 1024
#: Of a block that came in more than this time, the next one is received in parts of so many bytes.
_SLOW_S, _AT_ONCE_BYTES = 0.02, 128 * 1024
_BEGINNINGS = (Type.ATTACH, Type.GET)
_DATA = (Type.BLOCK, Type.PART)
#: The interpreter's lock changes hands sooner, so that a thread that has data does not wait for one that computes.
_SWITCH_INTERVAL_S = 0.0002


@dataclass(frozen=True)
class Job:
    """What to do with a connection.

    :param kind: "receive", "send", or "relay" between two connections; "close", without any: nothing more of that
        transfer is written; "share", with the connection to a carrier: it sees what comes. :param tid: of what is
        received.
    :param size_bytes: of the file.
    :param block: the first one to send. :param blocks: how many at most, 0: all.
    :param generation: of the file that is sent. :param mode: of that file.
    :param hop: address of the router that a relay passes on to. :param peer: name of the peer's key.
    :param cert: file of the certificate, of "tls" between a connection and a plain one. :param cert_key: of its key.
    :param host: of the other side, on the side that connects: then ``cert`` has the certificates that it trusts.
    :param flow: transfer that a relay passes on, with its owner, priority and deadline; of "send" the last two count.
    :param to: address that files go to on this connection; of "relay": that comes back, and what ``flow`` says is for.
    :param nonce: of this router's WELCOME on the connection.
    """

    kind: str
    tid: int = 0
    checksum: str = "crc32"
    digest: str = ""
    block_bytes: int = 0
    size_bytes: int = 0
    block: int = 0
    generation: int = 0
    mode: int = 0
    hop: str = ""
    peer: str = ""
    cert: str = ""
    cert_key: str = ""
    host: str = ""
    blocks: int = 0
    flow: str = ""
    owner: str = ""
    priority: int = 0
    deadline: int = 0
    nonce: str = ""
    to: str = ""


@dataclass(frozen=True)
class Again:
    """What a connection is wanted for when its job is done. :param peer: name of its key. :param nonce: of its WELCOME.

    :param host: that it comes from. :param frame: the ATTACH or GET that came, in hexadecimal digits.
    """

    peer: str
    checksum: str
    digest: str
    nonce: str
    frame: str
    host: str = ""


@dataclass(frozen=True)
class Report:
    """Blocks whose bytes are on the disk: position and digest in hexadecimal digits; or why it ended; or what a relay
    has passed on to a hop; or that a connection of a peer has ended; or that nothing more of a transfer is written.

    :param parts: of blocks, on the disk too: where each begins in the file, and its length.
    :param digest: the kind that their blocks are to have.
    """

    tid: int
    blocks: tuple[tuple[int, str], ...] = ()
    parts: tuple[tuple[int, int], ...] = ()
    digest: str = ""
    problem: str = ""
    errno: int = 0
    hop: str = ""
    moved_bytes: int = 0
    ended: str = ""
    closed: bool = False


class Gate:
    """Whether a connection may still write. A file that is whole is about to get its name: late copies are dropped."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.closed = False


class Gates:
    """Those of all connections of this process, by transfer number."""

    def __init__(self) -> None:
        self._gates: dict[int, set[Gate]] = {}
        self._lock = threading.Lock()

    def add(self, tid: int) -> Gate:
        """One for a new connection."""
        gate = Gate()
        with self._lock:
            self._gates.setdefault(tid, set()).add(gate)
        return gate

    def remove(self, tid: int, gate: Gate) -> None:
        """Its connection has ended."""
        with self._lock:
            self._gates[tid].discard(gate)
            if not self._gates[tid]:
                del self._gates[tid]

    def close(self, tid: int) -> None:
        """None of this transfer writes any more when this returns."""
        with self._lock:
            gates = list(self._gates.get(tid, ()))
        for gate in gates:
            with gate.lock:
                gate.closed = True


class Syncing:
    """Brings to the disk what one connection has written, in a thread of its own, and reports it then.

    Whoever receives goes on meanwhile. It is time for that when much was written, some of it a while ago, or nothing
    more comes for the moment.

    :param digest: the kind of digests. :param report: called with each :class:`Report`.
    :param gate: once it is closed, there is nothing to be said.
    :param stop: called when the disk fails, from that thread.
    """

    def __init__(
        self, tid: int, digest: str, file: int, report: Reporter, gate: Gate, stop: Callable[[], None]
    ) -> None:
        self._tid, self._file, self._report, self._gate, self._stop = tid, file, report, gate, stop
        self._digest = digest
        self._changed = threading.Condition()
        self._blocks: list[tuple[int, str]] = []
        self._parts: list[tuple[int, int]] = []
        self._bytes = self._count = 0
        self._now = self._ended = False
        self._synced_s = -_REST_S
        self.in_a_block = False
        self.failure: OSError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wrote(self, what: tuple[int, str] | tuple[int, int], size_bytes: int, more: Callable[[], bool]) -> None:
        """A block, or a part, was written. :param what: as in a :class:`Report`.

        :param more: whether something comes behind it already.
        """
        idle = time.monotonic() - self._synced_s > _REST_S and not more()
        with self._changed:
            if isinstance(what[1], str):
                self._blocks.append((what[0], what[1]))
            else:
                self._parts.append((what[0], what[1]))
            self._bytes += size_bytes
            self._count += 1
            waiting = len(self._blocks) + len(self._parts)
            due = idle or self._bytes >= _SYNC_BYTES or waiting >= _REPORT_BLOCKS
            if waiting == 1 or (due and not self._now):
                self._now = due
                self._changed.notify_all()

    def finish(self) -> None:
        """Sync and report the rest. :raises OSError: the disk has failed."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            while self._wait():
                self._sync()
        except OSError as problem:
            self.failure = problem
            self._stop()

    def _wait(self) -> bool:
        """Until it is time; False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._blocks or self._parts or self._ended)
            until_s, seen = time.monotonic() + _SYNC_S, 0
            while not (self._now or self._ended or time.monotonic() > until_s):
                if seen == self._count and not self.in_a_block:
                    break
                seen = self._count
                self._changed.wait(_QUIET_S)
            return bool(self._blocks or self._parts)

    def _sync(self) -> None:
        with self._changed:
            blocks, self._blocks = tuple(self._blocks), []
            parts, self._parts = tuple(self._parts), []
            self._bytes, self._now = 0, False
        if self._gate.closed:
            return  # all of it is known to be on the disk
        os.fdatasync(self._file)
        self._synced_s = time.monotonic()
        self._report(Report(self._tid, blocks, parts, self._digest))


class Receiver:
    """BLOCK frames of one transfer from one connection into its staging file.

    One thread receives, checks and writes block after block, so a block stays in one processor's cache; several
    connections keep network and disk busy at once. Another thread syncs.
    Blocks that may be passed (:mod:`overlay_router.data.ring`) are written only if they were not sent on in time.

    :param report: called with each :class:`Report`. :param gate: closed when nothing may be written any more.
    :param shelf: where whoever sends blocks on sees them, if anybody wants that.
    :ivar again: the frame behind the last block, if the connection is wanted for something else now.
    """

    def __init__(
        self, job: Job, connection: socket.socket, file: int, report: Reporter, gate: Gate, shelf: Shelf | None = None
    ) -> None:
        self._job, self._connection, self._file = job, connection, file
        self._shelf = shelf if shelf is not None and job.block_bytes == BLOCK_BYTES else None
        self._block_s = 0.0
        self._left = LeftOnes(self._store)
        self._checksum = frames.checksums()[job.checksum]
        self._sums = frames.sums(job.checksum, job.digest)
        self._header = memoryview(bytearray(frames.HEADER_BYTES))
        self._buffer = memoryview(mmap.mmap(-1, -(-job.block_bytes // _PAGE_BYTES) * _PAGE_BYTES))
        self._direct = _direct(file)
        self._gate = gate
        self.again = b""
        self._syncing = Syncing(job.tid, job.digest, file, report, gate, self._stop)

    def run(self) -> None:
        """Receive until the sender closes; what came is synced and reported whatever happens."""
        try:
            while self._block():
                pass
        finally:
            try:
                self._left.end()
            finally:
                if self._direct >= 0:
                    os.close(self._direct)
                self._syncing.finish()

    def _block(self) -> bool:
        """One block into the file; False at the end."""
        while self._left and not readable([self._connection.fileno()], _LOOK_S):
            self._left.keep_late()
        if self._syncing.failure is not None or not fill(self._connection, self._header):
            return False
        self._syncing.in_a_block = True
        header = frames.decode_header(self._header, self._checksum)
        if header.type in _BEGINNINGS:
            self.again = _whole(self._connection, self._header, header)
            return False
        if header.type not in _DATA or header.number != self._job.tid:
            raise BadFrame("only blocks of the transfer that was attached may come here")
        self._left.keep_late()
        if header.type is Type.PART:
            self._part(header, self._buffer[: self._checked(header.block, header.length_bytes)])
            self._syncing.in_a_block = False
            return True
        if header.length_bytes != self._length(header.block):
            raise BadFrame(f"block {header.block} has {header.length_bytes} bytes")
        ring = self._shelf.ring if self._shelf else None
        slot = ring.take(self._job.tid, self._block_s) if ring else None
        began_s, passes = time.monotonic(), False
        try:
            passes = self._payload(header, (slot.view if slot else self._buffer)[: header.length_bytes], ring, slot)
        finally:
            if ring and slot and not passes:
                ring.leave(slot)
        self._block_s = time.monotonic() - began_s
        self._syncing.in_a_block = False
        return True

    def _part(self, header: frames.Header, data: memoryview) -> None:
        """A part of a block: its digest is found when all parts are there, which may come by other connections."""
        self._came(data, header)
        with self._gate.lock:
            if not self._gate.closed:
                self._write(data, header.block)
                self._syncing.wrote((header.block, len(data)), len(data), self._more)

    def _checked(self, start: int, size_bytes: int) -> int:
        """The length of a part that begins there in the file. :raises BadFrame: there is no such part."""
        end, block = start + size_bytes, start // self._job.block_bytes
        last = block * self._job.block_bytes + self._length(block)
        if start % PART_BYTES or not start < end <= last or (end % PART_BYTES and end != last):
            raise BadFrame(f"a part of {size_bytes} bytes at {start} is none of a block")
        return size_bytes

    def _came(self, data: memoryview, header: frames.Header) -> bytes:
        """Read what the header announces; its digest. :raises BadFrame: it does not fit."""
        if not fill(self._connection, data, _AT_ONCE_BYTES if self._block_s > _SLOW_S else 1):
            raise BadFrame("the connection ended in a block")
        checksum, digest = self._sums(data)
        if checksum != header.checksum:
            raise BadFrame(f"block {header.block} does not fit its checksum")
        return digest

    def _payload(self, header: frames.Header, data: memoryview, ring: Ring | None, slot: Slot | None) -> bool:
        """Whether the block is left to whoever sends it on."""
        digest = self._came(data, header)
        if ring and slot and not self._gate.closed:  # it leaves while it is written, or instead
            ring.offer(slot, header.block, len(data), Sums(digest, self._job.checksum, header.checksum))
            if slot.passes:
                self._left.add(Left(ring, slot, header.block, data, digest, time.monotonic()))
                return True
        self._store(header.block, data, digest)
        return False

    def _store(self, block: int, data: memoryview, digest: bytes) -> None:
        with self._gate.lock:
            if not self._gate.closed:
                self._write(data, block * self._job.block_bytes)
                self._syncing.wrote((block, digest.hex()), len(data), self._more)

    def _length(self, block: int) -> int:
        left = self._job.size_bytes - block * self._job.block_bytes
        if left <= 0:
            raise BadFrame(f"block {block} lies behind the end of the file")
        return min(left, self._job.block_bytes)

    def _write(self, data: memoryview, offset: int) -> None:
        aligned = len(data) % _PAGE_BYTES == 0 and offset % _PAGE_BYTES == 0
        descriptor = self._direct if aligned and self._direct >= 0 else self._file
        while data:
            written = os.pwrite(descriptor, data, offset)
            data, offset = data[written:], offset + written

    def _more(self) -> bool:
        return bool(readable([self._connection.fileno()], 0))

    def _stop(self) -> None:
        """Wake whoever receives: the disk fails."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RD)


@contextlib.contextmanager
def _ordered(job: Job, connection: socket.socket) -> Iterator[Tap | None]:
    """The tap that a file passes, in a lane of all that the same address gets; None: it is too small for an order."""
    if job.size_bytes <= _UNORDERED_BYTES or not job.to:
        yield None
        return
    if connection.family != socket.AF_UNIX:  # what waits in the kernel is ordered no more
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    before = acked_bytes(connection) or 0

    def acked() -> int | None:
        told = acked_bytes(connection)
        return None if told is None else max(0, told - before)

    with links().lane(job.to, Claim("", job.peer, job.priority, job.deadline)) as lane:
        yield lane.tap(acked)


def send_file(job: Job, connection: socket.socket, file: int) -> None:
    """FOUND and the blocks of a file, in order."""
    checksum = frames.checksums()[job.checksum]
    found = Found(job.size_bytes, job.block_bytes, job.generation, job.mode)
    connection.sendall(encode(found, checksum))
    buffer = memoryview(mmap.mmap(-1, job.block_bytes))
    end = -(-job.size_bytes // job.block_bytes)
    with _ordered(job, connection) as tap:
        for block in range(job.block, min(end, job.block + job.blocks) if job.blocks else end):
            offset = block * job.block_bytes
            data = buffer[: min(job.block_bytes, job.size_bytes - offset)]
            if os.preadv(file, [data], offset) != len(data):
                connection.sendall(encode(Refuse("the file became shorter while it was sent"), checksum))
                return
            head = frames.encode_header(Type.BLOCK, data, checksum, 0, block)
            # where others need the link more it leaves in pieces, so that it can be stopped in the middle
            piece_bytes = _PIECE_BYTES if tap is not None and tap.held else len(data)
            for start in range(0, len(data), piece_bytes):
                piece = data[start : start + piece_bytes]
                if tap is not None:
                    tap.take(len(piece))
                send_from(connection, head, file, offset + start, piece)
                head = b""


def _wanted_again(job: Job, connection: socket.socket) -> bytes:
    """The frame that a peer sends when it has its file and wants another one; b"" when none comes, or many wait."""
    if not _waiting.acquire(blocking=False):
        return b""
    try:
        return _next_frame(job, connection)
    finally:
        _waiting.release()


def _next_frame(job: Job, connection: socket.socket) -> bytes:
    checksum, head = frames.checksums()[job.checksum], memoryview(bytearray(frames.HEADER_BYTES))
    wait_at_most(connection, _KEPT_S)
    with contextlib.suppress(OSError):  # it has gone, or is silent: nothing is owed to it
        if fill(connection, head):
            return _whole(connection, head, frames.decode_header(head, checksum))
    return b""


def _whole(connection: socket.socket, head: memoryview, header: frames.Header) -> bytes:
    """A frame that begins something on a connection. :raises BadFrame: it begins nothing."""
    if header.type not in _BEGINNINGS or header.length_bytes > frames.MAX_GREETING_BYTES:
        raise BadFrame(f"{header.type.name} of {header.length_bytes} bytes where ATTACH or GET was due")
    payload = bytearray(header.length_bytes)
    if not fill(connection, memoryview(payload)):
        raise BadFrame("the connection ended in a frame")
    return bytes(head) + payload


class Reporter:
    """Reports of all threads to the daemon, one message each."""

    def __init__(self, daemon: socket.socket) -> None:
        self._daemon, self._lock = daemon, threading.Lock()

    def __call__(self, report: Report) -> None:
        """Send one; the daemon records it before it tells the sender. Without a daemon this process is about to end."""
        with self._lock, contextlib.suppress(ConnectionError):
            self._daemon.send(json.dumps(asdict(report)).encode())

    def give_back(self, connection: socket.socket, again: Again) -> None:
        """The daemon decides what becomes of a connection now."""
        with self._lock, contextlib.suppress(ConnectionError):
            socket.send_fds(self._daemon, [json.dumps({"again": asdict(again)}).encode()], [connection.fileno()])


def serve(job: Job, connection: socket.socket, file: int, report: Reporter, gate: Gate, shelf: Shelf) -> bytes:
    """One job to its end; what goes wrong is told to the peer and the daemon.

    :return: the frame behind it, if the connection is wanted for something else now.
    """
    if job.kind == "relay":
        with connection, socket.socket(fileno=file) as far:
            moved = partial(_moved, report, job.hop)
            claim, target = Claim(job.flow, job.owner, job.priority, job.deadline), connection if job.to else far
            with links().lane(job.to or job.hop, claim) as lane:
                take = lane.tap(partial(acked_bytes, target)).take
                Circuit(connection, far, moved=moved, take=take, back=bool(job.to)).run()
        return b""
    if job.kind == "tls":
        told = partial(_problem, report)
        cover(connection, socket.socket(fileno=file), job.cert, job.cert_key, job.host, told)
        return b""
    try:
        try:
            wait_at_most(connection, _IDLE_S)
            if job.kind == "receive":
                receiver = Receiver(job, connection, file, report, gate, shelf)
                receiver.run()
                return receiver.again
            send_file(job, connection, file)
        finally:
            os.close(file)  # a file that was deleted meanwhile takes no room while the connection waits for another
        return _wanted_again(job, connection)
    except (BadFrame, OSError) as problem:
        if gate.closed:
            return b""  # the sender knows that all is here, and drops the rest
        if isinstance(problem, BlockingIOError):
            problem = TimeoutError(f"nothing moved for {_IDLE_S:.0f} s")
        report(Report(job.tid, problem=str(problem), errno=getattr(problem, "errno", 0) or 0))
        with contextlib.suppress(OSError):
            connection.sendall(encode(Refuse(str(problem), 1), frames.checksums()[job.checksum]))
        return b""


def _serve_to_its_end(
    job: Job, connection: socket.socket, file: int, report: Reporter, gate: Gate, gates: Gates, shelf: Shelf
) -> None:
    with connection:
        again = b""
        try:
            again = serve(job, connection, file, report, gate, shelf)
        finally:
            gates.remove(job.tid, gate)
            report(Report(0, ended=job.peer))
        if again:
            report.give_back(connection, Again(job.peer, job.checksum, job.digest, job.nonce, again.hex(), job.to))


def _problem(report: Reporter, problem: str) -> None:
    report(Report(0, problem=problem))


def _moved(report: Reporter, hop: str, size_bytes: int) -> None:
    report(Report(0, hop=hop, moved_bytes=size_bytes))


def main(argv: list[str]) -> None:
    """Serve connections until the daemon goes away. ``argv[1]`` is the descriptor of its socket."""
    log.open_log(None)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a circuit takes six
    daemon = socket.socket(fileno=int(argv[1]))
    report, gates, shelf = Reporter(daemon), Gates(), Shelf()
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(daemon, 65536, 2)
        except ConnectionError:  # it was killed, and left reports unread
            message, descriptors = b"", []
        if not message:
            log.warn("worker-ends", reason="the daemon has ended")
            return
        job = Job(**json.loads(message))
        if job.kind == "close":
            gates.close(job.tid)
            report(Report(job.tid, closed=True))
            continue
        if job.kind == "share":
            for descriptor in descriptors:
                shelf.connect(socket.socket(fileno=descriptor))
            continue
        if len(descriptors) < 2:  # the kernel drops what does not fit; whoever sends comes again
            for descriptor in descriptors:
                os.close(descriptor)
            words = "a worker has as many descriptors as it may: allow more (ulimit -n), or have more workers"
            report(Report(job.tid, problem=words, errno=errno.EMFILE))
            report(Report(0, ended=job.peer))
            continue
        connection = socket.socket(fileno=descriptors[0])
        arguments = (job, connection, descriptors[1], report, gates.add(job.tid), gates, shelf)
        threading.Thread(target=_serve_to_its_end, args=arguments, daemon=True).start()


def _direct(file: int) -> int:
    """The same file past the page cache, -1 where the filesystem does not allow it."""
    try:
        return os.open(f"/proc/self/fd/{file}", os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return -1


if __name__ == "__main__":
    main(sys.argv)
