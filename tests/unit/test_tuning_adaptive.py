"""Adaptive clients: the printed algorithm with the printed tables, its faults, and the two that run."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from link_simulator import Controller, Link, all_at_once, as_printed, crowding, fairness, make_clients, run

from stageout.core.streams import Knobs
from stageout.tuning.adaptive import Adaptive, adapt
from stageout.tuning.crowding import Crowding, begin, control
from tests.as_printed import adapt_as_printed, client_as_printed

SLOW = Knobs(initial=1, maximum=8, parallelism=4, delay=4, increment=1, threshold=5.0)
FAST = Knobs(initial=4, maximum=8, parallelism=4, delay=2, increment=1, threshold=5.0)


def _batches(knobs: Knobs, rates: list[float], last_rate: float, grant: int = 32) -> list[int]:
    client = client_as_printed(range(61), lambda: grant, knobs, last_rate)
    sizes = [len(next(client))]
    for rate in rates:
        try:
            sizes.append(len(client.send(rate)))
        except StopIteration:
            break
    return sizes


def test_slow_increase_as_printed() -> None:
    """Initial 1, delay 4: one more transfer after every four that have finished, up to the grant of 32 = 8 x 4."""
    rising = [10.0 * number for number in range(1, 61)]
    assert _batches(SLOW, rising, 0.0)[:13] == [1, 1, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8]
    assert max(_batches(SLOW, rising, 0.0)) == 8


def test_fast_increase_as_printed() -> None:
    """Initial 4, delay 2: one more after every batch."""
    assert _batches(FAST, [10.0 * number for number in range(1, 61)], 0.0)[:6] == [4, 5, 6, 7, 8, 8]


def test_a_smaller_grant_bounds_the_printed_client() -> None:
    rising = [10.0 * number for number in range(1, 61)]
    assert set(_batches(FAST, rising, 0.0, grant=18)) >= {4}
    assert max(_batches(FAST, rising, 0.0, grant=18)) == 4


def test_all_files_are_transferred_once() -> None:
    client = client_as_printed(list(range(61)), lambda: 32, FAST, 0.0)
    seen = list(next(client))
    with pytest.raises(StopIteration):
        while True:
            seen += client.send(100.0)
    assert seen == list(range(61))


def test_the_printed_client_stops_for_ever_at_zero() -> None:
    client = client_as_printed(range(9), lambda: 32, SLOW, last_rate=1000.0)
    next(client)
    sizes = [len(client.send(rate)) for rate in (900.0, 800.0, 700.0, 10.0)]
    assert sizes == [1, 1, 1, 0]
    assert all(batch == [] for batch in islice(client, 1000))


def test_adapt_as_printed() -> None:
    assert adapt_as_printed(3, 8, rate=20, last_rate=10, knobs=SLOW) == 4
    assert adapt_as_printed(3, 8, rate=15, last_rate=10, knobs=SLOW) == 3
    assert adapt_as_printed(3, 8, rate=4, last_rate=10, knobs=SLOW) == 2
    assert adapt_as_printed(8, 8, rate=20, last_rate=10, knobs=SLOW) == 8
    assert adapt_as_printed(0, 8, rate=0, last_rate=10, knobs=SLOW) == 0


def test_the_running_version_takes_no_step_at_the_first_sample() -> None:
    state, step = adapt(Adaptive(2), 1000.0, 32, SLOW)
    assert step.concurrency == 2
    assert "First measurement" in step.reason
    assert adapt(state, 2000.0, 32, SLOW)[1].concurrency == 3
    assert adapt(state, 500.0, 32, SLOW)[1].concurrency == 1
    assert adapt(state, 1004.0, 32, SLOW)[1].concurrency == 2


def test_a_grant_below_one_transfer_runs_one_with_fewer_streams() -> None:
    step = adapt(Adaptive(4), 1.0, 3, SLOW)[1]
    assert (step.concurrency, step.parallelism) == (1, 3)
    step = control(Crowding(4), 1.0, 3, SLOW)[1]
    assert (step.concurrency, step.parallelism) == (1, 3)


def test_after_a_grant_of_zero_both_start_again() -> None:
    for step in (adapt(Adaptive(4), 1.0, 0, SLOW), control(Crowding(4), 1.0, 0, SLOW)):
        assert step[1].concurrency == 0
    assert adapt(Adaptive(0), 0.0, 32, SLOW)[1].concurrency == 1
    assert control(Crowding(0), 0.0, 32, SLOW)[1].concurrency == 1


@given(
    samples=st.lists(st.tuples(st.floats(0, 1e6, allow_subnormal=False), st.integers(0, 64)), min_size=1, max_size=60),
    knobs=st.builds(
        Knobs,
        initial=st.integers(1, 16),
        maximum=st.integers(1, 16),
        parallelism=st.integers(1, 8),
        delay=st.just(2),
        increment=st.integers(1, 4),
        threshold=st.floats(0, 100),
    ),
)
def test_both_stay_within_the_grant_and_never_stop_while_there_is_one(
    samples: list[tuple[float, int]], knobs: Knobs
) -> None:
    printed, own = Adaptive(knobs.initial), Crowding()
    for rate, streams in samples:
        printed, first = adapt(printed, rate, streams, knobs)
        own, second = control(own, rate, streams, knobs)
        for step in (first, second):
            assert step.concurrency * step.parallelism <= streams
            assert step.concurrency <= knobs.maximum
            assert (step.concurrency >= 1) == (streams > 0)
            assert step.reason.endswith(".")
            assert len(step.reason) < 250


LINKS = {
    "constrained": Link(1000, 10, 100, 0.5, noise=0.05),
    "noisy": Link(1000, 10, 100, 0.5, noise=0.2),
    "hard": Link(1000, 20, 50, 0.8, noise=0.05),
    "grows": Link(300, 10, 30, 0.5, noise=0.05, change_at_s=100, changed_mb_s=1200),
}


def _median_s(kind: Callable[[Knobs], Controller], link: Link, knobs: Knobs) -> float:
    return float(
        statistics.median(
            run(link, make_clients(kind, knobs, count=8, files=61, file_mb=533, streams=32), seed) for seed in range(3)
        )
    )


@pytest.mark.parametrize("name", sorted(LINKS))
def test_the_second_controller_beats_the_printed_one_on_a_shared_link(name: str) -> None:
    """Over the paper's two sets of parameters together, and all streams at once on both."""
    link = LINKS[name]
    second = [_median_s(crowding, link, knobs) for knobs in (SLOW, FAST)]
    printed = [_median_s(as_printed, link, knobs) for knobs in (SLOW, FAST)]
    at_once = _median_s(all_at_once, link, FAST)
    assert sum(second) < 0.75 * sum(printed), (second, printed)
    assert max(second) < 0.8 * at_once


def test_the_second_controller_does_not_depend_on_a_lucky_start() -> None:
    """The printed one stays near where it starts; the second comes to the same from either table."""
    slow, fast = (_median_s(crowding, LINKS["constrained"], knobs) for knobs in (SLOW, FAST))
    assert abs(slow - fast) < 0.1 * fast
    slow, fast = (_median_s(as_printed, LINKS["constrained"], knobs) for knobs in (SLOW, FAST))
    assert slow > 2 * fast


def test_the_second_controller_is_fair_and_uses_a_roomy_link() -> None:
    clients = make_clients(crowding, FAST, count=8, files=61, file_mb=533, streams=32)
    run(LINKS["constrained"], clients)
    assert fairness(clients) > 0.98
    roomy = make_clients(crowding, FAST, count=8, files=61, file_mb=533, streams=32)
    run(Link(100_000, 10, 10_000, 0.5), roomy)
    assert all(max(client.levels) == 8 for client in roomy)


def test_the_second_controller_follows_a_link_that_becomes_slower_for_good() -> None:
    link = Link(1000, 10, 100, 0.5, noise=0.05, change_at_s=100, changed_mb_s=300)
    assert _median_s(crowding, link, FAST) < 0.65 * _median_s(all_at_once, link, FAST)


def _settles(state: Crowding, rate: Callable[[int], float], samples: int) -> tuple[Crowding, list[int]]:
    seen = []
    for _ in range(samples):
        state, step = control(state, rate(state.concurrency), 1000, Knobs(1, 64, 4, 2, 1, 0.0))
        seen.append(step.concurrency)
    return state, seen


def test_after_its_tests_the_second_controller_takes_what_the_way_was_seen_to_carry() -> None:
    """1000 MB/s among four, 500 each among two, 600 alone: the way carries 1.7, so 3, and not 2 first."""
    state = begin(4)
    for rate, level in ((1000.0, 2), (1000.0, 1), (600.0, 3)):
        state, step = control(state, rate, 32, FAST)
        assert step.concurrency == level, step.reason
    assert "1.7 transfers" in step.reason


def test_the_second_controller_steps_down_when_others_fill_the_link() -> None:
    state, seen = _settles(Crowding(1), lambda c: min(10.0 * c, 120.0), 14)
    assert 12 <= seen[-1] <= 14
    state, seen = _settles(state, lambda c: min(10.0 * c, 40.0), 10)
    assert seen[-1] <= 5


def test_the_second_controller_learns_that_every_transfer_became_slower() -> None:
    """Else it would take the link for full for ever, and send with one transfer."""
    state, seen = _settles(Crowding(1), lambda c: min(10.0 * c, 80.0), 14)
    assert 8 <= seen[-1] <= 10
    state, seen = _settles(state, lambda c: min(2.0 * c, 80.0), 120)
    assert max(seen[-20:]) > 16
