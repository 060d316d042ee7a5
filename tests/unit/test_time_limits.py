"""A test that hangs ends with the stacks of all threads, and the others still run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_TESTS = """
import threading
import time

import pytest


@pytest.mark.timeout(1)
def test_hangs():
    threading.Thread(target=time.sleep, args=(3,), name="helper-of-the-test").start()
    threading.Event().wait()


def test_runs():
    pass
"""


def test_hanging_test_fails_with_stacks_of_all_threads(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(_TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(ROOT / "setup.cfg"), "--rootdir", str(tmp_path)]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "1 failed, 1 passed" in done.stdout
    assert "Timeout" in done.stdout
    assert "helper-of-the-test" in done.stdout + done.stderr
    assert "threading.Event().wait()" in done.stdout


def test_unit_tests_and_all_others_have_a_limit(request: pytest.FixtureRequest) -> None:
    marker = request.node.get_closest_marker("timeout")
    assert marker is not None and 0 < marker.args[0] <= 300
    assert 0 < float(request.config.getini("timeout")) <= 900
