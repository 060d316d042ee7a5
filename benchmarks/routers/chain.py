"""Stations in a row with a wide-area link between each and the next: a router at every one but the first. Needs root.

A writer at station 0 reaches the routers behind by way of those in front, as relays or as custodians, or directly, as
far as packets are concerned.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from routers.net import run, writers

from stageout.core.errors import StageoutError
from tests.harness.router import RouterProcess
from tests.harness.wide_area import Link, WideArea

_PORT = 9621


class Chain:
    """As many links as given, with stations 0 (the writer's) to n (the terminal).

    :param folder: for the routers. :param links: from station to station. :param local: a router at station 0, too.
    :param settings: further ones, of all routers.
    """

    def __init__(
        self, folder: Path, links: Sequence[Link], local: bool = False, settings: dict[str, str] | None = None
    ) -> None:
        self.folder, self._links, self._settings = folder, links, settings or {}
        self._stack = contextlib.ExitStack()
        self._name = f"soc{os.getpid()}{random.randrange(1000):03}"
        self.areas: list[WideArea] = []
        self.routers: dict[int, RouterProcess] = {}
        self._first = 0 if local else 1

    def __enter__(self) -> Chain:
        try:
            for number, link in enumerate(self._links):
                area = WideArea(link, f"{self._name}x{number}", f"10.201.{number}.1", f"10.201.{number}.2")
                self.areas.append(self._stack.enter_context(area))
            for number in range(1, len(self.areas)):
                self._join(number)
            self._routing()
            for number in range(len(self._links), self._first - 1, -1):
                self.routers[number] = self._stack.enter_context(self._router(number))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def last(self) -> int:
        """Number of the terminal's station."""
        return len(self._links)

    def address(self, station: int) -> str:
        """``HOST:PORT`` of the router there, as all stations reach it."""
        host = self.areas[0].near_address if station == 0 else self.areas[station - 1].far_address
        return f"{host}:{_PORT}"

    def inside(self, station: int) -> tuple[str, ...]:
        """Put before a command, it runs at a station."""
        return self.areas[0].near if station == 0 else self.areas[station - 1].far

    def _join(self, number: int) -> None:
        """The far side of a link is the near side of the next one: a cable without a limit."""
        before, after = self.areas[number - 1].name + "f", self.areas[number].name + "n"
        run("ip", "-n", before, "link", "add", "on", "type", "veth", "peer", "name", "back", "netns", after)
        for where, device, host in ((before, "on", 1), (after, "back", 2)):
            run("ip", "-n", where, "addr", "add", f"10.220.{number}.{host}/24", "dev", device)
            run("ip", "-n", where, "link", "set", device, "up")

    def _routing(self) -> None:
        """Every station reaches every other, through those in between."""
        for area in self.areas:
            for inside in (area.near, area.far):
                run(*inside, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        for here, there in itertools.permutations(range(len(self.areas)), 2):
            networks = f"10.201.{there}.0/24", f"10.220.{there}.0/24"
            for network in networks:
                if there > here:
                    run("ip", "-n", f"{self.areas[here].name}n", "route", "replace", network, "dev", "wan0")
                    self._via(here, "f", network, f"10.220.{here + 1}.2")
                else:
                    run("ip", "-n", f"{self.areas[here].name}f", "route", "replace", network, "dev", "wan0")
                    self._via(here, "n", network, f"10.220.{here}.1")
        for number in range(1, len(self.areas)):
            run("ip", "-n", f"{self.areas[number].name}f", "route", "replace", f"10.220.{number}.0/24", "dev", "wan0")

    def _via(self, number: int, end: str, network: str, gateway: str) -> None:
        with contextlib.suppress(StageoutError):  # it is on that cable already
            run("ip", "-n", f"{self.areas[number].name}{end}", "route", "add", network, "via", gateway)

    def _router(self, number: int) -> RouterProcess:
        home = self.folder / f"station{number}"
        further = " ".join(self.address(station) for station in range(number + 1, self.last + 1))
        settings = {
            "STAGEOUT_ROUTER_HOST": "0.0.0.0",
            "STAGEOUT_ROUTER_ADDRESS": self.address(number),
            "STAGEOUT_ROUTER_TERMINALS": further,
            "STAGEOUT_ROUTER_NEIGHBOURS": self.address(number + 1) if number < self.last else "",
            "STAGEOUT_ROUTER_INTERVAL": "60",
            "STAGEOUT_ROUTER_KEY": str(home / "carrier.key"),
            **self._settings,
        }
        return RouterProcess(home, settings, _PORT, wrapper=self.inside(number))

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Run ``writers.py`` at station 0; what it says. :raises StageoutError: it failed."""
        key = self.routers[self.last].key_file("site")
        return writers(self.inside(0), {"folder": str(self.folder), "key": str(key), **job})

    def relays(self, last: int | None = None) -> list[str]:
        """Addresses of the routers between the writer and a station (the terminal), as a route."""
        return [self.address(number) for number in range(1, self.last if last is None else last)]


def cpu_s(router: RouterProcess) -> float:
    """Seconds of processors that a router and its workers have used, those that have ended included."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == router.pid:  # its session
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def changing(area: WideArea, schedule: Sequence[tuple[float, float]]) -> Iterator[None]:
    """Change a link's rate: (seconds, bytes/s), one after the other, from the beginning again at the end."""
    over = threading.Event()

    def change() -> None:
        for lasts_s, rate in itertools.cycle(schedule):
            area.change_rate(rate)
            if over.wait(lasts_s):
                return

    thread = threading.Thread(target=change, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
