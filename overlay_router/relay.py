"""The way of one operation through the router, top to bottom: connections in, answers out. Read first.

A connection that has proved its key becomes one of four. One that asks for a circuit goes on to the next hop
(:mod:`overlay_router.peers.circuits`), or ends here and begins anew with whoever is at its other end. Control
connections carry the messages of :mod:`overlay_router.local.destination` and
:mod:`overlay_router.custodians.custodian`, which are answered one after the other by the thread that owns the disk;
what changes no file is answered by :mod:`overlay_router.questions`. Connections that carry data go to a worker process
together with the file, or with the next hop. Blocks that a worker reports are recorded, and only then said to their
sender (:mod:`overlay_router.recording`). The data that the router then sends by itself (custody, copies, deliveries by
plugins) leave through :mod:`overlay_router.outgoing`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sqlite3
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

from overlay_router.away import is_disk, told_to
from overlay_router.copying import warrants
from overlay_router.custodians.forwarder import Forwarding
from overlay_router.data.jobs import Again, Job, Report
from overlay_router.data.pool import Pool
from overlay_router.delivery.leases import Leases
from overlay_router.delivery.outflow import Means
from overlay_router.ends import Ends
from overlay_router.http_access import HttpAccess
from overlay_router.http_desk import HttpDesk
from overlay_router.http_relay import Relaying
from overlay_router.incoming import Receiving, listen_on
from overlay_router.line import Line, answered, closed
from overlay_router.local.destination import Destination
from overlay_router.local.replies import Reply
from overlay_router.local.small_files import Arrived
from overlay_router.local.tree import no_room
from overlay_router.operations.custody_table import CustodyTable
from overlay_router.operations.delivery import Delivery
from overlay_router.operations.desk import OperationsDesk
from overlay_router.operations.waits import Waits
from overlay_router.outgoing import Outgoing
from overlay_router.peers.brought import Brought
from overlay_router.peers.circuits import Neighbours, onward
from overlay_router.peers.cover import Cover, HttpBegins, Wire, begins_with_tls, covered
from overlay_router.peers.greeting import Peer, Unwelcome, connect, greet, refuse
from overlay_router.peers.keys import Keys
from overlay_router.peers.limits import Complaints, Limits, TooMany, plain
from overlay_router.peers.origins import as_known, as_said, known_as, with_origin
from overlay_router.peers.rights import Rights, forgeable, too_late
from overlay_router.peers.terms import Terms
from overlay_router.questions import Questions, sending_job
from overlay_router.recording import RECORD_AGAIN_S, Recording
from overlay_router.routing.neighbours import Neighbourhood
from overlay_router.waiting import TOGETHER, Changes, Packs
from stageout.core import log
from stageout.core.ending import end
from stageout.overlay.rules.operations import Identity
from stageout.overlay.tcp import notice_death
from stageout.overlay.wire import frames, messages, packs
from stageout.overlay.wire.fields import is_origin
from stageout.overlay.wire.frames import BadFrame, Decoder, Frame, OtherVersion, Type
from stageout.overlay.wire.greeting import SAFE_DIGESTS
from stageout.overlay.wire.messages import List, Message, Stat
from stageout.overlay.wire.route import Route

#: Messages of one connection that wait for the disk; then it is not read.
_WAITING = 8
#: With so many control connections, those that come are told to send no more than 1 MiB in a pack.
_GENEROUS = 128
_EXPIRE_INTERVAL_S = 60.0
_AGAIN_S = 5
_ACCEPT_AGAIN_S = 0.1
#: A job that a worker has no room for is given to it again after so long, so often.
_GIVEN_AGAIN_S, _GIVEN_TRIES = 0.02, 500
_GREETING_S = 30.0
_DELIVERIES = 4
_SIGNED = (messages.Open, messages.Operation, messages.Pack)
_NOT_FINAL = ("pending", "unknown")
_REASON_CHARS = 200
T = TypeVar("T")
M = TypeVar("M", bound=Message)


class Router:
    """A listening router.

    :param node: its name. :param ends: where operations end; used in one thread only. :param keys: who may connect.
    :param workers: processes that move data. :param neighbours: whom circuits are passed on to.
    :param links: what is known of the routers around. :param rights: who may do what, and how much.
    :param most_connections: of one key. :param messages_per_s: on one control connection.
    :param cover: how it does TLS.
    :param forwarding: with a custodian only. :param means: with names that plugins deliver only.
    :param leases: that it gives to gateways which share a target.
    :param brought: signed operations by who brought them; with ends only.
    :param http: whose tokens requests in HTTP may show.
    """

    def __init__(
        self,
        node: str,
        ends: Ends,
        keys: Keys,
        workers: int,
        neighbours: Neighbours,
        links: Neighbourhood,
        rights: Rights,
        most_connections: int,
        messages_per_s: float,
        cover: Cover,
        forwarding: Forwarding | None = None,
        means: Means | None = None,
        leases: Leases | None = None,
        brought: Brought | None = None,
        http: HttpAccess | None = None,
    ) -> None:
        self.http = http or HttpAccess()
        self._node, self._ends, self.keys, self.neighbours = node, ends, keys, neighbours
        self.links, self.rights, self._cover, self._brought = links, rights, cover, brought
        self._configured, self._found = neighbours, frozenset[str]()
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="disk")
        self._lines: dict[str, list[Line]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._packs = Packs()
        self._receiving, self._controls = Receiving(), 0
        self._changes = Changes()
        self._pool = Pool(workers, self._on_report, self._on_again)
        self._terms = Terms(lambda key, ends: self._start(self._pool.end_of(key, ends)))
        links.dial = self._dial
        self.complaints = Complaints()
        self.limits = Limits(self._pool.connections, most_connections, messages_per_s, self.complaints.displaced)
        self._outgoing = Outgoing(
            ends, self._on_disk, self._deliver, self._ways, self._pool.share_with, forwarding, means
        )
        links.on_reached = self._reached
        self._recording = Recording(ends, self._on_disk, self._deliver, self._end_lines, self._outgoing, self._pool)
        copier, outflow = self._outgoing.copier, self._outgoing.outflow
        fetching = outflow.fetching if outflow else None
        relaying = Relaying(lambda: self.neighbours.allowed, links.address, connect)
        self._loop: asyncio.AbstractEventLoop | None = None
        waits = Waits()
        terminal = ends.operations and ends.operations(self._trusts, self._deliver_soon, ends.goes_out, waits.changed)
        self._keeper = ends.custody and ends.custody(waits.changed, self._look_soon)
        self._operations = OperationsDesk(terminal, self._keeper, waits, self._on_disk)
        most = forwarding.most if forwarding else _DELIVERIES
        self._delivery = Delivery(self._keeper, self._on_disk, most, self._keeper.address_of) if self._keeper else None
        self._desk = HttpDesk(ends, rights, self.limits, self._on_disk, self._deliver, relaying, self._operations)
        self._questions = Questions(node, ends, rights, self._on_disk, leases, copier, fetching)

    def _look_soon(self, identity: Identity) -> None:
        """Have the queue look at an operation in custody; in the disk's thread."""
        if self._loop is not None and self._delivery is not None:
            self._loop.call_soon_threadsafe(self._delivery.look, identity)

    def _reached(self, address: str) -> None:
        self._outgoing.reached(address)
        if self._delivery is not None:
            self._delivery.reached(address)

    def have_custody(self, lists: CustodyTable | None) -> None:
        """From now on this is the table of custody. All that was refused is tried again: rights may be others."""
        if self._keeper is not None and lists is not None and self._delivery is not None:
            self._keeper.become(lists)
            self._start(self._delivery.retry())

    def _trusts(self, authority: tuple[str, str]) -> bool:
        return self.http.trusts(self.keys, authority)

    def _deliver_soon(self, replies: list[Reply]) -> None:
        """Deliver what the destination says to others while it works for operations of HTTP; in the disk's thread."""
        if replies and self._loop is not None:
            self._loop.call_soon_threadsafe(self._deliver, replies)

    def have_keys(self, keys: Keys, http: HttpAccess, cover: Cover) -> None:
        """Take these keys, issuers and certificates from now on. Connections of a key that is gone, or changed, end."""
        before, self.keys, self.http, self._cover = self.keys, keys, http, cover
        for name in self.limits.keys() | self._pool.peers():
            if before.withdraws(name, keys):
                log.event("key-withdrawn", key=name)
                self.limits.end(name)
                self._start(self._pool.end_of(name))
        self._start(self._pool.admit(self.http.encoded(keys)))

    def have_issuer(self, issuer: str, keys: object) -> None:
        """An issuer of tokens for HTTP has these keys from now on."""
        if issuer in self.http.issuers:
            known = (self.http.issuers[issuer][0], keys)
            self.http = replace(self.http, issuers={**self.http.issuers, issuer: known})
            self._start(self._pool.admit(self.http.encoded(self.keys)))

    def have_neighbours(self, neighbours: Neighbours) -> None:
        """From now on these are configured."""
        found = self._found if neighbours.finds else frozenset()
        self.neighbours = replace(neighbours, allowed=neighbours.allowed | found)
        self.links.connect_to(self.neighbours.allowed)
        self._configured = neighbours

    def meet(self, found: frozenset[str]) -> None:
        """These routers were found; they become neighbours where the configuration says so."""
        self._found = found
        self.have_neighbours(self._configured)

    async def serve(self, listening: socket.socket) -> None:
        """Accept until cancelled; then every connection is closed and every worker ended."""
        listening.setblocking(False)
        loop = self._loop = asyncio.get_running_loop()
        self._start(self._expire())
        self._start(self.links.run())
        self._start(self._terms.run())
        self._start(self._pool.admit(self.http.encoded(self.keys)))
        self._start(self._packs.run(self._execute_packs, self._ends.apart))
        self._start(self._changes.run(self._change_names))
        if self._delivery is not None:
            self._start(self._delivery.run())
        for work in self._outgoing.works():
            self._start(work)
        try:
            while True:
                try:
                    sock, place = await loop.sock_accept(listening)
                    sock.setblocking(False)
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    notice_death(sock)
                except OSError as problem:  # no descriptor is free, above all: those who are connected go on
                    self.complaints.warn("connection-accept-failed", "", problem=problem)
                    await asyncio.sleep(_ACCEPT_AGAIN_S)
                    continue
                self._start(self._connection(sock, plain(str(place[0]))))
        finally:
            await end(self._tasks)
            self._pool.close()
            self._disk.shutdown()

    async def _connection(self, sock: socket.socket, host: str) -> None:
        async def met(wire: Wire) -> tuple[Peer, Message]:
            with self.limits.stranger(host, partial(_hang_up, sock, _end_of_this_task())) as proved:
                peer, first = await asyncio.wait_for(self._greeted(wire, proved), _GREETING_S)
            return peer._replace(host=host), first

        await self._serve_or_refuse(sock, host, met)

    def _on_again(self, again: Again, sock: socket.socket) -> None:
        """A connection whose transfer is over is wanted for another: as a new one, but that its key is proved."""

        async def met(wire: Wire) -> tuple[Peer, Message]:
            key = self.keys.proved(again.peer, again.ends)
            if key is None:
                raise Unwelcome(f"the key {again.peer!r} is not known here any more", again.checksum)
            if key.ends and key.ends <= time.time():
                raise Unwelcome(f"the token of {again.peer!r} has expired: ask for another", again.checksum)
            decoder = Decoder(frames.checksums()[again.checksum])
            decoder.feed(bytes.fromhex(again.frame))
            first = messages.decode(next(decoder.frames()))
            return Peer("", key, again.checksum, again.digest, again.nonce, again.host), first

        sock.setblocking(False)
        self._start(self._serve_or_refuse(sock, again.peer, met))

    async def _serve_or_refuse(
        self, sock: socket.socket, host: str, meet: Callable[[Wire], Awaitable[tuple[Peer, Message]]]
    ) -> None:
        with contextlib.ExitStack() as owned:
            wire = Wire(sock, owned)
            try:
                peer, first = await meet(wire)
                end = _end_of_this_task()
                with self._terms.of(peer.key, end), self.limits.of(peer, end), told_to(peer.checksum):
                    await self._serve(wire.sock, peer, first)
            except HttpBegins as http:
                await self._serve_http(http, host)
            except TooMany as reason:
                self.complaints.warn("limit-reached", host, reason=reason)
            except Unwelcome as reason:
                self.complaints.warn("peer-refused", host, reason=reason)
                await refuse(wire.sock, reason)
            except BadFrame as problem:
                self.complaints.warn("protocol-violated", host, problem=problem)
                if isinstance(problem, OtherVersion):
                    await refuse(wire.sock, Unwelcome(problem.told))
            except (OSError, asyncio.TimeoutError) as problem:
                log.event("peer-disconnected", peer=host, problem=problem or "silent")

    async def _serve_http(self, http: HttpBegins, host: str) -> None:
        try:
            await self._desk.serve(http.channel, http.raw, host, _end_of_this_task())
        except TooMany as reason:
            self.complaints.warn("limit-reached", host, reason=reason)
        except OSError as problem:
            log.event("peer-disconnected", peer=host, problem=problem)

    async def _greeted(self, wire: Wire, proved: Callable[[str], None]) -> tuple[Peer, Message]:
        peer, first = await self._greeted_once(wire, proved)
        if isinstance(first, messages.Via) and not first.route:
            peer, first = await self._greeted_once(wire, proved)
        # a circuit that goes on is nothing by itself: its sender covers what is inside, to the end
        if self._cover.insists and not wire.covered and not isinstance(first, messages.Via):
            whose = "the file of STAGEOUT_ROUTER_KEY" if peer.key.is_router else "your key file"
            raise Unwelcome(f"this router takes files over TLS only: write 'ca FILE' into {whose}", peer.checksum)
        return peer, first

    async def _greeted_once(self, wire: Wire, proved: Callable[[str], None]) -> tuple[Peer, Message]:
        await wire.uncover(self._cover, self._pool)
        keys = self.keys

        def still_proved(name: str) -> None:
            if keys.withdraws(name, self.keys):
                raise Unwelcome(f"the key {name!r} was withdrawn")
            proved(name)

        packed_bytes = packs.MAX_TAKEN_BYTES if self._controls < _GENEROUS else packs.MAX_PACK_BYTES
        return await greet(wire.sock, self._node, keys, still_proved, self._ends.epoch, packed_bytes)

    async def _pass_on(self, sock: socket.socket, peer: Peer, ask: messages.Via) -> None:
        ask = replace(ask, owner=ask.owner if peer.key.is_router else peer.key.name)
        # what is in TLS to its end needs no more of it, and is spliced
        plainly = not self.neighbours.own.now.ca or await begins_with_tls(sock)
        with await onward(self._node, ask, self.neighbours, connect if plainly else self._dial) as far:
            job = Job(
                "relay", hop=ask.route[0], peer=peer.key.name, ends=peer.key.ends, to=peer.host if ask.back else "",
                flow=ask.flow, owner=ask.owner, priority=ask.priority, deadline=ask.deadline,
            )  # fmt: skip
            self._pool.give(job, sock, far.fileno())

    async def _dial(self, address: str) -> socket.socket:
        """A connection to a neighbour, in TLS where this router trusts somebody's certificates."""
        sock, ca = await connect(address), self.neighbours.own.now.ca
        return covered(sock, address, ca, self._pool) if ca else sock

    async def _serve(self, sock: socket.socket, peer: Peer, first: Message) -> None:
        if isinstance(first, messages.Via):
            await self._pass_on(sock, peer, first)
        elif isinstance(first, messages.Heartbeat):
            await self.links.incoming(sock.dup(), peer, first)
        elif isinstance(first, messages.Probe):
            await self.links.time_probe(sock, peer, first)
        elif isinstance(first, (messages.Routes, messages.Lease)):
            await self._control(sock.dup(), peer, first)
        elif not self._ends:
            raise Unwelcome(
                f"{self._node} is a relay and keeps no files: name it in STAGEOUT_OVERLAY_ROUTES, not in a URL",
                peer.checksum,
            )
        elif isinstance(first, messages.Attach):
            await self._attach(sock, peer, first)
        elif isinstance(first, messages.Get):
            await self._get(sock, peer, first)
        elif isinstance(first, messages.GetPack):
            await self._get_pack(sock, peer, first)
        else:
            await self._control(sock.dup(), peer, first)

    @property
    def _destination(self) -> Destination:
        assert self._ends.destination is not None
        return self._ends.destination

    async def _control(self, sock: socket.socket, peer: Peer, first: Message) -> None:
        todo: asyncio.Queue[Message | Frame] = asyncio.Queue(_WAITING)
        turn = object()

        async def admit(size_bytes: int) -> None:
            """A connection has one large frame here: the last one waits with all others, or is no more."""
            nonlocal turn
            await todo.join()
            self._receiving.end(turn)
            if size_bytes > frames.MAX_BULK_BYTES:
                turn = await self._receiving.begin(size_bytes)

        incoming, writer = await listen_on(sock, Decoder(frames.checksums()[peer.checksum]), admit)
        line = Line(writer, peer)
        allowance = self.limits.allowance()
        answering = asyncio.get_running_loop().create_task(self._answers(line, todo))
        self._controls += 1
        try:
            await todo.put(first)
            async for frame in incoming.frames():
                await asyncio.sleep(allowance.take(time.monotonic()))
                what = frame if frame.header.type is Type.PACK else messages.decode(frame)
                if isinstance(what, messages.Heartbeat):  # at once: the disk may be slow, the line is not dead
                    line.send(messages.Heartbeat(echo=what.number))
                else:
                    await todo.put(what)
                await writer.drain()
            await answered(self._all_answered(line, todo), incoming.gone.wait())
        except asyncio.CancelledError:  # this router ends: it waits for nobody
            writer.transport.abort()
            raise
        finally:
            self._controls -= 1
            answering.cancel()
            try:
                with contextlib.suppress(asyncio.CancelledError):
                    await answering
            finally:
                self._receiving.end(turn)
                self._leave(line)
                await closed(writer)
        if line.problem is not None:
            raise line.problem

    def _leave(self, line: Line) -> None:
        for name in [name for name, known in self._lines.items() if line in known]:
            self._lines[name].remove(line)
            if not self._lines[name]:
                del self._lines[name]

    def _join(self, line: Line, name: str) -> None:
        """From now on it hears what concerns that origin, as its other connections do. :raises BadFrame: too many."""
        line.heeds(name)
        if line not in self._lines.setdefault(name, []):
            self._lines[name].append(line)

    async def _answers(self, line: Line, todo: asyncio.Queue[Message | Frame]) -> None:
        try:
            while True:
                what = await todo.get()
                await (self._pack(line, what) if isinstance(what, Frame) else self._answer(line, what))
                todo.task_done()
        except Exception as problem:  # a database on a full disk, too: who asks must not wait for what never comes
            if isinstance(problem, asyncio.TimeoutError):
                line.writer.transport.abort()  # he does not take what he was sent: that would be waited for
            line.end(problem)  # which ends whoever reads it too
            with contextlib.suppress(asyncio.CancelledError):
                while True:  # unless he waits for a place among what is to be answered
                    todo.task_done()
                    await todo.get()
            raise

    async def _all_answered(self, line: Line, todo: asyncio.Queue[Message | Frame]) -> None:
        """Until nothing that has come on a connection waits for its answer."""
        await todo.join()
        await line.changed()
        await self._packs.passed(lambda arrived: arrived.peer in line.origins)

    async def _pack(self, line: Line, frame: Frame) -> None:
        await line.changed()
        pack, files = packs.decode(frame)
        if not is_origin(pack.origin):
            raise BadFrame("a pack without an origin of 32 hexadecimal digits")
        name, digest = f"{line.peer.key.name}/{pack.origin}", line.peer.digest
        self._join(line, name)
        refusal = self._refusal(line.peer, pack)
        if refusal:
            self.complaints.warn("path-refused", line.peer.key.name, reason=refusal)
        refusal = refusal or self._ends.reason_against(pack)
        if refusal:
            self._deliver([Reply(name, packs.refused(pack, refusal[:_REASON_CHARS]))])
            return
        mine = await self._known(line, pack)
        arrived = Arrived(mine, files, frames.digests()[digest], name, digest)
        await self._packs.put(line, arrived, len(frame.payload))

    async def _execute_packs(self, batch: list[Arrived]) -> None:
        replies = await self._on_disk(partial(self._ends.pack, batch))
        asyncio.get_running_loop().call_soon(self._packs_executed, replies)  # behind the start of the next batch

    def _packs_executed(self, replies: list[Reply]) -> None:
        self._deliver(replies)
        self._outgoing.look()

    async def _change_names(self, asked: list[tuple[messages.Operation, str]]) -> None:
        self._deliver(await self._on_disk(lambda: self._destination.operate_all(asked)))

    async def _answer(self, line: Line, message: Message) -> None:
        if not self._ends.is_change(message) or len(line.changes) >= TOGETHER:
            await line.changed()
        if isinstance(message, messages.Routes):
            asked = message.terminal
            line.send(await self.links.routed(asked) if asked else self.links.known(message.first, line.peer.key))
            return
        if isinstance(message, messages.Lease):
            line.send(await self._questions.lease(line.peer, message))
            return
        if not self._ends:
            raise BadFrame(f"{type(message).__name__} is not for a relay")
        if isinstance(message, (Stat, List)):
            await self._questions.look_up(line, message)
            return
        if isinstance(message, messages.Lot):
            line.send(await self._questions.lot(line.peer, message))
            return
        origin = getattr(message, "origin", "")
        if not is_origin(origin):
            raise BadFrame(f"{type(message).__name__} without an origin of 32 hexadecimal digits")
        name = f"{line.peer.key.name}/{origin}"
        self._join(line, name)
        refusal = self._refusal(line.peer, message)
        if refusal:
            self.complaints.warn("path-refused", line.peer.key.name, reason=refusal)
            line.send(messages.Result(origin, message.seq, "failed", refusal))  # type: ignore[union-attr]
            return
        if isinstance(message, messages.Open):
            await self._open(line, message, name)
            return
        if isinstance(message, messages.Low):
            for known in await self._meant(line, message):
                low, settled = with_origin(message, known), partial(self.rights.release_up_to, known, message.seq)
                await line.lower(self._disk, partial(self._ends.decide, low, name, line.peer.digest), settled)
            return
        if isinstance(message, (messages.Status, messages.Cancel)):
            message = with_origin(message, (await self._meant(line, message))[0])
        else:
            message = await self._known(line, message)
        if isinstance(message, messages.Status) and message.files and self._packs.has(message.origin, message.seq):
            line.send(messages.Result(origin, message.seq, "pending"))
            return
        if isinstance(message, messages.Operation):
            operation = message
            if operation.kind == "publish":
                for tid in await self._on_disk(lambda: self._ends.whole_of(operation)):
                    await self._recording.close(tid)
            if self._ends.is_change(operation):
                self._changes.put(line, operation, name)
                return
        if isinstance(message, messages.Copy) and self._outgoing.copier is not None:
            read = messages.Get(message.source, capability=message.read_capability, signature=message.read_signature)
            refusal = await self._outgoing.copier.reason_against(message, self._questions.refusal(line.peer, read))
            if refusal:
                line.send(messages.Result(origin, message.seq, "failed", refusal))
                return
        if isinstance(message, messages.Cancel):  # where it is remembered is known when its pack is taken
            await self._packs.passed(partial(self._ends.is_elsewhere, message))
        digest = line.peer.digest
        self._deliver(await self._on_disk(lambda: self._ends.decide(message, name, digest)))
        self._outgoing.look()
        if isinstance(message, messages.Cancel):
            self._cancelled(message)

    async def _known(self, line: Line, message: M) -> M:
        """A message that orders something, with the origin as it is known here; of a signed one, who brought it."""
        found: Any = as_known(message, line.peer.key)
        if self._brought is not None and isinstance(message, _SIGNED) and message.capability:
            said = known_as(line.peer.key, message.origin)
            if self._brought.is_new(said, found.origin, found.expires):
                await self._on_disk(partial(self._bring, said, found.origin, found.expires, line.peer.key.is_router))
        return cast("M", found)

    def _bring(self, said: str, known: str, expires: int, is_router: bool) -> None:
        assert self._brought is not None
        if self._brought.bring(said, known, expires, is_router).changes:
            self._ends.inherit(said, known)

    async def _meant(self, line: Line, ask: messages.Status | messages.Cancel | messages.Low) -> list[str]:
        """The origins, as they are known here, of operations that came before and that a peer means; likely ones
        first."""
        said = known_as(line.peer.key, ask.origin)
        names = self._brought.kept(said) if self._brought is not None else ()
        if names is None and self._brought is not None:
            names = await self._on_disk(partial(self._brought.find, said))
        known = [one.known for one in names or () if one.changes or isinstance(ask, messages.Status)]
        if known and not isinstance(ask, messages.Low):  # a copy, and what has no capability, is known by its key
            return await self._on_disk(partial(self._ends.best_known, (*known, said), ask.seq))
        return [*known, said]

    def _cancelled(self, message: messages.Cancel) -> None:
        if message.data_only:
            self.rights.release(message.origin, message.seq)
        else:
            self._outgoing.cancelled((message.origin, message.seq))

    async def _open(self, line: Line, ask: messages.Open, name: str) -> None:
        """Each connection is told for itself what there is."""
        full = self.rights.reserve(line.peer.key, ask, int(time.time()))
        if full:
            self.complaints.warn("byte-limit-reached", line.peer.key.name, reason=full)
            line.send(messages.NoSpace(ask.origin, ask.seq, _AGAIN_S))
            return
        ask = await self._known(line, ask)
        try:
            reply = await self._on_disk(lambda: self._ends.open(ask, name, line.peer.digest))
        except (OSError, sqlite3.Error) as problem:
            if not no_room(problem):
                raise
            log.error("space-exhausted", path=ask.path, problem=problem)  # nor has the database any
            reply = Reply(name, messages.NoSpace(ask.origin, ask.seq, _AGAIN_S))
        if isinstance(reply.message, messages.NoSpace):
            self.rights.release(ask.origin, ask.seq)
        if isinstance(reply.message, messages.Opened):
            self._recording.check(reply.message.tid)
        self._settled(reply.message)
        line.send(as_said(reply.message, name))

    async def _ways(self, terminal: str) -> tuple[Route, ...]:
        """Routes from here to another router: directly where the configuration names it, else those in use."""
        known = self._ends.custodian is not None and self._ends.custodian.terminals.names(terminal)
        if known or terminal in self.neighbours.allowed:
            return ((),)
        found = await self.links.routed(terminal)
        return tuple(route[:-1] for route in found.routes if route)

    def _refusal(self, peer: Peer, message: Message) -> str:
        """Return why a peer may not ask for this."""
        key = peer.key
        wrong = too_late(message, now := int(time.time())) or forgeable(message, peer.digest)
        if wrong or isinstance(message, messages.Copy):
            return wrong  # a copy is judged when it is known whether it is a new one
        if isinstance(message, (messages.Open, messages.Operation)) and message.warrant and not message.terminal:
            if self._ends.destination is None:
                return "this router has no tree of its own"
            return warrants.refusal(message, key, self.keys, self.rights, self._destination.epoch, now)
        if isinstance(message, (messages.Open, messages.Operation, messages.Pack)) and message.terminal:
            return self.rights.deposit_refusal(key, message, now)
        return self.rights.refusal(key, message, now)

    async def _attach(self, sock: socket.socket, peer: Peer, ask: messages.Attach) -> None:
        found = await self._on_disk(lambda: self._ends.attach(ask.tid))
        if found is None or not found.transfer.sender.startswith(f"{peer.key.name}/"):
            if found is not None:
                os.close(found.file)
            raise BadFrame(f"transfer {ask.tid} is not one of this peer")
        if found.transfer.digest in SAFE_DIGESTS and peer.digest not in SAFE_DIGESTS:
            os.close(found.file)
            raise Unwelcome(f"the blocks of this transfer come with {found.transfer.digest}", peer.checksum)
        if self._recording.is_whole(ask.tid):
            os.close(found.file)
            raise Unwelcome("all blocks are here", peer.checksum, retry_after_s=0)
        ask_open = found.transfer.ask
        job = Job(
            "receive", ask.tid, peer.checksum, peer.digest, ask_open.block_bytes, ask_open.size_bytes,
            peer=peer.key.name, ends=peer.key.ends, nonce=peer.nonce, to=peer.host,
        )  # fmt: skip
        self._give(job, sock, found.file)
        self._outgoing.opened(ask.tid, ask_open.size_bytes)

    async def _get(self, sock: socket.socket, peer: Peer, ask: messages.Get) -> None:
        found = await self._questions.file(peer, ask, sock)
        self._give(sending_job(peer, ask, found), sock, found.file, found.digests)

    async def _get_pack(self, sock: socket.socket, peer: Peer, ask: messages.GetPack) -> None:
        root = await self._questions.root(peer, ask)
        job = Job(
            "send-pack", 0, peer.checksum, peer.digest, peer=peer.key.name, ends=peer.key.ends, nonce=peer.nonce,
            to=peer.host, priority=ask.priority, deadline=ask.deadline, paths=ask.paths,
        )  # fmt: skip
        try:
            for _ in range(_GIVEN_TRIES):
                with contextlib.suppress(BlockingIOError):  # the worker has been given as much as it may be at once
                    return self._pool.give(job, sock, root)
                await asyncio.sleep(_GIVEN_AGAIN_S)
            raise Unwelcome("too much is asked for at once", peer.checksum, retry_after_s=_AGAIN_S)
        finally:
            os.close(root)

    def _give(self, job: Job, sock: socket.socket, file: int, digests: bytes = b"") -> None:
        try:
            self._pool.give(job, sock, file, digests)
        finally:
            os.close(file)

    def _on_report(self, report: Report) -> None:
        if report.hop:
            self.links.moved(report.hop, report.moved_bytes)
        if report.problem and report.tid:
            log.warn("connection-ended", tid=report.tid, problem=report.problem)
        elif report.problem:
            self.complaints.ended(report.problem)
        if report.tid and is_disk(report.errno):
            self._start(self._recording.not_written(report.tid, OSError(report.errno, report.problem)))
        if report.damaged:
            advice = "its disk does not give what was published: check that, and send the file again"
            self.complaints.damaged(report.damaged, block=report.block, advice=advice)
        if report.blocks or report.parts:
            self._start(self._recording.record(report))

    def _end_lines(self, sender: str, problem: Exception) -> None:
        for line in tuple(self._lines.get(sender, ())):
            line.end(problem)

    def _deliver(self, replies: list[Reply]) -> None:
        for reply in replies:
            self._settled(reply.message)
            if isinstance(reply.message, messages.Opened):
                self._recording.comes_again(reply.message.tid)
            message = as_said(reply.message, reply.to)
            for line in self._lines.get(reply.to, ()):  # one that is not here asks again when it is back
                line.send(message)

    def _settled(self, message: Message) -> None:
        if isinstance(message, messages.Custody) or (
            isinstance(message, messages.Result) and message.outcome not in _NOT_FINAL
        ):
            self.rights.release(message.origin, message.seq)

    async def _expire(self) -> None:
        """At the start, too: what ran out of its time while the router was down."""
        while True:
            pause_s = _EXPIRE_INTERVAL_S
            try:
                await self._expire_once()
            except Exception as problem:  # a full disk, above all: what is late must not stay for ever
                pause_s = RECORD_AGAIN_S
                log.error("expiry-failed", problem=repr(problem), again_s=pause_s)
            await asyncio.sleep(pause_s)

    async def _expire_once(self) -> None:
        destination = self._ends.destination
        if destination is not None:
            self._deliver(await self._on_disk(destination.expire))
        await self._operations.expire()
        if self._keeper is not None:
            await self._on_disk(self._keeper.expire)
        await self._outgoing.expire()
        self.rights.expire(int(time.time()))
        if self._brought is not None:
            await self._on_disk(partial(self._brought.expire, int(time.time())))
        until_s = time.monotonic() + _EXPIRE_INTERVAL_S  # then it is time to expire again
        while destination is not None and time.monotonic() < until_s and await self._on_disk(destination.follow):
            pass  # others have the disk's thread between two steps

    async def _on_disk(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("task-failed", problem=repr(task.exception()))


def _end_of_this_task() -> Callable[[], object]:
    """Return what ends the connection that the current task serves."""
    task = asyncio.current_task()
    assert task is not None
    return task.cancel


def _hang_up(sock: socket.socket, end: Callable[[], object]) -> None:
    """End a connection and its task, which hears nothing of that while something comes for it (asyncio.wait_for)."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    end()
