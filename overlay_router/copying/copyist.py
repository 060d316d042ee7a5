"""The process that carries out one copy: a file of this router to another one, in the name of who commanded it.

The order is JSON on its standard input; on its standard output come lines of JSON, the last of which is the end. It is
killed to stop it: what the other router has then is never to be seen, and goes on when the same copy is begun again.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stageout.core import log
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import Damaged, Known, Upload, answer_to
from stageout.overlay.wire import frames
from stageout.overlay.wire.frames import DIGEST_BYTES
from stageout.overlay.wire.messages import BLOCK_BYTES, Cancel, Copy, Open, Operation, Result, Status
from stageout.overlay.wire.route import Route, address

_SAY_EVERY_S = 0.5
_PATIENCE_S = 60.0
_CONNECTIONS = 2


@dataclass(frozen=True)
class Order:
    """The file to copy. :param file: that can be opened, whatever happens to its name meanwhile.

    :param key_name: that the other router knows this one by, with its secret in hexadecimal digits. :param routes: to
        that router. :param ca: its certificates, "" without TLS. :param cancel: tell it to cancel the copy instead.
    """

    copy: Copy
    file: str
    key_name: str
    secret: str = field(repr=False)
    routes: tuple[Route, ...] = ((),)
    ca: str = ""
    cancel: bool = False
    digests: str = ""
    digest: str = ""

    @property
    def known(self) -> Known | None:
        """The digests that the blocks must have, as far as it can be looked at here."""
        if self.digest not in frames.digests():
            return None
        whole = bytes.fromhex(self.digests)
        starts = range(0, len(whole), DIGEST_BYTES)
        return Known(self.digest, {block: whole[at : at + DIGEST_BYTES] for block, at in enumerate(starts)})


class Progress:
    """Says now and then how many bytes have left; called from several threads."""

    def __init__(self) -> None:
        self._lock, self._said_s = threading.Lock(), float("-inf")

    def __call__(self, moved_bytes: int) -> None:
        """So many bytes have left."""
        with self._lock:
            if time.monotonic() - self._said_s >= _SAY_EVERY_S:
                self._said_s = time.monotonic()
                _say({"moved_bytes": moved_bytes})


class _Told(Upload):
    """An upload that says, before the other router can hear of it, that it may have."""

    def ask(self) -> Open:
        """OPEN, the same on every connection."""
        self.progress(self.sent_bytes)
        return super().ask()

    def take_digest(self, block: int, data: memoryview, channel: Channel) -> None:
        """Keep the digest of a block that was read. :raises Damaged: CONTENT_MISMATCH, it is not what was published."""
        try:
            super().take_digest(block, data, channel)
        except Damaged:
            self.check_source()
            if self.known is None:
                raise
            text = f"block {block} is not what was published: the disk of the first router has damaged it"
            raise Damaged(ErrorClass.CONTENT_MISMATCH, text) from None


def carry_out(order: Order) -> Result:
    """Bring the file there, or have it cancelled; the other router's answer. :raises TransferFailure: classified."""
    copy = order.copy
    host, port = address(copy.terminal)
    gateway = Gateway(host, port, order.key_name, bytes.fromhex(order.secret), ca=order.ca)
    operation = Operation(
        copy.origin, copy.seq, "publish", copy.path, copy.expires, absent=copy.absent, generation=copy.generation,
        parents=True, mode=copy.mode, size_bytes=copy.size_bytes, blocks=-(-copy.size_bytes // BLOCK_BYTES),
        capability=copy.capability, warrant=copy.warrant,
    )  # fmt: skip
    if order.cancel:
        return _cancelled(gateway, operation, order.routes)
    opening = Open(
        copy.origin, copy.seq, copy.path, copy.size_bytes, BLOCK_BYTES, copy.expires, capability=copy.capability,
        warrant=copy.warrant,
    )  # fmt: skip
    upload = _Told(gateway, Path(order.file), operation, _CONNECTIONS, Progress(), order.known, routes=order.routes,
                   opening=opening)  # fmt: skip
    if upload.size_bytes != copy.size_bytes:
        raise TransferFailure(ErrorClass.SOURCE_CHANGED, f"{copy.source} has {upload.size_bytes} bytes")
    return _final(upload.run(keep_result=True))


def _cancelled(gateway: Gateway, operation: Operation, routes: tuple[Route, ...]) -> Result:
    with Channel(gateway, routes[0]) as control:
        control.send(Status(operation.origin, operation.seq))  # its end is said also to who has no right any more
        known = control.receive()
        if isinstance(known, Result) and known.outcome not in ("pending", "unknown"):
            return known
        control.send(Cancel(operation.origin, operation.seq))
        control.send(operation)
        result = _final(answer_to(control, operation, _PATIENCE_S))
        return replace(result, outcome="cancelled") if result.outcome == "failed" else result  # refused


def _final(answer: object) -> Result:
    if not isinstance(answer, Result):
        raise TransferFailure(ErrorClass.CONNECTION_LOST, "the other router has begun anew")
    return answer


def read_order(facts: Mapping[str, Any]) -> Order:
    """An order as it was written: ``dataclasses.asdict``, as JSON."""
    routes = tuple(tuple(route) for route in facts["routes"])
    return Order(**{**facts, "copy": Copy(**facts["copy"]), "routes": routes})


def _say(message: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Carry out the order and say how it ended."""
    try:
        result = carry_out(read_order(json.loads(sys.stdin.read())))
    except TransferFailure as failure:
        retry = failure.kind.retryable and not isinstance(failure, Damaged)
        _say({"problem": failure.message, "code": failure.kind.code, "again": retry})
    except OSError as problem:
        _say({"problem": str(problem), "code": ErrorClass.LOCAL_FILE.code, "again": False})
    else:
        _say({"outcome": result.outcome, "reason": result.reason, "generation": result.generation})


if __name__ == "__main__":
    log.open_child_log()
    main()
