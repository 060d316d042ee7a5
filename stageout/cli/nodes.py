"""Wait for one node of a DAG and answer for all other nodes of it: one waiting process for a DAG.

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
#: A pause is about a sixth of the time since the last news, so an answer is late by that share of the wait at most.
_PAUSE_GROWTH = 1.2
#: Most POST scripts that wait beside the leader. Each costs DAGMan's machine two processes.
_MOST_PLACES = 10
_LONGEST_TEXT = 500
#: Jobs in one question to the history.
_HISTORY_BATCH = 100


class Answers:
    """The directory with the questions. :param directory: a file for each job: empty, or its outcome and a reason."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def asked(self) -> set[JobId]:
        """Return the jobs whose POST scripts have no answer yet."""
        found = set()
        with contextlib.suppress(OSError):  # the script that took the last answer removes the directory
            for entry in os.scandir(self._directory):
                with contextlib.suppress(OSError, UsageError):
                    if entry.stat().st_size == 0:
                        found.add(parse_job_id(entry.name))
        return found

    def give(self, job: JobId, verdict: Verdict) -> None:
        """Answer one question. A reader sees nothing or the whole line."""
        aside = self._directory / f".{job}"
        aside.write_text(f"{verdict.outcome.value} {clean(verdict.text)[:_LONGEST_TEXT]}\n")
        aside.replace(self._directory / str(job))


class Places:
    """Places where POST scripts wait for their answers: a named pipe for each, whose lock the script holds.

    Scripts without a place end, and DAGMan starts them again some seconds later.

    :param directory: directory of the places, beside that of the questions.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def make(self, most_scripts: int | None) -> None:
        """Make the places. Nodes that wait for long must not keep the POST scripts of other nodes from running.

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
        """Let all that wait look for their answers."""
        with contextlib.suppress(OSError):
            for path in self._directory.iterdir():
                _write_a_byte(path)


def places_for(most_scripts: int | None) -> int:
    """Return the number of places beside the leader: at most half of DAGMan's limit on running POST scripts."""
    if most_scripts is None:
        return 0
    return min(_MOST_PLACES, most_scripts // 2) if most_scripts else _MOST_PLACES


def _write_a_byte(pipe: Path) -> None:
    """Wake the reader of a pipe. Without one, and with bytes that wait in it, there is nothing to do."""
    with contextlib.suppress(OSError):
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.write(descriptor, b"\n")
        finally:
            os.close(descriptor)


class SharedLook:
    """One look at queue and history that serves the watchers of many nodes.

    :param source: the schedd. :param fetch: jobs of the DAG that are in the queue, and ads of their clusters.
    """

    def __init__(self, source: Source, fetch: Callable[[], tuple[list[Job], list[ClassAd]]]) -> None:
        self._source = source
        self._fetch = fetch
        self._jobs: dict[int, list[Job]] = {}
        self._clusters: list[ClassAd] = []
        self._past: dict[JobId, list[Job]] = {}

    def look(self, wanted: Iterable[JobId]) -> None:
        """Ask the schedd: once for the queue, and at most once for all that is no longer there."""
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
        """Return True when the last look says something about this job."""
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

    :param places: where POST scripts wait, None for no places.
    :returns: OK when the own node has an answer, whatever it says.
    """
    watchers: dict[JobId, Watcher] = {}
    known: set[JobId] = set()
    pause_s = _FIRST_PAUSE_S
    while True:
        wanted = answers.asked() | {own}
        ended: set[JobId] = set()
        with contextlib.suppress(Unavailable):  # a schedd that restarts; look again
            shared.look(wanted)
            for one in filter(shared.has, sorted(wanted, key=str)):
                end = _end(watchers.setdefault(one, Watcher(shared, [one])))
                if end is not None:
                    del watchers[one]
                    answers.give(one, end)
                    ended.add(one)
        if ended and places:
            places.wake()  # at the end, one of the scripts that wait takes the lead
        if own in ended:  # not before: a node without an answer asks again some seconds later, and leads then
            return Exit.OK
        pause_s = _FIRST_PAUSE_S if ended or wanted - known else min(pause_s * _PAUSE_GROWTH, _LONGEST_PAUSE_S)
        known = wanted
        sleep(pause_s)


def _end(watcher: Watcher) -> Verdict | None:
    """Judge a node, which may have several jobs. Return None while one of them waits."""
    try:
        verdicts, more = watcher.look()
    except UnknownJob as problem:
        return Verdict(Outcome.FAILED, str(problem))
    outcomes = {verdict.outcome for verdict in verdicts.values()}
    if more or Outcome.WAITING in outcomes:
        return None
    failed = [verdict for verdict in verdicts.values() if verdict.outcome is Outcome.FAILED]
    return (failed or list(verdicts.values()))[0]
