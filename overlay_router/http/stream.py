"""A client's connection in a worker, plain or in TLS, that never waits for a client for ever."""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import time

from stageout.core.threads import started
from stageout.overlay.http.heads import Refused, end_of_head
from stageout.overlay.tcp import SHORTER, wait_at_most
from stageout.overlay.tls import Tunnel

_READ_BYTES, _HEAD_BYTES = 256 * 1024, 16 * 1024
#: A body, or its reader, moves so many bytes in each of these times, while this side is ready.
_WINDOW_S, _LEAST_BYTES = 60.0, 60 * 1024
_LINE_BYTES = 4096
_NO_SENDFILE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})


class TooSlow(ConnectionError):
    """The client sends or reads too little."""


class Stream:
    """A plain connection.

    :param raw: belongs to the stream from now on. :param window_s: in each such time at least so many bytes move.
    """

    is_secure = False

    def __init__(self, raw: socket.socket, window_s: float = _WINDOW_S, least_bytes: int = _LEAST_BYTES) -> None:
        self.raw, self._carry = raw, bytearray()
        self._window_s, self._least_bytes = window_s, least_bytes
        self._waited_s, self._moved = 0.0, 0
        wait_at_most(raw, window_s)

    def head(self, first_s: float, whole_s: float) -> bytes:
        """Read a whole head, b"" when the client has ended or asks for nothing.

        :param first_s: for its first byte. :param whole_s: for the rest of it.
        :raises Refused: it is none, or does not come whole in time.
        """
        until_s, begun = time.monotonic() + first_s, bool(self._carry)
        if begun:
            until_s = time.monotonic() + whole_s
        while not (size := end_of_head(self._carry)):
            left_s = until_s - time.monotonic()
            came = self._within(left_s) if left_s > 0 else None
            if came is None:
                if not begun:
                    return b""
                raise Refused(408, f"the head did not come within {whole_s:.0f} s")
            if not came:
                return b""
            self._carry += came
            if not begun:
                begun, until_s = True, time.monotonic() + whole_s
        wait_at_most(self.raw, self._window_s)
        head = bytes(self._carry[:size])
        del self._carry[:size]
        return head

    def line(self) -> bytes:
        """Read a line without its CR LF. :raises Refused: it is too long. :raises OSError: the connection is lost."""
        while (end := self._carry.find(b"\r\n")) < 0:
            if len(self._carry) > _LINE_BYTES:
                raise Refused(400, "a line of the body is too long")
            self._carry += self._some()
        line = bytes(self._carry[:end])
        del self._carry[: end + 2]
        if len(line) > _LINE_BYTES or b"\r" in line or b"\n" in line:
            raise Refused(400, "a line of the body is malformed")
        return line

    def read_into(self, view: memoryview) -> int:
        """Read some bytes of a body. :raises OSError: the connection has ended, or brings too little."""
        if self._carry:
            count = min(len(view), len(self._carry))
            view[:count] = self._carry[:count]
            del self._carry[:count]
            return count
        count = self._receive(view)
        if not count:
            raise ConnectionResetError("the client ended in a body")
        return count

    def send(self, data: bytes | memoryview) -> None:
        """Send all of it. :raises OSError: the connection is lost, or too little is read."""
        left = memoryview(data)
        while left:
            began_s = time.monotonic()
            count = self._push(left)
            left = left[count:]
            self._paced(count, began_s)

    def send_file(self, file: int, offset: int, size_bytes: int) -> None:
        """Send a part of a file. :raises OSError: the connection is lost, or the file became shorter."""
        end = offset + size_bytes
        while offset < end:
            began_s = time.monotonic()
            try:
                count = os.sendfile(self.raw.fileno(), file, offset, end - offset)
            except OSError as problem:
                if problem.errno not in _NO_SENDFILE:
                    raise
                return self._send_read(file, offset, end)
            if not count:
                raise OSError(errno.ENODATA, SHORTER)
            offset += count
            self._paced(count, began_s)
        return None

    def end(self, drains_s: float = 0) -> None:
        """Say no more. :param drains_s: so long what the client still sends is read: else it never sees the answer."""
        try:
            self.raw.shutdown(socket.SHUT_WR)
            until_s, memory = time.monotonic() + drains_s, bytearray(_READ_BYTES)
            while (left_s := until_s - time.monotonic()) > 0:
                wait_at_most(self.raw, left_s)
                if not self.raw.recv_into(memory):
                    break
        except OSError:
            pass

    def has_ended(self) -> bool:
        """Tell whether the client has ended the connection."""
        poll = select.poll()
        poll.register(self.raw, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
        return bool(poll.poll(0))

    def plain(self) -> tuple[socket.socket, bytes]:
        """Return a socket for what comes and goes from now on, without TLS, and what has come already."""
        return self.raw, bytes(self._carry)

    def _send_read(self, file: int, offset: int, end: int) -> None:
        while offset < end:
            data = os.pread(file, min(1 << 20, end - offset), offset)
            if not data:
                raise OSError(errno.ENODATA, SHORTER)
            self.send(data)
            offset += len(data)

    def _within(self, seconds: float) -> bytes | None:
        """Return some bytes, b"" at the end, None when nothing came."""
        memory = bytearray(_HEAD_BYTES)
        try:
            count = self._receive(memoryview(memory), time.monotonic() + seconds)
        except BlockingIOError:
            return None
        except ssl.SSLError:
            return b""
        return bytes(memory[:count])

    def _some(self) -> bytes:
        memory = bytearray(_LINE_BYTES)
        count = self._receive(memoryview(memory))
        if not count:
            raise ConnectionResetError("the client ended in a body")
        return bytes(memory[:count])

    def _receive(self, view: memoryview, until_s: float | None = None) -> int:
        """Receive some bytes, 0 at the end. :param until_s: BlockingIOError then; None: of a body, which has a pace."""
        if until_s is not None:
            wait_at_most(self.raw, max(0.001, until_s - time.monotonic()))
            return self.raw.recv_into(view)
        began_s = time.monotonic()
        count = self.raw.recv_into(view)
        self._paced(count, began_s)
        return count

    def _push(self, data: memoryview) -> int:
        return self.raw.send(data)

    def _paced(self, count: int, began_s: float) -> None:
        self._waited_s += time.monotonic() - began_s
        self._moved += count
        if self._waited_s >= self._window_s:
            if self._moved < self._least_bytes:
                raise TooSlow(f"less than {self._least_bytes} bytes in {self._window_s:.0f} s")
            self._waited_s, self._moved = 0.0, 0


class TlsStream(Stream):
    """The same in TLS: one call of the kernel brings many records. :param tunnel: after its handshake."""

    is_secure = True

    def __init__(
        self, tunnel: Tunnel, first: bytes, window_s: float = _WINDOW_S, least_bytes: int = _LEAST_BYTES
    ) -> None:
        raw, self._tls, self._incoming, self._outgoing = tunnel.taken()
        super().__init__(raw, window_s, least_bytes)
        self._tunnel = tunnel
        #: For records of a body. Most connections that wait have brought none.
        self._sealed: memoryview | None = None
        self._carry += first

    def send_file(self, file: int, offset: int, size_bytes: int) -> None:
        """As of a plain one: what is read is encrypted here."""
        self._send_read(file, offset, offset + size_bytes)

    def plain(self) -> tuple[socket.socket, bytes]:
        """As of a plain one: the tunnel goes on beside. It ends when the socket is closed."""
        mine, other = socket.socketpair()
        self._tunnel.onto(other)
        wait_at_most(self.raw, 0)  # without an end: who passes bytes on knows what moves in both directions
        try:
            started(self._tunnel.run)
        except OSError:
            mine.close()
            other.close()
            raise
        return mine, bytes(self._carry)

    def _receive(self, view: memoryview, until_s: float | None = None) -> int:
        """As of a plain one. Bytes of a record count when they come: it may never be whole."""
        while True:
            try:
                return self._tls.read(len(view), view)  # type: ignore[call-arg, arg-type, return-value, unused-ignore]
            except ssl.SSLWantReadError:
                self._flush()
                if until_s is not None and time.monotonic() >= until_s:
                    raise BlockingIOError from None
                if until_s is None and self._sealed is None:
                    self._sealed = memoryview(bytearray(_READ_BYTES))
                sealed = self._sealed or memoryview(bytearray(_HEAD_BYTES))
                count = super()._receive(sealed, until_s)
                if not count:
                    return 0
                self._incoming.write(sealed[:count])
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return 0

    def _push(self, data: memoryview) -> int:
        count = self._tls.write(data[:_READ_BYTES])
        self._flush()
        return count

    def _flush(self) -> None:
        left = memoryview(self._outgoing.read())
        while left:
            began_s = time.monotonic()
            count = self.raw.send(left)
            left = left[count:]
            self._paced(0, began_s)
