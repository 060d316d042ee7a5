"""Small files that came in packs (rule 15): each executed once and seen only whole, the durable steps shared by all.

The way of a batch, top to bottom, is :meth:`SmallFiles.execute`: data written out of sight and synced in one, INTENT
of all in one record, names one after the other, their directories synced in one, DONE of all in one record. The order
is in docs/developer/durable-steps.md. No sockets and no threads.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import NamedTuple

from overlay_router.local import unnamed
from overlay_router.local.hidden import Directories, Hidden
from overlay_router.local.maker import PART_BYTES
from overlay_router.local.makers import MANY, Crew, MakerDied, Makers
from overlay_router.local.staging import as_packed
from overlay_router.local.store import PackIntent, PackResults, Store
from overlay_router.local.trash import left_for_later
from overlay_router.local.tree import (
    OWN,
    SYNC_ALL_FROM,
    BadPath,
    Tree,
    checked,
    is_allowed,
    no_room,
    sync_filesystem,
)
from overlay_router.rules import terminal
from overlay_router.rules.states import Kind, Op, Outcome, Result
from overlay_router.rules.terminal import Step
from stageout.core import durable, log
from stageout.core.errors import ErrorClass
from stageout.overlay.wire import messages
from stageout.overlay.wire.frames import Buffer
from stageout.overlay.wire.packs import PackedFile

_AGAIN_S = 5
_OUT_OF_REACH = frozenset({errno.ENAMETOOLONG, errno.EACCES})
#: Have data written, out of sight and on the disk: their inodes.
_Write = Callable[["list[PackedFile]"], "list[int]"]
#: Give files their names: why some have none.
_GiveNames = Callable[["list[str]", Directories], "dict[int, OSError]"]


class Arrived(NamedTuple):
    """A pack and its files.

    :param digest: that the sender computed. :param peer: who hears the results. :param digest_name: of ``digest``.
    """

    pack: messages.Pack
    files: list[PackedFile]
    digest: Callable[[Buffer], bytes]
    peer: str
    digest_name: str


@dataclass
class _Work:
    """A pack while it is executed.

    :param answers: results that are known, None for STALE. :param todo: files that get names.
    """

    arrived: Arrived
    answers: dict[int, Result | None] = field(default_factory=dict)
    todo: list[PackedFile] = field(default_factory=list)
    new: PackResults = field(default_factory=lambda: PackResults("", 0))


class SmallFiles:
    """Files of packs below the root of a tree. A restart begins with :meth:`recover`."""

    def __init__(self, store: Store, tree: Tree, now: Callable[[], int], makers: Makers | None = None) -> None:
        self._store, self._tree, self._now, self._makers = store, tree, now, makers
        place = tree.root / OWN / "packs"
        place.mkdir(mode=0o700, exist_ok=True)
        self._place = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._umask = os.umask(0o077)
        os.umask(self._umask)
        self._link: unnamed.Link | None = None
        self._unsure = True
        if makers is not None:
            makers.own(self._place)

    def close(self) -> None:
        """Let go of the directory."""
        if self._makers is not None:
            self._makers.end()
        os.close(self._place)

    def execute(self, batch: Sequence[Arrived]) -> list[tuple[str, messages.Packed | messages.NoSpace]]:
        """Give the files of some packs their names; on return results and names are on the disk.

        :returns: for each pack who hears it and what: PACKED, in which files that there was no room for are pending, or
            NOSPACE when none of its files has its name.
        :raises OSError: or of the database: the disk fails. Nothing is answered then, and asking again finds out what
            happened.
        """
        try:
            try:
                works = self._executed(batch)
            except MakerDied:
                log.error("maker-died", packs=len(batch), advice="see what it wrote beside this log; nothing is lost")
                works = self._executed(batch)  # which finds out first who has its name
        except Exception as problem:
            if no_room(problem):
                return self._without_room(batch)
            self.make_sure()
            raise
        return [(one.arrived.peer, _message(one)) for one in works]

    def make_sure(self) -> None:
        """Find out what became of a batch that failed in the middle, before others change names.

        Else a file that has its name, which is not recorded, would get it again when somebody has taken it away. Where
        it cannot be found out now, nobody is held up by that.
        """
        if not self._unsure:
            return
        try:
            self.recover()
        except (OSError, sqlite3.Error) as problem:
            log.error("pack-recovery-failed", problem=problem, advice="look at the disk of the root and its database")

    def _without_room(self, batch: Sequence[Arrived]) -> list[tuple[str, messages.Packed | messages.NoSpace]]:
        """The outcome of a batch whose execution met a full disk: some files may have their names."""
        log.event("space-exhausted", packs=len(batch))
        why = "space"
        try:
            if self._unsure:
                self.recover()
        except (OSError, sqlite3.Error) as problem:
            if not no_room(problem):
                raise
            why = "unrecorded"
        return [(one.peer, self._so_far(one.pack, why)) for one in batch]

    def _so_far(self, pack: messages.Pack, why: str) -> messages.Packed | messages.NoSpace:
        """Results that are recorded; the other files are pending. :param why: these are."""
        record, seqs = self._store.record(pack.origin), range(pack.seq, pack.seq + len(pack.paths))
        pending = {place for place, seq in enumerate(seqs) if not terminal.is_final(record, seq)}
        if len(pending) == len(seqs) and why == "space":
            return messages.NoSpace(pack.origin, pack.seq, _AGAIN_S)
        unknown = Result(Outcome.FAILED, why, code=ErrorClass.NO_SPACE_REMOTE.code)
        results = [record.results.get(seq) if place not in pending else unknown for place, seq in enumerate(seqs)]
        told = as_packed(pack.origin, pack.seq, results)
        columns = zip(told.failed, told.outcomes)
        return replace(told, outcomes=tuple("pending" if place in pending else said for place, said in columns))

    def _executed(self, batch: Sequence[Arrived]) -> list[_Work]:
        if self._unsure:
            self.recover()
        works = [self._judge(arrived) for arrived in batch]
        files = [file for work in works for file in work.todo]
        crew = self._crew(files)
        if crew is None:
            with Hidden(self._place, self._link, self._umask) as hidden:
                self._make(works, files, partial(self._write, hidden), hidden.give_names)
        else:
            self._unsure = True
            with crew:
                self._make(works, files, partial(self._write_beside, crew), crew.give_names)
        self._settle(works)
        return works

    def _crew(self, files: list[PackedFile]) -> Crew | None:
        """Processes that make these files: of many, none too large for them, or in the way of another."""
        if self._makers is None or self._link is None or len(files) < MANY or not _are_apart(files):
            return None
        if max(len(file.data) for file in files) > PART_BYTES:
            return None
        return self._makers.crew()

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
        self._unsure = True  # what cannot be removed now would be in the way of the next files
        with left_for_later():
            self._clean()
            self._unsure = False
        self._link = unnamed.way_to_link(self._place)

    def _has(self, path: str, inode: int) -> bool:
        """Tell whether a name is that of these data. One that can never be is not: it must hold up nobody for ever."""
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
        """The outcome of the files that are not new."""
        pack = work.arrived.pack
        for file in work.arrived.files:
            if file.seq not in new:
                op = Op(int(pack.origin, 16), file.seq, Kind.PUBLISH, file.path, expires=pack.expires)
                step, result = terminal.judge(record, op, now)
                if step is Step.RECORD and result is not None:
                    work.new.results[file.seq] = result
                work.answers[file.seq] = result

    def _make(self, works: list[_Work], files: list[PackedFile], write: _Write, give_names: _GiveNames) -> None:
        """Data written and synced, INTENT, names."""
        try:
            with durable.step("overlay-pack-write"):
                inodes = iter(write(files))
        except OSError:
            self._clean()
            raise
        intents = [
            PackIntent(
                work.new.origin, work.new.expires, [(file.seq, file.path, next(inodes)) for file in work.todo]
            )
            for work in works
            if work.todo
        ]  # fmt: skip
        if not intents:
            return
        self._unsure = True
        self._store.intend_packs(intents)
        with durable.step("overlay-pack-publish"), Directories(self._tree) as directories:
            problems = give_names([file.path for file in files], directories)
            directories.sync(self._place)
        if problems:
            self._fail(works, problems)

    def _write(self, hidden: Hidden, files: list[PackedFile]) -> list[int]:
        each = len(files) < SYNC_ALL_FROM
        inodes = hidden.write(((file.mode, file.data) for file in files), each)
        if files and not each:
            sync_filesystem(self._place)
        return inodes

    def _write_beside(self, crew: Crew, files: list[PackedFile]) -> list[int]:
        inodes = crew.write(files)
        sync_filesystem(self._place)
        return inodes

    def _fail(self, works: list[_Work], problems: dict[int, OSError]) -> None:
        """These files, by their place among all, have no name."""
        owners = [(work, file) for work in works for file in work.todo]
        for place, problem in problems.items():
            work, file = owners[place]
            work.new.results[file.seq] = Result(Outcome.FAILED, _reason(problem, file.path))

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
                with suppress(FileNotFoundError):  # a process that begins tries out what it can, and takes that back
                    os.unlink(name, dir_fd=self._place)


def _problem(path: str) -> str:
    """Of a file that is not taken: its name, or else its data."""
    try:
        checked(path)
    except BadPath as problem:
        return str(problem)[:1000]
    return "digest"


def _reason(problem: OSError, path: str) -> str:
    """Return why written data did not get their name."""
    if isinstance(problem, (IsADirectoryError, NotADirectoryError, FileExistsError)):
        return "conflict"
    log.error("rename-failed", path=path, kind="pack", problem=problem)
    return problem.strerror or str(problem)


@lru_cache(maxsize=1024)
def _done(generation: int) -> Result:
    """Of a file that has its name; most are the first of theirs."""
    return Result(Outcome.DONE, generation=generation)


def _message(work: _Work) -> messages.Packed:
    pack = work.arrived.pack
    return as_packed(pack.origin, pack.seq, [work.answers[file.seq] for file in work.arrived.files])


def apart(batch: Sequence[Arrived]) -> Iterator[list[Arrived]]:
    """The same packs in their order, in groups in which no operation comes twice: a sender may have said one again."""
    group: list[Arrived] = []
    for arrived in batch:
        if any(overlap(arrived.pack, other.pack) for other in group):
            yield group
            group = []
        group.append(arrived)
    if group:
        yield group


def _are_apart(files: Sequence[PackedFile]) -> bool:
    """Tell whether no name comes twice, or is a directory of another one: then their order does not matter."""
    paths = {file.path for file in files}
    above = {path.rpartition("/")[0] for path in paths}
    for parent in tuple(above):
        while parent := parent.rpartition("/")[0]:
            above.add(parent)
    return len(paths) == len(files) and paths.isdisjoint(above)


def overlap(one: messages.Pack, other: messages.Pack) -> bool:
    """Tell whether some operation is in both."""
    if one.origin != other.origin:
        return False
    return one.seq < other.seq + len(other.paths) and other.seq < one.seq + len(one.paths)
