"""Blocks of one transfer at whoever sends them: READY -> SENT(route) -> STAGED -> freed (section 2; rules 4, 14)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from overlay_router.states import LEGAL_MOVES, Block

TAIL_BLOCKS = 64
TAIL_SHARE = 0.02


class IllegalMove(Exception):
    """A block was moved against the table in ``states``: a fault of the caller."""


@dataclass
class BlockTable:
    """State of every block and the routes that it was sent on, oldest first. Nothing in it is durable."""

    count: int
    state: list[Block] = field(default_factory=list)
    routes: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """All blocks begin READY."""
        self.state = self.state or [Block.READY] * self.count


def move(table: BlockTable, index: int, to: Block) -> None:
    """Move one block; staying where it is is allowed. Raises IllegalMove."""
    now = table.state[index]
    if now is not to and to not in LEGAL_MOVES[now]:
        raise IllegalMove(f"block {index}: {now.value} -> {to.value}")
    table.state[index] = to


def sent(table: BlockTable, index: int, route: int) -> None:
    """A block left by a route."""
    move(table, index, Block.SENT)
    table.routes.setdefault(index, []).append(route)


def staged(table: BlockTable, indices: Iterable[int]) -> None:
    """STAGED(tid, bitmap) came: these blocks are durable there. Raises IllegalMove for an unknown block."""
    for index in indices:
        if not 0 <= index < table.count:
            raise IllegalMove(f"block {index} of {table.count}")
        if table.state[index] is not Block.FREED:
            move(table, index, Block.STAGED)
            table.routes.pop(index, None)


def route_down(table: BlockTable, route: int) -> list[int]:
    """A dead route held nothing: blocks that were sent on no other one are READY again (rule 4). Returns them."""
    ready = []
    for index, used in list(table.routes.items()):
        used[:] = [other for other in used if other != route]
        if not used and table.state[index] is Block.SENT:
            del table.routes[index]
            move(table, index, Block.READY)
            ready.append(index)
    return ready


def reopened(table: BlockTable, already: Iterable[int]) -> None:
    """A new tid was granted: everything is READY but what its bitmap says is there."""
    table.routes.clear()
    for index, state in enumerate(table.state):
        if state is not Block.FREED:
            table.state[index] = Block.READY
    staged(table, already)


def ready(table: BlockTable) -> list[int]:
    """Blocks that may be sent."""
    return [index for index, state in enumerate(table.state) if state is Block.READY]


def tail(table: BlockTable, idle_route: int) -> list[int]:
    """Oldest unconfirmed blocks that an idle route duplicates once none is READY (rule 14)."""
    if Block.READY in table.state:
        return []
    limit = min(TAIL_BLOCKS, max(1, int(table.count * TAIL_SHARE)))
    return [index for index, used in table.routes.items() if idle_route not in used][:limit]


def complete(table: BlockTable) -> bool:
    """Whether every block is durable at the other side."""
    return all(state is Block.STAGED or state is Block.FREED for state in table.state)
