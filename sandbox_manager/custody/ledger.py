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
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sandbox_manager.custody import queries, schema
from sandbox_manager.custody.reserve import Reserve
from stageout.core import databases, durable, log
from stageout.core.errors import StageoutError
from stageout.core.metrics import DISK_BOUNDS, Histogram

T = TypeVar("T")
_GROUP = 500
#: Free pages (4 KiB each) that the ledger keeps for the next records, and how many go in one commit.
_FREE_PAGES, _PAGES_AT_ONCE = 2560, 1000


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
    :ivar commits: durations of commits.
    :raises LedgerError: it is damaged, empty while there are sandboxes, of another version, or cannot be opened.
    """

    def __init__(self, path: Path, sandboxes: Path | None = None) -> None:
        self._path = path
        self._reserve = Reserve(path.with_name("reserve"))
        with _explained(path):
            try:
                self._connection = _opened(path, sandboxes)
            except sqlite3.OperationalError:
                if not self._reserve.give_up():
                    raise
                self._connection = _opened(path, sandboxes)
        self.commits = Histogram(DISK_BOUNDS)
        self._changes: deque[_Change] = deque()
        self._is_scheduled = False
        self._writer = ThreadPoolExecutor(1, "ledger-write")
        self._readers = ThreadPoolExecutor(1, "ledger-read")
        self._reading: sqlite3.Connection | None = None

    async def write(self, change: Callable[[sqlite3.Connection], T], *labels: str) -> T:
        """Run one change in the writer's thread; once more when the disk was full. On return it is on the disk.

        :param labels: its steps in ``docs/developer/durable-steps.md``; none for what may be lost.
        :raises Exception: what ``change`` raised (nothing of it is kept), or the commit's sqlite3.Error or OSError.
        """
        loop = asyncio.get_running_loop()
        item = _Change(labels, change, loop, loop.create_future())
        self._changes.append(item)
        if not self._is_scheduled:
            self._is_scheduled = True
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

    async def compact(self) -> None:
        """Give the room of records that are gone back to the disk, while no change waits. :raises sqlite3.Error:"""
        await asyncio.get_running_loop().run_in_executor(self._writer, self._compact)

    def _compact(self) -> None:
        before = self._free_pages()
        while self._free_pages() > _FREE_PAGES:
            # A single execute() of this pragma frees a single page.
            self._connection.executescript(f"PRAGMA incremental_vacuum({_PAGES_AT_ONCE})")
            if self._changes:
                break
        if self._free_pages() < before:
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")  # only now the file gets shorter

    def _free_pages(self) -> int:
        return int(self._connection.execute("PRAGMA freelist_count").fetchone()[0])

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
        self._is_scheduled = False  # before looking: whoever comes from now on calls again
        while self._changes:
            self._write_group([self._changes.popleft() for _ in range(min(_GROUP, len(self._changes)))])

    def _write_group(self, group: Sequence[_Change]) -> None:
        self._try_group(group)
        if any(item.error for item in group) and self._reserve.give_up():
            self._try_group([item for item in group if item.error])
        for loop in {item.loop for item in group}:
            loop.call_soon_threadsafe(_settle, [item for item in group if item.loop is loop])

    def _try_group(self, group: Sequence[_Change]) -> None:
        began_s = time.monotonic()
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
        self.commits.observe(time.monotonic() - began_s)

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


def _opened(path: Path, sandboxes: Path | None) -> sqlite3.Connection:
    """Open the ledger, and make its tables if it is new."""
    if path.exists():
        _check(path)
    connection = _open(path)
    try:
        _prepare(connection, path, sandboxes)
    except BaseException:
        connection.close()
        raise
    return connection


def _check(path: Path) -> None:
    """Refuse what is no ledger of this version. It is opened to read: else SQLite would move its journal into it."""
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        connection.text_factory = queries.text_of
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if tables and not schema.is_ledger(tables):
            raise LedgerError(f"{path} is the database of another program, and was not touched: put the ledger back")
        version = schema.other_version(connection)
    if version:
        raise LedgerError(
            f"the ledger {path} has version {version}, this program knows {schema.VERSION} and did not touch it: start "
            "that version again. To change to this one, let that one deliver what it holds, until 'stageout status "
            f"--node --empty' ends with 0. Then stop it, and move {path.parent} out of the spool. If that version is "
            "lost, move what is in sandboxes/ of the spool to unknown/, too: the jobs run again, and the files stay "
            "for STAGEOUT_RETENTION"
        )


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
    connection.text_factory = queries.text_of
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # for a new database, before anything is in it
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA journal_size_limit = 16777216")
    return connection


def _prepare(connection: sqlite3.Connection, path: Path, sandboxes: Path | None) -> None:
    """Give the database the tables of this version. :raises LedgerError: it must not be used."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version:
        damage = schema.repair(connection)
        if damage:
            log.warn("ledger-repaired", problem=damage, advice="see whether the disk of the spool is sound")
        return
    count = sum(1 for _ in sandboxes.iterdir()) if sandboxes is not None and sandboxes.is_dir() else 0
    if count:  # without records their jobs would run again
        raise LedgerError(
            f"the ledger {path} was empty, or not there, and {sandboxes} has {count} sandboxes: put it back from a"
            f" backup. If it is lost for good, move what is in {sandboxes} to {path.parent.parent / 'unknown'}: "
            "the jobs run again, and the files stay there for STAGEOUT_RETENTION"
        )
    schema.make(connection)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError, UnicodeDecodeError) as problem:  # the last in SQLite's words about damage
        databases.find_code(problem, path)
        is_full = databases.is_disk_full(problem, path)
        text = f"cannot open the ledger {path}: {problem}; {_advice(problem, is_full)}"
        raise LedgerError(text, is_temporary=is_full) from None  # jobs share the disk, and make room when they end


def _advice(problem: Exception, is_full: bool) -> str:
    if is_full:
        return "it is as it was: make room on its disk; condor_master starts the manager again"
    if isinstance(problem, OSError):
        return "it is as it was: see whether its disk is sound, and start the manager again"
    return (
        "it is as it was; if it is damaged, put it back from a backup. If it is lost for good, move it away, and what "
        "is in sandboxes/ of the spool to unknown/: the jobs run again, and the files stay for STAGEOUT_RETENTION"
    )


def get_meta(connection: sqlite3.Connection, name: str, default: str = "") -> str:
    """A remembered value of the manager itself."""
    row = connection.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
    return str(row[0]) if row else default


def set_meta(connection: sqlite3.Connection, name: str, value: str) -> None:
    """Remember a value of the manager itself."""
    connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))
