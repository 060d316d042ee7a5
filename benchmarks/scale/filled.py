"""A node with a million files in custody: made once, as hand-offs would have left it, then started from."""

from __future__ import annotations

import os
import secrets
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from sandbox_manager.custody import ledger, updates
from stageout.core.clock import boot_id
from stageout.model.file import StoredFile
from stageout.model.run import RunFacts
from stageout.model.sandbox import SlotKey
from stageout.wire.custody import Run

NOW = 1_700_000_000
OWNERS = 20
SIZE_BYTES = 4096
_LINKS_OF_ONE = 30_000
_NEXT_ATTEMPT_AT = 4_000_000_000


@dataclass(frozen=True)
class Fill:
    """How much is in custody. All is confirmed, was tried once, and waits for one server's next attempt."""

    sandboxes: int
    files_each: int

    @property
    def files(self) -> int:
        """In all."""
        return self.sandboxes * self.files_each


def fill(spool: Path, amount: Fill) -> None:
    """Make spool and ledger below ``spool``. Files of a sandbox are links to a few large-count inodes."""
    for name in ("run", "intake", "sandboxes", "movers", "ledger"):
        (spool / name).mkdir(parents=True)
    book = ledger.Ledger(spool / "ledger" / "ledger.sqlite")
    book.close()
    db = sqlite3.connect(spool / "ledger" / "ledger.sqlite", isolation_level=None)
    db.execute("PRAGMA synchronous = OFF")
    linked, source = _LINKS_OF_ONE, spool
    db.execute("BEGIN")
    for number in range(amount.sandboxes):
        if linked + amount.files_each > _LINKS_OF_ONE:
            source, linked = spool / f"source{number}", 0
            source.write_bytes(b"x" * SIZE_BYTES)
        ticket = secrets.token_hex(16)
        _link(spool / "sandboxes" / ticket, source, amount.files_each)
        linked += amount.files_each
        _record(db, number, ticket, source.stat(), amount.files_each)
    db.execute("COMMIT")
    db.close()


def _link(place: Path, source: Path, files: int) -> None:
    place.mkdir()
    for position in range(files):
        os.link(source, place / str(position))


def _record(db: sqlite3.Connection, number: int, ticket: str, found: os.stat_result, files: int) -> None:
    owner = f"owner{number % OWNERS}"
    run = Run(f"schedd.example.org#{number}.0#{NOW}", 1, f"{owner}@example.org")
    slot = SlotKey("ep.example.org", 1, number % 8 + 1)
    new = RunFacts(run, owner, 64001 + number % OWNERS, 64001, slot, f"slot1_{slot.dslot_id}@ep")
    rows = [
        StoredFile(
            position, f"https://store.example.org/{owner}/{number}/output_{position}.root", f"output_{position}.root",
            found.st_size, found.st_mtime_ns, number * files + position,
        )
        for position in range(files)
    ]  # fmt: skip
    box = updates.add_ticket(db, new, ticket, "/usr/libexec/condor/curl_plugin", rows, boot_id(), NOW)
    updates.mark_synced(db, [ticket])
    updates.name_tickets(db, box, [ticket], files, 0)
    updates.confirm(db, box, NOW)
    db.execute("UPDATE files SET next_attempt = ? WHERE sandbox = ?", (_NEXT_ATTEMPT_AT, box))
