"""HTCondor's own curl_plugin and ours on the same input: ours is never worse. All cases: tests.curl.beside_stock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stageout.testing.starter import PluginTable
from tests.curl.beside import Ask, Case, Stage, lacking, run, worse
from tests.curl.beside_cases import CASES, no_server_administrator, no_server_few_retries

pytestmark = pytest.mark.pool


@pytest.mark.parametrize("case", [case for case in CASES if not case.slow], ids=lambda case: str(case.name))
def test_never_worse(case: Case, stock: Path, executable: Path, plugin_table: PluginTable) -> None:
    """Outcome, exit status, content, time, and the attributes of the result ads."""
    theirs = run(case, PluginTable([stock]), stock)
    ours = run(case, plugin_table, executable)
    assert worse(case, theirs, ours) == []
    assert lacking(case, theirs, ours) == []


@pytest.mark.parametrize("arrange", [no_server_few_retries, no_server_administrator])
def test_as_many_attempts_as_are_asked_for(
    arrange: Callable[[Stage], Ask], stock: Path, executable: Path, plugin_table: PluginTable
) -> None:
    case = Case("retries", arrange)
    theirs, ours = run(case, PluginTable([stock]), stock), run(case, plugin_table, executable)
    tries = [[ad["DeveloperData.TransferTries"] for ad in seen.attributes()] for seen in (theirs, ours)]
    assert tries[0] == tries[1]
