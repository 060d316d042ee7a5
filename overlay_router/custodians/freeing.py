"""The room of what has its end: data are removed behind that, and those that cannot be removed now, later."""

from __future__ import annotations

from overlay_router.local.store import Transfer
from overlay_router.local.tree import Tree
from overlay_router.rules import lots
from overlay_router.rules.lots import Lot, Spool
from stageout.core import log


class Freeing:
    """Of one spool. Data that are left there have a lot of their own: their sender may begin anew meanwhile."""

    def __init__(self, tree: Tree, spool: Spool) -> None:
        self._tree, self._spool = tree, spool
        self._left = set[int]()

    def free(self, item: Transfer) -> None:
        """Its end is recorded already: data that cannot be removed now (of a read-only disk) hold up nobody."""
        lots.release(self._spool, owner_of(item))
        self._remove(item.tid, item.ask.path, item.ask.size_bytes)

    def free_stray(self, tid: int) -> None:
        """Data of which nothing is recorded: as of :meth:`free`."""
        try:
            size_bytes = self._tree.staging(tid).stat().st_size
        except OSError:
            size_bytes = 0
        self._remove(tid, str(self._tree.staging(tid)), size_bytes)

    def again(self) -> None:
        """Remove what could not be removed before; it has kept its room until now."""
        for tid in list(self._left):
            if self._why_not(tid) is None:
                self._left.discard(tid)
                lots.release(self._spool, _left_by(tid))

    def _remove(self, tid: int, path: str, size_bytes: int) -> None:
        problem = self._why_not(tid)
        if problem is not None:
            self._left.add(tid)
            self._spool.lots[_left_by(tid)] = Lot(size_bytes, 0.0, pinned=True)
            log.error("custody-release-failed", path=path, problem=problem, advice="check the disk of the spool")

    def _why_not(self, tid: int) -> OSError | None:
        """Remove data; what is in the way, if anything is."""
        try:
            self._tree.discard(tid)
        except OSError as problem:
            return problem
        return None


def owner_of(transfer: Transfer) -> tuple[str, int, str]:
    """The owner of a transfer's lot."""
    return transfer.ask.origin, transfer.ask.seq, transfer.sender


def _left_by(tid: int) -> tuple[str, int]:
    """The owner of the lot of data that are left."""
    return "left", tid
