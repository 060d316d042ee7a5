"""Shares of a subject, leases of reserved space, and time that does not go back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from stageout.overlay.rules.operations import Row
from stageout.overlay.rules.states import ENDS, State

#: A reservation without new data is released after so long (seconds); received blocks stay.
LEASE_S = 600
#: A jump of the clock by more is not believed (seconds).
MOST_JUMP_S = 600


class ShareFull(Exception):
    """429: the subject's share is full."""


class Share(NamedTuple):
    """Finite things of one subject at a router."""

    rows: int = 0
    held: int = 0
    cancels: int = 0
    size: int = 0


def used(rows: Iterable[Row]) -> Share:
    """Return what the rows of one subject use. Bytes of refused and failed files count."""
    total = [0, 0, 0, 0]
    for row in rows:
        total[0] += 1
        total[1] += row.state is State.HELD
        total[2] += row.state in (State.CANCELLED, State.CANCELLING)
        total[3] += (row.fields.size or 0) if row.state not in ENDS or row.state is State.FAILED else 0
    return Share(*total)


def check_share(share: Share, limit: Share, wanted: Share) -> None:
    """Check before anything is stored. :raises ShareFull: no row and no line in the log come from it."""
    if any(have + more > most for have, more, most in zip(share, wanted, limit) if more):
        raise ShareFull("the share of the subject is full: try again later")


def lease_ended(last_data: float, now: float) -> bool:
    """Tell whether space that was reserved without data is free again. Both times are monotonic."""
    return now - last_data >= LEASE_S


@dataclass(frozen=True)
class Clock:
    """Time of a router. :param latest: the largest wall-clock time that was stored. :param monotonic: at that time."""

    latest: int
    monotonic: float
    is_trusted: bool = True

    def at(self, wall: int, monotonic: float) -> Clock:
        """Return the clock at a new reading. A jump is not stored, and nothing expires until it is confirmed."""
        passed = int(monotonic - self.monotonic)
        if abs(wall - self.latest - passed) > MOST_JUMP_S:
            return Clock(self.latest, self.monotonic, False)
        return Clock(max(wall, self.latest), monotonic)

    def confirmed(self, wall: int, monotonic: float) -> Clock:
        """Return the clock after the administrator has confirmed the time."""
        return Clock(wall, monotonic)
