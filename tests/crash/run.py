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
from dataclasses import dataclass, field

from stageout.core.states import State
from stageout.wire.custody import Action
from tests.crash.observed import PAIRS, Coverage
from tests.crash.simulation import Simulation
from tests.crash.walk import meet, scenes_by_label, walk

_AT_ONCE = 25
_WITH_WALK = 1000


@dataclass
class Seen:
    """Results of some schedules.

    :param labels: how often each was passed. :param found: what was violated, by seed (-1: in the walk).
    """

    labels: Counter[str] = field(default_factory=Counter)
    coverage: Coverage = field(default_factory=Coverage)
    found: list[tuple[int, str]] = field(default_factory=list)

    def add(self, simulation: Simulation, violations: list[str]) -> None:
        """Count one that was played."""
        self.labels += simulation.world.labels
        self.coverage.add(simulation.coverage)
        self.found += [(simulation.seed, text) for text in violations]

    def join(self, other: Seen) -> None:
        """Count what another process has played."""
        self.labels += other.labels
        self.coverage.add(other.coverage)
        self.found += other.found


def play(first: int, count: int) -> Seen:
    """Schedules with these seeds."""
    seen = Seen()
    gc.disable()
    for seed in range(first, first + count):
        simulation = Simulation(seed)
        seen.add(simulation, simulation.run())
        if seed % 10 == 0:
            gc.collect()
    return seen


def play_walk(label: str, number: int) -> Seen:
    """All faults of one label."""
    return Seen(Counter({label: 1}), found=[(-1, text) for text in walk(label, number)])


def play_meeting(action: Action, state: State) -> Seen:
    """An order that meets a run in a state."""
    simulation = meet(action, state)
    seen = Seen(coverage=simulation.coverage)
    seen.found += [(-1, f"{action.value} in {state}: {text}") for text in simulation.world.violations]
    return seen


def _all(first: int, schedules: int, workers: int) -> Iterator[Seen]:
    starts = range(first, first + schedules, _AT_ONCE)
    counts = [min(_AT_ONCE, first + schedules - start) for start in starts]
    scenes = sorted(scenes_by_label().items()) if schedules >= _WITH_WALK else []
    labels, numbers = [label for label, _ in scenes], [number for _, number in scenes]
    pairs = PAIRS if scenes else ()
    actions, states = [action for action, _ in pairs], [state for _, state in pairs]
    if workers == 1:
        yield from map(play_walk, labels, numbers)
        yield from map(play_meeting, actions, states)
        yield from map(play, starts, counts)
        return
    with ProcessPoolExecutor(workers) as pool:
        walked, played = pool.map(play_walk, labels, numbers), pool.map(play, starts, counts)
        met = pool.map(play_meeting, actions, states)
        yield from walked
        yield from met
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
        seen = Seen()
        seen.add(simulation, violations)
        return _end(1, seen)
    started_s = time.monotonic()
    seen = Seen()
    for some in _all(options.first, options.schedules, options.workers):
        seen.join(some)
        for seed, text in some.found:
            print(f"seed {seed}: {text}" if seed >= 0 else f"walk: {text}", flush=True)
    print(f"{time.monotonic() - started_s:.0f} s")
    return _end(options.schedules, seen)


def _end(schedules: int, seen: Seen) -> int:
    for label, count in sorted(seen.labels.items()):
        print(f"{count:10} {label}")
    print("\n".join(seen.coverage.lines()))
    print(f"crash: {schedules} schedules, {len(seen.labels)} labels hit, {len(seen.found)} violations")
    return 1 if seen.found else 0


if __name__ == "__main__":
    sys.exit(main())
