"""Messages of the overlay: what the meta data of each frame mean. Described in docs/WIRE.md; no I/O.

Reading is strict: a missing or ill-typed field, a number out of its range or an unknown word raises BadFrame, so the
parties behind it only ever see values that the protocol allows. Unknown fields are ignored, for later versions.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Union, get_type_hints

from stageout.wire.frames import BadFrame, Checksum, Frame, Type, decode_meta, encode_header, encode_meta

BLOCK_BYTES = 1024 * 1024
MAX_AFTER = 8
MAX_PATH_BYTES = 4096
MAX_RANGES = 4096
MAX_NUMBER = 2**63 - 1
#: Clocks further apart than this make ``expires`` meaningless: no custody (section 2, "the late router").
MAX_CLOCK_SKEW_S = 600

Range = tuple[int, int]


@dataclass(frozen=True)
class Hello:
    """First frame of the side that connects.

    :param node: its name. :param nonce: 32 random hexadecimal digits, never used again.
    :param checksums: that it can compute, best first. :param digests: of blocks, likewise.
    :param clock: Unix time in seconds. :param key: name of the key it will prove, "" for none.
    """

    node: str
    nonce: str
    checksums: tuple[str, ...]
    digests: tuple[str, ...]
    clock: int
    key: str = ""


@dataclass(frozen=True)
class Welcome:
    """Answer to HELLO: what was chosen, and the proof that this side has the key (:func:`proof`)."""

    node: str
    nonce: str
    checksum: str
    digest: str
    clock: int
    proof: str = ""


@dataclass(frozen=True)
class Prove:
    """Answer to WELCOME: the proof that the side that connected has the key."""

    proof: str


@dataclass(frozen=True)
class Refuse:
    """The last frame of a connection: why, and after how many seconds to try again (negative: never)."""

    message: str
    retry_after_s: int = -1


@dataclass(frozen=True)
class Open:
    """Ask for a transfer number (tid) for the data of one PUBLISH to come.

    :param size_bytes: of the whole file, -1 when not yet known. :param block_bytes: size of every block but the last.
    """

    origin: str
    seq: int
    path: str
    size_bytes: int
    block_bytes: int
    expires: int


@dataclass(frozen=True)
class Opened:
    """The transfer number, valid with the store's epoch, and the blocks that are there already."""

    tid: int
    epoch: str
    staged: tuple[Range, ...] = ()


@dataclass(frozen=True)
class Attach:
    """First frame of a connection that carries BLOCKs of one transfer and nothing else."""

    tid: int


@dataclass(frozen=True)
class Get:
    """First frame of a connection on which a published file comes back from a block on: FOUND, then BLOCKs."""

    path: str
    first_block: int = 0


@dataclass(frozen=True)
class Found:
    """The published file that the BLOCKs behind this frame belong to."""

    size_bytes: int
    block_bytes: int
    generation: int
    mode: int


@dataclass(frozen=True)
class Staged:
    """Blocks [first, end) whose bytes and record are durable."""

    tid: int
    staged: tuple[Range, ...]


@dataclass(frozen=True)
class NoSpace:
    """Instead of OPENED: the data find no room; ask again after so many seconds."""

    origin: str
    seq: int
    retry_after_s: int


@dataclass(frozen=True)
class Operation:
    """PUBLISH, RENAME, DELETE, MKDIR or SETATTR, the same on every route and every repetition.

    :param after: sequence numbers that must be final before. :param parents: directories above are made if missing.
    :param manifest: SHA-256 over the digests of all blocks in order. :param mode: permissions.
    """

    origin: str
    seq: int
    kind: str
    path: str
    expires: int
    target: str = ""
    after: tuple[int, ...] = ()
    absent: bool = False
    generation: int = -1
    tid: int = 0
    size_bytes: int = 0
    blocks: int = 0
    manifest: str = ""
    parents: bool = False
    mode: int = 0o644
    priority: int = 0


@dataclass(frozen=True)
class Result:
    """The final answer for an operation, repeated as often as it is asked for."""

    origin: str
    seq: int
    outcome: str
    reason: str = ""
    generation: int = 0


@dataclass(frozen=True)
class Custody:
    """COMMIT: that router has the operation, its data and a lot for them durably."""

    origin: str
    seq: int
    router: str


@dataclass(frozen=True)
class Status:
    """Ask for the state of an operation."""

    origin: str
    seq: int


@dataclass(frozen=True)
class Cancel:
    """Cancel an operation that is not final; answered by its RESULT."""

    origin: str
    seq: int


@dataclass(frozen=True)
class Low:
    """Every operation of that origin up to ``seq`` is settled: results up to it may be forgotten."""

    origin: str
    seq: int


@dataclass(frozen=True)
class Credit:
    """So many more bytes of that transfer may be sent: buffers for them exist."""

    tid: int
    size_bytes: int


Message = Union[
    Hello, Welcome, Prove, Refuse, Open, Opened, NoSpace, Attach, Get, Found, Staged, Operation, Result, Custody,
    Status, Cancel, Low, Credit,
]  # fmt: skip

TYPES: dict[type[Any], Type] = {
    Hello: Type.HELLO,
    Welcome: Type.WELCOME,
    Prove: Type.PROVE,
    Refuse: Type.REFUSE,
    Open: Type.OPEN,
    Opened: Type.OPENED,
    NoSpace: Type.NOSPACE,
    Attach: Type.ATTACH,
    Get: Type.GET,
    Found: Type.FOUND,
    Staged: Type.STAGED,
    Operation: Type.OPERATION,
    Result: Type.RESULT,
    Custody: Type.CUSTODY,
    Status: Type.STATUS,
    Cancel: Type.CANCEL,
    Low: Type.LOW,
    Credit: Type.CREDIT,
}
_BY_TYPE = {kind: cls for cls, kind in TYPES.items()}

_WORDS = {
    "kind": ("publish", "rename", "delete", "mkdir", "setattr"),
    "outcome": ("done", "failed", "cancelled", "expired", "stale", "lost"),
}
_LEAST = {"generation": -1, "size_bytes": -1, "retry_after_s": -1}


def to_meta(message: Message) -> dict[str, Any]:
    """Fields of a message, as they travel."""
    return asdict(message)


def encode(message: Message, checksum: Checksum) -> bytes:
    """The whole frame of a message."""
    payload = encode_meta(to_meta(message))
    return encode_header(TYPES[type(message)], payload, checksum) + payload


def decode(frame: Frame) -> Message:
    """The message in a frame; raises BadFrame."""
    meta, tail = decode_meta(frame.payload)
    if tail:
        raise BadFrame(f"bytes behind the meta data of {frame.header.type.name}")
    return from_meta(frame.header.type, meta)


def from_meta(kind: Type, meta: Mapping[str, Any]) -> Message:
    """The message of a frame; raises BadFrame."""
    cls = _BY_TYPE.get(kind)
    if cls is None:
        raise BadFrame(f"{kind.name} is not a message")
    hints = get_type_hints(cls)
    values = {}
    for item in fields(cls):
        if item.name in meta:
            values[item.name] = _READERS[hints[item.name]](item.name, meta[item.name])
    try:
        return cls(**values)  # type: ignore[no-any-return]
    except TypeError:
        missing = sorted(item.name for item in fields(cls) if item.name not in meta)
        raise BadFrame(f"{kind.name} lacks one of {', '.join(missing)}") from None


def proof(key: bytes, side: str, hello: Hello, welcome: Welcome) -> str:
    """What shows that a side ("welcome", or "hello" for its answer) has the key: bound to both nonces and choices."""
    parts = (side, hello.node, hello.nonce, hello.key, welcome.node, welcome.nonce, welcome.checksum, welcome.digest)
    return hmac.new(key, "\0".join(parts).encode(), "sha256").hexdigest()


def _number(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not _LEAST.get(name, 0) <= value <= MAX_NUMBER:
        raise BadFrame(f"{name} is not a number that the protocol allows")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadFrame(f"{name} is neither true nor false")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or len(value.encode(errors="surrogateescape")) > MAX_PATH_BYTES or "\0" in value:
        raise BadFrame(f"{name} is not a text of at most {MAX_PATH_BYTES} bytes")
    if name in _WORDS and value not in _WORDS[name]:
        raise BadFrame(f"{name} {value!r} is not one of {', '.join(_WORDS[name])}")
    return value


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > 16:
        raise BadFrame(f"{name} is not a short list")
    return tuple(_text(name, item) for item in value)


def _numbers(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_AFTER:
        raise BadFrame(f"{name} is not a list of at most {MAX_AFTER} numbers")
    return tuple(_number(name, item) for item in value)


def _ranges(name: str, value: Any) -> tuple[Range, ...]:
    if not isinstance(value, list) or len(value) > MAX_RANGES:
        raise BadFrame(f"{name} is not a list of at most {MAX_RANGES} ranges")
    found: list[Range] = []
    for item in value:
        if not isinstance(item, list) or len(item) != 2:
            raise BadFrame(f"{name} has something that is not a range")
        first, end = (_number(name, number) for number in item)
        if not (found[-1][1] if found else -1) < first < end:
            raise BadFrame(f"{name} is not in order")
        found.append((first, end))
    return tuple(found)


_READERS = {
    int: _number,
    bool: _flag,
    str: _text,
    tuple[str, ...]: _texts,
    tuple[int, ...]: _numbers,
    tuple[Range, ...]: _ranges,
}
