"""The durable records of a custodian: the same as a terminal's, and the operations that it has to deliver."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from overlay_router.custodians.pack_records import PackRecords
from overlay_router.local.as_text import as_operation
from overlay_router.local.contents import Identity
from overlay_router.local.place import Place
from overlay_router.local.store import SCHEMA, PackResults, StoreError, Transfer
from overlay_router.rules.states import Outcome, Release, Result
from stageout.overlay.wire.messages import Open, Operation

#: Transfer numbers of a spool begin here, so that they are never taken for those of the tree beside it.
FIRST_TID = 2**62
#: Those of the spool of what plugins deliver.
FIRST_EGRESS_TID = 2**61
#: How many numbers a spool has, and how many are left out behind those of a newer database.
_NUMBERS, _FAR = 2**60, 2**40
_COLUMNS = "operation, sender, digest, tid, taken_at, damaged, asked, number"

Key = tuple[str, int]


@dataclass(frozen=True)
class Held:
    """An operation in custody.

    :param sender: who gave it. :param digest: the kind of its blocks' digests. :param tid: of its data, 0 without any.
    :param taken_at: Unix time in seconds. :param damaged: data must come again before it can be delivered.
    :param asked: the OPEN of its sender, whose capability the terminal wants to see.
    :param number: grows with each operation that is taken into custody.
    """

    operation: Operation
    sender: str
    digest: str
    tid: int
    taken_at: int
    damaged: bool = False
    asked: Open | None = None
    number: int = 0

    @property
    def key(self) -> Key:
        """Its origin and number."""
        return self.operation.origin, self.operation.seq

    def stands_by(self, now: float) -> bool:
        """Tell whether another custodian delivers it, as far as is known. :param now: Unix time in seconds."""
        return self.taken_at + self.operation.standby_s > now

    @property
    def release(self) -> Release:
        """Tell whether its sender keeps the bytes."""
        return Release(self.operation.release)


@dataclass(frozen=True)
class Begun:
    """Data of an operation may lie at a terminal before the operation is in custody here, or without it ever being.

    :param path: for the log. :param expires: of the operation; the terminal drops them then by itself.
    :param said: the origin, as the next hop has heard it.
    """

    key: Key
    terminal: str
    path: str
    expires: int
    said: str


_LATER = """CREATE TABLE IF NOT EXISTS begun (
    origin TEXT NOT NULL, seq INTEGER NOT NULL, terminal TEXT NOT NULL, path BLOB NOT NULL, expires INTEGER NOT NULL,
    said TEXT NOT NULL DEFAULT '', PRIMARY KEY (origin, seq)) WITHOUT ROWID"""
_SAID = """CREATE TABLE IF NOT EXISTS said (
    origin TEXT NOT NULL, seq INTEGER NOT NULL, store TEXT NOT NULL, PRIMARY KEY (origin, seq)) WITHOUT ROWID"""

_IN_USE = "SELECT (SELECT count(*) FROM custody WHERE tid > 0) + (SELECT count(*) FROM packs_held)"
_OTHER_PLACE = (
    "{place} is not the spool in which the data of {count} files and packs in custody are: mount it, or put it back,"
    " and start the router again. If that one is lost for good, and so are they: echo {name} > {file}"
)
_FOREIGN_DATA = (
    "{place} is not the spool of before, and has data that are unknown here, perhaps another router's: mount the right"
    " one, or an empty one, and start the router again. If nobody needs these data, empty {folders}"
)
#: In place of its name, of a spool that new records have not met yet.
_NOWHERE = "none"
_NO_RECORDS = (
    "{place} has data, and {records} was empty, or not there: put the records of these data back from a backup, and"
    " start the router again. If they are lost for good, or nobody needs these data, empty {folders}"
)


class CustodyStore(PackRecords):
    """The open database of a spool. Each method is one transaction and durable when it returns."""

    first_tid = FIRST_TID
    table = "custody"
    if_damaged = (
        "It is damaged: put it back from a backup. What is in custody is in the spool beside it, and only these"
        " records say whose it is: if they are lost for good, move both aside; senders that have kept their bytes send"
        " them again"
    )
    schema = (
        SCHEMA
        + """CREATE TABLE custody (
    origin TEXT NOT NULL, seq INTEGER NOT NULL, operation TEXT NOT NULL, sender TEXT NOT NULL, digest TEXT NOT NULL,
    tid INTEGER NOT NULL, taken_at INTEGER NOT NULL, damaged INTEGER NOT NULL, asked TEXT NOT NULL,
    PRIMARY KEY (origin, seq)) WITHOUT ROWID;
"""
    )

    def _made(self) -> None:
        self._connection.execute("INSERT INTO meta VALUES ('place', ?)", (_NOWHERE,))
        self._connection.execute("INSERT INTO sqlite_sequence VALUES ('transfers', ?)", (self.first_tid,))

    def _last_number(self) -> int:
        present = {row[1] for row in self._connection.execute("PRAGMA table_info(custody)")}
        if "number" not in present:
            self._connection.execute("ALTER TABLE custody ADD COLUMN number INTEGER NOT NULL DEFAULT 0")
        alone = self._connection.execute("SELECT ifnull(max(number), 0) FROM custody").fetchone()[0]
        return max(int(alone), super()._last_number())

    def _bring_up(self, version: int) -> None:
        super()._bring_up(version)
        self._connection.execute(_LATER)
        if "said" not in {row[1] for row in self._connection.execute("PRAGMA table_info(begun)")}:
            self._connection.execute("ALTER TABLE begun ADD COLUMN said TEXT NOT NULL DEFAULT ''")
        self._connection.execute(_SAID)
        self._connection.execute(  # of what an earlier version has settled
            "DELETE FROM said WHERE NOT EXISTS (SELECT 1 FROM custody WHERE (origin, seq) = (said.origin, said.seq))"
        )

    def belong_to(self, place: Place) -> None:
        """Return which spool these records are of: durable on return.

        :raises StoreError: they are of another one, and data of what is in custody lie in that, or this one has data,
            which would be removed as nobody's.
        """
        known = self.place
        if known not in ("", place.name):
            in_use = self._connection.execute(_IN_USE).fetchone()[0]
            if in_use:
                raise StoreError(_OTHER_PLACE.format(place=place.root, count=in_use, name=known, file=place.file))
            strays = [str(folder) for folder in place.data_folders() if any(folder.iterdir())]
            if strays:
                text = _NO_RECORDS if known == _NOWHERE else _FOREIGN_DATA
                raise StoreError(text.format(place=place.root, folders=" and ".join(strays), records=self._path))
        super().belong_to(place)

    def last_tid(self) -> int:
        """The highest transfer number that was granted."""
        row = self._connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'transfers'").fetchone()
        return int(row[0]) if row else 0

    def grant_beyond(self, tids: Iterable[int]) -> None:
        """Grant none of these numbers, nor others that the newer database may have granted which they are of."""
        highest = max((tid for tid in tids if tid - self.first_tid < _NUMBERS), default=0)
        if highest > self.last_tid():
            with self._transaction("router-aside"):
                self._connection.execute(
                    "UPDATE sqlite_sequence SET seq = ? WHERE name = 'transfers'", (highest + _FAR,)
                )

    def begun(self) -> list[Begun]:
        """Operations whose data may lie at a terminal."""
        rows = self._connection.execute("SELECT origin, seq, terminal, path, expires, said FROM begun").fetchall()
        return [
            Begun((origin, seq), terminal, os.fsdecode(path), expires, said or origin)
            for origin, seq, terminal, path, expires, said in rows
        ]

    def begin(self, one: Begun) -> None:
        """Before the first OPEN at the terminal."""
        with self._transaction("custody-begin"):
            self._write_begun(one)

    def dropped(self, key: Key) -> None:
        """No data lie at the terminal any more."""
        with self._transaction("custody-drop"):
            self._forget_begun(key)

    def _write_begun(self, one: Begun) -> None:
        row = (*one.key, one.terminal, os.fsencode(one.path), one.expires, one.said)
        names = "origin, seq, terminal, path, expires, said"
        self._connection.execute(f"INSERT OR REPLACE INTO begun ({names}) VALUES (?, ?, ?, ?, ?, ?)", row)

    def _forget_begun(self, key: Key) -> None:
        self._connection.execute("DELETE FROM begun WHERE origin = ? AND seq = ?", key)

    def said(self) -> dict[Key, str]:
        """Operations in custody that may have been said onward: to which records of the next hop."""
        rows = self._connection.execute("SELECT origin, seq, store FROM said").fetchall()
        return {(origin, seq): store for origin, seq, store in rows}

    def say(self, key: Key, store: str) -> None:
        """Before it is said to a next hop with these records."""
        with self._transaction("custody-say"):
            self._connection.execute("INSERT OR REPLACE INTO said VALUES (?, ?, ?)", (*key, store))

    def unsay(self, key: Key) -> None:
        """It was not said."""
        with self._transaction("custody-say"):
            self._connection.execute("DELETE FROM said WHERE origin = ? AND seq = ?", key)

    def held(self) -> list[Held]:
        """Everything in custody, in the order in which that was granted."""
        rows = self._connection.execute(f"SELECT {_COLUMNS} FROM custody ORDER BY number").fetchall()
        return [
            Held(as_operation(text), sender, digest, tid, taken_at, bool(damaged), _asked(asked), number)
            for text, sender, digest, tid, taken_at, damaged, asked, number in rows
        ]

    def take(self, held: Held) -> None:
        """CUSTODY: durable before it is said."""
        with self._transaction("custody-take"):
            self._take(held)

    def _take(self, held: Held) -> None:
        operation = held.operation
        asked = json.dumps(asdict(held.asked)) if held.asked else ""
        row = (
            *held.key, json.dumps(asdict(operation)), held.sender, held.digest, held.tid, held.taken_at, 0, asked,
            held.number,
        )  # fmt: skip
        self._keep_origin(operation.origin, operation.expires)
        marks = ", ".join("?" * len(row))
        names = "origin, seq, operation, sender, digest, tid, taken_at, damaged, asked, number"
        self._connection.execute(f"INSERT OR REPLACE INTO custody ({names}) VALUES ({marks})", row)

    def withdraw(self, key: Key, tid: int, blocks: Iterable[int]) -> None:
        """These blocks are damaged: they must come again, and the operation (in custody or not) waits for them."""
        run = self._connection.execute
        with self._transaction("custody-withdraw"):
            run("UPDATE custody SET damaged = 1 WHERE origin = ? AND seq = ?", key)
            for block in blocks:
                run("DELETE FROM staged WHERE tid = ? AND block = ?", (tid, block))

    def has_result(self, key: Key) -> bool:
        """Tell whether an operation has its final result."""
        return bool(self.results_of(key[0], range(key[1], key[1] + 1)))

    def conclude(self, operation: Operation, result: Result, left: Begun | None, keeps: bool = False) -> None:
        """The final result, the end of custody and of the transfers, in one.

        :param left: what may still lie at the terminal. :param keeps: the data stay.
        """
        key = (operation.origin, operation.seq)
        with self._transaction("custody-settle"):
            if left is None:
                self._forget_begun(key)
            else:
                self._write_begun(left)
            self._keep_result(operation, result)
            self._concluded(operation, result)
            self._connection.execute("DELETE FROM said WHERE origin = ? AND seq = ?", key)
            if not keeps:
                self._connection.execute("DELETE FROM custody WHERE origin = ? AND seq = ?", key)
                self._close_transfers("origin = ? AND seq = ?", key)
        self.record(operation.origin).results[operation.seq] = result

    def _concluded(self, operation: Operation, result: Result) -> None:
        """The other records that are written together with a result; the operation is still in custody."""

    def abandon(self, transfer: Transfer) -> None:
        """A transfer that nobody goes on with is closed."""
        self._abandon("custody-abandon", transfer)

    def forget(self, now: int, changed: Iterable[Identity] = ()) -> list[int]:
        """Drop origins whose last expiry is an hour ago; transfers end by :meth:`abandon` and :meth:`conclude`.

        :param changed: nothing is published here.
        """
        with self._transaction("overlay-forget"):
            old = self._drop_origins(now)
            self._drop_said(now)
        for origin in old:
            self._records.pop(origin, None)
        return []


#: Files that a gateway remembers to have delivered: the newest, some hundred bytes each.
MOST_DELIVERED = 100_000
_DELIVERED = """CREATE TABLE IF NOT EXISTS delivered (
    number INTEGER PRIMARY KEY AUTOINCREMENT, path BLOB NOT NULL UNIQUE, size_bytes INTEGER NOT NULL,
    mode INTEGER NOT NULL, manifest TEXT NOT NULL, digest TEXT NOT NULL, at INTEGER NOT NULL)"""


@dataclass(frozen=True)
class Sent:
    """The last delivery of a plugin under a name. :param digest: the kind that the manifest is of.

    :param at: Unix time in seconds.
    """

    size_bytes: int
    mode: int
    manifest: str
    digest: str
    at: int


class EgressStore(CustodyStore):
    """The open database of the spool of what plugins deliver."""

    first_tid = FIRST_EGRESS_TID

    def _bring_up(self, version: int) -> None:
        super()._bring_up(version)
        self._connection.execute(_DELIVERED)

    def sent(self, path: str) -> Sent | None:
        """The records about a name."""
        asked = "SELECT size_bytes, mode, manifest, digest, at FROM delivered WHERE path = ?"
        row = self._connection.execute(asked, (os.fsencode(path),)).fetchone()
        return Sent(*row) if row else None

    def _concluded(self, operation: Operation, result: Result) -> None:
        if result.outcome is not Outcome.DONE:
            return
        run, key = self._connection.execute, (operation.origin, operation.seq)
        row = os.fsencode(operation.path), operation.size_bytes, operation.mode, operation.manifest, int(time.time())
        number = run(
            "INSERT OR REPLACE INTO delivered (path, size_bytes, mode, manifest, at, digest)"
            " SELECT ?, ?, ?, ?, ?, digest FROM custody WHERE origin = ? AND seq = ?",
            (*row, *key),
        ).lastrowid
        run("DELETE FROM delivered WHERE number <= ?", (int(number or 0) - MOST_DELIVERED,))

    def grant_all(self, asks: Iterable[Open], sender: str) -> list[Transfer]:
        """As :meth:`grant`, for the files of a pack."""
        wanted = list(asks)
        with self._transaction("overlay-grant"):
            for ask in wanted:
                self._grant(ask, sender)
        return [self._granted(ask, sender) for ask in wanted]

    def note(self, one: PackResults) -> None:
        """The outcome of files of a pack that are executed elsewhere on this router."""
        with self._transaction("egress-note"):
            self._keep_pack(one)

    def take_all(self, taken: Iterable[tuple[Held, bytes]]) -> None:
        """Whole files, each with the digest of its only block, as :meth:`take`."""
        with self._transaction("custody-take"):
            for held, digest in taken:
                if held.operation.blocks:
                    self._connection.execute("INSERT OR REPLACE INTO staged VALUES (?, 0, ?)", (held.tid, digest))
                self._take(held)

    def drop(self, key: Key) -> None:
        """A damaged file that its sender says again from the beginning."""
        with self._transaction("custody-withdraw"):
            self._connection.execute("DELETE FROM custody WHERE origin = ? AND seq = ?", key)
            self._close_transfers("origin = ? AND seq = ?", key)


def _asked(text: str) -> Open | None:
    return Open(**json.loads(text)) if text else None
