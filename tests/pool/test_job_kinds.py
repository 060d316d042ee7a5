"""Factories, spooled jobs, job sets, bad exits, and DAGs."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

pytestmark = pytest.mark.pool


def test_max_idle_factory(site: Any) -> None:
    job = site.submit(extra="max_idle = 1", queue="queue 3", outputs=("out1",))
    for proc in range(3):
        one = f"{job.cluster}.{proc}"
        history = site.wait_left(one, timeout_s=120)
        assert history["StageOutState"] == "Delivered"
        assert site.file(one, "out1").exists()


def test_max_materialize_is_synchronous_and_goes_on(site: Any) -> None:
    job = site.submit(extra="max_materialize = 1", queue="queue 2", outputs=("out1",))
    for proc in range(2):
        one = f"{job.cluster}.{proc}"
        history = site.wait_left(one, timeout_s=120)
        assert history["TransferOutputStats"].get("STAGEOUTFilesCountLastRun", 0) == 0
        assert site.file(one, "out1").exists()


def test_spooled_job(site: Any) -> None:
    """It is delivered, and stays until its owner has fetched the rest (HTCondor sends that to the URL too)."""
    job = site.submit(options=("-spool",), outputs=("out1",))
    site.wait_state(job, "Delivered", timeout_s=90)
    assert site.pool.status(job) == "Completed"
    site.pool.ap.run(["condor_transfer_data", str(job)], user="alice", cwd=job.dir)
    site.wait_left(job)
    digest, name = site.file(job, "job.out").read_text().split()
    assert hashlib.sha256(site.file(job, name).read_bytes()).hexdigest() == digest


def test_job_set(site: Any) -> None:
    text = (
        "name = stageout-set\n\niterator = table word {\n    one\n}\n\njob {\n"
        "executable = job.sh\narguments = out1\ntransfer_output_files = out1\n"
        f"output_destination = {site.url()}/$(Cluster).$(Process)\nlog = job.log\noutput = job.out\n"
        "request_memory = 50\nrequest_disk = 10M\nqueue\n}\n"
    )
    from tests.pool.conftest import JOB

    place = site.submit(outputs=("unused",)).dir
    (place / "set.sub").write_text(text)
    (place / "job.sh").write_text(JOB)
    done = site.pool.ap.run(["htcondor", "jobset", "submit", "set.sub"], user="alice", cwd=place)
    cluster = max(int(ad["ClusterId"]) for ad in site.pool.jobs('JobSetName =?= "stageout-set"', ["ClusterId"]))
    history = site.wait_left(f"{cluster}.0", timeout_s=90)
    assert history["StageOutState"] == "Delivered", done.stdout
    assert site.file(f"{cluster}.0", "out1").exists()


def test_output_of_a_failed_job_is_delivered_as_htcondor_would(site: Any) -> None:
    job = site.submit(env="EXIT=3")
    history = site.wait_left(job)
    assert history["ExitCode"] == 3
    site.check_delivered(job)


def test_output_of_a_killed_job(site: Any) -> None:
    job = site.submit(env="KILLED=1")
    history = site.wait_left(job)
    assert history["ExitBySignal"] is True
    assert history["ExitSignal"] == 9
    site.check_delivered(job)


def test_on_exit_hold_delivers_and_stays_held(site: Any) -> None:
    job = site.submit(env="EXIT=3", extra="on_exit_hold = ExitCode =?= 3")
    site.pool.wait_status(job, "Held", timeout_s=60)
    site.wait_state(job, "Delivered")
    ad = site.pool.q(job)
    assert ad["JobStatus"] == 5
    assert ad["HoldReasonCode"] == 3
    site.check_delivered(job)


def test_remap_with_a_url(site: Any) -> None:
    """A job without output_destination whose remap names a URL takes part too."""
    target = site.url() + "/remapped"
    job = site.submit(outputs=("out1",), destination="", extra=f'transfer_output_remaps = "out1 = {target}"')
    history = site.wait_left(job)
    assert history["StageOutState"] == "Delivered"
    assert site.destination.file(f"{site.prefix}/remapped").stat().st_size > 20000


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
    from tests.pool.conftest import JOB

    files = {"job.sh": JOB, "a.sub": _node(site, "a", extra), "b.sub": _node(site, "b", extra)}
    dag = site.pool.submit_dag("alice", text, files=files)
    site.jobs.append(dag)
    return dag


def _wait_dag(site: Any, dag: Any, timeout_s: float = 240) -> int:
    history = site.pool.wait(lambda: site.pool.history(dag), timeout_s=timeout_s, what=f"the DAG {dag} to end")
    return int(history["ExitCode"])


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
