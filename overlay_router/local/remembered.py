"""Which published files are still what they were: asked for each that is sent, and looked after a few at a time."""

from __future__ import annotations

import os

from overlay_router.local.contents import Content, Contents, Identity
from overlay_router.local.tree import Tree
from stageout.overlay.wire.messages import BLOCK_BYTES

#: Published files that are looked after at once, each minute.
_LOOKED_AFTER = 100


class Remembered:
    """The records of the files of a tree."""

    def __init__(self, contents: Contents, tree: Tree) -> None:
        self._contents, self._tree, self._looked_after = contents, tree, 0

    def of(self, status: os.stat_result) -> Content | None:
        """A file as it was when it was published, if it still seems to be that one."""
        identity = Identity.of(status) if self._tree.is_here(status) else None
        return self._contents.find(identity) if identity else None

    def blocks(self, status: os.stat_result, first: int, blocks: int) -> bytes:
        """Digests of a file's blocks from ``first`` on, so many or (0) all; none of one that is not known."""
        count = -(-status.st_size // BLOCK_BYTES)
        return self._contents.digests(status.st_ino, min(first, count), min(blocks or count, count))

    def changed_behind(self) -> list[Identity]:
        """Of some published files, others each time: those that are not at their path any more, or not what they were.

        A file that is renamed behind the router's back is still known by its inode, until it is its turn here.
        """
        some = self._contents.after(self._looked_after, _LOOKED_AFTER)
        self._looked_after = some[-1].identity.inode if len(some) == _LOOKED_AFTER else 0
        return [one.identity for one in some if not self._tree.is_still(one.path, one.identity)]
