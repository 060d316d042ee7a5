"""Two pools, each with its collector: jobs that flock hand off there, are delivered, and the queue tells the truth."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.pool import Pool
from tests.harness.pool.pool import free_port
from tests.harness.pool.pytest_plugin import keep_logs
from tests.pool.conftest import LEAN, QUICK_AP, QUICK_EP, VERSION, Site, wait_until_acquainted

pytestmark = pytest.mark.pool

_TRUSTED = "ALLOW_DAEMON_COLLECTOR = $(ALLOW_DAEMON), ap@home.test\n"


@dataclasses.dataclass
class Flock:
    """The access point's pool with a site's helpers, the pool to which its jobs flock, and a host without any."""

    site: Site
    other: Pool

    @property
    def agent_log(self) -> list[str]:
        """Lines of the agent's log."""
        return self.site.pool.ap.log("ScheddAgentLog").splitlines()

    def submit_there(self, **options: Any) -> Any:
        """Submit a job that no node of the own pool takes."""
        return self.site.submit(extra='requirements = TARGET.Flocked =?= "there"', **options)


@pytest.fixture
def flock(stageout_pools: Any, destination: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Flock]:
    """Run the two pools. The other one lets the schedd advertise and no more; a third name answers nobody."""
    there = "TRUST_DOMAIN = other.test\nALLOW_ADVERTISE_SCHEDD = $(ALLOW_DAEMON), ap@home.test\n"
    ep = QUICK_EP + 'Flocked = "there"\nSTARTD_ATTRS = $(STARTD_ATTRS) Flocked\n'
    with Pool(version=VERSION, agent=False, prefix="far-", base_config=LEAN, config=there, ep_config=ep) as other:
        flocks = f"FLOCK_TO = 127.0.0.1:{free_port()}, 127.0.0.1:{other.port}\nSEC_TOKEN_DIRECTORY =\n"
        with stageout_pools(version=VERSION, ep_config=QUICK_EP, ap_config=f"{QUICK_AP}\n{flocks}") as pool:
            site = Site(pool, destination, request.node.name.replace("_", "-"), tmp_path)
            token = other.ap.run(["condor_token_create", "-identity", "ap@home.test"]).stdout
            ap = pool.ap
            for user, place in (("root", ap.home / "secrets/tokens.d"), ("condor", "~condor/.condor/tokens.d")):
                script = f"umask 077; mkdir -p {place} && cat > {place}/other"
                ap.run(["sh", "-c", script], user=user, cwd="/", stdin=token)
            ap.reconfig()
            yield Flock(site, other)
            keep_logs(request, [pool, other])


def _refusals(flock: Flock) -> list[str]:
    return [line for line in flock.agent_log if "flock-notice-refused" in line]


def _doctor(flock: Flock) -> str:
    lines = flock.site.stageout("doctor", "--role", "ap", user="root", check=False).stdout.splitlines()
    return next(line for line in lines if "flocking" in line and f"127.0.0.1:{flock.other.port}" in line)


def _left_after_s(site: Site) -> float:
    start_s = time.monotonic()
    job = site.submit(outputs=("out1",), extra='requirements = TARGET.Flocked =!= "there"')
    history = site.wait_left(job, timeout_s=120)
    assert history["TransferOutputStats"]["STAGEOUTFilesCountLastRun"] == 1
    site.check_delivered(job)
    return time.monotonic() - start_s


def test_flocked_jobs_hand_off_once_the_other_pool_lets_the_agent_write(flock: Flock) -> None:
    site, pool, other = flock.site, flock.site.pool, flock.other
    pool.wait(lambda: _refusals(flock), what="the refusal")
    refused = flock.submit_there()
    history = site.wait_left(refused, timeout_s=120)
    assert not history["TransferOutputStats"].get("STAGEOUTFilesCountLastRun")
    site.check_delivered(refused)
    assert "has no notice of the agent" in _doctor(flock)
    (said,) = _refusals(flock)
    print(said)

    other.ap.configure(_TRUSTED)
    wait_until_acquainted(other)
    assert _doctor(flock).startswith("ok")
    site.destination.stop()
    job = flock.submit_there()
    site.wait_state(job, "RetryWait", timeout_s=120)
    shown = site.stageout("status", str(job)).stdout
    assert "waiting " in shown and "nothing was heard" not in shown, shown
    assert "LastRemotePool" in (pool.q(job) or {}), "by this the agent knows that the job has flocked"
    site.destination.start()
    history = site.wait_left(job, timeout_s=120)
    assert history["TransferOutputStats"]["STAGEOUTFilesCountLastRun"] == 2
    assert history["StageOutState"] == "Delivered"
    site.check_delivered(job)
    (ep,) = other.eps
    pool.wait(lambda: not any((ep.home / "stageout" / "sandboxes").glob("*/*")), what="the spool there to be empty")

    before_s = _left_after_s(site)
    (collector,) = other.ap.pids("collector")
    os.kill(collector, signal.SIGSTOP)
    try:
        pool.wait(lambda: any("flock-pool-lost" in line and f":{other.port}" in line for line in flock.agent_log),
                  timeout_s=120, what="the agent to miss the other pool")  # fmt: skip
        during_s = _left_after_s(site)
    finally:
        os.kill(collector, signal.SIGCONT)
    print(f"a job of the own pool left after {before_s:.1f} s, and while the other collector stood {during_s:.1f} s")
    assert during_s < before_s + 10.0
    assert not any("pass-failed" in line for line in flock.agent_log)
