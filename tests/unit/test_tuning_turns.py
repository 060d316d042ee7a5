"""Turns on a line, on a clock that is a number: nobody starves, shares are kept, the line is used and not exceeded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stageout.overlay.tuning.shares import Flow, weights
from stageout.overlay.tuning.turns import AWAY_S, BACK_S, LATE_S, MESSAGE_BYTES, Place, Turns, least_part, piece_bytes

LINE = 12.5e6
_SECOND_S = 1.0


@dataclass(eq=False)
class _Flow:
    """Something to send. :param process: that it is in. :param from_s: when it begins, and :param until_s: ends.

    :param away_s: how long it does something else after each piece. :param waits_on: another piece waits behind each.
    """

    weight: float
    process: int = 0
    from_s: float = 0.0
    until_s: float = float("inf")
    away_s: float = 0.0
    waits_on: bool = False
    place: Place = field(default_factory=Place)
    back_s: float = 0.0
    left: list[tuple[float, int]] = field(default_factory=list)

    def waits(self, now_s: float) -> bool:
        return max(self.from_s, self.back_s) <= now_s < self.until_s

    def rate(self, from_s: float, until_s: float) -> float:
        return sum(size for at_s, size in self.left if from_s <= at_s < until_s) / (until_s - from_s)


@dataclass
class _World:
    """Processes that wake up, late by so much at most, and let the first of their flows try.

    :param stop: a process, and from when until when it stands still.
    """

    flows: Sequence[_Flow]
    late_s: float = 0.0
    chance: random.Random = field(default_factory=lambda: random.Random(1))
    turns: Turns = field(default_factory=lambda: Turns(LINE))
    stop: tuple[int, float, float] = (-1, 0.0, 0.0)

    def run(self, seconds: float) -> None:
        for flow in self.flows:
            flow.place.weight = flow.weight
        begun, wake_s = set[_Flow](), dict.fromkeys({flow.process for flow in self.flows}, 0.0)
        heads: dict[int, float] = {}
        while (now_s := min(wake_s.values())) < seconds:
            process = min(wake_s, key=lambda one: wake_s[one])
            if process == self.stop[0] and self.stop[1] <= now_s < self.stop[2]:
                wake_s[process] = self.stop[2]
                continue
            mine = [flow for flow in self.flows if flow.process == process and flow.waits(now_s)]
            heads.pop(process, None)
            for flow in set(mine) - begun:
                flow.place.begin(self.turns.behind)
                begun.add(flow)
            wait_s = 0.001
            if mine:
                first = min(mine, key=lambda flow: flow.place.start)
                first.place.begin(self.turns.late)
                others = min(heads.values(), default=float("inf"))
                wait_s = self.turns.wait_s(first.place.start, others, now_s)
                if wait_s:
                    heads[process] = first.place.start
                else:
                    self._leave(first, now_s)
                    heads = {one: start for one, start in heads.items() if start >= first.place.start}
                    if not first.waits_on:
                        begun.discard(first)
            wake_s[process] = now_s + max(1e-5, wait_s) + self.chance.uniform(0, self.late_s)

    def _leave(self, flow: _Flow, now_s: float) -> None:
        size_bytes = piece_bytes(self.turns.rate)
        self.turns.leaves(size_bytes, flow.place.start, now_s)
        flow.place.leave(size_bytes)
        flow.left.append((now_s, size_bytes))
        flow.back_s = now_s + flow.away_s

    def most(self) -> int:
        """Bytes that left in any second."""
        left = sorted(piece for flow in self.flows for piece in flow.left)
        most = here = begins = 0
        for at_s, size_bytes in left:
            here += size_bytes
            while left[begins][0] <= at_s - _SECOND_S:
                here -= left[begins][1]
                begins += 1
            most = max(most, here)
        return most


_BOUND = LINE * (_SECOND_S + LATE_S) + piece_bytes(LINE)


def test_weights_hold_between_processes() -> None:
    more, less = _Flow(0.8, process=0), _Flow(0.2, process=1)
    _World((more, less), late_s=0.001).run(20)
    assert more.rate(1, 20) / less.rate(1, 20) == pytest.approx(4, rel=0.1)
    assert more.rate(1, 20) + less.rate(1, 20) >= 0.97 * LINE


def test_an_urgent_file_has_the_line_at_once() -> None:
    bulk = [_Flow(0.02 / 30, process=number % 2) for number in range(30)]
    urgent = _Flow(0.98, process=2, from_s=5.0)
    world = _World([*bulk, urgent], late_s=0.001)
    world.run(6)
    assert sum(size for at_s, size in urgent.left if at_s < 5.2) > 1 << 20


def test_a_process_that_does_not_come_costs_the_others_little() -> None:
    here = _Flow(0.5, process=0)
    world = _World([here, _Flow(0.5, process=1, until_s=1.0)])
    world.run(10)
    assert here.rate(2, 10) >= 0.97 * LINE


def test_a_process_that_stood_still_takes_no_more_than_moments_of_the_others() -> None:
    here, there = _Flow(0.5, process=0), _Flow(0.5, process=1, waits_on=True)
    _World([here, there], stop=(1, 2.0, 22.0)).run(30)
    assert here.rate(3, 21) >= 0.95 * LINE
    assert here.rate(22, 22 + 2 * AWAY_S + 1) > 0.2 * LINE
    assert there.rate(24, 30) == pytest.approx(here.rate(24, 30), rel=0.1)


@pytest.mark.parametrize("connections", [1, 4, 8])
def test_no_connection_of_two_hundred_files_on_a_slow_line_stands_still_for_a_minute(connections: int) -> None:
    """One of them is urgent, and has two connections; its priority is a thousand times that of each of the others."""
    line, count = 2e6, 200
    parts = weights([Flow(str(number), "", 0 if number else 10, 0, 0.0, 0.0) for number in range(count)], 0.0)
    mine = [connections if number else 2 for number in range(count)]
    places = [Place(max(parts[str(n)], least_part(mine[n], sum(mine), line))) for n in range(count)]
    turns, size_bytes = Turns(line), piece_bytes(line, sum(mine))
    left_s: list[list[float]] = [[] for _ in range(count)]
    while turns.free_s < 100.0:
        first = min(range(count), key=lambda number: places[number].start)
        left_s[first].append(turns.free_s)
        turns.leaves(size_bytes, places[first].start, turns.free_s)
        places[first].leave(size_bytes)
    for number, found in enumerate(left_s):
        each = found[:: mine[number]]  # the connections of a file take turns
        gaps = [later - sooner for sooner, later in zip([0.0, *each], [*each, 100.0])]
        assert max(gaps) < 30.0, (number, max(gaps))
    urgent = sum(size_bytes for at_s in left_s[0] if at_s >= 50.0) / 50.0
    assert urgent > 0.4 * line


def test_a_fast_line_of_few_connections_has_the_pieces_and_parts_that_it_has_anyway() -> None:
    assert piece_bytes(LINE, 24) == piece_bytes(LINE) == int(LINE / 100)
    assert least_part(4, 8, LINE) < 0.01


@given(
    weights=st.lists(st.floats(0.01, 1), min_size=1, max_size=8),
    away=st.lists(st.sampled_from([0.0, 0.0, 0.001, 0.03]), min_size=8, max_size=8),
    processes=st.integers(1, 4),
    late_s=st.sampled_from([0.0, 0.001, 0.008]),
    seed=st.integers(0, 99),
)
@settings(max_examples=20, deadline=None)
@example([1.0, 0.01], [0.0] * 8, 2, 0.008, 0)
def test_nobody_starves_and_no_more_leaves_than_the_line_carries(
    weights: list[float], away: list[float], processes: int, late_s: float, seed: int
) -> None:
    flows = [
        _Flow(weight / sum(weights), number % processes, away_s=away[number]) for number, weight in enumerate(weights)
    ]
    world = _World(flows, late_s, random.Random(seed))
    world.run(2.5)
    assert world.most() <= _BOUND
    greedy = [flow for flow in flows if not flow.away_s]
    if greedy:
        assert sum(flow.rate(0.5, 2.5) for flow in flows) >= (0.95 if late_s < LATE_S / 2 else 0.8) * LINE
    for flow in greedy:
        if flow.weight > 0.02 and late_s <= 0.001:
            assert flow.rate(0.5, 2.5) >= 0.8 * flow.weight * LINE - piece_bytes(LINE)


def test_what_a_flow_does_not_send_it_does_not_save() -> None:
    turns, late, other = Turns(LINE), Place(0.5), Place(0.5)
    for _ in range(100):
        other.begin(turns.behind)
        turns.leaves(100_000, other.start, 0.0)
        other.leave(100_000)
    late.begin(turns.behind)
    assert 0 < late.start == turns.virtual - BACK_S * LINE


def test_a_weight_that_rises_counts_for_what_was_sent_before() -> None:
    place = Place(0.02, start=1000.0)
    place.leave(128 * 1024)
    place.weigh(1.0, 1000.0)
    assert place.start == pytest.approx(1000.0 + 128 * 1024)


def test_messages_wait_for_nobody_but_count() -> None:
    turns = Turns(LINE)
    turns.leaves(1 << 20, 0.0, 0.0)
    before_s = turns.free_s
    assert turns.lets(MESSAGE_BYTES, 0.0)
    assert turns.free_s == pytest.approx(before_s + MESSAGE_BYTES / LINE)
    assert not turns.lets(MESSAGE_BYTES + 1, 0.0)


def test_messages_without_end_wait_like_all_else() -> None:
    turns = Turns(LINE)
    count = 0
    while turns.lets(MESSAGE_BYTES, 0.0):
        count += 1
    assert count * MESSAGE_BYTES < LINE / 2


def test_messages_leave_the_line_to_others_too() -> None:
    turns, data = Turns(LINE), Place(1.0)
    left_bytes = 0
    for millisecond in range(4000):
        now_s = millisecond / 1000
        for _ in range(12):  # four times what the line carries
            turns.lets(MESSAGE_BYTES, now_s)
        if not turns.wait_s(data.start, float("inf"), now_s):
            turns.leaves(piece_bytes(LINE), data.start, now_s)
            data.leave(piece_bytes(LINE))
            left_bytes += piece_bytes(LINE)
    assert left_bytes > 4 * 0.4 * LINE


def test_the_rate_is_that_of_the_last_second() -> None:
    turns = Turns(LINE)
    for tenth in range(25):
        turns.leaves(1_000_000, 0.0, tenth / 10)
    assert turns.rate_used(2.5) == pytest.approx(10e6, rel=0.1)
    assert turns.rate_used(60.0) < 1e6
