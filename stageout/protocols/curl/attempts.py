"""Attempts at one file: the retryable failures, their delays and their time limits."""

from __future__ import annotations

import abc
import time
from typing import TYPE_CHECKING

from stageout.core.errors import Advice, ErrorClass, TransferFailure
from stageout.plugin.api import Outcome
from stageout.protocols.curl.failures import HANDSHAKES, RECONNECTS
from stageout.protocols.curl.settings import in_data_slot, most_retries
from stageout.protocols.curl.task import Task

if TYPE_CHECKING:  # imported only for a retry
    import tenacity

_SLICE_S = 0.2
_MOST_FAILURES = 100  # in a row, without progress; HTCondor's own plugin stops after 20
_HANDSHAKE_BUDGET_S = 1.5  # enough for one more attempt
_WRONG_COPIES = frozenset({ErrorClass.SIZE_MISMATCH, ErrorClass.CONTENT_MISMATCH})


class Movement(abc.ABC):
    """The transfer of one file, over all attempts."""

    def __init__(self, task: Task) -> None:
        self._task = task

    @property
    def milestone(self) -> int:
        """Return a measure of progress that survives a failed attempt. An increase restarts the retry budget."""
        return 0

    @property
    def repeatable(self) -> bool:
        """Tell whether another attempt is worth its cost after the server has refused the file."""
        return True

    @abc.abstractmethod
    def attempt(self) -> Outcome:
        """Try to finish the transfer from its current state.

        :raises TransferFailure: classified.
        """

    @abc.abstractmethod
    def abandon(self) -> None:
        """Clean up after a permanent failure. Never raises."""

    def close(self) -> None:  # noqa: B027 - most have nothing open
        """Release resources. The caller calls it at the end, after success as well."""


def wait(task: Task, duration_s: float) -> None:
    """Wait; end early when another file of the call has failed permanently.

    :raises TransferFailure: the plugin has to end.
    """
    end_s = time.monotonic() + duration_s
    while (left_s := end_s - time.monotonic()) > 0 and not task.context.decided:
        task.context.progress(task.progress.total_bytes)
        time.sleep(min(left_s, _SLICE_S))


class _RetryBudget:
    """The retry schedule of a file. In a data slot there is one attempt, because the manager schedules retries."""

    def __init__(self, movement: Movement, task: Task, begin_s: float) -> None:
        self._movement = movement
        self._task = task
        self._begin_s = begin_s  # start of the first attempt without progress
        self._since_s = 0.0  # its failure
        self._failures = 0
        self._retries = 0
        self._most_retries = most_retries(task.context)
        self._milestone = 0
        self._failure: TransferFailure | None = None
        self._wait_s = 0.0

    def exhausted(self, state: tenacity.RetryCallState) -> bool:
        """Tell whether the file has no attempts left; otherwise plan the wait before the next one."""
        failure = state.outcome.exception() if state.outcome else None
        assert isinstance(failure, TransferFailure)  # other failures are final
        self._failure, now_s = failure, time.monotonic()
        if self._movement.milestone > self._milestone:
            self._begin_s, self._failures, self._milestone = now_s, 0, self._movement.milestone
        self._since_s = self._since_s if self._failures else now_s
        self._failures += 1
        self._wait_s = self._next_wait_s(failure)
        if in_data_slot() or self._task.context.decided:
            return True
        if self._retries == self._most_retries or self._failures > _MOST_FAILURES:
            return True
        self._retries += 1
        late = now_s + self._wait_s > self._end_s(failure)
        return late or self._wait_s >= self._task.context.remaining_s

    def _end_s(self, failure: TransferFailure) -> float:
        settings, code = self._task.settings, failure.developer.get("LibcurlReturnCode")
        if code in RECONNECTS:
            return self._since_s + settings.reconnect_budget_s
        if code in HANDSHAKES:
            return self._since_s + min(settings.retry_budget_s, _HANDSHAKE_BUDGET_S)
        if not self._movement.repeatable:
            return self._begin_s
        return (self._since_s if failure.kind in _WRONG_COPIES else self._begin_s) + settings.retry_budget_s

    def _next_wait_s(self, failure: TransferFailure) -> float:
        import random

        if failure.retry_after_s is not None:
            return failure.retry_after_s + random.random()
        return random.uniform(self._failures / 2, self._failures)

    def sleep(self, duration_s: float) -> None:
        """Wait as planned, and end early when the plugin has to end.

        :raises TransferFailure: the plugin has to end, or another file has failed: then it is the last failure.
        """
        del duration_s  # tenacity calls it before or after it makes the plan, depending on its version
        assert self._failure is not None
        context = self._task.context
        try:
            wait(self._task, self._wait_s)
        except TransferFailure:
            context.attempt_failed(self._failure)
            raise
        if context.decided:
            raise self._failure
        context.attempt_failed(self._failure)
        context.log("next attempt", waited_s=round(self._wait_s, 1), milestone=self._movement.milestone)


def _may_help(error: BaseException) -> bool:
    """Tell whether the plugin retries a failure: exactly as the table advises, except at its own end."""
    if not isinstance(error, TransferFailure):
        return False
    ended = error.kind in (ErrorClass.DEADLINE, ErrorClass.NOT_ATTEMPTED)
    return error.kind.advice is Advice.RETRY_HERE and not ended


def run_attempts(movement: Movement, task: Task) -> Outcome:
    """Make attempts until one succeeds or no retry is useful. Leave nothing behind after a failure.

    :raises TransferFailure: the last one.
    """
    begin_s = time.monotonic()
    try:
        try:
            return movement.attempt()
        except TransferFailure as failure:
            return _try_again(movement, task, failure, begin_s)
    except BaseException:
        movement.abandon()
        raise
    finally:
        movement.close()


def _try_again(movement: Movement, task: Task, first: TransferFailure, begin_s: float) -> Outcome:
    """Make all attempts after the first, which has just failed.

    :raises TransferFailure: the last one.
    """
    if not _may_help(first):
        raise first
    import tenacity

    budget = _RetryBudget(movement, task, begin_s)
    known = [first]

    def attempt() -> Outcome:
        if known:
            raise known.pop()
        return movement.attempt()

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(_may_help),
        stop=budget.exhausted,
        sleep=budget.sleep,
        reraise=True,
    )
    return retrying(attempt)
