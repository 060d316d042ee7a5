"""``stageout status``: what is delivered, what waits and why."""

from __future__ import annotations

import argparse
import json
import os
import pwd
import shutil
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from stageout.cli import render
from stageout.cli.exits import CommandError, Exit, Unavailable, UnknownJob, UsageError
from stageout.cli.jobs import Job, JobId, parse_job_ids
from stageout.cli.rows import Row, about, as_json, explained, merge, rows_of_report
from stageout.cli.why import Why, why
from stageout.core.classads import ClassAd

if TYPE_CHECKING:
    from stageout.cli.condor import Pool, Queue
    from stageout.wire.control import StreamsReport

_WATCH_INTERVAL_S = 2.0


class Snapshot(NamedTuple):
    """The knowledge at one time, with warnings about its gaps.

    :param streams: to each server, with ``--node``; else None.
    """

    rows: list[Row]
    notes: list[str]
    streams: list[StreamsReport] | None = None


def run(options: argparse.Namespace) -> int:
    """Show the status once, or again and again with --watch."""
    look = _node_look(options) if options.node else _queue_look(options)
    show = _shower(options)
    if options.watch:
        return _watch(look, show, live=sys.stdout.isatty() and not options.json)
    snapshot = look()
    for line in show(snapshot):
        print(line)
    return Exit.OK


def _queue_look(options: argparse.Namespace) -> Callable[[], Snapshot]:
    from stageout.cli.condor import Pool, Queue

    wanted = parse_job_ids(options.jobs)
    queue, pool = Queue(options.name, options.pool), Pool(options.pool)
    owner = None if options.all_users else whose_jobs()
    causes: dict[tuple[JobId, int], Why] = {}  # of runs that have ended: they do not change while one watches
    return lambda: _look(queue, pool, wanted, owner, causes)


def whose_jobs() -> str | None:
    """Return the owner whose jobs are shown without --all: the user; root sees all, as with condor_q.

    :raises CommandError: this account has no name.
    """
    if os.geteuid() == 0:
        return None
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        raise CommandError("this account has no name here; ask for the jobs of all users with --all") from None


def _look(
    queue: Queue, pool: Pool, wanted: list[JobId], owner: str | None, causes: dict[tuple[JobId, int], Why]
) -> Snapshot:
    jobs = _wanted_jobs(queue, wanted) if wanted else queue.jobs_in_stage_out(owner)
    return _explained(_seen(jobs, pool), queue, jobs, causes)


def _explained(seen: Snapshot, queue: Queue, jobs: list[Job], causes: dict[tuple[JobId, int], Why]) -> Snapshot:
    """With why transfers are synchronous. Records are read once for each cluster."""
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


def _seen(jobs: list[Job], pool: Pool) -> Snapshot:
    under_way = [job for job in jobs if job.in_stage_out]
    if not under_way:
        return Snapshot(merge(jobs, []), [])
    # A job's output may be with several managers; before the agent has written which, all are asked.
    managers = {name for job in under_way for name in job.manager.split(",")}
    try:
        return _with_reports(jobs, pool, None if "" in managers else managers)
    except Unavailable as problem:
        return Snapshot(merge(jobs, []), [f"figures are from the job queue only: {problem}"])


def _with_reports(jobs: list[Job], pool: Pool, managers: set[str] | None) -> Snapshot:
    """:raises Unavailable: the collector does not answer."""
    reports = pool.reports(managers)
    rows = merge(jobs, reports)
    awaited = render.awaited_managers(rows)
    silent = sorted(awaited - pool.heard(awaited)) if awaited else []
    away = render.server_notes(about(rows, reports), time.time())
    return Snapshot(rows, [*away, *map(render.silence_note, silent)])


def _wanted_jobs(queue: Queue, wanted: list[JobId]) -> list[Job]:
    """The jobs by id; those that have left the queue come from the history."""
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

    def look() -> Snapshot:
        report, streams = local_report(time.time()), local_streams()
        rows = rows_of_report(report)
        if not wanted:
            return Snapshot(rows, render.server_notes([report], time.time()), streams)
        kept = [row for row in rows if any(one.covers(parse_job_ids([row.job])[0]) for one in wanted)]
        if not kept:
            raise UnknownJob(f"{', '.join(map(str, wanted))}: no output of it is on this node")
        return Snapshot(kept, render.server_notes(about(kept, [report]), time.time()), streams)

    return look


def _shower(options: argparse.Namespace) -> Callable[[Snapshot], list[str]]:
    if options.json:
        return lambda seen: [json.dumps(as_json(seen.rows, time.time(), seen.notes, seen.streams), indent=2)]
    in_detail = bool(options.jobs)
    live = options.watch and sys.stdout.isatty()
    return lambda seen: lines(seen, time.time(), terminal_width(), in_detail, live)


def terminal_width() -> int:
    """Columns of the terminal; 0 when the output is no terminal and nothing is to be cut."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def lines(seen: Snapshot, now: float, width: int, in_detail: bool, live: bool = False) -> list[str]:
    """The text for a person.

    :param now: wall clock, seconds. :param width: columns, 0: never cut.
    :param in_detail: file by file. :param live: bars, for a terminal that is redrawn.
    """
    if seen.streams:
        below = lines(seen._replace(streams=None), now, width, in_detail, live)
        return [*below, "", *render.streams_table(seen.streams, width)]
    notes = [f"Note: {note}" for note in seen.notes]
    if not seen.rows:
        return [*notes, "No output is in stage-out."]
    if live:
        return [*notes, *render.progress_lines(seen.rows, now, width)]
    if not in_detail or len(seen.rows) > 20:
        return [*notes, *render.jobs_table(seen.rows, now, width)]
    blocks = [[*render.job_details(row, now, width), ""] for row in seen.rows]
    return [*notes, *(line for block in blocks for line in block)][:-1]


def _watch(look: Callable[[], Snapshot], show: Callable[[Snapshot], list[str]], live: bool) -> int:
    """Redraw in place on a terminal; elsewhere print anew only what has changed."""
    drawn: list[str] = []
    while True:
        try:
            seen = look()
            shown = show(seen)
        except Unavailable as problem:  # a restart is not the end of watching
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
