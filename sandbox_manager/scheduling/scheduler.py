"""The choice of the next batches, and everything that it depends on: who may send what to which server now."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping

from sandbox_manager.custody.custody import Custody
from sandbox_manager.custody.ledger import get_meta
from sandbox_manager.scheduling.breaker import Breakers, Flow
from sandbox_manager.scheduling.calls import Calls, Target
from sandbox_manager.scheduling.leases import Leases
from sandbox_manager.scheduling.planner import Load, PlanInput, Shares, plan
from sandbox_manager.scheduling.rates import Rates
from sandbox_manager.scheduling.slots import SlotUsage
from sandbox_manager.scheduling.streams import MakeStreams
from sandbox_manager.scheduling.throughput import Throughput
from stageout.core.clock import asleep_s, wall_now
from stageout.core.streams import ActiveTransfer
from stageout.model.batch import Batch
from stageout.model.sandbox import Destination, Sandbox
from stageout.movers.plugins_table import PluginsTable
from stageout.movers.schemes import method_of

#: Name of the breakers' record in the ledger.
BREAKERS = "breakers"
_IDLE_S = 30.0
_COALESCE_S = 0.02
_LEASES_INTERVAL_S = 5.0
_LOOK_INTERVAL_S = 0.05
#: Seconds without any answer to files that are sent to a server, after which the manager regards it as away.
_SILENT_S = 30.0


class Scheduler:
    """The scheduler of one node.

    :param table: loaded. :param breakers: of the servers. :param streams: makes the chooser of streams.
    :ivar most_files: in one batch, by method, where a custodian takes more than the limit.
    """

    def __init__(self, custody: Custody, table: PluginsTable, breakers: Breakers, streams: MakeStreams) -> None:
        self._custody, self._table, self._store, self._running = custody, table, custody.store, custody.running
        self._clock = clock = custody.clock
        self._rules = rules = custody.rules
        self.breakers = breakers
        self.throughput = Throughput()
        self.shares = Shares()
        self.rates = Rates()
        self.calls = Calls(rules().tuning, clock, lambda server: self.rates.level(server, clock.wall_s()), streams)
        self.leases = Leases(clock, asleep_s)
        self.is_sending = True
        self.most_files: dict[str, int] = {}
        self._load = Load()

    async def load(self) -> None:
        """Read what earlier starts have learnt (at start)."""
        ledger = self._store.ledger
        self.breakers.restore(await ledger.read(lambda db: get_meta(db, BREAKERS)))
        await ledger.read(self.rates.load)
        await ledger.read(self.leases.load)

    # ---- the next batches --------------------------------------------------------------------------------------------

    def next_batches(self) -> list[tuple[Batch, ActiveTransfer]]:
        """Return the batches to start now. Each counts as active until :meth:`batch_ended`."""
        if not self.is_sending:
            return []
        registry, now_s = self._store.registry, self._clock.monotonic_s()
        limits, flow = self._rules().limits, self.breakers.flow
        places = SlotUsage(registry.occupying(), registry.destinations, limits)
        inputs = PlanInput(
            destinations=registry.destinations,
            slot_usage=places,
            limits=limits,
            load=self._load,
            flow=flow,
            share=lambda owner: self.shares.of(owner, now_s),
            now=wall_now(self._custody.clock),
            batch_files=self._batch_files,
            room=self._room,
            may_send=self._may_send,
        )
        self.calls.waiting(self._files_waiting)
        batches = plan(registry.backlog, inputs)
        return [(batch, self._start(batch, batches[place + 1 :])) for place, batch in enumerate(batches)]

    def _start(self, batch: Batch, others: Collection[Batch]) -> ActiveTransfer:
        """Reserve what a batch needs. :param others: that start after it."""
        self.breakers.started(batch.server)
        later = sum(other.server == batch.server for other in others)
        target = self._target(self._store.registry.destinations[batch.destination])
        return self.calls.start(target, batch.owner, batch.planned_files, later)

    async def wait(self) -> None:
        """Wait until something may be sent: a change, a waiting file that is due, a probe of a server."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._store.wake.wait(), self._until_next_s())
        await asyncio.sleep(_COALESCE_S)

    def _until_next_s(self) -> float:
        """Seconds until a waiting file is due or a breaker lets a probe through."""
        backlog = self._store.registry.backlog
        waits_s = (backlog.wakes_at() - wall_now(self._custody.clock), self.breakers.soonest_s() or _IDLE_S, _IDLE_S)
        return max(0.05, min(waits_s))

    def _files_waiting(self) -> Mapping[str, int]:
        """Return the files that are due, by server, for which the policy service is asked for streams."""
        most, flow = self._rules().tuning.knobs.maximum, self.breakers.flow
        return self._store.registry.files_waiting(
            lambda at: flow(at) is not Flow.NONE, most, wall_now(self._custody.clock)
        )

    def _room(self, destination: Destination, owner: str) -> int:
        """Files that a further batch of an owner may move at once to a destination."""
        planned = self._load.by_server[destination.server] - self.calls.active(destination.server)
        return self.calls.room(self._target(destination), owner, planned)

    def _batch_files(self, destination: Destination) -> int:
        """Files that a call of a destination's plugin would rather have than the limit, 0 for no wish."""
        most = self.most_files.get(method_of(destination.scheme))
        return self._table.batch_files(destination.plugin, destination.scheme) if most is None else most

    def _target(self, destination: Destination) -> Target:
        plugin = self._table.find(destination.plugin, destination.scheme)
        if plugin is None:
            return Target(destination.server)
        return Target(destination.server, plugin.several, method_of(destination.scheme) in plugin.multi_stream_methods)

    def _may_send(self, sandbox: Sandbox) -> bool:
        """Tell whether the lease of its access point holds and no plugin sends output of another run of the job."""
        return self.leases.holds(sandbox.run.schedd) and not self._running.sends_other_run(sandbox.run.key, sandbox.id)

    # ---- servers -----------------------------------------------------------------------------------------------------

    def flow(self, server: str) -> Flow:
        """Return how much may be sent to a server: nothing to one that has not answered for long."""
        is_silent = self._running.is_silent(server, self._clock.monotonic_s() - _SILENT_S)
        return Flow.NONE if is_silent else self.breakers.flow(server)

    def is_open(self, destination: int) -> bool:
        """Tell whether files may be sent to a destination now."""
        place = self._store.registry.destinations.get(destination)
        return place is None or self.breakers.opens_in_s(place.server) <= 0

    # ---- batches that end --------------------------------------------------------------------------------------------

    def plugin_ended(self, batch: Batch, transfer: ActiveTransfer) -> None:
        """Give back the streams of a batch. A probe that learnt nothing is due again."""
        self.calls.end(transfer)
        if batch.probe:
            self.breakers.stopped(batch.server)

    def batch_ended(self, batch: Batch) -> None:
        """Give back the places of a batch whose results are recorded, or whose files wait again."""
        self._load.end(batch)
        self._store.wake.set()

    @property
    def busy_sandboxes(self) -> Collection[int]:
        """Sandboxes with files in a mover or about to be."""
        return frozenset(sandbox for sandbox, _ in self._load.running)

    async def keep_leases(self) -> None:
        """Stop what may not be sent any more; returns when cancelled."""
        while True:
            for batch in self._running:
                if not all(self.leases.holds(job.schedd) for job in batch.jobs):
                    batch.stop()
            if self.leases.changed():
                self._store.changed.set()
            await asyncio.sleep(_LEASES_INTERVAL_S)

    async def stop_sending(self, grace_s: float) -> None:
        """Start no further batch, let running ones end for ``grace_s`` seconds, stop the rest."""
        self.is_sending = False
        deadline = self._clock.monotonic_s() + grace_s
        while self._load.movers:
            if self._clock.monotonic_s() >= deadline:
                self._running.stop_all()
            await asyncio.sleep(_LOOK_INTERVAL_S)
