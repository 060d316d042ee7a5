"""How many connections a route comes to, on links that are a line of arithmetic."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from stageout.overlay.sockets import FIRST_CONNECTIONS, Sockets

_LOOK_S = 0.25


def _run(sockets: Sockets, rate: Callable[[int], float], seconds: float) -> tuple[list[int], float]:
    """The numbers that it came to, and bytes a second in all."""
    noise, passed, numbers = random.Random(4711), 0.0, [sockets.now]
    sockets.begin(0.0)
    for tick in range(1, int(seconds / _LOOK_S)):
        passed += rate(sockets.now) * _LOOK_S * noise.uniform(0.93, 1.07)
        sockets.look(tick * _LOOK_S, int(passed), 0.2)
        numbers.append(sockets.now)
    return numbers, passed / seconds


def test_one_connection_that_fills_the_link_gets_no_company() -> None:
    numbers, rate = _run(Sockets(FIRST_CONNECTIONS, 24), lambda count: 12.5e6, 60)
    assert max(numbers) <= 4
    assert rate > 0.9 * 12.5e6


def test_connections_that_lose_packets_are_made_many() -> None:
    numbers, rate = _run(Sockets(FIRST_CONNECTIONS, 24), lambda count: min(12.5e6, count * 0.83e6), 60)
    assert 12 <= numbers[-1] <= 24
    assert rate > 0.85 * 12.5e6


@pytest.mark.parametrize(("start", "most"), [(3, 3), (3, 0), (1, 1)])
def test_a_number_that_is_fixed_stays(start: int, most: int) -> None:
    sockets = Sockets(start, most)
    assert set(_run(sockets, lambda count: count * 1e6, 30)[0]) == {start}
    assert sockets.reason == ""


def test_the_limit_is_kept_and_each_step_is_explained() -> None:
    sockets = Sockets(FIRST_CONNECTIONS, 5)
    numbers, _ = _run(sockets, lambda count: count * 1e6, 60)
    assert max(numbers) == 5
    assert sockets.reason
