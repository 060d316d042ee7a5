"""Draws the figures of all benchmarks: ``plot.py [DIR]`` writes ``NAME.png`` for each ``NAME.json`` there."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VALUE, PEER, GOAL = "#2f6db5", "#b5b5b5", "#222222"
_LABEL_COLUMNS = 46


def main() -> None:
    """Draw them all."""
    place = Path(sys.argv[1] if len(sys.argv) > 1 else "out/bench")
    for path in sorted(place.glob("*.json")):
        content = json.loads(path.read_text())
        draw(content, path.with_suffix(".png"))
        print(f"plot: {path.with_suffix('.png')}")


def draw(content: dict[str, Any], path: Path) -> None:
    """Write the picture of one benchmark, with its name and its machine above."""
    import matplotlib.pyplot as plt

    drawn = picture(content["figures"])
    drawn.suptitle(f"{content['name']}\n{content['machine']}", fontsize=9, x=0.01, ha="left")
    drawn.savefig(path, dpi=120)
    plt.close(drawn)


def picture(figures: Sequence[dict[str, Any]]) -> Any:
    """Draw one panel per unit: a bar for each figure, its peer's below it, a tick at the goal."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    units = list(dict.fromkeys(figure["unit"] for figure in figures))
    groups = [[figure for figure in figures if figure["unit"] == unit] for unit in units]
    rows = [sum(1 + (figure["peer_value"] is not None) for figure in group) for group in groups]
    drawn, panels = plt.subplots(
        len(units), 1, figsize=(10, 1.4 + 0.5 * sum(rows) + 0.5 * len(units)), squeeze=False,
        gridspec_kw={"height_ratios": rows}, layout="constrained",
    )  # fmt: skip
    for panel, unit, group in zip(panels[:, 0], units, groups):
        _panel(panel, unit, group)
    return drawn


def _panel(panel: Any, unit: str, figures: list[dict[str, Any]]) -> None:
    labels: list[str] = []
    for figure in figures:
        _bar(panel, len(labels), figure["value"], VALUE, figure["goal"])
        labels.append(figure["what"])
        if figure["peer_value"] is not None:
            _bar(panel, len(labels), figure["peer_value"], PEER, None)
            labels.append(f"beside: {figure['peer']}")
    panel.set_yticks(range(len(labels)), [textwrap.fill(label, _LABEL_COLUMNS) for label in labels], fontsize=8)
    panel.invert_yaxis()
    panel.set_xlabel({"s": "seconds", "ms": "milliseconds", "": "ratio"}.get(unit, unit), fontsize=8)
    panel.margins(x=0.12)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def _bar(panel: Any, row: int, value: float, color: str, goal: float | None) -> None:
    panel.barh(row, value, color=color, height=0.7)
    right = (max(value, goal or 0), row)
    panel.annotate(f"{value:.3g}", right, xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)
    if goal is not None:
        panel.vlines(goal, row - 0.45, row + 0.45, color=GOAL, linewidth=2)
        panel.annotate("goal", (goal, row - 0.45), fontsize=6, ha="center", va="bottom")


if __name__ == "__main__":
    main()
