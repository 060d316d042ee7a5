"""Sizes, durations and counts as people read them. Pure."""

from __future__ import annotations

import time

from stageout.core.eta import Eta, limits_s, phrase
from stageout.core.units import rate as rate
from stageout.core.units import size as size


def duration(seconds: float) -> str:
    """Return a duration in one unit or two: ``45 s``, ``12 min``, ``2 h 5 min``, ``4 d 3 h``."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def expected(found: Eta | None) -> str:
    """Return the time until a delivery: ``in 4-9 min``, ``in more than 5 min``, ``unknown``."""
    return phrase(*limits_s(found)) or "unknown"


def count(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 output``, ``12,000 outputs``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def moment(at: float) -> str:
    """Return a time of this machine's zone: ``2026-01-31 12:00:00``; "" for none, and for one without a date."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if at > 0 else ""
    except (OSError, OverflowError, ValueError):
        return ""


def zone(at: float) -> str:
    """Return the name of this machine's time zone with its offset: ``CET (UTC+01:00)``."""
    there = time.localtime(at)
    hours, minutes = divmod(abs(there.tm_gmtoff) // 60, 60)
    return f"{there.tm_zone} (UTC{'-' if there.tm_gmtoff < 0 else '+'}{hours:02}:{minutes:02})"


def offsets(first: float, last: float) -> list[tuple[int, int]]:
    """Return since when this machine's time zone has which offset from UTC, in seconds, between two times.

    A change in these days is found to the second. Of two changes only the last one counts.
    """
    low, high = int(first), int(last)
    before, after = (time.localtime(at).tm_gmtoff for at in (low, high))
    if before == after:
        return [(low, before)]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if time.localtime(middle).tm_gmtoff == after else (middle, high)
    return [(int(first), before), (high, after)]


def machine_time(at: float) -> str:
    """Return the same moment for programs, in UTC. :raises OSError, OverflowError: it has no date."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
