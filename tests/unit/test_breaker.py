"""Circuit breakers: one probe at a time, never silent for ever, remembered over a restart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_manager.delivery.batch import _CHANGED
from sandbox_manager.delivery.results import Vanished, decide_batch, update_breaker
from sandbox_manager.rules import RetryRules
from sandbox_manager.scheduling.breaker import (
    ASKED_LONGEST_S,
    MOVES,
    PROBE_LONGEST_S,
    Breaker,
    Breakers,
    Circuit,
    Flow,
    IllegalTurn,
)
from stageout.core.errors import ErrorClass
from stageout.core.states import FileState
from stageout.model.file import StoredFile
from stageout.movers.results import Answer, Delivered, Failure


class Ticks:
    now = 0.0
    wall = 1_700_000_000.0

    def monotonic_s(self) -> float:
        return self.now

    def wall_s(self) -> float:
        return self.wall + self.now


def doubling(failures: int) -> float:
    return min(1800.0, 20.0 * 2 ** min(failures, 30))


def made() -> tuple[Ticks, Breakers]:
    clock = Ticks()
    return clock, Breakers(clock, doubling)


def test_it_opens_probes_and_closes() -> None:
    clock, breakers = made()
    assert breakers.flow("s") is Flow.ALL
    assert breakers.unreachable("s", "refused")
    assert (breakers.flow("s"), breakers.opens_in_s("s"), breakers.soonest_s()) == (Flow.NONE, 20, 20)
    assert not breakers.unreachable("s", "a second batch that was under way")
    assert breakers.opens_in_s("s") == 20
    clock.now = 20
    assert breakers.flow("s") is Flow.ONE
    breakers.started("s")
    assert breakers.flow("s") is Flow.NONE
    assert [(one.circuit, one.probe_at) for one in breakers.troubles()] == [("half-open", 0)]
    assert breakers.unreachable("s", "refused")
    assert breakers.opens_in_s("s") == 40
    clock.now = 60
    breakers.started("s")
    assert breakers.reached("s")
    assert (breakers.flow("s"), breakers.reached("s"), breakers.troubles()) == (Flow.ALL, False, [])


def test_a_probe_that_says_nothing_is_sent_again() -> None:
    clock, breakers = made()
    breakers.unreachable("s", "refused")
    clock.now = 20
    breakers.started("s")
    breakers.stopped("s")
    assert breakers.flow("s") is Flow.ONE


def test_the_server_s_own_wait_is_kept_and_nobody_waits_for_ever() -> None:
    clock, breakers = made()
    breakers.unreachable("s", "503", retry_after_s=500)
    assert breakers.opens_in_s("s") == 500
    for _ in range(10):
        clock.now += 1000
        breakers.unreachable("s", "refused")
    assert breakers.opens_in_s("s") == PROBE_LONGEST_S


def test_no_answer_of_a_server_closes_it_for_longer_than_a_day() -> None:
    _, breakers = made()
    breakers.unreachable("s", "503", retry_after_s=2.0**40)
    assert breakers.opens_in_s("s") == ASKED_LONGEST_S


def test_a_restart_remembers_reason_and_time_of_the_next_probe() -> None:
    clock, before = made()
    before.unreachable("s", "connection refused")
    before.unreachable("t", "busy", retry_after_s=300)
    clock.now += 5
    after = Breakers(clock, doubling)
    after.restore(before.dump())
    assert [(one.server, one.reason, one.failures) for one in after.troubles()] == [
        ("s", "connection refused", 1),
        ("t", "busy", 1),
    ]
    assert after.opens_in_s("s") == pytest.approx(15, abs=1)
    assert after.opens_in_s("t") == pytest.approx(295, abs=1)
    after.restore("")


@given(st.floats(-1e9, 1e9))
def test_a_clock_that_was_set_meanwhile_makes_nobody_wait_longer(jump_s: float) -> None:
    clock, before = made()
    before.unreachable("s", "refused")
    dumped = before.dump()
    clock.wall += jump_s
    after = Breakers(clock, doubling)
    after.restore(dumped)
    assert 0 <= after.opens_in_s("s") <= 20


def test_the_table_is_the_law() -> None:
    for here in Circuit:
        for there in Circuit:
            breaker = Breaker(here)
            if there in MOVES[here]:
                breaker.turn(there)
                assert breaker.circuit is there
            else:
                with pytest.raises(IllegalTurn):
                    breaker.turn(there)


@given(st.lists(st.sampled_from(["plan", "lost", "answer", "silent", "late", "tick"]), max_size=60))
def test_one_probe_at_a_time_and_always_another(events: list[str]) -> None:
    clock, breakers = made()
    probing = False
    for event in events:
        flow = breakers.flow("s")
        assert not (probing and flow is not Flow.NONE)
        if event == "tick":
            clock.now += 10
        elif event == "plan" and flow is Flow.ONE:
            breakers.started("s")
            probing = True
        elif event == "late":
            breakers.unreachable("s", "an older batch")
            probing = False
        elif probing:
            probing = False
            if event == "lost":
                breakers.unreachable("s", "refused")
            elif event == "answer":
                breakers.reached("s")
            else:
                breakers.stopped("s")
        if not probing:
            assert breakers.opens_in_s("s") <= PROBE_LONGEST_S


_STARTED_NOT = Failure(ErrorClass.PLUGIN_BROKEN, "it could not be started")
_AWAY, _GONE = Failure(ErrorClass.CONNECT_FAILED, "refused"), Vanished(ErrorClass.LOCAL_FILE, "deleted")


@pytest.mark.parametrize(
    ("answers", "circuit"),
    [
        ([_AWAY, _GONE], Circuit.OPEN),
        ([_AWAY, _AWAY], Circuit.OPEN),
        ([_CHANGED, _AWAY], Circuit.OPEN),
        ([_CHANGED, _CHANGED], Circuit.HALF_OPEN),
        ([_STARTED_NOT, _STARTED_NOT], Circuit.HALF_OPEN),
        ([_STARTED_NOT, _AWAY], Circuit.OPEN),
        ([_AWAY, Delivered("size")], None),
        ([_AWAY, Failure(ErrorClass.NOT_FOUND, "404")], None),
    ],
)
def test_a_file_that_the_spool_lost_says_nothing_of_the_server(answers: list[Answer], circuit: Circuit | None) -> None:
    """It counted as an answer: a server that is away was sent all files of the next batch, too."""
    clock, breakers = made()
    breakers.unreachable("s", "refused")
    clock.now = 20
    breakers.started("s")
    files = [StoredFile(place, "u", "f", 1, 0, 1, "t", 1, 1, 1, FileState.MOVING, attempts=1) for place in range(2)]
    outcome = decide_batch(files, answers, RetryRules(5, 20, 1800, 1000), lambda sandbox: clock.wall, clock.wall_s())
    assert update_breaker(breakers, "s", outcome) is (circuit is None)
    assert [one.circuit for one in breakers.troubles()] == ([circuit.value] if circuit else [])
    assert all(one.reason == "refused" for one in breakers.troubles())


@pytest.mark.parametrize(("unknown_name", "opens"), [(True, False), (False, True)])
def test_a_name_that_nobody_has_closes_the_server_to_no_file(unknown_name: bool, opens: bool) -> None:
    """Else a probe a minute would have to fail three times for each file."""
    clock, breakers = made()
    files = [StoredFile(0, "u", "f", 1, 0, 1, "t", 1, 1, 1, FileState.MOVING, attempts=1)]
    answers = [Failure(ErrorClass.NAME_NOT_RESOLVED, "there is no such host")]
    rules = RetryRules(5, 20, 1800, 1000)
    outcome = decide_batch(files, answers, rules, lambda sandbox: clock.wall, clock.wall, unknown_name=unknown_name)
    update_breaker(breakers, "s", outcome)
    assert bool(breakers.troubles()) is opens


@pytest.mark.parametrize("kind", [ErrorClass.TIMED_OUT, ErrorClass.STALLED, ErrorClass.DEADLINE])
@pytest.mark.parametrize(
    ("others", "answered", "opens"),
    [([], False, True), ([_AWAY], False, True), ([Delivered("size")], False, False), ([], True, False)],
)
def test_a_server_that_says_nothing_to_anybody_is_away(
    kind: ErrorClass, others: list[Answer], answered: bool, opens: bool
) -> None:
    """But one file that never arrives, beside others that do, closes the server to nobody."""
    clock, breakers = made()
    answers = [Failure(kind, "no answer"), *others]
    files = [StoredFile(place, "u", "f", 1, 0, 1, "t", 1, 1, 1, FileState.MOVING, attempts=1) for place in range(2)]
    rules = RetryRules(5, 20, 1800, 1000)
    outcome = decide_batch(files, answers, rules, lambda sandbox: clock.wall, clock.wall_s(), answered=answered)
    assert not any(result.excused for result in outcome.waiting if result.error_code == kind.code)
    update_breaker(breakers, "s", outcome)
    assert [one.reason for one in breakers.troubles()] == (["no answer"] if opens else [])
