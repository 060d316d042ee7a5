"""Blocks that come in parts, by several connections of several workers: put together here. In the disk's thread."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

from overlay_router.data.jobs import Report
from overlay_router.local.replies import Attached
from stageout.overlay.wire import frames
from stageout.overlay.wire.blocks import PART_BYTES

#: A sender has one block in parts for each of its connections, at the end of a file. A sender that needs more is not
#: honest.
_MOST_TRANSFERS, _MOST_BLOCKS = 4096, 1024
_Have = OrderedDict[int, int]


class Parts:
    """The bytes on the disk of blocks that are not whole. Nobody records it: after a restart it comes again."""

    def __init__(self) -> None:
        self._have: OrderedDict[int, _Have] = OrderedDict()

    def put_together(self, report: Report, found: Attached, recorded: Collection[int] = ()) -> Report:
        """The report with those blocks, too, that are whole with its parts; the same when it is said again.

        :param found: the transfer and its file, which is closed. :param recorded: blocks that are whole already: what
            their parts have made of them is found too, for these may have other bytes. :raises OSError: they cannot be
            read.
        """
        try:
            ask = found.transfer.ask
            whole = self._whole(report, ask.block_bytes, ask.size_bytes, recorded)
            blocks = tuple((block, _digest(found.file, block * ask.block_bytes, size_bytes, report.digest))
                           for block, size_bytes in whole)  # fmt: skip
        finally:
            os.close(found.file)
        return replace(report, blocks=report.blocks + blocks)

    def recorded(self, tid: int, blocks: Iterable[int]) -> None:
        """These blocks are whole and recorded. Should one have to come again, all of its parts must."""
        have = self._have.get(tid)
        if have is None:
            return
        for block in blocks:
            have.pop(block, None)
        if not have:
            del self._have[tid]

    def forget(self, tid: int) -> None:
        """A transfer is whole, or its blocks come again."""
        self._have.pop(tid, None)

    def _whole(
        self, report: Report, block_bytes: int, size_bytes: int, recorded: Collection[int]
    ) -> list[tuple[int, int]]:
        """Number and length of blocks that these parts make whole, or change."""
        have = self._have.setdefault(report.tid, OrderedDict())
        self._have.move_to_end(report.tid)
        for start, length in report.parts:
            block = start // block_bytes
            have[block] = have.get(block, 0) | _mask(start - block * block_bytes, length)
            have.move_to_end(block)
        _trim(self._have, _MOST_TRANSFERS)
        _trim(have, _MOST_BLOCKS)
        touched = dict.fromkeys(start // block_bytes for start, _ in report.parts)
        lengths = {block: min(block_bytes, size_bytes - block * block_bytes) for block in touched}
        return [
            (block, length)
            for block, length in lengths.items()
            if have.get(block) == _mask(0, length) or block in recorded
        ]


def _mask(start: int, length: int) -> int:
    """A bit for each smallest part."""
    first, end = start // PART_BYTES, -(-(start + length) // PART_BYTES)
    return (1 << end) - (1 << first)


def _trim(ordered: OrderedDict[int, _Have] | _Have, most: int) -> None:
    while len(ordered) > most:
        ordered.popitem(last=False)


def _digest(file: int, start: int, size_bytes: int, kind: str) -> str:
    with Path(f"/proc/self/fd/{file}").open("rb", buffering=0) as readable:  # this one is for writing only
        data = os.pread(readable.fileno(), size_bytes, start)
    if len(data) != size_bytes:
        raise OSError(f"{len(data)} of {size_bytes} bytes of a block that was written could be read")
    return frames.digests()[kind](data).hex()
