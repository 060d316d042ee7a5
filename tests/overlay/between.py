"""Something on the way to a router: it hears all bytes, and may flip some, or pass some slowly."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Collection

from stageout.overlay.wire.messages import BLOCK_BYTES

_FAST_BYTES, _SLOW_BYTES, _SLOW_S = 100_000, 1000, 0.2


class Between:
    """Passes connections on to a port of this machine, and keeps what it hears in both directions.

    :param flips: bits that it changes in all, each in the middle of a block on its way to the port, or, with
        :param back:, from there. :param slow: connections, by the order in which they were made, on which next to
        nothing comes back after the first 100 KB.
    :param bytes_s: rate of all it passes, each way of a connection; 0: unlimited.
    :ivar port: where it listens. :ivar heard: the bytes. :ivar flipped: bits that were changed. :ivar connections: that
        were made.
    """

    def __init__(
        self, target: int, flips: int = 0, back: bool = False, slow: Collection[int] = (), bytes_s: float = 0
    ) -> None:
        self._target, self._flips, self._back, self._slow = target, flips, back, slow
        self.bytes_s = bytes_s
        self.heard, self.flipped, self.connections = bytearray(), 0, 0
        self._ends: list[socket.socket] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Between:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._listening.close()

    def cut(self) -> None:
        """End all connections."""
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._ends.clear()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:  # it is being started again
                near.close()
                continue
            is_slow = self.connections in self._slow
            self.connections += 1
            self._ends += near, far
            threading.Thread(target=self._copy, args=(near, far, not self._back), daemon=True).start()
            threading.Thread(target=self._copy, args=(far, near, self._back, is_slow), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, may_flip: bool, is_slow: bool = False) -> None:
        passed_bytes = 0
        try:
            while data := source.recv(_SLOW_BYTES if is_slow and passed_bytes > _FAST_BYTES else 65536):
                if len(data) <= _SLOW_BYTES and is_slow and passed_bytes > _FAST_BYTES:
                    time.sleep(_SLOW_S)
                passed_bytes += len(data)
                self.heard += data
                if may_flip and len(data) > 10 and passed_bytes > 2 * BLOCK_BYTES and self._flip():
                    data = data[:10] + bytes([data[10] ^ 4]) + data[11:]
                target.sendall(data)
                if self.bytes_s:
                    time.sleep(len(data) / self.bytes_s)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            for sock in (source, target):
                sock.close()

    def _flip(self) -> bool:
        with self._lock:
            if self.flipped == self._flips:
                return False
            self.flipped += 1
            return True
