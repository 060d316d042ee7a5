"""A node that dies while output waits on it: the owner sees it soon, and the job runs again when the lease is over."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.harness.destination import Destination
from tests.pool.conftest import QUICK_AP, QUICK_EP, Site, open_directory, wait_until_acquainted

pytestmark = pytest.mark.pool

_LEASE_S = 60
#: For passes of the agent, a report under way, and a machine with other tests on it.
_MORE_S = 60


def test_the_job_of_a_dead_node_runs_again_when_the_lease_is_over(
    stageout_pools: Any, destination: Destination
) -> None:
    """The ads of the dead node stay in the collector for a quarter of an hour."""
    lease = f"STAGEOUT_LEASE = {_LEASE_S}\n"
    with (
        open_directory("silent") as shared,
        stageout_pools(execute_points=1, binds=(shared,), ap_config=f"{QUICK_AP}{lease}", ep_config=QUICK_EP) as pool,
    ):
        site = Site(pool, destination, "silent", shared)
        wait_until_acquainted(pool)
        destination.stop()
        try:
            job = site.submit()
            site.wait_state(job, "RetryWait", timeout_s=90)
            pool.eps[0].crash()
            died_s = time.monotonic()

            def is_silent() -> bool:
                (row,) = json.loads(site.stageout("status", "--json", str(job)).stdout)["jobs"]
                return bool(row["silent_s"])

            pool.wait(is_silent, timeout_s=_LEASE_S + _MORE_S, what="status to call the node silent")
            if pool.q(job, ["StageOutReruns"])["StageOutReruns"] == 0:
                text = site.stageout("status", str(job)).stdout
                assert "node silent" in text and "as of " in text, text
            pool.wait(
                lambda: pool.q(job, ["StageOutReruns"])["StageOutReruns"] == 1,
                timeout_s=_LEASE_S + _MORE_S, what="the job to run again",
            )  # fmt: skip
            assert time.monotonic() - died_s < _LEASE_S + _MORE_S
            assert "nothing was heard of the output" in str(pool.q(job, ["StageOutReason"])["StageOutReason"])
        finally:
            destination.start()
