"""Connections to the next hop that the carrier lends to a worker: a block leaves by the thread that receives it.

The carrier makes such a connection and attaches it there, hears all that the next hop says, and is told of each block
that has left. The worker sends a block when it has come and was found to be right, while it is in the processor's
cache. Data that the next hop does not take in time are written to the disk here, and brought to their end there
meanwhile.

Five rules:

1. A connection on loan is used by one thread at a time, and never by the carrier.
2. A frame that was begun is brought to its end, or the connection is shut: nothing else follows it.
3. The carrier hears of a block when all of it has left; of one that has not, nothing.
4. It is given back between two blocks when the carrier recalls it, and shut when either process ends.
5. When the carrier ends, each connection of a sender whose blocks left so is ended: what of them is not STAGED comes
   again, whether it was told or not.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.core.threads import NoThread, started
from stageout.overlay.tcp import TIME_BYTES, UNSENT_BYTES, send_at_most, unsent_bytes
from stageout.overlay.wire import frames
from stageout.overlay.wire.frames import DIGEST_BYTES, Type

#: A worker asks for one, says what has left, and gives one back; a carrier lends one, and recalls it.
WANTED, LEFT, BACK, LEND, RECALL = range(16, 21)
_WORD = struct.Struct("=BQ")
_LEND = struct.Struct("=BQQQ8s")
_LEFT = struct.Struct(f"=QQ{DIGEST_BYTES}s")
#: While more come, so many blocks are told at once, or those of so long.
_TELL_BLOCKS, _TELL_S = 64, 0.1
#: A next hop that takes nothing for so long, or so long for a block, does not keep up: some more go as before.
_PATIENCE_S, _SLOW_S = 0.25, 0.1
_MOST_DOUBLINGS = 6
#: Once a block has begun to leave, it is waited for so long before it is written; and then for the rest of it to leave.
_STALL_S, _FINISH_S = 0.25, 60.0
#: One that is recalled comes back within moments.
_BACK_S = 5.0
#: Between two requests, at first and at most.
_ASK_S, _MOST_ASK_S = 0.2, 2.0


@dataclass(eq=False)
class Loan:
    """One of them, at the worker.

    :param tid: of the transfer here. :param far_tid: of that at the next hop. :param checksum: its kind of checksums.
    """

    number: int
    tid: int
    far_tid: int
    checksum: str
    connection: socket.socket
    is_taken: bool = False
    is_sending: bool = False
    is_recalled: bool = False
    is_broken: bool = False
    _rest: list[memoryview] = field(default_factory=list)
    _patience_s: float = 0.0
    _unsent_bytes: int = UNSENT_BYTES

    def __post_init__(self) -> None:
        """Both processes have the same connection, so what is set here is set there."""
        self._poll = select.poll()
        self._poll.register(self.connection, select.POLLOUT)
        self._carriers_patience = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, TIME_BYTES)

    def is_ready(self, within_s: float) -> bool:
        """Tell whether the next hop takes something within so many seconds."""
        if self.connection.fileno() < 0:  # it was recalled, and closed
            return False
        return any(event & select.POLLOUT for _, event in self._poll.poll(within_s * 1000))

    def send(self, header: frames.Header, data: memoryview, checksum: frames.Checksum) -> bool:
        """Send a block that came with a header; False: it lags, for the next hop took nothing for a while or is gone.

        :param data: must stay as it is until :meth:`finish` has returned.
        """
        _, _, length_bytes, _, block, known = header
        head = frames.pack_header(Type.BLOCK, length_bytes, known, checksum, self.far_tid, block)
        self._rest, began_s = [memoryview(head), data], time.monotonic()
        is_sent = self._go_on(_STALL_S)
        if is_sent:
            with contextlib.suppress(OSError):  # it has ended, as the next block will see
                self._let_wait(unsent_bytes(length_bytes, time.monotonic() - began_s))
        return is_sent

    def finish(self) -> bool:
        """Bring a block that lags to its end; False: that cannot be, and nothing more goes by this connection."""
        if self._go_on(_FINISH_S):
            return True
        self._shut()
        return False

    def close(self) -> None:
        """It is used no more here, and waits in the carrier as it did before."""
        with contextlib.suppress(OSError):  # it has ended
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, self._carriers_patience)
            self._let_wait(UNSENT_BYTES)
        self.connection.close()

    def _let_wait(self, size_bytes: int) -> None:
        if size_bytes != self._unsent_bytes and self.connection.family != socket.AF_UNIX:
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, size_bytes)
            self._unsent_bytes = size_bytes

    def _shut(self) -> None:
        self.is_broken = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _go_on(self, patience_s: float) -> bool:
        try:
            if patience_s != self._patience_s:
                send_at_most(self.connection, patience_s)
                self._patience_s = patience_s
            while self._rest:  # the kernel waits: each time that this thread does costs it a lock, and its place
                self._rest = _behind(self._rest, self.connection.sendmsg(self._rest))
        except BlockingIOError:
            return False
        except OSError:
            self._shut()
        return not self.is_broken


def _behind(parts: list[memoryview], count: int) -> list[memoryview]:
    """The rest of parts when so many bytes of them are gone."""
    if count == sum(map(len, parts)):
        return []
    left = []
    for part in parts:
        if count < len(part):
            left.append(part[count:])
        count = max(0, count - len(part))
    return left


@dataclass
class _Pace:
    """Whether the next hop keeps up. :param failures: waits in vain. :param skips: blocks that do not wait for it.

    :param vain_asks: requests without an answer. :param asked_s: monotonic time of the last.
    """

    failures: int = 0
    skips: int = 0
    vain_asks: int = 0
    asked_s: float = float("-inf")

    def rests(self) -> bool:
        """Tell whether this block does not wait for the hop."""
        if not self.skips:
            return False
        self.skips -= 1
        return True

    def asks(self) -> bool:
        """Tell whether it is time for a request: then one is made."""
        now_s = time.monotonic()
        if now_s - self.asked_s <= min(_MOST_ASK_S, _ASK_S * 2**self.vain_asks):
            return False
        self.vain_asks, self.asked_s = min(self.vain_asks + 1, 10), now_s
        return True


class Loans:
    """The loans that a worker has from one carrier. :param say: tells the carrier."""

    def __init__(self, say: Callable[[bytes], None]) -> None:
        self._say, self._lock = say, threading.Lock()
        self._telling = threading.Lock()  # taken before the other: nothing overtakes what is being told
        self._wanted: dict[int, _Pace] = {}
        self._loans: dict[int, Loan] = {}
        self._untold: list[bytes] = []
        self._untold_s = 0.0
        self._users: set[Callable[[], None]] = set()
        self._is_over = False

    def use(self, stop: Callable[[], None]) -> None:
        """A worker that sends by them is stopped when the carrier ends: nobody may have heard what has left.

        :param stop: called once, perhaps at once, and never after :meth:`leave_off` has returned. It must not wait.
        """
        with self._lock:
            self._users.add(stop)
            if self._is_over:
                stop()

    def leave_off(self, stop: Callable[[], None]) -> None:
        """A worker that was to be stopped so sends no more."""
        with self._lock:
            self._users.discard(stop)

    def want(self, tid: int) -> None:
        """Blocks of a transfer need not be written if they are sent on."""
        with self._lock:
            self._wanted.setdefault(tid, _Pace())

    def drop(self, tid: int) -> None:
        """Nobody sends it on any more."""
        with self._lock:
            self._wanted.pop(tid, None)
            found = [loan for loan in self._loans.values() if loan.tid == tid]
        self._recall(found)

    def end(self) -> None:
        """The carrier has ended."""
        with self._lock:
            self._is_over = True
            self._wanted.clear()
            found = list(self._loans.values())
            for stop in self._users:
                stop()
        self._recall(found)

    def hear(self, message: bytes, descriptors: Collection[int]) -> bool:
        """The carrier's message; False: it is not about loans."""
        if message[0] == RECALL:
            _, number = _WORD.unpack(message)
            with self._lock:
                found = [loan for loan in (self._loans.get(number),) if loan]
            self._recall(found)
        elif message[0] == LEND:
            _, tid, number, far_tid, checksum = _LEND.unpack(message)
            for descriptor in descriptors:
                kind = checksum.rstrip(b"\0").decode()
                self._add(Loan(number, tid, far_tid, kind, socket.socket(fileno=descriptor)))
            if not descriptors:  # the kernel drops what this process may not have: the carrier keeps it
                self._say(_WORD.pack(BACK, number))
        else:
            return False
        return True

    def take(self, tid: int, checksum: str) -> Loan | None:
        """A connection for a block, which is to :meth:`send` or :meth:`leave`; None: none is free, or the hop is slow.

        :param checksum: the kind that blocks come with.
        """
        with self._lock:
            pace = self._wanted.get(tid)
            if pace is None or pace.rests():
                return None
            loan = next((loan for loan in self._loans.values() if loan.tid == tid and not loan.is_taken), None)
            if loan:
                loan.is_taken = True
            is_asked = loan is None and pace.asks()
        if loan is None:
            if is_asked:
                self._say(_WORD.pack(WANTED, tid))
            return None
        if loan.checksum != checksum:
            loan.is_recalled = True
        elif loan.is_ready(_PATIENCE_S):
            return loan
        self._note_slow(pace)
        self.leave(loan)
        return None

    def send(
        self, loan: Loan, header: frames.Header, data: memoryview, checksum: frames.Checksum, digest: bytes
    ) -> bool:
        """Send a block and leave the connection; False: the next hop has not taken it in time, or cannot any more.

        :param header: that it came with. :param data: stays as it is for ever after, where this returns False: what has
            begun to leave is brought to its end in a thread.
        """
        with self._lock:
            if loan.is_recalled:
                self._loans.pop(loan.number, None)
                return False
            loan.is_sending = True
        began_s = time.monotonic()
        has_left = loan.send(header, data, checksum)
        self._note_pace(loan, has_left and time.monotonic() - began_s < _SLOW_S)
        if has_left:
            self._note(loan, header.block, digest)
            self.leave(loan)
            return True

        def finish() -> None:
            if loan.finish():
                self._note(loan, header.block, digest)
            self.leave(loan)
            self.flush()

        try:
            started(finish)
        except NoThread:
            finish()
        return False

    def leave(self, loan: Loan) -> None:
        """It may serve another block."""
        with self._lock:
            loan.is_taken = loan.is_sending = False
            is_over = (loan.is_broken or loan.is_recalled) and self._loans.pop(loan.number, None) is not None
        if is_over:
            self._end(loan)

    @property
    def has_untold(self) -> bool:
        """Tell whether something has left that is not told: who waits for more than a moment says :meth:`flush`
        before."""
        return bool(self._untold)

    def flush(self) -> None:
        """Tell what has left. On return it is told, whoever does that."""
        with self._telling:
            with self._lock:
                untold, self._untold = self._untold, []
            if untold:
                self._say(b"".join((bytes([LEFT]), *untold)))

    def _note(self, loan: Loan, block: int, digest: bytes) -> None:
        now_s = time.monotonic()
        with self._lock:
            if not self._untold:
                self._untold_s = now_s
            self._untold.append(_LEFT.pack(loan.number, block, digest))
            is_due = len(self._untold) >= _TELL_BLOCKS or now_s - self._untold_s >= _TELL_S
        if is_due:
            self.flush()

    def _note_pace(self, loan: Loan, keeps_up: bool) -> None:
        with self._lock:
            pace = self._wanted.get(loan.tid)
        if pace and keeps_up:
            pace.failures = 0
        elif pace:
            self._note_slow(pace)

    def _note_slow(self, pace: _Pace) -> None:
        pace.failures = min(pace.failures + 1, _MOST_DOUBLINGS)
        pace.skips = 2**pace.failures

    def _add(self, loan: Loan) -> None:
        with self._lock:
            pace = self._wanted.get(loan.tid)
            if pace is not None:
                pace.vain_asks = 0
                self._loans[loan.number] = loan
                return
        self._end(loan)

    def _recall(self, found: Iterable[Loan]) -> None:
        """Those by which nothing leaves now go at once, the others after their block."""
        idle = []
        with self._lock:
            for loan in found:
                loan.is_recalled = True
                if not loan.is_sending and loan.number in self._loans:
                    del self._loans[loan.number]
                    idle.append(loan)
        for loan in idle:
            self._end(loan)

    def _end(self, loan: Loan) -> None:
        self.flush()
        loan.close()
        self._say(_WORD.pack(BACK, loan.number))


class Lent:
    """One of them, at the carrier, until it :attr:`has_ended`. A context manager: :meth:`end` is its end.

    :param say: tells the worker, with descriptors. :param heard: is told of blocks that have left, with their digests.
    """

    def __init__(
        self, number: int, say: Callable[[bytes, list[int]], None], heard: Callable[[Mapping[int, bytes]], None]
    ) -> None:
        self.number, self._say, self._heard = number, say, heard
        self._changed = threading.Condition()
        self._hearing = threading.Lock()
        self._left: dict[int, bytes] = {}
        self._untaken: set[int] = set()
        self._is_recalled = self._is_lost = False
        self._left_s = time.monotonic()
        self.is_back = False

    def __enter__(self) -> Lent:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    @property
    def has_ended(self) -> bool:
        """Tell whether no more leaves by it."""
        return self.is_back or self._is_lost

    @property
    def idle_s(self) -> float:
        """Return how long nothing has left by it, in seconds."""
        return time.monotonic() - self._left_s

    def lend(self, tid: int, far_tid: int, checksum: str, connection: int) -> None:
        """Give it away. :param connection: its descriptor. :raises OSError: the worker has ended."""
        self._say(_LEND.pack(LEND, tid, self.number, far_tid, checksum.encode()), [connection])

    def recall(self) -> None:
        """It is wanted back after the block that leaves now."""
        if not self._is_recalled:
            self._is_recalled = True
            with contextlib.suppress(OSError):
                self._say(_WORD.pack(RECALL, self.number), [])

    def end(self) -> bool:
        """Recall it, and hear all that has left; False: that could not be had."""
        self.recall()
        with self._changed:
            self._changed.wait_for(lambda: self.has_ended, _BACK_S)
        self._hear()
        return self.has_ended

    def wait(self, within_s: float) -> Collection[int]:
        """Blocks that have left since the last call, once there are some, or that time is over.

        :raises TransferFailure: the worker has ended, perhaps in the middle of a frame.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._left or self.has_ended, within_s)
        if self._is_lost:
            raise TransferFailure(ErrorClass.CONNECTION_LOST, "the process that sent by the connection has ended")
        return self.rest()

    def rest(self) -> Collection[int]:
        """Blocks that have left and were not yet returned, whoever has heard of them."""
        self._hear()
        with self._changed:
            rest, self._untaken = self._untaken, set()
        return rest

    def left(self, blocks: Mapping[int, bytes]) -> None:
        """These have left."""
        with self._changed:
            self._left_s = time.monotonic()
            self._left.update(blocks)
            self._changed.notify_all()

    def back(self) -> None:
        """The worker does not use it any more."""
        with self._changed:
            self.is_back = True
            self._changed.notify_all()

    def lost(self) -> None:
        """The worker has ended."""
        with self._changed:
            self._is_lost = True
            self._changed.notify_all()

    def _hear(self) -> None:
        """On return all that was said is heard, whichever thread does that."""
        with self._hearing:
            with self._changed:
                left, self._left = self._left, {}
                self._untaken.update(left)
            if left:
                self._heard(left)


def wanted(message: bytes) -> int:
    """The transfer that a worker wants one for; 0: it says something else."""
    return int(_WORD.unpack(message)[1]) if message[0] == WANTED else 0


def back(message: bytes) -> int:
    """The number of one that a worker gives back; 0: it says something else."""
    return int(_WORD.unpack(message)[1]) if message[0] == BACK else 0


def left(message: bytes) -> dict[int, dict[int, bytes]]:
    """Blocks that a worker says have left, with their digests, by the numbers of the connections; {} of other words."""
    found: dict[int, dict[int, bytes]] = {}
    for number, block, digest in _LEFT.iter_unpack(message[1:]) if message[0] == LEFT else ():
        found.setdefault(number, {})[block] = digest
    return found
