"""The processes that make small files, as the daemon sees them (:mod:`overlay_router.local.maker`).

They write and name the files of a large batch side by side; between the two, INTENT is recorded by the daemon. Each
file stays with the process that wrote its data. Used in one thread.
"""

from __future__ import annotations

import fcntl
import marshal
import mmap
import os
import socket
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from overlay_router.local.hidden import Directories
from overlay_router.local.maker import FORGET, NAME, PART_BYTES, PARTS, WRITE
from overlay_router.local.tree import passes
from stageout.core import log
from stageout.core.children import module_command
from stageout.core.sockets import readable
from stageout.overlay.tcp import wait_at_most
from stageout.overlay.wire.packs import PackedFile

#: Fewer are made by the daemon itself.
MANY = 128
_FILES_OF_PART = 64
#: Processes that did not come up, or died, are begun again after so long.
_AGAIN_S = 10.0
#: Processes that worked here before the daemon died need milliseconds to end.
_SAID_EVERY_S = 10.0
_LOOK_S = 0.02
#: One that neither listens nor answers for so long, with a few dozen files to make, stands still.
_SILENT_S = 120.0
#: It should take milliseconds: after so long it is looked what keeps them. A process that somebody has stopped is not
#: waited for.
_SLOW_S = 5.0
_STOPPED = "T"


_ADVICE = "D behind a number: see the disk of STAGEOUT_ROUTER_ROOT; T: somebody has stopped it (SIGSTOP)"


class MakerDied(Exception):
    """A process ended in the middle of a batch, or stands still. Which of its files have names, their inodes say."""


class Makers:
    """So many processes, begun when they are first wanted.

    :param root: files arrive below it.
    """

    def __init__(self, number: int, root: Path) -> None:
        self._number, self._root = number, root
        self._place = -1
        self._all: list[_Maker] = []
        self._not_before_s = 0.0

    def own(self, place: int) -> None:
        """Take over the directory of hidden files: on return no process of a router before this one names files.

        However long that takes: it is said, and nothing can be decided before.

        :param place: descriptor of that directory, which the processes share. Where the filesystem has no locks,
            there will be no processes.
        """
        said_s, self._place = time.monotonic(), -1
        while True:
            try:
                fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._place = place
                return
            except BlockingIOError:
                if time.monotonic() - said_s > _SAID_EVERY_S:
                    said_s = time.monotonic()
                    advice = (
                        "end the process that has .stageout/packs there open (fuser shows it): it still makes files"
                    )
                    log.error("previous-router-found", root=self._root, advice=advice)
                time.sleep(_LOOK_S)
            except OSError as problem:
                log.warn("makers-disabled", root=self._root, problem=problem)
                return

    def crew(self) -> Crew | None:
        """The processes that make the next batch; None as long as they are not all there."""
        if self._place < 0:
            return None
        if not self._all and time.monotonic() >= self._not_before_s:
            self._not_before_s = time.monotonic() + _AGAIN_S
            self._start()
        try:
            is_ready = bool(self._all) and all(one.is_ready() for one in self._all)
        except MakerDied:
            log.error("makers-start-failed", again_s=_AGAIN_S, advice="see what they wrote beside this log")
            self.end()
            return None
        return Crew(self, self._all) if is_ready else None

    def end(self) -> None:
        """End all processes: on return none of them changes anything any more. The next batch begins others."""
        for one in self._all:
            one.close()
        self._all = []

    def _start(self) -> None:
        try:
            for _ in range(self._number):
                self._all.append(_Maker(self._place, self._root))
            log.event("makers-started", pids=" ".join(str(one.pid) for one in self._all))
        except (OSError, AttributeError) as problem:  # the latter of a Python that was built without memfd_create
            log.error("makers-start-failed", problem=problem, again_s=_AGAIN_S)
            self.end()


class _Maker:
    """One process, and the part of its region that each order uses.

    :param place: of hidden files. :raises OSError: it cannot be started.
    """

    def __init__(self, place: int, root: Path) -> None:
        with ExitStack() as stack:
            mine, other = map(stack.enter_context, socket.socketpair())
            wait_at_most(mine, _SILENT_S)
            memory = os.memfd_create("small-files", os.MFD_CLOEXEC)
            stack.callback(os.close, memory)
            os.ftruncate(memory, PARTS * PART_BYTES)
            self._region = memoryview(mmap.mmap(memory, PARTS * PART_BYTES))
            command = module_command(
                "overlay_router.local.maker", str(other.fileno()), str(memory), str(place), str(root)
            )
            descriptors = (other.fileno(), memory, place)
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=descriptors)
            self._connection = Connection(mine.detach())
        self._is_ready = False
        self._parts = count()
        self.files = 0
        self.waiting: deque[_Part] = deque()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def number(self) -> int:
        """Descriptor from which its answers come."""
        return self._connection.fileno()

    def is_ready(self) -> bool:
        """Tell whether it has said that it works. :raises MakerDied: it does not."""
        if not self._is_ready and readable([self.number], 0):
            self._received()
            self._is_ready = True
        return self._is_ready

    def write(self, part: _Part, files: Sequence[PackedFile]) -> None:
        """Have the next files written. :raises MakerDied:"""
        start = at = next(self._parts) % PARTS * PART_BYTES
        region, sizes = self._region, list[int]()
        for file in files:
            size_bytes = len(file.data)
            region[at : at + size_bytes] = file.data
            sizes.append(size_bytes)
            at += size_bytes
        self.order(part, WRITE, start, sizes, [file.mode for file in files])
        self.files += len(files)

    def order(self, part: _Part, *words: Any) -> None:
        """Have something done with a part, which is answered. :raises MakerDied:"""
        self._say(words)
        self.waiting.append(part)

    def forget(self) -> None:
        """The batch is over. :raises MakerDied:"""
        self._say((FORGET,))

    def _say(self, words: tuple[Any, ...]) -> None:
        try:
            self._connection.send_bytes(marshal.dumps(words))
        except OSError:
            raise MakerDied from None

    def answer(self) -> Heard:
        """The next one. :raises MakerDied:"""
        answer = marshal.loads(self._received())
        return self.waiting.popleft(), answer

    def _received(self) -> bytes:
        try:
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            raise MakerDied from None

    @property
    def state(self) -> str:
        """Of the process, as proc(5) writes it: T is stopped, D waits for a disk. "" where nobody can say."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return ""

    def close(self) -> None:
        """End the process and wait for it, however long the kernel needs to end it: that is said."""
        self._process.kill()
        while True:
            try:
                self._process.wait(_SAID_EVERY_S)
                break
            except subprocess.TimeoutExpired:
                log.error("maker-kill-failed", pid=self.pid, state=self.state, advice=_ADVICE)
        self._connection.close()


class _Part(NamedTuple):
    """Files of a batch that one process makes. :param start: of all files. :param first: of those of the process."""

    start: int
    end: int
    maker: _Maker
    first: int


#: A part and what its process answers: inodes, errors by place in it, or the error that ended it.
Heard = tuple[_Part, Any]


class Crew:
    """The processes, for one batch. The rest that they still have of it when it ends is forgotten."""

    def __init__(self, makers: Makers, all_: Sequence[_Maker]) -> None:
        self._makers, self._all = makers, all_
        self._parts: list[_Part] = []

    def __enter__(self) -> Crew:
        for one in self._all:
            one.files = 0
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            if any(one.waiting for one in self._all):
                raise MakerDied
            for one in self._all:
                one.forget()
        except MakerDied:
            self._makers.end()

    def write(self, files: Sequence[PackedFile]) -> list[int]:
        """Have data written out of sight; returns their inodes.

        :raises OSError: the disk is full, or fails. :raises MakerDied: nothing has a name.
        """
        inodes, heard = [0] * len(files), list[Heard]()
        for start, end in _parts(files):
            maker = min(self._all, key=lambda one: len(one.waiting))
            self._make_room(maker, heard)
            self._parts.append(_Part(start, end, maker, maker.files))
            maker.write(self._parts[-1], files[start:end])
        for part, answer in self._all_heard(heard):
            inodes[part.start : part.end] = answer
        return inodes

    def give_names(self, paths: Sequence[str], directories: Directories) -> dict[int, OSError]:
        """As :meth:`Hidden.give_names`, but not in order: no path is there twice, or lies below another one.

        Directories are made here: a process that took back one that it made would take it from the others.

        :raises OSError: there is no room for a name. :raises MakerDied: some have their names.
        """
        closed = _made({path.rpartition("/")[0]: path for path in paths}, directories)
        problems = _inside(closed, paths) if closed else {}
        asked = ["" if place in problems else path for place, path in enumerate(paths)] if problems else paths
        heard: list[Heard] = []
        for part in self._parts:
            self._make_room(part.maker, heard)
            part.maker.order(part, NAME, part.first, asked[part.start : part.end])
        for part, answer in self._all_heard(heard):
            for place, number in answer.items():
                problems.setdefault(part.start + place, OSError(number, os.strerror(number)))
        return problems

    def _make_room(self, maker: _Maker, heard: list[Heard]) -> None:
        """It has not too much to do: its memory is bounded, and neither side waits for the other to listen."""
        while len(maker.waiting) >= PARTS:
            self._hear(heard)

    def _all_heard(self, heard: list[Heard]) -> list[Heard]:
        """All answers. :raises OSError: one of them is an error."""
        while any(one.waiting for one in self._all):
            self._hear(heard)
        for _, answer in heard:
            if isinstance(answer, int):
                raise OSError(answer, os.strerror(answer))
        return heard

    def _hear(self, heard: list[Heard]) -> None:
        """Wait for an answer. :raises MakerDied: there is none for too long; it is ended before anything is decided."""
        by_number = {one.number: one for one in self._all if one.waiting}
        began_s, limit_s = time.monotonic(), _SLOW_S
        while not (answering := readable(by_number, limit_s)):
            states = {one.pid: one.state for one in by_number.values()}
            shown = " ".join(f"{pid}:{state}" for pid, state in states.items())
            after_s = round(time.monotonic() - began_s, 1)
            if _STOPPED in states.values() or after_s >= _SILENT_S:
                log.error("makers-stalled", pids=shown, after_s=after_s, advice=_ADVICE)
                raise MakerDied
            log.warn("makers-slowed", pids=shown, after_s=after_s, advice=_ADVICE)
            limit_s = min(2 * limit_s, _SILENT_S)
        heard += [by_number[number].answer() for number in answering]


def _parts(files: Sequence[PackedFile]) -> Iterator[tuple[int, int]]:
    """Where files are divided, each part with room in a region."""
    start = size_bytes = 0
    for number, file in enumerate(files):
        if number - start == _FILES_OF_PART or size_bytes + len(file.data) > PART_BYTES:
            yield start, number
            start, size_bytes = number, 0
        size_bytes += len(file.data)
    if start < len(files):
        yield start, len(files)


def _made(parents: dict[str, str], directories: Directories) -> dict[str, OSError]:
    """Make directories, each known by a path in it; why some cannot be. :raises OSError: none can be made now."""
    problems: dict[str, OSError] = {}
    for parent, path in parents.items():
        try:
            directories.open(parent, path)
        except OSError as problem:
            if passes(problem):
                raise
            problems[parent] = problem
    return problems


def _inside(closed: dict[str, OSError], paths: Sequence[str]) -> dict[int, OSError]:
    """Those paths whose directory cannot be."""
    parents = ((place, path.rpartition("/")[0]) for place, path in enumerate(paths))
    return {place: closed[parent] for place, parent in parents if parent in closed}
