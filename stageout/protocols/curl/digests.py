"""Digests: compute them while data passes, and read those that servers and users state.

Names are ``md5``, ``sha1``, ``sha256``, ``sha512``, ``adler32``, ``crc32``; values are lower-case hexadecimal.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol, Union

if TYPE_CHECKING:  # imported only for large files
    from concurrent.futures import Future, ThreadPoolExecutor

_ALONE_BYTES = 4 << 20  # for smaller files a second thread costs more than it gains
_MOST_WAITING = 16  # blocks in the queue between the two threads
Data = Union[bytes, bytearray, memoryview]

#: Strongest first, with the length of a value in bytes.
LENGTHS_BYTES = {"sha512": 64, "sha256": 32, "sha1": 20, "md5": 16, "crc32": 4, "adler32": 4}

#: Digests to request from servers, the usually stored ones first, because computing one reads the file.
WANTED = (
    "Want-Repr-Digest: sha-256=9, md5=5, sha-512=3, adler=2",
    "Want-Digest: adler32;q=1, md5;q=0.9, sha-256;q=0.8, sha;q=0.7",
)

# RFC 9530, RFC 3230 and the headers of ownCloud, Google and Amazon use different names for the same algorithms.
_NAMES = {
    "md5": "md5",
    "sha": "sha1",
    "sha1": "sha1",
    "sha-1": "sha1",
    "sha256": "sha256",
    "sha-256": "sha256",
    "sha512": "sha512",
    "sha-512": "sha512",
    "adler": "adler32",
    "adler32": "adler32",
    "crc32": "crc32",
}
_HEX = re.compile(r"[0-9A-Fa-f]+")
_PLAIN_CODINGS = ("", "identity")
_STATING = frozenset(
    {"oc-checksum", "x-oc-checksum", "repr-digest", "digest", "content-digest", "content-md5", "x-goog-hash"}
)
_STATING_PREFIXES = ("x-checksum-", "x-amz-")
_S3_SERVERS = ("AmazonS3", "MinIO")
_S3_MD5_TAG = re.compile(r'"?([0-9a-fA-F]{32})"?')


class Stated(NamedTuple):
    """Digests in an answer: name -> value.

    :param sure: digests of the file itself.
    :param perhaps: digests that may belong to another encoding of the file. Equality confirms; a difference says
        nothing.
    """

    sure: dict[str, str] = {}  # noqa: RUF012 - never changed
    perhaps: dict[str, str] = {}  # noqa: RUF012 - never changed

    @property
    def names(self) -> set[str]:
        """Return the names of all stated digests."""
        return {*self.sure, *self.perhaps}


class _Running(Protocol):
    def update(self, data: Data, /) -> None: ...
    def hexdigest(self) -> str: ...


class _Checksum:
    """A zlib checksum with the interface of a hash."""

    def __init__(self, function: Callable[[Data, int], int], start: int) -> None:
        self._function = function
        self._value = start

    def update(self, data: Data, /) -> None:
        self._value = self._function(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def _start(name: str) -> _Running:
    if name == "adler32":
        return _Checksum(zlib.adler32, 1)
    if name == "crc32":
        return _Checksum(zlib.crc32, 0)
    return hashlib.new(name, usedforsecurity=False)


class Digests:
    """Digests of passing data. After the first blocks a second thread computes them, so that the transfer does not
    wait.

    :param names: names of the digests.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._running = {name: _start(name) for name in names}
        self._passed_bytes = 0
        self._thread: ThreadPoolExecutor | None = None  # of one worker, so that blocks stay in order
        self._waiting: deque[Future[None]] = deque()

    def update(self, data: Data) -> None:
        """Add the next block. The caller must not change it afterwards."""
        self._passed_bytes += len(data)
        if self._passed_bytes <= _ALONE_BYTES or not self._running:
            self._update(data)
            return
        if self._thread is None:
            from concurrent.futures import ThreadPoolExecutor

            self._thread = ThreadPoolExecutor(1)
        self._waiting.append(self._thread.submit(self._update, data))
        if len(self._waiting) > _MOST_WAITING:
            self._waiting.popleft().result()

    def values(self) -> dict[str, str]:
        """Return the digests of the data so far, by name."""
        while self._waiting:
            self._waiting.popleft().result()
        return {name: running.hexdigest() for name, running in self._running.items()}

    def _update(self, data: Data) -> None:
        for running in self._running.values():
            running.update(data)


def strongest(names: Iterable[str]) -> str | None:
    """Choose the strongest of several digests; None of none."""
    known = set(names)
    return next((name for name in LENGTHS_BYTES if name in known), None)


def read_value(name: str, text: str) -> str | None:
    """Convert a value in base64 or hexadecimal (servers mix them up) to hexadecimal; None for other text."""
    length_bytes = LENGTHS_BYTES[name]
    text = text.strip().strip('"').strip(":")
    if _HEX.fullmatch(text) and len(text) <= 2 * length_bytes and (length_bytes == 4 or len(text) == 2 * length_bytes):
        return text.lower().rjust(2 * length_bytes, "0")
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return raw.hex() if len(raw) == length_bytes else None


def _listed(header: str, mark: str) -> Iterator[tuple[str, str]]:
    """Split ``sha-256=:...:, md5=...`` (mark ``=``) or ``MD5:... ADLER32:...`` (mark ``:``) into its items."""
    for item in re.split(r"[,\s]+", header):
        name, found, value = item.partition(mark)
        known = _NAMES.get(name.strip().lower())
        if found and known:
            yield known, value


def stated_by_user(text: str) -> dict[str, str]:
    """Parse digests as in PluginData: ``"sha-256:<hexadecimal>"``, several separated by blanks or commas.

    :raises ValueError: a name or value is invalid. Ignoring it would skip a check.
    """
    found = {}
    for item in re.split(r"[,\s]+", text.strip()):
        name, _, value = item.replace("=", ":", 1).partition(":")
        known = _NAMES.get(name.lower())
        read = read_value(known, value) if known else None
        if known is None or read is None:
            raise ValueError(f"checksum {item!r}: write for example sha-256:<hexadecimal digits>")
        found[known] = read
    return found


def stated_by_server(
    headers: Mapping[str, str], whole_body: bool, about_upload: bool = False, amazon: bool = False
) -> Stated:
    """Read the digests of a file from the headers of an answer.

    :param headers: names in lower case.
    :param whole_body: the answer's own body is (or would be) the whole file; then headers about the body count too.
    :param about_upload: this is the answer to a PUT: its ``Repr-Digest`` describes the answer, not the file.
    :param amazon: the URL has a signature for S3. Not every S3 server identifies itself in its headers.
    """
    if not _may_state(headers, amazon):
        return Stated()
    found: list[tuple[str, str]] = []
    for header in ("oc-checksum", "x-oc-checksum"):
        found += _listed(headers.get(header, ""), ":")
    if not about_upload:
        for header in ("repr-digest", "digest"):
            found += _listed(headers.get(header, ""), "=")
    if whole_body and not about_upload:
        found += _listed(headers.get("content-digest", ""), "=")
        found += [("md5", headers["content-md5"])] if "content-md5" in headers else []
    for name, known in _NAMES.items():
        found += [(known, headers[f"x-checksum-{name}"])] if f"x-checksum-{name}" in headers else []
    google = list(_listed(headers.get("x-goog-hash", ""), "="))
    packed = headers.get("x-goog-stored-content-encoding", "").strip().lower() not in _PLAIN_CODINGS
    own, tags = _s3(headers, amazon)
    sure, perhaps = [*found, *own, *(() if packed else google)], [*tags, *(google if packed else ())]
    if headers.get("content-encoding", "").strip().lower() not in _PLAIN_CODINGS and not about_upload:
        sure, perhaps = [], [*sure, *perhaps]  # of the encoded form or of the decoded one; servers differ
    return Stated(_read(sure), _read(perhaps))


def _may_state(headers: Mapping[str, str], amazon: bool) -> bool:
    """Tell whether a header may contain a digest. Most servers send none, and calls may have thousands of files."""
    if amazon or headers.keys() & _STATING or headers.get("server") in _S3_SERVERS:
        return True
    return any(name.startswith(_STATING_PREFIXES) for name in headers)


def _read(found: Iterable[tuple[str, str]]) -> dict[str, str]:
    read = ((name, read_value(name, value)) for name, value in reversed(list(found)))
    return {name: value for name, value in read if value}


def _s3(headers: Mapping[str, str], amazon: bool) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return S3's certain checksums and its possible ones.

    The ETag of a single-part object without customer key is its MD5. It is certain if the answer says that S3's own key
    (AES256) encrypted the object, as Amazon always says. Otherwise it counts only if it agrees.
    """
    sums: list[tuple[str, str]] = []
    if headers.get("x-amz-checksum-type", "FULL_OBJECT").upper() == "FULL_OBJECT":
        names = ("sha256", "sha1", "crc32")
        sums = [(name, headers[f"x-amz-checksum-{name}"]) for name in names if f"x-amz-checksum-{name}" in headers]
    amazon = amazon or any(name.startswith("x-amz-") for name in headers)
    tag = _S3_MD5_TAG.fullmatch(headers.get("etag", ""))
    if tag is None or not (amazon or headers.get("server") in _S3_SERVERS):
        return sums, []
    plain_key = headers.get("x-amz-server-side-encryption") == "AES256"
    own_key = "x-amz-server-side-encryption-customer-algorithm" in headers
    random_tag = headers.get("x-amz-storage-class", "").upper() == "EXPRESS_ONEZONE"
    if plain_key and not own_key and not random_tag:
        return [*sums, ("md5", tag[1])], []
    return sums, [("md5", tag[1])]
