"""The wide-area link carries what is sent, both ways, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.wide_area import Link, WideArea

_SERVER = """
import socket, sys
listener = socket.create_server((sys.argv[1], 7000))
print("listening", flush=True)
peer, _ = listener.accept()
data = b""
while len(data) < 3_000_000:
    data += peer.recv(1 << 20)
peer.sendall(data[::-1])
"""
_CLIENT = """
import os, socket, sys
peer = socket.create_connection((sys.argv[1], 7000))
sent, back = os.urandom(3_000_000), b""
peer.sendall(sent)
while piece := peer.recv(1 << 20):
    back += piece
sys.exit(back[::-1] != sent)
"""


@pytest.mark.pool
@pytest.mark.parametrize("link", [Link(50e6, 0.02), Link(50e6, 0.01, loss=0.02, window_bytes=64 << 10)])
def test_bytes_go_there_and_back(link: Link) -> None:
    if os.geteuid() != 0:
        pytest.fail("needs root: network namespaces")
    with WideArea(link) as area:
        far = [*area.far, sys.executable, "-c", _SERVER, area.far_address]
        server = subprocess.Popen(far, stdout=subprocess.PIPE)
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"listening\n"
            near = [*area.near, sys.executable, "-c", _CLIENT, area.far_address]
            assert subprocess.run(near, timeout=120, check=False).returncode == 0
        finally:
            server.kill()
            server.wait()
    assert not Path(f"/run/netns/{area.name}n").exists()
    assert not Path(f"/etc/netns/{area.name}n").exists()
