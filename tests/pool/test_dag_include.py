"""DAGs that opt in with one line: INCLUDE stageout.dag."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.pool.conftest import JOB
from tests.pool.large_dag import delivered, submit, watch

pytestmark = pytest.mark.pool

_INCLUDE = "INCLUDE /opt/stageout/share/stageout/stageout.dag\n"
_POST = "/opt/stageout/bin/stageout_dag_post $DAGID $NODE $JOBID $JOB_COUNT $RETURN"


def _node(site: Any, extra: str = "", outputs: str = "out1") -> str:
    return f"""
executable = job.sh
arguments = {outputs}
transfer_output_files = {outputs}
output_destination = {site.url()}/$(JOB)
log = nodes.log
request_memory = 20
request_disk = 5M
{extra}
queue
"""


def _submit(site: Any, text: str, files: dict[str, str] | None = None) -> Any:
    dag = site.pool.submit_dag("alice", text, files={"job.sh": JOB, "node.sub": _node(site), **(files or {})})
    site.jobs.append(dag)
    return dag


def _wait(site: Any, dag: Any, timeout_s: float = 300) -> int:
    history = site.pool.wait(lambda: site.pool.history(dag), timeout_s=timeout_s, what=f"the DAG {dag} to end")
    return int(history["ExitCode"])


def _delivered(site: Any, *nodes: str) -> None:
    for node in nodes:
        assert site.destination.file(f"{site.prefix}/{node}/out1").exists(), node


def test_one_line_makes_children_wait_for_the_delivery_of_their_parents(site: Any) -> None:
    site.destination.pause()
    dag = _submit(site, f"{_INCLUDE}JOB A node.sub\nJOB B node.sub\nPARENT A CHILD B\n")
    first = f"{dag.cluster + 1}.0"
    site.wait_state(first, "Moving", timeout_s=90)
    assert not site.pool.jobs(f"DAGManJobId == {dag.cluster} && ClusterId > {dag.cluster + 1}"), "B must wait for A"
    site.destination.resume()
    assert _wait(site, dag) == 0
    assert site.wait_left(first)["StageOutState"] == "Delivered"
    _delivered(site, "A", "B")


def test_one_process_waits_for_a_dag_of_many_nodes(site: Any) -> None:
    """The lines are those of stageout.dag, with a shorter DEFER."""
    lines = f'VARS ALL_NODES PREPEND My.StageOutAsync="true"\nSCRIPT DEFER 75 3 POST ALL_NODES {_POST}\n'
    dag = submit(site, 30, last_lines=lines)
    site.jobs.append(dag)
    found = watch(site, dag, timeout_s=240)
    assert (found.status, found.most["leaders"]) == (0, 1)
    assert delivered(site, 30) == 30


def test_splices_sub_dags_and_nodes_without_a_job(site: Any) -> None:
    """PARENT A B CHILD C N makes DAGMan add a node of its own, and N is NOOP: ALL_NODES gives both a POST script."""
    inner = f"JOB I node.sub\n{_INCLUDE}"
    text = (
        "SPLICE S splice.dag\nSUBDAG EXTERNAL D inner.dag\nJOB A node.sub\nJOB B node.sub\nJOB C node.sub\n"
        "JOB N node.sub NOOP\nJOB M many.sub\nJOB O off.sub\nPARENT A B CHILD C N\nPARENT C CHILD S D\n" + _INCLUDE
    )
    many = _node(site, f"output_destination = {site.url()}/$(JOB)-$(ProcId)").replace("queue", "queue 2")
    files = {
        "splice.dag": inner.replace("JOB I", "JOB P"),
        "inner.dag": inner,
        "many.sub": many,
        "off.sub": _node(site, "MY.StageOutAsync = false"),
    }
    dag = _submit(site, text, files)
    assert _wait(site, dag) == 0
    _delivered(site, "A", "B", "C", "S+P", "I", "M-0", "M-1", "O")
    ads = {}
    for cluster in range(dag.cluster + 1, dag.cluster + 9):
        for ad in filter(None, (site.pool.history(f"{cluster}.{proc}") for proc in (0, 1))):
            ads.setdefault(ad["DAGNodeName"], []).append(ad)
    assert {name: len(found) for name, found in ads.items()} == dict.fromkeys("ABCDIO", 1) | {"S+P": 1, "M": 2}
    handed = {name: ads[name][0].get("TransferOutputStats", {}).get("STAGEOUTFilesCountLastRun", 0) for name in ads}
    assert handed == {"A": 1, "B": 1, "C": 1, "S+P": 1, "I": 1, "M": 1, "O": 0, "D": 0}


def test_a_failed_delivery_fails_the_node_with_its_reason_and_the_rescue_dag_repeats_it(site: Any) -> None:
    site.destination.refuse("no such collection", 404)
    try:
        dag = _submit(site, f"JOB A node.sub\n{_INCLUDE}")
        assert _wait(site, dag) != 0
    finally:
        site.destination.accept()
    assert re.search(r"node A, job \S+: failed: .* 404 ", (dag.dir / "stageout-failed.log").read_text())
    rescue = next(dag.dir.glob("*.rescue001")).read_text()
    assert "DONE A" not in rescue
    first = f"{dag.cluster + 1}.0"
    site.stageout("cancel", first)
    site.wait_left(first)
    again = site.pool.ap.run(["condor_submit_dag", "dag.dag"], user="alice", cwd=dag.dir).stdout
    cluster = int(again.rsplit("cluster", 1)[1].split(".")[0])
    assert _wait(site, f"{cluster}.0") == 0
    _delivered(site, "A")


def test_own_post_scripts_run_after_the_delivery_and_decide(site: Any) -> None:
    """P is replaced by a later line of its own, which passes its script on; Q has a script that fails."""
    text = (
        f"JOB P node.sub\nJOB Q node.sub\n{_INCLUDE}"
        f"SCRIPT DEFER 75 5 POST P {_POST} own.sh $NODE\nSCRIPT DEFER 75 5 POST Q {_POST} own.sh $NODE 75\n"
    )
    own = '#!/bin/sh\necho "$1" >> own.log\nexit ${2:-0}\n'
    dag = _submit(site, text, {"own.sh": own})
    assert _wait(site, dag) != 0
    assert sorted((dag.dir / "own.log").read_text().split()) == ["P", "Q"]
    rescue = next(dag.dir.glob("*.rescue001")).read_text()
    assert "DONE P" in rescue and "DONE Q" not in rescue
    _delivered(site, "P", "Q")
