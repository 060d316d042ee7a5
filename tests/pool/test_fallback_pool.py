"""Output that its server refuses goes to the job's second destination by itself, and the job does not run again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.destination import Destination
from tests.pool.conftest import QUICK_AP, QUICK_EP, Site, open_directory

pytestmark = pytest.mark.pool
_AFTER_S = 25


@pytest.fixture(scope="module")
def places(stageout_pools: Any) -> Iterator[tuple[Site, Destination]]:
    with open_directory("fallback") as shared:
        first, second = Destination(Path(shared) / "first"), Destination(Path(shared) / "second")
        for one in (first, second):
            one.home.mkdir()
        settings = {"version": "25.14", "execute_points": 1, "cpus": 4, "binds": (shared,)}
        quick_ep = f"{QUICK_EP}STAGEOUT_FALLBACK_AFTER = {_AFTER_S}\n"
        with first, second, stageout_pools(**settings, ap_config=QUICK_AP, ep_config=quick_ep) as pool:
            yield Site(pool, first, "fallback", Path(shared)), second


def _submit(site: Site, url: str) -> Any:
    return site.submit(extra=f'MY.StageOutFallback = "{url}"')


def _arrived(site: Site, second: Destination, job: Any, place: str) -> None:
    for name in ("out1", "out2"):
        found = second.file(f"{place}/{name}").read_bytes()
        assert hashlib.sha256(found).hexdigest() == site.wrote(job)[name]


def _records(site: Site, job: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(site.stageout("history", "-files", "-json", str(job)).stdout)["files"]
    return found


def test_refused_output_arrives_at_the_fallback(places: tuple[Site, Destination]) -> None:
    site, second = places
    site.destination.refuse("no such project")
    url = second.url("d/")
    job = _submit(site, url)
    past = site.wait_left(job, timeout_s=120)
    site.destination.accept()
    assert (past["StageOutState"], past["NumShadowStarts"], past.get("NumHolds", 0)) == ("Delivered", 1, 0)
    assert f"2 files delivered to the fallback {url} because the destination failed" in past["StageOutReason"]
    assert "no such project" in past["StageOutReason"]
    _arrived(site, second, job, "d")
    assert len(second.requests("PUT", "d")) == 2
    assert "delivered to the fallback" in site.stageout("history", str(job)).stdout
    # The agent writes them when it lets the manager forget the output, which may be after the job has left.
    records = site.pool.wait(lambda: _records(site, job), timeout_s=60, what="the records of the files")
    assert sorted(one["TransferUrl"] for one in records) == [f"{url}out1", f"{url}out2"]
    assert all("no such project" in one["StageOutReason"] for one in records)


def test_both_servers_refuse(places: tuple[Site, Destination]) -> None:
    site, second = places
    site.destination.refuse("no such project")
    second.refuse("no such user")
    job = _submit(site, second.url("e/"))
    site.pool.wait_status(job, "Held", timeout_s=120)
    found = site.pool.q(job, ["HoldReason", "NumShadowStarts"])
    assert found is not None and found["NumShadowStarts"] == 1
    assert "the destination and the fallback failed. Destination: " in found["HoldReason"]
    assert all(words in found["HoldReason"] for words in ("no such project", "no such user"))
    assert "  fallback  " in site.stageout("status", str(job)).stdout
    second.accept()
    site.stageout("retry", str(job))
    assert site.wait_left(job)["StageOutState"] == "Delivered"
    site.destination.accept()
    _arrived(site, second, job, "e")
    assert not site.puts(job), "a retry tries the fallback, not the first destination"


def test_a_fallback_that_cannot_be_used_loses_nothing(places: tuple[Site, Destination]) -> None:
    site, _ = places
    site.destination.refuse("no such project")
    job = _submit(site, "https://alice:secret@127.0.0.1/d/")
    explained = site.stageout("explain", str(job), check=False).stdout
    assert "it is ignored: StageOutFallback: the URL has a user" in explained
    site.pool.wait_status(job, "Held", timeout_s=90)
    ad = site.pool.q(job, ["HoldReason"])
    assert ad is not None and "the fallback was not used: StageOutFallback: the URL has a user" in ad["HoldReason"]
    assert "ignored: StageOutFallback" in site.stageout("status", str(job)).stdout
    site.destination.accept()
    site.stageout("retry", str(job))
    assert site.wait_left(job)["StageOutState"] == "Delivered"


def test_output_for_a_server_that_is_down_goes_to_the_fallback(places: tuple[Site, Destination]) -> None:
    site, second = places
    site.destination.stop()
    job = _submit(site, second.url("f/"))
    site.wait_state(job, "RetryWait", timeout_s=90)
    shown = site.stageout("explain", str(job), check=False).stdout
    assert f"if delivery fails: {second.url('f/')}" in shown
    past = site.wait_left(job, timeout_s=_AFTER_S + 120)
    assert (past["StageOutState"], past["NumShadowStarts"]) == ("Delivered", 1)
    _arrived(site, second, job, "f")
