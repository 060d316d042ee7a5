"""examples/glidein on a real pool: pilots that have HTCondor, Python and the single file, and no installation."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness.pool import Pool, namespace
from tests.harness.pool.node import PILOT, Node
from tests.harness.pool.pytest_plugin import keep_logs
from tests.harness.pool.waiting import wait_until
from tests.pool.conftest import QUICK_AP, QUICK_EP, Site, open_directory

pytestmark = pytest.mark.pool

ROOT = Path(__file__).resolve().parents[2]

#: Settings for a machine on the loopback interface, with shorter intervals.
_MACHINE = f"""
NETWORK_INTERFACE = 127.0.0.1
BIND_ALL_INTERFACES = false
ENABLE_IPV6 = false
NUM_CPUS = 2
RUNBENCHMARKS = 0
UPDATE_INTERVAL = 2
UPDATE_OFFSET = 0
POLLING_INTERVAL = 1
{QUICK_EP}
"""

#: As much of the framework as the script sees: the names and forms of its documentation ("Custom scripts").
_FRAMEWORK = r"""
gconfig_get() { tac "$2" | grep -m1 "^$1 " | cut -d ' ' -f 2-; }
gconfig_add() { echo "$*" >> "$glidein_config"; }
add_condor_vars_line() { echo "$*" >> "$condor_vars_file"; }
"""

#: The framework's reading of it all, as far as it matters here.
_GLIDEIN_CONFIG = """
LOCAL_DIR = {work}
WORK_DIR = $(LOCAL_DIR)
RELEASE_DIR = /usr
LIBEXEC = /usr/libexec/condor
LOG = $(WORK_DIR)/log
EXECUTE = $(WORK_DIR)/execute
LOCK = $(LOG)
RUN = $(LOG)
LOCAL_CONFIG_DIR = $(WORK_DIR)/condor_config.d
REQUIRE_LOCAL_CONFIG_FILE = false
use security:recommended_v9_0
COLLECTOR_HOST = 127.0.0.1:{port}
SEC_DEFAULT_AUTHENTICATION_METHODS = TOKEN, FS
SEC_TOKEN_DIRECTORY = {tokens}
SEC_TOKEN_SYSTEM_DIRECTORY = {tokens}
STARTD_NAME = glidein_1
MASTER_NAME = glidein_1
DAEMON_LIST=MASTER,STARTD
use FEATURE: PartitionableSlot
GLIDEIN_ToDie = 2000000000
SHUTDOWN_GRACEFUL_TIMEOUT = 120
"""


@dataclass
class Field:
    """A pool, a machine without any HTCondor running, and a directory that both sides see."""

    pool: Pool
    node: Node
    home: Path
    site: Site

    def run(self, command: Sequence[object], **environment: str) -> subprocess.Popen[str]:
        """Start something as the pilot's user, with the system's programs only."""
        path = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        argv, env = self.node.command(
            list(map(str, command)), user="pilot", cwd="/tmp", env={"PATH": path, **environment}
        )
        return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    @contextmanager
    def running(self, command: Sequence[object], **environment: str) -> Iterator[subprocess.Popen[str]]:
        """The same; killed at the end when it still runs."""
        child = self.run(command, **environment)
        try:
            yield child
        finally:
            child.kill()
            child.wait()
            self.node.crash()  # whatever is left of the pilot
            self.node.boot()

    def wait_joined(self, name: str) -> None:
        wait_until(
            lambda: self.pool.startd_ads(f'regexp("{name}", Name) && StageOutHeartbeat isnt undefined', ["Name"]),
            timeout_s=90,
            what=f"{name} with its manager in the pool",
            describe=self._logs,
        )

    def put(self, path: Path, text: str, mode: int = 0o644) -> None:
        """Write a file of the pilot's user."""
        path.write_text(text)
        self.give(path, mode)

    def give(self, path: Path, mode: int = 0o755) -> None:
        """Make something the pilot's user's."""
        path.chmod(mode)
        os.chown(path, *namespace.account(self.node.pid, "pilot")[:2])

    def make_framework(self, work: Path) -> None:
        """A directory as glideinWMS makes it, with its helpers."""
        for path in (work, work / "client", work / "log", work / "execute", work / "condor_config.d"):
            path.mkdir()
            self.give(path)
        self.put(work / "add_config_line.source", _FRAMEWORK)
        self.put(work / "error_gen.sh", f'#!/bin/sh\necho "$*" >> {work}/results\n', 0o755)
        config = {
            "ADD_CONFIG_LINE_SOURCE": work / "add_config_line.source",
            "ERROR_GEN_PATH": work / "error_gen.sh",
            "CONDOR_VARS_FILE": work / "condor_vars.lst",
            "GLIDECLIENT_WORK_DIR": work / "client",
            "GLIDEIN_WORK_DIR": work / "main",
        }
        self.put(work / "glidein_config", "".join(f"{name} {value}\n" for name, value in config.items()))

    def _logs(self) -> str:
        names = [path for path in self.home.glob("*/log/*Log") if path.stat().st_size]
        return "\n".join(f"{path}:\n{path.read_text()[-1500:]}" for path in names)


@pytest.fixture(scope="module")
def field(stageout_pools: Any, destination: Any) -> Iterator[Field]:
    with ExitStack() as stack:
        home = stack.enter_context(open_directory("glidein"))
        pool = stack.enter_context(
            stageout_pools(version="25.14", execute_points=[PILOT], binds=(home,), ap_config=QUICK_AP)
        )
        (node,) = pool.eps
        node.stop()
        version = node.run(["/usr/bin/python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).stdout
        output = home / "stageout-pilot.pyz"
        build = [sys.executable, str(ROOT / "tools/pilot/build.py"), "--python", version.strip(), str(output)]
        subprocess.run(build, check=True, timeout=300)
        for script in (ROOT / "examples" / "glidein").glob("*.sh"):
            shutil.copy(script, home / script.name)
        (home / "site.conf").write_text(_MACHINE)
        home.chmod(0o777)
        yield Field(pool, node, home, Site(pool, destination, "glidein", home))


def test_a_pilot_of_one_script_and_one_file(field: Field, request: pytest.FixtureRequest) -> None:
    pool, site, work = field.pool, field.site, field.home / "work"
    keep_logs(request, [pool])
    settings = {
        "POOL": f"127.0.0.1:{pool.port}",
        "TOKEN": str(field.node.home / "secrets/tokens.d/pool"),
        "LIFE_S": "3600",
        "GRACE_S": "60",
        "WORK_DIR": str(work),
        "CONFIG": str(field.home / "site.conf"),
    }
    refused = field.run([field.home / "pilot.sh"], **{**settings, "TOKEN": ""})
    assert "TOKEN" in refused.communicate(timeout=60)[0] and refused.returncode == 1
    with field.running([field.home / "pilot.sh"], **settings) as pilot:
        field.wait_joined("pilot_")
        job = site.submit()
        ad = site.wait_left(job, timeout_s=120)
        assert ad["StageOutState"] == "Delivered"
        site.check_delivered(job)
        first = (work / "log" / "SandboxManagerLog").read_text()
        assert " sandbox-accepted " in first and 'to="slot ads"' in first
        field.node.kill("pilot.sh", signal.SIGTERM)
        said, _ = pilot.communicate(timeout=90)
    assert pilot.returncode == 0, said
    assert "told to stop, 60 s of grace" in said and "pilot-drained lost=0" in said
    last = (work / "log" / "SandboxManagerLog").read_text()
    assert "shutdown-started fast=False grace_s=46.0" in last


def test_a_glidein_with_the_custom_script_that_is_stopped_as_the_framework_stops_it(
    field: Field, request: pytest.FixtureRequest
) -> None:
    """The framework forwards every signal to condor_master as SIGQUIT."""
    pool, site, work = field.pool, field.site, field.home / "glide"
    keep_logs(request, [pool])
    field.make_framework(work)
    shutil.copy(field.home / "stageout-pilot.pyz", work / "client")
    field.give(work / "client" / "stageout-pilot.pyz", 0o644)
    done = field.run([field.home / "glideinwms_stageout.sh", work / "glidein_config", "main"])
    said, _ = done.communicate(timeout=120)
    assert done.returncode == 0, said
    assert (work / "results").read_text().startswith("-ok glideinwms_stageout.sh stageout ")
    assert (work / "condor_vars.lst").read_text() == "STAGEOUT_VERSION S - + N Y -\n"

    tokens = field.node.home / "secrets/tokens.d"
    text = _GLIDEIN_CONFIG.format(work=work, port=pool.port, tokens=tokens) + _MACHINE
    field.put(work / "condor_config", text)
    field.put(work / "condor_config.d" / "99-test.conf", "STAGEOUT_PILOT_GRACE = 12\n")
    # The bindings of this machine are the system's; a tarball has its own in RELEASE_DIR.
    with field.running(["condor_master", "-f"], CONDOR_CONFIG=str(work / "condor_config")) as master:
        field.wait_joined("glidein_1")
        site.destination.stop()
        try:
            job = site.submit()
            site.wait_state(job, "RetryWait", timeout_s=120)
            field.node.kill("condor_master", signal.SIGQUIT)
            assert master.wait(60) == 0
            log = (work / "log" / "SandboxManagerLog").read_text()
            assert "shutdown-started fast=True grace_s=12.0" in log and "pilot-drained lost=1" in log
            pool.wait(lambda: (pool.q(job) or {}).get("StageOutReruns") == 1, what="the job to run again")
        finally:
            site.destination.start()


def test_a_node_that_the_file_is_not_for_goes_on_without(field: Field) -> None:
    work = field.home / "foreign"
    field.make_framework(work)
    missing = field.run([field.home / "glideinwms_stageout.sh", work / "glidein_config", "main"])
    missing.communicate(timeout=60)
    field.put(work / "client" / "stageout-pilot.pyz", "#!/bin/sh\necho made for another Python >&2\nexit 1\n")
    foreign = field.run([field.home / "glideinwms_stageout.sh", work / "glidein_config", "main"])
    said, _ = foreign.communicate(timeout=60)
    assert (missing.returncode, foreign.returncode) == (1, 0)
    assert "made for another Python; output of jobs is uploaded by the jobs themselves" in said
    failed, without = (work / "results").read_text().splitlines()
    assert failed.startswith("-error glideinwms_stageout.sh Config stageout-pilot.pyz is not among the files")
    assert without == "-ok glideinwms_stageout.sh stageout absent"
