"""Factories, spooled jobs, job sets, bad exits, recurring jobs."""

from __future__ import annotations

import hashlib
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
