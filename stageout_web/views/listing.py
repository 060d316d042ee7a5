"""Lists of all views: one table that is searched, sorted and paged by its address, and the same rows for programs."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, Union

from stageout_web.format import count
from stageout_web.html import Content, Markup, join, table, tag
from stageout_web.views.page import PageContext, page_number, pages_links

SCHEMA = 1
"""Version of the lists for programs: a field may be added, and one that changes or goes raises it."""
MOST_ROWS = 1000
T = TypeVar("T")
Value = Union[str, int, float, bool, None]
#: Parameters of an address that links of a list keep, and characters of each.
_KEPT, _CHARACTERS = 20, 200
_NUMBER = re.compile(r"\d{1,6}\Z", re.A)


@dataclass(frozen=True)
class Column(Generic[T]):
    """A column.

    :param name: in addresses and for programs. :param title: "": for programs only. :param value: a plain value, by
        which the list is sorted; None sorts last. :param shown: content of a cell, the value without it.
    :param order: value to sort by, in place of ``value``.
    """

    name: str
    title: str
    value: Callable[[T], Value]
    shown: Callable[[T], Content] | None = None
    is_number: bool = False
    order: Callable[[T], Any] | None = None

    def cell(self, row: T) -> Content:
        """Return the content of a cell."""
        found = self.shown(row) if self.shown is not None else self.value(row)
        return f"{found:,}" if isinstance(found, int) else found if not isinstance(found, float) else f"{found:,.1f}"


class Listing(Generic[T]):
    """A list of rows, as an address asks for it.

    :param view: path of the address. :param noun: name of a row. :param order: the list's own order, the first row
        first. :param query: of the address; ``sort`` is a column, with ``-`` in front for the largest first,
        ``page`` a number from 1, and ``rows`` on a page. :param rows: on a page, if the query does not say.
    :param prefix: of ``sort`` and ``page``, for a second list.
    :param about: end of the title.
    """

    def __init__(
        self,
        view: str,
        noun: str,
        columns: Iterable[Column[T]],
        found: Iterable[T],
        query: Mapping[str, str],
        order: Callable[[T], Any],
        rows: int = 100,
        prefix: str = "",
        about: str = "",
    ) -> None:
        self.columns = tuple(columns)
        wanted = query.get("rows", "")
        self._rows = rows = max(1, min(MOST_ROWS, int(wanted))) if _NUMBER.match(wanted) else rows
        self._view, self._noun, self._prefix, self._about = view, noun, prefix, about
        self._given = {name: query[name][:_CHARACTERS] for name in list(query)[:_KEPT]}
        self._found, self._order = list(found), order
        name = query.get(f"{prefix}sort", "")
        self._is_down = name.startswith("-")
        self._column = next((one for one in self.columns if one.name == name.lstrip("-")), None)
        self.pages = max(1, -(-len(self._found) // rows))
        self.number = min(self.pages, page_number({"page": query.get(f"{prefix}page", "")}))

    def __len__(self) -> int:
        return len(self._found)

    def rows(self) -> list[T]:
        """Return the rows of the page, in the order of the address."""
        end = self.number * self._rows
        return self._first(end)[end - self._rows :]

    def _first(self, number: int) -> list[T]:
        if self._column is None:
            return heapq.nsmallest(number, self._found, key=self._order)
        value = self._column.order or self._column.value
        known = [(found, row) for row in self._found if (found := value(row)) is not None]
        best = heapq.nlargest if self._is_down else heapq.nsmallest
        first = [row for _, row in best(number, known, key=lambda pair: pair[0])]
        if len(first) < number:
            first += [row for row in self._found if value(row) is None][: number - len(first)]
        return first

    def table(self, context: PageContext, empty: Content = "Nothing.") -> Markup:
        """Return the table with links that sort it, and links to its other pages. :param empty: without rows."""
        if not self._found:
            return tag("p", empty) if isinstance(empty, str) and not isinstance(empty, Markup) else join(empty)
        shown = [column for column in self.columns if column.title]
        header = [self._head(context, column) for column in shown]
        rows = ([column.cell(row) for column in shown] for row in self.rows())
        numbers = [place for place, column in enumerate(shown) if column.is_number]
        wide = [place for place, column in enumerate(shown) if column.name == "reason"]
        sorts = [self._sorted(column) for column in shown]
        pages = pages_links(context, self._view, self._given, self.number, self.number < self.pages,
                            f"{self._prefix}page")  # fmt: skip
        title = f"{count(len(self._found), self._noun)}{self._about}"
        return join(table(title, header, rows, numbers, sorts, wide), pages)

    def _sorted(self, column: Column[T]) -> str | None:
        if column is not self._column:
            return None
        return "descending" if self._is_down else "ascending"

    def _head(self, context: PageContext, column: Column[T]) -> Markup:
        """Return a link that sorts by a column. Numbers begin with the largest; the same link again turns the order."""
        is_first = column is not self._column
        is_down = column.is_number if is_first else not self._is_down
        dropped = {f"{self._prefix}page", f"{self._prefix}sort"}
        given = {name: value for name, value in self._given.items() if name not in dropped}
        given[f"{self._prefix}sort"] = f"{'-' if is_down else ''}{column.name}"
        return tag("a", column.title, href=context.address(self._view, given))

    def data(self) -> dict[str, object]:
        """Return the rows of the page for programs."""
        rows = [{column.name: column.value(row) for column in self.columns} for row in self.rows()]
        return {"total": len(self._found), "page": self.number, "pages": self.pages, "rows": rows}


def search(context: PageContext, view: str, label: str, query: Mapping[str, str], *fields: Markup) -> Markup:
    """Return the search of a list. It keeps the order. :param fields: besides the text."""
    field = tag("input", name="q", type="search", value=query.get("q", "")[:_CHARACTERS], id="q")
    sort = query.get("sort", "")[:_CHARACTERS]
    kept = tag("input", type="hidden", name="sort", value=sort) if sort else None
    return tag("form", tag("label", f"{label} ", field), fields, kept, tag("button", "Search", type="submit"),
               role="search", class_="search", action=context.link(view))  # fmt: skip
