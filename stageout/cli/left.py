"""Output at nodes whose jobs have left the queue: the owner let them go, or the delivery failed later."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from stageout.cli.jobs import STATUS_WORDS, Job, JobId, parse_job_id
from stageout.cli.rows import Row, rows_of_report
from stageout.core.states import FREED
from stageout.wire.custody import JobKey, Report, is_name_of

if TYPE_CHECKING:
    from stageout.cli.condor import Pool, Queue

_JOBS_AT_ONCE = 200
#: Maximum number of jobs to look up in the history, because the schedd may have to read all of it.
_IN_HISTORY = 200


def left_output(
    queue: Queue, pool: Pool, known: Collection[JobKey], owner: str | None, now: float
) -> tuple[list[Row], list[Report]]:
    """Return rows for output whose jobs are not in the queue, and the reports about it.

    :param known: jobs in the queue. :param owner: owner of the jobs; None for all. :param now: wall clock, seconds.
    :raises Unavailable: the schedd or the collector does not answer.
    """
    schedd = queue.name()
    if pool.left_output(schedd) == {}:
        return [], []
    reports = [concerned for one in pool.reports() if (concerned := _of_schedd(one, schedd, known, owner)).sandboxes]
    wanted = sorted({parse_job_id(sandbox.run.job_id) for report in reports for sandbox in report.sandboxes})
    here = {job.key for part in _parts(wanted) for job in queue.jobs(part)[0]}
    gone = [job for job in wanted if not any(key.job_id == str(job) for key in here)]
    past = {job.key: job for job in queue.history(gone[-_IN_HISTORY:])} if gone else {}
    return left_rows(reports, here, past, now), reports


def _parts(jobs: list[JobId]) -> Iterator[list[JobId]]:
    for start in range(0, len(jobs), _JOBS_AT_ONCE):
        yield jobs[start : start + _JOBS_AT_ONCE]


def _of_schedd(report: Report, schedd: str, known: Collection[JobKey], owner: str | None) -> Report:
    """Return a report that contains only those sandboxes of a schedd's jobs that still have output on the node."""
    sandboxes = (
        sandbox
        for sandbox in report.sandboxes
        if sandbox.state not in FREED
        and is_name_of(sandbox.job, schedd, sandbox.run.job_id)
        and owner in (None, sandbox.owner.partition("@")[0])
        and sandbox.run.key not in known
    )
    return replace(report, sandboxes=tuple(sandboxes))


def left_rows(reports: Iterable[Report], here: Collection[JobKey], past: Mapping[JobKey, Job], now: float) -> list[Row]:
    """Return the rows of sandboxes whose jobs are not in the queue, in the order of their jobs.

    :param here: jobs in the queue. :param past: jobs in the history. For these, only managers count whose key is in the
        access point's record of the run. :param now: wall clock, seconds.
    """
    rows = []
    for report in reports:
        sandboxes = (sandbox for sandbox in report.sandboxes if sandbox.run.key not in here)
        counted = tuple(sandbox for sandbox in sandboxes if _counts(report, past.get(sandbox.run.key)))
        for sandbox, row in zip(counted, rows_of_report(replace(report, sandboxes=counted), now)):
            rows.append(_left(row, past.get(sandbox.run.key)))
    return sorted(rows, key=lambda row: (parse_job_id(row.job), row.run))


def _counts(report: Report, job: Job | None) -> bool:
    return job is None or not job.keys or report.key in job.keys


def _left(row: Row, job: Job | None) -> Row:
    if job is None:
        return replace(row, owner=row.owner.partition("@")[0], has_left=True)
    status = STATUS_WORDS.get(job.status, "Unknown")
    return replace(row, owner=job.owner, job_status=status, has_left=True, ended_at=job.completed_at)
