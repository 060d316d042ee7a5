"""A router's uplink: a line of which it is known what it carries, shared by all that the router's processes send by it.

The router makes a file in shared memory and names it in the environment of the processes that it starts
(:data:`VARIABLE`); what each of them sends by a lane then takes turns there (:mod:`stageout.overlay.tuning.turns`). A
process decides for itself whose turn it is among its own flows, and shows the others where the first of these stands.
Nothing in the file is durable or secret.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import mmap
import os
import secrets
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stageout.core import log
from stageout.core.errors import StageoutError
from stageout.overlay.agreed import Agreed
from stageout.overlay.tuning.turns import MESSAGE_BYTES, Place, Turns, piece_bytes

#: Of a router's processes: what its line carries in bytes a second, a colon, and the file in which they share it.
VARIABLE = "STAGEOUT_UPLINK"
#: The fields that all agree on, in this order: as in :class:`Turns`.
_KNOWN = "free_s", "virtual", "passed_bytes", "since_s", "used", "messages_s"
#: Of one process: its pid, where its first flow stands, when it said who sends by it, and the size of what it said.
_SLOT = struct.Struct("=qddq")
_SLOTS, _SLOT_BYTES = 64, 4096
_SIZE_BYTES = _SLOT_BYTES * (1 + _SLOTS)
_FRESH_S = 3.0
_MOST_SAID = 128
#: Flows that are gone are remembered while there are no more than this.
_MOST_GONE = 1024


@dataclass(frozen=True)
class Sharer:
    """A sender that uses the line.

    :param to: next hop, or the address that a file goes to. :param owner: on whose behalf.

    :param flows: how many transfers of that priority. :param share: of the line, as far as they can use it.
    :param rate: bytes a second lately.
    """

    to: str
    owner: str
    priority: int
    flows: int
    share: float
    rate: float


class Turn(Place):
    """A flow of this process: its place, and the threads that wait with a piece of it, in order."""

    def __init__(self, uplink: Uplink, kind: tuple[str, int], weight: float, start: float) -> None:
        super().__init__(weight, start)
        self.kind, self._uplink = kind, uplink
        self.waiting: deque[threading.Condition] = deque()

    @property
    def piece_bytes(self) -> int:
        """The bytes that may leave at once."""
        return self._uplink.piece_bytes

    def take(self, size_bytes: int) -> None:
        """So many bytes are about to leave: wait until it is their turn."""
        self._uplink.take(self, size_bytes)


class Uplink:
    """It, in one of these processes.

    :param rate: what it carries, bytes a second. :param path: of the file that its processes share.
    :ivar connections: of all of them, as far as is known. :raises OSError: it cannot be had.
    """

    def __init__(self, rate: float, path: Path) -> None:
        self.path, self.connections = path, 1
        self._file = _opened(path)
        self._table = mmap.mmap(self._file, _SIZE_BYTES)
        self._turns = Turns(rate)
        self._agreed = Agreed(self._file, self._table, len(_KNOWN))
        self._lock = threading.Lock()
        self._active: set[Turn] = set()
        self._gone: dict[tuple[str, int], float] = {}
        self._slot = 0
        with self._lock, self._shared():
            self._slot = self._free_slot()
            self._show(math.inf)

    @property
    def rate(self) -> float:
        """Its rate, bytes a second."""
        return self._turns.rate

    @property
    def piece_bytes(self) -> int:
        """The bytes that may leave at once."""
        return piece_bytes(self.rate, self.connections)

    @property
    def number(self) -> int:
        """It stands for the line where links have numbers."""
        return int.from_bytes(hashlib.blake2b(os.fsencode(self.path), digest_size=8).digest(), "big")

    def close(self) -> None:
        """This process sends no more by it."""
        with self._lock, self._shared():
            if self._slot:
                _SLOT.pack_into(self._table, self._slot, 0, math.inf, 0.0, 0)
        self._table.close()
        os.close(self._file)

    def turn(self, kind: tuple[str, int], weight: float) -> Turn:
        """For a flow that begins. :param kind: owner and priority: it begins behind what ended ones of these had."""
        with self._lock:
            return Turn(self, kind, weight, self._gone.get(kind, 0.0))

    def end(self, turn: Turn) -> None:
        """A flow has ended."""
        with self._lock:
            if len(self._gone) >= _MOST_GONE:
                virtual = self._virtual()
                self._gone = {kind: start for kind, start in self._gone.items() if start > virtual}
            self._gone[turn.kind] = max(turn.start, self._gone.get(turn.kind, 0.0))

    def weigh(self, turn: Turn, weight: float) -> None:
        """Another weight of a flow from now on."""
        with self._lock:
            turn.weigh(weight, self._virtual())
            self._wake()

    def take(self, turn: Turn, size_bytes: int) -> None:
        """Wait until it is the turn of so many bytes of a flow. A message waits for nobody."""
        with self._lock:
            if self._lets(size_bytes):
                return
            if not turn.waiting:
                turn.begin(self._behind())
                self._active.add(turn)
            mine = threading.Condition(self._lock)
            turn.waiting.append(mine)
            try:
                while True:
                    first = min(self._active, key=_start)
                    if first.waiting[0] is not mine:
                        mine.wait()
                        continue
                    wait_s = self._try(turn, size_bytes)
                    if not wait_s:
                        return
                    mine.wait(wait_s)
            finally:
                turn.waiting.remove(mine)
                if not turn.waiting:
                    self._active.discard(turn)
                self._wake()

    def say(self, sharers: list[Sharer]) -> None:
        """Tell who asks the router what this process sends by the line."""
        sharers = sharers[:_MOST_SAID]
        while len(text := _written(sharers)) > _SLOT_BYTES - _SLOT.size:
            sharers = sharers[: len(sharers) * 3 // 4]
        with self._lock, self._shared():
            if self._slot:
                pid, head, _, _ = _SLOT.unpack_from(self._table, self._slot)
                _SLOT.pack_into(self._table, self._slot, pid, head, time.monotonic(), len(text))
                start = self._slot + _SLOT.size
                self._table[start : start + len(text)] = text

    def used(self) -> tuple[float, list[Sharer]]:
        """Bytes a second that leave by it lately, and who sends them, of all processes."""
        found: dict[tuple[str, str, int], Sharer] = {}
        with self._lock, self._shared():
            now_s = time.monotonic()
            for place, (_, _, said_s, size_bytes) in self._slots():
                text = self._table[place + _SLOT.size : place + _SLOT.size + size_bytes]
                for one in _read(text) if now_s - said_s < _FRESH_S else ():
                    key = one.to, one.owner, one.priority
                    found[key] = _both(found[key], one) if key in found else one
            return self._turns.rate_used(now_s), sorted(found.values(), key=lambda one: -one.rate)

    def _try(self, turn: Turn, size_bytes: int) -> float:
        """0: a piece of the first flow leaves now; else how long it waits before it tries again."""
        with self._shared():
            now_s = time.monotonic()
            turn.begin(self._turns.late)
            late = [place for place, slot in self._slots() if place != self._slot and slot[1] < turn.start]
            wait_s = self._turns.wait_s(turn.start, -math.inf if late else math.inf, now_s)
            if wait_s:
                self._show(turn.start)
                return wait_s
            for place in late:  # a process that has ended while it waited must not cost each piece this patience
                self._show(math.inf, place)
            self._turns.leaves(size_bytes, turn.start, now_s)
            turn.leave(size_bytes)
            rest = (one.start for one in self._active if one is not turn or len(one.waiting) > 1)
            self._show(min(rest, default=math.inf))
            return 0.0

    def _lets(self, size_bytes: int) -> bool:
        if size_bytes > MESSAGE_BYTES:
            return False
        with self._shared():
            return self._turns.lets(size_bytes, time.monotonic())

    def _wake(self) -> None:
        if self._active:
            min(self._active, key=_start).waiting[0].notify()

    def _behind(self) -> float:
        self._learn()
        return self._turns.behind

    def _virtual(self) -> float:
        self._learn()
        return self._turns.virtual

    def _learn(self) -> None:
        vars(self._turns).update(zip(_KNOWN, self._agreed.read() or ()))

    @contextlib.contextmanager
    def _shared(self) -> Iterator[None]:
        """The processes' knowledge of the line is in ``_turns`` meanwhile, and any change of it is theirs."""
        with self._agreed.held():
            self._learn()
            yield
            self._agreed.write([vars(self._turns)[name] for name in _KNOWN])

    def _slots(self) -> Iterator[tuple[int, tuple[int, float, float, int]]]:
        """Of all processes: offset, and what is there."""
        for place in range(_SLOT_BYTES, _SIZE_BYTES, _SLOT_BYTES):
            slot = _SLOT.unpack_from(self._table, place)
            if slot[0]:
                yield place, slot

    def _free_slot(self) -> int:
        """Offset of a place for this process; 0: others do not see it."""
        taken = {place for place, slot in self._slots() if _lives(slot[0])}
        return next((place for place in range(_SLOT_BYTES, _SIZE_BYTES, _SLOT_BYTES) if place not in taken), 0)

    def _show(self, start: float, place: int = 0) -> None:
        place = place or self._slot
        if place:
            pid, _, said_s, size_bytes = _SLOT.unpack_from(self._table, place)
            _SLOT.pack_into(self._table, place, pid if place != self._slot else os.getpid(), start, said_s, size_bytes)


@contextlib.contextmanager
def uplink_at(home: Path, rate: float) -> Iterator[Uplink]:
    """The uplink of a router, for its daemon; the processes that it starts meanwhile send by it.

    :param home: directory of its records. :param rate: bytes a second. :raises StageoutError: no shared memory.
    """
    name = hashlib.blake2b(os.fsencode(home.resolve()), digest_size=8).hexdigest()
    path = Path(f"/dev/shm/stageout-uplink.{os.geteuid()}.{name}")
    try:
        uplink = _begun(rate, path)
    except (OSError, ValueError) as problem:
        raise StageoutError(f"an uplink is shared in {path}, which cannot be had: {problem}") from None
    os.environ[VARIABLE] = f"{rate!r}:{uplink.path}"
    try:
        yield uplink
    finally:
        del os.environ[VARIABLE]
        uplink.close()
        uplink.path.unlink(missing_ok=True)


def _begun(rate: float, path: Path) -> Uplink:
    try:
        path.unlink(missing_ok=True)  # of a daemon that was killed, and of its processes, which end
        return Uplink(rate, path)
    except (PermissionError, IsADirectoryError):  # anybody may take a name there: no router is kept out by that
        return Uplink(rate, path.with_name(f"{path.name}.{secrets.token_hex(8)}"))


@functools.lru_cache(maxsize=1)
def uplink_of_this_process() -> Uplink | None:
    """The uplink of the router that started this process; None: none is known, or that router has ended."""
    rate, _, path = os.environ.get(VARIABLE, "").partition(":")
    try:
        return Uplink(float(rate), Path(path)) if path else None
    except (OSError, ValueError) as problem:
        log.error("uplink-sharing-failed", path=path, problem=repr(problem), advice="restart the router")
        return None


def _written(sharers: Sequence[Sharer]) -> bytes:
    return json.dumps([list(vars(one).values()) for one in sharers]).encode()


def _read(text: bytes) -> list[Sharer]:
    """The entry that :func:`_written` made; nothing, where a process was killed while it wrote."""
    try:
        return [Sharer(*row) for row in json.loads(text)]
    except (ValueError, TypeError):
        return []


def _start(turn: Turn) -> float:
    return turn.start


def _both(one: Sharer, other: Sharer) -> Sharer:
    flows, share, rate = one.flows + other.flows, one.share + other.share, one.rate + other.rate
    return Sharer(one.to, one.owner, one.priority, flows, share, rate)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _opened(path: Path) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077 or found.st_nlink != 1:
        os.close(file)
        raise PermissionError(f"{path} is somebody else's")
    try:
        os.posix_fallocate(file, 0, _SIZE_BYTES)
    except OSError:
        os.close(file)
        raise
    return file
