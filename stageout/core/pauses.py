"""Pauses before something that failed is tried again."""

from __future__ import annotations

#: Enough to come to the longest pause from any first one; without it the number itself grows too large one day.
_DOUBLINGS = 30


def growing_s(first_s: float, longest_s: float, failures: int) -> float:
    """Compute the pause after some failures in a row, at least one: doubled each time, up to the longest."""
    return min(longest_s, first_s * 2.0 ** min(failures - 1, _DOUBLINGS))
