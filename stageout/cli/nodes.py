"""Wait for one node of a DAG and answer for all its other nodes, so that a DAG has one waiting process.

POST scripts (``plugins/stageout_dag_post``) ask with an empty file named after their job and read the answer there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from stageout.cli.exits import Exit, Unavailable, UnknownJob, UsageError
from stageout.cli.jobs import Job, JobId, parse_job_id
from stageout.cli.render import clean
from stageout.cli.verdict import Outcome, Verdict
from stageout.cli.watcher import Source, Watcher
from stageout.core.classads import ClassAd

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0
#: The pause is about a sixth of the time since the last change, which bounds the delay of an answer to that share.
_PAUSE_GROWTH = 1.2
#: Maximum number of POST scripts that wait beside the leader. Each one costs DAGMan's machine two processes.
_MOST_PLACES = 10
_LONGEST_TEXT = 500
#: Number of jobs in one history query.
_HISTORY_BATCH = 100


class Answers:
    """The directory with the questions. :param directory: a file for each job: empty, or its outcome and a reason."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def asked(self) -> set[JobId]:
        """Return the jobs whose POST scripts have no answer yet."""
        found = set()
        with contextlib.suppress(OSError):  # the script that reads the last answer removes the directory
            for entry in os.scandir(self._directory):
                with contextlib.suppress(OSError, UsageError):
                    if entry.stat().st_size == 0:
                        found.add(parse_job_id(entry.name))
        return found

    def give(self, job: JobId, verdict: Verdict) -> None:
        """Answer one question. Readers never see a partial line."""
        aside = self._directory / f".{job}"
        aside.write_text(f"{verdict.outcome.value} {clean(verdict.text)[:_LONGEST_TEXT]}\n")
        aside.replace(self._directory / str(job))


class Places:
    """Waiting slots of POST scripts: named pipes whose locks the scripts hold.

    Scripts without a slot end, and DAGMan starts them again some seconds later.

    :param directory: directory of the pipes, beside that of the questions.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def make(self, most_scripts: int | None) -> None:
        """Create the slots. Nodes that wait for long must not keep the POST scripts of other nodes from running.

        :param most_scripts: DAGMan's limit on running POST scripts, 0 for no limit, None while unknown.
        """
        count = places_for(most_scripts)
        digits = ["".join(str(digit) for digit in range(10) if digit % count == place) for place in range(count)]
        with contextlib.suppress(OSError):
            self._directory.mkdir(mode=0o700, exist_ok=True)
            found = {path.name for path in self._directory.iterdir()}
            for name in found - set(digits):
                (self._directory / name).unlink()
            for name in set(digits) - found:
                os.mkfifo(self._directory / name, 0o600)

    def wake(self) -> None:
        """Wake all waiting scripts, so that they read their answers."""
        with contextlib.suppress(OSError):
            for path in self._directory.iterdir():
                _write_a_byte(path)


def places_for(most_scripts: int | None) -> int:
    """Return the number of slots beside the leader: at most half of DAGMan's limit on running POST scripts."""
    if most_scripts is None:
        return 0
    return min(_MOST_PLACES, most_scripts // 2) if most_scripts else _MOST_PLACES


def _write_a_byte(pipe: Path) -> None:
    """Wake the reader of a pipe. Do nothing without a reader, or if bytes are in the pipe already."""
    with contextlib.suppress(OSError):
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.write(descriptor, b"\n")
        finally:
            os.close(descriptor)


class SharedLook:
    """One query of queue and history that serves the watchers of many nodes.

    :param source: the schedd. :param fetch: returns the DAG's jobs in the queue, and the ads of their clusters.
    """

    def __init__(self, source: Source, fetch: Callable[[], tuple[list[Job], list[ClassAd]]]) -> None:
        self._source = source
        self._fetch = fetch
        self._jobs: dict[int, list[Job]] = {}
        self._clusters: list[ClassAd] = []
        self._past: dict[JobId, list[Job]] = {}

    def look(self, wanted: Iterable[JobId]) -> None:
        """Query the schedd: once for the queue, and at most once for all jobs that have left it."""
        jobs, self._clusters = self._fetch()
        self._jobs = {}
        for job in jobs:
            self._jobs.setdefault(job.id.cluster, []).append(job)
        gone = [one for one in sorted(wanted, key=str) if one.proc is not None and one.cluster not in self._jobs]
        gone = gone[:_HISTORY_BATCH]
        self._past = {one: [] for one in gone}
        for job in self._source.history(gone) if gone else []:
            self._past.setdefault(job.id, []).append(job)

    def has(self, wanted: JobId) -> bool:
        """Tell whether the last query returned this job."""
        return wanted.proc is None or wanted.cluster in self._jobs or wanted in self._past

    def jobs(self, wanted: Sequence[JobId]) -> tuple[list[Job], list[ClassAd]]:
        """See :class:`Source`."""
        clusters = {one.cluster for one in wanted}
        found = [job for one in clusters for job in self._jobs.get(one, ()) if any(w.covers(job.id) for w in wanted)]
        return found, [ad for ad in self._clusters if ad.integer("ClusterId") in clusters]

    def history(self, wanted: Sequence[JobId]) -> list[Job]:
        """See :class:`Source`."""
        if all(one in self._past for one in wanted):
            return [job for one in wanted for job in self._past[one]]
        return self._source.history(wanted)


def lead(
    own: JobId, answers: Answers, shared: SharedLook, sleep: Callable[[float], object], places: Places | None = None
) -> int:
    """Answer for every node that asks until the own node has an end.

    :param places: where POST scripts wait, None for no waiting slots.
    :returns: OK when the own node has an answer, whatever it says.
    """
    watchers: dict[JobId, Watcher] = {}
    known: set[JobId] = set()
    pause_s = _FIRST_PAUSE_S
    while True:
        wanted = answers.asked() | {own}
        ended: set[JobId] = set()
        with contextlib.suppress(Unavailable):  # the schedd restarts; query it again
            shared.look(wanted)
            for one in filter(shared.has, sorted(wanted, key=str)):
                end = _end(watchers.setdefault(one, Watcher(shared, [one])))
                if end is not None:
                    del watchers[one]
                    answers.give(one, end)
                    ended.add(one)
        if ended and places:
            places.wake()  # at the end, one of the waiting scripts becomes the leader
        if own in ended:  # not before the answer: a node without one asks again some seconds later, and then leads
            return Exit.OK
        pause_s = _FIRST_PAUSE_S if ended or wanted - known else min(pause_s * _PAUSE_GROWTH, _LONGEST_PAUSE_S)
        known = wanted
        sleep(pause_s)


def _end(watcher: Watcher) -> Verdict | None:
    """Judge a node, which may have several jobs. Return None while a job of it waits."""
    try:
        verdicts, more = watcher.look()
    except UnknownJob as problem:
        return Verdict(Outcome.FAILED, str(problem))
    outcomes = {verdict.outcome for verdict in verdicts.values()}
    if more or Outcome.WAITING in outcomes:
        return None
    failed = [verdict for verdict in verdicts.values() if verdict.outcome is Outcome.FAILED]
    return (failed or list(verdicts.values()))[0]
