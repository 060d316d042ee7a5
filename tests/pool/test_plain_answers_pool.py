"""Plain answers about a job whose data slot was full, and while daemons stand still."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.pool.conftest import QUICK_AP, QUICK_EP, VERSION, Site

pytestmark = pytest.mark.pool


@pytest.fixture(scope="module")
def narrow(stageout_pools: Any, destination: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A pool with one CPU, whose data slot takes the output of one job."""
    settings = {"ap_config": QUICK_AP, "ep_config": QUICK_EP + "STAGEOUT_DATA_SLOT_DEPTH = 0\n"}
    with stageout_pools(version=VERSION, execute_points=1, cpus=1, **settings) as pool:
        yield Site(pool, destination, "plain", tmp_path_factory.mktemp("no-gates"))
        destination.resume()


@contextmanager
def standing(pid: int) -> Iterator[None]:
    """Stop a process for a while."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def refusing(site: Site) -> Iterator[None]:
    """Let the destination refuse everything for a while."""
    site.destination.refuse("quota exceeded")
    try:
        yield
    finally:
        site.destination.accept()


def _row(site: Site, job: Any) -> dict[str, Any]:
    (row,) = json.loads(site.stageout("status", "--json", str(job)).stdout)["jobs"]
    assert isinstance(row, dict)
    return row


def test_a_job_whose_data_slot_was_full_says_so_while_it_sends(narrow: Site) -> None:
    narrow.destination.pause()
    try:
        first = narrow.submit()
        narrow.wait_state(first, "Moving", timeout_s=90)
        assert "sending to" in narrow.stageout("status", str(first)).stdout
        second = narrow.submit()
        narrow.pool.wait(lambda: _row(narrow, second)["synchronous_code"], timeout_s=90, what="the reason")
        row, text = _row(narrow, second), narrow.stageout("status", str(second)).stdout
    finally:
        narrow.destination.resume()
    assert (row["synchronous_code"], row["job_status"]) == ("SlotFull", "TransferringOutput")
    assert "transferring output" in text and "STAGEOUT_DATA_SLOT_DEPTH" in text
    for job in (first, second):
        narrow.wait_left(job, timeout_s=120)
        narrow.check_delivered(job)


def test_a_retry_without_the_agent_says_when_it_was_heard(narrow: Site) -> None:
    with refusing(narrow):
        job = narrow.submit()
        narrow.pool.wait_status(job, "Held", timeout_s=90)
        story = narrow.stageout("explain", str(job), check=False)
    assert story.returncode == 1 and "were handed off when the job ended" in story.stdout
    assert "`stageout retry` sends it again" in story.stdout and "if the sandbox manager" not in story.stdout
    (agent,) = narrow.pool.ap.pids("schedd-agent")
    with standing(agent):
        done = narrow.stageout("retry", str(job), check=False, timeout_s=120)
    assert done.returncode == 2
    assert "the schedd agent was last heard of" in done.stderr and "agent of ap runs" not in done.stderr
    assert narrow.wait_left(job, timeout_s=120)["StageOutState"] == "Delivered", "the request has stayed"
    story = narrow.stageout("explain", str(job))
    assert "delivered" in story.stdout and "accepts the files then" not in story.stdout


def test_a_collector_that_stands_still_is_named_soon(narrow: Site) -> None:
    """The schedd may stand still with it: then the message names both."""
    narrow.destination.pause()
    try:
        job = narrow.submit()
        narrow.wait_state(job, "Moving", timeout_s=90)
        (collector,) = narrow.pool.ap.pids("collector")
        with standing(collector):
            begin_s = time.monotonic()
            done = narrow.stageout("status", check=False, timeout_s=120)
            took_s = time.monotonic() - begin_s
    finally:
        narrow.destination.resume()
    print(f"{took_s:.1f} s: {done.stdout}{done.stderr}")
    assert took_s < 45
    host = narrow.pool.ap.config_val("COLLECTOR_HOST")
    assert f"collector {host}" in done.stdout + done.stderr
    narrow.wait_left(job, timeout_s=300)
