"""Whole files to a router; the way back is in :mod:`stageout.overlay.fetch`.

A put asks for a transfer number, sends blocks over several connections at once, and ends with PUBLISH, which the router
executes when every block is on its disk and fits the manifest. A connection that is lost costs what was not yet
STAGED: the same transfer goes on where it was. With a ``terminal`` the router that is asked is a custodian: it spools
the file and delivers it there.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay import outcomes
from stageout.overlay.channel import Channel, Gateway
from stageout.wire import frames
from stageout.wire.overlay import (
    BLOCK_BYTES,
    Attach,
    Custody,
    Low,
    NoSpace,
    Open,
    Opened,
    Operation,
    Result,
    Staged,
    Status,
)

EXPIRES_AFTER_S = 24 * 3600
_RESUMES = 3
_RESUMABLE = frozenset({ErrorClass.CONNECTION_LOST, ErrorClass.STALLED, ErrorClass.CONTENT_MISMATCH})
_PAUSE_MAX_S = 30.0
_ASK_EVERY_S = 10.0
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Put:
    """A file that is at its destination. :param sent_bytes: over the network, with what was sent again."""

    size_bytes: int
    sent_bytes: int
    digest_name: str
    manifest: str
    generation: int


@dataclass(frozen=True)
class Deposit:
    """A file in a custodian's hands: what is needed to ask for it later. :param expires: Unix time in seconds."""

    custodian: str
    terminal: str
    origin: str
    seq: int
    expires: int
    size_bytes: int
    sent_bytes: int


@dataclass(frozen=True)
class Known:
    """Digests that the blocks of a file must have. :param name: of their kind, as in HELLO."""

    name: str
    digests: Mapping[int, bytes]


class Damaged(TransferFailure):
    """The file is not what it was, or not what its digests say."""


@dataclass
class Upload:
    """One file on its way to a router. Digests and what is STAGED outlive a lost connection.

    :param order: the PUBLISH: identity, path, attributes, terminal. :param known: digests to be checked against.
    """

    gateway: Gateway
    local: Path
    order: Operation
    connections: int
    progress: Progress
    known: Known | None = None
    digests: dict[int, bytes] = field(default_factory=dict)
    staged: set[int] = field(default_factory=set)
    sent_bytes: int = 0
    digest_name: str = ""

    def __post_init__(self) -> None:
        self.status = self.local.stat()
        self.size_bytes = self.status.st_size
        self.blocks = -(-self.size_bytes // BLOCK_BYTES)
        self._in_custody = False
        self._lock = threading.Lock()

    def run(self, until_custody: bool = False) -> Result | Custody:
        """The router's answer, after as many connections as it takes. :raises TransferFailure: classified."""
        for attempt in itertools.count():
            try:
                return self._once(until_custody)
            except TransferFailure as failure:
                if self._in_custody and failure.kind.retryable and time.time() < self.order.expires:
                    time.sleep(min(_PAUSE_MAX_S, 0.25 * 2 ** min(attempt, 10)))  # it is on its way: nothing begins anew
                elif failure.kind not in _RESUMABLE or attempt == _RESUMES:
                    raise
                else:
                    time.sleep(0.25 * 2**attempt)
        raise AssertionError("unreachable")

    @property
    def manifest(self) -> str:
        """The digest of all blocks' digests, in hexadecimal digits."""
        return hashlib.sha256(b"".join(self.digests[block] for block in range(self.blocks))).hexdigest()

    def _once(self, until_custody: bool) -> Result | Custody:
        with Channel(self.gateway) as control:
            self.digest_name = control.digest_name
            answer = self._open(control)
            if isinstance(answer, Opened):
                answer = self._send(control, answer)
            self._in_custody = isinstance(answer, Custody)
            if self._in_custody and not until_custody:
                answer = self._until_result(control)
            if isinstance(answer, Result) and answer.outcome == "done" and not until_custody:
                control.send(Low(self.order.origin, self.order.seq))
            return answer

    def _open(self, control: Channel) -> Opened | Result | Custody:
        """What there is to do; what is STAGED already is known afterwards."""
        order = self.order
        control.send(
            Open(order.origin, order.seq, order.path, self.size_bytes, BLOCK_BYTES, order.expires, order.terminal)
        )
        answer = control.receive()
        if isinstance(answer, NoSpace):
            raise TransferFailure(
                ErrorClass.NO_SPACE_REMOTE,
                f"{self.gateway.server} has no room for {self.size_bytes} bytes",
                self.gateway.server,
                float(answer.retry_after_s),
            )
        if isinstance(answer, Opened):
            self.staged = {block for first, end in answer.staged for block in range(first, end)}
        elif not isinstance(answer, (Result, Custody)):
            raise control.failure(ErrorClass.NOT_SUPPORTED, f"{type(answer).__name__} where OPENED was due")
        return answer

    def _send(self, control: Channel, opened: Opened) -> Result | Custody:
        """Blocks, then the PUBLISH; until the first answer to it."""
        senders = _Senders(self, opened.tid)
        try:
            senders.all_read()
            self._digest_rest(control)
            self._check_source()
            control.send(
                replace(self.order, tid=opened.tid, size_bytes=self.size_bytes, blocks=self.blocks,
                        manifest=self.manifest)
            )  # fmt: skip
            return self._answer(control)
        finally:
            senders.close()

    def _answer(self, control: Channel) -> Result | Custody:
        """The next message that says what became of the operation; the router is asked while it is silent."""
        asked = False
        while True:
            while not control.has_more(min(_ASK_EVERY_S, self.gateway.timeout_s / 2)):
                control.send(Status(self.order.origin, self.order.seq))
                asked = True
                if not control.has_more(self.gateway.timeout_s):
                    raise control.failure(ErrorClass.STALLED, f"silent for {self.gateway.timeout_s:.0f} s")
            answer = control.receive()
            if isinstance(answer, Opened):
                raise control.failure(ErrorClass.CONTENT_MISMATCH, "the router found that blocks were damaged")
            if isinstance(answer, Staged) and asked and sum(end - first for first, end in answer.staged) < self.blocks:
                raise control.failure(ErrorClass.CONNECTION_LOST, "blocks were lost on the way")
            if isinstance(answer, Custody):
                return answer
            if isinstance(answer, Result) and answer.outcome == "unknown":
                raise control.failure(ErrorClass.CONNECTION_LOST, "the router has lost its records of this transfer")
            if isinstance(answer, Result) and answer.outcome != "pending":
                return answer

    def _until_result(self, control: Channel) -> Result:
        while True:
            answer = self._answer(control)
            if isinstance(answer, Result):
                return answer

    def _digest_rest(self, control: Channel) -> None:
        """Digests of blocks that an earlier process sent: from what is known, or by reading them again."""
        same = self.known.digests if self.known and self.known.name == control.digest_name else {}
        with self.local.open("rb") as file:
            for block in range(self.blocks):
                if block not in self.digests:
                    data = same.get(block) or os.pread(file.fileno(), BLOCK_BYTES, block * BLOCK_BYTES)
                    self.digests[block] = data if block in same else control.digest(data)

    def take_digest(self, block: int, data: memoryview, channel: Channel) -> None:
        """Digest a block that is about to be sent. :raises Damaged: it is not the one that is known."""
        digest = channel.digest(data)
        if self.known is not None:
            mine = digest if self.known.name == channel.digest_name else frames.digests()[self.known.name](data)
            if mine != self.known.digests.get(block):
                raise Damaged(ErrorClass.SOURCE_CHANGED, f"{self.local}: block {block} is damaged")
        self.digests[block] = digest

    def _check_source(self) -> None:
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


class _Senders:
    """Connections that send the blocks which are not yet there, each in a thread of its own."""

    def __init__(self, upload: Upload, tid: int) -> None:
        self._upload, self._tid = upload, tid
        self._failure: TransferFailure | None = None
        self._todo = iter([block for block in range(upload.blocks) if block not in upload.staged])
        self._lock = threading.Lock()
        self._file = os.open(upload.local, os.O_RDONLY | os.O_CLOEXEC)
        wanted = max(1, min(upload.connections, upload.blocks - len(upload.staged)))
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(wanted)]
        for thread in self._threads:
            thread.start()

    def all_read(self) -> None:
        """Wait until every block was read and handed to the network. :raises TransferFailure: a connection's."""
        for thread in self._threads:
            thread.join()
        if self._failure:
            raise self._failure

    def close(self) -> None:
        """Wait for the threads, which end at once when their connections do."""
        for thread in self._threads:
            thread.join()
        os.close(self._file)

    def _run(self) -> None:
        try:
            with Channel(self._upload.gateway) as channel:
                channel.send(Attach(self._tid))
                buffer = memoryview(bytearray(BLOCK_BYTES))
                for block in self._next():
                    self._send(channel, block, buffer)
                channel.finish()
        except TransferFailure as failure:
            self._failure = self._failure or failure

    def _next(self) -> Iterator[int]:
        while self._failure is None:
            with self._lock:
                block = next(self._todo, None)
            if block is None:
                return
            yield block

    def _send(self, channel: Channel, block: int, buffer: memoryview) -> None:
        offset = block * BLOCK_BYTES
        data = buffer[: min(BLOCK_BYTES, self._upload.size_bytes - offset)]
        if os.preadv(self._file, [data], offset) != len(data):
            raise Damaged(ErrorClass.SOURCE_CHANGED, f"{self._upload.local} became shorter while it was sent")
        self._upload.take_digest(block, data, channel)
        channel.send_block(self._tid, block, data)
        self._upload.count(len(data))


def put(
    gateway: Gateway,
    local: Path,
    path: str,
    *,
    mode: int = 0o644,
    connections: int = 2,
    progress: Progress = lambda sent_bytes: None,
    terminal: str = "",
    expires_after_s: float = EXPIRES_AFTER_S,
) -> Put:
    """Send a file. On return it is under its name at the destination, whole, checked, and on its disk.

    :param path: below the router's root; missing directories are made. :param connections: that carry blocks at once.
    :param progress: called with the bytes sent so far, from several threads.
    :param terminal: ``HOST:PORT`` of the destination's router, when ``gateway`` is a custodian on the way there.
    :param expires_after_s: the time after which nobody tries to deliver it any more.
    :raises TransferFailure: classified. Nothing is to be seen under the name then, or what was there before; a
        custodian that has the file may still deliver it until it expires.
    """
    order = _order(path, mode, terminal, expires_after_s)
    upload = Upload(gateway, local, order, connections, progress)
    result = upload.run()
    assert isinstance(result, Result)
    _raise_unless_done(gateway, path, result)
    return Put(upload.size_bytes, upload.sent_bytes, upload.digest_name, upload.manifest, result.generation)


def deposit(
    gateway: Gateway,
    local: Path,
    path: str,
    terminal: str,
    *,
    mode: int = 0o644,
    connections: int = 2,
    progress: Progress = lambda sent_bytes: None,
    expires_after_s: float = EXPIRES_AFTER_S,
) -> Deposit:
    """Give a file to a custodian, which delivers it to ``terminal``. On return it is durable there, and may be freed.

    It is not at its destination then: ask with :func:`outcome`. Parameters as of :func:`put`.

    :raises TransferFailure: classified. The file must be kept then.
    """
    order = replace(_order(path, mode, terminal, expires_after_s), release="custody")
    upload = Upload(gateway, local, order, connections, progress)
    answer = upload.run(until_custody=True)
    if isinstance(answer, Result):  # it was quicker than its CUSTODY
        _raise_unless_done(gateway, path, answer)
    return Deposit(
        gateway.server, terminal, order.origin, order.seq, order.expires, upload.size_bytes, upload.sent_bytes
    )


def outcome(gateway: Gateway, origin: str, seq: int) -> Result | Custody:
    """What a custodian says of a deposit: CUSTODY while it holds it, else its RESULT ("unknown": it knows nothing).

    :raises TransferFailure: it was not reached.
    """
    with Channel(gateway) as channel:
        channel.send(Status(origin, seq))
        answer = channel.receive()
    if not isinstance(answer, (Result, Custody)):
        raise channel.failure(ErrorClass.NOT_SUPPORTED, f"{type(answer).__name__} where RESULT was due")
    return answer


def _order(path: str, mode: int, terminal: str, expires_after_s: float) -> Operation:
    expires = int(time.time() + expires_after_s)
    return Operation(
        secrets.token_hex(16), 1, "publish", path, expires, parents=True, mode=mode, terminal=terminal
    )  # fmt: skip


def _raise_unless_done(gateway: Gateway, path: str, answer: Result) -> None:
    failure = outcomes.failure(answer, path, gateway.server)
    if failure:
        raise failure
