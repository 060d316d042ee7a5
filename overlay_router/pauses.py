"""When something that failed is tried again."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_S = 1.0
_LONGEST_S = 120.0
#: Enough to come to the longest pause from any first one; without it the number itself grows too large one day.
_DOUBLINGS = 30


def growing_s(first_s: float, longest_s: float, failures: int) -> float:
    """The pause behind so many failures in a row: doubled each time, at most the longest."""
    return min(longest_s, first_s * 2.0 ** min(failures - 1, _DOUBLINGS))


@dataclass
class Pause:
    """After failures. :param until_s: on the monotonic clock."""

    failures: int = 0
    until_s: float = 0.0

    def more(self, now_s: float, least_s: float) -> None:
        """One more failure."""
        self.failures += 1
        self.until_s = now_s + max(least_s, growing_s(FIRST_S, _LONGEST_S, self.failures))
