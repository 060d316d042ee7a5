"""Promises of the custody page that no other pool test holds: files that are deleted or changed in the spool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.pool


def _meanwhile(site: Any, change: Callable[[Path], object]) -> Any:
    """Submit a job whose server is down, change its only file in the spool while no manager runs, and mend all."""
    site.destination.stop()
    job = site.submit(outputs=("out1",))
    site.wait_state(job, "RetryWait", timeout_s=120)
    ((ep, file),) = [(ep, path) for ep in site.pool.eps for path in (ep.home / "stageout/sandboxes").glob("*/*")]
    ep.run(["condor_off", "-fast", "-daemon", "sandbox_manager"])
    site.pool.wait(lambda: not ep.pids("sandbox-manager"), timeout_s=60, what="the end of the manager")
    site.pool.wait(lambda: not ep.pids("stageout_curl_plugin"), timeout_s=60, what="the end of its plugin")
    change(file)
    site.destination.start_again()
    ep.run(["condor_on", "-daemon", "sandbox_manager"])
    return job


def _append(file: Path) -> None:
    with file.open("ab") as output:
        output.write(b"one more line\n")


def test_a_deleted_file_costs_its_job_one_run(site: Any) -> None:
    job = _meanwhile(site, Path.unlink)
    history = site.wait_left(job, timeout_s=150)
    assert (history["JobStatus"], history["NumShadowStarts"], history["StageOutState"]) == (4, 2, "Delivered")
    site.check_delivered(job)
    assert len(site.puts(job)) == 1


def test_a_file_that_changes_after_the_end_of_its_job_is_not_delivered(site: Any) -> None:
    job = _meanwhile(site, _append)
    site.pool.wait_status(job, "Held", timeout_s=120)
    assert site.pool.q(job, ["HoldReasonSubCode"])["HoldReasonSubCode"] == 20045
    assert site.state(job) == "Failed"
    assert site.puts(job) == [] and not site.file(job, "out1").exists()
