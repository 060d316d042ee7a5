"""A whole pool: one access point with the central manager, and execute points.

>>> with Pool(execute_points=2) as pool:                                     # doctest: +SKIP
...     job = pool.submit("alice", "executable = /bin/sleep\\narguments = 1\\nqueue")
...     pool.wait(lambda: pool.history(job), what="the job's end")
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Callable, TypeVar, Union

from tests.harness.pool import config as settings
from tests.harness.pool import install, leftovers
from tests.harness.pool.ads import Ad
from tests.harness.pool.config import DOMAIN, NodeConfig
from tests.harness.pool.errors import PoolError
from tests.harness.pool.image import PREFIX, find_image, image_account
from tests.harness.pool.logs import collect
from tests.harness.pool.network import Network
from tests.harness.pool.node import Node, NodeSpec
from tests.harness.pool.queries import Queries
from tests.harness.pool.submission import (
    Submission,
    job_constraint,
    prepare_directory,
    submitted_cluster,
    with_defaults,
)
from tests.harness.pool.waiting import wait_until

T = TypeVar("T")
JobRef = Union[str, Submission]
_START_TIMEOUT_S = 60.0


@dataclass
class Pool:
    """Settings and life of one pool; use it as a context manager, or :meth:`start` and :meth:`close`.

    :param version: release, see :func:`tests.harness.pool.image.find_image`.
    :param execute_points: how many, or one :class:`NodeSpec` for each.
    :param cpus: NUM_CPUS of each execute point.
    :param config: extra HTCondor settings for all nodes; `ap_config`, `ep_config` for one role.
    :param base_config: HTCondor settings of all nodes that the product's fragments extend.
    :param stageout: install the product and its configuration fragments.
    :param agent: let the fragment start the AP's daemon; `manager` likewise for the EPs.
    :param prefix: of the nodes' names, where jobs flock between pools.
    :param directory: where everything is put; a temporary directory, removed at the end, when not given.
    :param checkout: source tree of the product; found, or the installed distribution, when not given.
    :param binds: directories of this machine to be seen (writable) at the same path in all nodes.
    :param network: in which execute points have links of their own; without one all nodes share the loopback interface.
    :param detached: leave it running when this process ends.
    """

    version: str | None = None
    execute_points: int | Sequence[NodeSpec] = 1
    cpus: int = 2
    config: str = ""
    ap_config: str = ""
    ep_config: str = ""
    base_config: str = ""
    stageout: bool = True
    agent: bool = True
    manager: bool = True
    prefix: str = ""
    directory: Path | None = None
    checkout: Path | None = None
    binds: Sequence[Path] = ()
    network: Network | None = None
    detached: bool = False
    nodes: list[Node] = field(default_factory=list, init=False)
    port: int = field(default=0, init=False)

    def __enter__(self) -> Pool:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def ap(self) -> Node:
        """The access point, which is the central manager too."""
        return self.nodes[0]

    @property
    def eps(self) -> list[Node]:
        """The execute points, ``ep1`` first."""
        return self.nodes[1:]

    # ---- life ----------------------------------------------------------------------------------------------------

    def start(self) -> Pool:
        """Start everything and wait until every execute point has a slot in the collector."""
        self.image = find_image(self.version)
        leftovers.clean()
        self._make_directory()
        try:
            self._start()
        except BaseException:
            # The logs stay for reading; the next pool's start removes them when this process has ended.
            self.close(keep=True)
            raise
        return self

    def close(self, *, keep: bool = False) -> None:
        """End every process, unmount everything and remove the directory (unless it was given, or `keep`)."""
        if hasattr(self, "_queries"):
            self._queries.close()
        for node in self.nodes:
            node.crash()
        for handle in self._held:
            os.close(handle)
        self._held = ()
        if keep:
            return
        (self.dir / leftovers.STATE).unlink(missing_ok=True)
        if self.directory is None:
            shutil.rmtree(self.dir, ignore_errors=True)

    def detach(self) -> None:
        """Leave a detached pool to itself: only this process's helper ends."""
        self._queries.close()

    def collect_logs(self, dest: Path) -> Path:
        """Copy all logs, settings, histories and users' job logs to `dest`, for reading after the end."""
        return collect(self.dir, dest)

    # ---- jobs ----------------------------------------------------------------------------------------------------

    def submit(
        self,
        user: str,
        text: str,
        *,
        files: Mapping[str, bytes | str] | None = None,
        options: Sequence[str] = (),
        reschedule: bool = True,
    ) -> Submission:
        """Submit as that user from a fresh directory of its own.

        ``log``, ``output`` and ``error`` are added as job.log, job.out and job.err when the text has none of its own.

        :param files: further files of the directory, name to content; scripts (``#!``) are made executable.
        :param options: of condor_submit, such as ``["-spool"]``.
        :param reschedule: negotiate at once.
        """
        place = self._submit_directory(user, {**(files or {}), "job.sub": with_defaults(text)})
        done = self.ap.run(["condor_submit", *options, "job.sub"], user=user, cwd=place)
        if reschedule:
            self.reschedule()
        return Submission.parse(done.stdout, place, user, text)

    def submit_dag(
        self, user: str, text: str, *, files: Mapping[str, bytes | str] | None = None, options: Sequence[str] = ()
    ) -> Submission:
        """Submit a DAG as that user; the nodes' submit files are among `files`."""
        place = self._submit_directory(user, {**(files or {}), "dag.dag": text})
        done = self.ap.run(["condor_submit_dag", *options, "dag.dag"], user=user, cwd=place)
        cluster = submitted_cluster(done.stdout)
        return Submission(cluster, (f"{cluster}.0",), place, user, place / "dag.dag.dagman.log")

    def hold(self, job: JobRef, *, user: str = "root", reason: str = "") -> None:
        """Hold; as the user with condor_hold when one is given."""
        self._act("Hold", "condor_hold", job, user, reason)

    def release(self, job: JobRef, *, user: str = "root") -> None:
        """Release, after the held runs have ended: a schedd may never match a job released while its shadow lives."""
        self.wait(lambda: not self._with_shadow(job), what=f"the held runs of {job} to end")
        self._act("Release", "condor_release", job, user)

    def _with_shadow(self, job: JobRef) -> list[Ad]:
        held = f"({job_constraint(job)}) && JobStatus == 5 && RemoteHost isnt undefined"
        return self.jobs(held, ["ClusterId"])

    def rm(self, job: JobRef, *, user: str = "root") -> None:
        """Remove."""
        self._act("Remove", "condor_rm", job, user)

    def vacate(self, job: JobRef, *, fast: bool = False) -> None:
        """Vacate a running job, gracefully or fast."""
        self._act("VacateFast" if fast else "Vacate", "condor_vacate_job", job, "root")

    def qedit(self, job: JobRef, *, user: str = "root", **attributes: str) -> None:
        """Change attributes; values are ClassAd expressions: ``qedit(job, Note='"text"', JobPrio="3")``."""
        if user == "root":
            self._ask("edit", job=job_constraint(job), attributes=attributes)
            return
        pairs = [part for pair in attributes.items() for part in pair]
        self.ap.run(["condor_qedit", "-constraint", job_constraint(job), *pairs], user=user)

    def reschedule(self) -> None:
        """Ask for a negotiation cycle now."""
        self._ask("reschedule")

    # ---- questions -----------------------------------------------------------------------------------------------

    def q(self, job: JobRef, projection: Sequence[str] = ()) -> Ad | None:
        """Attributes of a job in the queue (the first of a submission), None when it is not there."""
        found = self.jobs(job_constraint(job), projection)
        return found[0] if found else None

    def jobs(self, constraint: str = "true", projection: Sequence[str] = ()) -> list[Ad]:
        """All jobs in the queue that match."""
        return self._ads("query_jobs", constraint=constraint, projection=list(projection))

    def history(self, job: JobRef) -> Ad | None:
        """Attributes of a job that left the queue, None when it has not (yet)."""
        found = self._ads("history_file", name="history", constraint=job_constraint(job), newest=1)
        return found[0] if found else None

    def histories(self) -> dict[str, Ad]:
        """Attributes of all jobs that left the queue, by id. One look, where :meth:`history` takes one for each job."""
        found = self._ads("history_file", name="history", constraint="true", newest=100_000)
        return {f"{ad['ClusterId']}.{ad['ProcId']}": ad for ad in reversed(found)}

    def epoch(self, job: JobRef, kind: str | None = None) -> list[Ad]:
        """Epoch records of a job, oldest first: one per run, plus INPUT, OUTPUT and so on of its transfers.

        :param kind: only records whose banner starts with this word, such as "OUTPUT".
        """
        found = self._ads("history_file", name="epoch_history", constraint=job_constraint(job), newest=10_000)
        return [ad for ad in reversed(found) if kind is None or ad["Banner"].startswith(kind)]

    def events(self, job: JobRef) -> list[Ad]:
        """Events of a job's user log, oldest first; besides their own ``Type`` (5), ``Name``, ``Job`` and ``Time``."""
        if isinstance(job, Submission):
            return self._ads("events", path=str(job.log))
        ad = self.q(job, ["UserLog", "Iwd"]) or self.history(job) or Ad()
        path = Path(str(ad.get("Iwd", ""))) / str(ad.get("UserLog", ""))
        return [event for event in self._ads("events", path=str(path)) if event["Job"] == job]

    def startd_ads(self, constraint: str = "true", projection: Sequence[str] = ()) -> list[Ad]:
        """Slots in the collector."""
        return self.collector_query(constraint, "Startd", projection)

    def collector_query(
        self, constraint: str = "true", ad_type: str = "Any", projection: Sequence[str] = ()
    ) -> list[Ad]:
        """Ads of a type ("Startd", "Schedd", "Master", "Generic", "Any", ...) in the collector."""
        return self._ads("query_collector", kind=ad_type, constraint=constraint, projection=list(projection))

    def status(self, job: JobRef) -> str:
        """State of a job in a word: Idle, Running, Removed, Completed, Held, Transferring, Suspended, or Gone."""
        words = ("", "Idle", "Running", "Removed", "Completed", "Held", "Transferring", "Suspended")
        ad = self.q(job, ["JobStatus"])
        return words[ad["JobStatus"]] if ad else "Gone"

    def wait(
        self,
        condition: Callable[[], T | None],
        timeout_s: float = 60,
        what: str = "the condition",
        interval_s: float = 0.1,
    ) -> T:
        """Poll until the condition is true and return its value; else PoolTimeout (an AssertionError) with `what`."""
        return wait_until(condition, timeout_s=timeout_s, what=what, interval_s=interval_s)

    def wait_status(self, job: JobRef, status: str, timeout_s: float = 60) -> None:
        """Wait until a job's state is that word of :meth:`status`."""
        last = ""

        def reached() -> bool:
            nonlocal last
            last = self.status(job)
            return last == status

        wait_until(
            reached,
            timeout_s=timeout_s,
            what=f"job {job} to be {status}",
            describe=lambda: f"It was {last}. {self.why(job)}",
        )

    def why(self, job: JobRef) -> str:
        """Describe a job by its queue entry and its log, for a report."""
        ad = self.q(job) or self.history(job) or Ad()
        names = [event["Name"] for event in self.events(job)]
        facts = {
            name: ad.get(name)
            for name in ("HoldReason", "RemoveReason", "LastRejMatchReason", "NumShadowStarts", "ExitCode")
        }
        return f"Facts: { {name: value for name, value in facts.items() if value is not None} }; events: {names}"

    # ---- parts of the start --------------------------------------------------------------------------------------

    _held: tuple[int, ...] = field(default=(), init=False)

    def _make_directory(self) -> None:
        if self.directory is None:
            self.dir = Path(tempfile.mkdtemp(prefix=leftovers.PREFIX))
        else:
            self.dir = self.directory.resolve()
            self.dir.mkdir(parents=True, exist_ok=True)
        self.dir.chmod(0o755)
        (self.dir / "jobs").mkdir(exist_ok=True)

    def _start(self) -> None:
        venv = self._venv()
        self._held = (install.hold(venv),)
        self.port = free_port()
        specs = (
            [NodeSpec() for _ in range(self.execute_points)]
            if isinstance(self.execute_points, int)
            else self.execute_points
        )
        named = [("ap", "ap", NodeSpec()), *((f"ep{i}", "ep", spec) for i, spec in enumerate(specs, 1))]
        named = [(f"{self.prefix}{name}", role, spec) for name, role, spec in named]
        self.nodes = [self._make_node(name, role, spec, venv, [n for n, _, _ in named]) for name, role, spec in named]
        for node in self.nodes:
            node.boot()
            leftovers.record(self.dir, self.nodes, detached=self.detached)
        self._queries = Queries(self.ap, self.dir)
        self._share_keys()
        for node in self.nodes:
            node.start()
        names = {node.name for node in self.eps}
        wait_until(
            lambda: names <= self._advertised(),
            timeout_s=_START_TIMEOUT_S,
            what=f"slots of {', '.join(sorted(names))}",
            describe=self._log_tails,
        )

    def _venv(self) -> Path:
        checkout = self.checkout or install.find_checkout()
        return (
            install.product_venv(self.image, checkout)
            if self.stageout
            else install.dependencies_venv(self.image, checkout)
        )

    def _make_node(self, name: str, role: str, spec: NodeSpec, venv: Path, names: Sequence[str]) -> Node:
        home = self.dir / name
        ids = image_account(self.image, spec.user)
        settings.make_directories(home, ids, image_account(self.image, "condor"))
        node_config = NodeConfig(home / "config.d")
        self._write_config(
            node_config,
            settings.base_text(role, name, home, port=self.port, cpus=self.cpus, user=spec.user),
            role,
            spec,
        )
        others = [other for other in names if other != name]
        # The first name of the address is what a machine takes for its own.
        own = f"127.0.0.1 {name}\n" if spec.resolvable else ""
        hosts = f"{own}127.0.0.1 localhost {' '.join(others)}\n"
        network, number = self.network, names.index(name)
        if network is not None:
            places = [network.access_point, *map(network.address, range(1, len(names)))]
            hosts = "127.0.0.1 localhost\n" + "".join(f"{at} {one}\n" for at, one in zip(places, names))
            own = f"NETWORK_INTERFACE = {places[number]}\nCONDOR_HOST = {network.access_point}\n"
            node_config.write("06-network.conf", own)
        # The node's own programs: the manager stores answers of plugins beside them.
        shutil.copytree(venv / "bin", home / "bin", symlinks=True)
        binds = (
            (venv, PREFIX, False),
            (home / "bin", f"{PREFIX}/bin", True),
            *((Path(path), str(path), True) for path in self.binds),
        )
        return Node(
            name, role, home, self.dir, self.image, spec, node_config, hosts, binds, self._held,
            network if number else None, number,
        )  # fmt: skip

    def _write_config(self, target: NodeConfig, base: str, role: str, spec: NodeSpec) -> None:
        target.write("00-pool.conf", base)
        target.write("05-pool-base.conf", self.base_config)
        if self.stageout:
            part = "pilot" if role == "ep" and spec.user != "root" else role
            target.add_fragments(install.fragments(self.checkout or install.find_checkout(), part))
        if not (self.agent if role == "ap" else self.manager):
            target.write("90-daemons.conf", settings.daemons_only(role))
        target.write("91-pool-extra.conf", self.config)
        target.write("92-role-extra.conf", self.ap_config if role == "ap" else self.ep_config)
        target.write("93-node-extra.conf", spec.config)

    def _share_keys(self) -> None:
        """Give every node a token of one signing key; root nodes get the key itself too, as in a real pool."""
        key = secrets.token_urlsafe(48).encode()
        for node in self.nodes:
            if node.spec.user == "root":
                settings.write_secret(node.home / "secrets/passwords.d/POOL", key, (0, 0))
        for node in self.nodes:
            scopes = [part for scope in node.spec.token_scopes for part in ("-authz", scope)]
            made = self.ap.run(["condor_token_create", "-identity", f"condor@{DOMAIN}", *scopes])
            ids = image_account(self.image, node.spec.user)
            settings.write_secret(node.home / "secrets/tokens.d/pool", made.stdout.strip().encode() + b"\n", ids)

    def _advertised(self) -> set[str]:
        return {str(ad["Machine"]) for ad in self.startd_ads(projection=["Machine"])}

    def _log_tails(self) -> str:
        tails = [
            f"{node.name} {log}:\n{node.log(log)[-1200:]}"
            for node in self.nodes
            for log in ("master", "startd", "collector")
        ]
        return "\n".join(tail for tail in tails if not tail.endswith(":\n"))

    def _submit_directory(self, user: str, files: Mapping[str, bytes | str]) -> Path:
        return prepare_directory(self.dir / "jobs" / user, image_account(self.image, user), files)

    def _act(self, action: str, tool: str, job: JobRef, user: str, reason: str = "") -> None:
        if user == "root":
            self._ask("act", action=action, job=job_constraint(job), reason=reason)
            return
        options = ["-reason", reason] if reason else []
        self.ap.run([tool, *options, "-constraint", job_constraint(job)], user=user)

    def _ads(self, op: str, **args: Any) -> list[Ad]:
        answer: list[Ad] = self._ask(op, **args)
        return answer

    def _ask(self, op: str, **args: Any) -> Any:
        if not hasattr(self, "_queries"):
            raise PoolError("The pool is not started.")
        return self._queries.ask(op, **args)


def free_port() -> int:
    """A TCP port of the loopback interface that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
