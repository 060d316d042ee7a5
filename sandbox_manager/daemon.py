"""``stageout-sandbox-manager``: the daemon, an ordinary child of condor_master.

Signals as condor_master sends them: SIGTERM stops gracefully (no new hand-offs, running transfers get
STAGEOUT_STOP_GRACE seconds), SIGQUIT fast, SIGHUP reads the configuration again. Whatever is not delivered at the end
stays in the spool and the ledger, and goes on at the next start. In a pilot (STAGEOUT_PILOT) there is no next start:
both signals begin a drain (``drain.py``), and SIGQUIT during a drain ends it early. Exit status 99 tells condor_master
not to start it again: the configuration cannot be used.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sqlite3
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandbox_manager.acceptance import Manager
from sandbox_manager.ads import Reporter
from sandbox_manager.agents import AgentBook
from sandbox_manager.collector import Collector, CollectorError, CollectorProcess
from sandbox_manager.control import Control, condor_uid
from sandbox_manager.drain import Drain
from sandbox_manager.fetch import Fetcher
from sandbox_manager.front_ends import FrontEnds
from sandbox_manager.grants import Grants
from sandbox_manager.handover import METHOD
from sandbox_manager.identity import Identity
from sandbox_manager.intake import Identifier, Intake
from sandbox_manager.ledger import Ledger, LedgerError, get_meta, set_meta
from sandbox_manager.missing import Missing, missing_methods
from sandbox_manager.pipeline import Pipeline
from sandbox_manager.policy_client import PolicyClient, address_of
from sandbox_manager.rules import read_rules
from sandbox_manager.spool import Spool, SpoolBusy, SpoolError
from sandbox_manager.startd import SlotTable
from sandbox_manager.startd_process import StartdProcess
from sandbox_manager.trust import AgentKeys, Gatekeeper, read_listed
from stageout import __version__
from stageout.core import log
from stageout.core.clock import Clock, SystemClock
from stageout.core.config import ConfigError, Settings, checked_path, condor_settings, reload_condor
from stageout.core.ending import end
from stageout.core.errors import StageoutError
from stageout.core.signing import KeyUnusable, load_or_make_key
from stageout.core.states import State
from stageout.movers.plugins_table import PluginsTable
from stageout.wire.control import SOCKET_NAME
from stageout.wire.handoff import socket_name

DO_NOT_RESTART = 99
KEY_FILE = "manager_key"
#: An access point that is up confirms sooner than this; a sandbox older than this waits for one that is away.
_CONFIRMATION_SOON_S = 600.0
_REST_FACTOR = 6.0
_REST_MAX_S = 60.0
_HOUSE_INTERVAL_S = 10.0
_ROUNDS_TO_FORGET = 360
_PLUGINS_INTERVAL_S = 60.0
_PARENT_INTERVAL_S = 1.0
_FAST_S = 1.0


@dataclass(frozen=True)
class Surroundings:
    """The manager's dependencies; tests bring their own.

    :param read: returns the settings, anew on a reconfiguration.
    """

    read: Callable[[], Settings]
    collector: Collector
    clock: Clock
    identity: Callable[[Settings], Identifier]


class Daemon:
    """One manager, from start to stop.

    :raises StageoutError: the configuration cannot be used.
    """

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._parent_pid = os.getppid()  # before anything takes time: who is gone by then is never missed
        self._settings = settings = around.read()
        self._rules = read_rules(settings)
        self._policy = address_of(settings)
        if not settings.condor("EXECUTE"):
            raise ConfigError("EXECUTE is not set; a sandbox manager runs where jobs run")
        execute = Path(checked_path("EXECUTE", settings.condor("EXECUTE")))
        self.spool = Spool(spool_directory(settings), execute)
        self._table, self._missing, self._front_ends = PluginsTable(), Missing(), FrontEnds()
        self._keys = AgentKeys(around.clock, read_listed(settings.text("STAGEOUT_AGENT_KEYS")))
        self._agents = AgentBook(around.clock, settings.number("STAGEOUT_AGENT_FRESH"), self._keys.claimed)
        self._stop = asyncio.Event()
        self._fast = False
        self._drain: Drain | None = None
        self._reconfigure = asyncio.Event()

    def stop(self, fast: bool) -> None:
        """Ask the daemon to end."""
        if fast and self._drain is not None:
            self._drain.hurry()
        self._fast = self._fast or fast
        self._stop.set()

    def reconfigure(self) -> None:
        """Ask the daemon to read its settings again."""
        self._reconfigure.set()

    async def serve(self) -> None:
        """Run until :meth:`stop`. :raises StageoutError: it cannot start."""
        self.spool.open({name: self._settings.condor(name) for name in ("EXECUTE", "SPOOL", "LOG")})
        try:
            sandboxes = self.spool.root / "sandboxes"
            with contextlib.closing(Ledger(self.spool.root / "ledger" / "ledger.sqlite", sandboxes)) as ledger:
                await self._serve(ledger)
        finally:
            await self._around.collector.close()
            self.spool.close()

    async def _serve(self, ledger: Ledger) -> None:
        around, settings = self._around, self._settings
        key = load_or_make_key("manager-key", self.spool.root / "ledger" / KEY_FILE)
        manager = Manager(manager_name(settings), key.public)
        grants = self._grants(manager.name, lambda: pipeline.book.wake.set())
        pipeline = Pipeline(manager, ledger, self.spool, self._table, self._rules, self._agents, around.clock, grants)
        await self._load_plugins()
        await pipeline.recover()
        self._tell_missing(pipeline)
        await self._know_keys(ledger, pipeline)
        gate = Gatekeeper(manager.name, manager.key, self._agents, self._keys)
        reporter = Reporter(pipeline, self.spool, around.collector, around.clock, settings, condor_uid(), key)
        pipeline.tell = reporter.tell
        intake = Intake(self.spool, around.identity(settings), pipeline.acceptance, settings, around.clock)
        reporter.handoffs = intake.figures
        fetcher = Fetcher(pipeline, self._agents, key.sign)
        parts = (gate, fetcher, self._missing, pipeline.strays, reporter, intake)
        control = Control(pipeline, reporter.figures, lambda: {k: v for part in parts for k, v in part.facts().items()})
        run = self.spool.root / "run"
        await control.start(run / SOCKET_NAME)
        await intake.start(run / socket_name(settings.condor("EXECUTE")))
        log.event(
            "started",
            pid=os.getpid(),
            version=__version__,
            manager=manager.name,
            key=manager.key,
            spool=self.spool.root,
        )
        work = [
            self._forever("move", pipeline.run),
            self._forever("leases", pipeline.keep_leases),
            self._forever("orders", lambda: self._orders(pipeline, gate)),
            self._forever("report", reporter.run),
            self._forever("credentials", fetcher.run),
            self._forever("house", lambda: self._house(pipeline)),
            self._forever("settings", lambda: self._settings_again(pipeline)),
            self._forever("parent", self._parent),
            *([self._forever("streams", grants.run)] if grants else []),
        ]
        tasks = [asyncio.get_running_loop().create_task(item) for item in work]
        await self._stop.wait()
        await self._shut_down(pipeline, intake, control, reporter, tasks)

    def _grants(self, name: str, changed: Callable[[], None]) -> Grants | None:
        """Of the policy service of the configuration, as it was at the start; None without one."""
        if self._policy is None:
            return None
        return Grants(PolicyClient(self._policy), name, self._around.clock, changed)

    async def _shut_down(
        self, pipeline: Pipeline, intake: Intake, control: Control, reporter: Reporter, tasks: list[asyncio.Task[None]]
    ) -> None:
        grace_s = self._grace_s
        log.event("stopping", fast=self._fast, grace_s=grace_s, movers=pipeline.movers_running)
        pipeline.stop_accepting()
        if self._rules.is_pilot:
            router = self._settings.text("STAGEOUT_PILOT_ROUTER")
            copies = self._settings.count("STAGEOUT_PILOT_COPIES")
            self._drain = Drain(pipeline, self._around.clock, grace_s, router, pipeline.manager.key, copies)
        await intake.stop(min(grace_s, 5.0))
        if self._drain is not None:
            reporter.leave()
            await self._drain.run()
        else:
            await pipeline.stop(grace_s)
        await end(tasks)
        if pipeline.tuner.grants is not None:
            await pipeline.tuner.grants.close()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(reporter.publish(), _FAST_S if self._fast and not self._drain else 5.0)
        if self._drain is not None:
            await pipeline.stop(0.0)  # its bytes may go when everybody has been told
        await control.stop()
        log.event("stopped", bytes_at_risk=pipeline.book.registry.bytes_at_risk)

    @property
    def _grace_s(self) -> float:
        if self._rules.is_pilot:
            return self._rules.pilot_grace_s
        return 0.0 if self._fast else self._rules.stop_grace_s

    # ---- work that goes on -------------------------------------------------------------------------------------------

    async def _forever(self, name: str, work: Callable[[], object]) -> None:
        """Run a part again when it breaks: a fault in one must not silence the others."""
        while True:
            try:
                await work()  # type: ignore[misc]
                return
            except Exception as problem:
                log.error("fault", part=name, problem=repr(problem))
                await asyncio.sleep(5)

    async def _know_keys(self, ledger: Ledger, pipeline: Pipeline) -> None:
        """Read the agents' keys, and notice when the manager's own is not the one of what it holds."""
        await ledger.write(self._keys.load)
        key = pipeline.manager.key
        before = await ledger.write(lambda db: _replace_meta(db, "manager_key", key))
        if before not in ("", key) and pipeline.book.registry.by_id:
            log.error("key-changed", before=before, now=key, sandboxes=len(pipeline.book.registry.by_id),
                      advice="access points refuse reports about output that was taken over with the old key: put "
                      f"{KEY_FILE} back from a backup, or its jobs run again (docs/SECURITY.md)")  # fmt: skip

    async def _orders(self, pipeline: Pipeline, gate: Gatekeeper) -> None:
        """Look for agents and their orders."""
        answered, looked_s, found = None, float("-inf"), False
        while True:
            interval_s = self._settings.number("STAGEOUT_ORDER_INTERVAL")
            rests_s = self._look_interval_s(pipeline, interval_s) if answered else interval_s
            if self._around.clock.monotonic_s() - looked_s < rests_s:
                await asyncio.sleep(interval_s)
                continue
            looked_s = self._around.clock.monotonic_s()
            try:
                ads = await self._around.collector.messages(pipeline.manager.name)
            except CollectorError as problem:
                if answered is not False:
                    log.warn("collector-silent", problem=problem)
                answered = False
            else:
                if answered is False:
                    log.event("collector-answers")
                if answered is False or (found and not ads):
                    # It refused the last report, or it was started again and has none: do not wait for the next.
                    pipeline.book.changed.set()
                answered, found = True, bool(ads)
                await self._obey(pipeline, gate, ads)
            await asyncio.sleep(interval_s)

    def _look_interval_s(self, pipeline: Pipeline, interval_s: float) -> float:
        """Seconds between two looks at the agents' orders: longer while no output waits for a confirmation or a lease,
        because the collector serves all nodes of the pool."""
        since_at = self._around.clock.wall_s() - _CONFIRMATION_SOON_S
        boxes = pipeline.book.registry.by_id.values()
        waits = any(box.state is State.ACCEPTED and box.accepted_at > since_at for box in boxes)
        if waits or pipeline.leases.missing():
            return interval_s
        return max(interval_s, min(_REST_FACTOR * interval_s, _REST_MAX_S))

    async def _obey(self, pipeline: Pipeline, gate: Gatekeeper, ads: Sequence[Mapping[str, object]]) -> None:
        held = frozenset(box.run.schedd for box in pipeline.book.registry.by_id.values())
        sheets = gate.sheets(ads, held)
        try:
            if self._keys.unsaved:
                self._keys.unsaved = False
                await pipeline.book.ledger.write(self._keys.save, "agent-pinned")
            for sheet in sheets:
                await pipeline.carry_out(sheet)
        except (OSError, sqlite3.Error) as problem:
            self._keys.unsaved = True
            log.error("record-order", problem=problem)

    async def _parent(self) -> None:
        """End with condor_master: the next one starts a manager of its own, which needs the spool."""
        while os.getppid() == self._parent_pid:
            await asyncio.sleep(_PARENT_INTERVAL_S)
        log.warn("orphaned", parent=self._parent_pid)
        self.stop(fast=True)

    async def _house(self, pipeline: Pipeline) -> None:
        rounds = 0
        while True:
            await asyncio.sleep(_HOUSE_INTERVAL_S)
            await pipeline.keep_house()
            rounds += 1
            if rounds % _ROUNDS_TO_FORGET == 0:
                await pipeline.forget_old_jobs()

    async def _settings_again(self, pipeline: Pipeline) -> None:
        while True:
            try:
                await asyncio.wait_for(self._reconfigure.wait(), _PLUGINS_INTERVAL_S)
            except asyncio.TimeoutError:
                await self._load_plugins()
                self._tell_missing(pipeline)
                continue
            self._reconfigure.clear()
            try:
                settings = self._around.read()
                rules = read_rules(settings)
                listed = read_listed(settings.text("STAGEOUT_AGENT_KEYS"))
            except StageoutError as problem:
                log.error("reconfigured", problem=f"{problem}; the old settings stay")
                continue
            if listed != self._keys.listed:
                self._agents.forget_all()
            self._agents.fresh_s = settings.number("STAGEOUT_AGENT_FRESH")
            self._settings, self._rules, self._keys.listed = settings, rules, listed
            pipeline.new_rules(rules)
            self._front_ends.forget()
            await self._load_plugins()
            self._tell_missing(pipeline)
            log.event("reconfigured")

    async def _load_plugins(self) -> None:
        paths = self._settings.condor("FILETRANSFER_PLUGINS").replace(",", " ").split()
        await asyncio.get_running_loop().run_in_executor(None, self._ask_plugins, paths)

    def _ask_plugins(self, paths: list[str]) -> None:
        self._front_ends.renew(paths)
        self._table.load(paths)

    def _tell_missing(self, pipeline: Pipeline) -> None:
        """Say what no plugin moves: all of it waits, and the first try may be hours away."""
        registry = pipeline.book.registry
        way_out = METHOD if self._rules.is_pilot and self._settings.text("STAGEOUT_PILOT_ROUTER") else ""
        missing = missing_methods(self._table.find, registry.by_id.values(), registry.destinations, way_out)
        self._missing.tell(missing)


def _replace_meta(db: sqlite3.Connection, name: str, value: str) -> str:
    before = get_meta(db, name)
    set_meta(db, name, value)
    return before


def spool_directory(settings: Settings) -> Path:
    """STAGEOUT_SPOOL, its default included. :raises ConfigError: it is no absolute path."""
    return Path(settings.path("STAGEOUT_SPOOL"))


def manager_name(settings: Settings) -> str:
    """``manager@`` and the startd's name: the same after every restart."""
    host = settings.condor("FULL_HOSTNAME") or socket.getfqdn()
    startd = settings.condor("STARTD_NAME")
    if startd and "@" not in startd:
        startd = f"{startd}@{host}"
    return f"manager@{(startd or host).rstrip('@')}"


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    options = _options(argv)

    def read() -> Settings:
        reload_condor()
        return condor_settings(options.local_name)

    try:
        log.open_daemon_log(read(), "SANDBOX_MANAGER_LOG", "SandboxManagerLog", options.terminal)
        asyncio.run(_run(read, options))
    except SpoolBusy as problem:
        return _complain(problem, 1)
    except (ConfigError, SpoolError, LedgerError, KeyUnusable) as problem:
        return _complain(problem, DO_NOT_RESTART)
    except sqlite3.Error as problem:
        return _complain(LedgerError(f"the ledger fails: {problem}; see whether its disk is sound, and has room"), 1)
    return 0


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="stageout-sandbox-manager", description=__doc__)
    parser.add_argument("-f", action="store_true", help="ignored, for likeness with HTCondor's daemons")
    parser.add_argument("-t", dest="terminal", action="store_true", help="log to the terminal")
    parser.add_argument("-local-name", dest="local_name", default="", help="of the startd that is served")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    return parser.parse_args(argv)


def _identity(settings: Settings, options: argparse.Namespace) -> Identifier:
    slots = SlotTable(StartdProcess(options.local_name), settings.number("STAGEOUT_STARTD_TIMEOUT"))
    return Identity(slots, options.local_name)


async def _run(read: Callable[[], Settings], options: argparse.Namespace) -> None:
    # Made here: before Python 3.10 asyncio's locks and events belong to the loop that they are made in.
    collector = CollectorProcess(options.local_name)
    daemon = Daemon(Surroundings(read, collector, SystemClock(), lambda settings: _identity(settings, options)))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, daemon.stop, False)
    loop.add_signal_handler(signal.SIGINT, daemon.stop, False)
    loop.add_signal_handler(signal.SIGQUIT, daemon.stop, True)
    loop.add_signal_handler(signal.SIGHUP, daemon.reconfigure)
    await daemon.serve()


def _complain(problem: Exception, status: int) -> int:
    log.error("cannot-start", problem=problem, status=status)
    print(f"stageout-sandbox-manager: {problem}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
