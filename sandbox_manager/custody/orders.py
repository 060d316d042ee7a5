"""Changes that a message causes, each in one transaction: a hand-off of a plugin, and the orders of an agent.

The change of states and "order n done" are one transaction, so an order that comes twice is carried out once.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from sandbox_manager.custody import redirects, updates
from sandbox_manager.custody.credentials import StoredCredentials
from sandbox_manager.custody.redirects import FindPlugin
from stageout.core import log
from stageout.core.states import ENDS, FREED, MOVES, State
from stageout.core.synchronous import NotTaken
from stageout.model.file import StoredFile
from stageout.model.run import RunFacts
from stageout.model.sandbox import SlotKey
from stageout.movers.schemes import shown_url
from stageout.wire.custody import Action, Order, OrderSheet, Run

_NEWER = "run {} of the job is newer"


class Refused(NotTaken):
    """Refusal of a hand-off, with the text and the code for the plugin."""


class NewHandoff(NamedTuple):
    """A hand-off to record.

    :param facts: of its run, whose first hand-off makes the sandbox. :param boot: id of the kernel's boot.
    :param stored: credentials and ads that the plugin needs besides the files; None without any.
    :param fallback_problem: reason to ignore the fallback of its job, "" for none.
    """

    facts: RunFacts
    ticket: str
    plugin: str
    files: Sequence[StoredFile]
    boot: str
    stored: StoredCredentials | None = None
    fallback_problem: str = ""


def record_handoff(db: sqlite3.Connection, new: NewHandoff, now: int) -> Iterable[int]:
    """Record a hand-off, and end older runs of its job. Return the sandboxes touched.

    :raises Refused: a newer run, or a decision about this run, has overtaken it.
    """
    run = new.facts.run
    newest = updates.newest_run(db, run.key)
    if newest > run.number:
        raise Refused("a newer run of the job came in meanwhile", "OtherRun")
    state = updates.state_of_run(db, run) if newest else None
    if state not in (None, State.ACCEPTED):
        # Its plugin gave up waiting. The decision about the run was made without these files.
        raise Refused(f"output of this run became {state} meanwhile", "OtherRun")
    digest = new.stored.digest if new.stored else ""
    sandbox = updates.add_ticket(
        db=db,
        facts=new.facts,
        ticket=new.ticket,
        plugin=new.plugin,
        files=new.files,
        boot=new.boot,
        now=now,
        credentials_digest=digest,
    )
    if new.stored:
        updates.keep_credentials(db, new.stored)
    if new.facts.fallback:
        updates.offer_fallback(db, sandbox, new.facts.fallback, new.fallback_problem)
    if not newest:
        return [sandbox]  # the first message about this job: no run is confirmed or older
    confirm_late(db, sandbox, now)
    return [sandbox, *supersede_older(db, run, now)]


def apply_orders(
    db: sqlite3.Connection, sheet: OrderSheet, now: int, find_plugin: FindPlugin = redirects.no_plugin
) -> set[int]:
    """Carry out the orders of a sheet that are not done yet, in their order. Return the sandboxes touched.

    :param find_plugin: for the scheme of another URL.
    """
    done = updates.acknowledged(db).get(sheet.numbering, 0)
    touched: set[int] = set()
    for order in sorted(sheet.orders, key=lambda item: item.number):
        if order.number > done:
            more = (find_plugin,) if order.action is Action.REDIRECT else ()
            touched.update(_ACTIONS[order.action](db, order, now, *more))
            done = order.number
    updates.acknowledge(db, sheet.numbering, done)
    return touched


def _confirm(db: sqlite3.Connection, order: Order, now: int) -> Iterable[int]:
    run = order.run
    updates.raise_fence(db, run, now)
    found = _named(db, order) or _exactly(db, order)
    touched = _end_all(
        db, last=_before(run), new=State.SUPERSEDED, now=now, reason=_NEWER.format(run.number), spared=found
    )
    if found is None:
        if order.tickets:
            touched.append(_nothing_of_it(db, order, now))
        return touched
    sandbox, state = found
    if state not in ENDS and updates.names_others(db, sandbox, order.tickets):
        # The same number again, after the access point came out of a backup: another run is meant.
        updates.end(db, sandbox, State.SUPERSEDED, now, reason="the final run handed over something else")
    elif state is State.ACCEPTED:
        updates.name_tickets(db, sandbox, order.tickets, order.files, priority=order.priority)
        unknown = updates.are_unknown(db, order.tickets)
        if unknown:
            updates.end(db, sandbox, State.LOST, now, reason=_no_record(unknown))
            return [*touched, sandbox]
        waits_for = updates.confirm(db, sandbox, now)
        if waits_for:
            updates.set_reason(db, sandbox, waits_for)
    return [*touched, sandbox]


def confirm_late(db: sqlite3.Connection, sandbox: int, now: int) -> None:
    """Confirm a sandbox whose confirmation came before its last hand-off."""
    if updates.state_of(db, sandbox) is State.ACCEPTED and updates.has_named_tickets(db, sandbox):
        updates.confirm(db, sandbox, now)


def _nothing_of_it(db: sqlite3.Connection, order: Order, now: int) -> int:
    """Record the loss of output that a completed run left here according to its record. Its owner must know."""
    nobody = RunFacts(
        run=order.run,
        user="",
        uid=-1,
        gid=-1,
        slot=SlotKey("", 0, 0),
        slot_name="",
        priority=order.priority,
    )
    sandbox = updates.add_sandbox(db, nobody, now)
    updates.name_tickets(db, sandbox, order.tickets, order.files, priority=order.priority)
    updates.end(db, sandbox, State.LOST, now, reason=_no_record(updates.are_unknown(db, order.tickets)))
    return sandbox


def _no_record(kept: Sequence[str]) -> str:
    """Return the reason why output is lost. :param kept: tickets whose files are still there."""
    text = "the sandbox manager has no record of this run's output"
    return f"{text}; its files are kept in unknown/{kept[0]} of the node's STAGEOUT_SPOOL" if kept else text


def supersede_older(db: sqlite3.Connection, run: Run, now: int) -> list[int]:
    """End the output of older runs of the same job. Return the sandboxes touched."""
    return _end_all(db, last=_before(run), new=State.SUPERSEDED, now=now, reason=_NEWER.format(run.number))


def _supersede(db: sqlite3.Connection, order: Order, now: int) -> Iterable[int]:
    updates.raise_fence(db, replace(order.run, number=order.run_number + 1), now)
    return _end_all(db, last=order.run, new=State.SUPERSEDED, now=now, reason="the job ran again")


def _cancel(db: sqlite3.Connection, order: Order, now: int) -> Iterable[int]:
    return _end_all(db, last=order.run, new=State.CANCELLED, now=now, reason="the job was removed")


def _before(run: Run) -> Run:
    return replace(run, number=run.number - 1)


def _end_all(
    db: sqlite3.Connection, last: Run, new: State, now: int, reason: str, spared: tuple[int, State] | None = None
) -> list[int]:
    """End the sandboxes of a run and of older ones of its job. Return them."""
    touched = []
    for sandbox, _, state in updates.sandboxes_of(db, last):
        if new in MOVES[state] and (spared is None or sandbox != spared[0]):
            updates.end(db, sandbox, new, now, reason=reason)
            touched.append(sandbox)
    return touched


def _retry(db: sqlite3.Connection, order: Order, now: int) -> Iterable[int]:
    found = _exactly(db, order)
    if found is None:
        return []
    _send_again(db, *found, now)
    return [found[0]]


def _send_again(db: sqlite3.Connection, sandbox: int, state: State, now: int) -> None:
    if state is State.FAILED and updates.was_confirmed(db, sandbox):
        updates.fresh_attempts(db, sandbox, now)
        updates.set_state(db, sandbox, State.CONFIRMED, now)
    elif state not in ENDS:
        updates.fresh_attempts(db, sandbox, now)


def _redirect(db: sqlite3.Connection, order: Order, now: int, find_plugin: FindPlugin) -> Iterable[int]:
    found = _exactly(db, order)
    if found is None:
        return []
    sandbox, state = found
    if not updates.was_confirmed(db, sandbox):
        done = redirects.Redirected(0, "the run is not confirmed yet")
    else:
        done = redirects.redirect(db, sandbox, url=order.new_url, name=order.only_file, find_plugin=find_plugin)
    updates.set_refused(db, sandbox, done.refused)
    if done.files:
        log.event("files-redirected", job=order.job, run=order.run_number, files=done.files,
                  to=shown_url(order.new_url))  # fmt: skip
    if done.files or not done.refused:
        _send_again(db, sandbox, state, now)
    return [sandbox]


def _pause(db: sqlite3.Connection, order: Order, now: int) -> Iterable[int]:
    return _set_paused(db, order, True, now)


def _resume(db: sqlite3.Connection, order: Order, now: int) -> Iterable[int]:
    return _set_paused(db, order, False, now)


def _set_paused(db: sqlite3.Connection, order: Order, paused: bool, now: int) -> Iterable[int]:
    found = _exactly(db, order)
    if found is None:
        return []
    updates.set_paused(db, found[0], paused)
    if paused:
        updates.deactivate(db, found[0], now)
    return [found[0]]


def _forget(db: sqlite3.Connection, order: Order, now: int) -> Iterable[int]:
    """Let records go as soon as the bytes are freed. Free the bytes of failed output, which the agent gave up."""
    touched = []
    for sandbox, _, state in updates.sandboxes_of(db, order.run):
        if state is State.FAILED:
            updates.end(db, sandbox, State.CANCELLED, now, reason="let go of by the access point")
        elif state not in FREED:
            log.warn("deletion-refused", job=order.job, run=order.run_number, state=state)
            continue
        updates.may_forget(db, sandbox)
        touched.append(sandbox)
    return touched


def _named(db: sqlite3.Connection, order: Order) -> tuple[int, State] | None:
    """Find the sandbox with the tickets of an order.

    The number of the run may be lower here than at its access point, where a restart raises it during the run.
    """
    for sandbox, _, state in updates.sandboxes_of(db, order.run):
        if set(order.tickets) & set(updates.tickets_of(db, sandbox)):
            return sandbox, state
    return None


def _exactly(db: sqlite3.Connection, order: Order) -> tuple[int, State] | None:
    for sandbox, number, state in updates.sandboxes_of(db, order.run):
        if number == order.run_number:
            return sandbox, state
    return None


_ACTIONS: dict[Action, Callable[..., Iterable[int]]] = {
    Action.CONFIRM: _confirm,
    Action.SUPERSEDE: _supersede,
    Action.CANCEL: _cancel,
    Action.RETRY: _retry,
    Action.PAUSE: _pause,
    Action.RESUME: _resume,
    Action.REDIRECT: _redirect,
    Action.FORGET: _forget,
}
