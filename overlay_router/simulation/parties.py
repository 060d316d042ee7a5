"""Origin, custodian and terminal as the simulator runs them: the pure core plus disks and deaths.

Fields marked "volatile" are lost at a restart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from overlay_router.rules import custody, lots, names, terminal
from overlay_router.rules.states import Kind, Op, Outcome, Release, Result
from overlay_router.rules.terminal import Step
from overlay_router.simulation.segment import (
    TERMINAL,
    Bug,
    Intake,
    Key,
    Message,
    Party,
    Row,
    Sender,
    Staging,
    Tid,
    key_of,
    require,
)
from stageout.overlay.wire import graph

if TYPE_CHECKING:
    from overlay_router.simulation.simulator import World

CANCELLING = "cancelling"


class Origin(Party):
    """Makes numbers, keeps the ledger and the graph, raises LOW."""

    def __init__(self, world: World, name: str, number: int) -> None:
        """Begin at number 1."""
        super().__init__(world, name)
        self.number, self.next_seq, self.low = number, 1, 0
        self.sender = Sender(self)

    def restart(self) -> None:
        """Come back with what was durable."""
        self.sender.restart()
        for row in self.sender.rows.values():
            if row.settled:
                self.sender.free(row, final=True)

    def unsettled(self) -> dict[int, Op]:
        """The inputs of the graph."""
        return {key[1]: row.op for key, row in self.sender.rows.items() if not row.settled}

    def create(self, wish: Op) -> bool:
        """Give an operation its number and its edges. False: it must wait (too many edges)."""
        world, unsettled = self.world, self.unsettled()
        after = graph.edges(wish, unsettled)
        if world.bug is Bug.EDGE_MISSING and wish.kind in graph.SUBTREE:
            after = tuple(seq for seq in after if unsettled[seq].path in graph.touched(wish))
        if graph.must_wait(after):
            return False
        op = wish._replace(origin=self.number, seq=self.next_seq, after=after, expires=world.expires)
        self.next_seq += 1
        release = Release.CUSTODY if world.random() < 0.4 else Release.DELIVERED
        self.sender.rows[key_of(op)] = row = Row(op, set(range(op.blocks)), release)
        row.to = world.custodian_or_terminal()
        world.created[key_of(op)] = op
        return True

    def tick(self) -> None:
        """Repeat what is outstanding; sometimes patience runs out."""
        for row in list(self.sender.rows.values()):
            if row.settled:
                continue
            if row.custodians and self.world.random() < 0.7:
                self.send(TERMINAL, "STATUS", self.name, row.op)
                continue
            if self.world.random() < 0.3:
                row.to, row.tid, row.table = TERMINAL, None, None
            if row.data or row.op.kind is not Kind.PUBLISH or row.cancel:
                self.sender.push(row)
            self.send(TERMINAL, "STATUS", self.name, row.op)
        self.send(TERMINAL, "LOW", self.number, self.low)

    def handle(self, message: Message) -> None:
        """One frame."""
        kind, key = message[0], message[1]
        sender = self.sender
        row = sender.rows.get(key)
        if row is None or row.settled:
            return
        if kind == "TID":
            sender.on_tid(*message[1:])
        elif kind == "STAGED":
            sender.on_staged(*message[1:])
        elif kind == "STALETID":
            sender.on_stale_tid(*message[1:])
        elif kind == "NOSPACE":
            row.to = TERMINAL
        elif kind == "CUSTODY":
            self._custody(row, message[2])
        elif kind == "STALE":
            require(False, 6, f"{key} is not settled at its origin but under the low-water mark")
        else:
            self._settle(row, message[2])

    def _custody(self, row: Row, custodian: str) -> None:
        row.custodians.add(custodian)
        self.step()
        if custody.may_free(row.release, 1, len(row.custodians), final=False):
            self.sender.free(row, final=False)

    def _settle(self, row: Row, result: Result) -> None:
        outcome = custody.verdict_at_expiry(row.release, len(row.custodians), result.outcome)
        row.result, row.settled = result._replace(outcome=outcome), True
        self.step()
        self.sender.free(row, final=True)
        outcomes = {key[1]: other.result.outcome for key, other in self.sender.rows.items() if other.result}
        unsettled = {} if self.world.bug is Bug.LOW_PAST_FAILED else self.unsettled()
        self.low = graph.low_water(self.low, outcomes, unsettled)
        self.send(TERMINAL, "LOW", self.number, self.low)


class Custodian(Intake):
    """Spools under a lot, or passes blocks on unwritten; answers CUSTODY, then delivers.

    Frames of one connection come in their order; here turns are numbers instead, so that a late one is known.
    """

    def __init__(self, world: World, name: str) -> None:
        """Begin with an empty spool."""
        super().__init__(world, name)
        self.sender = Sender(self)
        self.spool = lots.Spool(8)
        self.keeps: set[Tid] = set()
        self.turns = 0
        self.turn: dict[Tid, int] = {}
        self.passed: dict[Tid, set[int]] = {}  # volatile, as the next one
        self.early: dict[Key, Tid] = {}

    def restart(self) -> None:
        """Come back with what was durable."""
        self.restart_intake()
        self.sender.restart()
        self.passed.clear()
        self.early.clear()
        for tid in self.staging:
            self._begin_anew(tid)
        for row in list(self.sender.rows.values()):
            if row.settled:
                self._release(row)
            elif row.passes:
                self.ask_again(row)

    def lose_disk(self) -> None:
        """A new disk: a new store epoch."""
        self.epoch += 1
        self.next_tid = 1
        self.staging.clear()
        self.passed.clear()
        self.early.clear()
        self.sender.rows.clear()
        self.spool.lots.clear()

    def tick(self) -> None:
        """Repeat what is outstanding."""
        for row in list(self.sender.rows.values()):
            if not row.settled:
                self.sender.push(row)
                if self.world.bug is Bug.FREED_TOO_EARLY and row.table is not None:
                    self.sender.free(row, final=False)

    def expire_lots(self) -> None:
        """Leases of transfers that nobody goes on with run out."""
        for key in lots.expire(self.spool, self.world.now + lots.LEASE_S + 1):
            self.close(key)  # type: ignore[arg-type]

    def handle(self, message: Message) -> None:
        """One frame."""
        kind = message[0]
        if kind == "OPEN":
            self._open(message[1], message[2], message[3])
        elif kind == "BLOCK" and self._passes(*message[1:]):
            pass
        elif kind == "BLOCK":
            self.on_block(*message[1:])
            stored = sum(len(held.synced) for held in self.staging.values())
            require(
                stored <= lots.reserved_bytes(self.spool) <= lots.usable_bytes(self.spool), 4, "spool over its lots"
            )
        elif kind == "OP":
            self._take(*message[1:])
        elif kind == "TID":
            self.early[message[1]] = message[2]
            self.sender.on_tid(*message[1:])
        elif kind == "STAGED":
            self._pass(message[1], message[2], message[3])
            self.sender.on_staged(*message[1:])
        elif kind == "STALETID":
            self.early.pop(message[1], None)
            self.sender.on_stale_tid(*message[1:])
        elif kind in ("RESULT", "STALE"):
            self._settle(message[1], message[2] if kind == "RESULT" else None)

    def _passes(self, tid: Tid, index: int, content: Any, sender: str, key: Key) -> bool:
        """Tell whether a block is sent on instead of being kept."""
        held, onward = self.staging.get(tid), self.early.get(key)
        if held is None or onward is None or tid not in self.keeps or index in held.bitmap or self.world.random() < 0.4:
            return False
        self.send(TERMINAL, "BLOCK", onward, index, content, self.name, key)
        if self.world.bug is Bug.PASSED_TOO_EARLY:
            self._pass(key, onward, frozenset({index}))
        return True

    def _pass(self, key: Key, onward: Tid, bitmap: frozenset[int]) -> None:
        """The next hop has said STAGED of blocks that may not be here."""
        if self.early.get(key) != onward or key in self.sender.rows:
            return
        for tid, held in self.staging.items():
            if held.key == key and tid in self.keeps:
                self.passed.setdefault(tid, set()).update(bitmap - held.bitmap)
                for index in bitmap:
                    require(self.world.is_staged(onward, index, held.op), 3, f"STAGED says block {index} of {key}")
                self.send(held.sender, "STAGED", key, tid, *self.listed(tid, held))

    def listed(self, tid: Tid, held: Staging) -> tuple[frozenset[int], int]:
        """As at any intake, with what was passed."""
        return frozenset(held.bitmap | self.passed.get(tid, set())), self.turn.get(tid, 0)

    def _begin_anew(self, tid: Tid) -> None:
        self.turns += 1
        self.turn[tid] = self.turns

    def ask_again(self, row: Row) -> None:
        """Data that were passed must come again: the operation waits for them under a lot, as one that is not in
        custody."""
        key = key_of(row.op)
        del self.sender.rows[key]
        lots.release(self.spool, key)
        lots.reserve(self.spool, key, row.op.blocks, self.world.now)
        self.step()
        for tid, held in self.staging.items():
            if held.key == key:
                self.passed.pop(tid, None)
                self._begin_anew(tid)
                self.send(held.sender, "TID", key, tid, *self.listed(tid, held))

    def _known(self, op: Op, sender: str) -> bool:
        row = self.sender.rows.get(key_of(op))
        if row is None:
            return False
        if not row.settled:
            self.send(sender, "CUSTODY", key_of(op), self.name)
        elif row.result is not None:
            self.send(sender, "RESULT", key_of(op), row.result)
        return True

    def _open(self, sender: str, op: Op, release: Release) -> None:
        if self._known(op, sender) or self.world.now > op.expires:
            return
        again_s = lots.reserve(self.spool, key_of(op), op.blocks, self.world.now)
        if again_s is not None and self.world.bug is not Bug.LOT_IGNORED:
            self.send(sender, "NOSPACE", key_of(op))
            return
        self.grant(op, sender)
        if release is Release.DELIVERED or self.world.bug is Bug.FREED_IS_PASSED:
            self.keeps.update(tid for tid, held in self.staging.items() if held.key == key_of(op))
            self.send(TERMINAL, "OPEN", self.name, op, release)

    def _take(self, sender: str, op: Op, tid: Tid | None) -> None:
        key = key_of(op)
        if self._known(op, sender) or self.world.now > op.expires:
            return
        data: set[int] = set()
        passed: set[int] = set()
        if op.kind is Kind.PUBLISH:
            held = self.staging.get(tid) if tid else None
            if held is None:
                self.send(sender, "STALETID", key, tid)
                return
            passed = self.passed.get(tid, set()) if tid else set()
            whole = custody.may_grant(op.blocks, held.bitmap | passed, True, key in self.spool.lots)
            if not whole and self.world.bug is not Bug.CUSTODY_WITHOUT_BLOCKS:
                return
            data = set(held.synced)
        self.sender.rows[key] = Row(op, data, passes=len(data) < len(data | passed))
        if data or passed:
            lots.pin(self.spool, key)
        self.step()
        require(len(data | passed) == op.blocks, 3, f"CUSTODY of {key} without all blocks")
        self.send(sender, "CUSTODY", key, self.name)
        self.sender.push(self.sender.rows[key])

    def _settle(self, key: Key, result: Result | None) -> None:
        row = self.sender.rows.get(key)
        if row is None or row.settled:
            return
        row.result, row.settled = result, True
        self.step()
        if self.world.bug is not Bug.SPOOL_KEPT:
            self._release(row)
        if result is not None:
            self.send(f"origin{key[0]}", "RESULT", key, result)

    def _release(self, row: Row) -> None:
        self.sender.free(row, final=True)
        self.close(key_of(row.op))
        lots.release(self.spool, key_of(row.op))


class Terminal(Intake):
    """Stages, orders, executes, remembers."""

    def __init__(self, world: World) -> None:
        """Begin with an empty tree."""
        super().__init__(world, TERMINAL)
        self.records: dict[int, terminal.OriginRecord] = {}
        self.tree: names.Names = {}
        self.synced_tree: names.Names | None = None  # set while a change of names is not synced
        self.generations: dict[str, int] = {}
        self.journal: names.Intent | None = None
        self.next_inode = 1
        self.held: dict[tuple[Key, Any], tuple[str, Op]] = {}  # volatile

    def record(self, origin: int) -> terminal.OriginRecord:
        """The stored facts about an origin."""
        return self.records.setdefault(origin, terminal.OriginRecord())

    def restart(self) -> None:
        """Come back: unsynced names may or may not have survived; finish the INTENT that is open."""
        self.held.clear()
        self.restart_intake()
        if self.world.bug is Bug.FORGOTTEN_RESULT:
            for record in self.records.values():
                record.results.clear()
        if self.synced_tree is not None:
            if self.world.random() < 0.5:
                self.tree = self.synced_tree
                self.world.undone(key_of(self.journal.op) if self.journal else (0, 0))
            self.synced_tree = None
        for held in list(self.staging.values()):
            if terminal.is_final(self.record(held.key[0]), held.key[1]):
                self.close(held.key)
        if self.journal is not None:
            self._recover(self.journal)

    def _recover(self, todo: names.Intent) -> None:
        if names.happened(self.tree, todo) and self.world.bug is not Bug.RECOVERY_REPEATS:
            self._finish(todo.op, Result(Outcome.DONE))
        elif self._refusal(todo.op):
            self._finish(todo.op, Result(Outcome.FAILED, "conflict"))
        else:
            self._change(todo)

    def tick(self) -> None:
        """Nothing is repeated by the terminal."""

    def handle(self, message: Message) -> None:
        """One frame."""
        kind = message[0]
        if kind == "BLOCK":
            if self.on_block(*message[1:]):
                self._wake(message[5][0])
        elif kind == "LOW":
            self._low(message[1], message[2])
        elif kind == "CANCEL":
            self._cancel(message[1], message[2])
        elif kind == "STATUS":
            self._answer(message[1], message[2], self._judge(message[2]))
        elif kind == "OPEN":
            if not self._answer(message[1], message[2], self._judge(message[2])):
                self.grant(message[2], message[1])
        elif kind == "OP":
            self._consider(message[1], message[2], message[3])

    def _judge(self, op: Op) -> terminal.Verdict:
        record = self.record(op.origin)
        if self.world.bug is Bug.NAME_BEFORE_NUMBER and op.kind is not Kind.PUBLISH and not self._refusal(op):
            return terminal.Verdict(Step.EXECUTE)
        if self.world.bug is Bug.LOW_IGNORED and op.seq <= record.low:
            return terminal.Verdict(Step.EXECUTE)
        if self.world.bug is Bug.AFTER_IGNORED:
            op = op._replace(after=())
        return terminal.judge(record, op, self.world.now, len(self.held))

    def _refusal(self, op: Op) -> str:
        return names.refusal(self.tree, op, self.generations.get(op.path, 0))

    def _answer(self, sender: str, op: Op, verdict: terminal.Verdict) -> bool:
        """Send the final answer if there is one. Whether there is."""
        if verdict.step is Step.STALE:
            self.send(sender, "STALE", key_of(op))
        elif verdict.step is Step.ANSWER:
            self.send(sender, "RESULT", key_of(op), verdict.result)
        elif verdict.step is Step.RECORD and verdict.result is not None:
            self._store(op, verdict.result)
            self.send(sender, "RESULT", key_of(op), verdict.result)
            self._wake(op.origin)
        else:
            return False
        return True

    def _consider(self, sender: str, op: Op, tid: Tid | None) -> None:
        verdict = self._judge(op)
        if self._answer(sender, op, verdict):
            return
        if op.kind is Kind.PUBLISH:
            held = self.staging.get(tid) if tid else None
            if held is None:
                self.send(sender, "STALETID", key_of(op), tid)
                return
            if len(held.bitmap) < op.blocks:
                self.send(sender, "STAGED", held.key, tid, frozenset(held.bitmap))
                verdict = terminal.Verdict(Step.HOLD)
        if verdict.step is Step.HOLD:
            self.held[(key_of(op), tid)] = (sender, op)
        elif verdict.step is Step.EXECUTE:
            self._execute(op, tid)
            self.send(sender, "RESULT", key_of(op), self.record(op.origin).results.get(op.seq))
            self._wake(op.origin)

    def _execute(self, op: Op, tid: Tid | None) -> None:
        refused = self._refusal(op)
        if refused:
            self._store(op, Result(Outcome.FAILED, refused))
            return
        if tid is not None and self.world.bug is not Bug.ACK_BEFORE_SYNC:
            contents = self.staging[tid].synced
            whole = all(contents.get(index) == (*key_of(op), index) for index in range(op.blocks))
            require(whole, 2, f"{key_of(op)} would publish data that is not its own")
        self.journal = names.intent(self.tree, op, self.next_inode, key_of(op))
        self.next_inode += 1
        self.step()
        self._change(self.journal)

    def _change(self, todo: names.Intent) -> None:
        self.synced_tree = dict(self.tree)
        require(self.journal is todo, 1, "a name changes outside INTENT..DONE")
        names.apply(self.tree, todo)
        self.world.executed(key_of(todo.op))
        self.step()
        self.synced_tree = None
        self.step()
        self._finish(todo.op, Result(Outcome.DONE))

    def _finish(self, op: Op, result: Result) -> None:
        if self.world.bug is Bug.ACK_BEFORE_RECORD:
            self.send(f"origin{op.origin}", "RESULT", key_of(op), result)
        self._store(op, result)

    def _store(self, op: Op, result: Result) -> None:
        if result.outcome is Outcome.DONE:
            changed = names.bumped(self.generations, op)
            self.generations.update(changed)
            result = result._replace(generation=changed[op.target or op.path])
        self.record(op.origin).results[op.seq] = result
        self.journal = None  # the record of the result closes the INTENT
        self.world.ended(key_of(op), result)
        self.step()
        self.close(key_of(op))

    def _wake(self, origin: int) -> None:
        """Look again at the held operations of an origin."""
        for (key, tid), (sender, op) in list(self.held.items()):
            if key[0] == origin and self.held.pop((key, tid), None) is not None:
                if tid == CANCELLING:
                    self._consider_cancelled(sender, op)
                else:
                    self._consider(sender, op, tid)

    def _low(self, origin: int, low: int) -> None:
        record = self.record(origin)
        terminal.raise_low(record, low)
        for key in {held.key for held in self.staging.values() if held.key[0] == origin and held.key[1] <= low}:
            self.close(key)

    def _cancel(self, sender: str, op: Op) -> None:
        record = self.record(op.origin)
        if not terminal.is_final(record, op.seq):
            record.cancelled.add(op.seq)
            self.step()
            if self.world.bug is Bug.CANCEL_OVERTAKES:
                op = op._replace(after=())
        self._consider_cancelled(sender, op)

    def _consider_cancelled(self, sender: str, op: Op) -> None:
        if not self._answer(sender, op, self._judge(op)):
            self.held[(key_of(op), CANCELLING)] = (sender, op)
