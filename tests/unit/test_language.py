"""Docstrings begin as readers expect: a verb in the imperative, or a noun phrase."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: Folders whose docstrings are checked. The inside of the overlay gets its words with its second design.
_CHECKED = (
    "policy_service", "sandbox_manager", "schedd_agent", "stageout/cli", "stageout/core", "stageout/handoff",
    "stageout/movers", "stageout/plugin", "stageout/protocols", "stageout/sampling", "stageout/testing",
    "stageout/tuning",
)  # fmt: skip

#: A docstring that begins with one of these words names neither an action nor a thing.
_HEADLESS = re.compile(
    r"(What|Who|Whose|Whom|Whoever|Whatever|Where|When|Which|That|Those|How|Why|Whether|If|Is|Are|Does|May|Has|Can|It|"
    r"They|There)\b"
)

_Documented = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)


def _headless(source: str) -> list[str]:
    """Return the first lines of docstrings that begin without a subject or a verb."""
    found = (ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, _Documented))
    return [text.splitlines()[0] for text in found if _HEADLESS.match(text)]


@pytest.mark.parametrize("folder", _CHECKED)
def test_docstrings_begin_with_a_verb_or_a_noun(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    assert {str(path): lines for path in paths if (lines := _headless(path.read_text()))} == {}


@pytest.mark.parametrize(
    "source",
    [
        '"""What every part needs."""',
        'def size():\n    """How many bytes there are."""',
        'class Row:\n    """Who has which lease."""',
        'class Row:\n    async def end(self):\n        """Is it over?"""',
    ],
)
def test_headless_docstrings_are_found(source: str) -> None:
    assert len(_headless(source)) == 1


@pytest.mark.parametrize("text", ["Return the size in bytes.", "The size of a file.", "Whatsit of a file.", "Item."])
def test_other_docstrings_are_not_found(text: str) -> None:
    assert _headless(f'def size():\n    """{text}"""') == []
