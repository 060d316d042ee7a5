"""The descriptor into which a connection writes ranges of a file, and memory for one block."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress

from stageout.overlay.http.operations import BLOCK_BYTES


class Files:
    """The descriptor that a connection writes to. :ivar at: its row, 0 for none."""

    def __init__(self) -> None:
        self.at, self.file, self.direct = 0, -1, -1
        self.memory: memoryview | None = None

    def take(self, at: int, file: int) -> None:
        """Keep another one, in place of the one before."""
        self.close()
        self.at, self.file = at, file
        with suppress(OSError):  # past the page cache, where the filesystem allows it
            self.direct = os.open(f"/proc/self/fd/{file}", os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)

    def close(self) -> None:
        """Let go of it."""
        for one in (self.file, self.direct):
            if one >= 0:
                os.close(one)
        self.at, self.file, self.direct = 0, -1, -1

    def block(self) -> memoryview:
        """Return memory of one block, aligned."""
        if self.memory is None:
            self.memory = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        return self.memory
