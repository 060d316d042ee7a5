"""10,000 files of 4 KiB through the overlay, beside tar to tar and every peer that is installed here, in the same run.

All servers are on the loopback interface. On the disk the time of the others includes a ``sync`` of what they wrote,
for ours have their names and data on the disk when they are called delivered. Digests of our files are checked at the
other end; the peers check nothing. The best tool beside ours is chosen anew in each round, and ratios are of that
round. ``routers/calls.c`` does the system calls alone that this takes, one after the other: what this place gives one
core; ``routers/bare.py`` does them in Python, in two processes as ours are: what a sender and a router cannot be faster
than.

The disk is a new ext4 with a journal, in a file (root): one without a journal looks at every inode that was deleted in
the last minutes when it makes a file, so that its rates are those of earlier rounds' removal. Then the same files over
67 ms and 12.5 MB/s (root), and names that are changed one by one.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from common import Figure, main_in_parts
from routers import bare, peers

from stageout.core.errors import StageoutError, TransferFailure
from stageout.overlay.channel import Gateway
from stageout.overlay.client import Put
from stageout.overlay.key_file import read_key
from stageout.overlay.many import below, put_many
from stageout.overlay.operations import Session
from stageout.overlay.packs import SmallPut
from tests.harness.destination import Destination
from tests.harness.gridftp import GridFtpServer
from tests.harness.router import RouterProcess
from tests.harness.wide_area import Link, WideArea

ROOT = Path(__file__).resolve().parents[1]
ROUTERS = Path(__file__).resolve().parent / "routers"
FILES, SIZE_BYTES, NAMES = 10_000, 4096, 2_000
GOAL_PEER_MEMORY, GOAL_TAR_MEMORY, GOAL_PEER_DISK, GOAL_FAR = 5.0, 0.6, 1.5, 1.0
OURS, TAR, CALLS = "overlay", "tar to tar", "system calls alone"
COMMAND, COMMAND_BACK = "stageout put -r", "stageout get -r"
BARE = "system calls alone, in Python"
NO_PEERS = (OURS, COMMAND, COMMAND_BACK, TAR, CALLS, BARE)
PARTS = ("memory", "disk, durable", "far")
FAR = Link(12.5e6, 0.067, congestion="bbr")
#: Files that the system calls alone bring to the disk at once.
_CALLS_AT_ONCE = 4000
#: A way to copy the source: to which subdirectory of its own place.
Way = Callable[[str], None]


class Copied(Protocol):
    """Files, and ways to copy them all. :ivar files: how many."""

    files: int
    ways: dict[str, Way]

    def time_s(self, way: str, into: str) -> float:
        """Wall time of one way to copy everything; the copy is removed afterwards."""


class Site:
    """A directory of small files, and everybody who can copy it to the same filesystem."""

    def __init__(self, folder: Path, files: int, durable: bool, stack: ExitStack) -> None:
        folder.chmod(0o755)
        self.source, self.files, self._folder, self._durable = folder / "source", files, folder, durable
        self.source.mkdir()
        for number in range(files):
            (self.source / f"file{number:05}").write_bytes(os.urandom(SIZE_BYTES))
        self._router = stack.enter_context(RouterProcess(folder / "router"))
        key = read_key(self._router.key_file("site"))
        self._gateway = Gateway("127.0.0.1", self._router.port, *key)
        self.ways: dict[str, Way] = {OURS: self._ours, COMMAND: self._command, TAR: self._tar}
        if shutil.which("cc"):
            self._calls_program = folder / "calls"
            run(["cc", "-O2", "-o", str(self._calls_program), str(ROUTERS / "calls.c")])
            self.ways[CALLS] = self._calls
        if not durable:
            self._bare_port = stack.enter_context(_bare(folder / "bare"))
            self.ways[BARE] = self._bare
        if shutil.which("globus-url-copy"):
            self._gridftp = stack.enter_context(GridFtpServer(folder / "gridftp"))
            self.ways["globus-url-copy -pp -cc 4"] = self._globus
        if shutil.which("xrdcp") and shutil.which("xrootd"):
            self._xrootd_port = stack.enter_context(peers.xrootd(folder))
            self.ways["xrdcp -r --parallel 4"] = self._xrdcp
        if shutil.which("curl"):
            self._web = stack.enter_context(Destination(folder / "web"))
            self.ways["curl --parallel-max 8"] = self._curl

    def time_s(self, way: str, into: str) -> float:
        """Wall time of one way to copy everything, with the sync that others need; the copy is removed afterwards."""
        self._sync()
        start_s = time.perf_counter()
        self.ways[way](into)
        if self._durable and way not in (OURS, COMMAND, CALLS):
            self._sync()
        took_s = time.perf_counter() - start_s
        copies = [path for path in self._folder.glob(f"**/{into}") if path.is_dir()]
        if [len(list(copy.iterdir())) for copy in copies] != [self.files]:
            raise StageoutError(f"{way} did not copy all {self.files} files")
        shutil.rmtree(copies[0])
        return took_s

    def renames_per_s(self, sessions: int) -> float:
        """Names that are changed a second, by so many senders at once; each name is on the disk when it is said."""
        open_ = [Session(self._gateway) for _ in range(sessions)]
        each = NAMES // sessions
        for number, session in enumerate(open_):
            for name in range(each):
                session.mkdir(f"names{number}/{name}", parents=True)
            session.push()
        start_s = time.perf_counter()
        with ThreadPoolExecutor(sessions) as pool:
            list(pool.map(lambda number: _rename_all(open_[number], f"names{number}", each), range(sessions)))
        took_s = time.perf_counter() - start_s
        for number, session in enumerate(open_):
            with session:
                session.delete(f"names{number}")
                session.push()
        return each * sessions / took_s

    def _sync(self) -> None:
        """Everything of this filesystem, and of no other."""
        run(["sync", "-f", str(self._folder)])

    def _calls(self, into: str) -> None:
        place = self._folder / "calls.d" / into
        place.mkdir(parents=True)
        run([str(self._calls_program), str(self.source), str(place), str(self.files), str(_CALLS_AT_ONCE)])

    def _bare(self, into: str) -> None:
        bare.send(self._bare_port, self.source, into)

    def cpu_s(self) -> float:
        """Of the router's processes so far."""
        ticks = os.sysconf("SC_CLK_TCK")
        pids = [self._router.pid, *self._router.workers(), *self._router.makers()]
        stats = [Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split() for pid in pids]
        return sum(int(one[11]) + int(one[12]) for one in stats) / ticks

    def _ours(self, into: str) -> None:
        failures: list[TransferFailure] = []

        def ended(path: str, result: Put | SmallPut | TransferFailure) -> None:
            if isinstance(result, TransferFailure):
                failures.append(result)

        entries = ((found.path, found.local, f"{into}/{found.path}") for found in below(self.source))
        put_many(self._gateway, entries, ended)
        if failures:
            raise StageoutError(f"overlay: {failures[0]}")

    def _command(self, into: str) -> None:
        url = f"overlay://127.0.0.1:{self._router.port}/{into}"
        key = str(self._router.key_file("site"))
        command = [sys.executable, "-m", "stageout.cli.main", "put", "-r", str(self.source), url, "--key", key]
        run(command, self._folder / "bytecode")

    def _tar(self, into: str) -> None:
        place = self._folder / "tar" / into
        place.mkdir(parents=True)
        run(["sh", "-c", f"tar -C '{self.source}' -cf - . | tar -C '{place}' -xf -"])

    def _globus(self, into: str) -> None:
        url = self._gridftp.url(f"{into}/")
        run(["globus-url-copy", "-q", "-cd", "-r", "-pp", "-cc", "4", f"file://{self.source}/", url])

    def _xrdcp(self, into: str) -> None:
        url = f"root://127.0.0.1:{self._xrootd_port}//{into}/"
        (self._folder / "xrootd" / into).mkdir(mode=0o777)
        (self._folder / "xrootd" / into).chmod(0o777)
        run(["sh", "-c", f"exec xrdcp -s --parallel 4 '{self.source}'/* '{url}'"])

    def _curl(self, into: str) -> None:
        names = (path.name for path in self.source.iterdir())
        lines = [f'url = "{self._web.url(f"{into}/{name}")}"\nupload-file = "{self.source / name}"' for name in names]
        config = self._folder / "curl.config"
        config.write_text("\nnext\nfail\nsilent\n".join(["fail\nsilent", *lines]) + "\n")
        run(["curl", "--parallel", "--parallel-max", "8", "--config", str(config)])


def _rename_all(session: Session, folder: str, names: int) -> None:
    for name in range(names):
        session.rename(f"{folder}/{name}", f"{folder}/new{name}")
    session.push()


@contextmanager
def new_disk(folder: Path) -> Iterator[Path]:
    """A new ext4 in a file, where that is allowed; the folder itself otherwise."""
    if os.geteuid() or shutil.which("mkfs.ext4") is None:
        yield folder
        return
    image, mounted = folder / "image", folder / "disk"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(4 << 30)
    run(["mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(image)])
    run(["mount", "-o", "loop", str(image), str(mounted)])
    try:
        yield mounted
    finally:
        run(["umount", str(mounted)])


def run(command: list[str], bytecode: Path | None = None) -> str:
    """Its output. :param bytecode: where Python keeps what it compiled, as an installed package has it.

    :raises StageoutError: it failed.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if bytecode is not None:
        environment["PYTHONPYCACHEPREFIX"] = str(bytecode)
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        raise StageoutError(f"{command[0]} ended with {done.returncode}: {done.stderr[-300:]}")
    return done.stdout


@contextmanager
def _bare(folder: Path) -> Iterator[int]:
    """The receiving side of the system calls alone; gives its port."""
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROUTERS / "bare.py"), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment) as receiver:
        try:
            assert receiver.stdout is not None
            yield int(receiver.stdout.readline())
        finally:
            receiver.terminate()


def rounds_of(site: Copied, rounds: int) -> list[dict[str, float]]:
    """Files a second of every way, round by round; the order is turned each time, and one round warms up."""
    ways = list(site.ways)
    found = []
    for number in range(rounds + 1):
        turned = ways[number % len(ways) :] + ways[: number % len(ways)]
        found.append({way: site.files / site.time_s(way, f"copy{number}") for way in turned})
    return found[1:]


def figures_of(
    place: str, rounds: list[dict[str, float]], goal_peer: float | None, goal_tar: float | None
) -> list[Figure]:
    """Rates of all, and the ratios that the goals are about."""
    peers = [way for way in rounds[0] if way not in NO_PEERS]
    rates = {way: statistics.median(one[way] for one in rounds) for way in rounds[0]}
    best = max(peers, key=rates.__getitem__) if peers else TAR
    figures = [Figure(f"{place}: {way}", rates[way], "files/s") for way in rates]
    to_peer = statistics.median(one[OURS] / max(one[peer] for peer in peers or [TAR]) for one in rounds)
    figures.append(Figure(f"{place}: overlay over the best peer ({best})", to_peer, "", goal=goal_peer, more=True))
    to_tar = statistics.median(one[OURS] / one[TAR] for one in rounds)
    figures.append(Figure(f"{place}: overlay over tar to tar", to_tar, "", goal=goal_tar, more=True))
    if CALLS in rounds[0]:
        to_calls = statistics.median(one[OURS] / one[CALLS] for one in rounds)
        figures.append(Figure(f"{place}: overlay over the {CALLS}", to_calls, ""))
    if BARE in rounds[0]:
        to_bare = statistics.median(one[OURS] / one[BARE] for one in rounds)
        figures.append(Figure(f"{place}: overlay over the {BARE}", to_bare, ""))
    return figures


def place_figures(durable: bool, rounds: int, files: int) -> list[Figure]:
    """In memory, or on the disk."""
    place, goal_peer, goal_tar = ("memory", GOAL_PEER_MEMORY, GOAL_TAR_MEMORY)
    if durable:
        place, goal_peer, goal_tar = ("disk, durable", GOAL_PEER_DISK, None)
    with ExitStack() as stack:
        parent = None if durable else "/dev/shm"
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stageout-bench-", dir=parent)))
        folder.chmod(0o755)  # servers have users of their own
        folder = stack.enter_context(new_disk(folder)) if durable else folder
        servers = stack.enter_context(ExitStack())
        site = Site(folder, files, durable, servers)
        before_s = site.cpu_s()
        found = rounds_of(site, rounds)
        cpu_us = (site.cpu_s() - before_s) / (2 * (rounds + 1) * files) * 1e6
        figures = figures_of(place, found, goal_peer, goal_tar)
        figures.append(Figure(f"{place}: CPU of the router a file", cpu_us, "us"))
        for sessions in (1, 8):
            rates = [site.renames_per_s(sessions) for _ in range(3)]
            figures.append(Figure(f"{place}: renames, {sessions} sender(s)", statistics.median(rates), "names/s"))
    return figures


def far_figures(rounds: int, files: int) -> list[Figure]:
    """Over a long link: seconds of the batch beside bytes over rate and three round trips."""
    with tempfile.TemporaryDirectory(prefix="stageout-bench-", dir="/var/tmp") as name, WideArea(FAR) as area:
        source = Path(name) / "source"
        source.mkdir()
        for number in range(files):
            (source / f"file{number:05}").write_bytes(os.urandom(SIZE_BYTES))
        settings = {"STAGEOUT_ROUTER_HOST": area.far_address}
        with new_disk(Path(name)) as disk, RouterProcess(disk / "router", settings, wrapper=area.far) as router:
            end = f"{area.far_address}:{router.port}"
            command = [*area.near, sys.executable, str(ROUTERS / "sender.py"), "many", str(source), end]
            command += [str(router.key_file("site")), "direct"]
            took_s = []
            for _ in range(rounds):
                took_s.append(float(json.loads(run(command))["took_s"]))
                there = len(list((router.root / "many").iterdir()))
                if there != files:
                    raise StageoutError(f"{there} of {files} files arrived")
                shutil.rmtree(router.root / "many")
    allowed_s = 1.1 * files * SIZE_BYTES / FAR.rate_bytes_per_s + 3 * FAR.round_trip_s
    middle_s = statistics.median(took_s)
    return [
        Figure("far: 67 ms, 12.5 MB/s: the batch", middle_s, "s", "1.1 x bytes/rate + 3 RTT", allowed_s),
        Figure("far: 67 ms, 12.5 MB/s: of the time allowed", middle_s / allowed_s, "", goal=GOAL_FAR),
    ]


def measure(parts: Sequence[str], quick: bool) -> list[Figure]:
    """The figures of some parts."""
    rounds, files = (3, FILES // 4) if quick else (10, FILES)
    figures: list[Figure] = []
    if "memory" in parts and Path("/dev/shm").is_dir():
        figures += place_figures(False, rounds, files)
    if "disk, durable" in parts:
        figures += place_figures(True, rounds, files)
    if "far" in parts and os.geteuid() == 0:
        figures += far_figures(2 if quick else 5, FILES)
    return figures


if __name__ == "__main__":
    sys.exit(main_in_parts("overlay_small_files", PARTS, measure))
