"""A seeded world of senders, two custodians and a terminal. The nodes run the product's rules on records in memory.

``World(seed).run()`` returns "" or the invariant that broke. ``make rules-sim`` runs many seeds.
"""

from __future__ import annotations

import argparse
import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from stageout.overlay.rules import custody, limits, operations, rights, sender, terminal
from stageout.overlay.rules.operations import Fields, Hop, Identity, Kind, Row, moved
from stageout.overlay.rules.rights import Action, Asker, Entry, Grant, NoRight, Right, Token
from stageout.overlay.rules.states import ENDS, RESULTS, IllegalMove, Role, State
from stageout.overlay.rules.terminal import Known, Seen, Step, Verdict

START = 1_000_000
ALL = (Grant(frozenset(Right), ()),)
PREFIXES = {"K1": "/u", "K2": "/u", "X": "/x"}
LIMIT = limits.Share(rows=12, held=8, cancels=12, size=1000)


class Broken(Exception):
    """An invariant does not hold."""


class Crash(Exception):
    """The node that works now dies."""


class Letter(NamedTuple):
    to: str
    word: str
    fields: Fields
    signer: str
    back: str
    hop: Hop = Hop()
    manifest: tuple[str, ...] = ()
    blocks: tuple[tuple[int, str], ...] = ()
    state: State | None = None
    reason: str = ""
    epoch: int = 0
    shown: tuple[str | None, str | None] = (None, None)


def token_of(signer: str) -> Token:
    issuer = "K1" if signer == "H" else signer
    life = (START - 60, START - 60, START + 10**7)
    return Token(issuer, issuer, frozenset({"T"}), ALL, *life, holder="" if issuer == signer else signer, is_own=True)


def content(fields: Fields) -> tuple[str, ...]:
    return tuple(f"{fields.origin}.{fields.seq}.{number}" for number in range(2))


class Node:
    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.skew = world, name, world.rng.randint(-300, 300)
        self.rows: dict[Identity, Row] = {}
        self.unsynced: set[Identity] = set()

    @property
    def now(self) -> int:
        return self.world.time + self.skew

    def store(self, row: Row) -> Row:
        self.rows[row.identity] = row
        self.world.may_crash(self)
        return row

    def send(self, letter: Letter) -> None:
        self.world.mail.append(letter)

    def identity(self, letter: Letter) -> Identity:
        return Identity(
            rights.owner_of(token_of(letter.signer), letter.signer), letter.fields.origin, letter.fields.seq
        )

    def with_blocks(self, row: Row, letter: Letter) -> Row:
        kept = dict(row.blocks)
        for number, digest in letter.blocks:
            try:
                kept = custody.keep_digest(kept, number, digest)
            except custody.BlockDiffers:
                continue
        manifest = letter.manifest or row.manifest
        for number in custody.wrong_blocks(kept, manifest) if manifest else ():
            del kept[number]
        return replace(row, blocks=kept, manifest=manifest)


class Terminal(Node):
    def __init__(self, world: World) -> None:
        super().__init__(world, "T")
        self.low: dict[tuple[str, str], int] = {}
        self.number = self.high_water = self.epoch = self.inodes = 0
        self.tree: dict[str, int] = {}
        self.safe_tree: dict[str, int] = {}
        self.files: dict[int, tuple[str, ...]] = {}
        self.trash: dict[Identity, int] = {}
        self.known: dict[str, int] = {}
        self.soft: set[int] = set()
        self.denied: set[str] = set()
        self.backup: Any = None

    def database(self) -> Any:
        return copy.copy(self.rows), dict(self.low), self.number, dict(self.known), self.epoch

    def restore(self) -> None:
        self.rows, self.low, self.number, self.known, self.epoch = self.backup
        self.backup = self.database()
        self.world.restored = self.world.time
        if terminal.needs_new_epoch(self.number, self.high_water):
            self.epoch, self.number = terminal.new_epoch(self.now, self.epoch), self.high_water

    def known_of(self, identity: Identity, fields: Fields) -> Known:
        rows = {row.identity.seq: row for row in self.rows.values() if row.identity[:2] == identity[:2]}
        marks = tuple(r for r in self.rows.values() if not set(r.fields.names).isdisjoint(fields.names))
        return Known(rows, self.low.get(identity[:2], 1), marks, self.epoch)

    def answer(self, letter: Letter, state: State | None, reason: str = "", word: str = "answer") -> None:
        if state is not None and word == "answer":
            self.world.check_answer(self, letter, state, reason)
        fields = letter.fields
        shown = [self.tree.get(name) for name in (fields.path, fields.second)]
        digests = tuple("/".join(self.files[one]) if one else None for one in shown)
        self.send(Letter(letter.back, word, fields, letter.signer, "T", state=state, reason=reason, epoch=self.epoch,
                         shown=(digests[0], digests[1])))  # fmt: skip

    def receive(self, letter: Letter) -> None:
        fields, identity = letter.fields, self.identity(letter)
        row = self.rows.get(identity)
        router = letter.back if letter.back in "AB" else ""
        asker = Asker(identity.owner, router)
        if letter.word == "low":
            self.low[identity[:2]] = max(self.low.get(identity[:2], 1), letter.epoch)
            return None
        known = self.known_of(identity, fields)
        if letter.word == "get":
            if row is None or row.state not in ENDS:
                verdict = terminal.judge(identity, fields, letter.hop, known, Seen(denied="asked only"), self.now)
                if verdict.step is not Step.RECORD or verdict.state not in (State.EXPIRED, State.EXPIRED_UNKNOWN):
                    return self.answer(letter, verdict.state if verdict.step is Step.SETTLED else None, "settled")
                row = self.end(row or Row(identity, fields), verdict)
            return self.answer(letter, row.state, row.reason)
        if letter.word == "cancel":
            if router and letter.signer == router:  # by its own right
                return self.foreign_cancel(asker, letter)
            if row is None and not self.has_room(identity, limits.Share(rows=1, cancels=1)):
                return None
            verdict = terminal.cancel(fields, known, self.now)
            return self.decide(letter, row or Row(identity, fields), verdict)
        try:
            operations.check_ranges(fields)
            rights.check_chain(fields, token_of(letter.signer), letter.signer, "T", PREFIXES, self.now,
                               letter.hop.received, router, frozenset("AB"))  # fmt: skip
            if row is None and not self.has_room(identity, limits.Share(rows=1, size=fields.size or 0)):
                return self.answer(letter, State.REFUSED, "share")
        except (NoRight, rights.BadToken):
            return self.answer(letter, State.REFUSED, "no right or no share")
        issuer = rights.issuer_of(token_of(letter.signer), letter.signer)
        new = row or Row(identity, fields, hop=letter.hop, issuer=issuer)
        if row is None or row.state not in ENDS:
            new = replace(new, hop=letter.hop, carriers=new.carriers | ({router} if router else set()))
            new = self.with_blocks(new, letter) if fields.kind is Kind.FILE else new
            self.unsynced.add(identity)
        inode = self.tree.get(fields.path)
        seen = Seen(
            fields.kind is not Kind.FILE or custody.is_whole(new),
            "denied" if fields.path in self.denied else "",
            fields.kind is Kind.FILE or inode is not None,
            any(self.tree.get(name) != self.known.get(name) for name in fields.names if name in self.tree),
        )
        try:
            verdict = terminal.judge(identity, fields, letter.hop, known, seen, self.now)
        except operations.Differs:
            return None
        return self.decide(letter, new, verdict)

    def has_room(self, identity: Identity, wanted: limits.Share) -> bool:
        mine = [one for one in self.rows.values() if one.identity.owner == identity.owner]
        try:
            limits.check_share(limits.used(mine), LIMIT, wanted)
        except limits.ShareFull:
            return False
        return True

    def foreign_cancel(self, asker: Asker, letter: Letter) -> None:
        for row in list(self.rows.values()):
            if row.fields == letter.fields and row.state not in ENDS:
                try:
                    rights.check_action(asker, row, Action.CANCEL)
                except NoRight:
                    continue
                self.end(row, Verdict(Step.RECORD, State.CANCELLED))

    def end(self, row: Row, verdict: Verdict) -> Row:
        if row.state is State.RECEIVING and verdict.state in RESULTS:
            row = moved(Role.TERMINAL, row, State.COMPLETE)
        if verdict.state is not State.EXPIRED_UNKNOWN:
            return self.store(moved(Role.TERMINAL, row, verdict.state, reason=verdict.reason, ended=self.now))
        return self.store(replace(row, state=verdict.state, reason=verdict.reason, ended=self.now))

    def decide(self, letter: Letter, row: Row, verdict: Verdict) -> None:
        if verdict.step is Step.RECORD:
            row = self.end(row, verdict)
            self.answer(letter, row.state, row.reason)
        elif verdict.step is Step.ANSWER:
            self.answer(letter, verdict.state, verdict.reason)
        elif verdict.step is Step.REFUSE:
            self.answer(letter, State.REFUSED, verdict.reason)
        elif verdict.step is Step.ASK_FIRST:
            self.answer(letter, None, word="ask-first")
        elif verdict.step is Step.SETTLED:
            self.answer(letter, verdict.state, verdict.reason)
        elif verdict.step is Step.EXECUTE:
            self.publish(letter, row)
        else:  # synced by the timer before it counts
            self.unsynced.discard(row.identity)
            self.store(row)
            self.answer(letter, None)

    def publish(self, letter: Letter, row: Row) -> None:
        fields = row.fields
        row = moved(Role.TERMINAL, row, State.COMPLETE)
        inode = self.tree.get(fields.path, 0)
        if fields.kind is Kind.FILE:
            self.inodes += 1
            inode = self.inodes
            self.files[inode] = tuple(row.blocks[number] for number in sorted(row.blocks))
            self.soft.add(inode)
        for step in terminal.PUBLISH_STEPS:
            if step == "sync":
                self.soft.discard(inode)
                self.unsynced.discard(row.identity)
            elif step == "row":
                self.store(row)
            elif step == "intent":
                self.number += 1
                etag = terminal.etag(self.epoch, self.number)
                row = self.store(moved(Role.TERMINAL, row, State.PUBLISHING, inode=inode, etag=etag))
            elif step == "high-water":
                self.high_water = self.number
                self.world.may_crash(self)
            elif step == "change":
                self.change(row, inode)
                self.world.may_crash(self)
            elif step == "fsync":
                self.safe_tree = dict(self.tree)
                self.world.may_crash(self)
            elif step == "done":
                row = self.finish(row)
            else:
                self.answer(letter, State.DONE)
        self.unsynced.discard(row.identity)

    def change(self, row: Row, inode: int) -> None:
        fields = row.fields
        self.world.on_change(row)
        self.tree.pop(fields.path, None)
        if fields.kind is Kind.DELETE:
            self.trash[row.identity] = inode
        else:
            self.tree[fields.second or fields.path] = inode

    def finish(self, row: Row) -> Row:
        fields = row.fields
        self.known.pop(fields.path, None)
        if fields.kind is not Kind.DELETE:
            self.known[fields.second or fields.path] = row.inode
        return self.store(moved(Role.TERMINAL, row, State.DONE, ended=self.now))

    def restart(self) -> None:
        if self.tree != self.safe_tree:
            if self.world.rng.random() < 0.5:
                self.tree = dict(self.safe_tree)
                gone = self.world.changes.pop()
                self.trash.pop(gone.identity, None)
            else:
                self.safe_tree = dict(self.tree)
        for inode in self.soft & set(self.tree.values()):
            self.files[inode] = ("garbage",)
        self.soft.clear()
        for identity in self.unsynced & set(self.rows):
            self.rows[identity] = replace(self.rows[identity], blocks={})
        self.unsynced.clear()
        for row in list(self.rows.values()):
            if row.state is State.PUBLISHING:
                there = [self.tree.get(name, 0) for name in (row.fields.path, row.fields.second)]
                staged = 0 if row.inode in self.tree.values() else row.inode
                found = terminal.Found(staged, there[0], there[1], self.trash.get(row.identity, 0))
                if terminal.recovered(row, found) is State.DONE:
                    self.finish(row)
                else:
                    self.store(moved(Role.TERMINAL, row, State.COMPLETE))

    def tick(self) -> None:
        for row in list(self.rows.values()):
            low = self.low.get(row.identity[:2], 1)
            if terminal.may_forget(row, low, self.now):
                del self.rows[row.identity]


class Custodian(Node):
    def __init__(self, world: World, name: str, lies: bool) -> None:
        super().__init__(world, name)
        self.lies, self.epoch, self.order = lies, START, 0
        self.directories: dict[Identity, Row] = {}
        self.backup: dict[Identity, Row] = {}

    def receive(self, letter: Letter) -> None:
        identity = self.identity(letter)
        row = self.rows.get(identity)
        if letter.back == "T":
            return self.answered(letter, row) if row else None
        if letter.word == "cancel":
            if row is None:
                row = Row(identity, letter.fields)
            row = self.store(custody.cancel(row))
            return self.report(letter, row)
        if letter.word == "get":
            return self.report(letter, row) if row else None
        try:
            operations.check_ranges(letter.fields)
            rights.check_custody(Entry(None) if letter.signer != "X" else None, letter.fields, True)
            if row:
                operations.differs(row, letter.fields)
        except (NoRight, operations.Differs):
            return None
        if row is None:
            row = Row(identity, letter.fields, custody=True)
        if row.state is State.RECEIVING:
            row = self.with_blocks(row, letter)
            row = replace(row, manifest=()) if row.fields.kind is not Kind.FILE else row
            if not custody.may_take(row, self.skew - self.world.terminal.skew):
                self.rows[identity] = row
                return None
            self.take(letter, row)
        else:
            self.report(letter, row)
        return None

    def take(self, letter: Letter, row: Row) -> None:
        self.order += 1
        hop = Hop(self.name, self.epoch, self.order, self.now)
        row = moved(Role.CUSTODIAN, replace(row, hop=hop), State.CUSTODY)
        self.unsynced.add(row.identity)
        self.world.accepted.append((self.name, row.identity, (self.epoch, self.order)))
        for step in custody.CUSTODY_STEPS:
            if step == "sync":
                self.unsynced.discard(row.identity)
            elif step == "directory":
                self.directories[row.identity] = row
                self.world.may_crash(self)
            elif step == "row":
                self.store(row)
            else:
                self.world.on_custody(self, row)
                self.report(letter, row)
                self.world.may_crash(self)
        self.unsynced.discard(row.identity)

    def report(self, letter: Letter, row: Row) -> None:
        if row.state in ENDS:
            self.world.check_claim(row.identity, row.fields, row.state, row.reason)
        state = row.state if row.state in ENDS else State.CUSTODY if custody.has_duty(row) else None
        self.send(Letter(letter.back, "answer", row.fields, letter.signer, self.name, state=state, reason=row.reason))

    def answered(self, letter: Letter, row: Row) -> None:
        if letter.word == "ask-first":
            digest = "/".join(content(row.fields))
            after = sender.after_asking(row.fields, digest, *letter.shown, self.rows.values())
            if after is sender.AfterAsking.REPEAT:
                self.store(replace(row, hop=row.hop._replace(known_epoch=letter.epoch)))
            else:
                state = {"done": State.DONE, "superseded": State.SUPERSEDED}.get(after.value, State.FAILED)
                self.store(custody.on_answer(row, state, after.value, self.now))
            return
        self.store(custody.on_answer(row, letter.state, letter.reason, self.now))

    def tick(self) -> None:
        for row in self.world.shuffled(self.rows.values()):
            if row.state in ENDS:
                if row.identity in self.directories and custody.may_drop_bytes(row, self.now):
                    del self.directories[row.identity]
                continue
            if row.state is State.RECEIVING:
                self.store(custody.give_up(row, self.now))
                continue
            word, blocks = "put", tuple(row.blocks.items())
            if custody.asks_for_end(row, self.now):
                word = "cancel" if row.state is State.CANCELLING else "get"
                row = self.store(custody.give_up(row, self.now))
                if row.state in ENDS:
                    continue
            elif custody.is_blocked(row, self.rows.values()):
                continue
            else:
                row = self.store(moved(Role.CUSTODIAN, row, State.DELIVERING))
            fields, signer = row.fields, row.identity.owner.partition(":")[2]
            if self.lies and self.world.rng.random() < 0.3:
                forged = self.world.rng.choice(["blocks", "fields", "cancel"])
                if forged == "blocks":
                    blocks = tuple((number, "forged") for number, _ in blocks)
                elif forged == "fields":  # the first signature does not hold
                    self.send(Letter("T", "put", replace(fields, path="/u/forged"), "X", self.name, row.hop))
                else:
                    self.send(Letter("T", "cancel", fields, self.name, self.name))
            self.send(Letter("T", word, fields, signer, self.name, row.hop, row.manifest or (), blocks))

    def restart(self) -> None:
        for identity in self.unsynced & set(self.directories):
            self.directories[identity] = replace(self.directories[identity], blocks={})
        self.unsynced.clear()
        for identity, row in list(self.rows.items()):
            if row.state is State.RECEIVING:
                self.rows[identity] = replace(row, blocks={})
        for identity in [one for one in self.directories if one not in self.rows]:
            # The node died before the row, so nothing was promised. A whole one is taken, and half a one goes.
            if not custody_whole(self.directories[identity]):
                del self.directories[identity]
        lacking = [kept for identity, kept in self.directories.items() if identity not in self.rows]
        for row in custody.rebuild(lacking, self.now)[1]:
            self.rows[row.identity] = row

    def restore(self) -> None:
        self.epoch, rows = custody.rebuild(self.directories.values(), max(self.now, self.epoch))
        self.rows, self.order = {row.identity: row for row in rows}, 0


class Sender:
    """An origin. Its ledger is durable; its answers come by mail."""

    def __init__(self, world: World, name: str, signer: str) -> None:
        self.world, self.name, self.signer = world, name, signer
        rng = world.rng
        self.ends: dict[int, State] = {}
        self.kept: dict[int, set[str]] = {}
        self.known_epoch = 0
        self.cancelled: set[int] = set()
        self.fields: dict[int, Fields] = {}
        self.routes: dict[int, tuple[str, ...]] = {}
        self.releases: dict[int, str] = {}
        for seq in range(1, rng.randint(2, 5)):
            kind = rng.choice([Kind.FILE, Kind.FILE, Kind.FILE, Kind.DELETE, Kind.RENAME])
            path, second = rng.sample(["/u/a", "/u/b", "/u/c"], 2)
            made = START + rng.randint(0, 300) + (0 if world.rng.random() < 0.8 else 2000)
            names = {path, second} if kind is Kind.RENAME else {path}
            after = tuple(n for n, f in self.fields.items() if names & set(f.names))[-3:]
            after = after if rng.random() < 0.6 else ()
            self.fields[seq] = Fields(
                name, seq, kind, path, "T", made, made + rng.choice([1500, 6000, 40000]),
                size=2 if kind is Kind.FILE else None, second=second if kind is Kind.RENAME else "", after=after,
                all_below=seq if rng.random() < 0.1 else 0,
            )  # fmt: skip
            self.routes[seq] = rng.choice([("T",), ("A",), ("A",), ("B",), ("T", "A"), ("A", "B")])
            self.releases[seq] = rng.choice(["delivered", "custody"])

    def identity(self, seq: int) -> Identity:
        return Identity(f"key:{self.signer}", self.name, seq)

    def receive(self, letter: Letter) -> None:
        seq = letter.fields.seq
        if seq not in self.fields or letter.fields != self.fields[seq]:
            return
        if letter.word == "ask-first":
            rows = [Row(self.identity(n), f, self.ends.get(n, State.RECEIVING)) for n, f in self.fields.items()]
            digest = "/".join(content(letter.fields))
            after = sender.after_asking(letter.fields, digest, *letter.shown, rows)
            if after is sender.AfterAsking.REPEAT:
                self.known_epoch = letter.epoch
            else:
                ends = {"done": State.DONE, "superseded": State.SUPERSEDED}
                self.ends.setdefault(seq, ends.get(after.value, State.FAILED))
        elif letter.state is State.CUSTODY:
            self.kept.setdefault(seq, set()).add(letter.back)
        elif letter.state in ENDS:
            if letter.reason == "settled" and seq not in self.ends:
                raise Broken(f"4: {self.name}/{seq} is settled, and its owner never learned its end")
            self.ends.setdefault(seq, letter.state)

    def has_freed(self, seq: int) -> bool:
        return sender.may_free(self.releases[seq], 1, self.ends.get(seq), len(self.kept.get(seq, ())))

    def tick(self) -> None:
        rng = self.world.rng
        seq = rng.choice(list(self.fields))
        fields = self.fields[seq]
        if self.world.time < fields.made:
            return
        to = rng.choice(self.routes[seq])
        if seq not in self.ends and rng.random() < 0.06:
            self.cancelled.add(seq)
        if self.cancelled & {seq} and seq not in self.ends:
            self.world.mail.append(Letter(to, "cancel", fields, self.signer, self.name))
        elif self.has_freed(seq) and seq not in self.ends:
            to = rng.choice(sorted(self.kept.get(seq, {to})))
            self.world.mail.append(Letter(to, "get", fields, self.signer, self.name))
        elif seq not in self.ends:
            blocks = tuple(enumerate(content(fields))) if fields.kind is Kind.FILE else ()
            some = tuple(one for one in blocks if rng.random() < 0.8)
            changed = replace(fields, path="/u/b", made=fields.made + 1) if rng.random() < 0.05 else fields
            manifest = content(fields) if blocks else ()
            hop = Hop(known_epoch=self.known_epoch)
            self.world.mail.append(Letter(to, "put", changed, self.signer, self.name, hop, manifest, some))
        if rng.random() < 0.2:
            rows = {n: Row(self.identity(n), f, self.ends.get(n, State.RECEIVING)) for n, f in self.fields.items()}
            if (low := sender.low(rows)) > 1:
                self.world.mail.append(Letter("T", "low", fields, self.signer, self.name, epoch=low))


class World:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.time = START
        self.mail: list[Letter] = []
        self.late: list[Letter] = []
        self.changes: list[Row] = []
        self.promised: dict[Identity, set[str]] = {}
        self.lost_disks: set[str] = set()
        self.accepted: list[tuple[str, Identity, tuple[int, int]]] = []
        self.restored = 0
        self.crashes = self.rng.choice([0, 2, 5])
        self.crash_rate = 0.06
        self.working: Node | None = None
        self.terminal = Terminal(self)
        self.custodians = [Custodian(self, "A", False), Custodian(self, "B", self.rng.random() < 0.3)]
        self.senders = [Sender(self, "o1", "K1"), Sender(self, "o2", self.rng.choice(["K1", "K2", "H"]))]
        self.nodes: dict[str, Any] = {one.name: one for one in (self.terminal, *self.custodians, *self.senders)}
        self.hostile = self.rng.random() < 0.3
        self.loss = self.rng.choice([0.0, 0.1, 0.3])
        self.restores = self.rng.random() < 0.4
        if self.restores:
            self.terminal.backup = self.terminal.database()
        self.etags: set[str] = set()

    def shuffled(self, rows: Any) -> list[Row]:
        return self.rng.sample(list(rows), len(rows))

    def may_crash(self, node: Node) -> None:
        if self.working is node and self.crashes and self.rng.random() < self.crash_rate:
            self.crashes -= 1
            raise Crash

    def work(self, node: Any, act: Callable[..., None], *args: Any) -> None:
        self.working = node if isinstance(node, Node) else None
        try:
            act(*args)
        except Crash:
            self.working = None
            node.restart()
        self.working = None
        self.check()

    # -- what the owner of the truth sees

    def fields_of(self, identity: Identity) -> Fields | None:
        one = self.nodes.get(identity.origin)
        return one.fields.get(identity.seq) if one is not None and one.identity(identity.seq) == identity else None

    def on_change(self, row: Row) -> None:
        stored = self.terminal.rows.get(row.identity)
        told = f"{row.identity.origin}/{row.identity.seq}"
        if stored is None or stored.state is not State.PUBLISHING:
            raise Broken(f"1: {told} changes a name outside INTENT..DONE")
        fields = self.fields_of(row.identity)
        if fields != row.fields:
            raise Broken(f"5: {told} has fields that its owner did not sign, or no right")
        assert fields is not None
        if row.etag in self.etags:
            raise Broken(f"1: {told} gets an ETag for the second time")
        self.etags.add(row.etag)
        shown = self.terminal.files.get(self.terminal.tree.get(fields.path, 0))
        if fields.kind is Kind.FILE and shown == content(fields):
            raise Broken(f"1: {told} executes twice")
        is_put_again = self.restored and fields.kind is Kind.FILE
        if not is_put_again and any(one.identity == row.identity for one in self.changes):
            raise Broken(f"1: {told} executes twice")
        by_seq = {one.identity.seq for one in self.changes if one.identity[:2] == row.identity[:2]}
        one = self.nodes[row.identity.origin]
        for number in self.edges(one, fields):
            rows = self.terminal.rows.get(one.identity(number))
            ended = rows.state if rows else one.ends.get(number)  # a restore may have lost a failure
            if number not in by_seq and ended not in ENDS:
                raise Broken(f"1: {told} overtakes {number}")
            if number in fields.after and ended in (State.FAILED, State.EXPIRED) and number not in by_seq:
                raise Broken(f"1: {told} executes after {number} failed")
        for other in self.changes:
            if set(other.fields.names).isdisjoint(fields.names) or self.restored:
                continue
            if other.identity[:2] == row.identity[:2] and other.identity.seq > row.identity.seq:
                raise Broken(f"1: {told} replaces a later version")
            if (row.hop.custodian and row.hop.custodian == other.hop.custodian
                    and self.turn(row) < self.turn(other)):  # fmt: skip
                raise Broken(f"1: {told} replaces a version that {row.hop.custodian} accepted later")
        if self.restored and fields.kind is Kind.FILE:
            for other in self.changes:
                same = other.identity[:2] == row.identity[:2] and other.fields.kind is Kind.FILE
                if same and other.fields.path == fields.path and other.identity.seq > row.identity.seq:
                    inode = self.terminal.tree.get(fields.path, 0)
                    if self.terminal.files.get(inode) == content(other.fields):
                        raise Broken(f"1: {told} replaces a later version after a restore")
        self.changes.append(row)

    def turn(self, row: Row) -> int:
        return self.accepted.index((row.hop.custodian, row.identity, (row.hop.epoch, row.hop.order)))

    def was_later(self, one: Identity, other: Identity) -> bool:
        """Tell whether a custodian has accepted an operation after another one."""
        turns = [
            [(name, n) for n, (name, who, _) in enumerate(self.accepted) if who == asked] for asked in (one, other)
        ]
        return any(name == other_name and n > m for name, n in turns[0] for other_name, m in turns[1])

    def edges(self, one: Sender, fields: Fields) -> set[int]:
        """Every operation that has to end before this one, also through cancelled ones."""
        found: set[int] = set()
        todo = [*fields.after, *range(1, fields.all_below)]
        while todo:
            number = todo.pop()
            found.add(number)
            stored = self.terminal.rows.get(one.identity(number))
            if stored is not None and stored.state is State.CANCELLED:
                todo += [*one.fields[number].after]
        return found

    def on_custody(self, node: Custodian, row: Row) -> None:
        self.promised.setdefault(row.identity, set()).add(node.name)
        if node.rows.get(row.identity) is None or node.rows[row.identity].state is not State.CUSTODY:
            raise Broken("3: custody is answered before its row is durable")

    def check_answer(self, node: Terminal, letter: Letter, state: State, reason: str) -> None:
        identity = node.identity(letter)
        stored = node.rows.get(identity)
        if state in RESULTS and reason != "settled" and (stored is None or stored.state is not state):
            raise Broken(f"3: {state.value} is answered before it is durable")
        if state is State.DONE and node.tree != node.safe_tree:
            raise Broken("3: done is answered before the directories are durable")
        self.check_claim(identity, letter.fields, state, reason)

    def check_claim(self, identity: Identity, fields: Fields, state: State, reason: str) -> None:
        if self.fields_of(identity) != fields:
            return
        is_changed = any(row.identity == identity for row in self.changes)
        told = f"{identity.origin}/{identity.seq}"
        is_shown = self.restored and fields.kind is not Kind.FILE  # the names show its effect
        if state is State.DONE and not is_changed and not is_shown:
            raise Broken(f"5: {told} is reported as done and never ran")
        unsure = self.restored and fields.made <= self.restored + 1200
        if state in (State.CANCELLED, State.EXPIRED, State.FAILED) and is_changed and not unsure:
            raise Broken(f"4: {told} ran and is reported as {state.value}")
        if state is State.CANCELLED and identity.seq not in self.nodes[identity.origin].cancelled:
            raise Broken(f"5: {told} is cancelled and its owner never asked")
        if state is State.SUPERSEDED and reason != "settled" and not unsure:
            later = any(
                not set(row.fields.names).isdisjoint(fields.names)
                and (
                    (row.identity[:2] == identity[:2] and row.identity.seq > identity.seq)
                    or self.was_later(row.identity, identity)
                )
                for row in self.changes
            )
            if not later:
                raise Broken(f"1: {told} is reported as superseded and nothing is newer")

    def check(self) -> None:
        files = self.terminal.files
        for name, inode in self.terminal.tree.items():
            origin, *rest = files[inode][0].split(".")
            fields = self.nodes[origin].fields.get(int(rest[0])) if rest and origin in self.nodes else None
            if fields is None or files[inode] != content(fields):
                raise Broken(f"1: {name} holds bytes that nobody signed")
        if sum(row.identity.owner == "key:X" for row in self.terminal.rows.values()) > LIMIT.rows:
            raise Broken("5: a subject holds more than its share")
        for one in self.senders:
            for seq, fields in one.fields.items():
                if fields.kind is Kind.FILE and self.time < fields.expires - 1000:
                    self.check_copies(one, seq, fields)

    def check_copies(self, one: Sender, seq: int, fields: Fields) -> None:
        identity = one.identity(seq)
        promised = self.promised.get(identity, set())
        freed = one.has_freed(seq) and seq not in one.ends
        ended = self.terminal.rows.get(identity)
        if any(row.identity == identity for row in self.changes) or (
            self.restored and (seq in one.ends or seq in one.cancelled)  # a restore loses cancels
        ):
            return
        if ended is not None and ended.state in (State.SUPERSEDED, State.CANCELLED):
            return
        if one.ends.get(seq) in (State.SUPERSEDED, State.CANCELLED, State.EXPIRED_UNKNOWN):
            return
        is_custody = one.releases[seq] == "custody"
        rows = [custodian.rows.get(identity) for custodian in self.custodians]
        if self.restored and any(row is not None and row.state is State.SUPERSEDED for row in rows):
            return  # the custodian has delivered a later version itself
        keep = {name for name in promised if not (name in self.lost_disks and is_custody)}
        whole = [c.name for c in self.custodians if (row := c.directories.get(identity)) and custody_whole(row)]
        if (keep if is_custody else freed) and not set(whole) & (keep or promised or {""}):
            raise Broken(f"2: {identity.origin}/{seq} has no copy left")

    # -- the schedule

    def hostile_acts(self) -> None:
        one = self.rng.choice(self.senders)
        fields = one.fields[self.rng.choice(list(one.fields))]
        act = self.rng.choice(["cancel", "put", "fill"])
        if act == "cancel":
            self.mail.append(Letter("T", "cancel", fields, "X", "nobody"))
        elif act == "put":
            mine = replace(fields, origin="x", made=START, expires=START + 9000, after=(), all_below=0, seq=1)
            self.mail.append(Letter("T", "put", mine, "X", "nobody", manifest=content(mine)))
        else:
            for seq in range(2, 20):
                full = Fields("x", seq, Kind.FILE, f"/x/{seq}", "T", START, START + 9000, size=1)
                self.mail.append(Letter("T", "put", full, "X", "nobody", manifest=("never",)))

    def step(self, heals: bool) -> None:
        rng = self.rng
        roll = rng.random()
        if self.mail and roll < 0.6:
            letter = self.mail.pop(rng.randrange(len(self.mail)))
            if not heals and rng.random() < self.loss:
                return
            if not heals and rng.random() < 0.15:
                (self.mail if rng.random() < 0.6 else self.late).append(letter)
            self.deliver(letter)
        elif roll < 0.8:
            one = rng.choice(self.senders)
            self.work(one, one.tick)
        elif roll < 0.92:
            node = rng.choice([*self.custodians, self.terminal])
            self.work(node, node.tick)
        elif roll < 0.95 or heals:
            self.time += rng.choice([1, 30, 300])
        else:
            self.fault()

    def deliver(self, letter: Letter) -> None:
        node = self.nodes.get(letter.to)
        if isinstance(node, Node):
            # An owner that signs two versions: the first one that arrives is the operation, so only later ones differ.
            identity = node.identity(letter)
            if self.fields_of(identity) in (None, letter.fields) or identity in node.rows:
                self.work(node, node.receive, letter)
        elif node is not None:
            self.work(node, node.receive, letter)

    def fault(self) -> None:
        rng, place = self.rng, self.terminal
        roll = rng.random()
        custodian = rng.choice(self.custodians)
        if roll < 0.3:
            place.denied = set() if place.denied else {rng.choice(["/u/a", "/u/b", "/u/c"])}
        elif roll < 0.4 and self.hostile:
            self.hostile_acts()
        elif roll < 0.55 and self.restores:
            if rng.random() < 0.3:
                place.backup = place.database()
            else:
                self.work(place, place.restore)
        elif roll < 0.7:
            self.work(custodian, custodian.restore)
        elif roll < 0.75:
            custodian.directories.clear()
            custodian.rows.clear()
            self.lost_disks.add(custodian.name)
            custodian.epoch = max(custodian.epoch + 1, custodian.now)
        else:
            self.work(place, place.restart)
            self.work(custodian, custodian.restart)

    def run(self, steps: int = 160) -> str:
        try:
            for _ in range(steps):
                self.step(heals=False)
            self.crashes, self.terminal.denied = 0, set()
            for _ in range(60):
                self.step(heals=True)
            self.time += 45_000
            self.mail += self.late
            for _ in range(8):
                for node in (*self.custodians, self.terminal):
                    self.work(node, node.tick)
                mail, self.mail = self.mail, []
                for letter in mail:
                    self.deliver(letter)
            self.at_end()
        except (Broken, IllegalMove) as broken:
            return str(broken)
        return ""

    def at_end(self) -> None:
        for identity, names in self.promised.items():
            for name in names - self.lost_disks:
                row = self.nodes[name].rows.get(identity)
                is_kept = identity in self.nodes[name].directories
                if is_kept and (row is None or custody.has_duty(row)):
                    raise Broken(f"4: {identity.origin}/{identity.seq} has no end at {name}")


def custody_whole(row: Row) -> bool:
    return dict(row.blocks) == dict(enumerate(content(row.fields)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--schedules", type=int, default=20_000)
    options = parser.parse_args()
    broken = 0
    for seed in range(options.first, options.first + options.schedules):
        if said := World(seed).run():
            broken += 1
            print(f"seed {seed}: invariant {said}", flush=True)
    print(f"rules: {options.schedules} schedules, {broken} violations")
    return bool(broken)


if __name__ == "__main__":
    raise SystemExit(main())
