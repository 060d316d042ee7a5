"""A slow destination: when output should arrive, when it arrives, and what the report says about it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.narrow_destination import NarrowDestination
from tests.harness.pool.waiting import wait_until
from tests.pool.conftest import QUICK_AP, QUICK_EP, Site, open_directory

pytestmark = pytest.mark.pool

_RATE_MB_S = 1
#: Reports, looks of daemons and the end of a plugin take some of the time.
_SLACK_S = 10
_GROUP = "accounting_group = group_physics\naccounting_group_user = alice"


@pytest.fixture(scope="module")
def slow(stageout_pools: Any) -> Iterator[tuple[Site, NarrowDestination]]:
    with open_directory("slow") as shared, NarrowDestination(shared / "store", _RATE_MB_S) as destination:
        settings = {"version": "25.14", "execute_points": 1, "cpus": 4, "binds": (shared,)}
        with stageout_pools(**settings, ap_config=QUICK_AP, ep_config=QUICK_EP) as pool:
            yield Site(pool, destination, "slow", Path(shared)), destination  # type: ignore[arg-type]


def _submit(slow: tuple[Site, NarrowDestination], size_bytes: int, extra: str = "") -> Any:
    site, destination = slow
    url = f"{destination.url}/$(Cluster).$(Process)"
    return site.submit(outputs=("out",), env=f"SIZE={size_bytes}", destination=url, extra=extra)


def _status(site: Site) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(site.stageout("status", "--json").stdout)
    return found


def _row(site: Site, job: Any, wanted: Callable[[dict[str, Any]], bool]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Wait for a row of a job. Returns it, and all that the command said."""

    def found() -> Any:
        said = _status(site)
        return next(((row, said) for row in said["jobs"] if row["job"] == str(job) and wanted(row)), None)

    row: tuple[dict[str, Any], dict[str, Any]] = wait_until(found, timeout_s=90, what=f"a row of job {job}")
    return row


def _is_moving(row: dict[str, Any]) -> bool:
    return bool(row["state"] == "Moving" and row["files"] and row["files"][0]["began_at"])


def test_output_arrives_when_it_is_expected(slow: tuple[Site, NarrowDestination]) -> None:
    site, destination = slow
    first = _submit(slow, 6_000_000)
    row, said = _row(site, first, _is_moving)
    assert (row["eta_low_s"], row["eta_high_s"]) == (None, None), "nothing is known of the server"
    assert [place["eta_low_s"] for place in said["destinations"]] == [None]
    site.wait_left(first)
    job = _submit(slow, 20_000_000)
    row, said = _row(site, job, lambda row: _is_moving(row) and row["eta_high_s"] is not None)
    (place,) = said["destinations"]
    assert (place["server"], place["files_moving"], place["bytes_moving"]) == (destination.url, 1, row["bytes_left"])
    assert 0.4 * _RATE_MB_S < place["rate_bytes_per_s"] / 1e6 < 1.1 * _RATE_MB_S
    assert place["eta_high_s"] is not None
    (line,) = [line for line in site.stageout("status").stdout.splitlines() if line.startswith(str(job))]
    assert re.search(r" \d+-\d+ (s|min) ", line), line
    node = site.pool.eps[0].run(["/opt/stageout/bin/stageout", "status", "--node"]).stdout
    assert re.search(rf"{destination.url} .* \d+-\d+ (s|min) ", node), node
    site.wait_left(job)
    arrived_s = destination.transfers()[-1].end_s - said["at"]
    assert row["eta_low_s"] - _SLACK_S <= arrived_s <= row["eta_high_s"] + _SLACK_S


def test_the_report_has_what_the_delivery_was_like(slow: tuple[Site, NarrowDestination]) -> None:
    site, destination = slow
    job = _submit(slow, 2_000_000, _GROUP)
    box = wait_until(lambda: _reported(site, job), timeout_s=90, what="the report of the delivery")
    sent = next(one for one in destination.transfers() if one.path == f"/{job}/out")
    site.wait_left(job)
    (file,) = box["files"]
    assert box["group"] == "group_physics"
    assert box["accepted_at"] <= box["confirmed_at"] <= file["began_at"] <= file["ended_at"] <= box["ended_at"]
    assert int(sent.start_s) - 2 <= file["began_at"] <= sent.start_s + 1
    assert abs(file["ended_at"] - sent.end_s) <= 2
    assert 0.5 <= file["transfer_ms"] / 1000 / (sent.end_s - sent.start_s) <= 2
    assert (file["streams"], file["verified"]) == (1, "size")


def _reported(site: Site, job: Any) -> dict[str, Any] | None:
    """Return the job's sandbox in the manager's report once it has ended."""
    constraint = 'MyType == "StageOutManager"'
    said = site.pool.ap.run(["condor_status", "-any", "-constraint", constraint, "-af", "StageOutPayload"]).stdout
    boxes = [box for line in said.splitlines() for box in json.loads(line)["sandboxes"]]
    return next((box for box in boxes if f"#{job}#" in box["job"] and box.get("ended_at")), None)
