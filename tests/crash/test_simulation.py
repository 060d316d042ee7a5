"""Schedules, the walk over all labels, and bugs that are planted so that they must be found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from stageout.core.states import State
from stageout.wire.custody import Action
from tests.crash.judgement import Judgement
from tests.crash.misfortunes import Misfortunes
from tests.crash.observed import PAIRS
from tests.crash.planted import _FOUND_BY, BUGS, MOST_SEEDS, Planted, planted
from tests.crash.pool_model import Destination, Execution
from tests.crash.simulation import Simulation
from tests.crash.walk import ELSEWHERE, labels_of_the_table, meet, scenes_by_label, walk
from tests.crash.world import World

ROOT = Path(__file__).resolve().parents[2]


def _run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.crash.run", "--workers", "1", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def schedules() -> subprocess.CompletedProcess[str]:
    return _run("--schedules", "100")


def test_schedules_break_no_promise(schedules: subprocess.CompletedProcess[str]) -> None:
    assert schedules.returncode == 0, schedules.stdout[-3000:] + schedules.stderr[-3000:]
    last = schedules.stdout.splitlines()[-1]
    found = re.fullmatch(r"crash: 100 schedules, (\d+) labels hit, 0 violations", last)
    assert found and int(found[1]) >= 40, "hardly anything happened in them"


def test_what_was_visited_is_printed(schedules: subprocess.CompletedProcess[str]) -> None:
    lines = schedules.stdout.splitlines()
    assert re.match(r"moves: \d+ of \d+; not: ", lines[-3])
    assert re.match(r"orders in states: \d+ of \d+; not: ", lines[-2])


def test_a_seed_is_played_again_exactly() -> None:
    first, again = _run("--seed", "7"), _run("--seed", "7")
    assert first.stdout == again.stdout
    assert len(first.stdout.splitlines()) > 50


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bugs_are_found(bug: Planted) -> None:
    for seed in bug.seeds(MOST_SEEDS):
        with planted(bug):
            found = bug.schedule(seed).run()
        if found:
            assert "Error(" not in found[0], "the bug is planted wrongly"
            return
    pytest.fail(f"{bug.name}: not found")


def test_seeds_that_found_bugs_are_those_of_bugs() -> None:
    assert _FOUND_BY.keys() <= {bug.name for bug in BUGS}


@pytest.mark.parametrize(("older", "newer", "found"), [(2, 3, 0), (1, 3, 1), (2, 4, 1), (1, 2, 1)])
def test_only_the_run_that_counts_again_may_overwrite_one_that_nobody_knows(older: int, newer: int, found: int) -> None:
    url = "copy://h1/1/f0"
    world = World(Random(1), False)
    destination = Destination(world, unknown={3, 4}, overtaken={(2, 3)})
    for number in (newer, older):
        run = Execution(number, "job", number, "ep0", {url: b"x"}, counted=True)
        assert destination.put(run, url, b"x", "ep0.1") == ""
    assert len(world.violations) == found


def _excused_after_any_backup(simulation: Misfortunes, known: int) -> set[tuple[int, int]]:
    """A wider excuse: any older run may come over any newer one."""
    return {(older, newer) for newer in range(1, 200) for older in range(1, newer)}


def test_a_wider_excuse_after_a_backup_would_hide_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """The narrow one does not cover runs that are confirmed while older ones may still be sent."""
    monkeypatch.setattr(Judgement, "_against_sending", lambda *facts: "")  # it would speak first
    misfortunes = ("backup", "lost_sight", "vacate", "lost_sight")
    (bug,) = (one for one in BUGS if "a new run is confirmed while" in one.name)

    def overwritten(seed: int) -> list[str]:
        with planted(bug):
            return [text for text in Simulation(seed, misfortunes=misfortunes).run() if "overwrites" in text]

    for seed in (215, *range(400)):  # the first one is known
        if overwritten(seed):
            with monkeypatch.context() as patch:
                patch.setattr(Misfortunes, "_overtaken", _excused_after_any_backup)
                if not overwritten(seed):
                    return
    pytest.fail("no schedule tells the two apart")


@pytest.fixture(scope="module")
def scenes() -> dict[str, int]:
    return scenes_by_label()


_WALKED = [label for label in labels_of_the_table() if not ELSEWHERE.match(label)]


@pytest.mark.parametrize("label", _WALKED)
def test_every_label_is_walked(label: str, scenes: dict[str, int]) -> None:
    assert label in scenes, f"no scene of tests/crash/walk.py passes {label}: add one"
    assert walk(label, scenes[label], lasting=("ENOSPC",)) == []


@pytest.mark.parametrize(("action", "state"), PAIRS, ids=lambda part: part.value)
def test_each_order_meets_runs_in_each_state(action: Action, state: State) -> None:
    simulation = meet(action, state)
    assert simulation.world.violations == []
    assert simulation.coverage.orders[action, state], "no schedule leads there: add a way to tests/crash/meetings.py"
