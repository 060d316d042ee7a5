"""Output whose job has left the queue: its owner, the administrator and the doctor still see it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

pytestmark = pytest.mark.pool


def _rows(site: Any, job: Any, *options: str, user: str) -> list[dict[str, Any]]:
    """Return what status says of a job that has left; tests before this one may have left other output."""
    found = json.loads(site.stageout("status", "--json", *options, user=user).stdout)["jobs"]
    return [row for row in found if row["has_left"] and row["job"] == str(job)]


def test_output_of_a_job_that_has_left_the_queue_is_seen_until_it_is_delivered(site: Any) -> None:
    site.destination.stop()
    job = site.submit()
    site.wait_state(job, "RetryWait")
    assert _rows(site, job, user="alice") == []
    site.pool.qedit(job, user="alice", LeaveJobInQueue="false")
    ended_at = site.wait_left(job, timeout_s=180)["CompletionDate"]
    site.pool.wait(lambda: _rows(site, job, user="alice"), what="the output in alice's status")
    for rows in (_rows(site, job, user="alice"), _rows(site, job, "--all", user="bob")):
        ((shown, owner, status, end, left),) = (
            [(row["job"], row["owner"], row["job_status"], row["ended_at"], row["files_left"]) for row in rows]
        )  # fmt: skip
        assert (shown, owner, status, end, left) == (str(job), "alice", "Completed", ended_at, 2)
    assert _rows(site, job, user="bob") == []
    text = site.stageout("status").stdout
    assert "its job has left the queue (completed" in text, text
    doctor = site.stageout("doctor", "--role", "ap", user="root", check=False).stdout
    (line,) = (line for line in doctor.splitlines() if "left-output" in line)
    assert re.search(r"\d+ outputs? of jobs that have left the queue", doctor), line
    site.destination.start_again()
    site.pool.wait(site.spool_is_empty, timeout_s=60, what="the spool to be empty")
    site.check_delivered(job)
    site.pool.wait(lambda: _rows(site, job, "--all", user="bob") == [], what="the output to leave the status")
