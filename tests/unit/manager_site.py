"""A sandbox manager without HTCondor: real spool, real ledger, real plugin processes; hand-offs are put in by hand."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sandbox_manager.custody.credentials import StoredCredentials
from sandbox_manager.custody.ledger import Ledger
from sandbox_manager.custody.spool import Spool
from sandbox_manager.intake.acceptance import Handoff, Manager, Refusal
from sandbox_manager.intake.agents import AgentTable
from sandbox_manager.pipeline import Pipeline
from sandbox_manager.rules import Rules, read_rules
from sandbox_manager.scheduling.streams import MakeStreams, make_streams
from stageout.core.clock import SystemClock
from stageout.core.config import mapping_settings
from stageout.core.states import State
from stageout.model.run import RunFacts
from stageout.model.sandbox import Sandbox, SlotKey
from stageout.movers.plugins_table import PluginsTable
from stageout.wire.custody import Action, AgentNotice, Order, OrderSheet, Run
from stageout.wire.handoff import OfferedCredential, OfferedFile, Receipt, credential_link
from tests.polling import until

ROOT = os.geteuid() == 0
#: The jobs' user: somebody else below a root manager.
UID = 64001 if ROOT else os.geteuid()
SCHEDD = "ap"
AGENT = "agent@ap"

#: The system's: every user may run it, and no launcher of somebody's home stands before it.
PYTHON = shutil.which("python3", path=os.defpath) or sys.executable

#: Copies ``copy://host/MODE/name`` to ``DEST/name``. The fault stands in the URL, or in files of the test.
PLUGIN = r"""#!{python} -I
import os, re, signal, sys, time
from pathlib import Path
BASE = Path({base!r})
if sys.argv[1:] == ["-classad"]:
    print('MultipleFileSupport = true\nProtocolVersion = {protocol}\nPluginVersion = "1"')
    print('PluginType = "FileTransfer"\nSupportedMethods = "{methods}"\n{more}')
    sys.exit(0)
infile, outfile = sys.argv[2], sys.argv[4]
text = Path(infile).read_text()
requests = re.findall(r'Url = "([^"]*)"; LocalFileName = "([^"]*)"', text)
def found(name):
    path = os.environ.get(name, "")
    if os.path.isdir(path):
        return {{entry.name: (entry.read_text(), entry.stat().st_mode) for entry in Path(path).iterdir()}}
    return Path(path).read_text() if path else None
with open(BASE / "calls" / f"{{os.getpid()}}", "w") as stream:
    stream.write(repr(dict(tokens=found("_CONDOR_CREDS"), proxy=found("X509_USER_PROXY"), job=found("_CONDOR_JOB_AD"),
                           requests=text,
                           pid=os.getpid(), uid=os.getuid(), groups=os.getgroups(), cwd=os.getcwd(), argv=sys.argv,
                           nice=os.nice(0),
                           env=dict(os.environ), umask=os.umask(0o077), urls=[url for url, _ in requests],
                           sid=os.getsid(0), nul=os.readlink("/proc/self/fd/0"), at=time.time())))
def ad(url, name, success, **facts):
    facts = dict(TransferSuccess=success, TransferUrl=url, TransferFileName=os.path.basename(name), **facts)
    return "[" + ";".join(f"{{key}}={{write(value)}}" for key, value in facts.items()) + "]"
def write(value):
    if isinstance(value, bool): return str(value).lower()
    if isinstance(value, dict): return "[" + ";".join(f"{{k}}={{write(v)}}" for k, v in value.items()) + "]"
    if isinstance(value, list): return "{{" + ",".join(map(write, value)) + "}}"
    return '"%s"' % value if isinstance(value, str) else str(value)
def failed(url, name, text, kind, retry=0, **more):
    return ad(url, name, False, TransferError=text,
              TransferErrorData=[dict(ErrorType=kind, ErrorCode=7, ErrorString=text, Retryable=retry)], **more)
ads, status = [], 0
for url, name in requests:
    mode = url.split("/")[3]
    size = os.path.getsize(name)
    target = BASE / "dest" / url.rsplit("/", 1)[1]
    if (BASE / "down").exists():
        ads.append(failed(url, name, "connection refused", "Contact"))
        status = 11
        continue
    if mode == "wait":
        (BASE / "waiting").touch()
        while (BASE / "hold").exists():
            time.sleep(0.01)
    if mode == "hang":
        Path(outfile).write_text("".join(ads))
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
    if mode == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "refuse":
        ads.append(failed(url, name, "quota exceeded for alice", "Authorization", -1))
        status = 1
        continue
    if mode == "nowhere":
        fault = dict(ErrorType="Resolution", FailureType="Definitive", ErrorCode=10, ErrorString="no such host")
        ads.append(ad(url, name, False, TransferError="there is no such host", TransferErrorData=[fault]))
        status = 11
        continue
    if mode == "busy":
        ads.append(failed(url, name, "come back", "Transfer", 3600))
        status = 11
        continue
    if mode == "silent":
        continue
    if mode == "nothing":
        sys.exit(0)
    if mode == "garbage":
        ads.append("[ this is no ad")
        continue
    if mode == "secret":
        print("token=abc" * 100000)
        sys.exit(3)
    if mode == "leak":
        told = " ".join(content for content, _ in found("_CONDOR_CREDS").values()) + (found("X509_USER_PROXY") or "")
        print("sending", told)
        ads.append(failed(url, name, "the server does not like " + told, "Transfer", 3600))
        status = 1
        continue
    if mode == "claim":
        ads.append(ad(url, name, True, TransferFileBytes=size + 1, TransferTotalBytes=size + 1))
        continue
    temporary = target.with_name(target.name + ".part")
    temporary.write_bytes(Path(name).read_bytes())
    temporary.rename(target)
    with open(BASE / "puts", "a") as stream:
        stream.write(target.name + "\n")
    if mode == "edit":
        with open(name, "ab") as stream: stream.write(b"x")
    facts = dict(TransferFileBytes=size, TransferTotalBytes=size, TransferProtocol="copy")
    if mode == "unsaid":
        facts = {{}}
    elif mode not in ("plain",):
        facts["DeveloperData"] = dict(StageOutVerified="size", StageOutDigests="md5:00")
    ads.append(ad(url, name, True, **facts))
with open(outfile, "r+") as stream:
    stream.write("".join(ads))
sys.exit(status)
"""

QUICK = {"STAGEOUT_RETRY_INITIAL_DELAY": "1", "STAGEOUT_RETRY_MAX": "1", "NUM_CPUS": "4"}


class LaterClock(SystemClock):
    """The machine's, as both of them will be. :ivar ahead_s: after so much time."""

    ahead_s = 0.0

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.ahead_s

    def wall_s(self) -> float:
        return super().wall_s() + self.ahead_s


class Site:
    """A node's directories, a plugin, and one manager at a time.

    :ivar wait_s: between attempts, where a test needs several and the knobs' least is long; None for the knobs.
    """

    def __init__(self, knobs: Mapping[str, str] | None = None) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="stageout-manager-"))
        self.base.chmod(0o1777)
        for name in ("execute", "dest", "calls", "log"):
            (self.base / name).mkdir()
            (self.base / name).chmod(0o777)
        (self.base / "puts").touch()
        (self.base / "puts").chmod(0o666)
        self.knobs = {**QUICK, **(knobs or {})}
        self.plugin = self.write_plugin("copy_plugin", "copy,other")
        self.plugins = [self.plugin]
        self.orders = 0
        self.wait_s: float | None = None

    def write_plugin(self, name: str, methods: str, protocol: int = 4, more: str = "") -> Path:
        """A copy of the test's plugin under another name."""
        path = self.base / name
        path.write_text(
            PLUGIN.format(python=PYTHON, base=str(self.base), methods=methods, protocol=protocol, more=more)
        )
        path.chmod(0o755)
        return path

    def write_script(self, name: str, text: str) -> Path:
        """Another plugin."""
        path = self.base / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    @property
    def rules(self) -> Rules:
        """From the knobs of this test."""
        rules = read_rules(mapping_settings(self.knobs))
        if self.wait_s is None:
            return rules
        return replace(rules, retry=replace(rules.retry, initial_delay_s=self.wait_s, max_delay_s=self.wait_s))

    def flag(self, name: str, up: bool = True) -> Path:
        """Set or take away a file that the plugin looks for."""
        path = self.base / name
        if up:
            path.touch()
            path.chmod(0o666)
        else:
            path.unlink(missing_ok=True)
        return path

    def open_spool(self) -> Spool:
        """The spool, opened."""
        spool = Spool(self.base / "spool", self.base / "execute")
        spool.open({})
        return spool

    def table(self) -> PluginsTable:
        """The plugins, asked."""
        table = PluginsTable()
        table.load([str(path) for path in self.plugins])
        return table

    def delivered(self) -> list[str]:
        """Names that the plugin has put, in their order; twice when put twice."""
        return (self.base / "puts").read_text().split()

    def calls(self) -> list[dict[str, Any]]:
        """The input of each call of the plugin, in the order of time."""
        found = [eval(path.read_text()) for path in (self.base / "calls").iterdir() if path.read_text()]
        return sorted(found, key=lambda call: call["at"])

    @asynccontextmanager
    async def manager(self, moving: bool = True, streams: MakeStreams = make_streams) -> Any:
        """A recovered pipeline (with the mover's loop unless told otherwise), stopped at the end."""
        node = Node(self, streams)
        await node.start(moving)
        try:
            yield node
        finally:
            await node.stop()

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.base, ignore_errors=True)


class Node:
    """One running pipeline."""

    def __init__(self, site: Site, streams: MakeStreams = make_streams) -> None:
        self.site = site
        self.clock = LaterClock()
        self.spool = site.open_spool()
        self.ledger = Ledger(self.spool.root / "ledger" / "ledger.sqlite")
        self.agents = AgentTable(self.clock, 180)
        self.agents.record_notice(AgentNotice(AGENT, SCHEDD, "", 1, 1), 0)
        self.table = site.table()
        self.pipeline = Pipeline(
            Manager("manager@ep"), self.ledger, self.spool, self.table, site.rules, self.agents, self.clock, streams
        )
        self._loop: asyncio.Task[None] | None = None

    async def start(self, moving: bool = True) -> None:
        await self.pipeline.recover()
        self.pipeline.resume_syncs()
        if moving:
            self._loop = asyncio.get_running_loop().create_task(self.pipeline.run())

    async def stop(self, grace_s: float = 0) -> None:
        if self._loop is not None:
            self._loop.cancel()
        await self.pipeline.stop(grace_s)
        self.ledger.close()
        self.spool.close()

    # ---- what a plugin does ------------------------------------------------------------------------------------------

    def facts(
        self, job: str = "1.0", number: int = 1, owner: str = "alice@test", slot_id: int = 1, dslot_id: int = 1,
        **changed: Any,
    ) -> RunFacts:  # fmt: skip
        """Facts about a run."""
        facts = RunFacts(
            run=Run(f"{SCHEDD}#{job}#1700000000", number, owner), user="alice", uid=UID, gid=UID,
            slot=SlotKey("ep", slot_id, dslot_id), slot_name="slot1_1@ep", guard=True,
        )  # fmt: skip
        return replace(facts, **changed)

    def offer(self, facts: RunFacts, urls: Sequence[str], size_bytes: int = 10, plugin: Path | None = None) -> Any:
        """Ask for admission."""
        return self.pipeline.acceptance.may_accept(facts, len(urls), size_bytes, urls, str(plugin or self.site.plugin))

    async def hand_off(
        self,
        files: Mapping[str, bytes],
        facts: RunFacts | None = None,
        plugin: Path | None = None,
        credentials: Mapping[str, bytes] | None = None,
        job_ad: str = "",
        plugin_data: str = "",
    ) -> Receipt:
        """Hand over files by URL, as the intake does. :raises AssertionError: refused.

        :param credentials: tokens by service; "" is the proxy.
        """
        facts = facts or self.facts()
        size = sum(map(len, files.values()))
        reservation = self.offer(facts, list(files), size, plugin)
        assert not isinstance(reservation, Refusal), reservation.reason
        ticket = os.urandom(16).hex()
        place = self.spool.prepare_intake(ticket, facts.uid, facts.gid)
        offered = []
        for position, (url, data) in enumerate(files.items()):
            path = place / str(position)
            path.write_bytes(data)
            if ROOT:
                os.chown(path, facts.uid, facts.gid)
            name = f"{self.site.base}/execute/dir_1/scratch/{url.rpartition('/')[2]}"
            offered.append(OfferedFile(url, name, len(data)))
        given = [
            OfferedCredential("token" if service else "proxy", service, len(content))
            for service, content in (credentials or {}).items()
        ]
        for number, content in enumerate((credentials or {}).values()):
            path = place / credential_link(number)
            path.write_bytes(content)
            if ROOT:
                os.chown(path, facts.uid, facts.gid)
        held = self.spool.claim(ticket, offered, facts.uid, facts.gid, given, reservation.account)
        taken = self.spool.safe.examine_offered(ticket, given, self.clock.wall_s())
        stored = StoredCredentials(ticket, job_ad, plugin_data, taken)
        kept = facts.kept_by(reservation.account)
        handoff = Handoff(ticket, kept, str(plugin or self.site.plugin), held, reservation, stored)
        return await self.pipeline.acceptance.accept(handoff)

    # ---- what an agent does ------------------------------------------------------------------------------------------

    async def order(
        self, action: Action, facts: RunFacts | None = None, tickets: Sequence[str] = (), files: int = 0
    ) -> None:
        """Give one order."""
        run = (facts or self.facts()).run
        self.site.orders += 1
        order = Order(self.site.orders, action, run.job, run.number, tuple(tickets), files, owner=run.owner)
        await self.pipeline.apply_orders(OrderSheet(AGENT, "manager@ep", 1, (order,)))

    async def confirm(self, *receipts: Receipt, facts: RunFacts | None = None) -> None:
        """Confirm a run with these hand-offs."""
        tickets = [receipt.ticket for receipt in receipts]
        await self.order(Action.CONFIRM, facts, tickets, sum(receipt.files for receipt in receipts))

    async def deliver_another(self) -> None:
        """Deliver the file "later" of another job: a sandbox that may be sent would have been sent before."""
        other = self.facts("99.0", dslot_id=9)
        await self.confirm(await self.hand_off({"copy://h/ok/later": b"l"}, other), facts=other)
        await self.until_state(State.RELEASED, other)

    # ---- looking -----------------------------------------------------------------------------------------------------

    def box(self, facts: RunFacts | None = None) -> Sandbox | None:
        """The sandbox of a run."""
        return self.pipeline.store.registry.of_run((facts or self.facts()).run)

    def state(self, facts: RunFacts | None = None) -> State | None:
        """Its state; None when there is none."""
        box = self.box(facts)
        return box.state if box else None

    async def until_state(self, state: State, facts: RunFacts | None = None) -> Sandbox:
        """Wait for a state."""
        await until(lambda: self.state(facts) is state, lambda: f"{state}; it is {self.box(facts)}")
        box = self.box(facts)
        assert box is not None
        return box


def run(work: Awaitable[None]) -> None:
    """Run one asynchronous test, for a minute at most."""

    async def bounded() -> None:
        await asyncio.wait_for(work, 120)

    asyncio.run(bounded())


@contextmanager
def made(knobs: Mapping[str, str] | None = None) -> Iterator[Site]:
    """A site for one test."""
    site = Site(knobs)
    try:
        yield site
    finally:
        site.close()
