"""One file over two routes of different speed and length, one that dies, and a chain of five hops.

Each route is a wide-area link of its own (packets are delayed, paced and dropped by a process between two network
namespaces; TCP is the kernel's) with a relay behind it; sender and terminal are in a namespace of their own. Each route
alone is measured beside, in turn. The rate is one that the processes between the namespaces carry without strain. Needs
root.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import Figure, main_in_parts
from routers.net import Net, Sent

from tests.harness.wide_area import Link

MIB = 1 << 20
_RATE = 4e6
_SHORT_S = 0.01
#: On each of two connections a block and what TCP has, and 2 % of the file.
_UNDER_WAY_BYTES, _AGAIN = 4 * MIB, 0.02


def _link(rate: float = _RATE, round_trip_s: float = _SHORT_S) -> Link:
    return Link(rate, round_trip_s, congestion="bbr")


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


class Case:
    """Two routes. :param seconds: that the file takes by both, about."""

    def __init__(self, net: Net, rounds: int, seconds: float) -> None:
        self._net, self.rounds = net, rounds
        rates = [area.link.rate_bytes_per_s for area in net.areas]
        self.size_bytes = max(8, int(sum(rates) * seconds) // MIB) * MIB

    def both_and_each(self, size_bytes: int, verb: str) -> tuple[list[Sent], list[list[Sent]]]:
        """By both, and by each alone, in turn."""
        both: list[Sent] = []
        each: list[list[Sent]] = [[] for _ in self._net.areas]
        if verb == "get":  # it is there then
            self._net.put(size_bytes, [0])
        for _ in range(self.rounds):
            both.append(self._net.put(size_bytes, range(len(each)), verb=verb))
            for number, runs in enumerate(each):
                runs.append(self._net.put(size_bytes, [number], verb=verb))
        return both, each

    def of_the_sum(self, what: str, goal: float, verb: str = "put") -> list[Figure]:
        """The rate of both, as a share of what each does alone."""
        both, each = self.both_and_each(self.size_bytes, verb)
        ratios = [one.rate / sum(runs[k].rate for runs in each) for k, one in enumerate(both)]
        return [
            Figure(f"{what}: of the sum", _median(ratios), "ratio", goal=goal, more=True),
            Figure(f"{what}: both", _median([one.rate for one in both]), "MB/s", "the better one alone",
                   _median([one.rate for one in each[0]])),
            Figure(f"{what}: sent twice", _median([one.twice for one in both]), "share"),
        ]  # fmt: skip

    def of_the_better(self, what: str, size_bytes: int = 0, goal: float = 1.0) -> list[Figure]:
        """The time by both, as a share of that by the better one (the first) alone."""
        both, each = [], []
        for _ in range(self.rounds):
            both.append(self._net.put(size_bytes or self.size_bytes, (0, 1)))
            each.append(self._net.put(size_bytes or self.size_bytes, (0,)))
        ratios = [one.took_s / alone.took_s for one, alone in zip(both, each)]
        return [Figure(f"{what}: time, of the better one's", _median(ratios), "ratio", goal=goal)]

    def rate(self, verb: str, short: bool = False) -> float:
        """MB/s by the first route. :param short: without the relays beside the terminal."""
        return self._net.put(self.size_bytes, (0,), verb=verb, short=short).rate

    def dies(self, what: str, how: Callable[[Net], None], back: Callable[[Net], None]) -> list[Figure]:
        """One route dies when half is sent: seconds more than the other needs for what is left."""
        alone = self._net.put(self.size_bytes, (1,))
        late, twice = [], []
        for _ in range(self.rounds):
            died: list[float] = []
            start_s = time.monotonic()

            def half(died: list[float] = died) -> None:
                died.append(time.monotonic())
                how(self._net)

            try:
                done = self._net.put(self.size_bytes, (0, 1), half)
            finally:
                back(self._net)
            end_s = time.monotonic()
            ideal_s = (died[0] - start_s) + self.size_bytes / 2e6 / alone.rate
            late.append(end_s - start_s - ideal_s)
            twice.append(done.twice)
        return [
            Figure(f"{what}: later than ideal", _median(late), "s", goal=2.0),
            Figure(f"{what}: sent twice", _median(twice), "share", goal=_AGAIN + _UNDER_WAY_BYTES / self.size_bytes),
        ]


def _kill(net: Net) -> None:
    net.relays[0].kill()


def _restart(net: Net) -> None:
    net.relays[0].start()


def _cut(number: signal.Signals) -> Callable[[Net], None]:
    """The link itself stands still: nothing comes, nothing is refused."""

    def send(net: Net) -> None:
        process = net.areas[0]._process
        assert process is not None
        os.kill(process.pid, number)

    return send


@dataclass(frozen=True)
class _Part:
    """One case. :param inner: relays beside the terminal."""

    links: tuple[Link, ...]
    run: Callable[[Case, str], list[Figure]]
    inner: int = 0


def _parts() -> dict[str, _Part]:
    cut, mend = _cut(signal.SIGSTOP), _cut(signal.SIGCONT)
    equal = (_link(), _link())
    return {
        "equal": _Part(equal, lambda it, name: it.of_the_sum(name, 0.95)),
        "equal, back": _Part(equal, lambda it, name: it.of_the_sum(name, 0.95, "get")),
        "4 to 1": _Part((_link(), _link(_RATE / 4)), lambda it, name: it.of_the_sum(name, 0.92)),
        "10 to 1": _Part((_link(), _link(_RATE / 10)), lambda it, name: it.of_the_better(name)),
        "10 to 1, 8 MiB": _Part((_link(), _link(_RATE / 10)), lambda it, name: it.of_the_better(name, 8 * MIB, 1.15)),
        "10 and 200 ms": _Part((_link(), _link(_RATE, 0.2)), lambda it, name: it.of_the_better(name)),
        "a relay is killed": _Part(equal, lambda it, name: it.dies(name, _kill, _restart)),
        "a link falls silent": _Part(equal, lambda it, name: it.dies(name, cut, mend)),
        "five relays": _Part((_link(),), _hops, inner=4),
    }


def measure(wanted: Sequence[str], quick: bool) -> list[Figure]:
    """These cases, each with links of its own."""
    rounds, seconds = (1, 4.0) if quick else (3, 20.0)
    figures: list[Figure] = []
    for name, part in _parts().items():
        if name not in wanted:
            continue
        with tempfile.TemporaryDirectory(prefix="routes", dir="/var/tmp") as folder:
            Path(folder).chmod(0o755)
            with Net(Path(folder), part.links, part.inner) as net:
                found = part.run(Case(net, rounds, seconds), name)
        print("; ".join(f"{figure.what} {figure.value:.3g} {figure.unit}" for figure in found), flush=True)
        figures += found
    return figures


def _hops(case: Case, name: str) -> list[Figure]:
    """Put and get over five relays, beside one."""
    figures = []
    for verb in ("put", "get"):
        ratios = [case.rate(verb) / case.rate(verb, short=True) for _ in range(case.rounds)]
        figures.append(Figure(f"{name}: {verb}, of one", _median(ratios), "ratio", goal=0.9, more=True))
    return figures


if __name__ == "__main__":
    sys.exit(main_in_parts("overlay_routes", list(_parts()), measure))
