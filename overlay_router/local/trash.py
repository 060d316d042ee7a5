"""Trash: deleted directories, which a thread removes from the disk. One may hold millions of files."""

from __future__ import annotations

import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

from stageout.core import durable, log
from stageout.movers import trees


@contextmanager
def left_for_later() -> Iterator[None]:
    """Keep unwanted data that cannot be removed now (on a read-only disk) from delaying anybody."""
    try:
        yield
    except OSError as problem:
        log.error(
            "data-cleanup-failed", problem=problem, advice="check the disk of the root; the next start removes it"
        )


class Trash:
    """A directory whose entries are removed as they are named.

    :param place: of nobody else. :param in_thread: remove directories in a thread. Nobody waits for its end: the next
        start goes on.
    """

    def __init__(self, place: Path, in_thread: bool) -> None:
        self._place, self._in_thread = place, in_thread
        self._waiting: SimpleQueue[str | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def close(self) -> None:
        """Begin with nothing more that waits."""
        self._is_closed = True
        self._waiting.put(None)

    def remove(self, name: str) -> None:
        """Remove a file now, a directory perhaps later; nothing of that name is no error."""
        if self._in_thread and self._is_directory(name):
            self._waiting.put(name)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="trash", daemon=True)
                self._thread.start()
        else:
            self._remove(name)

    def remove_all(self) -> None:
        """Remove everything that is there. :raises OSError: nobody can say what that is."""
        for name in durable.disk.listdir(self._place):
            self.remove(name)

    def _run(self) -> None:
        while (name := self._waiting.get()) is not None and not self._is_closed:
            self._remove(name)

    def _remove(self, name: str) -> None:
        with left_for_later(), durable.step("overlay-empty"):
            trees.remove(self._place, name, most=sys.maxsize)

    def _is_directory(self, name: str) -> bool:
        try:
            return stat.S_ISDIR(durable.disk.lstat(self._place / name).st_mode)
        except OSError:
            return False
