"""Small files of a tree, read one after the other for one answer. Works in a process that has the tree's root alone."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from overlay_router.below import BadPath, checked, directory_below, failure_class
from stageout.core.errors import ErrorClass
from stageout.overlay.wire.messages import FoundPack
from stageout.overlay.wire.packs import MAX_FILE_BYTES, MAX_PACK_BYTES

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class _Refused(Exception):
    """A file is not in the answer. :ivar kind: why."""

    def __init__(self, kind: ErrorClass) -> None:
        super().__init__(kind.name)
        self.kind = kind


class _Directory:
    """The directory of the last file: that of the next one is the same, most of the time."""

    def __init__(self, root: int) -> None:
        self._root, self._path, self._descriptor = root, "", os.dup(root)

    def __enter__(self) -> _Directory:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._descriptor)

    def open(self, path: str) -> int:
        """A file for reading; no symbolic link is followed. :raises OSError: :raises BadPath: there is none."""
        directory, _, name = checked(path).rpartition("/")
        if directory != self._path:
            descriptor = directory_below(self._root, directory.split("/") if directory else ())
            os.close(self._descriptor)
            self._path, self._descriptor = directory, descriptor
        return os.open(name, _READ, dir_fd=self._descriptor)


def gathered(root: int, paths: Sequence[str]) -> tuple[FoundPack, list[bytes]]:
    """The content of these files, and a row for each: of as many as fit into one answer, whole, as they are now.

    One that is larger than a small file, finds no room, or grew while it was read is to be asked for by itself.

    :param root: descriptor of the tree's root.
    """
    data: list[bytes] = []
    rows: list[tuple[int, int, int]] = []
    left_bytes = MAX_PACK_BYTES
    with _Directory(root) as directory:
        for path in paths:
            try:
                content, mode = _read(directory.open(path), min(left_bytes, MAX_FILE_BYTES))
                data.append(content)
                rows.append((len(content), mode, 0))
                left_bytes -= len(content)
            except _Refused as refused:
                rows.append((0, 0, refused.kind.code))
            except (OSError, BadPath) as problem:
                rows.append((0, 0, failure_class(problem).code))
    sizes_bytes, modes, codes = zip(*rows)
    return FoundPack(sizes_bytes, modes, codes), data


def _read(file: int, most_bytes: int) -> tuple[bytes, int]:
    """All of a file, and its permissions; it is closed then. :raises OSError: :raises _Refused: that cannot be."""
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise _Refused(ErrorClass.CONFLICT)
        if status.st_size > most_bytes:
            raise _Refused(ErrorClass.TOO_LARGE)
        content = os.read(file, status.st_size + 1)
        if len(content) != status.st_size:
            raise _Refused(ErrorClass.SOURCE_CHANGED)
        return content, status.st_mode & 0o777
    finally:
        os.close(file)
