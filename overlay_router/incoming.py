"""Frames of a control connection: large frames are received right where they stay, for copies are what costs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast

from stageout.overlay.wire.frames import Decoder, Frame

#: Received at once, unless the rest of a large frame is due.
_READ_BYTES = 64 * 1024
#: Of the largest frames that come at the same time, not counting those that take longer than this.
_RECEIVED_BYTES, _SLOW_S = 512 * 1024 * 1024, 30.0


class Incoming(asyncio.StreamReaderProtocol, asyncio.BufferedProtocol):
    """Frames of a connection, which is not read while there is one that nobody has taken.

    :param decoder: with the connection's checksum. :param admit: waited for between the header of a large frame and
        its payload of so many bytes. :ivar gone: set when nothing can be said on it any more, either.
    """

    def __init__(self, decoder: Decoder, admit: Callable[[int], Awaitable[None]]) -> None:
        self._unused = asyncio.StreamReader()  # which gets no bytes; without one, nobody could write
        super().__init__(self._unused)
        self._decoder, self._admit, self._room = decoder, admit, memoryview(bytearray(_READ_BYTES))
        self._to_large = False
        self._changed, self.gone = asyncio.Event(), asyncio.Event()
        self._reading: asyncio.ReadTransport | None = None
        self._problem: Exception | None = None

    async def frames(self) -> AsyncIterator[Frame]:
        """Frames in order, to the end of the connection. :raises BadFrame: :raises OSError: it was lost."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            for frame in self._decoder.frames():
                yield frame
            if self._decoder.due_bytes:
                await self._admit(self._decoder.due_bytes)
            if self._problem is not None:
                raise self._problem
            if self._reading is None:
                return
            self._reading.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        super().connection_made(transport)
        self._reading = cast(asyncio.ReadTransport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Called by the loop: where the next bytes go."""
        large = self._decoder.room()
        self._to_large = bool(large)
        return large or self._room

    def buffer_updated(self, nbytes: int) -> None:
        """Called by the loop: so many bytes have come."""
        if self._to_large:
            self._decoder.filled(nbytes)
        else:
            self._decoder.feed(self._room[:nbytes])
        if self._decoder.has_more and self._reading is not None:
            self._reading.pause_reading()
            self._changed.set()

    def eof_received(self) -> bool:
        """Called by the loop: the peer says no more."""
        self._reading = None
        self._changed.set()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        super().connection_lost(exc)
        self._reading, self._problem = None, exc
        self._changed.set()
        self.gone.set()


class Receiving:
    """The largest frames of all connections, as they are received: a new one waits, in its turn, while these are much.

    One that comes slowly, or whose sender is silent, counts for half a minute only: it keeps nobody out for ever.
    """

    def __init__(self, most_bytes: int = _RECEIVED_BYTES) -> None:
        self._most_bytes, self._sizes_bytes = most_bytes, dict[object, int]()
        self._next, self._freed = asyncio.Lock(), asyncio.Event()

    async def begin(self, size_bytes: int) -> object:
        """Wait until the next one may come. Returns what :meth:`end` is to be told."""
        turn = object()
        async with self._next:
            while self._sizes_bytes and sum(self._sizes_bytes.values()) + size_bytes > self._most_bytes:
                self._freed.clear()
                await self._freed.wait()
            self._sizes_bytes[turn] = size_bytes
        asyncio.get_running_loop().call_later(_SLOW_S, self.end, turn)
        return turn

    def end(self, turn: object) -> None:
        """A frame is somewhere else, or never comes."""
        self._sizes_bytes.pop(turn, None)
        self._freed.set()


async def listen_on(
    sock: socket.socket, decoder: Decoder, admit: Callable[[int], Awaitable[None]]
) -> tuple[Incoming, asyncio.StreamWriter]:
    """The reader of a connection, and its writers. The socket belongs to the latter; parameters as of Incoming."""
    loop = asyncio.get_running_loop()
    transport, incoming = await loop.create_connection(lambda: Incoming(decoder, admit), sock=sock)
    return incoming, asyncio.StreamWriter(cast(asyncio.WriteTransport, transport), incoming, None, loop)
