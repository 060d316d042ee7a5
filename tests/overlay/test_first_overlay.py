"""docs/overlay/tutorial.md: its commands build the overlay that the page describes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
_PORTS = ("9631", "9632", "9633")
_PATIENCE_S = 150
_PROGRAMS = {"stageout": "stageout.cli.main", "stageout-router": "overlay_router.daemon"}


def _shown() -> list[str]:
    """Return the commands of the page, without those that install."""
    page = (ROOT / "docs/overlay/tutorial.md").read_text()
    blocks = [str(block) for block in re.findall(r"^```\n(.*?)^```$", page, re.S | re.M)]
    (stop,) = re.findall(r"`(kill \$archive[^`]*)`", page)
    return [*(block for block in blocks if "venv" not in block), f"{stop}; wait\n"]


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[str]:
    """A folder with the commands, for PATH."""
    for name, module in _PROGRAMS.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        path.chmod(0o755)
    yield str(tmp_path / "bin")


def run(script: str, folder: Path, path: str) -> str:
    """The command's output, with a line for each command that fails."""
    told = f"trap 'echo \"FAILED: $BASH_COMMAND\"' ERR\n{script}"
    started = subprocess.Popen(
        ["bash", "-c", told], cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "PATH": f"{path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}, start_new_session=True,
    )  # fmt: skip
    try:
        return started.communicate(timeout=_PATIENCE_S)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def test_the_commands_shown_make_an_overlay(tmp_path: Path, programs: str) -> None:
    ports = {shown: str(free) for shown, free in zip(_PORTS, free_ports(len(_PORTS)))}
    script = re.sub("|".join(_PORTS), lambda found: ports[found[0]], "".join(_shown()))
    said = run(script, tmp_path, programs)
    failed = [line for line in said.splitlines() if line.startswith("FAILED: ")]
    assert len(failed) == 1 and "stageout get" in failed[0], said
    assert "has a version of 20971520 bytes on its way there" in said
    assert "what became of it: stageout ask" in said
    content = (tmp_path / "first/results.tar").read_bytes()
    for name in ("results", "second", "third", "fourth"):
        assert (tmp_path / f"first/files/alice/{name}.tar").read_bytes() == content
    assert "delivery-failed" in (tmp_path / "first/gateway.log").read_text()
