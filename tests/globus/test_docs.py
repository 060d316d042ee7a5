"""docs/GLOBUS.md says what the code does: its tables are made from the code."""

from __future__ import annotations

from pathlib import Path

from stageout.core.config import KNOBS
from stageout.protocols.globusonline.failures import CODES, FAULTS, STATUSES

DOC = Path(__file__).resolve().parents[2] / "docs" / "GLOBUS.md"


def knobs() -> str:
    """All settings of the plugin."""
    rows = [
        f"| `{knob.name}` | {knob.default if knob.default != '' else 'none'} | {knob.doc} |"
        for knob in KNOBS.values()
        if knob.role == "globus"
    ]
    return "\n".join(["| setting | default | what |", "|---|---|---|", *rows])


def requests() -> str:
    """What refused requests mean."""
    rows = [f"| `{code}` | `{kind.name}` |" for code, kind in CODES.items()]
    rows += [f"| HTTP {status} with another code | `{kind.name}` |" for status, kind in STATUSES.items()]
    return "\n".join(["| code | class |", "|---|---|", *rows])


def events() -> str:
    """What the errors of a task mean."""
    rows = [
        f"| `{code}` | `{fault.kind.name}` | {'ends the task' if fault.lasts else 'is waited out'} |"
        for code, fault in FAULTS.items()
    ]
    return "\n".join(["| code | class | |", "|---|---|---|", *rows])


def test_the_tables_are_those_of_the_code() -> None:
    text = DOC.read_text()
    for table in (knobs(), requests(), events()):
        assert table in text, f"put this into docs/GLOBUS.md:\n{table}"
