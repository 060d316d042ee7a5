"""The way of one sandbox through this node, top to bottom. Read this first.

1. Accept: a plugin offers files at the socket (``intake/listener.py``). Policy refuses them in ``intake/admission.py``;
   the listener refuses what breaks the protocol or takes too long, ``intake/identity.py`` a peer that is not a job's
   plugin. ``intake/acceptance.py`` reserves room, links the files into the spool (``custody/spool.py``) and records
   them: ``record_handoff`` in ``custody/orders.py`` refuses a run that a newer one has overtaken.
2. Apply orders: the schedd's agent confirms that the run completed, or cancels it. ``report/orders_in.py`` fetches the
   orders and verifies their signature (``report/trust.py``), ``custody/orders.py`` carries them out.
3. Schedule: ``scheduling/planner.py`` plans batches with the queues of ``custody/registry.py``, free data slots and the
   room that ``scheduling/calls.py`` leaves; ``scheduling/scheduler.py`` brings these together. A plan has only the
   number of files: step 4 claims the files themselves.
4. Deliver: :meth:`Pipeline.deliver` sends a batch and records the outcome; ``delivery/batch.py`` has its steps.
5. Release: ``Releases`` in ``custody/ledger.py`` frees the bytes of ended sandboxes. The store calls it after each
   change, once :meth:`Pipeline.recover` has begun.

Each change is in the ledger before anything depends on it (``docs/developer/durable-steps.md``). The sandboxes in
memory are a picture of the ledger (``custody/registry.py``).
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterable

from sandbox_manager.custody import orders, updates
from sandbox_manager.custody.custody import Custody
from sandbox_manager.custody.housekeeping import Housekeeping
from sandbox_manager.custody.ledger import Ledger
from sandbox_manager.custody.redirects import choose_plugin
from sandbox_manager.custody.spool import Spool
from sandbox_manager.delivery.batch import BatchRunner, Delivery
from sandbox_manager.delivery.results import manager_error
from sandbox_manager.intake.acceptance import Acceptance, Manager
from sandbox_manager.intake.admission import Admission, PilotEnd
from sandbox_manager.intake.agents import AgentTable
from sandbox_manager.rules import Rules, deadline_of
from sandbox_manager.scheduling.breaker import Breakers
from sandbox_manager.scheduling.retry import backoff_s
from sandbox_manager.scheduling.scheduler import Scheduler
from sandbox_manager.scheduling.streams import MakeStreams, make_streams
from stageout.core import log
from stageout.core.clock import Clock, wall_now
from stageout.core.streams import ActiveTransfer
from stageout.model.batch import Batch
from stageout.movers.mover import Stopped
from stageout.movers.plugins_table import PluginsTable
from stageout.wire.custody import OrderSheet

_AGAIN_S = 5.0


class Pipeline:
    """The way of all sandboxes of this node. One event loop; :meth:`recover` first, then :meth:`run` beside everything.

    :param ledger: opened. :param spool: opened. :param table: loaded. :param streams: makes the chooser of streams.
    """

    def __init__(
        self,
        manager: Manager,
        ledger: Ledger,
        spool: Spool,
        table: PluginsTable,
        rules: Rules,
        agents: AgentTable,
        clock: Clock,
        streams: MakeStreams = make_streams,
    ) -> None:
        self.manager, self.rules, self._clock = manager, rules, clock
        breakers = Breakers(clock, lambda failures: backoff_s(self.rules.retry, failures))
        self.custody = custody = Custody(
            ledger=ledger,
            spool=spool,
            clock=clock,
            rules=lambda: self.rules,
            find_plugin=lambda path, scheme: choose_plugin(table, self.rules.require_verified, path, scheme),
            server_problem=breakers.reason,
        )
        self.store, self.scheduler = custody.store, Scheduler(custody, table, breakers, streams)
        self.runner = BatchRunner(custody, table, self.scheduler)
        end = PilotEnd(self.store.registry, self.scheduler.throughput, clock, custody.rules)
        self.admission = Admission(
            registry=self.store.registry,
            agents=agents,
            table=table,
            flow=self.scheduler.flow,
            spool=spool,
            end=end,
            rules=custody.rules,
            space=custody.space,
            state_bytes=custody.state.bytes_by_uid,
        )
        self.acceptance = Acceptance(manager, custody, self.admission, self.scheduler.rates)
        self.housekeeping = Housekeeping(custody, lambda: self.scheduler.busy_sandboxes)

    async def recover(self) -> None:
        """Bring ledger, spool and processes into agreement after the end of the last manager, also a crash."""
        await self.scheduler.load()
        await self.housekeeping.recover()

    def resume_syncs(self) -> None:
        """Sync output that :meth:`recover` has found unsynced. Call this when the start cannot fail any more."""
        self.housekeeping.resume_syncs()

    # ---- apply orders ------------------------------------------------------------------------------------------------

    async def apply_orders(self, sheet: OrderSheet) -> None:
        """Carry out the orders of a sheet that are not done yet. On return they are durable and acknowledged.

        Only then the agent's acknowledgement of the last report counts, because it came together with the orders.
        """
        await self._apply(sheet)
        self.scheduler.leases.mark_read(sheet.agent, sheet.heard, sheet.lease_s)
        self.store.wake.set()

    async def _apply(self, sheet: OrderSheet) -> None:
        done = self.store.acknowledged.get(sheet.numbering, 0)
        last = max((order.number for order in sheet.orders), default=0)
        if last <= done:
            return
        await self.store.write(lambda db: self._orders_of(db, sheet), "record-order", orders={sheet.numbering: last})
        for order in sheet.orders:
            if order.number > done:
                log.event("order-applied", agent=sheet.agent, number=order.number, action=order.action.value,
                          job=order.job, run=order.run_number)  # fmt: skip

    def _orders_of(self, db: sqlite3.Connection, sheet: OrderSheet) -> Iterable[int]:
        self.scheduler.leases.want(db, sheet.agent, sheet.lease_s)
        return orders.apply_orders(db, sheet, wall_now(self.custody.clock), self.custody.find_plugin)

    # ---- schedule and deliver ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Start batches whenever something may be sent; returns when cancelled."""
        while True:
            self.store.wake.clear()
            self.start_batches()
            await self.scheduler.wait()

    def start_batches(self) -> None:
        """Start what may be sent now; each batch goes on by itself."""
        for batch, transfer in self.scheduler.next_batches():
            self.custody.background.run(self.deliver(batch, transfer))

    async def deliver(self, batch: Batch, transfer: ActiveTransfer) -> None:
        """Send one batch, from its place in the data slots to its record. Places are given back in any case.

        The durable steps are those of "Moving" in ``docs/developer/durable-steps.md``, in the same order.
        """
        write, delivery, is_recorded = self.store.write, Delivery(self.runner, batch, transfer), False
        try:
            # Its sandboxes get their places in the data slots. Then its files are MOVING, with one attempt more.
            await write(lambda db: updates.activate(db, batch.sandboxes, wall_now(self._clock)), "record-leased")
            await write(lambda db: delivery.claim(db), "record-moving")
            delivery.keep_claim()
            if delivery.is_hand_over:
                # Access points read whom to ask for files that a custodian may have from now on: "report-advertise".
                await self.runner.announcer.announce()
            if not delivery.files or delivery.is_overtaken:
                return

            # The plugin runs in a thread: "mover-exec". When it is stopped, what it has delivered by then counts.
            with delivery.running() as run:
                try:
                    answers = await delivery.send(run)
                except Stopped as stopped:
                    arrived = stopped.delivered
                    if arrived:
                        await write(lambda db: delivery.record_arrived(db, arrived), "record-delivered")
                    return

            # Each file is delivered, in custody elsewhere, to be tried again, failed for good, or gone from the spool.
            unknown_name = delivery.check_name(run, answers)
            await self.custody.clock_guard.check()
            outcome = delivery.decide(answers, run.answered, unknown_name)
            results = {
                "record-delivered": outcome.delivered,
                "record-handed-over": outcome.handed_over,
                "record-retry": outcome.waiting,
                "record-failed": outcome.failed,
                "record-lost": outcome.lost,
            }
            labels = [label for label, files in results.items() if files]
            lessons = delivery.learn(run, outcome)
            await write(lambda db: delivery.record(db, outcome, lessons), *labels)
            is_recorded = True
        except (OSError, sqlite3.Error) as problem:
            log.error("batch-failed", server=batch.server, problem=problem)
            # A full disk would stay full: sending is what makes room.
            if not await self.store.ledger.give_up_reserve():
                await asyncio.sleep(_AGAIN_S)
        except Exception as problem:
            log.error("batch-failed", server=batch.server, problem=repr(problem), advice="report this as a bug")
            is_recorded = await self._record_error(delivery, problem)
            if not is_recorded:
                await asyncio.sleep(_AGAIN_S)
        finally:
            self.scheduler.plugin_ended(batch, transfer)
            if not is_recorded:
                await self._requeue(delivery)
            self.scheduler.batch_ended(batch)

    async def _record_error(self, delivery: Delivery, problem: Exception) -> bool:
        """Record an error of the manager as a failure of each file, so that it ends. Return False when that fails."""
        if not delivery.files:
            return False
        try:
            outcome = delivery.decide([manager_error(problem)] * len(delivery.files))
            results = {"record-retry": outcome.waiting, "record-failed": outcome.failed}
            labels = [label for label, files in results.items() if files]
            await self.store.write(lambda db: delivery.record(db, outcome), *labels)
        except Exception as second:
            log.error("batch-failed", server=delivery.server, problem=repr(second), advice="report this as a bug")
            return False
        return True

    async def _requeue(self, delivery: Delivery) -> None:
        """Let files of the batch that have no outcome wait again, and their sandboxes with them.

        Done again until it is recorded, or the manager stops (the next start does it): nothing else takes them up.
        """
        while True:
            try:
                await self.store.write(delivery.requeue)
                return
            except (OSError, sqlite3.Error) as problem:
                log.error("requeue-failed", problem=problem, again_in_s=_AGAIN_S)
            if not self.scheduler.is_sending:
                return
            await asyncio.sleep(_AGAIN_S)

    # ---- look after what waits ---------------------------------------------------------------------------------------

    async def run_housekeeping(self) -> None:
        """Let deadlines pass that nothing else looks at: unconfirmed, given up, kept long enough."""
        await self.housekeeping.run_housekeeping()

    async def forget_old_jobs(self) -> None:
        """Forget jobs without output here that no message named for the retention time, and collect orphans."""
        self.scheduler.shares.fade(self._clock.monotonic_s())
        await self.housekeeping.forget_old_jobs()

    def new_rules(self, rules: Rules) -> None:
        """Take over a changed configuration; running batches are not touched."""
        self.rules = rules
        self.store.registry.order_anew(lambda sandbox: deadline_of(sandbox, rules))
        self.scheduler.calls.new_rules(rules.tuning)
        self.store.wake.set()
        self.store.changed.set()

    # ---- stop --------------------------------------------------------------------------------------------------------

    def stop_accepting(self) -> None:
        """Refuse hand-offs."""
        self.admission.stop()

    async def stop(self, grace_s: float) -> None:
        """Take and send nothing more, as above, and wait until all is recorded and its bytes are freed."""
        self.stop_accepting()
        await self.scheduler.stop_sending(grace_s)
        await self.custody.stop()
        self.runner.close()
