"""One machine of the pool: its own root, host name, processes and condor_master."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.harness.pool import namespace
from tests.harness.pool.config import NodeConfig
from tests.harness.pool.errors import PoolError, PoolTimeout
from tests.harness.pool.image import Image
from tests.harness.pool.namespace import Process
from tests.harness.pool.network import Network
from tests.harness.pool.waiting import wait_until

CONFIG_DIR = "/etc/condor/config.d"


@dataclass(frozen=True)
class NodeSpec:
    """The settings of one execute point.

    :param user: who runs condor_master; anything but root is like a pilot: no root anywhere, jobs run as that user.
    :param config: extra HTCondor settings.
    :param resolvable: False leaves the node's own host name out of its ``/etc/hosts``, as is common among pilots.
    :param token_scopes: authorisations of its token, empty for all; a real pilot's are
        ``("ADVERTISE_STARTD", "ADVERTISE_MASTER", "READ")``.
    """

    user: str = "root"
    config: str = ""
    resolvable: bool = True
    token_scopes: tuple[str, ...] = ()


PILOT = NodeSpec(user="pilot", token_scopes=("ADVERTISE_STARTD", "ADVERTISE_MASTER", "READ"))
"""An execute point as a pilot makes one: an ordinary user with a token that may only advertise."""


@dataclass
class Node:
    """A running (or stopped) machine of the pool. All directories are the same inside and outside."""

    name: str
    role: str
    home: Path
    shared: Path
    image: Image
    spec: NodeSpec
    config: NodeConfig
    hosts: str
    binds: tuple[tuple[Path, str, bool], ...] = ()
    keep_fds: tuple[int, ...] = ()
    network: Network | None = None
    number: int = 0
    pid: int = 0
    born: int = 0
    _master: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def log_dir(self) -> Path:
        """HTCondor's LOG."""
        return self.home / "log"

    @property
    def execute_dir(self) -> Path:
        """HTCondor's EXECUTE; on the same filesystem as its parent, which all users may traverse."""
        return self.home / "execute"

    @property
    def spool_dir(self) -> Path:
        """HTCondor's SPOOL."""
        return self.home / "spool"

    @property
    def root(self) -> Path:
        """The node's whole filesystem as seen from this machine (while it runs)."""
        return Path(f"/proc/{self.pid}/root")

    @property
    def is_up(self) -> bool:
        """True while the machine (not necessarily its HTCondor) runs."""
        return bool(self.pid) and namespace.start_time(self.pid) == self.born

    def boot(self) -> None:
        """Switch the machine on, without HTCondor."""
        if self.is_up:
            return
        binds = (*self.binds, (self.config.directory, CONFIG_DIR, True))
        layout = namespace.Layout(self.name, self.home, self.shared, self.hosts, binds, self.network is not None)
        self.pid = namespace.boot(self.image, layout, self.keep_fds)
        self.born = namespace.start_time(self.pid)
        if self.network is not None:
            self.network.join(self.number, self.pid)

    def start(self) -> None:
        """Start condor_master, and the machine when it is off."""
        self.boot()
        uid, _, home = namespace.account(self.pid, self.spec.user)
        run = self.root / "run/condor"
        run.mkdir(exist_ok=True)
        os.chown(run, *namespace.account(self.pid, "condor" if uid == 0 else self.spec.user)[:2])
        argv = self._entered(["condor_master", "-f"], self.spec.user, "/")
        with open(self.home / "master.out", "ab") as out:
            self._master = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env=namespace.environment(self.spec.user, home),
            )

    def stop(self, *, graceful: bool = False, timeout_s: float = 30) -> None:
        """Shut HTCondor down (the machine stays on): fast, or gracefully, which lets jobs vacate."""
        with contextlib.suppress(PoolError):
            self.kill("condor_master", signal.SIGTERM if graceful else signal.SIGQUIT)
        wait_until(
            lambda: not self.pids("condor_master"), timeout_s=timeout_s, what=f"condor_master of {self.name} to end"
        )
        self._collect_master()

    def restart(self) -> None:
        """Stop HTCondor fast and start it again."""
        self.stop()
        self.start()

    def crash(self) -> None:
        """Power cut: every process ends at once, nothing is shut down. :meth:`start` brings it back with its disk."""
        namespace.kill_namespace(self.pid, self.born)
        self._collect_master()
        self.pid = self.born = 0

    def run(
        self,
        argv: Sequence[str],
        *,
        user: str = "root",
        cwd: str | Path | None = None,
        check: bool = True,
        stdin: str = "",
        timeout_s: float = 60,
        env: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside as that user and return its output.

        :param cwd: working directory, the user's home when not given.
        :param check: raise PoolError when its status is not 0.
        :param timeout_s: seconds until it is killed.
        """
        command, full_env = self.command(argv, user=user, cwd=cwd, env=env)
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=full_env,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as child:
            try:
                out, err = child.communicate(stdin, timeout=timeout_s)
            except subprocess.TimeoutExpired as late:
                namespace.kill_tree(child.pid)
                raise PoolTimeout(f"{self.name}: {' '.join(argv)} took more than {timeout_s:.0f} s") from late
        if check and child.returncode:
            raise PoolError(
                f"{self.name}: {' '.join(argv)} as {user} ended with status {child.returncode}: {err or out}"
            )
        return subprocess.CompletedProcess(list(argv), child.returncode, out, err)

    def command(
        self,
        argv: Sequence[str],
        *,
        user: str = "root",
        cwd: str | Path | None = None,
        env: dict[str, str] | None = None,
    ) -> tuple[list[str], dict[str, str]]:
        """Command line and environment for this machine that run a command inside, for a Popen of one's own."""
        if not self.is_up:
            raise PoolError(f"Node {self.name} is switched off.")
        home = namespace.account(self.pid, user)[2]
        return self._entered(argv, user, str(cwd or home)), namespace.environment(user, home, env)

    def processes(self) -> list[Process]:
        """Everything that runs inside."""
        return list(namespace.processes(self.pid)) if self.is_up else []

    def pids(self, name: str) -> list[int]:
        """Pids on this machine of a daemon or program: "startd" finds condor_startd, "gsiftp_plugin" the script."""
        return sorted(process.pid for process in self.processes() if process.is_named(name))

    def kill(self, name: str, how: int = signal.SIGKILL) -> list[int]:
        """Send a signal to every process of that name and, for SIGKILL, wait until they are gone.

        :returns: their pids on this machine.
        :raises PoolError: when there is none.
        """
        found = self.pids(name)
        if not found:
            raise PoolError(f"No {name} runs on {self.name}.")
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
        if how == signal.SIGKILL:
            wait_until(lambda: not set(found) & set(self.pids(name)), what=f"{name} to be gone", interval_s=0.02)
        return found

    def configure(self, text: str, *, name: str = "95-test.conf", reconfig: bool = True) -> None:
        """Write (or replace) a file of extra settings and tell the daemons."""
        self.config.write(name, text)
        if reconfig and self.pids("condor_master"):
            self.reconfig()

    def reconfig(self) -> None:
        """Make all daemons read their settings again."""
        self.run(["condor_reconfig"], user=self.spec.user)

    def config_val(self, knob: str) -> str:
        """Value of a setting, as the node's tools see it; "" when it is not defined."""
        done = self.run(["condor_config_val", knob], user=self.spec.user, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    def log(self, daemon: str) -> str:
        """Text of a daemon's log: "StartLog", or "startd" for short; "" when there is none yet."""
        names = {
            "startd": "StartLog",
            "starter": "StarterLog.slot1_1",
            "schedd": "SchedLog",
            "shadow": "ShadowLog",
            "master": "MasterLog",
            "collector": "CollectorLog",
            "negotiator": "NegotiatorLog",
        }
        path = self.log_dir / names.get(daemon, daemon)
        return path.read_text(errors="replace") if path.exists() else ""

    def _entered(self, argv: Sequence[str], user: str, cwd: str) -> list[str]:
        uid, gid, _ = namespace.account(self.pid, user)
        return namespace.enter(self.pid, argv, uid=uid, gid=gid, cwd=cwd)

    def _collect_master(self) -> None:
        if self._master is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._master.wait(timeout=10)
            self._master = None
