"""Routers: all routers with their links, and the page of one with its routes and its custody."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stageout.wire.matters import SERVICE_SILENT_S
from stageout.wire.services import CustodyReport, LinkReport, RouterReport, Service
from stageout_web.format import count, duration, rate, size
from stageout_web.html import Markup, join, moment, table, tag, with_code
from stageout_web.model import Pool, site_of
from stageout_web.state import PageState
from stageout_web.views.page import PageContext

_ROWS = 200
_NONE = (
    "A router that condor_master starts appears here after a minute: copy `20-stageout-router.conf` to its host, and "
    "check it with `stageout doctor --role router`. Routers without HTCondor (`--alone`) do not appear."
)
#: Condition of a router -> words and group of states, the worst first.
CONDITIONS = {
    "silent": ("no report", "trouble"), "problem": ("delivery fails", "trouble"),
    "damaged": ("files wait for their data", "trouble"), "away": ("neighbour not connected", "waiting"),
    "good": ("in order", "delivered"),
}  # fmt: skip
_SPOOLS = {"custody": "Custody", "egress": "Delivery by plugins"}
_SOURCES = {"probe": "probe", "transfer": "transfers"}

Router = Service[RouterReport]


def condition(pool: Pool, router: Router) -> str:
    """Return the condition of a router: a key of :data:`CONDITIONS`."""
    if pool.silent_s(router.heard_at) > SERVICE_SILENT_S:
        return "silent"
    if any(one.problems for one in router.report.custody):
        return "problem"
    if any(one.damaged for one in router.report.custody):
        return "damaged"
    return "good" if all(link.is_up for link in router.report.links) else "away"


def routers(context: PageContext, state: PageState) -> Markup:
    """Return the table of all routers, those in trouble first, and the table of all links."""
    pool, order = state.pool, list(CONDITIONS)
    pairs = sorted(
        ((condition(pool, one), one) for one in pool.routers.values()),
        key=lambda pair: (order.index(pair[0]), pair[1].name),
    )
    if not pairs:
        nothing = join(tag("p", "No router in this pool."), tag("p", with_code(_NONE), class_="action"))
        return tag("div", nothing, data_live="routers", id="routers")
    header = ("Router", "Condition", "Links", "Routes", "In custody", "Only copy here", "Oldest", "Report")
    rows = [_row(context, pool, *pair) for pair in pairs[:_ROWS]]
    shown = table(count(len(pairs), "router"), header, rows, (2, 3, 4, 5, 6))
    links = [(one.name, link) for _, one in pairs for link in one.report.links]
    return tag(
        "div", shown, _more(len(pairs), "router"), _links(context, pool, links), data_live="routers", id="routers"
    )


def _more(number: int, noun: str) -> Markup | None:
    return tag("p", f"{count(number - _ROWS, f'more {noun}')}.") if number > _ROWS else None


def _row(context: PageContext, pool: Pool, found: str, router: Router) -> Iterator[Any]:
    report = router.report
    yield tag("a", router.name, href=context.link("router", name=router.name))
    yield _condition_mark(found)
    yield _links_up(report)
    yield f"{sum(bool(route.hops) for route in report.routes):,}"
    yield _files(sum(one.files for one in report.custody), sum(one.size_bytes for one in report.custody))
    yield _files(sum(one.single for one in report.custody), sum(one.single_bytes for one in report.custody))
    yield _oldest(max((one.oldest_s for one in report.custody), default=0))
    yield f"{duration(pool.now_at - router.heard_at)} ago"


def _condition_mark(found: str) -> Markup:
    words, group = CONDITIONS[found]
    return tag("span", words, class_=f"state {group}")


def _links_up(report: RouterReport) -> str:
    return f"{sum(bool(link.is_up) for link in report.links)} of {len(report.links)}" if report.links else ""


def _files(number: int, size_bytes: int) -> str:
    return f"{count(number, 'file')}, {size(size_bytes)}" if number else ""


def _oldest(age_s: int) -> str:
    return duration(age_s) if age_s else ""


def _links(context: PageContext, pool: Pool, links: list[tuple[str, LinkReport]]) -> Markup | None:
    """Return the table of links, those that are not connected first, then the slowest."""
    if not links:
        return None
    order = sorted(links, key=lambda pair: (pair[1].is_up > 0, pair[1].rate_bytes_per_s, pair[0], pair[1].to))
    rows = [(_router(context, pool, name), *_link(context, pool, link)) for name, link in order[:_ROWS]]
    header = ("From", "To", "State", "Rate", "Round trip", "Measured by")
    return join(table(count(len(links), "link"), header, rows, (3, 4)), _more(len(links), "link"))


def _link(context: PageContext, pool: Pool, link: LinkReport) -> Iterator[Any]:
    yield _router(context, pool, link.to)
    yield tag("span", "connected" if link.is_up else "not connected", class_=f"state {_group(link)}")
    yield rate(link.rate_bytes_per_s) if link.rate_bytes_per_s else ""
    yield f"{link.round_trip_us / 1000:,.1f} ms" if link.round_trip_us else ""
    yield _SOURCES.get(link.source, "")


def _group(link: LinkReport) -> str:
    return "delivered" if link.is_up else "waiting"


def _router(context: PageContext, pool: Pool, name: str) -> Markup:
    """Return the name of a router, as a link if the router reports."""
    return tag("a", name, href=context.link("router", name=name)) if name in pool.routers else join(name)


# ---- one router ------------------------------------------------------------------------------------------------------


def router(context: PageContext, state: PageState, name: str) -> Markup | None:
    """Return the page of one router; None for one without a report."""
    found = state.pool.routers.get(name)
    if found is None:
        return None
    report = found.report
    values = (
        ("Condition", _condition_mark(condition(state.pool, found))), ("Links", _links_up(report)),
        ("Routers connected to it", f"{report.incoming:,}"), ("Version", found.version),
        ("Report", moment(found.heard_at)),
    )  # fmt: skip
    facts = tag("dl", (tag("div", tag("dt", key), tag("dd", value)) for key, value in values if value))
    links = [_link(context, state.pool, link) for link in sorted(report.links, key=lambda one: (one.is_up, one.to))]
    shown = (
        table(count(len(links), "link"), ("To", "State", "Rate", "Round trip", "Measured by"), links, (2, 3))
        if links else tag("p", with_code("This router connects to no other router (`STAGEOUT_ROUTER_NEIGHBOURS`)."))
    )  # fmt: skip
    parts = (shown, _routes(context, state.pool, report), _custody(report), _problems(context, report))
    return tag("div", facts, parts, data_live="router", id="router")


def _routes(context: PageContext, pool: Pool, report: RouterReport) -> Markup:
    """Return the routes to the terminals that somebody asked for."""
    if not report.routes:
        return tag("p", "No client has asked this router for routes since its start.")
    rows = [
        (_router(context, pool, one.terminal), _way(one.hops), rate(one.rate_bytes_per_s) if one.hops else "",
         one.reason)
        for one in report.routes
    ]  # fmt: skip
    return table("Routes in use", ("To", "Route", "Rate", "Reason"), rows, (2,))


def _way(hops: tuple[str, ...]) -> Markup | str:
    if not hops:
        return tag("span", "no route", class_="state trouble")
    return "direct" if len(hops) == 1 else " > ".join(hops)


def _custody(report: RouterReport) -> Markup:
    if not any(one.files for one in report.custody):
        return tag("p", "No file is in custody here.")
    rows = [_custody_row(one) for one in report.custody]
    header = ("Spool", "Files", "Size", "Only copy here", "Wait for their data", "Oldest")
    return table("Files in custody", header, rows, (1, 2, 3, 4, 5))


def _custody_row(one: CustodyReport) -> Iterator[Any]:
    yield _SPOOLS.get(one.spool, one.spool)
    yield f"{one.files:,}"
    yield size(one.size_bytes)
    yield _files(one.single, one.single_bytes)
    yield f"{one.damaged:,}"
    yield _oldest(one.oldest_s)


def _problems(context: PageContext, report: RouterReport) -> Markup | None:
    """Return the destinations to which deliveries fail. Only readers with a token see the reasons and whole URLs."""
    found = [problem for one in report.custody for problem in one.problems]
    if not found:
        return None
    if context.sees_names:
        return table("Deliveries that fail", ("Destination", "Reason"), [(one.to, one.reason) for one in found])
    hosts = [(host,) for host in dict.fromkeys(site_of(one.to) for one in found)]
    return table("Deliveries that fail", ("Destination",), hosts)
