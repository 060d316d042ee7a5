"""Databases of earlier routers, brought to the tables of this one at the start.

Each step makes one version the next; all that are needed and the new number are one transaction, so a database is of
its old version or of this one. The way back is not known: :class:`Later` says what to do instead.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable

from stageout.core import log
from stageout.core.databases import is_full

VERSION = 9


class Later(Exception):
    """The database was made by a later version of the router; the text says what to do."""


def migrate(connection: sqlite3.Connection, version: int) -> None:
    """Bring a database of that version to :data:`VERSION`, in the transaction that is open.

    :raises Later: it is of a later one.
    """
    if version > VERSION:
        raise Later(
            f"it was made by a later version of the router (tables of version {version}, this one knows {VERSION}):"
            " start that one again. To go back all the same, let that one deliver what it has in custody"
            " (stageout-router --custody), stop it, and move this file away. Do not remove it before"
        )
    for step in _STEPS[version - 1 :]:
        step(connection)
    connection.execute(f"PRAGMA user_version={VERSION}")
    log.event("database-migrated", was=version, now=VERSION)


def _packs(connection: sqlite3.Connection) -> None:
    """1 to 2: small files in packs."""
    connection.execute(
        "CREATE TABLE packs (origin TEXT NOT NULL, seq INTEGER NOT NULL, end INTEGER NOT NULL, results TEXT NOT NULL,"
        " PRIMARY KEY (origin, seq)) WITHOUT ROWID"
    )
    connection.execute(
        "CREATE TABLE pack_intents (origin TEXT NOT NULL, expires INTEGER NOT NULL, files TEXT NOT NULL)"
    )


def _lots(connection: sqlite3.Connection) -> None:
    """2 to 3: lots that somebody asked for."""
    connection.execute(
        "CREATE TABLE lots (lot TEXT PRIMARY KEY, key TEXT NOT NULL, path BLOB NOT NULL, left INTEGER NOT NULL,"
        " until INTEGER NOT NULL) WITHOUT ROWID"
    )
    connection.execute("CREATE TABLE taken (tid INTEGER PRIMARY KEY)")


def _taken(connection: sqlite3.Connection) -> None:
    """3 to 4: what a transfer has of a lot goes back to it. Of those under way nobody knows from which lot it was."""
    connection.execute("ALTER TABLE taken ADD COLUMN lot TEXT NOT NULL DEFAULT ''")
    connection.execute("ALTER TABLE taken ADD COLUMN size INTEGER NOT NULL DEFAULT 0")


def _codes(connection: sqlite3.Connection) -> None:
    """4 to 5: the class of a failure; 0: the reason says it."""
    connection.execute("ALTER TABLE results ADD COLUMN code INTEGER NOT NULL DEFAULT 0")


def _columns(connection: sqlite3.Connection) -> None:
    """5 to 6: results of packs by column."""
    for origin, seq, text in connection.execute("SELECT origin, seq, results FROM packs").fetchall():
        columns = json.dumps(list(zip(*json.loads(text))), separators=(",", ":"))
        connection.execute("UPDATE packs SET results = ? WHERE origin = ? AND seq = ?", (columns, origin, seq))


def _contents(connection: sqlite3.Connection) -> None:
    """6 to 7: digests of published files; of those that there are nothing is known, nor of which kind others are."""
    connection.execute("ALTER TABLE transfers ADD COLUMN digest TEXT NOT NULL DEFAULT ''")
    connection.execute(
        "CREATE TABLE contents (inode INTEGER PRIMARY KEY, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL,"
        " path BLOB NOT NULL, digest TEXT NOT NULL, manifest TEXT NOT NULL)"
    )
    connection.execute("CREATE INDEX content_paths ON contents (path)")
    connection.execute("CREATE TABLE content_blocks (inode INTEGER PRIMARY KEY, digests BLOB NOT NULL)")


def _parts(connection: sqlite3.Connection) -> None:
    """7 to 8: digests of a large file in parts of 1024, 16 bytes each."""
    run = connection.execute
    run("ALTER TABLE content_blocks RENAME TO all_blocks")
    run(
        "CREATE TABLE content_blocks (inode INTEGER NOT NULL, part INTEGER NOT NULL, digests BLOB NOT NULL,"
        " PRIMARY KEY (inode, part)) WITHOUT ROWID"
    )
    for inode, digests in run("SELECT inode, digests FROM all_blocks"):
        rows = (
            (inode, part, digests[start : start + 16384]) for part, start in enumerate(range(0, len(digests), 16384))
        )
        connection.executemany("INSERT INTO content_blocks VALUES (?, ?, ?)", rows)
    run("DROP TABLE all_blocks")


def _moves(connection: sqlite3.Connection) -> None:
    """8 to 9: names that are changed above many records. The existing rows have the paths of their files."""
    connection.execute("ALTER TABLE contents ADD COLUMN since INTEGER NOT NULL DEFAULT 0")
    connection.execute(
        "CREATE TABLE content_moves (number INTEGER PRIMARY KEY AUTOINCREMENT, path BLOB NOT NULL, target BLOB,"
        " reached BLOB NOT NULL)"
    )


_STEPS: list[Callable[[sqlite3.Connection], None]] = [
    _packs,
    _lots,
    _taken,
    _codes,
    _columns,
    _contents,
    _parts,
    _moves,
]


def what_to_do(problem: sqlite3.OperationalError) -> str:
    """Advice for a database that could not be opened, or brought to this version, now."""
    if is_full(problem):
        advice = "Make room on its disk, as much again as it has itself, and start the router again"
    else:
        advice = "Stop the router that uses it, or let this user write it, and see whether its disk is sound"
    return f"{advice}. Nothing in it is lost, so do not remove it: it is as the last router left it"
