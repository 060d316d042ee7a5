"""Attempts at one file: which failure is tried again, when, and for how long."""

from __future__ import annotations

import abc
import os
import time
from typing import TYPE_CHECKING

from stageout.core.errors import Advice, ErrorClass, TransferFailure
from stageout.core.pauses import growing_s
from stageout.plugin.api import Outcome
from stageout.protocols.curl.task import Task

if TYPE_CHECKING:  # loaded only when something has to be tried again
    import tenacity

_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 30.0
_SLICE_S = 0.5


class Movement(abc.ABC):
    """One file on its way, over all attempts."""

    def __init__(self, task: Task) -> None:
        self._task = task

    @property
    def milestone(self) -> int:
        """What is kept if the present attempt fails; a rise starts the retry budget anew."""
        return 0

    @abc.abstractmethod
    def attempt(self) -> Outcome:
        """Try to finish the transfer from where it is.

        :raises TransferFailure: classified.
        """

    @abc.abstractmethod
    def abandon(self) -> None:
        """Remove what is left after a failure for good. Never raises."""

    def close(self) -> None:  # noqa: B027 - most have nothing open
        """Called at the end, after success too."""


class _Patience:
    """How long a file is tried. Under the sandbox manager once: the schedule is the manager's."""

    def __init__(self, movement: Movement, task: Task) -> None:
        self._movement = movement
        self._task = task
        self._budget_s = 0.0 if os.environ.get("STAGEOUT_MOVER") else task.settings.retry_budget_s
        self._since_s = 0.0
        self._failures = 0
        self._milestone = movement.milestone
        self.wait_s = 0.0

    def exhausted(self, state: tenacity.RetryCallState) -> bool:
        """Whether no further attempt is made; plans the wait before the next one."""
        now_s = time.monotonic()
        if not self._failures or self._movement.milestone > self._milestone:
            self._since_s, self._failures, self._milestone = now_s, 0, self._movement.milestone
        self._failures += 1
        self.wait_s = self._next_wait_s(state)
        end_s = now_s + self.wait_s
        return end_s - self._since_s > self._budget_s or self.wait_s >= self._task.context.remaining_s

    def _next_wait_s(self, state: tenacity.RetryCallState) -> float:
        import random

        failure = state.outcome.exception() if state.outcome else None
        asked_s = failure.retry_after_s if isinstance(failure, TransferFailure) else None
        if asked_s is not None:
            return asked_s + random.random()
        longest_s = growing_s(_FIRST_WAIT_S, _LONGEST_WAIT_S, self._failures)
        return random.uniform(longest_s / 2, longest_s)

    def sleep(self, duration_s: float) -> None:
        """Wait as planned, and end early when the plugin has to end."""
        del duration_s  # tenacity asks for it before or after the plan is made, by version
        end_s = time.monotonic() + self.wait_s
        while (left_s := end_s - time.monotonic()) > 0:
            self._task.context.progress(self._task.mileage.total_bytes)
            time.sleep(min(left_s, _SLICE_S))


def _may_help(error: BaseException) -> bool:
    """What is retried in the plugin: exactly what the table advises to retry here, except its own end."""
    if not isinstance(error, TransferFailure):
        return False
    ended = error.kind in (ErrorClass.DEADLINE, ErrorClass.NOT_ATTEMPTED)
    return error.kind.advice is Advice.RETRY_HERE and not ended


def carry_out(movement: Movement, task: Task) -> Outcome:
    """Make attempts until one succeeds or no further one makes sense; nothing is left behind after a failure.

    :raises TransferFailure: the last one.
    """
    try:
        try:
            return movement.attempt()
        except TransferFailure as failure:
            return _try_again(movement, task, failure)
    except BaseException:
        movement.abandon()
        raise
    finally:
        movement.close()


def _try_again(movement: Movement, task: Task, first: TransferFailure) -> Outcome:
    """All attempts after the first, which has just failed.

    :raises TransferFailure: the last one.
    """
    if not _may_help(first):
        raise first
    import tenacity

    patience = _Patience(movement, task)
    known = [first]

    def attempt() -> Outcome:
        if known:
            raise known.pop()
        return movement.attempt()

    def note(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, Exception):
            task.context.attempt_failed(error)
            task.context.log("next attempt", wait_s=round(patience.wait_s, 1), milestone=movement.milestone)

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(_may_help),
        stop=patience.exhausted,
        sleep=patience.sleep,
        before_sleep=note,
        reraise=True,
    )
    return retrying(attempt)
