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
class _Seen:
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
        self._seen: dict[str, _Seen] = {}

    def started(self, server: str, amount: Amount, now_s: float) -> None:
        """Record the start of a batch."""
        seen = self._seen.setdefault(server, _Seen())
        _count_time(seen, now_s)
        seen.running += 1
        seen.underway_files += amount.files
        seen.underway_bytes += amount.size_bytes

    def ended(self, server: str, amount: Amount, delivered: Amount, now_s: float) -> None:
        """Record the end of a batch. :param delivered: the part of it that has arrived."""
        seen = self._seen[server]
        _count_time(seen, now_s)
        seen.running -= 1
        seen.underway_files -= amount.files
        seen.underway_bytes -= amount.size_bytes
        seen.files += delivered.files
        seen.size_bytes += delivered.size_bytes
        if seen.busy_s > _MEMORY_S:
            seen.files *= _MEMORY_S / seen.busy_s
            seen.size_bytes *= _MEMORY_S / seen.busy_s
            seen.busy_s = _MEMORY_S

    def underway(self, server: str) -> Amount:
        """Return the content of the batches that go to this server now."""
        seen = self._seen.get(server)
        return Amount(seen.underway_files, seen.underway_bytes) if seen else Amount(0, 0)

    def busy_servers(self) -> list[str]:
        """Return the servers to which batches go now."""
        return [server for server, seen in self._seen.items() if seen.running]

    def bytes_per_s(self, server: str) -> float:
        """Return the rate of the server; 0 while nothing has arrived there."""
        seen = self._seen.get(server)
        return seen.size_bytes / seen.busy_s if seen and seen.busy_s > 0 else 0.0

    def work_bytes_per_s(self, server: str) -> float:
        """Return the rate of the server with the cost of each file; 0 while nothing has arrived there."""
        seen = self._seen.get(server)
        return work_bytes(seen.files, seen.size_bytes) / seen.busy_s if seen and seen.busy_s > 0 else 0.0

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


def _count_time(seen: _Seen, now_s: float) -> None:
    if seen.running:
        seen.busy_s += now_s - seen.since_s
    seen.since_s = now_s
