"""Silent peers: no connection ends for a slow disk, and no range waits for a dead one."""

from __future__ import annotations

import pytest

from stageout.overlay.rules import silence
from stageout.overlay.rules.silence import Next, Progress


def steps(progress: Progress, until: int, round_trip_s: float = 0.03, median_s: float = 0.5) -> dict[int, Next]:
    """Return when the step changes, in whole seconds."""
    changes: dict[int, Next] = {}
    for now in range(until + 1):
        step = silence.next_step(progress, now, round_trip_s, median_s)
        if step is not Next.WAIT and step not in changes.values():
            changes[now] = step
    return changes


def test_the_terminals_disk_syncs_for_20_s() -> None:
    """The manifest waits for the sync. Ranges do not: their 204 comes before it, so they are answered as ever."""
    assert steps(Progress(0, is_durable=True), 20) == {}
    assert not silence.cannot_write(0, 9.9)


def test_a_receiver_lives_but_does_not_write_for_200_s() -> None:
    assert silence.cannot_write(0, silence.CANNOT_WRITE_S)
    assert steps(Progress(0), 200) == {15: Next.ELSEWHERE, 120: Next.CLOSE}
    assert steps(Progress(0, is_durable=True), 200) == {120: Next.CLOSE}


@pytest.mark.parametrize(("round_trip_s", "after_s"), [(0.03, 1), (0.6, 2), (2.0, 6)])
def test_a_silent_route_costs_three_round_trips(round_trip_s: float, after_s: int) -> None:
    assert steps(Progress(0, unacked=1), 119, round_trip_s) == {after_s: Next.ELSEWHERE}
    assert steps(Progress(0, unacked=1, is_durable=True), 119, round_trip_s) == {after_s: Next.ELSEWHERE}


def test_slow_answers_are_waited_for() -> None:
    assert steps(Progress(0), 119, median_s=4.0) == {40: Next.ELSEWHERE}
    assert steps(Progress(100), 114) == {}


def test_a_link_away_for_45_s() -> None:
    """Puts and gets alike: the old connections end at once, and those made after its return stay."""
    heard = [3.0, 9.9, 10.0]
    assert all(silence.is_left_over(moved_at, max(heard)) for moved_at in heard)
    assert not silence.is_left_over(55.2, max(heard))


def test_the_tail_sends_at_most_2_percent_again() -> None:
    assert [silence.tail(blocks, 0) for blocks in (1, 100, 512, 100_000)] == [4, 4, 10, 64]
    assert [silence.tail(512, again) for again in (9, 10, 11)] == [1, 0, 0]


def test_a_body_below_1_kib_a_second_ends() -> None:
    assert silence.is_too_slow(60 * 1024 - 1, 60)
    assert not silence.is_too_slow(60 * 1024, 60)
    assert not silence.is_too_slow(0, 59)
