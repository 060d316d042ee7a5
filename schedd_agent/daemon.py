"""``stageout-schedd-agent``: the loop of one schedd's agent, an ordinary child of condor_master."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Callable, TypeVar

from schedd_agent.agent import Agent
from schedd_agent.collector import CondorCollectorClient
from schedd_agent.credential_reader import CredentialReader, open_reader
from schedd_agent.credential_server import CERTIFICATE_FILE, Certificate, CredentialServer, addresses_of
from schedd_agent.credentials import CredentialIssuer
from schedd_agent.custodian_client import CustodianClient, custodians_of, keys_of
from schedd_agent.custodians import CustodyTable
from schedd_agent.factories import FactoryLimits
from schedd_agent.file_records import FileRecorder, key_of
from schedd_agent.flocking import FlockedPool, FlockingCollectorClient
from schedd_agent.liveness import LivenessTracker
from schedd_agent.mail import MailQueue, mailer_of
from schedd_agent.model import DecisionLimits
from schedd_agent.orders import OrderNumbers, OrderOutbox
from schedd_agent.output_watch import FILE_NAME as WATCHED_FILE_NAME
from schedd_agent.output_watch import OutputWatch
from schedd_agent.queue import CondorJobQueue, QueueError
from schedd_agent.receipts import DIRECTORY, Receipts
from schedd_agent.reports import NewestReportNumbers
from stageout import daemon
from stageout.core import log
from stageout.core.clock import SystemClock
from stageout.core.config import ConfigError, Settings, flocked_to
from stageout.core.failures import FILE_NAME, FailureLog
from stageout.core.history import FILE_NAME as HISTORY_FILE_NAME
from stageout.core.history import HistoryFile
from stageout.core.metrics import Readings
from stageout.core.signing import KeyUnusable, SigningKey, load_key, load_or_make_key

PROGRAM = daemon.Program(
    name="stageout-schedd-agent",
    subsystem="SCHEDD_AGENT",
    log_file="ScheddAgentLog",
    metrics="STAGEOUT_AGENT_METRICS",
    about="Track stage-out for the jobs of one schedd and edit these jobs to match. condor_master starts the agent.",
)
_LOOK_AT_RECORDS_S = 0.5
_EARLIEST_S = 1.0
#: Seconds for which a scrape waits for the end of a pass.
_SCRAPE_S = 5.0
#: The agent queries the history about a job or DAG at every twelfth pass, and at least once a minute.
_HISTORY_POLLS = 12
_HISTORY_MAX_S = 60.0
T = TypeVar("T")


def limits_of(settings: Settings) -> DecisionLimits:
    """Return the limits of decisions. :raises ConfigError: a knob cannot be used."""
    return DecisionLimits(
        lease_s=settings.number("STAGEOUT_LEASE"),
        max_reruns=settings.count("STAGEOUT_MAX_RERUNS"),
        edit_interval_s=settings.number("STAGEOUT_EDIT_INTERVAL"),
        leave_s=settings.number("STAGEOUT_LEAVE_LIMIT"),
        history_s=min(_HISTORY_MAX_S, _HISTORY_POLLS * settings.number("STAGEOUT_POLL_INTERVAL")),
        docs_url=settings.text("STAGEOUT_DOCS_URL").rstrip("/"),
    )


def history_limits_of(settings: Settings) -> tuple[int, int]:
    """Return the largest size, in bytes, and the rotated parts of the history of files.

    :raises ConfigError: a knob cannot be used.
    """
    return settings.count("MAX_STAGEOUT_HISTORY_LOG"), settings.count("MAX_STAGEOUT_HISTORY_ROTATIONS")


def pause_s(poll_s: float, pass_s: float, has_edits_left: bool, has_news: bool) -> float:
    """Return the seconds between two passes. News and edits that are left make the pause shorter, never longer.

    :param poll_s: poll interval. :param pass_s: seconds that the last pass took: with news alone, a schedd with a long
        queue is queried less often. :param has_news: a run with receipts may have ended since the pass.
    """
    if has_edits_left:
        return min(_EARLIEST_S, poll_s)
    # HTCondor writes the record just before it marks the job as completed.
    return min(max(_EARLIEST_S, 2 * pass_s), poll_s) if has_news else poll_s


class Daemon:
    """The loop that runs one agent.

    :param load: reads the settings (again).
    :param make: makes the agent when the schedd answers, and raises QueueError until then.
    :param reader: reader of credentials, None without a credential server.
    """

    def __init__(
        self, load: Callable[[], Settings], make: Callable[[Settings], Agent], reader: CredentialReader | None = None
    ) -> None:
        self._load = load
        self._make = make
        self._settings = load()
        self._poll_s = self._settings.number("STAGEOUT_POLL_INTERVAL")
        limits_of(self._settings)
        self._stop: asyncio.Event
        self._reloaded = False
        self._agent: Agent | None = None
        self._scrape: asyncio.Future[Readings] | None = None
        self._readings = Readings()
        self._credential_server: CredentialServer | None = None
        self._reader = reader
        # HTCondor's bindings are not safe for threads, so one thread makes all blocking calls.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="condor")

    async def serve(self, started: Callable[..., None] = daemon.log_started) -> None:
        """Work until :meth:`stop`. :raises ConfigError, KeyUnusable: a setting or the key cannot be used."""
        self._stop = asyncio.Event()
        started()
        try:
            while not self._stop.is_set():
                await self._one_round()
        finally:
            if self._credential_server is not None:
                await self._credential_server.close()
            if self._agent and self._agent.mail_queue:
                self._agent.mail_queue.send(0.0, at_once=True)
            if self._agent and isinstance(self._agent.collector_client, FlockingCollectorClient):
                self._agent.collector_client.close()
            self._worker.shutdown(wait=False)

    def stop(self, fast: bool) -> None:
        """Ask the daemon to end. :param fast: makes no difference, a pass over the queue is short."""
        self._stop.set()

    async def metrics(self) -> Readings:
        """Return the values of this moment, or of the last scrape while a pass takes long."""
        agent = self._agent
        if agent is not None and (self._scrape is None or self._scrape.done()):
            self._scrape = asyncio.ensure_future(self._call(agent.readings))
        if self._scrape is not None:
            await asyncio.wait({self._scrape}, timeout=_SCRAPE_S)
            if self._scrape.done():
                self._readings = self._scrape.result()
        return self._readings

    async def reload(self) -> Settings:
        """Read the settings again. :raises ConfigError, KeyUnusable: they cannot be used, the old ones stay."""
        settings = await self._call(self._read_settings)
        self._reloaded = True
        return settings

    async def _one_round(self) -> None:
        self._reloaded = False
        if self._agent is None:
            await self._make_agent()
        agent, start_s = self._agent, asyncio.get_running_loop().time()
        if agent is not None:
            await self._call(agent.run_pass)
        await self._pause(agent, asyncio.get_running_loop().time() - start_s)

    async def _make_agent(self) -> None:
        def make() -> Agent:
            # In the worker, where settings are read, too: those that come meanwhile must find the agent.
            self._agent = self._make(self._settings)
            return self._agent

        try:
            agent = await self._call(make)
        except QueueError as problem:
            log.warn("schedd-query-failed", problem=problem)
        else:
            await self._open_port(agent)

    async def _open_port(self, agent: Agent) -> None:
        """Start the credential server if a port is set. If that fails, the agent runs without it."""
        number, reader = self._settings.count("STAGEOUT_CREDENTIAL_PORT"), self._reader
        if not number or reader is None:
            return
        try:
            certificate = Certificate(spool_of(self._settings) / CERTIFICATE_FILE)
            issuer = CredentialIssuer(
                agent=agent.name,
                certificate=certificate.digest,
                record=agent.receipts.get,
                owners=agent.queue.owners,
                reader=reader,
            )
            address, listen = addresses_of(self._settings)
            server = CredentialServer(
                listen, number, certificate, lambda asked: self._call(lambda: issuer.answer(asked))
            )
            await server.open()
        except ConfigError as problem:
            log.error("credential-port-failed", problem=problem)
            return
        self._credential_server = server
        agent.offer_credentials(f"https://{address}:{number}", certificate.digest)

    async def _pause(self, agent: Agent | None, pass_s: float) -> None:
        """Wait for the next pass: see :func:`pause_s`.

        :param pass_s: seconds that the last pass took.
        """
        loop = asyncio.get_running_loop()
        start = loop.time()
        has_edits_left, has_news = agent is not None and agent.has_edits_left, False
        while not self._stop.is_set() and not self._reloaded:
            left_s = start + pause_s(self._poll_s, pass_s, has_edits_left, has_news) - loop.time()
            if left_s <= 0:
                return
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stop.wait(), min(_LOOK_AT_RECORDS_S, left_s))
            has_news = has_news or (agent is not None and await self._call(agent.has_new_receipts))

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, function)

    def _read_settings(self) -> Settings:
        settings = self._load()
        limits, poll_s = limits_of(settings), settings.number("STAGEOUT_POLL_INTERVAL")
        custodians, ask = custodians_of(settings), CustodianClient(*keys_of(settings))
        notice_s, mail_s = settings.number("STAGEOUT_NOTICE_INTERVAL"), settings.number("STAGEOUT_MAIL_INTERVAL")
        history = history_limits_of(settings)
        agent = self._agent
        if agent is not None:
            mailer = mailer_of(settings, agent.name)
            key = read_key(settings)  # the last that can fail
            agent.new_rules(key, limits, notice_s)
            if agent.custody_table:
                agent.custody_table.follow(custodians, ask)
            if isinstance(agent.collector_client, FlockingCollectorClient):
                agent.collector_client.follow(flocked_to(settings))
            if agent.file_recorder:
                agent.file_recorder.history.set_limits(*history)
            if agent.mail_queue:
                agent.mail_queue.replace_mailer(mailer, mail_s)
        self._settings, self._poll_s = settings, poll_s
        return settings


def make_agent(settings: Settings) -> Agent:
    """Return an agent for the schedd of this machine.

    :raises QueueError: the schedd does not answer (yet). :raises ConfigError: a knob cannot be used.
    """
    directory = records_of(settings)  # first: shadows that start before it is there write no records
    queue = CondorJobQueue(Path(settings.condor("BIN", "/usr/bin")))
    name = queue.name()
    clock = SystemClock()
    limits = limits_of(settings)
    spool = spool_of(settings)
    numbers, newest_reports = kept_in(spool, clock.wall_s())
    key = read_key(settings)
    log.event("agent-key-loaded", schedd=name, key=key.public)
    receipts = Receipts(directory or Path(os.devnull), Path(settings.condor("JOB_EPOCH_HISTORY") or os.devnull))
    mail_queue = MailQueue(mailer_of(settings, name), settings.number("STAGEOUT_MAIL_INTERVAL"))
    history = HistoryFile(spool / HISTORY_FILE_NAME, key_of, clock.wall_s, *history_limits_of(settings))
    return Agent(
        name=name,
        key=key,
        queue=queue,
        collector_client=FlockingCollectorClient(
            CondorCollectorClient(name),
            lambda host: FlockedPool(host, name, settings.number("STAGEOUT_POLL_INTERVAL")),
            flocked_to(settings),
        ),
        receipts=receipts,
        order_outbox=OrderOutbox(name, numbers, limits.managers_lease_s),
        liveness=LivenessTracker(3 * settings.number("STAGEOUT_POLL_INTERVAL") + 60.0, limits.lease_s),
        clock=clock,
        limits=limits,
        numbers=numbers,
        newest_reports=newest_reports,
        records_written=directory is not None,
        notice_interval_s=settings.number("STAGEOUT_NOTICE_INTERVAL"),
        custody_table=CustodyTable(
            spool / "stageout_agent_custody",
            custodians_of(settings),
            CustodianClient(*keys_of(settings)),
            clock,
        ),
        failures=FailureLog(spool / FILE_NAME),
        file_recorder=FileRecorder(history, receipts, clock, directory is not None),
        mail_queue=mail_queue,
        factory_limits=FactoryLimits(queue),
        output_watch=OutputWatch(
            path=spool / WATCHED_FILE_NAME,
            queue=queue,
            mail_queue=mail_queue,
            clock=clock,
            query_interval_s=limits.history_s,
        ),
    )


def kept_in(spool: Path, wall_s: float) -> tuple[OrderNumbers, NewestReportNumbers]:
    """Read the state that survives a restart. :raises ConfigError: a file of it cannot be read."""
    try:
        return OrderNumbers(spool / "stageout_agent", wall_s), NewestReportNumbers(spool / "stageout_agent_seen")
    except (IsADirectoryError, PermissionError) as problem:
        which = f"{spool}/stageout_agent, stageout_agent_seen"
        raise ConfigError(f"{which}: {problem}; they must be files of the agent's user: chown them") from None


def key_path(settings: Settings) -> Path:
    """Return the path of the agent's key. :raises ConfigError: SPOOL is not set."""
    return spool_of(settings) / "stageout_agent_key"


def spool_of(settings: Settings) -> Path:
    """Return SPOOL, which holds the agent's durable state. :raises ConfigError: SPOOL is not set."""
    spool = settings.condor("SPOOL")
    if not spool:
        raise ConfigError("SPOOL is not set: the agent keeps its key there. Set it in HTCondor's configuration")
    return Path(spool)


def records_of(settings: Settings) -> Path | None:
    """Return the directory with the records of each job's runs, None without one. Create it where it is the agent's.

    :raises ConfigError: it is not there and cannot be created.
    """
    name = settings.condor("JOB_EPOCH_HISTORY_DIR")
    if not name:
        log.warn(
            "epoch-history-disabled",
            advice="set JOB_EPOCH_HISTORY_DIR: without it managers are believed without receipts",
        )
        return None
    path = Path(name)
    try:
        if path.name == DIRECTORY:
            Receipts(path).create()
        if not path.is_dir():
            raise FileNotFoundError("it does not exist, so HTCondor writes no records there")
    except OSError as problem:
        raise ConfigError(
            f"JOB_EPOCH_HISTORY_DIR = {path} cannot be used: {problem}. Create it for the user that HTCondor runs as"
        ) from None
    return path


def read_key(settings: Settings) -> SigningKey:
    """Return the agent's key, which is made at the first start.

    :raises KeyUnusable: it cannot be read or stored. :raises ConfigError: SPOOL is not set.
    """
    key = load_or_make_key("agent-key", key_path(settings))
    configured = settings.text("STAGEOUT_AGENT_KEY")
    if configured and configured != key.public:
        advice = (
            "jobs tell nodes STAGEOUT_AGENT_KEY, which must be this key: set it, condor_reconfig; until then nodes "
        )
        advice += "take nothing over"
        log.error("agent-key-misconfigured", told=configured, key=key.public, advice=advice)
    return key


def main(argv: Sequence[str] | None = None) -> int:
    """Run the agent. :returns: the exit status."""
    parser = daemon.command_line(PROGRAM)
    parser.add_argument("--key", action="store_true", help="print the agent's public key, for STAGEOUT_AGENT_KEY(S)")
    parser.add_argument("--new-key", action="store_true", help="replace the key; the old key signs the new one")
    options = parser.parse_args(argv)

    def prepare(settings: Settings, load: daemon.Load) -> Callable[[], Daemon]:
        reader = open_reader(settings) if settings.count("STAGEOUT_CREDENTIAL_PORT") else None
        return lambda: Daemon(load, make_agent, reader)

    wants_key = options.key or options.new_key
    command = (lambda settings: _print_key(settings, options.new_key)) if wants_key else None
    return daemon.run(PROGRAM, options, prepare, command)


def _print_key(settings: Settings, anew: bool) -> int:
    """Print the public key, after a new one was made where that is wanted.

    The running agent takes the new key on condor_reconfig. :raises KeyUnusable: there is none, or it cannot be stored.
    """
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
