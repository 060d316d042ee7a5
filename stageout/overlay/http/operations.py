"""Operations in requests: JSON and the records of the rules, states in answers, and digests of blocks. Pure."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Union

from stageout.overlay.http.heads import Refused
from stageout.overlay.http.names import decoded, encoded
from stageout.overlay.rules.operations import BATCH_FILES, MAX_SEQ, Fields, Kind, Malformed, check_batch, check_ranges
from stageout.overlay.rules.states import State

Buffer = Union[bytes, bytearray, memoryview]
#: Ranges begin on this grid, and a digest of a file's list is of so many bytes; the last one has fewer.
BLOCK_BYTES = 1 << 20
#: Of a body with fields or a signature.
MOST_FIELDS_BYTES = 64 * 1024
#: Of the largest file: 16 TiB.
MOST_BLOCKS = 1 << 24
#: Folder of requests about operations.
FOLDER = "/.stageout/v1"
BATCH_TYPE, FIELDS_TYPE, SIGNED_TYPE = "application/vnd.stageout.batch", "application/json", "application/jose"

_ORIGIN = re.compile(r"[0-9a-f]{32}")
_NUMBER = re.compile(r"[1-9][0-9]{0,18}")
_NAME = re.compile(r"[A-Za-z0-9._:\[\]-]{1,255}")
#: None, no such name, or a version of it.
_PRECONDITION = re.compile(r'|absent|"[\x21\x23-\x7e]{1,200}"')
_MEMBERS = tuple(one.name for one in dataclasses.fields(Fields))


#: Bytes of a digest of each kind, cheapest first.
SIZES: Mapping[str, int] = {"xxh3": 16, "sha-256": 32, "blake2b": 32}


class DigestKind(NamedTuple):
    """A kind of digests of blocks. :param size_bytes: of one digest."""

    size_bytes: int
    of: Callable[[Buffer], bytes]


def _xxh3() -> Callable[[Buffer], bytes]:
    import xxhash

    return xxhash.xxh3_128_digest


def digest_kinds() -> dict[str, DigestKind]:
    """Return the kinds of digests that this machine can compute: xxh3 needs the package xxhash."""
    found: dict[str, DigestKind] = {}
    with contextlib.suppress(ImportError):
        found["xxh3"] = DigestKind(16, _xxh3())
    found["sha-256"] = DigestKind(32, lambda data: hashlib.sha256(data).digest())
    found["blake2b"] = DigestKind(32, lambda data: hashlib.blake2b(data, digest_size=32).digest())
    return found


def root(block_list: Buffer) -> str:
    """Return the digest of a block list, for the signature."""
    return hashlib.sha256(block_list).hexdigest()


def blocks_of(size: int) -> int:
    """Return the number of blocks of a file."""
    return -(-size // BLOCK_BYTES)


def place(origin: str, seq: int | None = None, last: int | None = None) -> str:
    """Return the path of an origin, of one operation, or of a batch."""
    end = "" if seq is None else f"/{seq}" if last is None else f"/{seq}-{last}"
    return f"{FOLDER}/o/{origin}{end}"


def to_json(fields: Fields) -> bytes:
    """Return fields in the one form that is sent and signed."""
    said = dataclasses.asdict(fields)
    said["kind"] = fields.kind.value
    said["path"] = encoded(fields.path)
    said["second"] = encoded(fields.second) if fields.second else ""
    said["after"] = list(fields.after)
    return json.dumps(said, sort_keys=True, separators=(",", ":")).encode()


def from_json(data: bytes) -> Fields:
    """Read fields. :raises Refused: 400: a member is missing, unknown, of another type or outside its range."""
    said = json_object(data, MOST_FIELDS_BYTES)
    if said.keys() != set(_MEMBERS):
        wrong = sorted(said.keys() ^ set(_MEMBERS))
        raise Refused(400, f"members of the operation are missing or unknown: {', '.join(wrong)[:200]}")
    try:
        found = Fields(
            origin=origin_of(said["origin"]),
            seq=whole(said["seq"], "seq"),
            kind=Kind(said["kind"]),
            path=_path(said["path"], "path"),
            terminal=_matching(_NAME, said["terminal"], "terminal"),
            made=whole(said["made"], "made"),
            expires=whole(said["expires"], "expires"),
            size=None if said["size"] is None else whole(said["size"], "size"),
            second=_path(said["second"], "second") if said["second"] != "" else "",
            after=tuple(whole(one, "after") for one in _list(said["after"])),
            all_below=whole(said["all_below"], "all_below"),
            precondition=_matching(_PRECONDITION, said["precondition"], "precondition"),
            block_kind=_text(said["block_kind"], "block_kind"),
            digest_kind=_text(said["digest_kind"], "digest_kind"),
            mode=whole(said["mode"], "mode"),
            mtime=whole(said["mtime"], "mtime", least=-MAX_SEQ),
        )
        check_ranges(found)
    except Malformed as problem:
        raise Refused(400, str(problem)) from None
    except (ValueError, TypeError):
        raise Refused(400, "this kind of operation is not known") from None
    _check_shape(found)
    return found


def _check_shape(fields: Fields) -> None:
    """:raises Refused: 400."""
    if not fields.path or (fields.kind is Kind.RENAME) != bool(fields.second):
        raise Refused(400, "an operation has a path, and only a rename has a second one")
    if fields.kind is not Kind.FILE and fields.size is not None:
        raise Refused(400, "only a file has a size")
    if not 0 <= fields.mode <= 0o7777:
        raise Refused(400, "mode lies outside its range")
    if not {fields.block_kind, fields.digest_kind} <= set(SIZES):
        raise Refused(400, f"digests are of these kinds: {', '.join(SIZES)}")
    if blocks_of(fields.size or 0) > MOST_BLOCKS:
        raise Refused(413, "the file has too many blocks")


#: Bytes of the line of a batch.
MOST_LINE_BYTES = 2 << 20


def batch_of(line: bytes, origin: str, first: int, last: int) -> list[tuple[Fields, bytes]]:
    """Read the line of a batch: fields and digest of each file. :raises Refused: 400 or 413."""
    said = json_object(line, MOST_LINE_BYTES)
    if said.keys() != {"terminal", "made", "expires", "digest_kind", "files"}:
        raise Refused(400, "members of the batch are missing or unknown")
    terminal, kind = _matching(_NAME, said["terminal"], "terminal"), _text(said["digest_kind"], "digest_kind")
    made, expires = whole(said["made"], "made"), whole(said["expires"], "expires")
    if kind not in SIZES or not isinstance(said["files"], list) or len(said["files"]) > BATCH_FILES:
        raise Refused(400, "a batch has a list of files, and digests of a known kind")
    found: list[tuple[Fields, bytes]] = []
    for at, one in enumerate(said["files"]):
        if not isinstance(one, dict) or one.keys() != {"path", "size", "mode", "mtime", "digest"}:
            raise Refused(400, "members of a file are missing or unknown")
        fields = Fields(
            origin, first + at, Kind.FILE, _path(one["path"], "path"), terminal, made, expires,
            size=whole(one["size"], "size"), block_kind=kind, digest_kind=kind, mode=whole(one["mode"], "mode"),
            mtime=whole(one["mtime"], "mtime", least=-MAX_SEQ),
        )  # fmt: skip
        _check_shape(fields)
        digests = digests_of(_text(one["digest"], "digest"), SIZES[kind])
        if len(digests) != 1:
            raise Refused(400, "each file has its digest")
        found.append((fields, digests[0]))
    try:
        for fields, _ in found[:1] + found[-1:]:
            check_ranges(fields)
        check_batch(first, last, [fields for fields, _ in found])
    except Malformed as problem:
        raise Refused(400, str(problem)) from None
    return found


def origin_of(value: object) -> str:
    """Check an origin. :raises Refused: 400."""
    return _matching(_ORIGIN, value, "origin")


def seq_of(text: str) -> int:
    """Read a number of an operation in a path. :raises Refused: 400."""
    if not _NUMBER.fullmatch(text) or int(text) > MAX_SEQ:
        raise Refused(400, "the number of an operation lies outside its range")
    return int(text)


def whole(value: object, name: str, least: int = 0) -> int:
    """Check a number of JSON. :raises Refused: 400."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_SEQ:
        raise Refused(400, f"{name} is a whole number in its range")
    return value


def json_object(data: bytes, most_bytes: int) -> dict[str, Any]:
    """Read an object. :raises Refused: 400 or 413: it is none, has a member twice, or is too long."""
    found = json_value(data, most_bytes)
    if not isinstance(found, dict):
        raise Refused(400, "the body is a JSON object")
    return found


def json_value(data: bytes, most_bytes: int) -> Any:
    """Read JSON of others. :raises Refused: 400 or 413."""
    if len(data) > most_bytes:
        raise Refused(413, f"the body has at most {most_bytes} bytes")
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_once, parse_int=_int, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise Refused(400, "the body is malformed JSON") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a member is there twice")
    return found


def _int(text: str) -> int:
    if len(text) > 20:
        raise ValueError("the number is too long")
    return int(text)


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise Refused(400, f"{name} is a text")
    return value


def _path(value: object, name: str) -> str:
    text = _text(value, name)
    if not text.startswith("/"):
        raise Refused(400, f"{name} begins with a slash")
    return decoded(text)


def _matching(pattern: re.Pattern[str], value: object, name: str) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise Refused(400, f"{name} is malformed")
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise Refused(400, "after is a list")
    return value


Ranges = tuple[tuple[int, int], ...]


def ranges(numbers: Iterable[int]) -> Ranges:
    """Return numbers in rising order as ranges (first, last)."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] + 1 == number:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return tuple(found)


@dataclass(frozen=True)
class Status:
    """State of an operation as a router tells it. :param state: a value of :class:`State`, or ``unknown``.

    :param have: durable blocks. :param epoch: of the terminal. :param missing: numbers for which it waits.
    :param custodians: routers that keep it, or brought it.
    """

    state: str
    reason: str = ""
    etag: str = ""
    have: Ranges = ()
    epoch: int = 0
    missing: tuple[int, ...] = ()
    custodians: tuple[str, ...] = ()

    def facts(self) -> dict[str, object]:
        """Return the object of an answer. Empty members are left out."""
        found: dict[str, object] = {"state": self.state}
        rest = {
            "reason": self.reason, "etag": self.etag, "have": [list(one) for one in self.have], "epoch": self.epoch,
            "missing": list(self.missing), "custodians": list(self.custodians),
        }  # fmt: skip
        found.update((name, value) for name, value in rest.items() if value)
        return found


UNKNOWN = Status("unknown")
_STATES = frozenset(one.value for one in State) | {UNKNOWN.state}


def status_of(facts: Mapping[str, Any]) -> Status:
    """Read the state in an answer. :raises ValueError: it is none."""
    if facts.get("state") not in _STATES:
        raise ValueError("this is no state of an operation")
    try:
        have = tuple((int(first), int(last)) for first, last in facts.get("have", ()))
        return Status(
            str(facts["state"]), str(facts.get("reason", "")), str(facts.get("etag", "")), have,
            int(facts.get("epoch", 0)), tuple(map(int, facts.get("missing", ()))),
            tuple(map(str, facts.get("custodians", ()))),
        )  # fmt: skip
    except TypeError:
        raise ValueError("this is no state of an operation") from None


def digests_text(digests: Sequence[bytes]) -> str:
    """Return the value of ``Stageout-Blocks``."""
    return ",".join(one.hex() for one in digests)


def digests_of(text: str, size_bytes: int) -> list[bytes]:
    """Read ``Stageout-Blocks``. :param size_bytes: of one digest. :raises Refused: 400."""
    try:
        found = [bytes.fromhex(one) for one in text.split(",")] if text else []
    except ValueError:
        raise Refused(400, "Stageout-Blocks is malformed") from None
    if any(len(one) != size_bytes for one in found):
        raise Refused(400, "Stageout-Blocks has digests of another kind")
    return found


_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")


def content_range(text: str, size: int | None) -> tuple[int, int]:
    """Read the range of a part of a file: its begin, and the byte behind it. :param size: of the file, if known.

    :raises Refused: 400: it is off the grid, or outside the file. 409: it says another size.
    """
    found = _CONTENT_RANGE.fullmatch(text)
    if found is None:
        raise Refused(400, "Content-Range is 'bytes FIRST-LAST/SIZE'")
    first, end = int(found[1]), int(found[2]) + 1
    said = None if found[3] == "*" else int(found[3])
    if said is not None and size is not None and said != size:
        raise Refused(409, "the operation has another size")
    known = size if size is not None else said
    if first % BLOCK_BYTES or end <= first or end > (MOST_BLOCKS * BLOCK_BYTES if known is None else known):
        raise Refused(400, f"a range begins on the grid of {BLOCK_BYTES} bytes and lies in the file")
    return first, end
