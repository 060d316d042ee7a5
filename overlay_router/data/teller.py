"""The messages of a worker to a carrier, or of a carrier to a worker, in their order, without ever waiting for the
other.

At both ends one thread reads, and answers what it reads. If each waited until the other has read, neither would read
any more; and while one worker stands still, a carrier has others to talk to. So nobody waits: what the socket does not
take now waits here, and a thread says it when it does. Nothing is ever left out: where something cannot be said, the
connection ends, and both know that.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Sequence


class Teller:
    """:param link: connection to the other. One that has ended hears nothing, and that is no error."""

    def __init__(self, link: socket.socket) -> None:
        self._link, self._lock = link, threading.Lock()
        self._waiting: deque[bytes] = deque()

    def say(self, message: bytes) -> None:
        """Say it, behind all that was said before. It is as good as heard, unless the connection ends."""
        try:
            with self._lock:
                if not self._waiting and self._goes(message):
                    return
                self._waiting.append(message)
                if len(self._waiting) == 1:
                    threading.Thread(target=self._catch_up, daemon=True).start()
        except (OSError, RuntimeError):  # the latter of a process that has as many threads as it may
            self._end()

    def offer(self, message: bytes, descriptors: Sequence[int] = ()) -> bool:
        """Say it if the other can have it now; whether that is so. :param descriptors: that go with it."""
        try:
            with self._lock:
                return not self._waiting and self._goes(message, descriptors)
        except OSError:
            return False

    def _goes(self, message: bytes, descriptors: Sequence[int] = ()) -> bool:
        try:
            if descriptors:
                socket.send_fds(self._link, [message], list(descriptors), socket.MSG_DONTWAIT)
            else:
                self._link.send(message, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def _catch_up(self) -> None:
        try:
            while self._said_one():
                pass
        except OSError:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self._waiting.clear()
        with contextlib.suppress(OSError):  # it has ended
            self._link.shutdown(socket.SHUT_RDWR)

    def _said_one(self) -> bool:
        """Say the first of those that wait; whether more do."""
        self._link.send(self._waiting[0])
        with self._lock:
            self._waiting.popleft()
            return bool(self._waiting)
