"""A published file on its way to who has asked for it, in its turn among all that goes to the same address."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import socket
import time
from collections import deque
from collections.abc import Iterator

from overlay_router.data.jobs import Job
from overlay_router.data.known import Digests
from stageout.overlay.links import Claim, Tap, links
from stageout.overlay.tcp import (
    SHORTER,
    UNSENT_BYTES,
    acked_bytes,
    segments,
    send_from,
    send_unread,
    unsent_bytes,
    waiting_bytes,
)
from stageout.overlay.wire import frames
from stageout.overlay.wire.frames import Type
from stageout.overlay.wire.messages import BLOCK_BYTES, Found, encode

#: A file of so many bytes, at most, is gone before an order could matter.
_UNORDERED_BYTES = 64 * 1024
#: Blocks that nobody reads leave several at a time, as many as leave in this time, and so many at most: after each call
#: of the kernel for a whole block the interpreter's own memory is in no cache any more, and what is done for a block
#: takes ten times as long.
_TOGETHER_S, _MOST_TOGETHER = 0.01, 8
#: Memory of so many answers is there for the next ones: the first touch of a fresh block costs more than reading it.
_spare: deque[mmap.mmap] = deque(maxlen=4)


@contextlib.contextmanager
def ordered(job: Job, connection: socket.socket) -> Iterator[Tap | None]:
    """The tap that a file passes, in a lane of all that the same address gets; None: it is too small for an order.

    Where it is known what this router's line carries, all files count. The answers by which a file comes in parts share
    a lane.
    """
    if links().uplink is None and (job.size_bytes <= _UNORDERED_BYTES or not job.to):
        yield None
        return
    if connection.family != socket.AF_UNIX:  # what waits in the kernel is ordered no more
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    before = (acked_bytes(connection) or 0) + waiting_bytes(connection)

    def acked() -> int | None:
        told = acked_bytes(connection)
        return None if told is None else max(0, told - before)

    claim = Claim(job.flow, job.peer, job.priority, job.deadline)
    is_part = job.flow and job.blocks and job.blocks * job.block_bytes < job.size_bytes
    with links().answer(job.to, claim) if is_part else links().lane(job.to, claim) as lane:
        tap = lane.tap(acked)
        try:
            yield tap
        finally:
            tap.leave()


@contextlib.contextmanager
def _memory() -> Iterator[memoryview]:
    """Whole pages for a block, of which nobody knows what is in them."""
    try:
        pages = _spare.pop()
    except IndexError:
        pages = mmap.mmap(-1, BLOCK_BYTES)
    try:
        yield memoryview(pages)
    finally:
        _spare.append(pages)


class Sending:
    """One file for one connection. :param file: descriptor. :param digests: of its blocks, as far as they are known."""

    def __init__(self, job: Job, connection: socket.socket, file: int, digests: Digests) -> None:
        self._job, self._connection, self._file, self._digests = job, connection, file, digests
        self._checksum = frames.checksums()[job.checksum]
        self._buffer = memoryview(b"")
        self._unsent_bytes = UNSENT_BYTES
        self._together = 1

    def run(self) -> None:
        """FOUND and the blocks, in order, or the part that is wanted.

        :raises Damaged: the first one is not what was published; nothing was sent.
        :raises OSError: the connection is lost, or the file became shorter.
        """
        with _memory() as self._buffer:
            self._run()

    def _run(self) -> None:
        job = self._job
        end = -(-job.size_bytes // job.block_bytes)
        end = min(end, job.block + job.blocks) if job.blocks else end
        first = self._read(job.block) if job.block < end else memoryview(b"")
        is_known = job.block >= end or self._digests.fit_first(first, job, self._file)
        if not is_known:
            self._digests = Digests(job)
        manifest = job.manifest if is_known else ""
        kind = job.digest if manifest else ""
        told = segments(self._connection).numbers
        found = Found(job.size_bytes, job.block_bytes, job.generation, job.mode, manifest, kind, told)
        self._connection.sendall(encode(found, self._checksum))
        with ordered(job, self._connection) as tap:
            if job.end:
                self._send_part(first, tap)
                return
            if job.block < end:
                self._send(job.block, first, tap)
            block = job.block + 1
            is_tcp = self._connection.family != socket.AF_UNIX
            while block < end:
                began_s = time.monotonic()
                count = self._send_next(block, end, tap)
                took_s = (time.monotonic() - began_s) / count
                self._together = min(max(1, int(_TOGETHER_S / max(took_s, 1e-6))), _MOST_TOGETHER)
                if tap is not None and is_tcp:
                    self._let_wait(unsent_bytes(self._size_bytes(block), took_s))
                block += count

    def _send_next(self, block: int, end: int, tap: Tap | None) -> int:
        """The next blocks. :param end: none from this one on. :return: how many they were."""
        last = block + 1 if tap is not None and tap.held else min(end, block + self._together)
        heads = list(self._heads(block, last)) if last > block + 1 else []
        all_bytes = sum(len(head) + self._size_bytes(block + number) for number, head in enumerate(heads))
        # a lane that is held from just now on owes nothing for blocks that it would then wait for, perhaps for minutes
        if not heads or (tap is not None and not tap.take_free(all_bytes)):
            self._send(block, None, tap)
            return 1
        connection, file, block_bytes = self._connection, self._file, self._job.block_bytes
        for number, head in enumerate(heads, block):
            send_unread(connection, head, file, number * block_bytes, self._size_bytes(number))
        return len(heads)

    def _heads(self, block: int, end: int) -> Iterator[bytes]:
        """Headers of these blocks, up to the first whose digest is not known."""
        for one in range(block, end):
            checksum = self._digests.checksum(one)
            if checksum is None:
                return
            yield frames.pack_header(Type.BLOCK, self._size_bytes(one), checksum, self._checksum, 0, one)

    def _send(self, block: int, data: memoryview | None, tap: Tap | None) -> None:
        """A block: as it was read, or, where its digest is known, as it comes from the disk, unread."""
        offset, size_bytes = block * self._job.block_bytes, self._size_bytes(block)
        checksum = self._digests.checksum(block) if data is None else None
        if checksum is None:
            data = self._read(block) if data is None else data
            checksum = self._checksum(data)
        head = frames.pack_header(Type.BLOCK, size_bytes, checksum, self._checksum, 0, block)
        self._leave(head, offset, size_bytes, data, tap)

    def _send_part(self, block: memoryview, tap: Tap | None) -> None:
        """Less than a block. :param block: all of it, as it was read."""
        job, data = self._job, block[self._job.start : self._job.end]
        offset = job.block * job.block_bytes + job.start
        if not data:  # it lies behind the end of the file
            return
        head = frames.pack_header(Type.PART, len(data), self._checksum(data), self._checksum, 0, offset)
        self._leave(head, offset, len(data), data, tap)

    def _leave(self, head: bytes, offset: int, size_bytes: int, data: memoryview | None, tap: Tap | None) -> None:
        """A frame. :param offset: of its bytes in the file. :param data: they, None: they were not read."""
        # where it takes long, or others need the link more, it leaves in pieces: so it can be stopped in the middle
        piece_bytes = tap.piece_bytes if tap is not None and (tap.held or self._together == 1) else size_bytes
        for start in range(0, size_bytes, piece_bytes):
            end = min(start + piece_bytes, size_bytes)
            if tap is not None:
                tap.take(len(head) + end - start)
            if data is None:
                send_unread(self._connection, head, self._file, offset + start, end - start)
            else:
                send_from(self._connection, head, self._file, offset + start, data[start:end])
            head = b""

    def _let_wait(self, size_bytes: int) -> None:
        if size_bytes != self._unsent_bytes:
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, size_bytes)
            self._unsent_bytes = size_bytes

    def _size_bytes(self, block: int) -> int:
        return min(self._job.block_bytes, self._job.size_bytes - block * self._job.block_bytes)

    def _read(self, block: int) -> memoryview:
        data = self._buffer[: self._size_bytes(block)]
        if os.preadv(self._file, [data], block * self._job.block_bytes) != len(data):
            raise OSError(errno.ENODATA, SHORTER)
        return data
