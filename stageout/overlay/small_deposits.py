"""Small files that custodians get for good, many in one pack.

The caller names each file's operation. So a file is one operation however often it is given, in whichever packs, and to
whichever custodians; its terminal executes it once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Generic, NamedTuple, TypeVar, Union

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.client import Put, allowed
from stageout.overlay.many import Singly
from stageout.overlay.packs import RESUMES, Packer, SmallPut
from stageout.overlay.safekeeping import Custodian, the_same, too_few
from stageout.overlay.sources import AnyPath
from stageout.overlay.wire.fields import MAX_NUMBER
from stageout.wire.deposits import EXPIRES_AFTER_S

_FIRST_PAUSE_S, _PAUSE_MAX_S = 0.5, 15.0
Key = TypeVar("Key")


class Kept(NamedTuple):
    """A file that a custodian has. :param router: what it calls itself, "" when the file had arrived already.

    :param expires: Unix time in seconds.
    """

    custodian: str
    router: str
    size_bytes: int
    expires: int


@dataclass(eq=False)
class Small(Generic[Key]):
    """A file to be given.

    :param key: what its owner knows it by. :param path: below the root of its terminal.
    :param origin: and ``seq``, its number there: its operation.
    """

    key: Key
    local: AnyPath
    path: str
    origin: str
    seq: int
    kept: list[Kept] = field(default_factory=list)
    problems: dict[str, TransferFailure] = field(default_factory=dict)
    is_over: bool = False

    @property
    def may_be_kept(self) -> bool:
        """Tell whether another try may find a custodian for it."""
        return not self.is_over and any(one.kind.retryable for one in self.problems.values())

    def lacks(self, server: str) -> bool:
        """Tell whether a custodian is to be asked to take it."""
        failed = self.problems.get(server)
        has_it = server in {one.custodian for one in self.kept}
        return not self.is_over and not has_it and (failed is None or failed.kind.retryable)


class _Wishes(NamedTuple):
    """Parameters of :func:`deposit_small`. :param resumes: as of :class:`~stageout.overlay.packs.Packer`."""

    expires_after_s: float
    priority: int
    deadline: int
    most_connections: int
    resumes: int


Ended = Callable[[Small[Key], Union[TransferFailure, None]], None]


def deposit_small(
    custodians: Sequence[Custodian],
    files: Iterable[Small[Key]],
    ended: Ended[Key],
    *,
    copies: int = 1,
    wait_s: float = 0.0,
    expires_after_s: float = EXPIRES_AFTER_S,
    priority: int = 0,
    deadline: int = 0,
    most_connections: int = 1,
) -> None:
    """Give small files to so many of the custodians, each another router. On return each file has ended.

    Those whose numbers lie behind each other go together. As many custodians as are to have a file get all of them at
    once, in the same order: so some files are in all of them soon, and not only when the first one has everything.
    Where there are several custodians, one that is not reached is not tried again before the others.

    :param ended: called once for each, by one thread at a time, as soon as so many have it durably, as
        :attr:`Small.kept` says; or with why it must be kept. NOT_SUPPORTED: it may be given by itself, as the same
        operation.
    :param wait_s: how long to go on asking when there are not enough. :param priority: :param deadline: as of
        :func:`~stageout.overlay.client.put`. :param most_connections: to a custodian far away.
    """
    todo = sorted(files, key=lambda file: (file.origin, file.seq))
    resumes = 0 if len(custodians) > 1 else RESUMES  # there is another one to be asked instead
    giving = _Giving(copies, ended, _Wishes(expires_after_s, priority, deadline, most_connections, resumes))
    until_s, pause_s = time.monotonic() + wait_s, _FIRST_PAUSE_S
    while True:
        giving.try_all(custodians, todo)
        if not any(file.may_be_kept for file in todo) or time.monotonic() + pause_s >= until_s:
            break
        time.sleep(pause_s)
        pause_s = min(_PAUSE_MAX_S, 2 * pause_s)
    for file in todo:
        if not file.is_over:
            file.is_over = True
            ended(file, too_few(file.path, len(file.kept), copies, file.problems))


class _Giving(Generic[Key]):
    """Files are given to several custodians side by side. :param copies: custodians that must have each."""

    def __init__(self, copies: int, ended: Ended[Key], wishes: _Wishes) -> None:
        self._copies, self._ended, self._wishes = copies, ended, wishes
        self._lock = threading.Lock()
        self._fatal: list[BaseException] = []

    def try_all(self, custodians: Sequence[Custodian], files: Sequence[Small[Key]]) -> None:
        """Give each file to as many as it still needs; where one of them fails, to the next that was not tried."""
        left = [(file, [one for one in custodians if file.lacks(one.gateway.server)]) for file in files]
        while True:
            portions: dict[str, tuple[Custodian, list[Small[Key]]]] = {}
            for file, untried in left:
                missing = 0 if file.is_over else self._copies - len(file.kept)
                for custodian in untried[:missing]:
                    portions.setdefault(custodian.gateway.server, (custodian, []))[1].append(file)
                del untried[:missing]
            if not portions:
                return
            self._give_all(portions.values())

    def _give_all(self, portions: Iterable[tuple[Custodian, Sequence[Small[Key]]]]) -> None:
        threads = [threading.Thread(target=self._try_to_give, args=portion, daemon=True) for portion in portions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._fatal:
            raise self._fatal[0]

    def _try_to_give(self, custodian: Custodian, files: Sequence[Small[Key]]) -> None:
        try:
            for _, some in groupby(files, key=lambda file: file.origin):
                self._give(custodian, list(some))
        except BaseException as problem:  # it is raised where it was begun
            self._fatal.append(problem)

    def _give(self, custodian: Custodian, files: Sequence[Small[Key]]) -> None:
        """Give files of one origin to a custodian."""
        gateway, wishes = custodian.gateway, self._wishes

        def take(file: Small[Key], result: Put | SmallPut | TransferFailure) -> None:
            self._take(file, gateway.server, packer.expires, result)

        packer = Packer(
            gateway, take, terminal=custodian.terminal, custody=True, origin=files[0].origin,
            expires_after_s=wishes.expires_after_s, most_connections=wishes.most_connections,
            priority=allowed(gateway, wishes.priority), deadline=min(wishes.deadline, MAX_NUMBER),
            resumes=wishes.resumes,
        )  # fmt: skip
        with Singly(packer, take) as small:
            for file in files:
                if not small.add(file, file.local, file.path, file.seq):
                    take(file, TransferFailure(ErrorClass.NOT_SUPPORTED, f"{file.path} is too large for a pack"))
            small.finish()

    def _take(self, file: Small[Key], server: str, expires: int, result: Put | SmallPut | TransferFailure) -> None:
        """The answer of one custodian about a file."""
        with self._lock:
            was_over = file.is_over
            if isinstance(result, TransferFailure):
                file.problems[server] = result
                file.is_over |= result.kind is ErrorClass.NOT_SUPPORTED
            elif isinstance(result, SmallPut) and result.router in {one.router for one in file.kept if one.router}:
                file.problems[server] = the_same(server)
            else:
                router = result.router if isinstance(result, SmallPut) else ""
                file.kept.append(Kept(server, router, result.size_bytes, expires))
                file.is_over |= len(file.kept) == self._copies
            if file.is_over and not was_over:
                self._ended(file, result if isinstance(result, TransferFailure) else None)
