"""A connection by whichever of several routes gives one first; a silent one holds nobody up for long.

The routes are tried in their order, the next one as soon as one has failed, or has said nothing for a second (as of
RFC 8305, "Happy Eyeballs").
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from stageout.core.errors import TransferFailure
from stageout.core.threads import NoThread, started
from stageout.overlay.channel import Channel
from stageout.overlay.wire.route import Route

_NEXT_AFTER_S = 1.0


def reach(
    routes: Sequence[Route], connect: Callable[[Route], Channel], late: Callable[[Route, Channel], None]
) -> tuple[Route, Channel]:
    """A connection, and the route that it goes by.

    :param connect: makes one. :param late: takes one that came after another, in a thread of its own.
    :raises TransferFailure: the last one, when all failed. Any other end leaves no connection open.
    """
    if len(routes) == 1:
        return routes[0], connect(routes[0])
    race = _Race(connect, late)
    try:
        return race.run(routes)
    except BaseException:
        race.give_up()
        raise


class _Race:
    """Routes that are tried beside each other. Parameters as of :func:`reach`."""

    def __init__(self, connect: Callable[[Route], Channel], late: Callable[[Route, Channel], None]) -> None:
        self._connect, self._late = connect, late
        self._made: SimpleQueue[tuple[Route, Channel | BaseException]] = SimpleQueue()
        self._lock = threading.Lock()
        self._first: Channel | None = None
        self._is_given_up = False

    def run(self, routes: Sequence[Route]) -> tuple[Route, Channel]:
        """The first connection. :raises TransferFailure: all failed."""
        left, failed = list(routes), 0
        while True:
            if left:
                self._begin(left.pop(0))
            try:
                route, found = self._made.get(timeout=_NEXT_AFTER_S if left else None)
            except Empty:
                continue
            if isinstance(found, Channel):
                return route, found
            failed += 1
            if failed == len(routes) or not isinstance(found, TransferFailure):
                raise found

    def give_up(self) -> None:
        """Nobody takes a connection any more: what there is, or comes later, is closed."""
        with self._lock:
            self._is_given_up = True
            if self._first is not None:
                self._first.close()

    def _begin(self, route: Route) -> None:
        """Where this process has as many threads as it may, the others wait until this one has come or failed."""
        try:
            started(self._try, route)
        except NoThread:
            self._try(route)

    def _try(self, route: Route) -> None:
        try:
            channel = self._connect(route)
        except BaseException as problem:
            self._made.put((route, problem))
            return
        with self._lock:
            is_first, is_given_up = self._first is None, self._is_given_up
            self._first = self._first or channel
        if is_given_up:
            channel.close()
        elif is_first:
            self._made.put((route, channel))
        else:
            self._late(route, channel)
