"""``stageout history``: show the results of hand-offs, from HTCondor's own records."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from stageout.cli import render
from stageout.cli.arguments import JOB, add_json, add_schedd, time_ago, whole
from stageout.cli.exits import Exit, UnknownJob
from stageout.cli.jobs import STATUS_WORDS, Job, JobId, parse_job_ids
from stageout.cli.rows import SCHEMA
from stageout.cli.status import terminal_width, whose_jobs
from stageout.cli.verdict import UNREPORTED
from stageout.cli.why import results, said, why
from stageout.condor.configuration import condor_settings
from stageout.core.classads import ClassAd
from stageout.core.failures import FILE_NAME, Failure, read_failures
from stageout.core.states import plain_word
from stageout.core.units import count, duration, size
from stageout.model.job import Status

if TYPE_CHECKING:
    from stageout.cli.condor import Queue

#: Maximum number of jobs that the sentence about an empty history names.
_NAMED = 5

DESCRIPTION = """\
Show jobs that have left the queue and whose output was handed off, newest first. With JOB, show every run of that job
with the files of its hand-off. The data come from HTCondor's history (condor_history) and from the OUTPUT records of
the epoch history (condor_history -transfer-history:O). Records that HTCondor has rotated away are not shown.

With -files, show the files whose delivery has ended, newest first, from $(SPOOL)/stageout_history of this access point.
-constraint, -since, -autoformat and -totals imply -files."""

_MOST_JOBS = 100


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    command.add_argument("jobs", metavar="JOB", nargs="*", help=JOB)
    command.add_argument(
        "-a",
        "--all",
        "-allusers",
        "--allusers",
        dest="all_users",
        action="store_true",
        help="show the jobs of all users",
    )
    command.add_argument(
        "-limit",
        "--limit",
        metavar="N",
        type=whole("number of records", 1),
        help="largest number of jobs or files to show (default: 100 jobs, all files)",
    )
    add_json(command, "-json")
    add_schedd(command)
    _add_files(command.add_argument_group("files"))


def _add_files(group: argparse._ArgumentGroup) -> None:
    group.add_argument("-files", "--files", action="store_true", help="show files instead of jobs")
    group.add_argument(
        "-constraint", "--constraint", metavar="EXPR", help="only records for which this ClassAd expression is true"
    )
    group.add_argument(
        "-since",
        "--since",
        metavar="TIME",
        type=time_ago,
        help="only deliveries that ended since then: an age (90m, 12h, 7d), a date (2026-11-22, 2026-11-22T08:00), "
        "or seconds since 1970",
    )
    group.add_argument(
        "-af",
        "-autoformat",
        "--af",
        "--autoformat",
        metavar="ATTR",
        dest="autoformat",
        nargs="+",
        help="print only these attributes or expressions, as condor_history does",
    )
    group.add_argument(
        "-totals",
        "--totals",
        choices=("owner", "destination", "plugin", "day"),
        help="print sums: files, bytes, files that were not delivered, median and 95th percentile of the time from "
        "hand-off to delivery",
    )


def run(options: argparse.Namespace) -> int:
    """Print the list of past jobs, the runs of the named jobs, or files."""
    of_files = (options.constraint, options.autoformat, options.totals, options.since)
    if options.files or any(value is not None for value in of_files):
        from stageout.cli import file_history

        file_history.run(options)
        return Exit.OK
    wanted = parse_job_ids(options.jobs)
    owner = None if wanted or options.all_users else whose_jobs()
    entries = read(options.name, options.pool, wanted, owner, options.limit or _MOST_JOBS)
    if wanted:
        shown = [line for item in entries for line in [*details(item), ""]][:-1]
    elif not entries and not options.json:
        shown = [_nothing(options.name, options.pool, owner)]
    else:
        shown = overview(entries, terminal_width())
    print(json.dumps({"schema": SCHEMA, "jobs": entries}, indent=2) if options.json else "\n".join(shown))
    return Exit.OK


def read(
    schedd: str | None, pool: str | None, wanted: Sequence[JobId], owner: str | None, limit: int
) -> list[dict[str, Any]]:
    """Return past jobs as ``--json`` prints them.

    :param schedd, pool: as for :class:`~stageout.cli.condor.Queue`.
    :param wanted: jobs and clusters, whose runs are read too; empty: the newest jobs whose output was handed off.
    :param owner: owner of the jobs; None for all owners. :param limit: maximum number of jobs.
    :raises Unavailable: the schedd does not answer.
    :raises UnknownJob: neither queue nor history has a job of ``wanted``.
    """
    from stageout.cli.condor import Queue

    queue = Queue(schedd, pool)
    late = {} if schedd or pool else _late_failures()
    if wanted:
        return [entry(job, _records(queue, job), late.get((job.global_id, job.owner))) for job in _jobs(queue, wanted)]
    return [entry(job, [], late.get((job.global_id, job.owner))) for job in queue.recent_history(owner, limit)]


def _nothing(schedd: str | None, pool: str | None, owner: str | None) -> str:
    """Return the sentence for an empty history, which names jobs that are still in the queue."""
    from stageout.cli.condor import Queue

    jobs = Queue(schedd, pool).jobs_in_stage_out(owner)
    delivered = [str(job.id) for job in jobs if job.delivered]
    texts = ["No job whose output was handed off has left the queue, as far back as HTCondor's history goes."]
    if delivered:
        named = ", ".join(delivered[:_NAMED]) + (", ..." if len(delivered) > _NAMED else "")
        texts.append(f"Delivered, and about to leave the queue: {named}.")
    if len(jobs) > len(delivered):
        texts.append("'stageout status' shows the output that is not delivered yet.")
    return " ".join(texts)


def _late_failures() -> dict[tuple[str, str], Failure]:
    """Return the agent's records of jobs that had left the queue before their output failed, by job and owner."""
    path = Path(condor_settings().condor("SPOOL")) / FILE_NAME
    try:
        return {(failure.job, failure.owner): failure for failure in read_failures(path)}
    except (OSError, ValueError):
        return {}


def _jobs(queue: Queue, wanted: Sequence[JobId]) -> list[Job]:
    found = [*queue.history(wanted), *queue.jobs(wanted)[0]]
    for one in wanted:
        if not any(one.covers(job.id) for job in found):
            raise UnknownJob(f"{one}: no such job in the queue or the history of {queue.name()}")
    return sorted(found, key=lambda job: job.id)


def _records(queue: Queue, job: Job) -> list[ClassAd]:
    """Select the job's own OUTPUT records by the global id, because cluster ids start again when a queue is
    recreated.
    """
    return [ad for ad in queue.output_records(job.id) if ad.text("GlobalJobId", job.global_id) == job.global_id]


def entry(job: Job, records: Iterable[ClassAd], late: Failure | None = None) -> dict[str, Any]:
    """Make the entry of one job for ``--json`` (``docs/reference/json.md`` describes each field).

    :param late: the agent's record that its output failed after the job had left the queue.
    """
    if late and late.run == job.run and not job.delivered:
        reason = f"after the job had left the queue: {late.reason}"
        job = replace(job, state=late.state, state_run=late.run, reason=reason, remove_reason="")
    records = list(records)
    code, synchronous = why(job, records)
    return {
        "job": str(job.id),
        "global_id": job.global_id,
        "owner": job.owner,
        "job_status": STATUS_WORDS.get(job.status, "Unknown"),
        "run": job.run,
        "state": job.state,
        "delivered": job.delivered or (not job.handed_off and job.status == Status.COMPLETED),
        "handed_off_files": job.files_handed_off,
        "handed_off_bytes": job.bytes_handed_off,
        "reason": (job.remove_reason if _removed(job) else "") or job.reason or job.remove_reason or synchronous,
        "synchronous_code": code,
        "completed_at": job.completed_at,
        "reruns": job.reruns,
        "stats": dict(job.stats),
        "runs": [_run(ad) for ad in records],
    }


def _removed(job: Job) -> bool:
    return job.status == Status.REMOVED and not job.delivered


def _run(ad: ClassAd) -> dict[str, Any]:
    files = results(ad)
    tickets = {_ticket(item) for item in files} - {""}
    return {
        "run": ad.integer("NumShadowStarts"),
        "host": ad.text("RemoteHost"),
        "tickets": sorted(tickets),
        "files": [_file(item) for item in files],
    }


def _ticket(item: ClassAd) -> str:
    extra = item.get("DeveloperData")
    receipt = extra.get("StageOutReceipt") if isinstance(extra, ClassAd) else None
    return receipt.text("Ticket") if isinstance(receipt, ClassAd) else ""


def _file(item: ClassAd) -> dict[str, Any]:
    cause = said(item)
    return {
        "name": item.text("TransferFileName"),
        "url": item.text("TransferUrl").split("?", 1)[0],
        "size_bytes": item.integer("TransferFileBytes", item.integer("TransferTotalBytes")),
        "handed_off": item.text("TransferProtocol").lower() == "stageout",
        "success": item.get("TransferSuccess") is True,
        "error": item.text("TransferError"),
        "synchronous_code": cause.code,
        "synchronous_reason": cause.reason,
    }


def _when(at: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) if at else "-"


def _end(item: Mapping[str, Any]) -> str:
    if item["job_status"] == "Removed" and not item["delivered"]:
        return "removed"
    if item["state"] != "None":
        return plain_word(item["state"])
    return UNREPORTED if item["handed_off_files"] else "synchronous"


def overview(entries: Sequence[Mapping[str, Any]], width: int) -> list[str]:
    """Write one line per job, as condor_history does."""
    header = ("JOB", "OWNER", "END", "FILES", "SIZE", "COMPLETED", "RERUNS", "REASON")
    rows = [
        (
            item["job"],
            item["owner"],
            _end(item),
            str(item["handed_off_files"]),
            size(item["handed_off_bytes"]),
            _when(item["completed_at"]),
            str(item["reruns"]),
            item["reason"],
        )
        for item in entries
    ]
    return render.table(header, rows, width)


def details(item: Mapping[str, Any]) -> list[str]:
    """Write one job with its runs and their files."""
    lines = [f"Job {item['job']} of {item['owner']}: {_end(item)}, completed {_when(item['completed_at'])}"]
    if item["synchronous_code"]:
        lines.append(f"  code      {render.clean(item['synchronous_code'])}")
    if item["reason"]:
        lines.append(f"  reason    {render.clean(item['reason'])}")
    lines += [f"  {name:<10}{value}" for name, value in _stats(item["stats"])]
    for run_ in item["runs"]:
        tickets = f", ticket {', '.join(run_['tickets'])}" if run_["tickets"] else ""
        lines += ["", f"Run {run_['run']} on {run_['host'] or 'an unknown host'}{tickets}"]
        lines += _files(run_["files"])
    if not item["runs"]:
        lines += ["", "The epoch history has no record of its output (rotated away, or nothing went to a URL)."]
    return lines


def _stats(stats: Mapping[str, Any]) -> list[tuple[str, str]]:
    shown = (
        ("output", "Files", lambda value: f"{count(value, 'file')}, {size(stats.get('Bytes', 0))}"),
        ("took", "Seconds", lambda value: f"{duration(value)} after the job's end"),
        ("attempts", "Attempts", str),
        ("verified", "VerifiedBy", lambda value: render.clean(str(value))),
    )
    return [(word, text(stats[name])) for word, name, text in shown if name in stats]


def _files(files: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        (
            PurePath(file["name"]).name,
            size(file["size_bytes"]),
            _how(file),
            file["url"],
            file["error"] or file["synchronous_reason"],
        )
        for file in files
    ]
    return ["  " + line for line in render.table(("FILE", "SIZE", "HOW", "TO", "REASON"), rows)]


def _how(file: Mapping[str, Any]) -> str:
    if not file["success"]:
        return "failed"
    return "handed off" if file["handed_off"] else "synchronous"
