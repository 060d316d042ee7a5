"""The main path on HTCondor 23.9: delivered, failed and retried, removed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.pool.conftest import Site, open_directory, pool_settings

pytestmark = pytest.mark.pool


@pytest.fixture(scope="module")
def old(stageout_pools: Any, destination: Any) -> Iterator[Site]:
    with open_directory("gates-old") as shared:
        settings = {"version": "23.9", "execute_points": 1, "cpus": 4, "binds": (shared,), **pool_settings(shared)}
        with stageout_pools(**settings) as pool:
            yield Site(pool, destination, "old-version", shared / "gates")


def test_delivered(old: Site) -> None:
    job = old.submit()
    history = old.wait_left(job, timeout_s=90)
    assert history["JobStatus"] == 4
    assert history["StageOutState"] == "Delivered"
    old.check_delivered(job)


def test_failed_and_retried(old: Site) -> None:
    old.destination.refuse("quota exceeded at dest")
    try:
        job = old.submit()
        old.pool.wait_status(job, "Held", timeout_s=90)
        assert "quota exceeded at dest" in old.pool.q(job)["HoldReason"]
    finally:
        old.destination.accept()
    old.stageout("retry", str(job))
    history = old.wait_left(job, timeout_s=90)
    assert history["NumShadowStarts"] == 1
    old.check_delivered(job)


def test_interrupted_run_is_superseded(old: Site) -> None:
    old.close_gate("old", "after")
    job = old.submit(place="gate-old")
    old.pool.wait(lambda: old.at_gate("old", "after"), timeout_s=60, what="the hand-off")
    old.pool.vacate(job, fast=True)
    old.pool.wait(lambda: old.pool.q(job)["NumShadowStarts"] == 2, timeout_s=60, what="the second run")
    old.open_gate("old", "after")
    old.wait_left(job, timeout_s=90)
    old.check_delivered(job, "gate-old")
    assert len(old.puts(job, "gate-old")) == 2
