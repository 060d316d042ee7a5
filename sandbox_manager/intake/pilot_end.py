"""The end of a pilot that is known beforehand: what can still be promised."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from sandbox_manager.custody.registry import Registry
from sandbox_manager.rules import Rules
from sandbox_manager.scheduling.throughput import Throughput
from stageout.core.clock import Clock
from stageout.core.states import FREED
from stageout.core.synchronous import NO_REASON, Reason
from stageout.model.sandbox import Destination
from stageout.movers.schemes import split_url


@dataclass(frozen=True)
class PilotEnd:
    """The forecast from observed rates; without a known end every hand-off is possible."""

    registry: Registry
    throughput: Throughput
    clock: Clock
    rules: Callable[[], Rules]

    @property
    def left_s(self) -> float | None:
        """Seconds until then; None where no end is known."""
        end = self.rules().pilot_end
        return end - self.clock.wall_s() if end else None

    @property
    def fits(self) -> bool:
        """Tell whether all waiting output will have arrived by then."""
        left_s = self.left_s
        return left_s is None or left_s > self.throughput.needs_s(self._waiting())

    def reason_against(self, servers: Iterable[str], size_bytes: int) -> Reason:
        """Return why so many bytes for these servers, behind all that waits, would come too late."""
        left_s = self.left_s
        if left_s is None:
            return NO_REASON
        waiting = self._waiting()
        needs_s = self.throughput.needs_s({server: waiting.get(server, 0) + size_bytes for server in servers})
        if left_s > needs_s:
            return NO_REASON
        later = f"delivery afterwards would take {needs_s:.0f} s"
        return Reason("PilotEnd", f"the pilot ends in {max(0.0, left_s):.0f} s, {later}")

    def _waiting(self) -> dict[str, int]:
        waiting: dict[str, int] = {}
        for box in self.registry.by_id.values():
            for part in box.waiting if box.state not in FREED else ():
                server = self.registry.destinations[part.destination].server
                waiting[server] = waiting.get(server, 0) + part.size_bytes
        return waiting


def servers_of(urls: Collection[str]) -> frozenset[str]:
    """Return the different servers of URLs."""
    return frozenset(Destination("", *split_url(url)).server for url in urls)
