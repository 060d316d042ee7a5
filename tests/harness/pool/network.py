"""Networks that a test can cut: execute points with network namespaces of their own, and two links each.

One link leads to the access point, one to the destinations of output. Both are bridges of this machine, on which the
access point and the destinations have their addresses. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from tests.harness.pool.errors import PoolUnavailable

_FIRST_NODE = 10
#: Names of the devices inside a node, in the order of the bridges.
_INSIDE = ("pool0", "world0")


@dataclass
class Network:
    """Two bridges.

    A process has one at a time: the names of its devices have the number of the process.

    :ivar access_point: address of the access point. :ivar world: address for destinations.
    """

    _net: int = field(default_factory=lambda: random.randrange(16, 250))
    _links: dict[int, tuple[str, str]] = field(default_factory=dict)

    def __enter__(self) -> Network:
        _remove_leftovers()
        try:
            for bridge, address in zip(self._bridges, (self.access_point, self.world)):
                _run("ip", "link", "add", bridge, "type", "bridge")
                _run("ip", "addr", "add", f"{address}/24", "dev", bridge)
                _run("ip", "link", "set", bridge, "up")
        except (OSError, subprocess.CalledProcessError) as problem:
            self.__exit__(None, None, None)
            raise PoolUnavailable(f"No network could be made: {problem}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for bridge in self._bridges:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                _run("ip", "link", "del", bridge)

    @property
    def _bridges(self) -> tuple[str, str]:
        return f"so{os.getpid()}p", f"so{os.getpid()}w"

    @property
    def access_point(self) -> str:
        return f"10.{self._net}.1.1"

    @property
    def world(self) -> str:
        return f"10.{self._net}.2.1"

    def address(self, number: int) -> str:
        """Address at which the access point reaches a node."""
        return f"10.{self._net}.1.{_FIRST_NODE + number}"

    def world_address(self, number: int) -> str:
        """Address from which a node sends to destinations."""
        return f"10.{self._net}.2.{_FIRST_NODE + number}"

    def join(self, number: int, pid: int) -> None:
        """Link the network namespace of a process to both bridges."""
        inside = ("nsenter", "-t", str(pid), "-n", "ip")
        _run(*inside, "link", "set", "lo", "up")
        links = []
        for bridge, device, address in zip(self._bridges, _INSIDE, (self.address(number), self.world_address(number))):
            link = f"{bridge}{number}"
            _run("ip", "link", "add", link, "type", "veth", "peer", "name", device, "netns", str(pid))
            _run("ip", "link", "set", link, "master", bridge, "up")
            _run(*inside, "addr", "add", f"{address}/24", "dev", device)
            _run(*inside, "link", "set", device, "up")
            links.append(link)
        self._links[number] = (links[0], links[1])

    def cut(self, number: int, *, world: bool = False) -> None:
        """Take a node's link to the access point down: packets vanish, in both directions.

        :param world: its link to the destinations, too.
        """
        for link in self._links[number][: 1 + world]:
            _run("ip", "link", "set", link, "down")

    def mend(self, number: int) -> None:
        """Bring a node's links up."""
        for link in self._links[number]:
            _run("ip", "link", "set", link, "up")


def _remove_leftovers() -> None:
    """Remove bridges of processes that have ended. The links to their nodes ended with the nodes."""
    for device in Path("/sys/class/net").iterdir():
        owner = re.fullmatch(r"so([0-9]+)[pw]", device.name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                _run("ip", "link", "del", device.name)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=20)
