"""``stageout-sandbox-manager``: custody and delivery of one node's output, an ordinary child of condor_master."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import sqlite3
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandbox_manager.custody.ledger import Ledger, get_meta, set_meta
from sandbox_manager.custody.spool import Spool
from sandbox_manager.delivery.front_ends import FrontEnds
from sandbox_manager.delivery.handover import METHOD
from sandbox_manager.delivery.stored_answers import StoredAnswers
from sandbox_manager.intake.acceptance import Manager
from sandbox_manager.intake.agents import AgentTable
from sandbox_manager.intake.identity import Identity
from sandbox_manager.intake.listener import Identifier, Intake
from sandbox_manager.intake.startd import SlotTable, startd_timeout_s
from sandbox_manager.intake.startd_process import StartdProcess
from sandbox_manager.pipeline import Pipeline
from sandbox_manager.report.collector import Collector, CollectorProcess
from sandbox_manager.report.control import Control, condor_uid
from sandbox_manager.report.credential_fetch import Fetcher
from sandbox_manager.report.drain import Drain
from sandbox_manager.report.metrics import ManagerMetrics
from sandbox_manager.report.missing_plugins import MissingPluginAlert, missing_methods
from sandbox_manager.report.orders_in import OrderReader
from sandbox_manager.report.reporter import Reporter
from sandbox_manager.report.trust import AgentKeys, OrderVerifier, read_listed
from sandbox_manager.rules import read_rules
from sandbox_manager.scheduling.leases import OwnLease
from sandbox_manager.scheduling.streams import grants_of, make_streams
from stageout import daemon
from stageout.core import log
from stageout.core.clock import Clock, SystemClock
from stageout.core.config import ConfigError, Settings, checked_path
from stageout.core.ending import end
from stageout.core.metrics import Readings
from stageout.core.signing import load_or_make_key
from stageout.movers.plugins_table import PluginsTable
from stageout.wire.control import SOCKET_NAME
from stageout.wire.handoff import socket_name

PROGRAM = daemon.Program(
    name="stageout-sandbox-manager",
    subsystem="SANDBOX_MANAGER",
    log_file="SandboxManagerLog",
    metrics="STAGEOUT_MANAGER_METRICS",
    about="""\
Keep the output of finished jobs and deliver it. condor_master starts the manager.

SIGTERM stops it gracefully: it takes no new hand-offs, and running transfers get STAGEOUT_STOP_GRACE seconds. SIGQUIT
stops it at once. Output that is not delivered stays in the spool, and the next start goes on with it. A pilot
(STAGEOUT_PILOT) has no next start: both signals begin a drain, and SIGQUIT during a drain ends the drain early.""",
)
KEY_FILE = "manager_key"
_HOUSE_INTERVAL_S = 10.0
_ROUNDS_TO_FORGET = 360
_PLUGINS_INTERVAL_S = 60.0
_FAST_S = 1.0


@dataclass(frozen=True)
class Dependencies:
    """The manager's dependencies; tests bring their own.

    :param read: returns the settings, anew on a reconfiguration. :param evaluate: evaluates an expression in the
        machine's ad; it blocks.
    """

    read: Callable[[], Settings]
    collector: Collector
    clock: Clock
    identity: Callable[[Settings], Identifier]
    evaluate: Callable[[str], object] = lambda expression: None


class Daemon:
    """One manager, from start to stop.

    :raises StageoutError: the configuration cannot be used.
    """

    def __init__(self, dependencies: Dependencies) -> None:
        self._dependencies = dependencies
        self._settings = settings = dependencies.read()
        self._rules = read_rules(settings)
        self._make_grants = grants_of(settings)
        if not settings.condor("EXECUTE"):
            raise ConfigError("EXECUTE is not set; a sandbox manager runs where jobs run")
        execute = Path(checked_path("EXECUTE", settings.condor("EXECUTE")))
        self.spool = Spool(spool_directory(settings), execute)
        self._table, self._missing = PluginsTable(), MissingPluginAlert()
        self._front_ends, self._answers = FrontEnds(), StoredAnswers()
        self._keys = AgentKeys(dependencies.clock, read_listed(settings.text("STAGEOUT_AGENT_KEYS")))
        self._agents = AgentTable(dependencies.clock, settings.number("STAGEOUT_AGENT_TIMEOUT"), self._keys.claimed)
        self._stop = asyncio.Event()
        self._fast = False
        self._drain: Drain | None = None
        self._pipeline: Pipeline | None = None
        self._own_lease: OwnLease | None = None
        self._metrics: ManagerMetrics | None = None
        self._loading_plugins = asyncio.Lock()

    def stop(self, fast: bool) -> None:
        """Ask the daemon to end."""
        if fast and self._drain is not None:
            self._drain.cut_short()
        self._fast = self._fast or fast
        self._stop.set()

    async def serve(self, started: Callable[..., None] = daemon.log_started) -> None:
        """Run until :meth:`stop`. :raises StageoutError: it cannot start."""
        self.spool.open({name: self._settings.condor(name) for name in ("EXECUTE", "SPOOL", "LOG")})
        try:
            sandboxes = self.spool.root / "sandboxes"
            with contextlib.closing(Ledger(self.spool.root / "ledger" / "ledger.sqlite", sandboxes)) as ledger:
                await self._serve(ledger, started)
        finally:
            await self._dependencies.collector.close()
            self.spool.close()

    async def _serve(self, ledger: Ledger, started: Callable[..., None]) -> None:
        dependencies, settings = self._dependencies, self._settings
        key = load_or_make_key("manager-key", self.spool.root / "ledger" / KEY_FILE)
        manager = Manager(manager_name(settings), key.public)
        make = self._make_grants
        grants = (
            make(manager.name, dependencies.clock, lambda: pipeline.store.wake.set(), self._supervise) if make else None
        )
        pipeline = Pipeline(
            manager=manager,
            ledger=ledger,
            spool=self.spool,
            table=self._table,
            rules=self._rules,
            agents=self._agents,
            clock=dependencies.clock,
            streams=functools.partial(make_streams, grants=grants),
        )
        await self._load_plugins()
        await pipeline.recover()
        self._tell_missing(pipeline)
        await self._know_keys(ledger, pipeline)
        own_lease = OwnLease(
            pipeline.scheduler.leases, lambda: self._rules, dependencies.evaluate, pipeline.store.changed.set
        )
        gate = OrderVerifier(manager.name, manager.key, self._agents, self._keys)
        intake = Intake(
            spool=self.spool,
            identity=dependencies.identity(settings),
            acceptance=pipeline.acceptance,
            settings=settings,
            clock=dependencies.clock,
            on_refusal=pipeline.store.changed.set,
        )
        reporter = Reporter(
            pipeline=pipeline,
            spool=self.spool,
            collector=dependencies.collector,
            clock=dependencies.clock,
            settings=settings,
            owner_uid=condor_uid(),
            key=key,
            handoffs=intake.figures,
            refusals=intake.refusals,
        )
        pipeline.runner.announcer.add(reporter.tell)
        fetcher = Fetcher(pipeline, self._agents, key.sign)
        parts = (gate, fetcher, self._missing, pipeline.custody.orphans, pipeline.housekeeping, reporter, intake)
        control = Control(pipeline, reporter.figures, lambda: {k: v for part in parts for k, v in part.facts().items()})
        orders = OrderReader(
            pipeline=pipeline,
            verifier=gate,
            keys=self._keys,
            collector=dependencies.collector,
            clock=dependencies.clock,
            interval_s=lambda: self._settings.number("STAGEOUT_ORDER_INTERVAL"),
        )
        run = self.spool.root / "run"
        await control.start(run / SOCKET_NAME)
        await intake.start(run / socket_name(settings.condor("EXECUTE")))
        pipeline.resume_syncs()
        self._pipeline, self._own_lease = pipeline, own_lease
        self._metrics = ManagerMetrics(
            pipeline=pipeline,
            reporter=reporter,
            handoffs=intake.counters,
            free_bytes=self.spool.free_bytes,
            clock=dependencies.clock,
        )
        started(manager=manager.name, key=manager.key, spool=self.spool.root)
        work = [
            self._supervise("move", pipeline.run),
            self._supervise("leases", pipeline.scheduler.keep_leases),
            self._supervise("own-lease", own_lease.run),
            self._supervise("orders", orders.run),
            self._supervise("report", reporter.run),
            self._supervise("credentials", fetcher.run),
            self._supervise("house", lambda: self._housekeeping(pipeline)),
            self._supervise("plugins", lambda: self._keep_plugins(pipeline)),
        ]
        tasks = [asyncio.get_running_loop().create_task(item) for item in work]
        await self._stop.wait()
        await self._shut_down(pipeline, intake, control, reporter, tasks=tasks)

    async def _shut_down(
        self, pipeline: Pipeline, intake: Intake, control: Control, reporter: Reporter, tasks: list[asyncio.Task[None]]
    ) -> None:
        grace_s = self._grace_s
        log.event("shutdown-started", fast=self._fast, grace_s=grace_s, movers=len(pipeline.custody.running))
        pipeline.stop_accepting()
        if self._rules.is_pilot:
            router = self._settings.text("STAGEOUT_PILOT_ROUTER")
            copies = self._settings.count("STAGEOUT_PILOT_COPIES")
            self._drain = Drain(
                pipeline=pipeline,
                clock=self._dependencies.clock,
                grace_s=grace_s,
                router=router,
                key=pipeline.manager.key,
                copies=copies,
            )
        await intake.stop(min(grace_s, 5.0))
        if self._drain is not None:
            reporter.leave()
            await self._drain.run()
        else:
            await pipeline.stop(grace_s)
        await end(tasks)
        await pipeline.scheduler.calls.close()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(reporter.publish(), _FAST_S if self._fast and not self._drain else 5.0)
        if self._drain is not None:
            await pipeline.stop(0.0)  # its bytes may go when every access point has the report
        await control.stop()
        log.event("output-retained", bytes_at_risk=pipeline.store.registry.bytes_at_risk)

    @property
    def _grace_s(self) -> float:
        if self._rules.is_pilot:
            return self._rules.pilot_grace_s
        return 0.0 if self._fast else self._rules.stop_grace_s

    # ---- work that goes on -------------------------------------------------------------------------------------------

    async def _supervise(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run a part again when it breaks: a fault in one must not silence the others."""
        while True:
            try:
                await work()
                return
            except Exception as problem:
                log.error("task-failed", part=name, problem=repr(problem))
                await asyncio.sleep(5)

    async def _know_keys(self, ledger: Ledger, pipeline: Pipeline) -> None:
        """Read the agents' keys, and notice when the manager's own is not the one of what it holds."""
        await ledger.write(self._keys.load)
        key = pipeline.manager.key
        before = await ledger.write(lambda db: _replace_meta(db, "manager_key", key))
        if before not in ("", key) and pipeline.store.registry.by_id:
            log.error("manager-key-changed", before=before, now=key, sandboxes=len(pipeline.store.registry.by_id),
                      advice="access points refuse reports about output that was taken over with the old key: put "
                      f"{KEY_FILE} back, or its jobs run again (docs/administrator/security.md)")  # fmt: skip

    async def _housekeeping(self, pipeline: Pipeline) -> None:
        rounds = 0
        while True:
            await asyncio.sleep(_HOUSE_INTERVAL_S)
            await pipeline.run_housekeeping()
            rounds += 1
            if rounds % _ROUNDS_TO_FORGET == 0:
                await pipeline.forget_old_jobs()

    async def _keep_plugins(self, pipeline: Pipeline) -> None:
        while True:
            await asyncio.sleep(_PLUGINS_INTERVAL_S)
            await self._renew_plugins(pipeline)

    async def _renew_plugins(self, pipeline: Pipeline) -> None:
        await self._load_plugins()
        self._tell_missing(pipeline)

    async def reload(self) -> Settings:
        """Read the settings again. :raises StageoutError: they cannot be used, and the old ones stay."""
        settings = self._dependencies.read()
        rules = read_rules(settings)
        listed = read_listed(settings.text("STAGEOUT_AGENT_KEYS"))
        timeout_s = settings.number("STAGEOUT_AGENT_TIMEOUT")
        if listed != self._keys.listed:
            self._agents.forget_all()
        self._agents.set_timeout(timeout_s)
        self._keys.list_anew(listed)
        self._settings, self._rules = settings, rules
        self._front_ends.forget()
        self._answers.forget()
        if self._pipeline is not None:
            self._pipeline.new_rules(rules)
            if self._own_lease is not None:
                await self._own_lease.refresh()
            await self._renew_plugins(self._pipeline)
        return settings

    async def metrics(self) -> Readings:
        """Return the values of this moment."""
        return self._metrics.read() if self._metrics else Readings()

    async def _load_plugins(self) -> None:
        paths = self._settings.condor("FILETRANSFER_PLUGINS").replace(",", " ").split()
        async with self._loading_plugins:
            await asyncio.get_running_loop().run_in_executor(None, self._ask_plugins, paths)

    def _ask_plugins(self, paths: list[str]) -> None:
        self._front_ends.renew(paths)
        self._answers.renew(paths)
        self._table.load(paths)

    def _tell_missing(self, pipeline: Pipeline) -> None:
        """Say what no plugin moves: all of it waits, and the first try may be hours away."""
        registry = pipeline.store.registry
        drain_method = METHOD if self._rules.is_pilot and self._settings.text("STAGEOUT_PILOT_ROUTER") else ""
        missing = missing_methods(self._table.find, registry.by_id.values(), registry.destinations, drain_method)
        self._missing.tell(missing)


def _replace_meta(db: sqlite3.Connection, name: str, value: str) -> str:
    before = get_meta(db, name)
    set_meta(db, name, value)
    return before


def spool_directory(settings: Settings) -> Path:
    """STAGEOUT_SPOOL, its default included. :raises ConfigError: it is no absolute path."""
    return Path(settings.path("STAGEOUT_SPOOL"))


def manager_name(settings: Settings) -> str:
    """Make the manager's name: ``manager@`` and the startd's name, the same after every restart."""
    host = settings.condor("FULL_HOSTNAME") or socket.getfqdn()
    startd = settings.condor("STARTD_NAME")
    if startd and "@" not in startd:
        startd = f"{startd}@{host}"
    return f"manager@{(startd or host).rstrip('@')}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the manager. :returns: the exit status."""
    options = daemon.command_line(PROGRAM).parse_args(argv)
    name = options.local_name

    @functools.cache
    def startd() -> StartdProcess:
        return StartdProcess(name)

    def identity(settings: Settings) -> Identifier:
        slots = SlotTable(startd(), startd_timeout_s(settings))
        return Identity(slots, name)

    def prepare(_: Settings, load: daemon.Load) -> Callable[[], Daemon]:
        return lambda: Daemon(
            Dependencies(
                read=load,
                collector=CollectorProcess(name),
                clock=SystemClock(),
                identity=identity,
                evaluate=lambda expression: startd().evaluate(expression),
            )
        )

    return daemon.run(PROGRAM, options, prepare)


if __name__ == "__main__":
    sys.exit(main())
