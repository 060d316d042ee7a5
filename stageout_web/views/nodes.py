"""Nodes: a grid of all of them, a table, and the page of one."""

from __future__ import annotations

from collections.abc import Mapping

from stageout.core.eta import Eta, limits_s
from stageout.wire.custody import Report, Run
from stageout.wire.expected import for_runs
from stageout.wire.outlook import outlook
from stageout_web.format import count, duration, expected, size
from stageout_web.html import Markup, join, moment, table, tag
from stageout_web.model import MOVING, TROUBLE, WAITING, Figures, Node, Pool, SandboxSummary
from stageout_web.state import PageState
from stageout_web.views.jobs import is_expected, job_order, state_mark
from stageout_web.views.listing import Column, Listing, search
from stageout_web.views.page import PageContext, choice
from stageout_web.views.why import Reasons, Why

ROWS = 100
_NO_FIGURES = Figures()
_FIRST = {TROUBLE: 0, MOVING: 1, WAITING: 2}
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


def listing(context: PageContext, state: PageState, query: Mapping[str, str]) -> Listing[Node]:
    """Return the list of nodes, the worst first."""
    pool, order, why = state.pool, list(CONDITIONS), Why(state.pool)
    q, wanted = query.get("q", "").strip(), query.get("condition", "")
    conditions = {id(node): condition(pool, node) for node in list(pool.nodes.values()) if q in node.name}
    found = [node for node in list(pool.nodes.values()) if conditions.get(id(node)) and
             wanted in ("", conditions[id(node)])]  # fmt: skip
    totals = {id(node): node.total() for node in found}

    def figures(node: Node) -> Figures:
        return pool.figures.get(node.name, _NO_FIGURES)

    columns: list[Column[Node]] = [
        Column("node", "Node", lambda one: one.host,
               lambda one: tag("a", one.host, href=context.link("node", name=one.name))),
        Column("name", "", lambda one: one.name),
        Column("condition", "Condition", lambda one: conditions[id(one)],
               lambda one: _condition(conditions[id(one)]), order=lambda one: order.index(conditions[id(one)])),
        Column("reason", "Reason", lambda one: _reason(pool, why, one, conditions[id(one)])),
        Column("waiting", "Waiting", lambda one: totals[id(one)].waiting, is_number=True),
        Column("moving", "Moving", lambda one: totals[id(one)].moving, is_number=True),
        Column("failed", "Failed", lambda one: totals[id(one)].trouble, is_number=True),
        Column("at_risk", "At risk", lambda one: one.bytes_at_risk, lambda one: size(one.bytes_at_risk),
               is_number=True),
        Column("spool", "Spool", lambda one: one.spool_bytes, _spool, is_number=True,
               order=lambda one: one.spool_bytes / (one.spool_limit_bytes or 1)),
        Column("slots", "", lambda one: figures(one).data_slots),
        Column("slots_used", "Data slots", lambda one: figures(one).data_slots - figures(one).data_slots_free,
               lambda one: _slots(pool.figures.get(one.name)), is_number=True),
        Column("ends_in_s", "Ends", lambda one: _left_s(pool, one) if one.ends_in_s else None,
               lambda one: _end(pool, one)),
        Column("age_s", "Report", lambda one: pool.now_at - one.heard_at,
               lambda one: f"{duration(pool.now_at - one.heard_at)} ago"),
    ]  # fmt: skip
    return Listing(
        view="nodes",
        noun="node",
        columns=columns,
        found=found,
        query=query,
        order=lambda one: (order.index(conditions[id(one)]), -one.bytes_at_risk, one.name),
        rows=ROWS,
    )


def _condition(found: str) -> Markup:
    return tag("span", tag("span", "", class_=f"cell {found}"), " ", CONDITIONS[found])


def _reason(pool: Pool, why: Why, node: Node, found: str) -> str:
    """Return why a node is in its condition: the most frequent reason of its output."""
    if found == "silent":
        return f"No report for {duration(pool.silent_s(node.heard_at))}."
    if found == "full":
        return "Its spool or its data slots are full, or it drains."
    reasons = Reasons()
    for sandbox in node.sandboxes:
        if text := why.of(node, sandbox):
            reasons.add(sandbox, text)
    return reasons.main()


def nodes(context: PageContext, state: PageState, query: Mapping[str, str]) -> Markup:
    """Return the grid, the search and the list."""
    options = {"": "all", **CONDITIONS}
    form = search(
        context, "nodes", "Node", query, choice("condition", "Condition", options, query.get("condition", ""))
    )
    shown = listing(context, state, query).table(context, "No node matches.")
    return join(_grid(context, len(state.pool.nodes)), form, tag("div", shown, data_live="nodes", id="nodes"))


def _grid(context: PageContext, number: int) -> Markup:
    """Return the place of the grid, which the table below repeats, with the meaning of its colours."""
    legend = [tag("li", tag("span", "", class_=f"cell {name}"), f" {words}") for name, words in CONDITIONS.items()]
    canvas = tag("canvas", "", data_grid=context.link("grid.json"), data_node=context.link("node"), role="img",
                 aria_label="Grid of all nodes. The table below has the same nodes.")  # fmt: skip
    size_class = "small" if number <= 100 else "medium" if number <= 1000 else "large"
    place = tag("div", canvas, class_=f"grid {size_class}")  # its height does not change when a script draws the grid
    return tag("section", tag("h2", "All nodes"), place, tag("ul", legend, class_="legend"))


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


def node(context: PageContext, state: PageState, name: str, query: Mapping[str, str]) -> Markup | None:
    """Return the page of one node; None for one without a report. :param name: of its manager."""
    found = [node for node in state.pool.nodes.values() if node.name == name]
    if not found:
        return None
    parts = [_node(context, state.pool, node, query) for node in found]
    return tag("div", _doubt(found), parts, data_live="node", id="node")


def _doubt(found: list[Node]) -> Markup | None:
    if len(found) < 2:
        return None
    text = "Reports with different keys use this name. The access point believes the key that the job's record names."
    return tag("p", text, class_="problems")


def _node(context: PageContext, pool: Pool, node: Node, query: Mapping[str, str]) -> Markup:
    found, figures, total = condition(pool, node), pool.figures.get(node.name), node.total()
    report = node.report()
    etas = for_runs(report, pool.now_at, {sandbox.run for sandbox in report.sandboxes})
    all_away = expected(node.expected(pool.now_at)) if total.waiting + total.moving else ""
    values = [
        ("Condition", CONDITIONS[found]), ("Output at risk", size(node.bytes_at_risk)), ("Spool", _spool(node)),
        ("Data slots in use", _slots(figures)), ("Expected", all_away),
        ("Ends", _end(pool, node)), ("Output away by then", _away(report, etas, _left_s(pool, node))),
        ("Report", moment(node.heard_at)),
    ]  # fmt: skip
    facts = tag("dl", (tag("div", tag("dt", key), tag("dd", value)) for key, value in values if value))
    why = Why(pool)
    columns: list[Column[SandboxSummary]] = [
        Column("job", "Job", lambda sandbox: sandbox.job_id,
               lambda sandbox: tag("a", sandbox.job_id, href=context.job_link(sandbox.job)), order=job_order),
        Column("owner", "Owner", lambda sandbox: sandbox.owner),
        Column("state", "State", lambda sandbox: sandbox.state, lambda sandbox: state_mark(sandbox.state)),
        Column("reason", "Reason", lambda sandbox: why.of(node, sandbox)),
        Column("left", "Left", lambda sandbox: sandbox.bytes_left,
               lambda sandbox: f"{count(sandbox.files_left, 'file')}, {size(sandbox.bytes_left)}", is_number=True),
        Column("expected", "Expected", lambda sandbox: limits_s(etas.get(sandbox.run))[1],
               lambda sandbox: expected(etas.get(sandbox.run)) if is_expected(sandbox) else ""),
        Column("server", "Destination", lambda sandbox: sandbox.server),
        Column("since", "Since", lambda sandbox: sandbox.accepted_at, lambda sandbox: moment(sandbox.accepted_at)),
    ]  # fmt: skip
    sandboxes = Listing(
        "node",
        "output",
        columns,
        node.sandboxes,
        query,
        lambda sandbox: (_FIRST.get(sandbox.group, 3), sandbox.accepted_at),
    )
    return join(facts, _servers(context, node), sandboxes.table(context, "No output is here."))


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
