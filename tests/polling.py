"""Waiting for a condition, with a deadline that a slow machine keeps: the tests' alternative to sleeping for luck."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

DEADLINE_S = 60.0
_EVERY_S = 0.01


def wait_for(condition: Callable[[], Any], what: Callable[[], str] | str = "it", *, every_s: float = 0.01) -> Any:
    """The first true value of the condition. :param what: is to come about, in words, for who reads the failure."""
    end_s = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        if time.monotonic() > end_s:
            raise AssertionError(_in_vain(what))
        time.sleep(every_s)
    return found


async def until(condition: Callable[[], Any], what: Callable[[], str] | str = "it") -> Any:
    """As :func:`wait_for`, for what happens in this loop; the condition may be a coroutine function."""
    end_s = time.monotonic() + DEADLINE_S
    while not (found := await answer if inspect.isawaitable(answer := condition()) else answer):
        if time.monotonic() > end_s:
            raise AssertionError(_in_vain(what))
        await asyncio.sleep(_EVERY_S)
    return found


def _in_vain(what: Callable[[], str] | str) -> str:
    return f"did not come about within {DEADLINE_S} s: {what if isinstance(what, str) else what()}"
