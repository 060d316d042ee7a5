"""The timeline picture: CPU slots and data slots over time, one run below the other, on one time axis."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.harness.demo.record import JobRecord, Record

COMPUTE, HELD, WAITS, MOVES = "#2f6db5", "#d9534f", "#d8d8d8", "#3f9b62"
_LEGEND = (
    (COMPUTE, "job computes on a CPU slot"),
    (HELD, "CPU slot held after the job's end"),
    (WAITS, "output waits in a data slot"),
    (MOVES, "output is sent from a data slot"),
)
_SHORTEST_LABEL_S = 1.5


def draw(records: Sequence[Record], path: Path, *, subtitle: str) -> None:
    """Write the picture.

    :param records: runs, drawn top to bottom.
    :param subtitle: one line about the jobs and the link.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    rows = [len(_rows(record)) for record in records]
    sizes: dict[str, Any] = {"height_ratios": rows, "hspace": 0.42}
    figure, panels = plt.subplots(
        len(records), 1, sharex=True, figsize=(11, 1.9 + 0.62 * sum(rows)), gridspec_kw=sizes, squeeze=False
    )
    for panel, record in zip(panels[:, 0], records):
        _panel(panel, record)
    panels[-1, 0].set_xlabel("seconds since the jobs were submitted")
    panels[-1, 0].set_xlim(0, 1.06 * max(record.makespan_s for record in records))
    figure.suptitle(subtitle, x=0.125, y=0.985, ha="left", fontsize=10, color="#444444")
    patches = [Patch(color=color, label=label) for color, label in _LEGEND]
    figure.legend(handles=patches, loc="lower center", ncol=4, frameon=False, fontsize=9)
    inches = figure.get_figheight()
    figure.subplots_adjust(left=0.125, right=0.985, top=1 - 0.75 / inches, bottom=0.95 / inches)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _rows(record: Record) -> list[tuple[str, str]]:
    """(kind, slot) of each row, top to bottom: data slots only where something was sent from one."""
    slots = sorted({job.slot for job in record.jobs})
    kinds = ["CPU", "data"] if any(_in_data_slot(job) for job in record.jobs) else ["CPU"]
    return [(kind, slot) for slot in slots for kind in kinds]


def _in_data_slot(job: JobRecord) -> bool:
    """True when the output was sent after the CPU slot had been given back."""
    return job.moved_s[1] > job.free_s


def _panel(panel: Any, record: Record) -> None:
    rows = _rows(record)
    for index, (kind, slot) in enumerate(rows):
        jobs = [job for job in record.jobs if job.slot == slot]
        if kind == "CPU":
            _cpu_row(panel, index, jobs, record.began_s)
        else:
            _data_row(panel, index, [job for job in jobs if _in_data_slot(job)], record.began_s)
    panel.axvline(record.makespan_s, color="#222222", linewidth=1, linestyle=(0, (4, 3)))
    panel.set_yticks(range(len(rows)), [f"{kind} slot {slot.removeprefix('slot')}" for kind, slot in rows], fontsize=9)
    panel.set_ylim(len(rows) - 0.45, -0.55)
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    panel.set_axisbelow(True)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    held = f"slots held {record.held_s:.2f} s after a job's end"
    panel.set_title(
        f"{record.title}: all delivered after {record.makespan_s:.0f} s, {held}",
        loc="left",
        fontsize=11,
        fontweight="bold",
    )


def _cpu_row(panel: Any, index: int, jobs: Sequence[JobRecord], began_s: float) -> None:
    for job in jobs:
        start, end, free = (at - began_s for at in (job.report.started_s, job.report.ended_s, job.free_s))
        _bar(panel, index, start, end, COMPUTE, str(job.number))
        _bar(panel, index, end, free, HELD, str(job.number))


def _data_row(panel: Any, index: int, jobs: Sequence[JobRecord], began_s: float) -> None:
    """Bars in as many lanes as sandboxes are in the data slot at once."""
    lanes: list[float] = []
    placed = []
    for job in sorted(jobs, key=lambda one: one.free_s):
        lane = next((number for number, free_s in enumerate(lanes) if free_s <= job.free_s), len(lanes))
        lanes[lane : lane + 1] = [job.moved_s[1]]
        placed.append((job, lane))
    height = 0.74 / max(1, len(lanes))
    for job, lane in placed:
        y = index - 0.37 + (lane + 0.5) * height
        free, start, end = (at - began_s for at in (job.free_s, *job.moved_s))
        _bar(panel, y, free, start, WAITS, "", height)
        _bar(panel, y, start, end, MOVES, str(job.number), height)


def _bar(panel: Any, y: float, start: float, end: float, color: str, label: str, height: float = 0.74) -> None:
    panel.barh(y, max(0.0, end - start), left=start, height=height * 0.94, color=color, linewidth=0)
    if label and end - start > _SHORTEST_LABEL_S:
        panel.text((start + end) / 2, y, label, ha="center", va="center", color="white", fontsize=8.5)
