"""Rows of docs/user/what-is-shown.md: what HTCondor's tools and ours say at each moment of a job's output."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

pytestmark = pytest.mark.pool

_DONE, _LEFT, _MATCHED = 0, 1, 7
TERMINATED, HELD, RELEASED, ATTRIBUTE = 5, 12, 13, 33


def _numbers(site: Any, job: Any) -> list[int]:
    return [event["Type"] for event in site.pool.events(job)]


def _run(site: Any, job: Any, *argv: str) -> Any:
    return site.pool.ap.run(list(argv), user="alice", cwd=str(job.dir), check=False, timeout_s=60)


def _log_says_ended(site: Any, job: Any) -> bool:
    return int(_run(site, job, "condor_wait", "-wait", "1", "job.log").returncode) == _DONE


def _watched_as(site: Any, job: Any, status: str) -> bool:
    """Does condor_watch_q, which wants a terminal, count the job as this?"""
    watch = f"timeout 20 condor_watch_q -files job.log -exit any,{status},{_MATCHED}"
    return int(_run(site, job, "script", "-qec", watch, "/dev/null").returncode) == _MATCHED


def _columns(site: Any, job: Any) -> str:
    """DONE, RUN, IDLE and HOLD of condor_q."""
    command = f"condor_q {job} -totals | grep -m1 {shlex.quote('Total for query')}"
    return str(_run(site, job, "sh", "-c", command).stdout)


def _waited(site: Any, job: Any) -> int:
    return int(site.stageout("wait", "--timeout", "1", str(job), check=False).returncode)


def _history(site: Any, job: Any) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(site.stageout("history", "--json", str(job)).stdout)["jobs"][0]
    return shown


def _codes_in_log(site: Any, job: Any) -> list[int]:
    """Return the hold codes that a reader of the job's log has seen, in their order."""
    seen = [event.get("HoldReasonCode") if event["Type"] == HELD else
            event.get("Value") if event.get("Attribute") == "HoldReasonCode" else None
            for event in site.pool.events(job)]  # fmt: skip
    return [int(code) for code in seen if code is not None]


def test_from_the_hand_off_to_the_delivery(site: Any) -> None:
    site.destination.pause()
    job = site.submit()
    site.wait_state(job, "Moving", timeout_s=90)
    assert site.pool.status(job) == "Completed"
    assert "1 completed" in _columns(site, job)
    assert site.pool.history(job) is None
    assert _log_says_ended(site, job), "event 005 comes at the hand-off"
    assert _watched_as(site, job, "done")
    assert {TERMINATED, ATTRIBUTE} <= set(_numbers(site, job))
    assert "sending" in site.stageout("status", str(job)).stdout
    assert _waited(site, job) == 2
    site.destination.resume()
    assert site.wait_left(job)["JobStatus"] == 4
    assert _waited(site, job) == 0
    assert (_history(site, job)["state"], _history(site, job)["delivered"]) == ("Delivered", True)
    assert not {HELD, RELEASED} & set(_numbers(site, job))


def test_a_failure_and_a_retry_that_delivers(site: Any) -> None:
    site.destination.refuse("quota exceeded at dest")
    try:
        job = site.submit()
        site.pool.wait_status(job, "Held", timeout_s=90)
        site.pool.wait(lambda: HELD in _numbers(site, job), what="event 012")
        site.pool.wait(lambda: _codes_in_log(site, job)[-1:] == [12], what="the code of the ad in the log")
        assert _codes_in_log(site, job) == [1, 12]
        ad = site.pool.q(job, ["HoldReasonCode", "HoldReasonSubCode"])
        assert (ad["HoldReasonCode"], ad["HoldReasonSubCode"]) == (12, 20033)
        assert "1 held" in _columns(site, job)
        assert _watched_as(site, job, "held")
        assert _log_says_ended(site, job), "condor_wait has returned at the hand-off"
        assert "failed" in site.stageout("status", str(job)).stdout
        assert _waited(site, job) == 1
    finally:
        site.destination.accept()
    site.stageout("retry", str(job))
    assert site.wait_left(job)["JobStatus"] == 4
    assert [number for number in _numbers(site, job) if number in (HELD, RELEASED)] == [HELD, RELEASED]
    assert _watched_as(site, job, "idle"), "after event 013 nothing in the log ends the job once more"
    assert _waited(site, job) == 0
    assert _history(site, job)["delivered"]


def test_a_release_runs_the_job_again(site: Any) -> None:
    site.destination.refuse("no such collection", 404)
    try:
        job = site.submit()
        site.pool.wait(lambda: HELD in _numbers(site, job), timeout_s=90, what="event 012")
    finally:
        site.destination.accept()
    site.pool.release(job, user="alice")
    site.wait_left(job, timeout_s=120)
    told = [number for number in _numbers(site, job) if number in (TERMINATED, HELD, RELEASED)]
    assert told == [TERMINATED, HELD, RELEASED, TERMINATED]
    checked = _run(site, job, "condor_check_userlogs", "job.log")
    assert "BAD EVENT" in checked.stderr, "each run has an event 005 of its own, and the tool allows one for a job"
    assert checked.returncode == _LEFT
    assert _watched_as(site, job, "done")


def test_output_that_its_owner_gives_up(site: Any) -> None:
    site.destination.refuse("no such collection", 404)
    try:
        job = site.submit()
        site.pool.wait(lambda: HELD in _numbers(site, job), timeout_s=90, what="event 012")
        site.stageout("cancel", str(job))
        assert site.wait_left(job)["JobStatus"] == 4
    finally:
        site.destination.accept()
    assert _waited(site, job) == _LEFT
    assert _history(site, job)["state"] == "Cancelled"
    assert _numbers(site, job).count(RELEASED) == 1


def test_a_removal(site: Any) -> None:
    site.destination.pause()
    try:
        job = site.submit()
        site.wait_state(job, "Moving", timeout_s=90)
        site.pool.rm(job, user="alice")
        assert site.wait_left(job)["JobStatus"] == 3
    finally:
        site.destination.resume()
    assert _waited(site, job) == _LEFT
    assert _numbers(site, job)[-1] == 9
    assert _history(site, job)["job_status"] == "Removed"
