"""Eight routers under load while they are killed at random, bits flip and a disk fills: ``make overlay-storm``.

Writers put, rename and delete files at two terminals, by the routes that the routers themselves find; two give theirs
to a custodian. Whatever fails is tried again until it is done. At the end each terminal's tree must be what its
writers' operations make in their order, with nothing left of any transfer. The last line is ``storm: ..., V
violations``; the status is 1 if V > 0.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from stageout.core.errors import ErrorClass, StageoutError, TransferFailure
from stageout.overlay.channel import Gateway, gateway_of
from stageout.overlay.client import put
from stageout.overlay.operations import Session
from stageout.overlay.routes import found_routes
from stageout.testing.pool.waiting import wait_until
from stageout.testing.router_graph import RouterGraph
from stageout.wire.address import split_address
from stageout.wire.route import Route

_EDGES = {
    "s1": ("r1", "r2"),
    "s2": ("r2", "r3"),
    "r1": ("r4", "t1"),
    "r2": ("r4", "t1", "t2"),
    "r3": ("t1", "t2"),
    "r4": ("t1", "t2"),
}
_TERMINALS = ("t1", "t2")
_CUSTODIAN = "r4"
_MIB = 1 << 20
_DISK_MIB = 12
_NAMES = 5
#: So that what an attempt left behind is gone soon after the end.
_EXPIRES_S = 30
_PATIENCE_S = 180.0


@dataclass
class Writer:
    """One writer: its own directory at one terminal, and what must be there.

    :param custodian: files go through it; each then has a name of its own, as what was given twice may come late.
    """

    storm: Storm
    name: str
    terminal: str
    dice: random.Random
    custodian: str = ""
    expected: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    _seen_full: int = 0

    def run(self) -> None:
        """Operations one after the other until the storm is over; the last one is finished."""
        try:
            while not self.storm.over.is_set():
                self._step()
        except Exception as problem:
            self.problem = f"{self.name}: {type(problem).__name__}: {problem}"

    def _step(self) -> None:
        path, way = f"{self.name}/{self.dice.randrange(_NAMES)}", self.dice.random()
        if self.custodian:
            self._put(f"{self.name}/{len(self.expected)}")
        elif path in self.expected and way < 0.2:
            self._name("delete", path)
            del self.expected[path]
        elif path in self.expected and way < 0.4:
            target = f"{self.name}/{self.dice.randrange(_NAMES)}"
            if target != path:
                self._name("rename", path, target)
                self.expected[target] = self.expected.pop(path)
        else:
            self._put(path)

    def _put(self, path: str) -> None:
        local = self.storm.home / f"{self.name}.source"
        local.write_bytes(self.dice.randbytes(self.dice.choice((0, 100, _MIB, 3 * _MIB + 5))))
        for again in self._attempts():
            with again:
                self._send(local, path)
                break
            if not self.custodian and self.storm.counts["full"] > self._seen_full:
                self._seen_full = self.storm.counts["full"]
                self._make_room()
        self.expected[path] = hashlib.sha256(local.read_bytes()).hexdigest()
        self.storm.counts["files"] += 1

    def _send(self, local: Path, path: str) -> None:
        if self.custodian:
            by, end = self.storm.end(self.custodian), self.storm.graph.addresses[self.terminal]
            put(by, local, path, expires_after_s=_EXPIRES_S, terminal=end)
            self.storm.counts["in custody"] += 1
        else:
            put(self.storm.end(self.terminal), local, path, expires_after_s=_EXPIRES_S, routes=self._routes())

    def _make_room(self) -> None:
        for path in list(self.expected)[:1]:
            self._name("delete", path)
            del self.expected[path]

    def _routes(self) -> tuple[Route, ...]:
        """As the gateways find them; by the wire on which bits flip to the first of them."""
        asked = [self.storm.graph.addresses[name] for name in ("s1", "s2")]
        found = found_routes(asked, self.storm.end(self.terminal))
        return tuple((self.storm.wire.address, *route[1:]) if route[0] == asked[0] else route for route in found)

    def _name(self, kind: str, *paths: str) -> None:
        with Session(self.storm.end(self.terminal)) as session:
            getattr(session, kind)(*paths)
            for again in self._attempts():
                with again:
                    session.push()
                    break
        self.storm.counts[kind] += 1

    def _attempts(self) -> Iterator[contextlib.AbstractContextManager[None]]:
        end_s = time.monotonic() + _PATIENCE_S
        while True:
            yield self._forgiven(time.monotonic() < end_s)
            time.sleep(0.2)

    @contextlib.contextmanager
    def _forgiven(self, still: bool) -> Iterator[None]:
        try:
            yield
        except TransferFailure as failure:
            self.storm.counts["full" if failure.kind is ErrorClass.NO_SPACE_REMOTE else "failures"] += 1
            if not still or failure.kind in (ErrorClass.CONTENT_MISMATCH, ErrorClass.CONFLICT, ErrorClass.NOT_FOUND):
                raise


class FlippingWire:
    """Passes connections to a router on, and flips a bit about once in so many bytes."""

    def __init__(self, target: str, every_bytes: int, dice: random.Random, counts: Counter[str]) -> None:
        self._target, self._every_bytes, self._dice, self._counts = target, every_bytes, dice, counts
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
                far = socket.create_connection(split_address(self._target), 5)
            except ConnectionError:
                near.close()
                continue
            except OSError:
                return
            far.settimeout(None)
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(source, target), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := bytearray(source.recv(65536)):
                if self._dice.random() < len(data) / self._every_bytes:
                    data[self._dice.randrange(len(data))] ^= 1 << self._dice.randrange(8)
                    self._counts["flips"] += 1
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            for sock in (source, target):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)


class Storm:
    """The routers, who writes, and who kills.

    :param home: of everything. :param seed: of the dice; what other processes do is not repeated by it.
    """

    def __init__(self, home: Path, seed: int) -> None:
        self.home, self._dice = home, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.over = threading.Event()
        self.graph = RouterGraph(home, _EDGES, interval_s=0.5, custodians={_CUSTODIAN: _TERMINALS})
        self.wire = FlippingWire(self.graph.addresses["s1"], 8 * _MIB, self._dice, self.counts)
        self.writers = [
            Writer(self, f"w{number}", _TERMINALS[number % 2], random.Random(seed + number)) for number in range(6)
        ]
        self.writers += [
            Writer(self, f"c{number}", "t1", random.Random(seed - number), _CUSTODIAN) for number in (1, 2)
        ]

    def end(self, terminal: str) -> Gateway:
        """A terminal as writers reach it."""
        router = self.graph.routers[terminal]
        return gateway_of(*split_address(self.graph.addresses[terminal]), router.home / "site.key", timeout_s=10)

    def rage(self, duration_s: float) -> list[str]:
        """Write and kill for so long, let everything come to its end, and say what is wrong then."""
        with contextlib.closing(self.wire), self.graph:
            threads = [threading.Thread(target=writer.run) for writer in self.writers]
            for thread in threads:
                thread.start()
            end_s = time.monotonic() + duration_s
            while time.monotonic() < end_s:
                self._kill_one()
            self.over.set()
            for thread in threads:
                thread.join()
            spool = self.graph.routers[_CUSTODIAN].home / "records/spool"
            return (
                [writer.problem for writer in self.writers if writer.problem] + self._wrong() + self._left_behind(spool)
            )

    def _kill_one(self) -> None:
        time.sleep(self._dice.uniform(0.3, 1.5))
        router = self.graph.routers[self._dice.choice(sorted(self.graph.routers))]
        router.kill()
        self.counts["kills"] += 1
        time.sleep(self._dice.uniform(0.0, 1.0))
        router.start()

    def _wrong(self) -> list[str]:
        found = []
        for terminal in _TERMINALS:
            root = self.graph.routers[terminal].root
            expected = {path: sum_ for w in self.writers if w.terminal == terminal for path, sum_ in w.expected.items()}
            there = {
                str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
                for path in root.rglob("*")
                if path.is_file() and ".stageout" not in path.parts
            }
            for path in sorted(expected.keys() | there.keys()):
                if expected.get(path) != there.get(path):
                    found.append(f"{terminal}: {path} is {there.get(path)}, and should be {expected.get(path)}")
            found += self._left_behind(root)
        return found

    def _left_behind(self, root: Path) -> list[str]:
        def left() -> list[str]:
            return [str(path) for part in ("staging", "trash") for path in (root / ".stageout" / part).iterdir()]

        try:
            wait_until(lambda: not left(), timeout_s=_EXPIRES_S + 90, what="the rest of dead attempts to be removed")
        except StageoutError:
            return [f"left behind: {name}" for name in left()]
        return []


@contextlib.contextmanager
def small_disk(root: Path) -> Iterator[None]:
    """A disk of its own for a terminal, too small for all at once."""
    root.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_MIB}m", "storm", str(root)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)


def main() -> int:
    """Run one storm."""
    parser = argparse.ArgumentParser(prog="storm", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="routers die for so long (default: 60)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the dice")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, contextlib.ExitStack() as stack:
        home = Path(folder)
        if os.geteuid() == 0:
            stack.enter_context(small_disk(home / "t2" / "root"))
        else:
            print("not root: no disk will be full")
        storm = Storm(home, given.seed)
        wrong = storm.rage(given.seconds)
    for line in wrong:
        print(line)
    words = ("files", "in custody", "rename", "delete", "kills", "flips", "full", "failures")
    told = ", ".join(f"{storm.counts[word]} {word}" for word in words)
    print(f"storm: seed {given.seed}, {told}, {len(wrong)} violations")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
