"""A seeded simulator of the overlay protocol: many small schedules of loss, doubling, delay and death.

``python -m overlay_router.simulation.simulator --schedules 1000000`` runs them;
``--seed N`` replays the one that failed.
Invariants 1 to 7 of the protocol are assertions; at its end every schedule is compared with a serial reference.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from typing import Any

from overlay_router.rules.states import Kind, Op, Outcome, Result
from overlay_router.rules.terminal import is_final
from overlay_router.simulation import serial_reference
from overlay_router.simulation.parties import Custodian, Origin, Terminal
from overlay_router.simulation.segment import ROUTES, TERMINAL, Bug, Crash, Key, Message, Tid, Violation, require
from stageout.overlay.wire.blocks import IllegalMove
from stageout.overlay.wire.graph import SUBTREE

RING_BLOCKS = 6
DRAIN_ROUNDS = 80
FAULTY_STEPS = 70
EXPIRES = 1_000
KINDS = (Kind.PUBLISH,) * 7 + (Kind.RENAME,) * 3 + (Kind.DELETE,) * 2 + (Kind.MKDIR, Kind.SETATTR)
LEAVES = ("/x", "/y", "/x", "/d/x", "/d/x", "/d")
Frame = tuple[int, str, Message]


def wishes(origin: int, rng: random.Random) -> list[Op]:
    """A few operations on a few names, so that they collide; each origin below its own directory."""
    top = f"o{origin}"
    made = [Op(0, 0, Kind.MKDIR, top)]
    if rng.random() < 0.6:
        made.append(Op(0, 0, Kind.MKDIR, top + "/d"))
    for _ in range(2 + int(rng.random() * 5)):
        kind = KINDS[int(rng.random() * len(KINDS))]
        leaf = LEAVES[int(rng.random() * len(LEAVES))]
        if kind in SUBTREE and rng.random() < 0.1:
            leaf = ""
        if kind is Kind.MKDIR:
            leaf = "/d" if rng.random() < 0.7 else leaf
        target = top + LEAVES[int(rng.random() * len(LEAVES))] if kind is Kind.RENAME else ""
        size = 1 + int(rng.random() * 2.5) if kind is Kind.PUBLISH else 0
        generation = int(rng.random() * 3) if rng.random() < 0.06 else -1
        made.append(Op(0, 0, kind, top + leaf, target, size, absent=rng.random() < 0.04, generation=generation))
    return made


class World:
    """One schedule: the parties, the frames on their way, and what really happened."""

    def __init__(self, seed: int, bug: Bug | None = None) -> None:
        """Everything follows from the seed."""
        self.rng = random.Random(seed)
        self.random = self.rng.random
        self.bug, self.faulty, self.now, self.expires = bug, True, 0, EXPIRES
        self.crash_rate = 0.03 if self.random() < 0.7 else 0.15
        self.loss = self.random() * 0.3
        self.doubling = self.random() * 0.3
        self.terminal = Terminal(self)
        self.custodians = [Custodian(self, f"custodian{number}") for number in range(2)]
        self.origins = [Origin(self, f"origin{number}", number) for number in range(1 + (self.random() < 0.3))]
        self.parties: dict[str, Any] = {party.name: party for party in (self.terminal, *self.custodians, *self.origins)}
        self.holders: tuple[Origin | Custodian, ...] = (*self.origins, *self.custodians)
        self.wishes = [(origin, wish) for origin in self.origins for wish in wishes(origin.number, self.rng)]
        self.bag: list[Frame] = []
        self.late: list[Frame] = []
        self.in_relay = [0] * ROUTES
        self.created: dict[Key, Op] = {}
        self.executions: Counter[Key] = Counter()
        self.results: dict[Key, Result] = {}
        self.lost_disk = False
        self.restarts = 0

    # The network and its relays

    def credit(self, route: int) -> bool:
        """Tell whether the relay of this route has a free buffer (invariant 4)."""
        return self.in_relay[route] < RING_BLOCKS or self.bug is Bug.CREDIT_IGNORED

    def send(self, sender: str, to: str, message: Message, route: int = -1) -> None:
        """Put a frame on its way, perhaps never, twice or much later."""
        if sender == TERMINAL and message[0] == "RESULT":
            record = self.terminal.record(message[1][0])
            stored = message[1][1] <= record.low or record.results.get(message[1][1]) == message[2]
            require(stored, 3, f"{message[2]} of {message[1]} is sent before it is durable")
        frame = (route, to, message)
        if not self.faulty:
            self._carry(frame)
            return
        if self.random() >= self.loss:
            self._carry(frame)
        chance = self.random()
        if chance < self.doubling:
            (self.late if chance < self.doubling * 0.6 else self.bag).append((-1, to, message))

    def _carry(self, frame: Frame) -> None:
        route = frame[0]
        if route >= 0:
            self.in_relay[route] += 1
            require(self.in_relay[route] <= RING_BLOCKS, 4, "more bytes in a relay than its ring")
        self.bag.append(frame)

    def deliver(self, index: int) -> None:
        """Hand one frame to its party, which may die over it."""
        bag = self.bag
        bag[index], bag[-1] = bag[-1], bag[index]
        route, to, message = bag.pop()
        if route >= 0:
            self.in_relay[route] -= 1
        party = self.parties[to]
        try:
            party.handle(message)
        except Crash:
            self.restart(party)

    def restart(self, party: Any) -> None:
        """Restart a party; it may die again while it recovers."""
        self.restarts += 1
        while True:
            try:
                party.restart()
                return
            except Crash:
                continue

    def relay_dies(self, route: int) -> None:
        """A relay forgets everything, and its neighbours notice."""
        self.bag = [frame for frame in self.bag if frame[0] != route]
        self.in_relay[route] = 0
        for party in self.holders:
            party.sender.route_down(route)

    def tick(self, party: Any) -> None:
        """Let a party repeat what is outstanding."""
        try:
            party.tick()
        except Crash:
            self.restart(party)

    def is_staged(self, tid: Tid, index: int, op: Op) -> bool:
        """Tell whether a block is durable at the terminal, or was until its operation ended."""
        held = self.terminal.staging.get(tid)
        return (held is not None and index in held.synced) or is_final(self.terminal.record(op.origin), op.seq)

    def custodian_or_terminal(self) -> str:
        """The router to which an operation is sent first."""
        choice = self.random() * 3
        return TERMINAL if choice < 1 else self.custodians[int(choice) - 1].name

    # The real events: the other side of the assertions

    def executed(self, key: Key) -> None:
        """A system call changed names."""
        self.executions[key] += 1
        require(self.executions[key] == 1, 1, f"{key} was executed twice")
        require(key not in self.results, 1, f"{key} was executed after its result")

    def undone(self, key: Key) -> None:
        """The machine died before the directories were synced, and the change is gone."""
        self.executions[key] -= 1

    def ended(self, key: Key, result: Result) -> None:
        """The terminal made a result durable."""
        require(key not in self.results, 1, f"{key} got a second result")
        self.results[key] = result

    def freed(self, key: Key, final: bool) -> None:
        """A holder freed its bytes: invariant 2."""
        if final:
            require(key in self.results, 2, f"{key} was freed as final and is not")
        elif not self.lost_disk and key not in self.results:
            blocks = self.created[key].blocks
            holders = [party.sender.rows.get(key) for party in self.holders]
            copies = sum(row is not None and len(row.data) == blocks for row in holders)
            require(copies >= 1, 2, f"the last copy of {key} was freed")

    # One schedule

    def run(self) -> None:
        """Raise Violation if this schedule breaks an invariant."""
        expiring = self.random() < 0.08
        for _ in range(FAULTY_STEPS):
            self._faulty_step()
        while self.wishes:
            self._create()
            self._settle_some()
        self.faulty = False
        if expiring:
            self.now = EXPIRES + 1
        self._drain()
        before = dict(self.terminal.tree)
        self._late_frames()
        require(self.terminal.tree == before, 7, "a late frame changed the tree")
        self._compare()

    def _create(self) -> None:
        origin, wish = self.wishes[0]
        if origin.create(wish):
            del self.wishes[0]
            row = next(reversed(origin.sender.rows.values()))
            origin.sender.push(row)

    def _settle_some(self) -> None:
        for _ in range(min(len(self.bag), 6)):
            self.deliver(int(self.random() * len(self.bag)) if self.bag else 0)
        if self.wishes:
            self.tick(self.wishes[0][0])

    def _faulty_step(self) -> None:
        chance = self.random()
        if chance < 0.76 and self.bag:
            self.deliver(int(self.random() * len(self.bag)))
        elif chance < 0.86 and self.wishes:
            self._create()
        elif chance < 0.96:
            self.tick(self.holders[int(self.random() * len(self.holders))])
        elif chance < 0.97 and self.late:
            self.bag.append(self.late.pop(int(self.random() * len(self.late))))
        elif chance < 0.98:
            self.relay_dies(int(self.random() * ROUTES))
        elif chance < 0.99:
            self._cancel()
        elif chance < 0.991:
            self.lost_disk = True
            self.custodians[int(self.random() * 2)].lose_disk()
        else:
            self.restart(tuple(self.parties.values())[int(self.random() * len(self.parties))])

    def _cancel(self) -> None:
        origin = self.origins[int(self.random() * len(self.origins))]
        rows = [row for row in origin.sender.rows.values() if not row.settled]
        if rows:
            rows[int(self.random() * len(rows))].cancel = True

    def _deliver_all(self) -> None:
        limit = 5_000
        while self.bag:
            self.deliver(len(self.bag) - 1)
            limit -= 1
            require(limit > 0, 6, "frames without end")

    def _unsettled(self) -> bool:
        return any(not row.settled for party in self.holders for row in party.sender.rows.values())

    def _drain(self) -> None:
        """No more faults: every operation must end, at the latest when it has expired."""
        self._deliver_all()
        for turn in range(DRAIN_ROUNDS):
            if not self._unsettled():
                return
            if turn == DRAIN_ROUNDS // 2 and self.lost_disk:
                self.now = EXPIRES + 1
            for route in range(ROUTES):
                self.relay_dies(route)
            for party in self.holders:
                party.tick()
                self._deliver_all()
        require(not self._unsettled(), 6, "an operation never ended")

    def _late_frames(self) -> None:
        """Everything that was held back arrives now, after every result; nothing may come of it."""
        for _ in range(3):
            self.bag, self.late = self.late + self.bag, []
            self.rng.shuffle(self.bag)
            self._deliver_all()
            for custodian in self.custodians:
                custodian.tick()
            self._deliver_all()
        for custodian in self.custodians:
            custodian.expire_lots()
            kept = any(row.data for row in custodian.sender.rows.values()) or custodian.staging
            require(not kept and not custodian.spool.lots, 6, f"{custodian.name} keeps bytes for ever")

    def _compare(self) -> None:
        """Serial equivalence per origin, and that its owner was told the truth."""
        for origin in self.origins:
            rows = origin.sender.rows
            told = {key[1]: row.result.outcome for key, row in rows.items() if row.result}
            truth = {seq: self.results[(origin.number, seq)].outcome for seq in told}
            tree, outcomes = serial_reference.run((row.op for row in rows.values()), truth)
            require(outcomes == truth, 7, f"outcomes {truth} but in series {outcomes}")
            for seq, outcome in told.items():
                lost = outcome is Outcome.LOST and truth[seq] is Outcome.EXPIRED
                require(lost or outcome is truth[seq], 6, f"operation {seq}: told {outcome}, was {truth[seq]}")
                require(
                    self.now > 0 or truth[seq] is not Outcome.EXPIRED, 6, f"operation {seq} expired before its time"
                )
            require(self._tree_of(f"o{origin.number}") == tree, 7, f"origin {origin.number}: tree differs from {tree}")

    def _tree_of(self, top: str) -> dict[str, Any]:
        return {
            path: None if entry.is_dir else (entry.content, entry.attrs)
            for path, entry in self.terminal.tree.items()
            if path == top or path.startswith(top + "/")
        }


def run_schedule(seed: int, bug: Bug | None = None) -> str:
    """Run one schedule; "" if it holds, else what was violated."""
    try:
        World(seed, bug).run()
    except (Violation, IllegalMove) as violation:
        return str(violation)
    return ""


def main(argv: list[str] | None = None) -> int:
    """Run schedules and say how many broke an invariant; 1 if any did."""
    parser = argparse.ArgumentParser(prog="overlay_router.simulation.simulator", description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=1, metavar="SEED", help="seed of the first schedule")
    parser.add_argument("--seed", type=int, help="replay this schedule alone")
    args = parser.parse_args(argv)
    seeds = range(args.first, args.first + args.schedules) if args.seed is None else range(args.seed, args.seed + 1)
    begun_s, violations = time.monotonic(), 0
    for seed in seeds:
        fault = run_schedule(seed)
        if fault:
            violations += 1
            print(f"seed {seed}: {fault}")
    print(f"{len(seeds) / (time.monotonic() - begun_s):.0f} schedules per second")
    print(f"sim: {len(seeds)} schedules, {violations} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
