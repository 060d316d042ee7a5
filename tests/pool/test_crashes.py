"""kill -9 of manager and agent at each step of the way: delivered once, with the right content."""

from __future__ import annotations

import shutil
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.pool.conftest import AGENT_FAULTS, GROUP_FAULTS, MANAGER_FAULTS, REFUSED_DATA

pytestmark = pytest.mark.pool


@pytest.mark.parametrize("fault", MANAGER_FAULTS)
def test_manager_dies_at(site: Any, fault: str) -> None:
    armed = site.arm(fault)
    job = site.submit(outputs=("out1",))
    history = site.wait_left(job, timeout_s=120)
    assert not armed.exists(), f"no manager came to {fault}"
    assert history["JobStatus"] == 4
    assert history["NumShadowStarts"] == 1, "a crash of the manager must not cost the computation"
    site.check_delivered(job)
    puts = site.puts(job)
    again = fault in ("record-delivered.kill-before",)
    assert len(puts) == (2 if again else 1), puts
    site.pool.wait(site.spool_is_empty, timeout_s=30, what="the spool to be empty")


@pytest.mark.parametrize("fault", AGENT_FAULTS)
def test_agent_dies_at(site: Any, fault: str) -> None:
    armed = site.arm(fault)
    job = site.submit(outputs=("out1",))
    history = site.wait_left(job, timeout_s=120)
    assert not armed.exists(), f"the agent never came to {fault}"
    assert history["JobStatus"] == 4
    assert history["StageOutState"] == "Delivered"
    assert history["NumShadowStarts"] == 1
    site.check_delivered(job)
    assert len(site.puts(job)) == 1


@pytest.mark.parametrize("fault", GROUP_FAULTS)
def test_agent_dies_while_it_edits_several_jobs(site: Any, fault: str) -> None:
    """The next agent finds some attributes of all of them, and goes on."""
    site.destination.pause()
    made = site.submit(outputs=("out1",), queue="queue 4")
    for job in made.ids:
        site.wait_state(job, "Moving", timeout_s=120)
    armed = site.arm(fault)
    site.destination.resume()
    for job in made.ids:
        history = site.wait_left(job, timeout_s=120)
        assert (history["JobStatus"], history["NumShadowStarts"]) == (4, 1)
        assert (history["StageOutState"], history["StageOutBytesLeft"], history["StageOutRun"]) == ("Delivered", 0, 1)
        assert history["StageOutStats"]["Files"] == 1
        assert site.file(job, "out1").exists()
        assert len(site.puts(job)) == 1
    assert not armed.exists(), "no two jobs were edited together"


def test_output_that_the_disk_refused_is_made_again(site: Any) -> None:
    armed = site.arm(REFUSED_DATA)
    job = site.submit(outputs=("out1",))
    history = site.wait_left(job, timeout_s=120)
    assert not armed.exists(), "no manager synced anything"
    assert (history["JobStatus"], history["NumShadowStarts"], history["StageOutRun"]) == (4, 2, 2)
    site.check_delivered(job)
    assert len(site.puts(job)) == 1, "output that the disk had refused was sent"
    assert any("the node's disk lost output" in ep.log("SandboxManagerLog") for ep in site.pool.eps)


def test_manager_and_its_plugin_die_in_the_middle_of_a_transfer(site: Any) -> None:
    site.destination.pause()
    job = site.submit(outputs=("out1",), env="SIZE=5000000")
    site.wait_state(job, "Moving")
    ep = next(ep for ep in site.pool.eps if any((ep.home / "stageout" / "sandboxes").glob("*/*")))
    site.pool.wait(lambda: ep.pids("stageout_curl_plugin"), what="the plugin to send")
    ep.kill("sandbox-manager", signal.SIGKILL)
    site.pool.wait(lambda: not ep.pids("stageout_curl_plugin"), timeout_s=10, what="the plugin to die with its manager")
    site.destination.resume()
    history = site.wait_left(job, timeout_s=120)
    assert history["JobStatus"] == 4
    site.check_delivered(job)


def _ledger(ep: Any) -> Path:
    return Path(ep.home) / "stageout" / "ledger" / "ledger.sqlite"


def _change_ledger(site: Any, ep: Any, change: Callable[[Path], None]) -> None:
    """Let something happen to the ledger of a node whose manager is stopped, then start it again."""
    ep.run(["condor_off", "-fast", "-daemon", "sandbox_manager"])
    site.pool.wait(lambda: not ep.pids("sandbox-manager"), timeout_s=60, what="the end of the manager")
    change(_ledger(ep))
    site.destination.resume()
    ep.run(["condor_on", "-daemon", "sandbox_manager"])


def _holder(site: Any) -> Any:
    return next(ep for ep in site.pool.eps if any((ep.home / "stageout" / "sandboxes").glob("*/*")))


def test_a_ledger_out_of_a_backup_costs_a_run_and_no_bytes(site: Any, tmp_path: Path) -> None:
    site.destination.pause()
    for ep in site.pool.eps:
        with closing(sqlite3.connect(_ledger(ep))) as db, closing(sqlite3.connect(tmp_path / ep.name)) as copy:
            db.backup(copy)
    job = site.submit(outputs=("out1",))
    site.wait_state(job, "Moving")
    ep = _holder(site)

    def put_back(ledger: Path) -> None:
        for suffix in ("-wal", "-shm"):
            ledger.with_name(f"{ledger.name}{suffix}").unlink(missing_ok=True)
        shutil.copy(tmp_path / ep.name, ledger)

    _change_ledger(site, ep, put_back)
    history = site.wait_left(job, timeout_s=150)
    assert (history["JobStatus"], history["NumShadowStarts"], history["StageOutState"]) == (4, 2, "Delivered")
    site.check_delivered(job)
    assert list((ep.home / "stageout" / "unknown").glob("*/0")), "the first run's output is kept"


def test_a_flipped_byte_in_the_ledger_costs_one_job_one_run(site: Any) -> None:
    site.destination.pause()
    job = site.submit(outputs=("out1",))
    site.wait_state(job, "Moving")

    def flip(ledger: Path) -> None:
        content = ledger.read_bytes()
        at = content.rindex(b"/out1")
        ledger.write_bytes(content[: at + 1] + bytes([content[at + 1] ^ 0x80]) + content[at + 2 :])

    _change_ledger(site, _holder(site), flip)
    history = site.wait_left(job, timeout_s=150)
    assert (history["JobStatus"], history["NumShadowStarts"], history["StageOutState"]) == (4, 2, "Delivered")
    site.check_delivered(job)


@pytest.mark.parametrize("daemon", ["schedd-agent", "collector", "schedd"])
def test_a_daemon_of_the_access_point_dies_while_output_moves(site: Any, daemon: str) -> None:
    site.destination.pause()
    job = site.submit(outputs=("out1",))
    site.wait_state(job, "Moving")
    dead = set(site.pool.ap.kill(daemon, signal.SIGKILL))
    site.destination.resume()
    site.pool.wait(lambda: set(site.pool.ap.pids(daemon)) - dead, timeout_s=60, what=f"the {daemon} to be back")
    history = site.wait_left(job, timeout_s=150)
    assert history["JobStatus"] == 4
    assert history["StageOutState"] == "Delivered"
    assert history["NumShadowStarts"] == 1
    site.check_delivered(job)
