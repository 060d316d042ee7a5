"""The cost of the web page in a large pool: memory, processor time, answers, and load on the collector."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

from common import Figure, main

from tests.harness.pool import Pool

_PROGRAM = Path(__file__).parent / "scale" / "web_program.py"


def measure(quick: bool) -> list[Figure]:
    """Put the reports of all nodes into a real collector and show them."""
    nodes, each, seconds = (1000, 10, 20) if quick else (10_000, 10, 60)
    with tempfile.TemporaryDirectory(prefix="stageout-web-") as name:
        home = Path(name)
        shutil.copy(_PROGRAM, home)
        home.chmod(0o777)
        with Pool(agent=False, manager=False, execute_points=0, binds=(home,)) as pool:
            command = ["/opt/stageout/bin/python", str(home / _PROGRAM.name), *map(str, (nodes, each, seconds)), name]
            done = pool.ap.run(command, user="condor", cwd="/", timeout_s=1200)
    found = json.loads(done.stdout.splitlines()[-1])
    where = f"{nodes:,} nodes, {nodes * each:,} sandboxes"
    return [
        Figure(f"{where}: memory of the page and its children", found["memory_mb"], "MB", goal=250.0),
        Figure(f"{where}: part of one core for the collector", 100 * found["collector"], "%", goal=2.0),
        Figure("the collector without the page", 100 * found["without"], "%"),
        Figure(f"{where}: part of one core for the page", 100 * found["processor"], "%"),
        Figure("start of the daemon to the first figures", found["ready_s"], "s"),
        *(Figure(f"answer of the view {view}", 1000 * took_s, "ms", goal=2000.0)
          for view, took_s in found["views"].items()),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main("web_page", measure))
