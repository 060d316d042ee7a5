"""The collector stands still and comes back, and the disk of an execute point fills: what the queue and START say."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.pool import Node
from tests.harness.pool.waiting import wait_until

pytestmark = pytest.mark.pool

_SLOW_DOOR = 'to="slot ads"'


@pytest.fixture
def collector(site: Any) -> Iterator[int]:
    """Its process; it runs again in the end."""
    (pid,) = site.pool.ap.pids("collector")
    yield pid
    os.kill(pid, signal.SIGCONT)


def test_the_queue_tells_the_truth_as_soon_as_the_collector_is_back(site: Any, collector: int) -> None:
    """The output is delivered while the collector stands still, and the job leaves soon after that is over."""
    site.destination.stop()
    job = site.submit(outputs=("out1",))
    site.wait_state(job, "RetryWait", timeout_s=120)
    before = sum(ep.log("SandboxManagerLog").count(_SLOW_DOOR) for ep in site.pool.eps)
    os.kill(collector, signal.SIGSTOP)
    site.destination.start_again()
    wait_until(lambda: site.file(job, "out1").exists(), timeout_s=60, what="the delivery")
    wait_until(
        lambda: sum(ep.log("SandboxManagerLog").count(_SLOW_DOOR) for ep in site.pool.eps) > before,
        timeout_s=120, what="a report that the collector did not take to go into the slot ads",
    )  # fmt: skip
    os.kill(collector, signal.SIGCONT)
    start_s = time.monotonic()
    site.wait_left(job, timeout_s=300)
    took_s = time.monotonic() - start_s
    print(f"the job left the queue {took_s:.0f} s after the collector's return")
    assert took_s < 45.0
    site.check_delivered(job)


_DISK_MB = 400


def _use_spool(ep: Node, setting: str) -> None:
    ep.configure(setting)
    for program in ("sandbox-manager", "startd-cron"):
        ep.kill(program)


@pytest.fixture
def small_disk(site: Any) -> Iterator[tuple[Node, Path]]:
    """The first execute point, with its spool on a filesystem of its own."""
    ep: Node = site.pool.eps[0]
    disk = ep.home / "small-disk"
    ep.run(["mkdir", "-p", str(disk)], user="root", cwd="/")
    ep.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_MB}m,mode=0755", "tmpfs", str(disk)], user="root", cwd="/")
    _use_spool(ep, f"STAGEOUT_SPOOL = {disk}/stageout\n")
    yield ep, disk
    _use_spool(ep, "")
    ep.run(["umount", "-l", str(disk)], user="root", cwd="/")


def test_a_node_whose_disk_is_full_starts_no_jobs_until_there_is_room(site: Any, small_disk: tuple[Node, Path]) -> None:
    ep, disk = small_disk

    def slot() -> dict[str, Any]:
        (ad,) = (ad for ad in site.pool.startd_ads() if ep.name in ad["Machine"] and ad.get("PartitionableSlot"))
        return dict(ad)

    def seen_after_s(accepts: bool) -> float:
        start_s = time.monotonic()
        site.pool.wait(
            lambda: slot().get("StageOutAccept") is accepts, timeout_s=60, what=f"StageOutAccept = {accepts}"
        )
        return time.monotonic() - start_s

    site.pool.wait(lambda: 0 < slot().get("StageOutSpoolFreeMB", 0) <= _DISK_MB, timeout_s=90, what="the new spool")
    assert slot()["StageOutAccept"] is True
    ep.run(["fallocate", "-l", f"{_DISK_MB - 20}M", str(disk / "filler")], user="root", cwd="/")
    full_s = seen_after_s(False)
    job = site.submit(outputs=("out1",), extra=f'requirements = Machine == "{slot()["Machine"]}"')
    site.pool.wait(
        lambda: (site.pool.q(job, ["LastRejMatchTime"]) or {}).get("LastRejMatchTime"),
        timeout_s=90, what="a negotiation without a match",
    )  # fmt: skip
    ad = site.pool.q(job, ["JobStatus", "NumShadowStarts"])
    assert ad["JobStatus"] == 1 and not ad.get("NumShadowStarts"), ad
    ep.run(["rm", str(disk / "filler")], user="root", cwd="/")
    roomy_s = seen_after_s(True)
    print(f"no jobs {full_s:.1f} s after the disk was full, jobs again {roomy_s:.1f} s after there was room")
    site.wait_left(job, timeout_s=120)
    site.check_delivered(job)
