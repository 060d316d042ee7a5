"""A wheel and an sdist of the sources as they are, built once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with wheel, sdist and checksums."""
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, str(ROOT / "tools/packages/build.py"), "--out", str(out), "python"]
    subprocess.run(build, check=True, timeout=800, capture_output=True)
    return out
