"""Ends of the output of a cluster's jobs, as a message to their owner sums them up. Pure."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stageout.condor.ads import value_of
from stageout.core.states import State
from stageout.core.units import count, duration, size
from stageout.model.job import Status
from stageout.wire.typed import MOST_NUMBER

#: Attributes of a job's ad, in the queue or in the history, from which its outcome is read.
PROJECTION = [
    "ClusterId", "ProcId", "JobStatus", "JobUniverse", "NumShadowStarts", "TransferOutputStats", "CompletionDate",
    "StageOutState", "StageOutRun", "StageOutStats",
]  # fmt: skip
#: JobUniverse of DAGMan's own jobs.
_SCHEDULER_UNIVERSE = 7
_HOSTS_NAMED = 5


class OutputEnd(enum.Enum):
    """End of a job's output, in the words of a message."""

    DELIVERED = "delivered"
    NOTHING = "without output to deliver after its end"
    REMOVED = "removed"
    CANCELLED = "cancelled"
    FAILED = "failed"
    LOST = "lost"
    LEFT = "left the queue before its output arrived"
    UNKNOWN = "no longer in the access point's history"


#: Ends that keep nobody waiting for output.
_COMPLETE = frozenset({OutputEnd.DELIVERED, OutputEnd.NOTHING})
_OF_STATE = {
    State.CANCELLED: OutputEnd.CANCELLED,
    State.FAILED: OutputEnd.FAILED,
    State.LOST: OutputEnd.LOST,
}


@dataclass(frozen=True)
class JobOutcome:
    """Outcome of one job.

    :param ended_at: wall clock, seconds: end of the job's program. :param delivered_at: time of its delivery.
    """

    cluster: int
    proc: int
    end: OutputEnd
    files: int = 0
    size_bytes: int = 0
    hosts: tuple[str, ...] = ()
    ended_at: int = 0
    delivered_at: int = 0


def read_outcome(ad: Mapping[str, Any]) -> JobOutcome | None:
    """Read a job's ad. Return None for a DAGMan job, whose nodes have ads of their own."""
    if ad.get("JobUniverse") == _SCHEDULER_UNIVERSE:
        return None
    stats: Any = ad.get("StageOutStats")
    stats = stats if hasattr(stats, "get") else {}
    end, hosts = _end_of(ad), value_of(stats, "Hosts")
    if end is not OutputEnd.DELIVERED:
        stats, hosts = {}, ""
    return JobOutcome(
        cluster=_number(ad, "ClusterId"),
        proc=_number(ad, "ProcId"),
        end=end,
        files=_number(stats, "Files"),
        size_bytes=_number(stats, "Bytes"),
        hosts=tuple(hosts.split()[:_HOSTS_NAMED]) if isinstance(hosts, str) else (),
        ended_at=_number(ad, "CompletionDate"),
        delivered_at=_number(stats, "DeliveredAt"),
    )


def _end_of(ad: Mapping[str, Any]) -> OutputEnd:
    state = ad.get("StageOutState") if _number(ad, "StageOutRun") == _number(ad, "NumShadowStarts") else None
    if state == State.DELIVERED:
        return OutputEnd.DELIVERED
    if _number(ad, "JobStatus") == Status.REMOVED:
        return OutputEnd.REMOVED
    stats: Any = ad.get("TransferOutputStats")
    if not hasattr(stats, "get") or not _number(stats, "STAGEOUTFilesCountLastRun"):
        return OutputEnd.NOTHING
    return next((end for name, end in _OF_STATE.items() if name == state), OutputEnd.LEFT)


def _number(ad: Mapping[str, Any], name: str) -> int:
    value = value_of(ad, name)
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return 0
    return max(0, min(MOST_NUMBER, int(value)))


@dataclass
class Totals:
    """Sums over jobs. :param jobs: number of all jobs; 0 while unknown."""

    jobs: int = 0
    ends: Counter[OutputEnd] = field(default_factory=Counter)
    files: int = 0
    size_bytes: int = 0
    hosts: dict[str, None] = field(default_factory=dict)
    ended_at: int = 0
    delivered_at: int = 0

    @property
    def delivered(self) -> int:
        """Return the number of jobs whose output was delivered."""
        return self.ends[OutputEnd.DELIVERED]

    @property
    def is_complete(self) -> bool:
        """Tell whether no job lacks its output."""
        return all(end in _COMPLETE for end, jobs in self.ends.items() if jobs)

    def add(self, outcome: JobOutcome) -> None:
        """Add one job."""
        self.ends[outcome.end] += 1
        self.files += outcome.files
        self.size_bytes += outcome.size_bytes
        if len(self.hosts) <= _HOSTS_NAMED:
            self.hosts.update(dict.fromkeys(outcome.hosts))
        if outcome.end is OutputEnd.DELIVERED and outcome.ended_at:
            self.ended_at = min(self.ended_at or outcome.ended_at, outcome.ended_at)
        self.delivered_at = max(self.delivered_at, outcome.delivered_at)

    def text(self) -> str:
        """Return the sums as sentences."""
        jobs = sum(self.ends.values())
        if self.delivered == jobs:
            first = f"The output of {'all ' if jobs > 1 else ''}{count(jobs, 'job')} is delivered"
        else:
            others = ", ".join(f"{self.ends[end]} {end.value}" for end in OutputEnd if end in self._others())
            first = f"The output of {self.delivered} of {count(jobs, 'job')} is delivered, {others}"
        return f"{first}: {count(self.files, 'file')}, {size(self.size_bytes)}{self._places()}{self._time()}."

    def _others(self) -> set[OutputEnd]:
        return {end for end, jobs in self.ends.items() if jobs} - {OutputEnd.DELIVERED}

    def _places(self) -> str:
        named = list(self.hosts)[:_HOSTS_NAMED]
        more = " and others" if len(self.hosts) > len(named) else ""
        return f" to {', '.join(named)}{more}" if named else ""

    def _time(self) -> str:
        if not self.ended_at or self.delivered_at < self.ended_at:
            return ""
        return f". The last file arrived {duration(self.delivered_at - self.ended_at)} after the first job's end"


def totals_of(outcomes: Iterable[JobOutcome], jobs: int = 0) -> Totals:
    """Sum up outcomes. A job that is in the queue and in the history counts once.

    :param jobs: number of all jobs, 0 when it is unknown. Jobs without an outcome count as unknown.
    """
    totals = Totals(jobs)
    known: set[tuple[int, int]] = set()
    for outcome in outcomes:
        if (outcome.cluster, outcome.proc) not in known:
            known.add((outcome.cluster, outcome.proc))
            totals.add(outcome)
    totals.ends[OutputEnd.UNKNOWN] += max(0, jobs - len(known))
    return totals
