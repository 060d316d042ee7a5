"""``stageout redirect``."""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urlsplit

from stageout.cli.arguments import add_json, add_schedd
from stageout.cli.exits import CommandError, Exit, UsageError
from stageout.cli.jobs import Job, JobId, parse_job_id
from stageout.cli.request import await_answers, jobs_for, request_for
from stageout.cli.results import tell
from stageout.cli.rows import merge
from stageout.cli.selection import add_choice, is_at, reports_on, selected, waiting_files
from stageout.core.clock import SystemClock
from stageout.movers.schemes import shown_url
from stageout.wire.custody import FileReport
from stageout.wire.owner_requests import OwnerRequest, Verb, redirect_problem

if TYPE_CHECKING:
    from stageout.cli.condor import Pool, Queue

DESCRIPTION = """\
Send failed and waiting files of a job to another URL, without another run. On success a held job completes.
The words are JOB [FILE] URL. Files that are delivered or being sent keep their URL. Without FILE, URL is a directory:
the last part of each file's URL stays. With FILE, URL is the whole URL of this file, or a directory if it ends with
a slash.
The command sends a token to another server only if URL names it, as in token+https://server/path.

With --server, the files of all your jobs that wait for the server OLD go to NEW, a URL: their paths stay, below NEW.

exit status: 0 carried out, 1 refused, 2 no answer in time (the request stays), 3 unknown job"""


class Move(NamedTuple):
    """Files of a job that go to another directory. :param file: name of the file; "" for all that wait."""

    job: Job
    file: str
    url: str


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    command.add_argument(
        "words", metavar="WORD", nargs="*",
        help="JOB: job (1234.0); FILE: name as 'stageout status' shows it; "
        "URL: new destination, without a password or a signature",
    )  # fmt: skip
    command.add_argument(
        "--server", metavar=("OLD", "NEW"), nargs=2,
        help="all jobs with files for the server OLD (HOST, HOST:PORT or SCHEME://HOST); NEW is a URL",
    )  # fmt: skip
    add_choice(command)
    add_json(command)
    add_schedd(command)


def run(options: argparse.Namespace) -> int:
    """Request the move, and wait for the answer."""
    from stageout.cli.condor import Pool, Queue

    if bool(options.server) == bool(options.words) or len(options.words) == 1 or len(options.words) > 3:
        raise UsageError("write JOB [FILE] URL, or --server OLD NEW")
    if not options.server and (options.constraint or options.all_users):
        raise UsageError("-constraint and --all go with --server")
    url = options.server[1] if options.server else options.words[-1]
    problem = redirect_problem(url)
    if problem:
        raise UsageError(f"cannot redirect: {problem}")
    wanted = parse_job_id(options.words[0]) if options.words else None
    if wanted and wanted.proc is None:
        raise UsageError(f"name one job, such as {wanted}.0: files of several jobs would get the same URLs")
    queue, pool = Queue(options.name, options.pool), Pool(options.pool)
    if wanted:
        (job,) = jobs_for(queue, wanted, "redirect")
        file = options.words[1] if len(options.words) > 2 else ""
        return _request_all(queue, pool, [Move(job, file, url)], options)
    options.destination = options.server[0]
    jobs = selected(queue, pool, options)
    files = {row.job: waiting_files(row) for row in merge(jobs, reports_on(jobs, pool))}
    moves: list[Move] = []
    status = Exit.OK
    for job in jobs:
        try:
            if job.request:
                raise _is_asked(job)
            moves += planned(job, files[str(job.id)], *options.server)
        except CommandError as reason:
            print(f"stageout: {reason}", file=sys.stderr)
            status = Exit.FAILED
    return max(int(status), _request_all(queue, pool, moves, options))


def planned(job: Job, files: Iterable[FileReport], old: str, new: str) -> list[Move]:
    """Return the new directories of those files of a job that wait for a server. Their paths stay, below ``new``.

    :param files: all files that wait, move or have failed.
    :raises CommandError: a report of its node does not name all files, or a request cannot contain a path.
    """
    files = list(files)
    mine = [file for file in files if is_at(file.url, old)]
    if not mine or len(files) < (job.files_left or 0):
        raise CommandError(f"{job.id}: its node has not reported all files that wait; try again, or name the job")
    places = {file.name: f"{new.rstrip('/')}{_directory(file.url)}" for file in mine}
    problems = [problem for place in places.values() if (problem := redirect_problem(place))]
    # The owner chose these paths, and NEW may be an administrator's.
    if any("/../" in unquote(_directory(file.url)) for file in mine):
        problems.append("a path with '..' would leave the new URL; name the job and a URL")
    if problems:
        raise CommandError(f"{job.id}: cannot redirect: {problems[0]}")
    if len(mine) == len(files) and len(set(places.values())) == 1:
        return [Move(job, "", next(iter(places.values())))]
    return [Move(job, name, place) for name, place in places.items()]


def _directory(url: str) -> str:
    return urlsplit(f"x://{shown_url(url).partition('://')[2]}").path.rpartition("/")[0] + "/"


def _request_all(queue: Queue, pool: Pool, moves: list[Move], options: argparse.Namespace) -> int:
    """Request one move of each job at a time, because a job's ad has room for one request. Return the worst exit
    status.
    """
    status, left = int(Exit.OK), list(moves)
    for move in moves if options.dry_run else ():
        _show(move, options.json)
    while left and not options.dry_run:
        asked: dict[JobId, OwnerRequest] = {}
        for move in list(left):
            if move.job.id not in asked:
                left.remove(move)
                asked[move.job.id] = _asked(queue, move)
        status = max(status, await_answers(queue, pool, asked, SystemClock(), time.sleep, options.json))
    return status


def _asked(queue: Queue, move: Move) -> OwnerRequest:
    """Write a request into the ad of the job. :raises CommandError: another request has no answer yet."""
    job = move.job
    if job.request:
        raise _is_asked(job)
    request = request_for(job, Verb.REDIRECT, secrets.token_hex(4), move.url, move.file)
    queue.set_request(job.id, str(request))
    return request


def _is_asked(job: Job) -> CommandError:
    verb = job.request.split(" ")[0]
    return CommandError(f"{job.id}: the request {verb} has no answer yet; redirect again when it has")


def _show(move: Move, is_json: bool) -> None:
    if is_json:
        tell(
            {
                "job": str(move.job.id),
                "request": "redirect",
                "outcome": "dry run",
                "reason": f"{move.file} {move.url}".strip(),
            }
        )
    else:
        print(f"{move.job.id}  {move.file or 'all files that wait'}  {move.url}")
