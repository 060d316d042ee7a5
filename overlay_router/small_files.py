"""Small files that came in packs (rule 15): each executed once and seen only whole, the durable steps shared by all.

The way of a batch, top to bottom, is :meth:`SmallFiles.execute`: data written out of sight and synced in one, INTENT
of all in one record, names one after the other, their directories synced in one, DONE of all in one record. The order
is in docs/ORDERING.md. No sockets and no threads.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from overlay_router import terminal, unnamed
from overlay_router.staging import as_packed
from overlay_router.states import Kind, Op, Outcome, Result
from overlay_router.store import PackIntent, PackResults, Store
from overlay_router.terminal import Step
from overlay_router.tree import (
    NO_ROOM,
    OWN,
    SYNC_ALL_FROM,
    BadPath,
    Tree,
    checked,
    is_allowed,
    no_room,
    sync_filesystem,
)
from stageout.core import durable, log
from stageout.core.errors import ErrorClass
from stageout.wire import overlay
from stageout.wire.frames import Buffer
from stageout.wire.packs import PackedFile

_AGAIN_S = 5
_OUT_OF_REACH = frozenset({errno.ENAMETOOLONG, errno.EACCES})
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Arrived(NamedTuple):
    """A pack and its files.

    :param digest: that the sender computed. :param peer: who hears the results. :param digest_name: of ``digest``.
    """

    pack: overlay.Pack
    files: list[PackedFile]
    digest: Callable[[Buffer], bytes]
    peer: str
    digest_name: str


@dataclass
class _Work:
    """A pack while it is executed.

    :param answers: results that are known, None for STALE. :param todo: files that get names. :param inodes: theirs.
    """

    arrived: Arrived
    answers: dict[int, Result | None] = field(default_factory=dict)
    todo: list[PackedFile] = field(default_factory=list)
    inodes: list[int] = field(default_factory=list)
    new: PackResults = field(default_factory=lambda: PackResults("", 0))


class SmallFiles:
    """Files of packs below the root of a tree. A restart begins with :meth:`recover`."""

    def __init__(self, store: Store, tree: Tree, now: Callable[[], int]) -> None:
        self._store, self._tree, self._now = store, tree, now
        place = tree.root / OWN / "packs"
        place.mkdir(mode=0o700, exist_ok=True)
        self._place = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._umask = os.umask(0o077)
        os.umask(self._umask)
        self._link: unnamed.Link | None = None
        self._unsure = True

    def close(self) -> None:
        """Let go of the directory."""
        os.close(self._place)

    def execute(self, batch: Sequence[Arrived]) -> list[tuple[str, overlay.Packed | overlay.NoSpace]]:
        """Give the files of some packs their names; on return results and names are on the disk.

        :returns: for each pack who hears it and what: PACKED, in which files that there was no room for are pending, or
            NOSPACE when none of its files has its name.
        :raises OSError: or of the database: the disk fails. Nothing is answered then, and asking again finds out what
            happened.
        """
        try:
            works = self._executed(batch)
        except (OSError, sqlite3.Error) as problem:
            if not no_room(problem):
                raise
            return self._without_room(batch)
        return [(one.arrived.peer, _message(one)) for one in works]

    def _without_room(self, batch: Sequence[Arrived]) -> list[tuple[str, overlay.Packed | overlay.NoSpace]]:
        """What can be said of a batch whose execution met a full disk: some files may have their names."""
        log.event("no-space", packs=len(batch))
        why = "space"
        try:
            if self._unsure:
                self.recover()
        except (OSError, sqlite3.Error) as problem:
            if not no_room(problem):
                raise
            why = "unrecorded"
        return [(one.peer, self._so_far(one.pack, why)) for one in batch]

    def _so_far(self, pack: overlay.Pack, why: str) -> overlay.Packed | overlay.NoSpace:
        """Results that are recorded; the other files are pending. :param why: these are."""
        record, seqs = self._store.record(pack.origin), range(pack.seq, pack.seq + len(pack.paths))
        pending = {place for place, seq in enumerate(seqs) if not terminal.is_final(record, seq)}
        if len(pending) == len(seqs) and why == "space":
            return overlay.NoSpace(pack.origin, pack.seq, _AGAIN_S)
        unknown = Result(Outcome.FAILED, why, code=ErrorClass.NO_SPACE_REMOTE.code)
        results = [record.results.get(seq) if place not in pending else unknown for place, seq in enumerate(seqs)]
        told = as_packed(pack.origin, pack.seq, results)
        columns = zip(told.failed, told.outcomes)
        return replace(told, outcomes=tuple("pending" if place in pending else said for place, said in columns))

    def _executed(self, batch: Sequence[Arrived]) -> list[_Work]:
        if self._unsure:
            self.recover()
        works = [self._judge(arrived) for arrived in batch]
        with _Hidden(self._place, self._link, self._umask) as hidden:
            try:
                self._write(works, hidden)
            except OSError:
                self._clean()
                raise
            self._publish(works, hidden)
        self._settle(works)
        return works

    def recover(self) -> None:
        """After a death in the middle: who has its name is done, of the others nothing is left."""
        intents = self._store.pack_intents()
        named: set[str] = set()
        done: list[PackResults] = []
        for intent in reversed(intents):
            found = PackResults(intent.origin, intent.expires)
            for seq, path, inode in reversed(intent.files):
                if path in named or self._has(path, inode):
                    named.add(path)
                    found.results[seq] = Result(Outcome.DONE)
            done.append(found)
        if intents:
            with durable.step("overlay-recover-sync"):
                sync_filesystem(self._place)
            self._count(intents, done)
            self._store.settle_packs([one for one in reversed(done) if one.results])
        self._clean()
        self._link = unnamed.way_to_link(self._place)
        self._unsure = False

    def _has(self, path: str, inode: int) -> bool:
        """Whether a name is that of these data. One that can never be is not: it must hold up nobody for ever."""
        try:
            entry = self._tree.entry(path)
        except OSError as problem:
            if problem.errno not in _OUT_OF_REACH:
                raise
            return False
        return entry is not None and entry.inode == inode

    def _count(self, intents: list[PackIntent], done: list[PackResults]) -> None:
        """The generations of recovered files."""
        results = {(one.origin, seq): one for one in done for seq in one.results}
        present: dict[str, int] = {}
        for intent in intents:
            present = {**self._store.generations([path for _, path, _ in intent.files]), **present}
            for seq, path, _ in intent.files:
                one = results.get((intent.origin, seq))
                if one is not None:
                    present[path] = one.generations[path] = present.get(path, 0) + 1
                    one.results[seq] = Result(Outcome.DONE, generation=present[path])

    def _judge(self, arrived: Arrived) -> _Work:
        """The terminal rule for each file."""
        pack, now = arrived.pack, self._now()
        work = _Work(arrived, new=PackResults(pack.origin, pack.expires))
        record = self._store.record(pack.origin)
        seqs = range(pack.seq, pack.seq + len(arrived.files))
        if terminal.are_new(record, seqs, pack.expires, now):
            new = arrived.files
        else:
            new = [file for file in arrived.files if terminal.are_new(record, (file.seq,), pack.expires, now)]
            self._answer(work, {file.seq for file in new}, record, now)
        digest, cancelled = arrived.digest, frozenset(pack.cancelled)
        for file in new:
            if file.seq in cancelled:
                work.new.results[file.seq] = Result(Outcome.CANCELLED)
            elif digest(file.data) == file.digest and is_allowed(file.path):
                work.todo.append(file)
            else:
                work.new.results[file.seq] = Result(Outcome.FAILED, _problem(file.path))
        return work

    def _answer(self, work: _Work, new: set[int], record: terminal.OriginRecord, now: int) -> None:
        """What becomes of the files that are not new."""
        pack = work.arrived.pack
        for file in work.arrived.files:
            if file.seq not in new:
                op = Op(int(pack.origin, 16), file.seq, Kind.PUBLISH, file.path, expires=pack.expires)
                step, result = terminal.judge(record, op, now)
                if step is Step.RECORD and result is not None:
                    work.new.results[file.seq] = result
                work.answers[file.seq] = result

    def _write(self, works: list[_Work], hidden: _Hidden) -> None:
        """All data out of sight and on the disk."""
        total = sum(len(work.todo) for work in works)
        each = total < SYNC_ALL_FROM
        with durable.step("overlay-pack-write"):
            for work in works:
                hidden.write(work.todo, each, work.inodes)
            if total and not each:
                sync_filesystem(self._place)

    def _publish(self, works: list[_Work], hidden: _Hidden) -> None:
        """INTENT, the names, and their directories synced."""
        intents = [
            PackIntent(
                work.new.origin,
                work.new.expires,
                [(file.seq, file.path, inode) for file, inode in zip(work.todo, work.inodes)],
            )
            for work in works
            if work.todo
        ]
        if not intents:
            return
        self._unsure = True
        self._store.intend_packs(intents)
        position = 0
        with durable.step("overlay-pack-publish"), _Directories(self._tree) as directories:
            for work in works:
                for file in work.todo:
                    path = file.path
                    parent, _, name = path.rpartition("/")
                    try:
                        hidden.give_name(position, directories.open(parent, path), name)
                    except OSError as problem:
                        work.new.results[file.seq] = Result(Outcome.FAILED, _reason(problem, path))
                        hidden.drop(position)
                    position += 1
            if directories.one_sync_is_better:
                sync_filesystem(self._place)
            else:
                directories.sync()

    def _settle(self, works: list[_Work]) -> None:
        """DONE (or FAILED, ...) durable, with the generations of the names."""
        counted: dict[str, int] = {}
        for work in works:
            results, generations = work.new.results, work.new.generations
            done = [file for file in work.todo if file.seq not in results] if results else work.todo
            if done:
                counted = {**self._store.generations([file.path for file in done]), **counted}
            for file in done:
                path = file.path
                counted[path] = generations[path] = number = counted.get(path, 0) + 1
                results[file.seq] = _done(number)
            work.answers.update(results)
        settled = [work.new for work in works if work.new.results]
        if settled:
            self._store.settle_packs(settled)
        self._unsure = False

    def _clean(self) -> None:
        with os.scandir(self._place) as entries:
            for name in [entry.name for entry in entries]:
                os.unlink(name, dir_fd=self._place)


class _Hidden:
    """Data of a batch, out of sight: without a name, or under their position where the filesystem has no such files.

    :param link: how they get a name, None where they cannot. :param umask: of this process.
    """

    def __init__(self, place: int, link: unnamed.Link | None, umask: int) -> None:
        self._place, self._link, self._umask = place, link, umask
        self._open: list[int] = []
        self._most = unnamed.most_open() if link else 0

    def __enter__(self) -> _Hidden:
        return self

    def __exit__(self, *exception: object) -> None:
        for descriptor in self._open:
            if descriptor >= 0:
                os.close(descriptor)

    def write(self, files: list[PackedFile], sync: bool, inodes: list[int]) -> None:
        """The next files; adds the inodes of their data. :raises OSError: the disk is full, or fails."""
        place, umask, make = self._place, self._umask, unnamed.make
        for file in files:
            data, mode = file.data, file.mode & 0o777
            position = len(self._open)
            has_name = position >= self._most
            descriptor = os.open(str(position), _NEW, mode, dir_fd=place) if has_name else make(place, mode)
            self._open.append(descriptor)
            if os.write(descriptor, data) != len(data):
                raise OSError(errno.ENOSPC, "No space left on device")
            if mode & umask:
                os.fchmod(descriptor, mode)
            if sync:
                os.fsync(descriptor)
            inodes.append(os.fstat(descriptor).st_ino)
            if has_name:
                os.close(descriptor)
                self._open[position] = -1

    def give_name(self, position: int, directory: int, name: str) -> None:
        """A file's data get their name, replacing a file. :raises OSError: that cannot be."""
        descriptor, data = self._open[position], str(position)
        if self._link is not None and descriptor >= 0:
            try:
                return self._link(descriptor, directory, name)
            except FileExistsError:
                self._link(descriptor, self._place, data)
        return os.replace(data, name, src_dir_fd=self._place, dst_dir_fd=directory)

    def drop(self, position: int) -> None:
        """Nobody wants the data of a file."""
        with suppress(FileNotFoundError):
            os.unlink(str(position), dir_fd=self._place)


class _Directories:
    """Directories that names are put into: made where they are missing, opened once, synced at the end."""

    def __init__(self, tree: Tree) -> None:
        self._tree, self._open, self._stack = tree, dict[str, int](), ExitStack()
        self.one_sync_is_better = False

    def __enter__(self) -> _Directories:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def open(self, directory: str, path: str) -> int:
        """Descriptor of a directory. :param path: a name in it. :raises OSError: a name on the way is a file."""
        descriptor = self._open.get(directory)
        if descriptor is None:
            if len(self._open) >= SYNC_ALL_FROM:
                self.one_sync_is_better = True
                self._stack.close()
                self._open.clear()
            made = self._tree.make_parents(path, sync=False)
            self.one_sync_is_better |= bool(made)
            self._open[directory] = descriptor = self._stack.enter_context(self._tree.directory(directory))
        return descriptor

    def sync(self) -> None:
        """Bring the names in all of them to the disk."""
        for descriptor in self._open.values():
            os.fsync(descriptor)


def _problem(path: str) -> str:
    """Of a file that is not taken: its name, or else its data."""
    try:
        checked(path)
    except BadPath as problem:
        return str(problem)[:1000]
    return "digest"


def _reason(problem: OSError, path: str) -> str:
    """Why written data did not get their name.

    :raises OSError: there is no room for it, which is no result: it is asked again.
    """
    if problem.errno in NO_ROOM:
        raise problem
    if isinstance(problem, (IsADirectoryError, NotADirectoryError, FileExistsError)):
        return "conflict"
    log.error("name-not-changed", path=path, kind="pack", problem=problem)
    return problem.strerror or str(problem)


@lru_cache(maxsize=1024)
def _done(generation: int) -> Result:
    """Of a file that has its name; most are the first of theirs."""
    return Result(Outcome.DONE, generation=generation)


def _message(work: _Work) -> overlay.Packed:
    pack = work.arrived.pack
    return as_packed(pack.origin, pack.seq, [work.answers[file.seq] for file in work.arrived.files])


def apart(batch: Sequence[Arrived]) -> Iterator[list[Arrived]]:
    """The same packs in their order, in groups in which no operation comes twice: a sender may have said one again."""
    group: list[Arrived] = []
    for arrived in batch:
        if any(_overlap(arrived.pack, other.pack) for other in group):
            yield group
            group = []
        group.append(arrived)
    if group:
        yield group


def _overlap(one: overlay.Pack, other: overlay.Pack) -> bool:
    if one.origin != other.origin:
        return False
    return one.seq < other.seq + len(other.paths) and other.seq < one.seq + len(one.paths)
