"""The recent rate of each server, all movers together, by which promises of delivery are judged. Pure.

(``scheduling/rates.py`` knows what one call of a plugin reaches.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from stageout.core.eta import work_bytes

_MEMORY_S = 600.0


class Amount(NamedTuple):
    """A number of files, and their bytes."""

    files: int
    size_bytes: int


@dataclass
class _ServerTotals:
    running: int = 0
    underway_files: int = 0
    underway_bytes: int = 0
    since_s: float = 0.0
    busy_s: float = 0.0
    files: float = 0.0
    size_bytes: float = 0.0


class Throughput:
    """Bytes and busy time of each server, all movers together; the past counts less and less. Monotonic clock."""

    def __init__(self) -> None:
        self._servers: dict[str, _ServerTotals] = {}

    def started(self, server: str, amount: Amount, now_s: float) -> None:
        """Record the start of a batch."""
        totals = self._servers.setdefault(server, _ServerTotals())
        _count_time(totals, now_s)
        totals.running += 1
        totals.underway_files += amount.files
        totals.underway_bytes += amount.size_bytes

    def ended(self, server: str, amount: Amount, delivered: Amount, now_s: float) -> None:
        """Record the end of a batch. :param delivered: the part of it that has arrived."""
        totals = self._servers[server]
        _count_time(totals, now_s)
        totals.running -= 1
        totals.underway_files -= amount.files
        totals.underway_bytes -= amount.size_bytes
        totals.files += delivered.files
        totals.size_bytes += delivered.size_bytes
        if totals.busy_s > _MEMORY_S:
            totals.files *= _MEMORY_S / totals.busy_s
            totals.size_bytes *= _MEMORY_S / totals.busy_s
            totals.busy_s = _MEMORY_S

    def underway(self, server: str) -> Amount:
        """Return the content of the batches that go to this server now."""
        totals = self._servers.get(server)
        return Amount(totals.underway_files, totals.underway_bytes) if totals else Amount(0, 0)

    def busy_servers(self) -> list[str]:
        """Return the servers to which batches go now."""
        return [server for server, totals in self._servers.items() if totals.running]

    def bytes_per_s(self, server: str) -> float:
        """Return the rate of the server; 0 while nothing has arrived there."""
        totals = self._servers.get(server)
        return totals.size_bytes / totals.busy_s if totals and totals.busy_s > 0 else 0.0

    def work_bytes_per_s(self, server: str) -> float:
        """Return the rate of the server with the cost of each file; 0 while nothing has arrived there."""
        totals = self._servers.get(server)
        return work_bytes(totals.files, totals.size_bytes) / totals.busy_s if totals and totals.busy_s > 0 else 0.0

    def needs_s(self, waiting: Mapping[str, int]) -> float:
        """Seconds until everything has arrived that waits (bytes by server) or is under way; servers work side by side.

        A server that nothing has arrived at yet counts as quick: it must be tried.
        """
        times = (
            (size_bytes + self.underway(server).size_bytes) / rate
            for server, size_bytes in waiting.items()
            if (rate := self.bytes_per_s(server)) > 0
        )
        return max(times, default=0.0)


def _count_time(totals: _ServerTotals, now_s: float) -> None:
    if totals.running:
        totals.busy_s += now_s - totals.since_s
    totals.since_s = now_s
