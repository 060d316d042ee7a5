"""Several real routers on this machine that are each other's neighbours, for tests and demonstrations."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from tests.harness.router import RouterProcess


class RouterGraph:
    """Routers on 127.0.0.x; each connects to those that ``edges`` names for it.

    :param home: a directory for each router is made below it. :param edges: name -> names of its neighbours.
    :param interval_s: between announcements. :param environment: further settings of all.
    :param custodians: name -> names, or addresses, of the terminals that it takes custody for.
    """

    def __init__(
        self,
        home: Path,
        edges: Mapping[str, Sequence[str]],
        interval_s: float = 0.5,
        environment: Mapping[str, str] | None = None,
        custodians: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        names = sorted({*edges, *(to for ends in edges.values() for to in ends)})
        hosts = {name: f"127.0.0.{number}" for number, name in enumerate(names, 11)}
        ports = {name: _free_port(hosts[name]) for name in names}
        self.addresses = {name: f"{hosts[name]}:{ports[name]}" for name in names}
        self._stack = contextlib.ExitStack()
        self.routers: dict[str, RouterProcess] = {}
        for name in names:
            settings = {
                "STAGEOUT_ROUTER_HOST": hosts[name],
                "STAGEOUT_ROUTER_ADDRESS": self.addresses[name],
                "STAGEOUT_ROUTER_NEIGHBOURS": ", ".join(self.addresses[to] for to in edges.get(name, ())),
                "STAGEOUT_ROUTER_KEY": str(home / name / "hop.key"),
                "STAGEOUT_ROUTER_INTERVAL": str(interval_s),
                "STAGEOUT_ROUTER_WORKERS": "1",
                **(environment or {}),
            }
            terminals = (custodians or {}).get(name, ())
            if terminals:
                settings["STAGEOUT_ROUTER_TERMINALS"] = " ".join(self.addresses.get(to, to) for to in terminals)
                settings["STAGEOUT_ROUTER_KEY"] = str(home / name / "carrier.key")
            self.routers[name] = RouterProcess(home / name, settings, ports[name])

    def __enter__(self) -> RouterGraph:
        with contextlib.ExitStack() as starting:
            with ThreadPoolExecutor() as crew:
                for begun in [crew.submit(starting.enter_context, router) for router in self.routers.values()]:
                    begun.result()
            self._stack = starting.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])
