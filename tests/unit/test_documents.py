"""The site: it builds without a warning, its references are complete, and the commands that it shows exist."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import stageout.overlay
import stageout.plugin.api
from schedd_agent.model import HOLD_SUBCODE_BASE
from stageout.cli.main import build_parser
from stageout.core.config import KNOBS
from stageout.core.errors import ErrorClass
from stageout.core.synchronous import CAUSES
from tests.unit.test_cli_docs import _understood as understood

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "_ext"))

import reference  # noqa: E402

#: Pages that were written for the site. Older ones, in the folder itself, have tests of their own.
_FOLDERS = ("start", "user", "administrator", "pilot", "developer", "reference", "explanation")
_SINGLE = [ROOT / "README.md", DOCS / "index.md", DOCS / "faq.md", DOCS / "glossary.md"]
PAGES = [*_SINGLE, *sorted(path for folder in _FOLDERS for path in (DOCS / folder).glob("*.md"))]
MOST_WORDS = 1500


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
    """Links, headings and generated tables are checked by Sphinx; a page in no table of contents is a warning, too."""
    assert build(DOCS, tmp_path, "dummy", "man") == ""
    assert ".TH" in (tmp_path / "man/stageout.1").read_text()


def test_a_wrong_link_is_a_warning(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "conf.py").write_text('extensions = ["myst_parser"]\nnitpicky = True\nmyst_heading_anchors = 4\n')
    (docs / "index.md").write_text("# Page\n\n[there](#page) [nowhere](other.md)\n")
    warnings = build(docs, tmp_path, "dummy")
    assert "other.md" in warnings
    assert "#page" not in warnings


def test_every_knob_is_in_the_reference() -> None:
    page = reference.fill((DOCS / "reference/knobs.md").read_text())
    assert not [name for name in KNOBS if f"[`{name}`]" not in page]


def test_every_code_is_in_the_reference() -> None:
    holds = reference.fill((DOCS / "reference/hold-codes.md").read_text())
    errors = reference.fill((DOCS / "reference/error-codes.md").read_text())
    reasons = reference.fill((DOCS / "reference/reasons.md").read_text())
    assert not [kind for kind in ErrorClass if f"[**{HOLD_SUBCODE_BASE + kind.code}**]" not in holds]
    assert not [kind for kind in ErrorClass if f"`{kind.name}`" not in errors]
    assert not [cause.code for cause in CAUSES if f"[`{cause.code}`]" not in reasons]


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
    assert list(reference.events_in(code)) == found


@pytest.mark.parametrize("program", reference.PROGRAMS)
def test_every_option_is_in_the_reference(program: str) -> None:
    page = (DOCS / "reference" / f"{program}.md").read_text()
    text = reference.fill(page)
    parser = reference.parser_of(program)
    for each in [parser, *reference.commands(parser).values()]:
        shown = [action for action in each._actions if action.help != argparse.SUPPRESS]
        words = {word for action in shown for word in action.option_strings} - {"-h", "--help"}
        assert not [word for word in words if f"`{word}" not in text], each.prog


def shown_calls(text: str) -> Iterator[str]:
    """Calls of ``stageout`` in console blocks, without the program's name."""
    for block in re.findall(r"^ *```console\n(.*?)^ *```$", text, re.S | re.M):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.match(r"\s*[$#] (?:/\S*/)?stageout ([a-z].*)", line)
            if found:
                yield found[1].split(" | ")[0].split(" && ")[0]


def unknown_verbs(text: str) -> list[str]:
    """Words behind ``stageout`` in program text that are no commands."""
    commands = reference.commands(build_parser())
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


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_are_short(page: Path) -> None:
    assert len(page.read_text().split()) <= MOST_WORDS


def test_metrics_are_in_the_reference() -> None:
    page = reference.fill((DOCS / "reference/policy-service-http.md").read_text())
    assert "| `stageout_policy_streams_granted` | gauge |" in page


def test_the_python_interface_is_in_the_reference() -> None:
    page = reference.fill((DOCS / "reference/python.md").read_text())
    names = [*stageout.plugin.__all__, *stageout.plugin.api.__all__, *stageout.overlay.__all__]
    assert not [name for name in names if f"### `{name}`" not in page]
