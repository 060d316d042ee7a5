"""How long a CPU slot is held after its job's last instruction.

One job at a time on idle pools, the kinds in turn: without output, with 1 MiB and with 4 GiB of output on a node where
our plugin alone is registered, so that what is beyond a job without output is ours; with 1 MiB where HTCondor's own
plugins are registered too (the starter asks each of them first); and on a pool with HTCondor as it comes. The job
stamps the time as its last instruction; the startd's log says with milliseconds when the slot can take the next job.
Both are read from the same clock.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from common import Figure, main, percentile

from tests.harness.demo.pool_run import PoolRun
from tests.harness.demo.record import FINE_LOGS
from tests.harness.demo.workload import Workload
from tests.harness.narrow_destination import LINK_MB_S, NarrowDestination
from tests.harness.pool import Pool, PoolError

MIB = 1 << 20
LEAN, FULL, STOCK = "lean", "full", "stock"
_OURS_ALONE = "FILETRANSFER_PLUGINS = $(STAGEOUT_BIN)/stageout_curl_plugin\n"
# The queue hears of a delivery sooner, so that runs follow each other; nothing of it is in the job's way.
_EAGER = "STAGEOUT_POLL_INTERVAL = 1\nSTAGEOUT_ORDER_INTERVAL = 1\n"


@dataclass(frozen=True)
class Kind:
    """One kind of job: on which pool, to which destination, with how much output, in every `every`th round."""

    pool: str
    size_bytes: int
    every: int = 1
    narrow: bool = False


@dataclass
class Bench:
    """Pools and destinations, up for the whole benchmark."""

    pools: dict[str, Pool]
    wide: NarrowDestination
    narrow: NarrowDestination
    runs: int = 0

    def held_s(self, name: str, kind: Kind) -> float:
        """Run one job and return how long its slot was held after its end."""
        self.runs += 1
        place = self.narrow if kind.narrow else self.wide
        load = Workload(1, 1, 1 if kind.size_bytes else 0, kind.size_bytes)
        record = PoolRun(self.pools[kind.pool], place, load, f"run-{self.runs}", name).run()
        job = record.jobs[0]
        if record.delivered != 1:
            raise PoolError(f"{name}: its file did not arrive whole.")
        if kind.pool != STOCK and kind.size_bytes and job.moved_s[1] <= job.free_s:
            raise PoolError(f"{name}: was sent synchronously; the job's log on the access point says why.")
        for path in (place.root / f"run-{self.runs}").glob("*/*"):
            path.unlink()
        return job.held_s


def measure(quick: bool) -> list[Figure]:
    """Run it all."""
    large_mib, stock_mib, rounds, every = (256, 64, 6, 2) if quick else (4096, 256, 20, 4)
    large, slow = f"{large_mib} MiB", f"{stock_mib} MiB"
    kinds = {
        "none": Kind(LEAN, 0),
        "1 MiB": Kind(LEAN, MIB),
        large: Kind(LEAN, large_mib * MIB, every),
        "all plugins": Kind(FULL, MIB, every),
        "stock, wide": Kind(STOCK, MIB, every),
        slow: Kind(STOCK, stock_mib * MIB, every, narrow=True),
    }
    held: dict[str, list[float]] = {name: [] for name in kinds}
    with ExitStack() as stack:
        bench = _open(stack)
        for number in range(rounds):
            for name, kind in kinds.items():
                if number % kind.every == 0:
                    held[name].append(bench.held_s(name, kind))
    return _figures(held, large, slow)


def _open(stack: ExitStack) -> Bench:
    place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stageout-bench-")))
    pools = {
        LEAN: Pool(ep_config=FINE_LOGS + _OURS_ALONE, config=_EAGER),
        FULL: Pool(ep_config=FINE_LOGS, config=_EAGER),
        STOCK: Pool(stageout=False, ep_config=FINE_LOGS),
    }
    return Bench(
        {name: stack.enter_context(pool) for name, pool in pools.items()},
        stack.enter_context(NarrowDestination(place / "wide", rate_mb_s=0)),
        stack.enter_context(NarrowDestination(place / "narrow")),
    )


def _figures(held: dict[str, list[float]], large: str, slow: str) -> list[Figure]:
    median_s = {name: statistics.median(values) for name, values in held.items()}
    figures = [Figure("slot held: a job without output", median_s["none"], "s")]
    for name in ("1 MiB", large):
        ours = [value - median_s["none"] for value in held[name]]
        what = f"beyond that, {name}, {len(ours)} runs"
        figures.append(Figure(f"{what}: median", statistics.median(ours), "s", goal=0.3))
        figures.append(Figure(f"{what}: p95", percentile(ours, 95), "s", goal=0.5))
    figures.append(
        Figure(
            "slot held: 1 MiB, HTCondor's own plugins registered too",
            median_s["all plugins"],
            "s",
            "HTCondor as it comes, 1 MiB, link without limit",
            median_s["stock, wide"],
        )
    )
    peer = f"HTCondor as it comes, {slow} at {LINK_MB_S} MB/s"
    figures.append(Figure(f"slot held: {large} with stageout", median_s[large], "s", peer, median_s[slow]))
    return figures


if __name__ == "__main__":
    sys.exit(main("slot_release", measure))
