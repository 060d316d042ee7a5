"""Changes of names, and packs, that wait for the disk: those that came while others were made share durable steps."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from overlay_router.line import Line
from overlay_router.local.small_files import Arrived
from stageout.core import log
from stageout.overlay.wire.messages import Operation

#: Changes that are made together; one connection may have so many waiting.
TOGETHER = 256
#: Have operations, each with the name of the peer that asked, executed and answered.
Execute = Callable[["list[tuple[Operation, str]]"], Awaitable[None]]
#: The same for packs.
ExecutePacks = Callable[["list[Arrived]"], Awaitable[None]]


#: Packs of which the disk has not heard yet, and bytes of all that it has not done with.
_PACKS, _PACKS_BYTES = 16, 32 * 1024 * 1024


class Packs:
    """Packs of all connections that wait for the disk; those that came while others were executed are one batch."""

    def __init__(self, most_bytes: int = _PACKS_BYTES) -> None:
        self._queue: asyncio.Queue[tuple[Line, Arrived]] = asyncio.Queue(_PACKS)
        self._waiting: dict[int, tuple[Arrived, asyncio.Future[None]]] = {}
        self._most_bytes, self._sizes_bytes = most_bytes, dict[int, int]()
        self._next, self._freed = asyncio.Lock(), asyncio.Event()

    @property
    def held_bytes(self) -> int:
        """Of packs that wait for the disk, or are being executed."""
        return sum(self._sizes_bytes.values())

    async def put(self, line: Line, arrived: Arrived, size_bytes: int = 0) -> None:
        """Have a pack executed soon; waits, each in its turn, while many do. :param size_bytes: that it takes."""
        self._waiting[id(arrived)] = arrived, asyncio.get_running_loop().create_future()
        try:
            async with self._next:
                while self._sizes_bytes and self.held_bytes + size_bytes > self._most_bytes:
                    self._freed.clear()
                    await self._freed.wait()
                self._sizes_bytes[id(arrived)] = size_bytes
            await self._queue.put((line, arrived))
        except asyncio.CancelledError:
            self._passed(arrived)
            raise

    def has(self, origin: str, seq: int) -> bool:
        """Tell whether the pack of that origin that begins with that number is waiting."""
        return any((one.pack.origin, one.pack.seq) == (origin, seq) for one, _ in self._waiting.values())

    async def passed(self, concerns: Callable[[Arrived], bool]) -> None:
        """Wait until no such pack is waiting."""
        found = [future for arrived, future in self._waiting.values() if concerns(arrived)]
        if found:
            await asyncio.wait(found)

    async def run(self, execute: ExecutePacks, apart: Callable[[list[Arrived]], list[list[Arrived]]]) -> None:
        """Execute what comes, until cancelled. A failure ends the connections that asked: they say the packs again.

        :param apart: those of one batch that fail together.
        """
        while True:
            waiting = [await self._queue.get()]
            while not self._queue.empty():
                waiting.append(self._queue.get_nowait())
            for batch in apart([arrived for _, arrived in waiting]):
                await self._try(execute, batch, waiting)
                for one in batch:
                    self._passed(one)

    async def _try(self, execute: ExecutePacks, batch: list[Arrived], waiting: list[tuple[Line, Arrived]]) -> None:
        """As of :class:`Changes`."""
        try:
            await execute(batch)
        except Exception as problem:  # nobody must wait for an answer that never comes
            log.error("pack-batch-failed", packs=len(batch), problem=repr(problem))
            if len(batch) > 1 and not isinstance(problem, (OSError, sqlite3.Error)):
                for one in batch:
                    await self._try(execute, [one], waiting)
                return
            asked = {id(one) for one in batch}
            for line in [line for line, arrived in waiting if id(arrived) in asked]:
                line.end(problem)

    def _passed(self, arrived: Arrived) -> None:
        self._sizes_bytes.pop(id(arrived), None)
        self._freed.set()
        _, future = self._waiting.pop(id(arrived))
        if not future.done():
            future.set_result(None)


class _Waiting(NamedTuple):
    operation: Operation
    name: str
    line: Line
    decided: asyncio.Future[None]


class Changes:
    """The queue of all connections."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue()

    def put(self, line: Line, operation: Operation, name: str) -> None:
        """Have an operation executed soon; :meth:`Line.changed` waits for it."""
        line.changes.append(asyncio.get_running_loop().create_future())
        self._queue.put_nowait(_Waiting(operation, name, line, line.changes[-1]))

    async def run(self, execute: Execute) -> None:
        """Execute what comes, until cancelled. A failure ends the connections that asked: they ask again."""
        while True:
            batch = [await self._queue.get()]
            while not self._queue.empty() and len(batch) < TOGETHER:
                batch.append(self._queue.get_nowait())
            await self._try(execute, batch)
            for one in batch:
                if not one.decided.done():
                    one.decided.set_result(None)

    async def _try(self, execute: Execute, batch: list[_Waiting]) -> None:
        """Of a failure that no disk or database explains, only the operation at fault suffers: each is tried alone."""
        try:
            await execute([(one.operation, one.name) for one in batch])
        except Exception as problem:  # nobody must wait for an answer that never comes
            log.error("rename-batch-failed", operations=len(batch), problem=repr(problem))
            if len(batch) > 1 and not isinstance(problem, (OSError, sqlite3.Error)):
                for one in batch:
                    await self._try(execute, [one])
                return
            for one in batch:
                one.line.end(problem)
