"""Routers of the same pool, found through HTCondor's collector.

Each router below condor_master publishes an ad with its address and its figures. An ad proves nothing: who is found is
connected to like a configured neighbour, and must have the shared key.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from stageout.condor.bindings import CondorError
from stageout.condor.collector_child import CollectorChild
from stageout.core import log
from stageout.overlay.wire.route import address, written
from stageout.wire.address import is_address
from stageout.wire.custody import LETTERS
from stageout.wire.services import ROUTER_AD, RouterReport, service_ad

#: The collector forgets an ad after a quarter of an hour. Figures are published at each look.
_PUBLISH_EVERY_S = 300.0
_LOOK_EVERY_S = 60.0
_AGAIN_S = 2.5


class Directory:
    """This router's ad, and those of the others.

    :param own: this router's address. :param found: called with the addresses of the others when they change.
    :param report: returns this router's figures.
    """

    def __init__(
        self,
        collector: CollectorChild,
        own: str,
        found: Callable[[frozenset[str]], None],
        report: Callable[[], Awaitable[RouterReport]],
    ) -> None:
        self._collector, self._own, self._found, self._report = collector, own, found, report
        self._known: frozenset[str] = frozenset()
        self._published_s = float("-inf")

    async def run(self) -> None:
        """Publish and look, until cancelled. While the collector does not answer, who was found stays found."""
        told, pause_s = "", _AGAIN_S
        try:
            while True:
                try:
                    await self._once()
                    told, pause_s = "", _LOOK_EVERY_S
                except CondorError as problem:
                    if str(problem) != told:
                        log.warn("collector-query-failed", problem=problem)
                    told, pause_s = str(problem), min(_LOOK_EVERY_S, 2 * pause_s)
                await asyncio.sleep(pause_s)
        finally:
            await self._collector.close()

    async def _once(self) -> None:
        now_s, report = time.monotonic(), await self._report()
        if report.links or report.custody or now_s - self._published_s >= _PUBLISH_EVERY_S:
            await self._collector.publish(service_ad(ROUTER_AD, self._own, report), LETTERS.update)
            self._published_s = now_s
        ads = await self._collector.query(f'MyType == "{ROUTER_AD}"', ["Name"])
        names = (str(ad.get("Name")) for ad in ads)
        known = frozenset(written(*address(name)) for name in names if is_address(name)) - {self._own}
        if known != self._known:
            log.event("routers-found", routers=", ".join(sorted(known)) or "none")
            self._known = known
            self._found(known)
