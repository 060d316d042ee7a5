"""Start-time fair queueing of the pieces of flows on a line of known rate, without queue, clock or lock.

Each flow has a place in virtual time, where its next piece starts; a piece moves it on by its size over the flow's
weight. Of the pieces that wait the one that starts first leaves (Goyal, Vin and Cheng, SIGCOMM 1996).

- A line is free again when what left has had the time that it takes at the line's rate. So in any time T no more leaves
  than the line carries in T and :data:`LATE_S`, and one piece.
- A flow that has nothing to send keeps nothing for later but a place that is earlier by :data:`BACK_S` of the line: who
  was away for a moment, with the piece before, loses no turn by that.
- A flow that waits, but lost its turns since its process stood still, makes up for :data:`AWAY_S` of the line at most:
  else the others would have nothing for as long as it stood still.
- While flows wait the line is used, and each has its part of it by its weight, to within one piece.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: A sender that wakes up so much too late makes up for it.
LATE_S = 0.01
BACK_S = 0.02
AWAY_S = 0.5
#: A process that does not come within this time, although it is its turn, loses it.
PATIENCE_S = 0.005
_POLL_S = 0.0005
#: Data so small are a message: it waits for nobody, while messages are not more than this part of the line. All other
#: waiting data have the rest, so that data that come in small parts, in circuits that are fed slowly, starve nobody.
MESSAGE_BYTES = 4096
_MESSAGES_PART, _MESSAGES_S = 0.5, 0.25
_PIECE_S = 0.01
_LEAST_PIECE_BYTES, _MOST_PIECE_BYTES = 8 * 1024, 1024 * 1024
#: A connection that stands still for a minute is ended by its other side. So each has so many bytes a second, as long
#: as all these together are not more than this part of the line; of so many that it is less, pieces are smaller.
_LEAST_RATE, _LEAST_PART = 16 * 1024.0, 0.5
_OFTEN_S = 4.0


def piece_bytes(rate: float, connections: int = 1) -> int:
    """Return the burst of a line in bytes: 10 ms of its rate in bytes per second, bounded.

    :param connections: that share it.
    """
    most_bytes = min(rate * _PIECE_S, _OFTEN_S * rate * _LEAST_PART / max(1, connections))
    return int(min(max(most_bytes, _LEAST_PIECE_BYTES), _MOST_PIECE_BYTES))


def least_part(mine: int, connections: int, rate: float) -> float:
    """The part of the line that some connections have, whatever the others ask for. :param connections: of all."""
    return mine * min(_LEAST_RATE / rate, _LEAST_PART / max(1, mine, connections))


@dataclass
class Turns:
    """One line, as all who send on it see it. Times are monotonic seconds.

    :param rate: what it carries, bytes a second. :param free_s: when it is free. :param virtual: place in virtual time
        of what left last. :param passed_bytes: that have left since ``since_s``, which is a second ago at most while
        something leaves, and :param used: bytes a second in the second before.
    :param messages_s: when messages have had the time that they take in their part of it.
    """

    rate: float
    free_s: float = 0.0
    virtual: float = 0.0
    passed_bytes: float = 0.0
    since_s: float = 0.0
    used: float = 0.0
    messages_s: float = 0.0

    @property
    def behind(self) -> float:
        """Place in virtual time of who has something to send again, or begins."""
        return max(0.0, self.virtual - BACK_S * self.rate)

    @property
    def late(self) -> float:
        """The earliest place of one that waits: it has lost its turns until there."""
        return max(0.0, self.virtual - AWAY_S * self.rate)

    def wait_s(self, start: float, others: float, now_s: float) -> float:
        """Return the seconds that a piece must wait before the next look; 0: it leaves now.

        :param start: its place in virtual time. :param others: the first place among those of other processes.
        """
        if now_s < self.free_s:
            return self.free_s - now_s
        if others < start and now_s < self.free_s + PATIENCE_S:
            return _POLL_S
        return 0.0

    def leaves(self, size_bytes: int, start: float, now_s: float) -> None:
        """A piece leaves."""
        self.virtual = max(self.virtual, start)
        self._count(size_bytes, now_s)

    def lets(self, size_bytes: int, now_s: float) -> bool:
        """Tell whether a piece so small leaves at once; if it does, it is counted like any other."""
        if size_bytes > MESSAGE_BYTES or self.messages_s > now_s + _MESSAGES_S:
            return False
        self.messages_s = max(self.messages_s, now_s) + size_bytes / (_MESSAGES_PART * self.rate)
        self._count(size_bytes, now_s)
        return True

    def rate_used(self, now_s: float) -> float:
        """Bytes a second lately."""
        seconds = now_s - self.since_s
        return self.used if seconds < 1 else self.passed_bytes / seconds

    def _count(self, size_bytes: int, now_s: float) -> None:
        self.free_s = max(self.free_s, now_s - LATE_S) + size_bytes / self.rate
        if now_s - self.since_s >= 1:
            self.used = self.passed_bytes / (now_s - self.since_s)
            self.since_s, self.passed_bytes = now_s, 0.0
        self.passed_bytes += size_bytes


@dataclass(eq=False)
class Place:
    """The start time of a flow's next piece. :param weight: its part of the line."""

    weight: float = 1.0
    start: float = 0.0

    def begin(self, behind: float) -> None:
        """Let the flow join again. :param behind: as of the line."""
        self.start = max(self.start, behind)

    def leave(self, size_bytes: int) -> None:
        """A piece of it leaves."""
        self.start += size_bytes / self.weight

    def weigh(self, weight: float, virtual: float) -> None:
        """Another weight from now on: what it has had already counts by the new one."""
        if self.start > virtual and not math.isclose(weight, self.weight):
            self.start = virtual + (self.start - virtual) * self.weight / weight
        self.weight = weight
