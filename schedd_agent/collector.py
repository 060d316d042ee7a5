"""Messages between agent and managers through the collector. All calls block; use one thread at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from stageout.condor.ads import SkippedAttributes, decoded
from stageout.condor.bindings import CondorError
from stageout.condor.collector import Collector
from stageout.wire.custody import (
    AD_LIFETIME_S,
    LETTERS,
    MANAGER_AD,
    ORDERS_AD,
    REPORTS,
    bucket_ad,
    bucket_of,
)
from stageout.wire.services import LETTER_ATTRIBUTES, LETTERS_WANTED

PROJECTION = [
    "MyType", "Name", "StageOutManager", "StageOutPayload", "StageOutSignature",
    "StageOutSentAt", "MyCurrentTime", "LastHeardFrom",
]  # fmt: skip
#: A slot's ad carries the report of a manager whose token does not allow an ad of its own. The table of the masters has
#: the last report of a pilot.
ELSEWHERE = (
    f'(StageOutPayload ?: "") != "" && (MyType == "Machine" || MyType == "{MANAGER_AD}" && MyAddress is undefined)'
)
REPORTS_WANTED = "StageOutPayload isnt undefined"
#: Largest share of the time that scans of all ads may take. In a small pool each query includes a scan.
_SCAN_SHARE = 0.005
_SCAN_INTERVAL_MAX_S = 60.0
_LETTERS_INTERVAL_S = 30.0


class CollectorSnapshot(NamedTuple):
    """The answer of the own pool's collector.

    :param ads: reports of managers, from all tables. :param collector_age_s: seconds since the collector's start;
        None where it has no ad.
    :param others: newest snapshots of other pools, by the pool's name.
    :param letters: ads of :data:`LETTERS_WANTED`; None between two queries for them.
    """

    ads: Sequence[Mapping[str, Any]]
    collector_age_s: float | None
    others: Mapping[str, OtherPoolSnapshot] = MappingProxyType({})
    letters: Sequence[Mapping[str, Any]] | None = None


class OtherPoolSnapshot(NamedTuple):
    """The newest answer of another pool's collector.

    :param at_s: time of the answer, by the monotonic clock. :param is_answering: the latest query was answered.
    """

    ads: Sequence[Mapping[str, Any]] = ()
    collector_age_s: float | None = 0.0
    at_s: float = float("-inf")
    is_answering: bool = False


class CollectorClient(Protocol):
    """The agent's interface to a collector. All calls block and raise CondorError."""

    def query_reports(self) -> CollectorSnapshot:
        """Return all reports of managers. :raises CondorError: the collector does not answer."""

    def publish(self, ads: Sequence[Mapping[str, Any]]) -> None:
        """Publish notices and order sheets in place of older ones. :raises CondorError: the collector took none."""


class OrderBuckets:
    """The order sheets of one agent, many in one ad."""

    def __init__(self, agent: str) -> None:
        self._agent = agent
        self._sheets: dict[int, dict[str, Mapping[str, Any]]] = {}

    def put(self, sheets: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Replace these sheets and return the ads of their buckets. Sheets that are not repeated expire."""
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


def collector_age_s_of(ads: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the seconds since the start of the collector that sent these ads about itself.

    :returns: 0 where it does not say; None without an ad. The ad may expire before the collector renews it.
    """
    ages = [ad.get("MonitorSelfAge") for ad in ads]
    known = [float(age) for age in ages if isinstance(age, (int, float))]
    return min(known) if known else 0.0 if ages else None


def scan_pause_s(took_s: float) -> float:
    """Return the seconds to the next scan of all ads. :param took_s: seconds that the last scan took."""
    return min(took_s / _SCAN_SHARE, _SCAN_INTERVAL_MAX_S)


class CondorCollectorClient:
    """Client of the pool's collector. :param agent: name of the agent. :param clock_s: a monotonic clock."""

    def __init__(self, agent: str, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._collector = Collector()
        self._buckets = OrderBuckets(agent)
        self._clock_s = clock_s
        self._skipped = SkippedAttributes()
        self._elsewhere: list[Mapping[str, Any]] = []
        self._scan_at_s = self._letters_at_s = float("-inf")

    def query_reports(self) -> CollectorSnapshot:
        """Return all reports of managers. :raises CondorError: the collector does not answer."""
        try:
            reports = self._query(REPORTS.ad_type, REPORTS_WANTED, PROJECTION)
            ages = self._query("Collector", "true", ["MonitorSelfAge"])
            self._scan()
        except CondorError as problem:
            raise CondorError(f"the collector does not answer: {problem}") from None
        return CollectorSnapshot([*reports, *self._elsewhere], collector_age_s_of(ages), letters=self._query_letters())

    def _query_letters(self) -> list[Mapping[str, Any]] | None:
        """Return the ads of agents, routers and policy services; None if it is too early or they do not come."""
        if self._clock_s() < self._letters_at_s:
            return None
        self._letters_at_s = self._clock_s() + _LETTERS_INTERVAL_S
        try:
            return self._query(LETTERS.ad_type, LETTERS_WANTED, list(LETTER_ATTRIBUTES))
        except CondorError:
            return None  # only metrics need them

    def _scan(self) -> None:
        """Search all ads of the pool for reports, when a scan is due."""
        start_s = self._clock_s()
        if start_s < self._scan_at_s:
            return
        self._elsewhere = self._query("Any", ELSEWHERE, PROJECTION)
        end_s = self._clock_s()
        self._scan_at_s = end_s + scan_pause_s(end_s - start_s)

    def _query(self, ad_type: str, constraint: str, attributes: list[str]) -> list[Mapping[str, Any]]:
        found = self._collector.query(ad_type, constraint, attributes)
        return [decoded(ad, attributes, self._skipped.add) for ad in found]

    def publish(self, ads: Sequence[Mapping[str, Any]]) -> None:
        """Publish notices and order sheets in place of older ones. :raises CondorError: the collector took none."""
        sheets = [ad for ad in ads if ad["MyType"] == ORDERS_AD]
        notices = [ad for ad in ads if ad["MyType"] != ORDERS_AD]
        try:
            self._collector.advertise([*notices, *self._buckets.put(sheets)], LETTERS.update)
        except CondorError as problem:
            raise CondorError(f"the collector took no ad: {problem}") from None
