"""A user with nothing but an account at the access point takes nothing over of another user's output.

Alice's completed jobs wait on the node, because their server is away. Bob makes jobs of his own carry their values:
each attribute of tests/pool/hostile.py in each way to write it. HTCondor's own walls are as they are by default here
(no SECURE_JOB_ATTRS), because nothing of the product may rely on them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from stageout.core.signing import SigningKey
from tests.harness.destination import Destination
from tests.pool.arena import Arena, for_a_test, open_arena
from tests.pool.hostile import FORGERIES, MAY_STAY, NO_WALL, WAYS, Attacker, Victim, submit_procs
from tests.pool.test_forged_records import PLUGIN
from tests.pool.test_trust_pool import lines_of

pytestmark = pytest.mark.pool

#: Ways that each run tries; `make hostile` tries all.
_USUAL_WAYS = ("edit, idle", "submit, procs", "chirp")


@pytest.fixture(scope="module")
def arena_of_version(stageout_pools: Any, destination: Destination, request: pytest.FixtureRequest) -> Iterator[Arena]:
    """A pool without a wall of HTCondor's."""
    with open_arena(stageout_pools, destination, request.param, NO_WALL) as found:
        yield found


@pytest.fixture
def arena(arena_of_version: Arena, request: pytest.FixtureRequest) -> Iterator[Arena]:
    """The pool, whose server is away."""
    arena_of_version.site.destination.stop()
    yield from for_a_test(arena_of_version, request)


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
@pytest.mark.parametrize("way", WAYS if os.environ.get("STAGEOUT_ALL_ATTACKS") else _USUAL_WAYS)
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

    def names_his_job() -> bool:
        told = site.stageout("doctor", "--role", "ap", user="root", check=False).stdout
        return (
            re.search(rf"GlobalJobId of \d+ jobs? is another job's: .*\b{own}\b", told) is not None and "bob@" in told
        )

    pool.wait(names_his_job, what="the doctor to name his job", interval_s=1)
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
