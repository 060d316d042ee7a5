"""One plugin's connection: frames of the hand-off protocol, with a limit on silence.

On the socket itself instead of asyncio's streams, and without a task for each wait: three frames come and two go in
every hand-off, and hundreds of hand-offs come in a second.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from types import TracebackType
from typing import Any

from stageout.wire import handoff as wire

_LENGTH = struct.Struct(">I")
_BUFFER_BYTES = 256 * 1024


class Link:
    """Frames over a connected, non-blocking socket; an asynchronous context manager that closes it.

    :param silence_s: s that a frame may take, to come or to go.
    """

    def __init__(self, connection: socket.socket, silence_s: float) -> None:
        self._connection = connection
        self._descriptor = connection.fileno()  # the loop's tables are quicker with a number
        self._silence_s = silence_s
        #: Called with the length of each frame before it is read.
        self.take_memory: Callable[[int], None] = _free
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._ended: OSError | EOFError | None = None
        self._is_reading = False
        self._waiter: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Link:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pause()
        self._connection.close()

    @property
    def is_gone(self) -> bool:
        """True when the other side has closed, whether the loop has noticed or not."""
        if self._buffer:
            return False
        return self._ended is not None or self._is_at_end()

    def _is_at_end(self) -> bool:
        try:
            return not self._connection.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True

    # ---- in ----------------------------------------------------------------------------------------------------------

    async def receive(self, *operations: str) -> dict[str, Any]:
        """Next frame, which must be one of these operations.

        :raises EOFError: closed. :raises asyncio.TimeoutError: silence. :raises BadMessage: not in the protocol.
        """
        latest_s = self._loop.time() + self._silence_s
        (length,) = _LENGTH.unpack(await self._exactly(_LENGTH.size, latest_s))
        self.take_memory(wire.checked_length(length))
        body = await self._exactly(length, latest_s)
        message = wire.decode_body(body)
        if message["op"] not in operations:
            raise wire.BadMessage(f"got {message['op'][:20]!r}, expected {' or '.join(operations)}")
        return message

    async def _exactly(self, count: int, latest_s: float) -> bytes:
        while len(self._buffer) < count:
            if self._ended is not None:
                raise self._ended
            self._resume()
            await self._wait(latest_s)
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data

    def _read(self) -> None:
        """Take what has come; a plugin that sends more than is asked for waits with it."""
        try:
            data = self._connection.recv(_BUFFER_BYTES)
        except (BlockingIOError, InterruptedError):
            self._resume()
            return
        except OSError as problem:
            self._end(problem)
            return
        if not data:
            self._end(EOFError("the plugin closed the connection"))
            return
        self._buffer += data
        if len(self._buffer) < _BUFFER_BYTES or self._waiter is not None:
            self._resume()
        else:
            self._pause()
        self._wake()

    def _end(self, problem: OSError | EOFError) -> None:
        self._ended = problem
        self._pause()
        self._wake()

    def _resume(self) -> None:
        if not self._is_reading and self._ended is None:
            self._loop.add_reader(self._descriptor, self._read)
            self._is_reading = True

    def _pause(self) -> None:
        if self._is_reading:
            self._loop.remove_reader(self._descriptor)
            self._is_reading = False

    # ---- out ---------------------------------------------------------------------------------------------------------

    async def send(self, message: dict[str, Any]) -> None:
        """Send a frame. :raises OSError: the other side is gone. :raises asyncio.TimeoutError: it does not read."""
        view = memoryview(wire.encode_frame(message))
        latest_s = self._loop.time() + self._silence_s
        while view:
            try:
                view = view[self._connection.send(view) :]
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._descriptor, self._wake)
                try:
                    await self._wait(latest_s)
                finally:
                    self._loop.remove_writer(self._descriptor)

    # ---- waiting -----------------------------------------------------------------------------------------------------

    async def _wait(self, latest_s: float) -> None:
        """Until something happens on the socket. :raises asyncio.TimeoutError: nothing did."""
        waiter = self._waiter = self._loop.create_future()
        timer = self._loop.call_at(latest_s, _fail, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _free(size_bytes: int) -> None:
    """Every length is allowed."""


def _fail(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(asyncio.TimeoutError())
