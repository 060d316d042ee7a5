"""The disk that tests take away goes also from mount namespaces of others."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.pool.waiting import wait_until
from tests.overlay.loop_disk import LoopDisk, loop_disk, needs_loop_disk

pytestmark = needs_loop_disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[LoopDisk]:
    with loop_disk(tmp_path / "image", tmp_path / "disk") as disk:
        yield disk


def test_disk_goes_from_all_mount_namespaces(disk: LoopDisk) -> None:
    """A pool that starts meanwhile has a mount namespace with a copy of every mount."""
    (disk.place / "file").write_text("kept")
    with subprocess.Popen(["unshare", "-m", "--propagation", "private", "sleep", "60"]) as other:
        try:
            mounts = Path(f"/proc/{other.pid}/mountinfo")
            here = Path("/proc/self/ns/mnt").readlink()
            wait_until(lambda: Path(f"/proc/{other.pid}/ns/mnt").readlink() != here, what="the other namespace")
            assert str(disk.place) in mounts.read_text()
            disk.unmount()
            assert str(disk.place) not in mounts.read_text()
            disk.mount()
        finally:
            other.kill()
    assert (disk.place / "file").read_text() == "kept"
