"""Receipts of hand-offs, read from the AP's own records of transfers (the OUTPUT ads of the epoch history).

A shadow appends one OUTPUT record per run before the job becomes Completed. HTCondor writes strings raw: it escapes the
quote and nothing else, so a text of the job's own plugin can look like records of other jobs. Receipts are therefore
read from JOB_EPOCH_HISTORY_DIR, where each job has a file of its own: a text there can speak of its own job only.
``docs/developer/decisions/0042-a-file-of-records-for-each-job.md`` has the reason and the price.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from stageout.core import log
from stageout.core.classad_parser import parse_ad
from stageout.core.classads import ClassAd
from stageout.model.job import HistoryRecord, Job
from stageout.model.run import RunRecord, Ticket
from stageout.wire.custody import JobKey, job_id_of

#: Name of the directory below SPOOL that the configuration fragment chooses. Only this one is created and cleaned up.
DIRECTORY = "stageout_agent_runs"
#: HTCondor's own rule: a quote behind a backslash ends the string only at the end of a line.
#: One without an end reaches to the end of the text, which is then read only once.
_STRING = rb'"[^"\\]*(?:\\(?:"(?!\n)|(?!"))[^"\\]*)*(?:\\(?="\n))?(?:"|\Z)'
#: A string literal, which is passed over whole, or a receipt.
_RECEIPT = re.compile(_STRING + rb"|\bStageOutReceipt = (\[(?:[^\[\]\"]|" + _STRING + rb")*\])")
_LONE_BACKSLASH = re.compile(rb'\\(?!")')
#: The last line of a record.
_BANNER = re.compile(
    rb'^\*\*\* (\w+) ClusterId=\d+ ProcId=\d+ RunInstanceId=(\d{1,18}) Owner="([^"\n]*)"[^\n]*\n', re.M
)
_RESULTS = b"\nOutputPluginResultList = "
_JOB = re.compile(rb'^GlobalJobId = "([^"\n]*)"$', re.M)
_WRITTEN = re.compile(rb"^EpochWriteDate = (\d{1,18})$", re.M)
_FILE = re.compile(r"job\.runs\.(\d+)\.(\d+)\.ads")
_MOST_JOBS = 100_000
_UNREADABLE = (-1,)
#: Seconds by which a record may be older than the end of its transfer in the job's ad: both are whole seconds.
_APART_S = 2


class _JobFile(NamedTuple):
    """The records of one job. :param version: of the file that was read. :param look: when it was last compared."""

    version: tuple[int, ...]
    records: dict[int, RunRecord]
    look: int


class Receipts:
    """Records of the runs of one schedd.

    :param directory: JOB_EPOCH_HISTORY_DIR. :param shared: JOB_EPOCH_HISTORY, which only tells when to look; None: the
        caller looks at intervals.
    """

    def __init__(self, directory: Path, shared: Path | None = None) -> None:
        self._directory = directory
        self._shared = shared
        self._shared_at = (0, 0)
        self._jobs: OrderedDict[tuple[int, int], _JobFile] = OrderedDict()
        self._look = 0

    def get(self, job: JobKey, run: int) -> RunRecord | None:
        """Return the record of a run; None when there is none, or it is about another job with the same number."""
        found = self._records_of(job).get(run)
        return found if found is not None and _is_about(found, job) else None

    def last_transfer(self, key: JobKey, job: Job | HistoryRecord) -> int:
        """Return the number in the records of the final run: mostly the job's, 0 when its record was not found.

        A schedd that dies when a shadow has just ended starts another for the same run. That one finds the job done
        and writes no record. The record before belongs to the final run on two conditions: nothing was executed
        after it, and the job's last transfer of output is not younger than it.
        """
        if self.get(key, job.run) is not None:
            return job.run
        for run in sorted(self._records_of(key), reverse=True):
            earlier = self.get(key, run) if run < job.run else None
            if earlier is not None:
                in_time = 0 < job.transferred_at <= earlier.written_at + _APART_S
                return run if in_time and job.executing_since <= earlier.written_at else 0
        return 0

    def record_with(self, job: JobKey, manager_name: str, key: str, tickets: Collection[str]) -> RunRecord | None:
        """Return the record of a run that names one of a manager's tickets; None when no run of the job does.

        :param key: public key of the manager, "" for one that does not sign.
        """
        for record in self._records_of(job).values():
            named = (ticket for ticket in record.tickets if ticket.manager_name == manager_name)
            if _is_about(record, job) and any(ticket.key in ("", key) and ticket.name in tickets for ticket in named):
                return record
        return None

    def begin_pass(self) -> None:
        """Compare the file of each job with the disk again, once, when its records are next asked for.

        :raises OSError: the agent's directory was removed and cannot be created again.
        """
        self._look += 1
        if self.is_own:
            self.create()

    def create(self) -> None:
        """Create the directory, for the user that owns SPOOL, where it is missing. :raises OSError: it cannot be."""
        if not self._directory.is_dir():
            self._directory.mkdir(mode=0o755)
            if os.geteuid() == 0:
                owner = self._directory.parent.stat()
                os.chown(self._directory, owner.st_uid, owner.st_gid)

    def has_news(self) -> bool:
        """Tell whether runs with receipts may have ended since the last call. A text may pretend that.

        :raises OSError: the shared file is there and cannot be read.
        """
        if self._shared is None:
            return False
        inode, offset = self._shared_at
        try:
            with open(self._shared, "rb") as file:
                facts = os.fstat(file.fileno())
                self._shared_at = (facts.st_ino, facts.st_size)
                if not inode:
                    return True
                was_replaced = facts.st_ino != inode or facts.st_size < offset
                file.seek(0 if was_replaced else offset)
                return b"StageOutReceipt" in file.read()
        except FileNotFoundError:
            return False

    def files_before(self, wall_s: float) -> dict[Path, tuple[int, int]]:
        """Return files whose last record is older than ``wall_s`` (wall clock), with cluster and process of their job.

        :raises OSError: the directory cannot be read.
        """
        found = {}
        with os.scandir(self._directory) as entries:
            for entry in entries:
                ids = _FILE.match(entry.name)
                if ids and entry.stat(follow_symlinks=False).st_mtime < wall_s:
                    found[Path(entry.path)] = (int(ids[1]), int(ids[2]))
        return found

    def forget(self, files: Iterable[Path]) -> None:
        """Remove files of jobs that are in the queue no more, and that no manager reports."""
        for path in files:
            path.unlink(missing_ok=True)

    @property
    def is_own(self) -> bool:
        """Tell whether the directory is the agent's, which removes old files from it."""
        return self._directory.name == DIRECTORY

    def _records_of(self, job: JobKey) -> dict[int, RunRecord]:
        ids = ids_of(job.name)
        known = self._jobs.get(ids)
        if known is None or known.look != self._look:
            known = self._jobs[ids] = self._looked_at(ids, known)
            self._jobs.move_to_end(ids)
            while len(self._jobs) > _MOST_JOBS and next(iter(self._jobs.values())).look < self._look - 1:
                self._jobs.popitem(last=False)
        return known.records

    def _looked_at(self, ids: tuple[int, int], known: _JobFile | None) -> _JobFile:
        try:
            version = self._version(*ids)
            if known is not None and known.version == version:
                return known._replace(look=self._look)
            return _JobFile(version, dict(_records(self._read(*ids))) if version else {}, self._look)
        except OSError as problem:
            if known is None or known.version != _UNREADABLE:
                advice = "let the agent's user read JOB_EPOCH_HISTORY_DIR"
                log.error("records-read-failed", job=f"{ids[0]}.{ids[1]}", problem=problem, advice=advice)
            return _JobFile(_UNREADABLE, {}, self._look)

    def _path(self, cluster: int, proc: int) -> Path:
        return self._directory / f"job.runs.{cluster}.{proc}.ads"

    def _version(self, cluster: int, proc: int) -> tuple[int, ...]:
        try:
            facts = self._path(cluster, proc).stat()
        except (FileNotFoundError, NotADirectoryError):
            return ()
        return (facts.st_ino, facts.st_size, facts.st_mtime_ns)

    def _read(self, cluster: int, proc: int) -> bytes:
        return self._path(cluster, proc).read_bytes()


def _records(data: bytes) -> Iterator[tuple[int, RunRecord]]:
    """Yield run number and record of each OUTPUT record, oldest first. A record whose end is missing is left out."""
    start = 0
    for banner in _BANNER.finditer(data):
        kind, instance, owner = banner.groups()
        if kind == b"OUTPUT":
            yield int(instance) + 1, _record(data[start : banner.start()], owner)
        start = banner.end()


def _record(text: bytes, owner: bytes) -> RunRecord:
    at = text.rfind(_RESULTS)
    job, written = _JOB.search(text), _WRITTEN.findall(text)
    return RunRecord(
        tuple(_tickets(text[at + len(_RESULTS) :])) if at >= 0 else (),
        int(written[-1]) if written else 0,
        job[1].decode("utf-8", "replace") if job else "",
        owner.decode("utf-8", "replace"),
    )


def ids_of(name: str) -> tuple[int, int]:
    """Return cluster and process of a GlobalJobId."""
    cluster, proc = job_id_of(name).split(".")
    return int(cluster), int(proc)


def _is_about(record: RunRecord, job: JobKey) -> bool:
    """Tell whether a record in the file of a job's number is about this job, and no other one that had the number.

    HTCondor writes the owner without a domain. Inside one queue, the number of the job makes up for that.
    """
    return record.job in ("", job.name) and record.owner in (job.owner, job.owner.rpartition("@")[0])


def _tickets(results: bytes) -> Iterator[Ticket]:
    """Yield one ticket per hand-off. All its files carry the same receipt, so each different receipt is parsed once.

    A run may have 100,000 files. Parsing all their results would delay the confirmation of other runs.
    """
    seen = set()
    for text in dict.fromkeys(found[1] for found in _RECEIPT.finditer(results) if found[1]):
        try:
            receipt = parse_ad(_LONE_BACKSLASH.sub(rb"\\\\", text).decode("utf-8", "surrogateescape"))
        except ValueError:  # a syntax error, or a number of too many digits
            continue
        name, manager = receipt.get("Ticket"), receipt.get("ManagerName")
        key = str(receipt.get("ManagerKey") or "")
        if isinstance(name, str) and isinstance(manager, str) and name and manager and name not in seen:
            if not _fits_an_ad(f"{name}{manager}{key}"):
                continue  # no manager writes that, and orders with it could not be published
            seen.add(name)
            yield Ticket(
                name=name,
                manager_name=manager,
                key=key,
                files=_count(receipt, "Files"),
                size_bytes=_count(receipt, "Bytes"),
            )


def _fits_an_ad(text: str) -> bool:
    """Tell whether an ad can hold the text: ads are UTF-8 and end at a NUL."""
    return "\0" not in text and not any("\ud800" <= char <= "\udfff" for char in text)


def _count(receipt: ClassAd, name: str) -> int:
    value = receipt.get(name)
    return value if isinstance(value, int) and value >= 0 else 0
