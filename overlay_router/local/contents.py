"""Files as they were when they were published: their digests, by inode, and whether they are still these files.

Used inside the store's transactions, and in its thread. A row is of use as long as its inode has the size and the time
of modification that it had then; the path beside it is only for the way out
(docs/developer/decisions/0027-digests-kept.md).
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import stat
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from overlay_router.local.moves import SCHEMA as MOVES
from overlay_router.local.moves import Move, below, followed, is_within, sources
from stageout.overlay.wire.frames import DIGEST_BYTES
from stageout.overlay.wire.messages import Operation

SCHEMA = """
CREATE TABLE contents (
    inode INTEGER PRIMARY KEY, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, path BLOB NOT NULL,
    digest TEXT NOT NULL, manifest TEXT NOT NULL, since INTEGER NOT NULL DEFAULT 0);
CREATE INDEX content_paths ON contents (path);
CREATE TABLE content_blocks (
    inode INTEGER NOT NULL, part INTEGER NOT NULL, digests BLOB NOT NULL, PRIMARY KEY (inode, part)) WITHOUT ROWID;
""" + MOVES.lstrip()
#: A file of more blocks (16 TiB) is not recorded: a row has its end, and memory too.
_MOST_BLOCKS = 16 * 1024 * 1024
#: Blocks whose digests are one row: SQLite reads a row whole, and who fetches a large file asks for a few at a time.
PART_BLOCKS = 1024
#: Records that a change of a name takes with it at once; of more it is noted that they have to follow.
_AT_ONCE = 500
#: Records that follow in one step: everybody else waits for the disk's thread meanwhile.
_STEP = 250
#: Changes that are noted. With more of them it would take longer and longer to say where a file is.
_MOST_MOVES = 16
#: Behind every number that a row may have, also of changes that are forgotten.
_NEXT = 1 << 62

#: Some filesystems have inodes that SQLite has no room for, and a time of modification may be of any century.
_TOO_LARGE = 1 << 63


def foreign_version(status: os.stat_result) -> int:
    """A number for GETs of a file that is not as this router published it, as it is: other than any generation."""
    facts = f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns}".encode()
    return 1 << 62 | int.from_bytes(hashlib.blake2b(facts, digest_size=8).digest(), "big") >> 2


class Identity(NamedTuple):
    """The facts that tell whether a file is still the one that it was."""

    inode: int
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Identity | None:
        """The identity of a regular file, None for anything else, and where its numbers are none that a row could
        have."""
        found = cls.known(status)
        return found if stat.S_ISREG(status.st_mode) and all(-_TOO_LARGE <= one < _TOO_LARGE for one in found) else None

    @classmethod
    def known(cls, status: os.stat_result) -> Identity:
        """The identity of a known file."""
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


class Content(NamedTuple):
    """A file as it was when it was published. :param digest: kind of its digests."""

    digest: str
    manifest: str


class Made(NamedTuple):
    """A file that was just published. :param tid: of the transfer whose data these were."""

    tid: int
    identity: Identity


class Seen(NamedTuple):
    """A row, to be looked after. :param path: where the file was when this router changed its name last."""

    identity: Identity
    path: str


class _Row(NamedTuple):
    """A row's key, its path, and the last move that this counts in."""

    inode: int
    path: bytes
    since: int


class Contents:
    """Rows of an open database; changes belong to the transaction that is open."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def find(self, identity: Identity) -> Content | None:
        """Of a file that is what it was."""
        row = self._connection.execute(
            "SELECT digest, manifest FROM contents WHERE inode = ? AND size = ? AND mtime_ns = ?", identity
        ).fetchone()
        return Content(*row) if row else None

    def digests(self, inode: int, first: int, blocks: int) -> bytes:
        """Those of some blocks, one behind the other."""
        part, skip = divmod(first, PART_BLOCKS)
        rows = self._connection.execute(
            "SELECT digests FROM content_blocks WHERE inode = ? AND part >= ? AND part < ? ORDER BY part",
            (inode, part, -(-(first + blocks) // PART_BLOCKS)),
        )
        found = b"".join(one for (one,) in rows)
        return found[skip * DIGEST_BYTES : (skip + blocks) * DIGEST_BYTES]

    def changed(self, operation: Operation, made: Made | None) -> None:
        """An operation was executed. :param made: by a PUBLISH, None where nobody can vouch for what is there.

        Its transfer has its blocks still.
        """
        if operation.kind == "rename" and operation.path != operation.target:
            self._take(os.fsencode(operation.target), None)
            self._take(os.fsencode(operation.path), os.fsencode(operation.target))
        elif operation.kind == "delete" or (operation.kind == "setattr" and "size" in operation.attributes):
            self._take(os.fsencode(operation.path), None)
        elif operation.kind == "publish":
            self._replaced(os.fsencode(operation.path))
            if made is not None and operation.blocks <= _MOST_BLOCKS:
                self._keep(operation, made)

    def follow(self) -> bool:
        """Some rows follow the oldest change that was noted; it is forgotten when all have. False: none was noted."""
        moves = self._moves()
        if not moves:
            return False
        number, path, _, reached = moves[0]
        start, end = below(path)
        ranges = (("path = ?", (path,)), ("path >= ? AND path < ?", (max(reached, start), end)))
        rows = [row for where, values in ranges for row in self._rows(f"{where} AND since < ?", (*values, number))]
        if rows:
            self._bring(rows, moves)
            self._connection.execute("UPDATE content_moves SET reached = ? WHERE number = ?", (rows[-1].path, number))
        else:
            self._connection.execute("DELETE FROM content_moves WHERE number = ?", (number,))
        return True

    def after(self, inode: int, most: int) -> list[Seen]:
        """Some rows behind that inode."""
        moves = self._moves()
        rows = self._connection.execute(
            "SELECT inode, size, mtime_ns, path, since FROM contents WHERE inode > ? ORDER BY inode LIMIT ?",
            (inode, most),
        )
        return [
            Seen(Identity(*identity), os.fsdecode(followed(path, since, moves) or path))
            for *identity, path, since in rows
        ]

    def drop(self, gone: Iterable[Identity]) -> None:
        """Forget files that are not these any more."""
        found = "SELECT inode FROM contents WHERE inode = ? AND size = ? AND mtime_ns = ?"
        self._drop(row[0] for identity in gone for row in self._connection.execute(found, identity).fetchall())

    def _keep(self, operation: Operation, made: Made) -> None:
        run = self._connection.execute
        (digest,) = run("SELECT digest FROM transfers WHERE tid = ?", (made.tid,)).fetchone() or ("",)
        if not digest:
            return
        blocks = run("SELECT digest FROM staged WHERE tid = ? ORDER BY block", (made.tid,))
        row = (*made.identity, os.fsencode(operation.path), digest, operation.manifest, _last(self._moves()))
        run("INSERT OR REPLACE INTO contents VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        run("DELETE FROM content_blocks WHERE inode = ?", (made.identity.inode,))
        for part, some in enumerate(iter(lambda: blocks.fetchmany(PART_BLOCKS), [])):
            digests = b"".join(one for (one,) in some)
            run("INSERT INTO content_blocks VALUES (?, ?, ?)", (made.identity.inode, part, digests))

    def _take(self, path: bytes, target: bytes | None) -> None:
        """A name and what is below it went elsewhere, or (None) was removed: few rows at once, many later."""
        moves = self._moves()
        rows = list(islice(self._near(path, moves), _AT_ONCE + 1))
        if len(rows) > _AT_ONCE:
            self._note(path, target)
            return
        here = [row for row in rows if (at := followed(row.path, row.since, moves)) and is_within(at, path)]
        self._bring(here, [*moves, Move(_NEXT, path, target, b"")], _last(moves))

    def _near(self, path: bytes, moves: Sequence[Move]) -> Iterator[_Row]:
        """Rows among which are all of what is at or below a name."""
        for source in sources(path, moves):
            yield from self._rows("path = ?", (source,), _AT_ONCE + 1)
            yield from self._rows("path > ? AND path < ?", below(source), _AT_ONCE + 1)

    def _replaced(self, path: bytes) -> None:
        """Another file has the name."""
        moves = self._moves()
        rows = [row for source in sources(path, moves) for row in self._rows("path = ?", (source,), -1)]
        self._drop(row.inode for row in rows if followed(row.path, row.since, moves) == path)

    def _note(self, path: bytes, target: bytes | None) -> None:
        while len(self._moves()) >= _MOST_MOVES:
            self.follow()
        self._connection.execute(
            "INSERT INTO content_moves (path, target, reached) VALUES (?, ?, ?)", (path, target, path)
        )

    def _bring(self, rows: Iterable[_Row], moves: Sequence[Move], since: int | None = None) -> None:
        """Rows get the paths that their files have, or go with them. :param since: the last move that is noted."""
        paths = [(followed(row.path, row.since, moves), row.inode) for row in rows]
        number = _last(moves) if since is None else since
        self._drop(inode for path, inode in paths if path is None)
        self._connection.executemany(
            "UPDATE contents SET path = ?, since = ? WHERE inode = ?",
            [(path, number, inode) for path, inode in paths if path is not None],
        )

    def _drop(self, inodes: Iterable[int]) -> None:
        gone = [(inode,) for inode in inodes]
        self._connection.executemany("DELETE FROM content_blocks WHERE inode = ?", gone)
        self._connection.executemany("DELETE FROM contents WHERE inode = ?", gone)

    def _moves(self) -> list[Move]:
        """The operations noted and not carried out, oldest first."""
        rows = self._connection.execute("SELECT number, path, target, reached FROM content_moves ORDER BY number")
        return [Move(*row) for row in rows]

    def _rows(self, where: str, values: tuple[object, ...], most: int | None = None) -> list[_Row]:
        rows = self._connection.execute(
            f"SELECT inode, path, since FROM contents WHERE {where} ORDER BY path LIMIT ?",
            (*values, _STEP if most is None else most),
        )
        return [_Row(*row) for row in rows]


def _last(moves: Sequence[Move]) -> int:
    """The number of the last one; 0 counts in none of those that are still to come."""
    return moves[-1].number if moves else 0
