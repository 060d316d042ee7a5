"""Changes of the ledger: plain SQL on a connection. Every change of a state is checked here."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Sequence
from dataclasses import astuple, replace
from operator import attrgetter
from typing import Any, NamedTuple

from sandbox_manager.custody.credentials import StoredCredentials
from sandbox_manager.custody.queries import (
    CODE_OF,
    FACT_COLUMNS,
    FILE_COLUMNS,
    IS_LEFT,
    IS_STILL,
    STATE_OF,
    stored_file,
)
from stageout.core.errors import Advice, ErrorClass
from stageout.core.states import AWAY_FILES, ENDS, LEFT_FILES, FileState, State, move, move_file
from stageout.model.file import StoredFile
from stageout.model.run import RunFacts
from stageout.model.sandbox import Destination, SyncState, destination_of
from stageout.wire.custody import JobKey, Run

_CHANGES_PER_S = 1000
_WAITING, _MOVING = int(FileState.WAITING), int(FileState.MOVING)
#: Columns that an attempt's end sets, besides the state and the proof (column ``digest``).
_RESULT = ("next_attempt", "excused", "error_code", "error", "of_node", "verified")
#: Rows of a job. The name alone is not enough, because its time is the owner's to write and queues begin again.
_OF_JOB = "job = :job AND owner = :owner"


# ---- acceptance ------------------------------------------------------------------------------------------------------


def add_ticket(
    db: sqlite3.Connection, facts: RunFacts, ticket: str, plugin: str, files: Sequence[StoredFile], boot: str,
    now: int, credentials_digest: str = "",
) -> int:  # fmt: skip
    """Record a hand-off. Create the sandbox for the first hand-off of a run. Return the sandbox's id.

    :param credentials_digest: as of :class:`Destination`.
    """
    found = db.execute(f"SELECT id FROM sandboxes WHERE {_OF_JOB} AND number = :number", vars(facts.run)).fetchone()
    sandbox = int(found[0]) if found else add_sandbox(db, facts, now)
    total = sum(item.size_bytes for item in files)
    cursor = db.execute(
        "INSERT INTO tickets (ticket, sandbox, plugin, boot, files, size) VALUES (?, ?, ?, ?, ?, ?)",
        (ticket, sandbox, plugin, boot, len(files), total),
    )
    targets = [destination_of(plugin, item.url, credentials_digest) for item in files]
    ids = {target: _destination_id(db, target) for target in dict.fromkeys(targets)}
    db.executemany(
        "INSERT INTO files (ticket, position, sandbox, destination, state, size, url, name, mtime_ns, inode) "
        f"VALUES (?, ?, ?, ?, {_WAITING}, ?, ?, ?, ?, ?)",
        (
            (cursor.lastrowid, item.position, sandbox, ids[target], item.size_bytes, item.url, item.name,
             item.mtime_ns, _signed(item.inode))
            for item, target in zip(files, targets)
        ),
    )  # fmt: skip
    db.execute("UPDATE sandboxes SET change = change + 1 WHERE id = ?", (sandbox,))
    raise_fence(db, facts.run, now)
    return sandbox


def _signed(value: int) -> int:
    """SQLite's integers have a sign; inode numbers of some filesystems use all 64 bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


def add_sandbox(db: sqlite3.Connection, facts: RunFacts, now: int) -> int:
    """Record a new sandbox without tickets. Return its id.

    Its first change has the number of the wall clock, so agents see it as newer than a record of a lost ledger.
    """
    cursor = db.execute(
        "INSERT INTO sandboxes (job, number, owner, user, uid, gid, shared_uid, startd, slot_id, dslot_id, slot_name, "
        "priority, state, change, accepted_at, acct_group) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
        (
            facts.run.job, facts.run.number, facts.run.owner, facts.user, facts.uid, facts.gid, facts.shared_uid,
            *facts.slot, facts.slot_name, facts.priority, CODE_OF[move(State.OFFERED, State.ACCEPTED)],
            now * _CHANGES_PER_S, now, facts.group,
        ),
    )  # fmt: skip
    return int(cursor.lastrowid or 0)


def _destination_id(db: sqlite3.Connection, target: Destination) -> int:
    query = "SELECT id FROM destinations WHERE plugin = ? AND scheme = ? AND host = ? AND surroundings = ?"
    known = db.execute(query, target).fetchone()
    if known is not None:
        return int(known[0])
    new = db.execute("INSERT INTO destinations (plugin, scheme, host, surroundings) VALUES (?, ?, ?, ?)", target)
    return int(new.lastrowid or 0)


def keep_credentials(db: sqlite3.Connection, held: StoredCredentials) -> None:
    """Record the credentials of a ticket's files."""
    (number,) = db.execute("SELECT id FROM tickets WHERE ticket = ?", (held.ticket,)).fetchone()
    db.execute(
        "UPDATE tickets SET job_ad = ?, plugin_data = ?, credential_ends_at = ? WHERE id = ?",
        (held.job_ad, held.plugin_data, held.expires_at, number),
    )
    db.executemany(
        "INSERT OR REPLACE INTO credentials VALUES (?, ?, ?, ?, ?)",
        ((number, item.kind, item.service, item.expires_at, item.digest) for item in held.credentials),
    )


def renew(db: sqlite3.Connection, held: StoredCredentials, now: int) -> int | None:
    """Replace the credentials of a ticket. Its files wait for the destination with the new ones, or are due now.

    Return the sandbox, None while a file of the ticket is in a mover (with the old ones) or when the ticket is freed.
    """
    row = db.execute("SELECT id, sandbox FROM tickets WHERE ticket = ? AND freed = 0", (held.ticket,)).fetchone()
    if row is None or db.execute(
        f"SELECT EXISTS (SELECT 1 FROM files WHERE ticket = ? AND state = {_MOVING})", (row[0],)
    ).fetchone()[0]:  # fmt: skip
        return None
    number, sandbox = row
    keep_credentials(db, held)
    places = db.execute(
        "SELECT DISTINCT d.id, d.plugin, d.scheme, d.host FROM files f JOIN destinations d ON d.id = f.destination "
        "WHERE f.ticket = ?",
        (number,),
    )
    for old, plugin, scheme, host in places.fetchall():
        new = _destination_id(db, Destination(plugin, scheme, host, held.digest))
        db.execute("UPDATE files SET destination = ? WHERE ticket = ? AND destination = ?", (new, number, old))
    codes = ",".join(str(kind.code) for kind in ErrorClass if kind.advice is Advice.NEEDS_CREDENTIAL)
    db.execute(
        f"UPDATE files SET next_attempt = ? WHERE ticket = ? AND state = {_WAITING} AND error_code IN ({codes})",
        (now, number),
    )
    touch(db, sandbox)
    return int(sandbox)


def raise_fence(db: sqlite3.Connection, run: Run, now: int) -> None:
    """Record that this run exists, so that hand-offs of older runs are refused."""
    db.execute(
        "INSERT INTO fences (job, owner, number, at) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (job, owner) DO UPDATE SET number = max(number, excluded.number), at = excluded.at",
        (run.job, run.owner, run.number, now),
    )


def newest_run(db: sqlite3.Connection, job: JobKey) -> int:
    """Return the highest known run number of this job, 0 for none."""
    facts = {"job": job.name, "owner": job.owner}
    (number,) = db.execute(f"SELECT max(number) FROM fences WHERE {_OF_JOB}", facts).fetchone()
    return int(number or 0)


def mark_syncing(db: sqlite3.Connection, tickets: Iterable[str]) -> None:
    """Record that the sync of tickets begins. Without a recorded end their data cannot be relied upon."""
    _mark(db, tickets, SyncState.BEGUN)


def mark_synced(db: sqlite3.Connection, tickets: Iterable[str]) -> None:
    """Record that the data of tickets is on the disk."""
    _mark(db, tickets, SyncState.DONE)


def _mark(db: sqlite3.Connection, tickets: Iterable[str], state: SyncState) -> None:
    db.executemany("UPDATE tickets SET synced = ? WHERE ticket = ?", ((state, ticket) for ticket in tickets))


# ---- states ----------------------------------------------------------------------------------------------------------


def set_state(
    db: sqlite3.Connection, sandbox: int, new: State, now: int, reason: str = "", error_code: int = 0
) -> None:
    """Move one sandbox to another state.

    :raises IllegalMove: the table does not allow it.
    """
    move(state_of(db, sandbox), new)
    db.execute(
        "UPDATE sandboxes SET state = ?, change = change + 1, reason = ?, error_code = ?, ended_at = ? WHERE id = ?",
        (CODE_OF[new], reason, error_code, now if new in ENDS else 0, sandbox),
    )


def state_of(db: sqlite3.Connection, sandbox: int) -> State:
    """Return the state of one sandbox in this transaction."""
    return STATE_OF[db.execute("SELECT state FROM sandboxes WHERE id = ?", (sandbox,)).fetchone()[0]]


def state_of_run(db: sqlite3.Connection, run: Run) -> State | None:
    """Return the state of a run's sandbox, None for none."""
    row = db.execute(f"SELECT state FROM sandboxes WHERE {_OF_JOB} AND number = :number", vars(run)).fetchone()
    return STATE_OF[row[0]] if row else None


class Times(NamedTuple):
    """The times from which deadlines count (wall clock), and the reason of a sandbox."""

    accepted_at: int
    retried_at: int
    ended_at: int
    reason: str
    error_code: int
    paused: int
    forgettable: int


def times(db: sqlite3.Connection, sandbox: int) -> Times:
    """Read the times of one sandbox."""
    columns = "accepted_at, retried_at, ended_at, reason, error_code, paused, forgettable"
    return Times(*db.execute(f"SELECT {columns} FROM sandboxes WHERE id = ?", (sandbox,)).fetchone())


def ids_in(db: sqlite3.Connection, states: Iterable[State]) -> list[int]:
    """Select the sandboxes in one of these states."""
    codes = ",".join(str(CODE_OF[state]) for state in states)
    return [row[0] for row in db.execute(f"SELECT id FROM sandboxes WHERE state IN ({codes})")]


def was_confirmed(db: sqlite3.Connection, sandbox: int) -> bool:
    """Tell whether this run was ever confirmed. Without confirmation none of its output may be sent."""
    return bool(db.execute("SELECT confirmed_at FROM sandboxes WHERE id = ?", (sandbox,)).fetchone()[0])


def set_reason(db: sqlite3.Connection, sandbox: int, reason: str) -> None:
    """Change only the reason, which people read."""
    db.execute("UPDATE sandboxes SET reason = ?, change = change + 1 WHERE id = ?", (reason, sandbox))


def set_refused(db: sqlite3.Connection, sandbox: int, why: str) -> None:
    """Record the answer to a redirect: the reason for what was not carried out, "" for nothing."""
    db.execute("UPDATE sandboxes SET refused = ?, change = change + 1 WHERE id = ?", (why, sandbox))


def set_url(db: sqlite3.Connection, item: StoredFile, url: str, target: Destination, fell_back: bool = False) -> None:
    """Give a file that is not being sent another URL. :param fell_back: that of its job's fallback."""
    db.execute(
        "UPDATE files SET url = ?, destination = ?, fell_back = max(fell_back, ?) "
        f"WHERE ticket = ? AND position = ? AND {IS_STILL}",
        (url, _destination_id(db, target), fell_back, item.ticket_id, item.position),
    )


def offer_fallback(db: sqlite3.Connection, sandbox: int, url: str, problem: str) -> None:
    """Keep the fallback of a hand-off's job. One hand-off that cannot use it is enough to ignore it for all.

    :param problem: reason why the files of this hand-off cannot be sent there, "" when they can.
    """
    db.execute(
        "UPDATE sandboxes SET fallback = CASE WHEN fallback_note || :problem = '' THEN :url ELSE '' END, "
        "fallback_note = CASE fallback_note WHEN '' THEN :problem ELSE fallback_note END WHERE id = :sandbox",
        {"url": url, "problem": problem, "sandbox": sandbox},
    )


def keep_fallback_reason(db: sqlite3.Connection, sandbox: int, reason: str) -> None:
    """Keep why files were sent to the fallback, the first time that some were."""
    db.execute("UPDATE sandboxes SET fallback_note = ? WHERE id = ? AND fallback_note = ''", (reason, sandbox))


def ignore_fallback(db: sqlite3.Connection, sandbox: int, problem: str) -> None:
    """Send nothing to the fallback from now on. :param problem: reason why it cannot be used."""
    sql = "UPDATE sandboxes SET fallback = '', fallback_note = ?, change = change + 1 WHERE id = ?"
    db.execute(sql, (problem, sandbox))


def set_paused(db: sqlite3.Connection, sandbox: int, paused: bool) -> None:
    """Record that the owner paused or resumed the delivery."""
    db.execute("UPDATE sandboxes SET paused = ?, change = change + 1 WHERE id = ?", (paused, sandbox))


def end(db: sqlite3.Connection, sandbox: int, new: State, now: int, reason: str = "", error_code: int = 0) -> None:
    """Move to an end in which nothing more is sent; files that still wait or move are dropped unless it FAILED."""
    set_state(db, sandbox, new, now, reason=reason, error_code=error_code)
    if new is not State.FAILED:
        move_files(db, old=LEFT_FILES, new=FileState.DROPPED, condition="sandbox = ?", facts=[(sandbox,)])


def name_tickets(db: sqlite3.Connection, sandbox: int, tickets: Sequence[str], files: int, priority: int) -> None:
    """Record the content of the completed run's OUTPUT record."""
    db.execute(
        "UPDATE sandboxes SET named_tickets = ?, named_files = ?, priority = ? WHERE id = ?",
        (" ".join(sorted(tickets)), files, priority, sandbox),
    )


def tickets_of(db: sqlite3.Connection, sandbox: int) -> list[str]:
    """Select the tickets of a sandbox."""
    return [row[0] for row in db.execute("SELECT ticket FROM tickets WHERE sandbox = ?", (sandbox,))]


def names_others(db: sqlite3.Connection, sandbox: int, tickets: Sequence[str]) -> bool:
    """Return whether the sandbox was confirmed with tickets, none of which is in ``tickets``."""
    row = db.execute("SELECT named_tickets, confirmed_at FROM sandboxes WHERE id = ?", (sandbox,)).fetchone()
    return bool(row[1]) and not set(row[0].split()) & set(tickets)


def has_named_tickets(db: sqlite3.Connection, sandbox: int) -> bool:
    """Tell whether the completed run's record names tickets of this sandbox."""
    return bool(db.execute("SELECT named_tickets FROM sandboxes WHERE id = ?", (sandbox,)).fetchone()[0])


def confirm(db: sqlite3.Connection, sandbox: int, now: int) -> str:
    """Confirm a sandbox if all tickets that its run's record names are here; else the reason why not.

    Tickets that the record does not name are no part of the completed run: their files are dropped.
    """
    row = db.execute("SELECT named_tickets, named_files FROM sandboxes WHERE id = ?", (sandbox,)).fetchone()
    named = set(row[0].split())
    if not named:
        end(db, sandbox, State.CANCELLED, now, reason="the completed run transferred its output itself")
        return ""
    held = dict(db.execute("SELECT ticket, files FROM tickets WHERE sandbox = ? AND freed = 0", (sandbox,)).fetchall())
    if named - set(held):
        return f"{len(named - set(held))} of {len(named)} hand-offs of the completed run are not on this node"
    have = sum(held[ticket] for ticket in named)
    if row[1] and have != row[1]:
        return f"the run's record names {row[1]} files, this node holds {have} of it"
    unnamed = [(ticket,) for ticket in set(held) - named]
    of_ticket = "ticket = (SELECT id FROM tickets WHERE ticket = ?)"
    move_files(db, {FileState.WAITING}, FileState.DROPPED, condition=of_ticket, facts=unnamed)
    _drop_repeated(db, sandbox)
    set_state(db, sandbox, State.CONFIRMED, now)
    db.execute("UPDATE sandboxes SET confirmed_at = ? WHERE id = ?", (now, sandbox))
    return ""


def _drop_repeated(db: sqlite3.Connection, sandbox: int) -> None:
    """Drop all but the last of files with the same URL, as a plugin does that sends HTCondor's list in its order."""
    last = (
        "SELECT ticket, position, max((ticket << 32) + position) FROM files "
        f"WHERE sandbox = ? AND state = {_WAITING} GROUP BY url"
    )
    repeated = f"sandbox = ? AND (ticket, position) NOT IN (SELECT ticket, position FROM ({last}))"
    move_files(db, {FileState.WAITING}, FileState.DROPPED, condition=repeated, facts=[(sandbox, sandbox)])


# ---- moving ----------------------------------------------------------------------------------------------------------


def move_files(
    db: sqlite3.Connection,
    old: Collection[FileState],
    new: FileState,
    condition: str,
    facts: Iterable[Sequence[Any]],
    also: str = "",
) -> int:
    """Move files from any of the states ``old`` to ``new``. Files in other states stay as they are. Return how many.

    No other function changes the state of a file.

    :param condition: which files, in SQL. :param facts: values for the marks in ``also``, then in ``condition``; for
        each group of files one sequence. :param also: other columns to set, in SQL, each with a comma behind.
    :raises IllegalMove: the table does not allow one of the moves.
    """
    for state in old:
        move_file(state, new)
    is_old = f"state IN ({', '.join(str(int(state)) for state in sorted(old))})"
    return db.executemany(f"UPDATE files SET {also} state = {new:d} WHERE {is_old} AND {condition}", facts).rowcount


def claim_files(
    db: sqlite3.Connection, sandbox: int, destination: int, now: int, most_files: int, most_bytes: int
) -> list[StoredFile]:
    """Mark waiting files of a sandbox as moving, with one more attempt. Return them as they are now.

    The first file may have any size, further files only up to the bounds.
    """
    cursor = db.execute(
        f"SELECT {FILE_COLUMNS} FROM files f JOIN tickets t ON t.id = f.ticket WHERE f.sandbox = ? AND f.state = ? "
        "AND f.destination = ? AND f.next_attempt <= ? ORDER BY f.next_attempt, f.size LIMIT ?",
        (sandbox, FileState.WAITING, destination, now, most_files),
    )
    taken: list[StoredFile] = []
    room = most_bytes
    for item in map(stored_file, cursor):
        if taken and item.size_bytes > room:
            break
        room -= item.size_bytes
        facts = replace(item.facts, began_at=now)
        taken.append(replace(item, state=FileState.MOVING, attempts=item.attempts + 1, facts=facts))
    places = [(now, item.ticket_id, item.position) for item in taken]
    also = "attempts = attempts + 1, began_at = ?,"
    move_files(
        db, {FileState.WAITING}, FileState.MOVING, condition="ticket = ? AND position = ?", facts=places, also=also
    )
    return taken


def keep_receipts(db: sqlite3.Connection, begun: Iterable[tuple[str, int, int]]) -> None:
    """Record files that will be given to a custodian. :param begun: receipt, ticket and position of each."""
    db.executemany("UPDATE files SET digest = ? WHERE ticket = ? AND position = ?", begun)


def record_results(db: sqlite3.Connection, results: Iterable[StoredFile]) -> None:
    """Record the results of a batch. Files that were dropped while it ran stay dropped.

    A file that a custodian may have keeps its receipt, by which the custodian can be asked.

    :param results: the files as they are now.
    """
    also = "digest = CASE WHEN ? THEN ? ELSE digest END, " + "".join(
        f"{name} = ?, " for name in (*_RESULT, *FACT_COLUMNS)
    )
    by_state: dict[FileState, list[StoredFile]] = {}
    for item in results:
        by_state.setdefault(item.state, []).append(item)
    for state, alike in by_state.items():
        facts = (
            (
                state in AWAY_FILES,
                item.proof,
                *attrgetter(*_RESULT)(item),
                *astuple(item.facts),
                item.ticket_id,
                item.position,
            )
            for item in alike
        )
        move_files(db, {FileState.MOVING}, new=state, condition="ticket = ? AND position = ?", facts=facts, also=also)


def note_failures(db: sqlite3.Connection, sandbox: int, now: int) -> None:
    """Record the time since which the last attempt of some undelivered file of a sandbox has failed."""
    fails = f"SELECT 1 FROM files WHERE sandbox = :sandbox AND {IS_LEFT} AND error_code != 0"
    db.execute(
        f"UPDATE sandboxes SET failing_since = CASE WHEN NOT EXISTS ({fails}) THEN 0 "
        "WHEN failing_since THEN failing_since ELSE :now END WHERE id = :sandbox",
        {"sandbox": sandbox, "now": now},
    )


def keep_attempts(db: sqlite3.Connection, sandbox: int, attempts: int, excused: int) -> None:
    """Record the attempts of a file in its sandbox. :param excused: attempts that do not count.

    The difference of both columns is the largest number of counted attempts of any file.
    """
    db.execute(
        "UPDATE sandboxes SET attempts = max(attempts, :all), "
        "excused = max(attempts, :all) - max(attempts - excused, :all - :excused) WHERE id = :sandbox",
        {"all": attempts, "excused": excused, "sandbox": sandbox},
    )


def wake(
    db: sqlite3.Connection, sandboxes: Iterable[int], destinations: Iterable[int], codes: Iterable[ErrorClass], now: int
) -> set[int]:
    """Make files due now that wait after a failure with any of the codes, because their server is back."""
    marks = ",".join(str(kind.code) for kind in codes)
    places = ",".join(str(int(place)) for place in destinations)
    woken = set()
    for sandbox in sandboxes:
        cursor = db.execute(
            f"UPDATE files SET next_attempt = ? WHERE sandbox = ? AND state = {_WAITING} AND destination IN ({places}) "
            f"AND error_code IN ({marks}) AND next_attempt > ?",
            (now, sandbox, now),
        )
        if cursor.rowcount:
            touch(db, sandbox)
            woken.add(sandbox)
    return woken


def shorten_waits(db: sqlite3.Connection, now: int, longest_s: float) -> set[int]:
    """Make files due now that wait much longer than ``longest_s``, because the clock was set back. Return sandboxes.

    Up to twice as long is normal: waits have a random part, and some servers ask for longer waits.
    """
    late, waiting = now + int(2 * longest_s), f"error_code != 0 AND state = {_WAITING} AND next_attempt > ?"
    rows = db.execute(f"SELECT DISTINCT sandbox FROM files WHERE {waiting}", (late,)).fetchall()
    db.execute(f"UPDATE files SET next_attempt = ? WHERE {waiting}", (now, late))
    for (sandbox,) in rows:
        touch(db, sandbox)
    return {int(sandbox) for (sandbox,) in rows}


def keep_ages(db: sqlite3.Connection, jump_s: int, now: int) -> set[int]:
    """Adjust retention times after a jump of the clock, so that nothing is deleted early. Return the sandboxes.

    :param jump_s: forward: earlier times move by the same. Negative, backwards: times in the future become now.
    :param now: by the clock as it is.
    """
    moved = "CASE WHEN {0} BETWEEN 1 AND :before THEN {0} + :jump ELSE {0} END" if jump_s > 0 else "min({0}, :now)"
    facts = {"before": now - jump_s, "jump": jump_s, "now": now}
    names = ("accepted_at", "confirmed_at", "retried_at", "ended_at", "failing_since")
    db.execute(f"UPDATE sandboxes SET {', '.join(f'{name} = {moved.format(name)}' for name in names)}", facts)
    for table in ("fences", "unknown"):
        db.execute(f"UPDATE {table} SET at = {moved.format('at')}", facts)
    return {int(row[0]) for row in db.execute("SELECT id FROM sandboxes")}


def touch(db: sqlite3.Connection, sandbox: int) -> None:
    """Count a change of this sandbox that reports show."""
    db.execute("UPDATE sandboxes SET change = change + 1 WHERE id = ?", (sandbox,))


def fresh_attempts(db: sqlite3.Connection, sandbox: int, now: int) -> None:
    """Make files that failed or wait due now, as if they had been accepted now and never tried."""
    move_files(db, {FileState.FAILED}, FileState.WAITING, condition="sandbox = ?", facts=[(sandbox,)])
    db.execute(
        "UPDATE files SET next_attempt = 0, attempts = 0, excused = 0, error_code = 0, of_node = 0 "
        f"WHERE sandbox = ? AND state = {_WAITING}",
        (sandbox,),
    )
    db.execute(
        "UPDATE sandboxes SET attempts = 0, excused = 0, failing_since = 0, retried_at = ?, change = change + 1 "
        "WHERE id = ?",
        (now, sandbox),
    )


def due_now(db: sqlite3.Connection, sandboxes: Iterable[int], now: int) -> set[int]:
    """Make waiting files of sandboxes due now, with their attempts unchanged. Return the sandboxes touched."""
    woken = set()
    for sandbox in sandboxes:
        sql = f"UPDATE files SET next_attempt = ? WHERE sandbox = ? AND state = {_WAITING} AND next_attempt > ?"
        if db.execute(sql, (now, sandbox, now)).rowcount:
            touch(db, sandbox)
            woken.add(sandbox)
    return woken


def moving_back(db: sqlite3.Connection, sandbox: int, destination: int | None = None) -> int:
    """Let files wait again that were in a mover without a result. The attempt does not count. Return their number."""
    which, also = "sandbox = ? AND (? IS NULL OR destination = ?)", "attempts = max(0, attempts - 1),"
    facts = [(sandbox, destination, destination)]
    return move_files(db, {FileState.MOVING}, FileState.WAITING, condition=which, facts=facts, also=also)


def activate(db: sqlite3.Connection, sandboxes: Iterable[int], now: int) -> list[int]:
    """Give sandboxes that wait an active place in their data slots. Return the sandboxes that got one."""
    activated = [sandbox for sandbox in sandboxes if state_of(db, sandbox) in (State.CONFIRMED, State.RETRY_WAIT)]
    for sandbox in activated:
        set_state(db, sandbox, State.LEASED, now)
    return activated


def deactivate(db: sqlite3.Connection, sandbox: int, now: int) -> bool:
    """Take back an active place from which nothing was sent. Return False if the sandbox has none."""
    if state_of(db, sandbox) is not State.LEASED:
        return False
    set_state(db, sandbox, State.CONFIRMED, now)
    return True


def fail_waiting(db: sqlite3.Connection, sandbox: int) -> int:
    """Give up all files that wait. Return their number."""
    return move_files(db, {FileState.WAITING}, FileState.FAILED, condition="sandbox = ?", facts=[(sandbox,)])


def fail_tried(db: sqlite3.Connection, sandbox: int, unreachable: Iterable[ErrorClass]) -> int:
    """Give up the waiting files that were tried. Return their number.

    An attempt that did not reach a server counts for all files of the sandbox with this destination.
    """
    codes = ",".join(str(kind.code) for kind in unreachable)
    away = f"SELECT destination FROM files WHERE sandbox = ? AND {IS_STILL} AND error_code IN ({codes})"
    tried = f"sandbox = ? AND (attempts > 0 OR destination IN ({away}))"
    return move_files(db, {FileState.WAITING}, FileState.FAILED, condition=tried, facts=[(sandbox, sandbox)])


def has_waiting(db: sqlite3.Connection, sandbox: int) -> bool:
    """Return whether files of a sandbox wait to be sent."""
    query = f"SELECT EXISTS (SELECT 1 FROM files WHERE sandbox = ? AND state = {_WAITING})"
    return bool(db.execute(query, (sandbox,)).fetchone()[0])


# ---- the end ---------------------------------------------------------------------------------------------------------


def mark_freed(db: sqlite3.Connection, ticket: str) -> None:
    """Record that the bytes of a ticket, with its credentials, are freed."""
    db.execute("UPDATE tickets SET freed = 1 WHERE ticket = ?", (ticket,))
    db.execute("DELETE FROM credentials WHERE ticket = (SELECT id FROM tickets WHERE ticket = ?)", (ticket,))


def record_released(db: sqlite3.Connection, sandbox: int, tickets: Iterable[str], now: int) -> list[int]:
    """Record that the bytes of tickets are freed. DELIVERED becomes RELEASED. Remove the record if it may go."""
    for ticket in tickets:
        mark_freed(db, ticket)
    row = db.execute("SELECT state, forgettable FROM sandboxes WHERE id = ?", (sandbox,)).fetchone()
    (held,) = db.execute("SELECT count(*) FROM tickets WHERE sandbox = ? AND freed = 0", (sandbox,)).fetchone()
    if row is not None and not held:
        if STATE_OF[row[0]] is State.DELIVERED:
            _keep_end_time(db, sandbox, now)
        if row[1]:
            forget(db, sandbox)
    return [sandbox]


def _keep_end_time(db: sqlite3.Connection, sandbox: int, now: int) -> None:
    before = times(db, sandbox)
    set_state(db, sandbox, State.RELEASED, now=before.ended_at or now, reason=before.reason)


def is_wanted(db: sqlite3.Connection, ticket: str) -> bool:
    """Tell whether bytes of this ticket are still needed."""
    query = (
        f"SELECT EXISTS (SELECT 1 FROM files WHERE ticket = (SELECT id FROM tickets WHERE ticket = ?) AND {IS_LEFT})"
    )
    return bool(db.execute(query, (ticket,)).fetchone()[0])


def dropped_tickets(db: sqlite3.Connection, sandbox: int) -> list[str]:
    """Select tickets of a sandbox whose bytes are in the spool although no file is needed any more."""
    rows = db.execute(
        "SELECT ticket FROM tickets t WHERE sandbox = ? AND freed = 0 AND NOT EXISTS "
        f"(SELECT 1 FROM files WHERE files.ticket = t.id AND {IS_LEFT})",
        (sandbox,),
    )
    return [row[0] for row in rows]


def may_forget(db: sqlite3.Connection, sandbox: int) -> None:
    """Let the record go once the bytes are freed, because the access point has recorded the end."""
    db.execute("UPDATE sandboxes SET forgettable = 1, change = change + 1 WHERE id = ?", (sandbox,))


def forget(db: sqlite3.Connection, sandbox: int) -> None:
    """Remove all records of a sandbox."""
    db.execute("DELETE FROM files WHERE ticket IN (SELECT id FROM tickets WHERE sandbox = ?)", (sandbox,))
    db.execute("DELETE FROM credentials WHERE ticket IN (SELECT id FROM tickets WHERE sandbox = ?)", (sandbox,))
    db.execute("DELETE FROM sums WHERE sandbox = ?", (sandbox,))
    db.execute("DELETE FROM tickets WHERE sandbox = ?", (sandbox,))
    db.execute("DELETE FROM sandboxes WHERE id = ?", (sandbox,))


def drop_old_fences(db: sqlite3.Connection, before: int) -> None:
    """Forget the runs of jobs without output here and without a message since this wall clock.

    Remove destinations with credentials that no file uses any more, too.
    """
    db.execute("DELETE FROM destinations WHERE surroundings != '' AND id NOT IN (SELECT destination FROM sums)")
    here = "SELECT 1 FROM sandboxes WHERE sandboxes.job = fences.job"
    db.execute(f"DELETE FROM fences WHERE at < ? AND NOT EXISTS ({here})", (before,))


# ---- output without a record -----------------------------------------------------------------------------------------


def keep_unknown(db: sqlite3.Connection, found: Iterable[str], now: int, retention_s: float) -> list[str]:
    """Record the tickets that are set aside now. Return the tickets set aside before the retention time."""
    known = {row[0] for row in db.execute("SELECT ticket FROM unknown")}
    here = set(found)
    db.executemany("DELETE FROM unknown WHERE ticket = ?", ((ticket,) for ticket in known - here))
    db.executemany("INSERT INTO unknown VALUES (?, ?)", ((ticket, now) for ticket in here - known))
    return [row[0] for row in db.execute("SELECT ticket FROM unknown WHERE at < ?", (now - retention_s,))]


def are_unknown(db: sqlite3.Connection, tickets: Iterable[str]) -> list[str]:
    """Select the tickets whose output was set aside because the ledger had no record of it."""
    query = "SELECT EXISTS (SELECT 1 FROM unknown WHERE ticket = ?)"
    return [ticket for ticket in tickets if db.execute(query, (ticket,)).fetchone()[0]]


def count_anew(db: sqlite3.Connection, now: int) -> None:
    """Count changes of all sandboxes from the wall clock on, as those of new ones.

    The ledger may be an older one. Its changes must be newer for agents than all changes that they know.
    """
    db.execute("UPDATE sandboxes SET change = max(change + 1, ?)", ((now + 1) * _CHANGES_PER_S,))


# ---- orders ----------------------------------------------------------------------------------------------------------


def acknowledged(db: sqlite3.Connection) -> dict[str, int]:
    """Read the number of the last order that was carried out, by agent."""
    return dict(db.execute("SELECT agent, number FROM orders_done").fetchall())


def acknowledge(db: sqlite3.Connection, agent: str, number: int) -> None:
    """Record that this order and all before it are done."""
    db.execute("INSERT OR REPLACE INTO orders_done VALUES (?, ?)", (agent, number))


def sandboxes_of(db: sqlite3.Connection, last: Run) -> list[tuple[int, int, State]]:
    """Select (id, run number, state) of the sandboxes of a job's runs up to this run."""
    rows = db.execute(f"SELECT id, number, state FROM sandboxes WHERE {_OF_JOB} AND number <= :number", vars(last))
    return [(row[0], row[1], STATE_OF[row[2]]) for row in rows]
