"""condor_master hears from the daemons, and plugins find a spool that an administrator has moved."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.destination import Destination
from tests.pool.conftest import QUICK_AP, QUICK_EP, Site

pytestmark = pytest.mark.pool

_ELSEWHERE = "STAGEOUT_SPOOL = $(LOCAL_DIR)/a spool\n"
_HUNG = "SANDBOX_MANAGER_NOT_RESPONDING_TIMEOUT = 20\n"


@pytest.fixture(scope="module")
def pool_alone(stageout_pools: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    settings = {"version": request.param, "execute_points": 1, "ap_config": QUICK_AP}
    with stageout_pools(**settings, ep_config=f"{QUICK_EP}{_ELSEWHERE}{_HUNG}") as pool:
        yield pool


@pytest.mark.oldest_condor_too
def test_the_spool_alone_is_moved(pool_alone: Any, destination: Destination) -> None:
    site = Site(pool_alone, destination, f"elsewhere-{pool_alone.version}", Path("/nowhere"))
    job = site.submit()
    past = site.wait_left(job, timeout_s=90)
    assert (past["StageOutState"], past.get("StageOutSynchronousCode")) == ("Delivered", None)
    site.check_delivered(job)
    place = pool_alone.eps[0].home / "a spool"
    assert (place / "ledger/ledger.sqlite").exists()
    slots = pool_alone.startd_ads()
    assert all("StageOutAccept" in ad and ad["StageOutSpool"] == str(place) for ad in slots), slots


@pytest.mark.oldest_condor_too
def test_the_masters_are_ready_and_a_manager_that_hangs_is_started_again(pool_alone: Any) -> None:
    pool, node = pool_alone, pool_alone.eps[0]
    for machine, name, role in ((pool.ap, "SCHEDD_AGENT", "ap"), (node, "SANDBOX_MANAGER", "ep")):
        done = machine.run(["condor_who", "-wait:30", "IsReady"], user="root", check=False, timeout_s=60)
        logs = "\n".join(machine.log(one)[-2000:] for one in ("master", "SandboxManagerLog", "ScheddAgentLog"))
        assert "IsReady = true" in done.stdout, f"{done.stdout}\n{done.stderr}\n{logs}"
        assert f'{name} = "Alive"' in done.stdout, done.stdout
        doctor = machine.run(["/opt/stageout/bin/stageout", "doctor", "--role", role], user="root", check=False)
        assert "condor_master counts all daemons as alive" in doctor.stdout, doctor.stdout
    (hung,) = node.kill("sandbox-manager", signal.SIGSTOP)
    pool.wait(lambda: hung not in node.pids("sandbox-manager"), timeout_s=200, what="the hung manager to be killed")
    pool.wait(lambda: len(node.pids("sandbox-manager")) == 1, timeout_s=60, what="a new manager")
