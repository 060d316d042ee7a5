"""A GridFTP server for the module, and the plugin under the embedded starter."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from stageout.testing.starter import EmbeddedStarter, PluginRun, PluginTable, Wanted, installed
from tests.harness.gridftp import GridFtpServer

PLUGIN = Path(__file__).resolve().parents[2] / "plugins" / "gsiftp_plugin"


@pytest.fixture(scope="module")
def open_folder():
    """A directory that other users may enter; pytest takes that right from its own now and then."""
    with tempfile.TemporaryDirectory(prefix="stageout-gridftp-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def server(open_folder: Path):
    """An anonymous server."""
    with GridFtpServer(open_folder / "anonymous") as running:
        yield running


class Client:
    """The plugin with a scratch directory."""

    def __init__(self, folder: Path) -> None:
        self.scratch = folder / "scratch"
        self.scratch.mkdir()
        self.plugin = installed(PLUGIN, folder)
        # PYTHONPATH: of the checkout that is tested, where it is not the one that is installed
        self.environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}

    def write(self, name: str, data: bytes) -> None:
        (self.scratch / name).write_bytes(data)

    def call(self, files: dict[str, str], upload: bool, **settings: str) -> PluginRun:
        """Move files (name -> URL) in one call."""
        environment = {**self.environment, **settings}
        starter = EmbeddedStarter(self.scratch, PluginTable([self.plugin], environment), {}, {}, None, environment)
        wanted = [Wanted(url, name) for name, url in files.items()]
        (run,) = starter.upload(wanted) if upload else starter.download(wanted)
        return run


@pytest.fixture
def client(tmp_path: Path) -> Client:
    return Client(tmp_path)


def codes(run: PluginRun) -> list[int | None]:
    """Error codes of the result ads, None for success."""
    return [ad["DeveloperData"].get("StageOutErrorCode") for ad in run.ads]
