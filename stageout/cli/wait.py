"""``stageout wait``: wait until output is delivered. The exit status is made for scripts and DAGs."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stageout.cli.arguments import JOB, add_json, add_schedd, seconds
from stageout.cli.exits import UsageError
from stageout.cli.jobs import JobId, parse_job_ids
from stageout.cli.render import clean
from stageout.cli.results import tell
from stageout.cli.verdict import Outcome, Verdict, own_status, wait_status
from stageout.cli.watcher import Watcher, looks
from stageout.core.clock import Clock, SystemClock

if TYPE_CHECKING:
    from stageout.cli.condor import Queue

_LONGEST_TEXT = 500
#: DAGMan's $RETURN when the submission failed, and when a PRE script failed.
_NOT_SUBMITTED = -1001, -1004

DESCRIPTION = """\
Wait until the output of all JOBs is delivered. The command also waits for jobs that still run and while the schedd
restarts. It looks up jobs that have left the queue in the history. Output that was transferred before the job ended
counts as delivered. A job that is held because of its output has failed. A job that is held for another reason has not.

exit status: 0 delivered, 1 failed, lost or cancelled, 2 timed out, 3 unknown job

For all nodes of a DAG, put this line into the DAG file:
  INCLUDE /opt/stageout/share/stageout/stageout.dag
As POST script of a single node, which needs the job's own status because a POST script decides about its node:
  SCRIPT DEFER 2 60 POST A /opt/stageout/bin/stageout wait --timeout 20 --return $RETURN $JOBID
With DEFER, DAGMan runs the script again every minute, and a waiting node does not use up the limit on POST scripts."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    command.add_argument("jobs", metavar="JOB", nargs="+", help=JOB)
    command.add_argument(
        "--timeout", metavar="S", type=seconds, help="seconds to wait before the command ends with status 2"
    )
    command.add_argument(
        "--return", metavar="STATUS", type=int, default=0, dest="returned",
        help="exit status of the job; the command ends with it unless it is 0 (2 and signals become 1)",
    )  # fmt: skip
    # Only stageout_dag_post uses this option: the one process that waits for a DAG.
    command.add_argument("--dag", type=int, default=0, help=argparse.SUPPRESS)
    command.add_argument("--answers", default="", help=argparse.SUPPRESS)
    add_json(command)
    add_schedd(command)


def run(options: argparse.Namespace) -> int:
    """Wait for the jobs and print how each ended."""
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
    from stageout.cli.nodes import Answers, Places, SharedLook, lead

    if len(wanted) != 1 or not options.answers:
        raise UsageError("--dag takes one JOB, and --answers with it; stageout_dag_post gives both")
    shared = SharedLook(queue, lambda: queue.jobs_of_dag(options.dag))
    places = Places(Path(f"{options.answers}.places"))
    places.make(queue.most_post_scripts(options.dag))
    return lead(wanted[0], Answers(Path(options.answers)), shared, time.sleep, places)


def wait(
    watcher: Watcher,
    timeout_s: float | None,
    returned: int,
    clock: Clock,
    sleep: Callable[[float], object],
    is_json: bool = False,
) -> int:
    """Print the end of every job, and print progress for people.

    :param timeout_s: seconds from now; None for no limit. :param returned: the job's own exit status.
    :param is_json: print the ends as one object when all are known or the time is over.
    :returns: the exit status.
    """
    said = _Said(is_json)
    outcomes: list[Outcome] = []
    for look in looks(watcher, timeout_s, clock, sleep):
        if look.problem:
            said.trouble(str(look.problem))
        else:
            said.tell(look.verdicts)
        outcomes = [verdict.outcome for verdict in look.verdicts.values()]
        if look.is_timed_out:
            said.timed_out(look.verdicts, timeout_s or 0)
            outcomes.append(Outcome.WAITING)
    said.finish(outcomes)
    return wait_status(outcomes, returned)


class _Said:
    """Printer that prints each line once: ends on stdout, progress on stderr. :param is_json: ends are an object."""

    def __init__(self, is_json: bool = False) -> None:
        self._is_json = is_json
        self._told: dict[JobId, str] = {}
        self._verdicts: dict[JobId, Verdict] = {}
        self._trouble = ""

    def tell(self, verdicts: dict[JobId, Verdict]) -> None:
        self._trouble, self._verdicts = "", verdicts
        for job, (outcome, text) in sorted(verdicts.items()):
            if self._told.get(job) == text:
                continue
            self._told[job] = text
            if self._is_json and outcome is not Outcome.WAITING:
                continue
            where = sys.stderr if outcome is Outcome.WAITING else sys.stdout
            print(f"{job} {outcome.value}: {clean(text)[:_LONGEST_TEXT]}", file=where, flush=True)

    def trouble(self, text: str) -> None:
        if text != self._trouble:
            print(f"stageout: {text} Trying again.", file=sys.stderr, flush=True)
        self._trouble = text

    def timed_out(self, verdicts: dict[JobId, Verdict], timeout_s: float) -> None:
        waiting = [str(job) for job, verdict in sorted(verdicts.items()) if verdict.outcome is Outcome.WAITING]
        what = ", ".join(waiting[:10]) + (", ..." if len(waiting) > 10 else "") if waiting else "the schedd"
        print(f"stageout: timed out after {timeout_s:g} s; still waiting for {what}", file=sys.stderr)

    def finish(self, outcomes: Sequence[Outcome]) -> None:
        """Print the object. :param outcomes: outcomes of all jobs, WAITING after a timeout."""
        if not self._is_json:
            return
        jobs = [{"job": str(job), "outcome": one.value, "reason": text}
                for job, (one, text) in sorted(self._verdicts.items())]  # fmt: skip
        worst = next((one for one in (Outcome.FAILED, Outcome.WAITING) if one in outcomes), Outcome.DELIVERED)
        tell({"schema": 2, "outcome": worst.value, "jobs": jobs})
