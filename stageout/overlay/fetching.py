"""Which blocks of a file each connection asks for, where several fetch it. No I/O.

A connection asks for a range of blocks at a time: large ones while much is left, since each question costs something,
and small ones at the end, so that all connections end at about the same time (guided self-scheduling, Polychronopoulos
and Kuck, 1987). The parts that a lost connection had asked for are asked for again by other connections. When nothing
else is left, so are the parts that slow connections still owe. Where a block by itself takes long, the last ones come
in parts, each by whichever connection is idle.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from stageout.overlay.wire import blocks
from stageout.overlay.wire.blocks import PART_BYTES, BlockTable
from stageout.overlay.wire.messages import BLOCK_BYTES

#: Of several connections each asks for half of its part of what is left, and for so many blocks at most; one by itself
#: for no more than these, since others may join it.
_PARTS, _MOST_BLOCKS, _MOST_ALONE = 2, 256, 64
#: Of a block that is cut, in place of a connection: its parts are lost with theirs, the block is not.
_CUT = -1
#: A part that would only come sooner from another connection is not asked for there when so much of the file, or a
#: block where that is more, has come twice. A connection brings what it owes in order, and others begin with the last
#: of that, so most of what is asked for twice comes once.
_TWICE = 0.02


class Ask(NamedTuple):
    """A range of blocks, or a part of one block: its bytes from ``start`` to ``stop``."""

    first: int
    blocks: int
    start: int = 0
    stop: int = 0

    @property
    def end(self) -> int:
        """The block behind it."""
        return self.first + self.blocks

    @property
    def is_part(self) -> bool:
        """Tell whether it is less than a block."""
        return self.stop > 0

    def each(self, first: int = 0) -> Iterator[tuple[Ask, int]]:
        """The messages that come as frames of their own, and their most bytes. :param first: none before this."""
        if self.is_part:
            yield self, self.stop - self.start
            return
        for block in range(max(self.first, first), self.end):
            yield Ask(block, 1), BLOCK_BYTES


class _Cut:
    """A block that comes in parts. Its units begin at multiples of PART_BYTES.

    :ivar asked: connections that were asked for each unit. :ivar here: whether it has come.
    """

    def __init__(self, size_bytes: int) -> None:
        self.data = memoryview(bytearray(size_bytes))
        count = -(-size_bytes // PART_BYTES)
        self.asked: list[list[int]] = [[] for _ in range(count)]
        self.here = [False] * count

    @property
    def left(self) -> int:
        """Units that nobody was asked for."""
        return sum(not asked and not here for asked, here in zip(self.asked, self.here))

    @property
    def here_bytes(self) -> int:
        """The bytes that have come."""
        last_bytes = len(self.data) - (len(self.here) - 1) * PART_BYTES
        return sum(self.here[:-1]) * PART_BYTES + self.here[-1] * last_bytes

    def units(self, ask: Ask) -> range:
        """Those of a part."""
        return range(ask.start // PART_BYTES, -(-ask.stop // PART_BYTES))

    def part(self, block: int, carrier: int, wanted: Collection[int], most_bytes: int = BLOCK_BYTES) -> Ask | None:
        """The first of these units that lie behind each other, asked for by this one; None: there are none."""
        if not wanted:
            return None
        end = first = min(wanted)
        while end in wanted and end - first < max(1, most_bytes // PART_BYTES):
            self.asked[end].append(carrier)
            end += 1
        return Ask(block, 1, first * PART_BYTES, min(end * PART_BYTES, len(self.data)))


class Plan:
    """The blocks of one version of a file: which are here, and who was asked for the others.

    :ivar received_bytes: of those that are here. :ivar twice_bytes: that have come though they were here.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.received_bytes = self.twice_bytes = 0
        self._table = BlockTable(-(-size_bytes // BLOCK_BYTES))
        self._coming: set[int] = set()
        self._cut: dict[int, _Cut] = {}

    def length(self, block: int) -> int:
        """Of a block, in bytes."""
        return min(BLOCK_BYTES, self.size_bytes - block * BLOCK_BYTES)

    @property
    def left(self) -> int:
        """So many blocks, about, nobody was asked for yet."""
        return len(self._table.queue)

    @property
    def has_parts(self) -> bool:
        """Tell whether there are parts that nobody was asked for."""
        return any(cut.left for cut in self._cut.values())

    @property
    def left_bytes(self) -> int:
        """The same in bytes, with the parts of blocks that are cut."""
        return self.left * BLOCK_BYTES + sum(cut.left for cut in self._cut.values()) * PART_BYTES

    def take(self, carrier: int, carriers: int, most: int = _MOST_BLOCKS, least: int = 1) -> Ask | None:
        """The next range that nobody was asked for, for a connection; None when there is none.

        :param carriers: how many connections there are. :param most: blocks, at most. :param least: no fewer are worth
            a question, as long as there are so many.
        """
        part = -(-self.left // (_PARTS * carriers)) if carriers > 1 else min(self.left, _MOST_ALONE)
        found = blocks.take_run(self._table, carrier, max(1, min(max(part, least), most, _MOST_BLOCKS)))
        return Ask(*found) if found else self._take_cut(carrier)

    def _take_cut(self, carrier: int) -> Ask | None:
        """A block of which nobody was asked for some parts, for a connection that brings whole ones only."""
        for block, cut in self._cut.items():
            if cut.left:
                for asked in cut.asked:
                    asked.append(carrier)
                blocks.sent(self._table, block, carrier)
                return Ask(block, 1)
        return None

    def take_part(self, carrier: int, most_bytes: int) -> Ask | None:
        """The next part of a block that nobody was asked for; None when there is none.

        :param most_bytes: at least PART_BYTES.
        """
        for block, cut in self._cut.items():
            wanted = [unit for unit, asked in enumerate(cut.asked) if not asked and not cut.here[unit]]
            if wanted:
                return cut.part(block, carrier, wanted, most_bytes)
        found = blocks.take(self._table, _CUT)
        if found is None:
            return None
        cut = self._cut[found] = _Cut(self.length(found))
        return cut.part(found, carrier, range(len(cut.here)), most_bytes)

    def begin(self, carrier: int, most: int) -> Ask:
        """The first blocks of a file, which the first connection asks for before anything is known of the file."""
        found = blocks.take_run(self._table, carrier, most)
        return Ask(*found) if found else Ask(0, 0)

    def again(self, carrier: int, mine: Collection[int], slow: Collection[int], parts: bool = False) -> Ask | None:
        """A block that others were asked for, to be asked for once more when nothing else is left; None: none.

        :param mine: connections of the same route that are not slow, this one too. While these wait for something
            themselves, only what nobody but slow ones was asked for comes again. :param parts: it may be a part of one.
        """
        tail = blocks.tail(self._table, mine)
        found = [block for block in tail if block not in self._cut and block not in self._coming]
        must_be_slow = self._waits(mine)
        if must_be_slow:
            found = [block for block in found if set(slow).issuperset(self._table.carriers[block])]
        if found:
            blocks.sent(self._table, found[0], carrier)
            return Ask(found[0], 1)
        if self.left_bytes or not parts:
            return None
        return self._part_again(carrier, mine, slow if must_be_slow else None)

    def _waits(self, mine: Collection[int]) -> bool:
        """Tell whether these connections wait for something."""
        parts = (asked for cut in self._cut.values() for asked, here in zip(cut.asked, cut.here) if not here)
        return bool(blocks.under_way(self._table, mine)) or any(one in mine for asked in parts for one in asked)

    def _part_again(self, carrier: int, mine: Collection[int], slow: Collection[int] | None) -> Ask | None:
        """Parts of a block that none of ``mine`` was asked for, and none but slow ones where these are said."""
        for block, cut in self._cut.items():
            wanted = [
                unit for unit, asked in enumerate(cut.asked)
                if not cut.here[unit] and not set(mine).intersection(asked)
                and (slow is None or set(slow).issuperset(asked))
            ]  # fmt: skip
            if wanted:
                return cut.part(block, carrier, wanted)
        return None

    def once_more(self, carrier: int, late: Ask, most_bytes: int = 0) -> Ask | None:
        """A part that another connection was asked for, to be asked for here, too; None: it is here, or is not to be
        had twice.

        :param late: a block, or a part of one. :param most_bytes: no more than such a part; 0: whole blocks only.
        """
        if self.left_bytes or (late.is_part and not most_bytes):
            return None
        cut = self._cut.get(late.first)
        if late.is_part and cut is not None:
            wanted = [unit for unit in cut.units(late) if not cut.here[unit] and len(cut.asked[unit]) == 1]
            return cut.part(late.first, carrier, wanted, most_bytes) if self._may_be_twice else None
        if late.is_part or len(self._table.carriers.get(late.first, ())) != 1 or not self._may_be_twice:
            return None
        if not most_bytes:
            blocks.sent(self._table, late.first, carrier)
            return Ask(late.first, 1)
        blocks.sent(self._table, late.first, _CUT)
        self._cut[late.first] = _Cut(self.length(late.first))
        return self.take_part(carrier, most_bytes)

    @property
    def _may_be_twice(self) -> bool:
        return self.twice_bytes <= max(BLOCK_BYTES, int(self.size_bytes * _TWICE))

    def came(self, block: int) -> bool:
        """A block has come: whether it is to be written. Then :meth:`written` follows, and no other copy is taken."""
        if block in self._coming or self._table.state[block] is blocks.Block.STAGED:
            self.twice_bytes += self.length(block)
            return False
        self._coming.add(block)
        self._cut.pop(block, None)
        return True

    def part_came(self, ask: Ask, data: memoryview) -> memoryview | None:
        """A part has come. The whole block, when this was the last one that was missing: it is to be written."""
        cut = self._cut.get(ask.first)
        self.twice_bytes += len(data) - self.new_bytes(ask)
        if cut is None:
            return None
        cut.data[ask.start : ask.stop] = data
        for unit in cut.units(ask):
            cut.here[unit] = True
        return cut.data if all(cut.here) and self.came(ask.first) else None

    def new_bytes(self, ask: Ask) -> int:
        """Of what has come, what was not here before; to be asked before it is noted."""
        cut = self._cut.get(ask.first)
        if not ask.is_part:
            return self.length(ask.first) - (cut.here_bytes if cut else 0)
        wanted = [unit for unit in cut.units(ask) if not cut.here[unit]] if cut else []
        return sum(min(PART_BYTES, ask.stop - unit * PART_BYTES) for unit in wanted)

    def written(self, block: int) -> None:
        """A block that came is in the file."""
        self._coming.discard(block)
        blocks.staged(self._table, [block])
        self.received_bytes += self.length(block)

    def lost(self, carrier: int) -> None:
        """A connection has ended: what only it was asked for is for others, and first: it may be damaged there."""
        self._table.queue.rotate(len(blocks.carrier_down(self._table, carrier)))
        for asked in (asked for cut in self._cut.values() for asked in cut.asked):
            asked[:] = [other for other in asked if other != carrier]

    @property
    def is_whole(self) -> bool:
        """Tell whether every block is in the file."""
        return blocks.complete(self._table)
