"""Routers below condor_master find each other through the collector."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from stageout.cli.main import main
from tests.harness.pool import Node
from tests.harness.pool.install import find_checkout, fragments
from tests.harness.pool.waiting import wait_until
from tests.pool.conftest import Site

pytestmark = pytest.mark.pool

_SECRET = "not-secret-but-long-enough"
_DAEMON = "STAGEOUT_ROUTER"


def _start(node: Node, user: str) -> str:
    """A router on a node that knows no other; its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    [fragment] = [path for path in fragments(find_checkout(), "router") if "-router" in path.stem]
    files = {"router.keys": f"site {_SECRET} / router\n", "router.key": f"site {_SECRET}\n"}
    for name, text in files.items():
        path = node.home / name
        node.run(["sh", "-c", f"umask 077; cat > {path}; chown condor {path}"], stdin=text)
    node.run(["sh", "-c", f"mkdir -p {node.home}/incoming && chown condor {node.home}/incoming"])
    node.configure(
        f"{fragment.read_text()}\nSTAGEOUT_BIN = /opt/stageout/bin\nSTAGEOUT_ROUTER_INTERVAL = 0.5\n"
        f"STAGEOUT_ROUTER_HOST = 127.0.0.1\nSTAGEOUT_ROUTER_PORT = {port}\n"
        f"STAGEOUT_ROUTER_ADDRESS = 127.0.0.1:{port}\nSTAGEOUT_ROUTER_NEIGHBOURS = collector\n"
        f"STAGEOUT_ROUTER_ROOT = {node.home}/incoming\nSTAGEOUT_ROUTER_KEYS = {node.home}/router.keys\n"
        f"STAGEOUT_ROUTER_KEY = {node.home}/router.key\n"
        f"STAGEOUT_ROUTER_USERID = {user}\n",
        name="96-router.conf",
    )
    log = node.log_dir / "StageoutRouterLog"
    wait_until(lambda: log.exists() and " daemon-started " in log.read_text(), what=f"the router of {node.name}")
    return f"127.0.0.1:{port}"


def _stop(node: Node) -> None:
    node.run(["condor_off", "-daemon", _DAEMON], check=False)
    wait_until(lambda: not node.pids("stageout-router"), what="the router to stop")
    node.configure("\n", name="96-router.conf")


def test_routers_of_a_pool_become_neighbours(site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [site.pool.eps[0], site.pool.ap]
    key = tmp_path / "key"
    key.write_text(f"site {_SECRET}\n")
    try:
        first = _start(nodes[0], "root")  # the token for the collector is root's there
        second = _start(nodes[1], "condor")

        def linked() -> bool:
            assert main(["routes", second, first, "--key", str(key)]) == 0
            lines = [line.split() for line in capsys.readouterr().out.splitlines()]
            return [first, "yes", "direct"] in [words[:3] for words in lines]

        wait_until(linked, timeout_s=60, what="a measured link from the second to the first")
    finally:
        for node in nodes:
            _stop(node)
