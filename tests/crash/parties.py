"""The execute points and the access point of a schedule: machines with the product's daemons."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from sandbox_manager.daemon import Daemon, Dependencies
from schedd_agent.agent import Agent
from schedd_agent.file_records import FileRecorder, key_of
from schedd_agent.liveness import LivenessTracker
from schedd_agent.model import DecisionLimits
from schedd_agent.orders import OrderNumbers, OrderOutbox
from schedd_agent.reports import NewestReportNumbers
from stageout.core import durable
from stageout.core.config import mapping_settings
from stageout.core.errors import StageoutError
from stageout.core.history import FILE_NAME, HistoryFile, newest_first
from stageout.core.signing import load_or_make_key
from stageout.model.run import manager_identity
from stageout.wire.custody import Action, Order, OrderSheet
from tests.crash.pool_model import (
    SCHEDD,
    USER,
    AgentDirectory,
    ManagerCollector,
    ModelReceipts,
)
from tests.crash.product import Peers, machine_of
from tests.crash.world import Killed, Process

POLL_S = 30.0
HOLE_S = 150.0
LEASE_S = 1500.0
#: Lease of nodes that never come back, and the silence after which the access point gives their output up.
SHORT_LEASE_S, SHORT_SILENCE_S = 300.0, 400.0
KNOBS = {
    "STAGEOUT_ORDER_INTERVAL": "30", "STAGEOUT_RETRY_INITIAL_DELAY": "20", "STAGEOUT_RETRY_MAX": "600",
    "STAGEOUT_DELIVERY_TIMEOUT": "20000", "STAGEOUT_RETENTION": "30000", "STAGEOUT_CONFIRM_TIMEOUT": "1200",
    "STAGEOUT_ATTEMPTS": "0", "NUM_CPUS": "4", "FILETRANSFER_PLUGINS": "copy", "STAGEOUT_LEASE": str(int(LEASE_S)),
}  # fmt: skip
#: Knobs of schedules in which output goes to a fallback before it fails, or is given up.
FALLS_BACK_EARLY = {"STAGEOUT_FALLBACK_AFTER": "150"}
IMPATIENT = {"STAGEOUT_DELIVERY_TIMEOUT": "1000", "STAGEOUT_RETENTION": "2500"}
_LIMITS = DecisionLimits(lease_s=LEASE_S, edit_interval_s=20.0, leave_s=300.0)
_MANAGER_RESTART_S = 10.0
#: Small, so that the history of files is rotated.
_HISTORY_BYTES = 2000


class Node:
    """An execute point: machine, manager, jobs' scratch directories."""

    def __init__(self, sim: Any, name: str) -> None:
        self.sim = sim
        self.name = name
        self.manager = f"manager@slots@{name}"
        self.machine = machine_of(sim.world, name)
        self.process: Process | None = None
        self.starts = 0
        self.stay_down_until_s = 0.0
        self.is_slow = False
        self.never_returns = (sim.seed + int(name[2:])) % 3 == 0
        self.spool = f"/{name}/stageout"
        self.ledger = f"{self.spool}/ledger/ledger.sqlite"
        self.machine.databases.observer = sim.observer
        self.machine.databases.has_directory = lambda ticket: self.machine.disk.exists(self.place_of(ticket))

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.is_alive

    @property
    def silence_s(self) -> float:
        """Seconds of silence after which the access point gives output on this node up."""
        return SHORT_SILENCE_S if self.never_returns else LEASE_S

    @property
    def admission(self) -> Any:
        """Return what the running manager counts; None before it takes anything over."""
        intake = getattr(self.process, "intake", None)
        return intake._acceptance._admission if intake is not None else None

    @property
    def identity(self) -> str:
        """The name that the access point knows the running manager by."""
        return manager_identity(self.manager, self.key) if self.key else ""

    @property
    def key(self) -> str:
        """Key that the running manager signs with; "" before it takes anything over."""
        intake = getattr(self.process, "intake", None)
        return intake._acceptance._manager.key if intake is not None else ""

    def place_of(self, ticket: str) -> str:
        """The directory of a ticket's files."""
        return f"{self.spool}/sandboxes/{ticket}"

    def aside(self, ticket: str) -> str:
        """Return the place for a ticket's files while the ledger has no record of it."""
        return f"{self.spool}/unknown/{ticket}"

    def start(self) -> None:
        """condor_master starts a manager, unless one runs or the machine is off."""
        world = self.sim.world
        if self.is_alive or not self.machine.is_up or world.now_s < self.stay_down_until_s:
            return
        self.starts += 1
        process = self.new_process()
        self.process = process
        with world.inside(process):
            process.spawn(self._serve(process))

    def new_process(self) -> Process:
        process = Process(self.sim.world, self.machine, f"{self.name}.{self.starts}")
        process.intake = None  # type: ignore[attr-defined]
        process.flights = {}  # type: ignore[attr-defined]
        process.pipeline = None  # type: ignore[attr-defined]
        process.on_death.append(lambda: self._excuse_begun_syncs(process))
        process.on_death.append(lambda: self.sim.world.after(_MANAGER_RESTART_S, self.start))
        self.sim.processes.append(process)
        return process

    def _excuse_begun_syncs(self, process: Process) -> None:
        """Nobody knows what the disk has told the manager that died. One whose start fails may have begun no sync."""
        if process.intake is not None:  # type: ignore[attr-defined]
            self.sim.excused |= {row[0] for row in self.rows("SELECT ticket FROM tickets WHERE synced = 2")}

    async def _serve(self, process: Process) -> None:
        try:
            await self.daemon().serve()
        except StageoutError as problem:
            self.sim.world.say(f"cannot start: {problem}")
            self.sim.world.kill(process, "exit")
        except OSError as problem:
            self.sim.world.say(f"fails: {problem}")
            self.sim.world.kill(process, "exit")
        except Exception as problem:
            self.sim.world.say(f"fails: {problem!r}")
            self.sim.world.kill(process, "exit")

    def daemon(self) -> Daemon:
        settings = mapping_settings(
            {**KNOBS, **(IMPATIENT if self.sim.trouble.impatient else {}), "EXECUTE": f"/{self.name}/execute",
             "STAGEOUT_SPOOL": self.spool, "FULL_HOSTNAME": self.name,
             "STARTD_NAME": "slots", "STAGEOUT_NEVER_RETURNS": str(self.never_returns),
             "STAGEOUT_SHORT_LEASE": str(int(SHORT_LEASE_S)), **(FALLS_BACK_EARLY if self.sim.seed % 4 > 1 else {})}
        )  # fmt: skip
        return Daemon(
            Dependencies(lambda: settings, ManagerCollector(self.sim.collector, self.name), self.machine,
                         lambda known: Peers())
        )  # fmt: skip

    def second_manager(self) -> None:
        """Somebody starts another manager over the same spool: it must refuse."""
        world = self.sim.world
        if not self.is_alive or not getattr(self.process, "intake", None):
            return
        process = Process(world, self.machine, f"{self.name}.second")
        process.intake = None  # type: ignore[attr-defined]
        self.sim.processes.append(process)

        async def serve() -> None:
            with suppress(StageoutError, OSError):
                await self.daemon().serve()
            world.kill(process, "exit")

        with world.inside(process):
            process.spawn(serve())
        world.after(5.0, lambda: self._must_be_gone(process))

    def _must_be_gone(self, process: Process) -> None:
        if process.is_alive and self.is_alive:
            self.sim.world.violation(f"two managers serve {self.spool}")
        self.sim.world.kill(process, "the simulation has seen enough")

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Look into the committed ledger."""
        db = self.machine.databases.look(self.ledger)
        try:
            return list(db.execute(sql)) if db is not None else []
        except Exception:
            return []


class OddBook(OrderOutbox):
    """The agent's orders, and among them some that may come at any time: they change nothing that counts."""

    def __init__(self, agent: str, numbers: OrderNumbers, lease_s: float, odd: dict[int, tuple[str, Order]]) -> None:
        super().__init__(agent, numbers, lease_s)
        self.odd = odd

    def add_odd(self, manager: str, action: Action, job: str, run: int, tickets: tuple[str, ...], url: str) -> None:
        """Give such an order with the next sheet."""
        (number,) = self._numbers.take(1)
        self.odd[number] = (manager, Order(number, action, job, run, tickets, owner=USER, new_url=url))
        self._changed.add(manager)

    def sheet_now(self, manager: str, wall_s: float) -> OrderSheet:
        """Return what a manager would read if it looked at this moment; it acknowledges no report."""
        return self._sheet(manager, wall_s, 0)

    def acknowledged(self, manager: str, number: int) -> list[Any]:
        for done in [at for at, (to, _) in self.odd.items() if to == manager and at <= number]:
            del self.odd[done]
        return super().acknowledged(manager, number)

    def _sheet(self, manager: str, wall_s: float, heard: int) -> OrderSheet:
        sheet = super()._sheet(manager, wall_s, heard)
        orders = [*sheet.orders, *(order for to, order in self.odd.values() if to == manager)]
        return replace(sheet, orders=tuple(sorted(orders, key=lambda order: order.number)))


class AgentSide:
    """The access point's machine with the agent."""

    def __init__(self, sim: Any) -> None:
        self.sim = sim
        self.machine = machine_of(sim.world, SCHEDD)
        self.process: Process | None = None
        self.started_s = 0.0
        self.starts = 0
        self.number_file = f"/{SCHEDD}/spool/stageout_agent"
        self.odd_numbers: set[int] = set()
        self.book: OddBook | None = None

    def is_odd(self, number: int) -> bool:
        """Was an order given only to see that it does nothing?"""
        return number in self.odd_numbers

    def odd_order(
        self, manager: str, action: Action, job: str, run: int, tickets: tuple[str, ...] = (), url: str = ""
    ) -> OrderSheet | None:
        """Give an order that changes nothing that counts. It is forgotten when the agent dies before it is done.

        Returns the sheet with it, None without an agent that could give it.
        """
        if self.process is None or not self.process.is_alive or self.book is None:
            return None
        with self.sim.world.inside(self.process), suppress(OSError):
            self.book.add_odd(manager, action, job, run, tickets, url)
            self.odd_numbers.update(self.book.odd)
            return self.book.sheet_now(manager, self.machine.wall_s())
        return None

    def start(self) -> None:
        world = self.sim.world
        if (self.process is not None and self.process.is_alive) or not self.machine.is_up:
            return
        self.starts += 1
        self.started_s = world.now_s
        self.process = process = Process(world, self.machine, f"agent.{self.starts}")
        process.on_death.append(lambda: world.after(_MANAGER_RESTART_S, self.start))
        self.sim.processes.append(process)
        with world.inside(process):
            try:
                agent = self._make()
            except (OSError, StageoutError) as problem:
                world.say(f"cannot start: {problem}")
                world.kill(process, "exit")
                return
            process.loop.call_soon(self._pass, process, agent)

    def _make(self) -> Agent:
        numbers = OrderNumbers(Path(self.number_file), self.machine.wall_s())
        spool = Path(f"/{SCHEDD}/spool")
        self.book = OddBook(SCHEDD, numbers, _LIMITS.managers_lease_s, {})
        receipts = ModelReceipts(self.sim.schedd.records)
        history = HistoryFile(spool / FILE_NAME, key_of, self.machine.wall_s, _HISTORY_BYTES, rotations=1000)
        return Agent(
            name=SCHEDD,
            key=load_or_make_key("agent-key", spool / "stageout_agent_key"),
            queue=self.sim.schedd,
            collector_client=AgentDirectory(self.sim.collector),
            receipts=receipts,
            file_recorder=FileRecorder(history, receipts, self.machine),
            order_outbox=self.book,
            liveness=LivenessTracker(hole_s=HOLE_S),
            clock=self.machine,
            limits=_LIMITS,
            numbers=numbers,
            newest_reports=NewestReportNumbers(spool / "stageout_agent_seen"),
        )

    def file_records(self) -> list[dict[str, Any]]:
        """The records of files on the access point's disk, newest first."""
        before, durable.disk = durable.disk, cast(Any, self.machine.disk)
        try:
            return [entry.attributes() for entry in newest_first(Path(f"/{SCHEDD}/spool") / FILE_NAME)]
        finally:
            durable.disk = before

    def _pass(self, process: Process, agent: Agent) -> None:
        try:
            agent.run_pass()
        except Killed:
            raise
        except Exception as problem:
            self.sim.world.violation(f"the agent's pass fails: {problem!r}")
        process.loop.call_later(POLL_S * self.sim.random.uniform(0.9, 1.1), self._pass, process, agent)
