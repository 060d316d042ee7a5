"""Which blocks of a file go to which connection. Pure: the caller brings the time. The same for uploads and downloads.

A connection takes one range after the other. A range is half a second of the rate of its connection, from 1 to 64
blocks of 1 MiB, and smaller near the end and in small files, so that a dead connection costs little. When no range is
left, idle connections take those again that are late, within 2 % of the file (:func:`tail`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

from stageout.overlay.rules.silence import ANSWERS, LEAST_ANSWER_S, tail

BLOCK_BYTES = 1 << 20
_MOST_BLOCKS, _FIRST_BLOCKS, _LEAST_BLOCKS = 64, 4, 2
#: Seconds of its rate that a connection has before it.
_AHEAD_S = 0.5
#: Share of the file that one connection holds at most (two blocks of a small file).
_HELD = 0.01
#: An unanswered range is late after so many times the median answer time, and at least so long (seconds).
_TAIL, _LEAST_TAIL_S = 3.0, 0.5
_FREE, _OUT, _HERE = 0, 1, 2


class Range(NamedTuple):
    """Blocks first, first + 1, ... of a file that one connection moves."""

    first: int
    blocks: int

    @property
    def end(self) -> int:
        """Return the block behind the last one."""
        return self.first + self.blocks


class _Held:
    """A range in the hands of a connection."""

    def __init__(self, lane: Hashable, part: Range, now: float) -> None:
        self.lane, self.part, self.since = lane, part, now
        #: Block that comes next; the idle may have it, too; its blocks are free for others.
        self.at, self.is_doubled, self.is_returned = part.first, False, False


class BlockMap:
    """The blocks of one file. Not for several threads at once: the caller has a lock.

    :param have: ranges (first and last block) that are at the other side already.
    :ivar twice: blocks that were given out again while another connection had them.
    """

    def __init__(self, size_bytes: int, have: Iterable[tuple[int, int]] = ()) -> None:
        self.size_bytes = size_bytes
        self.blocks = -(-size_bytes // BLOCK_BYTES)
        self._states = bytearray(self.blocks)
        self._left, self._from = self.blocks, 0
        self._held: list[_Held] = []
        self._rates: dict[Hashable, float] = {}
        self._answers: list[float] = []
        self.twice = 0
        self.resume(have)

    @property
    def is_done(self) -> bool:
        """Tell whether every block is at the other side."""
        return not self._left

    @property
    def left(self) -> int:
        """Return the number of blocks that are not at the other side."""
        return self._left

    def is_here(self, block: int) -> bool:
        """Tell whether a block is at the other side."""
        return self._states[block] == _HERE

    def resume(self, have: Iterable[tuple[int, int]]) -> None:
        """Take blocks that are at the other side, as it tells. :raises ValueError: it has no such blocks."""
        for first, last in have:
            if not 0 <= first <= last < self.blocks:
                raise ValueError(f"blocks {first} to {last} of {self.blocks}")
            self._arrive(Range(first, last + 1 - first))

    def forget(self, have: Iterable[tuple[int, int]]) -> None:
        """Take blocks as lost at the other side, but for those that it has."""
        kept = bytearray(self.blocks)
        for first, last in have:
            if not 0 <= first <= last < self.blocks:
                raise ValueError(f"blocks {first} to {last} of {self.blocks}")
            kept[first : last + 1] = b"\1" * (last + 1 - first)
        states = (_HERE if one else _FREE for one in kept)
        self._states = bytearray(states)
        self._left, self._from = self._states.count(_FREE), 0
        for held in self._held:
            self._mark(held)

    def again(self, blocks: Iterable[int]) -> None:
        """Blocks that the other side has refused are free once more."""
        for block in blocks:
            if self._states[block] == _HERE:
                self._left += 1
            self._states[block] = _FREE
            self._from = min(self._from, block)

    def take(self, lane: Hashable, now: float) -> Range | None:
        """Return the next range for a connection, None when there is none for it now."""
        part = self._free(self._length(lane)) or self._late(lane, now)
        if part is not None:
            self.claim(lane, part, now)
        return part

    def begun(self, lane: Hashable, part: Range, now: float) -> None:
        """A range that was taken in advance begins to move."""
        for held in self._held:
            if (held.lane, held.part) == (lane, part):
                held.since = now

    def claim(self, lane: Hashable, part: Range, now: float) -> None:
        """A connection has this range."""
        held = _Held(lane, part, now)
        self._held.append(held)
        self._mark(held)

    def came(self, lane: Hashable, block: int) -> bool:
        """Take one block of a download. False: another connection has brought it before."""
        is_new = self._states[block] != _HERE
        self._arrive(Range(block, 1))
        for held in self._held:
            if held.lane == lane and held.at == block:
                held.at += 1
        return is_new

    def done(self, lane: Hashable, part: Range, now: float) -> None:
        """All of a range is at the other side."""
        for held in [one for one in self._held if (one.lane, one.part) == (lane, part)]:
            self._held.remove(held)
            took = max(now - held.since, 1e-4)
            self._answers = [*self._answers[-31:], took]
            rate, before = part.blocks / took, self._rates.get(lane)
            self._rates[lane] = rate if before is None else (rate + before) / 2
        self._arrive(part)

    def lost(self, lane: Hashable) -> None:
        """A connection has ended: others take what it had."""
        for held in [one for one in self._held if one.lane == lane]:
            self._held.remove(held)
            self._give_back(held)
        self._rates.pop(lane, None)

    def silent(self, lane: Hashable) -> None:
        """Nothing moves on a connection: others may take its ranges, and a late answer still counts."""
        for held in self._held:
            if held.lane == lane and not held.is_returned:
                held.is_returned = True
                self._give_back(held)

    def overdue(self, now: float) -> list[Hashable]:
        """Return the connections whose answer is late."""
        wait = max(LEAST_ANSWER_S, ANSWERS * self._median_s)
        return [held.lane for held in self._held if not held.is_returned and now - held.since > wait]

    @property
    def _median_s(self) -> float:
        return sorted(self._answers)[len(self._answers) // 2] if self._answers else 0.0

    def holds(self, lane: Hashable) -> bool:
        """Tell whether a connection has a range."""
        return any(held.lane == lane for held in self._held)

    def _length(self, lane: Hashable) -> int:
        """Return how many blocks a connection gets."""
        rate = self._rates.get(lane)
        wanted = int(rate * _AHEAD_S) if rate is not None else _FIRST_BLOCKS
        lanes = len({held.lane for held in self._held} | {lane})
        bound = max(_LEAST_BLOCKS, int(self.blocks * _HELD))
        return max(1, min(wanted, bound, _MOST_BLOCKS, self._left // (2 * lanes)))

    def _free(self, most: int) -> Range | None:
        first = self._states.find(_FREE, self._from)
        if first < 0:
            self._from = self.blocks
            return None
        self._from, end = first, first + 1
        while end < min(self.blocks, first + most) and self._states[end] == _FREE:
            end += 1
        return Range(first, end - first)

    def _late(self, lane: Hashable, now: float) -> Range | None:
        """Return the oldest range of another connection if it is late, as far as it may be sent twice."""
        wait = max(_LEAST_TAIL_S, _TAIL * self._median_s)
        room = tail(self.blocks, self.twice)
        for held in sorted(self._held, key=lambda one: one.since):
            missing = [block for block in range(held.at, held.part.end) if self._states[block] != _HERE]
            if held.lane == lane or held.is_doubled or not missing or now - held.since < wait:
                continue
            # from its end on: its own connection comes to these last
            first = max(missing[0], missing[-1] + 1 - room)
            if room <= 0:
                return None
            held.is_doubled = first == missing[0]
            part = Range(first, missing[-1] + 1 - first)
            self.twice += part.blocks
            return part
        return None

    def _mark(self, held: _Held) -> None:
        for block in range(held.at, held.part.end):
            if self._states[block] == _FREE and not held.is_returned:
                self._states[block] = _OUT

    def _give_back(self, held: _Held) -> None:
        others = [one.part for one in self._held if one is not held and not one.is_returned]
        for block in range(held.part.first, held.part.end):
            if self._states[block] == _OUT and not any(one.first <= block < one.end for one in others):
                self._states[block] = _FREE
                self._from = min(self._from, block)

    def _arrive(self, part: Range) -> None:
        before = self._states[part.first : part.end].count(_HERE)
        self._states[part.first : part.end] = bytes([_HERE]) * part.blocks
        self._left -= part.blocks - before
