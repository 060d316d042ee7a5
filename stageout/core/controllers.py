"""The seam between the core and the algorithms that choose numbers of files and streams.

The core has one controller of its own, ``fixed``: it always uses as much as it may. All others are in
``stageout/tuning``, a part that an installation can leave out. The manager loads it by name when it is chosen. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

FIXED = "fixed"


@dataclass(frozen=True)
class Knobs:
    """Parameters of an adaptive client.

    :param initial: C_i, transfers at the start. :param maximum: C_max, most transfers at once.
    :param parallelism: p, streams per transfer. :param delay: d, finished transfers between two steps.
    :param increment: Delta, transfers per step.
    :param threshold: T, change of the rate that counts, in the unit of the rates.
    """

    initial: int
    maximum: int
    parallelism: int
    delay: int
    increment: int
    threshold: float


@dataclass(frozen=True)
class Step:
    """A controller's decision.

    :param concurrency: transfers at once from now on. :param parallelism: streams of each.
    :param reason: one sentence, for the log and for ``status``.
    """

    concurrency: int
    parallelism: int
    reason: str


class Controller(Protocol):
    """Controller of the number of transfers to one server, step by step."""

    name: str
    knobs: Knobs

    def now(self, streams: int) -> Step:
        """Return the present choice within a grant."""

    def step(self, rate: float, streams: int) -> Step:
        """Make the next choice, which holds after ``knobs.delay`` finished transfers.

        :param rate: of all transfers together since the last step. :param streams: granted now.
        """


class FixedController:
    """Use all streams at once."""

    name = FIXED

    def __init__(self, knobs: Knobs) -> None:
        self.knobs = knobs

    def now(self, streams: int) -> Step:
        """Return the most that the grant and the limits allow."""
        concurrency, parallelism = within_grant(self.knobs.maximum, streams, self.knobs)
        return Step(concurrency, parallelism, f"Start with {self.knobs.maximum}.")

    def step(self, rate: float, streams: int) -> Step:
        """Return the same: no rate changes it."""
        if streams <= 0:
            return self.now(0)
        concurrency, parallelism = within_grant(self.knobs.maximum, streams, self.knobs)
        return Step(concurrency, parallelism, "All that may run at once (STAGEOUT_TUNING = fixed).")


def within_grant(concurrency: int, streams: int, knobs: Knobs) -> tuple[int, int]:
    """Choose transfers and streams of each that fit into a grant.

    At least one transfer while there is a stream at all, with fewer streams than ``parallelism`` if need be.

    :param streams: granted.
    """
    if streams <= 0:
        return 0, knobs.parallelism
    parallelism = min(knobs.parallelism, streams)
    return max(1, min(concurrency, streams // parallelism, knobs.maximum)), parallelism
