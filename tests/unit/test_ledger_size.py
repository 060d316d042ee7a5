"""The ledger gives the room of records that are gone back to the disk."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import pytest
from test_ledger import add, new_files, new_sandbox

from sandbox_manager.custody import updates
from sandbox_manager.custody.ledger import Ledger
from stageout.wire.custody import Run

_LONG = "https://h/d/" + "u" * 4000 + "/{}"


def _mb(path: Path) -> int:
    return sum(part.stat().st_size for part in path.parent.glob(f"{path.name}*")) >> 20


async def _fill_and_forget(ledger: Ledger, path: Path) -> tuple[int, int]:
    """MB of a ledger with 30,000 long names, and when they are forgotten; one sandbox stays."""
    await ledger.write(lambda db: add(db, "kept", new_sandbox("ap#2.0#1")))
    for ticket in range(30):
        await ledger.write(lambda db, ticket=ticket: add(db, f"t{ticket}", files=new_files(1000, _LONG)))
    await ledger.compact()
    before = _mb(path)
    await ledger.write(lambda db: updates.forget(db, updates.sandboxes_of(db, Run("ap#1.0#1", 1, "a@x"))[0][0]))
    await ledger.compact()
    return before, _mb(path)


def test_what_is_forgotten_leaves_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with closing(Ledger(path)) as ledger:
        before, after = asyncio.run(_fill_and_forget(ledger, path))
        tickets = asyncio.run(ledger.read(lambda db: db.execute("SELECT ticket FROM tickets").fetchall()))
    print(f"{before} MB, then {after} MB")
    assert before > 100
    assert after <= 28, "10 MB stay for the next records, and 16 MB of the journal"
    assert tickets == [("kept",)]


def test_a_change_does_not_wait_for_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps the writer looks for changes."""
    path = tmp_path / "ledger"

    async def story(ledger: Ledger) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(ledger, "_compact", lambda: None)
            before, _ = await _fill_and_forget(ledger, path)
        compacting = asyncio.ensure_future(ledger.compact())
        await asyncio.sleep(0)
        await ledger.write(lambda db: add(db, "new", new_sandbox("ap#3.0#1")))
        assert ledger._free_pages() > 10_000, f"of {before} MB"
        await compacting

    with closing(Ledger(path)) as ledger:
        asyncio.run(story(ledger))
