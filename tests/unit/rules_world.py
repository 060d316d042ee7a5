"""A seeded world of senders, two custodians and a terminal. The nodes run the product's rules on records in memory.

``World(seed).run()`` returns "" or the invariant that broke. ``make rules-sim`` runs many seeds.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from stageout.overlay.rules import custody, limits, operations, rights, sender, terminal
from stageout.overlay.rules.operations import Fields, Hop, Identity, Kind, Row, moved
from stageout.overlay.rules.rights import Action, Asker, Entry, Grant, NoRight, Right, Token
from stageout.overlay.rules.states import ENDS, RESULTS, SETTLED, IllegalMove, Role, State
from stageout.overlay.rules.terminal import Known, Seen, Step, Verdict

START = 1_000_000
ALL = (Grant(frozenset(Right), ()),)
PREFIXES = {"K1": "/u", "K2": "/u", "X": "/x", "iss": "/u", "A": "/u", "B": "/u", "iss2": "/x"}
#: Keys and subjects by the issuer of their token. H: a pilot's key. OLD: another one, whose token ended before.
ISSUERS = {"H": "K1", "OLD": "K1", "U": "iss", "V": "iss2"}
UNSIGNED = frozenset("UVAB")
#: A custodian's own table: subjects whose unsigned operations it delivers in its own name.
ENTRIES = {"K1": Entry(None), "K2": Entry(None), "H": Entry(None), "U": Entry("/u")}
ALLOWED_OWNERS = frozenset({"key:K1", "key:K2", "key:H", "sub:3:iss:U"})
TOKEN_S, YEAR_S = 900, 31_536_000
FILES = ("/u/a", "/u/b", "/u/c", "/u/d/f")
DIRECTORY = ("dir",)
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
    minted: int = START  # of the token
    span: tuple[int, int] = (0, 0)
    parts: tuple[Any, ...] = ()
    until: str = "done"


def token_of(signer: str, minted: int = START) -> Token:
    holder = signer if signer in ("H", "OLD") else ""
    minted = START - 9000 if signer == "OLD" else minted
    life = (minted, minted, minted + TOKEN_S)
    is_own = signer not in UNSIGNED
    return Token(ISSUERS.get(signer, signer), signer, frozenset("TAB"), ALL, *life, holder=holder, is_own=is_own)


def key_of(signer: str) -> str:
    return "" if signer in UNSIGNED else signer


def owner_of(signer: str) -> str:
    return rights.owner_of(token_of(signer), key_of(signer))


def overlap(one: Fields, other: Fields) -> bool:
    """Tell the truth about names: the invariants do not ask the rules."""
    first, second = (
        [*f.names, *(f"{f.path}/" for _ in "x" if f.kind in (Kind.DELETE, Kind.RENAME))] for f in (one, other)
    )
    return any(a == b or (a[-1] == "/" and b.startswith(a)) or (b[-1] == "/" and a.startswith(b))
               for a in first for b in second)  # fmt: skip


def content(fields: Fields) -> tuple[str, ...]:
    return tuple(f"{fields.origin}.{fields.seq}.{number}" for number in range(2))


class Node:
    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.skew = world, name, world.rng.randint(-300, 300)
        self.clock = limits.Clock(world.time + self.skew, world.time)
        self.jump = 0
        self.rows: dict[Identity, Row] = {}
        #: blocks that a power failure takes
        self.unsynced: dict[Identity, set[int]] = {}
        self.torn: set[tuple[Identity, int]] = set()

    @property
    def now(self) -> int:
        self.clock = self.clock.at(self.world.time + self.skew + self.jump, self.world.time)
        return self.clock.latest

    def store(self, row: Row) -> Row:
        self.rows[row.identity] = row
        self.world.may_crash(self)
        return row

    def send(self, letter: Letter) -> None:
        self.world.mail.append(letter)

    def identity(self, letter: Letter) -> Identity:
        return Identity(owner_of(letter.signer), letter.fields.origin, letter.fields.seq)

    def synced(self, identity: Identity) -> None:
        self.unsynced.pop(identity, None)

    def fails(self, row: Row) -> Row:
        lost = self.unsynced.get(row.identity, set())
        self.torn |= {(row.identity, number) for number in lost}
        return custody.after_power_failure(row, frozenset(set(row.blocks) - lost))

    def wait(self, letter: Letter) -> None:
        mine = {
            row.identity.seq: row.state for row in self.rows.values() if row.identity[:2] == self.identity(letter)[:2]
        }
        is_reached, _ = sender.reached(mine, *letter.span, letter.until)
        if is_reached:
            self.world.check_wait(self, letter)

    def batch(self, letter: Letter, one: Callable[[Letter], None]) -> None:
        """Judge each part by itself. The answer has the numbers that are not done, all others count as done."""
        try:
            operations.check_batch(*letter.span, [part.fields for part in letter.parts])
        except operations.Malformed:
            return
        mail, self.world.mail = self.world.mail, []
        try:
            for part in letter.parts:
                one(part)
        except Crash:
            self.world.mail = mail
            raise
        answers, self.world.mail = self.world.mail, mail
        told = {answer.fields.seq: answer for answer in answers}
        if len(told) == len(letter.parts):
            rest = tuple(answer for answer in told.values() if answer.state is not State.DONE)
            self.send(letter._replace(to=letter.back, word="results", back=self.name, parts=rest))

    def with_blocks(self, row: Row, letter: Letter) -> Row:
        kept = dict(row.blocks)
        for number, digest in letter.blocks:
            try:
                new = custody.keep_digest(kept, number, digest)
            except custody.BlockDiffers:
                continue
            if number not in kept:
                self.unsynced.setdefault(row.identity, set()).add(number)
                self.torn.discard((row.identity, number))
            kept = new
        manifest = letter.manifest or row.manifest
        for number in custody.wrong_blocks(kept, manifest) if manifest else ():
            del kept[number]
        return replace(row, blocks=kept, manifest=manifest)


class Terminal(Node):
    def __init__(self, world: World) -> None:
        super().__init__(world, "T")
        self.low: dict[tuple[str, str], int] = {}
        self.number = self.high_water = self.epoch = self.high_epoch = self.inodes = 0
        self.tree: dict[str, int] = {}
        self.safe_tree: dict[str, int] = {}
        self.files: dict[int, tuple[str, ...]] = {}
        self.trash: dict[Identity, int] = {}
        self.known: dict[str, int] = {}
        self.soft: set[int] = set()
        self.denied: set[str] = set()
        self.backup: Any = None
        self.safe_backup: Any = None
        self.reserved: dict[Identity, int] = {}

    def database(self) -> Any:
        rows = {}
        for identity, row in self.rows.items():  # the stored bitmaps have synced blocks only
            unsynced = self.unsynced.get(identity, set())
            rows[identity] = replace(row, blocks={n: d for n, d in row.blocks.items() if n not in unsynced})
        return rows, dict(self.low), self.number, dict(self.known), self.epoch

    def save(self) -> None:
        self.backup, self.safe_backup = (
            self.database(),
            (dict(self.safe_tree), dict(self.trash), self.high_water, self.high_epoch),
        )

    def restore(self, whole: bool = False) -> None:
        """Put the database back; with ``whole`` also the tree. Then the administrator runs ``router new-epoch``.

        That command needs a clock that is right, and the restore takes a minute.
        """
        whole = whole and not self.jump
        self.rows, self.low, self.number, self.known, self.epoch = self.backup
        if whole:
            self.world.time += 60
            tree, trash, self.high_water, self.high_epoch = self.safe_backup
            self.tree, self.safe_tree, self.trash = dict(tree), dict(tree), dict(trash)
            self.world.restored_whole = True
        self.backup = self.database()
        self.reserved.clear()
        self.world.restored = self.world.time
        if whole or terminal.needs_new_epoch(self.number, self.high_water, self.epoch, self.high_epoch):
            self.high_epoch = terminal.new_epoch(self.now, max(self.epoch, self.high_epoch))
            self.epoch, self.number = self.high_epoch, self.high_water
        self.world.may_crash(self)

    def known_of(self, identity: Identity, fields: Fields) -> Known:
        rows = {row.identity.seq: row for row in self.rows.values() if row.identity[:2] == identity[:2]}
        marks = tuple(row for row in self.rows.values() if operations.touches(row.fields, fields))
        return Known(rows, self.low.get(identity[:2], 1), marks, self.epoch)

    def answer(self, letter: Letter, state: State | None, reason: str = "", word: str = "answer") -> None:
        if state is State.REFUSED:
            self.world.refused.add((letter.fields.origin, letter.fields.seq))
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
        if letter.word == "wait":
            return self.wait(letter)
        if letter.word == "batch":
            return self.batch(letter, self.receive)
        if letter.word == "low":
            self.low[identity[:2]] = max(self.low.get(identity[:2], 1), letter.epoch)
            return self.tick()
        known = self.known_of(identity, fields)
        if letter.word == "get":
            if row is None or row.state not in ENDS:
                verdict = terminal.judge(identity, fields, letter.hop, known, Seen(denied="asked only"), self.now)
                if verdict.step is not Step.RECORD or verdict.state not in (State.EXPIRED, State.EXPIRED_UNKNOWN):
                    return self.answer(letter, verdict.state if verdict.step is Step.SETTLED else None, "settled")
                row = self.end(row or Row(identity, fields), verdict)
            return self.answer(letter, row.state, row.reason)
        if letter.word == "steal":
            return self.foreign_cancel(asker, letter)
        if letter.word == "cancel":
            if row is None and not self.has_room(identity, limits.Share(rows=1, cancels=1)):
                return None
            verdict = terminal.cancel(fields, known, self.now)
            return self.decide(letter, row or Row(identity, fields), verdict)
        try:
            operations.check_ranges(fields)
            token = token_of(letter.signer, letter.minted)
            if letter.signer in UNSIGNED:
                rights.check_bearer(fields, token, "T", PREFIXES, self.now)
            else:
                rights.check_chain(fields, token, letter.signer, "T", PREFIXES, self.now,
                                   letter.hop.received, router, frozenset("AB"))  # fmt: skip
            if row is None and not self.has_room(identity, limits.Share(rows=1, size=fields.size or 0)):
                return self.answer(letter, State.REFUSED, "share")
        except operations.Malformed:
            return None
        except NoRight:
            return self.answer(letter, State.REFUSED, "no right or no share")
        except rights.BadToken:
            return self.answer(letter, State.REFUSED, "token")
        issuer = rights.issuer_of(token, key_of(letter.signer))
        new = row or Row(identity, fields, hop=letter.hop, issuer=issuer)
        if row is None or row.state not in ENDS:
            new = replace(new, hop=letter.hop, carriers=new.carriers | ({router} if router else set()))
            new = self.with_blocks(new, letter) if fields.kind is Kind.FILE else new
        inode = self.tree.get(fields.path)
        seen = Seen(
            fields.kind is not Kind.FILE or custody.is_whole(new),
            "denied" if fields.path in self.denied or self.is_in_the_way(fields) else "",
            fields.kind in (Kind.FILE, Kind.MKDIR) or inode is not None,
            any(self.tree.get(name) != self.known.get(name) for name in fields.names if name in self.tree),
        )
        try:
            verdict = terminal.judge(identity, fields, letter.hop, known, seen, self.now)
        except operations.Differs:
            return None
        return self.decide(letter, new, verdict)

    def is_in_the_way(self, fields: Fields) -> bool:
        return fields.kind is Kind.RENAME and self.files.get(self.tree.get(fields.second, 0)) == DIRECTORY

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
        else:
            if row.fields.size and not custody.is_whole(row):
                had = self.rows.get(row.identity)
                if row.identity not in self.reserved or had is None or len(had.blocks) < len(row.blocks):
                    self.reserved[row.identity] = self.world.time
            self.store(row)
            self.answer(letter, None)

    def publish(self, letter: Letter, row: Row) -> None:
        fields = row.fields
        row = moved(Role.TERMINAL, row, State.COMPLETE)
        inode = self.tree.get(fields.path, 0)
        if fields.kind is Kind.FILE or (fields.kind is Kind.MKDIR and not inode):
            self.inodes += 1
            inode = self.inodes
            bytes_of = {n: "torn" if (row.identity, n) in self.torn else digest for n, digest in row.blocks.items()}
            self.files[inode] = tuple(bytes_of[number] for number in sorted(bytes_of)) or DIRECTORY
            self.soft.add(inode)
        for step in terminal.PUBLISH_STEPS:
            if step == "sync":
                self.soft.discard(inode)
                self.synced(row.identity)
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
        self.synced(row.identity)

    def change(self, row: Row, inode: int) -> None:
        fields = row.fields
        self.world.on_change(row)
        self.tree = moved_names(self.tree, fields, inode)
        parent = fields.path.rpartition("/")[0]
        if fields.kind is Kind.FILE and parent != "/u" and parent not in self.tree:
            self.inodes += 1
            self.tree[parent] = self.inodes
            self.files[self.inodes] = DIRECTORY
        if fields.kind is Kind.DELETE:
            self.trash[row.identity] = inode

    def finish(self, row: Row) -> Row:
        self.known = moved_names(self.known, row.fields, row.inode)
        parent = row.fields.path.rpartition("/")[0]
        if row.fields.kind is Kind.FILE and parent in self.tree:
            self.known.setdefault(parent, self.tree[parent])
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
        for row in list(self.rows.values()):
            self.rows[row.identity] = self.fails(row)
        self.unsynced.clear()
        for row in list(self.rows.values()):
            if row.state is State.PUBLISHING:
                there = [self.tree.get(name, 0) for name in (row.fields.path, row.fields.second)]
                staged = 0 if row.inode in self.tree.values() else row.inode
                found = terminal.Found(staged, there[0], there[1], self.trash.get(row.identity, 0))
                if terminal.recovered(row, found) is State.DONE:
                    if row.fields.kind is Kind.MKDIR and found.path == row.inode:
                        self.world.changes.append(row)  # the directory was there before
                    self.finish(row)
                else:
                    self.store(moved(Role.TERMINAL, row, State.COMPLETE))

    def tick(self) -> None:
        self.unsynced.clear()  # the timer
        for identity, last_data in list(self.reserved.items()):
            row = self.rows.get(identity)
            if row is None or row.state in ENDS or limits.lease_ended(last_data, self.world.time):
                del self.reserved[identity]
        if any(self.world.time - last_data >= 600 for last_data in self.reserved.values()):
            raise Broken("5: space stays reserved without data")
        for row in list(self.rows.values()):
            low = self.low.get(row.identity[:2], 1)
            if terminal.may_forget(row, low, self.now):
                del self.rows[row.identity]


def moved_names(tree: dict[str, int], fields: Fields, inode: int) -> dict[str, int]:
    """Return names and inodes after a change of one name, with all below it."""
    if fields.kind in (Kind.FILE, Kind.MKDIR):
        return {**tree, fields.path: inode}
    taken = {name: one for name, one in tree.items() if operations.is_at_or_below(name, fields.path)}
    rest = {name: one for name, one in tree.items() if name not in taken}
    if fields.kind is Kind.RENAME:
        rest.update(
            {fields.second + name[len(fields.path) :]: one for name, one in taken.items()}, **{fields.second: inode}
        )
    return rest


class Custodian(Node):
    def __init__(self, world: World, name: str, lies: bool) -> None:
        super().__init__(world, name)
        self.lies, self.epoch, self.order = lies, START, 0
        self.directories: dict[Identity, Row] = {}
        #: of the token with which an operation came, beside its data
        self.minted: dict[Identity, int] = {}

    def receive(self, letter: Letter) -> None:
        identity = self.identity(letter)
        if letter.back == "T":
            asked = self.rows.get(identity) or next((r for r in self.rows.values() if r.fields == letter.fields), None)
            return self.answered(letter, asked) if asked else None
        if letter.word == "wait":
            return self.wait(letter)
        if letter.word == "batch":
            return self.batch(letter, self.receive)
        row = self.rows.get(identity)
        if letter.word == "cancel":
            if row is None:
                row = Row(identity, letter.fields)
            row = self.store(custody.cancel(row))
            return self.report(letter, row)
        if letter.word == "get":
            return self.report(letter, row) if row else None
        try:
            operations.check_ranges(letter.fields)
            rights.check_times(token_of(letter.signer, letter.minted), self.now)
            rights.check_custody(ENTRIES.get(letter.signer), letter.fields, letter.signer not in UNSIGNED)
            if row:
                operations.differs(row, letter.fields)
        except (NoRight, rights.BadToken, operations.Differs):
            return None
        if row is None:
            row = Row(identity, letter.fields, custody=True, hop=Hop(received=self.now))
            self.minted[identity] = letter.minted
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
        hop = Hop(self.name, self.epoch, self.order, row.hop.received)
        row = moved(Role.CUSTODIAN, replace(row, hop=hop), State.CUSTODY)
        self.world.accepted.append((self.name, row.identity[1:], (self.epoch, self.order)))
        for step in custody.CUSTODY_STEPS:
            if step == "sync":
                self.synced(row.identity)
            elif step == "directory":
                self.directories[row.identity] = row
                self.world.may_crash(self)
            elif step == "row":
                self.store(row)
            else:
                self.world.on_custody(self, row)
                self.report(letter, row)
                self.world.may_crash(self)
        self.synced(row.identity)

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
        if letter.state is State.REFUSED and letter.reason == "token" and row.identity.owner.startswith("key:"):
            raise Broken(f"4: {row.identity.origin}/{row.identity.seq} is in custody and is refused for its token")
        self.store(custody.on_answer(row, letter.state, letter.reason, self.now))

    def tick(self) -> None:
        self.unsynced.clear()
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
            fields, minted = row.fields, self.minted.get(row.identity, START)
            if row.identity.owner.startswith("sub:"):  # in its own name
                signer, minted = self.name, self.world.terminal.now
            else:
                signer = row.identity.owner.partition(":")[2]
            if self.lies and self.world.rng.random() < 0.3:
                forged = self.world.rng.choice(["blocks", "fields", "cancel"])
                if forged == "blocks":
                    blocks = tuple((number, "forged") for number, _ in blocks)
                elif forged == "fields":  # the first signature does not hold
                    self.send(Letter("T", "put", replace(fields, path="/u/forged"), "X", self.name, row.hop))
                elif signer != self.name:  # what it brings in its own name, it may cancel
                    self.send(Letter("T", "steal", fields, self.name, self.name))
            self.send(Letter("T", word, fields, signer, self.name, row.hop, row.manifest or (), blocks, minted=minted))

    def restart(self) -> None:
        for rows in (self.directories, self.rows):
            for identity, row in rows.items():
                rows[identity] = self.fails(row)
        self.unsynced.clear()
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
        self.known_epoch: dict[int, int] = {}
        self.cancelled: set[int] = set()
        self.fields: dict[int, Fields] = {}
        self.routes: dict[int, tuple[str, ...]] = {}
        self.releases: dict[int, str] = {}
        for seq in range(1, rng.randint(2, 5)):
            kind = rng.choice([Kind.FILE, Kind.FILE, Kind.FILE, Kind.FILE, Kind.DELETE, Kind.RENAME, Kind.MKDIR])
            files = FILES[:2] if world.is_narrow else FILES
            path, second = rng.sample(files[:3], 2)
            if world.is_narrow and kind is Kind.MKDIR:
                kind = Kind.RENAME
            elif kind is Kind.MKDIR or (kind is not Kind.FILE and rng.random() < 0.35):
                path, second = "/u/d", "/u/e"
            elif kind is not Kind.RENAME:
                path = rng.choice(files)
            made = START + rng.randint(0, 300) + (0 if world.rng.random() < 0.8 else 2000)
            fields = Fields(
                name, seq, kind, path, "T", made, made + rng.choice([1500, 6000, 40000]),
                size=2 if kind is Kind.FILE else None, second=second if kind is Kind.RENAME else "",
                all_below=seq if rng.random() < (0.5 if path == "/u/d" and kind is not Kind.MKDIR else 0.1) else 0,
            )  # fmt: skip
            after = tuple(n for n, other in self.fields.items() if operations.touches(other, fields))
            after = after[-rng.choice([1, 3]) :]
            self.fields[seq] = replace(fields, after=after if rng.random() < (0.3 if world.is_narrow else 0.6) else ())
            more = [("T", "A"), ("A", "B")]
            self.routes[seq] = rng.choice([("T",), ("A",), ("A",), ("B",), *more])
            if world.is_narrow and rng.random() < 0.7:
                self.routes[seq] = ("A",)
            if signer in UNSIGNED:  # all use one route: each custodian brings them as its own
                self.routes[seq] = (self.routes[1][0],)
            self.releases[seq] = rng.choice(["delivered", "custody"])

    def identity(self, seq: int) -> Identity:
        return Identity(owner_of(self.signer), self.name, seq)

    def identities(self, seq: int) -> list[Identity]:
        """The operation at its routers: a custodian brings an unsigned one in its own name."""
        mine = self.identity(seq)
        brought = self.routes[seq] if self.signer in UNSIGNED else ()
        return [mine, *(mine._replace(owner=owner_of(name)) for name in brought if name != "T")]

    def receive(self, letter: Letter) -> None:
        if letter.word == "results":
            told = {part.fields.seq: part for part in letter.parts}
            for number in range(letter.span[0], letter.span[1] + 1):
                fields = self.fields[number]
                if number not in told:
                    self.world.check_claim(self.identity(number), fields, State.DONE, "")
                    self.ends.setdefault(number, State.DONE)
                else:
                    self.receive(told[number])
            return
        seq = letter.fields.seq
        if seq not in self.fields or letter.fields != self.fields[seq]:
            return
        if letter.word == "ask-first":
            rows = [Row(self.identity(n), f, self.ends.get(n, State.RECEIVING)) for n, f in self.fields.items()]
            digest = "/".join(content(letter.fields))
            after = sender.after_asking(letter.fields, digest, *letter.shown, rows)
            if after is sender.AfterAsking.REPEAT:
                self.known_epoch[seq] = letter.epoch
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
        minted = self.world.nodes[to].now - rng.choice([0, 0, 600])  # by the Date of its answers
        if rng.random() < 0.05:
            self.wait(to, fields)
        if rng.random() < 0.15 and self.batch(to, seq, minted):
            return
        if seq not in self.ends and rng.random() < self.world.cancels:
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
            hop = Hop(known_epoch=self.known_epoch.get(seq, 0))
            put = Letter(to, "put", changed, self.signer, self.name, hop, manifest, some, minted=minted)
            self.world.mail.append(put)
        if rng.random() < (0.7 if self.world.is_narrow else 0.3):
            rows = {n: Row(self.identity(n), f, self.ends.get(n, State.RECEIVING)) for n, f in self.fields.items()}
            if (low := sender.low(rows)) > 1:
                self.world.mail.append(Letter("T", "low", fields, self.signer, self.name, epoch=low))

    def wait(self, to: str, fields: Fields) -> None:
        """Ask for commit or push, also at a router that never got some of the numbers."""
        first = self.world.rng.randint(1, len(self.fields))
        span = (first, self.world.rng.randint(first, len(self.fields) + 1))
        until = self.world.rng.choice(["custody", "done"]) if to != "T" else "done"
        self.world.mail.append(Letter(to, "wait", fields, self.signer, self.name, span=span, until=until))

    def batch(self, to: str, first: int, minted: int) -> bool:
        """Send files in one request. A client that leaves out a number in the middle has an error."""
        last = self.world.rng.randint(first, len(self.fields))
        numbers = [n for n in range(first, last + 1) if self.fields[n].kind is Kind.FILE]
        others = any(to not in self.routes[n] or self.fields[n].made > self.world.time for n in numbers)
        if len(numbers) < 2 or others or numbers[-1] != last or any(self.releases[n] == "custody" for n in numbers):
            return False
        parts = tuple(
            Letter(to, "put", self.fields[n], self.signer, self.name, Hop(known_epoch=self.known_epoch.get(n, 0)),
                   content(self.fields[n]),
                   tuple(enumerate(content(self.fields[n]))), minted=minted)
            for n in numbers
        )  # fmt: skip
        self.world.mail.append(
            Letter(to, "batch", parts[0].fields, self.signer, self.name, span=(first, last), parts=parts, minted=minted)
        )
        return True


class World:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.time = START
        self.mail: list[Letter] = []
        self.late: list[Letter] = []
        self.changes: list[Row] = []
        self.promised: dict[Identity, set[str]] = {}
        self.lost_disks: set[str] = set()
        self.accepted: list[tuple[str, tuple[str, int], tuple[int, int]]] = []
        self.restored = 0
        self.cancels = self.rng.choice([0.03, 0.03, 0.15])
        #: few names and one custodian: their order matters
        self.is_narrow = self.rng.random() < 0.35
        self.crashes = self.rng.choice([0, 2, 5])
        self.crash_rate = 0.06
        self.working: Node | None = None
        self.restored_whole = False
        self.refused: set[tuple[str, int]] = set()
        self.terminal = Terminal(self)
        self.custodians = [Custodian(self, "A", False), Custodian(self, "B", self.rng.random() < 0.3)]
        self.senders = [Sender(self, "o1", "K1"), Sender(self, "o2", self.rng.choice(["K1", "K2", "H", "U"]))]
        self.nodes: dict[str, Any] = {one.name: one for one in (self.terminal, *self.custodians, *self.senders)}
        self.hostile = self.rng.random() < 0.3
        self.loss = self.rng.choice([0.0, 0.1, 0.3])
        self.restores = self.rng.random() < 0.4
        self.restores_whole = self.rng.random() < 0.5
        if self.restores:
            self.terminal.save()
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
            if node is self.terminal and self.restores and self.restores_whole and self.rng.random() < 0.5:
                node.restore(whole=True)  # its disk died, too
            node.restart()
        self.working = None
        self.check()

    # -- what the owner of the truth sees

    def fields_of(self, identity: Identity) -> Fields | None:
        one = self.nodes.get(identity.origin)
        if not isinstance(one, Sender) or identity.seq not in one.fields:
            return None
        return one.fields[identity.seq] if identity in one.identities(identity.seq) else None

    def has_changed(self, identity: Identity) -> bool:
        """Tell whether an operation has changed a name. One origin has one owner, so the owner's name is left out."""
        return any(row.identity[1:] == identity[1:] for row in self.changes)

    def stored(self, one: Sender, seq: int) -> Row | None:
        """Return the terminal's row of an operation."""
        return next((self.terminal.rows[name] for name in one.identities(seq) if name in self.terminal.rows), None)

    def on_change(self, row: Row) -> None:
        stored = self.terminal.rows.get(row.identity)
        told = f"{row.identity.origin}/{row.identity.seq}"
        if stored is None or stored.state is not State.PUBLISHING:
            raise Broken(f"1: {told} changes a name outside INTENT..DONE")
        fields = self.fields_of(row.identity)
        if fields != row.fields:
            raise Broken(f"5: {told} has fields that its owner did not sign, or no right")
        assert fields is not None
        self.check_turn(row)
        if row.etag in self.etags:
            raise Broken(f"1: {told} gets an ETag for the second time")
        self.etags.add(row.etag)
        shown = self.terminal.files.get(self.terminal.tree.get(fields.path, 0))
        if fields.kind is Kind.FILE and shown == content(fields):
            raise Broken(f"1: {told} executes twice")
        is_put_again = self.restored and fields.kind in (Kind.FILE, Kind.MKDIR)
        if not is_put_again and self.has_changed(row.identity):
            raise Broken(f"1: {told} executes twice")
        by_seq = {one.identity.seq for one in self.changes if one.identity.origin == row.identity.origin}
        one = self.nodes[row.identity.origin]
        for number in self.edges(one, fields):
            rows = self.stored(one, number)
            ended = rows.state if rows else one.ends.get(number)  # a restore may have lost a failure
            if number not in by_seq and ended not in ENDS:
                raise Broken(f"1: {told} overtakes {number}")
            if number in fields.after and ended in (State.FAILED, State.EXPIRED) and number not in by_seq:
                raise Broken(f"1: {told} executes after {number} failed")
        for other in self.changes:
            if self.is_later(other, row) and overlap(other.fields, fields):
                if not self.restored:
                    raise Broken(
                        f"1: {told} takes away a later version of {other.identity.origin}/{other.identity.seq}"
                    )
                if other.fields.kind is Kind.FILE and content(other.fields) in self.taken_away(fields):
                    raise Broken(f"1: {told} takes away a later version after a restore")
        self.changes.append(row)

    def taken_away(self, fields: Fields) -> list[tuple[str, ...]]:
        """Return the files that a change replaces, moves or deletes."""
        takes = fields.kind in (Kind.DELETE, Kind.RENAME)
        tree = self.terminal.tree
        names = [n for n in tree if n in fields.names or (takes and operations.is_at_or_below(n, fields.path))]
        return [self.terminal.files[tree[name]] for name in names]

    def is_later(self, other: Row, row: Row) -> bool:
        """Tell whether another change has to come after this one: the same origin, or the same custodian."""
        if other.identity.origin == row.identity.origin:
            return other.identity.seq > row.identity.seq
        return row.hop.custodian == other.hop.custodian != "" and self.turn(row) < self.turn(other)

    def turn(self, row: Row) -> int:
        return self.accepted.index((row.hop.custodian, row.identity[1:], (row.hop.epoch, row.hop.order)))

    def was_later(self, one: Identity, other: Identity) -> bool:
        """Tell whether a custodian has accepted an operation after another one."""
        turns = [
            [(name, n) for n, (name, who, _) in enumerate(self.accepted) if who == asked[1:]] for asked in (one, other)
        ]
        return any(name == other_name and n > m for name, n in turns[0] for other_name, m in turns[1])

    def edges(self, one: Sender, fields: Fields) -> set[int]:
        """Every operation that has to end before this one, also through cancelled ones."""
        found: set[int] = set()
        todo = [*fields.after, *range(1, fields.all_below)]
        while todo:
            number = todo.pop()
            found.add(number)
            stored = self.stored(one, number)
            if stored is not None and stored.state is State.CANCELLED:
                todo += [*one.fields[number].after]
        return found

    def is_replaced(self, identity: Identity, fields: Fields) -> bool:
        """Tell whether a later operation has replaced or deleted what a file would be. A rename would have moved it."""
        one = self.nodes[identity.origin]
        done = [row for row in self.changes if self.is_after(row, identity)]
        if self.restored:  # ends that the names have shown
            rows = [row for c in self.custodians for row in c.rows.values() if row.identity.origin == identity.origin]
            rows += [Row(one.identity(seq), f, one.ends[seq]) for seq, f in one.fields.items() if seq in one.ends]
            done += [row for row in rows if row.state is State.DONE and row.identity.seq > identity.seq]
        return any(
            overlap(row.fields, fields)
            and not (
                fields.kind is Kind.FILE
                and row.fields.kind is Kind.RENAME
                and operations.is_at_or_below(fields.path, row.fields.path)
            )
            for row in done
        )

    def check_turn(self, row: Row) -> None:
        """Check that a custodian delivers in its order what touches one name, but for refused operations."""
        name = row.hop.custodian
        if not name or self.restored or name in self.lost_disks:
            return
        for by, who, order in self.accepted[: self.turn(row)]:
            one = self.nodes.get(who[0])
            if by != name or who == row.identity[1:] or who in self.refused or not isinstance(one, Sender):
                continue
            seq, fields = who[1], one.fields[who[1]]
            kept, stored = self.nodes[name].rows.get(one.identity(seq)), self.stored(one, seq)
            # a death before the row takes the number away
            is_free = kept is None or kept.hop[1:3] != order or seq in one.cancelled or len(one.routes[seq]) > 1
            is_ended = (stored is not None and stored.state in RESULTS) or self.has_changed(one.identity(seq))
            if is_free or is_ended or seq in one.ends or self.time > fields.expires - 1000:
                continue
            if one.signer == self.nodes[row.identity.origin].signer and overlap(fields, row.fields):
                raise Broken(f"1: {row.identity.origin}/{row.identity.seq} passes {who[0]}/{seq} at {name}")

    def is_after(self, row: Row, identity: Identity) -> bool:
        same = row.identity.origin == identity.origin and row.identity.seq > identity.seq
        return same or self.was_later(row.identity, identity)

    def check_wait(self, node: Node, letter: Letter) -> None:
        """Check that a wait ended because each number has what was asked for."""
        one = self.nodes[letter.fields.origin]
        for seq in range(letter.span[0], letter.span[1] + 1):
            rows = [node.rows[name] for name in one.identities(seq) if name in node.rows] if seq in one.fields else []
            told = f"{one.name}/{seq}"
            if not rows:
                raise Broken(f"5: {node.name} counts {told} as reached and does not know it")
            is_kept = letter.until == "custody" and rows[0].identity in getattr(node, "directories", {})
            if rows[0].state not in SETTLED and not (is_kept and custody.has_duty(rows[0])):
                raise Broken(f"5: {node.name} counts {told} as reached, and it is {rows[0].state.value}")

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
        is_changed = self.has_changed(identity)
        told = f"{identity.origin}/{identity.seq}"
        is_shown = self.restored and fields.kind is not Kind.FILE  # the names show its effect
        if state is State.DONE and not is_changed and not is_shown:
            raise Broken(f"5: {told} is reported as done and never ran")
        unsure = self.restored and fields.made <= self.restored + 1200
        if state in (State.CANCELLED, State.EXPIRED, State.FAILED) and is_changed and not unsure:
            raise Broken(f"4: {told} ran and is reported as {state.value}")
        if state is State.CANCELLED and identity.seq not in self.nodes[identity.origin].cancelled:
            raise Broken(f"5: {told} is cancelled and its owner never asked")
        is_early = self.time < fields.expires - 301 and reason not in ("settled", terminal.OUTCOME_UNKNOWN)
        if state in (State.EXPIRED, State.EXPIRED_UNKNOWN) and is_early:
            raise Broken(f"4: {told} is reported as expired long before")
        if state is State.SUPERSEDED and not is_changed and not self.is_replaced(identity, fields):
            raise Broken(f"2: {told} is reported as superseded and nothing has replaced it")

    def check(self) -> None:
        files = self.terminal.files
        for name, inode in self.terminal.tree.items():
            if files[inode] == DIRECTORY:
                continue
            origin, *rest = files[inode][0].split(".")
            fields = self.nodes[origin].fields.get(int(rest[0])) if rest and origin in self.nodes else None
            if fields is None or files[inode] != content(fields):
                raise Broken(f"1: {name} holds bytes that nobody signed")
        if sum(row.identity.owner == "key:X" for row in self.terminal.rows.values()) > LIMIT.rows:
            raise Broken("5: a subject holds more than its share")
        for custodian in self.custodians:
            if any(row.identity.owner not in ALLOWED_OWNERS for row in custodian.rows.values()):
                raise Broken("5: a custodian keeps an operation without an entry of its own")
        for one in self.senders:
            for seq, fields in one.fields.items():
                if fields.kind is Kind.FILE and self.time < fields.expires - 1000:
                    self.check_copies(one, seq, fields)

    def check_copies(self, one: Sender, seq: int, fields: Fields) -> None:
        identity = one.identity(seq)
        promised = self.promised.get(identity, set())
        freed = one.has_freed(seq) and seq not in one.ends
        ended = self.stored(one, seq)
        if self.has_changed(identity) or (self.restored and seq in one.cancelled):  # a restore loses cancels
            return
        if ended is not None and ended.state in (State.SUPERSEDED, State.CANCELLED):
            return
        if one.ends.get(seq) in (State.SUPERSEDED, State.CANCELLED, State.EXPIRED_UNKNOWN):
            return
        rows = [custodian.rows.get(identity) for custodian in self.custodians]
        if any(row is not None and row.state is State.SUPERSEDED for row in rows) and self.is_replaced(
            identity, fields
        ):
            return
        is_custody = one.releases[seq] == "custody"
        keep = {name for name in promised if not (name in self.lost_disks and is_custody)}
        whole = [c.name for c in self.custodians if (row := c.directories.get(identity)) and custody_whole(row)]
        if (keep if is_custody else freed) and not set(whole) & (keep or promised or {""}):
            raise Broken(f"2: {identity.origin}/{seq} has no copy left")

    # -- the schedule

    def old_token(self) -> None:
        """A pilot signs after its token has ended, and says that a custodian took the operation earlier."""
        fields = Fields("old", 1, Kind.FILE, "/u/a", "T", START - 8800, START + 9000, size=2)
        hop = Hop("A", 1, 1, START - 8700)
        blocks = tuple(enumerate(content(fields)))
        for back in ("nobody", "A"):
            self.mail.append(
                Letter("T" if back == "nobody" else "A", "put", fields, "OLD", back, hop, content(fields), blocks)
            )

    def hostile_acts(self) -> None:
        one = self.rng.choice(self.senders)
        fields = one.fields[self.rng.choice(list(one.fields))]
        act = self.rng.choice(["cancel", "put", "fill", "old", "custody"])
        if act == "cancel":
            self.mail.append(Letter("T", "cancel", fields, "X", "nobody"))
        elif act == "put":
            mine = replace(fields, origin="x", made=START, expires=START + 9000, after=(), all_below=0, seq=1)
            blocks = tuple(enumerate(content(mine)))
            for signer in ("X", "V"):
                self.mail.append(Letter("T", "put", mine, signer, "nobody", manifest=content(mine), blocks=blocks,
                                        minted=self.terminal.now))  # fmt: skip
        elif act == "old":
            self.old_token()
        elif act == "custody":
            mine = replace(fields, origin="x", made=START, expires=START + 9000, after=(), all_below=0, seq=1)
            self.mail.append(Letter("A", "put", mine, self.rng.choice("XV"), "nobody", manifest=content(mine),
                                    minted=self.custodians[0].now))  # fmt: skip
        else:
            for seq in range(2, 20):
                full = Fields("x", seq, Kind.FILE, f"/x/{seq}", "T", START, START + 9000, size=1)
                self.mail.append(Letter("T", "put", full, "X", "nobody", manifest=("never",), minted=self.terminal.now))

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
        if node is self.terminal and self.restores and self.restores_whole:
            if self.rng.random() < 0.2:
                self.terminal.save()
            elif self.rng.random() < 0.05:
                self.work(node, node.restore, self.rng.random() < 0.5)
        if isinstance(node, Node):
            # An owner that signs two versions: the first one that arrives is the operation, so only later ones differ.
            identity = node.identity(letter)
            if self.fields_of(identity) in (None, letter.fields) or identity in node.rows or letter.back == "T":
                self.work(node, node.receive, letter)
        elif node is not None:
            self.work(node, node.receive, letter)

    def fault(self) -> None:
        rng, place = self.rng, self.terminal
        roll = rng.random()
        custodian = rng.choice(self.custodians)
        if roll < 0.3:
            place.denied = (
                set() if place.denied else {rng.choice(["/u/a", "/u/b", "/u/a" if self.is_narrow else "/u/c"])}
            )
        elif roll < 0.4 and self.hostile:
            self.hostile_acts()
        elif roll < 0.55 and self.restores:
            if rng.random() < 0.5:
                place.save()
            else:
                self.work(place, place.restore, self.restores_whole and rng.random() < 0.7)
        elif roll < 0.58:
            node = rng.choice([place, custodian])
            node.jump = 0 if node.jump else rng.choice([-YEAR_S, YEAR_S])
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
            self.crashes, self.terminal.denied, self.restores = 0, set(), False
            for node in (self.terminal, *self.custodians):
                node.jump = 0
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
