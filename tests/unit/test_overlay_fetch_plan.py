"""Which blocks each connection asks for: every block gets into the file once, whatever dies, and large parts first."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest

from stageout.overlay.fetching import Ask, Plan
from stageout.wire.overlay import BLOCK_BYTES

_SIZES = [0, 1, BLOCK_BYTES, 9 * BLOCK_BYTES + 1, 200 * BLOCK_BYTES - 5]


class _Connection:
    """What was asked for on it comes in order."""

    def __init__(self, number: int, route: int) -> None:
        self.number, self.route = number, route
        self.due: deque[int] = deque()

    def ask(self, ask: Ask) -> None:
        self.due.extend(range(ask.first, ask.end))


class _Fetch:
    """Connections on two routes that ask, bring blocks and die by chance. :ivar written: how often each block was."""

    def __init__(self, seed: int, size_bytes: int) -> None:
        self._chance, self.plan = random.Random(seed), Plan(size_bytes)
        self.written: Counter[int] = Counter()
        self._numbers = iter(range(1_000_000))
        self._open = [self._new() for _ in range(4)]
        first = self._open[0]
        first.ask(self.plan.begin(first.number, 8))

    def _new(self) -> _Connection:
        number = next(self._numbers)
        return _Connection(number, number % 2)

    def step(self, may_die: bool) -> None:
        """Something happens on one connection."""
        one = self._chance.choice(self._open)
        if may_die and self._chance.random() < 0.1:
            self.plan.lost(one.number)
            self._open[self._open.index(one)] = self._new()
        elif one.due:
            block = one.due.popleft()
            if self.plan.came(block):
                assert not self.plan.came(block), "another copy is on its way to the disk"
                self.plan.written(block)
                self.written[block] += 1
            assert not self.plan.came(block)
        else:
            mine = [other.number for other in self._open if other.route == one.route]
            slow = {other.number for other in self._open if other.route != one.route}
            ask = self.plan.take(one.number, len(self._open)) or self.plan.again(one.number, mine, slow)
            if ask is not None:
                one.ask(ask)


@pytest.mark.parametrize("size_bytes", _SIZES)
@pytest.mark.parametrize("seed", range(20))
def test_every_block_is_written_once_whatever_dies(seed: int, size_bytes: int) -> None:
    fetch = _Fetch(seed, size_bytes)
    for number in range(100_000):
        if fetch.plan.is_whole:
            break
        fetch.step(may_die=number < 5000)
    count = -(-size_bytes // BLOCK_BYTES)
    assert fetch.written == Counter(range(count))
    assert fetch.plan.received_bytes == size_bytes


def test_ranges_are_large_at_first_and_small_at_the_end() -> None:
    plan, sizes = Plan(1000 * BLOCK_BYTES), list[int]()
    while (ask := plan.take(1, 4)) is not None:
        sizes.append(ask.blocks)
    assert sum(sizes) == 1000
    assert sizes[0] == 125
    assert sizes[-4:] == [1, 1, 1, 1]
    assert all(before >= after for before, after in zip(sizes, sizes[1:]))


def test_a_connection_that_brings_little_asks_for_little() -> None:
    plan = Plan(1000 * BLOCK_BYTES)
    assert plan.take(1, 4, most=3) == Ask(0, 3)
    assert plan.take(2, 4) == Ask(3, 125)


def test_a_range_is_not_worth_a_question_that_costs_more_than_it() -> None:
    plan, sizes = Plan(100 * BLOCK_BYTES), list[int]()
    while (ask := plan.take(1, 2, least=10)) is not None:
        sizes.append(ask.blocks)
    assert sizes == [25, 19, 14, 11, 10, 10, 10, 1]
    assert Plan(100 * BLOCK_BYTES).take(1, 2, most=3, least=10) == Ask(0, 3), "it must not owe that much"


def test_one_connection_leaves_something_to_those_that_may_join_it() -> None:
    plan = Plan(5000 * BLOCK_BYTES)
    assert plan.take(1, 1) == Ask(0, 64)
    assert plan.take(1, 2) == Ask(64, 256)


def test_what_a_dead_connection_owed_is_asked_for_again() -> None:
    plan = Plan(4 * BLOCK_BYTES)
    assert plan.begin(1, 8) == Ask(0, 4)
    for block in (0, 1):
        assert plan.came(block)
        plan.written(block)
    assert plan.take(2, 1) is None
    plan.lost(1)
    assert [plan.take(2, 2), plan.take(2, 2)] == [Ask(2, 1), Ask(3, 1)]
    assert plan.take(2, 1) is None


def test_what_slow_ones_owe_is_asked_for_once_more_and_nothing_else() -> None:
    plan = Plan(3 * BLOCK_BYTES)
    assert [plan.take(carrier, 3, most=1) for carrier in (1, 2, 3)] == [Ask(0, 1), Ask(1, 1), Ask(2, 1)]
    assert plan.again(1, mine=[1, 2], slow=[]) is None, "its own route waits for something, and the other one is good"
    assert plan.again(1, mine=[1, 2], slow=[3]) == Ask(2, 1)
    assert plan.again(2, mine=[1, 2], slow=[3]) is None, "its own route has asked for it"
    assert plan.came(2)
    plan.written(2)
    assert not plan.came(2), "the second copy is not written"


def test_a_route_that_waits_for_nothing_repeats_the_oldest() -> None:
    plan = Plan(3 * BLOCK_BYTES)
    plan.begin(1, 3)
    assert plan.again(2, mine=[2], slow=[]) == Ask(0, 1)
    assert plan.again(2, mine=[2], slow=[]) is None
    assert plan.again(3, mine=[3], slow=[]) == Ask(0, 1)
