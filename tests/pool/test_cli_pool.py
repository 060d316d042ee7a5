"""The ``stageout`` command on real schedds, new and old, whose jobs are put into every state that it must tell apart.

There is no agent on these pools: the tests write into the jobs' ads what the agent would. A plugin of a few lines
reports files as handed off. The tests of command, agent and manager together are at the end, and in the other modules.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.harness.pool import Pool, Submission
from tests.harness.pool.errors import PoolError
from tests.harness.pool.node import PILOT
from tests.harness.pool.pytest_plugin import keep_logs
from tests.pool.conftest import QUICK_AP, QUICK_EP, Site
from tests.shown import shown_calls

pytestmark = pytest.mark.pool

STAGEOUT = "/opt/stageout/bin/stageout"
_DOCS = Path(__file__).resolve().parents[2] / "docs"

#: Takes hand:// files and reports them as handed off.
_PLUGIN = r"""#!/usr/bin/python3
import re, sys
if "-classad" in sys.argv:
    print('PluginType = "FileTransfer"\nMultipleFileSupport = true\nProtocolVersion = 2\nSupportedMethods = "hand"')
    sys.exit(0)
names = dict(zip(sys.argv[1::2], sys.argv[2::2]))
text = open(names["-infile"]).read()
with open(names["-outfile"], "r+") as out:
    for url, path in re.findall(r'Url = "([^"]*)".*?LocalFileName = "([^"]*)"', text, re.S):
        receipt = 'StageOutReceipt = [ Ticket = "0af"; ManagerName = "nobody"; ManagerKey = ""; Files = 1; Bytes = 5 ]'
        out.write(f'[ TransferSuccess = true; TransferProtocol = "stageout"; TransferType = "upload"; '
                  f'TransferUrl = "{url}"; TransferFileName = "{path}"; TransferFileBytes = 5; '
                  f'TransferTotalBytes = 5; DeveloperData = [ {receipt} ] ]\n')
"""

_JOB = """
executable = /bin/sh
arguments = "-c 'echo 1234 > out1; echo 1234 > out2; sleep {seconds}'"
transfer_executable = false
should_transfer_files = yes
{output}
request_memory = 20
request_disk = 1M
{extra}
{queue}
"""


class Desk:
    """A pool, and what tests do with it."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.jobs: list[Submission] = []

    def submit(
        self, *, seconds: int = 0, url: bool = True, user: str = "alice", extra: str = "", queue: str = "queue"
    ) -> Submission:
        """A job of alice whose two files are handed off (or, without a URL, come back to the access point)."""
        output = "transfer_output_files = out1, out2\noutput_destination = hand://dest/$(Cluster)" if url else ""
        job = self.pool.submit(user, _JOB.format(seconds=seconds, output=output, extra=extra, queue=queue))
        self.jobs.append(job)
        return job

    def handed_off(self, **how: Any) -> Submission:
        """A job that has completed and lingers, its output handed off."""
        job = self.submit(**how)
        self.pool.wait_status(job, "Completed")
        return job

    def say(self, job: Any, state: str, reason: str = "", **more: str) -> None:
        """Write what the agent would."""
        run = str((self.pool.q(job) or {})["NumShadowStarts"])
        facts = {"StageOutRun": run, "StageOutReason": json.dumps(reason), **more, "StageOutState": json.dumps(state)}
        self.pool.qedit(job, **facts)

    def hold(self, job: Any, reason: str) -> None:
        """Hold as the agent does when the output cannot be delivered."""
        self.say(job, "Failed", reason)
        pairs = {
            "TerminationPending": "false", "HoldReason": json.dumps(f"Stage-out failed: {reason}"),
            "HoldReasonCode": "12", "HoldReasonSubCode": "20072", "EnteredCurrentStatus": str(int(time.time())),
            "JobStatus": "5",
        }  # fmt: skip
        words = [part for pair in pairs.items() for part in pair]
        self.pool.ap.run(["condor_qedit", str(job), *words])

    def run(self, *arguments: str, user: str = "alice") -> subprocess.CompletedProcess[str]:
        """The command on the access point."""
        done = self.pool.ap.run([STAGEOUT, *arguments], user=user, check=False, timeout_s=90)
        assert "Traceback" not in done.stdout + done.stderr
        return done

    def python(self, expression: str) -> Any:
        """Value of an expression about ``stageout.jobs``, which alice's program computes on the access point."""
        program = f"import json; from stageout import jobs; print(json.dumps({expression}))"
        done = self.pool.ap.run(["/opt/stageout/bin/python", "-c", program], user="alice", timeout_s=90)
        return json.loads(done.stdout)

    def status(self, *arguments: str, user: str = "alice") -> dict[str, Any]:
        """``stageout status --json``."""
        done = self.run("status", "--json", *arguments, user=user)
        assert done.returncode == 0, done.stderr
        data: dict[str, Any] = json.loads(done.stdout)
        return data

    def wait_for_schedd(self) -> None:
        """Wait until a restarted schedd answers; sessions with the old one make some of the first questions fail."""

        def answers() -> bool:
            try:
                return all(self.pool.jobs("JobStatus > 0") is not None for _ in range(3))
            except PoolError:
                return False

        self.pool.wait(answers, what="the schedd to answer")

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """The command of alice in the background."""
        argv, env = self.pool.ap.command([STAGEOUT, *arguments], user="alice")
        pipe = subprocess.PIPE
        return subprocess.Popen(argv, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


@pytest.fixture(scope="module")
def pool_alone(stageout_pools: Any, request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    shared = tmp_path_factory.mktemp("hand")
    for folder in (shared, *shared.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o055)
    plugin = shared / "hand_plugin"
    plugin.write_text(_PLUGIN)
    plugin.chmod(0o755)
    settings = f"FILETRANSFER_PLUGINS = $(FILETRANSFER_PLUGINS), {plugin}"
    options = {"agent": False, "manager": False, "binds": (shared,), "ep_config": settings, "cpus": 8}
    with stageout_pools(version=request.param, execute_points=1, **options) as pool:
        yield pool


@pytest.fixture
def desk(pool_alone: Pool, request: pytest.FixtureRequest) -> Iterator[Desk]:
    made = Desk(pool_alone)
    yield made
    keep_logs(request, [pool_alone])
    for job in made.jobs:
        if pool_alone.q(job, ["JobStatus"]) is not None:
            pool_alone.rm(job)


def ended(child: subprocess.Popen[str], status: int) -> tuple[str, str]:
    """Outputs of a command that must end soon, with that status."""
    out, err = child.communicate(timeout=60)
    assert child.returncode == status, (out, err)
    return out, err


# ---- wait ------------------------------------------------------------------------------------------------------------


def test_wait_for_a_job_that_hands_nothing_off(desk: Desk) -> None:
    job = desk.submit(url=False, seconds=1)
    done = desk.run("wait", str(job), "--timeout", "60")
    assert done.returncode == 0, done.stderr
    assert f"{job} delivered: its output was transferred before the job ended" in done.stdout
    desk.pool.wait(lambda: desk.pool.status(job) == "Gone", what="the job to leave")
    assert desk.run("wait", str(job.cluster)).returncode == 0, "from the history"


@pytest.mark.oldest_condor_too
def test_wait_from_running_to_delivered(desk: Desk) -> None:
    job = desk.submit(seconds=2)
    child = desk.start("wait", str(job))
    desk.pool.wait_status(job, "Completed")
    assert child.poll() is None
    desk.say(job, "Moving", "moving out1")
    assert desk.run("wait", str(job), "--timeout", "0").returncode == 2
    desk.say(job, "Delivered", "2 files delivered")
    out, err = ended(child, 0)
    assert out == f"{job} delivered: its output is at its destination\n"
    assert "the job is Running" in err
    desk.pool.wait(lambda: desk.pool.status(job) == "Gone", what="the job to leave")
    assert desk.run("wait", str(job), "--timeout", "0").returncode == 0, "from the history"
    assert desk.run("wait", str(job), "--return", "7").returncode == 7


@pytest.mark.oldest_condor_too
def test_wait_knows_failed_from_otherwise_held(desk: Desk) -> None:
    job, other = desk.handed_off(), desk.submit(seconds=600)
    desk.pool.wait_status(other, "Running")
    desk.pool.hold(other, user="alice")
    desk.hold(job, "quota exceeded at dest")
    done = desk.run("wait", str(job))
    assert done.returncode == 1
    assert done.stdout == f"{job} failed: Stage-out failed: quota exceeded at dest\n"
    done = desk.run("wait", str(other), "--timeout", "1")
    assert done.returncode == 2
    assert "the job is held: " in done.stderr
    assert desk.run("wait", str(job), str(other), "--timeout", "1").returncode == 1
    desk.say(job, "Moving")
    assert desk.run("wait", str(job), "--timeout", "1").returncode == 2, "it is tried again"


def test_wait_for_removed_and_unknown_jobs(desk: Desk) -> None:
    job = desk.handed_off()
    desk.pool.rm(job, user="alice")
    desk.pool.wait(lambda: desk.pool.status(job) == "Gone", what="the job to leave")
    done = desk.run("wait", str(job))
    assert done.returncode == 1
    assert "removed from the queue" in done.stdout
    for unknown in ("99999", "99999.0", f"{job.cluster}.77"):
        done = desk.run("wait", unknown)
        assert done.returncode == 3
        assert done.stderr == f"stageout: {unknown}: no such job in the queue, nor in the schedd's history\n"
    assert desk.run("wait", "alice").returncode == 64


def test_wait_survives_a_restart_of_the_schedd(desk: Desk) -> None:
    job = desk.handed_off()
    child = desk.start("wait", str(job))
    old = set(desk.pool.ap.kill("condor_schedd", signal.SIGKILL))  # two while it answers a query in a child
    desk.pool.wait(lambda: set(desk.pool.ap.pids("condor_schedd")) - old, what="the schedd to be back")
    assert child.poll() is None
    desk.wait_for_schedd()
    desk.say(job, "Delivered")
    ended(child, 0)


def test_wait_for_a_cluster_with_jobs_in_queue_and_history(desk: Desk) -> None:
    job = desk.handed_off(queue="queue 2")
    first, second = job.ids
    desk.pool.wait_status(second, "Completed")
    desk.say(first, "Delivered")
    desk.pool.wait(lambda: desk.pool.status(first) == "Gone", what="the first to leave")
    assert desk.run("wait", str(job.cluster), "--timeout", "1").returncode == 2
    desk.say(second, "Delivered")
    assert desk.run("wait", str(job.cluster)).returncode == 0


@pytest.mark.oldest_condor_too
def test_wait_for_a_factory(desk: Desk) -> None:
    job = desk.submit(url=False, seconds=1, extra="max_materialize = 1", queue="queue 3")
    done = desk.run("wait", str(job.cluster), "--timeout", "80")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" delivered: ") == 3


def documented_dag() -> str:
    """The DAG of docs/user/dags.md with a single node that waits, in a hurry."""
    text = (_DOCS / "user" / "dags.md").read_text()
    (dag,) = [dag for dag in re.findall(r"^```dag\n(.*?)^```$", text, re.S | re.M) if "stageout wait" in dag]
    for slow, quick in (("DEFER 2 60", "DEFER 2 1"), ("--timeout 20", "--timeout 1")):
        assert slow in dag
        dag = dag.replace(slow, quick)
    return dag


@pytest.mark.oldest_condor_too
def test_wait_as_post_script(desk: Desk) -> None:
    node = _JOB.format(
        seconds=0,
        output="transfer_output_files = out1, out2\noutput_destination = hand://dest/$(Cluster)",
        extra="MY.StageOutAsync = true\nlog = node.log",
        queue="queue",
    )
    dag = desk.pool.submit_dag("alice", documented_dag(), files={"node.sub": node})
    desk.jobs.append(dag)
    mine = f"DAGManJobId == {dag.cluster} && JobStatus == 4"
    (first,) = desk.pool.wait(lambda: desk.pool.jobs(mine), what="the node's job to complete")
    desk.say(f"{first['ClusterId']}.0", "Lost", "the node died")
    second = f"{mine} && ClusterId != {first['ClusterId']}"
    (again,) = desk.pool.wait(lambda: desk.pool.jobs(second), timeout_s=90, what="RETRY to submit anew")
    desk.say(f"{again['ClusterId']}.0", "Delivered")
    desk.pool.wait(lambda: desk.pool.history(str(dag.cluster)), timeout_s=90, what="the DAG's end")
    assert (desk.pool.history(str(dag.cluster)) or {})["ExitCode"] == 0
    desk.pool.rm(f"{first['ClusterId']}.0")


# ---- status, history -------------------------------------------------------------------------------------------------


def test_status_of_ones_own_and_of_all(desk: Desk) -> None:
    mine, theirs = desk.handed_off(), desk.handed_off(user="bob")
    desk.say(mine, "RetryWait", "507 from dest", StageOutFilesLeft="1", StageOutBytesLeft="5", StageOutAttempts="2",
             StageOutNextAttempt=str(int(time.time()) + 600))  # fmt: skip
    (row,) = [row for row in desk.status()["jobs"] if row["job"] == str(mine)]
    assert (row["state"], row["files_left"], row["files_total"], row["bytes_total"]) == ("RetryWait", 1, 2, 10)
    assert (row["reason"], row["attempts"], row["owner"]) == ("507 from dest", 2, "alice")
    assert str(theirs) not in {row["job"] for row in desk.status()["jobs"]}
    everybody = {row["job"] for row in desk.status("--all")["jobs"]}
    assert {str(mine), str(theirs)} <= everybody
    assert everybody == {row["job"] for row in desk.status(user="root")["jobs"]}
    text = desk.run("status").stdout
    assert text.startswith("Note: the schedd agent of ap does not answer"), "none runs here"
    assert "\nJOB " in text and "507 from dest" in text
    assert f"Job {mine} of alice: waiting to retry" in desk.run("status", str(mine)).stdout
    assert "\x1b" not in text


def test_status_of_jobs_without_a_hand_off(desk: Desk) -> None:
    job = desk.submit(seconds=600)
    desk.pool.wait_status(job, "Running")
    (row,) = desk.status(str(job))["jobs"]
    assert (row["state"], row["job_status"], row["synchronous"]) == ("None", "Running", False)
    assert str(job) not in {row["job"] for row in desk.status()["jobs"]}
    assert desk.run("status", "99999").returncode == 3


@pytest.mark.oldest_condor_too
def test_history_refers_to_the_stock_records(desk: Desk) -> None:
    job = desk.handed_off()
    desk.say(job, "Delivered", "2 files delivered", StageOutStats='[ Bytes = 10; VerifiedBy = "size" ]')
    desk.pool.wait(lambda: desk.pool.history(job), what="the job to leave")
    data = json.loads(desk.run("history", "--json", str(job)).stdout)
    (item,) = data["jobs"]
    assert item["delivered"] is True and item["stats"] == {"Bytes": 10, "VerifiedBy": "size"}
    (run,) = item["runs"]
    assert run["run"] == 1 and run["tickets"] == ["0af"]
    assert sorted((row["url"], row["handed_off"]) for row in run["files"]) == [
        (f"hand://dest/{job.cluster}/out1", True),
        (f"hand://dest/{job.cluster}/out2", True),
    ]
    assert str(job) in desk.run("history").stdout
    assert str(job) not in desk.run("history", user="bob").stdout
    assert "handed off" in desk.run("history", str(job.cluster)).stdout
    assert desk.run("history", "99999").returncode == 3
    assert desk.python(f"[jobs.history('{job}'), jobs.wait('{job}')[0].outcome]") == [[item], "delivered"]
    assert desk.python(f"jobs.status('{job}').jobs[0].state") == "Delivered"
    assert desk.python(f"jobs.retry('{job}')[0].reason") == desk.run("retry", str(job)).stderr[len("stageout: ") : -1]


def test_the_commands_of_the_pages_for_owners_run(desk: Desk) -> None:
    """All at once, since each request waits for an agent that is not there."""
    job = desk.handed_off()
    desk.hold(job, "full")
    pages = [_DOCS / "user" / f"{name}.md" for name in ("commands", "held-jobs", "stages", "submit-files")]
    calls = {
        re.sub(r"\b12(34|35)?(\.0)?(?= |$)", str(job), call) for page in pages for call in shown_calls(page.read_text())
    }
    assert {call.split()[0] for call in calls} >= {"status", "wait", "retry", "cancel", "pause", "resume", "history"}
    with ThreadPoolExecutor(len(calls)) as workers:
        for call, done in zip(calls, workers.map(lambda call: desk.run(*shlex.split(call)), calls)):
            assert done.returncode in (0, 1, 2), (call, done.stderr)
            assert done.returncode == 2 or not re.search("usage|refused", done.stderr), (call, done.stderr)


# ---- requests --------------------------------------------------------------------------------------------------------


def test_only_the_owner_may_ask(desk: Desk) -> None:
    job = desk.handed_off()
    done = desk.run("cancel", str(job), user="bob")
    assert done.returncode == 1
    assert "is it your job" in done.stderr
    assert "StageOutRequest" not in (desk.pool.q(job) or {})


def test_a_request_is_answered_when_the_agent_has_taken_it(desk: Desk) -> None:
    job = desk.handed_off()
    desk.hold(job, "full")
    child = desk.start("retry", str(job))
    desk.pool.wait(lambda: (desk.pool.q(job) or {}).get("StageOutRequest") == "retry run=1", what="the request")
    desk.pool.qedit(job, StageOutRequest="undefined")
    time.sleep(1.5)
    assert child.poll() is None, "the ad still says Failed: a wait right after this command would end"
    desk.say(job, "Moving", "moving out1")
    out, _ = ended(child, 0)
    assert out == f"{job}: retry accepted; state of its output: sending: moving out1\n"


def test_without_an_agent_a_request_says_so(desk: Desk) -> None:
    job = desk.handed_off()
    done = desk.run("pause", str(job))
    assert done.returncode == 2
    assert "no schedd agent answers for ap" in done.stderr and "stays in the job's ad" in done.stderr


def test_nothing_to_ask_for(desk: Desk) -> None:
    job, sync = desk.submit(seconds=600), desk.submit(url=False)
    desk.pool.wait_status(job, "Running")
    done = desk.run("retry", str(job))
    assert done.returncode == 1
    assert "nothing to retry: the job is Running; its output is handed off when it ends" in done.stderr
    desk.pool.wait(lambda: desk.pool.status(sync) == "Gone", what="the job to leave")
    done = desk.run("cancel", str(sync))
    assert done.returncode == 1
    assert "has left the queue (its output was transferred before the job ended)" in done.stderr
    assert desk.run("pause", "99999").returncode == 3


# ---- daemons that are away -------------------------------------------------------------------------------------------


@pytest.mark.oldest_condor_too
def test_doctor_without_agent_and_manager(desk: Desk) -> None:
    done = desk.run("doctor", "--json", user="root")
    levels = {item["name"]: item["level"] for item in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1
    old = (desk.pool.version or "").startswith("23")
    assert levels["version"] == ("warn" if old else "ok")
    assert (levels["agent-daemon"], levels["agent-notice"]) == ("fail", "fail")
    assert {name for name, level in levels.items() if level == "fail"} == {"agent-daemon", "agent-notice"}
    done = desk.pool.eps[0].run([STAGEOUT, "doctor", "--json"], check=False)
    failed = {item["name"] for item in json.loads(done.stdout)["checks"] if item["level"] == "fail"}
    assert {"manager-daemon", "manager"} <= failed
    done = desk.pool.eps[0].run([STAGEOUT, "status", "--node"], check=False)
    assert done.returncode == 69 and "no sandbox manager answers" in done.stderr


def test_everything_says_that_the_schedd_is_down(desk: Desk) -> None:
    desk.pool.ap.stop()
    try:
        for arguments in (["status"], ["history"], ["retry", "1"], ["status", "1.0"], ["status", "--all"]):
            done = desk.run(*arguments)
            assert done.returncode == 69, (arguments, done.stdout, done.stderr)
            assert "stageout: " in done.stderr and "?" in done.stderr
        assert desk.run("wait", "1", "--timeout", "1").returncode == 2
        assert desk.run("doctor", user="root").returncode == 1
    finally:
        desk.pool.ap.start()
        desk.wait_for_schedd()


# ---- command, agent and manager together -----------------------------------------------------------------------------


def custodian(site: Site) -> Any:
    """The execute point that holds output."""
    return next(ep for ep in site.pool.eps if any((ep.home / "stageout" / "sandboxes").glob("*/*")))


def seen(site: Site, job: Any) -> dict[str, Any]:
    """The job's row in ``stageout status``."""
    (row,) = json.loads(site.stageout("status", "--json", str(job)).stdout)["jobs"]
    assert isinstance(row, dict)
    return row


def test_a_failure_is_shown_file_by_file_and_repaired(site: Site) -> None:
    site.destination.refuse("quota exceeded at dest")
    try:
        job = site.submit()
        done = site.stageout("wait", str(job), "--timeout", "80", check=False, timeout_s=90)
        assert done.returncode == 1, done
        assert "quota exceeded at dest" in done.stdout
        site.pool.wait(lambda: seen(site, job)["files"], what="the manager's report")
        row = seen(site, job)
        assert (row["state"], row["files_left"], row["files_total"]) == ("Failed", 2, 2)
        assert sorted(file["name"] for file in row["files"]) == ["out1", "out2"]
        for file in row["files"]:
            assert "quota exceeded at dest" in file["error"] and file["error_code"] > 0
            assert file["url"].endswith(f"/{job}/{file['name']}") and file["attempts"] >= 1
        node = custodian(site).run([STAGEOUT, "status", "--node", str(job)])
        assert "quota exceeded at dest" in node.stdout and f"Job {job} of alice" in node.stdout
    finally:
        site.destination.accept()
    assert "retry accepted" in site.stageout("retry", str(job)).stdout
    assert site.stageout("wait", str(job), "--timeout", "50").returncode == 0
    site.wait_left(job)
    (item,) = json.loads(site.stageout("history", "--json", str(job)).stdout)["jobs"]
    assert item["delivered"] is True and item["stats"]["Files"] == 2
    assert [len(run["tickets"]) for run in item["runs"]] == [1]


def test_pause_and_resume(site: Site) -> None:
    site.destination.stop()
    try:
        job = site.submit()
        site.wait_state(job, "RetryWait")
        assert "pause accepted" in site.stageout("pause", str(job)).stdout
    finally:
        site.destination.start()
    time.sleep(6)  # longer than the longest pause between two attempts on this pool
    assert not site.puts(job)
    assert "resume accepted" in site.stageout("resume", str(job)).stdout
    assert site.stageout("wait", str(job), "--timeout", "50").returncode == 0
    site.check_delivered(job)


def test_cancel_lets_the_job_go_without_its_output(site: Site) -> None:
    site.destination.stop()
    try:
        job = site.submit()
        site.wait_state(job, "RetryWait")
        assert "cancel accepted" in site.stageout("cancel", str(job)).stdout
        history = site.wait_left(job)
    finally:
        site.destination.start()
    assert (history["JobStatus"], history["StageOutState"]) == (4, "Cancelled")
    done = site.stageout("wait", str(job), check=False)
    assert done.returncode == 1
    assert "failed: cancelled: given up on request" in done.stdout
    assert not site.puts(job)


def test_a_request_for_an_earlier_run_is_refused(site: Site) -> None:
    """The owner asks to cancel what failed, and releases the job before the agent has seen the request."""
    site.destination.refuse("quota exceeded at dest")
    try:
        job = site.submit()
        site.pool.wait_status(job, "Held", timeout_s=90)
    finally:
        site.destination.accept()
    (agent,) = site.pool.ap.kill("schedd-agent", signal.SIGSTOP)
    try:
        argv, env = site.pool.ap.command([STAGEOUT, "cancel", str(job)], user="alice")
        pipe = subprocess.PIPE
        child = subprocess.Popen(argv, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        names = ["StageOutRequest", "NumShadowStarts"]
        site.pool.wait(lambda: site.pool.q(job, names).get("StageOutRequest") == "cancel run=1", what="the request")
        site.pool.release(job, user="alice")
        site.pool.wait(lambda: site.pool.q(job, names)["NumShadowStarts"] == 2, what="the second run")
    finally:
        os.kill(agent, signal.SIGCONT)
    out, _ = ended(child, 1)
    assert out == (f"{job}: cancel refused; the job runs again since: this request was for run 1, the last run is 2\n")
    past = site.wait_left(job, timeout_s=90)
    assert (past["StageOutState"], past["NumShadowStarts"]) == ("Delivered", 2)
    site.check_delivered(job)


def test_a_user_sees_only_ones_own_sandboxes_on_the_node(site: Site) -> None:
    site.destination.stop()
    try:
        job = site.submit()
        site.wait_state(job, "RetryWait")
        ep = custodian(site)
        jobs = {}
        for user in ("root", "alice", "bob"):
            data = json.loads(ep.run([STAGEOUT, "status", "--node", "--json"], user=user).stdout)
            jobs[user] = {row["job"] for row in data["jobs"]}
        assert str(job) in jobs["root"] and str(job) in jobs["alice"] and str(job) not in jobs["bob"]
        assert ep.run([STAGEOUT, "status", "--node", "--empty"], check=False).returncode == 1, "the node is needed"
        assert ep.run([STAGEOUT, "status", "--node", "--empty"], user="bob", check=False).returncode == 1
    finally:
        site.destination.start()
    site.wait_left(job)
    site.pool.wait(
        lambda: ep.run([STAGEOUT, "status", "--node", "--empty"], check=False).returncode == 0,
        timeout_s=60, what="a node that is not needed",
    )  # fmt: skip
    told = ep.run([STAGEOUT, "status", "--node"])
    assert told.stdout.startswith("Nothing waits here: this node can be removed.\n")


def test_doctor_finds_nothing_wrong_with_a_whole_pool(site: Site) -> None:
    job = site.submit(env="SLEEP=600")
    site.pool.wait_status(job, "Running")
    names: set[str] = set()
    for node in site.pool.nodes:
        done = node.run([STAGEOUT, "doctor", "--json"], check=False)
        checks = json.loads(done.stdout)["checks"]
        assert [item for item in checks if item["level"] == "fail"] == []
        assert done.returncode == 0
        names |= {item["name"] for item in checks if item["level"] == "ok"}
    assert {"agent-notice", "reporting-door", "manager", "startd-answers", "slot-attributes", "clock"} <= names
    assert "Traceback" not in site.stageout("doctor", check=False).stderr, "an ordinary user may ask too"


def test_a_pilot_is_checked_and_its_reports_are_found_in_its_slots(
    stageout_pools: Any, destination: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    pilot = dataclasses.replace(PILOT, config=QUICK_EP)
    with stageout_pools(version="25.14", execute_points=[pilot], ap_config=QUICK_AP) as pool:
        site = Site(pool, destination, "cli-pilot", tmp_path)
        destination.stop()
        try:
            job = site.submit()
            site.wait_state(job, "RetryWait")
            pool.wait(lambda: seen(site, job)["files"], what="the report in the slot's ad")
            assert {file["plugin"] for file in seen(site, job)["files"]} == {"stageout_curl_plugin"}
            done = pool.eps[0].run([STAGEOUT, "doctor", "--json"], user="pilot", check=False)
            data = json.loads(done.stdout)
            texts = {item["name"]: item["text"] for item in data["checks"]}
            assert data["roles"] == ["pilot"] and data["healthy"], data
            assert texts["reporting-door"].startswith("startd:")
            assert "of output wait here" in texts["restart-risk"]
        finally:
            destination.start()
            keep_logs(request, [pool])
