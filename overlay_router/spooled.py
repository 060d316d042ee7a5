"""A file in a custodian's spool on its way to the terminal, perhaps while it still comes in.

What comes is sent from the memory that it came into. What was not in time for that is read past the page cache, as it
was written: through the cache it would cost several times the processor's time.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable
from pathlib import Path

from overlay_router.ring import Piece
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import Damaged, Known, Upload
from stageout.overlay.sending import Sending
from stageout.wire.overlay import BLOCK_BYTES, Open, Operation
from stageout.wire.route import Route

_PAGE_BYTES = 4096
_ANEW = "its sender has begun anew"


class Growth:
    """What of a file is here. Told by some threads, followed by those that send.

    :param digests: of blocks that are on the disk. :param operation: the PUBLISH, None before the file is in custody.
    """

    def __init__(self, digests: dict[int, bytes], operation: Operation | None) -> None:
        self.digests, self.operation = digests, operation
        self._shown: dict[int, bytes] = {}
        self._pieces: dict[int, Piece] = {}
        self._lent: set[Piece] = set()
        self._stopped: TransferFailure | None = None
        self._ended = False
        self._sending: Sending | None = None
        self._lock = threading.Lock()
        self._more = threading.Condition(self._lock)

    def follow(self, sending: Sending) -> None:
        """Tell this one, too: what is here now, and what comes."""
        with self._lock:
            self._sending = sending
            if self._stopped:
                sending.fail(self._stopped)
            sending.arrived(self._pieces)
            sending.arrived(self.digests)
            if self.operation is not None:
                sending.complete()

    def arrived(self, blocks: Iterable[tuple[int, bytes]]) -> None:
        """More blocks are on the disk; a block that came with other bytes before ends it: they begin anew."""
        with self._lock:
            new = dict(blocks)
            if any(self._known(block, digest) != digest for block, digest in new.items()):
                self._stop(TransferFailure(ErrorClass.SERVER_BUSY, _ANEW))
            self.digests.update(new)
            self._more.notify_all()
            if self._sending:
                self._sending.arrived(new)

    def shown(self, piece: Piece) -> bool:
        """A block is in memory, and will be on the disk: whether it is kept, to be sent from there."""
        with self._lock:
            if self._stopped or self._ended:
                return False
            digest = piece.sums.digest
            if self._known(piece.block, digest) != digest:
                self._stop(TransferFailure(ErrorClass.SERVER_BUSY, _ANEW))
                return False
            if piece.block in self.digests or piece.block in self._pieces:
                return False
            self._shown[piece.block] = digest
            self._pieces[piece.block] = piece
            if self._sending:
                self._sending.arrived([piece.block], first=True)
                self._leave_unwanted(self._sending)
            return True

    def take(self, block: int) -> Piece | None:
        """A block in memory, to be given back; None: it is on the disk, which may be waited for."""
        with self._lock:
            self._more.wait_for(lambda: block in self._pieces or block in self.digests or self._stopped or self._ended)
            piece = self._pieces.pop(block, None)
            if piece is not None:
                self._lent.add(piece)
            return piece

    def give_back(self, piece: Piece) -> None:
        """It was sent, or could not be."""
        with self._lock:
            if piece in self._lent:
                self._lent.discard(piece)
                piece.free()

    def close(self) -> None:
        """Nothing is sent any more."""
        with self._lock:
            self._ended = True
            for piece in (*self._pieces.values(), *self._lent):
                piece.free()
            self._pieces.clear()
            self._lent.clear()
            self._more.notify_all()

    def _known(self, block: int, digest: bytes) -> bytes:
        return self.digests.get(block, self._shown.get(block, digest))

    def _leave_unwanted(self, sending: Sending) -> None:
        """What the terminal turns out to have must not fill the memory."""
        for block in [block for block in self._pieces if not sending.is_waiting(block)]:
            self._pieces.pop(block).free()

    def complete(self, operation: Operation) -> None:
        """It is in custody: all blocks are here."""
        with self._lock:
            if len(self.digests) < operation.blocks:
                self._stop(TransferFailure(ErrorClass.SERVER_BUSY, "it is not known which of its blocks are here"))
                return
            self.operation = operation
            if self._sending:
                self._sending.complete()

    @property
    def is_stopped(self) -> bool:
        """Whether nobody wants it any more."""
        return self._stopped is not None

    def stop(self) -> None:
        """Nobody wants it any more."""
        with self._lock:
            self._stop(TransferFailure(ErrorClass.NOT_ATTEMPTED, "not wanted any more"))

    def _stop(self, failure: TransferFailure) -> None:
        self._stopped = failure
        self._more.notify_all()
        if self._sending:
            self._sending.fail(failure)


class Spooled(Upload):
    """One of these files. :param growth: what of it is here. :param digest: the kind of its digests.

    :param order: identity and path; :class:`Growth` brings the PUBLISH. :param opening: the OPEN of its sender.
    """

    def __init__(
        self,
        gateway: Gateway,
        local: Path,
        order: Operation,
        growth: Growth,
        digest: str,
        opening: Open | None,
        connections: int,
        routes: tuple[Route, ...] = ((),),
    ) -> None:
        known = Known(digest, growth.digests)
        super().__init__(
            gateway, local, order, connections, lambda sent_bytes: None, known, opening=opening, routes=routes
        )
        self._growth, self._kind, self._mine = growth, digest, threading.local()

    def sending(self, file: int) -> Sending:
        """It sends what is here, and goes on as more comes."""
        made = Sending(self, file, self.routes, self.gateway.timeout_s, grows=True)
        self._growth.follow(made)
        return made

    def open(self) -> int:
        """A descriptor past the page cache, where the filesystem has that."""
        try:
            return os.open(self.local, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            return super().open()

    def take(self, block: int, file: int, buffer: memoryview, channel: Channel) -> memoryview:
        """A block in memory, or read into a buffer of this thread. :raises Damaged: it is not what it was."""
        self._leave()
        self._mine.piece = piece = self._growth.take(block)
        if piece is not None:  # whoever received it has found its sums
            channel.vouch(block, piece.sums.kind, piece.sums.checksum)
            same = self._kind == channel.digest_name
            self.digests.setdefault(block, piece.sums.digest if same else channel.digest(piece.view))
            return piece.view
        length = min(BLOCK_BYTES, self.size_bytes - block * BLOCK_BYTES)
        mine = self._buffer()
        try:
            count = os.preadv(file, [mine[: -(-length // _PAGE_BYTES) * _PAGE_BYTES]], block * BLOCK_BYTES)
        except OSError as problem:  # a block that the disk does not give back is a damaged one
            raise self._damaged(block, problem.strerror or str(problem)) from None
        if count != length:
            raise self._damaged(block, "the file is too short")
        data = mine[:length]
        self.take_digest(block, data, channel)
        return data

    def publish(self, tid: int, channel: Channel) -> Operation:
        """The PUBLISH of its sender."""
        assert self._growth.operation is not None
        self.order = self._growth.operation
        return super().publish(tid, channel)

    def count(self, size_bytes: int) -> None:
        """A block has left: its memory is free."""
        self._leave()
        super().count(size_bytes)

    def check_source(self) -> None:
        """Each block was compared with its digest."""

    def _buffer(self) -> memoryview:
        if not hasattr(self._mine, "view"):
            self._mine.view = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        view: memoryview = self._mine.view
        return view

    def _leave(self) -> None:
        """Give back the block that this thread has sent."""
        piece: Piece | None = getattr(self._mine, "piece", None)
        self._mine.piece = None
        if piece is not None:
            self._growth.give_back(piece)

    def _damaged(self, block: int, why: str) -> Damaged:
        return Damaged(ErrorClass.SOURCE_CHANGED, f"{self.local}: block {block}: {why}")
