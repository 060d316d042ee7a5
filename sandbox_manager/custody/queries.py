"""Queries of the ledger: plain SQL on a connection. The changes are in ``custody/updates.py``."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from sandbox_manager.custody.credentials import Credential, StoredCredentials
from stageout.core.states import LEFT_FILES, STILL_FILES, FileState, State
from stageout.model.file import StoredFile
from stageout.model.sandbox import NAME_BYTES, Destination, Sandbox, SlotKey, SyncState, Waiting
from stageout.movers.results import TransferFacts
from stageout.wire.custody import JobKey, Run
from stageout.wire.deposits import holdings_of, joined, read_receipt

#: Numbers of the states in the ledger; never changed, only added to.
CODE_OF: dict[State, int] = {
    State.OFFERED: 0, State.ACCEPTED: 1, State.CONFIRMED: 2, State.LEASED: 3, State.MOVING: 4, State.RETRY_WAIT: 5,
    State.HANDED_OVER: 6, State.DELIVERED: 7, State.RELEASED: 8, State.FAILED: 9, State.CANCELLED: 10,
    State.SUPERSEDED: 11, State.LOST: 12,
}  # fmt: skip


class DamagedText(str):
    """Text of the ledger that is not UTF-8; the bytes that are wrong stand in it as ``\\xff``."""

    __slots__ = ()


def text_of(data: bytes) -> str:
    """Return a text of the ledger from its bytes."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return DamagedText(data.decode("utf-8", "backslashreplace"))


class _States(dict[int, State]):
    def __missing__(self, code: object) -> State:
        """Return LOST for an unknown number: the row is damaged, so its output cannot be relied upon."""
        return State.LOST


STATE_OF = _States((code, state) for state, code in CODE_OF.items())
_UNSIGNED = (1 << 64) - 1


def _is_in(states: Collection[FileState]) -> str:
    return f"state IN ({', '.join(str(int(state)) for state in sorted(states))})"


#: Conditions in SQL: a file still has to be delivered; it waits or has failed.
IS_LEFT, IS_STILL = _is_in(LEFT_FILES), _is_in(STILL_FILES)


#: Columns of the fields of :class:`TransferFacts`, in their order.
FACT_COLUMNS = tuple(item.name for item in fields(TransferFacts))
_FIELDS = [item.name for item in fields(StoredFile) if item.name != "facts"]
#: Columns that have other names than their fields.
_RENAMED = {"size_bytes": "f.size", "ticket": "t.ticket", "ticket_id": "f.ticket", "proof": "f.digest"}
#: Columns of a file: those of the fields of :class:`StoredFile`, in their order, then FACT_COLUMNS.
FILE_COLUMNS = ", ".join(_RENAMED.get(name, f"f.{name}") for name in (*_FIELDS, *FACT_COLUMNS))
_INODE, _STATE, _FACTS = _FIELDS.index("inode"), _FIELDS.index("state"), len(_FIELDS)


def stored_file(row: Sequence[Any]) -> StoredFile:
    """Return the file of a row of FILE_COLUMNS."""
    values = list(row)
    values[_INODE] &= _UNSIGNED
    values[_STATE] = FileState(values[_STATE])
    values[_FACTS:] = [TransferFacts(*values[_FACTS:])]
    return StoredFile(*values)


_SANDBOX_COLUMNS = (
    "id, job, number, owner, user, uid, gid, shared_uid, startd, slot_id, dslot_id, slot_name, priority, state, "
    "change, paused, reason, error_code, named_tickets, accepted_at, confirmed_at, ended_at, "
    "forgettable, attempts, excused, retried_at, acct_group, refused, fallback, "
    "fallback_note, failing_since"
)


@dataclass
class _Sums:
    files: dict[int, int] = field(default_factory=dict)
    size: dict[int, int] = field(default_factory=dict)
    waiting: list[Waiting] = field(default_factory=list)
    moving_at: list[int] = field(default_factory=list)


def sandbox(db: sqlite3.Connection, sandbox_id: int) -> Sandbox | None:
    """Read one sandbox with its sums."""
    row = db.execute(f"SELECT {_SANDBOX_COLUMNS} FROM sandboxes WHERE id = ?", (sandbox_id,)).fetchone()
    return _sandbox(db, row) if row else None


def all_sandboxes(db: sqlite3.Connection) -> list[Sandbox]:
    """Read every sandbox (at start)."""
    rows = db.execute(f"SELECT {_SANDBOX_COLUMNS} FROM sandboxes ORDER BY id").fetchall()
    return [_sandbox(db, row) for row in rows]


def _sandbox(db: sqlite3.Connection, row: Sequence[Any]) -> Sandbox:
    sums = _sums(db, row[0])
    query = (
        "SELECT ticket, freed, credential_ends_at, length(job_ad) + length(plugin_data) "
        "FROM tickets WHERE sandbox = ? ORDER BY id"
    )
    tickets = db.execute(query, (row[0],)).fetchall()
    handed_over = _handed_over(db, row[0]) if sums.files.get(FileState.HANDED_OVER) else []
    return Sandbox(
        id=row[0], run=Run(row[1], row[2], row[3]), user=row[4], uid=row[5], gid=row[6],
        shared_uid=bool(row[7]), slot=SlotKey(row[8], row[9], row[10]), slot_name=row[11], priority=row[12],
        state=STATE_OF[row[13]], change=row[14], paused=bool(row[15]), reason=row[16], error_code=row[17],
        named_tickets=tuple(row[18].split()), accepted_at=row[19], confirmed_at=row[20], ended_at=row[21],
        forgettable=bool(row[22]), retried_at=row[25], group=row[26], refused=row[27],
        fallback=row[28], fallback_note=row[29], failing_since=row[30],
        tickets=tuple(item[0] for item in tickets), freed=all(item[1] for item in tickets),
        files_total=sum(count for state, count in sums.files.items() if state != FileState.DROPPED),
        files_left=sum(sums.files.get(state, 0) for state in LEFT_FILES),
        bytes_total=sum(size for state, size in sums.size.items() if state != FileState.DROPPED),
        bytes_left=sum(sums.size.get(state, 0) for state in LEFT_FILES),
        files_dropped=sums.files.get(FileState.DROPPED, 0), bytes_dropped=sums.size.get(FileState.DROPPED, 0),
        moving=sums.files.get(FileState.MOVING, 0), failed=sums.files.get(FileState.FAILED, 0),
        attempts=row[23], excused=row[24], waiting=tuple(sums.waiting),
        moving_at=tuple(sums.moving_at),
        deadline_at=min((item[2] for item in tickets if item[2] and not item[1]), default=0),
        record_bytes=NAME_BYTES * sum(sums.files.values()) + sum(item[3] for item in tickets),
        custody=tuple(map(str, joined(read_receipt(text) for text, _ in handed_over))),
        holdings=tuple(map(str, holdings_of(handed_over))),
    )  # fmt: skip


def begun_hand_over(db: sqlite3.Connection) -> list[StoredFile]:
    """Select files with a receipt (:mod:`stageout.wire.deposits`): a custodian may have them, recorded or not.

    The digest of a delivered file comes from its plugin, even if it looks like a receipt.
    """
    query = f"SELECT {FILE_COLUMNS} FROM files f JOIN tickets t ON t.id = f.ticket WHERE f.state != ? AND "
    return list(map(stored_file, db.execute(f"{query} f.digest GLOB '* * *-* *'", (FileState.DELIVERED,))))


def left_files(db: sqlite3.Connection, sandbox_id: int) -> list[tuple[int, int]]:
    """Select ticket and position of each file of a sandbox that still has to be delivered."""
    return db.execute(f"SELECT ticket, position FROM files WHERE sandbox = ? AND {IS_LEFT}", (sandbox_id,)).fetchall()


def _handed_over(db: sqlite3.Connection, sandbox_id: int) -> list[tuple[str, int]]:
    """Receipt and size of each file that a custodian has."""
    query = "SELECT digest, size FROM files WHERE sandbox = ? AND state = ?"
    return db.execute(query, (sandbox_id, FileState.HANDED_OVER)).fetchall()


def _sums(db: sqlite3.Connection, sandbox_id: int) -> _Sums:
    sums = _Sums()
    rows = db.execute("SELECT state, destination, files, size FROM sums WHERE sandbox = ? AND files > 0", (sandbox_id,))
    for state, destination, files, size in rows.fetchall():
        sums.files[state] = sums.files.get(state, 0) + files
        sums.size[state] = sums.size.get(state, 0) + size
        if state == FileState.MOVING:
            sums.moving_at.append(destination)
        if state == FileState.WAITING:
            sums.waiting.append(Waiting(destination, files, size, _ready_at(db, sandbox_id, destination)))
    return sums


def _ready_at(db: sqlite3.Connection, sandbox_id: int, destination: int) -> int:
    query = "SELECT min(next_attempt) FROM files WHERE sandbox = ? AND state = ? AND destination = ?"
    return int(db.execute(query, (sandbox_id, FileState.WAITING, destination)).fetchone()[0])


def destinations(db: sqlite3.Connection) -> dict[int, Destination]:
    """Read all destinations by id."""
    rows = db.execute("SELECT id, plugin, scheme, host, surroundings FROM destinations")
    return {row[0]: Destination(*row[1:]) for row in rows}


def fences(db: sqlite3.Connection) -> dict[JobKey, int]:
    """Read the highest run number of each job."""
    return {JobKey(job, owner): number for job, owner, number in db.execute("SELECT job, owner, number FROM fences")}


_FILES = f"SELECT {FILE_COLUMNS} FROM files f JOIN tickets t ON t.id = f.ticket WHERE f.sandbox = ? AND "


def all_files(db: sqlite3.Connection, sandbox_id: int) -> Iterator[StoredFile]:
    """Yield the files of a sandbox that are part of its run, in the order of their hand-off."""
    query = f"{_FILES} f.state != ? ORDER BY f.ticket, f.position"
    return map(stored_file, db.execute(query, (sandbox_id, FileState.DROPPED)))


def files_in_trouble_first(
    db: sqlite3.Connection, sandbox_id: int, limit: int, with_dropped: bool = False
) -> list[StoredFile]:
    """Select files of a sandbox: first failed files, then files to be tried again, then files that are being sent.

    :param limit: largest number of files. :param with_dropped: begin with files that were given up.
    """
    found: list[StoredFile] = []
    troubled, untroubled = "AND f.error_code != 0", "AND f.error_code = 0"
    dropped = ((FileState.DROPPED, troubled), (FileState.DROPPED, untroubled)) if with_dropped else ()
    wanted = (
        *dropped,
        (FileState.FAILED, ""),
        (FileState.WAITING, troubled),
        (FileState.MOVING, ""),
        (FileState.WAITING, untroubled),
        (FileState.DELIVERED, ""),
    )
    for state, condition in wanted:
        if len(found) < limit:
            rows = db.execute(f"{_FILES} f.state = ? {condition} LIMIT ?", (sandbox_id, state, limit - len(found)))
            found += map(stored_file, rows)
    return found


def left_first_time(db: sqlite3.Connection, sandbox_id: int) -> list[StoredFile]:
    """Select files of a sandbox that wait or have failed, and have never been sent to its fallback."""
    return list(map(stored_file, db.execute(f"{_FILES} f.{IS_STILL} AND f.fell_back = 0", (sandbox_id,))))


def count_below(db: sqlite3.Connection, sandbox_id: int, directory: str) -> int:
    """Count the files of a sandbox that fell back to URLs below this directory, and have not been redirected since."""
    query = "SELECT count(*) FROM files WHERE sandbox = ? AND state != ? AND fell_back = 1 AND substr(url, 1, ?) = ?"
    return int(db.execute(query, (sandbox_id, FileState.DROPPED, len(directory), directory)).fetchone()[0])


def delivered_by_scheme(db: sqlite3.Connection, sandbox_id: int) -> dict[str, int]:
    """Count the delivered files of a sandbox by the scheme of their URLs."""
    query = (
        "SELECT d.scheme, sum(s.files) FROM sums s JOIN destinations d ON d.id = s.destination "
        "WHERE s.sandbox = ? AND s.state = ? AND s.files > 0 GROUP BY d.scheme"
    )
    return dict(db.execute(query, (sandbox_id, FileState.DELIVERED)).fetchall())


def first_error(db: sqlite3.Connection, sandbox_id: int, of_destination: bool = False) -> StoredFile | None:
    """Return the file whose failure explains a sandbox best: one that failed for good, else one that was tried.

    :param of_destination: look only at files whose last failure was their destination's.
    """
    kind = "f.error_code != 0 AND f.of_node = 0" if of_destination else "f.error_code != 0"
    for state in (FileState.FAILED, FileState.WAITING):
        row = db.execute(f"{_FILES} f.state = ? AND {kind} LIMIT 1", (sandbox_id, state)).fetchone()
        if row:
            return stored_file(row)
    return None


def held_files(db: sqlite3.Connection) -> Iterator[tuple[str, str, list[tuple[int, int]]]]:
    """Yield ticket, owner, and (inode, size in bytes) of each file, for all tickets whose bytes are in the spool."""
    rows = db.execute(
        "SELECT t.id, t.ticket, s.owner FROM tickets t JOIN sandboxes s ON s.id = t.sandbox WHERE t.freed = 0"
    )
    for number, ticket, owner in rows.fetchall():
        files = db.execute("SELECT inode, size FROM files WHERE ticket = ?", (number,))
        yield ticket, owner, [(inode & _UNSIGNED, size) for inode, size in files.fetchall()]


def sandbox_of(db: sqlite3.Connection, ticket: str) -> int | None:
    """Return the sandbox of a ticket whose bytes are in the spool, None for none."""
    row = db.execute("SELECT sandbox FROM tickets WHERE ticket = ? AND freed = 0", (ticket,)).fetchone()
    return int(row[0]) if row else None


def kept_tickets(db: sqlite3.Connection) -> dict[str, tuple[int, SyncState, str]]:
    """Read sandbox, state of the sync and boot id of each ticket whose bytes are in the spool."""
    rows = db.execute("SELECT ticket, sandbox, synced, boot FROM tickets WHERE freed = 0")
    return {row[0]: (row[1], SyncState(row[2]), row[3]) for row in rows}


def stored_credentials(db: sqlite3.Connection, ticket: str) -> StoredCredentials:
    """Return the credentials of a ticket's files."""
    number, job_ad, plugin_data = db.execute(
        "SELECT id, job_ad, plugin_data FROM tickets WHERE ticket = ?", (ticket,)
    ).fetchone()
    rows = db.execute("SELECT kind, service, expires_at, digest FROM credentials WHERE ticket = ?", (number,))
    return StoredCredentials(ticket, job_ad, plugin_data, tuple(Credential(*row) for row in rows))


def held(db: sqlite3.Connection, ticket: str) -> StoredCredentials | None:
    """Return the credentials of a ticket, None if its bytes are no longer in the spool."""
    row = db.execute("SELECT 1 FROM tickets WHERE ticket = ? AND freed = 0", (ticket,)).fetchone()
    return stored_credentials(db, ticket) if row else None


def tickets_with_credentials(db: sqlite3.Connection, sandbox_id: int | None = None) -> list[StoredCredentials]:
    """Read the stored credentials of tickets in the spool: of one sandbox, or all."""
    rows = db.execute(
        "SELECT ticket FROM tickets t WHERE freed = 0 AND (? IS NULL OR sandbox = ?) "
        "AND EXISTS (SELECT 1 FROM credentials c WHERE c.ticket = t.id)",
        (sandbox_id, sandbox_id),
    )
    return [stored_credentials(db, row[0]) for row in rows.fetchall()]
