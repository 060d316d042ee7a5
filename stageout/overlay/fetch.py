"""Published files back from a router: whole, or a range of bytes.

A connection that is lost costs what was on its way: the same version of the file goes on at the block where it was. If
the name was given to another file meanwhile, that one is fetched from its beginning. A file of more than a few blocks
comes by several connections, and all routes (:mod:`stageout.overlay.receiving`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.core.pauses import growing_s
from stageout.core.threads import NoThread
from stageout.overlay.arrivals import not_written, part_of, permit, private
from stageout.overlay.cargo import Share
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import allowed
from stageout.overlay.fetching import Ask
from stageout.overlay.kept import Circuit, Place, Room, kept, place
from stageout.overlay.links import Claim
from stageout.overlay.proof import Proof
from stageout.overlay.reaching import reach
from stageout.overlay.receiving import Download, Receiving
from stageout.overlay.sockets import FIRST_CONNECTIONS, LONG_S
from stageout.overlay.sources import AnyPath
from stageout.overlay.wire.fields import MAX_NUMBER
from stageout.overlay.wire.messages import BLOCK_BYTES, Found, Get, Heartbeat, Message
from stageout.overlay.wire.route import Route
from stageout.overlay.writing import Writing

_RESUMES = 3
_RESUMABLE = frozenset({ErrorClass.CONNECTION_LOST, ErrorClass.STALLED})
_ANY = -1
#: A file of no more blocks comes by one connection: where there is one short way, so many that another question would
#: take a good part of their time.
_FEW_BLOCKS, _FEW_NEAR_BLOCKS = 8, 32
#: Nor does one of more, whoever says that there is one.
_MOST_BLOCKS = 4 * 1024 * 1024
Progress = Callable[[int], None]
Ended = Callable[[Sequence[Share]], None]


@dataclass
class _Fetch:
    """A range of a published file, in order. Received data outlive a lost connection.

    :param size_bytes: how many at most; negative for all behind the offset. :param proof: None for a part.
    :param few_blocks: of the whole file so many are asked for, and what follows is decided when its size is known; 0:
        all of it is.
    :ivar trip_s: from the question to FOUND. :ivar made_s: what its connection took to be made.
    """

    gateway: Gateway
    path: str
    offset: int
    size_bytes: int
    generation: int = _ANY
    received_bytes: int = 0
    found: Found | None = None
    routes: Sequence[Route] = ((),)
    sized: Progress = lambda size_bytes: None
    terminal: str = ""
    claim: Claim = field(default_factory=Claim)
    proof: Proof | None = None
    few_blocks: int = 0
    trip_s: float = 0.0
    made_s: float = 0.0
    flow: str = field(default_factory=lambda: secrets.token_hex(8))

    def begun(self) -> tuple[Channel, Found]:
        """A connection on which the file was found, and its blocks come next."""
        channel, found = self._asked()
        if not isinstance(found, Found) or found.block_bytes != BLOCK_BYTES:
            channel.close()
            raise channel.failure(ErrorClass.NOT_SUPPORTED, f"{type(found).__name__} where FOUND was due")
        self.found, self.generation = found, found.generation
        try:
            if self.proof is not None:
                self.proof.begin(found, channel.digest_name, anew=not self.received_bytes)
            self.sized(found.size_bytes)
        except BaseException:
            channel.close()
            raise
        return channel, found

    def parts(self, channel: Channel, found: Found, buffer: memoryview) -> Iterator[memoryview]:
        """The bytes that are still missing, block by block; each is valid until the next is asked for.

        :param channel: and :param found: of :meth:`begun`.
        """
        is_read = False
        try:
            at = self.offset + self.received_bytes
            end = found.size_bytes if self.size_bytes < 0 else min(found.size_bytes, self.offset + self.size_bytes)
            yield from self._blocks(channel, buffer, at, max(at, end))
            is_read = True
        finally:
            if is_read:
                kept().leave(self._place, Circuit(None, [channel], self.made_s))
            else:
                channel.close()

    def _asked(self) -> tuple[Channel, Message]:
        """A connection, and the answer on it: one that another file has left, if there is one that is still good."""
        circuit = kept().take(self._place, self.gateway)
        if circuit is not None:
            (channel,) = circuit.carriers
            self.made_s = circuit.round_trip_s
            self._choose_few()
            with contextlib.suppress(TransferFailure):
                return channel, self._ask(channel)
        began_s = time.monotonic()
        route, channel = reach(self.routes, self._connected, self._late)
        self.routes = (route, *(other for other in self.routes if other != route))
        self.made_s = time.monotonic() - began_s
        self._choose_few()
        return channel, self._ask(channel)

    def _choose_few(self) -> None:
        """Return how much is asked for at first, which depends on the way."""
        if self.few_blocks and not self.received_bytes:
            is_near = len(self.routes) == 1 and 0 < self.made_s < LONG_S
            self.few_blocks = _FEW_NEAR_BLOCKS if is_near else _FEW_BLOCKS

    def _connected(self, route: Route) -> Channel:
        return Channel(self.gateway, route, back=self.claim, flow=self.flow)

    def _late(self, route: Route, channel: Channel) -> None:
        """This file may use it yet, or the next one."""
        kept().leave(place("get", self.gateway, route, self.claim), Circuit(None, [channel]))

    def _ask(self, channel: Channel) -> Message:
        first, skip = divmod(self.offset + self.received_bytes, BLOCK_BYTES)
        left = self.size_bytes - self.received_bytes if self.size_bytes >= 0 else _ANY
        blocks = max(0, -(-(skip + left) // BLOCK_BYTES)) if left >= 0 else max(0, self.few_blocks - first)
        began_s = time.monotonic()
        flow = "" if self.size_bytes >= 0 else self.flow  # no other answer of it follows: no router waits for one
        try:
            ask = Get(
                self.path, first, blocks, self.generation, terminal=self.terminal,
                priority=self.claim.priority, deadline=self.claim.deadline, waits=True, flow=flow,
            )  # fmt: skip
            channel.send(ask)
            while isinstance(answer := channel.receive(), Heartbeat):
                pass  # the router fetches the file itself
            self.trip_s = time.monotonic() - began_s
            return answer
        except BaseException:
            channel.close()
            raise

    @property
    def _place(self) -> Place:
        return place("get", self.gateway, self.routes[0], self.claim)

    def by_the_next(self) -> None:
        """Go on by the next route, if there are several."""
        self.routes = (*self.routes[1:], self.routes[0])

    def _blocks(self, channel: Channel, buffer: memoryview, at: int, end: int) -> Iterator[memoryview]:
        while at < end:
            expected, skip = divmod(at, BLOCK_BYTES)
            block, length = channel.receive_block(buffer, self.proof)
            assert self.found is not None
            due = min(BLOCK_BYTES, self.found.size_bytes - expected * BLOCK_BYTES)
            if (block, length) != (expected, due):
                raise channel.failure(
                    ErrorClass.CONTENT_MISMATCH, f"block {block} of {length} bytes where {expected} was due"
                )
            part = buffer[skip : min(length, skip + end - at)]
            yield part
            at += len(part)
            self.received_bytes += len(part)


def get(
    gateway: Gateway,
    path: str,
    local: AnyPath,
    *,
    progress: Progress = lambda received_bytes: None,
    sized: Progress = lambda size_bytes: None,
    routes: Sequence[Route] = ((),),
    terminal: str = "",
    priority: int = 0,
    deadline: int = 0,
    connections: int = FIRST_CONNECTIONS,
    most_connections: int = 0,
    ended: Ended = lambda shares: None,
) -> int:
    """Fetch a published file; returns its size in bytes. It appears under ``local`` only when whole, with the
    permissions that it has there (within the umask), and takes the place of a file that has that name. Where the router
    knows the digests with which it was published, it is what was published then.

    :param path: below the router's root. :param progress: called with the bytes of it that are here.
    :param sized: called with its size, before that.
    :param routes: ways to the router (relays in order, () is the direct one): the first that works, or the next, and
        all of them at once for what has more than 8 MiB.
    :param connections: of such a file, at first, on each route. :param most_connections: as of
        :func:`stageout.overlay.client.put`. :param ended: called with what each route did, however it ended.
    :param terminal: ``gateway`` is a custodian: what it has on its way to that router.
    :param priority: and :param deadline: as of :func:`stageout.overlay.client.put`: its share of the links on which
        other files come back, too.
    :raises TransferFailure: classified (CONTENT_MISMATCH: it is not what was published; NO_SPACE_LOCAL: there is no
        room for it here); nothing is left behind.
    """
    local = Path(local)
    part = part_of(local)
    try:
        with open(part, "xb", opener=private) as file:
            claim = Claim(priority=allowed(gateway, priority), deadline=min(deadline, MAX_NUMBER))
            fetch = _Fetch(gateway, path, 0, _ANY, routes=routes or ((),), sized=sized, terminal=terminal, claim=claim)
            fetch.proof = Proof(path, gateway.server)
            whole = _Whole(fetch, file.fileno(), progress, connections, most_connections)
            try:
                size_bytes = whole.run()
            finally:
                ended(whole.shares)
            fetch.proof.judge()
            permit(file.fileno(), fetch.found.mode if fetch.found else 0)
        part.replace(local)
    except OSError as problem:
        raise not_written(local, problem) from None
    finally:
        part.unlink(missing_ok=True)
    return size_bytes


def read(
    gateway: Gateway,
    path: str,
    offset: int = 0,
    size_bytes: int = _ANY,
    generation: int = _ANY,
    routes: Sequence[Route] = ((),),
) -> Iterator[bytes]:
    """Bytes of a published file, all of one version, in parts of at most 1 MiB.

    :param size_bytes: how many at most, negative: up to the end. Behind the end there are none.
    :param generation: of the version that is wanted, negative for the present one. :param routes: as of :func:`get`.
    :raises TransferFailure: classified; CONFLICT when there is another version now.
    """
    fetch, buffer = _Fetch(gateway, path, offset, size_bytes, generation), memoryview(mmap.mmap(-1, BLOCK_BYTES))
    fetch.routes = routes or ((),)
    patience = _Patience(len(fetch.routes))
    while True:
        try:
            for part in fetch.parts(*fetch.begun(), buffer):
                yield bytes(part)
            return
        except TransferFailure as failure:
            patience.spend(failure)
            fetch.by_the_next()


class _Whole:
    """All of a file. Parameters as of :func:`get`. :ivar shares: what each route did."""

    def __init__(self, fetch: _Fetch, file: int, progress: Progress, connections: int, most_connections: int) -> None:
        self._fetch, self._file, self._progress = fetch, file, progress
        self._connections, self._most = connections, max(connections, most_connections)
        self.shares: tuple[Share, ...] = ()
        # what a custodian has, has no number by which another question could be for the same version
        is_one = self._most == 1 and len(fetch.routes) == 1
        fetch.few_blocks = 0 if fetch.terminal or is_one else _FEW_BLOCKS

    def run(self) -> int:
        """Fetch it; one that was replaced meanwhile begins again. Returns its size in bytes."""
        fetch = self._fetch
        patience = _Patience(len(fetch.routes))
        while True:
            try:
                if self._has_come():
                    break
            except TransferFailure as failure:
                if failure.kind is ErrorClass.CONFLICT and fetch.generation != _ANY:
                    self.shares = ()
                    fetch.generation, fetch.received_bytes = _ANY, 0
                    fetch.few_blocks = 0  # one that is replaced ever again comes as one answer, however long that takes
                elif self.shares:  # all that is worth it was tried
                    raise
                else:
                    patience.spend(failure)
                    fetch.by_the_next()
        assert fetch.found is not None
        os.ftruncate(self._file, fetch.found.size_bytes)
        return fetch.found.size_bytes

    def _has_come(self) -> bool:
        """Tell whether all of it is here; else it is to be asked for as a whole."""
        fetch = self._fetch
        channel, found = fetch.begun()
        if fetch.few_blocks and found.size_bytes > fetch.few_blocks * BLOCK_BYTES:
            # no number by which another question could be for the same version; or more than a list could be made of
            if not found.generation or found.size_bytes > _MOST_BLOCKS * BLOCK_BYTES:
                channel.close()
                fetch.few_blocks = 0
                return False
            try:
                self._by_many(channel, found)
            except NoThread:  # all of it comes as one answer, in this one
                self.shares, fetch.few_blocks = (), 0
                return False
            return True
        buffer = memoryview(mmap.mmap(-1, BLOCK_BYTES))  # the kernel copies faster to whole pages
        writing = Writing(self._file, found.size_bytes)
        for part in fetch.parts(channel, found, buffer):
            writing.write(part, fetch.received_bytes)
            self._progress(fetch.received_bytes + len(part))
        self.shares = (Share(fetch.routes[0], found.size_bytes, connections=1),)
        return True

    def _by_many(self, channel: Channel, found: Found) -> None:
        fetch = self._fetch
        download = Download(
            fetch.gateway, fetch.path, fetch.routes, self._connections, self._most, fetch.claim, fetch.flow, fetch.proof
        )  # fmt: skip
        receiving = Receiving(download, found, self._file, self._progress)
        try:
            receiving.run(channel, Ask(0, fetch.few_blocks), fetch.trip_s, fetch.made_s)
        finally:
            self.shares = receiving.shares()


class _Patience:
    """Which failures are worth another connection, and how many. :param routes: that there are."""

    def __init__(self, routes: int = 1) -> None:
        self._routes, self._spent, self._room = routes, 0, Room()

    def spend(self, failure: TransferFailure) -> None:
        """Wait a little once all routes failed. :raises TransferFailure: it would come again, or came too often."""
        if self._room.made(failure):
            return
        worth_it = failure.kind in _RESUMABLE or (self._routes > 1 and failure.kind.retryable)
        if not worth_it or self._spent == _RESUMES * self._routes:
            raise failure
        self._spent += 1
        rounds, rest = divmod(self._spent, self._routes)
        if not rest:
            time.sleep(growing_s(0.25, 4.0, rounds))
