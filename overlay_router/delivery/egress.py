"""A terminal whose end is no tree of its own: files in a spool, until a transfer plugin has delivered them (rule 10).

To its senders it is a terminal: there is no CUSTODY, and RESULT comes when the plugin has verified the file. Inside it
is a spool like a custodian's, with the same records: what is whole and right is delivered again and again, also after a
restart, until it is at its destination, is refused there for good, or has expired. So it is delivered at least once.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from overlay_router.custodians.custodian import MOST_OPERATIONS, Custodian
from overlay_router.custodians.passing import NonePassed
from overlay_router.custodians.said import NO_PROBLEMS
from overlay_router.custodians.spool import EgressStore, Held, Key, Sent
from overlay_router.delivery.fetched import version_of
from overlay_router.local.replies import Reply
from overlay_router.local.small_files import Arrived
from overlay_router.local.staging import as_packed, recorded_pack
from overlay_router.local.store import PackResults, Transfer
from overlay_router.local.tree import SYNC_ALL_FROM, BadPath, Tree, checked, no_room, sync_filesystem
from overlay_router.peers.deposits import Terminals
from overlay_router.peers.origins import same_owner
from overlay_router.rules import lots, terminal
from overlay_router.rules.lots import Spool
from overlay_router.rules.states import Kind, Op, Outcome, Result
from overlay_router.rules.terminal import Step
from stageout.core import durable, log
from stageout.core.clock import Clock
from stageout.core.errors import ErrorClass
from stageout.overlay.wire import messages, packs
from stageout.overlay.wire.egress import Targets
from stageout.overlay.wire.messages import Answer, Open, Operation
from stageout.overlay.wire.packs import PackedFile

_REASON_CHARS = 200


class _Gathered(NamedTuple):
    """A pack of which not all files have their result. :param end: number behind its last. :param peer: who hears.

    :param refused: files that were not taken.
    """

    end: int
    peer: str
    refused: Mapping[int, Result]


class _Anybody(Terminals):
    """The names were judged already, by key or capability."""

    def reason_against(self, terminal: str, key: str) -> str:
        """None."""
        return ""


class Egress(Custodian):
    """The deliveries by plugins. :param targets: which names, and where to.

    :ivar spool: and :ivar clock: what comes back uses these, too.
    """

    def __init__(self, store: EgressStore, tree: Tree, spool: Spool, targets: Targets, clock: Clock) -> None:
        super().__init__(store, tree, spool, _Anybody({}), "", clock)
        self.targets, self.spool, self.clock = targets, spool, clock
        self._passed = NonePassed()
        self._gathered: dict[str, dict[int, _Gathered]] = {}
        self._egress_store = store

    def serves(self, path: str) -> bool:
        """Tell whether a name is delivered by a plugin, or is the directory of such names."""
        return self.targets.covers(path) is not None

    def refusal(self, path: str) -> Answer | None:
        """Return why a name cannot be looked at here, None where it can."""
        target = self.targets.covers(path)
        if target is None:
            return None
        text = f"{path}: this gateway knows only of files that it has delivered itself: look at {target.shown}"
        return Answer(code=ErrorClass.NOT_SUPPORTED.code, message=text)

    def delivered(self, path: str) -> Sent | None:
        """The last delivery under a name, as far as it is remembered."""
        return self._egress_store.sent(path)

    def entry(self, path: str) -> Answer:
        """A file as it was delivered from here; whether that is what is there now, nobody has looked."""
        target, sent = self.targets.find(path), self._egress_store.sent(path)
        if target is None or sent is None:
            return self.refusal(path) or Answer(code=ErrorClass.NOT_FOUND.code, message=path)
        note = f"delivered by this gateway, not looked up at {target.shown}"
        columns = (path.rpartition("/")[2],), ("file",), (sent.size_bytes,), (sent.mode,), (sent.at,)
        return Answer(*columns, generation=version_of(sent.manifest), note=note)

    def open(self, ask: Open, peer: str, digest: str = "") -> Reply:
        """OPENED, with all blocks when the file is being delivered; NOSPACE, or the RESULT that is final."""
        held = self._held.get((ask.origin, ask.seq))
        transfer = self._store.transfer(held.tid) if held and not held.damaged else None
        if transfer is not None and transfer.sender == peer:
            return self._opened(transfer, peer)
        if ask.lot:
            return Reply(peer, messages.Result(ask.origin, ask.seq, "failed", "lot"))
        return super().open(ask, peer, digest)

    def operate(self, operation: Operation, peer: str, digest: str) -> list[Reply]:
        """Take a PUBLISH when its data are whole; nothing else can be asked of a plugin."""
        final = self._final(operation, peer)
        if final is not None:
            return [Reply(peer, final)]
        reason = self._reason_against(operation)
        if reason:
            result = Result(Outcome.FAILED, reason, code=ErrorClass.NOT_SUPPORTED.code)
            return self._end(operation, peer, result)
        return _not_pending(super().operate(operation, peer, digest))

    def pack(self, batch: Sequence[Arrived]) -> list[Reply]:
        """Take the files of packs, each as one of its own; PACKED comes when plugins have delivered all of a pack.

        Of a pack without some of its files (:meth:`note`) it comes when these are known, too.

        On return those that are not answered are on the disk. :raises OSError: the disk fails; ask again.
        """
        return [Reply(arrived.peer, answer) for arrived in batch if (answer := self._pack(arrived)) is not None]

    def note(self, pack: messages.Pack, peer: str, seqs: Sequence[int], results: Mapping[int, Result]) -> list[Reply]:
        """The outcome of those files of a pack that another end has executed; durable here on return.

        :param seqs: their numbers. :param results: without those that there was no room for.
        :returns: PACKED, when all files are final; NOSPACE, so that the pack is said again, when one could not be made.
        """
        if len(results) < len(seqs):
            self._gathers_no_more(pack.origin, pack.seq)
            return [Reply(peer, messages.NoSpace(pack.origin, pack.seq, int(lots.RETRY_AFTER_S)))]
        packed = self._noted(pack, results)
        return [] if packed is None else [Reply(peer, packed)]

    def _noted(self, pack: messages.Pack, results: Mapping[int, Result]) -> messages.Packed | None:
        """Record those results with those of files that were refused; PACKED when all of the pack are final."""
        known = {**self._gathered[pack.origin][pack.seq].refused, **results}
        if known:
            self._egress_store.note(PackResults(pack.origin, pack.expires, known))
        packed = recorded_pack(self._store, pack.origin, pack.seq, len(pack.paths))
        if packed is not None:
            self._gathers_no_more(pack.origin, pack.seq)
        return packed

    def _pack(self, arrived: Arrived) -> messages.Packed | messages.NoSpace | None:
        pack, now = arrived.pack, self._clock.wall_s()
        known = recorded_pack(self._store, pack.origin, pack.seq, len(pack.paths))
        if known is not None:
            return known
        if now > pack.expires:
            return as_packed(pack.origin, pack.seq, [Result(Outcome.EXPIRED)] * len(pack.paths))
        reason = self._reason_against_numbers(pack) or self._reason_against_sender(arrived)
        if reason:
            return packs.refused(pack, reason[:_REASON_CHARS])
        end, low = pack.seq + len(pack.paths), self._store.record(pack.origin).low
        final = self._store.results_of(pack.origin, range(pack.seq, end))
        left = [file for file in arrived.files if file.seq > low and file.seq not in final]
        new = [file for file in left if (pack.origin, file.seq) not in self._held]
        refused = {file.seq: why for file in new if (why := self._refusal_of(arrived, file)) is not None}
        new = [file for file in new if file.seq not in refused]
        if new and not self._unpack(arrived, new):
            return messages.NoSpace(pack.origin, pack.seq, int(lots.RETRY_AFTER_S))
        unwanted = {file.seq for file in left}.intersection(pack.cancelled)
        if not unwanted <= self._store.record(pack.origin).cancelled:
            self._egress_store.cancel_all(pack.origin, unwanted)
        self._gathered.setdefault(pack.origin, {})[pack.seq] = _Gathered(end, arrived.peer, refused)
        is_all = len(arrived.files) == len(pack.paths)
        return self._noted(pack, {}) if is_all and refused else None

    def _reason_against_numbers(self, pack: messages.Pack) -> str:
        """Two packs that share a file would wait for each other's results. The same one again is another matter."""
        end = pack.seq + len(pack.paths)
        for first, one in self._gathered.get(pack.origin, {}).items():
            if first < end and pack.seq < one.end and (first, one.end) != (pack.seq, end):
                return f"files {first} to {one.end - 1} are under way in another pack"
        return ""

    def among(self, tid: int, blocks: Collection[int]) -> Collection[int]:
        """As :meth:`Store.among`."""
        return self._store.among(tid, blocks)

    def expire(self, busy: Collection[Key], problems: Mapping[str, str] = NO_PROBLEMS) -> list[Reply]:
        """As of a custodian. Packs of which nothing is here any more (it was damaged, and never came again) go, too."""
        replies = super().expire(busy, problems)
        for origin, packs_of in list(self._gathered.items()):
            for first, one in list(packs_of.items()):
                if not any((origin, seq) in self._held for seq in range(first, one.end)):
                    self._gathers_no_more(origin, first)
        return replies

    def _in_way(self, held: Held, problems: Mapping[str, str]) -> str:
        target = self.targets.find(held.operation.path)
        return problems.get(target.shown, "") if target else ""

    def _gathers_no_more(self, origin: str, first: int) -> None:
        del self._gathered[origin][first]
        if not self._gathered[origin]:
            del self._gathered[origin]

    def _reason_against_sender(self, arrived: Arrived) -> str:
        held = [self._held.get((arrived.pack.origin, file.seq)) for file in arrived.files]
        is_his = all(one is None or same_owner(one.key[0], one.sender, arrived.peer) for one in held)
        return "" if is_his else "it was deposited with another key"

    def _refusal_of(self, arrived: Arrived, file: PackedFile) -> Result | None:
        """Return why a file is not taken, which costs no other one of its pack; None when it is."""
        try:
            checked(file.path)
        except BadPath as problem:
            return Result(Outcome.FAILED, str(problem)[:_REASON_CHARS])
        if self.targets.find(file.path) is None:
            return Result(Outcome.FAILED, f"{file.path}: only what is below it is delivered"[:_REASON_CHARS])
        return None if arrived.digest(file.data) == file.digest else Result(Outcome.FAILED, "digest")

    def _unpack(self, arrived: Arrived, new: Sequence[PackedFile]) -> bool:
        """Files of a pack into the spool, whole, in as few durable steps as one; False when there is no room."""
        pack, peer = arrived.pack, arrived.peer
        asks = [
            Open(pack.origin, file.seq, file.path, len(file.data), messages.BLOCK_BYTES, pack.expires) for file in new
        ]
        owners = [(ask.origin, ask.seq, peer) for ask in asks]
        wanted: dict[object, int] = {owner: ask.size_bytes for owner, ask in zip(owners, asks)}
        again_s = lots.reserve_all(self._spool, wanted, self._clock.monotonic_s())
        try:
            if again_s is not None or len(self._held) + len(new) > MOST_OPERATIONS:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            transfers = self._egress_store.grant_all(asks, peer)
            self._write(transfers, new)
            held = [self._unpacked(arrived, *one) for one in zip(transfers, new)]
            self._egress_store.take_all((one, file.digest) for one, file in zip(held, new))
        except (OSError, sqlite3.Error) as problem:
            for owner in owners:  # what was granted and written goes when it expires, or is used again
                lots.release(self._spool, owner)
            if not no_room(problem):
                raise
            log.event("space-exhausted", path=pack.paths[0], files=len(new), spool_bytes=self._spool.size_bytes)
            return False
        for one, owner in zip(held, owners):
            lots.pin(self._spool, owner)
            self._enter(one)
        return True

    def _write(self, transfers: Sequence[Transfer], new: Sequence[PackedFile]) -> None:
        with durable.step("egress-unpack"):
            for transfer, file in zip(transfers, new):
                place = self._tree.staging(transfer.tid)
                descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                try:
                    if os.write(descriptor, file.data) != len(file.data):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    if len(new) < SYNC_ALL_FROM:
                        os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            directory = os.open(self._tree.staging(0).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                if len(new) < SYNC_ALL_FROM:
                    os.fsync(directory)
                else:
                    sync_filesystem(directory)
            finally:
                os.close(directory)

    def _unpacked(self, arrived: Arrived, transfer: Transfer, file: PackedFile) -> Held:
        blocks = 1 if file.data else 0
        operation = Operation(
            arrived.pack.origin, file.seq, "publish", file.path, arrived.pack.expires, size_bytes=len(file.data),
            blocks=blocks, manifest=packs.manifest([file.digest] * blocks), parents=True, mode=file.mode,
        )  # fmt: skip
        return Held(operation, arrived.peer, arrived.digest_name, transfer.tid, int(self._clock.wall_s()))

    def damaged(self, key: Key, blocks: Collection[int]) -> list[Reply]:
        """As of a custodian; a pack, of which there is no OPEN, is asked for again as a whole."""
        held, first = self._held.get(key), self._first(key)
        if held is None or (held.asked is not None and first is None):
            return super().damaged(key, blocks)
        log.error("custody-damaged", origin=key[0], seq=key[1], path=held.operation.path, release="delivered",
                  advice="check the disk of the spool")  # fmt: skip
        gone = self._store.transfers_of(*key)
        self._egress_store.drop(key)
        del self._held[key]
        self._free(gone)
        return [Reply(held.sender, messages.Result(key[0], key[1] if first is None else first, "unknown"))]

    def gathers(self, origin: str, seq: int) -> bool:
        """Tell whether a file is in a pack whose results are awaited."""
        return self._first((origin, seq)) is not None

    def _first(self, key: Key) -> int | None:
        """Number of the first file of the pack that is gathered for a file."""
        packs_of = self._gathered.get(key[0], {})
        return next((first for first, one in packs_of.items() if first <= key[1] < one.end), None)

    def _end(self, operation: Operation, sender: str, result: Result) -> list[Reply]:
        replies = super()._end(operation, sender, result)
        origin, first = operation.origin, self._first((operation.origin, operation.seq))
        if first is None:
            return replies
        end, peer, _ = self._gathered[origin][first]
        packed = recorded_pack(self._store, origin, first, end - first)
        if packed is None:
            return []
        self._gathers_no_more(origin, first)
        return [Reply(peer, packed)]

    def whole(self, tid: int) -> list[Reply]:
        """All blocks are there and nobody writes any more: the PUBLISH that waits for them is taken."""
        return _not_pending(super().whole(tid))

    def ready(self, busy: Collection[Key]) -> tuple[list[Held], list[Reply]]:
        """The operations that may be delivered now, most urgent first, and answers for those that may not be any more.

        Of files of one name only the oldest: they arrive in the order in which they were asked for.

        :param busy: what is being delivered.
        """
        first: dict[str, Held] = {}
        for held in sorted(self._held.values(), key=lambda one: one.taken_at):
            first.setdefault(held.operation.path, held)
        found: list[Held] = []
        replies: list[Reply] = []
        for held in first.values():
            if self._lacks_data(held) or held.key in busy:
                continue
            record = self._store.record(held.operation.origin)
            step, result = terminal.judge(record, _op(held.operation), int(self._clock.wall_s()))
            if step is Step.EXECUTE and not held.damaged:
                found.append(held)
            elif step is Step.RECORD and result is not None:
                replies += self.settle(held.key, result)
        return sorted(found, key=lambda one: (-one.operation.priority, one.taken_at)), replies

    def _reason_against(self, operation: Operation) -> str:
        target = self.targets.find(operation.path) or self.targets.find(operation.target)
        place = target.shown if target else "nowhere: it is not below any path that this gateway delivers"
        if operation.kind != "publish" or target is None:
            return f"{operation.kind} cannot be done: what is here goes to {place}"
        if operation.absent or operation.generation >= 0:
            return f"a precondition cannot be checked at {place}"
        return ""

    def _in_custody(self, held: Held, peer: str) -> Reply:
        return Reply(peer, messages.Result(*held.key, "pending"))


def _not_pending(replies: list[Reply]) -> list[Reply]:
    """Without what answers a STATUS only."""
    return [
        one for one in replies if not (isinstance(one.message, messages.Result) and one.message.outcome == "pending")
    ]


def _op(operation: Operation) -> Op:
    """The operation as the terminal rule knows it."""
    return Op(
        int(operation.origin, 16), operation.seq, Kind(operation.kind), operation.path, expires=operation.expires,
        after=operation.after,
    )  # fmt: skip
