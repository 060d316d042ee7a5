"""A pool with the whole product on it, a destination, and jobs whose output can be checked byte by byte."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.harness.destination import Destination
from tests.harness.pool import Node, Pool, Submission
from tests.harness.pool.errors import PoolUnavailable
from tests.harness.pool.image import find_image
from tests.harness.pool.pytest_plugin import keep_logs
from tests.harness.pool.waiting import wait_until

#: HTCondor of the pools of tests that do not choose one.
VERSION = os.environ.get("STAGEOUT_POOL_VERSION") or "25.14"

#: Daemons look more often than on a real pool, so that tests need not wait for them.
QUICK_AP = """
STAGEOUT_POLL_INTERVAL = 1
STAGEOUT_NOTICE_INTERVAL = 5
STAGEOUT_EDIT_INTERVAL = 1
USE_JOBSETS = true
"""
QUICK_EP = """
STAGEOUT_ORDER_INTERVAL = 1
STAGEOUT_REPORT_INTERVAL = 15
STAGEOUT_RETRY_INITIAL_DELAY = 1
STAGEOUT_RETRY_MAX = 4
"""
#: Each starter and manager asks all plugins what they can, and HTCondor's plugins in Python take half a second.
LEAN = "FILETRANSFER_PLUGINS = $(LIBEXEC)/curl_plugin, $(LIBEXEC)/data_plugin\n"

#: A plugin that stops before or after the real one, for the jobs whose output goes below /gate-NAME/.
_GATED_PLUGIN = """#!/bin/sh
real=/opt/stageout/bin/stageout_curl_plugin
gates={gates}
tag=
case " $* " in
*" -upload"*) [ -z "$STAGEOUT_MOVER" ] && tag=$(sed -n 's,.*/gate-\\([a-z0-9-]*\\)/.*,\\1,p' "$2" | head -n 1) ;;
esac
pass() {{
    [ -n "$tag" ] && [ -e "$gates/$tag.$1" ] || return 0
    : > "$gates/$tag.$1.reached"
    while [ -e "$gates/$tag.$1" ]; do sleep 0.1; done
}}
pass before
"$real" "$@"
status=$?
pass after
exit $status
"""

#: Writes the named files with content that no other run has, and says on stdout what it wrote.
JOB = """#!/bin/sh
for name in "$@"; do
    case "$name" in */*) mkdir -p "${name%/*}" ;; esac
    { echo "run $(cat /proc/sys/kernel/random/uuid)"; head -c ${SIZE:-20000} /dev/urandom; } > "$name"
    echo "$(sha256sum < "$name" | cut -d' ' -f1) $name"
done
[ -z "$SLEEP" ] || sleep "$SLEEP"
[ -z "$KILLED" ] || kill -9 $$
exit ${EXIT:-0}
"""


@dataclass
class Site:
    """The pool and the destination of a test, and what tests do with them."""

    pool: Pool
    destination: Destination
    prefix: str
    gates: Path
    jobs: list[Submission] = field(default_factory=list)

    def submit(
        self,
        user: str = "alice",
        outputs: tuple[str, ...] = ("out1", "out2"),
        *,
        extra: str = "",
        place: str = "",
        env: str = "",
        queue: str = "queue",
        options: tuple[str, ...] = (),
        destination: str | None = None,
        script: str = JOB,
    ) -> Submission:
        """Submit a job (or several) that writes ``outputs`` and names this test's folder as its output_destination.

        :param place: folder below this test's, such as ``gate-NAME``. :param env: of the job, ``SIZE=10 SLEEP=3``.
        :param destination: another output_destination; "" for none. :param script: its program.
        """
        if destination is None:
            destination = self.url(place) + "/$(Cluster).$(Process)"
        lines = [
            "executable = job.sh",
            f"arguments = {' '.join(outputs)}",
            f'environment = "{env}"',
            "should_transfer_files = YES",
            "when_to_transfer_output = ON_EXIT",
            f"transfer_output_files = {', '.join(outputs)}",
            f"output_destination = {destination}" if destination else "",
            "request_cpus = 1",
            "request_memory = 50",
            "request_disk = 10M",
            extra,
            queue,
        ]
        job = self.pool.submit(user, "\n".join(lines), files={"job.sh": script}, options=list(options))
        self.jobs.append(job)
        return job

    def url(self, place: str = "") -> str:
        """Address of this test's folder (or one below it), without a slash at the end."""
        return self.destination.url(f"{self.prefix}/{place}").rstrip("/")

    def file(self, job: Any, name: str, place: str = "") -> Path:
        """The place where a job's output file must appear."""
        return self.destination.file("/".join(part for part in (self.prefix, place, str(job), name) if part))

    def wrote(self, job: Submission) -> dict[str, str]:
        """The files that the job's last run says it wrote: name -> sha256."""
        rows = (line.split(" ", 1) for line in (job.dir / "job.out").read_text().splitlines())
        return {name: digest for digest, name in rows}

    def check_delivered(self, job: Submission, place: str = "") -> None:
        """Every file that the job's last run wrote is at the destination, byte for byte."""
        wrote = self.wrote(job)
        assert wrote, f"{job} wrote nothing"
        for name, digest in wrote.items():
            found = self.file(job, name, place)
            assert found.exists(), f"{found} is missing"
            assert hashlib.sha256(found.read_bytes()).hexdigest() == digest, f"{found} is not what the last run wrote"

    def puts(self, job: Any, place: str = "") -> list[dict[str, Any]]:
        """Successful PUTs of a job's files."""
        path = "/".join(part for part in (self.prefix, place, str(job)) if part)
        return [row for row in self.destination.requests("PUT", path) if row["status"] < 300]

    def state(self, job: Any) -> str:
        """StageOutState, from the queue or else the history; "" when there is none."""
        ad = self.pool.q(job, ["StageOutState"]) or self.pool.history(job) or {}
        return str(ad.get("StageOutState") or "")

    def wait_left(self, job: Any, timeout_s: float = 60) -> dict[str, Any]:
        """Wait until the job has left the queue and return its ad in the history."""
        return wait_until(
            lambda: self.pool.q(job, ["JobStatus"]) is None and self.pool.history(job),
            timeout_s=timeout_s,
            what=f"job {job} to leave the queue",
            describe=lambda: f"State {self.state(job)}. {self.pool.why(job)}",
        )

    def wait_state(self, job: Any, state: str, timeout_s: float = 60) -> None:
        """Wait for a StageOutState."""
        self.pool.wait(lambda: self.state(job) == state, timeout_s=timeout_s, what=f"job {job} to be {state}")

    def close_gate(self, name: str, where: str) -> None:
        """Make the plugin of jobs below ``gate-NAME`` stop "before" or "after" its work."""
        (self.gates / f"{name}.{where}").touch()

    def at_gate(self, name: str, where: str) -> bool:
        """True when a plugin stands at that gate."""
        return (self.gates / f"{name}.{where}.reached").exists()

    def open_gate(self, name: str, where: str) -> None:
        """Let it go on."""
        (self.gates / f"{name}.{where}").unlink(missing_ok=True)
        (self.gates / f"{name}.{where}.reached").unlink(missing_ok=True)

    def stageout(self, *args: str, user: str = "alice", check: bool = True, timeout_s: float = 60) -> Any:
        """Run the command on the access point as that user; the completed process."""
        return self.pool.ap.run(["/opt/stageout/bin/stageout", *args], user=user, check=check, timeout_s=timeout_s)

    def file_records(self, *arguments: str, user: str = "alice") -> list[dict[str, Any]]:
        """Return what `stageout history -files` prints, sorted by name."""
        found = json.loads(self.stageout("history", "-files", "-json", *arguments, user=user).stdout)["files"]
        return sorted(found, key=lambda ad: str(ad.get("TransferFileName", "~")))

    def wait_recorded(self, job: Any, count: int) -> list[dict[str, Any]]:
        """Wait until so many records of a job's files are there. They are written after the job has left the queue."""
        return wait_until(
            lambda: found if len(found := self.file_records(str(job))) >= count else None,
            timeout_s=60,
            what=f"{count} records of files of job {job}",
        )

    def spool_is_empty(self) -> bool:
        """True when no execute point holds output."""
        return not any(any((ep.home / "stageout" / "sandboxes").glob("*/*")) for ep in self.pool.eps)

    def epoch_results(self, job: Any) -> list[dict[str, Any]]:
        """Result ads of the plugin in the OUTPUT records of all runs, oldest first."""
        records = self.pool.epoch(job, "OUTPUT")
        return [result for record in records for result in record.get("OutputPluginResultList", [])]

    def arm(self, fault: str) -> Path:
        """Let a step fail, one of the lists below or REFUSED_DATA. The file is gone when it happened."""
        path = self.gates.parent / "faults" / fault
        path.touch()
        return path


#: Steps (docs/developer/durable-steps.md) at which tests can make a daemon die, each once per arming.
_STEPS = ("intake-claim", "spool-move", "record-accepted", "record-order", "record-moving", "record-delivered")
MANAGER_FAULTS = (
    *(f"{label}.{when}" for label in _STEPS for when in ("kill-before", "kill-after")),
    "handoff-reply.kill-before",
    "spool-release.kill-before",
    "record-released.kill-before",
)
#: The disk of an execute point refuses data, once.
REFUSED_DATA = "spool-data.EIO"
AGENT_FAULTS = tuple(
    f"{label}.{when}"
    for label in ("agent-number", "orders-advertise", "edit-delivered")
    for when in ("kill-before", "kill-after")
)
#: The agent dies at one of the transactions that edit several jobs.
GROUP_FAULTS = ("edit-group.kill-before", "edit-group.kill-after")
#: The agent dies at a step behind the end of a job.
HISTORY_FAULTS = ("history-append.kill-before", "history-append.kill-after")


def _fault_settings(daemon: str, faults: tuple[str, ...], directory: Path) -> str:
    items = (f"{label}={when}@{directory}/{label}.{when}" for label, when in (fault.split(".") for fault in faults))
    return f"{daemon}_ENVIRONMENT = \"STAGEOUT_FAULTS='{' '.join(items)}'\"\n"


def pool_settings(directory: Path) -> dict[str, str]:
    """Settings for a pool with the gated plugin, which wins http on the execute points, and with armable faults."""
    gates, faults = directory / "gates", directory / "faults"
    for folder, mode in ((directory, 0o755), (gates, 0o1777), (faults, 0o777)):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(mode)
    plugin = directory / "gated_plugin"
    plugin.write_text(_GATED_PLUGIN.format(gates=gates))
    plugin.chmod(0o755)
    plugins = f"FILETRANSFER_PLUGINS = $(FILETRANSFER_PLUGINS), {plugin}\n"
    return {
        "ep_config": QUICK_EP + plugins + _fault_settings("SANDBOX_MANAGER", (*MANAGER_FAULTS, REFUSED_DATA), faults),
        "ap_config": QUICK_AP
        + _fault_settings("SCHEDD_AGENT", (*AGENT_FAULTS, *GROUP_FAULTS, *HISTORY_FAULTS), faults),
    }


@contextmanager
def open_directory(name: str) -> Iterator[Path]:
    """A temporary directory that every user can reach, unlike those of pytest."""
    with tempfile.TemporaryDirectory(prefix=f"stageout-{name}-", ignore_cleanup_errors=True) as path:
        Path(path).chmod(0o755)
        yield Path(path)


#: Fixtures of pools that exist in two versions of HTCondor.
_OF_A_VERSION = ("desk_of_version", "pool_alone", "failing_desk", "arena_of_version", "walled_of_version")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests on the newest version of HTCondor, and those that are marked so on the oldest, too."""
    versions = ("25.14", "23.9") if metafunc.definition.get_closest_marker("oldest_condor_too") else ("25.14",)
    for name in _OF_A_VERSION:
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, versions, indirect=True, scope="module")


@pytest.fixture(scope="session")
def destination() -> Iterator[Destination]:
    """One web server for all tests."""
    with open_directory("destination") as home, Destination(home) as server:
        yield server


@contextmanager
def _running(**settings: Any) -> Iterator[Pool]:
    with Pool(**{"base_config": LEAN, **settings}) as pool:
        if settings.get("agent", True):
            wait_until_acquainted(pool)
        yield pool


def wait_until_acquainted(pool: Pool, eps: Sequence[Node] = ()) -> None:
    """Wait until every manager knows, since its last start, that the schedd has an agent: before it takes nothing.

    :param eps: only the managers of these.
    """

    def ready(ep: Node) -> bool:
        log = ep.log("SandboxManagerLog")
        since = log[log.rfind(" daemon-started ") :]
        running = {f"pid={process.inner_pid}" for process in ep.processes() if process.is_named("sandbox-manager")}
        return not running.isdisjoint(since.partition("\n")[0].split()) and "agent-found" in since

    for ep in eps or pool.eps:
        pool.wait(lambda ep=ep: ready(ep), timeout_s=60, what=f"the manager of {ep.name} to hear of the agent")


@pytest.fixture(scope="session")
def stageout_pools() -> Any:
    """Function like ``Pool`` for ``with``; skips with the reason where no pool can be made (in CI: fails)."""
    try:
        find_image(VERSION)
    except PoolUnavailable as reason:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(reason))
    return _running


@pytest.fixture(scope="session")
def main_pool(stageout_pools: Any) -> Iterator[tuple[Pool, Path]]:
    """A pool with two execute points, the whole product and the gated plugin."""
    with open_directory("gates") as shared:
        settings = {"version": VERSION, "execute_points": 2, "cpus": 8, "binds": (shared,), **pool_settings(shared)}
        with stageout_pools(**settings) as pool:
            yield pool, shared / "gates"


@pytest.fixture
def site(main_pool: tuple[Pool, Path], destination: Destination, request: pytest.FixtureRequest) -> Iterator[Site]:
    """The pool, with a folder of its own for each test; jobs that a test leaves are removed."""
    pool, gates = main_pool
    name = "".join(char if char.isalnum() else "-" for char in request.node.name.lower())[:60]
    made = Site(pool, destination, name, gates)
    destination.be_well()
    wait_until_acquainted(pool)
    yield made
    for fault in (gates.parent / "faults").iterdir():
        fault.unlink()
    destination.be_well()
    keep_logs(request, [pool])
    for ad in pool.jobs("true", ["ClusterId", "ProcId"]):  # DAGs submit jobs of their own
        pool.rm(f"{ad['ClusterId']}.{ad['ProcId']}")
