"""The product inside the simulation: its own code, with virtual clock, disk, SQLite, collector and plugins round it."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sandbox_manager.custody.custody
import sandbox_manager.custody.ledger
import sandbox_manager.custody.recovery
import sandbox_manager.daemon
import sandbox_manager.delivery.batch
import sandbox_manager.intake.listener
import sandbox_manager.report.reporter
import sandbox_manager.scheduling.retry
import sandbox_manager.scheduling.scheduler
import schedd_agent.orders
import stageout.handoff.links
import stageout.movers.mover
import stageout.movers.trees
import stageout.wire.custody
from sandbox_manager.custody import orders
from sandbox_manager.custody.queries import DamagedText
from sandbox_manager.custody.spool import Spool
from sandbox_manager.intake.listener import Intake
from sandbox_manager.intake.peers import NotIdentified
from sandbox_manager.pipeline import Pipeline
from sandbox_manager.report.control import Control
from stageout.core import durable, log, signing
from stageout.core.classads import unparse_ad
from stageout.movers.plugins_table import Plugin, PluginsTable
from stageout.movers.results import Answer, Ending, SentFile, read_answers
from stageout.wire import handoff as wire
from tests.crash.observed import Observer
from tests.crash.pool_model import Destination
from tests.crash.world import Killed, Machine, Process, World

PLUGIN = "/plugins/copy_plugin"
_KILLED_AFTER_S = 30.0


class Threads:
    """Stands for a ThreadPoolExecutor: the loop of the simulation does the work."""

    def __init__(self, max_workers: int = 1, thread_name_prefix: str = "") -> None:
        self._thread_name_prefix = thread_name_prefix

    def submit(self, work: Callable[[], Any]) -> Any:
        value = work()
        return SimpleNamespace(result=lambda: value)

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        return None


class OneTable(PluginsTable):
    """One plugin that moves ``copy://`` URLs and verifies them."""

    def load(self, paths: Sequence[str]) -> None:
        plugin = Plugin(Path(PLUGIN), ("copy",), 4, True)
        self._by_path, self._by_method = {PLUGIN: plugin}, {"copy": plugin}


class KnownIntake(Intake):
    """The product's intake without its socket: plugins find it at their node."""

    async def start(self, socket_path: Path) -> None:
        current().intake = self  # type: ignore[attr-defined]


class NoControl(Control):
    """No control socket."""

    async def start(self, path: Path) -> None:
        return None

    async def stop(self) -> None:
        return None


class Peers:
    """Identifies a plugin by what the simulation knows."""

    async def identify(self, peer: Any) -> Any:
        if not peer.facts:
            raise NotIdentified("the plugin has ended")
        return peer.facts


# ---- movers ----------------------------------------------------------------------------------------------------------


class Flight:
    """A plugin process that sends the files of one batch, one after the other, while time passes.

    :param judge: knows whose output a ticket holds, and whether it may be sent now.
    """

    def __init__(self, world: World, run: Any, destination: Destination, judge: Any) -> None:
        self._world = world
        self._process = world.current
        self._run = run
        self._destination = destination
        self._judge = judge
        self.outcome: dict[str, str] = {}
        self.duration_s = world.random.choice((0.2, 0.2, 2.0, 2.0, 20.0, 20.0, 200.0)) * world.random.uniform(0.5, 2)
        self.tickets = frozenset(item.ticket for item in run.batch.files)
        self._ends_s = world.now_s + self.duration_s
        self._stop, run._mover.stop = run._mover.stop, self._stopped
        for item in run.batch.files:
            if isinstance(item.url, DamagedText):
                continue  # the batch gives its plugin no such file
            world.after(world.random.uniform(0.05, self.duration_s), lambda item=item: self._send(item))

    @property
    def node(self) -> str:
        """Name of the machine that it runs on."""
        assert self._process is not None
        return self._process.machine.name

    @property
    def is_over(self) -> bool:
        """Can nothing be sent by it any more?"""
        assert self._process is not None
        return self._world.now_s > self._ends_s or not self._process.is_alive

    def _stopped(self) -> None:
        """A plugin that SIGTERM does not end is killed."""
        self._ends_s = min(self._ends_s, self._world.now_s + _KILLED_AFTER_S)
        self._stop()

    def _send(self, item: Any) -> None:
        process = self._process
        assert process is not None
        if not process.is_alive or self._world.now_s > self._ends_s:
            return
        if self._run._mover._stopped and self._world.random.random() < 0.5:
            return  # SIGTERM came in time
        path = f"{self._run._spool.root}/sandboxes/{item.ticket}/{item.position}"
        if not process.machine.disk.exists(path):
            return
        data = process.machine.disk.get(path)
        random = self._world.random
        made_by = self._judge.sending(self, item.ticket, item.url)
        if made_by is None:
            return
        problem = self._destination.put(made_by, item.url, data, process.name)
        if not problem and random.random() < 0.03:
            problem = "answer lost"
        self.outcome[item.url] = problem or "sent"


class FlyingMover:
    """Stands for the product's Mover: reads the outcome of a flight as the plugin's result ads."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._flight: Flight = current().flights.pop(str(batch.directory))  # type: ignore[attr-defined]

    def stop(self) -> None:
        return None

    def run(self) -> list[Answer]:
        sent = [replace(item, name=str(at)) for at, item in enumerate(self._batch.files)]
        try:
            with durable.step("mover-exec"):
                pass
        except OSError as problem:
            return read_answers(sent, "", Ending(None, text=str(problem)))
        outcomes = [self._flight.outcome.get(item.url, "unsent") for item in sent]
        text = "".join(_result(item, outcome) for item, outcome in zip(sent, outcomes) if outcome != "unsent")
        status = 0 if set(outcomes) == {"sent"} else 1
        return read_answers(sent, text, Ending(status))


#: Error codes of our plugins (numbers of stageout.core.errors).
_CODES = {"down": 20, "refused": 33, "answer lost": 55}


def _result(item: SentFile, outcome: str) -> str:
    facts: dict[str, Any] = {"TransferFileName": item.name, "TransferUrl": item.url}
    if outcome == "sent":
        more: dict[str, Any] = {"TransferSuccess": True, "TransferFileBytes": item.size_bytes}
        return unparse_ad({**facts, **more, "DeveloperData": {"StageOutVerified": "size"}})
    code = {"StageOutErrorCode": _CODES[outcome]}
    return unparse_ad({**facts, "TransferSuccess": False, "TransferError": outcome, "DeveloperData": code})


# ---- the plugin's end of a hand-off ----------------------------------------------------------------------------------


class PluginCall:
    """A plugin that offers files; stands for its connection at the manager, too.

    :param done: told once what came of it: the receipt, or None when it has to upload itself, or "died".
    """

    def __init__(self, world: World, process: Process, facts: Any, files: Mapping[str, str], done: Any) -> None:
        self._world = world
        self._process = process
        self.facts = facts
        self.pid, self.uid = 1, os.geteuid()
        self._files = files
        self._done = done
        self.is_gone = False
        self._directory = ""
        self._frames: Any = None
        if world.random.random() < 0.04:
            world.after(world.random.uniform(0.0, 1.0), self.end)

    # ---- as intake.py sees a connection and a Link ----

    def count_memory(self, take: Any) -> None:
        return None

    def __enter__(self) -> PluginCall:
        return self

    async def __aenter__(self) -> PluginCall:
        return self

    async def __aexit__(self, *problem: object) -> None:
        self.end()

    def close(self) -> None:
        return None

    async def receive(self, *operations: str) -> dict[str, Any]:
        import asyncio

        await asyncio.sleep(self._world.random.uniform(0.0005, 0.02))
        if self.is_gone:
            raise EOFError("the plugin closed the connection")
        if self._frames is None:
            disk = self._process.machine.disk
            offered = [wire.OfferedFile(url, path, len(disk.get(path))) for url, path in self._files.items()]
            self._frames = iter([*wire.offer_frames(offered, PLUGIN)])
        if "linked" in operations:
            self._link()
            return {"op": "linked"}
        frame: dict[str, Any] = next(self._frames)
        return frame

    def _link(self) -> None:
        links = stageout.handoff.links
        with self._world.inside(self._process):
            try:
                sources = [links.Source(path, 0, True) for path in self._files.values()]
                links.bring(sources, self._directory, lambda: None)
            except OSError as problem:
                self._world.say(f"links: {problem}")
                self.end()
        if not self._process.is_alive:
            self._finish("died")
        if self.is_gone:
            raise EOFError("the plugin closed the connection")

    async def send(self, message: dict[str, Any]) -> None:
        import asyncio

        await asyncio.sleep(self._world.random.uniform(0.0, 0.005))
        if self.is_gone:
            raise BrokenPipeError("the plugin closed the connection")
        if message["op"] == "go":
            self._directory = message["directory"]
        elif message["op"] == "accepted":
            self._finish(wire.accepted_receipt(message))
        elif message["op"] == "refuse":
            self._world.say(f"refused: {message['reason']}")
            self._finish(None)

    def end(self) -> None:
        """The connection breaks, or the plugin has waited long enough: it uploads the files itself."""
        self._finish(None)

    def _finish(self, what: Any) -> None:
        self.is_gone = True
        done, self._done = self._done, None
        if done is not None:
            self._world.after(0.01, lambda: done(what))


# ---- putting it together ---------------------------------------------------------------------------------------------

_world: World | None = None


def current() -> Process:
    """The process that runs now."""
    assert _world is not None and _world.current is not None
    return _world.current


class _Faults:
    """Stands for STAGEOUT_FAULTS: asks the schedule at every step."""

    def __contains__(self, label: object) -> bool:
        return True

    def __getitem__(self, label: str) -> list[durable.Fault]:
        world = _world
        assert world is not None
        if world.current is None:
            return []
        if not world.current.is_alive:
            raise Killed
        world.labels[label] += 1
        what = world.on_step(world.current, label)
        return [durable.Fault(what, None)] if what else []


def _die() -> None:
    assert _world is not None
    process = current()
    _world.kill(process, "at a step")
    raise Killed


def _connect(path: Any, **options: Any) -> Any:
    return current().machine.databases.connect(path, **options)


_SQLITE = SimpleNamespace(
    connect=_connect, Error=sqlite3.Error, OperationalError=sqlite3.OperationalError, Connection=sqlite3.Connection
)


class _LinksOs:
    """``os`` for the plugin's links."""

    def __getattr__(self, name: str) -> Any:
        return getattr(durable.disk, name)


_check_once = lru_cache(4096)(signing.check)


def _say(name: str, level: int = 20, **facts: object) -> None:
    assert _world is not None
    facts.pop("pid", None)  # of the process that plays, which a schedule that is played again has not
    if _world.keep_trace:
        _world.say(" ".join([name, *(f"{key}={value}" for key, value in facts.items())]))


def _recovered(judge: Any) -> Any:
    """The product's recovery; afterwards ledger and spool must agree."""
    real = Pipeline.recover

    async def recover(pipeline: Pipeline) -> None:
        await real(pipeline)
        current().pipeline = pipeline  # type: ignore[attr-defined]
        judge.recovered(current().machine)

    return recover


def _released(judge: Any) -> Any:
    """The product's removal of a ticket's bytes: nobody may want them."""
    real = Spool.release

    def release(spool: Spool, ticket: str) -> None:
        judge.releasing(current().machine, ticket)
        real(spool, ticket)

    return release


@contextmanager
def simulated(world: World, observer: Observer, judge: Any) -> Iterator[None]:
    """Put the world's clock, disks and databases under the product.

    :param observer: looks at the ledgers. :param judge: is told of what else happens.
    """
    global _world
    random = world.random
    secrets = SimpleNamespace(token_hex=lambda count=32: f"{random.getrandbits(8 * count):0{2 * count}x}")
    daemon = sandbox_manager.daemon
    changes: list[tuple[Any, str, Any]] = [
        (durable, "_faults", _Faults()), (durable, "die", _die),
        (durable, "lock", lambda descriptor: durable.disk.try_lock(descriptor)),  # type: ignore[attr-defined]
        (durable, "write_back", lambda descriptor: None),
        (sandbox_manager.custody.ledger, "sqlite3", _SQLITE),
        (sandbox_manager.custody.ledger, "ThreadPoolExecutor", Threads),
        (sandbox_manager.custody.custody, "ThreadPoolExecutor", Threads),
        (sandbox_manager.custody.custody, "boot_id", lambda: f"boot{current().machine.boot}"),
        (sandbox_manager.intake.listener, "ThreadPoolExecutor", Threads),
        (sandbox_manager.intake.listener, "Link", lambda connection, silence_s: connection),
        (sandbox_manager.intake.listener, "peer_of", lambda connection: connection),
        (sandbox_manager.intake.listener, "secrets", secrets), (stageout.movers.trees, "secrets", secrets),
        (schedd_agent.orders, "secrets", secrets), (sandbox_manager.scheduling.retry, "random", random),
        (stageout.movers.mover, "Mover", FlyingMover),
        (sandbox_manager.custody.recovery, "end_leftovers", lambda movers: 0),
        (daemon, "Intake", KnownIntake), (daemon, "Control", NoControl), (daemon, "PluginsTable", OneTable),
        (daemon, "_PLUGINS_INTERVAL_S", 1e9), (daemon, "_HOUSE_INTERVAL_S", 120.0),
        (stageout.handoff.links, "os", _LinksOs()), (stageout.handoff.links, "_step", lambda: durable.step),
        (sandbox_manager.scheduling.scheduler, "_LEASES_INTERVAL_S", 30.0),
        (sandbox_manager.delivery.batch, "_PLUGINS_END_S", 1.0),
        (sandbox_manager.custody.ledger, "RESERVE_BYTES", 64),
        (signing, "_new_private", lambda: random.randbytes(32)), (signing, "check", _check_once),
        (sandbox_manager.report.reporter, "_STATE_INTERVAL_S", 300.0), (log, "event", _say),
        (stageout.wire.custody, "check", _check_once), (orders, "apply_orders", observer.sheets(orders.apply_orders)),
        (orders, "_ACTIONS", {action: observer.action(real) for action, real in orders._ACTIONS.items()}),
        (Pipeline, "recover", _recovered(judge)), (Spool, "release", _released(judge)),
    ]  # fmt: skip
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    disk = durable.disk
    for module, name, value in changes:
        setattr(module, name, value)
    _world = world
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
        durable.disk = disk
        _world = None


def machine_of(world: World, name: str) -> Machine:
    """A machine with the directories of an installation."""
    machine = Machine(name, world)
    for path in (f"/{name}/execute", f"/{name}/spool"):
        machine.disk.make_dirs(path)
    return machine
