"""Metrics: one table declares each of them, and daemons fill in the values at a scrape. No I/O.

``docs/reference/metrics.md`` is generated from the table. No label holds an owner, a file or a URL. A label with the
name of a server has a bounded number of values (:func:`bounded`).
"""

from __future__ import annotations

import enum
import heapq
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Union

OTHER = "other"
"""Label of all servers beyond the largest ones."""
UNKNOWN = "unknown"
"""Label of a server whose name cannot be read."""
_DESTINATIONS = 20
_HOST = re.compile(r"[\w.:\[\]-]{1,100}", re.A)
#: Seconds after which another server may have the label of a counter that nothing was added to.
_IDLE_S = 86400.0
#: Upper bounds of durations, in seconds: of commits and syncs, of whole deliveries, and of custody up to a week.
DISK_BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 120.0)
DELIVERY_BOUNDS = (10.0, 30.0, 60.0, 180.0, 600.0, 1800.0, 3600.0, 10800.0, 43200.0, 86400.0, 259200.0)
CUSTODY_BOUNDS = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 43200.0, 86400.0, 172800.0, 345600.0, 604800.0)


class Kind(str, enum.Enum):
    """Type of a metric, in Prometheus' words."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


class Histogram:
    """Counts of durations, by upper bounds. One thread observes, and others may read.

    :param bounds: in seconds, ascending.
    """

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum_s = 0.0

    def observe(self, value_s: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(self.bounds, value_s)] += 1
        self.sum_s += value_s

    def buckets(self) -> list[tuple[str, float]]:
        """Return bound and number of all durations up to it, as Prometheus wants them."""
        total, found = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts):
            total += count
            found.append((bound, float(total)))
        return found


Value = Union[float, Histogram]


@dataclass(frozen=True)
class Metric:
    """One metric.

    :param name: with its unit; counters end in ``_total``. :param part: "manager", "agent", "pool", "policy", "web",
        "router" or "all" daemons. :param help: one sentence.
    """

    name: str
    kind: Kind
    part: str
    help: str
    labels: tuple[str, ...] = ()


def _gauge(name: str, part: str, help: str, *labels: str) -> Metric:
    return Metric(f"stageout_{part}_{name}", Kind.GAUGE, part=part, help=help, labels=labels)


def _counter(name: str, part: str, help: str, *labels: str) -> Metric:
    return Metric(f"stageout_{part}_{name}_total", Kind.COUNTER, part=part, help=help, labels=labels)


def _histogram(name: str, part: str, help: str, *labels: str) -> Metric:
    return Metric(f"stageout_{part}_{name}_seconds", Kind.HISTOGRAM, part=part, help=help, labels=labels)


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            name="stageout_build_info",
            kind=Kind.GAUGE,
            part="all",
            help="1, with the daemon and its version.",
            labels=("daemon", "version"),
        ),
        _gauge("sandboxes", "manager", "Sandboxes of which the node has a record, by state.", "state"),
        _gauge("files", "manager", "Files of these sandboxes, by state.", "state"),
        _gauge("bytes", "manager", "Bytes of these files, by state.", "state"),
        _gauge("bytes_at_risk", "manager", "Bytes of accepted output that is not delivered."),
        _gauge("destination_bytes", "manager", "Bytes that wait to be sent to a server.", "destination"),
        _gauge("destination_up", "manager", "0 while a server that output waits for cannot be reached.", "destination"),
        _gauge("breakers_open", "manager", "Servers that cannot be reached and get only probes."),
        _counter("handoffs_accepted", "manager", "Hand-offs that the manager accepted."),
        _counter(
            "handoffs_refused", "manager", "Hand-offs that the manager refused, by code of the reason.", "reason"
        ),
        _counter(
            "attempts", "manager", "Attempts to send a file, by plugin and error class; delivered: success.",
            "plugin", "result",
        ),
        _counter("delivered_bytes", "manager", "Bytes of files that arrived, by plugin.", "plugin"),
        _counter("transfer_seconds", "manager", "Seconds for which plugins ran, by plugin.", "plugin"),
        _counter(
            "destination_attempts", "manager",
            "Attempts to send a file to a server: delivered, handed_over, retried, failed (given up) or node_fault.",
            "destination", "result",
        ),
        _counter("destination_delivered_bytes", "manager", "Bytes of files that arrived, by server.", "destination"),
        _histogram("custody", "manager", "Seconds from the acceptance of output to its delivery."),
        _counter("lost_bytes", "manager", "Bytes of output that the node has lost."),
        _gauge("oldest_undelivered_age_seconds", "manager", "Age of the oldest output that is not delivered, 0: none."),
        _gauge("movers", "manager", "Plugin processes that send output now."),
        _gauge("spool_used_bytes", "manager", "Bytes of the quota that output and records take."),
        _gauge("spool_limit_bytes", "manager", "Quota of the spool."),
        _gauge("spool_free_bytes", "manager", "Bytes that are free on the filesystem of the spool."),
        _gauge("data_slots", "manager", "Places of all data slots."),
        _gauge("data_slots_busy", "manager", "Places of data slots that are taken."),
        _gauge("accepting", "manager", "1 while the node takes new jobs, 0 while its spool is too full."),
        _gauge("report_age_seconds", "manager", "Seconds since the last report of the manager was made."),
        _histogram("sync_duration", "manager", "Seconds that a sync of accepted output to the disk took."),
        _histogram("ledger_write_duration", "manager", "Seconds that a commit of the ledger took."),
        _gauge("jobs", "agent", "Jobs in the queue that the agent looks after, by StageOutState.", "state"),
        _gauge("jobs_held", "agent", "Jobs that are held because their stage-out failed, by sub-code.", "code"),
        _gauge("left_output", "agent", "Outputs at managers whose jobs have left the queue, by state.", "state"),
        _gauge("orders_outstanding", "agent", "Orders that no manager has acknowledged."),
        _gauge("reports", "agent", "Managers whose reports the agent has."),
        _gauge("oldest_report_age_seconds", "agent", "Age of the oldest of these reports."),
        _histogram("delivery_delay", "agent", "Seconds from a job's end to the delivery of all its output."),
        _counter(
            "edits", "agent",
            "Edits of jobs that the schedd took: progress, delivered, held, hold_reason, rerun, released, left_queue, "
            "removed, kept or request_ended.",
            "effect",
        ),
        _counter("reruns", "agent", "Jobs that run again because their output was lost."),
        _counter("lost_bytes", "agent", "Bytes of completed jobs' output that was lost."),
        _counter("edit_failures", "agent", "Edits of jobs that the schedd refused."),
        _gauge("refused_jobs", "agent", "Jobs that the agent refuses, because GlobalJobId is another job's."),
        _counter("passes", "agent", "Passes over the queue; failed: schedd or collector did not answer.", "result"),
        _gauge("last_pass_timestamp_seconds", "agent", "Wall clock of the last pass that succeeded."),
        _gauge("pass_duration_seconds", "agent", "Seconds that the last pass took."),
        _gauge("nodes", "pool", "Managers with a report: reporting, or pilots that end.", "state"),
        _gauge("silent_nodes", "pool", "Nodes that send no reports any more."),
        _gauge("full_nodes", "pool", "Nodes that take no new jobs, because their spool is too full."),
        _gauge("handoffs", "pool", "Hand-offs of the last hour: accepted or refused.", "result"),
        _gauge("sandboxes", "pool", "Sandboxes of all nodes, by state.", "state"),
        _gauge("oldest_undelivered_age_seconds", "pool", "Age of the oldest output that is not delivered, 0: none."),
        _gauge("bytes_at_risk", "pool", "Bytes of accepted output on all nodes that is not delivered."),
        _gauge("spool_used_bytes", "pool", "Bytes of the quotas that output and records take on all nodes."),
        _gauge("spool_limit_bytes", "pool", "Quotas of the spools of all nodes."),
        _gauge("data_slots", "pool", "Places of the data slots of all nodes."),
        _gauge("destination_files", "pool", "Files that wait or move to a server.", "destination", "state"),
        _gauge("destination_bytes", "pool", "Bytes of these files.", "destination", "state"),
        _gauge("destination_rate_bytes_per_second", "pool", "Rate of the transfers that run now.", "destination"),
        _gauge("destination_nodes", "pool", "Nodes with output for a server.", "destination"),
        _gauge("destination_unreachable_nodes", "pool", "Nodes that cannot reach a server.", "destination"),
        _gauge("matters", "pool", "Matters that need a person, by kind (docs/administrator/matters.md).", "kind"),
        _gauge("matter_outputs", "pool", "Outputs that they concern.", "kind"),
        _gauge("matter_age_seconds", "pool", "Age of the oldest of them, 0 where it is not known.", "kind"),
        _gauge(
            "streams_granted", "policy", "Streams that are granted, or still in use.", "source", "destination"
        ),
        _gauge("clients_holding", "policy", "Clients that hold streams.", "source", "destination"),
        _gauge("clients_waiting", "policy", "Clients that wait for streams.", "source", "destination"),
        _gauge("rate_bytes_per_second", "policy", "Sum of the rates last reported.", "source", "destination"),
        _gauge("streams_max", "policy", "Most streams of any pair."),
        _gauge("policy_ok", "policy", "1 while the chosen policy decides."),
        _gauge("reconfig_ok", "policy", "0 after a reconfig was refused."),
        _counter("leases_expired", "policy", "Leases that were not renewed."),
        _counter("requests", "policy", "Requests by operation and status.", "operation", "status"),
        _counter("refusals", "policy", "Requests that the service refused, by status.", "status"),
        _gauge("readers", "web", "Browsers that receive updates of the page."),
        _gauge("connections", "web", "Open connections to the page."),
        _gauge("sandboxes", "web", "Sandboxes that the page knows."),
        _gauge("reading_age_seconds", "web", "Time since the collector answered the page."),
        _gauge("custody_files", "router", "Files in the router's spool.", "spool"),
        _gauge("custody_bytes", "router", "Bytes of these files.", "spool"),
        _gauge("custody_single_files", "router", "Files of which no other custodian has a copy.", "spool"),
        _gauge("custody_damaged_files", "router", "Files that are damaged and wait for their data.", "spool"),
        _gauge("custody_oldest_age_seconds", "router", "Age of the file that is there longest.", "spool"),
        _gauge("delivery_problems", "router", "Destinations to which the router cannot deliver now.", "spool"),
    )
}  # fmt: skip


class Readings:
    """The values of all metrics at one moment."""

    def __init__(self) -> None:
        self._values: dict[str, dict[tuple[str, ...], Value]] = {}

    def put(self, name: str, value: Value, *labels: object) -> None:
        """Set a value. :param labels: values of the metric's labels, in their order. :raises KeyError: no such metric.

        :raises ValueError: the metric has another number of labels.
        """
        metric = METRICS[name]
        if len(labels) != len(metric.labels):
            raise ValueError(f"{name} has the labels {metric.labels}, not {labels}")
        self._values.setdefault(name, {})[tuple(map(_text, labels))] = value

    def put_all(self, name: str, values: Mapping[Any, float]) -> None:
        """Set the values of a metric with one label. Without any the metric is there, and has none."""
        self._values.setdefault(METRICS[name].name, {})
        for label, value in values.items():
            self.put(name, value, label)

    def put_each(self, name: str, values: Mapping[Any, float]) -> None:
        """Set the values of a metric with several labels. Without any the metric is there, and has none."""
        self._values.setdefault(METRICS[name].name, {})
        for labels, value in values.items():
            self.put(name, value, *labels)

    def items(self) -> Iterable[tuple[Metric, Mapping[tuple[str, ...], Value]]]:
        """Return each metric with its values by labels, in the order of the table."""
        return [(metric, self._values[name]) for name, metric in METRICS.items() if name in self._values]


def _text(label: object) -> str:
    """Return a label that can be encoded. A report can hold half of a surrogate pair."""
    return str(label).encode("utf-8", "replace").decode("utf-8")


def bounded(
    sizes: Mapping[str, float],
    owners_of: Callable[[], Mapping[str, Iterable[str]]] = dict,
    most: int = _DESTINATIONS,
) -> dict[str, str]:
    """Return the label of each server: its own name for the largest ones, :data:`OTHER` for the rest.

    If there are more, owners get labels in turn, so that nobody who names many servers takes the labels of others.

    :param owners_of: returns the owners of output for each server; asked only if there are too many servers.
    """
    if len(sizes) <= most:
        return {name: name for name in sizes}
    by_owner: dict[str, list[str]] = {}
    owners = owners_of()
    for name in sizes:
        for owner in owners.get(name, ("",)):
            by_owner.setdefault(owner, []).append(name)
    rounds = Counter[str]()  # of each server: the earliest turn in which one of its owners names it
    for names in by_owner.values():
        for turn, name in enumerate(heapq.nsmallest(most, names, lambda name: (-sizes[name], name))):
            rounds[name] = min(turn, rounds.get(name, turn))
    chosen = set(heapq.nsmallest(most, rounds, lambda name: (rounds[name], -sizes[name], name)))
    return {name: name if name in chosen else OTHER for name in sizes}


class FairLabels:
    """Labels of counters by server: at most ``most`` names at once, and :data:`OTHER`.

    A counter must not change its label, so a name keeps it. It goes to a server of an owner with fewer names if all
    are taken, from the owner with the most. It also goes if nothing was added to it for a day.

    :param forget: is called with a name that loses its label.
    """

    def __init__(self, forget: Callable[[str], None], most: int = _DESTINATIONS) -> None:
        self._forget, self._most = forget, most
        self._held: dict[str, tuple[str, float]] = {}  # owner, and time of the last use, the oldest first

    def label(self, name: str, owner: str, now_s: float) -> str:
        """Return the label of a server of which something is counted. :param now_s: monotonic clock."""
        held = self._held.pop(name, None)
        if held is None:
            if name == OTHER or (len(self._held) >= self._most and not self._make_room(owner, now_s)):
                return OTHER
        elif held[0] != owner and self._names()[owner] >= self._names()[held[0]]:
            owner = held[0]  # it counts as that user's who has fewer
        self._held[name] = owner, now_s
        return name

    def _names(self) -> Counter[str]:
        return Counter(owner for owner, _ in self._held.values())

    def _make_room(self, owner: str, now_s: float) -> bool:
        """Take the label of a name for a new one of an owner. Return False if all others have the same right to it."""
        oldest, (_, used_s) = next(iter(self._held.items()))
        if now_s - used_s < _IDLE_S:
            names = self._names()
            ((rich, most),) = names.most_common(1)
            if most <= names[owner] + 1:
                return False
            oldest = next(name for name, (holder, _) in self._held.items() if holder == rich)
        del self._held[oldest]
        self._forget(oldest)
        return True


def relabelled(values: Mapping[str, float], labels: Mapping[str, str]) -> dict[str, float]:
    """Return the sums of values by label. :param labels: of :func:`bounded`; a name without one counts as the rest."""
    sums: dict[str, float] = {}
    for name, value in values.items():
        label = labels.get(name, OTHER)
        sums[label] = sums.get(label, 0) + value
    return sums


def host_of(server: str) -> str:
    """Return host and port of a URL, or of a server ``METHOD://HOST``; the method where there is no host.

    :returns: :data:`UNKNOWN` where that is no name of a host: anybody can sign a report.
    """
    method, _, rest = server.partition("://")
    host = re.split("[/?#]", rest, maxsplit=1)[0].rpartition("@")[2] or method
    return host.lower() if _HOST.fullmatch(host) else UNKNOWN
