"""A link that several clients share, in steps of simulated time; the same seed gives the same run."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stageout.core.streams import Knobs
from stageout.tuning.adaptive import Adaptive, adapt
from stageout.tuning.crowding import Crowding, control

#: (rate since the last step in MB/s, streams granted) -> transfers at once
Controller = Callable[[float, int], int]


@dataclass(frozen=True)
class Link:
    """``stream_mb_s``: most of one stream. Beyond ``knee`` streams the link loses ``overload`` per further knee."""

    capacity_mb_s: float
    stream_mb_s: float
    knee: int
    overload: float
    noise: float = 0.0
    change_at_s: float = float("inf")
    changed_mb_s: float = 0.0

    def per_stream(self, streams: int, now_s: float) -> float:
        whole = self.capacity_mb_s if now_s < self.change_at_s else self.changed_mb_s
        lost = 1 + self.overload * max(0, streams - self.knee) / self.knee
        return min(self.stream_mb_s, whole / lost / max(1, streams))


@dataclass
class Client:
    controller: Controller
    knobs: Knobs
    files: int
    file_mb: float
    streams: int
    concurrency: int
    moved_mb: float = 0.0
    since_mb: float = 0.0
    since_s: float = 0.0
    done_s: float = 0.0
    levels: list[int] = field(default_factory=list)

    @property
    def left(self) -> int:
        return self.files - int(self.moved_mb / self.file_mb + 1e-9)

    @property
    def active(self) -> int:
        return min(self.concurrency, self.left) * self.knobs.parallelism

    def tick(self, rate: float, step_s: float) -> None:
        self.moved_mb += rate * step_s
        self.since_mb += rate * step_s
        self.since_s += step_s
        if self.since_mb >= self.knobs.delay * self.file_mb:
            self.concurrency = self.controller(self.since_mb / self.since_s, self.streams)
            self.levels.append(self.concurrency)
            self.since_mb = self.since_s = 0.0


def run(link: Link, clients: Sequence[Client], seed: int = 1, step_s: float = 0.5, most_s: float = 50_000) -> float:
    """Seconds until the last client has finished."""
    chance, now_s = random.Random(seed), 0.0
    while any(client.left > 0 for client in clients):
        assert now_s < most_s, "never ends"
        each = link.per_stream(sum(client.active for client in clients), now_s)
        now_s += step_s
        for client in clients:
            if client.left > 0:
                factor = max(0.05, chance.gauss(1, link.noise))
                client.tick(client.active * each * factor, step_s)
                client.done_s = now_s
    return now_s


def fairness(clients: Sequence[Client]) -> float:
    """Jain's index of the clients' mean rates: 1 is equal."""
    rates = [client.moved_mb / client.done_s for client in clients]
    return float(sum(rates) ** 2 / (len(rates) * sum(rate**2 for rate in rates)))


def all_at_once(knobs: Knobs) -> Controller:
    return lambda rate, streams: min(knobs.maximum, streams // knobs.parallelism)


def as_printed(knobs: Knobs) -> Controller:
    state = Adaptive(knobs.initial)

    def step(rate: float, streams: int) -> int:
        nonlocal state
        state, taken = adapt(state, rate, streams, knobs)
        return taken.concurrency

    return step


def crowding(knobs: Knobs) -> Controller:
    state = Crowding(1)

    def step(rate: float, streams: int) -> int:
        nonlocal state
        state, taken = control(state, rate, streams, knobs)
        return taken.concurrency

    return step


def make_clients(
    kind: Callable[[Knobs], Controller], knobs: Knobs, count: int, files: int, file_mb: float, streams: int
) -> list[Client]:
    start = {all_at_once: knobs.maximum, as_printed: knobs.initial, crowding: 1}[kind]
    start = min(start, streams // knobs.parallelism)
    return [Client(kind(knobs), knobs, files, file_mb, streams, start) for _ in range(count)]
