"""The web page below a real condor_master: a delivered job and a failed one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.destination import Destination
from tests.harness.pool.install import find_checkout, fragments
from tests.harness.pool.waiting import wait_until
from tests.pool.conftest import QUICK_AP, QUICK_EP, VERSION, Site

pytestmark = pytest.mark.pool

TOKEN = "reader-token-0123456789"
_GET = """
import sys, urllib.request
path, token = sys.argv[1:]
request = urllib.request.Request("http://127.0.0.1:9622" + path, headers={"Authorization": "Bearer " + token})
print(urllib.request.urlopen(request, timeout=20).read().decode())
"""


@pytest.fixture(scope="module")
def web_site(stageout_pools: Any, destination: Destination, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A pool whose access point has the page."""
    [fragment] = [path for path in fragments(find_checkout(), "web") if "-web" in path.stem]
    ap_config = (
        f"{QUICK_AP}\nSTAGEOUT_BIN = /opt/stageout/bin\nSTAGEOUT_WEB_TOKENS = $(LOCAL_DIR)/web.tokens\n"
        f"STAGEOUT_WEB_INTERVAL = 1\n{fragment.read_text()}"
    )
    with stageout_pools(version=VERSION, execute_points=1, ap_config=ap_config, ep_config=QUICK_EP) as pool:
        tokens = pool.ap.home / "web.tokens"
        pool.ap.run(["sh", "-c", f"umask 077; cat > {tokens}; chown condor {tokens}"], stdin=f"ops {TOKEN}\n")
        pool.ap.run(["condor_on", "-daemon", "STAGEOUT_WEB"])
        yield Site(pool, destination, "web", tmp_path_factory.mktemp("no-gates"))


def _get(site: Site, path: str, token: str = "none") -> str:
    """Return a page, "" while there is no answer."""
    done = site.pool.ap.run(["/opt/stageout/bin/python", "-c", _GET, path, token], check=False)
    return done.stdout if done.returncode == 0 else ""


def _figures(site: Site) -> dict[str, float]:
    """Return the newest values of the series."""
    found = json.loads(_get(site, "/series.json") or '{"names": [], "values": []}')
    return {name: values[-1] for name, values in zip(found["names"], found["values"]) if values}


def test_a_delivered_and_a_failed_job_are_shown(web_site: Site) -> None:
    site = web_site
    wait_until(lambda: _get(site, "/"), what="the page answers")
    [process] = [one for one in site.pool.ap.processes() if one.is_named("stageout-web")]
    assert site.pool.ap.run(["id", "-nu", str(process.uid)]).stdout.strip() == "condor"

    delivered = site.submit()
    site.wait_left(delivered)
    wait_until(lambda: _figures(site).get("delivered") == 1, what="the delivery is counted")

    site.destination.refuse("quota exceeded at dest")
    try:
        failed = site.submit()
        site.pool.wait_status(failed, "Held", timeout_s=90)
        wait_until(lambda: _figures(site).get("trouble") == 1, what="the failure is counted")
        start = _get(site, "/")
        assert "1 output for 127.0.0.1" in start
        name = site.pool.q(failed)["GlobalJobId"].replace("#", "%23")
        hidden, shown = _get(site, f"/job?id={name}"), _get(site, f"/job?id={name}", TOKEN)
        assert f"stageout retry {failed}" in hidden
        assert "Submitted" in hidden, "the schedd answered"
        assert "out1" not in hidden
        assert "quota exceeded at dest" not in hidden
        assert "out1" in shown
        assert "quota exceeded at dest" in shown
    finally:
        site.destination.accept()
    assert "ep" in _get(site, "/nodes")
    site.pool.ap.run(["condor_preen", "-remove"])
    assert (site.pool.ap.spool_dir / "stageout_web" / "ring.sqlite").is_file()
    site.pool.ap.run(["condor_off", "-daemon", "STAGEOUT_WEB"])
    log: Path = site.pool.ap.log_dir / "StageoutWebLog"
    wait_until(lambda: " daemon-stopped" in log.read_text(), what="it stops")
    assert " ERROR " not in log.read_text().split(" daemon-started ")[1]
