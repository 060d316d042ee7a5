"""``stageout.jobs``: programs get what the command prints, for jobs of a scripted schedd."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from stageout import jobs
from stageout.cli import condor, request
from stageout.cli import status as status_module
from stageout.cli.exits import CommandError
from stageout.cli.jobs import Job, JobId
from stageout.core.classads import ClassAd
from tests.unit.test_cli_jobs import job
from tests.unit.test_cli_status import RECORD, box, report

DONE = {"StageOutState": "Delivered", "StageOutRun": 1}
RETRIED = {"StageOutState": "Confirmed"}


class Queue:
    """A schedd whose answers are given beforehand; the last one is repeated."""

    queued: ClassVar[list[list[Job] | Exception]] = []
    past: ClassVar[list[Job]] = []
    asked: ClassVar[list[tuple[str, str]]] = []
    places: ClassVar[list[tuple[str | None, str | None]]] = []
    owners: ClassVar[list[str | None]] = []

    def __init__(self, schedd: str | None, pool: str | None) -> None:
        self.places.append((schedd, pool))

    def jobs(self, wanted: Sequence[JobId]) -> tuple[list[Job], list[ClassAd]]:
        found = self.queued.pop(0) if len(self.queued) > 1 else self.queued[0]
        if isinstance(found, Exception):
            raise found
        return [one for one in found if any(each.covers(one.id) for each in wanted)], []

    def jobs_in_stage_out(self, owner: str | None) -> list[Job]:
        self.owners.append(owner)
        return self.jobs([JobId(12)])[0]

    def history(self, wanted: Sequence[JobId]) -> list[Job]:
        return [one for one in self.past if any(each.covers(one.id) for each in wanted)]

    def recent_history(self, owner: str | None, limit: int) -> list[Job]:
        self.owners.append(owner)
        return self.past[:limit]

    def output_records(self, wanted: JobId) -> list[ClassAd]:
        return [RECORD]

    def set_request(self, wanted: JobId, value: str) -> None:
        if wanted.proc == 9:
            raise CommandError(f"{wanted}: the schedd refused the request")
        self.asked.append((str(wanted), value))

    def name(self) -> str:
        return "ap"


class Pool:
    """A collector that knows one manager. :ivar agent_at: time of the agent's last ad."""

    agent_at: ClassVar[int] = 0

    def __init__(self, pool: str | None) -> None:
        pass

    def reports(self, managers: Collection[str] | None) -> list[Any]:
        return [report(box())]

    def heard(self, managers: Collection[str]) -> set[str]:
        return set(managers)

    def left_output(self, schedd: str) -> dict[str, int]:
        return {}

    def agent_heard_at(self, schedd: str) -> int:
        return self.agent_at


@pytest.fixture(autouse=True)
def queue(monkeypatch: pytest.MonkeyPatch) -> type[Queue]:
    """Put the scripted schedd in the place of the real one, with job 12.0 in it."""
    for name, value in (("queued", [[job()]]), ("past", []), ("asked", []), ("places", []), ("owners", [])):
        monkeypatch.setattr(Queue, name, value)
    monkeypatch.setattr(condor, "Queue", Queue)
    monkeypatch.setattr(condor, "Pool", Pool)
    monkeypatch.setattr(Pool, "agent_at", int(time.time()))
    monkeypatch.setattr(status_module, "whose_jobs", lambda: "alice")
    monkeypatch.setattr("stageout.jobs.time.sleep", lambda seconds: None)
    return Queue


def test_status_has_the_figures_of_the_manager(queue: type[Queue]) -> None:
    found = jobs.status("12.0", schedd="ap", pool="cm")
    (item,) = found.jobs
    assert (item.job, item.state, item.files_left, item.reason) == ("12.0", "RetryWait", 1, "507 from dest")
    assert [file.name for file in item.files] == ["b.dat", "a.dat"]
    assert found.notes == ()
    assert queue.places == [("ap", "cm")]


def test_status_and_history_are_of_the_user_unless_all_are_asked_for(queue: type[Queue]) -> None:
    jobs.status()
    jobs.status(all_users=True)
    jobs.history(all_users=True)
    jobs.history()
    assert queue.owners == ["alice", None, None, "alice"]


def test_an_unknown_job_and_a_wrong_id_are_errors() -> None:
    with pytest.raises(jobs.UnknownJob, match=r"13\.0: no such job"):
        jobs.status(["13.0"])
    with pytest.raises(jobs.UsageError, match="'x' is not a job"):
        jobs.wait("x")


def test_wait_outlasts_a_schedd_that_does_not_answer(queue: type[Queue]) -> None:
    queue.queued = [[job(JobStatus=2)], jobs.Unavailable("the schedd does not answer."), [job(**DONE)]]
    assert jobs.wait("12") == [jobs.JobOutcome("12.0", "delivered", "its output is at its destination")]


def test_wait_tells_apart_what_failed_and_what_is_under_way(queue: type[Queue]) -> None:
    queue.queued = [[job(StageOutState="Failed", StageOutReason="403"), job(ProcId=1, JobStatus=2)]]
    failed, waiting = jobs.wait(["12"], timeout_s=0)
    assert failed == jobs.JobOutcome("12.0", "failed", "failed: 403")
    assert waiting == jobs.JobOutcome("12.1", "waiting", "the job is Running")


def test_retry_returns_the_agents_answer_and_what_was_refused(queue: type[Queue]) -> None:
    failed = [job(StageOutState="Failed"), job(ProcId=9, StageOutState="Failed")]
    queue.queued = [failed, failed, [job(**RETRIED)]]
    refused, taken = jobs.retry(["12.0", "12.9"])
    assert taken == jobs.JobOutcome("12.0", "accepted", "state of its output: waiting for a data slot")
    assert refused == jobs.JobOutcome("12.9", "failed", "12.9: the schedd refused the request")
    assert queue.asked == [("12.0", "retry run=1")]


def test_retry_says_when_nobody_answers(queue: type[Queue], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pool, "agent_at", 0)
    monkeypatch.setattr(request, "_SAID_AFTER_S", 0)
    monkeypatch.setattr(request, "_AGENT_TIMEOUT_S", 0)
    queue.queued = [[job(StageOutState="Failed")], [job(StageOutState="Failed", StageOutRequest="retry run=1")]]
    (waiting,) = jobs.retry("12.0")
    assert (waiting.job, waiting.outcome) == ("12.0", "waiting")
    assert "the collector knows none" in waiting.reason


def test_history_has_the_runs_of_jobs_that_are_named(queue: type[Queue]) -> None:
    queue.queued, queue.past = [[]], [job(**DONE)]
    (item,) = jobs.history("12.0")
    assert (item["state"], item["delivered"], len(item["runs"])) == ("Delivered", True, 1)
    assert [(one["job"], one["runs"]) for one in jobs.history()] == [("12.0", [])]


def test_the_program_of_the_page_retries_what_failed(queue: type[Queue], capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/user/commands.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, re.S | re.M)
    failed = [job(StageOutState="Failed", StageOutReason="403"), job(ProcId=1, **DONE)]
    retried = [job(**RETRIED), job(ProcId=1, **DONE)]
    queue.queued = [failed, failed, failed, retried, [job(**DONE)]]
    exec(program.replace("1234", "12"), {})
    assert queue.asked == [("12.0", "retry run=1")]
    assert capsys.readouterr().out == "12.0 RetryWait 507 from dest\n"
    assert len(queue.queued) == 1, "the program waits for the end"


def test_all_names_that_are_offered_exist() -> None:
    assert [name for name in jobs.__all__ if not hasattr(jobs, name)] == []
