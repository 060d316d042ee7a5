"""The schedule of retries, by the table of error classes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sandbox_manager.rules import RetryRules
from sandbox_manager.scheduling.retry import Verdict, decide_retry
from stageout.core.errors import ErrorClass
from stageout.core.states import FileState
from stageout.movers.results import Failure

RULES = RetryRules(attempts=3, initial_delay_s=20.0, max_delay_s=1800.0, delivery_timeout_s=3600.0)
NOW = 1_000_000


def _verdict(
    kind: ErrorClass, attempts: int = 0, waited_s: int = 0, rules: RetryRules = RULES, retry_after_s: float = 0
) -> Verdict:
    failure = Failure(kind, "it failed", retry_after_s)
    return decide_retry(rules, failure, attempts, 0, NOW - waited_s, NOW, spread=lambda: 1.0)


@pytest.mark.parametrize(
    "kind",
    [
        ErrorClass.QUOTA_EXCEEDED,
        ErrorClass.PERMISSION_DENIED,
        ErrorClass.TLS_UNTRUSTED,
        ErrorClass.NOT_FOUND,
        ErrorClass.CONFLICT,
    ],
)
def test_what_a_person_must_mend_is_not_tried_again(kind: ErrorClass) -> None:
    assert _verdict(kind).state is FileState.FAILED


def test_the_last_attempt_is_the_last() -> None:
    states = [_verdict(ErrorClass.SERVER_ERROR, attempts).state for attempts in range(4)]
    assert states == [FileState.WAITING, FileState.WAITING, FileState.FAILED, FileState.FAILED]


def test_waits_double_up_to_the_longest() -> None:
    rules = replace(RULES, attempts=0, delivery_timeout_s=1e9)
    waits = [_verdict(ErrorClass.SERVER_ERROR, attempts, rules=rules).next_attempt - NOW for attempts in range(9)]
    assert waits == [20, 40, 80, 160, 320, 640, 1280, 1800, 1800]


def test_a_server_that_asks_for_time_gets_it() -> None:
    assert _verdict(ErrorClass.SERVER_ERROR, retry_after_s=900).next_attempt == NOW + 900


def test_it_ends_when_the_time_is_over() -> None:
    assert _verdict(ErrorClass.SERVER_ERROR, waited_s=3590).next_attempt == NOW + 10, "a last chance"
    assert _verdict(ErrorClass.SERVER_ERROR, waited_s=3600).state is FileState.FAILED


@pytest.mark.parametrize(
    "failure", [Failure(ErrorClass.PLUGIN_BROKEN, "x"), Failure(ErrorClass.UNKNOWN, "x", of_node=True)]
)
def test_faults_of_the_node_use_up_no_attempts(failure: Failure) -> None:
    verdict = decide_retry(RULES, failure, 9, 0, NOW, NOW, spread=lambda: 1.0)
    assert (verdict.state, verdict.excused) == (FileState.FAILED, True), "nine counted before"
    verdict = decide_retry(RULES, failure, 9, 9, NOW, NOW, spread=lambda: 1.0)
    assert (verdict.state, verdict.excused) == (FileState.WAITING, True) and verdict.next_attempt > NOW
    assert decide_retry(RULES, failure, 9, 9, NOW - 3600, NOW).state is FileState.FAILED, "but the time ends them"


def test_an_attempt_that_is_repeated_at_once_counts() -> None:
    verdict = decide_retry(RULES, Failure(ErrorClass.UNKNOWN, "x", at_once=True, of_node=True), 2, 0, NOW, NOW)
    assert (verdict.state, verdict.excused) == (FileState.FAILED, False)


@pytest.mark.parametrize(
    ("kind", "unknown_name", "attempts", "excused", "fails"),
    [
        (ErrorClass.NAME_NOT_RESOLVED, True, 2, 0, True), (ErrorClass.NAME_NOT_RESOLVED, True, 1, 0, False),
        (ErrorClass.NAME_NOT_RESOLVED, True, 9, 8, False), (ErrorClass.NAME_NOT_RESOLVED, False, 99, 99, False),
        (ErrorClass.NAME_LOOKUP_FAILED, True, 99, 99, False), (ErrorClass.CONNECT_FAILED, True, 99, 99, False),
    ],
)  # fmt: skip
def test_a_name_that_nobody_has_fails_after_three_attempts(
    kind: ErrorClass, unknown_name: bool, attempts: int, excused: int, fails: bool
) -> None:
    rules = replace(RULES, attempts=20)
    verdict = decide_retry(rules, Failure(kind, "x"), attempts, excused, NOW, NOW, unknown_name=unknown_name)
    assert (verdict.state is FileState.FAILED) is fails
    assert ("other names resolve on this node; gave up after 3 attempts" in verdict.message) is fails
    assert verdict.excused is not (unknown_name and kind is ErrorClass.NAME_NOT_RESOLVED)
