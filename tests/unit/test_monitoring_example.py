"""The example for Prometheus and Grafana: queries name metrics of the table, links lead to the operations page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from stageout.wire.matters import Kind
from tests.monitoring.queries import EXAMPLE, alerts, dashboard_queries, metrics_in, panels, series_of_table

ROOT = Path(__file__).resolve().parents[2]
#: Of Prometheus itself, and of each process.
_COMMON = {"up", "process_start_time_seconds", "process_resident_memory_bytes", "process_cpu_seconds_total"}
_NODE_EXPORTER = {"node_textfile_mtime_seconds"}
QUERIES = [*dashboard_queries(), *((rule["alert"], rule["expr"]) for rule in alerts())]


def section(page: str, anchor: str) -> str:
    """Return the text below a heading of an administrator's page, "" without such a heading."""
    text = (ROOT / "docs/administrator" / page).with_suffix(".md").read_text()
    parts = re.split(r"^## (.+)$", text, flags=re.M)
    named = {
        re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-"): text for head, text in zip(parts[1::2], parts[2::2])
    }
    return named.get(anchor, "")


@pytest.mark.parametrize(("what", "query"), QUERIES)
def test_queries_name_metrics_of_the_table(what: str, query: str) -> None:
    named = metrics_in(query)
    assert named, query
    assert named <= series_of_table() | _COMMON | _NODE_EXPORTER, what


def test_metrics_of_a_query_are_found() -> None:
    query = 'sum(rate(stageout_a_b_total{c="stageout_d"}[1m])) / stageout_e unless up{job="x"} == 0'
    assert metrics_in(query) == {"stageout_a_b_total", "stageout_e", "up"}


def test_there_are_seventeen_alerts_with_names_of_their_own() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(names) == len(set(names)) == 17


def test_every_kind_of_matter_has_an_alert() -> None:
    """Output of jobs that have left the queue is its owners', and a router's alert looks at its oldest file."""
    covered = {
        kind for rule in alerts() for text in re.findall(r'kind=~?"([^"]+)"', rule["expr"]) for kind in text.split("|")
    } | {rule["annotations"]["symptom"] for rule in alerts()}
    assert set(map(str, Kind)) - covered == {"left-output", "router"}
    assert any("stageout_router_" in rule["expr"] for rule in alerts())


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_on_nodes_looks_at_a_share(rule: dict[str, str]) -> None:
    """One node alone wakes nobody: what nodes say is summed up before it is compared."""
    if "stageout_manager_" in rule["expr"] or 'job="stageout-manager"' in rule["expr"]:
        assert re.search(r"\b(avg|sum by \(destination\)) ?\(", rule["expr"])
    assert (
        "instance" not in rule["annotations"]["summary"]
        or "stageout_pool_" not in rule["expr"]
        or ("bytes_at_risk" in rule["expr"])
    )


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_leads_to_a_row_of_a_page(rule: dict[str, dict[str, str]]) -> None:
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    place, _, name = page.rpartition("/")
    assert place.endswith("/administrator")
    rows = re.findall(r"^\| (.+?) \|", section(name, anchor), re.M)
    symptom, kinds = rule["annotations"]["symptom"], list(map(str, Kind))
    for one in kinds if symptom == "{{ $labels.kind }}" else [symptom]:
        assert any(one in row.replace("`", "") for row in rows), (anchor, one)
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["summary"].endswith(".") and rule["annotations"]["first"].endswith(".")


def test_kinds_that_alerts_select_exist() -> None:
    """A kind with another name would never be alerted on, or always."""
    named = {
        kind
        for rule in alerts()
        for text in re.findall(r'kind!?[=~]+"([^"]+)"', rule["expr"])
        for kind in text.split("|")
    }
    assert named and named <= set(map(str, Kind))


def test_every_alert_has_a_test() -> None:
    """With the fault, and without it."""
    tests = yaml.safe_load((EXAMPLE / "alerts_test.yml").read_text())["tests"]
    named = {(one["alertname"], bool(one["exp_alerts"])) for item in tests for one in item["alert_rule_test"]}
    assert named == {(rule["alert"], is_firing) for rule in alerts() for is_firing in (True, False)}


def test_jobs_of_alerts_are_those_of_the_scrape_configuration() -> None:
    jobs = {one["job_name"] for one in yaml.safe_load((EXAMPLE / "prometheus.yml").read_text())["scrape_configs"]}
    named = {job for rule in alerts() for job in re.findall(r'job="([^"]+)"', rule["expr"])}
    assert named
    assert named <= jobs


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in panels()]
    cells = [
        (x, y)
        for one in places
        for x in range(one["x"], one["x"] + one["w"])
        for y in range(one["y"], one["y"] + one["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels()}) == len(places)
