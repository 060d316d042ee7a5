"""One record for each file whose delivery has ended, appended before the manager may forget it, and only once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from schedd_agent import agent as agent_module
from schedd_agent import file_records
from schedd_agent.file_records import FileRecorder, key_of, records_of
from schedd_agent.model import ReportedSandbox
from stageout.core import durable
from stageout.core.errors import ErrorClass
from stageout.core.failures import FILE_NAME as FAILURES
from stageout.core.failures import FailureLog
from stageout.core.history import FILE_NAME, HistoryFile, newest_first
from stageout.core.states import State
from stageout.model.job import HistoryRecord, MailRecipient, Status
from stageout.wire.custody import FILES_SHOWN, Action, FileReport, JobKey, Report, SandboxReport, read_notice, report_ad
from tests.unit.test_agent_daemon import JOB, JOB_KEY, USER, Site

URL = "https://dest.example.org/alice/7/{}"
FILES = tuple(
    FileReport(name, URL.format(name), size, "Delivered", "stageout_curl_plugin", 1, verified="md5")
    for name, size in (("a", 2), ("b", 3))
)
#: Attributes that only newer managers report.
NEWER = {
    "AcctGroup", "StageOutConfirmedAt", "StageOutEndedAt", "TransferStartTime", "TransferEndTime", "StageOutDigests",
    "StageOutStreams", "StageOutRoute", "StageOutBytesPerSecond",
}  # fmt: skip
BOX = SandboxReport(JOB, 1, USER, "Released", 3, "", 0, ("t1",), 2, 0, 5, 0, 1, 0, 0, 1_699_999_990, files=FILES)


class Kept(Site):
    """A site whose agent records files."""

    def start(self, name: str = "ap") -> Any:
        agent = super().start(name)
        file = HistoryFile(self.path / FILE_NAME, key_of, self.clock.wall_s)
        agent.file_recorder = FileRecorder(file, agent.receipts, self.clock)
        agent.failures = FailureLog(self.path / FAILURES)
        return agent

    def reports(self, box: SandboxReport, acknowledged: int = 0) -> None:
        """The manager reports this sandbox."""
        self.number += 1
        box = replace(box, change=self.number)
        numbering = self.agent.order_outbox.numbering
        ad = report_ad(Report("m1", "", self.number, 1, {numbering: acknowledged}, 0, (box,)))
        self.collector.ads["StageOutManager", "m1"] = ad

    def leave(self, **more: Any) -> None:
        """The job leaves the queue."""
        self.queue.found.pop(JOB, None)
        status = more.pop("status", Status.COMPLETED)
        self.queue.left[JOB] = HistoryRecord(status, 1, owner="alice", mail=MailRecipient(), **more)

    @property
    def records(self) -> list[dict[str, Any]]:
        """The records, oldest first."""
        return [entry.attributes() for entry in newest_first(self.path / FILE_NAME)][::-1]

    @property
    def ends(self) -> list[tuple[Any, str]]:
        return [(ad.get("TransferFileName"), ad["StageOutState"]) for ad in self.records]

    @property
    def forgets(self) -> bool:
        return Action.FORGET in {order.action for order in self.orders}


@pytest.fixture
def site(tmp_path: Path) -> Kept:
    made = Kept(tmp_path)
    made.complete()
    return made


def test_delivered_files_are_recorded_with_all_that_is_known(site: Kept) -> None:
    site.reports(BOX)
    site.passes(3)
    assert site.forgets
    first, second = site.records
    assert first == {
        "MyType": "StageOutFile", "GlobalJobId": JOB, "ClusterId": 7, "ProcId": 0, "NumShadowStarts": 1,
        "Owner": "alice", "StageOutManager": "m1", "StageOutTickets": "t1", "StageOutAcceptedAt": 1_699_999_990,
        "StageOutFileNumber": 0, "StageOutFiles": 1, "StageOutState": "Delivered", "TransferFileBytes": 2,
        "TransferSuccess": True, "TransferFileName": "a", "TransferUrl": URL.format("a"),
        "TransferProtocol": "https", "TransferHostName": "dest.example.org", "StageOutAttempts": 1,
        "StageOutPlugin": "stageout_curl_plugin", "StageOutVerified": "md5",
        "RecordWriteDate": first["RecordWriteDate"],
    }  # fmt: skip
    assert 1_700_000_100 < first["RecordWriteDate"] < 1_700_000_200
    assert (second["TransferFileName"], second["StageOutFileNumber"]) == ("b", 1)


def test_the_records_of_a_report_of_any_size_are_bounded() -> None:
    long = "x" * 5000
    file = replace(FILES[0], name=long, url=f"https://{long}/a", error=long, verified=long, digest=long, plugin=long)
    box = replace(BOX, state="Cancelled", files=(file,) * 200, files_total=200, reason=long, group=long)
    found = records_of(ReportedSandbox("m1", "", box), long, 1)
    assert [ad["StageOutFiles"] for ad in found] == [*[1] * FILES_SHOWN, 150]
    assert max(len(str(ad)) for ad in found) < 10_000


def test_late_failures_are_recorded_some_at_a_time(site: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "_FAILURES_AT_ONCE", 1)
    site.leave()
    other = JOB.replace("#7.", "#8.")
    site.queue.left[other] = replace(site.queue.left[JOB])
    site.agent.records_written = site.agent.file_recorder.has_receipts = False  # type: ignore[union-attr]
    boxes = tuple(replace(BOX, job=job, state="Failed", files_left=2) for job in (JOB, other))
    site.collector.ads["StageOutManager", "m1"] = report_ad(Report("m1", "", 1, 1, {}, 0, boxes))
    site.passes()
    assert {ad["GlobalJobId"] for ad in site.records} == {JOB}
    site.passes()
    assert {ad["GlobalJobId"] for ad in site.records} == {JOB, other}


def test_they_are_recorded_once_also_by_another_agent(site: Kept) -> None:
    site.reports(BOX)
    site.passes(3)
    site.start()
    site.passes(3)
    assert len(site.records) == 2


def test_files_that_the_report_does_not_list_are_summed_up(site: Kept) -> None:
    site.reports(replace(BOX, files_total=70, bytes_total=105))
    site.passes(3)
    rest = site.records[2]
    assert (rest["StageOutFiles"], rest["TransferFileBytes"], rest["StageOutState"]) == (68, 100, "Delivered")
    assert rest["TransferSuccess"] is True
    assert not {"TransferFileName", "TransferUrl", "StageOutFileNumber", "StageOutPlugin"} & set(rest)
    site.start()
    site.passes(3)
    assert len(site.records) == 3


def test_of_output_that_was_given_up_some_files_may_have_arrived(site: Kept) -> None:
    failed = replace(FILES[1], state="Failed", error="507: no space left", error_code=71, attempts=9, verified="")
    box = replace(
        BOX, state="Cancelled", reason="given up", files=(failed, FILES[0]),
        files_total=10, files_left=4, bytes_total=105, bytes_left=53,
    )  # fmt: skip
    site.leave(status=Status.REMOVED)
    site.reports(box)
    site.passes(3)
    assert site.forgets
    assert site.ends == [("b", "Failed"), ("a", "Delivered"), (None, "Delivered"), (None, "Cancelled")]
    bad, _, arrived, left = site.records
    assert (bad["TransferError"], bad["StageOutErrorCode"], bad["StageOutReason"]) == (
        "507: no space left",
        71,
        "given up",
    )
    assert bad["StageOutErrorClass"] == ErrorClass.from_code(71).name
    assert (arrived["StageOutFiles"], arrived["TransferFileBytes"]) == (5, 50)
    assert (left["StageOutFiles"], left["TransferFileBytes"], left["TransferSuccess"]) == (3, 50, False)


def test_files_that_were_given_up_count_as_not_delivered(site: Kept) -> None:
    dropped = replace(FILES[0], state="Cancelled", verified="", error="503: busy", error_code=44)
    box = replace(
        BOX, state="Cancelled", files=(dropped, FILES[1]), files_total=3, bytes_total=13,
        files_dropped=9, bytes_dropped=42,
    )  # fmt: skip
    site.leave(status=Status.REMOVED)
    site.reports(box)
    site.passes(3)
    assert site.ends == [("a", "Cancelled"), ("b", "Delivered"), (None, "Delivered"), (None, "Cancelled")]
    assert [(ad["StageOutFiles"], ad["TransferFileBytes"]) for ad in site.records[2:]] == [(2, 10), (8, 40)]
    assert site.records[0]["TransferError"] == "503: busy"


def test_what_newer_managers_report_is_recorded(site: Kept) -> None:
    file = replace(
        FILES[0], size_bytes=3000, began_at=1_700_000_010, ended_at=1_700_000_040, digest="md5:0a sha256:0b", streams=4,
        transfer_ms=2000, route="a:1,b:2",
    )  # fmt: skip
    box = replace(
        BOX, files=(file,), files_total=1, bytes_total=3000, group="physics.atlas", confirmed_at=1_700_000_000,
        ended_at=1_700_000_041,
    )  # fmt: skip
    site.reports(box)
    site.passes(3)
    (ad,) = site.records
    assert {name: ad[name] for name in NEWER} == {
        "AcctGroup": "physics.atlas", "StageOutConfirmedAt": 1_700_000_000, "StageOutEndedAt": 1_700_000_041,
        "TransferStartTime": 1_700_000_010, "TransferEndTime": 1_700_000_040, "StageOutDigests": "md5:0a sha256:0b",
        "StageOutStreams": 4, "StageOutRoute": "a:1,b:2", "StageOutBytesPerSecond": 1500,
    }  # fmt: skip


def test_output_of_a_run_that_was_superseded_is_not_recorded(site: Kept) -> None:
    site.complete(run=2)
    site.reports(replace(BOX, state="Superseded", files_left=2, bytes_left=5))
    site.passes(3)
    assert (site.records, site.forgets) == ([], True)


def test_a_manager_that_no_record_names_cannot_fill_the_history(site: Kept) -> None:
    site.leave()
    site.reports(replace(BOX, tickets=("another",)))
    site.passes(3)
    assert (site.records, site.forgets) == ([], True)


def test_without_records_of_hand_offs_all_managers_are_believed(site: Kept) -> None:
    assert site.agent.file_recorder
    site.agent.file_recorder.has_receipts = False
    site.leave()
    site.reports(replace(BOX, tickets=("another",)))
    site.passes(3)
    assert len(site.records) == 2


def test_the_owner_is_the_one_in_the_access_points_own_record(site: Kept) -> None:
    site.reports(BOX)
    site.passes(3)
    assert {ad["Owner"] for ad in site.records} == {"alice"}


def test_output_of_another_owner_is_not_recorded(site: Kept) -> None:
    site.reports(replace(BOX, owner="root"))
    site.passes(3)
    assert site.records == []
    assert {(order.owner, order.action) for order in site.orders} == {(USER, Action.CONFIRM), ("root", Action.FORGET)}


def test_failures_after_the_job_had_left_are_recorded_at_once_and_not_again_with_their_loss(site: Kept) -> None:
    site.reports(replace(BOX, state="Moving", files_left=2, bytes_left=5))
    site.passes()
    site.leave()
    failed = replace(FILES[0], state="Failed", error="403: no", error_code=30)
    box = replace(BOX, state="Failed", reason="403: no", files=(failed, FILES[1]), files_left=1, bytes_left=2)
    site.reports(box)
    site.passes(3)
    assert (site.ends, site.forgets) == ([("a", "Failed"), ("b", "Delivered")], False)
    site.start()
    site.reports(replace(box, state="Lost"))
    site.passes(3)
    assert (len(site.records), site.forgets) == (2, True)


def test_what_cannot_be_recorded_is_not_forgotten(site: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    site.reports(BOX)
    monkeypatch.setitem(durable._faults, "history-append", [durable.Fault("ENOSPC", None)])
    site.passes(20)
    assert (site.records, site.forgets) == ([], False)
    notice = read_notice(site.collector.ads["StageOutAgent", "ap"]["StageOutPayload"])
    assert "No space left" in notice.extra["history_problem"]
    monkeypatch.setitem(durable._faults, "history-append", [])
    site.passes(20)
    assert (len(site.records), site.forgets) == (2, True)
    notice = read_notice(site.collector.ads["StageOutAgent", "ap"]["StageOutPayload"])
    assert notice.extra["history_problem"] == ""


def test_an_unreadable_history_keeps_orders_back(site: Kept) -> None:
    (site.path / FILE_NAME).mkdir()
    site.reports(BOX)
    site.passes(3)
    assert not site.forgets
    (site.path / FILE_NAME).rmdir()
    site.passes(3)
    assert (len(site.records), site.forgets) == (2, True)


class _Death(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("label", ["history-append", "orders-forget"])
@pytest.mark.parametrize("when", ["kill-before", "kill-after"])
def test_a_death_loses_and_doubles_nothing(site: Kept, monkeypatch: pytest.MonkeyPatch, label: str, when: str) -> None:
    def die() -> None:
        raise _Death

    site.reports(BOX)
    monkeypatch.setattr(durable, "die", die)
    monkeypatch.setitem(durable._faults, label, [durable.Fault(when, None)])
    with pytest.raises(_Death):
        site.passes(3)
    assert not site.forgets
    monkeypatch.setitem(durable._faults, label, [])
    site.start()
    site.passes(3)
    assert (len(site.records), site.forgets) == (2, True)


def test_numbers_of_orders_that_cannot_be_stored_double_nothing(site: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    site.reports(BOX)
    monkeypatch.setitem(durable._faults, "orders-forget", [durable.Fault("ENOSPC", None)])
    site.passes(3)
    monkeypatch.setitem(durable._faults, "orders-forget", [])
    site.passes(3)
    assert (len(site.records), site.forgets) == (2, True)


def test_one_pass_records_only_so_many(site: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_records, "_MOST_AT_ONCE", 1)
    recorder = site.agent.file_recorder
    assert recorder
    items = [ReportedSandbox("m1", "", replace(BOX, number=number)) for number in (1, 1)]
    other = JobKey("ap#8.0#1", USER)
    late = recorder.record(
        [(JOB_KEY, _forget(1)), (other, _forget(1))], {JOB_KEY: items[:1], other: items[1:]}
    )  # fmt: skip
    assert late == {(other, _forget(1))}


def _forget(run: int) -> Any:
    from schedd_agent.model import SendOrder

    return SendOrder("m1", Action.FORGET, run)


@pytest.mark.parametrize("url", ["", "file:///x/y", "http://[::1", "no url", "x://", "http://h:80"])
def test_any_url_gives_a_record(url: str) -> None:
    box = replace(BOX, files=(replace(FILES[0], url=url),), files_total=1, bytes_total=2)
    (ad,) = records_of(ReportedSandbox("m1", "k", box), "alice", 1)
    assert ad.get("TransferUrl", "") == url


@pytest.mark.parametrize("numbers", [(0, 0, 0, 0), (1, 5, 0, 9), (9, 0, 9, 0), (5, 9, 5, 9)])
def test_no_figures_give_a_record_of_less_than_nothing(numbers: Sequence[int]) -> None:
    total, left, size, size_left = numbers
    box = replace(
        BOX, state=State.LOST.value, files_total=total, files_left=left, bytes_total=size, bytes_left=size_left
    )  # fmt: skip
    for ad in records_of(ReportedSandbox("m1", "k", box), "alice", 1):
        assert ad["StageOutFiles"] > 0
        assert ad["TransferFileBytes"] >= 0


def test_the_reference_has_all_attributes_of_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "docs/_ext"))
    import descriptions

    file = replace(FILES[0], state="Failed", error="no", error_code=30)
    files = (file, FILES[1])
    box = replace(BOX, state="Cancelled", reason="why", files=files, files_total=4, files_left=2)
    written = {name for ad in records_of(ReportedSandbox("m1", "k", box), "alice", 1) for name in ad}
    ours = {name for name, (where, *_) in descriptions.ATTRIBUTES.items() if where == "history"}
    assert written <= ours | set(descriptions.FILE_RECORD)
    assert ours | set(descriptions.FILE_RECORD) <= written | NEWER
