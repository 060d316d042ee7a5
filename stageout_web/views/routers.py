"""Routers: all routers with their links, and the page of one with its routes and its custody."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stageout.wire.matters import SERVICE_SILENT_S
from stageout.wire.services import CustodyReport, LinkReport, RouterReport, Service
from stageout_web.format import count, duration, rate, size
from stageout_web.html import Markup, join, moment, table, tag, with_code
from stageout_web.model import Pool, site_of
from stageout_web.state import PageState
from stageout_web.views.listing import Column, Listing
from stageout_web.views.page import PageContext

_SHOWN = 3
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
Pair = tuple[str, LinkReport]


def condition(pool: Pool, router: Router) -> str:
    """Return the condition of a router: a key of :data:`CONDITIONS`."""
    if pool.silent_s(router.heard_at) > SERVICE_SILENT_S:
        return "silent"
    if any(one.problems for one in router.report.custody):
        return "problem"
    if any(one.damaged for one in router.report.custody):
        return "damaged"
    return "good" if all(link.is_up for link in router.report.links) else "away"


def listing(context: PageContext, state: PageState, query: Mapping[str, str]) -> Listing[Router]:
    """Return the list of routers, those in trouble first."""
    pool, order = state.pool, list(CONDITIONS)

    def custody(one: Router, name: str) -> int:
        return sum(getattr(spool, name) for spool in one.report.custody)

    columns: list[Column[Router]] = [
        Column("router", "Router", lambda one: one.name,
               lambda one: tag("a", one.name, href=context.link("router", name=one.name))),
        Column("condition", "Condition", lambda one: condition(pool, one),
               lambda one: _condition_mark(condition(pool, one)), order=lambda one: order.index(condition(pool, one))),
        Column("reason", "Reason", lambda one: _reason(pool, one)),
        Column("links", "", lambda one: len(one.report.links)),
        Column("links_up", "Links", lambda one: sum(bool(link.is_up) for link in one.report.links),
               lambda one: _links_up(one.report), is_number=True),
        Column("routes", "Routes", lambda one: sum(bool(route.hops) for route in one.report.routes), is_number=True),
        Column("files", "", lambda one: custody(one, "files")),
        Column("bytes", "In custody", lambda one: custody(one, "size_bytes"),
               lambda one: _files(custody(one, "files"), custody(one, "size_bytes")), is_number=True),
        Column("single_bytes", "Only copy here", lambda one: custody(one, "single_bytes"),
               lambda one: _files(custody(one, "single"), custody(one, "single_bytes")), is_number=True),
        Column("oldest_s", "Oldest", _oldest_s, lambda one: _oldest(_oldest_s(one)), is_number=True),
        Column("age_s", "Report", lambda one: pool.now_at - one.heard_at,
               lambda one: f"{duration(pool.now_at - one.heard_at)} ago"),
    ]  # fmt: skip
    return Listing("routers", "router", columns, pool.routers.values(), query,
                   lambda one: (order.index(condition(pool, one)), one.name))  # fmt: skip


def _oldest_s(router: Router) -> int:
    return max((one.oldest_s for one in router.report.custody), default=0)


def _reason(pool: Pool, router: Router) -> str:
    """Return why a router is in its condition, without its own words."""
    report, found = router.report, condition(pool, router)
    if found == "silent":
        return f"No report for {duration(pool.silent_s(router.heard_at))}."
    if found == "problem":
        hosts = dict.fromkeys(site_of(problem.to) for one in report.custody for problem in one.problems)
        return f"Deliveries fail to {', '.join(list(hosts)[:_SHOWN])}{' and others' if len(hosts) > _SHOWN else ''}."
    if found == "damaged":
        return f"{count(sum(one.damaged for one in report.custody), 'file')} wait for the data from another router."
    away = [link.to for link in report.links if not link.is_up]
    return f"Not connected: {', '.join(away[:_SHOWN])}{' and others' if len(away) > _SHOWN else ''}." if away else ""


def routers(context: PageContext, state: PageState, query: Mapping[str, str]) -> Markup:
    """Return the list of all routers, and the list of all links."""
    pool = state.pool
    if not pool.routers:
        nothing = join(tag("p", "No router in this pool."), tag("p", with_code(_NONE), class_="action"))
        return tag("div", nothing, data_live="routers", id="routers")
    found = _links(context, pool, query, "links-")
    shown = found.table(context) if len(found) else None
    return tag("div", listing(context, state, query).table(context), shown, data_live="routers", id="routers")


def _condition_mark(found: str) -> Markup:
    words, group = CONDITIONS[found]
    return tag("span", words, class_=f"state {group}")


def _links_up(report: RouterReport) -> str:
    return f"{sum(bool(link.is_up) for link in report.links)} of {len(report.links)}" if report.links else ""


def _files(number: int, size_bytes: int) -> str:
    return f"{count(number, 'file')}, {size(size_bytes)}" if number else ""


def _oldest(age_s: int) -> str:
    return duration(age_s) if age_s else ""


def links_listing(context: PageContext, state: PageState, query: Mapping[str, str]) -> Listing[Pair]:
    """Return the list of links for programs."""
    return _links(context, state.pool, query)


def _links(context: PageContext, pool: Pool, query: Mapping[str, str], prefix: str = "") -> Listing[Pair]:
    """Return the list of links, those that are not connected first, then the slowest."""
    found = [(one.name, link) for one in list(pool.routers.values()) for link in one.report.links]
    columns: list[Column[Pair]] = [
        Column("from", "From", lambda pair: pair[0], lambda pair: _router(context, pool, pair[0])),
        Column("to", "To", lambda pair: pair[1].to, lambda pair: _router(context, pool, pair[1].to)),
        Column("is_up", "State", lambda pair: bool(pair[1].is_up), lambda pair: _link_state(pair[1])),
        Column("rate", "Rate", lambda pair: pair[1].rate_bytes_per_s, lambda pair: _link_rate(pair[1]), is_number=True),
        Column("round_trip_us", "Round trip", lambda pair: pair[1].round_trip_us,
               lambda pair: _round_trip(pair[1]), is_number=True),
        Column("source", "Measured by", lambda pair: _SOURCES.get(pair[1].source, "")),
    ]  # fmt: skip
    return Listing("routers", "link", columns, found, query, prefix=prefix,
                   order=lambda pair: (pair[1].is_up > 0, pair[1].rate_bytes_per_s, pair[0], pair[1].to))  # fmt: skip


def _link(context: PageContext, pool: Pool, link: LinkReport) -> Iterator[Any]:
    yield _router(context, pool, link.to)
    yield _link_state(link)
    yield _link_rate(link)
    yield _round_trip(link)
    yield _SOURCES.get(link.source, "")


def _link_state(link: LinkReport) -> Markup:
    return tag("span", "connected" if link.is_up else "not connected", class_=f"state {_group(link)}")


def _link_rate(link: LinkReport) -> str:
    return rate(link.rate_bytes_per_s) if link.rate_bytes_per_s else ""


def _round_trip(link: LinkReport) -> str:
    return f"{link.round_trip_us / 1000:,.1f} ms" if link.round_trip_us else ""


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
