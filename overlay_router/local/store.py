"""The durable records of a terminal: transfers, blocks on the disk, results, intents (SQLite, WAL, synchronous=FULL).

Each method is one transaction and durable when it returns. Use from one thread.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from overlay_router.local.as_text import as_columns, as_operation, read_results
from overlay_router.local.contents import SCHEMA as CONTENTS
from overlay_router.local.contents import Contents, Identity, Made
from overlay_router.local.migrations import VERSION, Later, migrate, what_to_do
from overlay_router.local.place import Place
from overlay_router.rules.states import Outcome, Result
from overlay_router.rules.terminal import OriginRecord, raise_low
from stageout.core import durable
from stageout.core.databases import Foreign, find_code, is_full, open_alone
from stageout.core.errors import StageoutError
from stageout.overlay.wire.messages import Open, Operation

#: Of one statement; older libraries allow 999.
_VARIABLES = 500
SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE transfers (
    tid INTEGER PRIMARY KEY AUTOINCREMENT, origin TEXT NOT NULL, seq INTEGER NOT NULL, sender TEXT NOT NULL,
    path BLOB NOT NULL, size INTEGER NOT NULL, block_bytes INTEGER NOT NULL, expires INTEGER NOT NULL,
    digest TEXT NOT NULL DEFAULT '', UNIQUE (origin, seq, sender));
CREATE TABLE staged (tid INTEGER NOT NULL, block INTEGER NOT NULL, digest BLOB NOT NULL, PRIMARY KEY (tid, block))
    WITHOUT ROWID;
CREATE TABLE origins (origin TEXT PRIMARY KEY, low INTEGER NOT NULL, expires INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE results (
    origin TEXT NOT NULL, seq INTEGER NOT NULL, outcome TEXT NOT NULL, reason TEXT NOT NULL,
    generation INTEGER NOT NULL, code INTEGER NOT NULL, PRIMARY KEY (origin, seq)) WITHOUT ROWID;
CREATE TABLE cancelled (origin TEXT NOT NULL, seq INTEGER NOT NULL, PRIMARY KEY (origin, seq)) WITHOUT ROWID;
CREATE TABLE intents (
    origin TEXT NOT NULL, seq INTEGER NOT NULL, operation TEXT NOT NULL, inode INTEGER NOT NULL,
    PRIMARY KEY (origin, seq)) WITHOUT ROWID;
CREATE TABLE packs (
    origin TEXT NOT NULL, seq INTEGER NOT NULL, end INTEGER NOT NULL, results TEXT NOT NULL, PRIMARY KEY (origin, seq))
    WITHOUT ROWID;
CREATE TABLE pack_intents (origin TEXT NOT NULL, expires INTEGER NOT NULL, files TEXT NOT NULL);
CREATE TABLE lots (
    lot TEXT PRIMARY KEY, key TEXT NOT NULL, path BLOB NOT NULL, left INTEGER NOT NULL, until INTEGER NOT NULL)
    WITHOUT ROWID;
CREATE TABLE taken (tid INTEGER PRIMARY KEY, lot TEXT NOT NULL, size INTEGER NOT NULL);
CREATE TABLE generations (path BLOB PRIMARY KEY, generation INTEGER NOT NULL) WITHOUT ROWID;
""" + CONTENTS.lstrip()
#: An origin is forgotten so long (s) after the last expiry of its operations (rule 1).
FORGET_AFTER_S = 3600
#: In memory; the others are read again when they are needed.
_RECORDS_KEPT = 4096


class StoreError(StageoutError):
    """The database cannot be used; the text says what to do."""


@dataclass(frozen=True)
class Transfer:
    """A granted transfer number and what it was granted for.

    :param digest: the kind of digests that its blocks come with, "" for several, or where nobody asks for it later.
    """

    tid: int
    sender: str
    ask: Open
    digest: str = ""

    @property
    def blocks(self) -> int:
        """Return how many blocks the file has."""
        return -(-self.ask.size_bytes // self.ask.block_bytes)


@dataclass(frozen=True)
class StoredIntent:
    """A change of names that was about to happen. :param inode: of the entry that is moved."""

    operation: Operation
    inode: int


class Settled(NamedTuple):
    """The end of an operation.

    :param generations: new ones of the names that it changed. :param used: transfers whose data have a name now.
    :param made: the file that a PUBLISH has just made; None where that is not known.
    """

    operation: Operation
    result: Result
    generations: dict[str, int]
    used: Collection[int] = ()
    made: Made | None = None


class StoredLot(NamedTuple):
    """Reserved space. :param left_bytes: not used yet. :param until: Unix time in seconds."""

    lot: str
    key: str
    path: str
    left_bytes: int
    until: int


class PackIntent(NamedTuple):
    """Files of a pack that were about to get their names. :param files: number, path and inode of each."""

    origin: str
    expires: int
    files: list[tuple[int, str, int]]


@dataclass
class PackResults:
    """The outcome of files of one pack. :param generations: new ones of the names that were changed."""

    origin: str
    expires: int
    results: dict[int, Result] = field(default_factory=dict)
    generations: dict[str, int] = field(default_factory=dict)


#: Free pages of the database, for changes on a full disk.
_ROOM_BYTES = 256 * 1024


class Store:
    """The open database.

    :param path: made when it is missing. A new one has a new epoch: transfer numbers of another are unknown to it.
    :raises StoreError: another process has it, its disk is full, it is damaged, or was made by a later version. It is
        as it was then.
    """

    schema = SCHEMA
    #: Each of them has it, and none that is for something else.
    table = "meta"
    if_damaged = "It is damaged, and may be removed: origins then check by size and digest what has arrived"

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._connection, version = open_alone(path, self.table)
            self._bring_up_or_close(version)
        except (Later, Foreign) as problem:
            raise StoreError(f"{path}: {problem}") from None
        except sqlite3.OperationalError as problem:
            raise StoreError(f"{path}: {problem}. {what_to_do(problem)}") from problem
        except (sqlite3.Error, ValueError) as problem:
            raise self._damaged(problem) from problem
        self.contents = Contents(self._connection)
        self._records: dict[str, OriginRecord] = {}

    def close(self) -> None:
        """Close the database."""
        self._connection.close()

    @contextmanager
    def read(self) -> Iterator[None]:
        """While what it has is read at the start. :raises StoreError: it is damaged."""
        try:
            yield
        except sqlite3.DatabaseError as problem:
            if type(problem) is not sqlite3.DatabaseError:  # a full disk, which another start may find better
                raise
            raise self._damaged(problem) from problem

    def _damaged(self, problem: Exception) -> StoreError:
        return StoreError(f"{self._path}: {problem}. {self.if_damaged}")

    @property
    def place(self) -> str:
        """Name of the directory that these records are of, "" while they are of none."""
        row = self._connection.execute("SELECT value FROM meta WHERE name = 'place'").fetchone()
        return str(row[0]) if row else ""

    def belong_to(self, place: Place) -> None:
        """Return which directory these records are of: durable on return."""
        if place.name != self.place:
            with self._transaction("router-place"):
                self._connection.execute("INSERT OR REPLACE INTO meta VALUES ('place', ?)", (place.name,))

    def record(self, origin: str) -> OriginRecord:
        """The facts about an origin that the terminal rule needs. Change it only by the methods below."""
        if origin not in self._records:
            if len(self._records) >= _RECORDS_KEPT:
                self._records.clear()
            self._records[origin] = self._read_record(origin)
        return self._records[origin]

    def results_of(self, origin: str, seqs: range) -> dict[int, Result]:
        """Results of operations, without those that have none, and those at or below the origin's LOW."""
        results = self.record(origin).results
        return {seq: results[seq] for seq in seqs if seq in results}

    def grant(self, ask: Open, sender: str, digest: str = "", blocks: Iterable[tuple[int, bytes]] = ()) -> Transfer:
        """The live transfer of this sender for that operation, or a new number that was never used.

        :param digest: the kind of digests that its blocks come with, "" where nobody asks for it later.
        :param blocks: those (position, digest) whose bytes are on the disk already.
        """
        with self._transaction("overlay-grant"):
            self._grant(ask, sender, digest)
            granted = self._granted(ask, sender)
            self._connection.executemany(
                "INSERT OR REPLACE INTO staged VALUES (?, ?, ?)", ((granted.tid, *block) for block in blocks)
            )
        return granted

    def _grant(self, ask: Open, sender: str, digest: str = "") -> None:
        self._keep_origin(ask.origin, ask.expires)
        self._connection.execute(  # of blocks that came before with another kind, nobody knows it any more
            "INSERT INTO transfers (origin, seq, sender, path, size, block_bytes, expires, digest)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (origin, seq, sender) DO UPDATE SET digest = CASE WHEN EXISTS"
            " (SELECT 1 FROM staged WHERE staged.tid = transfers.tid) THEN '' ELSE excluded.digest END"
            " WHERE digest != excluded.digest",
            (ask.origin, ask.seq, sender, _blob(ask.path), ask.size_bytes, ask.block_bytes, ask.expires, digest),
        )

    def _granted(self, ask: Open, sender: str) -> Transfer:
        return next(self._transfers("origin = ? AND seq = ? AND sender = ?", (ask.origin, ask.seq, sender)))

    def resize(self, tid: int, size_bytes: int) -> None:
        """The size of a transfer's file is known now."""
        with self._transaction("overlay-resize"):
            self._connection.execute("UPDATE transfers SET size = ? WHERE tid = ?", (size_bytes, tid))

    def transfer(self, tid: int) -> Transfer | None:
        """A live transfer; None for a number that was closed or never granted here."""
        return next(self._transfers("tid = ?", (tid,)), None)

    def transfers(self) -> list[Transfer]:
        """All live ones."""
        return list(self._transfers("1", ()))

    def transfers_of(self, origin: str, seq: int) -> list[Transfer]:
        """Live ones of an operation, oldest first: two senders may race."""
        return list(self._transfers("origin = ? AND seq = ? ORDER BY tid", (origin, seq)))

    def stage(self, tid: int, blocks: Iterable[tuple[int, bytes]]) -> None:
        """Blocks (position, digest) whose bytes are on the disk already."""
        with self._transaction("overlay-stage"):
            self._connection.executemany(
                "INSERT OR REPLACE INTO staged VALUES (?, ?, ?)", ((tid, block, digest) for block, digest in blocks)
            )

    def unstage(self, tid: int) -> None:
        """Forget all blocks of a transfer: they must come again."""
        with self._transaction("overlay-unstage"):
            self._connection.execute("DELETE FROM staged WHERE tid = ?", (tid,))

    def staged(self, tid: int) -> list[tuple[int, bytes]]:
        """Blocks on the disk with their digests, in order."""
        return list(self.each_staged(tid))

    def each_staged(self, tid: int) -> Iterator[tuple[int, bytes]]:
        """The same one by one: a file of a TiB has a million. Nothing else is asked for meanwhile."""
        return self._connection.execute("SELECT block, digest FROM staged WHERE tid = ? ORDER BY block", (tid,))

    def count(self, tid: int) -> int:
        """Return how many blocks of a transfer are on the disk."""
        return int(self._connection.execute("SELECT count(*) FROM staged WHERE tid = ?", (tid,)).fetchone()[0])

    def among(self, tid: int, blocks: Collection[int]) -> list[int]:
        """Return which of these blocks are on the disk."""
        near = "SELECT block FROM staged WHERE tid = ? AND block BETWEEN ? AND ?"
        found = self._connection.execute(near, (tid, min(blocks), max(blocks))).fetchall() if blocks else []
        return [block for (block,) in found if block in blocks]

    def digests(self, tid: int, blocks: Collection[int]) -> dict[int, bytes]:
        """Digests of those of these blocks that are on the disk."""
        near = "SELECT block, digest FROM staged WHERE tid = ? AND block BETWEEN ? AND ?"
        found = self._connection.execute(near, (tid, min(blocks), max(blocks))).fetchall() if blocks else []
        return {block: digest for block, digest in found if block in blocks}

    def counts(self) -> dict[int, int]:
        """As :meth:`count`, of all transfers that have any."""
        return dict(self._connection.execute("SELECT tid, count(*) FROM staged GROUP BY tid").fetchall())

    def is_whole(self, tid: int) -> bool:
        """Tell whether all blocks of a live transfer are recorded: nothing more may be written then."""
        transfer = self.transfer(tid)
        return transfer is not None and self.count(tid) >= transfer.blocks

    def whole_of(self, origin: str, seq: int) -> list[int]:
        """Transfers of an operation whose blocks are all recorded."""
        return [transfer.tid for transfer in self.transfers_of(origin, seq) if self.is_whole(transfer.tid)]

    def intend(self, changes: Iterable[StoredIntent]) -> None:
        """INTENT of changes that are made together: durable before the first system call."""
        rows = [
            (one.operation.origin, one.operation.seq, json.dumps(vars(one.operation)), one.inode) for one in changes
        ]
        with self._transaction("overlay-intent"):
            self._connection.executemany("INSERT OR REPLACE INTO intents VALUES (?, ?, ?, ?)", rows)

    def intents(self) -> list[StoredIntent]:
        """Changes that were begun and have no result."""
        rows = self._connection.execute("SELECT operation, inode FROM intents ORDER BY origin, seq").fetchall()
        return [StoredIntent(as_operation(text), inode) for text, inode in rows]

    def generation(self, path: str) -> int:
        """Return how often a name was changed."""
        row = self._connection.execute("SELECT generation FROM generations WHERE path = ?", (_blob(path),)).fetchone()
        return int(row[0]) if row else 0

    def settle(self, ends: Sequence[Settled]) -> None:
        """Final results, the end of their INTENTs and of their transfers, all in one: nothing of it is repeated.

        The bytes that unused transfers have taken of a lot go back to it.
        """
        run = self._connection.execute
        with self._transaction("overlay-settle"):
            for one in ends:
                key = (one.operation.origin, one.operation.seq)
                self._keep_result(one.operation, one.result)
                run("DELETE FROM intents WHERE origin = ? AND seq = ?", key)
                self._connection.executemany("DELETE FROM taken WHERE tid = ?", ((tid,) for tid in one.used))
                if one.result.outcome is Outcome.DONE:
                    self.contents.changed(one.operation, one.made)
                self._close_transfers("origin = ? AND seq = ?", key)
                rows = [(_blob(path), number) for path, number in one.generations.items()]
                self._connection.executemany("INSERT OR REPLACE INTO generations VALUES (?, ?)", rows)
        for one in ends:
            self.record(one.operation.origin).results[one.operation.seq] = one.result

    def follow(self) -> bool:
        """Records of some published files get the paths of these. Returns whether there may be more to follow."""
        with self._transaction("overlay-follow"):
            return self.contents.follow()

    def intend_packs(self, intents: Iterable[PackIntent]) -> None:
        """INTENT of all files of some packs, durable before the first of them gets its name."""
        rows = [(one.origin, one.expires, json.dumps(one.files)) for one in intents]
        with self._transaction("overlay-pack-intent"):
            self._connection.executemany("INSERT INTO pack_intents VALUES (?, ?, ?)", rows)

    def pack_intents(self) -> list[PackIntent]:
        """Files of packs that were about to get their names."""
        rows = self._connection.execute("SELECT origin, expires, files FROM pack_intents").fetchall()
        return [
            PackIntent(origin, expires, [(seq, path, inode) for seq, path, inode in json.loads(text)])
            for origin, expires, text in rows
        ]

    def settle_packs(self, settled: Sequence[PackResults]) -> None:
        """Final results of some packs' files, and the end of all their INTENTs, in one."""
        with self._transaction("overlay-pack-settle"):
            self._connection.execute("DELETE FROM pack_intents")
            for one in settled:
                self._keep_pack(one)
                self._count(one.generations)
        for one in settled:
            self.record(one.origin).results.update(one.results)

    def _keep_pack(self, one: PackResults) -> None:
        self._keep_origin(one.origin, one.expires)
        row = (one.origin, min(one.results), max(one.results), as_columns(one.results))
        self._connection.execute("INSERT OR REPLACE INTO packs VALUES (?, ?, ?, ?)", row)

    def _count(self, generations: dict[str, int]) -> None:
        """Generations of many names, hundreds in a statement: one for each name costs twice as much."""
        rows = [(_blob(path), number) for path, number in generations.items()]
        for start in range(0, len(rows), _VARIABLES // 2):
            some = rows[start : start + _VARIABLES // 2]
            marks = ", ".join(["(?, ?)"] * len(some))
            values = [value for row in some for value in row]
            self._connection.execute(f"INSERT OR REPLACE INTO generations VALUES {marks}", values)

    def lots(self) -> list[StoredLot]:
        """All reserved space."""
        return self._lots("1", ())

    def lot(self, lot: str) -> StoredLot | None:
        """One of them."""
        return next(iter(self._lots("lot = ?", (lot,))), None)

    def keep_lot(self, held: StoredLot) -> None:
        """Space was reserved, or for longer."""
        with self._transaction("overlay-lot-record"):
            self._write_lot(held)

    def take_from_lot(self, held: StoredLot, tid: int, size_bytes: int) -> None:
        """So much of it belongs to a transfer now: once. It goes back when that is closed without a name."""
        with self._transaction("overlay-lot-record"):
            self._write_lot(held)
            self._connection.execute("INSERT INTO taken VALUES (?, ?, ?)", (tid, held.lot, size_bytes))

    def give_back(self, tid: int) -> None:
        """The bytes that a transfer has taken of a lot belong to that again."""
        with self._transaction("overlay-lot-record"):
            self._return_to_lots("tid = ?", (tid,))

    def taken_below_zero(self) -> list[int]:
        """Return those that have taken of a lot and are operations, not transfers."""
        return [tid for (tid,) in self._connection.execute("SELECT tid FROM taken WHERE tid < 0")]

    def drop_taken(self, tid: int) -> None:
        """Forget that it took from a lot: its bytes are a file now."""
        with self._transaction("overlay-lot-record"):
            self._connection.execute("DELETE FROM taken WHERE tid = ?", (tid,))

    def has_taken(self, tid: int) -> bool:
        """Tell whether a transfer has had its part of a lot."""
        return self._connection.execute("SELECT 1 FROM taken WHERE tid = ?", (tid,)).fetchone() is not None

    def drop_lot(self, lot: str) -> None:
        """The space is free again."""
        with self._transaction("overlay-lot-record"):
            self._connection.execute("DELETE FROM lots WHERE lot = ?", (lot,))

    def _write_lot(self, held: StoredLot) -> None:
        row = (held.lot, held.key, _blob(held.path), held.left_bytes, held.until)
        self._connection.execute("INSERT OR REPLACE INTO lots VALUES (?, ?, ?, ?, ?)", row)

    def _lots(self, where: str, values: tuple[object, ...]) -> list[StoredLot]:
        rows = self._connection.execute(f"SELECT lot, key, path, left, until FROM lots WHERE {where}", values)
        return [StoredLot(lot, key, os.fsdecode(path), left, until) for lot, key, path, left, until in rows]

    def generations(self, paths: Sequence[str]) -> dict[str, int]:
        """Return how often each of these names was changed; those that never were are left out."""
        found: dict[str, int] = {}
        for start in range(0, len(paths), _VARIABLES):
            some = [_blob(path) for path in paths[start : start + _VARIABLES]]
            marks = ", ".join("?" * len(some))
            rows = self._connection.execute(f"SELECT path, generation FROM generations WHERE path IN ({marks})", some)
            found.update((os.fsdecode(path), number) for path, number in rows)
        return found

    def cancel(self, origin: str, seq: int, expires: int = 0) -> None:
        """Somebody asked for the cancellation of an operation; once that is known it costs nothing.

        :param expires: of the operation, where its origin is perhaps not known yet.
        """
        if seq in self.record(origin).cancelled:
            return
        with self._transaction("overlay-cancel"):
            if expires:
                self._keep_origin(origin, expires)
            self._connection.execute("INSERT OR IGNORE INTO cancelled VALUES (?, ?)", (origin, seq))
        self.record(origin).cancelled.add(seq)

    def raise_low(self, origin: str, low: int, expires: int = 0) -> None:
        """Forget results up to a number that the origin has settled; a late, smaller one changes nothing.

        :param expires: of what waits for these, of an origin that is perhaps not known yet; 0: nothing waits.
        """
        if low <= self.record(origin).low:
            return
        run = self._connection.execute
        with self._transaction("overlay-low"):
            if expires:
                self._keep_origin(origin, expires)
            known = run("UPDATE origins SET low = ? WHERE origin = ?", (low, origin)).rowcount
            for table in ("results", "cancelled"):
                run(f"DELETE FROM {table} WHERE origin = ? AND seq <= ?", (origin, low))
            run("DELETE FROM packs WHERE origin = ? AND end <= ?", (origin, low))
            self._close_transfers("origin = ? AND seq <= ?", (origin, low))
        if known:
            raise_low(self.record(origin), low)

    def forget_origin(self, origin: str) -> None:
        """Nobody asks for results of an origin any more, and it sends nothing more."""
        with self._transaction("overlay-low"):
            self._close_transfers("origin = ?", (origin,))
            self._drop_origin(origin)
        self._records.pop(origin, None)

    def abandon(self, transfer: Transfer) -> None:
        """A transfer that nobody goes on with is closed."""
        self._abandon("overlay-abandon", transfer)

    def _abandon(self, label: str, transfer: Transfer) -> None:
        with self._transaction(label):
            self._close_transfers("tid = ?", (transfer.tid,))

    def forget(self, now: int, changed: Iterable[Identity] = ()) -> list[int]:
        """Drop expired transfers, whose numbers are returned, and origins whose last expiry is an hour ago.

        :param changed: published files that are not what they were any more.
        """
        gone = [transfer.tid for transfer in self._transfers("expires < ?", (now,))]
        with self._transaction("overlay-forget"):
            self.contents.drop(changed)
            self._close_transfers("expires < ?", (now,))
            old = self._drop_origins(now)
        for origin in old:
            self._records.pop(origin, None)
        return gone

    def _drop_origins(self, now: int) -> list[str]:
        run = self._connection.execute
        old = [str(row[0]) for row in run("SELECT origin FROM origins WHERE expires < ?", (now - FORGET_AFTER_S,))]
        for origin in old:
            self._drop_origin(origin)
        run("DELETE FROM cancelled WHERE origin NOT IN (SELECT origin FROM origins)")
        return old

    def _drop_origin(self, origin: str) -> None:
        for table in ("origins", "results", "packs"):
            self._connection.execute(f"DELETE FROM {table} WHERE origin = ?", (origin,))

    def _bring_up_or_close(self, version: int) -> None:
        try:
            self._bring_up(version)
            self.epoch = self._meta("epoch")
        except BaseException as problem:
            find_code(problem, self._path, self._connection)
            self._connection.close()
            raise

    def _bring_up(self, version: int) -> None:
        run = self._connection.execute
        if version == 0:
            for statement in self.schema.split(";\n"):
                run(statement)
            run("INSERT INTO meta VALUES ('epoch', ?)", (os.urandom(16).hex(),))
            self._made()
            run(f"PRAGMA user_version={VERSION}")
            run("COMMIT")
        elif version != VERSION:
            migrate(self._connection, version)
            durable.commit("overlay-migrate", self._connection)
        else:
            run("COMMIT")
        self._keep_room()

    def _keep_room(self) -> None:
        """Have free pages in the file and in its log, which what frees space on a full disk needs itself."""
        run = self._connection.execute
        [free], [page_bytes] = run("PRAGMA freelist_count").fetchone(), run("PRAGMA page_size").fetchone()
        if free * page_bytes >= _ROOM_BYTES // 2:
            return
        with suppress(sqlite3.Error):  # there is none to be had now
            run("DROP TABLE IF EXISTS room")
            run("CREATE TABLE room (data BLOB)")
            run("INSERT INTO room VALUES (zeroblob(?))", (_ROOM_BYTES,))
            run("PRAGMA wal_checkpoint(RESTART)").fetchall()
            run("DROP TABLE room")

    def _made(self) -> None:
        """A new database has its tables: what else it begins with."""

    @contextmanager
    def _transaction(self, label: str) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            durable.commit(label, self._connection)
        except BaseException as problem:
            find_code(problem, self._path, self._connection)
            self._connection.rollback()
            if is_full(problem):
                self._begin_log_anew()
            raise

    def _begin_log_anew(self) -> None:
        """On a full disk the log cannot grow: what is in it goes to its places, and the next changes take its room."""
        with suppress(sqlite3.Error):
            self._connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()

    def _meta(self, name: str) -> str:
        row = self._connection.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        if row is None:
            raise ValueError(f"it has no {name}")
        return str(row[0])

    def _transfers(self, where: str, values: tuple[object, ...]) -> Iterator[Transfer]:
        rows = self._connection.execute(
            f"SELECT tid, sender, digest, origin, seq, path, size, block_bytes, expires FROM transfers WHERE {where}",
            values,
        ).fetchall()
        return (
            Transfer(tid, sender, Open(origin, seq, os.fsdecode(path), *rest), digest)
            for tid, sender, digest, origin, seq, path, *rest in rows
        )

    def _keep_origin(self, origin: str, expires: int) -> None:
        run = self._connection.execute
        run("INSERT OR IGNORE INTO origins VALUES (?, 0, ?)", (origin, expires))
        run("UPDATE origins SET expires = max(expires, ?) WHERE origin = ?", (expires, origin))

    def _keep_result(self, operation: Operation, result: Result) -> None:
        self._keep_origin(operation.origin, operation.expires)
        self._connection.execute(
            "INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?, ?, ?)",
            (operation.origin, operation.seq, result.outcome.value, *result[1:]),
        )

    def _close_transfers(self, where: str, values: tuple[object, ...]) -> None:
        run = self._connection.execute
        self._return_to_lots(f"tid IN (SELECT tid FROM transfers WHERE {where})", values)
        run(f"DELETE FROM staged WHERE tid IN (SELECT tid FROM transfers WHERE {where})", values)
        run(f"DELETE FROM transfers WHERE {where}", values)

    def _return_to_lots(self, where: str, values: tuple[object, ...]) -> None:
        run = self._connection.execute
        for lot, size_bytes in run(f"SELECT lot, size FROM taken WHERE {where}", values).fetchall():
            run("UPDATE lots SET left = left + ? WHERE lot = ?", (size_bytes, lot))
        run(f"DELETE FROM taken WHERE {where}", values)

    def _read_packed(self, origin: str) -> Iterator[tuple[int, Result]]:
        """Results of files that came in packs, as far as they are kept in memory."""
        for (text,) in self._connection.execute("SELECT results FROM packs WHERE origin = ?", (origin,)):
            yield from read_results(text)

    def _read_record(self, origin: str) -> OriginRecord:
        run = self._connection.execute
        row = run("SELECT low FROM origins WHERE origin = ?", (origin,)).fetchone()
        results = run("SELECT seq, outcome, reason, generation, code FROM results WHERE origin = ?", (origin,))
        found = {seq: Result(Outcome(outcome), *rest) for seq, outcome, *rest in results}
        found.update(self._read_packed(origin))
        cancelled = {seq for (seq,) in run("SELECT seq FROM cancelled WHERE origin = ?", (origin,))}
        return OriginRecord(row[0] if row else 0, found, cancelled)


def _blob(path: str) -> bytes:
    """As :func:`os.fsencode`, which costs three times as much; packs come with thousands of paths."""
    return path.encode("utf-8", "surrogateescape")
