"""The answers of a terminal."""

from __future__ import annotations

from typing import NamedTuple

from overlay_router.local.contents import Content
from overlay_router.local.store import Transfer
from stageout.overlay.wire.messages import Message


class Reply(NamedTuple):
    """A message and the peer that it is for."""

    to: str
    message: Message


class Attached(NamedTuple):
    """A live transfer and a descriptor of its staging file, open for writing; the caller closes it."""

    transfer: Transfer
    file: int


class Published(NamedTuple):
    """A published file and a descriptor of it, open for reading; the caller closes it.

    :param content: what it was when it was published, and still seems to be; None where that is not known.
    :param digests: of the blocks that were asked for, with ``content`` only. :param mtime_ns: as it was found.
    """

    size_bytes: int
    mode: int
    generation: int
    file: int
    content: Content | None = None
    digests: bytes = b""
    mtime_ns: int = 0
