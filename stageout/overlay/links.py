"""The links that this process sends over, and who else sends over them from this machine.

Every connection that carries data passes a *tap*, all taps of one transfer on one link belong to one *lane*. While the
flows of a link differ in priority, owner or deadline, each lane is held to the rate that
:mod:`stageout.overlay.tuning.shares` gives it; else a tap only counts. Processes of one user see each other's flows
in a file of shared memory, so puts of several processes, and workers of a relay, share a link as they should. Where it
is said what a router's line carries, whatever leaves takes turns on that, too (:mod:`stageout.overlay.uplink`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stageout.core import log
from stageout.core.threads import NoThread, started
from stageout.overlay.book import Book, Row, shared_book
from stageout.overlay.tuning.shares import MOST_PRIORITY, Flow, Shares, weights
from stageout.overlay.tuning.turns import least_part
from stageout.overlay.uplink import Sharer, Turn, Uplink, uplink_of_this_process

_TICK_S = 0.1
_SOONEST_S = 0.02
#: Thousands of lanes take their time: so many times as long nothing is looked at, but others still see this process.
_REST, _LATEST_S = 4.0, 0.5
_WINDOW_S = 0.5
_MOVES_S = 1.0
_BURST_BYTES = 128 * 1024
_PIECE_BYTES = 128 * 1024
#: A connection that moves less than this part of what the fastest one of its transfer does takes no part of a line.
_BUSY = 0.1
_SAY_S = 1.0
#: Between two answers of one transfer no more time passes, or its lane begins anew.
_KEPT_S = 1.0
#: A transfer has a fifth of an equal part at least, by so much more slowly moves a piece of it.
_SLOWEST = 5.0
#: Bytes a second of each connection below which a lane is not held: one that stands still for a minute is closed.
_LEAST_OF_ONE = 16 * 1024.0
_NUMBERS = itertools.count(1)


@dataclass(frozen=True)
class Claim:
    """The demand of a transfer on the links that it uses.

    :param flow: which transfer, the same on all its connections; "" for one of its own. :param owner: on whose behalf,
        "" for this user. :param priority: 0 to 10: each step doubles its part. :param deadline: Unix time in seconds.
    """

    flow: str = ""
    owner: str = ""
    priority: int = 0
    deadline: int = 0


class Tap:
    """One connection of a lane. Not for several threads at once.

    :param acked: what the next hop has of it; None while, or once, nobody can say.
    """

    def __init__(self, lane: Lane, acked: Callable[[], int | None] = lambda: None) -> None:
        self._lane, self._acked = lane, acked
        self._passed_bytes = self._arrived_bytes = 0
        self._is_told = False

    @property
    def moved_bytes(self) -> int:
        """The bytes that have arrived; those that have passed, where nobody can say. A new connection gives the kernel
        far more at first than the link carries.
        """
        told = self._acked()
        if told is not None:
            self._is_told, self._arrived_bytes = True, max(self._arrived_bytes, told)
        return self._arrived_bytes if self._is_told else self._passed_bytes

    @property
    def held(self) -> bool:
        """Tell whether the lane is held to a rate now, or takes turns with others: then it sends in small pieces."""
        return self._lane.limit is not None or self._lane.turn is not None

    @property
    def piece_bytes(self) -> int:
        """The size of these."""
        turn_bytes = self._lane.turn.piece_bytes if self._lane.turn else _PIECE_BYTES
        return turn_bytes if self._lane.limit is None else min(turn_bytes, _PIECE_BYTES)

    def take(self, size_bytes: int) -> None:
        """So many bytes are about to leave: wait until they may."""
        self._passed_bytes += size_bytes
        if self._lane.limit is not None:
            self._lane.wait(size_bytes)
        if self._lane.turn is not None:
            self._lane.turn.take(size_bytes)

    def take_free(self, size_bytes: int) -> bool:
        """So many bytes, more than a piece, are about to leave, unless the lane is held: whether they may."""
        if self.held:
            return False
        self._passed_bytes += size_bytes
        return True

    def close(self) -> None:
        """The connection has ended."""
        self._lane.end(self, self.moved_bytes)

    def leave(self) -> None:
        """The connection goes on without it: all that has passed counts."""
        self._lane.end(self, self._passed_bytes)


class Lane:
    """One transfer on one link, in this process; a context manager.

    :ivar turn: its transfer's place on the router's line, where there is one.
    :ivar answers: that pass it now. :ivar answered_s: when the last one has ended.
    """

    def __init__(self, owner: Links, number: int, link: str, claim: Claim) -> None:
        self.number, self.claim, self.link, self._owner = number, claim, link, owner
        self.answers, self.answered_s = 0, 0.0
        self.limit: float | None = None
        self.turn: Turn | None = None
        self._closed = False
        self._begun_s = time.monotonic()
        self._link = _number(f"{_namespace('net')} {link}")
        self.flow = _number(f"{claim.owner} {claim.flow}" if claim.flow else f"{os.getpid()} {number} {self._begun_s}")
        self._taps: set[Tap] = set()
        self._ended_bytes = 0
        self._changed = threading.Condition()
        self._debt_bytes = 0.0
        self._paid_s = self._begun_s

    def __enter__(self) -> Lane:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """The transfer has ended."""
        self._owner.forget(self)
        self.hold(None)
        with self._changed:
            self._closed = True

    def tap(self, acked: Callable[[], int | None] = lambda: None) -> Tap:
        """For a new connection. :param acked: as :class:`Tap` takes it."""
        tap = Tap(self, acked)
        with self._changed:
            self._taps.add(tap)
        return tap

    def end(self, tap: Tap, moved_bytes: int) -> None:
        """A connection has ended, or uses it no more; what it moved still counts."""
        with self._changed:
            if tap in self._taps:
                self._taps.remove(tap)
                self._ended_bytes += moved_bytes

    @property
    def moved_bytes(self) -> int:
        """Of all its connections, those that have ended too."""
        with self._changed:
            return self._ended_bytes + sum(tap.moved_bytes for tap in self._taps)

    @property
    def connections(self) -> int:
        """Return how many there are."""
        with self._changed:
            return len(self._taps)

    @property
    def least_rate(self) -> float:
        """The rate that its connections need so that none of them stands still for too long, in bytes a second."""
        return _LEAST_OF_ONE * self.connections

    def row(self, now_s: float) -> Row:
        """The state that other processes shall know of it."""
        claim = self.claim
        priority = max(0, min(claim.priority, MOST_PRIORITY))
        return Row(
            _process(os.getpid()), self.number, self._link, self.flow, _number(claim.owner), priority, claim.deadline,
            self._begun_s, self.moved_bytes, now_s,
        )  # fmt: skip

    def hold(self, limit: float | None) -> None:
        """From now on it has this rate in bytes a second; None: any. One that is closed is held no more."""
        with self._changed:
            limit = None if self._closed else limit
            if self.limit is None:
                self._debt_bytes, self._paid_s = 0.0, time.monotonic()
            self._pay()
            self.limit = limit
            self._changed.notify_all()

    def wait(self, size_bytes: int) -> None:
        """Until so many bytes may leave."""
        with self._changed:
            self._pay()
            while self.limit is not None and self._debt_bytes > _BURST_BYTES:
                self._changed.wait((self._debt_bytes - _BURST_BYTES) / self.limit)
                self._pay()
            self._debt_bytes += size_bytes

    def _pay(self) -> None:
        now_s = time.monotonic()
        if self.limit is not None:
            self._debt_bytes = max(0.0, self._debt_bytes - self.limit * (now_s - self._paid_s))
        self._paid_s = now_s


class _Meter:
    """The bytes that one lane moves, wherever it is."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()
        self._moved_s = 0.0

    def note(self, moved_bytes: int, at_s: float, now_s: float) -> None:
        """So many bytes since it began, at some time until now."""
        if self._samples and moved_bytes > self._samples[-1][1]:
            self._moved_s = now_s
        if not self._samples or at_s > self._samples[-1][0]:
            self._samples.append((at_s, moved_bytes))
        while len(self._samples) > 2 and self._samples[1][0] < now_s - _WINDOW_S:
            self._samples.popleft()

    @property
    def rate(self) -> float:
        """Bytes a second lately."""
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        return max(0, last - first) / max(_TICK_S, last_s - first_s)

    def moves(self, now_s: float, lately_s: float = _MOVES_S) -> bool:
        """Tell whether it has moved anything lately."""
        return now_s - self._moved_s < lately_s


class Links:
    """All links of this process.

    :param book: what other processes see, and write. :param uplink: that all of them share; None: none that is known.
    """

    def __init__(self, book: Book, uplink: Uplink | None = None) -> None:
        self._book, self.uplink = book, uplink
        self._turns: weakref.WeakValueDictionary[int, Turn] = weakref.WeakValueDictionary()
        self._sharing, self._said_s = 0, 0.0
        self._lanes: dict[int, Lane] = {}
        self._answers: dict[tuple[str, Claim], Lane] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._shares: dict[int, Shares] = {}
        self._meters: dict[tuple[int, int], _Meter] = {}

    def lane(self, link: str, claim: Claim) -> Lane:
        """For a transfer that begins to use a link. :param link: the next hop, ``HOST:PORT``."""
        with self._lock:
            return self._new(link, claim)

    @contextlib.contextmanager
    def answer(self, link: str, claim: Claim) -> Iterator[Lane]:
        """For one of several answers of a transfer: all that come soon after each other share a lane.

        An answer may take no longer than it takes to know a rate: with a lane of its own it would be held to none.
        """
        place = (link, claim)
        with self._lock:
            lane = self._answers.get(place) or self._answers.setdefault(place, self._new(link, claim))
            lane.answers += 1
        try:
            yield lane
        finally:
            with self._lock:
                lane.answers, lane.answered_s = lane.answers - 1, time.monotonic()

    def _new(self, link: str, claim: Claim) -> Lane:
        lane = Lane(self, next(_NUMBERS), link, claim)
        lane.turn = self._turn(lane)
        self._lanes[lane.number] = lane
        if self._thread is None:
            with contextlib.suppress(NoThread):  # the next lane tries again
                self._thread = started(self._run)
        self._wake.set()
        return lane

    def _end_answered(self) -> None:
        """Behind the last answer of a transfer its lane ends."""
        now_s = time.monotonic()
        with self._lock:
            ended = {
                place: lane for place, lane in self._answers.items()
                if not lane.answers and now_s - lane.answered_s > _KEPT_S
            }  # fmt: skip
            for place in ended:
                del self._answers[place]
        for lane in ended.values():
            lane.close()

    def forget(self, lane: Lane) -> None:
        """A lane has ended."""
        with self._lock:
            self._lanes.pop(lane.number, None)
        if self.uplink and lane.turn:
            self.uplink.end(lane.turn)
        self._wake.set()

    def _run(self) -> None:
        """Plan until there are no lanes. While no plan can be made, nobody is held by one of before."""
        said = ""
        while True:
            self._wake.clear()
            self._end_answered()
            with self._lock:
                lanes = list(self._lanes.values())
            began_s = time.thread_time()
            try:
                self._tick(lanes)
            except Exception as problem:
                self._meters, self._shares = {}, {}
                for lane in lanes:
                    lane.hold(None)
                if repr(problem) != said:
                    log.error("link-sharing-failed", problem=repr(problem), again_s=_TICK_S)
                said = repr(problem)
            with self._lock:  # not before the last plan: the next thread must not begin beside it
                if not lanes and not self._lanes:
                    self._thread = None
                    return
            time.sleep(max(_SOONEST_S, min(_LATEST_S, _REST * (time.thread_time() - began_s))))
            self._wake.wait(_TICK_S - _SOONEST_S)

    def _tick(self, lanes: list[Lane]) -> None:
        now_s = time.monotonic()
        mine = [lane.row(now_s) for lane in lanes]
        sharing = [replace(row, link=self.uplink.number, lane=-row.lane) for row in mine] if self.uplink else []
        rows = self._book.exchange([*mine, *sharing], now_s)
        self._meters = {(row.pid, row.lane): self._meters.get((row.pid, row.lane)) or _Meter() for row in rows}
        for row in rows:
            self._meters[row.pid, row.lane].note(row.moved_bytes, row.at_s, now_s)
        on_link: dict[int, list[Row]] = {row.link: [] for row in (*mine, *sharing)}
        for row in rows:
            if row.link in on_link:
                on_link[row.link].append(row)
        if self.uplink:
            self._order_uplink(self.uplink, lanes, sharing, on_link.pop(self.uplink.number, []))
        self._shares = {link: self._shares.get(link) or Shares() for link in on_link}
        limits = {link: self._limits(link, found, now_s) for link, found in on_link.items()}
        moving = Counter((row.link, row.flow) for row in rows if self._meters[row.pid, row.lane].moves(now_s))
        for lane, row in zip(lanes, mine):
            limit = limits[row.link].get(str(row.flow))
            part = self._part(row, moving[row.link, row.flow], now_s)
            lane.hold(None if limit is None else max(limit * part, lane.least_rate))

    def _turn(self, lane: Lane) -> Turn | None:
        """Its transfer's place on the line. Until a plan is made it has what its priority would have among equals."""
        if self.uplink is None:
            return None
        found = self._turns.get(lane.flow)
        if found is None:
            priority = max(0, min(lane.claim.priority, MOST_PRIORITY))
            weight = min(1.0, 2.0**priority / (1 + self._sharing))
            found = self._turns[lane.flow] = self.uplink.turn((lane.claim.owner, priority), weight)
        return found

    def _order_uplink(self, uplink: Uplink, lanes: list[Lane], mine: Sequence[Row], rows: list[Row]) -> None:
        """Weigh the transfers that use it, and say once a second what goes by it.

        :param mine: what this process's lanes have on it. :param rows: what all lanes have.
        """
        now_s = time.monotonic()
        # of many transfers those of the least weight move something no more often than that
        lately_s = _MOVES_S + _SLOWEST * len(rows) * uplink.piece_bytes / uplink.rate
        own = {(row.pid, row.lane) for row in mine}
        flows: dict[int, Flow] = {}
        rates: dict[int, list[tuple[float, bool]]] = {}
        for row in rows:
            meter = self._meters[row.pid, row.lane]
            if meter.moves(now_s, lately_s) or now_s - row.begun_s < _MOVES_S:
                flows[row.flow] = Flow(str(row.flow), str(row.owner), row.priority, row.deadline, 0.0, row.begun_s)
                rates.setdefault(row.flow, []).append((meter.rate, (row.pid, row.lane) in own))
        self._sharing = len(flows)
        parts = weights(list(flows.values()), time.time()) if flows else {}
        shares = {
            flow: parts[str(flow)] * _part_of_mine(rates[flow]) for flow in {lane.flow for lane in lanes} & set(flows)
        }
        # what others have is a connection each: of those who send by several there is one process
        self._weigh(uplink, lanes, shares, sum(not is_mine for told in rates.values() for _, is_mine in told))
        if now_s - self._said_s >= _SAY_S or not lanes:
            self._said_s = now_s
            uplink.say(self._sharers(lanes, mine, shares))

    def _weigh(self, uplink: Uplink, lanes: Sequence[Lane], shares: Mapping[int, float], others: int) -> None:
        """Give each transfer its part, and enough for each of its connections. :param others: of other processes."""
        connections = Counter[int]()
        for lane in lanes:
            if lane.flow in shares:
                connections[lane.flow] += max(1, lane.connections)
        uplink.connections = others + sum(connections.values())
        for lane in lanes:
            if lane.turn and lane.flow in shares:
                least = least_part(connections[lane.flow], uplink.connections, uplink.rate)
                uplink.weigh(lane.turn, max(shares[lane.flow], least))

    def _sharers(self, lanes: list[Lane], mine: Sequence[Row], shares: Mapping[int, float]) -> list[Sharer]:
        """Those of this process, the fastest first. :param mine: their rows. :param shares: by transfer."""
        found: dict[tuple[str, str, int], Sharer] = {}
        told = set[int]()
        for lane, row in zip(lanes, mine):
            key = lane.link, lane.claim.owner, lane.claim.priority
            known = found.get(key) or Sharer(*key, 0, 0.0, 0.0)
            share, flows = (0.0, 0) if lane.flow in told else (shares.get(lane.flow, 0.0), 1)
            told.add(lane.flow)
            rate = known.rate + self._meters[row.pid, row.lane].rate
            found[key] = replace(known, flows=known.flows + flows, share=known.share + share, rate=rate)
        return sorted(found.values(), key=lambda one: -one.rate)

    def _limits(self, link: int, rows: list[Row], now_s: float) -> dict[str, float]:
        flows: dict[int, Flow] = {}
        for row in rows:
            rate = self._meters[row.pid, row.lane].rate
            known = flows.get(row.flow)
            if known is None:
                known = Flow(str(row.flow), str(row.owner), row.priority, row.deadline, 0.0, row.begun_s)
            flows[row.flow] = replace(known, rate=known.rate + rate, begun_s=min(known.begun_s, row.begun_s))
        return self._shares[link].limits(list(flows.values()), now_s, time.time())

    def _part(self, mine: Row, moving: int, now_s: float) -> float:
        """The part of one lane in what its flow may have: the lanes that move anything have equal parts."""
        return 1 / (1 + moving - self._meters[mine.pid, mine.lane].moves(now_s))


@functools.lru_cache(maxsize=1)
def links() -> Links:
    """Those of this process."""
    return Links(shared_book(), uplink_of_this_process())


def _part_of_mine(rates: Sequence[tuple[float, bool]]) -> float:
    """The part of a transfer's connections that are this process's: those that carry little do not count.

    :param rates: of each, in bytes a second, and whether it is of this process.
    """
    least = _BUSY * max(rate for rate, _ in rates)
    busy = [is_mine for rate, is_mine in rates if rate >= least]
    return max(1, sum(busy)) / max(1, len(busy) if any(busy) else len(busy) + 1)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _process(pid: int) -> int:
    """A number that is this process's in all containers that share the table."""
    return _number(f"{_namespace('pid')} {pid}") >> 1


@functools.lru_cache(maxsize=2)
def _namespace(kind: str) -> int:
    """The namespace of addresses, or of process numbers: containers may have their own."""
    try:
        return Path(f"/proc/self/ns/{kind}").stat().st_ino
    except OSError:
        return 0
