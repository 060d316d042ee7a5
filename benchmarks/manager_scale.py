"""How much one sandbox manager and one schedd agent can carry.

The manager is the daemon itself. Hand-offs come from processes that stand where plugins stand, below a startd and a
starter, and use the product's client code; each is another job's. Files that wait are made as hand-offs would have left
them, and the daemon is started on them. The agent works against a real schedd and a real collector. Another collector,
with the slots of a large pool, gets the messages of all its managers and of an agent.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from common import Figure, main, percentile
from scale import agent_view, collector_load
from scale.filled import Fill, fill
from scale.running import Clients, Manager, manager, memory_mb

_CLIENTS = 8


def measure(quick: bool) -> list[Figure]:
    """Run it all."""
    few, many = (Fill(1000, 100), Fill(10_000, 10)) if quick else (Fill(10_000, 100), Fill(100_000, 10))
    return [
        *_hand_offs(seconds=5 if quick else 10, rounds=2 if quick else 5),
        *_in_directory(lambda home: _waiting(home, few, goals=True)),
        *_in_directory(lambda home: _waiting(home, many, goals=False)),
        *agent_view.measure(quick),
        *collector_load.measure(quick),
    ]


def _in_directory(work: Callable[[Path], list[Figure]]) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="stageout-scale-") as name:
        return work(Path(name))


def _hand_offs(seconds: float, rounds: int) -> list[Figure]:
    def work(home: Path) -> list[Figure]:
        with manager(home) as node:
            return _rates(node, seconds, rounds)

    return _in_directory(work)


def _rates(node: Manager, seconds: float, rounds: int) -> list[Figure]:
    clients = Clients(node)
    seen = [clients.hand_off(_CLIENTS, seconds) for _ in range(rounds)]
    took_ms = [value for one in seen for value in one.took_ms]
    rate = statistics.median(len(one.took_ms) / seconds for one in seen)
    cpu_ms = statistics.median(1000 * one.manager_cpu_s / len(one.took_ms) for one in seen)
    clients_ms = statistics.median(1000 * one.clients_cpu_s / len(one.took_ms) for one in seen)
    what = f"hand-offs, {_CLIENTS} clients at once, one file each"
    return [
        Figure(what, rate, "1/s", goal=300.0, more=True),
        Figure("one hand-off as the plugin sees it: median", statistics.median(took_ms), "ms"),
        Figure("one hand-off as the plugin sees it: p95", percentile(took_ms, 95), "ms"),
        Figure("processor time of the manager for one", cpu_ms, "ms", goal=2.5),
        Figure("processor time of the plugin for one", clients_ms, "ms"),
    ]


def _waiting(home: Path, amount: Fill, goals: bool) -> list[Figure]:
    fill(home / "spool", amount)
    with manager(home) as node:
        ready_s = node.ready_s
        node.until_reported()
        memory = memory_mb(node.pid)
    what = f"{amount.files:,} files waiting in {amount.sandboxes:,} sandboxes"
    return [
        Figure(f"{what}: from start to the first hand-off", ready_s, "s", goal=5.0 if goals else None),
        Figure(f"{what}: most memory", memory, "MB", goal=500.0 if goals else None),
    ]


if __name__ == "__main__":
    sys.exit(main("manager_scale", measure))
