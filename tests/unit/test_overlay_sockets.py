"""How many connections a route comes to, on links that are a few lines of arithmetic."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from stageout.overlay.sockets import FAR_CONNECTIONS, FIRST_CONNECTIONS, LONG_S, Sockets
from stageout.overlay.tcp import Segments

LINK = 12.5e6
_LOOK_S = 0.25
_FRESH_S = 1.5


def _run(sockets: Sockets, rate: Callable[[int, int], float], seconds: float) -> tuple[list[int], float]:
    """The numbers that it came to, and bytes a second in all. :param rate: of so many, of which so many are new."""
    noise, passed, numbers = random.Random(4711), 0.0, [sockets.now]
    made_s = [0.0] * sockets.now
    sockets.begin(0.0)
    for tick in range(1, int(seconds / _LOOK_S)):
        now_s = tick * _LOOK_S
        made_s = [*made_s, *[now_s] * (sockets.now - len(made_s))][: sockets.now]
        fresh = sum(now_s - one < _FRESH_S for one in made_s)
        passed += rate(sockets.now, fresh) * _LOOK_S * noise.uniform(0.9, 1.1)
        sockets.look(now_s, int(passed), 0.2)
        numbers.append(sockets.now)
    return numbers, passed / seconds


def _filled(count: int, fresh: int) -> float:
    return LINK


def _lossy(count: int, fresh: int) -> float:
    """Each backs off at each loss; new ones run ahead until their first."""
    return min(LINK, (count - fresh) * 0.83e6 + fresh * 5e6)


def test_one_connection_that_fills_the_link_gets_no_company() -> None:
    numbers, rate = _run(Sockets(FIRST_CONNECTIONS, 24), _filled, 120)
    assert max(numbers) <= 4
    assert numbers[-1] <= 2
    assert rate > 0.95 * LINK


def test_a_long_way_has_four_connections_from_the_start_and_never_fewer() -> None:
    sockets = Sockets(FIRST_CONNECTIONS, 24)
    sockets.note_way(LONG_S / 2)
    assert sockets.now == FIRST_CONNECTIONS
    sockets.note_way(LONG_S)
    assert sockets.now == FAR_CONNECTIONS
    numbers, _ = _run(sockets, _filled, 120)
    assert min(numbers) == numbers[-1] == FAR_CONNECTIONS
    few = Sockets(1, 3)
    few.note_way(LONG_S)
    assert few.now == 3


def test_where_nothing_moves_no_connections_are_added() -> None:
    numbers, _ = _run(Sockets(FIRST_CONNECTIONS, 24), lambda count, fresh: 0.0, 60)
    assert max(numbers) <= 2 * FIRST_CONNECTIONS


def test_connections_that_lose_packets_are_made_many() -> None:
    numbers, rate = _run(Sockets(FIRST_CONNECTIONS, 24), _lossy, 25)
    assert 12 <= numbers[-1] <= 24
    assert rate > 0.8 * LINK
    assert _run(Sockets(FIRST_CONNECTIONS, 24), _lossy, 300)[1] > 0.92 * LINK


class _Falling:
    """A link of 12.5 MB/s that loses one packet in a thousand: new connections run ahead, and then fall back.

    :param share: of packets that are resent.
    """

    def __init__(self, share: float = 0.001, one: float = 0.83e6, backs_off: bool = True) -> None:
        self.share, self.one, self._backs_off = share, one, backs_off
        self._sent = self._resent = 0.0

    def run(self, sockets: Sockets, seconds: float) -> tuple[list[int], float]:
        noise, passed, numbers = random.Random(4711), 0.0, [sockets.now]
        made_s = [0.0] * sockets.now
        sockets.begin(0.0)
        for tick in range(1, int(seconds / _LOOK_S)):
            now_s = tick * _LOOK_S
            made_s = [*made_s, *[now_s] * (sockets.now - len(made_s))][: sockets.now]
            rate = min(LINK, sum(max(self.one, LINK * 0.6 ** max(0.0, 2 * (now_s - one) - 2)) for one in made_s))
            passed += rate * _LOOK_S * noise.uniform(0.95, 1.05)
            self._sent += rate * _LOOK_S / 1448
            self._resent += sum(noise.random() < self.share for _ in range(int(rate * _LOOK_S / 1448)))
            trip_s = 0.067 if rate < 0.95 * LINK else 0.12
            seen = Segments(int(self._sent), int(self._resent), 1448, trip_s * sockets.now, sockets.now, 0.067)
            sockets.look(now_s, int(passed), 0.067, seen if self._backs_off else Segments())
            numbers.append(sockets.now)
        return numbers, passed / seconds


def test_losses_on_a_link_that_is_not_full_call_for_many_connections_at_once() -> None:
    numbers, rate = _Falling().run(Sockets(FIRST_CONNECTIONS, 24), 25)
    assert max(numbers[: round(8 / _LOOK_S)]) >= 12
    assert 14 <= numbers[-1] <= 24
    assert rate > 0.9 * LINK


def test_losses_are_no_reason_for_more_where_they_are_not_in_the_way() -> None:
    numbers, _ = _Falling(one=LINK).run(Sockets(FIRST_CONNECTIONS, 24), 60)
    assert max(numbers) <= 4
    numbers, _ = _Falling(one=4e6, backs_off=False).run(Sockets(FIRST_CONNECTIONS, 24), 60)
    assert max(numbers) <= 5
    numbers, _ = _Falling(share=0.0, one=LINK / 20).run(Sockets(FIRST_CONNECTIONS, 8), 60)
    assert max(numbers) <= 8


def test_a_link_that_begins_to_lose_packets_gets_more_connections() -> None:
    sockets = Sockets(FIRST_CONNECTIONS, 24)
    calls = iter(range(1 << 20))
    numbers, _ = _run(
        sockets, lambda count, fresh: _filled(count, fresh) if next(calls) < 240 else _lossy(count, 0), 120
    )
    assert numbers[230] <= 4
    assert max(numbers[260:]) >= 12


@pytest.mark.parametrize(("start", "most"), [(3, 3), (3, 0), (1, 1)])
def test_a_number_that_is_fixed_stays(start: int, most: int) -> None:
    sockets = Sockets(start, most)
    sockets.note_way(LONG_S)
    assert set(_run(sockets, lambda count, fresh: count * 1e6, 30)[0]) == {start}
    assert sockets.reason == ""


def test_the_limit_is_kept_and_each_step_is_explained() -> None:
    sockets = Sockets(FIRST_CONNECTIONS, 5)
    numbers, _ = _run(sockets, lambda count, fresh: count * 1e6, 60)
    assert max(numbers) == 5
    assert min(numbers) >= 1
    assert sockets.reason


def test_connections_that_were_just_made_say_nothing() -> None:
    """The first rate is measured behind two trips of the route, or half a second, and for another half."""
    for trip_s, first_s in ((0.05, 1.0), (1.0, 2.5)):
        sockets = Sockets(FIRST_CONNECTIONS, 24)
        sockets.begin(0.0)
        looks = ((tick / 4, sockets.look(tick / 4, tick * 1_000_000, trip_s)) for tick in range(1, 20))
        now_s, sample = next((now_s, sample) for now_s, sample in looks if sample is not None)
        assert now_s == first_s
        assert sample is not None and sample.rate == pytest.approx(4e6)
