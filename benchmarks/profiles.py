"""Profiles of real servers on this machine, as ``stageout profile`` makes them: GridFTP, nginx, XRootD (over HTTP).

What Kola, Kosar and Livny showed of GridFTP and NeST (figures 3 and 4: block size and streams, files at once and
streams, rate and CPU of both ends), with today's servers. The loopback interface stands for a network that is faster
than the ends: what is seen is what streams, files and blocks cost them. Curves are drawn as ``profile-SERVER.png``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from common import Figure, main
from sharing.web import WebServer, free_port

from stageout.core.errors import StageoutError
from stageout.core.profiles import Profile, Run
from stageout.sampling.carrier import Carrier
from stageout.sampling.estimate import memory_folder
from stageout.sampling.plugins import ask
from stageout.sampling.profiler import Limits, Profiler, reservation_cost
from stageout.sampling.report import table, write_plot
from stageout.testing.gridftp import GridFtpServer
from stageout.testing.starter import installed

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {True: Limits(35.0, 6 << 30), False: Limits(180.0, 40 << 30)}
PROFILES: dict[str, Profile] = {}

_XROOTD = """\
all.role server
all.export /
oss.localroot {home}/files
xrd.port {port}
xrd.protocol http:{http} libXrdHttp.so
all.adminpath {home}/admin
all.pidpath {home}/admin
"""


@contextmanager
def gridftp(home: Path) -> Iterator[tuple[str, int]]:
    """URL of a directory, and the server's pid."""
    with GridFtpServer(home) as server:
        yield server.url(), server.pid


@contextmanager
def nginx(home: Path) -> Iterator[tuple[str, int]]:
    """Likewise."""
    with WebServer(home, "127.0.0.1", 0) as server:
        yield server.url(""), server.pid


@contextmanager
def xrootd(home: Path) -> Iterator[tuple[str, int]]:
    """Likewise."""
    program = shutil.which("xrootd")
    if program is None:
        raise StageoutError("xrootd is not installed: apt-get install xrootd-server")
    for name in ("files", "admin"):
        (home / name).mkdir(parents=True)
    subprocess.run(["chown", "-R", "nobody:nogroup", str(home)], check=True)
    port, http = free_port(), free_port()
    (home / "config").write_text(_XROOTD.format(home=home, port=port, http=http))
    command = [program, "-R", "nobody", "-c", str(home / "config"), "-l", str(home / "admin" / "log"), "-n", "bench"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(3)  # it answers before it is ready, with errors
        yield f"http://127.0.0.1:{http}/", process.pid
    finally:
        process.kill()
        process.wait()


@contextmanager
def directory(home: Path) -> Iterator[tuple[str, int]]:
    """A local directory: for what space reservation costs."""
    home.mkdir()
    yield f"file://{home}/", 0


SERVERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "GridFTP": (gridftp, "gsiftp_plugin"),
    "nginx": (nginx, "curl_plugin"),
    "XRootD": (xrootd, "curl_plugin"),
    "directory": (directory, "curl_plugin"),
}


def profile_of(name: str, folder: Path, quick: bool) -> Profile:
    """Start the server and measure it."""
    start, plugin_name = SERVERS[name]
    plugin = ask(installed(ROOT / "plugins" / plugin_name, folder))
    if plugin is None:
        raise StageoutError(f"{plugin_name} does not answer; tools/install installs what it needs")
    local = Path(tempfile.mkdtemp(prefix="stageout-bench-", dir=memory_folder()))
    try:
        with start(folder / name) as (url, pid):  # type: ignore[attr-defined]
            writer = Carrier(plugin, url, True, local, 60.0, pid)

            def reader(source: str) -> Carrier:
                return replace(writer, url=source, upload=False)

            outcome = Profiler(writer, reader, plugin_name == "gsiftp_plugin", LIMITS[quick]).run()
    finally:
        shutil.rmtree(local)
    print(f"{name} ({outcome.left_out} left out: {outcome.why})\n{table(outcome.profile)}\n", flush=True)
    return outcome.profile


def figures_of(name: str, profile: Profile) -> list[Figure]:
    """What can be said in a bar: the best, and what one stream and several cost the server."""
    made = []
    for way, best in profile.best.items():
        made.append(Figure(f"{name}: best {way}", best.rate_bytes_per_s / 1e6, "MB/s"))
        one, four = (_plain(profile, way, streams) for streams in (1, 4))
        if one and one.server_cpu_s is not None:
            peer, value = "one stream", _cpu(one)
            if four and four.server_cpu_s is not None:
                made.append(Figure(f"{name}: server's CPU, {way}, 4 streams", _cpu(four), "s/GB", peer, value))
            else:
                made.append(Figure(f"{name}: server's CPU, {way}, one stream", value, "s/GB"))
    cost = reservation_cost(profile.runs)
    if cost is not None:
        made.append(Figure(f"{name}: share of the write rate that reserving space costs", cost, ""))
    return made


def _plain(profile: Profile, way: str, streams: int) -> Run | None:
    found = [run for run in profile.runs if (run.direction, run.streams, run.concurrency) == (way, streams, 1)]
    found = [run for run in found if not run.block_bytes and run.reserved is None]
    return max(found, key=lambda run: run.moved_bytes, default=None)


def _cpu(run: Run) -> float:
    return (run.server_cpu_s or 0.0) / (run.moved_bytes / 1e9)


def measure(quick: bool) -> list[Figure]:
    """The figures of all servers."""
    figures = []
    for name in SERVERS:
        folder = Path(tempfile.mkdtemp(prefix="stageout-bench-"))
        folder.chmod(0o755)
        try:
            PROFILES[name] = profile_of(name, folder, quick)
        finally:
            shutil.rmtree(folder)
        figures += figures_of(name, PROFILES[name])
    return figures


def draw(folder: Path) -> None:
    """Curves of each server, and the profile itself."""
    for name, profile in PROFILES.items():
        write_plot(profile, folder / f"profile-{name}.png")


if __name__ == "__main__":
    sys.exit(main("profiles", measure, further=draw))
