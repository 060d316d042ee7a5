"""When something that failed is tried again."""

from __future__ import annotations

from dataclasses import dataclass

from stageout.core.pauses import growing_s

FIRST_S = 1.0
_LONGEST_S = 120.0
#: Pauses of what has ended meanwhile are forgotten so often.
FORGET_EVERY_S = 60.0


@dataclass
class Pause:
    """After failures. :param until_s: on the monotonic clock."""

    failures: int = 0
    until_s: float = 0.0

    def more(self, now_s: float, least_s: float) -> None:
        """One more failure."""
        self.failures += 1
        self.until_s = now_s + max(least_s, growing_s(FIRST_S, _LONGEST_S, self.failures))
