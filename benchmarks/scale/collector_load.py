"""Processor time that the messages of a whole pool cost its collector."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from common import Figure

from tests.harness.pool import Pool

_PROGRAM = Path(__file__).with_name("collector_program.py")


def measure(quick: bool) -> list[Figure]:
    """Put the ads of the pool's slots into a real collector and send it what managers and an agent send."""
    nodes, seconds = (100, 20) if quick else (1000, 60)
    with tempfile.TemporaryDirectory(prefix="stageout-collector-") as name:
        home = Path(name)
        shutil.copy(_PROGRAM, home)
        home.chmod(0o777)
        quiet = "NEGOTIATOR_INTERVAL = 86400\n"  # its own looks at all slots are not what is measured
        with Pool(agent=False, manager=False, execute_points=0, binds=(home,), ap_config=quiet) as pool:
            command = ["/opt/stageout/bin/python", str(home / _PROGRAM.name), str(nodes), str(seconds)]
            done = pool.ap.run(command, user="condor", cwd="/", timeout_s=900)
    found: dict[str, float]
    found, unchanged = json.loads(done.stdout.splitlines()[-1])
    where = f"collector with {nodes:,} nodes x 32 slots"
    total = sum(found.values())
    return [
        Figure(f"{where}: part of one core for all stage-out", 100 * total, "%", goal=None if quick else 5.0),
        *(Figure(f"{where}: {what}", 100 * share, "%") for what, share in {**found, **unchanged}.items()),
    ]
