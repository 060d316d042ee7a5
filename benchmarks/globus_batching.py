"""The savings of one Globus task for all files of a call over one task per file, in requests and in time.

The service is ``tests.harness.globus`` with three tasks of a user at a time, as the public one; how long a task
takes before its first byte and how far away the service is are assumptions, printed with the figures. Plugin and
process are the same in both cases: the peer gets ``STAGEOUT_GLOBUS_TASK_FILES = 1`` and all three places of the user.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from common import Figure, main

from stageout.core.errors import StageoutError
from stageout.testing.starter import EmbeddedStarter, PluginTable, Wanted, installed
from tests.harness.globus import Emulator

ROOT = Path(__file__).resolve().parents[1]
SETUP_S = 2.0
LATENCY_S = 0.05
FILE_BYTES = 65536
PEER = "one task per file, three at a time"


class Seen(NamedTuple):
    """The time of one upload. :param requests: to the Transfer service."""

    tasks: int
    requests: int
    time_s: float


def upload(files: int, **knobs: str) -> Seen:
    """Upload so many files in one call of the plugin, every byte checked at the other end.

    :param knobs: without the prefix STAGEOUT_GLOBUS_.
    """
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        scratch, creds = folder / "scratch", folder / "creds"
        scratch.mkdir()
        creds.mkdir()
        with Emulator(folder / "globus", setup_s=SETUP_S, latency_s=LATENCY_S) as globus:
            archive, node = globus.collection("archive"), globus.collection("node", folder)
            (creds / "globus.use").write_text(json.dumps(globus.token()))
            knobs = {"TRANSFER_URL": globus.address, "LOCAL": f"{node.id} {folder}=/", **knobs}
            environment = {
                "PATH": os.defpath,
                "PYTHONPATH": str(ROOT),
                "STAGEOUT_MOVER": "1",
                **{f"_CONDOR_STAGEOUT_GLOBUS_{name}": value for name, value in knobs.items()},
            }
            content = {f"f{number}": os.urandom(FILE_BYTES) for number in range(files)}
            for name, data in content.items():
                (scratch / name).write_bytes(data)
            table = PluginTable([installed(ROOT / "plugins" / "globusonline_plugin", folder)], environment)
            starter = EmbeddedStarter(scratch, table, {}, {}, creds, environment)
            began = time.monotonic()
            (run,) = starter.upload([Wanted(f"globus://{archive.id}/out/{name}", name) for name in content])
            took_s = time.monotonic() - began
            if not run.succeeded:
                raise StageoutError(f"the upload failed: {run.printed[-500:]}")
            arrived = {path.name: path.read_bytes() for path in Path(archive.root, "out").iterdir()}
            if arrived != content:
                raise StageoutError("not every byte arrived")
            kinds = Counter(call.partition(" ")[0] for call in globus.calls())
            return Seen(len(globus.tasks), sum(kinds.values()), took_s)


def measure(quick: bool) -> list[Figure]:
    """The figures."""
    files = 24 if quick else 200
    print(f"assumed: {SETUP_S:g} s before a task's first byte, {LATENCY_S * 1000:g} ms for each request; {files} files")
    ours, peer = upload(files), upload(files, TASK_FILES="1", TASKS="3")
    return [
        Figure(f"tasks for {files} files of one call", ours.tasks, "", PEER, peer.tasks, goal=1),
        Figure("requests to the service per file", ours.requests / files, "", PEER, peer.requests / files, goal=1),
        Figure("time until all files are verified", ours.time_s, "s", PEER, peer.time_s, goal=peer.time_s / 5),
    ]


if __name__ == "__main__":
    sys.exit(main("globus_batching", measure))
