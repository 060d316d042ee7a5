"""Makespan of 12 jobs on 2 CPU slots whose output takes as long as their computation.

Output of one job takes its computation's time over half of the link, which is what it gets with two slots. So
computing takes as long in all as sending, and nothing can be done before both plus one of the first or last wave:
max(compute, transfer) + min(one computation, one transfer). The pool with stageout and one with HTCondor as it comes
run in turn, each alone.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from common import Figure, main

from tests.harness.demo.pool_run import PoolRun
from tests.harness.demo.record import FINE_LOGS, Record
from tests.harness.demo.workload import MB, Workload
from tests.harness.narrow_destination import LINK_MB_S, NarrowDestination
from tests.harness.pool import Pool, PoolError

SLOTS = 2
JOBS = 12


def measure(quick: bool) -> list[Figure]:
    """Run it all."""
    compute_s, rounds = (5, 1) if quick else (30, 2)
    load = Workload(JOBS, compute_s, 1, int(compute_s * LINK_MB_S / SLOTS * MB))
    bound_s = max(JOBS / SLOTS * compute_s, JOBS * load.job_bytes / MB / LINK_MB_S) + compute_s
    ours, stock = [], []
    for _ in range(rounds):
        ours.append(_run(load, with_stageout=True))
        stock.append(_run(load, with_stageout=False))
    makespan_s = statistics.median(run.makespan_s for run in ours)
    stock_s = statistics.median(run.makespan_s for run in stock)
    what = f"{JOBS} jobs of {compute_s} s, {load.job_bytes / MB:.0f} MB each, {SLOTS} slots"
    return [
        Figure(f"makespan: {what}", makespan_s, "s", "HTCondor as it comes", stock_s),
        Figure(
            "makespan over the bound", makespan_s / bound_s, "", f"the bound itself, {bound_s:.0f} s", 1.0, goal=1.1
        ),
        Figure(
            "CPU slots free for other work after",
            statistics.median(run.slots_free_s for run in ours),
            "s",
            "HTCondor as it comes",
            statistics.median(run.slots_free_s for run in stock),
        ),
    ]


def _run(load: Workload, *, with_stageout: bool) -> Record:
    title = "with data slots" if with_stageout else "as it comes"
    place = tempfile.TemporaryDirectory(prefix="stageout-bench-")
    pool = Pool(stageout=with_stageout, cpus=SLOTS, ep_config=FINE_LOGS)
    with place as name, pool, NarrowDestination(Path(name) / "destination") as destination:
        record = PoolRun(pool, destination, load, "makespan", title).run()
    if record.delivered != load.jobs:
        raise PoolError(f"makespan {title}: only {record.delivered} of {load.jobs} jobs have their output in place.")
    return record


if __name__ == "__main__":
    sys.exit(main("makespan", measure))
