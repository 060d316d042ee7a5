"""The steps of a batch: its files are claimed, the plugin runs, the outcome is decided, and what is recorded of it.

``pipeline.py`` has their order.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from sandbox_manager.custody import queries, updates
from sandbox_manager.custody.credentials import StoredCredentials
from sandbox_manager.custody.custody import Custody
from sandbox_manager.custody.ledger import set_meta
from sandbox_manager.custody.running import RunningBatch
from sandbox_manager.scheduling import rates
from sandbox_manager.scheduling.planner import BatchPlan
from sandbox_manager.scheduling.rates import Known, call_limits, call_settings
from sandbox_manager.scheduling.retry import BatchOutcome, NameRecord
from sandbox_manager.scheduling.scheduler import BREAKERS, Scheduler
from sandbox_manager.scheduling.throughput import Amount
from sandbox_manager.transfer.batch import (
    BatchRun,
    claim_files,
    decide_batch,
    delivered_result,
    job_names,
    mark_lost,
    update_breaker,
    update_state,
)
from sandbox_manager.transfer.handover import BATCH_FILES, METHOD, DrainTarget
from sandbox_manager.transfer.totals import ServerTotals, TransferTotals
from stageout.core import log
from stageout.core.clock import wall_now
from stageout.core.errors import SILENT
from stageout.core.pools import Pool
from stageout.core.states import FREED
from stageout.core.streams import ActiveTransfer
from stageout.model.file import StoredFile
from stageout.model.sandbox import Destination
from stageout.movers.mover import Stopped
from stageout.movers.plugins_table import PluginsTable
from stageout.movers.results import Answer, Gone, only_delivered

_PLUGINS_END_S = 0.1


def _amount(files: Sequence[StoredFile]) -> Amount:
    return Amount(len(files), sum(item.size_bytes for item in files))


class Announcer:
    """Announces to access points what is in the ledger now, before a batch is given to a custodian."""

    def __init__(self) -> None:
        self._ways: list[Callable[[], Awaitable[None]]] = []

    def add(self, way: Callable[[], Awaitable[None]]) -> None:
        """Call ``way`` for each announcement from now on. It returns when access points can read it."""
        self._ways.append(way)

    async def announce(self) -> None:
        """Wait until access points can read what is in the ledger now. Without a way to them this returns at once."""
        for way in self._ways:
            await way()


class BatchRunner:
    """The runner of one node's batches.

    :param table: loaded. :param scheduler: that plans the batches.
    :ivar announcer: of hand-overs, for :meth:`Announcer.add`.
    :ivar hand_over_to: the custodian that gets what it takes, None: everything goes to its destination.
    :ivar totals: of all batches since the start. :ivar servers: likewise, by server.
    """

    def __init__(self, custody: Custody, table: PluginsTable, scheduler: Scheduler) -> None:
        self.custody, self.table, self.scheduler = custody, table, scheduler
        self.announcer = Announcer()
        self.hand_over_to: DrainTarget | None = None
        self.batches_sent = 0
        self.totals, self.servers = TransferTotals(), ServerTotals()
        self.names = NameRecord()
        self.movers = Pool(64, "mover")

    def next_number(self) -> int:
        """Count one more batch that is sent, and return its number."""
        self.batches_sent += 1
        return self.batches_sent

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

    def tell_of(self, to: DrainTarget | None) -> None:
        """Let reports name what was begun for this custodian, also when nothing more is given to it."""
        self.hand_over_to = to

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


class Lessons(NamedTuple):
    """The knowledge about a server from one batch, for the ledger.

    :param rate: of the server. :param breakers: of all servers, "" if they are as before.
    :param due: sandboxes with files that are due now, because the server is back. :param destinations: of these files.
    """

    rate: Known | None = None
    breakers: str = ""
    due: Sequence[int] = ()
    destinations: Collection[int] = ()


NO_LESSONS = Lessons()


class Delivery:
    """One batch on its way. :meth:`sandbox_manager.pipeline.Pipeline.deliver` has the order of its steps.

    :param runner: of all batches. :param batch: as it was planned. :param transfer: its streams.
    :ivar files: that are claimed for it in the ledger. :ivar is_hand_over: they are given to a custodian.
    """

    def __init__(self, runner: BatchRunner, batch: BatchPlan, transfer: ActiveTransfer) -> None:
        self._runner, self._custody, self._scheduler = runner, runner.custody, runner.scheduler
        self._registry = runner.custody.store.registry
        self._batch, self._transfer = batch, transfer
        self._claimed: tuple[list[StoredFile], StoredCredentials | None, dict[str, str] | None] = [], None, None
        self.files: list[StoredFile] = []
        self._held: StoredCredentials | None = None
        self._drain_settings: dict[str, str] | None = None
        self._number, self._began_at = 0, 0.0
        self._arrived: Collection[int] = ()

    @property
    def server(self) -> str:
        """Return the server that it is sent to."""
        return self._batch.server

    @property
    def is_hand_over(self) -> bool:
        """Tell whether its files are given to a custodian."""
        return bool(self.files) and self._drain_settings is not None

    @property
    def is_overtaken(self) -> bool:
        """Tell whether it was claimed for a server that was given up a moment ago: a custodian gets its files."""
        return self._drain_settings is None and self._custodian() is not None

    @property
    def _destination(self) -> Destination:
        return self._registry.destinations[self._batch.destination]

    def _custodian(self) -> DrainTarget | None:
        """Return the custodian that gets these files now, None for none."""
        to = self._runner.hand_over_to
        return to if to is not None and to.takes(self._destination) else None

    # ---- files -------------------------------------------------------------------------------------------------------

    def claim(self, db: sqlite3.Connection) -> Iterable[int]:
        """Take the files, what they are sent with, and settings of the hand-over if they go that way."""
        to = self._custodian()
        files, touched = claim_files(db, self._batch, self._custody.rules().limits.batch_bytes, self._now())
        held, drain_settings = None, None
        if files and self._destination.credentials_digest:
            # Those of all the files: they are part of the destination.
            held = queries.stored_credentials(db, files[0].ticket)
        if to is not None:
            drain_settings = to.begin(files, self._now())
            updates.keep_receipts(db, to.receipts(files))
            for sandbox in {item.sandbox for item in files}:
                updates.touch(db, sandbox)
        self._claimed = files, held, drain_settings
        return touched

    def keep_claim(self) -> None:
        """Go on with what :meth:`claim` took. Only after the commit: else the ledger does not have it as claimed."""
        self.files, self._held, self._drain_settings = self._claimed

    def requeue(self, db: sqlite3.Connection) -> Iterator[int]:
        """Let files without an outcome wait again. Yield the sandboxes that changed."""
        is_open, fallback = self._scheduler.is_open, self._custody.fallback_rules
        for part in self._batch.parts:
            if updates.moving_back(db, part.sandbox, self._batch.destination):
                update_state(db, part.sandbox, is_open, fallback, self._now())
                yield part.sandbox
            elif updates.unlease(db, part.sandbox, self._now()):
                yield part.sandbox

    # ---- the plugin --------------------------------------------------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator[BatchRun]:
        """Prepare the call of the plugin, and list the batch as running until what has arrived is recorded."""
        custody, throughput, server = self._custody, self._scheduler.throughput, self._batch.server
        self._number, self._began_at = self._runner.next_number(), custody.clock.wall_s()
        self._runner.totals.begin(self._destination.plugin)
        self._runner.servers.begin(server, self._batch.owner, custody.clock.monotonic_s())
        run = self._prepared(self._number, self._began_at)
        custody.running.add(run)
        log.event("mover-started", batch=self._number, server=server, plugin=self._destination.plugin,
                  files=len(self.files), sandboxes=len(run.sandboxes), owner=self._batch.owner,
                  files_at_once=self._transfer.concurrency, streams_each=self._transfer.parallelism,
                  limit_s=round(run.lifetime_s))  # fmt: skip
        run.begin(custody.clock.monotonic_s())
        throughput.started(server, _amount(self.files), run.began_s)
        try:
            yield run
        finally:
            custody.running.remove(run)
            if run.asked:
                custody.state.bytes_by_uid[run.uid] = run.state_bytes
            delivered = _amount([self.files[index] for index in self._arrived])
            throughput.ended(server, _amount(self.files), delivered, custody.clock.monotonic_s())

    def _prepared(self, number: int, now: float) -> BatchRun:
        """Return the call of the plugin with its time limit and settings. :param now: wall clock."""
        registry, most_s = self._registry, self._custody.rules().lifetime_s
        place, files, table = self._destination, self.files, self._runner.table
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

    async def send(self, run: BatchRun) -> list[Answer]:
        """Run the plugin and return its answers, one for each file.

        :raises Stopped: it was stopped before it had answered for all files.
        :raises OSError: its work directory could not be made.
        """
        try:
            answers = await asyncio.get_running_loop().run_in_executor(self._runner.movers, run.run)
        except Stopped as stopped:
            log.event("mover-stopped", batch=self._number, delivered=len(stopped.delivered))
            self._arrived = stopped.delivered.keys()
            sizes = [self.files[index].size_bytes for index in self._arrived]
            now_s = self._custody.clock.monotonic_s()
            self._runner.totals.add_part(self._destination.plugin, sizes, now_s - run.began_s)
            self._runner.servers.add_part(self._batch.server, self._batch.owner, sizes, now_s)
            raise
        self._arrived = only_delivered(answers).keys()
        return answers

    # ---- the outcome -------------------------------------------------------------------------------------------------

    def check_name(self, run: BatchRun, answers: Sequence[Answer]) -> bool:
        """Record what the answers say about the server's name. Return whether it does not exist."""
        now_s = self._custody.clock.monotonic_s()
        return self._runner.names.heard(self._destination.host, answers, run.began_s, now_s)

    def decide(self, answers: Sequence[Answer], answered: bool = False, unknown_name: bool = False) -> BatchOutcome:
        """Decide about every file.

        :param answered: the server has answered another batch meanwhile. :param unknown_name: as of decide_retry.
        """
        return decide_batch(
            self.files, answers, self._custody.rules().retry, self._registry.due_since, self._custody.clock.wall_s(),
            bool(self._held and self._held.credentials), answered, self._transfer.parallelism, unknown_name,
        )  # fmt: skip

    def learn(self, run: BatchRun, outcome: BatchOutcome) -> Lessons:
        """Count the batch, and learn from it for the next ones. Return the part that the ledger keeps."""
        scheduler, transfer, now_s = self._scheduler, self._transfer, self._custody.clock.monotonic_s()
        took_s = now_s - run.began_s
        if run.asked:
            self._runner.totals.add(self._destination.plugin, outcome, took_s)
            self._runner.servers.add(self.server, self._batch.owner, outcome, now_s)
        scheduler.shares.give(self._batch.owner, len(outcome.delivered), outcome.delivered_bytes, now_s)
        log.event("mover-ended", batch=self._number, delivered=len(outcome.delivered), waiting=len(outcome.waiting),
                  failed=len(outcome.failed), s=round(took_s, 3))  # fmt: skip
        whole = run.asked and len(outcome.delivered) == len(self.files)
        scheduler.calls.end(transfer, [item.size_bytes for item in self.files] if whole else ())
        level = scheduler.calls.level(self.server)
        learnt = scheduler.rates.after(self.server, self.files, outcome, took_s, level, self._began_at + took_s)
        return self._lessons(outcome, learnt) if run.asked else NO_LESSONS

    def _lessons(self, outcome: BatchOutcome, rate: Known | None) -> Lessons:
        """Tell the breaker of the server, whose plugin has answered."""
        breakers, registry = self._scheduler.breakers, self._registry
        is_back = update_breaker(breakers, self.server, outcome)
        if outcome.tried and not outcome.unreachable:
            self._custody.running.answered(self.server)
        if not is_back and not outcome.unreachable:
            return Lessons(rate)
        destinations = registry.destinations_at(self.server)
        due = registry.backlog.waiting_for(destinations) if is_back else ()
        return Lessons(rate, breakers.dump(), due, destinations)

    # ---- records -----------------------------------------------------------------------------------------------------

    def record_arrived(self, db: sqlite3.Connection, delivered: Mapping[int, Gone]) -> Iterable[int]:
        """Record what of a stopped batch has arrived, and where that leaves its sandboxes.

        :param delivered: by index in :attr:`files`.
        """
        now, streams = self._now(), self._transfer.parallelism
        arrived = [delivered_result(self.files[index], answer, now, streams) for index, answer in delivered.items()]
        updates.record_results(db, arrived)
        return self._update_states(db, {item.sandbox for item in arrived})

    def record(self, db: sqlite3.Connection, outcome: BatchOutcome, lessons: Lessons = NO_LESSONS) -> Iterable[int]:
        """Record the result of each file, what was learnt about the server, and the states of the sandboxes."""
        updates.record_results(db, outcome.all)
        if lessons.rate is not None:
            rates.keep(db, self.server, lessons.rate)
        woken = updates.wake(db, lessons.due, lessons.destinations, SILENT, self._now())
        if lessons.breakers:
            set_meta(db, BREAKERS, lessons.breakers)
        for item in outcome.all:
            updates.keep_attempts(db, item.sandbox, item.attempts, item.excused)
        mark_lost(db, outcome, self._now())
        return woken.union(self._update_states(db, {item.sandbox for item in self.files}))

    def _update_states(self, db: sqlite3.Connection, sandboxes: Iterable[int]) -> Iterable[int]:
        touched = sorted(sandboxes)
        for sandbox in touched:
            update_state(db, sandbox, self._scheduler.is_open, self._custody.fallback_rules, self._now())
        return touched

    def _now(self) -> int:
        return wall_now(self._custody.clock)
