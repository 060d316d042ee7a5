"""Factories, spooled jobs, job sets, bad exits, recurring jobs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.pool.conftest import JOB

pytestmark = pytest.mark.pool


def test_max_idle_factory(site: Any) -> None:
    job = site.submit(extra="max_idle = 1", queue="queue 3", outputs=("out1",))
    for proc in range(3):
        one = f"{job.cluster}.{proc}"
        history = site.wait_left(one, timeout_s=120)
        assert history["StageOutState"] == "Delivered"
        assert site.file(one, "out1").exists()


@pytest.fixture
def deep(site: Any) -> Iterator[None]:
    """Data slots in which all jobs of a factory can wait."""
    for ep in site.pool.eps:
        ep.configure("STAGEOUT_DATA_SLOT_DEPTH = 12\n")
    yield
    for ep in site.pool.eps:
        ep.configure("")


def _most_at_once(events: list[dict[str, Any]]) -> int:
    """Return the largest number of jobs that were in the queue and had not ended, by their log."""
    there = most = 0
    for event in events:
        there += (event["Type"] == 0) - (event["Type"] in (5, 9))
        most = max(most, there)
    return most


def _limit(site: Any, job: Any) -> Any:
    return site.pool.q(f"{job.cluster}.0", ["JobMaterializeLimit"])["JobMaterializeLimit"]


def test_jobs_that_wait_for_their_output_take_no_place_of_max_materialize(site: Any, deep: None) -> None:
    site.destination.pause()
    job = site.submit(extra="max_materialize = 3", queue="queue 9", outputs=("out1",))
    completed = f"ClusterId == {job.cluster} && JobStatus == 4"

    def waiting(count: int) -> None:
        site.pool.wait(lambda: len(site.pool.jobs(completed)) >= count, timeout_s=120, what=f"{count} jobs to wait")

    waiting(4)
    assert _most_at_once(site.pool.events(job)) == 3
    site.pool.ap.run(["condor_qedit", str(job.cluster), "JobMaterializeLimit", "2"], user="alice")
    waiting(9)
    assert _most_at_once(site.pool.events(job)) == 3
    site.destination.resume()
    for proc in range(9):
        assert site.wait_left(f"{job.cluster}.{proc}", timeout_s=120)["StageOutState"] == "Delivered"
        assert site.file(f"{job.cluster}.{proc}", "out1").exists()


def test_a_held_factory_has_its_own_limit_and_can_be_removed(site: Any, deep: None) -> None:
    site.destination.pause()
    job = site.submit(extra="max_materialize = 2", queue="queue 40", outputs=("out1",), env="SLEEP=2")
    site.pool.wait(lambda: "NextProcId" in str(_limit(site, job)), timeout_s=90, what="the limit to be raised")
    site.pool.ap.run(["condor_hold", str(job.cluster)], user="alice")
    site.pool.wait(lambda: str(_limit(site, job)) == "2", timeout_s=60, what="the limit to be the owner's")
    all_jobs = f"ClusterId == {job.cluster}"
    jobs = site.pool.jobs(all_jobs, ["ProcId", "JobStatus"])
    ended = next(ad["ProcId"] for ad in jobs if ad["JobStatus"] == 4)  # it raised the limit; the others are held
    site.destination.resume()
    site.wait_left(f"{job.cluster}.{ended}", timeout_s=90)
    site.pool.ap.run(["condor_rm", str(job.cluster)], user="alice")
    site.pool.wait(lambda: not site.pool.jobs(all_jobs), timeout_s=60, what="the factory to be gone")
    events = site.pool.events(job)
    assert _most_at_once(events) == 2
    assert sum(event["Type"] == 0 for event in events) == len(jobs)


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


@pytest.mark.parametrize(
    "extra",
    [
        "on_exit_remove = false\ncron_minute = *\ncron_prep_time = 50",
        "on_exit_remove = NumJobCompletions >= 2",
        "MY.StageOutAsync = true\non_exit_remove = false",
    ],
    ids=["cron", "expression", "opted-in"],
)
def test_each_run_of_a_recurring_job_is_delivered(site: Any, extra: str) -> None:
    """HTCondor puts such a job back to Idle after a good run, so no run of it may wait to be the last one."""
    job = site.submit(outputs=("out1",), extra=extra)
    wanted = 1 if "cron" in extra else 2
    site.pool.wait(lambda: len(site.puts(job)) >= wanted, timeout_s=100, what=f"{wanted} runs of {job} to be delivered")


def test_output_of_a_job_that_is_held_after_its_hand_off_is_freed_at_once(site: Any) -> None:
    site.close_gate("held", "after")
    job = site.submit(place="gate-held")
    site.pool.wait(lambda: site.at_gate("held", "after"), timeout_s=90, what="the hand-off")
    assert not site.spool_is_empty()
    site.pool.hold(job, user="alice")
    site.open_gate("held", "after")
    site.pool.wait(site.spool_is_empty, timeout_s=30, what="the held job's bytes to be freed")
    assert site.pool.status(job) == "Held"
    site.pool.release(job, user="alice")
    site.wait_left(job, timeout_s=90)
    site.check_delivered(job, "gate-held")


def test_remap_with_a_url(site: Any) -> None:
    """A job without output_destination whose remap names a URL takes part too."""
    target = site.url() + "/remapped"
    job = site.submit(outputs=("out1",), destination="", extra=f'transfer_output_remaps = "out1 = {target}"')
    history = site.wait_left(job)
    assert history["StageOutState"] == "Delivered"
    assert site.destination.file(f"{site.prefix}/remapped").stat().st_size > 20000
