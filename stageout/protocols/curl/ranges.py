"""Downloads over several connections: each fetches another range of the same version of the file.

The first request asks for the beginning only. Its answer shows whether the server supports ranges (206), the length of
the file, and a version identifier (a strong ETag or date, RFC 9110, 8.8). The other connections then start, and each of
their requests demands that version (``If-Range``). A server that answers 200 sends the whole file over the first
connection, so that no time is lost.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.plugin.api import Outcome
from stageout.protocols.curl.digests import Stated, stated_by_server
from stageout.protocols.curl.download import (
    CONTENT_RANGE,
    WHOLE,
    HttpDownload,
    is_nonsense,
    same_version,
    strong_validator,
)
from stageout.protocols.curl.http import Http
from stageout.protocols.curl.settings import value_of
from stageout.protocols.curl.streams import SharedProgress, StreamProgress
from stageout.protocols.curl.task import Task
from stageout.protocols.curl.transport import Reply

_LEAST_PIECE_BYTES = 4 << 20
_PIECES_PER_STREAM = 8
Piece = tuple[int, int]  # first byte, and the byte after the last one


def pieces(start: int, end: int, streams: int, most_bytes: int) -> list[Piece]:
    """Divide the rest of a file into several ranges per stream, so that a slow stream does not delay the others."""
    size = max(min(_LEAST_PIECE_BYTES, most_bytes), min(most_bytes, (end - start) // (streams * _PIECES_PER_STREAM)))
    return [(place, min(place + size, end)) for place in range(start, end, size)]


class _Fetch:
    """Receiver of one piece."""

    def __init__(self, owner: RangedDownload, piece: Piece) -> None:
        self._owner = owner
        self.place, self.end = piece

    def begin(self, reply: Reply) -> None:
        self._owner.check_piece(reply, self.place)

    def write(self, data: bytes) -> None:
        if self.place + len(data) > self.end:
            raise TransferFailure(ErrorClass.SERVER_ERROR, "the server sends more than the range that was asked for")
        self._owner.put(data, self.place)
        self.place += len(data)


class RangedDownload(HttpDownload):
    """Download of one file over several connections.

    :param first_bytes: size of the first request. A file that is not longer needs only this request.
    """

    def __init__(self, task: Task, first_bytes: int) -> None:
        super().__init__(task)
        sample = value_of(task.request.data, "sample_bytes")
        self._sample_bytes = sample if isinstance(sample, int) and sample > 0 else 0
        self._streams = task.context.parallelism
        self._first_bytes = min(first_bytes, self._sample_bytes or first_bytes)
        self._shared = SharedProgress(task.context, task.progress)
        self._http = self._connection()
        self._lock = threading.Lock()
        self._missing: list[Piece] = []
        self._ranged = False
        self._got_bytes = 0
        self._threads: list[threading.Thread] = []

    @property
    def milestone(self) -> int:
        """Return the number of received bytes."""
        return self._got_bytes if self._ranged else super().milestone

    def attempt(self) -> Outcome:
        """Send the first request. If it was answered before, fetch all missing ranges."""
        self._shared.stop = None
        try:
            if self._ranged:
                self._help(self._streams - 1)
                self._wait()
            elif self._part.size_bytes:
                return super().attempt()  # a plain download that broke continues as one
            else:
                self._begin_ranges()
        except _NoRangesError as error:
            self._give_up(error)
            self._shared.stop = None
            self._forget()
            return self._outcome(self._ended_plainly(self._http.ask("GET", self._address, receiver=self)))
        return self._ended() if self._ranged else self._outcome(self._finish())

    def begin(self, reply: Reply) -> None:
        """Read the head of the answer to the first request."""
        found = CONTENT_RANGE.fullmatch(reply.headers.get("content-range", "").strip())
        if reply.status != 206:
            if self._sample_bytes:
                text = f"{self._address.host} does not give parts of files, so no sample of one can be taken"
                raise TransferFailure(ErrorClass.NOT_SUPPORTED, text, self._address.host)
            super().begin(reply)
            return
        total = int(found[3]) if found and found[1] == "0" and found[3] != "*" else -1
        self._validator = strong_validator(reply.headers)
        end = min(total, self._sample_bytes or total)
        if found is None or total < 0 or (not self._validator and int(found[2]) + 1 < end):
            raise _NoRangesError
        amazon = self._address.signed_for_amazon
        self._headers = reply.headers
        self._restart(Stated() if self._sample_bytes else stated_by_server(reply.headers, False, amazon=amazon), end)
        self._ranged = True
        self._missing = pieces(min(self._first_bytes, end), end, self._streams, self._first_bytes)
        self._help(self._streams - 1)

    def write(self, data: bytes) -> None:
        """Store data of the first request."""
        if self._ranged:
            self.put(data, self._first.place)
            self._first.place += len(data)
        else:
            super().write(data)

    def check_piece(self, reply: Reply, place: int) -> None:
        """Check that an answer belongs to this version of the file.

        :raises TransferFailure: CONTENT_MISMATCH otherwise; the download starts again from the beginning.
        """
        found = CONTENT_RANGE.fullmatch(reply.headers.get("content-range", "").strip())
        fits = reply.status == 206 and found is not None and int(found[1]) == place
        if not fits or not same_version(self._validator, reply.headers):
            self._ranged = False
            text = f"{self._address.name} changed on {self._address.host} while it was fetched; begun again"
            raise TransferFailure(ErrorClass.CONTENT_MISMATCH, text, self._address.host)

    def put(self, data: bytes, place: int) -> None:
        """Write to the file. All connections call it."""
        self._part.write_at(data, place)
        with self._lock:
            self._got_bytes += len(data)

    def _begin_ranges(self) -> None:
        asked = f"Range: bytes=0-{self._first_bytes - 1}"
        self._first = _Fetch(self, (0, self._first_bytes))
        self._got_bytes = 0
        try:
            reply = self._http.ask("GET", self._address, (asked,), receiver=self)
        except TransferFailure as failure:
            if is_nonsense(failure) and not self._sample_bytes:
                raise _NoRangesError from None
            self._give_up(failure)
            if self._ranged:
                self._missing.append((self._first.place, min(self._first_bytes, self._announced_bytes or 0)))
            raise
        if reply.status not in WHOLE and reply.status != 206:  # also 416: an empty file has no first byte
            raise self._refused(self._http, reply)
        self._wait()

    def _connection(self) -> Http:
        return Http(replace(self._task, progress=StreamProgress(self._task.context, self._shared)))

    def _help(self, count: int) -> None:
        for _ in range(min(count, len(self._missing))):
            thread = threading.Thread(target=self._work, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _wait(self) -> None:
        """Fetch ranges in this thread as well, until none is left.

        :raises TransferFailure: the first failure of any connection.
        """
        if self._ranged:
            self._work()
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        if self._shared.stop is not None:
            raise self._shared.stop

    def _give_up(self, failure: BaseException) -> None:
        with self._lock:
            self._shared.stop = self._shared.stop or failure
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _work(self) -> None:
        http = self._connection()
        while self._shared.stop is None:
            with self._lock:
                piece = self._missing.pop(0) if self._missing else None
            if piece is None:
                return
            fetch = _Fetch(self, piece)
            try:
                self._fetch(http, fetch)
            except BaseException as failure:
                with self._lock:
                    self._shared.stop = self._shared.stop or failure
            if fetch.place < fetch.end:
                with self._lock:
                    self._missing.append((fetch.place, fetch.end))

    def _fetch(self, http: Http, fetch: _Fetch) -> None:
        asked = (f"Range: bytes={fetch.place}-{fetch.end - 1}", f"If-Range: {self._validator}")
        try:
            reply = http.ask("GET", self._address, asked, receiver=fetch)
        except TransferFailure as failure:
            if is_nonsense(failure) and not self._sample_bytes:
                raise _NoRangesError from None
            raise
        if reply.status != 206:
            raise self._refused(http, reply)
        if fetch.place < fetch.end:
            text = f"{self._address.host} sent less than the range that was asked for"
            raise TransferFailure(ErrorClass.CONNECTION_LOST, text, self._address.host)

    def _refused(self, http: Http, reply: Reply) -> Exception:
        """Return the error for a refused range. The file is fetched without ranges, unless only a sample is wanted."""
        if self._sample_bytes and reply.status != 416:
            return http.failure(reply, f"download of {self._address.name}")
        self._check_refusal(http, reply)
        return _NoRangesError()

    def _ended(self) -> Outcome:
        self._part.filled(self._announced_bytes or 0)
        return self._outcome(self._finish())

    def _outcome(self, outcome: Outcome) -> Outcome:
        outcome.developer.update(self._http.facts)
        outcome.developer["Streams"] = self._streams if self._ranged else 1
        return outcome

    def _forget(self) -> None:
        self._ranged, self._missing = False, []
        super()._forget()


class _NoRangesError(Exception):
    """The server's ranges are unusable, because it does not state the version or the length."""
