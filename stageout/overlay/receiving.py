"""One version of a file by several connections on one or several routes at once.

All of them ask for ranges of it out of one plan (:mod:`stageout.overlay.fetching`), so shares follow speeds; and
what a connection still owes when it is lost, or at the end when it is slow or silent, comes by the others.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.cargo import Share
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.fetching import Ask, Plan
from stageout.overlay.kept import Place, place
from stageout.overlay.links import Claim
from stageout.overlay.proof import Proof
from stageout.overlay.way_back import Carrier, WayBack
from stageout.overlay.wire.blocks import PART_BYTES
from stageout.overlay.wire.messages import BLOCK_BYTES, Found, Get
from stageout.overlay.wire.route import Route
from stageout.overlay.writing import Writing

Progress = Callable[[int], None]
_TICK_S = 0.05
#: A connection without anything to do looks so often whether another one is late with something.
_LOOK_S = 0.1
#: Connections that may be lost for each that there is, from one block that comes to the next.
_LOSSES = 4
#: A block that takes so many times as long as by an idle connection is asked for there, too.
_LATE = 2.0
#: Where a connection takes so long for a block, it is asked for parts of blocks, of so long each at least, when all of
#: a block would take it longer than a part of the time in which all that is missing comes.
_SLOW_S, _PART_S, _ITS_TIME = 0.1, 0.1, 0.5
#: Failures of one route, where there is no other, after which it is worth another try.
RESUMABLE = frozenset(
    {
        ErrorClass.CONNECTION_LOST,
        ErrorClass.STALLED,
        ErrorClass.CONNECT_FAILED,
        ErrorClass.SERVER_BUSY,
        ErrorClass.NAME_LOOKUP_FAILED,
    }
)


@dataclass(frozen=True)
class Download:
    """The file to fetch, and how to fetch it.

    :param flow: one for all its connections, so that routers count them together.
    :param proof: takes the digests of all blocks.

    :param connections: on each route, at first. :param most_connections: a controller never has more on a route.
    """

    gateway: Gateway
    path: str
    routes: Sequence[Route] = ((),)
    connections: int = 1
    most_connections: int = 1
    claim: Claim = field(default_factory=Claim)
    flow: str = field(default_factory=lambda: secrets.token_hex(8))
    proof: Proof | None = None

    def get(self, ask: Ask, generation: int) -> Get:
        """The question for a range. :param ask: no blocks: all from the first one on."""
        claim = self.claim
        return Get(
            self.path, ask.first, ask.blocks, generation, priority=claim.priority, deadline=claim.deadline,
            waits=True, flow=self.flow, start=ask.start, end=ask.stop,
        )  # fmt: skip

    def place(self, route: Route) -> Place:
        """The pool where its connections are kept for others."""
        return place("get", self.gateway, route, self.claim)

    def connect(self, route: Route) -> Channel:
        """A new connection. :raises TransferFailure: it cannot be made."""
        return Channel(self.gateway, route, back=self.claim, flow=self.flow)


class Receiving:
    """Fetch a version of a file into ``file`` (a descriptor), all that was found.

    :param progress: called with the bytes that are here, in the thread of :meth:`run`.
    :ivar changed: guards everything here, and the plan. :ivar over: nothing more is wanted.
    """

    def __init__(self, download: Download, found: Found, file: int, progress: Progress) -> None:
        self.download, self.found, self._progress = download, found, progress
        self._writing = Writing(file, found.size_bytes)
        self.changed = threading.Condition(threading.RLock())
        self.plan = Plan(found.size_bytes)
        self.over = False
        self._failure: BaseException | None = None
        self._numbers = 0
        self._losses = self._mismatches = self._told_bytes = 0
        self._up_s = time.monotonic()
        several = len(download.routes) > 1
        self.ways = [WayBack(self, route, several) for route in download.routes]

    def run(self, channel: Channel, ask: Ask, trip_s: float, made_s: float) -> None:
        """On return all of it is written.

        :param channel: by the first route; FOUND has come on it, and these blocks come next. It is closed or kept.
        :param trip_s: from the question to FOUND. :param made_s: what the connection took to be made.
        :raises TransferFailure: CONFLICT, the name has another file now; or it is not to be had.
        :raises NoThread: not even one is to be had; the connection is closed, and nothing is written.
        """
        try:
            with self.changed:
                first, *others = self.ways
                first.begin(channel, ask, trip_s, made_s)
                for way in others:
                    way.man()
            while not self.over:
                with self.changed:
                    self.changed.wait(_TICK_S)
                    self._tick()
                self._tell()
        finally:
            self._end()
        if self._failure is not None:
            raise self._failure

    def _tick(self) -> None:
        now_s = time.monotonic()
        if any(way.carriers for way in self.ways):
            self._up_s = now_s
        for way in self.ways:
            way.tick(now_s)
        problems = [way.problem for way in self.ways if way.problem is not None and not way.carriers]
        if len(problems) < len(self.ways) or self.over:
            return
        if all(way.is_out for way in self.ways) or now_s - self._up_s > self.download.gateway.timeout_s:
            best = next((problem for problem in problems if problem.kind.retryable), problems[0])
            text = "; ".join(dict.fromkeys(str(problem.message) for problem in problems))
            self.fail(TransferFailure(best.kind, text, best.server, best.retry_after_s))

    def _end(self) -> None:
        """No thread writes any more then. Connections on which nothing is under way are for the next file."""
        with self.changed:
            self.over = True
            is_whole = self.plan.is_whole and self._failure is None
            for way in self.ways:
                way.abort()
            self.changed.notify_all()
            self.changed.wait_for(lambda: not any(way.carriers for way in self.ways))
        for way in self.ways:
            way.leave(is_whole)
        if is_whole:
            self._tell()

    def _tell(self) -> None:
        received_bytes = self.plan.received_bytes
        if received_bytes != self._told_bytes:
            self._told_bytes = received_bytes
            self._progress(received_bytes)

    def fail(self, problem: BaseException) -> None:
        """End it: no other connection can help."""
        with self.changed:
            if not self.over:
                self._failure, self.over = problem, True
                self.changed.notify_all()

    def number(self) -> int:
        """For a new connection."""
        with self.changed:
            self._numbers += 1
            return self._numbers

    def take(self, way: WayBack, carrier: Carrier) -> Ask | None:
        """The next part for a connection to ask for; None: nothing for now.

        While something is under way on it, the last blocks are left to those that ask for them as they get idle.
        """
        with self.changed:
            carriers, part_bytes = len(self._carriers()), self._part_bytes(way, carrier)
            enough_bytes = carriers * (self._least_bytes(way, carrier) if part_bytes else BLOCK_BYTES)
            if self.over or (carrier.asked and carriers > 1 and self.plan.left_bytes < enough_bytes):
                return None
            if part_bytes:
                return _noted(carrier, self.plan.take_part(carrier.number, part_bytes))
            most, least = carrier.most_blocks, carrier.least_blocks
            return _noted(carrier, self.plan.take(carrier.number, carriers, most, least))

    def _carriers(self) -> list[Carrier]:
        return [one for way in self.ways for one in way.carriers.values()]

    def _part_bytes(self, way: WayBack, carrier: Carrier) -> int:
        """So much of a block a connection is asked for next, so that all end at about the same time; 0: whole ones."""
        least_bytes = self._least_bytes(way, carrier)
        if not least_bytes:
            return 0
        others = self._carriers()
        left_bytes = self.plan.left_bytes + sum(one.owed_bytes for one in others)
        left_s = left_bytes / max(1.0, sum(one.pace for one in others))
        part_bytes = int(self._pace(carrier) * _ITS_TIME * left_s) - carrier.owed_bytes
        if part_bytes >= BLOCK_BYTES and not self.plan.has_parts:
            return 0
        return max(least_bytes, min(part_bytes, BLOCK_BYTES) // PART_BYTES * PART_BYTES)

    def _least_bytes(self, way: WayBack, carrier: Carrier) -> int:
        """Of a part that is worth a question; 0: none is, or parts cannot be had on that connection."""
        pace = self._pace(carrier)
        if not carrier.channel.parts or not 0 < pace * _SLOW_S < BLOCK_BYTES:
            return 0
        worth_bytes = PART_BYTES * max(1, round(pace * max(_PART_S, way.trip_s) / PART_BYTES))
        return min(worth_bytes, BLOCK_BYTES)

    def _pace(self, carrier: Carrier) -> float:
        """The carrier's rate; of a new one, the rate of the others."""
        paces = [one.pace for one in self._carriers() if one.pace]
        return carrier.pace or sum(paces) / max(1, len(paces))

    def again(self, way: WayBack, carrier: Carrier) -> Ask | None:
        """A part for an idle connection to ask for although others were asked for it; None, after a moment: nothing."""
        with self.changed:
            if self.over:
                return None
            slow = set(self._slow(way))
            mine = [number for number in way.carriers if number not in slow]
            parts = carrier.channel.parts
            ask = self.plan.again(carrier.number, mine, slow, parts) or self._late(way, carrier)
            if ask is None:
                self.changed.wait(_LOOK_S)
            return _noted(carrier, ask)

    def _slow(self, way: WayBack) -> Iterator[int]:
        """Connections that are silent, and those of routes that are slow beside this one."""
        for other in self.ways:
            is_slow = other is not way and 2 * other.rate < way.rate
            yield from (number for number, one in other.carriers.items() if is_slow or other.is_silent(one))

    def _late(self, way: WayBack, carrier: Carrier) -> Ask | None:
        """The last part to come by other connections of the same route, or a piece of it, if it is here much sooner by
        this one."""
        if not carrier.pace:
            return None
        part_bytes = self._least_bytes(way, carrier)
        soon_s = _LATE * (way.trip_s + (part_bytes or BLOCK_BYTES) / carrier.pace)
        others = (other for other in way.carriers.values() if other is not carrier and other.pace)
        due = ((left_bytes / other.pace, ask) for other in others for ask, left_bytes in other.owes())
        late = sorted(((due_s, ask) for due_s, ask in due if due_s > soon_s), reverse=True)
        return next((ask for _, one in late if (ask := self.plan.once_more(carrier.number, one, part_bytes))), None)

    def store(self, way: WayBack, block: int, data: memoryview) -> None:
        """A block has come: write it, once."""
        with self.changed:
            new_bytes = self.plan.new_bytes(Ask(block, 1))
            if self.over or not self.plan.came(block):
                return
        self._write(way, block, data, new_bytes)

    def store_part(self, way: WayBack, carrier: Carrier, ask: Ask, data: memoryview) -> None:
        """A part of a block has come: when all are here, the block is looked at, and written, once."""
        with self.changed:
            if self.over:
                return
            new_bytes = self.plan.new_bytes(ask)
            whole = self.plan.part_came(ask, data)
            self._losses = 0
            if whole is None:
                way.brought(new_bytes)
                return
        proof = self.download.proof
        if proof is not None and proof.is_wanted:
            proof.add(ask.first, len(whole), carrier.channel.digest(whole))
        self._write(way, ask.first, whole, new_bytes)

    def _write(self, way: WayBack, block: int, data: memoryview, new_bytes: int) -> None:
        """A block. :param new_bytes: of it, that this route has brought last."""
        try:
            self._writing.write(data, block * self.found.block_bytes)
        except OSError as problem:
            self.fail(problem)
            return
        with self.changed:
            self.plan.written(block)
            way.brought(new_bytes)
            self._losses = 0
            if self.plan.is_whole:
                self.over = True
                self.changed.notify_all()

    def lost(self, way: WayBack, carrier: Carrier | None, failure: TransferFailure, was_kept: bool) -> None:
        """A connection has ended, or could not be made (``carrier`` is None).

        :param was_kept: that had to be expected.
        """
        with self.changed:
            if self.over:
                return
            if failure.kind is ErrorClass.CONFLICT:
                self.fail(failure)
            self._mismatches += failure.kind is ErrorClass.CONTENT_MISMATCH
            if carrier is not None and failure.kind is ErrorClass.NOT_FOUND:
                text = f"{self.download.path} was deleted while it was fetched"
                failure = TransferFailure(failure.kind, text, failure.server)
            worth_it = failure.kind in RESUMABLE or (len(self.ways) > 1 and failure.kind.retryable)
            if not was_kept:
                way.problem = way.problem if way.is_out else failure
                way.is_out |= not worth_it
                self._losses += carrier is not None
            many = self._losses > _LOSSES * (1 + sum(way.sockets.now for way in self.ways))
            if many or self._mismatches > len(self.ways):  # what is damaged there need not be fetched to its end
                self.fail(failure)
            self.changed.notify_all()

    def shares(self) -> tuple[Share, ...]:
        """The work of each route."""
        return tuple(way.share() for way in self.ways)

    def pause(self, seconds: float) -> None:
        """Wait, unless all is over."""
        with self.changed:
            self.changed.wait_for(lambda: self.over, seconds)


def _noted(carrier: Carrier, ask: Ask | None) -> Ask | None:
    if ask is not None:
        carrier.asked.append(ask)
    return ask
