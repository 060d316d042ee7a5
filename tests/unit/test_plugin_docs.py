"""docs/PLUGINS.md says what the code does."""

import re
from pathlib import Path

from stageout.core.errors import ErrorClass
from stageout.testing.conformance_rules import RULES

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "PLUGINS.md").read_text()


def error_table() -> str:
    """The table as it must stand in the document."""
    lines = ["| class | code | ErrorType | FailureType | what next | exit status alone |", "|---|---|---|---|---|---|"]
    for kind in ErrorClass:
        row = kind.value
        status = 11 if kind.retryable else 1
        cells = [f"`{kind.name}`", row.code, row.error_type, row.failure_type or "", row.advice.value, status]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def test_error_table():
    assert error_table() in TEXT, "put this table into docs/PLUGINS.md:\n" + error_table()


def test_example_is_the_tested_one():
    assert (ROOT / "examples" / "mounted_plugin").read_text() in TEXT


def test_rules_are_listed():
    listed = dict(re.findall(r"^\| `([a-z0-9-]+)` \| (must|should) \|", TEXT, re.M))
    assert listed == {rule.name: rule.level for rule in RULES}
