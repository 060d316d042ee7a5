"""``stageout-router --verify``: published files compared with the digests that are kept of them, after a disk's fault.

It reads only, and beside a running router: of the database it takes a copy, since that one has it for itself.
"""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from overlay_router.below import DIRECTORY, directory_below
from overlay_router.local.contents import Contents, Identity, Seen
from overlay_router.local.migrations import VERSION
from overlay_router.local.place import reason_against
from stageout.core import log
from stageout.core.errors import StageoutError
from stageout.overlay.wire import frames
from stageout.overlay.wire.frames import DIGEST_BYTES
from stageout.overlay.wire.messages import BLOCK_BYTES

#: Rate (10^6 bytes a second) at which files are read where nobody names another.
RATE_MB_S = 50.0
_TRIES = 20
_AGAIN_S = 0.2
#: Of the log of a database, which has another one from each beginning on.
_HEAD_BYTES = 32
_ROWS = 100
_PART_BLOCKS = 1024
#: Another file, or none, has the name now.
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


@dataclass
class Verified:
    """The findings. :param damaged: files that are not what was published. :param unknown: nobody could compare them.

    :param gone: that are not there any more, or were changed; also under another name since the copy of the records.
    """

    files: int = 0
    size_bytes: int = 0
    damaged: int = 0
    unknown: int = 0
    gone: int = 0

    def __str__(self) -> str:
        words = f"{self.files} files ({self.size_bytes} bytes) compared, {self.damaged} damaged"
        words += f"; {self.gone} were changed, renamed or removed since" if self.gone else ""
        return words + (f"; {self.unknown} could not be compared" if self.unknown else "")


def verify(root: Path, database: Path, rate_mb_s: float = RATE_MB_S) -> Verified:
    """Compare all files below a root whose digests are kept; each one that is damaged is in the log.

    :param database: of the router. :param rate_mb_s: at which they are read, in 10^6 bytes a second.
    :raises StageoutError: the database cannot be read, or that is not the root that it is of.
    """
    found, pace = Verified(), _Pace(rate_mb_s)
    try:
        top = os.open(root, DIRECTORY)
    except OSError as problem:
        raise StageoutError(f"{root}: {problem.strerror}") from None
    try:
        with _copied(database) as connection:
            _check_root(root, connection)
            contents = Contents(connection)
            for seen in _all(contents):
                _compare(top, contents, seen, pace, found)
    except sqlite3.Error as problem:
        raise StageoutError(f"{database}: {problem}") from None
    finally:
        os.close(top)
    return found


def _check_root(root: Path, connection: sqlite3.Connection) -> None:
    """Else all files would be found to be gone, and none damaged."""
    row = connection.execute("SELECT value FROM meta WHERE name = 'place'").fetchone()
    try:
        problem = reason_against(root, row[0]) if row else ""
    except OSError as unread:
        problem = f"{unread.filename}: {unread.strerror}: run it as the router's user"
    if problem:
        raise StageoutError(problem)


class _Pace:
    def __init__(self, rate_mb_s: float) -> None:
        self._rate, self._began_s, self._bytes = rate_mb_s * 1e6, time.monotonic(), 0

    def take(self, size_bytes: int) -> None:
        """So much was read: waits while that is too much."""
        self._bytes += size_bytes
        time.sleep(max(0.0, self._began_s + self._bytes / self._rate - time.monotonic()))


@contextmanager
def _copied(database: Path) -> Iterator[sqlite3.Connection]:
    with tempfile.TemporaryDirectory(prefix="stageout-verify-") as folder:
        copy = Path(folder) / "copy"
        try:
            _copy(database, copy)
        except OSError as problem:
            raise StageoutError(f"no copy of {database} can be made in {folder}: {problem}") from None
        with closing(sqlite3.connect(copy)) as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version > VERSION:
                raise StageoutError(f"{database} is of a later version of the router: run --verify of that one")
            if version != VERSION:
                raise StageoutError(f"{database} is of an earlier version of the router: start this one with it first")
            yield connection


def _copy(database: Path, copy: Path) -> None:
    """The database and its log as they belong together: between them nothing was brought from the log to its place."""
    wal, copied_wal = (path.with_name(f"{path.name}-wal") for path in (database, copy))
    for _ in range(_TRIES):
        before = _state(database, wal)
        shutil.copyfile(database, copy)
        try:
            shutil.copyfile(wal, copied_wal)
        except FileNotFoundError:
            with suppress(FileNotFoundError):
                copied_wal.unlink()  # that of an earlier try belongs to another database
        if before == _state(database, wal):
            return
        time.sleep(_AGAIN_S)
    raise StageoutError(f"{database} changes all the time: try again when the router has less to do, or is stopped")


def _state(database: Path, wal: Path) -> tuple[int, int, bytes]:
    try:
        status = database.stat()
        with wal.open("rb") as file:
            return status.st_size, status.st_mtime_ns, file.read(_HEAD_BYTES)
    except FileNotFoundError:
        if not database.exists():
            raise StageoutError(f"{database}: no router has had its records there") from None
        return status.st_size, status.st_mtime_ns, b""


def _all(contents: Contents) -> Iterator[Seen]:
    inode = -1
    while some := contents.after(inode, _ROWS):
        yield from some
        inode = some[-1].identity.inode


def _compare(top: int, contents: Contents, seen: Seen, pace: _Pace, found: Verified) -> None:
    content = contents.find(seen.identity)
    digest_of = frames.digests().get(content.digest) if content else None
    try:
        file = _opened(top, seen.path)
    except OSError as problem:
        _not_opened(seen, problem, found)
        return
    try:
        if Identity.of(os.fstat(file)) != seen.identity:
            found.gone += 1
        elif digest_of is None:
            found.unknown += 1
        else:
            bad = [block for block, known in _known(contents, seen) if digest_of(_read(file, block, pace)) != known]
            if bad and Identity.of(os.fstat(file)) != seen.identity:
                found.gone += 1
                return
            found.files += 1
            found.size_bytes += seen.identity.size_bytes
            found.damaged += bool(bad)
            if bad:
                log.error("published-file-damaged", path=seen.path, block=bad[0], blocks=len(bad),
                          advice="check the disk, and send the file again")  # fmt: skip
    finally:
        os.close(file)


def _not_opened(seen: Seen, problem: OSError, found: Verified) -> None:
    if problem.errno in _GONE:
        found.gone += 1
    elif problem.errno == errno.EIO:
        found.damaged += 1
        log.error("published-file-damaged", path=seen.path, problem=problem.strerror, advice="check the disk")
    else:
        found.unknown += 1
        log.warn("published-file-read-failed", path=seen.path, problem=problem.strerror)


def _opened(top: int, path: str) -> int:
    """A file of which nothing is read from memory, as far as the kernel lets go of that."""
    *directories, name = path.split("/")
    directory = directory_below(top, directories)
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    finally:
        os.close(directory)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    return file


def _known(contents: Contents, seen: Seen) -> Iterator[tuple[int, bytes]]:
    """Blocks with their digests; some at a time."""
    blocks = -(-seen.identity.size_bytes // BLOCK_BYTES)
    for first in range(0, blocks, _PART_BLOCKS):
        digests = contents.digests(seen.identity.inode, first, min(_PART_BLOCKS, blocks - first))
        for start in range(0, len(digests), DIGEST_BYTES):
            yield first + start // DIGEST_BYTES, digests[start : start + DIGEST_BYTES]


def _read(file: int, block: int, pace: _Pace) -> bytes:
    """b"" where the disk does not give it."""
    try:
        data = os.pread(file, BLOCK_BYTES, block * BLOCK_BYTES)
    except OSError:
        return b""
    os.posix_fadvise(file, block * BLOCK_BYTES, BLOCK_BYTES, os.POSIX_FADV_DONTNEED)
    pace.take(len(data))
    return data
