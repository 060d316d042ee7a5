"""Expected ends on the page: the words of the commands, and the output of a node that ends."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stageout.cli.rows import destinations as places_of
from stageout.cli.rows import rows_of_report, server_totals
from stageout.core.eta import Eta, phrase
from stageout.wire.custody import FlowReport, Report, ServerReport
from stageout.wire.outlook import Outlook, outlook
from stageout_web.views.destinations import destination, destinations
from stageout_web.views.jobs import job
from stageout_web.views.nodes import node
from stageout_web.views.page import PageContext
from tests.unit.web_site import NOW, Site, ad_of, job_name, sandbox

MB = 1_000_000
STORE, OTHER = "https://store.example.org", "https://other.example.org"


def flow(server: str = STORE, files: int = 1, size_bytes: int = 600 * MB, rate: int = MB) -> FlowReport:
    return FlowReport(server, rate, rate, 0.1, 1, 1, "kept", files_waiting=files, bytes_waiting=size_bytes)


def big(number: int, state: str = "Confirmed", **more: Any) -> Any:
    return sandbox(number, state, **{"bytes_total": 600 * MB, "bytes_left": 600 * MB, **more})


def show(folder: Path, make: Callable[[Site], object], *ads: dict[str, Any]) -> str:
    """Return a view of the pool as text."""
    site = Site(folder, *ads)
    try:
        asyncio.run(site.tick())
        return re.sub(r"<[^>]+>", " ", str(make(site)))
    finally:
        site.ring.close()


def fact(text: str, name: str) -> str | None:
    """Return a fact of a page, None without it."""
    found = re.search(rf" {name}  +(\S.*?)  ", text)
    return found[1] if found else None


def job_view(number: int) -> Callable[[Site], object]:
    return lambda site: job(PageContext(), site.state, job_name(number), None, "")


def node_view(site: Site) -> object:
    return node(PageContext(), site.state, "manager@ep1.example.org", {})


def reports(site: Site) -> list[Report]:
    return [one.report() for one in site.state.pool.nodes.values()]


def test_the_page_of_a_job_has_the_words_of_the_command(tmp_path: Path) -> None:
    said: list[str] = []

    def both(site: Site) -> object:
        [report] = reports(site)
        [row, _] = rows_of_report(report, site.state.pool.now_at)
        said.append(phrase(row.eta_low_s, row.eta_high_s))
        return job_view(1)(site)

    text = show(tmp_path, both, ad_of(1, big(1), big(2, owner="bob"), more={"flows": (flow(files=2),)}))
    assert fact(text, "Expected") == said[0]
    assert re.fullmatch(r"in \d+-\d+ min", said[0])


@pytest.mark.parametrize("state", ["Failed", "HandedOver", "Cancelled", "Delivered"])
def test_output_that_the_node_does_not_send_is_not_expected(tmp_path: Path, state: str) -> None:
    assert fact(show(tmp_path, job_view(1), ad_of(1, big(1, state), more={"flows": (flow(),)})), "Expected") is None


def test_without_a_rate_the_end_is_unknown(tmp_path: Path) -> None:
    ad = ad_of(1, big(1), more={"flows": (flow(rate=0),)})
    for number, view in enumerate((job_view(1), node_view, lambda site: destination(
        PageContext(), site.state, "store.example.org", "hour"
    ))):  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        assert fact(show(folder, view, ad), "Expected") == "unknown"


def test_a_destination_has_the_sum_of_the_command_over_all_nodes(tmp_path: Path) -> None:
    slow, fast = flow(rate=MB // 4), flow(rate=9 * MB)
    said: dict[str, str] = {}

    def views(site: Site) -> object:
        for total in server_totals(places_of(reports(site), site.state.pool.now_at)):
            said[total.server] = phrase(total.eta_low_s, total.eta_high_s)
        one = destination(PageContext(), site.state, "store.example.org", "hour")
        return f"{one} |list| {destinations(PageContext(), site.state, {})}"

    away = ServerReport(OTHER, "open", "refused", 3, NOW - 600, NOW + 30)
    text = show(
        tmp_path, views, ad_of(1, big(1), more={"flows": (slow,)}),
        ad_of(2, big(2), big(3, server="other.example.org"), servers=(away,), more={"flows": (fast, flow(OTHER))}),
    )  # fmt: skip
    page, _, listed = text.partition("|list|")
    assert fact(page, "Expected") == said[STORE]
    assert re.fullmatch(r"in \d+-\d+ min", said[STORE])
    assert said[OTHER].startswith("in more than")
    assert said[STORE] in listed
    assert said[OTHER] in listed


# ---- nodes that end --------------------------------------------------------------------------------------------------


def test_the_page_of_a_node_has_the_end_of_all_and_of_each_output(tmp_path: Path) -> None:
    ad = ad_of(1, big(1), big(2, "Failed", code=72), more={"flows": (flow(),)})
    text = show(tmp_path, node_view, ad)
    assert fact(text, "Expected") == "in 8-13 min"
    assert text.count("in 8-13 min") == 2
    assert fact(text, "Ends") is None
    assert fact(text, "Output away by then") is None


@pytest.mark.parametrize(
    ("ends_in_s", "boxes", "rate", "answer"),
    [
        (3600, [big(1)], MB, "yes"),
        (60, [big(1)], MB, "probably not, 600 MB at risk"),
        (3600, [big(1)], 0, "unknown, 600 MB at risk"),
        (3600, [big(1), big(2, "Failed", code=72)], MB, "probably not, 600 MB at risk"),
        (3600, [sandbox(1, "Delivered", files_left=0, bytes_left=0)], MB, "yes"),
    ],
)
def test_a_node_that_ends_says_whether_its_output_is_away_by_then(
    tmp_path: Path, ends_in_s: int, boxes: list[Any], rate: int, answer: str
) -> None:
    ad = ad_of(1, *boxes, more={"flows": (flow(rate=rate),), "ends_in_s": ends_in_s})
    text = show(tmp_path, node_view, ad)
    assert fact(text, "Output away by then") == answer
    assert fact(text, "Ends") == ("in 1 h 0 min" if ends_in_s == 3600 else "in 1 min")


@pytest.mark.parametrize(
    ("state", "eta", "found"),
    [
        ("Moving", Eta(10, 99), Outlook(0, 0, 0, 0)), ("Moving", Eta(10, 101), Outlook(1, 5, 0, 0)),
        ("Moving", Eta(101, None), Outlook(1, 5, 0, 0)), ("Moving", Eta(10, None), Outlook(0, 0, 1, 5)),
        ("Accepted", None, Outlook(0, 0, 1, 5)), ("Failed", None, Outlook(1, 5, 0, 0)),
        ("Cancelled", None, Outlook(0, 0, 0, 0)), ("Lost", None, Outlook(0, 0, 0, 0)),
    ],
)  # fmt: skip
def test_output_that_is_left_at_the_end(state: str, eta: Eta | None, found: Outlook) -> None:
    box = sandbox(1, state, bytes_left=5)
    report = Report("m", "", 1, NOW, {}, 5, (box,))
    assert outlook(report, {box.run: eta} if eta else {}, 100) == found
