"""Metrics of daemons below condor_master, from the reconfiguration that switches them on to a delivery."""

from __future__ import annotations

import contextlib
import urllib.request
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from stageout import __version__
from tests.harness.ports import free_ports

pytestmark = pytest.mark.pool


def scrape(port: int) -> dict[tuple[str, ...], float]:
    """Return values by name and values of the labels; none while nobody listens."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return values(answer.read().decode())
    return {}


def values(text: str) -> dict[tuple[str, ...], float]:
    """Return values by name and values of the labels."""
    families = text_string_to_metric_families(text)
    return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}


def test_metrics_follow_output_to_its_destination(site: Any) -> None:
    ep, ap = site.pool.eps[0], site.pool.ap
    file = ep.home / "stageout.prom"
    manager, agent = free_ports(2)
    ep.configure(f"STAGEOUT_MANAGER_METRICS_PORT = {manager}\nSTAGEOUT_MANAGER_METRICS_FILE = {file}\n")
    ap.configure(f"STAGEOUT_AGENT_METRICS_PORT = {agent}\n")
    try:
        site.pool.wait(lambda: scrape(manager) and scrape(agent) and file.exists(), timeout_s=60, what="the metrics")
        before = scrape(manager)
        machine = next(ad["Machine"] for ad in site.pool.startd_ads() if ep.name in ad["Machine"])
        site.destination.stop()
        job = site.submit(extra=f'requirements = Machine == "{machine}"')
        host = site.url().partition("//")[2].partition("/")[0]
        left = ("stageout_pool_destination_files", host, "waiting")
        site.pool.wait(lambda: scrape(agent).get(left) == 2, timeout_s=60, what="the files in the sums of the pool")
        away = ("stageout_pool_destination_unreachable_nodes", host)
        site.pool.wait(lambda: scrape(agent).get(away) == 1, timeout_s=60, what="the server that is away")
        site.destination.start_again()
        site.wait_left(job)
        accepted = ("stageout_manager_handoffs_accepted_total",)
        assert scrape(manager)[accepted] == before[accepted] + 1
        by_server = scrape(manager)["stageout_manager_destination_delivered_bytes_total", host]
        assert by_server >= 40_000
        assert scrape(agent)["stageout_agent_delivery_delay_seconds_count",] >= 1
        assert scrape(agent)["stageout_pool_nodes", "reporting"] >= 2  # a node of an earlier test may still be listed
        assert values(file.read_text())["stageout_build_info", "stageout-sandbox-manager", __version__]
    finally:
        site.destination.start_again()
        ep.configure("")
        ap.configure("")
    site.pool.wait(lambda: not scrape(manager) and not file.exists(), timeout_s=60, what="the end of the metrics")
