"""Misfortunes of all kinds under load, on a real pool: ``make storm`` for ten minutes, test_storm.py for one.

Daemons die, the power of nodes is cut, nodes vanish for good, links are cut, disks are full, and the destination is
down or refuses. Some jobs are routed, and a part of the output transfer of others fails. A hostile user attacks all of
them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from stageout.core.errors import StageoutError
from stageout.core.states import ENDS
from tests.harness.destination import Destination
from tests.harness.pool import Node, NodeSpec, Pool, Submission, install
from tests.harness.pool.errors import PoolError
from tests.harness.pool.image import find_image, image_account
from tests.harness.pool.outages import Link, SmallDisk, enter_own_network
from tests.harness.pool.waiting import wait_until
from tests.pool.conftest import LEAN, VERSION, Site, open_directory, pool_settings, wait_until_acquainted
from tests.pool.hostile import NO_WALL
from tests.pool.raider import Raider
from tests.pool.storm_jobs import KINDS, PLAIN, ROUTE, Kind, Owners, StormJob, Workload, write_plugin
from tests.pool.storm_judge import Judge

#: The shortest one that the product takes.
_LEASE_S = 60
_DISK_MB = 256
#: Seconds between two looks of owners and judge.
_LOOK_S = 2.0
_EXECUTE_POINTS = 3
#: The agent's, and for jobs whose transfer may be tried again seconds instead of 5 to 10 minutes.
_AP_CONFIG = f"""
STAGEOUT_LEASE = {_LEASE_S}
SYSTEM_ON_VACATE_COOL_DOWN = (VacateReasonCode =?= 12 && VacateReasonSubCode =?= 2816 && \\
    (NumJobCoolDowns ?: 0) < 4) ? 5 : 0
"""

#: The facts that tell why a job is still in the queue, besides all that the product writes into its ad.
_TELLING = ("ClusterId", "ProcId", "JobStatus", "NumShadowStarts", "HoldReason", "LastRejMatchReason", "RemoteHost")
_LOOKED_AT = (
    "ClusterId", "ProcId", "Owner", "JobStatus", "HoldReason", "HoldReasonCode", "HoldReasonSubCode", "StageOutState",
    "StageOutRun",
)  # fmt: skip

_AT_THE_ACCESS_POINT = ("schedd-agent", "schedd", "collector", "condor_master")
_AT_AN_EXECUTE_POINT = ("sandbox-manager", "sandbox-manager", "startd", "condor_master")


class Mend(NamedTuple):
    """The end of a misfortune. :param due_s: monotonic time. :param what: node or server that it is about."""

    due_s: float
    what: str
    act: Callable[[], None]


@dataclass
class Storm:
    """Jobs that come all the time while misfortunes come and go.

    :param jobs: how many are submitted, evenly over the time.
    :param duration_s: seconds during which misfortunes come.
    :param calm_s: mean seconds between two misfortunes. :param kinds: of these; empty: the usual ones.
    :param loot: server of a hostile user, who attacks the jobs all the time; None: there is none.
    :param job_kinds: kinds of jobs. :param links: of the execute points, by name. :param disks: likewise.
    """

    site: Site
    jobs: int
    duration_s: float
    calm_s: float
    seed: int
    kinds: Sequence[Misfortune] = ()
    loot: Destination | None = None
    job_kinds: Sequence[Kind] = (PLAIN,)
    links: Mapping[str, Link] = field(default_factory=dict)
    disks: Mapping[str, SmallDisk] = field(default_factory=dict)
    deaths: Counter[str] = field(default_factory=Counter)
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.kinds = self.kinds or USUAL
        self.workload = Workload(self.site, random.Random(self.seed + 1), self.job_kinds)
        self.owners = Owners(self.workload, random.Random(self.seed + 2))
        self.judge = Judge(self.workload, self.owners)
        self.raider = Raider(self.site, self.loot, self.workload, self.seed) if self.loot else None
        self._next_kinds = _order(self.kinds, self.seed)
        self.again = 0
        self._postponed: list[Misfortune] = []
        self._mends: list[Mend] = []
        self._next_look_s = 0.0
        self._others = {_job_id(ad) for ad in self.site.pool.jobs("true", ["ClusterId", "ProcId"])}

    @property
    def submitted(self) -> list[Submission]:
        """The jobs of the storm."""
        return [job.submission for job in self.workload.jobs]

    def rage(self) -> None:
        """Submit and strike until the time is over; afterwards everything is up again."""
        start = time.monotonic()
        next_death_s = self.calm_s
        while (passed_s := time.monotonic() - start) < self.duration_s:
            self._mend()
            if len(self.submitted) < self.jobs * passed_s / self.duration_s + 1:
                self._submit()
            elif passed_s > next_death_s:
                self._strike()
                next_death_s = passed_s + self.random.expovariate(1 / self.calm_s)
            elif time.monotonic() > self._next_look_s:
                self._look(share=0.2)
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
        """Wait until every job of the storm has left the queue, but for those that their owners leave held.

        The output of those is no longer under way.
        """
        left = {str(job): job for job in self.workload.jobs}

        def done() -> bool:
            waiting = self._look(share=0.5)
            for ad in waiting or ():
                assert ad["JobStatus"] != 5 or ad.get("HoldReason"), f"held without a reason: {ad}"
            return waiting is not None and all(_rests(ad, left.get(_job_id(ad))) for ad in waiting)

        wait_until(
            done, timeout_s=timeout_s, interval_s=1, what="all jobs to leave the queue", describe=self._still_there
        )

    def _look(self, share: float) -> list[Mapping[str, Any]] | None:
        """Let owners and judge look at the queue; returns the ads of the jobs, None while the schedd is down."""
        self._next_look_s = time.monotonic() + _LOOK_S
        with contextlib.suppress(PoolError):
            waiting = self._waiting(_LOOKED_AT)
            self.judge.look(ad for ad in waiting if ad.get("StageOutState") == "Delivered")
            held = [ad for ad in waiting if ad["JobStatus"] == 5 and ad["Owner"] != self._hostile]
            self.owners.look(held, share)
            return waiting
        return None

    @property
    def _hostile(self) -> str:
        return self.raider.user if self.raider else ""

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
        """The faults at the end, a line each; the spools are given two minutes to become empty."""
        pool = self.site.pool
        history = pool.histories()
        self.again = sum(history.get(str(job), {}).get("NumShadowStarts", 0) > 1 for job in self.submitted)
        found = [*self.judge.early, *(self.raider.wrong(history) if self.raider else [])]
        for job in self.workload.jobs:
            end, faults = self.judge.end(job, history)
            self.ends[job.kind.name, end] += 1
            found += faults
        with contextlib.suppress(PoolError):
            pool.wait(lambda: not self.judge.spooled(self._hostile), timeout_s=120, what="the spools", interval_s=2)
        return [*found, *self.judge.records(), *self.judge.spooled(self._hostile)]

    def summary(self) -> str:
        """Return a table of all that happened, and of how the jobs ended."""
        rows = [
            *((f"event: {name}", count) for name, count in sorted(self.deaths.items())),
            *((f"owners: {name}", count) for name, count in sorted(self.owners.acts.items())),
            *((f"jobs: {kind}: {end}", count) for (kind, end), count in sorted(self.ends.items())),
            (f"jobs in all, {self.again} run again", len(self.submitted)),
        ]
        lines = [f"{count:6} {name}" for name, count in rows]
        return "\n".join([*lines, *([self.raider.summary()] if self.raider else [])])

    def _submit(self) -> None:
        self.workload.submit()

    # ---- misfortunes ---------------------------------------------------------------------------------------------

    def _strike(self) -> None:
        """One misfortune; one that found no victim earlier comes before others."""
        for kind in (*self._postponed, next(self._next_kinds)):
            struck = True
            with contextlib.suppress(PoolError):  # a busy machine may need longer for it
                struck = kind.strike(self) is not False
            self._postponed = [one for one in self._postponed if one is not kind] + ([] if struck else [kind])
            if struck:
                return

    def _until(self, what: str, duration_s: float, mend: Callable[[], None]) -> None:
        """Let it last so long."""
        self._mends.append(Mend(time.monotonic() + duration_s, what, mend))

    def _mend(self, everything: bool = False) -> None:
        """End the misfortunes that have lasted long enough. A busy machine may need another attempt."""
        for one in [one for one in self._mends if everything or one.due_s <= time.monotonic()]:
            self._mends.remove(one)
            try:
                one.act()
            except (PoolError, StageoutError):
                self._mends.append(one._replace(due_s=time.monotonic() + 2))

    def _is_mended(self) -> bool:
        self._mend(everything=True)
        return not self._mends

    def _is_well(self, what: str) -> bool:
        return all(one.what != what for one in self._mends)

    def _victim(self, among: Sequence[Node] | None = None) -> Node | None:
        """Return an execute point without another misfortune; None when there is none, or only one in the pool."""
        well = [ep for ep in self.site.pool.eps if self._is_well(ep.name)]
        wanted = [ep for ep in well if among is None or ep in among]
        return self.random.choice(wanted) if wanted and len(well) > 1 else None

    def kill_a_daemon(self) -> None:
        """Kill one daemon, as SIGKILL does."""
        pool = self.site.pool
        node = self.random.choice([node for node in (pool.ap, *pool.eps) if node.is_up])
        daemon = self.random.choice(self._daemons(node))
        with contextlib.suppress(PoolError):  # it is not back yet from its last death
            node.kill(daemon, signal.SIGKILL)
            self.deaths[daemon] += 1
        if daemon == "condor_master":
            self._until(f"condor_master of {node.name}", 0, lambda: self._start_master(node))

    def _daemons(self, node: Node) -> tuple[str, ...]:
        if node is not self.site.pool.ap:
            return _AT_AN_EXECUTE_POINT
        routes = any("WantRoute" in kind.lines for kind in self.job_kinds)
        return (*_AT_THE_ACCESS_POINT, "condor_job_router") if routes else _AT_THE_ACCESS_POINT

    def cut_power(self) -> bool:
        """An execute point loses its power for some seconds."""
        node = self._victim()
        if node is None:
            return False
        self._until(node.name, self.random.uniform(1, 10), node.start)
        node.crash()
        self.deaths["power cut"] += 1
        return True

    def take_a_node(self) -> bool:
        """An execute point vanishes for good with its disk, if possible one with output.

        A new one of the same name comes, perhaps before the lease of the old one is over.
        """
        full = [ep for ep in self.site.pool.eps if any((self.disks[ep.name].place / "stageout/sandboxes").glob("*/*"))]
        node = self._victim(full) or self._victim()
        if node is None:
            return False
        self._until(node.name, self.random.uniform(0.2, 2) * _LEASE_S, node.start)
        node.crash()
        self.disks[node.name].replace()
        self.deaths[f"node vanished {'with' if node in full else 'without'} output"] += 1
        return True

    def cut_link(self) -> bool:
        """The link of an execute point is down, shorter or longer than the lease."""
        node = self._victim()
        if node is None:
            return False
        duration_s = self.random.uniform(0.1, 2) * _LEASE_S
        self.deaths[f"link cut, {'longer' if duration_s > _LEASE_S else 'shorter'} than the lease"] += 1
        self.links[node.name].cut()
        self._until(node.name, duration_s, self.links[node.name].mend)
        return True

    def fill_disk(self) -> bool:
        """The disk of an execute point is full, or nearly."""
        node = self._victim()
        if node is None:
            return False
        disk, left_mb = self.disks[node.name], self.random.choice((0, 0, 4, 40))
        disk.fill(left_mb << 20)
        self.deaths["disk nearly full" if left_mb else "disk full"] += 1
        self._until(node.name, self.random.uniform(5, _LEASE_S), disk.relieve)
        return True

    def stop_destination(self) -> bool:
        """Stop the destination for some seconds."""
        if not self._is_well("destination"):
            return False
        self.deaths["destination down"] += 1
        self.site.destination.stop()
        self._until("destination", self.random.choice((2, 5, 30)), self.site.destination.start_again)
        return True

    def refuse(self) -> bool:
        """The destination refuses all for a while, for ever by its words or for now."""
        if not self._is_well("destination"):
            return False
        status = self.random.choice((403, 503, 507))
        with contextlib.suppress(StageoutError):  # on a busy machine it takes the new configuration late
            self.site.destination.refuse("no more room for you", status)
        self.deaths[f"destination refuses, {status}"] += 1
        self._until("destination", self.random.uniform(3, 20), self.site.destination.accept)
        return True

    def _start_master(self, node: Node) -> None:
        """As the machine's init does: what the dead master left is ended first."""
        if not node.is_up:  # its power was cut meanwhile
            return
        for process in node.processes():
            if any(part in " ".join(process.argv) for part in ("condor_", "stageout-", "/dir_")):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        node.start()

    def _calm_down(self) -> None:
        """Every daemon is running again."""
        pool = self.site.pool
        pool.wait(self._is_mended, timeout_s=300, what="all to be mended", interval_s=1)
        for node in (pool.ap, *pool.eps):
            for daemon in set(self._daemons(node)):
                pool.wait(lambda n=node, d=daemon: n.pids(d), timeout_s=120, what=f"{daemon} of {node.name}")
        if self.raider:
            self.raider.stop()


class Misfortune(NamedTuple):
    """A kind of misfortune. :param weight: how often it happens, against the others. :param strike: makes it happen, or
    returns False when nobody can be struck now.
    """

    name: str
    weight: float
    strike: Callable[[Storm], bool | None]


USUAL = (Misfortune("a daemon dies", 85, Storm.kill_a_daemon), Misfortune("destination", 15, Storm.stop_destination))
WEATHER = (
    Misfortune("a daemon dies", 50, Storm.kill_a_daemon),
    Misfortune("power cut", 6, Storm.cut_power),
    Misfortune("a node vanishes", 8, Storm.take_a_node),
    Misfortune("a link is cut", 10, Storm.cut_link),
    Misfortune("a disk is full", 8, Storm.fill_disk),
    Misfortune("destination down", 9, Storm.stop_destination),
    Misfortune("destination refuses", 9, Storm.refuse),
)


def _order(kinds: Sequence[Misfortune], seed: int) -> Iterator[Misfortune]:
    """Yield one misfortune after the other: each kind once, and then by chance. The seed alone decides."""
    chance = random.Random(seed)
    yield from chance.sample(kinds, len(kinds))
    while True:
        yield from chance.choices(kinds, [one.weight for one in kinds])


def _rests(ad: Mapping[str, Any], job: StormJob | None) -> bool:
    is_left = job is not None and "leave" in job.asked and ad["JobStatus"] == 5
    return is_left and ad.get("StageOutState", "None") in (*ENDS, "None")


def _job_id(ad: Mapping[str, Any]) -> str:
    return f"{ad['ClusterId']}.{ad['ProcId']}"


@contextmanager
def open_world() -> Iterator[tuple[Site, dict[str, Link], dict[str, SmallDisk]]]:
    """Start the pool of a storm, with links that can be cut, small disks, a JobRouter and a refusing plugin."""
    image = find_image(VERSION)
    install.product_venv(image, install.find_checkout())  # the network may be needed for it
    enter_own_network()
    with contextlib.ExitStack() as stack:
        shared, home = (stack.enter_context(open_directory(name)) for name in ("storm", "destination"))
        destination = stack.enter_context(Destination(home))
        numbers = range(1, _EXECUTE_POINTS + 1)
        links = {f"ep{n}": Link(n) for n in numbers}
        disks = {f"ep{n}": SmallDisk(shared / f"disk{n}", _DISK_MB, image_account(image, "condor")) for n in numbers}
        for disk in disks.values():
            disk.mount()
            stack.callback(disk.unmount)
        settings = {"base_config": LEAN, "cpus": 6, **pool_settings(shared)}
        settings["ap_config"] += _AP_CONFIG + ROUTE + NO_WALL
        settings["ep_config"] += f"FILETRANSFER_PLUGINS = $(FILETRANSFER_PLUGINS), {write_plugin(shared)}\n"
        settings["execute_points"] = [NodeSpec(config=links[name].config + disks[name].config) for name in links]
        binds = (shared, *(disk.place for disk in disks.values()))
        pool = stack.enter_context(Pool(version=VERSION, binds=binds, **settings))
        for name, disk in disks.items():
            (pool.dir / name / "stageout").symlink_to(disk.place / "stageout")
        wait_until_acquainted(pool)
        yield Site(pool, destination, "storm", shared / "gates"), links, disks


def main(argv: list[str] | None = None) -> int:
    """Ten minutes of it, with a table at the end; 1 when something was lost or wrong."""
    options = argparse.ArgumentParser(description="Run misfortunes of all kinds on a real pool.")
    options.add_argument("--minutes", type=float, default=10)
    options.add_argument("--jobs", type=int, default=0, help="how many in all (default: 20 a minute)")
    options.add_argument("--calm", type=float, default=5, help="mean seconds between two misfortunes")
    options.add_argument("--seed", type=int, default=int(time.time()))
    chosen = options.parse_args(argv)
    jobs = chosen.jobs or int(20 * chosen.minutes)
    with open_world() as (site, links, disks), open_directory("loot") as home, Destination(home) as loot:
        storm = Storm(
            site, jobs, chosen.minutes * 60, chosen.calm, chosen.seed, WEATHER, loot, KINDS, links, disks
        )  # fmt: skip
        wrong = ["it did not come to its end"]
        try:
            storm.rage()
            storm.wait_for_ends(timeout_s=900)
            wrong = storm.wrong()
        finally:
            if wrong:
                site.pool.collect_logs(Path("test-logs/storm"))
            print("\n".join(wrong))
            print(f"{storm.summary()}\nstorm: seed {chosen.seed}: {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
