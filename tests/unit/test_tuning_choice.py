"""Sampling and choice of a number of streams."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageout.tuning.choice import choose, choose_as_printed, next_sample

LONI = {1: 903.41, 2: 954.84, 4: 990.91, 8: 953.43}


def _sampled(rate: Callable[[int], float], most: int = 64) -> dict[int, float]:
    samples: dict[int, float] = {}
    while (streams := next_sample(samples, most)) is not None:
        assert streams not in samples
        assert 1 <= streams <= most
        samples[streams] = rate(streams)
    return samples


def test_loni_as_printed_takes_the_printed_samples() -> None:
    assert _sampled(LONI.__getitem__) == LONI
    assert choose_as_printed(LONI).streams == 3  # the curve's peak is at 3.34
    assert choose_as_printed(LONI).by == "model"


def test_loni_by_samples() -> None:
    """Two streams are 3.6 % below four: just not within 3.5 %."""
    assert choose(LONI).streams == 4
    assert choose(LONI, within=0.04).streams == 2


@given(full=st.integers(1, 64), most=st.integers(1, 64))
def test_a_link_with_a_sharp_bend(full: int, most: int) -> None:
    """Each stream brings the same until the link is full: at least 95 % of the best, at most 1.5 times the fewest."""

    def rate(streams: int) -> float:
        return min(streams, full) * 10.0

    answer = choose(_sampled(rate, most)).streams
    best = max(rate(n) for n in range(1, most + 1))
    fewest = next(n for n in range(1, most + 1) if rate(n) >= 0.97 * best)
    assert rate(answer) >= 0.95 * best
    assert answer <= max(1.5 * fewest, fewest + 1)


@given(others=st.floats(0.2, 30), most=st.integers(2, 64))
def test_a_link_shared_with_others(others: float, most: int) -> None:
    def rate(streams: int) -> float:
        return 100.0 * streams / (streams + others)

    answer = choose(_sampled(rate, most)).streams
    best = rate(most)
    fewest = next(n for n in range(1, most + 1) if rate(n) >= 0.97 * best)
    assert answer <= max(1.5 * fewest, fewest + 1)
    assert rate(answer) >= 0.93 * best


@pytest.mark.parametrize("most", [1, 2, 3, 5, 48])
def test_the_limit_is_sampled_where_the_rate_still_rises(most: int) -> None:
    assert max(_sampled(lambda n: 10.0 * n, most)) == most


def test_without_a_curve_the_best_sample_is_taken() -> None:
    choice = choose_as_printed({1: 10.0, 2: 20.0})
    assert (choice.streams, choice.rate, choice.by) == (2, 20.0, "samples")
