"""``stageout status``: show what is delivered, what waits, and why."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, NamedTuple

from stageout.cli import render
from stageout.cli.arguments import JOB, add_json, add_schedd
from stageout.cli.exits import CommandError, Exit, Unavailable, UnknownJob, UsageError
from stageout.cli.jobs import Job, JobId, parse_job_ids
from stageout.cli.left import left_output
from stageout.cli.request import NOTICE_FRESH_S
from stageout.cli.rows import (
    Destination,
    Row,
    about,
    as_json,
    destinations,
    explained,
    merge,
    needs_node,
    rows_of_report,
)
from stageout.cli.selection import is_at, waiting_files
from stageout.cli.whose import whose_jobs as whose_jobs
from stageout.cli.why import Why, why
from stageout.core.classads import ClassAd
from stageout.core.states import PLAIN, State
from stageout.model.job import Status
from stageout.wire.custody import JobKey

if TYPE_CHECKING:
    from stageout.cli.condor import Pool, Queue
    from stageout.wire.control import StreamsReport

_WATCH_INTERVAL_S = 2.0


class Snapshot(NamedTuple):
    """The state at one time, with warnings about its gaps.

    :param streams: streams to each server, with ``--node``; else None.
    :param agent_heard_at: time of the schedd agent's last ad (wall clock, seconds); 0: the collector has none; None:
        the command did not query it, because no output waits.
    :param is_whole: False: other users may have more on this node. :param destinations: of the output of these rows.
    :param is_of_all: the rows are those of all users. :param if_none: sentence to print if there is no row.
    """

    rows: list[Row]
    notes: list[str]
    streams: list[StreamsReport] | None = None
    agent_heard_at: int | None = None
    is_whole: bool = True
    destinations: tuple[Destination, ...] = ()
    is_of_all: bool = False
    if_none: str = "No output is in stage-out."


DESCRIPTION = """\
Show the delivery of job output. Without JOB, show one line for each of your jobs whose output was handed off; also for
those that have left the queue while a node still has their output. With JOB, show each file of that job. The figures
come from the job queue and from the managers' reports in the collector."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    command.add_argument("jobs", metavar="JOB", nargs="*", help=JOB)
    command.add_argument(
        "-a", "--all", "-allusers", dest="all_users", action="store_true", help="show the jobs of all users"
    )
    add_json(command)
    command.add_argument(
        "--watch", action="store_true", help="refresh every 2 s until all output is delivered, or until Ctrl-C"
    )
    which = command.add_argument_group("jobs to show")
    which.add_argument(
        "--state",
        metavar="WORD",
        action="append",
        type=_state,
        help="only those in this state, such as failed; repeatable",
    )
    which.add_argument("--destination", metavar="HOST", help="only those with files that wait for this server")
    which.add_argument("--owner", metavar="USER", help="only those of this user")
    command.add_argument(
        "-af",
        "-autoformat",
        "--af",
        "--autoformat",
        metavar="FIELD",
        dest="autoformat",
        nargs="+",
        help="print only these fields of --json, one line for each job",
    )
    command.add_argument("--node", action="store_true", help="ask this machine's sandbox manager instead of a schedd")
    command.add_argument(
        "--empty", action="store_true", help="with --node: end with status 1 while the node is needed, else with 0"
    )
    add_schedd(command)


def run(options: argparse.Namespace) -> int:
    """Show the status once, or repeatedly with --watch."""
    if options.empty and (not options.node or options.watch or options.jobs or _is_filtered(options)):
        raise UsageError("--empty goes with --node, without --watch, JOB and a choice of jobs")
    _check_formats(options)
    look = _filtered(_node_look(options) if options.node else _queue_look(options), options)
    show = _shower(options)
    if options.watch:
        return _watch(look, show, live=sys.stdout.isatty() and not options.json)
    snapshot = look()
    for line in show(snapshot):
        print(line)
    if options.empty and not snapshot.is_whole:
        raise CommandError("only root and the manager's user see all output on this node: run --empty as one of them")
    return Exit.FAILED if options.empty and snapshot.rows else Exit.OK


def _state(text: str) -> str:
    """Parse a state. :raises argparse.ArgumentTypeError: it does not exist; the text lists all states."""
    words = {*PLAIN.values(), *(state.value.lower() for state in State), *render.OTHER_STATES}
    if text.lower() not in words:
        known = ", ".join(sorted({*PLAIN.values(), *render.OTHER_STATES}))
        raise argparse.ArgumentTypeError(f"{text!r} is no state; they are {known}")
    return text.lower()


def _check_formats(options: argparse.Namespace) -> None:
    """Check the options for formats. :raises UsageError: a field does not exist, or the options ask for two formats."""
    if not options.autoformat:
        return
    if options.json:
        raise UsageError("-af and --json are two formats: give one of them")
    known = [field.name for field in fields(Row)]
    for name in options.autoformat:
        if name not in known:
            raise UsageError(f"{name} is no field of a job; they are {', '.join(known)}")


def _is_filtered(options: argparse.Namespace) -> bool:
    return bool(options.state or options.destination or options.owner)


def _filtered(look: Callable[[], Snapshot], options: argparse.Namespace) -> Callable[[], Snapshot]:
    """Query the status, and keep the rows that the options select."""
    if not _is_filtered(options):
        return look

    def chosen() -> Snapshot:
        seen = look()
        rows = [row for row in seen.rows if _is_chosen(row, options)]
        return seen._replace(rows=rows, is_whole=False, is_of_all=False, if_none="No such output is in stage-out.")

    return chosen


def _is_chosen(row: Row, options: argparse.Namespace) -> bool:
    words = {render.state_word(row), render.state_word(row, ledger=True).lower()}
    return (
        (not options.state or bool(words & set(options.state)))
        and (not options.owner or row.owner == options.owner)
        and (not options.destination or any(is_at(file.url, options.destination) for file in waiting_files(row)))
    )


def _queue_look(options: argparse.Namespace) -> Callable[[], Snapshot]:
    from stageout.cli.condor import Pool, Queue

    wanted = parse_job_ids(options.jobs)
    queue, pool = Queue(options.name, options.pool), Pool(options.pool)
    owner = options.owner or (None if options.all_users else whose_jobs())
    causes: dict[tuple[JobId, int], Why] = {}  # causes of runs that have ended; they no longer change
    return lambda: look(queue, pool, wanted, owner, causes)


def look(
    queue: Queue, pool: Pool, wanted: list[JobId], owner: str | None, causes: dict[tuple[JobId, int], Why]
) -> Snapshot:
    """Read queue, history and reports once.

    :param wanted: jobs and clusters; empty: all jobs in stage-out. :param owner: owner of the jobs; None: all owners.
    :param causes: cache of reasons for synchronous transfers, by job and run.
    :raises Unavailable: the schedd does not answer.
    :raises UnknownJob: neither queue nor history has a job of ``wanted``.
    """
    jobs = _wanted_jobs(queue, wanted) if wanted else queue.jobs_in_stage_out(owner)
    seen = _explained(reported(jobs, queue, pool), queue, jobs, causes)
    seen = seen._replace(rows=explained(seen.rows, _refusals(jobs, pool)))
    if not wanted:
        seen = _with_left(seen, queue, pool, jobs, owner)
    return seen._replace(is_of_all=owner is None and not wanted)


def _with_left(seen: Snapshot, queue: Queue, pool: Pool, jobs: list[Job], owner: str | None) -> Snapshot:
    """Add output whose jobs have left the queue, of this user or of all."""
    now = time.time()
    try:
        rows, reports = left_output(queue, pool, {job.key for job in jobs}, owner, now)
    except Unavailable as problem:
        note = f"output of jobs that have left the queue is not shown: {problem}"
        return seen._replace(notes=[*seen.notes, note])
    known = {(place.manager, place.server) for place in seen.destinations}
    places = (place for place in destinations(about(rows, reports), now) if (place.manager, place.server) not in known)
    return seen._replace(rows=[*seen.rows, *rows], destinations=(*seen.destinations, *places))


def _explained(seen: Snapshot, queue: Queue, jobs: list[Job], causes: dict[tuple[JobId, int], Why]) -> Snapshot:
    """Add the reasons why transfers are synchronous. Read the records once for each cluster."""
    unread = [job for job in jobs if job.synchronous and not job.left_out and (job.id, job.run) not in causes]
    clusters = {job.id.cluster for job in unread}
    try:
        records = [ad for cluster in sorted(clusters) for ad in queue.output_records(JobId(cluster))]
    except Unavailable as problem:
        return seen._replace(notes=[*seen.notes, f"why transfers were synchronous is not known: {problem}"])
    of_job: dict[str, list[ClassAd]] = {}
    for ad in records:
        of_job.setdefault(f"{ad.integer('ClusterId')}.{ad.integer('ProcId')}", []).append(ad)
    causes.update({(job.id, job.run): why(job, of_job.get(str(job.id), ())) for job in unread})
    found = {str(job.id): causes.get((job.id, job.run)) or why(job, ()) for job in jobs}
    return seen._replace(rows=explained(seen.rows, found))


def _refusals(jobs: list[Job], pool: Pool) -> dict[str, Why]:
    """Return why nodes refused to take over output that its plugin is sending. Records contain this only later."""
    sent = [job for job in jobs if job.status == Status.TRANSFERRING and job.guard and job.slot]
    if not sent:
        return {}
    try:
        reports = pool.reports(pool.managers_of({job.slot for job in sent}))
    except Unavailable:
        return {}
    refused = [one for report in reports for one in report.refusals]
    causes = {(JobKey(one.job, one.owner), one.number): Why(one.code, one.reason) for one in refused}
    return {str(job.id): causes[job.key, job.run] for job in sent if (job.key, job.run) in causes}


def reported(jobs: list[Job], queue: Queue, pool: Pool) -> Snapshot:
    """Return the jobs with the managers' reports, and notes about daemons and servers that do not answer."""
    under_way = [job for job in jobs if job.in_stage_out]
    if not under_way:
        return Snapshot(merge(jobs, []), [])
    # Several managers may hold a job's output. Until the agent writes their names, query all managers.
    managers = {name for job in under_way for name in job.manager.split(",")}
    try:
        seen = _with_reports(jobs, pool, None if "" in managers else managers)
        return _with_agent(seen, queue.name(), pool.agent_heard_at(queue.name()), time.time())
    except Unavailable as problem:
        return Snapshot(merge(jobs, []), [f"figures are from the job queue only: {problem}"])


def _with_agent(seen: Snapshot, schedd: str, heard_at: int, now: float) -> Snapshot:
    """Add a note when the schedd's agent is silent: without it nothing is confirmed. :param now: wall clock,
    seconds.
    """
    silence_s = now - heard_at if heard_at else float("inf")
    away = [render.agent_note(schedd, silence_s)] if silence_s > NOTICE_FRESH_S else []
    return seen._replace(notes=[*away, *seen.notes], agent_heard_at=heard_at)


def _with_reports(jobs: list[Job], pool: Pool, managers: set[str] | None) -> Snapshot:
    """Query the collector for the reports of these jobs. :raises Unavailable: the collector does not answer."""
    reports = pool.reports(managers)
    now = time.time()
    rows = merge(jobs, reports, now)
    awaited = render.awaited_managers(rows)
    silent = sorted(awaited - pool.heard(awaited)) if awaited else []
    concerned = about(rows, reports)
    notes = [*render.server_notes(concerned, now), *map(render.silence_note, silent)]
    return Snapshot(rows, notes, destinations=tuple(destinations(concerned, now)))


def _wanted_jobs(queue: Queue, wanted: list[JobId]) -> list[Job]:
    """Find the jobs by their ids. Read those that have left the queue from the history."""
    found, _ = queue.jobs(wanted)
    missing = [one for one in wanted if not any(one.covers(job.id) for job in found)]
    found += queue.history(missing) if missing else []
    for one in missing:
        if not any(one.covers(job.id) for job in found):
            raise UnknownJob(f"{one}: no such job in the queue or the history of {queue.name()}")
    return found


def _node_look(options: argparse.Namespace) -> Callable[[], Snapshot]:
    from stageout.cli.node import local_report, local_streams

    if options.name or options.pool:
        raise UsageError("--node looks at this machine: leave out --name and --pool")
    wanted = parse_job_ids(options.jobs)

    def look_here() -> Snapshot:
        now = time.time()
        (report, is_whole), streams = local_report(now), local_streams()
        rows = rows_of_report(report, now)
        kept = [row for row in rows if _is_wanted(row, wanted)]
        if wanted and not kept:
            raise UnknownJob(f"{', '.join(map(str, wanted))}: no output of it is on this node")
        concerned = about(kept, [report])
        notes, places = render.server_notes(concerned, now), tuple(destinations(concerned, now))
        return Snapshot(kept, notes, streams, is_whole=is_whole or bool(wanted), destinations=places)

    return look_here


def _is_wanted(row: Row, wanted: list[JobId]) -> bool:
    """Tell whether to show a row of a node. :param wanted: if empty, show the rows that need the node."""
    return any(one.covers(parse_job_ids([row.job])[0]) for one in wanted) if wanted else needs_node(row)


def _shower(options: argparse.Namespace) -> Callable[[Snapshot], list[str]]:
    if options.autoformat:
        return lambda seen: [
            " ".join(_formatted(getattr(row, name)) for name in options.autoformat) for row in seen.rows
        ]
    if options.json:
        return lambda seen: [
            json.dumps(
                as_json(seen.rows, time.time(), seen.notes, seen.streams, seen.agent_heard_at, seen.destinations),
                indent=2,
            )
        ]
    in_detail = bool(options.jobs)
    live = options.watch and sys.stdout.isatty()
    colour = render.wants_colours(sys.stdout)
    return lambda seen: lines(seen, time.time(), terminal_width(), in_detail, live, colour)


def _formatted(value: object) -> str:
    """Return a field's value as ``condor_q -af`` prints values; lists as JSON."""
    if value is None:
        return "undefined"
    if isinstance(value, tuple):
        return json.dumps([asdict(one) for one in value])
    return str(value).lower() if isinstance(value, bool) else render.clean(str(value))


def terminal_width() -> int:
    """Return the columns of the terminal; 0 for no limit when the output is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def lines(
    seen: Snapshot, now: float, width: int, in_detail: bool, live: bool = False, colour: bool = False
) -> list[str]:
    """Write the text for a person.

    :param now: wall clock, seconds. :param width: columns, 0: never cut.
    :param in_detail: file by file. :param live: bars, for a terminal that is redrawn.
    :param colour: paint states.
    """
    body = _body(seen, now, width, in_detail, live, colour)
    if seen.streams:
        servers = ["", *render.streams_table(seen.streams, seen.destinations, width)]
    elif seen.is_of_all and seen.destinations and not live:
        servers = ["", *render.servers_table(seen.destinations, width)]
    else:
        servers = []
    return [*(f"Note: {note}" for note in seen.notes), *body, *servers]


def _body(seen: Snapshot, now: float, width: int, in_detail: bool, live: bool, colour: bool) -> list[str]:
    of_node = seen.streams is not None
    if not seen.rows:
        return [_nothing(seen.is_whole) if of_node else seen.if_none]
    if live:
        return render.progress_lines(seen.rows, now, width)
    if not in_detail or len(seen.rows) > 20:
        return render.jobs_table(seen.rows, now, width, of_node, colour)
    blocks = [[*render.job_details(row, now, width, of_node, colour), ""] for row in seen.rows]
    return [line for block in blocks for line in block][:-1]


def _nothing(is_whole: bool) -> str:
    return "Nothing waits here: this node can be removed." if is_whole else "None of your output waits here."


def _watch(look: Callable[[], Snapshot], show: Callable[[Snapshot], list[str]], live: bool) -> int:
    """Redraw in place on a terminal; otherwise print only the lines that have changed."""
    drawn: list[str] = []
    while True:
        try:
            seen = look()
            shown = show(seen)
        except Unavailable as problem:  # a restart of a daemon does not end the watch
            seen, shown = Snapshot([], []), [f"stageout: {problem}"]
        if live:
            size = shutil.get_terminal_size()
            shown = render.fit(shown, size.columns, size.lines)
            sys.stdout.write((f"\x1b[{len(drawn)}F\x1b[J" if drawn else "") + "\n".join(shown) + "\n")
        elif shown != drawn:
            print("\n".join(shown))
        sys.stdout.flush()
        drawn = shown
        if seen.rows and all(row.files_total and not row.files_left for row in seen.rows):
            return Exit.OK
        time.sleep(_WATCH_INTERVAL_S)
