"""Submit files that set the attributes of stageout: no value reaches the queue, and the jobs work as always."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from stageout.core.trust import deleted_at_submission
from tests.harness.pool import Submission
from tests.pool.conftest import JOB, QUICK_AP, QUICK_EP, Site

pytestmark = pytest.mark.pool

_WAIT = "/opt/stageout/bin/stageout wait --timeout 120 --return $RETURN $JOBID"
#: Values that the transforms write.
_OURS = {
    "StageOutState": "None", "StageOutReason": "", "StageOutRun": 0, "StageOutReruns": 0, "StageOutKeys": "",
    "StageOutAgentKey": "", "StageOutRetryDelay": range(300, 601), "StageOutSynchronousCode": "NotAsked",
}  # fmt: skip
#: Values that would end, keep or delay a job, or give it to another manager.
_NUMBERS = {"StageOutRun": 1, "StageOutReruns": 77, "StageOutKeptUntil": 4102444800, "StageOutUntold": 1,
            "StageOutRetryDelay": 99999, "StageOutBytesLeft": 77}  # fmt: skip
_TEXTS = {"StageOutState": "Delivered", "StageOutRequest": "cancel"}


@pytest.fixture(scope="module", params=["25.14", "23.9"])
def site(
    request: pytest.FixtureRequest, stageout_pools: Any, destination: Any, tmp_path_factory: Any
) -> Iterator[Site]:
    """A pool of one node of each version."""
    settings = {"execute_points": 1, "cpus": 8, "ap_config": QUICK_AP, "ep_config": QUICK_EP}
    with stageout_pools(version=request.param, **settings) as pool:
        yield Site(pool, destination, f"forged-{request.param}", tmp_path_factory.mktemp("no-gates"))


def _forged(each: str = "") -> str:
    """Return lines of a submit file with a hostile value for each attribute. :param each: "$(Process)" or ""."""
    values = {name: f'"{_TEXTS.get(name, "forged")}{each}"' for name in deleted_at_submission()}
    values |= {name: f"{number}{each}" for name, number in _NUMBERS.items()}
    return "\n".join(f"MY.{name} = {value}" for name, value in {**values, "StageOutGuard": "true"}.items())


def _ads(site: Site, job: Submission, count: int) -> list[dict[str, Any]]:
    """Return the ads of so many jobs of a cluster."""
    which = f"ClusterId == {job.cluster} && ProcId >= 0"
    site.pool.wait(lambda: len(site.pool.jobs(which)) >= count, timeout_s=60, what=f"{count} jobs")
    return list(site.pool.jobs(which))


def _left(ad: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a job that has not run which have another value than ours."""
    found = {name: ad[name] for name in deleted_at_submission() if ad.get(name) is not None}
    return {name: value for name, value in found.items()
            if value != (ours := _OURS.get(name)) and not (isinstance(ours, range) and value in ours)}  # fmt: skip


@pytest.mark.parametrize(
    ("each", "extra", "queue", "count"),
    [
        ("", "", "queue", 1),
        ("", "", "queue 3", 3),
        ("$(Process)", 'MY.GlobalJobId = "ap#7.0#170000000$(Process)"', "queue 3", 3),
        ("", "max_materialize = 2", "queue 3", 2),
        ("$(Process)", "max_materialize = 2", "queue 3", 2),
        ("", "max_idle = 1", "queue 3", 1),
    ],
    ids=["one", "cluster", "each", "factory", "factory-each", "max-idle"],
)
def test_no_value_of_a_submit_file_is_in_the_queue(site: Site, each: str, extra: str, queue: str, count: int) -> None:
    job = site.submit(extra=f"{_forged(each)}\n{extra}\nhold = true", queue=queue, outputs=("out1",))
    for ad in _ads(site, job, count):
        assert (_left(ad), ad["StageOutGuard"], ad["StageOutState"]) == ({}, True, "None")
        assert str(ad["GlobalJobId"]).split("#")[1] == f"{ad['ClusterId']}.{ad['ProcId']}"
    site.pool.ap.run(["condor_release", str(job.cluster)], user="alice")
    released: set[str] = set()

    def released_all() -> bool:  # jobs that a factory makes later are held, too
        for ad in site.pool.jobs(f"ClusterId == {job.cluster} && ProcId >= 0 && JobStatus == 5"):
            assert _left(ad) == {} or ad["NumShadowStarts"]
            released.add(f"{ad['ClusterId']}.{ad['ProcId']}")
            site.pool.ap.run(["condor_release", f"{ad['ClusterId']}.{ad['ProcId']}"], user="alice", check=False)
        return not site.pool.jobs(f"ClusterId == {job.cluster}")

    site.pool.wait(released_all, timeout_s=240, what=f"the jobs of {job} to leave the queue")
    for proc in range(int(queue.partition(" ")[2] or 1)):
        history = site.wait_left(f"{job.cluster}.{proc}")
        assert history["StageOutState"] == "Delivered"
        assert not [name for name in deleted_at_submission() if "forged" in str(history.get(name, ""))]
        assert history.get("StageOutKeptUntil", 0) != _NUMBERS["StageOutKeptUntil"]
        assert site.file(f"{job.cluster}.{proc}", "out1").exists()


def test_a_job_that_is_left_out_has_no_value_of_its_submit_file(site: Site) -> None:
    job = site.submit(extra=f"{_forged()}\nMY.StageOutAsync = false\nhold = true", outputs=("out1",))
    (ad,) = _ads(site, job, 1)
    assert (_left(ad), ad["StageOutGuard"], ad["StageOutSynchronousCode"]) == ({}, False, "NotAsked")
    assert ad.get("StageOutState") is None and ad.get("StageOutAgentKey") is None
    site.pool.rm(job)


def test_wishes_of_the_owner_stay(site: Site) -> None:
    wishes = 'MY.StageOutFallback = "http://x/"\nMY.StageOutPriority = 3\nMY.StageOutDeadline = 9\n'
    job = site.submit(extra=f"{wishes}MY.StageOutAsync = true\nhold = true")
    (ad,) = _ads(site, job, 1)
    assert (ad["StageOutFallback"], ad["StageOutPriority"], ad["StageOutDeadline"]) == ("http://x/", 3, 9)
    assert ad["StageOutAsync"] is True
    site.pool.rm(job)


def test_a_node_of_a_dag_that_asks_for_it_is_handed_off(site: Site) -> None:
    text = f"""executable = job.sh
arguments = out1
transfer_output_files = out1
output_destination = {site.url()}/node
log = a.log
output = a.out
request_memory = 50
request_disk = 10M
MY.StageOutAsync = true
{_forged()}
queue
"""
    script = f"JOB A a.sub\nSCRIPT POST A {_WAIT}\n"
    dag = site.pool.submit_dag("alice", script, files={"job.sh": JOB, "a.sub": text})
    history = site.pool.wait(lambda: site.pool.history(dag), timeout_s=240, what="the DAG to end")
    assert history and history["ExitCode"] == 0
    node = site.wait_left(f"{dag.cluster + 1}.0")
    assert node["StageOutState"] == "Delivered"
    assert node["TransferOutputStats"]["STAGEOUTFilesCountLastRun"] == 1


@pytest.mark.parametrize(
    ("extra", "queue"), [("", "queue"), ("max_materialize = 3", "queue 2")], ids=["job", "factory"]
)
def test_leave_in_queue_of_the_owner_still_counts(site: Site, extra: str, queue: str) -> None:
    job = site.submit(extra=f"{_forged()}\n{extra}\nleave_in_queue = true", queue=queue, outputs=("out1",))
    for ad in _ads(site, job, int(queue.partition(" ")[2] or 1)):
        assert ad["StageOutUserLeave"] is True
        site.wait_state(f"{ad['ClusterId']}.{ad['ProcId']}", "Delivered", timeout_s=120)
    assert all(ad["JobStatus"] == 4 for ad in _ads(site, job, 1))
    plain = site.submit(outputs=("out1",))
    site.wait_left(plain, timeout_s=120)  # the schedd has looked at all jobs since then
    assert len(_ads(site, job, 1)) == int(queue.partition(" ")[2] or 1)
    site.pool.rm(job)


def test_owners_cannot_edit_the_name_of_a_job(site: Site) -> None:
    job = site.submit(extra="hold = true")
    name = site.pool.q(job)["GlobalJobId"]  # type: ignore[index]
    site.pool.ap.run(["condor_qedit", str(job), "GlobalJobId", '"ap#7.0#1700000000"'], user="alice", check=False)
    assert site.pool.q(job)["GlobalJobId"] == name  # type: ignore[index]
    site.pool.rm(job)
