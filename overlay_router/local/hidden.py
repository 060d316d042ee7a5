"""Data of small files, out of sight until they get their names; and the directories that these are put into."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress

from overlay_router.local import unnamed
from overlay_router.local.tree import SYNC_ALL_FROM, Tree, passes, sync_filesystem
from stageout.overlay.wire.frames import Buffer

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Hidden:
    """Data of a batch: without a name, or under their position where the filesystem has no such files.

    :param place: directory for those that need a name. :param link: how the others get theirs, None where they cannot.
    :param umask: of this process. :param prefix: of names in ``place``, which no other process uses.
    """

    def __init__(self, place: int, link: unnamed.Link | None, umask: int, prefix: str = "") -> None:
        self._place, self._link, self._umask, self._prefix = place, link, umask, prefix
        self._open: list[int] = []
        self._most = unnamed.most_open() if link else 0

    def __enter__(self) -> Hidden:
        return self

    def __exit__(self, *exception: object) -> None:
        for descriptor in self._open:
            if descriptor >= 0:
                os.close(descriptor)

    def write(self, files: Iterable[tuple[int, Buffer]], sync: bool) -> list[int]:
        """The next files, each with its permissions; returns the inodes of their data.

        :param sync: each is on the disk on return. :raises OSError: the disk is full, or fails.
        """
        place, umask, make, inodes = self._place, self._umask, unnamed.make, list[int]()
        for permissions, data in files:
            mode, position = permissions & 0o777, len(self._open)
            has_name = position >= self._most
            descriptor = os.open(self._name(position), _NEW, mode, dir_fd=place) if has_name else make(place, mode)
            self._open.append(descriptor)
            if os.write(descriptor, data) != len(data):
                raise OSError(errno.ENOSPC, "No space left on device")
            if mode & umask:
                os.fchmod(descriptor, mode)
            if sync:
                os.fsync(descriptor)
            inodes.append(os.fstat(descriptor).st_ino)
            if has_name:
                os.close(descriptor)
                self._open[position] = -1
        return inodes

    def give_names(self, paths: Sequence[str], directories: Directories, first: int = 0) -> dict[int, OSError]:
        """Give files their names, in order; returns why some have none, by their place in ``paths``.

        :param first: position of the first of them in the batch. :raises OSError: no name can be given now.
        """
        problems: dict[int, OSError] = {}
        for number, path in enumerate(paths):
            parent, _, name = path.rpartition("/")
            try:
                self.give_name(first + number, directories.open(parent, path), name)
            except OSError as problem:
                if passes(problem):
                    raise
                problems[number] = problem
                self._drop(first + number)
        return problems

    def give_name(self, position: int, directory: int, name: str) -> None:
        """A file's data get their name, replacing a file. :raises OSError: that cannot be."""
        descriptor, data = self._open[position], self._name(position)
        if self._link is not None and descriptor >= 0:
            try:
                return self._link(descriptor, directory, name)
            except FileExistsError:
                self._link(descriptor, self._place, data)
        return os.replace(data, name, src_dir_fd=self._place, dst_dir_fd=directory)

    def _drop(self, position: int) -> None:
        """Nobody wants the data of a file."""
        with suppress(FileNotFoundError):
            os.unlink(self._name(position), dir_fd=self._place)

    def _name(self, position: int) -> str:
        return f"{self._prefix}{position}"


class Directories:
    """Directories that names are put into: made where they are missing, opened once, synced at the end."""

    def __init__(self, tree: Tree) -> None:
        self._tree, self._open, self._stack = tree, dict[str, int](), ExitStack()
        self._is_one_sync_better = False

    def __enter__(self) -> Directories:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def open(self, directory: str, path: str) -> int:
        """Descriptor of a directory. :param path: a name in it. :raises OSError: a name on the way is a file."""
        descriptor = self._open.get(directory)
        if descriptor is None:
            if len(self._open) >= SYNC_ALL_FROM:
                self._is_one_sync_better = True
                self._stack.close()
                self._open.clear()
            made = self._tree.make_parents(path, sync=False)
            self._is_one_sync_better |= bool(made)
            self._open[directory] = descriptor = self._stack.enter_context(self._tree.directory(directory))
        return descriptor

    def sync(self, place: int) -> None:
        """Bring the names in all of them to the disk. :param place: in this filesystem. :raises OSError: it fails."""
        if self._is_one_sync_better:
            sync_filesystem(place)
            return
        for descriptor in self._open.values():
            os.fsync(descriptor)
