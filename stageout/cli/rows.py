"""Rows of ``stageout status``: a job's ad merged with its manager's newest report. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from stageout.cli.jobs import STATUS_WORDS, Job
from stageout.cli.why import Why
from stageout.core.eta import Eta, at_least, limits_s
from stageout.core.states import ENDS, FREED, State
from stageout.model.job import Status
from stageout.wire.control import StreamsReport
from stageout.wire.custody import FileReport, FlowReport, JobKey, Report, Run, SandboxReport
from stageout.wire.deposits import Holding, read_holdings
from stageout.wire.expected import for_runs, for_servers, server_of

#: Version of the ``--json`` format. It grows when a field changes its meaning or is removed.
SCHEMA = 1
_ENDED = frozenset(state.value for state in ENDS)
_WAITING = frozenset({State.CONFIRMED.value, State.RETRY_WAIT.value})
#: Final states in which the access point needs nothing more from the node.
_NOT_NEEDED = frozenset({State.CANCELLED.value, State.SUPERSEDED.value})
_UNRECORDED = "waits until the access point has recorded it"

_Said = tuple[SandboxReport, Report]


@dataclass(frozen=True)
class Row:
    """Delivery of one job's output; ``docs/reference/json.md`` explains every field.

    :param job: ``cluster.proc``. :param state: word of the state table; "None" before and without hand-off.
    :param next_attempt_at: wall clock, seconds; 0 when none is planned.
    :param reported_at: time of the manager's report (wall clock, seconds); None: the row has only the job's ad.
    :param synchronous: the last run's output was transferred before the job ended.
    :param synchronous_code: code of the reason why nothing was handed off; ``reason`` has the sentence.
    :param custody: files at routers of the overlay; they are not delivered, and count among the files left.
    :param excused: attempts that do not count against the limit.
    :param waits_for_server: a server that does not answer, the destination of all waiting files.
    :param paused: the owner has paused the delivery.
    :param leaves_queue: all output is delivered, and the schedd will remove the job at its next check of the queue.
    :param eta_low_s: minimum estimated time until all output has arrived, in seconds; None: unknown.
    :param eta_high_s: the maximum; None: unknown, or the output waits for an event whose time is unknown.
    :param has_left: the job has left the queue while its output is on a node. :param ended_at: end of such a job (wall
        clock, seconds); 0: unknown, or the job was removed.
    :param silent_s: seconds since the last report of a node whose next report is overdue; 0 otherwise. Everything about
        the output refers to that time.
    :param fallback: URL for files that cannot be delivered. :param fallback_note: as in the manager's report.
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
    excused: int = 0
    waits_for_server: str = ""
    leaves_queue: bool = False
    paused: bool = False
    eta_low_s: int | None = None
    eta_high_s: int | None = None
    fallback: str = ""
    fallback_note: str = ""
    silent_s: int = 0
    has_left: bool = False
    ended_at: int = 0


@dataclass(frozen=True)
class Destination:
    """Deliveries of one node to one server; ``docs/reference/json.md`` explains every field.

    :param eta_low_s: as in :class:`Row`, for all output that waits for the server.
    """

    manager: str
    server: str
    rate_bytes_per_s: int
    spread: float
    streams: int
    limit: int
    tuning: str
    files_waiting: int
    bytes_waiting: int
    files_moving: int
    bytes_moving: int
    eta_low_s: int | None
    eta_high_s: int | None


class ServerTotal(NamedTuple):
    """Output of all nodes that goes to one server.

    :param rate_bytes_per_s: sum over the nodes that send now. :param eta_low_s: as in :class:`Row`.
    """

    server: str
    nodes: int
    files_left: int
    bytes_left: int
    rate_bytes_per_s: int
    eta_low_s: int | None
    eta_high_s: int | None


def server_totals(places: Iterable[Destination]) -> list[ServerTotal]:
    """Return the sums for each server, those with most bytes first. The slowest node determines the estimate."""
    by_server: dict[str, list[Destination]] = {}
    for place in places:
        by_server.setdefault(place.server, []).append(place)
    totals = [_server_total(server, found) for server, found in by_server.items()]
    return sorted(totals, key=lambda total: (-total.bytes_left, total.server))


def _server_total(server: str, places: Sequence[Destination]) -> ServerTotal:
    last = at_least(None if one.eta_low_s is None else Eta(one.eta_low_s, one.eta_high_s) for one in places)
    return ServerTotal(
        server, len(places),
        sum(place.files_waiting + place.files_moving for place in places),
        sum(place.bytes_waiting + place.bytes_moving for place in places),
        sum(place.rate_bytes_per_s for place in places if place.files_moving),
        *limits_s(last),
    )  # fmt: skip


def destinations(reports: Iterable[Report], now: float) -> list[Destination]:
    """Return the destination servers of the output in these reports. :param now: wall clock, seconds."""
    return [
        _destination(report.manager, flow, etas.get(flow.server))
        for report in reports
        for etas in [for_servers(report, now)]
        for flow in report.flows
    ]


def _destination(manager: str, flow: FlowReport, eta: Eta | None) -> Destination:
    low_s, high_s = limits_s(eta)
    return Destination(
        manager, flow.server, flow.rate_bytes_per_s, flow.spread, flow.streams, flow.limit, flow.tuning,
        flow.files_waiting, flow.bytes_waiting, flow.files_moving, flow.bytes_moving, low_s, high_s,
    )  # fmt: skip


def explained(rows: Iterable[Row], found: Mapping[str, Why]) -> list[Row]:
    """Add the reasons of synchronous transfers to the rows. :param found: by ``cluster.proc``."""
    return [
        replace(row, synchronous_code=known.code, reason=row.reason or known.reason)
        if (known := found.get(row.job, Why())).code
        else row
        for row in rows
    ]


def merge(jobs: Iterable[Job], reports: Iterable[Report], now: float | None = None) -> list[Row]:
    """Merge jobs and reports into rows, in the order of the jobs' ids.

    The report is newer than the job's ad, which the agent edits at intervals. Only an end counts when the job's ad
    shows it. Only managers count whose key is in the access point's record of the run.

    :param now: wall clock, seconds, for estimates of the remaining time; None: no estimates.
    """
    jobs = sorted(jobs, key=lambda job: job.id)
    sandboxes = _newest_sandboxes(reports, {job.key: job.keys for job in jobs if job.keys})
    said = [_sandbox_of(job, sandboxes) for job in jobs]
    etas = {} if now is None else _etas([one for one in said if one], now)
    rows = [_expecting(_row(job, one), one, etas) for job, one in zip(jobs, said)]
    return rows if now is None else [_silent(row, one, now) for row, one in zip(rows, said)]


_Etas = Mapping[tuple[int, Run], Eta]


def _etas(said: Iterable[_Said], now: float) -> _Etas:
    """Return the estimates for these sandboxes, by report and run."""
    wanted: dict[int, tuple[Report, set[Run]]] = {}
    for sandbox, report in said:
        wanted.setdefault(id(report), (report, set()))[1].add(sandbox.run)
    return {
        (number, run): eta
        for number, (report, runs) in wanted.items()
        for run, eta in for_runs(report, now, runs).items()
    }


def _expecting(row: Row, said: _Said | None, etas: _Etas) -> Row:
    """Return a row with its estimate, unless its delivery has ended."""
    if said is None or row.state in _ENDED or row.state == State.HANDED_OVER:
        return row
    low_s, high_s = limits_s(etas.get((id(said[1]), said[0].run)))
    return replace(row, eta_low_s=low_s, eta_high_s=high_s)


def _silent(row: Row, said: _Said | None, now: float) -> Row:
    """Mark a row whose node is silent without having planned that. Return any other row unchanged."""
    if said is None or row.state in _ENDED or row.state == State.HANDED_OVER:
        return row
    age_s = int(now - said[1].sent_at)
    if age_s <= said[1].silent_after_s:
        return row
    files = tuple(replace(file, next_attempt_at=0) for file in row.files)
    return replace(
        row, silent_s=age_s, next_attempt_at=0, waits_for_server="", eta_low_s=None, eta_high_s=None, files=files
    )


def _newest_sandboxes(
    reports: Iterable[Report], keys: Mapping[JobKey, frozenset[str]]
) -> dict[JobKey, dict[int, _Said]]:
    """Return the last report on each run of each job. :param keys: the accepted keys by job; other jobs accept
    any key.
    """
    sandboxes: dict[JobKey, dict[int, _Said]] = {}
    for report in reports:
        for sandbox in report.sandboxes:
            if report.key not in keys.get(sandbox.run.key, (report.key,)):
                continue
            runs = sandboxes.setdefault(sandbox.run.key, {})
            known = runs.get(sandbox.number)
            if known is None or known[0].change < sandbox.change:
                runs[sandbox.number] = (sandbox, report)
    return sandboxes


def _sandbox_of(job: Job, sandboxes: Mapping[JobKey, Mapping[int, _Said]]) -> _Said | None:
    """Return the reports on the job's last run.

    After a restart of the access point, a job whose shadow reconnected has a higher run number there than at its
    execute point. Therefore the highest number that is not superseded counts as well.
    """
    runs = {} if job.is_misnamed else sandboxes.get(job.key, {})
    if job.run in runs or not job.handed_off:
        return runs.get(job.run)
    last = max((number for number, (sandbox, _) in runs.items() if sandbox.state != State.SUPERSEDED), default=0)
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
        leaves_queue=job.in_queue and job.delivered and not job.is_left_by_owner,
        **facts,
    )


def _from_ad(job: Job) -> dict[str, Any]:
    finished, removed = job.delivered, job.status == Status.REMOVED
    custody = () if job.state in _ENDED else job.custody
    return {
        "state": job.state,
        "reason": (job.remove_reason if removed else "")
        or job.reason
        or (job.hold_reason if job.status == Status.HELD else ""),
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


def _custody(sandbox: SandboxReport, ended: bool) -> tuple[Holding, ...]:
    return () if ended or sandbox.state in _ENDED else read_holdings(sandbox.holdings)


def _known(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


def _from_report(job: Job, sandbox: SandboxReport, report: Report) -> dict[str, Any]:
    ended = job.state in _ENDED and job.state_run in (None, job.run)
    custody = _custody(sandbox, ended)
    # The access point learns about output that a pilot has handed over from the custodians, and knows when the pilot
    # has ended.
    by_ad = ended or (job.state == State.HANDED_OVER and job.state_run in (None, job.run))
    return {
        "state": job.state if by_ad else sandbox.state,
        "reason": (job.reason if by_ad else sandbox.reason) or sandbox.reason,
        "files_total": sandbox.files_total,
        "files_left": sandbox.files_left + _files(custody),
        "bytes_total": sandbox.bytes_total,
        "bytes_left": sandbox.bytes_left + _bytes(custody),
        "attempts": sandbox.attempts,
        "attempts_limit": sandbox.attempts_limit,
        "excused": sandbox.excused,
        "paused": bool(sandbox.paused),
        "fallback": sandbox.fallback,
        "fallback_note": sandbox.fallback_note,
        "manager": report.manager,
        "reported_at": report.sent_at,
        "custody": custody,
        **_next_attempt(sandbox, report),
    }


def _next_attempt(sandbox: SandboxReport, report: Report) -> dict[str, Any]:
    """Return the time of the next attempt, including those of single files. A server that does not answer is only
    probed.
    """
    if sandbox.paused:
        return {"files": tuple(replace(file, next_attempt_at=0) for file in sandbox.files), "next_attempt_at": 0}
    probes = {one.server: one.probe_at for one in report.servers}
    files = tuple(_after_probe(file, probes) if file.state in _WAITING else file for file in sandbox.files)
    servers = {server_of(file.url) for file in files if file.state in _WAITING}
    if sandbox.state not in _WAITING or not servers or not servers <= probes.keys():
        return {"files": files, "next_attempt_at": sandbox.next_attempt_at}
    first = min(servers, key=lambda server: probes[server])
    return {
        "files": files,
        "next_attempt_at": max(sandbox.next_attempt_at, probes[first]),
        "waits_for_server": first,
    }


def _after_probe(file: FileReport, probes: Mapping[str, int]) -> FileReport:
    return replace(file, next_attempt_at=max(file.next_attempt_at, probes.get(server_of(file.url), 0)))


def about(rows: Sequence[Row], reports: Iterable[Report]) -> list[Report]:
    """Return the reports of managers that hold output of these rows, limited to the servers and flows of that output.

    If a report does not name all files of an output, every server may be one of its destinations.
    """
    wanted: dict[str, set[str] | None] = {}
    for row in rows:
        left = [file for file in row.files if file.state != State.DELIVERED]
        known = wanted.setdefault(row.manager, set())
        is_known = known is not None and len(left) >= row.files_left
        servers = {server_of(file.url) for file in left if file.state not in _ENDED}
        wanted[row.manager] = servers.union(known or ()) if is_known else None
    return [
        replace(
            report,
            servers=tuple(one for one in report.servers if some is None or one.server in some),
            flows=tuple(one for one in report.flows if some is None or one.server in some),
        )
        for report in reports
        if (some := wanted.get(report.manager, set())) is None or some
    ]


def as_json(
    rows: Iterable[Row],
    now: float,
    notes: Iterable[str] = (),
    streams: Iterable[StreamsReport] | None = None,
    agent_heard_at: int | None = None,
    places: Iterable[Destination] = (),
) -> Mapping[str, Any]:
    """Return the objects that ``stageout status --json`` prints (fields: ``docs/reference/json.md``).

    :param now: wall clock, seconds. :param notes: warnings about gaps in the answer.
    :param streams: streams to each server, if a node was queried. :param agent_heard_at: see ``Snapshot``.
    :param places: destinations of the output of these rows.
    """
    found = {
        "schema": SCHEMA,
        "at": int(now),
        "jobs": [asdict(row) for row in rows],
        "destinations": [asdict(place) for place in places],
        "notes": list(notes),
        "agent_heard_at": agent_heard_at,
    }
    return found if streams is None else {**found, "streams": [asdict(one) for one in streams]}


def rows_of_report(report: Report, now: float | None = None) -> list[Row]:
    """Return the rows of a node's own sandboxes, from its manager's report only. :param now: as in :func:`merge`."""
    said = [(sandbox, report) for sandbox in report.sandboxes]
    etas = {} if now is None else _etas(said, now)
    rows = [_expecting(_row_of_sandbox(*one), one, etas) for one in said]
    return rows if now is None else [_silent(row, one, now) for row, one in zip(rows, said)]


def needs_node(row: Row) -> bool:
    """Tell whether output would be lost, or a job would run again, if its node were removed now."""
    return row.state not in _NOT_NEEDED


def _row_of_sandbox(sandbox: SandboxReport, report: Report) -> Row:
    custody = _custody(sandbox, False)
    return Row(
        job=sandbox.run.job_id,
        global_id=sandbox.job,
        owner=sandbox.owner,
        job_status="Unknown",
        run=sandbox.number,
        state=sandbox.state,
        synchronous=False,
        reason=sandbox.reason or (_UNRECORDED if sandbox.state in FREED else ""),
        files_total=sandbox.files_total,
        files_left=sandbox.files_left + _files(custody),
        bytes_total=sandbox.bytes_total,
        bytes_left=sandbox.bytes_left + _bytes(custody),
        attempts=sandbox.attempts,
        attempts_limit=sandbox.attempts_limit,
        excused=sandbox.excused,
        paused=bool(sandbox.paused),
        fallback=sandbox.fallback,
        fallback_note=sandbox.fallback_note,
        manager=report.manager,
        reruns=0,
        reported_at=report.sent_at,
        custody=custody,
        **_next_attempt(sandbox, report),
    )
