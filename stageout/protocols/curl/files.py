"""Local files: written under a temporary name and renamed when whole; read once, and known to be the same all along."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.protocols.curl.digests import Digester
from stageout.protocols.curl.exchange import local_failure

READ_BYTES = 2 * 1024 * 1024


class PartFile:
    """A file that is being downloaded, ``.NAME.part`` beside its place until :meth:`finish`.

    On return of finish the content and the name are on the disk. Leaving the ``with`` block without it removes the
    part, except when the local disk was full: HTCondor wants to see then who filled it.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        name = self._path.name
        self._part = self._path.with_name(f".{name[:200]}.part")
        self.size_bytes = 0
        self._finished = False
        try:
            self._file = open(self._part, "wb", buffering=0)  # noqa: SIM115 - closed in __exit__
        except OSError as problem:
            raise local_failure(problem) from None

    def __enter__(self) -> PartFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        full = isinstance(error, TransferFailure) and error.kind is ErrorClass.NO_SPACE_LOCAL
        if not self._finished and not full:
            self._part.unlink(missing_ok=True)

    def write(self, data: bytes) -> None:
        """Append."""
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        self.size_bytes += len(data)

    def restart(self) -> None:
        """Forget what was written."""
        self._file.seek(0)
        self._file.truncate()
        self.size_bytes = 0

    def finish(self) -> None:
        """Bring it to the disk under its name."""
        try:
            os.fsync(self._file.fileno())
            self._part.replace(self._path)
        except OSError as problem:
            raise local_failure(problem) from None
        self._finished = True
        sync_directory(self._path.parent)


def sync_directory(path: Path) -> None:
    """Bring a directory's names to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class SourceFile:
    """A file that is being uploaded. Computes its digests on the first reading and notices any change."""

    def __init__(self, path: str, digest_names: tuple[str, ...]) -> None:
        self._names = digest_names
        self.digests: dict[str, str] = {}
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed in __exit__
        except OSError as problem:
            text = f"cannot read {Path(path).name}: {problem.strerror}"
            raise TransferFailure(ErrorClass.LOCAL_FILE, text) from None
        self._digester: Digester | None = None
        self._facts = self._stat()
        self.size_bytes = self._facts[0]
        self._rewound()

    def __enter__(self) -> SourceFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def read(self, size: int) -> bytes:
        """READFUNCTION of libcurl."""
        data = self._file.read(min(size, READ_BYTES))
        if self._digester is not None:
            self._digester.update(data)
        self._read += len(data)
        if self._digester is not None and self._read >= self.size_bytes:
            self.digests = self._digester.values()
            self._digester = None
        return data

    def rewind(self) -> None:
        """Begin again (another attempt, or a redirect)."""
        self._file.seek(0)
        self._rewound()

    def seek(self, offset: int, origin: int) -> int:
        """SEEKFUNCTION of libcurl: it only ever goes back to the start."""
        if offset or origin:
            return 2
        self.rewind()
        return 0

    def check_unchanged(self) -> None:
        """:raises TransferFailure: SOURCE_CHANGED."""
        if self._stat() != self._facts:
            text = "the file was changed while it was being sent; something still writes to it"
            raise TransferFailure(ErrorClass.SOURCE_CHANGED, text)

    def complete_digests(self) -> dict[str, str]:
        """The digests; reads the file again if the server took it without asking for all of it."""
        if not self.digests and self._names:
            self.rewind()
            while self.read(READ_BYTES):
                pass
            if self._digester is not None:
                self.digests = self._digester.values()
        return self.digests

    def _rewound(self) -> None:
        self._read = 0
        self._digester = Digester(self._names) if self._names and not self.digests else None

    def _stat(self) -> tuple[int, int, int]:
        found = os.fstat(self._file.fileno())
        return (found.st_size, found.st_mtime_ns, found.st_ino)
