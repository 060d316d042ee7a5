"""docs/plugin/globus.md has the tables of the code."""

from __future__ import annotations

from pathlib import Path

from stageout.protocols.globusonline.failures import CODES, FAULTS, STATUSES

DOC = Path(__file__).resolve().parents[2] / "docs/plugin/globus.md"


def requests() -> str:
    """The meaning of refused requests."""
    rows = [f"| `{code}` | `{kind.name}` |" for code, kind in CODES.items()]
    rows += [f"| HTTP {status} with another code | `{kind.name}` |" for status, kind in STATUSES.items()]
    return "\n".join(["| code | class |", "|---|---|", *rows])


def events() -> str:
    """The meaning of a task's errors."""
    rows = [
        f"| `{code}` | `{fault.kind.name}` | {'ends the task' if fault.lasts else 'is waited out'} |"
        for code, fault in FAULTS.items()
    ]
    return "\n".join(["| code | class | |", "|---|---|---|", *rows])


def test_the_tables_are_those_of_the_code() -> None:
    text = DOC.read_text()
    for table in (requests(), events()):
        assert table in text, f"put this into docs/plugin/globus.md:\n{table}"
