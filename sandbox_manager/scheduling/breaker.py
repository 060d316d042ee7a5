"""One circuit breaker per server: what may be sent to it after it could not be reached. Pure but for the clock.

A breaker is *closed* while files flow. It *opens* when no file of a batch got an answer from the server, and then
nothing is sent until the time of the next probe. The probe is a single file: while it is on its way the breaker is
*half-open*, and its end closes the breaker or opens it again for longer.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from stageout.core.clock import Clock
from stageout.wire.custody import ServerReport

#: A server is probed at least so often (s), unless it asked for a longer wait itself.
PROBE_LONGEST_S = 60.0
#: A server that asks for a longer wait (s) than this is probed all the same.
ASKED_LONGEST_S = 86_400.0


class Circuit(str, enum.Enum):
    """State of a breaker; the words are those of the log and of ``stageout status``."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"

    def __str__(self) -> str:
        return self.value


#: The states of a circuit breaker. OPEN closes without a probe when a batch that was under way gets its answer.
MOVES: dict[Circuit, frozenset[Circuit]] = {
    Circuit.CLOSED: frozenset({Circuit.OPEN}),
    Circuit.OPEN: frozenset({Circuit.HALF_OPEN, Circuit.CLOSED}),
    Circuit.HALF_OPEN: frozenset({Circuit.OPEN, Circuit.CLOSED}),
}


class IllegalTurn(Exception):
    """A move that is not in the table: a fault in the program."""


class Flow(enum.Enum):
    """The permission to send to a server now."""

    ALL = "all"
    ONE = "one file"
    NONE = "nothing"


@dataclass
class Breaker:
    """One server's breaker.

    :param failures: opened so often in a row. :param reason: why it opened last, the plugin's words.
    :param since_at: wall clock of the first opening. :param probe_s: monotonic time of the next probe.
    :param wait_s: between the last opening and that probe.
    """

    circuit: Circuit = Circuit.CLOSED
    failures: int = 0
    reason: str = ""
    since_at: int = 0
    probe_s: float = 0.0
    wait_s: float = 0.0

    def turn(self, new: Circuit) -> None:
        """Move to another state. :raises IllegalTurn: the table does not allow it."""
        if new not in MOVES[self.circuit]:
            raise IllegalTurn(f"a breaker that is {self.circuit} cannot become {new}")
        self.circuit = new


@dataclass
class Breakers:
    """The breakers of all servers; one that is not in the table is closed.

    :param backoff_s: wait before the next probe, by the number of failures in a row.
    """

    clock: Clock
    backoff_s: Callable[[int], float]
    _breakers: dict[str, Breaker] = field(default_factory=dict)

    def flow(self, server: str) -> Flow:
        """Return the permission to send to this server now."""
        breaker = self._breakers.get(server)
        if breaker is None:
            return Flow.ALL
        is_due = breaker.circuit is Circuit.OPEN and self.clock.monotonic_s() >= breaker.probe_s
        return Flow.ONE if is_due else Flow.NONE

    def opens_in_s(self, server: str) -> float:
        """Seconds until a probe may be sent; 0 for a closed breaker."""
        breaker = self._breakers.get(server)
        return max(0.0, breaker.probe_s - self.clock.monotonic_s()) if breaker else 0.0

    def reason(self, server: str) -> str:
        """Return why a server cannot be reached; "" for a closed breaker."""
        breaker = self._breakers.get(server)
        return breaker.reason if breaker else ""

    def soonest_s(self) -> float:
        """Seconds until the next probe may be sent; infinite when no breaker is open."""
        waits = (self.opens_in_s(server) for server, one in self._breakers.items() if one.circuit is Circuit.OPEN)
        return min(waits, default=float("inf"))

    def started(self, server: str) -> None:
        """Record a batch to this server. With an open breaker the batch is the probe."""
        breaker = self._breakers.get(server)
        if breaker is not None:
            breaker.turn(Circuit.HALF_OPEN)

    def unreachable(self, server: str, reason: str, retry_after_s: float = 0.0) -> bool:
        """No file of a batch got an answer. True when this opened the breaker (again).

        :param retry_after_s: what the server asked for.
        """
        breaker = self._breakers.setdefault(server, Breaker())
        if breaker.circuit is Circuit.OPEN and self.clock.monotonic_s() < breaker.probe_s:
            return False  # A second batch that was under way says nothing new.
        if breaker.circuit is not Circuit.OPEN:
            breaker.turn(Circuit.OPEN)
        breaker.since_at = breaker.since_at or int(self.clock.wall_s())
        breaker.reason = reason
        own_s = min(PROBE_LONGEST_S, self.backoff_s(breaker.failures))
        breaker.wait_s = max(own_s, min(retry_after_s, ASKED_LONGEST_S))
        breaker.failures += 1
        breaker.probe_s = self.clock.monotonic_s() + breaker.wait_s
        return True

    def reached(self, server: str) -> bool:
        """Record an answer of the server. Return whether its breaker was not closed before."""
        breaker = self._breakers.pop(server, None)
        if breaker is not None:
            breaker.turn(Circuit.CLOSED)
        return breaker is not None

    def stopped(self, server: str) -> None:
        """Record a batch that showed nothing about the server. A probe is due again."""
        breaker = self._breakers.get(server)
        if breaker is not None and breaker.circuit is Circuit.HALF_OPEN:
            breaker.turn(Circuit.OPEN)

    def troubles(self) -> list[ServerReport]:
        """Return the breakers that are not closed, by server."""
        now_s, now = self.clock.monotonic_s(), self.clock.wall_s()
        return [
            ServerReport(
                server=server,
                circuit=str(one.circuit),
                reason=one.reason,
                failures=one.failures,
                since_at=one.since_at,
                probe_at=0 if one.circuit is Circuit.HALF_OPEN else int(now + max(0.0, one.probe_s - now_s)),
            )
            for server, one in sorted(self._breakers.items())
        ]

    def dump(self) -> str:
        """Return the data that :meth:`restore` needs after a restart."""
        return json.dumps([{**asdict(one), "wait_s": self._breakers[one.server].wait_s} for one in self.troubles()])

    def restore(self, text: str) -> None:
        """Open the breakers that were not closed when ``text`` was dumped.

        A probe that was under way is due at once. However the wall clock was set meanwhile, nobody waits longer than
        was meant.
        """
        now_s, now = self.clock.monotonic_s(), self.clock.wall_s()
        for item in json.loads(text or "[]"):
            wait_s = item.pop("wait_s")
            one = ServerReport(**item)
            left_s = min(max(0.0, one.probe_at - now), wait_s)
            self._breakers[one.server] = Breaker(
                circuit=Circuit.OPEN,
                failures=one.failures,
                reason=one.reason,
                since_at=one.since_at,
                probe_s=now_s + left_s,
                wait_s=wait_s,
            )
