"""Times of a delivery: those of the plugin if they can be true, otherwise the manager's own."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox_manager.custody import queries, schema, updates
from sandbox_manager.delivery.results import delivered_result
from stageout.core.errors import ErrorClass
from stageout.core.states import FileState
from stageout.model.file import StoredFile
from stageout.movers.results import Delivered, InCustody, TransferFacts
from tests.unit.test_ledger import add, new_sandbox

TAKEN, NOW = 1000, 1060
FACTS = TransferFacts(1010, 1055, 45_000, 4, "a:1: 5 MB")


@pytest.fixture
def db(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(tmp_path / "ledger", isolation_level=None)) as connection:
        schema.make(connection)
        yield connection


def taken(db: sqlite3.Connection) -> tuple[int, StoredFile]:
    """A file in a mover, and its sandbox."""
    box = add(db, "t", replace(new_sandbox(), group="physics"))
    (row,) = updates.claim_files(db, box, 1, TAKEN, 10, 1000)
    return box, row


def recorded(db: sqlite3.Connection, box: int) -> StoredFile:
    """The file as the ledger has it."""
    (row,) = queries.all_files(db, box)
    return row


def test_figures_of_a_delivery_are_in_the_ledger(db: sqlite3.Connection) -> None:
    box, row = taken(db)
    assert recorded(db, box).facts.began_at == TAKEN
    updates.record_results(db, [delivered_result(row, Delivered("size", "md5:00", FACTS), NOW, 2)])
    found = recorded(db, box)
    assert found.state is FileState.DELIVERED
    assert (found.facts, found.proof) == (FACTS, "md5:00")
    sandbox = queries.sandbox(db, box)
    assert sandbox is not None and sandbox.group == "physics"


@pytest.mark.parametrize(
    ("told", "times"),
    [((0, 0), (TAKEN, NOW)), ((999, 1061), (TAKEN, NOW)), ((1055, 1010), (1055, NOW)), ((1061, 1020), (TAKEN, 1020)),
     ((1000, 1060), (1000, 1060))],
)  # fmt: skip
def test_times_outside_of_the_attempt_do_not_count(
    db: sqlite3.Connection, told: tuple[int, int], times: tuple[int, int]
) -> None:
    _, row = taken(db)
    result = delivered_result(row, Delivered("size", "", TransferFacts(*told)), NOW + 0.9, 3)
    assert (result.facts.began_at, result.facts.ended_at) == times
    assert result.facts.streams == 3, "the plugin does not say how many it used"


def test_a_failed_attempt_leaves_no_figures_of_a_delivery(db: sqlite3.Connection) -> None:
    box, row = taken(db)
    failed = replace(
        row, state=FileState.WAITING, next_attempt=NOW + 60, error_code=ErrorClass.UNKNOWN.code, error="why"
    )
    updates.record_results(db, [failed])
    found = recorded(db, box)
    assert found.facts == TransferFacts(began_at=TAKEN)
    (again,) = updates.claim_files(db, box, 1, NOW + 60, 10, 1000)
    assert recorded(db, box).facts.began_at == again.facts.began_at == NOW + 60


def test_custody_elsewhere_has_no_end(db: sqlite3.Connection) -> None:
    _, row = taken(db)
    result = delivered_result(row, InCustody("r:1 x 1 99"), NOW)
    assert (result.state, result.facts.ended_at) == (FileState.HANDED_OVER, 0)
