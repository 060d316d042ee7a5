"""Starts the manager of ``node.py``, and clients below processes that look like startd and starter."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stageout.core.errors import StageoutError
from stageout.wire.handoff import socket_name

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = str(ROOT / "plugins" / "stageout_curl_plugin")
_DEADLINE_S = 300.0


@dataclass
class Manager:
    """A manager that takes hand-offs. :param ready_s: from its start, interpreter included."""

    pid: int
    home: Path
    ready_s: float

    def until_reported(self) -> None:
        """Wait until it has heard of the agent and made its first report, and has begun to send."""
        deadline_s = time.monotonic() + _DEADLINE_S
        seen = (self.home / "spool" / "run" / "state.json", self.home / "log" / "SandboxManagerLog")
        while not seen[0].exists() or "agent-found" not in seen[1].read_text():
            if time.monotonic() > deadline_s:
                raise StageoutError(f"the manager does not report, see {seen[1]}")
            time.sleep(0.1)

    def cpu_s(self) -> float:
        """Processor time that it has used, with all of its threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int) -> float:
    """Most memory that a process had in RAM so far, in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


def job_user() -> pwd.struct_passwd:
    """As whom jobs run: nobody below root, else ourselves."""
    return pwd.getpwnam("nobody") if os.geteuid() == 0 else pwd.getpwuid(os.geteuid())


def environment() -> dict[str, str]:
    """Of our processes: they find the product and the benchmarks, and do not give up on a busy machine."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "STAGEOUT_HANDOFF_TIMEOUT": "30"}


@contextmanager
def manager(home: Path) -> Iterator[Manager]:
    """Start one on what lies below ``home``, and end it."""
    home.chmod(0o755)
    for name in ("execute", "lib", "log"):
        (home / name).mkdir(exist_ok=True)
        (home / name).chmod(0o755)
    start_s = time.monotonic()
    command = [sys.executable, "-m", "scale.node", str(home), job_user().pw_name, PLUGIN]
    process = subprocess.Popen(command, cwd=ROOT / "benchmarks", env=environment(), start_new_session=True)
    socket = home / "spool" / "run" / socket_name(str(home / "execute"))
    try:
        while not socket.exists():
            if process.poll() is not None or time.monotonic() - start_s > _DEADLINE_S:
                raise StageoutError(f"the manager did not start, see {home}/log/SandboxManagerLog")
            time.sleep(0.005)
        yield Manager(process.pid, home, time.monotonic() - start_s)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


@dataclass(frozen=True)
class Seen:
    """One round of hand-offs.

    :param took_ms: each of them. :param manager_cpu_s: for all of them. :param clients_cpu_s: likewise.
    """

    took_ms: list[float]
    manager_cpu_s: float
    clients_cpu_s: float


class Clients:
    """Plugins of jobs on a node."""

    def __init__(self, node: Manager) -> None:
        self._node = node
        self._started = 0
        shell = shutil.which("dash") or shutil.which("bash")
        if shell is None:
            raise StageoutError("neither dash nor bash is installed: nothing could pass for a starter")
        for name in ("condor_startd", "condor_starter"):
            shutil.copy(shell, node.home / name)
        node.until_reported()

    def hand_off(self, clients: int, seconds: float) -> Seen:
        """Let so many clients hand off for a while. :raises StageoutError: the manager refused one."""
        before_s = self._node.cpu_s()
        environ = {**environment(), "STAGEOUT_SPOOL": str(self._node.home / "spool")}
        running = [
            subprocess.Popen(self._below_a_starter(seconds), env=environ, stdout=subprocess.PIPE, text=True)
            for _ in range(clients)
        ]
        answers = [json.loads(one.communicate(timeout=seconds + _DEADLINE_S)[0]) for one in running]
        for answer in answers:
            if answer["refused"]:
                raise StageoutError(f"the manager refused {answer['refused']} hand-offs: {answer['reason'][0]}")
        took_ms = [value for answer in answers for value in answer["ms"]]
        return Seen(took_ms, self._node.cpu_s() - before_s, sum(answer["cpu_s"] for answer in answers))

    def _below_a_starter(self, seconds: float) -> list[str]:
        """startd -> starter -a slot1_N -> client. The exit keeps the shells from becoming what they run."""
        home, user = self._node.home, job_user()
        self._started += 1
        scratch = home / "execute" / f"dir_{self._started}" / "scratch"
        scratch.mkdir(parents=True)
        (scratch / "output").write_bytes(os.urandom(4096))
        for path in (scratch, scratch / "output"):
            os.chown(path, user.pw_uid, user.pw_gid)
        program = f"{sys.executable} {ROOT}/benchmarks/scale/client.py"
        client = f"{program} {user.pw_uid} {seconds} {PLUGIN} {scratch}/output; exit $?"
        starter = f"{home}/condor_starter -c '{client}' -a slot1_{self._started}@ep.example.org; exit $?"
        return [f"{home}/condor_startd", "-c", starter]
