"""Requests of an owner to the schedd agent: the common part of ``retry``, ``cancel``, ``pause`` and ``resume``.

The command writes the request into the job's ad (StageOutRequest) as its user, so the schedd decides who may ask. The
agent removes the request when the managers have applied it. The request names the job's run that the command has read,
because the job may begin another run in the meantime.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from stageout.cli.arguments import JOB, add_json, add_schedd
from stageout.cli.exits import CommandError, Exit, Unavailable, UnknownJob
from stageout.cli.jobs import STATUS_WORDS, Job, JobId, parse_job_ids
from stageout.cli.render import clean
from stageout.cli.results import tell
from stageout.cli.selection import add_selection, is_selection, selected
from stageout.cli.verdict import GAVE_UP, UNREPORTED, judge_history
from stageout.core.clock import Clock, SystemClock
from stageout.core.states import plain_word
from stageout.core.units import duration
from stageout.model.job import Status
from stageout.wire.custody import AD_LIFETIME_S
from stageout.wire.owner_requests import OwnerRequest, Verb, parse_request

if TYPE_CHECKING:
    from stageout.cli.condor import Pool, Queue

_ANSWER_TIMEOUT_S = 45.0
_AGENT_TIMEOUT_S = 8.0
_SAID_AFTER_S = 3.0
_LOOK_INTERVAL_S = 0.5
#: Seconds after which the last ad of an agent no longer proves that it runs.
NOTICE_FRESH_S = 180
#: Maximum number of selected jobs for whose answers the command waits.
_WAITED_FOR = 50

#: Selects jobs whose ads contain a request.
Asked = Mapping[JobId, OwnerRequest]
Refused = list[tuple[JobId, CommandError]]


class Answer(NamedTuple):
    """The agent's answer to a request about one job.

    :param outcome: "accepted"; "refused": a redirect that was not applied to all files, a request for another run than
        the last one, or a request that another request has replaced; "asked": no answer yet, and the command still
        waits; "waiting": no answer, and the command no longer waits, but the request stays.
    :param words: the reason, or the next step.
    """

    job: JobId
    outcome: str
    words: str


#: End of the description of each request.
STATUS = """

The schedd agent carries out the request. The command waits for the result and prints the state of the output. It does
not wait if more than 50 jobs were chosen with -constraint or --destination.
exit status: 0 carried out, 1 refused, 2 no answer in time (the request stays), 3 unknown job"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    command.add_argument("jobs", metavar="JOB", nargs="*", help=JOB)
    add_selection(command)
    add_json(command)
    add_schedd(command)


def run(options: argparse.Namespace) -> int:
    """Send the request for every job. The exit status is that of the worst answer."""
    from stageout.cli.condor import Pool, Queue

    chosen = is_selection(options)
    queue, pool = Queue(options.name, options.pool), Pool(options.pool)
    if chosen:
        asked, refused = _ask_selected(queue, selected(queue, pool, options), options)
    elif options.dry_run:
        asked, refused = _show_named(queue, options)
    else:
        asked, refused = ask(queue, parse_job_ids(options.jobs), Verb(options.command))
    for one, problem in refused:
        print(f"stageout: {problem}", file=sys.stderr)
        if options.json:
            tell({"job": str(one), "request": options.command, "outcome": "failed", "reason": str(problem)})
    worst = max((int(problem.status) for _, problem in refused), default=int(Exit.OK))
    if not asked:
        return worst
    answered = await_answers(queue, pool, asked, SystemClock(), time.sleep, options.json)
    return max(worst, answered)


def request_for(job: Job, verb: Verb, *words: str) -> OwnerRequest:
    """Return a request for the last run of a job. :param words: of a redirect: its id, the URL, the file."""
    return OwnerRequest(verb, max(0, job.run), *words)


def _ask_selected(queue: Queue, jobs: list[Job], options: argparse.Namespace) -> tuple[Asked, Refused]:
    """Write a request into the ads of the selected jobs.

    :returns: the jobs to wait for, none when there are many; and the refusals with their reasons.
    """
    if options.dry_run:
        _show(jobs, options)
        return {}, []
    wanted = {job.id: request_for(job, Verb(options.command)) for job in jobs}
    refused = queue.set_requests({job: str(request) for job, request in wanted.items()})
    failed = {one for one, _ in refused}
    asked = {job: request for job, request in wanted.items() if job not in failed}
    if not options.json:
        print(f"{options.command} asked for {_count(len(asked))}", flush=True)
    if len(asked) <= _WAITED_FOR:
        return asked, refused
    if options.json:
        for one in asked:
            tell({"job": str(one), "request": options.command, "outcome": "waiting", "reason": "not waited for"})
    else:
        print("The command does not wait for so many; 'stageout status' shows them.")
    return {}, refused


def _show_named(queue: Queue, options: argparse.Namespace) -> tuple[Asked, Refused]:
    """Print the jobs that a request would apply to. Return no jobs to wait for, and the expected refusals."""
    found: list[Job] = []
    refused: Refused = []
    for one in parse_job_ids(options.jobs):
        try:
            found += jobs_for(queue, one, options.command)
        except CommandError as problem:
            refused.append((one, problem))
    _show(found, options)
    return {}, refused


def _show(jobs: Sequence[Job], options: argparse.Namespace) -> None:
    """Print the jobs that a request would apply to."""
    for job in jobs:
        words = ": ".join(filter(None, [_state_word(job), clean(job.reason)]))
        if options.json:
            tell({"job": str(job.id), "request": options.command, "outcome": "dry run", "reason": words})
        else:
            print(f"{job.id}  {job.owner}  {words}")
    if not options.json:
        print(f"{options.command} would be asked for {_count(len(jobs))}")


def _count(jobs: int) -> str:
    return f"{jobs} job{'' if jobs == 1 else 's'}"


def ask(queue: Queue, wanted: Iterable[JobId], verb: Verb) -> tuple[Asked, Refused]:
    """Write a request into the ads of jobs.

    :param wanted: jobs, and clusters whose jobs all get the request. :param verb: any but REDIRECT.
    :returns: the jobs whose ads contain the request, durably; and the refusals with their reasons.
    """
    asked: dict[JobId, OwnerRequest] = {}
    refused: Refused = []
    for one in wanted:
        try:
            for job in jobs_for(queue, one, verb.value):
                request = request_for(job, verb)
                queue.set_request(job.id, str(request))
                asked[job.id] = request
        except CommandError as problem:
            refused.append((one, problem))
    return asked, refused


def jobs_for(queue: Queue, one: JobId, verb: str) -> list[Job]:
    """Return the jobs that the request applies to.

    :raises CommandError: no job can get it; the text has the reason.
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
    """Return the reason why this job cannot get a request; "" if it can."""
    if job.delivered:
        return "its output is delivered"
    if job.status == Status.COMPLETED:
        return "its output was transferred before the job ended"
    word = STATUS_WORDS.get(job.status, "in an unknown status")
    return f"the job is {word}; its output is handed off when it ends"


def await_answers(
    queue: Queue,
    pool: Pool,
    asked: Asked,
    clock: Clock,
    sleep: Callable[[float], object],
    is_json: bool = False,
) -> int:
    """Wait until the agent has handled every request, and print the result for each job.

    :param is_json: print objects.
    :returns: exit status: OK, FAILED for a refusal, or TIMED_OUT when some requests were not handled.
    """
    status, said = Exit.OK, set[str]()
    for job, outcome, words in answers(queue, pool, asked, clock, sleep):
        verb = _verb_of(asked[job])
        if outcome in ("accepted", "refused"):
            _tell(job, verb, outcome, words, is_json)
            status = Exit.FAILED if outcome == "refused" else status
        elif outcome == "asked":
            print(f"{job}: {words}", file=sys.stderr, flush=True)
        else:
            status = Exit.TIMED_OUT
            if words not in said:
                print(f"stageout: {words}", file=sys.stderr)
            if is_json:
                _tell(job, verb, outcome, words, is_json)
        said.add(words)
    return status


def _verb_of(request: OwnerRequest) -> str:
    return request.verb.value if request.verb else ""


def answers(queue: Queue, pool: Pool, asked: Asked, clock: Clock, sleep: Callable[[float], object]) -> Iterator[Answer]:
    """Wait until the agent has handled every request, and yield each answer when it arrives.

    The wait ends after 45 s, or earlier when the agent or the managers are silent.

    :raises Unavailable: the schedd or the collector does not answer.
    """
    started_s = clock.monotonic_s()
    waiting, heard = list(asked), False
    verbs = {job_id: _verb_of(request) for job_id, request in asked.items()}
    silent: set[str] | None = None
    while True:
        now = {job.id: job for job in queue.jobs(waiting)[0]}
        waited_s = clock.monotonic_s() - started_s
        for job_id in list(waiting):
            job = now.get(job_id)
            refusal = _refusal(job, asked[job_id])
            is_taken = job is None or not job.request or bool(refusal)
            if is_taken and (refusal or waited_s >= _ANSWER_TIMEOUT_S or not _still_failed(job, verbs[job_id])):
                waiting.remove(job_id)
                yield Answer(job_id, "refused" if refusal else "accepted", refusal or _outcome(job, verbs[job_id]))
        if not waiting:
            return
        if waited_s >= _SAID_AFTER_S and silent is None:
            silent = _silent(pool, now.values())
            agent = _agent_text(queue, pool, clock.wall_s())
            yield from (Answer(one, "asked", _meanwhile(verbs[one], now[one], silent, agent)) for one in waiting)
        if waited_s >= _AGENT_TIMEOUT_S and not heard:
            heard = agent_silence_s(queue, pool, clock.wall_s()) <= NOTICE_FRESH_S
        if heard and silent is not None and all(_managers(now[one]) <= silent for one in waiting):
            yield from (Answer(one, "waiting", _meanwhile(verbs[one], now[one], silent)) for one in sorted(waiting))
            return
        if waited_s >= (_ANSWER_TIMEOUT_S if heard else _AGENT_TIMEOUT_S):
            silence_s = agent_silence_s(queue, pool, clock.wall_s())
            words = no_answer(queue.name(), silence_s, sorted(waiting))
            yield from (Answer(one, "waiting", words) for one in sorted(waiting))
            return
        sleep(_LOOK_INTERVAL_S)


def _managers(job: Job) -> set[str]:
    """Return the managers that hold the job's output; an unnamed one until the job's ad names them."""
    return set(job.manager.split(",")) - {""} or {""}


def _silent(pool: Pool, jobs: Iterable[Job]) -> set[str]:
    """Return the managers of these jobs without a report; empty if that is unknown."""
    names = {name for job in jobs for name in _managers(job)} - {""}
    try:
        return names - pool.heard(names) if names else set()
    except Unavailable:
        return set()


def _agent_text(queue: Queue, pool: Pool, now: float) -> str:
    """Describe for how long the schedd's agent has been silent; "" if unknown. :param now: wall clock, seconds."""
    try:
        silence_s = agent_silence_s(queue, pool, now)
    except Unavailable:
        return ""
    if silence_s == float("inf"):
        return "; the collector knows no schedd agent"
    return f"; the schedd agent was last heard of {duration(silence_s)} ago"


def _meanwhile(verb: str, job: Job, silent: Collection[str], agent: str = "") -> str:
    """Describe the event for which a delayed request waits. :param agent: sentence about the agent."""
    gone = sorted(_managers(job) & set(silent))
    if not gone:
        who = "the schedd agent and the node's manager"
        return f"{verb} stands in the job's ad; waiting until {who} have taken it{agent}"
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


def _refusal(job: Job | None, asked: OwnerRequest) -> str:
    """Return why this request was not applied: another one replaced it in the job's ad, or the agent's reason."""
    if job is None:
        return ""
    if job.request:
        if asked.is_same(parse_request(job.request)):
            return ""
        other = clean(job.request.partition(" ")[0])
        return f"another request, {other}, has taken its place; 'stageout status {job.id}' shows the result"
    if asked.name and job.refused.startswith(f"{asked.name} "):
        return clean(job.refused[len(asked.name) + 1 :])
    return ""


def _still_failed(job: Job | None, verb: str) -> bool:
    """Tell whether the ad still contains Failed after an accepted retry. The agent changes it after the manager's
    attempt.
    """
    return job is not None and verb in ("retry", "redirect") and job.state in GAVE_UP


def _outcome(job: Job | None, verb: str) -> str:
    """Return the next step. Progress in the job's ad may be older than the request, so it is left out."""
    if job is None:
        return "the job has left the queue"
    if verb == "pause":
        return f"nothing more of its output is sent until 'stageout resume {job.id}'"
    if verb == "redirect":
        return "files that waited or failed are sent to the new URL"
    if verb == "resume" or job.state == "RetryWait":
        return "its output is tried again"
    return f"state of its output: {_state_word(job)}" + (f": {clean(job.reason)}" if job.reason else "")


def _state_word(job: Job) -> str:
    return UNREPORTED if job.state == "None" else plain_word(job.state)


def agent_silence_s(queue: Queue, pool: Pool, now: float) -> float:
    """Return for how many seconds the collector had no ad of the schedd's agent; infinite if it has none.

    :param now: wall clock, seconds.
    """
    heard_at = pool.agent_heard_at(queue.name())
    return max(0.0, now - heard_at) if heard_at else float("inf")


def no_answer(schedd: str, silence_s: float, jobs: Sequence[JobId]) -> str:
    """Return the message for a missing answer, which depends on whether an agent exists.

    :param silence_s: see :func:`agent_silence_s`.
    """
    which = ", ".join(map(str, jobs))
    kept = f"The request stays in the job's ad ({which})"
    later = f"{kept} and is acted upon when the agent is back; tell its administrator."
    if silence_s == float("inf"):
        return f"no schedd agent answers for {schedd}: the collector knows none. {later}"
    heard = f"the schedd agent of {schedd} was last heard of {duration(silence_s)} ago"
    if silence_s > NOTICE_FRESH_S:
        return f"{heard}. {later}"
    return (
        f"the request was not carried out within {_ANSWER_TIMEOUT_S:.0f} s; {heard}. If it is not heard again within a "
        f"minute or two, it is down: tell its administrator. Otherwise: does its node report (stageout status "
        f"{jobs[0]})? {kept}; ScheddAgentLog on the access point says why it waits."
    )
