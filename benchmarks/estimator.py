"""Does the estimator find the right number of streams, and with how few bytes? On seven different links.

Each link is first tried with everything: 1 to 16 streams (above 8 every second number), in two rounds, a few seconds
each. Then the estimator is asked about a file that takes ten minutes. Wide-area links are real TCP through two network
namespaces (:mod:`stageout.testing.wide_area`). As printed stands beside: the peak of the published curve, from the
same samples.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from common import Figure, main
from sharing.web import WebServer, authority

from stageout.core.classads import ClassAd
from stageout.core.errors import StageoutError
from stageout.sampling.carrier import Carrier
from stageout.sampling.estimate import Means, estimate, memory_folder
from stageout.sampling.plugins import Plugin, ask
from stageout.sampling.request import read_estimation
from stageout.testing.gridftp import GridFtpServer
from stageout.testing.starter import installed
from stageout.testing.wide_area import Link, WideArea

ROOT = Path(__file__).resolve().parents[1]
MOST = 16
LONG_S = 600.0  # the transfer that is asked about
TRY_S = 6.0
OTHERS = 4
SHORTFALL_GOAL, STREAMS_GOAL, SHARE_GOAL = 0.05, 1.5, 0.05


@dataclass(frozen=True)
class Place:
    """A link that is up.

    :param url: to write into, or a file to read. :param plugin: runs on this side of the link.
    """

    url: str
    upload: bool
    plugin: Plugin
    settings: dict[str, str]


def wrapped(folder: Path, name: str, *prefix: str) -> Plugin:
    """A plugin behind a command prefix."""
    plain = folder / name
    if not plain.exists():
        installed(ROOT / "plugins" / name, folder)
    script = folder / f"{name}.sh"
    script.write_text(f'#!/bin/sh\nexec {" ".join(prefix)} {plain} "$@"\n')
    script.chmod(0o755)
    plugin = ask(script)
    if plugin is None:
        raise StageoutError(f"{name} does not answer; is globus-url-copy installed (tools/install)?")
    return plugin


@contextmanager
def over(folder: Path, link: Link, others: int = 0) -> Iterator[Place]:
    """Uploads to a GridFTP server on the far side."""
    with WideArea(link) as area, ExitStack() as stack:
        server = GridFtpServer(folder / "server", 2811, address=area.far_address, wrapper=area.far)
        stack.enter_context(server)
        if others:
            stack.enter_context(traffic(area, others))
        yield Place(server.url(), True, wrapped(folder, "gsiftp_plugin", *area.near), {})


@contextmanager
def traffic(area: WideArea, flows: int) -> Iterator[None]:
    """Other people's bulk flows in the same direction."""
    sink = (
        "import socket, threading\n"
        f"server = socket.create_server(('{area.far_address}', 9999))\n"
        "def drain(peer):\n    while peer.recv(1 << 16): pass\n"
        "while True: threading.Thread(target=drain, args=(server.accept()[0],), daemon=True).start()\n"
    )
    source = (
        "import socket, sys, time\n"
        "while True:\n"
        "    try: peer = socket.create_connection((sys.argv[1], 9999)); break\n"
        "    except OSError: time.sleep(0.1)\n"
        "data = bytes(1 << 16)\n"
        "while True: peer.sendall(data)\n"
    )
    server = subprocess.Popen([*area.far, sys.executable, "-c", sink])
    running = [subprocess.Popen([*area.near, sys.executable, "-c", source, area.far_address]) for _ in range(flows)]
    try:
        time.sleep(3)  # until they have found their rates
        yield
    finally:
        for process in (*running, server):
            process.kill()
            process.wait()


@contextmanager
def far_web(folder: Path) -> Iterator[Place]:
    """Downloads by ranges from nginx on the far side."""
    with WideArea(Link(12.5e6, 0.06, window_bytes=128 << 10)) as area, ExitStack() as stack:
        server = stack.enter_context(WebServer(folder / "server", area.far_address, 8080, wrapper=area.far))
        server.make("big", 1 << 30)
        yield Place(server.url("big"), False, wrapped(folder, "curl_plugin", *area.near), {})


@contextmanager
def slow_disk(folder: Path) -> Iterator[Place]:
    """Uploads to a GridFTP server here whose filesystem waits for the disk at every write."""
    image, mounted = folder / "image", folder / "server"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(2 << 30)
    commands = (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop,sync", str(image), str(mounted)])
    for command in commands:
        subprocess.run(command, check=True, capture_output=True)
    try:
        with GridFtpServer(mounted) as server:
            yield Place(server.url(), True, wrapped(folder, "gsiftp_plugin"), {})
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


@contextmanager
def busy_core(folder: Path) -> Iterator[Place]:
    """Downloads by ranges over TLS; server and plugin share one core."""
    one_core = ("taskset", "-c", str(max(os.sched_getaffinity(0))))
    certificate = authority(folder)
    with WebServer(folder / "server", "127.0.0.1", 0, wrapper=one_core, certificate=certificate) as server:
        server.make("big", 1 << 30)
        trust = {"SSL_CERT_FILE": str(certificate)}
        yield Place(server.url("big"), False, wrapped(folder, "curl_plugin", *one_core), trust)


LINKS: dict[str, Callable[[Path], object]] = {
    "rate: 20 MB/s, 10 ms": lambda folder: over(folder, Link(20e6, 0.01)),
    "RTT: 20 MB/s, 100 ms, windows of 256 KiB": lambda folder: over(folder, Link(20e6, 0.1, window_bytes=256 << 10)),
    "loss: 20 MB/s, 40 ms, 0.3 % lost": lambda folder: over(folder, Link(20e6, 0.04, loss=0.003)),
    f"shared: 20 MB/s, 20 ms, {OTHERS} other flows": lambda folder: over(folder, Link(20e6, 0.02, 0.03), OTHERS),
    "downloads: 12.5 MB/s, 60 ms, windows of 128 KiB": far_web,
    "disk-bound: every write waits": slow_disk,
    "CPU-bound: TLS, one core for both ends": busy_core,
}


def everything(place: Place, folder: Path, levels: list[int], rounds: int) -> dict[int, float]:
    """Rate of each number of streams: the mean of the rounds."""
    carrier = Carrier(place.plugin, place.url, place.upload, folder, 60.0, settings=place.settings)
    first = carrier.run(carrier.streams(8, 32 << 20)).rate_bytes_per_s
    rates: dict[int, list[float]] = {level: [] for level in levels}
    best = first
    for turn in range(rounds):
        for level in levels if turn % 2 == 0 else reversed(levels):
            size_bytes = min(int(TRY_S * best), 400 << 20)
            rate = carrier.run(carrier.streams(level, size_bytes)).rate_bytes_per_s
            rates[level].append(rate)
            best = max(best, rate)
    return {level: statistics.mean(found) for level, found in rates.items()}


def asked(place: Place, size_bytes: int) -> ClassAd:
    """The estimator's answer."""
    here = "file:///dev/null"
    source, target = (here, place.url) if place.upload else (place.url, here)
    ad = ClassAd({"dap_type": "Estimation", "src_url": source, "dest_url": target, "filesize": size_bytes})
    return estimate(read_estimation(ad), Means(lambda method: place.plugin, None, MOST, settings=place.settings))


def one_link(name: str, folder: Path, quick: bool) -> list[Figure]:
    """Figures of one link."""
    from stageout.tuning.choice import choose_as_printed

    levels = [1, 2, 3, 4, 6, 8, 12, 16] if quick else [*range(1, 9), *range(10, MOST + 1, 2)]
    local = Path(tempfile.mkdtemp(prefix="stageout-bench-", dir=memory_folder()))
    try:
        with LINKS[name](folder) as place:  # type: ignore[attr-defined]
            rates = everything(place, local, levels, 1 if quick else 2)
            best = max(rates.values())
            answers = [asked(place, int(LONG_S * best)) for _ in range(1 if quick else 3)]
    finally:
        shutil.rmtree(local)
    fewest = min(level for level, rate in rates.items() if rate >= 0.97 * best)
    chosen = [answer["optimal_streams"] for answer in answers]
    printed = [choose_as_printed(powers_of(answer)).streams for answer in answers]
    print(f"{name}: rates", {level: round(rate / 1e6, 1) for level, rate in rates.items()}, flush=True)
    print(f"  fewest for 97 %: {fewest}; chosen {chosen}; as printed {printed}", flush=True)
    peer = "as printed"
    return [
        Figure(f"{name}: below the best rate", median(chosen, lambda n: 1 - near(rates, n) / best), "",
               peer, median(printed, lambda n: 1 - near(rates, n) / best), SHORTFALL_GOAL),
        Figure(f"{name}: streams over the fewest for 97 %", median(chosen, lambda n: n / fewest), "",
               peer, median(printed, lambda n: n / fewest), STREAMS_GOAL),
        Figure(f"{name}: share of the bytes", max(answer["sampled_share"] for answer in answers), "", goal=SHARE_GOAL),
    ]  # fmt: skip


def powers_of(answer: ClassAd) -> dict[int, float]:
    """The samples that the printed rule takes."""
    found = {sample["streams"]: sample["throughput"] for sample in answer["samples"]}
    return {streams: rate for streams, rate in found.items() if streams & (streams - 1) == 0}


def near(rates: dict[int, float], streams: int) -> float:
    """Rate of a number of streams, between its neighbours where it was not tried itself."""
    if streams in rates:
        return rates[streams]
    low = max(level for level in rates if level < streams)
    high = min(level for level in rates if level > streams)
    return rates[low] + (rates[high] - rates[low]) * (streams - low) / (high - low)


def median(values: list[int], figure: Callable[[int], float]) -> float:
    """Median of a figure over the answers."""
    return statistics.median(figure(value) for value in values)


def measure(quick: bool) -> list[Figure]:
    """The figures of all links; quick: of three."""
    names = [name for name in LINKS if not quick or name.split(":")[0] in ("rate", "RTT", "CPU-bound")]
    figures = []
    for name in names:
        folder = Path(tempfile.mkdtemp(prefix="stageout-bench-"))
        folder.chmod(0o755)
        try:
            figures += one_link(name, folder, quick)
        finally:
            shutil.rmtree(folder)
    return figures


if __name__ == "__main__":
    sys.exit(main("estimator", measure))
