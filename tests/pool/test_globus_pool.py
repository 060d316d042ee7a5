"""Jobs with input and output by Globus on a real pool: the credmon of examples/ makes the tokens."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.harness.globus import Emulator, Task
from tests.harness.pool import Pool, Submission
from tests.harness.pool.image import find_image, image_account
from tests.harness.pool.pytest_plugin import keep_logs
from tests.pool.conftest import JOB, QUICK_AP, QUICK_EP, open_directory

pytestmark = pytest.mark.pool

ROOT = Path(__file__).resolve().parents[2]
CREDMON = ROOT / "examples" / "globus-credmon"
CLIENT = "c0ffee00-0000-4000-8000-000000000000"
QUICK_GLOBUS = {"LEASE": "20", "FAULT_PATIENCE": "1", "STALL": "20"}
SCOPE = "urn:globus:auth:scope:transfer.api.globus.org:all"

#: The talk's submit file with today's credential.
SUBMIT = """
executable = newz.sh
arguments = {outputs}
environment = "SIZE={size_bytes}"
should_transfer_files = ALWAYS
when_to_transfer_output = ON_EXIT_OR_EVICT
transfer_input_files = zkm.content, globusonline://zmiller@NEWBIO01:/scratch.1/blast/db/nr{inputs}
output_destination = globusonline://zmiller@NEWBIO01:/scratch.1/zmiller/tmp/$(Cluster).$(Process)/
transfer_output_files = {outputs}
use_oauth_services = globus
globus_oauth_permissions = urn:globus:auth:scope:transfer.api.globus.org:all
request_memory = 50
request_disk = 10M
queue
"""


@dataclass
class GlobusPool:
    """A pool whose execute point one collection sees, and the collection at the other end."""

    pool: Pool
    globus: Emulator
    node: str
    archive: str
    root: Path
    jobs: list[Submission] = field(default_factory=list)

    def submit(
        self,
        outputs: str = "out1 out2",
        size_bytes: int = 1000,
        inputs: str = "",
        check: str = "",
    ) -> Submission:
        """The talk's job as alice. :param inputs: further URLs. :param check: further commands of the job."""
        names = ", ".join(outputs.split())
        text = SUBMIT.format(outputs=outputs, size_bytes=size_bytes, inputs=inputs)
        text = text.replace(f"transfer_output_files = {outputs}", f"transfer_output_files = {names}")
        script = JOB.replace("#!/bin/sh", "#!/bin/sh\nset -e; grep -q nr nr; grep -q content zkm.content;" + check, 1)
        job = self.pool.submit("alice", text, files={"newz.sh": script, "zkm.content": "content\n"})
        self.jobs.append(job)
        return job

    def slow(self, rate_bytes_s: float | None) -> None:
        """How fast the archive takes each file."""
        self.globus.change(self.archive, rate_bytes_s=rate_bytes_s)

    def tasks(self, job: Any) -> list[Task]:
        """Tasks with output of a job."""
        return [task for task in self.globus.tasks if f"/{job}/" in json.dumps(task.document["DATA"])]

    def running(self, job: Any) -> Task:
        """The task with a job's output, once bytes of it move."""
        self.pool.wait(lambda: any(task.bytes_transferred for task in self.tasks(job)), 60, f"the task of {job}")
        (task,) = self.tasks(job)
        return task

    def active(self) -> list[Task]:
        """Tasks that are not over."""
        return [task for task in self.globus.tasks if task.status == "ACTIVE"]

    def check_delivered(self, job: Submission, timeout_s: float = 120) -> None:
        """The job is Delivered, and every byte that its last run wrote is there."""
        self.pool.wait(lambda: self.state(job) == "Delivered", timeout_s, f"{job} to be delivered")
        rows = [line.split(" ", 1) for line in (job.dir / "job.out").read_text().splitlines()]
        assert rows
        for digest, name in rows:
            found = self.root / "scratch.1/zmiller/tmp" / str(job) / name
            assert hashlib.sha256(found.read_bytes()).hexdigest() == digest

    def state(self, job: Any) -> str:
        """StageOutState, from the queue or else the history."""
        ad = self.pool.q(job, ["StageOutState"]) or self.pool.history(job) or {}
        return str(ad.get("StageOutState", ""))


def _ep_config(globus: Emulator, node: str, archive: str, home: Path) -> str:
    knobs = {"TRANSFER_URL": globus.address, "LOCAL": f"{node} {home}=/", "COLLECTIONS": f"NEWBIO01={archive}"}
    lines = [f"STAGEOUT_GLOBUS_{name} = {value}" for name, value in {**knobs, **QUICK_GLOBUS}.items()]
    return "\n".join(["", (ROOT / "condor_config.d" / "30-stageout-globus.conf").read_text(), *lines, ""])


def _ap_config(globus: Emulator, shared: Path) -> str:
    for name in ("globus_credmon", "60-globus-credmon.conf"):
        (shared / name).write_text((CREDMON / name).read_text())
        (shared / name).chmod(0o755)
    (shared / "secret").write_text("s3cret\n")
    return f"""
{(CREDMON / "60-globus-credmon.conf").read_text()}
SEC_CREDENTIAL_DIRECTORY_OAUTH = {shared}/oauth
CREDMON_OAUTH = {shared}/globus_credmon
GLOBUS_CREDMON_CLIENT_ID = {CLIENT}
GLOBUS_CREDMON_CLIENT_SECRET_FILE = {shared}/secret
GLOBUS_CREDMON_TOKEN_URL = {globus.address}/v2/oauth2/token
GLOBUS_CREDMON_INTERVAL = 2
"""


@contextmanager
def running(pools: Any) -> Iterator[GlobusPool]:
    """The pool and its service. :param pools: as the fixture ``stageout_pools``."""
    with open_directory("globus") as shared, Emulator(shared / "globus") as globus:
        _, group = image_account(find_image("25.14"), "condor")
        (shared / "oauth").mkdir()
        os.chown(shared / "oauth", 0, group)
        (shared / "oauth").chmod(0o2770)
        archive = globus.collection("archive", shared / "archive")
        (shared / "archive/scratch.1/blast/db").mkdir(parents=True)
        (shared / "archive/scratch.1/blast/db/nr").write_text("nr" * 5000)
        globus.client(CLIENT, "s3cret")
        home = shared / "pool"
        node = globus.collection("node", home)
        settings = {"ap_config": QUICK_AP + _ap_config(globus, shared),
                    "ep_config": QUICK_EP + _ep_config(globus, node.id, archive.id, home)}  # fmt: skip
        with pools(version="25.14", cpus=4, directory=home, binds=(shared,), **settings) as pool:
            uid = int(pool.ap.run(["id", "-u"], user="alice").stdout)
            globus.change(node.id, owner=(uid, uid))
            (shared / "login").write_text(json.dumps({"scopes": SCOPE}))
            (shared / "login").chmod(0o644)
            pool.ap.run(["condor_store_cred", "add-oauth", "-s", "globus", "-i", f"{shared}/login"], user="alice")
            yield GlobusPool(pool, globus, node.id, archive.id, shared / "archive")


@pytest.fixture(scope="module")
def place(stageout_pools: Any) -> Iterator[GlobusPool]:
    with running(stageout_pools) as made:
        yield made


@pytest.fixture
def site(place: GlobusPool, request: pytest.FixtureRequest) -> Iterator[GlobusPool]:
    place.slow(None)
    yield place
    place.slow(None)
    keep_logs(request, [place.pool])
    for job in place.jobs:
        if place.pool.q(job, ["JobStatus"]) is not None:
            place.pool.rm(job)


def test_the_talk_s_submit_file(site: GlobusPool) -> None:
    """Input and output through Globus, a plain file beside it; and a directory, which HTCondor names by what stands
    before the ``?``."""
    (site.root / "tree/sub").mkdir(parents=True)
    (site.root / "tree/sub/leaf").write_text("content")
    job = site.submit(inputs=", globus://NEWBIO01/tree?recursive=1", check=" test -s tree/sub/leaf; ")
    site.check_delivered(job)
    (task,) = site.tasks(job)
    assert task.files_transferred == 2
    assert task.owner == CLIENT
    inputs = [one for one in site.globus.tasks if one.document["source_endpoint"] == site.archive]
    assert sum(one.files_transferred for one in inputs) == 2


def test_a_removed_job_s_task_is_cancelled(site: GlobusPool) -> None:
    site.slow(20e3)
    job = site.submit(size_bytes=1_000_000)
    task = site.running(job)
    site.pool.rm(job)
    site.pool.wait(lambda: task.status == "FAILED", 60, "the task to be cancelled")
    assert task.fatal_error and task.fatal_error["code"] == "CANCELED"


def test_a_job_removed_during_its_input_leaves_no_task(site: GlobusPool) -> None:
    """HTCondor gives a plugin no signal then; its starter's end, or else the lease, ends the task."""
    site.globus.change(site.node, rate_bytes_s=500.0)
    try:
        job = site.submit()
        site.pool.wait(lambda: site.active(), 60, "the input's task")
        (task,) = site.active()
        site.pool.rm(job)
        site.pool.wait(lambda: task.status == "FAILED", 90, "the task to end")
    finally:
        site.globus.change(site.node, rate_bytes_s=None)


def test_a_killed_plugin_and_a_killed_manager_send_nothing_twice(site: GlobusPool) -> None:
    for name in ("globusonline_plugin", "sandbox-manager"):
        site.slow(100e3)
        job = site.submit(size_bytes=300_000)
        task = site.running(job)
        assert site.pool.eps[0].kill(name)
        site.check_delivered(job)
        assert [one.task_id for one in site.tasks(job)] == [task.task_id], name
        assert task.files_transferred == 2
