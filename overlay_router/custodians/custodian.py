"""A custodian: operations for other terminals, kept in a spool until they are delivered.

The way of a file, top to bottom: :meth:`Custodian.open` reserves a lot for the whole of it;
:meth:`Custodian.staged` records blocks whose bytes are on the disk, :meth:`Custodian.passed` those that only the next
hop has on its disk (:mod:`overlay_router.custodians.passing`); :meth:`Custodian.begin` lets these go on to the
terminal while others still come; :meth:`Custodian.operate`, or :meth:`Custodian.whole`, takes the operation into
custody when they are all there and right; :meth:`Custodian.due` says what may be delivered; :meth:`Custodian.settle`
records what the terminal answered and frees the spool. No sockets and no threads: a call returns the messages to be
sent.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from overlay_router.custodians.freeing import Freeing, owner_of
from overlay_router.custodians.pack_custody import PackCustody
from overlay_router.custodians.passing import Coming, Passed, SentOn, may_be_passed
from overlay_router.custodians.said import DAMAGED, DAMAGED_UNKNOWN, KEPT, NO_PROBLEMS, Said
from overlay_router.custodians.spool import Begun, CustodyStore, Held, Key
from overlay_router.custodians.unknown import Unknown
from overlay_router.local.held import HeldOperations
from overlay_router.local.replies import Attached, Reply
from overlay_router.local.small_files import Arrived
from overlay_router.local.staging import as_result, ranges, recorded, recorded_pack, whole
from overlay_router.local.store import Transfer
from overlay_router.local.tree import BadPath, Tree, checked, no_room
from overlay_router.peers.deposits import Terminals, same_key
from overlay_router.peers.origins import as_handed_on, same_owner
from overlay_router.rules import custody, lots, terminal
from overlay_router.rules.lots import Spool
from overlay_router.rules.states import Outcome, Release, Result
from stageout.core import durable, log
from stageout.core.clock import Clock
from stageout.overlay.tuning.shares import turn
from stageout.overlay.wire import messages
from stageout.overlay.wire.messages import NoSpace, Open, Opened, Operation, Staged
from stageout.overlay.wire.route import next_hop

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
#: Operations in custody, or waiting for their data: each takes some kB of memory, whatever its data.
MOST_OPERATIONS = 100_000
#: So many files are put in order whenever it is asked for.
_FEW = 1000
_TURN_S = 1.0
#: Cancellations that came before their operations: the newest. A sender that loses its connection says both again.
_MOST_UNWANTED = 10_000
_NOT_KEPT = "its OPEN said that the sender keeps the bytes until they are delivered, and the operation does not"


@dataclass
class _Waiting:
    """An operation whose data are not all there. :param digest: the kind of their digests."""

    operation: Operation
    peer: str
    digest: str


@dataclass(frozen=True)
class _Asked:
    """An OPEN. :param digest: the kind of digests that its sender uses."""

    ask: Open
    digest: str


class Custodian:
    """One spool and its records.

    :param tree: of the spool. :param spool: its size; lots are filled in. :param name: of this router, for CUSTODY.
    :param terminals: who may deposit for whom.
    :ivar packs: those of small files. :ivar said: what was said onward.
    """

    def __init__(
        self, store: CustodyStore, tree: Tree, spool: Spool, terminals: Terminals, name: str, clock: Clock
    ) -> None:
        self._store, self._tree, self._spool, self._name, self._clock = store, tree, spool, name, clock
        self.terminals = terminals
        store.belong_to(tree.place)
        held = store.held()
        self._held = {one.key: one for one in held if not store.has_result(one.key)}
        #: Refused by their terminals: the only copies of their data stay until they are cancelled, or expire.
        self._refused = {one.key: one for one in held if one.key not in self._held}
        self.packs = PackCustody(store, tree.place, spool, terminals, name, clock, self._held)
        #: Operations that were cancelled before anything of them came, by who said so and the number.
        self._unwanted: dict[tuple[str, int], None] = {}
        self._waiting, self._asked = HeldOperations[_Waiting](), dict[Key, _Asked]()
        self._sent_on = SentOn(store)
        self.said = Said(store)
        self._passed, self._freeing, self._unknown = Passed(), Freeing(tree, spool), Unknown(tree.root)
        self._in_turn, self._in_turn_s = list[Held](), float("-inf")
        self.cancelled: set[Key] = {key for key in self._held if key[1] in store.record(key[0]).cancelled}
        self._recover()

    # ---- taken in ----------------------------------------------------------------------------------------------------

    def open(self, ask: Open, peer: str, digest: str = "") -> Reply:
        """Reserve a lot and grant a transfer number: OPENED, NOSPACE, CUSTODY, or the RESULT that is final.

        :param digest: the kind of digests that the peer uses; without it nothing is sent on before it is in custody.
        """
        final = self._final(ask, peer)
        if final is not None:
            return Reply(peer, final)
        held = self._held.get((ask.origin, ask.seq))
        if held is not None and not self._lacks_data(held):
            return self._in_custody(held, peer)
        if self.packs.has(ask.origin, ask.seq, [(ask.path, ask.size_bytes)], peer):
            return Reply(peer, messages.Custody(ask.origin, ask.seq, self._name))
        self._asked[ask.origin, ask.seq] = _Asked(ask, digest)
        owner = (ask.origin, ask.seq, peer)
        again_s = lots.reserve(self._spool, owner, ask.size_bytes, self._clock.monotonic_s())
        if again_s is not None:
            return self._no_room(ask, peer, again_s)
        transfer = self._store.grant(ask, peer)
        try:
            self._allocate(transfer)
        except OSError as problem:
            if problem.errno not in _NO_ROOM:
                raise
            return self._no_room(ask, peer, lots.RETRY_AFTER_S)
        return self._opened(transfer, peer)

    def attach(self, tid: int) -> Attached | None:
        """The file of a live transfer; None for a number that is closed, or whose data are in custody."""
        transfer = self._store.transfer(tid)
        if transfer is None or not self._tree.inode(tid):
            return None
        held = self._held.get(_key_of(transfer))
        if (held is not None and not held.damaged) or _key_of(transfer) in self._refused:
            return None
        return Attached(transfer, os.open(self._tree.staging(tid), os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC))

    def staged(self, tid: int, blocks: Iterable[tuple[int, bytes]]) -> list[Reply]:
        """Blocks (position, digest) whose bytes are on the disk: recorded, said."""
        transfer = self._store.transfer(tid)
        if transfer is None:
            return []
        lots.renew(self._spool, owner_of(transfer), self._clock.monotonic_s())
        new = dict(blocks)
        self._store.stage(tid, new.items())
        replies = [Reply(transfer.sender, Staged(tid, ranges(sorted(new))))]
        if not self._passed.of(tid):
            return replies
        self._passed.drop(tid, new)
        return replies + self._perhaps_whole(transfer)

    def passed(self, tid: int, blocks: Mapping[int, bytes]) -> list[Reply]:
        """Blocks (with digests) that the next hop has on its disk, and that are perhaps not on this one: said."""
        transfer = self._store.transfer(tid)
        held = transfer and self._held.get(_key_of(transfer))
        if transfer is None or (held and not held.damaged):
            return []
        lots.renew(self._spool, owner_of(transfer), self._clock.monotonic_s())
        self._passed.add(tid, blocks)
        self._passed.drop(tid, self._store.among(tid, blocks))
        said = Staged(tid, ranges(sorted(blocks)), self._passed.epoch(self._store.epoch, tid))
        return [Reply(transfer.sender, said), *self._perhaps_whole(transfer)]

    def _perhaps_whole(self, transfer: Transfer) -> list[Reply]:
        count = len(self._passed.of(transfer.tid)) + self._store.count(transfer.tid)
        return self.whole(transfer.tid) if count >= transfer.blocks else []

    def gone(self, tid: int, blocks: Collection[int]) -> list[Reply]:
        """These blocks must come again; so must all that is not known to be on a disk. Data in custody wait."""
        transfer = self._store.transfer(tid)
        was_passed = not self._passed.of(tid).keys().isdisjoint(blocks)
        held = transfer and self._held.get(_key_of(transfer))
        if transfer is None or (held and not held.damaged and not was_passed):
            return []
        if held and not held.damaged:
            log.warn("blocks-lost", path=transfer.ask.path, reason="the next hop does not have them any more")
            self._store.withdraw(held.key, tid, ())
            self._held[held.key] = replace(held, damaged=True)
        self._passed.begin_anew(tid, blocks)
        return [self._opened(transfer, transfer.sender)]

    def is_whole(self, tid: int) -> bool:
        """As :meth:`Store.is_whole`."""
        return self._store.is_whole(tid)

    def whole_of(self, origin: str, seq: int) -> list[int]:
        """As :meth:`Store.whole_of`."""
        return self._store.whole_of(origin, seq)

    def whole(self, tid: int) -> list[Reply]:
        """All blocks are there and nobody writes any more: an operation that waits for them is taken."""
        transfer = self._store.transfer(tid)
        waiting = transfer and self._waiting.get(_key_of(transfer))
        return self._consider(waiting) if waiting else []

    def operate(self, operation: Operation, peer: str, digest: str) -> list[Reply]:
        """Take an operation into custody, or wait for its data, or say what became of it.

        :param digest: the kind of the digests that its manifest is made of.
        """
        final = self._final(operation, peer)
        if final is not None:
            return [Reply(peer, final)]
        key = operation.origin, operation.seq
        held = self._held.get(key)
        if held is not None and not self._lacks_data(held):
            return [self._in_custody(held, peer)]
        if self.is_unwanted(operation.seq, peer):
            return self._end(operation, peer, Result(Outcome.CANCELLED))
        known = key in self._held or key in self._waiting
        if not known and len(self._held) + len(self._refused) + len(self._waiting) >= MOST_OPERATIONS:
            log.warn("limit-reached", reason=f"{MOST_OPERATIONS} operations are in custody, or wait for their data")
            return []  # the peer asks again
        return self._consider(_Waiting(operation, peer, digest))

    def take(self, batch: Iterable[Arrived]) -> list[Reply]:
        """As of :class:`PackCustody`: of files that were cancelled before they came, that is known then."""
        return self.packs.take([self._without_unwanted(arrived) for arrived in batch])

    def _without_unwanted(self, arrived: Arrived) -> Arrived:
        pack = arrived.pack
        seqs = range(pack.seq, pack.seq + len(pack.paths)) if self._unwanted else ()
        early = {seq for seq in seqs if self.is_unwanted(seq, arrived.peer)}
        return arrived._replace(pack=replace(pack, cancelled=(*pack.cancelled, *early))) if early else arrived

    def _consider(self, waiting: _Waiting) -> list[Reply]:
        operation, key = waiting.operation, (waiting.operation.origin, waiting.operation.seq)
        now = int(self._clock.wall_s())
        asked = self._asked.get(key)
        held = Held(operation, waiting.peer, waiting.digest, 0, now, asked=asked.ask if asked else None)
        if operation.kind != "publish":
            return [self._take(held)]
        mine = [item for item in self._store.transfers_of(*key) if item.sender == waiting.peer]
        if not may_be_passed(operation) and any(self._passed.of(item.tid) for item in mine):
            return self._end(operation, waiting.peer, Result(Outcome.FAILED, _NOT_KEPT))
        transfer, wrong = whole(self._store, self._tree, mine, operation, self._passed.of)
        for item in wrong:
            self._passed.forget(item.tid)
        if transfer is None or not self._may_take(transfer, operation):
            self._waiting.put(operation, waiting.peer, waiting, self._clock.wall_s())
            return [self._opened(item, waiting.peer) for item in wrong]
        durable.sync("custody-sync", self._tree.staging(transfer.tid).parent)
        taken = self._take(replace(held, tid=transfer.tid))
        self._waiting.release(key)
        return [taken]

    def _may_take(self, transfer: Transfer, operation: Operation) -> bool:
        count = self._store.count(transfer.tid) + len(self._passed.of(transfer.tid))  # each is in one of them
        return custody.may_grant(operation.blocks, range(count), True, owner_of(transfer) in self._spool.lots)

    def _take(self, held: Held) -> Reply:
        operation, held = held.operation, replace(held, number=self._store.next_number())
        self._store.take(held)
        self._asked.pop(held.key, None)
        if held.tid:
            lots.pin(self._spool, (*held.key, held.sender))
        self._enter(held)
        log.event("custody-accepted", origin=held.key[0], seq=held.key[1], path=operation.path,
                  terminal=operation.terminal, bytes=operation.size_bytes, release=operation.release,
                  passed_blocks=len(self._passed.of(held.tid)), tid=held.tid, sender=held.sender)  # fmt: skip
        return self._in_custody(held, held.sender)

    def _enter(self, held: Held) -> None:
        """It is in custody, behind all that is there and touches the same names."""
        before = self._held.pop(held.key, None)  # its data have come again
        if before is not None:
            self.packs.leave(before)
        self._held[held.key] = held
        self.packs.enter(held)

    # ---- asked about -------------------------------------------------------------------------------------------------

    def knows(self, origin: str, seq: int) -> bool:
        """Tell whether anything of an operation is, or was, here."""
        return (
            (origin, seq) in self._held
            or self.packs.covers(origin, seq)
            or recorded(self._store, origin, seq) is not None
            or bool(self._store.transfers_of(origin, seq))
        )

    def status(self, ask: messages.Status, peer: str) -> list[Reply]:
        """RESULT; CUSTODY while it is in custody; OPENED when data must come again; STAGED while they come."""
        final = recorded(self._store, ask.origin, ask.seq)
        if final is not None:
            return [Reply(peer, final)]
        packed = self.packs.custody(ask.origin, ask.seq)
        if packed is not None:
            return [Reply(peer, packed)]
        held = self._held.get((ask.origin, ask.seq))
        if held is not None and not self._lacks_data(held):
            return [self._in_custody(held, peer)]
        transfers = self._store.transfers_of(ask.origin, ask.seq)
        if held is not None:
            return [self._opened(item, peer) for item in transfers]
        return [Reply(peer, self._is_staged(item.tid)) for item in transfers]

    def cancel(self, ask: messages.Cancel, peer: str) -> list[Reply]:
        """Remember the wish and pass it on; what is not in custody yet is cancelled at once."""
        final, key = recorded(self._store, ask.origin, ask.seq), (ask.origin, ask.seq)
        if final is not None:
            if not ask.data_only:
                self._give_up(key, peer)
            return [Reply(peer, final)]
        if ask.data_only:
            return self._drop(key, peer)
        packed = self.packs.cancel(key, peer)
        if packed is not None:
            return [Reply(peer, packed)]
        held, transfers = self._held.get(key), self._store.transfers_of(*key)
        givers = {held.sender} if held else {item.sender for item in transfers}
        if not all(same_key(giver, peer) for giver in givers):
            log.warn(
                "cancel-refused", origin=key[0], key=peer.partition("/")[0], reason="it was deposited with another"
            )
            return self.status(messages.Status(*key), peer)
        if held is None:
            ask_open = transfers[0].ask
            operation = Operation(*key, "publish", ask_open.path, ask_open.expires)
            return self._end(operation, peer, Result(Outcome.CANCELLED))
        self._store.cancel(*key)
        self.cancelled.add(key)
        ends = held.damaged and not self.said.may_be_done(held)
        return self._end(held.operation, held.sender, Result(Outcome.CANCELLED)) if ends else []

    def cancel_early(self, ask: messages.Cancel, peer: str) -> None:
        """Remember the wish for an operation of which nothing has come: its pack may be on another connection."""
        self._unwanted[peer, ask.seq] = None
        if len(self._unwanted) > _MOST_UNWANTED:
            del self._unwanted[next(iter(self._unwanted))]

    def is_unwanted(self, seq: int, peer: str) -> bool:
        """Tell whether the same peer (``KEY/ORIGIN``) has cancelled an operation before it came."""
        return (peer, seq) in self._unwanted

    def _give_up(self, key: Key, peer: str) -> None:
        """Free the only copy of what its terminal has refused: its owner wants it no more."""
        held = self._refused.get(key)
        if held is not None and same_key(held.sender, peer):
            self._free_refused(held)
        self.packs.give_up(key, peer)

    def _free_refused(self, held: Held) -> None:
        gone = self._store.transfers_of(*held.key)
        self._store.conclude(held.operation, self._store.record(held.key[0]).results[held.key[1]], None)
        del self._refused[held.key]
        self._free(gone)
        log.event("custody-freed", origin=held.key[0], seq=held.key[1], path=held.operation.path)

    def _drop(self, key: Key, peer: str) -> list[Reply]:
        """Another custodian gives up: what it has brought is dropped, unless it is in custody here."""
        if key not in self._held:
            gone = [item for item in self._store.transfers_of(*key) if item.sender == peer]
            for item in gone:
                self._store.abandon(item)
            self._free(gone)
        if self.knows(*key):
            return self.status(messages.Status(*key), peer)
        return [Reply(peer, messages.Result(*key, "unknown"))]

    def low(self, ask: messages.Low) -> None:
        """Results up to that number may be forgotten; what is in custody stays."""
        packed = self.packs.first(ask.origin)
        held = any(origin == ask.origin and seq <= ask.seq for origin, seq in self._held)
        if held or (packed is not None and packed <= ask.seq):
            log.warn("low-mark-refused", origin=ask.origin, seq=ask.seq)
            return
        if self.packs.keeps_refused(ask) or any(key[0] == ask.origin and key[1] <= ask.seq for key in self._refused):
            return  # their results say what is kept here
        gone = [item for item in self._store.transfers() if item.ask.origin == ask.origin and item.ask.seq <= ask.seq]
        self._store.raise_low(ask.origin, ask.seq)
        self._free(gone)

    def packed(self, ask: messages.Status) -> messages.Packed | None:
        """The results of a pack's files; None unless all of them are final."""
        return recorded_pack(self._store, ask.origin, ask.seq, ask.files)

    def transfers(self) -> list[Transfer]:
        """Data that come now."""
        return [item for item in self._store.transfers() if not self._keeps(item)]

    def _keeps(self, item: Transfer) -> bool:
        """Tell whether data are in custody, or the only copy of what their terminal has refused."""
        return _key_of(item) in self._held or _key_of(item) in self._refused

    def held(self) -> list[Held]:
        """Everything in custody, and what terminals have refused."""
        return [*self._held.values(), *self._refused.values()]

    def why_refused(self, key: Key) -> str:
        """Return why its terminal has refused what is kept here; "" for what is on its way."""
        seqs = range(key[1], key[1] + 1) if key in self._refused else self.packs.refused_numbers(key)
        ends = self._store.results_of(key[0], seqs).values() if seqs else ()
        return next((one.reason for one in ends if one.outcome is Outcome.FAILED), "")

    def is_live(self, key: Key) -> bool:
        """Tell whether an operation is in custody, its data come in, or some of them may lie at its terminal."""
        return key in self._held or self._sent_on.find(key) is not None or bool(self._store.transfers_of(*key))

    # ---- sent on while it comes in -----------------------------------------------------------------------------------

    def begin(self, tid: int) -> Coming | None:
        """Data that may be sent on from now on, which is recorded; None for what is whole, unknown or in custody."""
        transfer = self._store.transfer(tid)
        asked = transfer and self._asked.get(_key_of(transfer))
        if transfer is None or not asked or not asked.digest or _key_of(transfer) in self._held:
            return None
        blocks = self._store.staged(tid)
        if len(blocks) == transfer.blocks:
            return None
        ask = asked.ask
        if ask.standby_s:  # another custodian has it, too, and begins
            return None
        sender, file = transfer.sender, str(self._tree.staging(tid))
        said = as_handed_on(ask, sender).origin
        self._sent_on.begin(Begun(_key_of(transfer), ask.terminal, ask.path, ask.expires, said))
        return Coming(tid, ask, sender, asked.digest, blocks, file, [*self._passed.of(tid).items()])

    def is_coming(self, tid: int) -> bool:
        """Tell whether data of that number come in, or are in custody."""
        return self._store.transfer(tid) is not None

    def spoiled(self, tid: int, blocks: Collection[int]) -> list[Reply]:
        """Blocks that are not yet in custody are not what they were: they are asked for again."""
        transfer = self._store.transfer(tid)
        if transfer is None or _key_of(transfer) in self._held:
            return []
        log.error("custody-damaged", path=transfer.ask.path, blocks=len(blocks), advice="check the disk of the spool")
        self._store.withdraw(_key_of(transfer), tid, blocks)
        return [self._opened(transfer, transfer.sender)]

    def strays(self) -> list[Begun]:
        """The operations that may lie at terminals although nobody here goes on with them."""
        return self._sent_on.strays(
            lambda key: key in self._held or bool(self._store.transfers_of(*key)), self._clock.wall_s()
        )

    def dropped(self, key: Key) -> None:
        """The terminal has dropped them."""
        self._sent_on.dropped(key)

    # ---- delivered ---------------------------------------------------------------------------------------------------

    def find(self, terminal: str, path: str) -> Held | None:
        """The newest file on its way to a name at a terminal that is in custody, and whole on the disk here, if any."""
        found = [
            held
            for held in self.held()
            if held.operation.path == path and held.operation.terminal.split(",")[-1] == terminal
            and held.tid and not held.damaged and held.key not in self.cancelled and not self._passed.of(held.tid)
        ]  # fmt: skip
        return max(found, key=lambda held: held.taken_at, default=None)

    def due(self) -> list[Held]:
        """The operations that may be delivered now, or asked about, most urgent first: whole, and nothing in custody
        must come before.

        An earlier version of the same name must.

        A file gains a step of priority for each half hour that it waits, so none waits for ever. Of many files the
        order is found anew once a second only; what was taken since then waits for that.
        """
        now_s = self._clock.monotonic_s()
        if len(self._held) < _FEW or now_s - self._in_turn_s >= _TURN_S:
            self._in_turn, self._in_turn_s = self._ordered(), now_s
        return [
            held
            for held in self._in_turn
            if self.has(held)
            and held.key not in self.packs.behind
            and not any(self._is_held(held.key[0], seq) for seq in held.operation.after)
        ]

    def has(self, held: Held) -> bool:
        """Tell whether it is in custody still, and as it was."""
        return self._held.get(held.key) is held

    def _lacks_data(self, held: Held) -> bool:
        """Tell whether data must come again: not of what is asked about, or not wanted, and so is not sent any more."""
        asks = self.said.is_only_asked(held) or self.said.is_asked_about(held, self._clock.wall_s())
        return held.damaged and not asks and held.key not in self.cancelled

    def _is_held(self, origin: str, seq: int) -> bool:
        return (origin, seq) in self._held or self.packs.covers(origin, seq)

    def _ordered(self) -> list[Held]:
        now = self._clock.wall_s()
        return sorted(
            (held for held in self._held.values() if not self._lacks_data(held)),
            key=lambda held: turn(held.operation.priority, held.operation.deadline, held.taken_at, now),
        )

    def result(self, origin: str, seq: int) -> messages.Result | None:
        """The end of an operation, as far as it is recorded here."""
        return recorded(self._store, origin, seq)

    def settled_up_to(self, origin: str) -> int:
        """The number up to which an origin has settled all of its operations."""
        return self._store.record(origin).low

    def digests(self, held: Held) -> list[bytes]:
        """Digests of all blocks on the disk here, in order."""
        return [digest for _, digest in self._store.staged(held.tid)] if held.tid else []

    def blocks(self, held: Held) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes]]]:
        """Blocks with their digests: on the disk here, and at the next hop only."""
        return self._store.staged(held.tid), [*self._passed.of(held.tid).items()]

    def file(self, held: Held) -> str:
        """Where its data are, "" when it has none."""
        return str(self._tree.staging(held.tid)) if held.tid else ""

    def settle(self, key: Key, result: Result) -> list[Reply]:
        """Record what the terminal answered, free the spool, and tell the sender."""
        held = self._held.get(key)
        if held is None:
            return []
        self._sent_on.answered(key)
        if self._is_only_copy(held) and result.outcome is Outcome.FAILED and key not in self.cancelled:
            return self._refuse(held, result)
        outcome = custody.verdict_at_expiry(held.release, 1, result.outcome)
        return self._end(held.operation, held.sender, result._replace(outcome=outcome))

    def _is_only_copy(self, held: Held) -> bool:
        """Tell whether nobody but a custodian has the data, and they are here."""
        return bool(held.tid and held.operation.terminal and not held.damaged) and held.release is Release.CUSTODY

    def _refuse(self, held: Held, result: Result) -> list[Reply]:
        """Record that its terminal does not take it; its data stay."""
        self._store.conclude(held.operation, result, None, keeps=True)
        self._refused[held.key] = held
        self._ended(held.key)
        log.error("custody-refused", origin=held.key[0], seq=held.key[1], path=held.operation.path,
                  terminal=held.operation.terminal, reason=result.reason, advice=KEPT)  # fmt: skip
        return [Reply(held.sender, as_result(*held.key, result))]

    def damaged(self, key: Key, blocks: Collection[int]) -> list[Reply]:
        """Blocks in the spool are not what they were: they come again, or are LOST, which is asked about first."""
        held = self._held.get(key)
        if held is None:
            return []
        self._tree.place.check()
        log.error("custody-damaged", origin=key[0], seq=key[1], path=held.operation.path, blocks=len(blocks),
                  release=held.operation.release, advice="check the disk of the spool")  # fmt: skip
        if held.release is Release.CUSTODY and not self.said.may_be_done(held):
            operation = held.operation
            if operation.terminal:
                said = as_handed_on(operation, held.sender).origin
                self._sent_on.keep(Begun(key, operation.terminal, operation.path, operation.expires, said))
            return self._end(held.operation, held.sender, Result(Outcome.LOST, DAMAGED))
        self._store.withdraw(key, held.tid, blocks)
        self._held[key] = held = replace(held, damaged=True)
        self.packs.ended(key)  # later versions do not wait for it
        transfer = self._store.transfer(held.tid)
        if transfer is None or not self._lacks_data(held):
            return []
        try:
            self._allocate(transfer)
        except OSError as problem:
            log.error("custody-damaged", path=held.operation.path, problem=problem)
        return [self._opened(transfer, held.sender)]

    def expire(self, busy: Collection[Key], problems: Mapping[str, str] = NO_PROBLEMS) -> list[Reply]:
        """End what is beyond its time, not ``busy`` (being delivered) and not asked about; give up dead lots.

        :param problems: what is in the way, by where it was to go.
        """
        now = int(self._clock.wall_s())
        late = [held for held in self._held.values() if self.said.is_over(held, now, held.key in busy)]
        ways = [(one, problems.get(next_hop(one.operation.terminal)[0], "")) for one in late]
        ends = [(one.key, Result(Outcome.EXPIRED, self.said.why_late(one, problem))) for one, problem in ways]
        damaged = self.said.unanswered(self._held.values(), self._clock.monotonic_s())
        ends += [(key, Result(Outcome.LOST, DAMAGED_UNKNOWN)) for key in damaged]
        replies = [reply for key, result in ends for reply in self.settle(key, result)]
        replies += self.packs.expire(busy, problems)
        lots.expire(self._spool, self._clock.monotonic_s())
        for one in [one for one in self._refused.values() if one.operation.expires < now]:
            self._free_refused(one)
        dead = self.transfers()
        dead = [item for item in dead if owner_of(item) not in self._spool.lots or item.ask.expires < now]
        try:
            for item in dead:
                self._store.abandon(item)
                self._free([item])
        except (OSError, sqlite3.Error) as problem:
            if no_room(problem):  # their data make some for the record
                for item in dead:
                    self._tree.discard(item.tid)
            raise
        self._store.forget(now)
        self._forget(now)
        self._freeing.again()
        self._unknown.expire(now)
        return replies

    def _forget(self, now: int) -> None:
        live = {_key_of(item) for item in self._store.transfers()}
        self._asked = {key: ask for key, ask in self._asked.items() if key in live}
        for key in [key for key, one in self._waiting.items() if key not in live and one.operation.expires < now]:
            self._waiting.release(key)
        self._waiting.drop_dataless(now, live)

    def _end(self, operation: Operation, sender: str, result: Result) -> list[Reply]:
        key = (operation.origin, operation.seq)
        gone = self._store.transfers_of(*key)
        self._store.conclude(operation, result, self._sent_on.find(key))
        self._ended(key)
        self._free(gone)
        say = log.event if result.outcome in (Outcome.DONE, Outcome.CANCELLED, Outcome.STALE) else log.error
        say("custody-ended", origin=key[0], seq=key[1], path=operation.path, terminal=operation.terminal,
            outcome=result.outcome.value, reason=result.reason)  # fmt: skip
        return [Reply(sender, as_result(*key, result))]

    def _ended(self, key: Key) -> None:
        """It has its result, which is recorded: it is not in custody any more."""
        held = self._held.pop(key, None)
        self._waiting.release(key)
        self.cancelled.discard(key)
        self.said.forget(key)
        if held is not None:
            self.packs.leave(held)
        self.packs.ended(key)

    def _free(self, transfers: Iterable[Transfer]) -> None:
        for item in transfers:
            self._freeing.free(item)
            self._passed.forget(item.tid)
            self._asked.pop(_key_of(item), None)

    # ---- rules -------------------------------------------------------------------------------------------------------

    def _final(self, ask: Open | Operation, peer: str) -> messages.Result | None:
        """Return why nothing is taken in: it is final, too late, not allowed, or another's."""
        stored = recorded(self._store, ask.origin, ask.seq)
        if stored is not None:
            return stored
        held = self._held.get((ask.origin, ask.seq))
        if held is not None and not same_owner(ask.origin, held.sender, peer):
            return _not_yours(ask.origin, ask.seq)
        if held is not None and (held.operation.path, held.operation.size_bytes) != (ask.path, ask.size_bytes):
            return as_result(ask.origin, ask.seq, Result(Outcome.FAILED, "that number is in custody for another file"))
        if held is not None and not self._lacks_data(held):
            return None
        if self._clock.wall_s() > ask.expires:
            return as_result(ask.origin, ask.seq, Result(Outcome.EXPIRED))
        reason = self.terminals.reason_against(ask.terminal, peer.partition("/")[0])
        if isinstance(ask, Operation) and terminal.waits_for_later(ask.seq, ask.after):
            reason = terminal.LATER
        if not reason:
            try:
                checked(ask.path)
            except BadPath as problem:
                reason = str(problem)
        return as_result(ask.origin, ask.seq, Result(Outcome.FAILED, reason)) if reason else None

    def _allocate(self, transfer: Transfer) -> None:
        if not self._tree.inode(transfer.tid):
            if self._store.count(transfer.tid):  # of data that were removed before the record of it
                self._store.unstage(transfer.tid)
            self._tree.allocate(transfer.tid, transfer.ask.size_bytes)
        self._tree.check_writable(transfer.tid)

    def _no_room(self, ask: Open, peer: str, again_s: float) -> Reply:
        log.event("space-exhausted", path=ask.path, size_bytes=ask.size_bytes, spool_bytes=self._spool.size_bytes,
                  reserved_bytes=lots.reserved_bytes(self._spool))  # fmt: skip
        return Reply(peer, NoSpace(ask.origin, ask.seq, int(again_s)))

    def _opened(self, transfer: Transfer, peer: str) -> Reply:
        epoch = self._passed.epoch(self._store.epoch, transfer.tid)
        return Reply(peer, Opened(transfer.tid, epoch, self._is_staged(transfer.tid).staged, True, True))

    def _is_staged(self, tid: int) -> Staged:
        passed = self._passed.of(tid).keys()
        blocks: Iterable[int] = (block for block, _ in self._store.each_staged(tid))
        blocks = sorted({*blocks, *passed}) if passed else blocks
        return Staged(tid, ranges(blocks), self._passed.epoch(self._store.epoch, tid) if passed else "")

    def _in_custody(self, held: Held, peer: str) -> Reply:
        return Reply(peer, messages.Custody(*held.key, self._name))

    def _recover(self) -> None:
        """After a restart: lots are as they were, what nobody owns is removed, what was passed must come again.

        Data with a number that was never granted here come from a newer database than this one, and are set aside.
        """
        live, counts = self._store.transfers(), self._store.counts()
        self._unknown.take_back(self._tree.staging(item.tid) for item in live)
        for held in self._held.values():
            if counts.get(held.tid, 0) < held.operation.blocks:
                self._held[held.key] = replace(held, damaged=True)
        for item in live:
            owner = owner_of(item)
            self._spool.lots[owner] = lots.Lot(item.ask.size_bytes, self._clock.monotonic_s() + lots.LEASE_S)
            if self._keeps(item):
                lots.pin(self._spool, owner)
                self._look_for(item)
            elif not self._tree.inode(item.tid):
                self._store.unstage(item.tid)
        strays, last_tid = set(self._tree.staged_numbers()) - {item.tid for item in live}, self._store.last_tid()
        self._unknown.set_aside([self._tree.staging(tid) for tid in strays if tid > last_tid])
        self._store.grant_beyond(self._unknown.numbers())
        for tid in strays:
            if tid <= last_tid:
                self._freeing.free_stray(tid)

    def _look_for(self, item: Transfer) -> None:
        """Have its terminal asked about what is not here any more: a newer database may know that it has arrived."""
        held = self._held.get(_key_of(item))
        if held is not None and not self._tree.inode(item.tid) and self.said.to(held.key) is None:
            self.said.say(held.key, "")


def _key_of(transfer: Transfer) -> Key:
    return transfer.ask.origin, transfer.ask.seq


def _not_yours(origin: str, seq: int) -> messages.Result:
    return as_result(origin, seq, Result(Outcome.FAILED, "it was deposited with another key"))
