"""The answers that ``stageout retry`` and its like wait for, and their messages when nothing comes."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from stageout.cli.jobs import Job, JobId
from stageout.cli.request import await_answers, why_not
from stageout.core.classads import ClassAd
from stageout.wire.owner_requests import parse_request
from tests.unit.test_cli_jobs import job

ID = JobId(12, 0)
WALL_S = 1_800_000_000


class Clock:
    """Time that passes only while somebody sleeps."""

    now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return WALL_S + self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Schedd:
    """Shows the job as it is at each time."""

    def __init__(self, clock: Clock, *changes: tuple[float, dict[str, Any] | None]) -> None:
        self.clock = clock
        self.changes = changes

    def jobs(self, wanted: Sequence[JobId]) -> tuple[list[Job], list[ClassAd]]:
        assert list(wanted) == [ID]
        ad = [facts for since_s, facts in self.changes if since_s <= self.clock.now_s][-1]
        return ([] if ad is None else [job(**ad)]), []

    def name(self) -> str:
        return "ap"


class Collector:
    """Knows one agent, or none."""

    def __init__(self, silent_s: float | None, managers: Collection[str] = ("ep1", "ep2")) -> None:
        self.silent_s, self.managers = silent_s, managers

    def heard(self, managers: Collection[str]) -> set[str]:
        return set(managers) & set(self.managers)

    def agent_heard_at(self, schedd: str) -> int:
        assert schedd == "ap"
        return 0 if self.silent_s is None else int(WALL_S - self.silent_s)


ASKED = {"StageOutRequest": "retry run=1", "StageOutState": "Failed"}


def outcome(
    *changes: tuple[float, dict[str, Any] | None],
    silent_s: float | None = 5,
    verb: str = "retry",
    managers: Collection[str] = ("ep1", "ep2"),
) -> Any:
    clock = Clock()
    schedd: Any = Schedd(clock, *changes)
    collector: Any = Collector(silent_s, managers)
    asked = {ID: parse_request(f"{verb} run=1")}
    return await_answers(schedd, collector, asked, clock, clock.sleep), clock.now_s


def test_accepted_when_the_agent_has_taken_it(capsys: pytest.CaptureFixture[str]) -> None:
    status, took_s = outcome((0, ASKED), (5, {"StageOutState": "Failed"}), (9, {"StageOutState": "Confirmed"}))
    assert (status, took_s) == (0, 9), "a state of before the retry would end a wait at once"
    assert capsys.readouterr().out == "12.0: retry accepted; state of its output: waiting for a data slot\n"


def test_programs_hear_each_answer(capsys: pytest.CaptureFixture[str]) -> None:
    for changes, status, outcome, words in (
        ([(0, ASKED), (9, {"StageOutState": "Confirmed"})], 0, "accepted", "its output: waiting for a data slot"),
        ([(0, ASKED)], 2, "waiting", "was not carried out within 45 s"),
    ):
        clock = Clock()
        schedd: Any = Schedd(clock, *changes)
        collector: Any = Collector(5, ("ep1", "ep2"))
        asked = {ID: parse_request("retry run=1")}
        assert await_answers(schedd, collector, asked, clock, clock.sleep, is_json=True) == status
        (told,) = map(json.loads, capsys.readouterr().out.splitlines())
        assert words in told.pop("reason")
        assert told == {"schema": 1, "job": "12.0", "request": "retry", "outcome": outcome}


def test_what_fails_again_at_once_is_not_waited_for_for_ever(capsys: pytest.CaptureFixture[str]) -> None:
    status, took_s = outcome((0, ASKED), (5, {"StageOutState": "Failed", "StageOutReason": "403\n"}))
    assert status == 0 and 40 < took_s < 60
    assert capsys.readouterr().out == "12.0: retry accepted; state of its output: failed: 403\n"


WAITS = {"StageOutState": "RetryWait", "StageOutReason": "507: full; attempt 2 of 20, next at 2026-11-22T09:49:34Z"}


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        ("retry", "its output is tried again"),
        ("resume", "its output is tried again"),
        ("pause", "nothing more of its output is sent until 'stageout resume 12.0'"),
    ],
)
def test_figures_of_before_the_request_are_not_repeated(
    capsys: pytest.CaptureFixture[str], verb: str, said: str
) -> None:
    assert outcome((0, {**WAITS, "StageOutRequest": f"{verb} run=1"}), (3, WAITS), verb=verb) == (0, 3)
    assert capsys.readouterr().out == f"12.0: {verb} accepted; {said}\n"


ASKED_ELSEWHERE = {"StageOutRequest": "redirect run=1 r2 https://new/d/", "StageOutState": "Failed"}


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        ({"StageOutRefused": "r2 a: being sent now"}, 1, "refused; a: being sent now"),
        (
            {"StageOutRefused": "r1 another", "StageOutState": "Confirmed"},
            0,
            "accepted; files that waited or failed are sent to the new URL",
        ),
    ],
)
def test_a_redirect_has_its_own_answer(
    capsys: pytest.CaptureFixture[str], answer: dict[str, str], status: int, said: str
) -> None:
    clock = Clock()
    schedd: Any = Schedd(clock, (0, ASKED_ELSEWHERE), (3, {"StageOutState": "Failed", **answer}))
    collector: Any = Collector(5)
    asked = {ID: parse_request(ASKED_ELSEWHERE["StageOutRequest"])}
    assert await_answers(schedd, collector, asked, clock, clock.sleep) == status
    assert capsys.readouterr().out == f"12.0: redirect {said}\n"


def test_a_cancelled_job_may_leave(capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"StageOutRequest": "cancel run=1", "StageOutState": "Moving"}
    assert outcome((0, asked), (3, None), verb="cancel") == (0, 3)
    assert "12.0: cancel accepted; the job has left the queue" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("silent_s", "words", "longest_s"),
    [
        (None, "the collector knows none", 10),
        (4000, "was last heard of 1h06m ago", 10),
        (5, "does its node report", 60),
        (52, "was last heard of 1m37s ago", 60),
    ],
)
def test_no_answer(silent_s: float | None, words: str, longest_s: float, capsys: pytest.CaptureFixture[str]) -> None:
    status, took_s = outcome((0, ASKED), silent_s=silent_s)
    assert status == 2 and took_s <= longest_s
    text = capsys.readouterr().err
    assert words in text and "stays in the job's ad (12.0)" in text


AT_TWO = {**ASKED, "StageOutState": "Moving", "StageOutManager": "ep1,ep2"}


@pytest.mark.parametrize(
    ("verb", "managers", "most_s", "words"),
    [
        ("cancel", (), 10, "nothing was heard of ep1, ep2 for 15m00s or more"),
        ("cancel", (), 10, "the job leaves without its output. Not to wait for that: condor_rm 12.0"),
        ("pause", (), 10, "the job runs again"),
        ("cancel", ("ep1",), 60, "nothing was heard of ep2 for"),
        ("cancel", ("ep1", "ep2"), 60, "waiting until the schedd agent"),
    ],
)
def test_a_node_that_is_gone_is_said_soon_and_not_waited_for(
    verb: str, managers: Collection[str], most_s: float, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, took_s = outcome((0, {**AT_TWO, "StageOutRequest": f"{verb} run=1"}), verb=verb, managers=managers)
    assert status == 2
    assert most_s / 2 < took_s + 5 and took_s <= most_s
    assert words in capsys.readouterr().err


def test_an_agent_that_may_be_down_is_not_said_to_run(capsys: pytest.CaptureFixture[str]) -> None:
    """An agent that has stopped since its last notice: the notice is no sign that it runs."""
    outcome((0, ASKED), silent_s=52)
    first, last = capsys.readouterr().err.splitlines()
    assert first.endswith("the schedd agent was last heard of 55s ago")
    assert "agent of ap runs" not in last
    assert "If it is not heard again within a minute or two, it is down: tell its administrator" in last


def test_another_request_that_takes_the_place_of_this_one_is_no_answer(capsys: pytest.CaptureFixture[str]) -> None:
    for asked, other in (
        (ASKED, "cancel run=1"),
        (ASKED, "retry run=2"),
        (ASKED, "retry"),
        (ASKED, "fly"),
        (ASKED_ELSEWHERE, "redirect run=1 r3 https://other/"),
        (ASKED_ELSEWHERE, "pause run=1"),
    ):
        clock = Clock()
        schedd: Any = Schedd(clock, (0, asked), (3, {**asked, "StageOutRequest": other}))
        collector: Any = Collector(5)
        own = parse_request(asked["StageOutRequest"])
        assert await_answers(schedd, collector, {ID: own}, clock, clock.sleep) == 1
        verb, said = asked["StageOutRequest"].partition(" ")[0], other.partition(" ")[0]
        text = f"12.0: {verb} refused; another request, {said}, has taken its place"
        assert capsys.readouterr().out.startswith(text), (verb, said)


AGAIN = "the job runs again since: this request was for run 1, the last run is 2"


@pytest.mark.parametrize(
    ("verb", "answer", "status", "said"),
    [
        ("retry", f"retry run=1 {AGAIN}", 1, f"refused; {AGAIN}"),
        ("cancel", f"cancel run=1 {AGAIN}", 1, f"refused; {AGAIN}"),
        ("retry", f"pause run=1 {AGAIN}", 0, "accepted;"),
        ("retry", f"retry run=11 {AGAIN}", 0, "accepted;"),
    ],
)
def test_a_request_for_an_earlier_run_is_refused_with_the_agents_words(
    capsys: pytest.CaptureFixture[str], verb: str, answer: str, status: int, said: str
) -> None:
    asked = {"StageOutRequest": f"{verb} run=1", "StageOutState": "Moving"}
    after = {"StageOutState": "Confirmed", "StageOutRefused": answer}
    assert outcome((0, asked), (3, after), verb=verb) == (status, 3)
    assert capsys.readouterr().out.startswith(f"12.0: {verb} {said}")


def test_a_slow_answer_is_announced(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome((0, {**AT_TWO, "StageOutRequest": "cancel run=1"}), (20, None), verb="cancel") == (0, 20)
    told = capsys.readouterr()
    assert told.err.count("cancel stands in the job's ad") == 1 and "left the queue" in told.out


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("its output is delivered", {"StageOutState": "Delivered", "StageOutRun": 1}),
        ("was transferred before", {"TransferOutputStats": None}),
        ("the job is Running; its output is handed off when it ends", {"JobStatus": 2}),
    ],
)
def test_why_nothing_can_be_asked(words: str, changes: dict[str, Any]) -> None:
    assert words in why_not(job(**changes))
    assert not job(**changes).in_stage_out
