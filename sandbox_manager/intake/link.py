"""One plugin's connection: frames of the hand-off protocol, with a limit on silence."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from types import TracebackType
from typing import Any

from stageout.wire import handoff as wire

_LENGTH = struct.Struct(">I")
_READ_BYTES = 256 * 1024


class Link:
    """Frames over a connected, non-blocking socket; an asynchronous context manager that closes it.

    It reads no more than it was asked for: what a plugin sends too soon waits in the kernel.

    :param silence_s: s that a frame may take, to come or to go.
    """

    def __init__(self, connection: socket.socket, silence_s: float) -> None:
        self._connection = connection
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._use_memory: Callable[[int], None] = _free

    async def __aenter__(self) -> Link:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def count_memory(self, use: Callable[[int], None]) -> None:
        """Call ``use`` with the length of each frame from now on, before it is read."""
        self._use_memory = use

    @property
    def is_gone(self) -> bool:
        """True when the other side has closed and everything that it sent has been read."""
        try:
            return not self._connection.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True

    async def receive(self, *operations: str) -> dict[str, Any]:
        """Receive the next frame, which must be one of these operations.

        :raises EOFError: closed. :raises asyncio.TimeoutError: silence. :raises BadMessage: not in the protocol.
        """
        message = wire.decode_body(await asyncio.wait_for(self._body(), self._silence_s))
        if message["op"] not in operations:
            raise wire.BadMessage(f"got {message['op'][:20]!r}, expected {' or '.join(operations)}")
        return message

    async def _body(self) -> bytes:
        (length,) = _LENGTH.unpack(await self._exactly(_LENGTH.size))
        self._use_memory(wire.checked_length(length))
        return await self._exactly(length)

    async def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = await self._loop.sock_recv(self._connection, min(count - len(data), _READ_BYTES))
            if not part:
                raise EOFError("the plugin closed the connection")
            data += part
        return bytes(data)

    async def send(self, message: dict[str, Any]) -> None:
        """Send a frame. :raises OSError: the other side is gone. :raises asyncio.TimeoutError: it does not read."""
        await asyncio.wait_for(self._loop.sock_sendall(self._connection, wire.encode_frame(message)), self._silence_s)


def _free(size_bytes: int) -> None:
    """Allow every length."""
