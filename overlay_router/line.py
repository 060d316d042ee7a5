"""The control connection of a peer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from overlay_router.greeting import Peer
from stageout.wire import frames, overlay
from stageout.wire.frames import BadFrame
from stageout.wire.overlay import Message

#: That one connection may speak of.
MOST_ORIGINS = 4096
_MOST_UNREAD_BYTES = 8 * 1024 * 1024


@dataclass
class Line:
    """The control connection of a peer. :param changes: of names that it asked for and that wait for the disk."""

    writer: asyncio.StreamWriter
    peer: Peer
    origins: set[str] = field(default_factory=set)
    changes: list[asyncio.Future[None]] = field(default_factory=list)

    async def changed(self) -> None:
        """Wait until these have been decided."""
        await asyncio.gather(*self.changes)
        self.changes.clear()

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
        self.writer.write(overlay.encode(message, frames.checksums()[self.peer.checksum]))
