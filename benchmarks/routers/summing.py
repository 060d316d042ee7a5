"""The cost of a sender that digests a file and does nothing else but send it: a bare loop, with no protocol around it.

``summing.py map|read FILE BYTES CONNECTIONS PORT`` sends to ``floor receive`` over so many connections, each in a
thread. Every block is looked at once, through a mapping or by reading it, and then leaves by sendfile. Prints JSON:
seconds of the processor, those of its start not among them.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Callable

from stageout.overlay.tcp import as_a_client
from stageout.overlay.wire import frames
from stageout.overlay.wire.messages import BLOCK_BYTES


def _mapped(file: int, size_bytes: int) -> Callable[[int], memoryview]:
    """Blocks in a mapping: whoever looks is killed if the file is cut, which is why the product does not."""
    view = memoryview(mmap.mmap(file, size_bytes, prot=mmap.PROT_READ))
    return lambda offset: view[offset : offset + BLOCK_BYTES]


def _read(file: int, size_bytes: int) -> Callable[[int], memoryview]:
    """Blocks in a buffer of whole pages, one for each thread."""
    mine = threading.local()

    def read(offset: int) -> memoryview:
        if not hasattr(mine, "view"):
            mine.view = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        os.preadv(file, [mine.view], offset)
        view: memoryview = mine.view
        return view

    return read


def _send(file: int, number: int, part_bytes: int, port: int, look: Callable[[int], memoryview]) -> None:
    """One connection with its part of the file."""
    digest = next(iter(frames.digests().values()))
    with as_a_client(socket.create_connection(("127.0.0.1", port))) as sock:
        sock.sendall(number.to_bytes(8, sys.byteorder))
        for offset in range(number * part_bytes, (number + 1) * part_bytes, BLOCK_BYTES):
            digest(look(offset))
            sent = 0
            while sent < BLOCK_BYTES:
                sent += os.sendfile(sock.fileno(), file, offset + sent, BLOCK_BYTES - sent)
        sock.shutdown(socket.SHUT_WR)
        sock.recv(1)


def main() -> None:
    """Run it."""
    how, path, (size_bytes, connections, port) = sys.argv[1], sys.argv[2], map(int, sys.argv[3:])
    before_s = time.process_time()
    file = os.open(path, os.O_RDONLY)
    look = {"map": _mapped, "read": _read}[how](file, size_bytes)
    part_bytes = size_bytes // connections
    threads = [threading.Thread(target=_send, args=(file, n, part_bytes, port, look)) for n in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"cpu_s": time.process_time() - before_s}))


if __name__ == "__main__":
    main()
