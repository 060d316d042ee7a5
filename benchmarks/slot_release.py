"""How long a CPU slot is held after its job's last instruction.

Four kinds of jobs, one at a time on idle pools, in turn: a job without output on the pool with stageout (what the
starter and the shadow need for themselves), 1 MiB and 4 GiB of output there, and some output on a pool with HTCondor
as it comes, over a link of 12.5 MB/s. The job stamps the time as its last instruction; the startd's log says with
milliseconds when the slot can take the next job. Both are read from the same clock.

Before a starter moves the first URL it asks *every* registered plugin what it can do; HTCondor's own Python plugins
take most of that time, with or without stageout. They are asked here too, and their part is shown as its own figure:
"held by us" is what is left of the time beyond a job without output, our own plugin's answer included.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from common import Figure, main, percentile

from stageout.testing.demo.pool_run import PoolRun
from stageout.testing.demo.record import FINE_LOGS
from stageout.testing.demo.workload import MB, Workload
from stageout.testing.narrow_destination import LINK_MB_S, NarrowDestination
from stageout.testing.pool import Node, Pool, PoolError
from stageout.testing.pool.image import PREFIX

MIB = 1 << 20
# The queue hears of a delivery sooner, so that runs follow each other; nothing of it is in the job's way.
_EAGER = "STAGEOUT_POLL_INTERVAL = 1\nSTAGEOUT_ORDER_INTERVAL = 1\n"


@dataclass(frozen=True)
class Kind:
    """One kind of job, in every `every`th round; `ours`: on the pool with stageout."""

    name: str
    ours: bool
    size_bytes: int
    every: int = 1


@dataclass
class Bench:
    """Pools and destinations, up for the whole benchmark."""

    ours: Pool
    stock: Pool
    wide: NarrowDestination
    narrow: NarrowDestination
    runs: int = 0

    def held_s(self, kind: Kind) -> float:
        """Run one job and return how long its slot was held after its end."""
        self.runs += 1
        pool = self.ours if kind.ours else self.stock
        place = self.wide if kind.ours else self.narrow
        load = Workload(1, 1, 1 if kind.size_bytes else 0, kind.size_bytes)
        record = PoolRun(pool, place, load, f"run-{self.runs}", kind.name).run()
        job = record.jobs[0]
        if record.delivered != 1:
            raise PoolError(f"{kind.name}: its file did not arrive whole.")
        if kind.ours and kind.size_bytes and job.moved_s[1] <= job.free_s:
            raise PoolError(f"{kind.name}: was sent synchronously; the plugin says why in {pool.eps[0].log_dir}.")
        for path in (place.root / f"run-{self.runs}").glob("*/*"):
            path.unlink()
        return job.held_s


def measure(quick: bool) -> list[Figure]:
    """Run it all."""
    large, stock_bytes, rounds, every = (256, 64, 9, 3) if quick else (4096, 256, 20, 4)
    kinds = (
        Kind("no output", True, 0),
        Kind("1 MiB", True, MIB),
        Kind(f"{large} MiB", True, large * MIB, every),
        Kind(f"{stock_bytes} MiB, HTCondor as it comes", False, stock_bytes * MIB, every),
    )
    held: dict[str, list[float]] = {kind.name: [] for kind in kinds}
    with ExitStack() as stack:
        bench = _open(stack)
        for number in range(rounds):
            for kind in kinds:
                if number % kind.every == 0:
                    held[kind.name].append(bench.held_s(kind))
        return _figures(kinds, held, others_s(bench.ours.eps[0]))


def others_s(node: Node) -> float:
    """Seconds that all registered plugins but ours need to say what they can do, one after the other."""
    listed = node.config_val("FILETRANSFER_PLUGINS").replace(",", " ").split()
    others = [plugin for plugin in listed if not plugin.startswith(PREFIX)]
    return sum(statistics.median(_asked_s(node, plugin) for _ in range(7)) for plugin in others)


def _asked_s(node: Node, plugin: str) -> float:
    """Seconds of one ``-classad``, by a clock inside the node (entering it takes longer than that)."""
    script = f"date +%s%N; {plugin} -classad >/dev/null 2>&1; date +%s%N"
    before, after = node.run(["sh", "-c", script]).stdout.split()
    return (int(after) - int(before)) / 1e9


def _open(stack: ExitStack) -> Bench:
    place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stageout-bench-")))
    return Bench(
        stack.enter_context(Pool(ep_config=FINE_LOGS, config=_EAGER)),
        stack.enter_context(Pool(stageout=False, ep_config=FINE_LOGS)),
        stack.enter_context(NarrowDestination(place / "wide", rate_mb_s=0)),
        stack.enter_context(NarrowDestination(place / "narrow")),
    )


def _figures(kinds: tuple[Kind, ...], held: dict[str, list[float]], plugins_s: float) -> list[Figure]:
    nothing, small, large, stock = kinds
    floor_s = statistics.median(held[nothing.name])
    stock_s = statistics.median(held[stock.name])
    figures = [
        Figure("slot held: a job without output", floor_s, "s"),
        Figure("the node's other plugins say what they can do", plugins_s, "s"),
    ]
    for kind in (small, large):
        beyond_s = statistics.median(held[kind.name]) - floor_s
        figures.append(Figure(f"slot held beyond a job without output: {kind.name}", beyond_s, "s"))
        ours = [value - floor_s - plugins_s for value in held[kind.name]]
        count = f"{kind.name}, {len(ours)} runs"
        figures.append(Figure(f"of it by us: {count}, median", statistics.median(ours), "s", goal=0.3))
        figures.append(Figure(f"of it by us: {count}, p95", percentile(ours, 95), "s", goal=0.5))
    alone_s = stock.size_bytes / MB / LINK_MB_S
    large_s = statistics.median(held[large.name])
    peer = f"{stock.name}, {LINK_MB_S} MB/s ({alone_s:.1f} s for its bytes alone)"
    figures.append(Figure(f"slot held: {large.name} with stageout", large_s, "s", peer, stock_s))
    return figures


if __name__ == "__main__":
    sys.exit(main("slot_release", measure))
