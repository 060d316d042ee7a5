"""Routers below the condor_master of a pool's nodes."""

from __future__ import annotations

import socket

from tests.harness.pool import Node
from tests.harness.pool.install import find_checkout, fragments
from tests.harness.pool.waiting import wait_until

SECRET = "not-secret-but-long-enough"


def start_router(node: Node, user: str, more: str = "") -> str:
    """Start a router on a node that knows no other. Return its address. :param more: settings."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    [fragment] = [path for path in fragments(find_checkout(), "router") if "-router" in path.stem]
    files = {"router.keys": f"site {SECRET} / router\n", "router.key": f"site {SECRET}\n"}
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
        f"STAGEOUT_ROUTER_USERID = {user}\n{more}",
        name="96-router.conf",
    )
    log = node.log_dir / "StageoutRouterLog"
    wait_until(lambda: log.exists() and " daemon-started " in log.read_text(), what=f"the router of {node.name}")
    return f"127.0.0.1:{port}"


def stop_router(node: Node) -> None:
    """Stop the router of a node."""
    node.run(["condor_off", "-daemon", "STAGEOUT_ROUTER"], check=False)
    wait_until(lambda: not node.pids("stageout-router"), what="the router to stop")
    node.configure("\n", name="96-router.conf")
