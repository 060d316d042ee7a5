"""Sphinx extension: build the site from pages that are plain Markdown.

The pages have no directives and no roles, because code hosts show them as they are. This extension adds three things
from what the pages have anyway: tables of contents from lists of links, anchors from ``<a id="...">``, and copies of
the files of the repository to which pages link. The site then needs no file beside it. Links to pages of the other book
(``books.py``) are resolved here, because Sphinx knows the pages of one book only.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from books import USERS, Book, book_of
from docutils import nodes
from markdown_it import MarkdownIt
from pygments.lexers.special import TextLexer
from sphinx.util import logging
from sphinx.util.osutil import relative_uri

#: Scheme of links to files of the repository and to pages of the other book, until the address of each page is known.
SCHEME = "repository"
#: Folder of the site with copies of these files.
FILES = "files"
#: Pages whose lists of links are the tables of contents.
CONTENTS = ("index", "decisions")

#: Languages of code blocks that Pygments does not know.
_PLAIN = ("dag", "mermaid")
_LOG = logging.getLogger(__name__)
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)#\s]+)")
_ANCHOR = re.compile(r'<a id="([^"]+)"></a>(`[^`]+`|\*\*[^*]+\*\*)')
_ENTRY = re.compile(r"^(?:- |\| )\[[^\]]+\]\(([^)#:\s]+)\.md\)", re.M)
_CODE = re.compile(r"^( *)(```+)[^\n]*\n.*?^\1\2$|(`+)(?!`)(?:(?!\n\s*\n).)+?(?<!`)\3(?!`)", re.M | re.S)
_IMAGE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
_ADDRESS = re.compile(r'(?:href|src)="([^"]+)"')


def links(text: str) -> Iterator[re.Match[str]]:
    """Yield the links of a page that lead to a file: neither those in program text nor images."""
    hidden = re.sub(_IMAGE, lambda found: " " * len(found[0]), without_code(text))
    return _LINK.finditer(hidden)


def without_code(text: str) -> str:
    """Return a page with blanks in the place of its program text."""
    return _CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def outside(page: Path, target: str, docs: Path) -> Path | None:
    """Return the file or folder of the repository to which a page links; None when it is another page.

    A link to the README of a folder is one to the folder, whose index shows it.
    """
    path = (page.parent / unquote(target)).resolve()
    if path.suffix == ".md" and docs in path.parents:
        return None
    return path.parent if path.name == "README.md" and docs.parent in path.parent.parents else path


def _folders(app: Any) -> tuple[Book, Path, Path]:
    """Return the book that is built, the folder of all pages, and the folder of the whole site."""
    docs = Path(app.confdir)
    book = book_of(Path(app.srcdir) / "index.md", docs)
    return book, docs, Path(app.outdir) if book is USERS else Path(app.outdir).parent


def _name_book(app: Any, config: Any) -> None:
    """Give the site the title of its book."""
    config.html_title = f"{_folders(app)[0].title} {config.release}"


def _prepare(app: Any, name: str, source: list[str]) -> None:
    """Prepare the text of one page for MyST."""
    book, docs, _ = _folders(app)
    page, text = Path(app.env.doc2path(name)), source[0]
    for link in reversed(list(links(text))):
        path = outside(page, link[1], docs)
        if path is None:
            path = (page.parent / unquote(link[1])).resolve()
            if book_of(path, docs) is book:
                continue
        if not path.exists():
            _LOG.warning("%s: no such file", link[1], location=name)
        elif docs.parent not in path.parents:
            _LOG.warning("%s: not in the repository", link[1], location=name)
        else:
            end = "/" if path.is_dir() else ""
            text = f"{text[: link.start()]}{SCHEME}:{path.relative_to(docs.parent)}{end}{text[link.end() :]}"
    source[0] = _ANCHOR.sub(r"[\2]{#\1}", text)
    if name in CONTENTS:
        source[0] += contents(text)


def contents(text: str) -> str:
    """Return tables of contents for MyST: one for each section with a list, or a table, that begins with links."""
    made = []
    for section in re.split(r"^## ", text, flags=re.M):
        head = "" if section is text or section.startswith("# ") else section.partition("\n")[0]
        if entries := _ENTRY.findall(section):
            caption = f":caption: {head}\n" if head else ""
            made.append(f"\n\n```{{toctree}}\n:hidden:\n{caption}\n" + "\n".join(entries) + "\n```\n")
    return "".join(made)


def _name_anchors(app: Any, tree: nodes.document) -> None:
    """Let links of other pages lead to the anchors, as to headings."""
    slugs = app.env.metadata[app.env.docname].setdefault("myst_slugs", {})
    for place in tree.findall(nodes.inline):
        for name in place["ids"]:
            slugs.setdefault(name, (place.line or 0, name, place.astext()))


def _resolve(app: Any, tree: nodes.document, name: str) -> None:
    """Point links to the copies and to the other book, and label the cells of wide tables for narrow screens."""
    book, docs, _ = _folders(app)
    here = f"{book.folder}/{app.builder.get_target_uri(name)}".lstrip("/")
    for link in tree.findall(nodes.reference):
        scheme, _, rest = link.get("refuri", "").partition(":")
        if scheme == SCHEME:
            path, mark, anchor = rest.partition("#")
            link["refuri"] = relative_uri(here, _address(docs.parent / path, docs, is_folder=path.endswith("/")))
            link["refuri"] += mark + anchor
            link["internal"] = True
    for table in tree.findall(nodes.table):
        _label(table)


def _address(path: Path, docs: Path, *, is_folder: bool) -> str:
    """Return where the site has a page, or a file or folder of the repository."""
    if path.suffix == ".md" and docs in path.parents:
        return path.relative_to(docs).with_suffix(".html").as_posix()
    return f"{FILES}/{path.relative_to(docs.parent)}" + ("/index.html" if is_folder else "")


def _label(table: nodes.table) -> None:
    """Write the head of its column before each cell; the style sheet shows it where a row is a block."""
    heads = [cell.astext() for head in table.findall(nodes.thead) for cell in head.findall(nodes.entry)]
    if len(heads) < 3:
        return
    table["classes"].append("wide")
    for body in table.findall(nodes.tbody):
        for row in body.findall(nodes.row):
            for head, cell in zip(heads, row.findall(nodes.entry)):
                if cell.astext() and isinstance(cell[0], nodes.paragraph):
                    cell[0].insert(0, nodes.inline("", f"{head}: ", classes=["column-head"]))


def _finish(app: Any, problem: Exception | None) -> None:
    """Copy the files to which pages link, and name each link of the site that leads nowhere."""
    if problem or app.builder.format != "html":
        return
    book, docs, site = _folders(app)
    for path in linked_files(docs, [Path(app.env.doc2path(name)) for name in app.env.found_docs]):
        _copy(path, site, docs)
    for page, address in dead_links(site) if book is USERS else ():  # its links lead to the other book, too
        _LOG.warning("%s: its link to %s leads nowhere", page.relative_to(site), address)


def linked_files(docs: Path, pages: Iterable[Path]) -> list[Path]:
    """Return the files and folders of the repository to which pages link, and those to which their READMEs link."""
    found: set[Path] = set()
    waiting = list(pages)
    while waiting:
        page = waiting.pop()
        paths = {outside(page, link[1], docs) for link in links(page.read_text())} - found
        new = {path for path in paths if path and path.exists() and docs.parent in path.parents}
        found |= new
        waiting += [path / "README.md" for path in new if (path / "README.md").is_file()]
    return sorted(found)


def _copy(path: Path, site: Path, docs: Path) -> None:
    """Copy a file, or a folder with an index: its README, and a list of its files."""
    target = site / FILES / path.relative_to(docs.parent)
    if path.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        return
    shutil.copytree(path, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    readme = path / "README.md"
    text = _for_site(readme, site, docs) if readme.is_file() else f"# {path.name}\n"
    names = sorted(each.relative_to(path).as_posix() for each in path.rglob("*") if each.is_file())
    rows = [f"- [{name}]({quote(name)})" for name in names if (target / name).is_file()]
    body = MarkdownIt("commonmark").enable("table").render("\n".join([text, "## Files", "", *rows, ""]))
    head = f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{path.name}</title></head>\n'
    (target / "index.html").write_text(f"{head}<body>\n{body}</body>\n</html>\n")


def _for_site(readme: Path, site: Path, docs: Path) -> str:
    """Text of a README whose links lead to the pages of the site and to the copies."""
    text, here = readme.read_text(), site / FILES / readme.parent.relative_to(docs.parent)
    for link in reversed(list(links(text))):
        path = outside(readme, link[1], docs)
        path = path or (readme.parent / link[1]).resolve()
        there = site / _address(path, docs, is_folder=path.is_dir())
        text = text[: link.start()] + os.path.relpath(there, here) + text[link.end() :]
    return text


def dead_links(site: Path) -> Iterator[tuple[Path, str]]:
    """Yield page and address of each link of a built site to a file that it does not have."""
    known: dict[Path, bool] = {}
    copies = set((site / FILES).rglob("*.html")) - set((site / FILES).rglob("index.html"))
    for page in sorted(set(site.rglob("*.html")) - copies):
        for address in sorted(set(_ADDRESS.findall(page.read_text(errors="replace")))):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc or not parts.path:
                continue
            path = page.parent / unquote(parts.path)
            if path not in known:
                known[path] = path.is_file()
            if not known[path]:
                yield page, address


def setup(app: Any) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("config-inited", _name_book)
    app.connect("source-read", _prepare)
    app.connect("doctree-read", _name_anchors)
    app.connect("doctree-resolved", _resolve)
    app.connect("build-finished", _finish)
    app.add_css_file("narrow.css")
    for language in _PLAIN:
        app.add_lexer(language, TextLexer)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
