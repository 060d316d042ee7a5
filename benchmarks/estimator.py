"""Does the estimator find the right number of streams, and with how few bytes? On seven different links.

Each link is first tried with everything: 1 to 16 streams (above 8 every second number), in three rounds and more where
these differ, a few seconds each: the best of many noisy means is too high by more than their error. A rate is what
arrived at the far end's filesystem in the middle of a transfer, as a long one has it. Then the estimator is asked about
a file that takes ten minutes. Wide-area links are real TCP through two network namespaces
(:mod:`tests.harness.wide_area`), several at once; each link is far slower than this machine. As printed stands
beside: the peak of the published curve, from the same samples.
"""

from __future__ import annotations

import math
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from common import Figure, main_in_parts
from sharing.arrivals import Arrivals
from sharing.plugin import wrapped
from sharing.quota import before_others, part_of_a_core, part_of_a_disk
from sharing.web import WebServer, authority

from stageout.condor.plugins import Plugin
from stageout.core.classads import ClassAd
from stageout.core.errors import StageoutError
from stageout.sampling.carrier import Carrier
from stageout.sampling.estimate import Means, estimate, memory_folder
from stageout.sampling.request import read_estimation
from tests.as_printed import choose_as_printed
from tests.harness.gridftp import GridFtpServer
from tests.harness.wide_area import Link, WideArea

MOST = 16
LONG_S = 600.0  # the transfer that is asked about
TRY_S = 4.0
ROUNDS, MOST_ROUNDS, ERROR = 3, 5, 0.01
AT_ONCE = 5
OTHERS = 4
CORE_PART = 0.1
DISK_BYTES_PER_S = 8_000_000
SHORTFALL_GOAL, STREAMS_GOAL, SHARE_GOAL = 0.05, 1.5, 0.05


@dataclass(frozen=True)
class Place:
    """A link that is up.

    :param url: to write into, or a file to read. :param plugin: runs on this side of the link.
    :param arriving: uploads arrive below it; None: downloads.
    """

    url: str
    plugin: Plugin
    arriving: Path | None
    settings: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def over(folder: Path, link: Link, others: int = 0) -> Iterator[Place]:
    """Uploads to a GridFTP server on the far side."""
    with WideArea(link) as area, ExitStack() as stack:
        server = GridFtpServer(folder / "server", 2811, address=area.far_address, wrapper=area.far)
        stack.enter_context(server)
        if others:
            stack.enter_context(traffic(area, others))
        yield Place(server.url(), wrapped(folder, "gsiftp_plugin", *area.near), server.files)


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
        "for _ in range(64): peer.sendall(data)\n"
        "print('moving', flush=True)\n"
        "while True: peer.sendall(data)\n"
    )
    server = subprocess.Popen([*area.far, sys.executable, "-c", sink])
    command = [*area.near, sys.executable, "-c", source, area.far_address]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(flows)]
    try:
        for process in running:  # slow start is over when 4 MiB have gone
            if not select.select([process.stdout], [], [], 60)[0]:
                raise StageoutError("the others' flows do not move")
        yield
    finally:
        for process in (*running, server):
            process.kill()
            process.wait()


@contextmanager
def far_web(folder: Path) -> Iterator[Place]:
    """Downloads by ranges from nginx on the far side."""
    with WideArea(Link(10e6, 0.06, window_bytes=64 << 10)) as area, ExitStack() as stack:
        server = stack.enter_context(WebServer(folder / "server", area.far_address, 8080, wrapper=area.far))
        server.make("big", 1 << 30)
        yield Place(server.url("big"), wrapped(folder, "stageout_curl_plugin", *area.near), None)


@contextmanager
def slow_disk(folder: Path) -> Iterator[Place]:
    """Uploads to a GridFTP server here whose writes wait for a slow disk."""
    image, mounted = folder / "image", folder / "server"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(2 << 30)
    commands = (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop,sync", str(image), str(mounted)])
    for command in commands:
        subprocess.run(command, check=True, capture_output=True)
    try:
        with ExitStack() as stack:
            slow = stack.enter_context(part_of_a_disk(mounted.stat().st_dev, DISK_BYTES_PER_S))
            server = stack.enter_context(GridFtpServer(mounted, wrapper=slow))
            yield Place(server.url(), wrapped(folder, "gsiftp_plugin"), server.files)
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


@contextmanager
def busy_core(folder: Path) -> Iterator[Place]:
    """Downloads by ranges over TLS; server and plugin share a part of a core."""
    certificate = authority(folder)
    with part_of_a_core(CORE_PART) as part, ExitStack() as stack:
        server = stack.enter_context(
            WebServer(folder / "server", "127.0.0.1", 0, wrapper=part, certificate=certificate)
        )
        server.make("big", 4 << 30)
        trust = {"SSL_CERT_FILE": str(certificate)}
        yield Place(server.url("big"), wrapped(folder, "stageout_curl_plugin", *part), None, trust)


LINKS: dict[str, Callable[[Path], object]] = {
    "rate: 10 MB/s, 10 ms": lambda folder: over(folder, Link(10e6, 0.01)),
    "RTT: 10 MB/s, 100 ms, windows of 128 KiB": lambda folder: over(folder, Link(10e6, 0.1, window_bytes=128 << 10)),
    "loss: 10 MB/s, 60 ms, 0.4 % lost": lambda folder: over(folder, Link(10e6, 0.06, loss=0.004)),
    f"shared: 10 MB/s, 20 ms, {OTHERS} other flows": lambda folder: over(folder, Link(10e6, 0.02, 0.06), OTHERS),
    "downloads: 10 MB/s, 60 ms, windows of 64 KiB": far_web,
    "disk-bound: 8 MB/s, every write waits": slow_disk,
    f"CPU-bound: TLS, {CORE_PART:.0%} of a core for both ends": busy_core,
}
PARTS = {name.partition(":")[0]: name for name in LINKS}
QUICK = ("rate", "RTT", "downloads")


def everything(place: Place, local: Path, levels: Sequence[int], rounds: int, most: int) -> dict[int, list[float]]:
    """Rates of each number of streams.

    :param most: rounds, where after the first ones the means near the best may be wrong by more than :data:`ERROR`.
    """
    seen = {**place.settings, "STAGEOUT_RESERVE_SPACE": "false"}  # else all of a download is there at once
    carrier = Carrier(place.plugin, place.url, place.arriving is not None, local, 60.0, settings=seen)
    rates: dict[int, list[float]] = {level: [] for level in levels}
    each = carrier.run(carrier.streams(1, 4 << 20)).rate_bytes_per_s
    for turn in range(most):
        if turn >= rounds and noise(rates) <= ERROR * math.sqrt(turn):
            break
        for level in levels if turn % 2 == 0 else reversed(levels):
            expected = statistics.mean(rates[level]) if rates[level] else each * 1.5
            with Arrivals(place.arriving or local) as arrivals:
                carrier.run(carrier.streams(level, min(int(TRY_S * expected), 1 << 30)))
            each = arrivals.rate()
            rates[level].append(each)
    return rates


def noise(rates: Mapping[int, Sequence[float]]) -> float:
    """Standard deviation of a rate between rounds, over its mean: of the numbers within a tenth of the best."""
    best = max(map(statistics.mean, rates.values()))
    near_best = [found for found in rates.values() if statistics.mean(found) >= 0.9 * best and len(found) > 1]
    parts = [statistics.variance(found) / statistics.mean(found) ** 2 for found in near_best]
    return math.sqrt(statistics.mean(parts)) if parts else 0.0


def asked(place: Place, size_bytes: int) -> ClassAd:
    """The estimator's answer."""
    here = "file:///dev/null"
    source, target = (here, place.url) if place.arriving else (place.url, here)
    ad = ClassAd({"dap_type": "Estimation", "src_url": source, "dest_url": target, "filesize": size_bytes})
    return estimate(read_estimation(ad), Means(lambda method: place.plugin, None, MOST, settings=place.settings))


def one_link(name: str, quick: bool) -> list[Figure]:
    """Figures of one link."""
    levels = [1, 2, 4, 6, 8, 12, 16] if quick else [*range(1, 9), *range(10, MOST + 1, 2)]
    folder = Path(tempfile.mkdtemp(prefix="stageout-bench-"))
    folder.chmod(0o755)
    local = Path(tempfile.mkdtemp(prefix="stageout-bench-", dir=memory_folder()))
    try:
        with LINKS[name](folder) as place:  # type: ignore[attr-defined]
            tried = everything(place, local, levels, *((1, 1) if quick else (ROUNDS, MOST_ROUNDS)))
            rates = {level: statistics.mean(found) for level, found in tried.items()}
            best = max(rates.values())
            answers = [asked(place, int(LONG_S * best)) for _ in range(1 if quick else 3)]
    finally:
        shutil.rmtree(local)
        shutil.rmtree(folder)
    fewest = min(level for level, rate in rates.items() if rate >= 0.97 * best)
    chosen = [answer["optimal_streams"] for answer in answers]
    printed = [choose_as_printed(powers_of(answer)).streams for answer in answers]
    _say(name, tried, answers, f"fewest for 97 %: {fewest}; chosen {chosen}; as printed {printed}")
    peer, apart = "as printed", max(disagreement(rates, answer) for answer in answers)
    fewest_apart = median(chosen, lambda n: n / fewest) * apart
    few = [Figure(f"{name}: rate of {level} streams", rates[level] / 1e6, "MB/s") for level in (1, 2, 4, 8)]
    return [
        *few,
        Figure(f"{name}: below the best rate", median(chosen, lambda n: 1 - near(rates, n) / best), "",
               peer, median(printed, lambda n: 1 - near(rates, n) / best), SHORTFALL_GOAL, noise=apart),
        Figure(f"{name}: streams over the fewest for 97 %", median(chosen, lambda n: n / fewest), "",
               peer, median(printed, lambda n: n / fewest), STREAMS_GOAL, noise=fewest_apart),
        Figure(f"{name}: share of the bytes", max(answer["sampled_share"] for answer in answers), "", goal=SHARE_GOAL),
        Figure(f"{name}: rounds of everything differ by", noise(tried), ""),
    ]  # fmt: skip


def _say(name: str, tried: Mapping[int, Sequence[float]], answers: Sequence[ClassAd], verdict: str) -> None:
    lines = [name, *(f"  {level}: " + " ".join(f"{rate / 1e6:.2f}" for rate in tried[level]) for level in tried)]
    for answer in answers:
        samples = {sample["streams"]: round(sample["throughput"] / 8, 2) for sample in answer["samples"]}
        lines.append(f"  sampled in {answer['optimization_cost']:.0f} s: {samples}")
    print("\n".join([*lines, f"  {verdict}"]), flush=True)


def powers_of(answer: ClassAd) -> dict[int, float]:
    """The samples that the printed rule takes."""
    found = {sample["streams"]: sample["throughput"] for sample in answer["samples"]}
    return {streams: rate for streams, rate in found.items() if streams & (streams - 1) == 0}


def disagreement(rates: Mapping[int, float], answer: ClassAd) -> float:
    """Return how far the estimator's samples and the rates of everything differ, as a share of the best rate."""
    sampled = {sample["streams"]: sample["throughput"] / 8 * 1e6 for sample in answer["samples"]}
    return max(abs(sampled[n] - rates[n]) for n in {*sampled} & {*rates}) / max(rates.values())


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


def measure(parts: Sequence[str], quick: bool) -> list[Figure]:
    """The figures of some links; quick: of at most three."""
    names = [PARTS[part] for part in parts if not quick or part in QUICK]
    with before_others(), ThreadPoolExecutor(AT_ONCE) as pool:
        return [figure for figures in pool.map(lambda name: one_link(name, quick), names) for figure in figures]


if __name__ == "__main__":
    sys.exit(main_in_parts("estimator", tuple(PARTS), measure))
