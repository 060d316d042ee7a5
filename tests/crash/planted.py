"""Bugs that are put into the product on purpose: the simulation must find each of them.

Each is a change of one place of the product's code, made while schedules are played, and the misfortunes that it takes
to meet it (all of them happen in ordinary schedules, too, but seldom at the right moment).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import sandbox_manager.ledger
import sandbox_manager.orders
import sandbox_manager.pipeline
import sandbox_manager.records
import sandbox_manager.recovery
import schedd_agent.tracker
from sandbox_manager.acceptance import Acceptance
from sandbox_manager.leases import Leases
from sandbox_manager.spool import Spool
from sandbox_manager.strays import Strays
from sandbox_manager.syncing import Syncs
from schedd_agent.leases import View
from schedd_agent.model import Send
from schedd_agent.orders import Numbers
from schedd_agent.receipts import Receipts
from stageout.core import durable
from stageout.core.states import FREED, State
from stageout.wire.custody import Action
from stageout.wire.handoff import Receipt
from tests.crash.memory_disk import MemoryDisk

Change = tuple[Any, str, Any]


@dataclass(frozen=True)
class Planted:
    """One bug.

    :param changes: what is replaced: (module or class, name, value). :param misfortunes: what happens in its schedules.
    :param step_fault: probability of a fault at a step there.
    """

    name: str
    changes: Callable[[], list[Change]]
    misfortunes: tuple[str, ...]
    step_fault: float = 0.0


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


def _as_if_never_down(db: Any, directories: Any, boot: str, now: int, longest_s: float) -> Any:
    db.execute("UPDATE tickets SET boot = ?", (boot,))
    return _real_settle(db, directories, boot, now, longest_s)


_real_settle = sandbox_manager.recovery.settle_ledger


def _sync_without_data(spool: Spool, tickets: Sequence[str]) -> list[str]:
    """Names are synced, data are not."""
    with durable.step("spool-sync"):
        descriptor = durable.disk.open(spool.root / "sandboxes", 0)
        durable.disk.fsync(descriptor)
        durable.disk.close(descriptor)
    return list(tickets)


async def _record_before_sync(syncs: Any, tickets: Sequence[str]) -> None:
    """The two steps the other way round."""
    await syncs._record(tickets)
    await asyncio.sleep(600)
    syncs._spool.sync(tickets)


async def _accept_unwritten(acceptance: Acceptance, handoff: Any) -> Any:
    """The receipt goes out while the record is still being written."""
    asyncio.get_running_loop().create_task(_slowly(acceptance, handoff))
    acceptance.release(handoff.reservation)
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


_real_open = sandbox_manager.ledger._open


def _confirmed_at_once(db: Any, box: int, now: int) -> None:
    """Output is sent without the access point's word."""
    if sandbox_manager.records.state_of(db, box) is State.ACCEPTED:
        sandbox_manager.records.name_tickets(db, box, sandbox_manager.records.tickets_of(db, box), 0, 0)
        sandbox_manager.records.confirm(db, box, now)


def _gone_is_cancelled(s: Any) -> Any:
    return (
        Send(item.manager, Action.CANCEL, item.sandbox.number) for item in s.seen if item.sandbox.state not in FREED
    )


def _counts_holes(view: View, now_s: float, age_s: float, shown: Any, managers: Any = ()) -> None:
    """Silence is counted although nobody could be heard."""
    last_s = getattr(view, "_ever_s", now_s)
    view._ever_s = now_s  # type: ignore[attr-defined]
    view._seen_s += now_s - last_s
    for key in shown:
        view._shown[key] = view._seen_s
    for manager in managers:
        view._managers[manager] = view._seen_s


def _nothing(*arguments: Any, **more: Any) -> list[Any]:
    return []


def _number_without_series(numbers: Numbers, path: Any, wall_s: float) -> None:
    """Who lost the file counts from one again, under the same name."""
    numbers._path, numbers.series, numbers._next = path, "", 1
    with suppress(FileNotFoundError, ValueError):
        numbers._next = int(durable.read_file(path).split()[0])


_FENCING_OFF: list[Change] = [(Leases, "holds", lambda leases, schedd: True)]

BUGS = (
    Planted("managers send without a lease", lambda: _FENCING_OFF, ("lost_sight",)),
    Planted("a new run is confirmed while the old one may still be sent",
            lambda: [(schedd_agent.tracker, "_is_fenced", lambda *facts: True), *_FENCING_OFF], ("lost_sight",)),
    Planted("unsynced data count after a loss of power",
            lambda: [(sandbox_manager.recovery, "settle_ledger", _as_if_never_down)], ("power_after_handoff",)),
    Planted("data are recorded as synced, only names are", lambda: [(Spool, "sync", _sync_without_data)],
            ("power_after_handoff",)),
    Planted("recorded as synced before it is", lambda: [(Syncs, "_sync", _record_before_sync)],
            ("power_after_handoff",)),
    Planted("the receipt goes out before the record is written", lambda: [(Acceptance, "accept", _accept_unwritten)],
            ("kill_after_handoff",)),
    Planted("the ledger does not wait for the disk", lambda: [(sandbox_manager.ledger, "_open", _open_fast)],
            ("power_after_handoff",)),
    Planted("output is sent unconfirmed", lambda: [(sandbox_manager.orders, "confirm_late", _confirmed_at_once)],
            ("kill_agent",)),
    Planted("what is gone from the queue counts as cancelled",
            lambda: [(schedd_agent.tracker, "_gone", _gone_is_cancelled)], ("vanish",)),
    Planted("silence counts while nobody could be heard", lambda: [(View, "looked", _counts_holes)], ("blind",)),
    Planted("strays stay in the spool", lambda: [(Spool, "remove_strays", _nothing), (Strays, "collect", _nothing)],
            ("kill_agent",), 0.05),
    Planted("two managers may serve one spool", lambda: [(MemoryDisk, "try_lock", lambda disk, descriptor: True)],
            ("second_manager",)),
    Planted("an agent that lost its number begins again at one",
            lambda: [(Numbers, "__init__", _number_without_series)], ("number_lost",)),
    Planted("a shadow that only says that the job is done counts as a run",
            lambda: [(Receipts, "last_transfer", lambda receipts, job: job.run)], ("kill_agent",)),
)  # fmt: skip
