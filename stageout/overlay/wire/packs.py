"""Packs: many small files in one frame. No I/O; described in docs/developer/wire.md.

Behind the meta data (:class:`~stageout.overlay.wire.messages.Pack`) come the digests of all files, 16 bytes each, then
their data, both in order and without gaps. On the way back (:class:`~stageout.overlay.wire.messages.FoundPack`) there
are no digests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from stageout.overlay.wire import frames, messages
from stageout.overlay.wire.fields import MAX_ENTRIES, MAX_NUMBER
from stageout.overlay.wire.frames import BadFrame, Buffer, Checksum, Frame, Type
from stageout.overlay.wire.messages import FoundPack, GetPack, Pack
from stageout.overlay.wire.pack_gets import MAX_ASKED, MAX_ASKED_BYTES
from stageout.wire.deposits import MAX_PACKED_FILE_BYTES

#: Of a file that any router takes in a pack, and gives in one. WELCOME says whether larger ones may come.
MAX_FILE_BYTES = MAX_PACKED_FILE_BYTES
#: Of all files of a pack. A larger one is alone in its pack.
MAX_PACK_BYTES = 1024 * 1024
#: Of a file that this version takes in a pack, unless it goes on to another router, which may be older.
MAX_TAKEN_BYTES = 4 * 1024 * 1024
MAX_FILES = MAX_ENTRIES
#: Bytes of meta data that the paths of a pack may take up; the rest is for its other columns.
MAX_PATHS_BYTES = 128 * 1024
DIGEST_BYTES = 16
#: Of an answer, for the reasons in it: the rest is for its other columns.
_REASONS_BYTES = 192 * 1024


class PackedFile(NamedTuple):
    """One file of a pack."""

    seq: int
    path: str
    mode: int
    digest: bytes
    data: memoryview


def encode(pack: Pack, digests: Sequence[bytes], data: Sequence[Buffer], checksum: Checksum) -> bytearray:
    """The whole frame of a pack, for which the data are copied once."""
    meta = frames.encode_meta(messages.to_meta(pack))
    frame = bytearray().join((bytes(frames.HEADER_BYTES), meta, *digests, *data))
    with memoryview(frame) as whole:
        whole[: frames.HEADER_BYTES] = frames.encode_header(Type.PACK, whole[frames.HEADER_BYTES :], checksum)
    return frame


def decode(frame: Frame) -> tuple[Pack, list[PackedFile]]:
    """A pack and its files, whose data are views of the frame; raises BadFrame."""
    meta, tail = frames.decode_meta(frame.payload)
    pack = messages.from_meta(frame.header.type, meta)
    if not isinstance(pack, Pack):
        raise BadFrame("this is no pack")
    count = len(pack.paths)
    if not count or len(pack.sizes_bytes) != count or len(pack.modes) != count:
        raise BadFrame("the columns of a pack are not of one length, or empty")
    total_bytes = sum(pack.sizes_bytes)
    most_bytes = MAX_FILE_BYTES if pack.terminal else MAX_TAKEN_BYTES
    is_too_much = total_bytes > (most_bytes if count == 1 else MAX_PACK_BYTES)
    if max(pack.sizes_bytes) > most_bytes or is_too_much or pack.seq + count > MAX_NUMBER:
        raise BadFrame("a pack holds more than the protocol allows")
    if len(tail) != count * DIGEST_BYTES + total_bytes:
        raise BadFrame("the data of a pack are not those that it names")
    if pack.manifest != manifest([bytes(tail[: count * DIGEST_BYTES])]):
        raise BadFrame("the digests of a pack are not those of its manifest")
    return pack, _files(pack, tail)


def encode_found(found: FoundPack, data: Sequence[Buffer], checksum: Checksum) -> bytearray:
    """The whole frame of an answer to GET_PACK, for which the data are copied once."""
    frame = bytearray().join((bytes(frames.HEADER_BYTES), frames.encode_meta(messages.to_meta(found)), *data))
    with memoryview(frame) as whole:
        whole[: frames.HEADER_BYTES] = frames.encode_header(Type.FOUND_PACK, whole[frames.HEADER_BYTES :], checksum)
    return frame


def decode_found(frame: Frame, asked: int) -> tuple[FoundPack, list[memoryview]]:
    """An answer to a GET_PACK for so many files, and what is in each, as views of the frame; raises BadFrame."""
    meta, tail = frames.decode_meta(frame.payload)
    found = messages.from_meta(frame.header.type, meta)
    if not isinstance(found, FoundPack):
        raise BadFrame("this is no answer to GET_PACK")
    if not asked == len(found.sizes_bytes) == len(found.modes) == len(found.codes):
        raise BadFrame(f"FOUND_PACK has not one row for each of {asked} files")
    if max(found.sizes_bytes) > MAX_FILE_BYTES or len(tail) > MAX_PACK_BYTES:
        raise BadFrame("a FOUND_PACK holds more than the protocol allows")
    if len(tail) != sum(found.sizes_bytes) or any(size for size, code in zip(found.sizes_bytes, found.codes) if code):
        raise BadFrame("the data of a FOUND_PACK are not those that it names")
    ends = list(accumulate(found.sizes_bytes, initial=0))
    return found, [tail[start:end] for start, end in zip(ends, ends[1:])]


def check_asked(ask: GetPack) -> None:
    """:raises BadFrame: it is for no file, or for more than the protocol allows."""
    if not 0 < len(ask.paths) <= MAX_ASKED or len(json.dumps(ask.paths)) > MAX_ASKED_BYTES:
        raise BadFrame(f"GET_PACK is for 1 to {MAX_ASKED} files, whose paths take up {MAX_ASKED_BYTES} bytes at most")


def refused(pack: Pack, why: str) -> messages.Packed:
    """The answer when none of its files is taken; the reason for as many as there is room for."""
    count = len(pack.paths)
    told = min(count, _REASONS_BYTES // (len(json.dumps(why)) + 1))
    return messages.Packed(
        pack.origin, pack.seq, (0,) * count, tuple(range(count)), ("failed",) * count, (why,) * told
    )  # fmt: skip


def manifest(digests: Sequence[bytes]) -> str:
    """The digest that stands for the content of a pack's files."""
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _files(pack: Pack, tail: memoryview) -> list[PackedFile]:
    count = len(pack.paths)
    first = count * DIGEST_BYTES
    starts = range(0, first, DIGEST_BYTES)
    digests = map(bytes(tail[:first]).__getitem__, map(slice, starts, range(DIGEST_BYTES, first + 1, DIGEST_BYTES)))
    ends = list(accumulate(pack.sizes_bytes, initial=first))
    data = map(tail.__getitem__, map(slice, ends, ends[1:]))
    return list(map(PackedFile, range(pack.seq, pack.seq + count), pack.paths, pack.modes, digests, data))
