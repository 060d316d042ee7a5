"""How fast stageout_curl_plugin moves files beside HTCondor's own curl_plugin.

Both run as condor_starter runs them, on the same files and the same nginx on the loopback interface, in pairs: one
after the other, and the order changes from pair to pair. A figure is the median of the ratios of the pairs. The server
shows the clients' own cost: a slower network hides the difference.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
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


class Pair:
    """Both plugins, and one directory of files at both ends."""

    def __init__(self, home: Path, server: Destination, plugins: Sequence[Path]) -> None:
        self.scratch = home / "scratch"
        self.scratch.mkdir()
        self._server = server
        self._plugins = list(plugins)
        self._starters = [
            EmbeddedStarter(self.scratch, PluginTable([plugin]), environment=clean_environment()) for plugin in plugins
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
        """Seconds of both plugins, pair by pair."""
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


def measure(quick: bool) -> list[Figure]:
    """The figures: medians of the ratios of pairs have the goal, and the seconds stand beside."""
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
    return figures


if __name__ == "__main__":
    sys.exit(main("curl_stock", measure))
