"""Now: what needs attention, four numbers, and the timeline of CPU slots and data slots."""

from __future__ import annotations

from stageout.wire.matters import Matter
from stageout_web.format import count, rate, size
from stageout_web.html import Markup, join, tag, with_code
from stageout_web.state import PageState
from stageout_web.views.page import PageContext

_MATTERS_SHOWN = 10
SPANS = {"hour": (3600, "1 hour"), "day": (86400, "1 day"), "month": (30 * 86400, "30 days")}


def now(context: PageContext, state: PageState, span: str) -> Markup:
    """Return the content. :param span: key of :data:`SPANS`."""
    return join(
        tag(
            "section",
            tag("h2", "Needs attention"),
            tag("div", attention(context, state), data_live="attention", id="attention"),
        ),
        tag("section", numbers(context, state), aria_label="Numbers", data_live="numbers", id="numbers"),
        timeline(context, span),
    )


def numbers(context: PageContext, state: PageState) -> Markup:
    """Return the four numbers, each a link to what it counts."""
    total = state.total
    outputs, delivered_bytes = state.delivered
    delivered = "Delivered today" if state.has_records else "Deliveries seen today"
    affected = len(state.matters)
    cards = [
        _card("Waiting", total.waiting, f"{size(total.bytes_left)} to deliver", context.link("jobs", group="waiting")),
        _card("Moving", total.moving, rate(state.rates.total), context.link("jobs", group="moving")),
        _card(delivered, outputs, size(delivered_bytes), context.link("destinations")),
        _card("Needs attention", affected, count(total.trouble, "output") + " failed", "#attention", bool(affected)),
    ]
    return tag("ul", cards, class_="cards")


def _card(name: str, number: int, detail: str, href: str, is_alarm: bool = False) -> Markup:
    content = tag(
        "a", tag("span", name, class_="name"), tag("span", f"{number:,}", class_="value"),
        tag("span", detail, class_="detail"), href=href,
    )  # fmt: skip
    return tag("li", content, class_="alarm" if is_alarm else None)


def timeline(context: PageContext, span: str) -> Markup:
    """Return the places of the two charts. A script draws them; the table has the same values."""
    spans = [
        tag("a", text, href=context.link("", span=name), aria_current="true" if name == span else None)
        for name, (_, text) in SPANS.items()
    ]
    return tag(
        "section",
        tag("h2", "CPU slots and data slots"),
        tag("p", "A job gives its CPU slot back when its program ends. Its output is delivered from a data slot."),
        tag("p", spans, class_="spans", role="group", aria_label="Time shown"),
        chart("cpu", "CPU slots of this access point", f"{context.base}/series.json?span={span}",
              "computing=computing transferring=transferring"),
        chart("data", "Data slots of the pool", f"{context.base}/series.json?span={span}",
              "moving=sending waiting=waiting"),
    )  # fmt: skip


def chart(name: str, title: str, source: str, series: str, unit: str = "") -> Markup:
    """Return the place of one chart.

    :param series: ``NAME=LABEL ...``; the labels have no spaces. :param unit: of the values, without a prefix.
    """
    return tag(
        "figure",
        tag("figcaption", title, id=f"chart-{name}-title"),
        tag("div", "", class_="chart", data_chart=name, data_source=source, data_series=series, data_unit=unit or None),
        tag("details", tag("summary", "Values as a table"), tag("div", "", data_table=name)),
    )


def attention(context: PageContext, state: PageState) -> Markup:
    """Return the list of matters."""
    found = state.matters
    if not found:
        return tag("p", "Nothing needs attention.", class_="good")
    items = [
        tag("li", tag("p", _title(context, matter)),
            tag("p", matter.whose(state.pool.now_at), " ", with_code(matter.action), class_="action"))
        for matter in found[:_MATTERS_SHOWN]
    ]  # fmt: skip
    more = len(found) - _MATTERS_SHOWN
    rest = tag("p", tag("a", f"{count(more, 'more matter')}.", href=context.link("matters.json"))) if more > 0 else None
    return join(tag("ol", items, class_="matters"), rest)


def _title(context: PageContext, matter: Matter) -> Markup:
    if not matter.view:
        return join(matter.title)
    return tag("a", matter.title, href=context.link(matter.view, **matter.query))
