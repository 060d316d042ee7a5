"""Files that plugins have fetched, in the spool: each holds a lot as long as somebody reads it, or it is kept.

Used in one thread, with the spool. A reader has a lock on its descriptor, which the kernel drops when the last process
has closed it: so a file goes when nobody reads it any more, whatever became of the readers.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from overlay_router.local.replies import Published
from overlay_router.rules import lots
from overlay_router.rules.lots import Spool
from stageout.core.clock import Clock
from stageout.overlay.wire import frames
from stageout.overlay.wire.messages import BLOCK_BYTES

#: Fetched copies leave so much of the spool to output.
_SHARE = 0.5
#: A client that has just heard of a copy opens it within this time.
_LEAST_S = 2.0
DIGEST = "blake2b-128"


@dataclass
class Fetched:
    """A whole copy. :param version: of its content: equal numbers mean equal bytes. :param until_s: monotonic."""

    path: str
    file: Path
    size_bytes: int
    version: int
    mode: int
    until_s: float = 0.0


class FetchedFiles:
    """All of a gateway.

    :param spool: whose lots they take. :param keep_s: after their last use, in seconds; two at least.
    """

    def __init__(self, spool: Spool, keep_s: float, clock: Clock) -> None:
        self._spool, self._keep_s, self._clock = spool, max(keep_s, _LEAST_S), clock
        self._files: dict[Path, Fetched] = {}
        self._lots: set[Path] = set()

    @property
    def most_bytes(self) -> int:
        """The bytes that all of them may take."""
        return int(lots.usable_bytes(self._spool) * _SHARE)

    def grow(self, file: Path, size_bytes: int) -> bool:
        """Reserve so many bytes for a file that comes in. False: there is no room, also without what nobody reads."""
        if not self._fits(file, size_bytes):
            self.reap(at_once=True)
            return self._fits(file, size_bytes)
        return True

    def keep(self, fetched: Fetched) -> None:
        """A file is whole, and room for it was granted: its lot shrinks to its size."""
        self._spool.lots[fetched.file] = lots.Lot(fetched.size_bytes, 0.0, pinned=True)
        fetched.until_s = self._clock.monotonic_s() + self._keep_s
        self._files[fetched.file] = fetched

    def drop(self, file: Path) -> None:
        """Nothing came of it, or nobody reads it any more."""
        file.unlink(missing_ok=True)
        self._files.pop(file, None)
        self._lots.discard(file)
        lots.release(self._spool, file)

    def find(self, path: str, version: int) -> Fetched | None:
        """A kept copy of that version."""
        found = (one for one in self._files.values() if (one.path, one.version) == (path, version))
        return next(found, None)

    def open(self, fetched: Fetched) -> Published:
        """For one who reads it; he closes the descriptor. :raises OSError: it cannot be opened any more."""
        descriptor = os.open(fetched.file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        fetched.until_s = self._clock.monotonic_s() + self._keep_s
        return Published(fetched.size_bytes, fetched.mode, fetched.version, descriptor)

    def reap(self, at_once: bool = False) -> None:
        """Remove what nobody reads and was kept for its time. :param at_once: that is a moment only."""
        now_s = self._clock.monotonic_s() + (self._keep_s - _LEAST_S if at_once else 0.0)
        for one in [one for one in self._files.values() if one.until_s < now_s]:
            if not _is_read(one.file):
                self.drop(one.file)

    def _fits(self, file: Path, size_bytes: int) -> bool:
        others = sum(self._spool.lots[one].size_bytes for one in self._lots - {file} if one in self._spool.lots)
        if others + size_bytes > self.most_bytes:
            return False
        if lots.reserve(self._spool, file, size_bytes, self._clock.monotonic_s()) is not None:
            return False
        lots.pin(self._spool, file)
        self._lots.add(file)
        return True


def _is_read(file: Path) -> bool:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:  # no descriptor is free, above all: nobody knows
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def manifest_of(file: Path, digest_name: str = DIGEST, is_wanted: Callable[[], bool] = lambda: True) -> tuple[int, str]:
    """Size in bytes, and manifest as of a PUBLISH. Reads all of it.

    :param is_wanted: asked before each block. :raises OSError: that cannot be, or it is wanted no more.
    """
    digest, made = frames.digests()[digest_name], hashlib.sha256()
    size_bytes = 0
    with file.open("rb", buffering=BLOCK_BYTES) as stream:
        while block := stream.read(BLOCK_BYTES):
            if not is_wanted():
                raise InterruptedError("nobody waits for it any more")
            made.update(digest(block))
            size_bytes += len(block)
    return size_bytes, made.hexdigest()


def version_of(manifest: str) -> int:
    """The number of a content, from 1 on."""
    return max(1, int(manifest[:16], 16) >> 1)
