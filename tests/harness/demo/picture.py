"""The timeline picture: CPU slots and data slots over time, one run below the other, on one time axis.

The picture is an SVG that needs no library. It can be read when it is 400 pixels wide, and follows the colours that the
reader's browser prefers.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from tests.harness.demo.record import JobRecord, Record

_LEGEND = (
    ("busy", "job computes on a CPU slot"),
    ("held", "CPU slot held after its end"),
    ("waits", "output waits in a data slot"),
    ("sent", "output is sent from there"),
)
_STYLE = """
text{font:14px sans-serif;fill:#1a1a1a}.head{font-weight:bold}.page{fill:#fff}.grid{stroke:#e0e0e0}
.end{stroke:#222;stroke-dasharray:4 3}
.busy{fill:#2f6db5}.held{fill:#c9403c}.waits{fill:#c4c4c4}.sent{fill:#2f7d50}.on{fill:#fff}
@media (prefers-color-scheme:dark){text{fill:#f0f0f0}.page{fill:#14181d}.grid{stroke:#3a414a}.end{stroke:#ddd}
.busy{fill:#3a78c2}.held{fill:#cf4a46}.waits{fill:#6b7683}.sent{fill:#35855a}.on{fill:#fff}}
"""
_WIDTH, _LEFT, _RIGHT = 480, 90, 10
_LINE, _ROW, _TICK_S = 19, 40, 20
_SHORTEST_LABEL_S = 2.0


def draw(records: Sequence[Record], path: Path, *, subtitle: str) -> None:
    """Write the picture.

    :param records: runs, drawn top to bottom.
    :param subtitle: a sentence about the jobs and the link.
    """
    longest_s = 1.06 * max(record.makespan_s for record in records)
    scale = (_WIDTH - _LEFT - _RIGHT) / longest_s
    y, parts = _LINE, []
    for line in textwrap.wrap(subtitle, 66):
        parts.append(_text(8, y, line))
        y += _LINE
    for record in records:
        y += 12
        parts.append(_text(8, y, f"{record.title}: all delivered after {record.makespan_s:.0f} s,", "head"))
        parts.append(_text(8, y + _LINE, f"slots held {record.held_s:.2f} s after a job's end", "head"))
        y += _LINE + 8
        parts += _panel(record, y, scale, longest_s)
        y += _ROW * len(_rows(record)) + 12
    for at_s in range(0, int(longest_s) + 1, _TICK_S):
        parts.append(_text(_LEFT + at_s * scale, y + 4, f"{at_s} s", "", "middle"))
    y += 12
    for number, (kind, label) in enumerate(_LEGEND):
        x, at = 8 + (number % 2) * 236, y + (number // 2) * 22
        parts += [
            f'<rect class="{kind}" x="{x}" y="{at}" width="18" height="14" rx="2"/>',
            _text(x + 26, at + 12, label),
        ]
    height = y + 50
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" aria-labelledby="t">'
    title = "CPU slots and data slots over time: " + "; ".join(
        f"{record.title}: {record.makespan_s:.0f} s" for record in records
    )
    page = f'<rect class="page" width="{_WIDTH}" height="{height}"/>'
    lines = [head, f'<title id="t">{escape(title)}</title><style>{_STYLE}</style>', page, *parts, "</svg>"]
    path.write_text("\n".join(lines) + "\n")


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _rows(record: Record) -> list[tuple[str, str]]:
    """(kind, slot) of each row, top to bottom: data slots only where something was sent from one."""
    slots = sorted({job.slot for job in record.jobs})
    kinds = ["CPU", "data"] if any(_in_data_slot(job) for job in record.jobs) else ["CPU"]
    return [(kind, slot) for slot in slots for kind in kinds]


def _in_data_slot(job: JobRecord) -> bool:
    """True when the output was sent after the CPU slot had been given back."""
    return job.moved_s[1] > job.free_s


def _panel(record: Record, top: float, scale: float, longest_s: float) -> Iterator[str]:
    """Draw one run below ``top``. :param scale: pixels of a second."""
    rows = _rows(record)
    bottom = top + _ROW * len(rows)
    for at_s in range(0, int(longest_s) + 1, _TICK_S):
        x = _LEFT + at_s * scale
        yield f'<path class="grid" d="M{x:.1f} {top}V{bottom}"/>'
    for index, (kind, slot) in enumerate(rows):
        jobs = [job for job in record.jobs if job.slot == slot]
        middle = top + (index + 0.5) * _ROW
        yield _text(8, middle + 5, f"{kind} slot {slot.rpartition('_')[2].removeprefix('slot')}")
        if kind == "CPU":
            yield from _cpu_row(middle, jobs, record.began_s, scale)
        else:
            yield from _data_row(middle, [job for job in jobs if _in_data_slot(job)], record.began_s, scale)
    x = _LEFT + record.makespan_s * scale
    yield f'<path class="end" d="M{x:.1f} {top}V{bottom}"/>'


def _cpu_row(middle: float, jobs: Sequence[JobRecord], began_s: float, scale: float) -> Iterator[str]:
    for job in jobs:
        start, end, free = (at - began_s for at in (job.report.started_s, job.report.ended_s, job.free_s))
        yield from _bar(middle, start, end, scale, "busy", str(job.number))
        yield from _bar(middle, end, free, scale, "held", str(job.number))


def _data_row(middle: float, jobs: Sequence[JobRecord], began_s: float, scale: float) -> Iterator[str]:
    """Bars in as many lanes as sandboxes are in the data slot at once."""
    lanes: list[float] = []
    placed = []
    for job in sorted(jobs, key=lambda one: one.free_s):
        lane = next((number for number, free_s in enumerate(lanes) if free_s <= job.free_s), len(lanes))
        lanes[lane : lane + 1] = [job.moved_s[1]]
        placed.append((job, lane))
    height = (_ROW - 4) / max(1, len(lanes))
    for job, lane in placed:
        y = middle - (_ROW - 4) / 2 + (lane + 0.5) * height
        free, start, end = (at - began_s for at in (job.free_s, *job.moved_s))
        yield from _bar(y, free, start, scale, "waits", "", height)
        yield from _bar(y, start, end, scale, "sent", str(job.number), height)


def _bar(
    middle: float, start: float, end: float, scale: float, kind: str, label: str, height: float = _ROW - 8
) -> Iterator[str]:
    x, width = _LEFT + start * scale, max(0.0, end - start) * scale
    yield (
        f'<rect class="{kind}" x="{x:.1f}" y="{middle - height / 2 + 0.5:.1f}" width="{width:.1f}" '
        f'height="{height - 1:.1f}"/>'
    )
    if label and end - start > _SHORTEST_LABEL_S:
        yield _text(x + width / 2, middle + 5, label, "on", "middle")
