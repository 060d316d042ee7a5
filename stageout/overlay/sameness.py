"""Which of many files are the same here and at a router, so that they need not be transferred.

By their digests where the router knows them. Else by size and time: the later one was changed last when the other had
been transferred, so it is taken for its copy. Clocks may differ: the router has said how late it is there.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeVar

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.core.pauses import growing_s
from stageout.overlay.channel import Channel, Gateway
from stageout.wire import frames
from stageout.wire.overlay import BLOCK_BYTES, Answer, Stat
from stageout.wire.route import Route

#: Between two times that are told apart: they are said in seconds, and the way of a clock's time takes some.
MARGIN_S = 5
#: Questions that are on their way at once.
_ASKED = 64
_TRIES = 4
_LOST = frozenset({ErrorClass.CONNECTION_LOST, ErrorClass.STALLED})
Key = TypeVar("Key")
#: What the caller knows it by, a file here, and its name below the router's root.
Pair = tuple[Key, Path, str]


def compared(
    gateway: Gateway, pairs: Iterable[Pair[Key]], *, is_put: bool, routes: Sequence[Route] = ((),)
) -> Iterator[tuple[Key, bool]]:
    """For each pair in order, whether both are the same; many are asked for at once.

    :param is_put: what is here is to go there; else the other way. :param routes: ways to the router.
    :raises TransferFailure: it cannot be reached.
    """
    with _Asking(gateway, routes) as asking:
        ordered = iter(pairs)
        while some := list(islice(ordered, _ASKED)):
            here = [_status(local) for _, local, _ in some]
            answers = asking.answers([path for (_, _, path), status in zip(some, here) if status is not None])
            for (key, local, _), status in zip(some, here):
                is_here = status is not None and is_same(local, status, answers.popleft(), asking.ahead_s, is_put)
                yield key, is_here


def is_same(local: Path, here: os.stat_result, there: Answer, ahead_s: int, is_put: bool) -> bool:
    """Whether a file here is the one there.

    :param ahead_s: of the router's clock, before ours. :param is_put: as of :func:`compared`.
    """
    if there.code or there.note or there.kinds != ("file",) or there.sizes_bytes != (here.st_size,):
        return False
    if is_put and there.modes != (here.st_mode & 0o777,):
        return False
    if there.manifest and there.digest in frames.digests():
        return _manifest(local, there.digest) == there.manifest
    modified = there.modified[0] - ahead_s
    if is_put:
        return max(here.st_mtime, here.st_ctime) + MARGIN_S <= modified
    return modified + MARGIN_S <= here.st_mtime


def _status(local: Path) -> os.stat_result | None:
    """Of a file; None where there is none."""
    try:
        found = local.lstat()
    except OSError:
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def _manifest(local: Path, kind: str) -> str:
    """As of a PUBLISH; "" where it cannot be read."""
    digest, whole = frames.digests()[kind], hashlib.sha256()
    try:
        with local.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                whole.update(digest(block))
    except OSError:
        return ""
    return whole.hexdigest()


class _Asking:
    """A connection on which names are asked for; one that is lost is made anew.

    :ivar ahead_s: the router's clock before ours, in seconds.
    """

    def __init__(self, gateway: Gateway, routes: Sequence[Route]) -> None:
        self._gateway, self._routes = gateway, tuple(routes) or ((),)
        self._channel: Channel | None = None
        self.ahead_s = 0

    def __enter__(self) -> _Asking:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def answers(self, paths: Sequence[str]) -> deque[Answer]:
        """One for each path, in order. :raises TransferFailure: the router cannot be reached."""
        for attempt in range(1, _TRIES):
            try:
                return self._asked(paths)
            except TransferFailure as failure:
                self._close()
                if failure.kind not in _LOST and (len(self._routes) == 1 or not failure.kind.retryable):
                    raise
                self._routes = (*self._routes[1:], self._routes[0])
                time.sleep(growing_s(0.25, 4.0, attempt))
        return self._asked(paths)

    def _asked(self, paths: Sequence[str]) -> deque[Answer]:
        if self._channel is None:
            self._channel = Channel(self._gateway, self._routes[0])
            self.ahead_s = self._channel.ahead_s
        for path in paths:
            self._channel.send(Stat(path))
        found: deque[Answer] = deque()
        for _ in paths:
            answer = self._channel.receive()
            if not isinstance(answer, Answer):
                raise self._channel.failure(ErrorClass.NOT_SUPPORTED, f"{type(answer).__name__} where ANSWER was due")
            found.append(answer)
        return found

    def _close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
