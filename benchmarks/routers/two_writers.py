"""Two processes that each write a file past the page cache and sync it as it grows, as two routers on one disk would.

``two_writers.py FOLDER BYTES`` ends when both are on the disk, and removes them.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from pathlib import Path

_MIB = 1 << 20
_SYNC_S = 0.2
_THREADS = 2


def _write(path: Path, size_bytes: int) -> None:
    """A file of that size past the page cache by two threads, synced as it grows."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.posix_fallocate(file, 0, size_bytes)
    direct, offsets, done = (
        os.open(path, os.O_WRONLY | os.O_DIRECT),
        iter(range(0, size_bytes, _MIB)),
        threading.Event(),
    )
    buffer = memoryview(mmap.mmap(-1, _MIB))
    buffer[:] = os.urandom(_MIB)

    def write() -> None:
        for offset in offsets:
            os.pwrite(direct, buffer, offset)

    def sync() -> None:
        while not done.wait(_SYNC_S):
            os.fdatasync(file)

    writing, syncing = [threading.Thread(target=write) for _ in range(_THREADS)], threading.Thread(target=sync)
    for thread in (*writing, syncing):
        thread.start()
    for thread in writing:
        thread.join()
    done.set()
    syncing.join()
    os.fdatasync(file)
    path.unlink()


def _two_writers(folder: Path, size_bytes: int) -> None:
    children = []
    for number in range(2):
        children.append(os.fork())
        if not children[-1]:
            _write(folder / f"writer{number}", size_bytes)
            os._exit(0)
    if any(os.waitpid(pid, 0)[1] for pid in children):
        raise SystemExit(2)


if __name__ == "__main__":
    _two_writers(Path(sys.argv[1]), int(sys.argv[2]))
