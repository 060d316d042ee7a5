"""A published file from one router to another, through the memory of whoever asks for it, never over its disk.

Both routers see only the keys and capabilities that the asker has for each, so neither needs to trust the other.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay import outcomes
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.fetch import read
from stageout.overlay.links import Claim
from stageout.overlay.operations import Session
from stageout.overlay.sending import Sending
from stageout.wire.overlay import BLOCK_BYTES, Low, Open, Operation, Result

EXPIRES_AFTER_S = 24 * 3600


@dataclass(frozen=True)
class Copy:
    """A file that has been copied. :param generation: of its new name."""

    size_bytes: int
    generation: int


@dataclass
class _Passage:
    """What :class:`~stageout.overlay.sending.Sending` asks of a file that lies at another router.

    :param version: generation of the source, the same for all blocks.
    """

    source: Gateway
    source_path: str
    version: int
    gateway: Gateway
    order: Operation
    progress: Callable[[int], None]
    connections: int = 1
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
                offset = block * BLOCK_BYTES
                self._parts = read(self.source, self.source_path, offset, generation=self.version)
            data = next(self._parts, b"")
            self._next = block + 1
        if len(data) != min(BLOCK_BYTES, self.order.size_bytes - block * BLOCK_BYTES):
            raise TransferFailure(ErrorClass.SOURCE_CHANGED, f"{self.source_path} was changed while it was copied")
        self.digests[block] = channel.digest(data)
        return memoryview(data)

    def publish(self, tid: int, channel: Channel) -> Operation:
        """The PUBLISH, when all blocks were read."""
        digests = (self.digests[block] for block in range(self.blocks))
        return replace(self.order, tid=tid, manifest=hashlib.sha256(b"".join(digests)).hexdigest())

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
    progress: Callable[[int], None] = lambda sent_bytes: None,
) -> Copy:
    """Copy a published file, with its permissions. On return it is under its name at the target, whole and on its disk.

    :raises TransferFailure: classified; SOURCE_CHANGED when the source was replaced meanwhile.
    """
    with Session(source) as session:
        found = session.stat(source_path)
    if found.kind != "file":
        raise TransferFailure(ErrorClass.CONFLICT, f"{source_path}: not a file", source.server)
    order = Operation(
        secrets.token_hex(16), 1, "publish", target_path, int(time.time()) + EXPIRES_AFTER_S, parents=True,
        mode=found.mode, size_bytes=found.size_bytes, blocks=-(-found.size_bytes // BLOCK_BYTES),
    )  # fmt: skip
    passage = _Passage(source, source_path, found.generation, target, order, progress)
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    sending = Sending(passage, nothing, ((),), target.timeout_s)
    try:
        answer = sending.run()
        if not isinstance(answer, Result):
            raise TransferFailure(ErrorClass.NOT_SUPPORTED, f"{target.server} took custody unasked", target.server)
        failure = outcomes.failure(answer, target_path, target.server)
        if failure:
            raise failure
        sending.say(Low(order.origin, order.seq))
    finally:
        sending.close()
        os.close(nothing)
    return Copy(found.size_bytes, answer.generation)
