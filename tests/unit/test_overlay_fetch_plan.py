"""Which blocks each connection asks for: every block gets into the file once, whatever dies, and large parts first."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest

from stageout.overlay.fetching import Ask, Plan
from stageout.overlay.wire.blocks import PART_BYTES
from stageout.overlay.wire.messages import BLOCK_BYTES

_BLOCK = memoryview(random.Random(1).randbytes(BLOCK_BYTES))
_SIZES = [0, 1, BLOCK_BYTES, 9 * BLOCK_BYTES + 1, 200 * BLOCK_BYTES - 5]


class _Connection:
    """The parts that it was asked for come in order."""

    def __init__(self, number: int, route: int) -> None:
        self.number, self.route = number, route
        self.due: deque[Ask] = deque()

    def ask(self, ask: Ask) -> None:
        self.due.extend(one for one, _ in ask.each())


class _Fetch:
    """Connections on two routes that ask, bring blocks and die by chance. :ivar written: how often each block was.

    :param parts: every second connection brings parts of blocks, too.
    """

    def __init__(self, seed: int, size_bytes: int, parts: bool = False) -> None:
        self._parts, self.new_bytes = parts, 0
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
            self._comes(one.due.popleft())
        else:
            mine = [other.number for other in self._open if other.route == one.route]
            slow = {other.number for other in self._open if other.route != one.route}
            ask = self._next(one) or self.plan.again(one.number, mine, slow, self._has_parts(one))
            if ask is not None:
                assert self._has_parts(one) or not ask.is_part
                one.ask(ask)

    def _has_parts(self, one: _Connection) -> bool:
        return self._parts and one.number % 3 > 0

    def _next(self, one: _Connection) -> Ask | None:
        if not self._has_parts(one):
            return self.plan.take(one.number, len(self._open)) or self._once_more(one, 0)
        most_bytes = self._chance.randint(1, 20) * PART_BYTES
        is_whole = self._chance.random() < 0.3 and not self.plan.has_parts
        ask = self.plan.take(one.number, 4) if is_whole else self.plan.take_part(one.number, most_bytes)
        return ask or self._once_more(one, most_bytes)

    def _once_more(self, one: _Connection, most_bytes: int) -> Ask | None:
        late = self._chance.choice([other for other in self._open if other is not one]).due
        if not late or self._chance.random() < 0.8:
            return None
        return self.plan.once_more(one.number, late[-1], most_bytes)

    def _comes(self, ask: Ask) -> None:
        block, new_bytes = ask.first, self.plan.new_bytes(ask)
        data = _BLOCK[: self.plan.length(block)]
        if ask.is_part:
            whole = self.plan.part_came(ask, data[ask.start : ask.stop])
            assert whole is None or whole == data
            is_wanted = whole is not None
            self.new_bytes += new_bytes
        else:
            is_wanted = self.plan.came(block)
            self.new_bytes += new_bytes if is_wanted else 0
        if is_wanted:
            assert not self.plan.came(block), "another copy is on its way to the disk"
            self.plan.written(block)
            self.written[block] += 1


@pytest.mark.parametrize("size_bytes", _SIZES)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("parts", [False, True])
def test_every_block_is_written_once_whatever_dies(seed: int, size_bytes: int, parts: bool) -> None:
    fetch = _Fetch(seed, size_bytes, parts)
    for number in range(100_000):
        if fetch.plan.is_whole:
            break
        fetch.step(may_die=number < 5000)
    count = -(-size_bytes // BLOCK_BYTES)
    assert fetch.written == Counter(range(count))
    assert fetch.plan.received_bytes == size_bytes
    assert fetch.new_bytes == size_bytes, "what came twice is not counted"


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


def _came(plan: Plan, *blocks: int) -> None:
    for block in blocks:
        assert plan.came(block)
        plan.written(block)


def test_a_block_comes_in_parts_by_several_connections() -> None:
    plan, content = Plan(2 * BLOCK_BYTES - 5), memoryview(random.Random(1).randbytes(2 * BLOCK_BYTES - 5))
    _came(plan, plan.take(1, 2, most=1).first)  # type: ignore[union-attr]
    parts = [plan.take_part(carrier, 9 * PART_BYTES) for carrier in (1, 2, 3)]
    middle, end = 9 * PART_BYTES, BLOCK_BYTES - 5
    assert parts == [Ask(1, 1, 0, middle), Ask(1, 1, middle, end), None]
    second = content[BLOCK_BYTES:]
    assert plan.part_came(Ask(1, 1, middle, end), second[middle:]) is None
    assert plan.part_came(Ask(1, 1, 0, middle), second[:middle]) == second
    assert not plan.is_whole, "it is not written yet"
    plan.written(1)
    assert plan.is_whole
    assert plan.twice_bytes == 0


def test_of_a_lost_connection_only_the_parts_come_again() -> None:
    plan = Plan(BLOCK_BYTES)
    first, second = plan.take_part(1, 8 * PART_BYTES), plan.take_part(2, BLOCK_BYTES)
    assert first is not None
    assert plan.part_came(first, memoryview(bytes(8 * PART_BYTES))) is None
    plan.lost(1)
    assert not plan.has_parts, "what it has brought stays"
    plan.lost(2)
    assert plan.take_part(3, BLOCK_BYTES) == second


def test_a_connection_without_parts_brings_a_block_whole_of_which_some_are_lost() -> None:
    plan = Plan(BLOCK_BYTES)
    parts = [plan.take_part(carrier, 8 * PART_BYTES) for carrier in (1, 2)]
    assert plan.take(3, 3) is None, "both parts come"
    plan.lost(1)
    assert plan.take(3, 3) == Ask(0, 1)
    assert parts[1] is not None
    assert plan.part_came(parts[1], memoryview(bytes(8 * PART_BYTES))) is None, "its other part comes no more"
    _came(plan, 0)
    assert plan.is_whole


def test_what_is_late_comes_in_parts_by_others_too_and_whichever_has_it_first() -> None:
    for is_whole_first in (True, False):
        plan = Plan(2 * BLOCK_BYTES)
        plan.begin(1, 2)
        _came(plan, 0)
        late = Ask(1, 1)
        assert plan.once_more(2, late, 8 * PART_BYTES) == Ask(1, 1, 0, 8 * PART_BYTES)
        assert plan.take_part(3, BLOCK_BYTES) == Ask(1, 1, 8 * PART_BYTES, BLOCK_BYTES)
        assert plan.once_more(4, late, BLOCK_BYTES) is None, "it comes twice already"
        half = memoryview(bytes(8 * PART_BYTES))
        assert plan.part_came(Ask(1, 1, 0, 8 * PART_BYTES), half) is None
        if is_whole_first:
            assert plan.came(1)
        whole = plan.part_came(Ask(1, 1, 8 * PART_BYTES, BLOCK_BYTES), half)
        assert (whole is None) == is_whole_first
        plan.written(1)
        assert plan.is_whole
        assert not plan.came(1)


def test_parts_that_slow_ones_owe_come_again() -> None:
    plan = Plan(BLOCK_BYTES)
    part = plan.take_part(1, BLOCK_BYTES)
    assert plan.again(2, mine=[1, 2], slow=[], parts=True) is None
    assert plan.again(2, mine=[2], slow=[1], parts=False) is None, "it cannot bring them"
    assert plan.again(2, mine=[2], slow=[1], parts=True) == part
    assert plan.again(2, mine=[2], slow=[1], parts=True) is None


@pytest.mark.parametrize("in_parts", [True, False])
def test_what_is_being_written_is_not_asked_for_again(in_parts: bool) -> None:
    plan = Plan(BLOCK_BYTES)
    if in_parts:
        part = plan.take_part(1, BLOCK_BYTES)
        assert part is not None
        assert plan.part_came(part, _BLOCK) is not None
    else:
        plan.begin(1, 1)
        assert plan.came(0)
    for parts in (True, False):
        assert plan.again(2, mine=[2], slow=[1], parts=parts) is None
        assert plan.again(2, mine=[1, 2], slow=[], parts=parts) is None
    plan.written(0)
    assert plan.is_whole


def test_no_more_than_a_fiftieth_comes_twice_to_come_sooner() -> None:
    plan = Plan(100 * BLOCK_BYTES)
    while plan.take(1, 2) is not None:
        pass
    _came(plan, *range(97))
    for _ in range(2):
        assert not plan.came(0)
    assert plan.once_more(2, Ask(99, 1)) == Ask(99, 1)
    assert not plan.came(0)
    assert plan.once_more(3, Ask(98, 1)) is None
    assert plan.again(3, mine=[3], slow=[]) == Ask(97, 1), "what nobody else may bring is another thing"
