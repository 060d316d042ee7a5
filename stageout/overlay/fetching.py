"""Which blocks of a file each connection asks for, where several fetch it. No I/O.

A connection asks for a range of blocks at a time: large ones while much is left, since each question costs something,
and small ones at the end, so that all connections end at about the same time (guided self-scheduling, Polychronopoulos
and Kuck, 1987). What a connection had asked for when it was lost is asked for again by others; and so, when nothing
else is left, is what slow ones still owe.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from stageout.wire import blocks
from stageout.wire.blocks import BlockTable
from stageout.wire.overlay import BLOCK_BYTES

#: Of several connections each asks for half of its part of what is left, and for so many blocks at most; one by itself
#: for no more than these, since others may join it.
_PARTS, _MOST_BLOCKS, _MOST_ALONE = 2, 256, 64


class Ask(NamedTuple):
    """A range of blocks."""

    first: int
    blocks: int

    @property
    def end(self) -> int:
        """The block behind it."""
        return self.first + self.blocks


class Plan:
    """The blocks of one version of a file: which are here, and who was asked for the others.

    :ivar received_bytes: of those that are here.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.received_bytes = 0
        self._table = BlockTable(-(-size_bytes // BLOCK_BYTES))
        self._coming: set[int] = set()

    def length(self, block: int) -> int:
        """Of a block, in bytes."""
        return min(BLOCK_BYTES, self.size_bytes - block * BLOCK_BYTES)

    @property
    def left(self) -> int:
        """So many blocks, about, nobody was asked for yet."""
        return len(self._table.queue)

    def take(self, carrier: int, carriers: int, most: int = _MOST_BLOCKS, least: int = 1) -> Ask | None:
        """The next range that nobody was asked for, for a connection; None when there is none.

        :param carriers: how many connections there are. :param most: blocks, at most. :param least: no fewer are worth
            a question, as long as there are so many.
        """
        part = -(-self.left // (_PARTS * carriers)) if carriers > 1 else min(self.left, _MOST_ALONE)
        found = blocks.take_run(self._table, carrier, max(1, min(max(part, least), most, _MOST_BLOCKS)))
        return Ask(*found) if found else None

    def begin(self, carrier: int, most: int) -> Ask:
        """What the first connection has asked for before anything was known of the file: its first blocks."""
        found = blocks.take_run(self._table, carrier, most)
        return Ask(*found) if found else Ask(0, 0)

    def again(self, carrier: int, mine: Collection[int], slow: Collection[int]) -> Ask | None:
        """A block that others were asked for, to be asked for once more when nothing else is left; None: none.

        :param mine: connections of the same route that are not slow, this one too. While these wait for something
            themselves, only what nobody but slow ones was asked for comes again.
        """
        found = blocks.tail(self._table, mine)
        if blocks.under_way(self._table, mine):
            found = [block for block in found if set(slow).issuperset(self._table.carriers[block])]
        if not found:
            return None
        blocks.sent(self._table, found[0], carrier)
        return Ask(found[0], 1)

    def once_more(self, carrier: int, block: int) -> Ask | None:
        """A block that one other was asked for, to be asked for here, too; None: it is here, or several were."""
        if self.left or len(self._table.carriers.get(block, ())) != 1:
            return None
        blocks.sent(self._table, block, carrier)
        return Ask(block, 1)

    def came(self, block: int) -> bool:
        """A block has come: whether it is to be written. Then :meth:`written` follows, and no other copy is taken."""
        if block in self._coming or self._table.state[block] is blocks.Block.STAGED:
            return False
        self._coming.add(block)
        return True

    def written(self, block: int) -> None:
        """A block that came is in the file."""
        self._coming.discard(block)
        blocks.staged(self._table, [block])
        self.received_bytes += self.length(block)

    def lost(self, carrier: int) -> None:
        """A connection has ended: what only it was asked for is for others, and first: it may be damaged there."""
        self._table.queue.rotate(len(blocks.carrier_down(self._table, carrier)))

    @property
    def is_whole(self) -> bool:
        """Whether every block is in the file."""
        return blocks.complete(self._table)
