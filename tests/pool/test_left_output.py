"""Output whose job has left the queue: its owner, the administrator and the doctor still see it."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = pytest.mark.pool


def _rows(site: Any, *options: str, user: str) -> list[dict[str, Any]]:
    found = json.loads(site.stageout("status", "--json", *options, user=user).stdout)["jobs"]
    return [row for row in found if row["has_left"]]


def test_output_of_a_job_that_has_left_the_queue_is_seen_until_it_is_delivered(site: Any) -> None:
    site.destination.stop()
    job = site.submit()
    site.wait_state(job, "RetryWait")
    assert _rows(site, user="alice") == []
    site.pool.qedit(job, user="alice", LeaveJobInQueue="false")
    ended_at = site.wait_left(job, timeout_s=180)["CompletionDate"]
    site.pool.wait(lambda: _rows(site, user="alice"), what="the output in alice's status")
    for rows in (_rows(site, user="alice"), _rows(site, "--all", user="bob")):
        ((shown, owner, status, end, left),) = (
            [(row["job"], row["owner"], row["job_status"], row["ended_at"], row["files_left"]) for row in rows]
        )  # fmt: skip
        assert (shown, owner, status, end, left) == (str(job), "alice", "Completed", ended_at, 2)
    assert _rows(site, user="bob") == []
    text = site.stageout("status").stdout
    assert "its job has left the queue (completed" in text, text
    doctor = site.stageout("doctor", "--role", "ap", user="root", check=False).stdout
    (line,) = (line for line in doctor.splitlines() if "left-output" in line)
    assert "1 output of jobs that have left the queue" in doctor, line
    print(text, line)
    site.destination.start_again()
    site.pool.wait(site.spool_is_empty, timeout_s=60, what="the spool to be empty")
    site.check_delivered(job)
    site.pool.wait(lambda: _rows(site, "--all", user="bob") == [], what="the output to leave the status")
