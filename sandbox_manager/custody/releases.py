"""The end of a sandbox on this node: its bytes are freed, its record goes when the agent has let go of it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor

from sandbox_manager.custody import updates
from sandbox_manager.custody.background import Background
from sandbox_manager.custody.running import RunningBatches
from sandbox_manager.custody.space import Space
from sandbox_manager.custody.spool import Spool
from sandbox_manager.custody.state_quota import StateQuota
from sandbox_manager.custody.store import SandboxStore
from sandbox_manager.sandbox import Sandbox
from stageout.core import log
from stageout.core.clock import Clock, wall_now
from stageout.core.states import FREED, State

_AGAIN_S = 30.0


class Releases:
    """The tickets that are being freed.

    :param running: the batches that must be stopped before. :param disk: where the removing is done.
    :param state: of plugins, which goes with the last output of its account.
    """

    def __init__(
        self,
        store: SandboxStore,
        spool: Spool,
        space: Space,
        running: RunningBatches,
        state: StateQuota,
        disk: Executor,
        background: Background,
        clock: Clock,
    ) -> None:
        self._store, self._spool, self._space, self._disk = store, spool, space, disk
        self._running, self._state, self._background, self._clock = running, state, background, clock
        self._under_way: set[int] = set()

    def follow(self, boxes: Sequence[Sandbox]) -> None:
        """Act on a change: stop sending files of an ended sandbox, and free its bytes. The store calls this."""
        ended = {box.id for box in boxes if box.state in FREED}
        if ended:
            self._running.stop_of(ended)
        self.consider(boxes)

    def consider(self, boxes: Iterable[Sandbox]) -> None:
        """Release the bytes of sandboxes that need them no more, and forget records that may go. In the background."""
        for box in boxes:
            done = box.state in FREED and (not box.freed or box.state is State.DELIVERED or box.forgettable)
            partly = not box.freed and box.confirmed_at and set(box.tickets) - set(box.named_tickets)
            if (done or partly) and box.id not in self._under_way:
                self._under_way.add(box.id)
                self._background.run(self._free(box.id))

    async def _free(self, sandbox: int) -> None:
        known = self._store.registry.by_id.get(sandbox)
        loop = asyncio.get_running_loop()
        try:
            tickets = await self._store.ledger.read(lambda db: updates.dropped_tickets(db, sandbox))
            box = self._store.registry.by_id.get(sandbox)
            if not tickets and box is not None and box.state not in FREED:
                self._under_way.discard(sandbox)  # what its record does not name is freed already
                return
            for ticket in tickets:
                await loop.run_in_executor(self._disk, self._spool.release, ticket)
                self._space.drop(ticket)
            left = await self._store.write(
                lambda db: updates.released(db, sandbox, tickets, wall_now(self._clock)), "record-released"
            )
        except (OSError, sqlite3.Error) as problem:
            log.error("spool-release-failed", sandbox=sandbox, problem=problem, again_in_s=_AGAIN_S)
            await asyncio.sleep(_AGAIN_S)
            self._background.run(self._free(sandbox))
            return
        self._under_way.discard(sandbox)
        self.consider(box for box in left if box.state in FREED)
        if known is not None:
            await self._state.account_freed(known.uid)
