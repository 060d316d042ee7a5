"""``stageout put`` and ``get`` with ``https://`` URLs, as scripts call them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trustme

from tests.overlay.http_site import Site, site


@dataclass
class Commands:
    """Commands for one router, with a key that it knows. :ivar err: what the last one said to people.

    :param wrapper: put before a command. :param environment: further variables of a command.
    """

    site: Site
    home: Path
    user: str = "alice"
    err: str = ""
    options: list[str] = field(default_factory=list)
    wrapper: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        key = self.home / f"{self.user}.key"
        self.site.keys[self.user].store("key", key)
        self.options = ["--key", str(key), "--user", self.user, "--cacert", str(self.site.ca), *self.options]

    def url(self, path: str) -> str:
        """Of a name that is percent-encoded."""
        return f"{self.site.url}/{path}"

    def command(self, *words: str) -> list[str]:
        """The command line of one."""
        return [sys.executable, "-m", "stageout.cli.main", words[0], *self.options, *words[1:], "--json"]

    def begun(self, *words: str) -> subprocess.Popen[str]:
        """One that runs."""
        environment = {**os.environ, **self.environment}
        command = [*self.wrapper, *self.command(*words)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)

    def ended(self, process: subprocess.Popen[str], status: int = 0) -> list[dict[str, Any]]:
        """The objects of one that was begun."""
        out, self.err = process.communicate(timeout=300)
        assert process.returncode == status, (process.returncode, out[-1000:], self.err[-1000:])
        return [json.loads(line) for line in out.splitlines()]

    def __call__(self, *words: str, status: int = 0) -> list[dict[str, Any]]:
        """Run one; returns its objects."""
        return self.ended(self.begun(*words), status)


@contextmanager
def relayed(home: Path, relays: int = 1) -> Iterator[tuple[Site, list[Site]]]:
    """A terminal, and relays to it."""
    authority = trustme.CA()
    with ExitStack() as stack:
        terminal = stack.enter_context(site(home / "terminal", authority=authority))
        found = []
        for at in range(relays):
            place = home / f"relay{at}"
            place.mkdir()
            own = {
                "STAGEOUT_ROUTER_ROOT": "", "STAGEOUT_ROUTER_NEIGHBOURS": f"localhost:{terminal.router.port}",
                "STAGEOUT_ROUTER_KEY": str(place / "hop.key"), "STAGEOUT_ROUTER_INTERVAL": "3600",
            }  # fmt: skip
            relay = stack.enter_context(site(place, own, {"alice": "-"}, authority))
            keys = Path(relay.router.environment["STAGEOUT_ROUTER_KEYS"])
            keys.write_text(f"alice {terminal.keys['alice'].public} -\nhop not-secret-but-long-enough - router\n")
            relay.router.reload()
            found.append(relay)
        yield terminal, found
