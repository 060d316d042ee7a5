"""Names that operations in custody touch, so that versions of one name leave in the order in which they were taken.

Millions of small files may be in custody, so only checksums of their names are kept, in a table that the database may
move to a temporary file. Two names may have one checksum: whoever asks compares the names themselves.
"""

from __future__ import annotations

import os
import sqlite3
import zlib
from collections.abc import Sequence

#: Of one statement; older libraries allow 999.
_VARIABLES = 500
_TABLE = "CREATE TEMP TABLE versions (sum INTEGER, number INTEGER, PRIMARY KEY (sum, number)) WITHOUT ROWID"
#: It is never rolled back, and most of it stays in memory.
_FASTER = ("PRAGMA temp.journal_mode=OFF", "PRAGMA temp.cache_size=-16384")


class Versions:
    """By the numbers of operations, which grow with each that is taken. :param connection: of any database."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        for statement in (_TABLE, *_FASTER):
            connection.execute(statement)

    def add(self, number: int, sums: Sequence[int]) -> None:
        """Add an operation that touches these names."""
        self._all("INSERT OR IGNORE INTO versions VALUES (?, ?)", number, sums)

    def remove(self, number: int, sums: Sequence[int]) -> None:
        """Remove one that has ended."""
        self._all("DELETE FROM versions WHERE sum = ? AND number = ?", number, sums)

    def before(self, number: int, sums: Sequence[int]) -> list[int]:
        """Numbers of those that were taken earlier and perhaps touch one of these names, the latest first."""
        found = set[int]()
        for start in range(0, len(sums), _VARIABLES):
            some = sums[start : start + _VARIABLES]
            query = f"SELECT number FROM versions WHERE sum IN ({', '.join('?' * len(some))}) AND number < ?"
            found.update(row[0] for row in self._connection.execute(query, (*some, number)))
        return sorted(found, reverse=True)

    def _all(self, statement: str, number: int, sums: Sequence[int]) -> None:
        self._connection.execute("BEGIN")
        self._connection.executemany(statement, ((one, number) for one in sums))
        self._connection.execute("COMMIT")


def sum_of(path: str) -> int:
    """The checksum of a name."""
    return zlib.crc32(os.fsencode(path))
