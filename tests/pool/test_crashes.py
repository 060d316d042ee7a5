"""kill -9 of manager and agent at each step of the way: delivered once, with the right content."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.pool.conftest import AGENT_FAULTS, MANAGER_FAULTS

pytestmark = pytest.mark.pool


@pytest.mark.parametrize("fault", MANAGER_FAULTS)
def test_manager_dies_at(site: Any, fault: str) -> None:
    armed = site.arm(fault)
    job = site.submit(outputs=("out1",))
    history = site.wait_left(job, timeout_s=120)
    assert not armed.exists(), f"no manager came to {fault}"
    assert history["JobStatus"] == 4
    assert history["NumShadowStarts"] == 1, "a crash of the manager must not cost the computation"
    site.check_delivered(job)
    puts = site.puts(job)
    again = fault in ("record-delivered.kill-before",)
    assert len(puts) == (2 if again else 1), puts
    site.pool.wait(site.spool_is_empty, timeout_s=30, what="the spool to be empty")


@pytest.mark.parametrize("fault", AGENT_FAULTS)
def test_agent_dies_at(site: Any, fault: str) -> None:
    armed = site.arm(fault)
    job = site.submit(outputs=("out1",))
    history = site.wait_left(job, timeout_s=120)
    assert not armed.exists(), f"the agent never came to {fault}"
    assert history["JobStatus"] == 4
    assert history["StageOutState"] == "Delivered"
    assert history["NumShadowStarts"] == 1
    site.check_delivered(job)
    assert len(site.puts(job)) == 1


def test_manager_and_its_plugin_die_in_the_middle_of_a_transfer(site: Any) -> None:
    site.destination.pause()
    job = site.submit(outputs=("out1",), env="SIZE=5000000")
    site.wait_state(job, "Moving")
    ep = next(ep for ep in site.pool.eps if any((ep.home / "stageout" / "sandboxes").glob("*/*")))
    site.pool.wait(lambda: ep.pids("curl_plugin"), what="the plugin to send")
    ep.kill("sandbox-manager", signal.SIGKILL)
    site.pool.wait(lambda: not ep.pids("curl_plugin"), timeout_s=10, what="the plugin to die with its manager")
    site.destination.resume()
    history = site.wait_left(job, timeout_s=120)
    assert history["JobStatus"] == 4
    site.check_delivered(job)


@pytest.mark.parametrize("daemon", ["schedd-agent", "collector", "schedd"])
def test_a_daemon_of_the_access_point_dies_while_output_moves(site: Any, daemon: str) -> None:
    site.destination.pause()
    job = site.submit(outputs=("out1",))
    site.wait_state(job, "Moving")
    dead = set(site.pool.ap.kill(daemon, signal.SIGKILL))
    site.destination.resume()
    site.pool.wait(lambda: set(site.pool.ap.pids(daemon)) - dead, timeout_s=60, what=f"the {daemon} to be back")
    history = site.wait_left(job, timeout_s=150)
    assert history["JobStatus"] == 4
    assert history["StageOutState"] == "Delivered"
    assert history["NumShadowStarts"] == 1
    site.check_delivered(job)
