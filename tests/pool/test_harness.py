"""The pool harness itself: real daemons, real users, daemons that are killed, nodes of several kinds."""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest

from tests.harness.pool import PILOT, NodeSpec, Pool, PoolError, PoolTimeout, Submission, image, leftovers, namespace
from tests.harness.pool.ads import Ad
from tests.harness.pool.errors import PoolUnavailable
from tests.harness.pool.image import RECIPES
from tests.harness.pool.install import fragments
from tests.harness.pool.submission import job_constraint, with_defaults
from tests.harness.pool.waiting import wait_until

SLEEP = "executable = /bin/sleep\ntransfer_executable = false\narguments = {}\n"
WHO = """executable = who.sh
should_transfer_files = yes
transfer_input_files = in.txt
when_to_transfer_output = on_exit
"""
WHO_SCRIPT = "#!/bin/sh\nid -un; hostname; cat in.txt; echo made > made.txt\n"

USERS = ("alice", "bob")

pool_test = pytest.mark.pool


class PutHandler(http.server.BaseHTTPRequestHandler):
    """Keeps what is PUT in ``server.received``."""

    def do_PUT(self) -> None:
        self.server.received[self.path] = self.rfile.read(int(self.headers["Content-Length"]))  # type: ignore[attr-defined]
        self.send_response(201)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def put_server() -> Iterator[http.server.ThreadingHTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), PutHandler)
    server.received = {}  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def ended(pool: Pool, job: Submission) -> Ad:
    return pool.wait(lambda: pool.history(job), timeout_s=120, what=f"the end of job {job} of {job.user}")


def queued(pool: Pool, job: Submission) -> Ad:
    return pool.wait(lambda: pool.q(job), what=f"job {job} in the queue")


def running_node(pool: Pool, program: str) -> Any:
    return pool.wait(lambda: next((ep for ep in pool.eps if ep.pids(program)), None), what=f"{program} on a node")


@pool_test
@pytest.mark.parametrize("version", sorted(RECIPES))
def test_jobs_of_two_users_run_as_themselves(pool_factory: Callable[..., Pool], version: str) -> None:
    pool = pool_factory(version=version, execute_points=2, stageout=False)
    assert {ad["Machine"] for ad in pool.startd_ads()} == {"ep1", "ep2"}
    jobs = {user: pool.submit(user, WHO, files={"who.sh": WHO_SCRIPT, "in.txt": f"for {user}"}) for user in USERS}
    for user, job in jobs.items():
        record = ended(pool, job)
        assert (record["Owner"], record["ExitCode"]) == (user, 0)
        who, host, given = (job.dir / "job.out").read_text().splitlines()
        assert (who, given) == (user, f"for {user}")
        assert host in ("ep1", "ep2")
        assert (job.dir / "made.txt").stat().st_uid == (job.dir).stat().st_uid
        assert [event["Name"] for event in pool.events(job)][-1] == "JOB_TERMINATED"
        assert pool.q(job) is None


@pool_test
@pytest.mark.parametrize("version", sorted(RECIPES))
def test_stock_plugin_uploads_to_a_server_of_the_test(
    pool_factory: Callable[..., Pool], put_server: Any, version: str
) -> None:
    pool = pool_factory(version=version, stageout=False)
    url = f"http://127.0.0.1:{put_server.server_port}/alice/"
    text = WHO + f"transfer_output_files = made.txt\noutput_destination = {url}\n"
    job = pool.submit("alice", text, files={"who.sh": WHO_SCRIPT, "in.txt": "x"})
    record = ended(pool, job)
    assert put_server.received["/alice/made.txt"] == b"made\n"
    assert record["TransferOutputStats"]["HTTPFilesCountTotal"] == 1


@pool_test
@pytest.mark.parametrize("version", sorted(RECIPES))
def test_killed_daemons_come_back(pool_factory: Callable[..., Pool], version: str) -> None:
    pool = pool_factory(version=version, stageout=False)
    job = pool.submit("alice", SLEEP.format(300))
    node = running_node(pool, "sleep")
    killed = pool.ap.kill("schedd", signal.SIGKILL)
    pool.wait(lambda: pool.q(job), timeout_s=20, what="the new schedd")
    assert pool.ap.pids("schedd") != killed
    node.kill("startd")
    pool.wait(lambda: node.pids("startd"), timeout_s=20, what="the new startd")
    another = pool.submit("bob", SLEEP.format(0))
    pool.wait(lambda: pool.history(another), what="a job on the new startd")


@pool_test
def test_hold_release_vacate_edit_remove(pool_factory: Callable[..., Pool]) -> None:
    pool = pool_factory(stageout=False)
    job = pool.submit("bob", SLEEP.format(300))
    running_node(pool, "sleep")
    pool.hold(job, reason="for the test")
    pool.wait_status(job, "Held")
    assert "for the test" in queued(pool, job)["HoldReason"]
    pool.release(job, user="bob")
    pool.wait(lambda: queued(pool, job)["NumShadowStarts"] == 2, what="the second run")
    running_node(pool, "sleep")
    pool.vacate(job, fast=True)
    pool.wait(lambda: queued(pool, job)["NumShadowStarts"] == 3, what="the third run")
    pool.qedit(job, Note='"seen"', JobPrio="3")
    ad = queued(pool, job)
    assert (ad["Note"], ad["JobPrio"]) == ("seen", 3)
    with pytest.raises(PoolError):
        pool.qedit(job, user="alice", JobPrio="9")
    pool.rm(job, user="bob")
    assert ended(pool, job)["JobStatus"] == 3


@pool_test
def test_dag_runs_its_nodes(pool_factory: Callable[..., Pool]) -> None:
    pool = pool_factory(stageout=False)
    text = "JOB A a.sub\nJOB B a.sub\nPARENT A CHILD B\n"
    dag = pool.submit_dag("alice", text, files={"a.sub": SLEEP.format(0) + "queue\n"})
    assert ended(pool, dag)["ExitCode"] == 0
    nodes = [pool.history(f'DAGManJobId == {dag.cluster} && DAGNodeName == "{name}"') for name in "AB"]
    assert [node and node["JobStatus"] for node in nodes] == [4, 4]


@pool_test
def test_two_pools_at_once_know_nothing_of_each_other(pool_factory: Callable[..., Pool]) -> None:
    first, second = pool_factory(stageout=False), pool_factory(stageout=False, execute_points=2)
    assert first.port != second.port
    assert (len(first.eps), len({ad["Machine"] for ad in first.startd_ads()})) == (1, 1)
    job = second.submit("carol", SLEEP.format(0))
    second.wait(lambda: second.history(job), what="the job in the second pool")
    assert first.jobs() == [] and first.history(job) is None


@pool_test
def test_a_pilot_runs_jobs_as_itself_and_may_only_advertise(pool_factory: Callable[..., Pool]) -> None:
    pool = pool_factory(stageout=False, execute_points=[PILOT])
    job = pool.submit("alice", WHO, files={"who.sh": WHO_SCRIPT, "in.txt": "x"})
    pool.wait(lambda: pool.history(job), what="the job on the pilot")
    assert (job.dir / "job.out").read_text().splitlines()[:2] == ["pilot", "ep1"]
    assert {process.uid for process in pool.eps[0].processes()} == {2010}


@pool_test
def test_a_node_whose_name_does_not_resolve(pool_factory: Callable[..., Pool]) -> None:
    pool = pool_factory(stageout=False, execute_points=[NodeSpec(resolvable=False)])
    assert pool.eps[0].run(["getent", "hosts", "ep1"], check=False).returncode != 0
    job = pool.submit("alice", SLEEP.format(0))
    pool.wait(lambda: pool.history(job), what="a job on the nameless node")


@pool_test
def test_a_node_comes_back_from_a_power_cut_with_its_disk(pool_factory: Callable[..., Pool]) -> None:
    pool = pool_factory(stageout=False)
    node = pool.eps[0]
    node.run(["sh", "-c", "echo kept >/var/tmp/mark"])
    assert node.pids("startd")
    node.crash()
    assert not node.is_up and node.processes() == []
    node.start()
    assert node.run(["cat", "/var/tmp/mark"]).stdout == "kept\n"
    job = pool.submit("alice", SLEEP.format(0))
    pool.wait(lambda: pool.history(job), what="a job after the power cut")


@pool_test
def test_without_overlayfs_nodes_still_have_their_own_files(
    pool_factory: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    mount_root = namespace._mount_root
    monkeypatch.setattr(namespace, "_mount_root", lambda *args: mount_root(*args).replace("mount -t overlay", "false"))
    pool = pool_factory(stageout=False)
    pool.ap.run(["touch", "/etc/mine", "/tmp/mine"])
    assert pool.eps[0].run(["ls", "/etc/mine", "/tmp/mine"], check=False).stdout == ""
    assert ended(pool, pool.submit("alice", SLEEP.format(0)))["ExitCode"] == 0


@pool_test
def test_extra_settings_and_stop_and_start(pool_factory: Callable[..., Pool]) -> None:
    pool = pool_factory(
        stageout=False, config="MINE = all", ap_config="MINE = $(MINE) ap", ep_config="MINE = $(MINE) ep", cpus=3
    )
    assert [node.config_val("MINE") for node in pool.nodes] == ["all ap", "all ep"]
    assert pool.startd_ads()[0]["TotalSlotCpus"] == 3
    pool.eps[0].configure("STARTD_ATTRS = $(STARTD_ATTRS) Mark\nMark = 7")
    pool.wait(lambda: pool.startd_ads("Mark == 7"), what="the reconfigured startd's ad")
    pool.eps[0].stop()
    assert pool.eps[0].pids("startd") == []
    pool.eps[0].start()
    pool.wait(lambda: pool.eps[0].pids("startd"), what="the started startd")


@pool_test
def test_a_hung_command_is_ended_with_its_children(pool_factory: Callable[..., Pool]) -> None:
    pool = pool_factory(stageout=False)
    with pytest.raises(PoolTimeout):
        pool.ap.run(["sh", "-c", "sleep 1234; true"], timeout_s=0.5)
    pool.wait(lambda: not pool.ap.pids("sleep"), what="the end of the sleep")


DYING_OWNER = """
import os, sys
from tests.harness.pool import Pool
pool = Pool(stageout=False).start()
print(pool.dir, pool.ap.pid, pool.ap.born, flush=True)
os._exit(1)
"""


@pool_test
def test_leftovers_of_a_dead_owner_are_cleaned(pool_factory: Callable[..., Pool]) -> None:
    pool_factory(stageout=False).close()  # skips where there can be no pool
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run([sys.executable, "-c", DYING_OWNER], env=env, stdout=subprocess.PIPE, text=True, check=False)
    directory, pid, born = done.stdout.split()
    assert namespace.start_time(int(pid)) == int(born), "the orphaned pool should still run"
    assert Path(directory) in leftovers.clean()
    assert namespace.start_time(int(pid)) != int(born)
    assert not Path(directory).exists()


def test_pools_of_another_pid_namespace_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name, where in (("mine", leftovers._where()), ("container", ["boot", "pid:[1]"])):
        directory = tmp_path / f"{leftovers.PREFIX}{name}"
        directory.mkdir()
        state = {
            "where": where,
            "owner": [999_999_999, 1],
            "detached": False,
            "nodes": {"ap": [999_999_999, 1, "root"]},
        }
        (directory / leftovers.STATE).write_text(json.dumps(state))
    assert [path.name for path in leftovers.clean()] == [f"{leftovers.PREFIX}mine"]
    assert [path.name for path in tmp_path.iterdir()] == [f"{leftovers.PREFIX}container"]


def test_job_references() -> None:
    assert job_constraint("3.1") == "ClusterId == 3 && ProcId == 1"
    assert job_constraint("3") == "ClusterId == 3"
    assert job_constraint('Owner == "alice"') == 'Owner == "alice"'


def test_submit_text_gets_what_it_lacks() -> None:
    assert with_defaults("executable = x\nLog = mine").splitlines() == [
        "output = job.out", "error = job.err", "executable = x", "Log = mine", "queue",
    ]  # fmt: skip
    assert with_defaults("executable = x\nqueue 3\n").count("queue") == 1


def test_fragments_follow_the_role(tmp_path: Path) -> None:
    (tmp_path / "condor_config.d").mkdir()
    for name in (
        "README.md",
        "10-stageout.conf",
        "20-stageout-ap.conf",
        "20-stageout-ep.conf",
        "30-x-pilot.conf",
    ):
        (tmp_path / "condor_config.d" / name).touch()
    assert [path.name for path in fragments(tmp_path, "ap")] == ["10-stageout.conf", "20-stageout-ap.conf"]
    assert [path.name for path in fragments(tmp_path, "pilot")] == [
        "10-stageout.conf", "20-stageout-ep.conf", "30-x-pilot.conf",
    ]  # fmt: skip


def test_ads_ignore_case_of_names() -> None:
    ad = Ad([("ProcID", 0), ("Owner", "alice")])
    assert (ad["ProcId"], ad.get("OWNER"), ad.get("Missing", 7), "owner" in ad) == (0, "alice", 7, True)
    assert list(ad) == ["ProcID", "Owner"]
    with pytest.raises(KeyError):
        ad["Missing"]


def test_waiting_says_what_was_waited_for_and_counts_errors_as_not_yet() -> None:
    answers = iter([PoolError("restarting"), 0, "there"])

    def ask() -> object:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert wait_until(ask, timeout_s=5, interval_s=0) == "there"
    with pytest.raises(PoolTimeout, match="for the moon; the last value was: 0"):
        wait_until(lambda: 0, timeout_s=0, what="the moon")


def test_image_with_another_release_is_refused() -> None:
    image._check_release("25.14", "$CondorVersion: 25.14.1 2026-09-01 $")
    with pytest.raises(PoolError, match=r"HTCondor 25\.14 now install 25\.15\.0"):
        image._check_release("25.14", "$CondorVersion: 25.15.0 2026-12-01 $")


@pytest.mark.parametrize("earlier", [(), ("200001",), ("200001", "200002", "200003")])
def test_image_is_renewed_each_month(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: tuple[str, ...]) -> None:
    """The root of an earlier month serves where none can be built; of older roots only the newest stays."""
    monkeypatch.setenv("STAGEOUT_POOL_CACHE", str(tmp_path))
    recipe = RECIPES["23.9"]
    cache = tmp_path / "pool" / "23.9"
    roots = [cache / f"root-{recipe.key}-{month}" for month in earlier]
    for root in roots:
        root.mkdir(parents=True)

    def fail(*arguments: object) -> None:
        raise PoolError("no mirror")

    monkeypatch.setattr(image, "_build", fail)
    if not earlier:
        with pytest.raises(PoolUnavailable, match="no mirror"):
            image.find_image("23.9")
        return
    assert image.find_image("23.9").root == roots[-1]
    monkeypatch.setattr(image, "_build", lambda *arguments: None)
    found = image.find_image("23.9").root
    assert found.name > roots[-1].name
    assert sorted(cache.glob("root-*")) == [roots[-1], found]
