"""Files that are to be sent."""

from __future__ import annotations

import os
import stat
from typing import Union

from stageout.core.errors import ErrorClass, TransferFailure

AnyPath = Union[str, "os.PathLike[str]"]


def open_source(local: AnyPath) -> tuple[int, os.stat_result]:
    """A descriptor of a file that is to be read, and what it was when it was opened. Never waits for who writes a FIFO.

    :raises TransferFailure: LOCAL_FILE, it cannot be read, or is a FIFO, a device, a directory: it has no content that
        could be sent again.
    """
    try:
        descriptor = os.open(local, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as problem:
        raise TransferFailure(ErrorClass.LOCAL_FILE, f"{os.fspath(local)}: {problem.strerror}") from None
    facts = os.fstat(descriptor)
    try:
        check_source(local, facts.st_mode)
    except TransferFailure:
        os.close(descriptor)
        raise
    return descriptor, facts


def check_source(local: AnyPath, mode: int) -> None:
    """:raises TransferFailure: LOCAL_FILE, what has this mode is no regular file."""
    if not stat.S_ISREG(mode):
        raise TransferFailure(ErrorClass.LOCAL_FILE, f"{os.fspath(local)} is {_kind(mode)}, not a file")


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a directory"
    if stat.S_ISSOCK(mode):
        return "a socket"
    return "a FIFO" if stat.S_ISFIFO(mode) else "a device"
