"""The guard of conftest.py: what tests leave is found, and what a process opens once fails none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_CONFTEST = """
from pathlib import Path

from tests.unit import conftest
from tests.unit.conftest import _nothing_stays_open, pytest_runtest_protocol

conftest._HERE, conftest._FIRST_PATIENCE_S, conftest._PATIENCE_S = Path(__file__).parent, 0.1, 0.1
"""
_TESTS = """
import functools, os, threading

import pytest

kept = []
once = functools.lru_cache(lambda: os.open("/dev/null", os.O_RDONLY))

def test_opens_what_stays_for_the_process():
    once()

def test_leaves_garbage():
    ring = [open("/dev/null")]
    ring.append(ring)

def test_leaves_a_descriptor():
    kept.append(open("/dev/zero"))

def test_leaves_a_thread():
    threading.Thread(target=threading.Event().wait, name="lingers", daemon=True).start()

def test_is_wrong_and_leaves_some():
    kept.append(open("/dev/zero"))
    assert False, "its own fault"

@pytest.fixture(scope="module")
def shared():
    with open("/dev/null") as file:
        yield file

def test_uses_what_is_shared(shared, tmp_path):
    (tmp_path / "made").write_text("once for each run")
    assert not shared.closed
"""


def test_a_test_that_leaves_something_each_time_fails(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    (tmp_path / "test_some.py").write_text(_TESTS)
    (tmp_path / "pytest.ini").touch()
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-p", "no:xdist", tmp_path]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    said = dict(reversed(line.split(" - ")[0].split(" ", 1)) for line in ran.stdout.splitlines() if "::test_" in line)
    errors = {name.partition("::")[2] for name, word in said.items() if word == "ERROR"}
    assert errors == {"test_leaves_a_descriptor", "test_leaves_a_thread"}, ran.stdout
    assert [name.partition("::")[2] for name, word in said.items() if word == "FAILED"] == [
        "test_is_wrong_and_leaves_some"
    ]
    assert "/dev/zero" in ran.stdout and "the thread lingers" in ran.stdout
    assert "1 failed, 5 passed, 2 errors" in ran.stdout
