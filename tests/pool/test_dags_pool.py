"""DAGs whose nodes hand their output off, with POST scripts and without."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pool.conftest import JOB

pytestmark = pytest.mark.pool


def _node(site: Any, name: str, extra: str = "") -> str:
    return f"""
executable = job.sh
arguments = out1
transfer_output_files = out1
output_destination = {site.url()}/{name}
log = {name}.log
output = {name}.out
request_memory = 50
request_disk = 10M
{extra}
queue
"""


def _submit_dag(site: Any, text: str, extra: str) -> Any:
    files = {"job.sh": JOB, "a.sub": _node(site, "a", extra), "b.sub": _node(site, "b", extra)}
    dag = site.pool.submit_dag("alice", text, files=files)
    site.jobs.append(dag)
    return dag


def _wait_dag(site: Any, dag: Any, timeout_s: float = 240) -> int:
    history = site.pool.wait(lambda: site.pool.history(dag), timeout_s=timeout_s, what=f"the DAG {dag} to end")
    return int(history["ExitCode"])


#: A PRE script: its node starts when the test makes the file `go` in the DAG's directory.
_HELD_BACK = "#!/bin/sh\nuntil [ -e go ]; do sleep 0.2; done\n"
_WAIT = "/opt/stageout/bin/stageout wait --timeout 120 --return $RETURN $JOBID"


def test_dag_without_post_scripts_is_synchronous(site: Any) -> None:
    dag = _submit_dag(site, "JOB A a.sub\nJOB B b.sub\nPARENT A CHILD B\n", "")
    assert _wait_dag(site, dag) == 0
    nodes = [site.pool.history(f"{dag.cluster + n}.0") for n in (1, 2)]
    for node in nodes:
        assert node["TransferOutputStats"].get("STAGEOUTFilesCountLastRun", 0) == 0
    assert site.destination.file(f"{site.prefix}/b/out1").exists()


def test_dag_that_opts_in_waits_for_delivery(site: Any) -> None:
    site.destination.pause()
    text = f"JOB A a.sub\nJOB B b.sub\nPARENT A CHILD B\nSCRIPT POST A {_WAIT}\nSCRIPT POST B {_WAIT}\n"
    dag = _submit_dag(site, text, "MY.StageOutAsync = true")
    first = f"{dag.cluster + 1}.0"
    site.pool.wait_status(first, "Completed", timeout_s=90)
    site.wait_state(first, "Moving")
    assert not site.pool.jobs(f"DAGManJobId == {dag.cluster} && ClusterId > {dag.cluster + 1}"), "B must wait for A"
    site.destination.resume()
    assert _wait_dag(site, dag) == 0
    assert site.destination.file(f"{site.prefix}/b/out1").exists()


def test_dag_node_whose_stage_out_fails_is_run_again_by_retry(site: Any) -> None:
    text = f"JOB A a.sub\nSCRIPT POST A {_WAIT}\nRETRY A 2\n"
    site.destination.refuse("no such collection", 404)
    try:
        dag = _submit_dag(site, text, "MY.StageOutAsync = true")
        first = f"{dag.cluster + 1}.0"
        site.wait_state(first, "Failed", timeout_s=90)
        assert site.pool.status(first) in ("Completed", "Gone"), "a DAG node is never held or run again by edits"
    finally:
        site.destination.accept()
    assert _wait_dag(site, dag) == 0
    assert site.destination.file(f"{site.prefix}/a/out1").exists()


def test_dag_node_whose_output_is_lost_is_run_again_by_retry(site: Any) -> None:
    text = f"JOB A a.sub\nSCRIPT POST A {_WAIT}\nRETRY A 2\n"
    site.destination.pause()
    try:
        dag = _submit_dag(site, text, "MY.StageOutAsync = true")
        first = f"{dag.cluster + 1}.0"
        site.wait_state(first, "Moving", timeout_s=90)
        ep = next(ep for ep in site.pool.eps if any((ep.home / "stageout" / "sandboxes").glob("*/*")))
        ep.kill("sandbox-manager")
        for path in (ep.home / "stageout" / "sandboxes").glob("*/*"):
            path.unlink()
    finally:
        site.destination.resume()
    assert _wait_dag(site, dag) == 0
    assert site.destination.file(f"{site.prefix}/a/out1").stat().st_size > 20000


def test_output_of_a_node_is_delivered_although_another_node_fails(site: Any) -> None:
    """DAGMan aborts the DAG and removes the node, whose program succeeded; the rescue DAG says that it is done."""
    site.destination.pause()
    try:
        files = {
            "job.sh": JOB,
            "held-back.sh": _HELD_BACK,
            "a.sub": _node(site, "a", "MY.StageOutAsync = true"),
            "b.sub": _node(site, "b", 'MY.StageOutAsync = false\nenvironment = "EXIT=1"\noutput_destination ='),
        }
        dag = site.pool.submit_dag("alice", "JOB A a.sub\nJOB B b.sub\nSCRIPT PRE B ./held-back.sh\n", files=files)
        site.jobs.append(dag)
        first = f"{dag.cluster + 1}.0"
        site.wait_state(first, "Moving", timeout_s=90)
        (dag.dir / "go").touch()
        assert _wait_dag(site, dag) != 0
    finally:
        site.destination.resume()
    history = site.wait_left(first, timeout_s=90)
    assert "DONE A" in next(dag.dir.glob("*.rescue001")).read_text()
    assert history["StageOutState"] == "Delivered", history.get("RemoveReason")
    assert site.destination.file(f"{site.prefix}/a/out1").exists()


def test_output_of_a_node_of_a_sub_dag_is_delivered_although_a_node_above_fails(site: Any) -> None:
    site.destination.pause()
    try:
        files = {
            "job.sh": JOB,
            "held-back.sh": _HELD_BACK,
            "inner.dag": "JOB A a.sub\nJOB C c.sub\n",
            "a.sub": _node(site, "a", "MY.StageOutAsync = true"),
            "b.sub": _node(site, "b", 'environment = "EXIT=1"\noutput_destination ='),
            "c.sub": _node(site, "c", 'environment = "SLEEP=600"\noutput_destination ='),
        }
        text = "SUBDAG EXTERNAL S inner.dag\nJOB B b.sub\nSCRIPT PRE B ./held-back.sh\nABORT-DAG-ON B 1\n"
        dag = site.pool.submit_dag("alice", text, files=files)
        site.jobs.append(dag)
        moving = f'StageOutState == "Moving" && ClusterId > {dag.cluster}'
        (node,) = site.pool.wait(lambda: site.pool.jobs(moving), timeout_s=90, what="the node's stage-out")
        (dag.dir / "go").touch()
        assert _wait_dag(site, dag) != 0
    finally:
        site.destination.resume()
    history = site.wait_left(f"{node['ClusterId']}.0", timeout_s=90)
    assert history["RemoveReason"].startswith("DAG Removed")
    assert history["StageOutState"] == "Delivered"
    assert site.destination.file(f"{site.prefix}/a/out1").exists()


def test_output_of_failed_tries_of_a_node_can_be_retried_after_its_dag(site: Any) -> None:
    wait = _WAIT.replace("--timeout 120", "--timeout 60")
    site.destination.refuse("no such collection", 404)
    try:
        dag = _submit_dag(site, f"JOB A a.sub\nSCRIPT POST A {wait}\nRETRY A 1\n", "MY.StageOutAsync = true")
        assert _wait_dag(site, dag) != 0
    finally:
        site.destination.accept()
    tries = [f"{dag.cluster + n}.0" for n in (1, 2)]
    for job in tries:
        assert "failed" in site.stageout("status", job, check=False).stdout
    site.stageout("retry", tries[1])
    assert site.wait_left(tries[1])["StageOutState"] == "Delivered"
    assert site.destination.file(f"{site.prefix}/a/out1").exists()
    site.stageout("cancel", tries[0])
    assert site.wait_left(tries[0])["StageOutState"] == "Cancelled"
    site.pool.wait(site.spool_is_empty, timeout_s=60, what="the cancelled output to be freed")


def test_removal_of_a_dag_cancels_its_stage_outs(site: Any) -> None:
    site.destination.pause()
    dag = _submit_dag(site, f"JOB A a.sub\nSCRIPT POST A {_WAIT}\n", "MY.StageOutAsync = true")
    first = f"{dag.cluster + 1}.0"
    site.wait_state(first, "Moving", timeout_s=90)
    site.pool.ap.run(["condor_rm", str(dag)], user="alice")
    history = site.wait_left(first, timeout_s=90)
    assert history["StageOutState"] != "Delivered"
    site.pool.wait(site.spool_is_empty, timeout_s=60, what="the cancelled output to be freed")
    site.destination.resume()
