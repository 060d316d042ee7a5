"""Packs in custody: what a custodian must not forget of them. Their files lie in its spool, one for each pack."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from overlay_router.custodians.versions import Versions, sum_of
from overlay_router.local.as_text import read_results
from overlay_router.local.store import PackResults, Store
from overlay_router.rules.states import Release, Result
from stageout.overlay.wire.fields import MAX_NUMBER
from stageout.overlay.wire.messages import Pack

_TABLE = """CREATE TABLE IF NOT EXISTS packs_held (
    origin TEXT NOT NULL, seq INTEGER NOT NULL, end INTEGER NOT NULL, path BLOB NOT NULL, terminal TEXT NOT NULL,
    release TEXT NOT NULL, expires INTEGER NOT NULL, sender TEXT NOT NULL, digest TEXT NOT NULL, size INTEGER NOT NULL,
    taken_at INTEGER NOT NULL, pack TEXT NOT NULL, UNIQUE (origin, seq))"""
_NAMES = """CREATE TABLE IF NOT EXISTS pack_names (
    origin TEXT NOT NULL, seq INTEGER NOT NULL, sums BLOB NOT NULL, PRIMARY KEY (origin, seq)) WITHOUT ROWID"""
_SUM = struct.Struct("<I")
#: The records that routers have (their epoch), by address.
_HOPS = "CREATE TABLE IF NOT EXISTS hops (hop TEXT PRIMARY KEY, store TEXT NOT NULL) WITHOUT ROWID"
#: Packs that may have been said to other records than those, or that come again.
_SAID = """CREATE TABLE IF NOT EXISTS packs_said (
    origin TEXT NOT NULL, seq INTEGER NOT NULL, store TEXT NOT NULL, expires INTEGER NOT NULL,
    PRIMARY KEY (origin, seq)) WITHOUT ROWID"""
#: Columns that tables of earlier versions lack.
_LATER = {
    "priority": "INTEGER NOT NULL DEFAULT 0", "deadline": "INTEGER NOT NULL DEFAULT 0",
    "after": "TEXT NOT NULL DEFAULT '[]'", "number": "INTEGER NOT NULL DEFAULT 0",
}  # fmt: skip
_COLUMNS = (
    "origin, seq, end, path, terminal, release, expires, sender, digest, size, taken_at, priority, deadline, number,"
    " after"
)


@dataclass(frozen=True)
class HeldPack:
    """A pack in custody.

    :param end: the number behind that of its last file. :param path: of its first file. :param sender: who gave it.
    :param digest: the kind of its files' digests. :param size_bytes: in the spool.
    :param taken_at: Unix time in seconds. :param after: numbers that must be final before it is delivered.
    :param number: grows with each operation that is taken into custody.
    """

    origin: str
    seq: int
    end: int
    path: str
    terminal: str
    release: str
    expires: int
    sender: str
    digest: str
    size_bytes: int
    taken_at: int
    priority: int = 0
    deadline: int = 0
    after: tuple[int, ...] = ()
    number: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """Its origin and the number of its first file."""
        return self.origin, self.seq

    @property
    def files(self) -> int:
        """Return how many it has."""
        return self.end - self.seq

    @property
    def is_single(self) -> bool:
        """Tell whether its sender has freed it."""
        return Release(self.release) is Release.CUSTODY


class SaidPack(NamedTuple):
    """To which records of its next hop a pack may have been said, "" where they are not known."""

    origin: str
    seq: int
    store: str
    expires: int

    @property
    def key(self) -> tuple[str, int]:
        """As of :class:`HeldPack`."""
        return self.origin, self.seq


class PackRecords(Store):
    """The part of a spool's database that is about packs. Each method is one transaction and durable on return."""

    def _bring_up(self, version: int) -> None:
        super()._bring_up(version)
        self._connection.execute(_TABLE)
        for table in (_NAMES, _HOPS, _SAID):
            self._connection.execute(table)
        present = {row[1] for row in self._connection.execute("PRAGMA table_info(packs_held)")}
        for name in _LATER.keys() - present:
            self._connection.execute(f"ALTER TABLE packs_held ADD COLUMN {name} {_LATER[name]}")
        unnamed = self._connection.execute(  # taken before names were kept
            "SELECT origin, seq, pack FROM packs_held WHERE NOT EXISTS"
            " (SELECT 1 FROM pack_names WHERE (origin, seq) = (packs_held.origin, packs_held.seq))"
        ).fetchall()
        for origin, seq, text in unnamed:
            self._name((origin, seq), as_pack(text))

        self.versions = Versions(self._connection)
        self._number = self._last_number()

    def _last_number(self) -> int:
        """Of what is in custody."""
        return int(self._connection.execute("SELECT ifnull(max(number), 0) FROM packs_held").fetchone()[0])

    def next_number(self) -> int:
        """The number of what is taken into custody now: greater than that of all that is there."""
        self._number += 1
        return self._number

    def sums_of(self, key: tuple[str, int]) -> Sequence[int]:
        """Checksums of the names of a pack in custody."""
        query = "SELECT sums FROM pack_names WHERE origin = ? AND seq = ?"
        (sums,) = self._connection.execute(query, key).fetchone()
        return [number for (number,) in _SUM.iter_unpack(sums)]

    def held_packs(self) -> list[HeldPack]:
        """All packs in custody, oldest first."""
        rows = self._connection.execute(f"SELECT {_COLUMNS} FROM packs_held ORDER BY number, rowid").fetchall()
        return [
            replace(HeldPack(origin, seq, end, os.fsdecode(path), *rest), number=number, after=tuple(json.loads(after)))
            for origin, seq, end, path, *rest, number, after in rows
        ]

    def pack(self, key: tuple[str, int]) -> Pack:
        """The names, sizes and so on of a pack in custody."""
        query = "SELECT pack FROM packs_held WHERE origin = ? AND seq = ?"
        (text,) = self._connection.execute(query, key).fetchone()
        return as_pack(text)

    def take_packs(self, taken: Iterable[tuple[HeldPack, Pack]]) -> None:
        """CUSTODY of some packs, durable before it is said, with what of them is not wanted any more."""
        cancelled: list[tuple[str, int]] = []
        with self._transaction("custody-pack-take"):
            for held, pack in taken:
                self._keep_origin(held.origin, held.expires)
                cancelled += [(held.origin, seq) for seq in pack.cancelled if held.seq <= seq < held.end]
                row = (
                    *held.key, held.end, os.fsencode(held.path), held.terminal, held.release, held.expires,
                    held.sender, held.digest, held.size_bytes, held.taken_at, held.priority, held.deadline,
                    held.number, json.dumps(held.after), pack_text(pack),
                )  # fmt: skip
                marks = ", ".join("?" * len(row))
                # one whose commit failed, and was one nevertheless, comes again
                self._connection.execute(f"INSERT OR REPLACE INTO packs_held ({_COLUMNS}, pack) VALUES ({marks})", row)
                self._name(held.key, pack)
            self._connection.executemany("INSERT OR IGNORE INTO cancelled VALUES (?, ?)", cancelled)
        for origin, seq in cancelled:
            self.record(origin).cancelled.add(seq)

    def _name(self, key: tuple[str, int], pack: Pack) -> None:
        sums = b"".join(map(_sum_of, pack.paths))
        self._connection.execute("INSERT OR REPLACE INTO pack_names VALUES (?, ?, ?)", (*key, sums))

    def cancel_all(self, origin: str, seqs: Collection[int]) -> None:
        """As :meth:`cancel`, of some operations of an origin together."""
        with self._transaction("overlay-cancel"):
            rows = [(origin, seq) for seq in seqs]
            self._connection.executemany("INSERT OR IGNORE INTO cancelled VALUES (?, ?)", rows)
        self.record(origin).cancelled.update(seqs)

    def withdraw_pack(self, key: tuple[str, int], said: SaidPack | None) -> None:
        """A damaged pack whose sender has its files is not in custody any more. :param said: None: it was to nobody."""
        with self._transaction("custody-pack-withdraw"):
            self._forget_pack(key)
            self._keep_said([said] if said else [])

    def hops(self) -> dict[str, str]:
        """The records that routers have, by address, as they said last."""
        return dict(self._connection.execute("SELECT hop, store FROM hops").fetchall())

    def said_packs(self) -> list[SaidPack]:
        """Packs that may have been said to other records than these, or that come again."""
        rows = self._connection.execute("SELECT origin, seq, store, expires FROM packs_said").fetchall()
        return [SaidPack(*row) for row in rows]

    def meet(self, hop: str, store: str, said: Iterable[SaidPack]) -> None:
        """A router has these records. :param said: packs that may have been said to those that it had before."""
        with self._transaction("custody-pack-meet"):
            self._connection.execute("INSERT OR REPLACE INTO hops VALUES (?, ?)", (hop, store))
            self._keep_said(said)

    def _keep_said(self, said: Iterable[SaidPack]) -> None:
        self._connection.executemany("INSERT OR REPLACE INTO packs_said VALUES (?, ?, ?, ?)", said)

    def _drop_said(self, now: int) -> None:
        """Of packs that were to come again, and did not."""
        self._connection.execute(
            "DELETE FROM packs_said WHERE expires < ? AND NOT EXISTS"
            " (SELECT 1 FROM packs_held WHERE (origin, seq) = (packs_said.origin, packs_said.seq))", (now,),
        )  # fmt: skip

    def refused_packs(self) -> set[tuple[str, int]]:
        """Packs whose files have their results, and whose data stay."""
        rows = self._connection.execute(
            "SELECT origin, seq FROM packs_held WHERE EXISTS"
            " (SELECT 1 FROM packs WHERE (origin, seq) = (packs_held.origin, packs_held.seq))"
        )
        return {(origin, seq) for origin, seq in rows}

    def conclude_packs(
        self, settled: Sequence[tuple[HeldPack, PackResults]], kept: Container[tuple[str, int]] = ()
    ) -> None:
        """The final results of all files of some packs, and the end of their custody, in one.

        :param kept: packs whose data stay.
        """
        with self._transaction("custody-pack-settle"):
            for held, one in settled:
                self._keep_pack(one)
                if held.key not in kept:
                    self._forget_pack(held.key)
                self._connection.execute("DELETE FROM packs_said WHERE origin = ? AND seq = ?", held.key)

    def results_of(self, origin: str, seqs: range) -> dict[int, Result]:
        """As of every store. Those of packs are read when they are asked for: who frees its files raises no LOW.

        So they are many, until an hour behind their expiry, and take no memory.
        """
        found = super().results_of(origin, seqs)
        if len(found) == len(seqs):
            return found
        low = self.record(origin).low
        rows = self._connection.execute(
            "SELECT results FROM packs WHERE origin = ? AND seq <= ? AND seq >="
            " ifnull((SELECT max(seq) FROM packs WHERE origin = ? AND seq <= ?), 0)",
            (origin, min(seqs.stop - 1, MAX_NUMBER), origin, seqs.start),
        )
        for (text,) in rows:
            found.update((seq, result) for seq, result in read_results(text) if seq in seqs and seq > low)
        return found

    def _read_packed(self, origin: str) -> Iterator[tuple[int, Result]]:
        return iter(())

    def _forget_pack(self, key: tuple[str, int]) -> None:
        for table in ("packs_held", "pack_names"):
            self._connection.execute(f"DELETE FROM {table} WHERE origin = ? AND seq = ?", key)

    def packs_with(self, path: str) -> list[tuple[str, int]]:
        """Packs in custody that may have a file of that name: those whose checksums of names have its one."""
        rows = self._connection.execute("SELECT origin, seq FROM pack_names WHERE instr(sums, ?)", (_sum_of(path),))
        return [(origin, seq) for origin, seq in rows]


def _sum_of(path: str) -> bytes:
    return _SUM.pack(sum_of(path))


def pack_text(pack: Pack) -> str:
    """A pack as it is written down."""
    return json.dumps(vars(pack))


def as_pack(text: str) -> Pack:
    """A pack as it was written down."""
    values: dict[str, Any] = json.loads(text)
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return Pack(**{**values, **lists})
