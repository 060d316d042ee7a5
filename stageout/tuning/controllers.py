"""The controllers that adapt, by name, each with its state: what ``STAGEOUT_TUNING`` chooses beside ``fixed``."""

from __future__ import annotations

from stageout.core.controllers import Knobs, Step, within_grant
from stageout.tuning import adaptive, crowding

CROWDING, RUNNING = NAMES = ("crowding", "running")


class AdaptiveController:
    """Controller of the number of transfers to one destination, step by step.

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
