"""Whole files to a router; the way back is in :mod:`stageout.overlay.fetch`.

A put asks for a transfer number, sends blocks over several connections at once, and ends with PUBLISH, which the router
executes when every block is on its disk and fits the manifest. A connection that is lost costs what was not yet
STAGED: the same transfer goes on where it was. With a ``terminal`` the router that is asked is a custodian: it spools
the file and delivers it there.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.core.pauses import growing_s
from stageout.overlay import outcomes
from stageout.overlay.cargo import Loan, Share
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.links import Claim
from stageout.overlay.sending import RecordsLost, Sending
from stageout.overlay.sources import AnyPath, check_source, open_source
from stageout.overlay.tuning.shares import MOST_PRIORITY
from stageout.overlay.wire import capability, frames
from stageout.overlay.wire.fields import MAX_NUMBER
from stageout.overlay.wire.messages import (
    BLOCK_BYTES,
    Cancel,
    Custody,
    Low,
    Open,
    Opened,
    Operation,
    Result,
    Status,
)
from stageout.overlay.wire.route import Route
from stageout.wire.deposits import EXPIRES_AFTER_S

_PAUSE_MAX_S = 30.0
_ASK_EVERY_S = 10.0
#: A put that has failed tells the router so, if that does not take longer.
GIVE_UP_S = 5.0
#: A process, or a call, that has to end.
ENDS = (KeyboardInterrupt, SystemExit)
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Put:
    """A file that is at its destination; or that a custodian has, where that was enough.

    :param sent_bytes: over the network, with what was sent again. :param shares: what each route did.
    :param origin: in custody: what the custodian knows it by. "" for a file that has arrived.
    """

    size_bytes: int
    sent_bytes: int
    digest_name: str
    manifest: str
    generation: int
    shares: tuple[Share, ...] = ()
    origin: str = ""


@dataclass(frozen=True)
class Deposit:
    """A file in a custodian's hands: what is needed to ask for it later. :param expires: Unix time in seconds.

    :param router: what the custodian calls itself, "" when the file was at its destination before it said so.
    """

    custodian: str
    terminal: str
    origin: str
    seq: int
    expires: int
    size_bytes: int
    sent_bytes: int
    router: str = ""


@dataclass(frozen=True)
class Known:
    """Digests that the blocks of a file must have. :param name: of their kind, as in HELLO."""

    name: str
    digests: Mapping[int, bytes]


class Damaged(TransferFailure):
    """The file is not what it was, or not what its digests say."""


@dataclass
class Upload:
    """One file on its way to a router: what :class:`stageout.overlay.sending.Sending` asks of it.

    :param order: the PUBLISH: identity, path, attributes, terminal. :param known: digests to be checked against.
    :param most_connections: as of :func:`put`.
    :param opening: the OPEN to be sent, for who sends it in another's name; else it is made from ``order``.
    :ivar opened: the router has something of it. :ivar asked: it may have.
    """

    gateway: Gateway
    local: Path
    order: Operation
    connections: int
    progress: Progress
    known: Known | None = None
    digests: dict[int, bytes] = field(default_factory=dict)
    sent_bytes: int = 0
    digest_name: str = ""
    routes: Sequence[Route] = ((),)
    shares: tuple[Share, ...] = ()
    opening: Open | None = None
    lot: str = ""
    most_connections: int = 0
    opened: bool = False
    asked: bool = False

    def __post_init__(self) -> None:
        self.status = self.local.stat()
        check_source(self.local, self.status.st_mode)
        self.size_bytes = self.status.st_size
        self.blocks = -(-self.size_bytes // BLOCK_BYTES)
        self._lock = threading.Lock()

    def run(self, until_custody: bool = False, keep_result: bool = False) -> Result | Custody:
        """The router's answer, after as many connections as it takes. :raises TransferFailure: classified.

        :param until_custody: CUSTODY will do. :param keep_result: the router shall not forget it: somebody asks again.
        """
        while True:
            answer = self._sent(keep_result)
            if isinstance(answer, Custody) and not until_custody:
                answer = self._delivered(keep_result)
            if answer is not None:
                return answer

    def _sent(self, keep_result: bool) -> Result | Custody | None:
        """The answer; None when all must come again."""
        file = self.open()
        sending = self.sending(file)
        try:
            try:
                answer = sending.run()
            except RecordsLost:
                return self.found()
            if isinstance(answer, Result) and answer.outcome == "done" and not keep_result:
                sending.say(Low(self.order.origin, self.order.seq))
        finally:
            sending.close()
            os.close(file)
            self.opened |= bool(sending.tid)
            self.asked |= sending.has_asked
            self.shares = sending.shares()
        return answer

    def found(self) -> Result | None:
        """After a loss of the router's records: DONE if the whole file is there, so that it is not published twice."""
        from stageout.overlay.finding import generation_of

        digests = [self.digests[block] for block in range(self.blocks)]
        generation = generation_of(
            self.gateway, self.routes, self.order.path, self.size_bytes, self.digest_name, digests
        )
        if generation is None:
            return None
        # what the router was asked when it told of the loss, and nobody goes on with, would stay until it expires
        with contextlib.suppress(TransferFailure), Channel(self.gateway, self.routes[0]) as control:
            control.send(Cancel(self.order.origin, self.order.seq, data_only=True))
        return Result(self.order.origin, self.order.seq, "done", generation=generation)

    def sending(self, file: int) -> Sending:
        """The sending of this file; ``file`` is a descriptor of it."""
        return Sending(self, file, self.routes, self.gateway.timeout_s, checks=not self.order.terminal)

    def open(self) -> int:
        """A descriptor of the file, for :meth:`take`. :raises TransferFailure: LOCAL_FILE."""
        return open_source(self.local)[0]

    def _delivered(self, keep_result: bool) -> Result | None:
        """The outcome of a file in custody; None when its data must come again.

        It is on its way: nothing begins anew when connections are lost.
        """
        for attempt in itertools.count():
            try:
                with Channel(self.gateway, self.routes[attempt % len(self.routes)]) as control:
                    control.send(self.ask())
                    result = self.until_result(control)
                    if result is not None and result.outcome == "done" and not keep_result:
                        control.send(Low(self.order.origin, self.order.seq))
                    return result
            except TransferFailure as failure:
                if self.is_given_up or not failure.kind.retryable or time.time() >= self.order.expires:
                    raise
                time.sleep(growing_s(0.25, _PAUSE_MAX_S, attempt + 1))
        raise AssertionError("unreachable")

    def ask(self) -> Open:
        """OPEN, the same on every connection."""
        if self.opening is not None:
            return self.opening
        order = self.order
        return Open(
            order.origin, order.seq, order.path, self.size_bytes, BLOCK_BYTES, order.expires, order.terminal,
            lot=self.lot, standby_s=order.standby_s,
            release=order.release if order.copies == 1 else "custody",
        )  # fmt: skip

    def take(self, block: int, file: int, buffer: memoryview, channel: Channel) -> memoryview | None:
        """Read a block and keep its digest. :raises TransferFailure: it is not what it was."""
        offset = block * BLOCK_BYTES
        data = buffer[: min(BLOCK_BYTES, self.size_bytes - offset)]
        try:
            count = os.preadv(file, [data], offset)
        except OSError as problem:
            raise TransferFailure(ErrorClass.LOCAL_FILE, f"{self.local}: {problem.strerror}") from None
        if count != len(data):
            raise Damaged(ErrorClass.SOURCE_CHANGED, f"{self.local} became shorter while it was sent")
        self.take_digest(block, data, channel)
        channel.kept_in(block, file, offset)
        return data

    def lend(self, channel: Channel, tid: int) -> Loan | None:
        """Nobody else has the file."""
        return None

    def publish(self, tid: int, channel: Channel) -> Operation:
        """The PUBLISH, when all blocks were read. :raises TransferFailure: the file has changed meanwhile."""
        self.digest_name = channel.digest_name
        try:
            self._digest_rest(channel)
            self.check_source()
        except OSError as problem:
            raise TransferFailure(ErrorClass.LOCAL_FILE, f"{self.local}: {problem.strerror}") from None
        return replace(self.order, tid=tid, size_bytes=self.size_bytes, blocks=self.blocks, manifest=self.manifest)

    @property
    def claim(self) -> Claim:
        """The demand on the links; relays see no more of its identity than they need to tell transfers apart."""
        order = self.order
        flow = hashlib.blake2b(f"{order.origin}/{order.seq}".encode(), digest_size=8).hexdigest()
        return Claim(flow, "", order.priority, order.deadline)

    @property
    def manifest(self) -> str:
        """The digest of all blocks' digests, in hexadecimal digits."""
        return hashlib.sha256(b"".join(self.digests[block] for block in range(self.blocks))).hexdigest()

    @property
    def is_given_up(self) -> bool:
        """Tell whether the answer of the router is not waited for any more."""
        return False

    def until_result(self, control: Channel) -> Result | None:
        """The result of what a custodian has; None when its data must come again."""
        while True:
            answer = answer_to(control, self.order)
            if not isinstance(answer, Custody):
                return answer

    def _digest_rest(self, control: Channel) -> None:
        """Digests of blocks that an earlier process sent: from what is known, or by reading them again."""
        same = self.known.digests if self.known and self.known.name == control.digest_name else {}
        file = open_source(self.local)[0]  # by the page cache: nothing here is aligned as the disk wants it
        try:
            for block in range(self.blocks):
                if block not in self.digests:
                    data = same.get(block) or os.pread(file, BLOCK_BYTES, block * BLOCK_BYTES)
                    self.digests[block] = data if block in same else control.digest(data)
        finally:
            os.close(file)

    def take_digest(self, block: int, data: memoryview, channel: Channel) -> None:
        """Keep the digest of a block that was read. :raises Damaged: it is not what it was, or must be."""
        digest = channel.digest_of(block, data)
        if self.known is not None:
            mine = digest if self.known.name == channel.digest_name else frames.digests()[self.known.name](data)
            if mine != self.known.digests.get(block):
                raise Damaged(ErrorClass.SOURCE_CHANGED, f"{self.local}: block {block} is damaged")
        if self.digests.setdefault(block, digest) != digest:
            raise Damaged(ErrorClass.SOURCE_CHANGED, f"{self.local} was changed while it was sent")

    def check_source(self) -> None:
        """:raises TransferFailure: the file has changed since it was begun."""
        now = self.local.stat()
        if (now.st_size, now.st_mtime_ns, now.st_ctime_ns) != (
            self.status.st_size, self.status.st_mtime_ns, self.status.st_ctime_ns,
        ):  # fmt: skip
            raise TransferFailure(ErrorClass.SOURCE_CHANGED, f"{self.local} was changed while it was sent")

    def count(self, size_bytes: int) -> None:
        """So many more bytes left."""
        with self._lock:
            self.sent_bytes += size_bytes
            total = self.sent_bytes
        self.progress(total)


def answer_to(control: Channel, order: Operation, patience_s: float = float("inf")) -> Result | Custody | None:
    """The outcome of an operation; None when its data must come again. The router is asked while it is silent.

    :param patience_s: for an operation that waits there.
    :raises TransferFailure: it is to be said again: STALLED when the router is silent, TIMED_OUT when it only waits.
    """
    until_s, silence_s = time.monotonic() + patience_s, control.gateway.timeout_s
    while True:
        while not control.has_more(min(_ASK_EVERY_S, silence_s / 2)):
            control.send(Status(order.origin, order.seq))
            if not control.has_more(silence_s):
                raise control.failure(ErrorClass.STALLED, f"no word of {order.path}")
            if time.monotonic() > until_s:  # the router is there, and so it can be asked for others
                raise control.failure(ErrorClass.TIMED_OUT, f"no result of {order.path} yet")
        answer = control.receive()
        if isinstance(answer, Opened) or (isinstance(answer, Result) and answer.outcome == "unknown"):
            return None
        if isinstance(answer, Custody) or (isinstance(answer, Result) and answer.outcome != "pending"):
            return answer


def put(
    gateway: Gateway,
    local: AnyPath,
    path: str,
    *,
    mode: int = 0o644,
    connections: int = 2,
    progress: Progress = lambda sent_bytes: None,
    terminal: str = "",
    expires_after_s: float = EXPIRES_AFTER_S,
    routes: Sequence[Route] = ((),),
    lot: str = "",
    priority: int = 0,
    deadline: int = 0,
    most_connections: int = 0,
) -> Put:
    """Send a file. On return it is under its name at the destination, whole, checked, and on its disk.

    :param path: below the router's root; missing directories are made. :param connections: that carry blocks at once,
        on each route. :param most_connections: more than ``connections``: a controller adds and removes some on each
        route, and never has more than this. :param progress: called with the bytes sent so far, from several threads.
    :param terminal: ``HOST:PORT`` of the destination's router, when ``gateway`` is a custodian on the way there.
    :param expires_after_s: the time after which nobody tries to deliver it any more.
    :param routes: ways to ``gateway`` that are used at once: the relays of each in order, () for the direct one.
    :param lot: number of a lot at the router that the space is taken from (:mod:`stageout.overlay.lots`).
    :param priority: 0 to 10, no more than the capability allows: each step doubles its share of a link that others of
        the same owner use too. :param deadline: Unix time in seconds by which it should be there; 0: none. The earliest
        goes first among those of one priority.
    :raises TransferFailure: classified. Nothing is to be seen under the name then, or what was there before. The
        router has cancelled it; where it could not be asked to, or a custodian has the file, the failure says that it
        may still arrive until it expires. An interrupt (Ctrl-C) has it cancelled, too, if the router can be reached.
    """
    order = _order(path, mode, terminal, gateway.until(expires_after_s), allowed(gateway, priority), deadline)
    try:
        upload = Upload(gateway, Path(local), order, connections, progress, routes=routes or ((),), lot=lot)
    except OSError as problem:
        raise TransferFailure(ErrorClass.LOCAL_FILE, f"{local}: {problem.strerror}") from None
    upload.most_connections = most_connections
    try:
        result = upload.run()
    except TransferFailure as failure:
        result = _given_up(upload, failure)
    except ENDS:  # else its space there would stay taken until it expires
        if upload.asked:
            _cancelled(upload)
        raise
    assert isinstance(result, Result)
    _raise_unless_done(gateway, path, result)
    return Put(
        upload.size_bytes, upload.sent_bytes, upload.digest_name, upload.manifest, result.generation, upload.shares
    )


def _given_up(upload: Upload, failure: TransferFailure) -> Result:
    """Cancel a put that has failed, so that it does not arrive after another one. Its result, if it was executed.

    :raises TransferFailure: the same; it says so if the file may still arrive.
    """
    answer = _cancelled(upload) if upload.opened else None
    if isinstance(answer, Result) and answer.outcome == "done":
        return answer
    ended = isinstance(answer, Result) and answer.outcome in ("cancelled", "expired")
    if upload.digest_name and not ended:  # published, perhaps
        failure.message += "; it may still arrive until it expires"
    raise failure


def _cancelled(upload: Upload) -> Result | Custody | None:
    return cancelled(upload.gateway, upload.routes, upload.order)


def cancelled(gateway: Gateway, routes: Sequence[Route], order: Operation) -> Result | Custody | None:
    """The router's answer to a request to cancel a PUBLISH; None without an answer."""
    patience_s = min(GIVE_UP_S, gateway.timeout_s)
    for route in routes[:2]:
        with contextlib.suppress(TransferFailure), Channel(replace(gateway, timeout_s=patience_s), route) as way:
            way.send(Cancel(order.origin, order.seq))
            way.send(order)
            return answer_to(way, order, patience_s)
    return None


def deposit_order(
    path: str, terminal: str, mode: int, expires: int, priority: int, deadline: int, origin: str, seq: int = 1
) -> Operation:
    """The operation of a deposit: a custodian is to deliver the file to ``terminal``; parameters as of :func:`put`.

    :param origin: and ``seq``, its number there: for this file only. 32 hexadecimal digits; "" for a random one.
    """
    order = replace(_order(path, mode, terminal, expires, priority, deadline), release="custody")
    return replace(order, origin=origin or order.origin, seq=seq)


def give(
    gateway: Gateway,
    local: Path,
    order: Operation,
    *,
    connections: int = 2,
    progress: Progress = lambda sent_bytes: None,
    routes: Sequence[Route] = ((),),
    most_connections: int = 0,
    may_come_again: bool = True,
) -> Deposit:
    """Give a file to a custodian. On return it is durable there, and may be freed.

    It is not at its destination then: ask with :func:`stageout.overlay.copying.state`. Parameters as of :func:`put`.

    :param order: of :func:`deposit_order`. :param may_come_again: the same order, when this has failed: what the
        custodian has of it is kept for that, until it expires. Else it is cancelled, also by an interrupt.
    :raises TransferFailure: classified. The file must be kept then.
    """
    upload = Upload(gateway, local, order, connections, progress, routes=routes or ((),))
    upload.most_connections = most_connections
    try:
        answer = upload.run(until_custody=True, keep_result=True)
    except (TransferFailure, *ENDS) as problem:
        is_there = upload.opened if isinstance(problem, TransferFailure) else upload.asked
        if is_there and not may_come_again:
            _cancelled(upload)
        raise
    if isinstance(answer, Result):  # it was quicker than its CUSTODY
        _raise_unless_done(gateway, order.path, answer)
    return Deposit(
        gateway.server, order.terminal, order.origin, order.seq, order.expires, upload.size_bytes, upload.sent_bytes,
        "" if isinstance(answer, Result) else answer.router,
    )  # fmt: skip


def deposit(
    gateway: Gateway,
    local: Path,
    path: str,
    *,
    terminal: str,
    mode: int = 0o644,
    connections: int = 2,
    progress: Progress = lambda sent_bytes: None,
    expires_after_s: float = EXPIRES_AFTER_S,
    routes: Sequence[Route] = ((),),
    priority: int = 0,
    deadline: int = 0,
    most_connections: int = 0,
) -> Put:
    """As :func:`put`, but it is enough that the custodian has the file: on return it is durable there.

    :raises TransferFailure: as of :func:`give`.
    """
    wanted = allowed(gateway, priority)
    order = deposit_order(path, terminal, mode, gateway.until(expires_after_s), wanted, deadline, "")
    given = give(
        gateway, local, order, connections=connections, progress=progress, routes=routes,
        most_connections=most_connections, may_come_again=False,
    )  # fmt: skip
    return Put(given.size_bytes, given.sent_bytes, "", "", 0, origin=given.origin)


def allowed(gateway: Gateway, priority: int) -> int:
    """The priority, or as much of it as the capability allows."""
    most = MOST_PRIORITY
    if gateway.credential is not None:
        most = min(most, capability.read(gateway.credential.text).max_priority)
    return max(0, min(priority, most))


def _order(path: str, mode: int, terminal: str, expires: int, priority: int, deadline: int) -> Operation:
    return Operation(
        os.urandom(16).hex(), 1, "publish", path, expires, parents=True, mode=mode, terminal=terminal,
        priority=priority, deadline=min(deadline, MAX_NUMBER),
    )  # fmt: skip


def _raise_unless_done(gateway: Gateway, path: str, answer: Result) -> None:
    failure = outcomes.failure(answer, path, gateway.server)
    if failure:
        raise failure
