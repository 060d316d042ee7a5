"""The process that delivers what is in custody, so that the daemon's loop never waits for a disk or a terminal.

Orders come as lines of JSON on its standard input, answers go to its standard output. It ends with the daemon.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from overlay_router.custodians.said import DAMAGED, LATE
from overlay_router.custodians.spooled import WAITS_S, Growth, Spooled, Undigested, has_lost
from overlay_router.data.ring import Rings
from overlay_router.local.as_text import as_operation
from stageout.core import log
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.core.threads import NoThread, started
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import Damaged, answer_to
from stageout.overlay.wire import frames
from stageout.overlay.wire.messages import BLOCK_BYTES, Cancel, Custody, Low, Open, Operation, Result, Staged, Status
from stageout.overlay.wire.route import address

_PATIENCE_S = 60.0
_LOST = "whether it has happened is not known, for {} has lost its records: look before you do it again"
#: As in a worker: a thread that has data does not wait long for one that computes.
_SWITCH_INTERVAL_S = 0.0002


@dataclass(frozen=True)
class Order:
    """The operation to deliver.

    :param operation: as JSON. :param file: its data, "" without any. :param digests: hexadecimal.

    :param digest: their kind. :param opening: the sender's OPEN, as JSON. :param comes: number by which the
        file still comes in: ``blocks`` are here, more are told, or shown by those who receive them, and ``operation``
        only says what they are for until it is told too; 0: all of it is here.
    :param said_to: the records of the next hop that it may have been said to before, without an answer; None: to none.
    :param store: those that it may be said to, as is recorded (of what comes in: those that are known); None: those are
        to be told first (:class:`Note`).
    :param passes: what was sent from memory need not be on the disk. :param passed: blocks that only the next hop has.
    :param low: all of the origin up to that number is settled, which its terminal may not know; 0: nothing is known.
    :param ca: certificates of the terminal, "" without TLS. :param cancel: tell the terminal to cancel it instead;
        "data": only to drop its data; "late": it has expired, so only what was executed counts; "damaged": nobody has
        its data any more, but the next hop, or another custodian (``copies``).
    :param asks: only whether another custodian has delivered it.
    """

    number: int
    terminal: str
    key_name: str
    secret: str = field(repr=False)
    operation: str
    file: str = ""
    digest: str = ""
    digests: str = ""
    opening: str = ""
    cancel: str = ""
    connections: int = 5
    ca: str = ""
    comes: int = 0
    asks: bool = False
    blocks: list[list[Any]] = field(default_factory=list)
    passed: list[list[Any]] = field(default_factory=list)
    passes: bool = False
    said_to: str | None = None
    store: str | None = None
    copies: int = 1
    low: int = 0


@dataclass(frozen=True)
class Note:
    """The fate of blocks that are not on the disk here, in the order in which it is said.

    :param passed: position and digest in hexadecimal digits: the next hop has them on its disk. :param gone: they must
        be sent again, and are nowhere here. :param waits: the next hop has all that it needs, and has not answered.
    :param sends: blocks leave although it waited. :param store: the records that the next hop has.
    :param says: the operation is to be said to these: that waits for ``said``.
    """

    number: int
    passed: list[list[Any]]
    gone: list[int]
    waits: bool = False
    sends: bool = False
    store: str | None = None
    says: bool = False


@dataclass(frozen=True)
class Answer:
    """The outcome of an order: an outcome of the protocol, blocks that are damaged, or a failure ("" for none).

    :param code: class of the failure, also of one that the terminal has recorded. :param waits: nobody has delivered it
        yet, which was asked. :param said: the next hop may have heard the operation.
    """

    number: int
    outcome: str = ""
    reason: str = ""
    generation: int = 0
    damaged: list[int] = field(default_factory=list)
    failure: str = ""
    code: int = 0
    retry_after_s: float = 0.0
    waits: bool = False
    said: bool = False


def deliver(order: Order, growth: Growth) -> Answer:
    """Carry out one order; blocks until the terminal has answered."""
    operation, (host, port) = as_operation(order.operation), address(order.terminal)
    # what its origin has signed stands as it is: with its manifest, and so with its kind of digests
    opening = Open(**json.loads(order.opening)) if order.opening else None
    digest = order.digest if operation.capability or (opening and opening.capability) else ""
    gateway = Gateway(host, port, order.key_name, bytes.fromhex(order.secret), ca=order.ca, digest=digest)
    try:
        if order.file and not order.cancel and not order.asks:
            frames.digest_of_kind(order.digest)
        if order.cancel == "data":
            return _drop(gateway, order, operation)
        if order.asks and not order.cancel:
            return _asked(gateway, operation, order.number)
        if order.cancel == "damaged":
            return _after_damage(gateway, operation, order)
        if order.cancel or not order.file:
            found = _found(gateway, operation, order, growth, opening) if order.file else None
            result = found or _execute(gateway, operation, order, growth)
        else:
            result = _send(gateway, operation, order, growth, opening)
    except frames.NoDigest as problem:
        return Answer(order.number, failure=str(problem), code=ErrorClass.PLUGIN_BROKEN.code)
    except Undigested as problem:
        growth.lose()
        return Answer(order.number, failure=problem.message, code=problem.kind.code)
    except (Damaged, FileNotFoundError) as problem:
        bad = list(_damaged(order, operation.size_bytes, growth.on_disk()))
        return Answer(order.number, damaged=bad, failure=str(problem), code=ErrorClass.SOURCE_CHANGED.code)
    except TransferFailure as problem:
        failure = growth.stopped or problem
        return Answer(
            order.number, failure=failure.message, code=failure.kind.code, retry_after_s=failure.retry_after_s or 0.0
        )
    except OSError as problem:
        return Answer(order.number, failure=str(problem), code=ErrorClass.LOCAL_FILE.code)
    return Answer(order.number, result.outcome, result.reason, result.generation, code=result.code)


def _send(gateway: Gateway, operation: Operation, order: Order, growth: Growth, opening: Open | None) -> Result:
    upload = Spooled(gateway, Path(order.file), operation, growth, order.digest, opening, order.connections)
    if upload.size_bytes != operation.size_bytes:
        raise Damaged(ErrorClass.SOURCE_CHANGED, f"{order.file} has {upload.size_bytes} bytes")
    try:
        return upload.met(order.said_to) or _final(upload.run(keep_result=True))
    finally:
        upload.settle()


def _found(gateway: Gateway, operation: Operation, order: Order, growth: Growth, opening: Open | None) -> Result | None:
    """Of a file that is not wanted any more: DONE, if it is at a terminal that has lost its records since it was asked.

    Such a terminal would take the file for one that it never had, and call it cancelled.
    """
    if not order.said_to:
        return None
    upload = Spooled(gateway, Path(order.file), operation, growth, order.digest, opening, order.connections)
    return upload.found_at(order.said_to)


def _asked(gateway: Gateway, operation: Operation, number: int) -> Answer:
    with Channel(gateway) as control:
        control.send(Status(operation.origin, operation.seq))
        answer = control.receive()
    if isinstance(answer, Result) and answer.outcome not in ("pending", "unknown"):
        return Answer(number, answer.outcome, answer.reason, answer.generation, code=answer.code)
    return Answer(number, waits=True)


def _after_damage(gateway: Gateway, operation: Operation, order: Order) -> Answer:
    """The outcome of an operation whose data are nowhere else any more; data whole at its next hop go on there."""
    with Channel(gateway) as control:
        if has_lost(control, order.said_to, operation):
            return Answer(order.number, "lost", f"{DAMAGED}, and {_LOST.format(gateway.server)}")
        control.send(Status(operation.origin, operation.seq))
        known: object = control.receive()
        if _has_whole(known, operation):
            control.send(operation)
            known = answer_to(control, operation, _PATIENCE_S)
        if not _says(known) and order.copies > 1:
            return Answer(order.number, waits=True)
        if not _says(known):
            control.send(Cancel(operation.origin, operation.seq))  # what is there of it is never whole
            control.send(Status(operation.origin, operation.seq) if operation.terminal else operation)
            known = answer_to(control, operation, _PATIENCE_S)
            if (isinstance(known, Result) and known.outcome != "done") or known is None:
                return Answer(order.number, "lost", DAMAGED)
    if isinstance(known, Result) and known.outcome != "pending":
        return Answer(order.number, known.outcome, known.reason, known.generation, code=known.code)
    return Answer(order.number, waits=True)


def _says(known: object) -> bool:
    """Tell whether the next hop has an operation, or its end."""
    return isinstance(known, Custody) or (isinstance(known, Result) and known.outcome != "unknown")


def _has_whole(answer: object, operation: Operation) -> bool:
    """Tell whether all data are there: it waits for something, or has not heard what they are for."""
    return isinstance(answer, Staged) and sum(end - start for start, end in answer.staged) == operation.blocks > 0


def _drop(gateway: Gateway, order: Order, operation: Operation) -> Answer:
    """Have the terminal drop data that nobody here goes on with."""
    with Channel(gateway) as control:
        control.send(Cancel(operation.origin, operation.seq, data_only=True))
        control.receive()
    return Answer(order.number, outcome="dropped")


def _execute(gateway: Gateway, operation: Operation, order: Order, growth: Growth) -> Result:
    """An operation without data, or the end of one that is not wanted any more.

    It is not said again to a terminal that has lost its records, which would execute it once more.
    """
    with Channel(gateway) as control:
        is_lost = has_lost(control, order.said_to, operation)
        if order.cancel == "late":
            if is_lost:
                text = f"{LATE}, and {_LOST.format(gateway.server)}"
                return Result(operation.origin, operation.seq, "expired", text)
            control.send(Status(operation.origin, operation.seq))
            known = control.receive()
            if isinstance(known, Result) and known.outcome not in ("pending", "unknown"):
                return known
        if is_lost and not order.file and not operation.may_exist:
            text = _LOST.format(gateway.server)
            return Result(operation.origin, operation.seq, "failed", text, code=ErrorClass.CONFLICT.code)
        if order.cancel:
            control.send(Cancel(operation.origin, operation.seq))
        recalls = bool(order.cancel and operation.terminal)
        if not recalls:
            growth.say(control.store)
            growth.was_said = True
        growth.woken_by(control.abort)
        control.send(Status(operation.origin, operation.seq) if recalls else operation)
        if not control.has_more(WAITS_S):
            growth.waits()
            if order.low and not recalls:
                control.send(Low(operation.origin, order.low))
                control.send(operation)
        answer = answer_to(control, operation, _PATIENCE_S)
        while isinstance(answer, Custody) and not growth.is_stopped:  # of the next custodian, who will say more
            answer = answer_to(control, operation)
        if answer is None and recalls:  # the next custodian does not have it, and nobody gives it to that one any more
            answer = Result(operation.origin, operation.seq, "cancelled")
        return _ended(_final(answer), order)


def _ended(result: Result, order: Order) -> Result:
    """An operation that had no result before it was cancelled because it has expired is expired."""
    if order.cancel == "late" and result.outcome in ("cancelled", "failed"):
        return Result(result.origin, result.seq, "expired", LATE)
    return result


def _final(answer: object) -> Result:
    if not isinstance(answer, Result):
        raise TransferFailure(ErrorClass.CONNECTION_LOST, "the terminal has begun anew")
    return answer


def _known(order: Order) -> dict[int, bytes]:
    size = frames.DIGEST_BYTES
    whole = bytes.fromhex(order.digests)
    known = {start // size: whole[start : start + size] for start in range(0, len(whole), size)}
    return {**known, **_blocks(order.blocks), **_blocks(order.passed)}


def _blocks(told: Iterable[Sequence[Any]]) -> dict[int, bytes]:
    """Positions and digests."""
    return {int(block): bytes.fromhex(digest) for block, digest in told}


def _damaged(order: Order, size_bytes: int, known: Mapping[int, bytes]) -> Iterator[int]:
    """Blocks of the file that are not what their digests say; all of a file that is gone.

    :raises OSError: that cannot be looked at now.
    """
    digest, here = frames.digest_of_kind(order.digest), sorted(known)
    try:
        file = os.open(order.file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield from here
        return
    try:
        for block in here:
            length = min(BLOCK_BYTES, size_bytes - block * BLOCK_BYTES)
            if digest(_read(file, length, block * BLOCK_BYTES)) != known[block]:
                yield block
    finally:
        os.close(file)


def _read(file: int, length: int, offset: int) -> bytes:
    try:
        return os.pread(file, length, offset)
    except OSError:  # a block that the disk does not give back is a damaged one
        return b""


class Carrier:
    """Orders that are carried out now, each in a thread of its own. :param rings: where blocks that come are seen."""

    def __init__(self, rings: Rings) -> None:
        self._lock, self._rings = threading.Lock(), rings
        self._growing: dict[int, Growth] = {}

    def take(self, message: dict[str, Any]) -> None:
        """An order; or, with its number, ``stop``, ``more`` with ``blocks``, ``whole`` with ``operation``, or ``said``.

        With the last two comes the ``store`` that the operation may be said to.
        """
        number = next((message[word] for word in ("stop", "more", "whole", "said") if word in message), None)
        if number is None:
            self._begin(Order(**message))
            return
        growth = self._growing.get(number)
        if growth is None:
            return
        if "more" in message:
            growth.arrived(_blocks(message["blocks"]).items())
        elif "whole" in message:
            growth.said_to(message["store"])
            growth.complete(as_operation(message["operation"]))
        elif "said" in message:
            growth.said_to(message["store"])
        else:
            growth.stop()

    def _begin(self, order: Order) -> None:
        growth = Growth(
            _known(order), None if order.comes else as_operation(order.operation), _blocks(order.passed),
            partial(self._note, order.number) if order.passes else None,
            lambda waits: self._say(Note(order.number, [], [], waits=waits, sends=not waits)),
            lambda store, says: self._say(Note(order.number, [], [], store=store, says=says)), order.store,
        )  # fmt: skip
        self._growing[order.number] = growth
        if order.comes:
            self._rings.want(order.comes, growth, order.passes)
        try:
            started(self._run, order, growth)
        except NoThread as problem:
            self._ended(order, growth, Answer(order.number, failure=str(problem), code=ErrorClass.SERVER_BUSY.code))

    def _run(self, order: Order, growth: Growth) -> None:
        try:
            answer = deliver(order, growth)
        except Exception as problem:  # the daemon must hear of every order
            answer = Answer(order.number, failure=repr(problem), code=ErrorClass.UNKNOWN.code)
        self._ended(order, growth, answer)

    def _ended(self, order: Order, growth: Growth, answer: Answer) -> None:
        self._rings.drop(order.comes, growth)
        growth.close()
        self._growing.pop(order.number, None)
        self._say(replace(answer, said=growth.was_said))

    def _note(self, number: int, passed: Mapping[int, bytes], gone: Sequence[int]) -> None:
        self._say(Note(number, [[block, digest.hex()] for block, digest in passed.items()], list(gone)))

    def _say(self, what: Answer | Note) -> None:
        with self._lock:
            sys.stdout.write(json.dumps(asdict(what)) + "\n")
            sys.stdout.flush()


def main(argv: list[str]) -> None:
    """Serve until standard input ends; what is under way is dropped then and begun again by the next.

    ``argv[1]`` is the descriptor of a socket that connections to those who receive come by.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    rings = Rings()
    threading.Thread(target=rings.listen, args=(socket.socket(fileno=int(argv[1])),), daemon=True).start()
    carrier = Carrier(rings)
    for line in sys.stdin:
        carrier.take(json.loads(line))
    os._exit(0)


if __name__ == "__main__":
    log.open_child_log()
    main(sys.argv)
