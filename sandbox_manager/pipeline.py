"""The way of one sandbox through this node, top to bottom. Read this first.

A plugin offers files (``intake.py``), which are taken over (``acceptance.py``). The
schedd agent's word arrives as an order (:meth:`Pipeline.carry_out`). Only then the planner (``planner.py``) puts files
into batches, a mover (``movers.py``) runs the plugin for each, the answers are judged (``results.py``, ``retry.py``),
and when everything is delivered the bytes are released. Each change is in the ledger before anything is built on it
(``docs/ORDERING.md``); what is in memory is a picture of the ledger (``book.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sandbox_manager import lookups, orders, rates, records, recovery
from sandbox_manager.acceptance import Acceptance, Manager
from sandbox_manager.admission import Admission
from sandbox_manager.agents import AgentBook
from sandbox_manager.ages import Ages
from sandbox_manager.batches import (
    BatchRun,
    Judged,
    give_back,
    job_names,
    judge_batch,
    lose,
    mind_breaker,
    record_arrived,
    settle,
    take,
)  # fmt: skip
from sandbox_manager.book import Book
from sandbox_manager.breaker import Breakers, Flow
from sandbox_manager.credentials import HeldSurroundings
from sandbox_manager.grants import Grants
from sandbox_manager.handover import BATCH_FILES, HandOver
from sandbox_manager.leases import Leases
from sandbox_manager.ledger import Ledger, get_meta, set_meta
from sandbox_manager.pilot_end import PilotEnd
from sandbox_manager.planner import BatchPlan, Load, Scene, plan
from sandbox_manager.rates import Known, Rates, call_limits, call_settings
from sandbox_manager.releases import Releases
from sandbox_manager.renewal import Renewal
from sandbox_manager.retry import SILENT, backoff_s
from sandbox_manager.rules import Rules, deadline_of
from sandbox_manager.sandbox import Destination, Sandbox
from sandbox_manager.shares import Shares
from sandbox_manager.slots import Places
from sandbox_manager.spool import Spool
from sandbox_manager.strays import Strays
from sandbox_manager.syncing import Syncs
from sandbox_manager.throughput import Throughput
from sandbox_manager.tuner import Flight, Target, Tuner
from stageout.core import log
from stageout.core.clock import Clock, asleep_s, boot_id
from stageout.core.ending import end
from stageout.core.pools import Pool
from stageout.core.states import FREED, State
from stageout.movers.mover import Stopped
from stageout.movers.plugins_table import PluginsTable
from stageout.movers.results import Gone, only_delivered
from stageout.movers.schemes import method_of
from stageout.wire.custody import OrderSheet, Run

A = TypeVar("A")
T = TypeVar("T")
_IDLE_S = 30.0
#: For batches that have ended to be recorded.
_LAST_S = 10.0
_COALESCE_S = 0.02
_AGAIN_S = 5.0
_LEASES_INTERVAL_S = 5.0
_PLUGINS_END_S = 0.1
#: A server that answers nobody for so long, though files are sent to it, is taken for one that is away.
_SILENT_S = 30.0
_BREAKERS = "breakers"


async def _nobody() -> None:
    """Tells nobody."""


class Pipeline:
    """Custody of all sandboxes of this node. One event loop; :meth:`recover` first, then :meth:`run` beside everything.

    :param ledger: opened. :param spool: opened. :param table: loaded. :param grants: of the policy service, if any.
    :ivar tell: waits until access points can read what is in the ledger now.
    """

    def __init__(
        self,
        manager: Manager,
        ledger: Ledger,
        spool: Spool,
        table: PluginsTable,
        rules: Rules,
        agents: AgentBook,
        clock: Clock,
        grants: Grants | None = None,
    ) -> None:
        self.manager = manager
        self.book = Book(ledger, lambda box: deadline_of(box, self.rules))
        self.rules = rules
        self.renewal = Renewal(self.book, spool.safe, self._now)
        self._spool = spool
        self._table = table
        self._clock = clock
        self.breakers = Breakers(clock, lambda failures: backoff_s(self.rules.retry, failures))
        self.throughput = Throughput()
        end = PilotEnd(self.book.registry, self.throughput, clock, lambda: self.rules)
        self.admission = Admission(
            self.book.registry, agents, table, self._heard_of, spool, end, rules=lambda: self.rules
        )  # fmt: skip
        self._sending = True
        self.hand_over_to: HandOver | None = None
        self.tell: Callable[[], Awaitable[None]] = _nobody
        self._shares = Shares()
        self._rates = Rates()
        self.tuner = Tuner(rules.tuning, clock, lambda server: self._rates.level(server, clock.wall_s()), grants)
        self.leases = Leases(clock, asleep_s)
        self._boot = boot_id()
        self.acceptance = Acceptance(
            manager, self.book, self.admission, self._boot, self._now, self.follow,
            lambda ticket, size_bytes: self._syncs.add(ticket, size_bytes),
            lambda offer: self._rates.sending_s(offer.servers, offer.files, offer.size_bytes, clock.wall_s()),
        )  # fmt: skip
        self.ages = Ages(self.book, clock, self._boot, lambda: self.rules.retry.longest_s)
        self._load = Load()
        self._batch_number = 0
        self._running: dict[int, BatchRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._movers = Pool(64, "mover")
        self._disk = ThreadPoolExecutor(2, "spool")
        self._syncing = ThreadPoolExecutor(1, "sync")  # for as long as the disk needs for the bytes
        self._syncs = Syncs(
            spool, self._syncing, self.acceptance.sync_begins, self.acceptance.synced, self._background
        )  # fmt: skip
        self.strays = Strays(ledger, spool, self._disk, self._now, lambda: self.rules.retention_s)
        self._releases = Releases(
            self.book, spool, self.admission.space, self._disk, self._background, self._now, self._account_freed
        )  # fmt: skip

    # ---- 0. start ----------------------------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Bring ledger, spool and processes into agreement after whatever ended the last manager."""
        await self._in_disk_thread(recovery.end_movers, self._spool)
        await self.strays.take_back()
        directories = set(self._spool.directories())
        unsynced: list[str] = []

        def change(db: sqlite3.Connection) -> Iterable[int]:
            touched, again = recovery.settle_ledger(
                db, directories, self._boot, self._now(), self.rules.retry.longest_s
            )
            unsynced[:] = again
            return touched

        await self.book.write(change, "record-recovered")
        await self.book.load()
        await self.ages.load()
        self.breakers.restore(await self.book.ledger.read(lambda db: get_meta(db, _BREAKERS)))
        await self.renewal.mend()
        await self.book.ledger.read(self._rates.load)
        await self.book.ledger.read(self.leases.load)
        await self.book.ledger.read(lambda db: self.admission.space.fill(lookups.held_files(db)))
        await self.strays.set_aside()
        self.admission.state_bytes = await asyncio.get_running_loop().run_in_executor(
            self._disk, self._spool.state.sizes
        )
        for ticket in unsynced:
            self._syncs.add(ticket)
        self._releases.consider([box for box in self.book.registry.by_id.values() if box.state in FREED])
        log.event("recovered", sandboxes=len(self.book.registry.by_id), unsynced=len(unsynced))

    # ---- 2. confirmed, cancelled, ... --------------------------------------------------------------------------------

    async def carry_out(self, sheet: OrderSheet) -> None:
        """Carry out the orders of a sheet that are not done yet. On return they are durable and acknowledged.

        Only then its word that the manager was heard counts: it was given together with them.
        """
        await self._obey(sheet)
        self.leases.heard(sheet.agent, sheet.heard, sheet.lease_s)
        self.book.wake.set()

    async def _obey(self, sheet: OrderSheet) -> None:
        done = self.book.acknowledged.get(sheet.numbering, 0)
        last = max((order.number for order in sheet.orders), default=0)
        if last <= done:
            return
        boxes = await self.book.write(lambda db: self._orders_of(db, sheet), "record-order")
        self.book.acknowledged[sheet.numbering] = last
        self.book.changed.set()
        for order in sheet.orders:
            if order.number > done:
                log.event("record-order", agent=sheet.agent, number=order.number, action=order.action.value,
                          job=order.job, run=order.run_number)  # fmt: skip
        self.follow(boxes)

    def _orders_of(self, db: sqlite3.Connection, sheet: OrderSheet) -> Iterable[int]:
        self.leases.want(db, sheet.agent, sheet.lease_s)
        return orders.carry_out(db, sheet, self._now())

    def follow(self, boxes: Iterable[Sandbox]) -> None:
        """Act on a change of state: stop sending files of an ended sandbox, and free its bytes."""
        changed = list(boxes)
        ended = {box.id for box in changed if box.state in FREED}
        for batch in self._running.values():
            if ended & batch.sandboxes:
                batch.stop()
        self._releases.consider(changed)

    # ---- 3. leased and moved -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Start batches whenever something may be sent; returns when cancelled."""
        while True:
            self.book.wake.clear()
            self._start_batches()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.book.wake.wait(), self._until_next_s())
            await asyncio.sleep(_COALESCE_S)

    def _start_batches(self) -> None:
        if not self._sending:
            return
        registry, now_s = self.book.registry, self._clock.monotonic_s()
        limits, flow = self.rules.limits, self.breakers.flow
        places = Places(registry.occupying(), registry.destinations, limits)
        scene = Scene(
            registry.destinations, places, limits, self._load, flow, lambda owner: self._shares.of(owner, now_s),
            self._now(), self._batch_files, self._room, self._may_send,
        )  # fmt: skip
        self._tell_tuner()
        batches = plan(registry.backlog, scene)
        for place, batch in enumerate(batches):
            self.breakers.started(batch.server)
            later = sum(other.server == batch.server for other in batches[place + 1 :])
            target = self._target(registry.destinations[batch.destination])
            flight = self.tuner.start(target, batch.owner, sum(part.files for part in batch.parts), later)
            self._background(self._move(batch, flight))

    def _tell_tuner(self) -> None:
        """Return the backlog of each server, for which the policy service is asked for streams."""
        if self.tuner.grants is not None:
            most, flow = self.rules.tuning.knobs.maximum, self.breakers.flow
            self.tuner.waiting(
                self.book.registry.files_waiting(lambda at: flow(at) is not Flow.NONE, most, self._now())
            )

    def _heard_of(self, server: str) -> Flow:
        """Return how much may be sent to a server: nothing to one that has not answered for long."""
        before_s = self._clock.monotonic_s() - _SILENT_S
        running = (one for one in self._running.values() if one.destination.server == server)
        is_silent = any(one.began_s < before_s and not one.answered for one in running)
        return Flow.NONE if is_silent else self.breakers.flow(server)

    def _room(self, place: Destination, owner: str) -> int:
        """Files that a further batch of an owner may move at once to a destination."""
        planned = self._load.by_server[place.server] - self.tuner.flights(place.server)
        return self.tuner.room(self._target(place), owner, planned)

    def _batch_files(self, place: Destination) -> int:
        """Files that a call of a destination's plugin would rather have than the limit, 0 for no wish."""
        if self.hand_over_to is not None and self.hand_over_to.takes(place):
            return BATCH_FILES
        return self._table.batch_files(place.plugin, place.scheme)

    def _target(self, place: Destination) -> Target:
        plugin = self._table.find(place.plugin, place.scheme)
        if plugin is None:
            return Target(place.server)
        return Target(place.server, plugin.several, method_of(place.scheme) in plugin.in_parts)

    def _may_send(self, box: Sandbox) -> bool:
        """Its access point hears this manager, and no plugin still sends output of another run of the job."""
        return self.leases.holds(box.run.schedd) and not any(
            batch.jobs.get(box.run.job, box.id) != box.id for batch in self._running.values()
        )

    async def keep_leases(self) -> None:
        """Stop what may not be sent any more; returns when cancelled."""
        while True:
            for batch in list(self._running.values()):
                if not all(self.leases.holds(Run(job, 0).schedd) for job in batch.jobs):
                    batch.stop()
            if self.leases.changed():
                self.book.changed.set()
            await asyncio.sleep(_LEASES_INTERVAL_S)

    def hand_over(self, to: HandOver) -> None:
        """From now on a custodian gets what it takes; what is on its way to a slower end is given to it instead."""
        self.hand_over_to = to
        for place in self.book.registry.destinations.values():
            if to.takes(place):
                self.breakers.reached(place.server)  # that it is away does not matter any more
        for batch in list(self._running.values()):
            if to.takes(batch.destination):
                batch.stop()
        self.book.wake.set()

    async def plugins_ended(self) -> None:
        """Wait until no plugin sends anything of a sandbox that has ended: only then its end may be told."""
        while any(not self._is_wanted(batch) for batch in self._running.values()):
            await asyncio.sleep(_PLUGINS_END_S)

    def _is_wanted(self, batch: BatchRun) -> bool:
        boxes = (self.book.registry.by_id.get(sandbox) for sandbox in batch.sandboxes)
        return all(box is not None and box.state not in FREED for box in boxes)

    def _until_next_s(self) -> float:
        """Seconds until a waiting file is due or a breaker lets a probe through."""
        waits_s = (self.book.registry.backlog.wakes_at() - self._now(), self.breakers.soonest_s() or _IDLE_S, _IDLE_S)
        return max(0.05, min(waits_s))

    async def _move(self, batch: BatchPlan, flight: Flight) -> None:
        """One batch from lease to record; whatever goes wrong, its places are given back."""
        judged = False
        try:
            await self._lease(batch)
            files, held, way_out = await self._take(batch)
            if files and way_out is not None:
                await self.tell()
            judged = bool(files) and await self._send(batch, files, held, flight, way_out)
        except (OSError, sqlite3.Error) as problem:
            log.error("batch-failed", server=batch.server, problem=problem)
            # A full disk would stay full: sending is what makes room.
            if not await self.book.ledger.give_up_reserve():
                await asyncio.sleep(_AGAIN_S)
        finally:
            self.tuner.end(flight)
            if batch.probe:
                self.breakers.stopped(batch.server)
            if not judged:
                await self._give_back(batch)
            self._load.end(batch)
            self.book.wake.set()

    async def _lease(self, batch: BatchPlan) -> None:
        def change(db: sqlite3.Connection) -> Iterable[int]:
            for part in batch.parts:
                if records.state_of(db, part.sandbox) in (State.CONFIRMED, State.RETRY_WAIT):
                    records.set_state(db, part.sandbox, State.LEASED, self._now())
                    yield part.sandbox

        await self.book.write(change, "record-leased")

    async def _take(
        self, batch: BatchPlan
    ) -> tuple[list[lookups.FileRow], HeldSurroundings | None, Mapping[str, str] | None]:
        """Its files, what they are sent with, and settings of the hand-over if they go that way."""
        taken: list[lookups.FileRow] = []
        held: list[HeldSurroundings] = []
        to, settings = self._way_out_of(batch.destination), dict[str, str]()

        def change(db: sqlite3.Connection) -> Iterable[int]:
            taken[:], touched = take(db, batch, self.rules.limits.batch_bytes, self._now())
            held.clear()
            if taken and self.book.registry.destinations[batch.destination].surroundings:
                held.append(lookups.surroundings(db, taken[0].ticket))  # that of all: it is part of the destination
            if to is not None:
                settings.update(to.begin(taken, int(self._clock.wall_s())))
                records.keep_receipts(db, to.receipts(taken))
                for sandbox in {item.sandbox for item in taken}:
                    records.touch(db, sandbox)
            return touched

        await self.book.write(change, "record-moving")
        return taken, held[0] if held else None, settings if to is not None else None

    def _way_out_of(self, destination: int) -> HandOver | None:
        """The custodian that files for that destination are given to now."""
        to = self.hand_over_to
        return to if to is not None and to.takes(self.book.registry.destinations[destination]) else None

    async def _send(
        self,
        batch: BatchPlan,
        files: Sequence[lookups.FileRow],
        held: HeldSurroundings | None,
        flight: Flight,
        way_out: Mapping[str, str] | None,
    ) -> bool:
        """Run the plugin and record its answers. False when it was stopped before it answered."""
        if way_out is None and self._way_out_of(batch.destination) is not None:
            return False  # it was taken for the slower end, a moment before that was given up
        destination = self.book.registry.destinations[batch.destination]
        self._batch_number += 1
        number = self._batch_number
        directory = self._spool.root / "movers" / f"{number}-{files[0].ticket[:8]}"
        user = (batch.uid, batch.gid)
        known, now = self._rates.of(batch.server), self._clock.wall_s()
        limit_s, settings = call_limits(known, files, flight, self.rules.lifetime_s, now)
        if self._table.batch_files(destination.plugin, destination.scheme):
            # A service with a queue of its own: what the last call took says nothing about this one.
            limit_s, settings = self.rules.lifetime_s, call_settings(None, flight, now)
        settings.update(way_out or {})
        settings["STAGEOUT_JOBS"] = job_names(self.book.registry.job_of(item.sandbox) for item in files)
        run = BatchRun(self._spool, self._table, destination, user, files, directory, limit_s, settings, held, now)
        run.jobs = {self.book.registry.by_id[box].run.job: box for box in run.sandboxes}
        self._running[number] = run
        log.event("mover-exec", batch=number, server=batch.server, plugin=destination.plugin, files=len(files),
                  sandboxes=len(run.sandboxes), owner=batch.owner, files_at_once=flight.concurrency,
                  streams_each=flight.parallelism, limit_s=round(limit_s))  # fmt: skip
        started_s = run.began_s = self._clock.monotonic_s()
        size_bytes, arrived = sum(item.size_bytes for item in files), set[int]()
        self.throughput.started(batch.server, size_bytes, started_s)
        try:
            answers = await asyncio.get_running_loop().run_in_executor(self._movers, run.run)
            arrived |= only_delivered(answers).keys()
        except Stopped as stopped:
            log.event("mover-stopped", batch=number, delivered=len(stopped.delivered))
            arrived |= stopped.delivered.keys()
            await self._record_part(files, stopped.delivered)
            return False
        finally:
            del self._running[number]
            if run.asked:
                self.admission.state_bytes[batch.uid] = run.state_bytes
            arrived_bytes = sum(files[index].size_bytes for index in arrived)
            self.throughput.ended(batch.server, size_bytes, arrived_bytes, self._clock.monotonic_s())
        renewable = bool(held and held.credentials)
        await self.ages.mind()
        now_wall = self._clock.wall_s()
        judged = judge_batch(
            files, answers, self.rules.retry, self.book.registry.due_since, now_wall, renewable, run.answered
        )  # fmt: skip
        now_s = self._clock.monotonic_s()
        took_s = now_s - started_s
        self._shares.give(batch.owner, len(judged.delivered), judged.delivered_bytes, now_s)
        log.event("mover-ended", batch=number, delivered=len(judged.delivered), waiting=len(judged.waiting),
                  failed=len(judged.failed), s=round(took_s, 3))  # fmt: skip
        whole = run.asked and len(judged.delivered) == len(files)
        self.tuner.end(flight, [item.size_bytes for item in files] if whole else ())
        learnt = self._rates.after(batch.server, files, judged, took_s, self.tuner.level(batch.server), now + took_s)
        await self._record(destination, files, judged, run.asked, learnt if run.asked else None)
        return True

    async def _record_part(self, files: Sequence[lookups.FileRow], delivered: Mapping[int, Gone]) -> None:
        """Write which files of a stopped batch have arrived; on return it is on the disk."""
        if delivered:
            limit = self.rules.retry.attempts
            self.follow(
                await self.book.write(
                    lambda db: record_arrived(db, files, delivered, self._is_open, limit, self._now()),
                    "record-delivered",
                )
            )

    # ---- 4. judged ---------------------------------------------------------------------------------------------------

    async def _record(
        self, destination: Destination, files: Sequence[lookups.FileRow], judged: Judged, asked: bool,
        learnt: Known | None,
    ) -> None:  # fmt: skip
        """Write what became of a batch and of its sandboxes; on return it is on the disk.

        :param asked: a plugin ran; without that nothing was learnt about the server. :param learnt: about its rate.
        """
        back = asked and mind_breaker(self.breakers, destination.server, judged)
        for other in self._running.values():
            if other.destination.server == destination.server:
                other.answered |= asked and judged.tried and not judged.unreachable
        sandboxes = sorted({item.sandbox for item in files})
        named = {
            "record-delivered": judged.delivered,
            "record-handed-over": judged.handed_over,
            "record-retry": judged.waiting,
            "record-failed": judged.failed,
            "record-lost": judged.lost,
        }
        labels = [label for label, results in named.items() if results]
        excused = {(item.ticket_id, item.position): item.excused for item in judged.all}

        same = self.book.registry.destinations_at(destination.server)
        others = self.book.registry.backlog.waiting_for(same) if back else []
        breakers = self.breakers.dump()

        def change(db: sqlite3.Connection) -> Iterable[int]:
            records.record_results(db, judged.all)
            if learnt is not None:
                rates.keep(db, destination.server, learnt)
            touched = set(sandboxes)
            if back:
                touched |= records.wake(db, others, same, SILENT, self._now())
            if back or judged.unreachable:
                set_meta(db, _BREAKERS, breakers)
            for item in files:
                more = excused.get((item.ticket_id, item.position), False)
                records.keep_attempts(db, item.sandbox, item.attempts, item.excused + more)
            lose(db, files, judged, self._now())
            for sandbox in sandboxes:
                settle(db, sandbox, self._is_open, self.rules.retry.attempts, self._now())
            return touched

        self.follow(await self.book.write(change, *labels))

    def _is_open(self, destination: int) -> bool:
        place = self.book.registry.destinations.get(destination)
        return place is None or self.breakers.opens_in_s(place.server) <= 0

    async def _give_back(self, batch: BatchPlan) -> None:
        """Files of the batch that were not judged wait again, and their sandboxes with them.

        Done again until it is recorded, or the manager stops (the next start does it): nothing else takes them up.
        """
        limit = self.rules.retry.attempts
        while True:
            try:
                await self.book.write(lambda db: give_back(db, batch, self._is_open, limit, self._now()))
                return
            except (OSError, sqlite3.Error) as problem:
                log.error("give-back", problem=problem, again_in_s=_AGAIN_S)
            if not self._sending:
                return
            await asyncio.sleep(_AGAIN_S)

    # ---- 5. released (releases.py) and looked after ------------------------------------------------------------------

    async def keep_house(self) -> None:
        """Let deadlines pass that nothing else looks at: unconfirmed, given up, kept long enough."""
        try:
            await self.book.ledger.keep_reserve()
        except OSError as problem:
            log.warn("reserve-keep", problem=problem)
        try:
            await self.book.ledger.compact()
        except sqlite3.Error as problem:
            log.warn("ledger-compact", problem=problem)
        await self.ages.mind()
        busy, now = self.busy_sandboxes, self._now()
        due = recovery.due(self.book.registry.by_id.values(), busy, self.rules, now)
        if due:
            self.follow(
                await self.book.write(lambda db: recovery.pass_deadlines(db, due, self.rules, now), "record-failed")
            )

    async def forget_old_jobs(self) -> None:
        """Forget jobs that nothing is held of and that were not heard of for the retention time; look for strays."""
        await self.ages.mind()
        self._shares.fade(self._clock.monotonic_s())
        await asyncio.get_running_loop().run_in_executor(self._disk, self._spool.withdraw_again)
        await self.strays.collect()
        await self._forget_plugin_state()
        await self.book.drop_old_fences(int(self._clock.wall_s() - self.rules.retention_s))

    async def _forget_plugin_state(self) -> None:
        """Remove the state of plugins whose user has no output left here."""
        uids = {box.uid for box in self.book.registry.by_id.values() if not box.freed}
        try:
            await self._in_disk_thread(self._spool.state.keep_only, uids)
        except OSError as problem:
            log.warn("state-left", problem=problem)
        self.admission.state_bytes = {uid: size for uid, size in self.admission.state_bytes.items() if uid in uids}

    async def _account_freed(self, uid: int) -> None:
        """Remove what plugins keep for an account of the manager's own that has no output any more: the next owner may
        have it then."""
        has_output = any(uid == holder for holder, _ in self.book.registry.holders)
        if has_output or all(uid != account.uid for account in self.rules.accounts):
            return
        try:
            await self._in_disk_thread(self._spool.state.forget, uid)
        except OSError as problem:
            log.warn("state-left", problem=problem)
        else:
            self.admission.state_bytes.pop(uid, None)

    # ---- stopping and looking ----------------------------------------------------------------------------------------

    def stop_accepting(self) -> None:
        """Refuse hand-offs."""
        self.admission.stopping = True

    async def stop_sending(self, grace_s: float) -> None:
        """Start no further batch, let running ones end for ``grace_s`` seconds, stop the rest."""
        self._sending = False
        deadline = self._clock.monotonic_s() + grace_s
        while self._load.movers:
            for batch in list(self._running.values()) if self._clock.monotonic_s() >= deadline else ():
                batch.stop()
            await asyncio.sleep(0.05)

    async def stop(self, grace_s: float) -> None:
        """Take and send nothing more, as above, and wait until all is recorded and its bytes are freed."""
        self.stop_accepting()
        await self.stop_sending(grace_s)
        await self._syncs.stop()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_LAST_S)
        await end(self._tasks)
        self._movers.shutdown(wait=True)
        self._disk.shutdown(wait=True)
        self._syncing.shutdown(wait=True)

    def new_rules(self, rules: Rules) -> None:
        """Take over a changed configuration; running batches are not touched."""
        self.rules = rules
        self.book.registry.order_anew(lambda box: deadline_of(box, rules))
        self.tuner.new_rules(rules.tuning)
        self.book.wake.set()
        self.book.changed.set()

    @property
    def busy_sandboxes(self) -> Collection[int]:
        """Sandboxes with files in a mover or about to be."""
        return frozenset(sandbox for sandbox, _ in self._load.running)

    @property
    def movers_running(self) -> int:
        """Plugins that run now."""
        return len(self._running)

    def _background(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("fault", task=task.get_name(), problem=repr(task.exception()))

    async def _in_disk_thread(self, work: Callable[[A], T], argument: A) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work, argument)

    def _now(self) -> int:
        return int(self._clock.wall_s())
