"""Sums of the access point's records of files, for each of the last days: counts, bytes, and percentiles.

Memory is bounded: a day has sums of a limited number of owners, destinations and plugins. Durations have steps
of 5 %.
"""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from stageout.core import log
from stageout.core.errors import ErrorClass
from stageout.core.history import HistoryFollower, ended_at, took_s
from stageout.core.states import State
from stageout_web.model import server_of

DAYS = 14
NOT_LISTED, OTHERS = "(not listed)", "(others)"
#: Owners, destinations and plugins that have sums of their own on one day.
MOST_NAMES = 100
_READ_BYTES = 1 << 20
#: Bytes that one reading takes at most. Later readings go on.
_MOST_BYTES = 64 << 20
_NAME_CHARACTERS = 200
#: Values below this one are kept as they are, larger ones in steps.
_EXACT, _STEP = 32, math.log(1.05)


class FileRecord(NamedTuple):
    """A record, or the sum of those that a report did not list. :param rate: bytes per second, 0 if unknown.

    :param failure: name of its error class.
    """

    day: str
    destination: str
    owner: str
    plugin: str
    files: int
    size_bytes: int
    is_delivered: bool
    took_s: int | None
    rate: int
    sandbox: tuple[str, int, str]
    failure: str = ""


def record_of(ad: Mapping[str, Any]) -> FileRecord:
    """Return the record in an ad. Its day is that of this machine's time zone."""
    written_at = int(ad.get("RecordWriteDate", 0))
    at = min(ended_at(ad), written_at) if written_at else ended_at(ad)  # the clock of a node may be ahead
    return FileRecord(
        day=sys.intern(time.strftime("%Y-%m-%d", time.localtime(at))),
        destination=_name(server_of(str(ad.get("TransferUrl", "")))),
        owner=_name(str(ad.get("Owner", ""))),
        plugin=_name(str(ad.get("StageOutPlugin", ""))),
        files=int(ad.get("StageOutFiles", 1)),
        size_bytes=int(ad.get("TransferFileBytes", 0)),
        is_delivered=ad.get("StageOutState") == State.DELIVERED,
        took_s=took_s(ad),
        rate=int(ad.get("StageOutBytesPerSecond", 0)),
        sandbox=(str(ad.get("GlobalJobId")), int(ad.get("NumShadowStarts", 0)), str(ad.get("StageOutManager"))),
        failure=ErrorClass.from_code(int(ad.get("StageOutErrorCode", 0))).name,
    )


def _name(text: str) -> str:
    return sys.intern(text[:_NAME_CHARACTERS]) if text else NOT_LISTED


def _step_of(value: int) -> int:
    return value if value < _EXACT else _EXACT + int(math.log(value / _EXACT) / _STEP)


def _value_of(step: int) -> float:
    """Return the middle of a step."""
    return float(step) if step < _EXACT else _EXACT * math.exp((step - _EXACT + 0.5) * _STEP)


def percentile(counts: Mapping[int, int], share: float) -> float | None:
    """Return the value that this share does not exceed, None without values. :param counts: of the steps."""
    left = share * sum(counts.values())
    for step in sorted(counts):
        left -= counts[step]
        if left <= 0:
            return _value_of(step)
    return None


@dataclass
class Sums:
    """Sums of some records.

    :param undelivered: files that did not arrive. :param took, rates: files in each step of seconds from acceptance
        to delivery, and of bytes per second. :param failures: undelivered files of each error class.
    """

    files: int = 0
    size_bytes: int = 0
    undelivered: int = 0
    took: Counter[int] = field(default_factory=Counter)
    rates: Counter[int] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)

    def add(self, record: FileRecord) -> None:
        """Add a record."""
        if not record.is_delivered:
            self.undelivered += record.files
            self.failures[record.failure] += record.files
            return
        self.files += record.files
        self.size_bytes += record.size_bytes
        if record.took_s is not None:
            self.took[_step_of(record.took_s)] += record.files
        if record.rate:
            self.rates[_step_of(record.rate)] += record.files

    def add_all(self, other: Sums) -> None:
        """Add what other sums have."""
        self.files += other.files
        self.size_bytes += other.size_bytes
        self.undelivered += other.undelivered
        self.took.update(other.took)
        self.rates.update(other.rates)
        self.failures.update(other.failures)


@dataclass
class _Day:
    """Sums of a day. :param outputs: sandboxes of which each file was delivered."""

    total: Sums = field(default_factory=Sums)
    outputs: int = 0
    names: dict[str, dict[str, Sums]] = field(default_factory=lambda: {"destination": {}, "owner": {}, "plugin": {}})

    def count_output(self, by: int) -> None:
        self.outputs += by

    def add(self, record: FileRecord) -> None:
        self.total.add(record)
        for kind, name in (
            ("destination", record.destination), ("owner", record.owner), ("plugin", record.plugin)
        ):  # fmt: skip
            known = self.names[kind]
            if name not in known and len(known) >= MOST_NAMES:
                name = OTHERS
            known.setdefault(name, Sums()).add(record)


class Records:
    """The sums, read from the history of files step by step.

    :param path: of the history. :param wall_s: wall clock.
    """

    def __init__(self, path: Path, wall_s: Callable[[], float] = time.time) -> None:
        self.path = path
        self.problem = ""
        self.is_complete = False
        self._wall_s = wall_s
        self._follower = HistoryFollower(path)
        self._restarts = 0
        self._days: dict[str, _Day] = {}
        self._lock = threading.Lock()  # threads make the views
        self._last: tuple[tuple[str, int, str], str, bool] = ("", 0, ""), "", False

    async def read(self) -> None:
        """Add the records that are new. A thread reads them. What cannot be read becomes the problem."""
        problem = ""
        try:
            for _ in range(_MOST_BYTES // _READ_BYTES):
                found = await asyncio.get_running_loop().run_in_executor(None, self._read_some)
                self._add(found)
                self.is_complete = not found
                if not found:
                    break
        except OSError as error:
            problem, self.is_complete = str(error), False
        if problem and problem != self.problem:
            log.warn("history-read-failed", problem=problem)
        self.problem = problem

    def _read_some(self) -> list[FileRecord]:
        found = []
        for entry in self._follower.read(_READ_BYTES):
            try:
                found.append(record_of(entry.attributes()))
            except (ValueError, TypeError, OverflowError):  # not a record of the agent
                continue
        return found

    def _add(self, found: Iterable[FileRecord]) -> None:
        with self._lock:
            self._add_all(found)

    def _add_all(self, found: Iterable[FileRecord]) -> None:
        if self._follower.restarts != self._restarts:
            self._restarts = self._follower.restarts
            self._days.clear()
        days = set(self.days())
        for day in set(self._days) - days:
            del self._days[day]
        for record in found:
            if record.day in days:
                self._days.setdefault(record.day, _Day()).add(record)
                self._count_output(record)

    def _count_output(self, record: FileRecord) -> None:
        """Count sandboxes. The records of one follow each other."""
        sandbox, day, is_whole = self._last
        if record.sandbox != sandbox:
            day, is_whole = record.day, record.is_delivered
            self._days[day].count_output(is_whole)
        elif is_whole and not record.is_delivered:
            is_whole = False
            if day in self._days:
                self._days[day].count_output(-1)
        self._last = record.sandbox, day, is_whole

    @property
    def unreadable(self) -> int:
        """Return the number of rotated parts that cannot be read. The sums lack their records."""
        return len(self._follower.unreadable)

    def days(self) -> list[str]:
        """Return the days that are kept, oldest first."""
        today = date.fromtimestamp(self._wall_s())
        return [(today - timedelta(days=back)).isoformat() for back in range(DAYS - 1, -1, -1)]

    def sums(self, kind: str, first: str, last: str) -> dict[str, Sums]:
        """Return sums of the days from ``first`` to ``last``. :param kind: day, destination, owner or plugin."""
        found: dict[str, Sums] = {}
        with self._lock:
            for day, known in sorted(self._days.items()):
                if first <= day <= last:
                    parts = {day: known.total} if kind == "day" else known.names[kind]
                    for name, part in parts.items():
                        found.setdefault(name, Sums()).add_all(part)
        return found

    def days_of(self, destination: str) -> dict[str, Sums]:
        """Return the sums of each day for a destination. On days with very many it may be among the others."""
        found: dict[str, Sums] = {}
        with self._lock:
            for day, known in self._days.items():
                if destination in known.names["destination"]:
                    found.setdefault(day, Sums()).add_all(known.names["destination"][destination])
        return found

    def delivered(self, day: str) -> tuple[int, int] | None:
        """Return outputs and bytes delivered on a day; None if the records were not all read."""
        if not self.is_complete or not self._days:
            return None
        known = self._days.get(day, _Day())
        return known.outputs, known.total.size_bytes
