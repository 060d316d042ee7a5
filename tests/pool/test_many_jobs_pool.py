"""Requests for many jobs at once, on a real queue with its agent."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.harness.pool import Submission
from tests.pool.conftest import Site

pytestmark = pytest.mark.pool


def _waits(site: Site, job: Submission) -> Callable[[], bool]:
    return lambda: site.state(job) in ("Confirmed", "RetryWait")


def test_all_output_that_failed_at_a_server_is_sent_again(site: Site) -> None:
    site.destination.refuse("quota exceeded")
    try:
        jobs = [site.submit() for _ in range(3)]
        for job in jobs:
            site.wait_state(job, "Failed")
    finally:
        site.destination.accept()
    host = site.url().split("/")[2]
    assert "0 jobs" in site.stageout("retry", "--destination", "elsewhere.example.org", "--dry-run").stdout
    shown = site.stageout("retry", "--destination", host, "--dry-run").stdout
    assert "would be asked for 3 jobs" in shown
    assert all(str(job) in shown for job in jobs)
    assert "0 jobs" in site.stageout("retry", "--destination", host, "--dry-run", user="bob").stdout
    assert "retry asked for 3 jobs" in site.stageout("retry", "--destination", host).stdout
    for job in jobs:
        site.wait_left(job)
        site.check_delivered(job)


def test_an_expression_chooses_jobs(site: Site) -> None:
    site.destination.refuse("later", 503)
    try:
        paused, other = site.submit(extra="priority = -5"), site.submit()
        for job in (paused, other):  # while a server is away one batch tries, and others wait
            site.pool.wait(_waits(site, job), what=f"{job} to wait")
        asked = site.stageout("pause", "-constraint", "JobPrio < 0", "--json").stdout
        assert (str(paused) in asked, str(other) in asked) == (True, False)
    finally:
        site.destination.accept()
    site.wait_left(other)
    assert site.state(paused) != "Delivered"
    assert site.stageout("resume", "-constraint", f"ClusterId == {str(paused).split('.')[0]}").returncode == 0
    site.wait_left(paused)
    site.check_delivered(paused)
    assert site.stageout("retry", "-constraint", "JobPrio ==", check=False).returncode == 64
