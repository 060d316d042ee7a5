"""A job with the mark of a workflow manager is synchronous, with it and the wish it is handed off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.pool.conftest import QUICK_AP, QUICK_EP, Site

pytestmark = pytest.mark.pool

_MARK = "MY.IsToilJob = true"
_ASKS = f"{_MARK}\nMY.StageOutAsync = true"
_SHOWN = ["StageOutWorkflow", "StageOutGuard", "StageOutSynchronousCode"]


@pytest.fixture(scope="module", params=["25.14", "23.9"])
def one(
    request: pytest.FixtureRequest, stageout_pools: Any, destination: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """A pool of one node."""
    settings = {"execute_points": 1, "cpus": 4, "ap_config": QUICK_AP, "ep_config": QUICK_EP}
    with stageout_pools(version=request.param, **settings) as pool:
        yield Site(pool, destination, f"workflow-{request.param}", tmp_path_factory.mktemp("no-gates"))


def _shown(site: Site, extra: str) -> tuple[Any, ...]:
    """Return what the access point makes of a job with these lines."""
    ad = site.pool.q(site.submit(extra=f"{extra}\nhold = true"), _SHOWN) or {}
    return tuple(ad.get(name) for name in _SHOWN)


def test_a_job_with_a_mark_is_synchronous_unless_it_asks(one: Site) -> None:
    plain = one.submit(extra=_MARK)
    ad = one.wait_left(plain, timeout_s=120)
    assert (ad["StageOutSynchronousCode"], ad["StageOutWorkflow"], ad["StageOutGuard"]) == ("WorkflowJob", True, False)
    assert ad.get("TransferOutputStats", {}).get("STAGEOUTFilesCountLastRun", 0) == 0
    one.check_delivered(plain)
    told = json.loads(one.stageout("status", "--json", str(plain)).stdout)["jobs"][0]
    assert (told["synchronous_code"], told["synchronous"]) == ("WorkflowJob", True)
    assert "workflow manager" in told["reason"]
    asks = one.submit(extra=_ASKS)
    ad = one.wait_left(asks, timeout_s=120)
    assert (ad["StageOutState"], ad["StageOutWorkflow"]) == ("Delivered", True)
    assert ad["TransferOutputStats"]["STAGEOUTFilesCountLastRun"] == 2
    one.check_delivered(asks)


def test_other_reasons_go_before_it_and_the_owner_writes_no_result(one: Site) -> None:
    assert _shown(one, f"{_MARK}\nMY.StageOutAsync = false") == (True, False, "NotAsked")
    assert _shown(one, f"{_MARK}\nMY.DAGManJobId = 1") == (True, False, "DagNode")
    assert _shown(one, f"{_MARK}\nMY.StageOutWorkflow = false") == (True, False, "WorkflowJob")
    assert _shown(one, "MY.StageOutWorkflow = true") == (False, True, None)
    job = one.submit(extra=f"{_MARK}\nhold = true")
    done = one.pool.ap.run(["condor_qedit", str(job), "StageOutWorkflow", "false"], user="alice", check=False)
    assert done.returncode != 0 and one.pool.q(job)["StageOutWorkflow"] is True


def test_jobs_of_a_factory(one: Site) -> None:
    for extra, wanted in ((_MARK, (True, False, "WorkflowJob")), (_ASKS, (True, True, None))):
        factory = one.submit(extra=f"{extra}\nmax_materialize = 1\nhold = true", queue="queue 2")
        which = f"ClusterId == {factory.cluster} && ProcId >= 0"
        (ad,) = one.pool.wait(lambda which=which: one.pool.jobs(which, _SHOWN), timeout_s=60, what="its first job")
        assert tuple(ad.get(name) for name in _SHOWN) == wanted


def test_a_site_edits_the_expression(one: Site) -> None:
    for value, of_portal, of_manager in (
        ('$(STAGEOUT_WORKFLOW_JOBS) || PortalTask =?= "a"', True, True),
        ("false", False, False),
        ("regexp(", True, True),  # it cannot be read
    ):
        one.pool.ap.configure(f"STAGEOUT_WORKFLOW_JOBS = {value}")
        one.pool.wait(
            lambda: _shown(one, 'MY.PortalTask = "a"')[0] is of_portal,  # noqa: B023
            timeout_s=60,
            what=f"the schedd to know {value}",
        )
        assert _shown(one, _MARK)[0] is of_manager
        assert _shown(one, _ASKS)[1] is True
