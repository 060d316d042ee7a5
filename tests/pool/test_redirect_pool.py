"""A job's output goes to another server than the one that it was made for, and the job does not run again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.destination import Destination
from tests.pool.conftest import QUICK_AP, QUICK_EP, Site, open_directory

pytestmark = pytest.mark.pool


@pytest.fixture(scope="module")
def places(stageout_pools: Any) -> Iterator[tuple[Site, Destination]]:
    with open_directory("redirect") as shared:
        old, new = Destination(Path(shared) / "old"), Destination(Path(shared) / "new")
        for one in (old, new):
            one.home.mkdir()
        settings = {"version": "25.14", "execute_points": 1, "cpus": 4, "binds": (shared,)}
        with old, new, stageout_pools(**settings, ap_config=QUICK_AP, ep_config=QUICK_EP) as pool:
            yield Site(pool, old, "redirect", Path(shared)), new


def _check(site: Site, new: Destination, job: Any, name: str, at: str) -> None:
    found = new.file(at).read_bytes()
    assert hashlib.sha256(found).hexdigest() == site.wrote(job)[name]


def test_failed_output_is_delivered_to_another_server(places: tuple[Site, Destination]) -> None:
    site, new = places
    site.destination.refuse("no such project")
    job = site.submit()
    site.pool.wait_status(job, "Held", timeout_s=90)
    secret = site.stageout("redirect", str(job), "http://alice:secret@127.0.0.1/", check=False)
    assert secret.returncode == 64 and "everybody can read" in secret.stderr
    other = site.stageout("redirect", str(job), "gopher://127.0.0.1/d/", check=False)
    assert other.returncode == 1 and "no plugin of this node moves gopher URLs" in other.stdout
    foreign = site.stageout("redirect", str(job), new.url("d/"), user="bob", check=False)
    assert foreign.returncode == 1 and "Only the job's owner" in foreign.stderr
    assert "redirect accepted" in site.stageout("redirect", str(job), "out1", new.url("d/first")).stdout
    assert site.stageout("wait", str(job), "--timeout", "60", check=False, timeout_s=90).returncode in (0, 1)
    assert site.pool.q(job, ["JobStatus"]) is not None, "the other file is refused again"
    site.pool.wait(lambda: new.file("d/first").exists(), timeout_s=60, what="the first file")
    site.wait_state(job, "Failed")
    assert "redirect accepted" in site.stageout("redirect", str(job), new.url("d/")).stdout
    past = site.wait_left(job)
    assert (past["StageOutState"], past["NumShadowStarts"]) == ("Delivered", 1)
    _check(site, new, job, "out1", "d/first")
    _check(site, new, job, "out2", "d/out2")
    assert not site.puts(job) and len(new.requests("PUT", "d")) == 2
    assert [one["TransferUrl"] for one in site.wait_recorded(job, 2)] == [new.url("d/first"), new.url("d/out2")]
    late = site.stageout("redirect", str(job), new.url("e/"), check=False)
    assert late.returncode == 1 and "nothing to redirect: the job has left the queue" in late.stderr
    site.destination.accept()


def test_output_that_waits_for_a_server_that_is_down_goes_elsewhere(places: tuple[Site, Destination]) -> None:
    site, new = places
    site.destination.stop()
    job = site.submit()
    site.wait_state(job, "RetryWait", timeout_s=90)
    ask = ("redirect", str(job), new.url(f"late/{job}"))
    site.pool.wait(  # a file that is being tried at this moment is refused
        lambda: "redirect accepted" in site.stageout(*ask, check=False).stdout, what="the request to be accepted"
    )
    past = site.wait_left(job)
    assert (past["StageOutState"], past["NumShadowStarts"]) == ("Delivered", 1)
    for name in ("out1", "out2"):
        _check(site, new, job, name, f"late/{job}/{name}")


def test_all_jobs_of_a_server_go_elsewhere_at_once(places: tuple[Site, Destination]) -> None:
    """Each file keeps its path below the new URL."""
    site, new = places
    site.destination.be_well()
    site.destination.refuse("no such project")
    jobs = [site.submit() for _ in range(2)]
    for job in jobs:
        site.pool.wait_status(job, "Held", timeout_s=90)
    failed = site.stageout("status", "--state", "failed", "-af", "job", "owner").stdout.split("\n")
    assert sorted(filter(None, failed)) == sorted(f"{job} alice" for job in jobs)
    servers = ("--server", site.destination.url(""), new.url("moved"))
    shown = site.stageout("redirect", *servers, "--dry-run").stdout
    assert all(f"{job}  all files that wait  {new.url('moved')}" in shown for job in jobs), shown
    told = site.stageout("redirect", *servers).stdout
    assert told.count("redirect accepted") == 2, told
    for job in jobs:
        past = site.wait_left(job)
        assert (past["StageOutState"], past["NumShadowStarts"]) == ("Delivered", 1)
        old = [one["TransferUrl"] for one in site.wait_recorded(job, 2)]
        assert all(url.startswith(new.url("moved/")) for url in old), old
        for name, url in zip(("out1", "out2"), sorted(old)):
            _check(site, new, job, name, url.partition("/moved/")[2] and f"moved/{url.partition('/moved/')[2]}")
    site.destination.accept()
