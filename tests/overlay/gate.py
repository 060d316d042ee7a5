"""A gate on the way to a router: it shuts when so many bytes have passed, until somebody opens it."""

from __future__ import annotations

import contextlib
import socket
import threading


class Gate:
    """Passes connections on to a port of this machine.

    :param after_bytes: in both directions together, then nothing more passes. :ivar port: where it listens.
    :ivar shut: set while it is shut.
    """

    def __init__(self, target: int, after_bytes: int) -> None:
        self._target, self._left_bytes = target, after_bytes
        self._open, self.shut = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._open.set()

    def __enter__(self) -> Gate:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._listening.close()
        self.open()

    def open(self) -> None:
        """Let everything pass from now on."""
        with self._lock:
            self._left_bytes = 1 << 62
        self._open.set()
        self.shut.clear()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._copy, args=ends, daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._open.wait()
                target.sendall(data)
                with self._lock:
                    self._left_bytes -= len(data)
                    if self._left_bytes <= 0 and self._open.is_set():
                        self._open.clear()
                        self.shut.set()
            target.shutdown(socket.SHUT_WR)
