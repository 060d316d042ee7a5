"""The controllers by name, each with its state: what ``STAGEOUT_TUNING`` chooses.

``fixed`` always uses as much as it may: all streams at once.
"""

from __future__ import annotations

from stageout.tuning import adaptive, crowding
from stageout.tuning.adaptive import Knobs, Step, within_grant

CROWDING, RUNNING, FIXED = NAMES = ("crowding", "running", "fixed")


class Controller:
    """Controller of the number of transfers to one destination, step by step.

    :param name: one of :data:`NAMES`. :param start: transfers at the start, instead of ``knobs.initial``.
    """

    def __init__(self, name: str, knobs: Knobs, start: int = 0) -> None:
        self.name = name
        self.knobs = knobs
        start = max(1, min(start or knobs.initial, knobs.maximum))
        self._start = knobs.maximum if name == FIXED else start
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
        elif self.name == CROWDING:
            self._crowding, step = crowding.control(self._crowding, rate, streams, self.knobs)
        else:
            concurrency, parallelism = within_grant(self._level, streams, self.knobs)
            return Step(concurrency, parallelism, "All that may run at once (STAGEOUT_TUNING = fixed).")
        self._level, self.reason = step.concurrency, step.reason
        return step
