"""The data that a router sends by itself: files in custody, deliveries by plugins, and copies."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

from overlay_router.copying.copier import Copier, Ways
from overlay_router.custodians.forwarder import Forwarder, Forwarding, OnDisk, ShareWith
from overlay_router.custodians.pack_forwarder import PackForwarder
from overlay_router.custodians.spool import Key
from overlay_router.delivery.outflow import Means, Outflow
from overlay_router.ends import Ends
from overlay_router.local.replies import Reply
from overlay_router.report import Reporting
from stageout.core.clock import SystemClock
from stageout.overlay.wire.messages import BLOCK_BYTES

#: A file that a custodian sends on when the first of it is there, not before: most of these are whole by then.
_SMALL_BYTES = 8 * BLOCK_BYTES


class Outgoing:
    """The senders for the ends of a router, as far as it has such ends. A relay has none of them.

    :param on_disk: runs a call in the thread that owns the ends. :param tell: sends replies.
    :param ways: routes to a router. :param share_with: as of :class:`Forwarder`.
    :param forwarding: with a custodian, or copies, only. :param means: with names that plugins deliver only.
    :ivar copier: carries out copies. :ivar outflow: runs plugins.
    """

    def __init__(
        self,
        ends: Ends,
        on_disk: OnDisk,
        tell: Callable[[list[Reply]], None],
        ways: Ways,
        share_with: ShareWith,
        forwarding: Forwarding | None,
        means: Means | None,
    ) -> None:
        self._ends, self._on_disk, self._tell, self._clock = ends, on_disk, tell, SystemClock()
        self._forwarder: Forwarder | None = None
        self._pack_forwarder: PackForwarder | None = None
        self.copier: Copier | None = None
        self.outflow: Outflow | None = None
        self._reports: list[Reporting] = []
        if forwarding is not None:
            self._forward(forwarding, share_with)
            self._copy(forwarding, ways)
        if means is not None:
            self._run_plugins(means)

    def _forward(self, how: Forwarding, share_with: ShareWith) -> None:
        custodian = self._ends.custodian
        if custodian is not None:
            self._forwarder = Forwarder(
                custodian, self._on_disk, self._tell, how.own, how.most, self._clock, share_with
            )  # fmt: skip
            self._pack_forwarder = PackForwarder(custodian.packs, self._on_disk, self._tell, how.own, self._clock)
            both = self._forwarder, self._pack_forwarder
            self._reports.append(Reporting(how.report, custodian, both, self._on_disk))

    def _copy(self, how: Forwarding, ways: Ways) -> None:
        copies, tree = self._ends.copies, self._ends.destination
        if copies is not None and tree is not None:
            self.copier = Copier(copies, tree, self._on_disk, self._tell, ways, how.own, how.most)

    def _run_plugins(self, means: Means) -> None:
        egress = self._ends.egress
        if egress is not None:
            self.outflow = Outflow(egress, means, self._on_disk, self._tell, self._clock)
            self._reports.append(Reporting(means.report, egress, [self.outflow], self._on_disk))

    @property
    def _all(self) -> list[Forwarder | PackForwarder | Copier | Outflow]:
        those = (self._forwarder, self._pack_forwarder, self.copier, self.outflow)
        return [one for one in those if one is not None]

    def works(self) -> list[Coroutine[Any, Any, None]]:
        """The tasks to run beside everything, until they are cancelled."""
        fetching = [self.outflow.fetching] if self.outflow is not None else []
        return [one.run() for one in (*self._all, *fetching, *self._reports)]

    def look(self) -> None:
        """There may be something to send."""
        for one in self._all:
            one.wake.set()

    def reached(self, address: str) -> None:
        """Send at once to a router that is there again, whatever pause its failures had earned."""
        for one in (self._forwarder, self._pack_forwarder):
            if one is not None:
                one.reached(address)

    def cancelled(self, key: Key) -> None:
        """Somebody does not want that operation any more."""
        for one in (self._forwarder, self.copier, self.outflow):
            if one is not None:
                one.cancelled(key)

    def opened(self, tid: int, size_bytes: int) -> None:
        """The data of a file are about to come. :param size_bytes: of all of it."""
        if self._forwarder is not None and size_bytes > _SMALL_BYTES:
            self._forwarder.opened(tid)

    def staged(self, tid: int, blocks: Iterable[tuple[int, str]], is_whole: bool) -> None:
        """Blocks of a file are on the disk here, as of :meth:`Forwarder.staged`."""
        if self._forwarder is not None:
            self._forwarder.staged(tid, blocks, is_whole)

    async def expire(self) -> None:
        """End what is late, and is not being sent now. :raises OSError: :raises sqlite3.Error: try again."""
        ends = self._ends
        if ends.custodian is not None and self._forwarder is not None and self._pack_forwarder is not None:
            busy = self._forwarder.busy | self._pack_forwarder.busy
            problems = {**self._pack_forwarder.problems, **self._forwarder.problems}
            self._tell(await self._on_disk(partial(ends.custodian.expire, busy, problems)))
        if ends.copies is not None and self.copier is not None:
            self._tell(await self._on_disk(partial(ends.copies.expire, self.copier.busy)))
        if ends.egress is not None and self.outflow is not None:
            self._tell(await self._on_disk(partial(ends.egress.expire, self.outflow.busy, self.outflow.problems)))
