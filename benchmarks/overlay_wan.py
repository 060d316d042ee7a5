"""One file of 256 MiB over 67 ms and 12.5 MB/s: the overlay beside the best of iperf3 with 1, 4 and 16 streams.

The link is real TCP between two network namespaces with a process between them (:mod:`stageout.testing.wide_area`).
``put`` counts from its first connection to the file under its name on the far disk; iperf3 counts its bytes only, and
looks at none. "default" is a put that chooses the number of its connections. Needs root and iperf3.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from common import Figure, main_in_parts
from routers.iperf import iperf

from stageout.core.errors import StageoutError
from stageout.testing.router import RouterProcess
from stageout.testing.wide_area import Link, WideArea

ROOT = Path(__file__).resolve().parents[1]
_SENDER = Path(__file__).resolve().parent / "routers" / "sender.py"
MIB = 1 << 20
LINK = Link(12.5e6, 0.067, congestion="bbr")
_STREAMS = (1, 4, 16)
_DEFAULT = "default"


def _put(area: WideArea, router: RouterProcess, source: Path, connections: int) -> float:
    """MB/s of a put with so many connections; 0: as many as it finds best."""
    end = f"{area.far_address}:{router.port}"
    command = [*area.near, sys.executable, str(_SENDER), "put", str(source), end, str(router.key_file("site"))]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "direct", str(connections)], capture_output=True, text=True, timeout=600, env=env, check=False
    )
    if done.returncode:
        raise StageoutError(f"put ended with {done.returncode}: {done.stderr[-300:]}")
    return source.stat().st_size / float(json.loads(done.stdout.splitlines()[-1])["took_s"]) / 1e6


def measure(wanted: Sequence[str], quick: bool) -> list[Figure]:
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
                    rates.append(_put(area, router, source, streams))
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
    sys.exit(main_in_parts("overlay_wan", [*map(str, _STREAMS), _DEFAULT], measure))
