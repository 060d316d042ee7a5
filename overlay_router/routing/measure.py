"""The rate and delay of one link, from heartbeats, real transfers and short probes. Pure: no sockets, no clock.

A transfer shows the least that a link can do, since its ends may be slower: it raises the estimate and never lowers it.
A probe is short and shares the link with what moves meanwhile: both together are what the link can do, and each probe
is worth half of the new estimate. A link on which transfers keep showing the estimate is not probed.
"""

from __future__ import annotations

from collections import deque

from stageout.overlay.wire.messages import MAX_PROBE_BYTES

_ROUND_TRIPS = 8
_FIRST_PROBE_BYTES = 256 * 1024
_PROBE_S = 0.5
_BIN_S = 1.0
_CONFIRMED_SHARE = 0.8


class Meter:
    """Estimates for one link. Times are monotonic seconds, rates bytes a second.

    :param probe_every_s: unless transfers confirm the rate meanwhile.
    """

    def __init__(self, probe_every_s: float) -> None:
        self.rate = 0.0
        self.source = "none"
        self.moved_bytes = 0
        self._probe_every_s = probe_every_s
        self._probe_due_s = 0.0
        self._round_trips_s: deque[float] = deque(maxlen=_ROUND_TRIPS)
        self._bin_start_s = float("-inf")
        self._bin_bytes = 0
        self._now_rate = 0.0

    @property
    def round_trip_s(self) -> float:
        """The least of the last eight: what queues and a busy router add is not the link's."""
        return min(self._round_trips_s, default=0.0)

    def echoed(self, round_trip_s: float) -> None:
        """A heartbeat came back."""
        self._round_trips_s.append(max(0.0, round_trip_s))

    def moved(self, size_bytes: int, now_s: float) -> None:
        """So many bytes of real transfers left by this link since the last call."""
        self.moved_bytes += size_bytes
        elapsed_s = now_s - self._bin_start_s
        if elapsed_s > 2 * _BIN_S:  # how long these took is not known
            self._bin_start_s, self._bin_bytes, self._now_rate = now_s, 0, 0.0
            return
        self._bin_bytes += size_bytes
        if elapsed_s >= _BIN_S:
            self._now_rate = self._bin_bytes / elapsed_s
            self._bin_start_s, self._bin_bytes = now_s, 0
            self._shown(self._now_rate, now_s)

    def probed(self, rate: float, now_s: float) -> None:
        """A probe came through at that rate beside what moved meanwhile."""
        busy = self._now_rate if now_s - self._bin_start_s <= 2 * _BIN_S else 0.0
        self.rate = (self.rate + rate + busy) / 2 if self.rate else rate + busy
        self.source = "probe"
        self._probe_due_s = now_s + self._probe_every_s

    def probe_bytes(self, now_s: float) -> int:
        """Size of the probe that is due now; 0: none is. At most half a second of the link, and 8 MiB."""
        if now_s < self._probe_due_s:
            return 0
        self._probe_due_s = now_s + self._probe_every_s  # one that fails is not repeated at once
        return min(MAX_PROBE_BYTES, max(_FIRST_PROBE_BYTES, int(self.rate * _PROBE_S)))

    def take_moved(self) -> int:
        """Bytes of real transfers since this was last asked."""
        moved, self.moved_bytes = self.moved_bytes, 0
        return moved

    def _shown(self, rate: float, now_s: float) -> None:
        if rate > self.rate:
            self.rate, self.source = rate, "transfer"
        if rate >= _CONFIRMED_SHARE * self.rate:
            self._probe_due_s = now_s + self._probe_every_s
