"""Cancellation of tasks, and protection of work that must not be interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from stageout.core import log

_AGAIN_S = 0.5


async def outlast(work: asyncio.Future[Any]) -> bool:
    """Wait until work has ended, even if this task is cancelled. Return whether it was cancelled."""
    is_cancelled = False
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            is_cancelled = True
    return is_cancelled


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended, whatever they raise.

    Once is not enough: ``asyncio.wait_for`` loses a cancellation that comes together with the answer (until Python
    3.12), and the task goes on. A task that is cancelled while it ends others finishes ending them first. Else a task
    among them that has lost its cancellation would go on, and hold up the end of the process.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        try:
            done, pending = await asyncio.wait(pending, timeout=_AGAIN_S)
        except asyncio.CancelledError:
            continue  # raised again by another of the tasks when this is over
        for task in done:
            if not task.cancelled():
                task.exception()  # retrieved, so that asyncio logs no warning


#: For tasks that have nearly ended to be recorded.
_LAST_S = 10.0


class Background:
    """Tasks that run in the background. An exception in one is logged and ends no other."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, work: Coroutine[object, object, None]) -> None:
        """Start a task. Only inside the event loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def stop(self) -> None:
        """Let the tasks end for ten seconds, then cancel the rest. On return none runs."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_LAST_S)
        await end(self._tasks)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("task-failed", task=task.get_name(), problem=repr(task.exception()))
