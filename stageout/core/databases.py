"""Databases that one process has for itself (SQLite)."""

from __future__ import annotations

import sqlite3
from pathlib import Path

#: Another process that is just closing it, a router that is started again above all, is waited for so long.
_BUSY_S = 0.5


def open_alone(path: Path) -> tuple[sqlite3.Connection, int]:
    """Open or make a database in a transaction that has begun. Gives it, and its ``user_version``: 0 for a new one.

    No other process opens it as long as it is open here. What is committed is on the disk (WAL, ``synchronous=FULL``).
    It begins no transaction by itself; any thread may use it, one at a time.

    :raises sqlite3.Error: another process has it, it is damaged, or its directory cannot be written to.
    """
    connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    run = connection.execute
    try:
        run("PRAGMA locking_mode=EXCLUSIVE")
        run("PRAGMA journal_mode=WAL")
        run("PRAGMA synchronous=FULL")
        run("BEGIN IMMEDIATE")
        [version] = run("PRAGMA user_version").fetchone()
    except BaseException:
        connection.close()
        raise
    return connection, int(version)
