"""The near end: clients that share a server, each with files, a controller, and streams from a policy service.

Reads one JSON object (:class:`Plan`) from standard input, writes one with the clients' times and levels. Controllers
and lease client are those of the sandbox manager; a file's streams are TCP connections that carry equal parts of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stageout.core.clock import SystemClock
from stageout.core.streams import Knobs
from stageout.tuning.controllers import Controller, controller_of
from stageout.tuning.policy_client import Address, PolicyClient
from stageout.tuning.policy_grants import PolicyGrants
from stageout.tuning.servers import Grants

_SERVER = "tcp://far"
_LOOK_S = 0.01
_BUFFER_BYTES = 16_384  # little: what waits here has not been sent


@dataclass(frozen=True)
class Plan:
    """The work to be done.

    :param service: URL of the policy service, "" for none; :param token: file.
    :param greedy: always ask for all streams that a client may use; else for what its controller could use soon.
    """

    port: int
    clients: int
    files: int
    file_bytes: int
    controller: str
    knobs: Knobs
    service: str = ""
    token: str = ""
    greedy: bool = True


@dataclass
class Seen:
    """Since the last step."""

    files: int = 0
    place_s: float = 0.0
    since_s: float = 0.0


@dataclass
class Client:
    """One client with its files."""

    plan: Plan
    number: int
    left: int
    controller: Controller
    grants: Grants | None
    seen: Seen = field(default_factory=Seen)
    flights: set[asyncio.Task[tuple[float, float]]] = field(default_factory=set)
    levels: list[tuple[float, int]] = field(default_factory=list)
    useful: int = 0

    def streams(self) -> int:
        """The share that it may use now."""
        knobs = self.plan.knobs
        most = knobs.maximum * knobs.parallelism
        granted = self.grants.streams(_SERVER) if self.grants else None
        return most if granted is None else min(most, granted)

    async def run(self) -> float:
        """Send all files. :returns: seconds that it took."""
        start_s = time.monotonic()
        rate: float | None = None
        while self.left or self.flights:
            self._start_what_may(start_s)
            self._tell(rate)
            ended = [task for task in self.flights if task.done()]
            self.flights.difference_update(ended)
            rate = self._step([task.result() for task in ended])
            if not ended:
                await asyncio.sleep(_LOOK_S)
        took_s = time.monotonic() - start_s
        if self.grants:
            await self.grants.close()
        return took_s

    def _start_what_may(self, start_s: float) -> None:
        knobs, streams = self.plan.knobs, self.streams()
        step = self.controller.now(streams)
        while self.left and len(self.flights) < step.concurrency:
            if (len(self.flights) + 1) * step.parallelism > streams:
                break
            self.left -= 1
            task = asyncio.ensure_future(_send(self.plan, step.parallelism))
            task.set_name("file")
            self.flights.add(task)
        level = (round(time.monotonic() - start_s, 2), len(self.flights) * knobs.parallelism)
        if not self.levels or self.levels[-1][1] != level[1]:
            self.levels.append(level)

    def _step(self, ended: list[tuple[float, float]]) -> float | None:
        """Count files that ended; after ``delay`` of those that began since the last step, take a step."""
        for begun_s, end_s in ended:
            if begun_s >= self.seen.since_s:
                self.seen.files += 1
                self.seen.place_s += end_s - begun_s
        if self.seen.files < self.plan.knobs.delay:
            return None
        streams = self.streams()
        level = self.controller.now(streams).concurrency
        rate = self.seen.files * self.plan.file_bytes / self.seen.place_s * max(1, level) / 1e6
        self.seen = Seen(since_s=time.monotonic())
        self.controller.step(rate, streams)
        self.useful -= self.plan.knobs.increment
        return rate

    def _tell(self, rate: float | None) -> None:
        if self.grants is None:
            return
        knobs = self.plan.knobs
        self.useful = max(self.useful, knobs.initial, 2 * self.controller.now(self.streams()).concurrency)
        most = knobs.maximum if self.plan.greedy else min(knobs.maximum, self.useful)
        wanted = min(most, self.left + len(self.flights)) * knobs.parallelism
        self.grants.note(_SERVER, wanted, len(self.flights) * knobs.parallelism, rate)


async def _send(plan: Plan, parallelism: int) -> tuple[float, float]:
    """Send one file in equal parts. :returns: monotonic times of begin and end."""
    begun_s = time.monotonic()
    part = plan.file_bytes // parallelism
    await asyncio.gather(*(_send_part(plan.port, part) for _ in range(parallelism)))
    return begun_s, time.monotonic()


async def _send_part(port: int, size_bytes: int) -> None:
    loop = asyncio.get_running_loop()
    while True:
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            await loop.sock_connect(sock, ("127.0.0.1", port))
            await loop.sock_sendall(sock, memoryview(_ZEROS)[:size_bytes])
            sock.shutdown(socket.SHUT_WR)
            if await loop.sock_recv(sock, 1):
                return
        await asyncio.sleep(0.2)


_ZEROS = bytes(16 << 20)


async def _supervise(name: str, work: Callable[[], Awaitable[None]]) -> None:
    await work()


async def _all(plan: Plan) -> dict[str, Any]:
    clients = []
    for number in range(plan.clients):
        grants = None
        if plan.service:
            service = PolicyClient(Address(plan.service, Path(plan.token), "near"))
            grants = PolicyGrants(service, f"client{number}", SystemClock(), lambda: None, _supervise)
        clients.append(Client(plan, number, plan.files, controller_of(plan.controller, plan.knobs), grants))
    times = await asyncio.gather(*(client.run() for client in clients))
    return {"times_s": times, "levels": [client.levels for client in clients]}


def main() -> None:
    """Do what standard input asks for."""
    asked = json.load(sys.stdin)
    plan = Plan(**{**asked, "knobs": Knobs(**asked["knobs"])})
    print(json.dumps(asyncio.run(_all(plan))))


if __name__ == "__main__":
    main()
