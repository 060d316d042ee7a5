"""The figures that benchmarks have left in a directory."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from published.headlines import Row
from published.programs import PROGRAMS

from tests.harness.demo.record import JobRecord, Record
from tests.harness.demo.workload import JobReport
from tests.harness.narrow_destination import Transfer

TIMELINE = Path("demo/timeline.json")
Figures = Mapping[str, list[dict[str, Any]]]


#: Fewer rounds say nothing about noise. A figure decides a goal then only if it is clear of it: by this share of the
#: goal, and a figure that is a share itself also by this much.
_LEAST_ROUNDS, _CLEAR, _CLEAR_SHARE = 3, 0.1, 0.02
MET, MISSED, NOT_ENOUGH = "met", "missed", "not enough data"


def path_of(folder: Path, name: str) -> Path:
    """Return the JSON file of a program, whether or not it is there."""
    return folder / (TIMELINE if name == "demo" else f"{name}.json")


def read_figures(folder: Path, quick: bool) -> tuple[Figures, str]:
    """Return the figures of each script that has left some, and the machine in a line ("" without figures).

    Each figure gets the number of ``rounds`` behind it, and whether they vary.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    machine = ""
    for name, program in PROGRAMS.items():
        path = path_of(folder, name)
        if not path.exists():
            continue
        if program.script == "demo":
            figures = _demo_figures(*read_timeline(folder))
        else:
            content = json.loads(path.read_text())
            figures, machine = content["figures"], content["machine"]
        rounds = _LEAST_ROUNDS if program.exact else program.rounds(quick)
        told = {"rounds": rounds, "varies": program.varies}
        found.setdefault(program.script, []).extend({**figure, **told} for figure in figures)
    return found, machine


def verdict(figure: Mapping[str, Any]) -> str:
    """Tell whether a goal is met, or that the data do not decide it; "" without a goal, unless rounds vary."""
    goal, few = figure["goal"], figure["rounds"] < _LEAST_ROUNDS
    if few and figure.get("varies"):
        return NOT_ENOUGH
    if goal is None:
        return ""
    distance = abs(figure["value"] - goal)
    unsure = figure.get("noise") or 0.0
    if goal and few:
        unsure = max(unsure, _CLEAR * goal, _CLEAR_SHARE if figure["unit"] in ("", "share", "ratio") else 0.0)
    if distance < unsure:
        return NOT_ENOUGH
    return MET if figure["met"] else MISSED


def figure_of(row: Row, figures: Figures) -> dict[str, Any] | None:
    """Return the figure that stands beside a published one; None where it was not measured."""
    mine = figures.get(row.program, [])
    return next((one for one in mine if fnmatch.fnmatchcase(one["what"], row.figure)), None)


def read_timeline(folder: Path) -> list[Record]:
    """Return the runs of the demonstration, without and with data slots; empty without them."""
    path = folder / TIMELINE
    if not path.exists():
        return []
    content = json.loads(path.read_text())
    return [_record(content[name]) for name in ("synchronous", "stage_out")]


def _record(data: dict[str, Any]) -> Record:
    jobs = [
        JobRecord(**{
            **job,
            "report": JobReport(**job["report"]),
            "transfers": [Transfer(**transfer) for transfer in job["transfers"]],
        })
        for job in data["jobs"]
    ]  # fmt: skip
    return Record(**{**data, "jobs": jobs})


def _demo_figures(stock: Record, ours: Record) -> list[dict[str, Any]]:
    peer = "HTCondor as it comes"
    rows = (
        ("slot held after a job's end, median", ours.held_s, stock.held_s),
        ("CPU slots free for other work after", ours.slots_free_s, stock.slots_free_s),
        ("all output delivered after", ours.makespan_s, stock.makespan_s),
    )
    return [
        {"what": what, "value": value, "unit": "s", "peer": peer, "peer_value": other, "goal": None, "met": None}
        for what, value, other in rows
    ]
