"""The flows that the processes of one user on this machine send now: a table in shared memory that each of them
updates.

Nothing in it is durable or secret, and all that it changes is who goes first. Without shared memory each process has a
table of its own.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

_ROWS = 4096
#: stamp, then the fields of :class:`Row`.
_ROW = struct.Struct("=dqqQQQqqdQ")
_HEAD = struct.Struct("=Q")
_FRESH_S = 1.0
_GONE_S = 10.0
_TRIES = 3
_TRY_S = 0.001


@dataclass(frozen=True)
class Row:
    """One lane.

    :param pid: of its process, on the whole machine. :param lane: its number there. :param link: hops have a number,
        flows and owners too (64 bits of a digest). :param begun_s: monotonic time.
    :param moved_bytes: that have arrived since it began. :param at_s: monotonic time of that.
    """

    pid: int
    lane: int
    link: int
    flow: int
    owner: int
    priority: int
    deadline: int
    begun_s: float
    moved_bytes: int
    at_s: float = 0.0


class Book:
    """The table. One thread of a process uses it.

    :param file: descriptor of the shared file; -1: nobody else sees it. :raises OSError: there is no room for it.
    """

    def __init__(self, file: int = -1) -> None:
        size_bytes = _HEAD.size + _ROWS * _ROW.size
        if file >= 0:  # a page that the filesystem has no room for would end whoever writes to it
            os.posix_fallocate(file, 0, size_bytes)
        self._file = file
        self._table = mmap.mmap(file, size_bytes)
        self._places: dict[tuple[int, int], int] = {}
        self._others: list[Row] = []

    def exchange(self, mine: Sequence[Row], now_s: float) -> list[Row]:
        """Write this process's rows, in place of those before, and read all. :param now_s: monotonic time."""
        if self._locked():
            try:
                self._write(mine, now_s)
                self._others = self._read({(row.pid, row.lane) for row in mine}, now_s)
            finally:
                if self._file >= 0:
                    fcntl.flock(self._file, fcntl.LOCK_UN)
        else:  # whoever has it may stand still for hours
            self._others = [row for row in self._others if _younger(row.at_s, _FRESH_S, now_s)]
        return [*mine, *self._others]

    def _locked(self) -> bool:
        """False while somebody else has it: a process that stands still must not hold up the others."""
        for _ in range(_TRIES if self._file >= 0 else 0):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                time.sleep(_TRY_S)
            else:
                return True
        return self._file < 0

    def _write(self, mine: Sequence[Row], now_s: float) -> None:
        self._places = {key: place for key, place in self._places.items() if self._is_at(key, place)}
        lanes = {(row.pid, row.lane) for row in mine}
        for lane in [lane for lane in self._places if lane not in lanes]:
            _ROW.pack_into(self._table, self._places.pop(lane), *[0] * 10)
        free = self._free(now_s)
        for row in mine:
            place = self._places.get((row.pid, row.lane)) or next(free, 0)
            if place:  # else the others do not see it
                self._places[row.pid, row.lane] = place
                _ROW.pack_into(self._table, place, now_s, *astuple(row)[:-1])

    def _is_at(self, lane: tuple[int, int], place: int) -> bool:
        """Tell whether a row is still there: when this process stood still for long, others have taken its places."""
        return bool(_ROW.unpack_from(self._table, place)[1:3] == lane)

    def _free(self, now_s: float) -> Iterator[int]:
        (used,) = _HEAD.unpack_from(self._table, 0)
        taken = set(self._places.values())
        for number in range(_ROWS):
            place = _HEAD.size + number * _ROW.size
            stamp_s = _ROW.unpack_from(self._table, place)[0]
            if number >= used:
                _HEAD.pack_into(self._table, 0, number + 1)
            if place not in taken and not _younger(stamp_s, _GONE_S, now_s):
                yield place

    def _read(self, mine: set[tuple[int, int]], now_s: float) -> list[Row]:
        (used,) = _HEAD.unpack_from(self._table, 0)
        size_bytes = min(used, _ROWS) * _ROW.size
        found = _ROW.iter_unpack(self._table[_HEAD.size : _HEAD.size + size_bytes])
        fresh = (Row(*row[1:], *row[:1]) for row in found if _younger(row[0], _FRESH_S, now_s))
        return [row for row in fresh if (row.pid, row.lane) not in mine]


def _younger(stamp_s: float, age_s: float, now_s: float) -> bool:
    """Tell whether a row was written so lately; others may have written after ``now_s`` was read. 0: nobody's."""
    return stamp_s > 0 and abs(now_s - stamp_s) < age_s


def shared_book(folder: Path = Path("/dev/shm")) -> Book:
    """The table of this user."""
    path = folder / f"stageout-links.{os.geteuid()}"
    file = -1
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        found = os.fstat(file)
        mine = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
        if mine and found.st_nlink == 1:  # under a second name it is some other file of this user
            return Book(file)
    except (OSError, ValueError):
        pass  # no such memory here, or it is full
    if file >= 0:
        os.close(file)
    return Book()
