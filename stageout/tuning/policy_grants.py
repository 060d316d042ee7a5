"""Streams that the policy service grants to this node, one lease per server that output waits for.

In this order: the streams of a lease, until it ends; the node's own limits, while the service does not answer and no
lease holds; no streams, while a first answer is awaited or the service knows no such lease any more. A lease ends by
the monotonic clock, counted from before it was asked for, so this node never uses streams for longer than the service
counts them. Nothing is kept over a restart: the service gives the same client the same lease again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar
from urllib.parse import urlsplit

from stageout.core import log
from stageout.core.clock import Clock
from stageout.core.config import Settings
from stageout.core.ending import end
from stageout.core.streams import Supervise
from stageout.tuning.policy_client import (
    Lease,
    NoLeaseError,
    PolicyClient,
    SilentError,
    address_of,
    service_name,
)

T = TypeVar("T")
_AGAIN_S = 2.0
_BETWEEN_S = 1.0
_IDLE_S = 30.0
_HUNGRY_S = 5.0  # who has fewer than wanted asks again, because others give theirs back without a word to it
_LOOK_S = 1.0
_CLOSE_S = 3.0


class Service(Protocol):
    """The policy service; see :class:`stageout.tuning.policy_client.PolicyClient`. Its calls block."""

    def request(self, client: str, destination: str, wanted: int) -> Lease:
        """Ask for streams."""

    def renew(self, lease: str, wanted: int, in_use: int) -> Lease:
        """Ask for another term."""

    def report(self, lease: str, in_use: int, rate_mb_s: float) -> None:
        """Say what is used and reached."""

    def release(self, lease: str) -> None:
        """Give the streams back."""


@dataclass
class _ServerLease:
    """A grant for this node and one server; times are monotonic. :param news: a change to send early."""

    server: str
    destination: str
    client: str
    lease: Lease | None = None
    ends_s: float = 0.0
    renew_s: float = 0.0
    called_s: float = float("-inf")
    busy_s: float = 0.0
    wanted: int = 0
    in_use: int = 0
    rate_mb_s: float | None = None
    news: bool = False


class PolicyGrants:
    """The leases of one node. All is asked from one event loop. The first files that wait begin :meth:`run`.

    :param client: name of this node. :param changed: called when something else may be used than before.
    :param supervise: keeps work going until it is cancelled.
    """

    def __init__(
        self, service: Service, client: str, clock: Clock, changed: Callable[[], None], supervise: Supervise
    ) -> None:
        self._service = service
        self._client = client
        self._clock = clock
        self._changed = changed
        self._entries: dict[str, _ServerLease] = {}
        self._problem = ""
        self._again_s = float("-inf")
        self._supervise = supervise
        self._wake = asyncio.Event()
        self._worker = ThreadPoolExecutor(1, "policy")
        self._keeper: asyncio.Task[None] | None = None
        self._is_closed = False

    def streams(self, server: str) -> int | None:
        """Return the streams that may be used to a server now; None: the node's limits count, the service is away."""
        entry = self._entries.get(server)
        if entry is not None and entry.lease is not None and self._clock.monotonic_s() < entry.ends_s:
            return entry.lease.streams
        return None if self._problem else 0

    def reason(self, server: str) -> str:
        """Return one sentence about the grant, for people."""
        entry = self._entries.get(server)
        left_s = entry.ends_s - self._clock.monotonic_s() if entry and entry.lease else 0.0
        no_answer = f"The policy service does not answer ({self._problem})"
        if entry is not None and entry.lease is not None and left_s > 0:
            if self._problem:
                return f"{no_answer}; its last grant of {entry.lease.streams} streams holds for {left_s:.0f} s."
            return f"The policy service grants {entry.lease.streams} streams. {entry.lease.reason}"
        return (
            f"{no_answer}: the limits of this node count." if self._problem else "Asks the policy service for streams."
        )

    def note(self, server: str, wanted: int, in_use: int, rate_mb_s: float | None = None) -> None:
        """Note the streams that could be used and those used now.

        :param rate_mb_s: after a step: it is reported, and the lease renewed at once, as ADAPT's client does it.
        """
        entry = self._entries.get(server)
        if entry is None:
            if self._is_closed or not wanted:
                return
            entry = self._entries[server] = _ServerLease(
                server, _destination(server), service_name(f"{self._client}/{server}")
            )
        shrinks = entry.lease is not None and in_use < entry.in_use and entry.in_use > entry.lease.streams
        if rate_mb_s is not None:
            entry.rate_mb_s = rate_mb_s
        entry.news = entry.news or rate_mb_s is not None or shrinks or bool(wanted) != bool(entry.wanted)
        entry.wanted, entry.in_use = wanted, in_use
        if wanted or in_use:
            entry.busy_s = self._clock.monotonic_s()
        if entry.news:
            self._wake.set()
        if self._keeper is None:
            self._keeper = asyncio.get_running_loop().create_task(self._supervise("streams", self.run))

    async def run(self) -> None:
        """Keep the leases until cancelled."""
        while True:
            self._wake.clear()
            for entry in list(self._entries.values()):
                await self._renew_if_due(entry)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _LOOK_S)

    async def close(self) -> None:
        """Give all streams back, as far as the service takes them in a few seconds. Later notes count for nothing."""
        self._is_closed = True
        if self._keeper is not None:
            await end([self._keeper])
        leases = [entry.lease.id for entry in self._entries.values() if entry.lease is not None]
        self._entries.clear()
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
                log.warn("streams-release-failed", problem=problem, ends="by themselves")
                return

    async def _renew_if_due(self, entry: _ServerLease) -> None:
        now_s = self._clock.monotonic_s()
        if entry.lease is not None and now_s >= entry.ends_s:
            log.warn("grant-expired", server=entry.server, streams=entry.lease.streams, why=self._problem)
            entry.lease = None
            self._changed()
        if now_s < self._again_s:
            return
        if entry.lease is None:
            if entry.wanted:
                await self._call(entry, lambda: self._service.request(entry.client, entry.destination, entry.wanted))
        elif not entry.wanted and not entry.in_use and now_s - entry.busy_s >= _IDLE_S:
            await self._release(entry, entry.lease)
        elif now_s >= entry.renew_s or (entry.news and now_s - entry.called_s >= _BETWEEN_S):
            await self._call(entry, self._renewal(entry, entry.lease))

    def _renewal(self, entry: _ServerLease, lease: Lease) -> Callable[[], Lease]:
        wanted, in_use, rate = entry.wanted, min(entry.in_use, lease.counted), entry.rate_mb_s

        def renew() -> Lease:
            if rate is not None:
                self._service.report(lease.id, in_use, rate)
            return self._service.renew(lease.id, wanted, in_use)

        return renew

    async def _call(self, entry: _ServerLease, ask: Callable[[], Lease]) -> None:
        """Ask, and use the answer."""
        before, sent_s = self.streams(entry.server), self._clock.monotonic_s()
        entry.news, entry.rate_mb_s, entry.called_s = False, None, sent_s
        try:
            lease = await self._in_worker(ask)
        except NoLeaseError as problem:
            log.warn("grant-lost", server=entry.server, problem=problem)
            self._answered()
            entry.lease = None
            self._wake.set()
        except SilentError as problem:
            entry.news = True
            self._silent(str(problem))
        else:
            self._answered()
            entry.lease = lease
            hungry = lease.streams < entry.wanted
            entry.ends_s = sent_s + lease.ends_in_s
            entry.renew_s = sent_s + (min(_HUNGRY_S, lease.renew_in_s) if hungry else lease.renew_in_s)
        now = self.streams(entry.server)
        if now != before:
            log.event("streams-granted", server=entry.server, streams=now, before=before, why=self.reason(entry.server))
            self._changed()

    async def _release(self, entry: _ServerLease, lease: Lease) -> None:
        del self._entries[entry.server]
        with contextlib.suppress(NoLeaseError, SilentError):
            await self._in_worker(lambda: self._service.release(lease.id))
        log.event("streams-released", server=entry.server, streams=lease.streams)

    def _silent(self, problem: str) -> None:
        self._again_s = self._clock.monotonic_s() + _AGAIN_S
        if not self._problem:
            log.warn(
                "policy-service-lost", problem=problem, until="a lease ends its grant holds, then this node's limits"
            )
        self._problem = problem

    def _answered(self) -> None:
        if self._problem:
            log.event("policy-service-recovered")
            self._problem = ""
            self._changed()

    async def _in_worker(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)


def maker(settings: Settings) -> Callable[[str, Clock, Callable[[], None], Supervise], PolicyGrants]:
    """Return what makes grants of the service that the configuration names. :raises ConfigError: it cannot be used."""
    return partial(PolicyGrants, PolicyClient(address_of(settings)))


def _destination(server: str) -> str:
    """Name a server's host for the service, whatever the method and port: it is the way that is shared."""
    parts = urlsplit(server)
    return service_name(parts.hostname or parts.scheme)
