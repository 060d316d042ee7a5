"""Daemons and plugins without the Python packages of their extra, as in a bare wheel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stageout import __version__
from stageout.daemon import EXIT_NO_RESTART

ROOT = Path(__file__).resolve().parents[2]
_DAEMONS = [("stageout_web", "web", "-t"), ("policy_service", "policy", "--alone")]
_BLOCKED = """
import importlib, sys
for name in ("aiohttp", "prometheus_client", "pydantic", "globus_sdk", "crc32c", "xxhash"):
    sys.modules[name] = None
sys.exit(importlib.import_module(sys.argv[1] + ".daemon").main(sys.argv[2:]))
"""


def _run(module: str, argument: str, settings: Path) -> subprocess.CompletedProcess[str]:
    own = {"PYTHONPATH": str(ROOT), "CONDOR_CONFIG": str(settings), "_CONDOR_STAGEOUT_WEB_DIR": str(settings.parent)}
    command = [sys.executable, "-c", _BLOCKED, module, argument]
    return subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(("module", "extra", "argument"), _DAEMONS)
def test_a_missing_extra_is_named(module: str, extra: str, argument: str, tmp_path: Path) -> None:
    settings = tmp_path / "condor_config"
    settings.write_text(f"LOG = {tmp_path}\n")
    ended = _run(module, argument, settings)
    assert f"the Python package aiohttp is not installed: pip install 'stageout[{extra}]'" in ended.stderr
    assert "Traceback" not in ended.stderr and ended.returncode == EXIT_NO_RESTART


@pytest.mark.parametrize(("module", "extra", "argument"), _DAEMONS)
def test_the_version_needs_no_extra(module: str, extra: str, argument: str, tmp_path: Path) -> None:
    assert _run(module, "--version", tmp_path / "none").stdout.endswith(f" {__version__}\n")


def test_a_plugin_names_its_missing_extra(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['globus_sdk'] = None\n")
    (tmp_path / "a").write_text("x")
    (tmp_path / "in").write_text(f'[ LocalFileName = "{tmp_path}/a"; Url = "globusonline://c/a" ]\n')
    plugin = str(ROOT / "plugins/globusonline_plugin")
    command = [sys.executable, plugin, "-infile", f"{tmp_path}/in", "-outfile", f"{tmp_path}/out", "-upload"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "_CONDOR_SCRATCH_DIR": str(tmp_path)}
    subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False)
    text = (tmp_path / "out").read_text()
    assert "the Python package globus_sdk is not installed: pip install 'stageout[globus]'" in text
    assert "ModuleNotFoundError" not in text
