"""The state of the page: the pool, its rates and its history, brought up to date every few seconds."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from stageout.condor.bindings import CondorError
from stageout.core import log
from stageout.wire.matters import Matter, matters
from stageout_web.model import Delivery, Pool, Tally
from stageout_web.queue import QueueError
from stageout_web.reader import Queries, Reader
from stageout_web.records import Records
from stageout_web.ring import Ring

#: Rates are means over this time.
RATE_WINDOW_S = 60.0
#: Servers that have series of their own, those with the most output first.
_SERVERS_RECORDED = 20
#: Series of the whole pool.
SERIES = ("computing", "transferring", "waiting", "moving", "trouble", "bytes_left", "rate", "delivered")


class Jobs(Protocol):
    """The job queue, as :class:`stageout_web.queue.JobQueue` reads it."""

    async def counts(self) -> Mapping[str, int]:
        """Return the jobs in each status. :raises QueueError: there is no answer."""

    async def job(self, cluster: int, proc: int) -> Mapping[str, Any] | None:
        """Return the ad of a job in the queue. :raises QueueError: there is no answer."""

    async def request(self, cluster: int, proc: int, run: int, user: str, request: str, by: str) -> None:
        """Write a request into a job's ad. :raises RequestRefused, QueueError: it is not written, or perhaps."""


class Rates:
    """Bytes that arrived at each server in the last minute. :param clock_s: a monotonic clock."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._sent: deque[tuple[float, str, int]] = deque()
        self._by_server: Counter[str] = Counter()

    def add(self, found: Iterable[Delivery]) -> None:
        """Count what was sent just now, and forget what is too old."""
        now_s = self._clock_s()
        for one in found:
            if one.sent_bytes > 0:
                self._sent.append((now_s, one.server, one.sent_bytes))
                self._by_server[one.server] += one.sent_bytes
        while self._sent and now_s - self._sent[0][0] > RATE_WINDOW_S:
            _, server, size_bytes = self._sent.popleft()
            self._by_server[server] -= size_bytes
            if not self._by_server[server]:
                del self._by_server[server]

    def of(self, server: str) -> float:
        """Return the rate to one server, in bytes per second."""
        return self._by_server.get(server, 0) / RATE_WINDOW_S

    @property
    def total(self) -> float:
        """Return the rate to all servers, in bytes per second."""
        return sum(self._by_server.values()) / RATE_WINDOW_S


class PageState:
    """All that the views show.

    :param clock_s: a monotonic clock. :param wall_s: the wall clock.
    """

    def __init__(
        self,
        collector: Queries,
        queue: Jobs,
        ring: Ring,
        records: Records,
        clock_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self.pool, self.queue, self.ring, self.records = Pool(), queue, ring, records
        self.rates = Rates(clock_s)
        self.problems: dict[str, str] = {}
        self.counts: Mapping[str, int] = {}
        self.delivered, self._unsaved, self._day = (0, 0), (0, 0), ""
        self.total, self.by_server, self.matters = Tally(), dict[str, Tally](), list[Matter]()
        self.figures: dict[str, float] = {}
        self.has_records = False
        self.ticks = 0
        self.updated_at = 0.0
        self._reader = Reader(collector, self.pool, clock_s)
        self.wall_s = wall_s

    def set_interval(self, interval_s: float) -> None:
        """Tell how often :meth:`tick` is called, in seconds."""
        self._reader.set_interval(interval_s)

    async def tick(self) -> None:
        """Read what is new and record a moment. A daemon that does not answer becomes a problem on every page."""
        found: list[Delivery] = []
        try:
            found = await self._reader.read()
            self.updated_at = self.wall_s()
            self._note("collector", "")
        except CondorError as problem:
            self._note("collector", str(problem))
        try:
            self.counts = await self.queue.counts()
            self._note("schedd", "")
        except QueueError as problem:
            self._note("schedd", str(problem))
        await self.records.read()
        self._record(found)

    def _note(self, daemon: str, problem: str) -> None:
        before = self.problems.pop(daemon, "")
        if problem:
            self.problems[daemon] = problem
        if problem and not before:
            log.warn("query-failed", daemon=daemon, problem=problem)
        elif before and not problem:
            log.event("query-recovered", daemon=daemon)

    def _record(self, found: list[Delivery]) -> None:
        now_at = int(self.wall_s())
        problem = self._count([one.bytes_total for one in found if one.is_whole], now_at)
        recorded = self.records.delivered(self._day)
        self.has_records, self.delivered = recorded is not None, recorded or self.delivered
        self.rates.add(found)
        self.by_server = self.pool.by_server()
        self.total = Tally()
        for tally in self.by_server.values():
            self.total.add_all(tally)
        self.matters = matters(self.pool.facts())
        self.figures = self._figures()
        try:
            self.ring.add(now_at, {**self.figures, **self._figures_of_servers()})
        except sqlite3.Error as reason:
            problem = str(reason)
        if problem:
            self.ring.close()  # a new connection finds a file that was removed or made whole
        self._note("history", problem)
        self.ticks += 1

    def _count(self, sizes: list[int], now_at: int) -> str:
        """Count deliveries of today. Return why the history does not have them; they are saved later."""
        day = time.strftime("%Y-%m-%d", time.localtime(now_at))
        if day != self._day:
            self._day, self.delivered, self._unsaved = day, (0, 0), (0, 0)
        outputs, size_bytes = len(sizes), sum(sizes)
        self._unsaved = self._unsaved[0] + outputs, self._unsaved[1] + size_bytes
        try:
            if self._unsaved[0]:
                self.ring.add_deliveries(day, *self._unsaved)
                self._unsaved = 0, 0
            self.delivered = self.ring.deliveries(day)
        except sqlite3.Error as reason:
            self.delivered = self.delivered[0] + outputs, self.delivered[1] + size_bytes
            return str(reason)
        return ""

    def _figures(self) -> dict[str, float]:
        running, transferring = self.counts.get("running", 0), self.counts.get("transferring", 0)
        return {
            "computing": max(0, running - transferring), "transferring": transferring,
            "waiting": self.total.waiting, "moving": self.total.moving, "trouble": self.total.trouble,
            "bytes_left": self.total.bytes_left, "rate": self.rates.total, "delivered": self.delivered[0],
        }  # fmt: skip

    def _figures_of_servers(self) -> dict[str, float]:
        most = sorted(self.by_server, key=lambda server: -self.by_server[server].bytes_left)[:_SERVERS_RECORDED]
        found: dict[str, float] = {}
        for server in most:
            tally = self.by_server[server]
            found[f"rate {server}"] = self.rates.of(server)
            found[f"open {server}"] = tally.waiting + tally.moving
            found[f"trouble {server}"] = tally.trouble
        return found
