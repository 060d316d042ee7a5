"""The form of all benchmarks: ``NAME.py [--quick] [--json FILE]`` prints a table and writes the same as JSON.

A benchmark is a function that returns figures. Peers run in the same call, alternating, and medians are compared.
One of independent parts can be run piece by piece: ``--only PART`` keeps the figures of the others in the JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stageout.core.errors import StageoutError

# The tests' harness is no part of the product: it is imported from this checkout.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))


@dataclass(frozen=True)
class Figure:
    """One result.

    :param peer: what it stands beside; "" for nothing. :param peer_value: in the same unit.
    :param goal: greatest value that is good enough, or the least one with ``more``; None where there is no goal.
    :param noise: by how much the value may be wrong; None where that is unknown.
    """

    what: str
    value: float
    unit: str
    peer: str = ""
    peer_value: float | None = None
    goal: float | None = None
    more: bool = False
    noise: float | None = None

    @property
    def ratio(self) -> float | None:
        """Value over the peer's; None without a peer."""
        return self.value / self.peer_value if self.peer_value else None

    @property
    def met(self) -> bool | None:
        """Tell whether the goal is met; None without a goal."""
        if self.goal is None:
            return None
        return self.value >= self.goal if self.more else self.value <= self.goal

    def as_json(self) -> dict[str, Any]:
        """The form that ``run_all`` and the plots read."""
        return {
            "what": self.what,
            "value": round(self.value, 6),
            "unit": self.unit,
            "peer": self.peer,
            "peer_value": None if self.peer_value is None else round(self.peer_value, 6),
            "ratio": None if self.ratio is None else round(self.ratio, 4),
            "goal": self.goal,
            "met": self.met,
            "noise": None if self.noise is None else round(self.noise, 6),
        }


def machine() -> str:
    """This machine in a line: processor, cores, memory, kernel, Python."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{model}, {cores} cores, {gib:.0f} GiB, Linux {platform.release()}, Python {platform.python_version()}"


def table(figures: Sequence[Figure]) -> str:
    """Figures for a person."""
    lines = [f"{'':58}{'value':>12} {'unit':5}{'peer':>12}{'ratio':>8}{'goal':>10}  met", "-" * 112]
    for figure in figures:
        peer = "" if figure.peer_value is None else f"{figure.peer_value:.4g}"
        ratio = "" if figure.ratio is None else f"{figure.ratio:.3g}"
        sign = ">=" if figure.more else "<="
        goal = "" if figure.goal is None else f"{sign} {figure.goal:.4g}"
        met = {None: "", True: "yes", False: "NO"}[figure.met]
        lines.append(f"{figure.what:58}{figure.value:12.4g} {figure.unit:5}{peer:>12}{ratio:>8}{goal:>10}  {met}")
        if figure.peer:
            lines.append(f"    beside: {figure.peer}")
    return "\n".join(lines)


def main(name: str, measure: Callable[[bool], list[Figure]], arguments: Sequence[str] | None = None) -> int:
    """Command line of a benchmark.

    :param measure: called with True for a quick run (under three minutes).
    :returns: exit status: 0 when all goals are met, 1 when one is missed, 2 when it could not be measured.
    """
    given = _parser(name).parse_args(arguments)
    return _run(name, given.json, lambda: measure(given.quick), lambda figure: False)


def main_in_parts(
    name: str,
    parts: Sequence[str],
    measure: Callable[[Sequence[str], bool], list[Figure]],
    arguments: Sequence[str] | None = None,
    further: Callable[[Path], None] | None = None,
) -> int:
    """Likewise of a benchmark of independent parts. The name of a figure begins with its part and a colon.

    :param measure: called with the parts that are wanted (all, when none is named) and whether it is to be quick.
    :param further: writes what figures cannot show into the directory of the JSON file.
    """
    parser = _parser(name)
    parser.add_argument(
        "--only", action="append", choices=parts, help="measure this part; the JSON file keeps the others"
    )
    given = parser.parse_args(arguments)
    wanted = given.only or parts

    def kept(figure: dict[str, Any]) -> bool:
        return bool(given.only) and figure["what"].partition(":")[0] not in wanted

    status = _run(name, given.json, lambda: measure(wanted, given.quick), kept)
    if given.json and further is not None and status < 2:
        further(given.json.parent)
    return status


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"{name}.py")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller runs, under three minutes")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser


def _run(
    name: str, place: Path | None, measure: Callable[[], list[Figure]], kept: Callable[[dict[str, Any]], bool]
) -> int:
    """Measure, print, write; exit status. :param kept: of the figures in the file."""
    try:
        figures = measure()
    except StageoutError as failed:
        print(f"{name}: could not be measured: {failed}", file=sys.stderr)
        return 2
    print(f"{name} ({machine()})\n{table(figures)}")
    found = [figure.as_json() for figure in figures]
    if place:
        if place.exists():
            found = [figure for figure in json.loads(place.read_text())["figures"] if kept(figure)] + found
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps({"name": name, "machine": machine(), "figures": found}, indent=1) + "\n")
    return 1 if any(figure["met"] is False for figure in found) else 0


def median_noise(values: Sequence[float]) -> float:
    """Return by how much the median may be wrong: half of the interval that holds it with about 95 % confidence."""
    ordered = sorted(values)
    left_out = max(0, int(len(ordered) / 2 - len(ordered) ** 0.5))
    return (ordered[-1 - left_out] - ordered[left_out]) / 2


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile: the smallest value that so many percent of all do not exceed."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]
