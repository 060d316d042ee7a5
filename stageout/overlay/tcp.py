"""Blocking sockets for many bytes: the kernel waits, copies and gives up, in as few system calls as there can be."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import socket
import struct
import termios
from dataclasses import dataclass
from typing import Union

from stageout.core.sockets import readable

Buffer = Union[bytes, bytearray, memoryview]
_TIME = struct.Struct("ll")
#: Of SO_SNDTIMEO and SO_RCVTIMEO.
TIME_BYTES = _TIME.size
#: Less would end connections of slow readers: a relay may hold one that has a small part of a line for 24 s.
_UNCONFIRMED_MS = 30_000
#: A peer whose bytes take longer to gather is very slow, or has stopped.
_GATHER_S = 1.0
#: Places in the kernel's ``struct tcp_info``: ``snd_mss``, ``rtt``, ``total_retrans``, ``min_rtt``, ``data_segs_out``
#: and ``delivered`` (since Linux 4.18); of what comes ``rcv_mss`` and ``data_segs_in``.
_SEGMENT_AT, _ROUND_TRIP_AT, _RESENT_AT, _LEAST_AT, _SENT_AT, _DELIVERED_AT = 16, 68, 100, 148, 156, 192
_SEGMENT_IN_AT, _CAME_AT = 20, 152
_FIELD = struct.Struct("=I")
_INT = struct.Struct("i")
_NAME_BYTES = 16
#: Of a connection's segments, that are told.
_NUMBERS = 5
#: Congestion controls that make their window smaller by a part for a lost packet, whatever the reason.
_BACKING_OFF = frozenset({b"reno", b"cubic"})
#: The bytes that may wait unsent on a connection that carries blocks (:func:`unsent_bytes`): at least, and at most.
UNSENT_BYTES, MOST_UNSENT_BYTES = 256 * 1024, 4 * 1024 * 1024
_UNSENT_S = 0.005
#: Errors of ``sendfile`` where a filesystem, or a kind of socket, does not have it.
_NO_SENDFILE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
SHORTER = "the file became shorter while it was sent"


def wait_at_most(sock: socket.socket, seconds: float) -> None:
    """From now on a call on this socket that waits longer than that raises BlockingIOError.

    ``settimeout`` does the same with a ``poll`` before each part, and wakes for the first byte of it.
    """
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _time(seconds))
    send_at_most(sock, seconds)


def send_at_most(sock: socket.socket, seconds: float) -> None:
    """From now on ``send`` on this blocking socket raises BlockingIOError when nothing can be sent for that long."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _time(seconds))


def _time(seconds: float) -> bytes:
    return _TIME.pack(*divmod(int(seconds * 1e6), 10**6))


def notice_loss(sock: socket.socket) -> None:
    """Have the kernel end a TCP connection when the other host has confirmed nothing of what was sent for 30 s.

    TCP repeats lost bytes ever more seldom, so a connection that outlives a long outage stands still long after it. A
    new connection goes on at once. An application that reads nothing for 30 s is ended in the same way.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNCONFIRMED_MS)


def notice_death(sock: socket.socket) -> None:
    """Have the kernel end a TCP connection whose other host has vanished: within two minutes, or as of notice_loss."""
    notice_loss(sock)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


@dataclass(frozen=True)
class Segments:
    """Counters of open TCP connections that back off for each loss, one or several together.

    :param sent: segments, and :param resent: those that were sent again. :param size_bytes: of the largest.
    :param trips_s: the sum of their round trips lately, of so many :param connections:.
    :param least_s: the shortest round trip that one of them ever saw.
    """

    sent: int = 0
    resent: int = 0
    size_bytes: int = 0
    trips_s: float = 0.0
    connections: int = 0
    least_s: float = math.inf

    @property
    def numbers(self) -> tuple[int, ...]:
        """Encode the counters of one connection for its other side, times in microseconds; () for none."""
        if self.connections != 1:
            return ()
        return self.sent, self.resent, self.size_bytes, round(self.trips_s * 1e6), round(self.least_s * 1e6)

    @classmethod
    def of(cls, numbers: tuple[int, ...]) -> Segments:
        """Decode :attr:`numbers`; zeros when the length is wrong."""
        if len(numbers) != _NUMBERS:
            return cls()
        sent, resent, size_bytes, trip_us, least_us = numbers
        return cls(sent, resent, size_bytes, trip_us / 1e6, 1, least_us / 1e6)

    def __add__(self, other: Segments) -> Segments:
        return Segments(
            self.sent + other.sent, self.resent + other.resent, max(self.size_bytes, other.size_bytes),
            self.trips_s + other.trips_s, self.connections + other.connections, min(self.least_s, other.least_s),
        )  # fmt: skip


def segments(sock: socket.socket) -> Segments:
    """Read the counters of a connection; zeros where the kernel has none or it does not back off."""
    try:
        control = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
        told = _info(sock)
        places = _SENT_AT, _RESENT_AT, _SEGMENT_AT, _ROUND_TRIP_AT, _LEAST_AT
        sent, resent, size_bytes, trip_us, least_us = (_FIELD.unpack_from(told, at)[0] for at in places)
    except (OSError, struct.error):
        return Segments()
    if control.rstrip(b"\0") not in _BACKING_OFF:
        return Segments()
    return Segments(sent, resent, size_bytes, trip_us / 1e6, 1, least_us / 1e6)


def acked_bytes(sock: socket.socket) -> int | None:
    """Return the bytes that the other side has confirmed, to a segment; None when closed or not TCP.

    Bytes behind a lost segment count as soon as they are there, so the sum does not stand still and then leap.
    """
    try:
        told = _info(sock)
        (delivered,), (size_bytes,) = _FIELD.unpack_from(told, _DELIVERED_AT), _FIELD.unpack_from(told, _SEGMENT_AT)
    except (OSError, struct.error):
        return None
    return int(delivered * size_bytes)


def arrived_bytes(sock: socket.socket) -> int | None:
    """Return the bytes received, to a segment, with those that wait for a lost one; None when unknown."""
    try:
        told = _info(sock)
        (came,), (size_bytes,) = _FIELD.unpack_from(told, _CAME_AT), _FIELD.unpack_from(told, _SEGMENT_IN_AT)
    except (OSError, struct.error):
        return None
    return int(came * size_bytes)


def waiting_bytes(sock: socket.socket) -> int:
    """Return the bytes sent and not yet confirmed by the other side (tcp(7)); 0 where the kernel cannot say."""
    try:
        (size_bytes,) = _INT.unpack(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(_INT.size)))
    except OSError:
        return 0
    return int(size_bytes)


def _info(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _DELIVERED_AT + _FIELD.size)


def fill(sock: socket.socket, view: memoryview, at_once_bytes: int = 1) -> bool:
    """Read until ``view`` is full; False when the connection ends. Nothing behind it is waited for.

    :param at_once_bytes: so many are to be there, or all that is left, before this thread is woken: a slow connection
        would wake it for each packet. :raises OSError: the connection is lost, or silent for too long.
    """
    enough = 1
    try:
        while view:
            if enough != min(at_once_bytes, len(view)):
                enough = min(at_once_bytes, len(view))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, enough)
            # One call that waits and copies would sleep for ever: of what it has copied already nothing counts.
            is_there = enough > 1 and bool(readable([sock.fileno()], _GATHER_S))
            if enough > 1 and not is_there:
                enough = at_once_bytes = 1
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            count = sock.recv_into(view, 0, socket.MSG_DONTWAIT if is_there else 0)
            if not count:
                return False
            view = view[count:]
    finally:
        if enough != 1:  # whoever reads next may want less
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    return True


def as_a_client(sock: socket.socket) -> socket.socket:
    """The same socket, as blocks are sent on it."""
    notice_loss(sock)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Bytes that wait in the kernel can take no other route, and are lost with this one: no more than keeps the link
    # busy.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    return sock


def unsent_bytes(size_bytes: int, took_s: float) -> int:
    """Return the bytes that may wait unsent in the kernel for a connection of blocks: 5 ms of its rate, bounded.

    It can take no other route and no other turn, and is lost with the connection. Where it is little on a fast link,
    who sends sleeps and is woken for each part of a block, which costs as much as sending it.

    :param size_bytes: what was sent last. :param took_s: so long that took. :return: a power of two.
    """
    fits_bytes = int(size_bytes * _UNSENT_S / max(took_s, 1e-6))
    return max(UNSENT_BYTES, min(MOST_UNSENT_BYTES, 1 << fits_bytes.bit_length() >> 1))


def send_both(sock: socket.socket, head: bytes, data: Buffer) -> None:
    """Send a header and what belongs to it, in one call where the kernel takes it and without copying.

    :raises OSError: the connection is lost.
    """
    sent = sock.sendmsg([head, data])
    if sent < len(head):
        sock.sendall(head[sent:])
        sent = len(head)
    if sent < len(head) + len(data):
        sock.sendall(memoryview(data)[sent - len(head) :])


def send_from(sock: socket.socket, head: bytes, file: int, offset: int, data: memoryview) -> None:
    """Send a header (b"" for none) and what belongs to it out of a file's pages in memory, without copying.

    The bytes sent are those that the file has at that moment: only the other side's checks notice a change meanwhile.

    :param file: descriptor. :param offset: where it begins in the file, in bytes. :param data: what was read from
        there, which is sent where the filesystem has no ``sendfile``.
    :raises OSError: the connection is lost, or the file has become shorter; part of it may have been sent.
    """
    sent = _sent_from(sock, head, file, offset, len(data))
    if sent < len(data):
        sock.sendall(data[sent:])


def send_unread(sock: socket.socket, head: bytes, file: int, offset: int, size_bytes: int) -> None:
    """The same for what nobody has read: it is read here only where the filesystem has no ``sendfile``.

    :raises OSError: as of :func:`send_from`.
    """
    sent = _sent_from(sock, head, file, offset, size_bytes)
    if sent < size_bytes:
        data = os.pread(file, size_bytes - sent, offset + sent)
        sock.sendall(data)
        if len(data) < size_bytes - sent:
            raise OSError(errno.ENODATA, SHORTER)


def _sent_from(sock: socket.socket, head: bytes, file: int, offset: int, size_bytes: int) -> int:
    """Send a header and what belongs to it by ``sendfile``: all of it, or less where there is no such thing."""
    if head:
        sock.sendall(head, socket.MSG_MORE)
    sent = 0
    while sent < size_bytes:
        try:
            count = os.sendfile(sock.fileno(), file, offset + sent, size_bytes - sent)
        except OSError as problem:
            if problem.errno not in _NO_SENDFILE:
                raise
            return sent
        if not count:
            raise OSError(errno.ENODATA, SHORTER)
        sent += count
    return sent
