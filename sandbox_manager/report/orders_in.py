"""Look for agents and their orders in the collector, and apply them."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Mapping, Sequence

from sandbox_manager.pipeline import Pipeline
from sandbox_manager.report.collector import Collector
from sandbox_manager.report.trust import AgentKeys, OrderVerifier
from stageout.condor.bindings import CondorError
from stageout.core import log
from stageout.core.clock import Clock
from stageout.core.states import State

#: An access point that is up confirms sooner than this; a sandbox older than this waits for one that is away.
_CONFIRMATION_SOON_S = 600.0
_REST_FACTOR = 6.0
_REST_MAX_S = 60.0
#: Of a lease, which comes with the orders.
_LEASE_SHARE = 1 / 6


class OrderReader:
    """The reader of one manager's order ads.

    :param keys: of agents; saved before the orders that they sign are applied.
    :param interval_s: returns the seconds between two looks while something waits for an order.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        verifier: OrderVerifier,
        keys: AgentKeys,
        collector: Collector,
        clock: Clock,
        interval_s: Callable[[], float],
    ) -> None:
        self._pipeline, self._verifier, self._keys = pipeline, verifier, keys
        self._collector, self._clock, self._interval_s = collector, clock, interval_s

    async def run(self) -> None:
        """Look until cancelled."""
        answered, looked_s, found = None, float("-inf"), False
        while True:
            interval_s = self._interval_s()
            rests_s = self._poll_interval_s(interval_s) if answered else interval_s
            if self._clock.monotonic_s() - looked_s < rests_s:
                await asyncio.sleep(interval_s)
                continue
            looked_s = self._clock.monotonic_s()
            try:
                ads = await self._collector.messages(self._pipeline.manager.name)
            except CondorError as problem:
                if answered is not False:
                    log.warn("collector-lost", problem=problem)
                answered = False
            else:
                if answered is False:
                    log.event("collector-recovered")
                if answered is False or (found and not ads):
                    # It refused the last report, or it was started again and has none: do not wait for the next.
                    self._pipeline.store.changed.set()
                answered, found = True, bool(ads)
                await self._apply(ads)
            await asyncio.sleep(interval_s)

    def _poll_interval_s(self, interval_s: float) -> float:
        """Return the seconds between two queries for orders.

        The pause is longer while no output waits for a confirmation or a lease, because the collector serves all nodes
        of the pool.
        """
        since_at = self._clock.wall_s() - _CONFIRMATION_SOON_S
        sandboxes = self._pipeline.store.registry.by_id.values()
        waits = any(sandbox.state is State.ACCEPTED and sandbox.accepted_at > since_at for sandbox in sandboxes)
        leases = self._pipeline.scheduler.leases
        if waits or leases.missing():
            return interval_s
        return max(interval_s, leases.interval_s(min(_REST_FACTOR * interval_s, _REST_MAX_S), _LEASE_SHARE))

    async def _apply(self, ads: Sequence[Mapping[str, object]]) -> None:
        store = self._pipeline.store
        held = frozenset(sandbox.run.schedd for sandbox in store.registry.by_id.values())
        sheets = self._verifier.sheets(ads, held)
        try:
            if self._keys.pop_unsaved():
                await store.ledger.write(self._keys.save, "agent-pinned")
            for sheet in sheets:
                await self._pipeline.apply_orders(sheet)
        except (OSError, sqlite3.Error) as problem:
            self._keys.not_saved()
            log.error("order-write-failed", problem=problem)
