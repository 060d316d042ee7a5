"""Status, waiting, retries and history of jobs, for Python programs; the ``stageout`` command prints the same.

All functions read queue, history and collector with the rights of the calling process, and need HTCondor's Python
bindings. A job is written as ``condor_q`` shows it: ``"1234.0"``, or ``"1234"`` for all jobs of a cluster::

    from stageout import jobs

    if jobs.wait("1234", timeout_s=3600)[0].outcome == "failed":
        print(jobs.status("1234").jobs[0].reason)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stageout.cli import history as _history
from stageout.cli import request as _request
from stageout.cli import status as _status
from stageout.cli import watcher as _watcher
from stageout.cli.exits import CommandError, Unavailable, UnknownJob, UsageError
from stageout.cli.jobs import JobId, parse_job_ids
from stageout.cli.rows import Row as JobStatus
from stageout.cli.verdict import Outcome, Verdict
from stageout.core.clock import SystemClock
from stageout.wire.custody import FileReport
from stageout.wire.owner_requests import Verb

__all__ = [
    "CommandError", "FileReport", "JobOutcome", "JobStatus", "Status", "Unavailable", "UnknownJob", "UsageError",
    "history", "retry", "status", "wait",
]  # fmt: skip


@dataclass(frozen=True)
class Status:
    """Answer of :func:`status`.

    :param jobs: in the order of their ids.
    :param notes: sentences about gaps in the answer, and about servers that cannot be reached.
    """

    jobs: tuple[JobStatus, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class JobOutcome:
    """Outcome of a wait or of a request, for one job.

    :param job: ``cluster.proc``, or what was asked for when no job of it was found.
    :param outcome: of a wait "delivered", "failed" or, when the time was over, "waiting"; of a request "accepted",
        "failed" (refused), or "waiting": no answer came in time, and the request stays in the job's ad.
    :param reason: one sentence.
    """

    job: str
    outcome: str
    reason: str


def status(
    jobs: str | Sequence[str] = (), *, all_users: bool = False, schedd: str | None = None, pool: str | None = None
) -> Status:
    """Return the delivery of jobs, file by file.

    :param jobs: without any, all jobs of this user whose output was handed off and which are in the queue.
    :param all_users: without ``jobs``: of all users. Root always sees those of all users.
    :param schedd: name of the schedd; None for the local one. :param pool: its collector; None for the configured one.
    :raises UnknownJob: neither queue nor history has one of ``jobs``. :raises UsageError: one of ``jobs`` is no job.
    :raises Unavailable: the schedd does not answer.
    """
    from stageout.cli.condor import Pool, Queue

    wanted = _read(jobs)
    owner = None if wanted or all_users else _status.whose_jobs()
    seen = _status.look(Queue(schedd, pool), Pool(pool), wanted, owner, {})
    return Status(tuple(seen.rows), tuple(seen.notes))


def wait(
    jobs: str | Sequence[str], *, timeout_s: float | None = None, schedd: str | None = None, pool: str | None = None
) -> list[JobOutcome]:
    """Wait until the output of every job is delivered, or can no longer be.

    Jobs that have not ended are waited for, and so is a schedd that does not answer.

    :param timeout_s: seconds; 0 looks once, None waits without a limit.
    :returns: one outcome for each job, in the order of their ids. Nothing is known of jobs that a factory has not made
        yet, or while the schedd does not answer: after a time-out they are missing.
    :raises UnknownJob: neither queue nor history has one of ``jobs``. :raises UsageError: one of ``jobs`` is no job.
    """
    from stageout.cli.condor import Queue

    watcher = _watcher.Watcher(Queue(schedd, pool), _read(jobs))
    verdicts: dict[JobId, Verdict] = {}
    for look in _watcher.looks(watcher, timeout_s, SystemClock(), time.sleep):
        verdicts = look.verdicts
    return [JobOutcome(str(job), outcome.value, text) for job, (outcome, text) in sorted(verdicts.items())]


def retry(jobs: str | Sequence[str], *, schedd: str | None = None, pool: str | None = None) -> list[JobOutcome]:
    """Ask the schedd's agent to transfer failed and waiting output again at once, and wait for its answer.

    The request is durable in the queue when the function returns, except for outcomes "failed".

    :returns: one outcome for each job that was asked for, and one for each of ``jobs`` that was refused. The wait for
        answers ends after 45 s.
    :raises Unavailable: schedd or collector stopped answering during the wait. :raises UsageError: one of ``jobs`` is
        no job.
    """
    from stageout.cli.condor import Pool, Queue

    queue = Queue(schedd, pool)
    asked, refused = _request.ask(queue, _read(jobs), Verb.RETRY)
    outcomes = [JobOutcome(str(one), Outcome.FAILED.value, str(problem)) for one, problem in refused]
    if asked:
        answers = _request.answers(queue, Pool(pool), asked, SystemClock(), time.sleep)
        words = {"refused": "failed"}
        outcomes += [JobOutcome(str(job), words.get(word, word), why) for job, word, why in answers if word != "asked"]
    return outcomes


def history(
    jobs: str | Sequence[str] = (),
    *,
    all_users: bool = False,
    limit: int = 100,
    schedd: str | None = None,
    pool: str | None = None,
) -> list[dict[str, Any]]:
    """Return jobs that have left the queue, with the fields of ``stageout history --json``.

    :param jobs: each with its runs and their files. Without any, the newest jobs of this user whose output was handed
        off, without runs. :param all_users: without ``jobs``: of all users. :param limit: most jobs without ``jobs``.
    :param schedd: name of the schedd; None for the local one. :param pool: its collector; None for the configured one.
    :raises UnknownJob: neither queue nor history has one of ``jobs``. :raises UsageError: one of ``jobs`` is no job.
    :raises Unavailable: the schedd does not answer.
    """
    wanted = _read(jobs)
    owner = None if wanted or all_users else _status.whose_jobs()
    return _history.read(schedd, pool, wanted, owner, limit)


def _read(jobs: str | Sequence[str]) -> list[JobId]:
    return parse_job_ids([jobs] if isinstance(jobs, str) else jobs)
