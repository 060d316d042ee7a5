"""Jobs that a JobRouter manages: it edits the queue as their owner, and both the source and the routed job end well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.pool

_ROUTE = """
DAEMON_LIST = $(DAEMON_LIST), JOB_ROUTER
JOB_ROUTER_POLLING_PERIOD = 1
JOB_ROUTER_ROUTE_NAMES = here
JOB_ROUTER_ROUTE_here @=end
  UNIVERSE vanilla
  REQUIREMENTS WantRoute =?= true
  SET WantRoute false
@end
"""
#: Only the routed job may run: a site's source jobs cannot run where they are submitted either.
_ROUTED = "MY.WantRoute = true\nrequirements = MY.WantRoute =?= false"


@pytest.fixture
def routed(site: Any) -> Iterator[Any]:
    """The pool with a JobRouter, which routes jobs into the schedd that they come from."""
    site.pool.ap.configure(_ROUTE)
    site.pool.wait(lambda: site.pool.ap.pids("condor_job_router"), what="the JobRouter")
    yield site
    site.pool.ap.configure("")
    site.pool.wait(lambda: not site.pool.ap.pids("condor_job_router"), what="the end of the JobRouter")


def _copy(site: Any, job: Any) -> str:
    """Id of the job that was made of this one."""

    def find() -> Any:
        return (site.pool.q(job) or site.pool.history(job) or {}).get("RoutedToJobId")

    return str(site.pool.wait(find, what=f"{job} to be routed", timeout_s=120))


def _wait_left(site: Any, *jobs: Any) -> list[dict[str, Any]]:
    for job in jobs:
        site.pool.wait(
            lambda job=job: not site.pool.q(job) and site.pool.history(job), what=f"{job} to leave", timeout_s=180
        )
    return [site.pool.history(job) for job in jobs]


@pytest.mark.parametrize("down", [False, True], ids=["destination up", "destination down"])
def test_a_routed_job_delivers_and_both_jobs_complete(routed: Any, down: bool) -> None:
    if down:
        routed.destination.stop()
    source = routed.submit(extra=_ROUTED)
    copy = _copy(routed, source)
    ends = _wait_left(routed, copy, source)
    assert [(ad["JobStatus"], ad["ExitCode"]) for ad in ends] == [(4, 0), (4, 0)]
    if down:
        routed.destination.start_again()
    routed.pool.wait(routed.spool_is_empty, timeout_s=60, what="the spool to be empty")
    routed.check_delivered(source)
    cancelled = [line for line in routed.pool.ap.log("ScheddAgentLog").splitlines() if "action=cancel" in line]
    assert [line for line in cancelled if f"job=ap#{copy}#" in line or f"job=ap#{source}#" in line] == []


def test_a_routed_job_without_url_output_completes(routed: Any) -> None:
    source = routed.submit(extra=_ROUTED, destination="")
    ends = _wait_left(routed, _copy(routed, source), source)
    assert [(ad["JobStatus"], ad["ExitCode"]) for ad in ends] == [(4, 0), (4, 0)]


@pytest.mark.parametrize("early", [True, False], ids=["while it runs", "while its output waits"])
def test_an_owner_who_lets_the_job_leave_gets_the_output(site: Any, early: bool) -> None:
    site.destination.stop()
    job = site.submit(env="SLEEP=5" if early else "")
    if early:
        site.pool.wait_status(job, "Running", timeout_s=120)
    else:
        site.wait_state(job, "RetryWait")
    site.pool.qedit(job, user="alice", LeaveJobInQueue="false")
    (history,) = _wait_left(site, job)
    assert (history["JobStatus"], history["ExitCode"]) == (4, 0)
    site.destination.start_again()
    site.pool.wait(site.spool_is_empty, timeout_s=60, what="the spool to be empty")
    site.check_delivered(job)
