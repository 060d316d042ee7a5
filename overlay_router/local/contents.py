"""What files were when they were published: their digests, by inode, and whether they are still these files.

Used inside the store's transactions, and in its thread. A row is of use as long as its inode has the size and the time
of modification that it had then; the path beside it is only for the way out (docs/decisions/0027-digests-kept.md).
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import stat
from collections.abc import Iterable
from typing import NamedTuple

from stageout.wire.frames import DIGEST_BYTES
from stageout.wire.overlay import Operation

SCHEMA = """
CREATE TABLE contents (
    inode INTEGER PRIMARY KEY, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, path BLOB NOT NULL,
    digest TEXT NOT NULL, manifest TEXT NOT NULL);
CREATE INDEX content_paths ON contents (path);
CREATE TABLE content_blocks (
    inode INTEGER NOT NULL, part INTEGER NOT NULL, digests BLOB NOT NULL, PRIMARY KEY (inode, part)) WITHOUT ROWID;
"""
#: A file of more blocks (16 TiB) is not recorded: a row has its end, and memory too.
_MOST_BLOCKS = 16 * 1024 * 1024
#: Blocks whose digests are one row: SQLite reads a row whole, and who fetches a large file asks for a few at a time.
PART_BLOCKS = 1024

#: Some filesystems have inodes that SQLite has no room for, and a time of modification may be of any century.
_TOO_LARGE = 1 << 63


def foreign_version(status: os.stat_result) -> int:
    """A number for GETs of a file that is not as this router published it, as it is: other than any generation."""
    facts = f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns}".encode()
    return 1 << 62 | int.from_bytes(hashlib.blake2b(facts, digest_size=8).digest(), "big") >> 2


class Identity(NamedTuple):
    """What tells whether a file is still the one that it was."""

    inode: int
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Identity | None:
        """That of a regular file, None for anything else, and where its numbers are none that a row could have."""
        found = cls.known(status)
        return found if stat.S_ISREG(status.st_mode) and all(-_TOO_LARGE <= one < _TOO_LARGE for one in found) else None

    @classmethod
    def known(cls, status: os.stat_result) -> Identity:
        """That of what is known to be a file."""
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


class Content(NamedTuple):
    """What a file was when it was published. :param digest: kind of its digests."""

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
            self._remove(operation.target)
            self._move(operation.path, operation.target)
        elif operation.kind == "delete" or (operation.kind == "setattr" and "size" in operation.attributes):
            self._remove(operation.path)
        elif operation.kind == "publish":
            self._drop("path = ?", (os.fsencode(operation.path),))
            if made is not None and operation.blocks <= _MOST_BLOCKS:
                self._keep(operation, made)

    def after(self, inode: int, most: int) -> list[Seen]:
        """Some rows behind that inode."""
        rows = self._connection.execute(
            "SELECT inode, size, mtime_ns, path FROM contents WHERE inode > ? ORDER BY inode LIMIT ?", (inode, most)
        )
        return [Seen(Identity(*identity), os.fsdecode(path)) for *identity, path in rows]

    def drop(self, gone: Iterable[Identity]) -> None:
        """Forget files that are not these any more."""
        for identity in gone:
            self._drop("inode = ? AND size = ? AND mtime_ns = ?", identity)

    def _keep(self, operation: Operation, made: Made) -> None:
        run = self._connection.execute
        (digest,) = run("SELECT digest FROM transfers WHERE tid = ?", (made.tid,)).fetchone() or ("",)
        if not digest:
            return
        blocks = run("SELECT digest FROM staged WHERE tid = ? ORDER BY block", (made.tid,))
        row = (*made.identity, os.fsencode(operation.path), digest, operation.manifest)
        run("INSERT OR REPLACE INTO contents VALUES (?, ?, ?, ?, ?, ?)", row)
        run("DELETE FROM content_blocks WHERE inode = ?", (made.identity.inode,))
        for part, some in enumerate(iter(lambda: blocks.fetchmany(PART_BLOCKS), [])):
            digests = b"".join(one for (one,) in some)
            run("INSERT INTO content_blocks VALUES (?, ?, ?)", (made.identity.inode, part, digests))

    def _remove(self, path: str) -> None:
        for where, values in _at_and_below(path):
            self._drop(where, values)

    def _drop(self, where: str, values: tuple[object, ...]) -> None:
        run = self._connection.execute
        run(f"DELETE FROM content_blocks WHERE inode IN (SELECT inode FROM contents WHERE {where})", values)
        run(f"DELETE FROM contents WHERE {where}", values)

    def _move(self, path: str, target: str) -> None:
        start, old = os.fsencode(target), os.fsencode(path)
        for where, values in _at_and_below(path):
            moved = "UPDATE contents SET path = CAST(? || substr(path, ?) AS BLOB)"
            self._connection.execute(f"{moved} WHERE {where}", (start, len(old) + 1, *values))


def _at_and_below(path: str) -> tuple[tuple[str, tuple[bytes, ...]], ...]:
    """Conditions that an index serves: a name, and all below it."""
    name = os.fsencode(path)
    return ("path = ?", (name,)), ("path > ? AND path < ?", (name + b"/", name + b"0"))
