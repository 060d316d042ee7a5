"""Records of delivered files on a real pool, read by ``stageout history`` and by HTCondor's own condor_history."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.pool.conftest import HISTORY_FAULTS

pytestmark = pytest.mark.pool


def test_delivered_files_are_known_after_their_job_has_left(site: Any) -> None:
    job = site.submit(outputs=("out1", "out2"))
    history = site.wait_left(job)
    found = site.wait_recorded(job, 2)
    assert len(found) == 2
    for ad in found:
        assert (ad["GlobalJobId"], ad["Owner"], ad["NumShadowStarts"]) == (history["GlobalJobId"], "alice", 1)
        assert (ad["StageOutState"], ad["TransferSuccess"], ad["StageOutVerified"] != "") == ("Delivered", True, True)
        assert ad["StageOutManager"] == history["StageOutManager"]
        assert ad["StageOutPlugin"].endswith("plugin")
        assert ad["StageOutAcceptedAt"] <= ad["StageOutConfirmedAt"] <= ad["TransferEndTime"] <= ad["RecordWriteDate"]
        assert ad["StageOutAcceptedAt"] <= ad["TransferStartTime"] <= ad["TransferEndTime"] <= ad["StageOutEndedAt"]
    assert [ad["TransferFileName"] for ad in found] == ["out1", "out2"]
    assert found[0]["TransferFileBytes"] == site.file(job, "out1").stat().st_size
    assert found[1]["TransferUrl"].endswith(f"/{job}/out2")


def test_output_that_was_given_up_is_recorded_as_such(site: Any) -> None:
    site.destination.pause()
    job = site.submit(outputs=("out1",))
    site.wait_state(job, "Moving")
    site.stageout("cancel", str(job))
    site.destination.resume()
    site.wait_left(job, timeout_s=120)
    (ad,) = site.wait_recorded(job, 1)
    assert (ad["StageOutState"], ad["TransferSuccess"]) == ("Cancelled", False)
    assert ad["TransferFileName"] == "out1"


def test_of_very_many_files_the_rest_is_one_record(site: Any) -> None:
    outputs = tuple(f"out{number:02d}" for number in range(60))
    job = site.submit(outputs=outputs, env="SIZE=100")
    site.wait_left(job, timeout_s=120)
    found = site.wait_recorded(job, 51)
    assert sum(ad["StageOutFiles"] for ad in found) == 60
    sizes = sum(site.file(job, name).stat().st_size for name in outputs)
    assert sum(ad["TransferFileBytes"] for ad in found) == sizes
    totals = json.loads(site.stageout("history", str(job), "-totals", "owner", "-json").stdout)["totals"]
    assert [(row["owner"], row["files"], row["size_bytes"], row["undelivered_files"]) for row in totals] == [
        ("alice", 60, sizes, 0)
    ]


def test_each_user_sees_his_own_and_condor_history_sees_all(site: Any) -> None:
    jobs = {user: site.submit(user, outputs=("out1",)) for user in ("alice", "bob")}
    for job in jobs.values():
        site.wait_left(job)
        site.wait_recorded(job, 1)
    assert {ad["Owner"] for ad in site.file_records(user="bob")} == {"bob"}
    assert {ad["Owner"] for ad in site.file_records("-allusers")} >= {"alice", "bob"}
    wanted = " || ".join(f"ClusterId == {job.cluster}" for job in jobs.values())
    line = "printf '%s' \"$(condor_config_val SPOOL)\""
    path = site.pool.ap.run(["sh", "-c", line], user="bob").stdout + "/stageout_history"
    for how in (["-file", path], ["-search", path], ["-file", path, "-forwards"]):
        command = ["condor_history", *how, "-constraint", wanted, "-af", "Owner", "TransferFileName", "StageOutState"]
        lines = site.pool.ap.run(command, user="bob").stdout.splitlines()
        assert sorted(lines) == ["alice out1 Delivered", "bob out1 Delivered"], how
    mine = site.stageout(
        "history", "-allusers", "-constraint", wanted, "-af", "Owner", "TransferFileName", "StageOutState"
    )
    assert sorted(mine.stdout.splitlines()) == ["alice out1 Delivered", "bob out1 Delivered"]


@pytest.mark.parametrize("fault", HISTORY_FAULTS)
def test_an_agent_that_dies_there_records_each_file_once(site: Any, fault: str) -> None:
    armed = site.arm(fault)
    job = site.submit(outputs=("out1", "out2"))
    site.wait_left(job, timeout_s=120)
    site.pool.wait(lambda: not armed.exists(), timeout_s=60, what=f"the agent to come to {fault}")
    found = site.wait_recorded(job, 2)
    another = site.submit(outputs=("out1",))  # by then the agent has looked at all reports again
    site.wait_left(another, timeout_s=120)
    site.wait_recorded(another, 1)
    assert len(site.file_records(str(job))) == len(found) == 2
