"""``plugins/stageout.cpf``: its expressions say what the commands say. A pool test shows it with condor_q."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from stageout.core.states import PLAIN

_FILE = Path(__file__).resolve().parents[2] / "plugins/stageout.cpf"


def _column(name: str, **attributes: Any) -> object:
    """Return the value of a column for a job with these attributes."""
    classad2 = pytest.importorskip("classad2")
    (text,) = re.findall(rf"^ +(.*) AS {name}\b", _FILE.read_text(), re.M)
    return classad2.ExprTree(text).eval(classad2.ClassAd(attributes))


def test_each_state_has_the_owner_s_word() -> None:
    assert {state: _column("STAGE-OUT", StageOutState=state.value) for state in PLAIN} == PLAIN
    assert _column("STAGE-OUT", StageOutState="None") == _column("STAGE-OUT") == ""


@pytest.mark.parametrize(
    ("size_bytes", "shown"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (10**6, "1.0 MB"), (700_000_000, "700.0 MB"),
     (2_450_000_000, "2.4 GB"), (3 * 10**12, "3.0 TB"), (2 * 10**15, "2000.0 TB")],
)  # fmt: skip
def test_sizes_have_the_units_of_the_commands(size_bytes: int, shown: str) -> None:
    assert _column("LEFT", StageOutBytesLeft=size_bytes) == shown


@pytest.mark.parametrize("name", ["STAGE-OUT", "FILES", "LEFT", "NEXT", "REASON"])
def test_a_job_that_has_handed_nothing_off_has_empty_columns(name: str) -> None:
    assert _column(name) == ""
