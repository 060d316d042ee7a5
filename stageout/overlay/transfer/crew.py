"""Connections of one file: a thread for each, all of which take ranges of one block map."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.transfer.blockmap import BlockMap, Range
from stageout.overlay.transfer.connection import Connection, Place, Route

#: Without progress for so long (seconds) a file has failed. A connection that is made again has so long to be there.
PATIENCE_S, _CONNECT_S = 120.0, 3.0
_LOOK_S, _GROW_S = 0.2, 1.0
#: Another connection stays worth its cost while the rate grows by this factor.
_GAIN = 1.1
#: A connection whose bytes nobody acknowledged for so long (seconds) is given up: TCP would send them ever more rarely.
_GIVE_UP_S = 5.0
_LEAVES_S = 1.0
_FIRST_PAUSE_S, _MOST_PAUSE_S = 0.1, 2.0
#: Failures after which another connection may succeed.
PASSING = frozenset(
    {ErrorClass.CONNECTION_LOST, ErrorClass.STALLED, ErrorClass.CONNECT_FAILED, ErrorClass.NAME_LOOKUP_FAILED,
     ErrorClass.SERVER_BUSY, ErrorClass.THROTTLED}
)  # fmt: skip


class Share(NamedTuple):
    """The work of one route for a file."""

    route: tuple[str, ...]
    sent_bytes: int
    connections: int
    problem: str = ""


class Lane:
    """A connection, or its successor after a loss. :ivar key: what the block map knows it by."""

    def __init__(self, route: Route, connection: Connection | None = None) -> None:
        self.route, self.connection = route, connection
        self.key: object = object()
        self.moved_bytes, self.problem, self.silent_since = 0, "", 0.0

    @property
    def open(self) -> Connection:
        """Return its connection."""
        assert self.connection is not None
        return self.connection


class Crew:
    """The connections of one file.

    :param work: moves ranges on one connection until :meth:`take` has no more. :param first: connections on each route
        at first. :param most: later.
    :ivar changed: lock of the block map; notified when blocks have arrived.
    """

    def __init__(
        self, place: Place, routes: Sequence[Route], blockmap: BlockMap, work: Callable[[Lane], None],
        first: int, most: int,
    ) -> None:  # fmt: skip
        self._place, self._routes, self._work = place, routes, work
        self.map, self._first, self._most = blockmap, first, most
        self.changed = threading.Condition()
        self._lanes: list[Lane] = []
        self._living = 0
        self._failure: BaseException | None = None
        self._last = time.monotonic()
        self._grown_s, self._grown_bytes, self._best = self._last, 0, 0.0
        self._is_grown = False
        self.spare: Connection | None = None

    def run(self, connection: Connection | None) -> None:
        """Move all blocks. :param connection: one that is there already, by the first route.

        :raises TransferFailure: they cannot all be moved.
        """
        self._failure, self._last = None, time.monotonic()
        threads = [self._begin(Lane(self._routes[0], connection))] if connection else []
        for route in self._routes:
            count = min(self._first, -(-self.map.left // 4)) - (connection is not None and route == self._routes[0])
            threads += [self._begin(Lane(route)) for _ in range(max(0, count))]
        try:
            while not self._is_over():
                with self.changed:
                    self.changed.wait_for(self._is_over, _LOOK_S)
                self._watch()
                threads += self._grow()
        finally:
            with self.changed:
                self._failure = self._failure or (None if self.map.is_done else KeyboardInterrupt())
                self.changed.notify_all()
            for lane in self._lanes:
                if lane.connection is not None and (self._failure or self.map.holds(lane.key)):
                    lane.connection.abort()
            until = time.monotonic() + _LEAVES_S
            for thread in threads:  # one that connects to a host that is silent finds out later
                thread.join(max(0.0, until - time.monotonic()))
        if self._failure is not None:
            raise self._failure

    def take(self, lane: Lane, waits: bool = True) -> Range | None:
        """Return the next range for a connection, None when there is nothing to do any more.

        :param waits: False: None when there is nothing now.
        """
        with self.changed:
            while not self._is_over():
                part = self.map.take(lane.key, time.monotonic())
                if part is not None or not waits:
                    return part
                self.changed.wait(_LOOK_S)
        return None

    def done(self, lane: Lane, part: Range) -> None:
        """All of a range is at the other side."""
        with self.changed:
            self.map.done(lane.key, part, time.monotonic())
            self._progress()

    def came(self, lane: Lane, block: int) -> bool:
        """Take one block of a download. False: it was there before."""
        with self.changed:
            is_new = self.map.came(lane.key, block)
            self._progress()
        return is_new

    def shares(self) -> tuple[Share, ...]:
        """Return what each route did."""
        found = []
        for route in self._routes:
            lanes = [lane for lane in self._lanes if lane.route == route]
            moved = sum(lane.moved_bytes for lane in lanes)
            problem = next((lane.problem for lane in lanes if lane.problem), "")
            found.append(Share(tuple(map(str, route)), moved, len(lanes), problem))
        return tuple(found)

    def give(self) -> Connection | None:
        """Return the connection that is left, which the caller closes."""
        found, self.spare = self.spare, None
        return found

    def close(self) -> None:
        """Close the connection that is left."""
        if self.spare is not None:
            self.spare.close()
            self.spare = None

    def _progress(self) -> None:
        self._last = time.monotonic()
        self.changed.notify_all()

    def _is_over(self) -> bool:
        return self.map.is_done or self._failure is not None

    def _begin(self, lane: Lane) -> threading.Thread:
        self._lanes.append(lane)
        self._living += 1
        thread = threading.Thread(target=self._serve, args=(lane,), daemon=True)
        thread.start()
        return thread

    def _serve(self, lane: Lane) -> None:
        pause_s = _FIRST_PAUSE_S
        try:
            while not self._is_over():
                before = lane.moved_bytes
                try:
                    if lane.connection is None:
                        lane.connection = Connection(self._place, lane.route, _CONNECT_S)
                    self._work(lane)
                except TransferFailure as failure:
                    if self._is_over():
                        return
                    self._drop(lane)
                    lane.problem = str(failure)
                    if not self._goes_on(lane, failure):
                        return
                    pause_s = _FIRST_PAUSE_S if lane.moved_bytes > before else min(2 * pause_s, _MOST_PAUSE_S)
                    with self.changed:
                        self.changed.wait_for(self._is_over, max(pause_s, min(failure.retry_after_s or 0.0, 30.0)))
        except BaseException as problem:
            self._fail(problem)
        finally:
            self._leave(lane)

    def _goes_on(self, lane: Lane, failure: TransferFailure) -> bool:
        """Tell whether another connection takes the place of one that failed."""
        if failure.intermediate and failure.kind not in PASSING:  # this relay never lets us through
            with self.changed:
                if self._living == 1:
                    self._fail(failure)
            return False
        is_late = time.monotonic() - self._last > PATIENCE_S
        if failure.kind not in PASSING or is_late:
            self._fail(failure)
        return not self._is_over()

    def _fail(self, problem: BaseException) -> None:
        with self.changed:
            self._failure = self._failure or problem
            self.changed.notify_all()

    def _drop(self, lane: Lane) -> None:
        """A connection is lost."""
        with self.changed:
            self.map.lost(lane.key)
            lane.key, lane.silent_since = object(), 0.0
            self.changed.notify_all()
        if lane.connection is not None:
            lane.connection.close()
            lane.connection = None

    def _leave(self, lane: Lane) -> None:
        """A connection is not needed any more; one of them is kept."""
        with self.changed:
            self._living -= 1
            is_free = lane.connection is not None and not lane.open.is_ended and not self.map.holds(lane.key)
            if self.spare is None and is_free and self._failure is None:
                self.spare, lane.connection = lane.connection, None
            self.changed.notify_all()
        if lane.connection is not None:
            lane.connection.close()

    def _watch(self) -> None:
        """Give the ranges of silent connections to others."""
        now = time.monotonic()
        with self.changed:
            late = set(self.map.overdue(now))
            for lane in self._lanes:
                connection = lane.connection
                if connection is None or not self.map.holds(lane.key):
                    continue
                if not connection.is_silent:
                    lane.silent_since = 0.0
                elif not lane.silent_since:
                    lane.silent_since = now
                elif now - lane.silent_since > _GIVE_UP_S:
                    connection.abort()
                if lane.silent_since or lane.key in late:
                    self.map.silent(lane.key)
                    self.changed.notify_all()
            if not self._living and not self._is_over():
                self._fail(TransferFailure(ErrorClass.CONNECTION_LOST, "no connection is left"))

    def _grow(self) -> list[threading.Thread]:
        """Add a connection on each route while that pays."""
        now = time.monotonic()
        took = now - self._grown_s
        if self._is_grown or took < _GROW_S or self._is_over():
            return []
        moved = sum(lane.moved_bytes for lane in self._lanes)
        rate = (moved - self._grown_bytes) / took
        self._grown_s, self._grown_bytes = now, moved
        if rate < self._best * _GAIN or self.map.left << 20 < 3 * rate:
            self._is_grown = rate < self._best * _GAIN
            return []
        self._best = max(self._best, rate)
        counts = {route: sum(lane.route == route for lane in self._lanes) for route in self._routes}
        return [self._begin(Lane(route)) for route, count in counts.items() if count < self._most]
