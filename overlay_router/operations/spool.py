"""The spool of a custodian: beside the data of each operation lies a file with all else. The database is an index.

That file has a line of JSON (fields, signatures or subject, order number) and, for a file, the block lists. It is
written once all data are on the disk, so what it says is in custody is there.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from overlay_router.operations.receiving import Receiving
from stageout.core import durable, log
from stageout.overlay.http.heads import Refused
from stageout.overlay.http.operations import from_json, to_json
from stageout.overlay.rules.operations import DIRECT, LONGEST_S, Fields, Hop, Identity

#: Part of the spool that is kept free for bytes that leave.
KEPT_SHARE = 0.05
#: A cancel without a signature.
UNSIGNED = "-"
_OPERATION, _EPOCH = ".operation", "epoch"
_READ_AGAIN = (OSError, ValueError, KeyError, TypeError, Refused)


class Digests(NamedTuple):
    """Block list of a file. :param signed: digests of ``digest_kind``, one after the other. :param signature: of these.

    :param blocks: digests of ``block_kind``: what leaves the spool is compared with them.
    """

    size: int
    signed: bytes
    signature: str
    blocks: bytes


@dataclass(frozen=True)
class Kept:
    """An operation, as its file holds it.

    :param route: NAMEs behind this router, the terminal last. :param proof: compact JWS, "" for an unsigned one.
    :param token: of the sender, which goes with its signature. :param cancel: JWS of ``DELETE O``, or
        :data:`UNSIGNED`, if one came. :param share: name of the subject's share.
    """

    identity: Identity
    fields: Fields
    route: tuple[str, ...]
    share: str
    issuer: str = ""
    proof: str = ""
    token: str = ""
    cancel: str = ""
    custody: bool = True
    priority: int = 0
    deadline: int = 0
    hop: Hop = DIRECT


class CustodySpool:
    """The spool. :param place: the directory of ``receiving``. :param size: bytes it may hold, 0: half of the disk.

    Order numbers belong to an epoch, and each start begins a new one: no number is ever given twice, whatever becomes
    of the database.
    """

    def __init__(self, place: Path, receiving: Receiving, size: int = 0) -> None:
        disk = os.statvfs(place)
        self._place, self._receiving = place, receiving
        self.size = size or disk.f_blocks * disk.f_frsize // 2

    def has_room(self, used: int, more: int) -> bool:
        """Tell whether bytes can come in. 5 % stay free for bytes that leave. :param used: by all operations."""
        disk = os.statvfs(self._place)
        free = disk.f_bavail * disk.f_frsize - more
        return used + more <= self.size * (1 - KEPT_SHARE) and free >= disk.f_blocks * disk.f_frsize * KEPT_SHARE

    def epoch(self) -> int:
        """Return the last epoch, 0 for none."""
        try:
            return int(durable.read_file(self._place / _EPOCH))
        except FileNotFoundError:
            return 0

    def set_epoch(self, epoch: int) -> None:
        """Store an epoch, before a number of it is given."""
        durable.write_file("kept-epoch", self._place / _EPOCH, b"%d\n" % epoch)

    def file(self, identity: Identity) -> Path:
        """Return the place of an operation's file, whether or not it is there."""
        data = self._receiving.path(identity)
        return data.with_name(data.name + _OPERATION)

    def write(self, kept: Kept, digests: Digests | None) -> None:
        """Bring an operation to the disk. On return it is durable, with the names of its data."""
        facts = {**asdict(kept), "fields": to_json(kept.fields).decode()}
        body = b""
        if digests is not None:
            facts["list"] = [digests.size, len(digests.signed), digests.signature]
            body = digests.signed + digests.blocks
        durable.write_file("kept-file", self.file(kept.identity), json.dumps(facts).encode() + b"\n" + body)

    def read(self, identity: Identity) -> tuple[Kept, Digests | None]:
        """Read an operation back. :raises OSError: it is not there. :raises ValueError: it is damaged."""
        return read_kept(self.file(identity))

    def all(self) -> Iterator[Kept]:
        """Read all operations. One that cannot be read stays on the disk and is named in the log."""
        for path in sorted(self._place.glob(f"*{_OPERATION}")):
            try:
                kept, _ = read_kept(path)
            except _READ_AGAIN as problem:
                log.error("custody-read-failed", path=str(path), problem=repr(problem))
                continue
            if self.file(kept.identity) == path:
                yield kept

    def drop(self, identity: Identity) -> None:
        """Remove the bytes of an operation, and then its file: what a death leaves still has its name.

        :raises OSError: something stays.
        """
        for path in (self._receiving.path(identity), self.file(identity)):
            durable.unlink("kept-drop", path)

    def drop_strays(self, now: float | None = None) -> None:
        """Remove data that nothing was promised for, once no operation can be so old."""
        before = (time.time() if now is None else now) - LONGEST_S
        for path in self._place.iterdir():
            is_data = path.name != _EPOCH and not path.name.endswith(_OPERATION)
            if is_data and path.stat().st_mtime < before and not path.with_name(path.name + _OPERATION).exists():
                with suppress(OSError):
                    path.unlink()


def read_kept(path: Path) -> tuple[Kept, Digests | None]:
    """Read the file of an operation. :raises OSError, ValueError, KeyError, TypeError, Refused: it cannot be."""
    head, _, body = durable.read_file(path).partition(b"\n")
    facts: dict[str, Any] = json.loads(head)
    identity, hop = Identity(*facts.pop("identity")), Hop(*facts.pop("hop"))
    fields, route = from_json(facts.pop("fields").encode()), tuple(facts.pop("route"))
    digests, listed = None, facts.pop("list", None)
    if listed is not None:
        size, length, signature = listed
        digests = Digests(size, body[:length], signature, body[length:])
    return Kept(identity, fields, route, hop=hop, **facts), digests
