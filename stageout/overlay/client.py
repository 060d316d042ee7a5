"""Whole files to a router; the way back is in :mod:`stageout.overlay.fetch`.

A put asks for a transfer number, sends blocks over several connections at once, and ends with PUBLISH, which the router
executes when every block is on its disk and fits the manifest. A connection that is lost costs what was not yet
STAGED: the same transfer goes on where it was.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay import outcomes
from stageout.overlay.channel import Channel, Gateway
from stageout.wire.overlay import BLOCK_BYTES, Attach, Low, NoSpace, Open, Opened, Operation, Result, Staged

EXPIRES_AFTER_S = 24 * 3600
_RESUMES = 3
_RESUMABLE = frozenset({ErrorClass.CONNECTION_LOST, ErrorClass.STALLED})
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Put:
    """A file that is at its destination. :param sent_bytes: over the network, with what was sent again."""

    size_bytes: int
    sent_bytes: int
    digest_name: str
    manifest: str
    generation: int


@dataclass
class _Upload:
    """One put. Digests and what is STAGED outlive a lost connection."""

    gateway: Gateway
    local: Path
    path: str
    mode: int
    connections: int
    progress: Progress
    origin: str = field(default_factory=lambda: secrets.token_hex(16))
    digests: dict[int, bytes] = field(default_factory=dict)
    staged: set[int] = field(default_factory=set)
    sent_bytes: int = 0

    def __post_init__(self) -> None:
        self.status = self.local.stat()
        self.size_bytes = self.status.st_size
        self.blocks = -(-self.size_bytes // BLOCK_BYTES)
        self.expires = int(time.time()) + EXPIRES_AFTER_S
        self._lock = threading.Lock()

    def run(self) -> Put:
        with Channel(self.gateway) as control:
            tid = self._open(control)
            senders = _Senders(self, tid) if tid else None
            try:
                result = self._until_result(control, tid, senders)
            finally:
                if senders:
                    senders.close()
            control.send(Low(self.origin, 1))
            self._check_source()
            return Put(self.size_bytes, self.sent_bytes, control.digest_name, self._manifest(), result.generation)

    def _open(self, control: Channel) -> int:
        """The transfer number; 0 when the operation is done already."""
        control.send(Open(self.origin, 1, self.path, self.size_bytes, BLOCK_BYTES, self.expires))
        answer = control.receive()
        if isinstance(answer, NoSpace):
            raise TransferFailure(
                ErrorClass.NO_SPACE_REMOTE,
                f"{self.gateway.server} has no room for {self.size_bytes} bytes",
                self.gateway.server,
                float(answer.retry_after_s),
            )
        if isinstance(answer, Result):
            self._raise_unless_done(answer)
            return 0
        if not isinstance(answer, Opened):
            raise control.failure(ErrorClass.NOT_SUPPORTED, f"{type(answer).__name__} where OPENED was due")
        self.staged = {block for first, end in answer.staged for block in range(first, end)}
        return answer.tid

    def _until_result(self, control: Channel, tid: int, senders: _Senders | None) -> Result:
        published = False
        while True:
            if not published and (senders is None or senders.all_read()):
                control.send(self._publish(tid))
                published = True
            answer = control.receive()
            if isinstance(answer, Staged):
                self.staged |= {block for first, end in answer.staged for block in range(first, end)}
            elif isinstance(answer, Opened):
                raise control.failure(ErrorClass.CONTENT_MISMATCH, "the router found that blocks were damaged")
            elif isinstance(answer, Result):
                self._raise_unless_done(answer)
                return answer

    def _publish(self, tid: int) -> Operation:
        return Operation(
            self.origin, 1, "publish", self.path, self.expires, tid=tid, size_bytes=self.size_bytes,
            blocks=self.blocks, manifest=self._manifest(), parents=True, mode=self.mode,
        )  # fmt: skip

    def _manifest(self) -> str:
        return hashlib.sha256(b"".join(self.digests[block] for block in range(self.blocks))).hexdigest()

    def _raise_unless_done(self, answer: Result) -> None:
        failure = outcomes.failure(answer, self.path, self.gateway.server)
        if failure:
            raise failure

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

    def __init__(self, upload: _Upload, tid: int) -> None:
        self._upload, self._tid = upload, tid
        self._failure: TransferFailure | None = None
        self._todo = iter([block for block in range(upload.blocks) if block not in upload.staged])
        self._lock = threading.Lock()
        self._file = os.open(upload.local, os.O_RDONLY | os.O_CLOEXEC)
        wanted = max(1, min(upload.connections, upload.blocks - len(upload.staged)))
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(wanted)]
        for thread in self._threads:
            thread.start()

    def all_read(self) -> bool:
        """Wait until every block was read and handed to the network. :raises TransferFailure: a connection's."""
        for thread in self._threads:
            thread.join()
        if self._failure:
            raise self._failure
        return True

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
            raise TransferFailure(ErrorClass.SOURCE_CHANGED, f"{self._upload.local} became shorter while it was sent")
        self._upload.digests[block] = channel.digest(data)
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
) -> Put:
    """Send a file. On return it is under its name at the destination, whole, checked, and on its disk.

    :param path: below the router's root; missing directories are made. :param connections: that carry blocks at once.
    :param progress: called with the bytes sent so far, from several threads.
    :raises TransferFailure: classified. Nothing is to be seen under the name then, or what was there before.
    """
    upload = _Upload(gateway, local, path, mode, connections, progress)
    for attempt in itertools.count():
        try:
            return upload.run()
        except TransferFailure as failure:
            if failure.kind not in _RESUMABLE or attempt == _RESUMES:
                raise
            time.sleep(min(4.0, 0.25 * 2**attempt))
    raise AssertionError("unreachable")
