"""A controller for the connections of one transfer: it tries more, or fewer, and keeps what the rate of all is worth.

:mod:`stageout.tuning.crowding` compares what one transfer of many reaches with what one reached alone. Connections of
one file cannot be judged so: a new one runs ahead until it loses its first packet, so the rate of "one alone" at the
start is far too high. And each connection changes its rate all the time. This controller looks at the sum only. A step
up is kept when the rate grows by a good part of what so many more connections could bring at best; a step down when it
costs nothing to speak of. A level that was tried in vain is tried again later, and later still the next time; but when
the rate falls by itself, at once.
"""

from __future__ import annotations

import math

_GAIN, _FULL_GAIN = 0.3, 0.6
_LOSS = 0.05
_FELL = 0.7
_DOUBLE, _FINE, _FEWER = 2.0, 1.25, 0.75
_PAUSE, _LONGEST_PAUSE = 4, 32
_MEAN_OF = 4


class Climber:
    """The number of connections.

    :param start: at first. :param most: never more.
    :ivar now: how many there should be. :ivar reason: why, in a sentence; "" before the first measurement.
    :ivar least: by what is known of the link no fewer will do; none is tried.
    """

    def __init__(self, start: int, most: int) -> None:
        self.now = start
        self.reason = ""
        self.least = 1
        self._most = max(start, most)
        self._base, self._rate, self._samples = start, 0.0, 0
        self._factor, self._pause, self._held = _DOUBLE, 0, 0
        self._up = True

    @property
    def trying(self) -> bool:
        """Tell whether another number than the best known one is being tried."""
        return self.now != self._base

    def measured(self, rate: float) -> int:
        """The next number. :param rate: of all connections together since the number was last changed, or measured."""
        if self.trying:
            self._judge(rate)
        else:
            self._note(rate)
        return self.now

    def need(self, why: str) -> int:
        """Start at :attr:`least`, which needs no trial, and return the number to use now."""
        least = min(self.least, self._most)
        if least > self.now:
            self.reason = f"{why}: {least}."
            self._base = self.now = least
            self._samples, self._factor, self._held, self._pause = 0, _FINE, 0, _PAUSE
        return self.now

    def _note(self, rate: float) -> None:
        """The rate at the number that is the best known."""
        fell = self._samples and rate < _FELL * self._rate
        if fell:
            self._samples, self._up, self._factor, self._pause = 0, True, _DOUBLE, 0
            self.reason = f"{self._base} carry {rate:.3g} where it was {self._rate:.3g}."
        self._samples = min(self._samples + 1, _MEAN_OF)
        self._rate += (rate - self._rate) / self._samples
        self._held += 1
        if self._held > self._pause:
            self._try(self.reason if fell else f"{self._base} carry {self._rate:.3g}.")

    def _try(self, why: str) -> None:
        higher = min(self._most, max(self._base + 1, math.ceil(self._base * self._factor)))
        lower = min(self._base, max(self.least, int(self._base * _FEWER)))
        self.now = higher if (self._up and higher > self._base) or lower == self._base else lower
        if self.trying:
            self.reason = f"{why} Try {self.now}."

    def _judge(self, rate: float) -> None:
        """The rate at a number that is tried."""
        tried, base, before = self.now, self._base, self._rate
        went_up = tried > base
        least = before * (1 + _GAIN * (tried / base - 1) if went_up else 1 - _LOSS)
        if rate > 0 and rate >= least:  # where nothing moves, no number is better than another
            self._base, self._rate, self._samples = tried, rate, 1
            self._up, self._pause, self._held = went_up, 0, 0
            why = f"{tried} carry {rate:.3g} where {base} carried {before:.3g}."
            if went_up and rate < before * (1 + _FULL_GAIN * (tried / base - 1)):  # the link is nearly full
                self._factor, self._pause, self.reason = _FINE, _PAUSE, why
            else:
                self._try(why)
            return
        self.now, self._factor = base, _FINE
        self._up, self._held = not went_up, 0
        self._pause = min(_LONGEST_PAUSE, max(_PAUSE, 2 * self._pause))
        self.reason = f"{tried} carry {rate:.3g} where {base} carried {before:.3g}: back to {base}."
