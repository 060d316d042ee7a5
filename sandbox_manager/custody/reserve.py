"""Room on the disk that is kept for the records of what is in custody, and given up when the disk is full.

Jobs share the disk with the spool and may fill it. Then nothing more is taken over, but what was taken over must still
be confirmed, sent and released: that is what makes room again.
"""

from __future__ import annotations

import os
from pathlib import Path

from stageout.core import durable, log

RESERVE_BYTES = 4 * 1024 * 1024
_FULL_BYTES = 256 * 1024
_ROOMY_BYTES = 8 * RESERVE_BYTES


class Reserve:
    """A file that is there for its size only. :param path: on the filesystem of spool and ledger."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def keep(self) -> None:
        """Make the file where there is room. :raises OSError: it cannot be made."""
        if self._exists() or self._free_bytes() < _ROOMY_BYTES:
            return
        # Random bytes: zeros would take no room where the filesystem compresses.
        durable.write_file("reserve-keep", self._path, os.urandom(RESERVE_BYTES))

    def give_up(self) -> bool:
        """Remove the file when the disk is full. True when it was there, so that there is room now. Never raises."""
        try:
            if self._free_bytes() >= _FULL_BYTES or not self._exists():
                return False
            durable.unlink("reserve-give-up", self._path)
        except OSError as problem:
            log.error("reserve-release-failed", problem=problem, advice="see whether the disk of the spool is sound")
            return False
        log.warn("reserve-released", path=self._path, advice="the disk of the spool is full: make room there")
        return True

    def _exists(self) -> bool:
        try:
            durable.disk.lstat(self._path)
        except FileNotFoundError:
            return False
        return True

    def _free_bytes(self) -> int:
        found = durable.disk.statvfs(self._path.parent)
        return found.f_bavail * found.f_frsize
