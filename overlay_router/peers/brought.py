"""Which signed operations a peer means when it names an origin by the digits that it has said.

STATUS, CANCEL and LOW carry no capability, and so no holder. They are about the operations that the same key brought
with these digits, and that are known here under those of their holder (:mod:`overlay_router.peers.origins`). Each key
hears the results of what it brought. Only the key that was the first to bring an operation of an origin, or the key of
a router, cancels and settles: whoever has overheard a signed operation can repeat it, and nothing else.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import NamedTuple

from stageout.core import durable, log
from stageout.core.databases import Foreign, find_code, is_full, open_alone
from stageout.core.errors import StageoutError

_TABLE = """CREATE TABLE IF NOT EXISTS brought (
    said TEXT NOT NULL, known TEXT NOT NULL, changes INTEGER NOT NULL, expires INTEGER NOT NULL,
    PRIMARY KEY (said, known)) WITHOUT ROWID"""
_BY_KNOWN = "CREATE INDEX IF NOT EXISTS brought_known ON brought (known)"
_VERSION = 1
#: In memory; the others are read again when they are needed.
_KEPT = 4096
#: Rows stay so long behind the last operation; each is written anew at most once an hour.
_KEPT_S, _WRITTEN_AGAIN_S = 86400, 3600


class Name(NamedTuple):
    """A signed origin. :param known: as this router knows it. :param changes: CANCEL and LOW are about it, too."""

    known: str
    changes: bool
    expires: int


class Brought:
    """The signed origins by the key that brought them. :param path: of the database, made when it is missing.

    :raises StageoutError: it cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: dict[str, tuple[Name, ...]] = {}
        try:
            self._connection, version = open_alone(path, "brought")
            try:
                if version > _VERSION:
                    raise StageoutError(f"{path}: a later version of the router made it: start that one again")
                if version < _VERSION:  # a restart on a full disk writes nothing
                    for statement in (_TABLE, _BY_KNOWN, f"PRAGMA user_version={_VERSION}"):
                        self._connection.execute(statement)
                    durable.commit("brought-make", self._connection)
                else:
                    self._connection.rollback()
            except BaseException as problem:
                find_code(problem, path, self._connection)
                self._connection.close()
                raise
        except Foreign as problem:
            raise StageoutError(f"{path}: {problem}") from None
        except sqlite3.Error as problem:
            advice = "Make room on its disk" if is_full(problem) else "If it is damaged, it may be removed"
            raise StageoutError(f"{path}: {problem}. {advice}") from problem

    def close(self) -> None:
        """Close the database."""
        self._connection.close()

    def kept(self, said: str) -> tuple[Name, ...] | None:
        """As :meth:`find`, from memory; None where the database must be asked. Any thread may call it."""
        return self._kept.get(said)

    def find(self, said: str) -> tuple[Name, ...]:
        """The signed origins that a peer means. :param said: origin that it names, with its key."""
        found = self._kept.get(said)
        if found is None:
            rows = self._connection.execute("SELECT known, changes, expires FROM brought WHERE said = ?", (said,))
            found = tuple(Name(known, bool(changes), expires) for known, changes, expires in rows)
            self._keep(said, found)
        return found

    def is_new(self, said: str, known: str, expires: int) -> bool:
        """Tell whether :meth:`bring` must be called for an operation, as far as is in memory. Any thread may call it.

        :param expires: of the operation: Unix time in seconds.
        """
        names = self._kept.get(said, ())
        return not any(one.known == known and one.expires >= expires for one in names)

    def bring(self, said: str, known: str, expires: int, is_router: bool) -> Name:
        """An operation has come, durable on return: with that key, for that holder. Gives what is known of it now.

        A full disk takes no row, but an operation that frees space must not wait for that: then it is in memory only.
        """
        names = {one.known: one for one in self.find(said)}
        before = names.get(known)
        if before is not None and before.expires >= expires:
            return before
        run = self._connection.execute
        changes = before.changes if before is not None else is_router or not self._is_known(known)
        name = Name(known, changes, expires + _WRITTEN_AGAIN_S)
        try:
            run("BEGIN IMMEDIATE")
            try:
                run("INSERT OR REPLACE INTO brought VALUES (?, ?, ?, ?)", (said, *name))
                durable.commit("brought-write", self._connection)
            except BaseException:
                self._connection.rollback()
                raise
        except (OSError, sqlite3.Error) as problem:
            log.error("origin-write-failed", path=self._path, problem=problem,
                      advice="make room on the disk of STAGEOUT_ROUTER_DIR")  # fmt: skip
        self._keep(said, (*(one for one in names.values() if one.known != known), name))
        return name

    def expire(self, now: int) -> None:
        """Forget what ended a day ago."""
        run = self._connection.execute
        [late] = run("SELECT count(*) FROM brought WHERE expires < ?", (now - _KEPT_S,)).fetchone()
        if not late:
            return
        run("BEGIN IMMEDIATE")
        try:
            run("DELETE FROM brought WHERE expires < ?", (now - _KEPT_S,))
            durable.commit("brought-forget", self._connection)
        except BaseException:
            self._connection.rollback()
            raise
        self._kept.clear()

    def _is_known(self, known: str) -> bool:
        in_memory = any(one.known == known for names in self._kept.values() for one in names)
        row = self._connection.execute("SELECT 1 FROM brought WHERE known = ?", (known,)).fetchone()
        return in_memory or row is not None

    def _keep(self, said: str, names: tuple[Name, ...]) -> None:
        if len(self._kept) >= _KEPT:
            self._kept.clear()
        self._kept[said] = names
