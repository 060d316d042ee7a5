"""One schedd agent: how fast it edits a real schedd's jobs, and what it makes of many nodes in a real collector."""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from pathlib import Path

from common import Figure

from tests.harness.pool import Pool

_PROGRAM = Path(__file__).with_name("agent_program.py")


def measure(quick: bool) -> list[Figure]:
    """Run it all, on a pool whose own agent is off."""
    jobs, nodes, each, rounds = (50, 30, 33, 3) if quick else (500, 300, 34, 20)
    with tempfile.TemporaryDirectory(prefix="stageout-scale-") as name:
        home = Path(name)
        shutil.copy(_PROGRAM, home)
        home.chmod(0o777)
        with Pool(agent=False, binds=(home,), ap_config="MAX_JOBS_SUBMITTED = 100000\n") as pool:
            rate = _edit_rate(pool, home, jobs)
            seen = _run(pool, home, "view", str(nodes), str(each), str(rounds), str(home))
    where = f"one agent, {nodes * each} sandboxes on {nodes} nodes"
    return [
        Figure(f"agent: edits of {jobs} jobs' progress (6 to 8 attributes each)", rate, "edits/s"),
        Figure(f"{where}: end of a run to its order at the node, median", statistics.median(seen["confirm_s"]), "s",
               goal=10.0),
        Figure(f"{where}: the slowest of {rounds}", max(seen["confirm_s"]), "s"),
        Figure(f"{where}: one pass, median", statistics.median(seen["passes_s"]), "s"),
        Figure("a manager's question for orders in that collector, median", statistics.median(seen["ask_s"]), "s"),
    ]  # fmt: skip


def _edit_rate(pool: Pool, home: Path, jobs: int) -> float:
    lines = ["executable = /bin/true", "hold = true", "output_destination = http://127.0.0.1/x", f"queue {jobs}"]
    submitted = pool.submit("alice", "\n".join(lines))
    return float(_run(pool, home, "edits", str(submitted.cluster))["edits_per_s"])


def _run(pool: Pool, home: Path, *arguments: str) -> dict[str, list[float]]:
    command = ["/opt/stageout/bin/python", str(home / _PROGRAM.name), *arguments]
    done = pool.ap.run(command, user="condor", cwd="/", timeout_s=900)
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found
