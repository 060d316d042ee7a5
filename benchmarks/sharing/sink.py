"""The far end: a server that takes what comes on any number of connections, no faster than a far-off disk server would.

One stream carries no more than its window allows over the long way. All together are as fast as a disk that has a
bounded memory to gather writes in: with n streams each has an n-th of it, and the head moves once for every such part:

    rate(n) = disk / (1 + n seek disk / memory)

A connection is answered with one byte when all of it is there.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from dataclasses import dataclass

_TICK_S = 0.04
_LONGEST_TICK_S = 0.2
_BUFFER_BYTES = 16_384


@dataclass(frozen=True)
class Server:
    """The properties of the server.

    :param disk_mb_s: in one piece. :param seek_s: of the head. :param memory_mb: to gather writes in.
    :param stream_mb_s: most of one stream.
    """

    disk_mb_s: float
    seek_s: float
    memory_mb: float
    stream_mb_s: float

    def each_mb_s(self, streams: int) -> float:
        """The rate of each of so many streams."""
        whole = self.disk_mb_s / (1 + streams * self.seek_s * self.disk_mb_s / self.memory_mb)
        return min(self.stream_mb_s, whole / max(1, streams))


def serve(server: Server, port: int) -> None:
    """Serve for ever; prints the port."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(1024)
    listener.setblocking(False)
    print(listener.getsockname()[1], flush=True)
    waiting = selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ)
    open_: dict[socket.socket, float] = {}
    last_s = time.monotonic()
    while True:
        if open_:
            time.sleep(_TICK_S)
        else:
            waiting.select()
            last_s = time.monotonic()  # else the first streams would get what nobody used before
        now_s = time.monotonic()
        _accept(listener, open_)
        share = server.each_mb_s(len(open_)) * 1e6 * min(_LONGEST_TICK_S, now_s - last_s)
        last_s = now_s
        for sock in list(open_):
            if not _take(sock, open_, share):
                del open_[sock]
                sock.close()


def _accept(listener: socket.socket, open_: dict[socket.socket, float]) -> None:
    while True:
        try:
            near, _ = listener.accept()
        except BlockingIOError:
            return
        near.setblocking(False)
        open_[near] = 0.0


def _take(sock: socket.socket, open_: dict[socket.socket, float], share: float) -> bool:
    """Read what a stream's share allows. False at its end."""
    open_[sock] = min(open_[sock] + share, 4 * share)  # what it could not use is lost, but for a few ticks
    room = int(open_[sock])
    if room <= 0:
        return True
    try:
        data = sock.recv(room)
        if not data:
            sock.send(b"k")
        open_[sock] -= len(data)
        return bool(data)
    except BlockingIOError:
        return True
    except OSError:
        return False


def main() -> None:
    """Command line: the server as JSON, and a port (0: any)."""
    serve(Server(**json.loads(sys.argv[1])), int(sys.argv[2]))


if __name__ == "__main__":
    main()
