"""With GlobalJobId in SECURE_JOB_ATTRS nobody writes another name, and every kind of job is delivered as before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.harness.destination import Destination
from tests.harness.pool import Pool
from tests.pool.arena import Arena, for_a_test, open_arena
from tests.pool.conftest import JOB, wait_until_acquainted
from tests.pool.hostile import WAYS, Attacker
from tests.pool.test_job_router import ROUTE, ROUTED

pytestmark = pytest.mark.pool

_WALL = "SECURE_JOB_ATTRS = GlobalJobId\n"


@pytest.fixture(scope="module")
def walled_of_version(stageout_pools: Any, destination: Destination, request: pytest.FixtureRequest) -> Iterator[Arena]:
    """A pool with the fragment's SECURE_JOB_ATTRS."""
    with open_arena(stageout_pools, destination, request.param, _WALL) as found:
        yield found


@pytest.fixture
def walled(walled_of_version: Arena, request: pytest.FixtureRequest) -> Iterator[Arena]:
    """The pool with the wall, and its server."""
    yield from for_a_test(walled_of_version, request)


#: Lines and options of jobs that HTCondor names in other ways.
_ORDINARY: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "ordinary": ("", ()),
    "job set": ('MY.JobSetName = "honest"', ()),
    "factory": ("max_materialize = 1", ()),
    "spooled": ("", ("-spool",)),
}


@pytest.mark.oldest_condor_too
@pytest.mark.parametrize("kind", _ORDINARY)
def test_behind_the_wall_ordinary_jobs_are_delivered(walled: Arena, kind: str) -> None:
    extra, options = _ORDINARY[kind]
    site, pool = walled.site, walled.site.pool
    job = site.submit("alice", extra=extra, options=options, queue="queue 2")
    pool.wait(
        lambda: {site.state(one) for one in job.ids} == {"Delivered"}, timeout_s=90, what=f"{job} to be delivered"
    )
    if options:
        # The schedd of 23.9 keeps spooled jobs for ten days; newer ones let them go with their data.
        pool.ap.run(["condor_transfer_data", str(job.cluster)], user="alice", cwd=job.dir)
        past = [pool.q(one) or site.wait_left(one, timeout_s=90) for one in job.ids]
    else:
        past = [site.wait_left(one, timeout_s=90) for one in job.ids]
    assert [ad["TransferOutputStats"]["STAGEOUTFilesCountLastRun"] for ad in past] == [2, 2]


@pytest.mark.oldest_condor_too
def test_behind_the_wall_nobody_writes_an_id(walled: Arena) -> None:
    site, pool = walled.site, walled.site.pool
    site.destination.stop()
    victims = {"GlobalJobId": walled.victims(1)[0]}
    before = walled.look(victims)
    attacker = Attacker(site, walled.loot)
    ways = (
        "edit, idle",
        "edit, held",
        "submit, procs",
        "submit, factory",
        "submit, bindings",
        "submit, job set",
        "chirp",
    )
    jobs = {way: WAYS[way].act(attacker, victims)["GlobalJobId"] for way in ways}
    mine = 'Owner == "bob"'
    pool.wait(lambda: len(pool.jobs(mine, ["ProcId"])) <= 8, timeout_s=90, what="the jobs that run to end")
    for way, ids in jobs.items():
        for job in ids:
            ad = pool.q(job, ["GlobalJobId"]) or pool.history(job)
            assert ad is None or f"#{job}#" in str(ad["GlobalJobId"]), f"{way}: {ad['GlobalJobId']}"
    (idle, *_) = jobs["edit, idle"]
    edit = ["condor_qedit", idle, "GlobalJobId", f'"{victims["GlobalJobId"].name}"']
    told = pool.ap.run(edit, user="bob", check=False)
    assert told.returncode and "GlobalJobId" in told.stderr, told
    assert walled.look(victims) == before
    site.destination.start_again()
    assert not walled.ends(victims)


@pytest.mark.oldest_condor_too
def test_behind_the_wall_routed_jobs_are_delivered(walled: Arena) -> None:
    site, pool = walled.site, walled.site.pool
    pool.ap.configure(ROUTE)
    pool.wait(lambda: pool.ap.pids("condor_job_router"), what="the JobRouter")
    job = site.submit("alice", extra=ROUTED)
    copy = pool.wait(
        lambda: (pool.q(job) or pool.history(job) or {}).get("RoutedToJobId"), timeout_s=120, what=f"{job} to be routed"
    )
    past = [site.wait_left(one, timeout_s=120) for one in (copy, job)]
    assert [(ad["JobStatus"], ad["ExitCode"]) for ad in past] == [(4, 0), (4, 0)]
    assert past[0]["StageOutSynchronousCode"] == "Routed"
    pool.wait(site.spool_is_empty, timeout_s=60, what="the spool to be empty")
    site.check_delivered(job)
    pool.ap.configure("")


def _rename(pool: Pool) -> None:
    pool.ap.configure("SCHEDD_NAME = renamed@\n", name="97-name.conf", reconfig=False)
    pool.ap.restart()
    pool.wait(lambda: pool.collector_query('Name == "renamed@"', "Schedd", ["Name"]), what="the schedd's new name")
    wait_until_acquainted(pool)


_CONDOR_C = """
universe = grid
grid_resource = condor renamed@ 127.0.0.1:{port}
executable = job.sh
arguments = out1 out2
should_transfer_files = YES
when_to_transfer_output = ON_EXIT
transfer_output_files = out1, out2
MY.remote_JobUniverse = 5
MY.remote_OutputDestination = "{url}"
MY.remote_ShouldTransferFiles = "YES"
MY.remote_WhenToTransferOutput = "ON_EXIT"
MY.remote_RequestMemory = 50
MY.remote_RequestDisk = 10240
queue
"""


@pytest.mark.oldest_condor_too
def test_behind_the_wall_jobs_of_condor_c_are_delivered(walled: Arena) -> None:
    """Under a name with an "@": another name must be that of a host in the DNS."""
    site, pool = walled.site, walled.site.pool
    _rename(pool)
    text = _CONDOR_C.format(port=pool.port, url=site.url("condor-c"))
    job = pool.submit("alice", text, files={"job.sh": JOB})
    site.jobs.append(job)
    past = site.wait_left(job, timeout_s=180)
    assert (past["JobStatus"], past["ExitCode"]) == (4, 0)
    pool.wait(site.spool_is_empty, timeout_s=60, what="the spool to be empty")
    sizes = [site.destination.file(f"{site.prefix}/condor-c/{name}").stat().st_size for name in ("out1", "out2")]
    assert min(sizes) > 20_000
    copy = site.wait_left(f"{job.cluster + 1}.0", timeout_s=60)
    assert copy["StageOutSynchronousCode"] == "Routed"


@pytest.mark.oldest_condor_too
def test_behind_the_wall_a_renamed_schedd_delivers(walled: Arena) -> None:
    site, pool = walled.site, walled.site.pool
    _rename(pool)
    job = site.submit("alice")
    past = site.wait_left(job, timeout_s=120)
    assert past["GlobalJobId"].startswith("renamed@#")
    assert past["TransferOutputStats"]["STAGEOUTFilesCountLastRun"] == 2
    site.check_delivered(job)
