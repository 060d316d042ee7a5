"""Where operations that come to a router end: in its own tree, or in its spool on the way to another terminal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from overlay_router.custodian import Custodian
from overlay_router.destination import Attached, Destination, Reply
from overlay_router.spool import FIRST_TID
from overlay_router.store import Transfer
from stageout.wire import overlay
from stageout.wire.frames import BadFrame
from stageout.wire.overlay import Message


@dataclass(frozen=True)
class Ends:
    """A destination, a custodian, both, or none: a relay. Used in one thread."""

    destination: Destination | None = None
    custodian: Custodian | None = None

    def __bool__(self) -> bool:
        return self.destination is not None or self.custodian is not None

    def open(self, ask: overlay.Open, peer: str) -> Reply:
        """What there is for an OPEN."""
        end = self._end_for(ask)
        return end.open(ask, peer) if end else Reply(peer, _nowhere(ask))

    def decide(self, message: Message, peer: str, digest: str) -> list[Reply]:
        """Answer a message of a control connection. :param digest: the kind of digests that the peer uses.

        :raises BadFrame: it is not for a router.
        """
        if isinstance(message, overlay.Operation):
            to = self._end_for(message)
            if isinstance(to, Custodian):
                return to.operate(message, peer, digest)
            return to.operate(message, peer) if to else [Reply(peer, _nowhere(message))]
        if isinstance(message, overlay.Low):
            for one in (self.custodian, self.destination):
                if one is not None:
                    one.low(message)
            return []
        if not isinstance(message, (overlay.Cancel, overlay.Status)):
            raise BadFrame(f"{type(message).__name__} is not for a terminal")
        end = self._end_of(message.origin, message.seq)
        if end is None:
            return [Reply(peer, overlay.Result(message.origin, message.seq, "unknown"))]
        return end.cancel(message, peer) if isinstance(message, overlay.Cancel) else end.status(message, peer)

    def attach(self, tid: int) -> Attached | None:
        """The file of a live transfer; None for a number that is closed."""
        end = self._holder(tid)
        return end.attach(tid) if end else None

    def staged(self, tid: int, blocks: Iterable[tuple[int, bytes]]) -> list[Reply]:
        """Blocks (position, digest) of a transfer whose bytes are on the disk."""
        end = self._holder(tid)
        return end.staged(tid, blocks) if end else []

    def is_whole(self, tid: int) -> bool:
        """Whether all blocks of a live transfer are recorded: nothing more may be written then."""
        end = self._holder(tid)
        return end is not None and end.is_whole(tid)

    def whole_of(self, message: overlay.Operation) -> list[int]:
        """Transfers of an operation whose blocks are all recorded."""
        end = self._end_for(message)
        return end.whole_of(message.origin, message.seq) if end else []

    def whole(self, tid: int) -> list[Reply]:
        """All blocks are there and nobody writes any more: an operation that waits for them goes on."""
        end = self._holder(tid)
        return end.whole(tid) if end else []

    def transfers(self) -> list[Transfer]:
        """Data that come now."""
        return [item for end in (self.destination, self.custodian) if end is not None for item in end.transfers()]

    def _end_for(self, message: overlay.Open | overlay.Operation) -> Destination | Custodian | None:
        return self.custodian if message.terminal else self.destination

    def _end_of(self, origin: str, seq: int) -> Destination | Custodian | None:
        if self.custodian is not None and self.custodian.knows(origin, seq):
            return self.custodian
        return self.destination

    def _holder(self, tid: int) -> Destination | Custodian | None:
        return self.custodian if tid > FIRST_TID else self.destination


def _nowhere(message: overlay.Open | overlay.Operation) -> overlay.Result:
    reason = "this router takes nothing into custody" if message.terminal else "this router has no tree of its own"
    return overlay.Result(message.origin, message.seq, "failed", reason)
