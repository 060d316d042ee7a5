"""Measure what stage-out costs: the schedd (transactions, processor time), the delay of "Delivered", tiny jobs.

Tiny jobs (``--tiny``) run in both pools at the same time, in one cluster each. Printed are starters with plugins and
jobs (processor time of what the startd has reaped), the rate, and medians of all pairs.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import re
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tests.harness.destination import Destination
from tests.harness.pool import Pool, Submission
from tests.pool.conftest import LEAN, Site, open_directory, wait_until_acquainted

_TICKS = os.sysconf("SC_CLK_TCK")
#: Records of the schedd's log: a new ad, an attribute, and both ends of a transaction.
_NEW, _SET, _BEGIN, _END = "101", "103", "105", "106"
_STOPPED_S, _EVERY_S = 2.0, 4.0


@dataclass
class Paced:
    """Jobs of one kind.

    :param schedd_s: processor time of the schedd for each job. :param transactions: of the agent, for each job.
    :param late_s: seconds from each delivery at the manager to the edit that says so.
    """

    jobs: int
    wall_s: float
    schedd_s: float
    transactions: float
    late_s: list[float]


@dataclass
class Tiny:
    """Tiny jobs in one cluster.

    :param rate: jobs that have ended, with their transfers, each second. :param starter_s: processor time of starter,
        plugins and job for each job. :param schedd_s: of the schedd, likewise. :param handed_off: share of the jobs.
    """

    rate: float
    starter_s: float
    schedd_s: float
    handed_off: float


_TINY_JOB = "#!/bin/sh\necho $$ > out1\n"


def transactions_in(text: str) -> int:
    """Return how many transactions in a schedd's log set attributes about stage-out, without those that make jobs."""
    count, kinds, names = 0, set[str](), set[str]()
    for line in text.splitlines():
        kind, _, rest = line.partition(" ")
        if kind == _BEGIN:
            kinds, names = set(), set()
        elif kind == _END:
            count += _NEW not in kinds and any(name.startswith("StageOut") for name in names)
        else:
            kinds.add(kind)
            names.add(rest.split(" ", 2)[1] if kind == _SET else "")
    return count


def edits_in(text: str) -> dict[str, float]:
    """Return when the agent's log says that the output of each job is delivered, by ``cluster.proc``, wall clock."""
    found = re.findall(r"^(\S+) INFO job-edited job=\S+?#([0-9.]+)#\S+ .*effect=MarkDelivered", text, re.M)
    return {job: datetime.datetime.fromisoformat(stamp).timestamp() for stamp, job in found}


def wait_ended(site: Site, made: Sequence[Submission], timeout_s: float) -> None:
    """Wait until no job waits for its program or its output. The schedd keeps completed jobs for a while."""
    own = " || ".join(f"ClusterId == {one.cluster}" for one in made)
    handed_off = "(TransferOutputStats.STAGEOUTFilesCountLastRun ?: 0) > 0"
    left = f'({own}) && (JobStatus != 4 || {handed_off} && StageOutState =!= "Delivered")'
    site.pool.wait(lambda: not site.pool.jobs(left, ["ClusterId"]), timeout_s=timeout_s, what="all jobs to end")


def late_s(site: Site, made: Sequence[Submission], timeout_s: float) -> list[float]:
    """Wait for the ends of the jobs. Return the seconds from each delivery at the manager to the agent's edit.

    Jobs whose hand-off was refused are not among them. The records of files have whole seconds, so each is up to a
    second less than this says.
    """
    wait_ended(site, made, timeout_s)
    ids = [job for one in made for job in one.ids]
    edited = {job: at_s for job, at_s in edits_in(site.pool.ap.log("ScheddAgentLog")).items() if job in ids}

    def ended() -> dict[str, float] | None:
        found = {f"{ad['ClusterId']}.{ad['ProcId']}": float(ad["StageOutEndedAt"]) for ad in site.file_records(*ids)}
        return found if found.keys() >= edited.keys() else None

    records = site.pool.wait(ended, timeout_s=120, what="the records of all files")
    return [at_s - records[job] for job, at_s in edited.items()]


@contextmanager
def stopped_half_of_the_time(pool: Pool) -> Iterator[None]:
    """Stop the schedd for 2 s of every 4."""
    over = threading.Event()

    def stop() -> None:
        while not over.is_set():
            pool.ap.kill("schedd", signal.SIGSTOP)
            over.wait(_STOPPED_S)
            pool.ap.kill("schedd", signal.SIGCONT)
            over.wait(_EVERY_S - _STOPPED_S)

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _cpu_s(pid: int) -> tuple[float, float]:
    """Return the processor time of a process, and of all that it has waited for."""
    ticks = list(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[11:15]))
    return sum(ticks[:2]) / _TICKS, sum(ticks[2:]) / _TICKS


def schedd_cpu_s(pool: Pool) -> float:
    """Return the processor time of the schedd itself, without its shadows."""
    return _cpu_s(min(pool.ap.pids("schedd")))[0]  # the others are its children for queries


def starters_cpu_s(pool: Pool) -> float:
    """Return the processor time of starters that have ended, of their plugins and their jobs."""
    return sum(_cpu_s(min(ep.pids("startd")))[1] for ep in pool.eps)


def queue_log(pool: Pool) -> str:
    """Return the schedd's log of its transactions."""
    return (pool.ap.home / "spool" / "job_queue.log").read_text(errors="replace")


def submit_at(site: Site, jobs: int, rate: int) -> list[Submission]:
    """Submit so many jobs, ``rate`` each second, with one small file of a size of its own each."""
    made = []
    for number, first in enumerate(range(0, jobs, rate)):
        begin_s = time.monotonic()
        count = min(rate, jobs - first)
        made.append(site.submit(outputs=("out1",), env=f"SIZE={2000 + number}", queue=f"queue {count}"))
        time.sleep(max(0.0, begin_s + 1 - time.monotonic()))
    return made


def run(site: Site, jobs: int, rate: int, timeout_s: float) -> Paced:
    """Run the jobs to their ends: until none waits for its program or its output."""
    begin_s, cpu_s, written = time.monotonic(), schedd_cpu_s(site.pool), transactions_in(queue_log(site.pool))
    made = submit_at(site, jobs, rate)
    wait_ended(site, made, timeout_s)
    wall_s = time.monotonic() - begin_s
    cpu_s, written = schedd_cpu_s(site.pool) - cpu_s, transactions_in(queue_log(site.pool)) - written
    return Paced(jobs, wall_s, cpu_s / jobs, written / jobs, late_s(site, made, timeout_s) if written else [])


def run_tiny(site: Site, jobs: int, timeout_s: float) -> Tiny:
    """Run the jobs of one cluster until the last has ended, its transfers included."""
    begin_s, schedd_s, starters_s = time.monotonic(), schedd_cpu_s(site.pool), starters_cpu_s(site.pool)
    made = site.submit(outputs=("out1",), script=_TINY_JOB, queue=f"queue {jobs}")
    running = f"ClusterId == {made.cluster} && JobStatus != 4"
    site.pool.wait(lambda: not site.pool.jobs(running, ["ProcId"]), timeout_s=timeout_s, what="all tiny jobs to end")
    wall_s = time.monotonic() - begin_s
    site.pool.wait(lambda: not site.pool.eps[0].pids("starter"), timeout_s=60, what="all starters to end")
    starters_s, schedd_s = starters_cpu_s(site.pool) - starters_s, schedd_cpu_s(site.pool) - schedd_s
    wait_ended(site, [made], timeout_s)
    log = site.pool.eps[0].log("SandboxManagerLog") if site.pool.stageout else ""
    handed_off = len(re.findall(rf"sandbox-accepted .*job=\S+?#{made.cluster}\.", log))
    if refused := re.findall(r"handoff-refused .*?reason=(.*)", log):
        print(f"the last hand-off that was refused: {refused[-1]}", flush=True)
    return Tiny(jobs / wall_s, starters_s / jobs, schedd_s / jobs, handed_off / jobs)


def run_tiny_pairs(home: Path, destination: Destination, settings: dict[str, Any], options: argparse.Namespace) -> None:
    """Run the same tiny jobs in both pools at the same time, and print each run and the medians."""
    titles = {True: "with stageout", False: "HTCondor as it comes"}
    found: dict[bool, list[Tiny]] = {True: [], False: []}
    with ExitStack() as stack:
        pools = {is_ours: stack.enter_context(Pool(**settings, stageout=is_ours)) for is_ours in titles}
        wait_until_acquainted(pools[True])
        for is_ours, pool in pools.items():
            print(f"{titles[is_ours]}: {pool.eps[0].config_val('FILETRANSFER_PLUGINS')}")
        for number in range(options.pairs):
            sites = {
                is_ours: Site(pool, destination, f"tiny-{number}-{is_ours}", home) for is_ours, pool in pools.items()
            }
            with ThreadPoolExecutor(2) as threads:
                runs = {
                    is_ours: threads.submit(run_tiny, site, options.tiny, options.timeout)
                    for is_ours, site in sites.items()
                }
            for is_ours, one in runs.items():
                found[is_ours].append(one.result())
                _say_tiny(titles[is_ours], one.result())
    medians = {is_ours: _median(runs) for is_ours, runs in found.items()}
    for is_ours, title in titles.items():
        _say_tiny(f"median, {title}", medians[is_ours])
    ours, plain = medians[True], medians[False]
    print(
        f"starter and plugins {ours.starter_s / plain.starter_s:.2f}, rate {ours.rate / plain.rate:.2f} of HTCondor's"
    )


def _median(runs: Sequence[Tiny]) -> Tiny:
    return Tiny(*(statistics.median(getattr(run, item.name) for run in runs) for item in fields(Tiny)))


def _say_tiny(title: str, found: Tiny) -> None:
    text = f"{title}: {found.rate:.2f} jobs/s; starter, plugins and job {found.starter_s * 1000:.0f} ms, "
    print(f"{text}schedd {found.schedd_s * 1000:.1f} ms for each; handed off {found.handed_off:.0%}", flush=True)


def _say(title: str, found: Paced) -> None:
    late = sorted(found.late_s)
    text = f"{title}: {found.jobs} jobs in {found.wall_s:.0f} s, {found.schedd_s * 1000:.1f} ms of the schedd and "
    text += f"{found.transactions:.2f} transactions of the agent for each"
    if late:
        text += f"; from delivery to edit {statistics.median(late):.1f} s (median), {late[-1]:.1f} s (longest)"
    print(text, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run pairs of the same jobs, in a pool with stageout and in one without."""
    parser = argparse.ArgumentParser("python -m tests.pool.pace", description=__doc__)
    parser.add_argument("--jobs", type=int, default=100, help="jobs of each run (default: %(default)s)")
    parser.add_argument("--rate", type=int, default=5, help="jobs submitted each second (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of runs (default: %(default)s)")
    parser.add_argument("--tiny", type=int, default=0, help="tiny jobs instead, so many in one cluster")
    parser.add_argument("--cpus", type=int, default=16, help="CPUs of the execute point (default: %(default)s)")
    parser.add_argument("--setting", metavar="NAME=VALUE", action="append", default=[], help="of both pools")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for each run (default: %(default)s)")
    options = parser.parse_args(argv)
    settings: dict[str, Any] = {
        "base_config": LEAN,
        "execute_points": 1,
        "cpus": options.cpus,
        "config": "\n".join(options.setting),
    }
    with open_directory("pace") as home, Destination(home) as destination:
        if options.tiny:
            run_tiny_pairs(home, destination, settings, options)
            return 0
        for is_ours in itertools.islice(itertools.cycle((True, False)), 2 * options.pairs):
            title = "with stageout" if is_ours else "HTCondor as it comes"
            with Pool(**settings, stageout=is_ours) as pool:
                if is_ours:
                    wait_until_acquainted(pool)
                site = Site(pool, destination, f"pace-{time.monotonic_ns()}", home)
                _say(title, run(site, options.jobs, options.rate, options.timeout))
    return 0


if __name__ == "__main__":
    sys.exit(main())
