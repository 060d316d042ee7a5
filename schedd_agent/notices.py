"""The collector as the place where agents and managers leave each other messages. Blocking; one thread at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from stageout.core.errors import StageoutError
from stageout.wire.custody import (
    AD_LIFETIME_S,
    LETTERS,
    MANAGER_AD,
    ORDERS_AD,
    REPORTS,
    bucket_ad,
    bucket_of,
)

PROJECTION = ["MyType", "Name", "StageOutManager", "StageOutPayload", "StageOutSignature"]
#: A slot carries the report of a manager whose token does not allow an ad of its own, and the table of the masters has
#: the last report of a pilot.
ELSEWHERE = (
    f'(StageOutPayload ?: "") != "" && (MyType == "Machine" || MyType == "{MANAGER_AD}" && MyAddress is undefined)'
)
REPORTS_WANTED = "StageOutPayload isnt undefined"
#: The scan of all ads may take this part of the time; it comes with every look in a small pool.
_SCAN_SHARE = 0.005
_SCAN_INTERVAL_MAX_S = 60.0


class CollectorError(StageoutError):
    """The collector did not answer, or refused."""


class Look(NamedTuple):
    """One look at the collector.

    :param ads: of managers, whatever door they came through. :param collector_age_s: for how long it has been up.
    :param others: what the collectors of other pools showed last, by the pool's name.
    """

    ads: Sequence[Mapping[str, Any]]
    collector_age_s: float
    others: Mapping[str, OtherLook] = MappingProxyType({})


class OtherLook(NamedTuple):
    """The last good look at the collector of another pool.

    :param at_s: when, by the monotonic clock. :param is_answering: the latest look was a good one.
    """

    ads: Sequence[Mapping[str, Any]] = ()
    collector_age_s: float = 0.0
    at_s: float = float("-inf")
    is_answering: bool = False


class Directory(Protocol):
    """The agent's interface to a collector. All calls block and raise CollectorError."""

    def look(self) -> Look:
        """All ads of managers. :raises CollectorError: it does not answer."""

    def publish(self, ads: Sequence[Mapping[str, Any]]) -> None:
        """Publish notices and order sheets, each in place of an older one. :raises CollectorError: it took none."""


class Buckets:
    """The order sheets of one agent as managers find them: many in one ad."""

    def __init__(self, agent: str) -> None:
        self._agent = agent
        self._sheets: dict[int, dict[str, Mapping[str, Any]]] = {}

    def put(self, sheets: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Replace these sheets; returns the ads of their buckets. Sheets that were not repeated expire."""
        changed = set()
        for ad in sheets:
            bucket = bucket_of(ad["StageOutManager"])
            self._sheets.setdefault(bucket, {})[ad["Name"]] = ad
            changed.add(bucket)
        return [self._ad(bucket) for bucket in sorted(changed)]

    def _ad(self, bucket: int) -> dict[str, Any]:
        kept = self._sheets[bucket]
        oldest_at = max(ad["StageOutSentAt"] for ad in kept.values()) - AD_LIFETIME_S
        kept = self._sheets[bucket] = {name: ad for name, ad in kept.items() if ad["StageOutSentAt"] >= oldest_at}
        return bucket_ad(self._agent, bucket, kept.values())


def age_of(ads: Iterable[Mapping[str, Any]]) -> float:
    """For how long the collector with these ads about itself has been up, in seconds."""
    ages = (ad.get("MonitorSelfAge") for ad in ads)
    return min((float(age) for age in ages if isinstance(age, (int, float))), default=0.0)


def scan_pause_s(took_s: float) -> float:
    """Seconds from one scan of all ads to the next. :param took_s: seconds that the last one took."""
    return min(took_s / _SCAN_SHARE, _SCAN_INTERVAL_MAX_S)


class CondorDirectory:
    """The pool's collector. :param agent: name of the agent that uses it. :param clock_s: a monotonic clock."""

    def __init__(self, agent: str, clock_s: Callable[[], float] = time.monotonic) -> None:
        import classad2
        import htcondor2

        self._condor, self._classad = htcondor2, classad2
        self._buckets = Buckets(agent)
        self._clock_s = clock_s
        self._elsewhere: list[Mapping[str, Any]] = []
        self._scan_at_s = float("-inf")
        own = getattr(htcondor2, "HTCondorException", None)
        self._errors: tuple[type[Exception], ...] = (OSError, RuntimeError, ValueError, *([own] if own else []))

    def look(self) -> Look:
        """All ads of managers. :raises CollectorError: it does not answer."""
        try:
            reports = self._query(REPORTS.ad_type, REPORTS_WANTED, PROJECTION)
            ages = self._query("Collector", "true", ["MonitorSelfAge"])
            self._scan()
        except self._errors as problem:
            raise CollectorError(f"the collector does not answer: {problem}") from None
        return Look([*reports, *self._elsewhere], age_of(ages))

    def _scan(self) -> None:
        """Look for reports among all ads of the pool, when the time for that has come."""
        start_s = self._clock_s()
        if start_s < self._scan_at_s:
            return
        self._elsewhere = self._query("Any", ELSEWHERE, PROJECTION)
        end_s = self._clock_s()
        self._scan_at_s = end_s + scan_pause_s(end_s - start_s)

    def _query(self, ad_type: str, constraint: str, attributes: list[str]) -> list[Mapping[str, Any]]:
        kind = getattr(self._condor.AdType, ad_type)
        found: list[Mapping[str, Any]] = self._condor.Collector().query(kind, constraint, attributes)
        return found

    def publish(self, ads: Sequence[Mapping[str, Any]]) -> None:
        """Publish notices and order sheets, each in place of an older one. :raises CollectorError: it took none."""
        sheets = [ad for ad in ads if ad["MyType"] == ORDERS_AD]
        notices = [ad for ad in ads if ad["MyType"] != ORDERS_AD]
        try:
            made = [self._classad.ClassAd(dict(ad)) for ad in (*notices, *self._buckets.put(sheets))]
            self._condor.Collector().advertise(made, LETTERS.update)
        except self._errors as problem:
            raise CollectorError(f"the collector took no ad: {problem}") from None
