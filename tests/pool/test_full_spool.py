"""A node whose spool is full takes no new work, the pool goes on without it, and it recovers by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.pool import Node

pytestmark = pytest.mark.pool


@pytest.fixture
def small(site: Any) -> Iterator[Node]:
    """The first execute point, with a spool of 20 MB, all of which one owner may have."""
    ep: Node = site.pool.eps[0]
    ep.configure("STAGEOUT_SPOOL_QUOTA_MB = 20\nSTAGEOUT_OWNER_QUOTA_MB = 20\n")
    yield ep
    site.destination.accept()
    site.destination.start_again()
    ep.configure("")


def machine(site: Any, ep: Node) -> str:
    ads = site.pool.startd_ads()
    return next(ad["Machine"] for ad in ads if ep.name in ad["Machine"])


def figure(site: Any, name: str, attribute: str) -> Any:
    """The attributes that START sees, of the partitionable slot."""
    (ad,) = (ad for ad in site.pool.startd_ads() if ad["Machine"] == name and ad.get("PartitionableSlot"))
    return ad.get(attribute)


def accepts(site: Any, name: str) -> bool:
    """Does START let jobs in?"""
    return bool(figure(site, name, "StageOutAccept"))


def test_a_full_spool_stops_new_work_until_its_destination_is_back(site: Any, small: Node) -> None:
    pool, here = site.pool, machine(site, small)
    pinned = f'requirements = Machine == "{here}"'
    pool.wait(lambda: accepts(site, here), timeout_s=60, what=f"{here} to take jobs")
    site.destination.stop()
    filler = site.submit(outputs=("out1",), env="SIZE=18600000", extra=pinned)
    site.wait_state(filler, "RetryWait", timeout_s=120)
    pool.wait(lambda: not accepts(site, here), timeout_s=60, what=f"{here} to refuse jobs")

    waits = site.submit(outputs=("out1",), extra=pinned)
    elsewhere = site.submit(outputs=("out1",))
    site.wait_state(elsewhere, "RetryWait", timeout_s=120)
    ran_at = pool.q(elsewhere, ["LastRemoteHost"])["LastRemoteHost"]
    assert here not in ran_at, "a full node took a job"
    # The negotiator has looked at both, and found a place for the later one only.
    assert pool.q(waits, ["JobStatus"])["JobStatus"] == 1

    site.destination.start_again()
    for job in (filler, elsewhere, waits):
        history = site.wait_left(job, timeout_s=180)
        assert (history["JobStatus"], history["NumShadowStarts"]) == (4, 1)
        site.check_delivered(job)
    assert here in pool.history(waits)["LastRemoteHost"]
    assert accepts(site, here)


def test_failed_output_of_one_owner_keeps_no_job_away(site: Any, small: Node) -> None:
    pool, here = site.pool, machine(site, small)
    pinned = f'requirements = Machine == "{here}"'
    pool.wait(lambda: accepts(site, here), timeout_s=60, what=f"{here} to take jobs")
    site.destination.refuse("no such project")
    failed = site.submit(outputs=("out1",), env="SIZE=18600000", extra=pinned)
    site.wait_state(failed, "Failed", timeout_s=120)
    pool.wait(lambda: figure(site, here, "StageOutSpoolMB") == 18, timeout_s=60, what="the node to say what it holds")

    site.destination.accept()
    other = site.submit("bob", outputs=("out1",), extra=pinned)
    history = site.wait_left(other, timeout_s=120)
    assert (history["JobStatus"], history["NumShadowStarts"]) == (4, 1)
    site.check_delivered(other)
    (result,) = site.epoch_results(other)
    print(f"bob's job ran on the node that is full of alice's failed output; {result.get('DeveloperData')}")
    assert accepts(site, here)
    pool.rm(failed)
    pool.wait(lambda: figure(site, here, "StageOutSpoolMB") == 0, timeout_s=120, what="the spool to be empty")
