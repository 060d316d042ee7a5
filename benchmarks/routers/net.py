"""Routes with real TCP on one machine: a sender and a terminal in one network namespace, and between them for each
route a wide-area link (:mod:`tests.harness.wide_area`) with a relay at its far end. Needs root.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stageout.core.errors import StageoutError
from tests.harness.router import RouterProcess, relay
from tests.harness.wide_area import Link, WideArea

ROOT = Path(__file__).resolve().parents[2]
_SENDER = Path(__file__).resolve().parent / "sender.py"
_WRITERS = _SENDER.with_name("writers.py")
_TERMINAL = "10.199.0.1"


def run(*command: str) -> None:
    """Run a command. :raises StageoutError: it failed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StageoutError(f"{' '.join(command)}: {done.stderr.strip()}")


@dataclass(frozen=True)
class Sent:
    """A put. :param shares: bytes by route, in order."""

    size_bytes: int
    took_s: float
    sent_bytes: int
    shares: tuple[int, ...]

    @property
    def rate(self) -> float:
        """MB/s."""
        return self.size_bytes / self.took_s / 1e6

    @property
    def twice(self) -> float:
        """Share of the file that was sent twice."""
        return self.sent_bytes / self.size_bytes - 1


def writers(inside: Sequence[str], job: dict[str, Any]) -> dict[str, Any]:
    """Run ``writers.py`` in a namespace; what it says. :raises StageoutError: it failed."""
    command = [*inside, sys.executable, str(_WRITERS), json.dumps(job)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise StageoutError(f"writers.py ended with {done.returncode}: {done.stderr[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


class Net:
    """The namespace of sender and terminal, and a link with a relay for each route.

    :param folder: for the routers. :param links: of the routes. :param inner: relays without a link behind each.
    :param terminals: beside the sender, all reached by the same relays.
    """

    def __init__(self, folder: Path, links: Sequence[Link], inner: int = 0, terminals: int = 1) -> None:
        self.folder, self._links, self._inner, self._count = folder, links, inner, terminals
        self._stack = contextlib.ExitStack()
        self._hub = f"soh{os.getpid()}{random.randrange(1000):03}"
        self.inside = ("ip", "netns", "exec", self._hub)
        self.areas: list[WideArea] = []
        self.relays: list[RouterProcess] = []
        self.terminals: list[RouterProcess] = []

    def __enter__(self) -> Net:
        try:
            run("ip", "netns", "add", self._hub)
            self._stack.callback(subprocess.run, ["ip", "netns", "del", self._hub], capture_output=True)
            run("ip", "-n", self._hub, "link", "set", "lo", "up")
            run("ip", "-n", self._hub, "addr", "add", f"{_TERMINAL}/32", "dev", "lo")
            for number in range(self._count):
                home = self.folder / f"terminal{number}"
                one = RouterProcess(home, {"STAGEOUT_ROUTER_HOST": "0.0.0.0"}, wrapper=self.inside)
                self.terminals.append(self._stack.enter_context(one))
            self.ends = [f"{_TERMINAL}:{one.port}" for one in self.terminals]
            self.terminal, self.end = self.terminals[0], self.ends[0]
            self._more = self._chain()
            for number, link in enumerate(self._links):
                self._route(number, link)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _chain(self) -> list[str]:
        """Relays beside the terminal, one behind the other; their addresses in the order in which they are passed."""
        found: list[str] = []
        for number in range(self._inner):
            next_hop = found[0] if found else self.end
            one = relay(self.folder / f"inner{number}", [next_hop], self.inside, "0.0.0.0")
            self._stack.enter_context(one)
            found.insert(0, f"{_TERMINAL}:{one.port}")
        return found

    def _route(self, number: int, link: Link) -> None:
        near, far = f"10.201.{number}.1", f"10.201.{number}.2"
        area = WideArea(link, f"{self._hub}x{number}", near, far)
        self._stack.enter_context(area)
        self.areas.append(area)
        self._join(area.name + "n", f"a{number}", f"10.220.{number}")
        self._join(area.name + "f", f"b{number}", f"10.221.{number}")
        run("ip", "-n", self._hub, "route", "add", far, "via", f"10.220.{number}.2")
        run(*area.near, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        run("ip", "-n", f"{area.name}f", "route", "add", f"10.220.{number}.0/24", "dev", "wan0")
        run("ip", "-n", f"{area.name}f", "route", "add", _TERMINAL, "via", f"10.221.{number}.1")
        home = self.folder / f"relay{number}"
        one = relay(home, [*self.ends, *self._more[:1]], area.far, "0.0.0.0")
        self._stack.enter_context(one)
        self.relays.append(one)

    def _join(self, namespace: str, name: str, net: str) -> None:
        """A cable without a limit from the hub to a namespace."""
        run("ip", "-n", self._hub, "link", "add", name, "type", "veth", "peer", "name", "up0", "netns", namespace)
        for where, device, host in ((self._hub, name, 1), (namespace, "up0", 2)):
            run("ip", "-n", where, "addr", "add", f"{net}.{host}/24", "dev", device)
            run("ip", "-n", where, "link", "set", device, "up")

    def routes(self, numbers: Sequence[int], short: bool = False) -> str:
        """These routes, as ``--routes`` takes them. :param short: without the relays beside the terminal."""
        more = [] if short else self._more
        hops = [[f"10.201.{number}.2:{self.relays[number].port}", *more] for number in numbers]
        return ";".join(",".join(route) for route in hops)

    def put(
        self,
        size_bytes: int,
        numbers: Sequence[int],
        half: Callable[[], None] = lambda: None,
        verb: str = "put",
        short: bool = False,
    ) -> Sent:
        """Send a file by these routes, or fetch it ("get"). :param half: called when half of it was sent."""
        source = self.folder / f"source{size_bytes}"
        if not source.exists():
            source.write_bytes(os.urandom(1 << 20) * (size_bytes >> 20))
        arguments = [verb, str(source), self.end, str(self.terminal.key_file("site")), self.routes(numbers, short)]
        command = [*self.inside, sys.executable, str(_SENDER), *arguments]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line == "half\n":
                    half()
                else:
                    told: dict[str, Any] = json.loads(line)
        if process.returncode:
            raise StageoutError(f"{' '.join(arguments)} ended with {process.returncode}")
        return Sent(size_bytes, told["took_s"], told["sent_bytes"], tuple(told["shares"]))
