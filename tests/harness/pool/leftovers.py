"""Pools whose owner died without closing them: found by their state file, ended and removed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.harness.pool import namespace
from tests.harness.pool.node import Node

STATE = "pool.json"
PREFIX = "stageout-pool-"


def record(directory: Path, nodes: Iterable[Node], *, detached: bool) -> None:
    """Write who owns the pool and which processes hold its nodes."""
    owner = os.getpid()
    state = {
        "where": _where(),
        "owner": [owner, namespace.start_time(owner)],
        "detached": detached,
        "nodes": {node.name: [node.pid, node.born, node.spec.user] for node in nodes},
    }
    aside = directory / f".{STATE}"
    aside.write_text(json.dumps(state))
    aside.rename(directory / STATE)


def read(directory: Path) -> dict[str, Any]:
    """State of a pool's directory, empty when there is none."""
    try:
        state: dict[str, Any] = json.loads((directory / STATE).read_text())
    except (OSError, ValueError):
        return {}
    return state


def running() -> dict[Path, dict[str, Any]]:
    """Directories and states of the pools in the temporary directory.

    Those of another PID namespace (a container that shares the directory) are not ours to judge: their pids mean
    nothing here.
    """
    found = {path: read(path) for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*") if path.is_dir()}
    return {path: state for path, state in found.items() if state.get("where") == _where()}


def clean() -> list[Path]:
    """End and remove pools whose owner is dead. A pool that was meant to outlive its owner goes only when it is off."""
    gone = []
    for path, state in running().items():
        alive = (
            any(_alive(pid, born) for pid, born, *_ in state["nodes"].values())
            if state["detached"]
            else _alive(*state["owner"])
        )
        if not alive:
            end(path)
            gone.append(path)
    return gone


def end(directory: Path) -> None:
    """Kill the nodes of a pool and remove its directory."""
    for pid, born, *_ in read(directory).get("nodes", {}).values():
        namespace.kill_namespace(pid, born)
    with contextlib.suppress(OSError):
        shutil.rmtree(directory)


def _alive(pid: int, born: int) -> bool:
    return bool(born) and namespace.start_time(pid) == born


def _where() -> list[str]:
    """Within which a pid and its start time name one process: this boot and this PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return [boot, str(Path("/proc/self/ns/pid").readlink())]
