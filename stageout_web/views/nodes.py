"""Nodes: a grid of all of them, a table, and the page of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stageout.core.eta import Eta
from stageout.wire.custody import Report, Run
from stageout.wire.expected import for_runs
from stageout.wire.outlook import outlook
from stageout_web.format import count, duration, expected, size
from stageout_web.html import Markup, join, moment, table, tag
from stageout_web.model import Figures, Node, Pool
from stageout_web.state import PageState
from stageout_web.views.jobs import is_expected, state_mark
from stageout_web.views.page import PageContext, choice, page_number, pages_links

ROWS = 100
_BOXES_SHOWN = 100
#: Condition of a node -> words, the worst first. The position is the node's number in the grid.
CONDITIONS = {
    "silent": "no report", "trouble": "failed output", "full": "takes no new jobs", "waiting": "output waits",
    "moving": "sending", "idle": "no output",
}  # fmt: skip


def condition(pool: Pool, node: Node) -> str:
    """Return the condition of a node: a key of :data:`CONDITIONS`."""
    total, figures = node.total(), pool.figures.get(node.name)
    if pool.is_silent(node):
        return "silent"
    if total.trouble:
        return "trouble"
    if figures is not None and not figures.accepts:
        return "full"
    return "moving" if total.moving else "waiting" if total.waiting else "idle"


def grid(pool: Pool) -> dict[str, object]:
    """Return the names of all nodes and the numbers of their conditions, for the grid."""
    order = list(CONDITIONS)
    nodes = sorted(pool.nodes.values(), key=lambda node: node.name)
    return {"names": [node.name for node in nodes], "conditions": [order.index(condition(pool, n)) for n in nodes]}


def nodes(context: PageContext, state: PageState, query: Mapping[str, str]) -> Markup:
    """Return the grid and the table, the worst nodes first."""
    q, wanted = query.get("q", "").strip()[:200], query.get("condition", "")
    number = page_number(query)
    order = list(CONDITIONS)
    pairs = [(condition(state.pool, node), node) for node in state.pool.nodes.values() if q in node.name]
    found = sorted(
        (pair for pair in pairs if wanted in ("", pair[0])),
        key=lambda pair: (order.index(pair[0]), -pair[1].bytes_at_risk, pair[1].name),
    )
    shown = found[(number - 1) * ROWS : number * ROWS]
    rows = [_row(context, state.pool, *pair) for pair in shown]
    header = ("Node", "Condition", "Waiting", "Moving", "Failed", "At risk", "Spool", "Data slots", "Ends", "Report")
    given = {"q": q, "condition": wanted}
    result = table(count(len(found), "node"), header, rows, (2, 3, 4, 5, 6, 7))
    live = tag("div", result, pages_links(context, "nodes", given, number, len(found) > number * ROWS),
               data_live="nodes", id="nodes")  # fmt: skip
    return join(_grid(context), _form(context, q, wanted), live)


def _grid(context: PageContext) -> Markup:
    """Return the place of the grid, which the table below repeats, with the meaning of its colours."""
    legend = [tag("li", tag("span", "", class_=f"cell {name}"), f" {words}") for name, words in CONDITIONS.items()]
    canvas = tag("canvas", "", data_grid=context.link("nodes.json"), data_node=context.link("node"), role="img",
                 aria_label="Grid of all nodes. The table below has the same nodes.")  # fmt: skip
    return tag("section", tag("h2", "All nodes"), canvas, tag("ul", legend, class_="legend"))


def _form(context: PageContext, q: str, wanted: str) -> Markup:
    field = tag("input", name="q", type="search", value=q, id="q")
    options = {"": "all", **CONDITIONS}
    return tag("form", tag("label", "Node ", field), choice("condition", "Condition", options, wanted),
               tag("button", "Search", type="submit"), role="search", class_="search",
               action=context.link("nodes"))  # fmt: skip


def _row(context: PageContext, pool: Pool, found: str, node: Node) -> Iterator[Any]:
    total, figures = node.total(), pool.figures.get(node.name)
    yield tag("a", node.host, href=context.link("node", name=node.name))
    yield tag("span", tag("span", "", class_=f"cell {found}"), " ", CONDITIONS[found])
    yield f"{total.waiting:,}"
    yield f"{total.moving:,}"
    yield f"{total.trouble:,}"
    yield size(node.bytes_at_risk)
    yield _spool(node)
    yield _slots(figures)
    yield _end(pool, node)
    yield f"{duration(pool.now_at - node.heard_at)} ago"


def _spool(node: Node) -> str:
    """Return the part of the spool's quota that is taken."""
    if not node.spool_limit_bytes:
        return ""
    return f"{100 * node.spool_bytes / node.spool_limit_bytes:.0f} % of {size(node.spool_limit_bytes)}"


def _slots(figures: Figures | None) -> str:
    return f"{figures.data_slots - figures.data_slots_free} of {figures.data_slots}" if figures else ""


def _end(pool: Pool, node: Node) -> Markup | None:
    """Return the time until a pilot ends. A script counts it down."""
    if not node.ends_in_s:
        return None
    left_s = _left_s(pool, node)
    text = f"in {duration(left_s)}" if left_s > 0 else "has ended"
    return tag("span", text, role="timer", data_left=left_s)


def _left_s(pool: Pool, node: Node) -> int:
    return max(0, node.heard_at + node.ends_in_s - pool.now_at)


def node(context: PageContext, state: PageState, name: str) -> Markup | None:
    """Return the page of one node; None for one without a report. :param name: of its manager."""
    found = [node for node in state.pool.nodes.values() if node.name == name]
    if not found:
        return None
    parts = [_one(context, state.pool, node) for node in found]
    return tag("div", _doubt(found), parts, data_live="node", id="node")


def _doubt(found: list[Node]) -> Markup | None:
    if len(found) < 2:
        return None
    text = "Reports with different keys use this name. The access point believes the key that the job's record names."
    return tag("p", text, class_="problems")


def _one(context: PageContext, pool: Pool, node: Node) -> Markup:
    found, figures, total = condition(pool, node), pool.figures.get(node.name), node.total()
    report = node.report()
    etas = for_runs(report, pool.now_at, {box.run for box in report.sandboxes})
    all_away = expected(node.expected(pool.now_at)) if total.waiting + total.moving else ""
    values = [
        ("Condition", CONDITIONS[found]), ("Output at risk", size(node.bytes_at_risk)), ("Spool", _spool(node)),
        ("Data slots in use", _slots(figures)), ("Expected", all_away),
        ("Ends", _end(pool, node)), ("Output away by then", _away(report, etas, _left_s(pool, node))),
        ("Report", moment(node.heard_at)),
    ]  # fmt: skip
    facts = tag("dl", (tag("div", tag("dt", key), tag("dd", value)) for key, value in values if value))
    rows = [
        (tag("a", box.job_id, href=context.job_link(box.job)), box.owner, state_mark(box.state),
         f"{count(box.files_left, 'file')}, {size(box.bytes_left)}",
         expected(etas.get(box.run)) if is_expected(box) else "", box.server, moment(box.accepted_at))
        for box in node.boxes[:_BOXES_SHOWN]
    ]  # fmt: skip
    header = ("Job", "Owner", "State", "Left", "Expected", "Destination", "Since")
    return join(facts, _servers(context, node), table(count(len(node.boxes), "output"), header, rows, (3,)))


def _away(report: Report, etas: Mapping[Run, Eta], left_s: int) -> str:
    """Return the answer to whether all output of a node that ends is away by then; "" for one without an end."""
    if not report.ends_in_s:
        return ""
    found = outlook(report, etas, left_s)
    if found.late:
        return f"probably not, {size(found.late_bytes + found.unknown_bytes)} at risk"
    return f"unknown, {size(found.unknown_bytes)} at risk" if found.unknown else "yes"


def _servers(context: PageContext, node: Node) -> Markup | None:
    if not node.servers:
        return None
    rows = [
        (tag("a", one.server, href=context.link("destination", server=one.server)), moment(one.since_at),
         moment(one.probe_at) if one.probe_at else "now", *((one.reason,) if context.sees_names else ()))
        for one in node.servers
    ]  # fmt: skip
    header = ("Destination", "Since", "Next probe", *(("Reason",) if context.sees_names else ()))
    return table("Destinations that it cannot reach", header, rows)
