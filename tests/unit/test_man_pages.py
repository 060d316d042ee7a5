"""Each program and each command has a man page with the usual sections, which readers of man pages understand."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stageout.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "_ext"))

import man  # noqa: E402
import programs  # noqa: E402

SECTIONS = ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXIT STATUS", "FILES", "SEE ALSO"]
PAGES = dict(man.pages())
#: Programs that lay out man pages: what each prints for a page is read here.
READERS = {
    "man": ("man", "-l"),
    "groff": ("groff", "-man", "-Tutf8", "-rLL=100n", "-P-cbou"),
    "mandoc": ("mandoc", "-Owidth=100"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("man")
    (out / "stageout-gone.1").write_text("")
    man.main(str(out))
    return out


def plain(reader: str, page: Path) -> str:
    """A page as a reader prints it, without overstrikes and with single blanks."""
    if not shutil.which(reader):
        pytest.skip(f"{reader} is not installed")
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "MANWIDTH": "100", "MANPAGER": "cat", "GROFF_NO_SGR": "1"}
    command = [*READERS[reader], str(page)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stderr == ""
    text = re.sub(r"\x1b\[[0-9;]*m", "", re.sub(r".\x08", "", done.stdout))
    return re.sub(r" +", " ", text)


def section(text: str, title: str) -> str:
    """The lines of a printed section."""
    found = re.search(rf"^{title}\n(.*?)(?=^\S|\Z)", text, re.M | re.S)
    assert found, title
    return found[1]


def test_each_program_and_each_command_has_a_page(folder: Path) -> None:
    names = {f"stageout-{name}.1" for name in [*COMMANDS, "help"]} | {"stageout.1"}
    names |= {f"{name}.8" for name in programs.PROGRAMS if name != "stageout"}
    assert {page.name for page in folder.iterdir()} == names == set(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_pages_have_the_usual_sections(name: str) -> None:
    titles = re.findall(r"^\.SH (.+)$", PAGES[name], re.M)
    assert [title for title in titles if title not in ("COMMANDS", "OPERANDS")] == SECTIONS
    for title, text in zip(titles, re.split(r"^\.SH .+\n", PAGES[name], flags=re.M)[1:]):
        assert text.strip(), title


@pytest.mark.parametrize("name", PAGES)
def test_pages_that_are_named_exist(name: str) -> None:
    seen = re.findall(r"^\.BR (\S+) \(([18])\)", PAGES[name], re.M)
    named = {f"{page}.{number}".replace("\\-", "-") for page, number in seen}
    assert named
    assert named <= set(PAGES) - {name}
    for document in re.findall(r"docs/\S+\.md", PAGES[name].replace("\\-", "-")):
        assert (ROOT / document).exists(), document


@pytest.mark.parametrize("reader", READERS)
def test_each_status_stands_beside_its_sentence(folder: Path, reader: str) -> None:
    text = section(plain(reader, folder / "stageout-wait.1"), "EXIT STATUS")
    rows = {code: " ".join(meaning.split()) for code, meaning in re.findall(r"^ (\d+) ((?:.+\n)+)", text, re.M)}
    assert rows == {"0": "Delivered.", "1": "Failed, lost or cancelled.", "2": "Timed out.", "3": "Unknown job."}
    text = section(plain(reader, folder / "stageout-web.8"), "EXIT STATUS")
    assert re.search(r"^ 99 A setting is wrong", text, re.M)


@pytest.mark.parametrize("reader", READERS)
def test_program_text_keeps_its_place(folder: Path, reader: str) -> None:
    text = section(plain(reader, folder / "stageout-wait.1"), "DESCRIPTION")
    sentences = ["into the DAG file:", "INCLUDE /opt/", "As POST script", "SCRIPT DEFER 2 60 POST A", "With DEFER,"]
    places = [text.index(words) for words in sentences]
    assert places == sorted(places)
    assert "\n SCRIPT DEFER 2 60 POST A /opt/stageout/bin/stageout wait --timeout 20 --return $RETURN $JOBID\n" in text


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", PAGES)
def test_options_are_printed_as_they_are_written(folder: Path, reader: str, name: str) -> None:
    text = plain(reader, folder / name)
    assert not re.search("[\u00a0\u2013\u2014\u2212]", text), "a shell takes only hyphens and blanks"
    program, word = (name[:-2], "") if name[:-2] in programs.PROGRAMS else ("stageout", name[9:-2])
    parser = programs.parser_of(program)
    shown = programs.command(programs.parsers_of_commands(parser)[word] if word else parser)
    options, synopsis = section(text, "OPTIONS"), " ".join(section(text, "SYNOPSIS").split("\n"))
    synopsis = re.sub(r" +", " ", synopsis)
    for argument in shown.arguments:
        if argument.names[0].startswith("-"):
            value = f" {argument.value}" if argument.value else ""
            assert f"\n {', '.join(argument.names)}{value}" in f"\n{options}"
            assert f"{argument.names[0]}{value}" in synopsis


@pytest.mark.parametrize("name", PAGES)
def test_mandoc_has_no_warning(folder: Path, name: str) -> None:
    if not shutil.which("mandoc"):
        pytest.skip("mandoc is not installed")
    command = ["mandoc", "-Tlint", "-Wwarning", str(folder / name)]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stdout == ""


def test_text_of_a_page_is_no_request() -> None:
    assert man.escaped(".so /etc/passwd\n'tis -x \\fB") == "\\&.so /etc/passwd\n\\(aqtis \\-x \\efB"


def test_the_day_is_that_of_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1767225600")
    assert dict(man.pages())["stageout.1"].startswith(".TH STAGEOUT 1 2026-01-01 ")


def test_a_description_is_read_in_its_order() -> None:
    parser = programs.argparse.ArgumentParser(
        prog="box", description="One:\n  two\nthree.\nexit status: 0 open, or\nshut, 12 lost", epilog="End."
    )
    parser.add_argument("--size", metavar=("MOST", "LEAST"), nargs=2, help="overlay://HOST, twice")
    parser.add_argument("--rate", nargs="?", help="%(default)s a second", default="5 MB")
    shown = programs.command(parser)
    assert shown.description == (("One:", False), ("two", True), ("three.", False), ("End.", False))
    assert shown.statuses == (("0", "open, or shut"), ("12", "lost"))
    assert shown.usage == ("[-h]", "[--size MOST LEAST]", "[--rate [RATE]]")
    assert shown.arguments[0] == (("--size",), "MOST LEAST", "overlay://HOST, twice.")
    assert shown.arguments[1] == (("--rate",), "[RATE]", "5 MB a second.")
