"""Nodes whose network is cut: the node may reach the destination while the access point does not hear it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.destination import Destination
from tests.harness.pool.network import Network
from tests.pool.conftest import QUICK_AP, QUICK_EP, Site, open_directory, wait_until_acquainted

pytestmark = pytest.mark.pool

_LEASE_S = 60
#: The least silence after which the access point gives output up.
_SILENCE_S = 240
#: For looks of the agent and the managers, plugins that end, and a machine with other tests on it.
_MORE_S = 60
#: Of a request that a client has broken off, when the server notices: it began before the cut.
_BROKEN_OFF = 400
#: Slots of nodes that are cut off soon leave the collector, so that jobs run again elsewhere.
_AP = f"{QUICK_AP}CLASSAD_LIFETIME = 60\n"
#: The startd tells that the node is one that never comes back.
_EP = f"""{QUICK_EP}
IsSpot = true
STARTD_ATTRS = $(STARTD_ATTRS) IsSpot
STAGEOUT_NEVER_RETURNS = IsSpot =?= true
STAGEOUT_SHORT_LEASE = {_LEASE_S}
"""


@pytest.fixture(scope="module")
def cut_site(stageout_pools: Any) -> Iterator[tuple[Site, Network]]:
    """A pool of three nodes that can be cut off, and a destination outside of it."""
    with (
        Network() as network,
        open_directory("cut") as shared,
        open_directory("cut-destination") as home,
        Destination(home, host=network.world) as destination,
        stageout_pools(execute_points=3, binds=(shared,), ap_config=_AP, ep_config=_EP, network=network) as pool,
    ):
        wait_until_acquainted(pool)
        for ep in pool.eps:
            pool.wait(
                lambda ep=ep: f"own-lease-changed seconds={_LEASE_S}" in ep.log("SandboxManagerLog"),
                timeout_s=60, what=f"the lease of {ep.name}",
            )  # fmt: skip
        yield Site(pool, destination, "cut", shared), network


def _submit(site: Site, number: int, *, then: int = 0, size: int = 20_000) -> Any:
    """Submit a job that runs on one node, and runs again, if it does, on another."""
    place = 'ifThenElse((MY.StageOutReruns ?: 0) == 0, TARGET.Machine == "ep{}", TARGET.Machine == "ep{}")'
    return site.submit(extra=f"requirements = {place.format(number, then or number)}", env=f"SIZE={size}")


def _requests(site: Site, job: Any, address: str) -> list[dict[str, Any]]:
    """Return a node's attempts to deliver a job's files."""
    return [row for row in site.destination.requests("PUT", f"cut/{job}") if row["sender"] == address]


def _reruns(site: Site, job: Any) -> int:
    return int(site.pool.q(job, ["StageOutReruns"])["StageOutReruns"])


def _silent_nodes(site: Site) -> str:
    """Return what the doctor says about silent nodes."""
    said = json.loads(site.stageout("doctor", "--json", user="root", check=False).stdout)
    return " ".join(one["text"] for one in said["checks"] if one["text"].startswith("silent-node:"))


def test_a_short_cut_delays_the_delivery_and_no_more(cut_site: tuple[Site, Network]) -> None:
    site, network = cut_site
    site.destination.refuse("later", 503)
    job = _submit(site, 1)
    site.wait_state(job, "RetryWait", timeout_s=90)
    network.cut(1)

    def is_silent() -> bool:
        (row,) = json.loads(site.stageout("status", "--json", str(job)).stdout)["jobs"]
        return bool(row["silent_s"]) and "ep1" in _silent_nodes(site)

    site.pool.wait(is_silent, timeout_s=_SILENCE_S, what="status and doctor to call the node silent")
    site.pool.wait(
        lambda: "lease-expired" in site.pool.eps[0].log("SandboxManagerLog"),
        timeout_s=_LEASE_S + _MORE_S, what="the manager to stop",
    )  # fmt: skip
    network.mend(1)
    site.destination.accept()
    site.wait_left(job, timeout_s=120)
    site.check_delivered(job)
    assert len(site.puts(job)) == 2
    assert site.pool.history(job)["NumShadowStarts"] == 1


@pytest.mark.skipif(not os.environ.get("STAGEOUT_LONG_CUTS"), reason="it waits for minutes: make cuts")
def test_after_a_long_cut_only_the_output_of_the_last_run_arrives(cut_site: tuple[Site, Network]) -> None:
    """One node reaches the destination all the time; the other is cut off altogether, in the middle of a transfer."""
    site, network = cut_site
    destination = site.destination
    destination.pause()
    broken = _submit(site, 2, then=3, size=30_000_000)
    site.wait_state(broken, "Moving", timeout_s=90)
    network.cut(2, world=True)
    destination.resume()
    destination.refuse("later", 503)
    heard = _submit(site, 1, then=3)
    site.wait_state(heard, "RetryWait", timeout_s=90)
    network.cut(1)
    cut_at, began_s = time.time(), time.monotonic()
    for job in (broken, heard):
        site.pool.wait(
            lambda job=job: _reruns(site, job) >= 1, timeout_s=_SILENCE_S + 8 * _MORE_S, what=f"{job} to run again"
        )
    assert time.monotonic() - began_s > _SILENCE_S - _LEASE_S, "its manager may still have sent"
    again_at = time.time()
    site.pool.wait(
        lambda: all(_requests(site, job, network.world_address(3)) for job in (broken, heard)),
        timeout_s=180, what="the third node to send",
    )  # fmt: skip
    attempts = [row["time"] for row in _requests(site, heard, network.world_address(1))]
    assert cut_at < max(attempts) < min(cut_at + _LEASE_S + 30, again_at)
    destination.accept()
    for job in (broken, heard):
        site.wait_left(job, timeout_s=120)
        site.check_delivered(job)
    for number in (1, 2):
        network.mend(number)
    site.pool.wait(site.spool_is_empty, timeout_s=180, what="the nodes to delete what is superseded")
    for job, number in ((broken, 2), (heard, 1)):
        assert not [row for row in site.puts(job) if row["sender"] != network.world_address(3)]
        late = [row for row in _requests(site, job, network.world_address(number)) if row["time"] > again_at]
        assert not [row for row in late if row["status"] != _BROKEN_OFF]
        site.check_delivered(job)
