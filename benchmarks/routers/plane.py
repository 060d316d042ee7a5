"""One end of the data plane alone, as the product runs it but without a disk: blocks from memory to memory.

``plane.py send BLOCKS CONNECTIONS PORT | receive BLOCKS CONNECTIONS | relay CONNECTIONS PORT`` serves so many
connections and prints JSON: seconds that it took, seconds of the processor. ``receive`` and ``relay`` print the port
that they listen on before.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from overlay_router.data.jobs import Job, Report
from overlay_router.data.receiving import Gate, Receiver
from overlay_router.data.splice import Circuit
from stageout.overlay.tcp import as_a_client, send_both, wait_at_most
from stageout.overlay.wire import frames
from stageout.overlay.wire.frames import Type
from stageout.overlay.wire.messages import BLOCK_BYTES

_TID = 1


class _InMemory(Receiver):
    """Blocks are received, checked and digested; there is no disk."""

    def _write(self, data: memoryview, offset: int) -> None:
        return


def _accepted(connections: int) -> list[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        return [listening.accept()[0] for _ in range(connections)]


def _in_threads(work: Callable[[socket.socket], None], connections: Sequence[socket.socket]) -> None:
    """As a client has them."""
    threads = [threading.Thread(target=work, args=(sock,)) for sock in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _in_processes(work: Callable[[socket.socket], None], connections: Sequence[socket.socket]) -> None:
    """As a router gives them to its workers."""
    workers = []
    for sock in connections:
        workers.append(os.fork())
        if not workers[-1]:
            work(sock)
            os._exit(0)
        sock.close()
    if any(os.waitpid(pid, 0)[1] for pid in workers):
        raise SystemExit(2)


def send(count: int, connections: int, port: int) -> None:
    """Blocks as a client sends them: digest, checksum, header, bytes."""
    kind, checksum = next(iter(frames.checksums().items()))
    sums = frames.sums(kind, next(iter(frames.digests())))
    left = deque(range(count))

    def work(sock: socket.socket) -> None:
        data = memoryview(bytearray(os.urandom(BLOCK_BYTES)))
        with contextlib.suppress(IndexError):
            while True:
                block = left.popleft()
                head = frames.pack_header(Type.BLOCK, len(data), sums(data)[0], checksum, _TID, block)
                send_both(sock, head, data)
        sock.shutdown(socket.SHUT_WR)
        sock.recv(1)
        sock.close()

    _in_threads(work, [as_a_client(socket.create_connection(("127.0.0.1", port))) for _ in range(connections)])


def receive(count: int, connections: int) -> None:
    """Blocks as a worker receives them."""
    checksum, digest = next(iter(frames.checksums())), next(iter(frames.digests()))
    job = Job("receive", _TID, checksum, digest, BLOCK_BYTES, count * BLOCK_BYTES)
    nowhere = os.memfd_create("blocks")

    def work(sock: socket.socket) -> None:
        with sock:
            wait_at_most(sock, 60)
            _InMemory(job, sock, nowhere, _ignore, Gate()).run()  # type: ignore[arg-type]

    _in_processes(work, _accepted(connections))


def _ignore(report: Report) -> None:
    return


def relay(connections: int, target: int) -> None:
    """Circuits as a worker passes them on."""

    def work(near: socket.socket) -> None:
        with near, socket.create_connection(("127.0.0.1", target)) as far:
            Circuit(near, far).run()

    _in_processes(work, _accepted(connections))


def main() -> None:
    """Run one part."""
    name, numbers = sys.argv[1], [int(word) for word in sys.argv[2:]]
    sys.setswitchinterval(0.0002)
    before_s, start_s = time.process_time(), time.monotonic()
    parts: dict[str, Callable[..., None]] = {"send": send, "receive": receive, "relay": relay}
    parts[name](*numbers)
    took_s = time.monotonic() - start_s
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_s = sum(one.ru_utime + one.ru_stime for one in used) - before_s
    print(json.dumps({"took_s": took_s, "cpu_s": cpu_s}))


if __name__ == "__main__":
    main()
