"""An upgrade to another version of the ledger, as the page about upgrades says it: ``make upgrade OLD=commit``.

The pool begins with a former version and with output that waits for a server that is down. Access point and execute
points then come to this version: two execute points are drained, of which one was not and is sent back first, and the
third has lost the former version. At the end the first one goes back. Each step is a command of
docs/administrator/upgrade.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.harness.destination import Destination
from tests.harness.pool import Node, NodeSpec, Pool, Submission, install
from tests.harness.pool.image import run_host
from tests.harness.pool.waiting import wait_until
from tests.pool.conftest import LEAN, QUICK_AP, QUICK_EP, VERSION, Site, open_directory, wait_until_acquainted

#: The last one whose ledger had another version.
_WITH_MIGRATIONS = "0d0a2d91"
_DAEMONS = {"ap": "schedd_agent", "ep": "sandbox_manager"}
_LOGS = {"ap": "ScheddAgentLog", "ep": "SandboxManagerLog"}
_CHECKOUT = Path(__file__).resolve().parents[2]
_WAITING = ("Confirmed", "Leased", "Moving", "RetryWait")
_REFUSED = "this program knows 1 and did not touch it"
#: The shortest one that the product takes: jobs of the third node run again after it.
_LEASE = "STAGEOUT_LEASE = 60\n"


class OldPool(Pool):
    """A pool whose nodes have installations of their own, so that each can be changed by itself."""

    def _make_node(self, name: str, role: str, spec: NodeSpec, venv: Path, names: Sequence[str]) -> Node:
        own = self.dir / f"{name}-stageout"
        run_host(["cp", "-al", str(venv), str(own)])
        return super()._make_node(name, role, spec, own, names)


class Upgrade:
    """The steps of the page, and what must hold after each."""

    def __init__(self, site: Site, old: Path) -> None:
        self.site, self.pool = site, site.pool
        self.old = old
        self._begin_s = time.monotonic()
        self._venvs = {checkout: install.product_venv(self.pool.image, checkout) for checkout in (old, _CHECKOUT)}

    def run(self) -> None:
        """Do all of it. :raises Exception: something is not as the page says it."""
        first, second, third = self.pool.eps
        self.site.destination.stop()
        waiting = {ep.name: [self._submit(ep) for _ in range(3)] for ep in self.pool.eps}
        for job in [job for jobs in waiting.values() for job in jobs]:
            self.pool.wait(lambda job=job: self.site.state(job) in _WAITING, timeout_s=120, what=f"{job} to wait")
        self._say("each of three nodes holds the output of three jobs")

        self._install(self.pool.ap, _CHECKOUT)
        self._restart(self.pool.ap)
        wait_until(lambda: len(self._listed()) == 9, what="the new agent to list the old managers' output")
        self._say("the access point has this version, and lists the nine jobs")

        self._install(second, _CHECKOUT)
        self._restart(second, starts=False)
        self._say("a node that was not drained: the manager of this version ended with 99, and changed nothing")
        late = self._submit(second)
        self._install(second, self.old)
        self._on(second)
        self._say("the former version is back there, and runs")

        self._lose_version(third, waiting["ep3"])
        self._say(
            "the former version was lost on the third node: its jobs ran again, and this version has their output"
        )

        self.site.destination.start_again()
        for job in waiting["ep3"]:
            self.site.wait_left(job)
            self.site.check_delivered(job)
        kept = sum(path.is_file() for path in (_spool(third) / "unknown").rglob("*"))
        assert kept >= 2 * len(waiting["ep3"]), f"only {kept} files are kept"
        self._say(f"it delivered, and {kept} files of the former version stay in unknown")
        for ep in (first, second):
            self._drain(ep)
        self._say("two nodes are drained, and --empty ends with 0")
        for job in [*waiting["ep1"], *waiting["ep2"]]:
            assert self.site.wait_left(job)["NumShadowStarts"] == 1, f"{job} ran again"
            self.site.check_delivered(job)
        self.site.wait_left(late)
        self.site.check_delivered(late)
        self._say("all their output is delivered, and no job ran again")

        for ep in (first, second):
            self._off(ep)
            shutil.move(str(_spool(ep) / "ledger"), ep.home / "ledger-before")
            self._install(ep, _CHECKOUT)
            self._on(ep)
            self._end_drain(ep)
        self._new_output(first, second)
        self._say("both have this version, and take output over")

        self._drain(first)
        self._off(first)
        shutil.move(str(_spool(first) / "ledger"), first.home / "ledger-after")
        self._install(first, self.old)
        self._on(first)
        self._end_drain(first)
        self._new_output(first)
        self._say("one went back to the former version, and takes output over")

    def _lose_version(self, ep: Node, jobs: Sequence[Submission]) -> None:
        self._off(ep)
        shutil.move(str(_spool(ep) / "ledger"), ep.home / "ledger-lost")
        (_spool(ep) / "unknown").mkdir(mode=0o700, exist_ok=True)
        for sandbox in (_spool(ep) / "sandboxes").iterdir():
            shutil.move(str(sandbox), _spool(ep) / "unknown")
        self._install(ep, _CHECKOUT)
        self._on(ep)
        for job in jobs:
            self.pool.wait(
                lambda job=job: self.pool.q(job)["NumShadowStarts"] == 2 and self.site.state(job) in _WAITING,
                timeout_s=240,
                what=f"{job} to run again",
            )

    def _submit(self, ep: Node) -> Submission:
        return self.site.submit(extra=f'requirements = Machine == "{ep.name}"')

    def _new_output(self, *eps: Node) -> None:
        wait_until_acquainted(self.pool, eps)
        jobs = [self._submit(ep) for ep in eps]
        for job in jobs:
            assert self.site.wait_left(job, timeout_s=120)["StageOutState"] == "Delivered"
            self.site.check_delivered(job)

    def _install(self, node: Node, checkout: Path) -> None:
        """Put a version into the node's directories, as a package does: stored answers of plugins stay there."""
        venv, own = self._venvs[checkout], self.pool.dir / f"{node.name}-stageout"
        for old in own.iterdir():
            if old.is_dir() and not old.is_symlink() and old.name != "bin":
                shutil.rmtree(old)
        run_host(["cp", "-alf", *(str(path) for path in venv.iterdir() if path.is_dir()), str(own)])
        for program in (venv / "bin").iterdir():
            target = node.home / "bin" / program.name
            target.unlink(missing_ok=True)
            shutil.copy2(program, target, follow_symlinks=False)
        node.config.add_fragments(install.fragments(checkout, node.role))
        node.run(["condor_reconfig"])

    def _off(self, node: Node) -> None:
        node.run(["condor_off", "-daemon", _DAEMONS[node.role]])
        wait_until(lambda: not node.pids(_DAEMONS[node.role].replace("_", "-")), what="the daemon to end")

    def _on(self, node: Node) -> None:
        node.run(["condor_on", "-daemon", _DAEMONS[node.role]])
        wait_until(lambda: self._is_started(node), what=f"the daemon of {node.name} to start")

    def _restart(self, node: Node, *, starts: bool = True) -> None:
        """Restart the daemon. :param starts: False: this version must refuse the ledger, and must not come back."""
        node.run(["condor_off", "-daemon", _DAEMONS[node.role]])
        time.sleep(3)  # the page: wait a few seconds between the two
        before = _spooled(node)
        log = node.log_dir / _LOGS[node.role]
        begin = len(log.read_text())
        node.run(["condor_on", "-daemon", _DAEMONS[node.role]])
        if starts:
            wait_until(lambda: " daemon-started " in log.read_text()[begin:], what=f"{node.name}'s daemon to start")
            return
        wait_until(lambda: _REFUSED in log.read_text()[begin:], what="the refusal")
        for command in (["status", "--node"], ["doctor", "--role", "ep"]):
            done = self._stageout(node, *command)
            print(command, done.returncode, done.stdout, done.stderr)
        print(log.read_text()[begin:])
        time.sleep(15)  # condor_master would start it again after ten seconds
        assert log.read_text()[begin:].count(_REFUSED) == 1, log.read_text()[begin:]
        assert "exited with status 99 (daemon will not restart automatically)" in node.log("master")
        assert before
        after = _spooled(node)
        changed = sorted(path for path in {*before, *after} if before.get(path) != after.get(path))
        assert not changed, f"the refused manager changed {changed}"

    def _is_started(self, node: Node) -> bool:
        return bool(node.pids(_DAEMONS[node.role].replace("_", "-")))

    def _drain(self, ep: Node) -> None:
        """Drain a node: the first by switching its startd off, others by condor_drain (names here have no domain)."""
        if ep is self.pool.eps[0]:
            ep.run(["condor_off", "-peaceful", "-daemon", "startd"])
        else:
            ep.run(["condor_drain", f"slot1@{ep.name}"])
        wait_until(lambda: self._stageout(ep, "status", "--node", "--empty").returncode == 0, timeout_s=120,
                   what=f"{ep.name} to be empty")  # fmt: skip

    def _end_drain(self, ep: Node) -> None:
        if ep is self.pool.eps[0]:
            ep.run(["condor_on", "-daemon", "startd"])
        else:
            ep.run(["condor_drain", "-cancel", f"slot1@{ep.name}"])

    def _stageout(self, node: Node, *arguments: str) -> subprocess.CompletedProcess[str]:
        return node.run(["/opt/stageout/bin/stageout", *arguments], check=False)

    def _listed(self) -> list[str]:
        rows = json.loads(self._stageout(self.pool.ap, "status", "--all", "--json").stdout)["jobs"]
        return [str(row["job"]) for row in rows if row["state"] in _WAITING]

    def _say(self, what: str) -> None:
        print(f"{time.monotonic() - self._begin_s:6.0f} s  {what}", flush=True)


def _spool(ep: Node) -> Path:
    return ep.home / "stageout"


def _spooled(node: Node) -> dict[str, str]:
    """All files of the node's spool, but for SQLite's index of its journal, and a journal with nothing in it."""
    found = (path for path in _spool(node).rglob("*") if path.is_file() and not path.name.endswith("-shm"))
    files = [path for path in found if path.stat().st_size]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def main(argv: list[str] | None = None) -> int:
    """Do it, and print each step."""
    options = argparse.ArgumentParser(description="Upgrade a pool with waiting output to this version of the ledger.")
    options.add_argument("commit", nargs="?", default=_WITH_MIGRATIONS, help="the former version")
    commit = options.parse_args(argv).commit
    settings = {
        "ap_config": QUICK_AP + _LEASE,
        "ep_config": QUICK_EP + "STAGEOUT_ATTEMPTS = 0\n",
        "base_config": LEAN,
        "cpus": 4,
    }
    with open_directory("upgrade") as home, Destination(home) as destination:
        old = home / "old"
        old.mkdir()
        archive = subprocess.run(["git", "archive", commit], cwd=_CHECKOUT, stdout=subprocess.PIPE, check=True).stdout
        subprocess.run(["tar", "-x", "-C", str(old)], input=archive, check=True)
        with OldPool(version=VERSION, execute_points=3, checkout=old, **settings) as pool:
            wait_until_acquainted(pool)
            try:
                Upgrade(Site(pool, destination, "upgrade", home), old).run()
            except BaseException:
                pool.collect_logs(Path("test-logs/upgrade"))
                raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
