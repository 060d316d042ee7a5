"""Deliveries of packs out of a spool: which are next, how many at once, when one that failed is tried again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from overlay_router.destination import Reply
from overlay_router.forwarder import AWAY, OnDisk
from overlay_router.pack_carrier import Answer, Order
from overlay_router.pack_custody import Key, PackCustody, lost
from overlay_router.pack_records import HeldPack
from overlay_router.pauses import FIRST_S, Pause
from overlay_router.states import Outcome, Result
from stageout.core import log
from stageout.core.children import module_command
from stageout.core.clock import Clock
from stageout.core.errors import ErrorClass
from stageout.wire.route import next_stop

_IDLE_S = 5.0
_COALESCE_S = 0.002
#: Packs on their way to one terminal.
_UNDER_WAY = 16
_LINE_BYTES = 64 * 1024 * 1024
_SETTLED = "its origin has settled it at the terminal already"


class PackForwarder:
    """Delivers the packs that a custodian holds. :meth:`run` beside everything.

    :param on_disk: runs a call in the thread that owns the custodian. :param tell: sends replies.
    :param key: name and secret that the terminals know this router by.
    :param ca: file of certificates: terminals are reached with TLS, "" for none.
    """

    def __init__(
        self,
        packs: PackCustody,
        on_disk: OnDisk,
        tell: Callable[[list[Reply]], None],
        key: tuple[str, bytes],
        clock: Clock,
        ca: str = "",
    ) -> None:
        self._packs, self._on_disk, self._tell, self._clock = packs, on_disk, tell, clock
        self._key, self._ca = key, ca
        self._numbers = itertools.count(1)
        self._orders: dict[int, HeldPack] = {}
        self._answers: list[Answer] = []
        self._pauses: dict[Key | str, Pause] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Task[None] | None = None
        self._problems: dict[str, str] = {}
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
                try:
                    await self._settle()
                    await self._begin()
                except Exception as problem:  # a full disk, above all: what leaves makes room; or no process
                    advice = "look at the disk of the spool and its database, and at the limit of processes"
                    log.error("custody-not-read", problem=repr(problem), advice=advice)
                    await asyncio.sleep(FIRST_S)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.wake.wait(), self._until_next_s())
                await asyncio.sleep(_COALESCE_S)
        finally:
            if self._process is not None and self._process.returncode is None:
                self._process.kill()
                await self._process.wait()

    async def _begin(self) -> None:
        held = await self._on_disk(self._packs.held)
        if not held:
            return
        process = await self._carrier()
        for one in self._next(held):
            facts = await self._on_disk(lambda one=one: self._packs.order(one))  # type: ignore[misc]
            if facts is not None:  # it may have expired meanwhile
                self._give(process, one, facts)

    async def _carrier(self) -> asyncio.subprocess.Process:
        """The process that delivers; another when it has died: what it was doing begins anew."""
        if self._process is not None and self._process.returncode is None:
            return self._process
        if self._listening is not None:
            await self._listening
            await self._settle()
            log.error("carrier-died", packs=len(self._orders))
            self._orders.clear()
            await asyncio.sleep(FIRST_S)
        command = module_command("overlay_router.pack_carrier")
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=_LINE_BYTES
        )
        self._listening = asyncio.get_running_loop().create_task(self._listen(self._process))
        return self._process

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                self._answers.append(Answer(**json.loads(line)))
                self.wake.set()
        except Exception as problem:  # not understood, and so not heard any more: another one begins anew
            log.error("delivery-not-recorded", problem=repr(problem))
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()
        self.wake.set()

    def _next(self, held: list[HeldPack]) -> list[HeldPack]:
        """What begins now; a terminal that is away is tried with one pack at a time."""
        now_s, busy = self._clock.monotonic_s(), self.busy
        load = Counter(_stop(one) for one in self._orders.values())
        chosen: list[HeldPack] = []
        for one in held:
            terminal = _stop(one)
            away = self._pauses.get(terminal, Pause())
            if one.key in busy or away.until_s > now_s or load[terminal] >= (1 if away.failures else _UNDER_WAY):
                continue
            if self._pauses.get(one.key, Pause()).until_s <= now_s:
                load[terminal] += 1
                chosen.append(one)
        return chosen

    def _give(self, process: asyncio.subprocess.Process, held: HeldPack, facts: dict[str, Any]) -> None:
        number, (name, secret) = next(self._numbers), self._key
        self._orders[number] = held
        log.event("deliver", origin=held.origin, seq=held.seq, path=held.path, files=held.files, terminal=_stop(held))
        order = Order(number, _stop(held), name, secret.hex(), ca=self._ca, **facts)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(json.dumps(asdict(order)).encode() + b"\n")

    async def _settle(self) -> None:
        """Record the answers that have come, all together; when that fails, they are asked for again."""
        answers, self._answers = self._answers, []
        found = [(self._orders.pop(one.number), one) for one in answers if one.number in self._orders]
        ends: list[tuple[HeldPack, list[Result]]] = []
        for held, answer in found:
            if answer.results:
                self._reached(held)
                ends.append((held, _judged(answer)))
            elif answer.damaged:
                self._tell(await self._on_disk(lambda held=held: self._packs.damaged(held)))  # type: ignore[misc]
            else:
                self._failed(held, answer)
        if ends:
            self._tell(await self._on_disk(lambda: self._packs.settle(ends)))

    def _reached(self, held: HeldPack) -> None:
        self._pauses.pop(_stop(held), None)
        self._pauses.pop(held.key, None)
        self._problems.pop(_stop(held), None)

    def _failed(self, held: HeldPack, answer: Answer) -> None:
        terminal = _stop(held)
        now_s = self._clock.monotonic_s()
        pause = self._pauses.setdefault(terminal if ErrorClass.from_code(answer.code) in AWAY else held.key, Pause())
        if pause.until_s <= now_s:  # several packs are lost with one connection
            pause.more(now_s, answer.retry_after_s)
        self._problems[terminal] = answer.failure
        log.warn("not-delivered", origin=held.origin, seq=held.seq, path=held.path, terminal=terminal,
                 problem=answer.failure, again_s=round(pause.until_s - now_s))  # fmt: skip

    def _until_next_s(self) -> float:
        now_s = self._clock.monotonic_s()
        waits = [pause.until_s - now_s for pause in self._pauses.values() if pause.until_s > now_s]
        return min([_IDLE_S, *waits])


def _stop(held: HeldPack) -> str:
    return next_stop(held.terminal)[0]


def _judged(answer: Answer) -> list[Result]:
    """What the terminal said of each file; one whose only copy here was damaged is LOST."""
    found = [
        Result(Outcome.FAILED, _SETTLED) if outcome == "stale" else Result(Outcome(outcome), reason, generation, code)
        for outcome, reason, generation, code in answer.results
    ]
    for position in answer.damaged:
        if found[position].outcome is Outcome.FAILED:
            found[position] = lost()
    return found
