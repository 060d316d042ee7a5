"""Limits on the duration and the slowness of a transfer, from the past rates of its destination.

One figure per destination is kept: the rate of one call of a plugin, as a decaying mean and mean deviation of its
logarithm, because rates of one destination differ by factors. Every file counts as
:data:`stageout.core.eta.FILE_BYTES` more than it has, so that calls with many small files and calls with few large ones
tell about each other.

A limit is generous: :data:`MARGIN` times what a slow one of the earlier calls would have taken. One that was hit was
too tight, so it teaches a lower rate, and the next limit is longer, up to the administrator's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from stageout.core.eta import work_bytes

MARGIN = 10.0
LEAST_S = 600.0
#: Rate that is assumed of a destination without measurements.
UNKNOWN_BYTES_S = 1_000_000.0
#: Age in seconds from which a measured rate that was not confirmed is ignored.
OLD_S = 30 * 86400.0
#: Spread after one call.
FIRST_SPREAD = 1.0

_NEWEST_WEIGHT = 0.25
_DAY_SPREAD = 0.1
_DAY_S = 86400.0
_LEAST_RATE = 1.0
_MOST_RATE = 1e12
_STALLED_PART = 0.01
_STALL_WINDOW_S = 30.0
_STALL_WINDOW_MOST_S = 600.0
_STALL_BLOCKS_BYTES = 655_360.0
_STALLS_TEACH_DOWN_TO = 10_000.0  # a server that hangs again and again must not teach to wait for ever


@dataclass(frozen=True)
class Observed:
    """The rates that a plugin's calls to one destination have reached.

    :param log_rate: decaying mean of ln(bytes per s), with the cost of each file.
    :param spread: decaying mean deviation from it. :param at: wall clock of the last call, s.
    """

    log_rate: float
    spread: float
    at: float

    @property
    def rate_bytes_s(self) -> float:
        """The usual rate."""
        return math.exp(self.log_rate)

    def spread_now(self, now: float) -> float:
        """Return the spread, which grows with the age of the knowledge.

        :param now: wall clock, s; a clock that was set back counts as no time.
        """
        return self.spread + _DAY_SPREAD * max(0.0, now - self.at) / _DAY_S

    def slow_bytes_s(self, now: float) -> float:
        """Return the rate of a slow call; the older the knowledge, the lower. :param now: wall clock, s."""
        return max(_LEAST_RATE, math.exp(self.log_rate - 2 * self.spread_now(now)))


def learn(known: Observed | None, files: int, size_bytes: int, took_s: float, now: float) -> Observed:
    """Return the knowledge after a call that moved all its files.

    :param took_s: time from start to end of the call. :param now: wall clock, s.
    """
    rate = work_bytes(files, size_bytes) / max(took_s, 1e-3)
    return _mixed(known if is_fresh(known, now) else None, rate, now)


def missed(known: Observed | None, files: int, size_bytes: int, took_s: float, now: float) -> Observed:
    """Return the knowledge after a call that took too long: it doubles the next limit."""
    slow = max(_LEAST_RATE, MARGIN * work_bytes(files, size_bytes) / max(took_s, 1e-3) / 2)
    if known is None or not is_fresh(known, now):
        return Observed(math.log(slow) + 2 * FIRST_SPREAD, FIRST_SPREAD, now)
    return _slower(known, min(slow, known.slow_bytes_s(now) / 2), now)


def stalled(known: Observed | None, now: float) -> Observed | None:
    """Return the knowledge after a transfer that stalled: the next one may be half as fast."""
    if known is None or not is_fresh(known, now):
        return None
    slow = known.slow_bytes_s(now)
    return _slower(known, min(slow, max(slow / 2, _STALLS_TEACH_DOWN_TO)), now)


def _slower(known: Observed, slow: float, now: float) -> Observed:
    return Observed(math.log(max(_LEAST_RATE, slow)) + 2 * known.spread, known.spread, now)


def is_fresh(known: Observed | None, now: float) -> bool:
    """Tell whether the knowledge is still valid. :param now: wall clock, s."""
    return known is not None and now - known.at < OLD_S


def _mixed(known: Observed | None, rate: float, now: float) -> Observed:
    value = math.log(min(_MOST_RATE, max(_LEAST_RATE, rate)))
    if known is None:
        return Observed(value, FIRST_SPREAD, now)
    off = value - known.log_rate
    spread = known.spread + _NEWEST_WEIGHT * (abs(off) - known.spread)
    return Observed(known.log_rate + _NEWEST_WEIGHT * off, spread, now)


def limit_s(known: Observed | None, files: int, size_bytes: int, most_s: float, now: float) -> float:
    """Return the time limit of a call: never less than :data:`LEAST_S`, never more than ``most_s``.

    :param most_s: the administrator's limit. :param now: wall clock, s.
    """
    slow_bytes_s = known.slow_bytes_s(now) if known is not None and is_fresh(known, now) else UNKNOWN_BYTES_S
    usual_s = work_bytes(files, size_bytes) / slow_bytes_s
    return min(most_s, max(LEAST_S, MARGIN * usual_s))


@dataclass(frozen=True)
class Stall:
    """A transfer that moves less than ``bytes_per_s`` over ``window_s`` seconds is given up."""

    bytes_per_s: float
    window_s: float


def stall(known: Observed | None, files_at_once: int, now: float) -> Stall | None:
    """Return the stall limit for one of ``files_at_once`` files; None while nothing is known.

    One per cent of what it would get of a slow call. On a slow way the window is longer, because data comes in blocks.

    :param now: wall clock, s.
    """
    if known is None or not is_fresh(known, now):
        return None
    each = known.slow_bytes_s(now) / max(1, files_at_once)
    window_s = min(_STALL_WINDOW_MOST_S, max(_STALL_WINDOW_S, _STALL_BLOCKS_BYTES / each))
    return Stall(max(1.0, each * _STALLED_PART), window_s)
