"""The scripted plugin under the embedded starter, for tests that look at one call of it from outside."""

import os
import subprocess
from pathlib import Path

from stageout.core.classads import unparse_ad
from stageout.testing.starter import PREALLOCATED_BYTES, EmbeddedStarter, PluginTable, Wanted, installed, read_results

ROOT = Path(__file__).resolve().parents[2]
SCRIPTED = ROOT / "tests" / "scripted_plugin"
DEADLINE_S = 30


class Bench:
    """The scripted plugin, a scratch directory and an environment."""

    def __init__(self, folder: Path) -> None:
        self.scratch = folder / "scratch"
        self.scratch.mkdir()
        self.plugin = installed(SCRIPTED, folder)
        self.environment = {"PATH": os.defpath, "PYTHONPATH": str(ROOT)}
        self.job_ad: dict = {}
        self.machine_ad: dict = {}
        self.job_environment: dict = {}
        self.credentials = None
        self.lifetime_s = 60.0

    def starter(self) -> EmbeddedStarter:
        return EmbeddedStarter(
            self.scratch,
            PluginTable([self.plugin], self.environment),
            self.job_ad,
            self.machine_ad,
            self.credentials,
            self.environment,
            self.job_environment,
            self.lifetime_s,
        )

    def download(self, *behaviours: str):
        wanted = [Wanted(f"script://host/{what}", f"f{index}") for index, what in enumerate(behaviours)]
        (run,) = self.starter().download(wanted)
        return run

    def upload(self, *behaviours: str):
        wanted = []
        for index, what in enumerate(behaviours):
            (self.scratch / f"f{index}").write_bytes(b"12345")
            wanted.append(Wanted(f"script://host/{what}", f"f{index}"))
        (run,) = self.starter().upload(wanted)
        return run

    def start(self, *behaviours: str, wrapper: tuple = ()):
        """Start without waiting; results are read with :meth:`ads`."""
        ads = [
            {"Url": f"script://host/{w}", "LocalFileName": str(self.scratch / f"f{i}")}
            for i, w in enumerate(behaviours)
        ]
        (self.scratch / "in").write_text("".join(map(unparse_ad, ads)))
        (self.scratch / "out").write_text(" " * PREALLOCATED_BYTES)
        arguments = [*wrapper, self.plugin, "-infile", self.scratch / "in", "-outfile", self.scratch / "out"]
        return subprocess.Popen(arguments, cwd=self.scratch, env=self.environment, stderr=subprocess.PIPE, text=True)

    def ads(self):
        return read_results((self.scratch / "out").read_text())
