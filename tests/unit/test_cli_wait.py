"""``stageout wait`` against a scripted schedd: restarts, jobs that leave, factories, time-outs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Union

import pytest

from stageout.cli.exits import Unavailable, UnknownJob
from stageout.cli.jobs import Job, JobId
from stageout.cli.main import main
from stageout.cli.wait import wait
from stageout.cli.watcher import Watcher
from stageout.core.classads import ClassAd
from tests.unit.test_cli_jobs import job

Look = Union[list[Job], Exception]
FACTORY = ClassAd({"ClusterId": 12, "JobMaterializeLimit": 4})
DONE = {"StageOutState": "Delivered", "StageOutRun": 1}


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.slept: list[float] = []

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        raise AssertionError("a duration is never measured with the wall clock")

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept.append(seconds)
        self.now_s += seconds


class Schedd:
    """Answers from a script; the last line is repeated."""

    def __init__(self, *looks: Look, past: Sequence[Job] = (), clusters: Sequence[list[ClassAd]] = ()) -> None:
        self.looks = list(looks)
        self.past = list(past)
        self.clusters = list(clusters)
        self.asked_history: list[list[JobId]] = []

    def jobs(self, wanted: Sequence[JobId]) -> tuple[list[Job], list[ClassAd]]:
        look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(look, Exception):
            raise look
        clusters = self.clusters.pop(0) if self.clusters else []
        return [one for one in look if any(id_.covers(one.id) for id_ in wanted)], clusters

    def history(self, wanted: Sequence[JobId]) -> list[Job]:
        self.asked_history.append(list(wanted))
        return [one for one in self.past if any(id_.covers(one.id) for id_ in wanted)]


def status(schedd: Schedd, *wanted: JobId, timeout_s: float | None = None, returned: int = 0) -> tuple[int, Clock]:
    clock = Clock()
    return wait(Watcher(schedd, wanted), timeout_s, returned, clock, clock.sleep), clock


def test_waits_until_delivered(capsys: pytest.CaptureFixture[str]) -> None:
    schedd = Schedd([job(JobStatus=2)], [job(StageOutState="Moving")], [job(**DONE)])
    assert status(schedd, JobId(12, 0))[0] == 0
    out, err = capsys.readouterr()
    assert out == "12.0 delivered: its output is at its destination\n"
    assert "12.0 waiting: the job is Running" in err


def test_programs_hear_of_ends_and_of_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    running = job(ProcId=1, JobStatus=2)
    schedd, clock = Schedd([job(**DONE), running]), Clock()
    assert wait(Watcher(schedd, [JobId(12)]), 30, 0, clock, clock.sleep, is_json=True) == 2
    delivered = {"job": "12.0", "outcome": "delivered", "reason": "its output is at its destination"}
    waiting = {"job": "12.1", "outcome": "waiting", "reason": "the job is Running"}
    assert json.loads(capsys.readouterr().out) == {"schema": 2, "outcome": "waiting", "jobs": [delivered, waiting]}


def test_programs_get_one_object_when_the_schedd_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    schedd = Schedd(Unavailable("no answer."))
    assert wait(Watcher(schedd, [JobId(12)]), 0, 0, clock, clock.sleep, is_json=True) == 2
    assert json.loads(capsys.readouterr().out) == {"schema": 2, "outcome": "waiting", "jobs": []}


def test_a_failure_is_one() -> None:
    assert status(Schedd([job(StageOutState="Failed")]), JobId(12))[0] == 1


def test_all_jobs_are_waited_for_even_when_one_has_failed() -> None:
    failed, moving = job(StageOutState="Failed"), job(ProcId=1, StageOutState="Moving")
    schedd = Schedd([failed, moving], [failed, moving], [failed, job(ProcId=1, **DONE)])
    code, clock = status(schedd, JobId(12))
    assert (code, len(clock.slept)) == (1, 2)


def test_times_out(capsys: pytest.CaptureFixture[str]) -> None:
    code, clock = status(Schedd([job(JobStatus=2)]), JobId(12), timeout_s=100)
    assert code == 2
    assert clock.now_s == pytest.approx(1100)
    assert "timed out after 100 s; still waiting for 12.0" in capsys.readouterr().err


def test_time_out_of_zero_looks_once() -> None:
    assert status(Schedd([job(**DONE)]), JobId(12), timeout_s=0)[0] == 0
    code, clock = status(Schedd([job()]), JobId(12), timeout_s=0)
    assert (code, clock.slept) == (2, [])


def test_a_known_failure_is_not_hidden_by_a_time_out() -> None:
    jobs = [job(StageOutState="Failed"), job(ProcId=1, JobStatus=2)]
    assert status(Schedd(jobs), JobId(12), timeout_s=5)[0] == 1


def test_looks_less_and_less_often() -> None:
    _, clock = status(Schedd([job(JobStatus=2)]), JobId(12), timeout_s=3600)
    assert clock.slept[0] <= 1 and max(clock.slept) <= 15
    assert len(clock.slept) < 300


def test_survives_a_restart_of_the_schedd(capsys: pytest.CaptureFixture[str]) -> None:
    down = Unavailable("the schedd does not answer.")
    schedd = Schedd(down, [job(JobStatus=2)], down, down, [job(**DONE)])
    assert status(schedd, JobId(12))[0] == 0
    assert capsys.readouterr().err.count("the schedd does not answer. Trying again.") == 2


def test_a_schedd_that_never_answers_times_out() -> None:
    assert status(Schedd(Unavailable("down")), JobId(12), timeout_s=30)[0] == 2


def test_unknown_jobs_are_said_at_once() -> None:
    with pytest.raises(UnknownJob, match="99: no such job"):
        status(Schedd([job(JobStatus=2)]), JobId(12), JobId(99))


def test_a_job_that_left_before_is_in_the_history() -> None:
    schedd = Schedd([], past=[job(**DONE)])
    assert status(schedd, JobId(12, 0))[0] == 0


def test_a_job_that_leaves_meanwhile_is_looked_up_once() -> None:
    schedd = Schedd([job(JobStatus=2)], [], past=[job(JobStatus=3, RemoveReason="via condor_rm")])
    assert status(schedd, JobId(12, 0))[0] == 1
    assert schedd.asked_history == [[JobId(12, 0)]]


def test_jobs_of_a_cluster_that_left_before_count_too() -> None:
    schedd = Schedd([job(ProcId=1, **DONE)], past=[job(JobStatus=3)])
    assert status(schedd, JobId(12))[0] == 1


def test_a_job_that_runs_again_is_waited_for() -> None:
    lost = job(StageOutState="Lost")
    schedd = Schedd(
        [lost],
        [job(JobStatus=1, TransferOutputStats=None)],
        [job(NumShadowStarts=2, StageOutRun=2, StageOutState="Delivered")],
    )
    assert status(schedd, JobId(12))[0] == 0


def test_gone_from_the_queue_but_never_in_the_history_is_not_taken_for_delivered() -> None:
    with pytest.raises(UnknownJob, match="is HISTORY set"):
        status(Schedd([job(JobStatus=2)], []), JobId(12, 0))


def test_the_history_may_be_late() -> None:
    schedd = Schedd([job(JobStatus=2)], [])
    watcher = Watcher(schedd, [JobId(12, 0)])
    watcher.look()
    watcher.look()
    schedd.past = [job(**DONE)]
    clock = Clock()
    assert wait(watcher, None, 0, clock, clock.sleep) == 0


def test_a_factory_is_waited_for_until_it_makes_no_more_jobs() -> None:
    one, two = job(**DONE), job(ProcId=1, **DONE)
    schedd = Schedd([one], [one], [two], past=[one], clusters=[[FACTORY], [FACTORY], []])
    code, clock = status(schedd, JobId(12))
    assert (code, len(clock.slept)) == (0, 2)


def test_jobs_of_a_factory_that_come_and_go_between_two_looks_count() -> None:
    failed = job(ProcId=1, JobStatus=3)
    schedd = Schedd([job(**DONE)], [], past=[job(**DONE), failed], clusters=[[FACTORY], []])
    assert status(schedd, JobId(12))[0] == 1
    schedd = Schedd([], [], past=[job(ProcId=7, **DONE)], clusters=[[FACTORY], []])
    schedd.past, past = [], schedd.past
    watcher = Watcher(schedd, [JobId(12, 7)])
    assert watcher.look() == ({}, True)
    schedd.past = past
    verdicts, more = watcher.look()
    assert (list(verdicts), more) == ([JobId(12, 7)], False)


def test_a_job_that_its_factory_has_not_made_yet_is_not_unknown() -> None:
    schedd = Schedd([], [job(ProcId=7, **DONE)], clusters=[[FACTORY], []])
    assert status(schedd, JobId(12, 7))[0] == 0


def test_the_jobs_own_status_is_kept_but_its_output_is_waited_for() -> None:
    schedd = Schedd([job(StageOutState="Moving")], [job(**DONE)])
    code, clock = status(schedd, JobId(12), returned=5)
    assert (code, len(clock.slept)) == (5, 1)
    assert status(Schedd([job()]), JobId(12), timeout_s=1, returned=5)[0] == 2


@pytest.mark.parametrize("returned", ["-1001", "-1004"])
def test_a_node_that_was_never_submitted_fails_without_a_look(returned: str, capsys: Any) -> None:
    assert main(["wait", "--return", returned, "-1.-1"]) == 1
    assert "never submitted" in capsys.readouterr().err
