"""Bring files of a ledger to a state as the product does: by its own functions, which refuse an illegal move.

Tests set no state by SQL, but for :func:`damage`.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from sandbox_manager.custody import queries, updates
from stageout.core.states import FileState

#: From a new file to each state.
WAYS = {
    FileState.WAITING: (),
    FileState.MOVING: (FileState.MOVING,),
    FileState.DELIVERED: (FileState.MOVING, FileState.DELIVERED),
    FileState.FAILED: (FileState.FAILED,),
    FileState.DROPPED: (FileState.DROPPED,),
    FileState.HANDED_OVER: (FileState.MOVING, FileState.HANDED_OVER),
}


def _only(positions: tuple[int, ...]) -> str:
    return f"position IN ({','.join(map(str, positions))})" if positions else "1"


def take(db: sqlite3.Connection, *positions: int) -> int:
    """Begin an attempt with the files that wait: those at these positions, or all. Return how many."""
    return updates.move_files(
        db, {FileState.WAITING}, FileState.MOVING, _only(positions), [()], "attempts = attempts + 1,"
    )


def judge(db: sqlite3.Connection, state: FileState, *positions: int, **facts: Any) -> int:
    """Record how the attempts with the files ended that are being sent. Return how many.

    :param facts: more fields of :class:`stageout.model.file.StoredFile`.
    """
    files = [
        replace(item, state=state, **facts)
        for box in queries.all_sandboxes(db)
        for item in queries.all_files(db, box.id)
        if item.state is FileState.MOVING and (not positions or item.position in positions)
    ]
    updates.record_results(db, files)
    return len(files)


def attempt(db: sqlite3.Connection, state: FileState, *positions: int, times: int = 1, **facts: Any) -> None:
    """Try the files that wait so many times; the last attempt ends with this state, those before with another try."""
    for left in reversed(range(times)):
        assert take(db, *positions)
        judge(db, FileState.WAITING if left else state, *positions, **facts)


def bring(db: sqlite3.Connection, state: FileState) -> None:
    """Bring all files, which are new, to this state."""
    old = FileState.WAITING
    for new in WAYS[state]:
        updates.move_files(db, {old}, new, "1", [()])
        old = new


def damage(ledger: sqlite3.Connection | Path, sql: str) -> None:
    """Write into a ledger what the product never writes there: bytes that went bad, or what another version left."""
    if isinstance(ledger, Path):
        with closing(sqlite3.connect(ledger)) as db, db:
            db.execute(sql)
    else:
        ledger.execute(sql)
