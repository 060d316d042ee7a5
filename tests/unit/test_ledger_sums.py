"""Sums that triggers keep are those that counting gives, whatever happens to the files."""

from __future__ import annotations

import random
import sqlite3
from dataclasses import replace
from pathlib import Path

from sandbox_manager.custody import updates
from sandbox_manager.custody.ledger import Ledger
from stageout.core.states import FileState, State
from stageout.model.file import StoredFile
from stageout.model.run import RunFacts
from stageout.model.sandbox import SlotKey
from stageout.wire.custody import Run


def counted(db: sqlite3.Connection) -> list[tuple[int, ...]]:
    query = "SELECT sandbox, destination, state, count(*), sum(size) FROM files GROUP BY 1, 2, 3 ORDER BY 1, 2, 3"
    return db.execute(query).fetchall()


def kept(db: sqlite3.Connection) -> list[tuple[int, ...]]:
    query = "SELECT sandbox, destination, state, files, size FROM sums WHERE files > 0 ORDER BY 1, 2, 3"
    return db.execute(query).fetchall()


def test_sums_are_always_those_of_the_files(tmp_path: Path) -> None:
    dice = random.Random(7)
    ledger = Ledger(tmp_path / "l")
    db = ledger._connection
    boxes = []
    for number in range(1, 4):
        owner = RunFacts(Run(f"ap#{number}.0#1", 1, "a"), "a", 1, 1, SlotKey("ep", 1, 1), "s")
        for part in range(2):
            files = [StoredFile(i, f"https://{i % 2}/{part}/{i}", "f", dice.randrange(1000), 1, 1) for i in range(10)]
            box = updates.add_ticket(db, owner, f"t{number}.{part}", "/p", files, "boot", 1)
        boxes.append(box)
        assert kept(db) == counted(db)
    for _ in range(200):
        box, place = dice.choice(boxes), dice.randrange(1, 3)
        taken = updates.claim_files(db, box, place, 10, dice.randrange(1, 5), 2000)
        results = [
            replace(item, state=dice.choice((FileState.DELIVERED, FileState.FAILED, FileState.WAITING)))
            for item in taken
            if dice.random() < 0.8
        ]
        updates.record_results(db, results)
        if dice.random() < 0.2:
            updates.moving_back(db, box)
        if dice.random() < 0.1:
            updates.fresh_attempts(db, box, 0)
        assert kept(db) == counted(db)
    updates.end(db, boxes[0], State.CANCELLED, 5)
    assert kept(db) == counted(db)
    updates.forget(db, boxes[1])
    assert kept(db) == counted(db)
    assert db.execute("SELECT count(*) FROM sums WHERE sandbox = ?", (boxes[1],)).fetchone() == (0,)
    ledger.close()
