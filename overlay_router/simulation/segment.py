"""Both halves of a segment as the simulator runs them: who receives blocks and who sends them.

``step()`` stands after every durable action: the party may die there. Data that were not synced are lost then.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from overlay_router.rules.states import Kind, Op, Release, Result
from stageout.overlay.wire import blocks

if TYPE_CHECKING:
    from overlay_router.simulation.simulator import World

Key = tuple[int, int]
Tid = tuple[tuple[str, int], int]  # a number means something only in the store (party, epoch) that granted it
Message = tuple[Any, ...]
TERMINAL = "terminal"
ROUTES = 2


class Bug(enum.Enum):
    """Faults that the tests plant to see that the simulator finds them."""

    ACK_BEFORE_SYNC = "STAGED is sent before the data is synced"
    ACK_BEFORE_RECORD = "DONE is sent before the result is durable"
    FORGOTTEN_RESULT = "results are not durable"
    FREED_TOO_EARLY = "the custodian frees its bytes when it has sent them"
    NAME_BEFORE_NUMBER = "names are changed without a look at the operation's number"
    LOW_IGNORED = "an operation under the low-water mark is executed"
    LOW_PAST_FAILED = "the low-water mark passes a failure with unsettled dependents"
    AFTER_IGNORED = "the edges are not obeyed"
    EDGE_MISSING = "a directory's rename or delete does not wait for what is below it"
    TID_REUSED = "the counter of transfer numbers is not durable"
    RECOVERY_REPEATS = "recovery repeats every INTENT"
    CANCEL_OVERTAKES = "CANCELLED is final before the operation's own edges are"
    CUSTODY_WITHOUT_BLOCKS = "CUSTODY is granted before all blocks are there"
    CREDIT_IGNORED = "blocks are sent into a relay that has no free buffer"
    LOT_IGNORED = "a custodian takes data that found no lot"
    SPOOL_KEPT = "a custodian keeps the bytes of what is final"
    PASSED_TOO_EARLY = "STAGED is said of a passed block before the next hop has said it"
    FREED_IS_PASSED = "blocks are passed although their sender frees its bytes"


class Crash(Exception):
    """The party dies here."""


class Violation(Exception):
    """An invariant does not hold."""


def require(holds: bool, invariant: int, what: str) -> None:
    """Raise Violation naming the invariant (section 2 of the protocol) unless it holds."""
    if not holds:
        raise Violation(f"invariant {invariant}: {what}")


def key_of(op: Op) -> Key:
    """The operation's identity."""
    return op.origin, op.seq


class Staging:
    """One granted transfer: data in memory, synced data, durable bitmap."""

    __slots__ = ("bitmap", "key", "op", "sender", "synced", "unsynced")

    def __init__(self, op: Op, sender: str) -> None:
        """Begin empty."""
        self.op, self.key, self.sender = op, key_of(op), sender
        self.unsynced: dict[int, Any] = {}
        self.synced: dict[int, Any] = {}
        self.bitmap: set[int] = set()


class Party:
    """Something with a name, a disk and a way to die."""

    def __init__(self, world: World, name: str) -> None:
        """Begin with an empty disk."""
        self.world, self.name = world, name

    def step(self) -> None:
        """Between two durable actions: may raise Crash."""
        world = self.world
        if world.faulty and world.random() < world.crash_rate:
            raise Crash

    def ask_again(self, row: Row) -> None:
        """Blocks of an operation are needed that were passed, and are not here. Only custodians pass any."""
        raise AssertionError(f"{self.name} has passed no blocks of {row.op}")

    def send(self, to: str, *message: Any) -> None:
        """Hand a frame to the network."""
        self.world.send(self.name, to, message)


class Intake(Party):
    """The receiving half of a segment: tids, blocks, STAGED."""

    def __init__(self, world: World, name: str) -> None:
        """Begin a new store epoch."""
        super().__init__(world, name)
        self.epoch, self.next_tid = 0, 1
        self.staging: dict[Tid, Staging] = {}

    def restart_intake(self) -> None:
        """Lose the data that was not synced."""
        for held in self.staging.values():
            held.unsynced.clear()
        if self.world.bug is Bug.TID_REUSED:
            self.next_tid = 1

    def grant(self, op: Op, sender: str) -> None:
        """Answer OPEN with the live tid of this sender or with a new one that was never used."""
        for tid, held in self.staging.items():  # noqa: B007
            if held.key == key_of(op) and held.sender == sender:
                break
        else:
            tid = ((self.name, self.epoch), self.next_tid)
            self.next_tid += 1
            self.step()
            held = self.staging[tid] = Staging(op, sender)
        self.send(sender, "TID", key_of(op), tid, *self.listed(tid, held))

    def listed(self, tid: Tid, held: Staging) -> tuple[frozenset[int], int]:
        """The blocks that OPENED lists, and by which turn: a later one takes back those that it does not list."""
        return frozenset(held.bitmap), 0

    def on_block(self, tid: Tid, index: int, content: Any, sender: str, key: Key) -> bool:
        """Data -> fdatasync -> bitmap -> STAGED (invariant 3). Whether the transfer is complete."""
        held = self.staging.get(tid)
        if held is None:
            self.send(sender, "STALETID", key, tid)
            return False
        if index not in held.bitmap:
            held.unsynced[index] = content
            self.step()
            if self.world.bug is not Bug.ACK_BEFORE_SYNC:
                held.synced[index] = held.unsynced.pop(index)
            self.step()
            held.bitmap.add(index)
            self.step()
        for done in held.bitmap:
            require(held.synced.get(done) == (*held.key, done), 3, f"STAGED says block {done} of {held.key} is safe")
        self.send(sender, "STAGED", held.key, tid, frozenset(held.bitmap))
        return len(held.bitmap) == held.op.blocks

    def close(self, key: Key) -> None:
        """Forget every tid of an operation: what still comes for them is STALE."""
        for tid in [tid for tid, held in self.staging.items() if held.key == key]:
            del self.staging[tid]


@dataclass
class Row:
    """An operation at a holder. Durable except the part from ``to`` on."""

    op: Op
    data: set[int]
    release: Release = Release.DELIVERED
    cancel: bool = False
    result: Result | None = None
    settled: bool = False
    custodians: set[str] = field(default_factory=set)
    to: str = TERMINAL
    tid: Tid | None = None
    turn: int = 0
    passes: bool = False
    table: blocks.BlockTable | None = None


class Sender:
    """The sending half of a segment, shared by origin and custodian."""

    def __init__(self, party: Party) -> None:
        """Begin without operations."""
        self.party = party
        self.rows: dict[Key, Row] = {}

    def restart(self) -> None:
        """Lose what is volatile."""
        for row in self.rows.values():
            row.tid, row.table = None, None

    def push(self, row: Row) -> None:
        """Send what an unsettled operation needs next; everything may be repeated."""
        send, name, op = self.party.send, self.party.name, row.op
        if row.cancel:
            send(TERMINAL, "CANCEL", name, op)
        elif op.kind is not Kind.PUBLISH:
            send(row.to, "OP", name, op, None)
        elif row.tid is None or row.table is None:
            send(row.to, "OPEN", name, op, row.release)
        elif blocks.complete(row.table):
            send(row.to, "OP", name, op, row.tid)
        else:
            self._push_blocks(row, row.table)

    def _push_blocks(self, row: Row, table: blocks.BlockTable) -> None:
        world = self.party.world
        route = int(world.random() * ROUTES)
        if row.passes and not row.data.issuperset(blocks.ready(table)):
            self.party.ask_again(row)
            return
        for index in blocks.ready(table) or blocks.tail(table, (route,)):
            require(index in row.data, 2, f"block {index} of {key_of(row.op)} is needed and was freed")
            if world.credit(route):
                message = ("BLOCK", row.tid, index, (*key_of(row.op), index), self.party.name, key_of(row.op))
                blocks.sent(table, index, route)
                world.send(self.party.name, row.to, message, route)
        if world.random() < 0.5:  # PUBLISH leaves at once; the other side holds it until the bitmap is full
            self.party.send(row.to, "OP", self.party.name, row.op, row.tid)

    def route_down(self, route: int) -> None:
        """A relay died or fell silent."""
        for row in self.rows.values():
            if row.table is not None:
                blocks.carrier_down(row.table, route)

    def on_tid(self, key: Key, tid: Tid, bitmap: frozenset[int], turn: int = 0) -> None:
        """OPEN was granted; or, by a later turn, what it does not list is not there any more."""
        row = self.rows.get(key)
        if row is None or row.settled or not (row.data or row.passes) or tid[0][0] != row.to:
            return
        if row.tid is None or (row.tid == tid and turn > row.turn):
            row.tid, row.turn, row.table = tid, turn, blocks.BlockTable(row.op.blocks)
            blocks.reopened(row.table, bitmap)
            self.push(row)

    def on_staged(self, key: Key, tid: Tid, bitmap: frozenset[int], turn: int | None = None) -> None:
        """Blocks are durable at the other side, or, where a turn is named, further on, as long as that lasts."""
        row = self.rows.get(key)
        is_now = row is not None and turn in (None, row.turn)
        if row is not None and is_now and row.tid == tid and row.table is not None and not row.settled:
            blocks.staged(row.table, bitmap)
            if blocks.complete(row.table):
                self.push(row)

    def on_stale_tid(self, key: Key, tid: Tid) -> None:
        """The other side does not know this tid (any more): open again."""
        row = self.rows.get(key)
        if row is not None and row.tid == tid:
            row.tid, row.table = None, None

    def free(self, row: Row, final: bool) -> None:
        """Free the bytes; asserts invariant 2."""
        if row.data:
            row.data = set()
            row.tid, row.table = None, None
            self.party.world.freed(key_of(row.op), final)
