"""The control connection of a peer."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

from overlay_router.peers.greeting import Peer
from stageout.core import log
from stageout.overlay.wire import frames, messages
from stageout.overlay.wire.frames import BadFrame
from stageout.overlay.wire.messages import Message

#: Transfers that one connection may speak of.
MOST_ORIGINS = 4096
_MOST_UNREAD_BYTES = 8 * 1024 * 1024
#: For a peer to take what was said to it before a connection ends.
_CLOSES_S = 60.0
#: For the answers to what a peer asked before it said that it says no more.
_ANSWERED_S = 60.0


async def closed(writer: asyncio.StreamWriter) -> None:
    """End a connection. Messages that were queued are still sent, but a peer that does not take them in a minute loses
    them.

    On return the connection is gone: whoever counts connections counts it until then.
    """
    writer.close()
    try:
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(writer.wait_closed(), _CLOSES_S)
    finally:
        writer.transport.abort()


async def answered(asked: Awaitable[object], gone: Awaitable[object]) -> None:
    """Wait for the answers to what a peer has asked that says no more; not for one that takes none any more.

    :param asked: done when they have been queued; a minute at most is waited for that. :param gone: when he has gone.
    """
    waited = [asyncio.ensure_future(asked), asyncio.ensure_future(gone)]
    try:
        await asyncio.wait(waited, timeout=_ANSWERED_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waited:
            one.cancel()
        await asyncio.gather(*waited, return_exceptions=True)


@dataclass
class Line:
    """The control connection of a peer.

    :param changes: of names that it asked for and that wait for the disk. :param lowering: its last LOW.
    :param problem: of a disk or database, for which it ends.
    """

    writer: asyncio.StreamWriter
    peer: Peer
    origins: set[str] = field(default_factory=set)
    changes: list[asyncio.Future[None]] = field(default_factory=list)
    lowering: asyncio.Future[object] | None = None
    problem: Exception | None = None

    def end(self, problem: BaseException) -> None:
        """Nothing more is taken from it: whoever reads it ends, and tells the peer of a disk or database at fault."""
        if isinstance(problem, (OSError, sqlite3.Error)):
            self.problem = self.problem or problem
        self.writer.close()

    async def changed(self) -> None:
        """Wait until these have been decided."""
        await asyncio.gather(*self.changes)
        self.changes.clear()

    async def lower(self, disk: Executor, work: Callable[[], object], settled: Callable[[], None]) -> None:
        """Have a LOW done in its turn. Nothing is answered, so what comes behind it waits for nothing but its own turn.

        One of a connection waits for the disk at a time. :param settled: called when it was done.
        """
        if self.lowering is not None:
            await asyncio.wait([self.lowering])

        def done(future: asyncio.Future[object]) -> None:
            problem = None if future.cancelled() else future.exception()
            if problem is None:
                settled()
            else:
                log.error("low-mark-write-failed", problem=repr(problem), advice="its sender says it again")
                self.end(problem)

        self.lowering = asyncio.get_running_loop().run_in_executor(disk, work)
        self.lowering.add_done_callback(done)

    def heeds(self, name: str) -> None:
        """One more origin concerns it. :raises BadFrame: a peer may make a router remember so many and no more."""
        self.origins.add(name)
        if len(self.origins) > MOST_ORIGINS:
            raise BadFrame(f"more than {MOST_ORIGINS} origins on one connection")

    def send(self, message: Message) -> None:
        """Queue a message. A peer that does not read its answers loses its connection."""
        if self.writer.transport.get_write_buffer_size() > _MOST_UNREAD_BYTES:
            self.writer.transport.abort()
            return
        self.writer.write(messages.encode(message, frames.checksums()[self.peer.checksum]))
