"""The process that delivers what is in custody, so that the daemon's loop never waits for a disk or a terminal.

Orders come as lines of JSON on its standard input, answers go to its standard output. It ends with the daemon.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from overlay_router.store import as_operation
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import Damaged, Known, Upload, answer_to
from stageout.wire import frames
from stageout.wire.overlay import BLOCK_BYTES, Cancel, Custody, Open, Operation, Result
from stageout.wire.route import address

_PATIENCE_S = 60.0


@dataclass(frozen=True)
class Order:
    """What to deliver. :param operation: as JSON. :param file: its data, "" without any. :param digests: hexadecimal.

    :param digest: their kind. :param opening: the sender's OPEN, as JSON.
    :param ca: certificates of the terminal, "" without TLS. :param cancel: tell the terminal to cancel it instead.
    """

    number: int
    terminal: str
    key_name: str
    secret: str
    operation: str
    file: str = ""
    digest: str = ""
    digests: str = ""
    opening: str = ""
    cancel: bool = False
    connections: int = 2
    ca: str = ""


@dataclass(frozen=True)
class Answer:
    """What became of an order: an outcome of the protocol, blocks that are damaged, or a failure ("" for none)."""

    number: int
    outcome: str = ""
    reason: str = ""
    generation: int = 0
    damaged: list[int] = field(default_factory=list)
    failure: str = ""
    code: int = 0
    retry_after_s: float = 0.0


class _Stopped(TransferFailure):
    """The daemon does not want it any more."""


def deliver(order: Order, stop: threading.Event) -> Answer:
    """Carry out one order; blocks until the terminal has answered."""
    operation, (host, port) = as_operation(order.operation), address(order.terminal)
    # what its origin has signed stands as it is: with its manifest, and so with its kind of digests
    digest = order.digest if operation.capability else ""
    gateway = Gateway(host, port, order.key_name, bytes.fromhex(order.secret), ca=order.ca, digest=digest)
    try:
        if order.cancel or not order.file:
            result = _execute(gateway, operation, order.cancel, stop)
        else:
            result = _send(gateway, operation, order, stop)
    except (Damaged, FileNotFoundError) as problem:
        bad = list(_damaged(order, operation))
        return Answer(order.number, damaged=bad, failure=str(problem), code=ErrorClass.SOURCE_CHANGED.code)
    except TransferFailure as failure:
        return Answer(
            order.number, failure=failure.message, code=failure.kind.code, retry_after_s=failure.retry_after_s or 0.0
        )
    except OSError as problem:
        return Answer(order.number, failure=str(problem), code=ErrorClass.LOCAL_FILE.code)
    return Answer(order.number, result.outcome, result.reason, result.generation)


def _send(gateway: Gateway, operation: Operation, order: Order, stop: threading.Event) -> Result:
    def progress(sent_bytes: int) -> None:
        if stop.is_set():
            raise _Stopped(ErrorClass.NOT_ATTEMPTED, "cancelled")

    known = Known(order.digest, _known(order))
    opening = Open(**json.loads(order.opening)) if order.opening else None
    upload = Upload(gateway, Path(order.file), operation, order.connections, progress, known, opening=opening)
    if upload.size_bytes != operation.size_bytes:
        raise Damaged(ErrorClass.SOURCE_CHANGED, f"{order.file} has {upload.size_bytes} bytes")
    return _final(upload.run(keep_result=True))


def _execute(gateway: Gateway, operation: Operation, cancel: bool, stop: threading.Event) -> Result:
    """An operation without data, or the end of one that is not wanted any more."""
    with Channel(gateway) as control:
        if cancel:
            control.send(Cancel(operation.origin, operation.seq))
        control.send(operation)
        answer = answer_to(control, operation, _PATIENCE_S)
        while isinstance(answer, Custody) and not stop.is_set():  # of the next custodian, who will say more
            answer = answer_to(control, operation)
        return _final(answer)


def _final(answer: object) -> Result:
    if not isinstance(answer, Result):
        raise TransferFailure(ErrorClass.CONNECTION_LOST, "the terminal has begun anew")
    return answer


def _known(order: Order) -> dict[int, bytes]:
    size = frames.DIGEST_BYTES
    whole = bytes.fromhex(order.digests)
    return {start // size: whole[start : start + size] for start in range(0, len(whole), size)}


def _damaged(order: Order, operation: Operation) -> Iterator[int]:
    """Blocks of the file that are not what their digests say; all of a file that is gone."""
    digest, known = frames.digests()[order.digest], _known(order)
    try:
        file = os.open(order.file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield from range(operation.blocks)
        return
    try:
        for block in range(operation.blocks):
            length = min(BLOCK_BYTES, operation.size_bytes - block * BLOCK_BYTES)
            if digest(_read(file, length, block * BLOCK_BYTES)) != known.get(block):
                yield block
    finally:
        os.close(file)


def _read(file: int, length: int, offset: int) -> bytes:
    try:
        return os.pread(file, length, offset)
    except OSError:  # a block that the disk does not give back is a damaged one
        return b""


class Carrier:
    """Orders that are carried out now, each in a thread of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stops: dict[int, threading.Event] = {}

    def take(self, message: dict[str, Any]) -> None:
        """An order, or ``{"stop": NUMBER}``."""
        if "stop" in message:
            stop = self._stops.get(message["stop"])
            if stop is not None:
                stop.set()
            return
        order, stop = Order(**message), threading.Event()
        self._stops[order.number] = stop
        threading.Thread(target=self._run, args=(order, stop), daemon=True).start()

    def _run(self, order: Order, stop: threading.Event) -> None:
        try:
            answer = deliver(order, stop)
        except Exception as problem:  # the daemon must hear of every order
            answer = Answer(order.number, failure=repr(problem), code=ErrorClass.UNKNOWN.code)
        with self._lock:
            self._stops.pop(order.number, None)
            sys.stdout.write(json.dumps(asdict(answer)) + "\n")
            sys.stdout.flush()


def main() -> None:
    """Serve until standard input ends; what is under way is dropped then and begun again by the next."""
    carrier = Carrier()
    for line in sys.stdin:
        carrier.take(json.loads(line))
    os._exit(0)


if __name__ == "__main__":
    main()
