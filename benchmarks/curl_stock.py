"""How fast stageout_curl_plugin moves files beside HTCondor's own curl_plugin.

Both run as condor_starter runs them, on the same files and the same nginx on the loopback interface, in pairs: one
after the other, and the order changes from pair to pair. A figure is the median of the ratios of the pairs. The server
shows the clients' own cost: a slower network hides the difference.

Beside the small files stand bare programs, which check nothing and report nothing: ``curl``, and the least Python that
makes the same requests with pycurl, one after the other.
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

from common import Figure, main

from stageout.core.errors import StageoutError
from stageout.testing.starter import EmbeddedStarter, PluginTable, Wanted, installed
from tests.curl.beside import clean_environment, stock_plugin
from tests.harness.destination import Destination

ROOT = Path(__file__).resolve().parents[1]
GIB = 1 << 30
SMALL_BYTES, SMALL_FILES = 100_000, 500
GOAL = 1.2
#: Arguments: "upload" or "download", then pairs of URL and name. An upload is followed by the HEAD that ours makes.
BARE = """
import sys, pycurl
curl, upload = pycurl.Curl(), sys.argv[1] == "upload"
for url, name in zip(sys.argv[2::2], sys.argv[3::2]):
    with open(name, "rb" if upload else "wb") as file:
        if upload:
            curl.setopt(pycurl.HTTPHEADER, ["Expect:"])
            curl.setopt(pycurl.UPLOAD, 1)
            curl.setopt(pycurl.INFILESIZE, 100000)
        curl.setopt(pycurl.READDATA if upload else pycurl.WRITEDATA, file)
        curl.setopt(pycurl.URL, url)
        curl.perform()
    curl.reset()
    if upload:
        curl.setopt(pycurl.NOBODY, 1)
        curl.setopt(pycurl.URL, url)
        curl.perform()
        curl.reset()
"""


class Pair:
    """Both plugins, and one directory of files at both ends."""

    def __init__(self, home: Path, server: Destination, plugins: Sequence[Path]) -> None:
        self.scratch = home / "scratch"
        self.scratch.mkdir()
        self._server = server
        self._plugins = list(plugins)
        environment = {**clean_environment(), "PYTHONPYCACHEPREFIX": str(home / "bytecode")}  # pip leaves it there, too
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self._environment = environment
        self._starters = [
            EmbeddedStarter(self.scratch, PluginTable([plugin]), environment=environment) for plugin in plugins
        ]

    def make(self, name: str, size_bytes: int) -> None:
        """A file that does not compress, at both ends."""
        block = os.urandom(min(size_bytes, 1 << 20))
        for path in (self.scratch / name, self._server.file(name)):
            with path.open("wb") as file:
                for start in range(0, size_bytes, len(block)):
                    file.write(block[: size_bytes - start])
            path.chmod(0o666)

    def times_s(self, names: Sequence[str], upload: bool, pairs: int) -> list[tuple[float, float]]:
        """Seconds of both plugins, pair by pair, after one run of ours that counts for nothing."""
        self._move_s(1, names[:1], upload)
        times = []
        for number in range(pairs):
            order = (0, 1) if number % 2 == 0 else (1, 0)
            found = {which: self._move_s(which, names, upload) for which in order}
            times.append((found[0], found[1]))
        return times

    def _move_s(self, which: int, names: Sequence[str], upload: bool) -> float:
        plugin, starter = self._plugins[which], self._starters[which]
        text = starter.input_text(plugin, [Wanted(self._server.url(name), name) for name in names])
        os.sync()  # the pages that the run before has left are not this one's
        run = starter.run(plugin, text, upload)
        if not run.succeeded:
            raise StageoutError(f"{plugin.name}: {[ad.get('TransferError') for ad in run.ads][:1]}{run.printed[:200]}")
        return run.duration_s

    def bare_s(self, names: Sequence[str], word: str, runs: int) -> tuple[float, float]:
        """Return the medians of the seconds of ``curl``, and of Python with pycurl."""
        option = "--upload-file" if word == "upload" else "--output"
        pairs = [(self._server.url(name), name) for name in names]
        curl = ["curl", "--silent", "--fail", *(part for url, name in pairs for part in (option, name, url))]
        python = [sys.executable, "-c", BARE, word, *(part for pair in pairs for part in pair)]
        return self._command_s(curl, runs), self._command_s(python, runs)

    def _command_s(self, command: list[str], runs: int) -> float:
        times = []
        for _ in range(runs):
            os.sync()
            start_s = time.perf_counter()
            subprocess.run(command, cwd=self.scratch, env=self._environment, stdout=subprocess.DEVNULL, check=True)
            times.append(time.perf_counter() - start_s)
        return statistics.median(times)


def measure(quick: bool) -> list[Figure]:
    """The figures: medians of the ratios of pairs have the goal, and the seconds stand beside."""
    if shutil.which("curl") is None:
        raise StageoutError("curl is not installed: apt-get install curl")
    figures = []
    with tempfile.TemporaryDirectory(prefix="stageout-bench-") as name, Destination(Path(name) / "server") as server:
        home = Path(name)
        home.chmod(0o755)  # nginx has a user of its own
        folders = [home / "stock", home / "ours"]
        for folder in folders:
            folder.mkdir()
        ours = installed(ROOT / "plugins/stageout_curl_plugin", folders[1])
        pair = Pair(home, server, [stock_plugin(folders[0]), ours])
        pair.make("large", GIB)
        small = [f"small{number:03}" for number in range(SMALL_FILES)]
        for each in small:
            pair.make(each, SMALL_BYTES)
        for word in ("upload", "download"):
            for what, names in (("1 GiB", ["large"]), (f"{SMALL_FILES} x {SMALL_BYTES // 1000} kB", small)):
                times = pair.times_s(names, word == "upload", 3 if quick else 9)
                stock_s, ours_s = (statistics.median(side) for side in zip(*times))
                ratio = statistics.median(ours / stock for stock, ours in times)
                figures.append(Figure(f"{word} of {what}", ours_s, "s", "HTCondor's curl_plugin", stock_s))
                figures.append(Figure(f"{word} of {what}: median ratio of the pairs", ratio, "", goal=GOAL))
            curl_s, python_s = pair.bare_s(small, word, 3 if quick else 9)
            figures.append(Figure(f"{word} of {what}: curl alone", curl_s, "s", "HTCondor's curl_plugin", stock_s))
            figures.append(Figure(f"{word} of {what}: pycurl alone", python_s, "s", "HTCondor's curl_plugin", stock_s))
    return figures


if __name__ == "__main__":
    sys.exit(main("curl_stock", measure))
