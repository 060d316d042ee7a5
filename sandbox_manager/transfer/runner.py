"""One batch from lease to record: its files are claimed, the plugin runs, the outcome is decided and recorded."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from sandbox_manager.custody import queries, updates
from sandbox_manager.custody.credentials import StoredCredentials
from sandbox_manager.custody.custody import Custody
from sandbox_manager.custody.ledger import set_meta
from sandbox_manager.custody.running import RunningBatch
from sandbox_manager.file import StoredFile
from sandbox_manager.sandbox import Destination
from sandbox_manager.scheduling import rates
from sandbox_manager.scheduling.names import NameRecord
from sandbox_manager.scheduling.planner import BatchPlan
from sandbox_manager.scheduling.rates import Known, call_limits, call_settings
from sandbox_manager.scheduling.retry import BatchOutcome
from sandbox_manager.scheduling.scheduler import BREAKERS, Scheduler
from sandbox_manager.scheduling.throughput import Amount
from sandbox_manager.scheduling.tuner import ActiveTransfer
from sandbox_manager.transfer.batch import (
    BatchRun,
    claim_files,
    decide_batch,
    job_names,
    lease,
    manager_error,
    mark_lost,
    record_arrived,
    requeue,
    update_breaker,
    update_state,
)  # fmt: skip
from sandbox_manager.transfer.handover import BATCH_FILES, METHOD, DrainTarget
from sandbox_manager.transfer.totals import ServerTotals, TransferTotals
from stageout.core import log
from stageout.core.errors import SILENT
from stageout.core.pools import Pool
from stageout.core.states import FREED
from stageout.movers.mover import Stopped
from stageout.movers.plugins_table import PluginsTable
from stageout.movers.results import Answer, Gone, only_delivered

_AGAIN_S = 5.0
_PLUGINS_END_S = 0.1


def _amount(files: Sequence[StoredFile]) -> Amount:
    return Amount(len(files), sum(item.size_bytes for item in files))


async def _nobody() -> None:
    """Report nothing."""


class BatchRunner:
    """The runner of one node's batches.

    :param table: loaded. :param scheduler: that plans the batches.
    :ivar tell: waits until access points can read what is in the ledger now.
    :ivar hand_over_to: the custodian that gets what it takes, None: everything goes to its destination.
    :ivar totals: of all batches since the start. :ivar servers: likewise, by server.
    """

    def __init__(self, custody: Custody, table: PluginsTable, scheduler: Scheduler) -> None:
        self.custody, self.table, self.scheduler = custody, table, scheduler
        self.tell: Callable[[], Awaitable[None]] = _nobody
        self.hand_over_to: DrainTarget | None = None
        self.batches_sent = 0
        self.totals, self.servers = TransferTotals(), ServerTotals()
        self.names = NameRecord()
        self.movers = Pool(64, "mover")

    async def run(self, batch: BatchPlan, transfer: ActiveTransfer) -> None:
        """Move one batch from lease to record; whatever goes wrong, its places are given back."""
        await Delivery(self, batch, transfer).run()

    def hand_over(self, to: DrainTarget) -> None:
        """From now on a custodian gets what it takes; what is on its way to a slower end is given to it instead."""
        self.hand_over_to = to
        self.scheduler.most_files[METHOD] = BATCH_FILES
        for place in self.custody.store.registry.destinations.values():
            if to.takes(place):
                self.scheduler.breakers.reached(place.server)  # that it is away does not matter any more
        for batch in self.custody.running:
            if to.takes(batch.destination):
                batch.stop()
        self.custody.store.wake.set()

    async def plugins_ended(self) -> None:
        """Wait until no plugin sends output of a sandbox that has ended: only then its end may be reported."""
        while any(not self._is_wanted(batch) for batch in self.custody.running):
            await asyncio.sleep(_PLUGINS_END_S)

    def _is_wanted(self, batch: RunningBatch) -> bool:
        boxes = (self.custody.store.registry.by_id.get(sandbox) for sandbox in batch.sandboxes)
        return all(box is not None and box.state not in FREED for box in boxes)

    def close(self) -> None:
        """Wait for the threads of plugins that have ended."""
        self.movers.shutdown(wait=True)


class Delivery:
    """One batch on its way.

    :param runner: of all batches. :param batch: as it was planned. :param transfer: its streams.
    """

    def __init__(self, runner: BatchRunner, batch: BatchPlan, transfer: ActiveTransfer) -> None:
        self._runner, self._custody, self._scheduler = runner, runner.custody, runner.scheduler
        self._store = runner.custody.store
        self._batch, self._transfer = batch, transfer
        self._files: list[StoredFile] = []
        self._held: StoredCredentials | None = None
        self._drain_settings: dict[str, str] | None = None

    async def run(self) -> None:
        """Move the batch from lease to record; whatever goes wrong, its places are given back."""
        is_recorded = False
        try:
            await self._store.write(lambda db: lease(db, self._batch, self._now()), "record-leased")
            await self._claim()
            if self._files and self._drain_settings is not None:
                await self._runner.tell()
            is_recorded = bool(self._files) and await self._send()
        except (OSError, sqlite3.Error) as problem:
            log.error("batch-failed", server=self._batch.server, problem=problem)
            # A full disk would stay full: sending is what makes room.
            if not await self._store.ledger.give_up_reserve():
                await asyncio.sleep(_AGAIN_S)
        except Exception as problem:
            log.error("batch-failed", server=self._batch.server, problem=repr(problem), advice="report this as a bug")
            is_recorded = await self._record_error(problem)
            if not is_recorded:
                await asyncio.sleep(_AGAIN_S)
        finally:
            self._scheduler.stopped(self._batch, self._transfer)
            if not is_recorded:
                await self._requeue()
            self._scheduler.ended(self._batch)

    @property
    def _destination(self) -> Destination:
        return self._store.registry.destinations[self._batch.destination]

    # ---- files -------------------------------------------------------------------------------------------------------

    async def _claim(self) -> None:
        """Take the files, what they are sent with, and settings of the hand-over if they go that way."""
        to, limit_bytes = self._custodian(), self._custody.rules().limits.batch_bytes

        def change(db: sqlite3.Connection) -> Iterable[int]:
            self._files, touched = claim_files(db, self._batch, limit_bytes, self._now())
            self._held = self._drain_settings = None
            if self._files and self._destination.credentials_digest:
                # Those of all the files: they are part of the destination.
                self._held = queries.stored_credentials(db, self._files[0].ticket)
            if to is not None:
                self._drain_settings = to.begin(self._files, self._now())
                updates.keep_receipts(db, to.receipts(self._files))
                for sandbox in {item.sandbox for item in self._files}:
                    updates.touch(db, sandbox)
            return touched

        try:
            await self._store.write(change, "record-moving")
        except BaseException:
            self._files = []  # the ledger does not have them as claimed
            raise

    def _custodian(self) -> DrainTarget | None:
        """The custodian that these files are given to now."""
        to = self._runner.hand_over_to
        return to if to is not None and to.takes(self._destination) else None

    async def _requeue(self) -> None:
        """Files of the batch that have no outcome wait again, and their sandboxes with them.

        Done again until it is recorded, or the manager stops (the next start does it): nothing else takes them up.
        """
        fallback, is_open = self._custody.fallback_rules, self._scheduler.is_open
        while True:
            try:
                await self._store.write(lambda db: requeue(db, self._batch, is_open, fallback, self._now()))
                return
            except (OSError, sqlite3.Error) as problem:
                log.error("requeue-failed", problem=problem, again_in_s=_AGAIN_S)
            if not self._scheduler.is_sending:
                return
            await asyncio.sleep(_AGAIN_S)

    # ---- the plugin --------------------------------------------------------------------------------------------------

    async def _send(self) -> bool:
        """Run the plugin and record its answers. False when it was stopped before it answered."""
        if self._drain_settings is None and self._custodian() is not None:
            return False  # it was taken for the slower end, a moment before that was given up
        batch, files, transfer, scheduler = self._batch, self._files, self._transfer, self._scheduler
        self._runner.batches_sent += 1
        number, now = self._runner.batches_sent, self._custody.clock.wall_s()
        self._runner.totals.begin(self._destination.plugin)
        self._runner.servers.begin(batch.server, batch.owner, self._custody.clock.monotonic_s())
        run = self._prepared(number, now)
        self._custody.running.add(run)
        log.event("mover-started", batch=number, server=batch.server, plugin=self._destination.plugin, files=len(files),
                  sandboxes=len(run.sandboxes), owner=batch.owner, files_at_once=transfer.concurrency,
                  streams_each=transfer.parallelism, limit_s=round(run.lifetime_s))  # fmt: skip
        answers = await self._answers(run, number)
        if answers is None:
            return False
        now_s = self._custody.clock.monotonic_s()
        unknown_name = self._runner.names.heard(self._destination.host, answers, run.began_s, now_s)
        outcome = await self._decide(answers, run.answered, unknown_name)
        now_s = self._custody.clock.monotonic_s()
        took_s = now_s - run.began_s
        if run.asked:
            self._runner.totals.add(self._destination.plugin, outcome, took_s)
            self._runner.servers.add(batch.server, batch.owner, outcome, now_s)
        scheduler.shares.give(batch.owner, len(outcome.delivered), outcome.delivered_bytes, now_s)
        log.event("mover-ended", batch=number, delivered=len(outcome.delivered), waiting=len(outcome.waiting),
                  failed=len(outcome.failed), s=round(took_s, 3))  # fmt: skip
        whole = run.asked and len(outcome.delivered) == len(files)
        scheduler.tuner.end(transfer, [item.size_bytes for item in files] if whole else ())
        level = scheduler.tuner.level(batch.server)
        learnt = scheduler.rates.after(batch.server, files, outcome, took_s, level, now + took_s)
        await self._record(outcome, run.asked, learnt if run.asked else None)
        return True

    def _prepared(self, number: int, now: float) -> BatchRun:
        """Return the call of the plugin with its time limit and settings. :param now: wall clock."""
        registry, most_s = self._store.registry, self._custody.rules().lifetime_s
        place, files, table = self._destination, self._files, self._runner.table
        known = self._scheduler.rates.of(self._batch.server)
        limit_s, settings = call_limits(known, files, self._transfer, most_s, now)
        if table.batch_files(place.plugin, place.scheme):
            # A service with a queue of its own: what the last call took says nothing about this one.
            limit_s, settings = most_s, call_settings(None, self._transfer, now)
        settings.update(self._drain_settings or {})
        settings["STAGEOUT_JOBS"] = job_names(registry.job_of(item.sandbox) for item in files)
        jobs = {registry.by_id[box].run.key: box for box in {item.sandbox for item in files}}
        directory = self._custody.spool.root / "movers" / f"{number}-{files[0].ticket[:8]}"
        user = (self._batch.uid, self._batch.gid)
        return BatchRun(
            self._custody.spool, table, place, jobs, user, files, directory, limit_s, settings, self._held, now
        )  # fmt: skip

    async def _answers(self, run: BatchRun, number: int) -> list[Answer] | None:
        """Wait for the plugin's answers; None when it was stopped, and what had arrived by then is recorded."""
        clock, throughput, server = self._custody.clock, self._scheduler.throughput, self._batch.server
        arrived = set[int]()
        run.began_s = clock.monotonic_s()
        throughput.started(server, _amount(self._files), run.began_s)
        try:
            answers = await asyncio.get_running_loop().run_in_executor(self._runner.movers, run.run)
            arrived |= only_delivered(answers).keys()
            return answers
        except Stopped as stopped:
            log.event("mover-stopped", batch=number, delivered=len(stopped.delivered))
            arrived |= stopped.delivered.keys()
            sizes = [self._files[index].size_bytes for index in arrived]
            now_s = clock.monotonic_s()
            self._runner.totals.add_part(self._destination.plugin, sizes, now_s - run.began_s)
            self._runner.servers.add_part(server, self._batch.owner, sizes, now_s)
            await self._record_part(stopped.delivered)
            return None
        finally:
            self._custody.running.remove(run)
            if run.asked:
                self._custody.state.bytes_by_uid[run.uid] = run.state_bytes
            delivered = _amount([self._files[index] for index in arrived])
            throughput.ended(server, _amount(self._files), delivered, clock.monotonic_s())

    async def _decide(self, answers: Sequence[Answer], answered: bool, unknown_name: bool) -> BatchOutcome:
        """Decide about every file.

        :param answered: the server has answered another batch meanwhile. :param unknown_name: as of decide_retry.
        """
        await self._custody.clock_guard.check()
        return self._outcome(answers, answered, unknown_name)

    def _outcome(self, answers: Sequence[Answer], answered: bool = False, unknown_name: bool = False) -> BatchOutcome:
        renewable = bool(self._held and self._held.credentials)
        return decide_batch(
            self._files, answers, self._custody.rules().retry, self._store.registry.due_since,
            self._custody.clock.wall_s(), renewable, answered, self._transfer.parallelism, unknown_name,
        )  # fmt: skip

    # ---- records -----------------------------------------------------------------------------------------------------

    async def _record_error(self, problem: Exception) -> bool:
        """Record an error of the manager as a failure of each file, so that it ends. Return False when that fails."""
        if not self._files:
            return False
        try:
            outcome = self._outcome([manager_error(problem)] * len(self._files))
            await self._record(outcome, False, None)
        except Exception as second:
            log.error("batch-failed", server=self._batch.server, problem=repr(second), advice="report this as a bug")
            return False
        return True

    async def _record_part(self, delivered: Mapping[int, Gone]) -> None:
        """Write which files of a stopped batch have arrived; on return it is on the disk."""
        if not delivered:
            return
        fallback, is_open = self._custody.fallback_rules, self._scheduler.is_open
        streams = self._transfer.parallelism
        boxes = await self._store.write(
            lambda db: record_arrived(db, self._files, delivered, is_open, fallback, self._now(), streams),
            "record-delivered",
        )
        self._custody.releases.follow(boxes)

    async def _record(self, outcome: BatchOutcome, asked: bool, learnt: Known | None) -> None:
        """Write what became of a batch and of its sandboxes; on return it is on the disk.

        :param asked: a plugin ran; without that nothing was learnt about the server. :param learnt: about its rate.
        """
        registry, scheduler, server = self._store.registry, self._scheduler, self._batch.server
        back = asked and update_breaker(scheduler.breakers, server, outcome)
        if asked and outcome.tried and not outcome.unreachable:
            self._custody.running.answered(server)
        sandboxes = sorted({item.sandbox for item in self._files})
        named = {
            "record-delivered": outcome.delivered,
            "record-handed-over": outcome.handed_over,
            "record-retry": outcome.waiting,
            "record-failed": outcome.failed,
            "record-lost": outcome.lost,
        }
        labels = [label for label, results in named.items() if results]
        same = registry.destinations_at(server)
        others = registry.backlog.waiting_for(same) if back else []
        breakers, fallback = scheduler.breakers.dump(), self._custody.fallback_rules

        def change(db: sqlite3.Connection) -> Iterable[int]:
            updates.record_results(db, outcome.all)
            if learnt is not None:
                rates.keep(db, server, learnt)
            touched = set(sandboxes)
            if back:
                touched |= updates.wake(db, others, same, SILENT, self._now())
            if back or outcome.unreachable:
                set_meta(db, BREAKERS, breakers)
            for item in outcome.all:
                updates.keep_attempts(db, item.sandbox, item.attempts, item.excused)
            mark_lost(db, outcome, self._now())
            for sandbox in sandboxes:
                update_state(db, sandbox, scheduler.is_open, fallback, self._now())
            return touched

        self._custody.releases.follow(await self._store.write(change, *labels))

    def _now(self) -> int:
        return self._custody.now()
