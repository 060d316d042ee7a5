"""Blocks that come in, in memory that the process which sends them on sees too: nothing is read back from the spool.

A worker receives a block into a slot of its ring, checks it, offers it, and writes it to the disk from there; the
carrier sends it from there meanwhile. The last user of a slot gives it back. Where no slot is free (the next hop is
slower than the last), or nobody wants the blocks of a transfer, they come from the disk as soon as they are there.
Nothing is promised of what is only here: a block that is lost with its worker comes again from its sender.

A transfer whose sender keeps its bytes is *passed*: what left from memory needs no place on the disk. Then the worker
writes only what the carrier has not sent in time, and until it has said which, the block is the worker's to write.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from overlay_router.data import loans
from overlay_router.data.loans import Lent, Loans
from overlay_router.data.teller import Teller
from stageout.core.threads import NoThread, started
from stageout.overlay.wire.frames import DIGEST_BYTES
from stageout.overlay.wire.messages import BLOCK_BYTES

#: Of one worker, each of a block: this, times the workers, is all memory that they take.
SLOTS = 32
#: Slots of one transfer, so that one whose next hop is slow leaves some to the others.
_MOST_OF_ONE = SLOTS // 2
_OFFER = struct.Struct(f"=BQQIII8s{DIGEST_BYTES}s")
_ASK = struct.Struct("=BQ")
_WANT, _DROP, _FREE, _PASS, _SENT = range(5)
_OFFERED = 0
_MEMORY = b"memory"
_MESSAGE_BYTES = 4096
#: Where the next hop is slow, one of so many blocks (as a power of two) waits for a slot.
_MOST_DOUBLINGS = 6
#: Most seconds to wait for a slot, however long the block took: its sender may have paused in the middle of it.
_MOST_PATIENCE_S = 0.1
#: Seconds to wait for a slot where a block without one costs an avoidable write.
_PASSING_PATIENCE_S = 0.25
#: So long a block may wait in memory to be sent; then it is written.
_PASSING_S = 0.5


@dataclass(frozen=True)
class Sums:
    """The digests found of a block when it came. :param kind: of the checksum, as in HELLO."""

    digest: bytes
    kind: str
    checksum: int


@dataclass
class Slot:
    """Room for a block at the worker. :param holders: the worker, and the carrier once it was offered.

    :param passes: it need not be written if the carrier sends it. :param was_sent: that has happened, so it is not the
        worker's any more.
    """

    number: int
    tid: int
    view: memoryview
    holders: int = 1
    passes: bool = False
    was_sent: bool = False


@dataclass
class _Pace:
    """Whether the next hop keeps up. :param failures: waits in vain. :param skips: blocks that are not waited with.

    :param passes: what is sent need not be written.
    """

    passes: bool = False
    failures: int = 0
    skips: int = 0


class Ring:
    """The slots of one worker, shared with one carrier.

    :param link: connection to the carrier. :raises OSError: there is no memory, or no carrier any more.
    """

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        memory = os.memfd_create("blocks", os.MFD_CLOEXEC)
        try:
            os.ftruncate(memory, SLOTS * BLOCK_BYTES)
            self._view = memoryview(mmap.mmap(memory, SLOTS * BLOCK_BYTES))
            socket.send_fds(link, [_MEMORY], [memory])
        finally:
            os.close(memory)
        self._changed = threading.Condition()
        self._free = list(range(SLOTS))
        self._busy: dict[int, Slot] = {}
        self._wanted: dict[int, _Pace] = {}
        self._is_over = False
        self._teller = Teller(link)
        self.loans = Loans(self._teller.say)

    def take(self, tid: int, patience_s: float) -> Slot | None:
        """A slot for the next block of a transfer, None when there is none, or nobody wants it.

        :param patience_s: as long as that may be waited for a slot.
        """
        with self._changed:
            pace = self._wanted.get(tid)
            if pace is None or not (self._has_room(tid) or self._comes(tid, pace, patience_s)):
                return None
            number = self._free.pop()
            view = self._view[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
            slot = Slot(number, tid, view, passes=pace.passes)
            self._busy[number] = slot
            return slot

    def _has_room(self, tid: int) -> bool:
        return bool(self._free) and sum(slot.tid == tid for slot in self._busy.values()) < _MOST_OF_ONE

    def _comes(self, tid: int, pace: _Pace, patience_s: float) -> bool:
        """Tell whether there is room in time. It is waited for ever more seldom when that is in vain: the hop is
        slow."""
        if pace.skips:
            pace.skips -= 1
            return False
        patience_s = _PASSING_PATIENCE_S if pace.passes else min(patience_s, _MOST_PATIENCE_S)
        self._changed.wait_for(lambda: self._has_room(tid) or tid not in self._wanted, patience_s)
        if self._has_room(tid):
            pace.failures = 0
            return tid in self._wanted
        pace.failures = min(pace.failures + 1, _MOST_DOUBLINGS)
        pace.skips = 2**pace.failures
        return False

    def offer(self, slot: Slot, block: int, size_bytes: int, sums: Sums) -> None:
        """The block is there, and right: it may be sent on."""
        message = _OFFER.pack(
            _OFFERED, slot.tid, block, slot.number, size_bytes, sums.checksum, sums.kind.encode(), sums.digest
        )  # fmt: skip
        with self._changed:
            slot.holders += 1
        if not self._teller.offer(message):  # the carrier has enough, or has ended: it comes from the disk
            self.leave(slot)

    def leave(self, slot: Slot) -> None:
        """The caller does not need it any more."""
        with self._changed:
            self._leave(slot)

    def _leave(self, slot: Slot) -> None:
        slot.holders -= 1
        if not slot.holders:
            del self._busy[slot.number]
            self._free.append(slot.number)
            self._changed.notify_all()

    def is_declined(self, slot: Slot) -> bool:
        """Tell whether the carrier has answered that it does not send a block from here, or has ended."""
        return not slot.was_sent and (slot.holders == 1 or self._is_over)

    def keep(self, slot: Slot) -> bool:
        """Write a block that was to be passed, and :meth:`leave` it then. False: it was sent, and is left already."""
        with self._changed:
            slot.passes = False
            return not slot.was_sent

    def run(self) -> None:
        """Hear what the carrier wants, and what it has sent, until it has ended."""
        with self._link, contextlib.suppress(OSError):
            while True:
                message, descriptors, _, _ = socket.recv_fds(self._link, _MESSAGE_BYTES, 1)
                if not message:
                    break
                if not self.loans.hear(message, descriptors):
                    self._hear(*_ASK.unpack(message))
        with self._changed:
            self._is_over = True
            self._wanted.clear()
            self._changed.notify_all()
        self.loans.end()

    def _hear(self, word: int, number: int) -> None:
        with self._changed:
            if word in (_FREE, _SENT):
                self._answered(self._busy.get(number), word == _SENT)
            elif word in (_WANT, _PASS):
                self._wanted[number] = _Pace(word == _PASS)
            else:
                self._wanted.pop(number, None)
                self._changed.notify_all()
        if word == _PASS:
            self.loans.want(number)
        elif word == _DROP:
            self.loans.drop(number)

    def _answered(self, slot: Slot | None, was_sent: bool) -> None:
        if slot is None:
            return
        self._leave(slot)
        if was_sent and slot.passes:
            slot.was_sent = True
            self._leave(slot)


@dataclass(frozen=True)
class Left:
    """A block that is left to the carrier. :param since_s: monotonic time at which it was offered."""

    ring: Ring
    slot: Slot
    block: int
    data: memoryview
    digest: bytes
    since_s: float

    @property
    def is_open(self) -> bool:
        """Tell whether the carrier may still send it from here."""
        return not self.slot.was_sent and not self.ring.is_declined(self.slot)


class LeftOnes:
    """Those of one connection, oldest first.

    :param keep: writes a block (position, bytes, digest) that the carrier has not sent.
    """

    def __init__(self, keep: Callable[[int, memoryview, bytes], None]) -> None:
        self._keep, self._ones = keep, deque[Left]()

    def __bool__(self) -> bool:
        return bool(self._ones)

    def add(self, one: Left) -> None:
        """It was offered just now."""
        self._ones.append(one)

    def keep_late(self, most_s: float = _PASSING_S) -> None:
        """Write what was not sent in that time, or will not be sent from memory. :raises OSError: the disk fails."""
        while self._ones:
            one = self._ones[0]
            if one.is_open and time.monotonic() - one.since_s < most_s:
                return
            self._ones.popleft()
            if one.ring.keep(one.slot):
                try:
                    self._keep(one.block, one.data, one.digest)
                finally:
                    one.ring.leave(one.slot)

    def end(self) -> None:
        """As :meth:`keep_late`, for all; where the disk fails the rest comes again."""
        try:
            self.keep_late(0.0)
        finally:
            for one in self._ones:
                if one.ring.keep(one.slot):
                    one.ring.leave(one.slot)


class Shelf:
    """The ring that a worker has now: each carrier that is started gets another."""

    def __init__(self) -> None:
        self.ring: Ring | None = None

    def connect(self, link: socket.socket) -> None:
        """Share blocks with the carrier at the other end from now on. Without the means for it they go by the disk."""
        try:
            ring = Ring(link)
            started(ring.run)
        except (OSError, AttributeError):  # the latter of a Python that was built without memfd_create
            link.close()
            return
        self.ring = ring


@dataclass(frozen=True, eq=False)
class Piece:
    """A block in the memory of a worker, as the carrier sees it.

    :param free: to be called once, with whether it was sent: then, where blocks are passed, the worker forgets it.
    """

    block: int
    sums: Sums
    view: memoryview
    free: Callable[[bool], None]


class Lend(Protocol):
    """Lends a worker a connection that is attached for a transfer.

    :param connection: its descriptor. :param far_tid: of the transfer there. :param checksum: its kind of checksums.
    :param heard: is told of blocks that have left, with their digests. :return: None: the worker has ended, or
        stands still.
    """

    def __call__(
        self, connection: int, far_tid: int, checksum: str, heard: Callable[[Mapping[int, bytes]], None]
    ) -> Lent | None: ...


class Follower(Protocol):
    """The process at the carrier that sends on a transfer's blocks as they come. Called from several threads."""

    def shown(self, piece: Piece) -> bool:
        """A block is in memory: whether it is kept, to be sent from there."""

    def asked(self, lend: Lend) -> None:
        """A worker would send blocks itself, by a connection that it is lent."""


class Rings:
    """Those of all workers, at the carrier."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers: set[Teller] = set()
        self._wanted: dict[int, tuple[Follower, int]] = {}
        self._lent: dict[int, Lent] = {}
        self._numbers = itertools.count(1)

    def want(self, tid: int, follower: Follower, passes: bool = False) -> None:
        """From now on blocks of a transfer are shown. :param passes: what was sent need not be written here."""
        word = _PASS if passes else _WANT
        with self._lock:
            self._wanted[tid] = follower, word
            self._tell(_ASK.pack(word, tid))

    def drop(self, tid: int, follower: Follower) -> None:
        """No more of them."""
        with self._lock:
            if self._wanted.get(tid, (None,))[0] is follower:
                del self._wanted[tid]
                self._tell(_ASK.pack(_DROP, tid))

    def listen(self, control: socket.socket) -> None:
        """Take connections of workers until the daemon has ended."""
        while True:
            message, found, _, _ = socket.recv_fds(control, 1, 1)
            if not message:
                return
            for descriptor in found:
                link = socket.socket(fileno=descriptor)
                try:
                    started(self._follow, link)
                except NoThread:
                    link.close()

    def _follow(self, link: socket.socket) -> None:
        with link, contextlib.suppress(OSError):
            _, found, _, _ = socket.recv_fds(link, len(_MEMORY), 1)
            if not found:
                return
            view = memoryview(mmap.mmap(found[0], SLOTS * BLOCK_BYTES, prot=mmap.PROT_READ))
            os.close(found[0])
            worker = Teller(link)
            with self._lock:
                self._workers.add(worker)
                for tid, (_, word) in self._wanted.items():
                    worker.say(_ASK.pack(word, tid))
            mine: set[Lent] = set()
            try:
                while message := link.recv(_MESSAGE_BYTES):
                    self._heard(worker, view, message, mine)
            finally:
                with self._lock:
                    self._workers.discard(worker)
                    for lent in mine:
                        del self._lent[lent.number]
                for lent in mine:
                    lent.lost()

    def _heard(self, worker: Teller, view: memoryview, message: bytes, mine: set[Lent]) -> None:
        """:param mine: what was lent to this worker."""
        if message[0] == _OFFERED:
            self._offered(worker, view, message)
            return
        tid = loans.wanted(message)
        if tid:
            follower, _ = self._wanted.get(tid, (None, _WANT))
            if follower is not None:
                follower.asked(partial(self._lend, worker, mine, tid))
            return
        for number, blocks in loans.left(message).items():
            lent = self._lent.get(number)
            if lent is not None:
                lent.left(blocks)
        lent = self._lent.pop(loans.back(message), None)
        if lent is not None:
            mine.discard(lent)
            lent.back()

    def _lend(
        self, worker: Teller, mine: set[Lent], tid: int,
        connection: int, far_tid: int, checksum: str, heard: Callable[[Mapping[int, bytes]], None],
    ) -> Lent | None:  # fmt: skip
        def say(message: bytes, descriptors: list[int]) -> None:
            if not descriptors:
                worker.say(message)
            elif not worker.offer(message, descriptors):  # it stands still, or has ended
                raise BlockingIOError

        lent = Lent(next(self._numbers), say, heard)
        with self._lock:
            if worker not in self._workers:
                return None
            self._lent[lent.number] = lent
            mine.add(lent)
        try:
            lent.lend(tid, far_tid, checksum, connection)
        except OSError:  # it has not got it
            with self._lock:
                self._lent.pop(lent.number, None)
                mine.discard(lent)
            return None
        return lent

    def _offered(self, worker: Teller, view: memoryview, message: bytes) -> None:
        _, tid, block, number, size_bytes, checksum, kind, digest = _OFFER.unpack(message)
        sums = Sums(digest, kind.rstrip(b"\0").decode(), checksum)
        start = number * BLOCK_BYTES

        def free(was_sent: bool) -> None:
            worker.say(_ASK.pack(_SENT if was_sent else _FREE, number))

        follower, _ = self._wanted.get(tid, (None, _WANT))
        if follower is None or not follower.shown(Piece(block, sums, view[start : start + size_bytes], free)):
            free(False)

    def _tell(self, message: bytes) -> None:
        for worker in self._workers:
            worker.say(message)
