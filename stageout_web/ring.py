"""Figures of the last hour every few seconds and of the last 30 days every five minutes, in SQLite.

Nothing depends on them: a file that is damaged or no such database is replaced by an empty one.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path

from stageout.core import log

FINE_S, COARSE_S = 3600, 30 * 86400
COARSE_STEP_S = 300
_SCHEMA = """
CREATE TABLE IF NOT EXISTS fine (at INTEGER PRIMARY KEY, figures TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS coarse (at INTEGER PRIMARY KEY, figures TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS day (day TEXT PRIMARY KEY, outputs INTEGER NOT NULL, bytes INTEGER NOT NULL);
"""
_POINTS = 720
#: Largest sum of bytes that is counted.
_MOST_BYTES = 1 << 62
#: Words of SQLite about a file that another start does not make readable.
_DAMAGES = ("malformed", "not a database", "no such column", "has no column", "columns but")


class Ring:
    """The two series of figures, and the deliveries of each day.

    Each method but :meth:`close` raises sqlite3.Error while the database cannot be used, such as on a full disk.

    :param path: file of the database; its directory is made. :raises OSError: the directory cannot be made.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = path
        self._open: sqlite3.Connection | None = None
        self._step = 0
        with contextlib.suppress(sqlite3.Error):  # the first use tries again and tells the caller
            self._connect()

    @property
    def _db(self) -> sqlite3.Connection:
        return self._open or self._connect()

    def _connect(self) -> sqlite3.Connection:
        """Open the database, and replace a damaged one. :raises sqlite3.Error: it cannot be used now."""
        try:
            db = _opened(self._path)
        except sqlite3.DatabaseError as problem:
            if not any(words in str(problem) for words in _DAMAGES):
                raise
            log.warn("ring-replaced", problem=problem)
            for end in ("", "-wal", "-shm"):
                self._path.with_name(self._path.name + end).unlink(missing_ok=True)
            db = _opened(self._path)
        [at] = db.execute("SELECT max(at) FROM coarse").fetchone()
        self._open, self._step = db, int(at or 0) // COARSE_STEP_S
        return db

    def add(self, at: int, figures: Mapping[str, float]) -> None:
        """Add the figures of one moment. :param at: wall clock, seconds."""
        with self._db:
            self._db.execute("INSERT OR REPLACE INTO fine VALUES (?, ?)", (at, _text(figures)))
            if at // COARSE_STEP_S != self._step:
                self._close_step(at)

    def _close_step(self, at: int) -> None:
        """Add the mean of the last step to the coarse series, and delete what is too old."""
        end = at // COARSE_STEP_S * COARSE_STEP_S
        rows = self._rows("fine", end - COARSE_STEP_S, end - 1)
        if rows:
            self._db.execute("INSERT OR REPLACE INTO coarse VALUES (?, ?)", (end - COARSE_STEP_S, _text(_mean(rows))))
        self._db.execute("DELETE FROM fine WHERE at < ? OR at > ?", (at - FINE_S, at + FINE_S))
        self._db.execute("DELETE FROM coarse WHERE at < ? OR at > ?", (at - COARSE_S, at + FINE_S))
        self._step = at // COARSE_STEP_S

    def _rows(self, table: str, first: int, last: int, most: int = 1 << 30) -> list[tuple[int, dict[str, float]]]:
        """Return the moments between two times. :param most: maximum number of samples; if there are more, return
        evenly spaced ones.
        """
        found = self._db.execute(
            f"SELECT at, figures FROM {table} WHERE at BETWEEN ? AND ? ORDER BY at", (first, last)
        ).fetchall()
        return [(at, json.loads(text)) for at, text in found[:: max(1, len(found) // most)]]

    def series(self, names: Iterable[str], now: int, span_s: int) -> list[list[float | None]]:
        """Return times and the values of each name, at most 720 of each.

        :param span_s: seconds until now. Up to an hour they come from the fine series.
        """
        rows = self._rows("fine" if span_s <= FINE_S else "coarse", now - span_s, now, _POINTS)
        return [[at for at, _ in rows], *([figures.get(name) for _, figures in rows] for name in names)]

    def add_deliveries(self, day: str, outputs: int, size_bytes: int) -> None:
        """Count deliveries of a day. :param day: YYYY-MM-DD."""
        with self._db:
            self._db.execute("INSERT OR IGNORE INTO day VALUES (?, 0, 0)", (day,))
            self._db.execute(
                "UPDATE day SET outputs = outputs + ?, bytes = min(bytes + ?, ?) WHERE day = ?",
                (outputs, min(size_bytes, _MOST_BYTES), _MOST_BYTES, day),
            )

    def deliveries(self, day: str) -> tuple[int, int]:
        """Return outputs and bytes that were delivered on a day."""
        found = self._db.execute("SELECT outputs, bytes FROM day WHERE day = ?", (day,)).fetchone()
        return (int(found[0]), int(found[1])) if found else (0, 0)

    def close(self) -> None:
        """Close the database. The next use opens it again."""
        opened, self._open = self._open, None
        if opened is not None:
            with contextlib.suppress(sqlite3.Error):
                opened.close()


def _opened(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=1)
    try:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=OFF")
        db.executescript(_SCHEMA)
        for columns, name in (("at, figures", "fine"), ("at, figures", "coarse"), ("day, outputs, bytes", "day")):
            db.execute(f"SELECT {columns} FROM {name} LIMIT 1").fetchone()
    except BaseException:
        db.close()
        raise
    return db


def _text(figures: Mapping[str, float]) -> str:
    return json.dumps({name: round(value, 3) for name, value in figures.items()}, separators=(",", ":"))


def _mean(rows: list[tuple[int, dict[str, float]]]) -> dict[str, float]:
    names = {name for _, figures in rows for name in figures}
    return {name: sum(figures.get(name, 0) for _, figures in rows) / len(rows) for name in names}
