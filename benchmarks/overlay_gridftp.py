"""DiskRouter's table: one file over 67 ms and 12.5 MB/s by GridFTP with 1 and with 10 streams, beside our put.

TCP has the kernel's windows in one part. In the other, no connection keeps more than 64 KiB under way, as on most
machines when the table was made. All three run in turn over the same link. GridFTP counts from the start of
globus-url-copy to its end; a put also computes a digest and syncs the file. Needs root.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from common import Figure, main_in_parts
from overlay_wan import LINK, MIB, moved

from stageout.core.errors import StageoutError
from tests.harness.gridftp import GridFtpServer
from tests.harness.router import RouterProcess
from tests.harness.wide_area import WideArea

STREAMS = (1, 10)
#: Most bytes of one connection under way; 0: the kernel's limits.
WINDOWS = {"the kernel's windows": 0, "windows of 64 KiB": 64 << 10}


def copied(area: WideArea, server: GridFtpServer, source: Path, streams: int) -> float:
    """MB/s of an upload by GridFTP. :raises StageoutError: it failed."""
    target = server.files / source.name
    target.unlink(missing_ok=True)
    size_bytes = source.stat().st_size
    command = [*area.near, "globus-url-copy", "-p", str(streams), f"file://{source}", server.url(source.name)]
    start_s = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    took_s = time.monotonic() - start_s
    if done.returncode or target.stat().st_size != size_bytes:
        raise StageoutError(f"globus-url-copy ended with {done.returncode}: {done.stderr[-300:]}")
    return size_bytes / took_s / 1e6


def one_part(name: str, rounds: int, size_bytes: int) -> list[Figure]:
    """Figures of one size of windows."""
    rates: dict[int, list[float]] = {streams: [] for streams in (0, *STREAMS)}
    link = replace(LINK, window_bytes=WINDOWS[name])
    with tempfile.TemporaryDirectory(prefix="wan", dir="/var/tmp") as folder, WideArea(link) as area:
        home = Path(folder)
        home.chmod(0o755)
        source = home / "source"
        source.write_bytes(os.urandom(MIB) * (size_bytes // MIB))
        grid = GridFtpServer(home / "gridftp", 2811, address=area.far_address, wrapper=area.far)
        settings = {"STAGEOUT_ROUTER_HOST": area.far_address}
        with grid, RouterProcess(home / "router", settings, wrapper=area.far) as router:
            for _ in range(rounds):
                rates[0].append(moved(area, router, source, 0))
                for streams in STREAMS:
                    rates[streams].append(copied(area, grid, source, streams))
    one, many = (statistics.median(rates[streams]) for streams in STREAMS)
    return [
        Figure(f"{name}: GridFTP, {STREAMS[0]} stream", one, "MB/s"),
        Figure(f"{name}: GridFTP, {STREAMS[1]} streams", many, "MB/s"),
        Figure(f"{name}: put", statistics.median(rates[0]), "MB/s", f"GridFTP, {STREAMS[1]} streams", many),
    ]


def measure(wanted: Sequence[str], quick: bool) -> list[Figure]:
    """The figures of some parts; quick: one round of a smaller file."""
    rounds, size_bytes = (1, 32 * MIB) if quick else (3, 128 * MIB)
    return [figure for name in WINDOWS if name in wanted for figure in one_part(name, rounds, size_bytes)]


if __name__ == "__main__":
    sys.exit(main_in_parts("overlay_gridftp", list(WINDOWS), measure))
