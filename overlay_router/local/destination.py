"""The terminal: operations on the tree below a root, each executed once, in the order that its edges ask for.

The way of a file, top to bottom: :meth:`Destination.open` grants a transfer number and its space;
:meth:`Destination.staged` records blocks whose bytes are on the disk; :meth:`Destination.operate` judges the PUBLISH,
waits for its data and for what must come before it, and changes the name between INTENT and DONE. No sockets and no
threads: a call returns the messages to be sent.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from overlay_router.local import lookups
from overlay_router.local.changes import Change, Ended, Footprint, Group, Held, failed, op_of, why
from overlay_router.local.contents import Content, Made, foreign_version
from overlay_router.local.held import HeldOperations
from overlay_router.local.makers import Makers
from overlay_router.local.remembered import Remembered
from overlay_router.local.replies import Attached, Published, Reply
from overlay_router.local.reservations import Reservations
from overlay_router.local.small_files import Arrived, SmallFiles, apart
from overlay_router.local.staging import as_result, ranges, recorded, recorded_pack, whole
from overlay_router.local.store import Settled, Store, StoredIntent, Transfer
from overlay_router.local.trash import left_for_later
from overlay_router.local.tree import OWN, BadPath, Tree, checked, no_room, passes
from overlay_router.rules import names, terminal
from overlay_router.rules.states import Kind, Op, Outcome, Result
from overlay_router.rules.terminal import Step
from stageout.core import durable, log
from stageout.core.errors import ErrorClass
from stageout.overlay.wire import messages
from stageout.overlay.wire.messages import MAX_CLOCK_SKEW_S, Answer, Open, Opened, Operation, Range, Staged
from stageout.wire.deposits import MOST_EXPIRES_AFTER_S

_NOSPACE_AGAIN_S = 5
_LATER = "see to the disk of the root: who asked for them asks again, and else the next start finishes them"


class Destination:
    """One root directory and its store.

    :ivar remembered: what its files were when they were published. :ivar lots: space that somebody reserved.
    :param now: wall clock in seconds; ``expires`` of operations is in that time.
    :param makers: processes that make small files; they belong to it from now on. None: it makes them itself.
    """

    def __init__(self, store: Store, tree: Tree, now: Callable[[], int], makers: Makers | None = None) -> None:
        self._store, self._tree, self._now = store, tree, now
        self._held = HeldOperations[Held]()
        #: Executed, but the disk had no room for the record: never executed again, recorded when it can be.
        self._unrecorded: dict[tuple[str, int], tuple[Operation, Result]] = {}
        #: Begun, but the disk was full, or away: the inode says whether it happened.
        self._begun: dict[tuple[str, int], tuple[Operation, int]] = {}
        #: Published and not yet recorded: what these files are.
        self._made: dict[tuple[str, int], Made] = {}
        self.remembered = Remembered(store.contents, tree)
        self._small = SmallFiles(store, tree, now, makers)
        self.lots = Reservations(store, tree, now)
        with ExitStack() as unfinished:
            unfinished.callback(self.close)
            self._recover()
            unfinished.pop_all()

    def close(self) -> None:
        """End what works for it; store and tree belong to others."""
        self._small.close()

    def open(self, ask: Open, peer: str, digest: str = "") -> Reply:
        """Grant a transfer number and its space: OPENED, NOSPACE, or the RESULT of an operation that is final.

        :param digest: the kind of digests that the peer uses; without it those of the file are not kept.
        """
        done = self._unrecorded.get((ask.origin, ask.seq))
        if done is not None:  # its data have their name already
            self._execute([Held(done[0])])
        final = self._final(ask)
        if final is not None:
            return Reply(peer, final)
        transfer = self._store.grant(ask, peer, digest)
        if not self._tree.inode(transfer.tid):
            self._forget_blocks(transfer.tid)
            if ask.lot and not self.lots.take(ask, transfer.tid, peer.split("/")[0]):
                return Reply(peer, as_result(ask.origin, ask.seq, Result(Outcome.FAILED, "lot")))
            try:
                self._tree.allocate(transfer.tid, transfer.ask.size_bytes)
            except OSError as problem:
                if not no_room(problem):
                    raise
                log.event("space-exhausted", path=ask.path, size_bytes=ask.size_bytes)
                self.lots.give_back(transfer.tid)
                return Reply(peer, messages.NoSpace(ask.origin, ask.seq, _NOSPACE_AGAIN_S))
        else:
            self._tree.check_writable(transfer.tid)
        return self._opened(transfer)

    def lot(self, ask: messages.Lot, key: str) -> messages.Reserved:
        """Reserve, renew or release space for one key."""
        return self.lots.decide(ask, key)

    def transfers(self) -> list[Transfer]:
        """All that are under way."""
        return self._store.transfers()

    def staged(self, tid: int, blocks: Iterable[tuple[int, bytes]]) -> list[Reply]:
        """Blocks (position, digest) whose bytes are on the disk: recorded, and these are said."""
        transfer = self._store.transfer(tid)
        if transfer is None:
            return []
        new = dict(blocks)
        self._store.stage(tid, new.items())
        return [Reply(transfer.sender, Staged(tid, ranges(sorted(new))))]

    def written_late(self, tid: int, blocks: Mapping[int, bytes]) -> list[Reply]:
        """Blocks were written after all were recorded. If one is not what was recorded, all must come again.

        :param blocks: the digests that they have now.
        """
        transfer = self._store.transfer(tid)
        if transfer is None or self._store.digests(tid, blocks) == blocks:
            return []
        log.error("transfer-replaced", path=transfer.ask.path, tid=tid, sender=transfer.sender,
                  advice="its sender has sent two versions of a block: it is faulty, or not to be trusted")  # fmt: skip
        self._store.unstage(tid)
        return [self._opened(transfer)]

    def is_whole(self, tid: int) -> bool:
        """As :meth:`Store.is_whole`."""
        return self._store.is_whole(tid)

    def among(self, tid: int, blocks: Collection[int]) -> Collection[int]:
        """As :meth:`Store.among`."""
        return self._store.among(tid, blocks)

    def whole_of(self, origin: str, seq: int) -> list[int]:
        """As :meth:`Store.whole_of`."""
        return self._store.whole_of(origin, seq)

    def whole(self, tid: int) -> list[Reply]:
        """All blocks are there and nobody writes any more: a PUBLISH that waits for them goes on."""
        transfer = self._store.transfer(tid)
        held = transfer and self._held.get((transfer.ask.origin, transfer.ask.seq))
        return self._consider([held]) if held else []

    def attach(self, tid: int) -> Attached | None:
        """The staging file of a live transfer; None for a number that is closed."""
        transfer = self._store.transfer(tid)
        if transfer is None or not self._tree.inode(tid):
            return None
        return Attached(transfer, os.open(self._tree.staging(tid), os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC))

    def published(self, path: str, generation: int, first: int = 0, blocks: int = 0) -> Published | Answer:
        """A file for a GET, or why there is none. :param generation: that is wanted, negative for any.

        :param first: block from which on it is wanted, and how many :param blocks:, 0 for all.
        """
        try:
            file = self._tree.open_file(checked(path))
        except (OSError, BadPath) as problem:
            return lookups.refusal(path, problem)
        is_found = False
        try:
            found = self._published(path, file, generation, first, blocks)
            is_found = isinstance(found, Published)
        finally:
            if not is_found:
                os.close(file)
        return found

    def _published(self, path: str, file: int, generation: int, first: int, blocks: int) -> Published | Answer:
        status, known = os.fstat(file), self._store.generation(path)
        content = self.remembered.of(status)
        present = known if known and content else foreign_version(status)
        if stat.S_ISREG(status.st_mode) and generation in (-1, known, present):
            digests = self.remembered.blocks(status, first, blocks) if content else b""
            return Published(
                status.st_size, status.st_mode & 0o777, present, file, content, digests, status.st_mtime_ns
            )
        if stat.S_ISREG(status.st_mode):
            return Answer(code=ErrorClass.CONFLICT.code, message=f"{path} was replaced: ask for it from its beginning")
        return Answer(code=ErrorClass.CONFLICT.code, message=f"{path}: not a file")

    def root(self) -> int:
        """Descriptor of the tree's root, which is the caller's to close; may be called in any thread."""
        return self._tree.open_root()

    def directory(self, path: str) -> int:
        """Descriptor of a directory, "" is the root; the caller closes it. :raises OSError: there is none."""
        with self._tree.directory(checked(path) if path else "") as found:
            return os.dup(found)

    def etag(self, path: str) -> str:
        """The entity tag of what a name points to, "" for nothing. :raises OSError: nobody can say now."""
        try:
            return self.tag_of(path, self._tree.status(checked(path) if path else ""))
        except (FileNotFoundError, NotADirectoryError, BadPath):
            self._tree.place.check()
            return ""

    def tag_of(self, path: str, status: os.stat_result) -> str:
        """The same of a file that was opened by that name: never the same for two versions of it."""
        facts = self.epoch[:8], self._store.generation(path), status.st_ino, status.st_size, status.st_ctime_ns
        return '"{}-{:x}-{:x}-{:x}-{:x}"'.format(*facts)

    def sized(self, tid: int, size_bytes: int) -> None:
        """Record the size of a transfer that was opened before all its data had come."""
        transfer = self._store.transfer(tid)
        if transfer is not None and transfer.ask.size_bytes != size_bytes:
            self._store.resize(tid, size_bytes)

    def adopt(self, ask: Open, peer: str, digest: str, file: Path, blocks: Iterable[tuple[int, bytes]]) -> int:
        """Take the data of a file that is whole and synced: their transfer number. The file keeps its own name, too.

        :param blocks: digests of its blocks, by position.
        """
        transfer = self._store.grant(ask, peer, digest, blocks)
        place = self._tree.staging(transfer.tid)
        if not self._tree.inode(transfer.tid):
            durable.link("operation-adopt", file, place)
        return transfer.tid

    def refusal(self, operation: Operation) -> str:
        """Return why an operation cannot be executed on the names as they are, "" if it can."""
        op = op_of(operation)
        try:
            for path in (op.path, op.target) if op.kind is Kind.RENAME else (op.path,):
                checked(path)
        except BadPath as problem:
            return str(problem)
        seen = self._tree.names(op)
        if operation.may_exist and op.kind is Kind.MKDIR and op.path in seen and seen[op.path].is_dir:
            return ""
        above = names.parent(op.path)
        if operation.parents and above and above not in seen:
            near = names.parent(above)
            while near and self._tree.entry(near) is None:
                near = names.parent(near)
            found = self._tree.entry(near) if near else None
            if found is None or found.is_dir:
                seen[above] = names.Entry(0)
        return names.refusal(seen, op, self._store.generation(op.path))

    def is_foreign(self, path: str) -> bool:
        """Tell whether something is under a name that is not what this router published there."""
        try:
            return self.remembered.of(self._tree.status(checked(path))) is None
        except (FileNotFoundError, NotADirectoryError, BadPath):
            return False

    @property
    def own_place(self) -> Path:
        """Directory of the router's own files, beside the tree."""
        return self._tree.root / OWN

    def drop(self, tid: int) -> None:
        """The data of a transfer do not come any more."""
        transfer = self._store.transfer(tid)
        if transfer is not None:
            self._store.abandon(transfer)
            self._tree.discard(tid)

    def drop_of(self, senders: str) -> None:
        """Drop the transfers of all senders whose names begin so: those of a run before this one never go on."""
        for transfer in self._store.transfers():
            if transfer.sender.startswith(senders):
                self.drop(transfer.tid)

    def look_up(self, ask: messages.Stat) -> Answer:
        """The kind of a name, and its generation."""
        found = replace(lookups.entry(self._tree, ask.path), store=self.epoch)
        if found.code:
            return found
        content = None
        with suppress(OSError):  # somebody else has just removed it
            content = self.remembered.of(self._tree.status(ask.path))
        content = content or Content("", "")
        generation = self._store.generation(ask.path)
        return replace(found, generation=generation, manifest=content.manifest, digest=content.digest)

    @property
    def epoch(self) -> str:
        """Of the store."""
        return self._store.epoch

    def entries(self, ask: messages.List) -> Iterator[Answer]:
        """A directory's entries, page by page; may be read in any thread."""
        return lookups.pages(self._tree, ask.path)

    def operate(self, operation: Operation, peer: str) -> list[Reply]:
        """Execute an operation, or hold it, or say what became of it. Nothing is sent for one that is held."""
        return self.operate_all([(operation, peer)])

    def operate_all(self, batch: Iterable[tuple[Operation, str]]) -> list[Reply]:
        """The same for operations that came together: those that touch other names share their durable steps."""
        waiting: dict[tuple[str, int], Held] = {}
        for operation, peer in batch:
            key = (operation.origin, operation.seq)
            held = waiting.setdefault(key, self._held.get(key) or Held(operation))
            held.peers.add(peer)
        return self._consider(list(waiting.values()))

    def pack(self, batch: Sequence[Arrived]) -> list[Reply]:
        """Execute packs of small files, and what waited for them. :raises OSError: the disk fails; ask again."""
        paths = {path for arrived in batch for path in arrived.pack.paths}
        replies = self._finish(Op(0, 0, Kind.PUBLISH, path) for path in paths)
        replies += [Reply(*answer) for group in apart(batch) for answer in self._small.execute(group)]
        origins = {arrived.pack.origin for arrived in batch}
        waiting = [held for (origin, _), held in self._held.items() if origin in origins and held.operation.after]
        return replies + self._consider(waiting)

    def cancel(self, ask: messages.Cancel, peer: str) -> list[Reply]:
        """Remember the wish; an operation that waits here becomes CANCELLED when its edges are final."""
        record, held = self._store.record(ask.origin), self._held.get((ask.origin, ask.seq))
        if ask.data_only:
            return self._drop(ask, peer)
        if not terminal.is_final(record, ask.seq):
            expires = held.operation.expires if held else self._now() + MOST_EXPIRES_AFTER_S + MAX_CLOCK_SKEW_S
            self._store.cancel(ask.origin, ask.seq, expires)
        if held:
            return self._consider([held])
        final = recorded(self._store, ask.origin, ask.seq)
        return [Reply(peer, final)] if final else []

    def _drop(self, ask: messages.Cancel, peer: str) -> list[Reply]:
        """The data that a peer has brought for an operation; it may come again."""
        gone = [item for item in self._store.transfers_of(ask.origin, ask.seq) if item.sender == peer]
        for item in gone:
            self._store.abandon(item)
            self._tree.discard(item.tid)
        return self.status(messages.Status(ask.origin, ask.seq), peer)

    def status(self, ask: messages.Status, peer: str) -> list[Reply]:
        """The result of an operation; else what of its data is here, "pending" while it waits, or "unknown"."""
        final = recorded(self._store, ask.origin, ask.seq)
        if final is not None:
            return [Reply(peer, final)]
        transfers = self._store.transfers_of(ask.origin, ask.seq)
        if transfers:
            return [Reply(peer, Staged(transfer.tid, self._already(transfer.tid))) for transfer in transfers]
        here = (ask.origin, ask.seq) in self._held
        return [Reply(peer, messages.Result(ask.origin, ask.seq, "pending" if here else "unknown"))]

    def knows(self, origin: str, seq: int) -> bool:
        """Tell whether anything of an operation is, or was, here."""
        record, key = self._store.record(origin), (origin, seq)
        return terminal.is_final(record, seq) or key in self._held or bool(self._store.transfers_of(*key))

    def unwanted(self, origin: str) -> list[int]:
        """Numbers of operations that were cancelled, and have no result."""
        return sorted(self._store.record(origin).cancelled)

    def results_of(self, origin: str, seqs: Iterable[int]) -> dict[int, Result]:
        """The outcome of operations, without those that are not final, or settled by their origin."""
        results = self._store.record(origin).results
        return {seq: results[seq] for seq in seqs if seq in results}

    def packed(self, ask: messages.Status) -> messages.Packed | None:
        """The results of a pack's files; None unless all of them are final."""
        return recorded_pack(self._store, ask.origin, ask.seq, ask.files)

    def low(self, ask: messages.Low) -> None:
        """Results up to that number may be forgotten."""
        gone = [held for key, held in self._held.items() if key[0] == ask.origin and key[1] <= ask.seq]
        for held in gone:
            self._held.release(held.key)
        waits = (held.operation.expires for (origin, _), held in self._held.items() if origin == ask.origin)
        self._store.raise_low(ask.origin, ask.seq, max(waits, default=0))
        self._discard_strays()
        self.lots.refill()

    def forget_origin(self, origin: str) -> None:
        """An origin that was made for one connection sends nothing more."""
        for held in [held for key, held in self._held.items() if key[0] == origin]:
            self._held.release(held.key)
        self._store.forget_origin(origin)
        self._discard_strays()
        self.lots.refill()

    def expire(self) -> list[Reply]:
        """End what is beyond its time: held operations are answered, data of dead transfers removed."""
        now = self._now()
        self.lots.expire()
        late = [held for held in self._held.values() if held.operation.expires < now]
        replies = self._consider(late)
        self._held.drop_dataless(now, {(item.ask.origin, item.ask.seq) for item in self._store.transfers()})
        try:
            gone = self._store.forget(now, self.remembered.changed_behind())
        except (OSError, sqlite3.Error) as problem:
            if no_room(problem):  # their data make some for the record
                for transfer in self._store.transfers():
                    if transfer.ask.expires < now:
                        self._tree.discard(transfer.tid)
            raise
        for tid in gone:
            self._tree.discard(tid)
        self.lots.refill()
        return replies

    def follow(self) -> bool:
        """As :meth:`Store.follow`."""
        return self._store.follow()

    def _forget_blocks(self, tid: int) -> None:
        """Blocks of data that were removed before the record of it are not there."""
        if self._store.count(tid):
            self._store.unstage(tid)

    def _final(self, ask: Open) -> messages.Result | None:
        stored = recorded(self._store, ask.origin, ask.seq)
        if stored is not None:
            return stored
        if self._now() > ask.expires:
            return as_result(ask.origin, ask.seq, Result(Outcome.EXPIRED))
        try:
            checked(ask.path)
        except BadPath as problem:
            return as_result(ask.origin, ask.seq, Result(Outcome.FAILED, str(problem)))
        return None

    def _opened(self, transfer: Transfer) -> Reply:
        return Reply(
            transfer.sender,
            Opened(transfer.tid, self._store.epoch, self._already(transfer.tid), True, True),
        )

    def _already(self, tid: int) -> tuple[Range, ...]:
        return ranges(block for block, _ in self._store.each_staged(tid))

    def _consider(self, waiting: list[Held]) -> list[Reply]:
        """The steps that can be done with these operations now, and with those that waited for them; in their order."""
        replies = self._finish((op_of(held.operation) for held in waiting), {held.key for held in waiting})
        return replies + self._execute(waiting)

    def _execute(self, waiting: list[Held]) -> list[Reply]:
        replies: list[Reply] = []
        if waiting:
            self._small.make_sure()
        while waiting:
            footprint, group, later = Footprint(), Group(), list[Held]()
            try:
                for held in waiting:
                    op = op_of(held.operation)
                    if footprint.add(op):
                        later.append(held)
                    else:
                        replies += self._judge(held, op, group)
                if group.changes:
                    self._store.intend(StoredIntent(one.held.operation, one.inode) for one in group.changes)
            except (OSError, sqlite3.Error):
                for one in group.changes:
                    self._tree.remove_parents(one.made)
                raise
            problem = self._change_all(group)
            told, woken = self._settle(group.ends)
            if problem is not None:
                raise problem
            replies += told
            waiting = later + woken
        return replies

    def _finish(self, ops: Iterable[Op], asked: Collection[tuple[str, int]] = ()) -> list[Reply]:
        """Operations that were executed, or may have been, at names that these touch are recorded before them.

        A result that cannot be recorded now stays: a DELETE that makes room must not wait for it. :param asked: are
        told later.
        """
        left = {key: operation for key, (operation, _) in (*self._begun.items(), *self._unrecorded.items())}
        if not left:
            return []
        footprint = Footprint()
        for op in ops:
            footprint.add(op)
        first = [
            (None if key in asked else self._held.get(key)) or Held(operation)
            for key, operation in left.items()
            if footprint.add(op_of(operation))
        ]
        with suppress(OSError, sqlite3.Error):
            return self._execute(first)
        return []

    def _judge(self, held: Held, op: Op, group: Group) -> list[Reply]:
        """The terminal rule: into the group, into what is held, or answered."""
        done = self._unrecorded.get(held.key)
        if done is not None:
            group.ends.append(Ended(held, op, done[1]))
            return []
        step, result = terminal.judge(self._store.record(held.operation.origin), op, self._now(), len(self._held))
        if step is Step.EXECUTE:
            return self._prepare(held, op, group)
        if step is Step.RECORD and result is not None:
            group.ends.append(Ended(held, op, result))
            return []
        if step is Step.HOLD:
            self._hold(held)
            return []
        if step is Step.BUSY:
            return []  # the peer asks again
        self._held.release(held.key)
        return _told(held, result)

    def _hold(self, held: Held) -> None:
        self._held.put(held.operation, min(held.peers, default=""), held, self._now())

    def _prepare(self, held: Held, op: Op, group: Group) -> list[Reply]:
        """Into the group, unless it is refused, or a PUBLISH whose data are not all there."""
        result: Result | None = None
        try:
            for path in (op.path, op.target) if op.kind is Kind.RENAME else (op.path,):
                checked(path)
            if self._has_happened(held, op):
                result = Result(Outcome.DONE)
            else:
                transfer, replies = self._complete(held.operation) if op.kind is Kind.PUBLISH else (None, [])
                if op.kind is Kind.PUBLISH and transfer is None:
                    self._hold(held)
                    return replies
                result = self._plan(held, op, transfer.tid if transfer else 0, group)
        except BadPath as problem:
            result = Result(Outcome.FAILED, str(problem))
        except OSError as problem:
            result = failed(self._tree, op, problem)
        if result is not None:
            group.ends.append(Ended(held, op, result))
        return []

    def _has_happened(self, held: Held, op: Op) -> bool:
        """Tell whether a change that was begun and not finished was made; it is on the disk then."""
        _, inode = self._begun.get(held.key, (None, None))
        if inode is None or not names.happened(self._tree.names(op), names.Intent(op, names.Entry(inode))):
            return False
        self._tree.sync(op)
        return True

    def _plan(self, held: Held, op: Op, tid: int, group: Group) -> Result | None:
        """Into the group, with what is missing above the name; of an operation that is refused nothing stays."""
        changed = op.target if op.kind is Kind.RENAME else op.path
        made = self._tree.make_parents(changed) if held.operation.parents else []
        try:
            seen = self._tree.names(op)
            if held.operation.may_exist and op.kind is Kind.MKDIR and op.path in seen and seen[op.path].is_dir:
                return Result(Outcome.DONE)  # and so nothing was made above it
            refusal = names.refusal(seen, op, self._store.generation(op.path))
            if not refusal:
                mode = held.operation.mode
                inode = self._tree.prepare_dir(op, mode) if op.kind is Kind.MKDIR else self._tree.inode(tid)
                todo = names.intent(seen, op, inode, held.operation.size_bytes)
                group.changes.append(Change(held, op, tid, todo.entry.inode, made))
                return None
        except OSError:
            self._tree.remove_parents(made)
            raise
        self._tree.remove_parents(made)
        return Result(Outcome.FAILED, refusal)

    def _complete(self, operation: Operation) -> tuple[Transfer | None, list[Reply]]:
        """The first transfer whose data are whole and right; one with wrong data begins again."""
        transfers = self._store.transfers_of(operation.origin, operation.seq)
        transfer, wrong = whole(self._store, self._tree, transfers, operation)
        return transfer, [self._opened(item) for item in wrong]

    def _change_all(self, group: Group) -> OSError | None:
        """The system calls, and all of it to the disk. Of what cannot be now there is no end; that is returned."""
        if not group.changes:
            return None
        problems: dict[tuple[str, int], OSError] = {}
        everywhere: OSError | None = None
        try:
            with self._tree.together():
                for one in group.changes:
                    try:
                        self._change(one)
                    except OSError as problem:
                        problems[one.held.key] = problem
        except OSError as problem:
            everywhere = problem
        full = None
        for one in group.changes:
            found = problems.get(one.held.key) or everywhere
            if found is not None and passes(found := why(self._tree, found)):
                self._begun[one.held.key] = one.held.operation, one.inode
                full = found
                continue
            result = failed(self._tree, one.op, found) if found else Result(Outcome.DONE)
            if found:
                self._tree.remove_parents(one.made)
            self._unrecorded[one.held.key] = (one.held.operation, result)
            group.ends.append(Ended(one.held, one.op, result))
        return full

    def _change(self, change: Change) -> None:
        """One system call."""
        op, operation = change.op, change.held.operation
        if op.kind is Kind.PUBLISH:
            identity = self._tree.publish(op, change.tid, operation.mode, operation.size_bytes)
            self._made[change.held.key] = Made(change.tid, identity)
        elif op.kind is Kind.MKDIR:
            self._tree.make_dir(op)
        elif op.kind is Kind.RENAME:
            self._tree.rename(op)
        elif op.kind is Kind.DELETE:
            self._tree.delete(op)
        else:
            changed = operation.attributes
            self._tree.set_attributes(
                op, operation.mode if "mode" in changed else None, operation.size_bytes if "size" in changed else None
            )

    def _settle(self, ends: list[Ended]) -> tuple[list[Reply], list[Held]]:
        """DONE (or FAILED, ...) of all durable; what that frees is freed; and who waited for one of them."""
        if not ends:
            return [], []
        settled, tids = [], list[int]()
        for one in ends:
            operation, result, generations = one.held.operation, one.result, dict[str, int]()
            if result.outcome is Outcome.DONE:
                paths = (one.op.path, one.op.target)
                generations = names.bumped({path: self._store.generation(path) for path in paths}, one.op)
                result = result._replace(generation=generations[one.op.path])
            mine = [transfer.tid for transfer in self._store.transfers_of(operation.origin, operation.seq)]
            # the data of the one that was published are not where they were gathered any more
            used = [tid for tid in mine if result.outcome is Outcome.DONE and not self._tree.inode(tid)]
            settled.append(Settled(operation, result, generations, used, self._made.get(one.held.key)))
            tids += mine
        self._store.settle(settled)
        for tid in tids:
            self._tree.discard(tid)
        if sum(len(item.used) for item in settled) < len(tids):
            self.lots.refill()
        replies = []
        for one, item in zip(ends, settled):
            self._unrecorded.pop(one.held.key, None)
            self._begun.pop(one.held.key, None)
            self._made.pop(one.held.key, None)
            if one.op.kind is Kind.DELETE:
                self._tree.empty(one.op)
            self._held.release(one.held.key)
            replies += _told(one.held, item.result)
        return replies, self._woken({one.held.key for one in ends})

    def _woken(self, settled: set[tuple[str, int]]) -> list[Held]:
        """Operations that waited for one of these."""
        return [
            held
            for (origin, _), held in self._held.items()
            if any((origin, seq) in settled for seq in held.operation.after)
        ]

    def _recover(self) -> None:
        """After a restart: what was begun is finished or was never done; what nobody owns is removed."""
        self._small.recover()
        self._recover_changes()
        for transfer in self._store.transfers():
            if not self._tree.inode(transfer.tid):
                self._store.unstage(transfer.tid)
                if self._store.has_taken(transfer.tid):
                    self._store.give_back(transfer.tid)
        self._discard_strays()
        with left_for_later():
            self._tree.empty_trash()
        self.lots.recover()

    def _recover_changes(self) -> None:
        done, rest = list[Ended](), list[Held]()
        for stored in self._store.intents():
            op, held = op_of(stored.operation), Held(stored.operation)
            if names.happened(self._tree.names(op), names.Intent(op, names.Entry(stored.inode))):
                self._tree.sync(op)
                done.append(Ended(held, op, Result(Outcome.DONE)))
            else:
                rest.append(held)
                self._begun[held.key] = stored.operation, stored.inode
        self._settle(done)
        try:
            self._execute(rest)
        except OSError as problem:
            if not passes(problem):
                raise
            log.error("rename-recovery-failed", changes=len(rest), problem=problem, advice=_LATER)

    def _discard_strays(self) -> None:
        live = {transfer.tid for transfer in self._store.transfers()}
        for tid in set(self._tree.staged_numbers()) - live:
            with left_for_later():
                self._tree.discard(tid)


def _told(held: Held, result: Result | None) -> list[Reply]:
    message = as_result(held.operation.origin, held.operation.seq, result)
    return [Reply(peer, message) for peer in sorted(held.peers)]
