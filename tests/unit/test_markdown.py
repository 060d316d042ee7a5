"""Pages are plain Markdown that code hosts show whole, and their links work there, on the site and in the packages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "_ext"))

import reference  # noqa: E402
import stageout_docs  # noqa: E402

_FOLDERS = (".github", "condor_config.d", "docs", "examples", "plugins")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in _FOLDERS for page in (ROOT / folder).rglob("*.md"))])

#: Markup that only MyST or Sphinx understands, alerts, which only code hosts understand, and links that no test reads.
_FOREIGN = {
    "directive": r"^ *(?:`{3,}|~{3,}|:{3,}) *\{",
    "colon fence": r"^ *:{3,} *\w*$",
    "role": r"\{[a-z][\w:.+-]*\}`",
    "attributes": r"(?<=[\])`])\{[#.][^}\n]*\}|^\{[#.][^}\n]*\}$",
    "target": r"^\([\w-]+\)=$",
    "definition": r"^: +\S",
    "field": r"^:[a-z][\w-]*:(?: |$)",
    "comment": r"^%(?: |$)",
    "break": r"^\+\+\+",
    "substitution": r"\{\{ *\w+ *\}\}",
    "reference": r"(?:\]\(|<)(?:inv|project|path|doc):",
    "link at another place": r"^\[[^\]]+\]: +(?!https?:)\S",
    "link without text": r"(?<!!)\[\]\(",
    "alert": r"^> *\[!\w+\]",
    "front matter": r"\A---\n",
}
_BLOCK = re.compile(r"^( *)(```+)([^\n]*)\n.*?^\1\2$", re.M | re.S)


def foreign(text: str) -> set[str]:
    """Return the kinds of markup in a page that a code host would not show as the site does."""
    heads = _BLOCK.sub(r"\1\2\3", text)
    plain = re.sub(r"(?<!`)(`+)(?!`)[^\n]*?(?<!`)\1(?!`)", "``", heads)
    return {kind for kind, form in _FOREIGN.items() if re.search(form, plain, re.M)}


def anchors(text: str) -> set[str]:
    """Return the anchors of a page: those that it names, and those that code hosts make of its headings."""
    prose = _BLOCK.sub("", text)
    found = set(re.findall(r'<a id="([^"]+)"></a>', prose))
    for heading in re.findall(r"^#+ (.+)$", prose, re.M):
        name = re.sub(r"[^\w -]", "", re.sub(r"\]\([^)]*\)", "]", heading).lower()).replace(" ", "-")
        copies = sum(1 for other in found if re.fullmatch(rf"{re.escape(name)}(?:-\d+)?", other))
        found.add(f"{name}-{copies}" if name in found else name)
    return found


def dead(page: Path) -> list[str]:
    """Return the links of a page, relative to it, to files or anchors that do not exist."""
    text = stageout_docs.without_code(page.read_text())
    found = []
    for path, _, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(#([^)\s]+))?\)", text):
        other = page.parent / path if path else page
        if not other.exists() or (anchor and anchor not in anchors(other.read_text())):
            found.append(f"{path}#{anchor}" if anchor else path)
    return found


def names(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_a_code_host_shows_the_whole_page(page: Path) -> None:
    assert foreign(page.read_text()) == set()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("directive", "Text\n\n```{toctree}\nuser/dags\n```\n"),
        ("directive", ":::{note}\nText\n:::\n"),
        ("colon fence", "::: note\nText\n:::\n"),
        ("role", "The {term}`spool` is full."),
        ("role", "See {py:class}`~stageout.jobs.Job`."),
        ("attributes", "| [`STAGEOUT_SPOOL`]{#stageout-spool} | text |"),
        ("attributes", "{#here}\n# Heading\n"),
        ("target", "(stageout-wait)=\n## wait\n"),
        ("definition", "`--json`\n: Print JSON.\n"),
        ("field", ":orphan:\n"),
        ("comment", "% not shown\n"),
        ("break", "+++\n"),
        ("substitution", "Version {{ version }}"),
        ("reference", "[manual](inv:htcondor:std:doc#users-manual/file-transfer)"),
        ("reference", "<project:#spool>"),
        ("link at another place", "See the [spool].\n\n[spool]: spool.md\n"),
        ("link without text", "[](spool.md)"),
        ("alert", "> [!NOTE]\n> Text\n"),
        ("front matter", "---\ntitle: Spool\n---\n"),
    ],
)
def test_markup_that_a_code_host_does_not_show_is_found(kind: str, text: str) -> None:
    assert kind in foreign(text)


@pytest.mark.parametrize(
    "text",
    [
        "`{term}` and ``{a}`b` `` in program text",
        "```yaml\n- name: {{ item }}\n: no\n```\n",
        "| `{ap,ep}` | [spool](spool.md#size) |",
        "![picture](a.png), <https://example.org>, <!-- comment -->\n\n---\n",
        "1. Text:\n\n   ```console\n   # stageout doctor\n   ```\n",
    ],
)
def test_plain_markup_is_not_found(text: str) -> None:
    assert foreign(text) == set()


def swallowed(text: str) -> list[str]:
    """Return what a code host hides or draws in a page, although it is meant as text.

    Those are HTML but for comments and anchors, tables that are none, and pairs of dollar signs (formulas).
    """
    found = []
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        inside = [token, *(token.children or [])]
        html = [part.content.strip() for part in inside if part.type in ("html_block", "html_inline")]
        found += [part for part in html if not re.fullmatch(r'<!--.*-->|<a id="[\w-]+">|</a>', part, re.S)]
        if token.type == "inline":
            found += [
                part.content for part in inside if part.type == "text" and re.match(r"\|[ :|-]+\|$", part.content)
            ]
            plain = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)|\\\$", "", token.content)
            found += re.findall(r"\$[^\s$](?:[^$]*[^\s$])?\$(?![\d$])", plain)
    return found


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_a_code_host_swallows_no_text(page: Path) -> None:
    assert swallowed(page.read_text()) == []


def test_swallowed_text_is_found() -> None:
    good = '# A\n\n<!-- b -->\n\n| <a id="x-y"></a>`<X>` | \\<NAME> |\n|---|---|\n| `$(A) $(B)` | \\$(A) \\$(B) |\n'
    assert swallowed(good) == []
    assert swallowed("Set <NAME> and <br> here.") == ["<NAME>", "<br>"]
    assert swallowed("Text\n\n| a | b |\n| --- |\n") == ["| --- |"]
    assert swallowed("In $(SPOOL)/$(NAME).") == ["$(SPOOL)/$"]


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert dead(page) == []


def test_dead_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text(
        '# A *b*: `c_d`\n\n## Same\n\n## Same\n\n| <a id="x-y"></a>`X_Y` |\n\n```\n# code\n```\n'
    )
    page = tmp_path / "a.md"
    good = "[1](b.md) [2](b.md#a-b-c_d) [3](b.md#same-1) [4](b.md#x-y) [5](#here) `[6](c.md)` [7](https://x.org/#a)"
    page.write_text(f"# Here\n\n{good}\n")
    assert dead(page) == []
    page.write_text("# Here\n\n[1](c.md) [2](b.md#same-2) [3](b.md#code) [4](#there) ![5](c.png)\n")
    assert dead(page) == ["c.md", "b.md#same-2", "b.md#code", "#there", "c.png"]


_NAMED = re.compile(r"\bdocs/[\w./-]+\.md(?:#[\w-]+)?")
_NAMING = (
    "condor_config.d", "examples", "overlay_router", "plugins", "policy_service", "sandbox_manager", "schedd_agent",
    "stageout", "stageout_web", "tools",
)  # fmt: skip


@pytest.mark.parametrize("folder", _NAMING)
def test_pages_that_messages_and_comments_name_exist(folder: str) -> None:
    kinds = (".conf", ".html", ".js", ".py", ".sh", ".yml")
    texts = [path.read_text() for path in (ROOT / folder).rglob("*") if path.suffix in kinds]
    assert nowhere({name for text in texts for name in _NAMED.findall(text)}) == set()


def nowhere(named: set[str]) -> set[str]:
    """Return the pages, or their sections, that do not exist."""
    parts = {name: name.partition("#") for name in named}
    return {
        name
        for name, (path, _, anchor) in parts.items()
        if not (ROOT / path).exists() or (anchor and anchor not in anchors((ROOT / path).read_text()))
    }


def test_a_name_of_no_page_is_found() -> None:
    assert _NAMED.findall("(docs/user/dags.md) docs/user/dags.md#none.") == [
        "docs/user/dags.md",
        "docs/user/dags.md#none",
    ]
    assert nowhere({"docs/faq.md", "docs/user/dags.md#none", "docs/none.md"}) == {
        "docs/user/dags.md#none",
        "docs/none.md",
    }


@pytest.mark.parametrize("page", [page for page in PAGES if reference.END in page.read_text()], ids=names)
def test_tables_are_those_of_the_code(page: Path) -> None:
    text = page.read_text()
    assert text == reference.fill(text), "the code has changed: 'make reference' prints the tables anew"


def test_each_table_has_an_end() -> None:
    for page in PAGES:
        text = page.read_text()
        assert text.count("\n<!-- reference: ") == text.count(f"\n{reference.END}\n"), page


def test_an_old_table_is_found() -> None:
    page = reference.fill(f"# Page\n\n<!-- reference: exit-statuses -->\n{reference.END}\n\nText.\n")
    assert "| 64 |" in page
    assert reference.fill(page) == page
    assert reference.fill(page.replace("| 64 |", "| 65 |")) == page
    assert reference.written(page) == "# Page\n\n\n\nText.\n"


# ---- links that leave the documents ----------------------------------------------------------------------------------


def bare_paths(text: str) -> list[str]:
    """Return the files of the repository that a page names without a link."""
    prose = _BLOCK.sub("", text)
    found = re.findall(r"(?<!\[)`((?:examples|condor_config\.d|plugins|tools/packages)/[^`\s]*)`", prose)
    return [path for path in found if (ROOT / path).exists()]


@pytest.mark.parametrize("folder", ["start", "user", "administrator", "pilot", "plugin", "overlay", "reference"])
def test_files_that_pages_name_are_linked(folder: str) -> None:
    pages = [DOCS / "faq.md", DOCS / "glossary.md", *(DOCS / folder).glob("*.md")]
    assert {names(page): paths for page in pages if (paths := bare_paths(page.read_text()))} == {}


def test_a_file_without_a_link_is_found() -> None:
    text = "`examples/merge.sub` [`examples/`](../examples/) `examples/none`\n\n```\n`plugins/`\n```\n"
    assert bare_paths(text) == ["examples/merge.sub"]


def test_the_sdist_has_each_file_to_which_a_page_links() -> None:
    manifest = (ROOT / "MANIFEST.in").read_text()
    folders, files = re.findall(r"^graft (\S+)$", manifest, re.M), re.findall(r"^include (.+)$", manifest, re.M)
    patterns = " ".join(files).split()
    linked = stageout_docs.linked_files(DOCS, list(DOCS.rglob("*.md")))
    assert {"examples", "condor_config.d"} <= {path.relative_to(ROOT).parts[0] for path in linked}
    for path in linked:
        first = path.relative_to(ROOT).parts[0]
        assert first in folders or any(Path(first).match(pattern) for pattern in patterns), path


def site(folder: Path, pages: dict[str, str]) -> str:
    """Build a small site with our configuration below a folder that stands for the repository.

    :returns: the warnings.
    """
    docs = folder / "docs"
    docs.mkdir(exist_ok=True)
    for name, text in pages.items():
        (docs / name).parent.mkdir(parents=True, exist_ok=True)
        (docs / name).write_text(text)
    settings = f"import sys\nsys.path[:0] = [{str(ROOT)!r}]\nexec(open({str(DOCS / 'conf.py')!r}).read())\n"
    (docs / "conf.py").write_text(f"__file__ = {str(DOCS / 'conf.py')!r}\n{settings}")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(docs), str(folder / "out")]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_the_site_has_copies_of_the_files_to_which_it_links(tmp_path: Path) -> None:
    for name in ("alerts.yml", "pilot/start.sh", "pilot/README.md"):
        (tmp_path / "examples" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "examples" / name).write_text(f"text of {name}")
    readme = "# Pilots\n\n[page](../../docs/user/one.md#x-y), [box](../box/README.md), [c](../c.sub), [me](start.sh)\n"
    (tmp_path / "examples/pilot/README.md").write_text(readme)
    (tmp_path / "examples/box").mkdir()
    (tmp_path / "examples/box/README.md").write_text("# Box\n")
    (tmp_path / "examples/c.sub").write_text("queue\n")
    page = "# Page\n\n[alerts](../../examples/alerts.yml), [pilots](../../examples/pilot/README.md), `[no](../none)`\n"
    page += '\n| a | b | c |\n|---|---|---|\n| <a id="x-y"></a>`X_Y` | 2 | --json |\n'
    index = "# Index\n\n[one](user/one.md#x-y) [old](old.html)\n\n## User\n\n- [One](user/one.md)\n"
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/old.html").write_text('<a href="none.html">')
    assert site(tmp_path, {"index.md": index, "user/one.md": page}) == ""
    out = tmp_path / "out"
    html = (out / "user/one.html").read_text()
    assert 'href="../files/examples/alerts.yml"' in html
    assert 'href="../files/examples/pilot/index.html"' in html
    assert (out / "files/examples/alerts.yml").read_text() == "text of alerts.yml"
    index = (out / "files/examples/pilot/index.html").read_text()
    assert "<h1>Pilots</h1>" in index
    assert re.findall('href="(.*?)"', index) == [
        "../../../user/one.html#x-y", "../box/index.html", "../c.sub", "start.sh", "README.md", "start.sh"
    ]  # fmt: skip
    assert 'href="files/docs/old.html"' in (out / "index.html").read_text()
    assert 'href="user/one.html#x-y"' in (out / "index.html").read_text()
    assert 'id="x-y"' in html
    assert '<span class="column-head">c: </span>--json' in html
    assert '<p class="caption' in html, "the contents of the index are the navigation"
    assert list(stageout_docs.dead_links(out)) == []
    (out / "files/examples/alerts.yml").unlink()
    assert list(stageout_docs.dead_links(out)) == [(out / "user/one.html", "../files/examples/alerts.yml")]


def test_a_link_that_leaves_the_repository_or_leads_nowhere_is_a_warning(tmp_path: Path) -> None:
    text = "# Index\n\n[a](../examples/none.yml) [b](../../b.txt) [c](none.md) [d](#none)\n"
    (tmp_path.parent / "b.txt").write_text("")
    warnings = site(tmp_path, {"index.md": text})
    assert "../examples/none.yml: no such file" in warnings
    assert "../../b.txt: not in the repository" in warnings
    assert "'none.md'" in warnings
    assert "'none'" in warnings
