"""Small files that came in packs (rule 15): each executed once and seen only whole, the durable steps shared by all.

The way of a batch, top to bottom, is :meth:`SmallFiles.execute`: data written out of sight and synced in one, INTENT
of all in one record, names one after the other, their directories synced in one, DONE of all in one record. The order
is in docs/ORDERING.md. No sockets and no threads.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

from overlay_router import terminal
from overlay_router.states import Kind, Op, Outcome, Result
from overlay_router.store import PackIntent, PackResults, Store
from overlay_router.terminal import Step
from overlay_router.tree import NO_ROOM, OWN, BadPath, Tree, checked
from stageout.core import durable, log
from stageout.wire import overlay
from stageout.wire.frames import Buffer
from stageout.wire.packs import PackedFile

_AGAIN_S = 5
_REASONS, _REASON_CHARS = 200, 100
#: From so many files or directories on, one sync of the filesystem costs less than one of each.
_SYNC_ALL_FROM = 8
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Arrived(NamedTuple):
    """A pack and its files. :param digest: that the sender computed. :param peer: who hears the results."""

    pack: overlay.Pack
    files: list[PackedFile]
    digest: Callable[[Buffer], bytes]
    peer: str


@dataclass
class _Work:
    """A pack while it is executed.

    :param answers: results that are known, None for STALE. :param todo: files, and the inodes of their data.
    """

    arrived: Arrived
    answers: dict[int, Result | None] = field(default_factory=dict)
    todo: list[tuple[PackedFile, int]] = field(default_factory=list)
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
        self._unsure = True

    def close(self) -> None:
        """Let go of the directory."""
        os.close(self._place)

    def execute(self, batch: Sequence[Arrived]) -> list[tuple[str, overlay.Packed | overlay.NoSpace]]:
        """Give the files of some packs their names; on return results and names are on the disk.

        :returns: for each pack who hears it and what: PACKED, or NOSPACE when there was no room for the batch.
        :raises OSError: the disk fails; nothing is answered then, and asking again finds out what happened.
        """
        if self._unsure:
            self.recover()
        works = [self._judge(arrived) for arrived in batch]
        try:
            self._write(works)
        except OSError as problem:
            self._clean()
            if problem.errno not in NO_ROOM:
                raise
            log.event("no-space", packs=len(works))
            return [
                (one.arrived.peer, overlay.NoSpace(one.arrived.pack.origin, one.arrived.pack.seq, _AGAIN_S))
                for one in works
            ]
        self._publish(works)
        self._settle(works)
        return [(one.arrived.peer, _message(one)) for one in works]

    def recover(self) -> None:
        """After a death in the middle: who has its name is done, of the others nothing is left."""
        intents = self._store.pack_intents()
        named: set[str] = set()
        done: list[PackResults] = []
        for intent in reversed(intents):
            found = PackResults(intent.origin, intent.expires)
            for seq, path, inode in reversed(intent.files):
                entry = self._tree.entry(path)
                if path in named or (entry is not None and entry.inode == inode):
                    named.add(path)
                    found.results[seq] = Result(Outcome.DONE)
            done.append(found)
        if intents:
            with durable.step("overlay-recover-sync"):
                _sync_filesystem(self._place)
            self._count(intents, done)
            self._store.settle_packs([one for one in done if one.results])
        self._clean()
        self._unsure = False

    def _count(self, intents: list[PackIntent], done: list[PackResults]) -> None:
        """The generations of recovered files."""
        results = {(one.origin, seq): one for one in done for seq in one.results}
        for intent in intents:
            present = self._store.generations([path for _, path, _ in intent.files])
            for seq, path, _ in intent.files:
                one = results.get((intent.origin, seq))
                if one is not None:
                    present[path] = one.generations[path] = present.get(path, 0) + 1
                    one.results[seq] = Result(Outcome.DONE, generation=present[path])

    def _judge(self, arrived: Arrived) -> _Work:
        """The terminal rule for each file; what may be executed has inode 0 for now."""
        pack = arrived.pack
        work = _Work(arrived, new=PackResults(pack.origin, pack.expires))
        record, now, origin = self._store.record(pack.origin), self._now(), int(pack.origin, 16)
        for file in arrived.files:
            if terminal.is_new(record, file.seq, pack.expires, now):
                problem = self._problem(arrived, file)
                if problem:
                    work.new.results[file.seq] = Result(Outcome.FAILED, problem)
                else:
                    work.todo.append((file, 0))
                continue
            op = Op(origin, file.seq, Kind.PUBLISH, file.path, expires=pack.expires)
            step, result = terminal.judge(record, op, now)
            if step is Step.RECORD and result is not None:
                work.new.results[file.seq] = result
            work.answers[file.seq] = result
        return work

    def _problem(self, arrived: Arrived, file: PackedFile) -> str:
        try:
            checked(file.path)
        except BadPath as problem:
            return str(problem)[:1000]
        return "" if arrived.digest(file.data) == file.digest else "digest"

    def _write(self, works: list[_Work]) -> None:
        """All data out of sight and on the disk, under the position in the batch as a name."""
        total = sum(len(work.todo) for work in works)
        numbers = iter(range(total))
        each = total < _SYNC_ALL_FROM
        with durable.step("overlay-pack-write"):
            for work in works:
                work.todo = [(file, self._write_one(str(next(numbers)), file, each)) for file, _ in work.todo]
            if total and not each:
                _sync_filesystem(self._place)

    def _write_one(self, name: str, file: PackedFile, sync: bool) -> int:
        mode = file.mode & 0o777
        descriptor = os.open(name, _NEW, mode, dir_fd=self._place)
        try:
            if os.write(descriptor, file.data) != len(file.data):
                raise OSError(errno.ENOSPC, "No space left on device")
            if mode & self._umask:
                os.fchmod(descriptor, mode)
            if sync:
                os.fsync(descriptor)
            return os.fstat(descriptor).st_ino
        finally:
            os.close(descriptor)

    def _publish(self, works: list[_Work]) -> None:
        """INTENT, the names, and their directories synced."""
        intents = [
            PackIntent(work.new.origin, work.new.expires, [(file.seq, file.path, inode) for file, inode in work.todo])
            for work in works
            if work.todo
        ]
        if not intents:
            return
        self._unsure = True
        self._store.intend_packs(intents)
        numbers = iter(range(sum(len(intent.files) for intent in intents)))
        with durable.step("overlay-pack-publish"), _Directories(self._tree) as directories:
            for work in works:
                for file, _ in work.todo:
                    problem = self._name(directories, str(next(numbers)), file.path)
                    work.new.results[file.seq] = Result(Outcome.FAILED if problem else Outcome.DONE, problem)
            if directories.one_sync_is_better:
                _sync_filesystem(self._place)
            else:
                directories.sync()

    def _name(self, directories: _Directories, data: str, path: str) -> str:
        """Give written data their name; why that cannot be, "" when it has happened."""
        parent, _, name = path.rpartition("/")
        try:
            os.replace(data, name, src_dir_fd=self._place, dst_dir_fd=directories.open(parent, path))
        except (IsADirectoryError, NotADirectoryError, FileExistsError):
            problem = "conflict"
        except OSError as error:
            log.error("name-not-changed", path=path, kind="pack", problem=error)
            problem = error.strerror or str(error)
        else:
            return ""
        os.unlink(data, dir_fd=self._place)
        return problem

    def _settle(self, works: list[_Work]) -> None:
        """DONE (or FAILED, ...) durable, with the generations of the names."""
        counted: dict[str, int] = {}
        for work in works:
            done = [file for file, _ in work.todo if work.new.results[file.seq].outcome is Outcome.DONE]
            if done:
                counted = {**self._store.generations([file.path for file in done]), **counted}
            for file in done:
                counted[file.path] = work.new.generations[file.path] = counted.get(file.path, 0) + 1
                work.new.results[file.seq] = Result(Outcome.DONE, generation=counted[file.path])
            work.answers.update(work.new.results)
        settled = [work.new for work in works if work.new.results]
        if settled:
            self._store.settle_packs(settled)
        self._unsure = False

    def _clean(self) -> None:
        with os.scandir(self._place) as entries:
            for name in [entry.name for entry in entries]:
                os.unlink(name, dir_fd=self._place)


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
        if directory not in self._open:
            if len(self._open) >= _SYNC_ALL_FROM:
                self.one_sync_is_better = True
                self._stack.close()
                self._open.clear()
            made = self._tree.make_parents(path, sync=False)
            self.one_sync_is_better |= bool(made)
            self._open[directory] = self._stack.enter_context(self._tree.directory(directory))
        return self._open[directory]

    def sync(self) -> None:
        """Bring the names in all of them to the disk."""
        for descriptor in self._open.values():
            os.fsync(descriptor)


def _message(work: _Work) -> overlay.Packed:
    pack, results = work.arrived.pack, [work.answers[file.seq] for file in work.arrived.files]
    bad = [(position, result) for position, result in enumerate(results) if not result or result.outcome != "done"]
    return overlay.Packed(
        pack.origin,
        pack.seq,
        tuple(result.generation if result else 0 for result in results),
        tuple(position for position, _ in bad),
        tuple(result.outcome.value if result else "stale" for _, result in bad),
        tuple(result.reason[:_REASON_CHARS] if result else "" for _, result in bad[:_REASONS]),
    )


_libc = ctypes.CDLL(None, use_errno=True)


def _sync_filesystem(descriptor: int) -> None:
    """Everything of the filesystem that this descriptor is on, data and names. :raises OSError: it failed."""
    if _libc.syncfs(descriptor):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


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
