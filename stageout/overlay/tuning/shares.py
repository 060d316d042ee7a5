"""Shares of the flows of one link: by weight and deadline, without starvation.

A flow is one transfer, over however many connections. TCP shares a link by connections; where flows differ in weight
the ones that would get too much are held back to a rate, and the others grow into the room. Nobody knows what the link
carries, so it is taken to be the best sum that was seen lately and a little more. The others may have the bytes that a
flow does not use at once: held back are only flows that would take somebody else's part.

- Owners have equal parts. Within an owner each step of priority doubles the weight.
- Of an owner's flows of one priority the one with the earliest deadline goes first (its weight counts sixteenfold),
  until the deadline has passed.
- With any weights, a flow keeps two hundredths of the link, and of many flows all together keep a fifth.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

#: Larger priorities count as this one: weights up to 1024 to 1.
MOST_PRIORITY = 10
#: Bytes a second below which nothing is held: connections that stand still for long are closed.
LEAST_RATE = 32 * 1024.0
_FIRST_DEADLINE = 16.0
_LEAST_SHARE = 0.02
_LEAST_SHARES = 0.2
_SLACK = 0.03
_GRACE_S = 2.0
_DEMAND_S = 3.0
_LINK_S = 5.0
#: Rates are measured over moments: the best moment is always more than the link carries, the best second is not.
_MEAN_S = 1.0
_RISING = 1.15
_RISE_S = 1.0
_USED = 0.85
_STEP_S = 1800.0
_PROBE_S, _LONGEST_PROBE_S = 2.0, 320.0
_PROBE_SHARE, _LARGEST_PROBE_SHARE, _FOUND = 0.1, 0.4, 1.05
_TEST_S, _LONGEST_TEST_S = 5.0, 80.0


@dataclass(frozen=True)
class Flow:
    """A transfer that uses a link now.

    :param key: which. :param owner: on whose behalf. :param priority: 0 to :data:`MOST_PRIORITY`.
    :param deadline: Unix time in seconds by which it should be there; 0: none.
    :param rate: bytes a second lately. :param begun_s: monotonic time at which it came.
    """

    key: str
    owner: str
    priority: int
    deadline: int
    rate: float
    begun_s: float


def weights(flows: Sequence[Flow], now: float) -> dict[str, float]:
    """The part of the link of each flow; the sum is 1. :param now: Unix time in seconds."""
    first: dict[tuple[str, int], Flow] = {}
    for flow in flows:
        place = (flow.owner, flow.priority)
        if flow.deadline > now and (place not in first or flow.deadline < first[place].deadline):
            first[place] = flow
    own = {flow.key: _weight(flow, first) for flow in flows}
    of_owner: dict[str, float] = {}
    for flow in flows:
        of_owner[flow.owner] = of_owner.get(flow.owner, 0.0) + own[flow.key]
    least = min(_LEAST_SHARE, _LEAST_SHARES / max(1, len(flows)))
    parts = {flow.key: max(least, own[flow.key] / of_owner[flow.owner] / len(of_owner)) for flow in flows}
    total = sum(parts.values())
    return {key: part / total for key, part in parts.items()}


def _weight(flow: Flow, first: Mapping[tuple[str, int], Flow]) -> float:
    favoured = first.get((flow.owner, flow.priority)) is flow
    return 2.0 ** max(0, min(flow.priority, MOST_PRIORITY)) * (_FIRST_DEADLINE if favoured else 1.0)


def differ(flows: Sequence[Flow], now: float) -> bool:
    """Tell whether the shares differ from TCP's: the flows differ in owner, priority or deadline."""
    return len({(flow.owner, flow.priority, flow.deadline if flow.deadline > now else 0) for flow in flows}) > 1


def turn(priority: int, deadline: int, since: float, now: float) -> tuple[float, float, float]:
    """Place of a file among those that wait for a whole place: least first.

    By priority, with a step more for each half hour of waiting; then by deadline, until it has passed; then by age.

    :param since: when it came. :param now: both, and ``deadline``, Unix time in seconds.
    """
    steps = max(0.0, now - since) // _STEP_S
    return -(max(0, min(priority, MOST_PRIORITY)) + steps), deadline if deadline > now else math.inf, since


def standing(priority: int, deadline: int, since: float, now: float) -> tuple[float, float, float]:
    """As :func:`turn`, but between two that wait the same at any time, until a deadline passes: for a heap.

    A step of priority is worth half an hour of waiting; by deadline go those of one half hour.
    """
    steps = since // _STEP_S - max(0, min(priority, MOST_PRIORITY))
    return steps, deadline if deadline > now else math.inf, since


@dataclass
class _Past:
    """The counters of one flow.

    :param rates: (monotonic time, bytes a second), oldest first. :param open_s: until then it counts as one that can
        use its whole part. :param test_s: when this is tried again, and :param pause_s: how long after that again.
    """

    rates: deque[tuple[float, float]] = field(default_factory=deque)
    open_s: float = 0.0
    test_s: float = 0.0
    pause_s: float = _TEST_S


def _begun(flow: Flow) -> _Past:
    open_s = flow.begun_s + _GRACE_S
    return _Past(open_s=open_s, test_s=open_s + _TEST_S, pause_s=4 * _TEST_S)


@dataclass
class _Probe:
    """A trial whether the link carries more than its best rate so far.

    Where the sum rises by itself nobody knows yet how far: until it rises no more the heaviest flows are not held, and
    find out, while the others have their parts of what is known. And from time to time all may have a little more for a
    moment. Otherwise a flow that cannot use its part from the start, with others that are held to theirs, would look
    like the full capacity of the link. In vain, it is done less and less often; while more is found, more is tried.

    :param next_s: when it begins. :param least: the least that the best sum of all rates was since the last one.
    :param before: the best sum when it began; :param best: and since. :param share: of the link, that is tried.
    :param rises: whether the sum rose by itself.
    """

    next_s: float
    pause_s: float = 4 * _TEST_S
    least: float = math.inf
    before: float = 0.0
    best: float = 0.0
    share: float = _PROBE_SHARE
    rises: bool = False

    def more(self, now_s: float, total: float, most: float) -> float:
        """The part of the link that is added now, for all together.

        :param total: of all rates. :param most: the most that it was lately.
        """
        if now_s < self.next_s:
            self.before = self.best = most
            self.least = min(self.least, most)
            self.rises = most > _FOUND * self.least
            if not self.rises:
                return 0.0
            self.next_s = now_s
        self.best = max(self.best, total)
        if now_s >= self.next_s + _PROBE_S:
            self._judge(now_s)
        return 0.0 if self.rises or now_s < self.next_s else self.share

    def _judge(self, now_s: float) -> None:
        found = self.best > _FOUND * self.before
        self.next_s = now_s if found else now_s + self.pause_s
        soon_s = 4 * _TEST_S if self.rises else _TEST_S
        self.pause_s = soon_s if found else min(_LONGEST_PROBE_S, 4 * self.pause_s)
        self.share = min(_LARGEST_PROBE_SHARE, 2 * self.share) if found else _PROBE_SHARE
        self.rises = self.rises and found
        self.before, self.least = self.best, math.inf


class Shares:
    """The flows of one link, over time."""

    def __init__(self) -> None:
        self._sums: deque[tuple[float, float]] = deque()
        self._began_s = math.inf
        self._means: deque[tuple[float, float]] = deque()
        self._past: dict[str, _Past] = {}
        self._probe = _Probe(0.0)
        self.capacity = 0.0

    def limits(self, flows: Sequence[Flow], now_s: float, now: float) -> dict[str, float]:
        """The rate that each flow may have, in bytes a second; one that is not named may have any.

        :param flows: all that use the link now. :param now_s: monotonic time. :param now: Unix time in seconds.
        """
        self._began_s = min(self._began_s, now_s)
        mean_of_s = min(_MEAN_S, (now_s - self._began_s) / 4)
        _keep(self._sums, now_s, sum(flow.rate for flow in flows), mean_of_s)
        _keep(self._means, now_s, _mean(self._sums), _LINK_S)
        self._past = {flow.key: self._past.get(flow.key) or _begun(flow) for flow in flows}
        for flow in flows:
            self._note(self._past[flow.key], flow, now_s)
        most = max(total for _, total in self._means)
        self.capacity = (1 + _SLACK) * most
        if not self.capacity or len(flows) < 2 or not differ(flows, now):
            self._probe = _Probe(now_s + 4 * _TEST_S)
            return {}
        parts = weights(flows, now)
        demands = {key: self._demand(key, part, now_s) for key, part in parts.items()}
        more = self._probe.more(now_s, self._means[-1][1], most) * self.capacity / (len(flows) - 1)
        limits = self._shared(parts, demands)
        could = {key: part for key, part in parts.items() if demands[key] >= self.capacity}
        heaviest = max(could.values(), default=0.0)
        for key, part in could.items():
            if part < heaviest:  # what is added to the best sum is for the heaviest ones
                limits[key] = max(LEAST_RATE, limits[key] / (1 + _SLACK))
            elif self._probe.rises:
                del limits[key]
        return {key: limit + more for key, limit in limits.items()}

    def _note(self, past: _Past, flow: Flow, now_s: float) -> None:
        _keep(past.rates, now_s, flow.rate, _DEMAND_S)
        lately = [rate for at_s, rate in past.rates if now_s - at_s < _RISE_S]
        before = [rate for at_s, rate in past.rates if _RISE_S <= now_s - at_s < 2 * _RISE_S]
        if before and sum(lately) / len(lately) > _RISING * sum(before) / len(before):
            past.open_s = max(past.open_s, now_s + _RISE_S)
            past.test_s, past.pause_s = now_s + _TEST_S, _TEST_S

    def _demand(self, key: str, part: float, now_s: float) -> float:
        """Return the rate that a flow could use.

        A flow that stays far below its part is tried again from time to time: perhaps the others were in its way.
        """
        past = self._past[key]
        most = max(rate for _, rate in past.rates)
        if now_s >= past.open_s and most < _USED * part * self.capacity and now_s >= past.test_s:
            past.open_s = now_s + _RISE_S
            past.test_s = past.open_s + past.pause_s
            past.pause_s = min(_LONGEST_TEST_S, 4 * past.pause_s)
        if now_s < past.open_s or most >= _USED * part * self.capacity:
            return self.capacity
        return (1 + _SLACK) * most

    def _shared(self, parts: Mapping[str, float], demands: Mapping[str, float]) -> dict[str, float]:
        given = fill(parts, demands, self.capacity)
        left = max(0.0, self.capacity - sum(given.values()))
        return {key: max(LEAST_RATE, part * self.capacity, given[key] + left) for key, part in parts.items()}


def fill(parts: Mapping[str, float], demands: Mapping[str, float], capacity: float) -> dict[str, float]:
    """Weighted max-min shares: who wants less than its part gets that, the others share the rest by their parts."""
    given: dict[str, float] = {}
    left, weight = capacity, sum(parts.values())
    for key in sorted(parts, key=lambda key: demands[key] / parts[key]):
        given[key] = min(demands[key], left * parts[key] / weight) if weight > 0 else 0.0
        left -= given[key]
        weight -= parts[key]
    return given


def _mean(past: deque[tuple[float, float]]) -> float:
    return sum(value for _, value in past) / len(past)


def _keep(past: deque[tuple[float, float]], now_s: float, value: float, for_s: float) -> None:
    past.append((now_s, value))
    while past[0][0] < now_s - for_s:
        past.popleft()
