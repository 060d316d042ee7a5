"""Many files to one router, or back: small ones in packs, large ones side by side, each on connections of its own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Generic, NamedTuple, TypeVar, Union

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Gateway
from stageout.overlay.client import ENDS, GIVE_UP_S, Put, allowed, deposit, put
from stageout.overlay.fetch import get
from stageout.overlay.gatherer import Gatherer, Wanted
from stageout.overlay.packs import Packer, SmallPut
from stageout.overlay.sources import AnyPath
from stageout.overlay.wire.fields import MAX_NUMBER
from stageout.overlay.wire.route import Route
from stageout.wire.deposits import EXPIRES_AFTER_S

Key = TypeVar("Key")
Result = TypeVar("Result")
_File = tuple[Key, AnyPath, str]
Ended = Callable[[Key, Union[Put, SmallPut, TransferFailure]], None]


class Found(NamedTuple):
    """Something below a directory. :param path: from there. :param kind: "file", "empty" (a directory) or "other"."""

    local: str
    path: str
    kind: str


def put_many(
    gateway: Gateway,
    files: Iterable[tuple[Key, AnyPath, str]],
    ended: Ended[Key],
    *,
    connections: int = 2,
    routes: Sequence[Route] = ((),),
    at_once: int = 2,
    terminal: str = "",
    expires_after_s: float = EXPIRES_AFTER_S,
    priority: int = 0,
    deadline: int = 0,
    most_connections: int = 0,
    custody: bool = False,
    progress: Callable[[Key, int], None] = lambda key, sent_bytes: None,
) -> None:
    """Send files: key, local file, path below the router's root. On return every one has ended.

    :param ended: called once for each, never twice at a time: it is at its destination, whole and checked, or failed.
    :param connections: of one large file. :param routes: ways to the router.
    :param terminal: when ``gateway`` is a custodian on the way there; :param expires_after_s: as of
        :func:`~stageout.overlay.client.put`. :param custody: it is enough that the custodian has them.
    :param priority: :param deadline: as of :func:`~stageout.overlay.client.put`; of small files in custodians only.
    :param most_connections: of large files, as there.
    :param at_once: large files. :param progress: of large files.
    """
    end = _one_at_a_time(ended)
    send = partial(
        deposit if custody else put, gateway, connections=connections, routes=routes, terminal=terminal,
        expires_after_s=expires_after_s, priority=priority, deadline=deadline, most_connections=most_connections,
    )  # fmt: skip
    crew = Crew(at_once)
    with _Large(send, crew, end, progress) as large, crew:
        mixed = _Mixed(end, large)
        packer = Packer(
            gateway, mixed.ended, routes, terminal=terminal, custody=custody, expires_after_s=expires_after_s,
            most_connections=max(connections, most_connections), priority=allowed(gateway, priority),
            deadline=min(deadline, MAX_NUMBER),
        )  # fmt: skip
        with Singly(packer, mixed.ended) as small:
            mixed.send(files, small)


def get_many(
    gateway: Gateway,
    files: Iterable[Wanted[Key]],
    ended: Callable[[Key, int | TransferFailure], None],
    *,
    routes: Sequence[Route] = ((),),
    at_once: int = 4,
    priority: int = 0,
    deadline: int = 0,
    connections: int = 2,
    most_connections: int = 0,
) -> None:
    """Fetch files: key, path below the router's root, local file, size as listed. On return every one has ended.

    Small ones come many for one question, meanwhile the others by themselves. Each appears only when whole, with the
    permissions that it has there (within the umask), and takes the place of a file that has its name; its directory
    must be there.

    :param ended: called once for each, never twice at a time: with its size when it is here, checked, or why it is not.
    :param routes: ways to the router. :param at_once: files that come by themselves.
    :param priority: :param deadline: as of :func:`~stageout.overlay.fetch.get`.
    :param connections: :param most_connections: likewise, of each large file.
    :raises TransferFailure: ``files`` raised it; those before it have ended.
    """
    crew = Crew(at_once)
    fetch = partial(
        get, gateway, routes=routes, priority=priority, deadline=deadline, connections=connections,
        most_connections=most_connections,
    )  # fmt: skip
    single = _Single(fetch, _one_at_a_time(ended))
    try:
        with crew, Gatherer(
            gateway, single.ended, lambda wanted: crew.do(partial(single.fetch, wanted)), routes,
            priority=priority, deadline=deadline,
        ) as small:  # fmt: skip
            try:
                for wanted in files:
                    small.add(wanted)
            except TransferFailure:
                small.finish()
                raise
            small.finish()
    except ENDS:  # what has come of a file is removed by who fetches it
        single.is_given_up = True
        crew.wait(GIVE_UP_S)
        raise


class _Single(Generic[Key]):
    """Files that come by themselves. :param fetch: :func:`~stageout.overlay.fetch.get`, say.

    :ivar is_given_up: nothing more is to come.
    """

    def __init__(self, fetch: Callable[..., int], ended: Callable[[Key, int | TransferFailure], None]) -> None:
        self._fetch, self.ended = fetch, ended
        self.is_given_up = False

    def fetch(self, wanted: Wanted[Key]) -> None:
        """Fetch one file to its end."""
        if self.is_given_up:
            return
        key, path, local, _ = wanted
        try:
            size_bytes = self._fetch(path, local, progress=self._go_on)
        except TransferFailure as failure:
            self.ended(key, failure)
        else:
            self.ended(key, size_bytes)

    def _go_on(self, received_bytes: int) -> None:
        if self.is_given_up:
            raise TransferFailure(ErrorClass.UNKNOWN, "given up")


def _one_at_a_time(ended: Callable[[Key, Result], None]) -> Callable[[Key, Result], None]:
    lock = threading.Lock()

    def end(key: Key, result: Result) -> None:
        with lock:
            ended(key, result)

    return end


class _Large(Generic[Key]):
    """Files that leave by themselves, several side by side. :param send: :func:`~stageout.overlay.client.put`, say."""

    def __init__(
        self, send: Callable[..., Put], crew: Crew, ended: Ended[Key], progress: Callable[[Key, int], None]
    ) -> None:
        self._send, self._crew, self._ended, self._progress = send, crew, ended, progress
        self._names: set[str] = set()
        self._changed = threading.Condition()
        self._is_given_up = False

    def __enter__(self) -> _Large[Key]:
        return self

    def __exit__(self, kind: type[BaseException] | None, *more: object) -> None:
        if kind is not None and issubclass(kind, ENDS):  # what the router has of them would take its space for a day
            self._is_given_up = True
            self._crew.wait(GIVE_UP_S)

    def add(self, file: _File[Key]) -> None:
        """Send a file when its turn comes. None of that name is under way."""
        with self._changed:
            self._names.add(file[2])
        self._crew.do(partial(self._put_last, *file))

    def wait_for(self, path: str) -> None:
        """On return none of that name is under way. To be called by whoever adds files."""
        if path in self._names:  # nobody else adds one meanwhile
            with self._changed:
                self._changed.wait_for(lambda: path not in self._names)

    def _put_last(self, key: Key, place: AnyPath, path: str) -> None:
        try:
            if not self._is_given_up:
                self._put(key, place, path)
        finally:
            with self._changed:
                self._names.discard(path)
                self._changed.notify_all()

    def _put(self, key: Key, place: AnyPath, path: str) -> None:
        local = Path(place)
        try:
            mode = local.stat().st_mode & 0o777
            done = self._send(local, path, mode=mode, progress=partial(self._told, key))
        except TransferFailure as failure:
            self._ended(key, failure)
        except OSError as problem:
            self._ended(key, TransferFailure(ErrorClass.LOCAL_FILE, f"{local}: {problem.strerror}"))
        else:
            self._ended(key, done)

    def _told(self, key: Key, sent_bytes: int) -> None:
        if self._is_given_up:
            raise TransferFailure(ErrorClass.UNKNOWN, "given up")
        self._progress(key, sent_bytes)


class _Mixed(Generic[Key]):
    """Small files in packs, the others by themselves. A pack may be refused because it is mixed.

    A router of an earlier version, or without a tree, takes a pack only if all of its files end alike: in its tree, or
    with a plugin. Those of one directory do. Once a pack was refused, each pack is of one directory, and the files that
    were refused come again in such packs; one that is refused again goes by itself. A file waits until an earlier one
    of its name has ended, however often that one is sent: so the last of a name stays.
    """

    def __init__(self, ended: Ended[Key], large: _Large[Key]) -> None:
        self._ended, self._large = ended, large
        self._under_way: dict[int, tuple[_File[Key], bool]] = {}  # by identity: a key need not have a hash
        self._again: list[_File[Key]] = []
        self._apart, self._last = False, ""

    def send(self, files: Iterable[_File[Key]], small: Singly[Key]) -> None:
        """On return all small ones have ended, and the others wait for their turn at least."""
        for file in files:
            if self._again:
                self._send_again(small)
            if small.has(file[2]):
                self._finish(small)
            self._large.wait_for(file[2])
            self._send(file, small, is_first=True)
        self._finish(small)

    def _finish(self, small: Singly[Key]) -> None:
        small.finish()
        while self._again:
            self._send_again(small)
            small.finish()

    def _send_again(self, small: Singly[Key]) -> None:
        while again := self._taken():
            for file in again:
                self._send(file, small, is_first=False)

    def _send(self, file: _File[Key], small: Singly[Key], is_first: bool) -> None:
        key, local, path = file
        before, self._last = self._last, path
        self._under_way[id(key)] = file, is_first
        if self._apart and _directory(path) != _directory(before):
            small.cut()
        if not small.add(key, local, path):
            self._under_way.pop(id(key), None)
            self._large.add(file)

    def ended(self, key: Key, result: Put | SmallPut | TransferFailure) -> None:
        """A file that was in a pack, or was to be in one, has ended, unless it is to be sent once more."""
        file, is_first = self._under_way.pop(id(key), (None, False))
        refused = isinstance(result, TransferFailure) and result.kind is ErrorClass.NOT_SUPPORTED
        if file is None or not refused:
            self._ended(key, result)
        elif is_first:
            self._apart = True
            self._again.append(file)
        else:
            self._large.add(file)

    def _taken(self) -> list[_File[Key]]:
        """The files that are to be sent once more, by directory."""
        taken, self._again = self._again, []
        return sorted(taken, key=lambda file: _directory(file[2]))


def _directory(path: str) -> str:
    return path.rpartition("/")[0]


class Crew:
    """Threads that do what they are given, so many things at a time; on exit all of it is done.

    A process that has to end is not held up by them.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._todo: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, *more: object) -> None:
        if kind is None or not issubclass(kind, ENDS):
            self.wait()

    def wait(self, patience_s: float = float("inf")) -> None:
        """On return all is done, or the patience is over; nothing more may be given to it."""
        until_s = time.monotonic() + patience_s
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join(None if patience_s == float("inf") else max(0.0, until_s - time.monotonic()))

    def do(self, work: Callable[[], None]) -> None:
        """Have something done, which must not raise."""
        self._todo.put(work)
        if len(self._threads) < self._size:
            self._threads.append(threading.Thread(target=self._run, daemon=True))
            self._threads[-1].start()

    def _run(self) -> None:
        while (work := self._todo.get()) is not None:
            work()


class Singly(Generic[Key]):
    """A packer that fails file by file."""

    def __init__(self, packer: Packer[Key], ended: Ended[Key]) -> None:
        self._ended, self._packer = ended, packer
        self._failure: TransferFailure | None = None

    def __enter__(self) -> Singly[Key]:
        return self

    def __exit__(self, *exception: object) -> None:
        self._packer.close()

    def add(self, key: Key, local: AnyPath, path: str, seq: int = 0) -> bool:
        """Send a file; False for one that is too large. :param seq: as of :meth:`Packer.add`."""
        if self._failure:
            self._ended(key, self._failure)
            return True
        try:
            return self._packer.add(key, local, path, seq)
        except TransferFailure as failure:
            self._fail(failure, key)
            return True

    def has(self, path: str) -> bool:
        """Tell whether a file of that name is under way."""
        return self._packer.has(path)

    def cut(self) -> None:
        """The next file begins another pack."""
        try:
            if not self._failure:
                self._packer.cut()
        except TransferFailure as failure:
            self._fail(failure)

    def finish(self) -> None:
        """Wait for all."""
        try:
            if not self._failure:
                self._packer.finish()
        except TransferFailure as failure:
            self._fail(failure)

    def _fail(self, failure: TransferFailure, *keys: Key) -> None:
        self._failure = failure
        if self._packer.may_arrive:
            failure.message += "; what the custodian has may still arrive until it expires"
        for key in {id(key): key for key in (*self._packer.keys(), *keys)}.values():
            self._ended(key, failure)


def below(directory: Path) -> Iterator[Found]:
    """Files below a directory, empty directories, and what is neither; symbolic links are not followed.

    :raises TransferFailure: LOCAL_FILE, a directory cannot be read.
    """
    waiting = [(str(directory), "")]
    while waiting:
        local, prefix = waiting.pop()
        try:
            with os.scandir(local) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except OSError as problem:
            raise TransferFailure(ErrorClass.LOCAL_FILE, f"{local}: {problem.strerror}") from None
        if not found and prefix:
            yield Found(local, prefix.rstrip("/"), "empty")
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                waiting.append((entry.path, f"{prefix}{entry.name}/"))
            else:
                is_file = entry.is_file(follow_symlinks=False)
                yield Found(entry.path, prefix + entry.name, "file" if is_file else "other")
