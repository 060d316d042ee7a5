"""PUT: a whole file, in its place when all of it is on the disk and its digest is right."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
from collections.abc import Callable
from typing import Protocol

from overlay_router.http.exchange import Exchange
from overlay_router.http.reading import Digests
from stageout.overlay.http import digests
from stageout.overlay.http.heads import CHUNKED, Refused
from stageout.overlay.rules.rights import Right
from stageout.overlay.wire import frames
from stageout.overlay.wire.messages import BLOCK_BYTES

_PAGE_BYTES = 4096
#: Blocks that are told to the daemon at once.
_TOLD = 512
#: So many written bytes wait for the disk at most: more would be synced while the client waits for its answer.
_SYNC_BYTES = 256 << 20


class Source(Protocol):
    """The bytes of a file that comes."""

    def read_into(self, view: memoryview) -> int:
        """Read some of them, 0 at the end."""


class Writing:
    """Answers PUT. :param kept: digests of files."""

    def __init__(self, kept: Digests) -> None:
        self._kept = kept

    def __call__(self, one: Exchange) -> None:
        """Answer one request. :raises Refused: it is refused."""
        head = one.head
        one.allow(Right.CREATE)
        if head.get("content-range"):
            raise Refused(400, "a part of a file cannot be put: send the whole file")
        if head.target.partition("?")[0].endswith("/") or not one.path:
            raise Refused(409, "a directory is made with MKCOL")
        promised = digests.promised(head)
        size = head.body_bytes
        status, etag, _ = self.deposit(one, one.path, one, None if size == CHUNKED else size, promised)
        fields = {"ETag": etag}
        if promised:
            fields["Repr-Digest"] = ", ".join(digests.field("Repr-Digest", *item) for item in promised.items())
        one.answer(status, fields)

    def deposit(
        self,
        one: Exchange,
        path: str,
        source: Source,
        size: int | None,
        promised: dict[str, bytes],
        replaces: bool = True,
        parents: bool = True,
        moved: Callable[[int], None] = lambda count: None,
    ) -> tuple[int, str, int]:
        """Bring a file to a name. :param size: None: it is known at the end only. :param moved: called with each count.

        :return: 201 or 204, the entity tag, and the size. :raises Refused: nothing is under the name that was not
            there before.
        """
        match = one.head.get("if-match") if one.head.method == "PUT" else ""
        absent = not replaces or (one.head.method == "PUT" and one.head.get("if-none-match").strip() == "*")
        conditions = {
            "absent": absent, "match": match, "creates": not one.subject.may(Right.MODIFY, path), "path": path,
            "share": one.subject.name, "parents": parents,
        }  # fmt: skip
        facts, file = one.desk.ask("open", size=size or 0, **conditions)
        is_done = False
        try:
            incoming = _Incoming(one, facts["digest"], file, promised)
            count = incoming.run(source, size, moved)
            answer, _ = one.desk.ask(
                "publish", size=count, blocks=incoming.count, manifest=incoming.manifest, **conditions
            )
            is_done = True
        finally:
            os.close(file)
            if not is_done:
                with contextlib.suppress(OSError, Refused):
                    one.desk.ask("drop")
        for kind, digest in promised.items():
            self._kept.keep(answer["etag"], kind, digest)
        return answer["status"], answer["etag"], count


class _Incoming:
    """The bytes of one file on their way to the disk. :param kind: of the digests of its blocks."""

    def __init__(self, one: Exchange, kind: str, file: int, promised: dict[str, bytes]) -> None:
        self._desk, self._digest, self._file = one.desk, frames.digests()[kind], file
        self._hashers = {name: digests.KINDS[name]() for name in promised}
        self._promised, self._manifest = promised, hashlib.sha256()
        self._untold: list[str] = []
        self.count = 0

    @property
    def manifest(self) -> str:
        """Return the digest of all blocks' digests."""
        return self._manifest.hexdigest()

    def run(self, source: Source, size: int | None, moved: Callable[[int], None]) -> int:
        """Bring all of it to the disk; its size. :raises Refused: it is not what it should be, or finds no room."""
        direct = _direct(self._file)
        memory = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        offset = unsynced = 0
        try:
            while True:
                filled = _filled(source, memory, moved)
                if filled:
                    self._block(memory[:filled], offset, direct)
                    offset, unsynced = offset + filled, unsynced + filled
                if filled < BLOCK_BYTES:
                    break
                if unsynced >= _SYNC_BYTES and direct < 0:
                    os.fdatasync(self._file)
                    unsynced = 0
            if size is not None and offset != size:
                raise Refused(400, "the body is shorter than it says")
            for kind, hasher in self._hashers.items():
                if hasher.digest() != self._promised[kind]:
                    raise Refused(422, f"the body has another {kind}: it was changed on its way, send it again")
            os.fsync(self._file)
            self._tell()
        except OSError as problem:
            if problem.errno in (errno.ENOSPC, errno.EDQUOT):
                raise Refused(507, "the router's disk is full", {"Retry-After": "60"}) from problem
            raise
        finally:
            if direct >= 0:
                os.close(direct)
        return offset

    def _block(self, data: memoryview, offset: int, direct: int) -> None:
        digest = self._digest(data)
        for hasher in self._hashers.values():
            hasher.update(data)
        target = direct if direct >= 0 and len(data) % _PAGE_BYTES == 0 else self._file
        while data:
            written = os.pwrite(target, data, offset)
            data, offset = data[written:], offset + written
        self._manifest.update(digest)
        self._untold.append(digest.hex())
        self.count += 1

    def _tell(self) -> None:
        """Once all is on the disk."""
        first = 0
        while first < len(self._untold):
            self._desk.ask("staged", first=first, digests=self._untold[first : first + _TOLD])
            first += _TOLD


def _filled(source: Source, view: memoryview, moved: Callable[[int], None]) -> int:
    """Fill a block as far as the body goes."""
    filled = 0
    while filled < len(view):
        count = source.read_into(view[filled:])
        if not count:
            break
        filled += count
        moved(count)
    return filled


def _direct(file: int) -> int:
    """The same file past the page cache, -1 where the filesystem does not allow it."""
    try:
        return os.open(f"/proc/self/fd/{file}", os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return -1
