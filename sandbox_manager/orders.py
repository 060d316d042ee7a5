"""Carrying out the agents' orders: state changes and "order n done" in one transaction. Twice is the same as once."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence

from sandbox_manager import records
from sandbox_manager.sandbox import SlotKey
from stageout.core import log
from stageout.core.states import ENDS, FREED, MOVES, State
from stageout.wire.custody import Action, Order, OrderSheet, Run

_NEWER = "run {} of the job is newer"


def carry_out(db: sqlite3.Connection, sheet: OrderSheet, now: int) -> set[int]:
    """Carry out the orders of a sheet that are not done yet, in their order. Returns the sandboxes touched."""
    done = records.acknowledged(db).get(sheet.numbering, 0)
    touched: set[int] = set()
    for order in sorted(sheet.orders, key=lambda item: item.number):
        if order.number > done:
            touched.update(_ACTIONS[order.action](db, order, now))
            done = order.number
    records.acknowledge(db, sheet.numbering, done)
    return touched


def _confirm(db: sqlite3.Connection, order: Order, now: int) -> Iterable[int]:
    run = Run(order.job, order.run_number)
    records.raise_fence(db, run, now)
    found = _named(db, order) or _exactly(db, order)
    touched = _end_all(db, run.job, run.number - 1, State.SUPERSEDED, now, _NEWER.format(run.number), found)
    if found is None:
        if order.tickets:
            touched.append(_nothing_of_it(db, order, now))
        return touched
    box, state = found
    if state not in ENDS and records.names_others(db, box, order.tickets):
        # The same number again, after the access point came out of a backup: another run is meant.
        records.end(db, box, State.SUPERSEDED, now, "the run that counts handed over something else")
    elif state is State.ACCEPTED:
        records.name_tickets(db, box, order.tickets, order.files, order.priority)
        unknown = records.are_unknown(db, order.tickets)
        if unknown:
            records.end(db, box, State.LOST, now, _no_record(unknown))
            return [*touched, box]
        waits_for = records.confirm(db, box, now)
        if waits_for:
            records.set_reason(db, box, waits_for)
    return [*touched, box]


def confirm_late(db: sqlite3.Connection, box: int, now: int) -> None:
    """Confirm a sandbox whose confirmation came before its last hand-off."""
    if records.state_of(db, box) is State.ACCEPTED and records.has_named_tickets(db, box):
        records.confirm(db, box, now)


def _nothing_of_it(db: sqlite3.Connection, order: Order, now: int) -> int:
    """A completed run says that it left output here, and there is none: its owner must know."""
    nobody = records.NewSandbox(
        Run(order.job, order.run_number), "", "", -1, -1, False, SlotKey("", 0, 0), "", order.priority
    )
    box = records.add_sandbox(db, nobody, now)
    records.name_tickets(db, box, order.tickets, order.files, order.priority)
    records.end(db, box, State.LOST, now, _no_record(records.are_unknown(db, order.tickets)))
    return box


def _no_record(kept: Sequence[str]) -> str:
    """Return the reason why output is lost. :param kept: tickets whose files are still there."""
    text = "the sandbox manager has no record of this run's output"
    return f"{text}; its files are kept in unknown/{kept[0]} of the node's STAGEOUT_SPOOL" if kept else text


def supersede_older(db: sqlite3.Connection, run: Run, now: int) -> list[int]:
    """End what older runs of the same job left here. Returns the sandboxes touched."""
    return _end_all(db, run.job, run.number - 1, State.SUPERSEDED, now, _NEWER.format(run.number))


def _supersede(db: sqlite3.Connection, order: Order, now: int) -> Iterable[int]:
    records.raise_fence(db, Run(order.job, order.run_number + 1), now)
    return _end_all(db, order.job, order.run_number, State.SUPERSEDED, now, "the job ran again")


def _cancel(db: sqlite3.Connection, order: Order, now: int) -> Iterable[int]:
    return _end_all(db, order.job, order.run_number, State.CANCELLED, now, "the job was removed")


def _end_all(
    db: sqlite3.Connection, job: str, up_to: int, new: State, now: int, reason: str,
    spared: tuple[int, State] | None = None,
) -> list[int]:  # fmt: skip
    touched = []
    for box, _, state in records.sandboxes_of(db, job, up_to):
        if new in MOVES[state] and (spared is None or box != spared[0]):
            records.end(db, box, new, now, reason)
            touched.append(box)
    return touched


def _retry(db: sqlite3.Connection, order: Order, now: int) -> Iterable[int]:
    found = _exactly(db, order)
    if found is None:
        return []
    box, state = found
    if state is State.FAILED and records.was_confirmed(db, box):
        records.fresh_attempts(db, box, now)
        records.set_state(db, box, State.CONFIRMED, now)
    elif state not in ENDS:
        records.fresh_attempts(db, box, now)
    return [box]


def _pause(db: sqlite3.Connection, order: Order, now: int) -> Iterable[int]:
    return _set_paused(db, order, True, now)


def _resume(db: sqlite3.Connection, order: Order, now: int) -> Iterable[int]:
    return _set_paused(db, order, False, now)


def _set_paused(db: sqlite3.Connection, order: Order, paused: bool, now: int) -> Iterable[int]:
    found = _exactly(db, order)
    if found is None:
        return []
    records.set_paused(db, found[0], paused)
    if paused:
        records.unlease(db, found[0], now)
    return [found[0]]


def _forget(db: sqlite3.Connection, order: Order, now: int) -> Iterable[int]:
    """The record goes as soon as the bytes are gone; a failed sandbox's bytes go now: the AP has let go of them."""
    touched = []
    for box, _, state in records.sandboxes_of(db, order.job, order.run_number):
        if state is State.FAILED:
            records.end(db, box, State.CANCELLED, now, "let go of by the access point")
        elif state not in FREED:
            log.warn("forget-refused", job=order.job, run=order.run_number, state=state)
            continue
        records.may_forget(db, box)
        touched.append(box)
    return touched


def _named(db: sqlite3.Connection, order: Order) -> tuple[int, State] | None:
    """The sandbox with the tickets of an order. The run's number here may be lower than at its access point: a restart
    there raises it while the run goes on."""
    for box, _, state in records.sandboxes_of(db, order.job, order.run_number):
        if set(order.tickets) & set(records.tickets_of(db, box)):
            return box, state
    return None


def _exactly(db: sqlite3.Connection, order: Order) -> tuple[int, State] | None:
    for box, number, state in records.sandboxes_of(db, order.job, order.run_number):
        if number == order.run_number:
            return box, state
    return None


_ACTIONS: dict[Action, Callable[[sqlite3.Connection, Order, int], Iterable[int]]] = {
    Action.CONFIRM: _confirm,
    Action.SUPERSEDE: _supersede,
    Action.CANCEL: _cancel,
    Action.RETRY: _retry,
    Action.PAUSE: _pause,
    Action.RESUME: _resume,
    Action.FORGET: _forget,
}
