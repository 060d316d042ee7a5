"""Bugs that are put into the product on purpose: the simulation must find each of them.

Each is a change of one place of the product's code, made while schedules are played, and the misfortunes that it takes
to meet it (all of them happen in ordinary schedules, too, but seldom at the right moment). ``python -m
tests.crash.planted`` looks for all of them in ordinary schedules.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import inspect
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import sandbox_manager.custody.ledger
import sandbox_manager.custody.queries
import sandbox_manager.custody.recovery
import sandbox_manager.custody.redirects
import sandbox_manager.report.reporter
import schedd_agent.agent
import schedd_agent.decisions
import schedd_agent.receipts
from sandbox_manager.custody import orders, redirects, updates
from sandbox_manager.custody.ledger import Releases, Reserve
from sandbox_manager.custody.spool import Spool, Synced, _each_file
from sandbox_manager.custody.syncing import Syncs
from sandbox_manager.delivery.batch import BatchRunner
from sandbox_manager.intake.acceptance import Acceptance
from sandbox_manager.intake.admission import Admission
from sandbox_manager.intake.listener import Intake
from sandbox_manager.pipeline import Pipeline
from sandbox_manager.report.reporter import Reporter
from sandbox_manager.scheduling.leases import Leases
from schedd_agent.agent import Agent
from schedd_agent.liveness import _PoolLiveness
from schedd_agent.model import SendOrder
from schedd_agent.orders import OrderNumbers
from schedd_agent.receipts import Receipts
from stageout.core import durable
from stageout.core.clock import wall_now
from stageout.core.history import HistoryFile
from stageout.core.states import FREED, State
from stageout.model.job import Job
from stageout.wire.custody import Action
from stageout.wire.handoff import Receipt
from tests.crash.memory_disk import MemoryDisk
from tests.crash.simulation import Simulation

Change = tuple[Any, str, Any]
#: A bug must be found by one of so many seeds of its own schedules; so few are tried soon enough without a note.
MOST_SEEDS, _FEW = 160, 4
#: Seeds that found bugs when they were last looked for (``--seeds``), if the first four did not. They are tried first.
_FOUND_BY = {
    "a confirmation of a run without a record is not answered": 7,
    "a file goes to its fallback a second time": 29,
    "a manager that has just started sends without a lease": 5,
    "a new agent does not look which files are recorded": 10,
    "a new run is confirmed while the old one may still be sent": 25,
    "a shadow that only says that the job is done counts as a run": 8,
    "a shadow that only says that the job is done fences the run that counts": 13,
    "an agent that lost its number begins again at one": 30,
    "an end is told while a plugin still sends": 7,
    "data are recorded as synced, only names are": 6,
    "managers forget files that are not recorded": 23,
    "managers send without a lease": 25,
    "output of a run that failed in part is thrown away": 14,
    "output without a record is removed": 15,
    "strays stay in the spool": 109,
    "the ledger does not wait for the disk": 16,
    "the record of a refused sync is not written": 30,
    "tickets that the record does not name are never freed": 7,
    "tickets that the record does not name are sent": 17,
    "what is gone from the queue counts as cancelled": 8,
    "what was stopped stays leased": 17,
    "who wants a lease is not remembered over a start": 16,
}


@dataclass(frozen=True)
class Planted:
    """One bug.

    :param changes: what is replaced: (module or class, name, value). :param misfortunes: what happens in its schedules.
    :param step_fault: probability of a fault at a step there. :param parts: most hand-offs of one run there.
    :param repeats: probability that uploads are repeated there. :param length_s: of the trouble there.
    """

    name: str
    changes: Callable[[], list[Change]]
    misfortunes: tuple[str, ...]
    step_fault: float = 0.0
    parts: int = 2
    repeats: float = 0.0
    length_s: float = 3000.0

    def seeds(self, most: int) -> list[int]:
        """Return seeds from one to the last, with the one in front that found it before."""
        return [*([_FOUND_BY[self.name]] if self.name in _FOUND_BY else []), *range(1, most + 1)]

    def schedule(self, seed: int) -> Simulation:
        """A schedule in which this is easily met."""
        return Simulation(
            seed, misfortunes=self.misfortunes, step_fault=self.step_fault, parts=self.parts, repeats=self.repeats,
            jobs=4, length_s=self.length_s,
        )  # fmt: skip


@contextmanager
def planted(bug: Planted) -> Iterator[None]:
    """The product with this bug."""
    changes = bug.changes()
    before = [(place, name, place.__dict__[name]) for place, name, _ in changes]
    for place, name, value in changes:
        setattr(place, name, value)
    try:
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)


def mutated(place: Any, name: str, old: str, new: str) -> Change:
    """A function of the product in which ``old``, which stands there once, is ``new``."""
    real = place.__dict__[name]
    text = textwrap.dedent(inspect.getsource(real))
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {name}: plant this bug anew"
    found: dict[str, Any] = {}
    exec(text.replace(old, new), sys.modules[real.__module__].__dict__, found)
    return place, name, found[name]


def _order(action: Action, name: str, old: str, new: str) -> Change:
    """The same of the function that carries out one kind of order."""
    _, _, wrong = mutated(orders, name, old, new)
    return orders, "_ACTIONS", {**orders._ACTIONS, action: wrong}


def _as_if_never_down(db: Any, directories: Any, boot: str, now: int, longest_s: float) -> Any:
    db.execute("UPDATE tickets SET boot = ?", (boot,))
    return _real_settle(db, directories, boot, now, longest_s)


_real_settle = sandbox_manager.custody.recovery.reconcile_ledger


def _sync_without_data(spool: Spool, tickets: Sequence[str]) -> Synced:
    """Names are synced, data are not."""
    with durable.step("spool-sync"):
        descriptor = durable.disk.open(spool.root / "sandboxes", 0)
        durable.disk.fsync(descriptor)
        durable.disk.close(descriptor)
    return Synced(list(tickets))


def _refused_is_tried_again(spool: Spool, tickets: Sequence[str]) -> Synced:
    """A second sync of the same file is believed."""
    synced = _real_sync(spool, [ticket for ticket in tickets if not _is_refused(spool, ticket)])
    synced.again += [ticket for ticket in tickets if ticket not in synced.on_disk]
    return synced


_real_sync = Spool.sync


def _is_refused(spool: Spool, ticket: str) -> bool:
    try:
        _each_file(spool.root / "sandboxes" / ticket, durable.disk.fdatasync)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _removed(spool: Spool, tickets: Iterable[str]) -> list[str]:
    """Output that the ledger does not know counts as nobody's."""
    for ticket in tickets:
        spool.release(ticket)
    return []


async def _record_before_sync(syncs: Any, tickets: Sequence[str]) -> None:
    """The two steps the other way round."""
    await syncs._records.record(Synced(list(tickets)))
    await asyncio.sleep(600)
    syncs._spool.sync(tickets)


async def _accept_unwritten(acceptance: Acceptance, handoff: Any) -> Any:
    """The receipt goes out while the record is still being written."""
    asyncio.get_running_loop().create_task(_slowly(acceptance, handoff))
    acceptance.unreserve(handoff.reservation)
    return Receipt(
        handoff.ticket, acceptance._manager.name, acceptance._manager.key, len(handoff.files), handoff.size_bytes
    )  # fmt: skip


async def _slowly(acceptance: Acceptance, handoff: Any) -> None:
    await asyncio.sleep(2.0)
    await acceptance._record_ticket(handoff)


def _open_fast(path: Any) -> Any:
    connection = _real_open(path)
    connection.execute("PRAGMA synchronous = OFF")
    return connection


_real_open = sandbox_manager.custody.ledger._open


def _confirmed_at_once(db: Any, box: int, now: int) -> None:
    """Output is sent without the access point's word."""
    if updates.state_of(db, box) is State.ACCEPTED:
        updates.name_tickets(db, box, updates.tickets_of(db, box), 0, 0)
        updates.confirm(db, box, now)


def _gone_is_cancelled(given: Any) -> Any:
    return (
        SendOrder(item.manager, Action.CANCEL, item.sandbox.number)
        for item in given.reported
        if item.sandbox.state not in FREED
    )


def _counts_holes(view: _PoolLiveness, now_s: float, age_s: float, hole_s: float, settle_s: float) -> None:
    """Silence is counted although nobody could be heard."""
    view.watched_s += now_s - getattr(view, "_ever_s", now_s)
    view._ever_s = now_s  # type: ignore[attr-defined]


def _nothing(*arguments: Any, **more: Any) -> list[Any]:
    return []


def _number_without_series(numbers: OrderNumbers, path: Any, wall_s: float) -> None:
    """A node that lost the file counts from one again, under the same name."""
    numbers._path, numbers.series, numbers._next = path, "", 1
    with suppress(FileNotFoundError, ValueError):
        numbers._next = int(durable.read_file(path).split()[0])


async def _recorded_before_it_is_freed(releases: Releases, sandbox: int) -> None:
    """The two steps the other way round."""
    tickets = await releases._store.ledger.read(lambda db: updates.dropped_tickets(db, sandbox))
    left = await releases._store.write(
        lambda db: updates.record_released(db, sandbox, tickets, wall_now(releases._clock))
    )
    for ticket in tickets:
        await asyncio.get_running_loop().run_in_executor(releases._disk, releases._spool.release, ticket)
        releases._space.drop(ticket)
    releases._under_way.discard(sandbox)
    releases.consider(left)


_FENCING_OFF: list[Change] = [(Leases, "holds", lambda leases, schedd: True)]

# Guards that have a second one behind them, so that their loss harms nobody: what counts is named first.
# - A hand-off raises its job's fence and supersedes older runs; CONFIRM does both again.
# - BatchRunner.plugins_ended keeps the end of a run from being told while a plugin sends, so no newer run is confirmed
#   meanwhile; Scheduler._may_send looks for such plugins of the same node again, and Releases.follow only ends them
#   sooner.
# - Nothing fails before it was confirmed (no code does that); RETRY looks again.
# - REDIRECT and fallbacks choose files by their state; set_url looks again.
BUGS = (
    Planted("managers send without a lease", lambda: _FENCING_OFF, ("lost_sight",)),
    Planted(
        "a new run is confirmed while the old one may still be sent",
        lambda: [(schedd_agent.decisions, "_is_fenced", lambda *facts, **more: True), *_FENCING_OFF],
        ("lost_sight",),
    ),
    Planted(
        "output of a run that failed in part is thrown away",
        lambda: [(Job, "has_failed_transfer", property(lambda job: False))],
        (),
    ),
    Planted(
        "unsynced data count after a loss of power",
        lambda: [(sandbox_manager.custody.recovery, "reconcile_ledger", _as_if_never_down)],
        ("power_after_handoff",),
    ),
    Planted(
        "data are recorded as synced, only names are",
        lambda: [(Spool, "sync", _sync_without_data)],
        ("power_after_handoff",),
    ),
    Planted(
        "data that the disk has refused are synced again",
        lambda: [(Spool, "sync", _refused_is_tried_again)],
        ("sync_refused",),
    ),
    Planted(
        "the record of a refused sync is not written",
        lambda: [
            mutated(sandbox_manager.custody.recovery, "record_synced", "mark_tickets_lost(db, lost, now)", "[]"),
        ],
        ("sync_refused", "agent_cut_off_long", "destination_down", "vacate"),
        repeats=0.5,
    ),
    Planted(
        "recorded as synced before it is", lambda: [(Syncs, "_sync", _record_before_sync)], ("power_after_handoff",)
    ),
    Planted(
        "the receipt goes out before the record is written",
        lambda: [(Acceptance, "accept", _accept_unwritten)],
        ("kill_after_handoff",),
    ),
    Planted(
        "the ledger does not wait for the disk",
        lambda: [(sandbox_manager.custody.ledger, "_open", _open_fast)],
        ("power_after_handoff",),
    ),
    Planted(
        "managers forget files that are not recorded",
        lambda: [mutated(Agent, "_decide_all", " and one not in waiting", "")],
        ("kill_agent",),
        step_fault=0.05,
    ),
    Planted(
        "a new agent does not look which files are recorded",
        lambda: [mutated(HistoryFile, "_recent", "newest_first(self._path)", "()")],
        ("kill_agent",),
    ),
    Planted("output is sent unconfirmed", lambda: [(orders, "confirm_late", _confirmed_at_once)], ("kill_agent",)),
    Planted(
        "what is gone from the queue counts as cancelled",
        lambda: [(schedd_agent.decisions, "_decide_left_job", _gone_is_cancelled)],
        ("vanish",),
    ),
    Planted(
        "silence counts while nobody could be heard",
        lambda: [(_PoolLiveness, "record_snapshot", _counts_holes)],
        ("blind",),
        length_s=6000.0,
    ),
    Planted(
        "strays stay in the spool",
        lambda: [(Spool, "set_aside", _nothing)],
        ("kill_agent",),
        0.05,
        length_s=6000.0,
    ),
    Planted(
        "output without a record is removed",
        lambda: [(Spool, "set_aside", _removed)],
        ("older_ledger", "destination_down"),
    ),
    Planted(
        "a confirmation of a run without a record is not answered",
        lambda: [_order(Action.CONFIRM, "_confirm", "if order.tickets:", "if False:")],
        ("older_ledger", "destination_down"),
    ),
    Planted(
        "a record of another job with the same number is believed",
        lambda: [mutated(schedd_agent.receipts, "_is_about", 'record.job in ("", job.name)', "True")],
        ("forged_record",),
    ),
    Planted(
        "a record with another owner is believed",
        lambda: [
            mutated(
                schedd_agent.receipts, "_is_about", 'record.owner in (job.owner, job.owner.rpartition("@")[0])', "True"
            )
        ],
        ("forged_record",),
    ),
    Planted(
        "two managers may serve one spool",
        lambda: [(MemoryDisk, "try_lock", lambda disk, descriptor: True)],
        ("second_manager",),
    ),
    Planted(
        "an agent that lost its number begins again at one",
        lambda: [(OrderNumbers, "__init__", _number_without_series)],
        ("number_lost",),
    ),
    Planted(
        "a shadow that only says that the job is done counts as a run",
        lambda: [(Receipts, "last_transfer", lambda receipts, key, job: job.run)],
        ("kill_agent",),
    ),
    Planted(
        "a shadow that only says that the job is done fences the run that counts",
        lambda: [mutated(schedd_agent.decisions, "_may_be_own", "(given.recorded_run or ended.run)", "ended.run")],
        ("mute_after_handoff",),
        repeats=0.9,
    ),
    # ---- recovery
    Planted(
        "files that were being sent are not sent after a start",
        lambda: [
            mutated(sandbox_manager.custody.recovery, "reconcile_ledger", "updates.moving_back(db, sandbox)", "pass")
        ],
        ("kill_while_moving",),
    ),
    Planted(
        "sandboxes that were being sent stay so after a start",
        lambda: [mutated(sandbox_manager.custody.recovery, "reconcile_ledger", "(State.MOVING, State.LEASED)", "()")],
        ("kill_while_moving",),
    ),
    Planted(
        "a ticket whose directory has vanished is not lost",
        lambda: [
            mutated(sandbox_manager.custody.recovery, "reconcile_ledger", "if ticket not in directories:", "if False:")
        ],
        ("destination_down", "directory_gone"),
    ),
    # ---- acceptance
    Planted(
        "output of an older run is taken after a newer one",
        lambda: [
            mutated(Admission, "_run", "if newest > run.number:", "if False:"),
            mutated(orders, "record_handoff", "if newest > run.number:", "if False:"),
        ],
        ("linger", "linger", "vacate"),
    ),
    Planted(
        "a hand-off is added to a run that is confirmed already",
        lambda: [
            mutated(Admission, "_run", "known is not None and known.state", "known is False and known.state"),
            mutated(orders, "record_handoff", "state not in (None, State.ACCEPTED)", "False"),
        ],
        ("late_part", "destination_down"),
        0.0,
        3,
    ),
    Planted(
        "older runs are not superseded by a newer hand-off",
        lambda: [mutated(orders, "record_handoff", "[sandbox, *supersede_older(db, run, now)]", "[sandbox]")],
        ("linger", "vacate", "schedd_down"),
    ),
    Planted(
        "room that was reserved for a hand-off that failed is kept for ever",
        lambda: [mutated(Intake, "_receive", "self._acceptance.unreserve(reservation)", "pass")],
        ("disk_full",),
        0.05,
    ),
    Planted(
        "room of output that is gone is kept for ever",
        lambda: [mutated(Releases, "_free", "self._space.drop(ticket)", "pass")],
        ("mute",),
    ),
    # ---- orders
    Planted(
        "order numbers are not compared",
        lambda: [mutated(orders, "apply_orders", "order.number > done", "True")],
        ("odd_order", "mute"),
    ),
    Planted(
        "CANCEL reaches newer runs",
        lambda: [_order(Action.CANCEL, "_cancel", "order.run", "replace(order.run, number=10**9)")],
        ("odd_order", "vacate"),
    ),
    Planted(
        "SUPERSEDE reaches newer runs",
        lambda: [_order(Action.SUPERSEDE, "_supersede", "last=order.run", "last=replace(order.run, number=10**9)")],
        ("odd_order", "vacate"),
    ),
    Planted(
        "SUPERSEDE raises no fence",
        lambda: [
            _order(
                Action.SUPERSEDE,
                "_supersede",
                "updates.raise_fence(db, replace(order.run, number=order.run_number + 1), now)",
                "",
            )
        ],
        ("linger", "linger", "vacate"),
        repeats=0.9,
    ),
    Planted(
        "RETRY sends what was never confirmed",
        lambda: [
            mutated(
                orders,
                "_send_again",
                "state is State.FAILED and updates.was_confirmed(db, sandbox)",
                "state in (State.FAILED, State.ACCEPTED)",
            )
        ],
        ("odd_order", "kill_agent"),
    ),
    Planted("PAUSE does nothing", lambda: [_order(Action.PAUSE, "_pause", "True", "False")], ("odd_order", "wish")),
    Planted("RESUME does nothing", lambda: [_order(Action.RESUME, "_resume", "False", "True")], ("odd_order", "wish")),
    Planted(
        "FORGET takes what has not come to its end",
        lambda: [_order(Action.FORGET, "_forget", "elif state not in FREED:", "elif False:")],
        ("odd_order",),
    ),
    Planted(
        "an order counts as done before it is on the disk",
        lambda: [
            mutated(
                Pipeline,
                "_apply",
                "await self.store.write",
                "self.store.acknowledged[sheet.numbering] = last; await self.store.write",
            )
        ],
        ("disk_full",),
        0.05,
    ),
    Planted(
        "tickets that the record does not name are sent",
        lambda: [mutated(updates, "confirm", "in set(held) - named", "in ()")],
        ("late_part",),
        0.0,
        3,
    ),
    Planted(
        "files of a run that ended wait on",
        lambda: [mutated(updates, "end", "if new is not State.FAILED:", "if False:")],
        ("linger", "vacate"),
    ),
    Planted(
        "a file goes to its fallback a second time",
        lambda: [mutated(updates, "set_url", "max(fell_back, ?)", "0 * ?")],
        ("destination_refuses", "destination_refuses", "wish", "wish"),
    ),
    Planted(
        "REDIRECT reaches files that are being sent",
        lambda: [
            mutated(redirects, "_is_movable", "item.state in STILL_FILES", "True"),
            mutated(updates, "set_url", "AND {IS_STILL}", ""),
        ],
        ("wish", "wish", "destination_down"),
    ),
    Planted(
        "output fails before it was sent to its fallback",
        lambda: [(sandbox_manager.custody.redirects, "use", lambda *facts, **more: False)],
        ("destination_refuses",),
    ),
    # ---- releases
    Planted(
        "tickets that the record does not name are never freed",
        lambda: [mutated(Releases, "consider", "not sandbox.freed and sandbox.confirmed_at", "False")],
        ("destination_down",),
        0.0,
        3,
        0.5,
    ),
    Planted(
        "releases go round and round",
        lambda: [mutated(Releases, "consider", "not sandbox.freed and sandbox.confirmed_at", "sandbox.confirmed_at")],
        ("destination_down",),
        0.0,
        3,
        0.5,
    ),
    Planted(
        "a failed removal is not tried again",
        lambda: [mutated(Releases, "_free", "self._background.run(self._free(sandbox_id))", "pass")],
        ("names_stay",),
    ),
    Planted(
        "recorded as released before the bytes are gone",
        lambda: [(Releases, "_free", _recorded_before_it_is_freed)],
        ("kill_manager",),
    ),
    Planted(
        "a record that may go stays",
        lambda: [mutated(updates, "record_released", "if row[1]:", "if False:")],
        ("kill_manager",),
    ),
    Planted(
        "bytes of files that are being sent, or failed, may be freed",
        lambda: [mutated(updates, "dropped_tickets", "{IS_LEFT}", "state = 0")],
        ("destination_refuses", "odd_order"),
        0.0,
        3,
        0.5,
    ),
    # ---- sending
    Planted(
        "what was stopped stays leased",
        lambda: [mutated(Pipeline, "deliver", "await self._requeue(delivery)", "pass")],
        ("disk_full",),
        0.05,
    ),
    Planted(
        "files of a batch whose record failed twice are not sent",
        lambda: [mutated(Pipeline, "_requeue", "while True:", "for _ in range(1):")],
        ("disk_ails", "disk_full_while_moving"),
        0.05,
    ),
    Planted(
        "an end is told while a plugin still sends",
        lambda: [mutated(BatchRunner, "plugins_ended", "while any", "while False and any")],
        ("sync_refused",),
    ),
    # ---- leases
    Planted(
        "a lease counts from the hearing of the report",
        lambda: [mutated(Leases, "mark_read", "made_s + self._bounded", "self._now_s() + self._bounded")],
        ("mute", "destination_down"),
    ),
    Planted(
        "a manager that has just started sends without a lease",
        lambda: [mutated(Leases, "holds", 'float("-inf")', 'float("inf")')],
        ("mute", "destination_down", "kill_manager"),
    ),
    Planted(
        "who wants a lease is not remembered over a start",
        lambda: [mutated(Leases, "want", "if get_meta(", "if False and get_meta(")],
        ("lost_sight", "kill_manager"),
    ),
    Planted(
        "a short lease is promised and not kept",
        lambda: [mutated(Leases, "_bounded", "min(lease_s, self._promised_s or lease_s)", "lease_s")],
        ("cable",),
    ),
    Planted(
        "an access point waits less long than a short lease lasts",
        lambda: [(schedd_agent.agent, "silence_of_lost_s", lambda lease_s: lease_s / 2)],
        ("cable",),
    ),
    # ---- ledger
    Planted(
        "one damaged row keeps all reports from being made",
        lambda: [
            (sandbox_manager.custody.queries, "text_of", bytes.decode),
            mutated(
                sandbox_manager.report.reporter, "_some_files", "sqlite3.DatabaseError, ValueError, TypeError", "()"
            ),
        ],
        ("damaged_text", "destination_down"),
    ),
    Planted(
        "a report that waited long for the disk puts off the next one",
        lambda: [mutated(Reporter, "_pause_s", "self._next_in_s()", "float('inf')")],
        ("slow_disk",),
        length_s=9000.0,
    ),
    Planted(
        "a reserve that cannot be given up leaves all writers waiting",
        lambda: [mutated(Reserve, "give_up", "except OSError", "except ZeroDivisionError")],
        ("disk_ails",),
    ),
)

#: The most schedules in which each must be found, and seconds of processor time.
MOST_SCHEDULES, MOST_S = 2000, 300.0


class Found(NamedTuple):
    """The first ordinary schedule that shows a bug.

    :param seed: of the first that shows it, 0: none does. :param text: what it says. :param took_s: processor time.
    """

    seed: int
    text: str
    took_s: float


def find(bug: Planted, first: int = 1) -> Found:
    """Play ordinary schedules until one shows the bug."""
    began_s = time.process_time()
    gc.disable()
    for seed in range(first, first + MOST_SCHEDULES):
        with planted(bug):
            found = Simulation(seed).run()
        took_s = time.process_time() - began_s
        if found:
            assert not Simulation(seed).run(), f"seed {seed} breaks a promise without {bug.name!r}, too"
            return Found(seed, found[0], took_s)
        if took_s > MOST_S:
            break
        if seed % 10 == 0:
            gc.collect()
    return Found(0, "", took_s)


def first_seed(bug: Planted) -> int:
    """Return the seed that shows a bug first in its own schedules, 0 for none."""
    for seed in bug.seeds(MOST_SEEDS):
        with planted(bug):
            if bug.schedule(seed).run():
                return seed
    return 0


def main(argv: list[str] | None = None) -> int:
    """Entry point; 1 when a bug was not found."""
    parser = argparse.ArgumentParser(prog="make planted", description=__doc__)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="bugs with this in their names")
    parser.add_argument("--seeds", action="store_true", help="print _FOUND_BY as it is now, and look for nothing else")
    options = parser.parse_args(argv)
    if options.seeds:
        found_by = {bug.name: first for bug in BUGS if (first := first_seed(bug)) > _FEW}
        print("\n".join(f'    "{name}": {found_by[name]},' for name in sorted(found_by)))
        return 0
    numbers = [number for number, bug in enumerate(BUGS) if options.only in bug.name]
    missed = 0
    with ProcessPoolExecutor(options.workers) as pool:
        for number, found in zip(numbers, pool.map(_find_number, numbers)):
            missed += not found.seed
            seed = found.seed or "NOT FOUND"
            print(f"{seed:>9} {found.took_s:4.0f} s  {BUGS[number].name}: {found.text}", flush=True)
    print(f"planted: {len(numbers)} bugs, {missed} not found")
    return 1 if missed else 0


def _find_number(number: int) -> Found:
    return find(BUGS[number])


if __name__ == "__main__":
    sys.exit(main())
