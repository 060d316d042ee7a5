"""Ledgers of earlier versions: what was promised with them is delivered by this one."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sandbox_manager.custody.ledger import Ledger, LedgerError
from sandbox_manager.custody.schema import VERSION
from stageout.core import durable
from stageout.core.states import State
from stageout.wire.custody import Action
from tests.unit.manager_site import SCHEDD, UID, Node, Site, made, run

OLD = sorted((Path(__file__).parent / "ledgers").glob("*.sql"))
_BY_NAME = pytest.mark.parametrize("old", OLD, ids=lambda path: path.stem)
_JOB = f"{SCHEDD}#1.0#1700000000"
_TICKET = "ab" * 16


@pytest.fixture
def site() -> Iterator[Site]:
    with made() as found:
        yield found


def write_old(site: Site, schema: Path, *, device: int = 99) -> Path:
    """A spool with one accepted file, and the ledger that a manager with these tables had of it."""
    spool = site.open_spool()
    place = spool.root / "sandboxes" / _TICKET
    place.mkdir(mode=0o711)
    file = place / "0"
    file.write_bytes(b"the output")
    os.chown(file, UID, UID)
    os.chown(place, -1, UID)
    found = file.stat()
    path = spool.root / "ledger" / "ledger.sqlite"
    spool.close()
    with closing(sqlite3.connect(path)) as db:
        db.executescript(schema.read_text())
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(
            "INSERT INTO sandboxes (id, job, number, owner, user, uid, gid, shared_uid, startd, slot_id, dslot_id, "
            "slot_name, priority, state, change, accepted_at) VALUES "
            "(7, ?, 1, 'alice@test', 'alice', ?, ?, 0, 'ep', 1, 1, 'slot1_1@ep', 0, 1, 5, strftime('%s'))",
            (_JOB, UID, UID),
        )
        db.execute(
            "INSERT INTO tickets (id, ticket, sandbox, plugin, boot, synced, files, size) "
            "VALUES (9, ?, 7, ?, 'an earlier boot', 1, 1, 10)",
            (_TICKET, str(site.plugin)),
        )
        extra = ", surroundings" if "surroundings" in schema.read_text() else ""
        value = ", ''" if extra else ""
        db.execute(
            f"INSERT INTO destinations (id, plugin, scheme, host{extra}) VALUES (3, ?, 'copy', 'h'{value})",
            (str(site.plugin),),
        )
        where, number = (", device", f", {device}") if "device" in schema.read_text() else ("", "")
        db.execute(
            "INSERT INTO files (ticket, position, sandbox, destination, state, size, url, name, mtime_ns, "
            f"inode{where}) VALUES (9, 0, 7, 3, 0, 10, 'copy://h/ok/out', 'out', ?, ?{number})",
            (found.st_mtime_ns, found.st_ino),
        )
        db.execute("INSERT INTO fences (job, number, at) VALUES (?, 1, 1)", (_JOB,))
        db.execute("INSERT INTO meta VALUES ('report_number', '4711')")
        db.execute("INSERT INTO orders_done VALUES ('other', 12)")
        db.commit()
    return path


def content(path: Path) -> str:
    """Everything in a database, as text."""
    with closing(sqlite3.connect(path)) as db:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        return "\n".join([str(version), *db.iterdump()])


@_BY_NAME
def test_output_that_an_earlier_version_took_is_delivered(site: Site, old: Path) -> None:
    path = write_old(site, old)

    async def story() -> None:
        async with site.manager() as node:
            assert (node.state(), node.pipeline.store.acknowledged["other"]) == (State.ACCEPTED, 12)
            await node.order(Action.CONFIRM, tickets=[_TICKET], files=1)
            await node.until_state(State.RELEASED)
            await _more(node)

    run(story())
    assert site.delivered() == ["out", "more"]
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (VERSION,)
        assert db.execute("SELECT value FROM meta WHERE name = 'report_number'").fetchone() == ("4711",)


async def _more(node: Node) -> None:
    """The same tables take new output."""
    facts = node.facts("2.0")
    receipt = await node.hand_off({"copy://h/ok/more": b"more"}, facts)
    await node.confirm(receipt, facts=facts)
    await node.until_state(State.RELEASED, facts)


@_BY_NAME
def test_the_tables_become_those_of_a_new_ledger(site: Site, old: Path, tmp_path: Path) -> None:
    path = write_old(site, old)
    Ledger(path).close()
    Ledger(tmp_path / "new").close()

    def tables(path: Path) -> set[tuple[str, ...]]:
        with closing(sqlite3.connect(path)) as db:
            return set(db.execute("SELECT type, name, tbl_name, sql FROM sqlite_master").fetchall())

    assert tables(path) == tables(tmp_path / "new")
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT * FROM sums WHERE files > 0").fetchall() == [(7, 3, 0, 1, 10)]
        assert db.execute("SELECT job, owner, number, at FROM fences").fetchall() == [(_JOB, "", 1, 1)]


def test_numbers_of_removed_rows_stay_used(site: Site) -> None:
    path = write_old(site, OLD[-1])
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE sqlite_sequence SET seq = 500 WHERE name = 'sandboxes'")
        db.execute("DELETE FROM files")
        db.execute("DELETE FROM tickets")
        db.commit()
    Ledger(path).close()
    with closing(sqlite3.connect(path)) as db:
        found = dict(db.execute("SELECT name, seq FROM sqlite_sequence").fetchall())
    assert (found["sandboxes"], found["tickets"], found["destinations"]) == (500, 9, 3)


@_BY_NAME
@pytest.mark.parametrize("fault", ["EIO", "kill-before", "kill-after"])
def test_a_manager_that_fails_or_dies_there_leaves_a_ledger_that_is_whole(site: Site, old: Path, fault: str) -> None:
    path = write_old(site, old)
    before = content(path)
    opens = f"from pathlib import Path; from sandbox_manager.custody.ledger import Ledger; Ledger(Path({str(path)!r}))"
    environment = {**os.environ, "STAGEOUT_FAULTS": f"ledger-migrate={fault}"}
    died = subprocess.run([sys.executable, "-c", opens], env=environment, capture_output=True, text=True, check=False)
    if fault == "EIO":
        assert "LedgerError" in died.stderr and "as it was" in died.stderr, died.stderr
    else:
        assert died.returncode == -signal.SIGKILL, died.stderr
    if fault != "kill-after":
        assert content(path) == before
    Ledger(path).close()
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT url FROM files").fetchall() == [("copy://h/ok/out",)]


def test_a_step_that_fails_half_way_changes_nothing(site: Site) -> None:
    """A row that the new tables do not take stands for whatever may be wrong in the middle."""
    path = write_old(site, OLD[0])
    with closing(sqlite3.connect(path)) as db:
        db.executescript(
            "CREATE TABLE t2 AS SELECT * FROM tickets; DROP TABLE tickets; ALTER TABLE t2 RENAME TO tickets;"
            "UPDATE tickets SET boot = NULL;"
        )
    before = content(path)
    with pytest.raises(LedgerError, match="as it was"):
        Ledger(path)
    assert content(path) == before


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="before 3.11 only a disk that is really full is told apart, not a page limit"
)
def test_on_a_full_disk_it_says_what_to_do(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_old(site, OLD[-1])
    before = content(path)

    def limited(path: Path) -> sqlite3.Connection:
        connection = open_ledger(path)
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages + 1}")
        return connection

    import sandbox_manager.custody.ledger as module

    open_ledger = module._open
    monkeypatch.setattr(module, "_open", limited)
    with pytest.raises(LedgerError, match="make room") as raised:
        Ledger(path)
    assert raised.value.is_temporary, "condor_master starts the manager again"
    monkeypatch.undo()
    assert content(path) == before
    assert durable.disk is os


def test_a_later_version_is_left_alone(site: Site) -> None:
    path = write_old(site, OLD[-1])
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")
    before = content(path)
    with pytest.raises(LedgerError, match=f"version {VERSION + 1}.*start that version again"):
        Ledger(path)
    assert content(path) == before
