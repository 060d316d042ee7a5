"""HTTPS to a collection, for nodes without a local collection: parallel ranges, resumption, temporary upload names."""

from __future__ import annotations

import math
import os
import random
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import quote, urlsplit

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.plugin.api import Context, Outcome, Request
from stageout.protocols.globusonline.address import Address
from stageout.protocols.globusonline.service import Service, Stopped

_TIMEOUT_S = 60.0
_PIECE_BYTES = 1 << 18
_RANGE_BYTES = 16 << 20  # smaller parts are not worth a connection
_ATTEMPTS = 5
_Result = TypeVar("_Result")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_WORDS = {
    ErrorClass.CREDENTIAL_REFUSED: "the collection does not accept the token: log in again with its https scope",
    ErrorClass.CREDENTIAL_EXPIRED: "the token has expired: log in again",
    ErrorClass.PERMISSION_DENIED: "the collection does not allow it: check path and permissions",
    ErrorClass.NOT_FOUND: "there is no such file: check the path",
    ErrorClass.NO_SPACE_REMOTE: "the destination is full",
    ErrorClass.SERVER_ERROR: "the collection has trouble behind its server",
}
_TOTAL = re.compile(r"bytes (?:\d+-\d+|\*)/(\d+)")
_STRONG = re.compile(r'"[^"]+"')
# The text of a missing file. Other problems behind a collection have status 404 as well.
_MISS = re.compile(rb"PATH_NOT_FOUND|GridFTP-Errno: 2\b")

_STATUSES = {
    401: ErrorClass.CREDENTIAL_REFUSED,
    403: ErrorClass.PERMISSION_DENIED,
    413: ErrorClass.TOO_LARGE,
    429: ErrorClass.THROTTLED,
    500: ErrorClass.SERVER_ERROR,
    502: ErrorClass.CONNECT_FAILED,
    503: ErrorClass.SERVER_BUSY,
    504: ErrorClass.TIMED_OUT,
    507: ErrorClass.NO_SPACE_REMOTE,
}
_AGAIN = (
    ErrorClass.SERVER_ERROR,
    ErrorClass.SERVER_BUSY,
    ErrorClass.CONNECTION_LOST,
    ErrorClass.CONNECT_FAILED,
    ErrorClass.THROTTLED,
    ErrorClass.TIMED_OUT,
)


class Servers:
    """Cache of the base URLs for HTTPS access to collections."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, str] = {}

    def base(self, service: Service, collection: str) -> str:
        """Find the base URL.

        :raises TransferFailure: the collection has none, or the service does not answer.
        """
        with self._lock:
            if collection not in self._known:
                found = service.ask("asking about the collection", lambda client: client.get_endpoint(collection))
                self._known[collection] = _checked(str(found.get("https_server") or ""), collection)
            return self._known[collection]


def _checked(base: str, collection: str) -> str:
    address = urlsplit(base)
    if not base:
        text = f"collection {collection} has no HTTPS side and this node no collection of its own: {_REMEDY}"
        raise TransferFailure(ErrorClass.NOT_SUPPORTED, text)
    if address.scheme != "https" and address.hostname not in _LOOPBACK:
        text = f"collection {collection} wants its token over {address.scheme}, which anybody could read"
        raise TransferFailure(ErrorClass.NOT_SUPPORTED, text)
    return base.rstrip("/")


def _length(response: HTTPResponse) -> int | None:
    """Return Content-Length in bytes, None when the answer has none."""
    stated = response.headers.get("Content-Length", "")
    return int(stated) if stated.isdecimal() else None


_LOCAL_ONLY = "the node needs a collection of its own (STAGEOUT_GLOBUS_LOCAL)"
_REMEDY = "ask the collection's administrator for HTTPS, or the pool's for STAGEOUT_GLOBUS_LOCAL"


class _Version(NamedTuple):
    """The current version of a file of the collection.

    :param tag: its strong ETag, "" if the server sends none or does not support ranges.
    """

    size_bytes: int
    tag: str


class Direct:
    """One file over HTTPS. :param base: base URL for HTTPS access to the collection."""

    def __init__(self, service: Service, base: str, address: Address, request: Request, context: Context) -> None:
        self._service = service
        self._base = urlsplit(base)
        self._address = address
        self._local = Path(request.local_path)
        self._context = context
        self._lock = threading.Lock()
        self._moved_bytes = 0

    # ---- download ----------------------------------------------------------------------------------------------------

    def download(self) -> Outcome:
        """Fetch the file under a temporary name, in parallel ranges if it is large, and rename it.

        :raises TransferFailure: classified.
        """
        if self._address.is_folder:
            text = f"{self._address.shown} is a directory, which cannot be read over HTTPS; {_LOCAL_ONLY}"
            raise TransferFailure(ErrorClass.NOT_SUPPORTED, text)
        part = self._local.with_name(f".{self._local.name[:200]}.{os.urandom(4).hex()}.part")
        try:
            size_bytes = self._persist(lambda: self._fetch(part), again=(ErrorClass.CONTENT_MISMATCH,))
            part.replace(self._local)
        except OSError as error:
            text = f"{self._local.name} cannot be written here: {error.strerror}"
            raise TransferFailure(ErrorClass.NO_SPACE_LOCAL, text) from None
        finally:
            part.unlink(missing_ok=True)
        return Outcome(size_bytes, self._moved_bytes, verified="size")

    def _fetch(self, part: Path) -> int:
        """Fetch one version of the file, and return its size in bytes.

        :raises TransferFailure: classified; CONTENT_MISMATCH when the file was replaced during the download.
        """
        version = self._persist(lambda: self._look(self._address.path))
        size_bytes = version.size_bytes
        most = self._context.parallelism if version.tag else 1
        streams = max(1, min(most, math.ceil(size_bytes / _RANGE_BYTES)))
        width = math.ceil(size_bytes / streams)
        with part.open("wb") as file, ThreadPoolExecutor(streams) as pool:
            file.truncate(size_bytes)
            starts = range(0, size_bytes, width) if width else ()
            parts = [pool.submit(self._range, file.fileno(), at, min(at + width, size_bytes), version) for at in starts]
            for done in parts:
                done.result()
        return size_bytes

    def _range(self, descriptor: int, start: int, end: int, version: _Version) -> None:
        """Fetch ``[start, end)``. Continue after an interruption if a tag identifies the version; otherwise start
        again.
        """
        position = start

        def go_on() -> None:
            nonlocal position
            position = position if version.tag else start
            headers = {"Range": f"bytes={position}-{end - 1}", **({"If-Match": version.tag} if version.tag else {})}
            with self._exchange("GET", self._address.path, headers) as response:
                self._check(response, (position, end), version)
                while position < end and (piece := response.read(min(_PIECE_BYTES, end - position))):
                    self._count(len(piece))
                    while piece:  # a nearly full disk accepts a part, and the next write gets the reason
                        written = os.pwrite(descriptor, piece, position)
                        position, piece = position + written, piece[written:]
            if position < end:
                raise self._failure(ErrorClass.CONNECTION_LOST, "the connection ended early")

        self._persist(go_on, lambda: position)

    def _check(self, response: HTTPResponse, wanted: tuple[int, int], version: _Version) -> None:
        """Check that the answer contains these bytes of this version.

        :raises TransferFailure: it does not.
        """
        if response.status not in (200, 206, 412, 416):
            raise self._refusal(response)
        (start, end), size_bytes = wanted, version.size_bytes
        part = f"bytes {start}-{end - 1}/{size_bytes}"
        is_part = response.status == 206 and response.headers.get("Content-Range") == part
        is_whole = response.status == 200 and start == 0 and _length(response) == size_bytes
        is_same = not version.tag or response.headers.get("ETag", version.tag) == version.tag
        if not (is_same and (is_part or is_whole)):
            text = "the collection has another version now than when the download began; it begins again"
            raise self._failure(ErrorClass.CONTENT_MISMATCH, text)

    def _look(self, path: str) -> _Version:
        """Query size and version of a file of the collection, by a range request for one byte.

        :raises TransferFailure: it is refused, or the answer has no length.
        """
        with self._exchange("GET", path, {"Range": "bytes=0-0"}) as response:
            if response.status not in (200, 206, 416):
                raise self._refusal(response)
            total, tag = _TOTAL.fullmatch(response.headers.get("Content-Range", "")), response.headers.get("ETag", "")
            if response.status != 200 and total:
                return _Version(int(total[1]), tag if _STRONG.fullmatch(tag) else "")
            size_bytes = _length(response)
            if response.status != 200 or size_bytes is None:
                raise self._failure(ErrorClass.SERVER_ERROR, "the collection does not say how long the file is")
            return _Version(size_bytes, "")

    # ---- upload ------------------------------------------------------------------------------------------------------

    def upload(self) -> Outcome:
        """Send the file under a temporary name, compare its size, and rename it.

        :raises TransferFailure: classified.
        """
        folder, _, name = self._address.path.rpartition("/")
        part = f"{folder}/.{name[:200]}.{os.urandom(4).hex()}.part"
        size_bytes = self._local.stat().st_size
        try:
            self._persist(lambda: self._send(part, size_bytes))
            found = self._persist(lambda: self._look(part)).size_bytes
            if found != size_bytes:
                text = f"the collection has {found} bytes where {size_bytes} were sent"
                raise self._failure(ErrorClass.SIZE_MISMATCH, text)
            self._service.ask("giving the file its name", lambda client: client.operation_rename(
                self._address.collection, oldpath=part, newpath=self._address.path))  # fmt: skip
        except BaseException:
            self._remove(part)
            raise
        return Outcome(size_bytes, self._moved_bytes, verified="size")

    def _send(self, part: str, size_bytes: int) -> None:
        with self._exchange("PUT", part, {"Content-Length": str(size_bytes)}, self._local) as response:
            if response.status < 300:
                return
            refusal = self._refusal(response)
        if refusal.kind is not ErrorClass.NOT_FOUND:
            raise refusal
        self._make_folders(part.rpartition("/")[0])
        raise self._failure(ErrorClass.SERVER_BUSY, "its directory was made only now")

    def _make_folders(self, folder: str) -> None:
        """Create the missing directories of a path, from the top. Existing ones may belong to others."""
        names = folder.strip("/").split("/")
        for depth in range(1, len(names) + 1):
            with self._exchange("PUT", "/" + "/".join(names[:depth]) + "/", {"Content-Length": "0"}) as response:
                if response.status >= 300 and depth == len(names):
                    raise self._refusal(response)

    def _pieces(self, path: Path) -> Iterator[bytes]:
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                self._count(len(piece))
                yield piece

    def _remove(self, part: str) -> None:
        """Remove a file, and ignore errors, because the original failure is the one to report."""
        try:
            with self._exchange("DELETE", part, {}):
                return
        except (TransferFailure, Stopped):
            return

    # ---- one request -------------------------------------------------------------------------------------------------

    @contextmanager
    def _exchange(
        self, method: str, path: str, headers: dict[str, str], body: Path | None = None
    ) -> Iterator[HTTPResponse]:
        """Send a request over a new connection, because errors of a collection persist on connections."""
        make = HTTPSConnection if self._base.scheme == "https" else HTTPConnection
        connection = make(self._base.hostname or "", self._base.port, timeout=_TIMEOUT_S)
        token = self._service.tokens.bearer(self._address.collection)
        target = quote(self._base.path + path, safe="/~", errors="surrogateescape")
        try:
            connection.request(
                method, target, self._pieces(body) if body else None, {**headers, "Authorization": f"Bearer {token}"}
            )
            yield connection.getresponse()
        except (OSError, HTTPException) as error:
            kind = ErrorClass.TIMED_OUT if isinstance(error, TimeoutError) else ErrorClass.CONNECTION_LOST
            raise self._failure(kind, f"{type(error).__name__}: {error}") from None
        finally:
            connection.close()

    def _persist(
        self,
        act: Callable[[], _Result],
        milestone: Callable[[], int] = lambda: 0,
        again: tuple[ErrorClass, ...] = _AGAIN,
    ) -> _Result:
        """Repeat an action while this is useful. Attempts with progress do not count.

        :param milestone: returns a measure of lasting progress. :param again: failures after which a retry is useful.
        """
        attempt, best = 0, milestone()
        while True:
            try:
                return act()
            except TransferFailure as failure:
                attempt = 0 if milestone() > best else attempt + 1
                best = max(best, milestone())
                if failure.kind not in again or attempt >= _ATTEMPTS:
                    raise
                self._context.attempt_failed(failure)
                wait_s = 0.2 * 2**attempt * random.uniform(0.8, 1.2) if attempt else 0.0
                self._service.time_limit.sleep(max(wait_s, failure.retry_after_s or 0.0))

    def _count(self, moved_bytes: int) -> None:
        with self._lock:
            self._moved_bytes += moved_bytes
        self._context.progress(self._moved_bytes)

    def _refusal(self, response: HTTPResponse) -> TransferFailure:
        """Classify an answer. A 404 is a missing file only if its text says so."""
        text = response.read(4096)
        kind = _STATUSES.get(response.status, ErrorClass.UNKNOWN)
        if response.status == 404:
            kind = ErrorClass.NOT_FOUND if _MISS.search(text) else ErrorClass.SERVER_ERROR
        elif response.status == 401 and self._service.tokens.has_expired(self._address.collection):
            kind = ErrorClass.CREDENTIAL_EXPIRED
        wait = response.headers.get("Retry-After", "")
        failure = self._failure(kind, f"HTTP {response.status} {_WORDS.get(kind, '')}".strip())
        failure.retry_after_s = float(wait) if wait.isdigit() else None
        return failure

    def _failure(self, kind: ErrorClass, what: str) -> TransferFailure:
        return TransferFailure(kind, f"{self._address.shown}: {what}", self._base.netloc)
