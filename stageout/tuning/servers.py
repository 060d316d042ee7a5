"""The chooser that adapts (:class:`stageout.core.streams.Streams`): one controller per server, within its grant.

Grants of the policy service bound it, or the node's own limits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from stageout.core.streams import FIXED, ActiveTransfer, Choice, Knobs
from stageout.tuning.controllers import Controller, controller_of

_MAX_SERVERS = 1000


class Grants(Protocol):
    """Streams that are granted to this node, for each server that output waits for."""

    def streams(self, server: str) -> int | None:
        """Return the streams that may be used to a server now; None: the node's own limits count."""

    def reason(self, server: str) -> str:
        """Return one sentence about the grant, for people."""

    def note(self, server: str, wanted: int, in_use: int, rate_mb_s: float | None = None) -> None:
        """Note the streams that could be used and those used now. :param rate_mb_s: after a step."""

    async def close(self) -> None:
        """Give all streams back."""


@dataclass
class _Server:
    """One server.

    :param waiting: files for it. :param useful: files at once that the controller could come to soon.
    :param files: under way. :param streams: that they use.
    """

    controller: Controller
    waiting: int = 0
    useful: int = 0
    files: int = 0
    streams: int = 0


class AdaptiveStreams:
    """Choose by controllers that adapt, within grants.

    :param tuning: name of the controllers. :param start: files at once that were good for a server earlier; 0: not
        known. :param grants: None: there is no policy service.
    """

    def __init__(self, tuning: str, knobs: Knobs, start: Callable[[str], int], grants: Grants | None = None) -> None:
        self._tuning, self._knobs, self._start, self._grants = tuning, knobs, start, grants
        self._servers: dict[str, _Server] = {}
        self.counts_waiting = grants is not None

    def choose(self, server: str, parallelism: int, waiting: int | None = None) -> Choice:
        """Return the number that the server's controller has come to, within the grant."""
        known = self._server(server, parallelism)
        if waiting is not None:
            known.waiting = waiting
            self._tell(server, known)
        streams = self._streams(server, known)
        step = known.controller.now(streams)
        choice = Choice(self._tuning, step.concurrency, step.parallelism, streams, step.reason)
        return replace(choice, grant=self._grants.reason(server)) if self._grants else choice

    def started(self, transfer: ActiveTransfer) -> None:
        """Count a call, and tell the policy service what is used."""
        self._count(transfer, 1)

    def finished(self, transfer: ActiveTransfer, rate_mb_s: float | None) -> None:
        """Count a call that has ended. With a rate, its controller makes a step."""
        known = self._server(transfer.server)
        if rate_mb_s is not None:
            known.controller.step(rate_mb_s, self._streams(transfer.server, known))
            known.useful -= self._knobs.increment  # slowly: a controller goes down to measure, and up again
        self._count(transfer, -1, rate_mb_s)

    async def close(self) -> None:
        """Give all streams back."""
        if self._grants is not None:
            await self._grants.close()

    def _server(self, server: str, parallelism: int = 1) -> _Server:
        known = self._servers.get(server)
        if known is None:
            if len(self._servers) >= _MAX_SERVERS:
                self._servers = {name: one for name, one in self._servers.items() if one.files}
            known = self._servers[server] = _Server(self._controller(server, parallelism))
        elif parallelism > known.controller.knobs.parallelism:
            known.controller = self._controller(server, parallelism)
        return known

    def _controller(self, server: str, parallelism: int) -> Controller:
        return controller_of(self._tuning, replace(self._knobs, parallelism=parallelism), self._start(server))

    def _streams(self, server: str, known: _Server) -> int:
        """Return the granted streams, never more than the node's own limits."""
        own = self._knobs.maximum * known.controller.knobs.parallelism
        granted = self._grants.streams(server) if self._grants else None
        return own if granted is None else min(own, granted)

    def _count(self, transfer: ActiveTransfer, by: int, rate_mb_s: float | None = None) -> None:
        known = self._server(transfer.server)
        known.files += by * transfer.concurrency
        known.streams += by * transfer.streams
        self._tell(transfer.server, known, rate_mb_s)

    def _tell(self, server: str, known: _Server, rate_mb_s: float | None = None) -> None:
        """Tell the grants what could be used, which is up to twice the present number, and what is used."""
        if self._grants is None:
            return
        level = known.controller.now(self._streams(server, known)).concurrency
        known.useful = max(self._knobs.initial, 2 * level, known.useful)
        most = self._knobs.maximum if self._tuning == FIXED else min(self._knobs.maximum, known.useful)
        wanted = min(most, known.waiting + known.files) * known.controller.knobs.parallelism
        self._grants.note(server, wanted, known.streams, rate_mb_s)
