"""The daemon's side of requests about operations: it answers the questions of workers, for both roles.

The way of a file's bytes: ``operation-claim`` before a range is written, with the file's descriptor;
``operation-received`` behind it; now and then :meth:`OperationsDesk._sync`, which brings the file to the disk and
stores what is there; ``operation-list`` and ``operation-manifest``; then the role decides (:meth:`Side.complete`).
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import secrets
from collections.abc import Awaitable
from functools import partial
from typing import Any, Callable, Protocol, cast

from overlay_router.local.store import StoredLot
from overlay_router.operations.receiving import Block, Differs, Receiving, Staging, Taken
from overlay_router.operations.side import Answer, Bringing, Caller, Refusal, Results, Side, SmallFile, seen
from overlay_router.operations.table import Stored
from overlay_router.operations.waits import Waits
from stageout.core import log
from stageout.overlay.http.heads import Refused
from stageout.overlay.http.names import encoded
from stageout.overlay.http.operations import (
    MOST_BLOCKS,
    SIZES,
    UNKNOWN,
    Status,
    batch_of,
    blocks_of,
    digests_of,
    from_json,
    root,
)
from stageout.overlay.http.signing import digest
from stageout.overlay.rules.operations import Hop, Kind, is_signed, signed_owner
from stageout.overlay.rules.rights import Action
from stageout.overlay.rules.states import ENDS, State
from stageout.overlay.wire.messages import Lot, Reserved

Facts = dict[str, Any]
#: Prefix of the questions that are answered here.
MARK = "operation-"
_MOST_WAIT_S = 60.0
_MOST_LIST_BYTES = 64 << 20
_MOST_TOLD = 1_000
#: Memory for batches that come in.
_BATCHES_BYTES = 512 << 20
_BUSY = {"Retry-After": "1"}
#: States in which blocks may come: of a file that a custodian has lost its owner may bring them again.
_RECEIVES = frozenset({State.RECEIVING, State.LOST})


class Custodians(Protocol):
    """The custodian's role, for each chain of routers behind this one."""

    def behind(self, hops: tuple[str, ...]) -> Side:
        """Return the role for a chain. :raises Refusal: it does not take it."""


def _nothing() -> None:
    pass


class Keeps(Protocol):
    """The role of a custodian, beside what every role has."""

    def newest(self, caller: Caller, path: str) -> Stored | None:
        """Return the newest complete version of a name in custody, of its owner only."""


class Reserves(Protocol):
    """The role of a terminal, beside what every role has: space that somebody reserved."""

    def lot(self, caller: Caller, ask: Lot) -> Reserved:
        """Reserve or release."""

    def lot_of(self, caller: Caller, number: str) -> StoredLot:
        """Return a lot of this subject's. :raises Refusal: 404: it has none of that number."""


class Talk:
    """Claims of one connection, and a block list that comes."""

    def __init__(self) -> None:
        self.listed, self.used = bytearray(), set[Receiving]()
        self.batch, self.given_back = -1, _nothing

    def drop_batch(self) -> None:
        """Let go of the memory of a batch."""
        if self.batch >= 0:
            os.close(self.batch)
            self.given_back()
        self.batch = -1


class OperationsDesk:
    """Answers workers.

    :param terminal: None where no files end here. :param custodians: None where none are taken into custody.
    :param waits: requests that wait for what the roles change. :param on_disk: runs a call in the thread that owns the
        disk.
    """

    def __init__(
        self,
        terminal: Side | None,
        custodians: Custodians | None,
        waits: Waits,
        on_disk: Callable[[Callable[[], Any]], Awaitable[Any]],
    ) -> None:
        self._terminal, self._custodians, self._on_disk = terminal, custodians, on_disk
        self._waits = waits
        self._batches = 0
        self._locks: dict[tuple[int, int], asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def answer(self, talk: Talk, question: str, facts: Facts) -> tuple[Facts, int]:
        """Return the answer to a question, and a descriptor or -1. :raises Refused: of the request."""
        try:
            side = self._side(tuple(facts.pop("via", ())))
            who = _caller(facts.pop("who"))
            handler = getattr(self, f"_{question[len(MARK) :]}")
            found: tuple[Facts, int] = await handler(side, talk, who, **facts)
            return found
        except Refusal as why:
            headers = {"Retry-After": str(why.again_s)} if why.again_s else {}
            members = {"reason": why.word} if why.word else {}
            if why.word == "ask-first":
                members = {**members, "epoch": self._side(()).epoch}  # type: ignore[dict-item]
            raise Refused(why.status, why.reason, headers, members) from None
        except Differs as why:
            raise Refused(409, str(why), None, {"reason": "block-differs"}) from None
        except Taken as why:
            raise Refused(503, str(why), _BUSY) from None

    async def forget(self, talk: Talk) -> None:
        """A connection has ended."""
        talk.drop_batch()
        for receiving in talk.used:
            await self._on_disk(partial(receiving.release, talk))

    async def expire(self) -> None:
        """Once a minute."""
        if self._terminal is not None:
            await self._on_disk(self._terminal.expire)

    def _side(self, hops: tuple[str, ...]) -> Side:
        if hops and self._custodians is None:
            raise Refusal(403, "this router takes nothing into custody")
        side = self._custodians.behind(hops) if hops and self._custodians is not None else self._terminal
        if side is None:
            raise Refusal(404, "this router keeps no files")
        return side

    async def _begin(self, side: Side, talk: Talk, who: Caller, fields: str, **rest: Any) -> tuple[Facts, int]:
        hop = Hop(*rest["hop"])
        ask = Bringing(from_json(fields.encode()), rest["jws"], hop, rest["token"], rest["release"], rest["wishes"])
        return _told(await self._on_disk(lambda: side.begin(who, ask))), -1

    async def _claim(
        self, side: Side, talk: Talk, who: Caller, origin: str, seq: int, first: int, count: int, **rest: Any
    ) -> tuple[Facts, int]:
        """Let a connection bring a range. :raises Refused: it brings the same later, or the operation has ended."""

        def claimed() -> tuple[Facts, int]:
            stored = _brought(side, who, origin, seq)
            if stored.row.state not in _RECEIVES:
                raise _is_over(side, stored)
            stored = _sized(side, stored, rest["size"])
            one = side.receiving.staging(stored)
            talk.used.add(side.receiving)
            digests = digests_of(rest["digests"], one.digest_bytes)
            if digests and len(digests) != count:
                raise Refused(400, "Stageout-Blocks has a digest for each block of the range")
            kept = side.receiving.claim(one, talk, first, count, digests)
            fields = stored.row.fields
            found = {
                "at": one.at, "block_kind": fields.block_kind, "digest_kind": fields.digest_kind, "size": stored.size,
                "kept": {str(number): kind.hex() for number, kind in kept.items()},
            }  # fmt: skip
            return found, -1 if rest["has"] == one.at else os.dup(one.file)

        found: tuple[Facts, int] = await self._on_disk(claimed)
        return found

    async def _received(
        self,
        side: Side,
        talk: Talk,
        who: Caller,
        origin: str,
        seq: int,
        first: int,
        count: int,
        blocks: list[list[Any]],
    ) -> tuple[Facts, int]:
        came = [Block(number, bytes.fromhex(one), bytes.fromhex(listed)) for number, one, listed in blocks]

        def received() -> tuple[Stored, Staging, bool]:
            stored = _brought(side, who, origin, seq)
            if stored.row.state not in _RECEIVES:
                raise _is_over(side, stored)
            one = side.receiving.staging(stored)
            return stored, one, side.receiving.received(one, talk, first, count, came)

        stored, one, is_due = await self._on_disk(received)
        if one.due is not None and one.is_whole(one.due[0]):
            self._start(self._finish_alone(side, stored))
        elif is_due and not self._lock(side, one.at).locked():
            self._start(self._sync(side, one))
        return {}, -1

    async def _list(self, side: Side, talk: Talk, who: Caller, data: str) -> tuple[Facts, int]:
        """A part of a block list."""
        if len(talk.listed) > _MOST_LIST_BYTES:
            raise Refused(413, "the block list is too long")
        talk.listed += bytes.fromhex(data)
        return {}, -1

    async def _manifest(
        self, side: Side, talk: Talk, who: Caller, origin: str, seq: int, size: int, jws: str, signed: Facts | None
    ) -> tuple[Facts, int]:
        listed, talk.listed = bytes(talk.listed), bytearray()
        _in_range(size)

        def checked() -> tuple[Stored, Staging | None]:
            stored = _brought(side, who, origin, seq)
            _check_list(stored, size, listed, signed)
            if stored.row.state not in _RECEIVES:
                return stored, None
            stored = _sized(side, stored, size)
            one = side.receiving.staging(stored)
            one.due = size, listed, jws
            return stored, one

        stored, one = await self._on_disk(checked)
        if one is None:
            return _told(await self._on_disk(lambda: side.complete(stored))), -1
        return _told(await self._finish(side, stored)), -1

    async def _finish_alone(self, side: Side, stored: Stored) -> None:
        """The last block of a file has come behind its list."""
        with contextlib.suppress(Refusal, Refused, Taken, OSError):  # its owner asks for the state
            await self._finish(side, stored)

    async def _finish(self, side: Side, stored: Stored) -> Answer:
        """Sync a file, compare it with its list, and have the role decide, if all of it is here."""

        def begun() -> Staging | Answer:
            now = side.table.get(stored.id)
            if now is None:
                raise Refusal(404, "the operation was forgotten")
            return side.receiving.staging(now) if now.row.state in _RECEIVES else side.complete(now)

        one: Staging | Answer = await self._on_disk(begun)
        if isinstance(one, Answer):
            return one
        await self._sync(side, one)

        def compared() -> Answer:
            now = side.table.get(stored.id)
            if now is None:
                raise Refusal(404, "the operation was forgotten")
            if now.row.state not in _RECEIVES:
                return side.complete(now)
            due = side.receiving.staging(now).due
            if due is None:
                return Answer(202, side.state(now))
            size, listed, jws = due
            wrong = one.wrong(listed)
            if wrong:
                side.receiving.clear(one, wrong)
                told: Facts = {"blocks": wrong[:_MOST_TOLD]}
                raise Refused(422, "blocks differ from the list: send them again", None, told)
            if one.is_whole(size) and one.durable == one.has:
                return side.complete(now)
            with side.table.changing("operation-list"):
                side.table.put_list(now.id, size, listed, jws)
            return Answer(202, side.state(now))

        answer: Answer = await self._on_disk(compared)
        return answer

    async def _sync(self, side: Side, one: Staging) -> None:
        """Bring what was received to the disk. :raises OSError: it is lost, and has to come again."""
        async with self._lock(side, one.at):
            file, blocks = await self._on_disk(lambda: side.receiving.begin_sync(one))
            try:
                if blocks:
                    await asyncio.get_running_loop().run_in_executor(None, side.receiving.bring_to_disk, one, file)
            except OSError:
                await self._on_disk(lambda: side.receiving.lost(one, blocks))
                raise
            finally:
                if file >= 0:
                    os.close(file)
            if blocks:
                await self._on_disk(lambda: side.receiving.synced(one, blocks))

    def _lock(self, side: Side, at: int) -> asyncio.Lock:
        key = (id(side.receiving), at)
        if len(self._locks) > 10_000:
            self._locks = {name: lock for name, lock in self._locks.items() if lock.locked()}
        return self._locks.setdefault(key, asyncio.Lock())

    async def _state(
        self, side: Side, talk: Talk, who: Caller, origin: str, seq: int, until: str, wait_s: float
    ) -> tuple[Facts, int]:
        def state() -> tuple[Status, bool]:
            stored = seen(side.table, who, origin, seq, Action.SEE)
            if stored is None:
                return UNKNOWN, True
            is_durable = until == "custody" and stored.row.state not in (State.RECEIVING, State.COMPLETE)
            return side.state(stored), stored.row.state in ENDS or is_durable

        found, _ = await self._waits.until(
            who.share, origin, min(wait_s, _MOST_WAIT_S), lambda: self._on_disk(state), lambda told: told[1]
        )
        if found is UNKNOWN:
            raise Refusal(404, "this router has never seen this operation", "unknown")
        return {"status": 200, "state": found.facts()}, -1

    async def _results(
        self, side: Side, talk: Talk, who: Caller, origin: str, first: int, last: int, until: str, wait_s: float
    ) -> tuple[Facts, int]:
        found: Results = await self._waits.until(
            who.share, origin, min(wait_s, _MOST_WAIT_S),
            lambda: self._on_disk(lambda: side.results(who, origin, first, last, until)),
            lambda told: told.reached or told.ended,
        )  # fmt: skip
        states = {str(seq): state.facts() for seq, state in found.states.items()}
        for seq in range(first, last + 1) if last else ():
            states.setdefault(str(seq), UNKNOWN.facts())
        return {"reached": found.reached, "epoch": side.epoch, "operations": states}, -1

    async def _cancel(self, side: Side, talk: Talk, who: Caller, fields: str, jws: str) -> tuple[Facts, int]:
        asked = from_json(fields.encode())
        return _told(await self._on_disk(lambda: side.cancel(who, asked, jws))), -1

    async def _reserve(self, side: Side, talk: Talk, who: Caller, **facts: Any) -> tuple[Facts, int]:
        """A new lot."""
        terminal = self._own(side)
        ask = Lot(secrets.token_hex(16), "reserve", facts["bytes"], facts["seconds"], facts["below"])
        made = await self._on_disk(lambda: terminal.lot(who, ask))
        return {"id": made.lot, "bytes": made.left_bytes, "expires": made.expires}, -1

    async def _lot(self, side: Side, talk: Talk, who: Caller, number: str, releases: bool) -> tuple[Facts, int]:
        """Tell what is left of a lot. :param releases: and nothing is, then."""
        terminal = self._own(side)

        def answered() -> Facts:
            held = terminal.lot_of(who, number)
            if releases:
                terminal.lot(who, Lot(number, "release"))
            return {"id": held.lot, "bytes": held.left_bytes, "expires": held.until, "below": encoded(held.path)}

        return await self._on_disk(answered), -1

    def _own(self, side: Side) -> Reserves:
        if side is not self._terminal:
            raise Refusal(405, "ask the router itself for a lot")
        return cast(Reserves, side)

    async def _low(self, side: Side, talk: Talk, who: Caller, origin: str, below: int, jws: str) -> tuple[Facts, int]:
        await self._on_disk(lambda: side.low(who, origin, below, jws))
        return {}, -1

    async def _room(self, side: Side, talk: Talk, who: Caller, size: int) -> tuple[Facts, int]:
        """Give a connection memory for a batch. :raises Refusal: others have all of it."""
        if self._batches + size > _BATCHES_BYTES:
            raise Refusal(503, "other batches come in now", again_s=1)
        talk.drop_batch()
        file = os.memfd_create("batch", os.MFD_CLOEXEC)
        os.ftruncate(file, size)
        self._batches += size
        talk.batch, talk.given_back = file, partial(self._give_back, size)
        return {}, os.dup(file)

    def _give_back(self, size: int) -> None:
        self._batches -= size

    async def _batch(
        self, side: Side, talk: Talk, who: Caller, line: int, size: int, first: int, last: int, origin: str, jws: str,
        denied: dict[str, str],
    ) -> tuple[Facts, int]:  # fmt: skip
        """Publish the files of a batch. :param line: bytes of its line. :param denied: reasons, by number."""

        def done() -> list[Facts]:
            with mmap.mmap(talk.batch, size, access=mmap.ACCESS_READ) as memory, memoryview(memory) as view:
                at, files = line + 1, []
                for fields, _ in batch_of(bytes(view[:line]), origin, first, last):
                    end = at + (fields.size or 0)
                    files.append(SmallFile(fields, view[at:end], denied.get(str(fields.seq), "")))
                    at = end
                try:
                    states = side.batch(who, files, jws)
                    return [
                        {"seq": file.fields.seq, **state.facts()}
                        for file, state in zip(files, states)
                        if state.state != State.DONE.value
                    ]
                finally:
                    for file in files:
                        file.data.release()

        try:
            return {"failed": await self._on_disk(done)}, -1
        finally:
            talk.drop_batch()

    async def _bytes(self, side: Side, talk: Talk, who: Caller, origin: str, seq: int) -> tuple[Facts, int]:
        """The bytes of a file that are kept here."""

        def kept() -> tuple[Facts, int]:
            stored = seen(side.table, who, origin, seq, Action.FETCH)
            if stored is None or stored.row.fields.kind is not Kind.FILE:
                raise Refusal(404, "no bytes of this operation are here")
            try:
                path = side.receiving.path(stored.row.identity)
                file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                raise Refusal(404, "no bytes of this operation are here") from None
            return {"have": side.receiving.have(stored), "size": stored.size}, file

        found: tuple[Facts, int] = await self._on_disk(kept)
        return found

    async def _kept_list(self, side: Side, talk: Talk, who: Caller, origin: str, seq: int) -> tuple[Facts, int]:
        def kept() -> str:
            stored = seen(side.table, who, origin, seq, Action.FETCH)
            found = side.table.block_list(stored.id) if stored is not None else None
            if found is None:
                raise Refusal(404, "no block list of this operation is here")
            return found[1].hex()

        return {"list": await self._on_disk(kept)}, -1

    async def _newest(self, side: Side, talk: Talk, who: Caller, path: str) -> tuple[Facts, int]:
        """The newest version of a name that is in custody here."""

        def found() -> tuple[Facts, int]:
            stored = cast(Keeps, side).newest(who, path)
            if stored is None:
                raise Refusal(404, "no version of this name is in custody here")
            file = os.open(side.receiving.path(stored.row.identity), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            tag = f'"{stored.row.identity.origin}-{stored.row.identity.seq}"'
            return {"etag": tag, "state": side.state(stored).state}, file

        answer: tuple[Facts, int] = await self._on_disk(found)
        return answer

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("operation-not-synced", problem=repr(task.exception()), advice="look at the disk of the root")


def _caller(facts: Facts) -> Caller:
    issuer, prefix = facts["authority"]
    return Caller(
        facts["owner"], tuple(facts["owners"]), facts["issuer"], facts["share"], facts["router"], facts["denied"],
        (issuer, prefix), facts["means"],
    )  # fmt: skip


def _told(answer: Answer) -> Facts:
    return {"status": answer.status, "state": answer.state.facts()}


def _brought(side: Side, who: Caller, origin: str, seq: int) -> Stored:
    """Return the row whose bytes a caller brings. :raises Refusal: there is none."""
    stored = seen(side.table, who, origin, seq, Action.BRING)
    if stored is None or stored.row.fields.kind is not Kind.FILE:
        raise Refusal(404, "put the operation first: no file of this number is known here", "unknown")
    return stored


def _is_over(side: Side, stored: Stored) -> Refused:
    """Return the answer to a range that nobody needs any more."""
    state = side.state(stored)
    status = 410 if stored.row.state in (State.CANCELLED, State.EXPIRED) else 409
    return Refused(status, f"the operation is {state.state} already", None, {**state.facts(), "reason": state.state})


def _sized(side: Side, stored: Stored, size: int | None) -> Stored:
    """Return a row whose size is known now. :raises Refusal: another one was said before."""
    if size is None or stored.size == size:
        return stored
    if stored.size is not None:
        raise Refusal(409, "the operation has another size", "operation-differs")
    _in_range(size)
    with side.table.changing("operation-row"):
        sized = side.table.put(stored.with_size(size))
    side.receiving.staging(sized).size = size
    return sized


def _in_range(size: int) -> None:
    if blocks_of(size) > MOST_BLOCKS:
        raise Refused(413, "the file has too many blocks")


def _check_list(stored: Stored, size: int, listed: bytes, signed: Facts | None) -> None:
    """:raises Refused: the list does not belong to the operation."""
    if len(listed) != blocks_of(size) * SIZES[stored.row.fields.digest_kind]:
        raise Refused(400, "the block list has a digest for each block of the file")
    if not is_signed(stored.row.identity.owner):
        return
    if signed is None or signed_owner(signed["signer"]) != stored.row.identity.owner:
        raise Refused(403, "the list of a signed operation is signed with the same key")
    if signed["payload"] != {"operation": digest(stored.jws), "size": size, "root": root(listed)}:
        raise Refused(403, "the signature is for another list, or for another operation")
