"""Files of records in the format of HTCondor's history: one ``Attribute = value`` a line, then a line with ``***``.

``condor_history -file`` and ``condor_history -search`` read them. Strings are quoted as in the old syntax of ClassAds,
in which a line end becomes a blank: a text in a record can never look like another record.
"""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any, Callable, NamedTuple

from stageout.core import durable, log
from stageout.core.classad_parser import parse_old
from stageout.core.classads import unparse_old
from stageout.core.states import State

FILE_NAME = "stageout_history"
#: As HTCondor's history, which every user may read.
_MODE = 0o644
_BLOCK = 1 << 18
_TAIL = 1 << 20
#: Bytes of records that one write appends at most.
_PIECE = 1 << 18
_MOST_KNOWN = 20_000
#: Longer text without a banner is no record. So reading needs little memory in a file that is damaged, too.
_MOST_RECORD = 4 << 20
_BANNER = re.compile(rb"^\*\*\* [^\n]*\n", re.M)
_LINE = re.compile(rb'^(\w+) = (?:"([^"\\\n]*)"|(-?\d+)|(true|false)|([^\n]+))$', re.M)
_STAMP = "%Y%m%dT%H%M%S"
_UNSAFE = re.compile(r"[^!#-\[\]-~]")


class HistoryEntry(NamedTuple):
    """A record as it stands in the file. :param text: its lines, without the banner. :param banner: the last line."""

    text: bytes
    banner: bytes

    def attributes(self) -> dict[str, Any]:
        """Return the attributes with plain values. Lines that are none are left out."""
        found: dict[str, Any] = {}
        for name, string, number, word, other in _LINE.findall(self.text):
            key = name.decode("ascii", "replace")
            if number:
                found[key] = int(number)
            elif word:
                found[key] = word == b"true"
            elif other:
                found.update(parse_old(f"{key} = {other.decode('utf-8', 'replace')}"))
            else:
                found[key] = string.decode("utf-8", "replace")
        return found


# ---- reading ---------------------------------------------------------------------------------------------------------


def newest_first(path: Path) -> Iterator[HistoryEntry]:
    """Yield the records of the file and of its rotated parts, newest first. A record without its banner is left out.

    A rotated part that cannot be read is logged and left out. :raises OSError: the file itself cannot be read.
    """
    seen: set[int] = set()
    for part in _parts(path):
        try:
            yield from _part(part, seen)
        except FileNotFoundError:
            continue
        except OSError as problem:
            if part == path:
                raise
            log.warn("history-read-failed", path=part, problem=problem)


def _part(part: Path, seen: set[int]) -> Iterator[HistoryEntry]:
    """Yield the records of one file, newest first. :param seen: inodes of the files that were read; it is changed."""
    descriptor = durable.disk.open(part, os.O_RDONLY | os.O_CLOEXEC)
    try:
        inode = durable.disk.fstat(descriptor).st_ino
        if inode not in seen:  # the file may be rotated while it is read
            seen.add(inode)
            yield from _backwards(descriptor)
    finally:
        durable.disk.close(descriptor)


def _parts(path: Path) -> Iterator[Path]:
    yield path
    yield from (part for _, part in reversed(_rotated(path)))


def _rotated(path: Path) -> list[tuple[datetime, Path]]:
    """Return the rotated parts with the times in their names, oldest first."""
    found = []
    for name in durable.disk.listdir(path.parent):
        if name.startswith(f"{path.name}."):
            with suppress(ValueError):  # another file
                found.append((datetime.strptime(name[len(path.name) + 1 :], _STAMP), path.with_name(name)))
    return sorted(found)


def _backwards(descriptor: int) -> Iterator[HistoryEntry]:
    """Yield the records of one file, newest first. Text that is too long for a record is left out."""
    position, carried = durable.disk.fstat(descriptor).st_size, b""
    while position:
        length = min(_BLOCK, position)
        position -= length
        data = _read(descriptor, length, position) + carried
        # A block may begin within a line, whose rest is no banner whatever it looks like.
        banners = list(_BANNER.finditer(data, data.find(b"\n") + 1 if position else 0))
        for before, banner in zip(banners[-2::-1], banners[:0:-1]):
            yield HistoryEntry(data[before.end() : banner.start()], banner[0])
        carried = data[: banners[0].end()] if banners else data
        if len(carried) > _MOST_RECORD:
            carried = carried[: carried.find(b"\n", 0, _BLOCK) + 1]  # a banner may begin before this block
    first = _BANNER.search(carried)
    if first:
        yield HistoryEntry(carried[: first.start()], first[0])


def _read(descriptor: int, length: int, position: int) -> bytes:
    """Return this part of a file, less where the file was cut off meanwhile."""
    found = b""
    while len(found) < length:
        part = durable.disk.pread(descriptor, length - len(found), position + len(found))
        if not part:
            break
        found += part
    return found


class _Part(NamedTuple):
    """An open part of a history."""

    inode: int
    descriptor: int
    path: Path


class HistoryFollower:
    """Reader of a history file, oldest record first, that goes on where it stopped. Rotation loses no record.

    A rotated part that cannot be read is left out, with one line in the log.

    :ivar restarts: times that the file was replaced or cut off. Reading then began again with the oldest part.
    :ivar unreadable: parts that are left out, as long as they exist and were not read since.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.restarts = 0
        self.unreadable: set[Path] = set()
        self._inode, self._offset, self._banner = 0, 0, b""

    def read(self, most_bytes: int) -> list[HistoryEntry]:
        """Return the next records, read from about this number of bytes. The list is empty after the newest record.

        :raises OSError: the newest part cannot be read.
        """
        parts: list[_Part] = []
        try:
            self._open(parts)
            for part in parts[self._resume_index(parts) :]:
                if part.inode != self._inode:
                    self._inode, self._offset, self._banner = part.inode, 0, b""
                try:
                    found = self._forwards(part.descriptor, most_bytes)
                except OSError as problem:
                    self._leave_out(part.path, problem)
                    continue
                self.unreadable.discard(part.path)
                if found:
                    return found
            return []
        finally:
            for part in parts:
                durable.disk.close(part.descriptor)

    def _open(self, parts: list[_Part]) -> None:
        """Open all parts, oldest first. The newest is opened first, because a rotation may happen meanwhile."""
        there = set()
        for path in _parts(self._path):
            there.add(path)
            try:
                descriptor = durable.disk.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            except OSError as problem:
                self._leave_out(path, problem)
                continue
            inode = durable.disk.fstat(descriptor).st_ino
            if any(inode == known.inode for known in parts):
                durable.disk.close(descriptor)
            else:
                parts.insert(0, _Part(inode, descriptor, path))
        self.unreadable &= there

    def _leave_out(self, path: Path, problem: OSError) -> None:
        if path == self._path:
            raise problem
        if path not in self.unreadable:
            log.warn("history-read-failed", path=path, problem=problem)
        self.unreadable.add(path)

    def _resume_index(self, parts: Sequence[_Part]) -> int:
        """Return the index of the part in which reading stopped. A new file may have the inode of an old one."""
        for index, part in enumerate(parts):
            if part.inode == self._inode and self._still_has_last(part.descriptor):
                return index
        self.restarts += self._inode != 0
        self._inode, self._offset, self._banner = 0, 0, b""
        return 0

    def _still_has_last(self, descriptor: int) -> bool:
        """Tell whether the last record read is still there; False if the file cannot be read."""
        length = len(self._banner)
        with suppress(OSError):
            return _read(descriptor, length, self._offset - length) == self._banner
        return False

    def _forwards(self, descriptor: int, most_bytes: int) -> list[HistoryEntry]:
        """Return the next records of a file. Text that is too long for a record is left out, up to the next banner."""
        place, is_damaged, is_within_line = self._offset, False, False
        while True:
            data = _read(descriptor, most_bytes, place)
            # The rest of a line is no banner whatever it looks like.
            banners = list(_BANNER.finditer(data, is_within_line))
            if banners:
                starts = [0, *(banner.end() for banner in banners)]
                self._offset, self._banner = place + starts[-1], banners[-1][0]
                found = [HistoryEntry(data[start : end.start()], end[0]) for start, end in zip(starts, banners)]
                if found[is_damaged:]:
                    return found[is_damaged:]
                place, is_damaged, is_within_line = self._offset, False, False
            elif len(data) < most_bytes:
                return []
            elif most_bytes < _MOST_RECORD:
                most_bytes *= 2
            else:
                length = data.rfind(b"\n") + 1 or len(data)  # the last line may be the first half of a banner
                place, is_damaged, is_within_line = place + length, True, data[length - 1] != ord("\n")


# ---- records of files ------------------------------------------------------------------------------------------------


def ended_at(ad: Mapping[str, Any]) -> int:
    """Return the end of a delivery, as wall clock in seconds: when it was recorded, if nothing better is known."""
    for name in ("TransferEndTime", "StageOutEndedAt", "RecordWriteDate"):
        if ad.get(name):
            return int(ad[name])
    return 0


def took_s(ad: Mapping[str, Any]) -> int | None:
    """Return the seconds between acceptance and delivery, None when they are not known."""
    end = ad.get("TransferEndTime") or ad.get("StageOutEndedAt")
    start = ad.get("StageOutAcceptedAt")
    return max(0, end - start) if end and start and ad.get("StageOutState") == State.DELIVERED else None


# ---- writing ---------------------------------------------------------------------------------------------------------


class HistoryFile:
    """Writer of a history file. Only one process writes it.

    :param key_of: identity of a record: one that the end of the file has is not appended again.
    :param max_bytes: the file is rotated before it grows beyond this size. :param rotations: rotated parts to keep.
    :param wall_s: wall clock.
    """

    def __init__(
        self, path: Path, key_of: Callable[[Mapping[str, Any]], Hashable], wall_s: Callable[[], float],
        max_bytes: int = 20 << 20, rotations: int = 2,
    ) -> None:  # fmt: skip
        self.set_limits(max_bytes, rotations)
        self._path, self._key_of, self._wall_s = path, key_of, wall_s
        self._newest_keys: dict[Hashable, None] | None = None

    def set_limits(self, max_bytes: int, rotations: int) -> None:
        """Set the largest size of the file, and the number of rotated parts."""
        self._max_bytes, self._rotations = max_bytes, rotations

    def has(self, key: Hashable) -> bool:
        """Tell whether the end of the file has a record. :raises OSError: the file cannot be read."""
        return key in self._recent()

    def append(self, ads: Iterable[Mapping[str, Any]]) -> int:
        """Append the records that the file does not have. On return they are on the disk.

        :returns: the number of new records. :raises OSError: some or all of them are not in the file.
        """
        known = self._recent()
        new = {self._key_of(ad): ad for ad in ads if self._key_of(ad) not in known}
        rows = iter(new.items())
        while True:
            piece = _piece(rows)
            if not piece:
                return len(new)
            self._write([text for _, _, text in piece], [ad for _, ad, _ in piece])
            known.update(dict.fromkeys(key for key, _, _ in piece))
            for key in list(islice(known, max(0, len(known) - _MOST_KNOWN))):
                del known[key]

    def _recent(self) -> dict[Hashable, None]:
        """Return the keys of the newest records, read from the files when this process first asks.

        They are many more than a pass of the agent appends, so that none of a pass that was cut short comes twice.
        """
        if self._newest_keys is None:
            newest = islice(newest_first(self._path), _MOST_KNOWN)
            found = [self._key_of(record.attributes()) for record in newest]
            self._newest_keys = dict.fromkeys(reversed(found))
        return self._newest_keys

    def _write(self, texts: Sequence[bytes], ads: Sequence[Mapping[str, Any]]) -> None:
        end = self._end()
        data = self._records(texts, ads, *end)
        if end[0] and end[0] + len(data) > self._max_bytes:
            self._rotate()
            end = (0, 0)
            data = self._records(texts, ads, *end)
        durable.append_file("history-append", path=self._path, data=data, mode=_MODE, keep=end[0])

    def _records(self, texts: Sequence[bytes], ads: Sequence[Mapping[str, Any]], start: int, last_banner: int) -> bytes:
        """Return the records as they stand in the file. :param start: of the first one."""
        data, now = bytearray(), int(self._wall_s())
        for text, ad in zip(texts, ads):
            data += text
            banner = _banner(ad, last_banner, now)
            last_banner = start + len(data)
            data += banner
        return bytes(data)

    def _end(self) -> tuple[int, int]:
        """Return the end of the last whole record, and the start of its banner. A crash may have left a part behind.

        A file whose end has no record is rotated.
        """
        try:
            descriptor = durable.disk.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return 0, 0
        try:
            size = durable.disk.fstat(descriptor).st_size
            start = max(0, size - _TAIL)
            banners = list(_BANNER.finditer(_read(descriptor, size - start, start)))
        finally:
            durable.disk.close(descriptor)
        if banners:
            return start + banners[-1].end(), start + banners[-1].start()
        if size:
            log.warn("history-end-damaged", path=self._path, advice="it is rotated: look what wrote there")
            self._rotate()
        return 0, 0

    def _rotate(self) -> None:
        """Give the file the name that HTCondor would, after the oldest parts were removed."""
        parts = _rotated(self._path)
        for _, old in parts[: -(self._rotations - 1) or None]:
            durable.unlink("history-rotate", old)
        at = datetime.fromtimestamp(self._wall_s())
        if parts:  # parts are in the order of their names, whatever the clock says
            at = max(at, parts[-1][0] + timedelta(seconds=1))
        target = self._path.with_name(f"{self._path.name}.{at:{_STAMP}}")
        durable.rename("history-rotate", self._path, target)


def _piece(
    rows: Iterator[tuple[Hashable, Mapping[str, Any]]],
) -> list[tuple[Hashable, Mapping[str, Any], bytes]]:
    """Take rows until their text is long enough for one write."""
    left = _PIECE
    found = []
    for key, ad in rows:
        text = unparse_old(ad).encode("utf-8", "replace")
        found.append((key, ad, text))
        left -= len(text)
        if left <= 0:
            break
    return found


def _banner(ad: Mapping[str, Any], last_banner: int, now: int) -> bytes:
    """Return the banner of HTCondor's history. :param last_banner: where the banner before it starts."""
    owner = _UNSAFE.sub("_", str(ad.get("Owner", "?")))
    text = f"*** Offset = {last_banner} ClusterId = {ad.get('ClusterId', -1)} ProcId = {ad.get('ProcId', -1)} "
    return f'{text}Owner = "{owner}" CompletionDate = -1 CurrentTime = {now}\n'.encode("ascii")
