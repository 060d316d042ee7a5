"""Databases of earlier routers: what is in them is still known to this one."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from overlay_router.custodians.pack_records import HeldPack
from overlay_router.custodians.spool import FIRST_TID, CustodyStore
from overlay_router.local.contents import Content, Identity
from overlay_router.local.migrations import VERSION
from overlay_router.local.store import Store, StoredLot, StoreError
from overlay_router.rules.states import Outcome, Result
from stageout.core.errors import ErrorClass
from stageout.overlay.wire.messages import Pack
from tests.unit.test_overlay_destination import EXPIRES, ORIGIN, Crash, _dying

#: As the first version made them.
_FIRST = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE transfers (
    tid INTEGER PRIMARY KEY AUTOINCREMENT, origin TEXT NOT NULL, seq INTEGER NOT NULL, sender TEXT NOT NULL,
    path BLOB NOT NULL, size INTEGER NOT NULL, block_bytes INTEGER NOT NULL, expires INTEGER NOT NULL,
    UNIQUE (origin, seq, sender));
CREATE TABLE staged (tid INTEGER NOT NULL, block INTEGER NOT NULL, digest BLOB NOT NULL, PRIMARY KEY (tid, block))
    WITHOUT ROWID;
CREATE TABLE origins (origin TEXT PRIMARY KEY, low INTEGER NOT NULL, expires INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE results (
    origin TEXT NOT NULL, seq INTEGER NOT NULL, outcome TEXT NOT NULL, reason TEXT NOT NULL,
    generation INTEGER NOT NULL, PRIMARY KEY (origin, seq)) WITHOUT ROWID;
CREATE TABLE cancelled (origin TEXT NOT NULL, seq INTEGER NOT NULL, PRIMARY KEY (origin, seq)) WITHOUT ROWID;
CREATE TABLE intents (
    origin TEXT NOT NULL, seq INTEGER NOT NULL, operation TEXT NOT NULL, inode INTEGER NOT NULL,
    PRIMARY KEY (origin, seq)) WITHOUT ROWID;
CREATE TABLE generations (path BLOB PRIMARY KEY, generation INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO meta VALUES ('epoch', 'the epoch');
"""
_CUSTODY = """
CREATE TABLE custody (
    origin TEXT NOT NULL, seq INTEGER NOT NULL, operation TEXT NOT NULL, sender TEXT NOT NULL, digest TEXT NOT NULL,
    tid INTEGER NOT NULL, taken_at INTEGER NOT NULL, damaged INTEGER NOT NULL, asked TEXT NOT NULL,
    PRIMARY KEY (origin, seq)) WITHOUT ROWID;
"""
#: The other parts of each later version.
_MORE = {
    2: """CREATE TABLE packs (
    origin TEXT NOT NULL, seq INTEGER NOT NULL, end INTEGER NOT NULL, results TEXT NOT NULL, PRIMARY KEY (origin, seq))
    WITHOUT ROWID;
CREATE TABLE pack_intents (origin TEXT NOT NULL, expires INTEGER NOT NULL, files TEXT NOT NULL);
""",
    3: """CREATE TABLE lots (
    lot TEXT PRIMARY KEY, key TEXT NOT NULL, path BLOB NOT NULL, left INTEGER NOT NULL, until INTEGER NOT NULL)
    WITHOUT ROWID;
CREATE TABLE taken (tid INTEGER PRIMARY KEY);
""",
    4: "DROP TABLE taken; CREATE TABLE taken (tid INTEGER PRIMARY KEY, lot TEXT NOT NULL, size INTEGER NOT NULL);",
    5: """DROP TABLE results; CREATE TABLE results (
    origin TEXT NOT NULL, seq INTEGER NOT NULL, outcome TEXT NOT NULL, reason TEXT NOT NULL,
    generation INTEGER NOT NULL, code INTEGER NOT NULL, PRIMARY KEY (origin, seq)) WITHOUT ROWID;
""",
    6: "",
    7: """DROP TABLE transfers; CREATE TABLE transfers (
    tid INTEGER PRIMARY KEY AUTOINCREMENT, origin TEXT NOT NULL, seq INTEGER NOT NULL, sender TEXT NOT NULL,
    path BLOB NOT NULL, size INTEGER NOT NULL, block_bytes INTEGER NOT NULL, expires INTEGER NOT NULL,
    digest TEXT NOT NULL DEFAULT '', UNIQUE (origin, seq, sender));
CREATE TABLE contents (
    inode INTEGER PRIMARY KEY, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, path BLOB NOT NULL,
    digest TEXT NOT NULL, manifest TEXT NOT NULL);
CREATE INDEX content_paths ON contents (path);
CREATE TABLE content_blocks (inode INTEGER PRIMARY KEY, digests BLOB NOT NULL);
INSERT INTO contents VALUES (5, 6, 7, CAST('a/b' AS BLOB), 'xxh3-128', 'abcd');
""",
    8: """DROP TABLE content_blocks; CREATE TABLE content_blocks (
    inode INTEGER NOT NULL, part INTEGER NOT NULL, digests BLOB NOT NULL, PRIMARY KEY (inode, part)) WITHOUT ROWID;
""",
}
_DIGESTS = bytes(range(256)) * 129
_CODE = ErrorClass.CONFLICT.code


def _old(path: Path, version: int, more: str = "") -> None:
    """A database as a router of that version left it: a transfer, results, a cancellation, and what else it had."""
    with sqlite3.connect(path) as connection:
        connection.executescript(_FIRST + "".join(_MORE[number] for number in range(2, version + 1)) + more)
        run = connection.execute
        more = ", ''" if version >= 7 else ""
        run(f"INSERT INTO transfers VALUES (7, ?, 4, 'key/x', ?, 5, 4, ?{more})", (ORIGIN, b"a/\xff", EXPIRES))
        if version == 7:
            run("INSERT INTO content_blocks VALUES (5, ?)", (_DIGESTS,))
        elif version > 7:
            parts = (_DIGESTS[start : start + 16384] for start in range(0, len(_DIGESTS), 16384))
            connection.executemany("INSERT INTO content_blocks VALUES (5, ?, ?)", enumerate(parts))
        run("INSERT INTO staged VALUES (7, 1, ?)", (b"d" * 16,))
        run("INSERT INTO origins VALUES (?, 1, ?)", (ORIGIN, EXPIRES))
        run("INSERT INTO cancelled VALUES (?, 4)", (ORIGIN,))
        run("INSERT INTO generations VALUES (?, 3)", (b"a/b",))
        codes = ("0", str(_CODE)) if version >= 5 else ("", "")
        for row, code in zip(("2, 'done', '', 3", "3, 'failed', 'conflict', 0"), codes):
            run(f"INSERT INTO results VALUES ('{ORIGIN}', {row}{code and ', ' + code})")
        if version >= 2:
            packed = [[10, "done", "", 1], [11, "failed", "conflict", 0]]
            if version >= 5:
                packed = [[*packed[0], 0], [*packed[1], _CODE]]
            if version >= 6:
                packed = [list(column) for column in zip(*packed)]
            run("INSERT INTO packs VALUES (?, 10, 11, ?)", (ORIGIN, json.dumps(packed)))
            run("INSERT INTO pack_intents VALUES (?, ?, ?)", (ORIGIN, EXPIRES, json.dumps([[12, "p/q", 99]])))
        if version >= 3:
            run("INSERT INTO lots VALUES ('lot', 'key', ?, 100, ?)", (b"a", EXPIRES))
            run("INSERT INTO taken VALUES (7)" if version == 3 else "INSERT INTO taken VALUES (7, 'lot', 5)")
        run(f"PRAGMA user_version={version}")
    connection.close()


@pytest.mark.parametrize("version", range(1, VERSION))
def test_a_database_of_an_earlier_version_loses_nothing(version: int, tmp_path: Path) -> None:
    """It was refused, with the advice to remove it: files in custody, and their results, were gone then."""
    _old(tmp_path / "db", version)
    for _ in range(2):
        store = Store(tmp_path / "db")
        code = _CODE if version >= 5 else 0
        record = store.record(ORIGIN)
        expected = {2: Result(Outcome.DONE, "", 3), 3: Result(Outcome.FAILED, "conflict", code=code)}
        if version >= 2:
            expected |= {10: Result(Outcome.DONE, "", 1), 11: Result(Outcome.FAILED, "conflict", code=code)}
            assert [one.files for one in store.pack_intents()] == [[(12, "p/q", 99)]]
        assert (record.low, record.results, record.cancelled) == (1, expected, {4})
        assert (store.epoch, store.generation("a/b")) == ("the epoch", 3)
        (transfer,) = store.transfers_of(ORIGIN, 4)
        assert (transfer.tid, transfer.ask.path) == (7, "a/\udcff")
        lots = [StoredLot("lot", "key", "a", 100, EXPIRES)] if version >= 3 else []
        assert store.lots() == lots
        content = store.contents.find(Identity(5, 6, 7))
        assert content == (Content("xxh3-128", "abcd") if version >= 7 else None)
        assert store.contents.digests(5, 1, 1 << 20) == (_DIGESTS[16:] if version >= 7 else b"")
        assert [one.path for one in store.contents.after(0, 9)] == (["a/b"] if version >= 7 else [])
        assert store.contents.digests(5, 1023, 2) == (_DIGESTS[1023 * 16 : 1025 * 16] if version >= 7 else b"")
        store.close()
    store = Store(tmp_path / "db")
    store.forget(EXPIRES + 1)
    (left,) = store.lots() or [None]
    assert left is None or left.left_bytes == (105 if version > 3 else 100), "nobody knew from which lot it was"
    assert store.grant(transfer.ask, "key/y").tid > 7, "numbers are never used again"
    store.close()


def test_what_a_custodian_of_an_earlier_version_has_stays_in_custody(tmp_path: Path) -> None:
    operation = {"origin": ORIGIN, "seq": 9, "kind": "publish", "path": "f", "expires": EXPIRES, "terminal": "t:1"}
    row = f"INSERT INTO custody VALUES ('{ORIGIN}', 9, '{json.dumps(operation)}', 'key/x', 'xxh3-128', 8, 5, 0, '');"
    _old(tmp_path / "db", 1, f"{_CUSTODY} {row} INSERT INTO sqlite_sequence VALUES ('transfers', {FIRST_TID});")
    store = CustodyStore(tmp_path / "db")
    ((held),) = store.held()
    assert (held.operation.path, held.operation.terminal, held.tid, held.asked) == ("f", "t:1", 8, None)
    store.close()


def test_a_death_while_it_is_brought_up_leaves_the_old_one(tmp_path: Path) -> None:
    _old(tmp_path / "db", 2)
    with _dying("overlay-migrate", 1, "before"), pytest.raises(Crash):
        Store(tmp_path / "db")
    with sqlite3.connect(tmp_path / "db") as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (2,)
    connection.close()
    Store(tmp_path / "db").close()


@pytest.mark.parametrize("version", [1, 3])
def test_a_full_disk_while_it_is_brought_up_is_said_and_the_old_one_can_be_used(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was called damaged, and its removal advised: what is in custody would have been lost."""
    _old(tmp_path / "db", version)
    connect = sqlite3.connect

    def full(*arguments: Any, **more: Any) -> sqlite3.Connection:
        connection = connect(*arguments, **more)
        [pages] = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count={pages}")
        return connection

    with monkeypatch.context() as patches:
        patches.setattr(sqlite3, "connect", full)
        if version == 3:
            patches.setattr("overlay_router.local.store.migrate", _writes_much)
        with pytest.raises(StoreError, match=r"full.* Make room on its disk.*Nothing in it is lost") as caught:
            Store(tmp_path / "db")
    assert "may be removed" not in str(caught.value)
    with sqlite3.connect(tmp_path / "db") as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (version,)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()
    store = Store(tmp_path / "db")
    assert (store.epoch, [one.tid for one in store.transfers()]) == ("the epoch", [7])
    store.close()


def _writes_much(connection: sqlite3.Connection, version: int) -> None:
    connection.execute("CREATE TABLE much (data BLOB)")
    connection.execute("INSERT INTO much VALUES (zeroblob(1000000))")


def test_a_damaged_one_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "db").write_bytes(b"no database" * 100)
    with pytest.raises(StoreError, match=r"damaged, and may be removed"):
        Store(tmp_path / "db")


def test_one_of_a_later_version_is_kept_and_the_way_back_is_said(tmp_path: Path) -> None:
    Store(tmp_path / "db").close()
    with sqlite3.connect(tmp_path / "db") as connection:
        connection.execute(f"PRAGMA user_version={VERSION + 1}")
    connection.close()
    with pytest.raises(StoreError, match=rf"later version .*{VERSION + 1}.*--custody") as caught:
        Store(tmp_path / "db")
    assert "may be removed" not in str(caught.value)


def test_packs_that_an_earlier_version_took_are_found_by_their_names(tmp_path: Path) -> None:
    pack = Pack(ORIGIN, 3, EXPIRES, ("a/b", "a/c"), (1, 1), (0o644, 0o644), "")
    held = HeldPack(ORIGIN, 3, 5, "a/b", "t:1", "delivered", EXPIRES, "key/x", "xxh3-128", 2, 5)
    store = CustodyStore(tmp_path / "db")
    store.take_packs([(held, pack)])
    store.close()
    with sqlite3.connect(tmp_path / "db") as connection:
        connection.execute("DROP TABLE pack_names")
    connection.close()
    store = CustodyStore(tmp_path / "db")
    assert store.packs_with("a/c") == [(ORIGIN, 3)]
    store.close()
