"""Jobs that a JobRouter copies, within one queue and into another: the source shows what became of the output."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.pool.conftest import Site

pytestmark = pytest.mark.pool

ROUTE = """
DAEMON_LIST = $(DAEMON_LIST), JOB_ROUTER
JOB_ROUTER_POLLING_PERIOD = 1
JOB_ROUTER_ROUTE_NAMES = here
JOB_ROUTER_ROUTE_here @=end
  UNIVERSE vanilla
  REQUIREMENTS WantRoute =?= true
  SET WantRoute false
@end
"""
#: A second queue on the same machine, from which the JobRouter takes jobs, as that of HTCondor-CE.
_CE = """
DAEMON_LIST = $(DAEMON_LIST), CE_SCHEDD
DC_DAEMON_LIST = +CE_SCHEDD
CE_SCHEDD = $(SCHEDD)
CE_SCHEDD_ARGS = -local-name ce
CE.SCHEDD_NAME = ce
CE.SPOOL = {spool}
CE.HISTORY = {spool}/history
CE.JOB_QUEUE_LOG = {spool}/job_queue.log
CE.SCHEDD_LOG = $(LOG)/CeSchedLog
CE.SCHEDD_ADDRESS_FILE = {spool}/.schedd_address
CE.SCHEDD_DAEMON_AD_FILE = {spool}/.schedd_classad
QUEUE_SUPER_USERS = $(QUEUE_SUPER_USERS), condor@$(UID_DOMAIN)
QUEUE_SUPER_USER_MAY_IMPERSONATE = .*
JOB_ROUTER_SCHEDD1_ADDRESS_FILE = {spool}/.schedd_address
JOB_ROUTER_SCHEDD1_JOB_QUEUE_LOG = {spool}/job_queue.log
JOB_ROUTER_SCHEDD2_ADDRESS_FILE = $(SCHEDD_ADDRESS_FILE)
JOB_ROUTER_SCHEDD2_JOB_QUEUE_LOG = $(SPOOL)/job_queue.log
"""
#: Only the copy may run: a site's source jobs cannot run where they are submitted either.
ROUTED = "MY.WantRoute = true\nrequirements = MY.WantRoute =?= false"
_RUNNING, _COMPLETED, _HELD = 2, 4, 5


@dataclass
class Routing:
    """A pool with a JobRouter. :param ce: name of the queue from which it takes jobs; "" for the one of the pool."""

    site: Site
    ce: str

    def submit(self, **options: Any) -> Any:
        """Submit a job that only its copy can run."""
        return self.site.submit(extra=ROUTED, options=("-name", self.ce) if self.ce else (), **options)

    def source(self, job: Any) -> dict[str, Any]:
        """Return the ad of the source, from its queue or else from the history; empty without one."""
        where = ("-name", self.ce) if self.ce else ()
        for tool in ("condor_q", "condor_history"):
            found = self.site.pool.ap.run([tool, *where, str(job), "-json"], user="root").stdout
            if found.strip() and (ads := json.loads(found)):
                return dict(ads[0])
        return {}

    def copy(self, job: Any) -> str:
        """Wait until the source names its copy and return the id of that."""

        def routed() -> Any:
            return self.source(job).get("RoutedToJobId")

        return str(self.site.pool.wait(routed, what=f"{job} to be routed", timeout_s=60))

    def left(self, copy: str, job: Any) -> list[dict[str, Any]]:
        """Wait until the copy has left its queue and the source is completed, and return their ads."""
        ad = self.site.wait_left(copy, timeout_s=180)
        self.site.pool.wait(lambda: self.source(job).get("JobStatus") == _COMPLETED, timeout_s=120, what="the source")
        return [ad, self.source(job)]


@pytest.fixture(params=["one queue", "two queues"])
def routing(site: Any, request: pytest.FixtureRequest) -> Iterator[Routing]:
    """The pool with a JobRouter, which routes jobs into the schedd that they come from, or into another one."""
    ap, daemons, settings, ce = site.pool.ap, ["condor_job_router"], ROUTE, ""
    schedds = len(ap.pids("condor_schedd"))
    if request.param == "two queues":
        spool = ap.home / "spool-ce"
        ap.run(["mkdir", "-p", "-m", "755", str(spool)])
        ap.run(["chown", "condor:", str(spool)])
        name = ap.run(["condor_status", "-schedd", "-af", "Name"]).stdout.split()[0]
        ce = f"ce@{ap.config_val('FULL_HOSTNAME')}"
        settings += _CE.format(spool=spool, schedd=name)
    ap.configure(settings)
    site.pool.wait(lambda: all(map(ap.pids, daemons)), what="the JobRouter")
    if ce:
        known = ["condor_status", "-schedd", ce, "-af", "Name"]
        site.pool.wait(lambda: ce in ap.run(known, check=False).stdout, timeout_s=30, what="the second queue")
    yield Routing(site, ce)
    if ce:
        ap.run(["condor_rm", "-name", ce, "-all"], check=False)
    ap.configure("")
    site.pool.wait(lambda: not any(map(ap.pids, daemons)), what="the end of the JobRouter")
    site.pool.wait(lambda: len(ap.pids("condor_schedd")) <= schedds, what="the end of the second queue")


def test_the_source_is_completed_only_when_the_output_is_there(routing: Routing) -> None:
    site, pool = routing.site, routing.site.pool
    site.destination.pause()
    job = routing.submit()
    copy = routing.copy(job)

    begun_s: list[float] = []

    def is_sending() -> bool:
        ad = pool.q(copy) or {}
        begun_s.extend([time.monotonic()] if ad.get("TransferringOutput") and not begun_s else [])
        return ad.get("JobStatus") == _COMPLETED or (bool(begun_s) and time.monotonic() - begun_s[0] > 5)

    pool.wait(is_sending, timeout_s=60, what=f"copy {copy} to send its output for 5 s, or to complete")
    early = (pool.q(copy) or {}).get("JobStatus"), routing.source(job)["JobStatus"]
    why = site.stageout("explain", copy, check=False).stdout
    site.destination.resume()
    ends = routing.left(copy, job)
    assert early == (_RUNNING, _RUNNING), "copy and source while the destination stands still"
    assert [(ad["JobStatus"], ad["ExitCode"]) for ad in ends] == [(_COMPLETED, 0), (_COMPLETED, 0)]
    assert ends[0]["StageOutSynchronousCode"] == "Routed"
    assert "(Routed)" in why, why
    site.check_delivered(job)


def test_the_source_shows_that_the_destination_refuses(routing: Routing) -> None:
    site, pool = routing.site, routing.site.pool
    site.destination.refuse("no more room for you")
    job = routing.submit()
    copy = routing.copy(job)

    def has_ended() -> bool:
        return routing.source(job).get("JobStatus") in (_COMPLETED, _HELD)

    try:
        pool.wait(has_ended, timeout_s=120, what=f"the end of source {job}")
        ad = routing.source(job)
        assert (ad["JobStatus"], ad.get("HoldReasonCode")) == (_HELD, 12), f"{ad['JobStatus']} {pool.why(copy)}"
        assert "403" in ad["HoldReason"], ad["HoldReason"]
    finally:
        site.destination.accept()
    pool.release(copy)
    assert [ad["JobStatus"] for ad in routing.left(copy, job)] == [_COMPLETED, _COMPLETED]
    site.check_delivered(job)


def test_a_routed_job_without_url_output_completes(routing: Routing) -> None:
    job = routing.submit(destination="")
    ends = routing.left(routing.copy(job), job)
    assert [(ad["JobStatus"], ad["ExitCode"]) for ad in ends] == [(_COMPLETED, 0), (_COMPLETED, 0)]
    assert "StageOutSynchronousCode" not in ends[0]


def test_a_copy_that_condor_c_submits_is_marked_as_one(site: Any) -> None:
    job = site.submit(extra='MY.SubmitterGlobalJobId = "other#1.0#1700000000"\nhold = true')
    ad = site.pool.q(job)
    assert (ad["StageOutSynchronousCode"], ad["StageOutGuard"]) == ("Routed", False)


@pytest.mark.parametrize("early", [True, False], ids=["while it runs", "while its output waits"])
def test_an_owner_who_lets_the_job_leave_gets_the_output(site: Any, early: bool) -> None:
    site.destination.stop()
    job = site.submit(env="SLEEP=5" if early else "")
    if early:
        site.pool.wait_status(job, "Running", timeout_s=60)
    else:
        site.wait_state(job, "RetryWait")
    site.pool.qedit(job, user="alice", LeaveJobInQueue="false")
    history = site.wait_left(job, timeout_s=180)
    assert (history["JobStatus"], history["ExitCode"]) == (4, 0)
    site.destination.start_again()
    site.pool.wait(site.spool_is_empty, timeout_s=60, what="the spool to be empty")
    site.check_delivered(job)


@pytest.mark.parametrize("is_copy", [True, False], ids=["a copy", "another job"])
def test_output_of_a_completed_copy_outlives_its_removal_by_the_jobrouter(site: Any, is_copy: bool) -> None:
    """The copy has handed its output off, as copies of access points with other transforms do."""
    site.destination.stop()
    job = site.submit()
    site.wait_state(job, "RetryWait")
    if is_copy:
        site.pool.qedit(job, RoutedBy='"jobrouter"')
    site.pool.ap.run(["condor_rm", "-reason", "JobRouter aborted job", str(job)])
    assert site.wait_left(job)["JobStatus"] == 3
    if not is_copy:
        site.pool.wait(site.spool_is_empty, timeout_s=60, what="the output to be cancelled")
    site.destination.start_again()
    site.pool.wait(site.spool_is_empty, timeout_s=60, what="the spool to be empty")
    if is_copy:
        site.check_delivered(job)
    else:
        assert site.puts(job) == []
