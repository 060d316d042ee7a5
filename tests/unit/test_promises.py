"""Each promise has tests that see it from outside (docs/developer/tests.md), and so has each fault of the overlay."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_PAGE = (ROOT / "docs/developer/tests.md").read_text()
_OVERLAY = (ROOT / "docs/developer/promises-tested.md").read_text()
_CUSTODY = (ROOT / "docs/explanation/custody.md").read_text()
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows(page: str, heading: str) -> dict[str, str]:
    """Return the first two cells of the rows of the table below a heading cell."""
    table = page[page.index(f"\n| {heading} |") :].partition("\n\n")[0]
    found = (line.split("|")[1:3] for line in table.strip().splitlines()[2:])
    return {first.strip(): second for first, second in found}


def promises(page: str) -> list[str]:
    """Return the promises of the custody page, without what follows their first sentence."""
    return [text.rstrip(".") for text in re.findall(r"^\d+\. \*\*(.+?)\*\*", page, re.M)]


def faults(page: str) -> dict[str, str]:
    """Return the tests of each fault: the third cell of its row."""
    table = page[page.index("\n| fault |") :].partition("\n\n")[0]
    found = (line.split("|") for line in table.strip().splitlines()[2:])
    return {cells[1].strip(): cells[3] for cells in found}


_KEPT = {
    **rows(_PAGE, "promise"), **rows(_PAGE, "event"), **rows(_OVERLAY, "overlay promise"), **faults(_OVERLAY)
}  # fmt: skip


def test_each_promise_and_each_condition_has_tests() -> None:
    assert list(rows(_PAGE, "promise")) == promises(_CUSTODY)
    assert list(rows(_PAGE, "event")) == list(rows(_CUSTODY, "event"))
    assert len(promises(_CUSTODY)) >= 7
    assert [int(fault.split()[0]) for fault in faults(_OVERLAY)] == list(range(1, 26))


@pytest.mark.parametrize("promise", _KEPT)
def test_the_tests_of_a_promise_exist(promise: str) -> None:
    named = _TEST.findall(_KEPT[promise])
    assert named and len(named) == _KEPT[promise].count("::")
    missing = [f"{path}::{name}" for path, name in named if not _is_there(path, name)]
    assert missing == []


def _is_there(path: str, name: str) -> bool:
    file = ROOT / path
    return file.exists() and re.search(rf"^\s*def {name}\(", file.read_text(), re.M) is not None


def test_a_promise_without_a_test_is_noticed() -> None:
    page = "1. **One.** More.\n2. **Two.** More\n\n| promise | tests |\n|---|---|\n| One | `tests/a.py::test_b` |\n"
    assert promises(page) == ["One", "Two"]
    assert list(rows(page, "promise")) == ["One"]
    assert not _is_there("tests/a.py", "test_b")
    assert not _is_there("tests/unit/test_promises.py", "test_each_promise")
