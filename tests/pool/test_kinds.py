"""The table of docs/developer/kinds.md: the output of each kind of node and job, on both versions of HTCondor."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.destination import Destination
from tests.harness.pool.pytest_plugin import keep_logs
from tests.pool.kinds import kinds_site, run_kinds

pytestmark = pytest.mark.pool


@pytest.mark.parametrize("version", ["25.14", "23.9"])
def test_each_kind_does_as_the_table_says(
    stageout_pools: Any, destination: Destination, version: str, request: pytest.FixtureRequest
) -> None:
    with kinds_site(version, destination, stageout_pools) as site:
        seen = {kind.name: (result, kind.expected) for kind, result in run_kinds(site)}
        keep_logs(request, [site.pool])
    assert {name: result for name, (result, _) in seen.items()} == {name: wanted for name, (_, wanted) in seen.items()}
