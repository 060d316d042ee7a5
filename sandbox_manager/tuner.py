"""Files that move at once to each server, and the streams of each: one controller per server.

Within what the policy service grants (``grants.py``), or the node's own limits. A *flight* is one call of a plugin with
its share of that. Flights are measured when they end, and after every ``STAGEOUT_TUNING_DELAY`` files the controller is
asked for the next step. Only flights that began after the last step count, so a step is judged by its own effect.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sandbox_manager.grants import Grants
from stageout.core import log
from stageout.core.clock import Clock
from stageout.core.config import Settings
from stageout.core.profiles import good_for_uploads
from stageout.tuning.adaptive import Knobs, Step
from stageout.tuning.controllers import FIXED, Controller
from stageout.tuning.deadlines import FILE_BYTES
from stageout.wire.control import StreamsReport

_LONG_S = 60.0
_USED = 0.7
_MOST_LANES = 1000
_MB = 1e6


@dataclass(frozen=True)
class TuningRules:
    """The administrator's settings.

    :param knobs: ``parallelism`` is for plugins that can send a file in parts. :param profiles: directory of what
        ``stageout profile`` has measured.
    """

    controller: str
    knobs: Knobs
    profiles: Path


def read_tuning(settings: Settings) -> TuningRules:
    """Rules from the configuration. :raises ConfigError: a knob cannot be used."""
    return TuningRules(
        settings.text("STAGEOUT_TUNING").lower(),
        Knobs(
            initial=settings.count("STAGEOUT_TUNING_INITIAL"),
            maximum=settings.count("STAGEOUT_TUNING_MAX"),
            parallelism=settings.count("STAGEOUT_TUNING_STREAMS"),
            delay=settings.count("STAGEOUT_TUNING_DELAY"),
            increment=settings.count("STAGEOUT_TUNING_STEP"),
            threshold=settings.number("STAGEOUT_TUNING_THRESHOLD"),
        ),
        Path(settings.text("STAGEOUT_PROFILES")),
    )


@dataclass(frozen=True)
class Target:
    """A server and the plugin for it.

    :param several: the plugin moves STAGEOUT_CONCURRENCY files at once; :param in_parts: each of them over
        STAGEOUT_PARALLELISM streams.
    """

    server: str
    several: bool = False
    in_parts: bool = False


@dataclass(frozen=True, eq=False)
class Flight:
    """One call of a plugin. :param concurrency: files at once. :param parallelism: streams of each."""

    server: str
    owner: str
    concurrency: int
    parallelism: int
    begun_s: float

    @property
    def streams(self) -> int:
        """All that it may open."""
        return self.concurrency * self.parallelism


@dataclass
class _Lane:
    """One server.

    :param in_parts: its plugin sends each file over several streams.
    :param waiting: files for it. :param useful: files at once that the controller could come to soon.
    :param since_s: monotonic time of the last step; ``first_s`` and what follows it belong to the flights that began
        after it and have ended. :param place_s: sum of places used x seconds.
    """

    server: str
    controller: Controller
    since_s: float
    flights: set[Flight] = field(default_factory=set)
    in_parts: bool = False
    waiting: int = 0
    useful: int = 0
    first_s: float = math.inf
    files: int = 0
    size_bytes: int = 0
    place_s: float = 0.0
    rate_mb_s: float = 0.0
    reason: str = ""

    def begin_anew(self, now_s: float) -> None:
        """Forget what was seen."""
        self.since_s, self.first_s = now_s, math.inf
        self.files, self.size_bytes, self.place_s = 0, 0, 0.0


class Tuner:
    """All servers of a node.

    :param start: files at once that were good for a server earlier; 0: nobody knows, and a profile of it is looked for.
    :param grants: None: there is no policy service.
    """

    def __init__(self, rules: TuningRules, clock: Clock, start: Callable[[str], int], grants: Grants | None) -> None:
        self.rules = rules
        self.grants = grants
        self._clock = clock
        self._start = start
        self._lanes: dict[str, _Lane] = {}

    # ---- asked by the planner ----------------------------------------------------------------------------------------

    def room(self, target: Target, owner: str, planned: int = 0) -> int:
        """Files that a further call of a plugin may move at once; 0: it must wait.

        An owner of whom nothing runs may always begin with one file, above the controller's number but within the
        grant, and one owner never takes all of the grant: nobody waits for the end of somebody else's batch.

        :param planned: calls to this server that are planned but not begun.
        """
        lane = self._lane_for(target)
        streams = self._streams(lane)
        step = lane.controller.now(streams)
        if step.concurrency == 0:
            return 0
        used = sum(flight.streams for flight in lane.flights) + planned * step.parallelism
        in_flight = sum(flight.concurrency for flight in lane.flights) + planned
        of_grant = (streams - used) // step.parallelism
        own = sum(flight.concurrency for flight in lane.flights if flight.owner == owner)
        most = max(1, streams // step.parallelism - 1)
        free = min(self._level(lane, step, in_flight) - in_flight, of_grant, most - own)
        return max(0, free) if own else max(free, min(1, of_grant), 0)

    def start(self, target: Target, owner: str, files: int, later: int = 0) -> Flight:
        """A call of a plugin begins; :meth:`end` must follow.

        :param later: further calls to this server that are about to start, among which the room is shared.
        """
        lane = self._lane_for(target)
        step = lane.controller.now(self._streams(lane))
        share = math.ceil(self.room(target, owner, later) / (later + 1)) if target.several else 1
        parallelism = step.parallelism if target.in_parts else 1
        flight = Flight(target.server, owner, max(1, min(files, share)), parallelism, self._clock.monotonic_s())
        lane.flights.add(flight)
        self._tell(lane)
        return flight

    def waiting(self, files: Mapping[str, int]) -> None:
        """Note the waiting files of each server, so that no more streams are asked for than can be used."""
        if self.grants is None:
            return
        for server in {*files, *self._lanes}:
            lane = self._lane(server)
            lane.waiting = files.get(server, 0)
            self._tell(lane)

    # ---- told by the mover -------------------------------------------------------------------------------------------

    def end(self, flight: Flight, sizes_bytes: Sequence[int] = ()) -> None:
        """A call has ended; saying it again does nothing.

        :param sizes_bytes: of the files, when all of them were delivered.
        """
        lane = self._lane(flight.server)
        if flight not in lane.flights:
            return
        lane.flights.remove(flight)
        now_s = self._clock.monotonic_s()
        if sizes_bytes and flight.begun_s >= lane.since_s:
            lane.first_s = min(lane.first_s, flight.begun_s)
            lane.files += len(sizes_bytes)
            lane.size_bytes += sum(sizes_bytes)
            lane.place_s += places_used(sizes_bytes, flight.concurrency) * (now_s - flight.begun_s)
        if lane.files >= self.rules.knobs.delay and lane.place_s > 0:
            self._step(lane, now_s)
        else:
            self._tell(lane)

    def _step(self, lane: _Lane, now_s: float) -> None:
        knobs, streams = self.rules.knobs, self._streams(lane)
        level = lane.controller.now(streams).concurrency
        still = sum(flight.concurrency * (now_s - max(flight.begun_s, lane.first_s)) for flight in lane.flights)
        used = (lane.place_s + still) / max(1e-6, now_s - lane.first_s)
        rate_mb_s = lane.size_bytes / lane.place_s * max(level, 1) / _MB
        lane.begin_anew(now_s)
        if level and used < _USED * level:
            lane.reason = f"Only {used:.1f} of {level} places were used: no measurement."
            self._tell(lane)
            return
        step = lane.controller.step(rate_mb_s, streams)
        lane.rate_mb_s, lane.reason = rate_mb_s, step.reason
        lane.useful -= knobs.increment  # slowly: a controller goes down to measure, and up again
        log.event("tuned", server=lane.server, files_at_once=step.concurrency, before=level, streams=streams,
                  rate_mb_s=round(rate_mb_s, 3), why=step.reason)  # fmt: skip
        self._tell(lane, rate_mb_s=rate_mb_s)

    def flights(self, server: str) -> int:
        """Calls to a server that have begun and not ended."""
        return len(self._lane(server).flights)

    # ---- looking -----------------------------------------------------------------------------------------------------

    def level(self, server: str) -> int:
        """Files at once that the controller has come to."""
        lane = self._lane(server)
        return lane.controller.now(self._streams(lane)).concurrency

    def reports(self) -> list[StreamsReport]:
        """Return the figures for people, by server."""
        return [self._report(lane) for _, lane in sorted(self._lanes.items())]

    def new_rules(self, rules: TuningRules) -> None:
        """Take over a changed configuration; the controllers begin anew where it says something else."""
        if rules == self.rules:
            return
        self.rules = rules
        for lane in self._lanes.values():
            lane.controller = self._controller(lane.server, lane.in_parts)
            lane.begin_anew(self._clock.monotonic_s())

    def _report(self, lane: _Lane) -> StreamsReport:
        streams = self._streams(lane)
        step = lane.controller.now(streams)
        return StreamsReport(
            server=lane.server, tuning=lane.controller.name, files_at_once=step.concurrency,
            streams_each=step.parallelism, files_in_flight=sum(flight.concurrency for flight in lane.flights),
            streams_in_use=sum(flight.streams for flight in lane.flights), streams=streams,
            rate_mb_s=round(lane.rate_mb_s, 3), reason=lane.reason or step.reason,
            grant=self.grants.reason(lane.server) if self.grants else "No policy service: the limits of this node.",
        )  # fmt: skip

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def _lane(self, server: str) -> _Lane:
        lane = self._lanes.get(server)
        if lane is None:
            if len(self._lanes) >= _MOST_LANES:
                self._lanes = {name: one for name, one in self._lanes.items() if one.flights}
            lane = _Lane(server, self._controller(server, in_parts=False), self._clock.monotonic_s())
            self._lanes[server] = lane
        return lane

    def _lane_for(self, target: Target) -> _Lane:
        lane = self._lane(target.server)
        if target.in_parts and not lane.in_parts:
            lane.in_parts = True
            lane.controller = self._controller(target.server, in_parts=True)
        return lane

    def _controller(self, server: str, in_parts: bool) -> Controller:
        """One that starts with what is known; no more streams of a file than its profile says are of use."""
        good = good_for_uploads(self.rules.profiles, server.partition("://")[2])
        streams = self.rules.knobs.parallelism if in_parts else 1
        knobs = replace(self.rules.knobs, parallelism=min(streams, good.streams) if good else streams)
        start = self._start(server) or (good.concurrency if good else 0)
        return Controller(self.rules.controller, knobs, start)

    def _streams(self, lane: _Lane) -> int:
        """Granted streams, never more than the node's own limits."""
        knobs = lane.controller.knobs
        own = knobs.maximum * knobs.parallelism
        granted = self.grants.streams(lane.server) if self.grants else None
        return own if granted is None else min(own, granted)

    def _level(self, lane: _Lane, step: Step, in_flight: int) -> int:
        """The controller's number; one more, up to the initial one, when nothing has ended or begun for a minute."""
        now_s = self._clock.monotonic_s()
        if lane.flights and all(now_s - flight.begun_s > _LONG_S for flight in lane.flights):
            return max(step.concurrency, min(lane.controller.knobs.initial, in_flight + 1))
        return step.concurrency

    def _tell(self, lane: _Lane, rate_mb_s: float | None = None) -> None:
        """Tell the grants what could be used, which is up to twice the present number, and what is used."""
        if self.grants is None:
            return
        knobs, level = lane.controller.knobs, lane.controller.now(self._streams(lane)).concurrency
        in_flight = sum(flight.concurrency for flight in lane.flights)
        lane.useful = max(knobs.initial, 2 * level, lane.useful)
        most = knobs.maximum if lane.controller.name == FIXED else min(knobs.maximum, lane.useful)
        wanted = min(most, lane.waiting + in_flight) * knobs.parallelism
        self.grants.note(lane.server, wanted, sum(flight.streams for flight in lane.flights), rate_mb_s)


def places_used(sizes_bytes: Sequence[int], concurrency: int) -> float:
    """Mean number of files under way at once when a call moves these files, ``concurrency`` at once, in their order.

    The last file of a call moves alone, and that says nothing about the destination.
    """
    costs = [size + FILE_BYTES for size in sizes_bytes]
    ends = [0] * max(1, min(concurrency, len(costs)))
    for cost in costs:
        heapq.heapreplace(ends, ends[0] + cost)
    return sum(costs) / max(ends) if costs else 0.0
