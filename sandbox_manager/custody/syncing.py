"""The syncing of accepted data to the disk after the receipts. Later data are synced together in the next step.

The kernel tells the failure of a write to one sync only; a later one of the same file succeeds over zeros. So the
ledger says that a sync begins before it does. Output that the disk refuses, or whose sync began and never ended, is
LOST.

The names of all tickets are in the same two directories: synced together, these are synced once, and all of the
tickets are recorded in one change.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor

from sandbox_manager.custody import recovery, updates
from sandbox_manager.custody.ledger import SandboxStore
from sandbox_manager.custody.spool import Spool, Synced
from stageout.core import log
from stageout.core.clock import Clock, wall_now
from stageout.core.ending import Background
from stageout.core.metrics import DISK_BOUNDS, Histogram

_TICKETS = 200
#: More bytes than these are not waited for by the record of what is on the disk already.
_BYTES = 64 * 1024 * 1024
_AGAIN_S = 30.0
_LOOK_INTERVAL_S = 0.05


class SyncRecords:
    """The ledger's records of syncs."""

    def __init__(self, store: SandboxStore, clock: Clock) -> None:
        self._store, self._clock = store, clock

    async def begin(self, tickets: Sequence[str]) -> None:
        """Record that the sync of these tickets begins."""
        await self._store.ledger.write(lambda db: updates.mark_syncing(db, tickets), "record-syncing")

    async def record(self, synced: Synced) -> None:
        """Record which data are on the disk, and that the sandboxes of those that the disk has lost are LOST."""
        labels = [*(["record-synced"] if synced.on_disk else ()), *(["record-lost"] if synced.lost else ())]
        now = wall_now(self._clock)
        await self._store.write(lambda db: recovery.record_synced(db, synced.on_disk, synced.lost, now), *labels)


class Syncs:
    """The sync of tickets whose data may not be on the disk yet.

    :param executor: one thread: a sync lasts as long as the disk needs for the bytes.
    :ivar durations: of syncs.
    """

    def __init__(self, spool: Spool, executor: Executor, records: SyncRecords, background: Background) -> None:
        self._spool = spool
        self._executor = executor
        self._records = records
        self._background = background
        self.durations = Histogram(DISK_BOUNDS)
        self._waiting: deque[tuple[str, int]] = deque()
        self._is_running = False
        self._stopping = asyncio.Event()

    def add(self, ticket: str, size_bytes: int = 0) -> None:
        """Sync the files of a ticket, which are in the spool, in the background."""
        self._waiting.append((ticket, size_bytes))
        if not self._is_running:
            self._is_running = True
            self._background.run(self._run())

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
        """Sync tickets. Write back first, to keep the sync short: output in a sync is LOST if the manager dies."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._executor, self._spool.write_back, tickets)
        if self._stopping.is_set() or not await self._written(lambda: self._records.begin(tickets)):
            return
        began_s = loop.time()
        try:
            synced = await loop.run_in_executor(self._executor, self._spool.sync, tickets)
        except OSError as problem:
            log.error("spool-sync-failed", tickets=",".join(tickets), problem=problem)
            synced = Synced(again=list(tickets))
        self.durations.observe(loop.time() - began_s)
        for ticket in synced.again:
            loop.call_later(_AGAIN_S, self.add, ticket)
        if synced.on_disk or synced.lost:
            await self._written(lambda: self._records.record(synced))

    async def _written(self, write: Callable[[], Awaitable[None]]) -> bool:
        """Write to the ledger until it succeeds. Return False if the manager stops before."""
        while True:
            try:
                await write()
                return True
            except Exception as problem:
                log.error("sync-write-failed", problem=repr(problem), again_in_s=_AGAIN_S)
            if self._stopping.is_set():
                return False
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _AGAIN_S)
