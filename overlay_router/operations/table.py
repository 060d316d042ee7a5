"""The one table of operations (SQLite, WAL, synchronous=FULL), for a terminal as for a custodian.

Each change is inside :meth:`Table.changing`, and durable at its end; changes inside another one share its commit. Use
from one thread.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from stageout.core import durable
from stageout.core.databases import Foreign, find_code, open_alone
from stageout.core.errors import StageoutError
from stageout.overlay.http.operations import from_json, to_json
from stageout.overlay.rules.limits import Share
from stageout.overlay.rules.operations import Fields, Hop, Identity, Kind, Row, touches
from stageout.overlay.rules.states import ENDS, State

_VERSION = 1
_SCHEMA = """
CREATE TABLE operations (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE rows (
    id INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL, origin TEXT NOT NULL, seq INTEGER NOT NULL,
    state TEXT NOT NULL, share TEXT NOT NULL, path BLOB NOT NULL, second BLOB NOT NULL, expires INTEGER NOT NULL,
    ended INTEGER NOT NULL, size INTEGER, custodian TEXT NOT NULL, fields BLOB NOT NULL,
    facts TEXT NOT NULL, UNIQUE (owner, origin, seq));
CREATE INDEX row_names ON rows (origin, seq);
CREATE INDEX row_paths ON rows (path);
CREATE INDEX row_seconds ON rows (second) WHERE second != x'';
CREATE INDEX row_expires ON rows (expires);
CREATE INDEX row_held ON rows (owner, origin, seq) WHERE state = 'held';
CREATE INDEX row_states ON rows (state) WHERE state NOT IN ('done', 'cancelled', 'superseded');
CREATE TABLE origins (owner TEXT NOT NULL, origin TEXT NOT NULL, low INTEGER NOT NULL, expires INTEGER NOT NULL,
    PRIMARY KEY (owner, origin)) WITHOUT ROWID;
CREATE TABLE blocks (
    row INTEGER NOT NULL, part INTEGER NOT NULL, have BLOB NOT NULL, digests BLOB NOT NULL, listed BLOB NOT NULL,
    PRIMARY KEY (row, part)) WITHOUT ROWID;
CREATE TABLE lists (row INTEGER PRIMARY KEY, size INTEGER NOT NULL, list BLOB NOT NULL, jws TEXT NOT NULL);
"""


class TableError(StageoutError):
    """The database cannot be used; the text says what to do."""


@dataclass(frozen=True)
class Stored:
    """A row with what is beside it. Blocks have a table of their own: ``row.blocks`` and ``row.manifest`` are empty.

    :param id: 0 before it is stored. :param size: of the file, as far as it is known. :param inner: number that the
        publisher knows it by, 0 for none. :param token: of the sender, where another router has to see it.
    """

    row: Row
    id: int = 0
    share: str = ""
    size: int | None = None
    jws: str = ""
    token: str = ""
    authority: tuple[str, str] = ("", "")
    inner: int = 0
    wishes: Mapping[str, str] = field(default_factory=dict)

    def with_size(self, size: int) -> Stored:
        """Return it with the size of its file, which is known now."""
        return replace(self, size=size)


class Table:
    """The open table. :param path: made when it is missing. :raises TableError: it cannot be used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._connection, version = open_alone(path, "operations")
        except Foreign as problem:
            raise TableError(f"{path}: {problem}") from None
        except sqlite3.Error as problem:
            raise TableError(f"{path}: {problem}. Another router may use it, or it is damaged") from problem
        try:
            if version == 0:
                for statement in _SCHEMA.split(";\n"):
                    self._connection.execute(statement)
                self._connection.execute(f"PRAGMA user_version={_VERSION}")
            elif version != _VERSION:
                raise TableError(f"{path} was made by a later version of stageout")
            self._connection.execute("COMMIT")
            self._shares = self._counted()
        except BaseException:
            self._connection.close()
            raise
        self._inside = False

    def close(self) -> None:
        """Close the database."""
        self._connection.close()

    @contextmanager
    def changing(self, label: str) -> Iterator[None]:
        """Changes inside are one: all of them are durable at its end, or none. :param label: of the durable step."""
        if self._inside:
            yield
            return
        self._connection.execute("BEGIN IMMEDIATE")
        self._inside = True
        try:
            yield
            durable.commit(label, self._connection)
        except BaseException as problem:
            find_code(problem, self._path, self._connection)
            self._connection.rollback()
            self._shares = self._counted()
            raise
        finally:
            self._inside = False

    def put(self, stored: Stored) -> Stored:
        """Store a row, in place of the one that has its id. Inside :meth:`changing`."""
        row, before = stored.row, self.get(stored.id) if stored.id else None
        facts = {
            "hop": row.hop, "issuer": row.issuer, "custody": row.custody, "reason": row.reason, "etag": row.etag,
            "carriers": sorted(row.carriers), "inode": row.inode, "jws": stored.jws, "token": stored.token,
            "authority": stored.authority, "inner": stored.inner, "wishes": dict(stored.wishes),
        }  # fmt: skip
        values = (
            *row.identity, row.state.value, stored.share, os.fsencode(row.fields.path), os.fsencode(row.fields.second),
            row.fields.expires, row.ended, stored.size, row.hop.custodian, to_json(row.fields), json.dumps(facts),
        )  # fmt: skip
        marks = ", ".join("?" * len(values))
        at = self._connection.execute(
            f"INSERT OR REPLACE INTO rows VALUES (?, {marks})", (stored.id or None, *values)
        ).lastrowid
        assert at is not None
        self._count(before, -1)
        self._count(stored, 1)
        return replace(stored, id=at)

    def get(self, at: int) -> Stored | None:
        """Return a row."""
        return next(self._rows("id = ?", (at,)), None)

    def find(self, identity: Identity) -> Stored | None:
        """Return the row of an operation."""
        return next(self._rows("owner = ? AND origin = ? AND seq = ?", identity), None)

    def named(self, origin: str, seq: int) -> list[Stored]:
        """Return the rows of all owners of that origin and number."""
        return list(self._rows("origin = ? AND seq = ?", (origin, seq)))

    def between(self, origin: str, first: int, last: int) -> list[Stored]:
        """Return the rows of all owners of an origin, in the order of their numbers."""
        return list(self._rows("origin = ? AND seq BETWEEN ? AND ? ORDER BY seq", (origin, first, last)))

    def in_state(self, *states: State) -> list[Stored]:
        """Return the rows in some states that are no ends, oldest first."""
        marks = ", ".join("?" * len(states))
        return list(self._rows(f"state IN ({marks}) ORDER BY id", [one.value for one in states]))

    def held_of(self, owner: str, origin: str) -> list[Stored]:
        """Return the rows that wait for others of their origin."""
        return list(self._rows("owner = ? AND origin = ? AND state = 'held' ORDER BY seq", (owner, origin)))

    def changed_later(self, identity: Identity, fields: Fields, custodian: str) -> list[Stored]:
        """Return rows whose change of names came first: of a later number of that origin, or of that custodian.

        Names are the same, or one operation takes away a directory above the other's.
        """
        later = "state = 'done' AND ((owner = ? AND origin = ? AND seq > ?) OR (custodian != '' AND custodian = ?))"
        values, found = (*identity, custodian), dict[int, Stored]()
        for name in {above for one in fields.names for above in _and_above(one)}:
            for where in ("path = ?", "second != x'' AND second = ?"):
                rows = self._rows(f"{where} AND {later}", (os.fsencode(name), *values))
                found.update((one.id, one) for one in rows if touches(one.row.fields, fields))
        if fields.kind in (Kind.DELETE, Kind.RENAME):
            begin, end = os.fsencode(fields.path) + b"/", os.fsencode(fields.path) + b"0"
            for column in ("path", "second"):
                where = f"{column} != x'' AND {column} > ? AND {column} < ? AND {later} LIMIT 1"
                found.update((one.id, one) for one in self._rows(where, (begin, end, *values)))
        return list(found.values())

    def forgettable(self, expired: int, ended: int, most: int) -> list[Stored]:
        """Return some rows that have ended, and expired before a time; those that are done ended before another."""
        ends = [one.value for one in ENDS - {State.DONE}]
        marks = ", ".join("?" * len(ends))
        where = f"(state = 'done' AND ended < ?) OR (state IN ({marks}) AND expires < ?) LIMIT ?"
        return list(self._rows(where, (ended, *ends, expired, most)))

    def drop(self, stored: Stored) -> None:
        """Forget a row and its blocks. Inside :meth:`changing`."""
        self._count(self.get(stored.id), -1)
        self.drop_blocks(stored.id)
        self._connection.execute("DELETE FROM rows WHERE id = ?", (stored.id,))

    def low(self, owner: str, origin: str) -> int:
        """Return the number below which results were forgotten."""
        where = "SELECT low FROM origins WHERE owner = ? AND origin = ?"
        found = self._connection.execute(where, (owner, origin)).fetchone()
        return int(found[0]) if found else 0

    def raise_low(self, owner: str, origin: str, low: int, expires: int) -> None:
        """Store a higher one. :param expires: the origin may be forgotten then. Inside :meth:`changing`."""
        self._connection.execute(
            "INSERT INTO origins VALUES (?, ?, ?, ?) ON CONFLICT (owner, origin) DO UPDATE SET"
            " low = max(low, excluded.low), expires = max(expires, excluded.expires)",
            (owner, origin, low, expires),
        )

    def drop_origins(self, now: int) -> None:
        """Forget origins none of whose operations can come any more. Inside :meth:`changing`."""
        self._connection.execute("DELETE FROM origins WHERE expires < ?", (now,))

    def parts(self, at: int) -> Iterator[tuple[int, bytes, bytes, bytes]]:
        """Number, bitmap, digests and digests of the list of each part of a row's blocks."""
        return self._connection.execute("SELECT part, have, digests, listed FROM blocks WHERE row = ?", (at,))

    def put_parts(self, at: int, parts: Iterable[tuple[int, bytes, bytes, bytes]]) -> None:
        """Store some of them. Inside :meth:`changing`."""
        self._connection.executemany(
            "INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, ?, ?)", ((at, *part) for part in parts)
        )

    def block_list(self, at: int) -> tuple[int, bytes, str] | None:
        """Return the size, the block list and its signature, None without one."""
        found = self._connection.execute("SELECT size, list, jws FROM lists WHERE row = ?", (at,)).fetchone()
        return (int(found[0]), bytes(found[1]), str(found[2])) if found else None

    def put_list(self, at: int, size: int, listed: bytes, jws: str) -> None:
        """Store them. Inside :meth:`changing`."""
        self._connection.execute("INSERT OR REPLACE INTO lists VALUES (?, ?, ?, ?)", (at, size, listed, jws))

    def drop_blocks(self, at: int) -> None:
        """Forget a row's blocks and their list. Inside :meth:`changing`."""
        for table in ("blocks", "lists"):
            self._connection.execute(f"DELETE FROM {table} WHERE row = ?", (at,))

    def number(self, name: str) -> int:
        """Return a number of the table itself, 0 without one."""
        found = self._connection.execute("SELECT value FROM operations WHERE name = ?", (name,)).fetchone()
        return int(found[0]) if found else 0

    def put_number(self, name: str, value: int) -> None:
        """Store it. Inside :meth:`changing`."""
        self._connection.execute("INSERT OR REPLACE INTO operations VALUES (?, ?)", (name, value))

    def share(self, name: str) -> Share:
        """Return what a subject uses."""
        return self._shares.get(name, Share())

    def used_bytes(self) -> int:
        """Return the bytes of all subjects."""
        return sum(one.size for one in self._shares.values())

    def _count(self, stored: Stored | None, sign: int) -> None:
        if stored is None:
            return
        state = stored.row.state.value
        more = _used(state, stored.size or 0)
        self._shares[stored.share] = Share(*(have + sign * one for have, one in zip(self.share(stored.share), more)))

    def _counted(self) -> dict[str, Share]:
        found: dict[str, Share] = {}
        every = "SELECT share, state, count(*), total(size) FROM rows GROUP BY share, state"
        for share, state, count, size in self._connection.execute(every):
            more = _used(state, int(size))
            rows = (count, count * more.held, count * more.cancels, more.size)
            found[share] = Share(*(have + one for have, one in zip(found.get(share, Share()), rows)))
        return found

    def _rows(self, where: str, values: Iterable[object]) -> Iterator[Stored]:
        found = self._connection.execute(
            f"SELECT id, owner, origin, seq, state, share, ended, size, fields, facts FROM rows WHERE {where}",
            tuple(values),
        ).fetchall()
        for at, owner, origin, seq, state, share, ended, size, fields, text in found:
            facts = json.loads(text)
            row = Row(
                Identity(owner, origin, seq), from_json(fields), State(state), Hop(*facts["hop"]), facts["issuer"],
                facts["custody"], reason=facts["reason"], etag=facts["etag"], ended=ended,
                carriers=frozenset(facts["carriers"]), inode=facts["inode"],
            )  # fmt: skip
            issuer, prefix = facts["authority"]
            yield Stored(
                row, at, share, size, facts["jws"], facts["token"], (issuer, prefix), facts["inner"], facts["wishes"]
            )


def _and_above(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition("/")[0]


_ENDED = frozenset(one.value for one in ENDS - {State.FAILED})


def _used(state: str, size: int) -> Share:
    """Return what one row uses, as :func:`stageout.overlay.rules.limits.used`."""
    is_cancel = state in (State.CANCELLED.value, State.CANCELLING.value)
    return Share(1, int(state == State.HELD.value), int(is_cancel), 0 if state in _ENDED else size)
