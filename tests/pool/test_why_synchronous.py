"""Owner and administrator see why a transfer is synchronous: the job's ad, ``stageout status``, and the slots."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.pool.conftest import QUICK_AP, QUICK_EP, Site

pytestmark = pytest.mark.pool


@pytest.fixture(scope="module")
def node(stageout_pools: Any, destination: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A pool of one node."""
    with stageout_pools(version="25.14", execute_points=1, cpus=4, ap_config=QUICK_AP, ep_config=QUICK_EP) as pool:
        yield Site(pool, destination, "why", tmp_path_factory.mktemp("no-gates"))


def _left_because(site: Site, job: Any) -> tuple[str, str]:
    """Code and sentence that ``stageout status`` and ``stageout history`` show when the job has left."""
    site.wait_left(job, timeout_s=120)
    told = [
        json.loads(site.stageout(command, "--json", str(job)).stdout)["jobs"][0] for command in ("status", "history")
    ]
    shown = {(one["synchronous_code"], one["reason"]) for one in told}
    assert len(shown) == 1
    return shown.pop()


def _counted(site: Site) -> dict[str, int]:
    """Return what ``condor_status -af`` prints for the node: hand-offs, and refusals by code."""
    asked = ("StageOutHandoffs", "StageOutSynchronous.NotAsked", "StageOutSynchronous.Factory")
    asked += ("StageOutSynchronous.SlotUser",)
    text = site.pool.ap.run(["condor_status", "-constraint", "DynamicSlot =!= true", "-af", *asked]).stdout
    return {name.rpartition(".")[2]: int(value) for name, value in zip(asked, text.split()) if value.isdigit()}


def test_reasons_of_the_access_point_and_of_the_node(node: Site) -> None:
    node.wait_left(node.submit(outputs=("out1",)), timeout_s=120)
    asked = node.submit(outputs=("out1",), extra="MY.StageOutAsync = false\nhold = true")
    assert node.pool.q(asked)["StageOutSynchronousCode"] == "NotAsked"
    early = json.loads(node.stageout("status", "--json", str(asked)).stdout)["jobs"][0]
    assert (early["synchronous_code"], early["synchronous"]) == ("NotAsked", False)
    node.pool.release(asked)
    code, reason = _left_because(node, asked)
    assert code == "NotAsked" and "StageOutAsync is false" in reason
    factory = node.submit(outputs=("out1",), extra="max_materialize = 1")
    assert _left_because(node, f"{factory.cluster}.0")[0] == "Factory"
    recurring = node.submit(outputs=("out1",), extra="on_exit_remove = ExitCode == 0", queue="queue")
    assert _left_because(node, recurring)[0] == "MayRunAgain"
    wanted = {"StageOutHandoffs": 4, "NotAsked": 1, "Factory": 1}
    node.pool.wait(lambda: _counted(node) == wanted, timeout_s=60, what="the counts in the collector")


def test_jobs_that_run_as_slot_users(node: Site) -> None:
    ep = node.pool.eps[0]
    ep.configure("STARTER_ALLOW_RUNAS_OWNER = False\nSLOT1_USER = bob\nSLOT1_1_USER = bob")
    jobs = [node.submit(outputs=("out1",)) for _ in range(3)]
    for job in jobs:
        code, reason = _left_because(node, job)
        assert code == "SlotUser" and "an account that other owners may share" in reason
        result = node.epoch_results(job)[-1]["DeveloperData"]
        assert (result["StageOutSynchronousCode"], result["StageOutSynchronous"]) == (code, reason)
    code = "OutputPluginResultList[0].DeveloperData.StageOutSynchronousCode"
    printed = node.pool.ap.run(["condor_history", "-transfer-history:O", str(jobs[0]), "-af", code]).stdout
    assert printed.split() == ["SlotUser"]
    node.pool.wait(lambda: _counted(node).get("SlotUser") == 3, timeout_s=60, what="the counts in the collector")
    print(node.stageout("status", str(jobs[0])).stdout, _counted(node))
    doctor = node.pool.ap.run(["/opt/stageout/bin/stageout", "doctor"], user="root", check=False).stdout
    assert "SlotUser" in doctor, doctor
    print(next(line for line in doctor.splitlines() if "SlotUser" in line))
