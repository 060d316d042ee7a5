"""Misfortunes of all kinds on a real pool: ``make chaos MINUTES=30``.

Besides the deaths of :mod:`tests.pool.storm`, the JobRouter manages some jobs, a ledger is put back from an older copy,
a byte in a ledger flips, and the disk refuses data once. In every other minute, hostile users work on the execute
points and on the access point, so that the delay that they cause for others is seen.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.harness.destination import Destination
from tests.harness.pool import Node, Pool, Submission
from tests.harness.pool.errors import PoolError
from tests.pool.conftest import REFUSED_DATA, Site, open_directory, pool_settings, wait_until_acquainted
from tests.pool.hostile import NO_WALL
from tests.pool.storm import USUAL, Misfortune, Storm
from tests.pool.storm_jobs import PLAIN, ROUTE, ROUTED
from tests.pool.test_forged_records import forged_facts, submit_forger
from tests.pool.test_local_users import CONNECTIONS, sockets, spool_of

_HOSTILE = "carol"
_WINDOW_S = 60.0
_SIZE_BYTES = 4 << 20


@dataclass
class Chaos(Storm):
    """A storm with hostile users in every other minute.

    :ivar measured: when each honest job was submitted, and whether hostile users were at work then.
    """

    copies: dict[str, Path] = field(default_factory=dict)
    measured: dict[Submission, tuple[float, bool]] = field(default_factory=dict)
    forged: int = 0
    _attacks: list[subprocess.Popen[str]] = field(default_factory=list)
    _begin_s: float = field(default_factory=time.monotonic)

    def _submit(self) -> None:
        is_hostile = self.has_hostile_users()
        self._attack(is_hostile)
        before = len(self.submitted)
        super()._submit()
        for job in self.submitted[before:]:
            self.measured[job] = time.time(), is_hostile
        self._forge(self.random.choice(self.submitted[-10:]), is_hostile)

    def has_hostile_users(self) -> bool:
        """Tell whether hostile users are at work now: in every other minute."""
        return int((time.monotonic() - self._begin_s) // _WINDOW_S) % 2 == 1

    def _forge(self, victim: Submission, is_hostile: bool) -> None:
        """A job of the hostile user forges a record of the victim's run; in calm minutes the same job tells no lies."""
        with contextlib.suppress(PoolError):
            ad = self.site.pool.q(victim)
            if ad is not None:
                submit_forger(self.site, _HOSTILE, forged_facts(ad) if is_hostile else 'TransferData = "nothing"')
                self.forged += is_hostile

    def _attack(self, is_hostile: bool) -> None:
        """The hostile user has 190 connections with unfinished messages on each execute point, or none."""
        if is_hostile and any(process.poll() is None for process in self._attacks):
            return
        for process in self._attacks:
            process.kill()
            process.wait()  # a namespace does not end before its last process is reaped
        self._attacks = [self._connect(node) for node in self.site.pool.eps if node.is_up] if is_hostile else []

    def _connect(self, node: Node) -> subprocess.Popen[str]:
        argv = ["python3", "-c", CONNECTIONS, sockets(node)[0], "190", str(_SIZE_BYTES)]
        command, environment = node.command(argv, user=_HOSTILE, cwd="/")
        silent = subprocess.DEVNULL
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=silent, stderr=silent, text=True
        )  # fmt: skip

    def _calm_down(self) -> None:
        self._attack(False)
        super()._calm_down()
        # Texts of a plugin end the shadow of its own job again and again: such a job never ends.
        for options in ((), ("-forcex",)):
            self.site.pool.ap.run(["condor_rm", *options, _HOSTILE], check=False)

    def summary(self) -> str:
        """Return a table of all that happened, and the delay that hostile users caused."""
        return f"{super().summary()}\n{self.forged} records forged; {self._delay()}"

    def _delay(self) -> str:
        found: dict[bool, list[float]] = {True: [], False: []}
        for job, (submitted_at, is_hostile) in self.measured.items():
            with contextlib.suppress(OSError, AssertionError):
                arrived = [self.site.file(job, name).stat().st_mtime for name in self.site.wrote(job)]
                found[is_hostile].append(max(arrived) - submitted_at)
        if min(map(len, found.values())) < 10:
            return "too few jobs to compare delays"
        calm_s, hostile_s = (statistics.median(found[hostile]) for hostile in (False, True))
        return (
            f"median from submission to delivery {calm_s:.1f} s in {len(found[False])} calm jobs, {hostile_s:.1f} s in "
            f"{len(found[True])} hostile ones ({hostile_s / calm_s - 1:+.0%})"
        )


def restore_ledger(storm: Storm) -> None:
    """Put a ledger back from the copy that the last call made, as after the loss of its disk, and make a new copy."""
    assert isinstance(storm, Chaos)
    node = storm.random.choice(storm.site.pool.eps)
    with _manager_down(node) as ledger:
        last, copy = storm.copies.get(node.name), storm.site.gates / f"ledger-{node.name}-{time.monotonic_ns()}"
        shutil.copytree(ledger, copy)
        storm.copies[node.name] = copy
        if last is not None:
            for path in ledger.glob("ledger.sqlite*"):
                path.unlink()
            for path in last.glob("ledger.sqlite*"):
                shutil.copy2(path, ledger / path.name)
            storm.deaths["ledger restored"] += 1


def flip_byte(storm: Storm) -> None:
    """A byte of a URL in a ledger is no character any more."""
    with _manager_down(storm.random.choice(storm.site.pool.eps)) as ledger:
        path = ledger / "ledger.sqlite"
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            rows = db.execute("SELECT CAST(url AS BLOB) FROM files ORDER BY random() LIMIT 1").fetchall()
        data = path.read_bytes()
        at = data.find(rows[0][0]) if rows else -1
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + len(rows[0][0]) // 2)
                file.write(b"\xff")
            storm.deaths["byte flipped"] += 1


def refuse_data(storm: Storm) -> None:
    """The disk of an execute point refuses data once."""
    storm.site.arm(REFUSED_DATA)
    storm.deaths["data refused"] += 1


KINDS = (
    *USUAL,
    Misfortune("ledger restored", 12, restore_ledger),
    Misfortune("byte flipped", 12, flip_byte),
    Misfortune("data refused", 12, refuse_data),
)


@contextmanager
def _manager_down(node: Node) -> Iterator[Path]:
    """The manager of a node is dead and does not come back before the end. Gives the directory of its ledger."""
    masters = node.pids("condor_master")
    starters = [_parent(pid) for pid in masters]  # each stops with its child, and does not go on by itself
    for pid in masters:
        os.kill(pid, signal.SIGSTOP)
    try:
        with contextlib.suppress(PoolError):
            node.kill("sandbox-manager", signal.SIGKILL)
        yield spool_of(node) / "ledger"
    finally:
        for pid in (*masters, *starters):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def main(argv: list[str] | None = None) -> int:
    """Half an hour of it, with a line at the end; 1 when something was lost or wrong."""
    options = argparse.ArgumentParser(description="Run misfortunes of all kinds on a real pool.")
    options.add_argument("--minutes", type=float, default=30)
    options.add_argument("--jobs", type=int, default=0, help="how many in all (default: 20 a minute)")
    options.add_argument("--seed", type=int, default=int(time.time()))
    chosen = options.parse_args(argv)
    jobs = chosen.jobs or int(20 * chosen.minutes)
    with contextlib.ExitStack() as stack:
        shared = stack.enter_context(open_directory("chaos"))
        destination, loot = (
            stack.enter_context(Destination(stack.enter_context(open_directory(name))))
            for name in ("destination", "loot")
        )
        settings = {"version": "25.14", "execute_points": 2, "cpus": 8, "binds": (shared,), **pool_settings(shared)}
        settings["ap_config"] += ROUTE + NO_WALL
        with Pool(**settings) as pool:
            wait_until_acquainted(pool)
            site = Site(pool, destination, "chaos", shared / "gates")
            chaos = Chaos(
                site, jobs, chosen.minutes * 60, 8, chosen.seed, KINDS, loot, (PLAIN, ROUTED)
            )  # fmt: skip
            wrong = ["it did not come to its end"]
            try:
                chaos.rage()
                chaos.wait_for_ends(timeout_s=900)
                wrong = chaos.wrong()
            finally:
                if wrong:
                    pool.collect_logs(Path("test-logs/chaos"))
                print("\n".join(wrong))
                print(f"{chaos.summary()}\nchaos: seed {chosen.seed}: {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
