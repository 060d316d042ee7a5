"""Rows of ``stageout status``: a job's ad and its manager's newest report in one. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from stageout.cli.jobs import HELD, REMOVED, STATUS_WORDS, Job
from stageout.cli.why import Why
from stageout.core.states import ENDS, State
from stageout.wire.control import StreamsReport
from stageout.wire.custody import FileReport, Report, SandboxReport
from stageout.wire.deposits import Holding, read_holdings

#: Version of the JSON that ``--json`` prints; grows when a field changes its meaning or goes.
SCHEMA = 1
_ENDED = frozenset(state.value for state in ENDS)

_Said = tuple[SandboxReport, Report]


@dataclass(frozen=True)
class Row:
    """One job's stage-out, as shown.

    :param job: ``cluster.proc``. :param state: word of the state table; "None" before and without hand-off.
    :param next_attempt_at: wall clock, seconds; 0 when none is planned.
    :param reported_at: when the manager said so (wall clock, seconds); None: known from the job's ad only.
    :param synchronous: the last run's output was transferred before the job ended.
    :param synchronous_code: code of why nothing was handed off; ``reason`` says it in words.
    :param custody: what routers of the overlay have of it; not delivered, so it is counted among what is left.
    """

    job: str
    global_id: str
    owner: str
    job_status: str
    run: int
    state: str
    synchronous: bool
    reason: str
    files_total: int
    files_left: int
    bytes_total: int
    bytes_left: int
    attempts: int
    attempts_limit: int
    next_attempt_at: int
    manager: str
    reruns: int
    reported_at: int | None
    files: tuple[FileReport, ...]
    custody: tuple[Holding, ...] = ()
    synchronous_code: str = ""


def explained(rows: Iterable[Row], found: Mapping[str, Why]) -> list[Row]:
    """The rows with why their transfers are synchronous. :param found: by ``cluster.proc``."""
    return [
        replace(row, synchronous_code=known.code, reason=row.reason or known.reason)
        for row in rows
        for known in [found.get(row.job, Why())]
    ]


def merge(jobs: Iterable[Job], reports: Iterable[Report]) -> list[Row]:
    """The rows of the jobs, in the order of their ids.

    The report is newer than the job's ad, which the agent edits at intervals; an end, though, is true only
    when the job's ad says so. Only managers count whose key the access point's record of the run named.
    """
    jobs = list(jobs)
    boxes = _newest_boxes(reports, {job.global_id: job.keys for job in jobs if job.keys})
    return [_row(job, _box_of(job, boxes)) for job in sorted(jobs, key=lambda job: job.id)]


def _newest_boxes(reports: Iterable[Report], keys: Mapping[str, frozenset[str]]) -> dict[str, dict[int, _Said]]:
    """Return the last report on each run of each job. :param keys: by job, the keys that count; any otherwise."""
    boxes: dict[str, dict[int, _Said]] = {}
    for report in reports:
        for box in report.sandboxes:
            if report.key not in keys.get(box.job, (report.key,)):
                continue
            runs = boxes.setdefault(box.job, {})
            known = runs.get(box.number)
            if known is None or known[0].change < box.change:
                runs[box.number] = (box, report)
    return boxes


def _box_of(job: Job, boxes: Mapping[str, Mapping[int, _Said]]) -> _Said | None:
    """Return the reports on the job's last run.

    A job whose shadow reconnected after a restart of the access point has a higher run number there than at its
    execute point, so the highest number that is not superseded serves too.
    """
    runs = boxes.get(job.global_id, {})
    if job.run in runs or not job.handed_off:
        return runs.get(job.run)
    last = max((number for number, (box, _) in runs.items() if box.state != State.SUPERSEDED), default=0)
    return runs.get(last) if last <= job.run else None


def _row(job: Job, said: _Said | None) -> Row:
    facts = _from_ad(job) if said is None else _from_report(job, *said)
    return Row(
        job=str(job.id),
        global_id=job.global_id,
        owner=job.owner,
        job_status=STATUS_WORDS.get(job.status, "Unknown"),
        run=job.run,
        synchronous=job.synchronous,
        reruns=job.reruns,
        **facts,
    )


def _from_ad(job: Job) -> dict[str, Any]:
    finished, removed = job.delivered, job.status == REMOVED
    custody = () if job.state in _ENDED else job.custody
    return {
        "state": job.state,
        "reason": (job.remove_reason if removed else "")
        or job.reason
        or (job.hold_reason if job.status == HELD else ""),
        "files_total": job.files_handed_off,
        "files_left": 0 if finished else _known(job.files_left, job.files_handed_off) + _files(custody),
        "bytes_total": job.bytes_handed_off,
        "bytes_left": 0 if finished else _known(job.bytes_left, job.bytes_handed_off) + _bytes(custody),
        "attempts": job.attempts,
        "attempts_limit": 0,
        "next_attempt_at": 0 if removed else job.next_attempt_at,
        "manager": job.manager,
        "reported_at": None,
        "files": (),
        "custody": custody,
    }


def _files(custody: Iterable[Holding]) -> int:
    return sum(one.files for one in custody)


def _bytes(custody: Iterable[Holding]) -> int:
    return sum(one.size_bytes for one in custody)


def _custody(box: SandboxReport, ended: bool) -> tuple[Holding, ...]:
    return () if ended or box.state in _ENDED else read_holdings(box.holdings)


def _known(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


def _from_report(job: Job, box: SandboxReport, report: Report) -> dict[str, Any]:
    ended = job.state in _ENDED and job.state_run in (None, job.run)
    custody = _custody(box, ended)
    # Of what a pilot has handed over the access point hears from the custodians, and knows when the pilot has ended.
    by_ad = ended or (job.state == State.HANDED_OVER and job.state_run in (None, job.run))
    return {
        "state": job.state if by_ad else box.state,
        "reason": (job.reason if by_ad else box.reason) or box.reason,
        "files_total": box.files_total,
        "files_left": box.files_left + _files(custody),
        "bytes_total": box.bytes_total,
        "bytes_left": box.bytes_left + _bytes(custody),
        "attempts": box.attempts,
        "attempts_limit": box.attempts_limit,
        "next_attempt_at": box.next_attempt_at,
        "manager": report.manager,
        "reported_at": report.sent_at,
        "files": box.files,
        "custody": custody,
    }


def about(rows: Sequence[Row], reports: Iterable[Report]) -> list[Report]:
    """The reports of who has the output of these rows, each with the servers that something of it is still to go to.

    Of output of which not all files are known here every server may be one.
    """
    wanted: dict[str, set[str] | None] = {}
    for row in rows:
        left = [file for file in row.files if file.state != State.DELIVERED]
        known = wanted.setdefault(row.manager, set())
        is_known = known is not None and len(left) >= row.files_left
        servers = {_server(file.url) for file in left if file.state not in _ENDED}
        wanted[row.manager] = servers.union(known or ()) if is_known else None
    return [
        replace(report, servers=tuple(one for one in report.servers if some is None or one.server in some))
        for report in reports
        if (some := wanted.get(report.manager, set())) is None or some
    ]


def _server(url: str) -> str:
    """Method and host, as managers name a server. :param url: as people see it."""
    scheme, _, rest = url.partition("://")
    return f"{re.split('[-+.]', scheme)[-1]}://{rest.partition('/')[0]}".lower()


def as_json(
    rows: Iterable[Row], now: float, notes: Iterable[str] = (), streams: Iterable[StreamsReport] | None = None
) -> Mapping[str, Any]:
    """Return the objects that ``stageout status --json`` prints (fields: ``docs/COMMANDS.md``).

    :param now: wall clock, seconds. :param notes: what the reader must know about gaps in the answer.
    :param streams: to each server, where a node was asked.
    """
    found = {"schema": SCHEMA, "at": int(now), "jobs": [asdict(row) for row in rows], "notes": list(notes)}
    return found if streams is None else {**found, "streams": [asdict(one) for one in streams]}


def rows_of_report(report: Report) -> list[Row]:
    """The rows of a node's own sandboxes, known from its manager alone."""
    return [_row_of_box(box, report) for box in report.sandboxes]


def _row_of_box(box: SandboxReport, report: Report) -> Row:
    custody = _custody(box, False)
    return Row(
        job=box.run.job_id,
        global_id=box.job,
        owner=box.owner,
        job_status="Unknown",
        run=box.number,
        state=box.state,
        synchronous=False,
        reason=box.reason,
        files_total=box.files_total,
        files_left=box.files_left + _files(custody),
        bytes_total=box.bytes_total,
        bytes_left=box.bytes_left + _bytes(custody),
        attempts=box.attempts,
        attempts_limit=box.attempts_limit,
        next_attempt_at=box.next_attempt_at,
        manager=report.manager,
        reruns=0,
        reported_at=report.sent_at,
        files=box.files,
        custody=custody,
    )
