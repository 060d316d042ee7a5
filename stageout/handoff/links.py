"""The transfer of a job's files into the manager's directory: by hard link, clone of the blocks, or copy."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

#: Small blocks, so that the manager gets a sign of life in time even from a disk that writes 1 MB/s.
_CHUNK_BYTES = 1024 * 1024
_PROGRESS_S = 1.0
#: ioctl(2): share the blocks of another file of the same filesystem.
_FICLONE = 0x40049409
#: The kernel cannot copy between these files; reading and writing works.
_READ_INSTEAD = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM)
#: The total time of a copy is extrapolated after a quarter of its limit, or after this number of seconds.
_JUDGED_AFTER_S = 5.0
#: Cost of a file in addition to its bytes.
_FILE_BYTES = 64 * 1024
#: Errors of the kernel when links are impossible: other filesystem, not the owner (protected_hardlinks), too many
#: links.
_COPY_INSTEAD = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)


class CannotOffer(Exception):
    """A file cannot be handed off; the text has its name and the reason."""

    code = "Files"


class TooSlow(Exception):
    """A copy would exceed its time limit."""


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
    """Check the files. Follow symbolic links, but not out of the scratch directory.

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


def bring(files: Sequence[Source], directory: str, progress: Callable[[], None]) -> list[int]:
    """Create each file in ``directory`` under its position, at a cost that does not depend on its size.

    :param progress: called every second during the work.
    :return: positions of the files to copy.
    :raises OSError: a file cannot be read, or the directory cannot be written.
    """
    step, rest, clones = _step(), list[int](), True
    with _opened(directory) as target:
        next_s = time.monotonic() + _PROGRESS_S
        for position, source in enumerate(files):
            with step("handoff-link"):
                if not (source.own and _linked(source.path, str(position), target)):
                    clones = clones and _cloned(source.path, str(position), target)
                    if not clones:
                        rest.append(position)
            if time.monotonic() >= next_s:
                progress()
                next_s = time.monotonic() + _PROGRESS_S
    return rest


def copy(
    files: Sequence[Source], positions: Sequence[int], directory: str, within_s: float, progress: Callable[[], None]
) -> None:
    """Copy the files that :func:`bring` could not link.

    :param within_s: time limit for all of them in seconds. :param progress: called every second during the work.
    :raises TooSlow: the copy exceeds the limit, or would at its current rate. :raises OSError: a file cannot be copied.
    """
    step = _step()
    whole = sum(files[position].size_bytes + _FILE_BYTES for position in positions)
    done, began_s = 0, time.monotonic()
    next_s, judged_s = began_s + _PROGRESS_S, min(within_s / 4, _JUDGED_AFTER_S)
    with _opened(directory) as target:
        for position in positions:
            with step("handoff-link"):
                for count in _copied(files[position], str(position), target):
                    done += count
                    now_s = time.monotonic()
                    took_s = now_s - began_s
                    if took_s > judged_s and took_s * whole > within_s * done:
                        raise TooSlow
                    if now_s >= next_s:
                        progress()
                        next_s = now_s + _PROGRESS_S


def write_credentials(contents: Sequence[bytes], directory: str) -> None:
    """Write credentials beside the links, readable by this user only.

    Write copies instead of links, because the job could change a linked file, and HTCondor overwrites renewed ones.

    :raises OSError: one cannot be written.
    """
    if not contents:
        return
    from stageout.wire.handoff import credential_link

    step = _step()
    with _opened(directory) as target:
        for number, content in enumerate(contents):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with (
                step("handoff-credential"),
                open(os.open(credential_link(number), flags, 0o600, dir_fd=target), "wb") as stream,
            ):
                stream.write(content)


def _linked(path: str, name: str, target: int) -> bool:
    try:
        os.link(path, name, dst_dir_fd=target, follow_symlinks=False)
    except OSError as problem:
        if problem.errno in _COPY_INSTEAD:
            return False
        raise
    return True


def _cloned(path: str, name: str, target: int) -> bool:
    from fcntl import ioctl

    with _both(path, name, target) as (reading, writing):
        try:
            ioctl(writing, _FICLONE, reading)
        except OSError:
            os.unlink(name, dir_fd=target)
            return False
    return True


def _copied(source: Source, name: str, target: int) -> Iterator[int]:
    """Copy a file and yield the bytes of each step. Stop at the original size of a file that grows."""
    with _both(source.path, name, target) as (reading, writing):
        copied, by_kernel = 0, True
        while copied <= source.size_bytes:
            count = _ranged(reading, writing) if by_kernel else _written(reading, writing)
            if not count and not by_kernel:
                break
            by_kernel = count > 0 if by_kernel else False
            copied += count
            yield count
    yield _FILE_BYTES


def _ranged(reading: int, writing: int) -> int:
    """Copy inside the kernel. Return 0 if that is not supported, or at the end of the file."""
    try:
        return os.copy_file_range(reading, writing, _CHUNK_BYTES)
    except OSError as problem:
        if problem.errno in _READ_INSTEAD:
            return 0
        raise


def _written(reading: int, writing: int) -> int:
    data = memoryview(os.read(reading, _CHUNK_BYTES))
    rest = data
    while rest:
        rest = rest[os.write(writing, rest) :]
    return len(data)


@contextmanager
def _both(path: str, name: str, target: int) -> Iterator[tuple[int, int]]:
    reading = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        writing = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=target)
        try:
            yield reading, writing
        finally:
            os.close(writing)
    finally:
        os.close(reading)


@contextmanager
def _opened(directory: str) -> Iterator[int]:
    target = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield target
    finally:
        os.close(target)


@contextmanager
def _no_step(label: str) -> Iterator[None]:
    yield


def _step() -> Callable[[str], AbstractContextManager[None]]:
    """Run a durable step. Import the fault injection of tests only when a fault is planned."""
    if "STAGEOUT_FAULTS" not in os.environ:
        return _no_step
    from stageout.core.durable import step

    return step
