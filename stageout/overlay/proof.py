"""Whether a file that comes back is the one that was published: its blocks' digests against the router's record."""

from __future__ import annotations

import hashlib
import threading

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.wire.frames import DIGEST_BYTES
from stageout.overlay.wire.messages import BLOCK_BYTES, Found

#: Blocks whose digests lie together: wherever a router says that a block is, it takes less here than by itself.
_TOGETHER = 1024


class Proof:
    """Digests of one file's blocks by position, from any connection and in any order; judged when all are here.

    A file of which a router says nothing is not judged. May be used in several threads.

    :param path: of the file, for messages. :param server: the router that has it, likewise.
    """

    def __init__(self, path: str, server: str) -> None:
        self._path, self._server = path, server
        self._lock = threading.Lock()
        self._manifest = ""
        self._size_bytes = 0
        self._digests: dict[int, bytearray] = {}

    def begin(self, found: Found, digest: str, anew: bool) -> None:
        """A FOUND has come. :param digest: the kind of digests on that connection. :param anew: nothing is here yet.

        :raises TransferFailure: CONFLICT: what is there is not any more that of which blocks have come.
        """
        manifest = found.manifest if found.digest == digest else ""
        with self._lock:
            if anew:
                self._manifest, self._size_bytes, self._digests = manifest, found.size_bytes, {}
            elif (manifest, found.size_bytes) != (self._manifest, self._size_bytes):
                text = f"{self._path} was changed while it was fetched"
                raise TransferFailure(ErrorClass.CONFLICT, text, self._server)

    @property
    def is_wanted(self) -> bool:
        """Tell whether there is anything to judge by: else nobody needs digests."""
        return bool(self._manifest)

    def add(self, block: int, size_bytes: int, digest: bytes) -> None:
        """A block came; one that the file cannot have is left out.

        :param digest: of its bytes, of the kind that was named.
        """
        group, place = divmod(block, _TOGETHER)
        with self._lock:
            if size_bytes == min(BLOCK_BYTES, self._size_bytes - block * BLOCK_BYTES):
                some = self._digests.setdefault(group, bytearray(_TOGETHER * DIGEST_BYTES))
                some[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES] = digest

    def judge(self) -> None:
        """All of it is here. :raises TransferFailure: CONTENT_MISMATCH: it is not what was published."""
        if self._manifest and self._found() != self._manifest:
            text = f"{self._path} is not what was published: its disk has damaged it, or somebody has changed it there"
            raise TransferFailure(ErrorClass.CONTENT_MISMATCH, f"{self._server}: {text}", self._server)

    def _found(self) -> str:
        """The manifest of what came."""
        whole, left = hashlib.sha256(), -(-self._size_bytes // BLOCK_BYTES)
        for _, some in sorted(self._digests.items()):
            whole.update(memoryview(some)[: left * DIGEST_BYTES])
            left -= _TOGETHER
        return whole.hexdigest()
