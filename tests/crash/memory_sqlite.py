"""SQLite in memory, seen as files that outlive a process: what was committed stays, what was not is forgotten.

With ``synchronous=FULL`` a commit is on the disk when it returns. With less a loss of power may take back commits: then
the state before the first of them is kept aside, as SQLite's documentation says that it may come back.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from random import Random
from typing import Any

Error = sqlite3.Error
OperationalError = sqlite3.OperationalError
Connection = sqlite3.Connection


@dataclass
class _File:
    real: sqlite3.Connection
    synchronous: str = "FULL"
    safe: sqlite3.Connection | None = None

    def keep_safe(self) -> None:
        """Keep the last state that is on the disk, when commits do not wait for it."""
        if self.synchronous != "FULL" and self.safe is None:
            self.safe = _empty()
            self.real.backup(self.safe)


class SimulatedConnection:
    """One process's connection to a database file."""

    def __init__(self, databases: Databases, file: _File, owner: Any) -> None:
        self._databases = databases
        self._file = file
        self._owner = owner
        self._is_reader = False

    def execute(self, sql: str, values: Any = ()) -> Any:
        self._check()
        if sql.startswith("PRAGMA"):
            if "query_only" in sql:
                self._is_reader = True
                return None
            if "synchronous" in sql and "=" in sql:
                self._file.synchronous = sql.partition("=")[2].strip()
        elif sql == "BEGIN IMMEDIATE":
            self._file.keep_safe()
        elif sql == "COMMIT":
            self._databases.before_commit(self._file)
        return self._file.real.execute(sql, values)

    def executemany(self, sql: str, rows: Any) -> Any:
        self._check()
        return self._file.real.executemany(sql, rows)

    def executescript(self, sql: str) -> Any:
        self._check()
        self._databases.before_commit(self._file)
        return self._file.real.executescript(sql)

    @property
    def in_transaction(self) -> bool:
        return self._file.real.in_transaction

    def close(self) -> None:
        return None

    def _check(self) -> None:
        if not self._owner.is_alive:
            from tests.crash.world import Killed

            raise Killed


@dataclass
class Databases:
    """The database files of one machine."""

    machine: Any
    _files: dict[str, _File] = field(default_factory=dict)

    def connect(self, path: Any, **options: Any) -> SimulatedConnection:
        """As ``sqlite3.connect``."""
        self.machine.disk.called("sqlite-open")
        name = str(path)
        if name not in self._files:
            if self.machine.disk.full:
                raise sqlite3.OperationalError("unable to open database file")
            self._files[name] = _File(_empty())
        return SimulatedConnection(self, self._files[name], self.machine.world.current)

    def before_commit(self, file: _File) -> None:
        """Faults of a commit: the power goes before it, the disk is full."""
        self.machine.disk.called("sqlite-commit")
        if self.machine.disk.full:
            raise sqlite3.OperationalError("database or disk is full")

    def end_process(self, owner: Any) -> None:
        """Open transactions are gone."""
        for file in self._files.values():
            if file.real.in_transaction:
                file.real.execute("ROLLBACK")

    def lose_power(self, random: Random) -> None:
        """Commits that were not synced may be taken back."""
        self.end_process(None)
        for file in self._files.values():
            if file.safe is not None:
                if random.random() < 0.5:
                    file.real = file.safe
                file.safe = None

    def lose(self, path: str) -> None:
        """Somebody removes a database."""
        self._files.pop(path, None)

    def look(self, path: str) -> sqlite3.Connection | None:
        """The committed state, for the checks of the simulation."""
        file = self._files.get(path)
        return file.real if file else None


def _empty() -> sqlite3.Connection:
    return sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
