"""Receipts of hand-offs, read from the AP's own records of transfers (the OUTPUT ads of JOB_EPOCH_HISTORY).

A shadow appends one OUTPUT record per run before the job becomes Completed. The file is followed like a log:
only what was added is read, over rotation. Texts of job owners stand in it: :mod:`schedd_agent.epochs` finds the
records, and what cannot be a record of HTCondor's is skipped up to the banner that it must end with.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import re
from collections import OrderedDict
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from schedd_agent.epochs import STRING, Epoch, NotARecord, banners, next_record
from schedd_agent.model import Job, Past, Record, Ticket
from stageout.core import log
from stageout.core.classads import ClassAd, ClassAdSyntaxError, parse_ad
from stageout.wire.custody import Run

_WRITTEN = re.compile(rb"^EpochWriteDate = (\d+)$", re.MULTILINE)
_RESULTS = re.compile(rb"^OutputPluginResultList = ", re.MULTILINE)
#: A string literal, which is passed over whole, or a receipt.
_RECEIPT = re.compile(STRING + rb"|\bStageOutReceipt = (\[(?:[^\[\]\"]|" + STRING + rb")*\])")
_LONE_BACKSLASH = re.compile(rb'\\(?!")')
#: Records whose first lines say whose they are, and whose last lines a plugin's text may imitate.
_ONCE_A_RUN = ("INPUT", "OUTPUT")
_ADVICE = "see what the transfer plugin of this job writes: its texts look like records of other jobs"
_READ_BYTES = 4 * 1024 * 1024
_MOST_KEPT = 200_000
#: Least between two ends that are kept, and most lines of them.
_PORTION_BYTES = 16 * 1024
_MOST_ENDS = 100_000
_BANNER_BYTES = 4096
_TWO_NUMBERS = re.compile(rb"\d{1,19} \d{1,19}")
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
    :param ends: file that keeps where readings of it ended, None for none. A text that imitates records costs others at
        most those that are read together with it. An agent that is started again reads in the same portions.
    """

    def __init__(self, path: Path, ends: Path | None = None) -> None:
        self._path = path
        self._ends = ReadingEnds(ends)
        self._records: OrderedDict[RunKey, Record] = OrderedDict()
        self._repeated: dict[RunKey, Record] = {}
        #: Runs of a job's number that have a record, in the order of the records.
        self._runs: dict[tuple[int, int], list[int]] = {}
        #: INPUT and OUTPUT records since the reader last stood at an end, and how many records were kept before each.
        self._seen: dict[tuple[str, RunKey], int] = {}
        self._kept: list[RunKey] = []
        self._at_an_end = True
        self._broken_at = -1
        #: What was read last. It is known by being open: its name may be another one now, or be seen so late (NFS), and
        #: its inode another file's when it is gone.
        self._open: FileIO | None = None
        self._offset = 0

    def get(self, name: str, run: int, owner: str = "", since: int = 0) -> Record | None:
        """Return the record of a run; None when there is none, or it is about another job with the same number.

        :param name: GlobalJobId. :param owner: of the job in the queue, "" when that is not known.
        :param since: when the run began to execute. A queue that was restored from a backup uses a number again: then
        the first record is older than the run, and a later one counts.
        """
        key = RunKey(*_ids(name), run)
        found, later = self._records.get(key), self._repeated.get(key)
        if found and later and found.written_at < since <= later.written_at:
            found = later
        same = found is not None and found.job in ("", name) and (not owner or found.owner == owner)
        return found if same else None

    def last_transfer(self, name: str, job: Job | Past) -> int:
        """Number in the records of the run that counts: mostly the job's, 0 when its record was not found.

        A schedd that dies when a shadow has just ended starts another for the same run: it finds the job done and
        writes no record. The record before is that of the run that counts if nothing was executed after it and the
        job's last transfer of output is not younger than it (the two are written one after the other).
        """
        if self.get(name, job.run, job.owner) is not None:
            return job.run
        for run in reversed(self._runs.get(_ids(name), ())):
            earlier = self.get(name, run, job.owner) if run < job.run else None
            if earlier is not None:
                in_time = 0 < job.transferred_at <= earlier.written_at + _APART_S
                return run if in_time and job.executing_since <= earlier.written_at else 0
        return 0

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
            found = self._follow(complete=True)
            unused.pop_all()
        if self._open is not None:
            self._open.close()
        self._open, self._offset = file, 0
        self._begin_portion()
        self._ends.load(file)
        return found + self._follow()

    def _begin_portion(self) -> None:
        self._at_an_end = True
        self._seen.clear()
        self._kept.clear()

    def _follow(self, complete: bool = False) -> int:
        """Read what was added to the open file. :param complete: nothing more will be added."""
        if self._open is None:
            return 0
        if os.fstat(self._open.fileno()).st_size < self._offset:
            self._offset = 0  # it was cut
            self._ends.forget()
        if self._at_an_end:
            self._begin_portion()
        found = 0
        while end := self._ends.after(self._offset):
            found += self._follow_to(end, complete=True)
            self._offset = end
            self._begin_portion()
        found += self._follow_to(None, complete)
        if self._at_an_end:
            self._ends.add(self._offset)
        return found

    def _follow_to(self, end: int | None, complete: bool) -> int:
        """Read one portion. :param end: where it ends, None for the file's. :param complete: all of it is there."""
        found = 0
        while True:
            try:
                return found + self._read_on(end)
            except NotARecord as fault:
                # A record that a shadow is just writing may be seen in part; the next look finds it whole.
                again, self._broken_at = self._broken_at == self._offset, self._offset
                self._at_an_end = False
                if not (again or complete) or not self._skip(fault, end):
                    return found

    def _read_on(self, end: int | None) -> int:
        """Take one record after the other up to the end of the portion.

        :raises NotARecord: what begins at the offset is none.
        """
        assert self._open is not None
        self._open.seek(self._offset)
        found, rest = 0, b""
        while chunk := self._open.read(_READ_BYTES if end is None else min(_READ_BYTES, end - self._open.tell())):
            data, used = rest + chunk, 0
            while epoch := next_record(data, used):
                self._offset += epoch.end - used
                used = epoch.end
                found += self._take(epoch)
            rest = data[used:]
        self._at_an_end = not rest
        return found

    def _skip(self, fault: NotARecord, portion_end: int | None) -> bool:
        """Go on behind the banner of a broken record, or behind all that is there; False when nothing follows yet.

        Text inside the record may hold banners, too, but its own comes after them.
        """
        assert self._open is not None
        self._open.seek(self._offset)
        data = self._open.readall() if portion_end is None else self._open.read(portion_end - self._offset)
        found = list(banners(data))
        again = [one for one in found if (one.kind, RunKey(*one.ids)) in self._seen]
        own = [one for one in found if fault.may_end_with(one)]
        wanted = own if fault.names_its_run and own else again or own or found
        end = max((one.end for one in wanted), default=0)
        for one in again:
            self._drop_imitated(one.kind, RunKey(*one.ids))
        if end:
            log.warn("record-refused", job=fault.job, size_bytes=end, advice=_ADVICE)
        self._offset += end
        return end > 0

    def _take(self, epoch: Epoch) -> int:
        key = RunKey(epoch.cluster, epoch.proc, epoch.run)
        self._drop_imitated(epoch.kind, key)
        if epoch.kind != "OUTPUT":
            return 0
        results = _RESULTS.search(epoch.text)
        # Most records of a busy AP have no receipt: they are not worth parsing.
        wanted = results is not None and b"StageOutReceipt" in epoch.text
        tickets = tuple(_tickets(epoch.text[results.end() :])) if results and wanted else ()
        *_, written = (0, *map(int, _WRITTEN.findall(epoch.text)))
        return self._keep(key, Record(tickets, written, epoch.job, epoch.owner))

    def _drop_imitated(self, kind: str, key: RunKey) -> None:
        """Drop what lies before a second record of a run in one reading: a text may have ended the first too early.

        Where a text imitates the end of its record and the beginning of others, the real end comes behind them, so
        that run seems to have two records. What lies between may be imitated, and is dropped.
        """
        if kind not in _ONCE_A_RUN:
            return
        if (kind, key) not in self._seen:
            self._seen[kind, key] = len(self._kept)
            return
        between = {one for one in self._kept[self._seen[kind, key] :] if one != key}
        for one in between:
            self._drop(one)
        log.warn("record-repeated", job=f"{key.cluster}.{key.proc}", run=key.run, dropped=len(between), advice=_ADVICE)

    def _keep(self, key: RunKey, record: Record) -> int:
        """Keep the record, unless one of that run has receipts; returns how many receipts came."""
        known = self._records.get(key)
        if known and known.tickets:
            if known != record:
                log.warn("record-repeated", job=f"{key.cluster}.{key.proc}", run=key.run, dropped=0, advice=_ADVICE)
                self._repeated[key] = record
            return 0
        self._records[key] = record
        if known is None:
            self._runs.setdefault((key.cluster, key.proc), []).append(key.run)
        self._kept.append(key)
        while len(self._records) > _MOST_KEPT:
            self._drop(next(iter(self._records)))
        return len(record.tickets)

    def _drop(self, key: RunKey) -> None:
        self._repeated.pop(key, None)
        if self._records.pop(key, None) is not None:
            runs = self._runs[key.cluster, key.proc]
            runs.remove(key.run)
            if not runs:
                del self._runs[key.cluster, key.proc]


def _ends_with_banner(file: FileIO, offset: int) -> bool:
    """False where another file has taken over the inode."""
    begin = max(0, offset - _BANNER_BYTES)
    line = os.pread(file.fileno(), offset - begin, begin).rpartition(b"\n*** ")[2]
    return line.endswith(b"\n") and line.count(b"\n") == 1


class ReadingEnds:
    """Positions up to which the open file was read, kept over restarts. Their loss loses only the bound on damage.

    :param path: a line of inode and offset for each; None to keep them in no file.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._inode = 0
        self._offsets: list[int] = []

    def load(self, file: FileIO) -> None:
        """Take over those of a file that is read from its beginning."""
        found = os.fstat(file.fileno())
        self._inode = found.st_ino
        lines = self._path.read_bytes().splitlines() if self._path and self._path.exists() else []
        rows = [tuple(map(int, line.split())) for line in lines if _TWO_NUMBERS.fullmatch(line)]
        offsets = {offset for inode, offset in rows if inode == self._inode and offset <= found.st_size}
        self._offsets = [offset for offset in sorted(offsets) if _ends_with_banner(file, offset)]
        if self._path and len(lines) > _MOST_ENDS:
            self._path.write_text("".join(f"{self._inode} {offset}\n" for offset in self._offsets[-_MOST_ENDS // 2 :]))

    def forget(self) -> None:
        """The file was cut: its offsets mean nothing any more."""
        self._offsets = []

    def after(self, offset: int) -> int:
        """The end of the reading that went on from an offset; 0 when that was the last."""
        at = bisect.bisect_right(self._offsets, offset)
        return self._offsets[at] if at < len(self._offsets) else 0

    def add(self, offset: int) -> None:
        """A reading has ended here, behind a whole record."""
        if offset - (self._offsets[-1] if self._offsets else 0) < _PORTION_BYTES:
            return
        self._offsets.append(offset)
        if self._path is not None:
            with contextlib.suppress(OSError), self._path.open("a") as file:
                file.write(f"{self._inode} {offset}\n")


def _ids(name: str) -> tuple[int, int]:
    """Cluster and process of a GlobalJobId."""
    cluster, proc = Run(name, 0).job_id.split(".")
    return int(cluster), int(proc)


def _are_same(one: FileIO, other: FileIO) -> bool:
    return os.path.samestat(os.fstat(one.fileno()), os.fstat(other.fileno()))


def _tickets(results: bytes) -> Iterator[Ticket]:
    """One ticket per hand-off: every file of it carries the same receipt, so each different one is read once.

    A run may have 100,000 files: parsing all their results would hold up the confirmation of other runs.
    """
    seen = set()
    for text in dict.fromkeys(found[1] for found in _RECEIPT.finditer(results) if found[1]):
        try:
            receipt = parse_ad(_LONE_BACKSLASH.sub(rb"\\\\", text).decode("utf-8", "surrogateescape"))
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
