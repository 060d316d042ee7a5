"""The views Routers and Policy of the web page, of real routers and a real policy service in one pool."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stageout.cli.main import main
from stageout.wire.custody import LETTERS
from tests.harness.pool import Node, Pool
from tests.harness.pool.install import find_checkout, fragments
from tests.harness.pool.waiting import wait_until
from tests.harness.ports import free_ports
from tests.pool.conftest import QUICK_AP, QUICK_EP, VERSION
from tests.pool.routers import SECRET, start_router, stop_router

pytestmark = pytest.mark.pool

TOKENS = {"web": "reader-token-0123456789", "policy": "cms-token-0123456789abcdef"}
_PYTHON = "/opt/stageout/bin/python"
#: Other pools of this machine have pages, too.
_PORT = free_ports(1)[0]
_GET = f"""
import sys, urllib.request
path, token = sys.argv[1:]
request = urllib.request.Request("http://127.0.0.1:{_PORT}" + path, headers={{"Authorization": "Bearer " + token}})
print(urllib.request.urlopen(request, timeout=20).read().decode())
"""
_LEASE = """
import json, sys, urllib.request
body = json.dumps({"client": "ep1", "source": "here", "destination": "store.example.org"}).encode()
headers = {"Authorization": "Bearer " + sys.argv[1]}
urllib.request.urlopen(urllib.request.Request("http://127.0.0.1:9620/v1/leases", body, headers), timeout=20)
"""
#: A router publishes its figures each minute, and the page reads them after at most 30 s more.
_SHOWN_S = 180


@pytest.fixture(scope="module")
def pool(stageout_pools: Any) -> Iterator[Pool]:
    """A pool whose access point has the page and a policy service."""
    texts = {
        kind: path.read_text()
        for kind in TOKENS
        for path in fragments(find_checkout(), kind)
        if f"-{kind}" in path.stem
    }
    ap_config = (
        f"{QUICK_AP}\nSTAGEOUT_BIN = /opt/stageout/bin\nSTAGEOUT_WEB_INTERVAL = 1\nSTAGEOUT_WEB_PORT = {_PORT}\n"
        "STAGEOUT_WEB_TOKENS = $(LOCAL_DIR)/web.tokens\nSTAGEOUT_POLICY_TOKENS = $(LOCAL_DIR)/policy.tokens\n"
        f"{texts['web']}\n{texts['policy']}\n"
    )
    with stageout_pools(version=VERSION, execute_points=1, ap_config=ap_config, ep_config=QUICK_EP) as made:
        for kind, token in TOKENS.items():
            path = made.ap.home / f"{kind}.tokens"
            made.ap.run(["sh", "-c", f"umask 077; cat > {path}; chown condor {path}"], stdin=f"cms {token}\n")
        for daemon in ("STAGEOUT_WEB", "STAGEOUT_POLICY_SERVICE"):
            made.ap.run(["condor_on", "-daemon", daemon])
        yield made


def _shown(node: Node, path: str, token: str = "none") -> str:
    """Return the text of a page, "" while there is no answer."""
    done = node.run([_PYTHON, "-c", _GET, path, token], check=False)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", done.stdout)).split()) if done.returncode == 0 else ""


def test_routers_and_a_policy_service_are_shown(
    pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    page, key, source = pool.ap, tmp_path / "key", tmp_path / "secret-name.root"
    key.write_text(f"site {SECRET}\n")
    source.write_bytes(b"x" * 4096)
    wait_until(lambda: "No router in this pool." in _shown(page, "/routers"), what="the page answers")
    assert "No policy service" in _shown(page, "/policy") or "policy@" in _shown(page, "/policy")
    wait_until(lambda: page.run([_PYTHON, "-c", _LEASE, TOKENS["policy"]], check=False).returncode == 0, what="a lease")
    try:
        terminal = start_router(pool.eps[0], "root")  # the token for the collector is root's there
        custodian = start_router(
            page, "condor", f"STAGEOUT_ROUTER_NEIGHBOURS = {terminal}\nSTAGEOUT_ROUTER_TERMINALS = {terminal}\n"
        )

        def routed() -> bool:
            assert main(["routes", custodian, terminal, "--key", str(key)]) == 0
            return "direct" in capsys.readouterr().out

        wait_until(routed, timeout_s=60, what="a route to the terminal")
        one = f"/router?name={custodian}"
        wait_until(lambda: f"{terminal} direct" in _shown(page, one), timeout_s=_SHOWN_S, what="the route")
        assert f"{terminal} connected" in _shown(page, one)
        assert re.search(rf"{custodian} in order 1 of 1 1 \d+ s ago", _shown(page, "/routers"))
        assert terminal in _shown(page, "/routers"), "the other router, which has no links, is in the table"

        wait_until(lambda: "store.example.org here 4 of" in _shown(page, "/policy"), timeout_s=_SHOWN_S, what="streams")
        assert "ep1 cms store.example.org 4" in _shown(page, "/policy")

        stop_router(pool.eps[0])
        url = f"overlay://{terminal}/{source.name}"
        assert main(["put", str(source), url, "--key", str(key), "--through", custodian, "--custody"]) == 0
        wait_until(lambda: "Custody 1 4.1 kB" in _shown(page, one), timeout_s=_SHOWN_S, what="the file in custody")
        shown, hidden = _shown(page, one, TOKENS["web"]), _shown(page, one)
        assert f"{terminal} not connected" in hidden
        assert "Deliveries that fail" in hidden
        assert "Reason" in shown.partition("Deliveries that fail")[2]
        assert "secret-name" not in shown + hidden, "no file is named in the ad"
        assert "cannot deliver to all destinations" in _shown(page, "/")
    finally:
        for node in (pool.eps[0], page):
            stop_router(node)
    ads = pool.collector_query('MyType == "StageOutRouter" || MyType == "StageOutPolicy"', LETTERS.ad_type)
    assert {ad["MyType"] for ad in ads} == {"StageOutRouter", "StageOutPolicy"}
    assert all(json.loads(ad["StageOutPayload"])["sent_at"] for ad in ads)
    log = page.log_dir / "StageoutWebLog"
    assert " ERROR " not in log.read_text().split(" daemon-started ")[-1]
