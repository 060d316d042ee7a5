"""The agent keeps pace: few transactions for each job, and "Delivered" soon, also with a schedd that answers slowly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.destination import Destination
from tests.pool.conftest import VERSION, Site
from tests.pool.pace import queue_log, stopped_half_of_the_time, submit_at, transactions_in, wait_late_s

pytestmark = pytest.mark.pool

_JOBS, _RATE = 40, 5
#: The default of STAGEOUT_POLL_INTERVAL. The records of files have whole seconds.
_POLL_S, _ROUNDED_S = 5.0, 1.0
_HANDED_OFF = "JobStatus == 4 && (TransferOutputStats.STAGEOUTFilesCountLastRun ?: 0) > 0"


@pytest.fixture(scope="module")
def paced(stageout_pools: Any, destination: Destination, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A pool with the intervals that sites have."""
    with stageout_pools(version=VERSION, execute_points=1, cpus=16) as pool:
        destination.be_well()
        yield Site(pool, destination, "pace", Path(tmp_path_factory.mktemp("pace")))
        destination.be_well()


def test_a_job_costs_at_most_four_transactions(paced: Site) -> None:
    before = transactions_in(queue_log(paced.pool))
    ids = [job for made in submit_at(paced, _JOBS, _RATE) for job in made.ids]
    wait_late_s(paced, ids)
    count = transactions_in(queue_log(paced.pool)) - before
    assert count > 0
    assert count / len(ids) <= 4


def test_deliveries_show_soon_although_the_schedd_is_stopped_half_of_the_time(paced: Site) -> None:
    """All output arrives at once, when its jobs have shown progress: this makes the most edits."""
    paced.destination.pause()
    made = submit_at(paced, _JOBS, _RATE)
    ids = [job for one in made for job in one.ids]
    own = " || ".join(f"ClusterId == {one.cluster}" for one in made)
    shown = f'({own}) && {_HANDED_OFF} && (StageOutState ?: "None") != "None"'
    paced.pool.wait(
        lambda: len(paced.pool.jobs(shown, ["ClusterId"])) >= len(ids), timeout_s=300, what="all hand-offs to be shown"
    )
    with stopped_half_of_the_time(paced.pool):
        paced.destination.resume()
        late_s = wait_late_s(paced, ids)
    assert max(late_s) <= max(10.0, 2 * _POLL_S) + _ROUNDED_S, sorted(late_s)
