"""The bytes in custody, in all and by owner. Pure.

A file that is in the spool under several names (two destinations of one file, a hand-off that was repeated) takes its
space once. All of the spool is one filesystem, so the inode's number says what is the same file.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple


class _Ticket(NamedTuple):
    owner: str
    inodes: array[int]
    sizes: array[int]


class Space:
    """Bytes of all tickets whose files are in the spool."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self.by_owner: Counter[str] = Counter()
        self._tickets: dict[str, _Ticket] = {}
        self._inodes: set[int] = set()
        self._inode_owners: dict[int, list[str]] = {}

    def add(self, ticket: str, owner: str, files: Iterable[tuple[int, int]]) -> None:
        """A ticket's files are in the spool: (inode, size in bytes) of each. The first to bring an inode is charged."""
        inodes, sizes = array("Q"), array("Q")
        for inode, size_bytes in files:
            inodes.append(inode)
            sizes.append(size_bytes)
            if inode in self._inodes:
                self._inode_owners.setdefault(inode, []).append(owner)
            else:
                self._inodes.add(inode)
                self._charge(owner, size_bytes)
        self._tickets[ticket] = _Ticket(owner, inodes, sizes)

    def fill(self, held: Iterable[tuple[str, str, Iterable[tuple[int, int]]]]) -> None:
        """Tickets that are in the spool at the start: name, owner, and files as for :meth:`add`."""
        for ticket, owner, files in held:
            self.add(ticket, owner, files)

    def drop(self, ticket: str) -> None:
        """A ticket's files are gone; one that is not known is no error."""
        known = self._tickets.pop(ticket, None)
        if known is None:
            return
        for inode, size_bytes in zip(known.inodes, known.sizes):
            if inode in self._inode_owners:
                self._pass_on(inode, known.owner, size_bytes)
            else:
                self._inodes.discard(inode)
                self._charge(known.owner, -size_bytes)

    def _pass_on(self, inode: int, owner: str, size_bytes: int) -> None:
        """One of several names of a file is gone: somebody who still has one is charged."""
        owners = self._inode_owners[inode]
        if owner in owners:
            owners.remove(owner)
        else:
            self._charge(owner, -size_bytes)
            self._charge(owners.pop(), size_bytes)
        if not owners:
            del self._inode_owners[inode]

    def _charge(self, owner: str, size_bytes: int) -> None:
        self.used_bytes += size_bytes
        self.by_owner[owner] += size_bytes
        if not self.by_owner[owner]:
            del self.by_owner[owner]
