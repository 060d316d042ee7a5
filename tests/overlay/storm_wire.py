"""A wire on which bits flip, and whether each flip was noticed."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass

from stageout.wire.address import split_address

#: A connection on which a bit flipped must be over within this time: whoever received it ends it.
_NOTICED_WITHIN_S = 90.0


@dataclass
class _Connection:
    """Two sockets with the wire between them. :param flipped_s: when the first bit flipped; 0: none has."""

    near: socket.socket
    far: socket.socket
    flipped_s: float = 0.0
    ended_s: float = 0.0

    def end(self) -> None:
        """Both ends hear that it is over."""
        self.ended_s = self.ended_s or time.monotonic()
        for sock in (self.near, self.far):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def unnoticed(self) -> bool:
        """Whether it went on as if nothing had happened."""
        return self.flipped_s > 0 and (self.ended_s or time.monotonic()) - self.flipped_s > _NOTICED_WITHIN_S


class FlippingWire:
    """Passes connections to a router on, and flips a bit about once in so many bytes until it is told to be good.

    :param counts: gets the "flips". :ivar target: ``HOST:PORT`` where it leads.
    """

    def __init__(self, every_bytes: int, dice: random.Random, counts: Counter[str]) -> None:
        self.target = ""
        self.good = False
        self._every_bytes, self._dice, self._counts = every_bytes, dice, counts
        self._lock = threading.Lock()
        self._known: list[_Connection] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._listening.close()

    def unnoticed(self) -> int:
        """Connections on which a bit flipped and nobody cared."""
        with self._lock:
            return sum(one.unnoticed() for one in self._known)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(split_address(self.target), 5)
            except OSError:  # its router is dead for the moment
                near.close()
                continue
            far.settimeout(None)
            both = _Connection(near, far)
            with self._lock:
                self._known = [one for one in self._known if one.flipped_s or not one.ended_s]
                self._known.append(both)
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(both, source, target), daemon=True).start()

    def _copy(self, both: _Connection, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := bytearray(source.recv(65536)):
                flips = self._flip(data)
                target.sendall(data)
                if flips:
                    both.flipped_s = both.flipped_s or time.monotonic()
            target.shutdown(socket.SHUT_WR)
            if source is both.far or both.flipped_s:
                both.end()
        except OSError:
            both.end()

    def _flip(self, data: bytearray) -> bool:
        with self._lock:
            if self.good or self._dice.random() >= len(data) / self._every_bytes:
                return False
            data[self._dice.randrange(len(data))] ^= 1 << self._dice.randrange(8)
            self._counts["flips"] += 1
            return True
