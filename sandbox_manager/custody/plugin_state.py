"""State that plugins of a user must find again in their next call, such as the numbers of tasks at a service.

Below a root manager the directory belongs to root, and only the group that movers of this user have may use it. So no
later job of the same user reads or changes what is there. A mover runs as the user all the same: a process of that user
that may trace the mover can do what the mover can.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Collection
from pathlib import Path

from stageout.core import durable
from stageout.model.sandbox import NAME_BYTES
from stageout.movers import trees

#: Further ones are not counted.
_MOST_NAMES = 10_000
_BLOCK_BYTES = 512


class PluginState:
    """Directories by uid.

    :param root: the directory that they are in.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def place_of(self, uid: int, gid: int, group: int | None) -> Path:
        """The directory of a user, made when it is missing.

        :param group: that only movers of this user have; None: there is none. :raises OSError: it cannot be made.
        """
        place = self._root / str(uid)
        with contextlib.suppress(FileExistsError):
            durable.make_dir("spool-state", place, 0o700)
        owner, owners, mode = (uid, gid, 0o700) if group is None else (0, group, 0o770)
        if os.geteuid() == 0:
            found = durable.disk.lstat(place)
            if (found.st_uid, found.st_gid) != (owner, owners):
                durable.disk.chown(place, owner, owners)
                durable.disk.chmod(place, mode)
        return place

    def sizes(self) -> dict[int, int]:
        """Bytes of the quota that each user's directory takes."""
        return {int(name): self.size_bytes(int(name)) for name in self._names() if name.isdecimal()}

    def size_bytes(self, uid: int) -> int:
        """Bytes of the quota that a user's directory takes: its blocks, and a fixed number for each name."""
        waiting, total, left = [self._root / str(uid)], 0, _MOST_NAMES
        while waiting and left > 0:
            place = waiting.pop()
            with contextlib.suppress(OSError), trees.opened(place) as opened, durable.disk.scandir(opened) as entries:
                for entry in itertools.islice(entries, left):
                    left -= 1
                    total += NAME_BYTES
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(place / entry.name)
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
