"""Block maps: every block arrives, and few are sent twice, whatever happens to the connections."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageout.overlay.transfer.blockmap import BLOCK_BYTES, BlockMap, Range

_TICK_S = 0.05


class _Lane:
    """A connection that moves blocks at a rate until it dies or falls silent."""

    def __init__(self, rate: float, ends_s: float = 1e9, silent_s: float = 1e9) -> None:
        self.rate, self.ends_s, self.silent_s = rate, ends_s, silent_s
        self.part: Range | None = None
        self.moved = 0.0
        self.is_dead = False


def _moved(blocks: int, lanes: list[_Lane], tells_blocks: bool, notices_silence: bool) -> tuple[BlockMap, int, float]:
    """Move a file. Returns the map, the number of blocks that were sent, and the time that it took."""
    blockmap, now, sent = BlockMap(blocks * BLOCK_BYTES), 0.0, 0
    while not blockmap.is_done:
        assert now < 20_000, "it never ends"
        now += _TICK_S
        for number, lane in enumerate(lanes):
            if lane.is_dead:
                continue
            if now >= lane.ends_s:
                lane.is_dead = True
                blockmap.lost(number)
                continue
            if now >= lane.silent_s:
                if notices_silence:
                    blockmap.silent(number)
                continue
            if lane.part is None:
                lane.part, lane.moved = blockmap.take(number, now), 0.0
                sent += lane.part.blocks if lane.part else 0
            if lane.part is None:
                continue
            before = int(lane.moved)
            lane.moved = min(float(lane.part.blocks), lane.moved + lane.rate * _TICK_S)
            if tells_blocks:
                for block in range(before, int(lane.moved)):
                    blockmap.came(number, lane.part.first + block)
            if lane.moved == lane.part.blocks:
                blockmap.done(number, lane.part, now)
                lane.part = None
        for late in blockmap.overdue(now):
            blockmap.silent(late)
    return blockmap, sent, now


_rates = st.floats(0.5, 500)


@settings(max_examples=150, deadline=None)
@given(
    blocks=st.integers(0, 3000), rates=st.lists(_rates, min_size=1, max_size=6), tells=st.booleans(),
    faults=st.lists(st.tuples(st.booleans(), st.floats(0.1, 30)), max_size=5), notices=st.booleans(),
)  # fmt: skip
def test_every_block_arrives(
    blocks: int, rates: list[float], tells: bool, faults: list[tuple[bool, float]], notices: bool
) -> None:
    lanes = [_Lane(rate) for rate in rates]
    for lane, (is_silent, at_s) in zip(lanes[1:], faults):
        lane.ends_s, lane.silent_s = (1e9, at_s) if is_silent else (at_s, 1e9)
    blockmap, sent, _ = _moved(blocks, lanes, tells, notices)
    assert blockmap.left == 0 and all(blockmap.is_here(block) for block in range(blocks))
    held = max(2, blocks // 100)
    assert blocks <= sent <= blocks + blockmap.twice + held * len(faults)
    assert blockmap.twice <= min(64, max(4, blocks * 2 // 100))


def test_healthy_connections_send_nothing_twice() -> None:
    for rates in ([100.0], [100.0, 100.0], [200.0, 150.0, 30.0], [1.0, 1.0, 1.0, 1.0]):
        blockmap, sent, took_s = _moved(512, [_Lane(rate) for rate in rates], False, True)
        assert (sent, blockmap.twice) == (512, 0)
        assert took_s < 1.2 * 512 / sum(rates) + 3


@pytest.mark.parametrize("notices", [True, False])
def test_a_dead_and_a_silent_route_cost_two_percent(notices: bool) -> None:
    """512 MiB by two routes of two connections. Nobody notices the silence but the tail."""
    for fault in ("ends_s", "silent_s"):
        lanes = [_Lane(50.0) for _ in range(4)]
        for lane in lanes[2:]:
            setattr(lane, fault, 1.0)
        _, sent, took_s = _moved(512, lanes, False, notices)
        assert sent <= 512 * 1.02
        assert took_s < 10


def test_ranges_follow_the_rate_of_their_connection() -> None:
    blockmap = BlockMap(20_000 * BLOCK_BYTES)
    assert blockmap.take("a", 0.0) == Range(0, 4)
    blockmap.done("a", Range(0, 4), 0.02)  # 200 blocks/s
    assert blockmap.take("a", 0.02) == Range(4, 64)
    assert blockmap.take("slow", 0.02) == Range(68, 4)
    blockmap.done("slow", Range(68, 4), 1.02)  # 4 blocks/s
    assert blockmap.take("slow", 1.02) == Range(72, 2)


def test_ranges_are_small_near_the_end() -> None:
    blockmap, now, counts = BlockMap(10_000 * BLOCK_BYTES), 0.0, []
    while (part := blockmap.take("a", now)) is not None:
        now += part.blocks / 1000
        blockmap.done("a", part, now)
        counts.append(part.blocks)
    assert max(counts) == 64 and counts[-1] == 1 and blockmap.is_done


def test_a_resumed_file_sends_the_rest() -> None:
    rng = random.Random(7)
    have = [(block, block) for block in range(300) if rng.random() < 0.5] + [(400, 511)]
    blockmap = BlockMap(512 * BLOCK_BYTES - 5, have)
    missing = {block for block in range(400) if (block, block) not in have}
    found = set()
    while (part := blockmap.take("a", 0.0)) is not None:
        found |= set(range(part.first, part.end))
        blockmap.done("a", part, 0.0)
    assert found == missing and blockmap.is_done
    with pytest.raises(ValueError):
        BlockMap(BLOCK_BYTES, [(0, 1)])


def test_blocks_that_were_lost_or_refused_come_again() -> None:
    blockmap = BlockMap(10 * BLOCK_BYTES)
    while (part := blockmap.take("a", 0.0)) is not None:
        blockmap.done("a", part, 0.0)
    blockmap.forget([(0, 4), (8, 9)])
    assert blockmap.left == 3 and not blockmap.is_here(5)
    blockmap.again([0])
    first = blockmap.take("a", 0.0)
    assert first == Range(0, 1) and blockmap.left == 4
    assert blockmap.take("a", 0.0) in (Range(5, 1), Range(5, 2))


def test_a_late_answer_counts() -> None:
    blockmap = BlockMap(4 * BLOCK_BYTES)
    part = blockmap.take("a", 0.0)
    assert part == Range(0, 2)
    rest = blockmap.take("b", 0.0)
    assert rest == Range(2, 1)
    blockmap.silent("a")
    assert blockmap.take("b", 0.0) == Range(0, 1)
    blockmap.done("a", part, 20.0)
    blockmap.done("b", rest, 20.0)
    assert blockmap.left == 1 and not blockmap.is_here(3)


def test_an_empty_file_has_no_blocks() -> None:
    assert BlockMap(0).is_done and BlockMap(0).take("a", 0.0) is None
