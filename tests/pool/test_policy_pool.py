"""The policy service below a real condor_master, with the shipped fragment."""

from __future__ import annotations

import json
from typing import Any, Callable

import pytest

from tests.harness.pool import Node, Pool
from tests.harness.pool.install import find_checkout, fragments
from tests.harness.pool.waiting import wait_until

pytestmark = pytest.mark.pool

TOKEN = "cms-token-0123456789abcdef"
PORT = 9620
_ASK = """
import json, sys, urllib.request
method, path, body, token = json.load(sys.stdin)
url = "http://127.0.0.1:{port}" + path
headers = dict(Authorization="Bearer " + token)
request = urllib.request.Request(url, json.dumps(body).encode() if body else None, headers, method=method)
print(urllib.request.urlopen(request, timeout=20).read().decode())
"""


def _ask(node: Node, method: str, path: str, body: dict[str, Any] | None = None, port: int = PORT) -> str:
    """Talk to the service from inside its machine; "" while it does not answer."""
    program = _ASK.format(port=port)
    question = json.dumps([method, path, body, TOKEN])
    done = node.run(["/opt/stageout/bin/python", "-c", program], stdin=question, check=False)
    return done.stdout if done.returncode == 0 else ""


def _lease(node: Node, client: str) -> Any:
    body = {"client": client, "source": "here", "destination": "there"}
    return json.loads(wait_until(lambda: _ask(node, "POST", "/v1/leases", body), what="the service grants"))


def test_grants_outlive_the_service_below_condor_master(pool_factory: Callable[..., Pool]) -> None:
    """Started as condor; killed and started again by the master; reconfigured; spared by condor_preen; stopped."""
    [fragment] = [path for path in fragments(find_checkout(), "policy") if "-policy" in path.stem]
    pool = pool_factory(
        execute_points=0,
        agent=False,
        ap_config=f"{fragment.read_text()}\nSTAGEOUT_BIN = /opt/stageout/bin\n"
        "STAGEOUT_POLICY_TOKENS = $(LOCAL_DIR)/policy.tokens\nSTAGEOUT_POLICY_MAX_PAIR = 6\n"
        "MASTER_BACKOFF_CONSTANT = 1\nMASTER_BACKOFF_FACTOR = 1\n",
    )
    node = pool.ap
    log = node.log_dir / "StageoutPolicyLog"
    wait_until(lambda: "cannot read the tokens" in _text(log), what="the missing tokens are said")
    wait_until(lambda: "exited with status 99" in node.log("MasterLog"), what="the master lets it be")
    tokens = node.home / "policy.tokens"
    node.run(["sh", "-c", f"umask 077; cat > {tokens}; chown condor {tokens}"], stdin=f"cms {TOKEN}\n")
    node.run(["condor_on", "-daemon", "STAGEOUT_POLICY_SERVICE"])

    assert [_lease(node, name)["streams"] for name in ("a", "b", "c")] == [4, 2, 0]
    columns = ["StageOutPolicyURL", "StageOutPolicyName", "StageOutPolicyMaxPair"]
    shown = ["condor_status", "-any", "-constraint", 'MyType == "StageOutPolicy"', "-af", *columns]
    wanted = f"http://127.0.0.1:{PORT} greedy 6\n"
    wait_until(lambda: node.run(shown, check=False).stdout == wanted, what="the pool's collector knows of it")
    [pid] = node.pids("stageout-policy-service")
    assert _owner(node, pid) == "condor"
    node.kill("stageout-policy-service")
    wait_until(lambda: _text(log).count(" daemon-started ") == 2, what="the master starts it again")
    metrics = wait_until(lambda: _ask(node, "GET", "/metrics"), what="it answers again")
    assert 'stageout_policy_streams_granted{destination="there",source="here"} 6.0' in metrics
    assert _lease(node, "d")["streams"] == 0

    node.configure("STAGEOUT_POLICY_MAX_PAIR = 9\n", name="96-more.conf")
    wait_until(lambda: " configuration-reloaded" in _text(log), what="it is reconfigured")
    assert _lease(node, "d")["streams"] == 3
    node.run(["condor_preen", "-remove"])
    assert (node.spool_dir / "stageout_policy" / "policy.sqlite").is_file()
    node.run(["condor_off", "-daemon", "STAGEOUT_POLICY_SERVICE"])
    wait_until(lambda: " daemon-stopped" in _text(log), what="it stops")


def _text(log: Any) -> str:
    return str(log.read_text()) if log.exists() else ""


def _owner(node: Node, pid: int) -> str:
    [process] = [process for process in node.processes() if process.pid == pid]
    return node.run(["id", "-nu", str(process.uid)]).stdout.strip()
