"""One file over several routes at once.

Each route has a control connection of its own and connections that carry blocks. All of them pull from one table, so
the shares follow the speeds. What is STAGED, and the answer, is said on every control connection; so when a route dies,
by a reset or by silence, what went with it and is not confirmed is given to the others at once, and nothing else
changes. A route that idles at the end sends again what slower ones still have on their way. A dead one is tried again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, Union

from stageout.core import log
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.core.sockets import Segments
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.links import Claim, Lane, links
from stageout.overlay.sockets import Sockets
from stageout.wire import blocks
from stageout.wire.blocks import BlockTable
from stageout.wire.overlay import (
    Attach,
    Custody,
    Heartbeat,
    Message,
    NoSpace,
    Open,
    Opened,
    Operation,
    Range,
    Result,
    Staged,
)
from stageout.wire.route import Route, shown

#: Silence after which one of several routes counts as dead: so long, or three round trips where that is more.
LEAST_SILENCE_S = 1.0
_LOOK_S = 0.05
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.25, 4.0
_LOSSES = 4
_ROUND_TRIPS = 8
_DOUBLINGS = 20
_NOT_FINAL = ("pending", "unknown")
_DAMAGES = 3
Answer = Union[Result, Custody]


class Cargo(Protocol):
    """What is sent."""

    gateway: Gateway
    blocks: int
    connections: int
    most_connections: int

    @property
    def claim(self) -> Claim:
        """What it asks of the links."""

    def ask(self) -> Open:
        """The OPEN of this file, the same on every connection."""

    def take(self, block: int, file: int, buffer: memoryview, channel: Channel) -> memoryview:
        """Read a block and keep its digest. :raises TransferFailure: the file is not what it was."""

    def publish(self, tid: int, channel: Channel) -> Operation:
        """The PUBLISH, once every block was read or is STAGED."""

    def count(self, size_bytes: int) -> None:
        """So many more bytes left. :raises TransferFailure: whoever asked for it wants no more."""


@dataclass(frozen=True)
class Share:
    """What one route did.

    :param problem: why it was lost at last, "" when it was not. :param connections: at the end. :param reason: why so
        many, where a controller has chosen.
    """

    route: Route
    sent_bytes: int
    problem: str = ""
    connections: int = 0
    reason: str = ""


def report(shares: Sequence[Share]) -> str:
    """What all routes did, in a line."""
    return "; ".join(_did(share) for share in shares)


def _did(share: Share) -> str:
    tuned = f"{share.connections} connections ({share.reason})" if share.reason else ""
    did = (f"{shown(share.route)}: {share.sent_bytes / 1e6:.1f} MB", tuned, share.problem)
    return ", ".join(part for part in did if part)


class Sending:
    """Send a file over all routes until the router says what became of it.

    :param file: descriptor of the file; each thread reads by a duplicate of its own.
    :param patience_s: how long all routes may be gone before it fails. None may be reached at first: it fails at once.
    :param grows: its blocks are sent as :meth:`arrived` names them, and it is published after :meth:`complete`.
    """

    def __init__(
        self, cargo: Cargo, file: int, routes: Sequence[Route], patience_s: float, grows: bool = False
    ) -> None:
        self.cargo, self._file, self._patience_s = cargo, file, patience_s
        self.changed = threading.Condition()
        self.table = BlockTable(cargo.blocks)
        self._grows = grows
        if grows:
            blocks.await_all(self.table)
        self.over = False
        self.tid = 0
        self._epoch = ""
        self._answer: Answer | None = None
        self._failure: TransferFailure | None = None
        self._reading = 0
        self._order: Operation | None = None
        self._carriers = 0
        self._losses = 0
        self._damages = 0
        self._up_s = 0.0
        self.ways = [_Way(self, route, len(routes) > 1) for route in routes]

    def run(self) -> Answer:
        """The router's first answer. :raises TransferFailure: it is not to be had."""
        for way in self.ways:
            threading.Thread(target=way.run, daemon=True).start()
        with self.changed:
            while self._answer is None and self._failure is None:
                self.changed.wait(_FIRST_PAUSE_S)
                if self._answer is None:
                    self._look()
        if self._answer is None:
            self.close()
            assert self._failure is not None
            raise self._failure
        return self._answer

    def arrived(self, indices: Iterable[int]) -> None:
        """These blocks of a file that grows may be sent."""
        with self.changed:
            blocks.arrived(self.table, indices)
            self.changed.notify_all()

    def complete(self) -> None:
        """The file grows no more: all its blocks have arrived."""
        self._grows = False
        self.publish()

    def say(self, message: Message) -> None:
        """Tell the router something by whatever route is up."""
        for way in self.ways:
            if way.say(message):
                return

    def close(self) -> None:
        """Close all connections; what is still on its way is not needed any more."""
        with self.changed:
            self.over = True
            self.changed.notify_all()
        for way in self.ways:
            way.close()

    def shares(self) -> tuple[Share, ...]:
        """What each route did."""
        return tuple(way.share() for way in self.ways)

    def fail(self, failure: TransferFailure) -> None:
        """End it: the file, or whoever wants it, is the reason, and no other route can help."""
        with self.changed:
            self._failure = self._failure or failure
            self.changed.notify_all()

    def hear(self, way: _Way, message: Message) -> None:
        """A message of the router. :raises TransferFailure: it cannot be."""
        with self.changed:
            if isinstance(message, Opened):
                self._opened(message)
            elif isinstance(message, Staged) and message.tid == self.tid:
                self._staged(message)
            elif isinstance(message, Custody) or (isinstance(message, Result) and message.outcome not in _NOT_FINAL):
                self._answer = self._answer or message
            elif isinstance(message, NoSpace):
                server = self.cargo.gateway.server
                text = f"{server} has no room for it"
                self.fail(TransferFailure(ErrorClass.NO_SPACE_REMOTE, text, server, float(message.retry_after_s)))
            self.changed.notify_all()
        self.publish()

    def _named(self, ranges: Sequence[Range]) -> list[int]:
        """Blocks in ranges. :raises TransferFailure: the file has no such blocks."""
        if ranges and ranges[-1][1] > self.table.count:
            server = self.cargo.gateway.server
            raise TransferFailure(
                ErrorClass.NOT_SUPPORTED, f"{server} names blocks that the file does not have", server
            )
        return [block for first, end in ranges for block in range(first, end)]

    def _opened(self, message: Opened) -> None:
        already = self._named(message.staged)
        if self.tid and (message.tid, message.epoch) != (self.tid, self._epoch):
            blocks.reopened(self.table, already)
            self._order = None
        else:
            blocks.staged(self.table, already)
        self.tid, self._epoch = message.tid, message.epoch
        self._up_s = time.monotonic()

    def damaged(self, way: _Way, message: Opened, control: Channel) -> None:
        """The router found that blocks are not what the manifest says; each route hears it, one is enough."""
        with self.changed:
            if way.damages <= self._damages:
                return
            self._damages = way.damages
            if self._damages > _DAMAGES:
                self.fail(control.failure(ErrorClass.CONTENT_MISMATCH, "blocks were damaged again and again"))
            blocks.reopened(self.table, self._named(message.staged))
            self.changed.notify_all()

    def joined(self, way: _Way) -> None:
        """A route that comes up knows what the others know."""
        with self.changed:
            way.damages = self._damages

    def _staged(self, message: Staged) -> None:
        now_s = time.monotonic()
        for block in self._named(message.staged):
            carriers = self.table.carriers.get(block, [])
            for way in self.ways:
                if any(carrier in way.carriers for carrier in carriers):
                    way.moved_s = now_s
                    way.moved += 1
            blocks.staged(self.table, [block])
        self._losses, self._up_s = 0, now_s

    def carrier(self, way: _Way) -> int:
        """A number for a new connection of a route."""
        with self.changed:
            self._carriers += 1
            way.carriers.add(self._carriers)
            return self._carriers

    def take(self, way: _Way, carrier: int) -> int | None:
        """A block for a connection that has nothing to send; None when there is none for now."""
        with self.changed:
            if self.over:
                return None
            block = blocks.take(self.table, carrier)
            if block is None:
                block = self._late(way)
                if block is not None:
                    blocks.sent(self.table, block, carrier)
            if block is None:
                self.changed.wait(_LOOK_S)
            else:
                self._reading += 1
            return block

    def _late(self, way: _Way) -> int | None:
        """A block that an idle route should send again: of those that a route of less than half its own rate has, which
        would come later; or, when it has nothing under way itself, the oldest.
        """
        found = [] if self._grows else blocks.tail(self.table, way.carriers)
        if blocks.under_way(self.table, way.carriers):
            slow = {carrier for other in self.ways if 2 * other.rate() < way.rate() for carrier in other.carriers}
            found = [block for block in found if slow.issuperset(self.table.carriers[block])]
        return next(iter(found), None)

    def read(self, block: int, file: int, buffer: memoryview, channel: Channel) -> memoryview | None:
        """The bytes of a block that was taken; None when they cannot be had, which ends it all."""
        data = None
        try:
            data = self.cargo.take(block, file, buffer, channel)
        except TransferFailure as failure:
            self.fail(failure)
        with self.changed:
            self._reading -= 1
        if data is not None:
            self.publish()
        return data

    def publish(self) -> None:
        """Say PUBLISH by all routes as soon as every block was read: the router waits for what is on its way."""
        with self.changed:
            ready = not self._reading and not any(self.table.state[i] is blocks.Block.READY for i in self.table.queue)
            if self.over or self._grows or not self.tid or not ready or self._order is not None:
                return
            channel = next((way.control for way in self.ways if way.control), None)
            if channel is None:
                return  # whichever route comes back says it
            try:
                self._order = self.cargo.publish(self.tid, channel)
            except TransferFailure as failure:
                self.fail(failure)
                return
        for way in self.ways:
            way.say(self._order)

    def repeat(self, way: _Way) -> None:
        """A route came up: it hears the PUBLISH too."""
        if self._order is not None:
            way.say(self._order)
        else:
            self.publish()

    def lost(self, carrier: int, failure: TransferFailure) -> None:
        """A connection is gone: what it had on its way goes by the others."""
        with self.changed:
            blocks.carrier_down(self.table, carrier)
            self._losses += 1
            if self._losses > _LOSSES * (1 + sum(way.sockets.now for way in self.ways)):
                self._failure = self._failure or failure
            self.changed.notify_all()

    def down(self, way: _Way, was_up: bool) -> None:
        """A route is gone, with all its connections."""
        with self.changed:
            if was_up:
                self._up_s = time.monotonic()
            for carrier in way.carriers:
                blocks.carrier_down(self.table, carrier)
            way.carriers.clear()
            self.changed.notify_all()

    def duplicate(self) -> int:
        """A descriptor of the file for one thread; -1 when all is over, and the file perhaps closed."""
        with self.changed:
            return -1 if self.over else os.dup(self._file)

    def _look(self) -> None:
        """Whether there is still hope."""
        problems = [way.problem for way in self.ways if way.problem is not None]
        if len(problems) < len(self.ways) or any(way.control for way in self.ways):
            return
        hopeless = not self._up_s or all(not problem.kind.retryable for problem in problems)
        if not hopeless and time.monotonic() - self._up_s < self._patience_s:
            return
        best = next((problem for problem in problems if problem.kind.retryable), problems[0])
        text = "; ".join(dict.fromkeys(f"{_by(way.route)}{way.problem}" for way in self.ways))
        self._failure = self._failure or TransferFailure(best.kind, text, best.server, best.retry_after_s)


def _by(route: Route) -> str:
    return f"by {shown(route)}: " if route else ""


class _Way:
    """One route: its control connection, in a thread, and those that carry blocks, each in one."""

    def __init__(self, sending: Sending, route: Route, is_one_of_several: bool) -> None:
        self._sending, self.route, self._several = sending, route, is_one_of_several
        self.control: Channel | None = None
        self._lane: Lane | None = None
        self.carriers: set[int] = set()
        self.problem: TransferFailure | None = None
        self.sent_bytes = 0
        self.moved_s = self._up_s = 0.0
        self.moved = 0
        self.damages = 0
        self.sockets = Sockets(sending.cargo.connections, sending.cargo.most_connections)
        self._manned: set[int] = set()
        self._acked_bytes = 0
        self._channels: set[Channel] = set()
        self._silent = 0
        self._lock = threading.Lock()

    def run(self) -> None:
        """Keep the route up until all is over, or somebody must change something first."""
        cargo = self._sending.cargo
        hop = self.route[0] if self.route else cargo.gateway.server
        with links().lane(hop, cargo.claim) as self._lane:
            self._keep_up()

    def _keep_up(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._sending.over:
            started_s = time.monotonic()
            try:
                self._once()
            except TransferFailure as failure:
                with self._sending.changed:
                    if self._sending.over:
                        return
                    self.problem = failure
                    self._sending.changed.notify_all()
                if not failure.kind.retryable:
                    return
            except Exception as problem:
                self._sending.fail(TransferFailure(ErrorClass.UNKNOWN, f"{type(problem).__name__}: {problem}"))
                raise
            if time.monotonic() - started_s > _MAX_PAUSE_S:
                pause_s = _FIRST_PAUSE_S
            self._pause(pause_s)
            pause_s = min(_MAX_PAUSE_S, pause_s * 2)

    def share(self) -> Share:
        """What it did."""
        sockets = self.sockets
        return Share(self.route, self.sent_bytes, str(self.problem or ""), sockets.now, sockets.reason)

    def rate(self) -> float:
        """Blocks a second since it came up."""
        return self.moved / max(1e-3, time.monotonic() - self._up_s)

    def say(self, message: Message) -> bool:
        """Whether it could be said by this route."""
        with self._lock:
            control = self.control
            try:
                if control is not None:
                    control.send(message)
            except TransferFailure:
                return False  # its own thread notices too
            return control is not None

    def close(self) -> None:
        """End its connections; their threads notice and close them."""
        with self._lock:
            for channel in list(self._channels):
                channel.abort()
            control, self.control = self.control, None
        if control is not None:
            control.finish()

    def _pause(self, seconds: float) -> None:
        with self._sending.changed:
            self._sending.changed.wait_for(lambda: self._sending.over, seconds)

    def _once(self) -> None:
        sending = self._sending
        started_s = time.monotonic()
        with Channel(sending.cargo.gateway, self.route, self._lane) as control:
            trips_s = [time.monotonic() - started_s]
            control.send(sending.cargo.ask())
            try:
                self._listen(control, trips_s)
            finally:
                was_up = self.control is not None
                self.close()
                sending.down(self, was_up)

    def _listen(self, control: Channel, trips_s: list[float]) -> None:
        """Messages until the connection ends; a heartbeat four times within the silence that is allowed."""
        sending = self._sending
        heard_s = beat_s = time.monotonic()
        number = 0
        while not sending.over:
            silence_s = self._silence_s(trips_s)
            if control.has_more(min(_FIRST_PAUSE_S, silence_s / 4)):
                message = control.receive()
                heard_s = time.monotonic()
                if isinstance(message, Heartbeat) and message.echo == number:
                    trips_s[:] = [*trips_s[1 - _ROUND_TRIPS :], heard_s - beat_s]
                elif isinstance(message, Opened):
                    self._opened(control, message)
                else:
                    sending.hear(self, message)
            now_s = time.monotonic()
            self._tune(control, now_s, min(trips_s))
            if now_s - max(heard_s, self.moved_s) > silence_s:
                self._silent += 1
                raise control.failure(ErrorClass.STALLED, f"silent for {silence_s:.1f} s")
            if now_s - beat_s > silence_s / 4:
                number, beat_s = number + 1, now_s
                with self._lock:
                    control.send(Heartbeat(number))

    def _silence_s(self, trips_s: list[float]) -> float:
        """A route that was given up for nothing is given twice the time when it is back."""
        timeout_s = self._sending.cargo.gateway.timeout_s
        if not self._several:
            return timeout_s
        return min(timeout_s, max(LEAST_SILENCE_S, 3 * max(trips_s)) * (1 << min(self._silent, _DOUBLINGS)))

    def _opened(self, control: Channel, message: Opened) -> None:
        if self.control is not None:
            self.damages += 1
            self._sending.damaged(self, message, control)
            return
        self._sending.hear(self, message)
        self._sending.joined(self)
        with self._lock:
            if self._sending.over:
                return
            self.control, self.problem = control, None
            self._up_s, self.moved = time.monotonic(), 0
        self.sockets.begin(time.monotonic())
        with self._lock:
            self._manned = set()
        self._man(control)
        self._sending.repeat(self)

    def _man(self, control: Channel) -> None:
        """As many connections as there should be; what is too much ends by itself, the latest first."""
        with self._lock:
            for place in range(min(self.sockets.now, self._sending.table.open)):
                if place not in self._manned:
                    self._manned.add(place)
                    threading.Thread(target=self._carry, args=(control, place), daemon=True).start()

    def _tune(self, control: Channel, now_s: float, round_trip_s: float) -> None:
        """Another number of connections, where that is better."""
        if self.control is not control or not self._sending.table.queue:
            return
        with self._lock:
            acked_bytes = self._acked_bytes + sum(channel.acked_bytes for channel in self._channels)
            segments = sum((channel.segments for channel in self._channels), Segments())
        sample = self.sockets.look(now_s, acked_bytes, round_trip_s, segments)
        if sample is not None and sample.after != sample.before:
            log.event("connections", route=shown(self.route), connections=sample.after, before=sample.before,
                      rate_mb_s=round(sample.rate / 1e6, 3), why=sample.reason)  # fmt: skip
            self._man(control)

    def _leaves(self, control: Channel, place: int) -> bool:
        """Whether a connection is one too many; then it ends."""
        with self._lock:
            if self.control is control and place >= self.sockets.now:
                self._manned.discard(place)
                return True
            return False

    def _carry(self, control: Channel, place: int) -> None:
        """Connections for blocks, one after the other, as long as the control connection lasts."""
        pause_s = _FIRST_PAUSE_S
        file = self._sending.duplicate()
        if file < 0:
            return
        try:
            while self.control is control and not self._sending.over and not self._leaves(control, place):
                number = self._sending.carrier(self)
                try:
                    if self._blocks(control, number, place, file):
                        return
                except TransferFailure as failure:
                    self._sending.lost(number, failure)
                    if self.control is control:
                        self._pause(pause_s)
                        pause_s = min(_MAX_PAUSE_S, pause_s * 2)
        except Exception as problem:
            self._sending.fail(TransferFailure(ErrorClass.UNKNOWN, f"{type(problem).__name__}: {problem}"))
            raise
        finally:
            os.close(file)

    def _blocks(self, control: Channel, number: int, place: int, file: int) -> bool:
        """Blocks over one connection; True when it is one too many, and all that it had was sent."""
        sending = self._sending
        with Channel(sending.cargo.gateway, self.route, self._lane) as channel:
            with self._lock:
                if self.control is not control:
                    return False
                self._channels.add(channel)
            try:
                channel.send(Attach(sending.tid))
                buffer = memoryview(bytearray(sending.cargo.ask().block_bytes))
                while self.control is control and not sending.over:
                    if self._leaves(control, place):
                        return True
                    block = sending.take(self, number)
                    if block is not None:
                        self._send(channel, block, sending.read(block, file, buffer, channel))
                    elif channel.has_more(0):
                        channel.receive()  # nothing comes here but the reason of its end
            finally:
                with self._lock:
                    self._channels.discard(channel)
                    self._acked_bytes += channel.acked_bytes
        return False

    def _send(self, channel: Channel, block: int, data: memoryview | None) -> None:
        if data is None:
            return
        channel.send_block(self._sending.tid, block, data)
        self.sent_bytes += len(data)
        try:
            self._sending.cargo.count(len(data))
        except TransferFailure as failure:
            self._sending.fail(failure)
