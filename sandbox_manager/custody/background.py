"""Work that goes on beside its caller: releases, syncs, batches."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from stageout.core import log
from stageout.core.ending import end

#: For tasks that have nearly ended to be recorded.
_LAST_S = 10.0


class Background:
    """Tasks that nobody waits for. A fault in one is logged and ends no other."""

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
