"""``stageout retry``, ``cancel``, ``pause``, ``resume``: what an owner asks of the schedd agent.

The request is written into the job's ad (StageOutRequest) as the user that runs the command, so the schedd decides
who may ask; the agent takes it away when the managers have carried it out.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from stageout.cli.exits import CommandError, Exit, Unavailable, UnknownJob
from stageout.cli.jobs import STATUS_WORDS, Job, JobId, parse_job_ids
from stageout.cli.render import clean, duration
from stageout.cli.results import tell
from stageout.cli.verdict import GAVE_UP, judge_history
from stageout.core.clock import Clock, SystemClock
from stageout.wire.custody import AD_LIFETIME_S

if TYPE_CHECKING:
    from stageout.cli.condor import Pool, Queue

_ANSWER_TIMEOUT_S = 45.0
_AGENT_TIMEOUT_S = 8.0
_SAID_AFTER_S = 3.0
_LOOK_INTERVAL_S = 0.5
_NOTICE_FRESH_S = 180


def run(options: argparse.Namespace) -> int:
    """Ask for every job; the worst of the answers is the exit status."""
    from stageout.cli.condor import Pool, Queue

    wanted = parse_job_ids(options.jobs)
    queue, pool = Queue(options.name, options.pool), Pool(options.pool)
    asked: list[JobId] = []
    worst = int(Exit.OK)
    for one in wanted:
        try:
            jobs = _jobs(queue, one, options.command)
            for job in jobs:
                queue.set_request(job.id, options.command)
                asked.append(job.id)
        except CommandError as problem:
            print(f"stageout: {problem}", file=sys.stderr)
            if options.json:
                tell({"job": str(one), "request": options.command, "outcome": "failed", "reason": str(problem)})
            worst = max(worst, int(problem.status))
    if not asked:
        return worst
    answered = await_answers(queue, pool, options.command, asked, SystemClock(), time.sleep, options.json)
    return max(worst, answered)


def _jobs(queue: Queue, one: JobId, verb: str) -> list[Job]:
    """The jobs that the request is for.

    :raises CommandError: there is none, and why.
    """
    found, _ = queue.jobs([one])
    if not found:
        raise _gone(queue, one, verb)
    ready = [job for job in found if job.in_stage_out]
    if not ready:
        raise CommandError(f"{one}: nothing to {verb}: {why_not(found[0])}")
    return ready


def _gone(queue: Queue, one: JobId, verb: str) -> CommandError:
    left = queue.history([one])
    if not left:
        return UnknownJob(f"{one}: no such job in the queue or the history of {queue.name()}")
    return CommandError(f"{one}: nothing to {verb}: the job has left the queue ({judge_history(left[0]).text})")


def why_not(job: Job) -> str:
    """Return the reason why nothing can be asked for this job."""
    if job.delivered:
        return "its output is delivered"
    if job.status == 4:
        return "its output was transferred before the job ended"
    word = STATUS_WORDS.get(job.status, "in an unknown status")
    return f"the job is {word}; its output is handed off when it ends"


def await_answers(
    queue: Queue,
    pool: Pool,
    verb: str,
    jobs: Sequence[JobId],
    clock: Clock,
    sleep: Callable[[float], object],
    is_json: bool = False,
) -> int:
    """Wait until the agent has taken every request, and print what became of the job.

    :param is_json: as objects.
    :returns: exit status: OK, or TIMED_OUT when some requests were not taken.
    """
    started_s = clock.monotonic_s()
    waiting, heard = list(jobs), False
    silent: set[str] | None = None
    while True:
        now = {job.id: job for job in queue.jobs(waiting)[0]}
        waited_s = clock.monotonic_s() - started_s
        for job_id in list(waiting):
            job = now.get(job_id)
            if job is None or (job.request != verb and (waited_s >= _ANSWER_TIMEOUT_S or not _still_failed(job, verb))):
                waiting.remove(job_id)
                _tell(job_id, verb, "accepted", _outcome(job, verb), is_json)
        if not waiting:
            return Exit.OK
        if waited_s >= _SAID_AFTER_S and silent is None:
            silent = _silent(pool, now.values())
            for job_id in waiting:
                print(f"{job_id}: {_meanwhile(verb, now[job_id], silent)}", file=sys.stderr, flush=True)
        if waited_s >= _AGENT_TIMEOUT_S and not heard:
            heard = agent_silence_s(queue, pool, clock.wall_s()) <= _NOTICE_FRESH_S
        hopeless = silent is not None and all(_managers(now[one]) <= silent for one in waiting)
        if heard and hopeless:
            for job_id in sorted(waiting) if is_json else ():
                _tell(job_id, verb, "waiting", _meanwhile(verb, now[job_id], silent or ()), is_json)
            return Exit.TIMED_OUT
        if waited_s >= (_ANSWER_TIMEOUT_S if heard else _AGENT_TIMEOUT_S):
            silence_s = agent_silence_s(queue, pool, clock.wall_s())
            words = no_answer(queue.name(), silence_s, sorted(waiting))
            print(f"stageout: {words}", file=sys.stderr)
            for job_id in sorted(waiting) if is_json else ():
                _tell(job_id, verb, "waiting", words, is_json)
            return Exit.TIMED_OUT
        sleep(_LOOK_INTERVAL_S)


def _managers(job: Job) -> set[str]:
    """Return the managers that hold the job's output; one unnamed, as long as the job's ad names none."""
    return set(job.manager.split(",")) - {""} or {""}


def _silent(pool: Pool, jobs: Iterable[Job]) -> set[str]:
    """Managers of these jobs that nothing is heard of; none where nobody can say."""
    names = {name for job in jobs for name in _managers(job)} - {""}
    try:
        return names - pool.heard(names) if names else set()
    except Unavailable:
        return set()


def _meanwhile(verb: str, job: Job, silent: Collection[str]) -> str:
    """Describe the event that a request waits for when it is not taken at once."""
    gone = sorted(_managers(job) & set(silent))
    if not gone:
        return f"{verb} stands in the job's ad; waiting until the schedd agent and the node's manager have taken it"
    then = "the job leaves without its output" if verb == "cancel" else "the job runs again"
    return (
        f"{verb} stands in the job's ad, but nothing was heard of {clean(', '.join(gone))} for "
        f"{duration(AD_LIFETIME_S)} or more. It is carried out when that node is heard again; if it stays silent for "
        f"STAGEOUT_LEASE seconds in all, {then}. Not to wait for that: condor_rm {job.id}"
    )


def _tell(job: JobId, verb: str, outcome: str, words: str, is_json: bool) -> None:
    if is_json:
        tell({"job": str(job), "request": verb, "outcome": outcome, "reason": words})
    else:
        print(f"{job}: {verb} {outcome}; {words}", flush=True)


def _still_failed(job: Job, verb: str) -> bool:
    """After an accepted retry the ad says Failed until the agent has seen the manager try: a wait would end at once."""
    return verb == "retry" and job.state in GAVE_UP


def _outcome(job: Job | None, verb: str) -> str:
    """Return the next step; progress in the job's ad may be older than the request, so it is not repeated here."""
    if job is None:
        return "the job has left the queue"
    if verb == "pause":
        return f"nothing more of its output is sent until 'stageout resume {job.id}'"
    if verb == "resume" or job.state == "RetryWait":
        return "its output is tried again"
    return f"its output is now {job.state}" + (f": {clean(job.reason)}" if job.reason else "")


def agent_silence_s(queue: Queue, pool: Pool, now: float) -> float:
    """For how long the collector has not heard the schedd's agent, in seconds; infinite when it knows none.

    :param now: wall clock, seconds.
    """
    heard_at = pool.agent_heard_at(queue.name())
    return max(0.0, now - heard_at) if heard_at else float("inf")


def no_answer(schedd: str, silence_s: float, jobs: Sequence[JobId]) -> str:
    """Return the message for a missing answer, which depends on whether an agent exists.

    :param silence_s: see :func:`agent_silence_s`.
    """
    which = ", ".join(map(str, jobs))
    kept = f"The request stays in the job's ad ({which}) and is acted upon when the agent is back"
    if silence_s == float("inf"):
        return f"no schedd agent answers for {schedd}: the collector knows none. {kept}; tell its administrator."
    if silence_s > _NOTICE_FRESH_S:
        return f"the schedd agent of {schedd} was last heard of {silence_s:.0f} s ago. {kept}; tell its administrator."
    return (
        f"the schedd agent of {schedd} runs, but the request was not carried out within {_ANSWER_TIMEOUT_S:.0f} s: "
        f"is the custodian reachable (stageout status {jobs[0]})? The request stays in the job's ad ({which}); "
        "ScheddAgentLog on the access point says why it waits."
    )
