"""Brings accepted data to the disk, behind the receipts. What comes in meanwhile is synced together next.

The names of all tickets are in the same two directories: synced together, these are synced once, and all of the
tickets are recorded in one change.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor

from sandbox_manager.spool import Spool
from stageout.core import log

_TICKETS = 200
#: More bytes than these are not waited for by the record of what is on the disk already.
_BYTES = 64 * 1024 * 1024


class Syncs:
    """Tickets whose data may not be on the disk yet.

    :param executor: one thread: a sync lasts as long as the disk needs for the bytes.
    :param record: writes that these tickets are synced. :param background: runs a task.
    """

    def __init__(
        self,
        spool: Spool,
        executor: Executor,
        record: Callable[[Sequence[str]], Awaitable[None]],
        background: Callable[[Coroutine[object, object, None]], None],
    ) -> None:
        self._spool = spool
        self._executor = executor
        self._record = record
        self._background = background
        self._waiting: deque[tuple[str, int]] = deque()
        self._is_running = False

    def add(self, ticket: str, size_bytes: int = 0) -> None:
        """A ticket's files are in the spool. What fails is said in the log, and done again at the next start."""
        self._waiting.append((ticket, size_bytes))
        if not self._is_running:
            self._is_running = True
            self._background(self._run())

    async def _run(self) -> None:
        try:
            while self._waiting:
                await self._sync(self._next())
        finally:
            self._is_running = False

    def _next(self) -> list[str]:
        ticket, size_bytes = self._waiting.popleft()
        tickets, left_bytes = [ticket], _BYTES - size_bytes
        while self._waiting and len(tickets) < _TICKETS and self._waiting[0][1] <= left_bytes:
            ticket, size_bytes = self._waiting.popleft()
            tickets.append(ticket)
            left_bytes -= size_bytes
        return tickets

    async def _sync(self, tickets: Sequence[str]) -> None:
        try:
            synced = await asyncio.get_running_loop().run_in_executor(self._executor, self._spool.sync, tickets)
        except OSError as problem:
            log.error("spool-sync", tickets=",".join(tickets), problem=problem)
            return
        try:
            if synced:
                await self._record(synced)
        except Exception as problem:
            log.error("record-synced", tickets=",".join(synced), problem=repr(problem))
