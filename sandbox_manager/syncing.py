"""Brings accepted data to the disk, behind the receipts. What comes in meanwhile is synced together next.

The kernel tells the failure of a write to one sync only; a later one of the same file succeeds over zeros. So the
ledger says that a sync begins before it does. What the disk refuses, or what has begun without an end, is LOST.

The names of all tickets are in the same two directories: synced together, these are synced once, and all of the
tickets are recorded in one change.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor

from sandbox_manager.spool import Spool, Synced
from stageout.core import log

_TICKETS = 200
#: More bytes than these are not waited for by the record of what is on the disk already.
_BYTES = 64 * 1024 * 1024
_AGAIN_S = 30.0
_LOOK_INTERVAL_S = 0.05


class Syncs:
    """Tickets whose data may not be on the disk yet.

    :param executor: one thread: a sync lasts as long as the disk needs for the bytes.
    :param begin: writes that these tickets are about to be synced. :param record: writes what came of it.
    :param background: runs a task.
    """

    def __init__(
        self,
        spool: Spool,
        executor: Executor,
        begin: Callable[[Sequence[str]], Awaitable[None]],
        record: Callable[[Synced], Awaitable[None]],
        background: Callable[[Coroutine[object, object, None]], None],
    ) -> None:
        self._spool = spool
        self._executor = executor
        self._begin = begin
        self._record = record
        self._background = background
        self._waiting: deque[tuple[str, int]] = deque()
        self._is_running = False
        self._stopping = asyncio.Event()

    def add(self, ticket: str, size_bytes: int = 0) -> None:
        """A ticket's files are in the spool."""
        self._waiting.append((ticket, size_bytes))
        if not self._is_running:
            self._is_running = True
            self._background(self._run())

    async def stop(self) -> None:
        """Begin no further sync; on return what had begun is recorded, or the ledger cannot be written."""
        self._stopping.set()
        while self._is_running:
            await asyncio.sleep(_LOOK_INTERVAL_S)

    async def _run(self) -> None:
        try:
            while self._waiting and not self._stopping.is_set():
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
        """Have the bytes written first: what has begun without an end when the manager dies is LOST."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._executor, self._spool.write_back, tickets)
        if self._stopping.is_set() or not await self._written(lambda: self._begin(tickets)):
            return
        try:
            synced = await loop.run_in_executor(self._executor, self._spool.sync, tickets)
        except OSError as problem:
            log.error("spool-sync", tickets=",".join(tickets), problem=problem)
            synced = Synced(again=list(tickets))
        for ticket in synced.again:
            loop.call_later(_AGAIN_S, self.add, ticket)
        if synced.on_disk or synced.lost:
            await self._written(lambda: self._record(synced))

    async def _written(self, write: Callable[[], Awaitable[None]]) -> bool:
        """Write to the ledger until it takes it. False when the manager stops before that."""
        while True:
            try:
                await write()
                return True
            except Exception as problem:
                log.error("record-synced", problem=repr(problem), again_in_s=_AGAIN_S)
            if self._stopping.is_set():
                return False
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _AGAIN_S)
