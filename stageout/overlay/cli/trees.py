"""``stageout put -r`` and ``get -r``: whole directories to a router of the overlay, and back."""

from __future__ import annotations

import argparse
import os
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stageout.cli.exits import Exit
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.asking import Asking
from stageout.overlay.channel import Gateway
from stageout.overlay.cli.arguments import deadline_of
from stageout.overlay.cli.places import mode_here
from stageout.overlay.cli.spooled import Spooled
from stageout.overlay.cli.tally import Tally
from stageout.overlay.cli.targets import check_names, is_directory
from stageout.overlay.client import Put
from stageout.overlay.directories import deposit_directories
from stageout.overlay.gatherer import Wanted
from stageout.overlay.many import Found, below, get_many, put_many
from stageout.overlay.operations import Session
from stageout.overlay.packs import SmallPut
from stageout.overlay.sameness import compared
from stageout.overlay.settings import connections_of
from stageout.overlay.wire.fields import MAX_PATH_BYTES
from stageout.overlay.wire.messages import Answer, List
from stageout.overlay.wire.route import Route

#: Of one directory: a router that names more does not end, or means harm.
MOST_ENTRIES = 10_000_000
_MOST_NAME_BYTES = 255
_NO_NAMES = frozenset({"", ".", ".."})
#: Directories that are asked for together, and about how much of what is in them is kept at once.
_TOGETHER, _TOGETHER_BYTES = 256, 16 << 20
#: Path there, file here, and when that there was modified.
_Key = tuple[str, str, int]


def send_trees(
    gateway: Gateway, path: str, options: argparse.Namespace, routes: Sequence[Route], custodian: Gateway, terminal: str
) -> int:
    """All files below the directories; each failure is reported, and the other files are sent.

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
    """Return the last part of a path, also of a symbolic link; for ``.`` the name of the directory."""
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
        """Select the files that the other side lacks."""
        pairs = ((one, one.local, self._prefix + one.path, None) for one in files)
        with Asking(self._gateway, routes) as asking:
            for found, is_same in compared(asking, pairs, is_put=True):
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
    """All files below a directory there; each failure is reported, and the other files are fetched.

    :raises TransferFailure: the directory cannot be read, or the router cannot be reached.
    """
    into = _into(path, options.file or "./", options.update)
    fetched = _Fetched(into, Tally(str(into), options.json, server=gateway.server))
    first, most = connections_of(options.connections)
    try:
        with Asking(gateway, routes) as asking:
            files = fetched.all_below(asking, path)
            get_many(
                gateway, fetched.new(asking, files) if options.update else files, fetched.ended,
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

    def all_below(self, asking: Asking, path: str) -> Iterator[Wanted[_Key]]:
        """The files, with their names there and here and their sizes; the directories here are made."""
        place = next(one for one in (self._into.absolute(), *self._into.absolute().parents) if one.is_dir())
        with Spooled(place) as directories, Spooled(place) as entries:
            directories.add((path, ""))
            some = deque[tuple[str, str]]()
            while directories or some:
                some.extend(directories.pop() for _ in range(min(len(directories), _TOGETHER - len(some))))
                for outcome in self._listed(asking, [there for there, _ in some], entries):
                    there, below = some.popleft()
                    if self._make(there, below, outcome):
                        yield from self._files(there, below, entries, directories)
                    else:
                        deque(_pages(entries), maxlen=0)

    def _listed(self, asking: Asking, paths: Sequence[str], entries: Spooled) -> list[TransferFailure | None]:
        try:
            return _list(asking, paths, entries)
        except OSError as problem:
            raise _classified(problem, self._into) from None

    def _make(self, there: str, below: str, outcome: TransferFailure | None) -> bool:
        """Make a directory here. False: it cannot be, or its listing has failed; others go on.

        :raises TransferFailure: they cannot.
        """
        here = self._into / below
        try:
            if outcome is not None:
                raise outcome
            here.mkdir(parents=True, exist_ok=True)
        except (OSError, TransferFailure) as problem:
            failure = _classified(problem, here)
            if here == self._into or failure.kind.retryable:
                raise failure from None
            self.ended((there, str(here), 0), failure)
            return False
        return True

    def _files(self, there: str, below: str, entries: Spooled, directories: Spooled) -> Iterator[Wanted[_Key]]:
        """List the files of one directory, and add its directories to the others."""
        prefix, here = f"{there}/".lstrip("/"), self._into / below
        inside = "" if here == Path() else os.path.join(here, "")  # noqa: PTH118 - Path drops the last slash
        most_bytes = min(_MOST_NAME_BYTES, MAX_PATH_BYTES - len(os.fsencode(prefix)))
        for page in _pages(entries):
            for name, kind, size_bytes, modified in zip(*page):
                path, local = prefix + name, inside + name
                if not _is_name(name, most_bytes):
                    self._refuse(path, str(here), "the router names what is no name of a file")
                elif kind == "directory":
                    directories.add((path, f"{below}/{name}".lstrip("/")))
                elif kind == "file":
                    yield (path, local, modified), path, local, size_bytes
                else:
                    self._refuse(path, local, "is not a file")

    def new(self, asking: Asking, files: Iterator[Wanted[_Key]]) -> Iterator[Wanted[_Key]]:
        """Select the files that are missing here."""
        pairs = ((wanted, wanted[2], wanted[1], _said(wanted)) for wanted in files)
        for wanted, is_same in compared(asking, pairs, is_put=False):
            if is_same:
                self.tally.same(local=str(wanted[2]), path=wanted[1])
            else:
                yield wanted

    def _refuse(self, path: str, local: str, words: str) -> None:
        self.ended((path, local, 0), TransferFailure(ErrorClass.NOT_SUPPORTED, f"{path}: {words}"))

    def ended(self, key: _Key, result: int | TransferFailure) -> None:
        """A file is here, and has so many bytes; or it will not be."""
        path, local, _ = key
        if isinstance(result, TransferFailure):
            self.tally.failed(path, result, local=local, path=path)
        else:
            self.tally.arrived(result, local=local, path=path)


def _is_name(said: str, most_bytes: int) -> bool:
    """Tell whether a name is valid here and lies below its reported directory."""
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


def _said(wanted: Wanted[_Key]) -> Answer:
    """The listed properties of a file, without its permissions."""
    (path, _, modified), _, _, size_bytes = wanted
    return Answer((path,), ("file",), (size_bytes,), (0,), (modified,))


def _pages(entries: Spooled) -> Iterator[list[list[Any]]]:
    """List the entries of one directory: names, kinds, sizes and times."""
    while page := entries.pop():
        yield page


def _list(asking: Asking, paths: Sequence[str], found: Spooled) -> list[TransferFailure | None]:
    """List the first of some directories: their pages, and an empty row behind each. Return for each the reason why it
    cannot be read, None if it can.

    As many directories are listed as have room together. All pages are taken at once: a router waits a minute at most.

    :raises OSError: it cannot be kept here.
    """
    found.clear()
    outcomes: list[TransferFailure | None] = []
    while len(outcomes) < len(paths):
        end = found.end()
        try:
            for outcome in _each(asking, paths[len(outcomes) :], found):
                outcomes.append(outcome)
                end = found.end()
                if end[0] > _TOGETHER_BYTES:
                    asking.close()
                    return outcomes
        except TransferFailure as failure:
            asking.close()
            found.cut(end)
            found.add(())
            outcomes.append(failure)
            if failure.kind.retryable:
                return outcomes
    return outcomes


def _each(asking: Asking, paths: Sequence[str], found: Spooled) -> Iterator[TransferFailure | None]:
    """The outcome of one directory after the other, when its rows are there.

    :raises TransferFailure: the next one never ends, or the router cannot be reached.
    """
    left, end, entries = deque(paths), found.end(), 0
    for page in asking.answers([List(path) for path in paths]):
        if page is None:
            found.cut(end)
            entries = 0
            continue
        entries += max(1, len(page.names))  # one that is empty, and not the last, is no way to go on for ever
        if entries > MOST_ENTRIES:
            words = f"{left[0]}: the router names more than {MOST_ENTRIES} entries of that directory"
            raise TransferFailure(ErrorClass.TOO_LARGE, words)
        found.add((page.names, page.kinds, page.sizes_bytes, page.modified))
        if not page.more:
            found.add(())
            left.popleft()
            end, entries = found.end(), 0
            yield asking.refusal(page) if page.code else None
