"""A user with nothing but an account at the access point takes nothing over of another user's output.

Alice's completed jobs wait on the node, because their server is away. Bob makes jobs of his own carry their values:
each attribute of tests/pool/hostile.py in each way to write it. HTCondor's own walls are as they are by default here
(no SECURE_JOB_ATTRS), because nothing of the product may rely on them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from stageout.core.signing import SigningKey
from tests.harness.destination import Destination
from tests.harness.pool import Pool
from tests.harness.pool.pytest_plugin import keep_logs
from tests.pool.arena import Arena
from tests.pool.conftest import JOB, QUICK_AP, QUICK_EP, Site, open_directory, wait_until_acquainted
from tests.pool.hostile import FORGERIES, MAY_STAY, NO_WALL, WAYS, Attacker, Victim, submit_procs
from tests.pool.test_forged_records import PLUGIN
from tests.pool.test_job_router import ROUTE, ROUTED
from tests.pool.test_trust_pool import lines_of

pytestmark = pytest.mark.pool

_WALL = "SECURE_JOB_ATTRS = GlobalJobId\n"


@contextlib.contextmanager
def _arena(pools: Any, destination: Destination, version: str, wall: str) -> Iterator[Arena]:
    with open_directory("hostile") as shared, open_directory("loot") as home, Destination(home) as loot:
        settings = {"version": version, "execute_points": 1, "cpus": 12, "binds": (shared,)}
        with pools(
            **settings, ap_config=f"{QUICK_AP}{wall}", ep_config=f"{QUICK_EP}STAGEOUT_DATA_SLOT_DEPTH = 100\n"
        ) as pool:
            yield Arena(Site(pool, destination, f"hostile-{version}", shared), loot)


@pytest.fixture(scope="module")
def arena_of_version(stageout_pools: Any, destination: Destination, request: pytest.FixtureRequest) -> Iterator[Arena]:
    """A pool without a wall of HTCondor's."""
    with _arena(stageout_pools, destination, request.param, NO_WALL) as found:
        yield found


@pytest.fixture(scope="module")
def walled_of_version(stageout_pools: Any, destination: Destination, request: pytest.FixtureRequest) -> Iterator[Arena]:
    """A pool with the fragment's SECURE_JOB_ATTRS."""
    with _arena(stageout_pools, destination, request.param, _WALL) as found:
        yield found


@pytest.fixture
def arena(arena_of_version: Arena, request: pytest.FixtureRequest) -> Iterator[Arena]:
    """The pool, whose server is away."""
    arena_of_version.site.destination.stop()
    yield from _for_a_test(arena_of_version, request)


@pytest.fixture
def walled(walled_of_version: Arena, request: pytest.FixtureRequest) -> Iterator[Arena]:
    """The pool with the wall, and its server."""
    yield from _for_a_test(walled_of_version, request)


def _for_a_test(found: Arena, request: pytest.FixtureRequest) -> Iterator[Arena]:
    """Give a folder of its own for a test; afterwards the server is up, and no job is left."""
    site = found.site
    wait_until_acquainted(site.pool)
    yield Arena(Site(site.pool, site.destination, f"hostile-{time.monotonic_ns()}", site.gates), found.loot)
    site.destination.start_again()
    keep_logs(request, [site.pool])
    for options in (("-all",), ("-forcex", "-all")):
        site.pool.ap.run(["condor_rm", *options], check=False)


def _applied(
    arena: Arena, attacker: Attacker, victims: Mapping[str, Victim], jobs: Mapping[str, list[str]]
) -> dict[str, str]:
    """Return what stands in the attacker's jobs: the attributes of each forgery that HTCondor let him write."""
    ads = {f"{ad['ClusterId']}.{ad['ProcId']}": ad for ad in arena.site.pool.jobs(f'Owner == "{attacker.user}"')}
    found = {}
    for label, ids in jobs.items():
        wanted = attacker.attributes(label, victims[label])
        here = [ads[job] for job in ids if job in ads] or [arena.site.pool.history(job) or {} for job in ids]
        wrote = [name for name, text in wanted.items() if any(_is(ad.get(name), text) for ad in here)]
        found[label] = " ".join(wrote) or "nothing"
    return found


def _is(value: Any, text: str) -> bool:
    if text == "undefined":
        return value is None
    return str(value) == text.strip('"') or (text.startswith("[") and isinstance(value, dict) and bool(value))


@pytest.mark.oldest_condor_too
@pytest.mark.parametrize("way", WAYS)
def test_no_attribute_takes_over_the_output_of_another_user(arena: Arena, way: str) -> None:
    site, pool = arena.site, arena.site.pool
    victims = dict(zip(FORGERIES, arena.victims(len(FORGERIES))))
    before, shown = arena.look(victims), arena.shown(victims)
    attacker = Attacker(site, arena.loot, copies=WAYS[way].copies)
    jobs = WAYS[way].act(attacker, victims)
    applied = _applied(arena, attacker, victims, jobs)
    own = [job for label, ids in jobs.items() for job in ids if not label.startswith(MAY_STAY)]
    ids = " || ".join("ClusterId == {} && ProcId == {}".format(*job.split(".")) for job in own)
    mine = f"({WAYS[way].open or 'false'}) && ({ids})"
    changed = arena.watch(victims, before, lambda: not pool.jobs(mine, ["ProcId"]))
    left = [f"{ad['ClusterId']}.{ad['ProcId']}" for ad in pool.jobs(mine, ["ClusterId", "ProcId"])]
    after = arena.shown(victims) if not changed else {}
    site.destination.start_again()
    ends = arena.ends(victims)
    rows = []
    for label in victims:
        told = "; ".join(filter(None, (changed.get(label), ends.get(label)))) or "untouched"
        rows.append(f"| {pool.version} | {way} | {label} | {applied.get(label, 'refused')} | {told} |")
    print("\n".join(["", *rows, *(f"refused: {line}" for line in sorted({_kind(line) for line in attacker.refused}))]))
    print(f"stolen: {arena.stolen()}; the attacker's jobs that did not end: {left}")
    assert not changed and not ends
    assert not arena.stolen()
    assert {job: facts for job, facts in after.items() if facts != shown[job]} == {}
    assert not arena.recorded(victims)
    assert not left, "his own jobs come to an end of their own"


@pytest.mark.oldest_condor_too
def test_a_job_under_the_name_of_another_job_is_told_and_waits_for_its_own(arena: Arena) -> None:
    """An owner who puts his job's id back gets his output. The node sends output of such a job before the job ends."""
    site, pool = arena.site, arena.site.pool
    victim = arena.victims(1)[0]
    own = site.submit("bob")
    pool.wait(lambda: site.state(own) in ("Confirmed", "RetryWait"), timeout_s=90, what=f"the output of {own} to wait")
    name = pool.q(own)["GlobalJobId"]
    attacker = Attacker(site, arena.loot)
    attacker.edit([([*own.ids], {"GlobalJobId": f'"{victim.name}"'})])
    doctor = ("doctor", "--role", "ap")
    pool.wait(
        lambda: f"GlobalJobId of job {own} of bob@" in site.stageout(*doctor, user="root", check=False).stdout,
        what="the doctor to name his job",
        interval_s=1,
    )
    assert lines_of(pool.ap, "ScheddAgentLog", "job-refused", "reason=Identity", "user=bob@")
    (forged,) = submit_procs(attacker, {"GlobalJobId": victim}).values()
    pool.wait(lambda: all(pool.history(job) for job in forged), timeout_s=90, what="the forged jobs to end")
    codes = [site.epoch_results(job)[-1]["DeveloperData"].get("StageOutSynchronousCode") for job in forged]
    assert codes == [None, "Identity", "Identity"]
    site.destination.start_again()
    attacker.edit([([*own.ids], {"GlobalJobId": f'"{name}"'})])
    assert site.wait_left(own)["StageOutState"] == "Delivered"
    site.check_delivered(own)
    assert not arena.ends({"victim": victim})


def _kind(line: str) -> str:
    return " ".join(part for part in line.split() if not part.replace(".", "").isdigit())


@pytest.mark.oldest_condor_too
@pytest.mark.parametrize("is_own_id", [True, False], ids=["own id", "the victim's id"])
def test_a_receipt_of_ones_own_plugin_names_no_output_of_another_user(arena: Arena, is_own_id: bool) -> None:
    """Bob's plugin reports a hand-off with the ticket, the manager and the key of alice's output."""
    site, pool = arena.site, arena.site.pool
    victims = {"receipt": arena.victims(1)[0]}
    (victim,) = victims.values()
    before, shown = arena.look(victims), arena.shown(victims)
    ticket = before["receipt"]["rows"][0]["ticket"]
    receipt = (
        f'Ticket = "{ticket}"; ManagerName = "{victim.manager}"; ManagerKey = "{victim.keys}"; Files = 2; Bytes = 9'
    )
    facts = f'TransferProtocol = "stageout"; DeveloperData = [ StageOutReceipt = [ {receipt} ] ]'
    ids = '"none"' if is_own_id else f'"{victim.name}"'
    text = f"""
executable = /bin/sh
arguments = "-c 'echo hi > a'"
transfer_input_files = facts
transfer_output_files = a
output_destination = evil://nowhere/$(Cluster).$(Process)
transfer_plugins = evil=plug
request_disk = 10M
request_memory = 50
MY.GlobalJobId = $(gid)
queue gid from (
 "none"
 {ids}
)
"""
    files = {"plug": PLUGIN.replace('\'TransferProtocol = "evil"; ', "'"), "facts": facts}
    job = pool.submit("bob", text, files=files)
    site.jobs.append(job)
    changed = arena.watch(victims, before, lambda: not pool.jobs(f"ClusterId == {job.cluster} && JobStatus < 3"))
    told = [ad.get("TransferOutputStats") for one in job.ids if (ad := pool.q(one) or pool.history(one))]
    after = arena.shown(victims) if not changed else {}
    site.destination.start_again()
    ends = arena.ends(victims)
    print(f"\n{pool.version}: {changed} {ends}; the attacker's jobs: {told}")
    assert any((stats or {}).get("STAGEOUTFilesCountLastRun") for stats in told), "HTCondor took the word of his plugin"
    assert not changed and not ends and after == shown


_EVIL_KEY = SigningKey(b"e" * 32).public


@pytest.mark.oldest_condor_too
@pytest.mark.parametrize("more", ["", "MY.StageOutAsync = false", "max_materialize = 3", 'MY.JobSetName = "keys"'])
def test_no_job_teaches_a_node_another_key_of_its_access_point(arena: Arena, more: str) -> None:
    """The node learnt the agent's key from its first notice: a key in a job would be the stronger one."""
    site, pool = arena.site, arena.site.pool
    victims = {"key": arena.victims(1)[0]}
    before = arena.look(victims)
    attacker = Attacker(site, arena.loot)
    lines = f"MY.StageOutAgentKey = $(key)\nMY.StageOutGuard = $(guard)\n{more}"
    queue = f'queue key,guard from (\n"none", true\n "{_EVIL_KEY}", true\n "{_EVIL_KEY}", 1 == 1\n)'
    job = attacker.submit(lines, queue=queue)
    wrote = [ad.get("StageOutAgentKey") for ad in pool.jobs(f"ClusterId == {job.cluster}", ["StageOutAgentKey"])]
    changed = arena.watch(victims, before, lambda: not pool.jobs(f"ClusterId == {job.cluster}", ["ProcId"]))
    learnt = lines_of(pool.eps[0], "SandboxManagerLog", "agent-key-learned", _EVIL_KEY)
    print(f"\n{pool.version}, {more}: keys in his jobs {wrote}; {changed}; learnt {learnt}")
    assert not changed and not learnt
    site.destination.start_again()
    assert not arena.ends(victims)


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
        pool.ap.run(["condor_transfer_data", str(job.cluster)], user="alice", cwd=job.dir)
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
    assert past[0]["TransferOutputStats"]["STAGEOUTFilesCountLastRun"] == 2
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
    copy = pool.history(f"{job.cluster + 1}.0")
    assert copy and copy["TransferOutputStats"]["STAGEOUTFilesCountLastRun"] == 2


@pytest.mark.oldest_condor_too
def test_behind_the_wall_a_renamed_schedd_delivers(walled: Arena) -> None:
    site, pool = walled.site, walled.site.pool
    _rename(pool)
    job = site.submit("alice")
    past = site.wait_left(job, timeout_s=120)
    assert past["GlobalJobId"].startswith("renamed@#")
    assert past["TransferOutputStats"]["STAGEOUTFilesCountLastRun"] == 2
    site.check_delivered(job)
