"""A job whose scratch directory is another filesystem than the spool, as with STARTD_ENFORCE_DISK_LIMITS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.harness.pool import Node
from tests.pool.conftest import wait_until_acquainted

pytestmark = pytest.mark.pool

#: Puts what is in a scratch directory on a filesystem that is mounted there.
_OWN_FILESYSTEM = """
mkdir /tmp/own && mount -t tmpfs -o size=400m tmpfs /tmp/own
cp -a "$1/." /tmp/own/ && chown --reference="$1" /tmp/own && chmod --reference="$1" /tmp/own
mount --move /tmp/own "$1" && rmdir /tmp/own
"""
#: HTCondor cannot remove a directory at which something is mounted.
_CLEAN = """
for place in "$1"/dir_*/scratch; do
    if mountpoint -q "$place"; then umount -l "$place" && rm -rf "${place%/*}"; fi
done
if mountpoint -q "$2"; then umount -l "$2"; fi
"""


@pytest.fixture
def node(site: Any) -> Iterator[Node]:
    """The first execute point. The filesystem that a test has mounted there is unmounted, and the manager started
    again."""
    ep: Node = site.pool.eps[0]
    yield ep
    stop_manager(site, ep)
    ep.run(["sh", "-c", _CLEAN, "sh", str(ep.execute_dir), str(ep.home / "stageout")])
    ep.run(["condor_on", "-subsystem", "SANDBOX_MANAGER"])
    wait_until_acquainted(site.pool)


def stop_manager(site: Any, ep: Node) -> None:
    ep.run(["condor_off", "-subsystem", "SANDBOX_MANAGER"])
    site.pool.wait(lambda: not ep.pids("sandbox-manager"), what="the manager to stop")


@pytest.fixture
def submit(site: Any, node: Node) -> Callable[[str, int], Any]:
    """Submit a job to that node, and let its scratch directory be a filesystem of its own when it has written."""

    def run(gate: str, size_bytes: int) -> Any:
        machine = next(ad["Machine"] for ad in site.pool.startd_ads() if node.name in ad["Machine"])
        site.close_gate(gate, "before")
        job = site.submit(
            outputs=("out1",),
            env=f"SIZE={size_bytes}",
            place=f"gate-{gate}",
            extra=f'requirements = Machine == "{machine}"',
        )
        site.pool.wait(lambda: site.at_gate(gate, "before"), timeout_s=120, what="the plugin to be called")
        (scratch,) = [path.parent for path in node.execute_dir.glob("dir_*/scratch/out1")]
        node.run(["sh", "-ec", _OWN_FILESYSTEM, "sh", str(scratch)])
        site.open_gate(gate, "before")
        return job

    return run


def test_output_is_copied_and_delivered(site: Any, node: Node, submit: Callable[[str, int], Any]) -> None:
    site.destination.pause()
    job = submit("copied", 5_000_000)
    site.pool.wait_status(job, "Completed", timeout_s=120)
    site.destination.resume()
    assert site.wait_left(job, timeout_s=120)["StageOutState"] == "Delivered"
    site.check_delivered(job, "gate-copied")
    assert " output-copied " in node.log("SandboxManagerLog")
    doctor = node.run(["/opt/stageout/bin/stageout", "doctor"], check=False).stdout
    assert "jobs' directories are other filesystems than the spool" in doctor


def test_output_that_has_no_room_is_sent_at_once(site: Any, node: Node, submit: Callable[[str, int], Any]) -> None:
    stop_manager(site, node)
    spool = node.home / "stageout"
    # Below 64 MB of free space START lets no job in, and the copy leaves 16 MB free.
    node.run(["mount", "-t", "tmpfs", "-o", "size=250m,mode=0711", "tmpfs", str(spool)])
    node.configure("STAGEOUT_SPOOL_QUOTA_MB = 1000\nSTAGEOUT_OWNER_QUOTA_MB = 1000\n")
    node.run(["condor_on", "-subsystem", "SANDBOX_MANAGER"])
    wait_until_acquainted(site.pool)
    try:
        job = submit("no-room", 250_000_000)
        history = site.wait_left(job, timeout_s=120)
    finally:
        node.configure("")
    assert history["JobStatus"] == 4
    site.check_delivered(job, "gate-no-room")
    (result,) = site.epoch_results(job)
    assert "copy of 250 MB has no room" in result["DeveloperData"]["StageOutSynchronous"]
    assert not list((node.root / str(spool).lstrip("/")).glob("intake/*"))
