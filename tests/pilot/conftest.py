"""The single file for pilots, built for the Python that runs the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``stageout-pilot.pyz``."""
    output = tmp_path_factory.mktemp("dist") / "stageout-pilot.pyz"
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    command = [sys.executable, str(ROOT / "tools/pilot/build.py"), "--python", version, str(output)]
    subprocess.run(command, check=True, timeout=300)
    return output
