"""The messages in the collector's tables: order sheets in buckets, and how often the agent scans all ads."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sandbox_manager.report.collector import unpacked
from schedd_agent.collector import CondorCollectorClient, OrderBuckets
from stageout.core.signing import SigningKey
from stageout.wire.custody import (
    AD_LIFETIME_S,
    BUCKET_AD,
    BUCKETS,
    LETTERS,
    ORDERS_AD,
    REPORTS,
    AgentNotice,
    BadPayload,
    OrderSheet,
    bucket_of,
    check_signature,
    notice_ad,
    orders_ad,
    read_orders,
    sheets_for,
)

KEY = SigningKey(b"k" * 32)


def sheet(manager: str, sent_at: int = 1000, agent: str = "ap") -> dict[str, Any]:
    return orders_ad(OrderSheet(agent, manager, sent_at, manager_key="ed25519:x"), KEY)


def neighbours(count: int) -> list[str]:
    """Names of managers that share a bucket."""
    wanted = bucket_of("manager@ep0")
    names = (f"manager@ep{number}" for number in range(100_000))
    return [name for name in names if bucket_of(name) == wanted][:count]


def test_a_manager_finds_its_own_sheet_among_those_of_its_bucket() -> None:
    one, two = neighbours(2)
    (ad,) = OrderBuckets("ap").put([sheet(one), sheet(two)])
    (found,) = unpacked([ad], two)
    assert found["MyType"] == ORDERS_AD and read_orders(found["StageOutPayload"]).manager == two
    check_signature(ORDERS_AD, found, KEY.public)


def test_a_new_sheet_leaves_the_others_of_its_bucket() -> None:
    one, two = neighbours(2)
    buckets = OrderBuckets("ap")
    buckets.put([sheet(one), sheet(two)])
    (ad,) = buckets.put([sheet(one, 1005)])
    sent = [read_orders(found["StageOutPayload"]).sent_at for name in (one, two) for found in sheets_for(name, ad)]
    assert sent == [1005, 1000]


def test_a_sheet_that_was_not_repeated_expires_as_its_own_ad_would() -> None:
    one, two = neighbours(2)
    buckets = OrderBuckets("ap")
    buckets.put([sheet(one), sheet(two)])
    (ad,) = buckets.put([sheet(one, 1001 + AD_LIFETIME_S)])
    assert sheets_for(two, ad) == []


def test_managers_spread_over_all_buckets() -> None:
    counts = [0] * BUCKETS
    for number in range(64 * BUCKETS):
        counts[bucket_of(f"manager@ep{number}.example.org")] += 1
    assert min(counts) > 32 and max(counts) < 128


@pytest.mark.parametrize("payload", ["{", "[[1]]", "17", '{"a": 1}', None, "[" * 5000])
def test_a_bucket_that_cannot_be_read_is_left_for_the_gatekeeper_to_refuse(payload: str | None) -> None:
    ad = {"MyType": BUCKET_AD, "Name": "evil/1", "StageOutPayload": payload}
    try:
        assert sheets_for("manager@x", ad) == []
    except BadPayload:
        assert unpacked([ad], "manager@x") == [ad]


class FakeCollector:
    """Questions that were asked, and ads that were published. :param scan_s: how long a scan of all ads takes."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.published: list[tuple[str, str]] = []
        self.now_s = self.scan_s = 0.0

    def query(self, ad_type: str, constraint: str, projection: list[str]) -> list[dict[str, Any]]:
        self.asked.append(ad_type)
        self.now_s += self.scan_s if ad_type == "Any" else 0.0
        return [{"MonitorSelfAge": 77}] if ad_type == "Collector" else [{"Name": ad_type}]

    def advertise(self, ads: list[dict[str, Any]], command: str) -> None:
        self.published += [(command, ad["MyType"]) for ad in ads]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> FakeCollector:
    """In place of the bindings."""
    made = FakeCollector()
    ad_types = SimpleNamespace(**{name: name for name in ("Any", "Collector", REPORTS.ad_type, LETTERS.ad_type)})
    monkeypatch.setitem(sys.modules, "htcondor2", SimpleNamespace(AdType=ad_types, Collector=lambda: made))
    monkeypatch.setitem(sys.modules, "classad2", SimpleNamespace(ClassAd=dict))
    return made


@pytest.mark.parametrize(("scan_s", "scans"), [(0.01, 100), (0.1, 25), (3.0, 8)])
def test_the_scan_of_all_ads_is_the_rarer_the_longer_it_takes(
    scan_s: float, scans: int, collector: FakeCollector
) -> None:
    collector.scan_s = scan_s
    directory = CondorCollectorClient("ap", lambda: collector.now_s)
    for _ in range(100):
        look = directory.query_reports()
        assert look.collector_age_s == 77
        assert [ad["Name"] for ad in look.ads] == [REPORTS.ad_type, "Any"], "what the last scan found still counts"
        collector.now_s += 5.0
    assert collector.asked.count("Any") == pytest.approx(scans, abs=2)


def test_everything_for_managers_goes_into_their_table(collector: FakeCollector) -> None:
    notice = notice_ad(AgentNotice("ap", "ap", KEY.public, 1, 1000), KEY)
    CondorCollectorClient("ap").publish([notice, sheet("manager@ep1")])
    assert collector.published == [(LETTERS.update, "StageOutAgent"), (LETTERS.update, BUCKET_AD)]
