"""Messages of the overlay: what the meta data of each frame mean. Described in docs/developer/wire.md; no I/O.

Reading is strict: a missing or ill-typed field, a number out of its range or an unknown word raises BadFrame, so the
parties behind it only ever see values that the protocol allows. Unknown fields are ignored, for later versions.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Union, get_type_hints

from stageout.overlay.wire.fields import BLOCK_BYTES as BLOCK_BYTES
from stageout.overlay.wire.fields import MAX_LINKS as MAX_LINKS
from stageout.overlay.wire.fields import MAX_NUMBER as MAX_NUMBER
from stageout.overlay.wire.fields import MAX_RANGES as MAX_RANGES
from stageout.overlay.wire.fields import READERS
from stageout.overlay.wire.fields import Range as Range
from stageout.overlay.wire.frames import BadFrame, Checksum, Frame, Type, decode_meta, encode_header, encode_meta
from stageout.overlay.wire.leases import Lease as Lease
from stageout.overlay.wire.leases import Leased as Leased
from stageout.overlay.wire.leases import Lot as Lot
from stageout.overlay.wire.leases import Reserved as Reserved
from stageout.overlay.wire.link_state import Heartbeat as Heartbeat
from stageout.overlay.wire.link_state import Known as Known
from stageout.overlay.wire.link_state import Links as Links
from stageout.overlay.wire.link_state import Probe as Probe
from stageout.overlay.wire.link_state import Probed as Probed
from stageout.overlay.wire.link_state import Routed as Routed
from stageout.overlay.wire.link_state import Routes as Routes
from stageout.overlay.wire.pack_gets import FoundPack as FoundPack
from stageout.overlay.wire.pack_gets import GetPack as GetPack

MAX_PROBE_BYTES = 8 * 1024 * 1024
#: Clocks further apart than this make ``expires`` meaningless: no custody (section 2, "the late router").
MAX_CLOCK_SKEW_S = 600
#: The answer to such a pair.
CLOCKS_APART = "the clocks are more than ten minutes apart"


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
    """Answer to HELLO: what was chosen, and the proof that this side has the key (:func:`proof`).

    :param store: epoch of the records of what was executed there: another one, and the old ones are lost. "" for none.
    :param cancels: it heeds what a PACK says is cancelled. :param packs: it answers a GET_PACK, and :param parts: a
        GET of a part. :param packed_bytes: of the largest file that it takes in a PACK; 0: 64 KiB.
    """

    node: str
    nonce: str
    checksum: str
    digest: str
    clock: int
    proof: str = ""
    store: str = ""
    cancels: bool = False
    packs: bool = False
    parts: bool = False
    packed_bytes: int = 0


@dataclass(frozen=True)
class Prove:
    """Answer to WELCOME: the proof that the side that connected has the key."""

    proof: str


@dataclass(frozen=True)
class Refuse:
    """The last frame of a connection: why, and after how many seconds to try again (negative: never).

    :param code: number of the class of the failure (:class:`~stageout.core.errors.ErrorClass`), 0: not said.
    """

    message: str
    retry_after_s: int = -1
    code: int = 0


@dataclass(frozen=True)
class Via:
    """First frame of a connection to be passed on: to ``route[0]``, which hears VIA with the rest; none: the end.

    Behind it everything begins anew with a HELLO to the end, checked with CRC-32 as on a connection just made.

    :param flow: the transfer, the same on all its connections; "" for one of its own. :param owner: on whose behalf, as
        the first relay says; only routers are believed. :param priority: 0 to 10.
    :param deadline: Unix time in seconds, 0 for none. :param back: they are for what comes back (after a GET).
    """

    route: tuple[str, ...]
    flow: str = ""
    owner: str = ""
    priority: int = 0
    deadline: int = 0
    back: bool = False


@dataclass(frozen=True)
class Open:
    """Ask for a transfer number (tid) for the data of one PUBLISH to come.

    :param size_bytes: of the whole file. :param block_bytes: size of every block but the last.
    :param terminal: ``HOST:PORT`` of the router where the file shall arrive; "" when it is the one that is asked.
    :param capability: and the signature of its holder over what is asked (:mod:`stageout.overlay.wire.capability`).
    :param lot: that the space is taken from, "" for what is free.
    :param warrant: of who commanded a copy that this router carries out (:mod:`stageout.overlay.wire.warrant`).
    :param standby_s: as of the OPERATION to come. :param release: the same; where that is not known yet, "custody".
    """

    origin: str
    seq: int
    path: str
    size_bytes: int
    block_bytes: int
    expires: int
    terminal: str = ""
    capability: str = ""
    signature: str = ""
    lot: str = ""
    warrant: str = ""
    standby_s: int = 0
    release: str = "custody"


@dataclass(frozen=True)
class Opened:
    """The transfer number, valid with the store's epoch, and the blocks that are there already.

    :param keeps: a connection that carried BLOCKs takes another ATTACH or GET behind them.
    :param parts: blocks may come in PARTs, each by another connection.
    """

    tid: int
    epoch: str
    staged: tuple[Range, ...] = ()
    keeps: bool = False
    parts: bool = False


@dataclass(frozen=True)
class Attach:
    """First frame of a connection that carries BLOCKs of one transfer; another one may follow (OPENED, ``keeps``)."""

    tid: int


@dataclass(frozen=True)
class Get:
    """First frame of a connection on which a published file comes back: FOUND, BLOCKs in order. Another may follow.

    :param blocks: how many at most, 0: all. :param generation: the version that is wanted, -1: whatever is there.
    :param capability: as of a STAT. :param terminal: as of a STAT.
    :param priority: and :param deadline: as of a VIA, among what one key asks for.
    :param waits: HEARTBEATs may come before FOUND, while the router fetches the file itself.
    :param flow: as of a VIA: all connections by which one file is fetched have the same one, "" for one of its own.
    :param start: and :param end: of a part of one block, in bytes, where WELCOME had ``parts``: a PART comes, and no
        BLOCK. An end of 0: all of it.
    """

    path: str
    first_block: int = 0
    blocks: int = 0
    generation: int = -1
    capability: str = ""
    signature: str = ""
    terminal: str = ""
    priority: int = 0
    deadline: int = 0
    waits: bool = False
    flow: str = ""
    start: int = 0
    end: int = 0


@dataclass(frozen=True)
class Found:
    """The published file that the BLOCKs behind this frame belong to.

    :param manifest: SHA-256 over the digests of all its blocks when it was published, "" where that is not known, or it
        was changed since. :param digest: their kind, that of WELCOME; "" without a manifest.
    :param segments: what the connection has sent so far (:attr:`stageout.overlay.tcp.Segments.numbers`).
    """

    size_bytes: int
    block_bytes: int
    generation: int
    mode: int
    manifest: str = ""
    digest: str = ""
    segments: tuple[int, ...] = ()


@dataclass(frozen=True)
class Stat:
    """Ask what a name is: answered by one ANSWER with one entry, its generation beside it.

    :param capability: and the signature of its holder over what is asked on this connection, "" for the key's rights.
    :param terminal: ask a custodian for the newest file that it has on its way there, "" for what is in its own tree.
    """

    path: str
    capability: str = ""
    signature: str = ""
    terminal: str = ""


@dataclass(frozen=True)
class List:
    """Ask for the names in a directory ("" is the root), in no order; the last ANSWER has no ``more``.

    :param capability: as of a STAT.
    """

    path: str
    capability: str = ""
    signature: str = ""


@dataclass(frozen=True)
class Answer:
    """Entries of a directory, or one that was asked for; or why there are none.

    :param kinds: "file", "directory", "link" or "other". :param modified: Unix time in seconds.
    :param code: 0, or the number of the class of failure (:class:`~stageout.core.errors.ErrorClass`).
    :param store: to a STAT: epoch of the store there. :param bearer: to a STAT: name of the key by which other routers
        know this one, if it carries out copies. :param note: how it is known, where that is not from the file itself.
    :param manifest: to a STAT: as of a FOUND, of whatever kind. :param digest: that kind.
    """

    names: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    sizes_bytes: tuple[int, ...] = ()
    modes: tuple[int, ...] = ()
    modified: tuple[int, ...] = ()
    generation: int = 0
    more: bool = False
    code: int = 0
    message: str = ""
    store: str = ""
    bearer: str = ""
    note: str = ""
    manifest: str = ""
    digest: str = ""


@dataclass(frozen=True)
class Staged:
    """Blocks [first, end) whose bytes and record are durable.

    :param epoch: of the OPENED that it belongs to: behind another one it says nothing any more. "": it holds for ever.
    """

    tid: int
    staged: tuple[Range, ...]
    epoch: str = ""


@dataclass(frozen=True)
class NoSpace:
    """Instead of OPENED: the data find no room; ask again after so many seconds."""

    origin: str
    seq: int
    retry_after_s: int


@dataclass(frozen=True)
class Operation:
    """PUBLISH, RENAME, DELETE, MKDIR or SETATTR, the same on every route and every repetition.

    :param after: sequence numbers that must be final before.
    :param parents: directories above (of a RENAME: above its target) are made if missing.
    :param manifest: SHA-256 over the digests of all blocks in order. :param mode: permissions.
    :param capability: as in OPEN.
    :param attributes: what SETATTR changes: "mode", "size" (a file can be cut, never made longer), or both.
    :param terminal: as in OPEN; another router takes the operation into custody. :param release: "delivered" (the
        sender keeps its bytes until RESULT) or "custody" (until CUSTODY).
    :param priority: larger goes first. :param deadline: Unix time in seconds by which it should be there, 0 for none.
    :param warrant: as in OPEN.
    :param standby_s: another custodian delivers it, too: one that holds it asks the terminal only whether that has
        happened, for so long after it took it. :param copies: custodians that have it, this one among them.
    :param may_exist: MKDIR of a directory that is there is DONE.
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
    attributes: tuple[str, ...] = ("mode",)
    terminal: str = ""
    release: str = "delivered"
    capability: str = ""
    signature: str = ""
    deadline: int = 0
    warrant: str = ""
    standby_s: int = 0
    copies: int = 1
    may_exist: bool = False


@dataclass(frozen=True)
class Copy:
    """Have the router that is asked bring a published file of its own to another one, as this operation there.

    Answered by CUSTODY when that is its duty, by COPYING as it goes on, and by RESULT.

    :param source: the file here. :param source_generation: its version. :param terminal: ``HOST:PORT`` of the other.
    :param path: its new name there; the other fields as of the OPERATION. :param warrant: what that router judges by.
    :param read_capability: as of a GET of ``source``, with its signature.
    """

    origin: str
    seq: int
    source: str
    source_generation: int
    terminal: str
    path: str
    size_bytes: int
    mode: int
    expires: int
    warrant: str
    capability: str = ""
    absent: bool = False
    generation: int = -1
    read_capability: str = ""
    read_signature: str = ""


@dataclass(frozen=True)
class Copying:
    """How far a copy has come. :param problem: why it stands still now, "" if it does not. :param code: its class."""

    origin: str
    seq: int
    moved_bytes: int
    size_bytes: int
    problem: str = ""
    code: int = 0


@dataclass(frozen=True)
class Pack:
    """Small whole files in one frame, numbered from ``seq`` on; digests and data follow, as of :mod:`packs`.

    Each is an operation of its own that depends on no other; missing directories are made, a file is replaced.

    :param manifest: SHA-256 over the digests of all files in order.
    :param terminal: as in OPEN; another router takes all of it into custody. :param release: as of an OPERATION.
    :param after: numbers of the same origin that must be final before a custodian delivers it.
    :param cancelled: numbers in it that are not wanted any more. :param priority: :param deadline: as of an OPERATION.
    """

    origin: str
    seq: int
    expires: int
    paths: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    modes: tuple[int, ...]
    manifest: str
    capability: str = ""
    signature: str = ""
    terminal: str = ""
    release: str = "delivered"
    after: tuple[int, ...] = ()
    cancelled: tuple[int, ...] = ()
    priority: int = 0
    deadline: int = 0


@dataclass(frozen=True)
class Packed:
    """The results of a pack's files: the generation of each name, 0 for those that failed.

    :param failed: positions of those. :param outcomes: their outcomes; "pending": the disk is full, and the reason says
        whether it is known that they were not executed ("space", else "unrecorded").
    :param reasons: why, of the first of them. :param codes: classes of these failures, as of a
        RESULT; empty where none is said.
    """

    origin: str
    seq: int
    generations: tuple[int, ...]
    failed: tuple[int, ...] = ()
    outcomes: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    codes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Result:
    """The final answer for an operation, repeated as often as it is asked for.

    Two outcomes answer a STATUS only and are not final: "pending" (it is known here) and "unknown" (it is not).

    :param code: number of the class of a failure (:class:`~stageout.core.errors.ErrorClass`), 0: the reason says it.
    """

    origin: str
    seq: int
    outcome: str
    reason: str = ""
    generation: int = 0
    code: int = 0


@dataclass(frozen=True)
class Custody:
    """COMMIT: that router has the operation, its data and a lot for them durably."""

    origin: str
    seq: int
    router: str


@dataclass(frozen=True)
class Status:
    """Ask for the state of an operation: RESULT, CUSTODY where a custodian has it, else STAGED while data come.

    :param files: of so many files of a pack, from ``seq`` on: PACKED when all are final, CUSTODY, or a RESULT that says
        "pending" or "unknown". 0: of one operation.
    """

    origin: str
    seq: int
    files: int = 0


@dataclass(frozen=True)
class Cancel:
    """Cancel an operation that is not final; answered by its RESULT.

    :param data_only: only the data that this sender has brought are dropped: the operation may come again. Answered as
        a STATUS is.
    """

    origin: str
    seq: int
    data_only: bool = False


@dataclass(frozen=True)
class Low:
    """Every operation of that origin up to ``seq`` is settled: results up to it may be forgotten."""

    origin: str
    seq: int


Message = Union[
    Hello, Welcome, Prove, Refuse, Via, Open, Opened, NoSpace, Attach, Get, Found, Stat, List, Answer, Staged,
    Operation, Copy, Copying, Pack, Packed, Result, Custody, Status, Cancel, Low, Heartbeat, Links, Routes,
    Routed, Known, Probe, Probed, Lot, Reserved, Lease, Leased, GetPack, FoundPack,
]  # fmt: skip

TYPES: dict[type[Any], Type] = {
    Hello: Type.HELLO,
    Welcome: Type.WELCOME,
    Prove: Type.PROVE,
    Via: Type.VIA,
    Refuse: Type.REFUSE,
    Open: Type.OPEN,
    Opened: Type.OPENED,
    NoSpace: Type.NOSPACE,
    Attach: Type.ATTACH,
    Get: Type.GET,
    Found: Type.FOUND,
    GetPack: Type.GET_PACK,
    FoundPack: Type.FOUND_PACK,
    Stat: Type.STAT,
    List: Type.LIST,
    Answer: Type.ANSWER,
    Staged: Type.STAGED,
    Operation: Type.OPERATION,
    Result: Type.RESULT,
    Copy: Type.COPY,
    Copying: Type.COPYING,
    Pack: Type.PACK,
    Packed: Type.PACKED,
    Custody: Type.CUSTODY,
    Status: Type.STATUS,
    Cancel: Type.CANCEL,
    Low: Type.LOW,
    Lot: Type.LOT,
    Reserved: Type.RESERVED,
    Lease: Type.LEASE,
    Leased: Type.LEASED,
    Heartbeat: Type.HEARTBEAT,
    Links: Type.LINKS,
    Routes: Type.ROUTES,
    Routed: Type.ROUTED,
    Known: Type.KNOWN,
    Probe: Type.PROBE,
    Probed: Type.PROBED,
}
_BY_TYPE = {kind: cls for cls, kind in TYPES.items()}
#: Types of fields, found at first use: to find them costs more than all else of reading a message.
_HINTS: dict[type[Any], dict[str, Any]] = {}


def to_meta(message: Message) -> dict[str, Any]:
    """Fields of a message, as they travel."""
    return dict(vars(message))  # not asdict, which copies every path of a pack


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
    hints = _HINTS.get(cls) or _HINTS.setdefault(cls, get_type_hints(cls))
    values = {}
    for item in fields(cls):
        if item.name in meta:
            values[item.name] = READERS[hints[item.name]](item.name, meta[item.name])
    try:
        return cls(**values)  # type: ignore[no-any-return]
    except TypeError:
        missing = sorted(item.name for item in fields(cls) if item.name not in meta)
        raise BadFrame(f"{kind.name} lacks one of {', '.join(missing)}") from None


def proof(key: bytes, side: str, hello: Hello, welcome: Welcome) -> str:
    """The proof that a side ("welcome", or "hello" for its answer) has the key: bound to both nonces and choices."""
    parts = (side, hello.node, hello.nonce, hello.key, welcome.node, welcome.nonce, welcome.checksum, welcome.digest)
    said = "\0".join(parts).encode(errors="surrogatepass")  # whatever a stranger calls itself is no error here
    return hmac.new(key, said, "sha256").hexdigest()
