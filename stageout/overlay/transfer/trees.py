"""Whole directories: small files in batches over several connections, large ones alone, one listing for a tree."""

from __future__ import annotations

import json
import os
import queue
import re
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.core.pauses import growing_s
from stageout.overlay.http.names import encoded
from stageout.overlay.transfer.batch import MOST_BYTES, MOST_FILES, Outcome, Small
from stageout.overlay.transfer.connection import Connection, Place, Route
from stageout.overlay.transfer.crew import PASSING, PATIENCE_S
from stageout.overlay.transfer.session import connected

#: Two times are told apart only if they differ by more: routers and filesystems round them.
_MARGIN_S = 2
_WAITING = 8
_MODE = re.compile("[0-7]{1,4}")
Group = Sequence[Small]


class Entry(NamedTuple):
    """An entry below a directory. :param below: its path from there. :param kind: file, directory, empty or other.

    :param changed: when its content or its name was changed last, as far as this machine knows it; 0: not known.
    """

    below: str
    kind: str
    size: int
    modified: float
    mode: int
    changed: float = 0.0


def walked(top: Path) -> Iterator[Entry]:
    """List a directory here, depth first. An empty directory has the kind ``empty``.

    :raises TransferFailure: LOCAL_FILE: a directory cannot be read.
    """
    waiting = [""]
    while waiting:
        below = waiting.pop()
        try:
            with os.scandir(top / below) as found:
                entries = sorted(found, key=lambda one: os.fsencode(one.name))
        except OSError as problem:
            raise TransferFailure(ErrorClass.LOCAL_FILE, f"{top / below}: {problem.strerror}") from None
        if not entries and below:
            yield Entry(below, "empty", 0, 0, 0o755)
        for one in entries:
            name = f"{below}/{one.name}" if below else one.name
            try:
                status = one.stat(follow_symlinks=False)
            except OSError:
                continue  # deleted meanwhile
            if stat.S_ISDIR(status.st_mode):
                waiting.append(name)
            else:
                kind = "file" if stat.S_ISREG(status.st_mode) else "other"
                changed = max(status.st_mtime, status.st_ctime)
                yield Entry(name, kind, status.st_size, status.st_mtime, status.st_mode & 0o777, changed)


def listed(place: Place, routes: Sequence[Route], path: str) -> Iterator[Entry]:
    """List a directory of a router, with all that is below it. :raises TransferFailure: it cannot be listed."""
    connection = connected(place, routes)
    try:
        connection.request("GET", f"{encoded(path, is_directory=True)}?list&depth=infinity")
        answer = connection.answer()
        if answer.status != 200:
            raise connection.refused(answer, connection.read(answer), f"/{path}")
        rest = b""
        for part in connection.parts(answer):
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                yield _entry(line, place)
    finally:
        connection.close()


def _entry(line: bytes, place: Place) -> Entry:
    try:
        facts: dict[str, Any] = json.loads(line)
        name = os.fsdecode(unquote_to_bytes(facts["name"]))
        segments = name.split("/")
        mode = facts.get("mode", "")
        if any(one in ("", ".", "..") or "\0" in one for one in segments):
            raise ValueError
        return Entry(
            name, str(facts["kind"]), int(facts["size"] or 0), float(facts["modified"]),
            int(mode, 8) if _MODE.fullmatch(mode) else 0o644,
        )  # fmt: skip
    except (ValueError, KeyError, TypeError):
        words = f"the list of {place.url} is malformed, or names what is no name of a file"
        raise TransferFailure(ErrorClass.SERVER_ERROR, words, place.url) from None


def is_same(source: Entry, target: Entry | None, is_mode_told: bool) -> bool:
    """Tell whether a target counts as a copy of its source.

    Both have one size, and one time. A small file that a router took in a batch has the time of its arrival, which is
    later than the change of its source.
    """
    if target is None or target.kind != "file" or source.size != target.size:
        return False
    is_later = bool(source.changed) and source.changed + _MARGIN_S <= target.modified
    is_alike = is_later or int(source.modified) == int(target.modified)
    return is_alike and (not is_mode_told or source.mode == target.mode)


def grouped(files: Iterable[Small]) -> Iterator[Group]:
    """Put small files into groups, in order."""
    group, total = list[Small](), 0
    for one in files:
        if group and (len(group) == MOST_FILES or total + one.size > MOST_BYTES):
            yield group
            group, total = [], 0
        group.append(one)
        total += one.size
    if group:
        yield group


class Movers:
    """Threads with a connection each that move groups of small files.

    :param move: moves one group, and calls :meth:`ended` with each of its files.
    :param ended: called once with each file.
    """

    def __init__(
        self, place: Place, routes: Sequence[Route], move: Callable[[Connection, Group], None], ended: Outcome,
        count: int,
    ) -> None:  # fmt: skip
        self._place, self._routes, self._move, self._ended = place, routes, move, ended
        self._over, self._lock = set[Small](), threading.Lock()
        self._waiting: queue.Queue[Group | None] = queue.Queue(_WAITING)
        self._problem: BaseException | None = None
        self._threads = [threading.Thread(target=self._run, args=(at,), daemon=True) for at in range(count)]
        for thread in self._threads:
            thread.start()

    def ended(self, one: Small, result: int | TransferFailure) -> None:
        """A file has ended; what came of a group before its connection was lost comes twice."""
        with self._lock:
            is_new = one not in self._over
            self._over.add(one)
        if is_new:
            self._ended(one, result)

    def is_over(self, one: Small) -> bool:
        """Tell whether a file has ended."""
        return one in self._over

    def add(self, group: Group) -> None:
        """Move a group, when there is a thread for it. :raises BaseException: another group ended a thread by it."""
        while self._problem is None:
            try:
                self._waiting.put(group, timeout=0.5)
                return
            except queue.Full:
                continue
        raise self._problem

    def end(self) -> None:
        """Wait for all groups. :raises BaseException: as of :meth:`add`."""
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()
        if self._problem is not None:
            raise self._problem

    def _run(self, at: int) -> None:
        connection: Connection | None = None
        routes = [*self._routes[at % len(self._routes) :], *self._routes[: at % len(self._routes)]]
        while (group := self._waiting.get()) is not None:
            try:
                connection = self._moved(connection, group, routes)
            except BaseException as problem:
                self._problem = self._problem or problem
        if connection is not None:
            connection.close()

    def _moved(self, connection: Connection | None, group: Group, routes: Sequence[Route]) -> Connection | None:
        began, failures = time.monotonic(), 0
        while self._problem is None:
            try:
                if connection is None or connection.is_ended:
                    connection = connected(self._place, routes)
                self._move(connection, group)
                with self._lock:
                    self._over.difference_update(group)
                return connection
            except TransferFailure as failure:
                if connection is not None:
                    connection.close()
                connection = None
                failures += 1
                if failure.kind not in PASSING or time.monotonic() - began > PATIENCE_S:
                    for one in group:
                        self.ended(one, failure)
                    return None
                time.sleep(max(growing_s(0.2, 5.0, failures), min(failure.retry_after_s or 0, 30)))
        return connection
