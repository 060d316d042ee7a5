"""``stageout status``: output on nodes whose job has left the queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from stageout.cli import render, status
from stageout.cli.exits import Unavailable
from stageout.cli.jobs import Job, JobId
from stageout.cli.rows import Row
from stageout.wire.custody import Report, SandboxReport
from tests.unit.test_cli_jobs import job
from tests.unit.test_cli_status import NOW, box, report

_DELIVERED = {"StageOutState": "Delivered", "StageOutRun": 1}


def named(number: int, **changes: Any) -> SandboxReport:
    return box(job=f"ap#{number}.0#1795251831", **changes)


def ended(number: int, **changes: Any) -> Job:
    facts = {"ClusterId": number, "ProcId": 0, "GlobalJobId": f"ap#{number}.0#1795251831", "User": "alice@x"}
    return replace(job(**{**facts, "JobStatus": 4, "CompletionDate": int(NOW) - 3600, **changes}), in_queue=False)


@dataclass
class Queue:
    """A schedd. :ivar asked: jobs that the history was asked for."""

    here: list[Job] = field(default_factory=list)
    past: list[Job] = field(default_factory=list)
    in_stage_out: list[Job] = field(default_factory=list)
    asked: list[JobId] = field(default_factory=list)

    def name(self) -> str:
        return "ap"

    def jobs_in_stage_out(self, owner: str | None) -> list[Job]:
        return self.in_stage_out

    def jobs(self, wanted: Sequence[JobId]) -> tuple[list[Job], list[Any]]:
        return [one for one in self.here if one.id in wanted], []

    def history(self, wanted: Sequence[JobId]) -> list[Job]:
        self.asked += wanted
        return [one for one in self.past if one.id in wanted]


@dataclass
class Pool:
    """A collector with reports. :ivar left: what the agent says of output of jobs that have left."""

    found: list[Report]
    left: dict[str, int] | None = field(default_factory=lambda: {"Failed": 1})
    is_silent: bool = False

    def left_output(self, schedd: str) -> dict[str, int] | None:
        return self.left

    def reports(self, managers: Any = None) -> list[Report]:
        if self.is_silent:
            raise Unavailable("the collector does not answer")
        return [replace(one, sent_at=int(NOW) - 3) for one in self.found]


def seen(
    monkeypatch: pytest.MonkeyPatch, queue: Queue, pool: Pool, owner: str | None = None, wanted: Sequence[JobId] = ()
) -> status.Snapshot:
    monkeypatch.setattr("time.time", lambda: NOW)
    return status.look(queue, pool, list(wanted), owner, {})  # type: ignore[arg-type]


def ids(rows: Sequence[Row]) -> list[str]:
    return [row.job for row in rows]


def test_output_of_jobs_that_have_left_is_listed_with_owner_reason_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(past=[ended(21), ended(22, JobStatus=3, CompletionDate=0)])
    boxes = (named(22), named(21, state="Failed", reason="403: no", next_attempt_at=0), named(23, owner="bob@x"))
    rows = seen(monkeypatch, queue, Pool([report(*boxes)])).rows
    assert [(row.job, row.owner, row.state, row.job_status, row.ended_at, row.has_left) for row in rows] == [
        ("21.0", "alice", "Failed", "Completed", int(NOW) - 3600, True),
        ("22.0", "alice", "RetryWait", "Removed", 0, True),
        ("23.0", "bob", "RetryWait", "Unknown", 0, True),
    ]
    table = "\n".join(render.jobs_table(rows, NOW))
    assert "failed" in table and "its job has left the queue (completed 1h00m ago); 403: no" in table, table
    assert "its job has left the queue (removed); 507 from dest" in table
    assert "removed  " not in table, "the state is that of the output"


def test_an_owner_sees_the_own_output_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool([report(named(21), named(23, owner="bob@x"))])
    assert ids(seen(monkeypatch, Queue(past=[ended(21)]), pool, "alice").rows) == ["21.0"]
    assert ids(seen(monkeypatch, Queue(), pool, "bob").rows) == ["23.0"]


def test_other_output_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed output, that of jobs in the queue, of other schedds, and of managers that the record did not name."""
    boxes = (
        named(21, state="Delivered"), named(22), named(25),
        box(job="other#23.0#1"), box(job="ap#24.0#2", owner="bob@x"),
    )  # fmt: skip
    queue = Queue(here=[replace(ended(22), in_queue=True)], past=[ended(25, StageOutKeys="abc")])
    found = seen(monkeypatch, queue, Pool([report(*boxes)]))
    assert ids(found.rows) == ["24.0"], "another user's job has the number of one that is here, or none"
    assert queue.asked == [JobId(24, 0), JobId(25, 0)]


def test_a_job_in_the_queue_does_not_hide_output_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(here=[replace(ended(22), in_queue=True)])
    assert ids(seen(monkeypatch, queue, Pool([report(named(22, owner="bob@x"))])).rows) == ["22.0"]


def test_reports_are_read_only_when_the_agent_counts_such_output(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = [report(named(21))]
    assert ids(seen(monkeypatch, Queue(), Pool(reports, None)).rows) == ["21.0"], "an earlier agent does not say"
    assert seen(monkeypatch, Queue(), Pool(reports, {}, is_silent=True)) == status.Snapshot([], [], is_of_all=True)
    (note,) = seen(monkeypatch, Queue(), Pool(reports, None, is_silent=True)).notes
    assert note == "output of jobs that have left the queue is not shown: the collector does not answer"
    named_job = seen(monkeypatch, Queue(here=[ended(21, **_DELIVERED)]), Pool(reports), wanted=[JobId(21, 0)])
    assert [row.has_left for row in named_job.rows] == [False]
