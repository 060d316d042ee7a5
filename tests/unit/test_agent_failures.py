"""Output that fails after its job has left the queue: recorded before it may be forgotten, once, for its owner."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stageout.core import durable, failures
from stageout.core.failures import FILE_NAME, MOST, Failure, FailureLog, read_failures
from stageout.core.states import State
from stageout.model.job import HistoryRecord, MailRecipient, Status
from stageout.wire.custody import Action
from tests.unit.test_agent_daemon import JOB, USER, Site

FAILURE = Failure(JOB, "alice", 1, "Failed", "why", 1_700_000_105, USER)


class Left(Site):
    """A site whose job leaves the queue as completed before its output is delivered."""

    def start(self, name: str = "ap") -> Any:
        agent = super().start(name)
        agent.failures = FailureLog(self.path / FILE_NAME)
        return agent

    def leave(self, **more: Any) -> None:
        """The job leaves."""
        self.queue.found.pop(JOB)
        self.queue.left[JOB] = HistoryRecord(
            Status.COMPLETED, 1, owner="alice", mail=MailRecipient(1, "alice", "example.org"), **more
        )

    @property
    def recorded(self) -> list[tuple[str, str, str]]:
        return [(one.job, one.state, one.reason) for one in read_failures(self.path / FILE_NAME)]

    @property
    def forgets(self) -> bool:
        return Action.FORGET in {order.action for order in self.orders}


@pytest.fixture
def site(tmp_path: Path) -> Left:
    made = Left(tmp_path)
    made.complete()
    made.report(State.MOVING)
    made.passes()
    return made


@pytest.mark.parametrize("end", [State.FAILED, State.LOST])
def test_it_is_recorded_once(site: Left, end: State) -> None:
    site.leave()
    site.report(end)
    site.passes(3)
    site.start()
    site.passes(3)
    assert site.recorded == [(JOB, end.value, "why")]
    assert site.forgets == (end is State.LOST)


@pytest.mark.parametrize("past", [{"failed": True}, {"given_up": True}])
def test_what_the_job_in_the_history_says_itself_is_not_recorded(site: Left, past: dict[str, bool]) -> None:
    site.leave(**past)
    site.report(State.FAILED)
    site.passes(3)
    assert site.recorded == []


def test_output_of_a_removed_job_is_not_recorded(site: Left) -> None:
    site.leave()
    site.queue.left[JOB] = replace(site.queue.left[JOB], status=Status.REMOVED)
    site.report(State.LOST)
    site.passes(3)
    assert site.recorded == []
    assert site.forgets


def test_loss_is_not_forgotten_before_it_is_known_how_the_job_left(site: Left) -> None:
    site.leave()
    past = site.queue.left.pop(JOB)
    site.report(State.LOST)
    site.passes(3)
    assert not site.forgets
    site.queue.left[JOB] = past
    site.passes(15)
    assert (site.recorded, site.forgets) == ([(JOB, "Lost", "why")], True)


def test_loss_that_cannot_be_recorded_is_not_forgotten(site: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    site.leave()
    site.report(State.LOST)
    monkeypatch.setitem(durable._faults, "failure-record", [durable.Fault("ENOSPC", None)])
    site.passes(3)
    assert (site.recorded, site.forgets) == ([], False)
    monkeypatch.setitem(durable._faults, "failure-record", [])
    site.passes()
    assert (site.recorded, site.forgets) == ([(JOB, "Lost", "why")], True)


class _Death(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("when", ["kill-before", "kill-after"])
def test_a_death_at_the_record_loses_nothing(site: Left, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    def die() -> None:
        raise _Death

    site.leave()
    site.report(State.LOST)
    monkeypatch.setattr(durable, "die", die)
    monkeypatch.setitem(durable._faults, "failure-record", [durable.Fault(when, None)])
    with pytest.raises(_Death):
        site.passes()
    assert not site.forgets
    monkeypatch.setitem(durable._faults, "failure-record", [])
    site.start()
    site.passes()
    assert (site.recorded, site.forgets) == ([(JOB, "Lost", "why")], True)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    log = FailureLog(tmp_path / "log")
    many = [replace(FAILURE, run=number, reason="x" * 9000) for number in range(MOST + 5)]
    assert len(log.add(many)) == MOST + 5
    kept = read_failures(tmp_path / "log")
    assert [one.run for one in kept] == list(range(5, MOST + 5))
    assert (tmp_path / "log").stat().st_size < 2_000_000
    assert FailureLog(tmp_path / "log").add(many[-3:]) == []
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o644


def test_output_that_is_still_reported_is_new_only_once(tmp_path: Path) -> None:
    log = FailureLog(tmp_path / "log")
    many = [replace(FAILURE, job=f"ap#{number}.0#1") for number in range(MOST + 5)]
    assert len(log.add(many)) == MOST + 5
    log.keep_only({(one.job, USER) for one in many})
    late = replace(FAILURE, job="ap#9000.0#1")
    assert log.add([*many, late]) == [late]
    assert log.get(many[0].job, USER, 1) == many[0]
    assert len(read_failures(tmp_path / "log")) == MOST


def test_output_that_is_no_longer_reported_leaves_memory_but_not_the_file(tmp_path: Path) -> None:
    log = FailureLog(tmp_path / "log")
    many = [replace(FAILURE, job=f"ap#{number}.0#1") for number in range(MOST + 5)]
    log.add(many)
    log.keep_only(set())
    assert [log.get(one.job, USER, 1) is None for one in many] == [True] * 5 + [False] * MOST


def test_more_failures_than_the_file_holds_are_mailed_once(site: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "MOST", 1)
    site.leave()
    site.report(State.FAILED)
    site.passes()
    assert site.agent.failures and site.agent.failures.add([replace(FAILURE, job="ap#8.0#1")])
    posted: list[str] = []
    monkeypatch.setattr(site.agent, "_post", lambda *news: posted.append(news[1]))
    site.passes(3)
    assert posted == []


def test_a_file_that_is_none_is_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(json.dumps([{"job": 1}]))
    log = FailureLog(tmp_path / "log")
    log.add([FAILURE])
    assert read_failures(tmp_path / "log") == [FAILURE]
