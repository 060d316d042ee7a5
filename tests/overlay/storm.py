"""Eight routers under load while they are killed at random, bits flip and disks fill: ``make overlay-storm``.

Two gateways, two relays, two custodians and two terminals. Writers put, rename and delete files at the terminals by the
routes that the routers themselves find; others give theirs to the custodians. Routers die (kill -9), one or two at a
time; bits flip on the wires to the first gateway and from a custodian to its terminal, and in that custodian's spool;
as root, a terminal and the other custodian have disks of their own that are too small, and are filled to the last byte
now and then, databases and all; single durable steps find no room. A step that fails is tried again until it is done.
At the end each terminal's tree must be what its writers' operations make in their order, every flip must have been
noticed, spools must be empty, and a spool's whole size free again. The last line is ``storm: ..., V violations``; the
status is 1 if V > 0.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import re
import secrets
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from stageout.core.errors import StageoutError, TransferFailure
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import put
from stageout.overlay.key_file import gateway_of
from stageout.overlay.routes import found_routes
from stageout.overlay.wire.messages import BLOCK_BYTES, Cancel, NoSpace, Open, Opened, Result, Status
from stageout.overlay.wire.route import Route
from stageout.wire.address import split_address
from tests.harness.pool.waiting import wait_until
from tests.harness.router import RouterProcess
from tests.harness.router_graph import RouterGraph
from tests.overlay.depositing import deposit
from tests.overlay.storm_wire import FlippingWire
from tests.overlay.storm_writers import MIB, Depositor, Waiting, Writer

_EDGES = {
    "s1": ("r1", "r2"),
    "s2": ("r2", "r3"),
    "r1": ("r4", "t1"),
    "r2": ("r4", "t1", "t2"),
    "r3": ("t1", "t2"),
    "r4": ("t1", "t2"),
}
_TERMINALS = ("t1", "t2")
#: Which of the custodians' spools rots, and which is on a disk that is too small.
_ROTTING, _NARROW = "r4", "r3"
_CUSTODIANS = (_ROTTING, _NARROW)
_SMALL_DISKS_MIB = {"t2": 20, _NARROW: 24}
_SPOOL_MB = {_ROTTING: 64, _NARROW: 24}
#: Larger than any small disk: there the disk itself is the limit.
_NO_LIMIT_MB = 1000
#: Files that an administrator frees on a full disk, so that a router can start.
_RESERVE_BYTES = MIB
#: The records of a terminal take at most so much of its disk.
_RECORDS_BYTES = 4 * MIB
#: A file that will be damaged has so long to be delivered.
_LOST_AFTER_S = 120
#: A put whose router is killed waits so long for it to be back, however busy this machine is.
_PATIENT_S = 120.0
_FREE_AGAIN_BYTES = 16 * MIB
_NO_ROOM_AT = {
    "t1": ("overlay-grant", "overlay-stage", "overlay-intent", "overlay-settle", "overlay-forget"),
    _ROTTING: ("overlay-grant", "overlay-stage", "custody-take", "custody-settle", "custody-abandon"),
}
_EMPTY_TABLES = ("transfers", "intents", "pack_intents", "lots", "taken", "custody", "packs_held")


@dataclass(frozen=True)
class Plan:
    """How hard it blows. :param expires_s: of puts. :param writers: at both terminals, in turn.

    :param disks: name -> directory of a disk that can be filled. :param wait_s: for the end of all.
    :param rests: the end of all attempts is waited for, and that nothing is left of them.
    """

    expires_s: int = 30
    writers: int = 6
    waiting: int = 2
    flip_every_bytes: int = 8 * MIB
    disks: Mapping[str, Path] | None = None
    wait_s: float = 240.0
    rests: bool = True


class Storm:
    """The routers, who writes, and who kills.

    :param home: of everything. :param seed: of the dice; what other processes do is not repeated by it.
    """

    def __init__(self, home: Path, seed: int, plan: Plan) -> None:
        self.home, self._plan, self._dice = home, plan, random.Random(seed)
        self.expires_s = plan.expires_s
        self.counts: Counter[str] = Counter()
        self.over = threading.Event()
        self._disks = dict(plan.disks or {})
        self._wrong: list[str] = []
        self._arms: list[Path] = []
        self._rotten: list[_Rot] = []
        self._wires = [FlippingWire(plan.flip_every_bytes, self._dice, self.counts) for _ in range(2)]
        self._near, self._inner = self._wires
        custodians = {_ROTTING: (self._inner.address,), _NARROW: ("t1",)}
        self.graph = RouterGraph(home, _EDGES, interval_s=0.5, custodians=custodians)
        self._near.target, self._inner.target = self.graph.addresses["s1"], self.graph.addresses["t1"]
        self._set_up()
        self.writers = self._writers(seed)

    def _set_up(self) -> None:
        for name, steps in _NO_ROOM_AT.items():
            arms = {step: self.home / f"{name}-{step}" for step in steps}
            faults = " ".join(f"{step}=ENOSPC@{arm}" for step, arm in arms.items())
            self.graph.routers[name].environment["STAGEOUT_FAULTS"] = faults
            self._arms += arms.values()
        for name in _CUSTODIANS:
            size_mb = _NO_LIMIT_MB if name in self._disks else _SPOOL_MB[name]
            self.graph.routers[name].environment["STAGEOUT_ROUTER_SPOOL_MB"] = str(size_mb)

    def _writers(self, seed: int) -> list[Writer]:
        def dice(number: int) -> random.Random:
            return random.Random(seed * 1000 + number)

        plan = self._plan
        found: list[Writer] = [Writer(self, f"w{i}", _TERMINALS[i % 2], dice(i)) for i in range(plan.writers)]
        found += [Waiting(self, f"c{i}", "t1", dice(100 + i), custodian=_ROTTING) for i in range(plan.waiting)]
        found += [
            Depositor(self, f"d-{name}", "t1", dice(200 + i), custodian=name) for i, name in enumerate(_CUSTODIANS)
        ]
        return found

    # ---- what writers know -------------------------------------------------------------------------------------------

    def end(self, name: str) -> Gateway:
        """A router as writers reach it."""
        router = self.graph.routers[name]
        return gateway_of(*split_address(self.graph.addresses[name]), router.home / "site.key", timeout_s=10)

    def routes(self, terminal: str) -> tuple[Route, ...]:
        """As the gateways find them; by the wire on which bits flip to the first of them."""
        asked = [self.graph.addresses[name] for name in ("s1", "s2")]
        found = found_routes(asked, self.end(terminal))
        return tuple((self._near.address, *route[1:]) if route[0] == asked[0] else route for route in found)

    def known_as(self, terminal: str, custodian: str) -> str:
        """Address under which a custodian delivers to a terminal."""
        return self._inner.address if custodian == _ROTTING else self.graph.addresses[terminal]

    def is_busy(self, terminal: str) -> bool:
        """Whether somebody still writes there."""
        return any(writer.terminal == terminal and not writer.is_done for writer in self.writers)

    # ---- the storm ---------------------------------------------------------------------------------------------------

    def rage(self, duration_s: float) -> list[str]:
        """Write and kill for so long, let everything come to its end, and say what is wrong then."""
        with contextlib.ExitStack() as stack:
            for wire in self._wires:
                stack.enter_context(contextlib.closing(wire))
            stack.enter_context(self.graph)
            threads = [threading.Thread(target=writer.run) for writer in self.writers]
            for thread in threads:
                thread.start()
            try:
                self._blow(duration_s)
            finally:
                self.over.set()
                self._calm()
                for thread in threads:
                    thread.join()
            for writer in self.writers:
                self._wrong += writer.finish()
            self._look_at_rot()
            self._look_at_trees()
            if self._plan.rests:
                self._look_at_rest()
        for name in (*_TERMINALS, *_CUSTODIANS) if self._plan.rests else ():  # they had them for themselves
            self._wrong += [
                f"left behind by {name}: {rows}" for rows in _rows(self.graph.routers[name].home / "records")
            ]
        return self._wrong

    def _blow(self, duration_s: float) -> None:
        """Everything else than a single death happens once, and then as the dice say."""
        events: list[Callable[[], None]] = [self._kill, self._rot, self._no_room, self._kill_two]
        events += [self._fill] if self._disks else []
        first, end_s = events[1:], time.monotonic() + duration_s
        weights = [4, 1, 2, 2, 1][: len(events)]
        while first or time.monotonic() < end_s:
            time.sleep(self._dice.uniform(0.2, 1.0))
            event = first.pop(0) if first else self._dice.choices(events, weights)[0]
            event()

    def _calm(self) -> None:
        for wire in self._wires:
            wire.good = True
        for arm in self._arms:
            arm.unlink(missing_ok=True)

    def _some(self, count: int) -> list[RouterProcess]:
        return [self.graph.routers[name] for name in self._dice.sample(sorted(self.graph.routers), count)]

    def _kill(self, count: int = 1) -> None:
        victims = self._some(count)
        for router in victims:
            router.kill()
            self.counts["kills"] += 1
        time.sleep(self._dice.uniform(0.0, 1.0))
        for router in victims:
            self._start(router)

    def _start(self, router: RouterProcess) -> None:
        """Start it; on a full disk it cannot, and says so: then somebody makes a little room."""
        disk = self._disks.get(router.home.name)
        try:
            router.start()
        except StageoutError:
            if disk is None or not (disk / "reserve").exists():
                raise
            (disk / "reserve").unlink()
            self.counts["starts on a full disk"] += 1
            router.start()
            with contextlib.suppress(OSError):
                (disk / "reserve").write_bytes(bytes(_RESERVE_BYTES))

    def _kill_two(self) -> None:
        self._kill(2)

    def _no_room(self) -> None:
        """One durable step, somewhere, finds the disk full the next time."""
        self._dice.choice(self._arms).touch()
        self.counts["no room"] += 1

    def _fill(self) -> None:
        """A disk has not one byte left for a while; perhaps its router dies meanwhile."""
        name = self._dice.choice(sorted(self._disks))
        router, ballast = self.graph.routers[name], self._disks[name] / "ballast"
        with ballast.open("wb", buffering=0) as file:
            for size_bytes in (65536, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size_bytes))
        self.counts["disks filled"] += 1
        time.sleep(self._dice.uniform(0.5, 3.0))
        dies = self._dice.random() < 0.5
        if dies:
            router.kill()
            self.counts["kills"] += 1
        ballast.unlink()
        if dies:
            self._start(router)

    def _rot(self) -> None:
        """A file is taken into custody while its terminal is away; a bit of it flips; the terminal comes back."""
        terminal, custodian = self.graph.routers["t1"], self.graph.routers[_ROTTING]
        terminal.kill()
        self.counts["kills"] += 1
        mended = self._dice.random() < 0.5
        rot = _Rot(self, len(self._rotten), mended, self._dice.randrange(3 * MIB * 8))
        self._rotten.append(rot)
        try:
            rot.begin()
            rot.flip(custodian)
            self.counts["flips in a spool"] += 1
        finally:
            terminal.start()

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _look_at_rot(self) -> None:
        for wire in self._wires:
            if wire.unnoticed():
                self._wrong.append(f"{wire.unnoticed()} connections went on although a bit had flipped")
        log = self.graph.routers[_ROTTING].log
        for rot in self._rotten:
            self._wrong += rot.finish(log)

    def _look_at_trees(self) -> None:
        for terminal in _TERMINALS:
            root = self.graph.routers[terminal].root
            expected = {path: sum_ for w in self.writers if w.terminal == terminal for path, sum_ in w.expected.items()}
            if terminal == "t1":
                expected.update({rot.path: rot.sum for rot in self._rotten if rot.mended})
            there = {
                str(path.relative_to(root)): _sum(path)
                for path in root.rglob("*")
                if path.is_file() and ".stageout" not in path.parts
            }
            for path in sorted(expected.keys() | there.keys()):
                if expected.get(path) != there.get(path):
                    self._wrong.append(f"{terminal}: {path} is {there.get(path)}, and should be {expected.get(path)}")

    def _look_at_rest(self) -> None:
        """Nothing of any transfer is left, and all space is free."""
        failed = self.counts["failures"] + self.counts["full"] > 0
        if failed:
            last_s = time.monotonic() + self._plan.expires_s + 2
            wait_until(lambda: time.monotonic() > last_s, timeout_s=60, what="the end of all attempts")
        places = {name: self.graph.routers[name].root for name in _TERMINALS}
        places.update({f"the spool of {name}": self.graph.routers[name].home / "records/spool" for name in _CUSTODIANS})
        until_s = time.monotonic() + self._plan.wait_s
        for what, root in places.items():
            self._wrong += _after(until_s, lambda root=root: _files(root), what)  # type: ignore[misc]
        for name in _CUSTODIANS:
            self._wrong += self._free_again(name)
            unknown = self.graph.routers[name].home / "records/spool/unknown"
            self._wrong += [f"{name} does not know: {path}" for path in unknown.glob("*")]
        if failed:
            self._restart()
        for name in _TERMINALS:
            self._wrong += self._unexplained(name)

    def _unexplained(self, name: str) -> list[str]:
        """The used bytes of a small disk are those of the files that are there, and little else."""
        disk, root = self._disks.get(name), self.graph.routers[name].root
        if disk is None:
            return []
        found = os.statvfs(disk)
        known = sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) + _RESERVE_BYTES
        more = (found.f_blocks - found.f_bfree) * found.f_frsize - known
        return [f"{more} bytes of the disk of {name} are used, and nothing is there"] if more > _RECORDS_BYTES else []

    def _restart(self) -> None:
        """A router that starts looks at once for operations that have run out of their time, before it answers."""

        def again(name: str) -> None:
            self.graph.routers[name].stop()
            self._start(self.graph.routers[name])
            with Channel(self.end(name)) as channel:
                channel.send(Status(secrets.token_hex(16), 1))
                channel.receive()

        with ThreadPoolExecutor() as crew:
            list(crew.map(again, (*_TERMINALS, *_CUSTODIANS)))

    def _free_again(self, name: str) -> list[str]:
        """A file that takes nearly the whole spool is taken in: no lot is left."""
        size_bytes = int(_SPOOL_MB[name] * 10**6 * 0.9) if name not in self._disks else _FREE_AGAIN_BYTES
        terminal, expires = self.known_as("t1", name), int(time.time()) + 60
        origin = secrets.token_hex(16)
        with Channel(self.end(name)) as channel:
            channel.send(Open(origin, 1, "whole", size_bytes, BLOCK_BYTES, expires, terminal))
            opened = channel.receive()
            if isinstance(opened, NoSpace):
                return [f"{name}: its spool is empty, but {size_bytes} bytes are not free"]
            channel.send(Cancel(origin, 1))
            answer = channel.receive()
        cancelled = isinstance(answer, Result) and answer.outcome == "cancelled"
        return [] if isinstance(opened, Opened) and cancelled else [f"{name} answered {opened}, {answer}"]


class _Rot:
    """A file in whose spooled copy a bit flips.

    :param mended: its sender keeps the bytes, and sends them again; else it is lost, and its owner must be told.
    :param bit: which one.
    """

    def __init__(self, storm: Storm, number: int, mended: bool, bit: int) -> None:
        self._storm, self.path, self.mended, self._bit = storm, f"rot/{number}", mended, bit
        self._local = storm.home / f"rot{number}"
        self._local.write_bytes(os.urandom(3 * MIB))
        self.sum = _sum(self._local)
        self._origin = secrets.token_hex(16)
        self._problem = ""
        self._thread = threading.Thread(target=self._put)

    def begin(self) -> None:
        """Give it to the custodian. A put goes on until it has arrived."""
        storm, log = self._storm, self._storm.graph.routers[_ROTTING]
        if self.mended:
            self._thread.start()
        else:
            self._deposit()
        taken = re.compile(rf" custody-accepted .*path={re.escape(self.path)} ")
        wait_until(lambda: taken.search(log.log), timeout_s=120, what="custody", describe=lambda: self._problem)
        storm.counts["files"] += 1

    def _deposit(self) -> None:
        storm = self._storm
        terminal = storm.known_as("t1", _ROTTING)

        def given() -> bool:
            try:
                end = storm.end(_ROTTING)
                deposit(end, self._local, self.path, terminal, origin=self._origin, expires_after_s=_LOST_AFTER_S)
            except TransferFailure as failure:
                self._problem = str(failure)
                return False
            return True

        wait_until(given, timeout_s=120, what="the deposit to be taken", describe=lambda: self._problem)

    def _put(self) -> None:
        terminal, end_s = self._storm.known_as("t1", _ROTTING), time.monotonic() + 300
        while True:
            try:
                end = replace(self._storm.end(_ROTTING), timeout_s=_PATIENT_S)
                put(end, self._local, self.path, terminal=terminal)
                self._problem = ""
                return
            except TransferFailure as failure:
                self._problem = f"{self.path}: {failure}"
                if time.monotonic() > end_s:
                    return
            time.sleep(0.2)

    def flip(self, custodian: RouterProcess) -> None:
        """Flip the bit in the spool."""
        staging = custodian.home / "records/spool/.stageout/staging"
        (spooled,) = [path for path in staging.iterdir() if _sum(path) == self.sum]
        at, bit = divmod(self._bit, 8)
        with spooled.open("r+b") as file:
            byte = os.pread(file.fileno(), 1, at)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), at)

    def finish(self, log: str) -> list[str]:
        """It was noticed, and mended or said."""
        wrong = []
        if self.mended:
            self._thread.join()
            wrong += [self._problem] if self._problem else []
        else:
            told = Depositor(self._storm, "", "t1", random.Random(), custodian=_ROTTING).becomes(self._origin)
            wrong += [f"{self.path} was lost, and its owner is told {told}"] if told != "lost" else []
        if not re.search(rf" custody-damaged [^\n]*path={re.escape(self.path)}\b", log):
            wrong.append(f"{self.path}: nobody noticed the bit that flipped in the spool")
        return wrong


def _sum(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:  # it has just been delivered
        return ""


def _files(root: Path) -> list[str]:
    found = []
    for part in ("staging", "trash", "lots", "packs"):
        with contextlib.suppress(FileNotFoundError):
            found += [f"{part}/{path.name}" for path in (root / ".stageout" / part).iterdir()]
    return found


def _rows(records: Path) -> list[str]:
    """Tables that should be empty and are not."""
    found = []
    for path in records.glob("*.sqlite"):
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute("PRAGMA locking_mode=EXCLUSIVE")  # needs no file beside it: the disk may be full
            for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                rows = database.execute(f"SELECT * FROM {table} LIMIT 3").fetchall() if table in _EMPTY_TABLES else []
                found += [f"{path.name}, {table}: {rows}"] if rows else []
    return found


def _after(until_s: float, left: Callable[[], list[str]], what: str) -> list[str]:
    while left() and time.monotonic() < until_s:
        time.sleep(0.2)
    return [f"left behind in {what}: {name}" for name in left()]


@contextlib.contextmanager
def small_disk(home: Path, size_mib: int) -> Iterator[Path]:
    """A disk for a router's root and records, too small for all at once; its log is elsewhere. Needs root."""
    disk = home / "disk"
    disk.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "storm", str(disk)], check=True)
    mounted = [disk]
    try:
        for part in ("root", "records"):
            (disk / part).mkdir(mode=0o755 if part == "root" else 0o700)
            (home / part).mkdir()
            subprocess.run(["mount", "--bind", str(disk / part), str(home / part)], check=True)
            mounted.insert(0, home / part)
        (disk / "reserve").write_bytes(bytes(_RESERVE_BYTES))
        yield disk
    finally:
        for place in mounted:
            subprocess.run(["umount", "-l", str(place)], check=True)


_SECONDS = "routers die for so long (default: 60); a storm takes one to two minutes more to its end"


def main() -> int:
    """Run one storm."""
    parser = argparse.ArgumentParser(prog="storm", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help=_SECONDS)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the dice")
    parser.add_argument("--keep", type=Path, help="copy the routers' logs to this directory when something is wrong")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, contextlib.ExitStack() as stack:
        home, disks = Path(folder), {}
        if os.geteuid() == 0:
            disks = {name: stack.enter_context(small_disk(home / name, mib)) for name, mib in _SMALL_DISKS_MIB.items()}
        else:
            print("not root: no disk will really be full")
        storm = Storm(home, given.seed, Plan(disks=disks))
        wrong = storm.rage(given.seconds)
        if wrong and given.keep:
            given.keep.mkdir(parents=True, exist_ok=True)
            for name, router in storm.graph.routers.items():
                (given.keep / f"{name}.log").write_text(router.log)
    for line in wrong:
        print(line)
    told = ", ".join(f"{count} {word}" for word, count in sorted(storm.counts.items()))
    print(f"storm: seed {given.seed}, {told}, {len(wrong)} violations")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
