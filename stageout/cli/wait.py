"""``stageout wait``: until output is delivered, with an exit status for scripts and DAGs."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from stageout.cli.exits import Unavailable, UnknownJob, UsageError
from stageout.cli.jobs import Job, JobId, makes_more_jobs, parse_job_ids
from stageout.cli.render import clean
from stageout.cli.results import tell
from stageout.cli.verdict import Outcome, Verdict, judge_history, judge_queued, own_status, wait_status
from stageout.core.classads import ClassAd
from stageout.core.clock import Clock, SystemClock

if TYPE_CHECKING:
    from stageout.cli.condor import Queue

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 15.0
_LONGEST_TEXT = 500
#: Looks at the history in which a job that has left the queue must show up.
_LOOKS_AT_HISTORY = 6
#: DAGMan's $RETURN when the submission failed, and when a PRE script did.
_NOT_SUBMITTED = -1001, -1004


class Source(Protocol):
    """The source of job ads."""

    def jobs(self, wanted: Sequence[JobId]) -> tuple[list[Job], list[ClassAd]]:
        """Jobs in the queue, and ads of their clusters."""

    def history(self, wanted: Sequence[JobId]) -> list[Job]:
        """Jobs that have left the queue."""


def run(options: argparse.Namespace) -> int:
    """Wait for the jobs and say how each ended."""
    if options.returned in _NOT_SUBMITTED:
        print(f"stageout: the node's job was never submitted (its status is {options.returned})", file=sys.stderr)
        return own_status(options.returned)
    wanted = parse_job_ids(options.jobs)
    from stageout.cli.condor import Queue

    if options.dag:
        return _wait_for_dag(options, wanted, Queue(options.name, options.pool))
    return wait(
        Watcher(Queue(options.name, options.pool), wanted), options.timeout, options.returned, SystemClock(),
        time.sleep, options.json,
    )  # fmt: skip


def _wait_for_dag(options: argparse.Namespace, wanted: Sequence[JobId], queue: Queue) -> int:
    from stageout.cli.nodes import Answers, SharedLook, lead

    if len(wanted) != 1 or not options.answers:
        raise UsageError("--dag takes one JOB, and --answers with it; stageout_dag_post gives both")
    shared = SharedLook(queue, lambda: queue.jobs_of_dag(options.dag))
    return lead(wanted[0], Answers(Path(options.answers)), shared, time.sleep)


_BETWEEN = Verdict(Outcome.WAITING, "it has left the queue; looking for it in the history")


class Watcher:
    """Follows jobs through the queue into the history.

    :param source: where they are looked up. :param wanted: jobs and clusters.
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
        """The verdict on every job known by now, and whether more jobs are to come (from a factory).

        :raises Unavailable: the schedd does not answer; look again later.
        :raises UnknownJob: neither queue nor history has it.
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
        """Return the constraint for the history: at first every job, later those that left since the last look."""
        if not self._looked_back:
            return [one for one in self._wanted if one.proc is None or one not in queued]
        # A factory's jobs may come and go between two looks: when it has made its last one, all are looked up.
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


def wait(
    watcher: Watcher,
    timeout_s: float | None,
    returned: int,
    clock: Clock,
    sleep: Callable[[float], object],
    is_json: bool = False,
) -> int:
    """Look again and again until every job has an end.

    :param timeout_s: seconds from now; None for no limit. :param returned: the job's own exit status.
    :param is_json: ends are said as objects, and in the end what is still waited for.
    :returns: the exit status.
    """
    started = clock.monotonic_s()
    pause_s, said = _FIRST_PAUSE_S, _Said(is_json)
    verdicts: dict[JobId, Verdict] = {}
    while True:
        more = True
        try:
            verdicts, more = watcher.look()
            said.tell(verdicts)
        except Unavailable as problem:
            said.trouble(str(problem))
        outcomes = [verdict.outcome for verdict in verdicts.values()]
        if not more and Outcome.WAITING not in outcomes:
            return wait_status(outcomes, returned)
        left_s = float("inf") if timeout_s is None else timeout_s - (clock.monotonic_s() - started)
        if left_s <= 0:
            said.timed_out(verdicts, timeout_s or 0)
            return wait_status([*outcomes, Outcome.WAITING], returned)
        sleep(min(pause_s, left_s))
        pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)


class _Said:
    """Tells each thing once: ends on stdout, what is waited for on stderr. :param is_json: ends are objects."""

    def __init__(self, is_json: bool = False) -> None:
        self._is_json = is_json
        self._told: dict[JobId, str] = {}
        self._trouble = ""

    def tell(self, verdicts: dict[JobId, Verdict]) -> None:
        self._trouble = ""
        for job, (outcome, text) in sorted(verdicts.items()):
            if self._told.get(job) == text:
                continue
            self._told[job] = text
            if self._is_json and outcome is not Outcome.WAITING:
                _tell(job, outcome, text)
                continue
            where = sys.stderr if outcome is Outcome.WAITING else sys.stdout
            print(f"{job} {outcome.value}: {clean(text)[:_LONGEST_TEXT]}", file=where, flush=True)

    def trouble(self, text: str) -> None:
        if text != self._trouble:
            print(f"stageout: {text} Trying again.", file=sys.stderr, flush=True)
        self._trouble = text

    def timed_out(self, verdicts: dict[JobId, Verdict], timeout_s: float) -> None:
        left = [(job, verdict) for job, verdict in sorted(verdicts.items()) if verdict.outcome is Outcome.WAITING]
        for job, verdict in left if self._is_json else ():
            _tell(job, *verdict)
        waiting = [str(job) for job, _ in left]
        what = ", ".join(waiting[:10]) + (", ..." if len(waiting) > 10 else "") if waiting else "the schedd"
        print(f"stageout: timed out after {timeout_s:g} s; still waiting for {what}", file=sys.stderr)


def _tell(job: JobId, outcome: Outcome, text: str) -> None:
    tell({"job": str(job), "outcome": outcome.value, "reason": text})
