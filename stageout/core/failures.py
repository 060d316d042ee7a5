"""Output that failed after its job had left the queue: the agent records it, and ``stageout history`` reads it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from stageout.core import durable, log

FILE_NAME = "stageout_agent_failures"
#: Records that are kept, the newest ones.
MOST = 2000
_REASON_CHARS = 500
_MODE = 0o644


@dataclass(frozen=True)
class Failure:
    """One run whose output did not arrive.

    :param job: GlobalJobId. :param run: NumShadowStarts. :param state: Failed or Lost. :param at: wall clock, seconds.
    """

    job: str
    owner: str
    run: int
    state: str
    reason: str
    at: int


def read_failures(path: Path) -> list[Failure]:
    """Records in the file, oldest first; none where there is no file.

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
    """The file and what is in it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._known = {(one.job, one.run): one for one in read_failures(path)}
        except ValueError as problem:
            log.error("failures-unreadable", path=path, problem=problem, advice="it is begun anew; set a copy aside")
            self._known = {}

    def add(self, failures: Iterable[Failure]) -> list[Failure]:
        """Record those that are not known. On return they are on the disk.

        :returns: the new ones. :raises OSError: nothing is recorded.
        """
        new = [one for one in failures if (one.job, one.run) not in self._known]
        if not new:
            return []
        short = {(one.job, one.run): Failure(**{**asdict(one), "reason": one.reason[:_REASON_CHARS]}) for one in new}
        kept = dict(list({**self._known, **short}.items())[-MOST:])
        text = json.dumps([asdict(one) for one in kept.values()], indent=0)
        durable.write_file("failure-record", self._path, text.encode(), _MODE)
        self._known = kept
        return new
