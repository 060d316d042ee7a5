"""How fast stageout_curl_plugin moves files, beside plain curl with the same bytes, server and number of connections.

The server is nginx on the loopback interface, so that what is seen is the clients' own cost: a network slower than it
hides the difference. Our plugin computes a digest while data passes, asks the server what it has after an upload and
brings a download to the disk; so curl is followed by ``sync`` of what it downloaded, and checks nothing.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Callable

from common import Figure, main

from stageout.core.errors import StageoutError
from stageout.testing.starter import EmbeddedStarter, PluginTable, Wanted, installed
from tests.harness.destination import Destination

ROOT = Path(__file__).resolve().parents[1]
GIB = 1 << 30
SMALL_BYTES, SMALL_FILES = 100_000, 500
PARALLEL = 4  # the plugin's default
GOAL_ONE_S = 0.12  # what each job pays for a small file, interpreter included
Move = Callable[[Sequence[str], bool], None]


class Site:
    """A server, a directory of files and the two clients."""

    def __init__(self, folder: Path, server: Destination) -> None:
        self.scratch = folder / "scratch"
        self.scratch.mkdir()
        self._folder = folder
        self._server = server
        plugin = installed(ROOT / "plugins" / "stageout_curl_plugin", folder)
        self._starter = EmbeddedStarter(self.scratch, PluginTable([plugin]))

    def make(self, name: str, size_bytes: int) -> None:
        """A file that does not compress, in the scratch directory and on the server."""
        block = os.urandom(min(size_bytes, 1 << 20))
        with (self.scratch / name).open("wb") as file:
            for start in range(0, size_bytes, len(block)):
                file.write(block[: size_bytes - start])

    def ours(self, names: Sequence[str], upload: bool) -> None:
        """Move them with stageout_curl_plugin."""
        wanted = [Wanted(self._server.url(name), name) for name in names]
        runs = self._starter.upload(wanted) if upload else self._starter.download(wanted)
        if not all(run.succeeded for run in runs):
            raise StageoutError(
                f"stageout_curl_plugin: {[ad.get('TransferError') for run in runs for ad in run.ads][:1]}"
            )

    def curl(self, names: Sequence[str], upload: bool) -> None:
        """Move them with one process of curl; downloads are synced."""
        option = "upload-file" if upload else "output"
        lines = [f'url = "{self._server.url(name)}"\n{option} = "{self.scratch / name}"' for name in names]
        config = self._folder / "curl.config"
        config.write_text("\nnext\nfail\nsilent\n".join(["fail\nsilent", *lines]) + "\n")
        many = ["--parallel", "--parallel-max", str(PARALLEL)] if len(names) > 1 else []
        self._command(["curl", *many, "--config", str(config)])
        if not upload:
            self._command(["sync", *(str(self.scratch / name) for name in names)])

    def _command(self, command: list[str]) -> None:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            raise StageoutError(f"{command[0]} ended with {done.returncode}: {done.stderr[:200]}")


def medians_s(moves: Sequence[Move], names: Sequence[str], upload: bool, rounds: int) -> list[float]:
    """Median wall time of each way to move the files, in turn."""
    times_s: list[list[float]] = [[] for _ in moves]
    for _ in range(rounds):
        for move, times in zip(moves, times_s):
            start_s = time.perf_counter()
            move(names, upload)
            times.append(time.perf_counter() - start_s)
    return [statistics.median(times) for times in times_s]


def measure(quick: bool) -> list[Figure]:
    """The figures."""
    if shutil.which("curl") is None:
        raise StageoutError("curl is not installed: apt-get install curl")
    figures = []
    with tempfile.TemporaryDirectory(prefix="stageout-bench-") as name, Destination(Path(name) / "server") as server:
        Path(name).chmod(0o755)  # nginx has a user of its own
        site = Site(Path(name), server)
        site.make("large", GIB)
        small = [f"small{index:03}" for index in range(SMALL_FILES)]
        for each in small:
            site.make(each, SMALL_BYTES)
        cases = [("1 GiB", ["large"], GIB), (f"{SMALL_FILES} x 100 kB", small, SMALL_BYTES * SMALL_FILES)]
        site.make("one", 1000)
        os.sync()
        for upload in (True, False):
            word = "upload" if upload else "download"
            for what, names, size_bytes in cases:
                ours_s, curl_s = medians_s([site.ours, site.curl], names, upload, 3 if quick else 7)
                peer = "curl" if upload else "curl and sync"
                figures.append(Figure(f"{word} of {what}", ours_s, "s", peer, curl_s))
                figures.append(Figure(f"{word} of {what}: rate", size_bytes / ours_s / 1e6, "MB/s"))
            ours_s, curl_s = medians_s([site.ours, site.curl], ["one"], upload, 9 if quick else 31)
            figures.append(
                Figure(f"{word} of one file of 1 kB, process included", ours_s, "s", "curl", curl_s, GOAL_ONE_S)
            )
    return figures


if __name__ == "__main__":
    sys.exit(main("curl_rate", measure))
