"""The end of tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

_AGAIN_S = 0.5


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended, whatever they raise.

    Once is not enough: ``asyncio.wait_for`` loses a cancellation that comes together with the answer (until Python
    3.12), and the task goes on. Whoever is cancelled while it ends others ends them first: else a task among them that
    has lost its cancellation would go on, and hold up the end of the process.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        try:
            done, pending = await asyncio.wait(pending, timeout=_AGAIN_S)
        except asyncio.CancelledError:
            continue  # said again, by another of these, when this is over
        for task in done:
            if not task.cancelled():
                task.exception()  # looked at, so that nobody complains
