"""Packs: many small files in one frame. No I/O; described in docs/WIRE.md.

Behind the meta data (:class:`~stageout.wire.overlay.Pack`) come the digests of all files, 16 bytes each, then their
data, both in order and without gaps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from stageout.wire import frames, overlay
from stageout.wire.fields import MAX_ENTRIES, MAX_NUMBER
from stageout.wire.frames import BadFrame, Buffer, Checksum, Frame, Type
from stageout.wire.overlay import Pack

MAX_FILE_BYTES = 64 * 1024
MAX_PACK_BYTES = 1024 * 1024
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
    meta = frames.encode_meta(overlay.to_meta(pack))
    frame = bytearray().join((bytes(frames.HEADER_BYTES), meta, *digests, *data))
    with memoryview(frame) as whole:
        whole[: frames.HEADER_BYTES] = frames.encode_header(Type.PACK, whole[frames.HEADER_BYTES :], checksum)
    return frame


def decode(frame: Frame) -> tuple[Pack, list[PackedFile]]:
    """A pack and its files, whose data are views of the frame; raises BadFrame."""
    meta, tail = frames.decode_meta(frame.payload)
    pack = overlay.from_meta(frame.header.type, meta)
    if not isinstance(pack, Pack):
        raise BadFrame("this is no pack")
    count = len(pack.paths)
    if not count or len(pack.sizes_bytes) != count or len(pack.modes) != count:
        raise BadFrame("the columns of a pack are not of one length, or empty")
    total_bytes = sum(pack.sizes_bytes)
    if max(pack.sizes_bytes) > MAX_FILE_BYTES or total_bytes > MAX_PACK_BYTES or pack.seq + count > MAX_NUMBER:
        raise BadFrame("a pack holds more than the protocol allows")
    if len(tail) != count * DIGEST_BYTES + total_bytes:
        raise BadFrame("the data of a pack are not those that it names")
    if pack.manifest != manifest([bytes(tail[: count * DIGEST_BYTES])]):
        raise BadFrame("the digests of a pack are not those of its manifest")
    return pack, _files(pack, tail)


def refused(pack: Pack, why: str) -> overlay.Packed:
    """The answer when none of its files is taken; the reason for as many as there is room for."""
    count = len(pack.paths)
    told = min(count, _REASONS_BYTES // (len(json.dumps(why)) + 1))
    return overlay.Packed(
        pack.origin, pack.seq, (0,) * count, tuple(range(count)), ("failed",) * count, (why,) * told
    )  # fmt: skip


def manifest(digests: Sequence[bytes]) -> str:
    """What stands for the content of a pack's files."""
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _files(pack: Pack, tail: memoryview) -> list[PackedFile]:
    count = len(pack.paths)
    first = count * DIGEST_BYTES
    starts = range(0, first, DIGEST_BYTES)
    digests = map(bytes(tail[:first]).__getitem__, map(slice, starts, range(DIGEST_BYTES, first + 1, DIGEST_BYTES)))
    ends = list(accumulate(pack.sizes_bytes, initial=first))
    data = map(tail.__getitem__, map(slice, ends, ends[1:]))
    return list(map(PackedFile, range(pack.seq, pack.seq + count), pack.paths, pack.modes, digests, data))
