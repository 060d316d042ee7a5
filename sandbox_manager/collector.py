"""What the sandbox manager wants of the collector (asked through :mod:`stageout.core.collector`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from stageout.core.collector import CollectorChild
from stageout.core.collector import CollectorError as CollectorError
from stageout.wire.custody import AGENT_AD, MANAGER_AD, ORDERS_AD

ATTRIBUTES = ("MyType", "Name", "StageOutManager", "StageOutPayload", "StageOutSignature", "LastHeardFrom")


class Collector(Protocol):
    """What the manager wants of the collector."""

    async def messages(self, manager: str) -> Sequence[Mapping[str, Any]]:
        """Agents' notices, and their orders for this manager. :raises CollectorError: no answer."""

    async def advertise(self, ad: Mapping[str, Any]) -> None:
        """Publish an ad. :raises CollectorError: it is refused, or there is no answer."""

    async def standing(self, manager: str) -> str:
        """Signature of the report in a manager's name, "" without one. :raises CollectorError: no answer."""

    async def advertise_apart(self, ad: Mapping[str, Any]) -> None:
        """Publish an ad as an ordinary pilot may, without a startd. :raises CollectorError: as above."""

    async def close(self) -> None:
        """Ask nothing more."""


class CollectorProcess(CollectorChild):
    """The collector(s) of the HTCondor configuration."""

    async def messages(self, manager: str) -> Sequence[Mapping[str, Any]]:
        """Agents' notices, and their orders for this manager."""
        orders = f'(MyType == "{ORDERS_AD}" && StageOutManager == {json.dumps(manager)})'
        return await self.query(f'MyType == "{AGENT_AD}" || {orders}', ATTRIBUTES)

    async def standing(self, manager: str) -> str:
        """Signature of the report that is there in a manager's name."""
        constraint = f'MyType == "{MANAGER_AD}" && Name == {json.dumps(manager)}'
        ads = await self.query(constraint, ["StageOutSignature"])
        return str(ads[0].get("StageOutSignature", "")) if ads else ""

    async def advertise(self, ad: Mapping[str, Any]) -> None:
        """Publish an ad among the collector's generic ones."""
        await self.publish(ad)

    async def advertise_apart(self, ad: Mapping[str, Any]) -> None:
        """Publish an ad among those of the masters, for which ADVERTISE_MASTER is enough."""
        await self.publish(ad, "UPDATE_MASTER_AD")
