"""Links that are cut and disks that are full, as the storm has them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.pool.outages import SmallDisk

pytestmark = pytest.mark.pool

_ROOT = Path(__file__).resolve().parents[2]
#: Prints for each moment what comes through an open connection, and whether a new one can be made in either direction.
_PROGRAM = """
import socket
from tests.harness.pool.outages import Link, enter_own_network

def reach(source, target):
    with socket.socket() as new:
        new.settimeout(0.5)
        try:
            new.bind((source, 0))
            new.connect(target)
        except TimeoutError:
            return "silence"
        return "reached"

enter_own_network()
link, other, ap = Link(1), Link(2), "127.0.0.1"
servers = {address: socket.create_server((address, 7000)) for address in (ap, link.address)}
node = socket.create_connection((ap, 7000), source_address=(link.address, 0))
accepted, _ = servers[ap].accept()
accepted.settimeout(0.5)
for moment in ("before", "cut", "after"):
    if moment != "before":
        link.cut() if moment == "cut" else link.mend()
    if moment == "after":
        accepted.settimeout(30)  # the kernel repeats bytes ever more seldom
    node.sendall(moment[:1].encode())
    try:
        got = accepted.recv(1).decode()
    except TimeoutError:
        got = "silence"
    print(moment, got, reach(link.address, (ap, 7000)), reach(ap, (link.address, 7000)),
          reach(link.address, (link.address, 7000)), reach(other.address, (ap, 7000)))
"""


def test_packets_over_a_link_that_is_cut_vanish() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], cwd=_ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["before", "b", "reached", "reached", "reached", "reached"],
        ["cut", "silence", "silence", "silence", "reached", "reached"],
        ["after", "c", "reached", "reached", "reached", "reached"],
    ]


def test_a_small_disk_is_full_until_it_is_relieved(tmp_path: Path) -> None:
    disk = SmallDisk(tmp_path / "disk", 4, (0, 0))
    disk.mount()
    try:
        disk.fill(0)
        with pytest.raises(OSError) as raised:
            (disk.place / "more").write_bytes(bytes(8192))
        assert raised.value.errno == errno.ENOSPC
        (disk.place / "more").unlink()
        disk.fill(1 << 20)
        assert 0.9 * (1 << 20) < os.statvfs(disk.place).f_bavail * os.statvfs(disk.place).f_frsize <= 1 << 20
        disk.relieve()
        (disk.place / "more").write_bytes(bytes(2 << 20))
        disk.replace()
        assert [path.name for path in disk.place.iterdir()] == ["execute"]
    finally:
        disk.unmount()
