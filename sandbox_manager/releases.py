"""The end of a sandbox on this node: its bytes are freed, its record goes when the agent has let go of it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Executor

from sandbox_manager import records
from sandbox_manager.book import Book
from sandbox_manager.sandbox import Sandbox
from sandbox_manager.space import Space
from sandbox_manager.spool import Spool
from stageout.core import log
from stageout.core.states import FREED, State

_AGAIN_S = 30.0


class Releases:
    """The tickets that are being freed.

    :param disk: where the removing is done. :param background: runs a task. :param now: wall clock, seconds.
    :param freed: is told the account whose output was freed.
    """

    def __init__(
        self,
        book: Book,
        spool: Spool,
        space: Space,
        disk: Executor,
        background: Callable[[Coroutine[object, object, None]], None],
        now: Callable[[], int],
        freed: Callable[[int], Awaitable[None]],
    ) -> None:
        self._book, self._spool, self._space, self._disk = book, spool, space, disk
        self._background, self._now, self._freed = background, now, freed
        self._under_way: set[int] = set()

    def consider(self, boxes: Iterable[Sandbox]) -> None:
        """Release the bytes of sandboxes that need them no more, and forget records that may go. In the background."""
        for box in boxes:
            done = box.state in FREED and (not box.freed or box.state is State.DELIVERED or box.forgettable)
            partly = not box.freed and box.confirmed_at and set(box.tickets) - set(box.named_tickets)
            if (done or partly) and box.id not in self._under_way:
                self._under_way.add(box.id)
                self._background(self._free(box.id))

    async def _free(self, sandbox: int) -> None:
        known = self._book.registry.by_id.get(sandbox)
        loop = asyncio.get_running_loop()
        try:
            tickets = await self._book.ledger.read(lambda db: records.dropped_tickets(db, sandbox))
            for ticket in tickets:
                await loop.run_in_executor(self._disk, self._spool.release, ticket)
                self._space.drop(ticket)
            left = await self._book.write(
                lambda db: records.released(db, sandbox, tickets, self._now()), "record-released"
            )
        except (OSError, sqlite3.Error) as problem:
            log.error("spool-release", sandbox=sandbox, problem=problem, again_in_s=_AGAIN_S)
            await asyncio.sleep(_AGAIN_S)
            self._background(self._free(sandbox))
            return
        self._under_way.discard(sandbox)
        self.consider(box for box in left if box.state in FREED)
        if known is not None:
            await self._freed(known.uid)
