"""Three matters of a real pool, on the page, in the doctor's answer and in the metrics within two polls.

Hours of 507 answers are made of a real one: the ledger of the stopped manager gets an earlier time of the failure.
"""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest

from sandbox_manager.custody import updates
from stageout.wire.custody import MANAGER_AD
from stageout.wire.matters import Kind
from tests.harness.destination import Destination
from tests.harness.pool.install import find_checkout, fragments
from tests.harness.pool.waiting import wait_until
from tests.harness.ports import free_ports
from tests.pool.conftest import QUICK_AP, QUICK_EP, VERSION, Site
from tests.pool.test_metrics_pool import scrape

pytestmark = pytest.mark.pool

_POLL_S = 2
#: For two polls, a report of the manager (one a second at most), and the queries themselves on a loaded machine.
_SEEN_S = 2 * _POLL_S + 8
#: Seconds between two readings of notices.
_NOTICES_S = 30
_AWAY = "http://no-such-host.invalid/d/"


@pytest.fixture(scope="module")
def matters_site(
    stageout_pools: Any, destination: Destination, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Seen]:
    """A pool whose access point has the page and the agent's metrics."""
    [fragment] = [path for path in fragments(find_checkout(), "web") if "-web" in path.stem]
    page, metrics = free_ports(2)
    ap_config = (
        f"{QUICK_AP}\nSTAGEOUT_BIN = /opt/stageout/bin\nSTAGEOUT_POLL_INTERVAL = {_POLL_S}\n"
        f"STAGEOUT_WEB_INTERVAL = {_POLL_S}\nSTAGEOUT_WEB_PORT = {page}\n"
        f"STAGEOUT_AGENT_METRICS_PORT = {metrics}\nSECURE_JOB_ATTRS =\n"
        f"{fragment.read_text()}"
    )
    with stageout_pools(version=VERSION, execute_points=1, ap_config=ap_config, ep_config=QUICK_EP) as pool:
        site = Site(pool, destination, "matters", tmp_path_factory.mktemp("no-gates"))
        seen = Seen(site, page, metrics)
        wait_until(lambda: seen.get("/") and scrape(metrics), timeout_s=90, what="page and metrics answer")
        yield seen


@dataclass
class Seen:
    """The places where matters are seen."""

    site: Site
    page: int
    metrics: int

    def get(self, path: str) -> str:
        """Return a page, "" while there is no answer."""
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(f"http://127.0.0.1:{self.page}{path}", timeout=20).read().decode()
        return ""

    def on_page(self) -> dict[str, dict[str, Any]]:
        """Return the matters of the page by kind."""
        return {one["kind"]: one for one in json.loads(self.get("/matters.json") or '{"matters": []}')["matters"]}

    def by_doctor(self) -> list[str]:
        """Return the matters that the doctor names."""
        done = self.site.stageout("doctor", "--role", "ap", "--json", user="root", check=False, timeout_s=120)
        checks = json.loads(done.stdout)["checks"]
        return [one["text"] for one in checks if one["name"] == "matters" and one["level"] == "warn"]

    def in_metrics(self) -> dict[str, float]:
        """Return the number of matters by kind."""
        return {key[1]: value for key, value in scrape(self.metrics).items() if key[0] == "stageout_pool_matters"}

    def wait(self, kind: Kind, most_s: float = _SEEN_S) -> dict[str, Any]:
        """Wait until page and metrics show a matter and print when they did. The doctor looks once."""
        since_s, took_s = time.monotonic(), {}
        looks = {"page": lambda: kind.value in self.on_page(), "metrics": lambda: self.in_metrics().get(kind.value)}
        for where, look in looks.items():
            wait_until(look, timeout_s=most_s, what=f"{kind} to be seen: {where}")
            took_s[where] = round(time.monotonic() - since_s, 1)
        (said,) = (text for text in self.by_doctor() if text.startswith(f"{kind}: "))
        found = self.on_page()[kind.value]
        print(f"{kind} after {took_s} s; doctor: {said}", found, sep="\n  ")
        return found


def head(page: str) -> tuple[str, str]:
    """Return the title of a page, and what comes first on it."""
    title, first = re.search("<title>(.*?)</title>", page), re.search("</h1>(.*)", page, re.S)
    assert title and first
    return title[1], first[1]


def test_matters_are_seen_everywhere_within_two_polls(matters_site: Seen) -> None:
    seen, site = matters_site, matters_site.site
    (ep,) = site.pool.eps
    assert (seen.on_page(), seen.by_doctor(), head(seen.get("/"))[0]) == ({}, [], "Now - stageout")
    assert seen.in_metrics() == {kind.value: 0 for kind in Kind}

    # A name that does not resolve.
    lost = site.submit(destination=_AWAY)
    site.wait_state(lost, "RetryWait")
    seen.wait(Kind.NAME)

    # A destination without space, for two hours.
    site.destination.refuse("no space", 507)
    full = site.submit("bob", env="SIZE=1500000")
    site.wait_state(full, "RetryWait")
    assert "retries" not in seen.on_page(), "it has just begun"
    ep.run(["condor_off", "-daemon", "SANDBOX_MANAGER"])
    wait_until(lambda: not ep.pids("sandbox-manager"), timeout_s=60, what="the manager to end")
    with closing(sqlite3.connect(ep.home / "stageout" / "ledger" / "ledger.sqlite")) as ledger, ledger:
        updates.keep_ages(ledger, -1, int(time.time()) - 7200)
    ep.run(["condor_on", "-daemon", "SANDBOX_MANAGER"])
    number = site.pool.q(full)["GlobalJobId"]
    wait_until(lambda: _age_s(site, number) > 7000, timeout_s=60, what="a report of the new manager")
    matter = seen.wait(Kind.RETRIES)
    assert matter["owners"] == [site.pool.q(full)["User"]]
    assert 7200 <= matter["age_s"] < 7500
    assert "The destination has no space." in matter["title"] and "`stageout redirect`" in matter["action"]

    # A spool that is too small for that.
    ep.configure("STAGEOUT_SPOOL_QUOTA_MB = 1\n")
    assert seen.wait(Kind.SPOOL_FULL)["outputs"] == 2

    # A job under the name of another one; its owner writes the name. It comes with the notice of the agent.
    own = site.pool.q(lost)["GlobalJobId"]
    site.pool.qedit(lost, user="alice", GlobalJobId='"<b>forged</b>#1.0#1"')
    assert seen.wait(Kind.IDENTITY, 2 * _NOTICES_S + 8)["owners"] == [site.pool.q(lost)["User"]]

    title, first = head(seen.get("/"))
    print(title, first[:2500], *seen.by_doctor(), sep="\n")
    assert title == f"({len(json.loads(seen.get('/matters.json'))['matters'])}) Now - stageout"
    kinds = (Kind.SPOOL_FULL, Kind.IDENTITY, Kind.NAME, Kind.RETRIES)
    assert [kind for kind in map(Kind, seen.on_page()) if kind in kinds] == list(kinds), "the most urgent first"
    assert first.index("The destination has no space.") < first.index("Waiting")
    assert "forged" not in first + "".join(seen.by_doctor())

    # In order again.
    site.destination.accept()
    ep.configure("")
    site.pool.qedit(lost, user="alice", GlobalJobId=f'"{own}"')
    site.stageout("redirect", str(lost), site.url(str(lost)) + "/", user="alice")
    site.wait_left(full)
    site.wait_left(lost)
    since_s = time.monotonic()
    wait_until(lambda: not seen.on_page(), timeout_s=2 * _NOTICES_S + 8, what="the page to be empty",
               describe=lambda: str(seen.on_page()))  # fmt: skip
    wait_until(lambda: not sum(seen.in_metrics().values()), timeout_s=2 * _NOTICES_S + 8, what="the metrics to be 0")
    print(f"gone after {time.monotonic() - since_s:.1f} s")
    assert seen.by_doctor() == []


def _age_s(site: Site, job: str) -> float:
    """Return for how long the newest report says that a job's output fails."""
    for ad in site.pool.collector_query(f'MyType == "{MANAGER_AD}"'):
        for box in json.loads(ad.get("StageOutPayload") or "{}").get("sandboxes", []):
            if box["job"] == job:
                return time.time() - box.get("failing_since", time.time())
    return 0.0
