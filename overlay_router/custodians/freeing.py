"""The room of what has its end: data are removed behind that, and those that cannot be removed now, later."""

from __future__ import annotations

from overlay_router.local.store import Transfer
from overlay_router.local.tree import Tree
from overlay_router.rules import lots
from overlay_router.rules.lots import Spool
from stageout.core import log


class Freeing:
    """Of one spool."""

    def __init__(self, tree: Tree, spool: Spool) -> None:
        self._tree, self._spool = tree, spool
        self._left = dict[int, Transfer]()

    def free(self, item: Transfer) -> None:
        """Its end is recorded already: data that cannot be removed now (of a read-only disk) hold up nobody."""
        try:
            self._tree.discard(item.tid)
        except OSError as problem:
            self._left[item.tid] = item
            log.error("custody-not-freed", path=item.ask.path, problem=problem, advice="check the disk of the spool")
        else:
            self._left.pop(item.tid, None)
            lots.release(self._spool, owner_of(item))

    def again(self) -> None:
        """Remove what could not be removed before; it has kept its room until now."""
        for item in list(self._left.values()):
            self.free(item)


def owner_of(transfer: Transfer) -> tuple[str, int, str]:
    """Who has the lot of a transfer."""
    return transfer.ask.origin, transfer.ask.seq, transfer.sender
