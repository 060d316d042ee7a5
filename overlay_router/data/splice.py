"""Bytes of a circuit from one socket to the other and back, through pipes and never into this process.

The data under way in a relay are one pipe for each direction and the kernel's buffers for the two sockets: when the
next hop is slow, the one before is not read, and TCP tells it so. A thread serves each direction; an end of one
direction is passed on while the other goes on.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import socket
import struct
import termios
import time
from collections.abc import Callable

from stageout.core.threads import started
from stageout.overlay.tcp import wait_at_most
from stageout.overlay.uplink import Turn

_PIPE_BYTES = 256 * 1024
#: The initial size of a pipe. With less it takes a packet or two at once, as if these were messages.
_LEAST_PIPE_BYTES = 64 * 1024
_F_SETPIPE_SZ = 1031
_SPLICE_F_MOVE = 1
#: A circuit on which nothing moved for so long, in either direction, is closed.
IDLE_S = 180.0
_LOOK_S = 5
_TELL_S = 0.5
#: While data come in smaller parts than this they are gathered, for no longer than this.
_USEFUL_BYTES = 64 * 1024
_GATHER_MS = 5
#: Less than that is a message by itself: nobody waits for more.
_LEAST_BYTES = 1024
#: A fast hop is known sooner, or much of a file would have passed before.
_FIRST_TELL_S = 0.05
#: The bytes that may wait unsent for a hop, and be taken at once: those that leave in this time, within bounds.
_UNSENT_S = 0.005
_MOST_UNSENT_BYTES = 1024 * 1024


class Gathering:
    """Lets data gather in a socket while they flow, so that a slow link does not cost a turn for each of its packets.

    The first byte behind a pause is never waited for, and no byte waits for long.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._gathers = sock, False
        self._is_tcp = sock.family != socket.AF_UNIX
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def wait(self, came_bytes: int) -> None:
        """Before the next part is read. :param came_bytes: size of the last one."""
        if not self._gathers and self._is_tcp and _LEAST_BYTES <= came_bytes < _USEFUL_BYTES:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _USEFUL_BYTES)
            self._gathers = True
        if self._gathers and not self._poll.poll(_GATHER_MS) and not self._waiting_bytes():
            # whoever reads now waits for the first byte
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            self._gathers = False

    def _waiting_bytes(self) -> int:
        return int(struct.unpack("i", fcntl.ioctl(self._sock, termios.FIONREAD, b"\0" * 4))[0])


class Circuit:
    """Two connected sockets.

    :param idle_s: silence in both directions after which they are closed.
    :param take: waits until so many bytes may go on to ``far``; with :param back: to ``near``.
    :param turn: its place on this router's uplink, which ``take`` waits for: what goes the other way takes it, too.
    :param moved: called about twice a second with the bytes that went on to ``far`` since.
    """

    def __init__(
        self,
        near: socket.socket,
        far: socket.socket,
        idle_s: float = IDLE_S,
        moved: Callable[[int], None] = lambda size_bytes: None,
        take: Callable[[int], None] = lambda size_bytes: None,
        back: bool = False,
        turn: Turn | None = None,
    ) -> None:
        self._near, self._far, self._idle_s, self._moved = near, far, idle_s, moved
        self._take, self._ordered, self._turn = take, near if back else far, turn
        self._untold_bytes, self._told_s, self._tell_s = 0, time.monotonic(), _FIRST_TELL_S
        self._moved_s = time.monotonic()
        self._unsent = 0
        for sock in (near, far):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            wait_at_most(sock, min(_LOOK_S, idle_s))
        self._let_wait(_PIPE_BYTES)

    def run(self) -> None:
        """Pass bytes on until both directions have ended, one side failed, or nothing moved for too long."""
        back = started(self._pass, self._far, self._near)
        self._pass(self._near, self._far)
        back.join()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        try:
            reading, writing = os.pipe()
        except OSError:  # no more descriptors: one direction alone would only look alive
            self._end()
            return
        gathering = Gathering(source)
        try:
            room = _LEAST_PIPE_BYTES
            while True:
                at_once = self._unsent if target is self._far else min(_PIPE_BYTES, self._most_bytes)
                if at_once > room:
                    room = at_once
                    _widen(writing, room)
                count = self._move(source.fileno(), writing, at_once)
                if not count:
                    break
                if target is self._ordered:
                    self._take(count)
                elif self._turn:
                    self._turn.take(count)
                left = count
                while left:
                    part = self._move(reading, target.fileno(), left)
                    left -= part
                    if target is self._far:
                        self._tell(part)
                gathering.wait(count)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            self._end()
        finally:
            os.close(reading)
            os.close(writing)

    @property
    def _most_bytes(self) -> int:
        """The bytes that may be taken at once."""
        return self._turn.piece_bytes if self._turn else _MOST_UNSENT_BYTES

    def _tell(self, size_bytes: int) -> None:
        self._untold_bytes += size_bytes
        seconds = time.monotonic() - self._told_s
        if seconds >= self._tell_s:
            self._moved(self._untold_bytes)
            self._let_wait(int(self._untold_bytes / seconds * _UNSENT_S))
            self._untold_bytes, self._told_s, self._tell_s = 0, self._told_s + seconds, _TELL_S

    def _let_wait(self, size_bytes: int) -> None:
        """So many bytes may wait unsent, and be taken at once: what keeps a fast hop busy, and costs little,
        would be much in front of a slow one.
        """
        unsent = min(max(_PIPE_BYTES, size_bytes), self._most_bytes)
        for sock in (self._near, self._far):
            if unsent != self._unsent and sock.family != socket.AF_UNIX:  # that is the plain end of TLS
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent)
        self._unsent = unsent

    def _move(self, source: int, target: int, size_bytes: int) -> int:
        while True:
            try:
                count = splice(source, target, size_bytes)
            except BlockingIOError:
                if time.monotonic() - self._moved_s > self._idle_s:
                    raise TimeoutError("nothing moved") from None
                continue
            self._moved_s = time.monotonic()
            return count

    def _end(self) -> None:
        for sock in (self._near, self._far):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _widen(pipe: int, size_bytes: int) -> None:
    with contextlib.suppress(OSError):  # an ordinary user has only so much pipe; a small one works too
        fcntl.fcntl(pipe, _F_SETPIPE_SZ, size_bytes)


def _splice_of_libc(source: int, target: int, size_bytes: int) -> int:
    count = int(_libc.splice(source, None, target, None, ctypes.c_size_t(size_bytes), _SPLICE_F_MOVE))
    if count < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return count


def _splice_of_python(source: int, target: int, size_bytes: int) -> int:
    return int(os.splice(source, target, size_bytes, flags=_SPLICE_F_MOVE))  # type: ignore[attr-defined, unused-ignore]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.splice.restype = ctypes.c_ssize_t
#: Python has it from 3.10 on.
splice = _splice_of_python if hasattr(os, "splice") else _splice_of_libc
