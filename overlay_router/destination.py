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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from overlay_router import lookups, names, terminal
from overlay_router.reservations import Reservations
from overlay_router.small_files import Arrived, SmallFiles, apart
from overlay_router.staging import as_result, ranges, whole
from overlay_router.states import Kind, Op, Outcome, Result
from overlay_router.store import Store, StoredIntent, Transfer
from overlay_router.terminal import Step
from overlay_router.tree import BadPath, Tree, checked, no_room
from stageout.core import log
from stageout.core.errors import ErrorClass
from stageout.wire import overlay
from stageout.wire.overlay import Answer, Message, Open, Opened, Operation, Range, Staged

_NOSPACE_AGAIN_S = 5


class Reply(NamedTuple):
    """A message and the peer that it is for."""

    to: str
    message: Message


class Attached(NamedTuple):
    """A live transfer and a descriptor of its staging file, open for writing; the caller closes it."""

    transfer: Transfer
    file: int


class Published(NamedTuple):
    """A published file and a descriptor of it, open for reading; the caller closes it."""

    size_bytes: int
    mode: int
    generation: int
    file: int


@dataclass
class _Held:
    """An operation that waits for its edges or its data, and who wants its result."""

    operation: Operation
    peers: set[str] = field(default_factory=set)


class Destination:
    """One root directory and its store.

    :param now: wall clock in seconds; ``expires`` of operations is in that time.
    """

    def __init__(self, store: Store, tree: Tree, now: Callable[[], int]) -> None:
        self._store, self._tree, self._now = store, tree, now
        self._held: dict[tuple[str, int], _Held] = {}
        #: Executed, but the disk had no room for the record: never executed again, recorded when it can be.
        self._unrecorded: dict[tuple[str, int], tuple[Operation, Result]] = {}
        self._small = SmallFiles(store, tree, now)
        self._lots = Reservations(store, tree, now)
        self._recover()

    def open(self, ask: Open, peer: str) -> Reply:
        """Grant a transfer number and its space: OPENED, NOSPACE, or the RESULT of an operation that is final."""
        done = self._unrecorded.get((ask.origin, ask.seq))
        if done is not None:  # its data have their name already
            self._consider(_Held(done[0]))
        final = self._final(ask)
        if final is not None:
            return Reply(peer, final)
        transfer = self._store.grant(ask, peer)
        if not self._tree.inode(transfer.tid):
            if ask.lot and not self._lots.take(ask, transfer.tid, peer.split("/")[0]):
                return Reply(peer, as_result(ask.origin, ask.seq, Result(Outcome.FAILED, "lot")))
            try:
                self._tree.allocate(transfer.tid, transfer.ask.size_bytes)
            except OSError as problem:
                if not no_room(problem):
                    raise
                log.event("no-space", path=ask.path, size_bytes=ask.size_bytes)
                self._lots.give_back(transfer.tid)
                return Reply(peer, overlay.NoSpace(ask.origin, ask.seq, _NOSPACE_AGAIN_S))
        return self._opened(transfer)

    def lot(self, ask: overlay.Lot, key: str) -> overlay.Reserved:
        """Reserve, renew or release space for one key."""
        return self._lots.decide(ask, key)

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

    def is_whole(self, tid: int) -> bool:
        """As :meth:`Store.is_whole`."""
        return self._store.is_whole(tid)

    def whole_of(self, origin: str, seq: int) -> list[int]:
        """As :meth:`Store.whole_of`."""
        return self._store.whole_of(origin, seq)

    def whole(self, tid: int) -> list[Reply]:
        """All blocks are there and nobody writes any more: a PUBLISH that waits for them goes on."""
        transfer = self._store.transfer(tid)
        held = transfer and self._held.get((transfer.ask.origin, transfer.ask.seq))
        return self._consider(held) if held else []

    def attach(self, tid: int) -> Attached | None:
        """The staging file of a live transfer; None for a number that is closed."""
        transfer = self._store.transfer(tid)
        if transfer is None or not self._tree.inode(tid):
            return None
        return Attached(transfer, os.open(self._tree.staging(tid), os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC))

    def published(self, path: str, generation: int) -> Published | Answer:
        """A file for a GET, or why there is none. :param generation: that is wanted, negative for any."""
        try:
            file = self._tree.open_file(checked(path))
        except (OSError, BadPath) as problem:
            return lookups.refusal(path, problem)
        status, present = os.fstat(file), self._store.generation(path)
        if stat.S_ISREG(status.st_mode) and generation in (-1, present):
            return Published(status.st_size, status.st_mode & 0o777, present, file)
        os.close(file)
        if stat.S_ISREG(status.st_mode):
            return Answer(code=ErrorClass.CONFLICT.code, message=f"{path} was replaced: ask for it from its beginning")
        return Answer(code=ErrorClass.CONFLICT.code, message=f"{path}: not a file")

    def look_up(self, ask: overlay.Stat) -> Answer:
        """What a name is, and its generation."""
        found = replace(lookups.entry(self._tree, ask.path), store=self.epoch)
        return found if found.code else replace(found, generation=self._store.generation(ask.path))

    @property
    def epoch(self) -> str:
        """Of the store."""
        return self._store.epoch

    def entries(self, ask: overlay.List) -> Iterator[Answer]:
        """A directory's entries, page by page; may be read in any thread."""
        return lookups.pages(self._tree, ask.path)

    def operate(self, operation: Operation, peer: str) -> list[Reply]:
        """Execute an operation, or hold it, or say what became of it. Nothing is sent for one that is held."""
        held = self._held.get((operation.origin, operation.seq)) or _Held(operation)
        held.peers.add(peer)
        return self._consider(held)

    def pack(self, batch: Sequence[Arrived]) -> list[Reply]:
        """Execute packs of small files, and what waited for them. :raises OSError: the disk fails; ask again."""
        replies = [Reply(*answer) for group in apart(batch) for answer in self._small.execute(group)]
        origins = {arrived.pack.origin for arrived in batch}
        waiting = [held for (origin, _), held in self._held.items() if origin in origins and held.operation.after]
        return replies + [reply for held in waiting for reply in self._consider(held)]

    def cancel(self, ask: overlay.Cancel, peer: str) -> list[Reply]:
        """Remember the wish; an operation that waits here becomes CANCELLED when its edges are final."""
        record = self._store.record(ask.origin)
        if ask.data_only:
            return self._drop(ask, peer)
        if not terminal.is_final(record, ask.seq):
            self._store.cancel(ask.origin, ask.seq)
        held = self._held.get((ask.origin, ask.seq))
        if held:
            return self._consider(held)
        final = self._stored(ask.origin, ask.seq)
        return [Reply(peer, final)] if final else []

    def _drop(self, ask: overlay.Cancel, peer: str) -> list[Reply]:
        """The data that a peer has brought for an operation; it may come again."""
        gone = [item for item in self._store.transfers_of(ask.origin, ask.seq) if item.sender == peer]
        for item in gone:
            self._store.abandon(item)
            self._tree.discard(item.tid)
        return self.status(overlay.Status(ask.origin, ask.seq), peer)

    def status(self, ask: overlay.Status, peer: str) -> list[Reply]:
        """The result of an operation; else what of its data is here, "pending" while it waits, or "unknown"."""
        final = self._stored(ask.origin, ask.seq)
        if final is not None:
            return [Reply(peer, final)]
        transfers = self._store.transfers_of(ask.origin, ask.seq)
        if transfers:
            return [Reply(peer, Staged(transfer.tid, self._already(transfer.tid))) for transfer in transfers]
        here = (ask.origin, ask.seq) in self._held
        return [Reply(peer, overlay.Result(ask.origin, ask.seq, "pending" if here else "unknown"))]

    def _stored(self, origin: str, seq: int) -> overlay.Result | None:
        record = self._store.record(origin)
        if seq <= record.low:
            return as_result(origin, seq, None)
        return as_result(origin, seq, record.results[seq]) if seq in record.results else None

    def low(self, ask: overlay.Low) -> None:
        """Results up to that number may be forgotten."""
        gone = [held for key, held in self._held.items() if key[0] == ask.origin and key[1] <= ask.seq]
        for held in gone:
            del self._held[held.operation.origin, held.operation.seq]
        self._store.raise_low(ask.origin, ask.seq)
        self._discard_strays()
        self._lots.refill()

    def expire(self) -> list[Reply]:
        """End what is beyond its time: held operations are answered, data of dead transfers removed."""
        now = self._now()
        self._lots.expire()
        late = [held for held in self._held.values() if held.operation.expires < now]
        replies = [reply for held in late for reply in self._consider(held)]
        for tid in self._store.forget(now):
            self._tree.discard(tid)
        self._lots.refill()
        return replies

    def _final(self, ask: Open) -> overlay.Result | None:
        stored = self._stored(ask.origin, ask.seq)
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
            Opened(transfer.tid, self._store.epoch, self._already(transfer.tid)),
        )

    def _already(self, tid: int) -> tuple[Range, ...]:
        return ranges(block for block, _ in self._store.staged(tid))

    def _consider(self, held: _Held) -> list[Reply]:
        operation = held.operation
        op = _op(operation)
        done = self._unrecorded.get((operation.origin, operation.seq))
        if done is not None:
            return self._settle(held, op, done[1])
        record = self._store.record(operation.origin)
        step, result = terminal.judge(record, op, self._now(), len(self._held))
        if step is Step.EXECUTE:
            result, replies = self._execute(op, operation)
            if result is None:
                self._held[operation.origin, operation.seq] = held
                return replies
            self._unrecorded[operation.origin, operation.seq] = (operation, result)
            return self._settle(held, op, result)
        if step is Step.RECORD and result is not None:
            return self._settle(held, op, result)
        if step is Step.HOLD:
            self._held[operation.origin, operation.seq] = held
            return []
        if step is Step.BUSY:
            return []  # the peer asks again
        self._held.pop((operation.origin, operation.seq), None)
        return [Reply(peer, as_result(operation.origin, operation.seq, result)) for peer in sorted(held.peers)]

    def _execute(self, op: Op, operation: Operation) -> tuple[Result | None, list[Reply]]:
        """The result, or None for a PUBLISH whose data are not all there."""
        try:
            for path in (op.path, op.target) if op.kind is Kind.RENAME else (op.path,):
                checked(path)
            transfer, replies = self._complete(operation) if op.kind is Kind.PUBLISH else (None, [])
            if op.kind is Kind.PUBLISH and transfer is None:
                return None, replies
            return self._change_below_parents(op, operation, transfer.tid if transfer else 0), []
        except BadPath as problem:
            return Result(Outcome.FAILED, str(problem)), []
        except OSError as problem:
            if no_room(problem):  # no result: it is asked again, and happens when there is room
                raise
            log.error("name-not-changed", path=op.path, kind=op.kind.value, problem=problem)
            return Result(Outcome.FAILED, problem.strerror or str(problem)), []

    def _change_below_parents(self, op: Op, operation: Operation, tid: int) -> Result:
        """Make what is missing above the name, too; of an operation that is refused nothing stays."""
        changed = op.target if op.kind is Kind.RENAME else op.path
        made = self._tree.make_parents(changed) if operation.parents else []
        try:
            result = self._change(op, operation, tid)
        except (OSError, sqlite3.Error):
            self._tree.remove_parents(made)
            raise
        if result.outcome is not Outcome.DONE:
            self._tree.remove_parents(made)
        return result

    def _complete(self, operation: Operation) -> tuple[Transfer | None, list[Reply]]:
        """The first transfer whose data are whole and right; one with wrong data begins again."""
        transfers = self._store.transfers_of(operation.origin, operation.seq)
        transfer, wrong = whole(self._store, self._tree, transfers, operation)
        return transfer, [self._opened(item) for item in wrong]

    def _change(self, op: Op, operation: Operation, tid: int) -> Result:
        """INTENT, system call. DONE follows with the result."""
        seen = self._tree.names(op)
        refusal = names.refusal(seen, op, self._store.generation(op.path))
        if refusal:
            return Result(Outcome.FAILED, refusal)
        inode = self._tree.prepare_dir(op, operation.mode) if op.kind is Kind.MKDIR else self._tree.inode(tid)
        todo = names.intent(seen, op, inode, operation.size_bytes)
        self._store.intend(operation, todo.entry.inode)
        if op.kind is Kind.PUBLISH:
            self._tree.publish(op, tid, operation.mode, operation.size_bytes)
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
        return Result(Outcome.DONE)

    def _settle(self, held: _Held, op: Op, result: Result) -> list[Reply]:
        """DONE (or FAILED, ...) durable; what that frees is freed; who waited for it goes on."""
        operation = held.operation
        generations: dict[str, int] = {}
        if result.outcome is Outcome.DONE:
            generations = names.bumped({path: self._store.generation(path) for path in (op.path, op.target)}, op)
            result = result._replace(generation=generations[op.path])
        tids = [transfer.tid for transfer in self._store.transfers_of(operation.origin, operation.seq)]
        # the data of the one that was published are not where they were gathered any more
        used = [tid for tid in tids if result.outcome is Outcome.DONE and not self._tree.inode(tid)]
        self._store.settle(operation, result, generations, used)
        self._unrecorded.pop((operation.origin, operation.seq), None)
        for tid in tids:
            self._tree.discard(tid)
        if len(used) < len(tids):
            self._lots.refill()
        if op.kind is Kind.DELETE:
            self._tree.empty(op)
        self._held.pop((operation.origin, operation.seq), None)
        message = as_result(operation.origin, operation.seq, result)
        return [Reply(peer, message) for peer in sorted(held.peers)] + self._wake(operation.origin, operation.seq)

    def _wake(self, origin: str, seq: int) -> list[Reply]:
        waiting = [held for key, held in self._held.items() if key[0] == origin and seq in held.operation.after]
        return [reply for held in waiting for reply in self._consider(held)]

    def _recover(self) -> None:
        """After a restart: what was begun is finished or was never done; what nobody owns is removed."""
        self._small.recover()
        for stored in self._store.intents():
            self._recover_one(stored)
        for transfer in self._store.transfers():
            if not self._tree.inode(transfer.tid):
                self._store.unstage(transfer.tid)
                if self._store.has_taken(transfer.tid):
                    self._store.give_back(transfer.tid)
        self._discard_strays()
        self._tree.empty_trash()
        self._lots.recover()

    def _recover_one(self, stored: StoredIntent) -> None:
        op = _op(stored.operation)
        seen = self._tree.names(op)
        todo = names.Intent(op, names.Entry(stored.inode))
        if names.happened(seen, todo):
            self._tree.sync(op)
            self._settle(_Held(stored.operation), op, Result(Outcome.DONE))
        else:
            self._consider(_Held(stored.operation))

    def _discard_strays(self) -> None:
        live = {transfer.tid for transfer in self._store.transfers()}
        for tid in set(self._tree.staged_numbers()) - live:
            self._tree.discard(tid)


def _op(operation: Operation) -> Op:
    """The operation as the pure rules know it."""
    return Op(
        origin=int(operation.origin, 16),
        seq=operation.seq,
        kind=Kind(operation.kind),
        path=operation.path,
        target=operation.target,
        blocks=operation.blocks,
        expires=operation.expires,
        after=operation.after,
        absent=operation.absent,
        generation=operation.generation,
    )
