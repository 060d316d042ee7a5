"""Each order changes the ledger once, for the run that it names, and for no newer one."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sandbox_manager.custody import orders, queries, updates
from sandbox_manager.custody.ledger import Ledger
from sandbox_manager.report import reporter
from stageout.core.states import FileState, State
from stageout.model.file import StoredFile
from stageout.model.run import RunFacts
from stageout.model.sandbox import SlotKey
from stageout.wire.custody import Action, JobKey, Order, OrderSheet, Report, Run, payload_of, read_report, report_ad
from tests.unit.ledger_steps import attempt

JOB = "ap#1.0#1"


@pytest.fixture
def db(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with closing(Ledger(tmp_path / "ledger")) as ledger:
        yield ledger._connection


def _accept(db: sqlite3.Connection, run: int, files: int = 1) -> int:
    """Output of a run, in one hand-off whose ticket is ``tRUN``. Returns its sandbox."""
    owner = RunFacts(Run(JOB, run, "a"), "a", 1, 1, SlotKey("ep", 1, 1), "slot1_1@ep")
    new = [StoredFile(at, f"https://h/{at}", "f", 5, 1, 1) for at in range(files)]
    return updates.add_ticket(db, owner, f"t{run}", "/p", new, "boot", 1)


def _order(db: sqlite3.Connection, action: Action, run: int, number: int = 1, files: int = 0) -> None:
    tickets = (f"t{run}",) if action is Action.CONFIRM else ()
    order = Order(number, action, JOB, run, tickets, files or len(tickets), owner="a")
    orders.apply_orders(db, OrderSheet("ap", "ep", 1, (order,)), 10)


def test_confirmation_sends_the_run_and_ends_older_ones(db: sqlite3.Connection) -> None:
    older, newer = _accept(db, 1), _accept(db, 2)
    _order(db, Action.CONFIRM, 2)
    assert (updates.state_of(db, older), updates.state_of(db, newer)) == (State.SUPERSEDED, State.CONFIRMED)


@pytest.mark.parametrize(("action", "newest"), [(Action.CONFIRM, 2), (Action.SUPERSEDE, 3), (Action.CANCEL, 0)])
def test_nothing_of_an_older_run_is_taken_afterwards(db: sqlite3.Connection, action: Action, newest: int) -> None:
    _order(db, action, 2)
    assert updates.newest_run(db, JobKey(JOB, "a")) == newest


@pytest.mark.parametrize(("action", "end"), [(Action.SUPERSEDE, State.SUPERSEDED), (Action.CANCEL, State.CANCELLED)])
def test_newer_runs_are_spared(db: sqlite3.Connection, action: Action, end: State) -> None:
    boxes = [_accept(db, run) for run in (1, 2, 3)]
    _order(db, action, 2)
    assert [updates.state_of(db, box) for box in boxes] == [end, end, State.ACCEPTED]


def test_each_order_is_carried_out_once(db: sqlite3.Connection) -> None:
    box = _accept(db, 1)
    _order(db, Action.PAUSE, 1, number=5)
    _order(db, Action.RESUME, 1, number=6)
    for number in (5, 6):
        _order(db, Action.PAUSE, 1, number=number)
    assert db.execute("SELECT paused FROM sandboxes WHERE id = ?", (box,)).fetchone() == (0,)
    _order(db, Action.PAUSE, 1, number=7)
    assert db.execute("SELECT paused FROM sandboxes WHERE id = ?", (box,)).fetchone() == (1,)


@pytest.mark.parametrize(("confirmed", "state"), [(True, State.CONFIRMED), (False, State.FAILED)])
def test_only_what_was_confirmed_is_sent_by_a_retry(db: sqlite3.Connection, confirmed: bool, state: State) -> None:
    box = _accept(db, 1)
    if confirmed:
        _order(db, Action.CONFIRM, 1)
    updates.fail_waiting(db, box)
    updates.end(db, box, State.FAILED, 10, "planned")
    _order(db, Action.RETRY, 1, number=2)
    assert updates.state_of(db, box) is state


def test_confirmation_without_output_here_is_lost(db: sqlite3.Connection) -> None:
    """The access point knows that this run left output here; its owner must hear that it is gone."""
    _order(db, Action.CONFIRM, 1)
    (row,) = db.execute("SELECT id FROM sandboxes").fetchall()
    assert updates.state_of(db, row[0]) is State.LOST


def test_bytes_of_failed_output_are_freed_when_the_access_point_forgets_it(db: sqlite3.Connection) -> None:
    box = _accept(db, 1)
    _order(db, Action.CONFIRM, 1)
    _order(db, Action.FORGET, 1, number=2)
    assert updates.state_of(db, box) is State.CONFIRMED, "it is still to be sent"
    updates.end(db, box, State.FAILED, 10, "planned")
    _order(db, Action.FORGET, 1, number=3)
    assert updates.state_of(db, box) is State.CANCELLED


@pytest.mark.parametrize(
    ("action", "listed"), [(Action.CANCEL, [("f", "Cancelled", 71), ("f", "Cancelled", 0)]), (Action.SUPERSEDE, [])]
)
def test_a_report_lists_files_that_were_given_up(
    db: sqlite3.Connection, action: Action, listed: list[tuple[str, str, int]]
) -> None:
    number = _accept(db, 1, files=3)
    attempt(db, FileState.WAITING, 1, times=2, error_code=71)
    _order(db, action, 1)
    box = queries.sandbox(db, number)
    assert box
    rows = reporter._some_files(db, number, 2, box.state in reporter._DROPPED)
    files = [reporter.file_report(row, box, {}) for row in rows]
    assert [(file.name, file.state, file.error_code) for file in files] == listed
    report = reporter.sandbox_report(box, 0, files)
    dropped = (3, 15) if listed else (0, 0)
    assert (report.files_dropped, report.bytes_dropped, report.files_total, report.files_left) == (*dropped, 0, 0)
    assert read_report(payload_of(report_ad(Report("m", "", 1, 1, {}, 0, (report,))))).sandboxes == (report,)


MALLORY = "mallory@other"


@pytest.mark.parametrize("action", list(Action))
@pytest.mark.parametrize("run", [1, 2, 9])
def test_an_order_about_another_users_job_of_the_same_name_changes_nothing(
    db: sqlite3.Connection, action: Action, run: int
) -> None:
    """The agent of this access point never gives it, but a second one may have its name."""
    box = _accept(db, 1)
    before = [list(db.execute(f"SELECT * FROM {table}")) for table in ("sandboxes", "tickets", "files")]
    tickets = ("t1",) if action is Action.CONFIRM else ()
    order = Order(1, action, JOB, run, tickets, 1, request="r", new_url="https://evil/", owner=MALLORY)
    orders.apply_orders(db, OrderSheet("ap", "ep", 1, (order,)), 10)
    after = [
        list(db.execute("SELECT * FROM sandboxes WHERE owner = 'a'")),
        list(db.execute("SELECT * FROM tickets WHERE sandbox = ?", (box,))),
        list(db.execute("SELECT * FROM files WHERE sandbox = ?", (box,))),
    ]
    assert after == before
    assert updates.newest_run(db, JobKey(JOB, "a")) == 1


def test_output_of_two_users_with_one_name_is_kept_apart(db: sqlite3.Connection) -> None:
    own = _accept(db, 1)
    new = RunFacts(Run(JOB, 1, MALLORY), "m", 2, 2, SlotKey("ep", 1, 2), "slot1_2@ep")
    files = [StoredFile(0, "https://evil/0", "f", 5, 1, 2)]
    other = updates.add_ticket(db, new, "u1", "/p", files, "boot", 1)
    assert other != own and updates.tickets_of(db, own) == ["t1"]
    assert orders.supersede_older(db, Run(JOB, 5, MALLORY), 2) == [other]
    assert updates.state_of(db, own) is State.ACCEPTED
    assert updates.newest_run(db, JobKey(JOB, "a")) == 1
    assert updates.state_of_run(db, Run(JOB, 1, "a")) is State.ACCEPTED


@pytest.mark.parametrize("action", [Action.CONFIRM, Action.SUPERSEDE, Action.CANCEL])
def test_an_order_without_a_user_concerns_no_output(db: sqlite3.Connection, action: Action) -> None:
    box = _accept(db, 1)
    tickets = ("t1",) if action is Action.CONFIRM else ()
    orders.apply_orders(db, OrderSheet("ap", "ep", 1, (Order(1, action, JOB, 1, tickets, len(tickets)),)), 10)
    assert updates.state_of(db, box) is State.ACCEPTED
