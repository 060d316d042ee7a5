"""Blocks of one transfer at whoever sends them: READY -> SENT(carrier) -> STAGED -> freed (rules 4 and 14). No I/O.

A receiver that fetches a file by several connections has such a table, too: SENT is then a block that was asked for,
STAGED one that is here.

A carrier is whatever a block can be lost with: a connection, or a whole route. Where a file is sent on while it still
comes in, its blocks begin AWAITED. A block may be cut: its parts leave with several carriers, and it is lost with any
of them.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

TAIL_BLOCKS = 64
TAIL_SHARE = 0.02
#: Parts of a block begin at multiples of this, and end there or with the block.
PART_BYTES = 64 * 1024


class Block(enum.Enum):
    """A block at whoever sends it."""

    AWAITED = "awaited"
    READY = "ready"
    SENT = "sent"
    STAGED = "staged"
    FREED = "freed"


LEGAL_MOVES: dict[Block, frozenset[Block]] = {
    Block.AWAITED: frozenset({Block.READY, Block.STAGED, Block.FREED}),
    Block.READY: frozenset({Block.AWAITED, Block.SENT, Block.STAGED, Block.FREED}),
    Block.SENT: frozenset({Block.AWAITED, Block.READY, Block.STAGED, Block.FREED}),
    Block.STAGED: frozenset({Block.READY, Block.FREED}),
    Block.FREED: frozenset(),
}


class IllegalMove(Exception):
    """A block was moved against the table above: a fault of the caller."""


class Part(NamedTuple):
    """Bytes of a block, from ``start`` to ``end``."""

    block: int
    start: int
    end: int


@dataclass
class BlockTable:
    """State of every block and the carriers that it was sent with, oldest first. Nothing in it is durable.

    :param queue: blocks that may be READY, in the order in which they go. :param open: how many are not yet STAGED.
    :param cut: blocks of which parts have left. :param rest: the block that is cut now, and where its rest begins.
    :param urgent: so many at its head go before all others.
    """

    count: int
    state: list[Block] = field(default_factory=list)
    carriers: dict[int, list[int]] = field(default_factory=dict)
    queue: deque[int] = field(default_factory=deque)
    open: int = 0
    cut: set[int] = field(default_factory=set)
    rest: tuple[int, int] | None = None
    urgent: int = 0

    def __post_init__(self) -> None:
        """All blocks begin READY."""
        self.state = self.state or [Block.READY] * self.count
        self.queue.extend(ready(self))
        self.open = sum(state in _OPEN for state in self.state)


_OPEN = frozenset({Block.AWAITED, Block.READY, Block.SENT})


#: States that a new transfer number does not change.
_STAYS = frozenset({Block.AWAITED, Block.FREED})


def move(table: BlockTable, index: int, to: Block) -> None:
    """Move one block; staying where it is is allowed. Raises IllegalMove."""
    now = table.state[index]
    if now is not to and to not in LEGAL_MOVES[now]:
        raise IllegalMove(f"block {index}: {now.value} -> {to.value}")
    table.open += (to in _OPEN) - (now in _OPEN)
    table.state[index] = to


def sent(table: BlockTable, index: int, carrier: int) -> None:
    """A block left with a carrier."""
    move(table, index, Block.SENT)
    table.carriers.setdefault(index, []).append(carrier)


def take(table: BlockTable, carrier: int) -> int | None:
    """The next READY block, SENT with this carrier from now on; None when there is none."""
    while table.queue:
        index = table.queue.popleft()
        table.urgent = max(0, table.urgent - 1)
        if table.state[index] is Block.READY:
            sent(table, index, carrier)
            return index
    return None


def take_run(table: BlockTable, carrier: int, most: int) -> tuple[int, int] | None:
    """READY blocks that lie behind each other, SENT with this carrier from now on: the first one, and how many.

    :param most: so many at most. :return: None when no block is READY.
    """
    first = take(table, carrier)
    if first is None:
        return None
    end = first + 1
    while end - first < most and table.queue and table.queue[0] == end and table.state[end] is Block.READY:
        take(table, carrier)
        end += 1
    return first, end - first


def take_part(table: BlockTable, carrier: int, most_bytes: int, block_bytes: int, size_bytes: int) -> Part | None:
    """The next part of a READY block, SENT with this carrier from now on; None when none is READY or has a rest.

    :param most_bytes: a multiple of PART_BYTES. :param size_bytes: of the file.
    """
    if table.rest is None:
        index = take(table, carrier)
        if index is None:
            return None
        table.cut.add(index)
        table.rest = index, 0
    index, start = table.rest
    if carrier not in table.carriers[index]:
        table.carriers[index].append(carrier)
    length = min(block_bytes, size_bytes - index * block_bytes)
    end = min(start + most_bytes, length)
    table.rest = (index, end) if end < length else None
    return Part(index, start, end)


def staged(table: BlockTable, indices: Iterable[int]) -> None:
    """STAGED(tid, bitmap) came: these blocks are durable there. Raises IllegalMove for an unknown block."""
    for index in indices:
        if not 0 <= index < table.count:
            raise IllegalMove(f"block {index} of {table.count}")
        if table.state[index] is not Block.FREED:
            move(table, index, Block.STAGED)
            table.carriers.pop(index, None)
            _uncut(table, index)


def await_all(table: BlockTable) -> None:
    """Nothing is here yet: each block may be sent once :func:`arrived` names it."""
    table.state = [Block.AWAITED] * table.count
    table.queue.clear()
    table.urgent = 0


def arrived(table: BlockTable, indices: Iterable[int], first: bool = False) -> None:
    """These blocks are here now; those that the other side has already need not be sent.

    :param first: they go before all others, in turn: they are in memory, which is wanted back.
    """
    for index in indices:
        if table.state[index] is Block.AWAITED:
            move(table, index, Block.READY)
            table.queue.insert(table.urgent if first else len(table.queue), index)
            table.urgent += first


def went(table: BlockTable, indices: Iterable[int], carrier: int) -> None:
    """These blocks were sent with a carrier as they came, without ever being READY."""
    for index in indices:
        if table.state[index] is Block.AWAITED:
            move(table, index, Block.READY)
        if table.state[index] in (Block.READY, Block.SENT):
            sent(table, index, carrier)


def lacking(table: BlockTable, indices: Iterable[int]) -> None:
    """These blocks are not here any more: they are AWAITED again, but for those that the other side has."""
    for index in indices:
        if table.state[index] in (Block.READY, Block.SENT):
            move(table, index, Block.AWAITED)
            table.carriers.pop(index, None)
            _uncut(table, index)


def carrier_down(table: BlockTable, carrier: int) -> list[int]:
    """A dead carrier held nothing: blocks that were sent with no other one are READY again (rule 4). Returns them.

    So is a block of which it had a part: it goes again, all of it. They go last: some have arrived, and their STAGED
    overtakes them.
    """
    back = []
    for index, used in list(table.carriers.items()):
        is_torn = index in table.cut and carrier in used
        used[:] = [other for other in used if other != carrier]
        if (is_torn or not used) and table.state[index] is Block.SENT:
            del table.carriers[index]
            _uncut(table, index)
            move(table, index, Block.READY)
            back.append(index)
    table.queue.extend(back)
    return back


def _uncut(table: BlockTable, index: int) -> None:
    table.cut.discard(index)
    if table.rest is not None and table.rest[0] == index:
        table.rest = None


def reopened(table: BlockTable, already: Iterable[int]) -> None:
    """A new tid was granted: everything that is here is READY but what its bitmap says is there."""
    table.carriers.clear()
    table.cut.clear()
    table.rest = None
    for index, state in enumerate(table.state):
        if state not in _STAYS:
            move(table, index, Block.READY)
    staged(table, already)
    table.queue, table.urgent = deque(ready(table)), 0


def had(table: BlockTable) -> bytes:
    """A byte for each block: 1 for those that are durable at the other side."""
    return bytes(state is Block.STAGED for state in table.state)


def forgotten(table: BlockTable, indices: Iterable[int]) -> list[int]:
    """The other side had these blocks, and has not any more: they are READY again. Returns them."""
    back = [index for index in indices if table.state[index] is Block.STAGED]
    for index in back:
        move(table, index, Block.READY)
    table.queue.extend(back)
    return back


def ready(table: BlockTable) -> list[int]:
    """Blocks that may be sent."""
    return [index for index, state in enumerate(table.state) if state is Block.READY]


def tail(table: BlockTable, idle: Collection[int]) -> list[int]:
    """Oldest unconfirmed blocks that idle carriers duplicate once none is READY (rule 14).

    At most 64 blocks, or 2 % of a file where that is more: a file of few blocks may be duplicated whole, or a slow
    route that has one of them makes it late.
    """
    if any(table.state[index] is Block.READY for index in table.queue):
        return []
    limit = max(TAIL_BLOCKS, int(table.count * TAIL_SHARE))
    found = (index for index, used in table.carriers.items() if not any(carrier in used for carrier in idle))
    return [index for index, _ in zip(found, range(limit))]


def under_way(table: BlockTable, carriers: Collection[int]) -> int:
    """Return how many blocks that went with one of these carriers are not yet STAGED."""
    return sum(any(carrier in carriers for carrier in used) for used in table.carriers.values())


def complete(table: BlockTable) -> bool:
    """Tell whether every block is durable at the other side."""
    return table.open == 0
