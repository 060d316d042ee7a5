"""Owners: output of each owner and accounting group."""

from __future__ import annotations

from stageout_web.format import count, size
from stageout_web.html import Markup, table, tag
from stageout_web.state import PageState
from stageout_web.views.page import PageContext

_ROWS = 200


def owners(context: PageContext, state: PageState) -> Markup:
    """Return the table, the owners with the most failed output first, then those with the most bytes."""
    tallies = state.pool.by_owner()
    names = sorted(tallies, key=lambda name: (-tallies[name].trouble, -tallies[name].bytes_left, name))
    rows = []
    for owner, group in names[:_ROWS]:
        tally = tallies[owner, group]
        link = tag("a", owner, href=context.link("jobs", q=owner))
        rows.append(
            (link, group, f"{tally.waiting:,}", f"{tally.moving:,}", f"{tally.trouble:,}", size(tally.bytes_left))
        )
    header = ("Owner", "Accounting group", "Waiting", "Moving", "Failed", "To deliver")
    more = tag("p", f"{count(len(names) - _ROWS, 'more owner')}.") if len(names) > _ROWS else None
    shown = table(count(len(names), "owner"), header, rows, (2, 3, 4, 5)) if names else tag("p", "No output is here.")
    return tag("div", shown, more, data_live="owners", id="owners")
