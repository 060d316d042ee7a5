"""Follow jobs through the queue into the history."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from stageout.cli.exits import Unavailable, UnknownJob
from stageout.cli.jobs import Job, JobId, makes_more_jobs
from stageout.cli.verdict import Outcome, Verdict, judge_history, judge_queued
from stageout.core.classads import ClassAd
from stageout.core.clock import Clock

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 15.0
#: Number of history queries in which a job that has left the queue must appear.
_LOOKS_AT_HISTORY = 6
_BETWEEN = Verdict(Outcome.WAITING, "it has left the queue; looking for it in the history")


class Source(Protocol):
    """The source of job ads."""

    def jobs(self, wanted: Sequence[JobId]) -> tuple[list[Job], list[ClassAd]]:
        """Return jobs in the queue, and ads of their clusters."""

    def history(self, wanted: Sequence[JobId]) -> list[Job]:
        """Return jobs that have left the queue."""


class Watcher:
    """Watcher of jobs, from the queue into the history.

    :param source: the source of their ads. :param wanted: jobs and clusters.
    """

    def __init__(self, source: Source, wanted: Sequence[JobId]) -> None:
        self._source = source
        self._wanted = list(wanted)
        self._left: dict[JobId, Verdict] = {}
        self._seen: set[JobId] = set()
        self._missed: dict[JobId, int] = {}
        self._factories: set[int] = set()
        self._looked_back = False

    def look(self) -> tuple[dict[JobId, Verdict], bool]:
        """Judge every job known by now, and tell whether a factory will make more jobs.

        :raises Unavailable: the schedd does not answer; query it again later.
        :raises UnknownJob: neither queue nor history has a job.
        """
        jobs, clusters = self._source.jobs(self._wanted)
        queued = {job.id: judge_queued(job) for job in jobs}
        factories = {ad.integer("ClusterId") for ad in clusters if makes_more_jobs(ad)}
        self._seen |= set(queued)
        missing = self._missing(set(queued), factories)
        if missing:
            self._left.update({job.id: judge_history(job) for job in self._source.history(missing)})
        self._looked_back, self._factories = True, factories
        gone = self._seen - set(queued) - set(self._left)
        self._refuse_unknown(gone, factories)
        return {**dict.fromkeys(gone, _BETWEEN), **self._left, **queued}, bool(factories)

    def _missing(self, queued: set[JobId], factories: set[int]) -> list[JobId]:
        """Return the constraint for the history: at first every job, later those that left since the last query."""
        if not self._looked_back:
            return [one for one in self._wanted if one.proc is None or one not in queued]
        # A factory's jobs may come and go between two queries. After it has made its last job, query for all of them.
        ended = self._factories - factories
        unseen = [one for one in self._wanted if one.cluster in ended]
        return [*unseen, *sorted(self._seen - queued - set(self._left))]

    def _refuse_unknown(self, gone: set[JobId], factories: set[int]) -> None:
        for job in gone:
            self._missed[job] = self._missed.get(job, 0) + 1
            if self._missed[job] >= _LOOKS_AT_HISTORY:
                raise UnknownJob(
                    f"{job}: it left the queue, and the schedd's history does not have it; is HISTORY set?"
                )
        known = self._seen | set(self._left)
        for one in self._wanted:
            if one.cluster not in factories and not any(one.covers(job) for job in known):
                raise UnknownJob(f"{one}: no such job in the queue, nor in the schedd's history")


class Look(NamedTuple):
    """The result of one query for all jobs.

    :param verdicts: on every job known by now. :param problem: the reason why the schedd did not answer, or None.
    :param is_last: every job has an end, or the time is over. :param is_timed_out: the time is over.
    """

    verdicts: dict[JobId, Verdict]
    problem: Unavailable | None
    is_last: bool
    is_timed_out: bool


def looks(watcher: Watcher, timeout_s: float | None, clock: Clock, sleep: Callable[[float], object]) -> Iterator[Look]:
    """Query again and again, at growing intervals, until every job has an end; yield each result.

    :param timeout_s: seconds from now; None for no limit.
    :raises UnknownJob: neither queue nor history has a job.
    """
    started_s, pause_s = clock.monotonic_s(), _FIRST_PAUSE_S
    verdicts: dict[JobId, Verdict] = {}
    while True:
        problem, more = None, True
        try:
            verdicts, more = watcher.look()
        except Unavailable as silence:
            problem = silence
        has_ended = not more and all(verdict.outcome is not Outcome.WAITING for verdict in verdicts.values())
        left_s = float("inf") if timeout_s is None else timeout_s - (clock.monotonic_s() - started_s)
        is_late = not has_ended and left_s <= 0
        yield Look(verdicts, problem, has_ended or is_late, is_late)
        if has_ended or is_late:
            return
        sleep(min(pause_s, left_s))
        pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
