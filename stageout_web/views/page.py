"""The frame around every view: head, menu, problems, and links that work below any path."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlencode

from stageout import __version__
from stageout_web.format import offsets, zone
from stageout_web.html import Markup, encodable, join, moment, tag

#: Views in the menu, in their order.
MENU = {
    "": "Now", "jobs": "Jobs", "destinations": "Destinations", "owners": "Owners", "nodes": "Nodes",
    "routers": "Routers", "policy": "Policy", "history": "History",
}  # fmt: skip

_MOST_PAGES = 10_000
#: Days whose offsets from UTC the charts need.
_PAST_S, _SOON_S = 31 * 86400, 3600


@dataclass(frozen=True)
class PageContext:
    """The surroundings of a page.

    :param base: path below which the page is shown, without a slash at its end. :param sees_names: the reader may see
        names of all files and URLs. :param static: file -> its address with a digest.
    :param problems: daemon that does not answer -> reason. :param updated_at: wall clock, seconds.
    :param matters: number of matters that need a person. :param user: whom a proxy names; the reader sees the names of
        this user's files.
    """

    base: str = ""
    sees_names: bool = False
    may_sign_in: bool = False
    pool: str = ""
    static: Mapping[str, str] | None = None
    problems: Mapping[str, str] | None = None
    updated_at: float = 0.0
    matters: int = 0
    user: str = ""

    def sees_names_of(self, owner: str) -> bool:
        """Tell whether the reader may see names of an owner's files. :param owner: as managers know them."""
        return self.sees_names or (bool(self.user) and owner == self.user)

    def link(self, view: str, **query: str) -> str:
        """Return the address of a view. :param query: empty values are left out."""
        return self.address(view, query)

    def address(self, view: str, query: Mapping[str, str]) -> str:
        """Return the address of a view with any parameters. Empty values are left out."""
        given = {encodable(name): encodable(value) for name, value in query.items() if value}
        return f"{self.base}/{quote(view)}" + (f"?{urlencode(given)}" if given else "")

    def job_link(self, job: str) -> str:
        """Return the address of a job's page. :param job: GlobalJobId."""
        return self.link("job", id=job)

    def file(self, name: str) -> str:
        """Return the address of a static file."""
        return f"{self.base}/static/{(self.static or {}).get(name, name)}"


def page(context: PageContext, view: str, title: str, content: Markup, is_form: bool = False) -> str:
    """Return the whole page.

    :param view: name in the menu that the page belongs to. :param is_form: the page never loads again by itself.
    """
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{f'({context.matters}) ' if context.matters else ''}{title} - stageout"),
        tag("link", rel="icon", href=context.file("icon.svg"), type="image/svg+xml"),
        tag("link", rel="stylesheet", href=context.file("uplot.css")),
        tag("link", rel="stylesheet", href=context.file("page.css")),
        None if is_form else tag("noscript", tag("meta", http_equiv="refresh", content="30")),
        tag("script", "", type="module", src=context.file("page.js")),
    )
    now_at = context.updated_at or time.time()
    body = tag(
        "body",
        tag("a", "Skip to content", href="#content", class_="skip"),
        _header(context, view),
        tag("main", _problems(context), tag("h1", title), content, id="content", tabindex=-1),
        _footer(context),
        data_events=f"{context.base}/events",
        data_uplot=context.file("uplot.js"),
        data_offsets=json.dumps(offsets(now_at - _PAST_S, now_at + _SOON_S)),
    )
    return "<!DOCTYPE html>\n" + tag("html", head, body, lang="en")


def _header(context: PageContext, view: str) -> Markup:
    items = [
        tag("li", tag("a", text, href=context.link(name), aria_current="page" if name == view else None))
        for name, text in MENU.items()
    ]
    return tag(
        "header",
        tag("a", tag("strong", "stageout"), tag("span", context.pool, class_="pool"), href=context.link(""),
            class_="brand"),
        tag("nav", tag("ul", items), aria_label="Views"),
    )  # fmt: skip


def _problems(context: PageContext) -> Markup:
    """Return what no daemon answers now. The page goes on with what it knew before."""
    items = [
        tag("p", tag("strong", "The history cannot be written."), f" {problem} The charts have gaps.")
        if daemon == "history" else
        tag("p", tag("strong", f"The {daemon} does not answer."), f" {problem} The page shows older figures.")
        for daemon, problem in (context.problems or {}).items()
    ]  # fmt: skip
    if not context.updated_at and not items:
        items = [tag("p", "The page reads the pool for the first time. Its figures are not complete yet.")]
    return tag("div", tag("div", items, class_="problems") if items else None, id="problems", role="alert")


def _footer(context: PageContext) -> Markup:
    reader: Markup | None = None
    if context.user:
        mine = tag("a", "my outputs", href=context.link("jobs", owner=context.user))
        reader = tag("span", f"Reader: {context.user} (", mine, ")")
    elif context.sees_names:
        reader = tag("form", tag("button", "Hide file names", type="submit"), method="post",
                     action=f"{context.base}/sign-out")  # fmt: skip
    elif context.may_sign_in:
        reader = tag("a", "Show file names", href=context.link("sign-in"))
    updated = join("Updated ", tag("span", moment(context.updated_at), id="updated"))
    times = tag("span", f"All times: {zone(context.updated_at or time.time())}")
    status = tag("span", "", id="connection", role="status")
    return tag("footer", tag("span", updated, " ", status), times, reader, tag("span", f"stageout {__version__}"))


def choice(name: str, label: str, options: Mapping[str, str], chosen: str) -> Markup:
    """Return a labelled list to choose from."""
    items = [tag("option", text, value=value, selected=value == chosen) for value, text in options.items()]
    return tag("label", f"{label} ", tag("select", items, name=name))


def page_number(query: Mapping[str, str]) -> int:
    """Return the number of the page in a query, from 1."""
    text = query.get("page", "")
    return max(1, min(_MOST_PAGES, int(text))) if re.match(r"\d{1,9}\Z", text, re.A) else 1


def pages_links(
    context: PageContext, view: str, query: Mapping[str, str], number: int, more: bool, name: str = "page"
) -> Markup:
    """Return links to the page before and after. :param number: of this page, from 1. :param name: of the parameter."""
    before = {**query, name: str(number - 1)} if number > 1 else None
    after = {**query, name: str(number + 1)} if more else None
    links = [
        tag("a", text, href=context.address(view, where), rel=rel)
        for text, rel, where in (("Previous page", "prev", before), ("Next page", "next", after))
        if where is not None
    ]
    return tag("nav", links, aria_label="Pages", class_="pages") if links else Markup("")


def sign_in(context: PageContext, is_wrong: bool) -> Markup:
    """Return the form for a token."""
    wrong = tag("p", "This token is not valid.", role="alert", class_="problems") if is_wrong else None
    field = tag("input", name="token", type="password", autocomplete="current-password", required=True, id="token")
    return tag(
        "form",
        wrong,
        tag("p", "With a token the page shows names of files, URLs and the words of servers. "
            "The pool's administrator gives tokens out."),
        tag("p", tag("label", "Token", for_="token"), " ", field, " ", tag("button", "Show file names", type="submit")),
        method="post", action=f"{context.base}/sign-in",
    )  # fmt: skip
