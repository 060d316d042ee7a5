"""The starter gets the stored answer: it asks in the environment in which the manager has stored it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pool.conftest import VERSION, Site

pytestmark = [pytest.mark.pool, pytest.mark.oldest_condor_too]

_PLUGIN = "/opt/stageout/bin/stageout_curl_plugin"


@pytest.fixture
def site(stageout_pools: Any, destination: Any, tmp_path: Path) -> Any:
    with stageout_pools(version=VERSION, execute_points=1) as pool:
        yield Site(pool, destination, "answer", tmp_path)


def test_the_starter_is_answered_without_python(site: Site) -> None:
    ep = site.pool.eps[0]
    site.pool.wait(lambda: ep.run(["test", "-e", f"{_PLUGIN}.answer"], check=False).returncode == 0, what="an answer")
    job = site.submit(env="SLEEP=600")
    site.pool.wait_status(job, "Running")
    (starter,) = site.pool.wait(lambda: ep.pids("starter"), what="a starter")
    variables = Path(f"/proc/{starter}/environ").read_text().split("\0")
    asked = ep.run(
        ["env", "-i", *(item for item in variables if "=" in item), "sh", "-x", _PLUGIN, "-classad"], user="alice"
    )
    assert "SupportedMethods" in asked.stdout and "+ [ -r " in asked.stderr
    assert "+ exec " not in asked.stderr, "it became Python"
    site.pool.rm(job)
