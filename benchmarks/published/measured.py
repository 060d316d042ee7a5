"""The figures that benchmarks have left in a directory."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from published.headlines import Row

from tests.harness.demo.record import JobRecord, Record
from tests.harness.demo.workload import JobReport
from tests.harness.narrow_destination import Transfer

TIMELINE = Path("demo/timeline.json")
Figures = Mapping[str, list[dict[str, Any]]]


def path_of(folder: Path, program: str) -> Path:
    """Return the JSON file of a program, whether or not it is there."""
    return folder / (TIMELINE if program == "demo" else f"{program}.json")


def read_figures(folder: Path, programs: Mapping[str, object]) -> tuple[Figures, str]:
    """Return the figures of each program that has left some, and the machine in a line ("" without figures)."""
    found: dict[str, list[dict[str, Any]]] = {}
    machine = ""
    for program in programs:
        path = path_of(folder, program)
        if not path.exists():
            continue
        if program == "demo":
            found[program] = _demo_figures(*read_timeline(folder))
            continue
        content = json.loads(path.read_text())
        found[program], machine = content["figures"], content["machine"]
    return found, machine


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
