"""A manager's ledger while it works: each commit and each order is held against what was promised.

Tables and triggers of the model's own lie beside those of the ledger, so that they share its transactions and losses.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sandbox_manager.custody.queries import CODE_OF, STATE_OF
from stageout.core.states import FREED, MOVES, State
from stageout.wire.custody import Action, Order

#: For SQL: states whose bytes are freed.
FREED_CODES = ",".join(str(CODE_OF[state]) for state in FREED)
_WANTED = "SELECT 1 FROM files WHERE files.ticket = NEW.id AND files.state IN (0, 1, 3)"
#: Directories of fallbacks: no owner redirects anything to this host.
FALLBACKS = "copy://h3/"
_THERE, _WAS_THERE = f"NEW.url LIKE '{FALLBACKS}%'", f"OLD.url LIKE '{FALLBACKS}%'"
_KNOWN = "SELECT 1 FROM sim_fell_back b WHERE b.ticket = {0}.ticket AND b.position = {0}.position"
_MODEL = f"""
CREATE TABLE sim_orders (numbering TEXT, number INTEGER, PRIMARY KEY (numbering, number));
CREATE TABLE sim_newest (job TEXT PRIMARY KEY, number INTEGER);
CREATE TABLE sim_paused (sandbox INTEGER PRIMARY KEY, at REAL);
CREATE TABLE sim_freed (ticket TEXT);
CREATE TABLE sim_faults (text TEXT);
CREATE TABLE sim_fell_back (ticket INTEGER, position INTEGER, PRIMARY KEY (ticket, position));
CREATE TRIGGER sim_urls AFTER UPDATE OF url ON files WHEN NEW.url != OLD.url BEGIN
    INSERT INTO sim_faults SELECT OLD.url || ' was sent, and becomes ' || NEW.url WHERE OLD.state NOT IN (0, 3);
    INSERT INTO sim_faults SELECT OLD.url || ' goes to its fallback a second time'
    WHERE {_THERE} AND NOT {_WAS_THERE} AND EXISTS ({_KNOWN.format("NEW")});
    INSERT OR IGNORE INTO sim_fell_back SELECT NEW.ticket, NEW.position WHERE {_THERE};
END;
CREATE TRIGGER sim_fails AFTER UPDATE OF state ON sandboxes
WHEN NEW.state = {CODE_OF[State.FAILED]} AND NEW.fallback != '' AND NOT NEW.paused BEGIN
    INSERT INTO sim_faults SELECT f.url || ' fails, and was never sent to its fallback' FROM files f
    WHERE f.sandbox = NEW.id AND f.state = 3 AND f.digest = '' AND NOT EXISTS ({_KNOWN.format("f")});
END;
CREATE TRIGGER sim_moves AFTER UPDATE OF state ON sandboxes WHEN NEW.state != OLD.state BEGIN
    SELECT sim_moved(OLD.state, NEW.state);
END;
CREATE TRIGGER sim_tickets AFTER INSERT ON tickets BEGIN
    INSERT INTO sim_faults
    SELECT 'output of run ' || s.number || ' of ' || s.job || ' is taken although run ' || n.number || ' is known'
    FROM sandboxes s JOIN sim_newest n ON n.job = s.job WHERE s.id = NEW.sandbox AND s.number < n.number;
    INSERT INTO sim_faults SELECT 'a hand-off is added to a run of ' || s.job || ' that is decided, ' || s.state
    FROM sandboxes s WHERE s.id = NEW.sandbox AND s.state != {CODE_OF[State.ACCEPTED]};
    INSERT INTO sim_newest SELECT job, number FROM sandboxes WHERE id = NEW.sandbox
    ON CONFLICT (job) DO UPDATE SET number = max(number, excluded.number);
END;
CREATE TRIGGER sim_frees AFTER UPDATE OF freed ON tickets WHEN NEW.freed = 1 BEGIN
    INSERT INTO sim_freed VALUES (NEW.ticket);
    INSERT INTO sim_faults SELECT 'files that are still wanted are recorded as freed, ticket ' || NEW.ticket
    WHERE EXISTS ({_WANTED});
END;
"""
_TWO_RUNS = f"SELECT job, count(*) FROM sandboxes WHERE state NOT IN ({FREED_CODES}) GROUP BY job HAVING count(*) > 1"
#: Ended runs with files that wait, are sent or have failed. Output that fails keeps its files for a retry.
_WAITS_AFTER_THE_END = (
    "SELECT s.job, s.number, s.state, f.url FROM sandboxes s JOIN files f ON f.sandbox = s.id "
    f"WHERE s.state IN ({FREED_CODES}) AND f.state IN (0, 1, 3) "
    f"OR s.state = {CODE_OF[State.FAILED]} AND f.state = 1"
)
#: A second has never seen half as many where all is well.
_COMMITS_PER_S = 150
#: An offer has no record; this pool has no pilots that hand anything over.
_ELSEWHERE = {State.OFFERED, State.HANDED_OVER}
#: All orders, in all states of the ledger that this pool has.
PAIRS = tuple((action, state) for action in Action for state in CODE_OF if state not in _ELSEWHERE)


@dataclass
class Coverage:
    """Visits of schedules: moves of the state table, and orders by the state that they met."""

    moves: Counter[tuple[State, State]] = field(default_factory=Counter)
    orders: Counter[tuple[Action, State | None]] = field(default_factory=Counter)

    def add(self, other: Coverage) -> None:
        """Count another schedule's, too."""
        self.moves += other.moves
        self.orders += other.orders

    def lines(self) -> list[str]:
        """For people: how much of both was visited, and what was not."""
        moves = [(old, new) for old, targets in MOVES.items() for new in targets if not {old, new} & _ELSEWHERE]
        missed_moves = sorted(f"{old}>{new}" for old, new in moves if not self.moves[old, new])
        missed_orders = sorted(f"{action.value}@{state}" for action, state in PAIRS if not self.orders[action, state])
        return [
            f"moves: {len(moves) - len(missed_moves)} of {len(moves)}; not: {' '.join(missed_moves) or 'none'}",
            f"orders in states: {len(PAIRS) - len(missed_orders)} of {len(PAIRS)}; "
            f"not: {' '.join(missed_orders) or 'none'}",
        ]


class _Box(NamedTuple):
    number: int
    state: State
    confirmed_at: int
    forgettable: int
    paused: bool
    tickets: frozenset[str]


class Observer:
    """Looks at the ledgers of one schedule.

    :param world: told of violations. :param coverage: counts what was visited.
    :ivar on_commit: called after each commit.
    """

    def __init__(self, world: Any, coverage: Coverage) -> None:
        self._world = world
        self._coverage = coverage
        self._numbering = ""
        self.on_commit: Callable[[], None] = lambda: None
        self._second, self._commits = (0, 0), 0

    # ---- the database ------------------------------------------------------------------------------------------------

    def prepare(self, real: sqlite3.Connection) -> None:
        """Give a connection the functions that the model's triggers call."""
        real.create_function("sim_moved", 2, self._moved)

    def made(self, real: sqlite3.Connection) -> None:
        """The ledger has its tables: the model's come beside them."""
        if not real.execute("SELECT 1 FROM sqlite_master WHERE name = 'sim_faults'").fetchone():
            real.executescript(_MODEL)

    def _moved(self, old: int, new: int) -> None:
        self._coverage.moves[STATE_OF[old], STATE_OF[new]] += 1

    def committed(self, real: sqlite3.Connection, has_directory: Callable[[str], bool]) -> None:
        """Judge what has just been committed. :param has_directory: is there still something of this ticket?"""
        if not real.execute("SELECT 1 FROM sqlite_master WHERE name = 'sim_faults'").fetchone():
            return
        second = (id(real), int(self._world.now_s))
        self._commits = self._commits + 1 if second == self._second else 1
        self._second = second
        if self._commits > _COMMITS_PER_S:
            self._world.violation(f"{self._commits} commits in a second: a manager goes round and round")
        for (text,) in real.execute("SELECT text FROM sim_faults").fetchall():
            self._world.violation(text)
        for (ticket,) in real.execute("SELECT ticket FROM sim_freed").fetchall():
            if has_directory(ticket):
                self._world.violation(f"ticket {ticket} is recorded as freed before its bytes are gone")
        real.execute("DELETE FROM sim_freed")
        for job, count in real.execute(_TWO_RUNS):
            self._world.violation(f"{count} runs of {job} are kept at once: the older ones are not superseded")
        for job, number, state, url in real.execute(_WAITS_AFTER_THE_END):
            self._world.violation(f"run {number} of {job} is {STATE_OF[state]}, and {url} has no end")
        self.on_commit()

    # ---- orders ------------------------------------------------------------------------------------------------------

    def sheets(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """The product's ``apply_orders``, observed."""

        def apply_orders(db: Any, sheet: Any, now: int, *more: Any) -> Any:
            self._numbering = sheet.numbering
            return real(db, sheet, now, *more)

        return apply_orders

    def action(self, real: Callable[..., Iterable[int]]) -> Callable[..., Iterable[int]]:
        """The product's function for one kind of order, observed."""

        def obey(db: Any, order: Order, now: int, *more: Any) -> Iterable[int]:
            before = _boxes(db, order.job)
            met = next((box.state for box in before.values() if box.number == order.run_number), None)
            self._coverage.orders[order.action, met] += 1
            self._count(db, order)
            if order.action in (Action.PAUSE, Action.RESUME):
                self._pause(db, order, before)
            gone = _gone(db)
            touched = list(real(db, order, now, *more))
            if order.action is Action.REDIRECT and not gone <= _gone(db):
                db.execute("INSERT INTO sim_faults VALUES ('a redirect reaches a file that was sent')")
            for text in _broken(order, before, _boxes(db, order.job)):
                db.execute("INSERT INTO sim_faults VALUES (?)", (f"{order.action.value} {order.run_number}: {text}",))
            return touched

        return obey

    def _pause(self, db: Any, order: Order, boxes: dict[int, _Box]) -> None:
        for box in (number for number, one in boxes.items() if one.number == order.run_number):
            db.execute("DELETE FROM sim_paused WHERE sandbox = ?", (box,))
            if order.action is Action.PAUSE:
                db.execute("INSERT INTO sim_paused VALUES (?, ?)", (box, self._world.now_s))

    def _count(self, db: Any, order: Order) -> None:
        """Each order is carried out once. CONFIRM and SUPERSEDE say which runs are known."""
        found = db.execute("SELECT 1 FROM sim_orders WHERE numbering = ? AND number = ?",
                           (self._numbering, order.number)).fetchone()  # fmt: skip
        if found:
            text = f"order {order.number}, {order.action.value} of {order.job}, is carried out twice"
            db.execute("INSERT INTO sim_faults VALUES (?)", (text,))
        db.execute("INSERT OR IGNORE INTO sim_orders VALUES (?, ?)", (self._numbering, order.number))
        newest = {Action.CONFIRM: order.run_number, Action.SUPERSEDE: order.run_number + 1}.get(order.action, 0)
        db.execute("INSERT INTO sim_newest VALUES (?, ?) "
                   "ON CONFLICT (job) DO UPDATE SET number = max(number, excluded.number)",
                   (order.job, newest))  # fmt: skip


def _gone(db: Any) -> set[tuple[Any, ...]]:
    """Return the URLs of files that were sent, are being sent, or are with a custodian."""
    return set(db.execute("SELECT ticket, position, url, destination FROM files WHERE state IN (1, 2, 5)").fetchall())


def _boxes(db: Any, job: str) -> dict[int, _Box]:
    columns = "id, number, state, confirmed_at, forgettable, paused"
    rows = db.execute(f"SELECT {columns} FROM sandboxes WHERE job = ?", (job,)).fetchall()
    return {row[0]: _Box(row[1], STATE_OF[row[2]], row[3], row[4], bool(row[5]), _tickets(db, row[0])) for row in rows}


def _tickets(db: Any, box: int) -> frozenset[str]:
    return frozenset(row[0] for row in db.execute("SELECT ticket FROM tickets WHERE sandbox = ?", (box,)))


def _broken(order: Order, before: dict[int, _Box], after: dict[int, _Box]) -> Iterable[str]:
    """An order did what it may not do, or left something undone."""
    if order.action is Action.CONFIRM and order.tickets and not any(_is_meant(order, box) for box in after.values()):
        yield "it is not answered"
    for box, was in before.items():
        state = after[box].state if box in after else None
        if state is not was.state:
            if was.number > order.run_number:
                yield f"it reaches run {was.number}, {was.state}"
            if order.action is Action.FORGET and was.state not in FREED | {State.FAILED}:
                yield f"it ends what is {was.state}"
            if order.action in (Action.RETRY, Action.REDIRECT) and not was.confirmed_at:
                yield f"what was never confirmed goes from {was.state} to {state}"
        elif after[box].forgettable and not was.forgettable and was.state not in FREED | {State.FAILED}:
            yield f"the record of what is {was.state} may go"
        if box in after and _is_paused_wrongly(order, after[box]):
            yield f"it leaves run {was.number} {'paused' if after[box].paused else 'as it was'}"
        if state is not None and state not in FREED and _must_end(order, was):
            yield f"it leaves run {was.number} {state}"


def _is_meant(order: Order, box: _Box) -> bool:
    return box.number == order.run_number or bool(box.tickets & set(order.tickets))


def _is_paused_wrongly(order: Order, box: _Box) -> bool:
    wanted = {Action.PAUSE: True, Action.RESUME: False}.get(order.action, box.paused)
    return box.number == order.run_number and box.paused is not wanted


def _must_end(order: Order, box: _Box) -> bool:
    if order.action is Action.CONFIRM:
        return box.number < order.run_number and not box.tickets & set(order.tickets)
    return order.action in (Action.CANCEL, Action.SUPERSEDE) and box.number <= order.run_number
