"""Executors whose answers are there at once, as Python 3.14 has them where a thread is quicker than the loop.

``pytest -p tests.at_once`` runs any tests with them, on any Python; a test of its own calls :func:`patch`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Any

import pytest

#: s that the loop stands still for an answer.
_PATIENCE_S = 0.005
_original = asyncio.BaseEventLoop.run_in_executor


def _run_in_executor(loop: asyncio.BaseEventLoop, executor: Any, function: Any, *args: Any) -> asyncio.Future[Any]:
    source: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        if not source.set_running_or_notify_cancel():
            return
        try:
            source.set_result(function(*args))
        except BaseException as problem:
            source.set_exception(problem)

    _original(loop, executor, run)
    concurrent.futures.wait([source], timeout=_PATIENCE_S)
    answer: asyncio.Future[Any] = loop.create_future()
    if not source.done():
        answer = asyncio.wrap_future(source, loop=loop)
    elif problem := source.exception():
        answer.set_exception(problem)
    else:
        answer.set_result(source.result())
    return answer


def patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``run_in_executor`` of all loops return a future that is done, where the work takes less than 5 ms."""
    monkeypatch.setattr(asyncio.BaseEventLoop, "run_in_executor", _run_in_executor)


def pytest_configure() -> None:
    """Patch it for the whole run."""
    asyncio.BaseEventLoop.run_in_executor = _run_in_executor  # type: ignore[method-assign,assignment]
