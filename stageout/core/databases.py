"""Databases that one process has for itself (SQLite)."""

from __future__ import annotations

import errno
import os
import sqlite3
import tempfile
from pathlib import Path

from stageout.core import errors

#: Seconds to wait for another process that is closing the database, in particular during a router's restart.
_BUSY_S = 0.5
_ERROR, _READONLY, _IOERR, _FULL = 1, 8, 10, 13
#: Bytes to write beside a database as a trial, when SQLite names no cause.
_TRIED_BYTES = 1024 * 1024
_CODES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _FULL),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), _READONLY),
    errno.EIO: _IOERR,
}


def code_of(problem: sqlite3.Error) -> int:
    """Return SQLite's primary result code of an error, 0 where it is unknown (before Python 3.11)."""
    return int(getattr(problem, "sqlite_errorcode", 0)) & 0xFF


def is_full(problem: BaseException) -> bool:
    """Tell whether a database had no room on its disk."""
    return isinstance(problem, sqlite3.OperationalError) and code_of(problem) == _FULL


def is_disk_full(problem: BaseException, path: Path) -> bool:
    """Tell whether a database could not be opened because its disk is full. SQLite may call that an I/O error.

    :param path: of the database.
    """
    if isinstance(problem, OSError):
        return errors.is_disk_full(problem)
    no_room = isinstance(problem, sqlite3.OperationalError) and _tried(path.parent) == _FULL
    return no_room or is_full(problem)


def is_read_only(problem: BaseException) -> bool:
    """Tell whether a database is read-only."""
    return isinstance(problem, sqlite3.OperationalError) and code_of(problem) == _READONLY


def find_code(problem: BaseException, path: Path, connection: sqlite3.Connection | None = None) -> None:
    """Find the cause of an error that SQLite reports without its code (Python before 3.11).

    :param path: of the database. :param connection: to it, if it is open. The error has ``sqlite_errorcode`` on return.
    """
    if isinstance(problem, sqlite3.OperationalError) and not hasattr(problem, "sqlite_errorcode"):
        code = _FULL if connection is not None and _has_all_pages(connection) else _tried(path.parent)
        vars(problem)["sqlite_errorcode"] = code


def _has_all_pages(connection: sqlite3.Connection) -> bool:
    try:
        [count], [most] = (connection.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "max_page_count"))
    except sqlite3.Error:
        return False
    return int(count) >= int(most)


def _tried(directory: Path) -> int:
    """Return SQLite's code for the error of a new file in this directory."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, _TRIED_BYTES)
    except OSError as problem:
        return _CODES.get(problem.errno or 0, _ERROR)
    return _ERROR


class Foreign(sqlite3.DatabaseError):
    """A database of another program."""


def open_alone(path: Path, table: str = "meta") -> tuple[sqlite3.Connection, int]:
    """Open or make a database in a transaction that has begun. Yield it, and its ``user_version``: 0 for a new one.

    No other process can open it in the meantime. A committed change is durable (WAL, ``synchronous=FULL``). The
    connection begins no transaction by itself. Any thread may use it, one at a time.

    :param table: a table that each of these databases has, unless it is new.
    :raises Foreign: it belongs to another program, and was not changed.
    :raises sqlite3.Error: another process uses it, it is damaged, or its directory cannot be written to.
    """
    try:
        connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as problem:
        find_code(problem, path)
        raise
    run = connection.execute
    try:
        run("PRAGMA locking_mode=EXCLUSIVE")
        tables = {name for (name,) in run("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if tables and table not in tables:
            raise Foreign(
                "it is the database of another program, which was not touched: move it away, and put ours back"
            )
        run("PRAGMA journal_mode=WAL")
        run("PRAGMA synchronous=FULL")
        run("BEGIN IMMEDIATE")
        [version] = run("PRAGMA user_version").fetchone()
    except BaseException as problem:
        find_code(problem, path)
        connection.close()
        raise
    return connection, int(version)
