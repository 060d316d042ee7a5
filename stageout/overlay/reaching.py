"""A connection by whichever of several routes gives one first; a silent one holds nobody up for long.

The routes are tried in their order, the next one as soon as one has failed, or has said nothing for a second (as of
RFC 8305, "Happy Eyeballs").
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from stageout.core.errors import TransferFailure
from stageout.overlay.channel import Channel
from stageout.wire.route import Route

_NEXT_AFTER_S = 1.0


def reach(
    routes: Sequence[Route], connect: Callable[[Route], Channel], late: Callable[[Route, Channel], None]
) -> tuple[Route, Channel]:
    """A connection, and the route that it goes by.

    :param connect: makes one. :param late: takes one that came after another, in a thread of its own.
    :raises TransferFailure: the last one, when all failed.
    """
    if len(routes) == 1:
        return routes[0], connect(routes[0])
    made: SimpleQueue[tuple[Route, Channel | BaseException]] = SimpleQueue()
    lock, winner = threading.Lock(), list[Channel]()

    def run(route: Route) -> None:
        try:
            channel = connect(route)
        except BaseException as problem:
            made.put((route, problem))
            return
        with lock:
            is_first = not winner
            winner.append(channel)
        if is_first:
            made.put((route, channel))
        else:
            late(route, channel)

    left, failed = list(routes), 0
    while True:
        if left:
            threading.Thread(target=run, args=(left.pop(0),), daemon=True).start()
        try:
            route, found = made.get(timeout=_NEXT_AFTER_S if left else None)
        except Empty:
            continue
        if isinstance(found, Channel):
            return route, found
        failed += 1
        if failed == len(routes) or not isinstance(found, TransferFailure):
            raise found
