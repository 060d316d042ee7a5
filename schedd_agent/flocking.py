"""The collectors of the pools to which jobs flock: reports of their managers, and the agent's ads for them.

Each pool has a thread of its own, so a collector that does not answer delays neither the agent nor other pools.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from schedd_agent.collector import (
    ELSEWHERE,
    PROJECTION,
    REPORTS_WANTED,
    CollectorClient,
    CollectorSnapshot,
    OrderBuckets,
    OtherPoolSnapshot,
    collector_age_s_of,
    scan_pause_s,
)
from schedd_agent.reports import manager_of
from stageout.condor.bindings import CondorError
from stageout.condor.collector_child import CollectorChild
from stageout.core import log
from stageout.wire.custody import LETTERS, ORDERS_AD, REPORTS

_PAUSE_MAX_S = 60.0
_REFUSED_ADVICE = (
    "its administrator must let this access point write there: docs/administrator/access-point.md#flocking"
)


class CollectorConnection(Protocol):
    """The calls of :class:`stageout.condor.collector_child.CollectorChild` that this module uses."""

    async def query(self, constraint: str, attributes: Sequence[str], ad_type: str = "Any") -> list[Mapping[str, Any]]:
        """Return the ads that match. :raises CondorError: the collector does not answer."""

    async def publish(self, ad: Mapping[str, Any], command: str = "UPDATE_AD_GENERIC") -> None:
        """Publish an ad. :raises CondorError: the collector refuses it or does not answer."""

    async def close(self) -> None:
        """End the child process."""


class _Backoff(NamedTuple):
    pause_s: float
    again_at_s: float


class FlockedPool:
    """One pool to which jobs flock, with the thread that queries its collector.

    :param agent: name of the agent. :param interval_s: seconds between two queries.
    :param connect: opens a connection to a collector, in the thread.
    :param clock_s: the monotonic clock of the agent.
    """

    def __init__(
        self,
        host: str,
        agent: str,
        interval_s: float,
        connect: Callable[[str], CollectorConnection] = lambda host: CollectorChild(host=host),
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.host = host
        self._connect = connect
        self._child: CollectorConnection
        self._interval_s = interval_s
        self._clock_s = clock_s
        self._buckets = OrderBuckets(agent)
        self._lock = threading.Lock()
        self._wake, self._end = threading.Event(), threading.Event()
        self._pending: dict[str, Mapping[str, Any]] = {}
        self._snapshot = OtherPoolSnapshot()
        self._elsewhere: list[Mapping[str, Any]] = []
        self._scan_at_s = float("-inf")
        self._failed: dict[str, _Backoff] = {}
        threading.Thread(target=self._run, name=f"pool {host}", daemon=True).start()

    def last_snapshot(self) -> OtherPoolSnapshot:
        """Return the newest answer of the collector."""
        with self._lock:
            return self._snapshot

    def post(self, ads: Sequence[Mapping[str, Any]]) -> None:
        """Publish ads soon, and again until the collector takes them. An ad replaces an older one of its name."""
        sheets = [ad for ad in ads if ad["MyType"] == ORDERS_AD]
        with self._lock:
            for ad in (*(ad for ad in ads if ad["MyType"] != ORDERS_AD), *self._buckets.put(sheets)):
                self._pending[str(ad["Name"])] = ad
        self._wake.set()

    def close(self) -> None:
        """Stop the queries. The thread ends after the collector's answer or its timeout."""
        self._end.set()
        self._wake.set()

    def _run(self) -> None:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)  # what Python 3.9 makes for asyncio asks for it
        self._child = self._connect(self.host)
        while not self._end.is_set():
            self._wake.clear()
            loop.run_until_complete(self._work())
            self._wake.wait(self._interval_s)
        loop.run_until_complete(self._child.close())
        loop.close()

    async def _work(self) -> None:
        """Query the collector once, and publish the pending ads."""
        is_seen = await self._try("flock-pool-lost", "flock-pool-recovered", self._query_once)
        with self._lock:
            self._snapshot = self._snapshot._replace(is_answering=is_seen)
        if is_seen:
            await self._try("flock-notice-refused", "flock-notice-recovered", self._send, _REFUSED_ADVICE)

    async def _try(self, failure: str, recovery: str, act: Callable[[], Any], advice: str = "") -> bool:
        """Call ``act``, with growing pauses while it fails. Log the first failure and the recovery."""
        failed = self._failed.get(failure)
        if failed and self._clock_s() < failed.again_at_s:
            return False
        try:
            await act()
        except Exception as problem:  # no failure may end the thread
            if failed is None:
                text = str(problem) if isinstance(problem, CondorError) else repr(problem)
                log.warn(failure, pool=self.host, problem=text, **({"advice": advice} if advice else {}))
            pause_s = min(2 * failed.pause_s, _PAUSE_MAX_S) if failed else self._interval_s
            self._failed[failure] = _Backoff(pause_s, self._clock_s() + pause_s)
            return False
        if self._failed.pop(failure, None):
            log.event(recovery, pool=self.host)
        return True

    async def _query_once(self) -> None:
        ads = await self._child.query(REPORTS_WANTED, PROJECTION, REPORTS.ad_type)
        age_s = collector_age_s_of(await self._child.query("true", ["MonitorSelfAge"], "Collector"))
        start_s = self._clock_s()
        if start_s >= self._scan_at_s:
            self._elsewhere = await self._child.query(ELSEWHERE, PROJECTION)
            self._scan_at_s = self._clock_s() + scan_pause_s(self._clock_s() - start_s)
        with self._lock:
            self._snapshot = OtherPoolSnapshot([*ads, *self._elsewhere], age_s, self._clock_s(), True)

    async def _send(self) -> None:
        with self._lock:
            pending = dict(self._pending)
        for name, ad in pending.items():
            await self._child.publish(ad, LETTERS.update)
            with self._lock:
                if self._pending.get(name) is ad:
                    del self._pending[name]


class FlockingCollectorClient:
    """Client of the agent's own pool and of those to which its jobs flock.

    :param make: makes the client of a collector's pool.
    """

    def __init__(self, own: CollectorClient, make: Callable[[str], FlockedPool], hosts: Iterable[str]) -> None:
        self._own = own
        self._make = make
        self._pools: dict[str, FlockedPool] = {}
        self._managers: dict[str, set[str]] = {}
        self.follow(hosts)

    def follow(self, hosts: Iterable[str]) -> None:
        """Query these pools too. A removed pool may still hold output, so it is queried until a restart."""
        for host in hosts:
            if host not in self._pools:
                self._pools[host] = self._make(host)
                log.event("flock-pool-added", pool=host)

    def query_reports(self) -> CollectorSnapshot:
        """Return all reports of managers. :raises CondorError: the own collector does not answer."""
        own = self._own.query_reports()
        others = {host: pool.last_snapshot() for host, pool in self._pools.items()}
        self._managers = {"": {manager_of(ad) for ad in own.ads}}
        for host, snapshot in others.items():
            self._managers[host] = {manager_of(ad) for ad in snapshot.ads}
        return own._replace(others=others)

    def publish(self, ads: Sequence[Mapping[str, Any]]) -> None:
        """Publish notices in all pools, and order sheets in the pools of their managers (in all while unknown).

        :raises CondorError: the own collector took none.
        """
        for host, pool in self._pools.items():
            pending = self._ads_for(host, ads)
            if pending:
                pool.post(pending)
        pending = self._ads_for("", ads)
        if pending:
            self._own.publish(pending)

    def close(self) -> None:
        """Stop the queries of all pools."""
        for pool in self._pools.values():
            pool.close()

    def _ads_for(self, pool: str, ads: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        seen = {name for names in self._managers.values() for name in names}
        here = self._managers.get(pool, set())
        return [
            ad for ad in ads
            if ad["MyType"] != ORDERS_AD or ad["StageOutManager"] in here or ad["StageOutManager"] not in seen
        ]  # fmt: skip
