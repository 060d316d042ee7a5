"""The connections between this router and its neighbours: heartbeats, announcements of links, probes.

Top to bottom: :meth:`Neighbourhood.run` connects to each configured neighbour again and again and announces this
router's links; :class:`_Line` is one such connection, in either direction; :meth:`Neighbourhood.routed` answers ROUTES.
The messages kept of a peer are bounded, whatever it sends: one frame a connection, and the limits of the book.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from overlay_router.peers.circuits import Dial
from overlay_router.peers.greeting import Peer, Unwelcome, connect, introduce, receive_frame
from overlay_router.peers.keys import Key, OwnCredential
from overlay_router.peers.limits import Allowance, Complaints
from overlay_router.routing.book import Book
from overlay_router.routing.chooser import Chooser
from overlay_router.routing.measure import Meter
from stageout.core import log
from stageout.core.ending import end
from stageout.overlay.uplink import Sharer, Uplink
from stageout.overlay.wire import frames, messages
from stageout.overlay.wire.fields import MAX_LINKS, ShareRow
from stageout.overlay.wire.frames import BadFrame, Decoder
from stageout.overlay.wire.messages import Heartbeat, Known, Links, Message, Probe, Probed, Refuse, Routed
from stageout.wire.services import LinkReport, RouterReport

BEATS_AN_INTERVAL = 5
INTERVALS_TO_AGE = 6
PROBE_EVERY_INTERVALS = 4
_READ_BYTES = 65536
_SILENCE_S = 5.0
_LEAST_GAP_S = 1.0
_MOST_QUEUED_BYTES = 4 * 1024 * 1024
_MESSAGES_A_SECOND = 200
_MESSAGES_AT_ONCE = 1000
_PROBE_TIMEOUT_S = 10.0
#: Beside all transfers together, which have 1.
_PROBE_WEIGHT = 0.1
#: So many probes at once wait for their turn on the uplink, in threads that nothing else needs.
_MOST_PROBES = 4
#: For both greetings, however often something comes of them.
_INTRODUCED_S = 20.0
T = TypeVar("T")
_KNOWN_AT_ONCE = messages.MAX_LINKS * 16


@dataclass
class _Line:
    """One control connection to another router. :param source: its address if this router connected to it."""

    source: str
    peer: Peer
    writer: asyncio.StreamWriter
    meter: Meter | None
    beat: int = 0
    beat_sent_s: float = 0.0
    allowance: Allowance = field(default_factory=lambda: Allowance(_MESSAGES_A_SECOND, _MESSAGES_AT_ONCE))

    def send(self, message: Message) -> None:
        """Queue a message. :raises OSError: the peer does not read what it is sent."""
        if self.writer.transport.get_write_buffer_size() > _MOST_QUEUED_BYTES:
            raise ConnectionAbortedError("the neighbour does not read")
        self.writer.write(messages.encode(message, frames.checksums()[self.peer.checksum]))

    def count(self, now_s: float) -> None:
        """One more message came. :raises BadFrame: more than any router sends."""
        if self.allowance.take(now_s):
            raise BadFrame(f"more than {_MESSAGES_A_SECOND} messages a second from a neighbour")


class Neighbourhood:
    """All lines of one router, and what it learns by them.

    :param node: its name. :param book: of links. :param own: what it shows to the neighbours.
    :param interval_s: between announcements; a router that is silent for six of them has gone.
    :param targets: addresses of the neighbours to connect to. :ivar dial: makes the connections.
    :ivar uplink: that all its connections share; None: none that is known.
    :ivar on_reached: called with the address of a neighbour when it is reached, for the first time or again.
    """

    def __init__(self, node: str, book: Book, own: OwnCredential, interval_s: float, targets: Iterable[str]) -> None:
        self._wanted = targets
        self.dial: Dial = connect
        self.on_reached: Callable[[str], None] = lambda address: None
        self.uplink: Uplink | None = None
        self._node, self._book, self._own, self._interval_s = node, book, own, interval_s
        self._chooser = Chooser(book.address)
        self._thinking = ThreadPoolExecutor(max_workers=1, thread_name_prefix="routes")
        self._turns = ThreadPoolExecutor(max_workers=_MOST_PROBES, thread_name_prefix="probes")
        self._targets: dict[str, asyncio.Task[None]] = {}
        self._complaints = Complaints()
        self._ending: set[asyncio.Task[None]] = set()
        self._lines: list[_Line] = []
        self._changed = asyncio.Event()
        self._record_due_s = 0.0

    async def run(self) -> None:
        """Until cancelled: connect, announce, probe."""
        try:
            self.connect_to(self._wanted)
            while True:
                self._changed.clear()
                self._announce()
                await self._look_at_routes()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), self._interval_s)
                await asyncio.sleep(min(_LEAST_GAP_S, self._interval_s / BEATS_AN_INTERVAL))
        finally:
            self._thinking.shutdown(wait=False)
            await end([*self._targets.values(), *self._ending])
            self._turns.shutdown(wait=False)

    def connect_to(self, targets: Iterable[str]) -> None:
        """From now on these are the neighbours."""
        wanted = sorted({target for target in targets if target != self._book.address})[: messages.MAX_LINKS]
        for gone in set(self._targets) - set(wanted):
            ending = asyncio.get_running_loop().create_task(end([self._targets.pop(gone)]))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
        for target in wanted:
            if target not in self._targets:
                self._targets[target] = asyncio.get_running_loop().create_task(self._keep(target))

    @property
    def address(self) -> str:
        """Of this router."""
        return self._book.address

    def moved(self, address: str, size_bytes: int) -> None:
        """So many bytes of transfers left for a neighbour since the last call."""
        for line in self._lines:
            if line.source == address and line.meter:
                line.meter.moved(size_bytes, time.monotonic())

    async def routed(self, terminal: str) -> Routed:
        """Routes to a terminal."""
        now_s = time.monotonic()
        return await self._thought(self._chooser.routed, self._book.graph(now_s), terminal, now_s)

    def known(self, first: int, key: Key) -> Known:
        """All links that are known, from a position on, and this router's uplink.

        :param key: of who asks. With it for all names one sees who uses the uplink, else only what is one's own.
        """
        rows = self._book.rows(time.monotonic())
        known = Known(len(rows), tuple(rows[first : first + _KNOWN_AT_ONCE]), self._book.address)
        if self.uplink is None:
            return known
        used, sharers = self.uplink.used()
        seen = [one for one in sharers if not key.prefix or one.owner == key.name][:MAX_LINKS]
        return replace(known, uplink=int(self.uplink.rate), used=int(used), sharers=tuple(map(_row, seen)))

    async def report(self) -> RouterReport:
        """Return the links to all neighbours and the routes in use, for this router's ad."""
        meters = {line.source: line.meter for line in self._lines if line.meter}
        links = tuple(_link_report(target, meters.get(target)) for target in sorted(self._targets))
        incoming = sum(line.meter is None for line in self._lines)
        routes = await self._thought(self._chooser.reports, self._book.graph(time.monotonic()))
        return RouterReport(int(time.time()), links, routes, incoming=incoming)

    async def incoming(self, sock: socket.socket, peer: Peer, first: Heartbeat) -> None:
        """A router has connected to this one. Takes the socket. :raises Unwelcome: its key is not that of a router."""
        if not peer.key.is_router:
            sock.close()
            raise Unwelcome(f"the key {peer.key.name!r} is not marked as that of a router", peer.checksum)
        reader, writer = await asyncio.open_connection(sock=sock)
        line = _Line(f"{peer.key.name}/{peer.node}", peer, writer, None)
        await self._serve(line, reader, first)

    async def time_probe(self, sock: socket.socket, peer: Peer, ask: Probe) -> None:
        """Throw the bytes of a probe away and say how long the rest took. :raises Unwelcome: not for this peer."""
        if ask.size_bytes > messages.MAX_PROBE_BYTES or not peer.key.is_router:
            raise Unwelcome("a probe is for routers, and has at most 8 MiB", peer.checksum)
        loop, buffer = asyncio.get_running_loop(), memoryview(bytearray(min(ask.size_bytes, 1 << 18) or 1))
        left, half, half_s = ask.size_bytes, ask.size_bytes // 2, time.monotonic()
        end_s = half_s + _PROBE_TIMEOUT_S
        while left:
            count = await asyncio.wait_for(loop.sock_recv_into(sock, buffer[:left]), end_s - time.monotonic())
            if not count:
                return
            if left > half >= left - count:
                half, half_s = left - count, time.monotonic()
            left -= count
        answer = Probed(half, int((time.monotonic() - half_s) * 1e6))
        await loop.sock_sendall(sock, messages.encode(answer, frames.checksums()[peer.checksum]))

    async def _keep(self, target: str) -> None:
        """Connect to a neighbour, again and again."""
        pause_s, told = 0.0, ""
        while True:
            began_s = time.monotonic()
            try:
                await self._dial(target)
            except (OSError, asyncio.TimeoutError, BadFrame, Unwelcome) as problem:
                if str(problem) != told:
                    told = str(problem)
                    log.warn("neighbour-connect-failed", address=target, problem=problem or "silent")
            if time.monotonic() - began_s > self._interval_s:
                pause_s, told = 0.0, ""
            pause_s = min(self._interval_s, max(0.1, 2 * pause_s))
            await asyncio.sleep(pause_s)

    async def _dial(self, target: str) -> None:
        with await self.dial(target) as sock:
            peer = await asyncio.wait_for(introduce(sock, self._node, *self._own.now.key), _INTRODUCED_S)
            reader, writer = await asyncio.open_connection(sock=sock.dup())
        meter = Meter(PROBE_EVERY_INTERVALS * self._interval_s)
        line = _Line(target, peer, writer, meter)
        line.send(Heartbeat())
        self.on_reached(target)
        probing = asyncio.get_running_loop().create_task(self._probe(target, meter))
        try:
            await self._serve(line, reader, None)
        finally:
            await end([probing])

    async def _serve(self, line: _Line, reader: asyncio.StreamReader, first: Message | None) -> None:
        """One line to its end."""
        log.event("neighbour-connected", address=line.source, node=line.peer.node)
        now_s = time.monotonic()
        self._lines.append(line)
        beating = asyncio.get_running_loop().create_task(self._beat(line))
        try:
            for links in self._book.forwardable(now_s):
                line.send(links)
            if first is not None:
                self._take(line, first)
            await self._read(line, reader)
        finally:
            self._lines.remove(line)
            line.writer.transport.abort()  # what is left to say concerns nobody, and would wait for who reads nothing
            if line.meter:
                self._changed.set()
            log.event("neighbour-disconnected", address=line.source, node=line.peer.node)
            await end([beating])

    async def _read(self, line: _Line, reader: asyncio.StreamReader) -> None:
        decoder = Decoder(frames.checksums()[line.peer.checksum])
        while data := await asyncio.wait_for(reader.read(_READ_BYTES), max(_SILENCE_S, self._interval_s)):
            decoder.feed(data)
            for frame in decoder.frames():
                self._take(line, messages.decode(frame))

    def _take(self, line: _Line, message: Message) -> None:
        now_s = time.monotonic()
        line.count(now_s)
        if isinstance(message, Refuse):  # it wants TLS, perhaps, as only who has proved a key is told
            raise Unwelcome(message.message)
        if isinstance(message, Links):
            self._take_links(line, message, now_s)
        elif not isinstance(message, Heartbeat):
            raise BadFrame(f"{type(message).__name__} is not for a line between routers")
        elif message.number:
            line.send(Heartbeat(echo=message.number))
        elif message.echo == line.beat and line.beat and line.meter:
            line.meter.echoed(now_s - line.beat_sent_s)

    def _take_links(self, line: _Line, links: Links, now_s: float) -> None:
        taken = self._book.accept(links, line.source, now_s)
        if taken.refusal:
            self._complaints.warn("links-refused", line.source, router=links.router, reason=taken.refusal)
        if taken.newer:
            self._pass_on(self._book.aged(links.router, now_s), line)

    def _pass_on(self, links: Links, source: _Line | None) -> None:
        for line in self._lines:
            if line is not source:
                try:
                    line.send(links)
                except OSError as problem:
                    log.warn("neighbour-connect-failed", address=line.source, problem=problem)
                    line.writer.transport.abort()

    async def _beat(self, line: _Line) -> None:
        while True:
            line.beat, line.beat_sent_s = line.beat + 1, time.monotonic()
            try:
                line.send(Heartbeat(line.beat))
            except OSError:
                line.writer.transport.abort()
                return
            await asyncio.sleep(self._interval_s / BEATS_AN_INTERVAL)

    def _announce(self) -> None:
        """This router's links to all neighbours; a log record of each; routes looked at again."""
        now_s = time.monotonic()
        measured = {line.source: line.meter for line in self._lines if line.meter}
        rows = [(to, int(meter.rate), int(meter.round_trip_s * 1e6)) for to, meter in measured.items()]
        self._pass_on(self._book.announce(rows, now_s), None)
        if now_s >= self._record_due_s:
            self._record_due_s = now_s + self._interval_s
            self._record()

    async def _look_at_routes(self) -> None:
        now_s = time.monotonic()
        for terminal, choice in await self._thought(self._chooser.update, self._book.graph(now_s), now_s):
            log.event("routes-changed", terminal=terminal, routes=_shown(choice.routes), reason=choice.reason)

    async def _thought(self, work: Callable[..., T], *values: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thinking, partial(work, *values))

    def _record(self) -> None:
        """One log record for each link: what can be plotted (docs/overlay/routes.md)."""
        for line in self._lines:
            if line.meter:
                log.event(
                    "link-measured",
                    to=line.source,
                    rate_mb_s=f"{line.meter.rate / 1e6:.3f}",
                    rtt_ms=f"{line.meter.round_trip_s * 1e3:.3f}",
                    moved_bytes=line.meter.take_moved(),
                    source=line.meter.source,
                )

    async def _probe(self, target: str, meter: Meter) -> None:
        while True:
            size_bytes = meter.probe_bytes(time.monotonic())
            if size_bytes:
                try:
                    rate = await asyncio.wait_for(self._probed(target, size_bytes), 2 * _PROBE_TIMEOUT_S)
                    first = not meter.rate
                    meter.probed(rate, time.monotonic())
                    if first:
                        self._changed.set()
                except (OSError, asyncio.TimeoutError, BadFrame, Unwelcome) as problem:
                    log.warn("probe-failed", address=target, problem=problem or "silent")
            await asyncio.sleep(self._interval_s)

    async def _probed(self, target: str, size_bytes: int) -> float:
        """Bytes a second that one probe came to."""
        loop = asyncio.get_running_loop()
        with await self.dial(target) as sock:
            peer = await introduce(sock, self._node, *self._own.now.key)
            checksum = frames.checksums()[peer.checksum]
            await loop.sock_sendall(sock, messages.encode(Probe(size_bytes), checksum))
            noise = os.urandom(1 << 16)
            turn = self.uplink.turn(("", 0), _PROBE_WEIGHT) if self.uplink else None
            for start in range(0, size_bytes, len(noise)):
                if turn:
                    await loop.run_in_executor(self._turns, turn.take, len(noise))
                await loop.sock_sendall(sock, noise[: size_bytes - start])
            answer = messages.decode(await receive_frame(sock, checksum))
        if isinstance(answer, Refuse):
            raise Unwelcome(answer.message)
        if not isinstance(answer, Probed):
            raise BadFrame(f"{type(answer).__name__} where Probed was due")
        return answer.size_bytes * 1e6 / max(1, answer.time_us)


def _row(one: Sharer) -> ShareRow:
    return one.to, one.owner, one.priority, one.flows, round(1000 * one.share), int(one.rate)


def _link_report(to: str, meter: Meter | None) -> LinkReport:
    if meter is None:
        return LinkReport(to)
    return LinkReport(to, 1, int(meter.rate), int(meter.round_trip_s * 1e6), meter.source)


def _shown(routes: Sequence[Sequence[str]]) -> str:
    return "; ".join(" > ".join(route[1:]) for route in routes) or "none"
