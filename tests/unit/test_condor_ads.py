"""Ads with bytes that are not UTF-8, as HTCondor's bindings return them: none may hide the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import create_autospec

import pytest

from sandbox_manager.intake.startd import readable_slots
from schedd_agent.collector import CondorCollectorClient
from schedd_agent.queue import CondorJobQueue
from stageout.condor import collector_process
from stageout.condor.ads import decoded, plain
from stageout.condor.collector_child import CollectorChild
from stageout.model.job import Job
from stageout.wire.custody import JobKey

classad2 = pytest.importorskip("classad2", reason="HTCondor's Python bindings are not installed")
htcondor2 = pytest.importorskip("htcondor2", reason="HTCondor's Python bindings are not installed")

GOOD = r'[Name="good"; MonitorSelfAge=7; StageOutPayload="p"]'
#: Ads with such bytes in a string, in a list, and in a name.
BAD = (r'[Name="x\377"; B=1]', r'[Name="bad"; StageOutPayload={"\377"}]', r"[Name='bad'; 'a\377'=1]")
JOB = r'[GlobalJobId="ap#7.0#1"; User="alice@test"; ClusterId=7; ProcId=0; JobStatus=4; StageOutState="Moving"; {more}]'


class Daemon:
    """A daemon that answers each query with the same ads."""

    def __init__(self, *texts: str) -> None:
        self._ads = [classad2.ClassAd(text) for text in texts]

    def query(self, *question: object, **more: object) -> list[Any]:
        return self._ads

    history = query


Install = Callable[..., None]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Replace the daemons by one with these ads."""

    def install(*texts: str) -> None:
        daemon = Daemon(*texts)
        monkeypatch.setattr(htcondor2, "Collector", lambda *host: daemon)
        monkeypatch.setattr(htcondor2, "Schedd", lambda *ad: daemon)

    return install


def question(*attributes: str) -> dict[str, Any]:
    return {"op": "query", "host": "h", "ad_type": "Any", "constraint": "true", "attributes": list(attributes)}


@pytest.mark.parametrize("bad", BAD)
def test_the_child_answers_with_the_other_ads(bad: str, answers: Install) -> None:
    answers(bad, GOOD)
    answer = collector_process._answer(None, question("Name", "StageOutPayload"))  # type: ignore[arg-type]
    assert answer["ads"][1] == {"Name": "good", "StageOutPayload": "p"}
    assert len(answer["ads"]) == 2


def test_a_skipped_attribute_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def answer(question: object) -> dict[str, Any]:
        return {"ads": [], "skipped": [['"x\\377"', "Name"]]}

    child = CollectorChild()
    monkeypatch.setattr(child, "_ask", answer)
    logged: list[dict[str, object]] = []
    monkeypatch.setattr("stageout.core.log.warn", lambda event, **facts: logged.append({"event": event, **facts}))
    for _ in range(2):
        asyncio.run(child.query("true", ["Name"]))
    assert logged == [{"event": "attribute-skipped", "ad": '"x\\377"', "attribute": "Name"}]


@pytest.mark.parametrize("bad", BAD)
def test_the_agent_reads_the_other_reports(bad: str, answers: Install) -> None:
    answers(bad, GOOD)
    ads = CondorCollectorClient("ap").query_reports().ads
    assert [ad["StageOutPayload"] for ad in ads if ad.get("Name") == "good"] == ["p", "p"]


@pytest.mark.parametrize(
    "more", [
        r'RemoveReason="x\377"', r'StageOutReason={"\377"}', r'Owner="\377"',
        r'TransferOutputStats=[STAGEOUTFilesCountLastRun="\377"]', r"NumHoldsByReason=['\377'=1]",
    ],
)  # fmt: skip
def test_the_agent_reads_a_job_without_such_an_attribute(more: str, answers: Install) -> None:
    answers(JOB.replace("{more}", more))
    queue = CondorJobQueue()
    (job,) = queue.jobs([])
    assert (job.name, job.status, job.ad_state.state) == ("ap#7.0#1", 4, "Moving")
    assert set(queue.history_records({job.key})) == {job.key}
    assert set(queue.owners({job.name})) == {job.name}


def test_the_agent_leaves_out_a_job_without_a_usable_id(answers: Install) -> None:
    answers(r'[GlobalJobId="x\377"; ClusterId=8; ProcId=0]', JOB.replace("{more}", ""))
    queue = CondorJobQueue()
    assert [job.name for job in queue.jobs([]) if job.has_own_name] == ["ap#7.0#1"]
    named = [JobKey(name, "alice@test") for name in ("x#8.0", "ap#7.0#1")]
    assert set(queue.history_records(named)) == {named[1]}
    assert set(queue.owners(["x#8.0", "ap#7.0#1"])) == {"ap#7.0#1"}


@pytest.mark.parametrize("odd", ['ClusterId=8; User="alice@test"', 'ClusterId=7; User="mallory@test"'])
def test_the_history_of_another_job_or_user_is_none_of_this_job(answers: Install, odd: str) -> None:
    answers(f'[GlobalJobId="ap#7.0#1"; ProcId=0; JobStatus=3; NumShadowStarts=1; {odd}]')
    assert CondorJobQueue().history_records([JobKey("ap#7.0#1", "alice@test")]) == {}


@pytest.mark.parametrize("bad", [*BAD, r'[Name=strcat("x", "\377"); B=1]', r'[N=[x="\377"]; B=1]'])
def test_the_command_shows_the_rest(bad: str) -> None:
    ad = plain(classad2.ClassAd(bad))
    assert ad.get("Name") in (None, "bad") and ad.get("B") in (None, 1)


def test_a_slot_with_an_unreadable_job_is_left_out() -> None:
    logged: list[tuple[str, str]] = []
    ads = [classad2.ClassAd(text) for text in (r'[Name="slot1_1"; CheckpointDestination="\377"]', '[Name="slot1_2"]')]
    found = readable_slots(ads, ["Name", "CheckpointDestination"], lambda *fault: logged.append(fault))
    assert found == [{"Name": "slot1_2"}]
    assert logged == [('"slot1_1"', "CheckpointDestination")]


def test_what_is_missing_or_undefined_is_told_apart() -> None:
    ad = classad2.ClassAd('[A=undefined; b="x"]')
    found = decoded(ad, ["A", "B", "C"], lambda ad, attribute: None)
    assert found == {"A": classad2.Value.Undefined, "B": "x"}


def test_a_removal_calls_what_the_bindings_have(monkeypatch: pytest.MonkeyPatch) -> None:
    schedd = create_autospec(htcondor2.Schedd, instance=True)
    monkeypatch.setattr(htcondor2, "Schedd", lambda: schedd)
    CondorJobQueue().remove(Job("ap#7.0#1", 7, 0, 4, 1), "its DAG was removed")
    schedd.act.assert_called_once_with(htcondor2.JobAction.Remove, "7.0", reason=("its DAG was removed", 0))
