"""The process: settings, signals and the loop. An ordinary child of condor_master."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Callable, TypeVar

from schedd_agent.agent import Agent
from schedd_agent.asking import Asker, custodians_of
from schedd_agent.credentials import Keeper
from schedd_agent.custodians import Custodians
from schedd_agent.factories import Factories
from schedd_agent.flocking import FlockDirectory, OtherPool
from schedd_agent.leases import View
from schedd_agent.mail import CondorMailer, Outbox
from schedd_agent.model import Limits
from schedd_agent.notices import CondorDirectory
from schedd_agent.orders import Book, Numbers
from schedd_agent.port import CERTIFICATE_FILE, Certificate, Port, addresses_of
from schedd_agent.queue import CondorQueue, QueueError
from schedd_agent.reader import Reader, open_reader
from schedd_agent.receipts import Receipts
from schedd_agent.reports import Newest
from stageout import __version__
from stageout.core import log
from stageout.core.clock import SystemClock
from stageout.core.config import ConfigError, Settings, condor_settings, flocked_to, reload_condor
from stageout.core.failures import FILE_NAME, FailureLog
from stageout.core.signing import KeyUnusable, SigningKey, load_key, load_or_make_key

EXIT_NO_RESTART = 99
"""condor_master does not start a daemon again that exits with this status."""

_LOOK_AT_RECORDS_S = 0.5
_EARLIEST_S = 1.0
#: The agent asks the history about the same job or DAG at every twelfth look at the queue, and once a minute at least.
_HISTORY_POLLS = 12
_HISTORY_MAX_S = 60.0
T = TypeVar("T")


def limits_of(settings: Settings) -> Limits:
    """Limits of decisions. :raises ConfigError: a knob cannot be used."""
    return Limits(
        lease_s=settings.number("STAGEOUT_LEASE"),
        max_reruns=settings.count("STAGEOUT_MAX_RERUNS"),
        edit_interval_s=settings.number("STAGEOUT_EDIT_INTERVAL"),
        leave_s=settings.number("STAGEOUT_LEAVE_LIMIT"),
        history_s=min(_HISTORY_MAX_S, _HISTORY_POLLS * settings.number("STAGEOUT_POLL_INTERVAL")),
    )


def lease_of_managers(limits: Limits) -> float:
    """For how long a manager may send after a report that was heard: it must have stopped before it counts as lost."""
    return 0.75 * limits.lease_s


class Daemon:
    """The loop round one agent.

    :param load: reads the settings (again).
    :param make: makes the agent, once, when the schedd answers; QueueError until then.
    :param reader: of credentials, where a port is wanted for them.
    """

    def __init__(
        self, load: Callable[[], Settings], make: Callable[[Settings], Agent], reader: Reader | None = None
    ) -> None:
        self._load = load
        self._make = make
        self._settings = load()
        self._poll_s = self._settings.number("STAGEOUT_POLL_INTERVAL")
        limits_of(self._settings)
        self._stop: asyncio.Event
        self._reload = False
        self._agent: Agent | None = None
        self._port: Port | None = None
        self._reader = reader
        # The bindings are not made for threads: one at a time, whatever blocks.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="condor")

    async def run(self) -> None:
        """Work until told to stop."""
        loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._ask_reload)
        log.event("start", version=__version__, pid=os.getpid())
        try:
            while not self._stop.is_set():
                await self._one_round()
        except (ConfigError, KeyUnusable):
            raise  # it is said with what to do, and condor_master does not start it again
        except Exception:
            # condor_master starts it again; the reason must not be lost with stderr.
            log.error("unexpected", trace=traceback.format_exc())
            raise
        finally:
            if self._port is not None:
                await self._port.close()
            if self._agent and self._agent.outbox:
                self._agent.outbox.send(0.0, at_once=True)
            if self._agent and isinstance(self._agent.directory, FlockDirectory):
                self._agent.directory.close()
            self._worker.shutdown(wait=False)
        log.event("stop")

    def _ask_reload(self) -> None:
        self._reload = True

    async def _one_round(self) -> None:
        if self._reload:
            self._reload = False
            await self._call(self._read_settings)
        agent = self._agent or await self._made()
        start_s = asyncio.get_running_loop().time()
        if agent is not None:
            if self._agent is None:
                await self._open_port(agent)
            self._agent = agent
            await self._call(agent.run_pass)
        await self._pause(agent, asyncio.get_running_loop().time() - start_s)

    async def _made(self) -> Agent | None:
        try:
            return await self._call(lambda: self._make(self._settings))
        except QueueError as problem:
            log.warn("no-schedd", problem=problem)
            return None

    async def _open_port(self, agent: Agent) -> None:
        """Offer renewed credentials where the administrator wants it. The agent goes on without when it cannot be."""
        number, reader = self._settings.count("STAGEOUT_CREDENTIAL_PORT"), self._reader
        if not number or reader is None:
            return
        try:
            certificate = Certificate(spool_of(self._settings) / CERTIFICATE_FILE)
            keeper = Keeper(agent.name, certificate.digest, agent.receipts.get, agent.queue.owners, reader)
            address, listen = addresses_of(self._settings)
            port = Port(listen, number, certificate, lambda asked: self._call(lambda: keeper.answer(asked)))
            await port.open()
        except ConfigError as problem:
            log.error("no-credential-port", problem=problem)
            return
        self._port = port
        agent.credential_port = (f"https://{address}:{number}", certificate.digest)

    async def _pause(self, agent: Agent | None, pass_s: float) -> None:
        """Wait for the next round: a poll interval; less when a run with receipts has just ended, or edits are left.

        :param pass_s: seconds that the last pass took; a long queue is not asked all the time.
        """
        loop = asyncio.get_running_loop()
        start = loop.time()
        longest_s = _EARLIEST_S if agent is not None and agent.has_edits_left else self._poll_s
        while not self._stop.is_set() and not self._reload and loop.time() - start < longest_s:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stop.wait(), min(_LOOK_AT_RECORDS_S, self._poll_s))
            early = agent is not None and await self._call(agent.read_receipts) > 0
            if early and not self._stop.is_set():
                # The record is written just before the job is marked as completed.
                await asyncio.sleep(max(0.0, start + max(_EARLIEST_S, 2 * pass_s) - loop.time()))
                return

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, function)

    def _read_settings(self) -> None:
        """Settings as they are now; the old ones stay when the new ones cannot be used."""
        try:
            settings = self._load()
            limits, poll_s = limits_of(settings), settings.number("STAGEOUT_POLL_INTERVAL")
            custodians = custodians_of(settings)
            notice_s = settings.number("STAGEOUT_NOTICE_INTERVAL")
            mail_s = settings.number("STAGEOUT_MAIL_INTERVAL")
        except ConfigError as problem:
            log.error("reconfig-refused", problem=problem)
            return
        self._settings, self._poll_s = settings, poll_s
        if self._agent:
            try:
                self._agent.key = read_key(settings)
            except (ConfigError, KeyUnusable) as problem:
                log.error("reconfig-refused", problem=problem)
            if self._agent.custodians:
                self._agent.custodians.allowed = frozenset(custodians)
            self._agent.limits, self._agent.notice_interval_s = limits, notice_s
            if isinstance(self._agent.directory, FlockDirectory):
                self._agent.directory.follow(flocked_to(settings))
            if self._agent.outbox:
                self._agent.outbox.interval_s = mail_s
                self._agent.outbox.mailer = CondorMailer(settings, self._agent.name)
            self._agent.book.lease_s = lease_of_managers(limits)
        log.event("reconfig")


def make_agent(settings: Settings) -> Agent:
    """An agent for the schedd of this machine.

    :raises QueueError: the schedd does not answer (yet). :raises ConfigError: a knob cannot be used.
    """
    queue = CondorQueue(Path(settings.condor("BIN", "/usr/bin")))
    name = queue.name()
    clock = SystemClock()
    history = settings.condor("JOB_EPOCH_HISTORY")
    if not history:
        log.warn("no-records", advice="set JOB_EPOCH_HISTORY: without it managers are believed without receipts")
    limits = limits_of(settings)
    spool = spool_of(settings)
    numbers, newest = kept_in(spool, clock.wall_s())
    key = read_key(settings)
    log.event("key", schedd=name, key=key.public)
    return Agent(
        name=name,
        key=key,
        queue=queue,
        directory=FlockDirectory(
            CondorDirectory(name),
            lambda host: OtherPool(host, name, settings.number("STAGEOUT_POLL_INTERVAL")), flocked_to(settings),
        ),
        receipts=Receipts(Path(history or os.devnull), spool / "stageout_agent_readings"),
        book=Book(name, numbers, lease_of_managers(limits)),
        view=View(hole_s=3 * settings.number("STAGEOUT_POLL_INTERVAL") + 60.0),
        clock=clock,
        limits=limits,
        numbers=numbers,
        newest=newest,
        records_written=bool(history),
        notice_interval_s=settings.number("STAGEOUT_NOTICE_INTERVAL"),
        custodians=Custodians(
            spool / "stageout_agent_custody", custodians_of(settings),
            Asker(Path(settings.text("STAGEOUT_CUSTODIAN_KEY"))), clock,
        ),
        failures=FailureLog(spool / FILE_NAME),
        outbox=Outbox(CondorMailer(settings, name), settings.number("STAGEOUT_MAIL_INTERVAL")),
        factories=Factories(queue),
    )  # fmt: skip


def kept_in(spool: Path, wall_s: float) -> tuple[Numbers, Newest]:
    """Read the state that survives a restart. :raises ConfigError: it may not be read."""
    try:
        return Numbers(spool / "stageout_agent", wall_s), Newest(spool / "stageout_agent_seen")
    except (IsADirectoryError, PermissionError) as problem:
        which = f"{spool}/stageout_agent, stageout_agent_seen"
        raise ConfigError(f"{which}: {problem}; they must be files of the agent's user: chown them") from None


def key_path(settings: Settings) -> Path:
    """Return the path of the agent's key. :raises ConfigError: SPOOL is not set."""
    return spool_of(settings) / "stageout_agent_key"


def spool_of(settings: Settings) -> Path:
    """HTCondor's directory, where the agent keeps all that it must not lose. :raises ConfigError: it is not set."""
    spool = settings.condor("SPOOL")
    if not spool:
        raise ConfigError("SPOOL is not set: the agent keeps its key there. Set it in HTCondor's configuration")
    return Path(spool)


def read_key(settings: Settings) -> SigningKey:
    """The agent's key, made at the first start.

    :raises KeyUnusable: it cannot be read or stored. :raises ConfigError: SPOOL is not set.
    """
    key = load_or_make_key("agent-key", key_path(settings))
    told = settings.text("STAGEOUT_AGENT_KEY")
    if told and told != key.public:
        advice = (
            "jobs tell nodes STAGEOUT_AGENT_KEY, which must be this key: set it, condor_reconfig; until then nodes "
        )
        advice += "take nothing over"
        log.error("other-key-told", told=told, key=key.public, advice=advice)
    return key


def _load(local_name: str) -> Settings:
    reload_condor()
    return condor_settings(local_name)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the agent (``stageout-schedd-agent``); condor_master starts it."""
    parser = argparse.ArgumentParser("stageout-schedd-agent", description="Keeps the job queue true about stage-out.")
    parser.add_argument("-local-name", "--local-name", default="", help="read NAME.KNOB before KNOB")
    parser.add_argument("-f", "-t", dest="ignored", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--key", action="store_true", help="print the agent's public key, for STAGEOUT_AGENT_KEY(S)")
    parser.add_argument("--new-key", action="store_true", help="replace the key; the old one vouches for it")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    options = parser.parse_args(argv)
    try:
        if options.key or options.new_key:
            _print_key(_load(options.local_name), options.new_key)
            return
        settings = _load(options.local_name)
        reader = open_reader(settings) if settings.count("STAGEOUT_CREDENTIAL_PORT") else None
        log.open_daemon_log(settings, "SCHEDD_AGENT_LOG", "ScheddAgentLog")
        daemon = Daemon(lambda: _load(options.local_name), make_agent, reader)
        asyncio.run(daemon.run())
    except (ConfigError, KeyUnusable) as problem:
        log.error("bad-configuration", problem=problem)
        print(f"stageout-schedd-agent: {problem}", file=sys.stderr)
        sys.exit(EXIT_NO_RESTART)


def _print_key(settings: Settings, anew: bool) -> None:
    """The public key, after a new one was made where that is wanted. The running agent takes it on condor_reconfig."""
    path = key_path(settings)
    if anew:
        old = load_or_make_key("agent-key", path)
        try:
            owner = path.stat()
            old.successor().store("agent-key", path)
            if os.geteuid() == 0:
                os.chown(path, owner.st_uid, owner.st_gid)
        except OSError as problem:
            raise KeyUnusable(f"the key {path} cannot be replaced: {problem}; run this as the agent's user") from None
    key = load_key(path)
    if key is None:
        raise KeyUnusable(f"there is no key in {path} yet: start the agent first")
    print(key.public)


if __name__ == "__main__":
    main()
