"""The calls of plugins that are under way: the files and streams of each, and what they reach.

:class:`stageout.core.streams.Streams` chooses how much may go to a server at once. The calls share that between owners
and batches. They are measured when they end, and after every ``knobs.delay`` files the chooser learns the
rate. Only calls that began after the last measurement count, so the effect of a choice decides about the next.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sandbox_manager.rules import TuningRules
from sandbox_manager.scheduling.streams import MakeStreams
from stageout.core import log
from stageout.core.clock import Clock
from stageout.core.eta import FILE_BYTES
from stageout.core.profiles import Best, good_for_uploads
from stageout.core.streams import FIXED, ActiveTransfer, Choice
from stageout.wire.control import StreamsReport, Tuning

_LONG_S = 60.0
_USED = 0.7
_MAX_SERVERS = 1000
_MB = 1e6


@dataclass(frozen=True)
class Target:
    """A server and the plugin for it.

    :param server: method and host. :param several: the plugin moves STAGEOUT_CONCURRENCY files at once.
    :param multi_stream: it moves each of them over STAGEOUT_PARALLELISM streams.
    """

    server: str
    several: bool = False
    multi_stream: bool = False


@dataclass
class _ServerCalls:
    """The calls to one server.

    :param profile: measured by ``stageout profile``. :param multi_stream: a plugin sends files there over several
        streams. :param since_s: monotonic time of the last measurement;
        ``first_begun_s`` and the fields after it describe the calls that began after it and have ended.
    :param concurrency_s: sum of used concurrency x seconds. :param tuning: how the last measurement changed the choice.
    :param unmeasured: why the last measurement tells nothing.
    """

    profile: Best | None
    since_s: float
    multi_stream: bool = False
    transfers: set[ActiveTransfer] = field(default_factory=set)
    first_begun_s: float = math.inf
    files: int = 0
    size_bytes: int = 0
    concurrency_s: float = 0.0
    rate_mb_s: float = 0.0
    tuning: Tuning = Tuning.STARTING
    unmeasured: str = ""

    def begin_anew(self, now_s: float) -> None:
        """Forget what was seen."""
        self.since_s, self.first_begun_s = now_s, math.inf
        self.files, self.size_bytes, self.concurrency_s = 0, 0, 0.0

    @property
    def in_flight(self) -> int:
        """Files that calls may move at once."""
        return sum(transfer.concurrency for transfer in self.transfers)

    @property
    def streams(self) -> int:
        """Streams that calls may open."""
        return sum(transfer.streams for transfer in self.transfers)


class Calls:
    """The calls of a node's manager, by server.

    :param start: files at once that were good for a server earlier; 0: not known, and its profile counts.
    """

    def __init__(self, rules: TuningRules, clock: Clock, start: Callable[[str], int], make: MakeStreams) -> None:
        self.rules = rules
        self._clock, self._start, self._make = clock, start, make
        self._servers: dict[str, _ServerCalls] = {}
        self._streams = make(rules, self._start_of)

    # ---- asked by the planner ----------------------------------------------------------------------------------------

    def waiting(self, count: Callable[[], Mapping[str, int]]) -> None:
        """Tell a chooser that needs it the files that wait for each server, so that it gets no more than can be used.

        :param count: returns the files that are due, by server.
        """
        if not self._streams.counts_waiting:
            return
        files = count()
        for server in {*files, *self._servers}:
            self._choose(server, files.get(server, 0))

    def room(self, target: Target, owner: str, planned: int = 0) -> int:
        """Files that a further call of a plugin may move at once; 0: it must wait.

        An owner of whom nothing runs may always begin with one file, above the chosen number but within the streams,
        and one owner never takes all streams: nobody waits for the end of somebody else's batch.

        :param planned: calls to this server that are planned but not begun.
        """
        calls, choice = self._for(target), self._choose(target.server)
        if choice.files_at_once == 0:
            return 0
        in_flight = calls.in_flight + planned
        streams_left = choice.streams - calls.streams - planned * choice.streams_each
        of_streams = streams_left // choice.streams_each
        own = sum(transfer.concurrency for transfer in calls.transfers if transfer.owner == owner)
        most = max(1, choice.streams // choice.streams_each - 1)
        free = min(self._level(calls, choice, in_flight) - in_flight, of_streams, most - own)
        return max(0, free) if own else max(free, min(1, of_streams), 0)

    def start(self, target: Target, owner: str, files: int, later: int = 0) -> ActiveTransfer:
        """Begin a call of a plugin; :meth:`end` must follow.

        :param later: further calls to this server that are about to start, among which the room is shared.
        """
        calls, choice = self._for(target), self._choose(target.server)
        share = math.ceil(self.room(target, owner, later) / (later + 1)) if target.several else 1
        parallelism = choice.streams_each if target.multi_stream else 1
        now_s = self._clock.monotonic_s()
        transfer = ActiveTransfer(
            server=target.server,
            owner=owner,
            concurrency=max(1, min(files, share)),
            parallelism=parallelism,
            begun_s=now_s,
        )
        calls.transfers.add(transfer)
        self._streams.started(transfer)
        return transfer

    def active(self, server: str) -> int:
        """Count calls to a server that have begun and not ended."""
        return len(self._at(server).transfers)

    def _level(self, calls: _ServerCalls, choice: Choice, in_flight: int) -> int:
        """Return the chosen number; one more, up to the initial one, when nothing has ended or begun for a minute."""
        now_s = self._clock.monotonic_s()
        if calls.transfers and all(now_s - transfer.begun_s > _LONG_S for transfer in calls.transfers):
            return max(choice.files_at_once, min(self.rules.knobs.initial, in_flight + 1))
        return choice.files_at_once

    # ---- told by the mover -------------------------------------------------------------------------------------------

    def end(self, transfer: ActiveTransfer, sizes_bytes: Sequence[int] = ()) -> None:
        """End a call; saying it again does nothing.

        :param sizes_bytes: of the files, when all of them were delivered.
        """
        calls = self._at(transfer.server)
        if transfer not in calls.transfers:
            return
        calls.transfers.remove(transfer)
        now_s = self._clock.monotonic_s()
        if sizes_bytes and transfer.begun_s >= calls.since_s:
            calls.first_begun_s = min(calls.first_begun_s, transfer.begun_s)
            calls.files += len(sizes_bytes)
            calls.size_bytes += sum(sizes_bytes)
            calls.concurrency_s += concurrency_used(sizes_bytes, transfer.concurrency) * (now_s - transfer.begun_s)
        if calls.files >= self.rules.knobs.delay and calls.concurrency_s > 0:
            self._measure(transfer, calls, now_s)
        else:
            self._streams.finished(transfer, None)

    def _measure(self, transfer: ActiveTransfer, calls: _ServerCalls, now_s: float) -> None:
        """Let the chooser learn what the calls have reached, if they used what it had chosen."""
        before = self._choose(transfer.server)
        level = before.files_at_once
        still = sum(one.concurrency * (now_s - max(one.begun_s, calls.first_begun_s)) for one in calls.transfers)
        used = (calls.concurrency_s + still) / max(1e-6, now_s - calls.first_begun_s)
        rate_mb_s = calls.size_bytes / calls.concurrency_s * max(level, 1) / _MB
        calls.begin_anew(now_s)
        if level and used < _USED * level:
            calls.unmeasured = f"Only {used:.1f} of {level} places were used: no measurement."
            calls.tuning = Tuning.UNMEASURED
            self._streams.finished(transfer, None)
            return
        self._streams.finished(transfer, rate_mb_s)
        after = self._choose(transfer.server)
        calls.rate_mb_s, calls.unmeasured, calls.tuning = rate_mb_s, "", _direction(level, after.files_at_once)
        log.event("concurrency-changed", server=transfer.server, files_at_once=after.files_at_once, before=level,
                  streams=before.streams, rate_mb_s=round(rate_mb_s, 3), why=after.reason)  # fmt: skip

    # ---- looking -----------------------------------------------------------------------------------------------------

    def level(self, server: str) -> int:
        """Files at once that the chooser has come to."""
        return self._choose(server).files_at_once

    def reports(self) -> list[StreamsReport]:
        """Return the figures for people, by server."""
        return [self.report(server) for server in sorted(self._servers)]

    def report(self, server: str) -> StreamsReport:
        """Return the figures of one server."""
        calls, choice = self._at(server), self._choose(server)
        state = Tuning.FIXED if choice.tuning == FIXED else calls.tuning
        return StreamsReport(
            server=server, tuning=choice.tuning, files_at_once=choice.files_at_once, streams_each=choice.streams_each,
            files_in_flight=calls.in_flight, streams_in_use=calls.streams, streams=choice.streams,
            rate_mb_s=round(calls.rate_mb_s, 3), reason=calls.unmeasured or choice.reason, grant=choice.grant,
            state=state if choice.files_at_once else Tuning.NO_GRANT,
        )  # fmt: skip

    # ---- changes -----------------------------------------------------------------------------------------------------

    def new_rules(self, rules: TuningRules) -> None:
        """Apply a changed configuration. Choices whose settings changed start again."""
        if rules == self.rules:
            return
        self.rules, self._streams = rules, self._make(rules, self._start_of)
        for server, calls in self._servers.items():
            calls.profile = self._profile(server)
            calls.begin_anew(self._clock.monotonic_s())
            for transfer in calls.transfers:
                self._streams.started(transfer)

    async def close(self) -> None:
        """Give back what was granted to this node."""
        await self._streams.close()

    # ---- servers -----------------------------------------------------------------------------------------------------

    def _choose(self, server: str, waiting: int | None = None) -> Choice:
        """Ask how much may go to a server. No file gets more streams than its profile says are of use."""
        calls = self._at(server)
        parallelism = self.rules.knobs.parallelism if calls.multi_stream else 1
        if calls.profile is not None:
            parallelism = min(parallelism, calls.profile.streams)
        return self._streams.choose(server, parallelism, waiting)

    def _for(self, target: Target) -> _ServerCalls:
        calls = self._at(target.server)
        calls.multi_stream = calls.multi_stream or target.multi_stream
        return calls

    def _at(self, server: str) -> _ServerCalls:
        calls = self._servers.get(server)
        if calls is None:
            if len(self._servers) >= _MAX_SERVERS:
                self._servers = {name: one for name, one in self._servers.items() if one.transfers}
            calls = self._servers[server] = _ServerCalls(self._profile(server), self._clock.monotonic_s())
        return calls

    def _profile(self, server: str) -> Best | None:
        return good_for_uploads(self.rules.profiles, server.partition("://")[2])

    def _start_of(self, server: str) -> int:
        profile = self._at(server).profile
        return self._start(server) or (profile.concurrency if profile else 0)


def _direction(before: int, after: int) -> Tuning:
    if before == after:
        return Tuning.KEPT
    return Tuning.RAISED if after > before else Tuning.LOWERED


def concurrency_used(sizes_bytes: Sequence[int], concurrency: int) -> float:
    """Mean number of files under way at once when a call moves these files, ``concurrency`` at once, in their order.

    The last file of a call moves alone, and that says nothing about the destination.
    """
    costs = [size + FILE_BYTES for size in sizes_bytes]
    ends = [0] * max(1, min(concurrency, len(costs)))
    for cost in costs:
        heapq.heapreplace(ends, ends[0] + cost)
    return sum(costs) / max(ends) if costs else 0.0
