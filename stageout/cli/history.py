"""``stageout history``: what became of hand-offs, from HTCondor's own records."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from stageout.cli import render
from stageout.cli.exits import Exit, UnknownJob
from stageout.cli.jobs import REMOVED, STATUS_WORDS, Job, JobId, parse_job_ids
from stageout.cli.rows import SCHEMA
from stageout.cli.status import terminal_width, whose_jobs
from stageout.cli.why import results, why
from stageout.core.classads import ClassAd
from stageout.core.config import condor_settings
from stageout.core.failures import FILE_NAME, Failure, read_failures

if TYPE_CHECKING:
    from stageout.cli.condor import Queue


def run(options: argparse.Namespace) -> int:
    """Print the list of past jobs, or the runs of the jobs that were named."""
    from stageout.cli.condor import Queue

    queue = Queue(options.name, options.pool)
    wanted = parse_job_ids(options.jobs)
    late = {} if options.name or options.pool else _late_failures()
    if wanted:
        entries = [entry(job, _records(queue, job), late.get(job.global_id)) for job in _jobs(queue, wanted)]
        shown = [line for item in entries for line in [*details(item), ""]][:-1]
    else:
        owner = None if options.all_users else whose_jobs()
        entries = [entry(job, [], late.get(job.global_id)) for job in queue.recent_history(owner, options.limit)]
        shown = overview(entries, terminal_width())
    print(json.dumps({"schema": SCHEMA, "jobs": entries}, indent=2) if options.json else "\n".join(shown))
    return Exit.OK


def _late_failures() -> dict[str, Failure]:
    """Return the agent's records of jobs that had left the queue before their output failed."""
    path = Path(condor_settings().condor("SPOOL")) / FILE_NAME
    try:
        return {failure.job: failure for failure in read_failures(path)}
    except (OSError, ValueError):
        return {}


def _jobs(queue: Queue, wanted: Sequence[JobId]) -> list[Job]:
    found = [*queue.history(wanted), *queue.jobs(wanted)[0]]
    for one in wanted:
        if not any(one.covers(job.id) for job in found):
            raise UnknownJob(f"{one}: no such job in the queue or the history of {queue.name()}")
    return sorted(found, key=lambda job: job.id)


def _records(queue: Queue, job: Job) -> list[ClassAd]:
    """The job's own OUTPUT records: cluster ids start again when a queue is made anew, so the global id decides."""
    return [ad for ad in queue.output_records(job.id) if ad.text("GlobalJobId", job.global_id) == job.global_id]


def entry(job: Job, records: Iterable[ClassAd], late: Failure | None = None) -> dict[str, Any]:
    """One job as ``--json`` prints it (``docs/COMMANDS.md`` says what each field means).

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
        "delivered": job.delivered or (not job.handed_off and job.status == 4),
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
    return job.status == REMOVED and not job.delivered


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
    return {
        "name": item.text("TransferFileName"),
        "url": item.text("TransferUrl").split("?", 1)[0],
        "size_bytes": item.integer("TransferFileBytes", item.integer("TransferTotalBytes")),
        "handed_off": item.text("TransferProtocol").lower() == "stageout",
        "success": item.get("TransferSuccess") is True,
        "error": item.text("TransferError"),
    }


def _when(at: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) if at else "-"


def _end(item: Mapping[str, Any]) -> str:
    if item["job_status"] == "Removed" and not item["delivered"]:
        return "Removed"
    return str(item["state"]) if item["state"] != "None" else "HandedOff" if item["handed_off_files"] else "Synchronous"


def overview(entries: Sequence[Mapping[str, Any]], width: int) -> list[str]:
    """One line per job, as condor_history prints them."""
    if not entries:
        return ["The history has no job whose output was handed off."]
    header = ("JOB", "OWNER", "END", "FILES", "SIZE", "COMPLETED", "RERUNS", "REASON")
    rows = [
        (
            item["job"],
            item["owner"],
            _end(item),
            str(item["handed_off_files"]),
            render.size(item["handed_off_bytes"]),
            _when(item["completed_at"]),
            str(item["reruns"]),
            item["reason"],
        )
        for item in entries
    ]
    return render.table(header, rows, width)


def details(item: Mapping[str, Any]) -> list[str]:
    """One job with its runs and their files."""
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
        ("output", "Files", lambda value: f"{render.count(value, 'file')}, {render.size(stats.get('Bytes', 0))}"),
        ("took", "Seconds", lambda value: f"{render.duration(value)} after the job's end"),
        ("attempts", "Attempts", str),
        ("verified", "VerifiedBy", lambda value: render.clean(str(value))),
    )
    return [(word, text(stats[name])) for word, name, text in shown if name in stats]


def _files(files: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        (
            PurePath(file["name"]).name,
            render.size(file["size_bytes"]),
            "handed off" if file["handed_off"] and file["success"] else "sent" if file["success"] else "failed",
            file["url"],
            file["error"],
        )
        for file in files
    ]
    return ["  " + line for line in render.table(("FILE", "SIZE", "HOW", "TO", "ERROR"), rows)]
