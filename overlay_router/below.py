"""Names below a router's root: which there can be, how one is walked to, and what it means when there is none.

Nothing leaves the root: a path is walked name by name from the root's descriptor, and symbolic links are not followed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

from stageout.core.errors import ErrorClass, StageoutError

OWN = ".stageout"
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_NAMES = frozenset({"", ".", ".."})
_CLASSES = {
    errno.ENOENT: ErrorClass.NOT_FOUND,
    errno.ENOTDIR: ErrorClass.NOT_FOUND,
    errno.ELOOP: ErrorClass.NOT_FOUND,
    errno.EACCES: ErrorClass.PERMISSION_DENIED,
}


class BadPath(StageoutError):
    """A path that cannot be below the root; the text says why."""


def is_allowed(path: str) -> bool:
    """Tell whether it is names joined by single slashes, and not the router's own."""
    parts = path.split("/")
    return _NO_NAMES.isdisjoint(parts) and "\0" not in path and parts[0] != OWN


def checked(path: str) -> str:
    """The path as it is used; raises BadPath unless it is names joined by single slashes."""
    if is_allowed(path):
        return path
    if path.split("/")[0] == OWN:
        raise BadPath(f"{OWN} belongs to the router")
    raise BadPath(f"{path!r} is not a path below the root: no empty names, no . and no ..")


def directory_below(root: int, names: Iterable[str]) -> int:
    """Descriptor of a directory, walked to name by name; a symbolic link is not followed. It is the caller's to close.

    :param root: another one's descriptor. :raises OSError: there is none.
    """
    descriptor = os.dup(root)
    try:
        for name in names:
            inner = os.open(name, DIRECTORY, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def failure_class(problem: OSError | BadPath) -> ErrorClass:
    """Row of the table for what a look-up met."""
    if isinstance(problem, BadPath):
        return ErrorClass.BAD_URL
    return _CLASSES.get(problem.errno or 0, ErrorClass.SERVER_ERROR)
