"""The simulator holds for the protocol, finds every planted fault, and replays."""

from __future__ import annotations

from functools import lru_cache

import pytest

from overlay_router.rules.states import Outcome
from overlay_router.simulation import simulator
from overlay_router.simulation.segment import Bug


@lru_cache
def first_fault(bug: Bug) -> tuple[int, str]:
    for seed in range(1, 3_001):
        fault = simulator.run_schedule(seed, bug)
        if fault:
            return seed, fault
    return 0, ""


def test_no_schedule_breaks_an_invariant() -> None:
    assert {seed: fault for seed in range(1, 2_001) if (fault := simulator.run_schedule(seed))} == {}


@pytest.mark.parametrize("bug", list(Bug), ids=lambda bug: bug.name.lower())
def test_planted_fault_is_found_and_replays(bug: Bug) -> None:
    seed, fault = first_fault(bug)
    assert fault.startswith("invariant ") or "block" in fault, f"{bug.value}: not found"
    assert simulator.run_schedule(seed, bug) == fault
    assert simulator.run_schedule(seed) == ""


def test_each_invariant_finds_a_fault() -> None:
    """But the fifth, which no code could break: relays and terminals have none that sends a block again."""
    found = {first_fault(bug)[1].partition(":")[0] for bug in Bug}
    assert found >= {f"invariant {number}" for number in (1, 2, 3, 4, 6, 7)}


def test_schedules_reach_the_places_that_matter() -> None:
    outcomes, restarted, custody, disks = set(), 0, 0, 0
    for seed in range(1, 401):
        world = simulator.World(seed)
        world.run()
        outcomes |= {row.result.outcome for o in world.origins for row in o.sender.rows.values() if row.result}
        restarted += world.restarts
        custody += sum(bool(row.custodians) for o in world.origins for row in o.sender.rows.values())
        disks += world.lost_disk
    assert outcomes >= {Outcome.DONE, Outcome.FAILED, Outcome.CANCELLED, Outcome.EXPIRED, Outcome.LOST}
    assert min(restarted, custody, disks) > 10


def test_command_line_ends_with_the_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulator.main(["--schedules", "20"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "sim: 20 schedules, 0 violations"


def test_a_violation_is_printed_with_its_seed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulator, "run_schedule", lambda seed: "invariant 2: gone")
    assert simulator.main(["--seed", "77"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "seed 77: invariant 2: gone"
    assert out[-1] == "sim: 1 schedules, 1 violations"
