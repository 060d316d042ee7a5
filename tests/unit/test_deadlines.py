"""Limits of time from observed rates: generous, bounded, and never too tight twice."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_manager.scheduling.deadlines import (
    LEAST_S,
    MARGIN,
    OLD_S,
    Observed,
    is_fresh,
    learn,
    limit_s,
    missed,
    stall,
    stalled,
)
from stageout.core.eta import work_bytes

MOST_S = 72_000.0
NOW = 1_800_000_000.0
DAY_S = 86_400.0

calls = st.tuples(st.integers(1, 10_000), st.integers(0, 10**13), st.floats(0.001, 10**6))
histories = st.lists(st.tuples(st.sampled_from(("learn", "missed", "stalled")), calls, st.floats(0, 10 * DAY_S)))


def _after(history: list[tuple[str, tuple[int, int, float], float]]) -> tuple[Observed | None, float]:
    known, now = None, NOW
    for kind, (files, size_bytes, took_s), later_s in history:
        now += later_s
        if kind == "learn":
            known = learn(known, files, size_bytes, took_s, now)
        elif kind == "missed":
            known = missed(known, files, size_bytes, took_s, now)
        else:
            known = stalled(known, now)
    return known, now


def test_nothing_known_means_a_slow_server_and_no_stall_limit() -> None:
    assert limit_s(None, 1, 10**12, MOST_S, NOW) == MOST_S
    assert limit_s(None, 1, 4, MOST_S, NOW) == LEAST_S
    assert limit_s(None, 1, 10**9, MOST_S, NOW) == pytest.approx(MARGIN * 1001)
    assert stall(None, 4, NOW) is None
    assert stalled(None, NOW) is None


@given(histories, calls, st.floats(1, 10**6))
def test_a_limit_is_always_between_the_least_and_the_administrators(
    history: list[tuple[str, tuple[int, int, float], float]], call: tuple[int, int, float], most_s: float
) -> None:
    known, now = _after(history)
    limit = limit_s(known, call[0], call[1], most_s, now)
    assert min(LEAST_S, most_s) <= limit <= most_s
    found = stall(known, 4, now)
    assert found is None or (1 <= found.bytes_per_s < math.inf and 30 <= found.window_s <= 600)


@given(histories, calls, st.integers(0, 10**12))
def test_more_bytes_and_older_knowledge_never_shorten_a_limit(
    history: list[tuple[str, tuple[int, int, float], float]], call: tuple[int, int, float], more: int
) -> None:
    known, now = _after(history)
    limit = limit_s(known, call[0], call[1], MOST_S, now)
    assert limit_s(known, call[0], call[1] + more, MOST_S, now) >= limit
    assert limit_s(known, call[0] + 1, call[1], MOST_S, now) >= limit
    assert limit_s(known, call[0], call[1], MOST_S, now + 3 * DAY_S) >= limit


@given(histories, calls)
def test_a_limit_that_was_hit_is_at_least_twice_as_long_the_next_time(
    history: list[tuple[str, tuple[int, int, float], float]], call: tuple[int, int, float]
) -> None:
    """So whatever was learnt, work that can be done within the administrator's limit gets there."""
    (known, now), (files, size_bytes, _) = _after(history), call
    for _ in range(20):
        limit = limit_s(known, files, size_bytes, MOST_S, now)
        if limit == MOST_S:
            return
        known = missed(known, files, size_bytes, limit, now)
        assert limit_s(known, files, size_bytes, MOST_S, now) >= min(MOST_S, 1.999 * limit)
    raise AssertionError("the administrator's limit is never reached")


@given(st.floats(1e3, 1e9), st.lists(st.floats(0.5, 2.0), min_size=1, max_size=30), st.integers(0, 10**11))
def test_a_steady_destination_keeps_within_its_limit(rate: float, factors: list[float], size_bytes: int) -> None:
    """Rates that differ by a factor of four are no reason to give up."""
    known = None
    for factor in factors:
        known = learn(known, 1, 10**9, work_bytes(1, 10**9) / (rate * factor), NOW)
    needed_s = work_bytes(1, size_bytes) / (rate / 2)
    assert limit_s(known, 1, size_bytes, math.inf, NOW) >= needed_s


def test_the_limit_follows_the_rate() -> None:
    known = None
    for _ in range(20):
        known = learn(known, 1, 10**9, 100.0, NOW)  # 10 MB/s, without any spread in the end
    assert limit_s(known, 1, 10**10, MOST_S, NOW) == pytest.approx(MARGIN * 1000, rel=0.1)
    for _ in range(40):
        known = learn(known, 1, 10**9, 10.0, NOW)
    assert limit_s(known, 1, 10**11, MOST_S, NOW) == pytest.approx(MARGIN * 1000, rel=0.1)


def test_small_files_count_with_what_a_file_costs() -> None:
    known = learn(None, 200, 200_000, 200.0, NOW)
    assert known.rate_bytes_s == pytest.approx(1_001_000)
    assert limit_s(known, 200, 200_000, MOST_S, NOW) >= MARGIN * 200


def test_old_knowledge_counts_for_nothing() -> None:
    known = learn(None, 1, 10**9, 1.0, NOW)
    assert is_fresh(known, NOW + OLD_S - 1)
    assert not is_fresh(known, NOW + OLD_S)
    assert limit_s(known, 1, 10, MOST_S, NOW + OLD_S) == limit_s(None, 1, 10, MOST_S, NOW)
    assert learn(known, 1, 10**6, 1.0, NOW + OLD_S) == learn(None, 1, 10**6, 1.0, NOW + OLD_S)


def test_a_clock_that_was_set_back_is_no_reason_to_forget() -> None:
    known = learn(None, 1, 10**9, 1.0, NOW)
    assert limit_s(known, 1, 10**12, MOST_S, NOW - 100 * DAY_S) == limit_s(known, 1, 10**12, MOST_S, NOW)


def test_stalls_teach_patience_but_not_for_ever() -> None:
    known: Observed | None = learn(None, 1, 10**9, 10.0, NOW)
    first = stall(known, 4, NOW)
    assert first is not None
    seen = [first.bytes_per_s]
    for _ in range(40):
        known = stalled(known, NOW)
        found = stall(known, 4, NOW)
        assert found is not None
        seen.append(found.bytes_per_s)
    assert seen[1] == pytest.approx(first.bytes_per_s / 2)
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == pytest.approx(25.0)
    slow = learn(None, 1, 0, 10**6, NOW)
    after = stalled(slow, NOW)
    assert after is not None
    assert after.slow_bytes_s(NOW) == slow.slow_bytes_s(NOW), "a destination that is slow already is not made slower"
