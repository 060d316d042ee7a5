"""The agent keeps pace: few transactions for each job, and "Delivered" soon, also with a schedd that answers slowly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.destination import Destination
from tests.pool.conftest import VERSION, Site
from tests.pool.pace import late_s, run, stopped_half_of_the_time, submit_at

pytestmark = pytest.mark.pool

_JOBS, _RATE = 40, 5
#: The default of STAGEOUT_POLL_INTERVAL. The records of files have whole seconds.
_POLL_S, _ROUNDED_S = 5.0, 1.0


@pytest.fixture(scope="module")
def paced(stageout_pools: Any, destination: Destination, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A pool with the intervals that sites have."""
    with stageout_pools(version=VERSION, execute_points=1, cpus=16) as pool:
        destination.be_well()
        yield Site(pool, destination, "pace", Path(tmp_path_factory.mktemp("pace")))
        destination.be_well()


def test_a_job_costs_at_most_four_transactions(paced: Site) -> None:
    found = run(paced, _JOBS, _RATE, timeout_s=300)
    assert len(found.late_s) >= 0.9 * _JOBS, "too many hand-offs were refused"
    assert 0 < found.transactions <= 4


def test_deliveries_show_soon_although_the_schedd_is_stopped_half_of_the_time(paced: Site) -> None:
    """The schedd also needs its half for the shadows of the jobs."""
    made = submit_at(paced, _JOBS, _RATE)
    with stopped_half_of_the_time(paced.pool):
        found = late_s(paced, made, timeout_s=300)
    assert len(found) >= 0.9 * _JOBS, "too many hand-offs were refused"
    late = sorted(found)  # on a machine with other work the last ones wait for the processor
    assert late[len(late) // 2] <= max(10.0, 2 * _POLL_S) + _ROUNDED_S, late
    assert late[-1] <= 3 * max(10.0, 2 * _POLL_S), late
