"""Destinations: all servers, and the page of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from stageout.core.eta import Eta, limits_s
from stageout.wire.control import Tuning
from stageout.wire.custody import ServerReport
from stageout.wire.matters import Kind
from stageout_web.format import count, duration, expected, rate, size
from stageout_web.html import Markup, join, moment, table, tag
from stageout_web.model import Node, Tally
from stageout_web.records import Sums
from stageout_web.state import PageState
from stageout_web.views.history import failures
from stageout_web.views.listing import Column, Listing, search
from stageout_web.views.now import SPANS, chart
from stageout_web.views.page import PageContext
from stageout_web.views.why import Reasons, Why, happened_now

_NONE, _NO_SUMS = Tally(), Sums()
_NODES_SHOWN = 20
#: Matters of a server that answers.
_OF_SERVERS = frozenset({Kind.RETRIES, Kind.NAME})


def listing(context: PageContext, state: PageState, query: Mapping[str, str]) -> Listing[str]:
    """Return the list of servers, those in trouble first."""
    troubled, etas, q = state.pool.troubled_servers(), state.pool.expected(), query.get("q", "").strip()
    reasons, today = dict[str, Reasons](), state.records.days()[-1]
    for sandbox, text in Why(state.pool).all():
        reasons.setdefault(sandbox.server, Reasons()).add(sandbox, text)
    sums = state.records.sums("destination", today, today)

    def tally(name: str) -> Tally:
        return state.by_server.get(name, _NONE)

    columns: list[Column[str]] = [
        Column("server", "Destination", str, lambda one: tag("a", one, href=context.link("destination", server=one))),
        Column("connection", "Connection", lambda one: len(troubled.get(one, ())),
               lambda one: _connection(state, one, troubled.get(one, []))),
        Column("waiting", "Waiting", lambda one: tally(one).waiting, is_number=True),
        Column("moving", "Moving", lambda one: tally(one).moving, is_number=True),
        Column("failed", "Failed", lambda one: tally(one).trouble, is_number=True),
        Column("left", "To deliver", lambda one: tally(one).bytes_left, lambda one: size(tally(one).bytes_left),
               is_number=True),
        Column("rate", "Rate", lambda one: round(state.rates.of(one)), lambda one: rate(state.rates.of(one)),
               is_number=True),
        Column("expected", "Expected", lambda one: _latest_s(etas.get(one)),
               lambda one: _expected(tally(one), etas.get(one))),
        Column("delivered_today", "Files today", lambda one: sums.get(one, _NO_SUMS).files, is_number=True),
        Column("failed_today", "Failed today", lambda one: sums.get(one, _NO_SUMS).undelivered, is_number=True),
        Column("reason", "Most frequent reason", lambda one: reasons[one].main() if one in reasons else ""),
    ]  # fmt: skip
    return Listing(
        "destinations", "destination", columns,
        (name for name in (set(state.by_server) | set(troubled)) - {""} if q in name), query,
        lambda one: (one not in troubled, -tally(one).trouble, -tally(one).bytes_left, one),
    )  # fmt: skip


def _latest_s(eta: Eta | None) -> float | None:
    return limits_s(eta)[1] if eta is not None else None


def destinations(context: PageContext, state: PageState, query: Mapping[str, str]) -> Markup:
    """Return the search with the list of all servers."""
    shown = listing(context, state, query).table(context, "No output is on its way.")
    return join(search(context, "destinations", "Destination", query),
                tag("div", shown, data_live="destinations", id="destinations"))  # fmt: skip


def _tally(state: PageState, server: str) -> Tally:
    return state.by_server.get(server, _NONE)


def _expected(tally: Tally, eta: Eta | None) -> str:
    """Return the time until all has arrived, "" if nothing waits or moves."""
    return expected(eta) if tally.waiting + tally.moving else ""


def _connection(state: PageState, server: str, reports: list[tuple[Node, ServerReport]]) -> Markup:
    if not reports:
        matter = next((one for one in state.matters if one.kind in _OF_SERVERS and one.query["server"] == server), None)
        if matter is not None:
            age = duration(matter.age_s(state.pool.now_at))
            return tag("span", f"{count(matter.outputs, 'output')} in trouble for {age}", class_="state trouble")
        return tag("span", "in order", class_="state delivered")
    probes = [one.probe_at for _, one in reports if one.probe_at]
    when = f", next probe in {duration(min(probes) - state.pool.now_at)}" if probes else ", being probed"
    return tag("span", f"not reached from {count(len(reports), 'node')}{when}", class_="state trouble")


def destination(context: PageContext, state: PageState, server: str, span: str) -> Markup | None:
    """Return the page of one server; None for one that nobody sends to."""
    reports = state.pool.troubled_servers().get(server, [])
    if server not in state.by_server and not reports:
        return None
    spans = [
        tag("a", text, href=context.link("destination", server=server, span=name),
            aria_current="true" if name == span else None)
        for name, (_, text) in SPANS.items()
    ]  # fmt: skip
    source = context.link("series.json", span=span, server=server)
    charts = tag(
        "section", tag("h2", "History"), tag("p", spans, class_="spans", role="group", aria_label="Time shown"),
        chart("rate", "Rate", source, "rate=rate", "B/s"),
        chart("outputs", "Outputs", source, "open=open trouble=failed"),
    )  # fmt: skip
    live = tag("div", _facts(state, server, reports), data_live="facts", id="facts")
    tables = tag(
        "div",
        _days(state, server),
        _tuning(state, server),
        _errors(context, state, server),
        _breakers(context, reports),
        data_live="tables",
        id="tables",
    )
    return join(live, charts, tables)


def _facts(state: PageState, server: str, reports: list[tuple[Node, ServerReport]]) -> Markup:
    tally = _tally(state, server)
    values = (
        ("Connection", _connection(state, server, reports)), ("Waiting", f"{tally.waiting:,}"),
        ("Moving", f"{tally.moving:,}"), ("Failed", f"{tally.trouble:,}"), ("To deliver", size(tally.bytes_left)),
        ("Rate", rate(state.rates.of(server))), ("Expected", _expected(tally, state.pool.expected_at(server))),
    )  # fmt: skip
    return tag("dl", (tag("div", tag("dt", name), tag("dd", value)) for name, value in values if value))


def _errors(context: PageContext, state: PageState, server: str) -> Markup:
    """Return the errors of the outputs that are here now, by class."""
    found = Counter(
        sandbox.error_code for _, sandbox in state.pool.sandboxes() if sandbox.server == server and sandbox.error_code
    )  # fmt: skip
    rows = [
        (tag("a", happened_now(code),
             href=context.link("jobs", server=server, error=str(code))), f"{number:,}")
        for code, number in found.most_common()
    ]  # fmt: skip
    return table("Errors of outputs that are on their way", ("Error", "Outputs"), rows, (1,)) if rows else Markup("")


def _days(state: PageState, server: str) -> Markup | None:
    """Return the files of each day that the records of this access point have, the newest day first."""
    rows = [
        (day, f"{sums.files:,}", size(sums.size_bytes), f"{sums.undelivered:,}", failures(sums))
        for day, sums in sorted(state.records.days_of(server).items(), reverse=True)
    ]
    header = ("Day", "Delivered", "Size", "Not delivered", "Failures")
    return table("Files of this access point by day", header, rows, (1, 2, 3)) if rows else None


#: State of a node's tuner -> what it did and why.
TUNING = {
    Tuning.STARTING: "Has too few finished files to compare rates.",
    Tuning.RAISED: "Raised the number of files at once after its last measurement.",
    Tuning.LOWERED: "Lowered the number of files at once after its last measurement.",
    Tuning.KEPT: "Kept the number of files at once after its last measurement.",
    Tuning.UNMEASURED: "Could not measure: fewer files were sent at once than allowed.",
    Tuning.FIXED: "Does not change the number of files at once (STAGEOUT_TUNING is fixed).",
    Tuning.NO_GRANT: "Waits: the policy service grants no stream.",
}


def _tuning(state: PageState, server: str) -> Markup | None:
    """Return what the tuners of all nodes do about the server, and why."""
    nodes, streams, limits = Counter[str](), Counter[str](), Counter[str]()
    for flow in state.pool.flows_to(server):
        nodes[flow.tuning] += 1
        streams[flow.tuning] += flow.streams
        limits[flow.tuning] += flow.limit
    if not nodes:
        return None
    words = {one.value: text for one, text in TUNING.items()}
    rows = [
        (words.get(name, name or "Sends nothing now."), f"{number:,}", f"{limits[name]:,}", f"{streams[name]:,}")
        for name, number in nodes.most_common()
    ]
    return table("Tuner of the nodes", ("Last step", "Nodes", "Files at once", "Streams"), rows, (1, 2, 3))


def _breakers(context: PageContext, reports: list[tuple[Node, ServerReport]]) -> Markup | None:
    """Return the nodes that cannot reach the server."""
    if not reports:
        return None
    rows = [
        (tag("a", node.host, href=context.link("node", name=node.name)), moment(one.since_at), str(one.failures),
         moment(one.probe_at) if one.probe_at else "now", *((one.reason,) if context.sees_names else ()))
        for node, one in reports[:_NODES_SHOWN]
    ]  # fmt: skip
    header = ("Node", "Since", "Probes", "Next probe", *(("Reason",) if context.sees_names else ()))
    more = len(reports) - _NODES_SHOWN
    return join(
        table("Nodes that cannot reach it", header, rows, (2,)),
        tag("p", f"{count(more, 'more node')}.") if more > 0 else None,
    )
