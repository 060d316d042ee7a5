"""Leases on the disk: SQLite, WAL, ``synchronous=FULL``, open in one process only."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from policy_service.model import Lease
from stageout.core import durable
from stageout.core.databases import Foreign, open_alone
from stageout.core.errors import StageoutError

_VERSION = 1
_SCHEMA = """
CREATE TABLE leases (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, client TEXT NOT NULL, source TEXT NOT NULL, destination TEXT NOT NULL,
    streams INTEGER NOT NULL, in_use INTEGER NOT NULL, wanted INTEGER NOT NULL, turn INTEGER NOT NULL,
    until REAL NOT NULL) WITHOUT ROWID
"""
_LOAD = "SELECT id, owner, client, source, destination, streams, in_use, wanted, turn, until FROM leases"
_SAVE = "INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"


class LeaseStoreError(StageoutError):
    """The database cannot be used. The text says what to do."""

    is_temporary = True  # most often the service before has not ended yet


class LeaseStore:
    """The open database. Use it from one thread only.

    :param path: database file; it and its directory are made when missing.
    :raises LeaseStoreError: another process has the database open, it is damaged, or of a newer version.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._connection, version = open_alone(path, "leases")
            self._bring_up(version)
        except Foreign as problem:
            raise LeaseStoreError(f"{path}: {problem}") from None
        except (OSError, sqlite3.Error) as problem:
            raise self._unusable(problem) from problem

    def _unusable(self, problem: Exception) -> LeaseStoreError:
        return LeaseStoreError(
            f"{self._path}: {problem}. Stop the service that uses it, or mend its directory; a damaged file may be"
            " removed: clients then ask for streams anew"
        )

    def _bring_up(self, version: int) -> None:
        run = self._connection.execute
        if version == 0:
            run(_SCHEMA)
            run(f"PRAGMA user_version={_VERSION}")
        elif version != _VERSION:
            raise sqlite3.DatabaseError(f"it is of version {version}, this program knows {_VERSION}")
        run("COMMIT")

    def load(self, now_mono_s: float, now_wall_s: float, most_s: float) -> list[Lease]:
        """Return all leases. The wall clock tells the rest of each term, which is ``most_s`` at most.

        :raises LeaseStoreError: the database is damaged.
        """
        try:
            rows = self._connection.execute(_LOAD).fetchall()
        except sqlite3.Error as problem:
            raise self._unusable(problem) from problem
        found = (Lease(*row) for row in rows)
        return [replace(one, deadline_s=now_mono_s + min(most_s, one.deadline_s - now_wall_s)) for one in found]

    def save(self, changed: Iterable[tuple[Lease, float]], gone: Iterable[str]) -> None:
        """Write leases with the wall time of their ends, and delete others, in one transaction, synced on return."""
        run = self._connection.execute
        run("BEGIN IMMEDIATE")
        try:
            for lease, until in changed:
                values = (lease.id, lease.owner, lease.client, lease.source, lease.destination, lease.streams)
                run(_SAVE, (*values, lease.in_use, lease.wanted, lease.turn, until))
            for name in gone:
                run("DELETE FROM leases WHERE id = ?", (name,))
            durable.commit("policy-record", self._connection)
        except BaseException:
            self._connection.rollback()
            raise

    def close(self) -> None:
        """Close the database."""
        self._connection.close()
