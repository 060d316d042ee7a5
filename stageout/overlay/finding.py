"""A file at its destination, or, where that cannot be reached, what custodians have of it on its way there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.fetch import Progress, get, read
from stageout.wire import frames
from stageout.wire.overlay import Answer, Stat
from stageout.wire.route import Route

#: Failures that say that the destination is not there, and nothing of the file.
_AWAY = frozenset(
    {
        ErrorClass.CONNECT_FAILED,
        ErrorClass.NAME_LOOKUP_FAILED,
        ErrorClass.NAME_NOT_RESOLVED,
        ErrorClass.CONNECTION_LOST,
        ErrorClass.STALLED,
    }
)


@dataclass(frozen=True)
class Kept:
    """A whole version of a file that a custodian has not delivered yet. :param taken_at: Unix time in seconds."""

    custodian: Gateway
    size_bytes: int
    taken_at: int

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.taken_at))
        return f"{self.custodian.server} has a version of {self.size_bytes} bytes on its way there, taken {when}"


def find(custodian: Gateway, terminal: str, path: str) -> Kept | None:
    """The newest version that a custodian has of a file for a terminal (``HOST:PORT``), None when it has none.

    :raises TransferFailure: it was not reached, or does not say.
    """
    with Channel(custodian) as channel:
        channel.send(Stat(path, terminal=terminal))
        answer = channel.receive()
        if not isinstance(answer, Answer):
            raise channel.failure(ErrorClass.NOT_SUPPORTED, f"{type(answer).__name__} where ANSWER was due")
    kind = ErrorClass.from_code(answer.code) if answer.code else None
    if kind is ErrorClass.NOT_FOUND:
        return None
    if kind is not None:
        raise TransferFailure(kind, answer.message, custodian.server)
    return Kept(custodian, answer.sizes_bytes[0], answer.modified[0])


def get_found(
    gateway: Gateway,
    custodians: Sequence[Gateway],
    path: str,
    local: Path,
    *,
    stale_ok: bool = False,
    progress: Progress = lambda received_bytes: None,
    sized: Progress = lambda size_bytes: None,
    routes: Sequence[Route] = ((),),
    priority: int = 0,
    deadline: int = 0,
) -> Kept | None:
    """Fetch a file from its destination; further parameters as of :func:`stageout.overlay.fetch.get`.

    :param custodians: that are asked when the destination cannot be reached. :param stale_ok: take the newest version
        that one of them has, although nobody can say whether it is, or will be, the one there.
    :returns: the version of a custodian that was taken; None: it is the destination's.
    :raises TransferFailure: classified; the text says what the custodians have.
    """
    try:
        get(gateway, path, local, progress=progress, sized=sized, routes=routes, priority=priority, deadline=deadline)
        return None
    except TransferFailure as failure:
        if failure.kind not in _AWAY or not custodians:
            raise
        found, problems = _newest(custodians, gateway.server, path)
        if found is None or not stale_ok:
            text = f"{found}; --stale-ok fetches that" if found else "; ".join(problems)
            raise TransferFailure(failure.kind, f"{failure.message}; {text}", failure.server) from None
    get(
        found.custodian, path, local, progress=progress, sized=sized, terminal=gateway.server,
        priority=priority, deadline=deadline,
    )  # fmt: skip
    return found


def _newest(custodians: Sequence[Gateway], terminal: str, path: str) -> tuple[Kept | None, list[str]]:
    found: list[Kept] = []
    problems = []
    for custodian in custodians:
        try:
            kept = find(custodian, terminal, path)
        except TransferFailure as failure:
            problems.append(str(failure))
            continue
        if kept is None:
            problems.append(f"{custodian.server} has nothing of it")
        else:
            found.append(kept)
    return max(found, key=lambda one: one.taken_at, default=None), problems


def generation_of(
    gateway: Gateway, routes: Sequence[Route], path: str, size_bytes: int, digest_name: str, digests: Sequence[bytes]
) -> int | None:
    """The generation of a published file if it is just this one; None if it is not, or may not be looked at.

    :param digests: of its blocks, in order. :param digest_name: their kind. :raises TransferFailure: not reached.
    """
    with Channel(gateway, routes[0]) as channel:
        channel.send(Stat(path))
        entry = channel.receive()
    if not isinstance(entry, Answer) or entry.kinds != ("file",) or entry.sizes_bytes != (size_bytes,):
        return None
    digest = frames.digests()[digest_name]
    parts = read(gateway, path, generation=entry.generation, routes=routes)
    try:
        is_same = all(digest(part) == mine for part, mine in zip(parts, digests))
    except TransferFailure as failure:
        if failure.kind.retryable:
            raise
        return None
    return entry.generation if is_same else None
