"""Numbers that processes agree on in shared memory, whoever of them is killed or stands still while it changes them.

They are there twice, each copy with a number that grows and a checksum: a change is written over the older copy, and
the newest one that is whole counts. So half a copy, of a process that was killed, is none, and what a process writes
that stood still meanwhile is older than what counts. A process that changes them holds a lock for moments. A process
that cannot get the lock in time goes on without it, and all others take another lock from then on. So a process that
hangs with the old lock delays nobody, and at worst one change is lost.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import time
import zlib
from collections.abc import Iterator, Sequence

#: The fields' offsets in the memory, from its beginning.
SIZE_BYTES = 1024
_NUMBER, _SUM = struct.Struct("=Q"), struct.Struct("=I")
_COPIES = 0, 256
#: Where it stands which lock all take: a byte, which is written whole or not at all.
_LOCK_AT, _LOCKS = 512, 256
#: So long one is tried for, and so often at least: a process that stood still itself learns nothing from the time.
_PATIENCE_S, _TRIES, _TRY_S = 0.05, 20, 0.00025
#: Locks of a part of a file that belong to who opened it. Not every build of Python has the name.
_SET_LOCK = getattr(fcntl, "F_OFD_SETLK", 37)
_LOCK = struct.Struct("hhqqi")


class Agreed:
    """They, in one of the processes.

    :param file: descriptor of the shared memory, opened for this object only. :param count: how many numbers.
    """

    def __init__(self, file: int, table: mmap.mmap, count: int) -> None:
        self._file, self._table = file, table
        self._values = struct.Struct(f"={count}d")
        self._newest = 0

    def read(self) -> Sequence[float] | None:
        """They, with or without the lock; None: nobody has written any, or all that could be had is half a copy."""
        found = max((copy for copy in map(self._copy, _COPIES) if copy), default=None)
        if found is None:
            return None
        self._newest = found[0]
        return found[1]

    def write(self, values: Sequence[float]) -> None:
        """Change them, as they were last read. With the lock, or once in a while without."""
        number = self._newest + 1
        record = _NUMBER.pack(number) + self._values.pack(*values)
        self._newest = number
        _put(self._table, _COPIES[number % len(_COPIES)], record + _SUM.pack(zlib.crc32(record)))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """With the lock meanwhile, or without it, where nobody comes to an end with it."""
        lock = self._locked()
        try:
            yield
        finally:
            if lock >= 0:
                self._set(lock, fcntl.F_UNLCK)

    def _copy(self, place: int) -> tuple[int, Sequence[float]] | None:
        size_bytes = _NUMBER.size + self._values.size
        record = self._table[place : place + size_bytes]
        if _SUM.unpack_from(self._table, place + size_bytes)[0] != zlib.crc32(record):
            return None
        return _NUMBER.unpack_from(record)[0], self._values.unpack_from(record, _NUMBER.size)

    def _locked(self) -> int:
        """The lock that was to be had; -1: none, and others take another one now."""
        began_s, tries, lock = time.monotonic(), 0, self._table[_LOCK_AT]
        while not self._set(lock, fcntl.F_WRLCK):
            tries += 1
            if tries >= _TRIES and time.monotonic() - began_s > _PATIENCE_S:
                self._table[_LOCK_AT] = (lock + 1) % _LOCKS
                return -1
            time.sleep(_TRY_S)
            if lock != self._table[_LOCK_AT]:
                lock, began_s, tries = self._table[_LOCK_AT], time.monotonic(), 0
        return lock

    def _set(self, lock: int, kind: int) -> bool:
        try:
            fcntl.fcntl(self._file, _SET_LOCK, _LOCK.pack(kind, os.SEEK_SET, lock, 1, 0))
        except BlockingIOError:
            return False
        return True


def _put(table: mmap.mmap, place: int, record: bytes) -> None:
    table[place : place + len(record)] = record
