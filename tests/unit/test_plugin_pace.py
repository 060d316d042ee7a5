"""The rate of a transfer without its slow beginning."""

from __future__ import annotations

import pytest

from stageout.plugin.pace import Pace


def test_the_second_half_counts() -> None:
    pace = Pace()
    place = 0.0
    for step in range(101):  # slow start: the first 2 s bring a tenth of what later seconds bring
        place += 1e5 if step < 20 else 1e6
        pace.note(int(place), step / 10)
    assert pace.bytes_per_s() == pytest.approx(1e7, rel=0.03)


def test_what_is_too_short_to_tell() -> None:
    pace = Pace()
    assert pace.bytes_per_s() is None
    pace.note(0, 0.0)
    pace.note(10**9, 0.15)
    assert pace.bytes_per_s() is None


def test_what_came_at_one_look_has_no_rate_of_its_tail() -> None:
    """Seen with many streams over a long way: all bytes between two looks, then a second of farewells."""
    pace = Pace()
    for look, place in enumerate((0, 2_000_000, 2_000_010, 2_000_020, 2_000_030, 2_000_040)):
        pace.note(place, look * 0.2)
    assert pace.bytes_per_s() is None


@pytest.mark.parametrize("begin", range(20))
def test_steps_of_whole_blocks_hardly_change_the_rate(begin: int) -> None:
    """Blocks of 256 KiB, looked at every 0.2 s: between two points it would be wrong by up to 7 %."""
    pace = Pace()
    for look in range(1, 20):
        pace.note(int(look * 0.2 * 1.77e6 / 262_144 + begin / 20) * 262_144, look * 0.2)
    assert pace.bytes_per_s() == pytest.approx(1.77e6, rel=0.045)


def test_a_long_transfer_keeps_few_points() -> None:
    pace = Pace()
    for step in range(200_000):
        pace.note(step * 1000, step / 10)
    assert len(pace._points) <= 401
    assert pace.bytes_per_s() == pytest.approx(1e4, rel=0.02)
    pace.note(5, 1e9)  # an attempt begun again does not count backwards
    assert pace.bytes_per_s() == pytest.approx(1e4, rel=0.02)
