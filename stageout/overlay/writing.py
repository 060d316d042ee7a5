"""Blocks of a file that comes back, into the local one."""

from __future__ import annotations

import contextlib
import os

from stageout.overlay.memory import room_bytes

#: Of a smaller file nobody asks whether there is memory for it.
LARGE_BYTES = 64 * 1024 * 1024
#: When so much has come in turn, its way to the disk begins, and what of so much before it is there leaves memory.
STEP_BYTES, _BEHIND_BYTES = 8 * 1024 * 1024, 48 * 1024 * 1024


class Writing:
    """A file that is written through the page cache: who fetches it reads it next, from there.

    One that does not fit into memory goes to the disk as it comes, and leaves its memory then: else it drives out what
    others have there, and waits for its own pages (decision 34). May be used in several threads.

    :param file: its descriptor. :param size_bytes: that it will have.
    """

    def __init__(self, file: int, size_bytes: int) -> None:
        self._file = file
        room = room_bytes() if size_bytes >= LARGE_BYTES else None
        self._fits = room is None or size_bytes <= room

    def write(self, data: memoryview, offset: int) -> None:
        """All of it: a disk that is nearly full takes a part, and says why only when it is asked again.

        :raises OSError: it cannot be written; some of it may be there.
        """
        while data:
            written = os.pwrite(self._file, data, offset)
            data, offset = data[written:], offset + written
        if not self._fits and offset % STEP_BYTES == 0:
            self._let_go(offset)

    def _let_go(self, end: int) -> None:
        """Dirty pages begin to be written, clean ones leave (posix_fadvise(2)): only ever a hint."""
        start = max(0, end - _BEHIND_BYTES)
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._file, start, end - start, os.POSIX_FADV_DONTNEED)
