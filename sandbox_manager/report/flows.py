"""The servers that a manager sends output to: rates, backlog and the choice of streams, for reports."""

from __future__ import annotations

from collections import defaultdict

from sandbox_manager.pipeline import Pipeline
from sandbox_manager.scheduling.deadlines import FIRST_SPREAD, is_fresh
from sandbox_manager.scheduling.scheduler import Scheduler
from sandbox_manager.scheduling.throughput import Amount
from stageout.core.clock import wall_now
from stageout.wire.custody import SERVERS_SHOWN, FlowReport

_NOTHING = Amount(0, 0)


def flow_reports(pipeline: Pipeline) -> list[FlowReport]:
    """Return the flows to servers with output that waits or moves: at most SERVERS_SHOWN, most bytes first."""
    scheduler, now = pipeline.scheduler, wall_now(pipeline.custody.clock)
    waiting = _waiting(pipeline)
    moving = {server: scheduler.throughput.underway(server) for server in scheduler.throughput.busy_servers()}

    def size_bytes(server: str) -> int:
        return waiting.get(server, _NOTHING).size_bytes + moving.get(server, _NOTHING).size_bytes

    servers = sorted({*waiting, *moving}, key=lambda server: (-size_bytes(server), server))[:SERVERS_SHOWN]
    return [
        _flow(scheduler, server, waiting=waiting.get(server, _NOTHING), moving=moving.get(server, _NOTHING), now=now)
        for server in servers
    ]


def _waiting(pipeline: Pipeline) -> dict[str, Amount]:
    """Return the output that may be sent, by server."""
    registry = pipeline.store.registry
    found: defaultdict[str, Amount] = defaultdict(lambda: _NOTHING)
    for key, queue in registry.backlog.queues.items():
        destination = registry.destinations.get(key.destination)
        if destination is None:
            continue
        files, size_bytes = found[destination.server]
        found[destination.server] = Amount(files + queue.files, size_bytes + queue.size_bytes)
    return found


def _flow(scheduler: Scheduler, server: str, waiting: Amount, moving: Amount, now: float) -> FlowReport:
    known, throughput = scheduler.rates.of(server), scheduler.throughput
    if not is_fresh(known, now):
        known = None
    usual = known.rate_bytes_s if known else 0.0
    streams = scheduler.calls.report(server)
    return FlowReport(
        server=server, rate_bytes_per_s=round(throughput.bytes_per_s(server)),
        work_bytes_per_s=round(throughput.work_bytes_per_s(server) or usual),
        spread=round(known.spread_now(now) if known else FIRST_SPREAD, 3),
        streams=streams.streams_in_use, limit=streams.files_at_once, tuning=streams.state,
        files_waiting=waiting.files, bytes_waiting=waiting.size_bytes,
        files_moving=moving.files, bytes_moving=moving.size_bytes,
    )  # fmt: skip
