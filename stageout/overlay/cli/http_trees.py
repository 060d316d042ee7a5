"""``stageout put -r`` and ``get -r`` by HTTP."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stageout.cli.bars import printable
from stageout.cli.exits import Exit, UsageError
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.cli.choosing import Target, check_path
from stageout.overlay.cli.http_put import hop_of
from stageout.overlay.cli.places import mode_here
from stageout.overlay.cli.tally import Tally
from stageout.overlay.http import operations, signing
from stageout.overlay.rules.operations import Kind
from stageout.overlay.transfer.batch import SMALL_BYTES, Batches, Fetching, Outcome, Small
from stageout.overlay.transfer.connection import Connection, Refusal
from stageout.overlay.transfer.download import get
from stageout.overlay.transfer.session import Session, new_origin
from stageout.overlay.transfer.trees import Entry, Group, Movers, grouped, is_same, listed, walked
from stageout.overlay.transfer.upload import Upload

#: Statuses of a batch that one of its files may have caused.
_OF_ONE_FILE = frozenset({400, 403, 404, 405, 409, 413, 501})
#: Connections for small files.
_MOVERS = 4


def send_trees(to: Target, options: argparse.Namespace) -> int:
    """All files below the directories; each failure is reported, and the other files are sent.

    :raises TransferFailure: a directory cannot be read, or the router cannot be reached.
    """
    is_into = len(options.files) > 1 or not to.path or options.url.endswith("/")
    names = [f"{to.path}/{_name_of(Path(file))}".strip("/") if is_into else to.path for file in options.files]
    for name, times in Counter(names).items():
        if times > 1:
            raise UsageError(f"{times} of these would be {printable(name)} there: send them to different directories")
    failures = [_Sending(to, Path(file), name, options).run() for file, name in zip(options.files, names)]
    return int(Exit.FAILED if any(failures) else Exit.OK)


def _name_of(directory: Path) -> str:
    return directory.name if directory.name not in ("", "..") else directory.resolve().name


class _Sending:
    """One directory that is sent. :param path: of it there."""

    def __init__(self, to: Target, local: Path, path: str, options: argparse.Namespace) -> None:
        self._to, self._local, self._options = to, local, options
        self._path, self._prefix = path, f"{path}/" if path else ""
        self._tally = Tally(str(local), options.json, server=to.server)
        self._large: list[Small] = []
        self._empty: list[str] = []
        self._origin, self._next = new_origin(), 1

    def run(self) -> int:
        """Send it; returns how many of its entries are not there now."""
        to = self._to
        movers = Movers(to.place, to.routes, self._put, self._ended, _MOVERS)
        self._batches = Batches(to.place, to.identity, self._origin, movers.ended)
        self._movers, self._numbers = movers, dict[int, int]()
        try:
            try:
                for group in grouped(self._files()):
                    self._numbers[id(group)], self._next = self._next, self._next + len(group)
                    movers.add(group)
            finally:
                movers.end()
            for one in self._large:
                self._send(one, self._ended)
            self._make_directories()
        finally:
            self._tally.clear()
        self._tally.end()
        return self._tally.failures

    def _put(self, connection: Connection, group: Group) -> None:
        try:
            self._batches.put(connection, self._numbers[id(group)], group)
        except Refusal as refusal:
            if refusal.status not in _OF_ONE_FILE:
                raise
            self._put_each(connection, group)

    def _put_each(self, connection: Connection, group: Group) -> None:
        """Send files one by one: a router refused their batch, and each gets a result of its own."""
        found: Connection | None = connection
        for one in group:
            if not self._movers.is_over(one):
                found = self._send(one, self._movers.ended, found)
        if found is not None and found is not connection:
            found.close()

    def _files(self) -> Iterator[Small]:
        """The small files; large ones and empty directories are kept for later."""
        there: dict[str, Entry] = {}
        if self._options.update:
            there = _below(self._to, self._path)
        for entry in walked(self._local):
            one = Small(self._local / entry.below, self._prefix + entry.below, entry.size)
            if entry.kind == "empty":
                self._empty.append(one.path)
            elif entry.kind != "file":
                self._ended(one, TransferFailure(ErrorClass.NOT_SUPPORTED, f"{one.local} is not a file"))
            elif is_same(entry, there.get(entry.below), True):
                self._tally.same(local=str(one.local), path=one.path, generation=0, custodians=[])
            elif entry.size > SMALL_BYTES:
                self._large.append(one)
            else:
                yield one

    def _send(self, one: Small, ended: Outcome, connection: Connection | None = None) -> Connection | None:
        """Send one file. :param connection: as of :class:`Upload`. Return the connection that is left."""
        to, upload = self._to, None
        try:
            check_path(one.path)
            upload = Upload(
                to.place, to.identity, one.local, one.path, to.routes, one.local.stat().st_mode & 0o777, to.first,
                to.most, hop=hop_of(self._options), connection=connection,
            )  # fmt: skip
            ended(one, upload.run().size_bytes)
        except TransferFailure as failure:
            ended(one, failure)
        except UsageError as problem:
            ended(one, TransferFailure(problem.kind, str(problem)))
        except OSError as problem:
            ended(one, TransferFailure(ErrorClass.LOCAL_FILE, f"{one.local}: {problem.strerror}"))
        return upload.connection if upload else connection

    def _make_directories(self) -> None:
        if not self._empty:
            return
        session = Session(self._to.place, self._to.identity, self._to.routes)
        try:
            for path in self._empty:
                for name in _and_above(path):
                    fields = session.fields(Kind.MKDIR, name, mode=0o755)
                    signed = self._to.identity.sign(signing.OPERATION, operations.to_json(fields))
                    session.begin(fields, signed, {})
        finally:
            session.close()

    def _ended(self, one: Small, result: int | TransferFailure) -> None:
        facts: dict[str, Any] = {"local": str(one.local), "path": one.path, "generation": 0, "custodians": []}
        if isinstance(result, TransferFailure):
            self._tally.failed(one.path[len(self._prefix) :], result, **facts)
        else:
            self._tally.arrived(result, **facts)


def _and_above(path: str) -> list[str]:
    """Return the directories above a path, and itself."""
    parts = path.split("/")
    return ["/".join(parts[: count + 1]) for count in range(len(parts))]


def _below(to: Target, path: str) -> dict[str, Entry]:
    """Return the files of a directory at the router, {} without one."""
    try:
        return {one.below: one for one in listed(to.place, to.routes, path) if one.kind == "file"}
    except TransferFailure as failure:
        if failure.kind is ErrorClass.NOT_FOUND:
            return {}
        raise


def fetch_tree(source: Target, options: argparse.Namespace) -> int:
    """All files below a directory there; each failure is reported, and the other files are fetched.

    :raises TransferFailure: the directory cannot be read, or the router cannot be reached.
    """
    local = Path(options.file or "./")
    is_inside = (options.file or "./").endswith("/") or (not options.update and local.is_dir())
    into = local / source.path.rpartition("/")[2] if is_inside else local
    if mode_here(into) and not into.is_dir():
        raise TransferFailure(ErrorClass.LOCAL_FILE, f"{into} is there, and no directory")
    fetched = _Fetching(source, into, options)
    return int(Exit.FAILED if fetched.run() else Exit.OK)


class _Fetching:
    """One directory that is fetched. :param into: the directory here, made where it is missing."""

    def __init__(self, source: Target, into: Path, options: argparse.Namespace) -> None:
        self._source, self._into, self._options = source, into, options
        self._tally = Tally(str(into), options.json, server=source.server)
        self._large: list[tuple[Small, float]] = []
        self._made = set[Path]()

    def run(self) -> int:
        """Fetch it; returns how many of its entries are not here now."""
        source = self._source
        movers = Movers(source.place, source.routes, self._get, self._ended, _MOVERS)
        self._movers, self._fetching = movers, Fetching(source.place, movers.ended)
        try:
            try:
                for group in grouped(self._files()):
                    movers.add(group)
            finally:
                movers.end()
            for one, modified in self._large:
                self._fetch(one, modified)
        finally:
            self._tally.clear()
        self._tally.end()
        return self._tally.failures

    def _get(self, connection: Connection, group: Group) -> None:
        self._fetching.get(connection, [one for one in group if not self._movers.is_over(one)])

    def _files(self) -> Iterator[Small]:
        """The small files; large ones are kept for later, and directories are made."""
        path = self._source.path
        prefix, is_first = f"{path}/" if path else "", True
        for entry in listed(self._source.place, self._source.routes, path):
            if is_first:
                self._make(self._into)
                is_first = False
            one = Small(self._into / entry.below, prefix + entry.below, entry.size)
            if entry.kind == "directory":
                self._make(one.local)
                continue
            if entry.kind != "file":
                self._ended(one, TransferFailure(ErrorClass.NOT_SUPPORTED, f"{one.path}: is not a file"))
                continue
            self._make(one.local.parent)
            if self._options.update and is_same(entry, _here(one.local), False):
                self._tally.same(local=str(one.local), path=one.path)
            elif entry.size > SMALL_BYTES:
                self._large.append((one, entry.modified))
            else:
                yield one
        if is_first:
            self._make(self._into)

    def _make(self, directory: Path) -> None:
        if directory in self._made:
            return
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise TransferFailure(ErrorClass.LOCAL_FILE, f"{directory}: {problem.strerror}") from None
        self._made.add(directory)

    def _fetch(self, one: Small, modified: float) -> None:
        source = self._source
        try:
            got = get(
                source.place, source.identity, one.path, one.local, routes=source.routes, first=source.first,
                most=source.most,
            )  # fmt: skip
            os.utime(one.local, (modified, modified))
            self._ended(one, got.size_bytes)
        except TransferFailure as failure:
            self._ended(one, failure)
        except OSError as problem:
            self._ended(one, TransferFailure(ErrorClass.LOCAL_FILE, f"{one.local}: {problem.strerror}"))

    def _ended(self, one: Small, result: int | TransferFailure) -> None:
        if isinstance(result, TransferFailure):
            self._tally.failed(one.path, result, local=str(one.local), path=one.path)
        else:
            self._tally.arrived(result, local=str(one.local), path=one.path)


def _here(local: Path) -> Entry | None:
    try:
        status = local.lstat()
    except OSError:
        return None
    is_file = (status.st_mode & 0o170000) == 0o100000
    return Entry("", "file" if is_file else "other", status.st_size, status.st_mtime, status.st_mode & 0o777)
