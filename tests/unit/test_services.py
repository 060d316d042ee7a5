"""Ads of routers and of policy services: what their daemons write, and hostile ones that readers get."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from overlay_router import report
from overlay_router.routing.chooser import Chooser
from overlay_router.routing.directory import Directory
from overlay_router.routing.routes import Graph, Link
from policy_service import advert
from policy_service.model import Lease
from policy_service.views import LeaseSnapshot
from stageout.condor.bindings import CondorError
from stageout.condor.collector_child import CollectorChild
from stageout.wire.custody import AD_LIFETIME_S, LETTERS, BadPayload
from stageout.wire.services import (
    PAYLOAD_CHARS,
    ROUTER_AD,
    ROWS,
    TEXT_CHARS,
    CustodyReport,
    DeliveryProblem,
    LinkReport,
    PolicyReport,
    RouteReport,
    RouterReport,
    read_service,
    service_ad,
)
from stageout.wire.typed import MOST_NUMBER
from tests.polling import until

_LINK = LinkReport("gw2.example.org:9620", 1, 1000, 20, "probe")


def lease(number: int, streams: int, **more: Any) -> Lease:
    """A lease of an owner's client between two sites."""
    facts: dict[str, Any] = {"owner": "cms", "client": f"ep{number}", "source": "here", "destination": "there",
                             "in_use": 1 if streams else 0, "wanted": 9, "turn": 1, "deadline_s": 60.0}  # fmt: skip
    return Lease(id=str(number), streams=streams, **{**facts, **more})


def snapshot(*leases: Lease, **more: Any) -> LeaseSnapshot:
    """The leases of a service, which end in 30 s."""
    facts: dict[str, Any] = {"max_pair": 64, "policy": "greedy", "problems": (), "policy_ok": True,
                             "reconfig_ok": True, "expired": 0, **more}  # fmt: skip
    return LeaseSnapshot(tuple((one, 30.0) for one in leases), **facts)


def ad_with(payload: object) -> dict[str, Any]:
    """An ad with this payload."""
    return {"StageOutPayload": payload if isinstance(payload, str) else json.dumps(payload)}


# ---- both ------------------------------------------------------------------------------------------------------------


def test_a_report_comes_back_as_it_was() -> None:
    problem = DeliveryProblem("a.example.org:1", "connection refused")
    custody = CustodyReport("egress", 3, 7, 1, 2, 0, 60, (problem,))
    said = RouterReport(5, (_LINK,), (RouteReport("t:1", ("r:1", "t:1"), 9, "first found"),), (custody,), 4)
    ad = service_ad(ROUTER_AD, "gw1:1", said)
    assert read_service(RouterReport, ad) == said
    assert ad["StageOutPayload"].isascii()
    assert (ad["MyType"], ad["Name"], ad["ClassAdLifetime"]) == ("StageOutRouter", "gw1:1", AD_LIFETIME_S)


def test_writers_bound_lists_texts_and_numbers() -> None:
    rude = LinkReport("a\n\x1b[31m\u202eb\ud800c" + "\u00fc" * 9999, 1, 2**80, -5, "probe")
    ad = service_ad(ROUTER_AD, "gw1:1", RouterReport(5, (rude,) * (ROWS + 1)))
    found = read_service(RouterReport, ad)
    assert len(found.links) == ROWS
    assert found.links[0].to.startswith("a [31m b c\u00fc")
    assert len(found.links[0].to) == TEXT_CHARS
    assert (found.links[0].rate_bytes_per_s, found.links[0].round_trip_us) == (MOST_NUMBER, 0)


def test_readers_bound_what_others_wrote() -> None:
    links = [{"to": "x\u0000" * 300, "round_trip_us": -1}] * (2 * ROWS)
    found = read_service(RouterReport, ad_with({"sent_at": 1 << 60, "links": links, "unknown": {}}))
    assert len(found.links) == ROWS
    assert found.links[0].to == ("x " * 300)[:TEXT_CHARS].strip()
    assert found.links[0].round_trip_us == 0


@pytest.mark.parametrize(
    "payload",
    [
        None, "", "x", "[]", "null", "5", "{}", "[" * 50_000, '{"a":' * 50_000, '{"sent_at": NaN}',
        '{"sent_at": 1e400}', '{"sent_at": ' + "9" * 5000 + "}",
        {"sent_at": 1, "links": [{"to": "x", "rate_bytes_per_s": 2**63}]},
        {"sent_at": 1, "links": {}}, {"sent_at": 1, "links": [[]]}, {"sent_at": 1, "links": [{"to": 5}]},
        {"sent_at": 1, "routes": [{"terminal": "x", "hops": "abc"}]}, {"sent_at": True}, {"sent_at": "1"},
        json.dumps({"sent_at": 1, "x": "y" * PAYLOAD_CHARS}), '{"sent_at": 1, "links": [{"to": "\\ud800"}, 7]}',
        '{"x": ' + "[" * 900 + '"\\ud800"' + "]" * 900 + "}",
    ],
    ids=lambda payload: str(payload)[:40],
)  # fmt: skip
def test_a_payload_that_is_none_is_refused(payload: object) -> None:
    ad: Mapping[str, Any] = {} if payload is None else ad_with(payload)
    with pytest.raises(BadPayload):
        read_service(RouterReport, ad)


def test_a_half_of_a_surrogate_pair_is_no_text() -> None:
    found = read_service(RouterReport, ad_with('{"sent_at": 1, "links": [{"to": "a\\ud800"}]}'))
    found.links[0].to.encode("utf-8")


def test_the_largest_report_that_is_written_is_read() -> None:
    """Names are as long as the service takes them, and ASCII."""
    names = dict.fromkeys(("client", "source", "destination"), "x" * 255)
    leases = [lease(number, 1, owner=f"{number:064d}", **names) for number in range(2 * ROWS)]
    ad = advert.make_ad("http://host:1", snapshot(*leases, problems=("\u00fc" * 999,) * 2))
    found = read_service(PolicyReport, ad)
    assert (len(found.grants), len(found.clients)) == (ROWS, ROWS)
    assert (found.owners, found.leases) == (2 * ROWS, 2 * ROWS)


def test_the_largest_report_of_a_router_is_read() -> None:
    """A router has at most 32 links, 256 routes of 8 hops, and 2 spools. Its addresses are ASCII."""
    name, words = f"{'x' * 120}:65535", "\u00fc" * 300
    problems = tuple(DeliveryProblem(name, words) for _ in range(2 * ROWS))
    said = RouterReport(
        5, (LinkReport(name, 1, 10**9, 10**6, "transfer"),) * 32, (RouteReport(name, (name,) * 8, 10**9, words),) * 256,
        (CustodyReport("custody", problems=problems), CustodyReport("egress", problems=problems)),
    )  # fmt: skip
    found = read_service(RouterReport, service_ad(ROUTER_AD, name, said))
    assert (len(found.links), len(found.routes), len(found.custody[1].problems)) == (32, ROWS, ROWS)


# ---- policy services -------------------------------------------------------------------------------------------------


def test_streams_are_summed_by_pair_and_owner() -> None:
    leases = (
        lease(1, 4, rate_mb_s=2.5), lease(2, 2), lease(3, 0), lease(4, 30, owner="atlas"), lease(5, 7, source="far"),
        lease(6, 2, owner="atlas", in_use=5),
    )  # fmt: skip
    found = advert.report_of(snapshot(*leases))
    rows = [(one.source, one.owner, one.streams, one.in_use, one.clients, one.waiting) for one in found.grants]
    assert rows == [("here", "atlas", 35, 6, 2, 0), ("far", "cms", 7, 1, 1, 0), ("here", "cms", 6, 2, 2, 1)]
    assert found.grants[2].rate_bytes_per_s == 2_500_000
    assert [one.client for one in found.clients] == ["ep4", "ep5", "ep6", "ep1", "ep2", "ep3"]
    assert (found.streams, found.leases, found.owners, found.clients[0].ends_in_s) == (48, 6, 3, 30)


def test_texts_of_a_sites_policy_cannot_keep_the_ad_from_the_collector() -> None:
    problem = "STAGEOUT_POLICY = /etc/p.py:\n\udcff\x00 bad" + "x" * 5000
    ad = advert.make_ad("http://host:9620", snapshot(policy="p\ud800\n", problems=(problem, problem)))
    for value in ad.values():
        str(value).encode("utf-8")
        assert "\n" not in str(value)
    assert len(ad["StageOutPolicyProblem"]) == 2 * TEXT_CHARS + 1
    assert ad["StageOutPolicyProblem"].startswith("STAGEOUT_POLICY = /etc/p.py: bad")
    assert ad["StageOutPolicyName"] == "p"


def test_rates_of_greedy_clients_can_still_be_read() -> None:
    leases = [lease(number, 1, rate_mb_s=1e9) for number in range(20_000)]
    ad = advert.make_ad("http://host:9620", snapshot(*leases))
    assert read_service(PolicyReport, ad).grants[0].rate_bytes_per_s == MOST_NUMBER


class FakeCollector(CollectorChild):
    """A collector without a process."""

    def __init__(self, problem: str = "", ads: tuple[Mapping[str, Any], ...] = ()) -> None:
        super().__init__()
        self.problem, self.ads, self.is_closed = problem, ads, False
        self.published: list[tuple[str, Mapping[str, Any]]] = []

    async def query(self, constraint: str, attributes: object, ad_type: str = "Any") -> list[Mapping[str, Any]]:
        return list(self.ads)

    async def publish(self, ad: Mapping[str, Any], command: str = "") -> None:
        self.published.append((command, ad))
        if self.problem:
            raise CondorError(self.problem)

    async def close(self) -> None:
        self.is_closed = True


async def _run_until(work: Any, condition: Any) -> None:
    task = asyncio.ensure_future(work)
    try:
        await until(lambda: condition() or task.done(), "the work")
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def test_a_collector_that_refuses_the_ad_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(advert, "_INTERVAL_S", 0.001)
    collector = FakeCollector("not authorised")
    caplog.set_level("INFO")

    async def ad() -> Mapping[str, Any]:
        if len(collector.published) >= 5:
            collector.problem = ""
        return advert.make_ad("http://host:1", snapshot())

    asyncio.run(_run_until(advert.advertise(collector, ad), lambda: len(collector.published) > 8))
    events = [record.getMessage().split()[0] for record in caplog.records]
    assert [name for name in events if name.startswith("ad-")] == ["ad-publish-failed", "ad-published"]
    assert {command for command, _ in collector.published} == {LETTERS.update}
    assert collector.is_closed


# ---- routers ---------------------------------------------------------------------------------------------------------


def _publishes(collector: FakeCollector, said: RouterReport, looks: int) -> int:
    """Return how often a router with this report publishes in so many looks."""

    async def figures() -> RouterReport:
        return said

    async def look() -> None:
        directory = Directory(collector, "gw1:1", lambda found: None, figures)
        for _ in range(looks):
            await directory._once()

    asyncio.run(look())
    return len(collector.published)


def test_a_router_publishes_figures_at_each_look_and_its_address_seldom() -> None:
    assert _publishes(FakeCollector(), RouterReport(5), 3) == 1
    assert _publishes(FakeCollector(), RouterReport(5, (_LINK,)), 3) == 3
    collector = FakeCollector()
    assert _publishes(collector, RouterReport(5, custody=(CustodyReport("custody"),)), 3) == 3
    command, ad = collector.published[0]
    assert (command, ad["Name"], ad["MyType"], ad["ClassAdLifetime"]) == (LETTERS.update, "gw1:1", ROUTER_AD, 900)


def test_routes_in_use_have_their_rates_and_one_that_is_lost_none() -> None:
    graph: Graph = {"a": {"b": Link(5.0, 0.1), "t": Link(3.0, 0.1)}, "b": {"t": Link(4.0, 0.1)}}
    chooser = Chooser("a")
    assert chooser.reports(graph) == ()
    chooser.routed(graph, "t", 0.0)
    routes = chooser.reports(graph)
    assert [(one.terminal, one.hops, one.rate_bytes_per_s) for one in routes] == [
        ("t", ("b", "t"), 4), ("t", ("t",), 3),
    ]  # fmt: skip
    assert routes[0].reason == "first found"
    chooser.update({}, 1.0)
    assert [(one.terminal, one.hops, one.reason) for one in chooser.reports({})] == [("t", (), "none known")]


def test_sums_of_custody_list_no_files(tmp_path: Path) -> None:
    facts = {
        "time": 5, "problems": {"t:1": "connection refused"}, "oldest": [{"path": "/secret/path"}],
        "summary": {"files": 3, "size_bytes": 7, "single": 1, "single_bytes": 2, "damaged": 0, "oldest_s": 60,
                    "of_a_newer_version": 1},
    }  # fmt: skip
    assert report.custody_reports(tmp_path) == ()
    (tmp_path / report.NAME).write_text(json.dumps(facts))
    (tmp_path / report.EGRESS_NAME).write_text("{")
    (found,) = report.custody_reports(tmp_path)
    problem = DeliveryProblem("t:1", "connection refused")
    assert found == CustodyReport("custody", 3, 7, 1, 2, 0, 60, (problem,))
    ad = service_ad(ROUTER_AD, "gw1:1", replace(RouterReport(5), custody=(found,)))
    assert "secret" not in json.dumps(ad)
