"""Files that come in, at a terminal as at a custodian: staging files, and which of their blocks are here.

A block goes this way: *claimed* for a connection before it is written, *received* when its digest was right, *durable*
when the file was synced and the table says so. After a power failure only the durable ones are there.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from overlay_router.operations.table import Stored, Table
from stageout.core import durable
from stageout.overlay.http.operations import BLOCK_BYTES, SIZES, Ranges, blocks_of, ranges
from stageout.overlay.rules.limits import LEASE_S
from stageout.overlay.rules.operations import Identity
from stageout.overlay.rules.states import State

#: A staging file is synced so often, or when so many bytes are not on the disk (6.1).
SYNC_S, SYNC_BYTES = 2.0, 1 << 30
#: Blocks that are one row of the table.
_PART = 1024
_CLAIMED_S = 300.0


class Differs(Exception):
    """409: another digest, or another size, came before."""


class Taken(Exception):
    """503: another connection is bringing this block now."""


class Block(NamedTuple):
    """A block whose digest was right. :param digest: of the block kind. :param listed: of the kind of the list."""

    number: int
    digest: bytes
    listed: bytes


class _Claim(NamedTuple):
    by: object
    digest: bytes
    until_s: float


@dataclass
class Staging:
    """A file that comes in. :param file: open for reading and writing. :ivar size: as far as it is known.

    :ivar due: size, block list and signature, when these came.
    """

    at: int
    file: int
    digest_bytes: int
    listed_bytes: int
    size: int | None
    has: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    digests: bytearray = field(default_factory=bytearray)
    listed: bytearray = field(default_factory=bytearray)
    claims: dict[int, _Claim] = field(default_factory=dict)
    due: tuple[int, bytes, str] | None = None
    is_named: bool = False
    unsynced_bytes: int = 0
    synced_s: float = field(default_factory=time.monotonic)
    came_s: float = field(default_factory=time.monotonic)

    def grow(self, blocks: int) -> None:
        """Have room for so many blocks."""
        more = blocks - len(self.has)
        if more > 0:
            self.has += bytes(more)
            self.durable += bytes(more)
            self.digests += bytes(more * self.digest_bytes)
            self.listed += bytes(more * self.listed_bytes)

    def digest(self, number: int) -> bytes:
        """Return the digest of a block that is here."""
        return bytes(self.digests[number * self.digest_bytes : (number + 1) * self.digest_bytes])

    def is_whole(self, size: int) -> bool:
        """Tell whether all blocks of a file of that size are here, and no more."""
        return len(self.has.rstrip(b"\0")) == blocks_of(size) == self.has.count(1)

    def wrong(self, listed: bytes) -> list[int]:
        """Return the numbers of blocks that are here and differ from a list."""
        width = self.listed_bytes
        if self.listed == listed and 0 not in self.has:
            return []
        return [
            number
            for number in range(len(self.has))
            if self.has[number]
            and self.listed[number * width : (number + 1) * width] != listed[number * width : (number + 1) * width]
        ]


class Receiving:
    """The staging files of one role. :param place: a directory of its own; who publishes needs it beside the tree."""

    def __init__(self, table: Table, place: Path) -> None:
        self._table, self._place = table, place
        with suppress(FileExistsError):
            place.mkdir(mode=0o700)
        self._open: dict[int, Staging] = {}

    def close(self) -> None:
        """Let go of the files."""
        for one in self._open.values():
            os.close(one.file)
        self._open.clear()

    def path(self, identity: Identity) -> Path:
        """Return the place of an operation's bytes."""
        owner = hashlib.sha256(identity.owner.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        return self._place / f"{identity.origin}.{identity.seq}.{owner}"

    def reserve(self, identity: Identity, size: int | None) -> None:
        """Make the file with its space. :raises OSError: nothing is left then."""
        path = self.path(identity)
        with durable.step("operation-reserve"):
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                if size:
                    os.posix_fallocate(file, 0, size)
            except OSError:
                path.unlink()
                raise
            finally:
                os.close(file)

    def staging(self, stored: Stored) -> Staging:
        """Return the open file of a row. :raises OSError: it cannot be opened."""
        found = self._open.get(stored.id)
        if found is None:
            fields = stored.row.fields
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
            if stored.row.state is State.RECEIVING and next(self._table.parts(stored.id), None) is None:
                flags |= os.O_CREAT  # nothing was durable, not even its name
            file = os.open(self.path(stored.row.identity), flags, 0o600)
            found = Staging(stored.id, file, SIZES[fields.block_kind], SIZES[fields.digest_kind], stored.size)
            self._read(found)
            found.due = self._table.block_list(stored.id)
            self._open[stored.id] = found
        return found

    def claim(self, one: Staging, by: object, first: int, count: int, digests: Sequence[bytes]) -> dict[int, bytes]:
        """Let a connection bring blocks: the digests of those that are here already. :param digests: [] for none.

        :raises Differs: a block has another digest here. :raises Taken: another connection brings it.
        """
        now, kept = time.monotonic(), dict[int, bytes]()
        one.came_s = now
        one.grow(first + count)
        for at in range(count):
            number, digest = first + at, digests[at] if digests else b""
            if one.has[number]:
                kept[number] = one.digest(number)
                if digest and digest != kept[number]:
                    raise Differs(f"block {number} has another digest here")
                continue
            claim = one.claims.get(number)
            if claim and claim.by is not by and claim.until_s > now and not (digest and digest == claim.digest):
                raise Taken(f"another connection brings block {number}")
        for at in range(count):
            if first + at not in kept:
                one.claims[first + at] = _Claim(by, digests[at] if digests else b"", now + _CLAIMED_S)
        return kept

    def received(self, one: Staging, by: object, first: int, count: int, blocks: Sequence[Block]) -> bool:
        """A connection has written blocks, and brings no more of its range. Tell whether a sync is due.

        :raises Differs: another one was faster, with other bytes.
        """
        for number in range(first, first + count):
            if number in one.claims and one.claims[number].by is by:
                del one.claims[number]
        one.came_s = time.monotonic()
        differs = None
        for block in blocks:
            if one.has[block.number]:
                differs = block.number if one.digest(block.number) != block.digest else differs
                continue
            one.has[block.number] = 1
            at, width = block.number, one.digest_bytes
            one.digests[at * width : (at + 1) * width] = block.digest
            width = one.listed_bytes
            one.listed[at * width : (at + 1) * width] = block.listed
            one.unsynced_bytes += BLOCK_BYTES
        if differs is not None:
            raise Differs(f"block {differs} has another digest here")
        return one.unsynced_bytes >= SYNC_BYTES or (one.unsynced_bytes > 0 and one.came_s - one.synced_s >= SYNC_S)

    def release(self, by: object) -> None:
        """A connection has ended: what it was bringing may come from others."""
        for one in self._open.values():
            gone = [number for number, claim in one.claims.items() if claim.by is by]
            for number in gone:
                del one.claims[number]

    def bring_to_disk(self, one: Staging, file: int) -> None:
        """Sync a file, and its name with the first of its blocks; in any thread."""
        os.fdatasync(file)
        if not one.is_named:
            durable.sync("operation-name", self._place)
            one.is_named = True

    def begin_sync(self, one: Staging) -> tuple[int, list[int]]:
        """Return a descriptor, which is the caller's to sync and close, and the blocks that are durable after it."""
        if self._open.get(one.at) is not one:
            return -1, []  # it has ended meanwhile, and its descriptor may be another file's
        one.synced_s, one.unsynced_bytes = time.monotonic(), 0
        return os.dup(one.file), [at for at in range(len(one.has)) if one.has[at] and not one.durable[at]]

    def synced(self, one: Staging, blocks: Sequence[int]) -> None:
        """Store that these blocks are durable."""
        if self._open.get(one.at) is not one:
            return  # it has ended meanwhile
        still = [at for at in blocks if one.has[at]]
        for at in still:
            one.durable[at] = 1
        with self._table.changing("operation-blocks"):
            self._table.put_parts(one.at, self._parts(one, still))

    def lost(self, one: Staging, blocks: Sequence[int]) -> None:
        """The disk has refused these blocks."""
        for at in blocks:
            one.has[at] = one.durable[at]

    def clear(self, one: Staging, blocks: Sequence[int]) -> None:
        """Blocks differ from the list: they have to come again, durably so. :raises Taken: somebody writes to one."""
        now = time.monotonic()
        if any(at in one.claims and one.claims[at].until_s > now for at in blocks):
            raise Taken("a connection is bringing such a block")
        for at in blocks:
            one.has[at] = one.durable[at] = 0
        with self._table.changing("operation-blocks"):
            self._table.put_parts(one.at, self._parts(one, blocks))

    def have(self, stored: Stored) -> Ranges:
        """Return the durable blocks of a row."""
        one = self._open.get(stored.id)
        if one is not None:
            return ranges(at for at in range(len(one.durable)) if one.durable[at])
        found = sorted((part, have) for part, have, _, _ in self._table.parts(stored.id))
        return ranges(part * _PART + at for part, have in found for at in range(len(have)) if have[at])

    def end(self, stored: Stored) -> None:
        """The bytes of a row are not needed any more: they go, and what is recorded of them. Inside no change."""
        self.let_go(stored)
        durable.unlink("operation-discard", self.path(stored.row.identity))

    def let_go(self, stored: Stored) -> None:
        """Close the file of a row."""
        one = self._open.pop(stored.id, None)
        if one is not None:
            os.close(one.file)

    def expire_leases(self) -> None:
        """Space that was reserved without data is free again; received blocks stay."""
        now = time.monotonic()
        for one in list(self._open.values()):
            if now - one.came_s >= LEASE_S:
                came = len(one.has.rstrip(b"\0")) * BLOCK_BYTES
                os.ftruncate(one.file, came if one.size is None else min(one.size, came))

    def discard_strays(self, known: Iterator[Identity]) -> None:
        """After a start: remove the bytes of operations that the table does not know. Its caller decides whether."""
        names = {self.path(one).name for one in known}
        for path in self._place.iterdir():
            if path.name not in names:
                path.unlink()

    def _parts(self, one: Staging, blocks: Sequence[int]) -> Iterator[tuple[int, bytes, bytes, bytes]]:
        for part in sorted({at // _PART for at in blocks}):
            begin, end, width, listed = part * _PART, (part + 1) * _PART, one.digest_bytes, one.listed_bytes
            digests = bytes(one.digests[begin * width : end * width])
            yield part, bytes(one.durable[begin:end]), digests, bytes(one.listed[begin * listed : end * listed])

    def _read(self, one: Staging) -> None:
        for part, have, digests, listed in self._table.parts(one.at):
            begin = part * _PART
            one.grow(begin + len(have))
            one.has[begin : begin + len(have)] = have
            one.durable[begin : begin + len(have)] = have
            one.digests[begin * one.digest_bytes : begin * one.digest_bytes + len(digests)] = digests
            one.listed[begin * one.listed_bytes : begin * one.listed_bytes + len(listed)] = listed
