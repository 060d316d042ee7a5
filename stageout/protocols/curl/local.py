"""``file`` URLs: the far end is a directory of this machine, often on a shared file system."""

from __future__ import annotations

import os
import stat
from io import FileIO
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.plugin.api import Outcome
from stageout.protocols.curl.address import Address
from stageout.protocols.curl.attempts import Movement
from stageout.protocols.curl.failures import remote_failure
from stageout.protocols.curl.localfile import PartFile, SourceFile, file_digest, sync_folder, temporary_name
from stageout.protocols.curl.task import Task

_PIECE_BYTES = 1 << 20
_COPY_BYTES = 16 << 20  # per call of the kernel
_LOCAL_HOSTS = ("", "localhost", "127.0.0.1")
_READ_BACK_DIGEST = "md5"


def path_of(address: Address) -> Path:
    """Read the path in a ``file`` URL.

    :raises TransferFailure: BAD_URL when it names another host, or no path.
    """
    parts = urlsplit(address.url)
    if parts.netloc not in _LOCAL_HOSTS:
        text = f"a file URL names a path of this machine: write file:///path, not file://{parts.netloc}/"
        raise TransferFailure(ErrorClass.BAD_URL, text)
    path = Path(os.fsdecode(unquote_to_bytes(parts.path)))
    if not path.name or "\0" in str(path):
        raise TransferFailure(ErrorClass.BAD_URL, f"{address.shown} names no file")
    return path


def is_null_device(path: Path) -> bool:
    """Tell whether this is ``/dev/null``, under any name."""
    try:
        found, null = path.stat(), Path(os.devnull).stat()
    except OSError:
        return False
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == null.st_rdev


class LocalDownload(Movement):
    """Download from a ``file`` URL into the sandbox."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._path = path_of(task.address)
        self._expected = task.user_digests()
        self._part = PartFile(task.path)

    def attempt(self) -> Outcome:
        """Copy the file, verify it, and rename it to its final name."""
        if self._path.is_dir():
            return self._list()
        try:
            with _opened(self._path) as descriptor:
                before = os.fstat(descriptor)
                self._copy(descriptor)
                after = os.fstat(descriptor)
        except OSError as error:
            raise remote_failure(error, str(self._path)) from None
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise TransferFailure(ErrorClass.CONTENT_MISMATCH, f"{self._path} changed while it was read")
        if after.st_size and self._part.size_bytes != after.st_size:  # files in /proc and /sys have no size
            text = f"{self._part.size_bytes} of {after.st_size} bytes of {self._path} could be read"
            raise TransferFailure(ErrorClass.SIZE_MISMATCH, text)
        verified = self._verify()
        self._part.commit()
        size_bytes = self._part.size_bytes
        return Outcome(size_bytes, self._task.progress.total_bytes, verified=verified, digests=self._part.digests())

    def _list(self) -> Outcome:
        """List the names in a directory, as libcurl returns them to HTCondor's own plugin."""
        try:
            names = sorted(path.name for path in self._path.iterdir() if not path.name.startswith("."))
        except OSError as error:
            raise remote_failure(error, str(self._path)) from None
        self._part.restart(self._expected)
        self._part.write(b"".join(os.fsencode(name) + b"\n" for name in names))
        verified = self._verify()
        self._part.commit()
        return Outcome(self._part.size_bytes, self._part.size_bytes, verified=verified, digests=self._part.digests())

    def abandon(self) -> None:
        """Remove the partial file."""
        self._part.discard()

    def _copy(self, descriptor: int) -> None:
        self._part.restart(self._expected)
        self._task.progress.begin()
        while self._part.copy(descriptor, _COPY_BYTES) or self._read_piece(descriptor):
            self._task.progress.moved(self._part.size_bytes)

    def _read_piece(self, descriptor: int) -> int:
        piece = os.pread(descriptor, _PIECE_BYTES, self._part.size_bytes)
        self._part.write(piece)
        return len(piece)

    def _verify(self) -> str:
        verified = "size"
        for name, value in self._expected.items():
            if self._part.digest(name) != value:
                text = f"{self._path} does not have the {name} that the job's PluginData states"
                raise TransferFailure(ErrorClass.CONTENT_MISMATCH, text)
            verified = name
        if self._task.digest_required and verified == "size":
            text = f"nobody states a digest of {self._path} and the checksum policy is required; give one in PluginData"
            raise TransferFailure(ErrorClass.NOT_VERIFIED, text)
        return verified


class LocalUpload(Movement):
    """Upload from the sandbox to a ``file`` URL."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._path = path_of(task.address)
        self._part = self._path.with_name(temporary_name(self._path.name))
        self._expected = task.user_digests()
        self._read_back = self._task.digest_required
        names = {_READ_BACK_DIGEST, *self._expected} if self._read_back else self._expected
        self._source = SourceFile(task.path, names)

    def attempt(self) -> Outcome:
        """Copy the file, sync it, and rename it to its final name. On return data and name are durable."""
        if is_null_device(self._path):
            return self._swallow()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._write()
            self._source.check_unchanged()
            verified = self._verify()
            self._part.replace(self._path)
            sync_folder(self._path.parent)
        except OSError as error:
            raise remote_failure(error, str(self._path)) from None
        size_bytes, moved_bytes = self._source.size_bytes, self._task.progress.total_bytes
        return Outcome(size_bytes, moved_bytes, verified=verified, digests=self._source.digests())

    def _swallow(self) -> Outcome:
        """Read the file and discard the data: a rename would replace the null device."""
        self._source.rewind()
        while self._source.read(_PIECE_BYTES):
            continue
        self._source.check_unchanged()
        return Outcome(self._source.size_bytes, digests=self._source.digests())

    def abandon(self) -> None:
        """Remove the partial file."""
        try:
            self._part.unlink(missing_ok=True)
        except OSError:
            return  # the original failure is the one to report

    def close(self) -> None:
        """Close the local file."""
        self._source.close()

    def _write(self) -> None:
        self._source.rewind()
        self._task.progress.begin()
        written_bytes = 0
        with self._part.open("wb", buffering=0) as file:
            if self._task.settings.reserve_space and self._source.size_bytes:
                os.posix_fallocate(file.fileno(), 0, self._source.size_bytes)
            while written_bytes < self._source.size_bytes:
                written_bytes += self._source.copy(file.fileno(), _COPY_BYTES) or self._write_piece(file)
                self._task.progress.moved(written_bytes)
            os.fsync(file.fileno())
            if self._read_back:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that the verification reads the disk

    def _write_piece(self, file: FileIO) -> int:
        piece = self._source.read(_PIECE_BYTES)
        view = memoryview(piece)
        while view:
            view = view[file.write(view) :]
        return len(piece)

    def _verify(self) -> str:
        size_bytes = self._part.stat().st_size
        if size_bytes != self._source.size_bytes:
            text = f"{self._path} has {size_bytes} bytes, {self._source.size_bytes} were written"
            raise TransferFailure(ErrorClass.SIZE_MISMATCH, text)
        for name, value in self._expected.items():
            if self._source.digest(name) != value:
                text = f"{self._path.name} does not have the {name} that the job's PluginData states"
                raise TransferFailure(ErrorClass.SOURCE_CHANGED, text)
        if not self._read_back:
            return "size"
        if file_digest(self._part, _READ_BACK_DIGEST) != self._source.digest(_READ_BACK_DIGEST):
            raise TransferFailure(ErrorClass.CONTENT_MISMATCH, f"{self._path} reads back otherwise than it was written")
        return _READ_BACK_DIGEST


class _opened:
    """Open a source, which must be a regular file or the null device, because a pipe could block forever."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def __enter__(self) -> int:
        self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        opened = Path(f"/proc/self/fd/{self._descriptor}")
        if not opened.is_file() and not is_null_device(opened):
            os.close(self._descriptor)
            raise TransferFailure(ErrorClass.NOT_SUPPORTED, f"{self._path} is not an ordinary file")
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
