"""The bytes that count against quotas: output in custody, and the state that plugins keep for their next call.

A file that is in the spool under several names (two destinations of one file, a repeated hand-off) takes its space
once. All of the spool is one filesystem, so the number of the inode identifies a file.

A plugin may keep state between calls, such as the numbers of tasks at a service. Below a root manager its directory
belongs to root, and only the group that movers of this user have may use it. So no later job of the same user reads or
changes the state. A mover runs as the user all the same: a process of that user that may trace the mover can do what
the mover can.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Executor
from pathlib import Path
from typing import NamedTuple, TypeVar

from sandbox_manager.custody.registry import Registry
from sandbox_manager.rules import Rules
from stageout.core import durable, log
from stageout.model.sandbox import NAME_BYTES
from stageout.movers import trees


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
        """Count the files of a ticket: (inode, size in bytes) of each. An inode is charged to its first owner."""
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
        """Count the tickets in the spool at the start: name, owner, and files as for :meth:`add`."""
        for ticket, owner, files in held:
            self.add(ticket, owner, files)

    def drop(self, ticket: str) -> None:
        """Stop counting the files of a ticket. An unknown ticket is no error."""
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
        """Charge a file that lost one of several names to an owner of another name."""
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


#: Further ones are not counted.
_MOST_NAMES = 10_000
_BLOCK_BYTES = 512


class PluginState:
    """Directories by uid.

    :param root: the directory that they are in.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def directory_of(self, uid: int, gid: int, group: int | None) -> Path:
        """Return the directory of a user. Create it if it is missing.

        :param group: that only movers of this user have, None for no such group. :raises OSError: it cannot be made.
        """
        directory = self._root / str(uid)
        with contextlib.suppress(FileExistsError):
            durable.make_dir("spool-state", directory, 0o700)
        owner, owners, mode = (uid, gid, 0o700) if group is None else (0, group, 0o770)
        if os.geteuid() == 0:
            found = durable.disk.lstat(directory)
            if (found.st_uid, found.st_gid) != (owner, owners):
                durable.disk.chown(directory, owner, owners)
                durable.disk.chmod(directory, mode)
        return directory

    def sizes(self) -> dict[int, int]:
        """Bytes of the quota that each user's directory takes."""
        return {int(name): self.size_bytes(int(name)) for name in self._names() if name.isdecimal()}

    def size_bytes(self, uid: int) -> int:
        """Bytes of the quota that a user's directory takes: its blocks, and a fixed number for each name."""
        waiting, total, left = [self._root / str(uid)], 0, _MOST_NAMES
        while waiting and left > 0:
            directory = waiting.pop()
            with (
                contextlib.suppress(OSError),
                trees.opened(directory) as opened,
                durable.disk.scandir(opened) as entries,
            ):
                for entry in itertools.islice(entries, left):
                    left -= 1
                    total += NAME_BYTES
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(directory / entry.name)
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * _BLOCK_BYTES
        return total

    def forget(self, uid: int) -> None:
        """Remove the directory of a user. :raises OSError: it cannot be removed."""
        trees.remove(self._root, str(uid))

    def keep_only(self, uids: Collection[int]) -> None:
        """Remove the directories of all other users. :raises OSError: one cannot be removed."""
        for name in set(self._names()) - {str(uid) for uid in uids}:
            trees.remove(self._root, name)

    def _names(self) -> list[str]:
        return list(durable.disk.listdir(self._root))


T = TypeVar("T")


class StateQuota:
    """Bytes that plugins keep for their next call.

    :param state: the directories. :param disk: where the removing is done.
    :ivar bytes_by_uid: of the quota, by user.
    """

    def __init__(self, state: PluginState, registry: Registry, disk: Executor, rules: Callable[[], Rules]) -> None:
        self._state, self._registry, self._disk, self._rules = state, registry, disk, rules
        self.bytes_by_uid: dict[int, int] = {}

    async def load(self) -> None:
        """Measure all directories (at start)."""
        self.bytes_by_uid.update(await self._on_disk(self._state.sizes))

    async def forget_unneeded(self) -> None:
        """Remove the state of plugins whose user has no output left here."""
        uids = {sandbox.uid for sandbox in self._registry.by_id.values() if not sandbox.freed}
        try:
            await self._on_disk(lambda: self._state.keep_only(uids))
        except OSError as problem:
            log.warn("state-cleanup-failed", problem=problem)
        for uid in self.bytes_by_uid.keys() - uids:
            del self.bytes_by_uid[uid]

    async def account_freed(self, uid: int) -> None:
        """Remove the state of plugins for an account of the manager without output. Another owner may use it then."""
        has_output = any(uid == holder for holder, _ in self._registry.holders)
        if has_output or all(uid != account.uid for account in self._rules().accounts):
            return
        try:
            await self._on_disk(lambda: self._state.forget(uid))
        except OSError as problem:
            log.warn("state-cleanup-failed", problem=problem)
        else:
            self.bytes_by_uid.pop(uid, None)

    async def _on_disk(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)
