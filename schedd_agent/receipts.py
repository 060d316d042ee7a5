"""Receipts of hand-offs, read from the AP's own records of transfers (the OUTPUT ads of JOB_EPOCH_HISTORY).

A shadow appends one OUTPUT record per run before the job becomes Completed. The file is followed like a log:
only what was added is read, over rotation. Records end with a line ``*** TYPE ClusterId=.. ProcId=.. ...``.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import OrderedDict
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from schedd_agent.model import Job, Past, Record, Ticket
from stageout.core.classads import ClassAd, ClassAdSyntaxError, parse_ad

_BANNER = re.compile(rb"^\*\*\* (\w+) (?:.* )?ClusterId=(\d+) ProcId=(-?\d+)\b.*\n", re.MULTILINE)
_RUN = re.compile(rb"^NumShadowStarts = (\d+)$", re.MULTILINE)
_WRITTEN = re.compile(rb"^EpochWriteDate = (\d+)$", re.MULTILINE)
_RESULTS = re.compile(rb"^OutputPluginResultList = (\{.*\})$", re.MULTILINE)
#: A string literal, which is passed over whole, or a receipt.
_STRING = rb'"(?:[^"\\]|\\.)*"'
_RECEIPT = re.compile(_STRING + rb"|\bStageOutReceipt = (\[(?:[^\[\]\"]|" + _STRING + rb")*\])", re.DOTALL)
_READ_BYTES = 4 * 1024 * 1024
_MOST_KEPT = 200_000
#: Seconds by which a record may be older than the end of its transfer in the job's ad: both are whole seconds.
_APART_S = 2


class RunKey(NamedTuple):
    """One run, in the words of the record."""

    cluster: int
    proc: int
    run: int


class Receipts:
    """Records of the runs of one schedd.

    :param path: JOB_EPOCH_HISTORY; rotated parts stand beside it as ``NAME.TIME``.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records: OrderedDict[RunKey, Record] = OrderedDict()
        self._last: dict[tuple[int, int], int] = {}
        #: What was read last. It is known by being open: its name may be another one now, or be seen so late (NFS), and
        #: its inode another file's when it is gone.
        self._open: FileIO | None = None
        self._offset = 0

    def get(self, cluster: int, proc: int, run: int) -> Record | None:
        """The record of a run; None when it was not found."""
        return self._records.get(RunKey(cluster, proc, run))

    def last_transfer(self, cluster: int, proc: int, job: Job | Past) -> int:
        """Number in the records of the run that counts: mostly the job's, 0 when its record was not found.

        A schedd that dies when a shadow has just ended starts another for the same run: it finds the job done and
        writes no record. The record before is that of the run that counts if nothing was executed after it and the
        job's last transfer of output is not younger than it (the two are written one after the other).
        """
        if self.get(cluster, proc, job.run) is not None:
            return job.run
        last = self._last.get((cluster, proc), 0)
        earlier = self.get(cluster, proc, last) if 0 < last < job.run else None
        if earlier is None or not job.executing_since <= earlier.written_at:
            return 0
        return last if 0 < job.transferred_at <= earlier.written_at + _APART_S else 0

    def read_new(self) -> int:
        """Read what was added since the last call; returns how many records with receipts came.

        :raises OSError: the file is there and cannot be read.
        """
        found = self._follow()
        with contextlib.ExitStack() as unused:
            try:
                newest = unused.enter_context(FileIO(self._path))  # it may be rotated while others are looked for
            except FileNotFoundError:
                return found
            if self._open is not None and _are_same(self._open, newest):
                return found
            for path in self._between(newest):
                found += self._turn_to(FileIO(path))
            unused.pop_all()
        return found + self._turn_to(newest)

    def _between(self, newest: FileIO) -> list[Path]:
        """Rotated parts behind the open one, oldest first; all where that is not among them (any more, or yet)."""
        rotated = sorted(self._path.parent.glob(f"{self._path.name}.2*"))
        facts = [path.stat() for path in rotated]
        own = os.fstat(self._open.fileno()) if self._open is not None else None
        behind = next((at + 1 for at, seen in enumerate(facts) if own and os.path.samestat(seen, own)), 0)
        last = os.fstat(newest.fileno())
        return [path for path, seen in zip(rotated[behind:], facts[behind:]) if not os.path.samestat(seen, last)]

    def _turn_to(self, file: FileIO) -> int:
        """Read what was added to the open file before it was replaced; another from its beginning, and on from then."""
        with contextlib.ExitStack() as unused:
            unused.callback(file.close)
            found = self._follow()
            unused.pop_all()
        if self._open is not None:
            self._open.close()
        self._open, self._offset = file, 0
        return found + self._follow()

    def _follow(self) -> int:
        """Read what was added to the open file."""
        if self._open is None:
            return 0
        if os.fstat(self._open.fileno()).st_size < self._offset:
            self._offset = 0  # it was cut
        self._open.seek(self._offset)
        found, rest = 0, b""
        while chunk := self._open.read(_READ_BYTES):
            data = rest + chunk
            used = 0
            for banner in _BANNER.finditer(data):
                found += self._take(banner, data[used : banner.start()])
                used = banner.end()
            rest = data[used:]
            self._offset += used
        return found

    def _take(self, banner: re.Match[bytes], text: bytes) -> int:
        run = _RUN.search(text)
        if banner[1] != b"OUTPUT" or not run:
            return 0
        results = _RESULTS.search(text)
        # Most records of a busy AP have no receipt: they are not worth parsing.
        wanted = results is not None and b"StageOutReceipt" in results[1]
        written = _WRITTEN.search(text)
        tickets = tuple(_tickets(results[1])) if results and wanted else ()
        self._keep(
            RunKey(int(banner[2]), int(banner[3]), int(run[1])), Record(tickets, int(written[1]) if written else 0)
        )
        return len(tickets)

    def _keep(self, key: RunKey, record: Record) -> None:
        self._records[key] = record
        self._last[key.cluster, key.proc] = key.run
        while len(self._records) > _MOST_KEPT:
            gone, _ = self._records.popitem(last=False)
            if self._last.get((gone.cluster, gone.proc)) == gone.run:
                del self._last[gone.cluster, gone.proc]


def _are_same(one: FileIO, other: FileIO) -> bool:
    return os.path.samestat(os.fstat(one.fileno()), os.fstat(other.fileno()))


def _tickets(results: bytes) -> Iterator[Ticket]:
    """One ticket per hand-off: every file of it carries the same receipt, so each different one is read once.

    A run may have 100,000 files: parsing all their results would hold up the confirmation of other runs.
    """
    seen = set()
    for text in dict.fromkeys(found[1] for found in _RECEIPT.finditer(results) if found[1]):
        try:
            receipt = parse_ad(text.decode("utf-8", "surrogateescape"))
        except ClassAdSyntaxError:
            continue
        name, manager = receipt.get("Ticket"), receipt.get("ManagerName")
        key = str(receipt.get("ManagerKey") or "")
        if isinstance(name, str) and isinstance(manager, str) and name and manager and name not in seen:
            if not _fits_an_ad(f"{name}{manager}{key}"):
                continue  # no manager writes that, and orders of others would not be published with it either
            seen.add(name)
            yield Ticket(name, manager, key, _count(receipt, "Files"), _count(receipt, "Bytes"))


def _fits_an_ad(text: str) -> bool:
    """Ads are UTF-8, and end at a NUL."""
    return "\0" not in text and not any("\ud800" <= char <= "\udfff" for char in text)


def _count(receipt: ClassAd, name: str) -> int:
    value = receipt.get(name)
    return value if isinstance(value, int) and value >= 0 else 0
