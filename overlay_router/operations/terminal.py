"""The terminal's role: the rules decide about each operation, and the destination publishes.

The way of an operation, top to bottom: :meth:`Terminal.begin` judges ``PUT O``, and stores a row; a file's bytes come
to :mod:`overlay_router.operations.receiving`; :meth:`Terminal.complete` judges again when all of them are here; then
:meth:`_Publisher.attempt` has the destination change the name, under a number of this router's own that the row has
before. After a death the destination tells what became of that number. ``refused`` stores nothing.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import sqlite3
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Callable

from overlay_router.local.destination import Destination
from overlay_router.local.maker import PART_BYTES
from overlay_router.local.replies import Reply
from overlay_router.local.small_files import Arrived
from overlay_router.local.store import StoredLot
from overlay_router.local.tree import no_room
from overlay_router.operations.receiving import Receiving
from overlay_router.operations.side import (
    Answer,
    Bringing,
    Caller,
    Refusal,
    Results,
    SmallFile,
    last_number,
    seen,
    visible,
)
from overlay_router.operations.table import Stored, Table
from stageout.core import durable, log
from stageout.core.errors import ErrorClass
from stageout.overlay.http.operations import BLOCK_BYTES, Status, blocks_of
from stageout.overlay.rules import terminal as rules
from stageout.overlay.rules.limits import Clock, Share, ShareFull, check_share
from stageout.overlay.rules.operations import (
    DIRECT,
    KEPT_S,
    LONGEST_S,
    Differs,
    Fields,
    Hop,
    Identity,
    Kind,
    Row,
    moved,
)
from stageout.overlay.rules.rights import Action
from stageout.overlay.rules.sender import reached
from stageout.overlay.rules.states import ENDS, SETTLED, Role, State
from stageout.overlay.rules.terminal import Known, Seen, Step, Verdict
from stageout.overlay.wire import frames
from stageout.overlay.wire.messages import Lot, Low, NoSpace, Open, Operation, Pack, Packed, Reserved, Result
from stageout.overlay.wire.packs import PackedFile

#: Limit of one subject.
LIMIT = Share(rows=1_000_000, held=65_536, cancels=100_000, size=1 << 62)
#: Name under which the destination knows operations of this table.
PEER = "operations"
#: Wishes of rows whose bytes came in a batch: they are not kept.
IN_BATCH = {"batch": "1"}
_KINDS = {Kind.FILE: "publish", Kind.RENAME: "rename", Kind.DELETE: "delete", Kind.MKDIR: "mkdir"}
_INNER_LIVES_S = 86_400
#: Answers to requests for lots.
_OF_LOTS = {
    ErrorClass.PERMISSION_DENIED.code: 403, ErrorClass.NOT_FOUND.code: 404, ErrorClass.QUOTA_EXCEEDED.code: 429,
    ErrorClass.NO_SPACE_REMOTE.code: 507,
}  # fmt: skip
_FORGOTTEN_AT_ONCE = 1_000
_SETTLED_EVERY = 256
_OPEN = (State.RECEIVING, State.COMPLETE, State.HELD, State.PUBLISHING)


class _Rows(Mapping[int, Row]):
    """Rows of one origin, read when they are asked for."""

    def __init__(self, table: Table, owner: str, origin: str) -> None:
        self._table, self._owner, self._origin = table, owner, origin

    def __getitem__(self, seq: int) -> Row:
        found = self._table.find(Identity(self._owner, self._origin, seq))
        if found is None:
            raise KeyError(seq)
        return found.row

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def __len__(self) -> int:
        return 0


class Terminal:
    """As :class:`overlay_router.operations.side.Side`.

    :param trusts: tells whether an issuer still has this prefix here. :param told: takes, in this thread, what the
        destination has to say to others. :param goes_out: tells whether a plugin delivers what is under a name.
    :param changed: takes the origin whose operations have changed.
    """

    def __init__(
        self,
        table: Table,
        receiving: Receiving,
        destination: Destination,
        trusts: Callable[[tuple[str, str]], bool],
        told: Callable[[list[Reply]], None] = lambda replies: None,
        goes_out: Callable[[str], bool] = lambda path: False,
        changed: Callable[[str], None] = lambda origin: None,
        wall: Callable[[], float] = time.time,
        limit: Share = LIMIT,
    ) -> None:
        self.table, self.receiving, self._trusts, self._goes_out = table, receiving, trusts, goes_out
        self._changed = changed
        self._destination, self._wall, self._limit = destination, wall, limit
        self._awake: list[tuple[str, str]] = []
        self._clock = Clock(max(int(wall()), table.number("clock")), time.monotonic())
        self._publisher = _Publisher(table, receiving, destination, told, self.now)
        self.epoch = self._publisher.begin_epoch()
        self._recover()

    def now(self) -> int:
        """The time of this router, which never goes back, nor jumps."""
        clock = self._clock.at(int(self._wall()), time.monotonic())
        return clock.latest if clock.is_trusted else clock.latest + int(time.monotonic() - clock.monotonic)

    def begin(self, caller: Caller, ask: Bringing) -> Answer:
        """``PUT O``."""
        fields = ask.fields
        identity = Identity(caller.owner, fields.origin, fields.seq)
        stored = self.table.find(identity)
        if stored is None and caller.denied:
            raise Refusal(403, caller.denied)
        self._check_place(fields)
        if stored is not None and stored.row.state is State.PUBLISHING:
            return self._answer(self._published(stored))
        is_whole = fields.kind is not Kind.FILE or (stored is not None and stored.row.state is not State.RECEIVING)
        verdict = self._judged(identity, fields, ask.hop, caller.denied, is_whole)
        if verdict.step is Step.ANSWER and stored is not None:
            return self._answer(stored)
        self._check_verdict(verdict)
        if stored is None:
            if verdict.state is State.EXPIRED:
                raise Refusal(410, "the operation has expired", "expired")
            stored = self._new(caller, ask, identity)
            self._check_share(caller, stored, verdict)
        elif caller.router and caller.router not in stored.row.carriers:
            stored = replace(stored, row=replace(stored.row, carriers=stored.row.carriers | {caller.router}))
        return self._carried_out(stored, verdict)

    def complete(self, stored: Stored) -> Answer:
        """All blocks of a file are here: its name, or what became of it."""
        if stored.row.state is State.RECEIVING:
            stored = replace(stored, row=moved(Role.TERMINAL, stored.row, State.COMPLETE))
        elif stored.row.state is State.PUBLISHING:
            return self._answer(self._published(stored))
        elif stored.row.state is not State.COMPLETE:
            return self._answer(stored)
        verdict = self._judged_again(stored)
        if verdict.step in (Step.REFUSE, Step.ASK_FIRST):
            self._store(stored)
        self._check_verdict(verdict)
        return self._carried_out(stored, verdict)

    def state(self, stored: Stored) -> Status:
        """``GET O``."""
        row, known = stored.row, self._known(stored.row.identity, stored.row.fields)
        is_refused = row.state is State.COMPLETE and row.reason
        state = State.REFUSED if is_refused else row.state
        is_open = row.state in _OPEN
        missing = [seq for seq in row.fields.after if is_open and not rules.has_ended(known, seq)]
        have = self.receiving.have(stored) if is_open and row.fields.kind is Kind.FILE else ()
        return Status(
            state.value, row.reason, row.etag, have, self.epoch, tuple(missing), tuple(sorted(row.carriers))
        )  # fmt: skip

    def cancel(self, caller: Caller, fields: Fields, jws: str) -> Answer:
        """``DELETE O``."""
        stored = seen(self.table, caller, fields.origin, fields.seq, Action.CANCEL)
        if stored is not None and stored.jws and not jws:
            raise Refusal(403, "a signed operation is cancelled with a signature")
        if stored is not None and stored.row.fields != fields:
            raise Refusal(409, "the operation has other fields here", "operation-differs")
        if stored is not None and stored.row.state is State.PUBLISHING:
            stored = self._published(stored)
        identity = stored.row.identity if stored else Identity(caller.owner, fields.origin, fields.seq)
        verdict = rules.cancel(fields, self._known(identity, fields), self.now())
        if verdict.step is Step.ANSWER and stored is not None:
            return Answer(200 if stored.row.state is State.CANCELLED else 409, self.state(stored))
        self._check_verdict(verdict)
        if stored is None:
            stored = self._new(caller, Bringing(fields, jws), identity)
            self._check(caller.share, Share(rows=1, cancels=1))
        stored = self._ended(stored, verdict.state, verdict.reason)
        return Answer(200 if stored.row.state is State.CANCELLED else 409, self.state(stored))

    def low(self, caller: Caller, origin: str, below: int, jws: str) -> None:
        """Forget results."""
        before = self.table.low(caller.owner, origin)
        if below <= before:
            return
        mine = [one for one in self.table.between(origin, before, below - 1) if one.row.identity.owner == caller.owner]
        if any(one.row.state not in ENDS for one in mine):
            raise Refusal(409, "an operation below that number has not ended")
        now = self.now()
        self._check(caller.share, Share(rows=0 if mine else 1))
        with self.table.changing("operation-low"):
            self.table.raise_low(caller.owner, origin, below, now + LONGEST_S + KEPT_S)
            for one in mine:
                if rules.may_forget(one.row, below, now):
                    self.table.drop(one)
        self._wake(caller.owner, origin)

    def results(self, caller: Caller, origin: str, first: int, last: int, until: str) -> Results:
        """States of an origin's operations."""
        last = last_number(self.table, caller, origin, first, last)
        rows = visible(self.table, caller, origin, first, last)
        states = {seq: one.row.state for seq, one in rows.items()}
        is_reached, unknown = reached(states, first, last, until)
        has_ended = not unknown and all(state in ENDS for state in states.values())
        return Results(is_reached and bool(rows), has_ended, {seq: self.state(one) for seq, one in rows.items()})

    def lot(self, caller: Caller, ask: Lot) -> Reserved:
        """Reserve, renew or release space of a subject's share."""
        answer = self._destination.lot(ask, caller.share)
        if answer.code:
            raise Refusal(_OF_LOTS.get(answer.code, 503), answer.message, again_s=max(0, answer.retry_after_s))
        return answer

    def lot_of(self, caller: Caller, number: str) -> StoredLot:
        """Return a lot of a subject's."""
        found = next((one for one in self._destination.lots.of(caller.share) if one.lot == number), None)
        if found is None:
            raise Refusal(404, "you have no such lot")
        return found

    def batch(self, caller: Caller, files: Sequence[SmallFile], jws: str) -> list[Status]:
        """Small files: one record before, and one behind the names of all of them."""
        self._check(caller.share, Share(rows=len(files)))
        states: dict[int, Status] = {}
        todo: list[tuple[Stored, SmallFile]] = []
        for file in files:
            fields = file.fields
            found = self._judged_of_batch(caller, file, jws)
            if isinstance(found, Status):
                states[fields.seq] = found
            else:
                todo.append((found, file))
        for stored, result in self._publisher.pack(todo) if todo else ():
            states[stored.row.identity.seq] = self._packed(stored, result)
        self._changed(files[0].fields.origin)
        self._wake(caller.owner, files[0].fields.origin)
        return [states[file.fields.seq] for file in files]

    def _judged_of_batch(self, caller: Caller, file: SmallFile, jws: str) -> Status | Stored:
        """Return the state of a file that is not carried out now, or the row of one that is."""
        fields = file.fields
        identity = Identity(caller.owner, fields.origin, fields.seq)
        stored = self.table.find(identity)
        try:
            if stored is None and file.denied:
                raise Refusal(403, file.denied)
            self._check_place(fields)
            if stored is not None and stored.row.state is State.PUBLISHING:
                return self.state(self._published(stored))
            verdict = self._judged(identity, fields, DIRECT, file.denied, is_whole=True)
            if verdict.step is Step.ANSWER and stored is not None:
                return self.state(stored)
            self._check_verdict(verdict)
        except Refusal as why:
            return Status(State.REFUSED.value, why.word or why.reason)
        if stored is None:
            stored = self._new(caller, Bringing(fields, jws, wishes=IN_BATCH), identity)
        if verdict.step is Step.RECORD:
            return self.state(self._ended(stored, verdict.state, verdict.reason))
        return stored if not stored.id else Status(State.REFUSED.value, "another request brings it")

    def _packed(self, stored: Stored, result: Result) -> Status:
        """Return the state of a file of a batch, whose row is as it has to be now."""
        if result.outcome == "done":
            return self.state(stored)
        if result.reason == "precondition":
            return self.state(self._ended(stored, State.FAILED, "precondition"))
        if result.outcome == "failed":
            with self.table.changing("operation-row"):
                self.table.drop(stored)
        return Status(State.REFUSED.value, result.reason.replace("conflict: ", "") or result.outcome)

    def expire(self) -> None:
        """Once a minute."""
        self._clock = self._clock.at(int(self._wall()), time.monotonic())
        if not self._clock.is_trusted:
            log.error("operations-clock-jumped", advice="set the clock, or start the router again if it is right")
            return
        now = self.now()
        self.receiving.expire_leases()
        for stored in self.table.in_state(*_OPEN):
            if stored.row.fields.expires < now:
                self._guarded(stored, self._considered)
        self._forget(now)
        if now - self.table.number("clock") >= KEPT_S:
            with self.table.changing("operation-forget"):
                self.table.put_number("clock", self._clock.latest)

    def _forget(self, now: int) -> None:
        ready = [
            one
            for one in self.table.forgettable(now - KEPT_S, now - LONGEST_S - KEPT_S, _FORGOTTEN_AT_ONCE)
            if rules.may_forget(one.row, self.table.low(one.row.identity.owner, one.row.identity.origin), now)
        ]
        with self.table.changing("operation-forget"):
            self.table.drop_origins(now)
            for one in ready:
                self.table.drop(one)

    def _recover(self) -> None:
        """After a start: what was being published, or was whole, goes on; bytes that nobody knows go."""
        known = self.table.in_state(*_OPEN)
        self.receiving.discard_strays(one.row.identity for one in known if one.row.fields.kind is Kind.FILE)
        self._destination.lots.keep_taken(self._has_used)
        for stored in known:
            if stored.row.state in (State.PUBLISHING, State.COMPLETE):
                self._guarded(stored, self._considered)
        for owner, origin in {one.row.identity[:2] for one in known}:
            self._wake(owner, origin)

    def _considered(self, stored: Stored) -> None:
        """Carry out what can be done with a row now; nobody waits for the answer."""
        if stored.row.state is State.PUBLISHING:
            self._published(stored)
            return
        verdict = self._judged_again(stored)
        if verdict.step in (Step.EXECUTE, Step.RECORD):
            self._carried_out(stored, verdict)
        elif verdict.step is Step.REFUSE and stored.row.state is State.HELD:
            self._store(replace(stored, row=moved(Role.TERMINAL, stored.row, State.COMPLETE, reason=verdict.reason)))
            self._changed(stored.row.identity.origin)

    def _guarded(self, stored: Stored, work: Callable[[Stored], None]) -> None:
        """One operation's fault is its own."""
        try:
            work(stored)
        except Refusal as why:
            log.event(
                "held-operation-refused", origin=stored.row.identity.origin, seq=stored.row.identity.seq, reason=why
            )
        except (OSError, sqlite3.Error):
            raise
        except Exception as problem:
            log.error("operation-failed", origin=stored.row.identity.origin, seq=stored.row.identity.seq,
                      problem=repr(problem), trace=traceback.format_exc()[-2000:])  # fmt: skip
            self._ended(stored, State.FAILED, "internal")

    def _judged(self, identity: Identity, fields: Fields, hop: Hop, denied: str, is_whole: bool) -> Verdict:
        known, operation = self._known(identity, fields, hop.custodian), _operation(fields)
        older = rules.is_older(fields, self.epoch)
        here = self._destination.etag(fields.path) if fields.precondition else ""
        holds = not fields.precondition or (
            not here if fields.precondition == "absent" else here == fields.precondition
        )
        try:
            return rules.judge(
                identity, fields, hop, known,
                Seen(
                    is_whole, denied or self._destination.refusal(operation), holds,
                    older and self._destination.is_foreign(fields.path),
                ),
                self.now(),
            )  # fmt: skip
        except Differs:
            raise Refusal(409, "the operation has other fields here", "operation-differs") from None

    def _judged_again(self, stored: Stored) -> Verdict:
        """Judge a row without its sender: its authority has to be what it was."""
        denied = "" if self._trusts(stored.authority) else "the key or the issuer of the token was removed"
        row = stored.row
        return self._judged(row.identity, row.fields, row.hop, denied, row.state is not State.RECEIVING)

    def _known(self, identity: Identity, fields: Fields, custodian: str = "") -> Known:
        owner, origin, _ = identity
        marks = tuple(one.row for one in self.table.changed_later(identity, fields, custodian))
        return Known(_Rows(self.table, owner, origin), self.table.low(owner, origin), marks, self.epoch)

    def _check_verdict(self, verdict: Verdict) -> None:
        """:raises Refusal: nothing is stored."""
        if verdict.step is Step.SETTLED:
            raise Refusal(410, "results below this number were settled", "settled")
        if verdict.step is Step.ASK_FIRST:
            raise Refusal(409, f"look at the names first: this is epoch {self.epoch}", "ask-first")
        if verdict.step is Step.REFUSE:
            raise _refusal(verdict.reason)

    def _carried_out(self, stored: Stored, verdict: Verdict) -> Answer:
        """Do what was decided, durably, and answer."""
        row = stored.row
        if verdict.step is Step.RECORD:
            return self._answer(self._ended(stored, verdict.state, verdict.reason))
        if verdict.step is Step.EXECUTE:
            if row.state is not State.COMPLETE:
                row = replace(row, state=State.COMPLETE) if not stored.id else moved(Role.TERMINAL, row, State.COMPLETE)
            return self._answer(self._published(self._publisher.intended(replace(stored, row=row))))
        if row.state is State.RECEIVING and row.fields.kind is Kind.FILE:
            if not stored.id and stored.wishes.get("lot"):
                return Answer(201, self.state(self._in_lot(stored, stored.wishes["lot"])))
            if not stored.id:
                self._reserve(stored)
            return Answer(201, self.state(self._store(stored)))
        if row.state is not State.HELD:
            row = replace(row, state=State.HELD)
        return Answer(202, self.state(self._store(replace(stored, row=row))))

    def _published(self, stored: Stored) -> Stored:
        """Have a row published; it has its end then. :raises Refusal: it has none, and may be brought again."""
        result = self._publisher.attempt(stored)
        if result.outcome == "done":
            if stored.row.fields.kind is Kind.FILE:
                self.receiving.end(stored)  # before the entity tag, which changes with the number of links
            etag = self._destination.etag(stored.row.fields.second or stored.row.fields.path)
            return self._ended(stored, State.DONE, "", etag)
        if result.reason == "precondition":
            return self._ended(stored, State.FAILED, "precondition")
        back = moved(Role.TERMINAL, stored.row, State.COMPLETE, reason=result.reason)
        self._store(replace(stored, row=back, inner=0))
        raise _refusal(result.reason)

    def _ended(self, stored: Stored, state: State, reason: str, etag: str = "") -> Stored:
        changes = {"state": state, "reason": reason, "etag": etag, "ended": self.now()}
        stored = replace(stored, row=replace(stored.row, **changes), inner=0)  # type: ignore[arg-type]
        with self.table.changing("operation-end"):
            stored = self.table.put(stored)
            self.table.drop_blocks(stored.id)
        if stored.row.fields.kind is Kind.FILE:
            self.receiving.end(stored)
            if stored.wishes.get("lot"):
                self._destination.lots.settle(-stored.id, state is State.DONE)
        self._changed(stored.row.identity.origin)
        self._wake(*stored.row.identity[:2])
        return stored

    def _wake(self, owner: str, origin: str) -> None:
        """Go on with rows that waited for others of their origin, one after the other."""
        self._awake.append((owner, origin))
        if len(self._awake) > 1:
            return  # who goes on now looks again
        while self._awake:
            for one in self.table.held_of(*self._awake[0]):
                now = self.table.get(one.id)  # an earlier one may have ended it
                if now is not None and now.row.state is State.HELD:
                    self._guarded(now, self._considered)
            first = self._awake[0]
            self._awake = [other for other in self._awake[1:] if other != first] + (
                [first] if first in self._awake[1:] else []
            )

    def _store(self, stored: Stored) -> Stored:
        with self.table.changing("operation-row"):
            return self.table.put(stored)

    def _new(self, caller: Caller, ask: Bringing, identity: Identity) -> Stored:
        carriers = frozenset({caller.router} if caller.router else ())
        row = Row(identity, ask.fields, hop=ask.hop, issuer=caller.issuer, carriers=carriers)
        return Stored(
            row, 0, caller.share, ask.fields.size, ask.jws, authority=caller.authority, wishes=dict(ask.wishes)
        )  # fmt: skip

    def _reserve(self, stored: Stored) -> None:
        try:
            self.receiving.reserve(stored.row.identity, stored.size)
        except OSError as problem:
            if no_room(problem):
                raise Refusal(507, "the router's disk is full", "no-space", 60) from problem
            if problem.errno == errno.EFBIG:
                raise Refusal(413, "the router's disk has no files of that size") from problem
            raise

    def _in_lot(self, stored: Stored, lot: str) -> Stored:
        """Store a file whose space comes out of a lot, which gives it under the number of the row."""
        stored, lots = self._store(stored), self._destination.lots
        fields = stored.row.fields
        ask = Open(fields.origin, fields.seq, fields.path, stored.size or 0, BLOCK_BYTES, fields.expires, lot=lot)
        try:
            if not lots.take(ask, -stored.id, stored.share):
                raise Refusal(413, "the lot is not yours, has ended, is for other names, or has too little left", "lot")
            try:
                self._reserve(stored)
            except BaseException:
                lots.give_back(-stored.id)
                raise
        except BaseException:
            with self.table.changing("operation-row"):
                self.table.drop(stored)
            raise
        return stored

    def _has_used(self, tid: int) -> bool | None:
        stored = self.table.get(-tid)
        return None if stored and stored.row.state in _OPEN else bool(stored and stored.row.state is State.DONE)

    def _check_share(self, caller: Caller, stored: Stored, verdict: Verdict) -> None:
        held = int(verdict.step is Step.HOLD and stored.row.fields.kind is not Kind.FILE)
        self._check(caller.share, Share(rows=1, held=held, size=stored.size or 0))

    def _check(self, share: str, wanted: Share) -> None:
        try:
            check_share(self.table.share(share), self._limit, wanted)
        except ShareFull as problem:
            raise Refusal(429, str(problem), "share-full", 60) from None

    def _check_place(self, fields: Fields) -> None:
        if any(map(self._goes_out, fields.names)):
            raise Refusal(501, "a plugin delivers what is below this name")

    def _answer(self, stored: Stored) -> Answer:
        state = stored.row.state
        if state in SETTLED - {State.CANCELLED} or state is State.FAILED:
            status = 200
        elif state in ENDS:
            status = 410
        else:
            status = 202 if state is State.HELD else 201
        return Answer(status, self.state(stored))


class _Publisher:
    """The destination as the publisher of this table, which knows operations by numbers of its own."""

    def __init__(
        self,
        table: Table,
        receiving: Receiving,
        destination: Destination,
        told: Callable[[list[Reply]], None],
        now: Callable[[], int],
    ) -> None:
        self._table, self._receiving, self._destination, self._told = table, receiving, destination, told
        self._now, self._high_water = now, destination.own_place / "high-water"
        self._ends = 0

    def begin_epoch(self) -> int:
        """Return the epoch of this start: a new one where the table is an old copy (design, 6.4)."""
        number, epoch = self._table.number("changes"), self._table.number("epoch")
        try:
            told = durable.read_file(self._high_water)
        except FileNotFoundError:
            told = b""
        known_epoch, highest = int.from_bytes(told[:8], "big"), int.from_bytes(told[8:16], "big")
        if rules.needs_new_epoch(number, highest) or epoch < known_epoch:
            epoch = rules.new_epoch(self._now(), max(epoch, known_epoch))
            self._end_attempts()
            with self._table.changing("operation-row"):
                self._table.put_number("epoch", epoch)
                self._table.put_number("changes", highest)
                self._table.put_number("name", secrets.randbits(62))
            # An old copy that is put back once more must not begin this epoch again.
            self._mark(highest)
            log.warn("operations-epoch-started", epoch=epoch, changes=number, highest=highest)
        elif not self._table.number("name"):
            with self._table.changing("operation-row"):
                self._table.put_number("name", secrets.randbits(62))
        return epoch

    def pack(self, files: Sequence[tuple[Stored, SmallFile]]) -> Iterator[tuple[Stored, Result]]:
        """Have new small files published together. :raises Refusal: nothing is known of any of them."""
        number, inner = self._table.number("changes") + len(files), self._table.number("inner") + 1
        with self._table.changing("operation-intent"):
            self._table.put_number("changes", number)
            self._table.put_number("inner", inner + len(files) - 1)
            rows = [
                self._table.put(replace(one, row=replace(one.row, state=State.PUBLISHING), inner=inner + at))
                for at, (one, _) in enumerate(files)
            ]
        self._mark(number)
        name, digest = next(iter(frames.digests().items()))
        packed = [
            PackedFile(row.inner, row.row.fields.path, row.row.fields.mode & 0o777, digest(file.data), file.data)
            for row, (_, file) in zip(rows, files)
        ]
        arrived = [Arrived(_pack(self._origin, some, self._now()), some, digest, PEER, name) for some in _parts(packed)]
        try:
            replies = self._destination.pack(arrived)
        except (OSError, sqlite3.Error) as problem:
            raise _of_disk(problem) from problem
        self._told([one for one in replies if one.to != PEER])
        ends: dict[int, Result] = {}
        is_full = any(reply.to == PEER and isinstance(reply.message, NoSpace) for reply in replies)
        for reply in replies:
            message = reply.message
            if reply.to == PEER and isinstance(message, Packed):
                reasons = dict(zip(message.failed, message.reasons))
                outcomes = dict(zip(message.failed, message.outcomes))
                for at in range(len(message.generations)):
                    seq = message.seq + at
                    ends[seq] = Result(self._origin, seq, outcomes.get(at, "done"), reasons.get(at, ""))
        with self._table.changing("operation-end"):
            rows = [self._noted(row, ends.get(row.inner)) for row in rows]
        self._settle(len(rows))
        for row, number in zip(rows, range(inner, inner + len(rows))):
            yield row, ends.get(number) or Result(self._origin, number, "pending", "space" if is_full else "unrecorded")

    def _noted(self, row: Stored, result: Result | None) -> Stored:
        """Store the end of a file of a batch that has its name. Others stay: who asks again finds out."""
        if result is None or result.outcome != "done":
            return row
        return self._table.put(replace(row, row=replace(row.row, state=State.DONE, ended=self._now()), inner=0))

    def intended(self, stored: Stored) -> Stored:
        """Store that a row is being published, with a number that no attempt had before."""
        number, inner = self._table.number("changes") + 1, self._table.number("inner") + 1
        row = moved(Role.TERMINAL, stored.row, State.PUBLISHING, reason="")
        with self._table.changing("operation-intent"):
            self._table.put_number("changes", number)
            self._table.put_number("inner", inner)
            stored = self._table.put(replace(stored, row=row, inner=inner))
        self._mark(number)
        return stored

    def attempt(self, stored: Stored) -> Result:
        """Have an operation executed, or learn what became of it. :raises Refusal: it is not known yet."""
        known = self._destination.results_of(self._origin, [stored.inner]).get(stored.inner)
        if known is not None:
            return Result(self._origin, stored.inner, known.outcome.value, known.reason)
        fields = stored.row.fields
        if stored.wishes == IN_BATCH:  # nothing has happened, and its bytes are not here
            with self._table.changing("operation-row"):
                self._table.drop(stored)
            raise Refusal(503, "send the batch again", again_s=1)
        operation = replace(
            _operation(fields), origin=self._origin, seq=stored.inner, expires=self._now() + _INNER_LIVES_S
        )
        try:
            if fields.kind is Kind.FILE:
                operation = self._with_data(stored, operation)
            replies = self._destination.operate(operation, PEER)
        except (OSError, sqlite3.Error) as problem:
            raise _of_disk(problem) from problem
        mine = [one.message for one in replies if one.to == PEER and isinstance(one.message, Result)]
        self._told([one for one in replies if one.to != PEER])
        found = next((one for one in mine if one.seq == stored.inner), None)
        if found is None:
            raise Refusal(503, "the router cannot publish it now", again_s=5)
        self._settle()
        return found

    @property
    def _origin(self) -> str:
        named = f"{self._destination.epoch} {self._table.number('name')}"
        return hashlib.sha256(named.encode()).hexdigest()[:32]

    def _with_data(self, stored: Stored, operation: Operation) -> Operation:
        """Give the destination a file's data."""
        staging, fields = self._receiving.staging(stored), stored.row.fields
        size, width = stored.size or 0, staging.digest_bytes
        count = blocks_of(size)
        os.ftruncate(staging.file, size)
        if fields.mtime:
            os.utime(staging.file, (fields.mtime, fields.mtime))
        os.fsync(staging.file)
        digests = bytes(staging.digests[: count * width])
        ask = Open(operation.origin, operation.seq, fields.path, size, BLOCK_BYTES, operation.expires)
        kind = "xxh3-128" if fields.block_kind == "xxh3" else ""
        blocks = ((at, digests[at * width : (at + 1) * width]) for at in range(count))
        tid = self._destination.adopt(ask, PEER, kind, self._receiving.path(stored.row.identity), blocks)
        manifest = hashlib.sha256(digests).hexdigest()
        return replace(operation, tid=tid, size_bytes=size, blocks=count, manifest=manifest)

    def _mark(self, number: int) -> None:
        with durable.step("operation-high-water"):
            file = os.open(self._high_water, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                epoch = self._table.number("epoch")
                os.pwrite(file, epoch.to_bytes(8, "big") + number.to_bytes(8, "big"), 0)
                os.fdatasync(file)
            finally:
                os.close(file)

    def _settle(self, ends: int = 1) -> None:
        """The destination forgets results that the table has, now and then."""
        self._ends += ends
        if self._ends >= _SETTLED_EVERY:
            self._ends = 0
            under_way = [one.inner for one in self._table.in_state(State.PUBLISHING)]
            self._destination.low(Low(self._origin, min(under_way, default=self._table.number("inner") + 1) - 1))

    def _end_attempts(self) -> None:
        """Settle attempts before an epoch begins: what was published is done, and the rest is judged again."""
        for stored in self._table.in_state(State.PUBLISHING):
            known = self._destination.results_of(self._origin, [stored.inner]).get(stored.inner)
            is_done = known is not None and known.outcome.value == "done"
            state = State.DONE if is_done else State.COMPLETE
            row = moved(Role.TERMINAL, stored.row, state, ended=self._now() if is_done else 0)
            with self._table.changing("operation-end"):
                self._table.put(replace(stored, row=row, inner=0))


def _parts(files: Sequence[PackedFile]) -> Iterator[list[PackedFile]]:
    """Return files in parts that the makers of small files take."""
    part: list[PackedFile] = []
    size = 0
    for file in files:
        if part and size + len(file.data) > PART_BYTES:
            yield part
            part, size = [], 0
        part.append(file)
        size += len(file.data)
    yield part


def _pack(origin: str, files: Sequence[PackedFile], now: int) -> Pack:
    paths, modes = tuple(one.path for one in files), tuple(one.mode for one in files)
    sizes = tuple(len(one.data) for one in files)
    return Pack(origin, files[0].seq, now + _INNER_LIVES_S, paths, sizes, modes, "")


def _operation(fields: Fields) -> Operation:
    """Return an operation as the destination knows it."""
    return Operation(
        fields.origin, fields.seq, _KINDS[fields.kind], fields.path, fields.expires, target=fields.second,
        parents=fields.kind is Kind.FILE, mode=fields.mode,
        may_exist=fields.kind is Kind.MKDIR,  # else its precondition says so
    )  # fmt: skip


def _refusal(reason: str) -> Refusal:
    """Return the answer for what cannot be done now."""
    if reason.startswith("conflict: "):
        return Refusal(409, reason.partition(" ")[2], "conflict")
    if reason in (os.strerror(errno.EACCES), os.strerror(errno.EPERM)) or reason.startswith(("no right", "the key")):
        return Refusal(403, reason)
    return Refusal(409, reason, "conflict") if reason else Refusal(503, "it cannot be done now", again_s=5)


def _of_disk(problem: Exception) -> Refusal:
    if no_room(problem):
        return Refusal(507, "the router's disk is full", "no-space", 60)
    log.error("operation-not-published", problem=repr(problem))
    return Refusal(503, "the router's disk does not work now", again_s=30)


Trusts = Callable[[tuple[str, str]], bool]
Told = Callable[[list[Reply]], None]
GoesOut = Callable[[str], bool]
Changed = Callable[[str], None]
MakesTerminal = Callable[[Trusts, Told, GoesOut, Changed], Terminal]


def terminal_at(table: Table, destination: Destination) -> MakesTerminal:
    """Return what makes the role of a table and a destination."""
    receiving = Receiving(table, destination.own_place / "operations")
    return partial(Terminal, table, receiving, destination)
