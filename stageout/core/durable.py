"""Every step that must survive a crash goes through here, under a label.

A label names one place in ``docs/developer/durable-steps.md``. It appears in the log when the step fails, and tests
make the process fail or die exactly there: the environment variable ``STAGEOUT_FAULTS`` holds ``label=what`` items
separated by blanks. ``what`` is ``kill-before``, ``kill-after``, or an errno name such as ``EIO``; ``@FILE`` behind it
makes the fault happen only while FILE exists, and then removes FILE. So it happens once although the daemon is
restarted in the same environment. ``short-write`` writes half and then finds the disk full.

The system calls themselves are those of :data:`disk`, which is the module ``os``. The simulation of ``tests/crash``
puts a filesystem in its place that forgets what was not synced when the power goes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple, Union

AnyPath = Union[str, "os.PathLike[str]"]

#: The disk that executes system calls on durable files.
disk = os
_KINDS = ("kill-before", "kill-after", "short-write")
_FIEMAP = 0xC020660B
#: The extents of a whole file are counted, not listed, after its data were written (FIEMAP_FLAG_SYNC).
_COUNTED_AFTER_WRITING = struct.pack("=QQLLLL", 0, (1 << 64) - 1, 1, 0, 0, 0)


class Fault(NamedTuple):
    """One planned fault: what happens, and the file that arms it (None: always armed)."""

    what: str
    arming_file: str | None


def parse_faults(text: str) -> dict[str, list[Fault]]:
    """Read the ``STAGEOUT_FAULTS`` form; a label may stand in it several times.

    :raises ValueError: for an item that is not ``label=what[@FILE]``.
    """
    faults: dict[str, list[Fault]] = {}
    for item in text.split():
        label, found, rest = item.partition("=")
        what, _, arming_file = rest.partition("@")
        if not found or not (what in _KINDS or hasattr(errno, what)):
            raise ValueError(f"STAGEOUT_FAULTS: cannot read {item!r}; write label={'|'.join(_KINDS)}|ERRNO[@FILE]")
        faults.setdefault(label, []).append(Fault(what, arming_file or None))
    return faults


_faults = parse_faults(os.environ.get("STAGEOUT_FAULTS", ""))
_NO_FAULT = nullcontext()


_short_write = False


def step(label: str) -> AbstractContextManager[None]:
    """Surround one durable step. Does nothing unless a fault is planned for it."""
    fault = _armed(label) if label in _faults else None
    return _NO_FAULT if fault is None else planned(label, fault)


@contextmanager
def planned(label: str, fault: str) -> Iterator[None]:
    """Apply this fault to the enclosed code."""
    global _short_write
    if fault == "kill-before":
        die()
    elif fault not in _KINDS:
        number = getattr(errno, fault)
        raise OSError(number, f"{os.strerror(number)} (planned at {label})")
    _short_write = fault == "short-write"
    try:
        yield
    finally:
        _short_write = False
    if fault == "kill-after":
        die()


def die() -> None:
    """End this process as in a crash."""
    os.kill(os.getpid(), signal.SIGKILL)


def _armed(label: str) -> str | None:
    return next((fault.what for fault in _faults[label] if _fires(fault)), None)


def _fires(fault: Fault) -> bool:
    if fault.arming_file is None:
        return True
    try:
        os.unlink(fault.arming_file)  # noqa: PTH108 - one system call decides who fires
    except FileNotFoundError:
        return False
    return True


def read_file(path: AnyPath) -> bytes:
    """Read a file. :raises FileNotFoundError: it does not exist."""
    descriptor = disk.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := disk.read(descriptor, 65536):
            parts.append(part)
        return b"".join(parts)
    finally:
        disk.close(descriptor)


def write_file(label: str, path: AnyPath, data: bytes, mode: int = 0o600) -> None:
    """Replace ``path`` by ``data``. On return the new content and its name are durable; the file is never
    incomplete.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.new")
    with step(label):
        descriptor = disk.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        try:
            write_all(descriptor, data)
            if mode & 0o077:  # for others: then whatever the umask is
                disk.fchmod(descriptor, mode)
            disk.fsync(descriptor)
        finally:
            disk.close(descriptor)
        disk.replace(temporary, target)
        _fsync_path(target.parent)


def append_file(label: str, path: AnyPath, data: bytes, mode: int, keep: int) -> None:
    """Append to a file, which is made where it is missing. On return its content and its name are on the disk.

    :param keep: bytes of the file that stay; what follows them is cut off first. :raises OSError: nothing was appended.
    """
    target = Path(path)
    with step(label):
        descriptor = disk.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
        try:
            if disk.fstat(descriptor).st_size > keep:
                disk.ftruncate(descriptor, keep)
            if not keep:
                disk.fchmod(descriptor, mode)  # whatever the umask is
            _append(descriptor, data, keep)
        finally:
            disk.close(descriptor)
        if not keep:
            _fsync_path(target.parent)


def _append(descriptor: int, data: bytes, start: int) -> None:
    try:
        write_all(descriptor, data)
        disk.fsync(descriptor)
    except OSError:
        with suppress(OSError):
            disk.ftruncate(descriptor, start)
        raise


def write_all(descriptor: int, data: bytes) -> None:
    """Write everything, in as many calls as necessary. :raises OSError: some of it may have been written."""
    view = memoryview(data)
    if _short_write:
        disk.write(descriptor, view[: len(view) // 2])
        raise OSError(errno.ENOSPC, "No space left on device (planned short write)")
    while view:
        view = view[disk.write(descriptor, view) :]


def make_dir(label: str, path: AnyPath, mode: int) -> None:
    """Make a directory with exactly this mode (no umask). It is not durable until its parent is synced."""
    with step(label):
        disk.mkdir(path, mode)
        disk.chmod(path, mode)


def link(label: str, source: AnyPath, target: AnyPath) -> None:
    """Hard-link; never follow a symbolic link. The link is not durable until the directory is synced."""
    with step(label):
        disk.link(source, target, follow_symlinks=False)


def rename(label: str, source: AnyPath, target: AnyPath) -> None:
    """Rename, replacing ``target``. On return both directories are durable."""
    with step(label):
        disk.replace(source, target)
        _fsync_path(Path(target).parent)
        if Path(source).parent != Path(target).parent:
            _fsync_path(Path(source).parent)


def unlink(label: str, path: AnyPath) -> None:
    """Remove a name. A missing name is no error."""
    with step(label), suppress(FileNotFoundError):
        disk.unlink(path)


def commit(label: str, connection: sqlite3.Connection) -> None:
    """Commit the open transaction. On return it is durable (the ledger runs with synchronous=FULL)."""
    with step(label):
        connection.commit()


def sync(label: str, path: AnyPath) -> None:
    """Bring a file's data, or a directory's names, to the disk."""
    with step(label):
        _fsync_path(path)


def write_back(descriptor: int) -> None:
    """Start writing a file's data, so that its sync is short. Do nothing on filesystems without support.

    Unlike a sync this consumes no error: the kernel reports a failed write to only one caller of fsync, and keeps it
    until then.
    """
    with suppress(OSError):
        fcntl.ioctl(descriptor, _FIEMAP, _COUNTED_AFTER_WRITING)


def lock(descriptor: int) -> bool:
    """Take the lock of an open file, which ends with the process. Return False when another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _fsync_path(path: AnyPath) -> None:
    descriptor = disk.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        disk.fsync(descriptor)
    finally:
        disk.close(descriptor)
