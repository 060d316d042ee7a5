"""How many connections one route of a put uses: few at first, more or fewer as the rate says. No I/O.

The controller is that of :mod:`stageout.tuning.crowding`: it compares what one connection reached with what each of
many reaches. Connections that only wait for each other, as with BBR or on a link without loss, are given back; where
each loses packets and backs off, as with CUBIC, more are added up to the limit.
"""

from __future__ import annotations

from dataclasses import dataclass

from stageout.tuning.adaptive import Knobs, Step
from stageout.tuning.crowding import Crowding, control

#: With so many it begins.
FIRST_CONNECTIONS = 2
_SOON_S, _LATER_S = 0.5, 2.0
_ROUND_TRIPS = 2


@dataclass(frozen=True)
class Sample:
    """One measurement, and what followed. :param rate: of all connections together, bytes a second."""

    rate: float
    before: int
    step: Step


class Sockets:
    """The number of connections of one route.

    :param start: at first. :param most: never more. Where that is no more than ``start`` their number stays as it is.
    """

    def __init__(self, start: int, most: int) -> None:
        self.now = start
        self.reason = ""
        self._most = max(start, most)
        self._knobs = Knobs(initial=start, maximum=self._most, parallelism=1, delay=1, increment=1, threshold=0.0)
        self._state = Crowding(start, testing=False)
        self._quiet_s = self._began_s = 0.0
        self._passed_bytes = 0
        self._measuring = False

    def begin(self, now_s: float) -> None:
        """The route is up: from now on it is looked at."""
        self._measuring, self._quiet_s = False, now_s

    def look(self, now_s: float, passed_bytes: int, round_trip_s: float) -> Sample | None:
        """To be called a few times a second. What was decided; None while it is measured.

        :param passed_bytes: over the route since it began. :param round_trip_s: of the route, or the time that a
            connection takes.
        """
        wait_s = max(_SOON_S, _ROUND_TRIPS * round_trip_s)
        if self._most == self._knobs.initial:
            return None
        if not self._measuring:  # connections that were just made, or have just ended, say nothing
            if now_s - self._quiet_s >= wait_s:
                self._measuring, self._began_s, self._passed_bytes = True, now_s, passed_bytes
            return None
        took_s = now_s - self._began_s
        if took_s < (wait_s if self._state.starting else max(_LATER_S, wait_s)):
            return None
        rate = (passed_bytes - self._passed_bytes) / took_s
        self._began_s, self._passed_bytes = now_s, passed_bytes
        return self._decide(rate, now_s)

    def _decide(self, rate: float, now_s: float) -> Sample:
        before = self.now
        self._state, step = control(self._state, rate, self._most, self._knobs)
        self.now, self.reason = step.concurrency, step.reason
        if self.now != before:
            self.begin(now_s)
        return Sample(rate, before, step)
