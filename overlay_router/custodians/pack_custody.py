"""Packs of small files in custody: each is one file in the spool, one record and one receipt.

:meth:`PackCustody.take` takes those that came together into custody, with one sync and one record for all;
:meth:`PackCustody.settle` records what became of each file and frees the spool. Nothing looks into a pack on the way:
its terminal makes the files. No sockets and no threads: a call returns the messages to be sent.
"""

from __future__ import annotations

import errno
import os
import re
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from overlay_router.custodians.pack_records import HeldPack, PackRecords, pack_text
from overlay_router.custodians.pack_said import PackSaid
from overlay_router.custodians.said import (
    ASKS_S,
    DAMAGED,
    DAMAGED_UNKNOWN,
    KEPT,
    LATE,
    NO_PROBLEMS,
    UNKNOWN,
    asked_until,
    because,
    is_overdue,
)
from overlay_router.custodians.spool import Held
from overlay_router.custodians.unknown import Unknown
from overlay_router.custodians.versions import sum_of
from overlay_router.local.place import Place
from overlay_router.local.replies import Reply
from overlay_router.local.small_files import Arrived, overlap
from overlay_router.local.staging import as_packed, recorded_pack
from overlay_router.local.store import PackResults
from overlay_router.local.tree import OWN, SYNC_ALL_FROM, no_room, sync_filesystem
from overlay_router.peers.deposits import Terminals, same_key
from overlay_router.peers.origins import as_handed_on, is_signed, owner_of, same_owner
from overlay_router.rules import custody, lots, terminal
from overlay_router.rules.lots import Spool
from overlay_router.rules.states import Outcome, Release, Result
from stageout.core import durable, log
from stageout.core.clock import Clock
from stageout.overlay.wire import frames, messages, packs
from stageout.overlay.wire.messages import Custody, NoSpace, Packed
from stageout.overlay.wire.route import next_hop

Key = tuple[str, int]
#: In custody at once: each takes a kB of memory, and a MiB of the spool.
MOST_PACKS = 50_000
_FULL_AGAIN_S = 5
#: A terminal is told that it may forget results when there are so many of them: each time is a durable step there.
_FORGOTTEN_TOGETHER = 16_384
_MOST_ORIGINS = 4096
_REASON_CHARS = 200
#: Packs that come to their end in one call: their results are in memory together, and take the disk's thread.
_EXPIRE_AT_ONCE = 1024
_AS_WANTED = {Outcome.DONE, Outcome.CANCELLED}
#: Of one origin, behind a gap; beyond that its terminal forgets nothing before it expires.
_MOST_AHEAD = 1024
_FILE = re.compile(r"([0-9a-f]{32}|[0-9a-f]{40})-(\d{1,18})")
_SHARED = "unpacked: some of its files are in custody in another pack, or have their end: send each by itself"


class News(NamedTuple):
    """The changes that the deliverer has not heard yet.

    :param ready: packs that nothing in custody must come before. :param cancelled: of which a file is not wanted now.
    """

    ready: list[HeldPack]
    cancelled: list[HeldPack]


class HeldFile(NamedTuple):
    """A file of a pack in custody. :param position: in the pack."""

    held: HeldPack
    pack: messages.Pack
    position: int


@dataclass
class _Origin:
    """Packs of one origin, by the number of their first file. :param starts: these numbers, ascending."""

    packs: dict[int, HeldPack] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)

    def of(self, seq: int) -> HeldPack | None:
        """The pack that a file of that number is in."""
        place = bisect_right(self.starts, seq)
        held = self.packs[self.starts[place - 1]] if place else None
        return held if held is not None and seq < held.end else None


@dataclass
class _Done:
    """How far the files of an origin have arrived without a gap, from the first on.

    :param next: number of the first that has not. :param ahead: packs behind a gap: from the number of the first file
        to that behind the last.
    """

    next: int = 1
    ahead: dict[int, int] = field(default_factory=dict)

    def add(self, held: HeldPack) -> None:
        """All files of a pack have arrived, which is recorded here."""
        if held.seq == self.next or len(self.ahead) < _MOST_AHEAD:
            self.ahead[held.seq] = held.end
        while self.next in self.ahead:
            self.next = self.ahead.pop(self.next)


class PackCustody:
    """The packs of one custodian.

    :param place: of its spool. :param spool: its size and lots. :param terminals: who may deposit for whom.
    :param name: of this router, for CUSTODY. :param others: operations in custody that are in no pack.
    """

    def __init__(
        self,
        store: PackRecords,
        place: Place,
        spool: Spool,
        terminals: Terminals,
        name: str,
        clock: Clock,
        others: Mapping[Key, Held] = MappingProxyType({}),
    ) -> None:
        self._store, self._spool, self._terminals, self._name, self._clock = store, spool, terminals, name, clock
        self._others = others
        self._place = place.root / OWN / "packs"
        self._place.mkdir(mode=0o700, exist_ok=True)
        durable.sync("router-place", self._place.parent)
        self._is_there = place
        self._held: dict[Key, HeldPack] = {}
        #: Of which their terminals have refused files: the only copies stay until these are cancelled, or expire.
        self._refused: dict[Key, HeldPack] = {}
        self._origins: dict[str, _Origin] = {}
        self._behind: dict[Key, list[Held | HeldPack]] = {}
        #: Operations that are in no pack and wait for an earlier version of a name.
        self.behind: set[Key] = set()
        self._by_number: dict[int, Key] = {}
        self._news = News([], [])
        self._done: dict[str, _Done] = {}
        #: The packs that may have been sent, by this process or one before.
        self._perhaps_sent: set[Key] = set()
        #: Of which only what became of them is asked, for the copy here was damaged: since that monotonic time.
        self._asked_s: dict[Key, float] = {}
        self._said = self._recover()

    # ---- taken in ----------------------------------------------------------------------------------------------------

    def take(self, batch: Sequence[Arrived]) -> list[Reply]:
        """CUSTODY of packs, PACKED where the results are known or nothing is taken, NOSPACE while the spool is full.

        On return what is said is durable. :raises OSError: the disk fails; nothing is answered then.
        """
        replies: list[Reply] = []
        new: dict[Key, Arrived] = {}
        try:
            for arrived in batch:
                key = arrived.pack.origin, arrived.pack.seq
                answer = None if key in new else self._known(arrived, new.values()) or self._full(arrived)
                if isinstance(answer, Custody):  # what is not wanted any more may be news
                    self._cancel_all(arrived)
                if answer is not None:
                    replies.append(Reply(arrived.peer, answer))
                else:
                    new.setdefault(key, arrived)
        except BaseException:  # space that nobody has must not stay reserved
            for arrived in new.values():
                lots.release(self._spool, _owner(arrived.pack))
            raise
        return replies + self._keep(list(new.values())) if new else replies

    def _known(self, arrived: Arrived, others: Iterable[Arrived]) -> Custody | Packed | None:
        """The answer for what is here already, or may not be. :param others: that are about to be taken."""
        pack = arrived.pack
        if self.has(pack.origin, pack.seq, list(zip(pack.paths, pack.sizes_bytes)), arrived.peer):
            return Custody(pack.origin, pack.seq, self._name)
        known = recorded_pack(self._store, pack.origin, pack.seq, len(pack.paths))
        if known is not None:
            return known
        if self._clock.wall_s() > pack.expires:
            return as_packed(pack.origin, pack.seq, [Result(Outcome.EXPIRED)] * len(pack.paths))
        reason = self._terminals.reason_against(pack.terminal, arrived.peer.partition("/")[0])
        if terminal.waits_for_later(pack.seq + len(pack.paths), pack.after):
            reason = terminal.LATER
        if not reason:
            reason = self._shared(pack, arrived.peer)
        if not reason and any(overlap(pack, other.pack) for other in others):
            reason = _SHARED
        if not reason and any(arrived.digest(file.data) != file.digest for file in arrived.files):
            reason = "digest"
        return packs.refused(pack, reason[:_REASON_CHARS]) if reason else None

    def _full(self, arrived: Arrived) -> NoSpace | None:
        """Reserve a lot for a pack; or when to ask again."""
        pack, size_bytes = arrived.pack, _size_bytes(arrived)
        again_s: float | None = _FULL_AGAIN_S
        if len(self._held) + len(self._refused) < MOST_PACKS:
            again_s = lots.reserve(self._spool, _owner(pack), size_bytes, self._clock.monotonic_s())
        if again_s is None:
            lots.pin(self._spool, _owner(pack))
            return None
        log.event("space-exhausted", path=pack.paths[0], size_bytes=size_bytes, spool_bytes=self._spool.size_bytes,
                  reserved_bytes=lots.reserved_bytes(self._spool))  # fmt: skip
        return NoSpace(pack.origin, pack.seq, int(again_s))

    def _keep(self, new: Sequence[Arrived]) -> list[Reply]:
        """Their bytes on the disk, then one record of all."""
        now = int(self._clock.wall_s())
        taken = [self._held_of(arrived, now) for arrived in new]
        try:
            self._write(new)
            self._store.take_packs(zip(taken, (arrived.pack for arrived in new)))
        except Exception as problem:  # whatever it is, space that nobody has must not stay reserved
            for held in taken:
                self._free(held)
            if not no_room(problem):
                self._is_there.check()
                raise
            log.event("space-exhausted", packs=len(new))
            return [Reply(held.sender, NoSpace(*held.key, _FULL_AGAIN_S)) for held in taken]
        for held in taken:
            if self._said.may_come_again(held.key):
                self._perhaps_sent.add(held.key)
            self._said.add(held)
            self._add(held)
            self._line_up(held)
            log.event("custody-accepted", origin=held.origin, seq=held.seq, path=held.path, terminal=held.terminal,
                      files=held.files, bytes=held.size_bytes, release=held.release, sender=held.sender)  # fmt: skip
        return [Reply(held.sender, Custody(*held.key, self._name)) for held in taken]

    def _held_of(self, arrived: Arrived, now: int) -> HeldPack:
        pack = arrived.pack
        return HeldPack(
            pack.origin, pack.seq, pack.seq + len(pack.paths), pack.paths[0], pack.terminal, pack.release,
            pack.expires, arrived.peer, arrived.digest_name, _size_bytes(arrived), now, pack.priority, pack.deadline,
            pack.after, self._store.next_number(),
        )  # fmt: skip

    def _write(self, new: Sequence[Arrived]) -> None:
        each = len(new) < SYNC_ALL_FROM
        with durable.step("custody-pack-write"):
            for arrived in new:
                path = self._file((arrived.pack.origin, arrived.pack.seq))
                with path.open("wb", buffering=0) as file:
                    data = b"".join((*(one.digest for one in arrived.files), *(one.data for one in arrived.files)))
                    if file.write(data) != len(data):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    if each:
                        os.fsync(file.fileno())
            directory = os.open(self._place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                if each:
                    os.fsync(directory)
                else:
                    sync_filesystem(directory)
            finally:
                os.close(directory)

    # ---- asked about -------------------------------------------------------------------------------------------------

    def custody(self, origin: str, seq: int, files: int = 1) -> Custody | None:
        """CUSTODY, where all files with so many numbers from that on are in one pack in custody."""
        held = self._pack_of(origin, seq)
        return Custody(origin, seq, self._name) if held is not None and seq + files <= held.end else None

    def covers(self, origin: str, seq: int) -> bool:
        """Tell whether a file of that number is in a pack in custody."""
        return self._pack_of(origin, seq) is not None

    def _pack_of(self, origin: str, seq: int) -> HeldPack | None:
        known = self._origins.get(origin)
        return known.of(seq) if known is not None else None

    def has(self, origin: str, seq: int, files: Sequence[tuple[str, int]], peer: str) -> bool:
        """Tell whether these files (path, size) have these numbers in one pack in custody, which is of the same
        owner."""
        held = self._pack_of(origin, seq)
        if held is None or not same_owner(origin, held.sender, peer) or seq + len(files) > held.end:
            return False
        pack, first = self._store.pack(held.key), seq - held.seq
        return list(zip(pack.paths, pack.sizes_bytes))[first : first + len(files)] == list(files)

    def _shared(self, pack: messages.Pack, peer: str) -> str:
        """Return why a pack is refused of which some numbers are in custody, or final: a number is here once."""
        end, known = pack.seq + len(pack.paths), self._origins.get(pack.origin)
        before = bisect_left(known.starts, end) if known is not None else 0
        held = known.packs[known.starts[before - 1]] if known is not None and before else None
        if held is not None and held.end > pack.seq:
            return _SHARED if same_owner(pack.origin, held.sender, peer) else "it was deposited with another key"
        seqs = range(pack.seq, end)
        alone = any((pack.origin, seq) in self._others for seq in seqs)
        return _SHARED if alone or self._store.results_of(pack.origin, seqs) else ""

    def cancel(self, key: Key, peer: str) -> Custody | None:
        """Remember that a file of a pack is not wanted: its terminal hears it. None for a number that is in no pack."""
        held = self._pack_of(*key)
        if held is None:
            return None
        if same_key(held.sender, peer):
            self._store.cancel(*key)
            if held not in self._news.cancelled:
                self._news.cancelled.append(held)
        else:
            log.warn("cancel-refused", origin=key[0], reason="it was deposited with another")
        return Custody(*key, self._name)

    def _cancel_all(self, arrived: Arrived) -> None:
        """Cancel the files of a pack in custody that its sender, saying the pack again, does not want: it does not say
        that twice."""
        pack = arrived.pack
        held, known = self._pack_of(pack.origin, pack.seq), self._store.record(pack.origin).cancelled
        new = [seq for seq in pack.cancelled if pack.seq <= seq < pack.seq + len(pack.paths) and seq not in known]
        if held is not None and new:
            self._store.cancel_all(pack.origin, new)
            if held not in self._news.cancelled:
                self._news.cancelled.append(held)

    def first(self, origin: str) -> int | None:
        """The lowest number of an origin that is in custody, None without one."""
        return self._origins[origin].starts[0] if origin in self._origins else None

    def held(self) -> list[HeldPack]:
        """All packs in custody, oldest first, and those of which terminals have refused files."""
        return [*self._held.values(), *self._refused.values()]

    def news(self) -> News:
        """The changes since the last call. A pack that waits for an earlier operation comes when that has ended.

        So of two versions of one name, which their origin has ordered, the older never replaces the newer.
        """
        said, self._news = self._news, News([], [])
        return said

    def ended(self, key: Key) -> None:
        """An operation, or the pack that begins with it, is not in custody any more: who waited for it may go on."""
        for held in self._behind.pop(key, ()):
            if isinstance(held, HeldPack) and self._held.get(held.key) is held:
                self._line_up(held)
            elif isinstance(held, Held) and self._by_number.get(held.number) == held.key:
                self._line_up_alone(held)

    def enter(self, held: Held) -> None:
        """An operation that is in no pack is in custody: it waits for earlier versions of its names."""
        self._by_number[held.number] = held.key
        self._store.versions.add(held.number, _sums(held))
        self._line_up_alone(held)

    def leave(self, held: Held) -> None:
        """Such an operation is not in custody any more."""
        self._by_number.pop(held.number, None)
        self._store.versions.remove(held.number, _sums(held))
        self.behind.discard(held.key)

    def _line_up_alone(self, held: Held) -> None:
        earlier = self._earlier(held, held.operation.terminal, range(held.key[1], held.key[1] + 1), _sums(held))
        self.behind.discard(held.key)
        if earlier is not None:
            self.behind.add(held.key)
            self._behind.setdefault(earlier, []).append(held)

    def _line_up(self, held: HeldPack) -> None:
        before = self._before(held)
        if before is None:
            self._news.ready.append(held)
        else:
            self._behind.setdefault(before, []).append(held)

    def _before(self, held: HeldPack) -> Key | None:
        """Something in custody that must be final before a pack."""
        for seq in held.after:
            earlier = self._pack_of(held.origin, seq)
            if earlier is not None and earlier is not held:
                return earlier.key
            if (held.origin, seq) in self._others:
                return held.origin, seq
        return self._earlier(held, held.terminal, range(held.seq, held.end), self._store.sums_of(held.key))

    def _earlier(self, held: Held | HeldPack, terminal: str, seqs: range, sums: Sequence[int]) -> Key | None:
        """Something of the same owner in custody that was taken before and touches one of the same names at the same
        terminal. For nobody else's versions an order was promised, and a stranger's may wait for long."""
        names: set[str] | None = None
        for number in self._store.versions.before(held.number, sums):
            key = self._by_number.get(number)
            other = self._held.get(key) or self._others.get(key) if key else None
            if key is None or other is None or _waits_for(other, held.key[0], seqs):
                continue
            names = self._names(held) if names is None else names
            is_there = _end_of(other) == terminal.split(",")[-1] and not names.isdisjoint(self._names(other))
            if is_there and self._owner_of(held) == self._owner_of(other):
                return key
        return None

    def _names(self, held: Held | HeldPack) -> set[str]:
        if isinstance(held, HeldPack):
            return set(self._store.pack(held.key).paths)
        return set(filter(None, (held.operation.path, held.operation.target)))

    def _owner_of(self, held: Held | HeldPack) -> str:
        order = self._store.pack(held.key) if isinstance(held, HeldPack) else held.operation
        return owner_of(order.capability if is_signed(held.key[0]) else "", held.sender)

    # ---- fetched -----------------------------------------------------------------------------------------------------

    def find(self, terminal: str, path: str) -> HeldFile | None:
        """The newest file of a pack in custody on its way to a name at a terminal, None when there is none."""
        found: HeldFile | None = None
        known = {**self._held, **self._refused}
        for held in [known[key] for key in self._store.packs_with(path) if key in known]:
            pack = self._store.pack(held.key)
            if held.terminal.split(",")[-1] != terminal or path not in pack.paths:
                continue
            position = max(place for place, name in enumerate(pack.paths) if name == path)
            is_wanted = held.seq + position not in self._store.record(held.origin).cancelled
            if is_wanted and (found is None or (found.held.taken_at, found.held.seq) < (held.taken_at, held.seq)):
                found = HeldFile(held, pack, position)
        return found

    def read(self, file: HeldFile) -> bytes | None:
        """Its data, checked; None when they are not what came in. :raises OSError: :raises NoDigest: they cannot be."""
        pack, position = file.pack, file.position
        start = packs.DIGEST_BYTES * len(pack.paths)
        with self._file(file.held.key).open("rb", buffering=0) as whole:
            digests = whole.read(start)
            whole.seek(start + sum(pack.sizes_bytes[:position]))
            data = whole.read(pack.sizes_bytes[position])
        own = digests[packs.DIGEST_BYTES * position :][: packs.DIGEST_BYTES]
        is_right = packs.manifest([digests]) == pack.manifest and frames.digest_of_kind(file.held.digest)(data) == own
        return data if is_right else None

    # ---- delivered ---------------------------------------------------------------------------------------------------

    def order(self, held: HeldPack) -> dict[str, object] | None:
        """The facts of a pack for the process that delivers; None when it is not in custody any more.

        With it go the cancellations that were asked for, which the terminal judges, and a LOW: that of its origin, or
        behind files that have arrived, as is recorded here, with all before them (as DONE: on others something may
        depend). Nobody asks the terminal for these any more, and who frees its files raises no LOW.
        """
        if self._held.get(held.key) is not held:
            return None
        record = self._store.record(held.origin)
        done = self._done.get(held.origin, _Done()).next - 1
        low = max(record.low, done - done % _FORGOTTEN_TOGETHER)
        said_to, store = self._said.order(held)
        pack = as_handed_on(self._store.pack(held.key), held.sender)
        return {
            "pack": pack_text(pack), "file": str(self._file(held.key)), "digest": held.digest,
            "low": low, "cancelled": [seq for seq in sorted(record.cancelled) if held.seq <= seq < held.end],
            "said_to": said_to, "store": store, "taken_at": held.taken_at,
        }  # fmt: skip

    def settle(self, ends: Iterable[tuple[HeldPack, Sequence[Result]]]) -> list[Reply]:
        """Record what became of each file, free the spool, and tell the senders."""
        found = [(held, self._results(held, results)) for held, results in ends if held.key in self._held]
        if not found:
            return []
        kept = {held.key for held, one in found if self._is_only_copy(held, one)}
        sums = {held.key: self._store.sums_of(held.key) for held, _ in found}
        self._store.conclude_packs(found, kept)
        for held, _ in found:
            self._take_out(held, sums[held.key])
        replies: list[Reply] = []
        for held, one in found:
            self.ended(held.key)
            self._said.forget(held.key)
            if held.key in kept:
                self._refused[held.key] = held
            else:
                self._free(held)
            results = list(one.results.values())
            failed = next((result for result in results if result.outcome is not Outcome.DONE), None)
            if failed is None:
                self._arrived(held)
            reason = failed.reason or failed.outcome.value if failed else ""
            say = log.event if {result.outcome for result in results} <= _AS_WANTED else log.error
            say("custody-ended", origin=held.origin, seq=held.seq, path=held.path, terminal=held.terminal,
                files=held.files, failed=sum(result.outcome is not Outcome.DONE for result in results),
                reason=reason)  # fmt: skip
            if held.key in kept:
                log.error("custody-refused", origin=held.origin, seq=held.seq, path=held.path, terminal=held.terminal,
                          reason=reason, advice=KEPT)  # fmt: skip
            replies.append(Reply(held.sender, as_packed(held.origin, held.seq, results)))
        return replies

    def _is_only_copy(self, held: HeldPack, ended: PackResults) -> bool:
        """Tell whether a file that nobody else has was refused by its terminal, is whole here, and is still wanted."""
        is_here = held.is_single and held.key not in self._asked_s
        return is_here and not _failed(ended) <= self._store.record(held.origin).cancelled

    def give_up(self, key: Key, peer: str) -> None:
        """Note that the owner of a refused file wants it no more. The last one of a pack frees that."""
        origin, seq = key
        held = next((one for one in self._refused.values() if one.origin == origin and one.seq <= seq < one.end), None)
        if held is None or not same_key(held.sender, peer):
            return
        self._store.cancel(*key)
        if _failed(self._ends_of(held)) <= self._store.record(held.origin).cancelled:
            self._free_refused([held])

    def keeps_refused(self, ask: messages.Low) -> bool:
        """Tell whether files up to that number are kept that their terminal has refused."""
        return any(one.origin == ask.origin and one.seq <= ask.seq for one in self._refused.values())

    def refused_numbers(self, key: Key) -> range:
        """Those of the files of the pack that begins with that number, where some of them were refused; else none."""
        return range(key[1], self._refused[key].end) if key in self._refused else range(0)

    def _ends_of(self, held: HeldPack) -> PackResults:
        return PackResults(held.origin, held.expires, self._store.results_of(held.origin, range(held.seq, held.end)))

    def _free_refused(self, those: Sequence[HeldPack]) -> None:
        if those:
            self._store.conclude_packs([(held, self._ends_of(held)) for held in those])
        for held in those:
            del self._refused[held.key]
            self._free(held)
            log.event("custody-freed", origin=held.origin, seq=held.seq, path=held.path, files=held.files)

    def _arrived(self, held: HeldPack) -> None:
        if held.origin not in self._done and len(self._done) >= _MOST_ORIGINS:
            self._done.clear()  # their terminals forget the rest when it expires
        self._done.setdefault(held.origin, _Done()).add(held)

    def _results(self, held: HeldPack, results: Sequence[Result]) -> PackResults:
        release = Release(held.release)
        judged = (one._replace(outcome=custody.verdict_at_expiry(release, 1, one.outcome)) for one in results)
        return PackResults(held.origin, held.expires, dict(zip(range(held.seq, held.end), judged)))

    def damaged(self, held: HeldPack) -> list[Reply]:
        """A pack in the spool is not what it was: it is asked for again, or LOST where nobody else has its files.

        One that may have arrived is asked about first, for a while. :raises OSError: the spool is not there.
        """
        if held.key not in self._held:
            return []
        self._is_there.check()
        log.error("custody-damaged", origin=held.origin, seq=held.seq, path=held.path, files=held.files,
                  release=held.release, advice="check the disk of the spool")  # fmt: skip
        if held.is_single and held.key in self._perhaps_sent:
            self._asked_s.setdefault(held.key, self._clock.monotonic_s())
            return []
        if held.is_single:
            return self.settle([(held, [lost()] * held.files)])
        was_sent = held.key in self._perhaps_sent
        sums = self._store.sums_of(held.key)
        self._said.withdraw(held, was_sent)
        self._take_out(held, sums)
        self.ended(held.key)
        self._free(held)
        if was_sent:
            self._perhaps_sent.add(held.key)
        return [Reply(held.sender, messages.Result(*held.key, "unknown"))]

    def expire(self, busy: Collection[Key], problems: Mapping[str, str] = NO_PROBLEMS) -> list[Reply]:
        """End what is beyond its time, not ``busy`` (being delivered) and not asked about.

        When it is much, the rest the next time. :param problems: what is in the way, by the next router.
        """
        now, now_s = self._clock.wall_s(), self._clock.monotonic_s()
        self._perhaps_sent.difference_update(self._said.expire(now))
        given_up = [self._held[key] for key, since_s in self._asked_s.items() if now_s > since_s + ASKS_S]
        replies = self.settle([(held, [lost(DAMAGED_UNKNOWN)] * held.files) for held in given_up])
        late = (held for held in self._held.values() if held.expires < now and not self.is_asked_about(held))
        over = (one for one in late if one.key not in busy or is_overdue(one.expires, one.terminal, now))
        ends = islice(over, _EXPIRE_AT_ONCE)
        self._free_refused([one for one in self._refused.values() if one.expires < now][:_EXPIRE_AT_ONCE])
        return replies + self.settle([(held, late_results(held, self._why_late(held, problems))) for held in ends])

    def _why_late(self, held: HeldPack, problems: Mapping[str, str]) -> str:
        reason = UNKNOWN if self._may_be_done(held) else LATE
        return because(reason, problems.get(next_hop(held.terminal)[0], ""))

    def is_asked_about(self, held: HeldPack) -> bool:
        """Tell whether it is not sent any more, and has no end before whoever may have it was asked."""
        now = self._clock.wall_s()
        if held.key in self._asked_s:
            return True
        return held.expires < now <= asked_until(held.expires, held.terminal) and self._may_be_done(held)

    def was_sent(self, held: HeldPack) -> None:
        """The next hop may have it, and has not answered."""
        if held.key in self._held:
            self._perhaps_sent.add(held.key)

    def was_not_sent(self, held: HeldPack) -> None:
        """By the last order nobody has heard of it."""
        self._said.unsay(held.key)

    def meet(self, hop: str, store: str) -> list[Reply]:
        """A terminal has these records, which packs may be said to from now on: durable on return."""
        self._said.meet(hop, store, self._held.values())
        return []

    def ends_unknown(self, held: HeldPack) -> list[Result]:
        """The outcome of a pack that is asked about, and that its next hop does not know."""
        return [lost()] * held.files if held.key in self._asked_s else late_results(held)

    def _may_be_done(self, held: HeldPack) -> bool:
        return held.key in self._perhaps_sent or held.is_single  # another custodian may have its files, too

    # ---- the spool ---------------------------------------------------------------------------------------------------

    def _recover(self) -> PackSaid:
        """After a restart: lots are as they were, what has its end is removed, what is unknown is set aside.

        All packs are known before the first may go: a clock that was set back has the later of two come first.
        """
        refused = self._store.refused_packs()
        for held in self._store.held_packs():
            self._spool.lots[_owner(held)] = lots.Lot(held.size_bytes, 0.0, pinned=True)
            if held.key in refused:
                self._refused[held.key] = held
            else:
                self._add(held)
                self._perhaps_sent.add(held.key)
        for one in self._others.values():
            self.enter(one)
        for held in self._held.values():
            self._line_up(held)
        self._tidy({self._file(key) for key in (*self._held, *self._refused)})
        return PackSaid(self._store, self._held.values())

    def _tidy(self, known: Collection[Path]) -> None:
        """Remove files of packs that have their end; set aside those of which nothing is recorded."""
        unknown = Unknown(self._is_there.root)
        unknown.take_back(known)
        strays = [path for path in self._place.iterdir() if path not in known]
        ended = {path for path in strays if self._has_end(path.name)}
        for path in ended:
            _unlink(path, str(path))
        try:
            unknown.set_aside([path for path in strays if path not in ended])
        except OSError as problem:
            log.error("custody-release-failed", path=self._place, problem=problem, advice="check the disk of the spool")

    def _has_end(self, name: str) -> bool:
        """Tell whether the results of a pack are recorded, or settled by its origin. :param name: of its file."""
        found = _FILE.fullmatch(name)
        if found is None:
            return False
        origin, seq = found.group(1), int(found.group(2))
        return seq <= self._store.record(origin).low or bool(self._store.results_of(origin, range(seq, seq + 1)))

    def _file(self, key: Key) -> Path:
        return self._place / f"{key[0]}-{key[1]}"

    def _add(self, held: HeldPack) -> None:
        self._held[held.key] = held
        self._by_number[held.number] = held.key
        self._store.versions.add(held.number, self._store.sums_of(held.key))
        known = self._origins.setdefault(held.origin, _Origin())
        known.packs[held.seq] = held
        insort(known.starts, held.seq)

    def _take_out(self, held: HeldPack, sums: Sequence[int]) -> None:
        """It is not in custody any more. :param sums: of its names."""
        del self._held[held.key]
        self._by_number.pop(held.number, None)
        self._store.versions.remove(held.number, sums)
        self._perhaps_sent.discard(held.key)
        self._asked_s.pop(held.key, None)
        known = self._origins[held.origin]
        del known.packs[held.seq]
        del known.starts[bisect_left(known.starts, held.seq)]
        if not known.packs:
            del self._origins[held.origin]

    def _free(self, held: HeldPack) -> None:
        """It is final already: a file that cannot be removed now, which the next start removes, holds up nobody."""
        _unlink(self._file(held.key), held.path)
        lots.release(self._spool, _owner(held))


def _sums(held: Held) -> list[int]:
    """Of the names that an operation touches."""
    return [sum_of(path) for path in (held.operation.path, held.operation.target) if path]


def _end_of(held: Held | HeldPack) -> str:
    """The terminal where it is to arrive."""
    return (held if isinstance(held, HeldPack) else held.operation).terminal.split(",")[-1]


def _waits_for(held: Held | HeldPack, origin: str, seqs: range) -> bool:
    """Tell whether an operation waits for one of these, or for its data to come again: nothing may wait for it then."""
    after = held.after if isinstance(held, HeldPack) else held.operation.after
    is_damaged = isinstance(held, Held) and held.damaged
    return is_damaged or (held.key[0] == origin and any(seq in seqs for seq in after))


def _failed(ended: PackResults) -> set[int]:
    """Numbers of the files that were refused."""
    return {seq for seq, one in ended.results.items() if one.outcome is Outcome.FAILED}


def _unlink(file: Path, path: str) -> None:
    try:
        durable.unlink("custody-pack-free", file)
    except OSError as problem:
        log.error("custody-release-failed", path=path, problem=problem, advice="check the disk of the spool")


def late_results(held: HeldPack, reason: str = LATE) -> list[Result]:
    """Of a pack that has expired."""
    return [Result(Outcome.EXPIRED, reason)] * held.files


def lost(reason: str = DAMAGED) -> Result:
    """Of a file whose only copy was damaged."""
    return Result(Outcome.LOST, reason)


def _owner(pack: messages.Pack | HeldPack) -> tuple[str, str, int]:
    return "pack", pack.origin, pack.seq


def _size_bytes(arrived: Arrived) -> int:
    return packs.DIGEST_BYTES * len(arrived.files) + sum(arrived.pack.sizes_bytes)
