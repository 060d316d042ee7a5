"""Selection of a request's jobs by an expression or by their destination."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from stageout.cli.exits import Unavailable, UsageError
from stageout.cli.jobs import Job, JobId
from stageout.cli.outputs import outputs_of
from stageout.cli.rows import Row, merge
from stageout.cli.servers import server_of
from stageout.cli.whose import whose_jobs
from stageout.core.states import ENDS, State
from stageout.wire.custody import FileReport, Report

if TYPE_CHECKING:
    from stageout.cli.condor import Pool, Queue

_ENDED = frozenset(state.value for state in ENDS) - {State.FAILED.value}


def add_selection(command: argparse.ArgumentParser) -> None:
    """Add the options that select many jobs."""
    command.add_argument(
        "--destination", metavar="HOST", help="choose your jobs with output that waits for this server"
    )
    add_choice(command)


def add_choice(command: argparse.ArgumentParser) -> None:
    """Add the options that select among the jobs in stage-out, and the option that only prints the selection."""
    command.add_argument(
        "-constraint", "--constraint", metavar="EXPR", help="choose your jobs in stage-out for which EXPR is true"
    )
    command.add_argument("-a", "--all", dest="all_users", action="store_true", help="choose from the jobs of all users")
    command.add_argument("--dry-run", action="store_true", help="show the jobs, and ask for nothing")


def is_selection(options: argparse.Namespace) -> bool:
    """Tell whether options select the jobs.

    :raises UsageError: the command line has both job ids and such options, or neither.
    """
    chosen = options.constraint is not None or options.destination is not None
    if chosen == bool(options.jobs):
        raise UsageError("name jobs, or choose them with -constraint or --destination; not both")
    if options.all_users and not chosen:
        raise UsageError("--all needs -constraint or --destination")
    return chosen


def selected(queue: Queue, pool: Pool, options: argparse.Namespace) -> list[Job]:
    """Return the selected jobs in stage-out, in the order of their ids.

    :raises UsageError: the expression is invalid, the server's name is empty, or root does not name an owner.
    :raises Unavailable: the schedd or the collector does not answer.
    """
    if options.destination is not None and not server_of(_as_url(options.destination)).host:
        names = "HOST, HOST:PORT, [IPv6 ADDRESS]:PORT or SCHEME://HOST"
        raise UsageError(f"'{options.destination}' names no server: write {names}")
    if os.geteuid() == 0 and not options.all_users:
        raise UsageError("root: add --all for the jobs of all users")
    owner = None if options.all_users else whose_jobs()
    found = [(job, ad) for job, ad in queue.jobs_with_outputs(owner, options.constraint) if job.in_stage_out]
    jobs = [job for job, _ in found]
    if options.destination is not None and jobs:
        outputs = {job.id: [one.url for one in outputs_of(ad)] for job, ad in found}
        jobs = _for_server(jobs, outputs, reports_on(jobs, pool), options.destination)
    return sorted(jobs, key=lambda job: job.id)


def reports_on(jobs: Iterable[Job], pool: Pool) -> list[Report]:
    """Return the managers' reports on these jobs; empty if the collector does not answer: then the jobs' ads count."""
    managers = {name for job in jobs for name in job.manager.split(",")}
    try:
        return pool.reports(None if "" in managers else managers)
    except Unavailable:
        return []


def _for_server(jobs: list[Job], outputs: Mapping[JobId, list[str]], reports: list[Report], host: str) -> list[Job]:
    """Select the jobs with a file that waits for a server.

    A report counts if it names all waiting files; otherwise the job's own list of output files counts.
    """
    waiting = {}
    for row in merge(jobs, reports):
        urls = [file.url for file in waiting_files(row)]
        if urls and len(urls) >= row.files_left:
            waiting[row.job] = urls
    return [job for job in jobs if any(is_at(url, host) for url in waiting.get(str(job.id)) or outputs[job.id])]


def waiting_files(row: Row) -> list[FileReport]:
    """Return the files of a job that wait, move or have failed, as far as reports name them."""
    return [file for file in row.files if file.state not in _ENDED]


def is_at(url: str, host: str) -> bool:
    """Tell whether a URL belongs to a server. :param host: ``HOST``, ``HOST:PORT`` or ``SCHEME://HOST[:PORT]``."""
    found = server_of(url)
    wanted = server_of(_as_url(host, found.method))
    has_port = host.rstrip("/").rpartition(":")[2].isdigit()
    return found == wanted if has_port else found[:2] == wanted[:2]


def _as_url(host: str, method: str = "any") -> str:
    return host if "://" in host else f"{method}://{host}"
