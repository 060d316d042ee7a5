"""How many connections one route of a put uses: few at first, more or fewer as the rate says. No I/O.

Where one connection fills the link, as with BBR or without loss, more only wait for each other; where each loses
packets and backs off, as with CUBIC, many are needed. :mod:`stageout.tuning.climbing` finds out.
"""

from __future__ import annotations

from dataclasses import dataclass

from stageout.tuning.climbing import Climber

#: With so many it begins.
FIRST_CONNECTIONS = 2
_SETTLE_S, _FIRST_S, _LATER_S = 0.5, 0.5, 1.0
_ROUND_TRIPS = 2


@dataclass(frozen=True)
class Sample:
    """One measurement, and what followed. :param rate: of all connections together, bytes a second."""

    rate: float
    before: int
    after: int
    reason: str


class Sockets:
    """The number of connections of one route.

    :param start: at first. :param most: never more. Where that is no more than ``start`` their number stays as it is.
    """

    def __init__(self, start: int, most: int) -> None:
        self._climber = Climber(start, most)
        self._fixed = most <= start
        self._quiet_s = self._began_s = 0.0
        self._acked_bytes = 0
        self._measuring = False

    @property
    def now(self) -> int:
        """How many there should be."""
        return self._climber.now

    @property
    def reason(self) -> str:
        """Why; "" where nothing was decided."""
        return self._climber.reason

    def begin(self, now_s: float) -> None:
        """The route is up, or its connections are others: what they did before is not counted."""
        self._measuring, self._quiet_s = False, now_s

    def look(self, now_s: float, acked_bytes: int, round_trip_s: float) -> Sample | None:
        """To be called a few times a second. What was decided; None while it is measured.

        :param acked_bytes: that the next hop has got since the route began. :param round_trip_s: of the route, or the
            time that a connection takes.
        """
        if self._fixed:
            return None
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
