"""The site: both books build without a warning, each with its own search, and their references are complete."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import snowballstemmer

import stageout.jobs
import stageout.overlay
import stageout.plugin.api
import stageout.testing
from stageout.cli.main import build_parser
from stageout.core.config import KNOBS
from stageout.core.errors import ErrorClass
from stageout.core.metrics import METRICS
from stageout.core.reasons import HOLD_SUBCODE_BASE, REFUSALS
from tests.shown import shown_calls
from tests.unit.test_cli_docs import _understood as understood

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "_ext"))

import books  # noqa: E402
import programs  # noqa: E402
import reference  # noqa: E402

_FOLDERS = (
    "start", "user", "administrator", "pilot", "plugin", "overlay", "developer", "reference", "explanation",
)  # fmt: skip
_SINGLE = [ROOT / "README.md", DOCS / "index.md", DOCS / "faq.md", DOCS / "glossary.md"]
PAGES = [*_SINGLE, *sorted(path for folder in _FOLDERS for path in (DOCS / folder).glob("*.md"))]
MOST_WORDS = 1500
#: Tables in which readers look something up, and records of measurements: as long as they need to be.
LONG = {
    *(DOCS / "developer" / name for name in ("benchmarks.md", "curl-compared.md", "durable-steps.md", "wire.md")),
}
SHORT = [page for page in PAGES if page not in LONG]
#: Pages of the users' book. More than these cannot be looked through: merge pages that readers want together.
MOST_PAGES = 84


class Search:
    """The search of one book, as its page searches: words of titles and texts, without their endings."""

    def __init__(self, folder: Path) -> None:
        text = (folder / "searchindex.js").read_text()
        self._index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
        self.pages: list[str] = self._index["docnames"]

    def find(self, words: str) -> set[str]:
        """Return the pages that have all words."""
        stems = [snowballstemmer.stemmer("english").stemWord(word) for word in words.lower().split()]
        return set.intersection(*(self._having(stem) for stem in stems))

    def _having(self, stem: str) -> set[str]:
        found = [self._index[kind].get(stem, []) for kind in ("terms", "titleterms")]
        numbers = [number for part in found for number in (part if isinstance(part, list) else [part])]
        return {self.pages[number] for number in numbers}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build both books as ``make docs`` does. A wrong link and a page in no table of contents are warnings, too."""
    folder = tmp_path_factory.mktemp("site")
    assert list(books.build(folder / "html", folder / "doctrees")) == []
    return folder / "html"


@pytest.fixture(scope="module")
def searches(built: Path) -> dict[str, Search]:
    return {book.name: Search(built / book.folder) for book in books.BOOKS}


def test_each_search_has_all_pages_of_its_book_and_no_others(searches: dict[str, Search]) -> None:
    ours = {path for path in DOCS.rglob("*.md") if DOCS / "changes" not in path.parents}
    for book in books.BOOKS:
        pages = [path for path in ours if books.book_of(path, DOCS) is book]
        names = {path.relative_to(DOCS / book.folder).with_suffix("").as_posix() for path in pages}
        assert set(searches[book.name].pages) == names


@pytest.mark.parametrize(
    ("words", "page", "other"),
    [
        ("weekend", "user/weekend", "durable-steps"),
        ("factory max_materialize", "user/submit-files", "queue-edits"),
        ("bash script plugin", "plugin/bash", "curl-compared"),
        ("spool quota", "administrator/spool", "security-node"),
        ("custodian", "overlay/custodians", "custodians"),
    ],
)
def test_the_users_search_finds_no_page_of_developers(
    searches: dict[str, Search], words: str, page: str, other: str
) -> None:
    found = searches["users"].find(words)
    assert page in found
    assert other not in found
    assert not [name for name in found if name.startswith("developer")]


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("durable steps", "durable-steps"),
        ("simulator schedules", "overlay-simulator"),
        ("libcurl python decision", "decisions/0054-libcurl-on-python-3-9"),
        ("notebook benchmarks", "benchmarks"),
        ("frame payload", "wire"),
    ],
)
def test_the_developers_search_finds_its_own_pages(searches: dict[str, Search], words: str, page: str) -> None:
    assert page in searches["developers"].find(words)


def test_the_books_link_to_each_other(built: Path) -> None:
    assert 'href="developer/index.html"' in (built / "index.html").read_text()
    assert 'href="../index.html"' in (built / "developer/index.html").read_text()
    assert 'href="../administrator/kinds.html#the-oldest-htcondor"' in (built / "developer/kinds.html").read_text()
    assert 'href="../developer/overlay.html"' in (built / "overlay/concepts.html").read_text()


def test_the_users_book_can_be_looked_through() -> None:
    pages = [path for path in DOCS.rglob("*.md") if books.book_of(path, DOCS) is books.USERS]
    assert len([path for path in pages if DOCS / "changes" not in path.parents]) <= MOST_PAGES


def test_a_wrong_link_is_a_warning(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    (docs / "developer").mkdir(parents=True)
    (docs / "conf.py").write_text('extensions = ["myst_parser"]\nnitpicky = True\nmyst_heading_anchors = 4\n')
    (docs / "index.md").write_text("# Page\n\n[there](#page) [nowhere](other.md)\n")
    (docs / "developer/index.md").write_text("# Page\n")
    (warnings,) = books.build(tmp_path / "html", tmp_path / "doctrees", "dummy", docs)
    assert "other.md" in warnings
    assert "#page" not in warnings


def test_each_page_lies_in_the_folder_of_its_reader() -> None:
    assert {page.name for page in DOCS.glob("*.md")} == {page.name for page in _SINGLE} - {"README.md"}
    assert [page.name for page in PAGES if page.name != page.name.lower() and page.name != "README.md"] == []


def test_every_knob_is_in_the_reference() -> None:
    page = (DOCS / "reference/knobs.md").read_text()
    assert not [name for name in KNOBS if f"</a>`{name}`" not in page]


def test_every_code_is_in_the_reference() -> None:
    holds = (DOCS / "reference/hold-codes.md").read_text()
    reasons = (DOCS / "user/synchronous.md").read_text()
    assert not [kind for kind in ErrorClass if f"</a>**{HOLD_SUBCODE_BASE + kind.code}**" not in holds]
    assert not [kind for kind in ErrorClass if f"`{kind.name}`" not in holds]
    assert not [code for code in REFUSALS if f"| `{code}` |" not in reasons]


def test_every_decision_is_in_the_index() -> None:
    index = (DOCS / "developer/decisions.md").read_text()
    rows = re.findall(r"^\| \[(\d{4})\]\(decisions/(.+?)\) \| .+ \| (.+?) \| \d{4}-\d\d-\d\d \|$", index, re.M)
    assert [name for _, name, _ in rows] == sorted(page.name for page in (DOCS / "developer/decisions").glob("*.md"))
    later = {number: status.removeprefix("superseded by ") for number, _, status in rows if status != "accepted"}
    assert not {number for number, other in later.items() if other <= number or other not in [row[0] for row in rows]}


def test_a_decision_without_a_status_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "docs/developer/decisions/0001-boxes.md"
    page.parent.mkdir(parents=True)
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    page.write_text("# 0001. Boxes\n\nStatus: accepted\nDate: 2026-11-21\n\n## Context\n")
    assert "| [0001](decisions/0001-boxes.md) | Boxes | accepted | 2026-11-21 |" in reference.decisions("")
    page.write_text("# 0001. Boxes\n\n## Context\n")
    with pytest.raises(ValueError, match=r"0001-boxes\.md: begin with"):
        reference.decisions("")


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('log.event("box-opened", size=1, **more)', [("box-opened", "INFO", ["size"])]),
        ('log.error("box-broken")', [("box-broken", "ERROR", [])]),
        ('log.event("box-shut", logging.ERROR)', [("box-shut", "ERROR", [])]),
        ('log.warn("drop" if late else "deliver")', [("drop", "WARNING", []), ("deliver", "WARNING", [])]),
        ('name = "going" if late else "gone"\nlog.event(name)', [("going", "INFO", []), ("gone", "INFO", [])]),
        ('print("box-opened")', []),
    ],
)
def test_how_events_are_found(code: str, found: list[tuple[str, str, list[str]]]) -> None:
    assert list(reference.events_in(ast.parse(code))) == found


@pytest.mark.parametrize("program", programs.PROGRAMS)
def test_every_option_is_in_the_reference(program: str) -> None:
    page = program if program == "stageout" else "daemons"
    text = (DOCS / "reference" / f"{page}.md").read_text().partition(f"# `{program}`\n")[2]
    text = text.partition(reference.END)[0] if page == "daemons" else text
    parser = programs.parser_of(program)
    for each in [parser, *programs.parsers_of_commands(parser).values()]:
        shown = [action for action in each._actions if action.help != argparse.SUPPRESS]
        words = {word for action in shown for word in action.option_strings} - {"-h", "--help"}
        assert not [word for word in words if f"`{word}" not in text], each.prog


def unknown_verbs(text: str) -> list[str]:
    """Words behind ``stageout`` in program text that are no commands."""
    commands = programs.parsers_of_commands(build_parser())
    return [word for word in re.findall(r"`(?:/\S*/)?stageout ([a-z]+)", text) if word not in commands]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_that_are_shown_exist(page: Path) -> None:
    text = page.read_text()
    assert not unknown_verbs(text)
    for call in shown_calls(text):
        assert understood(call), call


def test_a_command_that_does_not_exist_is_found() -> None:
    assert unknown_verbs("`stageout retri JOB`, `stageout wait JOB`") == ["retri"]
    (call,) = shown_calls("```console\n$ stageout status --wach\n12.0  alice\n$ condor_q\n```")
    with pytest.raises(SystemExit):
        build_parser().parse_args(shlex.split(call))


@pytest.mark.parametrize("page", SHORT, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_are_short(page: Path) -> None:
    assert len(reference.written(page.read_text()).split()) <= MOST_WORDS


def test_metrics_are_in_the_reference() -> None:
    page = (DOCS / "reference/metrics.md").read_text()
    assert not [name for name in METRICS if f"| `{name}` |" not in page]
    page = (DOCS / "reference/daemons.md").read_text()
    assert "| `stageout_policy_streams_granted` | gauge |" in page


def test_the_python_interface_is_in_the_reference() -> None:
    page = (DOCS / "reference/python.md").read_text()
    offered = [stageout.plugin, stageout.plugin.api, stageout.overlay, stageout.jobs]
    offered += [importlib.import_module(f"stageout.testing.{name}") for name in stageout.testing.__all__]
    names = [name for module in offered for name in module.__all__]
    assert not [module.__name__ for module in offered if f"`{module.__name__}`" not in page]
    assert not [name for name in names if f"### `{name}`" not in page]
