"""The local end: a file that is being received, and a file that is being sent."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterable
from pathlib import Path

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.protocols.curl.digests import Data, Digests
from stageout.protocols.curl.failures import local_failure

_PIECE_BYTES = 1 << 20
_NAME_BYTES = 200  # of a temporary name, below NAME_MAX
# limited by kernel and file systems
_NO_COPY = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MOST_SENDINGS = 2  # multiples of a file's size in one attempt


def temporary_name(name: str) -> str:
    """Make a name in the directory of ``name`` that no other transfer uses."""
    kept = os.fsdecode(os.fsencode(name)[:_NAME_BYTES])
    return f".{kept}.{os.urandom(4).hex()}.part"


def file_digest(path: Path, name: str) -> str:
    """Compute one digest of a file by reading it.

    :raises OSError: it cannot be read.
    """
    digests = Digests([name])
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            digests.update(piece)
    return digests.values()[name]


def kernel_copy(source: int, target: int, most_bytes: int, start_bytes: int) -> int:
    """Copy a block of one file to the position of another inside the kernel.

    :returns: bytes copied; 0 at the end, and if the kernel does not support it.
    :raises OSError: it could not be written or read.
    """
    try:
        return os.copy_file_range(source, target, most_bytes, offset_src=start_bytes)
    except OSError as error:
        if error.errno in _NO_COPY:
            return 0
        raise


def sync_folder(folder: Path) -> None:
    """Sync the entries of a directory. :raises OSError: it cannot be done."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class PartFile:
    """A file that is being received, under a temporary name in the directory of the final one.

    :param path: the final name.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = path.with_name(temporary_name(path.name))
        self._descriptor = -1
        self._digests = Digests(())
        self._is_digested = False
        self._keep = False
        self.size_bytes = 0

    def restart(self, digests: Iterable[str]) -> None:
        """Start from the beginning and compute digests of passing data. :raises TransferFailure: as :meth:`write`."""
        try:
            if self._descriptor < 0:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
                self._descriptor = os.open(self._part, flags, 0o666)
            os.ftruncate(self._descriptor, 0)
            os.lseek(self._descriptor, 0, os.SEEK_SET)
        except OSError as error:
            raise self._failure(error) from None
        self.size_bytes = 0
        names = tuple(digests)
        self._digests, self._is_digested = Digests(names), bool(names)

    def write(self, data: Data) -> None:
        """Append data.

        :raises TransferFailure: NO_SPACE_LOCAL and similar ones.
        """
        view = memoryview(data)
        self._digests.update(view)
        try:
            while view:
                written = os.write(self._descriptor, view)
                self.size_bytes += written
                view = view[written:]
        except OSError as error:
            raise self._failure(error) from None

    def copy(self, descriptor: int, most_bytes: int) -> int:
        """Append the next block of another file inside the kernel, unless a digest needs its data.

        :returns: bytes copied; 0 at the end, and if the kernel does not support it: then use :meth:`write`.
        :raises TransferFailure: as :meth:`write`.
        """
        if self._is_digested:
            return 0
        try:
            copied = kernel_copy(descriptor, self._descriptor, most_bytes, self.size_bytes)
        except OSError as error:
            raise self._failure(error) from None
        self.size_bytes += copied
        return copied

    def write_at(self, data: Data, place: int) -> None:
        """Write at a position. Several threads may call it. :meth:`filled` marks complete parts.

        :raises TransferFailure: NO_SPACE_LOCAL and similar ones.
        """
        view = memoryview(data)
        try:
            while view:
                written = os.pwrite(self._descriptor, view, place)
                place += written
                view = view[written:]
        except OSError as error:
            raise self._failure(error) from None

    def filled(self, size_bytes: int) -> None:
        """Record that all bytes up to this position were written in some order. Digests then need another read of the
        file.
        """
        self.size_bytes = size_bytes
        self._digests = Digests(())

    def digest(self, name: str) -> str:
        """Return a digest of the received data, computed during the transfer or by reading the file.

        :raises TransferFailure: it cannot be read.
        """
        try:
            return self._digests.values().get(name) or file_digest(self._part, name)
        except OSError as error:
            raise self._failure(error) from None

    def digests(self) -> dict[str, str]:
        """Return the digests computed during the transfer."""
        return self._digests.values()

    def commit(self) -> None:
        """Rename the file to its final name. On return its data and its name are durable.

        :raises TransferFailure: NO_SPACE_LOCAL and similar ones.
        """
        try:
            os.fsync(self._descriptor)
            self._close()
            self._part.replace(self._path)
            sync_folder(self._path.parent)
        except OSError as error:
            raise self._failure(error) from None

    def discard(self) -> None:
        """Remove the received data. Keep it after a full disk, because HTCondor has to see which job filled it."""
        self._close()
        if not self._keep:
            try:
                self._part.unlink(missing_ok=True)
            except OSError:
                return  # the original failure is the one to report

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _failure(self, error: OSError) -> TransferFailure:
        self._keep = self._keep or error.errno in _FULL
        return local_failure(error, self._path.name)


class SourceFile:
    """A file that is being sent: it is read once, with digests, and checked for changes.

    :param path: the file.
    :param digests: names of the digests to compute.
    :param start_bytes: position of the first byte. :param length_bytes: number of bytes; None: to the end.
    :raises TransferFailure: LOCAL_FILE when it cannot be opened.
    """

    def __init__(
        self, path: Path, digests: Iterable[str], start_bytes: int = 0, length_bytes: int | None = None
    ) -> None:
        self._path = path
        self._names = tuple(digests)
        self._digests = Digests(self._names)
        self._position_bytes = 0
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            status = os.fstat(self._descriptor)
        except OSError as error:
            raise local_failure(error, path.name) from None
        self._start_bytes = start_bytes
        self._left_bytes = math.inf
        self._file_bytes = status.st_size
        self.size_bytes = status.st_size - start_bytes if length_bytes is None else length_bytes
        self._modified_ns = status.st_mtime_ns

    def read(self, most_bytes: int) -> bytes:
        """Read the next block; it is empty at the end.

        :raises TransferFailure: SOURCE_CHANGED when the file has become shorter; REQUEST_REJECTED when the attempt has
            sent enough.
        """
        wanted = min(most_bytes, self.size_bytes - self._position_bytes)
        if not wanted:
            return b""
        try:
            piece = os.pread(self._descriptor, wanted, self._start_bytes + self._position_bytes)
        except OSError as error:
            raise local_failure(error, self._path.name) from None
        if not piece:
            raise self._changed()
        self._left_bytes -= len(piece)
        if self._left_bytes < 0:
            text = f"the server asks for {self._path.name} again and again; it was sent {_MOST_SENDINGS} times"
            raise TransferFailure(ErrorClass.REQUEST_REJECTED, text)
        self._position_bytes += len(piece)
        self._digests.update(piece)
        return piece

    @property
    def is_begun(self) -> bool:
        """Tell whether some of the file was read since the last rewind."""
        return self._position_bytes > 0

    @property
    def read_whole(self) -> bool:
        """Tell whether all of the file was read since the last rewind."""
        return self._position_bytes >= self.size_bytes

    def copy(self, descriptor: int, most_bytes: int) -> int:
        """Append the next block to another file inside the kernel, unless a digest needs its data.

        :returns: bytes copied; 0 if the kernel does not support it: then use :meth:`read`.
        :raises OSError: the other file cannot be written.
        """
        wanted = min(most_bytes, self.size_bytes - self._position_bytes)
        if self._names or not wanted:
            return 0
        copied = kernel_copy(self._descriptor, descriptor, wanted, self._start_bytes + self._position_bytes)
        self._position_bytes += copied
        return copied

    def begin_attempt(self) -> None:
        """Reset the limit on bytes of one attempt. It stops a server that redirects the upload again and again."""
        self._left_bytes = _MOST_SENDINGS * self.size_bytes

    def rewind(self) -> None:
        """Start again from the first byte."""
        self._position_bytes = 0
        self._digests = Digests(self._names)

    def check_unchanged(self) -> None:
        """Verify that the sent data belong to one version of the file.

        :raises TransferFailure: SOURCE_CHANGED.
        """
        status = os.fstat(self._descriptor)
        if (status.st_size, status.st_mtime_ns) != (self._file_bytes, self._modified_ns):
            raise self._changed()

    def digest(self, name: str) -> str:
        """Return a digest of the file, computed during the transfer or by reading the file again."""
        found: str | None = self._digests.values().get(name)
        if found is None:
            try:
                found = file_digest(Path(f"/proc/self/fd/{self._descriptor}"), name)
            except OSError as error:
                raise local_failure(error, self._path.name) from None
            self.check_unchanged()
        return found

    def digests(self) -> dict[str, str]:
        """Return the digests computed during the transfer."""
        return self._digests.values()

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _changed(self) -> TransferFailure:
        text = f"{self._path.name} changed while it was being sent: let the job end its writing before it exits"
        return TransferFailure(ErrorClass.SOURCE_CHANGED, text)
