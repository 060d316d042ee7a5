"""10,000 files of 4 KiB through the overlay, beside tar to tar and every peer that is installed here, in the same run.

All servers are on the loopback interface. On the disk the time of the others includes a ``sync`` of what they wrote,
for ours have their names and data on the disk when they are called delivered. Digests of our files are checked at the
other end; the peers check nothing. What is best beside us is taken anew in each round, and ratios are of that round.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from common import Figure, main

from stageout.core.errors import StageoutError, TransferFailure
from stageout.overlay.channel import Gateway, read_key
from stageout.overlay.client import Put
from stageout.overlay.many import below, put_many
from stageout.overlay.packs import SmallPut
from stageout.testing.destination import Destination
from stageout.testing.gridftp import GridFtpServer
from stageout.testing.router import RouterProcess

ROOT = Path(__file__).resolve().parents[1]
FILES, SIZE_BYTES = 10_000, 4096
GOAL_PEER_MEMORY, GOAL_TAR_MEMORY, GOAL_PEER_DISK = 5.0, 0.6, 1.5
OURS, COMMAND, TAR = "overlay", "stageout put -r", "tar to tar"
#: A way to copy the source: to which subdirectory of its own place.
Way = Callable[[str], None]


class Site:
    """A directory of small files, and everybody who can copy it to the same filesystem."""

    def __init__(self, folder: Path, files: int, durable: bool, stack: ExitStack) -> None:
        folder.chmod(0o755)  # nginx has a user of its own
        self.source, self.files, self._folder, self._durable = folder / "source", files, folder, durable
        self.source.mkdir()
        for number in range(files):
            (self.source / f"file{number:05}").write_bytes(os.urandom(SIZE_BYTES))
        self._router = stack.enter_context(RouterProcess(folder / "router"))
        key = read_key(self._router.key_file("site"))
        self._gateway = Gateway("127.0.0.1", self._router.port, *key)
        self.ways: dict[str, Way] = {OURS: self._ours, COMMAND: self._command, TAR: self._tar}
        if shutil.which("globus-url-copy"):
            self._gridftp = stack.enter_context(GridFtpServer(folder / "gridftp"))
            self.ways["globus-url-copy -pp -cc 4"] = self._globus
        if shutil.which("xrdcp") and shutil.which("xrootd"):
            self._xrootd_port = stack.enter_context(_xrootd(folder))
            self.ways["xrdcp -r --parallel 4"] = self._xrdcp
        if shutil.which("curl"):
            self._web = stack.enter_context(Destination(folder / "web"))
            self.ways["curl --parallel-max 8"] = self._curl

    def time_s(self, way: str, into: str) -> float:
        """Wall time of one way to copy everything, with the sync that others need; the copy is removed afterwards."""
        os.sync()
        start_s = time.perf_counter()
        self.ways[way](into)
        if self._durable and way not in (OURS, COMMAND):
            os.sync()
        took_s = time.perf_counter() - start_s
        copies = [path for path in self._folder.glob(f"**/{into}") if path.is_dir()]
        if [len(list(copy.iterdir())) for copy in copies] != [self.files]:
            raise StageoutError(f"{way} did not copy all {self.files} files")
        shutil.rmtree(copies[0])
        return took_s

    def cpu_s(self) -> float:
        """Of the router's processes so far."""
        ticks = os.sysconf("SC_CLK_TCK")
        pids = [self._router.pid, *self._router.workers()]
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
        _run([sys.executable, "-m", "stageout.cli.main", "put", "-r", str(self.source), url, "--key", key])

    def _tar(self, into: str) -> None:
        place = self._folder / "tar" / into
        place.mkdir(parents=True)
        _run(["sh", "-c", f"tar -C '{self.source}' -cf - . | tar -C '{place}' -xf -"])

    def _globus(self, into: str) -> None:
        url = self._gridftp.url(f"{into}/")
        _run(["globus-url-copy", "-q", "-cd", "-r", "-pp", "-cc", "4", f"file://{self.source}/", url])

    def _xrdcp(self, into: str) -> None:
        url = f"root://127.0.0.1:{self._xrootd_port}//{into}/"
        (self._folder / "xrootd" / into).mkdir(mode=0o777)
        (self._folder / "xrootd" / into).chmod(0o777)
        _run(["sh", "-c", f"exec xrdcp -s --parallel 4 '{self.source}'/* '{url}'"])

    def _curl(self, into: str) -> None:
        names = (path.name for path in self.source.iterdir())
        lines = [f'url = "{self._web.url(f"{into}/{name}")}"\nupload-file = "{self.source / name}"' for name in names]
        config = self._folder / "curl.config"
        config.write_text("\nnext\nfail\nsilent\n".join(["fail\nsilent", *lines]) + "\n")
        _run(["curl", "--parallel", "--parallel-max", "8", "--config", str(config)])


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    if done.returncode:
        raise StageoutError(f"{command[0]} ended with {done.returncode}: {done.stderr[-300:]}")


@contextmanager
def _xrootd(folder: Path) -> Iterator[int]:
    """An XRootD server whose root is ``xrootd`` in the folder; gives its port."""
    place, admin = folder / "xrootd", folder / "xrootd-admin"
    for path in (place, admin):
        path.mkdir()
        path.chmod(0o777)
    with _free_port() as port:
        pass
    config = folder / "xrootd.cfg"
    lines = [f"xrd.port {port}", "all.export /", f"oss.localroot {place}", f"all.adminpath {admin}"]
    config.write_text("\n".join([*lines, f"all.pidpath {admin}"]) + "\n")
    user = ["-R", "daemon"] if os.getuid() == 0 else []
    command = ["xrootd", *user, "-c", str(config), "-l", str(admin / "log")]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port, server)
        yield port
    finally:
        server.terminate()
        server.wait(30)


@contextmanager
def _free_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield int(listening.getsockname()[1])


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + 30
    while server.poll() is None and time.monotonic() < end_s:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise StageoutError("xrootd does not answer")


def rounds_of(site: Site, rounds: int) -> list[dict[str, float]]:
    """Files a second of every way, round by round; the order is turned each time, and one round warms up."""
    ways = list(site.ways)
    found = []
    for number in range(rounds + 1):
        turned = ways[number % len(ways) :] + ways[: number % len(ways)]
        found.append({way: site.files / site.time_s(way, f"copy{number}") for way in turned})
    return found[1:]


def figures_of(place: str, rounds: list[dict[str, float]], goal_peer: float, goal_tar: float | None) -> list[Figure]:
    """Rates of all, and the ratios that the goals are about."""
    peers = [way for way in rounds[0] if way not in (OURS, COMMAND, TAR)]
    rates = {way: statistics.median(one[way] for one in rounds) for way in rounds[0]}
    best = max(peers, key=rates.__getitem__) if peers else TAR
    figures = [Figure(f"{place}: {way}", rates[way], "files/s") for way in rates]
    to_peer = statistics.median(one[OURS] / max(one[peer] for peer in peers or [TAR]) for one in rounds)
    figures.append(Figure(f"{place}: overlay over the best peer ({best})", to_peer, "", goal=goal_peer, more=True))
    to_tar = statistics.median(one[OURS] / one[TAR] for one in rounds)
    figures.append(Figure(f"{place}: overlay over tar to tar", to_tar, "", goal=goal_tar, more=True))
    return figures


def measure(quick: bool) -> list[Figure]:
    """The figures."""
    rounds, files = (3, FILES // 4) if quick else (10, FILES)
    figures: list[Figure] = []
    memory = Path("/dev/shm")
    places = [("memory", str(memory), GOAL_PEER_MEMORY, GOAL_TAR_MEMORY)] if memory.is_dir() else []
    for place, parent, goal_peer, goal_tar in [*places, ("disk, durable", None, GOAL_PEER_DISK, None)]:
        with tempfile.TemporaryDirectory(prefix="stageout-bench-", dir=parent) as name, ExitStack() as stack:
            site = Site(Path(name), files, place != "memory", stack)
            before_s = site.cpu_s()
            found = rounds_of(site, rounds)
            figures += figures_of(place, found, goal_peer, goal_tar)
            ours = 2 * (rounds + 1) * files
            figures.append(Figure(f"{place}: CPU of the router a file", (site.cpu_s() - before_s) / ours * 1e6, "us"))
    return figures


if __name__ == "__main__":
    sys.exit(main("overlay_small_files", measure))
