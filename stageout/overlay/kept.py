"""Connections that a file has left, for the next one that goes the same way.

A circuit takes a round trip or two on each hop to be made, and TCP then begins slowly on each. So those on which
nothing is under way any more are kept for a few seconds. A caller that takes some must be ready to make new ones: a
relay may have died meanwhile, or the far end have closed them.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.core.threads import NoThread, started
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.links import Claim, Lane
from stageout.overlay.wire.route import Route

#: So long they are kept without use, and so many of them.
IDLE_S = 3.0
MOST = 32
#: How long a router is given to notice that connections were closed, at each try.
_ROOM_S = (0.1, 0.4, 1.0)
#: Files after which a control connection has done enough: its router remembers them all as long as it lasts.
_MOST_FILES = 1000


class Place(NamedTuple):
    """Which connections are alike: where they end, on whose behalf, on what way, and what they ask of the links."""

    process: int
    verb: str
    gateway: tuple[object, ...]
    route: Route
    priority: int
    deadline: int


def place(verb: str, gateway: Gateway, route: Route, claim: Claim | None = None) -> Place:
    """For a file. :param verb: "put" or "get". :param claim: that relays were told."""
    claim = claim or Claim()
    capability = gateway.credential.text if gateway.credential else ""
    who = gateway.key_name, gateway.secret, capability, gateway.ca
    how = gateway.digest, gateway.congestion, gateway.timeout_s
    return Place(os.getpid(), verb, (gateway.server, *who, *how), route, claim.priority, claim.deadline)


@dataclass
class Circuit:
    """The connections that one file had on one way.

    :param control: None where there is none. :param carriers: connections for blocks.

    :param round_trip_s: at least. :param files: that it has served.
    """

    control: Channel | None
    carriers: list[Channel] = field(default_factory=list)
    round_trip_s: float = 0.0
    files: int = 1
    since_s: float = 0.0

    def close(self) -> None:
        """Close all of it."""
        for channel in (self.control, *self.carriers):
            if channel is not None:
                channel.close()

    def __len__(self) -> int:
        return len(self.carriers) + (self.control is not None)


class Kept:
    """All of a process. :param clock: monotonic, in seconds."""

    def __init__(self, idle_s: float = IDLE_S, most: int = MOST, clock: Callable[[], float] = time.monotonic) -> None:
        self._idle_s, self._most, self._clock = idle_s, most, clock
        self._circuits: list[tuple[Place, Circuit]] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def leave(self, at: Place, circuit: Circuit) -> None:
        """Nothing is under way on it; whoever left it uses it no more."""
        for channel in (circuit.control, *circuit.carriers):
            if channel is not None:
                channel.travel(None)
        with self._changed:
            circuit.since_s = self._clock()
            if circuit.files < _MOST_FILES:
                self._circuits.append((at, circuit))
                ended = self._surplus()
            else:
                ended = [circuit]
            if self._thread is None and self._circuits:
                try:
                    self._thread = started(self._sweep)
                except NoThread:  # nobody would close them in time
                    ended += [circuit for _, circuit in self._circuits]
                    self._circuits.clear()
        for one in ended:
            one.close()

    def take(self, at: Place, gateway: Gateway, lane: Lane | None = None) -> Circuit | None:
        """The one that was left last, without what has ended since; None: there is none.

        :param lane: that its blocks travel in from now on.
        """
        while True:
            with self._changed:
                index = next((n for n in reversed(range(len(self._circuits))) if self._circuits[n][0] == at), -1)
                if index < 0:
                    return None
                _, circuit = self._circuits.pop(index)
            found = _alive(circuit)
            if found is not None:
                for channel in (found.control, *found.carriers):
                    if channel is not None:
                        channel.gateway = gateway
                        channel.travel(lane)
                return found

    def close(self) -> None:
        """Close what is kept now."""
        with self._changed:
            ended, self._circuits = [circuit for _, circuit in self._circuits], []
            self._changed.notify_all()
        for one in ended:
            one.close()

    def __len__(self) -> int:
        with self._changed:
            return sum(len(circuit) for _, circuit in self._circuits)

    def _surplus(self) -> list[Circuit]:
        """The oldest, where there are too many."""
        ended: list[Circuit] = []
        while sum(len(circuit) for _, circuit in self._circuits) > self._most:
            ended.append(self._circuits.pop(0)[1])
        return ended

    def _sweep(self) -> None:
        while True:
            with self._changed:
                if not self._circuits:
                    self._thread = None
                    return
                left_s = self._circuits[0][1].since_s + self._idle_s - self._clock()
                if left_s > 0:
                    self._changed.wait(left_s)
                    continue
                _, circuit = self._circuits.pop(0)
            circuit.close()


def _alive(circuit: Circuit) -> Circuit | None:
    """The transfer on it that has not ended, as far as is known here; None where its control connection has."""
    if circuit.control is not None and not circuit.control.is_open:
        circuit.close()
        return None
    ended = [channel for channel in circuit.carriers if not channel.is_open or channel.has_more(0)]
    for channel in ended:
        channel.close()
    circuit.carriers = [channel for channel in circuit.carriers if channel not in ended]
    return circuit if len(circuit) else None


@functools.lru_cache(maxsize=1)
def kept() -> Kept:
    """Those of this process."""
    return Kept()


class Room:
    """Chances of one thing that needs a connection, where a router has enough of one key: those that this process keeps
    without use may be in its way.
    """

    def __init__(self) -> None:
        self._waits_s = list(_ROOM_S)

    def made(self, failure: TransferFailure) -> bool:
        """Tell whether it is worth another try after this failure: what was kept has been closed, and the router
        noticed."""
        found = kept()
        untried = len(self._waits_s) == len(_ROOM_S)
        if failure.kind is not ErrorClass.SERVER_BUSY or not self._waits_s or (untried and not len(found)):
            return False
        found.close()
        time.sleep(self._waits_s.pop(0))
        return True


# A child has neither the thread that closes them nor, perhaps, the lock.
os.register_at_fork(after_in_child=kept.cache_clear)
