"""Daemons that die at random under load, on a real pool: ``make storm`` for ten minutes, test_storm.py for one."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.harness.destination import Destination
from tests.harness.pool import Node, Pool, Submission
from tests.harness.pool.errors import PoolError
from tests.harness.pool.waiting import wait_until
from tests.pool.conftest import Site, open_directory, pool_settings, wait_until_acquainted
from tests.pool.hostile import NO_WALL
from tests.pool.raider import Raider

#: A startd or schedd that died is given up after this many seconds instead of HTCondor's 40 minutes.
JOB_LEASE_S = 40

#: The facts that tell why a job is still in the queue, besides all that the product writes into its ad.
_TELLING = ("ClusterId", "ProcId", "JobStatus", "NumShadowStarts", "HoldReason", "LastRejMatchReason", "RemoteHost")

_AT_THE_ACCESS_POINT = ("schedd-agent", "schedd", "collector", "condor_master")
_AT_AN_EXECUTE_POINT = ("sandbox-manager", "sandbox-manager", "startd", "condor_master")


@dataclass
class Storm:
    """Jobs that come all the time while daemons and the destination are killed and come back.

    :param jobs: how many are submitted, evenly over the time.
    :param duration_s: seconds during which daemons die.
    :param calm_s: mean seconds between two misfortunes. :param kinds: of these; empty: the usual ones.
    :param loot: server of a hostile user, who attacks the jobs all the time; None: there is none.
    """

    site: Site
    jobs: int
    duration_s: float
    calm_s: float
    seed: int
    kinds: Sequence[Misfortune] = ()
    loot: Destination | None = None
    deaths: Counter[str] = field(default_factory=Counter)
    submitted: list[Submission] = field(default_factory=list)
    released: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.kinds = self.kinds or USUAL
        self.raider = Raider(self.site, self.loot, self.submitted, self.seed) if self.loot else None
        self._others = {_job_id(ad) for ad in self.site.pool.jobs("true", ["ClusterId", "ProcId"])}

    def rage(self) -> None:
        """Submit and kill until the time is over; afterwards everything is up again."""
        start = time.monotonic()
        next_death_s = self.calm_s
        while (passed_s := time.monotonic() - start) < self.duration_s:
            if len(self.submitted) < self.jobs * passed_s / self.duration_s + 1:
                self._submit()
            elif passed_s > next_death_s:
                self._strike()
                next_death_s = passed_s + self.random.expovariate(1 / self.calm_s)
            elif self.raider and self.raider.is_due() and self.has_hostile_users():
                self.raider.strike()
            else:
                time.sleep(0.1)
        self._calm_down()
        while len(self.submitted) < self.jobs:
            self._submit()

    def has_hostile_users(self) -> bool:
        """Tell whether hostile users are at work now."""
        return True

    def wait_for_ends(self, timeout_s: float) -> None:
        """Wait until every job of the storm has left the queue; those held with a reason are released, as by owners."""
        pool = self.site.pool

        def done() -> bool:
            waiting = self._waiting(["ClusterId", "ProcId", "JobStatus", "HoldReason"])
            for ad in waiting:
                if ad["JobStatus"] == 5:
                    assert ad.get("HoldReason"), f"held without a reason: {ad}"
                    pool.release(_job_id(ad))
                    self.released += 1
            return not waiting

        wait_until(
            done, timeout_s=timeout_s, interval_s=1, what="all jobs to leave the queue", describe=self._still_there
        )

    def _waiting(self, attributes: Sequence[str] = ()) -> list[Mapping[str, Any]]:
        """Jobs in the queue but for those that were there before; also one whose submission was never answered."""
        return [ad for ad in self.site.pool.jobs("true", attributes) if _job_id(ad) not in self._others]

    def _still_there(self) -> str:
        """The jobs in the queue and the processes of every node, for the report of a wait in vain."""
        ads = self._waiting()
        jobs = [{name: ad[name] for name in ad if name in _TELLING or name.startswith("StageOut")} for ad in ads]
        nodes = (self.site.pool.ap, *self.site.pool.eps)
        alive = [f"{node.name}: {' '.join(sorted(Path(p.argv[0]).name for p in node.processes()))}" for node in nodes]
        return "\n".join([*(str(ad) for ad in jobs), *alive])

    def wrong(self) -> list[str]:
        """The faults at the end, a line each; the spools are given a minute to become empty."""
        found = self.raider.wrong() if self.raider else []
        for job in self.submitted:
            try:
                self.site.check_delivered(job)
            except AssertionError as error:
                found.append(f"{job}: {error} {self.site.pool.history(job)}")
        with contextlib.suppress(PoolError):
            self.site.pool.wait(lambda: not self._left(), timeout_s=60, what="the spools to be empty")
        return [*found, *self._left()]

    def _left(self) -> list[str]:
        """Return the output that the nodes still hold, without that of hostile users.

        A hostile user who spoils the name of a job after its hand-off keeps room of his own quota.
        """
        if self.site.spool_is_empty():
            return []
        if self.raider is None:
            return ["the spools are not empty"]
        command = ["/opt/stageout/bin/stageout", "status", "--node", "--json"]
        rows = [row for ep in self.site.pool.eps for row in json.loads(ep.run(command).stdout)["jobs"]]
        own = f"{self.raider.user}@"
        return [f"{row['job']} of {row['owner']}: {row['state']}" for row in rows if not row["owner"].startswith(own)]

    def summary(self) -> str:
        """One line with what happened."""
        histories = [self.site.pool.history(job) or {} for job in self.submitted]
        after = sum(ad.get("StageOutState") == "Delivered" for ad in histories)
        again = sum(ad.get("NumShadowStarts", 0) > 1 for ad in histories)
        dead = ", ".join(f"{name} {count}" for name, count in sorted(self.deaths.items()))
        return (
            f"{len(histories)} jobs: {after} delivered after their end, {len(histories) - after} synchronous, "
            f"{again} run again, {self.released} released from hold; killed: {dead}"
            f"{f'; {self.raider.summary()}' if self.raider else ''}"
        )

    def _submit(self) -> None:
        env = f"SIZE={self.random.choice((10, 20_000, 3_000_000))} SLEEP={self.random.randint(0, 4)}"
        outputs = tuple(f"out{n}" for n in range(1, self.random.randint(1, 3) + 1))
        extra = f"job_lease_duration = {JOB_LEASE_S}"
        with contextlib.suppress(PoolError):  # the schedd may be the one that is dead: tried again in a moment
            self.site.submit(self.random.choice(("alice", "bob")), outputs, extra=extra, env=env)
            self.submitted.append(self.site.jobs[-1])

    def _strike(self) -> None:
        """One misfortune."""
        (kind,) = self.random.choices(self.kinds, [one.weight for one in self.kinds])
        kind.strike(self)

    def kill_a_daemon(self) -> None:
        """Kill one daemon, as SIGKILL does."""
        pool = self.site.pool
        node = self.random.choice((pool.ap, *pool.eps))
        daemon = self.random.choice(_AT_THE_ACCESS_POINT if node is pool.ap else _AT_AN_EXECUTE_POINT)
        with contextlib.suppress(PoolError):  # it is not back yet from its last death
            node.kill(daemon, signal.SIGKILL)
            self.deaths[daemon] += 1
        if daemon == "condor_master":
            self._start_master(node)

    def stop_destination(self) -> None:
        """Stop the destination for some seconds."""
        self.deaths["destination"] += 1
        self.site.destination.stop()
        time.sleep(self.random.uniform(0.5, 5))
        self.site.destination.start()

    def _start_master(self, node: Node) -> None:
        """As the machine's init does: what the dead master left is ended first."""
        for process in node.processes():
            if any(part in " ".join(process.argv) for part in ("condor_", "stageout-", "/dir_")):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        node.start()

    def _calm_down(self) -> None:
        """Every daemon is running again."""
        pool = self.site.pool
        for node in (pool.ap, *pool.eps):
            for daemon in set(_AT_THE_ACCESS_POINT if node is pool.ap else _AT_AN_EXECUTE_POINT):
                pool.wait(lambda n=node, d=daemon: n.pids(d), timeout_s=120, what=f"{daemon} of {node.name}")
        if self.raider:
            self.raider.stop()


class Misfortune(NamedTuple):
    """A kind of misfortune. :param weight: how often it happens, against the others. :param strike: makes it happen."""

    name: str
    weight: float
    strike: Callable[[Storm], None]


USUAL = (Misfortune("a daemon dies", 85, Storm.kill_a_daemon), Misfortune("destination", 15, Storm.stop_destination))


def _job_id(ad: Mapping[str, Any]) -> str:
    return f"{ad['ClusterId']}.{ad['ProcId']}"


def main(argv: list[str] | None = None) -> int:
    """Ten minutes of it, with a line at the end; 1 when something was lost or wrong."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--minutes", type=float, default=10)
    options.add_argument("--jobs", type=int, default=200)
    options.add_argument("--seed", type=int, default=int(time.time()))
    chosen = options.parse_args(argv)
    with contextlib.ExitStack() as stack:
        shared = stack.enter_context(open_directory("storm"))
        destination, loot = (
            stack.enter_context(Destination(stack.enter_context(open_directory(name))))
            for name in ("destination", "loot")
        )
        settings = {"version": "25.14", "execute_points": 2, "cpus": 8, "binds": (shared,), **pool_settings(shared)}
        settings["ap_config"] += NO_WALL
        with Pool(**settings) as pool:
            wait_until_acquainted(pool)
            site = Site(pool, destination, "storm", shared / "gates")
            storm = Storm(site, chosen.jobs, chosen.minutes * 60, calm_s=5, seed=chosen.seed, loot=loot)
            wrong = ["it did not come to its end"]
            try:
                storm.rage()
                storm.wait_for_ends(timeout_s=600)
                wrong = storm.wrong()
            finally:
                if wrong:
                    pool.collect_logs(Path("test-logs/storm"))
                print("\n".join(wrong))
                print(f"storm: seed {chosen.seed}: {storm.summary()}; {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
