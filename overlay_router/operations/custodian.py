"""A custodian: takes operations for other routers, keeps them until these have them, and tells what became of them.

The desk asks it as any side (:mod:`overlay_router.operations.side`). ``complete`` takes custody, in the durable steps
of ``rules.custody.CUSTODY_STEPS``: the data are on the disk, then the file beside them, then the row, then comes the
answer. From then on :mod:`overlay_router.operations.delivery` asks what there is to do, and tells what came of it. All
calls come in one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from overlay_router.operations.custody_table import CustodyTable, Listed
from overlay_router.operations.delivery import Work
from overlay_router.operations.queue import Waiting
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
from overlay_router.operations.spool import UNSIGNED, CustodySpool, Digests, Kept
from overlay_router.operations.table import Stored, Table
from stageout.core import log
from stageout.core.errors import StageoutError
from stageout.overlay.http.operations import UNKNOWN, Status, blocks_of
from stageout.overlay.rules import custody, limits
from stageout.overlay.rules.limits import Share, ShareFull
from stageout.overlay.rules.operations import (
    KEPT_S,
    Differs,
    Fields,
    Hop,
    Identity,
    Kind,
    Malformed,
    Row,
    differs,
    moved,
)
from stageout.overlay.rules.rights import Action, NoRight, check_custody
from stageout.overlay.rules.states import DUTY, ENDS, SETTLED, Role, State
from stageout.overlay.rules.terminal import new_epoch
from stageout.overlay.rules.via import check_hops, joined

#: Most things of one subject. Its bytes are a part of the spool.
SHARE = Share(rows=50_000, held=50_000, cancels=10_000, size=0)
SHARE_OF_SPOOL = 0.5
#: An unsigned operation stays at most so long, since its token ends much earlier (seconds).
UNSIGNED_S = 86_400
_AGAIN_S = 60
#: Names of routers behind this one, in the wishes of a row.
_VIA = "via"
_TIDIED = 10_000


class Far(NamedTuple):
    """How an attempt reaches the next router. :param token: of this router, for it. :param plain: without TLS."""

    address: str
    ca: str
    token: str
    plain: bool = False


class Custodian:
    """The custody of one router.

    :param lists: routers and subjects. :param name: NAME of this router. :param far: how to reach a router of the list.
    :param now: Unix time. :param changed: takes the origin whose operations have changed. :param wake: takes operations
        that the queue has to look at.
    """

    def __init__(
        self,
        table: Table,
        receiving: Receiving,
        spool: CustodySpool,
        lists: CustodyTable,
        name: str,
        far: Callable[[Listed], Far],
        now: Callable[[], int],
        changed: Callable[[str], None] = lambda origin: None,
        wake: Callable[[Identity], None] = lambda identity: None,
        share: Share = SHARE,
    ) -> None:
        self.table, self.receiving, self._lists = table, receiving, lists
        self._changed, self._wake = changed, wake
        self._spool, self._name, self._far, self._now, self._share = spool, name, far, now, share
        self._delivering: set[Identity] = set()
        self._told: dict[Identity, Status] = {}
        self._order = 0
        self.epoch = 0
        self._recover()

    def become(self, lists: CustodyTable) -> None:
        """Take other routers and subjects from now on."""
        self._lists = lists

    def far(self, name: str) -> Far:
        """Return how to reach a router of the list. :raises StageoutError: it is not there any more."""
        listed = self._lists.routers.get(name)
        if listed is None:
            raise StageoutError(f"{name} is not in STAGEOUT_ROUTER_CUSTODY any more: add its line again")
        return self._far(listed)

    def behind(self, via: Sequence[str]) -> Behind:
        """Return the side for requests behind these NAMEs."""
        return Behind(self, tuple(via))

    def address_of(self, name: str) -> str:
        """Return the address of a router of the list, "" of one that is not there any more."""
        listed = self._lists.routers.get(name)
        return listed.address if listed else ""

    # -- what comes

    def begin(self, caller: Caller, ask: Bringing, via: tuple[str, ...]) -> Answer:
        """``PUT O``: nothing is stored before rights. :raises Refusal: the operation is not taken."""
        fields = ask.fields
        identity = Identity(caller.owner, fields.origin, fields.seq)
        stored = self.table.find(identity)
        carriers = frozenset({caller.router} - {""})
        if stored is not None:
            _check_same(stored, fields)
            if not carriers <= stored.row.carriers:  # it has the owner's signature
                carriers |= stored.row.carriers
                stored = self._store(replace(stored, row=replace(stored.row, carriers=carriers)), "kept-row")
            return self._answer(stored)
        self._check(caller, fields, bool(ask.jws), via)
        row = Row(identity, fields, issuer=caller.issuer, custody=ask.release == "custody", carriers=carriers)
        stored = self._new(caller, ask, row, via)
        self._check_share(caller.share, Share(rows=1, size=fields.size or 0))
        if fields.kind is not Kind.FILE:
            return self._take(stored, None)
        try:
            self.receiving.reserve(identity, fields.size)
        except OSError as problem:
            raise Refusal(507, f"the spool of this router: {problem.strerror}", again_s=_AGAIN_S) from None
        with self.table.changing("kept-row"):
            stored = self.table.put(stored)
        return Answer(201, self.state(stored))

    def _new(self, caller: Caller, ask: Bringing, row: Row, via: tuple[str, ...]) -> Stored:
        wishes = {**ask.wishes, _VIA: "/".join(via)}
        return Stored(row, 0, caller.share, row.fields.size, ask.jws, ask.token, caller.authority, wishes=wishes)

    def _check(self, caller: Caller, fields: Fields, signed: bool, via: tuple[str, ...]) -> None:
        """:raises Refusal: the operation is not for this router, or its subject has no right here."""
        try:
            check_hops(via, self._name, self._lists.routers)
            if fields.terminal.lower() != via[-1]:
                raise Malformed(f"the operation is for {fields.terminal}")
            check_custody(self._lists.entry(caller.authority[0], caller.share, via[0]), fields, signed)
        except Malformed as problem:
            raise Refusal(400, str(problem)) from None
        except NoRight as problem:
            raise Refusal(403, str(problem)) from None
        if self._now() > fields.expires:
            raise Refusal(410, "the operation has expired", "expired")
        if not signed and fields.expires > self._now() + UNSIGNED_S:
            raise Refusal(403, f"an operation without a signature stays at most {UNSIGNED_S} s: let it expire earlier")

    def complete(self, stored: Stored) -> Answer:
        """All blocks are durable and equal the list: take custody."""
        if stored.row.state not in (State.RECEIVING, State.LOST):
            return self._answer(stored)
        staging = self.receiving.staging(stored)
        if staging.due is None:
            return self._answer(stored)
        size, signed, signature = staging.due
        if stored.row.fields.size is None:
            self._check_share(stored.share, Share(size=size))
        blocks = bytes(staging.digests[: blocks_of(size) * staging.digest_bytes])
        return self._take(replace(stored, size=size), Digests(size, signed, signature, blocks))

    def _take(self, stored: Stored, digests: Digests | None) -> Answer:
        """Take custody: the file, then the row. Its answer follows."""
        self._order += 1
        row = replace(stored.row, hop=Hop("", self.epoch, self._order, self._now()), ended=0)
        stored = replace(stored, row=row)
        self._spool.write(_kept(stored), digests)
        with self.table.changing("kept-take"):
            stored = self.table.put(replace(stored, row=moved(Role.CUSTODIAN, row, State.CUSTODY)))
            if digests is not None:
                self.table.put_list(stored.id, digests.size, digests.signed, digests.signature)
        self._changed(row.identity.origin)
        self.receiving.let_go(stored)
        self._wake(row.identity)
        return Answer(200 if digests else 202, self.state(stored))

    def cancel(self, caller: Caller, fields: Fields, jws: str, via: tuple[str, ...]) -> Answer:
        """``DELETE O``: the terminal decides, also about an operation that never came here."""
        stored = seen(self.table, caller, fields.origin, fields.seq, Action.CANCEL)
        if stored is None:
            self._check(caller, fields, bool(jws), via)
            self._check_share(caller.share, Share(rows=1, cancels=1))
            row = Row(Identity(caller.owner, fields.origin, fields.seq), fields, issuer=caller.issuer)
            stored = self._new(caller, Bringing(fields), row, via)
            kept, digests = _kept(stored), None
        else:
            if stored.jws and not jws:
                raise Refusal(403, "a signed operation is cancelled with a signature")
            _check_same(stored, fields)
            if stored.row.state in ENDS:
                self._drop_if_may(stored, by_owner=True)
                return Answer(200 if stored.row.state is State.CANCELLED else 409, self.state(stored))
            if stored.row.state is State.CANCELLING:
                return Answer(202, self.state(stored))
            self._check_share(stored.share, Share(cancels=1))
            kept, digests = self._read(stored)
        self._spool.write(replace(kept, cancel=jws or UNSIGNED), digests)
        stored = self._store(replace(stored, row=custody.cancel(stored.row)), "kept-cancel")
        self._wake(stored.row.identity)
        return Answer(202, self.state(stored))

    def low(self, caller: Caller, origin: str, below: int) -> None:
        """Forget results below a number. :raises Refusal: 409: some of it has not ended."""
        mine = [one for one in self.table.between(origin, 1, below - 1) if one.row.identity.owner == caller.owner]
        if any(one.row.state not in ENDS for one in mine):
            raise Refusal(409, "an operation below that number has not ended")
        for stored in mine:
            self._drop_if_may(stored, by_owner=True)
        with self.table.changing("kept-forget"):
            for stored in mine:
                self._told.pop(stored.row.identity, None)
                self.table.drop(stored)

    # -- what is asked

    def state(self, stored: Stored) -> Status:
        """``GET O``."""
        row, identity = stored.row, stored.row.identity
        state, told = row.state, self._told.get(identity, UNKNOWN)
        if identity in self._delivering and state in (State.CUSTODY, State.REFUSED):
            state = State.DELIVERING
        have = self.receiving.have(stored) if state in (State.RECEIVING, State.LOST) else ()
        keeps = (self._name,) if row.hop.order and state not in ENDS else ()
        return Status(state.value, row.reason, row.etag, have, told.epoch, told.missing, (*keeps, *told.custodians))

    def _answer(self, stored: Stored) -> Answer:
        if stored.row.state is State.RECEIVING:
            return Answer(201, self.state(stored))
        return Answer(202 if stored.row.fields.kind is not Kind.FILE and not _has_ended(stored) else 200,
                      self.state(stored))  # fmt: skip

    def results(self, caller: Caller, origin: str, first: int, last: int, until: str) -> Results:
        """``GET /.stageout/v1/o/ORIGIN``: a number that never came counts as unknown, not as reached."""
        last = last_number(self.table, caller, origin, first, last)
        found = visible(self.table, caller, origin, first, last)
        wanted = SETTLED | (DUTY if until == "custody" else frozenset())
        states = {seq: self.state(found[seq]) if seq in found else UNKNOWN for seq in range(first, last + 1)}
        reached = len(found) == len(states) > 0 and all(
            one.row.state in wanted and (one.row.custody or one.row.state in SETTLED) for one in found.values()
        )
        ended = all(_has_ended(one) for one in found.values()) or reached
        return Results(reached, ended, states)

    def newest(self, caller: Caller, terminal: str, path: str) -> Stored | None:
        """Return the newest complete version of a name in custody, of its owner only."""
        found = [
            one for one in self.table.in_state(State.CUSTODY, State.REFUSED, State.CANCELLING)
            if one.row.identity.owner in (*caller.owners, caller.owner) and one.row.fields.path == path
            and one.row.fields.terminal.lower() == terminal and one.row.fields.kind is Kind.FILE and one.row.hop.order
        ]  # fmt: skip
        return max(found, key=lambda one: one.row.hop[1:3], default=None)

    # -- what the queue asks

    def open(self) -> list[Identity]:
        """Return all operations that have not ended."""
        return [one.row.identity for one in self.table.in_state(*DUTY)]

    def work(self, identity: Identity) -> Work | None:
        """Return what is to do with an operation now, None for nothing."""
        stored = self.table.find(identity)
        if stored is None or stored.row.state not in DUTY:
            return None
        row, fields, what = stored.row, stored.row.fields, "deliver"
        if custody.asks_for_end(row, self._now()):
            what = "cancel" if row.state is State.CANCELLING else "ask"
        is_delivery = what == "deliver"
        names, hop = fields.names if is_delivery else (), _via(stored)[0]
        item = Waiting(
            identity, names, (row.hop.epoch, row.hop.order), stored.share, hop, row.hop.received,
            _number(stored, "priority"), _number(stored, "deadline"),
            (stored.size or 0) if is_delivery else 0,
        )  # fmt: skip
        return Work(item, what)

    def start(self, identity: Identity, what: str) -> dict[str, Any] | None:
        """Begin an attempt: the order for the process, None if there is nothing to do any more."""
        stored = self.table.find(identity)
        if stored is None or stored.row.state not in DUTY:
            return None
        if what == "deliver":
            if stored.row.state is State.CANCELLING:
                return None
            self._delivering.add(identity)
        via = _via(stored)
        return {
            "operation": str(self._spool.file(identity)), "data": str(self.receiving.path(identity)),
            "prefix": joined(via[1:], ""), "name": self._name, "is_older": self._is_older(stored.row),
            **self.far(via[0])._asdict(),
        }  # fmt: skip

    def _is_older(self, row: Row) -> bool:
        """Tell whether a later version of one of its names was delivered."""
        return bool(self.table.changed_later(row.identity, row.fields, ""))

    def answered(self, identity: Identity, status: Status | None, rotten: Sequence[int]) -> Row | None:
        """Record the end of an attempt. :param status: None: nothing was learned. :param rotten: changed blocks."""
        stored = self.table.find(identity)
        if stored is None:
            return None
        row, was_delivering = stored.row, identity in self._delivering
        self._delivering.discard(identity)
        if was_delivering and row.state in (State.CUSTODY, State.REFUSED):
            row = moved(Role.CUSTODIAN, row, State.DELIVERING)
        if rotten and row.state is State.DELIVERING:
            return self._lose(stored, row, rotten)
        after = self._after(row, status)
        if status is not None:
            self._told[identity] = status
        if after.state is State.REFUSED and after.reason != stored.row.reason:
            log.event("delivery-refused", path=after.fields.path, router=after.fields.terminal, problem=after.reason)
        if after != stored.row:
            stored = self._store(replace(stored, row=after), "kept-end")
        self._drop_if_may(stored)
        return after

    def _after(self, row: Row, status: Status | None) -> Row:
        state = State(status.state) if status is not None and status.state != UNKNOWN.state else None
        # the next custodian has lost it: this one still has the bytes
        if state is State.LOST or (state is not State.REFUSED and state not in ENDS):
            state = None
        now = self._now()
        after = custody.on_answer(row, state, status.reason if status else "", now)
        if status is not None and after.state in ENDS:
            return replace(after, etag=status.etag)
        return custody.give_up(after, now)

    def _lose(self, stored: Stored, row: Row, rotten: Sequence[int]) -> Row:
        log.error("custody-lost", path=row.fields.path, router=row.fields.terminal, blocks=len(rotten),
                  advice="the disk of the spool has changed bytes; the owner can send these blocks again")  # fmt: skip
        self.receiving.clear(self.receiving.staging(stored), rotten)
        after = moved(Role.CUSTODIAN, row, State.LOST, ended=self._now())
        self._store(replace(stored, row=after), "kept-end")
        return after

    def expire(self) -> None:
        """End, drop and forget what is due."""
        now = self._now()
        self.receiving.expire_leases()
        for stored in self.table.in_state(State.RECEIVING, *DUTY):
            row = stored.row
            if row.state is State.RECEIVING and now > row.fields.expires:
                # its sender has kept the bytes: there is nothing to ask
                row = moved(Role.CUSTODIAN, row, State.EXPIRED, ended=now)
            elif now > row.fields.expires:
                row = custody.give_up(row, now)
                self._wake(row.identity)
            if row is not stored.row:
                self._store(replace(stored, row=row), "kept-end")
        for stored in self.table.in_state(State.FAILED, State.EXPIRED, State.EXPIRED_UNKNOWN, State.LOST):
            self._drop_if_may(stored)
        for stored in self.table.forgettable(now - KEPT_S, now - KEPT_S, _TIDIED):
            if custody.may_forget(stored.row, now, self._spool.file(stored.row.identity).exists()):
                self._told.pop(stored.row.identity, None)
                with self.table.changing("kept-forget"):
                    self.table.drop(stored)
        self._spool.drop_strays(now)

    # -- rows

    def _store(self, stored: Stored, label: str) -> Stored:
        with self.table.changing(label):
            stored = self.table.put(stored)
        self._changed(stored.row.identity.origin)
        return stored

    def _read(self, stored: Stored) -> tuple[Kept, Digests | None]:
        """Read the file of a row; one that is not in custody has none yet."""
        try:
            return self._spool.read(stored.row.identity)
        except FileNotFoundError:
            return _kept(stored), None

    def _check_share(self, share: str, wanted: Share) -> None:
        """:raises Refusal: 429 or 507: nothing is stored."""
        limit = self._share._replace(size=self._share.size or int(self._spool.size * SHARE_OF_SPOOL))
        try:
            limits.check_share(self.table.share(share), limit, wanted)
        except ShareFull as problem:
            raise Refusal(429, str(problem), again_s=_AGAIN_S) from None
        if wanted.size and not self._spool.has_room(self.table.used_bytes(), wanted.size):
            raise Refusal(507, "the spool of this router is full", again_s=_AGAIN_S)

    def _drop_if_may(self, stored: Stored, by_owner: bool = False) -> None:
        """Drop the bytes of an operation that has ended, if nobody needs them."""
        row, has_bytes = stored.row, self.receiving.path(stored.row.identity).exists()
        if not custody.may_drop_bytes(row, self._now(), by_owner):
            return
        if has_bytes and custody.is_only_copy(row) and not by_owner:
            log.error("custody-dropped", path=row.fields.path, router=row.fields.terminal, state=row.state.value,
                      problem=row.reason, advice="this was the only copy that is known here")  # fmt: skip
        self.receiving.let_go(stored)
        try:
            self._spool.drop(row.identity)
        except OSError as problem:
            log.error("custody-release-failed", path=row.fields.path, problem=problem,
                      advice="check the disk of the spool")  # fmt: skip
        with self.table.changing("kept-forget"):
            self.table.drop_blocks(stored.id)

    def _recover(self) -> None:
        """After a start: the files decide, whatever became of the database. A new epoch begins."""
        now = self._now()
        kept = {one.identity: one for one in self._spool.all()}
        rows = {one.row.identity: one for one in self.table.in_state(State.RECEIVING, State.LOST, *DUTY)}
        missing = [one for one in kept.values() if self.table.find(one.identity) is None]
        epoch, rebuilt = custody.rebuild([_row(one) for one in missing], now)
        older = [one.hop.epoch for one in kept.values()] + [one.row.hop.epoch for one in rows.values()]
        self.epoch = new_epoch(epoch - 1, max([self._spool.epoch(), *older], default=0))
        self._spool.set_epoch(self.epoch)
        with self.table.changing("kept-recover"):
            for row in rebuilt:
                self.table.put(_stored(kept[row.identity], row))
            for identity, stored in rows.items():
                self._repair(stored, kept.get(identity))
        if missing:
            log.event("custody-recovered", operations=len(missing))

    def _repair(self, stored: Stored, kept: Kept | None) -> None:
        """Bring a row in line with its file, which is written before it."""
        row = stored.row
        if kept is None and row.state in DUTY:
            # delivered and dropped behind a database that was put back: the terminal knows
            self._spool.write(_kept(stored), None)
        elif kept is not None and kept.cancel and row.state is not State.CANCELLING:
            self.table.put(replace(stored, row=replace(row, state=State.CANCELLING, hop=kept.hop)))
        elif kept is not None and kept.hop[1:3] > row.hop[1:3]:
            self.table.put(replace(stored, row=replace(row, state=State.CUSTODY, hop=kept.hop)))


MakesCustodian = Callable[[Callable[[str], None], Callable[[Identity], None]], Custodian]


class Behind:
    """A custodian's side for one chain of routers."""

    def __init__(self, custodian: Custodian, via: tuple[str, ...]) -> None:
        self.custodian, self._via = custodian, via
        self.table, self.receiving = custodian.table, custodian.receiving
        self.state, self.complete = custodian.state, custodian.complete
        self.results, self.expire = custodian.results, custodian.expire

    @property
    def epoch(self) -> int:
        """Of a custodian: the terminal's is in the states."""
        return 0

    def begin(self, caller: Caller, ask: Bringing) -> Answer:
        """``PUT O``. :raises Refusal: it is not taken."""
        return self.custodian.begin(caller, ask, self._via)

    def cancel(self, caller: Caller, fields: Fields, jws: str) -> Answer:
        """``DELETE O``. :raises Refusal: the caller may not."""
        return self.custodian.cancel(caller, fields, jws, self._via)

    def newest(self, caller: Caller, path: str) -> Stored | None:
        """Return the newest complete version of a name in custody, of its owner only."""
        return self.custodian.newest(caller, self._via[-1], path)

    def low(self, caller: Caller, origin: str, below: int, jws: str) -> None:
        """Forget results. :raises Refusal: some of it has not ended."""
        self.custodian.low(caller, origin, below)

    def batch(self, caller: Caller, files: Sequence[SmallFile], jws: str) -> list[Status]:
        """:raises Refusal: batches go to terminals only."""
        raise Refusal(501, "a custodian takes operations one by one: use PUT O")


def _check_same(stored: Stored, fields: Fields) -> None:
    try:
        differs(stored.row, fields)
    except Differs as problem:
        raise Refusal(409, str(problem), "operation-differs") from None


def _has_ended(stored: Stored) -> bool:
    return stored.row.state in ENDS


def _via(stored: Stored) -> tuple[str, ...]:
    return tuple(stored.wishes[_VIA].split("/"))


def _number(stored: Stored, name: str) -> int:
    text = stored.wishes.get(name, "")
    return int(text) if text.isdigit() else 0


def _kept(stored: Stored) -> Kept:
    row = stored.row
    return Kept(
        row.identity, row.fields, _via(stored), stored.share, row.issuer, stored.jws, stored.token, "", row.custody,
        _number(stored, "priority"), _number(stored, "deadline"), row.hop,
    )  # fmt: skip


def _row(kept: Kept) -> Row:
    return Row(kept.identity, kept.fields, State.CUSTODY, kept.hop, kept.issuer, kept.custody)


def _stored(kept: Kept, row: Row) -> Stored:
    """Return the row of a file that the database does not know."""
    wishes = {_VIA: "/".join(kept.route), "priority": str(kept.priority), "deadline": str(kept.deadline)}
    row = replace(row, state=State.CANCELLING) if kept.cancel else row
    return Stored(row, 0, kept.share, kept.fields.size, kept.proof, kept.token, wishes=wishes)
