"""Streams that the policy service grants to this node, one lease per server that output waits for.

What counts, in this order: the lease, until it ends; while the service does not answer and no lease holds, the node's
own limits; and nothing while a first answer is awaited, or when the service knows no such lease any more. A lease ends
by the monotonic clock, counted from before it was asked for, so this node never uses streams for longer than the
service counts them. Nothing is kept over a restart: the service gives the same client the same lease again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar
from urllib.parse import urlsplit

from sandbox_manager.policy_client import Lease, NoLeaseError, SilentError, service_name
from stageout.core import log
from stageout.core.clock import Clock

T = TypeVar("T")
_AGAIN_S = 2.0
_BETWEEN_S = 1.0
_IDLE_S = 30.0
_HUNGRY_S = 5.0  # who has fewer than wanted asks again, because others give theirs back without a word to it
_LOOK_S = 1.0
_CLOSE_S = 3.0


class Service(Protocol):
    """The policy service; see :class:`sandbox_manager.policy_client.PolicyClient`. Its calls block."""

    def request(self, client: str, destination: str, wanted: int) -> Lease:
        """Ask for streams."""

    def renew(self, lease: str, wanted: int, in_use: int) -> Lease:
        """Another term."""

    def report(self, lease: str, in_use: int, rate_mb_s: float) -> None:
        """Say what is used and reached."""

    def release(self, lease: str) -> None:
        """Give the streams back."""


@dataclass
class _Pair:
    """This node and one server. :param news: to tell the service before the lease's time. Times are monotonic."""

    server: str
    destination: str
    client: str
    lease: Lease | None = None
    ends_s: float = 0.0
    renew_s: float = 0.0
    talked_s: float = float("-inf")
    busy_s: float = 0.0
    wanted: int = 0
    in_use: int = 0
    rate_mb_s: float | None = None
    news: bool = False


class Grants:
    """The leases of one node. :meth:`run` beside everything; the rest is asked from the same event loop.

    :param client: name of this node. :param changed: called when something else may be used than before.
    """

    def __init__(self, service: Service, client: str, clock: Clock, changed: Callable[[], None]) -> None:
        self._service = service
        self._client = client
        self._clock = clock
        self._changed = changed
        self._pairs: dict[str, _Pair] = {}
        self._silence = ""
        self._again_s = float("-inf")
        self._wake = asyncio.Event()
        self._worker = ThreadPoolExecutor(1, "policy")

    def streams(self, server: str) -> int | None:
        """Streams that may be used to a server now; None: the node's own limits count, the service is away."""
        pair = self._pairs.get(server)
        if pair is not None and pair.lease is not None and self._clock.monotonic_s() < pair.ends_s:
            return pair.lease.streams
        return None if self._silence else 0

    def reason(self, server: str) -> str:
        """One sentence about the grant, for people."""
        pair = self._pairs.get(server)
        left_s = pair.ends_s - self._clock.monotonic_s() if pair and pair.lease else 0.0
        silence = f"The policy service does not answer ({self._silence})"
        if pair is not None and pair.lease is not None and left_s > 0:
            if self._silence:
                return f"{silence}; its last grant of {pair.lease.streams} streams holds for {left_s:.0f} s."
            return f"The policy service grants {pair.lease.streams} streams. {pair.lease.reason}"
        return f"{silence}: the limits of this node count." if self._silence else "Asks the policy service for streams."

    def note(self, server: str, wanted: int, in_use: int, rate_mb_s: float | None = None) -> None:
        """The streams that could be used and those used now.

        :param rate_mb_s: after a step: it is reported, and the lease renewed at once, as ADAPT's client does it.
        """
        pair = self._pairs.get(server)
        if pair is None:
            if not wanted:
                return
            pair = self._pairs[server] = _Pair(server, _destination(server), service_name(f"{self._client}/{server}"))
        shrinks = pair.lease is not None and in_use < pair.in_use and pair.in_use > pair.lease.streams
        if rate_mb_s is not None:
            pair.rate_mb_s = rate_mb_s
        pair.news = pair.news or rate_mb_s is not None or shrinks or bool(wanted) != bool(pair.wanted)
        pair.wanted, pair.in_use = wanted, in_use
        if wanted or in_use:
            pair.busy_s = self._clock.monotonic_s()
        if pair.news:
            self._wake.set()

    async def run(self) -> None:
        """Keep the leases until cancelled."""
        while True:
            self._wake.clear()
            for pair in list(self._pairs.values()):
                await self._tend(pair)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _LOOK_S)

    async def close(self) -> None:
        """Give all streams back, as far as the service takes them in a few seconds."""
        for pair in self._pairs.values():
            pair.wanted = pair.in_use = 0
        leases = [pair.lease.id for pair in self._pairs.values() if pair.lease is not None]
        self._pairs.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._in_worker(lambda: self._release_all(leases)), _CLOSE_S)
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _release_all(self, leases: list[str]) -> None:
        for lease in leases:
            try:
                self._service.release(lease)
            except NoLeaseError:
                continue
            except SilentError as problem:
                log.warn("streams-not-released", problem=problem, ends="by themselves")
                return

    async def _tend(self, pair: _Pair) -> None:
        now_s = self._clock.monotonic_s()
        if pair.lease is not None and now_s >= pair.ends_s:
            log.warn("lease-ended", server=pair.server, streams=pair.lease.streams, why=self._silence)
            pair.lease = None
            self._changed()
        if now_s < self._again_s:
            return
        if pair.lease is None:
            if pair.wanted:
                await self._talk(pair, lambda: self._service.request(pair.client, pair.destination, pair.wanted))
        elif not pair.wanted and not pair.in_use and now_s - pair.busy_s >= _IDLE_S:
            await self._give_back(pair, pair.lease)
        elif now_s >= pair.renew_s or (pair.news and now_s - pair.talked_s >= _BETWEEN_S):
            await self._talk(pair, self._renewal(pair, pair.lease))

    def _renewal(self, pair: _Pair, lease: Lease) -> Callable[[], Lease]:
        wanted, in_use, rate = pair.wanted, min(pair.in_use, lease.counted), pair.rate_mb_s

        def renew() -> Lease:
            if rate is not None:
                self._service.report(lease.id, in_use, rate)
            return self._service.renew(lease.id, wanted, in_use)

        return renew

    async def _talk(self, pair: _Pair, ask: Callable[[], Lease]) -> None:
        """Ask, and take what is answered over."""
        before, sent_s = self.streams(pair.server), self._clock.monotonic_s()
        pair.news, pair.rate_mb_s, pair.talked_s = False, None, sent_s
        try:
            lease = await self._in_worker(ask)
        except NoLeaseError as problem:
            log.warn("lease-lost", server=pair.server, problem=problem)
            self._answered()
            pair.lease = None
            self._wake.set()
        except SilentError as problem:
            pair.news = True
            self._silent(str(problem))
        else:
            self._answered()
            pair.lease = lease
            hungry = lease.streams < pair.wanted
            pair.ends_s = sent_s + lease.ends_in_s
            pair.renew_s = sent_s + (min(_HUNGRY_S, lease.renew_in_s) if hungry else lease.renew_in_s)
        now = self.streams(pair.server)
        if now != before:
            log.event("streams-granted", server=pair.server, streams=now, before=before, why=self.reason(pair.server))
            self._changed()

    async def _give_back(self, pair: _Pair, lease: Lease) -> None:
        del self._pairs[pair.server]
        with contextlib.suppress(NoLeaseError, SilentError):
            await self._in_worker(lambda: self._service.release(lease.id))
        log.event("streams-released", server=pair.server, streams=lease.streams)

    def _silent(self, problem: str) -> None:
        self._again_s = self._clock.monotonic_s() + _AGAIN_S
        if not self._silence:
            log.warn("policy-silent", problem=problem, until="a lease ends its grant holds, then this node's limits")
        self._silence = problem

    def _answered(self) -> None:
        if self._silence:
            log.event("policy-answers")
            self._silence = ""
            self._changed()

    async def _in_worker(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)


def _destination(server: str) -> str:
    """The name of a server's host for the service, whatever the method and port: it is the way that is shared."""
    parts = urlsplit(server)
    return service_name(parts.hostname or parts.scheme)
