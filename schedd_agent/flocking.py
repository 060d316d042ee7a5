"""The collectors of the pools to which jobs flock: their managers' reports, and the agent's letters to them.

Each pool has a thread of its own, so a collector that does not answer delays neither the agent nor other pools.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from schedd_agent.notices import (
    ELSEWHERE,
    PROJECTION,
    REPORTS_WANTED,
    Buckets,
    Directory,
    Look,
    OtherLook,
    age_of,
    scan_pause_s,
)
from schedd_agent.reports import manager_of
from stageout.core import log
from stageout.core.collector import CollectorChild, CollectorError
from stageout.wire.custody import LETTERS, ORDERS_AD, REPORTS

_PAUSE_MAX_S = 60.0
_REFUSED_ADVICE = "its administrator must let this access point write there: docs/SCHEDD.md, Flocking"


class Child(Protocol):
    """The part of :class:`stageout.core.collector.CollectorChild` that is used here."""

    async def query(self, constraint: str, attributes: Sequence[str], ad_type: str = "Any") -> list[Mapping[str, Any]]:
        """Return the ads that match. :raises CollectorError: no answer."""

    async def publish(self, ad: Mapping[str, Any], command: str = "UPDATE_AD_GENERIC") -> None:
        """Publish an ad. :raises CollectorError: refused, or no answer."""

    async def close(self) -> None:
        """End the child."""


class _Failed(NamedTuple):
    pause_s: float
    again_at_s: float


class OtherPool:
    """One pool to which jobs flock, and the thread that asks it.

    :param agent: name of the agent. :param interval_s: seconds between two looks.
    :param connect: makes what asks a collector, in the thread.
    :param clock_s: the monotonic clock of the agent.
    """

    def __init__(
        self,
        host: str,
        agent: str,
        interval_s: float,
        connect: Callable[[str], Child] = lambda host: CollectorChild(host=host),
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.host = host
        self._connect = connect
        self._child: Child
        self._interval_s = interval_s
        self._clock_s = clock_s
        self._buckets = Buckets(agent)
        self._lock = threading.Lock()
        self._wake, self._end = threading.Event(), threading.Event()
        self._letters: dict[str, Mapping[str, Any]] = {}
        self._look = OtherLook()
        self._elsewhere: list[Mapping[str, Any]] = []
        self._scan_at_s = float("-inf")
        self._failed: dict[str, _Failed] = {}
        threading.Thread(target=self._run, name=f"pool {host}", daemon=True).start()

    def last_look(self) -> OtherLook:
        """The last good look; not answering before the first one."""
        with self._lock:
            return self._look

    def post(self, ads: Sequence[Mapping[str, Any]]) -> None:
        """Send these soon, and until the collector takes them; a letter replaces an older one of its name."""
        sheets = [ad for ad in ads if ad["MyType"] == ORDERS_AD]
        with self._lock:
            for ad in (*(ad for ad in ads if ad["MyType"] != ORDERS_AD), *self._buckets.put(sheets)):
                self._letters[str(ad["Name"])] = ad
        self._wake.set()

    def close(self) -> None:
        """Ask no more; the thread ends when the collector has answered, or its time is over."""
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
        """Look once, and send what there is to send."""
        is_seen = await self._try("flock-pool-failed", "flock-pool-well-again", self._look_once)
        with self._lock:
            self._look = self._look._replace(is_answering=is_seen)
        if is_seen:
            await self._try("flock-letters-failed", "flock-letters-well-again", self._send, _REFUSED_ADVICE)

    async def _try(self, failure: str, recovery: str, act: Callable[[], Any], advice: str = "") -> bool:
        """Do it, more and more seldom while it fails. Its first failure is logged, and its end."""
        failed = self._failed.get(failure)
        if failed and self._clock_s() < failed.again_at_s:
            return False
        try:
            await act()
        except Exception as problem:  # whatever it is, the thread must go on
            if failed is None:
                text = str(problem) if isinstance(problem, CollectorError) else repr(problem)
                log.warn(failure, pool=self.host, problem=text, **({"advice": advice} if advice else {}))
            pause_s = min(2 * failed.pause_s, _PAUSE_MAX_S) if failed else self._interval_s
            self._failed[failure] = _Failed(pause_s, self._clock_s() + pause_s)
            return False
        if self._failed.pop(failure, None):
            log.event(recovery, pool=self.host)
        return True

    async def _look_once(self) -> None:
        ads = await self._child.query(REPORTS_WANTED, PROJECTION, REPORTS.ad_type)
        age_s = age_of(await self._child.query("true", ["MonitorSelfAge"], "Collector"))
        start_s = self._clock_s()
        if start_s >= self._scan_at_s:
            self._elsewhere = await self._child.query(ELSEWHERE, PROJECTION)
            self._scan_at_s = self._clock_s() + scan_pause_s(self._clock_s() - start_s)
        with self._lock:
            self._look = OtherLook([*ads, *self._elsewhere], age_s, self._clock_s(), True)

    async def _send(self) -> None:
        with self._lock:
            letters = dict(self._letters)
        for name, ad in letters.items():
            await self._child.publish(ad, LETTERS.update)
            with self._lock:
                if self._letters.get(name) is ad:
                    del self._letters[name]


class FlockDirectory:
    """The agent's own pool, and those to which its jobs flock.

    :param make: makes what asks the pool of a collector.
    """

    def __init__(self, own: Directory, make: Callable[[str], OtherPool], hosts: Iterable[str]) -> None:
        self._own = own
        self._make = make
        self._pools: dict[str, OtherPool] = {}
        self._managers: dict[str, set[str]] = {}
        self.follow(hosts)

    def follow(self, hosts: Iterable[str]) -> None:
        """Look at these pools too. One that is named no more may still hold output: it is looked at until a restart."""
        for host in hosts:
            if host not in self._pools:
                self._pools[host] = self._make(host)
                log.event("flock-pool", pool=host)

    def look(self) -> Look:
        """All ads of managers. :raises CollectorError: the own collector does not answer."""
        own = self._own.look()
        others = {host: pool.last_look() for host, pool in self._pools.items()}
        self._managers = {"": {manager_of(ad) for ad in own.ads}}
        for host, look in others.items():
            self._managers[host] = {manager_of(ad) for ad in look.ads}
        return own._replace(others=others)

    def publish(self, ads: Sequence[Mapping[str, Any]]) -> None:
        """Publish notices everywhere, and order sheets where their manager was seen, or everywhere if nowhere.

        :raises CollectorError: the own collector took none.
        """
        for host, pool in self._pools.items():
            letters = self._letters_for(host, ads)
            if letters:
                pool.post(letters)
        letters = self._letters_for("", ads)
        if letters:
            self._own.publish(letters)

    def close(self) -> None:
        """Look at no pool any more."""
        for pool in self._pools.values():
            pool.close()

    def _letters_for(self, pool: str, ads: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        seen = {name for names in self._managers.values() for name in names}
        here = self._managers.get(pool, set())
        return [
            ad for ad in ads
            if ad["MyType"] != ORDERS_AD or ad["StageOutManager"] in here or ad["StageOutManager"] not in seen
        ]  # fmt: skip
