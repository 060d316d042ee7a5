"""The main job: the slot is free at once, output is delivered behind it, and the queue tells the truth."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytestmark = pytest.mark.pool


def test_output_is_delivered_and_the_job_leaves_as_completed(site: Any) -> None:
    job = site.submit(outputs=("out1", "d/out2", "d/e/out3"), extra="transfer_output_files = out1, d")
    history = site.wait_left(job)
    site.check_delivered(job)
    assert history["JobStatus"] == 4
    assert history["StageOutState"] == "Delivered"
    assert history["StageOutRun"] == history["NumShadowStarts"]
    assert history["TransferOutputStats"]["STAGEOUTFilesCountLastRun"] == 3
    assert len(site.puts(job)) == 3
    site.pool.wait(site.spool_is_empty, timeout_s=20, what="the spool to be empty")


def test_slot_is_free_while_the_output_waits(site: Any) -> None:
    site.destination.pause()
    job = site.submit()
    site.pool.wait_status(job, "Completed", timeout_s=60)
    busy = site.pool.startd_ads('State == "Claimed"', ["JobId"])
    assert str(job) not in {ad.get("JobId") for ad in busy if ad.get("Activity") == "Busy"}
    assert site.pool.q(job)["StageOutState"] != "Delivered"
    site.destination.resume()
    site.wait_left(job)
    site.check_delivered(job)


def test_the_queue_and_the_log_say_what_happens(site: Any) -> None:
    site.destination.stop()
    try:
        job = site.submit()
        site.wait_state(job, "RetryWait")
        ad = site.pool.wait(
            lambda: (found := site.pool.q(job)) and found.get("StageOutAttempts", 0) > 0 and found,
            what="attempts in the job's ad",
        )
        assert ad["JobStatus"] == 4
        assert ad["StageOutFilesLeft"] == 2
        assert ad["StageOutBytesLeft"] > 40000
        assert ad["StageOutNextAttempt"] > time.time() - 600
        assert "127.0.0.1" in ad["StageOutReason"]
    finally:
        site.destination.start()
    site.wait_left(job)
    updates = [event for event in site.pool.events(job) if event["Name"] == "ATTRIBUTE_UPDATE"]
    assert "StageOutState" in {event.get("Attribute") for event in updates}


def test_destination_that_is_down_holds_nobody(site: Any) -> None:
    """Half a minute is several attempts on this pool."""
    site.destination.stop()
    try:
        jobs = [site.submit(user) for user in ("alice", "bob", "alice")]
        for job in jobs:
            site.pool.wait_status(job, "Completed", timeout_s=90)
        started = time.monotonic()
        site.pool.wait(lambda: time.monotonic() - started > 30, timeout_s=60, what="half a minute", interval_s=1)
        assert [site.pool.status(job) for job in jobs] == ["Completed"] * 3
    finally:
        site.destination.start()
    for job in jobs:
        site.wait_left(job)
        site.check_delivered(job)
        assert not any(event["Name"] == "JOB_HELD" for event in site.pool.events(job))


def test_refusal_for_good_holds_with_the_servers_words_and_retry_delivers(site: Any) -> None:
    site.destination.refuse("quota exceeded at dest")
    try:
        job = site.submit()
        site.pool.wait_status(job, "Held", timeout_s=90)
        # For a moment condor_hold's own code stands there: the agent writes event 012 by it.
        site.pool.wait(lambda: site.pool.q(job)["HoldReasonCode"] == 12, what="the code of stage-out", timeout_s=30)
        ad = site.pool.q(job)
        assert ad["HoldReasonSubCode"] > 20000
        assert ad["HoldReason"].startswith("Stage-out failed")
        assert "quota exceeded at dest" in ad["HoldReason"]
        assert ad["StageOutState"] == "Failed"
        runs = ad["NumShadowStarts"]
    finally:
        site.destination.accept()
    answer = site.stageout("retry", str(job))
    assert str(job) in answer.stdout
    history = site.wait_left(job)
    assert history["JobStatus"] == 4
    assert history["NumShadowStarts"] == runs, "retry must not run the job again"
    assert history.get("HoldReason") is None
    site.check_delivered(job)


def test_release_of_a_failed_job_runs_it_again(site: Any) -> None:
    site.destination.refuse("no such collection", 404)
    try:
        job = site.submit()
        site.pool.wait_status(job, "Held", timeout_s=90)
        first = site.wrote(job)
    finally:
        site.destination.accept()
    site.pool.ap.run(["condor_release", str(job)], user="alice")
    history = site.wait_left(job, timeout_s=90)
    assert history["NumShadowStarts"] == 2
    assert site.wrote(job) != first
    site.check_delivered(job)
    assert len(site.puts(job)) == 2, "only the second run's files were sent"
    site.pool.wait(site.spool_is_empty, timeout_s=20, what="the first run's bytes to be freed")


def test_removal_cancels_the_stage_out(site: Any) -> None:
    """The files are larger than what lies in the connection's buffers, which the server reads when it goes on."""
    site.destination.pause()
    job = site.submit(env="SIZE=20000000")
    site.pool.wait_status(job, "Completed", timeout_s=60)
    site.wait_state(job, "Moving")
    site.pool.ap.run(["condor_rm", str(job)], user="alice")
    history = site.wait_left(job)
    assert history["JobStatus"] == 3
    site.pool.wait(site.spool_is_empty, timeout_s=30, what="the cancelled output to be freed")
    site.destination.resume()
    assert not site.puts(job)


def test_two_users_do_not_see_each_others_files(site: Any) -> None:
    site.destination.pause()
    jobs = {user: site.submit(user, env="SIZE=100000") for user in ("alice", "bob")}
    for job in jobs.values():
        site.pool.wait_status(job, "Completed", timeout_s=60)
    held = [(ep, path) for ep in site.pool.eps for path in (ep.home / "stageout").rglob("*") if path.is_file()]
    files = [(ep, path) for ep, path in held if "sandboxes" in path.parts]
    assert len(files) == 4
    owners = {path.stat().st_uid for _, path in files}
    assert len(owners) == 2
    for ep in site.pool.eps:
        for user in jobs:
            found = ep.run(["find", str(ep.home / "stageout"), "-type", "f", "-readable"], user=user, check=False)
            assert not found.stdout.strip(), f"{user} can find {found.stdout}"
    site.destination.resume()
    for job in jobs.values():
        site.wait_left(job)
        site.check_delivered(job)


def test_manager_off_in_the_middle_of_the_queue(site: Any) -> None:
    """Graceful stop of the manager: nothing is lost, the next one goes on."""
    site.destination.pause()
    job = site.submit()
    site.wait_state(job, "Moving")
    for ep in site.pool.eps:
        ep.run(["condor_off", "-subsystem", "SANDBOX_MANAGER"], check=False)
    site.destination.resume()
    for ep in site.pool.eps:
        ep.run(["condor_on", "-subsystem", "SANDBOX_MANAGER"], check=False)
    site.wait_left(job)
    site.check_delivered(job)


def test_odd_file_names_arrive_as_they_are(site: Any) -> None:
    names = ["a b", "hash#1", "what?x=1", "100%", "50%25", "ünïcode", "plus+and&"]
    lines = ["#!/bin/sh", "mkdir d", *(f"echo '{name}' > 'd/{name}'" for name in names)]
    text = f"""
executable = job.sh
transfer_output_files = d
output_destination = {site.url()}/$(Cluster).$(Process)
request_memory = 50
request_disk = 10M
queue
"""
    job = site.pool.submit("alice", text, files={"job.sh": "\n".join(lines) + "\n"})
    site.jobs.append(job)
    history = site.wait_left(job)
    assert history["TransferOutputStats"]["STAGEOUTFilesCountLastRun"] == len(names)
    assert {path.name: path.read_text().strip() for path in site.file(job, "d").iterdir()} == {n: n for n in names}
