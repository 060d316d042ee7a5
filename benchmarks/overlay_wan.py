"""One file of 256 MiB over 67 ms and 12.5 MB/s: the overlay beside the best of iperf3 with 1, 4 and 16 streams.

The link is real TCP between two network namespaces with a process between them (:mod:`tests.harness.wide_area`).
``put`` counts from its first connection to the file under its name on the far disk; iperf3 counts its bytes only, and
looks at none. "default" is a put that chooses the number of its connections. So do "get" and, where one packet of a
thousand is lost, "get reno" and "get bbr": what the router's kernel does then. Needs root and iperf3.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from common import Figure, main_in_parts
from routers.iperf import iperf

from stageout.core.errors import StageoutError
from tests.harness.router import RouterProcess
from tests.harness.wide_area import Link, WideArea

ROOT = Path(__file__).resolve().parents[1]
_SENDER = Path(__file__).resolve().parent / "routers" / "sender.py"
MIB = 1 << 20
LINK = Link(12.5e6, 0.067, congestion="bbr")
_STREAMS = (1, 4, 16)
_DEFAULT = "default"
_GET = "get"
_LOSS = 0.001
_LOSSY = {f"{_GET} {congestion}": congestion for congestion in ("reno", "bbr")}


def moved(area: WideArea, router: RouterProcess, source: Path, connections: int, verb: str = "put") -> float:
    """MB/s of a put, or a get, with so many connections; 0: as many as it finds best."""
    end = f"{area.far_address}:{router.port}"
    command = [*area.near, sys.executable, str(_SENDER), verb, str(source), end, str(router.key_file("site"))]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "direct", str(connections)], capture_output=True, text=True, timeout=600, env=env, check=False
    )
    if done.returncode:
        raise StageoutError(f"{verb} ended with {done.returncode}: {done.stderr[-300:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    if not connections:
        print(f"{verb}: {told['why']}", flush=True)
    return source.stat().st_size / float(told["took_s"]) / 1e6


def measure(wanted: Sequence[str], quick: bool) -> list[Figure]:
    """Puts, then gets."""
    figures = _puts(wanted, quick) if {*map(str, _STREAMS), _DEFAULT} & set(wanted) else []
    for name in (_GET, *_LOSSY):
        if name in wanted:
            figures += _gets(name, quick)
    return figures


def _gets(name: str, quick: bool) -> list[Figure]:
    """A get that finds the number of its connections; on a link without losses beside iperf3."""
    rounds, size_bytes = (1, 64 * MIB) if quick else (3, 256 * MIB)
    link = replace(LINK, congestion=_LOSSY[name], loss=_LOSS, mtu_bytes=1500) if name in _LOSSY else LINK
    rates, peers = list[float](), {streams: list[float]() for streams in _STREAMS if name == _GET}
    with tempfile.TemporaryDirectory(prefix="wan", dir="/var/tmp") as folder, WideArea(link) as area:
        source = Path(folder) / "source"
        source.write_bytes(os.urandom(MIB) * (size_bytes // MIB))
        settings = {"STAGEOUT_ROUTER_HOST": area.far_address}
        with RouterProcess(Path(folder) / "router", settings, wrapper=area.far) as router:
            (router.root / "file").write_bytes(source.read_bytes())
            for _ in range(rounds):
                rates.append(moved(area, router, source, 0, "get"))
                for streams, found in peers.items():
                    found.append(iperf(area, streams, size_bytes))
    rate = statistics.median(rates)
    if not peers:
        goal = 0.85 * link.rate_bytes_per_s / 1e6
        return [Figure(f"{name}, 0.1 % lost", rate, "MB/s", "the link", link.rate_bytes_per_s / 1e6, goal, more=True)]
    best = max(map(statistics.median, peers.values()))
    return [
        Figure(name, rate, "MB/s", "the best iperf3", best),
        Figure(f"{name}, of the best iperf3", rate / best, "ratio", goal=0.95, more=True),
    ]


def _puts(wanted: Sequence[str], quick: bool) -> list[Figure]:
    """These numbers of connections, each beside iperf3 with as many; the default beside none."""
    rounds, size_bytes = (1, 64 * MIB) if quick else (3, 256 * MIB)
    numbers = [streams for streams in _STREAMS if str(streams) in wanted]
    ours: dict[int, list[float]] = {streams: [] for streams in (*numbers, *([0] if _DEFAULT in wanted else ()))}
    peers: dict[int, list[float]] = {streams: [] for streams in numbers}
    with tempfile.TemporaryDirectory(prefix="wan", dir="/var/tmp") as folder, WideArea(LINK) as area:
        source = Path(folder) / "source"
        source.write_bytes(os.urandom(MIB) * (size_bytes // MIB))
        settings = {"STAGEOUT_ROUTER_HOST": area.far_address}
        with RouterProcess(Path(folder) / "router", settings, wrapper=area.far) as router:
            for _ in range(rounds):
                for streams, rates in ours.items():
                    if streams:
                        peers[streams].append(iperf(area, streams, size_bytes))
                    rates.append(moved(area, router, source, streams))
    figures = [
        Figure(f"{streams}: put", statistics.median(ours[streams]), "MB/s", f"iperf3, {streams} streams",
               statistics.median(peers[streams]))
        for streams in numbers
    ]  # fmt: skip
    if 0 in ours:
        figures.append(Figure("default: put", statistics.median(ours[0]), "MB/s"))
    if len(numbers) == len(_STREAMS):
        best = max(statistics.median(rates) for rates in peers.values())
        rate = max(statistics.median(rates) for rates in ours.values())
        figures.append(Figure("the best put, of the best iperf3", rate / best, "ratio", goal=0.97, more=True))
    return figures


if __name__ == "__main__":
    sys.exit(main_in_parts("overlay_wan", [*map(str, _STREAMS), _DEFAULT, _GET, *_LOSSY], measure))
