"""A published file from one router to another.

The first router is told to bring it to the second (:func:`command`), which judges that by a warrant of who commands it;
what became of it can be asked later. Where the first cannot reach the second, the bytes pass through the memory of
whoever asks, never over its disk, and both routers see only the keys and capabilities that he has for each.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.core.pauses import growing_s
from stageout.overlay import outcomes
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import ENDS, cancelled
from stageout.overlay.fetch import read
from stageout.overlay.links import Claim
from stageout.overlay.operations import Session, entries_of
from stageout.overlay.sending import Sending
from stageout.overlay.wire import messages, warrant
from stageout.overlay.wire.messages import (
    BLOCK_BYTES,
    Cancel,
    Copying,
    Custody,
    Low,
    Open,
    Operation,
    Result,
    Staged,
    Status,
)
from stageout.overlay.wire.route import Route
from stageout.overlay.wire.warrant import Warrant
from stageout.wire.deposits import EXPIRES_AFTER_S

_DIRECT: Sequence[Route] = ((),)
Progress = Callable[[int], None]
_PAUSE_MAX_S = 30.0
_ASK_EVERY_S = 10.0
#: Operations that are asked about before the first answer comes.
_QUESTIONS = 100
#: Failures of a router that say that it does not get through to the other one.
_UNREACHED = frozenset(
    {
        ErrorClass.CONNECT_FAILED,
        ErrorClass.NAME_LOOKUP_FAILED,
        ErrorClass.NAME_NOT_RESOLVED,
        ErrorClass.CREDENTIAL_REFUSED,
        ErrorClass.PERMISSION_DENIED,
        ErrorClass.TLS_UNTRUSTED,
    }
)


def _ignored(size_bytes: int) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True)
class Copy:
    """A file that has been copied. :param generation: of its new name.

    :param carried: why its bytes passed through this process, "" when the routers did it between them.
    """

    size_bytes: int
    generation: int
    carried: str = ""


@dataclass(frozen=True)
class Commanded:
    """A copy that is a router's duty: what is needed to ask for it later. :param expires: Unix time in seconds."""

    source: Gateway
    routes: tuple[Route, ...]
    origin: str
    path: str
    size_bytes: int
    expires: int


class Unreached(TransferFailure):
    """The first router cannot bring the file to the second, and has not begun."""


@dataclass
class _Passage:
    """The source of :class:`~stageout.overlay.sending.Sending` for a file that lies at another router.

    :param found: what the source's router says of it: the version that all blocks are of, and what it must be.
    """

    source: Gateway
    source_path: str
    found: messages.Answer
    gateway: Gateway
    order: Operation
    progress: Progress
    routes: Sequence[Route]
    connections: int = 1
    most_connections: int = 1
    claim: Claim = field(default_factory=Claim)
    digests: dict[int, bytes] = field(default_factory=dict)
    sent_bytes: int = 0

    def __post_init__(self) -> None:
        self.blocks = self.order.blocks
        self._lock = threading.Lock()
        self._parts: Iterator[bytes] = iter(())
        self._next = -1

    def ask(self) -> Open:
        """OPEN, the same on every connection."""
        order = self.order
        return Open(order.origin, order.seq, order.path, order.size_bytes, BLOCK_BYTES, order.expires)

    def take(self, block: int, file: int, buffer: memoryview, channel: Channel) -> memoryview:
        """The next block from the source; another one than the next costs a connection."""
        with self._lock:
            if block != self._next:
                offset, version = block * BLOCK_BYTES, self.found.generation
                self._parts = read(self.source, self.source_path, offset, generation=version, routes=self.routes)
            data = next(self._parts, b"")
            self._next = block + 1
        if len(data) != min(BLOCK_BYTES, self.order.size_bytes - block * BLOCK_BYTES):
            raise TransferFailure(ErrorClass.SOURCE_CHANGED, f"{self.source_path} was changed while it was copied")
        self.digests[block] = channel.digest_of(block, data)
        return memoryview(data)

    def lend(self, channel: Channel, tid: int) -> None:
        """Nobody else has the file."""

    def publish(self, tid: int, channel: Channel) -> Operation:
        """The PUBLISH, when all blocks were read. :raises TransferFailure: they are not what was published there."""
        digests = (self.digests[block] for block in range(self.blocks))
        manifest = hashlib.sha256(b"".join(digests)).hexdigest()
        if self.found.manifest not in ("", manifest) and self.found.digest == channel.digest_name:
            text = f"{self.source_path} is not what was published: its disk has damaged it"
            raise TransferFailure(ErrorClass.CONTENT_MISMATCH, text, self.source.server)
        return replace(self.order, tid=tid, manifest=manifest)

    def count(self, size_bytes: int) -> None:
        """So many more bytes left."""
        self.sent_bytes += size_bytes
        self.progress(self.sent_bytes)


def copy(
    source: Gateway,
    source_path: str,
    target: Gateway,
    target_path: str,
    *,
    progress: Progress = _ignored,
    sized: Progress = _ignored,
    routes: Sequence[Route] = _DIRECT,
    target_routes: Sequence[Route] = _DIRECT,
) -> Copy:
    """Copy a published file, with its permissions. On return it is under its name at the target, whole and on its disk.

    :param progress: called with the bytes that have left so far. :param sized: called with its size, before that.
    :param routes: to the first router. :param target_routes: to the second, from here.
    :raises TransferFailure: classified; SOURCE_CHANGED when the source was replaced meanwhile. A call that is
        interrupted has the copy cancelled.
    """
    try:
        given = command(source, source_path, target, target_path, routes=routes, target_routes=target_routes)
        sized(given.size_bytes)
        return follow(given, progress)
    except Unreached as failure:
        done = carry(
            source, source_path, target, target_path,
            progress=progress, sized=sized, routes=routes, target_routes=target_routes,
        )  # fmt: skip
        return replace(done, carried=failure.message)


def command(
    source: Gateway,
    source_path: str,
    target: Gateway,
    target_path: str,
    *,
    routes: Sequence[Route] = _DIRECT,
    target_routes: Sequence[Route] = _DIRECT,
    expires_after_s: int = EXPIRES_AFTER_S,
) -> Commanded:
    """Tell a router to bring a file to another one. On return that is its duty, durably; see :func:`follow`.

    The other judges it by the rights of ``target``: its key or its capability. Parameters as of :func:`copy`.

    :param expires_after_s: the time after which it is given up.
    :raises Unreached: the first router does not know a way, or one of them is too old for it.
    :raises TransferFailure: classified; nothing is copied then.
    """
    found = _file(source, source_path, routes)
    store = _looked_up(target, target_path, target_routes).store
    if not found.bearer or not store:
        who, what = (target, "takes no copies") if found.bearer else (source, "carries out no copies")
        raise Unreached(ErrorClass.NOT_SUPPORTED, f"{who.server} {what} in the name of others", who.server)
    (entry,) = entries_of(found)
    wanted = Warrant(
        "" if target.credential else target.key_name, found.bearer, store, secrets.token_hex(16), 1, target_path,
        entry.size_bytes, target.until(expires_after_s), entry.mode,
    )  # fmt: skip
    signer = target.credential.key if target.credential else target.secret
    order = messages.Copy(
        wanted.origin, wanted.seq, source_path, found.generation, target.server, target_path, wanted.size_bytes,
        wanted.mode, wanted.expires, warrant.write(wanted, signer),
        target.credential.text if target.credential else "",
    )  # fmt: skip
    given = Commanded(source, tuple(routes), wanted.origin, target_path, wanted.size_bytes, wanted.expires)
    answer = _first(given, order)
    if isinstance(answer, Result) and answer.reason == "unreachable":
        raise Unreached(ErrorClass.CONNECT_FAILED, f"{source.server} knows no route to {target.server}", source.server)
    if isinstance(answer, Result):
        _raise_unless_done(given, answer)
    return given


def follow(given: Commanded, progress: Progress = _ignored) -> Copy:
    """Wait until a copy has its end. It is cancelled when the call is interrupted.

    :raises Unreached: the router does not get through to the other; it has forgotten the copy.
    :raises TransferFailure: classified.
    """
    try:
        answer = _followed(given, progress)
    except Unreached:
        stopped = cancel(given)
        if stopped.outcome == "done":
            return Copy(given.size_bytes, stopped.generation)
        raise
    except BaseException as problem:
        if not isinstance(problem, TransferFailure):
            _say(given, Cancel(given.origin, 1))
        raise
    _raise_unless_done(given, answer)
    _say(given, Low(given.origin, 1))
    return Copy(given.size_bytes, answer.generation)


def state(gateway: Gateway, origin: str, stop: bool = False) -> Result | Custody | Copying:
    """The router's answer about a copy or a deposit: its end, how far the copy has come, or CUSTODY.

    :param stop: have it cancelled before that is asked; that it is may be said a moment later.
    :raises TransferFailure: it was not reached.
    """
    last = secrets.token_hex(16)  # answers come in order, and one question may have two
    found: Result | Custody | Copying = Result(origin, 1, "unknown")
    with Channel(gateway) as channel:
        if stop:
            channel.send(Cancel(origin, 1))
        channel.send(Status(origin, 1))
        channel.send(Status(last, 1))
        while True:
            answer = channel.receive()
            if isinstance(answer, Result) and answer.origin == last:
                return found
            if isinstance(answer, Staged):
                found = Result(origin, 1, "pending")
            elif isinstance(answer, (Result, Custody, Copying)) and (answer.origin, answer.seq) == (origin, 1):
                found = answer


def states(gateway: Gateway, origin: str, files: int) -> list[Result | Custody]:
    """The router's answer about the first so many operations of an origin: small files that were given to it in packs.

    :raises TransferFailure: it was not reached.
    """
    last = secrets.token_hex(16)  # of what comes in now nothing is said that has a number
    found: dict[int, Result | Custody] = {}
    with Channel(gateway) as channel:
        for first in range(1, files + 1, _QUESTIONS):
            for seq in range(first, min(files + 1, first + _QUESTIONS)):
                channel.send(Status(origin, seq))
            channel.send(Status(last, first))
            while True:
                answer = channel.receive()
                if isinstance(answer, (Result, Custody)) and answer.origin == origin:
                    found[answer.seq] = answer
                elif isinstance(answer, Result) and (answer.origin, answer.seq) == (last, first):
                    break
    return [found.get(seq, Result(origin, seq, "pending")) for seq in range(1, files + 1)]


def cancel(given: Commanded) -> Result:
    """Have a copy given up; returns how it ended: cancelled, or done when it was too late.

    :raises TransferFailure: the router does not say within the silence that its gateway allows.
    """
    answer = _first(given, Cancel(given.origin, 1))
    until_s = time.monotonic() + given.source.timeout_s
    while not isinstance(answer, Result):
        if time.monotonic() > until_s:
            raise TransferFailure(ErrorClass.STALLED, f"{given.source.server} has not ended the copy yet")
        time.sleep(0.1)
        answer = _first(given, Status(given.origin, 1))
    return answer


def _followed(given: Commanded, progress: Progress) -> Result:
    """The end of a copy; a connection that is lost costs a moment."""
    attempt = 0
    while True:
        try:
            with Channel(given.source, given.routes[attempt % len(given.routes)]) as channel:
                channel.send(Status(given.origin, 1))
                return _until_result(channel, given, progress)
        except Unreached:
            raise
        except TransferFailure as failure:
            if not failure.kind.retryable or time.time() >= given.expires:
                raise
            time.sleep(growing_s(0.25, _PAUSE_MAX_S, attempt + 1))
            attempt += 1


def _until_result(channel: Channel, given: Commanded, progress: Progress) -> Result:
    moved_bytes, unreached = 0, ""
    silence_s = channel.gateway.timeout_s
    while True:
        while not channel.has_more(min(_ASK_EVERY_S, silence_s / 2)):
            channel.send(Status(given.origin, 1))
            if not channel.has_more(silence_s):
                raise channel.failure(ErrorClass.STALLED, "silent about the copy")
        answer = channel.receive()
        if isinstance(answer, Result):
            if answer.reason == "unreachable":
                raise Unreached(ErrorClass.CONNECT_FAILED, unreached or answer.reason, given.source.server)
            return answer
        if not isinstance(answer, Copying):
            continue
        moved_bytes = max(moved_bytes, answer.moved_bytes)
        unreached = answer.problem if ErrorClass.from_code(answer.code) in _UNREACHED else ""
        if unreached and not moved_bytes and ErrorClass.from_code(answer.code).retryable:
            raise Unreached(ErrorClass.CONNECT_FAILED, unreached, given.source.server)
        progress(answer.moved_bytes)


def _first(given: Commanded, message: messages.Copy | Status | Cancel) -> Result | Custody:
    """The router's first answer to a message about a copy, by the first route that works."""
    for route in given.routes[:-1]:
        try:
            return _told(given, route, message)
        except TransferFailure as failure:
            if not failure.kind.retryable:
                raise
    return _told(given, given.routes[-1], message)


def _told(given: Commanded, route: Route, message: messages.Copy | Status | Cancel) -> Result | Custody:
    with Channel(given.source, route) as channel:
        channel.send(message)
        if isinstance(message, Cancel):
            channel.send(Status(given.origin, 1))
        while True:
            answer = channel.receive()
            if isinstance(answer, (Result, Custody)):
                return answer


def _say(given: Commanded, message: Cancel | Low) -> None:
    """As far as the router can be reached: results are forgotten with time, too.

    A router drops what a peer that has left said last: so this one stays until something asked behind it is answered.
    """
    behind = Status(given.origin, 2)
    try:
        with Channel(given.source, given.routes[0]) as channel:
            channel.send(message)
            channel.send(behind)
            while getattr(channel.receive(), "seq", None) != behind.seq:
                continue
    except TransferFailure:
        return


def _raise_unless_done(given: Commanded, answer: Result) -> None:
    failure = outcomes.failure(answer, given.path, given.source.server)
    if failure:
        raise failure


def _looked_up(gateway: Gateway, path: str, routes: Sequence[Route]) -> messages.Answer:
    """The router's answer about a name, which may be that there is none."""
    with Session(gateway, routes=routes) as session:
        return session.look_up(path)


def _file(gateway: Gateway, path: str, routes: Sequence[Route]) -> messages.Answer:
    found = _looked_up(gateway, path, routes)
    if found.code:
        raise TransferFailure(ErrorClass.from_code(found.code), found.message, gateway.server)
    if entries_of(found)[0].kind != "file":
        raise TransferFailure(ErrorClass.CONFLICT, f"{path}: not a file", gateway.server)
    return found


def carry(
    source: Gateway,
    source_path: str,
    target: Gateway,
    target_path: str,
    *,
    progress: Progress = _ignored,
    sized: Progress = _ignored,
    routes: Sequence[Route] = _DIRECT,
    target_routes: Sequence[Route] = _DIRECT,
) -> Copy:
    """Copy a file through this process. Parameters as of :func:`copy`, and what is true on return.

    :raises TransferFailure: classified; SOURCE_CHANGED when the source was replaced meanwhile. It is cancelled then, as
        it is when the call is interrupted.
    """
    found = _file(source, source_path, routes)
    (entry,) = entries_of(found)
    sized(entry.size_bytes)
    order = Operation(
        secrets.token_hex(16), 1, "publish", target_path, int(time.time()) + EXPIRES_AFTER_S, parents=True,
        mode=entry.mode, size_bytes=entry.size_bytes, blocks=-(-entry.size_bytes // BLOCK_BYTES),
    )  # fmt: skip
    passage = _Passage(source, source_path, found, target, order, progress, routes)
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    sending = Sending(passage, nothing, target_routes, target.timeout_s)
    try:
        answer = sending.run()
        if not isinstance(answer, Result):
            raise TransferFailure(ErrorClass.NOT_SUPPORTED, f"{target.server} took custody unasked", target.server)
        failure = outcomes.failure(answer, target_path, target.server)
        if failure:
            raise failure
        sending.say(Low(order.origin, order.seq))
    except (TransferFailure, *ENDS):  # else its space there would stay taken until it expires
        sending.close()
        if sending.has_asked:
            cancelled(target, target_routes, order)
        raise
    finally:
        sending.close()
        os.close(nothing)
    return Copy(entry.size_bytes, answer.generation)
