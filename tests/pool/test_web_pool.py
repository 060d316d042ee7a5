"""The web page below a real condor_master: a delivered job and a failed one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.destination import Destination
from tests.harness.pool.install import find_checkout, fragments
from tests.harness.pool.waiting import wait_until
from tests.harness.ports import free_ports
from tests.pool.conftest import QUICK_AP, QUICK_EP, VERSION, Site

pytestmark = pytest.mark.pool

TOKEN = "reader-token-0123456789"
#: Other pools of this machine have pages, too.
_PORT = free_ports(1)[0]
_GET = f"""
import sys, urllib.request
path, token = sys.argv[1:]
request = urllib.request.Request("http://127.0.0.1:{_PORT}" + path, headers={{"Authorization": "Bearer " + token}})
print(urllib.request.urlopen(request, timeout=20).read().decode())
"""
_POST = f"""
import sys, urllib.parse, urllib.request, urllib.error
token, *fields = sys.argv[1:]
data = urllib.parse.urlencode([tuple(field.split("=", 1)) for field in fields]).encode()
request = urllib.request.Request("http://127.0.0.1:{_PORT}/request", data, {{"Authorization": "Bearer " + token}})
try:
    print(urllib.request.urlopen(request, timeout=30).status)
except urllib.error.HTTPError as problem:
    print(problem.code, problem.read().decode())
"""


@pytest.fixture(scope="module")
def web_site(stageout_pools: Any, destination: Destination, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A pool whose access point has the page."""
    [fragment] = [path for path in fragments(find_checkout(), "web") if "-web" in path.stem]
    ap_config = (
        f"{QUICK_AP}\nSTAGEOUT_BIN = /opt/stageout/bin\nSTAGEOUT_WEB_TOKENS = $(LOCAL_DIR)/web.tokens\n"
        f"STAGEOUT_WEB_INTERVAL = 1\nSTAGEOUT_WEB_PORT = {_PORT}\nSTAGEOUT_WEB_OPERATORS = ops\n{fragment.read_text()}"
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


def _asked(site: Site, job: Any, verb: str, **more: str) -> str:
    """Send a form of a request. Return the status, with the page if the request was refused."""
    fields = {"id": str(job), "verb": verb, "run": "1", "reason": "wrong disk", **more}
    words = [f"{name}={value}" for name, value in fields.items()]
    return site.pool.ap.run(["/opt/stageout/bin/python", "-c", _POST, TOKEN, *words]).stdout.strip()


def _requests_in_log(site: Site, job: Any) -> list[str]:
    """Return who has asked, and why, as a reader of the job's log sees it."""
    return re.findall(r'job attribute StageOutRequestBy .*to "(.*)"$', job.log.read_text(), re.M)


def test_deliveries_are_redirected_paused_and_cancelled(web_site: Site) -> None:
    site = web_site
    wait_until(lambda: _get(site, "/"), what="the page answers")
    site.destination.refuse("no such collection", 404)
    try:
        job, other = site.submit(), site.submit()
        for one in (job, other):
            site.pool.wait_status(one, "Held", timeout_s=90)
        assert "200" in _asked(site, other, "pause")
        site.pool.wait(lambda: not site.pool.q(other).get("StageOutRequest"), what="the pause to be carried out")
        assert "Confirm that" in _asked(site, other, "cancel")
        assert _asked(site, other, "cancel", sure="yes") == "200"
        assert site.wait_left(other)["StageOutState"] == "Cancelled"
        told = [f"{verb} by ops: wrong disk" for verb in ("pause", "cancel")]
        assert _requests_in_log(site, other) == told, other.log.read_text()
    finally:
        site.destination.accept()
    assert _asked(site, job, "redirect", url=site.url("elsewhere/")) == "200"
    assert site.wait_left(job)["StageOutState"] == "Delivered"
    past = site.pool.history(job)
    assert past is not None and past["StageOutRequestBy"] == "redirect by ops: wrong disk"
    assert _asked(site, job, "retry").startswith("404 "), "the job has left the queue"
    text = (site.pool.ap.log_dir / "StageoutWebLog").read_text()
    assert text.count(" request-stored ") == 3


def test_an_owner_cannot_say_who_has_asked(web_site: Site) -> None:
    site = web_site
    job = site.submit(extra='hold = true\n+StageOutRequestBy = "cancel by ops: me"')
    assert site.pool.q(job).get("StageOutRequestBy") is None
    site.pool.ap.run(["condor_qedit", str(job), "StageOutRequestBy", '"cancel by ops: me"'], user="alice", check=False)
    assert site.pool.q(job).get("StageOutRequestBy") is None
    site.pool.ap.run(["condor_rm", str(job)], user="alice")


def _figures(site: Site) -> dict[str, float]:
    """Return the newest values of the series."""
    found = json.loads(_get(site, "/series.json") or '{"names": [], "values": []}')
    return {name: values[-1] for name, values in zip(found["names"], found["values"]) if values}


def test_a_delivered_and_a_failed_job_are_shown(web_site: Site) -> None:
    site = web_site
    wait_until(lambda: _get(site, "/"), what="the page answers")
    [process] = [one for one in site.pool.ap.processes() if one.is_named("stageout-web")]
    assert site.pool.ap.run(["id", "-nu", str(process.uid)]).stdout.strip() == "condor"

    before = _figures(site).get("delivered", 0)
    delivered = site.submit()
    site.wait_left(delivered)
    wait_until(lambda: _figures(site).get("delivered") == before + 1, what="the delivery is counted")

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
