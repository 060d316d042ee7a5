"""Files without a name until they are whole: O_TMPFILE, then linkat. One change of a directory, and none to undo."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable
from contextlib import suppress

_AT_EMPTY_PATH = 0x1000
_FLAGS = os.O_WRONLY | os.O_CLOEXEC | os.O_TMPFILE
_libc = ctypes.CDLL(None, use_errno=True)
#: Give an open file its name: descriptor, directory, name. Raises FileExistsError for one that is taken.
Link = Callable[[int, int, str], None]


def make(place: int, mode: int) -> int:
    """A new file in the filesystem of a directory, open for writing. :raises OSError: that cannot be, or no room."""
    return os.open(".", _FLAGS, mode, dir_fd=place)


def way_to_link(place: int) -> Link | None:
    """Return how such files get their names in this filesystem; None where they cannot be made, or not be linked."""
    try:
        descriptor = make(place, 0o600)
    except OSError:
        return None
    probe = f"probe{os.getpid()}"  # several processes may look at once
    try:
        for link in (_link, _link_by_proc):
            with suppress(OSError):
                link(descriptor, place, probe)
                os.unlink(probe, dir_fd=place)
                return link
        return None
    finally:
        os.close(descriptor)


def most_open() -> int:
    """Return how many of them may be open at once: half of all descriptors that this process may have."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


def _link(descriptor: int, directory: int, name: str) -> None:
    """Needs CAP_DAC_READ_SEARCH, or a kernel from 6.10 on."""
    if _libc.linkat(descriptor, b"", directory, name.encode("utf-8", "surrogateescape"), _AT_EMPTY_PATH):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _link_by_proc(descriptor: int, directory: int, name: str) -> None:
    os.link(f"/proc/self/fd/{descriptor}", name, dst_dir_fd=directory, follow_symlinks=True)
