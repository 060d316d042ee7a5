"""Blocks that come in by a connection, into the file that gathers them; what is on the disk is reported."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable

from overlay_router.data.jobs import Job, Report
from overlay_router.data.loans import Loans
from overlay_router.data.ring import Left, LeftOnes, Ring, Shelf, Slot, Sums
from stageout.core.sockets import readable
from stageout.core.threads import started
from stageout.overlay.tcp import fill
from stageout.overlay.wire import frames
from stageout.overlay.wire.blocks import PART_BYTES
from stageout.overlay.wire.frames import BadFrame, Header, Type
from stageout.overlay.wire.messages import BLOCK_BYTES

_PAGE_BYTES = 4096
_SYNC_BYTES = 64 * 1024 * 1024
_SYNC_S = 0.2
_REPORT_BLOCKS = 512
#: Nothing came for so long: what has come is synced. The first pause is not waited for after a rest.
_QUIET_S = 0.01
_REST_S = 0.1
#: While nothing comes, so often it is looked what was sent on of what was left to be.
_LOOK_S = 0.01
#: The bytes that have left are reported when nothing has come for so long, or much has left: a process that hears of
#: each block at once has to be woken for each. Where each block takes so long that much would never be soon, it is told
#: at once; and of so many blocks at the end of a file when nothing is there.
_TELL_S, _LATE_S, _END_BLOCKS = 0.005, 0.1, 8
#: Of a block that came in more than this time, the next one is received in parts of so many bytes.
_SLOW_S, _AT_ONCE_BYTES = 0.02, 128 * 1024
_BEGINNINGS = (Type.ATTACH, Type.GET, Type.GET_PACK)
_DATA = (Type.BLOCK, Type.PART)


class Gate:
    """Whether a connection may still write. A file that is whole is about to get its name: late copies are dropped.

    :param peer: name of the connection's key. :param ends: when that ends, in Unix time; 0: never.
    :ivar unsaid: gives what was written and not reported; once the gate is closed it is never reported but so.
    """

    def __init__(self, peer: str = "", ends: float = 0) -> None:
        self.peer, self.ends, self.lock = peer, ends, threading.Lock()
        self.closed = False
        self.unsaid: Callable[[], Report | None] = lambda: None


class Gates:
    """Those of all connections of this process, by transfer number."""

    def __init__(self) -> None:
        self._gates: dict[int, dict[Gate, socket.socket]] = {}
        self._lock = threading.Lock()

    def add(self, tid: int, connection: socket.socket, peer: str = "", ends: float = 0) -> Gate:
        """One for a new connection. :param peer: name of its key. :param ends: as of the gate."""
        gate = Gate(peer, ends)
        with self._lock:
            self._gates.setdefault(tid, {})[gate] = connection
        return gate

    def remove(self, tid: int, gate: Gate) -> None:
        """Its connection has ended."""
        with self._lock:
            del self._gates[tid][gate]
            if not self._gates[tid]:
                del self._gates[tid]

    def close(self, tid: int) -> list[Report]:
        """None of this transfer writes any more when this returns. The blocks written and not reported by then.

        A sender may have written other bytes over blocks that were recorded before: the file must not get its name by
        the digests of these. So between a write and its report no gate is ever closed unheard: either the report has
        left before, or it is in what is returned here.
        """
        with self._lock:
            gates = list(self._gates.get(tid, ()))
        for gate in gates:
            with gate.lock:
                gate.closed = True
        return [report for report in (gate.unsaid() for gate in gates) if report is not None]

    def hang_up(self, tid: int) -> None:
        """End the connections of this transfer that may not write any more."""
        with self._lock:  # none of these is closed meanwhile, so the descriptor is its own
            for gate, connection in self._gates.get(tid, {}).items():
                if gate.closed:
                    _shut(connection)

    def end_of(self, peer: str, ends: float = 0) -> None:
        """End the connections of a key. :param ends: those alone that end by that time; 0: all."""
        with self._lock:
            for gate, connection in [item for some in self._gates.values() for item in some.items()]:
                if gate.peer == peer and (not ends or 0 < gate.ends <= ends):
                    _shut(connection)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended
        connection.shutdown(socket.SHUT_RDWR)


class Syncing:
    """Brings to the disk what one connection has written, in a thread of its own, and reports it then.

    The receiver goes on meanwhile. It is time for that when much was written, some of it a while ago, or nothing more
    comes for the moment.

    :param digest: the kind of digests. :param report: called with each :class:`Report`.
    :param gate: once it is closed, what is not said yet is only told to who closes it.
    :param stop: called when the disk fails, from that thread.
    """

    def __init__(
        self, tid: int, digest: str, file: int, report: Callable[[Report], None], gate: Gate, stop: Callable[[], None]
    ) -> None:
        self._tid, self._file, self._report, self._gate, self._stop = tid, file, report, gate, stop
        self._digest = digest
        self._changed = threading.Condition()
        self._blocks: list[tuple[int, str]] = []
        self._parts: list[tuple[int, int]] = []
        self._saying: tuple[tuple[tuple[int, str], ...], tuple[tuple[int, int], ...]] = (), ()
        self._bytes = self._count = 0
        self._now = self._ended = False
        self._synced_s = -_REST_S
        self.in_a_block = False
        self.failure: OSError | None = None
        gate.unsaid = self._unsaid
        self._thread = started(self._run)

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
            self._saying = (*self._saying[0], *self._blocks), (*self._saying[1], *self._parts)
            self._blocks, self._parts = [], []
            self._bytes, self._now = 0, False
        if self._gate.closed:
            return  # all blocks are known to be on the disk
        os.fdatasync(self._file)
        self._synced_s = time.monotonic()
        with self._changed:
            if not self._gate.closed:
                self._report(Report(self._tid, *self._saying, self._digest))
                self._saying = (), ()

    def _unsaid(self) -> Report | None:
        with self._changed:
            blocks, parts = (*self._saying[0], *self._blocks), (*self._saying[1], *self._parts)
        return Report(self._tid, blocks, parts, self._digest, late=True) if blocks or parts else None


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
        self,
        job: Job,
        connection: socket.socket,
        file: int,
        report: Callable[[Report], None],
        gate: Gate,
        shelf: Shelf | None = None,
    ) -> None:
        self._job, self._connection, self._file = job, connection, file
        self._shelf = shelf if shelf is not None and job.block_bytes == BLOCK_BYTES else None
        self._block_s = 0.0
        self._is_at_end = False
        self._left = LeftOnes(self._store)
        self._used: list[Loans] = []
        self._checksum = frames.checksums()[job.checksum]
        self._sums = frames.sums(job.checksum, job.digest)
        self._header = memoryview(bytearray(frames.HEADER_BYTES))
        self._buffer = _pages(job.block_bytes)
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
                for loans in self._used:
                    loans.flush()
                    loans.leave_off(self._stop)
                self._left.end()
            finally:
                if self._direct >= 0:
                    os.close(self._direct)
                self._syncing.finish()

    def _block(self) -> bool:
        """One block into the file; False at the end."""
        if self._syncing.failure is not None or not self._next_header():
            return False
        self._syncing.in_a_block = True
        header = frames.decode_header(self._header, self._checksum)
        if header.type in _BEGINNINGS:
            self.again = beginning(self._connection, self._header, header)
            return False
        if header.type not in _DATA or header.number != self._job.tid:
            raise BadFrame("only blocks of the transfer that was attached may come here")
        self._left.keep_late()
        ring = self._shelf.ring if self._shelf else None
        if header.type is Type.PART:
            self._part(header, self._buffer[: self._checked(header.block, header.length_bytes)])
            self._syncing.in_a_block = False
            return True
        if header.length_bytes != self._length(header.block):
            raise BadFrame(f"block {header.block} has {header.length_bytes} bytes")
        if ring and self._by_loan(header, ring.loans):
            self._syncing.in_a_block = False
            return True
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

    def _next_header(self) -> bool:
        """Read it; False at the end.

        Before it is waited for longer than a moment, the carrier hears what has left, and while it is waited for, what
        was left to the carrier is written in time. The carrier also hears where blocks come slowly, whose next header
        is there with the end of the one before.
        """
        ring = self._shelf.ring if self._shelf else None
        if ring is None:
            return fill(self._connection, self._header)
        if self._block_s > _LATE_S:
            ring.loans.flush()
        try:
            count = self._connection.recv_into(self._header, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            self._wait(ring)
            return fill(self._connection, self._header)
        return count > 0 and fill(self._connection, self._header[count:])

    def _wait(self, ring: Ring) -> None:
        """Nothing is there: at the end of a file somebody waits for what has left, else another moment passes."""
        if ring.loans.has_untold and (self._is_at_end or not readable([self._connection.fileno()], _TELL_S)):
            ring.loans.flush()
        while self._left and not readable([self._connection.fileno()], _LOOK_S):
            self._left.keep_late()

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
        """Tell whether the block is left to whoever sends it on."""
        digest = self._came(data, header)
        if ring and slot and not self._gate.closed:  # it leaves while it is written, or instead
            ring.offer(slot, header.block, len(data), Sums(digest, self._job.checksum, header.checksum))
            if slot.passes:
                self._left.add(Left(ring, slot, header.block, data, digest, time.monotonic()))
                return True
        self._store(header.block, data, digest)
        return False

    def _by_loan(self, header: Header, loans: Loans) -> bool:
        """Send a block on by a connection that the carrier has lent, or write it; False: there is none for it."""
        loan = None if self._gate.closed else loans.take(self._job.tid, self._job.checksum)
        if loan is None:
            return False
        if loans not in self._used:
            self._used.append(loans)
            loans.use(self._stop)
        data, began_s = self._buffer[: header.length_bytes], time.monotonic()
        try:
            digest = self._came(data, header)
        except BaseException:
            loans.leave(loan)
            raise
        self._block_s = time.monotonic() - began_s
        self._is_at_end = (header.block + _END_BLOCKS) * self._job.block_bytes >= self._job.size_bytes
        if not loans.send(loan, header, data, self._checksum, digest):
            self._buffer = _pages(self._job.block_bytes)
            self._store(header.block, data, digest)
        return True

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
        """Wake whoever receives: the disk fails, or who sends on has ended. Nothing more comes by this connection."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RD)


def beginning(connection: socket.socket, head: memoryview, header: frames.Header) -> bytes:
    """A frame that begins something on a connection. :raises BadFrame: it begins nothing."""
    if header.type not in _BEGINNINGS or header.length_bytes > frames.MAX_GREETING_BYTES:
        raise BadFrame(f"{header.type.name} of {header.length_bytes} bytes where ATTACH, GET or GET_PACK was due")
    payload = bytearray(header.length_bytes)
    if not fill(connection, memoryview(payload)):
        raise BadFrame("the connection ended in a frame")
    return bytes(head) + payload


def _pages(size_bytes: int) -> memoryview:
    """Memory that begins at a page, as disks want it."""
    return memoryview(mmap.mmap(-1, -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES))


def _direct(file: int) -> int:
    """The same file past the page cache, -1 where the filesystem does not allow it."""
    try:
        return os.open(f"/proc/self/fd/{file}", os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return -1
