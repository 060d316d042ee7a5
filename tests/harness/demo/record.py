"""The record of a run: when each job computed, when its slot was free, when its files were delivered.

Three witnesses with one clock (all run on this machine): the job stamps its first and last instruction, the startd
logs with milliseconds when the slot can take the next job, the destination when each file began and was whole.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.harness.demo.workload import JobReport, file_digest
from tests.harness.narrow_destination import Transfer

FINE_LOGS = "STARTD_DEBUG = D_SUB_SECOND D_TIMESTAMP\nSTARTER_DEBUG = D_SUB_SECOND D_TIMESTAMP\n"
"""Settings of an execute point whose logs show seconds since the epoch, with milliseconds."""

_JOB = re.compile(r"^([\d.]+) (slot\w+): Remote job ID is (\d+\.\d+)$", re.MULTILINE)
_FREE = re.compile(
    r"^([\d.]+) (slot\w+): (?:Changing activity: \w+ -> Idle|Changing state and activity: .* -> \S+/Idle)$", re.M
)


@dataclass(frozen=True)
class Occupation:
    """A job on a slot, as the startd saw it.

    :param slot: its name, such as slot1_1. :param busy_s: wall clock of the activation.
    :param free_s: when the slot could take the next job; None while it could not.
    """

    job: str
    slot: str
    busy_s: float
    free_s: float | None


def occupations(start_log: str) -> list[Occupation]:
    """Read a StartLog written with :data:`FINE_LOGS`."""
    freed = [(float(time), slot) for time, slot in _FREE.findall(start_log)]
    found = []
    for time, slot, job in _JOB.findall(start_log):
        busy_s = float(time)
        free_s = min((when for when, other in freed if other == slot and when > busy_s), default=None)
        found.append(Occupation(job, slot, busy_s, free_s))
    return found


@dataclass
class JobRecord:
    """One job of a run; times are wall clock.

    :param slot: CPU slot. :param free_s: when that could take the next job.
    :param transfers: uploads of its files. :param verified: files whose content at the destination is what it wrote.
    """

    number: int
    slot: str
    report: JobReport
    free_s: float
    transfers: list[Transfer] = field(default_factory=list)
    verified: int = 0

    @property
    def held_s(self) -> float:
        """From the job's last instruction until its slot was free."""
        return self.free_s - self.report.ended_s

    @property
    def moved_s(self) -> tuple[float, float]:
        """Begin of its first and end of its last upload."""
        starts = [transfer.start_s for transfer in self.transfers]
        ends = [transfer.end_s for transfer in self.transfers]
        return (min(starts), max(ends)) if starts else (self.free_s, self.free_s)


@dataclass
class Record:
    """One run of a workload.

    :param title: for tables and pictures. :param began_s: wall clock when the jobs were submitted.
    """

    title: str
    began_s: float
    jobs: list[JobRecord]
    files_per_job: int

    @property
    def makespan_s(self) -> float:
        """From submission until the last file was at the destination and the last slot was free."""
        return max(max(job.free_s, job.moved_s[1]) for job in self.jobs) - self.began_s

    @property
    def slots_free_s(self) -> float:
        """From submission until the last CPU slot was free."""
        return max(job.free_s for job in self.jobs) - self.began_s

    @property
    def files(self) -> int:
        """Files of all jobs."""
        return len(self.jobs) * self.files_per_job

    @property
    def held_s(self) -> float:
        """Median time that a slot was held after its job's end."""
        return statistics.median(job.held_s for job in self.jobs)

    @property
    def delivered(self) -> int:
        """Jobs whose files are all right at the destination."""
        return sum(job.verified == self.files_per_job for job in self.jobs)

    @property
    def verified(self) -> int:
        """Files that are right at the destination."""
        return sum(job.verified for job in self.jobs)


def check_files(job: JobRecord, place: Path) -> None:
    """Read every file of a job at the destination and count those that are what the job wrote."""
    job.verified = sum(
        bool(digest) and file_digest(place / name) == digest for name, digest in job.report.digests.items()
    )


def of_job(transfers: Iterable[Transfer], prefix: str) -> list[Transfer]:
    """Uploads below a path."""
    return [one for one in transfers if one.method == "PUT" and one.path.startswith(prefix)]
