"""The walk: every label of docs/developer/durable-steps.md of manager, agent and hand-off, with every fault.

Beside it: each order of an access point in each state of a run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from stageout.core.states import State
from stageout.wire.custody import Action
from tests.crash.meetings import WAYS, Meeting
from tests.crash.simulation import FAULTS, Fault, Simulation

ORDERING = Path(__file__).resolve().parents[2] / "docs/developer/durable-steps.md"

#: Quiet schedules in which one thing goes wrong; together they pass all the labels.
SCENARIOS = (
    ("all_refuse",), ("all_refuse",), ("file_gone",), ("all_refuse",), ("ledger_lost",), ("disk_full",),
    ("disk_full",), ("destination_down",), ("kill_manager",), ("all_refuse",), ("all_refuse",), ("all_refuse",),
    ("all_refuse",), ("power_after_handoff",), ("sync_refused",),
)  # fmt: skip
_LENGTH_S = 1200.0

#: Labels of other parts, or of parts that this pool has not; they are walked where they are tested.
ELSEWHERE = re.compile(
    r"ledger-repair|spool-aside|spool-take-back|record-unknown|policy-|profile-|overlay-|router-|capability-|globus-|handoff-credential|credential-|record-renewed"
    r"|intake-account|agent-certificate|front-end|plugin-answer|report-last|record-handed-over|custody-|egress-|copy-|failure-"
    r"|edit-factory|watched-|brought-|operation-|kept-"
)


def labels_of_the_table() -> list[str]:
    """All labels of docs/developer/durable-steps.md."""
    return re.findall(r"^\| `([a-z-]+)` \|", ORDERING.read_text(), re.M)


def scene(number: int, fault: Fault | None = None, keep_trace: bool = False) -> Simulation:
    """One of the quiet schedules."""
    return Simulation(
        number + 1, keep_trace, SCENARIOS[number % len(SCENARIOS)], fault=fault, events=2, length_s=_LENGTH_S
    )  # fmt: skip


def scenes_by_label(most: int = 40) -> dict[str, int]:
    """A quiet schedule for each label, as short as there is one."""
    found: dict[str, tuple[float, int]] = {}
    wanted = {label for label in labels_of_the_table() if not ELSEWHERE.match(label)}
    for number in range(most):
        if number >= len(SCENARIOS) and not wanted - found.keys():
            break
        simulation = scene(number)
        assert simulation.run() == [], f"scene {number}: {simulation.world.violations}"
        cost = float(sum(simulation.world.labels.values()))
        for label in simulation.world.labels:
            found[label] = min(found.get(label, (cost, number)), (cost, number))
    return {label: number for label, (_, number) in found.items()}


def faults_of(label: str, lasting: tuple[str, ...] = FAULTS) -> Iterator[Fault]:
    """All faults of a label: each once, and errors until all is mended. :param lasting: of the latter, only these."""
    for what in FAULTS:
        yield Fault(label, what, False)
        if not what.startswith("kill") and what in lasting:
            yield Fault(label, what, True)


def walk(label: str, number: int, lasting: tuple[str, ...] = FAULTS) -> list[str]:
    """Play the scene of a label once for each fault. Returns what was violated."""
    found = []
    for fault in faults_of(label, lasting):
        simulation = scene(number, fault)
        found += [f"{fault} in scene {number}: {text}" for text in simulation.run()]
        if not fault.for_ever and not simulation.faulted:
            found.append(f"{fault} in scene {number} did not happen")
    return found


def meet(action: Action, state: State, most: int = 10) -> Simulation:
    """Play schedules until an order meets a run in this state, or a promise is broken. Return the last one."""
    for seed in range(1, most + 1):
        simulation = Simulation(
            seed, misfortunes=WAYS.get(state, ("wish",)), meeting=Meeting(action, state), events=2, length_s=1500.0,
            jobs=2,
        )  # fmt: skip
        if simulation.run() or simulation.coverage.orders[action, state]:
            break
    return simulation
