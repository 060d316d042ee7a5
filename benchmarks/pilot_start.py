"""How long a plugin takes to start from the single file for pilots, beside the installed one. Goal: 10 ms more at most.

The file is built here, for the interpreter that runs this, so pip must reach an index. All commands alternate.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from common import Figure, main

from stageout.testing.starter import installed

ROOT = Path(__file__).resolve().parents[1]
MORE_MS = 10.0


def measure(quick: bool) -> list[Figure]:
    """The figures."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        pyz = home / "stageout-pilot.pyz"
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        build = [sys.executable, ROOT / "tools/pilot/build.py", "--python", version, pyz]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
        link = home / "bin" / "stageout_curl_plugin"
        cold_ms = min(_cold_ms(pyz, link) for _ in range(2 if quick else 5))
        commands: dict[str, Sequence[str | Path]] = {
            "interpreter": [sys.executable, "-c", "pass"],
            "installed": [sys.executable, installed(ROOT / "plugins" / "stageout_curl_plugin", home), "-classad"],
            "file": [sys.executable, link, "-classad"],
        }
        best = best_ms(commands, 30 if quick else 150)
    goal_ms = best["installed"] + MORE_MS
    return [
        Figure("single file: -classad, best", best["file"], "ms", "installed", best["installed"], goal_ms),
        Figure("the interpreter alone, best", best["interpreter"], "ms"),
        Figure("single file: first start, which unpacks, best", cold_ms, "ms"),
    ]


def best_ms(commands: Mapping[str, Sequence[str | Path]], rounds: int) -> dict[str, float]:
    """Least wall time of each command, run in turn: what else the machine does only adds to it."""
    best = dict.fromkeys(commands, float("inf"))
    for _ in range(rounds):
        for name, command in commands.items():
            started = time.perf_counter()
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            best[name] = min(best[name], (time.perf_counter() - started) * 1000)
    return best


def _cold_ms(pyz: Path, link: Path) -> float:
    shutil.rmtree(pyz.parent / ".stageout-pilot", ignore_errors=True)
    started = time.perf_counter()
    subprocess.run([sys.executable, pyz, "links", link.parent], check=True)
    return (time.perf_counter() - started) * 1000


if __name__ == "__main__":
    sys.exit(main("pilot_start", measure))
