"""Sphinx extension: fill the generated tables into pages, and accept the languages of our code blocks."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2])]

from pygments.lexers.special import TextLexer
from reference import fill, has_tables

#: Languages of code blocks that Pygments does not know.
_PLAIN = ("dag", "mermaid")
#: Links to files of the repository that are no pages. They work where the source is shown; the site shows the name.
_OUTSIDE = re.compile(r"\[([^\]]*)\]\((?:\.\./)+((?:examples|condor_config\.d|plugins|tests)/[^)]*)\)")


def _fill_in(app: Any, name: str, source: list[str]) -> None:
    """Replace the markers of one page, and its links to files that are no pages."""
    source[0] = _OUTSIDE.sub(r"\1 (`\2`)", fill(source[0]))


def _outdated(app: Any, env: Any, added: set[str], changed: set[str], removed: set[str]) -> list[str]:
    """Name the pages with tables: they are as old as the code, not as their own files."""
    return [name for name in env.found_docs if has_tables(Path(env.doc2path(name)).read_text())]


def setup(app: Any) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("source-read", _fill_in)
    app.connect("env-get-outdated", _outdated)
    for language in _PLAIN:
        app.add_lexer(language, TextLexer)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
