"""Where a spool lies: data that are missing are lost only while the spool itself is there.

A filesystem that was unmounted, or a directory that was moved away, takes all of them with it, and brings them back.
"""

from __future__ import annotations

import errno
from pathlib import Path

_GONE = "the spool is not there: put it back where it was; a restart of the router gives up what was in it"


class Place:
    """A directory of a spool, as it is now."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._inode = directory, directory.stat().st_ino

    def check(self) -> None:
        """:raises FileNotFoundError: it, or what lies there, is not the directory of before."""
        try:
            inode = self._directory.stat().st_ino
        except FileNotFoundError:
            inode = 0
        if inode != self._inode:
            raise FileNotFoundError(errno.ENOENT, _GONE, str(self._directory))
