"""``stageout redirect``."""

from __future__ import annotations

import argparse
import secrets
import time

from stageout.cli.arguments import add_json, add_schedd
from stageout.cli.exits import CommandError, UsageError
from stageout.cli.jobs import parse_job_id
from stageout.cli.request import await_answers, jobs_for, request_for
from stageout.core.clock import SystemClock
from stageout.wire.owner_requests import Verb, redirect_problem

DESCRIPTION = """\
Send failed and waiting files of a job to another URL, without another run. On success a held job completes.
Files that are delivered or being sent keep their URL. Without FILE, URL is a directory: the last part of each file's
URL stays. With FILE, URL is the whole URL of this file, or a directory if it ends with a slash.
The command sends a token to another server only if URL names it, as in token+https://server/path.

exit status: 0 carried out, 1 refused, 2 no answer in time (the request stays), 3 unknown job"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add what this command takes."""
    command.add_argument("job", metavar="JOB", help="job (1234.0)")
    command.add_argument("file", metavar="FILE", nargs="?", default="", help="name as 'stageout status' shows it")
    command.add_argument("url", metavar="URL", help="new destination, without a password or a signature")
    add_json(command)
    add_schedd(command)


def run(options: argparse.Namespace) -> int:
    """Ask, and wait for the answer."""
    from stageout.cli.condor import Pool, Queue

    wanted = parse_job_id(options.job)
    if wanted.proc is None:
        raise UsageError(f"name one job, such as {wanted}.0: files of several jobs would get the same URLs")
    problem = redirect_problem(options.url)
    if problem:
        raise UsageError(f"cannot redirect: {problem}")
    queue, pool, name = Queue(options.name, options.pool), Pool(options.pool), secrets.token_hex(4)
    (job,) = jobs_for(queue, wanted, "redirect")
    if job.request:
        asked = job.request.split(" ")[0]
        raise CommandError(f"{job.id}: the request {asked} has no answer yet; redirect again when it has")
    request = request_for(job, Verb.REDIRECT, name, options.url, options.file)
    queue.set_request(job.id, str(request))
    return await_answers(queue, pool, {job.id: request}, SystemClock(), time.sleep, options.json)
