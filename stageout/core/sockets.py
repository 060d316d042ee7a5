"""Blocking sockets for many bytes: the kernel waits, copies and gives up, in as few system calls as there can be."""

from __future__ import annotations

import socket
import struct
from typing import Union

Buffer = Union[bytes, bytearray, memoryview]
_TIME = struct.Struct("ll")


def wait_at_most(sock: socket.socket, seconds: float) -> None:
    """From now on a call on this socket that waits longer than that raises BlockingIOError.

    ``settimeout`` does the same with a ``poll`` before each part, and wakes for the first byte of it.
    """
    sock.settimeout(None)
    time = _TIME.pack(*divmod(int(seconds * 1e6), 10**6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, time)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, time)


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
