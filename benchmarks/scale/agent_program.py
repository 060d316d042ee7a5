"""Runs on the access point of a pool, as the agent would: ``edits CLUSTER``, or ``view NODES EACH ROUNDS DIRECTORY``.

``edits`` writes the progress of every job of a cluster, as the agent does, and prints how many a second.
``view`` puts the reports of many nodes into the collector and lets the agent's daemon work on them, with a job queue
made up to match. Then one run after the other ends somewhere, and the time until its node has the order is taken.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

from sandbox_manager.report.collector import ATTRIBUTES, letters_to, unpacked
from schedd_agent.agent import Agent
from schedd_agent.collector import CondorCollectorClient
from schedd_agent.daemon import Daemon
from schedd_agent.edits import Edit, edit_for
from schedd_agent.liveness import LivenessTracker
from schedd_agent.model import DagEnd, DecisionLimits, UpdateAdState
from schedd_agent.orders import OrderNumbers, OrderOutbox
from schedd_agent.queue import CondorJobQueue, parse_job
from schedd_agent.receipts import Receipts
from schedd_agent.reports import NewestReportNumbers
from stageout.condor.configuration import condor_settings
from stageout.core.clock import SystemClock
from stageout.core.signing import load_or_make_key
from stageout.model.job import HistoryRecord, Job, JobAdState
from stageout.wire.custody import (
    LETTERS,
    ORDERS_AD,
    REPORT_ADDRESS,
    REPORTS,
    JobKey,
    Report,
    SandboxReport,
    read_orders,
    report_ad,
)

SCHEDD = "many.example.org"
USER = "alice@example.org"
_ORDER_INTERVAL_S = 5.0
_DEADLINE_S = 120.0


def edits(cluster: int) -> None:
    """Edit each job of the cluster once."""
    import htcondor2

    queue = CondorJobQueue()
    ads = htcondor2.Schedd().query(f"ClusterId == {cluster}")
    jobs = [parse_job(ad, True) for ad in ads]
    start_s = time.monotonic()
    for job in jobs:
        shown = JobAdState("Moving", 1, "waits for its turn", 4096, 1, 1, 0, "manager@ep1.example.org")
        edit = edit_for(job, UpdateAdState(shown), time.time())
        assert edit is not None
        queue.apply(edit)
    print(json.dumps({"edits_per_s": len(jobs) / (time.monotonic() - start_s)}))


# ---- many nodes ------------------------------------------------------------------------------------------------------


def job_name(cluster: int) -> str:
    """GlobalJobId."""
    return f"{SCHEDD}#{cluster}.0#1700000000"


def ticket_of(cluster: int) -> str:
    """32 hexadecimal digits."""
    return f"{cluster:032x}"


def manager_of(node: int) -> str:
    """Name of a node's manager."""
    return f"manager@ep{node}.example.org"


def sandbox(cluster: int, state: str) -> SandboxReport:
    """One sandbox of one file."""
    return SandboxReport(
        job=job_name(cluster), number=1, owner=USER, state=state, change=1, reason="", error_code=0,
        tickets=(ticket_of(cluster),), files_total=1, files_left=1, bytes_total=4096, bytes_left=4096, attempts=0,
        attempts_limit=20, next_attempt_at=0, accepted_at=1_700_000_000,
    )  # fmt: skip


def record(cluster: int, node: int, key: str) -> str:
    """The changes of the job that the shadow writes when a run has ended. :param key: public one of the manager."""
    who = f'ManagerName = "{manager_of(node)}"; ManagerKey = "{key}"'
    receipt = f'[ Ticket = "{ticket_of(cluster)}"; {who}; Files = 1; Bytes = 4096 ]'
    results = f"{{ [ TransferSuccess = true; DeveloperData = [ StageOutReceipt = {receipt} ] ] }}"
    banner = f'*** OUTPUT ClusterId={cluster} ProcId=0 RunInstanceId=0 Owner="alice" CurrentTime=1'
    return f"NumShadowStarts = 1\nOutputPluginResultList = {results}\n{banner}\n"


class MadeUpQueue:
    """The schedd's part: jobs that stand in a file, all of them completed."""

    def __init__(self, ended: Path, settled: int, nodes: int) -> None:
        self._ended = ended
        self._jobs = [self._job(cluster, manager_of(cluster % nodes), "Confirmed") for cluster in range(1, settled + 1)]

    def _job(self, cluster: int, manager: str, state: str) -> Job:
        return Job(
            job_name(cluster), cluster, 0, 4, 1, USER, handed_off=1, entered_at=1_700_000_000, completions=1,
            ad_state=JobAdState(state, 1 if manager else 0, "", 4096, 1, 0, 0, manager),
        )  # fmt: skip

    def jobs(self, reported: Collection[JobKey]) -> list[Job]:
        """All."""
        new = [int(line) for line in self._ended.read_text().split()]
        return [*self._jobs, *(self._job(cluster, "", "None") for cluster in new)]

    def history_records(self, jobs: Collection[JobKey]) -> dict[JobKey, HistoryRecord]:
        """None has left."""
        return {}

    def dags(self, clusters: Collection[int]) -> dict[int, DagEnd]:
        """There are none."""
        return {}

    def apply(self, edit: Edit) -> None:
        """Taken."""

    def remove(self, job: Job, reason: str) -> None:
        """Taken."""


def agent_process(settled: int, nodes: int, home: Path) -> None:
    """The agent's daemon, until it is killed. Notes how long each pass took."""
    clock, settings = SystemClock(), condor_settings()

    class Timed(Agent):
        def run_pass(self) -> bool:
            start_s = clock.monotonic_s()
            good = super().run_pass()
            with open(home / "passes", "a") as stream:
                stream.write(f"{clock.monotonic_s() - start_s if good else -1}\n")
            return good

    key = load_or_make_key("agent-key", home / "agent_key")
    numbers = OrderNumbers(home / "numbers", clock.wall_s())
    made = Timed(
        name=SCHEDD, key=key, queue=MadeUpQueue(home / "ended", settled, nodes),
        collector_client=CondorCollectorClient(SCHEDD),
        receipts=Receipts(home / "runs", home / "epochs"), order_outbox=OrderOutbox(SCHEDD, numbers),
        liveness=LivenessTracker(hole_s=75.0), clock=clock,
        limits=DecisionLimits(lease_s=7200, max_reruns=2, edit_interval_s=20),
        numbers=numbers, newest_reports=NewestReportNumbers(home / "newest"),
    )  # fmt: skip
    asyncio.run(Daemon(lambda: settings, lambda settings: made).serve())


class Nodes:
    """All managers: their reports, and looks for orders."""

    def __init__(self, nodes: int, each: int, home: Path) -> None:
        import classad2
        import htcondor2

        self._classad, self._condor, self._home = classad2, htcondor2, home
        self._key = load_or_make_key("manager-key", home / "manager_key")
        self.settled = nodes * each
        self.boxes = {node: [sandbox(c, "Confirmed") for c in self._clusters(node, nodes)] for node in range(nodes)}
        (home / "ended").touch()
        (home / "runs").mkdir()
        for cluster in range(1, self.settled + 1):
            self._write_record(cluster, cluster % nodes)
        for node in range(nodes):
            self.publish(node)

    def _clusters(self, node: int, nodes: int) -> list[int]:
        return [cluster for cluster in range(1, self.settled + 1) if cluster % nodes == node]

    def _write_record(self, cluster: int, node: int) -> None:
        """As a shadow: into the job's own file and into the shared one."""
        text = record(cluster, node, self._key.public)
        for path in (self._home / "runs" / f"job.runs.{cluster}.0.ads", self._home / "epochs"):
            with open(path, "a") as stream:
                stream.write(text)

    def publish(self, node: int) -> None:
        """One manager's report."""
        now_ms = int(time.time() * 1000)
        boxes = tuple(self.boxes[node])
        report = Report(manager_of(node), self._key.public, now_ms, now_ms // 1000, {}, 4096 * len(boxes), boxes)
        ad = self._classad.ClassAd({**report_ad(report, self._key), **REPORT_ADDRESS})
        self._condor.Collector().advertise([ad], REPORTS.update)

    def confirm_s(self, cluster: int, node: int) -> float:
        """End one run on a node; seconds until that node's manager, which looks every 5 s, has the order."""
        self.boxes[node].append(sandbox(cluster, "Accepted"))
        self.publish(node)
        self._write_record(cluster, node)
        with open(self._home / "ended", "a") as stream:
            stream.write(f"{cluster}\n")
        start_s = time.monotonic()
        time.sleep(random.uniform(0, _ORDER_INTERVAL_S))
        while job_name(cluster) not in self.orders(node):
            if time.monotonic() - start_s > _DEADLINE_S:
                raise SystemExit(f"no order within {_DEADLINE_S:.0f} s")
            time.sleep(_ORDER_INTERVAL_S)
        return time.monotonic() - start_s

    def orders(self, node: int) -> list[str]:
        """Jobs that the agent has orders about for this node's manager, asked as a manager asks."""
        ad_type = getattr(self._condor.AdType, LETTERS.ad_type)
        ads = self._condor.Collector().query(ad_type, letters_to(manager_of(node)), list(ATTRIBUTES))
        found = [ad for ad in unpacked(ads, manager_of(node)) if ad["MyType"] == ORDERS_AD]
        sheets = [read_orders(ad["StageOutPayload"]) for ad in found]
        return [order.job for sheet in sheets if sheet.agent == SCHEDD for order in sheet.orders]


def view(nodes: int, each: int, rounds: int, home: Path) -> None:
    """Everything about one agent and many nodes."""
    all_nodes = Nodes(nodes, each, home)
    command = [sys.executable, __file__, "agent", str(all_nodes.settled), str(nodes), str(home)]
    agent = subprocess.Popen(command)
    passes = home / "passes"
    try:
        while not passes.exists() or len(passes.read_text().split()) < 3:
            time.sleep(0.1)
        first = all_nodes.settled + 1
        took_s = [all_nodes.confirm_s(first + number, number % nodes) for number in range(rounds)]
    finally:
        agent.kill()
        agent.wait()
    ask_s = []
    for node in range(min(nodes, 50)):
        start_s = time.monotonic()
        all_nodes.orders(node)
        ask_s.append(time.monotonic() - start_s)
    passes_s = [float(text) for text in passes.read_text().split()]
    print(json.dumps({"confirm_s": took_s, "passes_s": passes_s, "ask_s": ask_s}))


def main() -> None:
    """The program."""
    what, rest = sys.argv[1], sys.argv[2:]
    if what == "edits":
        edits(int(rest[0]))
    elif what == "agent":
        agent_process(int(rest[0]), int(rest[1]), Path(rest[2]))
    else:
        view(int(rest[0]), int(rest[1]), int(rest[2]), Path(rest[3]))


if __name__ == "__main__":
    main()
