"""``stageout put -r`` and ``get -r``: whole directories to a router of the overlay, and back."""

from __future__ import annotations

import argparse
import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from stageout.cli.bars import Line, complain, printable
from stageout.cli.exits import Exit
from stageout.cli.files import check_names, deadline_of, is_directory, mode_here
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Gateway
from stageout.overlay.client import ENDS, GIVE_UP_S, Put
from stageout.overlay.directories import deposit_directories
from stageout.overlay.fetch import get
from stageout.overlay.many import Crew, below, put_many
from stageout.overlay.operations import Session
from stageout.overlay.packs import SmallPut
from stageout.overlay.settings import connections_of
from stageout.wire.route import Route

SHOW_EVERY_S = 0.2
#: Files that come at once.
_AT_ONCE = 4


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
    fetched = _Fetched(gateway, into, options, routes)
    crew = Crew(_AT_ONCE)
    try:
        with Session(gateway, routes=routes) as names, crew:
            fetched.all_below(names, path, crew)
    except ENDS:  # what has come of a file is removed by who fetches it
        fetched.is_given_up = True
        crew.wait(GIVE_UP_S)
        raise
    finally:
        fetched.line.clear()
    return fetched.end()


class _Fetched:
    """A directory that is fetched. :param into: the directory here, made where it is missing.

    :ivar is_given_up: nothing more of it is to come. :ivar line: what a terminal shows of it.
    """

    def __init__(self, gateway: Gateway, into: Path, options: argparse.Namespace, routes: Sequence[Route]) -> None:
        self._gateway, self._into, self._routes = gateway, into, routes
        self._get = partial(get, gateway, routes=routes, priority=options.priority, deadline=deadline_of(options))
        self._files = self._bytes = self._failed = 0
        self.is_given_up = False
        self.line, self._lock, self._start_s, self._shown_s = Line(), threading.Lock(), time.monotonic(), 0.0

    def all_below(self, names: Session, path: str, crew: Crew) -> None:
        """Make the directories, and have the crew fetch the files."""
        waiting = [(path, self._into)]
        while waiting:
            there, here = waiting.pop()
            try:
                here.mkdir(parents=True, exist_ok=True)
                found = sorted(names.entries(there), key=lambda one: one.name)
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
                    crew.do(partial(self._fetch, below, here / entry.name))
                else:
                    self._failure(below, "is not a file")

    def _go_on(self, received_bytes: int) -> None:
        if self.is_given_up:
            raise TransferFailure(ErrorClass.UNKNOWN, "given up")

    def _fetch(self, there: str, here: Path) -> None:
        if self.is_given_up:
            return
        try:
            size_bytes = self._get(there, here, progress=self._go_on)
        except TransferFailure as failure:
            self._failure(there, str(failure))
            return
        with self._lock:
            self._files += 1
            self._bytes += size_bytes
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
