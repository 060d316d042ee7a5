"""The message for a peer when a disk or the database of this router fails: which, where, what to do.

The same word for all: what it asked for may be asked for again, and goes on when that is mended.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import sqlite3
from collections.abc import Iterator
from typing import NamedTuple

from overlay_router.peers.greeting import Unwelcome
from stageout.core.databases import is_full, is_read_only
from stageout.core.errors import ErrorClass

_AGAIN_S = 5
_MOST_CHARS = 1000


class _Fault(NamedTuple):
    kind: ErrorClass
    what: str
    remedy: str


_GONE = _Fault(ErrorClass.SERVER_ERROR, "is not there", "mount it, or put it back where it was")
_FULL = _Fault(ErrorClass.NO_SPACE_REMOTE, "is full", "make room there")
_DENIED = _Fault(ErrorClass.SERVER_ERROR, "may not be used by its user", "let that user read and write there")
_SHORT = _Fault(ErrorClass.SERVER_BUSY, "cannot be opened for want of descriptors or memory", "allow it more of these")
_NO_THREADS = _Fault(ErrorClass.SERVER_BUSY, "has as many threads as it may", "allow it more (TasksMax, ulimit -u)")
_FAILS = _Fault(ErrorClass.SERVER_ERROR, "fails", "look what its machine's kernel says of that disk")
_READ_ONLY = _Fault(
    ErrorClass.SERVER_ERROR, "is mounted read-only", "see why (an error, perhaps), and mount it for writing again"
)
_FAULTS = {
    errno.EROFS: _READ_ONLY,
    **dict.fromkeys((errno.ENOENT, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ENOTCONN), _GONE),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _FULL),
    **dict.fromkeys((errno.EACCES, errno.EPERM), _DENIED),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE, errno.ENOMEM), _SHORT),
    errno.EAGAIN: _NO_THREADS,
    errno.EIO: _FAILS,
}
_ITSELF = {_NO_THREADS: "this router"}


def is_disk(number: int) -> bool:
    """Tell whether an errno is that of a disk, or of what a process may have, and not of a connection."""
    return number in _FAULTS


def unwelcome(problem: BaseException, checksum: str) -> Unwelcome | None:
    """The message for the peer, None where it is no fault of a disk or database. :param checksum: that it expects."""
    if isinstance(problem, sqlite3.Error):
        fault = _FULL if is_full(problem) else _READ_ONLY if is_read_only(problem) else _FAILS
        where, why = "the disk of this router's database", f" ({problem})"
    elif isinstance(problem, OSError) and not isinstance(problem, (ConnectionError, asyncio.TimeoutError)):
        found = _FAULTS.get(problem.errno or 0)
        if found is None:
            return None
        name = problem.filename if isinstance(problem.filename, str) and problem.filename.startswith("/") else ""
        fault, where, why = found, name or _ITSELF.get(found, "the disk of this router"), ""
    else:
        return None
    text = f"{where} {fault.what}{why}; who runs this router: {fault.remedy}. What is asked for again then goes on"
    return Unwelcome(text[:_MOST_CHARS], checksum, _AGAIN_S, fault.kind.code)


@contextlib.contextmanager
def told_to(checksum: str) -> Iterator[None]:
    """Faults of disks and databases inside become what a peer is told. :raises Unwelcome: there was one."""
    try:
        yield
    except (OSError, sqlite3.Error) as problem:
        told = unwelcome(problem, checksum)
        if told is None:
            raise
        raise told from problem
