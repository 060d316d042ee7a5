"""Frames of the overlay: a header of 32 bytes and a payload, both checked. No I/O; described in docs/developer/wire.md.

Header, big-endian: version 1, type 1, flags 2, length 4, number 8, block 8, checksum of the payload 4, checksum of
these 28 bytes 4. The first frame of each side (HELLO, WELCOME) is checked with CRC-32, all others with the checksum
that WELCOME chose: the beginning of xxh3-128 where both sides have the package ``xxhash``, else CRC-32C (the package
``crc32c``), else CRC-32. A block whose digest is xxh3-128, too, is then looked at once for both.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import json
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Union

from stageout.core.errors import StageoutError

VERSION = 1
HEADER = struct.Struct(">BBHIQQII")
HEADER_BYTES = HEADER.size
#: Of the digest of a block.
DIGEST_BYTES = 16
#: Of a checksum, in headers.
CHECKSUM_BYTES = 4
_XXH3, _BEGINNING = "xxh3-128", "xxh3-32"
_CHECKED = struct.Struct(">BBHIQQI")
_META_LENGTH = struct.Struct(">I")

Buffer = Union[bytes, bytearray, memoryview]
Checksum = Callable[[Buffer], int]
#: Checksum and digest of a block.
Sums = Callable[[Buffer], tuple[int, bytes]]


class BadFrame(Exception):
    """The other side sent something that is not in the protocol: the connection is closed."""


class OtherVersion(BadFrame):
    """The other side speaks another version of the protocol. :ivar version: that one."""

    def __init__(self, version: int) -> None:
        older = "this side" if version > VERSION else "the other side"
        super().__init__(
            f"it speaks version {version} of the protocol, this side {VERSION}: upgrade stageout on {older}"
        )
        self.version = version

    @property
    def told(self) -> str:
        """The same, for the other side to read."""
        older = "the router" if self.version > VERSION else "your side"
        return f"the router speaks version {VERSION} of the protocol, you {self.version}: upgrade stageout on {older}"


class Type(enum.IntEnum):
    """The content of a frame."""

    HELLO = 1
    WELCOME = 2
    REFUSE = 3
    HEARTBEAT = 4
    PROVE = 5
    VIA = 6
    OPEN = 10
    OPENED = 11
    BLOCK = 12
    STAGED = 13
    NOSPACE = 15
    ATTACH = 16
    PART = 17
    OPERATION = 20
    PACK = 21
    CUSTODY = 22
    RESULT = 23
    STATUS = 24
    CANCEL = 25
    LOW = 26
    PACKED = 27
    COPY = 28
    COPYING = 29
    GET = 30
    STAT = 31
    LIST = 32
    ANSWER = 33
    FOUND = 34
    GET_PACK = 35
    FOUND_PACK = 36
    LOT = 40
    RESERVED = 41
    LEASE = 42
    LEASED = 43
    LINKS = 50
    ROUTES = 51
    ROUTED = 52
    KNOWN = 53
    PROBE = 54
    PROBED = 55


#: Payloads of bytes, with or without meta data in front; all others are meta data alone.
BULK = frozenset({Type.BLOCK, Type.PART, Type.PACK, Type.ANSWER, Type.FOUND_PACK})
MAX_BULK_BYTES = 1024 * 1024 + 256 * 1024
MAX_META_BYTES = 256 * 1024
#: Of a PACK, which carries many small files or one of 4 MiB.
MAX_PACKED_BYTES = 4 * 1024 * 1024 + MAX_META_BYTES
MAX_GREETING_BYTES = 16 * 1024


class Header(NamedTuple):
    """A checked header.

    :param number: of the transfer (tid) or the request that this belongs to.
    :param block: its position in the file; of a PART that of its first byte; 0 in other frames.
    :param checksum: of the payload.
    """

    type: Type
    flags: int
    length_bytes: int
    number: int
    block: int
    checksum: int


class Frame(NamedTuple):
    """A whole frame whose payload has been checked."""

    header: Header
    payload: Buffer


def checksums() -> dict[str, Checksum]:
    """Checksums that this machine can compute, best first."""
    found: dict[str, Checksum] = {}
    with contextlib.suppress(ImportError):  # a pilot may have nothing but Python
        found[_BEGINNING] = _beginning(_xxh3())
    with contextlib.suppress(ImportError):
        found["crc32c"] = _crc32c()
    found["crc32"] = zlib.crc32
    return found


def sums(checksum: str, digest: str) -> Sums:
    """The function for checksum and digest of a block, in one pass where the first is the beginning of the second.

    :param checksum: its name, one of :func:`checksums`. :param digest: likewise, of :func:`digests`.
    """
    digest_of = digests()[digest]
    if vouches(checksum, digest):

        def in_one(data: Buffer) -> tuple[int, bytes]:
            found = digest_of(data)
            return int.from_bytes(found[:CHECKSUM_BYTES], "big"), found

        return in_one
    checksum_of = checksums()[checksum]
    return lambda data: (checksum_of(data), digest_of(data))


def vouches(checksum: str, digest: str) -> bool:
    """Tell whether the checksum of a block is the beginning of its digest. Both by name."""
    return checksum == _BEGINNING and digest == _XXH3


def _beginning(digest: Callable[[Buffer], bytes]) -> Checksum:
    return lambda data: int.from_bytes(digest(data)[:CHECKSUM_BYTES], "big")


def _xxh3() -> Callable[[Buffer], bytes]:
    """:raises ImportError: it is not installed."""
    return importlib.import_module("xxhash").xxh3_128_digest  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=1)
def _crc32c() -> Checksum:
    """The version of the package's compiled part alone: the package reads the list of all installed ones, to know its
    version.

    :raises ImportError: it is not installed.
    """
    package = importlib.util.find_spec("crc32c")
    places = package.submodule_search_locations if package else None
    part = importlib.machinery.PathFinder.find_spec("crc32c._crc32c", list(places)) if places else None
    if part is None or part.loader is None:
        return importlib.import_module("crc32c").crc32c  # type: ignore[no-any-return]
    module = importlib.util.module_from_spec(part)
    part.loader.exec_module(module)
    return module.crc32c  # type: ignore[no-any-return]


def encode_header(kind: Type, payload: Buffer, checksum: Checksum, number: int = 0, block: int = 0) -> bytes:
    """Header for a payload that is sent right after it, without copying the payload."""
    return pack_header(kind, len(payload), checksum(payload), checksum, number, block)


def pack_header(
    kind: Type, length_bytes: int, payload_checksum: int, checksum: Checksum, number: int = 0, block: int = 0
) -> bytes:
    """Header for a payload whose checksum is known already, such as a block out of a spool."""
    start = _CHECKED.pack(VERSION, kind, 0, length_bytes, number, block, payload_checksum)
    return start + struct.pack(">I", checksum(start))


def decode_header(data: Buffer, checksum: Checksum) -> Header:
    """Check and take apart 32 bytes; raises BadFrame for anything that no peer of this version sends.

    :raises OtherVersion: it is of another one, and whole.
    """
    version, kind, flags, length, number, block, payload_sum, header_sum = HEADER.unpack(data)
    if checksum(bytes(data[: HEADER_BYTES - 4])) != header_sum:
        raise BadFrame("a header does not fit its checksum")
    if version != VERSION:
        raise OtherVersion(version)
    try:
        known = Type(kind)
    except ValueError:
        raise BadFrame(f"unknown type of frame {kind}") from None
    if flags:
        raise BadFrame(f"unknown flags {flags:#x}")
    if length > max_bytes(known):
        raise BadFrame(f"{known.name} of {length} bytes; at most {max_bytes(known)} are allowed")
    return Header(known, flags, length, number, block, payload_sum)


def max_bytes(kind: Type) -> int:
    """Greatest length of a payload of this type."""
    if kind in (Type.HELLO, Type.WELCOME, Type.PROVE, Type.REFUSE, Type.VIA, Type.GET_PACK):
        return MAX_GREETING_BYTES
    if kind is Type.PACK:
        return MAX_PACKED_BYTES
    return MAX_BULK_BYTES if kind in BULK else MAX_META_BYTES


def encode_meta(meta: Mapping[str, Any], tail: Buffer = b"") -> bytes:
    """Payload of meta data (JSON) and bytes behind it."""
    text = json.dumps(meta, separators=(",", ":")).encode()
    return b"".join((_META_LENGTH.pack(len(text)), text, tail))


def decode_meta(payload: Buffer) -> tuple[dict[str, Any], memoryview]:
    """Meta data and the bytes behind it; raises BadFrame."""
    view = memoryview(payload)
    if len(view) < _META_LENGTH.size:
        raise BadFrame("a payload is too short for meta data")
    (length,) = _META_LENGTH.unpack(view[: _META_LENGTH.size])
    end = _META_LENGTH.size + length
    if length > MAX_META_BYTES or end > len(view):
        raise BadFrame("meta data are longer than their payload")
    try:
        meta = json.loads(bytes(view[_META_LENGTH.size : end]))
    except (ValueError, RecursionError):
        raise BadFrame("meta data are not JSON") from None
    if not isinstance(meta, dict):
        raise BadFrame("meta data are not an object")
    return meta, view[end:]


def digests() -> dict[str, Callable[[Buffer], bytes]]:
    """Digests of blocks that this machine can compute, best first; 16 bytes each."""
    found: dict[str, Callable[[Buffer], bytes]] = {}
    with contextlib.suppress(ImportError):
        found[_XXH3] = _xxh3()
    found["blake2b-128"] = lambda data: hashlib.blake2b(data, digest_size=16).digest()
    return found


class NoDigest(StageoutError):
    """This machine cannot compute digests of a kind; the text says what to do."""


def digest_of_kind(kind: str) -> Callable[[Buffer], bytes]:
    """One of :func:`digests`, for what came in when that could be computed. :raises NoDigest: it cannot be any more."""
    try:
        return digests()[kind]
    except KeyError:
        raise NoDigest(
            f"{kind} cannot be computed here any more, so nobody can check the file: install the package xxhash again"
        ) from None


#: Pieces that wait to be put together: a frame that comes byte by byte takes no more memory than another.
_MOST_PARTS = 256


#: The payload of a frame from this size on is put where it stays when its header is there, not when all of it is.
_LARGE_BYTES = 128 * 1024


class _Large:
    """A large frame of which some has come. It takes memory when the rest is to come."""

    def __init__(self, header: Header, begun: memoryview) -> None:
        self.header, self._begun, self.payload, self.filled_bytes = header, begun, bytearray(), len(begun)

    def room(self) -> memoryview:
        """The buffer for the rest."""
        if not self.payload:
            self.payload = bytearray(self.header.length_bytes)
            self.payload[: len(self._begun)] = self._begun
            self._begun = memoryview(b"")
        return memoryview(self.payload)[self.filled_bytes :]


class Decoder:
    """Bytes in, checked frames out. Holds at most one frame and what was fed with it, which is put together once.

    :attr checksum: may be set between frames, after WELCOME.
    """

    def __init__(self, checksum: Checksum = zlib.crc32) -> None:
        self.checksum = checksum
        self._parts: list[bytes] = []
        self._at = self._held_bytes = 0  # where the next frame begins in the first part, and what there is from there
        self._wanted_bytes = HEADER_BYTES
        self._large: _Large | None = None

    def room(self) -> memoryview:
        """Where the rest of a large frame may be put, of which :meth:`filled` is told then; else empty."""
        return self._large.room() if self._large is not None else memoryview(b"")

    def filled(self, size_bytes: int) -> None:
        """So many bytes were put there."""
        assert self._large is not None
        self._large.filled_bytes += size_bytes

    @property
    def due_bytes(self) -> int:
        """Return the payload of a large frame that takes no memory yet; 0 for none."""
        return self._large.header.length_bytes if self._large is not None and not self._large.payload else 0

    @property
    def has_more(self) -> bool:
        """Tell whether :meth:`frames` has something to do."""
        if self._large is not None:
            return self._large.filled_bytes == self._large.header.length_bytes
        return self._held_bytes >= self._wanted_bytes

    def feed(self, data: Buffer) -> None:
        """Take bytes as they came."""
        if self._large is not None:
            room, data = self._large.room(), memoryview(data)
            size_bytes = min(len(room), len(data))
            room[:size_bytes] = data[:size_bytes]
            self.filled(size_bytes)
            data = data[size_bytes:]
            if not data:
                return
        self._parts.append(bytes(data))
        self._held_bytes += len(data)
        if len(self._parts) > _MOST_PARTS:
            self._together()

    def frames(self) -> Iterator[Frame]:
        """Frames that are whole; raises BadFrame, after which nothing of this connection can be trusted."""
        while self.has_more:
            frame = self._finished() if self._large is not None else self._next()
            if frame is not None:
                yield frame

    def _finished(self) -> Frame:
        """The large frame, which is whole."""
        assert self._large is not None
        large, self._large = self._large, None
        return self._checked(large.header, large.payload)

    def _next(self) -> Frame | None:
        """The first frame of what is held; None when it is not whole."""
        data, start = self._together(), self._at + HEADER_BYTES
        header = decode_header(data[self._at : start], self.checksum)
        self._wanted_bytes = HEADER_BYTES + header.length_bytes
        if self._held_bytes < self._wanted_bytes:
            if header.length_bytes >= _LARGE_BYTES:
                self._large = _Large(header, memoryview(data)[start:])
                self._parts, self._at, self._held_bytes, self._wanted_bytes = [], 0, 0, HEADER_BYTES
            return None
        end = start + header.length_bytes
        payload = data[start:end]
        self._at, self._held_bytes = end, self._held_bytes - self._wanted_bytes
        self._wanted_bytes = HEADER_BYTES
        if not self._held_bytes:
            self._parts, self._at = [], 0
        return self._checked(header, payload)

    def _checked(self, header: Header, payload: Buffer) -> Frame:
        if self.checksum(payload) != header.checksum:
            raise BadFrame(f"a {header.type.name} does not fit its checksum")
        return Frame(header, payload)

    def _together(self) -> bytes:
        """The bytes that are held as one part."""
        if len(self._parts) > 1:
            first = memoryview(self._parts[0])[self._at :]
            self._parts, self._at = [b"".join((first, *self._parts[1:]))], 0
        return self._parts[0]
