"""TLS around a connection, as a tunnel: whoever uses the connection has an ordinary socket, and passes it on as one.

Bytes go through the memory of the process that runs the tunnel. An end of the stream without TLS's own goodbye counts
as an end: protocols inside say themselves how much there is.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time

from stageout.core.threads import started
from stageout.overlay.tcp import send_at_most

_PART_BYTES = 256 * 1024
#: While keys are agreed on nobody may be reading the plain side: so much of what is not TLS finds room there.
_FIRST_BYTES = 16 * 1024
#: For a peer to close, too, when nobody reads any more what it says.
_CLOSES_S = 10.0
#: A socket that would not wait at all is another kind of socket.
_LEAST_S = 0.001
#: First byte of a TLS handshake, and of an alert.
_OF_TLS = (0x16, 0x15)
CLIENT_HELLO = 0x16


class Tunnel:
    """TLS on one side, plain bytes on the other.

    :param raw: the connection, blocking. :param plain: one end of a socket pair.
    :param host: that the certificate must name; "" on the side that has the certificate.
    """

    def __init__(self, raw: socket.socket, plain: socket.socket, context: ssl.SSLContext, host: str = "") -> None:
        self._raw, self._plain = raw, plain
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, not host, host or None)
        self._turn, self._sending = threading.Lock(), threading.Lock()
        self._said_all = threading.Event()
        self.answered_plainly = False

    def handshake(self, timeout_s: float) -> None:
        """Agree on keys.

        A peer that does not speak TLS is passed on as it is, what it says only (``answered_plainly``): it may say why.

        :param timeout_s: for all of it, however often something comes. :raises ssl.SSLError: certificate or choices do
            not fit. :raises OSError: the connection is lost, or it took too long.
        """
        end_s, first = time.monotonic() + timeout_s, True
        while True:
            self._raw.settimeout(max(_LEAST_S, end_s - time.monotonic()))
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
            data = self._raw.recv(_FIRST_BYTES)
            if not data:
                raise ConnectionResetError("the other side ended the TLS handshake")
            if time.monotonic() > end_s:
                raise TimeoutError(f"the TLS handshake was not over within {timeout_s:.0f} s")
            if first and data[0] not in _OF_TLS:
                self.answered_plainly = True
                self._plain.sendall(data)
                break
            first = False
            self._incoming.write(data)
        self._flush()

    def first(self, timeout_s: float) -> bytes:
        """Return the first bytes that come behind the handshake. :raises OSError: none come."""
        self._raw.settimeout(timeout_s)
        while True:
            try:
                return self._tls.read(_FIRST_BYTES)
            except ssl.SSLWantReadError:
                data = self._raw.recv(_FIRST_BYTES)
                if not data:
                    raise ConnectionResetError("the other side said nothing in TLS") from None
                self._incoming.write(data)

    def taken(self) -> tuple[socket.socket, ssl.SSLObject, ssl.MemoryBIO, ssl.MemoryBIO]:
        """Return the connection and its TLS, for who goes on without a tunnel."""
        return self._raw, self._tls, self._incoming, self._outgoing

    def onto(self, plain: socket.socket) -> None:
        """From now on the plain side is this socket."""
        self._plain = plain

    def run(self) -> None:
        """Pass bytes on until both directions have ended; then both sockets are closed.

        A peer that goes on, is silent or reads nothing is cut off ten seconds after the other end of the plain side
        was closed; a peer that still reads gets all data that were sent before.
        """
        self._raw.settimeout(None)
        send_at_most(self._raw, _CLOSES_S)
        outwards = started(self._outwards)
        self._inwards()
        self._said_all.set()
        outwards.join()
        for sock in (self._raw, self._plain):
            sock.close()

    def _inwards(self) -> None:
        try:
            self._deliver()
            while data := self._raw.recv(_PART_BYTES):
                if self.answered_plainly:
                    self._plain.sendall(data)
                    continue
                with self._turn:
                    self._incoming.write(data)
                self._deliver()
                if self._outgoing.pending:
                    self._flush()
            self._plain.shutdown(socket.SHUT_WR)
        except ssl.SSLZeroReturnError:
            with contextlib.suppress(OSError):
                self._plain.shutdown(socket.SHUT_WR)
        except OSError:
            self._end()

    def _deliver(self) -> None:
        """Everything that has been decrypted so far."""
        while not self.answered_plainly:
            try:
                with self._turn:
                    data = self._tls.read(_PART_BYTES)
            except ssl.SSLWantReadError:
                return
            if not data:
                raise ssl.SSLZeroReturnError
            self._plain.sendall(data)

    def _outwards(self) -> None:
        try:
            while data := self._plain.recv(_PART_BYTES):
                if not self.answered_plainly:  # else it would see what is meant for an end that has proved itself
                    self._send(data)
            self._raw.shutdown(socket.SHUT_WR)
        except OSError:
            self._end()
        closed = select.poll()
        closed.register(self._plain, 0)
        closed.poll()  # not only that it says no more: nobody hears it any more, or the peer has said all
        if not self._said_all.wait(_CLOSES_S):
            self._end()

    def _send(self, data: bytes) -> None:
        with self._sending:
            with self._turn:
                self._tls.write(data)
                sealed = self._outgoing.read()
            self._push(sealed)

    def _flush(self) -> None:
        with self._sending:
            with self._turn:
                sealed = self._outgoing.read()
            self._push(sealed)

    def _push(self, sealed: bytes) -> None:
        """Send all of it. :raises OSError: the connection is lost, or nothing is taken and nobody waits for that."""
        left = memoryview(sealed)
        while left:
            try:
                left = left[self._raw.send(left) :]
            except BlockingIOError:
                if self._is_left():
                    raise

    def _is_left(self) -> bool:
        """Tell whether the other end of the plain side is closed altogether, not only for writing."""
        closed = select.poll()
        closed.register(self._plain, 0)
        return bool(closed.poll(0))

    def _end(self) -> None:
        for sock in (self._raw, self._plain):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def secured(raw: socket.socket, context: ssl.SSLContext, host: str, timeout_s: float) -> socket.socket:
    """A plain socket whose bytes go over ``raw`` in TLS; it owns ``raw`` from now on.

    :param host: that the certificate must name. :param timeout_s: for the handshake, and later of the plain socket.
    :raises ssl.SSLError: certificate or choices do not fit. :raises OSError: the connection is lost.
    """
    mine, other = socket.socketpair()
    tunnel = Tunnel(raw, other, context, host)
    try:
        tunnel.handshake(timeout_s)
        started(tunnel.run)
    except BaseException:
        for sock in (raw, mine, other):
            sock.close()
        raise
    mine.settimeout(timeout_s)
    return mine
