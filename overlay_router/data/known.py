"""Blocks of a published file whose digests are known: they leave with these checksums, and nobody looks at them.

A receiver of a rotten digest finds that it does not fit, and asks again from there. The first block of each answer is
looked at, so it is found here then (docs/developer/decisions/0027-digests-kept.md).
"""

from __future__ import annotations

import contextlib
import mmap
import os

from overlay_router.data.jobs import Job
from stageout.overlay.wire import frames
from stageout.overlay.wire.frames import CHECKSUM_BYTES, DIGEST_BYTES


class Damaged(Exception):
    """The disk does not give what was published. :ivar block: that is another one."""

    def __init__(self, path: str, block: int) -> None:
        super().__init__(f"{path}: block {block} is not what was published: the router's disk has damaged it")
        self.block = block


class Digests:
    """Those of the blocks that a job is about, of which the first is ``job.block``.

    :param descriptor: of a file in memory that has them; it is closed here. -1: nothing is known.
    """

    def __init__(self, job: Job, descriptor: int = -1) -> None:
        self._first, self._kind, self._view = job.block, job.known, memoryview(b"")
        if descriptor >= 0:
            with contextlib.suppress(OSError):  # there is no room for it: then all is read
                self._view = memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
            os.close(descriptor)
        self._vouches = frames.vouches(job.checksum, job.known)

    def of(self, block: int) -> bytes:
        """The digest of a block; b"" where it is not known."""
        start = (block - self._first) * DIGEST_BYTES
        return bytes(self._view[start : start + DIGEST_BYTES])

    def checksum(self, block: int) -> int | None:
        """The digest with which a block may leave unread; None: it must be read."""
        if not self._vouches or block == self._first:
            return None
        digest = self.of(block)
        return int.from_bytes(digest[:CHECKSUM_BYTES], "big") if len(digest) == DIGEST_BYTES else None

    def fit_first(self, data: memoryview, job: Job, file: int) -> bool:
        """Tell whether the file is still that of which the digests are.

        :raises Damaged: it is, and its disk has damaged it.

        :param data: the first block as it was read. :param file: descriptor of the file.
        """
        known, digest_of = self.of(self._first), frames.digests().get(self._kind)
        if len(known) < DIGEST_BYTES or digest_of is None or digest_of(data) == known:
            return True
        status = os.fstat(file)
        if (status.st_size, status.st_mtime_ns) != (job.size_bytes, job.mtime_ns):
            return False
        raise Damaged(job.path, self._first)
