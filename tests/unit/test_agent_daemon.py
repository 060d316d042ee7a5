"""The agent's passes against a queue and a collector in memory, and its process with signals."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from schedd_agent import agent as agent_module
from schedd_agent.agent import Agent, together_after
from schedd_agent.collector import CollectorSnapshot, OtherPoolSnapshot
from schedd_agent.custodian_client import CustodianClient
from schedd_agent.custodians import CustodyTable
from schedd_agent.daemon import Daemon, kept_in, limits_of, main, pause_s
from schedd_agent.decisions import decide
from schedd_agent.edits import Change, Edit
from schedd_agent.liveness import LivenessTracker
from schedd_agent.mail import CondorMailer, MailQueue
from schedd_agent.metrics import _EFFECTS, put_pool, put_pool_matters
from schedd_agent.model import (
    DagEnd,
    DecisionInput,
    DecisionLimits,
    Effect,
    Hold,
    KeepInQueue,
    MarkDelivered,
    ReportedSandbox,
    UpdateAdState,
)
from schedd_agent.orders import OrderNumbers, OrderOutbox
from schedd_agent.queue import QueueError
from schedd_agent.receipts import DIRECTORY, Receipts
from schedd_agent.reports import NewestReportNumbers
from stageout.condor.bindings import CondorError
from stageout.core import durable
from stageout.core.clock import SystemClock
from stageout.core.config import ConfigError, mapping_settings
from stageout.core.metrics import METRICS, Readings
from stageout.core.metrics_server import rendered
from stageout.core.reasons import HOLD_SUBCODE_BASE
from stageout.core.signing import SigningKey
from stageout.core.states import State
from stageout.daemon import EXIT_NO_RESTART, supervise
from stageout.model.job import HOLD_CODE, HistoryRecord, Job, JobAdState, Status
from stageout.wire.custody import (
    AGENT_AD,
    ORDERS_AD,
    Action,
    FileReport,
    FlowReport,
    JobKey,
    Order,
    Report,
    SandboxReport,
    ServerReport,
    identities_in,
    left_in,
    left_jobs_in,
    payload_of,
    read_notice,
    read_orders,
    read_report,
    report_ad,
    silent_in,
)
from stageout.wire.matters import Kind
from stageout.wire.services import Letters

JOB = "ap#7.0#1700000000"
USER = "alice@test"
JOB_KEY = JobKey(JOB, USER)
KEY, MANAGER_KEY, OTHER_KEY = (SigningKey(letter * 32) for letter in (b"a", b"m", b"o"))
RECORD = (
    "NumShadowStarts = {run}\n"
    'OutputPluginResultList = {{ [ DeveloperData = [ StageOutReceipt = [ Ticket = "t{run}"; ManagerName = "m1"; '
    'ManagerKey = "{key}"; Files = 2; Bytes = 5 ] ] ] }}\n'
    '*** OUTPUT ClusterId=7 ProcId=0 RunInstanceId={before} Owner="alice" CurrentTime=1\n'
)
_SHOWN = {
    "StageOutState": "state",
    "StageOutRun": "run",
    "StageOutReason": "reason",
    "StageOutBytesLeft": "bytes_left",
    "StageOutFilesLeft": "files_left",
    "StageOutAttempts": "attempts",
    "StageOutNextAttempt": "next_attempt_at",
    "StageOutManager": "manager",
    "StageOutKeys": "keys",
    "StageOutCustody": "custody",
}
_JOB = {
    "JobStatus": "status",
    "HoldReasonCode": "hold_code",
    "HoldReasonSubCode": "hold_subcode",
    "NumJobCompletions": "completions",
    "StageOutReruns": "reruns",
    "StageOutRequest": "request",
    "StageOutUntold": "unlogged_hold_run",
    "StageOutKeptUntil": "kept_until",
}


class MemoryClock:
    now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return 1_700_000_000 + self.now_s


@dataclass
class MemoryQueue:
    """Jobs in memory; edits work on them as on a schedd's."""

    found: dict[str, Job] = field(default_factory=dict)
    left: dict[str, HistoryRecord] = field(default_factory=dict)
    stats: dict[str, str] = field(default_factory=dict)
    refuses: bool = False
    down: bool = False
    transactions: list[tuple[tuple[str, ...], str]] = field(default_factory=list)

    def jobs(self, reported: Collection[JobKey]) -> list[Job]:
        if self.down:
            raise QueueError("the schedd does not answer")
        return list(self.found.values())

    def history_records(self, jobs: Collection[JobKey]) -> dict[JobKey, HistoryRecord]:
        return {key: self.left[key.name] for key in jobs if key.owner == USER and key.name in self.left}

    def ids(self, first: int, last: int) -> set[tuple[int, int]]:
        found = {(job.cluster, job.proc) for job in self.found.values()}
        return {ids for ids in found if first <= ids[0] <= last}

    def dags(self, clusters: Collection[int]) -> dict[int, DagEnd]:
        return {}

    def remove(self, job: Job, reason: str) -> None:
        del self.found[job.name]
        self.left[job.name] = HistoryRecord(Status.REMOVED, job.run)

    def apply(self, edit: Edit) -> None:
        for change in edit.changes:
            self.set_in([edit.job_id], change)
        if self.refuses:
            raise QueueError("not a queue super user")
        name = self._name_of(edit.job_id)
        if name is None:
            return
        job = self.found[name]
        if edit.atomic and f"JobStatus == {int(job.status)} && NumShadowStarts == {job.run}" not in edit.condition:
            raise QueueError("the job has moved on")
        for attribute, value in edit.atomic:
            self._set(name, attribute, value)
        if edit.command and edit.command.tool == "condor_release":
            self.found[name] = replace(self.found[name], status=Status.COMPLETED)
        self._leave(name)

    def set_in(self, job_ids: Sequence[str], change: Change) -> None:
        if self.refuses:
            raise QueueError("not a queue super user")
        names = [self._name_of(job_id) for job_id in job_ids]
        self.transactions.append((tuple(job_ids), change.name))
        for name in names:
            if name is None:
                raise QueueError(f"{job_ids}: no such job")
        for name in filter(None, names):
            self._set(name, change.name, change.value)
            self._leave(name)

    def _name_of(self, job_id: str) -> str | None:
        return next((name for name, job in self.found.items() if f"{job.cluster}.{job.proc}" == job_id), None)

    def _set(self, name: str, attribute: str, text: str) -> None:
        job = self.found[name]
        value: Any = text[1:-1] if text.startswith('"') else int(text) if text.isdigit() else text
        if attribute in _SHOWN:
            self.found[name] = replace(job, ad_state=replace(job.ad_state, **{_SHOWN[attribute]: value}))
        elif attribute in _JOB:
            self.found[name] = replace(job, **{_JOB[attribute]: "" if value == "undefined" else value})
        elif attribute == "StageOutStats":
            self.stats[name] = text

    def _leave(self, name: str) -> None:
        job = self.found[name]
        if job.status == Status.COMPLETED and (job.ad_state.state, job.ad_state.run) == ("Delivered", job.run):
            self.left[name] = HistoryRecord(Status.COMPLETED, job.run)
            del self.found[name]


@dataclass
class MemoryCollector:
    """Ads in memory."""

    ads: dict[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    down: bool = False
    age_s: float = 0.0

    def query_reports(self) -> CollectorSnapshot:
        if self.down:
            raise CondorError("the collector does not answer")
        self.age_s += 1
        return CollectorSnapshot(
            [ad for ad in self.ads.values() if ad["MyType"] in ("StageOutManager", "Machine")],
            self.age_s,
            letters=[
                {"LastHeardFrom": ad["StageOutSentAt"], **ad} for ad in self.ads.values() if ad["MyType"] == AGENT_AD
            ],
        )

    def publish(self, ads: Sequence[Mapping[str, Any]]) -> None:
        if self.down:
            raise CondorError("the collector does not answer")
        self.ads.update({(ad["MyType"], ad["Name"]): ad for ad in ads})


class Site:
    """An agent and what is round it; the manager is played by the test."""

    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path
        self.clock, self.queue, self.collector = MemoryClock(), MemoryQueue(), MemoryCollector()
        self.number = 0
        self.agent = self.start()

    def start(self, name: str = "ap") -> Agent:
        """A new process: only files, queue and collector are what they were."""
        self.agent = Agent(
            name, KEY, self.queue, self.collector, Receipts(self.path),
            OrderOutbox(name, OrderNumbers(self.path / "number", 1.0)), LivenessTracker(60.0), self.clock,
            DecisionLimits(lease_s=600.0),
            OrderNumbers(self.path / "notices", 1.0), NewestReportNumbers(self.path / "seen"),
        )  # fmt: skip
        return self.agent

    def passes(self, count: int = 1, step_s: float = 5.0) -> bool:
        good = True
        for _ in range(count):
            self.clock.now_s += step_s
            good = self.agent.run_pass()
        return good

    def complete(self, run: int = 1, key: str = "") -> None:
        """The job ends a run that handed two files off to m1, whose public key is ``key``."""
        with open(self.path / "job.runs.7.0.ads", "a") as stream:
            stream.write(RECORD.format(run=run, before=run - 1, key=key))
        old = self.queue.found.get(JOB) or Job(JOB, 7, 0, Status.RUNNING, run, USER)
        self.queue.found[JOB] = replace(
            old, status=Status.COMPLETED, run=run, handed_off=2, completions=old.completions + 1
        )

    def report(
        self, state: State, run: int = 1, acknowledged: int = 0, key: SigningKey | None = None, place: str = "m1",
        ends_in_s: int = 0, ticket: str = "", lease_s: int = 0, interval_s: int = 0,
    ) -> None:  # fmt: skip
        """The manager (or who says so, with another key) puts its report into an ad called ``place``."""
        self.number += 1
        left = 0 if state is State.DELIVERED else 2
        box = SandboxReport(
            JOB,
            run,
            USER,
            state.value,
            self.number,
            "why",
            72,
            (ticket or f"t{run}",),
            2,
            left,
            5,
            left,
            1,
            0,
            0,
            0,
        )
        report = Report(
            "m1",
            key.public if key else "",
            self.number,
            1,
            {self.agent.order_outbox.numbering: acknowledged},
            0,
            (box,),
            ends_in_s=ends_in_s,
            lease_s=lease_s,
            interval_s=interval_s,
        )
        ad = report_ad(report, key)
        kind = {} if place == "m1" else {"MyType": "Machine", "Name": place}
        self.collector.ads["StageOutManager", place] = {**ad, **kind}

    @property
    def job(self) -> Job:
        return self.queue.found[JOB]

    @property
    def orders(self) -> list[Order]:
        return self.orders_for("")

    def orders_for(self, key: str) -> list[Order]:
        """Orders for m1, if it is the one with this key."""
        ad = self.collector.ads.get(("StageOutOrders", f"ap/m1/{key}".rstrip("/")))
        return list(read_orders(ad["StageOutPayload"]).orders) if ad else []


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_job_is_confirmed_shown_delivered_and_forgotten(site: Site) -> None:
    site.complete()
    site.report(State.ACCEPTED)
    site.passes()
    (order,) = site.orders
    assert (order.action, order.tickets, order.files, order.run_number) == (Action.CONFIRM, ("t1",), 2, 1)
    assert site.job.ad_state.state == "Accepted"
    site.report(State.MOVING, acknowledged=order.number)
    site.passes(5)
    assert site.orders == []
    assert site.job.ad_state == JobAdState("Moving", 1, "why; 2 files, 2 B left", 2, 2, 1, 0, "m1")
    site.report(State.DELIVERED, acknowledged=order.number)
    site.passes()
    assert site.queue.left[JOB] == HistoryRecord(Status.COMPLETED, 1)
    assert "Bytes = 5" in site.queue.stats[JOB]
    site.passes()
    assert [order.action for order in site.orders] == [Action.FORGET]


@pytest.mark.parametrize("counted", [0, 1, 2])
def test_the_record_counts_after_a_failed_transfer(site: Site, counted: int) -> None:
    """A shadow may end at the failure, before it has counted the results of the plugins."""
    site.complete()
    held = replace(site.job, status=Status.HELD, hold_code=12, hold_subcode=2, handed_off=counted, completions=0)
    site.queue.found[JOB] = held
    site.report(State.ACCEPTED)
    site.passes()
    (order,) = site.orders
    assert (order.action, order.tickets, order.files) == (Action.CONFIRM, ("t1",), 2)
    site.report(State.DELIVERED, acknowledged=order.number)
    site.passes()
    assert (site.job.status, site.job.hold_code, site.job.hold_subcode) == (Status.HELD, 12, 2)
    assert site.job.ad_state.state == "Delivered"
    assert "the job stays held: `condor_release` runs it again" in site.job.ad_state.reason
    site.passes()
    assert [order.action for order in site.orders] == [Action.FORGET]


@pytest.mark.parametrize("state", [State.ACCEPTED, State.MOVING, State.DELIVERED])
def test_a_release_after_a_failed_transfer_takes_back_what_is_not_sent(site: Site, state: State) -> None:
    site.complete()
    site.queue.found[JOB] = replace(site.job, status=Status.HELD, hold_code=12, hold_subcode=2, completions=0)
    site.report(state)
    site.passes()
    site.queue.found[JOB] = replace(site.job, status=Status.IDLE, hold_code=0, hold_subcode=0)
    site.passes(5)
    expected = Action.FORGET if state is State.DELIVERED else Action.SUPERSEDE
    assert site.orders[-1].action is expected
    assert site.job.ad_state.state == "None"


def test_an_error_about_one_job_is_logged_once_and_the_others_go_on(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def decide_all_but_one(given: DecisionInput, limits: DecisionLimits) -> list[Effect]:
        if given.name != JOB:
            raise ValueError("odd")
        return decide(given, limits)

    monkeypatch.setattr(agent_module, "decide", decide_all_but_one)
    site.complete()
    site.queue.found["ap#8.0#1"] = replace(site.job, name="ap#8.0#1", cluster=8)
    site.report(State.ACCEPTED)
    assert site.passes(3)
    assert [order.action for order in site.orders] == [Action.CONFIRM]
    assert caplog.text.count("decision-failed") == 1


def test_records_of_jobs_that_have_left_are_removed_two_leases_later(site: Site) -> None:
    """Not at the start, when managers have not reported yet; nor while the job is in the queue, or reported."""
    directory = site.path / DIRECTORY
    site.agent.receipts = Receipts(directory)
    site.passes()
    site.queue.found[JOB] = Job(JOB, 7, 0, Status.COMPLETED, 1, USER)
    left = {name: directory / f"job.runs.{name}.ads" for name in ("7.0", "8.0", "9.0")}
    old_s = site.clock.wall_s() - 4000
    for name, path in left.items():
        path.touch()
        os.utime(path, (old_s, old_s) if name != "9.0" else (site.clock.wall_s() + 3700,) * 2)
    site.passes()
    assert all(path.exists() for path in left.values()), "it has just begun"
    site.clock.now_s += 3601
    site.passes()
    assert [name for name, path in left.items() if path.exists()] == ["7.0", "9.0"]


@pytest.mark.parametrize("last", [State.DELIVERED, State.FAILED, State.LOST])
@pytest.mark.parametrize("quick", [False, True])
def test_a_retry_ends_the_state_of_a_job_without_a_record(site: Site, quick: bool, last: State) -> None:
    """It was offered, delivered, and then the same sentence stood there again."""
    site.complete()
    (site.path / "job.runs.7.0.ads").unlink()
    site.report(State.ACCEPTED)
    site.passes(30)
    assert "`stageout retry` delivers" in site.job.ad_state.reason
    site.queue.found[JOB] = replace(site.job, request="retry")
    site.passes()
    number = max(order.number for order in site.orders)
    assert {order.action for order in site.orders} == {Action.CONFIRM, Action.RETRY}
    for state in () if quick else (State.CONFIRMED, State.MOVING, State.MOVING):
        site.report(state, acknowledged=number)
        site.passes(step_s=30.0)
        site.start()
    site.report(last, acknowledged=number)
    site.passes(4, step_s=30.0)
    if last is State.DELIVERED:
        assert site.queue.left[JOB] == HistoryRecord(Status.COMPLETED, 1)
    else:
        assert site.job.status == (Status.HELD if last is State.FAILED else Status.IDLE)
    assert JOB in site.queue.left or not site.job.request


@pytest.mark.parametrize(
    "when", [State.ACCEPTED, State.CONFIRMED, State.MOVING, State.DELIVERED, State.FAILED, State.LOST]
)
def test_a_restart_at_any_point_changes_nothing(tmp_path: Path, when: State) -> None:
    plain, restarted = Site(tmp_path / "a"), Site(tmp_path / "b")
    for site in (plain, restarted):
        site.path.mkdir()
        site.complete()
        for state in (State.ACCEPTED, State.CONFIRMED, State.MOVING, when):
            site.report(state)
            if site is restarted:
                site.start()
            site.passes(2, step_s=30.0)
    assert plain.queue.found.get(JOB) == restarted.queue.found.get(JOB)
    assert plain.queue.left == restarted.queue.left
    kept = [{(order.action, order.run_number) for order in site.orders} for site in (plain, restarted)]
    assert kept[1] <= kept[0] | {(Action.CONFIRM, 1)}


def test_progress_is_written_seldom_and_ends_at_once(site: Site) -> None:
    site.complete()
    site.report(State.ACCEPTED)
    site.passes()
    site.report(State.MOVING)
    site.passes(2)
    assert site.job.ad_state.state == "Accepted"
    site.passes(2)
    assert site.job.ad_state.state == "Moving"
    site.report(State.FAILED)
    site.passes()
    assert (site.job.status, site.job.hold_subcode) == (Status.HELD, 20072)


def _jobs_of(*clusters: int, **facts: Any) -> list[Job]:
    return [Job(f"ap#{cluster}.0#1", cluster, 0, Status.COMPLETED, 1, USER, **facts) for cluster in clusters]


_DELIVERED = MarkDelivered(JobAdState("Delivered", 1, "1 file"), {})


def test_edits_take_a_bounded_time_and_ends_go_before_progress(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that runs which end meanwhile are confirmed soon, however many jobs' progress is to be written."""
    edited: list[tuple[Sequence[str], str]] = []

    def set_in(job_ids: Sequence[str], change: Change) -> None:
        edited.append((job_ids, change.value))
        site.clock.now_s += 1.1

    monkeypatch.setattr(site.queue, "set_in", set_in)
    monkeypatch.setattr(agent_module, "_LEAST_TOGETHER", 2)
    site.agent._together = 2
    shown = JobAdState("Moving", 1)
    ends = [(job, [UpdateAdState(JobAdState("Failed", 1))]) for job in _jobs_of(8, dag=3)]
    plans: list[Any] = [(job, [UpdateAdState(shown)]) for job in _jobs_of(1, 2, 3)]
    site.queue.found = {job.name: job for job, _ in [*plans, *ends]}
    site.agent._edit_all([*plans, *ends])
    assert edited == [
        (["8.0"], "1"), (["8.0"], '"Failed"'), (["1.0", "2.0"], "1"), (["1.0", "2.0"], '"Moving"')
    ]  # fmt: skip
    assert site.agent.has_edits_left
    edited.clear()
    site.agent._edit_all([(job, [_DELIVERED]) for job in _jobs_of(*range(1, 7))])
    assert {job_id for job_ids, _ in edited for job_id in job_ids} == {"3.0", "1.0"}, "3 was left before"
    assert site.agent.has_edits_left
    site.agent._edit_all([])
    assert not site.agent.has_edits_left


def test_a_node_that_never_comes_back_loses_its_output_after_its_short_lease(site: Site) -> None:
    """The manager sends for 180 s, and is waited for a third longer. A sheet goes to it every 30 s."""
    key = SigningKey(b"m" * 32)
    site.complete(key=key.public)
    site.report(State.MOVING, key=key, lease_s=180)
    site.passes(48)
    assert site.job.status == Status.COMPLETED, "235 s"
    site.passes(2)
    assert (site.job.status, site.job.reruns) == (Status.IDLE, 1)


def test_an_access_point_waits_no_longer_than_its_own_lease(site: Site) -> None:
    key = SigningKey(b"m" * 32)
    site.complete(key=key.public)
    site.report(State.MOVING, key=key, lease_s=7200)
    site.passes(119)
    assert site.job.status == Status.COMPLETED
    site.passes(3)
    assert (site.job.status, site.job.reruns) == (Status.IDLE, 1)


def test_a_changed_lease_is_that_of_sheets_and_of_silent_managers(site: Site) -> None:
    key = SigningKey(b"m" * 32)
    site.complete(key=key.public)
    site.report(State.MOVING, key=key)
    site.passes()
    site.agent.new_rules(KEY, replace(site.agent.limits, lease_s=240.0), 60.0)
    site.passes(40)
    (sheet,) = [ad for (kind, _), ad in site.collector.ads.items() if kind == ORDERS_AD]
    assert read_orders(sheet["StageOutPayload"]).lease_s == 180.0
    assert site.job.status == Status.COMPLETED, "200 s"
    site.passes(10)
    assert (site.job.status, site.job.reruns) == (Status.IDLE, 1)
    assert site.agent.notice_interval_s == 60.0


def test_the_delivery_that_waits_longest_is_written_first(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of texts, 9 and 90 would wait behind all new jobs from 100 to 899."""
    edited: list[str] = []

    def set_in(job_ids: Sequence[str], change: Change) -> None:
        if change.name == "StageOutState":
            edited.extend(job_ids)
        site.clock.now_s += 3

    monkeypatch.setattr(site.queue, "set_in", set_in)
    monkeypatch.setattr(agent_module, "_LEAST_TOGETHER", 2)
    site.agent._together = 2
    old, new = _jobs_of(90, 9, 100, 200), _jobs_of(10, 11, entered_at=5)
    site.agent._edit_all([(job, [_DELIVERED]) for job in old])
    site.agent._edit_all([(job, [_DELIVERED]) for job in [*new, *old[2:], *_jobs_of(5, entered_at=4)]])
    site.agent._edit_all([(job, [_DELIVERED]) for job in [*new, *_jobs_of(5, entered_at=4)]])
    site.agent._edit_all([(job, [_DELIVERED]) for job in new[1:]])
    assert edited == ["9.0", "90.0", "100.0", "200.0", "5.0", "10.0", "11.0"]


@pytest.mark.parametrize(
    ("count", "took_s", "after"),
    [(50, 9.0, 25), (25, 9.0, 12), (12, 9.0, 10), (10, 9.0, 10), (10, 2.0, 10), (10, 0.5, 20), (40, 0.5, 50)],
)
def test_a_slow_schedd_gets_short_batches(count: int, took_s: float, after: int) -> None:
    """Orders of runs that end meanwhile wait for the batch that has begun."""
    assert together_after(count, took_s) == after


def test_batches_have_the_size_that_the_schedd_can_take(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    takes_s = [2.0]

    def set_in(job_ids: Sequence[str], change: Change) -> None:
        sizes.append(len(job_ids))
        site.clock.now_s += takes_s[0]

    monkeypatch.setattr(site.queue, "set_in", set_in)
    plans: list[Any] = [(job, [_DELIVERED]) for job in _jobs_of(*range(1, 100))]
    for took_s, size in ((2.0, 50), (2.0, 25), (0.1, 12), (0.1, 50)):
        takes_s[0] = took_s
        sizes.clear()
        site.agent._edit_all(plans)
        assert sizes[0] == size


def test_one_pass_marks_many_jobs_as_delivered_in_few_transactions(site: Site) -> None:
    jobs = _jobs_of(*range(1, 31))
    site.queue.found = {job.name: job for job in jobs}
    site.agent._edit_all([(job, [KeepInQueue(9), _DELIVERED]) for job in jobs])
    assert not site.queue.found, "all have left the queue"
    assert [name for _, name in site.queue.transactions] == [
        "StageOutKeptUntil", "StageOutStats", "StageOutRun", "StageOutReason", "StageOutState"
    ]  # fmt: skip
    assert site.agent.counts.edits == {"KeepInQueue": 30, "MarkDelivered": 30}


def test_a_job_that_has_left_keeps_no_other_one_from_its_edit(site: Site) -> None:
    jobs = _jobs_of(1, 2, 3)
    site.queue.found = {job.name: job for job in jobs if job.cluster != 2}
    site.agent._edit_all([(job, [KeepInQueue(9), _DELIVERED]) for job in jobs])
    assert not site.queue.found
    assert site.agent.counts.edit_failures == 1
    assert site.agent.counts.edits == {"KeepInQueue": 2, "MarkDelivered": 2}
    assert [name for job_ids, name in site.queue.transactions if "2.0" in job_ids] == ["StageOutKeptUntil"] * 2


def test_edits_that_need_a_transaction_of_their_own_stay_alone(site: Site) -> None:
    jobs = _jobs_of(1, 2)
    held = _jobs_of(3)[0]
    site.queue.found = {job.name: job for job in [*jobs, held]}
    hold = Hold(JobAdState("Failed", 1, "why"), 20072, "why")
    site.agent._edit_all([(jobs[0], [_DELIVERED]), (held, [hold]), (jobs[1], [_DELIVERED])])
    assert [job.status for job in site.queue.found.values()] == [Status.HELD]
    assert (("1.0", "2.0"), "StageOutState") in site.queue.transactions


def test_a_job_under_the_name_of_another_one_is_in_no_group(site: Site) -> None:
    """The group goes by ids, which the queue gives; a job whose name is not its own has no plan at all."""
    site.complete()
    site.report(State.DELIVERED)
    other = Job("ap#9.0#1", 9, 0, Status.COMPLETED, 1, "bob@test", handed_off=2, ad_state=JobAdState("Moving", 1))
    forged = replace(other, name=JOB, cluster=10, user="mallory@test")
    site.queue.found.update({other.name: other, "forged": forged})
    site.passes(3)
    edited = {job_id for job_ids, _ in site.queue.transactions for job_id in job_ids}
    assert "10.0" not in edited
    assert "7.0" in edited


def test_a_silent_manager_loses_its_output_only_after_the_lease(site: Site) -> None:
    site.complete()
    site.passes(100)
    assert site.job.status == Status.COMPLETED
    site.collector.down = True
    assert not site.passes(30)
    site.collector.down = False
    site.passes(15)
    assert site.job.status == Status.COMPLETED, "a hole in the view is not counted"
    site.passes(10)
    assert (site.job.status, site.job.reruns, site.job.completions) == (Status.IDLE, 1, 0)


def test_a_manager_that_has_lost_its_records_gets_its_orders_again(site: Site) -> None:
    """Its ledger came out of a backup: what it acknowledged after that it does not know any more."""
    site.complete()
    site.report(State.ACCEPTED)
    site.passes()
    (order,) = site.orders
    site.report(State.CONFIRMED, acknowledged=order.number)
    site.passes()
    assert site.orders == []
    site.report(State.ACCEPTED, acknowledged=order.number - 1)
    site.passes()
    (again,) = site.orders
    assert (again.action, again.tickets) == (Action.CONFIRM, ("t1",))
    assert again.number > order.number
    site.report(State.CONFIRMED, acknowledged=again.number)
    site.passes()
    assert site.orders == []


def test_output_that_a_manager_without_records_does_not_show_is_asked_for_at_once(site: Site) -> None:
    """It answers that the output is lost, long before its silence about it would."""
    site.complete()
    site.report(State.ACCEPTED)
    site.passes()
    site.report(State.CONFIRMED, acknowledged=site.orders[0].number)
    site.passes()
    site.number += 1
    empty = report_ad(Report("m1", "", site.number, 1, {}, 0, ()))
    site.collector.ads["StageOutManager", "m1"] = empty
    site.passes()
    assert [(order.action, order.tickets) for order in site.orders] == [(Action.CONFIRM, ("t1",))]


def test_a_restart_of_the_agent_starts_the_lease_again(site: Site) -> None:
    site.complete()
    site.passes(100)
    site.start()
    site.passes(100)
    assert site.job.status == Status.COMPLETED
    site.passes(30)
    assert site.job.status == Status.IDLE


def test_the_owners_request_survives_a_crash_before_the_manager_read_it(site: Site) -> None:
    site.complete()
    site.report(State.FAILED)
    site.passes()
    site.queue.found[JOB] = replace(site.job, request="retry")
    site.passes()
    assert Action.RETRY in {order.action for order in site.orders}
    assert site.job.request == "retry"
    site.start()
    site.passes()
    retry = next(order for order in site.orders if order.action is Action.RETRY)
    site.report(State.CONFIRMED, acknowledged=retry.number)
    site.passes()
    assert site.job.request == ""
    site.report(State.DELIVERED, acknowledged=retry.number)
    site.passes()
    assert site.queue.left[JOB].status == Status.COMPLETED


def test_removed_is_cancelled_gone_is_not(site: Site) -> None:
    site.report(State.MOVING)
    site.passes(2)
    assert site.orders == []
    site.queue.left[JOB] = HistoryRecord(Status.REMOVED, 1)
    site.passes(13)
    assert [order.action for order in site.orders] == [Action.CANCEL]


def test_a_job_that_moved_on_is_left_alone(site: Site) -> None:
    site.complete()
    site.report(State.FAILED)

    class Moving(MemoryQueue):
        def apply(self, edit: Edit) -> None:
            self.found[JOB] = replace(self.found[JOB], status=Status.RUNNING, run=2)
            super().apply(edit)

    site.agent.queue = queue = Moving(site.queue.found)
    site.passes()
    assert queue.found[JOB].status == Status.RUNNING


def test_an_agent_that_may_not_edit_stops_saying_that_it_is_alive(site: Site) -> None:
    site.passes(20)
    before = site.collector.ads["StageOutAgent", "ap"]
    assert read_notice(before["StageOutPayload"]).schedd == "ap"
    site.queue.refuses = True
    site.complete()
    site.report(State.MOVING)
    site.passes(60)
    assert site.collector.ads["StageOutAgent", "ap"] != before, "one job may have moved on"
    for cluster in (8, 9):
        other = f"ap#{cluster}.0#1"
        shown = JobAdState("Moving", 1)
        site.queue.found[other] = Job(other, cluster, 0, Status.IDLE, 1, USER, ad_state=shown)
    site.passes(60)
    stopped = site.collector.ads["StageOutAgent", "ap"]
    site.passes(60)
    assert site.collector.ads["StageOutAgent", "ap"] == stopped
    site.queue.refuses = False
    site.passes(20)
    assert site.collector.ads["StageOutAgent", "ap"] != stopped


def test_the_ad_of_a_dead_node_is_no_sign_of_life(site: Site) -> None:
    """It stays in the collector for a quarter of an hour, and in slot ads for as long as the startd lives."""
    site.complete()
    site.report(State.MOVING)
    site.passes(118)
    assert site.job.status == Status.COMPLETED, "590 s"
    site.passes(4)
    assert (site.job.status, site.job.reruns) == (Status.IDLE, 1), "610 s: the lease is over"


def test_a_node_that_reports_lives_whatever_else_is_heard(site: Site) -> None:
    site.complete()
    for _ in range(40):
        site.report(State.MOVING)
        site.passes(20)
    assert (site.job.status, site.job.reruns) == (Status.COMPLETED, 0)


def test_an_older_report_that_comes_again_is_no_sign_of_life(site: Site) -> None:
    site.complete()
    site.report(State.MOVING)
    ((place, ad),) = site.collector.ads.items()
    for _ in range(61):
        site.passes(1)
        del site.collector.ads[place]
        site.passes(1)
        site.collector.ads[place] = ad
    assert site.job.reruns == 1


def test_without_a_schedd_nothing_is_decided_and_no_notice_goes_out(site: Site) -> None:
    site.queue.down = True
    site.report(State.MOVING)
    assert not site.passes(20)
    assert ("StageOutAgent", "ap") not in site.collector.ads
    assert site.orders == []


def test_a_schedd_that_was_renamed_says_so_of_its_older_jobs_and_has_its_orders_obeyed(site: Site) -> None:
    """An order about one of them had the sheet refused, with all others of that manager; and nobody heard why."""
    site.complete()
    site.report(State.ACCEPTED)
    site.start("new")
    for _ in range(20):
        site.report(State.ACCEPTED)
        site.passes(10)
    ads = [ad for (kind, name), ad in site.collector.ads.items() if kind == "StageOutOrders" and name.startswith("new")]
    assert [read_orders(ad["StageOutPayload"]).orders for ad in ads] in ([], [()])
    assert (site.job.status, site.job.ad_state.state) == (Status.COMPLETED, "Accepted")
    assert "its id names the schedd ap, and managers obey only that: set SCHEDD_NAME back" in site.job.ad_state.reason
    site.start("ap")
    site.passes()
    assert [order.action for order in site.orders] == [Action.CONFIRM]


def test_a_job_that_left_the_queue_of_a_schedd_that_was_renamed_has_no_orders(site: Site) -> None:
    """Custodians kept their part of it under its old name, and its managers would refuse the whole sheet."""
    ended = SandboxReport(JOB, 1, USER, "Delivered", 1, "", 0, ("t1",), 2, 0, 5, 0, 1, 0, 0, 0)
    site.queue.found.clear()
    for name, actions in (("new", []), ("ap", [Action.FORGET])):
        agent = site.start(name)
        agent.custody_table = SimpleNamespace(  # type: ignore[assignment]
            with_answers=lambda seen, is_gone: {JOB_KEY: [ReportedSandbox("m1", "", ended)]},
            update_from_jobs=lambda jobs, past, counts: None,
        )
        assert site.passes(2)
        assert [order.action for order in agent.order_outbox.open.values()] == actions


def test_a_shadow_that_only_says_that_the_job_is_done_is_no_newer_run(site: Site) -> None:
    """The schedd had died when the shadow of run 1 ended; the report was made before that run's last hand-off."""
    site.complete()
    site.queue.found[JOB] = replace(site.job, run=2, transferred_at=1)
    site.report(State.ACCEPTED, ticket="t0")
    counts: list[int] = []
    site.agent.custody_table = SimpleNamespace(  # type: ignore[assignment]
        with_answers=lambda seen, is_gone: seen,
        update_from_jobs=lambda jobs, past, number: counts.append(number(jobs[JOB_KEY])),
    )
    site.passes(2)
    assert [(order.action, order.tickets) for order in site.orders] == [(Action.CONFIRM, ("t1",))]
    assert counts[-1] == 1
    (site.path / "job.runs.7.0.ads").unlink()
    site.start().custody_table = SimpleNamespace(  # type: ignore[assignment]
        with_answers=lambda seen, is_gone: seen,
        update_from_jobs=lambda jobs, past, number: counts.append(number(jobs[JOB_KEY])),
    )
    site.passes()
    assert counts[-1] == 0, "which run counts is not known"


def test_a_full_disk_gives_no_orders_and_loses_none(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.complete()
    site.report(State.ACCEPTED)
    with monkeypatch.context() as patch:
        patch.setattr(durable, "_faults", durable.parse_faults("agent-number=ENOSPC"))
        site.passes(2)
        assert site.orders == []
        patch.setattr(durable, "_faults", durable.parse_faults("orders-advertise=EIO"))
        assert not site.passes()
    assert site.passes()
    assert [order.action for order in site.orders] == [Action.CONFIRM]


def test_a_report_with_another_key_than_the_receipts_does_not_count(site: Site) -> None:
    site.complete()
    text = (site.path / "job.runs.7.0.ads").read_text().replace('ManagerKey = ""', 'ManagerKey = "k"')
    (site.path / "job.runs.7.0.ads").write_text(text)
    site.report(State.DELIVERED)
    site.passes()
    assert site.job.status == Status.COMPLETED
    assert site.job.ad_state.state == "Accepted"


# ---- the process --------------------------------------------------------------------------------------------------

_QUICK = {"STAGEOUT_POLL_INTERVAL": "1"}


def _run_until(daemon: Daemon, condition: threading.Event, number: int) -> None:
    def stop() -> None:
        condition.wait(20)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=stop)
    thread.start()
    asyncio.run(asyncio.wait_for(supervise(lambda: daemon), 30))
    thread.join()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_it_works_until_it_is_told_to_stop(site: Site, number: int) -> None:
    worked = threading.Event()
    site.agent.run_pass = lambda: worked.set() or True  # type: ignore[method-assign, func-returns-value]
    _run_until(Daemon(lambda: mapping_settings(_QUICK), lambda _: site.agent), worked, number)
    assert worked.is_set()


@pytest.mark.parametrize(
    ("pass_s", "has_edits_left", "has_news", "expected_s"),
    [
        (0.1, False, False, 5.0),
        (7.5, False, False, 5.0),
        (0.1, False, True, 1.0),
        (1.5, False, True, 3.0),
        (7.5, False, True, 5.0),
        (7.5, True, False, 1.0),
        (7.5, True, True, 1.0),
    ],
)
def test_the_pause_between_passes(pass_s: float, has_edits_left: bool, has_news: bool, expected_s: float) -> None:
    assert pause_s(5.0, pass_s, has_edits_left, has_news) == expected_s


@pytest.mark.parametrize("poll_s", [0.2, 1.0, 5.0, 60.0])
@pytest.mark.parametrize("pass_s", [0.0, 0.7, 7.5, 100.0])
def test_news_and_edits_that_are_left_never_make_the_pause_longer(poll_s: float, pass_s: float) -> None:
    quiet_s = pause_s(poll_s, pass_s, False, False)
    assert pause_s(poll_s, pass_s, False, True) <= quiet_s
    assert pause_s(poll_s, pass_s, True, True) == pause_s(poll_s, pass_s, True, False) <= quiet_s


def test_news_are_looked_for_where_records_are_written(
    site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared = tmp_path / "epoch_history"
    shared.write_text("")
    site.agent.receipts = Receipts(tmp_path, shared)
    site.agent.records_written = False
    assert not site.agent.has_new_receipts()
    site.agent.records_written = True
    assert site.agent.has_new_receipts()
    assert not site.agent.has_new_receipts()
    site.agent.receipts = Receipts(tmp_path, tmp_path)
    assert not site.agent.has_new_receipts(), "it cannot be read"
    assert "records-read-failed" in caplog.text


def test_a_pass_with_edits_left_is_followed_soon_although_runs_end(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon sleeps as long as pause_s says, whenever the news comes."""
    daemon = Daemon(lambda: mapping_settings({"STAGEOUT_POLL_INTERVAL": "600"}), lambda _: site.agent)
    monkeypatch.setattr(site.agent, "has_new_receipts", lambda: True)

    async def paused() -> float:
        daemon._stop = asyncio.Event()
        start_s = asyncio.get_running_loop().time()
        await asyncio.wait_for(daemon._pause(site.agent, 100.0), 20)
        return asyncio.get_running_loop().time() - start_s

    site.agent.has_edits_left = True
    assert 1.0 <= asyncio.run(paused()) < 15.0


def test_a_stop_ends_the_pause_after_news(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = Daemon(lambda: mapping_settings({"STAGEOUT_POLL_INTERVAL": "600"}), lambda _: site.agent)

    async def stopped() -> None:
        seen, loop = asyncio.Event(), asyncio.get_running_loop()
        daemon._stop = asyncio.Event()

        def has_news() -> bool:
            loop.call_soon_threadsafe(seen.set)
            return True

        monkeypatch.setattr(site.agent, "has_new_receipts", has_news)
        pausing = asyncio.create_task(daemon._pause(site.agent, 100.0))
        await seen.wait()
        daemon.stop(fast=False)
        await asyncio.wait_for(pausing, 10)

    asyncio.run(stopped())


def test_it_waits_for_the_schedd(site: Site) -> None:
    worked, tries = threading.Event(), [0]

    def make(_: Any) -> Agent:
        tries[0] += 1
        if tries[0] == 1:
            raise QueueError("no schedd on this machine")
        return site.agent

    site.agent.run_pass = lambda: worked.set() or True  # type: ignore[method-assign, func-returns-value]
    _run_until(Daemon(lambda: mapping_settings(_QUICK), make), worked, signal.SIGTERM)
    assert tries[0] == 2


def test_new_settings_are_taken_and_broken_ones_are_not(site: Site, tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir(exist_ok=True)
    quick = {**_QUICK, "SPOOL": str(tmp_path / "spool")}
    answers = [quick, {**quick, "STAGEOUT_LEASE": "99"}, {"STAGEOUT_LEASE": "soon"}]
    read, taken = threading.Event(), []

    def load() -> Any:
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if len(answers) == 1:
            read.set() if taken else taken.append(1)
        return mapping_settings(found)

    def run_pass() -> bool:
        if not read.is_set():
            os.kill(os.getpid(), signal.SIGHUP)
        return True

    site.agent.run_pass = run_pass  # type: ignore[method-assign]
    _run_until(Daemon(load, lambda _: site.agent), read, signal.SIGTERM)
    assert site.agent.limits.lease_s == 99.0


def test_settings_of_which_one_cannot_be_used_change_nothing(site: Site, tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir(exist_ok=True)
    knobs = {**_QUICK, "SPOOL": str(tmp_path / "spool")}
    answers = [knobs, {**knobs, "STAGEOUT_LEASE": "99", "STAGEOUT_NOTIFY_COMMAND": "notify"}]
    daemon = Daemon(lambda: mapping_settings(answers.pop(0)), lambda _: site.agent)
    daemon._agent, before = site.agent, (site.agent.key, site.agent.limits)
    site.agent.mail_queue = MailQueue(CondorMailer(mapping_settings({}), "ap"), 600.0)
    with pytest.raises(ConfigError, match="STAGEOUT_NOTIFY_COMMAND"):
        daemon._read_settings()
    assert (site.agent.key, site.agent.limits) == before


def test_new_keys_for_custodians_need_no_restart(site: Site, tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir(exist_ok=True)
    knobs = {**_QUICK, "SPOOL": str(tmp_path / "spool"), "STAGEOUT_CUSTODIAN_KEY": "/etc/new.key, /etc/old.key"}
    daemon = Daemon(
        lambda: mapping_settings({**knobs, "STAGEOUT_CUSTODIANS": "gw1.example.org:9621"}), lambda _: site.agent
    )
    daemon._agent = site.agent
    site.agent.custody_table = CustodyTable(
        tmp_path / "custody", (), CustodianClient(Path("/etc/old.key")), SystemClock()
    )
    daemon._read_settings()
    asked = site.agent.custody_table.ask
    assert isinstance(asked, CustodianClient)
    assert asked.keys == (Path("/etc/new.key"), Path("/etc/old.key"))
    assert site.agent.custody_table.allowed == {"gw1.example.org:9621"}


def test_settings_that_come_while_the_agent_is_made_are_taken(site: Site, tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir(exist_ok=True)
    quick = {**_QUICK, "SPOOL": str(tmp_path / "spool")}
    answers = [quick, {**quick, "STAGEOUT_LEASE": "99"}]
    begun, goes_on = threading.Event(), threading.Event()

    def make(_: Any) -> Agent:
        begun.set()
        assert goes_on.wait(30)
        return site.agent

    daemon = Daemon(lambda: mapping_settings(answers.pop(0)), make)

    async def reload_meanwhile() -> None:
        serving = asyncio.create_task(daemon.serve(lambda **_: None))
        await asyncio.get_running_loop().run_in_executor(None, begun.wait, 30)
        reloading = asyncio.create_task(daemon.reload())
        await asyncio.sleep(0)  # the worker has it next
        goes_on.set()
        daemon._worker.submit(int).result(30)  # both are done before the loop hears of the first
        await reloading
        daemon.stop(fast=True)
        await serving

    asyncio.run(asyncio.wait_for(reload_meanwhile(), 60))
    assert site.agent.limits.lease_s == 99.0


def test_a_configuration_that_cannot_be_used_ends_it_for_good(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load() -> Any:
        return mapping_settings({"STAGEOUT_LEASE": "soon"})

    monkeypatch.setattr("stageout.daemon.reader_of", lambda *_: load)
    assert main(["-t"]) == EXIT_NO_RESTART == 99
    assert "STAGEOUT_LEASE" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        Daemon(load, lambda _: pytest.fail("not reached"))


@pytest.mark.parametrize("name", ["stageout_agent", "stageout_agent_seen"])
def test_records_that_may_not_be_read_end_it_for_good_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.setattr("stageout.daemon.reader_of", lambda *_: lambda: mapping_settings({}))
    monkeypatch.setattr("schedd_agent.daemon.make_agent", lambda _: kept_in(tmp_path, 1.0))
    assert main([]) == EXIT_NO_RESTART
    said = capsys.readouterr().err
    assert f"{tmp_path}/stageout_agent, stageout_agent_seen: [Errno 21] Is a directory; they must be files" in said
    assert "daemon-crashed" not in said
    assert "Traceback" not in said


@pytest.mark.parametrize(("poll_s", "history_s"), [(1, 12.0), (5, 60.0), (600, 60.0)])
def test_the_history_is_asked_at_every_twelfth_look_and_once_a_minute_at_least(poll_s: int, history_s: float) -> None:
    assert limits_of(mapping_settings({"STAGEOUT_POLL_INTERVAL": str(poll_s)})).history_s == history_s


def test_the_address_of_the_documents_needs_no_slash() -> None:
    assert limits_of(mapping_settings({"STAGEOUT_DOCS_URL": "https://docs.example.org/x/"})).docs_url.endswith("/x")
    assert limits_of(mapping_settings({})).docs_url == ""


# ---- metrics ---------------------------------------------------------------------------------------------------------


def readings_of(agent: Agent) -> dict[tuple[str, ...], float]:
    """Return the values by name and values of the labels, as Prometheus reads them."""
    text = rendered(agent.readings(), with_process=False).decode()
    families = text_string_to_metric_families(text)
    return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}


def test_every_metric_of_the_agent_and_of_the_pool_has_a_value(site: Site) -> None:
    declared = {name for name, metric in METRICS.items() if metric.part in ("agent", "pool")}
    assert {metric.name for metric, _ in site.agent.readings().items()} == declared
    found = readings_of(site.agent)
    assert found["stageout_agent_reports",] == 0
    first = {
        key: value for key, value in found.items() if key[0].endswith(("edits_total", "jobs", "held", "reruns_total"))
    }
    assert len(first) > 40 and not any(first.values()), "series exist before their first event"


def test_every_edit_has_a_word_of_the_documents(site: Site) -> None:
    """A label is not the name of a class, and no kind of edit is left out."""
    words = {key[1] for key in readings_of(site.agent) if key[0] == "stageout_agent_edits_total"}
    text = METRICS["stageout_agent_edits_total"].help
    assert words == set(re.findall(r"[a-z_]+", text.partition(": ")[2])) - {"or"}
    kinds = {kind.__name__ for kind in typing.get_args(Effect)} - {"SendOrder", "RecordFailure"}
    assert kinds == set(_EFFECTS)


def lost_and_held(site: Site) -> Job:
    """Return the job, whose output was lost more often than it may run again."""
    for run in (1, 2, 3):
        site.complete(run=run)
        site.passes(130)
    assert (site.job.status, site.job.ad_state.state) == (Status.HELD, "Lost")
    return site.job


def test_lost_output_stays_lost_after_a_restart(site: Site) -> None:
    held = lost_and_held(site)
    site.start()
    for _ in range(130):
        site.passes()
        assert site.job == held
    site.report(State.MOVING, run=3)
    site.passes(6)
    assert site.job.ad_state.state == "Moving", "the node has come back"


def test_lost_output_without_a_record_stays_lost_after_a_restart(site: Site) -> None:
    lost_and_held(site)
    for path in site.path.glob("job.runs.*"):
        path.unlink()
    held = site.job
    site.start()
    for _ in range(130):
        site.passes()
        assert site.job == held


def test_the_hold_of_lost_output_is_logged_after_a_restart_with_the_same_reason(site: Site) -> None:
    held = lost_and_held(site)
    site.queue.found[JOB] = replace(held, unlogged_hold_run=3, hold_code=1)
    reason = held.ad_state.reason
    site.start()
    site.passes(2)
    assert site.job.ad_state.state == "Lost"
    assert site.job.ad_state.reason == reason


def test_a_lost_node_of_a_dag_stays_lost_after_a_restart(site: Site) -> None:
    site.complete()
    site.queue.found[JOB] = replace(site.job, dag=3)
    site.passes(130)
    assert site.job.ad_state.state == "Lost"
    site.start()
    site.passes(60)
    assert site.job.ad_state.state == "Lost"


def test_lost_output_is_counted_once_with_its_bytes(site: Site) -> None:
    """A run again, after a loss that the node reports, and one of which only the receipts say how much there was."""
    site.complete()
    site.report(State.MOVING)
    site.passes(2)
    site.report(State.LOST)
    site.passes(3)
    found = readings_of(site.agent)
    assert found["stageout_agent_reruns_total",] == found["stageout_agent_edits_total", "rerun"] == 1
    assert found["stageout_agent_lost_bytes_total",] == 2
    site.collector.ads.pop(("StageOutManager", "m1"))
    site.complete(run=2)
    site.passes(130)
    found = readings_of(site.agent)
    assert found["stageout_agent_reruns_total",] == 2
    assert found["stageout_agent_lost_bytes_total",] == 2 + 5
    site.complete(run=3)
    site.passes(130)
    assert site.job.status == Status.HELD
    found = readings_of(site.agent)
    assert found["stageout_agent_reruns_total",] == 2
    assert found["stageout_agent_lost_bytes_total",] == 2 + 5 + 5


def test_metrics_follow_a_job_to_its_delivery(site: Site) -> None:
    site.complete()
    site.queue.found[JOB] = replace(site.job, entered_at=int(site.clock.wall_s()))
    site.report(State.ACCEPTED)
    site.passes()
    (order,) = site.orders
    found = readings_of(site.agent)
    assert found["stageout_agent_orders_outstanding",] == 1
    assert found["stageout_agent_reports",] == 1
    assert found["stageout_pool_sandboxes", "Accepted"] == 1
    assert found["stageout_pool_nodes", "reporting"] == 1
    assert found["stageout_pool_matters", "silent-node"] == 1, "that report was made at second 1"
    site.report(State.MOVING, acknowledged=order.number)
    site.passes(6)
    assert readings_of(site.agent)["stageout_agent_jobs", "Moving"] == 1
    site.report(State.DELIVERED, acknowledged=order.number)
    site.passes(5)
    found = readings_of(site.agent)
    assert found["stageout_agent_edits_total", "delivered"] == 1
    assert found["stageout_agent_delivery_delay_seconds_count",] == 1
    assert 30 < found["stageout_agent_delivery_delay_seconds_sum",] < 60
    assert found["stageout_agent_passes_total", "done"] == 12
    assert found["stageout_agent_last_pass_timestamp_seconds",] == site.clock.wall_s()


def test_metrics_count_what_fails(site: Site) -> None:
    site.complete()
    site.report(State.FAILED)
    site.queue.refuses = True
    site.passes(2)
    assert readings_of(site.agent)["stageout_agent_edit_failures_total",] == 2
    site.queue.refuses = False
    site.passes(3)
    assert readings_of(site.agent)["stageout_agent_jobs_held", "20072"] == 1
    site.collector.down = True
    site.passes()
    assert readings_of(site.agent)["stageout_agent_passes_total", "failed"] == 1


def left_output(site: Site) -> dict[str, float]:
    """Return the counts above 0 in the metrics; the agent's notice has the same."""
    site.passes(step_s=61)
    found = {key[1]: value for key, value in readings_of(site.agent).items() if "left_output" in key[0] and value}
    notices = (payload_of(ad) for (kind, _), ad in site.collector.ads.items() if kind == AGENT_AD)
    notice = max(map(read_notice, notices), key=lambda one: one.sent_at)
    assert (left_in(notice), left_jobs_in(notice)) == (found, {JOB_KEY} if found else set())
    return found


def test_the_notice_names_silent_nodes_with_the_time_that_is_left(site: Site) -> None:
    def silent() -> list[tuple[str, int, tuple[str, ...]]]:
        notices = (payload_of(ad) for (kind, _), ad in site.collector.ads.items() if kind == AGENT_AD)
        notice = max(map(read_notice, notices), key=lambda one: one.sent_at)
        found = silent_in(notice)
        assert all(one.silent_s + one.lost_in_s == 240 for one in found)
        return [(one.name, one.outputs, one.owners) for one in found]

    key = SigningKey(b"m" * 32)
    site.agent.notice_interval_s = 0.0
    site.complete(key=key.public)
    site.report(State.MOVING, key=key, lease_s=180, interval_s=40)
    site.passes(24)
    assert silent() == [], "115 s"
    site.passes(2)
    assert silent() == [("m1", 1, (USER,))]
    site.collector.ads.pop(("StageOutManager", "m1"))
    site.passes(4)
    assert silent() == [("m1", 1, (USER,))], "its ad has expired"
    site.report(State.MOVING, key=key, lease_s=180, interval_s=40)
    site.passes()
    assert silent() == []


def test_output_whose_job_has_left_the_queue_is_counted_in_metrics_and_notice(site: Site) -> None:
    site.complete()
    site.report(State.MOVING)
    assert left_output(site) == {}
    del site.queue.found[JOB]
    site.queue.left[JOB] = HistoryRecord(Status.COMPLETED, 1)
    for state in (State.MOVING, State.FAILED):
        site.report(state)
        assert left_output(site) == {state.value: 1}
    site.start("ap2")
    assert left_output(site) == {}, "it is output of another schedd"
    site.start()
    site.report(State.DELIVERED)
    assert left_output(site) == {}


def test_values_of_job_ads_are_bounded(site: Site) -> None:
    site.complete()
    held = replace(site.job, status=Status.HELD, hold_code=HOLD_CODE)
    jobs = [
        replace(held, hold_subcode=HOLD_SUBCODE_BASE + 1000 + number, ad_state=JobAdState(f"Invented{number}"))
        for number in range(50)
    ]
    site.agent.counts.count_jobs(jobs)
    found = readings_of(site.agent)
    assert found["stageout_agent_jobs", "other"] == found["stageout_agent_jobs_held", "other"] == 50
    values = [value for key, value in found.items() if key[0] in ("stageout_agent_jobs", "stageout_agent_jobs_held")]
    assert sorted(values)[-2:] == [50, 50] and sum(values) == 100
    assert len(values) < 60


@pytest.mark.parametrize("behind_s", [660, -660])
def test_a_node_with_another_clock_is_not_late(site: Site, behind_s: int) -> None:
    now = int(site.clock.wall_s())
    ad = report_ad(Report("m9", "", 1, now - behind_s, {}, 0))
    site.collector.ads["StageOutManager", "m9"] = {**ad, "LastHeardFrom": now + 1}
    site.passes()
    found = readings_of(site.agent)
    assert (found["stageout_pool_nodes", "reporting"], found["stageout_pool_matters", "silent-node"]) == (1, 0)
    assert found["stageout_agent_oldest_report_age_seconds",] < 60


def test_matters_are_metrics_and_refused_identities_are_in_the_notice(site: Site) -> None:
    site.agent.notice_interval_s = 0.0
    site.complete()
    site.passes()
    found = readings_of(site.agent)
    assert {found["stageout_pool_matters", kind.value] for kind in Kind} == {0}
    since = int(site.clock.wall_s())
    site.queue.found["eve"] = replace(site.job, name=JOB, cluster=77, proc=1, user="eve@x")
    site.passes(2)
    site.clock.now_s += 50
    site.passes(2)
    notices = (payload_of(ad) for (kind, _), ad in site.collector.ads.items() if kind == AGENT_AD)
    (told,) = identities_in(max(map(read_notice, notices), key=lambda one: one.sent_at))
    assert (told.owner, told.what, told.number, told.jobs) == ("eve@x", "job", 1, ("77.1",))
    assert 0 <= told.since_at - since < 30
    found = readings_of(site.agent)
    assert (found["stageout_pool_matters", "identity"], found["stageout_pool_matter_outputs", "identity"]) == (1, 1)
    assert found["stageout_pool_matter_age_seconds", "identity"] >= 50


def test_matters_are_those_of_the_own_pool(site: Site) -> None:
    """The agents of a pool to which jobs flock are not in the own collector."""
    site.complete()
    site.report(State.MOVING)
    far = site.collector.ads.pop(("StageOutManager", "m1"))
    ask = site.collector.query_reports
    other = OtherPoolSnapshot([far], 100.0, site.clock.monotonic_s(), True)
    site.collector.query_reports = lambda: ask()._replace(others={"far": other})  # type: ignore[method-assign]
    site.passes(2)
    found = readings_of(site.agent)
    assert found["stageout_agent_reports",] == 1
    assert {found["stageout_pool_matters", kind.value] for kind in Kind} == {0}


def test_output_in_the_name_of_a_job_of_another_owner_is_a_matter(site: Site) -> None:
    site.agent.notice_interval_s = 0.0
    site.complete()
    site.report(State.ACCEPTED)
    site.queue.found[JOB] = replace(site.job, user="bob@test")
    site.passes(3)
    notices = (payload_of(ad) for (kind, _), ad in site.collector.ads.items() if kind == AGENT_AD)
    (told,) = identities_in(max(map(read_notice, notices), key=lambda one: one.sent_at))
    assert (told.owner, told.what, told.jobs) == (USER, "output", ("7.0",))


def _flow(host: str) -> FlowReport:
    return FlowReport(
        f"https://{host}", 100, files_waiting=2, bytes_waiting=20, files_moving=1, bytes_moving=10, limit=4
    )


def test_shares_of_the_pool(site: Site) -> None:
    site.report(State.MOVING)
    box = read_report(site.collector.ads["StageOutManager", "m1"]["StageOutPayload"]).sandboxes[0]
    accepted = {State.MOVING: 1500, State.FAILED: 1000, State.DELIVERED: 900, State.CONFIRMED: 0}
    boxes = tuple(replace(box, state=state.value, accepted_at=at) for state, at in accepted.items())
    reports = [
        Report("m1", "", 1, 1999, {}, 20, boxes, full_since=1, handoffs=10, handoffs_refused={"SpoolFull": 3}),
        Report("m2", "", 1, 1999, {}, 20, handoffs=5), Report("m3", "", 1, 1000, {}, 20),
    ]  # fmt: skip
    found = Readings()
    put_pool(found, reports, 2000, {"m3", "gone"})
    values = {(metric.name, *labels): value for metric, series in found.items() for labels, value in series.items()}
    assert values["stageout_pool_silent_nodes",] == 2, "m3 counts once"
    assert values["stageout_pool_full_nodes",] == 1
    assert values["stageout_pool_handoffs", "accepted"] == 12
    assert values["stageout_pool_handoffs", "refused"] == 3
    assert values["stageout_pool_oldest_undelivered_age_seconds",] == 500


def test_one_user_s_servers_do_not_hide_those_of_others(site: Site) -> None:
    site.report(State.MOVING)
    box = read_report(site.collector.ads["StageOutManager", "m1"]["StageOutPayload"]).sandboxes[0]
    [file] = box.files or (FileReport("a", "https://small/a", 1, "Moving"),)
    flows = tuple(replace(_flow(f"evil{number}"), bytes_waiting=10**9) for number in range(1000))
    mine = replace(box, owner="bob@x", files=(file,))
    others = tuple(replace(box, owner="mallory@x", files=(replace(file, url=f"https://evil{number}/x"),))
                   for number in range(1000))  # fmt: skip
    found = Readings()
    put_pool(found, [Report("m1", "", 1, 1999, {}, 20, (*others, mine), flows=(*flows, _flow("small")))], 2000)
    text = rendered(found, with_process=False).decode()
    assert 'stageout_pool_destination_bytes{destination="small",state="waiting"} 20.0' in text
    assert text.count("stageout_pool_destination_rate_bytes_per_second{") == 21


def test_sums_over_the_pool_are_bounded_and_survive_hostile_reports(site: Site) -> None:
    server = ServerReport("https://h1", "open", "refused", 1, 1, 1)
    reports = [
        Report(f"m{number}", "", 1, 1000, {}, 20, servers=(server,) if number < 3 else (), ends_in_s=int(number == 5),
               flows=(_flow(f"u:p@h{number}/x?t=1"), _flow("all")), data_slots=3, spool_bytes=5, spool_limit_bytes=10)
        for number in range(200)
    ]  # fmt: skip
    reports.append(Report("odd", "", 1, 1700, {}, 0, flows=(_flow("\ud800"),)))
    site.report(State.MOVING)
    odd = read_report(site.collector.ads["StageOutManager", "m1"]["StageOutPayload"]).sandboxes[0]
    reports.append(Report("odd2", "", 1, 1700, {}, 0, (replace(odd, state="Invented\ud800"),)))
    found = Readings()
    put_pool(found, reports, 2000)
    put_pool_matters(found, reports, Letters(), 2000)
    text = rendered(found, with_process=False).decode()
    assert "stageout_pool_silent_nodes 200.0" in text, "reports of second 1000 are old"
    assert 'stageout_pool_destination_nodes{destination="all"} 200.0' in text
    assert text.count("stageout_pool_destination_bytes{") == 2 * 21
    assert 'stageout_pool_destination_files{destination="all",state="waiting"} 400.0' in text
    assert 'stageout_pool_destination_bytes{destination="all",state="moving"} 2000.0' in text
    assert 'stageout_pool_destination_rate_bytes_per_second{destination="all"} 20000.0' in text
    assert 'stageout_pool_destination_unreachable_nodes{destination="h1"} 3.0' in text
    assert 'stageout_pool_nodes{state="reporting"} 201.0' in text
    assert 'stageout_pool_nodes{state="ending"} 1.0' in text
    assert "stageout_pool_bytes_at_risk 4000.0" in text
    assert "stageout_pool_spool_limit_bytes 2000.0" in text
    for secret in ("u:p", "?t", "Invented", "alice"):
        assert secret not in text
