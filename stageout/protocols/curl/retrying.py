"""Attempts of one file: again after a while when the table says "retry here", within a budget of time."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import TypeVar

import tenacity

from stageout.core.errors import Advice, TransferFailure
from stageout.plugin.api import Context

T = TypeVar("T")
_SLICE_S = 0.5


def with_retries(context: Context, attempt: Callable[[], T]) -> T:
    """Call ``attempt`` until it succeeds, fails for good, or attempts (RETRY_ATTEMPTS) or time (RETRY_BUDGET_S) are up.

    A server's Retry-After is respected, or the failure returned at once when it is longer than what is left.
    Under the sandbox manager there is one attempt: the manager owns the schedule.

    :raises TransferFailure: the last one.
    """
    attempts = 1 if os.environ.get("STAGEOUT_MOVER") else max(1, int(_knob(context, "RETRY_ATTEMPTS", 6)))
    budget_s = min(_knob(context, "RETRY_BUDGET_S", 240), context.remaining_s)
    started = time.monotonic()

    def stop(state: tenacity.RetryCallState) -> bool:
        left = budget_s - (time.monotonic() - started)
        return state.attempt_number >= attempts or state.upcoming_sleep > left

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(_worth_it),
        wait=_wait_s,
        stop=stop,
        before_sleep=lambda state: _note(context, state),
        sleep=lambda seconds: _sleep(context, seconds),
        reraise=True,
    )
    return retrying(attempt)


def _worth_it(error: BaseException) -> bool:
    return isinstance(error, TransferFailure) and error.kind.advice is Advice.RETRY_HERE


def _wait_s(state: tenacity.RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    if isinstance(error, TransferFailure) and error.retry_after_s is not None:
        return error.retry_after_s
    return min(30.0, 2.0 ** (state.attempt_number - 1)) * random.uniform(0.5, 1.0)


def _note(context: Context, state: tenacity.RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    if isinstance(error, TransferFailure):
        context.attempt_failed(error)


def _sleep(context: Context, seconds: float) -> None:
    """Sleep so that a stop of the plugin is noticed."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and context.remaining_s > 0:
        time.sleep(min(left, _SLICE_S))


def _knob(context: Context, name: str, default: float) -> float:
    try:
        return float(context.setting(name, str(default)))
    except ValueError:
        return default
