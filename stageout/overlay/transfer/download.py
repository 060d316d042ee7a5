"""One file from a router: ranges over several connections and routes, all of one version, verified by digests."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.arrivals import not_written, part_of, permit, private
from stageout.overlay.http import operations
from stageout.overlay.http.names import encoded
from stageout.overlay.http.operations import BLOCK_BYTES
from stageout.overlay.sources import AnyPath
from stageout.overlay.transfer.blockmap import BlockMap, Range
from stageout.overlay.transfer.connection import Answer, Connection, Place, Refusal, Route
from stageout.overlay.transfer.crew import Crew, Lane, Share
from stageout.overlay.transfer.identity import Identity
from stageout.overlay.transfer.session import connected
from stageout.overlay.writing import Writing

Progress = Callable[[int], None]
#: The first question is for so many blocks; a file of no more comes by one connection.
_FIRST_BLOCKS = 8
#: A connection that takes longer to be made (seconds) has a second question on its way.
_LONG_S = 0.02
#: Seconds for the router to read a large file, for its digest.
_DIGEST_S = 600.0
_RANGE = re.compile(r"bytes (?:([0-9]{1,18})-([0-9]{1,18})|\*)/([0-9]{1,18})")
_SHA_256 = re.compile(r"(?:^|,)\s*sha-256=:([A-Za-z0-9+/=]+):")


class _Replaced(TransferFailure):
    """There is another version of the file now."""


@dataclass(frozen=True)
class Got:
    """A file that is here. :param is_verified: by digests of the router, not by TLS alone."""

    size_bytes: int
    etag: str
    is_verified: bool
    shares: tuple[Share, ...]


@dataclass
class Download:
    """One file on its way here. :param sized: called with its size, before its bytes."""

    place: Place
    identity: Identity
    path: str
    local: Path
    routes: Sequence[Route] = ((),)
    first: int = 2
    most: int = 8
    progress: Progress = lambda received_bytes: None
    sized: Progress = lambda size_bytes: None

    def run(self) -> Got:
        """Fetch it. It appears under its name when it is whole. :raises TransferFailure: nothing is left behind."""
        part = part_of(self.local)
        try:
            with open(part, "x+b", opener=private) as file:
                try:
                    got = self._fetched(file.fileno())
                except _Replaced:  # once: a file that is replaced ever again would never be here
                    os.ftruncate(file.fileno(), 0)
                    got = self._fetched(file.fileno())
                permit(file.fileno(), self._mode)
            part.replace(self.local)
        except OSError as problem:
            raise not_written(self.local, problem) from None
        finally:
            part.unlink(missing_ok=True)
        return got

    def _fetched(self, file: int) -> Got:
        """All of one version."""
        self._file, self._target = file, encoded(self.path)
        self._lock, self._received, self._etag, self._mode = threading.Lock(), 0, "", 0o644
        self._kinds, self._unverified = operations.digest_kinds(), 0
        connection = connected(self.place, self.routes)
        crew: Crew | None = None
        try:
            answer = self._first(connection)
            self.sized(self._size)
            blockmap = BlockMap(self._size)
            self._writing = Writing(file, self._size)
            is_small = blockmap.blocks <= _FIRST_BLOCKS
            crew = Crew(self.place, self.routes, blockmap, self._work, 1 if is_small else self.first,
                        1 if is_small else self.most)  # fmt: skip
            self._crew, self._begun = crew, (connection, answer)
            if not blockmap.is_done:
                crew.run(connection)
            os.ftruncate(file, self._size)
            if self._unverified:
                self._check_whole(crew.spare or connection)
            shares = crew.shares() if blockmap.blocks else (Share(tuple(map(str, self.routes[0])), 0, 1),)
            return Got(self._size, self._etag, not self._unverified or self._is_checked, shares)
        finally:
            connection.close()
            if crew is not None:
                crew.close()

    def _first(self, connection: Connection) -> Answer:
        """Ask for the first blocks, and learn of which version they are. :raises TransferFailure: it is refused."""
        for _ in range(2):
            self._ask(connection, Range(0, _FIRST_BLOCKS))
            answer = connection.answer()
            if answer.status != 401 or not self.identity.refused():
                break
            connection.read(answer)
        found = _RANGE.fullmatch(answer.get("content-range"))
        self._is_checked = False
        if answer.status == 416 and found and found[1] is None and int(found[3]) == 0:
            connection.read(answer)
            answer, body = connection.ask("HEAD", self._target)
            if answer.status != 200:
                raise connection.refused(answer, body, f"/{self.path}")
            self._take_head(answer, 0)
            return answer
        if answer.status != 206:
            body = connection.read(answer) if answer.status >= 300 else b""
            if answer.status in (200, 301):
                words = f"/{self.path} is a directory, or comes as a whole only (get -r fetches a directory)"
                raise TransferFailure(ErrorClass.NOT_SUPPORTED, words, self.place.url)
            raise connection.refused(answer, body, f"/{self.path}")
        if found is None or found[1] is None or int(found[1]):
            raise TransferFailure(ErrorClass.SERVER_ERROR, f"/{self.path}: another range came", self.place.url)
        self._take_head(answer, int(found[3]))
        return answer

    def _take_head(self, answer: Answer, size: int) -> None:
        """Take the version of the file. :raises TransferFailure: there is none."""
        self._size, self._etag, mode = size, answer.get("etag"), answer.get("stageout-mode")
        self._mode = int(mode, 8) if re.fullmatch("[0-7]{1,4}", mode) else 0o644
        if not self._etag.startswith('"'):
            raise TransferFailure(ErrorClass.SERVER_ERROR, f"/{self.path}: the router names no version", self.place.url)

    def _ask(self, connection: Connection, part: Range) -> None:
        end = part.end * BLOCK_BYTES if not self._etag else min(part.end * BLOCK_BYTES, self._size)
        fields = {"Range": f"bytes={part.first * BLOCK_BYTES}-{end - 1}", "Stageout-Want-Blocks": "1"}
        if self._etag:
            fields["If-Range"] = self._etag
        connection.request("GET", self._target, fields)

    def _work(self, lane: Lane) -> None:
        """Fetch ranges on one connection; on a long way the next question is sent before the answer has come."""
        crew, connection = self._crew, lane.open
        asked: deque[Range] = deque()
        depth = 2 if connection.made_s > _LONG_S else 1
        if self._begun[0] is connection and connection.requests:
            part = Range(0, min(_FIRST_BLOCKS, crew.map.blocks))
            with crew.changed:
                crew.map.claim(lane.key, part, time.monotonic())
            answer, self._begun = self._begun[1], (None, None)  # type: ignore[assignment]
            self._receive(lane, part, answer)
        while True:
            while len(asked) < depth:
                part_or_none = crew.take(lane, waits=not asked)
                if part_or_none is None:
                    break
                self._ask(connection, part_or_none)
                asked.append(part_or_none)
            if not asked:
                return
            part = asked.popleft()
            answer = connection.answer()
            if answer.status != 206:
                self._refused(connection, answer)
            self._receive(lane, part, answer)

    def _refused(self, connection: Connection, answer: Answer) -> None:
        """:raises TransferFailure: what a range that does not come means."""
        if answer.status in (200, 404, 416):
            raise _Replaced(
                ErrorClass.SOURCE_CHANGED, f"/{self.path} was replaced while it was fetched", self.place.url
            )
        refusal: TransferFailure = connection.refused(answer, connection.read(answer), f"/{self.path}")
        if answer.status == 401 and self.identity.refused():
            refusal = TransferFailure(ErrorClass.CONNECTION_LOST, str(refusal), self.place.url)
        raise refusal

    def _receive(self, lane: Lane, part: Range, answer: Answer) -> None:
        connection, crew = lane.open, self._crew
        start, end = part.first * BLOCK_BYTES, min(part.end * BLOCK_BYTES, self._size)
        found = _RANGE.fullmatch(answer.get("content-range"))
        if found is None or found[1] is None or (int(found[1]), int(found[2]) + 1, int(found[3])) != (
            start, end, self._size,
        ) or answer.body_bytes != end - start:  # fmt: skip
            raise TransferFailure(ErrorClass.SERVER_ERROR, f"/{self.path}: another range came", self.place.url)
        if answer.get("etag") != self._etag:
            raise _Replaced(
                ErrorClass.SOURCE_CHANGED, f"/{self.path} was replaced while it was fetched", self.place.url
            )
        digests, kind = self._promised(answer, part)
        memory = _memory()
        with crew.changed:
            crew.map.begun(lane.key, part, time.monotonic())
        for block in range(part.first, part.end):
            size, filled = min(BLOCK_BYTES, self._size - block * BLOCK_BYTES), 0
            while filled < size:
                count = connection.read_into(memory[filled:size])
                filled += count
                lane.moved_bytes += count
            data = memory[:size]
            if digests and self._kinds[kind].of(data) != digests[block - part.first]:
                words = f"/{self.path}: block {block} is not what was published"
                raise TransferFailure(ErrorClass.CONTENT_MISMATCH, words, self.place.url)
            self._write(data, block)
            if crew.came(lane, block):
                with self._lock:
                    self._received += size
                    self._unverified += not digests
                self.progress(self._received)
        crew.done(lane, part)

    def _write(self, data: memoryview, block: int) -> None:
        try:
            self._writing.write(data, block * BLOCK_BYTES)
        except OSError as problem:
            raise not_written(self.local, problem) from None

    def _promised(self, answer: Answer, part: Range) -> tuple[list[bytes], str]:
        """Return the digests that the router has kept for these blocks, and their kind."""
        kind, text = answer.get("stageout-block-kind"), answer.get("stageout-blocks")
        if not text or kind not in self._kinds:
            return [], ""
        try:
            found = [bytes.fromhex(one) for one in text.split(",")]
        except ValueError:
            found = []
        return (found, kind) if len(found) == part.blocks else ([], "")

    def _check_whole(self, connection: Connection) -> None:
        """Compare the digest of the whole file, where the router did not know those of its blocks."""
        fields = {"Want-Repr-Digest": "sha-256=1", "If-Match": self._etag}
        if connection.is_ended:
            connection = connected(self.place, self.routes)
        try:
            answer, body = connection.ask("HEAD", self._target, fields, timeout_s=_DIGEST_S)
        finally:
            connection.close()
        if answer.status in (404, 412):
            raise _Replaced(
                ErrorClass.SOURCE_CHANGED, f"/{self.path} was replaced while it was fetched", self.place.url
            )
        found = _SHA_256.search(answer.get("repr-digest"))
        if answer.status != 200 or found is None:
            if answer.status >= 400 and answer.status != 503:
                raise connection.refused(answer, body, f"/{self.path}")
            return
        mine, offset, memory = hashlib.sha256(), 0, _memory()
        while count := os.preadv(self._file, [memory], offset):
            mine.update(memory[:count])
            offset += count
        if base64.b64encode(mine.digest()).decode() != found[1]:
            words = f"/{self.path}: it is not what the router has: fetch it again"
            raise TransferFailure(ErrorClass.CONTENT_MISMATCH, words, self.place.url)
        self._is_checked = True


_own = threading.local()


def _memory() -> memoryview:
    """Return memory for one block, of this thread."""
    found: memoryview | None = getattr(_own, "memory", None)
    if found is None:
        import mmap

        found = _own.memory = memoryview(mmap.mmap(-1, BLOCK_BYTES))  # the kernel copies faster to whole pages
    return found


def get(place: Place, identity: Identity, path: str, local: AnyPath, **more: object) -> Got:
    """Fetch a file. :param more: of :class:`Download`. :raises TransferFailure: it is not here."""
    return Download(place, identity, path, Path(local), **more).run()  # type: ignore[arg-type]


__all__ = ["Download", "Got", "Refusal", "get"]
