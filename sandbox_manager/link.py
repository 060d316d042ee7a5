"""One plugin's connection: frames of the hand-off protocol, with a limit on silence."""

from __future__ import annotations

import asyncio
import socket
import struct
from types import TracebackType
from typing import Any

from stageout.wire import handoff as wire

_LENGTH = struct.Struct(">I")
_BUFFER_BYTES = 256 * 1024


class Link:
    """Frames over a connected socket; an asynchronous context manager that closes it.

    :param silence_s: s that a frame may take, to come or to go.
    """

    def __init__(self, connection: socket.socket, silence_s: float) -> None:
        self._connection = connection
        self._silence_s = silence_s
        self.received_bytes = 0

    async def __aenter__(self) -> Link:
        self._reader, self._writer = await asyncio.open_connection(sock=self._connection, limit=_BUFFER_BYTES)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()

    @property
    def is_gone(self) -> bool:
        """True when the other side has closed."""
        return self._reader.at_eof()

    async def receive(self, *operations: str) -> dict[str, Any]:
        """Next frame, which must be one of these operations.

        :raises EOFError: closed. :raises asyncio.TimeoutError: silence. :raises BadMessage: not in the protocol.
        """
        message = await asyncio.wait_for(self._frame(), self._silence_s)
        if message["op"] not in operations:
            raise wire.BadMessage(f"got {message['op'][:20]!r}, expected {' or '.join(operations)}")
        return message

    async def _frame(self) -> dict[str, Any]:
        (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        body = await self._reader.readexactly(wire.checked_length(length))
        self.received_bytes += len(body)
        return wire.decode_body(body)

    async def send(self, message: dict[str, Any]) -> None:
        """Send a frame. :raises OSError: the other side is gone. :raises asyncio.TimeoutError: it does not read."""
        self._writer.write(wire.encode_frame(message))
        await asyncio.wait_for(self._writer.drain(), self._silence_s)
