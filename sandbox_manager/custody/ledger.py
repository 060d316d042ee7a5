"""The ledger: the record of all output in custody, in SQLite (WAL, ``synchronous=FULL``).

:class:`Ledger` is the database. One thread writes. It commits all changes together that arrive while it waits for the
disk, so the rate of hand-offs is not bound by the rate of disk flushes. Each change sees all earlier ones. A change
that fails does not affect the others. A second thread answers questions from the last committed state. Triggers keep
the sums over a sandbox's files, because a sandbox may have a million files. Numbers of sandboxes and tickets are never
used again, because data in memory under such a number may outlive the row.

:class:`SandboxStore` is the ledger with its picture in memory (``registry.py``). Every change of a sandbox goes through
:meth:`SandboxStore.write`, so the two never differ. :class:`Releases` observes the store: it stops plugins that send
output of an ended sandbox, frees the bytes, and removes the record.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sandbox_manager.custody import queries, schema, updates
from sandbox_manager.custody.quota import Space, StateQuota
from sandbox_manager.custody.registry import Deadline, Registry
from sandbox_manager.custody.running import RunningBatches
from sandbox_manager.custody.spool import Spool
from stageout.core import databases, durable, log
from stageout.core.clock import Clock, wall_now
from stageout.core.ending import Background, outlast
from stageout.core.errors import StageoutError
from stageout.core.metrics import CUSTODY_BOUNDS, DISK_BOUNDS, Histogram
from stageout.core.states import FREED, State
from stageout.model.sandbox import Destination, Sandbox

RESERVE_BYTES = 4 * 1024 * 1024
_FULL_BYTES = 256 * 1024
_ROOMY_BYTES = 8 * RESERVE_BYTES


class Reserve:
    """A file that is there for its size only. :param path: on the filesystem of spool and ledger."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def keep(self) -> None:
        """Make the file where there is room. :raises OSError: it cannot be made."""
        if self._exists() or self._free_bytes() < _ROOMY_BYTES:
            return
        # Random bytes: zeros would take no room where the filesystem compresses.
        durable.write_file("reserve-keep", self._path, os.urandom(RESERVE_BYTES))

    def give_up(self) -> bool:
        """Remove the file when the disk is full. True when it was there, so that there is room now. Never raises."""
        try:
            if self._free_bytes() >= _FULL_BYTES or not self._exists():
                return False
            durable.unlink("reserve-give-up", self._path)
        except OSError as problem:
            log.error("reserve-release-failed", problem=problem, advice="see whether the disk of the spool is sound")
            return False
        log.warn("reserve-released", path=self._path, advice="the disk of the spool is full: make room there")
        return True

    def _exists(self) -> bool:
        try:
            durable.disk.lstat(self._path)
        except FileNotFoundError:
            return False
        return True

    def _free_bytes(self) -> int:
        found = durable.disk.statvfs(self._path.parent)
        return found.f_bavail * found.f_frsize


T = TypeVar("T")
_GROUP = 500
#: Seconds until the release of a sandbox is tried again after an error.
_AGAIN_S = 30.0
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

    def finish(self) -> None:
        """Give the outcome to the caller of :meth:`Ledger.write`. Call this in the loop's thread."""
        if self.answer.done():
            return
        if self.error is not None:
            self.answer.set_exception(self.error)
        else:
            self.answer.set_result(self.result)


class Ledger:
    """One open ledger. Use from one event loop; :meth:`close` when done.

    :param path: of the database; its directory exists. :param sandboxes: the spool's directory of sandboxes.
    :ivar commits: durations of commits.
    :raises LedgerError: it is damaged, empty although the spool has sandboxes, of another version, or cannot be opened.
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
        """Run one change in the writer's thread, and again if the disk was full. On return it is on the disk.

        :param labels: its steps in ``docs/developer/durable-steps.md``; none for changes that may be lost.
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
        """Reserve room for writing on a full disk, if it was given up. :raises OSError: it cannot be reserved."""
        await asyncio.get_running_loop().run_in_executor(self._readers, self._reserve.keep)

    async def give_up_reserve(self) -> bool:
        """Give up the reserve if the disk is full. Return False if it is not, or if no reserve is left."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._reserve.give_up)

    async def compact(self) -> None:
        """Return the room of deleted records to the disk, until a change waits. :raises sqlite3.Error:"""
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
        """Finish all changes and questions, then close. Nothing may be written afterwards."""
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
        """Write all waiting changes in one commit. There is none if an earlier call has written them."""
        self._is_scheduled = False  # before the check: a change that arrives from now on schedules another call
        while self._changes:
            self._write_group([self._changes.popleft() for _ in range(min(_GROUP, len(self._changes)))])

    def _write_group(self, group: Sequence[_Change]) -> None:
        self._try_group(group)
        if any(item.error for item in group) and self._reserve.give_up():
            self._try_group([item for item in group if item.error])
        for loop in {item.loop for item in group}:
            loop.call_soon_threadsafe(_finish, [item for item in group if item.loop is loop])

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


def _finish(items: Sequence[_Change]) -> None:
    for item in items:
        item.finish()


def _opened(path: Path, sandboxes: Path | None) -> sqlite3.Connection:
    """Open the ledger. Create its tables if it is new."""
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
    """Refuse a file that is no ledger of this version. Open it read-only, else SQLite would merge its journal."""
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
    """Create or repair the tables of this version. :raises LedgerError: the database must not be used."""
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
    """Return a value that the manager keeps for itself."""
    row = connection.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
    return str(row[0]) if row else default


def set_meta(connection: sqlite3.Connection, name: str, value: str) -> None:
    """Keep a value for the manager itself."""
    connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))


#: A change in the ledger. It returns the ids of the sandboxes that it touched.
Change = Callable[[sqlite3.Connection], Iterable[int]]
Observer = Callable[[Sequence[Sandbox]], None]


@dataclass(frozen=True)
class _Fresh:
    sandboxes: dict[int, Sandbox | None]
    destinations: dict[int, Destination]


class SandboxStore:
    """Ledger and registry. Each change sets :attr:`changed`; the task that waits for it clears it.

    :param deadline: see :class:`sandbox_manager.custody.registry.Backlog`.
    :ivar custody: seconds from acceptance to delivery of the sandboxes delivered since the start.
    :ivar lost_bytes: bytes of the sandboxes lost since the start.
    """

    def __init__(self, ledger: Ledger, deadline: Deadline) -> None:
        self.ledger = ledger
        self.registry = Registry(deadline)
        self.changed = asyncio.Event()
        self.wake = asyncio.Event()
        self.acknowledged: dict[str, int] = {}
        self.custody = Histogram(CUSTODY_BOUNDS)
        self.lost_bytes = 0
        self._observers: list[Observer] = []

    def observe(self, observer: Observer) -> None:
        """Call ``observer`` after each change from now on, with the sandboxes that it touched, as they are now.

        The call is on the loop, after the commit, when :attr:`acknowledged` and :attr:`changed` are set.
        """
        self._observers.append(observer)

    async def load(self) -> None:
        """Read the whole ledger (at start)."""
        sandboxes, destinations, fences, self.acknowledged = await self.ledger.read(
            lambda db: (
                queries.all_sandboxes(db), queries.destinations(db), queries.fences(db), updates.acknowledged(db)
            )
        )  # fmt: skip
        self.registry.load(sandboxes, destinations, fences)

    async def write(self, change: Change, *labels: str, orders: Mapping[str, int] | None = None) -> list[Sandbox]:
        """Run a change. On return it is on the disk, and the picture in memory agrees with it.

        If the caller is cancelled meanwhile, the picture is updated all the same.

        :param orders: numbers of the last orders that it carries out, by agent.
        :returns: touched sandboxes that still exist, as they are now. :raises IllegalMove: or another error of the
            change.
        """
        work = asyncio.ensure_future(self._write(change, labels, orders or {}))
        if await outlast(work):
            work.exception()  # retrieved, so that asyncio does not log it
            raise asyncio.CancelledError
        return work.result()

    async def _write(self, change: Change, labels: Sequence[str], orders: Mapping[str, int]) -> list[Sandbox]:
        known = frozenset(self.registry.destinations)
        fresh = await self.ledger.write(lambda db: _run_change(db, change, known), *labels)
        self.registry.destinations.update(fresh.destinations)
        for sandbox_id, sandbox in fresh.sandboxes.items():
            if sandbox is None:
                self.registry.drop(sandbox_id)
            else:
                self._count_end(self.registry.by_id.get(sandbox_id), sandbox)
                self.registry.put(sandbox)
        self.acknowledged.update(orders)
        if fresh.sandboxes:
            self.wake.set()
        if fresh.sandboxes or orders:
            self.changed.set()
        sandboxes = [sandbox for sandbox in fresh.sandboxes.values() if sandbox is not None]
        for observer in self._observers:
            observer(sandboxes)
        return sandboxes

    def _count_end(self, old: Sandbox | None, new: Sandbox) -> None:
        """Count output that has just been delivered or lost. :param old: before the change, None if it is new."""
        if old is None or old.state is new.state:
            return
        if new.state is State.DELIVERED:
            self.custody.observe(max(0.0, float(new.ended_at - new.accepted_at)))
        elif new.state is State.LOST:
            self.lost_bytes += old.bytes_left

    async def drop_old_fences(self, before: int) -> None:
        """Forget run numbers of jobs that have no output here and no message since this wall clock."""
        await self.ledger.write(lambda db: updates.drop_old_fences(db, before))
        self.registry.keep_only(*await self.ledger.read(lambda db: (queries.destinations(db), queries.fences(db))))


def _run_change(db: sqlite3.Connection, change: Change, known: frozenset[int]) -> _Fresh:
    sandboxes = {sandbox_id: queries.sandbox(db, sandbox_id) for sandbox_id in set(change(db))}
    targets = {part.destination for sandbox in sandboxes.values() if sandbox for part in sandbox.waiting}
    return _Fresh(sandboxes, queries.destinations(db) if targets - known else {})


class Releases:
    """The end of sandboxes on this node: their bytes are freed, then their records are removed.

    :param running: the batches that run now; those of an ended sandbox are stopped. :param disk: removes files.
    :param state: of plugins. It is removed with the last output of its account.
    """

    def __init__(
        self,
        store: SandboxStore,
        spool: Spool,
        space: Space,
        running: RunningBatches,
        state: StateQuota,
        disk: Executor,
        background: Background,
        clock: Clock,
    ) -> None:
        self._store, self._spool, self._space, self._disk = store, spool, space, disk
        self._running, self._state, self._background, self._clock = running, state, background, clock
        self._under_way: set[int] = set()

    def on_change(self, sandboxes: Sequence[Sandbox]) -> None:
        """Stop sending files of ended sandboxes, and free their bytes. The store calls this after each change."""
        ended = {sandbox.id for sandbox in sandboxes if sandbox.state in FREED}
        if ended:
            self._running.stop_of(ended)
        self.consider(sandboxes)

    def consider(self, sandboxes: Iterable[Sandbox]) -> None:
        """Free bytes that are no longer needed, and remove records that may go, in the background."""
        for sandbox in sandboxes:
            done = sandbox.state in FREED and (
                not sandbox.freed or sandbox.state is State.DELIVERED or sandbox.forgettable
            )
            partly = not sandbox.freed and sandbox.confirmed_at and set(sandbox.tickets) - set(sandbox.named_tickets)
            if (done or partly) and sandbox.id not in self._under_way:
                self._under_way.add(sandbox.id)
                self._background.run(self._free(sandbox.id))

    async def _free(self, sandbox_id: int) -> None:
        known = self._store.registry.by_id.get(sandbox_id)
        loop = asyncio.get_running_loop()
        try:
            tickets = await self._store.ledger.read(lambda db: updates.dropped_tickets(db, sandbox_id))
            sandbox = self._store.registry.by_id.get(sandbox_id)
            if not tickets and sandbox is not None and sandbox.state not in FREED:
                self._under_way.discard(sandbox_id)  # tickets that its record does not name are freed already
                return
            for ticket in tickets:
                await loop.run_in_executor(self._disk, self._spool.release, ticket)
                self._space.drop(ticket)
            left = await self._store.write(
                lambda db: updates.record_released(db, sandbox_id, tickets, wall_now(self._clock)), "record-released"
            )
        except (OSError, sqlite3.Error) as problem:
            log.error("spool-release-failed", sandbox=sandbox_id, problem=problem, again_in_s=_AGAIN_S)
            await asyncio.sleep(_AGAIN_S)
            self._background.run(self._free(sandbox_id))
            return
        self._under_way.discard(sandbox_id)
        self.consider(sandbox for sandbox in left if sandbox.state in FREED)
        if known is not None:
            await self._state.account_freed(known.uid)
