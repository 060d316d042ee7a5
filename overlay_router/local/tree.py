"""The destination tree below a root: what names point to, and the system calls that change them (rules 2 and 7).

Nothing leaves the root: every path is walked name by name from the root's descriptor, symbolic links are never
followed, and ``..``, empty names and the router's own directory ``.stageout`` are refused.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from overlay_router.below import DIRECTORY, directory_below
from overlay_router.below import OWN as OWN
from overlay_router.below import BadPath as BadPath
from overlay_router.below import checked as checked
from overlay_router.below import is_allowed as is_allowed
from overlay_router.local.contents import Identity
from overlay_router.local.place import Place
from overlay_router.local.trash import Trash
from overlay_router.rules.names import Entry, Names, parent, trash
from overlay_router.rules.states import Kind, Op
from stageout.core import durable
from stageout.core.databases import is_full

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
#: Found by system calls that can do later what they cannot do now: nothing is wrong with what was asked for.
_FOR_NOW = NO_ROOM | {
    errno.EIO, errno.EROFS, errno.ESTALE, errno.ENOTCONN, errno.EMFILE, errno.ENFILE, errno.ENOMEM
}  # fmt: skip
_STAGING, _TRASH = f"{OWN}/staging", f"{OWN}/trash"
#: From so many files or directories on, one sync of the filesystem costs less than one of each.
SYNC_ALL_FROM = 8
_libc = ctypes.CDLL(None, use_errno=True)


def no_room(problem: Exception) -> bool:
    """Tell whether a disk is full: found by a system call, or by the database."""
    return is_full(problem) or (isinstance(problem, OSError) and problem.errno in NO_ROOM)


def passes(problem: OSError) -> bool:
    """Tell whether the same can be done when the disk has room, is there and may be written to, or descriptors are
    free."""
    return problem.errno in _FOR_NOW


class Tree:
    """A root directory of which this process alone makes, renames and deletes names.

    :param root: must exist; ``.stageout`` is made in it, readable by nobody else. :ivar place: that it is there.
    :param empties_in_thread: directories that were deleted are removed beside everything else.
    """

    def __init__(self, root: Path, empties_in_thread: bool = False) -> None:
        self.root = root
        for part in (OWN, _STAGING, _TRASH):
            with suppress(FileExistsError):
                (root / part).mkdir(mode=0o700)
        self.place = Place(root)
        for place in (root / OWN, root):
            durable.sync("router-place", place)
        self._root = os.open(root, DIRECTORY)
        self._device = os.fstat(self._root).st_dev
        self._unsynced: dict[int, int] = {}
        self._trash = Trash(root / _TRASH, empties_in_thread)

    def close(self) -> None:
        """Let go of the root."""
        self._trash.close()
        os.close(self._root)

    def staging(self, tid: int) -> Path:
        """The place where the data of a transfer are gathered; the holder of the number writes there."""
        return self.root / _STAGING / str(tid)

    def allocate(self, tid: int, size_bytes: int) -> None:
        """Make the staging file with its space. :raises OSError: ENOSPC and the like; nothing is left then."""
        path = self.staging(tid)
        with durable.step("overlay-allocate"):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if size_bytes:
                os.posix_fallocate(descriptor, 0, size_bytes)
        except OSError:
            self.discard(tid)
            raise
        finally:
            os.close(descriptor)

    def check_writable(self, tid: int) -> None:
        """Of data that are here. :raises OSError: nothing can be written to them now."""
        os.close(os.open(self.staging(tid), os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC))

    def discard(self, tid: int) -> None:
        """Remove a transfer's data; twice is harmless."""
        durable.unlink("overlay-discard", self.staging(tid))

    def staged_numbers(self) -> Iterator[int]:
        """Transfers that have data here."""
        return (int(path.name) for path in (self.root / _STAGING).iterdir() if path.name.isdigit())

    def inode(self, tid: int) -> int:
        """Inode of a transfer's data; 0 when there are none. :raises OSError: nobody can say now."""
        try:
            return os.lstat(self.staging(tid)).st_ino
        except FileNotFoundError:
            self.place.check()
            return 0

    def names(self, op: Op) -> Names:
        """Those entries that decide about an operation: its paths, their parents and its place in the trash."""
        wanted = {op.path, parent(op.path), trash(op)}
        if op.kind is Kind.RENAME:
            wanted |= {op.target, parent(op.target)}
        found = ((path, self.entry(path)) for path in wanted if path)
        return {path: entry for path, entry in found if entry is not None}

    def entry(self, path: str) -> Entry | None:
        """The target of a name, None for nothing. A symbolic link or device is a file here, never followed."""
        try:
            with self._parent(path) as (directory, name):
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return None
            raise
        return Entry(status.st_ino, None if stat.S_ISDIR(status.st_mode) else status.st_size)

    def open_file(self, path: str) -> int:
        """Descriptor for reading; a symbolic link is not followed. :raises OSError: there is no such file."""
        with self._parent(path) as (directory, name):
            return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)

    def open_root(self) -> int:
        """Another descriptor of the root."""
        return os.dup(self._root)

    def status(self, path: str) -> os.stat_result:
        """Of a name, "" is the root; a symbolic link is not followed. :raises OSError: there is none."""
        if not path:
            return os.fstat(self._root)
        with self._parent(path) as (directory, name):
            return os.stat(name, dir_fd=directory, follow_symlinks=False)

    def is_here(self, status: os.stat_result) -> bool:
        """Tell whether it is of the filesystem that files are published on: others have inodes of the same numbers."""
        return status.st_dev == self._device

    def is_still(self, path: str, identity: Identity) -> bool:
        """Tell whether a path has that file, unchanged; also where nobody can say now."""
        try:
            status = self.status(path)
        except OSError as problem:
            return problem.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
        return self.is_here(status) and Identity.of(status) == identity

    @contextmanager
    def scan(self, path: str) -> Iterator[Iterator[os.DirEntry[str]]]:
        """Entries of a directory, "" is the root. :raises OSError: there is none."""
        with self.directory(path) as descriptor, os.scandir(descriptor) as entries:
            yield entries

    @contextmanager
    def directory(self, path: str) -> Iterator[int]:
        """Descriptor of a directory, "" is the root; no symbolic link on the way. :raises OSError: there is none."""
        with self._parent(f"{path}/." if path else ".") as (descriptor, _):
            yield descriptor

    def make_parents(self, path: str, sync: bool = True) -> list[str]:
        """Make the directories above a path that are missing; returns those that were made, outermost first.

        :param sync: bring their names to the disk.
        :raises OSError: a name on the way is a file. None that this call made is left then.
        """
        made: list[str] = []
        directories, descriptor = _above(path), os.dup(self._root)
        try:
            for directory in directories:
                name = directory.rpartition("/")[2]
                with suppress(FileExistsError):
                    with durable.step("overlay-parents"):
                        os.mkdir(name, 0o777, dir_fd=descriptor)
                    made.append(directory)
                    if sync:
                        os.fsync(descriptor)
                if directory != directories[-1]:
                    inner = directory_below(descriptor, [name])
                    os.close(descriptor)
                    descriptor = inner
        except OSError:
            self.remove_parents(made)
            raise
        finally:
            os.close(descriptor)
        return made

    def remove_parents(self, made: list[str]) -> None:
        """Take back what :meth:`make_parents` made, as far as nothing has come into it."""
        for directory in reversed(made):
            with suppress(OSError), self._parent(directory) as (descriptor, name):
                os.rmdir(name, dir_fd=descriptor)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Names are changed inside only; at its end all that was changed is on the disk. :raises OSError: it is not."""
        try:
            yield
            with durable.step("overlay-names-sync"):
                if len(self._unsynced) >= SYNC_ALL_FROM:
                    sync_filesystem(self._root)
                else:
                    for descriptor in self._unsynced.values():
                        os.fsync(descriptor)
        finally:
            for descriptor in self._unsynced.values():
                os.close(descriptor)
            self._unsynced.clear()

    def _changed(self, descriptor: int) -> None:
        """This directory, or file, goes to the disk with the others."""
        inode = os.fstat(descriptor).st_ino
        if inode not in self._unsynced:
            self._unsynced[inode] = os.dup(descriptor)

    def publish(self, op: Op, tid: int, mode: int, size_bytes: int) -> Identity:
        """Give a transfer's data, cut to their size and synced, their name, replacing a file. The facts of the file."""
        with durable.step("overlay-finish"):
            identity = self._finish(tid, mode, size_bytes)
        with self._parent(op.path) as (directory, name), durable.step("overlay-publish"):
            os.replace(self.staging(tid), name, dst_dir_fd=directory)
            self._changed(directory)
        return identity

    def prepare_dir(self, op: Op, mode: int) -> int:
        """Make the directory of a MKDIR out of sight; returns its inode."""
        path = self._prepared(op)
        with suppress(FileExistsError):
            durable.make_dir("overlay-prepare-dir", path, mode & 0o777)
        return os.lstat(path).st_ino

    def make_dir(self, op: Op) -> None:
        """Give a prepared directory its name."""
        with self._parent(op.path) as (directory, name), durable.step("overlay-mkdir"):
            os.rename(self._prepared(op), name, dst_dir_fd=directory)
            self._changed(directory)

    def _prepared(self, op: Op) -> Path:
        return self.root / _STAGING / f"{op.origin}.{op.seq}.dir"

    def rename(self, op: Op) -> None:
        """Rename."""
        self._move("overlay-rename", op.path, op.target)

    def delete(self, op: Op) -> None:
        """Move into the trash, where recovery finds it; :meth:`empty` frees the space."""
        self._move("overlay-delete", op.path, trash(op))

    def set_attributes(self, op: Op, mode: int | None, size_bytes: int | None) -> None:
        """Change permissions, or cut a file; None leaves one as it is.

        :raises OSError: EFBIG for a file that is shorter already, EISDIR and the like.
        """
        access = os.O_RDONLY if size_bytes is None else os.O_RDWR
        with self._parent(op.path) as (directory, name), durable.step("overlay-setattr"):
            descriptor = os.open(name, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
            try:
                if size_bytes is not None:
                    _cut(descriptor, size_bytes)
                if mode is not None:
                    os.fchmod(descriptor, mode & 0o777)
                self._changed(descriptor)
            finally:
                os.close(descriptor)

    def empty(self, op: Op) -> None:
        """Remove what a DELETE moved into the trash, a directory perhaps later; twice is harmless."""
        self._trash.remove(trash(op).rpartition("/")[2])

    def empty_trash(self) -> None:
        """Remove all that is left in the trash, directories perhaps later. :raises OSError: it cannot be read."""
        self._trash.remove_all()

    def sync(self, op: Op) -> None:
        """Bring a change that happened before a crash to the disk: the directories of its names."""
        for path in (op.path, op.target) if op.kind is Kind.RENAME else (op.path,):
            with self._parent(path) as (directory, _), durable.step("overlay-recover-sync"):
                os.fsync(directory)

    def _finish(self, tid: int, mode: int, size_bytes: int) -> Identity:
        descriptor = os.open(self.staging(tid), os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != size_bytes:  # else its time of modification stays
                os.ftruncate(descriptor, size_bytes)
            os.fchmod(descriptor, mode & 0o777)
            os.fsync(descriptor)
            return Identity.known(os.fstat(descriptor))
        finally:
            os.close(descriptor)

    def _move(self, label: str, source: str, target: str) -> None:
        with self._parent(source) as (old, name), self._parent(target) as (new, new_name), durable.step(label):
            os.rename(name, new_name, src_dir_fd=old, dst_dir_fd=new)
            self._changed(new)
            self._changed(old)

    @contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        """Descriptor of the directory that holds a path's last name, and that name."""
        *directories, name = path.split("/")
        descriptor = directory_below(self._root, directories)
        try:
            yield descriptor, name
        finally:
            os.close(descriptor)


def sync_filesystem(descriptor: int) -> None:
    """Everything of the filesystem that this descriptor is on, data and names. :raises OSError: it failed."""
    if _libc.syncfs(descriptor):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _cut(descriptor: int, size_bytes: int) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "only a file can be cut")
    if size_bytes > status.st_size:
        raise OSError(errno.EFBIG, f"it has {status.st_size} bytes; a file can only be cut, not made longer")
    os.ftruncate(descriptor, size_bytes)


def _above(path: str) -> list[str]:
    parts = path.split("/")[:-1]
    return ["/".join(parts[: count + 1]) for count in range(len(parts))]
