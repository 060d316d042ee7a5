"""The views Routers and Policy: contents, order, empty pools, secrets, and ads of anybody."""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stageout.wire import services
from stageout.wire.matters import matters
from stageout.wire.services import (
    ROWS,
    ClientReport,
    CustodyReport,
    GrantReport,
    LinkReport,
    RouteReport,
)
from stageout_web.html import Markup
from stageout_web.views import policy, routers
from stageout_web.views.page import PageContext
from tests.unit.web_site import NOW, SCHEDD, SECRET_PATH, SECRET_WORDS, Site, ad_of, agent_ad, policy_ad, router_ad
from tests.unit.web_site import sandbox as box

ROUTER = "gw1.example.org:9620"
EVERYBODY, WITH_TOKEN = PageContext(), PageContext(sees_names=True)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A pool with one node."""
    made = Site(tmp_path, ad_of(1, box(1)))
    yield made
    made.ring.close()


def read(site: Site, *ads: dict[str, Any], after_s: float = 60.0) -> None:
    """Let the page read these ads of services."""
    site.collector.services = list(ads)
    asyncio.run(site.tick(after_s))


def text_of(content: Markup | None) -> str:
    """Text of a page, with one space between its words."""
    assert content is not None
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", content)).split())


def rows_of(content: Markup | None) -> list[str]:
    """First cells of all rows of all tables."""
    return [
        html.unescape(re.sub(r"<[^>]*>", "", cell))
        for cell in re.findall(r'scope="row"[^>]*>(.*?)</th>', content or "")
    ]


def test_one_query_brings_agents_routers_and_policies(site: Site) -> None:
    read(site, router_ad(ROUTER), policy_ad(), after_s=0)
    letters = [one for one in site.collector.asked if "StageOutAgent" in one]
    assert len(letters) == 1
    assert not [one for one in site.collector.asked if "StageOutRouter" in one and one not in letters]
    assert list(site.state.pool.letters.agents) == [SCHEDD]
    assert list(site.state.pool.routers) == [ROUTER]
    for _ in range(5):
        asyncio.run(site.tick(5))
    assert len([one for one in site.collector.asked if "StageOutRouter" in one]) == 1, "every 30 s at most"


def test_a_pool_without_services_says_what_to_do(site: Site) -> None:
    read(site)
    for content, word in ((routers.routers(EVERYBODY, site.state, {}), "router"),
                          (policy.policy(EVERYBODY, site.state, {}), "policy service")):  # fmt: skip
        assert f"No {word} in this pool." in text_of(content)
        assert "<code>20-stageout-" in content
        assert "<table" not in content


def test_routers_links_and_custody_are_shown(site: Site) -> None:
    read(site, router_ad(ROUTER))
    text = text_of(routers.routers(EVERYBODY, site.state, {}))
    assert f"{ROUTER} delivery fails Deliveries fail to dav.example.org. 1 of 2 1 12 files, 48.0 GB 3 files" in text
    assert "3 files, 9.0 GB 1 h 30 min" in text
    assert f"{ROUTER} gw2.example.org:9620 connected 110 MB/s 12.4 ms probe" in text
    assert f"{ROUTER} gw3.example.org:9620 not connected" in text


def test_the_page_of_a_router_has_its_routes_and_its_spools(site: Site) -> None:
    read(site, router_ad(ROUTER))
    text = text_of(routers.router(EVERYBODY, site.state, ROUTER))
    assert "gw2.example.org:9620 > archive.example.org:9620 90.0 MB/s first found" in text
    assert "lost.example.org:9620 no route" in text
    assert "Custody 12 48.0 GB 3 files, 9.0 GB 0 1 h 30 min" in text
    assert "Routers connected to it 2" in text
    assert routers.router(EVERYBODY, site.state, "none") is None


def test_a_router_without_links_and_files_says_so(site: Site) -> None:
    read(site, router_ad(ROUTER, links=(), routes=(), custody=()))
    text = text_of(routers.router(EVERYBODY, site.state, ROUTER))
    assert "connects to no other router (STAGEOUT_ROUTER_NEIGHBOURS)" in re.sub(r"\s+(?=\))|(?<=\()\s+", "", text)
    assert "No client has asked this router for routes" in text
    assert "No file is in custody here." in text


@pytest.mark.parametrize(
    ("more", "after_s", "found"),
    [
        ({}, 0, "problem"), ({"custody": ()}, 0, "away"), ({"custody": (), "links": ()}, 0, "good"),
        ({"custody": (CustodyReport("custody", 1, 1, damaged=1),)}, 0, "damaged"), ({}, 900, "silent"),
    ],
)  # fmt: skip
def test_the_condition_of_a_router(site: Site, more: dict[str, Any], after_s: float, found: str) -> None:
    read(site, router_ad(ROUTER, **more), after_s=0)
    read(site, router_ad(ROUTER, **more), after_s=after_s)
    assert routers.condition(site.state.pool, site.state.pool.routers[ROUTER]) == found


def test_a_silent_router_is_seen_in_a_pool_without_reports(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.collector.agents = []
    try:
        for _ in range(2):
            read(site, router_ad(ROUTER, custody=()), after_s=450)
        text = text_of(routers.routers(EVERYBODY, site.state, {}))
        assert "neighbour not connected" in text
        assert "7 min ago" in text
        read(site, router_ad(ROUTER, custody=()), after_s=450)
        assert "no report" in text_of(routers.routers(EVERYBODY, site.state, {}))
    finally:
        site.ring.close()


def test_routers_and_links_in_trouble_come_first(site: Site) -> None:
    slow, fast = (LinkReport(f"{name}:1", 1, rate) for name, rate in (("slow", 10), ("fast", 10**9)))
    read(site, router_ad("a:1", custody=(), links=(fast,)), router_ad("b:1", custody=(), links=(slow,)),
         router_ad("c:1", links=(LinkReport("away:1"),)))  # fmt: skip
    content = routers.routers(EVERYBODY, site.state, {})
    assert rows_of(content) == ["c:1", "a:1", "b:1", "c:1", "b:1", "a:1"]


def test_streams_of_pairs_owners_and_clients_are_shown(site: Site) -> None:
    read(site, policy_ad())
    content = policy.policy(EVERYBODY, site.state, {})
    text = text_of(content)
    assert "store.example.org example.org 40 of 64 36 1 1 400 MB/s The policy grants none." in text
    assert "cms store.example.org example.org 40 36 1 1 400 MB/s" in text
    assert "ep2 cms store.example.org waits 0 0 B/s in 3 min" in text
    assert 'href="/destination?server=store.example.org"' in content, "output is on its way to it"
    assert "The configured policy fails. The greedy policy decides." in text
    assert "Streams granted 48" in text


def test_rows_that_the_ad_lacks_are_counted(site: Site) -> None:
    read(site, policy_ad(leases=950, owners=7))
    text = text_of(policy.policy(EVERYBODY, site.state, {}))
    assert "947 more clients with fewer streams" in text
    assert "5 more rows with fewer streams" in text


def test_a_service_without_leases_says_so(site: Site) -> None:
    read(site, policy_ad(grants=(), clients=(), leases=0, is_policy_ok=1))
    content = policy.policy(EVERYBODY, site.state, {})
    assert "No client has streams, and none waits." in text_of(content)
    assert "problems" not in content


def test_words_and_urls_need_a_token(site: Site) -> None:
    read(site, router_ad(ROUTER), policy_ad())
    for view in (lambda c: routers.router(c, site.state, ROUTER), lambda c: policy.policy(c, site.state, {})):
        hidden, shown = text_of(view(EVERYBODY)), text_of(view(WITH_TOKEN))
        assert SECRET_WORDS not in hidden
        assert SECRET_PATH not in hidden
        assert SECRET_WORDS in shown
    assert "dav.example.org" in text_of(routers.router(EVERYBODY, site.state, ROUTER)), "the host is no secret"
    assert "dav.example.net" in text_of(policy.policy(EVERYBODY, site.state, {}))


def test_services_that_need_a_person_are_matters(site: Site) -> None:
    read(site, router_ad(ROUTER), router_ad("good:1", custody=()), policy_ad(), policy_ad("policy@b:1", is_policy_ok=1))
    found = [matter for matter in matters(site.state.pool.facts()) if matter.view in ("router", "policy")]
    assert [(matter.view, dict(matter.query)) for matter in found] == [("router", {"name": ROUTER}), ("policy", {})]
    assert "12 files" in found[0].title


@pytest.mark.parametrize(
    "name", ["javascript:alert(1)", '"><img src=x onerror=alert(1)>', "a\ud800b\x00", "x" * 5000, ""]
)
def test_odd_names_break_no_page(site: Site, name: str) -> None:
    texts = (name,) * 3
    read(
        site,
        router_ad(name, links=(LinkReport(name, 1, 2**62, 2**62, name),), routes=(RouteReport(name, texts, 5, name),)),
        policy_ad(name, policy=name, grants=(GrantReport(*texts, *[2**62] * 5),) * 2,
                  clients=(ClientReport(name, *texts, *[2**62] * 4),)),
        {"MyType": "StageOutRouter"}, {"MyType": "StageOutPolicy", "Name": 7, "StageOutPayload": 5},
        {**policy_ad("other"), "LastHeardFrom": "never", "StageOutVersion": 5}, router_ad(ROUTER), {},
    )  # fmt: skip
    assert ROUTER in site.state.pool.routers, "a bad ad does not hide the others"
    parts = [routers.routers(WITH_TOKEN, site.state, {}), policy.policy(WITH_TOKEN, site.state, {})]
    parts += [routers.router(WITH_TOKEN, site.state, known) or Markup("") for known in site.state.pool.routers]
    for part in parts:
        part.encode("utf-8")
        assert "<img" not in part
        assert 'href="javascript' not in part
        assert len(part) < 100_000


def test_many_ads_and_long_lists_are_bounded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "SERVICES", 3)
    links = tuple(LinkReport(f"to{number}:1") for number in range(ROWS))
    read(site, *(router_ad(f"gw{number}:1", links=links) for number in range(9)))
    assert len(site.state.pool.routers) == 3
    content = routers.routers(EVERYBODY, site.state, {})
    assert len(rows_of(content)) == 3 + 100
    assert f"{3 * ROWS} links" in text_of(content)
    assert "links-page=2" in content


def test_a_router_that_is_gone_leaves_the_page(site: Site) -> None:
    read(site, router_ad(ROUTER))
    site.collector.agents = [agent_ad(SCHEDD, NOW + 100)]
    read(site)
    assert routers.router(EVERYBODY, site.state, ROUTER) is None
