"""A process that makes small files for the daemon, which decides all: what is written, and what gets its name when.

It shares a region of memory with the daemon, where the data lie, and the descriptor of the directory for hidden files,
whose lock it thereby holds: while one of these processes lives, no other router begins below the same root. It ends
with the daemon.
"""

from __future__ import annotations

import errno
import marshal
import mmap
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from overlay_router.local import unnamed
from overlay_router.local.hidden import Directories, Hidden
from overlay_router.local.tree import OWN, Tree

#: The daemon's orders. WRITE, place in the region, sizes, permissions: answered by the inodes. NAME, position of the
#: first, paths: answered by the errors of those that have none. FORGET: what was written and has no name.
WRITE, NAME, FORGET = range(3)
#: Of the data of one order, and how many of them the region takes.
PART_BYTES, PARTS = 1024 * 1024, 4


class Maker:
    """One batch after the other. :param place: for hidden files. :param region: where the data lie."""

    def __init__(self, place: int, tree: Tree, region: memoryview) -> None:
        self._place, self._tree, self._region = place, tree, region
        self._prefix = f"{os.getpid()}-"
        self._link = unnamed.way_to_link(place)
        self._umask = os.umask(0o077)
        os.umask(self._umask)
        self._begin()

    def _begin(self) -> None:
        self._hidden = Hidden(self._place, self._link, self._umask, self._prefix)
        self._directories = Directories(self._tree)

    def write(self, start: int, sizes_bytes: Sequence[int], modes: Sequence[int]) -> list[int]:
        """Inodes of the next files, whose data lie one behind the other. :raises OSError: the disk is full or fails."""
        ends = list(accumulate(sizes_bytes, initial=start))
        data = map(self._region.__getitem__, map(slice, ends, ends[1:]))
        return self._hidden.write(zip(modes, data), False)

    def name(self, first: int, paths: Sequence[str]) -> dict[int, int]:
        """Return why some have no name, by their place in ``paths``. :raises OSError: there is no room for one."""
        problems = self._hidden.give_names(paths, self._directories, first)
        return {number: problem.errno or errno.EIO for number, problem in problems.items()}

    def forget(self) -> None:
        """The batch is over; directories may be others in the next one."""
        self._hidden.__exit__()
        self._directories.__exit__()
        self._begin()

    def answer(self, what: int, *facts: Any) -> list[int] | dict[int, int] | int | None:
        """The answer to the daemon, the error that ended it, or nothing.

        :raises OSError: a batch cannot be forgotten. Nobody waits for that answer, and no file may be taken for one of
            the next batch: the process ends.
        """
        if what == FORGET:
            self.forget()
            return None
        try:
            return self.write(*facts) if what == WRITE else self.name(*facts)
        except OSError as problem:
            return problem.errno or errno.EIO


def _tree(root: Path, place: int) -> Tree:
    """The daemon's tree: it opened its root long ago. :raises SystemExit: another directory has that name by now."""
    tree = Tree(root)
    with suppress(FileNotFoundError):
        if os.path.samestat(tree.status(f"{OWN}/packs"), os.fstat(place)):
            return tree
    raise SystemExit(f"{root} is not the directory any more that the router began with: restart the router")


def main(argv: list[str]) -> None:
    """Serve until the daemon has gone. Arguments: descriptors of its socket, of the region and the place; the root."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the daemon ends, and this with it
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    region = memoryview(mmap.mmap(int(argv[2]), PARTS * PART_BYTES))
    place = int(argv[3])
    maker = Maker(place, _tree(Path(argv[4]), place), region)
    with Connection(socket.socket(fileno=int(argv[1])).detach()) as daemon, suppress(EOFError, ConnectionError):
        daemon.send_bytes(b"")
        while True:
            answer = maker.answer(*marshal.loads(daemon.recv_bytes()))
            if answer is not None:
                daemon.send_bytes(marshal.dumps(answer))


if __name__ == "__main__":
    main(sys.argv)
