"""Owner and administrator see why a transfer is synchronous: the job's ad, ``stageout status``, and the slots.

Slot users are such a reason, until the node has accounts for their jobs' output.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.pool import Node, Submission
from tests.pool.conftest import QUICK_AP, QUICK_EP, Site

pytestmark = pytest.mark.pool


@pytest.fixture(scope="module")
def node(stageout_pools: Any, destination: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A pool of one node."""
    with stageout_pools(version="25.14", execute_points=1, cpus=4, ap_config=QUICK_AP, ep_config=QUICK_EP) as pool:
        yield Site(pool, destination, "why", tmp_path_factory.mktemp("no-gates"))
        destination.resume()


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
    asked = ("StageOutHandoffs", "StageOutSynchronous.NotAsked", "StageOutSynchronous.DagNode")
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
    dag_node = node.submit(outputs=("out1",), extra="MY.DAGManJobId = 1")
    assert _left_because(node, dag_node)[0] == "DagNode"
    recurring = node.submit(outputs=("out1",), extra="on_exit_remove = ExitCode == 0", queue="queue")
    assert _left_because(node, recurring)[0] == "MayRunAgain"
    wanted = {"StageOutHandoffs": 4, "NotAsked": 1, "DagNode": 1}
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


#: Says under which account it runs, and tries to reach output that waits on the node.
_SPY = """#!/bin/sh
id -un
for attempt in "cat $1" "ls ${1%/*}" "ln $1 stolen" "chmod 666 $1" "truncate -s 0 $1"; do
    $attempt > /dev/null 2>&1 && echo "did: $attempt"
done
echo output of a spy > out1
"""


def _waiting(ep: Node) -> dict[str, int]:
    """Return the waiting files, as the node sees them, and their uids."""
    spool = f"{ep.config_val('STAGEOUT_SPOOL')}/sandboxes"
    lines = ep.run(["sh", "-c", f"stat -c '%n %u' {spool}/*/0"], check=False).stdout.splitlines()
    return {path: int(uid) for path, uid in map(str.split, lines)}


def _run_under(ep: Node, slot_user: str) -> None:
    """Let jobs run under this account, or under nobody, with two accounts for their output."""
    accounts = "STARTER_ALLOW_RUNAS_OWNER = False\nSTAGEOUT_ACCOUNTS = stageout1, stageout2\n"
    ep.configure(accounts + (f"SLOT1_1_USER = {slot_user}" if slot_user else ""))


def _spied(node: Site, user: str, path: str) -> tuple[Submission, list[str]]:
    """Run a job of this user that tries to reach a waiting file. Return it, and what it says."""
    lines = f"""executable = spy.sh
        arguments = {path}
        should_transfer_files = YES
        output_destination = {node.url()}/$(Cluster)
        transfer_output_files = out1
        request_memory = 50
        request_disk = 10M
        queue"""
    job = node.pool.submit(user, lines, files={"spy.sh": _SPY})
    node.pool.wait_status(job, "Completed", timeout_s=120)
    return job, (job.dir / "job.out").read_text().splitlines()


def test_accounts_for_the_output_of_slot_users_and_of_nobody(node: Site) -> None:
    ep = node.pool.eps[0]
    ep.run(["sh", "-ec", "useradd -r -M stageout1; useradd -r -M stageout2"])
    before = len(ep.log("SandboxManagerLog"))
    _run_under(ep, "bob")
    node.pool.wait(
        lambda: " configuration-reloaded" in ep.log("SandboxManagerLog")[before:], what="the manager to know them"
    )
    node.destination.pause()
    first = node.submit(outputs=("out1",))
    node.pool.wait_status(first, "Completed", timeout_s=120)
    ((path, keeper),) = _waiting(ep).items()
    carols, said = _spied(node, "carol", path)
    assert said == ["bob"], "it ran under the account of the first job, and reached nothing"
    uids = {int(ep.run(["id", "-u", name]).stdout) for name in ("stageout1", "stageout2")}
    found = _waiting(ep)
    assert found[path] == keeper and set(found.values()) == uids, "each owner has an account"
    _run_under(ep, "")
    second, said = _spied(node, "alice", path)
    assert said == ["nobody"]
    assert sorted(_waiting(ep).values()) == sorted([*uids, keeper]), "the owner's account has this output, too"
    shown = json.loads(node.stageout("status", "--json").stdout)["jobs"]
    assert {str(first), str(second)} <= {row["job"] for row in shown if not row["synchronous"]}
    node.destination.resume()
    for job in (first, carols, second):
        assert node.wait_left(job, timeout_s=120)["StageOutState"] == "Delivered"
    node.check_delivered(first)
    for job in (carols, second):
        assert node.destination.file(f"{node.prefix}/{job.cluster}/out1").read_text() == "output of a spy\n"
    doctor = ep.run(["/opt/stageout/bin/stageout", "doctor"], check=False).stdout
    assert "output of 2 owners" in doctor, doctor
