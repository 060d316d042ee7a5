"""The site: it builds without a warning, its references are complete, and the commands that it shows exist."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import stageout.jobs
import stageout.overlay
import stageout.plugin.api
import stageout.testing
from schedd_agent.model import HOLD_SUBCODE_BASE
from stageout.cli.main import build_parser
from stageout.core.config import KNOBS
from stageout.core.errors import ErrorClass
from stageout.core.metrics import METRICS
from stageout.core.synchronous import CAUSES
from tests.shown import shown_calls
from tests.unit.test_cli_docs import _understood as understood

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "_ext"))

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
    DOCS / "developer/benchmarks.md",
    *(DOCS / "reference" / name for name in ("curl-compared.md", "durable-steps.md", "kinds.md", "wire.md")),
}
SHORT = [page for page in PAGES if page not in LONG]


def build(docs: Path, out: Path, *builders: str) -> str:
    """Build, strictly, what ``make docs`` builds; ``dummy`` reads and links the pages without writing them.

    :returns: the warnings, "" when there are none.
    """
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(out / "doctrees"), "-b"]
    for builder in builders:
        built = [*command, builder, str(docs), str(out / builder)]
        done = subprocess.run(built, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            return done.stderr
    return ""


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Sphinx checks links and headings; a page in no table of contents is a warning, too."""
    assert build(DOCS, tmp_path, "dummy") == ""


def test_a_wrong_link_is_a_warning(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "conf.py").write_text('extensions = ["myst_parser"]\nnitpicky = True\nmyst_heading_anchors = 4\n')
    (docs / "index.md").write_text("# Page\n\n[there](#page) [nowhere](other.md)\n")
    warnings = build(docs, tmp_path, "dummy")
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
    errors = (DOCS / "reference/error-codes.md").read_text()
    reasons = (DOCS / "reference/reasons.md").read_text()
    assert not [kind for kind in ErrorClass if f"</a>**{HOLD_SUBCODE_BASE + kind.code}**" not in holds]
    assert not [kind for kind in ErrorClass if f"`{kind.name}`" not in errors]
    assert not [cause.code for cause in CAUSES if f"</a>`{cause.code}`" not in reasons]


def test_every_decision_is_in_the_index() -> None:
    index = (DOCS / "developer/decisions.md").read_text()
    rows = re.findall(r"^\| \[(\d{4})\]\(\.\./decisions/(.+?)\) \| .+ \| (.+?) \| \d{4}-\d\d-\d\d \|$", index, re.M)
    assert [name for _, name, _ in rows] == sorted(page.name for page in (DOCS / "decisions").glob("*.md"))
    later = {number: status.removeprefix("superseded by ") for number, _, status in rows if status != "accepted"}
    assert not {number for number, other in later.items() if other <= number or other not in [row[0] for row in rows]}


def test_a_decision_without_a_status_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "docs/decisions/0001-boxes.md"
    page.parent.mkdir(parents=True)
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    page.write_text("# 0001. Boxes\n\nStatus: accepted\nDate: 2026-11-21\n\n## Context\n")
    assert "| [0001](../decisions/0001-boxes.md) | Boxes | accepted | 2026-11-21 |" in reference.decisions("")
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
    text = (DOCS / "reference" / f"{program}.md").read_text()
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
    page = (DOCS / "reference/policy-service-http.md").read_text()
    assert "| `stageout_policy_streams_granted` | gauge |" in page


def test_the_python_interface_is_in_the_reference() -> None:
    page = (DOCS / "reference/python.md").read_text()
    offered = [stageout.plugin, stageout.plugin.api, stageout.overlay, stageout.jobs]
    offered += [importlib.import_module(f"stageout.testing.{name}") for name in stageout.testing.__all__]
    names = [name for module in offered for name in module.__all__]
    assert not [module.__name__ for module in offered if f"`{module.__name__}`" not in page]
    assert not [name for name in names if f"### `{name}`" not in page]
