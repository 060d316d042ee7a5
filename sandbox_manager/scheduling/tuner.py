"""Files that move at once to each server, and the streams of each: one controller per server.

Grants (``scheduling/grants.py``) bound it, or the node's own limits. A *transfer* is one call of a plugin with its
share of that. Flights are measured when they end, and after every ``STAGEOUT_TUNING_DELAY`` files the controller
chooses the next step. Only transfers that began after the last step count, so its own effect decides about a step.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sandbox_manager.rules import TuningRules, make_controller
from sandbox_manager.scheduling.grants import Grants
from stageout.core import log
from stageout.core.clock import Clock
from stageout.core.controllers import FIXED, Controller, Step
from stageout.core.eta import FILE_BYTES
from stageout.core.profiles import good_for_uploads
from stageout.wire.control import StreamsReport, Tuning

_LONG_S = 60.0
_USED = 0.7
_MAX_SERVERS = 1000
_MB = 1e6


@dataclass(frozen=True)
class Target:
    """A server and the plugin for it.

    :param several: the plugin moves STAGEOUT_CONCURRENCY files at once; :param multi_stream: each of them over
        STAGEOUT_PARALLELISM streams.
    """

    server: str
    several: bool = False
    multi_stream: bool = False


@dataclass(frozen=True, eq=False)
class ActiveTransfer:
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
class _ServerState:
    """One server.

    :param multi_stream: its plugin sends each file over several streams.
    :param waiting: files for it. :param useful: files at once that the controller could come to soon.
    :param since_s: monotonic time of the last step; ``first_begun_s`` and the fields after it describe the transfers
        that began after this step and have ended. :param place_s: sum of places used x seconds.
    """

    server: str
    controller: Controller
    since_s: float
    transfers: set[ActiveTransfer] = field(default_factory=set)
    multi_stream: bool = False
    waiting: int = 0
    useful: int = 0
    first_begun_s: float = math.inf
    files: int = 0
    size_bytes: int = 0
    place_s: float = 0.0
    rate_mb_s: float = 0.0
    reason: str = ""
    tuning: Tuning = Tuning.STARTING

    def begin_anew(self, now_s: float) -> None:
        """Forget what was seen."""
        self.since_s, self.first_begun_s = now_s, math.inf
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
        self._states: dict[str, _ServerState] = {}

    # ---- asked by the planner ----------------------------------------------------------------------------------------

    def room(self, target: Target, owner: str, planned: int = 0) -> int:
        """Files that a further call of a plugin may move at once; 0: it must wait.

        An owner of whom nothing runs may always begin with one file, above the controller's number but within the
        grant, and one owner never takes all of the grant: nobody waits for the end of somebody else's batch.

        :param planned: calls to this server that are planned but not begun.
        """
        state = self._state_for(target)
        streams = self._streams(state)
        step = state.controller.now(streams)
        if step.concurrency == 0:
            return 0
        used = sum(transfer.streams for transfer in state.transfers) + planned * step.parallelism
        in_flight = sum(transfer.concurrency for transfer in state.transfers) + planned
        of_grant = (streams - used) // step.parallelism
        own = sum(transfer.concurrency for transfer in state.transfers if transfer.owner == owner)
        most = max(1, streams // step.parallelism - 1)
        free = min(self._level(state, step, in_flight) - in_flight, of_grant, most - own)
        return max(0, free) if own else max(free, min(1, of_grant), 0)

    def start(self, target: Target, owner: str, files: int, later: int = 0) -> ActiveTransfer:
        """A call of a plugin begins; :meth:`end` must follow.

        :param later: further calls to this server that are about to start, among which the room is shared.
        """
        state = self._state_for(target)
        step = state.controller.now(self._streams(state))
        share = math.ceil(self.room(target, owner, later) / (later + 1)) if target.several else 1
        parallelism = step.parallelism if target.multi_stream else 1
        transfer = ActiveTransfer(
            target.server, owner, max(1, min(files, share)), parallelism, self._clock.monotonic_s()
        )
        state.transfers.add(transfer)
        self._update_grants(state)
        return transfer

    def waiting(self, files: Mapping[str, int]) -> None:
        """Note the waiting files of each server, so that no more streams are asked for than can be used."""
        if self.grants is None:
            return
        for server in {*files, *self._states}:
            state = self._state(server)
            state.waiting = files.get(server, 0)
            self._update_grants(state)

    # ---- told by the mover -------------------------------------------------------------------------------------------

    def end(self, transfer: ActiveTransfer, sizes_bytes: Sequence[int] = ()) -> None:
        """A call has ended; saying it again does nothing.

        :param sizes_bytes: of the files, when all of them were delivered.
        """
        state = self._state(transfer.server)
        if transfer not in state.transfers:
            return
        state.transfers.remove(transfer)
        now_s = self._clock.monotonic_s()
        if sizes_bytes and transfer.begun_s >= state.since_s:
            state.first_begun_s = min(state.first_begun_s, transfer.begun_s)
            state.files += len(sizes_bytes)
            state.size_bytes += sum(sizes_bytes)
            state.place_s += places_used(sizes_bytes, transfer.concurrency) * (now_s - transfer.begun_s)
        if state.files >= self.rules.knobs.delay and state.place_s > 0:
            self._step(state, now_s)
        else:
            self._update_grants(state)

    def _step(self, state: _ServerState, now_s: float) -> None:
        knobs, streams = self.rules.knobs, self._streams(state)
        level = state.controller.now(streams).concurrency
        still = sum(
            transfer.concurrency * (now_s - max(transfer.begun_s, state.first_begun_s)) for transfer in state.transfers
        )
        used = (state.place_s + still) / max(1e-6, now_s - state.first_begun_s)
        rate_mb_s = state.size_bytes / state.place_s * max(level, 1) / _MB
        state.begin_anew(now_s)
        if level and used < _USED * level:
            state.reason = f"Only {used:.1f} of {level} places were used: no measurement."
            state.tuning = Tuning.UNMEASURED
            self._update_grants(state)
            return
        step = state.controller.step(rate_mb_s, streams)
        state.rate_mb_s, state.reason, state.tuning = rate_mb_s, step.reason, _direction(level, step.concurrency)
        state.useful -= knobs.increment  # slowly: a controller goes down to measure, and up again
        log.event("concurrency-changed", server=state.server, files_at_once=step.concurrency, before=level,
                  streams=streams, rate_mb_s=round(rate_mb_s, 3), why=step.reason)  # fmt: skip
        self._update_grants(state, rate_mb_s=rate_mb_s)

    def active(self, server: str) -> int:
        """Calls to a server that have begun and not ended."""
        return len(self._state(server).transfers)

    # ---- looking -----------------------------------------------------------------------------------------------------

    def level(self, server: str) -> int:
        """Files at once that the controller has come to."""
        state = self._state(server)
        return state.controller.now(self._streams(state)).concurrency

    def reports(self) -> list[StreamsReport]:
        """Return the figures for people, by server."""
        return [self._report(state) for _, state in sorted(self._states.items())]

    def report(self, server: str) -> StreamsReport:
        """Return the figures of one server."""
        return self._report(self._state(server))

    def new_rules(self, rules: TuningRules) -> None:
        """Take over a changed configuration; the controllers begin anew where it says something else."""
        if rules == self.rules:
            return
        self.rules = rules
        for state in self._states.values():
            state.controller = self._controller(state.server, state.multi_stream)
            state.begin_anew(self._clock.monotonic_s())

    def _report(self, state: _ServerState) -> StreamsReport:
        streams = self._streams(state)
        step = state.controller.now(streams)
        return StreamsReport(
            server=state.server, tuning=state.controller.name, files_at_once=step.concurrency,
            streams_each=step.parallelism, files_in_flight=sum(transfer.concurrency for transfer in state.transfers),
            streams_in_use=sum(transfer.streams for transfer in state.transfers), streams=streams,
            rate_mb_s=round(state.rate_mb_s, 3), reason=state.reason or step.reason,
            grant=self.grants.reason(state.server) if self.grants else "No policy service: the limits of this node.",
            state=_tuning(state, step.concurrency),
        )  # fmt: skip

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def _state(self, server: str) -> _ServerState:
        state = self._states.get(server)
        if state is None:
            if len(self._states) >= _MAX_SERVERS:
                self._states = {name: one for name, one in self._states.items() if one.transfers}
            state = _ServerState(server, self._controller(server, multi_stream=False), self._clock.monotonic_s())
            self._states[server] = state
        return state

    def _state_for(self, target: Target) -> _ServerState:
        state = self._state(target.server)
        if target.multi_stream and not state.multi_stream:
            state.multi_stream = True
            state.controller = self._controller(target.server, multi_stream=True)
        return state

    def _controller(self, server: str, multi_stream: bool) -> Controller:
        """One that starts with what is known; no more streams of a file than its profile says are of use."""
        good = good_for_uploads(self.rules.profiles, server.partition("://")[2])
        streams = self.rules.knobs.parallelism if multi_stream else 1
        knobs = replace(self.rules.knobs, parallelism=min(streams, good.streams) if good else streams)
        start = self._start(server) or (good.concurrency if good else 0)
        return make_controller(self.rules.controller, knobs, start)

    def _streams(self, state: _ServerState) -> int:
        """Granted streams, never more than the node's own limits."""
        knobs = state.controller.knobs
        own = knobs.maximum * knobs.parallelism
        granted = self.grants.streams(state.server) if self.grants else None
        return own if granted is None else min(own, granted)

    def _level(self, state: _ServerState, step: Step, in_flight: int) -> int:
        """The controller's number; one more, up to the initial one, when nothing has ended or begun for a minute."""
        now_s = self._clock.monotonic_s()
        if state.transfers and all(now_s - transfer.begun_s > _LONG_S for transfer in state.transfers):
            return max(step.concurrency, min(state.controller.knobs.initial, in_flight + 1))
        return step.concurrency

    def _update_grants(self, state: _ServerState, rate_mb_s: float | None = None) -> None:
        """Tell the grants what could be used, which is up to twice the present number, and what is used."""
        if self.grants is None:
            return
        knobs, level = state.controller.knobs, state.controller.now(self._streams(state)).concurrency
        in_flight = sum(transfer.concurrency for transfer in state.transfers)
        state.useful = max(knobs.initial, 2 * level, state.useful)
        most = knobs.maximum if state.controller.name == FIXED else min(knobs.maximum, state.useful)
        wanted = min(most, state.waiting + in_flight) * knobs.parallelism
        self.grants.note(state.server, wanted, sum(transfer.streams for transfer in state.transfers), rate_mb_s)


def _direction(before: int, after: int) -> Tuning:
    if before == after:
        return Tuning.KEPT
    return Tuning.RAISED if after > before else Tuning.LOWERED


def _tuning(state: _ServerState, level: int) -> Tuning:
    if level == 0:
        return Tuning.NO_GRANT
    return Tuning.FIXED if state.controller.name == FIXED else state.tuning


def places_used(sizes_bytes: Sequence[int], concurrency: int) -> float:
    """Mean number of files under way at once when a call moves these files, ``concurrency`` at once, in their order.

    The last file of a call moves alone, and that says nothing about the destination.
    """
    costs = [size + FILE_BYTES for size in sizes_bytes]
    ends = [0] * max(1, min(concurrency, len(costs)))
    for cost in costs:
        heapq.heapreplace(ends, ends[0] + cost)
    return sum(costs) / max(ends) if costs else 0.0
