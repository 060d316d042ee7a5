"""The process that delivers packs in custody, so that the daemon's loop never waits for a disk or a terminal.

Orders come as lines of JSON on its standard input, answers go to its standard output. Each terminal has one connection,
on which several packs are under way at once. The process keeps nothing: when it dies, or a connection is lost, packs
without an answer are sent again, and the terminal executes each of their files once. A pack that the next custodian
has is answered, too (``waits``): its results follow if they come by that connection, and else when the daemon has it
asked. The process ends with the daemon.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue

from overlay_router.custodians.pack_records import as_pack
from stageout.core import log
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.core.sockets import readable
from stageout.core.threads import NoThread, started
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.links import Claim, Lane, links
from stageout.overlay.pack_looking import NEWER, Files, Seen, look
from stageout.overlay.wire import frames, packs
from stageout.overlay.wire.messages import Cancel, Custody, Low, Message, NoSpace, Pack, Packed, Result, Status
from stageout.overlay.wire.packs import DIGEST_BYTES
from stageout.overlay.wire.route import address, next_hop

_ASK_EVERY_S = 10.0
#: One connection may speak of so many origins; then it is made anew.
_MOST_ORIGINS = 2000
_LOST = "whether it has happened is not known, for {} has lost its records: look before you do it again"
_FileResult = tuple[str, str, int, int]
Known = dict[int, _FileResult]
"""Outcome, reason, generation and class of failure of files, by position."""


@dataclass(frozen=True)
class Order:
    """The pack to deliver. :param pack: as JSON. :param file: its digests and data. :param digest: the kind of digests.

    :param low: its origin's LOW. :param cancelled: numbers of files that are not wanted.
    :param ca: certificates of the terminal, "" without TLS. :param asks: it was sent: only what became of it is asked,
        behind a CANCEL for each file that is not wanted.
    :param said_to: the records of its terminal that it may have been said to before, "" to none that are known.
    :param store: those that it may be said to, as is recorded. :param taken_at: as of a held pack.
    """

    number: int
    terminal: str
    key_name: str
    secret: str = field(repr=False)
    pack: str
    file: str
    digest: str
    low: int = 0
    cancelled: list[int] = field(default_factory=list)
    ca: str = ""
    asks: bool = False
    said_to: str = ""
    store: str = ""
    taken_at: int = 0


@dataclass(frozen=True)
class Answer:
    """The outcome of an order: outcome, reason, generation and class of failure of each file; or why it is not known.

    :param damaged: positions of files whose data in the spool are not what they were; without ``results`` nothing was
        sent. :param code: class of the failure. :param waits: the next custodian has it.
    :param is_unknown: the other side has nothing of it, and no results.
    :param store: nothing was sent, for its terminal has these records: that is to be recorded first.
    """

    number: int
    results: list[_FileResult] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)
    failure: str = ""
    code: int = 0
    retry_after_s: float = 0.0
    waits: bool = False
    is_unknown: bool = False
    store: str = ""


@dataclass
class _Sent:
    """A pack that was sent, or asked about. :param damaged: positions of files that were damaged in the spool.

    :param told: numbers of files that are not wanted, as the other side has heard behind it.
    :param heard_s: it was sent then, or something was heard of it. :param asked_s: it was asked about then, in vain.
    :param known: results of files that were looked for, and are not sent.
    """

    number: int
    files: int
    damaged: list[int] = field(default_factory=list)
    told: set[int] = field(default_factory=set)
    heard_s: float = 0.0
    asked_s: float | None = None
    known: Known = field(default_factory=dict)


@dataclass(frozen=True)
class _Load:
    """A pack as it is sent. :param damaged: positions of files whose data do not fit their digests."""

    order: Order
    pack: Pack
    digests: list[bytes]
    data: list[bytes]
    damaged: list[int]

    def digests_by(self, channel: Channel) -> list[bytes]:
        """As the terminal computes them; those of damaged files fit nothing."""
        if channel.digest_name == self.order.digest:
            return self.digests
        found = [channel.digest(one) for one in self.data]
        for position in self.damaged:
            found[position] = bytes(byte ^ 255 for byte in found[position])
        return found


#: Of descriptors or memory: that says nothing about a file.
_SHORT_OF = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


class Gone(Exception):
    """Nothing of a pack can be read."""


def load(order: Order) -> _Load:
    """A pack out of the spool, checked.

    :raises Gone: it is not there, or not even its digests are what they were. :raises OSError: it may be read later.
    """
    pack = as_pack(order.pack)
    try:
        tail = Path(order.file).read_bytes()
    except OSError as problem:
        if problem.errno in _SHORT_OF:
            raise
        raise Gone(problem.strerror or str(problem)) from None
    at = DIGEST_BYTES * len(pack.paths)
    if len(tail) != at + sum(pack.sizes_bytes) or packs.manifest([tail[:at]]) != pack.manifest:
        raise Gone("its digests are not those of its manifest")
    digest, data = frames.digest_of_kind(order.digest), list[bytes]()
    digests = [tail[start : start + DIGEST_BYTES] for start in range(0, at, DIGEST_BYTES)]
    for size_bytes in pack.sizes_bytes:
        data.append(tail[at : at + size_bytes])
        at += size_bytes
    damaged = [position for position, one in enumerate(data) if digest(one) != digests[position]]
    return _Load(order, pack, digests, data, damaged)


class Way:
    """The connection to one terminal. :param answer: called with each :class:`Answer`, from a thread of its own.

    :ivar gateway: how it is made when it must be made the next time.
    :raises OSError: there is no thread, or no descriptor, to be had for it.
    """

    def __init__(self, gateway: Gateway, answer: Callable[[Answer], None]) -> None:
        self.gateway, self._answer = gateway, answer
        self._todo: SimpleQueue[Order] = SimpleQueue()
        self._wake, self._woken = os.pipe()
        self._sent: dict[tuple[str, int], _Sent] = {}
        self._waits: dict[tuple[str, int], _Sent] = {}
        self._channel: Channel | None = None
        self._lane: Lane | None = None
        self._origins: set[str] = set()
        #: On a clock that stands still while a pack leaves: on a slow line that takes minutes, and nobody listens.
        self._heard_s = self._deaf_s = 0.0
        try:
            started(self._run)
        except NoThread:
            os.close(self._wake)
            os.close(self._woken)
            raise

    def take(self, order: Order) -> None:
        """One more pack; it is answered for sure."""
        self._todo.put(order)
        os.write(self._woken, b"o")

    def _run(self) -> None:
        while True:
            try:
                self._step()
            except TransferFailure as failure:
                self._lost(failure)
            except Exception as problem:  # the daemon must hear of every order
                self._lost(TransferFailure(ErrorClass.UNKNOWN, repr(problem)))

    def _step(self) -> None:
        """Send what waits, and hear what comes."""
        if not self._sent and len(self._origins) >= _MOST_ORIGINS:
            self._close()
        began_s = time.monotonic()
        while not self._todo.empty() and len(self._origins) < _MOST_ORIGINS:
            self._begin(self._todo.get())
        self._deaf_s += time.monotonic() - began_s
        silence_s = self.gateway.timeout_s
        sources = [self._wake] if self._channel is None else [self._wake, self._channel.fileno()]
        ready = readable(sources, min(_ASK_EVERY_S, silence_s / 2) if self._sent else silence_s)
        if self._wake in ready:
            os.read(self._wake, 4096)
        if self._channel is None:
            return
        if self._channel.fileno() in ready:
            self._heard_s = self._now_s()
            self._hear(self._channel.receive())
        elif not ready and not self._sent:
            self._close()
            return
        self._ask(self._channel, is_silent=not ready)

    def _now_s(self) -> float:
        return time.monotonic() - self._deaf_s

    def _begin(self, order: Order) -> None:
        if order.asks:
            self._inquire(order, as_pack(order.pack))
            return
        try:
            one = load(order)
        except Gone:
            files = len(as_pack(order.pack).paths)
            self._answer(Answer(order.number, damaged=list(range(files))))
            return
        except frames.NoDigest as problem:
            self._answer(_failure(order.number, TransferFailure(ErrorClass.PLUGIN_BROKEN, str(problem))))
            return
        except Exception as problem:  # the daemon must hear of every order
            self._answer(_failure(order.number, TransferFailure(ErrorClass.UNKNOWN, repr(problem))))
            return
        if one.damaged and one.pack.release == "delivered":
            self._answer(Answer(order.number, damaged=one.damaged))
            return
        sent = self._sent[one.pack.origin, one.pack.seq] = self._new(order, one.pack)
        sent.damaged = one.damaged
        channel = self._connected()
        if channel.store not in ("", order.store) and not next_hop(one.pack.terminal)[1]:
            del self._sent[one.pack.origin, one.pack.seq]
            self._answer(Answer(order.number, store=channel.store))
            return
        sent.known = self._looked_for(channel, order, one)
        self._send(channel, one, sent.known)
        sent.told.update(order.cancelled)

    def _new(self, order: Order, pack: Pack) -> _Sent:
        return _Sent(order.number, len(pack.paths), heard_s=self._now_s())

    def _looked_for(self, channel: Channel, order: Order, one: _Load) -> Known:
        """The files that need not, or must not, be sent to a terminal that may have had them before it lost its
        records."""
        if not _has_lost(channel, order, one.pack):
            return {}
        unwanted = {seq - one.pack.seq for seq in order.cancelled}
        seen = self._look(order, one)
        newer = "failed", NEWER.format(self.gateway.server), 0, ErrorClass.CONFLICT.code
        found: Known = dict.fromkeys(seen.newer - unwanted, newer)
        return {**found, **_there(seen)}

    def _look(self, order: Order, one: _Load) -> Seen:
        files = Files(one.pack, order.digest, one.digests, order.taken_at)
        return look(self.gateway, files, range(len(one.data)))

    def _inquire(self, order: Order, pack: Pack) -> None:
        """Ask about a pack that was sent. One without any answer yet is only told what is not wanted."""
        key = pack.origin, pack.seq
        has_no_answer = key in self._sent
        if not has_no_answer:
            self._sent[key] = self._new(order, pack)
        channel = self._connected()
        if not has_no_answer and _has_lost(channel, order, pack):
            del self._sent[key]
            self._answer(self._found_at_its_end(order))
            return
        self._origins.add(pack.origin)
        channel.send(Low(pack.origin, order.low))
        told = self._sent[key].told  # who cancels all files of a pack says so file by file
        for seq in (seq for seq in order.cancelled if seq not in told):
            channel.send(Cancel(pack.origin, seq))
        told.update(order.cancelled)
        if not has_no_answer:
            channel.send(Status(pack.origin, pack.seq, len(pack.paths)))

    def _found_at_its_end(self, order: Order) -> Answer:
        """Of a pack that is not sent any more, to a terminal that cannot say what it did.

        A file that cannot be read just now is a failure: it is looked for again.
        """
        pack = as_pack(order.pack)
        try:
            known = _there(self._look(order, load(order)))
        except OSError as problem:
            return _failure(order.number, TransferFailure(ErrorClass.UNKNOWN, f"it was not looked for: {problem}"))
        except (Gone, frames.NoDigest):
            known = {}
        unknown = "expired", _LOST.format(self.gateway.server), 0, 0
        return Answer(order.number, [known.get(place, unknown) for place in range(len(pack.paths))])

    def _connected(self) -> Channel:
        if self._channel is None:
            if links().uplink and self._lane is None:
                self._lane = links().lane(self.gateway.server, Claim())
            self._channel = Channel(self.gateway, lane=self._lane)
            self._heard_s = self._now_s()
        return self._channel

    def _send(self, channel: Channel, one: _Load, known: Known) -> None:
        """:param known: files that are not wanted there."""
        origin = one.pack.origin
        unwanted = {*one.order.cancelled, *(one.pack.seq + place for place in known)}
        self._origins.add(origin)
        channel.send(Low(origin, one.order.low))  # and a PACK is never the first message
        onward = replace(
            one.pack, terminal=next_hop(one.pack.terminal)[1], release="delivered", after=(),
            cancelled=tuple(sorted(unwanted)),
        )  # fmt: skip
        if channel.cancels or not onward.cancelled:
            channel.send_pack(onward, one.digests_by(channel), one.data)
            return
        # an earlier version: a terminal forgets no wish, another custodian wants to have the pack first
        if not onward.terminal:
            _cancel(channel, onward)
        channel.send_pack(onward, one.digests_by(channel), one.data)
        if onward.terminal:
            _cancel(channel, onward)

    def _hear(self, message: Message) -> None:
        key = getattr(message, "origin", ""), getattr(message, "seq", 0)
        one = self._sent.get(key) or self._waits.get(key)
        if one is None:
            return
        one.heard_s, one.asked_s = self._now_s(), None
        if isinstance(message, Packed) and not _is_for(message, one.files):
            text = f"{self.gateway.server} has answered for {len(message.generations)} of {one.files} files"
            self._failed(key, TransferFailure(ErrorClass.UNKNOWN, text))
        elif isinstance(message, NoSpace) or (isinstance(message, Packed) and "pending" in message.outcomes):
            text = f"{self.gateway.server} has no room"
            again_s = float(message.retry_after_s) if isinstance(message, NoSpace) else 0.0
            self._failed(key, TransferFailure(ErrorClass.NO_SPACE_REMOTE, text, retry_after_s=again_s))
        elif isinstance(message, Packed):
            self._forget(key)
            self._answer(Answer(one.number, _results(message, one.known), one.damaged))
        elif (isinstance(message, Custody) or _is_pending(message)) and key in self._sent:
            self._waits[key] = self._sent.pop(key)
            self._answer(Answer(one.number, damaged=one.damaged, waits=True))
        elif isinstance(message, Result) and message.outcome == "unknown":
            failure = TransferFailure(ErrorClass.CONNECTION_LOST, f"{self.gateway.server} does not have it")
            self._forget(key)
            self._answer(replace(_failure(one.number, failure), is_unknown=True))

    def _forget(self, key: tuple[str, int]) -> None:
        self._sent.pop(key, None)
        self._waits.pop(key, None)

    def _ask(self, channel: Channel, is_silent: bool) -> None:
        """Ask about packs of which nothing was heard for a while, sooner when nothing at all is heard (``is_silent``).

        One that stays without a word while others have theirs has failed by itself.
        """
        now_s, silence_s = self._now_s(), self.gateway.timeout_s
        last_s = max(self._heard_s, min((one.heard_s for one in self._sent.values()), default=now_s))
        if now_s - last_s > silence_s:
            raise channel.failure(ErrorClass.STALLED, f"silent for {silence_s:.0f} s")
        patience_s = min(_ASK_EVERY_S, silence_s / 2) if is_silent else silence_s
        for key, one in list(self._sent.items()):
            if one.asked_s is not None and now_s - one.asked_s > silence_s:
                text = f"{self.gateway.server} says nothing of it, and answers others"
                self._failed(key, TransferFailure(ErrorClass.TIMED_OUT, text))
            elif one.asked_s is None and now_s - one.heard_s >= patience_s:
                one.asked_s = now_s
                channel.send(Status(*key, one.files))

    def _failed(self, key: tuple[str, int], failure: TransferFailure) -> None:
        one = self._sent.get(key) or self._waits[key]
        self._forget(key)
        self._answer(_failure(one.number, failure))

    def _lost(self, failure: TransferFailure) -> None:
        """The connection; whatever is under way is the daemon's to send again."""
        self._close()
        for key in list(self._sent):
            self._failed(key, failure)
        while not self._todo.empty():  # the same would happen to these, perhaps after a minute each
            self._answer(_failure(self._todo.get().number, failure))

    def _close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._lane is not None:
            self._lane.close()
            self._lane = None
        self._origins.clear()
        self._waits.clear()


def _has_lost(channel: Channel, order: Order, pack: Pack) -> bool:
    """Tell whether a terminal has lost the records that a pack may have been said to. A custodian is no terminal."""
    return bool(order.said_to and channel.store not in ("", order.said_to) and not next_hop(pack.terminal)[1])


def _there(seen: Seen) -> Known:
    return {place: ("done", "", generation, 0) for place, generation in seen.same.items()}


def _is_pending(message: Message) -> bool:
    """It waits there for something else."""
    return isinstance(message, Result) and message.outcome == "pending"


def _is_for(answer: Packed, files: int) -> bool:
    """Tell whether there is a result for each file: none counts as arrived for want of one."""
    return len(answer.generations) == files and len(answer.failed) == len(answer.outcomes)


def _cancel(channel: Channel, pack: Pack) -> None:
    for seq in pack.cancelled:
        channel.send(Cancel(pack.origin, seq))


def _failure(number: int, failure: TransferFailure) -> Answer:
    return Answer(
        number, failure=failure.message, code=failure.kind.code, retry_after_s=failure.retry_after_s or 0.0
    )  # fmt: skip


def _results(answer: Packed, known: Known) -> list[_FileResult]:
    reasons, codes = dict(zip(answer.failed, answer.reasons)), dict(zip(answer.failed, answer.codes))
    outcomes = dict(zip(answer.failed, answer.outcomes))
    return [
        known.get(position)
        or (outcomes.get(position, "done"), reasons.get(position, ""), generation, codes.get(position, 0))
        for position, generation in enumerate(answer.generations)
    ]


class Ways:
    """Those to all terminals. :param answer: called with each :class:`Answer`."""

    def __init__(self, answer: Callable[[Answer], None]) -> None:
        self._answer = answer
        self._ways: dict[tuple[str, str], Way] = {}

    def take(self, order: Order) -> None:
        """One more pack; it is answered for sure, also where there can be no way to its terminal now."""
        # what its origin has signed stands as it is: with its kind of digests
        digest = order.digest if as_pack(order.pack).capability else ""
        host, port = address(order.terminal)
        gateway = Gateway(host, port, order.key_name, bytes.fromhex(order.secret), ca=order.ca, digest=digest)
        way = self._ways.get((order.terminal, digest))
        if way is None:
            try:
                way = self._ways[order.terminal, digest] = Way(gateway, self._answer)
            except OSError as problem:
                failure = TransferFailure(ErrorClass.SERVER_BUSY, problem.strerror or str(problem))
                self._answer(_failure(order.number, failure))
                return
        way.gateway = gateway
        way.take(order)


def main() -> None:
    """Serve until standard input ends; what is under way is dropped then and begun again by the next."""
    lock = threading.Lock()

    def answer(one: Answer) -> None:
        with lock:
            sys.stdout.write(json.dumps(asdict(one)) + "\n")
            sys.stdout.flush()

    ways = Ways(answer)
    for line in sys.stdin:
        ways.take(Order(**json.loads(line)))
    os._exit(0)


if __name__ == "__main__":
    log.open_child_log()
    main()
