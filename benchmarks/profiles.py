"""Profiles of real servers on this machine, as ``stageout profile`` makes them: GridFTP, nginx, XRootD, our router.

The measurements of Kola, Kosar and Livny for GridFTP and NeST (figures 3 and 4: block size and streams, files at once
and streams, rate and CPU of both ends), with today's servers. The loopback interface stands for a network that is
faster than the ends: what is seen is what streams, files and blocks cost them. GridFTP stands there a second time
behind a long way (their figure 4b). XRootD is asked through its HTTP door. Curves are drawn as ``profile-SERVER.png``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from common import Figure, main_in_parts
from sharing.plugin import wrapped
from sharing.quota import before_others
from sharing.web import WebServer, free_port

from stageout.core.errors import StageoutError
from stageout.core.profiles import Measurement, Profile
from stageout.sampling.carrier import Carrier
from stageout.sampling.estimate import memory_folder
from stageout.sampling.profiler import Limits, Profiler, reservation_cost
from stageout.sampling.report import table, write_plot
from tests.harness.gridftp import GridFtpServer
from tests.harness.pool.waiting import wait_until
from tests.harness.router import RouterProcess
from tests.harness.wide_area import Link, WideArea

FAR = "GridFTP-far"
#: Of a quick run: what the figures of this program need; 25 s for all other servers.
QUICK_S = {"GridFTP": 40.0, "router": 20.0, "directory": 20.0}
LIMITS, FAR_LIMITS = Limits(180.0, 40 << 30), Limits(420.0, 4 << 30)
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


@dataclass(frozen=True)
class Place:
    """A server that is up. :param url: of a directory. :param pid: of the server. :param before: the plugin's command.

    :param settings: further environment of the plugin.
    """

    url: str
    pid: int
    before: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def gridftp(home: Path) -> Iterator[Place]:
    """GridFTP."""
    with GridFtpServer(home) as server:
        yield Place(server.url(), server.pid)


@contextmanager
def gridftp_far(home: Path) -> Iterator[Place]:
    """GridFTP behind 60 ms and 12.5 MB/s, with windows for a sixth of that."""
    with WideArea(Link(12.5e6, 0.06, window_bytes=128 << 10)) as area, ExitStack() as stack:
        server = stack.enter_context(GridFtpServer(home, 2811, address=area.far_address, wrapper=area.far))
        yield Place(server.url(), server.pid, area.near)


@contextmanager
def nginx(home: Path) -> Iterator[Place]:
    """A WebDAV server."""
    with WebServer(home, "127.0.0.1", 0) as server:
        yield Place(server.url(""), server.pid)


@contextmanager
def xrootd(home: Path) -> Iterator[Place]:
    """XRootD."""
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
        url = f"http://127.0.0.1:{http}/"
        wait_until(lambda: _takes_files(url), timeout_s=30, what="XRootD to take a file")  # errors come first
        yield Place(url, process.pid)
    finally:
        process.kill()
        process.wait()


def _takes_files(url: str) -> bool:
    request = urllib.request.Request(f"{url}ready", data=b"ready", method="PUT")
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return bool(answer.status < 300)
    except OSError:
        return False


@contextmanager
def router(home: Path) -> Iterator[Place]:
    """The overlay's router, as the end of the way."""
    with RouterProcess(home) as process:
        key = {"STAGEOUT_OVERLAY_KEY": str(process.key_file("site"))}
        yield Place(f"overlay://127.0.0.1:{process.port}/", process.pid, settings=key)


@contextmanager
def directory(home: Path) -> Iterator[Place]:
    """A local directory: for what space reservation costs."""
    home.mkdir()
    yield Place(f"file://{home}/", 0)


SERVERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "GridFTP": (gridftp, "gsiftp_plugin"),
    "nginx": (nginx, "stageout_curl_plugin"),
    "XRootD": (xrootd, "stageout_curl_plugin"),
    "router": (router, "overlay_router_plugin"),
    FAR: (gridftp_far, "gsiftp_plugin"),
    "directory": (directory, "stageout_curl_plugin"),
}


def profile_of(name: str, folder: Path, quick: bool) -> Profile:
    """Start the server and measure it."""
    start, plugin_name = SERVERS[name]
    local = Path(tempfile.mkdtemp(prefix="stageout-bench-", dir=memory_folder()))
    try:
        with start(folder / name) as place:  # type: ignore[attr-defined]
            plugin = wrapped(folder, plugin_name, *place.before)
            writer = Carrier(plugin, place.url, True, local, 60.0, place.pid, settings=place.settings)

            blocks = plugin_name == "gsiftp_plugin" and name != FAR
            limits = FAR_LIMITS if name == FAR else LIMITS
            if quick:
                limits = Limits(QUICK_S.get(name, 25.0), 6 << 30)

            def reader(source: str) -> Carrier:
                return replace(writer, url=source, upload=False)

            outcome = Profiler(writer, reader, blocks, limits).run()
    finally:
        shutil.rmtree(local)
    print(f"{name} ({outcome.left_out} left out: {outcome.why})\n{table(outcome.profile)}\n", flush=True)
    return outcome.profile


def figures_of(name: str, profile: Profile) -> list[Figure]:
    """The words that fit into a bar: the best, and the server's cost of one stream and of several."""
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
    compared = reservation_cost(profile.runs)
    if compared is not None and compared.is_clear:
        made.append(Figure(f"{name}: share of the write rate that reserving space costs", compared.cost, ""))
    return made


def _plain(profile: Profile, way: str, streams: int) -> Measurement | None:
    found = [run for run in profile.runs if (run.direction, run.streams, run.concurrency) == (way, streams, 1)]
    found = [run for run in found if not run.block_bytes and run.reserved is None]
    return max(found, key=lambda run: run.moved_bytes, default=None)


def _cpu(run: Measurement) -> float:
    return (run.server_cpu_s or 0.0) / (run.moved_bytes / 1e9)


def measure(names: Sequence[str], quick: bool) -> list[Figure]:
    """The figures of some servers."""
    figures = []
    for name in names:
        if quick and name == FAR:
            continue  # in so short a time, files over a long way are nothing but beginnings
        folder = Path(tempfile.mkdtemp(prefix="stageout-bench-"))
        folder.chmod(0o755)
        try:
            with before_others():
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
    sys.exit(main_in_parts("profiles", tuple(SERVERS), measure, further=draw))
