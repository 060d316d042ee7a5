"""Custody of one node, put together: spool and ledger, and what keeps the two in agreement."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sandbox_manager.custody.clock_jumps import ClockJumpGuard
from sandbox_manager.custody.ledger import Ledger, Releases, SandboxStore
from sandbox_manager.custody.quota import Space, StateQuota
from sandbox_manager.custody.recovery import OrphanCollector
from sandbox_manager.custody.redirects import FallbackRules, FindPlugin, no_plugin
from sandbox_manager.custody.renewal import Renewal
from sandbox_manager.custody.running import RunningBatches
from sandbox_manager.custody.spool import Spool
from sandbox_manager.custody.syncing import SyncRecords, Syncs
from sandbox_manager.rules import Rules, deadline_of
from stageout.core.clock import Clock, boot_id
from stageout.core.ending import Background

T = TypeVar("T")


class Custody:
    """The parts of custody.

    :param ledger: opened. :param spool: opened. :param rules: returns the settings as they are now.
    :param find_plugin: for the scheme of another URL.
    :param server_problem: returns why a server cannot be reached, "" where it can, or nobody knows.
    :ivar boot: id of the running kernel's boot.
    """

    def __init__(
        self,
        ledger: Ledger,
        spool: Spool,
        clock: Clock,
        rules: Callable[[], Rules],
        find_plugin: FindPlugin = no_plugin,
        server_problem: Callable[[str], str] = lambda server: "",
    ) -> None:
        self.spool, self.clock, self.rules, self.boot = spool, clock, rules, boot_id()
        self.find_plugin, self._server_problem = find_plugin, server_problem
        self.store = SandboxStore(ledger, lambda sandbox: deadline_of(sandbox, rules()))
        self.space, self.running, self.background = Space(), RunningBatches(), Background()
        self._disk = ThreadPoolExecutor(2, "spool")
        self._syncing = ThreadPoolExecutor(1, "sync")  # for as long as the disk needs for the bytes
        self.clock_guard = ClockJumpGuard(self.store, clock, self.boot, lambda: rules().retry.max_delay_s)
        self.state = StateQuota(spool.state, self.store.registry, self._disk, rules)
        self.releases = Releases(
            store=self.store,
            spool=spool,
            space=self.space,
            running=self.running,
            state=self.state,
            disk=self._disk,
            background=self.background,
            clock=clock,
        )
        self.syncs = Syncs(
            spool, self._syncing, SyncRecords(self.store, clock), self.background
        )  # fmt: skip
        self.orphans = OrphanCollector(
            ledger=ledger, spool=spool, disk=self._disk, clock=clock, retention_s=lambda: rules().retention_s
        )
        self.renewal = Renewal(self.store, spool.safe, clock)

    @property
    def fallback_rules(self) -> FallbackRules:
        """Return the rules for the use of fallbacks as they are now."""
        return FallbackRules(self.find_plugin, self.rules().retry.fallback_after_s, self._reason_away)

    def _reason_away(self, destination: int) -> str:
        found = self.store.registry.destinations.get(destination)
        return self._server_problem(found.server) if found else ""

    async def on_disk(self, work: Callable[[], T]) -> T:
        """Run work that may wait for the spool's disk in a thread of its own."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)

    async def stop(self) -> None:
        """Begin nothing more. On return all is recorded and its bytes are freed, or ten seconds have passed."""
        await self.syncs.stop()
        await self.background.stop()
        self._disk.shutdown(wait=True)
        self._syncing.shutdown(wait=True)
