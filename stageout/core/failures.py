"""Output that failed after its job had left the queue: the agent records it, and ``stageout history`` reads it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Set
from dataclasses import asdict, dataclass
from pathlib import Path

from stageout.core import durable, log

FILE_NAME = "stageout_agent_failures"
#: Records that the file keeps, the newest ones.
MOST = 2000
_REASON_CHARS = 500
_MODE = 0o644


@dataclass(frozen=True)
class Failure:
    """One run whose output did not arrive.

    :param job: GlobalJobId. :param run: NumShadowStarts. :param state: Failed or Lost. :param at: wall clock, seconds.
    :param user: User of the job, ``alice@domain``; "" from an earlier version.
    """

    job: str
    owner: str
    run: int
    state: str
    reason: str
    at: int
    user: str = ""

    @property
    def key(self) -> tuple[str, str, int]:
        """Job, user and run."""
        return self.job, self.user, self.run


def read_failures(path: Path) -> list[Failure]:
    """Read the records in a file, oldest first; none where there is no file.

    :raises OSError: it cannot be read. :raises ValueError: it is not such a file.
    """
    try:
        rows = json.loads(durable.read_file(path))
        return [Failure(**row) for row in rows]
    except FileNotFoundError:
        return []
    except TypeError as problem:
        raise ValueError(str(problem)) from None


class FailureLog:
    """The file, and in memory its records and older ones of output that managers still report."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._records = {one.key: one for one in read_failures(path)}
        except ValueError as problem:
            log.error("failures-read-failed", path=path, problem=problem, advice="it is begun anew; set a copy aside")
            self._records = {}

    def get(self, job: str, user: str, run: int) -> Failure | None:
        """Return the record of a run, None without one."""
        return self._records.get((job, user, run)) or self._records.get((job, "", run))

    def add(self, failures: Iterable[Failure]) -> list[Failure]:
        """Record those that are not known. On return they are on the disk.

        :returns: the new ones. :raises OSError: nothing is recorded.
        """
        new = [one for one in failures if self.get(*one.key) is None]
        if not new:
            return []
        short = {one.key: Failure(**{**asdict(one), "reason": one.reason[:_REASON_CHARS]}) for one in new}
        known = {**self._records, **short}
        text = json.dumps([asdict(one) for one in list(known.values())[-MOST:]], indent=0)
        durable.write_file("failure-record", self._path, text.encode(), _MODE)
        self._records = known
        return new

    def keep_only(self, jobs: Set[tuple[str, str]]) -> None:
        """Drop records from memory that the file no longer holds, except those of the given jobs.

        :param jobs: GlobalJobId and user of each.
        """
        for key in list(self._records)[:-MOST]:
            if key[:2] not in jobs:
                del self._records[key]
