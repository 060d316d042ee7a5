"""One route by which a file is fetched: connections, each in a thread, on which ranges of it come.

A connection that has nothing under way when the file is there is left to the next one (:mod:`stageout.overlay.kept`).
"""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from stageout.core import log
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.core.threads import NoThread, started
from stageout.overlay.cargo import Share
from stageout.overlay.channel import Channel
from stageout.overlay.fetching import Ask
from stageout.overlay.kept import Circuit, kept
from stageout.overlay.sockets import LONG_S, Sockets
from stageout.overlay.tcp import Segments
from stageout.overlay.way import FIRST_PAUSE_S, LEAST_SILENCE_S
from stageout.overlay.wire.messages import BLOCK_BYTES, Found, Heartbeat
from stageout.overlay.wire.route import Route, shown

if TYPE_CHECKING:
    from stageout.overlay.receiving import Receiving

#: A range is no more than a connection brings in this time: what it owes at the end, nobody waits for longer. Nor is it
#: less than it brings in the other one, by which the last connections may end before each other: a question costs the
#: router as much of the processor as ten blocks.
_RANGE_S, _LEAST_S = 0.5, 0.02
_FEW_BLOCKS, _FEW_FAR_BLOCKS = 4, 1
_MAX_PAUSE_S = 4.0
#: A way that is not long has more than one connection for files that take longer than this.
_SOON_S = 0.25
#: No look takes longer than this: what a machine that stood still did not hear was not silence.
_MOST_LOOK_S = 0.1
_DOUBLINGS = 6
_FADE = 0.5
#: Bytes that came on a connection lately: their weight halves in this time.
_LATELY_S = 0.5


class Carrier:
    """One connection.

    :ivar asked: ranges that are under way on it. :ivar asked_s: when it was asked for one and nothing else was under
        way, until FOUND has come; 0: never. :ivar is_found: it has come for the first one.
    :ivar quiet_s: so long nothing has come. :ivar is_busy: it is waited for, and nothing else.
    :ivar brought: a block has come on it.
    :ivar rate: of the blocks that came lately, in bytes a second. :ivar pace: of all that came lately.
    :ivar segments: that its other side has sent, as that said last.
    """

    def __init__(self, number: int, place: int, channel: Channel, few_blocks: int) -> None:
        self.number, self.place, self.channel, self._few_blocks = number, place, channel, few_blocks
        self.asked: deque[Ask] = deque()
        self._heard_bytes = self._begun_bytes = channel.received_bytes
        self._before_bytes = channel.arrived_bytes
        self.quiet_s = self.rate = self.pace = self.asked_s = 0.0
        self._lately_bytes = self._lately_s = 0.0
        self.is_busy = self.is_found = self.brought = False
        self.segments = Segments()
        self._next = 0

    @property
    def arrived_bytes(self) -> int:
        """The bytes that came on it for this file, also behind a lost packet, so that the sum does not stand still and
        leap."""
        return self.channel.arrived_bytes - self._before_bytes

    @property
    def most_blocks(self) -> int:
        """The bytes that it brings in a while: bytes behind a lost packet come at once, and are no rate."""
        rate = min(self.rate, self.pace or self.rate)
        return max(1, int(rate * _RANGE_S / BLOCK_BYTES)) if rate else self._few_blocks

    @property
    def least_blocks(self) -> int:
        """Ranges that are worth a question of their own."""
        return min(self.most_blocks, 1 + int(self.rate * _LEAST_S / BLOCK_BYTES))

    def look(self, elapsed_s: float) -> None:
        """Tell whether something has come since the last time."""
        heard_bytes, self._heard_bytes = self._heard_bytes, self.channel.received_bytes
        came_bytes = self._heard_bytes - heard_bytes
        self.quiet_s = self.quiet_s + elapsed_s if self.is_busy and not came_bytes else 0.0
        if self.is_busy and elapsed_s > 0:
            kept = 0.5 ** (elapsed_s / _LATELY_S)
            self._lately_bytes = kept * self._lately_bytes + came_bytes
            self._lately_s = kept * self._lately_s + elapsed_s
            self.pace = self._lately_bytes / self._lately_s

    def begins(self, block: int) -> None:
        """The next bytes are this block."""
        self._next, self._begun_bytes = block, self.channel.received_bytes

    def owes(self) -> Iterator[tuple[Ask, int]]:
        """Blocks and parts that are under way on it, and how many bytes come until each is here."""
        left_bytes = self._begun_bytes - self.channel.received_bytes
        for number, ask in enumerate(list(self.asked)):
            for one, size_bytes in ask.each(0 if number else self._next):
                left_bytes += size_bytes
                yield one, max(0, left_bytes)

    @property
    def owed_bytes(self) -> int:
        """All that is under way on it."""
        return max((left_bytes for _, left_bytes in self.owes()), default=0)

    def measured(self, size_bytes: int, seconds: float) -> None:
        """A block has come."""
        self.brought = True
        rate = size_bytes / max(1e-6, seconds)
        self.rate = rate if not self.rate else self.rate + _FADE * (rate - self.rate)


class WayBack:
    """One route. The lock of all guards its state.

    :ivar carriers: connections that are in use, by their numbers. :ivar problem: why the last one was lost.
    :ivar is_out: it is not tried again, and the problem is why.
    :ivar trip_s: the shortest time from a question to its answer.
    """

    def __init__(self, receiving: Receiving, route: Route, is_one_of_several: bool) -> None:
        self._receiving, self.route, self._several = receiving, route, is_one_of_several
        download = receiving.download
        self.sockets = Sockets(download.connections, download.most_connections)
        self.carriers: dict[int, Carrier] = {}
        self.problem: TransferFailure | None = None
        self.is_out = False
        self._brought_bytes = self._lately_bytes = self._gone_bytes = 0
        self._places: set[int] = set()
        self._spare: list[Channel] = []
        self.trip_s = self._made_s = 0.0
        self._segments = Segments()
        self._begun_s = self._looked_s = time.monotonic()
        self._silent = 0

    def begin(self, channel: Channel, ask: Ask, trip_s: float, made_s: float) -> None:
        """By this one the file was found. :param ask: what comes on that connection already."""
        self.trip_s, self._made_s = trip_s, made_s
        self.sockets.note_way(max(trip_s, made_s))
        carrier = self._join(0, channel)
        assert carrier is not None
        carrier.asked.append(self._receiving.plan.begin(carrier.number, ask.blocks))
        carrier.is_found = True
        carrier.segments = Segments.of(self._receiving.found.segments)
        self._start(0, carrier)
        if self._several or self._is_long:
            self.man()

    @property
    def _is_long(self) -> bool:
        return max(self.trip_s, self._made_s) >= LONG_S

    def man(self) -> None:
        """As many connections as there should be; what is too much ends by itself, the latest first."""
        left = -(-self._receiving.plan.left_bytes // BLOCK_BYTES)
        for place in range(0 if self.is_out else self.sockets.now):
            if place not in self._places and (not place or self.carriers) and left:
                left -= 1
                self._start(place)

    def _start(self, place: int, carrier: Carrier | None = None) -> None:
        """Where this process has as many threads as it may, those that there are go on; the first one must be had."""
        self._places.add(place)
        try:
            started(self._work, place, carrier)
        except NoThread:
            self._places.discard(place)
            if carrier is not None:
                del self.carriers[carrier.number]
                carrier.channel.close()
                raise

    def tick(self, now_s: float) -> None:
        """A few times a second."""
        elapsed_s, self._looked_s = min(_MOST_LOOK_S, now_s - self._looked_s), now_s
        for one in self.carriers.values():
            one.look(elapsed_s)
        if self._several and self.carriers and all(map(self.is_silent, self.carriers.values())):
            self._silent += 1
            self.abort()
        if now_s - self._begun_s < _SOON_S and self.carriers:
            return
        if self.carriers:
            self._tune(now_s)
        self.man()

    def _tune(self, now_s: float) -> None:
        """Another number of connections, where that is better."""
        if self.sockets.is_fixed:
            return
        arrived_bytes = self._gone_bytes + sum(one.arrived_bytes for one in self.carriers.values())
        sample = self.sockets.look(now_s, arrived_bytes, self.trip_s, self._segments)
        self._segments = replace(self._segments, trips_s=0.0, connections=0)
        if sample is not None and sample.after != sample.before:
            log.event("connections-changed", route=shown(self.route), connections=sample.after, before=sample.before,
                      rate_mb_s=round(sample.rate / 1e6, 3), why=sample.reason)  # fmt: skip

    def _told(self, carrier: Carrier, told: Segments) -> None:
        """A router has said what it has sent; what that was since the last time counts, with the round trip of then."""
        with self._receiving.changed:
            before, carrier.segments = carrier.segments, told
            if before.connections and told.connections:
                lately = replace(told, sent=told.sent - before.sent, resent=told.resent - before.resent)
                self._segments += lately

    def is_silent(self, one: Carrier) -> bool:
        """Tell whether a connection owes something, and nothing has come for long."""
        silence_s = max(LEAST_SILENCE_S, 3 * self.trip_s) * (1 << min(self._silent, _DOUBLINGS))
        return one.quiet_s >= silence_s

    @property
    def rate(self) -> float:
        """Bytes a second since it came up."""
        return self._lately_bytes / max(1e-3, time.monotonic() - self._begun_s)

    def brought(self, size_bytes: int) -> None:
        """A block has come by it, and by no other one before."""
        self._brought_bytes += size_bytes
        self._lately_bytes += size_bytes
        if not self.is_out:
            self.problem = None

    def share(self) -> Share:
        """The work of the route."""
        sockets = self.sockets
        return Share(self.route, self._brought_bytes, str(self.problem or ""), sockets.now, sockets.reason)

    def abort(self) -> None:
        """End the connections on which something is under way; their threads notice and close them."""
        for one in self.carriers.values():
            if one.asked:
                one.channel.abort()

    def leave(self, is_well: bool) -> None:
        """All is over: the connections are for the next file, or closed."""
        spare, self._spare = self._spare, []
        for channel in spare:
            if is_well:
                kept().leave(self._receiving.download.place(self.route), Circuit(None, [channel], self._made_s))
            else:
                channel.close()

    def _work(self, place: int, carrier: Carrier | None = None) -> None:
        """Connections, one after the other. :param carrier: the first one, if it is there already."""
        receiving, pause_s = self._receiving, FIRST_PAUSE_S
        try:
            while carrier is not None or not self._ends(place):
                was_kept = False
                try:
                    if carrier is None:
                        channel, was_kept = self._connected()
                        carrier = self._join(place, channel)
                    if carrier is not None:
                        self._carry(carrier)
                except TransferFailure as failure:
                    was_kept = was_kept and carrier is not None and not carrier.brought
                    receiving.lost(self, carrier, failure, was_kept)
                    pause_s = FIRST_PAUSE_S if carrier is not None and carrier.brought else pause_s
                    if not was_kept:
                        receiving.pause(pause_s)
                        pause_s = min(_MAX_PAUSE_S, pause_s * 2)
                carrier = None
        except BaseException as problem:
            receiving.fail(problem)
            raise

    def _ends(self, place: int) -> bool:
        """Tell whether a thread has nothing more to do. Without any connection only one of them tries to make one."""
        with self._receiving.changed:
            is_over = self._receiving.over or self.is_out or self._is_surplus(place)
            if is_over or (place and not self.carriers):
                self._places.discard(place)
                return True
            return False

    def _is_surplus(self, place: int) -> bool:
        return place >= self.sockets.now

    def _connected(self) -> tuple[Channel, bool]:
        """A connection, and whether a file has left it, perhaps this one."""
        receiving = self._receiving
        with receiving.changed:
            if self._spare:
                return self._spare.pop(), True
        circuit = kept().take(receiving.download.place(self.route), receiving.download.gateway)
        if circuit is not None:
            (channel,) = circuit.carriers
            return channel, True
        began_s = time.monotonic()
        channel = receiving.download.connect(self.route)
        with receiving.changed:
            if not self.trip_s:
                self.trip_s = self._made_s = time.monotonic() - began_s
                self.sockets.note_way(self._made_s)
        return channel, False

    def _join(self, place: int, channel: Channel) -> Carrier | None:
        """It takes part from now on; None: all is over."""
        receiving = self._receiving
        with receiving.changed:
            if receiving.over:
                channel.close()
                return None
            if not self.carriers:
                self._begun_s, self._lately_bytes = time.monotonic(), 0
                self.sockets.begin(self._begun_s)
            few_blocks = _FEW_FAR_BLOCKS if self._is_long else _FEW_BLOCKS
            carrier = Carrier(receiving.number(), place, channel, few_blocks)
            self.carriers[carrier.number] = carrier
            return carrier

    def _carry(self, carrier: Carrier) -> None:
        """Ranges, until it is one connection too many, or all is over."""
        is_well = False
        try:
            buffer = memoryview(mmap.mmap(-1, BLOCK_BYTES))  # the kernel copies faster to whole pages
            while carrier.asked or self._has_next(carrier):
                self._receive(carrier, buffer)
            is_well = True
        finally:
            receiving = self._receiving
            with receiving.changed:
                del self.carriers[carrier.number]
                self._gone_bytes += carrier.arrived_bytes
                receiving.plan.lost(carrier.number)
                if is_well:
                    self._spare.append(carrier.channel)
                receiving.changed.notify_all()
            if not is_well:
                carrier.channel.close()

    def _has_next(self, carrier: Carrier) -> bool:
        """Ask for a range, when there is one. False: nothing more is wanted of this connection."""
        receiving, channel = self._receiving, carrier.channel
        while not receiving.over and not self._is_surplus(carrier.place):
            ask = receiving.take(self, carrier) or receiving.again(self, carrier)
            if ask is not None:
                carrier.asked_s = time.monotonic()
                channel.send(receiving.download.get(ask, receiving.found.generation))
                return True
            if channel.has_more(0):
                channel.receive()  # nothing comes here but the reason of its end
                raise channel.failure(ErrorClass.CONTENT_MISMATCH, "it says what nobody has asked for")
        return False

    def _receive(self, carrier: Carrier, buffer: memoryview) -> None:
        """The first range that is under way. The next one is asked for before its end, so that nothing waits for that.

        :raises TransferFailure: the connection is lost, or something else came.
        """
        receiving, channel, ask = self._receiving, carrier.channel, carrier.asked[0]
        carrier.is_busy = True
        if not carrier.is_found:
            self._expect_found(carrier)
        carrier.is_found = False
        if ask.is_part:
            self._receive_part(carrier, ask, buffer)
            return
        began_s = time.monotonic()
        for block in range(ask.first, ask.end):
            carrier.begins(block)
            if len(carrier.asked) == 1 and ask.end - block <= 1 + int(carrier.rate * self.trip_s / BLOCK_BYTES):
                self._ask_ahead(carrier)
            carrier.is_busy = True
            told, length = channel.receive_block(buffer, receiving.download.proof)
            carrier.is_busy = False
            if (told, length) != (block, receiving.plan.length(block)):
                text = f"block {told} of {length} bytes where {block} was due"
                raise channel.failure(ErrorClass.CONTENT_MISMATCH, text)
            if block == ask.end - 1:  # nothing is under way any more: who ends because all is here leaves it open
                with receiving.changed:
                    carrier.asked.popleft()
                    carrier.begins(0)
            receiving.store(self, block, buffer[:length])
            began_s, before_s = time.monotonic(), began_s
            carrier.measured(length, began_s - before_s)

    def _receive_part(self, carrier: Carrier, ask: Ask, buffer: memoryview) -> None:
        receiving, channel = self._receiving, carrier.channel
        carrier.begins(ask.first)
        if len(carrier.asked) == 1:
            self._ask_ahead(carrier)
        carrier.is_busy = True
        told, length = channel.receive_part(buffer)
        carrier.is_busy, due = False, ask.first * BLOCK_BYTES + ask.start
        if (told, length) != (due, ask.stop - ask.start):
            raise channel.failure(ErrorClass.CONTENT_MISMATCH, f"{length} bytes from {told} on where {due} was due")
        with receiving.changed:
            carrier.asked.popleft()
            carrier.begins(0)
        receiving.store_part(self, carrier, ask, buffer[:length])
        carrier.brought = True

    def _ask_ahead(self, carrier: Carrier) -> None:
        """The range behind the one that comes now, unless it is one connection too many.

        Earlier routers close a connection on which that is said.
        """
        receiving = self._receiving
        may_ask = carrier.channel.packs and not self._is_surplus(carrier.place)
        ask = receiving.take(self, carrier) if may_ask else None
        if ask is not None:
            carrier.channel.send(receiving.download.get(ask, receiving.found.generation))

    def _expect_found(self, carrier: Carrier) -> None:
        channel, found = carrier.channel, self._receiving.found
        while isinstance(told := channel.receive(), Heartbeat):
            pass  # the router fetches the file itself
        if not isinstance(told, Found):
            raise channel.failure(ErrorClass.NOT_SUPPORTED, f"{type(told).__name__} where FOUND was due")
        if told.generation != found.generation:
            raise channel.failure(ErrorClass.CONFLICT, f"{self._receiving.download.path} was changed meanwhile")
        if (told.size_bytes, told.block_bytes) != (found.size_bytes, found.block_bytes):
            raise channel.failure(ErrorClass.CONTENT_MISMATCH, "it has another file under the same number")
        self._told(carrier, Segments.of(told.segments))
        if self._receiving.download.proof is not None:
            self._receiving.download.proof.begin(told, channel.digest_name, anew=False)
        if carrier.asked_s:
            with self._receiving.changed:
                trip_s = time.monotonic() - carrier.asked_s
                self.trip_s, carrier.asked_s = min(self.trip_s or trip_s, trip_s), 0.0
