"""History: sums and percentiles of the files that were delivered in the last days."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from stageout_web.format import count, duration, rate, size
from stageout_web.html import Markup, join, table, tag
from stageout_web.records import DAYS, Records, Sums, percentile
from stageout_web.views.page import PageContext, choice

_ROWS = 200
KINDS = {"day": "Day", "destination": "Destination", "owner": "Owner", "plugin": "Plugin"}
_DATE = re.compile(r"\d{4}-\d\d-\d\d\Z", re.A)
#: Records that an export has at most.
EXPORT_ROWS = 100_000


class Range(NamedTuple):
    """The days that are shown. :param first, last: YYYY-MM-DD."""

    kind: str
    first: str
    last: str

    @classmethod
    def of(cls, query: Mapping[str, str], days: list[str]) -> Range:
        """Return the range in a query. What is missing or wrong becomes all days. :param days: oldest first."""
        kind = query.get("by", "")
        first, last = query.get("first", ""), query.get("last", "")
        first = max(days[0], first) if _DATE.match(first) else days[0]
        last = min(days[-1], last) if _DATE.match(last) else days[-1]
        return cls(kind if kind in KINDS else "day", first, last)


def history(context: PageContext, records: Records, query: Mapping[str, str]) -> Markup:
    """Return the search with the table."""
    days = records.days()
    wanted = Range.of(query, days)
    export = tag("p", tag("a", "Export as CSV", href=context.link("history.csv", first=wanted.first, last=wanted.last),
                          download=True), f": one line for each file, at most the newest {EXPORT_ROWS:,}.")  # fmt: skip
    found = records.sums(wanted.kind, wanted.first, wanted.last)
    live = tag("div", _state(records), _table(wanted.kind, found) if found else _nothing(records),
               export if found else None, data_live="history", id="history")  # fmt: skip
    return join(_form(context, wanted, days), live)


def _form(context: PageContext, wanted: Range, days: list[str]) -> Markup:
    dates = [
        tag("label", f"{label} ", tag("input", type="date", name=name, value=value, min=days[0], max=days[-1]))
        for label, name, value in (("From", "first", wanted.first), ("To", "last", wanted.last))
    ]
    return tag("form", choice("by", "Sums by", KINDS, wanted.kind), dates, tag("button", "Show", type="submit"),
               role="search", class_="search", action=context.link("history"))  # fmt: skip


def _state(records: Records) -> Markup | None:
    """Return why the sums are not complete."""
    if records.problem:
        return tag("p", f"The records cannot be read: {records.problem}")
    if not records.is_complete:
        return tag("p", "The records are being read. The sums are not complete yet.")
    if not records.unreadable:
        return None
    text = (
        f"The sums and the export are not complete: {count(records.unreadable, 'rotated part')} of the history cannot "
        "be read. The log of stageout-web (StageoutWebLog) names each with the reason."
    )
    return tag("p", text, class_="problems")


def _nothing(records: Records) -> Markup | None:
    if not records.is_complete or records.unreadable:
        return None
    return tag("p", f"No delivery ended in these days. This access point has records of the last {DAYS} days at most.")


def _table(kind: str, found: Mapping[str, Sums]) -> Markup:
    names = sorted(found, reverse=True) if kind == "day" else sorted(
        found, key=lambda name: (-found[name].size_bytes, name)
    )  # fmt: skip
    header = (KINDS[kind], "Files", "Size", "Not delivered", "Median", "95 %", "99 %", "Median rate")
    shown = table(count(len(names), kind), header, [_row(name, found[name]) for name in names[:_ROWS]], range(1, 8))
    text = (
        "Times are from the hand-off to the delivery of a file. Median, 95 % and 99 %: this share of the files took "
        "so long or less. The rate is that of one file. Both are exact to 3 %."
    )
    more = tag("p", f"{len(names) - _ROWS:,} more.") if len(names) > _ROWS else None
    return join(shown, more, tag("p", text))


def _row(name: str, sums: Sums) -> Iterator[Any]:
    yield name
    yield f"{sums.files:,}"
    yield size(sums.size_bytes)
    yield f"{sums.undelivered:,}"
    for share in (0.5, 0.95, 0.99):
        took_s = percentile(sums.took, share)
        yield "" if took_s is None else duration(round(took_s))
    median = percentile(sums.rates, 0.5)
    yield "" if median is None else rate(median)
