"""The number of connections for a link whose losses do not depend on its load.

After M. Mathis and others, "The Macroscopic Behavior of the TCP Congestion Avoidance Algorithm" (1997): where a share
p of the segments is lost, a connection that backs off for each carries segment / round trip x sqrt(3/2) / sqrt(p). A
new one carries far more until its first loss: that shows what the link carries, and not what the connection will.
"""

from __future__ import annotations

import math

_CONSTANT = math.sqrt(1.5)
#: Above so many of the shortest round trips segments wait in a queue, and those that are lost are lost to it.
_QUEUED = 1.25
_HALVED_S = 10.0
#: So many losses say something; and of so many segments none would be known to be lost any more.
_FEWEST_LOSSES, _FEWEST_SEGMENTS = 2.0, 1000.0
_SHORT_OF, _CARRIED, _SPARE = 0.85, 0.5, 1.2


class Losses:
    """Losses of the connections of one route while nothing waits in the link's queue."""

    def __init__(self) -> None:
        self._sent = self._lost = 0.0
        self._before = 0, 0
        self._at_s = 0.0
        self.one = math.inf

    def note(self, now_s: float, sent: int, lost: int, segment_bytes: int, trip_s: float, least_s: float) -> None:
        """Add the segments sent and lost since the last call.

        :param sent: segments, and :param lost: lost ones, since the route began. :param segment_bytes: of each.
        :param trip_s: round trip lately. :param least_s: the shortest ever.
        """
        more_sent, more_lost = sent - self._before[0], lost - self._before[1]
        fade = 0.5 ** ((now_s - self._at_s) / _HALVED_S)
        self._before, self._at_s = (sent, lost), now_s
        self._sent, self._lost = fade * self._sent, fade * self._lost
        if more_sent > 0 and 0 < trip_s <= _QUEUED * least_s:
            self._sent, self._lost = self._sent + more_sent, self._lost + more_lost
        known = self._lost >= _FEWEST_LOSSES and self._sent >= _FEWEST_SEGMENTS
        if known and least_s > 0 and segment_bytes > 0:
            self.one = segment_bytes / least_s * _CONSTANT / math.sqrt(self._lost / self._sent)
        else:
            self.one = math.inf

    def needed(self, best: float) -> int:
        """So many connections carry a rate in bytes a second; 0: losses are not known to be in their way."""
        return math.ceil(_SPARE * best / self.one) if self.one < math.inf else 0

    def hinder(self, connections: int, rate: float, best: float) -> bool:
        """Tell whether losses keep so many connections below the best rate so far."""
        return self.one < math.inf and _CARRIED * connections * self.one <= rate < _SHORT_OF * best
