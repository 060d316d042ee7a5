"""The ledger: what the manager has promised, in SQLite (WAL, ``synchronous=FULL``).

One thread writes. Changes that come in while it waits for the disk are committed together, so the rate of hand-offs
is not bound by the rate of disk flushes. Each change sees all earlier ones, and a change that fails takes nothing
with it. Questions are answered by a second thread from the last committed state. Sums over a sandbox's files are kept
by triggers: a sandbox may have a million of them. Numbers of sandboxes and tickets are never used again: what the
manager keeps under a number in memory outlives the row.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sandbox_manager.reserve import Reserve
from stageout.core import durable
from stageout.core.errors import StageoutError

T = TypeVar("T")
SCHEMA_VERSION = 2
_GROUP = 500

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE orders_done (agent TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE fences (job TEXT PRIMARY KEY, number INTEGER NOT NULL, at INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE sandboxes (
    id INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL, number INTEGER NOT NULL,
    owner TEXT NOT NULL, user TEXT NOT NULL, uid INTEGER NOT NULL, gid INTEGER NOT NULL, shared_uid INTEGER NOT NULL,
    startd TEXT NOT NULL, slot_id INTEGER NOT NULL, dslot_id INTEGER NOT NULL, slot_name TEXT NOT NULL,
    priority INTEGER NOT NULL, state INTEGER NOT NULL, change INTEGER NOT NULL, paused INTEGER NOT NULL DEFAULT 0,
    reason TEXT NOT NULL DEFAULT '', error_code INTEGER NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0, excused INTEGER NOT NULL DEFAULT 0,
    named_tickets TEXT NOT NULL DEFAULT '', named_files INTEGER NOT NULL DEFAULT 0,
    accepted_at INTEGER NOT NULL, confirmed_at INTEGER NOT NULL DEFAULT 0, ended_at INTEGER NOT NULL DEFAULT 0,
    forgettable INTEGER NOT NULL DEFAULT 0,
    UNIQUE (job, number));
CREATE TABLE tickets (
    id INTEGER PRIMARY KEY AUTOINCREMENT, ticket TEXT NOT NULL UNIQUE, sandbox INTEGER NOT NULL, plugin TEXT NOT NULL,
    boot TEXT NOT NULL, synced INTEGER NOT NULL DEFAULT 0, freed INTEGER NOT NULL DEFAULT 0,
    files INTEGER NOT NULL, size INTEGER NOT NULL,
    job_ad TEXT NOT NULL DEFAULT '', plugin_data TEXT NOT NULL DEFAULT '',
    credential_ends_at INTEGER NOT NULL DEFAULT 0);
CREATE INDEX tickets_of ON tickets (sandbox);
CREATE TABLE credentials (
    ticket INTEGER NOT NULL, kind TEXT NOT NULL, service TEXT NOT NULL, expires_at INTEGER NOT NULL,
    digest TEXT NOT NULL, PRIMARY KEY (ticket, kind, service)) WITHOUT ROWID;
CREATE TABLE destinations (
    id INTEGER PRIMARY KEY AUTOINCREMENT, plugin TEXT NOT NULL, scheme TEXT NOT NULL, host TEXT NOT NULL,
    surroundings TEXT NOT NULL, UNIQUE (plugin, scheme, host, surroundings));
CREATE TABLE files (
    ticket INTEGER NOT NULL, position INTEGER NOT NULL, sandbox INTEGER NOT NULL, destination INTEGER NOT NULL,
    state INTEGER NOT NULL, next_attempt INTEGER NOT NULL DEFAULT 0, size INTEGER NOT NULL,
    url TEXT NOT NULL, name TEXT NOT NULL, mtime_ns INTEGER NOT NULL, inode INTEGER NOT NULL, device INTEGER NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0, excused INTEGER NOT NULL DEFAULT 0, error_code INTEGER NOT NULL DEFAULT 0,
    error TEXT NOT NULL DEFAULT '', verified TEXT NOT NULL DEFAULT '', digest TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (ticket, position)) WITHOUT ROWID;
CREATE INDEX files_due ON files (sandbox, state, destination, next_attempt, size);
CREATE INDEX files_troubled ON files (sandbox, state) WHERE error_code != 0;
CREATE TABLE sums (
    sandbox INTEGER NOT NULL, destination INTEGER NOT NULL, state INTEGER NOT NULL,
    files INTEGER NOT NULL, size INTEGER NOT NULL, PRIMARY KEY (sandbox, destination, state)) WITHOUT ROWID;
CREATE TRIGGER sums_insert AFTER INSERT ON files BEGIN
    INSERT INTO sums VALUES (NEW.sandbox, NEW.destination, NEW.state, 1, NEW.size)
    ON CONFLICT DO UPDATE SET files = files + 1, size = size + NEW.size;
END;
CREATE TRIGGER sums_update AFTER UPDATE OF state ON files WHEN NEW.state != OLD.state BEGIN
    UPDATE sums SET files = files - 1, size = size - OLD.size
    WHERE sandbox = OLD.sandbox AND destination = OLD.destination AND state = OLD.state;
    INSERT INTO sums VALUES (NEW.sandbox, NEW.destination, NEW.state, 1, NEW.size)
    ON CONFLICT DO UPDATE SET files = files + 1, size = size + NEW.size;
END;
CREATE TRIGGER sums_readdress AFTER UPDATE OF destination ON files WHEN NEW.destination != OLD.destination BEGIN
    UPDATE sums SET files = files - 1, size = size - OLD.size
    WHERE sandbox = OLD.sandbox AND destination = OLD.destination AND state = OLD.state;
    INSERT INTO sums VALUES (NEW.sandbox, NEW.destination, NEW.state, 1, NEW.size)
    ON CONFLICT DO UPDATE SET files = files + 1, size = size + NEW.size;
END;
"""


class LedgerError(StageoutError):
    """The ledger cannot be used; the text says what to do."""


@dataclass
class _Change:
    labels: tuple[str, ...]
    run: Callable[[sqlite3.Connection], Any]
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Any]
    result: Any = None
    error: BaseException | None = None

    def settle(self) -> None:
        """Hand the outcome to who waits (in the loop's thread)."""
        if self.answer.done():
            return
        if self.error is not None:
            self.answer.set_exception(self.error)
        else:
            self.answer.set_result(self.result)


class Ledger:
    """One open ledger. Use from one event loop; :meth:`close` when done.

    :param path: of the database; its directory exists. :param sandboxes: of the spool that it is of.
    :raises LedgerError: it is damaged, empty while there are sandboxes, of a newer version, or cannot be opened.
    """

    def __init__(self, path: Path, sandboxes: Path | None = None) -> None:
        self._path = path
        self._reserve = Reserve(path.with_name("reserve"))
        with _explained(path):
            self._connection = _open(path)
            try:
                _create(self._connection, path, sandboxes)
            except BaseException:
                self._connection.close()
                raise
        self._changes: deque[_Change] = deque()
        self._is_called = False
        self._writer = ThreadPoolExecutor(1, "ledger-write")
        self._readers = ThreadPoolExecutor(1, "ledger-read")
        self._reading: sqlite3.Connection | None = None

    async def write(self, change: Callable[[sqlite3.Connection], T], *labels: str) -> T:
        """Run one change in the writer's thread; once more when the disk was full. On return it is on the disk.

        :param labels: its steps in ``docs/ORDERING.md``; none for what may be lost.
        :raises Exception: what ``change`` raised (nothing of it is kept), or the commit's sqlite3.Error or OSError.
        """
        loop = asyncio.get_running_loop()
        item = _Change(labels, change, loop, loop.create_future())
        self._changes.append(item)
        if not self._is_called:
            self._is_called = True
            loop.run_in_executor(self._writer, self._write_all)
        result: T = await item.answer
        return result

    async def read(self, question: Callable[[sqlite3.Connection], T]) -> T:
        """Answer a question from the last committed state."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, lambda: question(self._reader()))

    async def keep_reserve(self) -> None:
        """Make the room again that is kept for writing on a full disk. :raises OSError: it cannot be."""
        await asyncio.get_running_loop().run_in_executor(self._readers, self._reserve.keep)

    async def give_up_reserve(self) -> bool:
        """Make room when the disk is full. False when it is not, or when nothing is left to give up."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._reserve.give_up)

    def close(self) -> None:
        """Finish what was asked and close. Nothing may be written afterwards."""
        self._writer.shutdown()
        self._readers.submit(self._close_reader).result()
        self._readers.shutdown()
        self._connection.close()

    def _close_reader(self) -> None:
        if self._reading is not None:
            self._reading.close()

    def _reader(self) -> sqlite3.Connection:
        if self._reading is None:
            self._reading = _open(self._path)
            self._reading.execute("PRAGMA query_only = ON")
        return self._reading

    def _write_all(self) -> None:
        """Write what has come in, all in one commit; nothing when an earlier call has taken it along."""
        self._is_called = False  # before looking: whoever comes from now on calls again
        while self._changes:
            self._write_group([self._changes.popleft() for _ in range(min(_GROUP, len(self._changes)))])

    def _write_group(self, group: Sequence[_Change]) -> None:
        self._try_group(group)
        if any(item.error for item in group) and self._reserve.give_up():
            self._try_group([item for item in group if item.error])
        for loop in {item.loop for item in group}:
            loop.call_soon_threadsafe(_settle, [item for item in group if item.loop is loop])

    def _try_group(self, group: Sequence[_Change]) -> None:
        for item in group:
            item.error = None
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for item in group:
                self._run(item)
            with ExitStack() as steps:
                for label in sorted({label for item in group if item.error is None for label in item.labels}):
                    steps.enter_context(durable.step(label))
                self._connection.execute("COMMIT")
        except Exception as problem:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            for item in group:
                item.error = item.error or problem

    def _run(self, item: _Change) -> None:
        self._connection.execute("SAVEPOINT change")
        try:
            item.result = item.run(self._connection)
        except Exception as problem:
            if not self._connection.in_transaction:  # SQLite gave up the whole group, as on a full disk
                raise
            self._connection.execute("ROLLBACK TO change")
            item.error = problem
        self._connection.execute("RELEASE change")


def _settle(items: Sequence[_Change]) -> None:
    for item in items:
        item.settle()


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if tables and "sandboxes" not in tables:
        connection.close()
        raise LedgerError(f"{path} is the database of another program, and was not touched: put the ledger back")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA journal_size_limit = 67108864")
    return connection


def _create(connection: sqlite3.Connection, path: Path, sandboxes: Path | None) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == 0:
        count = sum(1 for _ in sandboxes.iterdir()) if sandboxes is not None and sandboxes.is_dir() else 0
        if count:  # without records they would be removed
            raise LedgerError(
                f"the ledger {path} was empty, or not there, and {sandboxes} has {count} sandboxes: put it back from a"
                f" backup. If it is lost for good, empty {sandboxes}: the jobs run again"
            )
        with durable.step("ledger-make"):
            connection.executescript(f"BEGIN;{_SCHEMA}PRAGMA user_version = {SCHEMA_VERSION};COMMIT;")
    elif version != SCHEMA_VERSION:
        raise LedgerError(
            f"the ledger has version {version}, this program writes {SCHEMA_VERSION}: "
            "let the version that wrote it deliver what it holds ('stageout status --node' is empty then), stop it, "
            "remove the directory of the ledger, and start this one"
        )


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as problem:
        raise LedgerError(
            f"cannot open the ledger {path}: {problem}; if it is damaged, move it and the spool's sandboxes aside: "
            "these are then lost and their jobs run again"
        ) from None


def get_meta(connection: sqlite3.Connection, name: str, default: str = "") -> str:
    """A remembered value of the manager itself."""
    row = connection.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
    return str(row[0]) if row else default


def set_meta(connection: sqlite3.Connection, name: str, value: str) -> None:
    """Remember a value of the manager itself."""
    connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))
