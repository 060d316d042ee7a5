"""One file of an owner while 100,000 of another owner are being sent from the same node, beside the same file alone.

A real pool with one execute point, the curl plugin as it comes, and nginx as the destination of both. Runs alone come
first, then the other owner's jobs end and hand off, and the same job runs again and again while their files move. The
time is from the job's last instruction to the destination's record of the file, and beside it the part that the
sandbox manager can do something about: from the order that confirms the run.
"""

from __future__ import annotations

import re
import statistics
import sys
import tempfile
from datetime import datetime
from pathlib import Path

from common import Figure, main

from tests.harness.destination import Destination
from tests.harness.pool import Pool, PoolError, Submission

#: A startd on a busy machine is waited for: output that is not handed off is none that waits.
_EP = """
STAGEOUT_ORDER_INTERVAL = 1
STAGEOUT_DATA_SLOT_DEPTH = 1000
STAGEOUT_HANDOFF_TIMEOUT = 20
STARTD_ENVIRONMENT = "STAGEOUT_HANDOFF_TIMEOUT=20"
"""
_AP = """
STAGEOUT_POLL_INTERVAL = 1
STAGEOUT_EDIT_INTERVAL = 5
"""
_MANY = "#!/bin/sh\nhead -c {size} /dev/urandom | split -b 1000 -d -a 5 - f\n"
_ONE = "#!/bin/sh\nhead -c 1000 /dev/urandom > one\ndate +%s.%N\n"
_CONFIRMED = re.compile(r"^(\S+) INFO order-applied .*action=confirm job=(\S+)", re.MULTILINE)


class Bench:
    """A pool and a destination."""

    def __init__(self, pool: Pool, destination: Destination) -> None:
        self.pool = pool
        self.destination = destination

    def one_file(self, name: str) -> tuple[float, float]:
        """Run bob's job; seconds from its end to its file at the destination, and those from its confirmation."""
        job = self._submit("bob", _ONE, ["one"], name, 1)
        self.pool.wait(lambda: self._arrived(name), timeout_s=300, what=f"the file of {name}")
        self.pool.wait(lambda: (job.dir / "job.out").read_text().strip(), timeout_s=60, what="the job's own stamp")
        arrived_at = self._arrived(name)
        return arrived_at - float((job.dir / "job.out").read_text()), arrived_at - self._confirmed_at(job)

    def many_files(self, jobs: int, files: int) -> None:
        """Run alice's jobs until all of their files are in custody."""
        names = [f"f{number:05d}" for number in range(files)]
        self._submit("alice", _MANY.format(size=1000 * files), names, "many", jobs)
        (ep,) = self.pool.eps
        held = ep.home / "stageout" / "sandboxes"
        self.pool.wait(lambda: self._handed_off("alice") >= jobs, timeout_s=600, what=f"hand-offs; now in {held}")

    def still_waiting(self) -> int:
        """Alice's files that are not at the destination yet."""
        (ep,) = self.pool.eps
        return sum(1 for path in (ep.home / "stageout" / "sandboxes").glob("*/*"))

    def _submit(self, user: str, script: str, outputs: list[str], place: str, jobs: int) -> Submission:
        lines = [
            "executable = job.sh",
            "should_transfer_files = YES",
            f"transfer_output_files = {', '.join(outputs)}",
            f"output_destination = {self.destination.url(place)}/$(Cluster).$(Process)",
            "request_cpus = 1",
            "request_memory = 50",
            "request_disk = 50M",
            f"queue {jobs}",
        ]
        return self.pool.submit(user, "\n".join(lines), files={"job.sh": script})

    def _arrived(self, name: str) -> float:
        rows = [row for row in self.destination.requests("PUT", name) if row["status"] < 300]
        return float(rows[0]["time"]) if rows else 0.0

    def _confirmed_at(self, job: Submission) -> float:
        """By the manager's log, on the clock of the same machine."""
        (ep,) = self.pool.eps
        for stamp, name in _CONFIRMED.findall(ep.log("SandboxManagerLog")):
            if name.split("#")[1] == job.ids[0]:
                return datetime.fromisoformat(stamp).timestamp()
        raise PoolError(f"{job} was not confirmed: its file was sent synchronously.")

    def _handed_off(self, owner: str) -> int:
        (ep,) = self.pool.eps
        return len(re.findall(rf"INFO sandbox-accepted .*owner={owner}@", ep.log("SandboxManagerLog")))


def measure(quick: bool) -> list[Figure]:
    """Run it all."""
    jobs, files, rounds = (10, 500, 3) if quick else (20, 5000, 12)
    place, pool = tempfile.TemporaryDirectory(prefix="stageout-bench-"), Pool(cpus=8, ap_config=_AP, ep_config=_EP)
    with place as name, Destination(Path(name)) as destination, pool:
        bench = Bench(pool, destination)
        bench.one_file("warm")
        alone = [bench.one_file(f"alone-{number}") for number in range(rounds)]
        bench.many_files(jobs, files)
        among = []
        for number in range(rounds):
            among.append(bench.one_file(f"among-{number}"))
            if not bench.still_waiting():
                raise PoolError(f"the {jobs * files} files were gone before the runs among them: take more.")
    return [
        _figure("from the job's end to the destination", [b[0] / a[0] for a, b in zip(alone, among)]),
        _figure("of that, from the run's confirmation", [b[1] / a[1] for a, b in zip(alone, among)]),
        *_seconds(f"bob's one file alone, {rounds} runs", alone),
        *_seconds(f"bob's one file among alice's {jobs * files:,}", among),
    ]


def _figure(what: str, ratios: list[float]) -> Figure:
    return Figure(f"among over alone, {what}: median of pairs", statistics.median(ratios), "", goal=2.0)


def _seconds(what: str, runs: list[tuple[float, float]]) -> list[Figure]:
    return [
        Figure(f"{what}: median from the job's end", statistics.median(run[0] for run in runs), "s"),
        Figure(f"{what}: median from the confirmation", statistics.median(run[1] for run in runs), "s"),
    ]


if __name__ == "__main__":
    sys.exit(main("fairness", measure))
