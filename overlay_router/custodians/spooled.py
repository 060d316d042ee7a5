"""A file in a custodian's spool on its way to the terminal, perhaps while it still comes in.

Arriving data are sent from the memory that they came into. Data that were not in time for that are read past the page
cache, as they were written: through the cache they would cost several times the processor's time.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from overlay_router.data.loans import Lent
from overlay_router.data.ring import Lend, Piece
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import Damaged, Known, Upload
from stageout.overlay.sending import Sending
from stageout.overlay.way import Way
from stageout.overlay.wire.messages import BLOCK_BYTES, Cancel, Message, Open, Operation, Result
from stageout.overlay.wire.route import Route

_PAGE_BYTES = 4096
#: An operation that has been published, and is not answered within this time, waits for something.
WAITS_S = 2.0
#: Workers that would send blocks themselves, and have to be answered.
_MOST_ASKS = 8
#: A connection on loan by which nothing has left for so long is taken from who has it, where another one asks.
_IDLE_S = 0.5
#: While others are still under way, the daemon hears of blocks that are passed so often: to hear of each, record it and
#: say it to the sender would cost more than to send it.
_TELL_S = 0.1
_ANEW = "its sender has begun anew"
_OTHERS = "the next hop has other records than those that it may be said to: it is looked at first"
_GONE = "the next hop has lost blocks that only it had: they come again"


class Growth:
    """The parts of a file that are here, or were passed. Told by some threads, followed by those that send.

    A block that was sent from memory may be nowhere else here. It is *passed* when the next hop has said STAGED of it,
    and *gone* when it must be sent again. Both are told in their order: what is passed at once when nothing else is
    under way, else with all that is within a tenth of a second.

    :param digests: of blocks that are on the disk here, or passed. :param operation: the PUBLISH, None before the file
        is in custody. :param passed: those of ``digests`` that are not on the disk. :param told: hears what has become
        of such blocks: those that are passed with their digests, and those that are gone. None: there are none of them,
        all comes to the disk here. :param waits: hears that nothing is left to do but to wait for the next hop (True),
        and that a block leaves nevertheless (False). :param meets: hears which records the next hop has, and whether
        that is to be recorded, and then :meth:`said_to` to be called. :param said: those that it may be said to.
    """

    def __init__(
        self,
        digests: dict[int, bytes],
        operation: Operation | None,
        passed: Iterable[int] = (),
        told: Callable[[Mapping[int, bytes], Sequence[int]], None] | None = None,
        waits: Callable[[bool], None] = lambda waits: None,
        meets: Callable[[str, bool], None] = lambda store, says: None,
        said: str | None = None,
    ) -> None:
        self._say_waits, self._is_idle, self.meets, self._said = waits, False, meets, said
        self._wake: Callable[[], None] = lambda: None
        self.digests, self.operation, self._told = digests, operation, told
        self._passed = set(passed)
        self._sent: dict[int, bytes] = {}
        #: Passed, and not yet told.
        self._untold: dict[int, bytes] = {}
        self._told_s = float("-inf")
        self._shown: dict[int, bytes] = {}
        self._pieces: dict[int, Piece] = {}
        self._lent: set[Piece] = set()
        self._stopped: TransferFailure | None = None
        #: The next hop may have heard the operation.
        self.was_said = False
        self._ended, self._lends = False, True
        self._asks: deque[Lend] = deque(maxlen=_MOST_ASKS)
        self._on_loan: list[Lent] = []
        self._sending: Sending | None = None
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    def follow(self, sending: Sending) -> None:
        """Tell this one, too: what is here now, and what comes."""
        with self._lock:
            self._lose(list(self._sent))  # an earlier one has sent them, and nobody knows what became of them
            self._sending, self._lends = sending, True
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
            self._passed.difference_update(new)
            for block in new:
                self._sent.pop(block, None)
            if self._sending:
                self._sending.arrived(new)
            self._look()

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

    def asked(self, lend: Lend) -> None:
        """A worker would send what comes itself: a connection with nothing to do is lent to it, once there is one."""
        with self._lock:
            if self._told and self._lends and not self._stopped:
                self._asks.append(lend)
                if self._sending:
                    self._sending.wake()
                idle = next((lent for lent in self._on_loan if lent.idle_s >= _IDLE_S), None)
                if idle:
                    idle.recall()

    def lend(self, connection: int, far_tid: int, checksum: str) -> Lent | None:
        """Lend a connection that is attached to who has asked for one; None: nobody has. Parameters as of ``Lend``."""
        with self._lock:
            lend = self._asks.popleft() if self._asks else None
        lent = lend(connection, far_tid, checksum, self._left) if lend else None
        if lent:
            with self._lock:
                self._on_loan = [*(one for one in self._on_loan if not one.has_ended), lent]
        return lent

    def decline(self) -> None:
        """Nothing is lent any more, until another sending follows."""
        with self._lock:
            self._lends = False
            self._asks.clear()

    def _left(self, blocks: Mapping[int, bytes]) -> None:
        """A worker has sent these, with those digests, and has not written them."""
        with self._lock:
            if any(self._known(block, digest) != digest for block, digest in blocks.items()):
                self._stop(TransferFailure(ErrorClass.SERVER_BUSY, _ANEW))
                self._lose(blocks)  # those that fit are nowhere here, and nobody follows them now
                return
            self._shown.update(blocks)
            self._sent.update({block: digest for block, digest in blocks.items() if block not in self.digests})
            self._look()

    def take(self, block: int) -> Piece | None:
        """A block in memory, to be given back; None: it is not there."""
        with self._lock:
            if self._is_idle:
                self._is_idle = False
                self._say_waits(False)
            piece = self._pieces.pop(block, None)
            if piece is not None:
                self._lent.add(piece)
            return piece

    def waits(self) -> None:
        """Nothing is left to do but to wait for the next hop, until a block is taken."""
        with self._lock:
            self._is_idle = True
            self._say_waits(True)

    def is_readable(self, block: int) -> bool:
        """Tell whether a block that must be sent is on the disk; else it is sent as soon as it is here again.

        It may be on its way to the disk. If it was sent from memory instead, it is gone, and with it all like it.
        """
        with self._lock:
            if block in self.digests and block not in self._passed:
                return True
            if block in self._sent or block in self._passed:
                self._lose([block, *filter(self._is_waiting, (*self._sent, *self._passed))])
            elif self._sending:
                self._sending.lacking([block])
            return False

    def give_back(self, piece: Piece, was_sent: bool) -> None:
        """It was sent, or could not be."""
        with self._lock:
            if piece not in self._lent:
                return
            self._lent.discard(piece)
            if was_sent and self._told and piece.block not in self.digests:
                self._sent[piece.block] = piece.sums.digest
                self._look()
            piece.free(was_sent)

    def heard(self) -> None:
        """The next hop has said what it has."""
        with self._lock:
            self._look()

    def lose(self) -> None:
        """Blocks that are only at the next hop must come again, and so must blocks that nobody knows of: block 0 stands
        for that."""
        with self._lock:
            self._lose([*self._sent, *self._passed, 0])

    @property
    def passed(self) -> set[int]:
        """Blocks that only the next hop has."""
        return self._passed.copy()

    def on_disk(self) -> dict[int, bytes]:
        """Digests of what is on the disk here."""
        with self._lock:
            return {block: digest for block, digest in self.digests.items() if block not in self._passed}

    def _look(self) -> None:
        if self._sending is None:
            return
        staged = {block: digest for block, digest in self._sent.items() if self._sending.is_staged(block)}
        for block in staged:
            del self._sent[block]
        self._passed.update(staged)
        self.digests.update(staged)
        self._untold.update(staged)
        if not self._sent or time.monotonic() - self._told_s >= _TELL_S:
            self._tell()

    def _tell(self) -> None:
        """Say what is passed. While something is under way, more is heard of that, or it is lost: both come here."""
        if self._untold and self._told:
            self._told(self._untold, ())
            self._untold, self._told_s = {}, time.monotonic()

    def _lose(self, blocks: Iterable[int]) -> None:
        gone = sorted(set(blocks))
        for block in gone:
            self._sent.pop(block, None)
            self._passed.discard(block)
            self._untold.pop(block, None)
            self.digests.pop(block, None)
        self._tell()
        if self._sending:
            self._sending.lacking(gone)
        if gone and self._told:
            self._told({}, gone)

    def _is_waiting(self, block: int) -> bool:
        return self._sending is not None and self._sending.is_waiting(block)

    def close(self) -> None:
        """Nothing is sent any more."""
        with self._lock:
            self._ended = True
            self._asks.clear()
            self._lose(list(self._sent))
            for piece in (*self._pieces.values(), *self._lent):
                piece.free(False)
            self._pieces.clear()
            self._lent.clear()

    def _known(self, block: int, digest: bytes) -> bytes:
        return self.digests.get(block, self._shown.get(block, digest))

    def _leave_unwanted(self, sending: Sending) -> None:
        """The blocks that the terminal turns out to have must not fill the memory."""
        for block in [block for block in self._pieces if not sending.is_waiting(block)]:
            self._pieces.pop(block).free(False)

    def may_be_said(self, store: str) -> bool:
        """Tell whether it is recorded that the operation may be said to a next hop with these records."""
        return self._said == store

    def say(self, store: str) -> None:
        """On return that is recorded. :raises TransferFailure: the operation is not wanted any more."""
        if self.may_be_said(store):
            return
        self.meets(store, True)
        with self._changed:
            while self._said != store and not self._stopped:
                self._changed.wait()
            if self._stopped:
                raise self._stopped

    def said_to(self, store: str) -> None:
        """It is recorded."""
        with self._changed:
            self._said = store
            self._changed.notify_all()

    def complete(self, operation: Operation) -> None:
        """It is in custody: all blocks are here."""
        with self._lock:
            if len(self.digests) < operation.blocks:
                self._stop(TransferFailure(ErrorClass.SERVER_BUSY, "it is not known which of its blocks are here"))
                return
            self.operation = operation
            for lent in self._on_loan:  # nothing more comes: when it is done, they are there for the next file
                lent.recall()
            if self._sending:
                self._sending.complete()

    @property
    def is_told_where(self) -> bool:
        """Tell whether it is known which records the operation may be said to."""
        return self._said is not None

    @property
    def is_stopped(self) -> bool:
        """Tell whether nobody wants it any more."""
        return self._stopped is not None

    @property
    def stopped(self) -> TransferFailure | None:
        """Return why it was ended from here: whatever else fails then says nothing of the next hop."""
        return self._stopped

    def stop(self) -> None:
        """Nobody wants it any more."""
        with self._lock:
            self._stop(TransferFailure(ErrorClass.NOT_ATTEMPTED, "not wanted any more"))
            wake = self._wake
        wake()

    def woken_by(self, wake: Callable[[], None]) -> None:
        """:param wake: of who waits for the next hop, for when nobody wants it any more."""
        with self._lock:
            self._wake = wake
            if self._stopped is None:
                return
        wake()

    def _stop(self, failure: TransferFailure) -> None:
        self._stopped = failure
        self._changed.notify_all()
        if self._sending:
            self._sending.fail(failure)


def has_lost(channel: Channel, said_to: str | None, message: Open | Operation) -> bool:
    """Tell whether a terminal has lost the records that an operation may have been said to. A custodian is no terminal.

    :param said_to: those records; "" or None: none that are known.
    """
    return bool(said_to and channel.store and channel.store != said_to and not message.terminal)


class Undigested(TransferFailure):
    """The manifest cannot be made: blocks that were passed before must come again."""


class _Sending(Sending):
    """Also says what the other side has to who must know which blocks are only there."""

    growth: Growth

    def hear(self, way: Way, message: Message) -> None:
        """As :class:`Sending`."""
        super().hear(way, message)
        self.growth.heard()


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
        self._lent: set[Lent] = set()
        self._lending, self._timing = threading.Lock(), threading.Lock()
        self._waits: threading.Timer | None = None

    def sending(self, file: int) -> Sending:
        """It sends what is here, and goes on as more comes."""
        self.settle()
        checks = not self.ask().terminal  # another custodian cannot say what it has delivered
        made = _Sending(self, file, self.routes, self.gateway.timeout_s, grows=True, checks=checks)
        made.growth = self._growth
        self._growth.follow(made)
        return made

    def open(self) -> int:
        """A descriptor past the page cache, where the filesystem has that."""
        try:
            return os.open(self.local, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            return super().open()

    def take(self, block: int, file: int, buffer: memoryview, channel: Channel) -> memoryview | None:
        """A block in memory, or read into a buffer of this thread; None while it is in neither.

        :raises Damaged: it is not what it was.
        """
        self._leave(False)
        self._wait(False)
        self._mine.piece = piece = self._growth.take(block)
        if piece is not None:  # whoever received it has found its sums
            channel.vouch(block, piece.sums.kind, piece.sums.checksum)
            same = self._kind == channel.digest_name
            self.digests.setdefault(block, piece.sums.digest if same else channel.digest(piece.view))
            return piece.view
        if not self._growth.is_readable(block):
            return None
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

    def lend(self, channel: Channel, tid: int) -> Lent | None:
        """To a worker that would send blocks itself."""
        connection = channel.lendable()
        if connection is None or self._kind != channel.digest_name:
            return None
        with self._lending:
            lent = self._growth.lend(connection, tid, channel.checksum_name)
            if lent is not None:
                self._lent = {one for one in self._lent if not one.has_ended} | {lent}
            return lent

    def settle(self) -> None:
        """On return it is known what workers have sent, and they send nothing more."""
        self._growth.decline()
        with self._timing:
            if self._waits:
                self._waits.cancel()
            self._waits = None
        with self._lending:
            lent, self._lent = self._lent, set()
        ended = [one.end() for one in lent]
        if not all(ended):
            self._growth.lose()

    def publish(self, tid: int, channel: Channel) -> Operation:
        """The PUBLISH of its sender. :raises TransferFailure: blocks must come again first."""
        assert self._growth.operation is not None
        known = self._growth.digests.copy()
        if len(known) < self._growth.operation.blocks:
            raise TransferFailure(ErrorClass.SERVER_BUSY, _GONE)
        if self._kind == channel.digest_name:
            for block, digest in known.items():
                self.digests.setdefault(block, digest)
        elif not self._growth.passed <= self.digests.keys():
            raise Undigested(ErrorClass.SERVER_BUSY, "the next hop wants digests of blocks that only it has")
        if not self._growth.may_be_said(channel.store):
            self._growth.meets(channel.store, False)
            raise TransferFailure(ErrorClass.SERVER_BUSY, _OTHERS)
        self.order, self._growth.was_said = self._growth.operation, True
        self._wait(True)
        return super().publish(tid, channel)

    @property
    def is_given_up(self) -> bool:
        """Tell whether nobody wants it any more."""
        return self._growth.is_stopped

    def until_result(self, control: Channel) -> Result | None:
        """As of :class:`Upload`."""
        self._growth.woken_by(control.abort)
        return super().until_result(control)

    def met(self, said_to: str | None) -> Result | None:
        """Before anything is sent: DONE if it is there already (:meth:`found_at`); else it may be said, or comes in.

        :param said_to: records that were asked to publish it before. :raises TransferFailure: it is not reached.
        """
        if said_to is None and self._growth.is_told_where:
            return None
        with Channel(self.gateway, self.routes[0]) as channel:
            store, is_lost = channel.store, has_lost(channel, said_to, self.ask())
        found = self.found() if is_lost else None
        if found is None and self._growth.operation is not None:
            self._growth.say(store)
        elif found is None:
            self._growth.meets(store, False)
        return found

    def found_at(self, said_to: str) -> Result | None:
        """DONE, if the terminal has lost the records that were asked to publish it, and just this file is there."""
        with Channel(self.gateway, self.routes[0]) as channel:
            is_lost = has_lost(channel, said_to, self.ask())
        return self.found() if is_lost else None

    def found(self) -> Result | None:
        """As :class:`Upload`, by the digests that its sender knows it by. Other operations of its origin go on."""
        from stageout.overlay.finding import generation_of

        order, known = self.order, self._growth.digests.copy()
        if len(known) < self.blocks:
            return None
        digests = [known[block] for block in range(self.blocks)]
        generation = generation_of(self.gateway, self.routes, order.path, self.size_bytes, self._kind, digests)
        if generation is None:
            return None
        with contextlib.suppress(TransferFailure), Channel(self.gateway, self.routes[0]) as control:
            control.send(Cancel(order.origin, order.seq, data_only=True))
            control.receive()
        return Result(order.origin, order.seq, "done", generation=generation)

    def count(self, size_bytes: int) -> None:
        """A block has left: its memory is free."""
        self._leave(True)
        super().count(size_bytes)

    def check_source(self) -> None:
        """Each block was compared with its digest."""

    def _buffer(self) -> memoryview:
        if not hasattr(self._mine, "view"):
            self._mine.view = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        view: memoryview = self._mine.view
        return view

    def _wait(self, has_published: bool) -> None:
        """It waits when there is no answer, and nothing else leaves, for so long from now on: behind PUBLISH only."""
        with self._timing:
            if self._waits:
                self._waits.cancel()
            if has_published or self._waits:
                self._waits = threading.Timer(WAITS_S, self._growth.waits)
                self._waits.daemon = True
                self._waits.start()

    def _leave(self, was_sent: bool) -> None:
        """Give back the block that this thread has sent, or could not send."""
        piece: Piece | None = getattr(self._mine, "piece", None)
        self._mine.piece = None
        if piece is not None:
            self._growth.give_back(piece, was_sent)

    def _damaged(self, block: int, why: str) -> Damaged:
        return Damaged(ErrorClass.SOURCE_CHANGED, f"{self.local}: block {block}: {why}")
