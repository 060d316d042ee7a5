"""One batch: its files are claimed, a plugin is called for them, and its answers become results.

:class:`Delivery` has the steps, ``pipeline.py`` their order. :class:`BatchRun` is the call of the plugin. Both work on
one record, :class:`stageout.model.batch.Batch`.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from sandbox_manager.custody import queries, updates
from sandbox_manager.custody.credentials import StoredCredentials
from sandbox_manager.custody.custody import Custody
from sandbox_manager.custody.ledger import set_meta
from sandbox_manager.custody.queries import DamagedText
from sandbox_manager.custody.running import RunningBatch
from sandbox_manager.custody.spool import Spool
from sandbox_manager.delivery.handover import BATCH_FILES, METHOD, DrainTarget, deposits_of, for_these
from sandbox_manager.delivery.results import (
    ServerTotals,
    TransferTotals,
    Vanished,
    decide_batch,
    delivered_result,
    failure_of_node,
    mark_lost,
    update_breaker,
    update_state,
)
from sandbox_manager.scheduling import rates
from sandbox_manager.scheduling.rates import ServerRate, call_limits, call_settings
from sandbox_manager.scheduling.retry import NameRecord
from sandbox_manager.scheduling.scheduler import BREAKERS, Scheduler
from sandbox_manager.scheduling.throughput import Amount
from stageout.core import log
from stageout.core.classad_parser import parse_ad
from stageout.core.classads import ClassAd, ClassAdSyntaxError
from stageout.core.clock import wall_now
from stageout.core.errors import SILENT, ErrorClass
from stageout.core.pools import Pool
from stageout.core.states import FREED, State
from stageout.core.streams import ActiveTransfer
from stageout.model.batch import Batch, BatchOutcome
from stageout.model.file import StoredFile
from stageout.model.sandbox import ACTIVE, Destination
from stageout.movers.mover import Equipment, PluginCall, Stopped
from stageout.movers.plugins_table import PluginsTable
from stageout.movers.results import Answer, Delivered, Failure, Gone, InCustody, SentFile, only_delivered
from stageout.movers.schemes import method_of
from stageout.wire.custody import JobKey

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
        destinations = self.custody.store.registry.destinations
        for destination in destinations.values():
            if to.accepts(destination):
                self.scheduler.breakers.reached(destination.server)  # that it is away does not matter any more
        for running in self.custody.running:
            if to.accepts(destinations[running.batch.destination]):
                running.stop()
        self.custody.store.wake.set()

    def tell_of(self, to: DrainTarget | None) -> None:
        """Let reports name what was begun for this custodian, also when nothing more is given to it."""
        self.hand_over_to = to

    async def plugins_ended(self) -> None:
        """Wait until no plugin sends output of a sandbox that has ended: only then its end may be reported."""
        while any(not self._is_wanted(batch) for batch in self.custody.running):
            await asyncio.sleep(_PLUGINS_END_S)

    def _is_wanted(self, batch: RunningBatch) -> bool:
        sandboxes = (self.custody.store.registry.by_id.get(sandbox_id) for sandbox_id in batch.sandboxes)
        return all(sandbox is not None and sandbox.state not in FREED for sandbox in sandboxes)

    def close(self) -> None:
        """Wait for the threads of plugins that have ended."""
        self.movers.shutdown(wait=True)


class Lessons(NamedTuple):
    """The knowledge about a server from one batch, for the ledger.

    :param rate: of the server. :param breakers: of all servers, "" if they are as before.
    :param due: sandboxes with files that are due now, because the server is back.
    :param destinations: the destinations of these sandboxes' files.
    """

    rate: ServerRate | None = None
    breakers: str = ""
    due: Sequence[int] = ()
    destinations: Collection[int] = ()


NO_LESSONS = Lessons()


class Delivery:
    """One batch on its way. :meth:`sandbox_manager.pipeline.Pipeline.deliver` has the order of its steps.

    :param runner: of all batches. :param batch: as it was planned. :param transfer: its streams.
    """

    def __init__(self, runner: BatchRunner, batch: Batch, transfer: ActiveTransfer) -> None:
        self._runner, self._custody, self._scheduler = runner, runner.custody, runner.scheduler
        self._registry = runner.custody.store.registry
        self._batch, self._transfer = batch, transfer
        self._claimed: tuple[list[StoredFile], StoredCredentials | None, dict[str, str] | None] = [], None, None
        self._held: StoredCredentials | None = None
        self._drain_settings: dict[str, str] | None = None
        self._number, self._began_at = 0, 0.0
        self._arrived: Collection[int] = ()

    @property
    def server(self) -> str:
        """Return the server that it is sent to."""
        return self._batch.server

    @property
    def files(self) -> Sequence[StoredFile]:
        """Return the files that are claimed for it in the ledger."""
        return self._batch.files

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
        return to if to is not None and to.accepts(self._destination) else None

    # ---- files -------------------------------------------------------------------------------------------------------

    def claim(self, db: sqlite3.Connection) -> Iterable[int]:
        """Take the files, what they are sent with, and settings of the hand-over if they go that way."""
        to = self._custodian()
        files, touched = claim_batch(db, self._batch, self._custody.rules().limits.batch_bytes, self._now())
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
        files, self._held, self._drain_settings = self._claimed
        self._batch = replace(self._batch, files=tuple(files))

    def requeue(self, db: sqlite3.Connection) -> Iterator[int]:
        """Let files without an outcome wait again. Yield the sandboxes that changed."""
        is_open, fallback = self._scheduler.is_open, self._custody.fallback_rules
        for part in self._batch.parts:
            if updates.moving_back(db, part.sandbox, self._batch.destination):
                update_state(db, sandbox_id=part.sandbox, is_open=is_open, fallback=fallback, now=self._now())
                yield part.sandbox
            elif updates.deactivate(db, part.sandbox, self._now()):
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
                custody.state.bytes_by_uid[self._batch.uid] = run.state_bytes
            delivered = _amount([self.files[index] for index in self._arrived])
            throughput.ended(server, _amount(self.files), delivered, custody.clock.monotonic_s())

    def _prepared(self, number: int, now: float) -> BatchRun:
        """Return the call of the plugin with its time limit and settings. :param now: wall clock."""
        registry, most_s = self._registry, self._custody.rules().lifetime_s
        destination, files, table = self._destination, self.files, self._runner.table
        known = self._scheduler.rates.of(self._batch.server)
        limit_s, settings = call_limits(known, files, self._transfer, most_s, now=now)
        if table.batch_files(destination.plugin, destination.scheme):
            # A service with a queue of its own: what the last call took says nothing about this one.
            limit_s, settings = most_s, call_settings(None, self._transfer, now)
        settings.update(self._drain_settings or {})
        settings["STAGEOUT_JOBS"] = job_names(registry.job_of(item.sandbox) for item in files)
        jobs = {registry.by_id[sandbox].run.key: sandbox for sandbox in {item.sandbox for item in files}}
        directory = self._custody.spool.root / "movers" / f"{number}-{files[0].ticket[:8]}"
        return BatchRun(
            spool=self._custody.spool,
            table=table,
            batch=self._batch,
            destination=destination,
            jobs=jobs,
            directory=directory,
            lifetime_s=limit_s,
            settings=settings,
            held=self._held,
            now=now,
        )

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
        return self._runner.names.record_answers(self._destination.host, answers, run.began_s, now_s)

    def decide(self, answers: Sequence[Answer], answered: bool = False, unknown_name: bool = False) -> BatchOutcome:
        """Decide about every file.

        :param answered: the server has answered another batch meanwhile. :param unknown_name: as of decide_retry.
        """
        return decide_batch(
            files=self.files,
            answers=answers,
            rules=self._custody.rules().retry,
            due_since=self._registry.due_since,
            now=self._custody.clock.wall_s(),
            renewable=bool(self._held and self._held.credentials),
            answered=answered,
            streams=self._transfer.parallelism,
            unknown_name=unknown_name,
        )

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
        learnt = scheduler.rates.after(
            self.server, self.files, outcome, took_s=took_s, level=level, now=self._began_at + took_s
        )
        return self._lessons(outcome, learnt) if run.asked else NO_LESSONS

    def _lessons(self, outcome: BatchOutcome, rate: ServerRate | None) -> Lessons:
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
        woken = updates.wake(
            db, sandboxes=lessons.due, destinations=lessons.destinations, codes=SILENT, now=self._now()
        )
        if lessons.breakers:
            set_meta(db, BREAKERS, lessons.breakers)
        for item in outcome.all:
            updates.keep_attempts(db, item.sandbox, item.attempts, item.excused)
        mark_lost(db, outcome, self._now())
        return woken.union(self._update_states(db, {item.sandbox for item in self.files}))

    def _update_states(self, db: sqlite3.Connection, sandboxes: Iterable[int]) -> Iterable[int]:
        touched = sorted(sandboxes)
        for sandbox in touched:
            update_state(
                db,
                sandbox_id=sandbox,
                is_open=self._scheduler.is_open,
                fallback=self._custody.fallback_rules,
                now=self._now(),
            )
        return touched

    def _now(self) -> int:
        return wall_now(self._custody.clock)


_JOBS_NAMED = 3


_IN_DOUBT = Failure(
    ErrorClass.UNKNOWN,
    "a name of the file came or went while it was sent, so nothing proves that it stayed as it was; it is sent again "
    "by itself",
    at_once=True,
    of_node=True,
)


_CHANGED = failure_of_node(
    ErrorClass.SOURCE_CHANGED, "the file was changed after the job had ended, so it is not what the job made"
)


class BatchRun(RunningBatch):
    """The call of the plugin for a batch. :meth:`run` blocks and belongs into a thread.

    :param destination: of its files. :param directory: work directory to make.
    :param lifetime_s: limit of the plugin's call.
    :param settings: for its environment.
    :ivar asked: the plugin was run. :ivar state_bytes: of the quota, that plugins of its user keep for their next call.
    :param held: what all the files are sent with, None for nothing. :param now: wall clock.
    """

    def __init__(
        self,
        spool: Spool,
        table: PluginsTable,
        batch: Batch,
        destination: Destination,
        jobs: Mapping[JobKey, int],
        directory: Path,
        lifetime_s: float,
        settings: Mapping[str, str],
        held: StoredCredentials | None = None,
        now: float = 0.0,
    ) -> None:
        super().__init__(batch, jobs)
        self.asked = False
        self.state_bytes = 0
        self.lifetime_s = lifetime_s
        self._held = held
        self._now = now
        self._spool = spool
        self._scheme, self._plugin = destination.scheme, table.find(destination.plugin, destination.scheme)
        self._directory = directory
        self._settings = settings

    def run(self) -> list[Answer]:
        """Send the files that are still what was accepted. One answer per file.

        :raises Stopped: by :meth:`stop`. :raises OSError: the work directory could not be made.
        """
        problems = [self._problem(item) for item in self.batch.files]
        whole = [index for index, problem in enumerate(problems) if problem is None]
        before = {index: self._change_mark(self.batch.files[index]) for index in whole}
        try:
            sent = self._call(whole) if whole else []
        except Stopped as stopped:
            delivered = {whole[at]: answer for at, answer in stopped.delivered.items()}
            told = {
                at: self._if_unchanged(self.batch.files[at], before[at], answer) for at, answer in delivered.items()
            }
            raise Stopped(
                {at: answer for at, answer in told.items() if isinstance(answer, (Delivered, InCustody))}
            ) from None
        answers = dict(zip(whole, sent))
        return [
            problem or self._if_unchanged(self.batch.files[index], before[index], answers[index])
            for index, problem in enumerate(problems)
        ]

    def _call(self, whole: Sequence[int]) -> list[Answer]:
        files = [self.batch.files[index] for index in whole]
        if self._plugin is None:
            text = f"no plugin of this node moves {method_of(self._scheme)} URLs any more: its administrator"
            text += " can name one in FILETRANSFER_PLUGINS"
            return [failure_of_node(ErrorClass.PLUGIN_BROKEN, text)] * len(files)
        try:
            equipment = self._equipment()
        except OSError as problem:
            text = f"the spool has lost a credential: {problem.strerror}"
            return [failure_of_node(ErrorClass.CREDENTIAL_MISSING, text)] * len(files)
        except ClassAdSyntaxError:
            text = "the ledger's record of the job's ad is damaged: its disk may be failing"
            return [Vanished(ErrorClass.LOCAL_FILE, text)] * len(files)
        ended = self._held.expired(self._now) if self._held else None
        if ended is not None:
            text = f"{ended.shown} ended at {utc(ended.expires_at)}"
            return [failure_of_node(ErrorClass.CREDENTIAL_EXPIRED, text)] * len(files)
        user = (self.batch.uid, self.batch.gid)
        settings = {**for_these(self._settings, whole), "STAGEOUT_STATE_DIR": str(self._spool.state_of(*user))}
        cargo = tuple(
            SentFile(
                source=self._spool.path(item.ticket, item.position),
                url=item.url,
                name=item.name,
                size_bytes=item.size_bytes,
                deposit=deposit,
            )
            for item, deposit in zip(files, deposits_of(settings, len(files)))
        )
        call = PluginCall(
            directory=self._directory,
            plugin=self._plugin,
            uid=self.batch.uid,
            gid=self.batch.gid,
            files=cargo,
            lifetime_s=self.lifetime_s,
            equipment=equipment,
            settings=settings,
            passing_group=self._spool.group_of(*user),
        )
        self.asked = True
        try:
            return self._mover.run(call)
        finally:
            self.state_bytes = self._spool.state.size_bytes(self.batch.uid)

    def _equipment(self) -> Equipment:
        held = self._held
        if held is None:
            return Equipment()
        ads = [parse_ad(text) if text else ClassAd() for text in (held.job_ad, held.plugin_data)]
        return Equipment(self._spool.safe.contents(held), *ads)

    def _problem(self, item: StoredFile) -> Failure | None:
        """Return the difference between a file and its state at acceptance; None when there is none."""
        if isinstance(item.url, DamagedText):
            return Vanished(
                ErrorClass.LOCAL_FILE, f"the ledger's record of {item.name} is damaged: its disk may be failing"
            )
        try:
            return None if self._spool.unchanged(item) else _CHANGED
        except FileNotFoundError:
            text = "is gone from the spool: it was deleted there, or its disk is damaged"
            return Vanished(ErrorClass.LOCAL_FILE, f"{item.name} {text}")
        except OSError as problem:
            return failure_of_node(ErrorClass.UNKNOWN, f"the spool cannot be read: {problem.strerror}")

    def _change_mark(self, item: StoredFile) -> tuple[int, int]:
        try:
            return self._spool.change_mark(item.ticket, item.position)
        except OSError:
            return -1, -1

    def _if_unchanged(self, item: StoredFile, before: tuple[int, int], answer: Answer) -> Answer:
        """Return the plugin's answer if it sent the accepted content. In doubt the file is sent again."""
        after = self._change_mark(item)
        problem = self._problem(item)
        if problem is not None:
            return problem
        if after != before and after[1] == before[1]:
            return _CHANGED
        return _IN_DOUBT if after != before and isinstance(answer, (Delivered, InCustody)) else answer


def job_names(jobs: Iterable[str]) -> str:
    """Return the jobs of a batch, for plugins that tell them to a service."""
    names = list(dict.fromkeys(jobs))
    more = f" and {len(names) - _JOBS_NAMED} more" if len(names) > _JOBS_NAMED else ""
    return " ".join(names[:_JOBS_NAMED]) + more


def utc(wall_s: float) -> str:
    """Format a wall clock for people."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(wall_s))


def claim_batch(db: sqlite3.Connection, batch: Batch, batch_bytes: int, now: int) -> tuple[list[StoredFile], list[int]]:
    """Return the files that the batch moves, MOVING from now on, and the sandboxes that were considered.

    :param batch_bytes: limit after which the batch gets no further file.
    """
    taken: list[StoredFile] = []
    looked_at: list[int] = []
    room = batch_bytes
    for part in batch.parts:
        state = updates.state_of(db, part.sandbox)
        if state not in ACTIVE or (taken and room <= 0):
            continue
        files = updates.claim_files(
            db, part.sandbox, batch.destination, now, most_files=part.files, most_bytes=max(room, 0)
        )
        room -= sum(item.size_bytes for item in files)
        taken.extend(files)
        if files and state is State.LEASED:
            updates.set_state(db, part.sandbox, State.MOVING, now)
        looked_at.append(part.sandbox)
    return taken, looked_at
