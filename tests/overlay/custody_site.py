"""Routers with custody by HTTP: terminals, custodians that deliver to them, and a sender that goes through one."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import trustme

from stageout.core.signing import SigningKey, new_key
from stageout.overlay.rules.operations import Fields, Kind
from stageout.overlay.rules.via import joined
from tests.harness.pool.waiting import wait_until
from tests.overlay.http_site import Site, site
from tests.overlay.operations_client import Answer, Sender

#: Users with their prefixes at terminals.
_USERS = {"alice": "/", "bob": "/bob"}
_ENTRIES = "custody alice * {name} /\ncustody bob * {name} -\n"


@dataclass
class Through(Sender):
    """A user who goes through routers. :param via: their NAMEs behind the first one, the terminal last."""

    via: tuple[str, ...] = ("archive",)

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
        return super().ask(method, joined(self.via, path), body, **headers)

    def fields(self, kind: Kind, path: str, **more: Any) -> Fields:
        times = {name: more.pop(name) for name in ("made", "expires") if name in more}
        terminal = self.via[-1] if self.via else "archive"
        return replace(super().fields(kind, path), **{"terminal": terminal, **times, **more})

    def begin(self, fields: Fields, **headers: str) -> Answer:
        return super().begin(fields, **{"Stageout_Release": "custody", **headers})

    def until(self, fields: Fields, *states: str, timeout_s: float = 30) -> str:
        """Wait until an operation has one of these states."""
        found = ""

        def reached() -> bool:
            nonlocal found
            found = self.state(fields, Prefer="wait=1").facts.get("state", "")
            return found in states

        log = self.site.router
        wait_until(reached, timeout_s=timeout_s, what=f"{states}", describe=lambda: f"{found}\n{log.log[-3000:]}")
        return found


@dataclass
class Overlay:
    """Running routers by their NAMEs."""

    home: Path
    authority: trustme.CA = field(default_factory=trustme.CA)
    keys: dict[str, SigningKey] = field(default_factory=dict)
    sites: dict[str, Site] = field(default_factory=dict)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        for name in (*_USERS, "gw", "gw2"):
            self.keys[name] = new_key()

    def add(self, name: str, users: Mapping[str, str] | None = None, **settings: str) -> Site:
        """Start a router. It takes operations of the custodians gw and gw2."""
        prefixes = {**(users or _USERS), "gw": "/ router", "gw2": "/ router"}
        own = {"STAGEOUT_ROUTER_ADDRESS": name, "STAGEOUT_ROUTER_INTERVAL": "3600", **settings}
        found = self._stack.enter_context(site(self.home / name, own, prefixes, self.authority, self.keys))
        self.sites[name] = found
        return found

    def custodian(self, name: str, *routers: str, entries: str = _ENTRIES, **settings: str) -> Site:
        """Start a custodian for routers that run already."""
        home = self.home / name
        home.mkdir(exist_ok=True)
        self.keys[name].store("router-own-key", home / "own.key")
        self.write_table(name, *routers, entries=entries)
        return self.add(
            name, STAGEOUT_ROUTER_CUSTODY=str(home / "custody"), STAGEOUT_ROUTER_OWN_KEY=str(home / "own.key"),
            STAGEOUT_ROUTER_ROOT="", **settings,
        )  # fmt: skip

    def write_table(self, name: str, *routers: str, entries: str = _ENTRIES) -> None:
        """Write the table of a custodian."""
        lines = [f"router {one} localhost:{self.sites[one].router.port} ../{one}/ca.pem\n" for one in routers]
        lines += [entries.format(name=one) for one in routers]
        (self.home / name / "custody").write_text("".join(lines))

    def sender(
        self, through: str, user: str = "alice", via: tuple[str, ...] = ("archive",), signs: bool = True
    ) -> Through:
        """A user at a custodian."""
        token = self.sites[through].token(user, aud=through)
        return self._stack.enter_context(Through(self.sites[through], user, signs, token=token, via=via))

    def close(self) -> None:
        """Stop all of them."""
        self._stack.close()


@contextlib.contextmanager
def overlay(home: Path) -> Iterator[Overlay]:
    """Routers that end with the test."""
    found = Overlay(home)
    with contextlib.closing(found):
        yield found


def content(blocks: float = 2.5) -> bytes:
    """Bytes of a file."""
    return os.urandom(int(blocks * (1 << 20)))


def expires_in(seconds: int) -> dict[str, int]:
    """Times of an operation, which are the same when it is repeated."""
    now = int(time.time())
    return {"made": now, "expires": now + seconds}
