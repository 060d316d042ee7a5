"""``stageout put -r`` and ``get -r``: whole directories to a router of the overlay, and back."""

from __future__ import annotations

import argparse
import itertools
import os
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from stageout.cli.exits import Exit
from stageout.cli.files import check_names, deadline_of, is_directory, mode_here
from stageout.cli.spooled import Spooled
from stageout.cli.tally import Tally
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.core.pauses import growing_s
from stageout.overlay.channel import Gateway
from stageout.overlay.client import Put
from stageout.overlay.directories import deposit_directories
from stageout.overlay.gatherer import Wanted
from stageout.overlay.many import Found, below, get_many, put_many
from stageout.overlay.operations import Session
from stageout.overlay.packs import SmallPut
from stageout.overlay.sameness import compared
from stageout.overlay.settings import connections_of
from stageout.wire.fields import MAX_PATH_BYTES
from stageout.wire.route import Route

_LOST = frozenset({ErrorClass.CONNECTION_LOST, ErrorClass.STALLED})
_LIST_AGAIN = 3
#: Of one directory: a router that names more does not end, or means harm.
MOST_ENTRIES = 10_000_000
_MOST_NAME_BYTES = 255
_NO_NAMES = frozenset({"", ".", ".."})
#: Path there, and file here.
_Key = tuple[str, str]


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
        tree = _Tree(gateway, Path(name), there, custodian, terminal, options.json)
        if tree.send(options, routes):
            status = Exit.FAILED
    return int(status)


def _name_of(directory: Path) -> str:
    """Its own name, also of a symbolic link; of ``.`` that of the directory that it is."""
    return directory.name if directory.name not in ("", "..") else directory.resolve().name


class _Tree:
    """One directory that is sent. :param custodian: who is asked; the router itself where ``terminal`` is ""."""

    def __init__(
        self, gateway: Gateway, local: Path, path: str, custodian: Gateway, terminal: str, is_json: bool = False
    ) -> None:
        self._gateway, self._local, self._prefix = gateway, local, f"{path}/" if path else ""
        self._custodian, self._terminal, self._is_json = custodian, terminal, is_json
        self._given: dict[str, int] = {}
        self._directories: list[Found] = []
        self._tally = Tally(str(local), is_json, server=gateway.server)

    def send(self, options: argparse.Namespace, routes: Sequence[Route]) -> int:
        """Send it; returns how many of its entries are not there now."""
        first, most = connections_of(options.connections)
        deadline = deadline_of(options)
        passes = self._custodian if self._terminal else None
        try:
            with Session(self._gateway, routes=routes, through=passes) as names:
                files = self._new(self._files(), routes) if options.update else self._files()
                put_many(
                    self._custodian, ((one, one.local, self._prefix + one.path) for one in files), self._ended,
                    connections=first, most_connections=most, routes=routes, terminal=self._terminal,
                    priority=options.priority, deadline=deadline, custody=options.custody,
                )  # fmt: skip
                if options.custody:
                    self._deposit_directories(routes)
                else:
                    for directory in self._directories:
                        names.mkdir(self._prefix + directory.path, parents=True, may_exist=True)
                    names.push()
        finally:
            self._tally.clear()
        self._tally.end()
        for origin, count in self._given.items() if not self._is_json else ():
            more = f" --files {count}" if count > 1 else ""
            print(f"  in custody; what became of it: stageout ask overlay://{self._custodian.server} {origin}{more}")
        return self._tally.failures

    def _deposit_directories(self, routes: Sequence[Route]) -> None:
        if not self._directories:
            return
        made = {self._prefix + one.path: one for one in self._directories}
        try:
            origin, failures = deposit_directories(
                self._custodian, list(made), terminal=self._terminal, routes=routes
            )  # fmt: skip
            self._given[origin] = len(made)
        except TransferFailure as failure:
            failures = dict.fromkeys(made, failure)
        for path, reason in failures.items():
            self._ended(made[path], reason)

    def _files(self) -> Iterator[Found]:
        """The files; empty directories are made when these are there."""
        for found in below(self._local):
            if found.kind == "file":
                yield found
            elif found.kind == "empty":
                self._directories.append(found)
            else:
                self._ended(found, TransferFailure(ErrorClass.NOT_SUPPORTED, f"{found.local} is not a file"))

    def _new(self, files: Iterator[Found], routes: Sequence[Route]) -> Iterator[Found]:
        """Those that are not there yet."""
        pairs = ((one, Path(one.local), self._prefix + one.path) for one in files)
        for found, is_same in compared(self._gateway, pairs, is_put=True, routes=routes):
            if is_same:
                self._tally.same(local=found.local, path=self._prefix + found.path, generation=0, custodians=[])
            else:
                yield found

    def _ended(self, found: Found, result: Put | SmallPut | TransferFailure) -> None:
        path = self._prefix + found.path
        if isinstance(result, TransferFailure):
            self._tally.failed(found.path, result, local=found.local, path=path, generation=0, custodians=[])
            return
        given, outcome = [], "done"
        if result.origin:
            seq, outcome = getattr(result, "seq", 1), "custody"
            self._given[result.origin] = max(self._given.get(result.origin, 0), seq)
            given = [{"custodian": self._custodian.server, "origin": result.origin, "number": seq}]
        self._tally.arrived(
            result.size_bytes, outcome, local=found.local, path=path, generation=result.generation, custodians=given
        )  # fmt: skip


def fetch_tree(gateway: Gateway, path: str, options: argparse.Namespace, routes: Sequence[Route]) -> int:
    """All files below a directory there; each that fails is said, and the others are fetched nevertheless.

    :raises TransferFailure: the directory cannot be read, or the router cannot be reached.
    """
    into = _into(path, options.file or "./", options.update)
    fetched = _Fetched(into, Tally(str(into), options.json, server=gateway.server))
    first, most = connections_of(options.connections)
    try:
        with Session(gateway, routes=routes) as names:
            files = fetched.all_below(names, path)
            get_many(
                gateway, fetched.new(gateway, files, routes) if options.update else files, fetched.ended,
                routes=routes, priority=options.priority, deadline=deadline_of(options),
                connections=first, most_connections=most,
            )  # fmt: skip
    finally:
        fetched.tally.clear()
    fetched.tally.end()
    return int(Exit.FAILED if fetched.tally.failures else Exit.OK)


def _into(path: str, file: str, is_update: bool) -> Path:
    """The directory here. The same update again has to mean the same one, whether it is there by then or not."""
    local = Path(file)
    is_inside = file.endswith("/") or (not is_update and stat.S_ISDIR(mode_here(local)))
    return local / path.rpartition("/")[2] if is_inside else local


class _Fetched:
    """A directory that is fetched. :param into: the directory here, made where it is missing.
    :param tally: what has become of its files.
    """

    def __init__(self, into: Path, tally: Tally) -> None:
        self._into, self.tally = into, tally

    def all_below(self, names: Session, path: str) -> Iterator[Wanted[_Key]]:
        """The files, with their names there and here and their sizes; the directories here are made."""
        place = next(one for one in (self._into.absolute(), *self._into.absolute().parents) if one.is_dir())
        with Spooled(place) as directories, Spooled(place) as entries:
            directories.add((path, ""))
            while directories:
                there, below = directories.pop()
                here = self._into / below
                try:
                    _list(names, there, entries)
                    here.mkdir(parents=True, exist_ok=True)
                except (OSError, TransferFailure) as problem:
                    failure = _classified(problem, here)
                    if here == self._into or failure.kind.retryable:
                        raise failure from None
                    self.ended((there, str(here)), failure)
                    continue
                yield from self._files(there, below, entries, directories)

    def _files(self, there: str, below: str, entries: Spooled, directories: Spooled) -> Iterator[Wanted[_Key]]:
        """Those of one directory; the directories in it are added to the others."""
        prefix, here = f"{there}/".lstrip("/"), self._into / below
        inside = "" if here == Path() else os.path.join(here, "")  # noqa: PTH118 - Path drops the last slash
        most_bytes = min(_MOST_NAME_BYTES, MAX_PATH_BYTES - len(os.fsencode(prefix)))
        while entries:
            for name, kind, size_bytes in zip(*entries.pop()):
                path, local = prefix + name, inside + name
                if not _is_name(name, most_bytes):
                    self._refuse(path, str(here), "the router names what is no name of a file")
                elif kind == "directory":
                    directories.add((path, f"{below}/{name}".lstrip("/")))
                elif kind == "file":
                    yield (path, local), path, local, size_bytes
                else:
                    self._refuse(path, local, "is not a file")

    def new(self, gateway: Gateway, files: Iterator[Wanted[_Key]], routes: Sequence[Route]) -> Iterator[Wanted[_Key]]:
        """Those that are not here yet."""
        pairs = ((wanted, Path(wanted[2]), wanted[1]) for wanted in files)
        for wanted, is_same in compared(gateway, pairs, is_put=False, routes=routes):
            if is_same:
                self.tally.same(local=str(wanted[2]), path=wanted[1])
            else:
                yield wanted

    def _refuse(self, path: str, local: str, words: str) -> None:
        self.ended((path, local), TransferFailure(ErrorClass.NOT_SUPPORTED, f"{path}: {words}"))

    def ended(self, key: _Key, result: int | TransferFailure) -> None:
        """A file is here, and has so many bytes; or it will not be."""
        path, local = key
        if isinstance(result, TransferFailure):
            self.tally.failed(path, result, local=local, path=path)
        else:
            self.tally.arrived(result, local=local, path=path)


def _is_name(said: str, most_bytes: int) -> bool:
    """Whether it can be a file's name here, and is below the directory that it is said to be in."""
    if said in _NO_NAMES or "/" in said or "\0" in said:
        return False
    try:
        return len(os.fsencode(said)) <= most_bytes
    except UnicodeEncodeError:
        return False


def _classified(problem: OSError | TransferFailure, here: Path) -> TransferFailure:
    if isinstance(problem, TransferFailure):
        return problem
    is_there = isinstance(problem, FileExistsError)
    words = f"{here} is there, and no directory" if is_there else f"{here}: {problem.strerror}"
    return TransferFailure(ErrorClass.LOCAL_FILE, words)


def _list(names: Session, path: str, found: Spooled) -> None:
    """What is in a directory; asked for again where the connection is lost, for files may come for hours.

    It is all taken at once: a router waits only a minute for who does not.

    :raises TransferFailure: it cannot be read, or never ends, or the router cannot be reached.
    :raises OSError: it cannot be kept here.
    """
    for attempt in itertools.count(1):
        found.clear()
        entries = 0
        try:
            for page in names.pages(path):
                entries += max(1, len(page.names))  # one that is empty, and not the last, is no way to go on for ever
                if entries > MOST_ENTRIES:
                    words = f"{path}: the router names more than {MOST_ENTRIES} entries of that directory"
                    raise TransferFailure(ErrorClass.TOO_LARGE, words)
                found.add((page.names, page.kinds, page.sizes_bytes))
            return
        except TransferFailure as failure:
            if failure.kind not in _LOST or attempt > _LIST_AGAIN:
                raise
            time.sleep(growing_s(0.25, 4.0, attempt))
