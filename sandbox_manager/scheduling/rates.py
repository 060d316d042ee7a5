"""The rates of destinations, kept over restarts: one row of the ledger per server, the last thousand of them."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sandbox_manager.scheduling import deadlines
from sandbox_manager.scheduling.deadlines import Observed
from stageout.core.errors import ErrorClass
from stageout.core.eta import work_bytes
from stageout.core.streams import ActiveTransfer
from stageout.model.batch import BatchOutcome
from stageout.model.file import StoredFile

MOST_SERVERS = 1000


@dataclass(frozen=True)
class ServerRate:
    """The knowledge of a server. :param level: files at once that were good last; 0: not known."""

    observed: Observed
    level: int = 0


class Rates:
    """The picture in memory, and the changes that keep it on the disk."""

    def __init__(self) -> None:
        self._rates: dict[str, ServerRate] = {}

    def load(self, db: sqlite3.Connection) -> None:
        """Read the table."""
        rows = db.execute("SELECT server, log_rate, spread, at, level FROM rates")
        self._rates = {row[0]: ServerRate(Observed(*row[1:4]), row[4]) for row in rows}

    def of(self, server: str) -> Observed | None:
        """Return the knowledge of a server's rate."""
        known = self._rates.get(server)
        return known.observed if known else None

    def sending_s(self, servers: Collection[str], files: int, size_bytes: int, now: float) -> float:
        """Return the seconds that one call of a plugin usually needs; infinity when a server's rate is not known."""
        known = [self.of(server) for server in servers]
        if not all(deadlines.is_fresh(one, now) for one in known):
            return math.inf
        return work_bytes(files, size_bytes) / min(one.rate_bytes_s for one in known if one)

    def level(self, server: str, now: float) -> int:
        """Files at once that were good last; 0 when nobody knows (any more)."""
        known = self._rates.get(server)
        return known.level if known and deadlines.is_fresh(known.observed, now) else 0

    def after(
        self, server: str, files: Sequence[StoredFile], outcome: BatchOutcome, took_s: float, level: int, now: float
    ) -> ServerRate | None:
        """Return the knowledge after a batch; None when it adds nothing.

        :param took_s: time of the plugin's call. :param level: files at once that were chosen last.
        """
        observed = _after(known=self.of(server), files=files, outcome=outcome, took_s=took_s, now=now)
        if observed is None:
            return None
        self._rates[server] = ServerRate(observed, level)
        return self._rates[server]


def _after(
    known: Observed | None, files: Sequence[StoredFile], outcome: BatchOutcome, took_s: float, now: float
) -> Observed | None:
    codes = {result.error_code for result in (*outcome.waiting, *outcome.failed, *outcome.lost)}
    size_bytes = sum(item.size_bytes for item in files)
    if ErrorClass.DEADLINE.code in codes:
        return deadlines.missed(known, files=len(files), size_bytes=size_bytes, took_s=took_s, now=now)
    if ErrorClass.STALLED.code in codes:
        return deadlines.stalled(known, now)
    if codes or not outcome.delivered:
        return None
    return deadlines.learn(known, files=len(files), size_bytes=size_bytes, took_s=took_s, now=now)


def call_limits(
    known: Observed | None, files: Sequence[StoredFile], transfer: ActiveTransfer, most_s: float, now: float
) -> tuple[float, dict[str, str]]:
    """Return the time limit of a plugin's call, and its environment for streams and stalls.

    :param most_s: the administrator's limit.
    """
    size_bytes = sum(item.size_bytes for item in files)
    limit_s = deadlines.limit_s(known, files=len(files), size_bytes=size_bytes, most_s=most_s, now=now)
    return limit_s, call_settings(known, transfer, now)


def call_settings(known: Observed | None, transfer: ActiveTransfer, now: float) -> dict[str, str]:
    """Return the part of a call's environment that is about streams and stalls."""
    settings = {
        "STAGEOUT_CONCURRENCY": str(transfer.concurrency),
        "STAGEOUT_PARALLELISM": str(transfer.parallelism),
    }
    stall = deadlines.stall(known, transfer.concurrency, now)
    if stall is not None:
        settings["STAGEOUT_STALL_BYTES_PER_S"] = f"{stall.bytes_per_s:.0f}"
        settings["STAGEOUT_STALL_WINDOW_S"] = f"{stall.window_s:.0f}"
    return settings


def keep(db: sqlite3.Connection, server: str, known: ServerRate) -> None:
    """Write what is known of a server; of more than :data:`MOST_SERVERS` the oldest is forgotten."""
    one = known.observed
    row = (server, one.log_rate, one.spread, int(one.at), known.level)
    db.execute("INSERT OR REPLACE INTO rates (server, log_rate, spread, at, level) VALUES (?, ?, ?, ?, ?)", row)
    db.execute(
        "DELETE FROM rates WHERE server IN (SELECT server FROM rates ORDER BY at DESC LIMIT -1 OFFSET ?)",
        (MOST_SERVERS,),
    )
