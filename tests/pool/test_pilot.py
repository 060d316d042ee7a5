"""Pilots on a real pool: an ordinary user, a token that may only advertise, and an end that comes on short notice."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from tests.harness.narrow_destination import NarrowDestination
from tests.harness.pool import Pool
from tests.harness.pool.node import PILOT, Node
from tests.harness.pool.pytest_plugin import keep_logs
from tests.pool.conftest import Site, open_directory, pool_settings, wait_until_acquainted

pytestmark = pytest.mark.pool

#: As for a site that gives 30 s.
KNOBS = """
STAGEOUT_PILOT_GRACE = 18
MachineMaxVacateTime = 6
STAGEOUT_DATA_SLOT_DEPTH = 20
"""
FILE_BYTES = 1_000_000
SLOW_MB_S, FAST_MB_S = 0.15, 100.0


@dataclass
class Pilots:
    """Two pilots, and a destination that can be made to take far less than they make."""

    pool: Pool
    narrow: NarrowDestination
    site: Site

    def submit(self, jobs: int) -> list[str]:
        """Jobs with one output file each; their ids."""
        job = self.site.submit(
            outputs=("out",), env=f"SIZE={FILE_BYTES}", queue=f"queue {jobs}", extra="output = $(Process).stdout",
            destination=f"{self.narrow.url}/$(Cluster).$(Process)",
        )  # fmt: skip
        self.directory = job.dir
        return list(job.ids)

    def rate(self, mb_s: float) -> None:
        """Let the destination take so much; what is being sent is cut off."""
        self.narrow.close()
        self.narrow.rate_mb_s = mb_s
        self.narrow.start()

    def spooled(self, node: Node) -> int:
        """Hand-offs that the pilot holds."""
        return len(list((node.home / "stageout" / "sandboxes").glob("*/*")))

    def puts(self, job: str) -> int:
        """Complete uploads of a job's file."""
        return sum(item.path.endswith(f"/{job}/out") for item in self.narrow.transfers() if 200 <= item.status < 300)

    def is_right(self, job: str) -> bool:
        """Is what the job's last run wrote at the destination, byte for byte?"""
        digest, _ = (self.directory / f"{job.partition('.')[2]}.stdout").read_text().split(" ", 1)
        found = self.narrow.root / job / "out"
        return found.exists() and hashlib.sha256(found.read_bytes()).hexdigest() == digest

    def wait_all_left(self, jobs: list[str]) -> None:
        self.pool.wait(lambda: all(self.pool.q(job) is None for job in jobs), timeout_s=180, what="all jobs to leave")


@pytest.fixture(scope="module")
def pilots(stageout_pools: Any, destination: Any) -> Iterator[Pilots]:
    spec = dataclasses.replace(PILOT, config=KNOBS)
    with ExitStack() as stack:
        home = stack.enter_context(open_directory("pilots"))
        narrow = stack.enter_context(NarrowDestination(home / "dest", SLOW_MB_S))
        settings = {"execute_points": [spec, spec], "cpus": 4, "binds": (home,), **pool_settings(home)}
        pool = stack.enter_context(stageout_pools(version="25.14", **settings))
        yield Pilots(pool, narrow, Site(pool, destination, "pilot", home / "gates"))


def test_a_pilot_that_cannot_finish_says_so_and_only_unfinished_jobs_run_again(
    pilots: Pilots, request: pytest.FixtureRequest
) -> None:
    pool = pilots.pool
    victim, other = pool.eps
    other.stop()
    jobs = pilots.submit(10)
    pool.wait(
        lambda: all((pool.q(job, ["JobStatus"]) or {"JobStatus": 4})["JobStatus"] == 4 for job in jobs),
        timeout_s=150,
        what="all jobs to have computed",
    )
    keep_logs(request, [pool])
    assert pilots.spooled(victim) >= 5, "the destination was too quick for this test"
    pool.wait(lambda: any(pilots.puts(job) for job in jobs), timeout_s=60, what="a delivery before the end")
    victim.kill("condor_master", signal.SIGTERM)
    pool.wait(lambda: not victim.pids("condor_master"), timeout_s=60, what="the pilot's end")

    log = victim.log("SandboxManagerLog")
    lost = {found[1] for found in re.finditer(r" sandbox-lost job=[^#]+#([0-9.]+)#", log)}
    told = re.search(r'output-endangered bytes=(\d+) jobs="([^"]+)"', log)
    assert told and int(told[1]) >= len(lost) * FILE_BYTES and set(re.findall(r"#([0-9.]+)=", told[2])) >= lost
    delivered = {job for job in jobs if pilots.puts(job)}
    # Of an upload whose plugin was killed all bytes may have been on their way: it arrives, and nobody is told.
    assert lost | delivered == set(jobs)
    assert len(lost - delivered) >= 3 and delivered - lost

    pilots.rate(FAST_MB_S)
    other.start()
    pilots.wait_all_left(jobs)
    for job in jobs:
        past = pool.history(job) or {}
        assert past.get("StageOutReruns", 0) == (1 if job in lost else 0), (job, past.get("StageOutReason"))
        assert past["StageOutState"] == "Delivered"
        assert pilots.puts(job) == 1 or (job in lost and pilots.puts(job) == 2), job
        assert pilots.is_right(job), job
    reasons = [row for row in pool.ap.log("ScheddAgentLog").splitlines() if "effect=Rerun" in row]
    assert len(reasons) == len(lost)
    assert all("the pilot ended before the output could be delivered" in row for row in reasons)


def test_output_on_its_way_when_the_pilot_stops_is_delivered_once(
    pilots: Pilots, request: pytest.FixtureRequest
) -> None:
    """The job has ended and its plugin is at work when the signal comes: the manager outlives the startd's jobs."""
    pool, site = pilots.pool, pilots.site
    victim, other = pool.eps
    other.stop()
    victim.start()
    wait_until_acquainted(pool, [victim])
    site.close_gate("stopping", "before")
    job = site.submit(outputs=("out",), place="gate-stopping")
    keep_logs(request, [pool])
    pool.wait(lambda: site.at_gate("stopping", "before"), timeout_s=90, what="the plugin to stand at the gate")
    victim.kill("condor_master", signal.SIGTERM)
    pool.wait(lambda: "shutdown graceful" in victim.log("startd"), what="the startd to be told")
    site.open_gate("stopping", "before")
    pool.wait(lambda: not victim.pids("condor_master"), timeout_s=60, what="the pilot's end")
    log = victim.log("SandboxManagerLog")
    assert log.index(" sandbox-accepted ") < log.index(" shutdown-started "), (
        "the manager was stopped before the startd was gone"
    )
    other.start()
    site.wait_left(job, timeout_s=120)
    site.check_delivered(job, "gate-stopping")
    assert len(site.puts(job, "gate-stopping")) == 1
