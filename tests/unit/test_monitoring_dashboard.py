"""The dashboard of examples/monitoring fits Grafana's schema, as far as Grafana publishes it.

The sources are ``kinds/dashboard/dashboard_kind.cue`` and ``packages/grafana-data/src/valueFormats/categories.ts`` in
Grafana's repository. No Grafana opens the dashboard here.
"""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.monitoring.queries import EXAMPLE

Dashboard = dict[str, Any]
DASHBOARD: Dashboard = json.loads((EXAMPLE / "dashboard.json").read_text())
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
#: Version of the published schema. Grafana converts older dashboards while it opens them.
_LEAST_SCHEMA = 36
_COLUMNS = 24
_UNITS = {"none", "short", "percent", "percentunit", "bytes", "decbytes", "Bps", "binBps", "s", "cps", "ops", "reqps"}
_VARIABLE_TYPES = {"query", "adhoc", "constant", "datasource", "interval", "textbox", "custom", "system"}
#: Path in a panel -> values that its type knows.
_CHOICES: dict[str, dict[tuple[str, ...], set[str]]] = {
    "timeseries": {
        ("options", "legend", "displayMode"): {"list", "table", "hidden"},
        ("options", "legend", "placement"): {"bottom", "right"},
        ("options", "tooltip", "mode"): {"single", "multi", "none"},
        ("options", "tooltip", "sort"): {"none", "asc", "desc"},
        ("fieldConfig", "defaults", "custom", "showPoints"): {"auto", "never", "always"},
        ("fieldConfig", "defaults", "custom", "stacking", "mode"): {"none", "normal", "percent"},
    },
    "stat": {},
}
_CALCULATIONS = {"lastNotNull", "last", "mean", "max", "min", "sum"}


def faults(dashboard: Dashboard) -> list[str]:
    """Return what Grafana would refuse, ignore or show wrongly."""
    found = [*_of_frame(dashboard), *_of_variables(dashboard), *_of_places(dashboard["panels"])]
    for panel in dashboard["panels"]:
        if panel["type"] != "row":
            found += [f"{panel['title']}: {fault}" for fault in _of_panel(panel)]
    return found


def _of_frame(dashboard: Dashboard) -> Iterator[str]:
    types = {
        "title": str,
        "uid": str,
        "tags": list,
        "version": int,
        "editable": bool,
        "annotations": dict,
        "links": list,
    }
    for name, kind in types.items():
        if not isinstance(dashboard.get(name), kind):
            yield f"{name} is not a {kind.__name__}"
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,40}", str(dashboard.get("uid"))):
        yield "uid has other characters, or too many"
    if dashboard.get("schemaVersion", 0) < _LEAST_SCHEMA:
        yield f"schemaVersion {dashboard.get('schemaVersion')}"
    if "id" in dashboard:
        yield "id belongs to one installation of Grafana"
    if set(dashboard.get("time", {})) != {"from", "to"}:
        yield "time has no range"
    if not re.fullmatch(r"\d+[smhd]", str(dashboard.get("refresh"))):
        yield "refresh is not an interval"


def _of_variables(dashboard: Dashboard) -> Iterator[str]:
    variables = dashboard["templating"]["list"]
    for variable in variables:
        if variable.get("type") not in _VARIABLE_TYPES:
            yield f"variable {variable.get('name')} has type {variable.get('type')}"
        if variable.get("type") == "query" and variable.get("datasource") != _SOURCE:
            yield f"variable {variable['name']} has another data source"
    sources = [one["name"] for one in variables if (one.get("type"), one.get("query")) == ("datasource", "prometheus")]
    if sources != ["datasource"] or variables[0]["name"] != "datasource":
        yield "the first variable is not the data source of Prometheus"
    known = {variable["name"] for variable in variables}
    text = json.dumps([dashboard["panels"], variables])
    for name in sorted({one or other for one, other in re.findall(r"\$(?:\{(\w+)\}|(\w+))", text)}):
        if name not in known and name not in ("__rate_interval", "__all"):
            yield f"variable {name} is not defined"


def _of_places(panels: list[dict[str, Any]]) -> Iterator[str]:
    """Yield faults of the places of panels and of the rows between them."""
    taken = Counter[tuple[int, int]]()
    for panel in panels:
        place = panel["gridPos"]
        if not (place["w"] > 0 and place["h"] > 0 and place["x"] >= 0 and place["x"] + place["w"] <= _COLUMNS):
            yield f"{panel['title']} is outside of the {_COLUMNS} columns"
        taken.update(
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        )
        if panel["type"] == "row" and (place["w"], place["h"], place["x"]) != (_COLUMNS, 1, 0):
            yield f"row {panel['title']} is not a row"
    if taken and max(taken.values()) > 1:
        yield "panels overlap"
    if len({panel["id"] for panel in panels}) < len(panels):
        yield "panels have the same id"


def _of_panel(panel: dict[str, Any]) -> Iterator[str]:
    if panel["type"] not in _CHOICES:
        yield f"type {panel['type']}"
        return
    if any(
        source != _SOURCE for source in [panel.get("datasource"), *(one.get("datasource") for one in panel["targets"])]
    ):
        yield "another data source"
    references = [target.get("refId") for target in panel["targets"]]
    if not references or len(set(references)) < len(references) or None in references:
        yield "queries without a refId of their own"
    unit = _value(panel, ("fieldConfig", "defaults", "unit"))
    if unit not in _UNITS:
        yield f"unit {unit}"
    for path, known in _CHOICES[panel["type"]].items():
        value = _value(panel, path)
        if value is not None and value not in known:
            yield f"{'.'.join(path)} is {value}"
    if (
        panel["type"] == "stat"
        and not set(_value(panel, ("options", "reduceOptions", "calcs")) or ["?"]) <= _CALCULATIONS
    ):
        yield "calculation of a stat"


def _value(panel: dict[str, Any], path: tuple[str, ...]) -> Any:
    found: Any = panel
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def test_the_dashboard_fits_the_schema() -> None:
    assert faults(DASHBOARD) == []


def _set(*path: Any) -> Callable[[Dashboard], None]:
    """Return a change of the dashboard. :param path: keys, then the value."""

    def change(dashboard: Dashboard) -> None:
        place: Any = dashboard
        for key in path[:-2]:
            place = place[key]
        place[path[-2]] = path[-1]

    return change


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (_set("schemaVersion", 16), "schemaVersion 16"), (_set("uid", "a b"), "uid has"), (_set("id", 7), "id belongs"),
        (_set("refresh", "often"), "refresh is not"), (_set("time", {}), "time has no"),
        (_set("tags", ""), "tags is not"),
        (_set("templating", "list", 0, "query", "loki"), "the first variable"),
        (_set("templating", "list", 1, "type", "list"), "has type list"),
        (_set("templating", "list", 1, "datasource", None), "another data source"),
        (_set("templating", "list", 1, "name", "point"), "access_point is not defined"),
        (_set("panels", 1, "gridPos", "x", 20), "outside"), (_set("panels", 2, "gridPos", "x", 3), "overlap"),
        (_set("panels", 0, "gridPos", "h", 2), "overlap"), (_set("panels", 0, "gridPos", "h", 2), "is not a row"),
        (_set("panels", 2, "id", 1), "same id"), (_set("panels", 1, "type", "graph"), "type graph"),
        (_set("panels", 1, "datasource", "Prometheus"), "another data source"),
        (_set("panels", 1, "targets", 0, "datasource", {}), "another data source"),
        (_set("panels", 1, "targets", 0, "refId", None), "refId"),
        (_set("panels", 1, "fieldConfig", "defaults", "unit", "Bytes"), "unit Bytes"),
        (_set("panels", 1, "options", "reduceOptions", "calcs", ["newest"]), "calculation"),
        (_set("panels", 5, "options", "legend", "displayMode", "rows"), "displayMode is rows"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_fault_is_found(change: Callable[[Dashboard], None], fault: str) -> None:
    changed = copy.deepcopy(DASHBOARD)
    change(changed)
    assert [one for one in faults(changed) if fault in one]
