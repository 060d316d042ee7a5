"""Lists of the web page: reasons, order and search by addresses that can be kept, and the same rows for programs."""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from stageout.core.states import State
from stageout.wire.custody import ServerReport
from stageout_web.html import Markup
from stageout_web.state import PageState
from stageout_web.views import destinations, history, jobs, nodes, owners, policy, routers
from stageout_web.views.listing import Column, Listing
from stageout_web.views.page import PageContext
from stageout_web.views.why import Why
from tests.unit.web_site import NOW, SECRET_WORDS, Site, ad_of, file_record, policy_ad, router_ad, sandbox

CONTEXT = PageContext("/base")
_NUMBERS = [3, 10, None, 7]
VIEWS: dict[str, Callable[[PageContext, PageState, Mapping[str, str]], Markup]] = {
    "jobs": jobs.jobs, "destinations": destinations.destinations, "owners": owners.owners, "nodes": nodes.nodes,
    "routers": routers.routers, "policy": policy.policy,
    "history": lambda context, state, query: history.history(context, state.records, query),
}  # fmt: skip


def listing(rows: int = 100, **query: str) -> Listing[Any]:
    """Return a list of numbers."""
    columns = [Column[Any]("text", "Text", str), Column[Any]("number", "Number", lambda one: one, is_number=True)]
    return Listing("view", "row", columns, _NUMBERS, query, lambda one: _NUMBERS.index(one), rows)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({}, [3, 10, None, 7]), ({"sort": "number"}, [3, 7, 10, None]), ({"sort": "-number"}, [10, 7, 3, None]),
        ({"sort": "text"}, [10, 3, 7, None]), ({"sort": "nothing"}, [3, 10, None, 7]),
        ({"sort": "-"}, [3, 10, None, 7]),
        ({"sort": "number", "page": "2"}, [10, None]), ({"page": "2"}, [None, 7]), ({"page": "99"}, [None, 7]),
        ({"page": "x"}, [3, 10]), ({"page": "-1"}, [3, 10]),
    ],
)  # fmt: skip
def test_the_address_orders_and_pages_a_list(query: dict[str, str], found: list[int | None]) -> None:
    made = listing(2 if "page" in query else 100, **query)
    assert made.rows() == found
    assert [row["number"] for row in made.data()["rows"]] == found  # type: ignore[attr-defined]


def test_links_of_a_list_keep_the_search_and_turn_the_order() -> None:
    text = listing(2, q="a&b", sort="number").table(CONTEXT)
    links = [html.unescape(link) for link in re.findall(r'href="([^"]*)"', text)]
    assert links == ["/base/view?q=a%26b&sort=text", "/base/view?q=a%26b&sort=-number",
                     "/base/view?q=a%26b&sort=number&page=2"]  # fmt: skip
    assert 'aria-sort="ascending"' in text
    assert 'aria-sort="descending"' in listing(sort="-number").table(CONTEXT)
    many = {f"p{number}": "x" * 5000 for number in range(100)}
    assert len(listing(**many).table(CONTEXT)) < 20_000, "an address does not grow a page"


@pytest.fixture
def site(tmp_path: Path) -> Any:
    """A pool with output in all conditions."""
    away = ServerReport("gone.example.org", "open", SECRET_WORDS, 3, NOW - 600, NOW + 30)
    boxes = (
        sandbox(1, "Failed", code=72), sandbox(2, "RetryWait", code=51, next_attempt_at=NOW + 90, server="b.org"),
        sandbox(3, "Moving"), sandbox(4), sandbox(5, paused=1), sandbox(6, server="gone.example.org"),
        sandbox(7, "Lost"), sandbox(8, "Accepted", owner="bob@example.org"),
    )  # fmt: skip
    made = Site(tmp_path, ad_of(1, *boxes, servers=(away,)), ad_of(2, sandbox(9, bytes_left=5)))
    made.collector.services += [router_ad("gw1.example.org:9620"), policy_ad()]
    made.history.append([file_record(1), file_record(2, StageOutState="Failed", StageOutErrorCode=72)])
    asyncio.run(made.tick())
    yield made
    made.ring.close()


def test_every_output_that_waits_or_failed_has_a_reason(site: Site) -> None:
    why = Why(site.state.pool)
    found = {box.job_id: why.of(node, box) for node, box in site.state.pool.sandboxes()}
    assert found["1.0"] == "Your quota at the destination is used up."
    assert found["2.0"].startswith("The server ")
    assert found["3.0"] == "", "it is being sent"
    assert found["4.0"] == "Waits for a free data slot."
    assert found["5.0"] == "Paused on request."
    assert found["6.0"] == "The node cannot reach the destination."
    assert "lost" in found["7.0"]
    assert found["8.0"] == "Waits for the access point's confirmation."
    for _ in range(9):
        site.collector.put(ad_of(2, sandbox(9), number=2, heard_at=NOW + int(site.clock.now_s)))
        asyncio.run(site.tick(100))
    assert why.of(*next(site.state.pool.sandboxes())) and Why(site.state.pool).of(*next(site.state.pool.sandboxes()))
    silent = {box.job_id: Why(site.state.pool).of(node, box) for node, box in site.state.pool.sandboxes()}
    assert silent["4.0"] == "The node sends no reports."
    assert silent["1.0"] == found["1.0"]


@pytest.mark.parametrize("state", State)
def test_every_state_is_explained(tmp_path: Path, state: State) -> None:
    site = Site(tmp_path, ad_of(1, sandbox(1, state.value, code=72)))
    asyncio.run(site.tick())
    site.ring.close()
    ((node, box),) = site.state.pool.sandboxes()
    is_done = box.group in ("delivered", "gone", "moving")
    assert bool(Why(site.state.pool).of(node, box)) is not is_done or state in (State.OFFERED, State.HANDED_OVER)


@pytest.mark.parametrize("view", VIEWS)
def test_every_list_has_a_reason_and_sorts_by_each_column(site: Site, view: str) -> None:
    content = VIEWS[view](CONTEXT, site.state, {"by": "destination"})
    assert re.search(r">(Reason|Most frequent reason|Failures)</a></th>", content)
    assert SECRET_WORDS not in content
    sorts = re.findall(r'<th scope="col"[^>]*><a href="[^"]*[?;]([\w-]*sort)=(-?\w+)"', content)
    assert len(sorts) > 5
    for name, column in sorts:
        for order in (column.lstrip("-"), f"-{column.lstrip('-')}"):
            again = VIEWS[view](CONTEXT, site.state, {"by": "destination", name: order})
            assert f'aria-sort="{"descending" if order[0] == "-" else "ascending"}"' in again, order


def test_a_search_is_kept_in_the_order_and_the_order_in_the_search(site: Site) -> None:
    content = jobs.jobs(CONTEXT, site.state, {"q": "alice", "group": "waiting", "sort": "-left"})
    assert '<input type="hidden" name="sort" value="-left">' in content
    for link in re.findall(r'href="(/base/jobs[^"]*sort=[^"]*)"', content):
        assert "q=alice" in link and "group=waiting" in link
    found = jobs.listing(CONTEXT, site.state, {"node": "manager@ep2.example.org"})
    assert [box.job_id for _, box in found.rows()] == ["9.0"]
    assert [box.job_id for _, box in jobs.listing(CONTEXT, site.state, {"owner": "bob@example.org"}).rows()] == ["8.0"]
    numbers = [box.job_id for _, box in jobs.listing(CONTEXT, site.state, {"sort": "-job"}).rows()]
    assert numbers == [f"{number}.0" for number in range(9, 0, -1)]


def test_a_destination_has_its_successes_and_its_failures_by_day(site: Site) -> None:
    found = destinations.destination(CONTEXT, site.state, "store.example.org", "hour")
    assert found is not None
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", found))
    assert "Files of this access point by day" in text
    assert re.search(r"2027-01-15 1 1\.0 kB 1 QUOTA_EXCEEDED 1", text), text
    today = destinations.listing(CONTEXT, site.state, {"q": "store"}).data()["rows"]
    assert [(row["delivered_today"], row["failed_today"]) for row in today] == [(1, 1)]  # type: ignore[attr-defined]
