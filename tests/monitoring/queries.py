"""The queries of ``examples/monitoring``, and the metrics that they name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from stageout.core.metrics import METRICS, Kind

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/monitoring"
_METRIC = re.compile(r"\b(?:stageout|process|node|up)(?:_\w+)?\b(?=[\[{ )]|$)")
_STRING = re.compile(r'"[^"]*"')


def alerts() -> list[dict[str, Any]]:
    """Return the rules of the example."""
    [group] = yaml.safe_load((EXAMPLE / "alerts.yml").read_text())["groups"]
    return list(group["rules"])


def panels() -> list[dict[str, Any]]:
    """Return the panels of the dashboard, without its rows."""
    found = json.loads((EXAMPLE / "dashboard.json").read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def dashboard_queries() -> Iterator[tuple[str, str]]:
    """Yield title and query of each line of the dashboard, with values for its variables."""
    for panel in panels():
        for target in panel["targets"]:
            text = target["expr"].replace("$__rate_interval", "1m")
            yield panel["title"], re.sub(r"\$(access_point|node)", ".*", text)


def metrics_in(query: str) -> set[str]:
    """Return the names of the metrics in a query."""
    return set(_METRIC.findall(_STRING.sub('""', query)))


def series_of_table() -> set[str]:
    """Return all names of series that the table declares."""
    ends = {Kind.HISTOGRAM: ("_bucket", "_sum", "_count")}
    return {name + end for name, metric in METRICS.items() for end in ends.get(metric.kind, ("",))}
