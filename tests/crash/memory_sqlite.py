"""SQLite in memory, seen as files that outlive a process: what was committed stays, what was not is forgotten.

With ``synchronous=FULL`` a commit is on the disk when it returns. With less a loss of power may take back commits: then
the state before the first of them is kept aside, as SQLite's documentation says that it may come back.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.crash.observed import Observer

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
        answer = self._file.real.execute(sql, values)
        if sql == "COMMIT":
            self._databases.committed(self._file)
        return answer

    def executemany(self, sql: str, rows: Any) -> Any:
        self._check()
        return self._file.real.executemany(sql, rows)

    def executescript(self, sql: str) -> Any:
        self._check()
        self._databases.before_commit(self._file)
        answer = self._file.real.executescript(sql)
        self._databases.made(self._file)
        return answer

    @property
    def in_transaction(self) -> bool:
        return self._file.real.in_transaction

    @property
    def text_factory(self) -> Any:
        return self._file.real.text_factory

    @text_factory.setter
    def text_factory(self, factory: Any) -> None:
        self._file.real.text_factory = factory

    def close(self) -> None:
        return None

    def _check(self) -> None:
        if not self._owner.is_alive:
            from tests.crash.world import Killed

            raise Killed


@dataclass
class Databases:
    """The database files of one machine.

    :param observer: looks at what is committed. :param has_directory: is there something of this ticket in the spool?
    """

    machine: Any
    observer: Observer | None = None
    has_directory: Callable[[str], bool] = lambda ticket: False
    _files: dict[str, _File] = field(default_factory=dict)

    def connect(self, path: Any, **options: Any) -> SimulatedConnection:
        """As ``sqlite3.connect``."""
        self.machine.disk.called("sqlite-open")
        name = str(path)
        if name not in self._files:
            if self.machine.disk.full:
                raise sqlite3.OperationalError("unable to open database file")
            self._files[name] = _File(_empty())
        if self.observer is not None:
            self.observer.prepare(self._files[name].real)
        return SimulatedConnection(self, self._files[name], self.machine.world.current)

    def before_commit(self, file: _File) -> None:
        """Faults of a commit: the power goes before it, the disk is full."""
        self.machine.disk.called("sqlite-commit")
        if self.machine.disk.full:
            raise sqlite3.OperationalError("database or disk is full")

    def made(self, file: _File) -> None:
        """Tables were made."""
        if self.observer is not None:
            self.observer.made(file.real)

    def committed(self, file: _File) -> None:
        """Something is on the disk now."""
        if self.observer is not None:
            self.observer.committed(file.real, self.has_directory)

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

    def copy(self, path: str) -> sqlite3.Connection | None:
        """Return a copy of the committed state."""
        file = self._files.get(path)
        if file is None:
            return None
        copy = _empty()
        file.real.backup(copy)
        return copy

    def put_back(self, path: str, copy: sqlite3.Connection) -> None:
        """Somebody puts a copy in the place of a database."""
        self._files[path] = _File(copy)

    def look(self, path: str) -> sqlite3.Connection | None:
        """The committed state, for the checks of the simulation."""
        file = self._files.get(path)
        return file.real if file else None


def _empty() -> sqlite3.Connection:
    return sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
