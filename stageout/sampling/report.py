"""A profile for people: a table, plots, and a page with both."""

from __future__ import annotations

import base64
import html
import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stageout.core.errors import StageoutError
from stageout.core.profiles import Best, Measurement, Profile
from stageout.core.units import MB, rate, size
from stageout.sampling.profiler import LEAST_LEVELS, Comparison, Levels, levels, reservation_cost

_HEAD = (
    "",
    "file",
    "streams",
    "files at once",
    "block",
    "MB/s",
    "client CPU s/GB",
    "client MB",
    "server CPU s/GB",
    "server MB",
)


def row(run: Measurement) -> tuple[str, ...]:
    """Write one line of the table."""
    gigabytes = max(run.moved_bytes, 1) / 1e9
    return (
        run.direction + {True: ", space reserved", False: ", not reserved", None: ""}[run.reserved],
        size(run.file_bytes),
        str(run.streams),
        str(run.concurrency),
        size(run.block_bytes) if run.block_bytes else "-",
        f"{run.rate_bytes_per_s / MB:.1f}",
        f"{run.client_cpu_s / gigabytes:.2f}",
        f"{run.client_rss_bytes / MB:.0f}",
        "-" if run.server_cpu_s is None else f"{run.server_cpu_s / gigabytes:.2f}",
        "-" if run.server_rss_bytes is None else f"{run.server_rss_bytes / MB:.0f}",
    )


def table(profile: Profile) -> str:
    """Write all runs, and the conclusions."""
    rows = [_HEAD, *(row(run) for run in profile.runs)]
    widths = [max(len(line[column]) for line in rows) for column in range(len(_HEAD))]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:])]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join([*lines, "", *conclusions(profile)])


def conclusions(profile: Profile) -> list[str]:
    """Return the conclusions, in sentences."""
    found = [f"{way}: {_choice(levels(profile.runs, way), best)}" for way, best in profile.best.items()]
    compared = reservation_cost(profile.runs)
    if compared is not None:
        found.append(f"reserving the space before writing {_cost(compared)}")
    return found


def _choice(seen: Levels, best: Best) -> str:
    """Return what the measurements say about the number of streams and of files at once."""
    if not seen.are_enough or seen.noise is None:
        return (
            f"not enough data to choose a number of streams or of files at once. That takes {LEAST_LEVELS} numbers and "
            "several equal measurements: raise --max-time or --max-bytes"
        )
    differ = f"equal measurements differ by {seen.noise:.0%}"
    if best.rate_bytes_per_s <= seen.single * (1 + seen.noise):
        return f"more streams or files at once bring no clear gain ({differ}); {rate(seen.single)} with one"
    return (
        f"{best.streams} streams of one file, or {best.concurrency} files at once, come within "
        f"{max(0.03, seen.noise):.0%} of the best ({differ}); {rate(best.rate_bytes_per_s)}"
    )


def _cost(compared: Comparison) -> str:
    if not compared.is_clear:
        return f"makes no clear difference: not enough data ({compared.pairs} pairs: too few, or their rates overlap)"
    return f"{'costs' if compared.cost >= 0 else 'gains'} {abs(compared.cost):.0%} of the rate (median)"


def picture(profile: Profile) -> bytes:
    """Draw the plots as PNG.

    :raises StageoutError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise StageoutError("plots need matplotlib: pip install matplotlib, or leave --plot out") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ways = [way for way in ("upload", "download") if way in profile.best]
    figure, panels = plt.subplots(
        3, max(1, len(ways)), figsize=(5.5 * len(ways), 10), squeeze=False, layout="constrained"
    )
    for column, way in enumerate(ways):
        runs = [run for run in profile.runs if run.direction == way and run.reserved is None]
        _lines(panels[0][column], _series(runs, "concurrency"), f"{way}: files at once and streams", "MB/s")
        blocks = [run for run in runs if run.block_bytes]
        if blocks:
            _lines(panels[1][column], _series(blocks, "block_bytes"), f"{way}: block size and streams", "MB/s")
        else:
            _sizes(panels[1][column], runs, way)
        _cpu(panels[2][column], runs, way)
    when = time.strftime("%Y-%m-%d", time.gmtime(profile.at))
    figure.suptitle(f"{profile.scheme}://{profile.server}, {when}", fontsize=10)
    kept = io.BytesIO()
    figure.savefig(kept, format="png", dpi=110)
    plt.close(figure)
    return kept.getvalue()


def _series(runs: Sequence[Measurement], name: str) -> dict[str, list[tuple[int, float]]]:
    """Group the runs into one line for each value of an attribute: streams -> rate."""
    found: dict[str, list[tuple[int, float]]] = {}
    for run in runs:
        if name == "concurrency" and (run.block_bytes or not run.all_at_once):
            continue
        value = getattr(run, name)
        label = size(value) + " blocks" if name == "block_bytes" else f"{value} at once"
        found.setdefault(label, []).append((run.streams, run.rate_bytes_per_s / MB))
    return {label: sorted(dict(points).items()) for label, points in found.items()}


def _lines(panel: Any, series: dict[str, list[tuple[int, float]]], title: str, unit: str) -> None:
    for label, points in series.items():
        panel.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=4, label=label)
    panel.set_title(title, fontsize=9)
    panel.set_xlabel("streams of each file", fontsize=8)
    panel.set_ylabel(unit, fontsize=8)
    panel.set_ylim(bottom=0)
    panel.legend(fontsize=7)


def _sizes(panel: Any, runs: Sequence[Measurement], way: str) -> None:
    points = sorted({run.file_bytes: run.rate_bytes_per_s / MB for run in runs if run.streams == 1}.items())
    panel.plot([size / (1 << 20) for size, _ in points], [rate for _, rate in points], marker="o", markersize=4)
    panel.set_xscale("log", base=2)
    panel.set_title(f"{way}: file size", fontsize=9)
    panel.set_xlabel("MiB", fontsize=8)
    panel.set_ylabel("MB/s", fontsize=8)
    panel.set_ylim(bottom=0)


def _cpu(panel: Any, runs: Sequence[Measurement], way: str) -> None:
    """Collect the CPU of both ends for the same work, over streams of one file, and over files at once."""
    large = max((run.moved_bytes for run in runs), default=0) // 2
    plain = [run for run in runs if run.all_at_once and not run.block_bytes and run.moved_bytes >= max(1, large)]
    for over, other, style in (("streams", "concurrency", "-"), ("concurrency", "streams", "--")):
        some = sorted((run for run in plain if getattr(run, other) == 1), key=lambda run: int(getattr(run, over)))
        for label, colour, name in (("client", "C0", "client_cpu_s"), ("server", "C1", "server_cpu_s")):
            points = [(getattr(run, over), getattr(run, name), run.moved_bytes / 1e9) for run in some]
            known = [(count, spent / work) for count, spent, work in points if spent is not None]
            if known:
                words = f"{label}, {'streams of one file' if over == 'streams' else 'files at once'}"
                panel.plot(*zip(*known), style, color=colour, marker="o", markersize=4, label=words)
    panel.set_title(f"{way}: CPU", fontsize=9)
    panel.set_xlabel("streams of one file, or files at once", fontsize=8)
    panel.set_ylabel("s/GB", fontsize=8)
    panel.set_ylim(bottom=0)
    if panel.lines:
        panel.legend(fontsize=7)


def write_plot(profile: Profile, path: Path) -> None:
    """Draw the plots into a ``.png``, or into a ``.html`` page with the table.

    :raises StageoutError: another ending, no matplotlib, or the file cannot be written.
    """
    if path.suffix not in (".png", ".html"):
        raise StageoutError(f"{path}: plots are written as .png or .html")
    data = picture(profile)
    if path.suffix == ".html":
        data = _page(profile, data).encode()
    try:
        path.write_bytes(data)
    except OSError as problem:
        raise StageoutError(f"cannot write {path}: {problem.strerror}") from None


def _page(profile: Profile, png: bytes) -> str:
    name = html.escape(f"{profile.scheme}://{profile.server}")
    image = base64.b64encode(png).decode()
    return (
        f'<!doctype html><meta charset="utf-8"><title>{name}</title><h1>{name}</h1>'
        f'<img alt="plots" src="data:image/png;base64,{image}"><pre>{html.escape(table(profile))}</pre>\n'
    )
