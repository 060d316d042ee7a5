"""What a worker says to a carrier, in its order, without ever waiting for it.

At both ends one thread reads, and answers what it reads. If each waited until the other has read, neither would read
any more: so this end never waits. What the socket does not take now waits here, and a thread says it when it does.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque


class Teller:
    """:param link: connection to the carrier. One that has ended hears nothing, and that is no error."""

    def __init__(self, link: socket.socket) -> None:
        self._link, self._lock = link, threading.Lock()
        self._waiting: deque[bytes] = deque()

    def say(self, message: bytes) -> None:
        """Say it, behind all that was said before. It is as good as heard, unless one of the two processes ends."""
        with self._lock, contextlib.suppress(OSError):
            if not self._waiting and self._goes(message):
                return
            self._waiting.append(message)
            if len(self._waiting) == 1:
                threading.Thread(target=self._catch_up, daemon=True).start()

    def offer(self, message: bytes) -> bool:
        """Say it if the carrier can have it now; whether that is so."""
        try:
            with self._lock:
                return not self._waiting and self._goes(message)
        except OSError:
            return False

    def _goes(self, message: bytes) -> bool:
        try:
            self._link.send(message, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def _catch_up(self) -> None:
        with contextlib.suppress(OSError):
            while self._said_one():
                pass
            return
        with self._lock:
            self._waiting.clear()

    def _said_one(self) -> bool:
        """Say the first of those that wait; whether more do."""
        self._link.send(self._waiting[0])
        with self._lock:
            self._waiting.popleft()
            return bool(self._waiting)
