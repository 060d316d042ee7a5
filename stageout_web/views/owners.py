"""Owners: output of each owner and accounting group."""

from __future__ import annotations

from collections.abc import Mapping

from stageout_web.format import size
from stageout_web.html import Markup, join, tag
from stageout_web.state import PageState
from stageout_web.views.listing import Column, Listing, search
from stageout_web.views.page import PageContext
from stageout_web.views.why import Reasons, Why

Group = tuple[str, str]


def listing(context: PageContext, state: PageState, query: Mapping[str, str]) -> Listing[Group]:
    """Return the list, the owners with the most failed output first, then those with the most bytes."""
    tallies, reasons = state.pool.by_owner(), dict[Group, Reasons]()
    for sandbox, text in Why(state.pool).all():
        reasons.setdefault((sandbox.owner, sandbox.accounting_group), Reasons()).add(sandbox, text)
    q = query.get("q", "").strip()
    columns: list[Column[Group]] = [
        Column("owner", "Owner", lambda one: one[0], lambda one: tag("a", one[0], href=context.link("jobs", q=one[0]))),
        Column("group", "Accounting group", lambda one: one[1]),
        Column("waiting", "Waiting", lambda one: tallies[one].waiting, is_number=True),
        Column("moving", "Moving", lambda one: tallies[one].moving, is_number=True),
        Column("failed", "Failed", lambda one: tallies[one].trouble, is_number=True),
        Column("left", "To deliver", lambda one: tallies[one].bytes_left, lambda one: size(tallies[one].bytes_left),
               is_number=True),
        Column("reason", "Most frequent reason", lambda one: reasons[one].main() if one in reasons else ""),
    ]  # fmt: skip
    return Listing("owners", "owner", columns, (one for one in tallies if q in one[0] or q in one[1]), query,
                   lambda one: (-tallies[one].trouble, -tallies[one].bytes_left, one))  # fmt: skip


def owners(context: PageContext, state: PageState, query: Mapping[str, str]) -> Markup:
    """Return the search with the list."""
    shown = listing(context, state, query).table(context, "No output is here.")
    return join(search(context, "owners", "Owner or group", query),
                tag("div", shown, data_live="owners", id="owners"))  # fmt: skip
