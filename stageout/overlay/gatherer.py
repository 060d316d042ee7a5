"""Small files back from a router, many for one question.

A few questions are under way at once, so that a long line is full. A file that cannot come in a pack is fetched by
itself: where a connection is lost, a router is of an earlier version or refuses, or a file is larger, or another one,
than was said.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Generic, TypeVar, Union

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.arrivals import new_mark, not_written, part_name
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import allowed
from stageout.overlay.links import Claim
from stageout.overlay.sources import AnyPath
from stageout.overlay.wire.fields import MAX_NUMBER
from stageout.overlay.wire.messages import GetPack
from stageout.overlay.wire.pack_gets import MAX_ASKED, MAX_ASKED_BYTES
from stageout.overlay.wire.packs import MAX_FILE_BYTES, MAX_PACK_BYTES
from stageout.overlay.wire.route import Route

_UNDER_WAY = 4
#: Connections that may be lost on the way.
_RESUMES = 3
#: Of a list in JSON, and for each of its texts.
_BRACKETS_BYTES, _COMMA_BYTES = 2, 2
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
Key = TypeVar("Key")
#: Key, path below the router's root, file here, size in bytes as it was listed.
Wanted = tuple[Key, str, AnyPath, int]
Ended = Callable[[Key, Union[int, TransferFailure]], None]


class Gatherer(Generic[Key]):
    """Small files of one router. Use from one thread.

    :param ended: called with a file's key, and its size when it is here, whole and checked, or why it cannot be.
    :param singly: called with a file that is to be fetched by itself. One of both is called for each file.
    :param routes: ways to the router: the first that works. :param priority: :param deadline: as of a GET.
    """

    def __init__(
        self,
        gateway: Gateway,
        ended: Ended[Key],
        singly: Callable[[Wanted[Key]], None],
        routes: Sequence[Route] = ((),),
        *,
        priority: int = 0,
        deadline: int = 0,
    ) -> None:
        self._gateway, self._ended, self._singly, self._routes = gateway, ended, singly, tuple(routes) or ((),)
        self._claim = Claim(priority=allowed(gateway, priority), deadline=min(deadline, MAX_NUMBER))
        self._channel: Channel | None = None
        self._next: list[Wanted[Key]] = []
        self._under_way: deque[list[Wanted[Key]]] = deque()
        self._data_bytes, self._paths_bytes = 0, _BRACKETS_BYTES
        self._lost, self._is_over = 0, False
        self._marks = count(new_mark())

    def __enter__(self) -> Gatherer[Key]:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def add(self, wanted: Wanted[Key]) -> None:
        """Fetch a file, now or with some that come behind it."""
        _, path, _, size_bytes = wanted
        path_bytes = len(encode_basestring_ascii(path)) + _COMMA_BYTES
        if self._is_over or size_bytes > MAX_FILE_BYTES or _BRACKETS_BYTES + path_bytes > MAX_ASKED_BYTES:
            self._singly(wanted)
            return
        is_full = len(self._next) == MAX_ASKED or self._data_bytes + size_bytes > MAX_PACK_BYTES
        if is_full or self._paths_bytes + path_bytes > MAX_ASKED_BYTES:
            self._ask()
        self._next.append(wanted)
        self._data_bytes += size_bytes
        self._paths_bytes += path_bytes

    def finish(self) -> None:
        """On return every file has ended, or is fetched by itself."""
        self._ask()
        while self._under_way:
            self._trying(self._take)

    def _ask(self) -> None:
        if self._next:
            self._under_way.append(self._next)
            self._next, self._data_bytes, self._paths_bytes = [], 0, _BRACKETS_BYTES
            self._trying(self._send)
        while len(self._under_way) >= _UNDER_WAY:
            self._trying(self._take)

    def _trying(self, step: Callable[[], None]) -> None:
        """Do something; where that fails, or nothing is asked any more, all that is under way goes by itself."""
        try:
            if not self._is_over:
                step()
                return
        except TransferFailure as failure:
            self._close()
            self._lost += 1
            again = failure.kind in (ErrorClass.CONNECTION_LOST, ErrorClass.STALLED)
            self._is_over = self._is_over or not again or self._lost > _RESUMES
        while self._under_way:
            for wanted in self._under_way.popleft():
                self._singly(wanted)

    def _send(self) -> None:
        """Ask for what came last."""
        if self._channel is None:
            self._channel = self._connected()
        self._channel.send(GetPack(
            tuple(path for _, path, _, _ in self._under_way[-1]),
            priority=self._claim.priority, deadline=self._claim.deadline,
        ))  # fmt: skip

    def _connected(self) -> Channel:
        """By the first route that works, to a router that can answer. :raises TransferFailure: there is none."""
        for left in reversed(range(len(self._routes))):
            try:
                channel = Channel(self._gateway, self._routes[0], back=self._claim)
                break
            except TransferFailure:
                if not left:
                    self._is_over = True
                    raise
                self._routes = (*self._routes[1:], self._routes[0])
        if not channel.packs:
            channel.close()
            raise channel.failure(ErrorClass.NOT_SUPPORTED, "small files come by themselves from there")
        return channel

    def _take(self) -> None:
        """The next answer; its files are here then."""
        assert self._channel is not None
        batch = self._under_way[0]
        try:
            found, data = self._channel.receive_pack(len(batch))
        except TransferFailure as failure:
            if failure.kind is ErrorClass.CONTENT_MISMATCH:  # whoever answers so is faulty, or not to be trusted
                self._refuse(self._under_way.popleft(), failure)
            raise
        self._under_way.popleft()
        for wanted, code, mode, content in zip(batch, found.codes, found.modes, data):
            if code:
                self._singly(wanted)  # which says why, where it fails, too
            else:
                self._ended(wanted[0], _written(wanted[2], content, mode, next(self._marks)))

    def _refuse(self, batch: list[Wanted[Key]], failure: TransferFailure) -> None:
        for wanted in batch:
            self._ended(wanted[0], failure)

    def _close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _written(place: AnyPath, content: memoryview, mode: int, mark: int) -> int | TransferFailure:
    """A file here, which gets its name when it is whole, and replaces one that has it. Its size, or why it is not.

    :param mark: of the name that it has before.
    """
    local, size_bytes = os.fspath(place), len(content)
    directory, slash, name = local.rpartition("/")
    part = f"{directory}{slash}{part_name(name, mark)}"
    try:
        descriptor = os.open(part, _NEW, mode & 0o777)
        try:
            _write(descriptor, content)
            os.replace(part, local)  # noqa: PTH105 - a Path takes longer than the call
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
    except OSError as problem:
        return not_written(local, problem)
    return size_bytes


def _write(descriptor: int, content: memoryview) -> None:
    """All of it: a disk that is nearly full takes a part, and says why only when it is asked again."""
    while content:
        content = content[os.write(descriptor, content) :]
