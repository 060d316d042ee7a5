"""One end of the data plane alone, as the product runs it but without a disk: blocks from memory to memory.

``plane.py send BLOCKS PORT | receive BLOCKS | relay PORT`` serves one connection and prints JSON: seconds that it took,
seconds of the processor. ``receive`` and ``relay`` print the port that they listen on before.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import time
from collections.abc import Callable

from overlay_router.splice import Circuit
from overlay_router.worker import Gate, Job, Receiver, Report
from stageout.wire import frames
from stageout.wire.frames import Type
from stageout.wire.overlay import BLOCK_BYTES

_TID = 1


class _InMemory(Receiver):
    """Blocks are received, checked and digested; there is no disk."""

    def _write(self, data: memoryview, offset: int) -> None:
        return

    def _sync(self) -> None:
        self._unsynced, self._unsynced_bytes = [], 0


def _accepted() -> socket.socket:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        return listening.accept()[0]


def _connected(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def send(count: int, port: int) -> None:
    """Blocks as a client sends them: digest, checksum, header, bytes."""
    checksum = next(iter(frames.checksums().values()))
    digest = next(iter(frames.digests().values()))
    data = memoryview(bytearray(os.urandom(BLOCK_BYTES)))
    with _connected(port) as sock:
        for block in range(count):
            digest(data)
            header = frames.encode_header(Type.BLOCK, data, checksum, _TID, block)
            sent = sock.sendmsg([header, data])
            if sent < len(header) + len(data):
                sock.sendall(data[sent - len(header) :])
        sock.shutdown(socket.SHUT_WR)
        sock.recv(1)


def receive(count: int) -> None:
    """Blocks as a worker receives them."""
    checksum, digest = next(iter(frames.checksums())), next(iter(frames.digests()))
    job = Job("receive", _TID, checksum, digest, BLOCK_BYTES, count * BLOCK_BYTES)
    with _accepted() as sock, open("/dev/null", "wb") as nowhere:
        _InMemory(job, sock, nowhere.fileno(), _ignore, Gate()).run()  # type: ignore[arg-type]


def _ignore(report: Report) -> None:
    return


def relay(target: int) -> None:
    """A circuit as a worker passes it on."""
    near = _accepted()
    with near, _connected(target) as far:
        Circuit(near, far).run()


def main() -> None:
    """Run one part."""
    name, numbers = sys.argv[1], [int(word) for word in sys.argv[2:]]
    sys.setswitchinterval(0.0002)
    before = resource.getrusage(resource.RUSAGE_SELF)
    start_s = time.monotonic()
    parts: dict[str, Callable[..., None]] = {"send": send, "receive": receive, "relay": relay}
    parts[name](*numbers)
    took_s = time.monotonic() - start_s
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps({"took_s": took_s, "cpu_s": cpu_s}))


if __name__ == "__main__":
    main()
