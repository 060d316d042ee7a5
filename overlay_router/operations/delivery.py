"""Delivers what is in custody: one queue, one process that carries, and the pauses between attempts."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from overlay_router.custodians.carrier_process import CarrierProcess, attempt
from overlay_router.operations.queue import Queue, Waiting
from stageout.core import log
from stageout.overlay.http.operations import Status, status_of
from stageout.overlay.rules.custody import FIRST_PAUSE_S, LONGEST_PAUSE_S
from stageout.overlay.rules.operations import Identity, Row
from stageout.overlay.rules.states import ENDS, State

_MODULE = "overlay_router.operations.carrier"
#: A refused operation is tried again after so long, and so long before it expires.
_REFUSED_S, _BEFORE_END_S = 3600.0, 120.0
#: One that waits for others at the terminal is asked about more often.
_HELD_S = 60.0
_LOOKS_S = 30.0
OnDisk = Callable[[Callable[[], Any]], Awaitable[Any]]


class Work(NamedTuple):
    """Something to do with one operation. :param what: ``deliver``, ``ask`` or ``cancel``."""

    row: Waiting
    what: str


class Custody(Protocol):
    """The custodian's part of the queue. All calls run in the thread that owns the disk."""

    def work(self, identity: Identity) -> Work | None:
        """Return what is to do with an operation now, None for nothing."""

    def start(self, identity: Identity, what: str) -> dict[str, Any] | None:
        """Begin an attempt: the order for the process, None if there is nothing to do any more."""

    def answered(self, identity: Identity, status: Status | None, rotten: Sequence[int]) -> Row | None:
        """Record the end of an attempt. :param status: None: nothing was learned."""

    def open(self) -> list[Identity]:
        """Return all operations that have not ended."""


class _Pause:
    """Attempts with a router that is away: one at a time, further and further apart."""

    def __init__(self, now: float) -> None:
        self.length, self.until, self.is_tried = float(FIRST_PAUSE_S), now + FIRST_PAUSE_S, False

    def again(self, now: float) -> None:
        """An attempt has failed."""
        self.length = min(float(LONGEST_PAUSE_S), 2 * self.length)
        self.until, self.is_tried = now + self.length, False


class Delivery:
    """The queue of one custodian.

    :param on_disk: runs a call in the thread that owns the disk. :param most: attempts at the same time.
    :param address_of: of a router of the list.
    """

    def __init__(
        self,
        custody: Custody,
        on_disk: OnDisk,
        most: int,
        address_of: Callable[[str], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._custody, self._on_disk, self._most = custody, on_disk, most
        self._address_of, self._clock = address_of, clock
        self.wake = asyncio.Event()
        self._queue = Queue()
        self._what: dict[Identity, str] = {}
        self._busy: dict[int, tuple[Waiting, str]] = {}
        self._again: set[Identity] = set()
        self._pauses: dict[str, _Pause] = {}
        self._tries: dict[Identity, int] = {}
        self._due: list[tuple[float, Identity]] = []
        self._new: list[Identity] = []
        self._number = 0
        self._process = CarrierProcess(_MODULE, self._heard, self.wake)

    def look(self, identity: Identity) -> None:
        """Something has happened to an operation: it was taken, or is to be cancelled."""
        self._new.append(identity)
        self.wake.set()

    def reached(self, address: str) -> None:
        """A router is there again, whatever pause its failures had earned."""
        for name in [name for name in self._pauses if self._address_of(name) == address]:
            self._pauses.pop(name)
            self.wake.set()

    async def retry(self) -> None:
        """Try refused operations, and routers that are away, at once: keys have changed, or somebody asks for it."""
        self._pauses.clear()
        self._tries.clear()
        for identity in await self._on_disk(self._custody.open):
            self.look(identity)

    async def run(self) -> None:
        """Deliver until cancelled."""
        try:
            for identity in await self._on_disk(self._custody.open):
                self.look(identity)
            while True:
                await attempt(self._round())
        finally:
            await self._process.end()

    async def _round(self) -> None:
        self.wake.clear()
        if not self._process.is_running:
            await self._begin_anew()
        await self._take_in()
        while len(self._busy) < self._most:
            row = self._queue.take(self._is_away)
            if row is None:
                break
            await self._send(row)
        times = [one.until for one in self._pauses.values()] + [at for at, _ in self._due[:1]]
        now = self._clock()
        timeout = max(0.05, min([at for at in times if at > now] or [now + _LOOKS_S]) - now)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.wake.wait(), min(timeout, _LOOKS_S))

    async def _begin_anew(self) -> None:
        """Start a process; what the last one was doing is done again."""
        if await self._process.has_died():
            log.error("delivery-process-died", advice="it is started again, and all operations are tried again")
        for row, _ in self._busy.values():
            self._new.append(row.identity)
        self._busy.clear()
        if len(self._queue) or self._new or self._due:
            await self._process.start()

    async def _take_in(self) -> None:
        now = self._clock()
        while self._due and self._due[0][0] <= now:
            self._new.append(heapq.heappop(self._due)[1])
        new, self._new = dict.fromkeys(self._new), []
        busy = {row.identity: what for row, what in self._busy.values()}
        for identity in new:
            work: Work | None = await self._guarded(identity, self._custody.work, identity)
            if work is None:
                continue
            if busy.get(identity) == work.what:
                self._again.add(identity)
            else:  # a cancel overtakes the delivery that is under way
                self._what[identity] = work.what
                self._queue.put(work.row)

    def _is_away(self, hop: str) -> bool:
        pause = self._pauses.get(hop)
        return pause is not None and (pause.is_tried or self._clock() < pause.until)

    async def _send(self, row: Waiting) -> None:
        what = self._what.pop(row.identity, "deliver")
        order = await self._guarded(row.identity, self._custody.start, row.identity, what)
        if order is None:
            self._queue.end(row.identity, row.names)
            return
        pause = self._pauses.get(row.hop)
        if pause is not None:
            pause.is_tried = True
        self._number += 1
        self._busy[self._number] = row, what
        self._process.write({"id": self._number, "what": what, **order})

    async def _heard(self, told: Mapping[str, Any]) -> None:
        if "id" not in told:
            log.event("blocks-refused", path=told["path"], blocks=told["blocks"])
            return
        found = self._busy.pop(told["id"], None)
        if found is None:
            return
        row, reason = found[0], str(told["reason"])
        if told.get("traceback"):
            log.error("delivery-failed", path=row.names, problem=reason, traceback=told["traceback"])
        status = status_of(told["status"]) if told["status"] else None
        self._reached(row.hop, reason, bool(told["away"]))
        rotten = tuple(told["rotten"])
        after = await self._guarded(row.identity, self._custody.answered, row.identity, status, rotten)
        self._put_back(row, after, status, bool(told["away"]))
        self.wake.set()

    async def _guarded(self, identity: Identity, call: Callable[..., Any], *arguments: object) -> Any:
        """Call the custodian. A fault ends this attempt alone: another one follows, and the queue goes on."""
        try:
            return await self._on_disk(partial(call, *arguments))
        except Exception as problem:
            log.error("delivery-failed", operation=f"{identity.origin}/{identity.seq}", problem=repr(problem),
                      traceback=traceback.format_exc())  # fmt: skip
            self._later(identity, LONGEST_PAUSE_S)
            return None

    def _reached(self, hop: str, reason: str, away: bool) -> None:
        pause = self._pauses.get(hop)
        if not away:
            self._pauses.pop(hop, None)
        elif pause is None:
            self._pauses[hop] = _Pause(self._clock())
            log.event("router-lost", router=hop, problem=reason)
        else:
            pause.again(self._clock())

    def _put_back(self, row: Waiting, after: Row | None, status: Status | None, away: bool) -> None:
        identity = row.identity
        is_again = identity in self._again
        self._again.discard(identity)
        if after is None or after.state in ENDS:
            self._tries.pop(identity, None)
            self._queue.end(identity, row.names)
            return
        if after.state is State.REFUSED:
            self._queue.end(identity, row.names)
        if away or is_again:
            self._new.append(identity)
            return
        longest = _REFUSED_S if after.state is State.REFUSED else LONGEST_PAUSE_S if status is None else _HELD_S
        left = after.fields.expires - time.time()
        self._later(identity, min(longest, left - _BEFORE_END_S) if left > _BEFORE_END_S else longest)

    def _later(self, identity: Identity, longest: float) -> None:
        """Look at an operation again: after a pause that doubles each time."""
        tries = self._tries[identity] = self._tries.get(identity, 0) + 1
        pause = min(longest, FIRST_PAUSE_S * 2.0 ** min(tries - 1, 20))
        heapq.heappush(self._due, (self._clock() + pause, identity))
