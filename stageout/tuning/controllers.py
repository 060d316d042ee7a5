"""The controllers of the number of transfers to one server, each with its state, as ``STAGEOUT_TUNING`` names them."""

from __future__ import annotations

from typing import Protocol

from stageout.core.streams import ALL_AT_ONCE, FIXED, Knobs
from stageout.tuning import adaptive, crowding
from stageout.tuning.steps import Step, within_grant

CROWDING, RUNNING = NAMES = ("crowding", "running")


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


def controller_of(name: str, knobs: Knobs, start: int = 0) -> Controller:
    """Return a new controller. :param start: transfers at the start, instead of ``knobs.initial``."""
    return FixedController(knobs) if name == FIXED else AdaptiveController(name, knobs, start)


class FixedController:
    """Use all streams of a grant at once."""

    name = FIXED

    def __init__(self, knobs: Knobs) -> None:
        self.knobs = knobs

    def now(self, streams: int) -> Step:
        """Return the most that the grant and the limits allow."""
        concurrency, parallelism = within_grant(self.knobs.maximum, streams, self.knobs)
        return Step(concurrency, parallelism, ALL_AT_ONCE)

    def step(self, rate: float, streams: int) -> Step:
        """Return the same: no rate changes it."""
        return self.now(streams)


class AdaptiveController:
    """Controller that adapts to the rate.

    :param name: one of :data:`NAMES`. :param start: transfers at the start, instead of ``knobs.initial``.
    """

    def __init__(self, name: str, knobs: Knobs, start: int = 0) -> None:
        self.name = name
        self.knobs = knobs
        self._start = max(1, min(start or knobs.initial, knobs.maximum))
        self._begin()

    def _begin(self) -> None:
        self._running = adaptive.Adaptive(self._start)
        self._crowding = crowding.begin(self._start)
        self._level = self._start
        self.reason = f"Start with {self._start}."

    def now(self, streams: int) -> Step:
        """Return the present choice within a grant."""
        concurrency, parallelism = within_grant(self._level, streams, self.knobs)
        return Step(concurrency, parallelism, self.reason)

    def step(self, rate: float, streams: int) -> Step:
        """Make the next choice, which holds after ``knobs.delay`` finished transfers.

        :param rate: of all transfers together since the last step. :param streams: granted now.
        """
        if streams <= 0:
            self._begin()
            return self.now(0)
        if self.name == RUNNING:
            self._running, step = adaptive.adapt(self._running, rate, streams, self.knobs)
        else:
            self._crowding, step = crowding.control(self._crowding, rate, streams, self.knobs)
        self._level, self.reason = step.concurrency, step.reason
        return step
