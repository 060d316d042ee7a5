"""How long ``-classad`` takes, which HTCondor asks for every job: our plugins beside a stock Python plugin.

All run under this interpreter, alternating. The cost of an interpreter alone stands beside it.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from common import Figure, main

from stageout.core.errors import StageoutError
from stageout.testing.starter import PluginError, installed, query
from tests.harness.pool.image import cache_root

ROOT = Path(__file__).resolve().parents[1]
GOAL_MS = 60.0
STOCK = "usr/libexec/condor/box_plugin.py"


def stock_plugin() -> Path | None:
    """The box plugin of this machine's HTCondor, or of a cached pool image; None when there is neither."""
    for path in [Path("/") / STOCK, *sorted(cache_root().glob(f"*/root-*/{STOCK}"), reverse=True)]:
        if path.is_file() and subprocess.run([sys.executable, path, "-classad"], capture_output=True).returncode == 0:
            return path
    return None


def medians_ms(commands: Mapping[str, Sequence[str | Path]], rounds: int) -> dict[str, float]:
    """Median wall time of each command, run in turn."""
    times_ms: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            started = time.perf_counter()
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            times_ms[name].append((time.perf_counter() - started) * 1000)
    return {name: statistics.median(values) for name, values in times_ms.items()}


def measure(quick: bool) -> list[Figure]:
    """The figures."""
    stock = stock_plugin()
    if stock is None:
        print("no stock box_plugin.py here: start a pool once, or install HTCondor; measured without a peer")
    with tempfile.TemporaryDirectory() as folder:
        commands: dict[str, Sequence[str | Path]] = {"interpreter": [sys.executable, "-c", "pass"]}
        for plugin in (ROOT / "plugins" / "stageout_curl_plugin", ROOT / "examples" / "mounted_plugin"):
            copy = installed(plugin, Path(folder))
            require_answer(copy)
            commands[plugin.name] = [copy, "-classad"]
        if stock:
            commands["stock"] = [sys.executable, stock, "-classad"]
        medians = medians_ms(commands, 15 if quick else 61)
    peer, peer_ms = ("stock box_plugin.py", medians["stock"]) if stock else ("", None)
    return [
        Figure("stageout_curl_plugin -classad, median", medians["stageout_curl_plugin"], "ms", peer, peer_ms, GOAL_MS),
        Figure("single-file example plugin -classad, median", medians["mounted_plugin"], "ms", peer, peer_ms),
        Figure("the interpreter alone, median", medians["interpreter"], "ms"),
    ]


def require_answer(plugin: Path) -> None:
    """A plugin that answers nothing is quick; that is not measured."""
    try:
        query(plugin)
    except PluginError as problem:
        raise StageoutError(str(problem)) from None


if __name__ == "__main__":
    sys.exit(main("classad_query", measure))
