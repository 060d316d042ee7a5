"""The agent's metrics: counts of its own work, and sums over the reports of all managers in the pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import partial

from stageout.core.errors import ErrorClass
from stageout.core.metrics import DELIVERY_BOUNDS, OTHER, Histogram, Readings, bounded, host_of, relabelled
from stageout.core.reasons import HOLD_SUBCODE_BASE
from stageout.core.states import ENDS, FREED, State
from stageout.model.job import NOTHING_YET, Job
from stageout.wire.custody import Report
from stageout.wire.matters import NodeFacts, PoolFacts, is_silent, matters, put_matters
from stageout.wire.services import Letters

#: A job's ad can have any value, and each value of a label costs Prometheus memory.
_JOB_STATES = {NOTHING_YET, *map(str, State)}
_HOLD_CODES = {HOLD_SUBCODE_BASE + kind.code for kind in ErrorClass}
_UNDELIVERED = frozenset(map(str, set(State) - ENDS))
_NODE_STATES = ("reporting", "ending")
#: The words of the documents for the agent's edits.
_EFFECTS = {
    "UpdateAdState": "progress",
    "MarkDelivered": "delivered",
    "Hold": "held",
    "RestoreHoldReason": "hold_reason",
    "Rerun": "rerun",
    "Complete": "released",
    "LeaveQueue": "left_queue",
    "Remove": "removed",
    "KeepInQueue": "kept",
    "ClearRequest": "request_ended",
}


class AgentCounts:
    """Counts of the agent's work since its start, and of the jobs at the last pass.

    :ivar edits: by kind. :ivar lost_bytes: of output that was lost.
    :ivar left_output: sandboxes at managers whose jobs have left the queue, by state.
    :ivar refused_jobs: in the queue, with the GlobalJobId of another job. :ivar passes: by "done" and "failed".
    :ivar pass_s: seconds that the last pass took.
    :ivar passed_at: wall clock of the last pass that succeeded, 0 for none.
    """

    def __init__(self) -> None:
        self.jobs: Counter[str] = Counter()
        self.held: Counter[str] = Counter()
        self.edits: Counter[str] = Counter()
        self.edit_failures = self.lost_bytes = 0
        self.left_output: Counter[str] = Counter()
        self.refused_jobs = 0
        self.passes: Counter[str] = Counter(done=0, failed=0)
        self.pass_s = self.passed_at = 0.0
        self.delays = Histogram(DELIVERY_BOUNDS)
        self.count_jobs(())
        self.count_left(())

    def count_jobs(self, jobs: Iterable[Job]) -> None:
        """Count the jobs of a pass."""
        jobs = list(jobs)
        self.jobs = Counter(dict.fromkeys(_JOB_STATES, 0))
        self.jobs.update(state if (state := job.ad_state.state) in _JOB_STATES else OTHER for job in jobs)
        codes = (job.hold_subcode for job in jobs if job.held_by_us)
        self.held = Counter({str(code): 0 for code in _HOLD_CODES})
        self.held.update(str(code) if code in _HOLD_CODES else OTHER for code in codes)

    def count_refused(self, jobs: int) -> None:
        """Count the jobs of a pass that have the GlobalJobId of another job."""
        self.refused_jobs = jobs

    def fail_edit(self) -> None:
        """Count a refused edit."""
        self.edit_failures += 1

    def lose(self, size_bytes: int) -> None:
        """Count output that was lost."""
        self.lost_bytes += size_bytes

    def count_left(self, states: Iterable[str]) -> None:
        """Count the outputs whose jobs have left the queue. :param states: of each."""
        self.left_output = Counter({state.value: 0 for state in State if state not in FREED})
        self.left_output.update(state for state in states if state in self.left_output)

    def end_pass(self, is_done: bool, took_s: float, wall_s: float) -> None:
        """Count a pass."""
        self.passes["done" if is_done else "failed"] += 1
        self.pass_s = took_s
        if is_done:
            self.passed_at = wall_s

    def readings(self) -> Readings:
        """Return the values of this moment."""
        found = Readings()
        found.put_all("stageout_agent_jobs", self.jobs)
        found.put_all("stageout_agent_jobs_held", self.held)
        edits = {word: self.edits[kind] for kind, word in _EFFECTS.items()}
        found.put_all("stageout_agent_edits_total", edits)
        found.put("stageout_agent_reruns_total", edits["rerun"])
        found.put("stageout_agent_lost_bytes_total", self.lost_bytes)
        found.put("stageout_agent_edit_failures_total", self.edit_failures)
        found.put_all("stageout_agent_left_output", self.left_output)
        found.put("stageout_agent_refused_jobs", self.refused_jobs)
        found.put_all("stageout_agent_passes_total", self.passes)
        found.put("stageout_agent_last_pass_timestamp_seconds", self.passed_at)
        found.put("stageout_agent_pass_duration_seconds", self.pass_s)
        found.put("stageout_agent_delivery_delay_seconds", self.delays)
        return found


def put_pool(found: Readings, reports: Iterable[Report], wall_s: float, silent: Collection[str] = ()) -> None:
    """Add the sums over all managers' reports.

    :param reports: with times of the collector's clock. :param wall_s: wall clock, seconds.
    :param silent: names of managers with output that are silent, also of those whose report has expired.
    """
    reports = list(reports)
    ages_s = [max(0.0, wall_s - report.sent_at) for report in reports]
    nodes = Counter(dict.fromkeys(_NODE_STATES, 0))
    nodes.update("ending" if report.ends_in_s else "reporting" for report in reports)
    states = Counter({str(state): 0 for state in State})
    states.update(sandbox.state for report in reports for sandbox in report.sandboxes if sandbox.state in states)
    waiting = (
        sandbox.accepted_at for report in reports for sandbox in report.sandboxes if sandbox.state in _UNDELIVERED
    )
    oldest_at = min(filter(None, waiting), default=wall_s)
    silent = {*silent, *(report.manager for report, age_s in zip(reports, ages_s) if is_silent(report, int(age_s)))}
    tried = sum(max(0, report.handoffs) for report in reports)
    refused = sum(max(0, number) for report in reports for number in report.handoffs_refused.values())
    found.put("stageout_pool_silent_nodes", len(silent))
    found.put("stageout_pool_full_nodes", sum(report.full_since > 0 for report in reports))
    found.put_all("stageout_pool_handoffs", {"accepted": max(0, tried - refused), "refused": refused})
    found.put("stageout_pool_oldest_undelivered_age_seconds", max(0.0, wall_s - oldest_at))
    found.put("stageout_agent_reports", len(reports))
    found.put("stageout_agent_oldest_report_age_seconds", max(ages_s, default=0.0))
    found.put_all("stageout_pool_nodes", nodes)
    found.put_all("stageout_pool_sandboxes", states)
    found.put("stageout_pool_bytes_at_risk", sum(report.bytes_at_risk for report in reports))
    found.put("stageout_pool_spool_used_bytes", sum(report.spool_bytes for report in reports))
    found.put("stageout_pool_spool_limit_bytes", sum(report.spool_limit_bytes for report in reports))
    found.put("stageout_pool_data_slots", sum(report.data_slots for report in reports))
    _put_destinations(found, reports)


def put_pool_matters(found: Readings, reports: Iterable[Report], letters: Letters, now: float) -> None:
    """Add the matters of the pool. :param now: as the collector's clock shows it, in seconds."""
    nodes = (NodeFacts(report, report.sent_at, report.sandboxes, partial(_itself, report)) for report in reports)
    put_matters(found, matters(PoolFacts(int(now), nodes, letters)), int(now))


def _itself(report: Report) -> Report:
    return report


def _put_destinations(found: Readings, reports: Iterable[Report]) -> None:
    """Add the sums for each server."""
    files: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    rates: Counter[str] = Counter()
    away: Counter[str] = Counter()
    nodes: Counter[str] = Counter()
    for report in reports:
        gone = {host_of(server.server) for server in report.servers}
        away.update(gone)
        nodes.update(gone | {host_of(flow.server) for flow in report.flows})
        for flow in report.flows:
            host = host_of(flow.server)
            files.update({(host, "waiting"): flow.files_waiting, (host, "moving"): flow.files_moving})
            sizes.update({(host, "waiting"): flow.bytes_waiting, (host, "moving"): flow.bytes_moving})
            rates[host] += flow.rate_bytes_per_s if flow.files_moving else 0
    labels = bounded(_weights(sizes, away), partial(_owners, reports))
    found.put_each("stageout_pool_destination_files", _by_label(files, labels))
    found.put_each("stageout_pool_destination_bytes", _by_label(sizes, labels))
    found.put_all("stageout_pool_destination_rate_bytes_per_second", relabelled(rates, labels))
    found.put_all("stageout_pool_destination_nodes", relabelled(nodes, labels))
    found.put_all(
        "stageout_pool_destination_unreachable_nodes", relabelled({**dict.fromkeys(nodes, 0), **away}, labels)
    )


def _owners(reports: Iterable[Report]) -> dict[str, set[str]]:
    """Return the owners of output for each server."""
    owners: dict[str, set[str]] = {}
    for report in reports:
        for sandbox in report.sandboxes:
            owners.setdefault(sandbox.server, set()).add(sandbox.owner)
    return owners


def _weights(sizes: Mapping[tuple[str, str], int], away: Mapping[str, int]) -> dict[str, float]:
    """Return the bytes of each server, of all states. One that cannot be reached counts even without any."""
    weights = Counter(away)
    for (host, _), size_bytes in sizes.items():
        weights[host] += size_bytes
    return dict(weights)


def _by_label(values: Mapping[tuple[str, str], int], labels: Mapping[str, str]) -> Counter[tuple[str, str]]:
    sums: Counter[tuple[str, str]] = Counter()
    for (host, state), value in values.items():
        sums[labels[host], state] += value
    return sums
