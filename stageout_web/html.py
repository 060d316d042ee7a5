"""HTML out of functions. Text from elsewhere is always escaped; only :class:`Markup` is not."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Union

from stageout_web import format as words

_VOID = frozenset({"br", "input", "link", "meta"})


class Markup(str):
    """Text that is HTML already."""


Content = Union[str, int, None, Iterable[object]]
Attribute = Union[str, int, bool, None]


def tag(name: str, /, *content: Content, **attributes: Attribute) -> Markup:
    """Return an element.

    :param content: strings (escaped), Markup (as it is), lists of both; None is left out.
    :param attributes: ``class_`` and ``for_`` lose the end, other underscores become hyphens; None and False are left
        out, True gives the name alone.
    """
    shown = "".join(_attribute(key, value) for key, value in attributes.items() if value is not None)
    if name in _VOID:
        return Markup(f"<{name}{shown}>")
    return Markup(f"<{name}{shown}>{join(*content)}</{name}>")


def join(*content: Content) -> Markup:
    """Return the pieces as one."""
    return Markup("".join(map(_shown, content)))


def _shown(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, Markup):
        return content
    if isinstance(content, (str, int)):
        return html.escape(encodable(str(content)))
    assert isinstance(content, Iterable)
    return "".join(map(_shown, content))


def _attribute(key: str, value: Attribute) -> str:
    name = key.rstrip("_").replace("_", "-")
    if value is False or value is None:
        return ""
    return f" {name}" if value is True else f' {name}="{html.escape(encodable(str(value)))}"'


def encodable(text: str) -> str:
    """Return text that UTF-8 can encode. Names of files may have bytes that are no text."""
    return text.encode("utf-8", "replace").decode()


def table(
    caption: str,
    header: Iterable[Content],
    rows: Iterable[Iterable[Content]],
    numbers: Iterable[int] = (),
    sorts: Sequence[str | None] = (),
    wide: Iterable[int] = (),
) -> Markup:
    """Return a table whose first cell of each row is the row's header.

    :param numbers: columns with numbers. :param sorts: of each column: how the rows are sorted by it (aria-sort).
    :param wide: columns with sentences.
    """
    classes = {**dict.fromkeys(numbers, "number"), **dict.fromkeys(wide, "reason")}

    def cells(row: Iterable[Content]) -> Iterable[Markup]:
        for column, content in enumerate(row):
            class_ = classes.get(column)
            if column == 0:
                yield tag("th", content, scope="row", class_=class_)
            else:
                yield tag("td", content, class_=class_)

    head = [tag("th", text, scope="col", class_=classes.get(column),
                aria_sort=sorts[column] if sorts else None) for column, text in enumerate(header)]  # fmt: skip
    body = [tag("tr", cells(row)) for row in rows]
    made = tag("table", tag("caption", caption), tag("thead", tag("tr", head)), tag("tbody", body))
    return tag("div", made, class_="scroll", role="region", aria_label=caption, tabindex=0)


def moment(at: float) -> Markup:
    """Return a time with its form for programs; a dash without one."""
    shown = words.moment(at)
    if not shown:
        return Markup("&ndash;")
    day, clock = shown.split()
    return tag("time", tag("span", day), " ", tag("span", clock), datetime=words.machine_time(at))


def with_code(text: str) -> Markup:
    """Return text whose parts between backquotes are program text."""
    return join(*(tag("code", part) if number % 2 else part for number, part in enumerate(text.split("`"))))
