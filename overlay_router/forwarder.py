"""Deliveries out of a spool: which is next, how many at once, when one that failed is tried again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from typing import Protocol, TypeVar

from overlay_router.carrier import Answer, Order
from overlay_router.custodian import Custodian
from overlay_router.destination import Reply
from overlay_router.spool import Held, Key
from overlay_router.states import Outcome, Result
from stageout.core import log
from stageout.core.children import module_command
from stageout.core.clock import Clock
from stageout.core.errors import ErrorClass
from stageout.wire.route import next_stop

_FIRST_S = 1.0
_LONGEST_S = 120.0
_COALESCE_S = 0.02
_IDLE_S = 5.0
_LINE_BYTES = 64 * 1024 * 1024
#: Failures that say something of the terminal, not of one file: everything for it waits.
_AWAY = frozenset(
    {
        ErrorClass.CONNECT_FAILED,
        ErrorClass.NAME_LOOKUP_FAILED,
        ErrorClass.NAME_NOT_RESOLVED,
        ErrorClass.CREDENTIAL_REFUSED,
        ErrorClass.STALLED,
    }
)
T = TypeVar("T")


class OnDisk(Protocol):
    """Runs a call in the thread that owns the disk."""

    def __call__(self, work: Callable[[], T]) -> Awaitable[T]: ...


@dataclass
class _Pause:
    """After failures. :param until_s: on the monotonic clock."""

    failures: int = 0
    until_s: float = 0.0

    def more(self, now_s: float, least_s: float) -> None:
        """One more failure."""
        self.failures += 1
        self.until_s = now_s + max(least_s, min(_LONGEST_S, _FIRST_S * 2 ** (self.failures - 1)))


class Forwarder:
    """Delivers what a custodian holds. :meth:`run` beside everything.

    :param on_disk: runs a call in the thread that owns the custodian. :param tell: sends replies.
    :param key: name and secret that the terminals know this router by. :param most: deliveries at once.
    :param ca: file of certificates: terminals are reached with TLS, "" for none.
    """

    def __init__(
        self,
        custodian: Custodian,
        on_disk: OnDisk,
        tell: Callable[[list[Reply]], None],
        key: tuple[str, bytes],
        most: int,
        clock: Clock,
        ca: str = "",
    ) -> None:
        self._custodian, self._on_disk, self._tell, self._clock = custodian, on_disk, tell, clock
        self._key, self._most, self._ca = key, most, ca
        self._numbers = itertools.count(1)
        self._orders: dict[int, Held] = {}
        self._pauses: dict[Key | str, _Pause] = {}
        self._problems: dict[str, str] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Task[None] | None = None
        self.wake = asyncio.Event()

    @property
    def busy(self) -> frozenset[Key]:
        """What is being delivered."""
        return frozenset(held.key for held in self._orders.values())

    @property
    def problems(self) -> dict[str, str]:
        """Why deliveries to a terminal fail now."""
        return dict(self._problems)

    async def run(self) -> None:
        """Deliver until cancelled; then what is under way is dropped, and begun again at the next start."""
        try:
            while True:
                self.wake.clear()
                await self._keep_carrier()
                await self._begin()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.wake.wait(), self._until_next_s())
                await asyncio.sleep(_COALESCE_S)
        finally:
            if self._process is not None and self._process.returncode is None:
                self._process.kill()
                await self._process.wait()

    def cancelled(self, key: Key) -> None:
        """Somebody does not want it any more: what is sent of it is stopped, and the terminal told."""
        for number, held in self._orders.items():
            if held.key == key:
                self._write({"stop": number})
        self._pauses.pop(key, None)
        self.wake.set()

    async def _keep_carrier(self) -> None:
        """Start the process that delivers, or another when it has died: what it was doing begins anew."""
        if self._process is not None and self._process.returncode is None:
            return
        if self._listening is not None:
            await self._listening
            log.error("carrier-died", deliveries=len(self._orders))
            self._orders.clear()
            await asyncio.sleep(_FIRST_S)
        self._process = await self._start()

    async def _start(self) -> asyncio.subprocess.Process:
        command = module_command("overlay_router.carrier")
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=_LINE_BYTES
        )
        self._listening = asyncio.get_running_loop().create_task(self._listen(process))
        return process

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                await self._answered(Answer(**json.loads(line)))
        except Exception as problem:  # a fault of ours must not end all deliveries: they begin anew
            log.error("delivery-not-recorded", problem=repr(problem))
            process.kill()
        await process.wait()
        self.wake.set()

    async def _begin(self) -> None:
        for held in self._next(await self._on_disk(self._custodian.due)):
            file, digests = await self._on_disk(lambda one=held: self._data(one))  # type: ignore[misc]
            stop, rest = next_stop(held.operation.terminal)
            number, operation = next(self._numbers), replace(held.operation, terminal=rest, release="delivered", tid=0)
            name, secret = self._key
            order = Order(
                number, stop, name, secret.hex(), json.dumps(asdict(operation)), file, held.digest,
                digests, _opening(held), held.key in self._custodian.cancelled,
                ca=self._ca,
            )  # fmt: skip
            self._orders[number] = held
            log.event("deliver", origin=held.key[0], seq=held.key[1], path=operation.path, terminal=order.terminal)
            self._write(asdict(order))

    def _data(self, held: Held) -> tuple[str, str]:
        return self._custodian.file(held), b"".join(self._custodian.digests(held)).hex()

    def _next(self, due: list[Held]) -> list[Held]:
        """What begins now: no terminal takes all places, and one that is away is tried with one file at a time."""
        now_s, busy = self._clock.monotonic_s(), self.busy
        load = Counter(_stop(held) for held in self._orders.values())
        chosen: list[Held] = []
        for held in due:
            terminal = _stop(held)
            away = self._pauses.get(terminal, _Pause())
            most = 1 if away.failures else max(1, self._most - 1)
            if len(self._orders) + len(chosen) >= self._most:
                break
            if held.key in busy or load[terminal] >= most or away.until_s > now_s:
                continue
            if self._pauses.get(held.key, _Pause()).until_s <= now_s:
                load[terminal] += 1
                chosen.append(held)
        return chosen

    def _until_next_s(self) -> float:
        now_s = self._clock.monotonic_s()
        waits = [pause.until_s - now_s for pause in self._pauses.values() if pause.until_s > now_s]
        return min([_IDLE_S, *waits])

    def _write(self, message: dict[str, object]) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _answered(self, answer: Answer) -> None:
        held = self._orders.get(answer.number)
        if held is None:
            return
        try:
            self._tell(await self._record(held, answer))
        except (OSError, sqlite3.Error, ValueError) as problem:  # not recorded, or no outcome: it is asked again
            self._failed(held, Answer(answer.number, failure=f"not recorded: {problem}"))
        self._orders.pop(answer.number, None)
        self.wake.set()

    async def _record(self, held: Held, answer: Answer) -> list[Reply]:
        if answer.outcome:
            self._reached(held.key, _stop(held))
            return await self._on_disk(lambda: self._custodian.settle(held.key, _result(answer)))
        if answer.damaged or (answer.code == ErrorClass.SOURCE_CHANGED.code and not held.operation.blocks):
            return await self._on_disk(lambda: self._custodian.damaged(held.key, answer.damaged))
        self._failed(held, answer)
        return []

    def _reached(self, key: Key, terminal: str) -> None:
        self._pauses.pop(terminal, None)
        self._pauses.pop(key, None)
        self._problems.pop(terminal, None)

    def _failed(self, held: Held, answer: Answer) -> None:
        terminal = _stop(held)
        away = ErrorClass.from_code(answer.code) in _AWAY
        pause = self._pauses.setdefault(terminal if away else held.key, _Pause())
        pause.more(self._clock.monotonic_s(), answer.retry_after_s)
        self._problems[terminal] = answer.failure
        log.warn("not-delivered", origin=held.key[0], seq=held.key[1], path=held.operation.path, terminal=terminal,
                 problem=answer.failure, again_s=round(pause.until_s - self._clock.monotonic_s()))  # fmt: skip


def _opening(held: Held) -> str:
    if held.asked is None:
        return ""
    return json.dumps(asdict(replace(held.asked, terminal=next_stop(held.asked.terminal)[1])))


def _stop(held: Held) -> str:
    return next_stop(held.operation.terminal)[0]


def _result(answer: Answer) -> Result | None:
    if answer.outcome == "stale":
        return None
    return Result(Outcome(answer.outcome), answer.reason, answer.generation)
