"""A Globus of our own, a node that one of its collections sees, and the plugin as condor_starter runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stageout.core.classads import ClassAd, unparse_ad
from stageout.core.errors import ErrorClass
from stageout.testing.starter import EmbeddedStarter, PluginRun, PluginTable, Wanted, installed, read_results
from tests.harness.globus import TRANSFER, Emulator
from tests.polling import wait_for

ROOT = Path(__file__).resolve().parents[2]
#: Short, so that failures come soon; each is a documented knob.
QUICK = {"FAULT_PATIENCE": "0.5", "STALL": "1.5", "LEASE": "20"}


class Bench:
    """One node.

    :ivar archive: the collection at the other end. :ivar node: the one that sees this node.
    """

    def __init__(self, globus: Emulator, folder: Path) -> None:
        self.globus = globus
        self.scratch = folder / "scratch"
        self.scratch.mkdir()
        self.creds = folder / "creds"
        self.creds.mkdir()
        self.plugin = installed(ROOT / "plugins" / "globusonline_plugin", folder)
        self.archive = globus.collection("archive")
        self.node = globus.collection("node", folder)
        self.environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
        self.job_ad: dict[str, Any] = {"GlobalJobId": "ap.example#12.0#1700000000"}
        self.set(TRANSFER_URL=globus.address, LOCAL=f"{self.node.id} {folder}=/", **QUICK)
        self.give_token()

    def set(self, **knobs: str) -> None:
        """Set knobs, ``LEASE`` for STAGEOUT_GLOBUS_LEASE."""
        self.environment.update({f"_CONDOR_STAGEOUT_GLOBUS_{name}": value for name, value in knobs.items()})

    def give_token(self, server: str = TRANSFER, name: str = "globus", **how: Any) -> None:
        """Put a new token into the job's credential directory."""
        (self.creds / f"{name}.use").write_text(json.dumps(self.globus.token(server, **how)))

    def url(self, path: str = "") -> str:
        """Address of a path of the archive."""
        return f"globus://{self.archive.id}/{path}"

    def at(self, path: str) -> Path:
        """The same place as a file."""
        return Path(self.archive.root) / path

    def put(self, path: str, data: bytes = b"content") -> None:
        """Make a file in the archive."""
        self.at(path).parent.mkdir(parents=True, exist_ok=True)
        self.at(path).write_bytes(data)

    def starter(self) -> EmbeddedStarter:
        """A starter for the scratch directory."""
        table = PluginTable([self.plugin], self.environment)
        return EmbeddedStarter(self.scratch, table, self.job_ad, {}, self.creds, self.environment)

    def download(self, *names: str) -> PluginRun:
        """Fetch files of the archive under their base names."""
        (run,) = self.starter().download([Wanted(self.url(name), Path(name).name) for name in names])
        return run

    def upload(self, files: dict[str, bytes], url: str | None = None) -> PluginRun:
        """Send these files: path in the archive -> content."""
        wanted = []
        for number, (path, data) in enumerate(files.items()):
            (self.scratch / f"f{number}").write_bytes(data)
            wanted.append(Wanted((url or self.url()) + path, f"f{number}"))
        (run,) = self.starter().upload(wanted)
        return run

    def start(
        self, files: dict[str, bytes], scratch: Path | None = None, only: str | None = None
    ) -> subprocess.Popen[str]:
        """Begin such an upload, or that of one of the files; its results are in :meth:`ads`."""
        scratch = scratch or self.scratch
        requests = []
        for number, (path, data) in enumerate(files.items()):
            if not (scratch / f"f{number}").exists():
                (scratch / f"f{number}").write_bytes(data)
            if only in (None, path):
                requests.append(unparse_ad({"Url": self.url(path), "LocalFileName": str(scratch / f"f{number}")}))
        (scratch / ".in").write_text("".join(requests))
        (scratch / ".out").write_text(" " * 19264)
        command = [sys.executable, str(self.plugin), "-infile", ".in", "-outfile", ".out", "-upload"]
        environment = {**self.environment, "_CONDOR_CREDS": str(self.creds)}
        return subprocess.Popen(command, cwd=scratch, env=environment, stdout=subprocess.DEVNULL, text=True)

    def ads(self) -> list[ClassAd]:
        """Results of :meth:`start`."""
        return read_results((self.scratch / ".out").read_text())[0]

    def until(self, what: str, condition: Callable[[], Any]) -> Any:
        """Wait for something to become true."""
        return wait_for(condition, lambda: f"{what}; {[task.shown() for task in self.globus.tasks]}")


@pytest.fixture
def globus(tmp_path: Path) -> Iterator[Emulator]:
    with Emulator(tmp_path / "globus") as made:
        yield made


@pytest.fixture
def bench(globus: Emulator, tmp_path: Path) -> Bench:
    assert "STAGEOUT_FAULTS" not in os.environ
    return Bench(globus, tmp_path)


def kind(ad: ClassAd) -> ErrorClass:
    """Class of the failure that an ad reports."""
    assert ad["TransferSuccess"] is False, ad
    return ErrorClass.from_code(ad["TransferErrorData"][-1]["ErrorCode"])


def error(run: PluginRun) -> ErrorClass:
    """The same of the only file of a call."""
    (ad,) = run.ads
    return kind(ad)
