"""A link in front of a server on this machine: so much per connection, so much for all together, in each direction."""

from __future__ import annotations

import socket
import threading
import time

_BLOCK_BYTES = 16 << 10


class _Pace:
    """Lets bytes pass at a rate; callers wait their turn."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0

    def wait(self, size_bytes: int) -> None:
        with self._lock:
            now_s = time.monotonic()
            self._free_s = max(self._free_s, now_s - 0.02) + size_bytes / self._bytes_per_s
            wait_s = self._free_s - now_s
        if wait_s > 0:
            time.sleep(wait_s)


class Link:
    """Listens on ``port`` and passes everything on."""

    def __init__(self, server_port: int, each_bytes_per_s: float, all_bytes_per_s: float) -> None:
        self._server_port = server_port
        self._each = each_bytes_per_s
        self._all = (_Pace(all_bytes_per_s), _Pace(all_bytes_per_s))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.most_at_once = 0
        self._now = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with self._lock:
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            far = socket.create_connection(("127.0.0.1", self._server_port))
        except OSError:
            near.close()
            return
        for end in (near, far):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        back = threading.Thread(target=self._pass, args=(far, near, 1), daemon=True)
        back.start()
        self._pass(near, far, 0)
        back.join()
        near.close()
        far.close()
        with self._lock:
            self._now -= 1

    def _pass(self, source: socket.socket, target: socket.socket, way: int) -> None:
        own = _Pace(self._each)
        try:
            while data := source.recv(_BLOCK_BYTES):
                own.wait(len(data))
                self._all[way].wait(len(data))
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return
