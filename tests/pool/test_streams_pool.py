"""Two nodes, one policy service below condor_master, a link that changes its rate, and the service killed meanwhile."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.harness.narrow_destination import NarrowDestination
from tests.harness.pool import Node
from tests.harness.pool.install import find_checkout, fragments
from tests.harness.pool.pool import free_port
from tests.harness.pool.pytest_plugin import keep_logs
from tests.harness.pool.waiting import wait_until
from tests.pool.conftest import QUICK_AP, QUICK_EP, Site, open_directory
from tests.pool.test_policy_pool import TOKEN, _ask

pytestmark = pytest.mark.pool

MOST = 6
#: Of its own: another worker may run test_policy_pool, on the usual one, at the same time.
PORT = free_port()
JOBS, OUTPUTS = 12, ("a", "b", "c")
_AP = f"""
STAGEOUT_BIN = /opt/stageout/bin
STAGEOUT_POLICY_TOKENS = $(LOCAL_DIR)/policy.tokens
STAGEOUT_POLICY_PORT = {PORT}
STAGEOUT_POLICY_MAX_PAIR = {MOST}
STAGEOUT_POLICY_MAX_CLIENT = 4
STAGEOUT_POLICY_INITIAL = 2
STAGEOUT_POLICY_INCREMENT = 1
MASTER_BACKOFF_CONSTANT = 1
MASTER_BACKOFF_FACTOR = 1
"""
_EP = f"""
STAGEOUT_POLICY_URL = http://127.0.0.1:{PORT}
STAGEOUT_SITE = here
"""


def _start_service(node: Node) -> None:
    wait_until(lambda: "exited with status 99" in node.log("MasterLog"), what="the master lets it be without tokens")
    tokens = node.home / "policy.tokens"
    node.run(["sh", "-c", f"umask 077; cat > {tokens}; chown condor {tokens}"], stdin=f"cms {TOKEN}\n")
    node.run(["condor_on", "-daemon", "STAGEOUT_POLICY_SERVICE"])
    wait_until(lambda: _ask(node, "GET", "/metrics", port=PORT), what="the service answers")


@contextmanager
def _watched(node: Node) -> Iterator[list[tuple[int, list[Any]]]]:
    """The service's figures, again and again: streams granted (or still in use), and the leases."""
    seen: list[tuple[int, list[Any]]] = []
    end = threading.Event()

    def look() -> None:
        while not end.wait(0.3):
            metrics, leases = _ask(node, "GET", "/metrics", port=PORT), _ask(node, "GET", "/v1/leases", port=PORT)
            if metrics and leases:
                granted = re.findall(r"^stageout_policy_streams_granted\{.*\} (\d+)\.0$", metrics, re.M)
                seen.append((sum(map(int, granted)), json.loads(leases)["leases"]))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield seen
    finally:
        end.set()
        watcher.join()


def _delivered(site: Site, destination: NarrowDestination, job: Any) -> bool:
    wrote = site.wrote(job)
    assert set(wrote) == set(OUTPUTS)
    found = {name: destination.root / str(job) / name for name in wrote}
    return all(hashlib.sha256(path.read_bytes()).hexdigest() == wrote[name] for name, path in found.items())


def test_two_nodes_never_use_more_streams_than_the_service_grants(
    stageout_pools: Any, request: pytest.FixtureRequest
) -> None:
    """Every output arrives right, over the service's kill and restart and a link that becomes four times faster."""
    [fragment] = [path for path in fragments(find_checkout(), "policy") if "-policy" in path.stem]
    with open_directory("streams") as shared, NarrowDestination(shared / "store", rate_mb_s=1) as destination:
        token = shared / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        settings = {
            "version": "25.14", "execute_points": 2, "cpus": 8, "binds": (shared,),
            "ap_config": f"{QUICK_AP}{fragment.read_text()}{_AP}",
            "ep_config": f"{QUICK_EP}{_EP}STAGEOUT_POLICY_TOKEN = {token}\n",
        }  # fmt: skip
        with stageout_pools(**settings) as pool:
            _play(Site(pool, destination, "streams", Path(shared)), destination)  # type: ignore[arg-type]
            keep_logs(request, [pool])


def _play(site: Site, destination: NarrowDestination) -> None:
    node, log = site.pool.ap, site.pool.ap.log_dir / "StageoutPolicyLog"
    _start_service(node)
    starts = log.read_text().count(" daemon-started ")
    with _watched(node) as seen:
        url = f"{destination.url}/$(Cluster).$(Process)"
        jobs = [site.submit(("alice", "bob")[number % 2], OUTPUTS, env="SIZE=700000", destination=url)
                for number in range(JOBS)]  # fmt: skip
        wait_until(lambda: len(destination.transfers()) >= 6, timeout_s=180, what="output on its way from the nodes")
        node.kill("stageout-policy-service")
        wait_until(
            lambda: log.read_text().count(" daemon-started ") > starts, timeout_s=60, what="the service starts again"
        )
        wait_until(lambda: len(destination.transfers()) >= 14, timeout_s=180, what="half of the output")
        destination.set_rate(4)
        for job in jobs:
            site.wait_left(job, timeout_s=240)
    assert all(_delivered(site, destination, job) for job in jobs)
    assert 2 <= destination.most_uploads_at_once() <= MOST
    assert max(granted for granted, _ in seen) > 2
    assert max(granted for granted, _ in seen) <= MOST
    clients = {lease["client"] for _, leases in seen for lease in leases}
    assert len(clients) == 2, "both nodes asked"
    for ep in site.pool.eps:
        assert " streams-granted " in ep.log("SandboxManagerLog")
    streams = json.loads(site.pool.eps[0].run(["/opt/stageout/bin/stageout", "status", "--node", "--json"]).stdout)
    assert "policy service" in streams["streams"][0]["grant"]
