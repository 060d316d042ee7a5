"""The tables of the ledger.

To change a table, change :data:`_SCHEMA`. If its :data:`VERSION` was released, raise that, too: a manager refuses a
ledger of another version and leaves it as it is.
"""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import NamedTuple

from stageout.core import durable

VERSION = 1

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE orders_done (agent TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE fences (
    job TEXT NOT NULL, owner TEXT NOT NULL DEFAULT '', number INTEGER NOT NULL, at INTEGER NOT NULL,
    PRIMARY KEY (job, owner)) WITHOUT ROWID;
CREATE TABLE sandboxes (
    id INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL, number INTEGER NOT NULL,
    owner TEXT NOT NULL, user TEXT NOT NULL, uid INTEGER NOT NULL, gid INTEGER NOT NULL, shared_uid INTEGER NOT NULL,
    startd TEXT NOT NULL, slot_id INTEGER NOT NULL, dslot_id INTEGER NOT NULL, slot_name TEXT NOT NULL,
    priority INTEGER NOT NULL, state INTEGER NOT NULL, change INTEGER NOT NULL, paused INTEGER NOT NULL DEFAULT 0,
    reason TEXT NOT NULL DEFAULT '', error_code INTEGER NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0, excused INTEGER NOT NULL DEFAULT 0,
    named_tickets TEXT NOT NULL DEFAULT '', named_files INTEGER NOT NULL DEFAULT 0,
    accepted_at INTEGER NOT NULL, confirmed_at INTEGER NOT NULL DEFAULT 0, ended_at INTEGER NOT NULL DEFAULT 0,
    retried_at INTEGER NOT NULL DEFAULT 0, failing_since INTEGER NOT NULL DEFAULT 0,
    forgettable INTEGER NOT NULL DEFAULT 0, acct_group TEXT NOT NULL DEFAULT '', refused TEXT NOT NULL DEFAULT '',
    fallback TEXT NOT NULL DEFAULT '', fallback_note TEXT NOT NULL DEFAULT '',
    UNIQUE (job, number, owner));
CREATE TABLE tickets (
    id INTEGER PRIMARY KEY AUTOINCREMENT, ticket TEXT NOT NULL UNIQUE, sandbox INTEGER NOT NULL, plugin TEXT NOT NULL,
    boot TEXT NOT NULL, synced INTEGER NOT NULL DEFAULT 0, freed INTEGER NOT NULL DEFAULT 0,
    files INTEGER NOT NULL, size INTEGER NOT NULL,
    job_ad TEXT NOT NULL DEFAULT '', plugin_data TEXT NOT NULL DEFAULT '',
    credential_ends_at INTEGER NOT NULL DEFAULT 0);
CREATE INDEX tickets_of ON tickets (sandbox);
CREATE TABLE unknown (ticket TEXT PRIMARY KEY, at INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE credentials (
    ticket INTEGER NOT NULL, kind TEXT NOT NULL, service TEXT NOT NULL, expires_at INTEGER NOT NULL,
    digest TEXT NOT NULL, PRIMARY KEY (ticket, kind, service)) WITHOUT ROWID;
CREATE TABLE destinations (
    id INTEGER PRIMARY KEY AUTOINCREMENT, plugin TEXT NOT NULL, scheme TEXT NOT NULL, host TEXT NOT NULL,
    surroundings TEXT NOT NULL DEFAULT '', UNIQUE (plugin, scheme, host, surroundings));
CREATE TABLE rates (
    server TEXT PRIMARY KEY, log_rate REAL NOT NULL, spread REAL NOT NULL, at INTEGER NOT NULL,
    level INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID;
CREATE TABLE files (
    ticket INTEGER NOT NULL, position INTEGER NOT NULL, sandbox INTEGER NOT NULL, destination INTEGER NOT NULL,
    state INTEGER NOT NULL, next_attempt INTEGER NOT NULL DEFAULT 0, size INTEGER NOT NULL,
    url TEXT NOT NULL, name TEXT NOT NULL, mtime_ns INTEGER NOT NULL, inode INTEGER NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0, excused INTEGER NOT NULL DEFAULT 0, error_code INTEGER NOT NULL DEFAULT 0,
    error TEXT NOT NULL DEFAULT '', verified TEXT NOT NULL DEFAULT '', digest TEXT NOT NULL DEFAULT '',
    began_at INTEGER NOT NULL DEFAULT 0, ended_at INTEGER NOT NULL DEFAULT 0,
    transfer_ms INTEGER NOT NULL DEFAULT 0, streams INTEGER NOT NULL DEFAULT 0, route TEXT NOT NULL DEFAULT '',
    fell_back INTEGER NOT NULL DEFAULT 0, of_node INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (ticket, position)) WITHOUT ROWID;
CREATE INDEX files_due ON files (sandbox, state, destination, next_attempt, size);
CREATE INDEX files_troubled ON files (sandbox, state) WHERE error_code != 0;
CREATE TABLE sums (
    sandbox INTEGER NOT NULL, destination INTEGER NOT NULL, state INTEGER NOT NULL,
    files INTEGER NOT NULL, size INTEGER NOT NULL, PRIMARY KEY (sandbox, destination, state)) WITHOUT ROWID;
CREATE TRIGGER sums_insert AFTER INSERT ON files BEGIN
    INSERT INTO sums VALUES (NEW.sandbox, NEW.destination, NEW.state, 1, NEW.size)
    ON CONFLICT (sandbox, destination, state) DO UPDATE SET files = files + 1, size = size + NEW.size;
END;
CREATE TRIGGER sums_update AFTER UPDATE OF state ON files WHEN NEW.state != OLD.state BEGIN
    UPDATE sums SET files = files - 1, size = size - OLD.size
    WHERE sandbox = OLD.sandbox AND destination = OLD.destination AND state = OLD.state;
    INSERT INTO sums VALUES (NEW.sandbox, NEW.destination, NEW.state, 1, NEW.size)
    ON CONFLICT (sandbox, destination, state) DO UPDATE SET files = files + 1, size = size + NEW.size;
END;
CREATE TRIGGER sums_readdress AFTER UPDATE OF destination ON files WHEN NEW.destination != OLD.destination BEGIN
    UPDATE sums SET files = files - 1, size = size - OLD.size
    WHERE sandbox = OLD.sandbox AND destination = OLD.destination AND state = OLD.state;
    INSERT INTO sums VALUES (NEW.sandbox, NEW.destination, NEW.state, 1, NEW.size)
    ON CONFLICT (sandbox, destination, state) DO UPDATE SET files = files + 1, size = size + NEW.size;
END;
"""


#: Kinds of objects whose content follows from the tables.
_REMADE = ("index", "trigger")
_SUMS_ANEW = """
DELETE FROM sums;
INSERT INTO sums SELECT sandbox, destination, state, count(*), sum(size) FROM files GROUP BY 1, 2, 3;
"""


class _Definition(NamedTuple):
    table: str
    sql: str


def make(connection: sqlite3.Connection) -> None:
    """Make the tables in an empty database."""
    with durable.step("ledger-make"):
        _run(connection, _SCHEMA)


def other_version(connection: sqlite3.Connection) -> str:
    """Return the version of a ledger that this program does not know, "" for its own and for an empty database.

    Programs from before the first release counted from 1, too: their tables have fewer columns.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in (0, VERSION):
        return str(version)
    with closing(sqlite3.connect(":memory:")) as empty:
        empty.executescript(_SCHEMA)
        is_older = bool(version) and _count_columns(connection) < _count_columns(empty)
    return f"{version} from before the first release" if is_older else ""


def _count_columns(connection: sqlite3.Connection) -> int:
    return len(connection.execute("PRAGMA table_info (sandboxes)").fetchall())


def is_ledger(tables: Iterable[str]) -> bool:
    """Tell whether a database with these tables is a ledger, also a damaged one.

    Tables that databases of other programs have, too, prove nothing.
    """
    own = {name for kind, name in _definitions_of_this_version() if kind == "table"} - {"meta", "sqlite_sequence"}
    return not own.isdisjoint(tables)


def repair(connection: sqlite3.Connection) -> str:
    """Make damaged indexes and triggers anew. Returns what was wrong, "" for nothing.

    :raises sqlite3.Error: more than indexes and triggers is damaged.
    """
    wrong = _repair_definitions(connection)
    found = _damage(connection)
    if not found:
        return wrong
    with durable.step("ledger-repair"):
        connection.execute("REINDEX")
    left = _damage(connection)
    if left:
        raise sqlite3.DatabaseError(f"it is malformed: {left}")
    return "; ".join(filter(None, (wrong, found)))


def _repair_definitions(connection: sqlite3.Connection) -> str:
    """Compare the definitions with those of a new ledger, and make indexes and triggers that differ anew.

    SQLite believes a definition as it stands: with another name of a column each statement about it fails, and with
    another trigger the sums are wrong. Others, such as those of ANALYZE, do no harm; only beside damage an unknown
    index or trigger may be one of ours whose name is damaged.
    """
    wanted, found = _definitions_of_this_version(), _definitions(connection)
    wrong = sorted(key for key, definition in wanted.items() if found.get(key) != definition)
    if not wrong:
        return ""
    tables = [name for kind, name in wrong if kind not in _REMADE]
    if tables:
        raise sqlite3.DatabaseError(f"it is malformed: the definition of {tables[0]} is not that of this version")
    unknown = [key for key in found if key not in wanted and key[0] in _REMADE]
    script = [f"DROP {kind} {_quoted(name)};" for kind, name in (*wrong, *unknown) if (kind, name) in found]
    script += [f"{wanted[key].sql};" for key in wrong if key in wanted]
    with durable.step("ledger-repair"):
        _run(connection, "\n".join([*script, _SUMS_ANEW]))
    return "the definition of " + ", ".join(f"{kind} {name}" for kind, name in wrong)


def _definitions(connection: sqlite3.Connection) -> dict[tuple[str, str], _Definition]:
    """Return the table and the statement of each object, by its type and name.

    :raises sqlite3.DatabaseError: one of them is damaged so that it is no text.
    """
    rows = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master").fetchall()
    if not all(isinstance(value, (str, type(None))) for row in rows for value in row):
        raise sqlite3.DatabaseError("it is malformed: a definition is no text")
    return {(kind, name): _Definition(table, " ".join((sql or "").split())) for kind, name, table, sql in rows}


@functools.lru_cache(maxsize=1)
def _definitions_of_this_version() -> Mapping[tuple[str, str], _Definition]:
    with closing(sqlite3.connect(":memory:")) as empty:
        empty.executescript(_SCHEMA)
        return _definitions(empty)


def _quoted(name: str) -> str:
    escaped = name.replace('"', '""')
    return f'"{escaped}"'


def _damage(connection: sqlite3.Connection) -> str:
    (first,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    return "" if first == "ok" else str(first)


def _run(connection: sqlite3.Connection, script: str) -> None:
    try:
        connection.executescript(f"BEGIN IMMEDIATE;{script}PRAGMA user_version = {VERSION};COMMIT;")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
