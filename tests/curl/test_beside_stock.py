"""HTCondor's own curl_plugin and ours on the same input: ours is never worse. All cases: tests.curl.beside_stock."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stageout.testing.pool.errors import PoolUnavailable
from stageout.testing.starter import PluginTable
from tests.curl.beside import Case, lacking, run, stock_plugin, worse
from tests.curl.beside_cases import CASES

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
