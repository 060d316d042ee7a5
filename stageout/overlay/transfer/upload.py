"""One file to a router: an operation, its ranges over several connections and routes, and its list of digests."""

from __future__ import annotations

import base64
import hashlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.core.pauses import growing_s
from stageout.overlay.http import operations, signing
from stageout.overlay.http.names import encoded
from stageout.overlay.http.operations import BLOCK_BYTES, Status
from stageout.overlay.rules.operations import Fields, Kind
from stageout.overlay.rules.sender import AfterAsking, after_asking
from stageout.overlay.sources import AnyPath, open_source
from stageout.overlay.transfer.blockmap import BlockMap, Range
from stageout.overlay.transfer.connection import Connection, Place, Refusal, Route
from stageout.overlay.transfer.crew import PASSING, PATIENCE_S, Crew, Lane, Share
from stageout.overlay.transfer.identity import Identity
from stageout.overlay.transfer.session import Session, state_of

Progress = Callable[[int], None]
#: A file of no more blocks goes by one connection.
_FEW_BLOCKS = 4
#: So often the list of digests is sent again after the router has asked for blocks.
_MOST_LISTS = 8
#: To read what a router said before it closed the connection (seconds).
_EARLY_S = 2.0
#: For the router to read a large file, for its digest (seconds).
_DIGEST_S = 600.0
_FIRST_PAUSE_S, _MOST_PAUSE_S = 0.2, 5.0
_GOOD = frozenset({"done", "superseded"})
_ENDED = frozenset({"failed", "cancelled", "expired", "expired, outcome unknown", "lost"})


@dataclass(frozen=True)
class Sent:
    """A file at its destination, or in custody. :param sent_bytes: over the network, with what was sent again."""

    size_bytes: int
    sent_bytes: int
    state: Status
    fields: Fields
    shares: tuple[Share, ...] = ()


class Damaged(TransferFailure):
    """The source is not what it was."""


@dataclass
class Upload:
    """One file on its way.

    :param hop: fields of its operation for this hop: release, lot, priority, deadline. :param connection: one that is
        there already; the one that is left at the end, which the caller closes. None: there is none, and none is left.
    """

    place: Place
    identity: Identity
    local: Path
    path: str
    routes: Sequence[Route] = ((),)
    mode: int = 0o644
    first: int = 2
    most: int = 8
    until: str = "done"
    hop: Mapping[str, str] = field(default_factory=dict)
    progress: Progress = lambda sent_bytes: None
    connection: Connection | None = None

    def run(self) -> Sent:
        """Send it. :raises TransferFailure: it is not there; the text says if that is not known."""
        file, self._status = open_source(self.local)
        self._file, self.size_bytes = file, self._status.st_size
        self._blocks = operations.blocks_of(self.size_bytes)
        self._digests: dict[int, bytes] = {}
        self._lock, self._sent_bytes = threading.Lock(), 0
        self._session = Session(self.place, self.identity, self.routes)
        is_lent = self.connection is not None
        self._crew: Crew | None = None
        self._is_offered = self._is_begun = False  # the router may know it; has answered
        self._session.keep(self.connection)
        self._hop = dict(self.hop)
        kinds = operations.digest_kinds()
        cheap = next(iter(kinds))  # the router keeps these for whoever fetches the file
        kind = "sha-256" if self.identity.key else cheap
        self._cheap, self._digest = kinds[cheap].of, kinds[kind].of
        self._same_kinds = cheap == kind
        try:
            self._prepare(cheap, kind)
            try:
                state = self._until_end()
            except BaseException as problem:
                state = self._given_up(problem)
            return Sent(self.size_bytes, self._sent_bytes, state, self._fields, self.shares)
        finally:
            self.connection = self._session.give() if is_lent else None
            self._session.close()
            if self._crew is not None:
                self._crew.close()
            os.close(file)

    def _prepare(self, cheap: str, kind: str) -> None:
        """Make the operation. :param cheap: kind of the digests of ranges. :param kind: of those of the list."""
        self._fields = self._session.fields(
            Kind.FILE, self.path, size=self.size_bytes, block_kind=cheap, digest_kind=kind, mode=self.mode,
            mtime=int(self._status.st_mtime),
        )  # fmt: skip
        self._signed = self.identity.sign(signing.OPERATION, operations.to_json(self._fields))

    @property
    def shares(self) -> tuple[Share, ...]:
        """Return what each route did."""
        if self._crew is not None:
            return self._crew.shares()
        return (Share(tuple(map(str, self.routes[0])), self._sent_bytes, 1),)

    def _until_end(self) -> Status:
        """Bring all of it, through losses of connections and restarts of the router."""
        blockmap, failures, lists, last = BlockMap(self.size_bytes), 0, 0, time.monotonic()
        moved = -1
        while True:
            try:
                state = self._begun(blockmap)
                self._is_begun = True
                if state is None:
                    self._move(blockmap)
                    state = self._listed(blockmap)
                if state is not None:
                    return self._judged(state)
                lists += 1
                if lists > _MOST_LISTS:
                    words = f"{self.local}: the router asks for the same blocks again and again"
                    raise TransferFailure(ErrorClass.CONTENT_MISMATCH, words, self.place.url)
            except TransferFailure as failure:
                self._session.keep(None)
                if not self._is_begun and not isinstance(failure, Refusal):
                    raise
                if self._sent_bytes > moved:
                    moved, failures, last = self._sent_bytes, 0, time.monotonic()
                if failure.kind not in PASSING or time.monotonic() - last > PATIENCE_S:
                    raise
                failures += 1
                time.sleep(max(growing_s(_FIRST_PAUSE_S, _MOST_PAUSE_S, failures), min(failure.retry_after_s or 0, 30)))

    def _begun(self, blockmap: BlockMap) -> Status | None:
        """Bring the operation; its result if it has one."""
        is_corrected = self.identity.is_corrected
        self._session.connection()
        self._is_offered = True
        state = self._brought()
        if not self._is_begun and self.identity.is_corrected and not is_corrected:
            state = self._anew()
        if self._is_result(state):
            return state
        if self._is_begun:
            blockmap.forget(self._have(state))
        else:
            blockmap.resume(self._have(state))
        return None

    def _anew(self) -> Status:
        """The clock of this machine is wrong, and so were the times of the operation: replace it."""
        self._session.cancel(self._fields)
        self._prepare(self._fields.block_kind, self._fields.digest_kind)
        return self._brought()

    def _brought(self) -> Status:
        """Bring the operation. Where the records of the router may be older than it, the name is looked at first."""
        try:
            return self._session.begin(self._fields, self._signed, self._hop)
        except Refusal as refusal:
            epoch = refusal.facts.get("epoch")
            if refusal.facts.get("reason") != "ask-first" or not isinstance(epoch, int):
                raise
            known = {"Stageout-Known-Epoch": str(epoch)}
            if known.items() <= self._hop.items():
                raise
        if after_asking(self._fields, *self._mine_and_shown(), None, ()) is AfterAsking.DONE:
            return Status("done", epoch=epoch)
        self._hop.update(known)
        return self._session.begin(self._fields, self._signed, self._hop)

    def _mine_and_shown(self) -> tuple[str, str | None]:
        """Return the digest of this file and of the one under its name, None if nobody shows that."""
        target = encoded(self.path)
        connection = self._session.connection()
        answer, body = connection.ask("HEAD", target)
        if answer.status == 200 and answer.get("content-length") == str(self.size_bytes):
            connection = self._session.connection()
            answer, body = connection.ask("HEAD", target, {"Want-Repr-Digest": "sha-256=1"}, timeout_s=_DIGEST_S)
        if answer.status >= 500:
            raise connection.refused(answer, body, f"/{self.path}")
        mine, offset, memory = hashlib.sha256(), 0, _memory()
        while count := os.preadv(self._file, [memory], offset):
            mine.update(memory[:count])
            offset += count
        shown = answer.get("repr-digest") if answer.status == 200 else None
        return f"sha-256=:{base64.b64encode(mine.digest()).decode()}:", shown

    def _is_result(self, state: Status) -> bool:
        return state.state in _GOOD | _ENDED or (self.until == "custody" and state.state == "custody")

    def _have(self, state: Status) -> Sequence[tuple[int, int]]:
        if any(not 0 <= first <= last < self._blocks for first, last in state.have):
            words = f"{self.place.url} has blocks that this file does not have"
            raise TransferFailure(ErrorClass.SERVER_ERROR, words, self.place.url)
        return state.have

    def _move(self, blockmap: BlockMap) -> None:
        if blockmap.is_done:
            return
        if self._crew is None:
            first = 1 if self._blocks <= _FEW_BLOCKS else self.first
            self._crew = Crew(self.place, self.routes, blockmap, self._work, first, self.most if first > 1 else 1)
        self._crew.run(self._session.give())
        self._session.keep(self._crew.give())

    def _work(self, lane: Lane) -> None:
        """Send ranges on one connection."""
        assert self._crew is not None
        while (part := self._crew.take(lane)) is not None:
            self._put(lane, part)

    def _put(self, lane: Lane, part: Range) -> None:
        assert self._crew is not None
        connection, start = lane.open, part.first * BLOCK_BYTES
        count = min(part.end * BLOCK_BYTES, self.size_bytes) - start
        fields = {
            "Content-Range": f"bytes {start}-{start + count - 1}/{self.size_bytes}",
            "Stageout-Blocks": operations.digests_text(self._digested(part)),
        }
        target = f"{operations.place(self._fields.origin, self._fields.seq)}/data"
        try:
            connection.request("PUT", target, fields, more_bytes=count)
            connection.send_file(self._file, start, count, lambda moved: self._moved(lane, moved))
        except TransferFailure as failure:
            if failure.kind is ErrorClass.SOURCE_CHANGED:
                raise self._changed() from None
            self._early(connection, failure)
        answer = connection.answer()
        body = connection.read(answer)
        if answer.status == 204:
            self._crew.done(lane, part)
            return
        self._refused(connection.refused(answer, body, f"/{self.path}"), part)

    def _early(self, connection: Connection, failure: TransferFailure) -> None:
        """A router may have said why it closed the connection before all came. :raises TransferFailure: always."""
        try:
            answer = connection.answer(_EARLY_S)
            refusal = connection.refused(answer, connection.read(answer), f"/{self.path}")
        except TransferFailure:
            raise failure from None
        if answer.status < 400:
            raise failure from None
        self._refused(refusal, None)

    def _refused(self, refusal: Refusal, part: Range | None) -> None:
        """:raises TransferFailure: what a refused range means."""
        if refusal.status in (409, 422):
            self._check_source()
            if part is not None:
                self._digested(part)
        if refusal.status == 401 and self.identity.refused():
            raise TransferFailure(ErrorClass.CONNECTION_LOST, str(refusal), refusal.server)
        if refusal.status in (404, 422):  # the row is gone, or bytes were changed on their way: all is looked at again
            raise TransferFailure(ErrorClass.CONNECTION_LOST, str(refusal), refusal.server)
        raise refusal

    def _moved(self, lane: Lane, count: int) -> None:
        lane.moved_bytes += count
        with self._lock:
            self._sent_bytes += count
            total = self._sent_bytes
        self.progress(min(total, self.size_bytes))

    def _digested(self, part: Range) -> list[bytes]:
        """Return the cheap digests of blocks. :raises TransferFailure: the file is not what it was."""
        return [self._read(block) for block in _blocks(part)]

    def _read(self, block: int) -> bytes:
        """Return the cheap digest of a block, and keep the other one. :raises TransferFailure: it has changed."""
        offset = block * BLOCK_BYTES
        memory = _memory()[: min(BLOCK_BYTES, self.size_bytes - offset)]
        try:
            count = os.preadv(self._file, [memory], offset)
        except OSError as problem:
            raise TransferFailure(ErrorClass.LOCAL_FILE, f"{self.local}: {problem.strerror}") from None
        if count != len(memory):
            raise self._changed()
        digest = self._digest(memory)
        with self._lock:
            if self._digests.setdefault(block, digest) != digest:
                raise self._changed()
        return digest if self._same_kinds else self._cheap(memory)

    def _check_source(self) -> None:
        """:raises TransferFailure: the file has changed since it was begun."""
        now, before = self.local.stat(), self._status
        if (now.st_size, now.st_mtime_ns, now.st_ctime_ns) != (
            before.st_size, before.st_mtime_ns, before.st_ctime_ns,
        ):  # fmt: skip
            raise self._changed()

    def _changed(self) -> Damaged:
        return Damaged(ErrorClass.SOURCE_CHANGED, f"{self.local} was changed while it was sent")

    def _listed(self, blockmap: BlockMap) -> Status | None:
        """Send the list of digests; the result, or None if blocks have to come again."""
        try:
            self._check_source()
        except OSError as problem:
            raise TransferFailure(ErrorClass.LOCAL_FILE, f"{self.local}: {problem.strerror}") from None
        for block in range(self._blocks):
            if block not in self._digests:  # the router had it from an attempt before
                self._read(block)
        listed = b"".join(self._digests[block] for block in range(self._blocks))
        fields = {"Stageout-Size": str(self.size_bytes), "Content-Type": "application/octet-stream"}
        if self._signed:
            root, operation = operations.root(listed), signing.digest(self._signed)
            said = signing.manifest_payload(operation, self.size_bytes, root)
            fields["Stageout-Signature"] = self.identity.sign(signing.MANIFEST, said)
        target = f"{operations.place(self._fields.origin, self._fields.seq)}/manifest"
        connection = self._session.connection()
        answer, body = connection.ask("PUT", target, fields, listed)
        if answer.status == 401 and self.identity.refused():
            answer, body = connection.ask("PUT", target, fields, listed)
        if answer.status == 422:
            blockmap.again(self._named(connection.refused(answer, body, f"/{self.path}")))
            return None
        state = state_of(connection, answer, body, f"/{self.path}")
        until = time.monotonic() + PATIENCE_S
        while not self._is_result(state):
            if state.state == "receiving" or (state.have and answer.status == 202 and not self._has_all(state)):
                blockmap.forget(self._have(state))
                return None
            if time.monotonic() > until and self.until != "done":
                break
            state = self._session.state(self._fields, self.until)
        return state

    def _has_all(self, state: Status) -> bool:
        return sum(last + 1 - first for first, last in state.have) >= self._blocks

    def _named(self, refusal: Refusal) -> list[int]:
        """Return the blocks that a refusal names."""
        found = refusal.facts.get("blocks")
        if not isinstance(found, list) or not found:
            raise refusal
        if not all(isinstance(one, int) and 0 <= one < self._blocks for one in found):
            raise refusal
        return found

    def _judged(self, state: Status) -> Status:
        """:raises TransferFailure: the result is none that a sender wants."""
        if state.state in _ENDED:
            words = f"/{self.path}: {state.state}{': ' if state.reason else ''}{state.reason}"
            kind = ErrorClass.CONFLICT if state.state == "failed" else ErrorClass.REQUEST_REJECTED
            raise TransferFailure(kind, words, self.place.url)
        return state

    def _given_up(self, problem: BaseException) -> Status:
        """Cancel the operation: no late copy of it may appear. :raises BaseException: the problem."""
        is_refused = isinstance(problem, Refusal) and (not self._is_begun or problem.status in (401, 403, 410))
        if is_refused or not self._is_offered:
            raise problem
        state = self._session.cancel(self._fields)
        if state is not None and state.state in _GOOD:
            return state
        if state is None and isinstance(problem, TransferFailure):
            ends = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self._fields.expires))
            words = (
                f"{problem}; the router did not confirm that it gave the file up: its outcome is unknown until {ends}"
            )
            raise TransferFailure(problem.kind, words, problem.server, problem.retry_after_s) from None
        raise problem


_own = threading.local()


def _memory() -> memoryview:
    """Return memory for one block, of this thread."""
    found: memoryview | None = getattr(_own, "memory", None)
    if found is None:
        found = _own.memory = memoryview(bytearray(BLOCK_BYTES))
    return found


def _blocks(part: Range) -> range:
    return range(part.first, part.end)


def put(place: Place, identity: Identity, local: AnyPath, path: str, **more: object) -> Sent:
    """Send a file. :param more: of :class:`Upload`. :raises TransferFailure: it is not there."""
    return Upload(place, identity, Path(local), path, **more).run()  # type: ignore[arg-type]
