"""The sandbox manager's queries and updates to the collector (asked through :mod:`stageout.condor.collector_child`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from stageout.condor.collector_child import CollectorChild
from stageout.wire.custody import (
    AGENT_AD,
    BUCKET_AD,
    LETTERS,
    REPORT_ADDRESS,
    REPORTS,
    BadPayload,
    bucket_of,
    sheets_for,
)

ATTRIBUTES = ("MyType", "Name", "StageOutPayload", "StageOutSignature", "LastHeardFrom")


class Collector(Protocol):
    """The manager's interface to the collector."""

    async def messages(self, manager: str) -> Sequence[Mapping[str, Any]]:
        """Query the agents' notices, and their orders for this manager. :raises CondorError: no answer."""

    async def advertise(self, ad: Mapping[str, Any]) -> None:
        """Publish an ad. :raises CondorError: it is refused, or there is no answer."""

    async def advertise_apart(self, ad: Mapping[str, Any]) -> None:
        """Publish an ad as an ordinary pilot may, without a startd. :raises CondorError: as above."""

    async def close(self) -> None:
        """Ask nothing more."""


def letters_to(manager: str) -> str:
    """Write the constraint for the agents' notices and the buckets that may hold orders for a manager."""
    return f'StageOutBucket == {bucket_of(manager)} || MyType == "{AGENT_AD}"'


def unpacked(ads: Iterable[Mapping[str, Any]], manager: str) -> list[Mapping[str, Any]]:
    """Replace the buckets among the ads by the order sheets for this manager that they hold.

    An unreadable bucket stays as it is: the gatekeeper refuses it and names it in the log.
    """
    found: list[Mapping[str, Any]] = []
    for ad in ads:
        try:
            found.extend(sheets_for(manager, ad) if ad.get("MyType") == BUCKET_AD else (ad,))
        except BadPayload:
            found.append(ad)
    return found


class CollectorProcess(CollectorChild):
    """The collector(s) of the HTCondor configuration."""

    async def messages(self, manager: str) -> Sequence[Mapping[str, Any]]:
        """Query the agents' notices, and their orders for this manager."""
        found = await self.query(letters_to(manager), ATTRIBUTES, LETTERS.ad_type)
        return unpacked(found, manager)

    async def advertise(self, ad: Mapping[str, Any]) -> None:
        """Publish an ad among the reports."""
        await self.publish({**ad, **REPORT_ADDRESS}, REPORTS.update)

    async def advertise_apart(self, ad: Mapping[str, Any]) -> None:
        """Publish an ad among those of the masters, for which ADVERTISE_MASTER is enough."""
        await self.publish(ad, "UPDATE_MASTER_AD")
