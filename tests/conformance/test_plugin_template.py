"""The plugin that ``stageout plugin new`` writes works as it is: conformance, its own test, installation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from stageout.cli.main import main
from stageout.testing.conformance import check, failures, table
from stageout.testing.endpoints import Endpoint
from stageout.testing.starter import EmbeddedStarter, PluginTable, Wanted, installed

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """The directory of a new plugin named "tape"."""
    folder = tmp_path / "tape_plugin"
    assert main(["plugin", "new", "tape", "--directory", str(folder)]) == 0
    return folder


def _python(*words: str, folder: Path) -> None:
    # The plugin finds stageout where it is installed: nothing of this checkout is in its path.
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_commands_of_the_page_work(tmp_path: Path) -> None:
    """The page writes a plugin, runs its test, and examines it with the suite."""
    page = (ROOT / "docs/plugin/write.md").read_text()
    blocks = re.findall(r"^```console\n(.*?)^```$", page, re.S | re.M)
    commands = [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    assert "python3 -m pytest" in commands
    commands = [line.replace("/opt/stageout/bin/python", sys.executable) for line in commands]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTEST_ADDOPTS": "-q -p no:cacheprovider"}
    done = subprocess.run(
        ["sh", "-ex", "-c", "\n".join(commands)], cwd=tmp_path, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert re.search(r"^\d+ passed, 0 failed", done.stdout, re.M)


def test_installed_by_pip_it_conforms(plugin: Path, tmp_path: Path) -> None:
    where = tmp_path / "prefix"
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--prefix", str(where)]
    _python("-m", "pip", "install", "-q", *options, str(plugin), folder=tmp_path)
    names = {"base": str(where), "platbase": str(where)}
    scripts, modules = (Path(sysconfig.get_path(kind, vars=names)) for kind in ("scripts", "purelib"))
    executable = scripts / "tape_plugin"
    assert executable.read_text().startswith(f"#!{sys.executable}\n")
    (scripts / "tape_protocol.py").write_text((modules / "tape_protocol.py").read_text())
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / ".tape").touch()
    findings = check(executable, Endpoint(f"tape://{folder}", folder))
    assert failures(findings) == [], table(findings)
    assert {item.rule for item in findings if item.outcome == "n/a"} <= {"killed", "nameless-node"}


def test_as_written_it_takes_nothing_where_no_storage_is_mounted(plugin: Path, tmp_path: Path) -> None:
    folder, scratch = tmp_path / "files", tmp_path / "scratch"
    folder.mkdir()
    scratch.mkdir()
    executable = installed(plugin / "tape_plugin", scratch)
    (scratch / "tape_protocol.py").write_text((plugin / "tape_protocol.py").read_text())
    (scratch / "file").write_text("12345")
    starter = EmbeddedStarter(scratch, PluginTable([executable]))
    (run,) = starter.upload([Wanted(f"tape://{folder}/new/file", "file")])
    assert not run.succeeded
    assert "no directory above it has .tape" in run.ads[0].text("TransferError")
    assert not list(folder.iterdir())


@pytest.mark.parametrize("name", ["s3-fast", "a.b", "Tape", "3d", "", "tape\n"])
def test_a_name_that_is_no_method_is_refused(name: str, tmp_path: Path) -> None:
    assert main(["plugin", "new", name, "--directory", str(tmp_path / "x")]) == 64
    assert not (tmp_path / "x").exists()


def test_nothing_is_overwritten(plugin: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (plugin / "tape_protocol.py").write_text("mine")
    assert main(["plugin", "new", "tape", "--directory", str(plugin)]) == 1
    assert "is not empty" in capsys.readouterr().err
    assert (plugin / "tape_protocol.py").read_text() == "mine"
