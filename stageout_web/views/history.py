"""History: sums and percentiles of the files that were delivered in the last days."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from stageout_web.format import count, duration, rate, size
from stageout_web.html import Markup, join, tag
from stageout_web.records import DAYS, Records, Sums, percentile
from stageout_web.state import PageState
from stageout_web.views.listing import Column, Listing
from stageout_web.views.page import PageContext, choice

_ROWS, _CLASSES = 200, 3
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
    found = bool(records.sums(wanted.kind, wanted.first, wanted.last))
    live = tag("div", _state(records), _table(context, records, query) if found else _nothing(records),
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


def listing(records: Records, query: Mapping[str, str]) -> Listing[str]:
    """Return the list of sums that an address asks for: the newest day first, or the name with the most bytes."""
    wanted = Range.of(query, records.days())
    found = records.sums(wanted.kind, wanted.first, wanted.last)

    columns: list[Column[str]] = [
        Column("name", KINDS[wanted.kind], str),
        Column("files", "Files", lambda one: found[one].files, is_number=True),
        Column("bytes", "Size", lambda one: found[one].size_bytes, lambda one: size(found[one].size_bytes),
               is_number=True),
        Column("undelivered", "Not delivered", lambda one: found[one].undelivered, is_number=True),
        Column("reason", "Failures", lambda one: failures(found[one])),
        _time(found, "median_s", "Median", 0.5), _time(found, "p95_s", "95 %", 0.95),
        _time(found, "p99_s", "99 %", 0.99),
        Column("rate", "Median rate", lambda one: percentile(found[one].rates, 0.5), lambda one: _rate(found[one]),
               is_number=True),
    ]  # fmt: skip
    order = sorted(found, reverse=True) if wanted.kind == "day" else sorted(
        found, key=lambda name: (-found[name].size_bytes, name)
    )  # fmt: skip
    place = {name: at for at, name in enumerate(order)}
    return Listing(
        view="history", noun=wanted.kind, columns=columns, found=order, query=query, order=place.__getitem__, rows=_ROWS
    )


def state_listing(context: PageContext, state: PageState, query: Mapping[str, str]) -> Listing[str]:
    """Return the same list out of the state."""
    return listing(state.records, query)


def _time(found: Mapping[str, Sums], name: str, title: str, share: float) -> Column[str]:
    """Return a column with the time in which this share of the files arrived."""

    def took_s(one: str) -> int | None:
        value = percentile(found[one].took, share)
        return None if value is None else round(value)

    def shown(one: str) -> str:
        value = took_s(one)
        return "" if value is None else duration(value)

    return Column(name, title, took_s, shown, is_number=True)


def _rate(sums: Sums) -> str:
    median = percentile(sums.rates, 0.5)
    return "" if median is None else rate(median)


def failures(sums: Sums) -> str:
    """Return the most frequent classes of failures: ``QUOTA_EXCEEDED 12, STALLED 3``."""
    most = sorted(sums.failures.items(), key=lambda pair: (-pair[1], pair[0]))
    text = ", ".join(f"{name} {number:,}" for name, number in most[:_CLASSES])
    return f"{text}, others" if len(most) > _CLASSES else text


def _table(context: PageContext, records: Records, query: Mapping[str, str]) -> Markup:
    text = (
        "Times are from the hand-off to the delivery of a file. Median, 95 % and 99 %: this share of the files took "
        "so long or less. The rate is that of one file. Both are exact to 3 %. Failures have the "
        "names of error classes."
    )
    return join(listing(records, query).table(context), tag("p", text))
