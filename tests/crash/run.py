"""``make crash``: the walk over all labels and many schedules, on all cores; or one schedule again (``--seed``)."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from tests.crash.simulation import Simulation
from tests.crash.walk import scenes_by_label, walk

_AT_ONCE = 25
_WITH_WALK = 1000


def play(first: int, count: int) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Schedules with these seeds: how often each label was hit, and what was violated."""
    labels: Counter[str] = Counter()
    found = []
    gc.disable()
    for seed in range(first, first + count):
        simulation = Simulation(seed)
        found += [(seed, text) for text in simulation.run()]
        labels += simulation.world.labels
        if seed % 10 == 0:
            gc.collect()
    return labels, found


def play_walk(label: str, number: int) -> tuple[Counter[str], list[tuple[int, str]]]:
    """All faults of one label."""
    return Counter({label: 1}), [(-1, text) for text in walk(label, number)]


def _all(first: int, schedules: int, workers: int) -> Iterator[tuple[Counter[str], list[tuple[int, str]]]]:
    starts = range(first, first + schedules, _AT_ONCE)
    counts = [min(_AT_ONCE, first + schedules - start) for start in starts]
    scenes = sorted(scenes_by_label().items()) if schedules >= _WITH_WALK else []
    labels, numbers = [label for label, _ in scenes], [number for _, number in scenes]
    if workers == 1:
        yield from map(play_walk, labels, numbers)
        yield from map(play, starts, counts)
        return
    with ProcessPoolExecutor(workers) as pool:
        walked, played = pool.map(play_walk, labels, numbers), pool.map(play, starts, counts)
        yield from walked
        yield from played


def main(argv: list[str] | None = None) -> int:
    """Entry point; 1 when a promise was broken."""
    parser = argparse.ArgumentParser(prog="make crash", description=__doc__)
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=1, help="seed of the first schedule")
    parser.add_argument("--seed", type=int, help="play this schedule only, with its trace")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(argv)
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets must be the same in every run of a seed.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.crash.run", *(argv or sys.argv[1:])])
    if options.seed is not None:
        simulation = Simulation(options.seed, keep_trace=True)
        violations = simulation.run()
        print("\n".join(simulation.world.trace))
        return _end(1, simulation.world.labels, [(options.seed, text) for text in violations])
    started_s = time.monotonic()
    labels: Counter[str] = Counter()
    found: list[tuple[int, str]] = []
    for some_labels, some_found in _all(options.first, options.schedules, options.workers):
        labels += some_labels
        found += some_found
        for seed, text in some_found:
            print(f"seed {seed}: {text}" if seed >= 0 else f"walk: {text}", flush=True)
    print(f"{time.monotonic() - started_s:.0f} s")
    return _end(options.schedules, labels, found)


def _end(schedules: int, labels: Counter[str], found: list[tuple[int, str]]) -> int:
    for label, count in sorted(labels.items()):
        print(f"{count:10} {label}")
    print(f"crash: {schedules} schedules, {len(labels)} labels hit, {len(found)} violations")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
