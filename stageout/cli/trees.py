"""``stageout put -r`` and ``get -r``: whole directories to a router of the overlay, and back."""

from __future__ import annotations

import argparse
import itertools
import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from stageout.cli.bars import Line, complain, printable
from stageout.cli.exits import Exit
from stageout.cli.files import check_names, deadline_of, is_directory, mode_here
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.core.pauses import growing_s
from stageout.overlay.channel import Gateway
from stageout.overlay.client import Put
from stageout.overlay.directories import deposit_directories
from stageout.overlay.many import below, get_many, put_many
from stageout.overlay.operations import Entry, Session
from stageout.overlay.packs import SmallPut
from stageout.overlay.settings import connections_of
from stageout.wire.route import Route

SHOW_EVERY_S = 0.2
_LOST = frozenset({ErrorClass.CONNECTION_LOST, ErrorClass.STALLED})
_LIST_AGAIN = 3


def send_trees(
    gateway: Gateway, path: str, options: argparse.Namespace, routes: Sequence[Route], custodian: Gateway, terminal: str
) -> int:
    """All files below the directories; each that fails is said, and the others are sent nevertheless.

    :param custodian: who is asked; the router itself where ``terminal`` is "". :param routes: to it.
    :raises TransferFailure: a directory cannot be read, or the router cannot be reached.
    """
    into = len(options.files) > 1 or is_directory(path, options.url)
    names = [f"{path}/{_name_of(Path(name))}".strip("/") if into else path for name in options.files]
    check_names(names)
    status = Exit.OK
    for name, there in zip(options.files, names):
        tree = _Tree(gateway, Path(name), there, custodian, terminal)
        if tree.send(options, routes):
            status = Exit.FAILED
    return int(status)


def _name_of(directory: Path) -> str:
    """Its own name, also of a symbolic link; of ``.`` that of the directory that it is."""
    return directory.name if directory.name not in ("", "..") else directory.resolve().name


class _Tree:
    """One directory that is sent. :param custodian: who is asked; the router itself where ``terminal`` is ""."""

    def __init__(self, gateway: Gateway, local: Path, path: str, custodian: Gateway, terminal: str) -> None:
        self._gateway, self._local, self._path = gateway, local, path
        self._custodian, self._terminal = custodian, terminal
        self._given: dict[str, int] = {}
        self._directories: list[str] = []
        self._files = self._bytes = self._failed = 0
        self._line, self._shown_s = Line(), 0.0

    def send(self, options: argparse.Namespace, routes: Sequence[Route]) -> int:
        """Send it; returns how many of its entries are not there now."""
        start_s = time.monotonic()
        first, most = connections_of(options.connections)
        deadline = deadline_of(options)
        passes = self._custodian if self._terminal else None
        with Session(self._gateway, routes=routes, through=passes) as names:
            put_many(
                self._custodian, self._entries(), self._ended,
                connections=first, most_connections=most, routes=routes, terminal=self._terminal,
                priority=options.priority, deadline=deadline, custody=options.custody,
            )  # fmt: skip
            if options.custody:
                self._deposit_directories(routes)
            else:
                for directory in self._directories:
                    names.mkdir(directory, parents=True, may_exist=True)
                names.push()
        seconds = max(1e-3, time.monotonic() - start_s)
        self._line.clear()
        rates = f"{self._files / seconds:.0f} files/s, {self._bytes / seconds / 1e6:.1f} MB/s"
        print(f"{printable(str(self._local))}: {self._files} files, {self._bytes} bytes in {seconds:.2f} s, {rates}")
        for origin, files in self._given.items():
            more = f" --files {files}" if files > 1 else ""
            print(f"  in custody; what became of it: stageout ask overlay://{self._custodian.server} {origin}{more}")
        return self._failed

    def _deposit_directories(self, routes: Sequence[Route]) -> None:
        if not self._directories:
            return
        try:
            origin, failures = deposit_directories(
                self._custodian, self._directories, terminal=self._terminal, routes=routes
            )  # fmt: skip
            self._given[origin] = len(self._directories)
        except TransferFailure as failure:
            failures = dict.fromkeys(self._directories, failure)
        for path, reason in failures.items():
            self._ended(path, reason)

    def _entries(self) -> Iterator[tuple[str, str, str]]:
        """The files; empty directories are made when these are there."""
        prefix = f"{self._path}/" if self._path else ""
        for found in below(self._local):
            if found.kind == "file":
                yield found.path, found.local, prefix + found.path
            elif found.kind == "empty":
                self._directories.append(prefix + found.path)
            else:
                self._ended(found.path, TransferFailure(ErrorClass.NOT_SUPPORTED, f"{found.local} is not a file"))

    def _ended(self, path: str, result: Put | SmallPut | TransferFailure) -> None:
        if isinstance(result, TransferFailure):
            self._failed += 1
            self._line.clear()
            complain(f"{path}: {result}")
        else:
            self._files += 1
            self._bytes += result.size_bytes
            if result.origin:
                self._given[result.origin] = max(self._given.get(result.origin, 0), getattr(result, "seq", 1))
        if time.monotonic() - self._shown_s >= SHOW_EVERY_S:
            self._shown_s = time.monotonic()
            self._line.show(f"{self._files} files, {self._bytes / 1e6:.1f} MB of {printable(str(self._local))}")


def fetch_tree(gateway: Gateway, path: str, options: argparse.Namespace, routes: Sequence[Route]) -> int:
    """All files below a directory there; each that fails is said, and the others are fetched nevertheless.

    :raises TransferFailure: the directory cannot be read, or the router cannot be reached.
    """
    name = path.rpartition("/")[2]
    local = Path(options.file or ".")
    into = local / name if stat.S_ISDIR(mode_here(local)) else local
    fetched = _Fetched(into)
    try:
        with Session(gateway, routes=routes) as names:
            get_many(
                gateway, fetched.all_below(names, path), fetched.ended,
                routes=routes, priority=options.priority, deadline=deadline_of(options),
            )  # fmt: skip
    finally:
        fetched.line.clear()
    return fetched.end()


class _Fetched:
    """A directory that is fetched. :param into: the directory here, made where it is missing.

    :ivar line: what a terminal shows of it.
    """

    def __init__(self, into: Path) -> None:
        self._into = into
        self._files = self._bytes = self._failed = 0
        self.line, self._lock, self._start_s, self._shown_s = Line(), threading.Lock(), time.monotonic(), 0.0

    def all_below(self, names: Session, path: str) -> Iterator[tuple[str, str, Path, int]]:
        """The files, with their names there and here and their sizes; the directories here are made."""
        waiting = [(path, self._into)]
        while waiting:
            there, here = waiting.pop()
            try:
                here.mkdir(parents=True, exist_ok=True)
                found = _listed(names, there)
            except (OSError, TransferFailure) as problem:
                failure = _classified(problem, here)
                if here == self._into or failure.kind.retryable:
                    raise failure from None
                self._failure(there, str(failure))
                continue
            for entry in found:
                below = f"{there}/{entry.name}".lstrip("/")
                if not _is_name(entry.name):
                    self._failure(below, "the router names what is no name of a file")
                elif entry.kind == "directory":
                    waiting.append((below, here / entry.name))
                elif entry.kind == "file":
                    yield below, below, here / entry.name, entry.size_bytes
                else:
                    self._failure(below, "is not a file")

    def ended(self, path: str, result: int | TransferFailure) -> None:
        """A file is here, and has so many bytes; or it will not be."""
        if isinstance(result, TransferFailure):
            self._failure(path, str(result))
            return
        with self._lock:
            self._files += 1
            self._bytes += result
            if time.monotonic() - self._shown_s >= SHOW_EVERY_S:
                self._shown_s = time.monotonic()
                self.line.show(f"{self._files} files, {self._bytes / 1e6:.1f} MB of {printable(str(self._into))}")

    def _failure(self, path: str, words: str) -> None:
        with self._lock:
            self._failed += 1
            self.line.clear()
            complain(words if words.startswith(path) else f"{path}: {words}")

    def end(self) -> int:
        """Say what has come; the exit status."""
        seconds = max(1e-3, time.monotonic() - self._start_s)
        rates = f"{self._files / seconds:.0f} files/s, {self._bytes / seconds / 1e6:.1f} MB/s"
        print(f"{printable(str(self._into))}: {self._files} files, {self._bytes} bytes in {seconds:.2f} s, {rates}")
        return int(Exit.FAILED if self._failed else Exit.OK)


def _is_name(said: str) -> bool:
    """Whether it can be a file's name here, and is below the directory that it is said to be in."""
    try:
        name = os.fsencode(said)
    except UnicodeEncodeError:
        return False
    return name not in (b"", b".", b"..") and not {0, ord("/")} & set(name)


def _classified(problem: OSError | TransferFailure, here: Path) -> TransferFailure:
    if isinstance(problem, TransferFailure):
        return problem
    return TransferFailure(ErrorClass.LOCAL_FILE, f"{here}: {problem.strerror}")


def _listed(names: Session, path: str) -> list[Entry]:
    """What is in a directory, by name; asked for again where the connection is lost, for files may come for hours.

    :raises TransferFailure: it cannot be read, or the router cannot be reached.
    """
    for attempt in itertools.count(1):
        try:
            return sorted(names.entries(path), key=lambda one: one.name)
        except TransferFailure as failure:
            if failure.kind not in _LOST or attempt > _LIST_AGAIN:
                raise
            time.sleep(growing_s(0.25, 4.0, attempt))
    raise AssertionError("unreachable")
