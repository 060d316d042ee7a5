"""The manager's metrics, read at a scrape from what the manager knows anyway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from sandbox_manager.intake.counters import HandoffCounters
from sandbox_manager.pipeline import Pipeline
from sandbox_manager.report.reporter import Reporter
from stageout.core.clock import Clock
from stageout.core.metrics import UNKNOWN, Readings, bounded, host_of, relabelled
from stageout.core.reasons import REFUSALS
from stageout.core.states import ENDS, State
from stageout.model.sandbox import Sandbox

_FILE_STATES = ("waiting", "moving", "failed", "delivered", "handed_over")
_NONE_REFUSED = dict.fromkeys(REFUSALS, 0)


class ManagerMetrics:
    """The values of one manager. :param handoffs: counts of them. :param free_bytes: of the spool's filesystem."""

    def __init__(
        self, pipeline: Pipeline, reporter: Reporter, handoffs: HandoffCounters, free_bytes: Callable[[], int],
        clock: Clock,
    ) -> None:  # fmt: skip
        self._clock = clock
        self._pipeline, self._reporter, self._handoffs, self._free_bytes = pipeline, reporter, handoffs, free_bytes

    def read(self) -> Readings:
        """Return the values of this moment."""
        found = Readings()
        for part in (self._output, self._servers, self._transfers, self._node, self._durations):
            part(found)
        return found

    def _output(self, found: Readings) -> None:
        registry = self._pipeline.store.registry
        files: Counter[str] = Counter(dict.fromkeys(_FILE_STATES, 0))
        sizes: Counter[str] = Counter(dict.fromkeys(_FILE_STATES, 0))
        oldest_at = now = int(self._clock.wall_s())
        for sandbox in registry.by_id.values():
            _count_files(sandbox, files, sizes)
            if sandbox.state not in ENDS:
                oldest_at = min(oldest_at, sandbox.accepted_at)
        found.put_all("stageout_manager_sandboxes", {state: registry.states[state] for state in State})
        found.put_all("stageout_manager_files", dict(files))
        found.put_all("stageout_manager_bytes", dict(sizes))
        found.put("stageout_manager_bytes_at_risk", registry.bytes_at_risk)
        found.put("stageout_manager_oldest_undelivered_age_seconds", now - oldest_at)
        found.put("stageout_manager_lost_bytes_total", self._pipeline.store.lost_bytes)

    def _servers(self, found: Readings) -> None:
        registry = self._pipeline.store.registry
        waiting: Counter[str] = Counter()
        owners: dict[str, set[str]] = {}
        hosts = {number: host_of(destination.server) for number, destination in registry.destinations.items()}
        for sandbox in registry.by_id.values():
            for part in sandbox.waiting:
                host = hosts.get(part.destination, UNKNOWN)
                waiting[host] += part.size_bytes
                owners.setdefault(host, set()).add(sandbox.owner)
        away = {host_of(one.server) for one in self._pipeline.scheduler.breakers.troubles()}
        waiting.update(dict.fromkeys(away, 0))
        labels = bounded(waiting, lambda: owners)
        down = {labels[host] for host in away}
        found.put_all("stageout_manager_destination_bytes", relabelled(waiting, labels))
        found.put_all("stageout_manager_destination_up", {label: label not in down for label in labels.values()})
        found.put("stageout_manager_breakers_open", len(away))

    def _transfers(self, found: Readings) -> None:
        totals, servers = self._pipeline.runner.totals, self._pipeline.runner.servers
        found.put("stageout_manager_handoffs_accepted_total", self._handoffs.accepted_total)
        found.put_all("stageout_manager_handoffs_refused_total", {**_NONE_REFUSED, **self._handoffs.refused_total})
        found.put_each("stageout_manager_attempts_total", totals.attempts)
        found.put_all("stageout_manager_delivered_bytes_total", dict(totals.delivered_bytes))
        found.put_all("stageout_manager_transfer_seconds_total", dict(totals.seconds))
        found.put_each("stageout_manager_destination_attempts_total", servers.attempts)
        found.put_all("stageout_manager_destination_delivered_bytes_total", servers.delivered_bytes)
        found.put("stageout_manager_movers", len(self._pipeline.custody.running))

    def _node(self, found: Readings) -> None:
        admission, figures = self._pipeline.admission, self._reporter.figures()
        found.put("stageout_manager_spool_used_bytes", admission.used_bytes)
        found.put("stageout_manager_spool_limit_bytes", admission.quota_bytes)
        found.put("stageout_manager_spool_free_bytes", self._free_bytes())
        found.put("stageout_manager_data_slots", figures["StageOutDataSlots"])
        found.put("stageout_manager_data_slots_busy", admission.positions_used)
        found.put("stageout_manager_accepting", figures["StageOutAccept"])
        found.put("stageout_manager_report_age_seconds", self._reporter.age_s)

    def _durations(self, found: Readings) -> None:
        found.put("stageout_manager_custody_seconds", self._pipeline.store.custody)
        found.put("stageout_manager_sync_duration_seconds", self._pipeline.custody.syncs.durations)
        found.put("stageout_manager_ledger_write_duration_seconds", self._pipeline.store.ledger.commits)


def _count_files(sandbox: Sandbox, files: Counter[str], sizes: Counter[str]) -> None:
    """Add the files of a sandbox. While some are sent, its failed files' bytes count as moving."""
    gone = "handed_over" if sandbox.custody else "delivered"
    waiting_bytes = sum(part.size_bytes for part in sandbox.waiting)
    files["waiting"] += sum(part.files for part in sandbox.waiting)
    files["moving"] += sandbox.moving
    files["failed"] += sandbox.failed
    files[gone] += sandbox.files_total - sandbox.files_left
    sizes["waiting"] += waiting_bytes
    sizes["moving" if sandbox.moving else "failed"] += sandbox.bytes_left - waiting_bytes
    sizes[gone] += sandbox.bytes_total - sandbox.bytes_left
