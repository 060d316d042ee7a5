"""How many connections one route of a put, or a get, uses: few at first, more or fewer as the rate says. No I/O.

Where one connection fills the link, as with BBR or without loss, more only wait for each other; where each loses
packets and backs off, as with CUBIC, many are needed. :mod:`stageout.overlay.tuning.climbing` finds out by trying; and
where packets are lost on a link that is not full, :mod:`stageout.overlay.tuning.losses` says at once how many.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from stageout.overlay.tcp import Segments
from stageout.overlay.tuning.climbing import Climber
from stageout.overlay.tuning.losses import Losses

#: With so many it begins.
FIRST_CONNECTIONS = 2
#: A way on which a connection takes so long to be made is long. It has no fewer than so many: TCP begins slowly on each
#: and stops now and then to measure the round trip (BBR, every ten seconds), which others make up for in part.
LONG_S, FAR_CONNECTIONS = 0.03, 4
_SETTLE_S, _FIRST_S, _LATER_S = 0.5, 0.5, 1.0
_ROUND_TRIPS = 2
_NONE = Segments()


@dataclass(frozen=True)
class Sample:
    """One measurement, and what followed. :param rate: of all connections together, bytes a second."""

    rate: float
    before: int
    after: int
    reason: str


class Sockets:
    """The number of connections of one route.

    :param start: at first. :param most: never more. If that is no more than ``start``, their number stays as it is.
    :ivar is_fixed: that is so.
    """

    def __init__(self, start: int, most: int) -> None:
        self._climber = Climber(start, most)
        self.is_fixed = most <= start
        self._quiet_s = self._began_s = 0.0
        self._acked_bytes = 0
        self._measuring = False
        self._losses = Losses()
        self._lately: deque[tuple[float, int]] = deque()
        self._best = 0.0
        self._least = 1

    def note_way(self, round_trip_s: float) -> None:
        """Before it begins. :param round_trip_s: of the route, or the time that a connection takes."""
        if round_trip_s >= LONG_S and not self.is_fixed:
            self._least = self._climber.least = FAR_CONNECTIONS
            self._climber.need("The way is long")

    @property
    def now(self) -> int:
        """Return how many there should be."""
        return self._climber.now

    @property
    def reason(self) -> str:
        """Why; "" where nothing was decided."""
        return self._climber.reason

    def begin(self, now_s: float) -> None:
        """The route is up, or its connections are others: what they did before is not counted."""
        self._measuring, self._quiet_s = False, now_s
        self._lately.clear()

    def look(self, now_s: float, acked_bytes: int, round_trip_s: float, segments: Segments = _NONE) -> Sample | None:
        """To be called a few times a second. The decision; None while it is measured.

        :param acked_bytes: that the next hop has got since the route began. :param round_trip_s: of the route, or the
            time that a connection takes. :param segments: of the connections that are open.
        """
        if self.is_fixed:
            return None
        lost = self._lost(now_s, acked_bytes, segments, max(_SETTLE_S, _ROUND_TRIPS * round_trip_s))
        if lost is not None:
            return lost
        if not self._measuring:  # connections that were just made, or have just ended, say nothing
            if now_s - self._quiet_s >= max(_SETTLE_S, _ROUND_TRIPS * round_trip_s):
                self._measuring, self._began_s, self._acked_bytes = True, now_s, acked_bytes
            return None
        took_s = now_s - self._began_s
        if took_s < (_LATER_S if self.reason else _FIRST_S):
            return None
        rate, before = (acked_bytes - self._acked_bytes) / took_s, self.now
        after = self._climber.measured(rate / 1e6)
        self._began_s, self._acked_bytes = now_s, acked_bytes
        if after != before:
            self.begin(now_s)
        return Sample(rate, before, after, self.reason)

    def _lost(self, now_s: float, acked_bytes: int, segments: Segments, over_s: float) -> Sample | None:
        """More connections, as many as losses call for, where the rate falls short of what the link has carried."""
        trip_s = segments.trips_s / max(1, segments.connections)
        self._losses.note(now_s, segments.sent, segments.resent, segments.size_bytes, trip_s, segments.least_s)
        self._lately.append((now_s, acked_bytes))
        while len(self._lately) > 2 and self._lately[1][0] <= now_s - over_s:
            self._lately.popleft()
        first_s, first = self._lately[0]
        if now_s - first_s < over_s:
            return None
        rate, before = (acked_bytes - first) / (now_s - first_s), self.now
        self._best = max(self._best, rate)
        self._climber.least = max(self._least, self._losses.needed(self._best))
        if not self._losses.hinder(before, rate, self._best):
            return None
        after = self._climber.need(f"{before} carry {rate / 1e6:.3g}, losses leave each {self._losses.one / 1e6:.3g}")
        if after <= before:
            return None
        self._best = 0.0  # if that was not in their way, less is all that there is
        self.begin(now_s)
        return Sample(rate, before, after, self.reason)
