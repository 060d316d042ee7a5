"""Brings a job's files into the manager's directory: by hard link, or by a copy where a link cannot be."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

_CHUNK_BYTES = 16 * 1024 * 1024
_PROGRESS_S = 1.0
#: The kernel forbids links here: other filesystem, not the owner (protected_hardlinks), too many links, none at all.
_COPY_INSTEAD = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)


class CannotOffer(Exception):
    """A file cannot be handed off; the text says which and why."""


class Source:
    """One file to hand off.

    :param path: real path of a regular file inside the scratch directory. :param own: this process's user owns it.
    """

    __slots__ = ("own", "path", "size_bytes")

    def __init__(self, path: str, size_bytes: int, own: bool) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.own = own


def sources(paths: Sequence[str], scratch: str) -> list[Source]:
    """Look at the files. Symbolic links are followed, but not out of the scratch directory.

    :raises CannotOffer: a path leads elsewhere, or to something that is no regular file.
    """
    user = os.geteuid()
    real_directories: dict[str, str] = {}
    found = []
    for path in paths:
        directory, name = os.path.split(path)
        real = real_directories.get(directory)
        if real is None:
            real = real_directories[directory] = os.path.realpath(directory)
        found.append(_source(f"{real}/{name}", path, scratch, user))
    return found


def _source(real: str, path: str, scratch: str, user: int) -> Source:
    status = os.lstat(real)
    if stat.S_ISLNK(status.st_mode):
        real = os.path.realpath(real)
        status = os.lstat(real)
    if not real.startswith(scratch + "/"):
        raise CannotOffer(f"{path!r} is outside the scratch directory")
    if not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "a special file"
        raise CannotOffer(f"{path!r} is {kind}")
    return Source(real, status.st_size, status.st_uid == user)


def bring(files: Sequence[Source], directory: str, progress: Callable[[], None]) -> None:
    """Make each file appear in ``directory`` under its position.

    :param progress: called at least every second while work goes on (every 16 MiB of a copy).
    :raises OSError: a file cannot be linked nor copied.
    """
    step = _step()
    target = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        next_s = time.monotonic() + _PROGRESS_S
        for position, source in enumerate(files):
            with step("handoff-link"):
                if not (source.own and _linked(source.path, str(position), target)):
                    _copy(source.path, str(position), target, progress)
            if time.monotonic() >= next_s:
                progress()
                next_s = time.monotonic() + _PROGRESS_S
    finally:
        os.close(target)


def write_credentials(contents: Sequence[bytes], directory: str) -> None:
    """Write credentials beside the links, readable by this user only.

    A copy, never a link: the job could change what is linked, and HTCondor overwrites what it renews.

    :raises OSError: one cannot be written.
    """
    if not contents:
        return
    from stageout.wire.handoff import credential_link

    step = _step()
    target = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for number, content in enumerate(contents):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with (
                step("handoff-credential"),
                open(os.open(credential_link(number), flags, 0o600, dir_fd=target), "wb") as stream,
            ):
                stream.write(content)
    finally:
        os.close(target)


def _linked(path: str, name: str, target: int) -> bool:
    try:
        os.link(path, name, dst_dir_fd=target, follow_symlinks=False)
    except OSError as problem:
        if problem.errno in _COPY_INSTEAD:
            return False
        raise
    return True


def _copy(path: str, name: str, target: int, progress: Callable[[], None]) -> None:
    reading = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        writing = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=target)
        try:
            while _copy_some(reading, writing):
                progress()
        finally:
            os.close(writing)
    finally:
        os.close(reading)


def _copy_some(reading: int, writing: int) -> int:
    try:
        return os.copy_file_range(reading, writing, _CHUNK_BYTES)
    except OSError:
        # Between these filesystems, or in this kernel, it does not exist.
        return os.sendfile(writing, reading, None, _CHUNK_BYTES)


@contextmanager
def _no_step(label: str) -> Iterator[None]:
    yield


def _step() -> Callable[[str], AbstractContextManager[None]]:
    """The fault injection of tests, loaded only when a fault is planned."""
    if "STAGEOUT_FAULTS" not in os.environ:
        return _no_step
    from stageout.core.durable import step

    return step
