"""Logs of the processes that daemons start have the form of the daemon's log."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from stageout.core import log
from stageout.core.children import MOVER_MARK, module_command
from tests.polling import DEADLINE_S

CHILDREN = (
    "overlay_router.copying.copyist", "overlay_router.custodians.carrier", "overlay_router.custodians.pack_carrier",
    "overlay_router.data.worker", "overlay_router.delivery.guard",
)  # fmt: skip


@pytest.fixture(params=[True, False], ids=["json", "text"])
def is_json(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A daemon's log is open; its children are to write theirs alike."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    log.open_log(logging.FileHandler(tmp_path / "Log"), is_json=request.param)
    return bool(request.param)


def check(text: str, event: str, is_json: bool) -> None:
    (line,) = text.splitlines()
    if is_json:
        assert json.loads(line)["event"] == event
    else:
        assert line.split()[2] == event


def test_a_worker_writes_what_its_router_writes(is_json: bool) -> None:
    mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with other:
        worker = subprocess.Popen(
            [sys.executable, "-m", "overlay_router.data.worker", str(other.fileno())], stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE, pass_fds=[other.fileno()], env=os.environ, text=True,
        )  # fmt: skip
    mine.close()
    check(worker.communicate(timeout=DEADLINE_S)[1], "worker-stopped", is_json)


def test_a_guard_writes_what_its_router_writes(is_json: bool, tmp_path: Path) -> None:
    command = module_command("overlay_router.delivery.guard", str(tmp_path))
    with subprocess.Popen(["sleep", "600"], env={**os.environ, MOVER_MARK: str(tmp_path)}) as plugin:
        try:
            ended = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE_S,
                env=os.environ, check=True,
            )  # fmt: skip
            assert plugin.wait(DEADLINE_S) == -signal.SIGKILL
        finally:
            plugin.kill()
    check(ended.stderr, "egress-lease-expired", is_json)


@pytest.mark.parametrize("module", CHILDREN)
def test_every_process_of_a_router_opens_its_log(module: str) -> None:
    """Modules without events of their own use modules that write some."""
    assert (
        "log.open_child_log()" in (Path(__file__).parents[2] / module.replace(".", "/")).with_suffix(".py").read_text()
    )
