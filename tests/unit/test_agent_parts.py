"""Leases, orders, receipts and reports of the schedd agent."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from schedd_agent.collector import collector_age_s_of
from schedd_agent.decisions import _confirmation
from schedd_agent.liveness import SETTLE_S, LivenessTracker
from schedd_agent.model import DagEnd, SendOrder
from schedd_agent.orders import REFRESH_S, OrderNumbers, OrderOutbox
from schedd_agent.queue import CondorJobQueue, parse_job
from schedd_agent.receipts import _tickets
from schedd_agent.reports import ReportTable
from stageout.core import dagman
from stageout.core.signing import SigningKey
from stageout.core.states import State
from stageout.model.job import Status
from stageout.model.run import Ticket, manager_identity
from stageout.wire.custody import (
    Action,
    JobKey,
    Order,
    OrderSheet,
    Report,
    SandboxReport,
    orders_ad,
    payload_of,
    read_orders,
    report_ad,
)
from stageout.wire.typed import MOST_NUMBER

JOB = "ap#7.0#1700000000"
USER = "alice@test"
JOB_KEY = JobKey(JOB, USER)


# ---- leases -------------------------------------------------------------------------------------------------------


def test_a_collector_whose_own_ad_has_expired_has_not_been_started_again() -> None:
    """Its ad lives as long as others, and it renews it as seldom."""
    view = LivenessTracker(hole_s=15.0)
    view.record_snapshot(0.0, 1000.0, [("m1", JOB_KEY)], ["m1"])
    view.record_snapshot(10.0, None, [])
    view.record_snapshot(20.0, None, [])
    view.record_snapshot(30.0, 1030.0, [])
    assert view.silent_s("m1") == 30.0
    view.record_snapshot(40.0, 5.0, [])
    view.record_snapshot(50.0, 15.0, [])
    assert view.silent_s("m1") == 30.0, "it was started again"
    assert (collector_age_s_of([]), collector_age_s_of([{}]), collector_age_s_of([{"MonitorSelfAge": 7}])) == (
        None,
        0,
        7,
    )


def _view(until_s: int, shown: tuple[tuple[str, JobKey], ...] = ()) -> LivenessTracker:
    view = LivenessTracker(hole_s=15.0)
    view.record_snapshot(0.0, 1000.0, shown)
    view.start_waiting(JOB_KEY, 1)
    for now in range(10, until_s + 1, 10):
        view.record_snapshot(float(now), 1000.0 + now, ())
    return view


def test_silence_counts_from_the_last_sign() -> None:
    view = _view(100)
    assert view.absent_s("m1", JOB_KEY, 1) == 100.0
    view.record_snapshot(110.0, 1110.0, [("m1", JOB_KEY)], ["m1", "m3"])
    view.record_snapshot(120.0, 1120.0, [])
    assert view.absent_s("m1", JOB_KEY, 1) == 10.0
    assert view.absent_s("m2", JOB_KEY, 1) == 120.0
    assert (view.silent_s("m1"), view.silent_s("m3"), view.silent_s("m2")) == (10.0, 10.0, 120.0)


@pytest.mark.parametrize("hole", ["late", "failed", "collector restarted"])
def test_a_hole_in_the_view_is_not_counted_and_takes_nothing_away(hole: str) -> None:
    view = _view(100)
    after_s = 116.0
    if hole == "late":
        view.record_snapshot(after_s, 1116.0, [])
    elif hole == "failed":
        view.record_failure()
        view.record_snapshot(112.0, 1112.0, [])
        after_s = 112.0
    else:
        view.record_snapshot(110.0, 3.0, [])
        view.record_snapshot(116.0, 9.0, [])
        for now in range(120, 1011, 10):
            view.record_snapshot(float(now), now - 107.0, [])
        after_s = 110.0 + SETTLE_S
    assert view.absent_s("m1", JOB_KEY, 1) == 100.0
    view.record_snapshot(after_s + 10.0, 5000.0, [])
    assert view.absent_s("m1", JOB_KEY, 1) == 110.0


def test_a_short_lease_waits_for_reports_as_long_as_itself_after_a_restart_of_the_collector() -> None:
    view = LivenessTracker(hole_s=15.0, lease_s=60.0)
    view.start_waiting(JOB_KEY, 1)
    for now in range(0, 200, 10):
        view.record_snapshot(float(now), now - 50.0 if now >= 50 else 1000.0 + now, ())
    assert view.absent_s("m1", JOB_KEY, 1) == 40.0 + (190.0 - 110.0)


def test_a_collector_that_stumbles_now_and_then_does_not_postpone_a_loss_for_ever() -> None:
    view = LivenessTracker(hole_s=15.0)
    view.start_waiting(JOB_KEY, 1)
    for now in range(0, 3000, 10):
        if now % 100:
            view.record_snapshot(float(now), 1000.0 + now, ())
        else:
            view.record_failure()
    assert view.absent_s("m1", JOB_KEY, 1) > 2000.0


def test_a_run_waits_from_its_own_beginning() -> None:
    view = _view(90)
    view.start_waiting(JOB_KEY, 2)
    view.record_snapshot(100.0, 1100.0, ())
    assert view.waited_s(JOB_KEY, 2) == 10.0
    assert view.absent_s("m1", JOB_KEY, 2) == 10.0
    assert view.waited_s(JobKey("ap#8.0#1", USER), 1) == 0.0


# ---- orders -------------------------------------------------------------------------------------------------------


def test_numbers_are_never_used_twice(tmp_path: Path) -> None:
    path = tmp_path / "number"
    first = OrderNumbers(path, 1000.0)
    used = [*first.take(2), *first.take(1)]
    again = OrderNumbers(path, 5.0)
    used += [*again.take(1500), *again.take(1)]
    used += OrderNumbers(path, 5.0).take(1)
    assert used == sorted(set(used))


def test_numbers_that_were_lost_begin_above_all_that_was_used(tmp_path: Path) -> None:
    path = tmp_path / "number"
    old = OrderNumbers(path, 1000.0)
    last = old.take(50)[-1]
    path.unlink()
    assert OrderNumbers(path, 1010.0).take(1)[0] > last


def test_numbers_that_were_lost_are_acknowledged_under_another_name(tmp_path: Path) -> None:
    """The clock may have been set back: managers would take the new numbers for old orders."""
    before = OrderOutbox("ap", OrderNumbers(tmp_path / "number", 1000.0))
    before.add([(JOB_KEY, SendOrder("m1", Action.CONFIRM, 1))])
    assert OrderOutbox("ap", OrderNumbers(tmp_path / "number", 5.0)).numbering == before.numbering
    (tmp_path / "number").unlink()
    assert OrderOutbox("ap", OrderNumbers(tmp_path / "number", 5.0)).numbering != before.numbering


def test_sheets_say_what_was_heard_and_keep_leases_alive(tmp_path: Path) -> None:
    book = OrderOutbox("ap", OrderNumbers(tmp_path / "number", 1.0), lease_s=600.0)
    (sheet,) = book.due(0.0, 50.0, {"m1": 7, "m2": 8}, {"m1"})
    assert (sheet.manager, sheet.heard, sheet.lease_s) == ("m1", 7, 600.0)
    book.published(sheet, 0.0)
    assert not book.due(99.0, 50.0, {"m1": 8}, {"m1"})
    assert [sheet.heard for sheet in book.due(100.0, 50.0, {"m1": 8}, {"m1"})] == [8]
    assert not book.due(100.0, 50.0, {"m1": 8}, set())


def test_a_manager_with_a_short_lease_gets_sheets_more_often(tmp_path: Path) -> None:
    book = OrderOutbox("ap", OrderNumbers(tmp_path / "number", 1.0), lease_s=5400.0)
    for sheet in book.due(0.0, 50.0, {"m1": 7, "m2": 7}, {"m1", "m2"}):
        book.published(sheet, 0.0)
    assert not book.due(9.9, 50.0, {}, {"m1", "m2"}, promised_s={"m2": 60})
    assert [one.manager for one in book.due(10.0, 50.0, {}, {"m1", "m2"}, promised_s={"m2": 60})] == ["m2"]


def test_a_manager_without_a_lease_gets_a_sheet_at_once(tmp_path: Path) -> None:
    """A restarted manager sends nothing before it has one."""
    book = OrderOutbox("ap", OrderNumbers(tmp_path / "number", 1.0), lease_s=7200.0)
    (sheet,) = book.due(0.0, 50.0, {"m1": 7}, {"m1"})
    book.published(sheet, 0.0)
    assert not book.due(1.0, 50.0, {"m1": 8}, {"m1"})
    assert [sheet.heard for sheet in book.due(1.0, 50.0, {"m1": 8}, {"m1"}, {"m1"})] == [8]


def _book(tmp_path: Path) -> OrderOutbox:
    return OrderOutbox("ap", OrderNumbers(tmp_path / "number", 1.0))


def test_the_same_order_is_given_once(tmp_path: Path) -> None:
    book = _book(tmp_path)
    order = SendOrder("m1", Action.CONFIRM, 1, ("t1",), 2)
    assert book.add([(JOB_KEY, order)])
    assert not book.add([(JOB_KEY, order)])
    assert book.add([(JOB_KEY, SendOrder("m1", Action.CONFIRM, 1, ("t1", "t2"), 3))])
    ((_, kept),) = book.open.items()
    assert kept.tickets == ("t1", "t2")
    assert [key.job for key in book.acknowledged("m1", kept.number)] == [JOB_KEY]
    assert not book.add([(JOB_KEY, order)])
    assert book.done(JOB_KEY) == {("m1", Action.CONFIRM, 1)}


def test_a_request_can_be_made_again(tmp_path: Path) -> None:
    book = _book(tmp_path)
    retry = SendOrder("m1", Action.RETRY, 1)
    book.add([(JOB_KEY, retry)])
    book.acknowledged("m1", 10**15)
    assert not book.add([(JOB_KEY, retry)])
    book.allow_again(JOB_KEY)
    assert book.add([(JOB_KEY, retry)])


def test_a_redirect_with_another_id_is_another_order(tmp_path: Path) -> None:
    book = _book(tmp_path)
    first, second = (SendOrder("m1", Action.REDIRECT, 1, (), 0, 0, name, "https://h/d/", "a") for name in ("r1", "r2"))
    book.add([(JOB_KEY, first)])
    (sheet,) = book.due(0.0, 50.0, {}, set())
    (order,) = sheet.orders
    assert (order.request, order.new_url, order.only_file) == ("r1", "https://h/d/", "a")
    book.acknowledged("m1", order.number)
    assert book.requests_done(JOB_KEY) == {("m1", 1, "r1")}
    assert not book.add([(JOB_KEY, first)])
    assert book.add([(JOB_KEY, second)])
    (sheet,) = book.due(0.0, 50.0, {}, set())
    book.published(sheet, 0.0)
    book.allow_again(JOB_KEY)
    assert not book.requests_done(JOB_KEY)
    (sheet,) = book.due(0.0, 50.0, {}, set())
    assert sheet.orders == (), "its request is gone"


def test_sheets_are_repeated_until_acknowledged(tmp_path: Path) -> None:
    book = _book(tmp_path)
    book.add([(JOB_KEY, SendOrder("m1", Action.CANCEL, 1))])
    (sheet,) = book.due(0.0, 50.0, {}, set())
    assert (sheet.agent, sheet.manager, sheet.sent_at, len(sheet.orders)) == ("ap", "m1", 50, 1)
    assert book.due(0.0, 50.0, {}, set()), "not published yet"
    book.published(sheet, 0.0)
    assert not book.due(1.0, 51.0, {}, set())
    assert book.due(REFRESH_S, 51.0, {}, set())
    book.acknowledged("m1", sheet.orders[0].number)
    (empty,) = book.due(2.0, 52.0, {}, set())
    assert empty.orders == ()
    book.published(empty, 2.0)
    assert not book.due(10 * REFRESH_S, 60.0, {}, set())


def test_orders_about_forgotten_jobs_are_taken_back(tmp_path: Path) -> None:
    book = _book(tmp_path)
    book.add([(JOB_KEY, SendOrder("m1", Action.FORGET, 1))])
    (sheet,) = book.due(0.0, 0.0, {}, set())
    book.published(sheet, 0.0)
    book.keep_only(set())
    assert not book.open
    assert [sheet.orders for sheet in book.due(0.0, 0.0, {}, set())] == [()]


# ---- reports ------------------------------------------------------------------------------------------------------


KEY = SigningKey(b"k" * 32)


def _box(state: State, change: int, job: str = JOB) -> SandboxReport:
    return SandboxReport(job, 1, USER, state.value, change, "", 0, ("t1",), 2, 2, 5, 5, 0, 0, 0, 0)


def _ad(number: int, *boxes: SandboxReport, manager: str = "m1", **more: Any) -> dict[str, Any]:
    return {**report_ad(Report(manager, KEY.public, number, 1, {"ap": number}, 0, boxes), KEY), **more}


def test_the_newest_report_counts_whatever_door_it_came_through() -> None:
    board = ReportTable("ap")
    slot = {**_ad(5, _box(State.MOVING, 3)), "MyType": "Machine", "Name": "slot1@ep1"}
    assert len(board.update([_ad(4, _box(State.ACCEPTED, 1)), slot])) == 2
    assert board.by_job()[JOB_KEY][0].sandbox.state == State.MOVING
    assert board.acknowledged("ap") == {manager_identity("m1", KEY.public): 5}
    assert not board.update([_ad(4, _box(State.ACCEPTED, 1))])
    assert board.by_job()[JOB_KEY][0].sandbox.state == State.MOVING


def test_the_promise_of_the_newest_report_counts_after_its_ad_has_expired() -> None:
    board, identity = ReportTable("ap"), manager_identity("m1", KEY.public)

    def say(number: int, lease_s: int) -> None:
        board.update([report_ad(Report("m1", KEY.public, number, 1, {}, 0, lease_s=lease_s), KEY)])

    say(2, 60)
    say(1, 30)
    board.update([])
    assert board.promised_s == {identity: 60}
    say(3, 0)
    assert board.promised_s == {}


def test_a_promise_without_a_signature_is_none() -> None:
    board = ReportTable("ap")
    board.update([report_ad(Report("m1", "", 1, 1, {}, 0, lease_s=60))])
    assert list(board.numbers) == [manager_identity("m1", "")]
    assert board.promised_s == {}


def test_states_do_not_go_back() -> None:
    board = ReportTable("ap")
    board.update([_ad(1, _box(State.DELIVERED, 7))])
    board.update([_ad(2, _box(State.MOVING, 6))])
    assert board.by_job()[JOB_KEY][0].sandbox.state == State.DELIVERED


def test_a_manager_without_an_ad_shows_nothing() -> None:
    board = ReportTable("ap")
    board.update([_ad(1, _box(State.MOVING, 1))])
    assert list(board.reported_jobs()) == [(manager_identity("m1", KEY.public), JOB_KEY)]
    board.update([])
    assert list(board.reported_jobs()) == []
    assert board.by_job() == {}


def test_jobs_of_other_schedds_and_nonsense_are_left_out() -> None:
    board = ReportTable("ap")
    board.update(
        [
            _ad(1, _box(State.MOVING, 1, "other#7.0#1"), _box(State.MOVING, 1, "ap#evil"), _box(State.MOVING, 1)),
            {"MyType": "StageOutManager", "Name": "x", "StageOutPayload": json.dumps({"manager": "x"})},
            {"MyType": "StageOutManager", "Name": "y"},
            _ad(9, _box(State.LOST, 9), Name="m2"),
        ]
    )
    assert list(board.by_job()) == [JOB_KEY]
    assert board.by_job()[JOB_KEY][0].sandbox.state == State.MOVING


@pytest.mark.parametrize("job", [f"ap#{'7' * 5000}.0#1", f"ap#7.{'1' * 11}#1", "ap#\u0667.0#1"])
def test_ids_that_no_schedd_gives_are_left_out(job: str) -> None:
    board = ReportTable("ap")
    board.update([_ad(1, _box(State.MOVING, 1, job), _box(State.MOVING, 1))])
    assert list(board.by_job()) == [JOB_KEY]


# ---- the queue's ads ----------------------------------------------------------------------------------------------


def test_a_job_is_read_from_an_ad_of_any_release() -> None:
    ad = {
        "GlobalJobId": JOB, "ClusterId": 7, "ProcId": 0, "JobStatus": 5, "NumShadowStarts": 2, "HoldReasonCode": 12,
        "HoldReasonSubCode": 20072, "TransferOutputStats": {"STAGEOUTFilesCountLastRun": 2}, "StageOutState": "Failed",
        "StageOutBytesLeft": 5.0, "StageOutRequest": "retry", "StageOutAttempts": None,
    }  # fmt: skip
    job = parse_job(ad, candidate=True)
    assert job.held_by_us
    assert job.has_final_handoff
    assert (job.run, job.handed_off, job.request, job.ad_state.state, job.ad_state.bytes_left) == (
        2,
        2,
        "retry",
        "Failed",
        5,
    )


def test_no_number_of_a_job_makes_the_orders_about_all_others_unreadable() -> None:
    """A user can give a priority of any size, and receipts are what a job says."""
    for said, taken in ((1e30, MOST_NUMBER), (-1e30, -MOST_NUMBER), (float("inf"), 0), (float("nan"), 0)):
        assert parse_job({"GlobalJobId": JOB, "JobPrio": said}, candidate=True).priority == taken
    huge = [Ticket(f"t{one}", "m1", "", MOST_NUMBER, 0) for one in range(2)]
    send = _confirmation("m1", 1, huge, MOST_NUMBER)
    sheet = OrderSheet("ap", "m1", 0, (Order(1, send.action, JOB, 1, send.tickets, send.files, send.priority),))
    assert read_orders(payload_of(orders_ad(sheet))) == sheet


@pytest.mark.parametrize("said", [b'Ticket = "t\xff"; ManagerName = "m"', b'Ticket = "t"; ManagerName = "m\xff"'])
def test_receipts_that_fit_into_no_ad_are_none(said: bytes) -> None:
    assert not list(_tickets(b"{ [ DeveloperData = [ StageOutReceipt = [ " + said + b" ] ] ] }"))


def test_a_hold_by_policy_counts_as_an_end_only_at_the_exit() -> None:
    ad = {"GlobalJobId": JOB, "JobStatus": 5, "HoldReasonCode": 3}
    assert parse_job(ad, candidate=True).ended
    assert not parse_job(ad, candidate=False).ended


_NODE = {
    "GlobalJobId": JOB, "JobStatus": 3, "DAGManJobId": 5, "TerminationPending": True, "NumShadowStarts": 1,
    "RemoveReason": "DAG Abort: DAG is exiting and writing rescue file. (by user alice)",
}  # fmt: skip


def test_a_completed_node_that_dagman_removed_counts_as_completed() -> None:
    kept = parse_job(_NODE, candidate=True)
    assert (kept.status, kept.is_kept) == (Status.COMPLETED, True)
    without_dag = {name: value for name, value in _NODE.items() if name != "DAGManJobId"}
    for ad in (
        {**_NODE, "RemoveReason": "via condor_rm (by user alice)"},
        {**_NODE, "RemoveReason": "its DAG was removed (by user condor)"},
        {**_NODE, "RemoveReason": "not needed: DAG Abort (by user alice)"},
        {**_NODE, "TerminationPending": False},
        without_dag,
    ):
        job = parse_job(ad, candidate=True)
        assert (job.status, job.is_kept) == (Status.REMOVED, False), ad


_COPY = {
    "GlobalJobId": JOB, "User": "alice@test", "ClusterId": 7, "ProcId": 0, "JobStatus": 3, "NumShadowStarts": 1,
    "RoutedBy": "jobrouter", "TerminationPending": True,
    "RemoveReason": "JobRouter aborted job (by user condor)",
}  # fmt: skip
_NO_KEPT_COPIES = [
    {**_COPY, "RemoveReason": "via condor_rm (by user alice)"},
    {**_COPY, "RemoveReason": "unlike a JobRouter (by user alice)"},
    {**_COPY, "TerminationPending": False},
    {name: value for name, value in _COPY.items() if name != "RoutedBy"},
]


def test_a_completed_copy_that_a_jobrouter_removed_counts_as_completed_in_the_history() -> None:
    kept = parse_job(_COPY, candidate=True)
    assert (kept.status, kept.is_kept_copy) == (Status.REMOVED, True)
    assert not parse_job({**_COPY, "JobStatus": 4}, candidate=True).is_kept_copy
    for ad in _NO_KEPT_COPIES:
        assert not parse_job(ad, candidate=True).is_kept_copy, ad
    for ads, status in [([_COPY], Status.COMPLETED), *(([ad], Status.REMOVED) for ad in _NO_KEPT_COPIES)]:
        found = _Left(ads).history_records([kept.key])
        assert found[kept.key].status == status, ads
        assert found[kept.key].wants_nothing is (status == Status.REMOVED)


_FIRED = "removed because <OtherJobRemoveRequirements = DAGManJobId =?= 16> fired when job (16.0) was removed"


class _History(CondorJobQueue):
    """A queue in which no DAG runs any more."""

    def __init__(self, ads: Sequence[dict[str, Any]]) -> None:
        self._ads = ads

    def _query(self, constraint: str, projection: Iterable[str] = (), **options: Any) -> list[dict[str, Any]]:
        return []

    def _query_history(self, jobs: list[str]) -> Iterator[dict[str, Any]]:
        return (ad for ad in self._ads if f"ClusterId == {ad['ClusterId']} && ProcId == 0" in jobs)


class _Left(_History):
    """A history with these jobs, whatever is asked."""

    def _query_history(self, ids: list[str]) -> Iterator[dict[str, Any]]:
        return iter(self._ads)


@pytest.mark.parametrize(
    ("above", "end"),
    [
        ({"JobStatus": 4}, DagEnd.ENDED),
        ({"JobStatus": 3, "RemoveReason": "via condor_rm (by user alice)"}, DagEnd.REMOVED),
    ],
)
@pytest.mark.parametrize("reason", [_FIRED, "DAG Abort: DAG is exiting and writing rescue file. (by user alice)"])
def test_a_sub_dag_that_was_removed_with_the_dag_above_ends_as_that_one(
    reason: str, above: dict[str, Any], end: DagEnd
) -> None:
    """The schedd replaces DAGMan's reason when the DAG above leaves before the sub-DAG does."""
    below = {"ClusterId": 17, "JobStatus": 3, "DAGManJobId": 16, "RemoveReason": reason}
    assert _History([{"ClusterId": 16, **above}, below]).dags({17}) == {17: end}


def test_the_queue_keeps_the_nodes_that_the_agent_takes_for_completed() -> None:
    text = (Path(__file__).parents[2] / "condor_config.d/20-stageout-ap.conf").read_text()
    assert f'regexp("{dagman.REASON}", RemoveReason ?: "")' in text
