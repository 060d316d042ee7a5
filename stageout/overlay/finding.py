"""A file at its destination, or, where that cannot be reached, what custodians have of it on its way there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.fetch import Ended, Progress, get, read
from stageout.overlay.searching import Place, named, search
from stageout.overlay.sockets import FIRST_CONNECTIONS
from stageout.overlay.wire import frames
from stageout.overlay.wire.messages import Answer, Stat
from stageout.overlay.wire.route import Route

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
#: The end of the year 9999: no clock of a router says more, and no calendar goes much further.
_LAST_S = 253_402_300_799


@dataclass(frozen=True)
class Kept:
    """A whole version of a file that a custodian has not delivered yet.

    :param taken_at: Unix time in seconds. :param route: by which the custodian was asked.
    """

    custodian: Gateway
    size_bytes: int
    taken_at: int
    route: Route = ()

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.taken_at))
        return f"{self.custodian.server} has a version of {self.size_bytes} bytes on its way there, taken {when}"


def find(custodian: Gateway, terminal: str, path: str, route: Route = ()) -> Kept | None:
    """The newest version that a custodian has of a file for a terminal (``HOST:PORT``), None when it has none.

    :param route: relays to it. :raises TransferFailure: it was not reached, or does not say.
    """
    with Channel(custodian, route) as channel:
        channel.send(Stat(path, terminal=terminal))
        answer = channel.receive()
        if not isinstance(answer, Answer):
            raise channel.failure(ErrorClass.NOT_SUPPORTED, f"{type(answer).__name__} where ANSWER was due")
    kind = ErrorClass.from_code(answer.code) if answer.code else None
    if kind is ErrorClass.NOT_FOUND:
        return None
    if kind is not None:
        raise TransferFailure(kind, answer.message, custodian.server)
    if len(answer.sizes_bytes) != 1 or len(answer.modified) != 1 or answer.modified[0] > _LAST_S:
        raise TransferFailure(ErrorClass.NOT_SUPPORTED, "its answer is not of one file", custodian.server)
    return Kept(custodian, answer.sizes_bytes[0], answer.modified[0], route)


def get_found(
    gateway: Gateway,
    custodians: Sequence[Route],
    path: str,
    local: Path,
    *,
    stale_ok: bool = False,
    progress: Progress = lambda received_bytes: None,
    sized: Progress = lambda size_bytes: None,
    routes: Sequence[Route] = ((),),
    priority: int = 0,
    deadline: int = 0,
    connections: int = FIRST_CONNECTIONS,
    most_connections: int = 0,
    ended: Ended = lambda shares: None,
) -> Kept | None:
    """Fetch a file from its destination; further parameters as of :func:`stageout.overlay.fetch.get`.

    When the destination cannot be reached, or has no such file, custodians are asked what they have on its way there:
    those that are named, the relays of ``routes``, and the nearest other routers that these, or the destination, know
    (at most 16). All of that takes ten seconds at most.

    :param custodians: ways of custodians, addresses in their order. :param stale_ok: take the newest version that one
        of them has, although nobody can say whether it is, or will be, the one there.
    :returns: the version of a custodian that was taken; None: it is the destination's.
    :raises TransferFailure: classified; the text says who was asked, and what they have.
    """
    try:
        get(
            gateway, path, local, progress=progress, sized=sized, routes=routes, priority=priority, deadline=deadline,
            connections=connections, most_connections=most_connections, ended=ended,
        )  # fmt: skip
        return None
    except TransferFailure as failure:
        is_away = failure.kind in _AWAY
        if not is_away and failure.kind is not ErrorClass.NOT_FOUND:
            raise
        said = search(
            gateway, named(gateway, [*custodians, *routes]), partial(_ask, gateway.server, path),
            guide=None if is_away else Place(gateway, tuple(routes) or ((),)),
        )  # fmt: skip
        found = max(said.found, key=lambda one: one.taken_at, default=None)
        if found is None or not stale_ok:
            text = f"{found}; --stale-ok fetches that" if found else ""
            words = "; ".join(filter(None, (failure.message, text, str(said))))
            raise TransferFailure(failure.kind, words, failure.server) from None
    get(
        replace(found.custodian, timeout_s=gateway.timeout_s), path, local, progress=progress, sized=sized,
        routes=(found.route,), terminal=gateway.server, priority=priority, deadline=deadline,
    )  # fmt: skip
    return found


def _ask(terminal: str, path: str, custodian: Gateway, route: Route) -> Kept | None:
    return find(custodian, terminal, path, route)


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
