"""Removal of directories that an untrusted user may have filled, and may still be writing into."""

from __future__ import annotations

import itertools
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stageout.core import durable

_ROUNDS = 100_000
_AT_ONCE = 10_000
#: Prefix for the names of inner directories while their tree is removed.
MOVED = ".stray-"


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a directory. Fail for a symbolic link."""
    descriptor = durable.disk.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        durable.disk.close(descriptor)


def names(directory: int, most: int | None = None) -> list[str]:
    """List at most ``most`` names in an open directory."""
    with durable.disk.scandir(directory) as entries:
        return [entry.name for entry in itertools.islice(entries, most)]


def remove(parent: Path, name: str, most: int = _ROUNDS) -> None:
    """Remove ``parent/name`` and everything below it. A missing name is no error.

    Work without recursion and follow no links, for any depth and shape of the tree: move each inner directory to the
    top and empty it there, after removing its user's access.

    :param most: directories in it. :raises OSError: something cannot be removed.
    """
    with opened(parent) as top:
        waiting = [name]
        for _ in range(most):
            if not waiting:
                return
            waiting += _empty(top, waiting.pop())
        raise OSError(f"{parent / name} holds more than {most} directories; remove it by hand")


def _empty(top: int, name: str) -> list[str]:
    """Remove one file or directory of ``top``. Move directories inside it up to ``top`` and return their new names."""
    try:
        found = durable.disk.stat(name, dir_fd=top, follow_symlinks=False)
    except FileNotFoundError:
        return []
    if not stat.S_ISDIR(found.st_mode):
        durable.disk.unlink(name, dir_fd=top)
        return []
    _make_ours(name, top)
    moved = []
    descriptor = durable.disk.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
    try:
        if os.geteuid() == 0:
            # Remove the user's access, which also stops a process of the user inside the directory.
            durable.disk.fchown(descriptor, 0, 0)
            durable.disk.fchmod(descriptor, 0o700)
        while part := _some(descriptor):
            for inner, is_directory in part:
                if is_directory:
                    _make_ours(inner, descriptor)
                    moved.append(f"{MOVED}{secrets.token_hex(8)}")
                    durable.disk.rename(inner, moved[-1], src_dir_fd=descriptor, dst_dir_fd=top)
                else:
                    durable.disk.unlink(inner, dir_fd=descriptor)
    finally:
        durable.disk.close(descriptor)
    durable.disk.rmdir(name, dir_fd=top)
    return moved


def _some(directory: int) -> list[tuple[str, bool]]:
    """Read the next entries of a directory, and which are directories, in bounded memory for any number of entries."""
    with durable.disk.scandir(directory) as entries:
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in itertools.islice(entries, _AT_ONCE)]


def _make_ours(name: str, parent: int) -> None:
    """Get permission to read and move a directory. Root has it anyway; for a single user there is nothing to defend."""
    if os.geteuid() != 0:
        durable.disk.chmod(name, 0o700, dir_fd=parent)
