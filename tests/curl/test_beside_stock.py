"""HTCondor's own curl_plugin and ours on the same input: ours is never worse. All cases: tests.curl.beside_stock."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from stageout.testing.starter import PluginTable
from tests.curl.beside import Ask, Case, Stage, lacking, run, stock_plugin, worse
from tests.curl.beside_cases import CASES, no_server_administrator, no_server_few_retries
from tests.harness.pool.errors import PoolUnavailable

pytestmark = pytest.mark.pool


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HTCondor's own plugin; skips with the reason where there is none (in CI: fails)."""
    try:
        return stock_plugin(tmp_path_factory.mktemp("stock"))
    except PoolUnavailable as reason:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(reason))


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
