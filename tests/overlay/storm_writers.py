"""Writers that write while routers die: each tries everything again until it is done, and knows which files must be
there."""

from __future__ import annotations

import contextlib
import hashlib
import random
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Protocol

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Gateway
from stageout.overlay.client import put
from stageout.overlay.copying import state
from stageout.overlay.operations import Session
from stageout.overlay.wire.messages import Result
from stageout.overlay.wire.route import Route
from tests.overlay.depositing import deposit

MIB = 1 << 20
PATIENCE_S = 180.0
_NAMES = 8
_SIZES_BYTES = (0, 100, MIB, 3 * MIB + 5)
#: In a custodian whose terminal is away for a while.
_DEPOSIT_EXPIRES_S = 3600
_NEVER = (ErrorClass.CONTENT_MISMATCH, ErrorClass.CONFLICT, ErrorClass.NOT_FOUND)


class World(Protocol):
    """A writer's knowledge of the storm. :ivar expires_s: of puts, so that what an attempt left is gone soon."""

    home: Path
    over: Event
    counts: Counter[str]
    expires_s: int

    def end(self, name: str) -> Gateway:
        """A router as writers reach it."""

    def routes(self, terminal: str) -> tuple[Route, ...]:
        """Ways to a terminal."""

    def known_as(self, terminal: str, custodian: str) -> str:
        """Address under which a custodian delivers to a terminal."""

    def is_busy(self, terminal: str) -> bool:
        """Whether somebody still writes there."""


@dataclass
class Writer:
    """Puts, renames and deletes in a directory of its own. :ivar expected: path -> SHA-256 of what must be there."""

    world: World
    name: str
    terminal: str
    dice: random.Random
    expected: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    is_done: bool = False
    _seen_full: int = 0
    _quiet: dict[str, float] = field(default_factory=dict)

    def run(self) -> None:
        """Operations one after the other until the storm is over; the last one is finished.

        Then it makes room for those that are not so far: on a full disk nobody else can.
        """
        try:
            while not self.world.over.is_set():
                self.step()
            self.is_done = True
            while self.world.is_busy(self.terminal):
                self._look_at_room()
                time.sleep(0.2)
        except Exception as problem:
            self.problem = f"{self.name}: {type(problem).__name__}: {problem}"
        finally:
            self.is_done = True

    def finish(self) -> list[str]:
        """Wait for what is still on its way after the storm; what is wrong then."""
        return [self.problem] if self.problem else []

    def step(self) -> None:
        """One operation."""
        path, target = self._free(), self._free()
        way = self.dice.random()
        if not path or not target:
            time.sleep(0.1)
        elif path in self.expected and way < 0.2:
            self._name("delete", path)
            del self.expected[path]
        elif path in self.expected and way < 0.4:
            if target != path:
                self._name("rename", path, target)
                self.expected[target] = self.expected.pop(path)
        else:
            self._put(path)

    def _free(self) -> str:
        """A name on which no attempt that failed can still have an effect, "" when the dice found another."""
        path = f"{self.name}/{self.dice.randrange(_NAMES)}"
        return "" if self._quiet.get(path, 0.0) > time.monotonic() else path

    def _source(self) -> Path:
        local = self.world.home / f"{self.name}.source"
        local.write_bytes(self.dice.randbytes(self.dice.choice(_SIZES_BYTES)))
        return local

    def _put(self, path: str) -> None:
        local, tries = self._source(), 0
        for again in self._attempts():
            tries += 1
            with again:
                self._send(local, path)
                break
            self._look_at_room()
        if tries > 1:
            self._quiet[path] = time.monotonic() + self.world.expires_s + 2
        self.expected[path] = hashlib.sha256(local.read_bytes()).hexdigest()
        self.world.counts["files"] += 1

    def _send(self, local: Path, path: str) -> None:
        routes = self.world.routes(self.terminal)
        put(self.world.end(self.terminal), local, path, expires_after_s=self.world.expires_s, routes=routes)

    def _look_at_room(self) -> None:
        if self.world.counts["full"] > self._seen_full:
            self._seen_full = self.world.counts["full"]
            self._make_room()

    def _make_room(self) -> None:
        for path in [path for path in self.expected if self._quiet.get(path, 0.0) < time.monotonic()][:1]:
            self._name("delete", path)
            del self.expected[path]

    def _name(self, kind: str, *paths: str) -> None:
        with Session(self.world.end(self.terminal)) as session:
            getattr(session, kind)(*paths)
            for again in self._attempts():
                with again:
                    session.push()
                    break
        self.world.counts[kind] += 1

    def _attempts(self) -> Iterator[contextlib.AbstractContextManager[None]]:
        end_s = time.monotonic() + PATIENCE_S
        while True:
            yield self._forgiven(time.monotonic() < end_s)
            time.sleep(0.2)

    @contextlib.contextmanager
    def _forgiven(self, still: bool) -> Iterator[None]:
        try:
            yield
        except TransferFailure as failure:
            self.world.counts["full" if failure.kind is ErrorClass.NO_SPACE_REMOTE else "failures"] += 1
            if not still or failure.kind in _NEVER or not failure.kind.retryable:
                raise


@dataclass
class Waiting(Writer):
    """Files by way of a custodian, each of a name of its own, as what was given twice may come late.

    The sender keeps the bytes until they have arrived.
    """

    custodian: str = ""

    def step(self) -> None:
        """One file."""
        self._put(f"{self.name}/{len(self.expected)}")

    def _send(self, local: Path, path: str) -> None:
        end, place = self.world.known_as(self.terminal, self.custodian), self.world.end(self.custodian)
        put(place, local, path, expires_after_s=_DEPOSIT_EXPIRES_S, terminal=end)
        self.world.counts["by a custodian"] += 1

    def _make_room(self) -> None:
        time.sleep(0.5)  # the custodian makes it, by delivering


@dataclass
class Depositor(Waiting):
    """The same, and the bytes are gone as soon as the custodian has them."""

    given: dict[str, str] = field(default_factory=dict)

    def _send(self, local: Path, path: str) -> None:
        origin = self.given.setdefault(path, secrets.token_hex(16))  # the same in each attempt: it is one operation
        end, place = self.world.known_as(self.terminal, self.custodian), self.world.end(self.custodian)
        deposit(place, local, path, end, origin=origin, expires_after_s=_DEPOSIT_EXPIRES_S)
        self.world.counts["in custody"] += 1

    def finish(self) -> list[str]:
        """Everything that was taken is delivered."""
        wrong = super().finish()
        for path in self.expected:
            said = self.becomes(self.given[path])
            if said != "done":
                wrong.append(f"{path}: the custodian says {said}")
        return wrong

    def becomes(self, origin: str) -> str:
        """The last word about a deposit; "custody" when there is none within the time of patience."""
        said, end_s = "custody", time.monotonic() + PATIENCE_S
        while said == "custody" and time.monotonic() < end_s:
            with contextlib.suppress(TransferFailure):
                answer = state(self.world.end(self.custodian), origin)
                said = answer.outcome if isinstance(answer, Result) and answer.outcome != "pending" else "custody"
            if said == "custody":
                time.sleep(0.2)
        return said
