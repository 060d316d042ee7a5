"""Virtual time, machines and processes: everything happens in one thread, in an order that the seed decides."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from stageout.core import durable
from tests.crash.memory_disk import MemoryDisk
from tests.crash.memory_sqlite import Databases

START_WALL_S = 1_700_000_000.0


class Killed(BaseException):
    """The process that runs this has just died."""


@dataclass
class Machine:
    """A computer: its disk, its databases, its clocks."""

    name: str
    world: World
    wall_offset_s: float = 0.0
    most_offset_s: float = 0.0
    boot: int = 0
    is_up: bool = True

    def __post_init__(self) -> None:
        self.disk = MemoryDisk(now_ns=lambda: int((START_WALL_S + self.world.now_s) * 1e9))
        self.disk.called = self._called
        self.databases = Databases(self)

    def monotonic_s(self) -> float:
        return self.world.now_s

    def wall_s(self) -> float:
        return START_WALL_S + self.world.now_s + self.wall_offset_s

    def jump(self, by_s: float) -> None:
        """The wall clock is set to another time."""
        self.wall_offset_s += by_s
        self.most_offset_s = max(self.most_offset_s, self.wall_offset_s)

    def _called(self, name: str) -> None:
        process = self.world.current
        if process is not None:
            if not process.is_alive:
                raise Killed
            if process.machine is self:
                self.world.on_call(process, name)


class Process:
    """A process with an event loop of its own.

    :param on_death: called once when it dies, however.
    """

    def __init__(self, world: World, machine: Machine, name: str) -> None:
        self.world = world
        self.machine = machine
        self.name = name
        self.is_alive = True
        self.on_death: list[Callable[[], None]] = []
        self.loop = Loop(self)
        self.tasks: list[asyncio.Task[Any]] = []

    def spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        """Run a coroutine in this process."""
        return self.loop.create_task(coroutine)


class Loop(asyncio.AbstractEventLoop):
    """The parts of an event loop that asyncio needs, on the world's clock."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._world = process.world
        self._busy: dict[int, float] = {}

    def time(self) -> float:
        return self._world.now_s

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        handle = asyncio.Handle(callback, args, self, context)
        self._world.push(self._world.now_s, self._process, handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return self.call_at(self._world.now_s + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._world.push(max(when, self._world.now_s), self._process, handle)
        return handle

    def _timer_handle_cancelled(self, handle: Any) -> None:
        return None

    def create_future(self) -> Any:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> Any:
        task = asyncio.Task(coro, loop=self, name=name)
        self._process.tasks.append(task)
        return task

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        """Threads of a pool work one after the other, movers side by side; each job happens at one moment."""
        kind = getattr(executor, "_thread_name_prefix", "")
        start_s = self._world.now_s if kind == "mover" else max(self._world.now_s, self._busy.get(id(executor), 0.0))
        end_s = start_s + self._world.duration_s(kind, func)
        self._busy[id(executor)] = end_s
        future = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except Exception as problem:
                if not future.cancelled():
                    future.set_exception(problem)
            else:
                if not future.cancelled():
                    future.set_result(result)

        self._world.push(end_s, self._process, asyncio.Handle(work, (), self, None))
        return future

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        problem = context.get("exception")
        if isinstance(problem, Killed):
            raise problem
        if self._process.is_alive and problem is not None:
            self._world.violation(f"{self._process.name}: {context.get('message')}: {problem!r}")


@dataclass
class World:
    """The clock, what is to happen, and what went wrong.

    :param keep_trace: remember every event for people to read.
    """

    random: Random
    keep_trace: bool = False
    now_s: float = 0.0
    current: Process | None = None
    violations: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    labels: Counter[str] = field(default_factory=Counter)
    on_call: Callable[[Process, str], None] = lambda process, name: None
    on_step: Callable[[Process, str], str | None] = lambda process, label: None
    duration_s: Callable[[str, Any], float] = lambda kind, func: 0.0
    _events: list[tuple[float, int, Process | None, Any]] = field(default_factory=list)
    _numbers: Any = field(default_factory=itertools.count)
    _dead: list[Process] = field(default_factory=list)

    def push(self, when_s: float, process: Process | None, handle: Any) -> None:
        heapq.heappush(self._events, (when_s, next(self._numbers), process, handle))

    def after(self, delay_s: float, work: Callable[[], object]) -> None:
        """Do something to the world later, whoever lives then."""
        self.push(self.now_s + delay_s, None, work)

    def run(self, until_s: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Let time pass."""
        while self._events and self._events[0][0] <= until_s and not self.violations and not stop():
            when_s, _, process, handle = heapq.heappop(self._events)
            self.now_s = max(self.now_s, when_s)
            if process is None:
                handle()
            elif process.is_alive and not handle.cancelled():
                self._run(process, handle)
        if not self.violations:
            self.now_s = max(self.now_s, until_s) if not stop() else self.now_s

    def _run(self, process: Process, handle: Any) -> None:
        """The same as :meth:`inside`, quickly."""
        self.current = process
        process.machine.disk.owner = process
        durable.disk = process.machine.disk  # type: ignore[assignment]
        asyncio._set_running_loop(process.loop)
        try:
            handle._run()
        except Killed:
            assert not process.is_alive or self.violations
        finally:
            self.current = None
            asyncio._set_running_loop(None)

    @contextmanager
    def inside(self, process: Process) -> Any:
        """This process carries out the step; :class:`Killed` ends here."""
        before, disk = self.current, durable.disk
        loop = asyncio._get_running_loop()
        self.current = process
        process.machine.disk.owner = process
        durable.disk = process.machine.disk  # type: ignore[assignment]
        asyncio._set_running_loop(process.loop)
        try:
            yield
        except Killed:
            assert not process.is_alive or self.violations
        finally:
            self.current = before
            durable.disk = disk
            asyncio._set_running_loop(loop)
            if before is not None:
                before.machine.disk.owner = before

    def on_call_now(self, name: str) -> None:
        """The current process is about to do something that is no call of its own machine's disk."""
        if self.current is not None:
            self.on_call(self.current, name)

    # ---- ends --------------------------------------------------------------------------------------------------------

    def kill(self, process: Process, why: str) -> None:
        """End a process at once. From inside it, :class:`Killed` is raised by the caller."""
        if not process.is_alive:
            return
        self.say(f"{process.name} dies ({why})")
        process.is_alive = False
        self._dead.append(process)
        process.machine.disk.end_process(process)
        process.machine.databases.end_process(process)
        for work in process.on_death:
            work()

    def lose_power(self, machine: Machine, processes: list[Process]) -> None:
        """The machine is off at once, with all its processes; what was not synced is gone by chance."""
        self.say(f"{machine.name} loses power")
        machine.is_up = False
        machine.boot += 1
        for process in processes:
            self.kill(process, "power")
        machine.disk.lose_power(self.random)
        machine.databases.lose_power(self.random)

    def close(self, processes: list[Process]) -> None:
        """Drop everything without letting any of it act."""
        for process in processes:
            if process.is_alive:
                process.is_alive = False
                self._dead.append(process)
        for process in self._dead:
            with self.inside(process):
                for task in process.tasks:
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    with suppress(BaseException):
                        task.get_coro().close()  # type: ignore[union-attr]
                    with suppress(BaseException):
                        task.exception()
        self._events.clear()

    # ---- words -------------------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """A line of the trace."""
        if self.keep_trace:
            who = self.current.name if self.current else "world"
            self.trace.append(f"{self.now_s:10.3f} {who:12} {text}")

    def violation(self, text: str) -> None:
        """A promise was broken."""
        self.say(f"VIOLATION {text}")
        self.violations.append(text)
